"""Attention across ranks: adds any mask, two layouts, usp and guards to `ring_attention.py`.

    | method    | keys reach queries by   | numbers sent, forward       | keys and values held |
    | ring      | W - 1 hops of a block   | 2 B G D S (W-1)/W at most   | two blocks           |
    | ulysses   | an all-to-all           | B D (2 H + 2 G') S/W (W-1)/W | S tokens, 1/W heads |
    | usp       | all-to-all, then a ring | the sum of both             | 2 blocks, 1/u heads  |
    | allgather | one all-gather          | 2 B G D S (W-1)/W           | all S tokens         |

Ranks that trade tokens for heads need whole key heads. So u ranks repeat the G key heads until u
divides their number: G' = lcm(G, u), with u = W for ulysses (whose paper repeats none). usp
arranges the ranks as W / u groups of u, with an all-to-all inside each group and a ring over the
groups. The backward of the ring sends the blocks again, and their gradients in float32 or better:
twice the bytes of the forward in float32, three times in bf16.

The ranks compare digests of shapes, mask and options at every call (0.4 ms on 2 ranks of gloo). To
compare only new shapes would hang: a rank that has seen a shape would skip the comparison, and a
rank that has not would wait for it. Not here: Sq != Sk across ranks.

Letters:  B batch   H query heads   G key heads   D head size   S all tokens   W ranks; a small
letter is this rank's share

References: Ring Attention arXiv:2310.01889; zigzag: Striped Attention arXiv:2311.09431, Llama 3
arXiv:2407.21783 (3.3.2); Ulysses arXiv:2309.14509; USP arXiv:2405.07719.
"""

import dataclasses
import math

import numpy as np
import torch
import torch.distributed as dist

from full.attend import (
    _Attend, backward_tiles, checked_config, forward_tiles, not_compiled, run_backward,
    run_forward,
)  # fmt: skip
from full.masks import ALL, as_mask, digest
from ring_attention import AllGather, start_messages

METHODS = ("ring", "allgather", "ulysses", "usp")  # how keys reach queries

LAYOUTS = ("zigzag", "contiguous")  # which tokens a rank holds


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
        # tests/full/test_ring.py::test_double_buffering_computes_while_a_message_is_in_flight.
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
    # As in `RingAttention`, the sum of a block's gradients follows the block one hop later. Two
    # things differ. The owner keeps its own part, of hop 0, and adds the sum when it returns. Where
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
        # (gloo). Pinned by tests/full/test_ring.py::test_bytes_on_the_wire_match_the_formula.
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
        # tests/full/test_ring.py::test_bytes_on_the_wire_match_the_formula.
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


# The public calls -------------------------------------------------------------------------------
# For: `ring_attention` by its four methods, and whole sequences from shards and back.


class _AllGather(AllGather):
    """`AllGather`, with its gradient summed in float32 or better."""

    @staticmethod
    def backward(ctx, grad):
        # NUMERICS: a sum over ranks in bf16 would round at every rank. Pinned by
        # tests/full/test_ring.py::test_low_precision_over_ranks_stays_within_its_multiple_of_sdpa.
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        mine, _ = AllGather.backward(ctx, wide)
        return mine.to(grad.dtype), None


class _TradeHeads(torch.autograd.Function):
    """`trade_heads` of several tensors, with the trade back as its gradient."""

    @staticmethod
    def forward(ctx, schedule, to_tokens, *tensors):
        # As in `AllToAll`, each number moves once, and its gradient takes the way back.
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
    # block is first put in the order shard by shard. `ring_attention.ulysses_attention` has the
    # picture.
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
    # tests/full/test_ring.py::test_every_layout_and_method_is_the_definition.
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
    # tests/full/test_ring.py::test_low_precision_over_ranks_stays_within_its_multiple_of_sdpa.

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


# Guards -----------------------------------------------------------------------------------------
# For: a wrong input on one rank, ranks that differ, NaN: one message on every rank, and no hang.
# Skip it on a first reading: with right inputs nothing here changes a number.


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
    # tests/full/test_ring.py::test_ranks_that_disagree_are_named_on_every_rank.
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
