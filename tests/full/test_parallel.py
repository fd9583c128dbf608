"""What only shows below a run: messages, memory, lengths, recomputation.

That every plan is one process is in test_equivalence.py.
"""

import collections
import copy
import functools
import gc

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from plan_training import ROWS, Training, backward, batch, build
from oracles import bytes_of
from test_ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from full.learn.packing import run_forwards, run_micro_batches
from full.model.parallelize import STORED, parallelize
from full.model.transformer import causal_attention
from full.ranks import optimizer as optimizer_py
from full.ranks.optimizer import (
    LocalOptimizer, clip_grad_norm, first_non_finite, reduce_gradients, sum_in_messages,
    training_tensors,
)  # fmt: skip
from full.ranks.places import full
from full.ranks.plans import Grid, Plan

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


def _messages(rank):
    """Bytes of each message that sums gradients of 40, 40, 40, 400 and 8 bytes, at most 100."""
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
    return sent


def test_messages_have_a_limit_in_bytes_and_a_large_gradient_has_no_buffer(tmp_path):
    for sent in ranks(tmp_path, 2, _messages):
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


def _lengths(rank, schedule):
    """Bytes of all tensors after a long step of a pipeline, and after others."""
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
    return kept


@pytest.mark.parametrize("schedule", ["zbv", "interleaved1f1b"])
def test_only_the_last_micro_batches_keep_buffers_where_lengths_change(tmp_path, schedule):
    assert all(max(kept[1:]) <= kept[0] for kept in ranks(tmp_path, 2, _lengths, schedule))


def _evaluated(rank):
    """Whether a step is the same with forwards without a backward before and after it."""
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
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_forward_before_the_step_loses_no_gradient_of_fsdp(tmp_path):
    assert all(ranks(tmp_path, 2, _evaluated))


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
