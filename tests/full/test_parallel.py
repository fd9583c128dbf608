"""What only shows below a run: messages, memory, lengths, checkpoints of ranks, refusals, replicas.

That every plan is one process is in test_equivalence.py.
"""

import collections
import copy
import functools
import gc
import itertools
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
import torch._dynamo
import torch.distributed as dist
from conftest import complaint_of as _fails
from conftest import slow
from oracles import bytes_of
from plan_training import LENGTH, ROWS, Training, backward, batch, build
from test_ranks import ranks
from test_run import SHARD as FILE
from test_run import flip_a_bit
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from full.attention import ring
from full.learn.packing import run_forwards, run_micro_batches, states_like
from full.model.parallelize import STORED, parallelize, split_for_decoding
from full.model.transformer import causal_attention
from full.ranks import checkpoint
from full.ranks import optimizer as optimizer_py
from full.ranks.checkpoint import Damaged, read_checkpoint, write_checkpoint
from full.ranks.joining import all_gather_objects
from full.ranks.optimizer import (
    LocalOptimizer, clip_grad_norm, first_non_finite, reduce_gradients, sum_in_messages, tensors_of,
    training_tensors,
)  # fmt: skip
from full.ranks.places import full, local
from full.ranks.plans import Grid, Plan
from full.run.directory import RunDirectory

# Messages --------------------------------------------------------------------------------------


class _Calls(TorchDispatchMode):
    """Counts calls of collectives, and what goes to the host, where a GPU has to be waited for."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._overloadpacket.__name__
        self.counts[name] += op.namespace == "c10d" or name == "_local_scalar_dense"
        return op(*args, **(kwargs or {}))


def _counts(rank, text, kind, options):
    """Collectives of one forward and backward, and of a pipeline of each micro-batch's."""
    plan = Plan.parse(text)
    model = parallelize(build(kind, torch.float64), plan, device_mesh=Grid(plan), **options)
    tokens = batch().tokens_BS[: ROWS // plan.dp, : 24 // plan.cp]

    def forward(root, k, x):
        hidden = root.hidden(tokens if x is None else x)
        if not model.part.pipeline.has_head(root):
            return hidden
        logprobs, entropies = model.logprobs(hidden.flatten(0, 1), tokens.flatten())
        return (logprobs + entropies).sum()

    like = torch.empty(*tokens.shape, model.config.hidden_size, dtype=torch.float64)
    with _Calls() as calls:
        run_micro_batches(model, forward, 3 if plan.pp > 1 else 1, like)
    counts = calls.counts
    return {name: n for name, n in counts.items() if n and not name.startswith(("_local", "recv"))}


def test_collectives_are_those_of_the_table(tmp_path):
    """ac="op" keeps what they bring: none is called again, as "full" calls those of a layer."""
    L, sparse = 2, len(build("moe", torch.float64).config.sparse_layers)
    gathers = dict(allgather_=2 * L + 1 + 2 * L + 1, reduce_scatter_=2 * L + 1 + 2 * L)
    plain = gathers | dict(allreduce_=2 + 1)
    again = dict(allgather_=plain["allgather_"] + 2 * L, allreduce_=3)
    of_c = dict(attention=causal_attention)
    routed = dict(alltoall_base_=(3 + 2) * sparse)
    cases = [
        ("t2", "dense", {}, plain), ("t2", "dense", dict(ac="op"), plain),
        ("t2", "dense", dict(ac="full"), again | dict(reduce_scatter_=2 * L + 1 + 2 * L + L)),
        ("t2", "dense", dict(sequence=False), dict(allreduce_=(2 * L + 1) + 2 * L + 2 + 1)),
        # An object that is gathered is two all-gathers: here the tokens of the c ranks, under p an
        # error or None.
        ("c2t2", "dense", of_c, plain | dict(allgather_=plain["allgather_"] + 2)),
        ("d2", "dense", {}, {}), ("d2e2", "moe", {}, routed),
        ("d2e2", "moe", dict(ac="op"), routed), ("p2", "dense", {}, dict(send=3, allgather_=2)),
    ]  # fmt: skip
    for text, kind, options, expected in cases:
        for found in ranks(tmp_path, Plan.parse(text).world, _counts, text, kind, options):
            assert found == expected, (text, options)


def messages_have_a_limit_in_bytes_and_a_large_gradient_has_no_buffer(rank):
    """Of 100 bytes, for gradients of 40, 40, 40, 400 and 8 bytes."""
    optimizer_py.MESSAGE = 100
    sent, all_reduce = [], dist.all_reduce
    gradients = [torch.full((n,), rank + 1.0) for n in (10, 10, 10, 100, 2)]

    def recorded(x, group):
        sent.append((x.nbytes, x.data_ptr() == gradients[3].data_ptr()))
        all_reduce(x, group=group)

    dist.all_reduce = recorded
    sum_in_messages(gradients, dist.group.WORLD)
    dist.all_reduce = all_reduce
    assert all((g == 3).all() for g in gradients)
    assert sent == [(80, False), (40, False), (400, True), (8, False)]


@pytest.mark.quick
@pytest.mark.parametrize("bad, found", [(None, -1), (7, 7), (0, 0), (29, 29)])
def test_the_first_gradient_that_is_not_finite_is_found_with_one_look(bad, found):
    gradients = [torch.randn(3) for _ in range(30)]
    gradients[3] = None  # a frozen parameter
    if bad is not None:
        gradients[bad][1] = torch.nan if bad else torch.inf
        gradients[-1][0] = -torch.inf
    with _Calls() as reads:
        assert first_non_finite(gradients) == found
    assert reads.counts["_local_scalar_dense"] <= 1


# What else a step must do ----------------------------------------------------------------------


def only_the_last_micro_batches_keep_buffers_where_lengths_change(rank, schedule):
    """A long step of a pipeline keeps no fewer bytes in all tensors than later ones."""
    plan, kept = Plan.parse("p2"), []
    how = dict(device_mesh=Grid(plan), schedule=schedule)
    model = parallelize(build("deep", torch.float64), plan, **how)

    def forward(root, k, x):
        hidden = root.hidden(tokens[k] if x is None else x)
        return hidden.square().sum() if model.part.pipeline.has_head(root) else hidden

    for length in (60, 12, *range(58, 20, -8), 12):
        tokens = torch.arange(4 * length).view(4, 1, length) % 56
        like = torch.empty(1, length, model.config.hidden_size, dtype=torch.float64)
        with torch.no_grad():
            run_forwards(model, forward, 4, like)
        run_micro_batches(model, forward, 4, like)
        del tokens, like
        gc.collect()
        kept.append(bytes_of(x for x in gc.get_objects() if isinstance(x, torch.Tensor)))
    assert max(kept[1:]) <= kept[0]


def a_forward_before_the_step_loses_no_gradient_of_fsdp(rank):
    """A step is the same with forwards without a backward before and after it."""
    grid, found, tokens = Grid(Plan.parse("d2")), [], torch.arange(8)[None] + rank
    for evaluates in (False, True):
        model = parallelize(build("tied", torch.bfloat16), grid.plan, device_mesh=grid, mode="fsdp")
        optimizer = LocalOptimizer(model, lambda x: torch.optim.AdamW(x, lr=0.1))
        model.hidden(tokens).double().square().sum().backward()
        with torch.no_grad():
            if evaluates:
                model.hidden(tokens)
            reduce_gradients(model)
            norm = clip_grad_norm(model, 1.0)
            optimizer.step()
            if evaluates:
                model.hidden(tokens)
        found.append([norm, *(full(x) for x in training_tensors(model, optimizer).values())])
    assert found[0][0].dtype == torch.float64
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def a_parameter_without_dimensions_is_not_cut_by_rows(rank):
    model = _model()
    model.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    model = _split(model, "d2", mode="zero1")
    optimizer = LocalOptimizer(model, lambda x: torch.optim.SGD(x, lr=0.5), zero=True)
    model.scale.grad = torch.ones_like(model.scale)
    reduce_gradients(model)
    optimizer.step()
    assert (model.scale.grad.item(), model.scale.item()) == (2.0, 0.0)


@pytest.mark.parametrize("holds, args", [
    (messages_have_a_limit_in_bytes_and_a_large_gradient_has_no_buffer, ()),
    (a_forward_before_the_step_loses_no_gradient_of_fsdp, ()),
    (a_parameter_without_dimensions_is_not_cut_by_rows, ()),
    (only_the_last_micro_batches_keep_buffers_where_lengths_change, ("zbv",)),
    (only_the_last_micro_batches_keep_buffers_where_lengths_change, ("interleaved1f1b",)),
])
def test_on_two_ranks(tmp_path, holds, args):
    ranks(tmp_path, 2, holds, *args)


def _bf16_errors(rank):
    """{plan: squared errors of gradients in bfloat16: under the plan, and on one process}."""
    found, whole = {}, batch()
    cases = [("d2", "dense", dict(mode="fsdp")), ("d2e2", "moe", dict(sequence=False))]
    cases += [("t2", kind, {}) for kind in ("dense", "deep", "bias", "tied")]
    for text, kind, options in [*cases, ("c2", "dense", {}), ("p2", "deep", {})]:
        model = build(kind, torch.bfloat16)
        gradients = []
        for dtype in (torch.float64, torch.bfloat16):
            alone = copy.deepcopy(model).to(dtype)
            backward(alone, [whole], whole.tokens_BS.numel())
            gradients.append(dict(alone.named_parameters()))
        training = Training(model, Grid(Plan.parse(text)), whole, **options)
        training.backward()
        squares = found.setdefault(text, torch.zeros(2))
        for name, p in training.model.named_parameters():
            truth, plain = (x[name].grad.double() for x in gradients)
            mine = full(p.grad, training.model.part.places[name]).double()
            errors = torch.stack([(x - truth).norm() / truth.norm() for x in (mine, plain)])
            squares += errors.square()
    return found


def test_gradients_in_bfloat16_are_as_good_as_those_of_one_process(tmp_path):
    first, second = ranks(tmp_path, 2, _bf16_errors)
    for plan in first:
        ours, plain = (first[plan] + second[plan]).sqrt().tolist()
        assert ours <= 1.3 * plain, plan


@pytest.mark.parametrize("ac", ["full", "op"])
def test_what_checkpointing_computes_again(process_group, ac):
    """What a layer computes in a backward; of products "op" does none again."""
    model = build("deep", torch.float64)
    again = {}  # layer -> FLOPs

    def counted(n, run, *args, **options):
        if torch._C._current_graph_task_id() == -1:  # not in a backward: the first time
            return run(*args, **options)
        counter = FlopCounterMode(display=False)
        try:  # torch leaves by an exception once it has all that the backward needs
            with counter:
                return run(*args, **options)
        finally:
            kept = STORED if ac == "op" else ()
            by_op = counter.get_flop_counts()["Global"].items()
            again[n] = sum(flops for op, flops in by_op if op.__name__ not in kept)

    for n, layer in enumerate(model.model.layers):
        layer.forward = functools.partial(counted, n, layer.forward)
    model = parallelize(model, Plan(), device_mesh=Grid(Plan()), ac=ac)
    model.hidden(torch.arange(12)[None]).sum().backward()
    plain = build("deep", torch.float64)
    with FlopCounterMode(display=False) as counter:
        plain.hidden(torch.arange(12)[None])
    most = counter.get_total_flops() if ac == "full" else 0
    assert [*again] == [3, 2, 1, 0] and most / 2 <= sum(again.values()) <= most
    assert [*dict(model.named_parameters())] == [*dict(plain.named_parameters())]


def _kept_and_gradients(model):
    """Bytes that the forward keeps for the backward, and all gradients."""
    kept = []
    keep = lambda x: kept.append(x.nbytes) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden = model.hidden(torch.arange(24)[None])
    hidden.square().sum().backward()
    return sum(kept), [p.grad for p in model.parameters() if p.grad is not None]


def test_a_memory_budget_is_that_of_its_own_model(process_group, monkeypatch):
    """The compiler keeps less for the backward, the less the lower, and no other model does.

    Inductor's code for a CPU takes a minute to compile; what cuts the graph in two is the same in
    a backend that compiles nothing.
    """
    cutting = torch._dynamo.lookup_backend("aot_eager_decomp_partition")
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: cutting)
    whole = dict(kind="dense", dtype=torch.float64, num_hidden_layers=1)
    _, truth = _kept_and_gradients(build(**whole))
    models = [
        parallelize(build(**whole), Plan(), device_mesh=Grid(Plan()), compile=True,
                    ac=f"memory_budget={budget}") for budget in ("0", "0.5", "1")
    ]  # fmt: skip
    kept = []  # all are made before one is compiled
    for model in models:
        found, gradients = _kept_and_gradients(model)
        kept.append(found)
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(gradients, truth, strict=True))
        assert torch._functorch.config.activation_memory_budget == 1
    assert 1.2 * kept[0] < kept[1] < kept[2] / 1.2, kept


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


def _refused(rank, folder):
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


def _refused_of_four(rank, folder):
    for text, schedule, call, run, pattern in WHAT_NO_RANK_CAN_SEE_ALONE:
        model = _split(_model("deep"), text, schedule=schedule, attention=causal_attention)
        began = time.monotonic()
        with pytest.raises(Exception) as caught:
            call(model, run)
        assert time.monotonic() < began + 20, "it has waited"
        yield str(caught.value), pattern


def _listed(rank, function, folder):
    return [*function(rank, folder)]


@pytest.mark.parametrize("world, refused", [
    (2, _refused), (2, _damaged_then_older), (4, _refused_of_four)])
def test_what_one_rank_cannot_do_is_refused_by_all(tmp_path, world, refused):
    """By its name; two ranks say the same."""
    (tmp_path / "run").mkdir()
    said = ranks(tmp_path, world, _listed, refused, tmp_path / "run")
    for text, pattern in itertools.chain(*said):
        assert re.search(pattern, text), (text, pattern)
    assert said[0] and (world == 4 or said[0] == said[1])


# Replicas --------------------------------------------------------------------------------------


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


def _after_three_steps(rank, mode):
    """What differs after three steps of unequal gradients, and if a bit of one rank is flipped."""
    # Two layers at one end and one at the other, and a long vocabulary: the tied embedding lies at
    # other places of the ends' messages, over the borders at which the order of additions turns.
    model = build("deep_tied", torch.float64, num_hidden_layers=3, vocab_size=600)
    grid, norm = Grid(Plan.parse("p2d3")), "model.layers.0.input_layernorm.weight"
    share = grid.group["d"].rank()
    rows = torch.tensor([share % ROWS, (share + 1) % ROWS])
    training = Training(model, grid, batch(), rows=rows, mode=mode)
    for _ in range(3):
        training.backward()
        training.update()
    clean = replicas_differ(training.model, training.optimizer)
    if rank == 1:
        local(training.model.get_parameter(norm).detach()).view(torch.int64)[0] ^= 1
    return clean, f"model.{norm}" in replicas_differ(training.model, training.optimizer)


@pytest.mark.parametrize("mode", ["ddp", *slow(("zero1",))])
def test_replicas_hold_the_same_bits_after_three_steps(tmp_path, mode):
    """Three ranks a sum: two orders of addition would show, unlike with two."""
    assert ranks(tmp_path, 6, _after_three_steps, mode) == [([], True)] * 6


@pytest.mark.quick
def test_a_model_is_freed_without_the_garbage_collector(process_group):
    model = _split(_model(), "d1")
    dropped = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert dropped() is None
