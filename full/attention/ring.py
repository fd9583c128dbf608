"""Compute attention under a mask over ranks, in three ways, for shards of any lengths.

The blocks travel by the functions of `ring_attention.py`.

    | method    | keys reach queries by | numbers sent, forward        | keys and values held |
    | ring      | W - 1 hops of a block | 2 B G D S (W-1)/W            | two blocks           |
    | ulysses   | an all-to-all         | B D (2 H + 2 G') S/W (W-1)/W | S tokens, 1/W heads  |
    | allgather | one all-gather        | 2 B G D S (W-1)/W            | all S tokens         |

Ulysses trades tokens for whole key heads, so it repeats the G key heads until W divides their
number: G' = lcm(G, W). Its paper repeats none. The backward of the ring sends the blocks again, and
their gradients in float32 or better: twice the bytes of the forward in float32, three times in
bf16. Shards are zigzag, and travel padded to the longest one. Not here: Sq != Sk across ranks; lse.

Under debug= the ranks compare their inputs. Without, a rank whose input is wrong raises alone, and
the others wait until the group times out.

Letters:  B batch   H query heads, h of this rank   G key heads   D head size   S all tokens, s of
this rank's shard, k of a block's, p of the longest   W ranks   X any dimension

References: Ring Attention arXiv:2310.01889; zigzag: Striped Attention arXiv:2311.09431, Llama 3
arXiv:2407.21783 (3.3.2); Ulysses arXiv:2309.14509.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from full.attention.attend import (
    TiledAttention, attend, backward_tiles, checked_scale, forward_tiles, not_compiled,
)  # fmt: skip
from full.attention.masks import ALL, Mask
from full.ranks.joining import all_gather_objects, errors_on_all_ranks
from parallel import Communicate, all_gather, reduce_scatter
from ring_attention import AllToAll, shift, traveling_blocks, zigzag_chunks


class Ring(NamedTuple):
    """Store a process group, this rank's place in it, and the number of its ranks."""

    group: object  # None if torch.distributed is off
    rank: int
    world: int

    @property
    def name(self):
        """Return this rank's name in errors: its number among all ranks, not those of the group."""
        return f"rank {dist.get_rank() if self.group is not None else 0}"

    def all_gather(self, item):
        """Return the items of all ranks, in order. Collective; pickled, so slow."""
        return [item] if self.world == 1 else all_gather_objects(item, self.group)


def ring_of(group=None) -> Ring:
    """Return the Ring of a group. None: all ranks, or one rank where torch.distributed is off.

    Raises ValueError if this rank is not in the group.
    """
    if group is None and not dist.is_initialized():
        return Ring(None, 0, 1)
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        rank = dist.get_rank()
        raise ValueError(f"rank {rank} is not in this group; every rank must pass a group it is in")
    return Ring(group, dist.get_rank(group), dist.get_world_size(group))


def indices(length, rank, world):
    """Return the global index of each token of a rank's shard, int64 (s,), ascending.

    The sequence of `length` tokens is cut into 2 world chunks, which may be unequal or empty. Rank
    r has the chunks r and 2 world - 1 - r (zigzag): see `ring_attention.zigzag_indices`. RoPE needs
    these positions. Raises ValueError for a rank outside the world, or a negative length.
    """
    if not 0 <= rank < world or length < 0:
        got = f"{rank}, {world}, {length}"
        raise ValueError(f"expected 0 <= rank < world and length >= 0, got {got}")

    # 7 tokens, 2 ranks: the edges 0 1 3 5 7 of 4 chunks. Rank 0 holds 0 and 5 6.
    edges = [c * length // (2 * world) for c in range(2 * world + 1)]
    chunks = zigzag_chunks(rank, world)
    return torch.cat([torch.arange(edges[c], edges[c + 1]) for c in chunks])


class Shards:
    """Store which rank holds which of `length` tokens; every rank derives the same.

    With a mask, also this rank's part of it: made once per mask, for all layers and steps.
    """

    def __init__(self, ring, length, mask=None):
        # Messages have equal shapes, and gloo wants one token at least. So shards travel padded to
        # the longest one, and each token has a slot. 5 tokens, 2 ranks: the shards 0 4 and 1 2 3
        # arrive as 0 4 . 1 2 3, so the tokens 0 to 4 are in the slots 0 3 4 5 1.
        self.ring = ring
        self.of_ranks = [indices(length, rank, ring.world) for rank in range(ring.world)]
        self.own = self.of_ranks[ring.rank]
        self.longest = max(1, *map(len, self.of_ranks))
        slots = [rank * self.longest + torch.arange(len(x)) for rank, x in enumerate(self.of_ranks)]
        self.slot_S = torch.cat(slots)[torch.argsort(torch.cat(self.of_ranks))]
        if mask is not None:
            own = self.own.numpy()
            self.rows = mask.slice(own, ALL)  # our queries against all keys
            self.blocks = [self.rows.slice(ALL, x.numpy()) for x in self.of_ranks]
            self.padding = self.rows.padding_tokens()[0], mask.slice(ALL, own).padding_tokens()[1]

    def padding_tokens(self):
        """Return what `Mask.padding_tokens` returns, of this rank's queries and keys."""
        return self.padding

    def padded(self, x, dim):
        """Return x with as many tokens along dim as the longest shard has."""
        missing = self.longest - x.shape[dim]
        return pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x.contiguous()

    def heads_to_tokens(self, x_BHsD):
        """Trade by all-to-all: our tokens of all heads -> all tokens of H / W heads."""
        x_BhXD = AllToAll.apply(self.padded(x_BHsD, 2), 1, 2, self.ring.group, x_BHsD.dtype)
        return x_BhXD.index_select(2, self.slot_S.to(x_BhXD.device))

    def tokens_to_heads(self, x_BhSD):
        """Trade back: all tokens of H / W heads -> our tokens of all heads."""
        B, h, _, D = x_BhSD.shape
        x_BhXD = x_BhSD.new_zeros(B, h, self.ring.world * self.longest, D)
        x_BhXD = x_BhXD.index_copy(2, self.slot_S.to(x_BhSD.device), x_BhSD)
        x_BHXD = AllToAll.apply(x_BhXD, 2, 1, self.ring.group, x_BhXD.dtype)
        return x_BHXD[:, :, : len(self.own)]


def masked_blocks(k_BGsD, v_BGsD, shards):
    """Yield (k_BGkD, v_BGkD, mask of our queries and these keys) of every rank, a hop each."""
    # COMM: as in `RingAttention`, the next block travels while this one is computed. Pinned by
    # tests/full/test_ring.py::test_double_buffering_computes_while_a_message_is_in_flight.
    block_2BGpD = shards.padded(torch.stack((k_BGsD, v_BGsD)), 3)
    for owner, kv_2BGpD in traveling_blocks(block_2BGpD, shards.ring.group):
        # A block in which our queries see nothing has no boxes, so it costs nothing.
        yield *kv_2BGpD[:, :, :, : len(shards.of_ranks[owner])], shards.blocks[owner]


def ring_forward(q_BHsD, k_BGsD, v_BGsD, shards, scale, /):
    """Compute out_BHsD and lse_BHs of this rank's queries over the keys of all ranks.

    q, k, v: of this rank's tokens. shards: Shards of a mask. The results are float32 or better.
    """
    out_and_lse = None
    for k_BGkD, v_BGkD, mask in masked_blocks(k_BGsD, v_BGsD, shards):
        out_and_lse = forward_tiles(q_BHsD, k_BGkD, v_BGkD, mask, scale, out_and_lse)
    return out_and_lse


def ring_backward(saved, dout_BHsD, dlse, shards, scale, /):
    """Compute dq_BHsD, dk_BGsD, dv_BGsD of this rank's tokens, in float32 or better.

    saved: `attend.Saved`, of this rank's tokens. dlse: None, lse is not used.
    """
    # As in `RingAttention`, the sum of a block's gradients follows the block one hop later. But the
    # owner keeps its own part, of hop 0, and adds the sum when it returns: one message less.
    group = shards.ring.group
    dq_BHsD = None
    for hop, (k_BGkD, v_BGkD, mask) in enumerate(masked_blocks(saved.k, saved.v, shards)):
        of_block = saved._replace(k=k_BGkD, v=v_BGkD)
        dq_BHsD, *part = backward_tiles(of_block, dout_BHsD, dlse, mask, scale, dq_BHsD)
        sum_2BGpD = shards.padded(torch.stack(part), 3)
        if hop == 0:
            own_2BGpD = sum_2BGpD
            continue

        # NUMERICS: parts are summed in float32 or better, in the order of the hops. Pinned by
        # tests/full/test_ring.py::test_messages_are_those_of_the_table.
        if hop > 1:
            wait_for_sum()
            sum_2BGpD += arrived_2BGpD
        arrived_2BGpD, wait_for_sum = shift(sum_2BGpD, group)
    wait_for_sum()
    own_2BGpD += arrived_2BGpD
    dk_BGsD, dv_BGsD = own_2BGpD[:, :, :, : saved.k.shape[2]]
    return dq_BHsD, dk_BGsD, dv_BGsD


# The three methods ------------------------------------------------------------------------------
# NUMERICS: gradients of k and v are summed over ranks and over copies of heads, after each part was
# rounded to its dtype. Pinned by
# tests/full/test_ring.py::test_low_precision_over_ranks_stays_within_its_multiple_of_sdpa.


def attend_by_ring(q, k, v, mask, shards, scale):
    """Send each rank's keys and values around the ring."""
    return TiledAttention.apply(q, k, v, ring_forward, ring_backward, shards, scale)[0]


def attend_by_allgather(q, k, v, mask, shards, scale):
    """Gather all keys and values first: one message, but the memory of the whole sequence."""
    kv = torch.stack((k, v))
    k, v = unshard(kv, dim=3, group=shards.ring.group, length=mask.shape[2])
    return attend(q, k, v, shards.rows, scale=scale)[0]


def attend_by_ulysses(q, k, v, mask, shards, scale):
    """Trade tokens for heads, attend to whole sequences, and trade back."""
    # Each rank gets whole key heads: repeat them until there are enough.
    copies = math.lcm(k.shape[1], shards.ring.world) // k.shape[1]
    k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = (shards.heads_to_tokens(x) for x in (q, k, v))
    return shards.tokens_to_heads(attend(q, k, v, mask, scale=scale)[0])


METHODS = {  # how keys reach queries
    "ring": attend_by_ring, "allgather": attend_by_allgather, "ulysses": attend_by_ulysses,
}  # fmt: skip

# The public calls -------------------------------------------------------------------------------
# For: `ring_attention`, and whole sequences from shards and back.


@not_compiled
def ring_attention(q, k, v, /, *, group=None, mask=None, method="ring", scale=None, debug=False):
    """Compute attention of a whole sequence whose shards the ranks of a group hold.

    Every rank of the group calls it, in forward and backward.

    q: (B, H, s, D). The tokens `indices(S, rank, world)` of this rank.
    k, v: (B, G, s, D), dtype of q. The same tokens.
    group: process group. Default: all ranks, or one rank where torch.distributed is off.
    mask: Mask of the whole sequence, the same on every rank. Default: all is seen.
    method: "ring"; "allgather"; "ulysses" (the world divides H).
    scale: as in `attend`.
    debug: True, or a label ("step 3 layer 7"), on every rank. Then every rank raises ValueError,
        before a block is sent, if the input of any rank does not fit or the inputs of the ranks
        differ; and FloatingPointError, with the tensor and the rank, if an input, out or a gradient
        of them is not finite, PAD included.

    Returns out (B, H, s, D) in the dtype of q. Raises ValueError if this rank's input does not fit.
    """
    # COMM: a rank may pass a mask that it has used before, and another rank an equal one that it
    # has just made. So messages depend on arguments, never on what a rank has kept. Pinned by
    # tests/full/test_ring.py::test_a_rank_may_make_its_mask_anew.
    ring = ring_of(group)
    if mask is None:
        lengths = tuple(ring.all_gather(q.shape[2]))
        mask = Mask.full(sum(lengths))
        need = tuple(map(len, Shards(ring, sum(lengths)).of_ranks))
        if lengths != need:
            raise ValueError(f"expected zigzag shards of {need} tokens, got {lengths}; use shard()")
    if debug:
        require_equal_calls(ring, q, k, v, mask, method, scale)
    scale = checked_call(ring, q, k, v, mask, method, scale)
    if ring not in mask.cache:
        mask.cache[ring] = Shards(ring, mask.shape[2], mask)
    shards = mask.cache[ring]
    if debug:
        q, k, v = _RequireFinite.apply(ring, debug, ["q", "k", "v"], q, k, v)

    if ring.world == 1:
        out, _ = attend(q, k, v, mask, scale=scale)
    else:
        out = METHODS[method](q, k, v, mask, shards, scale)
    return _RequireFinite.apply(ring, debug, ["out"], out)[0] if debug else out


def shard(x, /, *, dim, group=None):
    """Return this rank's tokens of a whole x that every rank has: x along dim at `indices`.

    Its gradient is 0 at the tokens of other ranks. So each rank gets the gradient of its own
    tokens: sum it over ranks.
    """
    # A copy of our tokens only: the whole x may be freed.
    ring = ring_of(group)
    return x.index_select(dim, indices(x.shape[dim], ring.rank, ring.world).to(x.device))


def unshard(x, /, *, dim, group=None, length):
    """Return the whole along dim, of `length` tokens, on every rank; x holds this rank's tokens.

    Its gradient is the sum over ranks of the gradients of the whole, cut back to this rank's tokens
    (a reduce-scatter). If all W ranks compute the same loss from the whole, the sum counts the loss
    W times, and it must be divided by W. Every rank of the group calls it, in forward and backward.
    Raises ValueError if x does not have the tokens of `indices`.
    """
    ring = ring_of(group)
    shards = Shards(ring, length)
    if x.shape[dim] != len(shards.own):
        raise ValueError(
            f"rank {ring.rank} of {ring.world} holds {len(shards.own)} of {length} tokens, but x "
            f"has {x.shape[dim]} in dimension {dim}")  # fmt: skip
    if ring.world == 1:
        return x
    x = shards.padded(x.movedim(dim, 0), 0)
    whole = Communicate.apply(x, ring.group, all_gather, reduce_scatter)
    return whole.index_select(0, shards.slot_S.to(x.device)).movedim(0, dim)


# Guards -----------------------------------------------------------------------------------------
# For: a wrong input on one rank, ranks that differ, NaN: one message on every rank, and no hang.
# Skip it on a first reading: with right inputs nothing here changes a number.


def checked_call(ring, q, k, v, mask, method, scale):
    """Return the scale of a call of this rank, or raise ValueError if its input does not fit."""
    whole = getattr(mask, "shape", ())[2:3] * 2
    scale = checked_scale(q, k, v, mask, scale, whole)
    if method not in [*METHODS]:
        raise ValueError(f"expected ring, allgather or ulysses as method, got {method!r}")
    if method == "ulysses" and q.shape[1] % ring.world:
        raise ValueError(f"ulysses over {ring.world} ranks: they must divide the {q.shape[1]} "
                         f'query heads; use method="ring", or pad the heads')  # fmt: skip
    tokens = len(indices(whole[0], ring.rank, ring.world))
    if not q.shape[2] == k.shape[2] == tokens:
        raise ValueError(f"expected {tokens} tokens, this rank's zigzag shard of {whole[0]}, got "
                         f"{q.shape[2]} queries and {k.shape[2]} keys; use shard()")  # fmt: skip
    return scale


def require_equal_calls(ring, q, k, v, mask, method, scale):
    """Raise ValueError on every rank if the input of a rank is wrong or the ranks' inputs differ.

    Collective. The text is the same on all ranks.
    """
    with errors_on_all_ranks(ring.group, alone=ring.world == 1):
        try:
            facts = {
                "scale": checked_call(ring, q, k, v, mask, method, scale), "batch size": len(q),
                "query heads": q.shape[1], "key heads": k.shape[1], "head_dim": q.shape[3],
                "dtype": q.dtype, "method": method, "mask": mask.digest(),
                "gradients": [x.requires_grad and torch.is_grad_enabled() for x in (q, k, v)],
            }  # fmt: skip
        except Exception as error:  # such as a None in the place of q
            raise ValueError(f"{ring.name}: {error}") from error
    of_ranks = dict(ring.all_gather((ring.name, facts)))
    differing = [name for name in facts if len({str(x[name]) for x in of_ranks.values()}) > 1]
    if differing:
        got = {rank: {name: x[name] for name in differing} for rank, x in of_ranks.items()}
        raise ValueError(f"expected the same {', '.join(differing)} on every rank of a ring, got "
                         f"{got}; make it from the same data, or broadcast it")  # fmt: skip


class _RequireFinite(torch.autograd.Function):
    """Return tensors unchanged; raise on all ranks if one, or a gradient of one, is not finite."""

    @staticmethod
    def forward(ctx, ring, debug, names, *tensors):
        ctx.setting = ring, debug, [f"d{name}" for name in names]
        require_finite(ring, debug, names, tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        require_finite(*ctx.setting, grads)
        return None, None, None, *grads


def require_finite(ring, debug, names, tensors):
    """Raise FloatingPointError on every rank if a tensor of any rank is not finite."""
    bad = [name for name, x in zip(names, tensors, strict=True) if not x.isfinite().all()]
    texts = ring.all_gather(f"{ring.name}: {', '.join(bad)}" if bad else "")
    if any(texts):
        label = "" if debug is True else f"{debug}, "
        text = "; ".join(filter(None, texts))
        raise FloatingPointError(f"{label}ring attention: not finite: {text}")
