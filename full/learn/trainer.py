"""Train a policy under any plan, precision and tree, with a critic, a teacher or a reference.

`Trainer` has the methods that `train_grpo.train` calls. The functions before it make its parts: the
plan and the precision of a model, its first weights, its optimizer.

Equation (1) is in advantages.py, (2) to (7) are in objectives.py.

Letters:  B trajectories   T positions   L layers with experts   E experts
"""

import dataclasses
import functools

import numpy as np
import torch
import torch.distributed as dist

from full.learn.advantages import (
    TOKEN_ADVANTAGES, advantage_metrics, require_positions, reward_advantages,
)  # fmt: skip
from full.learn.metrics import loss_metrics, merged_sums
from full.learn.objectives import OtherScores, critic_loss, grpo_loss, loss_denominator
from full.learn.packing import BATCHES, padded
from full.learn.rollouts import Sampler
from full.model import lora
from full.model.deltanet import Documents
from full.model.experts import ExpertLoads
from full.model.hf import load_hf
from full.model.parallelize import materialise, parallelize, share_or_allocate, split_for_decoding
from full.model.transformer import Critic, Transformer, causal_attention, drawn_weights
from full.ranks.checkpoint import read_checkpoint, write_checkpoint
from full.ranks.joining import all_gather_objects, current_device, summed, warn
from full.ranks.optimizer import (
    LocalOptimizer, clip_grad_norm, lr_factor, name_suspects, reduce_gradients,
    training_tensors,
)  # fmt: skip
from full.ranks.places import gather_replica, is_replica_leader, local, part_of
from full.ranks.plans import Grid, Plan

CRITIC = "critic."  # how names of the critic begin in a checkpoint


def set_wide_dtypes(config, model):
    """Set the wider dtypes of residual states and of the head's product; return the model."""
    model.head_dtype = getattr(torch, config.head_dtype) if config.head_dtype else None
    if config.is_mixed:
        weight_dtype = next(model.parameters()).dtype
        model.residual_dtype = torch.promote_types(weight_dtype, getattr(torch, config.dtype))
    return model


def empty_critic(config, shape) -> Critic:
    """Make the critic on the meta device, in `dtype`. Only the policy's experts are balanced."""
    shape = dataclasses.replace(shape, router_bias_rate=0.0)
    with torch.device("meta"):
        return set_wide_dtypes(config, Critic(shape).to(getattr(torch, config.dtype)))


def plan_of(config) -> Plan:
    """Return the trainer's plan. By default every rank has all of the model."""
    return Plan.parse(config.plan or f"d{dist.get_world_size()}")


@torch.no_grad()
def first_weights(model, directory, seed=0):
    """Fill a model with the weights of a directory; if it is "", with random ones of a seed."""
    if directory:
        load_hf(directory, model=model)
        return
    # Every rank draws all tensors, since a tensor's draws follow the draws of the tensor before it.
    # It keeps its part of the tensors that it has: a stage of a pipeline has only some of them.
    with torch.device("meta"):
        whole = (Critic if isinstance(model, Critic) else Transformer)(model.config)
    places = part_of(model).places
    for name, weight in drawn_weights(whole, seed):
        if name in places:
            local(model.get_parameter(name)).copy_(weight[places[name].region])
    for buffer in model.buffers():
        buffer.zero_()


def build_optimizer(config, model):
    """Make AdamW of this rank's parameters; with `zero1` each rank has a share of the moments."""
    settings = dict(lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay)
    make_adamw = functools.partial(torch.optim.AdamW, **settings, fused=True)
    return LocalOptimizer(model, make_adamw, zero=config.data_parallel == "zero1")


class Trainer:
    """A trainer for every plan, tree, precision, objective and sampler.

    `forward_backward` may be called any number of times before `optim_step`: gradients add up over
    calls and ranks, without an average, because the caller passes a global Z to divide by.
    Every method is collective: all ranks call it, also a rank without a share of the batch.
    """

    sampler_class = Sampler  # of this process
    COUNTS = "policy_version", "skipped", "skipped_in_a_row"
    MOST_SKIPPED = 3  # non-finite gradients in a row that end a run

    def __init__(self, config, model, *, generator=None, reference=None, teacher=None):
        """Shard the models by the settings' plans, and allocate those on the meta device.

        model: Transformer. It is trained. From the meta device it gets its first weights here.
        generator: Transformer, or another sampler. It gets its weights by the first push.
        reference: Transformer. The KL is measured against it; `write_reference` fills it.
        teacher: Transformer. It is filled here: its log-probs give the advantages.
        """
        self.config = config
        self.policy_version = 0
        self.where = "starting"  # the current step, for messages
        self.skipped = 0
        self.skipped_in_a_row = 0
        is_empty = next(model.parameters()).is_meta
        self.device = current_device() if is_empty else next(model.parameters()).device
        self.shape = model.config
        self.size = sum(p.numel() for p in model.parameters())  # numbers of the whole model
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

        # There is always a plan: n ranks with whole copies have d = n, and one process has d = 1.
        self.plan = plan_of(config)
        self.grid = Grid(self.plan, self.device.type, shard=config.shard_ranks or None)

        # All models that are trained: the model, its optimizer, and its prefix in a checkpoint.
        self.learners = []
        self.model, self.optimizer = self.add_learner(set_wide_dtypes(config, model))
        self.critic = None
        if config.advantage == "gae":
            self.critic, _ = self.add_learner(empty_critic(config, self.shape), CRITIC)
        self.experts = ExpertLoads(config, self.model, self.device)
        self.sampler = self.prepare_sampler(generator)

        # The reference of a model with factors is its base.
        self.reference = None if reference is None else self.shard_model(reference)
        if config.kl_coef and config.lora_rank:
            self.reference = self.model
        self.teacher = None
        if teacher is not None:
            self.teacher = self.shard_model(teacher)
            first_weights(self.teacher, config.teacher)

    def add_learner(self, model, prefix=""):
        """Shard a model that is trained. Return this rank's part and its optimizer."""
        config = self.config
        is_empty = next(model.parameters()).is_meta
        model = self.shard_model(model, getattr(torch, config.compute) if config.is_mixed else None)
        if is_empty:
            first_weights(model, config.model, config.seed)
            lora.draw_factors(model, config.seed)  # of a model that has factors
        optimizer = build_optimizer(config, model)
        self.learners.append((model, optimizer, prefix))
        return model, optimizer

    def prepare_sampler(self, generator):
        """Return the sampler of a model, which is split as the policy, or another sampler as is."""
        if not isinstance(generator, Transformer):
            return generator
        # A model with memory stays a whole copy. A model on the meta device gets memory, but shares
        # the weights that the policy holds in the same dtype and layout.
        if next(generator.parameters()).is_meta:
            plan = self.plan.for_sampling
            grid = self.grid if plan == self.plan else Grid(plan, self.device.type)
            split_for_decoding(generator, grid)
            share_or_allocate(self.model, generator, self.device)
        return self.sampler_class(generator)

    def shard_model(self, model, compute_dtype=None):
        """Return this rank's part of a whole model; a model on the meta device gets memory."""
        # Each micro-batch has an attention of its own, which replaces the causal one.
        config = self.config
        is_empty = next(model.parameters()).is_meta
        model = parallelize(
            model, self.plan, device_mesh=self.grid, mode=config.mode,
            attention=Documents(causal_attention), schedule=config.pp_schedule,
            ac=config.ac, compile=config.compile,
            offload=config.offload, compute_dtype=compute_dtype,
        )  # fmt: skip
        if is_empty:
            materialise(model)
        return model

    def batches(self, model):
        """Return the object that runs a model on micro-batches of sequences, of BATCHES."""
        # A micro-batch is a row of sequences, filled in order up to micro_tokens: lengths 6 3 5 2
        # and micro_tokens 10 give [6 3] [5 2]. Or it is a tree of their prefixes. Only the policy's
        # experts are counted. A critic has no sampler to agree with, so it is never exact.
        is_exact = self.config.exact and model is not self.critic
        kind = "exact" if is_exact else self.config.tree
        experts = self.experts if model is self.model else None
        return BATCHES[kind](model, self.config, experts)

    def loss_denominator(self, batch) -> float:
        """Return this rank's term of Z of (7): the sum over ranks is num_global_valid_tokens."""
        c = self.config
        options = dict(aggregation=c.aggregation, max_new_tokens=c.max_new_tokens)
        return loss_denominator([t.mask for t in batch], **options)

    def forward_backward(self, batch, num_global_valid_tokens):
        """Add the gradient of (7) for this rank's trajectories; return metrics of all ranks' batch.

        batch: list of Trajectory.
        num_global_valid_tokens: float. Z, the sum of `loss_denominator` over ranks and over all
            calls that precede one `optim_step`. Under sequence_mean it counts sequences.

        ValueError for Z <= 0.
        """
        if not num_global_valid_tokens > 0:
            raise ValueError(f"num_global_valid_tokens must be > 0, got {num_global_valid_tokens}")
        Z = num_global_valid_tokens
        measured = []  # sums of each micro-batch

        # Ranks that run one forward together first gather the trajectories of all of them. On one
        # device that is the batch itself. With trees, sequences then move to where their prefixes
        # are.
        run = self.batches(self.model)
        gathered, _ = gather_replica(self.model, batch)
        together = run.share_out(gathered)

        def train(run, loss):
            def loss_of(indices, mask_BT, *scores):
                # The term of (7) of one micro-batch, whose sequences are known by their index.
                term, sums = loss([together[i] for i in indices], mask_BT, *scores, Z=Z)
                measured.append(sums)
                return term

            sequences, masks = [t.tokens for t in together], [t.mask for t in together]
            run.forward_backward(sequences, masks, loss_of)

        # Forward, loss, backward, one micro-batch after the other. Losses are terms of one sum, so
        # their gradients only have to be added, as backward() does in .grad.
        self.experts.begin()
        train(run, self.loss)
        # The critic runs the same micro-batches.
        if self.critic is not None:
            train(self.batches(self.critic), self.critic_loss)
        return self.metrics_of_all_ranks(measured, batch, run.tokens_run)

    def loss(self, micro, mask_BT, lp_BT, entropy_BT, *, Z):
        """Return `grpo_loss` of a micro-batch: its trajectories, and the model's scores of them."""
        def column(name):
            # `prepare` gives a column to all trajectories of a step or to none.
            vectors = [getattr(t, name) for t in micro]
            return None if vectors[0] is None else padded(vectors, lp_BT)

        others = OtherScores(column("sampler_logprobs"), column("ref_logprobs"), entropy_BT)
        columns = lp_BT, column("old_logprobs"), column("advantages"), mask_BT
        return grpo_loss(*columns, self.config, others, Z=Z)

    def critic_loss(self, micro, mask_BT, value_BT, *, Z):
        """Return `critic_loss` of a micro-batch: its trajectories, and the critic's values."""
        old_BT = padded([t.values for t in micro], value_BT)
        return_BT = padded([t.returns for t in micro], value_BT)
        options = dict(aggregation=self.config.aggregation, value_coef=self.config.value_coef)
        return critic_loss(value_BT, old_BT, return_BT, mask_BT, Z=Z, **options)

    def metrics_of_all_ranks(self, measured, batch, tokens_run) -> dict:
        """Return `loss_metrics` of all ranks' micro-batches, and how many tokens were trained on.

        measured: the sums of each micro-batch. tokens_run: fewer than the batch's in a tree.
        """
        # Sums of sums: ranks hold unequal shares, so no rank's mean may enter. Ranks that work
        # together on the same trajectories have the same sums, so only one of them sends its sums.
        local_sums = {"flat": sum(len(t.tokens) for t in batch)}
        if is_replica_leader(self.model):
            numbers = [dict(zip(x, torch.stack([*x.values()]).tolist())) for x in measured]
            local_sums |= merged_sums(numbers) | {"run": tokens_run}
        # COMM: an all-gather of some names and numbers over all ranks. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        totals = merged_sums([{"run": 0, "tokens": 0.0}, *all_gather_objects(local_sums)])
        trained = {"tokens/trained": totals["run"], "tokens/trained_flat": totals["flat"]}
        return loss_metrics(totals) | trained | self.experts.end()

    def prepare(self, batch) -> dict:
        """Set reference and old log-probs, advantages and final masks. Return metrics. Collective.

        Each rank has groups of its own.
        """
        # Everything in (1)-(7) that has no gradient is computed once, before the first update.
        # After it the policy changes, and these numbers do not.
        config = self.config
        everyone = batch.trained()

        # The frozen reference scores the sampled tokens: a KL compares both models on one token.
        if self.reference is not None:
            with lora.base_of(self.reference):
                scores = self.forward_only(everyone, self.reference)
            for t, ref in zip(everyone, scores):
                t.ref_logprobs = ref

        # Three sources of `old`. None: the policy is its own old policy, so each ratio is exactly 1
        # and rounding cannot clip a token. Only the first minibatch can have it, since it is
        # trained before the first update. `proximal`: a forward pass of the trainer, which leaves
        # the sampler's rounding out of the ratio. Else the sampler's log-probs: old is smp then and
        # the weight (4) would be 1.
        # NUMERICS: a pass over the whole batch has other rows than the first minibatch, and in
        # bfloat16 other rows round differently: such ratios are not 1, and some are clipped. Pinned
        # by tests/full/test_precision.py::test_rounding_clips_no_token_of_the_first_minibatch.
        uses_current = config.first_minibatch_uses_current_logprobs
        first = len(next(batch.minibatches())) if uses_current else 0
        later = everyone[first:]
        if config.proximal:
            for t, old in zip(later, self.forward_only(later)):
                t.old_logprobs = old
        else:
            for t in later:
                t.old_logprobs = t.sampler_logprobs

        # A group's advantages count its truncated rollouts, which have rewards: the filter takes
        # them out of the loss only. The critic's advantages are whitened over the other rollouts.
        for t in everyone:
            if t.truncated and config.overlong == "filter":
                t.mask = np.zeros_like(t.mask)
        if self.teacher is not None:
            require_positions(config, everyone, self.teacher.config.max_position_embeddings)
        if config.advantage in TOKEN_ADVANTAGES:
            scorer = self.teacher if self.critic is None else self.critic
            scores = self.forward_only(everyone, scorer)
            metrics = TOKEN_ADVANTAGES[config.advantage].assign(config, everyone, scores)
        else:
            metrics = reward_advantages(config, batch)
        return metrics | advantage_metrics(everyone)

    def total(self, number) -> float:
        """Return the sum of a number over all ranks. Collective."""
        return summed([number])[0]

    def learning_rate(self, step) -> float:
        """Return AdamW's rate in a step. A step's updates share one rate."""
        c = self.config
        schedule = dict(warmup=min(c.lr_warmup, c.steps), total=c.steps, decay=c.lr_decay)
        return c.lr * lr_factor(step, **schedule)

    def forward_only(self, batch, model=None) -> list:
        """Return log-probs, or a critic's values, of sampled tokens: (T,) for each trajectory.

        They are 0 where no token was sampled. model: Default: the policy.
        """
        model = self.model if model is None else model
        # All ranks of a replica run a model together, on the trajectories of all of them. This
        # rank's begin at `first`.
        together, first = gather_replica(model, batch)
        run = self.batches(model)
        scores = run.forward([t.tokens for t in together], [t.sampled for t in together])
        own = scores[first : first + len(batch)]
        return [columns[0].double().numpy() for columns in own]

    def optim_step(self, lr: float | None = None) -> dict:
        """Sum the gradients over ranks, clip them by their global norm, and update the weights.

        Each model has a norm of its own. A non-finite norm skips the step of all models on all
        ranks. MOST_SKIPPED in a row end the run.
        """
        # Only here do ranks add up their gradients: once a step, after any number of micro-batches.
        # The sum needs no division: Z was global. The norm is of the sum, never of a rank's part.
        suspects = [reduce_gradients(model) for model, _, _ in self.learners]
        norms = [clip_grad_norm(model, self.config.max_grad_norm).item()
                 for model, _, _ in self.learners]  # fmt: skip
        rates = self.rates(self.config.lr if lr is None else lr)
        metrics = rates | dict(zip(("grad_norm", "critic/grad_norm"), norms))

        # One NaN would stay in the weights and in AdamW's moments for good.
        if np.isfinite(norms).all():
            for (_, optimizer, _), rate in zip(self.learners, rates.values()):
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            self.experts.update_bias(self.model)
            self.policy_version += 1
            self.skipped_in_a_row = 0
        else:
            metrics["nonfinite"] = ", ".join(
                name_suspects(model, suspect, prefix) for (model, _, prefix), suspect, norm
                in zip(self.learners, suspects, norms) if not np.isfinite(norm))  # fmt: skip
            self.count_skipped(metrics["nonfinite"])
        for _, optimizer, _ in self.learners:
            optimizer.zero_grad()
        self.experts.counts_LE.zero_()
        return metrics | {"policy_version": self.policy_version}

    def count_skipped(self, suspects):
        """Count a skipped step and print its non-finite tensors, or end the run."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        # Several in a row are not an accident: the weights or the data are broken.
        if self.skipped_in_a_row >= self.MOST_SKIPPED:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite gradient, "
                f"first in {suspects}; lower lr or look at that tensor's inputs")
        # Print it now: the next update may end the run.
        warn(f"{self.where}: skipped, non-finite gradient first in {suspects}")

    def rates(self, lr) -> dict:
        """Return AdamW's rate of each model, by its metric, where the policy's is `lr`."""
        # The critic's rate warms up and decays with the policy's.
        if self.critic is None:
            return {"lr": lr}
        return {"lr": lr, "critic/lr": self.config.critic_lr * (lr / self.config.lr)}

    def push_weights(self) -> int:
        """Give the sampler the current weights; return their version. Collective."""
        self.sampler.push(self.model, self.optimizer, self.policy_version)
        return self.policy_version

    def save_checkpoint(self, path, **extra) -> None:
        """Write weights, optimizer and `extra` (JSON values) to a directory, all or nothing."""
        state = {name: getattr(self, name) for name in self.COUNTS} | extra
        write_checkpoint(path, self.training_tensors(), state)

    def training_tensors(self) -> dict:
        """Return every tensor that a resumed run needs, of all models that are trained."""
        return {prefix + name: x for model, optimizer, prefix in self.learners
                for name, x in training_tensors(model, optimizer).items()}  # fmt: skip

    def load_checkpoint(self, path) -> dict:
        """Restore what save_checkpoint wrote, on any number of ranks; return its JSON values."""
        tensors = self.training_tensors()
        state = read_checkpoint(path, tensors)
        for _, optimizer, _ in self.learners:
            if optimizer.has_masters:
                optimizer.copy_to_model()
        for name in self.COUNTS:
            setattr(self, name, state[name])
        return state
