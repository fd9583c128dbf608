"""What `python parallel.py check | plan | bench` run besides parallel.py's own rows.

check: every plan of CASES against one process: loss, every gradient, clip norm, three AdamW steps.
plan: a plan's grid, groups, and a model of the memory of a rank. bench: tokens a second by plan.
"""

import argparse
import functools
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
import ring_attention as ring
from parallel import KINDS as KINDS_OF_GROUPS
from parallel import (
    Allocation,
    Grid,
    LocalOptimizer,
    Micro,
    Plan,
    clip_grad_norm,
    full,
    parallelize,
    reduce_gradients,
)

# check ------------------------------------------------------------------------------------------

KINDS = {
    "dense": dict(model_type="qwen3", vocab_size=57, num_hidden_layers=2),
    "tied": dict(model_type="gemma3_text", vocab_size=57),
    "bias": dict(model_type="qwen2", vocab_size=56),
    "moe": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4),
    "starved": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4, router_bias_rate=1.0),
}
KINDS["deep"] = KINDS["dense"] | dict(num_hidden_layers=4)
KINDS["deep tied"] = KINDS["deep"] | dict(tie_word_embeddings=True)
LENGTH, ROWS = 24, 4
BENCH = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
             num_key_value_heads=2, intermediate_size=384, vocab_size=2048)  # fmt: skip


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
    model = models.tiny_model(sizes.pop("model_type"), seed=2, dtype=dtype, **sizes)
    for name, votes in model.named_buffers():
        assert name.endswith("votes") and kind == "starved"
        votes.copy_(torch.tensor([9, 9, 0, 0]))  # all go to the first two
    return model


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


def compare(rank, text, kind, options, steps=3, dtype=torch.float64):
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
    "d2e2, a rank without a token": ("d2e2", "starved", {}),
    "d2e2 fsdp, a rank without a token": ("d2e2", "starved", dict(mode="fsdp")),
    "d2 zero1": ("d2", "tied", dict(mode="zero1")),
    "d2 fsdp offload": ("d2", "moe", dict(mode="fsdp", offload=True)),
    "d2t2e4 zero1": ("d2t2e4", "moe", dict(mode="zero1")),
    "etp zero1": ("(attn:d2t2|ffn:e2t2)", "moe", dict(mode="zero1")),
    "c2p2 zero1": ("c2p2", "tied", dict(mode="zero1")),
    "d2 ac full": ("d2", "moe", dict(ac="full")),
    "t2 ac op": ("t2", "tied", dict(ac="op")),
    "d2t2e4 fsdp ac full": ("d2t2e4", "moe", dict(mode="fsdp", ac="full")),
    "c2 ac layers": ("c2", "dense", dict(ac="layers")),
    "c2 ac op": ("c2", "dense", dict(ac="op")),
    "p2 ac full": ("p2", "dense", dict(ac="full")),
    "d2 compile": ("d2", "dense", dict(compile=True)),
    "t2 compile": ("t2", "dense", dict(compile=True)),
    "d2 fsdp compile ac": ("d2", "dense", dict(mode="fsdp", ac="full", compile=True)),
    "d2 memory budget": ("d2", "dense", dict(compile=True, ac="memory_budget")),
    "p2": ("p2", "dense", {}),
    "p2 tied": ("p2", "tied", {}),
    "p2 interleaved": ("p2", "deep", dict(schedule="interleaved1f1b")),
    "p2 interleaved tied": ("p2", "deep tied", dict(schedule="interleaved1f1b")),
    "p2 zbv": ("p2", "deep", dict(schedule="zbv")),
    "p2 zbv tied": ("p2", "deep tied", dict(schedule="zbv")),
    "p2 interleaved fsdp": ("p2", "deep", dict(schedule="interleaved1f1b", mode="fsdp")),
    "p2t2 zbv": ("p2t2", "deep tied", dict(schedule="zbv")),
    "t2 tied zero1": ("t2", "tied", dict(mode="zero1")),
    "d2p2 fsdp tied": ("d2p2", "tied", dict(mode="fsdp")),
    "p2c2": ("p2c2", "dense", {}),
    "p2d2t2": ("p2d2t2", "tied", {}),
    "p2 etp": ("(attn:p2d2t2|ffn:p2e2t2)", "moe", {}),
}


def matrix(skip=("compile", "budget")):
    """{case: the worst error of any rank}: CASES but those that wait for a compiler."""
    names = [name for name in CASES if not any(word in name for word in skip)]
    found = {}
    for name in names:
        text, kind, options = CASES[name]
        parts = ring.launch(Plan.parse(text).world, _case, name)
        found[f"{name} ({text})" if name != text else name] = max(map(max, parts))
    return found


def _case(name):
    text, kind, options = CASES[name]
    return compare(dist.get_rank(), text, kind, options)


# plan -------------------------------------------------------------------------------------------


def memory(plan, config, *, mode, bytes_weight=4, bytes_moments=8):
    """Bytes of weights, gradients and AdamW's moments of the fullest rank: a model of them.

    Exact sums of tensor sizes, without activations, buffers of messages, or fragmentation.
    """
    with torch.device("meta"):
        model = models.Transformer(config)
    layers = -(-config.num_hidden_layers // plan.pp)
    dense = experts = ends = 0
    for name, p in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else None
        if layer is None:
            ends += p.numel() / plan.tp
        elif int(layer) < layers:
            whole = name.endswith("norm.weight") or name.endswith("gate.weight")
            if ".mlp.experts." in name:
                experts += p.numel() / (plan.ep * plan.etp)
            else:
                dense += p.numel() / (1 if whole else plan.tp)
    dense += ends / (2 if plan.pp > 1 and not config.tie_word_embeddings else 1)
    copies = plan.dp * plan.cp, plan.edp
    shard = [1, 1] if mode == "ddp" else copies
    kept = [1, 1] if mode != "fsdp" else copies  # weights and gradients
    parts = dense, experts
    weights = sum(n / k for n, k in zip(parts, kept, strict=True)) * bytes_weight
    moments = sum(n / k for n, k in zip(parts, shard, strict=True)) * bytes_moments
    return dict(weights=weights, gradients=weights, moments=moments)


def plan_command(argv):
    """A plan's degrees, grid, groups, and what a rank of it holds."""
    parser = argparse.ArgumentParser("parallel.py plan")
    parser.add_argument("plan", help="such as d2t2, or sglang:d4+archon:d2t2")
    parser.add_argument("--world", type=int, help="refuse the plan unless it has so many ranks")
    parser.add_argument("--model", help="a Hugging Face directory, or its config.json")
    options = parser.parse_args(argv)
    try:
        plans = [plan for group in Allocation.parse(options.plan).groups for plan in group]
        for plan in plans:
            _describe(plan, options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _describe(plan, options):
    config = models.ModelConfig.from_hf(options.model) if options.model else None
    plan.require_fits(world=options.world, config=config)
    print(f"{plan}\n{plan.describe()}")
    for kind in KINDS_OF_GROUPS:
        groups, dense = plan.groups(kind), plan.ep * plan.etp == 1
        if len(groups[0]) > 1 and not (dense and kind == "expert-dp"):
            print(f"{kind:>10}: " + " ".join(str(group).replace(",", "") for group in groups))
    for mode in ("ddp", "zero1", "fsdp") if config else ():
        parts = memory(plan, config, mode=mode)
        text = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        total = sum(parts.values()) / 2**30
        print(f"{mode:>10}: {total:.2f} GiB a rank in float32 (a model, no activations): {text}")


# bench ------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Bytes that this rank hands to each collective and each P2P send inside."""

    GIVEN = {"allgather_": 1, "reduce_scatter_": 1, "alltoall_base_": 1}  # which argument; else 0

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        if function.namespace == "c10d" and name not in ("recv_", "barrier"):
            given = (x for x in tree_leaves(args[self.GIVEN.get(name, 0)]) if torch.is_tensor(x))
            self.bytes[name] = self.bytes.get(name, 0) + sum(x.nbytes for x in given)
        return function(*args, **(kwargs or {}))


def _timed(plan_text, options, rows, length, steps):
    """Median seconds of a step of this rank, and the bytes it sent by collective."""
    plan = Plan.parse(plan_text)
    torch.set_num_threads(max(1, 2 // plan.world))
    grid = Grid.make(plan)
    model = models.tiny_model("qwen3", dtype=torch.float32, **BENCH)
    model.to(torch.float32)

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        mask = ring.Mask.causal(length, window=window)
        return ring.ring_attention(q, k, v, group=grid.context, mask=mask, scale=scale)

    cp = attention if plan.cp > 1 else None
    model = parallelize(model, plan, device_mesh=grid, attention=cp, **options)
    tokens = torch.randint(2048, (rows, length), generator=torch.Generator().manual_seed(0))
    mine = tokens.chunk(plan.dp)[grid.dp_rank]
    take = ring.indices(length, dist.get_rank(grid.context), plan.cp, "zigzag")
    places = take[None].expand(len(mine), -1)
    targets = tokens.roll(-1, 1).chunk(plan.dp)[grid.dp_rank][:, take]

    def step():
        if plan.pp > 1:
            micros = [Micro(x[None, take], take[None]) for x in mine]
            model.forward_backward(
                micros,
                lambda k, h: -model.last.logprobs(h[0], targets[k])[0].sum() / tokens.numel(),
            )
        else:
            hidden = model.hidden(mine[:, take], positions=places)
            logprobs, _ = model.logprobs(hidden.flatten(0, 1), targets.flatten())
            loss = -logprobs.sum() / tokens.numel()
            loss.backward()
        reduce_gradients(model)
        for p in model.parameters():
            p.grad = None

    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        begun = time.perf_counter()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    with Sent() as sent:
        step()
    return statistics.median(seconds[1:]), sent.bytes


def bench(argv):
    """Tokens a second by plan, against one process with as many threads; bytes sent a step."""
    parser = argparse.ArgumentParser("parallel.py bench")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plans", nargs="+", default=["d1", "d2", "t2", "c2", "p2"])
    options = parser.parse_args(argv)
    rows, whole = [], None
    print(f"{'plan':>8} {'tokens/s':>9} {'of one process':>15}  kB a rank sends a step")
    for text in options.plans:
        world = Plan.parse(text).world
        found = ring.launch(world, _timed, text, {}, options.rows, options.length, options.steps)
        rate = options.rows * options.length / max(seconds for seconds, _ in found)
        whole = whole or rate
        rows.append(dict(plan=text, tokens_per_s=rate, of_one=rate / whole, bytes=found[0][1]))
        kilo = ", ".join(f"{name} {size / 1000:.0f}" for name, size in found[0][1].items())
        print(f"{text:>8} {rate:9.0f} {rate / whole:15.0%}  {kilo}")
    print(json.dumps({"bench": "parallel", "torch": torch.__version__, "rows": rows}))
    return 0


def main(argv):
    return {"plan": plan_command, "bench": bench}[argv[0]](argv[1:])
