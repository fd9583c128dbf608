"""Plans against one process in float64; checkpoints across plans; messages; memory."""

import contextlib
import functools
import gc
import json
import sys

import measure_parallel
import pytest
import torch
import torch.distributed as dist
from measure_parallel import CASES, LENGTH, ROWS
from measure_parallel import batch, build, compare, document_positions, train, train_pipeline
from measure_parallel import truth_of
from test_ranks import join, ranks, start
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import models
import parallel
from parallel import Grid, LocalOptimizer, Micro, Place, Plan
from parallel import clip_grad_norm, full, parallelize, read_checkpoint, reduce_gradients
from parallel import training_tensors, write_checkpoint

# The others join what these are apart, are those that test_parity.py holds against transformers,
# or train in test_a_checkpoint_of_one_plan_goes_on_under_another.
DEFAULT = measure_parallel.read_cases("""
    d2 dense empty, d4 dense hsdp, t2 dense alone, t2 tied, t2 bias, c2 tied ulysses, c4 dense,
    d2t2 tied fsdp, d2t2c2 dense, t2 moe, d2t2e4 moe fsdp, d2c2e4 moe, d2e2 starved,
    d2e2 starved fsdp, d2 moe fsdp offload, d2 moe full, p2 tied, p2 deep_tied interleaved,
    p2 deep_tied zbv, p2c2 dense,
""")
# The second step has AdamW's moments; a third, for all plans, is behind `-m slow`.
EVERY = [pytest.param(name, 2) for name in DEFAULT]
EVERY += [pytest.param(name, 3, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name, steps", EVERY)
def test_every_plan_is_one_process(tmp_path, name, steps):
    text, kind, options = CASES[name]
    truth = truth_of(kind, steps, empty=text if options.get("empty") else "")
    given = text, kind, options, steps, torch.float64, truth
    for errors in ranks(tmp_path, Plan.parse(text).world, compare, *given):
        assert max(errors) < 1e-10, errors


# Checkpoints across plans ----------------------------------------------------------------------


def _prepared(text, mode, seed, **options):
    """A grid, a part of a model from another seed, and its optimiser."""
    plan = Plan.parse(text)
    grid = Grid.make(plan)
    model = models.tiny_model("qwen3_moe", seed=seed, vocab_size=56, num_experts=4)
    model = parallelize(model, plan, device_mesh=grid, mode=mode, attention=None, **options)
    zero = mode == "zero1"
    return grid, model, LocalOptimizer(model, lambda x: torch.optim.AdamW(x, lr=0.01), zero=zero)


def _one_step(grid, model, optimizer):
    _, documents, weights = batch()
    rows = torch.arange(ROWS).chunk(grid.plan.dp)[grid.dp_rank]
    take, positions = torch.arange(LENGTH), document_positions(documents * 0)
    run, kind = (train, None) if grid.plan.pp == 1 else (train_pipeline, lambda r: None)
    run(model, rows, take, weights, kind, positions)
    reduce_gradients(model)
    clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _gathered(model, optimizer):
    return {name: full(x).clone() for name, x in training_tensors(model, optimizer).items()}


def _train_and_save(rank, text, mode, path, seed):
    grid, model, optimizer = _prepared(text, mode, seed)
    for _ in range(2):
        _one_step(grid, model, optimizer)
    write_checkpoint(path, training_tensors(model, optimizer), {"step": 2})
    saved = _gathered(model, optimizer)
    _one_step(grid, model, optimizer)
    return saved, _gathered(model, optimizer)


def _load_and_train(rank, text, mode, path, seed):
    grid, model, optimizer = _prepared(text, mode, seed)
    state = read_checkpoint(path, training_tensors(model, optimizer))
    assert state["step"] == 2
    loaded = _gathered(model, optimizer)
    _one_step(grid, model, optimizer)
    return loaded, _gathered(model, optimizer)


def _labeled(rank):
    """Whether DTensors of rows that t cut before d, and of columns and rows, are the whole."""
    mesh = Grid.make(Plan.parse("d2t2")).dense
    x = torch.arange(16.0).view(8, 2)
    found = []
    for dim in (0, 1):
        place = Place(mesh, (tuple(map(range, x.shape)),)).cut(dim, "tp").cut(0, "fsdp")
        rows, columns = place.boxes[-1]
        found.append(place.label(x[rows][:, columns]).full_tensor().equal(x))
    return found


def test_a_label_says_in_which_order_dimensions_were_cut(tmp_path):
    assert ranks(tmp_path, 4, _labeled) == [[True, True]] * 4


# (plan, mode) that saves -> (plan, mode) that goes on. In front: whole moments, split experts, rows
# of FSDP and stages, written and read once each, on four ranks at most.
CHAIN = [("d4", "zero1"), ("(attn:p2d2t2|ffn:p2e2t2)", "fsdp"), ("d2t2e4", "zero1"), ("d1", "ddp")]
PAIRS = [*zip(CHAIN, [*CHAIN[1:], CHAIN[0]])]
SHORT = [("d2", "zero1"), ("(attn:d2t2|ffn:e2t2)", "fsdp"), ("p2", "ddp")]
PAIRS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
PAIRS += zip(SHORT, SHORT[1:])


@pytest.mark.parametrize("writer, reader", PAIRS)
def test_a_checkpoint_of_one_plan_goes_on_under_another(tmp_path, writer, reader):
    text, mode = writer
    world, path = Plan.parse(text).world, tmp_path / "saved"
    parts = ranks(tmp_path, world, _train_and_save, text, mode, path, 3)
    saved, after = ({k: v for part in parts for k, v in part[n].items()} for n in (0, 1))
    text, mode = reader
    world = Plan.parse(text).world
    for loaded, stepped in ranks(tmp_path, world, _load_and_train, text, mode, path, 4):
        assert loaded and all(torch.equal(loaded[name], saved[name]) for name in loaded)
        assert all((stepped[k] - after[k]).abs().max() < 1e-10 for k in stepped)


FLOAT32 = ["d2 dense", "t2 dense", "c2 dense", "d2t2e4 moe", "p2 tied"]
# Sums of the same parts, whose formulas test_every_plan_is_one_process has in float64:
LATER = "d2t2c2 dense", "etp moe", "p2d2t2 tied", "d2t2e4 moe fsdp"
FLOAT32 += [pytest.param(name, marks=pytest.mark.slow) for name in LATER]


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_is_one_process_within_its_rounding(tmp_path, name):
    text, kind, options = CASES[name]
    world = Plan.parse(text).world
    for errors in ranks(tmp_path, world, compare, text, kind, options, 1, torch.float32):
        assert max(errors[:3]) < 1e-5, errors


def test_experts_and_ranks_without_a_token(tmp_path):
    """All rows go to the first rank's experts, or there are no rows at all."""
    for counts in ([3, 2, 0, 0], [0, 0, 0, 0]):
        for given, found in ranks(tmp_path, 2, _dispatched, counts):
            assert torch.equal(given * 2, found)


def _dispatched(rank, counts):
    counts_E = torch.tensor(counts)
    x_NM = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)
    out_NM = parallel.dispatch_experts(x_NM, counts_E, lambda x, counts: x * 2, dist.group.WORLD)
    out_NM.sum().backward()
    assert (x_NM.grad == 2).all()
    return x_NM.detach(), out_NM.detach()


# Messages --------------------------------------------------------------------------------------


def _counts(rank, text, kind, options):
    """Collectives of one forward and backward, by name, and P2P sends."""
    plan, sends, real = Plan.parse(text), [], dist.P2POp.__init__
    grid, model = Grid.make(plan), build(kind, torch.float64)
    model = parallelize(model, plan, device_mesh=grid, attention=models.causal_attention, **options)
    take, (_, documents, weights) = torch.arange(LENGTH), batch()
    rows = torch.arange(ROWS).chunk(plan.dp)[grid.dp_rank]
    positions = document_positions(documents * 0)

    def count(self, op, *args, **given):
        sends.extend([op] * (op is dist.isend))
        real(self, op, *args, **given)

    dist.P2POp.__init__ = count
    if plan.pp > 1:  # CommDebugMode cannot follow a schedule, and counts no P2P
        train_pipeline(model, rows, take, weights, lambda r: None, positions)
        return {"isend": len(sends)}
    with CommDebugMode() as comm:
        train(model, rows, take, weights, None, positions)
    names = {op.__name__.split(".")[0]: n for op, n in comm.get_comm_counts().items() if n}
    return {"isend": len(sends)} | names


def test_collectives_are_those_of_the_table(tmp_path):
    L, sparse = 2, len(build("moe", torch.float64).config.sparse_layers)
    gathers = dict(allgather_=2 * L + 1 + 2 * L + 1, reduce_scatter_=2 * L + 1 + 2 * L)
    cases = [
        ("t2", "dense", {}, gathers | dict(allreduce_=2 + 1)),
        ("t2", "dense", dict(sequence=False), dict(allreduce_=(2 * L + 1) + 2 * L + 2 + 1)),
        ("c2t2", "dense", {}, gathers | dict(allgather_=gathers["allgather_"] + 1, allreduce_=3)),
        ("d2", "dense", {}, {}),
        ("d2e2", "moe", {}, dict(alltoall_base_=(3 + 2) * sparse)),
        ("p2", "dense", {}, dict(isend=ROWS)),
    ]
    for text, kind, options, expected in cases:
        for found in ranks(tmp_path, Plan.parse(text).world, _counts, text, kind, options):
            assert {k: n for k, n in found.items() if n} == expected, (text, options)


def _kept_by_a_pipeline(rank):
    """Bytes of all tensors after a step of the longest of 20 lengths, and after the other 19."""
    plan = Plan.parse("p2")
    pipeline = parallelize(build("tied", torch.float64), plan, device_mesh=Grid.make(plan))
    kept = []
    for length in range(60, 20, -2):
        micros = [Micro(torch.arange(length)[None] % 56, torch.arange(length)[None])] * 4
        pipeline.forward_backward(micros, lambda k, hidden: hidden.square().sum())
        pipeline.micros.clear()
        kept.append(_bytes_of_all_tensors())
    return kept


def _bytes_of_all_tensors():
    gc.collect()
    return _memory(x for x in gc.get_objects() if isinstance(x, torch.Tensor))


def test_a_pipeline_keeps_the_buffers_of_its_last_length_only(tmp_path):
    for kept in ranks(tmp_path, 2, _kept_by_a_pipeline):
        assert max(kept[1:]) <= kept[0], kept


def _messages(rank):
    """Bytes of each message that sums gradients of 40, 40, 40, 400 and 8 bytes, at most 100."""
    parallel.MESSAGE = 100
    sent, all_reduce = [], dist.all_reduce
    gradients = [torch.full((n,), rank + 1.0) for n in (10, 10, 10, 100, 2)]

    def recorded(x, group):
        sent.append((x.nbytes, x.data_ptr() == gradients[3].data_ptr()))
        all_reduce(x, group=group)

    dist.all_reduce = recorded
    parallel.sum_in_messages(gradients, dist.group.WORLD)
    dist.all_reduce = all_reduce
    assert all((g == 3).all() for g in gradients)
    return sent


def test_messages_have_a_limit_in_bytes_and_a_large_gradient_has_no_buffer(tmp_path):
    for sent in ranks(tmp_path, 2, _messages):
        assert sent == [(80, False), (40, False), (400, True), (8, False)]


class _HostReads(TorchDispatchMode):
    """Counts how often a value goes to the host, where a GPU would have to be waited for."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.quick
@pytest.mark.parametrize("bad, found", [(None, -1), (7, 7), (0, 0), (29, 29)])
def test_the_first_gradient_that_is_not_finite_is_found_with_one_look(bad, found):
    gradients = [torch.randn(3) for _ in range(30)]
    gradients[3] = None  # a frozen parameter
    if bad is not None:
        gradients[bad][1] = torch.nan if bad else torch.inf
        gradients[-1][0] = -torch.inf
    with _HostReads() as reads:
        assert parallel.first_non_finite(gradients) == found
    assert reads.count <= 1


# What else a step must do ----------------------------------------------------------------------


def _lengths(rank):
    """The worst error of a pipeline whose micro-batches change their length from step to step."""
    plan, whole = Plan.parse("p2"), build("tied", torch.float64)
    pipeline = parallelize(build("tied", torch.float64), plan, device_mesh=Grid.make(plan))
    worst = 0.0
    for length in (8, 12, 8):
        tokens = torch.arange(3 * length).view(3, 1, length) % 56
        micros = [Micro(x, torch.arange(length)[None]) for x in tokens]
        found = pipeline.forward(micros)
        losses = pipeline.forward_backward(
            micros, lambda k, hidden: hidden.square().sum() * (k + 1)
        )
        if rank == 0:
            assert found is None and losses == []
            continue
        true = [whole.hidden(x) for x in tokens]
        sums = [x.square().sum() * (k + 1) for k, x in enumerate(true)]
        errors = [float((a - b).abs().max()) for a, b in zip(found, true, strict=True)]
        errors += [abs(float(a / b) - 1) for a, b in zip(losses, sums, strict=True)]
        worst = max(worst, *errors)
    return worst


def test_microbatches_may_change_their_length_from_step_to_step_and_evaluate(tmp_path):
    assert max(ranks(tmp_path, 2, _lengths)) < 1e-10


def _frozen(rank):
    """Half of the parameters are frozen, and are neither moved nor counted."""
    grid, model = Grid.make(Plan.parse("t2")), build("dense", torch.float64)
    for n, p in enumerate(model.parameters()):
        p.requires_grad_(n % 2 == 0)
    model = parallelize(model, grid.plan, device_mesh=grid)
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = LocalOptimizer(model, lambda x: torch.optim.AdamW(x, lr=0.1))
    model.hidden(torch.arange(8)[None]).square().sum().backward()
    reduce_gradients(model)
    assert clip_grad_norm(model, 1.0) > 0
    optimizer.step()
    return [
        (p.requires_grad, bool((full(p.detach()) == before[name]).all()))
        for name, p in model.named_parameters()
    ]


def _evaluated(rank, evaluates):
    """The norm and the weights of a step, with a forward without a backward before it or not."""
    grid, model = Grid.make(Plan.parse("d2")), build("tied", torch.bfloat16)
    model = parallelize(model, grid.plan, device_mesh=grid, mode="fsdp")
    optimizer = LocalOptimizer(model, lambda x: torch.optim.AdamW(x, lr=0.1))
    tokens = torch.arange(8)[None] + rank

    def evaluate():
        with torch.no_grad():
            model.hidden(tokens)

    model.hidden(tokens).double().square().sum().backward()
    if evaluates:
        evaluate()
    reduce_gradients(model)
    norm = clip_grad_norm(model, 1.0)
    assert norm.dtype == torch.float64
    optimizer.step()
    if evaluates:
        evaluate()
    return norm, [full(x).clone() for x in training_tensors(model, optimizer).values()]


def test_a_forward_before_the_step_loses_no_gradient_of_fsdp(tmp_path):
    found = [ranks(tmp_path, 2, _evaluated, evaluates)[0] for evaluates in (False, True)]
    (norm, plain), (other, evaluated) = found
    assert norm == other
    assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))


def test_frozen_parameters_stay_as_they_are(tmp_path):
    for found in ranks(tmp_path, 2, _frozen):
        assert all(same != moves for moves, same in found), found


# Checkpointing, memory, starting ---------------------------------------------------------------


@pytest.mark.parametrize("ac, layers", [("full", [0, 1, 2, 3]), ("layers", [0, 2]), ("op", [])])
def test_what_checkpointing_computes_again(ac, layers):
    model = build("deep", torch.float64)
    names = [name for name, _ in model.named_parameters()]
    again = {}  # layer -> FLOPs of what is computed in a backward

    def counted(n, run, *args):
        if torch._C._current_graph_task_id() == -1:  # not in a backward: the first time
            return run(*args)
        counter = FlopCounterMode(display=False)
        try:  # torch leaves by an exception once it has all that the backward needs
            with counter:
                return run(*args)
        finally:
            kept = parallel.KEPT if ac == "op" else ()
            by_op = counter.get_flop_counts()["Global"].items()
            again[n] = sum(flops for op, flops in by_op if op.__name__ not in kept)

    for n, layer in enumerate(model.model.layers):
        layer.forward = functools.partial(counted, n, layer.forward)
    parallel.checkpoint_layers(model.model.layers, ac)
    model.hidden(torch.arange(12)[None]).sum().backward()
    with FlopCounterMode(display=False) as counter:
        build("deep", torch.float64).hidden(torch.arange(12)[None])
    whole = counter.get_total_flops()
    assert [n for n, flops in again.items() if flops] == layers[::-1]
    most = whole * len(layers) / 4  # what only the layer's output needs is not done again
    assert most / 2 <= sum(again.values()) <= most
    assert names == [name for name, _ in model.named_parameters()]


def _memory(tensors):
    """Bytes of their storages, each counted once."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in tensors}.values())  # fmt: skip


def _held(rank, text, kind, mode, compute_dtype):
    """Bytes of weights, gradients and moments after a step."""
    plan = Plan.parse(text)
    options = dict(mode=mode, compute_dtype=compute_dtype)
    model = parallelize(
        build(kind, torch.float32), plan, device_mesh=Grid.make(plan), **options
    )
    optimizer = LocalOptimizer(model, lambda x: torch.optim.AdamW(x), zero=mode == "zero1")
    reduce_gradients(model)  # without a backward these are zeros
    weights = [parallel.local(p) for p in model.parameters()]
    gradients = [parallel.local(p.grad) for p in model.parameters()]
    optimizer.step()
    weights += [p.detach() for p in optimizer.mine.values()]
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    return [_memory(tensors) for tensors in (weights, gradients, moments)]


@pytest.mark.parametrize(
    "text, kind, mode, compute_dtype",
    [("d1", "moe", "ddp", None), ("t2", "bias", "ddp", None), ("d2e2", "moe", "ddp", None),
     ("d2", "dense", "fsdp", None), ("p2", "dense", "ddp", None), ("d2", "dense", "zero1", None),
     ("(attn:d2t2|ffn:e2t2)", "moe", "fsdp", None), ("t2", "moe", "ddp", torch.bfloat16),
     ("d2", "dense", "zero1", torch.bfloat16), ("d2", "dense", "fsdp", torch.bfloat16)],
)  # fmt: skip
def test_the_memory_that_plan_tells_is_what_a_rank_holds(tmp_path, text, kind, mode, compute_dtype):
    plan = Plan.parse(text)
    found = ranks(tmp_path, plan.world, _held, text, kind, mode, compute_dtype)
    config = build(kind, torch.float32).config
    step = measure_parallel.Step(mode, compute=2 if compute_dtype else 0)
    told = measure_parallel.memory(plan, config, step)
    fullest = max(found, key=sum)
    for name, counted in zip(("weights", "gradients", "moments"), fullest, strict=True):
        assert 0.97 < told[name] / counted < 1.03, name  # a vocabulary of 57 does not divide by 2


@pytest.mark.quick
def test_plan_prints_groups_and_memory(tmp_path, capsys):
    models.save_hf(build("moe", torch.float32), tmp_path)
    command = ["plan", "(attn:p2d2t2|ffn:p2e2t2)", "--world", "8", "--model", str(tmp_path)]
    assert parallel.main(command) == 0
    out = capsys.readouterr().out
    assert "ep: [0 2] [1 3] [4 6] [5 7]" in out and "fsdp: " in out and "GiB in all" in out
    assert parallel.main(["plan", "d2d2"]) == 2
    assert "each at most once" in capsys.readouterr().err
    assert parallel.main(["plan", "sglang:d2+(attn:d2t2|ffn:e2t2)"]) == 0
    assert parallel.main([]) == 2


def _bench(rank, flags, log):
    with open(log, "w") as out, contextlib.redirect_stdout(out):
        sys.exit(parallel.main(["bench", *flags.split()]))


@pytest.mark.slow  # test_readme.py runs it too
def test_bench_runs_at_toy_size(tmp_path):
    small = "--rows 4 --length 16 --steps 1 --plans d1 d2 p2"
    assert join(start(1, _bench, small, tmp_path / "log")) == [0]
    rows = json.loads((tmp_path / "log").read_text().splitlines()[-1])["rows"]
    assert [row["plan"] for row in rows] == ["d1", "d2", "p2"] and rows[1]["bytes"]
