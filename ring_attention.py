"""Ring attention: exact attention over a sequence that is split over ranks.

Each rank keeps the queries of its tokens. Blocks of keys and values travel around a ring of ranks,
one rank per hop, and each rank attends to every block while it is there. Attention over one block
returns an output and a log-sum-exp (lse). With the lse, partial outputs merge exactly.

    python ring_attention.py                         # check it: 4 ranks, 3 CPU seconds
    torchrun --nproc-per-node 8 ring_attention.py    # check it on your own ranks, or on their GPUs

What it must equal, for a query i and the keys j that it sees. Causal attention sees j <= i. With a
window w, as in Mistral and Gemma, it sees j > i - w only.

    (1)  s_ij  = scale q_i . k_j                  scale = D ** -0.5 by default
         lse_i = log sum_j exp(s_ij)              out_i = sum_j exp(s_ij - lse_i) v_j
    (2)  lse   = log(exp(lse1) + exp(lse2))       out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2
    (3)  P_ij  = exp(s_ij - lse_i)                dS_ij = P_ij (dout_i . v_j - dout_i . out_i)
         dv_j  = sum_i P_ij dout_i                dq_i = scale sum_j dS_ij k_j
                                                  dk_j = scale sum_i dS_ij q_i

Letters in names are dimensions:  B batch   H query heads, h = H / W of this rank   G key heads
D head size   S all tokens, s = S / W of this rank   W ranks   n = s / 2 tokens of a chunk
q queries   k keys   2 two chunks, or the pair k, v
"""

import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes
from torch.nn.functional import scaled_dot_product_attention as sdpa

# 1. Attention over one block of keys ----------------------------------------------------------


def attention_definition(q_BHqD, k_BGkD, v_BGkD, visible_BHqk, /, scale=None):
    """Compute attention with all scores in memory: everything below must equal this.

    q: (B, H, q, D). k, v: (B, G, k, D). H / G consecutive query heads read one key head.
    visible: bool, broadcastable to (B, H, q, k). True where query i sees key j.
    scale: of (1). Default: D ** -0.5.

    Returns out (B, H, q, D) and lse (B, H, q). A query that sees no key has out 0 and lse -inf.
    """
    scale = q_BHqD.shape[-1] ** -0.5 if scale is None else scale
    copies = q_BHqD.shape[1] // k_BGkD.shape[1]
    k_BHkD, v_BHkD = (x.repeat_interleave(copies, 1) for x in (k_BGkD, v_BGkD))
    s_BHqk = scale * torch.einsum("bhqd,bhkd->bhqk", q_BHqD, k_BHkD)  # (1)

    # The softmax over no key is 0 / 0: such a query has weights of 0. Its lse is log 0 = -inf.
    s_BHqk = s_BHqk.masked_fill(~visible_BHqk, -math.inf)
    p_BHqk = torch.softmax(s_BHqk, -1).masked_fill(~visible_BHqk.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bhkd->bhqd", p_BHqk, v_BHkD), torch.logsumexp(s_BHqk, -1)


# The next two functions alone compute scores, (B, H, q, k) of one block. On a GPU, a flash kernel
# can replace them. Its forward must return out and lse of the block: a natural logarithm in
# float32, -inf where a query sees no key. Its backward must take the out and lse of all blocks, and
# return the block's parts of dq, dk, dv. Round no part to bfloat16: the ring adds the parts up.


def block_attention(q_BHqD, k_BHkD, v_BHkD, visible_qk, scale):
    """Attend to the keys of one block: return out_BHqD and lse_BHq over these keys alone."""
    s_BHqk = scale * q_BHqD @ k_BHkD.mT  # (1)
    if visible_qk is not None:  # None: every query sees every key
        s_BHqk = s_BHqk.masked_fill(~visible_qk, -math.inf)
    lse_BHq = torch.logsumexp(s_BHqk, -1)

    # With a window, a query may see no key of this block. Its lse is -inf, and -inf - -inf is NaN.
    # Subtract 0: exp(-inf - 0) = 0, so its output over this block is 0.
    finite_BHq = lse_BHq.masked_fill(lse_BHq == -math.inf, 0.0)
    p_BHqk = torch.exp(s_BHqk - finite_BHq[..., None])
    return p_BHqk @ v_BHkD, lse_BHq


def block_backward(dout_BHqD, q_BHqD, k_BHkD, v_BHkD, out_BHqD, lse_BHq, visible_qk, scale):
    """Return dq_BHqD, dk_BHkD, dv_BHkD of one block, given the final out and lse of all blocks."""
    # The gradient of a softmax needs two sums over all keys: the normalizer, which is in lse, and
    # sum_j P_ij (dout_i . v_j) = dout_i . sum_j P_ij v_j = dout_i . out_i. Both are known from the
    # final lse and out, so the gradients of blocks can be computed anywhere and simply added up.
    s_BHqk = scale * q_BHqD @ k_BHkD.mT
    if visible_qk is not None:
        s_BHqk = s_BHqk.masked_fill(~visible_qk, -math.inf)
    p_BHqk = torch.exp(s_BHqk - lse_BHq[..., None])  # (3), computed again: no scores were stored
    delta_BHq = (dout_BHqD * out_BHqD).sum(-1)
    ds_BHqk = p_BHqk * (dout_BHqD @ v_BHkD.mT - delta_BHq[..., None])
    return scale * (ds_BHqk @ k_BHkD), scale * (ds_BHqk.mT @ q_BHqD), p_BHqk.mT @ dout_BHqD


def merge(out1, lse1, out2, lse2, /):
    """Merge attention over two disjoint sets of keys into attention over both, equation (2).

    out1, out2: (.., q, D), one dtype. The outputs over each set of keys.
    lse1, lse2: (.., q), float32 or float64. -inf where a query sees no key of the set.

    Returns (out, lse), out in the dtype of out1: keep it in float32 until the last merge is done.
    Differentiable in all four arguments. The order of merges does not matter. Ring Attention,
    arXiv:2310.01889, carries a running maximum and a running sum; the lse is both in one number.
    """
    # exp(lse) is the softmax mass of a set of keys. The merged output is the mean of both outputs,
    # weighted by mass:
    #
    #     set     scores        mass   lse     values    out
    #     1       0, 0          2      log 2   1, 3      2
    #     2       log 2         2      log 2   6         6
    #     both    0, 0, log 2   4      log 4   1, 3, 6   (2 * 2 + 2 * 6) / 4 = 4
    #
    # A query may see no key of either set: pretend a mass of 1 + 1, so that its shares are
    # exp(-inf - log 2) = 0 and not NaN, and put the lse of -inf back at the end.
    # NUMERICS: logaddexp subtracts the larger lse before it takes exp, so nothing overflows.
    blind = (lse1 == -math.inf) & (lse2 == -math.inf)
    lse = torch.logaddexp(lse1.masked_fill(blind, 0.0), lse2.masked_fill(blind, 0.0))  # (2)
    share1 = torch.exp(lse1 - lse)[..., None]
    share2 = torch.exp(lse2 - lse)[..., None]
    out = share1 * out1 + share2 * out2  # (2)
    return out.to(out1.dtype), lse.masked_fill(blind, -math.inf)


# 2. Who holds which tokens, and which of them see each other ------------------------------------


def zigzag_chunks(rank, world):
    """Return the numbers of the two chunks that a rank holds, of the 2 * world of a sequence."""
    # A late query sees more keys than an early one, and the ring waits for its slowest rank. So
    # each rank holds an early chunk and its mirror image. Then every rank computes 3 pairs of
    # chunks at hop 0 and 2 at each later hop: all its queries with the early keys, or its late
    # queries with all keys. On 2 ranks:
    #
    #     queries      keys:    0 1 2 3
    #     chunk 0, rank 0       \ . . .      \  visible in part: computed with a mask
    #     chunk 1, rank 1       # \ . .      #  all visible: computed without a mask
    #     chunk 2, rank 1       # # \ .      .  nothing visible: skipped
    #     chunk 3, rank 0       # # # \      each rank computes 5 of 8 pairs, 2 W + 1 of 4 W
    return rank, 2 * world - 1 - rank


def zigzag_indices(length, rank, world, device=None):
    """Return the global indices of the tokens that a rank holds, int64 (length / world,).

    length must be divisible by 2 * world. device: of the indices. Default: the CPU.
    """
    if length % (2 * world) or not 0 <= rank < world:
        raise ValueError(f"expected a length divisible by 2 * world = {2 * world} and a rank of 0 "
                         f"to {world - 1}, got length {length} and rank {rank}")  # fmt: skip
    # 8 tokens on 2 ranks: rank 0 holds 0 1 6 7, and rank 1 holds 2 3 4 5.
    chunks = torch.arange(length, device=device).chunk(2 * world)
    return torch.cat([chunks[c] for c in zigzag_chunks(rank, world)])


def visible_keys(query_q, key_k, window):
    """Return from global positions, as (q, k) bool, which of k keys each of q queries sees."""
    # The query at position 5 sees keys 3, 4 and 5 if the window is 3.
    distance_qk = query_q[:, None] - key_k
    return (distance_qk >= 0) & (distance_qk < window)


def visible_pairs(rank, owner, world, n, window, device):
    """Yield (a, b, visible) where a rank's query chunk a sees keys of an owner's chunk b.

    a, b: 0 for the early chunk of n tokens, 1 for the late one.
    visible: bool (n, n). None if every query of the chunk sees every key.
    """
    for a, i in enumerate(zigzag_chunks(rank, world)):
        for b, j in enumerate(zigzag_chunks(owner, world)):
            # Chunk 5 starts 2 n tokens after chunk 3. So its queries are 2 n - (n - 1) to
            # 2 n + (n - 1) tokens after the keys. A query sees distances of 0 to window - 1.
            nearest, farthest = (i - j) * n - (n - 1), (i - j) * n + (n - 1)
            if farthest < 0 or nearest >= window:
                continue
            visible_nn = None
            if nearest < 0 or farthest >= window:
                token_n = torch.arange(n, device=device)
                visible_nn = visible_keys(i * n + token_n, j * n + token_n, window)
            yield a, b, visible_nn


# 3. The ring ------------------------------------------------------------------------------------
#
# Block r is the keys and values of rank r's tokens. It starts on rank r and moves one rank to the
# right at each hop, so at hop h rank r holds block r - h, modulo W. While a rank computes with a
# block, it already sends that block and receives the next one. With 3 ranks:
#
#     hop      rank 0    rank 1    rank 2        meanwhile, rank 0
#      0       block 0   block 1   block 2       sends block 0 and receives block 2
#      1       block 2   block 0   block 1       sends block 2 and receives block 1
#      2       block 1   block 2   block 0       sends nothing: all ranks have seen all blocks


def shift(x, group):
    """Start to send x to the right neighbor and to receive the left neighbor's x.

    Returns the tensor that receives, and a function that waits until both messages are done.
    """
    # COMM: every rank posts both messages before it waits, so no circle of ranks can deadlock.
    # All ranks post in the same order, and messages match in that order: NCCL ignores tags.
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:  # the neighbor is this rank itself
        return x, lambda: None
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % world)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % world)
    requests = dist.batch_isend_irecv([send, receive])
    return received, lambda: [request.wait() for request in requests]


def traveling_blocks(block, group):
    """Yield (owner, block) of every rank, one per hop. The first block is this rank's own."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for hop in range(world - 1):
        next_block, wait_for_next = shift(block, group)  # travels while the caller computes
        yield (rank - hop) % world, block
        wait_for_next()
        block = next_block
    yield (rank + 1) % world, block


def widen(x):
    """Return x in float32, or as it is if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RingAttention(torch.autograd.Function):
    """Causal ring attention: out_2BHnD of this rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(ctx, q_2BHnD, block_22BGnD, group, scale, window):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        copies = q_2BHnD.shape[2] // block_22BGnD.shape[3]
        layout = world, q_2BHnD.shape[3], window, q_2BHnD.device

        # NUMERICS: out and lse of the keys so far are float32 or better. out is rounded at the end.
        out_2BHnD = torch.zeros_like(widen(q_2BHnD))
        lse_2BHn = torch.full_like(out_2BHnD[..., 0], -math.inf)  # of no keys
        for owner, kv_22BGnD in traveling_blocks(block_22BGnD, group):
            for a, b, visible_nn in visible_pairs(rank, owner, *layout):
                # Only now copy each key head for the query heads that read it. No copy travels.
                k_BHnD, v_BHnD = widen(kv_22BGnD[b]).repeat_interleave(copies, 2)
                part = block_attention(widen(q_2BHnD[a]), k_BHnD, v_BHnD, visible_nn, scale)
                out_2BHnD[a], lse_2BHn[a] = merge(out_2BHnD[a], lse_2BHn[a], *part)  # (2)
        out_2BHnD = out_2BHnD.to(q_2BHnD.dtype)

        # Store this rank's tensors and nothing else: the backward sends the blocks around again,
        # so that memory per rank shrinks with the number of ranks.
        ctx.save_for_backward(q_2BHnD, block_22BGnD, out_2BHnD, lse_2BHn)
        ctx.options = group, rank, scale, copies, layout
        return out_2BHnD

    @staticmethod
    @torch.autograd.function.once_differentiable  # autograd does not know that lse depends on q
    def backward(ctx, dout_2BHnD):
        q_2BHnD, block_22BGnD, out_2BHnD, lse_2BHn = ctx.saved_tensors
        group, rank, scale, copies, layout = ctx.options
        dq_2BHnD = torch.zeros_like(q_2BHnD, dtype=lse_2BHn.dtype)

        # dq stays, because the queries stay. The gradient of a block is a sum over all ranks, and
        # belongs to its owner. So the sum follows the block, one hop later: each rank computes its
        # part, waits for the sum so far, adds its part, and passes it on. Block 0 of 3 ranks:
        #
        #     hop   the block     the sum of its gradients
        #      0    on rank 0     starts as rank 0's part
        #      1    on rank 1     arrives on rank 1, which adds its part
        #      2    on rank 2     arrives on rank 2, which adds its part
        #      3    -             arrives on rank 0, its owner, complete
        for owner, kv_22BGnD in traveling_blocks(block_22BGnD, group):
            sum_22BGnD = torch.zeros_like(kv_22BGnD, dtype=lse_2BHn.dtype)
            for a, b, visible_nn in visible_pairs(rank, owner, *layout):
                dout, q, out = (widen(x[a]) for x in (dout_2BHnD, q_2BHnD, out_2BHnD))
                k, v = widen(kv_22BGnD[b]).repeat_interleave(copies, 2)
                dq, dk, dv = block_backward(dout, q, k, v, out, lse_2BHn[a], visible_nn, scale)
                dq_2BHnD[a] += dq
                # The gradient of a key head is the sum over the query heads that read it.
                sum_22BGnD[b] += torch.stack((dk, dv)).unflatten(2, (-1, copies)).sum(3)
            if owner != rank:
                wait_for_sum()
                sum_22BGnD += arrived_22BGnD
            arrived_22BGnD, wait_for_sum = shift(sum_22BGnD, group)
        wait_for_sum()
        return dq_2BHnD.to(q_2BHnD.dtype), arrived_22BGnD.to(block_22BGnD.dtype), None, None, None


def checked_options(q_BHsD, k_BGsD, v_BGsD, group, scale, window):
    """Return scale and window as numbers; raise ValueError, before any message, for wrong input."""
    q, k, v = (tuple(x.shape) for x in (q_BHsD, k_BGsD, v_BGsD))
    fits = len(q) == 4 and k == v and q[:1] + q[2:] == k[:1] + k[2:]
    if not fits or q[1] % k[1] or q[2] % 2:
        raise ValueError("expected q (B, H, s, D) and k, v (B, G, s, D), H divisible by G and s "
                         f"even, got {q}, {k} and {v}")  # fmt: skip
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1 token, got {window}")
    if dist.get_rank(group) < 0:  # -1 on a rank outside the group
        raise ValueError(f"expected a group with rank {dist.get_rank()}, got one without it")
    scale = q_BHsD.shape[-1] ** -0.5 if scale is None else scale
    return scale, math.inf if window is None else window


def ring_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute causal attention over a sequence of W s tokens; every rank holds s of them.

    q: (B, H, s, D). The tokens `zigzag_indices(W * s, rank, W)`. s must be even.
    k, v: (B, G, s, D). The same tokens; H must be divisible by G.
    group: the process group of the W ranks. Default: all ranks. All of them must call.
    scale: of (1). Default: D ** -0.5.
    window: how many tokens a token sees, itself included. Default: all tokens up to itself. A
        window saves computation only: every block travels to every rank, even if no query sees it.

    Returns out (B, H, s, D).
    """
    scale, window = checked_options(q_BHsD, k_BGsD, v_BGsD, group, scale, window)
    q_2BHnD, k_2BGnD, v_2BGnD = (torch.stack(x.chunk(2, 2)) for x in (q_BHsD, k_BGsD, v_BGsD))
    block_22BGnD = torch.stack((k_2BGnD, v_2BGnD), 1)
    out_2BHnD = RingAttention.apply(q_2BHnD, block_22BGnD, group, scale, window)
    return torch.cat(out_2BHnD.unbind(), 2)


# 4. Two variations: move the keys with one collective -------------------------------------------
#
# Numbers that a rank sends, in units of B s D, and KiB for a token of Qwen3-8B in bfloat16 on 8
# ranks: H = 32, G = 8, D = 128. Gradients that are summed over ranks, marked *, are float32.
#
#     method      forward                  KiB   backward                      KiB   stores keys of
#     ring        2 G (W - 1)               28   2 G (W - 1) + 2 G W *     28 + 64   s
#     all-gather  2 G (W - 1)               28   2 G (W - 1) *                  56   S
#     Ulysses     2 (H + G) (W - 1) / W   17.5   2 (H + G) (W - 1) / W        17.5   S, G / W heads


class AllToAll(torch.autograd.Function):
    """Split x along a dimension, send part r to rank r, and join what arrives along another."""

    @staticmethod
    def forward(ctx, x, split_dim, join_dim, group, dtype):
        # x travels in the given dtype. Its gradient takes the way back, in the dtype of x.
        ctx.way_back = join_dim, split_dim, group, x.dtype
        sent = torch.stack(x.chunk(dist.get_world_size(group), split_dim)).to(dtype)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join_dim).to(x.dtype)

    @staticmethod
    def backward(ctx, dx):
        return AllToAll.apply(dx, *ctx.way_back), None, None, None, None


def allgather_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute what `ring_attention` computes, with one all-gather of keys and values.

    One message in place of W - 1, but each rank stores the keys and values of the whole sequence.
    """
    scale, window = checked_options(q_BHsD, k_BGsD, v_BGsD, group, scale, window)
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    # An all-gather is an all-to-all in which all ranks get the same: W copies of our tokens.
    # NUMERICS: keys travel in their own dtype. Their gradients return and add up in float32.
    copies_BXsD = widen(torch.cat((k_BGsD, v_BGsD), 1)).repeat(world, 1, 1, 1)
    k_BGSD, v_BGSD = AllToAll.apply(copies_BXsD, 0, 2, group, k_BGsD.dtype).chunk(2, 1)

    # The gathered tokens lie rank by rank. A mask of positions does not mind the order.
    positions = [zigzag_indices(k_BGSD.shape[2], r, world, k_BGSD.device) for r in range(world)]
    visible_sS = visible_keys(positions[rank], torch.cat(positions), window)
    out_BHsD = sdpa(widen(q_BHsD), k_BGSD, v_BGSD, visible_sS, scale=scale, enable_gqa=True)
    return out_BHsD.to(q_BHsD.dtype)


def ulysses_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute what `ring_attention` computes, with all-to-alls (Ulysses, arXiv:2309.14509).

    Heads do not need each other. So trade our tokens of all heads for all tokens of H / W heads,
    attend as on one device, and trade back. H must be divisible by the number of ranks W:

        before   rank 0: heads x y of tokens 0 3       rank 1: heads x y of tokens 1 2
        after    rank 0: head x of tokens 0 3 1 2      rank 1: head y of tokens 0 3 1 2
    """
    scale, window = checked_options(q_BHsD, k_BGsD, v_BGsD, group, scale, window)
    (_, H, s, _), G, world = q_BHsD.shape, k_BGsD.shape[1], dist.get_world_size(group)
    if H % world:
        raise ValueError(f"expected query heads in a multiple of the {world} ranks, got {H}")

    # If W does not divide G, repeat each key head: 2 heads on 4 ranks become 4, and 6 become 12.
    copies = math.lcm(G, world) // G
    kv = [x_BGsD.repeat_interleave(copies, 1) for x_BGsD in (k_BGsD, v_BGsD)]
    q_BhSD, k_BgSD, v_BgSD = (AllToAll.apply(x, 1, 2, group, x.dtype) for x in (q_BHsD, *kv))
    order = torch.cat([zigzag_indices(world * s, r, world, q_BHsD.device) for r in range(world)])
    visible_SS = visible_keys(order, order, window)
    out_BhSD = sdpa(q_BhSD, k_BgSD, v_BgSD, visible_SS, scale=scale, enable_gqa=True)
    return AllToAll.apply(out_BhSD, 2, 1, group, out_BhSD.dtype)


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
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(function(*args), f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def check(group=None, device="cpu"):
    """Return the largest errors of all three ways on this rank, in float64 and in bfloat16.

    In float64 relative to the truth, in bfloat16 as a multiple of SDPA's error on one process.
    """
    world = dist.get_world_size(group)
    length = 16 * world
    mine = zigzag_indices(length, dist.get_rank(group), world)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 16) for heads in (2 * world, 2, 2, 2 * world)]
    drawn = [2 * torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]

    # A rank has two chunks of 8 tokens. A window of 11 hides whole chunks, and parts of others.
    errors = {torch.float64: [], torch.bfloat16: []}
    cases = [(dtype, *options) for dtype in errors for options in ((None, None), (0.7, 11))]
    for dtype, scale, window in cases:
        whole = [x.to(device, dtype) for x in drawn]
        visible = torch.ones(length, length, device=device).tril().triu(1 - (window or length)) > 0

        # The truth, and what SDPA makes of it in this dtype: all tokens on one process.
        q, k, v, dout = (x.to(torch.float64, copy=True).requires_grad_() for x in whole)
        out, _ = attention_definition(q, k, v, visible, scale)
        truth = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        q, k, v, dout = (x.clone().requires_grad_() for x in whole)
        out = sdpa(q, k, v, visible, scale=scale, enable_gqa=True)
        plain = [out, *torch.autograd.grad(out, (q, k, v), dout)]

        # Each way gets this rank's tokens, and must return this rank's part of the truth.
        for way in (ring_attention, allgather_attention, ulysses_attention):
            q, k, v, dout = (x[:, :, mine].clone().requires_grad_() for x in whole)
            out = way(q, k, v, group=group, scale=scale, window=window)
            found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
            for a, b, c in zip(found, plain, truth, strict=True):
                b, c = b[:, :, mine], c[:, :, mine]
                unit = c if dtype == torch.float64 else b - c
                errors[dtype].append((a - c).norm() / unit.norm())
    return [torch.stack(x).max().item() for x in errors.values()]  # NaN if any error is NaN


def main(argv):
    """Check all three ways on 4 new processes, or on the ranks that torchrun has started."""
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    if argv:
        sys.exit(f"expected no arguments, got {argv}")
    # NCCL sends tensors of GPUs, one GPU for each rank of a machine, and gloo those of CPUs.
    if "RANK" not in os.environ:
        errors = launch(4, check)
    else:
        device = None  # the CPU
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device else "gloo", device_id=device)
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, check(device=device))
        dist.destroy_process_group()
    worst, multiple = torch.tensor(errors, dtype=torch.float64).amax(0).tolist()
    if os.environ.get("RANK", "0") == "0":
        print(f"ring, all-gather, Ulysses on {len(errors)} ranks: bfloat16 {multiple:.2f} times "
              f"SDPA's error, float64 largest error {worst:.1e}")  # fmt: skip
    if not (worst <= 1e-10 and multiple <= 1.3):
        sys.exit(f"expected at most 1e-10 and 1.3 in bfloat16, got {worst:.1e} and {multiple:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
