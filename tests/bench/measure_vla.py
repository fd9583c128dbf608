"""What `measure_ring.py stress --model` runs: pi0.7's training in small, rings x data.

A tiny Gemma 3 reads a prefix (two cameras, an instruction, an answer that it also learns to say);
an action expert reads its keys and values and learns the actions. Four ranks are two rings of 2: a
ring has its own rows, its ranks share the tokens of the prefix by `ring_attention`, and each
computes the whole suffix by `attend`. Losses, where <> is a mean over all rows of all rings:

    (1)  flow  =  < mean |v(x_tau, tau) - (a - eps)|^2 >      as in example_action_expert.py
    (2)  text  =  - mean log p(t_(j+1) | what j sees)         over the scored j of all rings
    (3)  loss  =  flow + TEXT text                            pi0.5's, arXiv:2504.16054
    (4)  d loss / d w  =  sum over ranks of d(s_flow flow_rank + TEXT s_text text_rank) / d w,
         s_flow = 1/2, s_text = 1, flow_rank and text_rank divided by the *global* counts

(1) is replicated over a ring and (2) is not, so they have different factors (`loss_scale`) under
one sum of gradients over the ranks. (2) scores PAD too, so that rows which see nothing get a
gradient (OpenTau's issue 300). Rings have 5 and 4 rows: a mean of their means is not (1). Positions
and windows count tokens that are not PAD.

What it must equal: in float64 one process's training on the batch of both rings, whose attention is
one dense mask (`Prefix`); in bf16, as FSDP2's mixed precision has it (float32 masters, losses, sum
over ranks and step), the rows of `judge`.

    B rows   P prefix tokens, s of this rank   T suffix tokens, A their width   S = P + T
"""

import json
import math
import time
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from example_action_expert import Prefix, control_batch, control_case, flow_matching_loss

from full import ring as ring_py
from full.attend import attend
from full.check_attention import relative
from full.masks import Mask
from full.ring import indices, unshard
from ring_attention import launch

WORLD, RING = 4, 2
ROWS = 5  # of the first ring; the second has one less
TEXT = 0.1  # the weight of (2)
LR, FALL, CURVE = 3e-3, 0.8, 0.02
STEPS, EPOCH = 50, 10  # steps come again after an epoch
BLOCK_P = torch.tensor([0] * 7 + [1] * 5 + [2] * 5 + [3, 4, 5, 6])  # cameras, instruction, answer
P = len(BLOCK_P)


def sampler_seed(seed, rank, ring_size):
    """A seed that the ranks of a ring share and other rings do not, for the sampler of data."""
    return zlib.crc32(f"{seed} {rank // ring_size}".encode())


def loss_scale(replicated):
    """The factor on a rank's loss under a sum of gradients over all ranks: a replicated loss is
    counted by each rank of a ring."""
    return 1 / RING if replicated else 1.0


def prefix_attention(q, k, v, /, *, length, group=None, **options):
    """A prefix of P = `length` tokens over the ring, and what fills a cache.

    Returns out (B, H, s, D) of this rank, and k, v (B, G, P, D) whole on each, differentiable.
    options: those of `ring_attention`. The suffix route of pi0.7, with `suffix_attention`.
    """
    out = ring_py.ring_attention(q, k, v, group=group, **options)
    whole = dict(dim=2, group=group, length=length)
    return out, unshard(k, **whole), unshard(v, **whole)


def suffix_attention(q_BHTD, k_BGTD, v_BGTD, k_BGPD, v_BGPD, /, mask, **options):
    """A suffix of T tokens that attends to a cached prefix and itself, on one device: out_BHTD.

    k_BGPD, v_BGPD: of the prefix, from `prefix_attention`. Gradients go back through them into the
        ring; if every rank computes the same suffix, its loss is replicated (`loss_scale`).
    mask: of prefix and suffix together, P + T tokens.
    options: those of `attend`.
    """
    # The rows of the suffix against the keys of both; i and j stay those of the whole sequence.
    mask = mask.slice(slice(k_BGPD.shape[2], None), slice(None))
    k_BGkD = torch.cat((k_BGPD, k_BGTD), 2)
    v_BGkD = torch.cat((v_BGPD, v_BGTD), 2)
    return attend(q_BHTD, k_BGkD, v_BGkD, mask, **options)[0]


def draw(step, rank, dtype):
    """The batch of a rank's ring, the same on all its ranks: tensors of B rows by name.

    The task is `control`'s: go to the goal that two words of the instruction name; the answer says
    them again. start: the suffix's first position. PAD is the tail of row 0's answer, anywhere in
    row 1, all that one rank holds of row 2, and all of row 3; every fifth step, all that one rank
    holds of any row.
    """
    step = step % EPOCH
    ring, seed = rank // RING, sampler_seed(step, rank, RING)
    B, gen = ROWS - ring, torch.Generator().manual_seed(seed)
    task = control_batch(dtype, B, seed)
    tokens_BP = torch.randint(16, (B, P), generator=gen)
    goal_B2 = task.pop("tokens")[:, [2, 5]]
    tokens_BP[:, 13:17:3] = tokens_BP[:, 17:19] = goal_B2
    shards = [indices(P, holder, RING) for holder in range(RING)]
    valid_BP = torch.ones(B, P, dtype=torch.bool)
    valid_BP[0, 18:] = False
    valid_BP[1] = torch.rand(P, generator=gen) > 0.3
    valid_BP[2, shards[step % RING]] = False
    valid_BP[3] = False
    if step % 5 == ring:
        valid_BP[:, shards[step // 5 % RING]] = False
    return task | dict(
        tokens=tokens_BP.where(valid_BP, 0), valid=valid_BP, block=BLOCK_P.expand(B, P),
        positions=(valid_BP.cumsum(1) - 1).clamp(min=0), start=valid_BP.sum(1, keepdim=True),
        next=tokens_BP.roll(-1, 1), scored=(BLOCK_P.roll(-1) > 2) | ~valid_BP,
    )  # fmt: skip


class OneProcess:
    """The whole batch of all rings, by dense masks and without a message."""

    index_s, scales = torch.arange(P), (1.0, 1.0)

    def batch(self, step, dtype):
        parts = [draw(step, rank, dtype) for rank in range(0, WORLD, RING)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def prefix(self, tokens, step):
        return Prefix(*tokens)

    def sum(self, x, over=1):
        return x


def mask_of(block_BS, valid_BS, position_BS):
    """`Mask.blocks` with windows that count positions."""
    start_BS, end_BS = Mask.blocks(block_BS, valid_BS).keys[1:3]
    return Mask(start_BS, end_BS, rows_BS=valid_BS, position_BS=position_BS)


class RingPrefix(Prefix):
    """A `Prefix` that a ring holds, with options of `prefix_attention`."""

    def __init__(self, block_BP, valid_BP=None, positions_BP=None, **options):
        super().__init__(block_BP, valid_BP, positions_BP)
        self.options = options
        self.mask = mask_of(*self.tokens)

    def record(self, q, k, v, /, *, layer, scale, window=None):
        options = dict(mask=self.mask.with_window(window), scale=scale)
        options |= dict(length=self.mask.shape[3], **self.options)
        out, *self.layers[layer] = prefix_attention(q, k, v, **options)
        return out

    def after(self, positions_BT, blocks_T, /):
        block_BT = (self.tokens[0].max() + 1 + blocks_T).expand_as(positions_BT)
        after = block_BT, torch.ones_like(block_BT).bool(), positions_BT
        whole = mask_of(*(torch.cat(pair, 1) for pair in zip(self.tokens, after)))

        def suffix(q, k, v, /, *, layer, scale, window=None):
            options = dict(mask=whole.with_window(window), scale=scale)
            return suffix_attention(q, k, v, *self.layers[layer], **options)

        return suffix


class Rings:
    """This rank's part of its ring's batch; sums over all ranks."""

    def __init__(self):
        self.rank, self.group = dist.get_rank(), dist.new_subgroups(RING)[0]
        self.index_s = indices(P, self.rank % RING, RING)
        # (4): each rank of a ring has the same (1), and only its own tokens of (2)
        self.scales = [loss_scale(replicated=x) for x in (True, False)]

    def batch(self, step, dtype):
        return draw(step, self.rank, dtype)

    def prefix(self, tokens, step):
        return RingPrefix(*tokens, group=self.group, debug=f"step {step}")

    def sum(self, x, over=1):
        """x summed over all ranks, of which `over` hold the same."""
        x = x.clone()
        dist.all_reduce(x)
        return x / over


class Run(NamedTuple):
    """losses; gradients by step and parameter; parameters at the end; did all stay finite."""

    losses: list
    grads: list
    weights: list
    finite: list


def loss_of(place, model, expert, batch, step):
    """This rank's part of (3)."""
    dtype, index_s = model.model.norm.weight.dtype, place.index_s
    tokens_Bs, next_Bs, positions_Bs, scored_Bs = (
        batch[name][:, index_s] for name in ("tokens", "next", "positions", "scored")
    )
    tokens = (batch[name] for name in ("block", "valid", "positions"))
    prefix = place.prefix(tokens, step)
    hidden_BsM = model.hidden(tokens_Bs, positions=positions_Bs, attention=prefix.record)
    text = -model.logprobs(hidden_BsM[scored_Bs], next_Bs[scored_Bs])[0].sum()
    state = batch["state"].to(dtype)

    def velocity(x, tau):
        return expert(x.to(dtype), tau, prefix, positions_B1=batch["start"], state=state)

    flow = flow_matching_loss(velocity, batch["actions"], batch["noise"], batch["tau"]).sum()
    counts = torch.tensor([len(tokens_Bs), batch["scored"].sum()], dtype=torch.float64)
    rows, scored = place.sum(counts, RING)
    return place.scales[0] * flow / rows + TEXT * place.scales[1] * text / scored


def train(place, steps, dtype):
    """A `Run` of AdamW: weights of `dtype`, and masters of float32, or of float64 for float64."""
    wide = torch.promote_types(dtype, torch.float32)
    masters = [p for module in control_case(wide)[:2] for p in module.parameters()]
    model, expert = (module.to(dtype) for module in control_case(wide)[:2])
    weights = [*model.parameters(), *expert.parameters()]
    optimizer, run = torch.optim.AdamW(masters, lr=LR), Run([], [], masters, [])
    for step in range(steps):
        loss = loss_of(place, model, expert, place.batch(step, wide), step)
        grads = [loss, *torch.autograd.grad(loss, weights)]
        # The sum is in the masters' dtype, FSDP2's reduce_dtype: bf16 would round it once more.
        whole = place.sum(torch.cat([x.detach().to(wide).flatten() for x in grads]))
        parts = whole[1:].split([p.numel() for p in masters])
        for master, part in zip(masters, parts, strict=True):
            master.grad = part.view_as(master)
        run.losses.append(whole[0].item())
        run.grads.append(parts)
        run.finite.append(bool(whole.isfinite().all()))
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
    return run


def on_one(steps, dtype):
    return train(OneProcess(), steps, dtype)


def on_rings(steps, dtype):
    """This rank's run, of which only the first keeps the gradients, and a digest of its weights."""
    run = train(Rings(), steps, dtype)
    weights = zlib.crc32(b"".join(x.detach().numpy().tobytes() for x in run.weights))
    return run._replace(grads=[] if dist.get_rank() else run.grads), weights


def errors(run, truth):
    """The largest relative errors of a loss, a gradient and a parameter."""
    grads = ((a, b) for pair in zip(run.grads, truth.grads, strict=True) for a, b in zip(*pair))
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(run.losses, truth.losses, strict=True)),
        "gradient": max(relative(a, b) for a, b in grads),
        "parameter": max(relative(a, b) for a, b in zip(run.weights, truth.weights, strict=True)),
    }


def fall(losses):
    """Means of the first and of the last epoch, which see the same rows, noise and times."""
    return sum(losses[:EPOCH]) / EPOCH, sum(losses[-EPOCH:]) / EPOCH


def judge(exact, truth, half, plain, digests):
    """Rows of (what, value, bound): rings and one process in float64, the same two in bf16."""
    first, *theirs = (torch.cat(run.grads[0]) for run in (truth, half, plain))
    off, allowed = (relative(grad, first) for grad in theirs)
    begin, end = fall(half.losses)
    apart = [(a - b) ** 2 for a, b in zip(half.losses, truth.losses, strict=True)]
    curve = math.sqrt(sum(apart) / len(apart)) / truth.losses[0]  # root mean square
    return [
        *((f"float64: {what}", error, 1e-10) for what, error in errors(exact, truth).items()),
        ("sets of weights on the 4 ranks", max(len(set(some)) for some in digests), 1),
        ("steps not finite", sum(x.finite.count(False) for x in (exact, truth, half, plain)), 0),
        ("bf16: first gradient, against twice one process's", off, 2 * allowed),
        ("bf16: last epoch's loss, against the first's", end, FALL * begin),
        ("bf16: off the float64 curve, in first losses", curve, CURVE),
    ]


def stress_model(steps=STEPS):
    """Print the table of `judge`; 1 if a row fails."""
    begin, runs, digests = time.monotonic(), [], []
    for dtype in (torch.float64, torch.bfloat16):
        ranks = launch(WORLD, on_rings, steps, dtype)
        runs += [ranks[0][0], *launch(1, on_one, steps, dtype)]
        digests.append([digest for _, digest in ranks])
    rows = judge(*runs, digests)
    print(f"{steps} steps of AdamW, {WORLD // RING} rings of {RING} ranks, against one process")
    for what, value, bound in rows:
        ok = "ok" if value <= bound else "FAILED"
        print(f"{what:>58} {value:9.2g}  bound {bound:7.2g}   {ok}")
    ok = all(value <= bound for _, value, bound in rows)
    losses = {"float64": fall(runs[1].losses), "bf16": fall(runs[2].losses)}
    found = {"loss": losses, "rows": {what: value for what, value, _ in rows}}
    print(json.dumps({"stress": "model", "ok": ok, "seconds": time.monotonic() - begin, **found}))
    return int(not ok)
