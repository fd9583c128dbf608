"""Micro-batches: adds rows, packed trees and chunks of a tree to `train_grpo.Trainer`.

A class for each way in which a model runs a batch, by the settings `tree` and `exact`. Without
them read `RowBatches` alone.

Letters:  B trajectories   T positions of their padded log-prob vectors   N sampled tokens
S packed tokens
"""

import bisect
import functools

import numpy as np
import torch

from full.attention.attend import Attention, attend
from full.attention.masks import Mask
from full.attention.ring import indices, ring_attention
from full.learn.packing import (
    PackedBatches, PackedRow, PaddedTokens, pack, pack_row,
)  # fmt: skip
from full.model.exact import packed_attention
from full.tree.chunks import tree_backward
from full.tree.forest import Forest, SharedForest, parents_in
from full.tree.packed import attend_short, wanted_edges
from full.tree.trie import TokenTrie, redistribute


def padded(vectors, like):
    """Return ragged numpy vectors as one (B, T) tensor like `like`, each followed by zeros."""
    # numpy: a tensor for each of thousands of short vectors would cost more than the copy.
    lengths_B = np.array([len(vector) for vector in vectors])
    out_BT = np.zeros((len(vectors), lengths_B.max()))
    out_BT[np.arange(out_BT.shape[1]) < lengths_B[:, None]] = np.concatenate(vectors)
    return torch.from_numpy(out_BT).to(like)


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

    def __init__(self, model, config, experts):
        super().__init__(
            model, attention=self.attention_of_row, indices=indices,
            count=experts.of_micro_batch if experts and experts.layers else None,
            micro_tokens=config.micro_tokens, temperature=config.temperature,
        )  # fmt: skip
        self.config = config
        self.experts = experts

    def share_out(self, batch):
        """Return the trajectories that this rank trains on, given its own of the batch."""
        return batch

    def attention_of_row(self, document_1S, group):
        """Return the attention of a row, in which tokens see earlier ones of their own sequence."""
        # The block-diagonal mask of the whole row. Tiles between documents cost nothing, and a ring
        # cuts the mask to what each pair of ranks needs.
        mask = Mask.documents(doc_ids=document_1S)
        return MaskedAttention(mask, parents_in(document_1S[0]), group, self.config.cp_method)


class ExactBatches(RowBatches):
    """Run micro-batches that are rows in the order of sums that the sampler has."""

    def attention_of_row(self, document_1S, group):
        """Return the attention of a row, in which tokens see earlier ones of their own sequence."""
        return packed_attention(document_1S)


class TreeBatches(RowBatches):
    """Run micro-batches that are packed trees of the sequences' prefixes."""

    def share_out(self, batch):
        """Distribute the data-parallel ranks' trajectories: prefixes together, equal times."""
        # Context ranks share one tree's tokens.
        if self.plan.cp > 1 or self.plan.dp == 1:
            return batch
        sequences = [t.tokens for t in batch]
        _, share = redistribute(sequences, batch, group=self.part.grid.group["dc"])
        return share

    def attention_of_row(self, tree, group):
        """Return the attention to a token's path. tree: (TokenTrie, length of the padded row)."""
        # On a ring a rank holds some of the tokens, while the mask is about indices of the whole
        # row. So a tree crosses ranks like any sequence: keys and values travel, queries stay.
        trie, length = tree
        padding = length - len(trie)
        mask = trie.mask(0, len(trie), padding=padding)
        parent_N = np.pad(trie.parent.numpy(), (0, padding), constant_values=-1)
        return MaskedAttention(mask, parent_N, group, self.config.cp_method, attend_short)

    def pack_micro_batches(self, sequences, masks):
        """Return the sequences of each tree, as lists of indices, and the `PackedRow` of each."""
        self.require_batch(sequences, masks)
        # Sorted sequences share their beginnings with the sequence before them.
        trie = TokenTrie(sequences)
        lengths = trie.lengths[trie.order].tolist()
        cut = functools.partial(pack, lengths, shared=trie.shared.tolist())

        # Other ranks may need more trees than this one, and a pipeline pads all trees to the
        # longest. So trees are cut as small as their number allows, which makes them about equal.
        count = self.agreed_micro_batches(len(cut(self.micro_tokens)))
        most = bisect.bisect_left(
            range(self.micro_tokens), True, key=lambda tokens: len(cut(tokens)) <= count,
            lo=min(self.micro_tokens, len(trie) // max(1, count)),
            hi=min(self.micro_tokens, len(trie)),
        )  # fmt: skip
        micros = [sorted(trie.order[k] for k in run) for run in cut(most)]

        tries = [trie]
        if len(micros) != 1:
            tries = [TokenTrie([sequences[i] for i in run]) for run in micros]
        self.tokens_run = sum(map(len, tries))

        # What is missing is padding alone, which is a tree of one token for the attention.
        missing = count - len(micros)
        lengths = self.row_lengths([*map(len, tries)] + [1] * missing)
        rows = [
            tree_row(trie, [masks[i] for i in run], length)
            for run, trie, length in zip(micros, tries, lengths)
        ]
        for length in lengths[len(rows) :]:
            rows.append(pack_row([], [], length)._replace(sees=(TokenTrie([[0]]), length)))
        return micros + [[]] * missing, rows


def tree_row(trie, masks, length) -> PackedRow:
    """Return a tree as a row of `length` places.

    masks: which of a sequence's tokens[1:] count.
    """
    # Targets of different sequences may be one token of the tree: it is scored once, at the token
    # before it, and `entries` tells each target which of the scored tokens it is.
    edges_N, entries_K = map(torch.from_numpy, wanted_edges(trie, masks))
    mask_BT = padded(masks, torch.zeros(0, dtype=torch.bool))

    # Padding follows the tree: token 0 at position 0.
    padding = 0, length - len(trie)
    in_row = [torch.nn.functional.pad(x_N, padding)[None] for x_N in (trie.tokens, trie.positions)]
    return PackedRow(
        *in_row, (trie, length), mask_BT,
        trie.parent[edges_N], trie.tokens[edges_N], entries_K, held_by(trie, length),
    )  # fmt: skip


def held_by(trie, length):
    """Return how many sequences hold each token of a tree, and zeros up to `length`."""
    return torch.bincount(trie.paths, minlength=length)


class ChunkBatches(TreeBatches):
    """Train on one tree chunk by chunk, in memory for a path."""

    def forward_backward(self, sequences, masks, loss_fn):
        """Add the loss's gradient to .grad. loss_fn gets sequences that end in a chunk."""
        self.require_batch(sequences, masks)
        trie = TokenTrie(sequences)
        self.tokens_run = len(trie)
        model = PaddedTokens(self.model) if self.plan.tp > 1 else self.model
        routing = self.routing_of_chunks(trie) if self.count else None

        def loss_of_chunk(ended, *scores):
            mask_BT = padded([masks[i] for i in ended], scores[0]).bool()
            return loss_fn(ended, mask_BT, *scores)

        config = self.config
        tree_backward(
            model, trie, loss_of_chunk, max_tokens=config.chunk_tokens, recompute=config.recompute,
            temperature=config.temperature, masks=masks, batched=True,
            routing=routing,
        )  # fmt: skip

    def routing_of_chunks(self, trie):
        """Return the `routing` of tree_backward: for a chunk the callback of the sparse layers."""
        t = self.plan.tp
        held_N = held_by(trie, len(trie))

        @functools.cache  # a chunk that runs again fills in the same
        def of_tokens(start, stop):
            # The chunk as a row of its own, padded as PaddedTokens does.
            held_s = torch.nn.functional.pad(held_N[start:stop], (0, -(stop - start) % t))
            return self.count(self.held_here(held_s, torch.arange(len(held_s))))

        return lambda chunk: of_tokens(chunk.start, chunk.stop)


BATCHES = {"disabled": RowBatches, "exact": ExactBatches, "sparse": TreeBatches,
           "dta": ChunkBatches}  # fmt: skip
