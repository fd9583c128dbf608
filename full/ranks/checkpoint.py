"""Write the state of a run under any plan, and read it back, verified, under any other.

DCP (torch.distributed.checkpoint) writes safetensors files of each rank, which say where in each
tensor its parts lie. Reading runs no code: there is no pickle. state.json is written last. It has
the run's own state, size and checksum of each other file, and its own checksum, the seal.
"""

import itertools
import json
import os
import shutil
import warnings
import zlib
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from full.ranks.joining import agree, errors_on_all_ranks, on_all_ranks
from full.ranks.places import local


class Damaged(ValueError):
    """Files of a checkpoint are not as they were written. An older checkpoint may be whole."""


FILE = 64 << 20  # bytes


def write_checkpoint(path, tensors, state) -> None:
    """Collective. Write `tensors` by DCP and `state` as JSON into the directory `path`.

    tensors: {name: tensor}, DTensors where they are sharded. state: JSON values. All or nothing: a
    temporary directory is renamed once every byte and its checksum are written. Raises an OSError
    on every rank if writing fails.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")

    def start():
        shutil.rmtree(partial, ignore_errors=True)  # a run that was cut short may have left it
        partial.mkdir(parents=True)

    def finish():
        with (partial / "state.json").open("w", encoding="utf-8") as file:
            json.dump(sealed(state | {"files": sums}), file)
            file.flush()
            os.fsync(file.fileno())
        replace_directory(partial, path)

    try:
        agree(start)
        # DCP puts a file together in memory. So the tensors of a rank go into files of about FILE
        # bytes. All ranks follow the table of rank 0, which needs the names of all.
        sizes = merged(lambda: {name: local(x).nbytes for name, x in tensors.items()})
        ends = itertools.accumulate(sizes.values())
        file_of = {name: 1 + end // FILE for name, end in zip(sizes, ends)}
        writer = dcp.HuggingFaceStorageWriter(str(partial), file_of, save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
        # By rank 0's list: the directories of a network's disk may differ for a moment.
        names = agree(lambda: sorted(file.name for file in partial.glob("*.safetensors")))
        sums = merged(lambda: sums_of_share(partial, names))
        agree(finish)
    except (dcp.CheckpointException, ValueError, OSError) as error:  # raised on every rank
        with errors_on_all_ranks():
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)  # unfinished files take room
            raise OSError(f"checkpoint {path} not written ({reason_of(error)})") from error


def replace_directory(new, path):
    """Rename a complete directory to `path`, and delete an older one of that name."""
    # A directory cannot be renamed to one that holds files. Deleting these takes seconds, so the
    # older directory is moved away first. A kill between the two renames leaves both, as .tmp.
    old = path.with_name(path.name + ".old.tmp")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def reason_of(error) -> str:
    """Say which rank failed at what, if DCP says it."""
    failures = getattr(error, "failures", {})
    return "; ".join(f"rank {rank}: {e[0]}" for rank, e in failures.items()) or str(error)


def sums_of_share(path, names, alone=False) -> dict:
    """Return {name: [size, checksum]} of this rank's share of a checkpoint's files."""
    # File n is read by rank n mod world, so that each is read once. alone: this rank reads all.
    share = names if alone else names[dist.get_rank() :: dist.get_world_size()]
    sums = {}
    for name in share:
        size = total = 0
        with (Path(path) / name).open("rb") as file:
            while block := file.read(16 << 20):
                size += len(block)
                total = zlib.crc32(block, total)
        sums[name] = [size, total]
    return sums


def merged(function, alone=False) -> dict:
    """Merge the dicts that function() returns on all ranks. alone: only this rank calls it."""
    # COMM: an all-gather over all ranks, after all of them have a result. Pinned by
    # tests/full/test_parallel.py::test_what_one_rank_cannot_do_is_refused_by_all.
    return {name: x for part in on_all_ranks(function, alone=alone) for name, x in part.items()}


def sealed(state) -> dict:
    """Return a checkpoint's JSON state, checksums of its files included, with its own checksum."""
    unsealed = {key: value for key, value in state.items() if key != "seal"}
    return unsealed | {"seal": zlib.crc32(json.dumps(unsealed, allow_nan=False).encode())}


def sealed_state(path) -> dict:
    """Return a checkpoint's JSON state. `Damaged` unless all files are there, by their sizes."""
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state != sealed(state):
            raise ValueError("its checksum differs")
        sizes = {name: size for name, (size, _) in state["files"].items()}
    # Only a file that is not there is damage. Another OSError may pass, so it is raised: a run that
    # went on from an older checkpoint would delete this one.
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError, KeyError,
            RecursionError) as error:  # fmt: skip
        raise Damaged(f"checkpoint {path}: state.json is missing or damaged: {error}") from error
    # DCP reads whatever tensor files are in the directory, also files of another program.
    found = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    for name in sorted(found.keys() | sizes.keys()):
        if found.get(name) != sizes.get(name):
            raise Damaged(f"checkpoint {path}: {name} is damaged: it has {found.get(name)} bytes, "
                          f"and state.json says {sizes.get(name)}")  # fmt: skip
    return state


def read_checkpoint(path, tensors, *, only="", alone=False) -> dict:
    """Collective. Fill `tensors` in place from a checkpoint, and return its verified JSON state.

    The checkpoint has the same tensors by name and shape, in any sharding, or it is refused.
    only: a prefix of names, or a tuple of prefixes; other stored tensors are ignored. "model."
        leaves out AdamW's state.
    alone: this rank reads by itself, into whole tensors.
    An error on any rank is raised on every rank: a ValueError, `Damaged` if bytes are not as they
    were written, or an OSError. It leaves `tensors` half filled.
    """
    def inspect():
        state = sealed_state(path)
        found = sums_of_share(path, sorted(state["files"]), alone)
        for name, sums in found.items():
            if sums != state["files"][name]:
                raise Damaged(f"checkpoint {path}: {name} is damaged (its checksum differs)")
        return state

    # Files are verified before any of them is loaded. Slow files do not end a run: each rank reads
    # its share at the same time as the others do.
    state = merged(inspect, alone)
    wanted = merged(lambda: {name: tuple(x.shape) for name, x in tensors.items()}, alone)
    reader = dcp.HuggingFaceStorageReader(str(path))

    # Strict both ways, so that no tensor keeps its first values, and no stored one is lost.
    with errors_on_all_ranks(alone=alone):
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:  # the checksums are right, and the files are of another program
            raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
        saved = {name: tuple(x.size) for name, x in stored.items() if name.startswith(only)}
        for name in sorted(saved.keys() | wanted.keys()):
            there, here = (found.get(name, "absent") for found in (saved, wanted))
            if there != here:
                raise ValueError(f"checkpoint {path} is of another model: {name} is {there} there "
                                 f"and {here} here")  # fmt: skip
    try:
        with warnings.catch_warnings():  # about `alone`
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except (dcp.CheckpointException, OSError) as error:  # raised on every rank, whichever failed
        with errors_on_all_ranks(alone=alone):
            raise ValueError(f"checkpoint {path} cannot be read: {reason_of(error)}") from error
    return state


def checkpoints(directory):
    """Return the step-NNNNNNNN directories, oldest first."""
    return sorted(Path(directory).glob("step-" + "[0-9]" * 8))
