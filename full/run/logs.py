"""Log the metrics and the rollouts of a run, and draw curves of what runs have logged.

Each class has a method `step`, which is called after each step. `run.run` puts them in order.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from full.learn.advantages import compared_by
from full.learn.batches import gather_groups
from full.learn.metrics import METRICS, mean_metrics
from full.ranks.joining import say, warn
from full.run.directory import RunDirectory


def step_metrics(trainer, batch, metrics, updates, step) -> dict:
    """Merge all metrics of a step except seconds and the evaluation."""
    line = batch.metrics | metrics | mean_metrics(updates) | {
        "policy_version": trainer.policy_version, "updates/skipped": trainer.skipped,
    } | trainer.rates(trainer.learning_rate(step))  # fmt: skip
    if not updates:
        text = "no update, since nothing was left to train on: every group was dropped, or every"
        warn(f"step {step}: {text} rollout was truncated and filtered")
        return line | {"tokens/trained": 0, "tokens/trained_flat": 0}

    # The age of the sampler's weights at the start of each update. A skipped update makes no new
    # version of the policy.
    ages = []
    version = trainer.policy_version
    for update in reversed(updates):
        if "nonfinite" not in update:
            version -= 1
        ages.append(version - batch.sampled_by)
    return line | {"policy_age/update_mean": float(np.mean(ages))}


COLUMNS = dict(
    reward="reward/mean", solved="reward/solved", eval="eval/solved",
    truncated="tokens/truncated_fraction", norm="grad_norm", entropy="entropy/token_mean",
    clipped="ratio/clipped_fraction", gap="logprob_gap/max",
)  # fmt: skip


class Bar(tqdm):
    """A progress bar without tqdm's thread, which would outlive the run."""

    monitor_interval = 0


class Log:
    """Write a line of metrics.jsonl for each step, and print a table with a bar, on rank 0.

    callback: function of each line, a dict, on rank 0. Default: none.
    """

    EVERY = 5  # steps between rows of the table; an evaluation adds a row
    IDLE_STEPS = 3  # consecutive steps with nothing to learn from, before a warning

    def __init__(self, config, trainer, source, directory, callback=None):
        self.callback = callback
        self.trainer = trainer
        self.source = source
        self.directory = directory
        self.is_rank_0 = dist.get_rank() == 0
        self.solved_before = None  # known in the process that does step 0
        self.names = [x for name in METRICS for x in (f"{name}_first", name)]
        say("  step" + "".join(f"{name:>10}" for name in COLUMNS) + "  tokens/s")
        self.max_new_tokens = config.max_new_tokens
        self.compares = compared_by(config.advantage) != "nothing"
        self.has_warned_of_truncation = False
        self.idle = 0  # consecutive steps with nothing to learn from, up to now
        disable = None if self.is_rank_0 else True  # None: shown if standard error is a terminal
        self.bar = Bar(total=config.steps, initial=source.first_step, disable=disable,
                       unit="step", miniters=1)  # fmt: skip

    def before(self, solved):
        """Print the row before the loop: the share of prompts that the first weights solve."""
        self.solved_before = solved
        self.row("before", {"eval/solved": solved})

    def step(self, step, batch, metrics, updates, solved):
        """Write the line of a step, and print it from time to time. Collective."""
        seconds = self.source.clock.read()
        line = step_metrics(self.trainer, batch, metrics, updates, step) | seconds
        if step == 0:
            line["eval/solved_before"] = self.solved_before
        if solved is not None:
            line["eval/solved"] = solved
        if not self.is_rank_0:
            return

        self.warn(step, line)
        if unlisted := line.keys() - {*self.names}:
            raise ValueError(f"{sorted(unlisted)} are not in METRICS of full/learn/metrics.py")
        line = {name: line[name] for name in self.names if name in line}
        self.directory.append(self.directory.METRICS, [{"step": step} | line])
        if self.callback:
            self.callback({"step": step} | line)
        self.bar.set_postfix_str(f"reward {line['reward/mean']:.3f}", refresh=False)
        self.bar.update()
        if solved is not None or step % self.EVERY == 0:
            self.row(step, line)

    def warn(self, step, line):
        """Warn, on rank 0, of truncated rollouts and of equal rewards: nothing is learned."""
        truncated = line["tokens/truncated_fraction"]
        if truncated > 0.5 and not self.has_warned_of_truncation:
            self.has_warned_of_truncation = True
            warn(f"warning: step {step}: {truncated:.0%} of the rollouts were cut off after "
                 f"--max-new-tokens {self.max_new_tokens}, which earn nothing: raise it")
        # A KL or a length that is taken off equal rewards is learned from.
        is_idle = line["reward/groups_equal"] == 1 and not line.get("advantage/token_std")
        self.idle = self.idle + 1 if self.compares and is_idle else 0
        if self.idle == self.IDLE_STEPS:
            warn(f"warning: steps {step + 1 - self.idle} to {step}: in each group all rewards are "
                 f"equal, so nothing is learned")  # fmt: skip

    def close(self):
        """End the bar."""
        self.bar.close()

    def row(self, label, line):
        """Print a row of the table."""
        values = [line.get(name) for name in COLUMNS.values()]
        cells = [" " * 10 if x is None else f"{x:10.3g}" for x in values]
        if "seconds/total" in line:
            tokens = line["tokens/generated"] + line["tokens/trained_flat"]
            cells.append(f"{tokens / line['seconds/total']:10.0f}")
        say(f"{label:>6}{''.join(cells)}".rstrip())


class RolloutLog:
    """Write rollouts.jsonl, and samples.jsonl with a rollout of each evaluation."""

    def __init__(self, config, task, source, directory):
        self.config = config
        self.task = task
        self.source = source
        self.directory = directory
        self.text = None  # of the latest sample

    def step(self, step, batch, metrics, updates, solved):
        """Write the rollouts of a step that --log-rollouts selects, and its sample. Collective."""
        # A step whose sampler had a checkpoint's weights can be audited, so all of its rollouts are
        # written. So are those of the last step, and of the first step of a run or of a resumed
        # run. After an evaluation one group is written.
        c = self.config
        sampled_at = step - c.staleness
        all_groups = step in (0, c.steps - 1) or c.log_rollouts == "all"
        all_groups = all_groups or sampled_at == self.source.first_step
        if c.save_every and sampled_at >= 0:
            all_groups = all_groups or sampled_at % c.save_every == 0
        shown = self.source.shown
        if solved is not None and shown and dist.get_rank() == 0:
            self.text = self.task.show(shown.tokens)
            line = {"step": step, "reward": shown.reward, "text": self.text}
            self.directory.append(self.directory.SAMPLES, [line])
        if c.log_rollouts == "none" or not (all_groups or solved is not None):
            return
        example = batch.kept[0] if batch.kept else 0
        groups = {n: group for n, group in batch.groups.items() if all_groups or n == example}

        # Each rank has played its own groups. Rank 0 writes them in the order of their numbers, so
        # that the file does not depend on the number of ranks.
        # COMM: the conditions above are the same on all ranks, so all ranks gather or none does.
        # Pinned by tests/full/test_audit.py::test_what_an_audit_says.
        for _, group in gather_groups(groups):
            lines = [rollout_line(self.task, step, i, t) for i, t in enumerate(group)]
            self.directory.append(self.directory.ROLLOUTS, lines)


def rollout_line(task, step, number, t) -> dict:
    """Return a line of rollouts.jsonl for t, the Trajectory of rollout `number` of its group."""
    # Vectors have an entry for every target, so that a line can be read without the run.
    line = {"step": step, "group": t.group, "rollout": number, **t.to_json()}
    line["text"] = task.show(t.tokens)
    line["advantage"] = None if t.advantages is None else t.advantages.tolist()
    del line["prompt"]
    return line


@contextlib.contextmanager
def replacing_characters():
    """Print ? for characters that standard output cannot encode, within a with block.

    A model may generate any character, and printing it must not end a run. Python's standard error
    does the same by itself. A notebook's output takes every character.
    """
    stream = sys.stdout
    if not hasattr(stream, "reconfigure"):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # the reader of the output may be gone
            stream.reconfigure(errors=before)


# Curves -----------------------------------------------------------------------------------------

# Each panel's axis reaches at least to this value.
LEAST = dict(reward=0.1, solved=0.1, entropy=0.1, gap=1e-6, norm=1e-2)


def plot(argv) -> int:
    """Draw rewards, solved prompts, entropy, the log-prob gap and the gradient's norm by step.

    Writes curve.png into the first run's directory.
    """
    parser = argparse.ArgumentParser("python -m full plot", description=plot.__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run")
    runs = [Path(run) for run in parser.parse_args(argv).runs]
    lines = {run: RunDirectory(run).lines(RunDirectory.METRICS) for run in runs}
    for run in runs:
        if not lines[run]:
            raise ValueError(f"{run} holds no metrics.jsonl with a step; give the directory of a "
                             f"run")  # fmt: skip
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panels = figure.subplot_mosaic([["reward", "solved", "solved"], ["entropy", "gap", "norm"]])
    for n, run in enumerate(runs):
        for name, axes in panels.items():
            points = [(x["step"] + 1, x[COLUMNS[name]]) for x in lines[run] if COLUMNS[name] in x]
            columns = np.array(points, dtype=float).reshape(-1, 2).T  # there may be no point
            axes.plot(*columns, f"C{n}.-", lw=0.8, markersize=1.5, label=run.name)

        # A step's result is drawn after the step, and what was solved before the first step at 0.
        solved = [(0, x["eval/solved_before"]) for x in lines[run]
                  if "eval/solved_before" in x]  # fmt: skip
        solved += [(x["step"] + 1, x["eval/solved"]) for x in lines[run] if "eval/solved" in x]
        panels["solved"].plot(*np.array(solved).reshape(-1, 2).T, f"C{n}o", markersize=3.5)

    # An axis reaches from 0 to the largest value, so a curve of small rewards is not flat. Negative
    # rewards extend it. It reaches at least to LEAST, because smaller values are mostly noise.
    for name, axes in panels.items():
        axes.update_datalim([(0, 0), (0, LEAST[name])])
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.set_title(COLUMNS[name], fontsize="medium")
    panels["solved"].set_title("line: reward/solved   dots: eval/solved", fontsize="medium")

    # Some steps have a hundred times the norm or the gap of others, and with --exact a gap is 0.
    for name in ("gap", "norm"):
        panels[name].set_yscale("symlog", linthresh=LEAST[name] / 10)
    figure.supxlabel("step", fontsize="medium")
    labels = panels["reward"].get_legend_handles_labels()
    figure.legend(*labels, loc="outside upper center", ncols=min(5, len(runs)), frameon=False)
    figure.savefig(runs[0] / "curve.png", dpi=150)
    print(f"wrote {runs[0] / 'curve.png'}")
    return 0
