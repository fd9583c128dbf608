"""Pack unequal sequences into rows or trees, and run them forward and backward under any plan.

In a loop over unequal sequences each plan needs something else: t a number of tokens that it
divides, c this rank's tokens of each sequence, p all micro-batches at once and the loss on one
stage. Under fsdp, t, c, e and p all ranks of a group must make the same forwards. With
`PackedBatches` the loop reads as on one device. RECIPES.md has one.

Letters:  B sequences   S tokens of one, s of this rank   T targets   N scored tokens   M width
"""

import contextlib
import functools
import zlib
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import parallel
from full.attention.attend import attend, attend_short
from full.attention.ring import indices
from full.model.exact import packed_attention
from full.model.logprobs import require_tokens_in_vocabulary
from full.ranks.joining import all_gather_objects, errors_on_all_ranks, is_lost_rank
from full.ranks.places import is_replica_leader, part_of, reshard
from full.tree.chunks import tree_backward
from full.tree.forest import MaskedAttention
from full.tree.trie import (
    FlatTokens, TokenTrie, pack, pack_evenly, redistribute, scores_of, wanted_edges,
)  # fmt: skip


class PackedRow(NamedTuple):
    """Sequences end to end in a row of S places. On the CPU, and the same on every rank.

    Sequences a b c and d e in 8 places. b, c and e are scored:

        tokens      a b c d e 0 0 0        padding is in no document, and at position 0
        document    0 0 0 1 1 - - -
        position    0 1 2 0 1 0 0 0
        mask        [[1, 1], [1, 0]]       of the targets b c and e, padded to two
        at          [0, 1, 3]              b is predicted at a, c at b, e at d
        held        1 1 1 1 1 0 0 0        in a tree, several sequences hold one token
    """

    forest: object  # the sequences: FlatTokens or TokenTrie
    tokens_1S: torch.Tensor
    positions_1S: torch.Tensor
    mask_BT: torch.Tensor  # which targets are scored
    at_N: torch.Tensor  # the place of the token that predicts each scored target
    targets_N: torch.Tensor  # the tokens that are predicted
    entries_K: torch.Tensor  # for each True of the mask, which of the N it is: in this row 0 1 2
    held_S: torch.Tensor  # how many sequences hold the token of each place


def padded(vectors, like):
    """Return ragged numpy vectors as one (B, T) tensor like `like`, each followed by zeros."""
    # numpy: a tensor for each of thousands of short vectors would cost more than the copy.
    lengths_B = np.array([len(vector) for vector in vectors], dtype=np.int64)
    out_BT = np.zeros((len(vectors), lengths_B.max(initial=0)))
    is_inside_BT = np.arange(out_BT.shape[1]) < lengths_B[:, None]
    out_BT[is_inside_BT] = np.concatenate([np.zeros(0), *vectors])
    return torch.from_numpy(out_BT).to(like)


def pack_row(forest, masks, length) -> PackedRow:
    """Return a forest as a row, padded to `length`.

    forest: FlatTokens or TokenTrie.
    masks: for each sequence, which of its tokens[1:] count.
    """
    # Targets of different sequences may be one token of a tree: it is scored once, at the token
    # before it, and `entries` tells each target which of the scored tokens it is.
    edges_N, entries_K = map(torch.from_numpy, wanted_edges(forest, masks))
    mask_BT = padded(masks, torch.empty(0, dtype=torch.bool))
    padding = 0, length - len(forest)  # token 0 at position 0
    return PackedRow(
        forest, F.pad(forest.tokens, padding)[None], F.pad(forest.positions, padding)[None],
        mask_BT, forest.parent[edges_N], forest.tokens[edges_N], entries_K,
        torch.bincount(forest.paths, minlength=length),
    )  # fmt: skip


class Micro(NamedTuple):
    """A micro-batch: (B, S) token ids, their positions, and the attention of their documents."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: object = None  # None: the model's
    on_routing: object = None  # a callback that gets the routing of its sparse layers

    def through(self, stage, x):
        """Run a model or a stage of one on x, states of the stage before. None: on the tokens."""
        options = dict(positions=self.positions, attention=self.attention)
        # Only a model with experts has to accept on_routing.
        if self.on_routing is not None:
            options["on_routing"] = self.on_routing
        return stage.hidden(self.tokens if x is None else x, **options)


def states_like(model, shape):
    """Return memory for the states that one stage sends to the next, (B, s, M). None without p.

    shape: (B, S) of the tokens of a micro-batch on this rank: the same for all micro-batches.

    ValueError on all ranks of a replica unless t can cut S. Collective over c.
    """
    part = part_of(model)
    if part.plan.pp == 1:
        return None
    rows, length = shape
    part.grid.require_cut(length)
    t = part.plan.tp if part.grid.sequence else 1
    p = next(model.parameters())
    dtype = getattr(model, "residual_dtype", None) or part.compute_dtype or p.dtype
    states = rows, length // t, model.config.hidden_size
    return torch.empty(states, dtype=dtype, device=part.device)


def run_micro_batches(model, forward, number, like=None) -> None:
    """Run forward and backward of micro-batches 0 to number - 1. Gradients add up in .grad.

    forward: forward(root, n, x) runs micro-batch n, where `root.hidden` runs the layers: the model,
        or a stage of it. x: None, or the states of the stage before, (B, s, M). It returns the
        loss, a tensor (), if `model.part.pipeline.has_head(root)`, and states otherwise.
    number: int. The same on all ranks of a replica. Under a schedule of torch a multiple of p, and
        at least 2 p.
    like: `states_like`, for p > 1.

    Collective for p > 1. Then what forward raises on one stage is raised on all ranks of the
    replica, after the last micro-batch. .grad is of no use afterwards.
    """
    with errors_on_all_stages(model, forward, like) as guarded:
        part_of(model).pipeline.run(model, guarded, number, like)


def run_forwards(model, forward, number, like=None) -> None:
    """Run the forward of micro-batches 0 to number - 1, one after another, without gradients.

    Arguments and errors: as in `run_micro_batches`. What forward returns on the last
    stage is dropped.
    """
    with torch.no_grad(), errors_on_all_stages(model, forward, like) as guarded:
        part_of(model).pipeline.run_forwards(model, guarded, number, like)


@contextlib.contextmanager
def errors_on_all_stages(model, forward, like):
    """Give a forward that never raises; at the end raise its error on all ranks of a replica."""
    part = part_of(model)
    if part.plan.pp == 1:
        yield forward
        return
    problem = None

    def forward_or_zeros(root, n, x):
        nonlocal problem
        if problem is None:
            try:
                y = forward(root, n, x)
                if not part.pipeline.has_head(root) and y.shape != like.shape:
                    raise ValueError(f"micro-batch {n}: expected states {tuple(like.shape)} of a "
                                     f"stage, as `like` is, got {tuple(y.shape)}")  # fmt: skip
                return y
            except Exception as error:
                if is_lost_rank(error):
                    raise
                problem = error
        # The other stages wait for states and for gradients. They get zeros.
        y = torch.zeros_like(like, requires_grad=True) if x is None else x * 0
        return y.sum() if part.pipeline.has_head(root) else y

    yield forward_or_zeros
    with errors_on_all_ranks(part.grid.group["pct"]):
        if problem is not None:
            raise problem


class PackedBatches:
    """Run batches of sequences and a loss on a model: one call, the same under every plan.

    tokens_run is the number of tokens of the latest batch that the model has run on.

    model: the result of `parallelize`, or an unsplit model with `hidden` and `logprobs`.
    attention: attention(document_1S, group) makes the callable of the layers for a `PackedRow`:
        tokens see earlier tokens of their own document, by number; -1 is padding. group: None, or
        the ranks of c.
    indices: indices(length, rank, world), ascending: the tokens of a row that a rank of c has, as
        this attention wants them: `ring.indices`. For c > 1 only.
    count: count(held_s) makes the callback of a training micro-batch's sparse layers, such as an
        `experts.RoutingCounts`. Default: none.
    micro_tokens: int. Most tokens of a micro-batch. A longer sequence is alone in one.
    temperature: float. Of the log-probs.

    Different data shares bring different sequences. The c, t and p ranks of one share, its replica
    group, bring the same ones: `gather_replica` makes one batch of their lists.
    """

    forest_class = FlatTokens  # or TokenTrie: which tokens of a row its sequences share

    def __init__(self, model, *, attention, indices=None, count=None, micro_tokens=8192,
                 temperature=1.0):  # fmt: skip
        # Under c the callers say which tokens a rank has, because it depends on their attention.
        self.model = model
        self.part = part_of(model)
        self.plan = self.part.plan
        self.device = self.part.device
        self.attention = attention
        self.count = count
        self.indices = indices
        self.micro_tokens = micro_tokens
        self.temperature = temperature
        self.tokens_run = 0
        if self.plan.cp > 1 and indices is None:
            raise ValueError(
                f"plan {self.plan} splits rows: give indices=, e.g. ring_attention.indices")

    def forward_backward(self, sequences, masks, loss_fn) -> torch.Tensor:
        """Add the gradient of a batch's loss to .grad. Collective.

        sequences: lists of token ids.
        masks: for each sequence a bool for each target, tokens[1:].
        loss_fn: called as loss_fn(indices, mask_BT, logprobs_BT, entropies_BT), of a critic
            (indices, mask_BT, values_BT): sequence indices[b] has row b, which is 0 where nothing
            is scored. It returns this micro-batch's term of the loss, divided by the global count,
            and the same value on all c and t ranks (under p, of the last stage).

        Returns the loss, summed over data shares, float64.
        """
        micro_batches, rows = self.pack_micro_batches(sequences, masks)
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def forward(root, k, x):
            x_1sM = self.micro(rows[k], self.count).through(root, x)
            if not self.part.pipeline.has_head(root):
                return x_1sM
            scores = self.score(rows[k], x_1sM)
            if not micro_batches[k]:  # a loss of 0 with a graph: others wait for its messages
                return sum(x_BT.sum() for x_BT in scores)
            loss = loss_fn(micro_batches[k], rows[k].mask_BT.to(self.device), *scores)
            total.add_(loss.detach())
            return loss

        # backward() adds to .grad, and that is right, because the losses are terms of one sum.
        run_micro_batches(self.model, forward, len(rows), self.stage_states(rows))
        # COMM: an all-reduce of one number over all ranks. Of the ranks with the same sequences one
        # counts. Pinned by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        total *= is_replica_leader(self.model)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    @torch.no_grad()
    def forward(self, sequences, masks) -> list:
        """Return the scores of each sequence, as `scores_of` does, without gradient.

        Each is (L - 1,), on the CPU, on every rank of the replica. Collective.
        """
        micro_batches, rows = self.pack_micro_batches(sequences, masks)
        scores = [None] * len(sequences)

        def forward(root, k, x):
            x_1sM = self.micro(rows[k]).through(root, x)
            if not self.part.pipeline.has_head(root):
                return x_1sM
            # Each sequence gets its scores, without the padding.
            columns = [x_BT.cpu() for x_BT in self.score(rows[k], x_1sM)]
            for b, i in enumerate(micro_batches[k]):
                scores[i] = tuple(x_BT[b, : len(sequences[i]) - 1] for x_BT in columns)

        run_forwards(self.model, forward, len(rows), self.stage_states(rows))
        reshard(self.model)  # without a backward FSDP would keep the gathered weights
        if self.plan.pp == 1:
            return scores

        # COMM: the last stage has the scores; an all-gather gives them to the whole replica.
        # Pinned by tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        scores = scores if self.part.pipeline.has_head() else None
        parts = all_gather_objects(scores, self.part.grid.group["pct"])
        return next(part for part in parts if part is not None)

    def pack_micro_batches(self, sequences, masks):
        """Return the micro-batches, as lists of indices, and a `PackedRow` of each. Collective.

        A micro-batch without sequences is padding alone.
        """
        self.require_batch(sequences, masks)
        forest = self.forest_class(sequences)
        lengths = [len(sequences[i]) for i in forest.order]
        shared = forest.shared.tolist()
        most = self.limit_of_micro_batches(forest, lengths)
        count = self.count_of_micro_batches(len(pack(lengths, most, shared)))

        # This rank may have data for fewer, and a pipeline pads all rows to the longest. So cut
        # micro-batches as small as the count allows: they become about equal.
        high = min(most, len(forest))
        low = min(most, len(forest) // max(1, count))
        runs = pack_evenly(lengths, count, low, high, shared)
        micro_batches = [sorted(forest.order[k] for k in run) for run in runs]
        micro_batches += [[]] * (count - len(micro_batches))

        forests = [forest]
        if micro_batches != [[*range(len(sequences))]]:
            forests = [self.forest_class([sequences[i] for i in run]) for run in micro_batches]
        self.tokens_run = sum(map(len, forests))
        rows = [pack_row(forest, [masks[i] for i in run], length) for run, forest, length
                in zip(micro_batches, forests, self.row_lengths(forests), strict=True)]  # fmt: skip
        return micro_batches, rows

    def limit_of_micro_batches(self, forest, lengths) -> int:
        """Return the most tokens of a micro-batch."""
        # A pipeline of p stages idles less the more micro-batches it has. This limit gives about
        # 2 p of them. But more micro-batches would run tokens again that sequences share.
        if self.plan.pp == 1 or len(forest) < sum(lengths):
            return self.micro_tokens
        enough = sum(lengths) // (2 * self.plan.pp) + max(lengths, default=0)
        return min(self.micro_tokens, enough)

    def count_of_micro_batches(self, needed) -> int:
        """Return how many micro-batches this rank runs, where it needs `needed`. Collective."""
        count = self.part.pipeline.micro_batches(needed)
        if self.part.mode == "fsdp" or self.plan.ep > 1:
            # COMM: an all-reduce of one number over all ranks. A sharded forward gathers weights
            # from all, and tokens go to all ranks' experts: the number must be one. Pinned by
            # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
            largest = torch.tensor(count, device=self.device)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            count = int(largest)
        return count

    def row_lengths(self, forests) -> list:
        """Return the padded length of each forest's row."""
        # Sequence parallelism cuts a row in t, and a zigzag over c cuts it in 2 c first. Rows of a
        # pipeline have one length.
        unit = self.plan.tp * (2 * self.plan.cp if self.plan.cp > 1 else 1)
        lengths = [-(-(len(forest) or 1) // unit) * unit for forest in forests]
        return [max(lengths)] * len(lengths) if self.plan.pp > 1 else lengths

    def require_batch(self, sequences, masks):
        """Raise ValueError on all ranks of a replica unless they have the same, fitting batch."""
        is_alone = self.plan.world == self.plan.dp
        replica = None if is_alone else self.part.grid.group["pct"]
        with errors_on_all_ranks(replica, alone=is_alone):
            if len(sequences) != len(masks):
                raise ValueError(f"expected a mask for each of {len(sequences)} sequences, got "
                                 f"{len(masks)}")  # fmt: skip
            for i, (tokens, mask) in enumerate(zip(sequences, masks)):
                if len(tokens) == 0 or len(mask) != len(tokens) - 1:
                    raise ValueError(f"sequence {i} has {len(tokens)} tokens and a mask of "
                                     f"{len(mask)}; it needs a token, and a mask of tokens[1:]")
        if is_alone:
            return

        # COMM: an all-gather of some bytes over the replica tells whether all of its ranks have the
        # same batch. Pinned by
        # tests/full/test_packed.py::test_a_batch_that_cannot_be_is_refused_on_every_rank.
        batch = [[*map(int, x)] for x in (*sequences, *masks)]
        if len({*all_gather_objects(zlib.crc32(repr(batch).encode()), replica)}) > 1:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(replica)))
            raise ValueError(
                f"ranks {ranks} work on the same sequences in plan {self.plan}, but were given "
                f"different ones or masks; gather_replica makes one batch of them")  # fmt: skip

    def own_tokens(self, row):
        """Return the places of a row that this rank of c has, ascending: all of them without c."""
        length = row.tokens_1S.shape[1]
        if self.plan.cp == 1:
            return torch.arange(length)
        return self.indices(length, self.part.grid.group["c"].rank(), self.plan.cp)

    def micro(self, row, count=None) -> Micro:
        """Return this rank's tokens of a row, with the attention of its documents."""
        # The model would check this rank's tokens only, and one rank of c would raise alone.
        if self.plan.cp > 1:
            require_tokens_in_vocabulary(row.tokens_1S, self.model.config.vocab_size)
        # Attention gets the whole row. Tokens and positions are this rank's.
        local_s = self.own_tokens(row)
        group = self.part.grid.group["c"] if self.plan.cp > 1 else None
        own = [x_1S[:, local_s].to(self.device) for x_1S in (row.tokens_1S, row.positions_1S)]
        on_routing = count and count(self.held_here(row.held_S, local_s))
        return Micro(*own, self.attention_of(row, group), on_routing)

    def attention_of(self, row, group):
        """Return the attention of a row's documents."""
        return self.attention(row.forest.document_ids(row.tokens_1S.shape[1]), group)

    def held_here(self, held_S, local_s):
        """Return how many sequences hold each token that this rank's sparse layers see.

        It is 0 where another rank counts the token.
        held_S: of a row. local_s: the places that this rank is given, ascending.
        """
        # The ranks of c have different tokens. The t ranks are given the same ones, and rank r
        # counts the r-th chunk: with sequence parallelism its layers see no others. But around
        # experts whose inner width is split, f and g gather all of them.
        #
        #     t2, 6 tokens, rank 1    counts 3 4 5    a layer sees 3 4 5, with etp 2 all six
        plan = self.plan
        if plan.tp == 1:
            return held_S[local_s].to(self.device)
        counted_s = parallel.own_chunk(local_s, self.part.grid.group["t"])
        seen_s = local_s if plan.etp > 1 else counted_s
        return (held_S[seen_s] * torch.isin(seen_s, counted_s)).to(self.device)

    def stage_states(self, rows):
        """Return `states_like` of rows, which have one length under p."""
        return states_like(self.model, (1, len(self.own_tokens(rows[0])))) if rows else None

    def score(self, row, hidden_1sM) -> list:
        """Return the scores of a row's targets, (B, T) each, as `scores_of` does."""
        # Some of the N scored tokens have their state on this rank, and searchsorted finds it.
        # Example: this rank has 0 1 6 7 of 8 tokens, and 0 1 3 are scored. It scores 0 and 1.
        local_s = self.own_tokens(row)
        here_N = torch.isin(row.at_N, local_s)
        at_n = row.at_N[here_N]
        x_nM = hidden_1sM[0, torch.searchsorted(local_s, at_n).to(self.device)]
        targets_n = row.targets_N[here_N].to(self.device)
        columns = scores_of(self.model, x_nM, targets_n, self.temperature)

        # Back into (B, T). The ranks of c have filled in different entries, and the others are 0:
        # their sum is the whole, and all compute the same loss of it. Each has the whole gradient
        # of the sum, so nothing is sent backward, or it would count c times.
        here_n = here_N.nonzero()[:, 0].to(self.device)
        entries_K = row.entries_K.to(self.device)
        places = row.mask_BT.nonzero().T.to(self.device)
        scores = []
        for x_n in columns:
            x_N = x_n.new_zeros(len(here_N)).index_copy(0, here_n, x_n)
            if self.plan.cp > 1:
                x_N = parallel.reduce_from_tp_region(x_N, self.part.grid.group["c"], sequence=False)
            x_BT = x_n.new_zeros(row.mask_BT.shape)
            scores.append(x_BT.index_put((*places,), x_N[entries_K]))
        return scores


# The micro-batches of a run ---------------------------------------------------------------------
# A class for each value of `tree`, and for `exact`. Without these settings read `RowBatches` alone.


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
        """Distribute the data-parallel ranks' trajectories: prefixes together, equal times."""
        # Context ranks share one tree's tokens, and only a tree has prefixes.
        if self.forest_class is FlatTokens or self.plan.cp > 1 or self.plan.dp == 1:
            return batch
        sequences = [t.tokens for t in batch]
        _, share = redistribute(sequences, batch, group=self.part.grid.group["dc"])
        return share

    def attention_of(self, row, group):
        """Return the attention of a row, in which tokens see earlier ones of their own sequence."""
        # Tiles between sequences cost nothing. On a ring a rank holds some of the tokens, while the
        # mask has indices of the whole row, and each pair of ranks cuts its part out. So a tree
        # crosses ranks like any sequence: keys and values travel, queries stay.
        length = row.tokens_1S.shape[1]
        parent_N = F.pad(row.forest.parent, (0, length - len(row.forest)), value=-1)
        options = self.config.cp_method, self.attend_alone
        return MaskedAttention(row.forest.row_mask(length), parent_N, group, *options)


class ExactBatches(RowBatches):
    """Run micro-batches that are rows, with sums in the same order as the sampler's."""

    def attention_of(self, row, group):
        return packed_attention(row.forest.document_ids(row.tokens_1S.shape[1]))


class TreeBatches(RowBatches):
    """Run micro-batches that are packed trees of the sequences' prefixes."""

    forest_class = TokenTrie
    attend_alone = staticmethod(attend_short)


class ChunkBatches(TreeBatches):
    """Train on one tree chunk by chunk, in memory for a path."""

    def forward_backward(self, sequences, masks, loss_fn):
        """Add the loss's gradient to .grad. loss_fn gets sequences that end in a chunk."""
        self.require_batch(sequences, masks)
        trie = TokenTrie(sequences)
        self.tokens_run = len(trie)
        held_N = torch.bincount(trie.paths, minlength=len(trie))

        @functools.cache  # a chunk that runs again gets the same callback
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
