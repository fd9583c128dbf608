"""Define each number in a line of metrics.jsonl, and reduce it to one number a step.

This table is the one list of all metrics; `train_grpo.Log` writes a few. The glossary of the help,
the log, the merge over updates and the order of an audit's rows come from it. Causes precede their
effects.

Equations have their numbers in objectives.py.
"""

import contextlib
import re
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist


class Metric(NamedTuple):
    """What a metric is, and how it is reduced to one number of a step."""

    text: str  # its definition, for the help
    over_updates: str = ""  # of an optimizer step: mean | max | sum | first; "": once a step
    over_tokens: str = ""  # of a sampled token: mean | sum | max
    of: Callable | None = None  # of(t): its value (N,) from the `TokenTerms` t, or None

    def reduce(self, values):
        """Return one number for the values of a step's updates."""
        if self.over_updates == "first":
            return values[0]
        if self.over_updates == "sum":
            return sum(values)
        return float({"mean": np.mean, "max": np.max}[self.over_updates](values))  # or NaN


METRICS = {
    "reward/mean": Metric("reward of the step's rollouts"),
    "reward/solved": Metric("fraction of them with a reward of at least 1"),
    "reward/groups_none": Metric("fraction of groups in which no rollout is solved"),
    "reward/groups_all": Metric("fraction of groups in which every rollout is solved"),
    "reward/groups_equal": Metric(
        "fraction of groups of equal rewards; gae, none_batch: 1 if all are equal"),
    "reward/values": Metric("how many different rewards the rollouts have that end in time"),
    "tokens/generated": Metric("sampled tokens"),
    "tokens/truncated_fraction": Metric("of rollouts, that met max_new_tokens"),
    "length/rollout_mean": Metric("sampled tokens of a rollout"),
    "length/max": Metric("the same of the longest"),
    "eval/solved_before": Metric("eval/solved before the first step; in line 0"),
    "logprob_gap/max": Metric(
        "|trainer - sampler| of log-probs; with staleness K of K steps", "first", "max",
        lambda t: t.gap_N.abs()),
    "logprob_gap/mean": Metric("the same", "first", "mean", lambda t: t.gap_N.abs()),
    "logprob_gap/identical": Metric(
        "fraction of them that are 0, to the bit", "first", "mean", lambda t: t.gap_N == 0),
    "logprob_gap/kl": Metric(
        "KL(sampler, trainer) per token, by k3", "first", "mean",
        lambda t: torch.expm1(t.gap_N) - t.gap_N),
    "value/token_mean": Metric("with gae: v before the step"),
    "value/explained_variance": Metric("with gae: 1 - Var(g - v) / Var(g) over the step's tokens"),
    "advantage/token_mean": Metric("A of (1) over the sampled tokens that are trained on"),
    "advantage/token_std": Metric("its standard deviation"),
    "lr": Metric("the learning rate of the step"),
    "critic/lr": Metric("the same of the critic"),
    "policy_age/update_mean": Metric("optimizer steps from the sampler's weights to an update"),
    "policy/age_mean": Metric("steps of the loop from the sampler's weights to the batch"),
    "policy/age_max": Metric("the largest of these"),
    "ratio/token_mean": Metric("r of (2), with gspo s", "mean", "mean", lambda t: t.ratio_N),
    "ratio/max": Metric("the largest of them in all updates", "max", "max", lambda t: t.ratio_N),
    "ratio/clipped_fraction": Metric(
        "of sampled tokens, whose gradient (3) bounds", "mean", "mean", lambda t: t.clipped_N),
    "importance/masked_fraction": Metric(
        "of sampled tokens, whose x of (4) is 0", "mean", "mean",
        lambda t: None if t.x_N is None else t.x_N == 0),
    "entropy/token_mean": Metric("H at `temperature`", "mean", "mean", lambda t: t.entropy_N),
    "kl/token_mean": Metric("with a reference: k of (5)", "mean", "mean", lambda t: t.kl_N),
    "value/loss": Metric("with gae: (6), per sampled token", "mean", "mean"),
    "loss/policy_token_mean": Metric(
        "loss/token_mean without (5)", "mean", "sum", lambda t: t.policy_part_N),
    "loss/token_mean": Metric(
        "(7) under any aggregation, so over its Z", "mean", "sum", lambda t: t.part_N),
    "experts/load_max": Metric("an expert's tokens / their mean; of layers and updates", "max"),
    "grad_norm": Metric("global, before clipping", "mean"),
    "critic/grad_norm": Metric("the same of the critic", "mean"),
    "policy_version": Metric("optimizer steps taken so far"),
    "updates/skipped": Metric("optimizer steps skipped so far for a non-finite gradient"),
    "tokens/trained": Metric("tokens run with gradients; of a tree its own tokens", "sum"),
    "tokens/trained_flat": Metric("the same without a tree", "sum"),
    "eval/solved": Metric("greedy, on held-out prompts; at evaluation steps and in the last line"),
    "memory/peak": Metric("megabytes at most: of tensors on CUDA, of the process on a CPU"),
    "seconds/rollout": Metric("sampling the batch"),
    "seconds/wait_rollout": Metric("training stood still for the batch"),
    "seconds/wait_train": Metric("sampling stood still for weights"),
    "seconds/push": Metric("giving the sampler new weights"),
    "seconds/train": Metric("what was none of sampling, pushing and evaluating"),
    "seconds/eval": Metric("evaluating"),
    "seconds/total": Metric("the step"),
}  # fmt: skip


def glossary() -> str:
    """Return the metrics and their definitions, for the help."""
    lines = ["Metrics, one line of metrics.jsonl for each step. Every denominator is global.",
             "A mean, or the largest, of several updates also has the first one's, NAME_first.", ""]
    indent = dict(subsequent_indent=" " * 30, width=100)
    for name, metric in METRICS.items():
        more = {"mean": "; mean of updates", "first": "; first update"}.get(metric.over_updates, "")
        lines.append(textwrap.fill(f"  {name:<27} {metric.text}{more}", **indent))
    return "\n".join(lines)


@torch.no_grad()
def measured(t) -> dict:
    """Return the sum, or the largest, of each metric over tokens, and the number of tokens."""
    sums = {"tokens": t.lp_N.new_tensor(len(t.lp_N), dtype=torch.float64)}
    for name, metric in METRICS.items():
        x_N = metric.of(t) if metric.of else None
        if x_N is not None:
            if metric.over_tokens not in ("mean", "sum", "max") or not metric.over_updates:
                raise ValueError(f"metric {name}: expected over_tokens of mean, sum or max, and "
                                 f"over_updates, got {metric.over_tokens!r}, "
                                 f"{metric.over_updates!r}")  # fmt: skip
            if x_N.shape != t.lp_N.shape:
                raise ValueError(f"metric {name}: expected a value of shape "
                                 f"{tuple(t.lp_N.shape)}, got {tuple(x_N.shape)}")  # fmt: skip
            x_N = x_N.double()
            sums[name] = x_N.sum()
            if metric.over_tokens == "max":  # 0 without a token
                sums[name] = torch.cat([x_N, x_N.new_zeros(1)]).max()
    return sums


def merged_sums(parts) -> dict:
    """Merge dicts of `measured`, of numbers: add sums up, and take the largest of the largest."""
    totals = {}
    for part in parts:
        for name, x in part.items():
            is_max = name in METRICS and METRICS[name].over_tokens == "max"
            total = totals.get(name, 0)
            totals[name] = float(np.maximum(total, x)) if is_max else total + x
    return totals


def loss_metrics(totals) -> dict:
    """Return metrics of a whole batch from its sums and maxima, all numbers.

    A metric without a sum is left out: a run without a reference has no KL.
    """
    # Means are over sampled tokens, not over sequences, micro-batches or ranks, whatever the
    # aggregation; the loss keeps its name in all of them.
    count = max(totals["tokens"], 1.0)
    return {
        name: totals[name] / count if METRICS[name].over_tokens == "mean" else totals[name]
        for name in METRICS if name in totals
    }  # fmt: skip


def mean_metrics(updates) -> dict:
    """Merge the metrics of a step's updates by METRICS."""
    # The gap to the sampler is the first update's: only the first update sees the weights that
    # sampled, so only there is the gap rounding and not learning. What the first update measured is
    # also written alone: an audit can then tell a wrong loss from its effect on the weights.
    out = {}
    for name, metric in METRICS.items():
        values = [update[name] for update in updates if metric.over_updates and name in update]
        if values:
            out[name] = metric.reduce(values)
        if len(values) > 1 and metric.over_updates in ("mean", "max"):
            out[f"{name}_first"] = values[0]
    return out


class StepClock:
    """Measure the seconds and memory of a step. The batch source starts it, the log reads it."""

    def __init__(self, device):
        self.device = device
        self.start()

    def start(self):
        """Begin a step."""
        self.seconds = {}
        self.began = time.perf_counter()
        # Linux forgets a process's peak when a 5 is written here. Where it does not, the peak since
        # the process began is reported: a bound.
        if "cuda" in str(self.device):
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def read(self) -> dict:
        """Return the seconds of all phases, and the peak of memory, as metrics. Collective.

        memory/peak: the most megabytes at any moment, of the rank that had most: of its tensors on
        CUDA, of the process on a CPU.
        """
        # The time outside of sampling, pushing and evaluating is training.
        total = time.perf_counter() - self.began
        train = total - sum(self.seconds.values())
        peak = resident_peak()
        if "cuda" in str(self.device):
            peak = torch.cuda.max_memory_allocated(self.device) / 1e6
        most = torch.tensor(peak, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        totals = {"seconds/train": train, "seconds/total": total, "memory/peak": most.item()}
        return self.seconds | totals


@contextlib.contextmanager
def timed(seconds, phase):
    """Add the seconds of a phase to a dict, under seconds/PHASE."""
    key = f"seconds/{phase}"
    start = time.perf_counter()
    yield
    seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - start


def resident_peak() -> float:
    """Return the most megabytes that this process has had in memory; 0 if the system hides it."""
    # Linux reports kB, other systems a unit of their own.
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        match = re.search(r"VmHWM:\s+(\d+)", status)
        return int(match[1]) * 1024 / 1e6 if match else 0.0
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return 0.0
