"""Every plan against one process: loss, every gradient, clip norm, and three optimiser steps."""

import pytest
import torch
import torch.distributed as dist
from test_ranks import ranks

import models
import ring_attention as ring
from parallel import Grid, Plan, clip_grad_norm, full, parallelize, reduce_gradients

KINDS = {
    "dense": dict(model_type="qwen3", vocab_size=56, num_hidden_layers=2),
    "tied": dict(model_type="gemma3_text", vocab_size=56),
    "bias": dict(model_type="qwen2", vocab_size=56),
    "moe": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4),
}
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
    assert found.keys() == truth.keys()
    return max((found[name] - truth[name]).abs().max().item() for name in truth) / scale


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

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        mask = ring.Mask.documents(doc_ids=documents[rows], window=window)
        return ring.ring_attention(
            q, k, v, group=cp, mask=mask, method=method, scale=scale, softcap=softcap
        )

    model = build(kind, dtype)
    names = [name for name, _ in model.named_parameters()]
    parallelize(model, plan, device_mesh=grid, attention=attention, **options)
    assert names == [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    take = ring.indices(LENGTH, dist.get_rank(cp), plan.cp, "zigzag")
    rows = torch.arange(ROWS).chunk(plan.dp)[grid.dp_rank]
    worst = [0.0] * 4
    for loss, grads, norm in truth:
        mine = train(model, rows, take, weights, None, document_positions(documents)).double()
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
}


@pytest.mark.parametrize("name", CASES)
def test_every_plan_is_one_process(tmp_path, name):
    text, kind, options = CASES[name]
    found = ranks(tmp_path, Plan.parse(text).world, _plan, text, kind, options, 3, torch.float64)
    for errors in found:
        assert max(errors) < 1e-10, errors
