"""Ring attention: exact attention over a sequence that is split over ranks.

Each rank keeps the queries of its tokens. Blocks of keys and values travel around a ring of ranks,
one rank per hop, and each rank attends to every block while it is there. Attention over one block
returns an output and a log-sum-exp (lse). With the lse, partial outputs merge exactly.

    python ring_attention.py                         # check it: 4 ranks on this CPU, float64, 10 s
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
D head size   S all tokens, s = S / W of this rank   W ranks   q queries   k keys   2 the pair k, v
"""

import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, start_processes

# 1. Attention over one block of keys ----------------------------------------------------------


def attention_definition(q_BHqD, k_BHkD, v_BHkD, visible_BHqk, /, scale=None):
    """Compute attention with all scores in memory: everything below must equal this.

    q: (B, H, q, D). k, v: (B, H, k, D).
    visible: bool, broadcastable to (B, H, q, k). True where query i sees key j.
    scale: of (1). Default: D ** -0.5.

    Returns out (B, H, q, D) and lse (B, H, q). A query that sees no key has out 0 and lse -inf.
    """
    scale = scale or 1 / math.sqrt(q_BHqD.shape[-1])
    s_BHqk = scale * torch.einsum("bhqd,bhkd->bhqk", q_BHqD, k_BHkD)  # (1)

    # The softmax over no key is 0 / 0. Give such a query scores of 0, so that all stays finite, and
    # overwrite both results.
    seen_BHqk = visible_BHqk.expand_as(s_BHqk)
    blind_BHq = ~seen_BHqk.any(-1)
    s_BHqk = s_BHqk.masked_fill(~seen_BHqk, -math.inf).masked_fill(blind_BHq[..., None], 0.0)
    p_BHqk = torch.softmax(s_BHqk, -1).masked_fill(blind_BHq[..., None], 0.0)
    lse_BHq = torch.logsumexp(s_BHqk, -1).masked_fill(blind_BHq, -math.inf)
    return torch.einsum("bhqk,bhkd->bhqd", p_BHqk, v_BHkD), lse_BHq


def visible_keys(query_q, key_k, window):
    """Return from global positions, as (q, k) bool, which of k keys each of q queries sees."""
    # The query at position 5 sees keys 3, 4 and 5 if the window is 3, and keys 0 to 5 without one.
    behind_qk = query_q[:, None] - key_k
    return (behind_qk >= 0) & (behind_qk < (window or math.inf))


def block_attention(q_BHqD, k_BHkD, v_BHkD, visible_qk, scale):
    """Attend to the keys of one block: return out_BHqD and lse_BHq over these keys alone."""
    scale = scale or q_BHqD.shape[-1] ** -0.5
    s_BHqk = (q_BHqD @ k_BHkD.mT * scale).masked_fill(~visible_qk, -math.inf)  # (1)
    lse_BHq = torch.logsumexp(s_BHqk, -1)

    # A query may see no key of this block: our early chunk sees nothing of a later rank's. Its lse
    # is -inf, and -inf - -inf is NaN. Subtract 0: exp(-inf - 0) = 0, so its output here is 0.
    finite_BHq = lse_BHq.masked_fill(lse_BHq == -math.inf, 0.0)
    p_BHqk = torch.exp(s_BHqk - finite_BHq[..., None])
    return p_BHqk @ v_BHkD, lse_BHq


def block_backward(dout_BHqD, q_BHqD, k_BHkD, v_BHkD, out_BHqD, lse_BHq, visible_qk, scale):
    """Return dq_BHqD, dk_BHkD, dv_BHkD of one block, given the final out and lse of all blocks."""
    # The gradient of a softmax needs two sums over all keys: the normalizer, which is in lse, and
    # sum_j P_ij (dout_i . v_j) = dout_i . sum_j P_ij v_j = dout_i . out_i. Both are known from the
    # final lse and out, so the gradients of blocks can be computed anywhere and simply added up.
    scale = scale or q_BHqD.shape[-1] ** -0.5
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


def zigzag_indices(length, rank, world, device=None):
    """Return the global indices of the tokens that a rank holds, int64 (length / world,).

    length must be divisible by 2 * world. device: of the indices. Default: the CPU.
    """
    # A late query sees more keys than an early one, and the ring waits for its slowest rank at
    # every hop. So cut the sequence into 2 W chunks, and give rank r chunk r and its mirror image.
    # Then all ranks have equally many visible pairs at every hop: after hop 0 all our queries see
    # the early half of a block, or our late half sees all of it. 8 tokens on 2 ranks:
    #
    #     rank 0 holds 0 1 . . . . 6 7, which see 1 + 2 + 7 + 8 = 18 keys
    #     rank 1 holds . . 2 3 4 5 . ., which see 3 + 4 + 5 + 6 = 18 keys
    chunks = torch.arange(length, device=device).view(2 * world, -1)
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


class RingAttention(torch.autograd.Function):
    """Causal ring attention: out_BHsD of this rank's queries over the keys of all ranks."""

    @staticmethod
    def forward(ctx, q_BHsD, k_BHsD, v_BHsD, group, scale, window):
        rank = dist.get_rank(group)
        world = dist.get_world_size(group)
        length = world * q_BHsD.shape[2]
        positions = [zigzag_indices(length, r, world, q_BHsD.device) for r in range(world)]

        # Keys and values travel together: one message per hop.
        block_2BHsD = torch.stack((k_BHsD, v_BHsD))
        for hop in range(world):
            if hop + 1 < world:
                next_2BHsD, wait_for_next = shift(block_2BHsD, 0, group)

            # Our queries against the block that is here now. The mask compares global positions.
            owner = (rank - hop) % world
            visible_qk = visible_keys(positions[rank], positions[owner], window)
            part = block_attention(q_BHsD, *block_2BHsD, visible_qk, scale)
            so_far = part if hop == 0 else merge(*so_far, *part)  # (2): out_BHsD and lse_BHs

            # Only now must the next block be here.
            if hop + 1 < world:
                wait_for_next()
                block_2BHsD = next_2BHsD

        # Store this rank's tensors and nothing else: the backward sends the blocks around again,
        # so that memory per rank shrinks with the number of ranks.
        ctx.save_for_backward(q_BHsD, k_BHsD, v_BHsD, *so_far)
        ctx.options = group, scale, window
        ctx.positions = positions
        return so_far[0]

    @staticmethod
    def backward(ctx, dout_BHsD):
        q_BHsD, k_BHsD, v_BHsD, out_BHsD, lse_BHs = ctx.saved_tensors
        group, scale, window = ctx.options
        rank = dist.get_rank(group)
        world = dist.get_world_size(group)

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
                next_2BHsD, wait_for_next = shift(block_2BHsD, 0, group)

            # out and lse are final, so these parts are final too.
            owner = (rank - hop) % world
            visible_qk = visible_keys(ctx.positions[rank], ctx.positions[owner], window)
            dq, dk, dv = block_backward(
                dout_BHsD, q_BHsD, *block_2BHsD, out_BHsD, lse_BHs, visible_qk, scale
            )
            dq_BHsD += dq
            sum_2BHsD = torch.stack((dk, dv))
            if hop > 0:
                wait_for_sum()
                sum_2BHsD += arrived_2BHsD
            arrived_2BHsD, wait_for_sum = shift(sum_2BHsD, 1, group)

            if hop + 1 < world:
                wait_for_next()
                block_2BHsD = next_2BHsD
        wait_for_sum()
        dk_BHsD, dv_BHsD = arrived_2BHsD
        return dq_BHsD, dk_BHsD, dv_BHsD, None, None, None


def repeat_key_heads(q_BHsD, k_BGsD, v_BGsD):
    """Copy each key head for the H / G query heads that read it; autograd sums their gradients."""
    copies = q_BHsD.shape[1] // k_BGsD.shape[1]
    return k_BGsD.repeat_interleave(copies, 1), v_BGsD.repeat_interleave(copies, 1)


def ring_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute causal attention over a sequence of W s tokens; every rank holds s of them.

    q: (B, H, s, D). The tokens `zigzag_indices(W * s, rank, W)`. s must be even.
    k, v: (B, G, s, D). The same tokens; H must be divisible by G.
    group: the process group of the W ranks. Default: all ranks. All of them must call.
    scale: of (1). Default: D ** -0.5.
    window: how many tokens a token sees, itself included. Default: all tokens up to itself.

    Returns out (B, H, s, D).
    """
    k_BHsD, v_BHsD = repeat_key_heads(q_BHsD, k_BGsD, v_BGsD)
    return RingAttention.apply(q_BHsD, k_BHsD, v_BHsD, group or dist.group.WORLD, scale, window)


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


def allgather_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute what `ring_attention` computes, with one all-gather of keys and values.

    One message in place of W - 1, but each rank holds the keys and values of the whole sequence.
    """
    rank = dist.get_rank(group)
    world = dist.get_world_size(group)
    k_BHSD, v_BHSD = (AllGather.apply(x, group) for x in repeat_key_heads(q_BHsD, k_BGsD, v_BGsD))

    # The gathered tokens lie rank by rank. A mask of positions does not mind the order.
    positions = [zigzag_indices(k_BHSD.shape[2], r, world, k_BHSD.device) for r in range(world)]
    visible_sS = visible_keys(positions[rank], torch.cat(positions), window)
    return block_attention(q_BHsD, k_BHSD, v_BHSD, visible_sS, scale)[0]


def ulysses_attention(q_BHsD, k_BGsD, v_BGsD, /, *, group=None, scale=None, window=None):
    """Compute what `ring_attention` computes, with all-to-alls (Ulysses, arXiv:2309.14509).

    Heads do not need each other. So trade our tokens of all heads for all tokens of H / W heads,
    attend as on one device, and trade back. H must be divisible by the number of ranks W:

        before   rank 0: heads x y of tokens 0 3       rank 1: heads x y of tokens 1 2
        after    rank 0: head x of tokens 0 3 1 2      rank 1: head y of tokens 0 3 1 2
    """
    world = dist.get_world_size(group)
    qkv = (q_BHsD, *repeat_key_heads(q_BHsD, k_BGsD, v_BGsD))
    q_BhSD, k_BhSD, v_BhSD = (AllToAll.apply(x, 1, 2, group) for x in qkv)
    length = q_BhSD.shape[2]
    order = torch.cat([zigzag_indices(length, r, world, q_BHsD.device) for r in range(world)])
    visible_SS = visible_keys(order, order, window)
    out_BhSD, _ = block_attention(q_BhSD, k_BhSD, v_BhSD, visible_SS, scale)
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


def check(group=None, device="cpu"):
    """Return the largest error of out, dq, dk, dv of all three ways on this rank, in float64."""
    world = dist.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    length = 16 * world
    shapes = [(2, n, length, 6) for n in (2 * world, world, world, 2 * world)]
    drawn = [torch.randn(x, generator=generator, dtype=torch.float64).to(device) for x in shapes]
    mine = zigzag_indices(length, dist.get_rank(group), world)
    errors = []

    # A rank has two chunks of 8 tokens. A window of 11 hides whole chunks, and parts of others.
    for options in ({}, dict(scale=0.7, window=11)):
        # The truth: all tokens on one process, and a random gradient of out.
        q, k, v = (x.clone().requires_grad_() for x in drawn[:3])
        visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        visible = visible.triu(1 - options.get("window", length))
        copies = [x.repeat_interleave(2, 1) for x in (k, v)]
        out, _ = attention_definition(q, *copies, visible, options.get("scale"))
        truth = [out, *torch.autograd.grad(out, (q, k, v), drawn[3])]

        # Each way gets this rank's tokens, and must return this rank's part of the truth.
        for way in (ring_attention, allgather_attention, ulysses_attention):
            local = [x[:, :, mine].clone().requires_grad_() for x in drawn[:3]]
            found = way(*local, group=group, **options)
            found = [found, *torch.autograd.grad(found, local, drawn[3][:, :, mine])]
            errors += [(a - b[:, :, mine]).abs().max() for a, b in zip(found, truth, strict=True)]
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def main(argv):
    """Check all three ways on 4 new processes, or on the ranks that torchrun has started."""
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    if argv:
        sys.exit(f"expected no arguments, got {argv}")
    # Every rank must learn the largest error of all ranks. GPUs, one for each rank of a machine,
    # send by NCCL, and CPUs by gloo.
    if "RANK" not in os.environ:
        errors = launch(4, check)
    else:
        has_gpu = torch.cuda.is_available()
        device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
        if has_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if has_gpu else "gloo")
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, check(device=device))
        dist.destroy_process_group()
    worst = torch.tensor(errors).max().item()
    if os.environ.get("RANK", "0") == "0":
        print(f"ring, all-gather and all-to-all on {len(errors)} ranks: largest error {worst:.1e}")
    if not worst <= 1e-10:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
