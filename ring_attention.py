"""Ring attention: exact attention over a sequence that is split over ranks.

Each rank keeps the queries of its tokens. Blocks of keys and values travel around a ring of ranks,
one rank per hop, and each rank attends to every block while it is there. Attention over one block
returns an output and a log-sum-exp (lse). With the lse, partial outputs merge exactly.

    python ring_attention.py                         # check it: 4 ranks on this CPU, 10 s
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
q queries   k keys   r queries of all H / G heads that read a key head   2 the pair k, v
"""

import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes
from torch.nn.functional import scaled_dot_product_attention as torch_attention

# 1. Attention over one block of keys ----------------------------------------------------------


def attention_definition(q_BHqD, k_BGkD, v_BGkD, visible_BHqk, /, scale=None):
    """Compute attention with all scores in memory: everything below must equal this.

    q: (B, H, q, D). k, v: (B, G, k, D). H / G consecutive query heads read one key head.
    visible: bool, broadcastable to (B, H, q, k). True where query i sees key j.
    scale: of (1). Default: D ** -0.5.

    Returns out (B, H, q, D) and lse (B, H, q). A query that sees no key has out 0 and lse -inf.
    """
    scale = scale or 1 / math.sqrt(q_BHqD.shape[-1])
    copies = q_BHqD.shape[1] // k_BGkD.shape[1]
    k_BHkD, v_BHkD = (x.repeat_interleave(copies, 1) for x in (k_BGkD, v_BGkD))
    s_BHqk = scale * torch.einsum("bhqd,bhkd->bhqk", q_BHqD, k_BHkD)  # (1)

    # The softmax over no key is 0 / 0. Give such a query scores of 0, so that all stays finite, and
    # overwrite both results.
    seen_BHqk = visible_BHqk.expand_as(s_BHqk)
    blind_BHq = ~seen_BHqk.any(-1)
    s_BHqk = s_BHqk.masked_fill(~seen_BHqk, -math.inf).masked_fill(blind_BHq[..., None], 0.0)
    p_BHqk = torch.softmax(s_BHqk, -1).masked_fill(blind_BHq[..., None], 0.0)
    lse_BHq = torch.logsumexp(s_BHqk, -1).masked_fill(blind_BHq, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", p_BHqk, v_BHkD), lse_BHq


# The next two functions are all that computes scores, (B, H, q, k) of one block. On GPUs, put flash
# attention in their place: its forward returns out and lse (natural logarithm, float32), and its
# backward takes the out and lse of all blocks. Give both float32 or float64.


def block_attention(q_BHqD, k_BHkD, v_BHkD, visible_qk, scale):
    """Attend to the keys of one block: return out_BHqD and lse_BHq over these keys alone."""
    s_BHqk = q_BHqD @ k_BHkD.mT * scale  # (1)
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
    s_BHqk = q_BHqD @ k_BHkD.mT * scale
    if visible_qk is not None:
        s_BHqk = s_BHqk.masked_fill(~visible_qk, -math.inf)
    p_BHqk = torch.exp(s_BHqk - lse_BHq[..., None])  # (3), computed again: no scores were stored
    delta_BHq = (dout_BHqD * out_BHqD).sum(-1)
    ds_BHqk = p_BHqk * (dout_BHqD @ v_BHkD.mT - delta_BHq[..., None]) * scale  # scale dS
    return ds_BHqk @ k_BHkD, ds_BHqk.mT @ q_BHqD, p_BHqk.mT @ dout_BHqD


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
    # Under other masks a query may see no key of either set: pretend a mass of 1 + 1, so that its
    # shares are exp(-inf - log 2) = 0 and not NaN, and put the lse of -inf back at the end.
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
    # A late query sees more keys than an early one, and the ring waits for its slowest rank at
    # every hop. So each rank holds an early chunk and its mirror image. A hop has 2 x 2 pairs of
    # our chunks and a block's. Every rank computes 3 of them at hop 0, and 2 at each later hop: all
    # our queries see the block's early chunk, or our late chunk sees all of it. Of 2 ranks:
    #
    #                           keys
    #     queries               0 1 2 3      \  visible in part: computed with a mask
    #     chunk 0, rank 0       \ . . .      #  all visible: computed without a mask
    #     chunk 1, rank 1       # \ . .      .  nothing visible: skipped
    #     chunk 2, rank 1       # # \ .
    #     chunk 3, rank 0       # # # \      each rank computes 5 of 8 pairs, 2 W + 1 of 4 W
    return rank, 2 * world - 1 - rank


def zigzag_indices(length, rank, world, device=None):
    """Return the global indices of the tokens that a rank holds, int64 (length / world,).

    length must be divisible by 2 * world. device: of the indices. Default: the CPU.
    """
    # 8 tokens on 2 ranks: rank 0 holds 0 1 6 7, and rank 1 holds 2 3 4 5.
    chunks = torch.arange(length, device=device).view(2 * world, -1)
    return torch.cat([chunks[c] for c in zigzag_chunks(rank, world)])


def visible_keys(query_q, key_k, window):
    """Return from global positions, as (q, k) bool, which of k keys each of q queries sees."""
    # The query at position 5 sees keys 3, 4 and 5 if the window is 3, and keys 0 to 5 without one.
    behind_qk = query_q[:, None] - key_k
    return (behind_qk >= 0) & (behind_qk < (window or math.inf))


def visible_columns(rank, owner, world, n, copies, window, device):
    """Yield (a, columns, visible) for each of a rank's chunks that sees keys of the owner's block.

    a: 0 for the early chunk of n queries, 1 for the late one.
    columns: slice of the 2 n keys of the block: its early chunk, its late one, or both.
    visible: bool (copies * n, k), for that many heads. None if every query sees every key.
    """
    reach = window or math.inf
    theirs = zigzag_chunks(owner, world)
    for a, i in enumerate(zigzag_chunks(rank, world)):
        # Chunk 5 is 2 n tokens after chunk 3. So its queries are 2 n - (n - 1) to 2 n + (n - 1)
        # tokens after those keys, and see none of them, or all, if the window ends there.
        seen = [b for b, j in enumerate(theirs) if j <= i and (i - j) * n - (n - 1) < reach]
        if not seen:
            continue
        columns = slice(seen[0] * n, seen[-1] * n + n)
        visible = None
        if theirs[seen[-1]] == i or (i - theirs[seen[0]]) * n + (n - 1) >= reach:
            query_2n = zigzag_indices(2 * world * n, rank, world, device).view(2, n)
            key_k = zigzag_indices(2 * world * n, owner, world, device)[columns]
            visible = visible_keys(query_2n[a].repeat(copies), key_k, window)
        yield a, columns, visible


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


def shift(x, group):
    """Start to send x to the right neighbor and to receive the left neighbor's x.

    Returns the tensor that receives, and a function that waits until both messages are done.
    """
    # Messages between two ranks are matched in the order in which the ranks post them. All ranks
    # run the same loop, so it is the same order. (Tags would not help: NCCL ignores them.)
    # COMM: every rank posts both messages before it waits, so no circle of ranks can deadlock.
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world == 1:  # the neighbor is this rank itself
        return x, lambda: None
    received = torch.empty_like(x)
    right, left = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    messages = (dist.isend, x, right), (dist.irecv, received, left)
    requests = dist.batch_isend_irecv([dist.P2POp(*message, group) for message in messages])

    def wait():
        for request in requests:
            request.wait()

    return received, wait


def traveling_blocks(block, group):
    """Yield (owner, block) of every rank, one per hop. The first block is this rank's own."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    for hop in range(world):
        # The next block travels while the caller computes with this one.
        if hop + 1 < world:
            next_block, wait_for_next = shift(block, group)
        yield (rank - hop) % world, block
        if hop + 1 < world:
            wait_for_next()
            block = next_block


def widen(x):
    """Return x in float32, or as it is if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def stack_heads(x_BHsD, num_key_heads):
    """Return the two chunks of x, widened, as (B, G, r, D) each."""
    # The queries of all H / G heads that read a key head are rows of one matrix. So a matmul reads
    # the key head in place, without copies, and the matmuls of dk and dv sum over its readers.
    B, _, _, D = x_BHsD.shape
    return [widen(x_BHnD).reshape(B, num_key_heads, -1, D) for x_BHnD in x_BHsD.chunk(2, 2)]


def unstack_heads(chunks, num_heads, dtype):
    """Return x_BHsD of two chunks (B, G, r, D), rounded to dtype."""
    B, _, _, D = chunks[0].shape
    return torch.cat([x_BGrD.reshape(B, num_heads, -1, D) for x_BGrD in chunks], 2).to(dtype)


class RingAttention(torch.autograd.Function):
    """Causal ring attention: out_BHsD of this rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(ctx, q_BHsD, k_BGsD, v_BGsD, group, scale, window):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        (_, H, s, _), G = q_BHsD.shape, k_BGsD.shape[1]
        shape = world, s // 2, H // G, window, q_BHsD.device
        q = stack_heads(q_BHsD, G)

        # Keys and values travel together, G heads of each in their own dtype: one message per hop.
        # NUMERICS: blocks and merges are float32 or better. The result is rounded once.
        so_far = {}  # out and lse of each of our chunks, over the keys that were here
        for owner, block_2BGsD in traveling_blocks(torch.stack((k_BGsD, v_BGsD)), group):
            for a, columns, visible in visible_columns(rank, owner, *shape):
                k_BGkD, v_BGkD = widen(block_2BGsD[:, :, :, columns])
                part = block_attention(q[a], k_BGkD, v_BGkD, visible, scale)
                so_far[a] = merge(*so_far[a], *part) if a in so_far else part  # (2)
        out, lse = zip(so_far[0], so_far[1], strict=True)
        out_BHsD = unstack_heads(out, H, q_BHsD.dtype)

        # Store this rank's tensors and nothing else: the backward sends the blocks around again,
        # so that memory per rank shrinks with the number of ranks.
        ctx.save_for_backward(q_BHsD, k_BGsD, v_BGsD, out_BHsD, *lse)
        ctx.options = group, scale, shape
        return out_BHsD

    @staticmethod
    def backward(ctx, dout_BHsD):
        q_BHsD, k_BGsD, v_BGsD, out_BHsD, *lse = ctx.saved_tensors
        group, scale, shape = ctx.options
        rank = dist.get_rank(group)
        dout, q, out = (stack_heads(x, k_BGsD.shape[1]) for x in (dout_BHsD, q_BHsD, out_BHsD))

        # dq stays, because the queries stay. The gradient of a block is a sum over all ranks, and
        # belongs to its owner. So the sum follows the block, one hop later: each rank computes its
        # part, waits for the sum so far, adds its part, and passes it on. Block 0 of 3 ranks:
        #
        #     hop   the block     the sum of its gradients
        #      0    on rank 0     starts as rank 0's part
        #      1    on rank 1     arrives on rank 1, which adds its part
        #      2    on rank 2     arrives on rank 2, which adds its part
        #      3    -             arrives on rank 0, its owner, complete
        dq = [0, 0]
        for owner, block_2BGsD in traveling_blocks(torch.stack((k_BGsD, v_BGsD)), group):
            sum_2BGsD = torch.zeros_like(block_2BGsD, dtype=lse[0].dtype)
            for a, columns, visible in visible_columns(rank, owner, *shape):
                k_BGkD, v_BGkD = widen(block_2BGsD[:, :, :, columns])
                given = dout[a], q[a], k_BGkD, v_BGkD, out[a], lse[a]
                dq_part, dk_BGkD, dv_BGkD = block_backward(*given, visible, scale)
                dq[a] += dq_part
                sum_2BGsD[:, :, :, columns] += torch.stack((dk_BGkD, dv_BGkD))
            if owner != rank:
                wait_for_sum()
                sum_2BGsD += arrived_2BGsD
            arrived_2BGsD, wait_for_sum = shift(sum_2BGsD, group)
        wait_for_sum()
        dk_BGsD, dv_BGsD = arrived_2BGsD.to(k_BGsD.dtype)
        dq_BHsD = unstack_heads(dq, q_BHsD.shape[1], q_BHsD.dtype)
        return dq_BHsD, dk_BGsD, dv_BGsD, None, None, None


def ring_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute causal attention over a sequence of W s tokens; every rank holds s of them.

    q: (B, H, s, D). The tokens `zigzag_indices(W * s, rank, W)`. s must be even.
    k, v: (B, G, s, D). The same tokens; H must be divisible by G.
    group: the process group of the W ranks. Default: all ranks. All of them must call.
    scale: of (1). Default: D ** -0.5.
    window: how many tokens a token sees, itself included. Default: all tokens up to itself.

    Returns out (B, H, s, D).
    """
    scale = scale or q_BHsD.shape[-1] ** -0.5
    return RingAttention.apply(q_BHsD, k_BGsD, v_BGsD, group or dist.group.WORLD, scale, window)


# 4. Two variations: move the keys with one collective -------------------------------------------
#
# Numbers that a rank sends, in units of B s D, and KiB for a token of Qwen3-8B in bfloat16 on 8
# ranks: H = 32, G = 8, D = 128. Gradients that are summed over ranks, marked *, are float32.
#
#     method      forward                  KiB   backward                      KiB  keys in memory
#     ring        2 G (W - 1)               28   2 G (W - 1) + 2 G W *     28 + 64  2 s
#     all-gather  2 G (W - 1)               28   2 G (W - 1) *                  56  S
#     all-to-all  2 (H + G) (W - 1) / W   17.5   2 (H + G) (W - 1) / W        17.5  S, G / W heads
#
# Key heads that are copied for their readers before they travel would be H, 4 times as many.


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
        world = dist.get_world_size(ctx.group)
        parts = [widen(part).contiguous() for part in dx_BHSD.chunk(world, 2)]
        dx_BHsD = torch.empty_like(parts[0])
        dist.reduce_scatter(dx_BHsD, parts, group=ctx.group)
        return dx_BHsD.to(dx_BHSD.dtype), None


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


def allgather_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute what `ring_attention` computes, with one all-gather of keys and values.

    One message in place of W - 1, but each rank holds the keys and values of the whole sequence.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    k_BGSD, v_BGSD = (AllGather.apply(x_BGsD, group) for x_BGsD in (k_BGsD, v_BGsD))

    # The gathered tokens lie rank by rank. A mask of positions does not mind the order.
    positions = [zigzag_indices(k_BGSD.shape[2], r, world, k_BGSD.device) for r in range(world)]
    visible_sS = visible_keys(positions[rank], torch.cat(positions), window)
    return torch_attention(q_BHsD, k_BGSD, v_BGSD, visible_sS, scale=scale, enable_gqa=True)


def ulysses_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute what `ring_attention` computes, with all-to-alls (Ulysses, arXiv:2309.14509).

    Heads do not need each other. So trade our tokens of all heads for all tokens of H / W heads,
    attend as on one device, and trade back. H must be divisible by the number of ranks W:

        before   rank 0: heads x y of tokens 0 3       rank 1: heads x y of tokens 1 2
        after    rank 0: head x of tokens 0 3 1 2      rank 1: head y of tokens 0 3 1 2

    If W divides G, key heads travel as they are. If not, each is first repeated until W divides
    their number: 2 key heads on 4 ranks become 4, and 6 become 12.
    """
    world = dist.get_world_size(group)
    copies = math.lcm(k_BGsD.shape[1], world) // k_BGsD.shape[1]
    repeated = [x_BGsD.repeat_interleave(copies, 1) for x_BGsD in (k_BGsD, v_BGsD)]
    q_BhSD, k_BgSD, v_BgSD = (AllToAll.apply(x, 1, 2, group) for x in (q_BHsD, *repeated))
    length = q_BhSD.shape[2]
    order = torch.cat([zigzag_indices(length, r, world, q_BHsD.device) for r in range(world)])
    visible_SS = visible_keys(order, order, window)
    out_BhSD = torch_attention(q_BhSD, k_BgSD, v_BgSD, visible_SS, scale=scale, enable_gqa=True)
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


def check(group=None, device="cpu", dtype=torch.float64):
    """Return the largest error of out, dq, dk, dv of all three ways on this rank.

    In float64 it is relative to the truth, in a lower dtype to the error of torch's SDPA.
    """
    world = dist.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    length = 16 * world
    shapes = [(2, heads, length, 6) for heads in (2 * world, 2, 2, 2 * world)]
    drawn = [2 * torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    drawn = [x.to(device, dtype) for x in drawn]
    mine = zigzag_indices(length, dist.get_rank(group), world)
    errors = []

    # A rank has two chunks of 8 tokens. A window of 11 hides whole chunks, and parts of others.
    for options in ({}, dict(scale=0.7, window=11)):
        visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        visible = visible.triu(1 - options.get("window", length))
        scale = options.get("scale")

        # The truth, and what torch's rounding makes of it: all tokens on one process.
        q, k, v, dout = (x.double().requires_grad_() for x in drawn)
        out, _ = attention_definition(q, k, v, visible, scale)
        truth = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        q, k, v, dout = (x.clone().requires_grad_() for x in drawn)
        out = torch_attention(q, k, v, visible, scale=scale, enable_gqa=True)
        plain = [out, *torch.autograd.grad(out, (q, k, v), dout)]

        # Each way gets this rank's tokens, and must return this rank's part of the truth.
        for way in (ring_attention, allgather_attention, ulysses_attention):
            q, k, v, dout = (x[:, :, mine].clone().requires_grad_() for x in drawn)
            out = way(q, k, v, group=group, **options)
            found = [out, *torch.autograd.grad(out, (q, k, v), dout)]
            for a, b, c in zip(found, plain, truth, strict=True):
                b, c = b[:, :, mine], c[:, :, mine]
                unit = c if dtype == torch.float64 else b - c
                errors.append((a - c).norm() / unit.norm())
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def check_dtypes(device="cpu"):
    """Return the results of `check` in float64 and in bfloat16, over all ranks."""
    return [check(None, device, dtype) for dtype in (torch.float64, torch.bfloat16)]


def main(argv):
    """Check all three ways on 4 new processes, or on the ranks that torchrun has started."""
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    if argv:
        sys.exit(f"expected no arguments, got {argv}")
    # Every rank must learn the largest error of all ranks. GPUs, one for each rank of a machine,
    # send by NCCL, and CPUs by gloo.
    if "RANK" not in os.environ:
        errors = launch(4, check_dtypes)
    else:
        has_gpu = torch.cuda.is_available()
        device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
        if has_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if has_gpu else "gloo")
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, check_dtypes(device))
        dist.destroy_process_group()
    worst, multiple = torch.tensor(errors, dtype=torch.float64).amax(0).tolist()
    if os.environ.get("RANK", "0") == "0":
        print(f"ring, all-gather, all-to-all on {len(errors)} ranks: bfloat16 {multiple:.2f} times "
              f"SDPA's error, float64 largest error {worst:.1e}")  # fmt: skip
    if not (worst <= 1e-10 and multiple <= 2):
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
