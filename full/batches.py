"""Batches: adds dynamic sampling, staleness, trees, demonstrations to `train_grpo.Source`.

What a step samples and trains on: the queue of batches, and how a batch becomes micro-batches of
rows, of one tree, or of chunks of a tree.

Equations (7) and (8) are in objectives.py, (11) is in experts.py.

Letters:  B trajectories   T positions of their padded log-prob vectors   P groups of G rollouts
each   N sampled tokens   S packed tokens   J pairs of a sequence and a token   L layers with E
experts   Small letters are one rank's share.
"""

import bisect
import functools
import itertools
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

import train_grpo
from full.advantages import compared_by, table_of_groups
from full.attend import attend
from full.chunks import redistribute, tree_backward
from full.exact import packed_attention
from full.experts import Balance, Replay, update_router_bias
from full.masks import Mask
from full.metrics import StepClock, timed
from full.packing import (
    PackedBatches, PackedRow, PaddedTokens, agreed_micro_batches, pack, require_batch,
    routes_of_tokens, row_lengths, speaks_for_replica,
)  # fmt: skip
from full.ranks import summed
from full.ring import indices, ring_attention
from full.rollouts import (
    DEMO_PLAY, DEMO_PROMPT, Trajectory, at_once, demonstrations, draw_prompts, evaluate, play,
)  # fmt: skip
from full.tree import attend_short, wanted_edges
from full.trie import TokenTrie
from train_grpo import ROLLOUT

# Under --staleness K, batch b is sampled with the weights that max(0, b - K) steps have made, and
# trained in step b. So a step begins by sampling the batch that is trained K steps later:
#
#     K = 2      step 0           step 1       step 2       step 3
#     samples    batches 0 1 2    batch 3      batch 4      batch 5
#     trains     batch 0          batch 1      batch 2      batch 3
#
# This says which numbers come out, and not who computes when: the run is a function of its seed.
# An evaluation in line s is of the weights after step s, whatever K is. A run ends with K batches
# that are sampled and not trained, because a resume with more --steps trains them.


@dataclass
class SampledBatch(train_grpo.Batch):
    """A `Batch` of trajectories that knows which weights sampled it, with its metrics."""

    sampled_by: int | None = None  # policy version of the sampler; None: demonstrations
    metrics: dict = field(default_factory=dict)

    def trained(self) -> list:
        """Return the trajectories of this rank that are trained on."""
        groups = [self.groups[number] for number in self.kept if number in self.groups]
        return list(itertools.chain(*groups))

    def to_json(self) -> dict:
        """Return the batch of all ranks as JSON values, on rank 0. Collective."""
        # COMM: how many batches wait is a function of the step, so every rank comes to each gather.
        # Pinned by
        # tests/full/test_staleness.py::test_ranks_and_a_resume_make_the_run_of_one_process.
        groups = [(n, [t.to_json() for t in group]) for n, group in gather_groups(self.groups)]
        return {"kept": self.kept, "sampled_by": self.sampled_by, "metrics": self.metrics,
                "groups": groups}  # fmt: skip

    @classmethod
    def from_json(cls, stored, config, shape):
        """Return what `to_json` wrote, on any number of ranks; ValueError if it is not whole."""
        # Each rank looks at all of it, so that all refuse it together, and keeps the groups that it
        # would have sampled.
        groups = {}
        for number, rows in stored["groups"]:
            if len(rows) != config.group:
                raise ValueError(f"group {number} has {len(rows)} rollouts")
            groups[number] = [Trajectory.from_json(number, row, shape) for row in rows]
            if config.replay_routes and any(t.routes is None for t in groups[number]):
                raise ValueError(f"group {number} has no routes")
        kept = stored["kept"]
        if not groups.keys() >= set(kept):
            raise ValueError("groups are missing")
        rank, world = dist.get_rank(), dist.get_world_size()
        own = {number: group for number, group in groups.items() if number % world == rank}
        return cls(own, kept, config.minibatches, stored["sampled_by"], stored["metrics"])


def gather_groups(groups) -> list:
    """Return all ranks' [(number, group)] in order on rank 0, and [] elsewhere. Collective."""
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(groups, parts)
    return sorted(itertools.chain.from_iterable(part.items() for part in parts or []))


def collect(config, task, sampler, step):
    """Sample the rollouts of a step. Collective.

    Returns this rank's {group: trajectories}; the groups of all ranks that are trained on, in
    order; and metrics.
    """
    rollouts = {}
    kept = []
    # Rewards, sampled tokens and truncation of all ranks, a row for each group played so far.
    table_3PG = np.zeros((3, 0, config.group))
    first_prompt = step * config.prompts * config.max_rounds
    for _ in range(config.max_rounds):
        # As many new groups as are missing, from the part of the data that is this step's alone:
        # max_rounds times as many prompts as it wants. With dynamic sampling, of 4 groups wanted:
        #
        #     round 1   groups 0 1 2 3   kept 0 2        (1 and 3 had equal rewards)
        #     round 2   groups 4 5       kept 0 2 4 5
        missing = config.prompts - len(kept)
        groups = range(table_3PG.shape[1], table_3PG.shape[1] + missing)
        starts = draw_prompts(config, task, ROLLOUT, step, groups, first=first_prompt)
        played = play(config, task, sampler, starts, key=(config.seed, step))

        # Every rank has the whole table, so all ranks drop the same groups.
        rollouts |= {group: trajectories for (group, _, _), trajectories in zip(starts, played)}
        round_3PG = table_of_groups(
            groups, rollouts, config.group, 3, lambda t: (t.reward, t.mask.sum(), t.truncated),
            getattr(sampler, "group", None),
        )
        table_3PG = np.concatenate([table_3PG, round_3PG], axis=1)

        # DAPO's dynamic sampling: rewards that are all equal have advantage 0, hence no gradient.
        for group, rewards_G in zip(groups, round_3PG[0]):
            if not (config.dynamic_sampling and np.ptp(rewards_G) == 0):
                kept.append(group)
        if len(kept) == config.prompts:
            break

    # Every rollout samples a token, and a token counts if its log-prob is finite.
    rewards_PG, lengths_PG, truncated_PG = table_3PG
    if lengths_PG.sum() == 0:
        raise FloatingPointError(
            f"step {step}: no finite token: every sampled token's log-prob is NaN or infinite, so "
            f"nothing can be trained; the weights are not finite or too large, or --temperature "
            f"{config.temperature} is too small"
        )

    # Metrics include dropped groups, so that they measure the policy and not the filter. A critic
    # learns from any difference within the step, also between two groups.
    solved_PG = rewards_PG >= 1
    compares_step = compared_by(config.advantage) == "step"
    compared = rewards_PG.reshape(1, -1) if compares_step else rewards_PG
    return rollouts, kept, {
        "reward/mean": rewards_PG.mean(), "reward/solved": solved_PG.mean(),
        "reward/groups_none": (~solved_PG).all(1).mean(),
        "reward/groups_all": solved_PG.all(1).mean(),
        "reward/groups_equal": (np.ptp(compared, axis=1) == 0).mean(),
        "reward/values": len(np.unique(rewards_PG[truncated_PG == 0])),
        "length/rollout_mean": lengths_PG.mean(), "length/max": int(lengths_PG.max()),
        "tokens/generated": int(lengths_PG.sum()),
        "tokens/truncated_fraction": truncated_PG.mean(),
    }  # fmt: skip


class RolloutQueue:
    """Sample the batches of a run, each with the weights that the schedule says.

    first_step: the first step that will be trained.
    pending: {number: SampledBatch} of the batches from first_step on that a checkpoint held.
    last: the last batch that will be asked for. Default: the run has no end.
    """

    def __init__(self, config, task, trainer, first_step=0, pending=None, last=math.inf):
        self.config = config
        self.task = task
        self.trainer = trainer
        self.first_step = first_step
        pending = pending or {}
        self.pending = {n: at_once(pending.get, n) for n in pending}  # batch number -> its Future
        self.next = first_step + len(self.pending)
        self.last = last
        self.clock = StepClock(trainer.device)
        # A sampler's own `start` asks the task from another thread, where Python allows no signal
        # handler. A task that is for one thread is asked by this one, and the trainer waits.
        is_safe = getattr(task, "threads", True)
        self.start = getattr(trainer.sampler, "start", at_once) if is_safe else at_once
        self.idle_since = time.perf_counter()
        self.begun = None  # the step whose batch is being sampled
        self.pushed = None  # version of the weights that the sampler has got
        self.shown = None  # a trajectory of the latest evaluation

    def get(self, step) -> SampledBatch:
        """Return the batch of a step, which begins now. Collective."""
        # First all batches are begun that these weights sample. An engine goes on with the later
        # ones while the trainer trains, until the trainer has other weights for it:
        #
        #     K = 1     step 0             step 1             step 2
        #     trainer   push, train 0      push, train 1      push, train 2
        #     engine    sample 0 1         sample 2           sample 3
        self.clock.start()
        self.trainer.where = f"step {step}"
        self.begun = step
        self.push()
        version = self.trainer.policy_version
        with timed(self.clock.seconds, "wait_rollout"):
            while self.next <= min(step + self.config.staleness, self.last):
                self.pending[self.next] = self.start(self.sample, self.next, version)
                self.next += 1
            batch = self.pending.pop(step).result()
        self.begun = None
        return batch

    def push(self):
        """Give the sampler the weights of now, unless it has them. Collective."""
        if self.pushed != self.trainer.policy_version:
            with timed(self.clock.seconds, "wait_rollout"):
                for batch in self.pending.values():  # which the older weights sample
                    batch.result()
            with timed(self.clock.seconds, "push"):
                self.pushed = self.trainer.push_weights()

    def sample(self, number, version) -> SampledBatch:
        """Sample a batch by the weights of the sampler, which are of this version. Collective."""
        # Sampling has stood still since it or an evaluation last ended.
        seconds = {"seconds/wait_train": time.perf_counter() - self.idle_since}
        with timed(seconds, "rollout"):
            sampler = self.trainer.sampler
            rollouts, kept, metrics = collect(self.config, self.task, sampler, number)
        self.idle_since = time.perf_counter()

        # All rollouts of a batch are by the same weights, so the mean age is the largest one.
        age = min(number, self.config.staleness)
        metrics |= {"policy/age_mean": float(age), "policy/age_max": age} | seconds
        return SampledBatch(rollouts, kept, self.config.minibatches, version, metrics)

    def evaluate(self):
        """Return what the weights of now solve. Collective."""
        self.push()
        with timed(self.clock.seconds, "eval"):
            # After batches that are still being sampled: no update may have asked for a push.
            sampler = self.trainer.sampler
            played = self.start(evaluate, self.config, self.task, sampler)
            solved, self.shown = played.result()
        self.idle_since = time.perf_counter()
        return solved

    def stored(self) -> list:
        """Return the pending batches as JSON values for a checkpoint, on rank 0. Collective."""
        return [{"batch": n} | self.pending[n].result().to_json() for n in sorted(self.pending)]


class Demonstrations:
    """Make the batches of the supervised steps: the steps -K .. -1 of a run with --demos K.

    first_step: the first of them that is to do.
    """

    def __init__(self, config, task, trainer, first_step):
        self.config = config
        self.task = task
        self.trainer = trainer
        self.first_step = first_step
        self.clock = StepClock(trainer.device)

    def get(self, step) -> SampledBatch:
        """Return demonstrations, one minibatch of as many as a step has rollouts. Collective."""
        # What they are depends on (seed, step, number) alone, like everything that is drawn.
        c = self.config
        number = c.demos + step
        self.clock.start()
        self.trainer.where = f"supervised step {number}"
        groups = list(range(c.prompts * c.group))
        first = number * len(groups)
        starts = draw_prompts(c, self.task, DEMO_PROMPT, number, groups, first)
        played = demonstrations(self.task, starts, (c.seed, DEMO_PLAY, number), c.max_new_tokens)
        return SampledBatch({t.group: [t] for t in played}, groups, 1)

    def evaluate(self):
        """Return None: the weights with which the loop begins are the first to be evaluated."""

    def stored(self) -> list:
        return []


def pending_batches(config, trainer, path, state) -> dict:
    """Return {number: SampledBatch} of a checkpoint's pending batches. state: its JSON values."""
    # After step s > 0 the batches s .. s + K - 1 are pending, whatever --steps was.
    step = state["step"]
    expected = list(range(step, step + config.staleness)) if step else []
    try:
        # A checkpoint of another staleness, or one that somebody has edited, is named as such.
        stored = state.get("pending", [])
        if [entry["batch"] for entry in stored] != expected:
            raise ValueError(f"expected batches {expected}")
        made = [SampledBatch.from_json(entry, config, trainer.shape) for entry in stored]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ValueError(f"checkpoint {path}: its pending batches are damaged: {reason}") from error
    return dict(zip(expected, made))


def padded(vectors, like):
    """Return ragged numpy vectors as one (B, T) tensor like `like`, each followed by zeros."""
    # numpy: a tensor for each of thousands of short vectors would cost more than the copy.
    lengths_B = np.array([len(vector) for vector in vectors])
    out_BT = np.zeros((len(vectors), lengths_B.max()))
    out_BT[np.arange(out_BT.shape[1]) < lengths_B[:, None]] = np.concatenate(vectors)
    return torch.from_numpy(out_BT).to(like)


def masked_attention(mask, group, method, debug=False, attend_alone=attend):
    """Return what a layer calls: attention under a mask of the whole row, or on a group's ring.

    method, debug: of `ring_attention`.
    attend_alone: `attend`, or `attend_short` for trees, whose paths are often short.
    """

    def attention(q, k, v, /, *, layer, scale, window=None):
        # A layer with a window narrows the mask further.
        narrowed = mask.with_window(window)
        if group is None:
            return attend_alone(q, k, v, narrowed, scale=scale)[0]
        options = dict(group=group, method=method, debug=debug and f"layer {layer}")
        return ring_attention(q, k, v, mask=narrowed, scale=scale, **options)

    return attention


class ExpertLoads:
    """Count which experts the tokens of a step go to: (8), the loads, the routers' bias.

    `begin` and `end` enclose one forward_backward. A token that several trajectories share in a
    tree counts once for each of them. For a model without experts all of it does nothing.

    counts_LE: tokens of each expert in an optimizer step, for L layers with E experts each.
    parts: for each micro-batch {layer: loss}, {layer: tokens of each expert}, and `changed` of its
        `Replay`, {} without one, on this rank.
    """

    def __init__(self, config, model, device):
        self.device = device
        self.coef = config.balance_coef
        self.rate = config.router_bias_rate
        self.layers = list(model.config.sparse_layers)
        self.counts_LE = torch.zeros(len(self.layers), model.config.num_experts).double()
        self.coef_of_one = 0.0
        self.parts = []

    def begin(self, batch, num_sequences=None):
        """Begin a forward_backward of this rank's batch. num_sequences: of the step, all ranks."""
        # The mean of (8) is over the whole step, as Z of (7) is: so nothing depends on the cut.
        self.parts = []
        if self.coef and self.layers:
            if num_sequences is None:
                (num_sequences,) = summed([len(batch)], self.device)
            self.coef_of_one = self.coef / max(1, num_sequences)  # (8)

    def balance_of_row(self, sequence_j, token_j, *, num_sequences, groups, replay=None):
        """Return the callback of the sparse layers of one micro-batch; see `routing_of_rank`."""
        how = dict(coef=self.coef_of_one, num_sequences=num_sequences, groups=groups)
        balance = Balance(sequence_j, token_j, **how)
        # The layers fill these in as they run. A layer that runs again fills in the same.
        self.parts.append((balance.losses, balance.counts, replay.changed if replay else {}))
        if replay is None:
            return balance
        replay.then = balance
        return replay

    def end(self) -> dict:
        """Return the metrics of a forward_backward. Collective."""
        if not self.layers:
            return {}

        # A rank has counted its own tokens in its own layers, so the sum over all ranks is the
        # whole. A number of tokens is exact in float64, so all ranks move the biases identically.
        sums = torch.zeros(3 + self.counts_LE.numel(), dtype=torch.float64, device=self.device)
        counts_LE = sums[3:].view_as(self.counts_LE)
        for losses, counts, changed in self.parts:
            for loss_of_layer in losses.values():
                sums[0] += loss_of_layer
            for layer, counts_E in counts.items():
                counts_LE[self.layers.index(layer)] += counts_E
            for counts_2 in changed.values():
                sums[1:3] += counts_2
        dist.all_reduce(sums)
        counts_LE = counts_LE.cpu()
        self.counts_LE += counts_LE

        # 1: all experts of a layer got as much; E / K: every token chose the same experts.
        load_L = counts_LE.amax(1) / counts_LE.mean(1).clamp(min=1 / counts_LE.shape[1])
        metrics = {"experts/load_max": load_L.max().item()}
        loss, changed, replayed = sums[:3].tolist()
        if self.coef:
            metrics["balance/loss"] = loss
        if replayed:
            metrics["experts/replay_changed"] = changed / replayed
        return metrics

    def update_bias(self, model):
        """Move the routers' biases by (11) of experts.py, after an optimizer step."""
        if not self.rate:
            return
        has = [module.layer for module in model.modules() if hasattr(module, "votes")]
        counts = {layer: self.counts_LE[self.layers.index(layer)] for layer in has}
        update_router_bias(model, counts)


# Micro-batches: rows, packed trees, chunks ------------------------------------------------------
# Each class runs a batch in one way of --tree. Without --tree read `RowBatches` alone.


class RowBatches(PackedBatches):
    """Run micro-batches that are rows of sequences end to end: `--tree disabled`.

    tokens_run is the number of tokens of the latest batch that the model has run on.
    """

    def __init__(self, model, config, experts):
        super().__init__(
            model, attention=self.attention_of_row, indices=indices,
            balance=experts.balance_of_row if experts.layers else None,
            micro_tokens=config.micro_tokens, temperature=config.temperature,
        )  # fmt: skip
        self.config = config
        self.experts = experts
        self.tokens_run = 0

    def share_out(self, batch):
        """Return the trajectories that this rank trains on, given its own of the batch."""
        return batch

    def attention_of_row(self, document_1S, group):
        """Return the attention of a row, in which tokens see earlier ones of their own sequence."""
        # The block-diagonal mask of the whole row. Tiles between documents cost nothing, and a ring
        # cuts the mask to what each pair of ranks needs.
        mask = Mask.documents(doc_ids=document_1S)
        return masked_attention(mask, group, self.config.cp_method, self.config.debug)

    def pack_micro_batches(self, sequences, masks, routes=None):
        self.tokens_run = sum(map(len, sequences))
        return super().pack_micro_batches(sequences, masks, routes)


class ExactBatches(RowBatches):
    """Run micro-batches that are rows in the order of sums that the sampler has: `--exact`."""

    def attention_of_row(self, document_1S, group):
        """Return the attention of a row, in which tokens see earlier ones of their own sequence."""
        return packed_attention(document_1S)


class TreeBatches(RowBatches):
    """Run micro-batches that are packed trees of the sequences' prefixes: `--tree sparse`."""

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
        mask = trie.mask(0, len(trie), padding=length - len(trie))
        how = self.config.cp_method, self.config.debug
        return masked_attention(mask, group, *how, attend_alone=attend_short)

    def pack_micro_batches(self, sequences, masks, routes=None):
        """Return the sequences of each tree, as lists of indices, and the `PackedRow` of each."""
        require_batch(self.model, sequences, masks)
        # Sorted sequences share their beginnings with the sequence before them. A token whose
        # recorded experts differ has another state: there the tree forks.
        labels = routes and labels_of(routes)
        trie = TokenTrie(sequences, labels)
        lengths = trie.lengths[trie.order].tolist()
        cut = functools.partial(pack, lengths, shared=trie.shared.tolist())

        # Other ranks may need more trees than this one, and a pipeline pads all trees to the
        # longest. So trees are cut as small as their number allows, which makes them about equal.
        count = agreed_micro_batches(self.model, len(cut(self.micro_tokens)))
        most = bisect.bisect_left(
            range(self.micro_tokens), True, key=lambda tokens: len(cut(tokens)) <= count,
            lo=min(self.micro_tokens, len(trie) // max(1, count)),
            hi=min(self.micro_tokens, len(trie)),
        )  # fmt: skip
        micros = [sorted(trie.order[k] for k in run) for run in cut(most)]
        micros += [[]] * (count - len(micros))

        # A tree without a sequence is one token, and no sequence has a target in it.
        def of(values, indices):
            return values and [values[i] for i in indices]

        tries = [
            trie if len(indices) == len(sequences) > 0
            else TokenTrie(of(sequences, indices), of(labels, indices)) if indices
            else TokenTrie([[0]]) for indices in micros
        ]  # fmt: skip
        self.tokens_run = sum(len(trie) for indices, trie in zip(micros, tries) if indices)
        lengths = row_lengths(self.plan, list(map(len, tries)))
        rows = [
            tree_row(trie, of(masks, indices) or [[]], length, of(routes, indices))
            for indices, trie, length in zip(micros, tries, lengths, strict=True)
        ]
        return micros, [row if held else row.without_sequences() for held, row in zip(micros, rows)]


def labels_of(routes) -> list:
    """Return the `labels` of a `TokenTrie`: tokens with equal recorded experts have one number.

    routes: for each sequence (L_i - 1, L, K). The last token has no experts, and label 0.
    """
    flat_TX = np.concatenate([routes_TLK.reshape(len(routes_TLK), -1) for routes_TLK in routes])
    _, number_T = np.unique(flat_TX, axis=0, return_inverse=True)
    ends = np.cumsum([len(routes_TLK) for routes_TLK in routes])
    return [np.append(labels, 0) for labels in np.split(number_T.reshape(-1) + 1, ends[:-1])]


def tree_row(trie, masks, length, routes=None) -> PackedRow:
    """Return a tree as a row of `length` places.

    masks: which of a sequence's tokens[1:] count. routes: as in `pack_row`.
    """
    # Targets of different sequences may be one token of the tree: it is scored once, at the token
    # before it, and `entries` tells each target which of the scored tokens it is.
    edges_N, entries_K = map(torch.from_numpy, wanted_edges(trie, masks))
    mask_BT = padded(masks, torch.zeros(0, dtype=torch.bool))

    # A sequence holds the tokens of its path: a pair (sequence, token) for each of them.
    sequence_J = torch.arange(len(masks)).repeat_interleave(trie.lengths)

    # Padding follows the tree: token 0 at position 0.
    padding = 0, length - len(trie)
    in_row = [torch.nn.functional.pad(x_N, padding)[None] for x_N in (trie.tokens, trie.positions)]
    return PackedRow(
        *in_row, (trie, length), mask_BT,
        trie.parent[edges_N], trie.tokens[edges_N], entries_K, sequence_J, trie.paths,
        routes_of_tokens(routes, trie.paths, length) if routes else None,
    )  # fmt: skip


class ChunkBatches(TreeBatches):
    """Train on one tree chunk by chunk, in memory for a path: `--tree dta`."""

    def forward_backward(self, sequences, masks, loss_fn, routes=None):
        """Add the loss's gradient to .grad. loss_fn gets sequences that end in a chunk."""
        require_batch(self.model, sequences, masks)
        trie = TokenTrie(sequences, routes and labels_of(routes))
        self.tokens_run = len(trie)
        # A token counts once for each sequence that contains it: sequences_N[t] times.
        layers = self.model.config.sparse_layers
        sequences_N = torch.bincount(trie.paths, minlength=len(trie)).double()
        sequences_N = sequences_N.to(self.device)
        replay = None
        if routes:
            routes_NLK = routes_of_tokens(routes, trie.paths, len(trie)).to(self.device)
            replay = Replay(routes_NLK, layers, sequences_N)
        parts = {}  # by chunk: one that runs again overwrites its own

        def routing(chunk):
            tokens_n = torch.arange(chunk.start, chunk.stop)
            counts = {}

            def count(probs_nE, topk_ids_nK, /, *, layer):
                weights_nK = sequences_N[tokens_n, None].expand_as(topk_ids_nK)
                ids, weights = topk_ids_nK.flatten(), weights_nK.flatten()
                counts[layer] = torch.bincount(ids, weights, probs_nE.shape[1])

            part = count
            changed = {}
            if replay is not None:
                part = replay.of_tokens(tokens_n, count)
                part.changed = changed
            parts[chunk.start] = {}, counts, changed
            return part

        def loss_of_chunk(ended, *scores):
            mask_BT = padded([masks[i] for i in ended], scores[0]).bool()
            return loss_fn(ended, mask_BT, *scores)

        # check_finite=False: a NaN is optim_step's to find, on all ranks at once.
        model = PaddedTokens(self.model) if self.plan.tp > 1 else self.model
        config = self.config
        tree_backward(
            model, trie, loss_of_chunk, max_tokens=config.chunk_tokens, recompute=config.recompute,
            temperature=config.temperature, masks=masks, batched=True, check_finite=False,
            routing=routing if layers else None,
        )  # fmt: skip

        # Tensor ranks have walked the same tree and found the same numbers: one of them counts.
        # But each has replayed the routes of the tokens that its layers see.
        speaks = speaks_for_replica(self.model)
        for _, counts, changed in parts.values():
            changed = changed if speaks or self.plan.etp == 1 else {}
            self.experts.parts.append(({}, counts if speaks else {}, changed))


BATCHES = {"disabled": RowBatches, "exact": ExactBatches, "sparse": TreeBatches,
           "dta": ChunkBatches}  # fmt: skip
