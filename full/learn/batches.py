"""Choose which rollouts a step samples and trains on: dynamic sampling and staleness.

packing.py describes how a model runs them.

Letters:  P groups of G rollouts each
"""

import itertools
import time
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist

import train_grpo
from full.learn.advantages import compared_by, table_of_groups
from full.learn.metrics import StepClock, timed
from full.learn.rollouts import Trajectory, at_once, draw_prompts, evaluate, play
from train_grpo import ROLLOUT

# Under staleness K, batch b is sampled with the weights that max(0, b - K) steps have made, and
# trained in step b. So a step begins by sampling the batch that is trained K steps later:
#
#     K = 2      step 0           step 1       step 2       step 3
#     samples    batches 0 1 2    batch 3      batch 4      batch 5
#     trains     batch 0          batch 1      batch 2      batch 3
#
# The schedule fixes the results, whatever runs in parallel: the run is a function of its seed.
# An evaluation in line s is of the weights after step s, whatever K is. A run ends with K batches
# that are sampled and not trained, because a resume with more steps trains them.


@dataclass
class SampledBatch(train_grpo.Batch):
    """A `Batch` of trajectories that knows which weights sampled it, with its metrics."""

    sampled_by: int  # policy version of the sampler
    metrics: dict = field(default_factory=dict)

    def trained(self) -> list:
        """Return the trajectories of this rank that are trained on."""
        groups = [self.groups[number] for number in self.kept if number in self.groups]
        return list(itertools.chain(*groups))

    def to_json(self) -> dict:
        """Return the batch of all ranks as JSON values, on rank 0. Collective."""
        # COMM: how many batches wait is a function of the step, so every rank comes to each gather.
        # Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        groups = [(n, [t.to_json() for t in group]) for n, group in gather_groups(self.groups)]
        return {"kept": self.kept, "sampled_by": self.sampled_by, "metrics": self.metrics,
                "groups": groups}  # fmt: skip

    @classmethod
    def from_json(cls, stored, config, shape):
        """Return what `to_json` wrote, on any number of ranks."""
        # Each rank keeps the groups that it would have sampled.
        rank, world = dist.get_rank(), dist.get_world_size()
        own = {number: [Trajectory.from_json(number, row, shape) for row in rows]
               for number, rows in stored["groups"] if number % world == rank}  # fmt: skip
        return cls(
            own, stored["kept"], config.minibatches, stored["sampled_by"], stored["metrics"])


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
        # Play as many new groups as are missing, from this step's own part of the data: max_rounds
        # times as many prompts as it needs. With dynamic sampling, where 4 groups are needed:
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
            f"nothing can be trained; the weights are not finite or too large, or temperature "
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
    """

    def __init__(self, config, task, trainer, first_step=0, pending=None):
        self.config = config
        self.task = task
        self.trainer = trainer
        self.first_step = first_step
        pending = pending or {}
        self.pending = {n: at_once(pending.get, n) for n in pending}  # batch number -> its Future
        self.next = first_step + len(self.pending)
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
        # First begin all batches that these weights sample. An engine continues with the later ones
        # while the trainer trains, until the trainer has new weights for it:
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
            while self.next <= step + self.config.staleness:
                self.pending[self.next] = self.start(self.sample, self.next, version)
                self.next += 1
            batch = self.pending.pop(step).result()
        self.begun = None
        return batch

    def push(self):
        """Give the sampler the current weights, unless it has them. Collective."""
        if self.pushed != self.trainer.policy_version:
            with timed(self.clock.seconds, "wait_rollout"):
                for batch in self.pending.values():  # which the older weights sample
                    batch.result()
            with timed(self.clock.seconds, "push"):
                self.pushed = self.trainer.push_weights()

    def sample(self, number, version) -> SampledBatch:
        """Sample a batch by the weights of the sampler, which are of this version. Collective."""
        # The sampler has waited since its last batch or evaluation ended.
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
        """Return the fraction of held-out prompts that the current weights solve. Collective."""
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


def pending_batches(config, trainer, state) -> dict:
    """Return {number: SampledBatch} of a checkpoint's pending batches. state: its JSON values."""
    return {stored["batch"]: SampledBatch.from_json(stored, config, trainer.shape)
            for stored in state.get("pending", [])}  # fmt: skip
