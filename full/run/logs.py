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
    found = batch.metrics | metrics | mean_metrics(updates) | {
        "policy_version": trainer.policy_version, "updates/skipped": trainer.skipped,
    } | trainer.rates(trainer.learning_rate(step))  # fmt: skip
    if not updates:
        text = "no update, since nothing was left to train on: every group was dropped, or every"
        warn(f"step {step}: {text} rollout was truncated and filtered")
        return found | {"tokens/trained": 0, "tokens/trained_flat": 0}

    # The age of the sampler's weights when each update began. A skipped update made no version.
    ages = []
    version = trainer.policy_version
    for update in reversed(updates):
        if "nonfinite" not in update:
            version -= 1
        ages.append(version - batch.sampled_by)
    return found | {"policy_age/update_mean": float(np.mean(ages))}


COLUMNS = dict(
    reward="reward/mean", solved="reward/solved", eval="eval/solved",
    truncated="tokens/truncated_fraction", norm="grad_norm", entropy="entropy/token_mean",
    clipped="ratio/clipped_fraction", gap="logprob_gap/max",
)  # fmt: skip

class Bar(tqdm):
    """A bar that looks at the clock in every step, without tqdm's thread, which outlives it."""

    monitor_interval = 0


class Log:
    """Write a line of metrics.jsonl for each step, and print a table with a bar, on rank 0.

    tell: a function that gets each line, a dict, on rank 0. Default: none.
    """

    EVERY = 5  # steps between rows of the table, in addition to those with an evaluation
    IDLE_STEPS = 3  # in a row with nothing to learn from, before it is said

    def __init__(self, config, trainer, source, directory, tell=None):
        self.tell = tell
        self.trainer = trainer
        self.source = source
        self.directory = directory
        self.on = dist.get_rank() == 0
        self.solved_before = None  # known in the process that does step 0
        self.names = [x for name in METRICS for x in (f"{name}_first", name)]
        say("  step" + "".join(f"{name:>10}" for name in COLUMNS) + "  tokens/s")
        self.max_new_tokens = config.max_new_tokens
        self.compares = compared_by(config.advantage) != "nothing"
        self.is_truncation_said = False
        self.idle = 0  # steps in a row with nothing to learn from, up to now
        off = None if self.on else True  # None: on, if standard error is a terminal
        how = dict(total=config.steps, initial=source.first_step, disable=off)
        self.bar = Bar(**how, unit="step", miniters=1)

    def before(self, solved):
        """Print the row before the loop: what the weights solve with which the loop begins."""
        self.solved_before = solved
        self.row("before", {"eval/solved": solved})

    def step(self, step, batch, metrics, updates, solved):
        """Write the line of a step. Collective."""
        seconds = self.source.clock.read()
        line = step_metrics(self.trainer, batch, metrics, updates, step) | seconds
        if step == 0:
            line["eval/solved_before"] = self.solved_before
        if solved is not None:
            line["eval/solved"] = solved
        if not self.on:
            return

        self.warn(step, line)
        if unlisted := line.keys() - {*self.names}:
            raise ValueError(f"{sorted(unlisted)} are not in METRICS of full/learn/metrics.py")
        line = {name: line[name] for name in self.names if name in line}
        self.directory.append(self.directory.METRICS, [{"step": step} | line])
        if self.tell:
            self.tell({"step": step} | line)
        self.bar.set_postfix_str(f"reward {line['reward/mean']:.3f}", refresh=False)
        self.bar.update()
        if solved is not None or step % self.EVERY == 0:
            self.row(step, line)

    def warn(self, step, line):
        """Warn, on rank 0, of what keeps a run from learning."""
        truncated = line["tokens/truncated_fraction"]
        if truncated > 0.5 and not self.is_truncation_said:
            self.is_truncation_said = True
            warn(f"warning: step {step}: {truncated:.0%} of the rollouts were cut off after "
                 f"--max-new-tokens {self.max_new_tokens}, which earn nothing: raise it")
        self.idle = self.idle + 1 if self.compares and line["reward/groups_equal"] == 1 else 0
        if self.idle == self.IDLE_STEPS:
            warn(f"warning: steps {step + 1 - self.idle} to {step}: in each group all rewards are "
                 f"equal, so nothing is learned")  # fmt: skip

    def close(self):
        """End the bar."""
        self.bar.close()

    def row(self, label, line):
        """Print a row of the table."""
        shown = [line.get(name) for name in COLUMNS.values()]
        cells = [" " * 10 if x is None else f"{x:10.3g}" for x in shown]
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
        """Write the rollouts of a step that --log-rollouts says, and its sample. Collective."""
        # A step whose sampler had a checkpoint's weights can be audited from that checkpoint: it is
        # logged whole, and so are the last of a run and the first of a run and of a resumed one. An
        # evaluation shows one group.
        c = self.config
        sampled_at = step - c.staleness
        whole = step in (0, c.steps - 1) or c.log_rollouts == "all"
        whole = whole or sampled_at == self.source.first_step
        if c.save_every and sampled_at >= 0:
            whole = whole or sampled_at % c.save_every == 0
        shown = self.source.shown
        if solved is not None and shown and dist.get_rank() == 0:
            self.text = self.task.show(shown.tokens)
            line = {"step": step, "reward": shown.reward, "text": self.text}
            self.directory.append(self.directory.SAMPLES, [line])
        if c.log_rollouts == "none" or not (whole or solved is not None):
            return
        one = batch.kept[0] if batch.kept else 0
        groups = {number: group for number, group in batch.groups.items() if whole or number == one}

        # Ranks have played groups of their own, and rank 0 writes: in the order of their numbers,
        # so that the file does not tell how many ranks there were.
        # COMM: what decides above is the same on all ranks, so all come here or none does.
        # Pinned by tests/full/test_audit.py::test_what_an_audit_says.
        for _, group in gather_groups(groups):
            lines = [rollout_line(self.task, step, i, t) for i, t in enumerate(group)]
            self.directory.append(self.directory.ROLLOUTS, lines)


def rollout_line(task, step, number, t) -> dict:
    """Return a line of rollouts.jsonl: rollout `number` of its group, a Trajectory."""
    # Vectors as they are, of all targets, so that a line can be read without the run.
    line = {"step": step, "group": t.group, "rollout": number, **t.to_json()}
    line["text"] = task.show(t.tokens)
    line["advantage"] = None if t.advantages is None else t.advantages.tolist()
    del line["prompt"]
    return line


@contextlib.contextmanager
def replacing_characters():
    """Print ? for a character that standard output cannot encode, while the context lasts.

    A text of a model may hold any character, and no print of it may end a run that has trained.
    Standard error of Python does so by itself. A notebook's output takes every character.
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
        with contextlib.suppress(OSError, ValueError):  # its reader may have gone
            stream.reconfigure(errors=before)


# Curves -----------------------------------------------------------------------------------------

# The least upper end of the axis of each panel.
LEAST = dict(reward=0.1, solved=0.1, entropy=0.1, gap=1e-6, norm=1e-2)


def plot(argv) -> int:
    """Draw rewards, solved prompts, entropy, the log-prob gap and the gradient's norm by step.

    Writes curve.png into the first run's directory.
    """
    parser = argparse.ArgumentParser("python -m full plot", description=plot.__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run")
    runs = [Path(run) for run in parser.parse_args(argv).runs]
    for run in runs:
        if not (run / "metrics.jsonl").exists():
            raise ValueError(f"{run} holds no metrics.jsonl; give the directory of a run")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panels = figure.subplot_mosaic([["reward", "solved", "solved"], ["entropy", "gap", "norm"]])
    for n, run in enumerate(runs):
        lines = RunDirectory(run).lines(RunDirectory.METRICS)
        for name, axes in panels.items():
            points = [(x["step"] + 1, x[COLUMNS[name]]) for x in lines if COLUMNS[name] in x]
            columns = np.array(points, dtype=float).reshape(-1, 2).T  # there may be no point
            axes.plot(*columns, f"C{n}.-", lw=0.8, markersize=1.5, label=run.name)

        # What a step leaves is drawn after it, and what was solved before the first step at 0.
        found = [(0, x["eval/solved_before"]) for x in lines if "eval/solved_before" in x]
        found += [(x["step"] + 1, x["eval/solved"]) for x in lines if "eval/solved" in x]
        panels["solved"].plot(*np.array(found).reshape(-1, 2).T, f"C{n}o", markersize=3.5)

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
