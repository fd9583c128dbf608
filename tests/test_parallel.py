"""Every plan against one process: loss, every gradient, clip norm, and three optimiser steps."""

import functools

import pytest
import torch
import torch.distributed as dist
from test_ranks import ranks

import models
import parallel
import ring_attention as ring
from parallel import (
    Grid,
    LocalOptimizer,
    Micro,
    Plan,
    clip_grad_norm,
    full,
    parallelize,
    read_checkpoint,
    reduce_gradients,
    training_tensors,
    write_checkpoint,
)

KINDS = {
    "dense": dict(model_type="qwen3", vocab_size=56, num_hidden_layers=2),
    "tied": dict(model_type="gemma3_text", vocab_size=56),
    "bias": dict(model_type="qwen2", vocab_size=56),
    "moe": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4),
}
KINDS["deep"] = KINDS["dense"] | dict(num_hidden_layers=4)
KINDS["deep tied"] = KINDS["deep"] | dict(tie_word_embeddings=True)
LENGTH, ROWS = 24, 4


def batch():
    """Tokens (ROWS, LENGTH), document ids, and a weight for each token's log-prob."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(56, (ROWS, LENGTH), generator=generator)
    documents = torch.arange(LENGTH).expand(ROWS, -1) // torch.tensor([[24], [9], [13], [24]])
    weights = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    last = documents != documents.roll(-1, 1)
    last[:, -1] = True
    return tokens, documents, weights.masked_fill(last, 0.0)


def build(kind, dtype, **changes):
    sizes = dict(KINDS[kind]) | changes
    return models.tiny_model(sizes.pop("model_type"), seed=2, dtype=dtype, **sizes)


def train(model, rows, take, weights, attention, positions):
    """Loss of some rows' tokens `take`, and its gradient; divided by the whole batch's count."""
    tokens, _, _ = batch()
    targets = tokens.roll(-1, 1)[rows][:, take].flatten()
    hidden = model.hidden(
        tokens[rows][:, take], positions=positions[rows][:, take], attention=attention
    )
    logprobs, entropy = model.logprobs(hidden.flatten(0, 1), targets, temperature=0.7)
    w = weights[rows][:, take].flatten().to(logprobs)
    loss = -(w * logprobs + 0.1 * w.abs() * entropy).sum() / (ROWS * LENGTH)
    loss.backward()
    return loss.detach()


def train_pipeline(pipeline, rows, take, weights, attention, positions):
    """The same by microbatches of one row; the loss on ranks with the last stage, else 0."""
    tokens, _, _ = batch()
    targets = tokens.roll(-1, 1)
    micros = [
        Micro(tokens[r, None][:, take], positions[r, None][:, take], attention(r)) for r in rows
    ]

    def loss_fn(k, hidden):
        r = rows[k]
        logprobs, entropy = pipeline.last.logprobs(hidden[0], targets[r, take], temperature=0.7)
        w = weights[r, take].to(logprobs)
        return -(w * logprobs + 0.1 * w.abs() * entropy).sum() / (ROWS * LENGTH)

    return sum(pipeline.forward_backward(micros, loss_fn), torch.zeros(()))


def document_positions(documents):
    """Each token's place in its document."""
    same = documents[:, :, None] == documents[:, None]
    return same.tril().sum(-1) - 1


def one_process(kind, dtype, weights, steps):
    """[(loss, gradients, clip norm)] of each step, and the parameters after them."""
    model, (_, documents, _) = build(kind, dtype), batch()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01), []
    whole = torch.arange(LENGTH)

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        mask = ring.Mask.documents(doc_ids=documents, window=window)
        return ring.attend(q, k, v, mask, scale=scale, softcap=softcap)[0]

    rows, positions = torch.arange(ROWS), document_positions(documents)
    for _ in range(steps):
        loss = train(model, rows, whole, weights, attention, positions)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / norm.item())
        found.append((loss, grads, norm))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


def off(found, truth, scale):
    """The largest error over all entries of all tensors, relative to the largest entry at all."""
    return max((found[name] - truth[name]).abs().max().item() for name in found) / scale


def _plan(rank, text, kind, options, steps, dtype):
    """This rank's worst errors: loss, gradients, clip norm, parameters after `steps` steps."""
    options = dict(options)
    method, empty = options.pop("method", "ring"), options.pop("empty", False)
    plan, hsdp = Plan.parse(text), options.pop("shard", None)
    tokens, documents, weights = batch()
    if empty:  # the rank of the last rows has nothing to learn from
        weights[-(ROWS // plan.dp) :] = 0.0
    truth, parameters = one_process(kind, dtype, weights, steps)
    grid = Grid.make(plan, shard=hsdp)
    cp = grid.context

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None, some=None):
        mask = ring.Mask.documents(doc_ids=documents[rows if some is None else some], window=window)
        return ring.ring_attention(
            q, k, v, group=cp, mask=mask, method=method, scale=scale, softcap=softcap
        )

    def of_row(r):
        return functools.partial(attention, some=r[None])

    model = build(kind, dtype)
    names = [name for name, _ in model.named_parameters()]
    model = parallelize(model, plan, device_mesh=grid, attention=attention, **options)
    held = [name for name, _ in model.named_parameters()]
    assert names == held if plan.pp == 1 else set(held) < set(names)
    zero = options.get("mode") == "zero1"
    optimizer = LocalOptimizer(model, lambda x: torch.optim.AdamW(x, lr=0.01), zero=zero)
    take = ring.indices(LENGTH, dist.get_rank(cp), plan.cp, "zigzag")
    rows = torch.arange(ROWS).chunk(plan.dp)[grid.dp_rank]
    worst = [0.0] * 4
    for loss, grads, norm in truth:
        run, kind = (train, None) if plan.pp == 1 else (train_pipeline, of_row)
        mine = run(model, rows, take, weights, kind, document_positions(documents)).double()
        total = mine / plan.tp  # the ranks of a tensor group have the same loss
        dist.all_reduce(total)
        reduce_gradients(model)
        found = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        clip = clip_grad_norm(model, 1.0)
        scale = max(g.abs().max() for g in grads.values()).item()
        errors = abs(total - loss) / abs(loss), off(found, grads, scale), abs(clip - norm) / norm
        worst[:3] = [max(a, float(b)) for a, b in zip(worst, errors, strict=False)]
        optimizer.step()
        optimizer.zero_grad()
    found = {name: full(p.detach()) for name, p in model.named_parameters()}
    worst[3] = off(found, parameters, max(p.abs().max() for p in parameters.values()).item())
    return worst


CASES = {
    "d2": ("d2", "dense", {}),
    "d2, nothing to learn on one rank": ("d2", "dense", dict(empty=True)),
    "d4 hsdp": ("d4", "dense", dict(mode="fsdp", shard=2)),
    "d2 fsdp": ("d2", "tied", dict(mode="fsdp")),
    "t2": ("t2", "dense", {}),
    "t2 without sequence": ("t2", "dense", dict(sequence=False)),
    "t2 tied": ("t2", "tied", {}),
    "t2 biases": ("t2", "bias", {}),
    "c2": ("c2", "dense", {}),
    "c2 ulysses": ("c2", "tied", dict(method="ulysses")),
    "c4, 2 key heads": ("c4", "dense", {}),
    "d2t2": ("d2t2", "tied", {}),
    "d2t2 fsdp": ("d2t2", "tied", dict(mode="fsdp")),
    "d2t2c2": ("d2t2c2", "dense", {}),
    "d2e2": ("d2e2", "moe", {}),
    "t2 moe": ("t2", "moe", {}),
    "d2t2e4": ("d2t2e4", "moe", {}),
    "etp": ("(attn:d2t2|ffn:e2t2)", "moe", {}),
    "etp without sequence": ("(attn:d2t2|ffn:e2t2)", "moe", dict(sequence=False)),
    "d2e2 fsdp": ("d2e2", "moe", dict(mode="fsdp")),
    "d2t2e4 fsdp": ("d2t2e4", "moe", dict(mode="fsdp")),
    "etp fsdp": ("(attn:d2t2|ffn:e2t2)", "moe", dict(mode="fsdp")),
    "d2c2e4": ("d2c2e4", "moe", {}),
    "d2 zero1": ("d2", "tied", dict(mode="zero1")),
    "d2t2e4 zero1": ("d2t2e4", "moe", dict(mode="zero1")),
    "etp zero1": ("(attn:d2t2|ffn:e2t2)", "moe", dict(mode="zero1")),
    "c2p2 zero1": ("c2p2", "tied", dict(mode="zero1")),
    "p2": ("p2", "dense", {}),
    "p2 tied": ("p2", "tied", {}),
    "p2 interleaved": ("p2", "deep", dict(schedule="interleaved1f1b")),
    "p2 interleaved tied": ("p2", "deep tied", dict(schedule="interleaved1f1b")),
    "p2 zbv": ("p2", "deep", dict(schedule="zbv")),
    "p2 zbv tied": ("p2", "deep tied", dict(schedule="zbv")),
    "d2p2 fsdp tied": ("d2p2", "tied", dict(mode="fsdp")),
    "p2c2": ("p2c2", "dense", {}),
    "p2d2t2": ("p2d2t2", "tied", {}),
    "p2 etp": ("(attn:p2d2t2|ffn:p2e2t2)", "moe", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_plan_is_one_process(tmp_path, name):
    text, kind, options = CASES[name]
    found = ranks(tmp_path, Plan.parse(text).world, _plan, text, kind, options, 3, torch.float64)
    for errors in found:
        assert max(errors) < 1e-10, errors


def _with_fault(rank, fault, text, kind, options):
    """The worst gradient error where one term of a sum is forgotten."""
    if fault == "norms":  # a norm's term of its gradient is taken for the whole
        place = parallel._place
        parallel._place = lambda *x: place(*x[:4])
    elif fault == "tie":
        reduce = parallel.reduce_gradients

        def without(model):
            model.split_tie = False
            return reduce(model)

        globals()["reduce_gradients"] = without
    else:  # every rank takes its own experts for all
        parallel.dispatch_experts = lambda x, counts, experts, group: experts(
            x, counts.view(2, -1).sum(0)
        )
    return max(_plan(rank, text, kind, options, 1, torch.float64)[1:3])


@pytest.mark.parametrize(
    "fault, text, kind",
    [("norms", "t2", "dense"), ("tie", "p2", "tied"), ("experts", "d2e2", "moe")],
)
def test_a_forgotten_term_is_seen(tmp_path, fault, text, kind):
    found = ranks(tmp_path, 2, _with_fault, fault, text, kind, {})
    assert max(found) > 1e-3


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


CHAIN = [("d4", "zero1"), ("(attn:p2d2t2|ffn:p2e2t2)", "fsdp"), ("d2t2e4", "zero1"), ("d1", "ddp")]


@pytest.mark.parametrize("first", range(len(CHAIN)))
def test_a_checkpoint_of_one_plan_goes_on_under_another(tmp_path, first):
    text, mode = CHAIN[first]
    world, path = Plan.parse(text).world, tmp_path / "saved"
    parts = ranks(tmp_path, world, _train_and_save, text, mode, path, 3)
    saved, after = ({k: v for part in parts for k, v in part[n].items()} for n in (0, 1))
    text, mode = CHAIN[(first + 1) % len(CHAIN)]
    for loaded, stepped in ranks(
        tmp_path, Plan.parse(text).world, _load_and_train, text, mode, path, 4
    ):
        assert loaded and all(torch.equal(loaded[name], saved[name]) for name in loaded)
        assert all((stepped[k] - after[k]).abs().max() < 1e-10 for k in stepped)
