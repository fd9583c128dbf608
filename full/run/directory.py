"""Keep a run's directory: its files, its lock and its checkpoints.

    config.json                  the settings; a directory that has them is a run's
    lock                         held by the process that runs
    data.json, base.json         digests of the training data, and of the frozen base of factors
    metrics.jsonl                one line per step
    samples.jsonl, rollouts.jsonl
    step-NNNNNNNN                the checkpoint after N steps
    reference                    the frozen model of the KL
    hf, engine                   the last weights for transformers; weights for an engine

`RunDirectory` knows these names, and what a kill or a full disk may leave of each file. A file or
folder that must be complete is written as NAME.tmp, which is never read, and then renamed.
"""

import codecs
import collections
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
from full.run.config import flag_name

# Files of JSON lines ----------------------------------------------------------------------------

DISK_ADVICE = "free disk space or fix the permissions"


@contextlib.contextmanager
def writing(path, advice):
    """Add the file that was not written, and what to do, to an OSError."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} not written ({error}): {DISK_ADVICE}, then {advice}") from error


def read_json_lines(path, *, skip_torn_last=False):
    """Yield (line number from 1, object) of a file of JSON objects and empty lines.

    ValueError names a line that holds anything else. One line at a time is in memory.

    skip_torn_last: bool. Leave out the last line if it is damaged and has no newline, as after a
        kill or on a full disk.
    """
    # In a binary file only \n ends a line: JSON strings may hold other line breaks.
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
                problem = None if isinstance(value, dict) else f"it is a {type(value).__name__}"
            except (ValueError, RecursionError) as error:
                problem = error
            if problem is None:
                yield number, value
            elif line.endswith(b"\n") or not skip_torn_last:
                raise ValueError(f"{path} line {number} holds no JSON object: {problem}")


# What else determines a run, besides its settings -----------------------------------------------


def digest(value) -> str:
    """Return a digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def shape_in(directory) -> dict:
    """Return the fields of a checkpoint's shape that change the numbers of its model."""
    shape = dataclasses.asdict(ModelConfig.from_hf(directory))
    return {name: x for name, x in shape.items() if name not in NOT_COMPUTED_WITH}


def digest_of_model(directory) -> str:
    """Return a digest of a checkpoint's shape and weights, independent of its file names.

    A run's rank 0 reads all of them, and the other ranks wait as long as it takes: see `start_run`.
    """
    total = zlib.crc32(digest(shape_in(directory)).encode())
    for name, stored in sorted(open_checkpoint(directory).items()):
        x = stored.part[:].contiguous()
        total = zlib.crc32(f"{name} {x.dtype} {[*x.shape]}".encode(), total)
        total = zlib.crc32(x.view(torch.uint8).numpy(), total)
    return f"{total:08x}"


def digests_of_data(config, task) -> dict:
    """Return {name: digest} of the contents of all that a run is trained on.

    A name is a field of Config, or a part of --model.
    """
    digests = {name: digest(x) for name, x in getattr(task, "contents", dict)().items()}
    for field in ("data", "eval_data"):
        # A task from a file may read these by itself.
        if field not in digests and Path(path := getattr(config, field)).is_file():
            digests[field] = zlib.crc32(Path(path).read_bytes())
    if config.teacher:
        digests["teacher"] = digest_of_model(config.teacher)
    if config.model and config.lora is None:  # checkpoints hold the weights
        digests["shape"] = digest(shape_in(config.model))
    return digests


def digests_of_base(config, task=None) -> dict:
    """Return {"model": digest} of the frozen base of factors; --seed determines random weights."""
    if config.lora is None or not config.model:
        return {}
    return {"model": digest_of_model(config.model)}


# The directory ----------------------------------------------------------------------------------


class RunDirectory:
    """The directory of a run, which this process reads, or has claimed for writing.

    path: Path. f"{directory}" is the path as text.
    """

    METRICS = "metrics.jsonl"
    SAMPLES = "samples.jsonl"
    ROLLOUTS = "rollouts.jsonl"
    DIGESTS = {"data.json": digests_of_data, "base.json": digests_of_base}
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
        """Whether config.json holds the settings of a run. Hugging Face has a config.json too."""
        return self.config.exists() and b'"advantage"' in self.config.read_bytes()

    @property
    def flags_to_resume(self) -> str:
        """The flags that resume the run, quoted for a shell."""
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
        """How to resume the run, for errors and signals."""
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

    def each_line(self, name):
        """Yield the JSON objects of a file of lines, without a torn last line."""
        path = self.path / name
        if path.exists():
            for _, line in read_json_lines(path, skip_torn_last=True):
                yield line

    def lines(self, name) -> list[dict]:
        """Return the JSON objects of a file of lines, without a torn last line."""
        return [*self.each_line(name)]

    def cut(self, first_step):
        """Drop torn lines and the lines of steps that are done again, from first_step on."""
        # Each file is replaced as a whole. A kill in between leaves the old file, which the next
        # start cuts, and a .tmp that is never read. A run's rollouts may be larger than the memory,
        # so a file is read twice: to check its steps, and to copy it line by line.
        for name in (self.METRICS, self.SAMPLES, self.ROLLOUTS):
            steps = [line.get("step") for line in self.each_line(name)]
            if not all(isinstance(step, int) for step in steps):
                raise ValueError(f"{self.path / name} has a line without a step")
            kept = [step for step in steps if step < first_step]
            if name == self.METRICS and kept and kept != [*range(first_step)]:
                raise ValueError(f"expected a line in {self.path / name} for each of steps 0 to "
                                 f"{first_step - 1}, got {str(kept)[:80]}: {self.PUT_BACK}")
            with writing(self.path / name, self.advice):
                partial = (self.path / name).with_suffix(".tmp")
                with partial.open("w", encoding="utf-8") as file:
                    for line in self.each_line(name):
                        if line["step"] < first_step:
                            file.write(json.dumps(line) + "\n")
                partial.replace(self.path / name)

    # Checkpoints ---------------------------------------------------------------------------------

    def superseded(self, step, keep) -> list:
        """Return the checkpoints to delete once `step` is saved, in the order of their steps.

        The newest `keep` up to `step` are kept. Later ones go, because the resume has found them
        damaged.
        """
        # Of steps 2, 4, 6 and 8, with 6 just saved and keep 2, these are 2 and 8.
        paths = checkpoints(self.path)
        up_to_step = [path for path in paths if path <= self.path / f"step-{step:08d}"]
        return up_to_step[:-keep] + paths[len(up_to_step) :]

    def newest(self):
        """Return the newest checkpoint, or None. `read_newest` verifies it too."""
        return next(reversed(checkpoints(self.path)), None)

    def read_newest(self, read):
        """Return (path, read(path)) for the newest undamaged checkpoint. Collective.

        (None, None) if there is no checkpoint. ValueError if all are damaged, so that a run does
        not begin again by mistake.

        read: a collective function that calls `read_checkpoint`. If that finds damage, a warning
            names the checkpoint, and the next older one is read. Any other error is raised: neither
            a crash nor a disk leaves a right checksum on wrong contents.
        """
        paths = agree(lambda: checkpoints(self.path))
        for path in reversed(paths):
            try:
                return path, read(path)
            except Damaged as error:
                warn(f"warning: {error}; trying an older one")
        if paths:
            raise ValueError(f"no checkpoint in {self} is whole: {self.PUT_BACK}")
        return None, None

    def write_reference(self, trainer):
        """Copy the current policy into the frozen reference, and store the reference."""
        # Without the file, a resumed run would measure its KL against the weights that it resumes
        # with. Both models are sharded identically, so each rank copies its own part. The base of
        # factors never changes.
        if trainer.reference in (None, trainer.model):
            return
        reference = tensors_of(trainer.reference)
        for name, x in tensors_of(trainer.model).items():
            local(reference[name]).copy_(local(x))
        write_checkpoint(self.path / "reference", reference, {})

    def read_reference(self, trainer):
        """Read the frozen reference of a run that is resumed."""
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
        # The directory is checked twice: before the lock is written into it, because a stranger's
        # directory must not get that file, and under the lock, because only then no other run can
        # change the files.
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
        """Raise ValueError if the directory holds another run, or files that are not a run's."""
        # A start that was killed, or that is in flight, has left at most these files.
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        known = {"config.tmp", "lock"}
        if "config.tmp" in names:
            known |= {"data.json", "base.json"}
        if self.holds_run and not resume:
            raise ValueError(f"{self} holds a run: --resume to go on with it, or choose another "
                             f"--out")  # fmt: skip
        if not self.holds_run and names - known:
            raise ValueError(f"{self} holds files that are not a run's; choose another --out")

    @contextlib.contextmanager
    def locked(self):
        """Hold the kernel's lock on the directory's lock file, which ends with the process."""
        # "a" creates the file or leaves it as it is. LOCK_NB: refuse at once if another process has
        # the lock.
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
        """Write the settings, and write or compare the digests of what else determines the run."""
        # The settings are renamed last, since config.json makes a directory a run's. Until then
        # config.tmp shows that the digests are from a start, and not a stranger's.
        stored = dataclasses.asdict(config) | {"resume": False, "out": str(self)}
        partial = self.config.with_suffix(".tmp")
        partial.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        try:
            for name, digests_of in self.DIGESTS.items():
                if config.resume and self.config.exists():
                    self.require_same_digests(name, config, task)
                elif digests := digests_of(config, task):
                    text = json.dumps(digests) + "\n"
                    (self.path / name).write_text(text, encoding="utf-8")
        except ValueError:  # resumed with other files
            partial.unlink()
            raise
        partial.replace(self.config)

    def require_same_digests(self, name, config, task=None):
        """Raise ValueError unless the run has the digests that data.json or base.json has."""
        # A step draws lines of data by their number, a chat template makes prompts of them, and
        # factors mean nothing without their own base. With other contents the run would continue
        # silently as a run that nobody could repeat. Names of files and objects may change.
        digests = self.DIGESTS[name](config, task)
        stored = read_json(self.path / name, what="digests of a run's files") if digests else {}
        for key in sorted(digests.keys() | stored.keys()):
            if stored.get(key) != digests.get(key):
                field = key if hasattr(config, key) else "model"
                part = "" if key == field else f"the {key} of "
                raise ValueError(
                    f"{part}{flag_name(field)} {getattr(config, field)!r} is not what it was when "
                    f"{self} began: give the old contents again, or start a new run")


def first_free(config) -> Path:
    """Make and return the first of runs/TASK-0, runs/TASK-1, .. that does not exist yet."""
    name = config.task.rpartition(":")[2]  # FILE.py:Class -> Class
    for n in itertools.count():
        out = Path("runs") / f"{name}-{n}"
        # mkdir is the claim: of two runs that start at the same time, one gets this error.
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out


def step_of(path) -> int:
    """Return the number of a checkpoint step-NNNNNNNN."""
    return int(path.name.removeprefix("step-"))


# Saving, and which steps can be audited ----------------------------------------------------------


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
    rollouts = {}  # step -> how many rollouts each of its groups has
    for line in directory.each_line(directory.ROLLOUTS):
        rollouts.setdefault(line.get("step"), collections.Counter())[line.get("group")] += 1
    auditable = {}
    for step, counts in rollouts.items():
        is_whole = all(count == config.group for count in counts.values())
        needed = step, max(0, step - config.staleness)
        if is_whole and len(counts) >= config.prompts and saved.issuperset(needed):
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
