"""Ring attention: exact attention over a sequence that is split over ranks.

Each rank keeps the queries of its tokens. Blocks of keys and values travel around a ring of ranks,
one rank per hop, and each rank attends to every block while it is there. Attention over one block
returns an output and a log-sum-exp (lse). With the lse, partial outputs merge exactly.

    python ring_attention.py core       # check the core: 4 ranks on this CPU, float64, 10 s
    python ring_attention.py check      # check the file: every mask, method and layout, 60 s
    torchrun --nproc-per-node 8 ring_attention.py check         # on your ranks, with NCCL on CUDA

What it must equal, for a query i and the keys j that it sees. Causal attention sees j <= i.

    (1)  s_ij  = scale q_i . k_j                  scale = D ** -0.5
         lse_i = log sum_j exp(s_ij)              out_i = sum_j exp(s_ij - lse_i) v_j
    (2)  lse   = log(exp(lse1) + exp(lse2))       out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2
    (3)  P_ij  = exp(s_ij - lse_i)                dS_ij = P_ij (dout_i . v_j - dout_i . out_i)
         dv_j  = sum_i P_ij dout_i                dq_i = scale sum_j dS_ij k_j
                                                  dk_j = scale sum_i dS_ij q_i

Letters in names are dimensions:  B batch   H query heads, h = H / W of this rank   G key heads
D head size   S all tokens, s = S / W of this rank   W ranks   q queries   k keys   2 both k and v
"""

import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

# 1. Attention over one block of keys ----------------------------------------------------------


def attention_definition(q_BHqD, k_BHkD, v_BHkD, visible_BHqk, /):
    """Compute attention with all scores in memory: everything below must equal this.

    q: (B, H, q, D). k, v: (B, H, k, D).
    visible: bool, broadcastable to (B, H, q, k). True where query i sees key j.

    Returns out (B, H, q, D) and lse (B, H, q). A query that sees no key has out 0 and lse -inf.
    """
    s_BHqk = torch.einsum("bhqd,bhkd->bhqk", q_BHqD, k_BHkD) / math.sqrt(q_BHqD.shape[-1])  # (1)

    # The softmax over no key is 0 / 0. Give such a query scores of 0, so that all stays finite, and
    # overwrite both results.
    seen_BHqk = visible_BHqk.expand_as(s_BHqk)
    blind_BHq = ~seen_BHqk.any(-1)
    s_BHqk = s_BHqk.masked_fill(~seen_BHqk, -math.inf).masked_fill(blind_BHq[..., None], 0.0)
    p_BHqk = torch.softmax(s_BHqk, -1).masked_fill(blind_BHq[..., None], 0.0)
    lse_BHq = torch.logsumexp(s_BHqk, -1).masked_fill(blind_BHq, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", p_BHqk, v_BHkD), lse_BHq


def block_attention(q_BHqD, k_BHkD, v_BHkD, visible_qk):
    """Attend to the keys of one block: return out_BHqD and lse_BHq over these keys alone."""
    scale = q_BHqD.shape[-1] ** -0.5
    s_BHqk = (q_BHqD @ k_BHkD.mT * scale).masked_fill(~visible_qk, -math.inf)  # (1)
    lse_BHq = torch.logsumexp(s_BHqk, -1)

    # A query may see no key of this block: our early chunk sees nothing of a later rank's. Its lse
    # is -inf, and -inf - -inf is NaN. Subtract 0: exp(-inf - 0) = 0, so its output here is 0.
    finite_BHq = lse_BHq.masked_fill(lse_BHq == -math.inf, 0.0)
    p_BHqk = torch.exp(s_BHqk - finite_BHq[..., None])
    return p_BHqk @ v_BHkD, lse_BHq


def block_backward(dout_BHqD, q_BHqD, k_BHkD, v_BHkD, out_BHqD, lse_BHq, visible_qk):
    """Return dq_BHqD, dk_BHkD, dv_BHkD of one block, given the final out and lse of all blocks."""
    # The gradient of a softmax needs two sums over all keys: the normalizer, which is in lse, and
    # sum_j P_ij (dout_i . v_j) = dout_i . sum_j P_ij v_j = dout_i . out_i. Both are known from the
    # final lse and out, so the gradients of blocks can be computed anywhere and simply added up.
    scale = q_BHqD.shape[-1] ** -0.5
    s_BHqk = (q_BHqD @ k_BHkD.mT * scale).masked_fill(~visible_qk, -math.inf)
    p_BHqk = torch.exp(s_BHqk - lse_BHq[..., None])  # (3), computed again: no scores were stored
    delta_BHq = (dout_BHqD * out_BHqD).sum(-1)
    ds_BHqk = p_BHqk * (dout_BHqD @ v_BHkD.mT - delta_BHq[..., None]) * scale  # scale dS
    return ds_BHqk @ k_BHkD, ds_BHqk.mT @ q_BHqD, p_BHqk.mT @ dout_BHqD


def merge(out1, lse1, out2, lse2, /):
    """Merge attention over two disjoint sets of keys into attention over both, equation (2).

    out1, out2: (.., q, D), one dtype. The outputs over each set of keys.
    lse1, lse2: (.., q), float32 or float64. -inf where a query sees no key of the set.

    Returns (out, lse), out in the dtype of out1; differentiable in all four arguments. The order of
    merges does not matter. Ring Attention, arXiv:2310.01889, carries a running maximum and a
    running sum; the lse is both in one number.
    """
    # exp(lse) is the softmax mass of a set of keys. The merged output is the mean of both outputs,
    # weighted by mass:
    #
    #     set     scores        mass   lse     values    out
    #     1       0, 0          2      log 2   1, 3      2
    #     2       log 2         2      log 2   6         6
    #     both    0, 0, log 2   4      log 4   1, 3, 6   (2 * 2 + 2 * 6) / 4 = 4
    #
    # Under other masks a query may see no key of either set: pretend a mass of 1 + 1, so that its
    # shares are exp(-inf - log 2) = 0 and not NaN, and put the lse of -inf back at the end.
    # NUMERICS: logaddexp subtracts the larger lse before it takes exp, so nothing overflows.
    blind = (lse1 == -math.inf) & (lse2 == -math.inf)
    lse = torch.logaddexp(lse1.masked_fill(blind, 0.0), lse2.masked_fill(blind, 0.0))  # (2)
    share1 = torch.exp(lse1 - lse)[..., None]
    share2 = torch.exp(lse2 - lse)[..., None]
    out = share1 * out1 + share2 * out2  # (2)
    return out.to(out1.dtype), lse.masked_fill(blind, -math.inf)


# 2. Who holds which tokens, and who talks to whom ----------------------------------------------


def zigzag_indices(length, rank, world):
    """Return the global indices of the tokens that a rank holds, int64 (length / world,).

    length must be divisible by 2 * world.
    """
    # A late query sees more keys than an early one, and the ring waits for its slowest rank at
    # every hop. So cut the sequence into 2 W chunks, and give rank r chunk r and its mirror image.
    # Then all ranks have equally many visible pairs at every hop: all our queries see the early
    # half of a block, or our late half sees all of it. 8 tokens on 2 ranks:
    #
    #     rank 0 holds 0 1 . . . . 6 7, which see 1 + 2 + 7 + 8 = 18 keys
    #     rank 1 holds . . 2 3 4 5 . ., which see 3 + 4 + 5 + 6 = 18 keys
    chunks = torch.arange(length).view(2 * world, -1)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]))


def start_messages(messages, group):
    """Start sends and receives, and return a function that waits until all have finished.

    messages: tuples (dist.isend or dist.irecv, contiguous tensor, rank in the group, tag). A send
        and its receive have the same tag; the tag tells two messages of one pair of ranks apart.
    """
    ops = []
    for operation, tensor, rank, tag in messages:
        ops.append(dist.P2POp(operation, tensor, dist.get_global_rank(group, rank), group, tag))
    requests = dist.batch_isend_irecv(ops)

    def wait():
        for request in requests:
            request.wait()

    return wait


def shift(x, tag, group):
    """Start to send x to the right neighbor and to receive the left neighbor's x.

    Returns the tensor that receives, and the function that waits for it.
    """
    # COMM: every rank posts both messages before it waits, so no circle of ranks can deadlock.
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    if world == 1:  # the neighbor is this rank itself
        return x, lambda: None
    received = torch.empty_like(x)
    to_the_right = (dist.isend, x, (rank + 1) % world, tag)
    from_the_left = (dist.irecv, received, (rank - 1) % world, tag)
    return received, start_messages([to_the_right, from_the_left], group)


# 3. The ring ------------------------------------------------------------------------------------
#
# Block r is the keys and values of rank r's tokens. It starts on rank r and moves one rank to the
# right at each hop, so at hop h rank r holds block r - h, modulo W. With 3 ranks:
#
#     hop      rank 0    rank 1    rank 2
#      0       block 0   block 1   block 2        each rank attends to its own keys,
#      1       block 2   block 0   block 1        then to the keys of its left neighbor,
#      2       block 1   block 2   block 0        then to the keys of its right neighbor
#
# While a rank computes hop h, it already sends that block and receives the next one. Rank 0 of 3:
#
#     compute      block 0 | block 2 | block 1
#     send         block 0 | block 2 |
#     receive      block 2 | block 1 |


class SimpleRing(torch.autograd.Function):
    """Causal ring attention: out_BHsD of this rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(ctx, q_BHsD, k_BHsD, v_BHsD, group):
        rank = dist.get_rank(group)
        world = dist.get_world_size(group)
        length = world * q_BHsD.shape[2]
        positions = [zigzag_indices(length, r, world).to(q_BHsD.device) for r in range(world)]

        # Keys and values travel together: one message per hop.
        block_2BHsD = torch.stack((k_BHsD, v_BHsD))
        for hop in range(world):
            if hop + 1 < world:
                next_2BHsD, wait_for_next = shift(block_2BHsD, 0, group)

            # Our queries against the block that is here now. Query i sees key j if j <= i, by
            # global position.
            owner = (rank - hop) % world
            visible_ss = positions[owner] <= positions[rank][:, None]
            part = block_attention(q_BHsD, *block_2BHsD, visible_ss)
            so_far = part if hop == 0 else merge(*so_far, *part)  # (2): out_BHsD and lse_BHs

            # Only now must the next block be here.
            if hop + 1 < world:
                wait_for_next()
                block_2BHsD = next_2BHsD

        # Store this rank's tensors and nothing else: the backward sends the blocks around again,
        # so that memory per rank shrinks with the number of ranks.
        ctx.save_for_backward(q_BHsD, k_BHsD, v_BHsD, *so_far)
        ctx.group = group
        ctx.positions = positions
        return so_far[0]

    @staticmethod
    def backward(ctx, dout_BHsD):
        q_BHsD, k_BHsD, v_BHsD, out_BHsD, lse_BHs = ctx.saved_tensors
        rank = dist.get_rank(ctx.group)
        world = dist.get_world_size(ctx.group)

        # dq stays, because the queries stay. The gradient of a block is a sum over all ranks, and
        # belongs to its owner. So the sum follows the block, one hop later: each rank computes its
        # part, waits for the sum so far, adds its part, and passes it on. Block 0 of 3 ranks:
        #
        #     hop   the block     the sum of its gradients
        #      0    on rank 0     starts as rank 0's part
        #      1    on rank 1     arrives on rank 1, which adds its part
        #      2    on rank 2     arrives on rank 2, which adds its part
        #      3    -             arrives on rank 0, its owner, complete
        block_2BHsD = torch.stack((k_BHsD, v_BHsD))
        dq_BHsD = torch.zeros_like(q_BHsD)
        for hop in range(world):
            if hop + 1 < world:
                next_2BHsD, wait_for_next = shift(block_2BHsD, 0, ctx.group)

            # out and lse are final, so these parts are final too.
            owner = (rank - hop) % world
            visible_ss = ctx.positions[owner] <= ctx.positions[rank][:, None]
            dq, dk, dv = block_backward(
                dout_BHsD, q_BHsD, *block_2BHsD, out_BHsD, lse_BHs, visible_ss
            )
            dq_BHsD += dq
            sum_2BHsD = torch.stack((dk, dv))
            if hop > 0:
                wait_for_sum()
                sum_2BHsD += arrived_2BHsD
            arrived_2BHsD, wait_for_sum = shift(sum_2BHsD, 1, ctx.group)

            if hop + 1 < world:
                wait_for_next()
                block_2BHsD = next_2BHsD
        wait_for_sum()
        dk_BHsD, dv_BHsD = arrived_2BHsD
        return dq_BHsD, dk_BHsD, dv_BHsD, None


def repeat_key_heads(q_BHsD, k_BGsD, v_BGsD):
    """Copy each key head for the H / G query heads that read it; autograd sums their gradients."""
    copies = q_BHsD.shape[1] // k_BGsD.shape[1]
    return k_BGsD.repeat_interleave(copies, 1), v_BGsD.repeat_interleave(copies, 1)


def simple_ring_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None):
    """Compute causal attention over a sequence of W s tokens, of which every rank holds s.

    q: (B, H, s, D). The tokens `zigzag_indices(W * s, rank, W)`. s must be even.
    k, v: (B, G, s, D). The same tokens; H must be divisible by G.
    group: the process group of the W ranks. Default: all ranks. All of them must call.

    Returns out (B, H, s, D). The scale is D ** -0.5.
    """
    k_BHsD, v_BHsD = repeat_key_heads(q_BHsD, k_BGsD, v_BGsD)
    return SimpleRing.apply(q_BHsD, k_BHsD, v_BHsD, group or dist.group.WORLD)


# 4. Two variations: move the keys with one collective -------------------------------------------


class AllGather(torch.autograd.Function):
    """Concatenate all ranks' x_BHsD along the tokens, in rank order. Backward: reduce-scatter."""

    @staticmethod
    def forward(ctx, x_BHsD, group):
        ctx.group = group
        parts = [torch.empty_like(x_BHsD) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x_BHsD.contiguous(), group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, dx_BHSD):
        # Every rank used our tokens, so their gradient is the sum over ranks.
        parts = [part.contiguous() for part in dx_BHSD.chunk(dist.get_world_size(ctx.group), 2)]
        dx_BHsD = torch.empty_like(parts[0])
        dist.reduce_scatter(dx_BHsD, parts, group=ctx.group)
        return dx_BHsD, None


class AllToAll(torch.autograd.Function):
    """Split x along a dimension, send part r to rank r, and join what arrives along another."""

    @staticmethod
    def forward(ctx, x, split_dim, join_dim, group):
        ctx.way_back = join_dim, split_dim, group
        sent = torch.stack(x.chunk(dist.get_world_size(group), split_dim))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join_dim)

    @staticmethod
    def backward(ctx, dx):
        # Each number went from one place to one place, and its gradient takes the way back.
        return AllToAll.apply(dx, *ctx.way_back), None, None, None


def simple_allgather_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None):
    """Compute what `simple_ring_attention` computes, with one all-gather of keys and values.

    One message in place of W - 1, but each rank holds the keys and values of the whole sequence.
    """
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    k_BHSD, v_BHSD = (AllGather.apply(x, group) for x in repeat_key_heads(q_BHsD, k_BGsD, v_BGsD))

    # The gathered tokens lie rank by rank. A mask of positions does not mind the order.
    positions = [zigzag_indices(k_BHSD.shape[2], r, world) for r in range(world)]
    visible_sS = torch.cat(positions) <= positions[rank][:, None]
    return block_attention(q_BHsD, k_BHSD, v_BHSD, visible_sS.to(q_BHsD.device))[0]


def simple_ulysses_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None):
    """Compute what `simple_ring_attention` computes, with all-to-alls (Ulysses, arXiv:2309.14509).

    Heads do not need each other. So trade our tokens of all heads for all tokens of H / W heads,
    attend as on one device, and trade back. H must be divisible by the number of ranks W:

        before   rank 0: heads x y of tokens 0 3       rank 1: heads x y of tokens 1 2
        after    rank 0: head x of tokens 0 3 1 2      rank 1: head y of tokens 0 3 1 2
    """
    world = dist.get_world_size(group)
    qkv = (q_BHsD, *repeat_key_heads(q_BHsD, k_BGsD, v_BGsD))
    q_BhSD, k_BhSD, v_BhSD = (AllToAll.apply(x, 1, 2, group) for x in qkv)
    order = torch.cat([zigzag_indices(q_BhSD.shape[2], r, world) for r in range(world)])
    visible_SS = (order <= order[:, None]).to(q_BHsD.device)
    out_BhSD, _ = block_attention(q_BhSD, k_BhSD, v_BhSD, visible_SS)
    return AllToAll.apply(out_BhSD, 2, 1, group)


# 5. The check -----------------------------------------------------------------------------------


def launch(world, function, *args):
    """Call function(*args) on `world` new gloo ranks of one thread each; return their results."""
    with tempfile.TemporaryDirectory() as folder:
        how = "fork" if sys.platform == "linux" else "spawn"
        files = [f"{folder}/{rank}" for rank in range(world)]
        try:
            start_processes(run_rank, (folder, world, function, args), world, start_method=how)
        except ProcessExitedException:  # gloo sometimes aborts after the work is done
            if not all(os.path.exists(file) for file in files):
                raise
        return [torch.load(file, weights_only=False) for file in files]


def run_rank(rank, folder, world, function, args):
    """Run one process of `launch`: write the result of its rank to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    torch.save(function(*args), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def core_check():
    """Return the largest error of out, dq, dk, dv of all three ways on this rank, in float64."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    length = 16 * world
    shapes = [(2, n, length, 6) for n in (2 * world, world, world, 2 * world)]
    drawn = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]

    # The truth: all tokens on one process, and a random gradient of out.
    q, k, v = (x.clone().requires_grad_() for x in drawn[:3])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    copies = [x.repeat_interleave(2, 1) for x in (k, v)]
    out, _ = attention_definition(q, *copies, causal)
    truth = [out, *torch.autograd.grad(out, (q, k, v), drawn[3])]

    # Each way gets this rank's tokens, and must return this rank's part of the truth.
    mine = zigzag_indices(length, dist.get_rank(), world)
    errors = []
    for way in (simple_ring_attention, simple_allgather_attention, simple_ulysses_attention):
        local = [x[:, :, mine].clone().requires_grad_() for x in drawn[:3]]
        found = way(*local)
        found = [found, *torch.autograd.grad(found, local, drawn[3][:, :, mine])]
        errors += [(a - b[:, :, mine]).abs().max() for a, b in zip(found, truth, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def core_main(argv):
    """Check the core on 4 new processes, or on the ranks that torchrun has started."""
    # Every rank must learn the largest error of all ranks.
    if "RANK" not in os.environ:
        errors = launch(4, core_check)
    else:
        dist.init_process_group("gloo")
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, core_check())
        dist.destroy_process_group()
    worst = torch.tensor(errors).max().item()
    if os.environ.get("RANK", "0") == "0":
        print(f"ring, all-gather and all-to-all on {len(errors)} ranks: largest error {worst:.1e}")
    if not worst <= 1e-10:
        sys.exit(1)


# ================================================================================================
# The core ends here. The full version follows: any mask, fused kernels, four methods, guards.
# ================================================================================================
#
# What it must equal, in addition to (1) to (3):
#
#     (4)  i sees j  iff  start_j <= i < end_j, rows_i, and position_i - position_j < window
#     (5)  a query that sees nothing: out 0, lse -inf, gradient 0 whatever arrives from upstream
#     (6)  with a softcap c the scores are c tanh(s_ij / c); a gradient of lse enters (3) as
#          dS_ij = P_ij (dout_i . v_j - dout_i . out_i + dlse_i)
#
#     | method    | keys reach queries by   | numbers sent, forward       | keys and values held |
#     | ring      | W - 1 hops of a block   | 2 B G D S (W-1)/W at most   | two blocks           |
#     | ulysses   | an all-to-all           | B D (2 H + 2 G') S/W (W-1)/W | S tokens, 1/W heads |
#     | usp       | all-to-all, then a ring | the sum of both             | 2 blocks, 1/u heads  |
#     | allgather | one all-gather          | 2 B G D S (W-1)/W           | all S tokens         |
#
# Ranks that trade tokens for heads need whole key heads. So u ranks repeat the G key heads until u
# divides their number: G' = lcm(G, u), with u = W for ulysses. usp arranges the ranks as W / u
# groups of u, with an all-to-all inside each group and a ring over the groups. The backward of the
# ring sends the blocks again, and their gradients in float32 or better: twice the bytes of the
# forward in float32, three times in bf16.
#
# How it deviates from the papers. Ulysses repeats key heads where there are too few. FlashMask
# keeps two intervals of hidden queries per key, this file one interval of visible queries. The
# ranks compare digests of shapes, mask and options at every call (0.4 ms on 2 ranks of gloo). To
# compare only new shapes would hang: a rank that has seen a shape would skip the comparison, and a
# rank that has not would wait for it.
#
# Not here: dropout, additive biases, sinks, second derivatives, dv != dk, Sq != Sk across ranks.
# torch.compile leaves these calls out of its graphs. On CUDA, flash computes full and causal boxes
# of bf16 and fp16 with a head size that is a multiple of 8 up to 256; everything else runs by the
# formulas in tiles, which is exact and slower. A NaN or inf in PAD reaches nothing, because PAD is
# zeroed on entry. A NaN in a visible token may spread to every token of its tile. Torch's CPU
# kernel hides a NaN in q where a tile has fewer keys than a vector register: 8 in float64, else 16.
#
# More letters:  b, i, j   batch rows, queries and keys of a tile   r   queries of a tile that read
# one key head: i H / G   W   ranks   X   any dimension
#
# References: Ring Attention arXiv:2310.01889; zigzag: Striped Attention arXiv:2311.09431, Llama 3
# arXiv:2407.21783 (3.3.2); Ulysses arXiv:2309.14509; USP arXiv:2405.07719; FlashAttention-2
# arXiv:2307.08691; FlashMask arXiv:2410.01359.

import dataclasses  # noqa: E402
import functools  # noqa: E402
import hashlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import warnings  # noqa: E402
from collections import namedtuple  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

METHODS = ("ring", "allgather", "ulysses", "usp")  # how keys reach queries
LAYOUTS = ("zigzag", "contiguous")  # which tokens a rank holds
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALL = slice(None)


# 6. Masks ---------------------------------------------------------------------------------------
# For: the masks that training needs, from what a data loader has, in O(S) memory.
# Skip the constructors unless you audit a mask: each computes start and end of a picture below.

NEVER = 1 << 60  # the start of an interval without a query; as a size: no limit

# The per-query and per-key arrays of equation (4), (B, q) and (B, k). A shard stores global
# indices, so the same test works for a shard and for the whole sequence.
Queries = namedtuple("Queries", "index rows position")
Keys = namedtuple("Keys", "index start end position")


def visible_pairs(queries, keys, window, /):
    """Compute equation (4): bool (B, q, k), True where query i sees key j.

    queries: Queries. keys: Keys. window: an integer, or None.

    A table of S^2 bits would say the same, with more memory than everything else here. But in each
    mask that people train with, the queries that see key j are consecutive. So two integers per key
    describe them: start, the first of these queries, and end, the first one after them. The minimum
    and maximum of both over some keys tell whether a query sees none or all of them. With 4 tokens:

        causal          documents 0 0 1 1      blocks 0 0 1 1        tree 0-(1-2, 3)
        j:     0 1 2 3  j:     0 1 2 3         j:     0 1 2 3        j:     0 1 2 3
        start: 0 1 2 3  start: 0 1 2 3         start: 0 0 2 2        start: 0 1 2 3
        end:   4 4 4 4  end:   2 2 4 4         end:   4 4 4 4        end:   4 3 3 4
        row 3: x x x x  row 3: . . x x         row 0: x x . .        row 3: x . . x

    Documents are packed sequences, each causal. A block sees itself in both directions and all
    blocks before it (prefix-LM). The tokens of a tree are in preorder and see their ancestors: key
    j is seen by j and its descendants, which are the tokens right after it. A PAD token has an
    empty interval as a key, and its bit in rows is off as a query.
    """
    # In the tree key 1 has start 1 and end 3, so queries 1 and 2 see it, and query 3 does not.
    index_Bq1 = queries.index[:, :, None]
    see_Bqk = (keys.start[:, None] <= index_Bq1) & (index_Bq1 < keys.end[:, None])  # (4)
    see_Bqk &= queries.rows[:, :, None]

    # A window limits how far back a query sees. It measures positions: indices, or places within a
    # document, or depths in a tree.
    if window is not None:
        position_Bq1 = queries.position[:, :, None]
        position_B1k = keys.position[:, None]
        see_Bqk &= position_Bq1 - position_B1k < window  # (4)
    return see_Bqk


class Mask:
    """Which query sees which key: equation (4), one interval of queries per key.

    start_BS, end_BS: (B, S) or (S,) integers (torch, numpy, lists). Key j is seen by the queries
        start_j to end_j - 1. An interval may be empty.
    rows_BS: bool. Off where a query sees nothing (PAD). Default: on.
    window: a query sees keys with position_i - position_j < window. Default: no window.
    position_BS: integers that the window measures. Default: the index.

    A batch of 1 serves every batch, and is faster: each row of a larger batch has kernel calls of
    its own, even if all rows are equal. Raises ValueError if shapes or types do not fit.
    `visible_pairs` has pictures of the usual masks.
    """

    def __init__(self, start_BS, end_BS, *, rows_BS=None, position_BS=None, window=None):
        # Any part may bring the batch: start (S,) and end (S,) serve every row of rows_BS (B, S).
        start_BS = as_integers(start_BS, "start")
        index_BS = np.arange(start_BS.shape[1])[None]
        rows_BS = np.ones_like(index_BS) if rows_BS is None else rows_BS
        position_BS = index_BS if position_BS is None else position_BS
        given = {"start": start_BS, "end": end_BS, "rows": rows_BS, "position": position_BS}
        parts = [as_integers(x, name) for name, x in given.items()]
        shape = max(len(x) for x in parts), index_BS.shape[1]
        shapes = [x.shape for x in parts]
        if {*shapes} - {shape, index_BS.shape}:
            got = ", ".join(f"{name} {x}" for name, x in zip(given, shapes, strict=True))
            raise ValueError(f"expected parts of a mask of one shape (B, S), got {got}")
        whole = (np.broadcast_to(x, shape) for x in (index_BS, *parts))
        index_BS, start_BS, end_BS, rows_BS, position_BS = whole

        # Write every empty interval as NEVER..0. Then the minimum start and the maximum end of some
        # keys are the minimum and maximum over the keys that somebody sees. With the intervals 2..5
        # and 4..4 of two keys, 4..4 would raise the maximum of the starts, though nobody sees it.
        empty_BS = start_BS >= end_BS
        start_BS = np.where(empty_BS, NEVER, start_BS)
        end_BS = np.where(empty_BS, 0, end_BS)

        self.queries = Queries(index_BS, rows_BS != 0, position_BS)
        self.keys = Keys(index_BS, start_BS, end_BS, position_BS)
        self.window = checked_window(window)
        self.cache = {}  # boxes, biases, schedules: found once, used in every layer and step

    @classmethod
    def full(cls, length):
        """Make the mask in which every token sees every token."""
        # Every key is seen from query 0 on, to the end.
        return cls(np.zeros(length, int), np.full(length, length))

    @classmethod
    def causal(cls, length, *, batch=1, window=None):
        """Make the mask in which each token sees itself and the tokens before it."""
        # Key j is seen from query j on, to the end.
        index_BS = np.tile(np.arange(length), (batch, 1))
        return cls(index_BS, np.full_like(index_BS, length), window=window)

    @classmethod
    def documents(cls, *, doc_ids=None, position_ids=None, window=None):
        """Make the mask of packed documents, each causal.

        doc_ids: (B, S) integers, one number per document; -1 is PAD, allowed anywhere.
        position_ids: (B, S) integers. A document starts where a position is not the previous one
            plus 1; -1 is PAD. A document that starts at previous + 1 cannot be seen: use doc_ids.
            If both are given, doc_ids decide, with a warning, and position_ids only measure the
            window.

        Raises ValueError if neither is given, or if a document continues after another one.
        """
        if position_ids is not None:
            position_ids = as_integers(position_ids, "position_ids")
        if doc_ids is None and position_ids is None:
            raise ValueError("expected doc_ids or position_ids of shape (B, S), got neither")
        if doc_ids is None:
            doc_ids = document_numbers(position_ids)
        elif position_ids is not None:
            warnings.warn("got doc_ids and position_ids: doc_ids decide", stacklevel=2)

        # Like causal, but a key's interval ends where the next document starts. It may include PAD,
        # whose rows are off anyway.
        #
        #     doc_ids    7 7 . 2 2 2        ".": PAD
        #     start      0 1 2 3 4 5        document 7: first token 0, next document at 3
        #     end        3 3 0 6 6 6        document 2: first token 3, next document at 6
        doc_BS = as_integers(doc_ids, "doc_ids")
        rows_BS = doc_BS >= 0
        label_BS, first_BS, next_BS = runs_of_labels(doc_BS, rows_BS)
        for row, label_S in enumerate(label_BS):
            # A document that comes back has one label and two runs.
            label_of_runs = label_S[np.unique(first_BS[row])]
            if len(np.unique(label_of_runs)) < len(label_of_runs):
                raise ValueError(f"row {row}: a document continues after another one; sort tokens")
        start_S = np.arange(doc_BS.shape[1])
        end_BS = np.where(rows_BS, next_BS, 0)
        return cls(start_S, end_BS, rows_BS=rows_BS, position_BS=position_ids, window=window)

    @classmethod
    def blocks(cls, block_BS, valid_BS=None):
        """Make the block-causal mask (prefix-LM, pi0.7): see your own block and all before it.

        block_BS: (B, S) integers that do not decrease over valid tokens.
        valid_BS: (B, S). Off for PAD, anywhere. Default: on.

        Raises ValueError if block numbers decrease.
        """
        block_BS = as_integers(block_BS, "block")
        valid_BS = np.ones_like(block_BS) if valid_BS is None else as_integers(valid_BS, "valid")

        # A key is seen from the first token of its block on, even by queries before the key. So the
        # tokens of a block see each other in both directions.
        label_BS, start_BS, _ = runs_of_labels(block_BS, valid_BS)
        decreasing = np.nonzero(np.diff(label_BS) < 0)[0]
        if len(decreasing):
            row = decreasing[0]
            raise ValueError(f"row {row}: block numbers decrease; sort the tokens by block")

        end_BS = np.where(valid_BS != 0, block_BS.shape[1], 0)
        return cls(start_BS, end_BS, rows_BS=valid_BS)

    @classmethod
    def padding(cls, valid_BS, *, causal=True):
        """Make a mask in which PAD tokens (off in valid_BS) see nothing and nobody sees them."""
        valid_BS = as_integers(valid_BS, "valid")
        index_S = np.arange(valid_BS.shape[1])
        start_S = index_S if causal else np.zeros_like(index_S)

        # A PAD key has the end 0, so its interval is empty.
        end_BS = np.where(valid_BS != 0, len(index_S), 0)
        return cls(start_S, end_BS, rows_BS=valid_BS)

    @classmethod
    def tree(cls, subtree_end_S, position_S=None, window=None):
        """Make the mask of a token tree in preorder: a token sees its ancestors and itself.

        subtree_end_S: (S,) or (B, S) integers. The index after a token's last descendant.
        position_S: depths, which a window measures. Default: computed from subtree_end_S.

        Raises ValueError if the ends do not form a tree.
        """
        # In preorder the descendants of j are the tokens right after it. They are exactly the
        # tokens that have j as an ancestor, so the queries that see key j are an interval.
        end_BS = as_integers(subtree_end_S, "subtree_end")
        index_S = np.arange(end_BS.shape[1])
        if (end_BS <= index_S).any() or (end_BS > len(index_S)).any():
            raise ValueError("expected subtree_end[j] in j + 1 .. S")
        depth_BS = np.stack([preorder_depth(end_S) for end_S in end_BS])
        position_BS = depth_BS if position_S is None else position_S
        return cls(index_S, end_BS, position_BS=position_BS, window=window)

    def dense(self):
        """Return equation (4) as bool (B, 1, q, k)."""
        return torch.from_numpy(visible_pairs(self.queries, self.keys, self.window))[:, None]

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        """Return the mask of some queries and keys: slices, or ascending arrays of local indices.

        i and j keep their global meaning. So a part may be a shard against a block, or a suffix
        against a cache (q != k). An interval mask is the same for all heads.
        """
        rows = checked_index(queries)
        columns = checked_index(keys)
        part_of_queries = Queries(*(x[batch, rows] for x in self.queries))
        part_of_keys = Keys(*(x[batch, columns] for x in self.keys))
        return self._changed(queries=part_of_queries, keys=part_of_keys)

    def with_window(self, window):
        """Return the same mask with another window (None: none), for models whose layers differ."""
        if checked_window(window) == self.window:
            return self
        # Kept, so that the next layer and the next step find the boxes of this window again.
        if ("window", window) not in self.cache:
            self.cache["window", window] = self._changed(window=window)
        return self.cache["window", window]

    def _changed(self, **changes):
        """Return a copy with some attributes changed and an empty cache."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, cache={}, **changes)
        return other

    @property
    def shape(self):
        """Return (batch, heads, queries, keys) of `dense()`. A 1 serves any batch or any heads."""
        batch, num_queries = self.queries.rows.shape
        return batch, 1, num_queries, self.keys.end.shape[1]

    def padding_tokens(self):
        """Return bool arrays (B, q) and (B, k): queries that see nothing, keys that nobody sees."""
        return ~self.queries.rows, self.keys.start >= self.keys.end

    def chunks_that_see(self, edges):
        """Return bool (n, n): can a token of chunk r see a token of chunk c?

        edges: the ascending first indices of n chunks that cut the sequence. Never wrongly False.
        """
        # The queries of a chunk that see anything lie in first .. last, and the intervals of the
        # keys of a chunk in start .. end. So chunk r may see chunk c if these two ranges meet.
        def smallest(x_BS):
            return np.minimum.reduceat(x_BS, edges, axis=1)

        def largest(x_BS):
            return np.maximum.reduceat(x_BS, edges, axis=1)

        index_BS, rows_BS, position_BS = self.queries
        first_Bn = smallest(np.where(rows_BS, index_BS, NEVER))
        last_Bn = largest(np.where(rows_BS, index_BS, -1))
        start_Bn = smallest(self.keys.start)
        end_Bn = largest(self.keys.end)
        sees_Bnn = start_Bn[:, None] <= last_Bn[:, :, None]
        sees_Bnn &= first_Bn[:, :, None] < end_Bn[:, None]

        # Under a window the nearest pair of the two chunks must be near enough.
        if self.window is not None:
            nearest_Bnn = smallest(position_BS)[:, :, None] - largest(position_BS)[:, None]
            sees_Bnn &= nearest_Bnn < self.window
        return sees_Bnn.any(axis=0)

    def digest(self):
        """Return a 63-bit number that is different for different masks."""
        if "digest" not in self.cache:
            self.cache["digest"] = digest(self.window, *self.queries, *self.keys)
        return self.cache["digest"]


class DenseMask(Mask):
    """A bool tensor (B, 1 or H, q, k) as a Mask, for what is not an interval.

    It takes the caller's O(S^2) memory. `attend` and `ring_attention` make one from a bool tensor
    at every call. Make it yourself, once, and all layers share its boxes.
    """

    def __init__(self, dense):
        is_tensor = isinstance(dense, torch.Tensor)
        if not is_tensor or dense.ndim != 4 or dense.dtype != torch.bool:
            got = f"{dense.dtype} {tuple(dense.shape)}" if is_tensor else f"{dense!r}"
            raise ValueError(f"expected a Mask or a bool tensor (B, 1 or H, q, k), got {got}")

        # A copy, so that the caller may write into the tensor; on the CPU, where boxes are found.
        self.bits = dense.detach().to("cpu", copy=True)
        self.cache = {}

    shape = property(lambda self: tuple(self.bits.shape))

    def with_window(self, window):
        if window is not None:
            raise ValueError("a dense mask has no positions: put the window into it, or use a Mask")
        return self

    def slice(self, queries, keys, batch=ALL, heads=ALL):
        # A mask of one head serves all heads, also if this rank has a share of the heads.
        bits = self.bits[batch, heads if self.bits.shape[1] > 1 else ALL]
        return DenseMask(bits[:, :, checked_index(queries)][..., checked_index(keys)])

    def dense(self):
        return self.bits

    def padding_tokens(self):
        return ~self.bits.any(3).any(1).numpy(), ~self.bits.any(2).any(1).numpy()

    def chunks_that_see(self, edges):
        # One bit of the tile, in any batch row and head, is enough.
        bits = np.logical_or.reduceat(self.bits.numpy(), edges, axis=2)
        return np.logical_or.reduceat(bits, edges, axis=3).any(axis=(0, 1))

    def digest(self):
        return digest(self.bits.numpy())


def as_mask(mask):
    """Return a Mask for a Mask, a bool tensor, or None."""
    return mask if mask is None or isinstance(mask, Mask) else DenseMask(mask)


def as_integers(x, name):
    """Return a copy of x as int64 (B, S); x may be (S,). Raise ValueError for anything else."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().numpy()
    array = np.array(x)
    if array.ndim == 1:
        array = array[None]

    # An empty list becomes float64, which is meant as no integers.
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iub"):
        got = f"{array.dtype} {array.shape}"
        raise ValueError(f"expected (B, S) or (S,) integers as a mask's {name}, got {got}")
    return array.astype(np.int64)


def checked_index(index):
    """Return a slice or an int64 array of ascending indices, or raise ValueError."""
    # The search for boxes finds tokens by bisection, so indices must ascend.
    if isinstance(index, slice) and (index.step or 1) > 0:
        return index
    array = np.asarray(index)
    if (array.size and array.dtype.kind not in "iu") or (np.diff(array) < 1).any():
        raise ValueError("expected slices or arrays of integers, both ascending, to slice a mask")
    return array.astype(np.int64)


def checked_window(window):
    """Return the window, or raise ValueError unless it is None or an integer of at least 1."""
    # In Python True is an integer, and would be a window of 1.
    is_integer = isinstance(window, (int, np.integer)) and not isinstance(window, bool)
    if window is not None and not (is_integer and window >= 1):
        raise ValueError(f"expected None or an integer of at least 1 as a window, got {window!r}")
    return window


def document_numbers(position_BS):
    """Return doc_BS, one number per document and -1 for PAD, from positions."""
    # A document starts where a position is not the previous one plus 1. The number of such jumps so
    # far numbers the documents:
    #
    #     position  4 5 6 0 1 -1 0        a -2 stands before the first one, so 4 is a jump
    #     jump      1 0 0 1 0  1 0        -1 to 0 is not a jump, but the jump to -1 has counted
    #     document  1 1 1 2 2 -1 3
    jump_BS = np.diff(position_BS, prepend=-2) != 1
    return np.where(position_BS < 0, -1, np.cumsum(jump_BS, axis=1))


def runs_of_labels(label_BS, valid_BS):
    """Return the label, the first token and the next run of every token's run, (B, S) each.

    PAD may stand anywhere. It belongs to the run of the valid token before it:

        label  . 7 7 . 7 2 2        first  0 1 1 1 1 5 5
                                    next   1 5 5 5 5 7 7        7: the end of the sequence
    """
    # PAD before the first valid token is a run of its own, whose label is the smallest.
    index_S = np.arange(label_BS.shape[1])
    last_valid_BS = np.maximum.accumulate(np.where(valid_BS, index_S, 0), axis=1)
    label_BS = np.where(valid_BS, label_BS, -NEVER)
    label_BS = np.take_along_axis(label_BS, last_valid_BS, axis=1)

    # Carry the index of each first token to the right, and the index after each last to the left.
    is_first_BS = np.diff(label_BS, prepend=NEVER) != 0
    is_last_BS = np.diff(label_BS, append=NEVER) != 0

    first_BS = np.maximum.accumulate(np.where(is_first_BS, index_S, 0), axis=1)
    next_BS = np.where(is_last_BS, index_S + 1, len(index_S))
    next_BS = np.minimum.accumulate(next_BS[:, ::-1], axis=1)[:, ::-1]
    return label_BS, first_BS, next_BS


def preorder_depth(end_S):
    """Return the depth of each token of a preorder, or raise ValueError if subtrees overlap."""
    # A token's ancestors are those whose subtrees started before it and have not ended. Their ends:
    #
    #     end        4 3 3 4       0-(1-2, 3)
    #     ancestors  - 4 4 4       subtrees 1 and 2 end where token 3 starts
    #                    3
    #     depth      0 1 2 1
    depth = []
    open_ends = []  # of the subtrees that the next token may be in
    for token, end in enumerate(end_S.tolist()):
        while open_ends and open_ends[-1] <= token:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            raise ValueError(f"subtree_end[{token}] lies outside the subtree of its parent")
        depth.append(len(open_ends))
        open_ends.append(end)
    return np.array(depth, int)


# 7. Boxes ---------------------------------------------------------------------------------------
# For: speed. What is visible becomes a few rectangles, most of which need no mask inside.
# Skip it if you accept that the boxes are disjoint and hold every visible pair: test_mask.py.

PARTIAL, FULL, CAUSAL = range(3)  # what of a box is visible: some pairs, all, the causal triangle
Box = namedtuple("Box", "batch rows keys kind")  # three slices, and the kind

# tile: keys of which no smaller box is sought. Then the longest square (CAUSAL), the most rows and
# keys of a FULL box, and the longest side of a PARTIAL box.
Sizes = namedtuple("Sizes", "tile square rows keys partial")

# Of torch's CPU kernels only the forward skips what lies above the diagonal in small steps. So the
# backward cuts a causal square into halves down to 128, which saves 20 % at 512 tokens; see
# tests/RESULTS.md. Limits of rows and keys bound the memory of one call's results: 8 MB of 54 at
# 8192 tokens.
TILE = 64
TILES = {
    "cpu forward": Sizes(tile=TILE, square=NEVER, rows=2048, keys=NEVER, partial=1024),
    "cpu backward": Sizes(tile=TILE, square=128, rows=1024, keys=2048, partial=1024),
    "cuda": Sizes(tile=1024, square=NEVER, rows=NEVER, keys=NEVER, partial=1024),
    "formulas": Sizes(tile=512, square=512, rows=512, keys=512, partial=512),
}


def boxes(mask, sizes):
    """Return disjoint Boxes, of at most these sizes, that hold every visible pair of a mask."""
    if ("boxes", sizes) not in mask.cache:
        found = []
        for box in whole_boxes(mask, sizes.tile):
            found += cut(box, sizes)
        mask.cache["boxes", sizes] = found
    return mask.cache["boxes", sizes]


def whole_boxes(mask, tile):
    """Return the Boxes of a mask before they are cut: one search for forward and backward."""
    if ("boxes", tile) not in mask.cache:
        find = boxes_of_bits if isinstance(mask, DenseMask) else boxes_of_intervals
        found = []
        for b in range(mask.shape[0]):
            # A mask with one row serves every row of q.
            batch = slice(b, b + 1) if mask.shape[0] > 1 else ALL
            found += [Box(batch, *box) for box in find(mask, b, tile)]
        mask.cache["boxes", tile] = found
    return mask.cache["boxes", tile]


def cut(box, sizes):
    """Cut a Box into Boxes of at most these sizes: a grid, or the halves of a causal square."""
    size = box.keys.stop - box.keys.start
    if box.kind == CAUSAL and size <= sizes.square:
        return [box]
    if box.kind == CAUSAL:
        # Two smaller squares, and the rectangle below the first one, of which all is visible.
        keys = split_slice(box.keys, (size + 1) // 2)
        rows = split_slice(box.rows, (size + 1) // 2)
        below = box._replace(rows=rows[1], keys=keys[0], kind=FULL)
        squares = [box._replace(rows=i, keys=j) for i, j in zip(rows, keys, strict=True)]
        return [*cut(squares[0], sizes), *cut(below, sizes), *cut(squares[1], sizes)]
    most_rows = sizes.partial if box.kind == PARTIAL else sizes.rows
    most_keys = sizes.partial if box.kind == PARTIAL else sizes.keys
    rows = split_slice(box.rows, most_rows)
    keys = split_slice(box.keys, most_keys)
    return [box._replace(rows=i, keys=j) for i in rows for j in keys]


def split_slice(whole, most):
    """Cut a slice into slices of at most this length."""
    starts = range(whole.start, whole.stop, most)
    return [slice(start, min(start + most, whole.stop)) for start in starts]


def boxes_of_bits(mask, b, tile):
    """Return strips of a tile's queries, each against the keys from its first visible to its last.

    One strip serves all heads: the bias of its box has the bits of each head.
    """
    found = []
    visible_qk = mask.bits[b].any(0).numpy()
    for rows in split_slice(slice(0, len(visible_qk)), tile):
        seen = np.flatnonzero(visible_qk[rows].any(0)).tolist()
        if seen:
            found.append((rows, slice(seen[0], seen[-1] + 1), PARTIAL))
    return found


def boxes_of_intervals(mask, b, tile):
    """Return [(rows, keys, kind)] of one batch row of a mask."""
    queries = Queries(*(x[b] for x in mask.queries))
    keys = Keys(*(x[b] for x in mask.keys))
    if not queries.index.size or not keys.index.size:
        return []

    # PAD among the queries is computed and overwritten later. Only stop after the last real query.
    last_row = queries.index[queries.rows].max(initial=-1) + 1
    keys = keys._replace(end=np.minimum(keys.end, last_row))
    search = BoxSearch(queries, keys, mask.window, tile)
    search.visit(0, len(keys.index), 0, len(queries.index))
    return search.found


class BoxSearch:
    """Find the boxes of one batch row: look at all keys at once, then at each half of them.

    The minimum and the maximum of the intervals of some keys say which rows see a part of the keys
    (1, 3) and which see all of them (2). Part 2 is one FULL box. Only for 1 and 3 the keys are
    halved, and halved again, down to a tile. A causal triangle is one box by itself.

        1   from the smallest start to the largest start
        2   from there to the smallest end
        3   from there to the largest end

    The cuts are where the mask changes: where documents, branches of a tree, blocks or PAD begin. A
    prompt 0-3 with answers 4-5 and 6-7, which see the prompt:

        keys 0-7   no row sees all of them: cut at 4
        keys 0-3   rows 0-3 are a triangle: CAUSAL; rows 4-7 see all: FULL
        keys 4-7   no row sees all of them: cut at 6, then rows 4-5 and rows 6-7: CAUSAL
    """

    def __init__(self, queries, keys, window, tile):
        self.queries = queries
        self.window = window
        self.tile = tile
        self.found = []  # (rows, keys, kind) of each box

        # A key on the diagonal is seen from its own query on, which is here, in row own_row.
        self.own_row = np.searchsorted(queries.index, keys.index)
        has_own = queries.index[self.own_row.clip(max=len(queries.index) - 1)] == keys.index
        is_causal = keys.start == keys.index
        self.on_diagonal = has_own & is_causal & (keys.start < keys.end)
        self.after_own = keys.start + is_causal

        # The mask goes on from key to key if both are seen from their own query on, or both from
        # the same query on, and both up to the same one. Elsewhere it may be cut.
        goes_on = (np.diff(keys.start) == 0) | (is_causal[1:] & is_causal[:-1])
        goes_on &= (np.diff(keys.index) == 1) & (np.diff(keys.end) == 0)
        goes_on &= np.diff(self.on_diagonal) == 0
        may_cut = np.concatenate(([True], ~goes_on))
        if window is not None:
            # The longest triangle that a window leaves whole is as long as the window.
            n = np.arange(len(may_cut))
            since_cut = n - np.maximum.accumulate(np.where(may_cut, n, 0))
            may_cut |= since_cut % window == 0
            keys = keys._replace(end=ends_in_window(queries, keys, window))
        self.cuts = np.flatnonzero(may_cut)
        self.keys = keys

    def visit(self, a, z, low, high):
        """Find the boxes of keys a .. z - 1 within the rows low .. high - 1."""
        # Leave out keys that nobody sees, at both ends. There may be more between them.
        seen = a + np.flatnonzero(self.keys.start[a:z] < self.keys.end[a:z])
        if not len(seen):
            return
        a, z = int(seen[0]), int(seen[-1]) + 1
        length = z - a
        starts = self.keys.start[seen]
        ends = self.keys.end[seen]

        # Parts 1 to 3 lie between these rows. A causal key leaves its own row to the triangle.
        some_start_later = starts.min() < starts.max()
        full = self.after_own[seen].max() if some_start_later else starts.max()
        bounds = starts.min(), full, ends.min(), ends.max()
        rows = np.searchsorted(self.queries.index, bounds).tolist()
        first, full, partial, last = (min(max(row, low), high) for row in rows)
        if first >= last:
            return
        if self.is_triangle(a, z, low, high):
            self.add(self.own_row[a], self.own_row[a] + length, a, z, CAUSAL)
            first = full

        # Part 2 waits for the halves of the keys if it has few rows: boxes are then less narrow. It
        # waits too if a tile of keys in it is not seen. Fewer unseen keys are masked.
        is_tile = length <= self.tile
        is_large = first == full and partial == last or is_tile or 2 * (partial - full) >= length
        is_dense = len(seen) == length or np.diff(seen).max() <= self.tile
        rest = [(first, last)]
        if full < partial and is_large and is_dense and self.is_near(full, partial, a, z):
            self.add(full, partial, a, z, FULL if len(seen) == length else PARTIAL)
            rest = [(first, full), (partial, last)]

        for start, stop in rest:
            if start < stop and is_tile:
                self.add_partial(start, stop, a, z)
            elif start < stop:
                middle = self.middle(a, z)
                self.visit(a, middle, start, stop)
                self.visit(middle, z, start, stop)

    def is_triangle(self, a, z, low, high):
        """Return whether keys a .. z - 1 make a causal triangle with their own rows, all here."""
        top = self.own_row[a]
        length = z - a
        if length == 1 or not low <= top <= high - length:
            return False
        # The rows follow each other without a gap, and none of the keys ends within them.
        return (
            self.on_diagonal[a:z].all()
            and self.own_row[z - 1] == top + length - 1
            and self.keys.end[a:z].min() > self.keys.index[z - 1]
            and self.is_near(top, top + length, a, z)
        )

    def middle(self, a, z):
        """Return the cut nearest to the middle of keys a .. z - 1. Without one, the middle."""
        # Of 3 tiles 2 go to the first half: halves of 1.5 tiles would both be halved again.
        tiles = -(-(z - a) // self.tile)
        middle = a + (z - a) * ((tiles + 1) // 2) // tiles
        n = np.searchsorted(self.cuts, middle)
        near = [cut for cut in self.cuts[max(n - 1, 0) : n + 1].tolist() if a < cut < z]
        return min(near, key=lambda cut: abs(cut - middle), default=middle)

    def is_near(self, start, stop, a, z):
        """Return whether the window lets every one of these rows see every one of these keys."""
        if self.window is None:
            return True
        farthest = self.queries.position[start:stop].max() - self.keys.position[a:z].min()
        return farthest < self.window

    def add(self, start, stop, a, z, kind):
        self.found.append((slice(int(start), int(stop)), slice(a, z), kind))

    def add_partial(self, start, stop, a, z):
        """Add rows of which the mask hides some keys, without those that a window hides whole."""
        if self.window is None:
            self.add(start, stop, a, z, PARTIAL)
            return
        newest = self.keys.position[a:z].max()
        for rows in split_slice(slice(start, stop), self.tile):
            if self.queries.position[rows].min() - newest < self.window:
                self.add(rows.start, rows.stop, a, z, PARTIAL)


def ends_in_window(queries, keys, window):
    """Return the ends of the keys' intervals, earlier where the window alone decides that.

    With positions that count like indices over an interval, a window of 3 lets queries 5, 6 and 7
    see key 5: it ends at 8. In a tree positions are depths, and the intervals stay as they are.
    """
    # Number the runs of real queries over which position - index does not change.
    index = queries.index[queries.rows]
    shift = queries.position[queries.rows] - index
    run = np.cumsum(np.diff(shift, prepend=shift[:1]) != 0)

    # Is a key's whole interval in one run, with the key's own difference?
    first = np.searchsorted(index, keys.start)
    last = np.searchsorted(index, keys.end) - 1
    is_seen = first <= last
    first = first[is_seen]
    counts_alike = run[first] == run[last[is_seen]]
    counts_alike &= shift[first] == (keys.position - keys.index)[is_seen]
    end = keys.end.copy()
    near = np.minimum(end, keys.index + window)
    end[is_seen] = np.where(counts_alike, near[is_seen], end[is_seen])
    return end


# 8. One device: attention in tiles --------------------------------------------------------------
# For: `attend`, and what each hop of the ring computes.
#
# The S x S scores never exist. The forward computes attention box by box and merges the results by
# (2); the backward computes each box again. The core's block_attention and block_backward are one
# box without grouped heads, softcap and kernels.


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """How the boxes of one call are computed."""

    fused: bool  # by torch's flash kernel where it can, else by the formulas
    scale: float  # of (1)
    softcap: float | None = None  # c of (6)


KEPT_PAIRS = 1 << 22  # of biases that a mask keeps for all layers: 4 to 8 bytes each


def group_query_heads(x_bHiX, g, /):
    """View the query heads of a key head as more rows of it: (b, H, i, X) -> (b, G, r, X).

    With r = i H / G rows against one key head, a matmul needs no copies of k and v. H = 4, G = 2,
    i = 3: heads 0 and 1 become the 6 rows of key head 0, and heads 2 and 3 the rows of key head 1.
    """
    return x_bHiX.unflatten(1, (g, -1)).flatten(2, 3)


def tile_scores(q_bHiD, k_bGjD, bias, config):
    """Compute the scores s_bGrj of a tile, equations (1) and (6), with -inf where masked."""
    g = k_bGjD.shape[1]
    s_bGrj = group_query_heads(q_bHiD, g) @ k_bGjD.mT * config.scale  # (1)

    # The cap comes before the mask: c tanh(-inf) would be -c, a score that counts.
    if config.softcap is not None:
        s_bGrj = config.softcap * torch.tanh(s_bGrj / config.softcap)  # (6)
    if bias is None:
        return s_bGrj

    # Masked is -inf and not a large negative number. With a large number, the lse of a query that
    # sees nothing would be that number, its P would be 1 for each masked key, and its output the
    # sum of values that it must not see.
    return s_bGrj + group_query_heads(bias.expand(*q_bHiD.shape[:3], -1), g)


def tile_forward(q_bHiD, k_bGjD, v_bGjD, bias, config):
    """Compute out_bHiD and lse_bHi of one tile by the formulas."""
    s_bGrj = tile_scores(q_bHiD, k_bGjD, bias, config)
    lse_bGr = torch.logsumexp(s_bGrj, -1)  # (1)

    # As in block_attention, a query that sees no key of this tile has out 0 and lse -inf.
    finite_bGr = lse_bGr.masked_fill(lse_bGr == -math.inf, 0.0)
    p_bGrj = torch.exp(s_bGrj - finite_bGr[..., None])
    out_bGrD = p_bGrj @ v_bGjD
    return out_bGrD.reshape(q_bHiD.shape), lse_bGr.reshape(q_bHiD.shape[:3])


def tile_backward(dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, dlse_bHi, bias, config):
    """Compute the parts dq_bHiD, dk_bGjD, dv_bGjD of one tile by the formulas, equation (3).

    out, lse, dlse: of these queries over all keys. dlse: the gradient of lse, or None.
    """
    delta_bHi = (dout_bHiD * out_bHiD).sum(-1)
    if dlse_bHi is not None:
        delta_bHi = delta_bHi - dlse_bHi  # (6): d lse_i / d s_ij = P_ij

    # One key head at a time. The sums over r in dk and dv run over all query heads that read the
    # key head, which is the gradient of having copied it.
    g = k_bGjD.shape[1]
    s_bGrj = tile_scores(q_bHiD, k_bGjD, bias, config)
    q_bGrD = group_query_heads(q_bHiD, g)
    dout_bGrD = group_query_heads(dout_bHiD, g)
    lse_bGr1 = group_query_heads(lse_bHi[..., None], g)
    delta_bGr1 = group_query_heads(delta_bHi[..., None], g)

    # s is c tanh(x / c) already, whose derivative is 1 - tanh^2 = 1 - (s / c)^2. A masked s is
    # -inf: clamp it, so that its P of 0 is multiplied by a finite number.
    p_bGrj = torch.exp(s_bGrj - lse_bGr1)  # (3)
    dp_bGrj = dout_bGrD @ v_bGjD.mT
    ds_bGrj = p_bGrj * (dp_bGrj - delta_bGr1) * config.scale  # (3)
    if config.softcap is not None:
        tanh_bGrj = s_bGrj.clamp(min=-config.softcap) / config.softcap
        ds_bGrj = ds_bGrj * (1 - tanh_bGrj**2)
    dq_bGrD = ds_bGrj @ k_bGjD
    return dq_bGrD.reshape(q_bHiD.shape), ds_bGrj.mT @ q_bGrD, p_bGrj.mT @ dout_bGrD


def forward_tiles(q_BHqD, k_BGkD, v_BGkD, mask, config, before=None, /):
    """Compute out_BHqD and lse_BHq tile by tile, in float32 or better, outside autograd.

    mask: a Mask of q queries and k keys. None: every query sees every key.
    config: an AttentionConfig.
    before: (out, lse) of the same queries over earlier keys. The new result is merged into it in
        place. Default: none.
    """
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    B, H, s, D = q_BHqD.shape
    if before is not None:
        out_BHqD, lse_BHq = before
    else:
        # No key seen yet, equation (5). In memory the heads of a token are neighbors, as the
        # model's next matmul reads them.
        out_BHqD = q_BHqD.new_zeros(B, s, H, D, dtype=wide).transpose(1, 2)
        lse_BHq = q_BHqD.new_full((B, H, s), -math.inf, dtype=wide)
    has_result_Bq = np.full((B, s), before is not None)

    q, k, v = ready_for_tiles(config, q_BHqD, k_BGkD, v_BGkD)
    for rows, columns, bias, is_causal, is_fused in iterate_tiles("forward", mask, config, q, k):
        qkv = q[rows], k[columns], v[columns]
        if is_fused:
            part_out, part_lse = flash_forward(*qkv, bias, is_causal, config.scale)
        else:
            qkv = (x.to(wide) for x in qkv)
            part_out, part_lse = tile_forward(*qkv, bias, config)

        # Tiles of the same queries have different keys, so they merge. The first tile of its
        # queries is their result so far: a copy is cheaper than a merge with nothing.
        has_result_bi = has_result_Bq[rows[0], rows[2]]
        if has_result_bi.any():
            merge_(out_BHqD[rows], lse_BHq[rows], part_out.to(wide), part_lse)  # (2)
        else:
            out_BHqD[rows] = part_out
            lse_BHq[rows] = part_lse
        has_result_bi[:] = True

    return out_BHqD, lse_BHq


def merge_(out1, lse1, out2, lse2):
    """Compute `merge`, equation (2), in place: out1 and lse1 become the result."""
    # With share2 = 1 / (1 + exp(lse1 - lse2)), out = out1 + share2 (out2 - out1): one pass over the
    # outputs where `merge` makes three. The second set is neutral if a query sees none of it.
    # With the masses 2 and 2 of the example at `merge`, share2 is 1/2 and out 2 + (6 - 2) / 2 = 4.
    # NUMERICS: the sigmoid and logaddexp do not overflow, whichever lse is larger. Pinned by
    # tests/test_attend.py::test_scores_of_1e5_in_either_order_stay_finite.
    share2 = torch.sigmoid(lse2 - lse1).masked_fill_(lse2 == -math.inf, 0.0)
    out1.lerp_(out2, share2[..., None])
    torch.logaddexp(lse1, lse2, out=lse1)


def backward_tiles(dout, q_BHqD, k_BGkD, v_BGkD, out, lse, dlse, mask, config, before=None, /):
    """Compute dq_BHqD, dk_BGkD, dv_BGkD tile by tile, in float32 or better, equation (3).

    q, k, v, mask, config: as in `forward_tiles`, which stored no scores.
    dout (B, H, q, D), dlse (B, H, q): the gradients that arrive for out and lse; see
        `without_blind_rows`. dlse may be None.
    out (B, H, q, D), lse (B, H, q): the results of these queries over all keys, wherever those are.
    before: dq of the same queries over other keys, to which the new part is added in place.
    """
    # Torch's kernels know no gradient of lse. Where one arrives, the formulas compute every tile.
    if dlse is not None:
        config = dataclasses.replace(config, fused=False)
    wide = torch.promote_types(q_BHqD.dtype, torch.float32)
    q, k, v, dout, out = ready_for_tiles(config, q_BHqD, k_BGkD, v_BGkD, dout, out)

    # The sums are float32 or better, whatever the dtype of a tile is.
    dq_BHqD = torch.zeros_like(q, dtype=wide) if before is None else before
    dk_BGkD = torch.zeros_like(k, dtype=wide)
    dv_BGkD = torch.zeros_like(v, dtype=wide)
    for rows, columns, bias, is_causal, is_fused in iterate_tiles("backward", mask, config, q, k):
        block = dout[rows], q[rows], k[columns], v[columns], out[rows]
        if is_fused:
            dq, dk, dv = flash_backward(*block, lse[rows], bias, is_causal, config.scale)
        else:
            block = (x.to(wide) for x in block)
            dlse_rows = None if dlse is None else dlse[rows]
            dq, dk, dv = tile_backward(*block, lse[rows], dlse_rows, bias, config)

        # Gradients are plain sums over tiles: the weights are in P already.
        dq_BHqD[rows] += dq
        dk_BGkD[columns] += dk
        dv_BGkD[columns] += dv
        del block, dq, dk, dv  # before the next tile has results of its own
    return dq_BHqD, dk_BGkD, dv_BGkD


def without_blind_rows(dout, lse, dlse):
    """Return dout, lse and dlse without the queries that saw nothing, equation (5)."""
    # NUMERICS: the lse of such a query is -inf, and exp(-inf - -inf) is NaN. With an lse of 0 its P
    # is exp(-inf - 0) = 0. Its dout and dlse become 0, so that its delta is 0 whatever arrives.
    # Pinned by tests/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
    blind_BHq = lse == -math.inf

    # Most calls have no such query. On CUDA, to look would wait for the device.
    if lse.device.type == "cpu" and not blind_BHq.any():
        return dout, lse, dlse
    dout = dout.masked_fill(blind_BHq[..., None], 0.0)
    lse = lse.masked_fill(blind_BHq, 0.0)
    if dlse is not None:
        dlse = dlse.masked_fill(blind_BHq, 0.0)
    return dout, lse, dlse


def run_forward(ctx, forward, padding, q, k, v, where, config):
    """Return (out, lse) of forward(q, k, v, where, config), and save what its backward needs.

    forward: `forward_tiles` or `ring_forward`. padding: see `Mask.padding_tokens`, or None.
    """
    # NUMERICS: a masked weight is 0, but 0 * NaN is NaN: garbage in PAD would reach queries that do
    # not see it. Zeroed once, here, it reaches nothing. Its gradients are 0 anyway: P is 0 where a
    # PAD is the key, and dout is 0 where it is the query. Pinned by
    # tests/test_attend.py::test_garbage_in_pad_reaches_nothing.
    has_blind, has_unseen = (False, False) if padding is None else (x.any() for x in padding)
    if has_blind:
        blind_B1q = torch.from_numpy(padding[0]).to(q.device)[:, None]
        q = q.masked_fill(blind_B1q[..., None], 0.0)
    if has_unseen:
        unseen_B1k = torch.from_numpy(padding[1]).to(k.device)[:, None]
        k, v = (x.masked_fill(unseen_B1k[..., None], 0.0) for x in (k, v))
    out, lse = forward(q, k, v, where, config)
    out = out.to(q.dtype)

    # Boxes may include PAD among the queries. It has seen nothing, equation (5).
    if has_blind:
        out.masked_fill_(blind_B1q[..., None], 0.0)
        lse.masked_fill_(blind_B1q, -math.inf)

    # These five are O(S), and on a ring O(S / W): no block of another rank. Autograd through the
    # tiles would keep the P of every tile: O(S^2).
    # NUMERICS: lse stays in float32 or better; in bf16 the gradients are 10 to 80 times worse.
    # Pinned by tests/test_ring.py::test_every_layout_and_method_is_the_definition.
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.setting = where, config
    ctx.set_materialize_grads(False)
    return out, lse


def run_backward(ctx, backward, dout, dlse):
    """Return dq, dk, dv in the dtype of q, by `backward_tiles` or `ring_backward`."""
    if torch.is_grad_enabled():  # in a backward only under create_graph=True
        raise NotImplementedError("attention has no second derivative here: no create_graph")
    q, k, v, out, lse = ctx.saved_tensors

    # COMM: a loss that leaves out and lse of one rank unused still runs this backward there, with
    # None for the unused ones, so all ranks send the same messages. Pinned by
    # tests/test_ring.py::test_ranks_may_use_different_outputs.
    if dout is None:
        dout = torch.zeros_like(out)
    dout, lse, dlse = without_blind_rows(dout, lse, dlse)
    grads = backward(dout, q, k, v, out, lse, dlse, *ctx.setting)
    return [grad.to(q.dtype) for grad in grads]


class _Attend(torch.autograd.Function):
    """Attention on one device. The mask may be None."""

    @staticmethod
    def forward(ctx, q, k, v, mask, config):
        padding = None if mask is None else mask.padding_tokens()
        return run_forward(ctx, forward_tiles, padding, q, k, v, mask, config)

    @staticmethod
    def backward(ctx, dout, dlse):
        return *run_backward(ctx, backward_tiles, dout, dlse), None, None


def not_compiled(function):
    """Keep a function out of torch.compile's graphs; import the compiler only where it runs."""

    # Masks are numpy arrays, and messages of a ring are not tensor operations: no graph holds them.
    @functools.wraps(function)
    def call(*args, **options):
        run = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return run(*args, **options)

    return call


@not_compiled
def attend(q, k, v, /, mask=None, *, scale=None, softcap=None, backend=None):
    """Compute attention and its log-sum-exp on one device, equations (1) and (4) to (6).

    q: (B, H, q, D), any strides. float64, float32, bf16 or fp16.
    k, v: (B, G, k, D), dtype of q. H must be divisible by G, and D be 1 to 512.
    mask: a Mask, or bool (B, 1 or H, q, k), True where a query sees a key. Default: all is seen.
    scale: positive number that multiplies q . k. Default: D ** -0.5.
    softcap: positive number, see (6). Default: none.
    backend: "fused" (torch's flash kernel), "math" (the formulas), None (fused where it can).

    Returns out (B, H, q, D) in the dtype of q, and lse (B, H, q) in float32 or float64: the natural
    log, of the scaled scores. Both are differentiable, once. A query that sees nothing has 0 and
    -inf. Raises ValueError if the input does not fit.
    """
    mask = as_mask(mask)
    config = checked_config(q, k, v, mask, scale=scale, softcap=softcap, backend=backend)
    return _Attend.apply(q, k, v, mask, config)


# 9. Kernels ------------------------------------------------------------------------------------
# For: torch's flash attention on CPU and CUDA, and which tiles it can compute.
# Skip it unless you audit a dtype or the arguments of a kernel call.


def ready_for_tiles(config, q, *others):
    """Return tensors in the dtype in which tiles are computed, with stride 1 in the last dimension.

    With another stride torch's CPU kernel is silently wrong.
    """
    # NUMERICS: torch's CPU kernel takes 10 times as long in fp16 and rounds the result of each
    # tile; float32 tiles do neither. The formulas are float32 or float64 always. Pinned by
    # tests/test_attend.py::test_low_precision_stays_within_twice_the_error_of_sdpa.
    dtype = q.dtype
    is_half_on_cpu = dtype == torch.float16 and q.device.type == "cpu"
    if is_half_on_cpu or not config.fused:
        dtype = torch.promote_types(dtype, torch.float32)

    tensors = [x.to(dtype) for x in (q, *others)]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def iterate_tiles(direction, mask, config, q, k):
    """Yield (rows, columns, bias, is_causal, is_fused) for every tile that holds a visible pair.

    rows = (batch, all heads, queries) indexes q, columns = (batch, all heads, keys) indexes k. bias
    is None where everything is seen, or where is_causal says what is.
    """
    # A box of the formulas has a matrix of scores in memory, so it is small. The kernels have none.
    device = q.device.type
    sizes = TILES["formulas"]
    if config.fused:
        sizes = TILES[f"cpu {direction}" if device == "cpu" else "cuda"]
    # The forward and the backward of a layer, and all layers, get the same list.
    if mask is not None:
        found = boxes(mask, sizes)
    else:
        everything = Box(ALL, slice(0, q.shape[2]), slice(0, k.shape[2]), FULL)
        found = cut(everything, sizes)
    for box in found:
        # On CUDA flash takes no mask, so the formulas compute a PARTIAL tile. They want a bias for
        # a causal square too.
        is_fused = config.fused and (box.kind != PARTIAL or device == "cpu")
        bias = None
        if box.kind == PARTIAL or (box.kind == CAUSAL and not is_fused):
            dtype = q.dtype if is_fused else torch.promote_types(q.dtype, torch.float32)
            bias = bias_of(mask, box, q.device, dtype)

        rows = box.batch, ALL, box.rows
        columns = box.batch, ALL, box.keys
        yield rows, columns, bias, box.kind == CAUSAL, is_fused


def bias_of(mask, box, device, dtype):
    """Return 0 or -inf per pair of a box; the mask keeps it for the next layer and the backward."""
    kept = mask.cache.setdefault("biases", {})
    key = str(box), device, dtype
    if key in kept:
        return kept[key]

    visible = mask.slice(box.rows, box.keys, box.batch).dense()
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf).to(device)

    # MEMORY: a long sequence with a ragged mask has more PARTIAL boxes than one would keep. Pinned
    # by tests/test_attend.py::test_partial_tiles_are_made_once_and_kept_up_to_a_bound.
    total = mask.cache.get("kept_pairs", 0) + bias.numel()
    if total <= KEPT_PAIRS:
        mask.cache["kept_pairs"] = total
        kept[key] = bias
    return bias


def flash_forward(q_bHiD, k_bGjD, v_bGjD, bias, is_causal, scale):
    """Compute out_bHiD and lse_bHi of one tile with torch's kernel. An empty tile would kill it."""
    # 0.0 is the dropout. Both kernels read G key heads for H query heads, without copies.
    qkv = q_bHiD, k_bGjD, v_bGjD
    aten = torch.ops.aten
    if q_bHiD.device.type == "cuda":
        return aten._scaled_dot_product_flash_attention(*qkv, 0.0, is_causal, scale=scale)[:2]
    out_bHiD, lse_bHi = aten._scaled_dot_product_flash_attention_for_cpu(
        *qkv, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    if bias is not None:
        # NUMERICS: the kernel returns an lse of 0 for a query that sees nothing. Pinned by
        # tests/test_attend.py::test_a_row_that_sees_nothing_is_zero_whatever_arrives.
        lse_bHi = lse_bHi + bias.amax(-1)
    return out_bHiD, lse_bHi


def flash_backward(dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD, lse_bHi, bias, is_causal, scale):
    """Compute the parts of dq, dk, dv of one tile with torch's kernel. out and lse are final."""
    # Given the out and lse over all keys, the kernel computes this tile's part of (3).
    given = dout_bHiD, q_bHiD, k_bGjD, v_bGjD, out_bHiD
    aten = torch.ops.aten
    if q_bHiD.device.type == "cuda":
        # Nothing is packed (None, None), and the seed is for dropout, which is off.
        seed = torch.empty(2, dtype=torch.uint64, device=q_bHiD.device)
        lengths = None, None, q_bHiD.shape[2], k_bGjD.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *given, lse_bHi.contiguous(), *lengths, 0.0, is_causal, seed, seed[0], scale=scale
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, lse_bHi, 0.0, is_causal, attn_mask=bias, scale=scale
    )


# 10. The ring of the full version ---------------------------------------------------------------
# For: any mask and layout, shards of unequal or no length, fewer hops where a mask allows it.
# It is the core's ring, with `forward_tiles` in place of `block_attention`.


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ranks of a process group, every `stride`-th from `first` on, and this rank's place."""

    group: object  # None if there is one rank
    rank: int  # this rank's place in the ring
    world: int  # how many ranks the ring has
    first: int = 0  # rank within the group of the ring's rank 0
    stride: int = 1  # from one rank of the ring to the next

    def member(self, rank):
        """Return the rank within the group of a rank of this ring, which may be -1 or world."""
        # The ring 1 3 5 of a group of 6 has first = 1 and stride = 2: member(-1) is member(2) is 5.
        return self.first + rank % self.world * self.stride

    def name(self, rank):
        """Return the global rank, for messages to people."""
        member = self.member(rank)
        return member if self.group is None else dist.get_global_rank(self.group, member)


def ring_of(group=None) -> Ring:
    """Return the Ring of a group. None: all ranks, or one rank where torch.distributed is off.

    Raises ValueError if this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        if group is not None:
            raise ValueError("got a group, but torch.distributed is not initialized")
        return Ring(None, 0, 1)

    # A rank that is not a member has a placeholder as the group, or a negative rank.
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        rank = dist.get_rank()
        raise ValueError(f"rank {rank} is not in this group; every rank must pass a group it is in")
    return Ring(group, dist.get_rank(group), dist.get_world_size(group))


def indices(length, rank, world, layout="zigzag"):
    """Return the global index of each token of a rank's shard, int64 (s,), ascending.

    length: tokens of the sequence. layout: "contiguous" cuts the sequence into `world` chunks and
    gives chunk r to rank r; "zigzag" cuts it into 2 world chunks and gives chunks r and
    2 world - 1 - r to rank r. Chunks may be unequal, or empty. RoPE needs these positions.

    Raises ValueError for another layout, a rank outside the world, or a negative length.
    """
    if layout not in LAYOUTS:
        raise ValueError(f'expected "zigzag" or "contiguous" as layout, got {layout!r}')
    if not 0 <= rank < world or length < 0:
        got = f"{rank}, {world}, {length}"
        raise ValueError(f"expected 0 <= rank < world and length >= 0, got {got}")

    # 7 tokens, zigzag, 2 ranks: the edges 0 1 3 5 7 of 4 chunks. Rank 0 holds 0 and 5 6.
    chunks = [rank]  # contiguous
    num_chunks = world
    if layout == "zigzag":
        chunks = [rank, 2 * world - 1 - rank]
        num_chunks = 2 * world
    edges = [c * length // num_chunks for c in range(num_chunks + 1)]
    return torch.cat([torch.arange(edges[c], edges[c + 1]) for c in chunks])


class RingSchedule:
    """Who holds which tokens, and how many hops are needed; every rank derives the same one.

    The W ranks are W / u groups of u = inner ranks each. The ranks of a group trade heads, and the
    ring runs over the groups: rank r is member r % u of group r // u. With u = 1 the ring runs over
    all ranks; with u = W it has one hop and no message. A block is the tokens of one group.
    """

    def __init__(self, ring, length, layout, inner, mask):
        group, member = divmod(ring.rank, inner)
        self.trade = Ring(ring.group, member, inner, group * inner, 1)
        self.ring = Ring(ring.group, group, ring.world // inner, member, inner)
        self.group_world = ring.world

        # 8 tokens, zigzag, 4 ranks in 2 groups: the shards 0 7 | 1 6 make the block 0 1 6 7. Zigzag
        # shards of 2 ranks are the same, so a block is what one rank of the outer ring would hold.
        first = group * inner
        ranks = range(first, first + inner)
        self.shards = [indices(length, rank, ring.world, layout) for rank in ranks]
        self.order = torch.argsort(torch.cat(self.shards))  # from shard by shard to ascending
        blocks = [indices(length, rank, self.ring.world, layout) for rank in range(self.ring.world)]
        self.sizes = [len(tokens) for tokens in blocks]

        # The mask of our queries and heads against the keys of each block, kept for all layers.
        self.masks = [None] * len(blocks)
        self.hops = len(blocks)  # hop 0 included
        self.mask_of_rows = None  # this rank's tokens against all: for one all-gather
        self.padding = None  # what `Mask.padding_tokens` returns, of our queries and our block
        if mask is not None:
            heads = mask.shape[1] // inner  # 0: one mask for all heads
            own_heads = slice(member * heads, (member + 1) * heads)
            own = blocks[group].numpy()
            self.masks = [mask.slice(own, x.numpy(), heads=own_heads) for x in blocks]
            self.hops = hops_needed(mask, blocks)
            self.mask_of_rows = mask.slice(self.shards[member].numpy(), ALL)
            blind_Bs = mask.slice(own, ALL).padding_tokens()[0]
            unseen_Bs = mask.slice(ALL, own).padding_tokens()[1]
            self.padding = blind_Bs, unseen_Bs


def hops_needed(mask, blocks):
    """Return how many hops, hop 0 included, until no rank sees anything of the block it holds."""
    # Cut the sequence wherever the next token belongs to another block, ask the mask which chunk
    # sees which, and map chunks to their owners. 3 blocks, and a window that reaches one block
    # back: group 1 sees block 0 and group 2 sees block 1 at hop 1, so there are 2 hops.
    owner_S = np.zeros(sum(len(tokens) for tokens in blocks), int)
    for owner, tokens in enumerate(blocks):
        owner_S[tokens] = owner
    edges = np.flatnonzero(np.diff(owner_S, prepend=-1))
    if not len(edges):
        return 1

    # At hop h rank r holds block r - h. So a chunk of rank r sees a chunk of block c at hop r - c.
    rows, keys = np.nonzero(mask.chunks_that_see(edges))
    hops = (owner_S[edges[rows]] - owner_S[edges[keys]]) % len(blocks)
    return int(hops.max(initial=0)) + 1


def post(ring, messages):
    """Start messages (isend or irecv, tensor, rank of the ring, tag); return the wait function."""
    # An empty shard sends no message, and its neighbor expects none: both compute its length from
    # the schedule, which is the same on all ranks.
    real = [(what, x, ring.member(rank), tag) for what, x, rank, tag in messages if x.numel()]
    return start_messages(real, ring.group) if real else lambda: None


def ring_forward(q_BhqD, k_BgkD, v_BgkD, schedule, config, /):
    """Compute out_BhqD and lse_BhqD of this rank's queries over the keys of all ranks.

    q, k, v: this rank's queries, and its block at hop 0. The results are float32 or better.
    """
    ring = schedule.ring
    block_2BgkD = torch.stack((k_BgkD, v_BgkD))
    so_far = None
    for hop in range(schedule.hops):
        # COMM: send to the right, receive from the left, compute, wait. So the next block travels
        # while this one is computed; and nobody waits before it has posted, so no circle of ranks
        # can deadlock. Pinned by
        # tests/test_ring.py::test_double_buffering_computes_while_a_message_is_in_flight.
        next_2BgkD, messages = rotate_block(block_2BgkD, schedule, hop)
        wait = post(ring, messages)

        # A block in which our queries see nothing has no boxes, so it costs nothing.
        mask = schedule.masks[(ring.rank - hop) % ring.world]
        so_far = forward_tiles(q_BhqD, *block_2BgkD, mask, config, so_far)
        wait()
        block_2BgkD = next_2BgkD
    return so_far


def rotate_block(block_2BgkD, schedule, hop):
    """Return room for the next block, and the messages that move every block one rank on."""
    if hop + 1 >= schedule.hops:
        return None, []
    # The block that arrives may be longer or shorter than the block that leaves.
    ring = schedule.ring
    next_2BgkD = empty_block(block_2BgkD, schedule, ring.rank - hop - 1)
    sent = (dist.isend, block_2BgkD, ring.rank + 1, 0)
    return next_2BgkD, [sent, (dist.irecv, next_2BgkD, ring.rank - 1, 0)]


def empty_block(like_2BgkD, schedule, owner):
    """Return room for a block of a rank of the ring, or for its gradient."""
    two, b, g, _, d = like_2BgkD.shape
    return like_2BgkD.new_empty(two, b, g, schedule.sizes[owner % schedule.ring.world], d)


def ring_backward(dout_BhqD, q_BhqD, k_BgkD, v_BgkD, out, lse, dlse, schedule, config, /):
    """Compute dq_BhqD, dk_BgkD, dv_BgkD of this rank's tokens, in float32 or better.

    dout, dlse: the gradients that arrive for out and lse; dlse may be None.
    out, lse: the results of the forward, over the keys of all ranks.
    q, k, v, schedule, config: as in `ring_forward`.
    """
    # As in the core, the sum of a block's gradients follows the block one hop later. Two things
    # differ. The owner keeps its own part, of hop 0, and adds the sum when it returns. And where
    # fewer than W hops are needed, the sum returns from there in one message. Block 0 of 4 ranks,
    # with 3 hops:
    #
    #     hop   the block   computed there             the sum of its gradients
    #      0    on rank 0   rank 0's part, own_2BgkD   -, this part stays on rank 0
    #      1    on rank 1   rank 1's part              starts as this part
    #      2    on rank 2   rank 2's part              arrives on rank 2, which adds its part
    #      3    -           -                          returns to rank 0, which adds own_2BgkD
    ring = schedule.ring
    hops = schedule.hops
    block_2BgkD = torch.stack((k_BgkD, v_BgkD))
    dq_BhqD = own_2BgkD = sum_2BgkD = None
    for hop in range(hops + 1):
        next_2BgkD, messages = rotate_block(block_2BgkD, schedule, hop)

        # COMM: what hop - 1 summed up is on the wire while this hop computes, to the right neighbor
        # or, at the end, to the owner. Blocks before gradients on all ranks (NCCL), with tags
        # (gloo). Pinned by tests/test_ring.py::test_bytes_on_the_wire_match_the_formula.
        arriving_2BgkD = None
        if 1 < hop < hops:
            arriving_2BgkD = empty_block(own_2BgkD, schedule, ring.rank - hop)
            messages.append((dist.isend, sum_2BgkD, ring.rank + 1, 1))
            messages.append((dist.irecv, arriving_2BgkD, ring.rank - 1, 1))
        if 1 < hop == hops:
            arriving_2BgkD = torch.empty_like(own_2BgkD)
            messages.append((dist.isend, sum_2BgkD, ring.rank - hop + 1, 2))
            messages.append((dist.irecv, arriving_2BgkD, ring.rank + hop - 1, 2))
        wait = post(ring, messages)

        part_2BgkD = own_2BgkD  # at the last hop nothing is computed
        if hop < hops:
            mask = schedule.masks[(ring.rank - hop) % ring.world]
            given = dout_BhqD, q_BhqD, *block_2BgkD, out, lse, dlse, mask, config, dq_BhqD
            dq_BhqD, *part = backward_tiles(*given)
            part_2BgkD = torch.stack(part)
        if hop == 0:
            own_2BgkD = part_2BgkD
        wait()

        # NUMERICS: parts are summed in float32 or better, in the order of the hops. Pinned by
        # tests/test_ring.py::test_bytes_on_the_wire_match_the_formula.
        sum_2BgkD = part_2BgkD
        if arriving_2BgkD is not None:
            sum_2BgkD = arriving_2BgkD.add_(part_2BgkD)
        block_2BgkD = next_2BgkD

    dk_BgkD, dv_BgkD = sum_2BgkD
    return dq_BhqD, dk_BgkD, dv_BgkD


class _RingAttend(torch.autograd.Function):
    """Attention of a rank's queries over the keys of a ring."""

    @staticmethod
    def forward(ctx, q, k, v, schedule, config):
        return run_forward(ctx, ring_forward, schedule.padding, q, k, v, schedule, config)

    @staticmethod
    def backward(ctx, dout, dlse):
        return *run_backward(ctx, ring_backward, dout, dlse), None, None


# 11. The public calls ---------------------------------------------------------------------------
# For: `ring_attention` by its four methods, and whole sequences from shards and back.


class _AllGather(AllGather):
    """The core's AllGather, with its gradient summed in float32 or better."""

    @staticmethod
    def backward(ctx, grad):
        # NUMERICS: a sum over ranks in bf16 would round at every rank. Pinned by
        # tests/test_ring.py::test_low_precision_over_ranks_stays_within_its_multiple_of_sdpa.
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        mine, _ = AllGather.backward(ctx, wide)
        return mine.to(grad.dtype), None


class _TradeHeads(torch.autograd.Function):
    """`trade_heads` of several tensors, with the trade back as its gradient."""

    @staticmethod
    def forward(ctx, schedule, to_tokens, *tensors):
        # As in the core's AllToAll, each number moves once, and its gradient takes the way back.
        ctx.way_back = schedule, not to_tokens
        return tuple(trade_heads(x, schedule, to_tokens) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *(trade_heads(x, *ctx.way_back) for x in grads)


def trade_heads(x_BhsD, schedule, to_tokens):
    """All-to-all in a group of u ranks: our tokens of all heads <-> all its tokens of h / u heads.

    to_tokens: True for the way to all tokens, in ascending order; False for the way back.
    """
    # Forth, each member gets its share of the heads of our tokens. Back, it gets its tokens, so the
    # block is first put in the order shard by shard. The picture is at simple_ulysses_attention.
    trade = schedule.trade
    B, h, _, D = x_BhsD.shape
    sizes = [len(tokens) for tokens in schedule.shards]
    own_sizes = [sizes[trade.rank]] * trade.world
    order = schedule.order.to(x_BhsD.device)
    if to_tokens:
        heads = h // trade.world
        pieces = x_BhsD.split(heads, 1)
        received_sizes = sizes
    else:
        heads = h
        pieces = x_BhsD[:, :, torch.argsort(order)].split(sizes, 2)
        received_sizes = own_sizes

    # COMM: one all-to-all over all W ranks, so that the trades need no groups of their own. A rank
    # sends nothing to ranks outside its trade. Pinned by
    # tests/test_ring.py::test_every_layout_and_method_is_the_definition.
    sent_counts = [0] * schedule.group_world
    received_counts = [0] * schedule.group_world
    members = slice(trade.first, trade.first + trade.world)
    sent_counts[members] = [piece.numel() for piece in pieces]
    received_counts[members] = [size * B * heads * D for size in received_sizes]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    received = sent.new_empty(sum(received_counts))
    splits = received_counts, sent_counts
    dist.all_to_all_single(received, sent, *splits, group=trade.group)

    # Each part has the heads of this rank, or its tokens.
    arrived = received.split(received_counts[members])
    parts = [x.view(B, heads, n, D) for x, n in zip(arrived, received_sizes, strict=True)]
    return torch.cat(parts, 2)[:, :, order] if to_tokens else torch.cat(parts, 1)


@not_compiled
def ring_attention(
    q, k, v, /, *, group=None, mask=None, layout="zigzag", method="ring", scale=None, softcap=None,
    return_lse=False, backend=None, inner=None, debug=False,
):  # fmt: skip
    """Compute attention of a whole sequence whose shards the ranks of a group hold.

    Every rank of the group calls it, in forward and backward.

    q: (B, H, s, D). The tokens `indices(S, rank, world, layout)` of this rank.
    k, v: (B, G, s, D), dtype of q. The same tokens.
    group: process group. Default: all ranks, or one rank where torch.distributed is off.
    mask: of the whole sequence, the same on every rank: a Mask or bool (B, 1 or H, S, S). Default:
        all is seen.
    layout: "zigzag" or "contiguous", see `indices`.
    method: "ring"; "allgather"; "ulysses" (the world divides H); "usp".
    inner: for "usp", how many ranks trade heads. Default: the largest proper divisor of the world
        that divides H; if it is 1, usp is the ring.
    scale, softcap, backend: as in `attend`.
    return_lse: return lse too. Default: False.
    debug: True, or a label ("step 3 layer 7"). Then every rank raises FloatingPointError, with the
        tensor and the rank, if an input, out or a gradient of them is not finite, PAD included.

    Returns out (B, H, s, D) in the dtype of q; with return_lse also lse (B, H, s) in float32 or
    float64. Raises ValueError on every rank, before a block is sent, if the input of any rank does
    not fit or the inputs of the ranks differ.
    """
    # A rank that raised alone would leave the others waiting in the first hop. So the ranks compare
    # their inputs, and then go on together or raise together.
    options = dict(
        layout=layout, method=method, inner=inner, scale=scale, softcap=softcap, backend=backend,
        return_lse=bool(return_lse), debug=bool(debug),
    )  # fmt: skip
    ring = ring_of(group)
    schedule, config = agree_on_call(ring, q, k, v, mask, options)
    if debug:
        q, k, v = _RequireFinite.apply(ring, debug, ["q", "k", "v"], q, k, v)

    # NUMERICS: below, gradients of k and v are summed over ranks and over copies of heads, after
    # each part was rounded to its dtype. Pinned by
    # tests/test_ring.py::test_low_precision_over_ranks_stays_within_its_multiple_of_sdpa.

    # All keys at once need no hop and one message, but the memory of the whole sequence.
    if method == "allgather":
        place = dict(group=group, layout=layout, length=sum(schedule.sizes))
        k, v = unshard(torch.stack((k, v)), dim=3, **place)
        out, lse = _Attend.apply(q, k, v, schedule.mask_of_rows, config)
    elif schedule.trade.world == 1:
        out, lse = _RingAttend.apply(q, k, v, schedule, config)
    else:
        # Each rank of a trade gets whole key heads: repeat them until there are enough.
        copies = math.lcm(k.shape[1], schedule.trade.world) // k.shape[1]
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        q, k, v = _TradeHeads.apply(schedule, True, q, k, v)
        out, lse = _RingAttend.apply(q, k, v, schedule, config)

        # One trade for both, so that its backward runs on every rank, whichever one a loss uses.
        if return_lse:
            out, lse = _TradeHeads.apply(schedule, False, out, lse[..., None])
            lse = lse[..., 0]
        else:
            (out,) = _TradeHeads.apply(schedule, False, out)
    if debug:
        out, lse = _RequireFinite.apply(ring, debug, ["out", "lse"], out, lse)
    return (out, lse) if return_lse else out


def shard(x, /, *, dim, group=None, layout="zigzag"):
    """Return this rank's tokens of a whole x that every rank has: x along dim at `indices`.

    Its gradient is 0 at the tokens of other ranks. So each rank gets the gradient of its own
    tokens: sum it over ranks.
    """
    # A copy of our tokens only: the whole x may be freed.
    ring = ring_of(group)
    return x.index_select(dim, indices(x.shape[dim], ring.rank, ring.world, layout).to(x.device))


def unshard(x, /, *, dim, group=None, layout="zigzag", length):
    """Return the whole along dim, of `length` tokens, on every rank; x holds this rank's tokens.

    Its gradient is the sum over ranks of the gradients of the whole, cut back to this rank's tokens
    (a reduce-scatter). If all W ranks compute the same loss from the whole, the sum counts the loss
    W times, and it must be divided by W. Every rank of the group calls it, in forward and backward.
    Raises ValueError if x does not have the tokens of `indices`.
    """
    ring = ring_of(group)
    held = len(indices(length, ring.rank, ring.world, layout))
    if x.shape[dim] != held:
        raise ValueError(
            f"rank {ring.rank} of {ring.world} holds {held} of {length} tokens in {layout} layout, "
            f"but x has {x.shape[dim]} in dimension {dim}")  # fmt: skip
    if ring.world == 1:
        return x

    # An all-gather wants equal shapes, and gloo one token at least. So pad shards to the longest
    # one, and pick each token from its slot. 5 tokens, contiguous, 2 ranks: the shards 0 1 and
    # 2 3 4 arrive as 0 1 . 2 3 4, so the slots are 0 1 3 4 5.
    shards = [indices(length, rank, ring.world, layout) for rank in range(ring.world)]
    longest = max(1, *(len(tokens) for tokens in shards))
    slots = [rank * longest + torch.arange(len(x)) for rank, x in enumerate(shards)]
    slot_S = torch.cat(slots)[torch.argsort(torch.cat(shards))].to(x.device)
    x = x.movedim(dim, 0)
    padded = torch.cat((x, x.new_zeros(longest - held, *x.shape[1:])))
    whole = _AllGather.apply(padded[None, None], ring.group)[0, 0]  # tokens are dimension 2 there
    return whole.index_select(0, slot_S).movedim(0, dim)


# 12. Guards -------------------------------------------------------------------------------------
# For: a wrong input on one rank, ranks that differ, NaN: one message on every rank, and no hang.
# Skip it on a first reading: with right inputs nothing here changes a number.


def checked_config(q, k, v, mask, size=None, *, scale, softcap, backend):
    """Return the AttentionConfig of a call; raise ValueError unless its inputs fit together.

    mask: a Mask or None. size: how many queries and keys it must have. Default: those of q and k.
    scale, softcap, backend: as in `attend`.
    """
    named = zip("qkv", (q, k, v), strict=True)
    got = ", ".join(f"{name} {x.dtype} {tuple(x.shape)} {x.device}" for name, x in named)
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"expected q (B, H, q, D) and k, v (B, G, k, D), got {got}")

    # A product over other batches or head sizes would broadcast. Torch's kernels and the equations
    # differ only in rounding for these head sizes and dtypes.
    batch, heads, num_queries, head_size = q.shape
    key_heads, num_keys = k.shape[1:3]
    fits = k.shape == v.shape == (batch, key_heads, num_keys, head_size) and head_size <= 512
    if not fits or not head_size or not 1 <= key_heads <= heads or heads % key_heads:
        raise ValueError(
            "expected k and v of one shape, with q's batch and head size, which is 1 to 512, and "
            f"query heads in a multiple of key heads, got {got}")  # fmt: skip
    if q.dtype not in DTYPES or len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        raise ValueError(f"expected q, k, v on one device, in one dtype of {DTYPES}, got {got}")

    # A mask of another length would be read at the wrong tokens, without any error.
    size = size or (num_queries, num_keys)
    if mask is not None and mask.shape[2:] != size:
        raise ValueError(
            f"expected a mask of {size} queries and keys, got {mask.shape[2:]}; make it for the "
            f"whole sequence, or take mask.slice(queries, keys)")  # fmt: skip
    if mask is not None and not (mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)):
        raise ValueError(f"the mask has batch {mask.shape[0]} and {mask.shape[1]} heads, got {got}")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"expected a positive number or None as {name}, got {value!r}")
    if backend not in (None, "math", "fused"):
        raise ValueError(f'expected None, "math" or "fused" as backend, got {backend!r}')

    # Torch's flash kernels compute equation (1), on CUDA for some inputs only. A caller who asks
    # for the kernel wants to know why it is not used.
    device = q.device.type
    fits_cuda = q.dtype.itemsize == 2 and head_size % 8 == 0 and head_size <= 256
    can_fuse = softcap is None and (device == "cpu" or (device == "cuda" and fits_cuda))
    if backend == "fused" and not can_fuse:
        raise ValueError(
            'expected for backend="fused" no softcap, and a CPU, or on CUDA bf16 or fp16 and a '
            f"head size that is a multiple of 8 up to 256; got softcap {softcap}, {q.dtype} on "
            f"{device}, head size {head_size}; pass backend=None")  # fmt: skip
    scale = head_size**-0.5 if scale is None else float(scale)
    return AttentionConfig(backend != "math" and can_fuse, scale, softcap)


def agree_on_call(ring, q, k, v, mask, options):
    """Return the RingSchedule and AttentionConfig of a call on which all ranks agree.

    options: of `ring_attention`, by name. A collective. Raises ValueError on every rank, with the
    same text, if the input of a rank is wrong or the inputs of two ranks differ.
    """
    # An error of this rank travels to the others before it is raised, whatever kind it is.
    problem = None
    facts = {}  # what must be equal on all ranks
    try:
        mask = as_mask(mask)
        whole = tuple(q.shape if mask is None else mask.shape)[2:3]
        numeric = {name: options[name] for name in ("scale", "softcap", "backend")}
        config = checked_config(q, k, v, mask, whole * 2, **numeric)
        layout = options["layout"]
        inner = inner_degree(options["method"], ring.world, q.shape[1], options["inner"])
        indices(0, ring.rank, ring.world, layout)  # refuses an unknown layout
        if k.shape[2] != q.shape[2]:
            raise ValueError(f"expected as many keys as queries, got {k.shape[2]}, {q.shape[2]}")

        # A mask travels as a digest.
        facts = {
            "batch size": len(q), "query heads": q.shape[1], "key heads": k.shape[1],
            "head_dim": q.shape[3], "dtype": q.dtype, "options": options,
            "mask": mask and mask.digest(),
            "gradients": [x.requires_grad and torch.is_grad_enabled() for x in (q, k, v)],
        }  # fmt: skip
    except ValueError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"

    # COMM: three numbers per rank, at every call; on the device of the backend, so that NCCL has a
    # communicator before its first P2P. Pinned by
    # tests/test_ring.py::test_ranks_that_disagree_are_named_on_every_rank.
    facts = {name: str(value) for name, value in facts.items()}
    mine = torch.tensor([problem is not None, digest(facts), 0 if problem else q.shape[2]])
    every = mine[None]
    if ring.world > 1:
        device = "cuda" if "nccl" in dist.get_backend(ring.group) else "cpu"
        every = mine.new_empty(ring.world, len(mine), device=device)
        dist.all_gather(list(every), mine.to(device), group=ring.group)

    # All ranks read the same table, so all of them take the same branch. Only now do texts travel.
    problems, digests, tokens_of_ranks = every.T.tolist()
    if any(problems):
        raise ValueError(name_ranks(gather_objects(problem, ring), ring))
    if len(set(digests)) > 1:
        by_rank = gather_objects(facts, ring)
        differing = [name for name in facts if len({x[name] for x in by_rank}) > 1]
        texts = [", ".join(f"{name} {x[name]}" for name in differing) for x in by_rank]
        raise ValueError(
            f"the ranks of a ring must pass the same {', '.join(differing)}, but "
            f"{name_ranks(texts, ring)} (large numbers are digests); make it from the same data on "
            f"every rank, or broadcast it")  # fmt: skip

    # Without a mask the length is the sum of what the ranks hold; the layout says how it is cut.
    length = sum(tokens_of_ranks) if mask is None else mask.shape[2]
    shards = [len(indices(length, rank, ring.world, layout)) for rank in range(ring.world)]
    if tokens_of_ranks != shards:
        raise ValueError(
            f"rank 0 to rank {ring.world - 1} hold {tokens_of_ranks} tokens, but the {layout} "
            f"shards of {length} are {shards}; take them by shard()")  # fmt: skip

    # A mask keeps its schedules, for the next layer and step.
    schedules = {} if mask is None else mask.cache
    place = ring, length, layout, inner
    if place not in schedules:
        schedules[place] = RingSchedule(*place, mask)
    return schedules[place], config


def name_ranks(texts, ring):
    """Return "rank 0, 2: a; rank 1: b" for the texts of all ranks, in order, without None."""
    # Ranks with the same text share a line. None is a rank without a problem.
    ranks = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(str(ring.name(rank)))
    return "; ".join(f"rank {', '.join(named)}: {text}" for text, named in ranks.items())


def inner_degree(method, world, heads, inner):
    """Return how many ranks trade heads: 1 for a ring, the world for ulysses, fewer for usp."""
    if method not in METHODS:
        raise ValueError(f"expected ring, allgather, ulysses or usp as method, got {method!r}")
    if inner is not None and method != "usp":
        raise ValueError(f'inner={inner} is for method="usp", got method={method!r}')

    # 4 ranks and 6 heads: ulysses cannot divide 6 by 4, usp trades in pairs.
    if method == "usp" and inner is None:
        inner = max((u for u in range(1, world) if world % u == heads % u == 0), default=1)
    inner = world if method == "ulysses" else inner or 1
    if world % inner or heads % inner:
        raise ValueError(
            f"{method} over {inner} ranks: {inner} must divide the {world} ranks and the {heads} "
            f'query heads; use method="ring", or pad the heads')  # fmt: skip
    return inner


class _RequireFinite(torch.autograd.Function):
    """Return tensors unchanged; raise on all ranks if one, or a gradient of one, is not finite."""

    @staticmethod
    def forward(ctx, ring, debug, names, *tensors):
        ctx.setting = ring, debug, [f"d{name}" for name in names]
        ctx.set_materialize_grads(False)  # an lse that no loss uses keeps the gradient None
        require_finite(ring, debug, names, tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        require_finite(*ctx.setting, grads)
        return None, None, None, *grads


def require_finite(ring, debug, names, tensors):
    """Raise FloatingPointError on every rank if a tensor of any rank is not finite."""
    # The lse of a query that sees nothing is -inf by definition. A gradient that no loss needs is
    # None. All ranks send their text, an empty one too, so that all of them raise together.
    named = [pair for pair in zip(names, tensors, strict=True) if pair[0] != "lse"]
    bad = [name for name, x in named if x is not None and not x.isfinite().all()]
    bad_of_ranks = gather_objects(", ".join(bad) or None, ring)
    if any(bad_of_ranks):
        label = "" if debug is True else f"{debug}, "
        texts = name_ranks(bad_of_ranks, ring)
        raise FloatingPointError(f"{label}ring attention: not finite: {texts}")


def gather_objects(mine, ring):
    """Return the objects of all ranks, in order."""
    # Pickled, so slow: for errors, debug= and check.
    every = [mine] * ring.world
    if ring.world > 1:
        dist.all_gather_object(every, mine, group=ring.group)
    return every


def digest(*parts):
    """Return a 63-bit number that is different for different arrays, or values by their repr."""
    state = hashlib.blake2b(digest_size=8)
    for x in parts:
        # A text has an end, so that (1, 23) and (12, 3) differ. The shape says where an array ends.
        is_array = isinstance(x, np.ndarray)
        text = f"{x.dtype} {x.shape}" if is_array else repr(x)
        state.update(text.encode() + b"\0" + (x.tobytes() if is_array else b""))
    return int.from_bytes(state.digest(), "big") >> 1


# 13. check --------------------------------------------------------------------------------------
# For: `python ring_attention.py check`: every method and mask against the core's definition.
# Skip it unless you doubt the numbers; then start here.


def examples(length, heads=1):
    """Return one mask of every kind for `length` tokens; a batch of 2 where its rows can differ."""
    generator = torch.Generator().manual_seed(0)
    valid_BS = torch.rand(2, length, generator=generator) > 0.3
    valid_BS[1, : length // 2] = False  # a rank of two may hold nothing that is valid
    doc_BS = torch.arange(length) * torch.tensor([[3], [7]]) // max(length, 1)

    # Subtrees of 2 tokens inside subtrees of 6 inside subtrees of 24. Each size divides the next,
    # so that they nest.
    end = np.arange(1, length + 1)
    for size in (2, 6, 24):
        end[::size] = np.minimum(np.arange(0, length, size) + size, length)
    tree = Mask.tree(end)
    return {
        "full": None,
        "causal": Mask.causal(length),
        "documents": Mask.documents(doc_ids=doc_BS.masked_fill(doc_BS == 1, -1)),
        "positions": Mask.documents(position_ids=torch.arange(length) % torch.tensor([[11], [4]])),
        "blocks": Mask.blocks(torch.arange(length).expand(2, -1) // 5, valid_BS),
        "padding": Mask.padding(valid_BS),
        "tree": tree,
        "window": Mask.causal(length, window=5),
        "tree, window": tree.with_window(3),
        "dense": torch.rand(2, heads, length, length, generator=generator) > 0.8,
    }


def relative(found, truth):
    """Return the norm of the error over the norm of the truth: 1 for a wrong zero, inf for NaN."""
    # A norm of the whole tensor: elements near 0 have no relative error that says anything. Where
    # both are -inf, the lse of a query that sees nothing, there is no error.
    both_blind = (found == -math.inf) & (truth == -math.inf)
    error = (found.double() - truth).masked_fill(both_blind, 0.0).norm().item()
    size = truth.masked_fill(both_blind, 0.0).norm().item()
    return error / (size or 1.0) if math.isfinite(error) else math.inf


def compare(
    mask, group, dtype, tokens, device="cpu", *, heads=(12, 2), width=16, attention=None, **options
):  # fmt: skip
    """Return the errors of (out, lse, dq, dk, dv) of `ring_attention`: the worst of all ranks.

    mask, group: as in `ring_attention`. dtype, device: of the inputs. tokens, heads, width: S,
    (H, G) and D. options: of `ring_attention`.
    attention: a function of this rank's q, k, v, and group=, that returns out, to compare instead.
        Then the errors are of (out, dq, dk, dv).

    The truth is the definition in float64, of the same rounded inputs.
    """
    # Every rank draws the same whole sequence. Upstream gradients are random: for out, and in
    # float64 for lse too. In lower dtypes lse has none, so that torch's kernels are compared.
    generator = torch.Generator().manual_seed(7)
    h, g = heads
    shapes = [(2, n, tokens, width) for n in (h, g, g, h)] + [(2, h, tokens)]
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn = [x.to(device, dtype) for x in drawn]
    visible = (Mask.full(tokens) if mask is None else as_mask(mask)).dense().to(device)
    place = dict(dim=2, group=group, layout=options.get("layout", "zigzag"))
    num_outputs = 2 if attention is None else 1

    def defined(q, k, v):
        return attention_definition(q, *repeat_key_heads(q, k, v), visible)[:num_outputs]

    def of_shards(*qkv):
        if attention is None:
            return ring_attention(*qkv, group=group, mask=mask, return_lse=True, **options)
        return (attention(*qkv, group=group),)

    def run(function, q, k, v, *upstream):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        outputs = function(*leaves)
        used = outputs if dtype == torch.float64 else outputs[:1]
        grads = torch.autograd.grad(used, leaves, upstream[: len(used)])
        return [x.detach().double() for x in (*outputs, *grads)]

    # Each rank computes its tokens. Then all of them see the whole results.
    truth = run(defined, *(x.double() for x in drawn))
    found = run(of_shards, *(shard(x, **place) for x in drawn))
    found = [unshard(x, **place, length=tokens) for x in found]
    errors = [relative(a, b) for a, b in zip(found, truth, strict=True)]

    # Every rank returns the largest error of all ranks, so that all of them print the same.
    return np.max(gather_objects(errors, ring_of(group)), axis=0).tolist()


def by_way(group, error):
    """Return {column: error(method=.., layout=..)} for the ways a group can share 12 heads."""
    # The ring and the all-gather run on any number of ranks.
    methods = METHODS if 12 % ring_of(group).world == 0 else METHODS[:2]
    ways = itertools.product(methods, LAYOUTS)
    return {f"{m[:4]} {layout[:3]}": error(method=m, layout=layout) for m, layout in ways}


CORE = [simple_ring_attention, simple_allgather_attention, simple_ulysses_attention]


def rows_of_rank(tokens, device):
    """Return [(table, row, budget, {column: value})] of the worlds of this rank; rank 0 has all."""
    # A group is made by all ranks, its members or not. Only its members compute.
    rank = dist.get_rank()
    total = dist.get_world_size()
    worlds = [world for world in sorted({1, 2, 3, 4, total}) if world <= total]
    groups = {world: dist.new_group(list(range(world))) for world in worlds if world < total}
    groups[total] = dist.group.WORLD
    rows = []
    for world in worlds:
        if rank >= world:
            continue
        table = f"float64, world {world}"
        for name, mask in examples(tokens, 12).items():
            given = mask, groups[world], torch.float64, tokens, device
            row = by_way(groups[world], lambda **way: max(compare(*given, **way)))  # noqa: B023
            rows.append((table, name, 1e-12, row))

        # The core knows the causal mask alone, and shards of one length.
        if 12 % world == 0 and device == "cpu":
            given = Mask.causal(8 * world), groups[world], torch.float64, 8 * world
            row = {way.__name__[7:13]: max(compare(*given, attention=way)) for way in CORE}
            rows.append((f"float64, core, world {world}", "causal", 1e-12, row))

    # Lower dtypes are compared with torch's own attention, which is in the folder of tests.
    try:
        rows += _measuring_file().check_rows(groups[total], device)
    except ImportError as missing:
        if rank == 0:
            print(f"SKIP lower dtypes and the work of each rank: {missing}")
    return rows


def check():
    """Print every error with its budget; return 1 if one is over. 4 ranks here, or torchrun's."""
    # 23 tokens divide by no number of ranks, so that shards are unequal.
    if "RANK" not in os.environ:
        rows = launch(4, rows_of_rank, 23, "cpu")[0]
    else:
        # NCCL where there is CUDA, gloo elsewhere.
        device = "cpu"
        backend = "gloo"
        if torch.cuda.is_available():
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            backend = "nccl"
            torch.cuda.set_device(device)
        dist.init_process_group(backend)
        rows = rows_of_rank(23, device)
        dist.barrier()
        dist.destroy_process_group()

    # Every rank has the errors of all ranks; the first one prints them.
    if os.environ.get("RANK", "0") != "0":
        return 0

    # One table per world and dtype, one row per mask, one column per method and layout.
    failed = []
    largest = 0.0  # error in float64: what the README quotes
    for table, rows_of_table in itertools.groupby(rows, lambda row: row[0]):
        for n, (_, name, budget, row) in enumerate(rows_of_table):
            if n == 0:
                columns = "".join(f" {column:>8}" for column in row)
                print(f"\n{table:>24}{columns}   budget")

            # NaN is not below any budget, so it fails too.
            ok = all(value <= budget for value in row.values())
            numbers = "".join(f" {value:8.3g}" for value in row.values())
            print(f"{name:>24}{numbers}   {budget:.3g} {'ok' if ok else 'FAILED'}")
            failed += [] if ok else [name]
            largest = max([largest, *row.values()]) if "float64" in table else largest
    print(json.dumps({"check": "ring_attention", "ok": not failed, "max_error": largest}))
    return 1 if failed else 0


def _measuring_file(name="measure_ring"):
    """Import a file of tests/; ImportError if it, or a file that it needs, is missing."""
    # After everything else on the path, so that no file of tests/ hides a module.
    tests = Path(__file__).resolve().parent / "tests"
    sys.path += [str(tests), str(tests / "bench")]
    return __import__(name)


def main(argv):
    """Run a command and return its exit code; bench, memory, longest, stress are in tests/."""
    if argv[:1] == ["core"]:
        core_main(argv[1:])
        return 0
    if argv == ["check"]:
        return check()

    # The rest needs the folder of tests: measurements, and the check against a GPU's CPU.
    measures = argv[:1] in (["bench"], ["memory"], ["longest"], ["stress"])
    if measures or argv[:2] == ["check", "--device"]:
        try:
            if argv[0] == "check":
                return _measuring_file("measure_gpu").check("ring_attention", argv[1:])
            return _measuring_file().main(argv)
        except ImportError as missing:
            print(f"{argv[0]} needs the tests folder next to this file: {missing}", file=sys.stderr)
            return 2
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
