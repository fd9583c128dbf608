"""Save a run after its steps, end it after a signal, and say which steps can be audited."""

import contextlib
import shutil
import signal

from full.ranks.checkpoint import checkpoints
from full.ranks.joining import Interrupted, ReplyTimeout, agree, say
from full.run.directory import DISK_ADVICE, step_of


class Checkpointer:
    """Save a run after each step in which a checkpoint is due, and end it after a signal."""

    def __init__(self, config, trainer, source, directory, stop):
        self.config = config
        self.trainer = trainer
        self.source = source
        self.directory = directory
        self.stop = stop

    def step(self, step, batch, metrics, updates, solved):
        """Save the run after a step, if a checkpoint is due. Raise Interrupted after a signal.

        Collective.
        """
        # All ranks agree on a signal between two steps, so they save the same step. A resumed run
        # cuts its files after the checkpoint, so each line up to it has been written before.
        c = self.config
        done = step + 1
        signalled = self.stop.agreed(self.trainer.device)
        is_last = done == c.steps
        # The checkpoints before and after the last step make this step auditable.
        is_due = c.save_every and (done % c.save_every == 0 or done == c.steps - 1)
        if not (is_last or signalled or is_due):
            return

        state = f"saved after {done} steps"
        saved = self.write(done)
        if not saved:
            newest = agree(self.directory.newest)
            state = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint"
        if is_last and not saved:
            raise FloatingPointError(
                f"the run ends in steps that were skipped for a non-finite gradient, so its last "
                f"state is not saved; {state}"
            )
        if signalled and not is_last:
            say(f"{signal.Signals(signalled).name}: {state}; {self.directory.advice}")
            raise Interrupted(signalled)

    def rescue(self) -> str:
        """Save the state before a step whose batch failed. Return what was saved, in words."""
        # An engine's pending batches may be lost with it. An evaluation follows the updates of a
        # step whose line is not written yet.
        step = self.source.begun
        with contextlib.suppress(ReplyTimeout):
            if step is not None and self.write(step):
                return f"saved after {step} steps"
        return "nothing new is saved"

    def write(self, step) -> bool:
        """Write a checkpoint and delete those it replaces. Return whether it was written."""
        # A run whose last gradients were not finite is failing. Its checkpoints would replace the
        # good ones.
        if self.trainer.skipped_in_a_row:
            return False
        pending = self.source.stored()
        extra = {"pending": pending} if pending else {}
        directory = self.directory
        try:
            self.trainer.save_checkpoint(f"{directory}/step-{step:08d}", step=step, **extra)
        except OSError as error:
            others = "older ones are whole" if directory.newest() else "nothing was saved yet"
            raise OSError(f"{error}; {others}: {DISK_ADVICE}, then {directory.advice}") from error
        # Older checkpoints are deleted only after the new one is complete.
        for old in agree(lambda: directory.superseded(step, self.config.keep)):
            shutil.rmtree(old, ignore_errors=True)
        return True


def auditable_steps(config, directory) -> dict:
    """Return {step: the steps whose checkpoints hold the policy's and the sampler's weights}.

    A step can be audited if both checkpoints and all of its rollouts are there. The weights before
    step 0 need no checkpoint: the seed or the model determines them.
    """
    saved = {0, *(step_of(path) for path in checkpoints(directory.path))}
    groups = {}
    for line in directory.lines(directory.ROLLOUTS):
        groups.setdefault(line.get("step"), {}).setdefault(line.get("group"), []).append(line)
    auditable = {}
    for step, rollouts in groups.items():
        is_whole = all(len(group) == config.group for group in rollouts.values())
        needed = step, max(0, step - config.staleness)
        if is_whole and len(rollouts) >= config.prompts and saved.issuperset(needed):
            auditable[step] = needed
    return auditable


def audits_in_words(config, directory) -> str:
    """Say which steps of a finished run can be audited."""
    steps = sorted(auditable_steps(config, directory))
    if not steps:
        return "no step can be audited without --log-rollouts and a checkpoint"
    shown = ", ".join(map(str, steps if len(steps) < 6 else [*steps[:2], "..", *steps[-2:]]))
    more = "" if config.save_every == 1 else "; for more: --save-every 1, and --keep"
    return f"`python -m full audit {directory}` can audit steps {shown}{more}"
