"""Keep a run's directory: its files, its lock, its checkpoints, and when they are written.

    config.json                  the settings; a directory that has them is a run's
    lock                         held by the process that runs
    data.json, base.json         digests of what is trained on, and of the frozen base of factors
    metrics.jsonl                a line a step
    samples.jsonl, rollouts.jsonl
    step-NNNNNNNN                a checkpoint after so many steps
    reference                    the frozen model of the KL
    hf, engine                   the last weights for transformers; weights for an engine

`RunDirectory` knows these names, and what a kill or a full disk may leave of each. What is written
whole gets its name last: until then it is NAME.tmp, which is never read.
"""

import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import shlex
import shutil
import signal
import sys
import zlib
from pathlib import Path

import torch

from full.model.config import NOT_COMPUTED_WITH, ModelConfig, read_json
from full.model.hf import open_checkpoint
from full.ranks.checkpoint import Damaged, checkpoints, read_checkpoint, write_checkpoint
from full.ranks.joining import PYTHON, Interrupted, ReplyTimeout, agree, say, warn
from full.ranks.optimizer import tensors_of
from full.ranks.places import local
from full.run.config import _flag

# Files of JSON lines ----------------------------------------------------------------------------

MEND = "free disk space or fix the permissions"


@contextlib.contextmanager
def writing(path, advice):
    """Name in an OSError the file that was not written, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} not written ({error}): {MEND}, then {advice}") from error


def read_json_lines(path, *, skip_torn_last=False) -> list:
    """Return [(line number from 1, object)] of a file with a JSON object a line or nothing.

    ValueError names a line that holds anything else. skip_torn_last: leave out the last line if it
    is damaged and no newline ends it, as a kill or a full disk leaves a file.
    """
    # JSON strings may hold other line breaks.
    lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
            problem = None if isinstance(value, dict) else f"it is a {type(value).__name__}"
        except (ValueError, RecursionError) as error:
            problem = error
        # The last piece is empty if the last line ends, so else it is an unfinished line.
        if problem is None:
            found.append((number, value))
        elif not (skip_torn_last and number == len(lines)):
            raise ValueError(f"{path} line {number} holds no JSON object: {problem}")
    return found


# What a run is a function of, in addition to its settings ---------------------------------------


def digest(value) -> str:
    """Return a digest of a JSON value, which equal values share."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shape_in(directory) -> dict:
    """Return what the config.json of a checkpoint says of the numbers that its model computes."""
    shape = dataclasses.asdict(ModelConfig.from_hf(directory))
    return {name: x for name, x in shape.items() if name not in NOT_COMPUTED_WITH}


def digest_of_model(directory) -> str:
    """Return a digest of a checkpoint's shape and weights, whatever its files are called."""
    total = zlib.crc32(digest(shape_in(directory)).encode())
    for name, stored in sorted(open_checkpoint(directory).items()):
        x = stored.part[:].contiguous()
        total = zlib.crc32(f"{name} {x.dtype} {[*x.shape]}".encode(), total)
        total = zlib.crc32(x.view(torch.uint8).numpy(), total)
    return f"{total:08x}"


def digests_of_data(config, task) -> dict:
    """Return {what: digest} of all that a run is trained on, by what it says.

    A key is a field of Config, or a part of --model.
    """
    found = {what: digest(x) for what, x in getattr(task, "contents", dict)().items()}
    for field in ("data", "eval_data"):
        # A task of a file may read these by itself.
        if field not in found and Path(path := getattr(config, field)).is_file():
            found[field] = zlib.crc32(Path(path).read_bytes())
    if config.teacher:
        found["teacher"] = digest_of_model(config.teacher)
    if config.model and config.lora is None:  # the weights are the checkpoint's
        found["shape"] = digest(shape_in(config.model))
    return found


def digests_of_base(config, task=None) -> dict:
    """Return {"model": digest} of the frozen base of factors. Random weights follow from --seed."""
    if config.lora is None or not config.model:
        return {}
    return {"model": digest_of_model(config.model)}


# The directory ----------------------------------------------------------------------------------


class RunDirectory:
    """The directory of a run, which this process reads, or has claimed to write.

    path: Path. f"{directory}" is the path too.
    """

    METRICS = "metrics.jsonl"
    SAMPLES = "samples.jsonl"
    ROLLOUTS = "rollouts.jsonl"
    NOTES = {"data.json": digests_of_data, "base.json": digests_of_base}
    PUT_BACK = "put a copy back, or begin again with another --out"

    def __init__(self, path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.hf = self.path / "hf"
        self.engine = self.path / "engine"

    def __str__(self):
        return str(self.path)

    @property
    def holds_run(self) -> bool:
        """Whether there are settings of a run. Hugging Face has a config.json too."""
        return self.config.exists() and b'"advantage"' in self.config.read_bytes()

    @property
    def flags_to_resume(self) -> str:
        """The flags with which the run goes on, as a shell takes them."""
        # No command imports a file because a run's directory names it, so the user names it again.
        flags = ["--resume", "--out", str(self)]
        stored = read_json(self.config) if self.config.exists() else {}
        if stored.get("task", "").startswith(PYTHON):
            return f"full.api.run(Config(out={str(self)!r}, resume=True), ..)"
        for name in ("task", "reward"):
            if ":" in stored.get(name, ""):
                flags += [f"--{name}", stored[name]]
        return shlex.join(flags)

    @property
    def advice(self) -> str:
        """How to go on with the run, for errors and signals."""
        return f"go on with {self.flags_to_resume}"

    # Lines ---------------------------------------------------------------------------------------

    def append(self, name, lines):
        """Append lines of JSON to a file. JSON has no NaN: such a number becomes null."""
        path = self.path / name
        with writing(path, self.advice), path.open("a", encoding="utf-8") as file:
            for line in lines:
                for key, value in line.items():
                    if isinstance(value, float) and not math.isfinite(value):
                        line = line | {key: None}
                file.write(json.dumps(line) + "\n")

    def lines(self, name) -> list[dict]:
        """Return the JSON objects of a file of lines, but not a last line that is torn."""
        path = self.path / name
        if not path.exists():
            return []
        return [line for _, line in read_json_lines(path, skip_torn_last=True)]

    def cut(self, first_step):
        """Drop the lines of steps that are done again, and torn ones; files are replaced whole.

        first_step: the first step to do.
        """
        # Each file is replaced by its beginning. A kill in between leaves the old file, with lines
        # that the next start cuts, and a .tmp that is never read.
        for name in (self.METRICS, self.SAMPLES, self.ROLLOUTS):
            lines = self.lines(name)
            if not all(isinstance(line.get("step"), int) for line in lines):
                raise ValueError(f"{self.path / name} has a line without a step")
            kept = [line for line in lines if line["step"] < first_step]
            with writing(self.path / name, self.advice):
                partial = (self.path / name).with_suffix(".tmp")
                text = "".join(json.dumps(line) + "\n" for line in kept)
                partial.write_text(text, encoding="utf-8")
                partial.replace(self.path / name)

    # Checkpoints ---------------------------------------------------------------------------------

    def superseded(self, step, keep) -> list:
        """Return the checkpoints to delete once `step` is saved, in the order of their steps.

        These are all but the newest `keep` up to `step`, and all later ones, which the resume has
        found damaged.
        """
        # Of steps 2, 4, 6 and 8, with 6 just saved and keep 2, they are 2 and 8.
        found = checkpoints(self.path)
        up_to_it = [path for path in found if path <= self.path / f"step-{step:08d}"]
        return up_to_it[:-keep] + found[len(up_to_it) :]

    def newest(self):
        """Return the newest checkpoint, or None. `read_newest` verifies it too."""
        return next(reversed(checkpoints(self.path)), None)

    def read_newest(self, read):
        """Return (path, read(path)) for the newest undamaged checkpoint. Collective.

        read: collective, it calls `read_checkpoint`. Where that finds damage, the checkpoint is
        named in a warning, and the next older one is read. Any other error of `read` is raised: a
        crash or a disk does not leave a right checksum on wrong contents. (None, None) if there is
        no checkpoint; if none is undamaged, ValueError, so that a run is not begun again by
        mistake.
        """
        found = agree(lambda: checkpoints(self.path))
        for path in reversed(found):
            try:
                return path, read(path)
            except Damaged as error:
                warn(f"warning: {error}; trying an older one")
        if found:
            raise ValueError(f"no checkpoint in {self} is whole: {self.PUT_BACK}")
        return None, None

    def write_reference(self, trainer):
        """Make the policy of now the frozen reference, and store it, so that a resume has it."""
        # A resumed run would else measure its KL against the weights that it resumes with. Both
        # models are sharded identically, so each rank copies its own part. The base of factors
        # never changes.
        if trainer.reference in (None, trainer.model):
            return
        reference = tensors_of(trainer.reference)
        for name, x in tensors_of(trainer.model).items():
            local(reference[name]).copy_(local(x))
        write_checkpoint(self.path / "reference", reference, {})

    def read_reference(self, trainer):
        """Read the frozen reference of a run that goes on."""
        if trainer.reference in (None, trainer.model):
            return
        try:
            read_checkpoint(self.path / "reference", tensors_of(trainer.reference))
        except ValueError as error:
            raise ValueError(f"{error}; {self.PUT_BACK}") from error

    # A claim -------------------------------------------------------------------------------------

    @classmethod
    def claim(cls, config, stack, task=None):
        """Choose, lock (until `stack` is closed) and fill the directory of a run, or refuse."""
        # A directory is looked at twice: before the lock's file is written into it, because a
        # stranger's directory must not get that file, and under the lock, because only then no
        # other run can change what was seen.
        with writing(config.out or "runs", "start again; or choose another --out"):
            directory = cls(config.out or first_free(config))
            if not (directory.path / "lock").exists():
                directory.refuse_unless_free(config.resume)
                directory.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(directory.locked())
            directory.refuse_unless_free(config.resume)
            if config.resume and not directory.config.exists():
                say(f"{directory} holds no run to resume: one begins")
            directory.fill(config, task)
        return directory

    def refuse_unless_free(self, resume):
        """Raise ValueError if a run may not have the directory: nothing is overwritten unasked."""
        # A start that was killed, or that is in flight, has left no more than these files.
        found = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        known = {"config.tmp", "lock"}
        if "config.tmp" in found:
            known |= {"data.json", "base.json"}
        if self.holds_run and not resume:
            raise ValueError(f"{self} holds a run: --resume to go on with it, or choose another "
                             f"--out")  # fmt: skip
        if not self.holds_run and found - known:
            raise ValueError(f"{self} holds files that are not a run's; choose another --out")

    @contextlib.contextmanager
    def locked(self):
        """Hold the directory by the kernel's lock on its file, which ends with the process."""
        # "a" makes the file where there is none and changes nothing in it. LOCK_NB: refuse at once
        # if another process has it, and do not wait for that process to end.
        with (self.path / "lock").open("a", encoding="utf-8") as file:
            try:
                import fcntl  # not on Windows

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{self} is in use by another process: wait for it to end, or "
                                 f"choose another --out") from error  # fmt: skip
            except (ImportError, OSError) as error:
                text = f"warning: {self} cannot be locked ({error}): let no other run write there"
                print(text, file=sys.stderr)
            yield

    def fill(self, config, task=None):
        """Write the settings, and note or compare what else the run is a function of."""
        # The settings get their name last: a directory that has them is a run's. Until then
        # config.tmp says that the digests are a start's, and not a stranger's.
        stored = dataclasses.asdict(config) | {"resume": False, "out": str(self)}
        partial = self.config.with_suffix(".tmp")
        partial.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        try:
            for name, digests_of in self.NOTES.items():
                if config.resume and self.config.exists():
                    self.require_noted(name, config, task)
                elif digests := digests_of(config, task):
                    text = json.dumps(digests) + "\n"
                    (self.path / name).write_text(text, encoding="utf-8")
        except ValueError:  # a run that goes on, with other files
            partial.unlink()
            raise
        partial.replace(self.config)

    def require_noted(self, name, config, task=None):
        """Raise ValueError unless the run has the digests that data.json or base.json has."""
        # A step draws lines of data by their number, a prompt is what a chat template makes of a
        # line, and factors mean nothing without the very base that they were trained beside. With
        # others a run would go on as if nothing had happened: neither the run that began, nor a run
        # that anybody could repeat. Files and objects of another name may say the same.
        found = self.NOTES[name](config, task)
        noted = read_json(self.path / name, what="digests of a run's files") if found else {}
        for what in sorted(found.keys() | noted.keys()):
            if noted.get(what) != found.get(what):
                field = what if hasattr(config, what) else "model"
                part = "" if what == field else f"the {what} of "
                raise ValueError(
                    f"{part}{_flag(field)} {getattr(config, field)!r} is not what it was when "
                    f"{self} began: give the old contents again, or start a new run")


def first_free(config) -> Path:
    """Make and return the first of runs/TASK-0, runs/TASK-1, .. that does not exist yet."""
    name = config.task.rpartition(":")[2]  # of FILE.py:Class the class
    for n in itertools.count():
        out = Path("runs") / f"{name}-{n}"
        # Making it is the claim: of two runs that start in one instant, one gets this error.
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out


# When it is saved -------------------------------------------------------------------------------


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
            found = agree(self.directory.newest)
            state = f"the newest checkpoint is {found}" if found else "there is no checkpoint"
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
        directory = self.directory
        try:
            self.trainer.save_checkpoint(f"{directory}/step-{step:08d}", step=step, **extra)
        except OSError as error:
            kept = "older ones are whole" if directory.newest() else "nothing was saved yet"
            raise OSError(f"{error}; {kept}: {MEND}, then {directory.advice}") from error
        # An older checkpoint goes only now that the new one is whole.
        for old in agree(lambda: directory.superseded(step, self.config.keep)):
            shutil.rmtree(old, ignore_errors=True)
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
        return "no step can be audited without --log-rollouts and a checkpoint"
    shown = ", ".join(map(str, steps if len(steps) < 6 else [*steps[:2], "..", *steps[-2:]]))
    more = "" if config.save_every == 1 else "; for more: --save-every 1, and --keep"
    return f"`python -m full audit {directory}` can audit steps {shown}{more}"
