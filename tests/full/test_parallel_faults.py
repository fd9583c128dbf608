"""What parallel.py must refuse, keep and notice: damaged checkpoints, buffers, calls, replicas."""

import functools
import gc
import json
import re
import shutil
import time
import weakref
import zlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import complaint_of as _fails
from conftest import slow
from plan_training import LENGTH, ROWS, Training, batch, build
from test_ranks import ranks
from test_run import SHARD as FILE
from test_run import flip_a_bit
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from full.attention import ring
from full.learn.packing import run_forwards, run_micro_batches, states_like
from full.model.parallelize import parallelize, split_for_decoding
from full.model.transformer import causal_attention
from full.ranks import checkpoint
from full.ranks.checkpoint import Damaged, read_checkpoint, write_checkpoint
from full.ranks.joining import all_gather_objects
from full.ranks.optimizer import (
    LocalOptimizer, reduce_gradients, tensors_of, training_tensors,
)  # fmt: skip
from full.ranks.places import local
from full.ranks.plans import Grid, Plan
from full.run.directory import RunDirectory


def equal_on_ranks(tmp_path, world, function, *args):
    """What function returns on every rank."""
    first, *others = ranks(tmp_path, world, function, *args)
    assert all(found == first for found in others)
    return first


def _listed(rank, function, *args):
    return [*function(rank, *args)]


# Checkpoints -----------------------------------------------------------------------------------


TENSORS = {"a": torch.ones(3, 4), "step": torch.tensor(7.0).double()}


@pytest.mark.quick
def test_numbers_that_are_not_json_are_neither_written_nor_read(process_group, tmp_path):
    """Not with a seal that fits either."""
    path = tmp_path / "saved"
    with pytest.raises(OSError, match="not written .Out of range"):
        write_checkpoint(path, TENSORS, {"step": float("nan")})
    assert not list(tmp_path.iterdir())
    write_checkpoint(path, TENSORS, {"step": 3})
    for number in ("NaN", "1e999"):
        state = json.loads((path / "state.json").read_text()) | {"step": json.loads(number)}
        del state["seal"]
        state["seal"] = zlib.crc32(json.dumps(state).encode())
        (path / "state.json").write_text(json.dumps(state))
        with pytest.raises(ValueError, match=f"checkpoint {path}: .*Out of range"):
            read_checkpoint(path, TENSORS)


@pytest.mark.quick
def test_a_checkpoint_stays_until_the_new_one_of_its_name_is_whole(
    process_group, tmp_path, monkeypatch
):
    path = tmp_path / "saved"
    write_checkpoint(path, TENSORS, {"step": 1})

    def full_disk(*given, **how):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint.dcp, "save", full_disk)
    with pytest.raises(OSError, match="not written .no space left"):
        write_checkpoint(path, TENSORS, {"step": 2})
    assert read_checkpoint(path, TENSORS)["step"] == 1


def _rows_of(rank, value, rows=4):
    """Tensors of 2 * rows KiB, half of them on each of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    here = torch.full((rows, 256), float(value))
    return {name: DTensor.from_local(here.clone(), mesh, [Shard(0)], run_check=False)
            for name in ("a", "b", "c")}  # fmt: skip


OF_RANK_1 = FILE.replace("1-model", "2-model")
DAMAGES = {  # which file, what is done to it
    "a flipped byte": (OF_RANK_1, flip_a_bit),
    "a lost file": (OF_RANK_1, Path.unlink),
    "one more file": ("more.safetensors", lambda x: shutil.copy(x.with_name(FILE), x)),
    "no state": ("state.json", Path.unlink),
    "a flipped state": ("state.json", lambda x: x.write_text(x.read_text().replace("2", "3"))),
}


def _damaged_then_older(rank, folder):
    """Which step is read if a file of the newest is damaged, what it fills, and what is said."""
    for step in (1, 2):
        tensors = _rows_of(rank, 10 * step + rank)
        write_checkpoint(folder / f"step-{step:08d}", tensors, {"step": step})
    newest, good = folder / "step-00000002", folder / "good"
    if rank == 0:
        shutil.copytree(newest, good)
    for file, damage in DAMAGES.values():
        if rank == 0:
            shutil.rmtree(newest)
            damage(Path(shutil.copytree(good, newest)) / file)
        dist.barrier()
        found = _rows_of(rank, 0)
        path, state = RunDirectory(folder).read_newest(lambda path: read_checkpoint(path, found))
        assert Path(path).name == "step-00000001" and state["step"] == 1
        assert all((local(x) == 10 + rank).all() for x in found.values())
        said = _fails(read_checkpoint, newest, found, error=Damaged)
        yield said, f": {file} is .*(damaged|missing)"

    # Only rank 0 makes a directory, which is here inside a file, and no rank waits for it.
    nowhere = folder / "good" / "state.json" / "saved"
    yield _fails(write_checkpoint, nowhere, found, {"step": 1}, error=OSError), "state.json/saved"

    # Another model is refused: an older checkpoint of the same run would not be another one.
    with pytest.raises(ValueError, match="of another model") as error:
        more = found | {"d": torch.zeros(1)}
        RunDirectory(folder).read_newest(lambda path: read_checkpoint(path, more))
    assert not isinstance(error.value, Damaged)


def test_what_one_rank_cannot_read_is_refused_by_all(tmp_path):
    """By name, and the next older checkpoint is read."""
    (tmp_path / "run").mkdir()
    said = equal_on_ranks(tmp_path, 2, _listed, _damaged_then_older, tmp_path / "run")
    assert len(said) == len(DAMAGES) + 1
    for text, pattern in said:
        assert re.search(pattern, text), text


def _slow(rank, folder):
    """Write and resume where a rank's own share takes longer than a collective may wait."""
    dist.barrier()
    dist.destroy_process_group()
    patience = dict(init_method=f"file://{folder}/slow-store", timeout=timedelta(seconds=3))
    dist.init_process_group("gloo", rank=rank, world_size=2, **patience)
    rows = 512
    seconds_per_byte = 4 / (3 * rows * 1024)

    def slow(data, value=0):
        time.sleep(len(data) * seconds_per_byte)
        return zlib.crc32(data, value)

    # Each file is summed once for a save and once for a resume.
    summed, sums_of_share = [], checkpoint.sums_of_share
    checkpoint.zlib = SimpleNamespace(crc32=slow)
    checkpoint.sums_of_share = lambda *args: summed.append(found := sums_of_share(*args)) or found
    write_checkpoint(folder / "step-00000001", _rows_of(rank, rank + 1, rows), {"step": 1})
    found = _rows_of(rank, 0, rows)
    RunDirectory(folder).read_newest(lambda path: read_checkpoint(path, found))
    assert all((local(x) == rank + 1).all().item() for x in found.values())
    return [[*files] for files in summed]


def test_slow_files_do_not_end_a_run_and_each_is_summed_once(tmp_path):
    """A share takes 4 s to sum, and a collective waits for 3 s."""
    (tmp_path / "run").mkdir()
    assert ranks(tmp_path, 2, _slow, tmp_path / "run") == [[[FILE]] * 2, [[OF_RANK_1]] * 2]


def test_a_part_of_a_checkpoint_is_read_by_the_beginning_of_its_names(tmp_path, process_group):
    """And is as strict: a tensor too many or too few under these names is refused."""
    stored = {"model.a": torch.ones(2), "model.b": torch.ones(3), "optimizer.a": torch.ones(2)}
    write_checkpoint(tmp_path / "saved", stored, {"step": 1})
    found = {"model.a": torch.zeros(2), "model.b": torch.zeros(3)}
    assert read_checkpoint(tmp_path / "saved", found, only="model.")["step"] == 1
    assert all(x.eq(1).all() for x in found.values())
    with pytest.raises(ValueError, match=r"optimizer.a is \(2,\) there and absent here"):
        read_checkpoint(tmp_path / "saved", found)
    with pytest.raises(ValueError, match=r"model.b is \(3,\) there and absent here"):
        read_checkpoint(tmp_path / "saved", {"model.a": torch.zeros(2)}, only="model.")
    with pytest.raises(ValueError, match="model.c is absent there"):
        read_checkpoint(tmp_path / "saved", found | {"model.c": torch.zeros(1)}, only="model.")


# Calls that cannot be --------------------------------------------------------------------------


def _model(kind="dense"):
    return build(kind, torch.float64)


def _call(text, kind="dense", *, grid=None, length=LENGTH, token=1, **options):
    """What is said of a plan, of the grid of another one, of a length or of a token."""
    model, plan, parts = _model(kind), Plan.parse(text), []

    def call():
        mesh = Grid(Plan.parse(grid or text))
        parts.append(parallelize(model, plan, device_mesh=mesh, **options))
        model.hidden(torch.full((1, length), token))

    said = _fails(call)
    if not parts:  # it is still the whole model that computes on one process
        tokens = torch.arange(LENGTH)[None]
        assert torch.equal(model.hidden(tokens), _model(kind).hidden(tokens))
    return said


CALLS = [  # plan, kind of model, options of `_call`, what all ranks say
    ("t2", "dense", dict(length=23), "t = 2 to divide the tokens of a rank, got 23; pad rows"),
    ("t2", "dense", dict(token=57), "token id 57 at row 0, column 0 is not in the vocabulary"),
    ("d2", "dense", dict(mode="zero3"), "mode: expected one of ddp, fsdp, zero1, got 'zero3'"),
    ("d2", "dense", dict(ac="layers"), "ac: expected none, full, op or memory_.*, got 'layers'"),
    ("d2", "dense", dict(ac="memory_budget=1.1", compile=True), "got 'memory_budget=1.1'"),
    ("d2", "dense", dict(ac="memory_budget=0.5"), "ac='memory_budget=0.5' .* needs compile=True"),
    ("p2", "dense", dict(schedule="gpipe"), "schedule: expected one of 1f1b, interleaved1f1b"),
    ("d2", "dense", dict(offload=True), 'offload=True moves shards: it needs mode="fsdp"'),
    ("c2", "dense", {}, "plan c2: .*splits sequences: give attention="),
    ("d4", "dense", {}, r"plan d4: expected .* = 4 ranks, got 2"),
    ("d2e2", "dense", {}, "expected a model with experts, got a dense one"),
    ("t2", "moe", dict(sequence=False), "every tensor rank would send the same tokens"),
    ("p2", "deep", dict(schedule="zbv", mode="fsdp"), "zbv has no mode=.fsdp"),
    ("p2", "deep", dict(schedule="zbv", ac="op"), "zbv has no .*ac=.op"),
    ("d2e2", "moe", dict(mode="fsdp", ac="op"), "d2e2: each expert is whole on one rank"),
    ("t2", "dense", dict(compile=True, ac="op"), "torch.compile cannot keep what messages"),
    ("p2", "dense", dict(schedule="zbv"), "zbv cuts 4 stages, but the model has 2 layers"),
    ("d2", "dense", dict(grid="t2"), "plan d2: expected its grid, got the grid of plan t2"),
    ("d2", "dense", dict(schedule="zbv"), "plan d2: schedule='zbv' needs a pipeline"),
]


def _split(model, text, **options):
    plan = Plan.parse(text)
    return parallelize(model, plan, device_mesh=Grid(plan), **options)


def _refused(rank):
    """(what is said, what it must match) of each wrong call."""
    for text, kind, options, pattern in CALLS:
        yield _call(text, kind, **options), pattern
    fsdp.fully_shard(sharded := _model())
    for model, text in ((_split(_model(), "t2"), "t2"), (_split(_model(), "p2"), "p2"),
                        (sharded, "d2")):  # fmt: skip
        yield _fails(_split, model, text), "expected a whole model, got one that is split or shard"
    zero = "zero=True .* expected a model of .*zero1.*, got mode="
    for model, pattern in (
        (_split(_model(), "d2", mode="fsdp"), zero + "'fsdp'"),
        (sharded, "expected a whole model or one of parallelize, got one with DTensors"),
        (_model(), zero + "'ddp'"),
    ):
        yield _fails(LocalOptimizer, model, torch.optim.AdamW, zero=True), pattern
    tied = _model()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    yield _fails(_split, tied, "t2"), "one parameter with two names"
    grid = Grid(Plan.parse("d2e2"))
    yield _fails(split_for_decoding, _model(), grid), "expected a model with experts"


def test_what_cannot_be_is_refused_alike_on_every_rank(tmp_path):
    for text, pattern in equal_on_ranks(tmp_path, 2, _listed, _refused):
        assert re.search(pattern, text), (text, pattern)


def _row_of_27(model, run):
    """13 tokens on one c rank and 14 on the other: t = 2 divides one of the numbers."""
    grid = model.part.grid
    model.hidden(ring.shard(torch.arange(27)[None], dim=1, group=grid.group["c"]))


def _micro_batches(lengths, states, model, run, breaks=False):
    """Run rows of these lengths through stages, with states of so many tokens in between."""
    tokens = [torch.arange(length)[None] for length in lengths]

    def forward(root, n, x):
        positions = torch.arange(lengths[n])[None]
        hidden = root.hidden(tokens[n] if x is None else x, positions=positions)
        if breaks and model.part.pipeline.has_head(root):
            raise KeyError("mine")
        return hidden.square().sum() if model.part.pipeline.has_head(root) else hidden

    like = torch.empty(1, states, model.config.hidden_size, dtype=torch.float64)
    run(model, forward, len(lengths), like)


def _states_of_23(model, run):
    states_like(model, (1, 23))


def _ring_of_contiguous_shards(model, run):
    """Without a mask. Of 10 tokens a zigzag gives the four ranks 3, 2, 2 and 3."""
    q = torch.ones(1, 2, (3, 2, 3, 2)[dist.get_rank()], 4)
    ring.ring_attention(q, q, q)


BREAKS = functools.partial(_micro_batches, [24] * 4, 12, breaks=True)
WHAT_NO_RANK_CAN_SEE_ALONE = [  # plan, schedule, what runs, how, what all ranks say
    ("c2t2", "1f1b", _row_of_27, None, "expected t = 2 to divide .*, got 13"),
    ("c2t2", "1f1b", _ring_of_contiguous_shards, None,
     r"zigzag shards of \(3, 2, 2, 3\) .* got \(3, 2, 3, 2\)"),
    ("p2t2", "1f1b", _states_of_23, None, "expected t = 2 to divide .*, got 23"),
    *(("p2t2", schedule, functools.partial(_micro_batches, [23] * 4, 11), run, "got 23; pad")
      for schedule in ("1f1b", "zbv") for run in (run_micro_batches, run_forwards)),
    *(("p2t2", schedule, functools.partial(_micro_batches, [24, 20, 24, 24], 12),
       run_micro_batches, r"micro-batch 1: expected states \(1, 12, 24\) .* got \(1, 10, 24\)")
      for schedule in ("1f1b", "interleaved1f1b")),
    ("p2t2", "1f1b", BREAKS, run_micro_batches, "mine"),
    ("p2t2", "zbv", BREAKS, run_forwards, "mine"),
]  # fmt: skip


def _refused_by_all(rank):
    found = []
    for text, schedule, call, run, _ in WHAT_NO_RANK_CAN_SEE_ALONE:
        model = _split(_model("deep"), text, schedule=schedule, attention=causal_attention)
        began = time.monotonic()
        with pytest.raises(Exception) as caught:
            call(model, run)
        assert time.monotonic() < began + 20, "it has waited"
        found.append(str(caught.value))
    return found


def test_what_some_ranks_cannot_do_is_refused_by_all(tmp_path):
    for said in ranks(tmp_path, 4, _refused_by_all):
        for text, (*_, pattern) in zip(said, WHAT_NO_RANK_CAN_SEE_ALONE, strict=True):
            assert re.search(pattern, text), (text, pattern)


def _own_number(rank):
    """The gradient of a number that a model has of its own, and the number after a step."""
    model = _model()
    model.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    model = _split(model, "d2", mode="zero1")
    optimizer = LocalOptimizer(model, lambda x: torch.optim.SGD(x, lr=0.5), zero=True)
    model.scale.grad = torch.ones_like(model.scale)
    reduce_gradients(model)
    optimizer.step()
    return model.scale.grad.item(), model.scale.item()


def test_a_parameter_without_dimensions_is_not_cut_by_rows(tmp_path):
    assert ranks(tmp_path, 2, _own_number) == [(2.0, 0.0)] * 2


# Replicas --------------------------------------------------------------------------------------


def _trained(text, kind, *, sizes=None, **options):
    """A model and its optimizer after three AdamW steps with unequal gradients on every share."""
    model, grid = build(kind, torch.float64, **(sizes or {})), Grid(Plan.parse(text))
    share = grid.group["d"].rank()
    rows = torch.tensor([share % ROWS, (share + 1) % ROWS])
    training = Training(model, grid, batch(), rows=rows, **options)
    for _ in range(3):
        training.backward()
        training.update()
    return training.model, training.optimizer


def replicas_differ(model, optimizer):
    """The names of tensors of which two ranks hold the same entries with other bits. Collective."""
    digests = {}  # (name, which part of the whole) -> digest, of each tensor on this rank
    for name, x in (training_tensors(model, optimizer) | tensors_of(model)).items():
        part = ()
        if isinstance(x, DTensor):
            numbers = zip(x.device_mesh.get_coordinate(), x.placements)
            part = tuple(number for number, placement in numbers if placement.is_shard())
        digests[name, part] = zlib.crc32(local(x.detach()).contiguous().numpy().tobytes())
    tables = all_gather_objects(digests)
    return sorted({key[0] for table in tables for key, digest in table.items()
                   if any(other.get(key, digest) != digest for other in tables)})  # fmt: skip


def _after_three_steps(rank, cases):
    """What differs after three steps, and with a bit flipped on one rank."""
    for text, kind, options in cases:
        model, optimizer = _trained(text, kind, **options)
        clean = replicas_differ(model, optimizer)
        if rank == 1:
            here = local(model.get_parameter(NORM).detach())
            here.view(torch.int32 if here.element_size() == 4 else torch.int64)[0] ^= 1
        yield clean, f"model.{NORM}" in replicas_differ(model, optimizer)


NORM = "model.layers.0.input_layernorm.weight"
# Two layers at one end and one at the other, and a long vocabulary: the tied embedding lies at
# other places of the ends' messages, over the borders at which the order of additions turns.
UNEVEN = dict(sizes=dict(num_hidden_layers=3, vocab_size=600))
SIX = [("p2d3", "deep_tied", UNEVEN | more) for more in ({}, dict(mode="zero1"))]


@pytest.mark.parametrize("cases", [SIX[:1], *slow((SIX[1:],))], ids=["ddp", "zero1"])
def test_replicas_hold_the_same_bits_after_three_steps(tmp_path, cases):
    """Three ranks a sum: two orders of addition would show, unlike with two."""
    said = equal_on_ranks(tmp_path, 6, _listed, _after_three_steps, cases)
    assert said == [([], True)] * len(cases)  # and a flipped bit is seen


@pytest.mark.quick
def test_a_model_is_freed_without_the_garbage_collector(process_group):
    model = _split(_model(), "d1")
    dropped = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert dropped() is None
