"""Plans against one process in float64; checkpoints across plans; messages; memory."""

import contextlib
import functools
import gc
import json
import sys

import pytest
import torch
import torch.distributed as dist
from measure_parallel import CASES, ROWS, Training, batch, build, compare, read_cases, truth_of
from oracles import bytes_of
from test_ranks import join, ranks, start
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import models
import parallel
from parallel import Grid, LocalOptimizer, Micro, Plan
from parallel import clip_grad_norm, full, parallelize, read_checkpoint, reduce_gradients
from parallel import run_forwards, run_micro_batches, training_tensors, write_checkpoint

# The others join what these are apart, are those that test_parity.py holds against transformers,
# or train in test_a_checkpoint_of_one_plan_goes_on_under_another.
DEFAULT = read_cases("""
    d2 dense empty, d4 dense hsdp, t2 dense alone, t2 tied, t2 bias, c2 tied ulysses, c4 dense,
    d2t2 tied fsdp, d2t2c2 dense, t2 moe, d2t2e4 moe fsdp, d2c2e4 moe, d2e2 starved,
    d2e2 starved fsdp, d2 moe fsdp offload, d2 moe full, p2 tied, p2 deep_tied interleaved,
    p2 deep_tied zbv, p2c2 dense,
""")
FLOAT32 = read_cases("d2 dense, t2 dense, c2 dense, d2t2e4 moe, p2 tied")
MORE = read_cases("d2t2c2 dense, etp moe, p2d2t2 tied, d2t2e4 moe fsdp")
# The second step has AdamW's moments. `python parallel.py check`, which a slow test of
# test_readme.py runs, has a third for all plans but those that wait for a compiler.
EVERY = [pytest.param(name, 2, torch.float64) for name in DEFAULT]
EVERY += [pytest.param(name, 3, torch.float64, marks=pytest.mark.slow)
          for name in CASES if "compile" in name]  # fmt: skip
EVERY += [pytest.param(name, 1, torch.float32) for name in FLOAT32]
EVERY += [pytest.param(name, 1, torch.float32, marks=pytest.mark.slow) for name in MORE]


@pytest.mark.parametrize("name, steps, dtype", EVERY)
def test_every_plan_is_one_process(tmp_path, name, steps, dtype):
    """In float32 within its rounding; AdamW's first step is a sign, which rounding may turn."""
    text, kind, options = CASES[name]
    plan = Plan.parse(text)
    truth = truth_of(kind, steps, dtype, ROWS // plan.dp if "empty" in options else 0)
    count, bound = (4, 1e-10) if dtype == torch.float64 else (3, 1e-5)
    given = text, kind, options, steps, dtype, truth
    for errors in ranks(tmp_path, plan.world, compare, *given):
        assert max(errors[:count]) < bound, errors


def _whole(training):
    tensors = training_tensors(training.model, training.optimizer)
    return {name: full(x).clone() for name, x in tensors.items()}


def _checkpointed(rank, text, mode, path, writes):
    """The state of two steps, written or read; the state after one step more."""
    model = build("moe", torch.float64)
    training = Training(model, Grid.make(Plan.parse(text)), batch(is_packed=False), mode=mode)
    for _ in range(2 if writes else 1):  # a reader has begun with another state
        training.backward()
        training.update()
    tensors = training_tensors(training.model, training.optimizer)
    if writes:
        write_checkpoint(path, tensors, {"step": 2})
    else:
        assert read_checkpoint(path, tensors)["step"] == 2
    stored = _whole(training)
    training.backward()
    training.update()
    return stored, _whole(training)


# (plan, mode) that saves -> (plan, mode) that goes on. In front: whole moments, split experts, rows
# of FSDP and stages, written and read once each, on four ranks at most.
CHAIN = [("d4", "zero1"), ("(attn:p2d2t2|ffn:p2e2t2)", "fsdp"), ("d2t2e4", "zero1"), ("d1", "ddp")]
PAIRS = [*zip(CHAIN, [*CHAIN[1:], CHAIN[0]])]
SHORT = [("d2", "zero1"), ("(attn:d2t2|ffn:e2t2)", "fsdp"), ("p2", "ddp")]
PAIRS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS]
PAIRS += zip(SHORT, SHORT[1:])


@pytest.mark.parametrize("writer, reader", PAIRS)
def test_a_checkpoint_of_one_plan_goes_on_under_another(tmp_path, writer, reader):
    found = []
    for writes, (text, mode) in ((True, writer), (False, reader)):
        given = text, mode, tmp_path / "saved", writes
        found.append(ranks(tmp_path, Plan.parse(text).world, _checkpointed, *given))
    saved, after = ({k: v for part in found[0] for k, v in part[n].items()} for n in (0, 1))
    for loaded, stepped in found[1]:
        assert loaded and all(torch.equal(loaded[name], saved[name]) for name in loaded)
        assert all((stepped[k] - after[k]).abs().max() < 1e-10 for k in stepped)


# Messages --------------------------------------------------------------------------------------


def _dispatched(rank):
    """All rows go to the first rank's experts, or there are no rows at all."""
    for counts in ([3, 2, 0, 0], [0, 0, 0, 0]):
        x_NM = torch.randn(sum(counts), 3, dtype=torch.float64, requires_grad=True)
        twice = lambda x, counts: x * 2  # noqa: E731
        group = dist.group.WORLD
        out_NM = parallel.dispatch_experts(x_NM, torch.tensor(counts), twice, group)
        out_NM.sum().backward()
        assert torch.equal(x_NM * 2, out_NM) and (x_NM.grad == 2).all()
    return True


def test_experts_and_ranks_without_a_token(tmp_path):
    assert all(ranks(tmp_path, 2, _dispatched))


def _states(model, length):
    """Memory for what a stage sends to the next."""
    return torch.empty(1, length, model.config.hidden_size, dtype=torch.float64)


def _squares(model, micros, found):
    """What runs micro-batch k: states, or k + 1 times the sum of the last ones' squares."""

    def forward(root, k, x):
        hidden = micros[k].through(root, x)
        if not model.part.has_head(root):
            return hidden
        found.append((hidden.detach(), hidden.square().sum() * (k + 1)))
        return found[-1][1]

    return forward


def _counts(rank, text, kind, options):
    """Collectives of one forward and backward, by name, and P2P sends."""
    plan, sends, real = Plan.parse(text), [], dist.P2POp.__init__
    given = dict(attention=None) | options
    model = parallelize(build(kind, torch.float64), plan, device_mesh=Grid.make(plan), **given)
    tokens = batch().tokens_BS[: ROWS // plan.dp, : 24 // plan.cp]

    def count(self, op, *args, **given):
        sends.extend([op] * (op is dist.isend))
        real(self, op, *args, **given)

    dist.P2POp.__init__ = count
    if plan.pp > 1:  # CommDebugMode cannot follow a schedule, and counts no P2P
        micros = [Micro(row[None], torch.arange(24)[None]) for row in tokens]
        run_micro_batches(model, _squares(model, micros, []), ROWS, _states(model, 24))
        return {"isend": len(sends)}
    with CommDebugMode() as comm:
        hidden = model.hidden(tokens).flatten(0, 1)
        logprobs, entropies = model.logprobs(hidden, tokens.flatten())
        (logprobs + entropies).sum().backward()
    names = {op.__name__.split(".")[0]: n for op, n in comm.get_comm_counts().items()}
    return {name: n for name, n in {"isend": len(sends), **names}.items() if n}


def test_collectives_are_those_of_the_table(tmp_path):
    L, sparse = 2, len(build("moe", torch.float64).config.sparse_layers)
    gathers = dict(allgather_=2 * L + 1 + 2 * L + 1, reduce_scatter_=2 * L + 1 + 2 * L)
    of_c = dict(attention=models.causal_attention)
    cases = [
        ("t2", "dense", {}, gathers | dict(allreduce_=2 + 1)),
        ("t2", "dense", dict(sequence=False), dict(allreduce_=(2 * L + 1) + 2 * L + 2 + 1)),
        ("c2t2", "dense", of_c, gathers | dict(allreduce_=3)),
        ("d2", "dense", {}, {}),
        ("d2e2", "moe", {}, dict(alltoall_base_=(3 + 2) * sparse)),
        ("p2", "dense", {}, dict(isend=ROWS)),
    ]
    for text, kind, options, expected in cases:
        for found in ranks(tmp_path, Plan.parse(text).world, _counts, text, kind, options):
            assert found == expected, (text, options)


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


def _lengths(rank, text):
    """A pipeline whose length changes: its error; bytes after a long step and after others."""
    plan, whole = Plan.parse(text), build("deep_tied", torch.float64)
    options = dict(device_mesh=Grid.make(plan), schedule="interleaved1f1b")
    model = parallelize(build("deep_tied", torch.float64), plan, **options)
    worst, kept = 0.0, []
    for length in (60, 12, *range(58, 20, -2), 12):
        tokens = torch.arange(4 * length).view(4, 1, length) % 56
        micros = [Micro(x, torch.arange(length)[None]) for x in tokens]
        found, trained = [], []
        with torch.no_grad():
            run_forwards(model, _squares(model, micros, found), 4, _states(model, length))
        run_micro_batches(model, _squares(model, micros, trained), 4, _states(model, length))
        assert len(found) == len(trained) == 4 * model.part.is_last
        for (hidden, _), (_, loss), x, k in zip(found, trained, tokens, range(4)):
            true = whole.hidden(x).detach()
            worst = max(worst, float((hidden - true).abs().max()))
            worst = max(worst, abs(float(loss / (true.square().sum() * (k + 1))) - 1))
        del tokens, micros, found, trained
        true = hidden = loss = x = None
        gc.collect()
        kept.append(bytes_of(x for x in gc.get_objects() if isinstance(x, torch.Tensor)))
    return worst, kept


@pytest.mark.parametrize("plan, world", [("p2", 2), ("d2p2", 4)])
def test_microbatches_may_change_their_length_and_only_the_last_one_keeps_buffers(
    tmp_path, plan, world
):
    found = ranks(tmp_path, world, _lengths, plan)
    assert all(worst < 1e-10 and max(kept[1:]) <= kept[0] for worst, kept in found), found


def _frozen(rank):
    """Half of the parameters are frozen, and are neither moved nor counted."""
    model = build("dense", torch.float64)
    for n, p in enumerate(model.parameters()):
        p.requires_grad_(n % 2 == 0)
    training = Training(model, Grid.make(Plan.parse("t2")), batch(is_packed=False))
    named = dict(training.model.named_parameters())
    places = training.model.part.places
    before = {name: full(p, places[name]).clone() for name, p in named.items()}
    training.backward()
    assert training.update() > 0
    return all(p.requires_grad != full(p, places[name]).equal(before[name])
               for name, p in named.items())  # fmt: skip


def test_frozen_parameters_stay_as_they_are(tmp_path):
    assert all(ranks(tmp_path, 2, _frozen))


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


@pytest.mark.parametrize("ac, layers", [("full", [0, 1, 2, 3]), ("op", [])])
def test_what_checkpointing_computes_again(ac, layers):
    model = build("deep", torch.float64)
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
    parallel.checkpoint_layers(model.model.layers, ac, Plan())
    model.hidden(torch.arange(12)[None]).sum().backward()
    plain = build("deep", torch.float64)
    with FlopCounterMode(display=False) as counter:
        plain.hidden(torch.arange(12)[None])
    most = counter.get_total_flops() * len(layers) / 4
    assert [n for n, flops in again.items() if flops] == layers[::-1]
    assert most / 2 <= sum(again.values()) <= most  # what only a layer's output needs is not
    assert [*dict(model.named_parameters())] == [*dict(plain.named_parameters())]


def _bench(rank, flags, log):
    with open(log, "w") as out, contextlib.redirect_stdout(out):
        sys.exit(parallel.main(["bench", *flags.split()]))


@pytest.mark.slow
def test_bench_runs_at_toy_size(tmp_path):
    small = "--rows 4 --length 16 --steps 1 --plans d1 d2 p2"
    assert join(start(1, _bench, small, tmp_path / "log")) == [0]
    rows = json.loads((tmp_path / "log").read_text().splitlines()[-1])["rows"]
    assert [row["plan"] for row in rows] == ["d1", "d2", "p2"] and rows[1]["bytes"]
