"""When a run is saved: adds checkpoints, and a last step after a signal, to `train_grpo.train`.

directory.py says where a checkpoint is, and checkpoint.py what it is. Which steps can be audited
follows from the checkpoints that are there.
"""

import contextlib
import functools
import signal

from full.learn.rollouts import ReplyTimeout
from full.ranks.checkpoint import checkpoints
from full.ranks.joining import Interrupted, agree, say


class Checkpointer:
    """Save a run after each step in which that is due, and end it after a signal."""

    def __init__(self, config, trainer, source, directory, stop):
        self.config = config
        self.trainer = trainer
        self.source = source
        self.directory = directory
        self.stop = stop

    def step(self, step, batch, metrics, updates, solved):
        """Save the run after a step if that is due. Collective.

        Raises Interrupted if a signal was seen.
        """
        # A signal is looked at between two steps, by all ranks together: they save the same step.
        # A resumed run cuts its files after the checkpoint: by now each line up to it is there.
        c = self.config
        done = step + 1
        signalled = self.stop.agreed(self.trainer.device)
        is_last = done == c.steps
        # The state before the last step makes that step auditable, with the one after it.
        is_due = c.save_every and (done % c.save_every == 0 or done == c.steps - 1)
        if not (is_last or signalled or is_due):
            return

        state = f"saved after {done} steps"
        saved = self.write(done)
        if not saved:
            state = agree(self.directory.newest_in_words)
        if is_last and not saved:
            raise FloatingPointError(
                f"the run ends in steps that were skipped for a non-finite gradient, so its last "
                f"state is not saved; {state}"
            )
        if signalled and not is_last:
            say(f"{signal.Signals(signalled).name}: {state}; {self.directory.advice}")
            raise Interrupted(signalled)

    def rescue(self) -> str:
        """Save the state before a step whose batch was given up. Return what there is, in words."""
        # Pending batches of an engine may be lost with it. An evaluation comes after the updates of
        # a step whose line is not written yet.
        step = self.source.begun
        with contextlib.suppress(ReplyTimeout):
            if step is not None and self.write(step):
                return f"saved after {step} steps"
        return "nothing new is saved"

    def write(self, step) -> bool:
        """Write a checkpoint and delete what it supersedes. Return whether it was written."""
        # A run whose last gradients were not finite is about to go wrong. Its checkpoints would
        # push the good ones out.
        if self.trainer.skipped_in_a_row:
            return False
        pending = self.source.stored()
        extra = {"pending": pending} if pending else {}
        save = functools.partial(self.trainer.save_checkpoint, step=step, **extra)
        self.directory.save(step, self.config.keep, save)
        return True


def step_of(path) -> int:
    """Return the number of a checkpoint step-NNNNNNNN."""
    return int(path.name.removeprefix("step-"))


def auditable_steps(config, directory) -> dict:
    """Return {step: the steps whose checkpoints hold the policy and the sampler's weights}.

    These are the steps with a checkpoint of both, and with all of their rollouts. The weights
    before step 0 need no checkpoint: the seed or the model determines them.
    """
    states = {0, *(step_of(path) for path in checkpoints(directory.path))}
    groups = {}
    for line in directory.lines(directory.ROLLOUTS):
        groups.setdefault(line.get("step"), {}).setdefault(line.get("group"), []).append(line)
    found = {}
    for step, rollouts in groups.items():
        is_whole = all(len(group) == config.group for group in rollouts.values())
        before = step, max(0, step - config.staleness)
        if is_whole and len(rollouts) >= config.prompts and states.issuperset(before):
            found[step] = before
    return found


def audits_in_words(config, directory) -> str:
    """Say which steps of a finished run can be audited."""
    steps = sorted(auditable_steps(config, directory))
    if not steps:
        return "no step can be audited without log_rollouts and a checkpoint"
    shown = ", ".join(map(str, steps if len(steps) < 6 else [*steps[:2], "..", *steps[-2:]]))
    more = "" if config.save_every == 1 else "; save_every 1 and keep for more"
    return f"`python -m full audit {directory}` can audit step {shown}{more}"
