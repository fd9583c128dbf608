"""Runs a batch in rows, in packed trees or in chunks of a tree, by settings `tree` and `exact`.

A class for each way. Without these settings read `RowBatches` alone.

Letters:  B trajectories   T positions of their padded log-prob vectors   N sampled tokens
S packed tokens
"""

import functools

import torch
import torch.nn.functional as F

from full.attention.attend import Attention, attend, attend_short
from full.attention.ring import indices, ring_attention
from full.learn.packing import PackedBatches, padded
from full.model.exact import packed_attention
from full.tree.chunks import tree_backward
from full.tree.forest import Forest, SharedForest
from full.tree.trie import TokenTrie, redistribute


class MaskedAttention(Attention):
    """Attention under a mask of the whole row, by a group or alone.

    parent_N: which token comes before which, for recurrent layers; see `forest.Forest`.
    method: how the ranks of the group share the keys, as in `ring_attention`.
    attend_alone: `attend`, or `attend_short` for trees, whose paths are often short.
    """

    def __init__(self, mask, parent_N, group, method="ring", attend_alone=attend):
        self.forest = Forest(parent_N) if group is None else SharedForest(parent_N, group)
        self.mask = mask
        self.group = group
        self.method = method
        self.attend_alone = attend_alone

    def windows(self, x_1SX, /, **options):
        return self.forest.windows(x_1SX, **options)

    def recurrence(self, *given, layer):
        return self.forest.recurrence(*given, layer=layer)

    def attend(self, q, k, v, /, *, layer, scale, window=None):
        # A layer with a window narrows the mask further.
        mask = self.mask.with_window(window)
        if self.group is None:
            return self.attend_alone(q, k, v, mask, scale=scale)[0]
        options = dict(group=self.group, mask=mask, method=self.method, scale=scale)
        return ring_attention(q, k, v, **options)


class RowBatches(PackedBatches):
    """Run micro-batches that are rows of sequences end to end."""

    attend_alone = staticmethod(attend)

    def __init__(self, model, config, experts):
        super().__init__(
            model, attention=None, indices=indices,
            count=experts.of_micro_batch if experts and experts.layers else None,
            micro_tokens=config.micro_tokens, temperature=config.temperature,
        )  # fmt: skip
        self.config = config
        self.experts = experts

    def share_out(self, batch):
        """Return the trajectories that this rank trains on, given its own of the batch."""
        return batch

    def attention_of(self, row, group):
        """Return the attention of a row, in which tokens see earlier ones of their own sequence."""
        # Tiles between sequences cost nothing. On a ring a rank holds some of the tokens, while the
        # mask is about indices of the whole row, and is cut to what each pair of ranks needs. So a
        # tree crosses ranks like any sequence: keys and values travel, queries stay.
        length = row.tokens_1S.shape[1]
        parent_N = F.pad(row.forest.parent, (0, length - len(row.forest)), value=-1)
        how = self.config.cp_method, self.attend_alone
        return MaskedAttention(row.forest.row_mask(length), parent_N, group, *how)


class ExactBatches(RowBatches):
    """Run micro-batches that are rows in the order of sums that the sampler has."""

    def attention_of(self, row, group):
        return packed_attention(row.forest.document_ids(row.tokens_1S.shape[1]))


class TreeBatches(RowBatches):
    """Run micro-batches that are packed trees of the sequences' prefixes."""

    forest_class = TokenTrie
    attend_alone = staticmethod(attend_short)

    def share_out(self, batch):
        """Distribute the data-parallel ranks' trajectories: prefixes together, equal times."""
        # Context ranks share one tree's tokens.
        if self.plan.cp > 1 or self.plan.dp == 1:
            return batch
        sequences = [t.tokens for t in batch]
        _, share = redistribute(sequences, batch, group=self.part.grid.group["dc"])
        return share


class ChunkBatches(TreeBatches):
    """Train on one tree chunk by chunk, in memory for a path."""

    def forward_backward(self, sequences, masks, loss_fn):
        """Add the loss's gradient to .grad. loss_fn gets sequences that end in a chunk."""
        self.require_batch(sequences, masks)
        trie = TokenTrie(sequences)
        self.tokens_run = len(trie)
        held_N = torch.bincount(trie.paths, minlength=len(trie))

        @functools.cache  # a chunk that runs again fills in the same
        def routing_of(chunk):
            # The chunk as a row of its own, padded as the walk does.
            size = chunk.stop - chunk.start
            held_s = F.pad(held_N[chunk.start : chunk.stop], (0, -size % self.plan.tp))
            return self.count(self.held_here(held_s, torch.arange(len(held_s))))

        def loss_of_chunk(ended, *scores):
            mask_BT = padded([masks[i] for i in ended], scores[0]).bool()
            return loss_fn(ended, mask_BT, *scores)

        config = self.config
        tree_backward(
            self.model, trie, loss_of_chunk, max_tokens=config.chunk_tokens,
            recompute=config.recompute, temperature=config.temperature, masks=masks, batched=True,
            routing=routing_of if self.count else None, multiple=self.plan.tp,
        )  # fmt: skip


BATCHES = {"disabled": RowBatches, "exact": ExactBatches, "sparse": TreeBatches,
           "dta": ChunkBatches}  # fmt: skip
