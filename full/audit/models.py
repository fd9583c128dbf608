"""The models of a run's step, each in float64 and once more in the run's precision, its twin.

A checkpoint's weights and moments go to files in a temporary directory, and are read one tensor at
a time. The step kit trusts the forward of a model for one sequence, and so does this file.
"""

import copy
import dataclasses
import itertools
import math
import statistics
import tempfile
from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from conformance import definition as D
from conformance.computed import FACTOR
from conformance.sequences import nudge, score, together, trim_memory
from full.learn.rollouts import Sampler, play_held_out
from full.learn.trainer import CRITIC, empty_critic, first_weights
from full.model.deltanet import TokenByToken
from full.model.exact import packed_attention, require_exact_kernels
from full.model.lora import merge, plain
from full.model.transformer import causal_attention
from full.ranks.checkpoint import read_checkpoint
from full.ranks.optimizer import persistent_buffers
from full.ranks.places import set_tensor
from full.run.build import build, build_teacher, empty_policy, policy_in, shape_of

# How far the log-probs of an engine may be from the definition's, by the dtype of its weights: a
# token's, and the mean over all tokens, which also finds a small change of the temperature. An
# engine's kernels are not at hand. These are a few times what was measured, at most and on average:
#
#     full/learn/generate.py, `guess`           float64     4.4e-16    9.3e-17
#     full/learn/generate.py, SmolLM2-135M      float32     2.8e-5     3.2e-6
#     full/learn/generate.py, SmolLM2-135M      bfloat16    0.21       0.035
#     vLLM 0.32, SmolLM2-135M             float32     6.9e-5     1.2e-5
#     vLLM 0.32, SmolLM2-135M             bfloat16    0.65       0.055
#     the same, each of 14 steps          bfloat16    2.3        0.053
ENGINE = {"float64": (1e-9, 1e-9), "float32": (1e-3, 1e-4), "bfloat16": (4.0, 0.1)}
MOST_DEVIATIONS = 5  # of an engine's sum of -log p from the sum of the entropies

# Of a forward of several sequences. Each backward touches the memory of all gradients, which takes
# longer than the sums of one short sequence; a graph of this many tokens is smaller than they are.
MOST_TOKENS = 128


class OnDisk(UserDict):
    """Tensors by name, in files of a temporary directory."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def __setitem__(self, name, x):
        path = Path(self.folder.name, f"{len(self)}.safetensors")
        save_file({"x": x.contiguous()}, path)
        self.data[name] = path

    def __getitem__(self, name):
        return load_file(self.data[name])["x"]


class KitModel(torch.nn.Module):
    """A run's model as the step kit calls it. `module` is a prefix that the kit knows.

    tick: called at each forward.
    """

    def __init__(self, model, tick=lambda: None):
        super().__init__()
        self.module, self.tick = model, tick
        self.routed = []  # of each forward: {layer: (tokens of each expert, leads of choices)}

    def forward(self, tokens, at=None):
        self.routed.append({})
        states = self.module.hidden(tokens, attention=TokenByToken(causal_attention),
                                    on_routing=self.note_routing)  # fmt: skip
        self.tick()
        states = states if at is None else states[at][None]  # at: rows and places
        if self.module.logprobs is None:
            return SimpleNamespace(logits=None, values=self.module.values(states))
        return self.module.logits(states)

    def note_routing(self, p_NE, ids_NK, /, *, layer):
        """Count the tokens of experts, and note how narrowly they were chosen."""
        # Experts are chosen by p plus the bias. The lead is over the next expert.
        E, K = p_NE.shape[1], ids_NK.shape[1]
        mlp = self.module.model.layers[layer].mlp
        biased_NE = p_NE.detach().double() + (mlp.rate * mlp.votes if mlp.rate else 0)
        best_NE = biased_NE.sort(-1, descending=True).values
        leads = (best_NE[:, K - 1] - best_NE[:, K]).tolist() if K < E else []
        counts_E = torch.bincount(ids_NK.flatten(), minlength=E).double()
        self.routed[-1][layer] = counts_E, leads

    def counts(self) -> dict:
        """Return {layer: how many tokens of the noted forwards went to each expert}."""
        return {layer: sum(by[layer][0] for by in self.routed)
                for layer in (self.routed[0] if self.routed else ())}  # fmt: skip


def near_choices(models) -> int:
    """Return how many choices of experts rounding may turn, by how far the twin's leads are off."""
    exact, rounded = ([lead for by in model.routed for _, leads in by.values() for lead in leads]
                      for model in models)  # fmt: skip
    most = FACTOR * max((abs(x - y) for x, y in zip(exact, rounded)), default=0.0)
    return sum(x <= most for x in exact)


def with_near_choices(models, rows, findings) -> tuple:
    """Return rows and findings of log-probs, where rounding may turn the choice of an expert."""
    # With another expert a log-prob may be anything, and no mistake explains it.
    near = near_choices(models)
    if near and all(text.startswith("unexplained") for text in findings.values()):
        findings, why = {}, f"{near} choices of experts are within rounding"
        rows = [row if row.ok else row._replace(floor=math.inf, because=why) for row in rows]
    return rows, findings


def route(config, models, count) -> tuple:
    """Count the tokens of experts in an update of `count` rollouts, and move the biases.

    Return (largest load, distance, floor), and how many choices rounding may turn.
    """
    for model in models:
        model.routed = model.routed[-count:]  # of the forwards with a graph
    counts, near = models[0].counts(), near_choices(models)
    means = {layer: n_E.mean().item() for layer, n_E in counts.items()}
    load = max(n_E.max().item() / means[layer] for layer, n_E in counts.items())
    if config.router_bias_rate:
        for model, (layer, n_E) in itertools.product(models, counts.items()):
            model.module.model.layers[layer].mlp.votes += D.votes(n_E)
    return (load, 0.0, near / min(means.values())), near


class StepModels:
    """What the checkpoints before, at and after a step hold.

    before, sampled, after: paths of checkpoints. after may be None.
    """

    def __init__(self, files, task, before, sampled, after, tick=lambda: None):
        self.files, self.config, self.task, self.tick = files, files.config, task, tick
        self.before, self.sampled, self.after = before, sampled, after
        self.shape = shape_of(self.config, task)
        # What each counts, such as `policy_version`. A damaged one is named now.
        self.states = {path: read_checkpoint(path, {}, only=("no tensor",))
                       for path in (before, sampled, after) if path}  # fmt: skip

    def with_twin(self, model, dtype=""):
        """Return [a model in float64, the same in a run's precision]. Float64's twin is nudged."""
        wide = copy.deepcopy(model)
        if wide.residual_dtype is not None:
            wide.residual_dtype = torch.float64
        if (dtype or self.config.compute) == "float64":
            nudge(model.parameters())
        trim_memory()
        return [KitModel(wide.double(), self.tick), KitModel(model, self.tick)]

    def policy_before(self):
        return policy_in(self.before, self.config, self.task, self.config.compute, merged=False)

    def policy(self):
        """Return the policy before the step and its twin."""
        return self.with_twin(self.policy_before())

    def sampler(self):
        """Return the model that sampled, whose weights a push rounds, and its twin."""
        dtype = self.config.rollout_dtype
        return self.with_twin(policy_in(self.sampled, self.config, self.task, dtype), dtype)

    def reference(self):
        """Return the frozen reference and its twin. The reference of factors is their base."""
        if not self.config.kl_coef:
            return [None, None]
        if self.config.lora is not None:
            model = plain(self.policy_before())
            for votes in model.buffers():
                votes.zero_()
            return self.with_twin(model)
        model = build(self.config, self.task)[2].to_empty(device="cpu")
        self.files.directory.read_reference(SimpleNamespace(model=None, reference=model))
        return self.with_twin(model)

    def teacher(self):
        """Return the teacher and its twin."""
        if not self.config.teacher:
            return [None, None]
        model = build_teacher(self.config).to_empty(device="cpu")
        first_weights(model, self.config.teacher)
        return self.with_twin(model)

    def critic(self, weights):
        """Return a critic with these weights and its twin."""
        critic = empty_critic(self.config, self.shape)
        for name, x in weights.items():
            set_tensor(critic, name, torch.nn.Parameter(x.clone()))
        return self.with_twin(critic.to(getattr(torch, self.config.compute)))

    def weights_and_moments(self, path, prefix="") -> dict:
        """Return trained weights and AdamW's moments of a checkpoint, as the kit names them.

        prefix: of the names of the critic, or "" for the policy.
        """
        make = empty_critic if prefix else empty_policy
        named = {name: p for name, p in make(self.config, self.shape).named_parameters()
                 if p.requires_grad}  # fmt: skip
        tensors, wanted = {}, {}
        for kind, end in dict(before="", exp_avg=".exp_avg", exp_avg_sq=".exp_avg_sq",
                              step=".step").items():  # fmt: skip
            for name, p in named.items():
                x = torch.empty(()) if kind == "step" else torch.empty(p.shape, dtype=p.dtype)
                part = "optimizer" if end else "model"
                tensors[kind, name] = wanted[f"{prefix}{part}.{name}{end}"] = x
        read_checkpoint(path, wanted, only=(f"{prefix}model.", f"{prefix}optimizer."))
        wanted.clear()
        stored = {kind: self.new_kind() for kind, _ in tensors}
        for kind, name in [*tensors]:
            stored[kind][name] = tensors.pop((kind, name))
        trim_memory()
        return stored

    @property
    def are_large(self):
        return self.shape.hidden_size >= 256

    @property
    def most_tokens(self):
        """How many tokens one forward takes. Padding would count in the routing of experts."""
        return MOST_TOKENS if self.are_large and not self.shape.sparse_layers else 0

    def new_kind(self):
        """Return a place for a tensor of each parameter: memory, or for large models the disk."""
        return OnDisk() if self.are_large else {}

    def votes_apart(self, model) -> tuple:
        """Return the sums of the recorded biases' votes and of a model's, and how far apart."""
        votes = persistent_buffers(model)
        there = {name: torch.empty_like(x) for name, x in votes.items()}
        read_checkpoint(self.after, {f"buffer.{n}": x for n, x in there.items()}, only=("buffer.",))
        sizes = [sum(int(x.abs().sum()) for x in some.values()) for some in (there, votes)]
        return *sizes, sum(int((there[n] - x).abs().sum()) for n, x in votes.items())

    def as_sampled(self, model, weights):
        """Return a model with new weights, as a push gives them to the sampler."""
        precision = next(model.parameters()).dtype
        for name in weights:
            model.get_parameter(name).data = weights[name].to(precision)
        rounded = getattr(torch, self.config.rollout_dtype)
        model = merge(model, rounded) if self.config.lora is not None else model.to(rounded)
        return KitModel(model.to(precision).requires_grad_(False), self.tick)

    @torch.no_grad()
    def read(self, models, rows, column, *, of=0, mirrored=lambda place: True):
        """Set a column of Sequences to a model's numbers. of: 0 log-probs, -1 values.

        models, rows: pairs, the definition's and the twin's. Without a model nothing is set.
        mirrored: at which places the twin gets its own number, mirrored at the definition's.
        """
        # Two forwards of a trainer round apart, and a difference of the twin's own two would be 0.
        # Mirrored, they are off by the sum of both.
        if models[0] is None:
            return
        exact, rounded = ([output[of].tolist() for part in together(rows[0], self.most_tokens)
                           for output in score(model, part, self.config.temperature)]
                          for model in models)  # fmt: skip
        for n, (s, twin, mine, other) in enumerate(zip(*rows, exact, rounded)):
            setattr(s, column, mine)
            setattr(twin, column, [2 * x - y if mirrored(n + t) else y
                                   for t, (x, y) in enumerate(zip(mine, other))])  # fmt: skip


# What models say of whole rollouts ----------------------------------------------------------------


def half(place) -> bool:
    """Choose half of the places, in no order that tokens have."""
    return place.bit_count() % 2 == 1


def read_models(data, stored) -> tuple:
    """Read the numbers that the updates need of each trained rollout: ref, old, values, rewards.

    data: RecordedStep of audit.py. stored: {prefix: [weights and moments before the step, ..]}.
    Return {prefix: models that are trained} and the Sequences, pairs of definition and twin.
    """
    config, models = data.config, data.models
    sequences = data.sequences(data.trained)
    trained = {"": models.policy()}
    if CRITIC in stored:
        trained[CRITIC] = models.critic(stored[CRITIC][0]["before"])
        models.read(trained[CRITIC], sequences, "values", of=-1)

    # A reward's KL is against recorded log-probs. The loss compares two forwards, whose errors
    # add up or cancel out: half of the tokens have each.
    models.read(models.reference(), sequences, "ref_logprobs",
                mirrored=half if config.kl_in == "loss" else lambda place: False)  # fmt: skip
    models.read(models.teacher(), sequences, "teacher_logprobs")
    uses_current = data.files.stored.first_minibatch_uses_current_logprobs
    current = len(data.batches[0]) if uses_current else 0
    later = [row[current:] for row in sequences]
    if config.proximal:
        models.read(trained[""], later, "old_logprobs", mirrored=half)
    else:
        for s in itertools.chain(*later):
            s.old_logprobs = s.sampler_logprobs
    for r, *both in zip(data.trained, *sequences):
        for s in both:
            r.set_rewards(data.c, s)
            if not data.is_in_loss(r):
                s.mask = [False] * len(s.mask)
    return trained, sequences


@torch.no_grad()
def exact_numbers(models, rollouts, step) -> tuple:
    """Return how many tokens and log-probs an exact run has, and how many are not the trainer's.

    It shares the model's forward and the formula of log-probs with the run. It says that the
    recorded numbers are of this model, in this precision, for each rollout alone and whole.
    """
    config = dataclasses.replace(models.config, exact=True)
    model = policy_in(models.sampled, config, models.task, config.rollout_dtype)
    require_exact_kernels(model)
    count = tokens = bits = 0
    for r in rollouts:
        tokens_1S, at = torch.tensor([r.tokens]), torch.tensor(r.at)
        attention = packed_attention(torch.zeros_like(tokens_1S))
        logits_NV = model.logits(model.hidden(tokens_1S, attention=attention)[0, at - 1])
        uniform_N = torch.tensor(r.draws(config, step), dtype=torch.float64)[at]
        drawn_N, lp_N = model.sample(logits_NV, uniform_N, temperature=config.temperature)
        told_N = torch.tensor(r.line["logprobs"], dtype=torch.float64)[at - 1]
        count += len(at)
        tokens += int((drawn_N != tokens_1S[0, at]).sum())
        bits += int((lp_N.double() != told_N).sum())
    return count, tokens, bits


@torch.no_grad()
def log_likelihood_test(model, rollouts, config) -> tuple:
    """Return the sum of -log p of an engine's tokens, of their entropies, and its deviation.

    They are equal on average if tokens are drawn by p, and not if sampling is greedy or truncated.
    """
    total, expected, squares = 0.0, 0.0, 0.0
    for r in rollouts:
        # With forks several rollouts share a turn, which was drawn once.
        own = [t for t in r.at if r.first_sharer(config, t) == r.number]
        logits = model(torch.tensor(r.tokens)[None], at=(0, torch.tensor(own).long() - 1))[0]
        lp, H, logp_NV = D.scores(logits, [r.tokens[t] for t in own], config.temperature)
        seen_NV = logp_NV.where(logp_NV.isfinite(), 0.0)
        variance = (logp_NV.exp() * (seen_NV + H[:, None]) ** 2).sum()
        total, expected = total - lp.sum().item(), expected + H.sum().item()
        squares += ((lp + H).square().sum() + variance).item()
    return total, expected, math.sqrt(squares)


@torch.no_grad()
def solved(models, make_model, recorded) -> tuple:
    """Return which part of held-out prompts greedy play solves, and how far rounding may move it.

    models: StepModels. make_model: from 0 or 1 to the model in float64 or its twin.
    recorded: the run's number. Where it is the same, no play is looked at again.
    """
    model = make_model(0)
    _, groups = play_held_out(models.config, models.task, Sampler(model.module))
    played = [t for (t,) in groups]
    value = statistics.fmean([t.reward >= 1 for t in played])
    if abs(value - recorded) < 1e-9:
        return value, 0.0

    # The closest choice of a play is the one with the smallest lead of the best token over the
    # second. A play is in doubt if rounding moves leads by as much.
    def leads(model):
        for t in played:
            at = torch.from_numpy(t.sampled).nonzero()[:, 0]
            best_N2 = model(torch.tensor(t.tokens)[None], at=(0, at))[0].double().topk(2).values
            yield best_N2[:, 0] - best_N2[:, 1]

    exact = list(leads(model))
    del model
    rounded = list(leads(make_model(1)))
    most = FACTOR * max((x - y).abs().max().item() for x, y in zip(exact, rounded))
    return value, statistics.fmean([x.min().item() <= most for x in exact])
