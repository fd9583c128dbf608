"""GRPO on multi-turn tasks: play each prompt several times, and make the better games likelier.

Two rules make a run the same on any number of ranks, until rounding tips a draw between two tokens.
**Every loss is a sum over sampled tokens, divided by Z**, the number of sampled tokens in the
minibatch on all ranks. So gradients are summed over ranks and never averaged. **Each sampling draw
depends only on (seed, step, group, rollout)**, and never on the rank.

    python train_grpo.py core                                   # learn `guess`, on one process
    torchrun --nproc-per-node 2 train_grpo.py core --plan c2    # 2 ranks share each row's tokens
    python train_grpo.py --help                                 # the full version, with all flags

A group is the rollouts, or games, of one prompt. Rollout i has the reward R_i and sampled tokens t.
Their log-probs under softmax(logits / temperature) are lp_t now, and were old_t when sampled. H_t
is the entropy of the policy's distribution at t. The full version adds (4) importance weights, (6)
a critic, (8) experts, and the GRPO paper's scaling of (1), mean over each rollout, and KL penalty.

    (1)  A_i  = R_i - mean of the group's rewards
    (2)  r_t  = exp(lp_t - old_t)
    (3)  l_t  = -min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)  gradient -r_t A_i lp_t', or 0
    (5)  l_t <- l_t - entropy_coef H_t
    (7)  loss = sum of l_t / Z over all ranks

Letters in names are dimensions:  B rows   G rollouts of a group   N sampled tokens   V vocabulary
M width   S targets of a row: its tokens but the first   s this rank's share of S
"""

import argparse
import copy
import datetime
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

import models
import parallel
from ring_attention import simple_ring_attention, zigzag_indices
from tree_attention import simple_tree_logprobs

# 1. Settings, and random numbers ----------------------------------------------------------------


@dataclass
class SimpleConfig:
    """The settings of a run. The full version has a flag for each."""

    # the run
    seed: int = 0  # of weights, data and sampling
    steps: int = 150  # batches of rollouts
    # the task
    size: int = 7  # guess: numbers
    turns: int = 4  # guess: answers allowed
    # the model
    layers: int = 3  # decoder layers
    hidden: int = 96  # model width
    heads: int = 4  # query heads; half as many key heads
    dtype: str = "float32"  # of weights and products: float32 or float64
    # rollouts
    prompts: int = 28  # groups of a step, over all ranks; a step is one batch of rollouts
    group: int = 16  # rollouts of one prompt
    max_new_tokens: int = 16  # limit of a rollout after its prompt, the task's replies included
    temperature: float = 1.0  # of sampling and of every log-prob
    # the loss
    clip_low: float = 0.2  # ratio clip below 1
    clip_high: float = 0.28  # ratio clip above 1; 0.28 is DAPO's
    entropy_coef: float = 0.02  # weight of the entropy bonus
    # the optimizer
    minibatches: int = 2  # optimizer steps for each batch of rollouts
    lr: float = 1e-3  # AdamW
    lr_warmup: int = 5  # steps of linear warm-up, at most --steps; 0: none
    beta2: float = 0.99  # AdamW
    max_grad_norm: float = 1.0  # clip the global norm
    plan: str = ""  # d: data, t: tensor, c: context (ring), and the number of ranks, such as d2
    tree: str = "disabled"  # sparse: compute each prefix that rollouts share only once
    # output
    eval_every: int = 10  # steps between evaluations; the last step always evaluates
    eval_prompts: int = 70  # prompts of one evaluation; guess repeats its few secrets


# Second number of the key that draws a prompt; separates training from evaluation.
ROLLOUT = 1
EVALUATION = 2


def uniforms(key, count):
    """Return `count` numbers in [0, 1). They depend only on `key`, non-negative integers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key))).random(count)


# 2. The task ------------------------------------------------------------------------------------


def deal(seed, index, size) -> int:
    """Return card `index` of an endless row of shuffled decks of 0..size-1."""
    # Each card comes equally often. Size 3: deck 0 is dealt at indices 0 1 2, deck 1 at 3 4 5.
    deck, position = divmod(index, size)
    return int(np.random.default_rng([seed, deck]).permutation(size)[position])


class Guess:
    """Find a hidden number: answer `number .`, hear `higher` or `lower`, up to `turns` answers.

        ? 3 . higher 5 . lower 4 .

    Reward 1 for the number. After the last turn without it, 0.2 times the share of answers that
    agreed with the replies before them: little, so that finding the number always pays more. A
    malformed answer ends the game with 0.

    `prompt` begins a group. It takes a numpy Generator, the prompt's number in the run or in the
    evaluation, and whether it is held out, and returns (state, prompt tokens). `reply` takes a
    state and the tokens of a turn, and returns (new state, reply tokens, reward). A reply of None
    ends the game. A rollout that reaches its limit of tokens keeps the reward of its earlier turns.
    A state is a tuple that never changes, so rollouts can share it.
    """

    def __init__(self, config):
        self.size = config.size
        self.turns = config.turns
        self.seed = config.seed
        self.names = [str(n) for n in range(self.size)] + ["?", "higher", "lower", "."]
        self.vocab_size = len(self.names)
        self.end = (self.size + 3,)  # `.`, the token that ends a turn

    def prompt(self, rng, index, held_out):
        # There are only 7 secrets, so evaluation plays the training secrets, each equally often.
        secret = index % self.size if held_out else deal(self.seed, index, self.size)
        return (secret, 1, 0, self.size - 1, 0), [self.size]  # the state of `reply`, and `?`

    def reply(self, state, answer):
        # low..high: the numbers that are still possible. agreeing: answers that were in the range.
        secret, turn, low, high, agreeing = state
        if len(answer) != 2 or answer[0] >= self.size:
            return state, None, 0.0
        number = answer[0]
        if low <= number <= high:
            agreeing += 1

        if number == secret:
            return state, None, 1.0
        if turn == self.turns:
            return state, None, 0.2 * agreeing / self.turns
        if number < secret:
            return (secret, turn + 1, max(low, number + 1), high, agreeing), [self.size + 1], 0.0
        return (secret, turn + 1, low, min(high, number - 1), agreeing), [self.size + 2], 0.0

    def show(self, tokens):
        return " ".join(self.names[t] if t < len(self.names) else f"<{t}>" for t in tokens)


# 3. Rollouts ------------------------------------------------------------------------------------
# One rollout of `guess`, as `models.Row` keeps it. The policy samples `3 .` and `5 .`. The task's
# reply waits in `queue` and is appended in place of a sampled token. The model reads token t at
# position t, and its state there predicts target t, which is token t + 1.
#
#     index, position t   0     1     2        3        4     5
#     tokens[t]           ?     3     .        higher   5     .
#     target t            3     .     higher   5        .
#     mask[t]             1     1     0        1        1           1: sampled, so it is trained on
#     logprobs[t]         lp    lp    0        lp       lp          of the policy that sampled
#     draws[t]            u     u     unused   u        u           what sampled target t, in [0, 1)
#
# `draws` begins with the first token after the prompt, which has one token here. Four turns have 8
# sampled tokens and 3 replies: 11 new tokens, below the default limit of 16.


class Episode(models.Row):
    """One rollout: its tokens and the state of its game."""

    def __init__(self, key, group, number, state, prompt, limit):
        # key is (seed, step), so draws do not depend on the rank or on other rollouts in the batch.
        super().__init__(prompt, uniforms((*key, group, number), limit))
        self.key = key
        self.group = group  # number of the group in the step
        self.number = number  # of the rollout in its group
        self.state = state  # what the task remembers
        self.reward = 0.0  # the sum over the turns so far
        self.turn = len(prompt)  # index of the first token of the current turn: 1, then 4

    def end_turn(self, task):
        """Give the finished turn to the task. Return whether the rollout goes on."""
        return self.hear(*task.reply(self.state, self.tokens[self.turn :]))

    def hear(self, state, reply, reward):
        """Take the task's answer to a turn. Return whether the rollout goes on."""
        self.state = state
        self.reward += float(reward)
        if reply is None:
            return False

        # The next turn begins after the reply, which generation appends from the queue.
        self.queue.extend(reply)
        self.turn = len(self.tokens) + len(reply)
        return True


@dataclass
class Batch:
    """The rollouts of a step."""

    groups: dict  # number -> episodes, of the groups that this rank has played
    kept: list  # numbers of the groups of all ranks that are trained on, in order
    count: int  # minibatches

    def minibatches(self):
        """Yield this rank's episodes of each minibatch, which has whole groups."""
        # 5 groups in 2 minibatches are groups 0 1 and 2 3 4. With d = 2, rank 0 has played groups
        # 0 2 4, so it yields its episodes of 0, then of 2 and 4.
        cuts = [m * len(self.kept) // self.count for m in range(self.count + 1)]
        for first, last in itertools.pairwise(cuts):
            yield [e for n in self.kept[first:last] for e in self.groups.get(n, [])]


@dataclass
class SimpleSource:
    """Plays the rollouts of a step, and evaluates."""

    config: SimpleConfig
    task: Guess
    trainer: "SimpleTrainer"
    first_step: int = 0  # above 0 in a run that is resumed, which the full version does

    def get(self, step) -> Batch:
        """Return the batch of a step: `group` rollouts of each prompt."""
        c = self.config
        groups = self.play(ROLLOUT, step, c.prompts, c.group, c.temperature)
        return Batch(groups, range(c.prompts), c.minibatches)

    def evaluate(self, step) -> float:
        """Return the fraction of evaluation prompts that greedy decoding solves."""
        groups = self.play(EVALUATION, 0, self.config.eval_prompts, 1, 0.0)
        count = len([episode for (episode,) in groups.values() if episode.reward >= 1])
        return self.trainer.total(count) / self.config.eval_prompts

    def play(self, stream, step, prompts, rollouts, temperature):
        """Play `rollouts` of each prompt. Return {group: episodes} of this rank's groups."""
        # Group g is played on rank g modulo d: rank 1 of 2 plays 1, 3, 5. Its prompt depends on its
        # number, not on the rank. Ranks of one c or t group play the same episodes.
        seed, limit = self.config.seed, self.config.max_new_tokens
        data_ranks = self.trainer.grid.group["d"]
        groups = {}
        for g in range(dist.get_rank(data_ranks), prompts, dist.get_world_size(data_ranks)):
            rng = np.random.default_rng([seed, stream, step, g])
            state, prompt = self.task.prompt(rng, step * prompts + g, stream == EVALUATION)
            groups[g] = [Episode((seed, step), g, n, state, prompt, limit) for n in range(rollouts)]

        # One token of every rollout at a time. A rollout that samples an end token ends its turn.
        models.simple_generate(
            self.trainer.model, list(itertools.chain(*groups.values())), max_new_tokens=limit,
            temperature=temperature, end=self.task.end, after=lambda e: e.end_turn(self.task),
        )  # fmt: skip
        return groups


# 4. Advantages, the loss, and its log-probs: by rows, a ring or a tree ----------------------------


def simple_advantages(rewards_G):
    """Return A of (1), an array (G,), for the float64 rewards (G,) of one group."""
    # Equal rewards say nothing, and get exact zeros: in floats, the mean of .1 .1 .1 is not .1.
    if (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)

    # Rewards 1 0 0 1 become .5 -.5 -.5 .5. The mean is a baseline that nobody has to learn.
    return rewards_G - rewards_G.mean()  # (1)


def simple_loss(config, episodes, sampled, logprobs_N, entropy_N, Z):
    """Return this rank's part of the loss, (2) to (7).

    sampled: N pairs (b, t), target t of episodes[b]. logprobs_N and entropy_N are their lp and H.
    Z: sampled tokens of the minibatch on all ranks.
    """
    # `prepare` has set `old` and `advantage`. Take one number for each sampled token.
    old_N = logprobs_N.new_tensor([episodes[b].old[t] for b, t in sampled])
    advantage_N = logprobs_N.new_tensor([episodes[b].advantage for b, t in sampled])

    # How much likelier is the token now? In the first minibatch the ratio is 1 up to rounding.
    ratio_N = torch.exp(logprobs_N - old_N)  # (2)

    # Take the worse of the gain r A and the gain at the clipped ratio. A token that has moved far
    # enough in the direction of A has a constant gain, and no gradient: with A = 1 and r = 1.5,
    # min(1.5, 1.28). A move in the wrong direction is never clipped: with r = .5, min(.5, .8) = r.
    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    l_N = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)  # (3)

    # The entropy bonus keeps the policy exploring: if all rollouts are the same, all A are 0.
    l_N = l_N - config.entropy_coef * entropy_N  # (5)
    return l_N.sum() / Z  # (7)


def score_rows(config, model, episodes, ring):
    """Return the sampled tokens as pairs (b, t), their log-probs (N,) and their entropies (N,)."""
    # Each of c ranks scores a share of a row. Pad rows on the right to a multiple of 2c targets.
    # No real token attends to padding. A late chunk costs more than an early one, so the zigzag
    # gives each rank one of both: of chunks 0 1 2 3, rank 0 has 0 3 and rank 1 has 1 2.
    c = dist.get_world_size(ring)
    S = max(len(episode.mask) for episode in episodes)
    S += -S % (2 * c)
    positions_s = zigzag_indices(S, dist.get_rank(ring), c)
    tokens = torch.tensor([e.tokens + [0] * (S + 1 - len(e.tokens)) for e in episodes])
    mask_BS = torch.tensor([e.mask + [False] * (S - len(e.mask)) for e in episodes])

    # Keys and values travel around a ring. With one rank, it is plain causal attention.
    def attention(q, k, v, /, *, layer, scale):
        return simple_ring_attention(q, k, v, group=ring)

    # RoPE needs each token's position in the full row. The head runs only where the policy sampled
    # the target, not at replies or padding.
    inputs_Bs, targets_Bs = tokens[:, positions_s], tokens[:, positions_s + 1]
    hidden_BsM = model.hidden(inputs_Bs, positions=positions_s[None], attention=attention)
    mask_Bs = mask_BS[:, positions_s]
    states_NM, targets_N = hidden_BsM[mask_Bs], targets_Bs[mask_Bs]
    scores = model.logprobs(states_NM, targets_N, temperature=config.temperature)
    sampled = [(b, positions_s[column].item()) for b, column in mask_Bs.nonzero().tolist()]
    return sampled, *scores


def score_tree(config, model, episodes, ring):
    """Return what `score_rows` returns, by one forward of the tree of all prefixes."""

    # The tree keeps only the first result of `logprobs`, so that has both scores in one tensor.
    def logprobs(hidden_NM, targets_N):
        scores = model.logprobs(hidden_NM, targets_N, temperature=config.temperature)
        return torch.stack(scores, -1), None

    stacked = SimpleNamespace(hidden=model.hidden, logprobs=logprobs)
    found = simple_tree_logprobs(stacked, [torch.tensor(e.tokens) for e in episodes])
    sampled = [(b, t) for b, e in enumerate(episodes) for t in range(len(e.mask)) if e.mask[t]]
    scores_N2 = torch.stack([found[b][t] for b, t in sampled])
    return sampled, *scores_N2.unbind(-1)


# 5. The trainer ---------------------------------------------------------------------------------


class SimpleTrainer:
    """The policy and its optimizer. All ranks call every method, each with its own episodes."""

    def __init__(self, config, model, grid):
        # The plan and the tree are decided here, once. `model` is whole, the same on all ranks.
        # grid.group has the process groups of this rank along the axes d, t, c, and d with c: "dc".
        self.config = config
        self.grid = grid
        self.model = model
        parallel.tensor_parallel(model, grid.group["t"])
        self.score = score_tree if config.tree == "sparse" else score_rows
        options = dict(lr=config.lr, betas=(0.9, config.beta2), weight_decay=0.0)
        self.optimizer = torch.optim.AdamW(model.parameters(), **options)

    def total(self, x, axes="d") -> float:
        """Return the sum of a number over ranks. Default: the ranks with different episodes."""
        x = torch.tensor(x, dtype=torch.float64)
        return parallel.all_reduce_sum(x, self.grid.group[axes]).item()

    def prepare(self, batch) -> dict:
        """Set what has no gradient: A of (1), old of (2). Return metrics of all ranks."""
        # This policy sampled the tokens, so its sampling log-probs are the old ones.
        rewards = []
        for episodes in batch.groups.values():
            rewards_G = np.array([episode.reward for episode in episodes])
            for episode, advantage in zip(episodes, simple_advantages(rewards_G)):
                episode.advantage = advantage
                episode.old = episode.logprobs
            rewards += rewards_G.tolist()
        return {"reward/mean": self.total(sum(rewards)) / self.total(len(rewards))}

    def loss_denominator(self, episodes) -> int:
        """Count the sampled tokens of these rows, which c and t ranks share. Z sums over d."""
        return sum(sum(episode.mask) for episode in episodes)

    def learning_rate(self, step) -> float:
        """Return the learning rate of a step: a linear warm-up, then a linear decay."""
        # With a warm-up of 2, a run of 6 steps has the rates 1/2 1 1 3/4 1/2 1/4, times lr.
        warmup = min(self.config.lr_warmup, self.config.steps)
        if step < warmup:
            return self.config.lr * (step + 1) / warmup
        return self.config.lr * (self.config.steps - step) / (self.config.steps - warmup)

    def forward_backward(self, episodes, Z) -> dict:
        """Compute the gradient of this rank's part of the loss. Return the loss of all ranks."""
        self.optimizer.zero_grad()
        scores = self.score(self.config, self.model, episodes, self.grid.group["c"])
        loss = simple_loss(self.config, episodes, *scores, Z)
        loss.backward()

        # Sum over d, with different episodes, and c, with different tokens. t ranks have the same.
        return {"loss": self.total(loss.item(), "dc")}

    def optim_step(self, lr) -> dict:
        """Sum the gradients over ranks, clip them by their global norm, and update the weights."""
        # There is no division by the number of ranks, because Z counted the tokens of all ranks.
        parallel.simple_reduce_gradients(self.model, self.grid)
        norm = parallel.simple_clip_grad_norm(self.model, self.config.max_grad_norm, self.grid)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return {"grad_norm": norm.item()}

    def push_weights(self):
        """Do nothing, because the policy samples by itself. The full version has a second model."""


# 6. The loop ------------------------------------------------------------------------------------


def evaluates(config, step) -> bool:
    """Return whether a step ends with an evaluation."""
    return step + 1 == config.steps or (step + 1) % config.eval_every == 0


def train(config, source, trainer, log):
    """Train, and return the fraction of prompts that the last evaluation solved."""
    # The full version calls this loop with other source, trainer and log objects.
    solved = None
    for step in range(source.first_step, config.steps):
        # Collect: the policy plays each prompt several times, and the task rewards each rollout.
        batch = source.get(step)

        # Compute advantages and old log-probs once. The updates change the policy, not these.
        metrics = trainer.prepare(batch)

        # Take several optimizer steps on a batch. Ranks divide their parts of the loss by Z, so
        # counts are summed first. Z is 0 only in the full version, which may drop all rollouts.
        updates = []
        for minibatch in batch.minibatches():
            Z = trainer.total(trainer.loss_denominator(minibatch))
            if Z > 0:
                update = trainer.forward_backward(minibatch, Z)
                updates.append(update | trainer.optim_step(trainer.learning_rate(step)))

        trainer.push_weights()
        solved = source.evaluate(step) if evaluates(config, step) else None
        log.step(step, batch, metrics, updates, solved)
    return solved


class SimpleLog:
    """Writes a JSON line for each step to a file. Rank 0 also prints those with an evaluation."""

    def __init__(self, file):
        self.file = file

    def step(self, step, batch, metrics, updates, solved):
        """Log a step: the sum of its minibatches' losses, and the last minibatch's norm."""
        loss = sum(update["loss"] for update in updates)
        line = {"step": step, "loss": loss, "grad_norm": updates[-1]["grad_norm"]}
        text = json.dumps(line | metrics | {"solved": solved})
        print(text, file=self.file, flush=True)
        if solved is not None and dist.get_rank() == 0:
            print(text, flush=True)


# 7. The check: steps by loops over tokens -------------------------------------------------------


def plain_step(config, model, optimizer, batch, updates):
    """Redo a step of 3 groups with plain loops, given its draws. Return found minus expected."""
    errors = []
    minibatches = batch.groups[0], batch.groups[1] + batch.groups[2]
    for episodes, update in zip(minibatches, updates, strict=True):
        loss = 0.0
        for e in episodes:
            # One forward without padding or cache gives the log-probs (S, V) of all targets.
            rewards = [other.reward for other in batch.groups[e.group]]
            A = e.reward - sum(rewards) / len(rewards)  # (1)
            logits_SV = model.logits(model.hidden(torch.tensor([e.tokens[:-1]]))[0])
            logp_SV = (logits_SV / config.temperature).log_softmax(-1)
            for t in np.flatnonzero(e.mask):
                lp = logp_SV[t, e.tokens[t + 1]]
                r = (lp - e.logprobs[t]).exp()  # (2)
                clipped = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
                loss = loss - min(r * A, clipped * A)  # (3)
                loss = loss + config.entropy_coef * (logp_SV[t].exp() * logp_SV[t]).sum()  # (5)

                # The first minibatch has the weights that sampled. Inverse-CDF sampling: of
                # p = .2 .5 .3, the draw .6 takes token 1.
                if update is updates[0]:
                    token = (logp_SV[t].exp().cumsum(0) <= e.draws[t]).sum().item()
                    errors += [e.tokens[t + 1] - token, e.logprobs[t] - lp.item()]
        loss = loss / sum(sum(e.mask) for e in episodes)  # (7)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        errors += [update["loss"] - loss.item(), update["grad_norm"] - norm.item()]
    return errors


def core_check():
    """Return the largest error of a game, and of runs on one process, by rows and by a tree."""
    # Of these answers, 3 and 1 agree with the replies before them. The second 1 and 4 do not.
    task = Guess(SimpleConfig())
    episode = Episode((), 0, 0, *task.prompt(None, 2, True), 0)
    for number in (3, 1, 1, 4):
        episode.tokens += [*episode.queue, number, *task.end]
        episode.queue.clear()
        episode.end_turn(task)
    game = "? 3 . lower 1 . higher 1 . higher 4 ."
    errors = [episode.reward - 0.1, task.show(episode.tokens) != game]

    config = SimpleConfig(
        seed=9, steps=4, size=2, turns=2, prompts=3, group=6, max_new_tokens=7, layers=1, hidden=8,
        heads=2, dtype="float64", temperature=0.8, lr=0.03, lr_warmup=2, max_grad_norm=0.1,
        eval_every=3, eval_prompts=2,
    )  # fmt: skip
    for tree in ("disabled", "sparse"):
        config.tree = tree
        alone = simple_policy(config)
        for weight in alone.parameters():
            weight.data *= 20 if weight.dim() == 2 else 1  # far from equal probabilities
        trainer = SimpleTrainer(config, copy.deepcopy(alone), parallel.SimpleGrid("d1"))
        record = []
        log = SimpleNamespace(step=lambda *given: record.append(given))
        train(config, SimpleSource(config, Guess(config), trainer), trainer, log)

        # Repeat its four steps, given its draws. Steps 2 and 3 evaluate.
        optimizer = torch.optim.AdamW(alone.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
        for step, batch, metrics, updates, solved in record:
            optimizer.param_groups[0]["lr"] = (0.015, 0.03, 0.03, 0.015)[step]
            errors += plain_step(config, alone, optimizer, batch, updates)
            errors.append((solved is None) != (step < 2))
            errors += [batch.groups[g][0].state[0] - deal(9, 3 * step + g, 2) for g in range(3)]
        for a, b in zip(trainer.model.parameters(), alone.parameters(), strict=True):
            errors += [*(a - b).flatten().tolist(), *(a.grad - b.grad).flatten().tolist()]
    return torch.tensor(errors, dtype=torch.float64).abs().max().item()  # NaN if any error is NaN


# 8. The program ---------------------------------------------------------------------------------


def simple_policy(config):
    """Return a model for `guess` with random weights, the same ones on every rank."""
    shape = models.SimpleConfig(
        vocab_size=Guess(config).vocab_size, num_hidden_layers=config.layers,
        hidden_size=config.hidden, intermediate_size=3 * config.hidden,
        num_attention_heads=config.heads, num_key_value_heads=config.heads // 2,
        head_dim=config.hidden // config.heads,
    )  # fmt: skip
    model = models.SimpleTransformer(shape).to(getattr(torch, config.dtype))
    generator = torch.Generator().manual_seed(config.seed)
    for weight in model.parameters():
        if weight.dim() == 2:  # norms keep their ones. 0.02 is GPT-2's
            weight.data.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    return model


def refuse(reason):
    """End the program before the process group exists. Rank 0 prints a line; every rank fails."""
    # torchrun ends all ranks when one exits, so the others leave rank 0 the time to print.
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)
        sys.exit(1)
    sys.exit(f"train_grpo.py: error: {reason}")


def simple_settings(argv):
    """Return the settings of a command line, and the open file of --log. Refuse what cannot run."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    parser = argparse.ArgumentParser(description="Learn `guess` with the core of train_grpo.py.")
    parser.error = refuse
    parser.add_argument("--seed", type=int, default=SimpleConfig.seed)
    parser.add_argument("--steps", type=int, default=SimpleConfig.steps)
    parser.add_argument("--dtype", choices=("float32", "float64"), default=SimpleConfig.dtype)
    parser.add_argument("--plan", default=f"d{world}", help="d2, t2 or c2: a letter and all ranks")
    parser.add_argument("--tree", action="store_const", const="sparse", default="disabled")
    parser.add_argument("--log", default=os.devnull, help="file for a JSON line of each step")
    given = vars(parser.parse_args(argv))
    log = given.pop("log")
    config = SimpleConfig(**given)
    if config.steps < 1 or not 0 <= config.seed < 2**63:
        refuse(f"expected --steps >= 1, 0 <= --seed < 2**63, got {config.steps} and {config.seed}")

    # Which plans fit? Each d rank needs a group in every minibatch, and t must divide the key
    # heads. A tree runs on whole sequences and whole layers, so only d goes with it.
    fits = {"d": world <= config.prompts // config.minibatches}
    if config.tree == "disabled":
        fits |= {"t": config.heads // 2 % world == 0, "c": True}
    plans = [f"{letter}{world}" for letter in fits if fits[letter]]
    if config.plan not in plans:
        expected = " or ".join(plans) or "of fewer ranks, because no plan fits"
        refuse(f"expected --plan {expected}, got {config.plan!r} on {world} ranks")

    # Rank 0 alone writes the log.
    try:
        return config, open(log if os.environ.get("RANK", "0") == "0" else os.devnull, "w")
    except OSError as error:
        refuse(f"expected a file that can be written, got --log {log}: {error.strerror}")


def core_main(argv):
    """Check the core, then learn `guess`. Print what is solved in the end."""
    config, log_file = simple_settings(argv)
    torch.set_num_threads(1)  # more threads do not help a small model
    timeout = datetime.timedelta(seconds=60)  # the longest wait for another rank

    # Each rank runs the check alone, in a process group of size 1.
    rank = os.environ.get("RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    error = core_check()
    if rank == "0":
        print(f"two runs against loops over tokens: largest error {error:.1e}", flush=True)
    if not error <= 1e-10:  # rounding is below 1e-12, and a mistake far above
        sys.exit(f"train_grpo.py: error: expected an error of at most 1e-10, got {error:.1e}")

    # Then the ranks of torchrun meet. One process goes on by itself.
    if "RANK" in os.environ:
        dist.destroy_process_group()
        dist.init_process_group("gloo", timeout=timeout)
    grid = parallel.SimpleGrid(config.plan, timeout)
    trainer = SimpleTrainer(config, simple_policy(config), grid)
    source = SimpleSource(config, Guess(config), trainer)
    solved = train(config, source, trainer, SimpleLog(log_file))
    if rank == "0":
        print(f"solved {solved:.2f}", flush=True)
    dist.barrier()  # no rank leaves while another one still needs its connections
    dist.destroy_process_group()


# ================================================================================================
# The core ends here. The full version follows: every flag, other losses, runs that can be resumed.
# ================================================================================================
# The full version: every setting below extends the core's loop and trainer.
#
#   python train_grpo.py                                      # guess: 1.00 solved, 40 s
#   torchrun --nproc-per-node 2 train_grpo.py                 # the same on two processes
#   python train_grpo.py --help                               # every flag, its default, its meaning
#   python train_grpo.py core [--plan t2] [--tree] ..         # the core alone
#   python train_grpo.py plot runs/guess-0 [runs/guess-1 ..]  # reward curves, PNG
#   python train_grpo.py audit runs/guess-0 [--step N]        # audit.py: a step again, by hand
#   python train_grpo.py eval | chat | export runs/guess-0 .. # text.py: pass@k; talk; Hugging Face
#   python train_grpo.py check [--all] | bench                # plans, trees, families | seconds
#
# What it must equal. For rollout i of a group of G with reward R_i, sampled tokens t, log-probs of
# softmax(logits / temperature): lp of the policy now, old of the policy before this step's first
# update, ref of the frozen reference, smp of the sampler; H_t the entropy, sg: no gradient:
#
#   (1)  A_i = R_i - mean R of the group    `group_mean` (Dr.GRPO), and of that
#            / (std R of the group + 1e-4)  `group_std` (GRPO)
#            / (std R of the step + 1e-4)   `batch_std` (LitePPO)
#            * G / (G - 1)                  `leave_one_out` (RLOO)
#        A_i = R_i                          `none` (REINFORCE), or `none_batch` (REINFORCE++):
#              (R_i - mean R) / (std R + 1e-8) over the step's sampled tokens
#        A_t = V(segment) - V(its parent)   `per_branch`: V = mean reward of rollouts below
#        A_t = sum_n lambda^n (u_(t+n) + v_(t+n+1) - v_(t+n))    `gae` (PPO), then
#              (A_t - mean A) / (std A + 1e-8) over the step's sampled tokens; u the rewards, v the
#              critic's values; t + 1 is the next sampled token, whatever stands in between
#        A_t = tch_t - smp_t                `teacher`: tch is its log-prob (distillation)
#        with kl_in `reward`, sampled token t first takes kl_coef k(smp_t - ref_t) off the reward
#   (2)  d_t = lp_t - old_t   r_t = exp(d_t)   s = exp(mean of d_t over the sequence)
#   (3)  l_t, an `objective`:
#            reinforce  -A lp
#            clip       -min(min(r, dual_clip) A, clip(r, 1 - low, 1 + high) A)
#            gspo       the same of s
#            cispo      -sg(min(r, cispo_bound)) A lp
#            sapo       -4 f A / tau            f = sigmoid(tau (r - 1)), tau 1 if A > 0, else 1.05
#            gmpo       -s A                    s of d that is clipped on the side that A asks for
#            dppo       -sg(w) A lp             w = min(r, 20) where the token's probability has
#                                               moved little, else 0
#   (4)  l_t <- sg(x_t) l_t      x = exp(old - smp) of the token or sequence, truncated or masked
#   (5)  l_t <- l_t + kl_coef k(d) - entropy_coef H_t               d = lp_t - ref_t
#            k1: d (its gradient has mean 0: for the reward)   k3: exp(-d) + d - 1
#   (6)  l_t <- l_t + value_coef max((v - g)^2, (clip(v, v_old +- 0.2) - g)^2) / 2
#            with `gae`: v a head on the policy's states, g_t = v_old_t + A_t before whitening
#   (7)  loss = sum_i sum_t w_i l_it / Z          over all ranks and micro-batches of the step
#            token_mean     w_i = 1               Z = sampled tokens
#            sequence_mean  w_i = 1 / tokens_i    Z = sequences with a sampled token
#            constant       w_i = 1               Z = sequences * max_new_tokens
#   (8)  with experts, without --tree, in addition: balance_coef mean_i b_i
#            b_i: (10) of models.py with coef 1
#
# Letters: T targets of a trajectory, its tokens[1:]; B trajectories, padded to one T; P groups of G
# rollouts each; N sampled tokens; S packed tokens. In a tree, K targets of all sequences, of which
# N are different tokens; J pairs (sequence, a token that it holds). L layers of E experts each; M
# the model's width; X columns of a table. Small letters are one rank's share.
#
# DEVIATES: group_std uses TRL's Bessel std and 1e-4 (the paper gives neither); without --proximal
# old is smp, or the current policy itself if a step has one update and its weights sampled, so that
# rounding cannot clip; the log-ratio of (2) is clamped to +-10 before exp; PPO's critic shares the
# policy's trunk, and a truncated trajectory ends with value 0. Not in this file: top-p, which
# biases every ratio. Pinned by tests/test_loss.py::test_loss_and_gradient_are_trls. A ratio of a
# sequence has one gradient for all its tokens (verl: each its own, which is another sum if A or x
# differ); a token that (4) masks stays in Z (verl's rejection takes it out); `none_batch` has a
# biased variance (verl: unbiased). Pinned by
# tests/test_objectives.py::test_loss_and_gradient_are_the_sources.

import bisect  # noqa: E402
import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import functools  # noqa: E402
import importlib.util  # noqa: E402
import inspect  # noqa: E402
import math  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import textwrap  # noqa: E402
import traceback  # noqa: E402
import zlib  # noqa: E402
from collections.abc import Callable  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from dataclasses import field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Literal, NamedTuple, get_args  # noqa: E402

from tqdm import tqdm  # noqa: E402

import ring_attention  # noqa: E402
from models import ModelConfig, Transformer, generate  # noqa: E402
from parallel import (  # noqa: E402
    Grid, LocalOptimizer, PackedBatches, Plan, Stop, agree, clip_grad_norm, connect, copy_weights,
    gather_replica, local, lr_factor, newest_checkpoint, parallelize, read_checkpoint, read_newest,
    read_training, reduce_gradients, summed, training_tensors, write_checkpoint,
)  # fmt: skip
from tree_attention import (  # noqa: E402
    Cost, TokenTrie, packed_tree, packed_tree_attention, redistribute, tree_backward, wanted_edges,
)  # fmt: skip


# 9. Settings: flags, their help, what cannot be combined --------------------------------------
# Read this section to look up a flag or to add one. If you know what a setting means, skip all of
# it but the fields of Config and the table of papers.

# What --help ends with. tests/RECIPES.md has the settings of other code bases that mean the same.
PAPERS = """\
Papers and their settings. The rest stays at its default, and each paper has its own learning rates.

  GRPO         2402.03300  --advantage group_std --aggregation sequence_mean --clip-high 0.2
                           --kl-coef 0.04 --entropy-coef 0
  Dr.GRPO      2503.20783  --aggregation constant --clip-high 0.2 --entropy-coef 0
  RLOO         2402.14740  --advantage leave_one_out --kl-coef 0.05 --kl k1 --kl-in reward
                           --minibatches 1 --entropy-coef 0
  REINFORCE++  2501.03262  --advantage none_batch --kl-coef 0.01 --kl k1 --kl-in reward
                           --clip-high 0.2 --entropy-coef 0
  LitePPO      2508.08221  --advantage batch_std --clip-high 0.2 --entropy-coef 0
  PPO          1707.06347  --advantage gae --clip-high 0.2 --entropy-coef 0
  dual clip    1912.09729  --dual-clip 3
  DAPO         2503.14476  --advantage group_std --dynamic-sampling --max-rounds 3
                           --overlong filter --overlong-buffer 4 --entropy-coef 0
  CISPO        2506.13585  --objective cispo --advantage group_std --entropy-coef 0
  GSPO         2507.18071  --objective gspo --advantage group_std --aggregation sequence_mean
                           --clip-low 3e-4 --clip-high 4e-4 --entropy-coef 0
  GMPO         2507.20673  --objective gmpo --advantage group_std --aggregation sequence_mean
                           --clip-low 0.4 --clip-high 0.4 --entropy-coef 0
  SAPO         2511.20347  --objective sapo --advantage group_std --aggregation sequence_mean
                           --entropy-coef 0
  DPPO         2602.04879  --objective dppo --clip-low 0.15 --clip-high 0.15
                           --advantage group_std --entropy-coef 0
  decoupled PPO  2110.00641  --proximal --importance-cap 2: truncated importance sampling
  IcePop         2510.18855  --proximal --importance mask --importance-low 0.5 --importance-cap 5
  sequence mask  TRL         --proximal --importance mask --importance-of sequence
                             --importance-cap 3
  tree rollouts  2506.11902  --forks 2 --fork-turns 2 --advantage per_branch
  distillation, on-policy    --teacher DIR --objective reinforce --minibatches 1
"""

# Choices that several fields share, or that are too long for the line of a field.
Dtype = Literal["float32", "float64", "bfloat16"]
Schedule = Literal["1f1b", "interleaved1f1b", "zbv"]


class Plans(NamedTuple):
    """The plans of --plan: A|B, two plans of the same ranks, or B alone."""

    generator: Plan | None  # A; None: the generator takes t and e of the trainer's plan
    trainer: Plan | None  # B; None without --plan: all ranks are data parallel


@functools.cache
def parse_plans(text) -> Plans:
    """Return the plans of --plan, or raise ValueError."""
    # One plan is the trainer's. Of two, A|B, the first is the generator's.
    if not text:
        return Plans(None, None)
    plans = parallel.plans_on_same_ranks(text)
    if len(plans) > 2:
        raise ValueError(f"--plan {text}: A|B has two plans, the generator's and the trainer's, "
                         f"got {len(plans)}")  # fmt: skip
    if len(plans) == 1:
        return Plans(None, plans[0])
    parallel.require_generator_plan(plans[0])
    return Plans(*plans)


@dataclass
class Config(SimpleConfig):
    """The command line: a field is a flag, and the comment after it is the flag's help.

    The comment above a group of fields is the group's title in --help. A Literal lists the values
    that a flag may have. "" is the default that the help explains as "empty".
    """

    # the run
    task: str = "guess"  # guess | jsonl | FILE.py:Class
    out: str = ""  # directory of the run; empty: the first free runs/TASK-N
    resume: bool = False  # go on from the newest checkpoint in --out; begin a run if there is none
    # the task
    data: str = ""  # jsonl: file of lines, {"question", "answer"} or {"messages", "answer"}
    template: str = ""  # jsonl: chat (its own) | raw | text with {question}; empty: chat, else raw
    instruction: str = "End with '#### ' and the answer."  # jsonl: a line after each question
    system: str = ""  # jsonl: the system's message, in a chat template
    reward: str = ""  # jsonl: FILE.py:function of (text, row); empty: what follows ####
    demos: int = 0  # supervised steps on the task's demonstrations before the loop (demos.jsonl)
    # the model
    model: str = ""  # Hugging Face checkpoint directory; empty: random weights of the shape below
    dtype: Dtype = "float32"  # of the trainer's weights
    compute_dtype: Literal["", Dtype] = ""  # of matrix products, coarser than --dtype; empty: same
    generator_dtype: Literal["", Dtype] = ""  # of the generator's weights; empty: --compute-dtype
    device: Literal["", "cpu", "cuda"] = ""  # empty: cuda where there is one
    # rollouts
    staleness: int = 0  # K: batch b is sampled with the weights of step b - K; 0: on-policy
    batch_rows: int = 1024  # rollouts that a rank decodes at a time; a new one enters as one ends
    forks: int = 1  # children of a trajectory at a turn boundary (tree rollouts)
    fork_turns: int = 0  # turn boundaries that fork; group must divide by forks ** fork_turns
    dynamic_sampling: bool = False  # drop groups whose rewards are all equal (DAPO)
    max_rounds: int = 1  # rounds of rollouts to replace dropped groups; 1: only drop
    overlong: Literal["keep", "filter"] = "keep"  # truncated trajectories; filter: not in the loss
    overlong_buffer: int = 0  # last tokens of max_new_tokens, over which the reward falls by 1
    # the loss
    advantage: str = None  # (1) of the equations; gae is PPO's, with a critic
    teacher: str = ""  # checkpoint directory: each token's advantage is its log-prob's gain there
    aggregation: str = "token_mean"  # w and Z of (7)
    objective: str = "clip"  # (3) of the equations
    dual_clip: float = 0.0  # clip, gspo: bound of the ratio where A is negative; 0: none
    cispo_bound: float = 5.0  # cispo: the largest weight
    kl: Literal["k1", "k3"] = "k3"  # estimator of the KL, (5) of the equations
    kl_coef: float = 0.0  # weight of the KL to the frozen reference; 0: no reference is kept
    kl_in: Literal["loss", "reward"] = "loss"  # where the KL enters
    entropy_coef: float = None  # weight of the entropy bonus
    proximal: bool = False  # old log-probs from a trainer pass; otherwise the sampler's
    importance: Literal["truncate", "mask"] = "truncate"  # (4): of weights out of bounds
    importance_of: Literal["token", "sequence", "geometric"] = "token"  # whose p_old / p_sampler
    importance_low: float = 0.0  # lower bound of p_old / p_sampler
    importance_cap: float = 0.0  # upper bound of p_old / p_sampler; 0: no (4)
    gae_lambda: float = 0.95  # gae: 0: one step and the critic; 1: rewards to the end
    value_coef: float = 0.5  # gae: weight of the critic's loss
    balance_coef: float = 0.0  # experts: weight of the loss that balances them; not with --tree
    router_bias_rate: float = 0.0  # experts: step of the routers' bias after an update; 0: no bias
    # the optimizer
    lr: float = None  # AdamW
    lr_first_step: Literal["nonzero", "zero"] = "nonzero"  # a warm-up of 5 begins with 1/5, or 0
    lr_decay: Literal["constant", "linear", "cosine"] = "linear"  # from there to the last step
    weight_decay: float = 0.0  # AdamW, decoupled
    micro_tokens: int = 16384  # tokens of a micro-batch, or of its tree; a longer one runs alone
    data_parallel: Literal["ddp", "fsdp", "zero1"] = "ddp"  # zero1: ddp with its moments sharded
    shard_ranks: int = 0  # fsdp: how many ranks share one copy of the weights (HSDP); 0: all of d
    offload: bool = False  # fsdp: shards, gradients and optimizer stay on the CPU
    compile: bool = False  # torch.compile each layer (needs a C++ compiler on a CPU)
    ac: Literal["none", "full", "op"] = "none"  # recompute activations; op: not products, messages
    plan: str = ""  # d2t2, p2c2, archon:d2; A|B: generator A, trainer B
    cp_method: Literal["ring", "allgather", "ulysses"] = "ring"  # of the c ranks of --plan
    debug: bool = False  # the plan's c: raise on all ranks where attention is not finite; slow
    pp_schedule: Schedule = "1f1b"  # of the p ranks of --plan
    tree: Literal["disabled", "sparse", "dta"] = "disabled"  # share prefixes; dta: chunk by chunk
    chunk_tokens: int = 0  # tokens of a chunk, with --tree dta
    recompute: bool = False  # with --tree dta: run the chunks of a path again, not keep them
    # output
    save_every: int = 50  # steps between checkpoints, and the last; 0: only the last
    keep: int = 2  # newest checkpoints kept
    log_rollouts: Literal["all", "some", "none"] = "some"  # to rollouts.jsonl; `audit` needs some
    tensorboard: bool = False  # also write TensorBoard events (needs tensorboard)
    timeout: int = 60  # seconds that a rank waits for another before the run ends
    threads: int = 1  # CPU threads of each rank

    # Defaults that depend on what the loop begins with: random weights, weights that demonstrations
    # have taught, or a checkpoint's. Random weights need long steps, and a bonus for still trying
    # everything. The same would undo in a few steps what the other two know (tests/RESULTS.md).
    # A field of this table is None until __post_init__ has looked it up.
    BY_START = dict(
        lr=dict(random=1e-3, demos=1e-4, model=1e-6),
        entropy_coef=dict(random=0.02, demos=0.0, model=0.0),
    )

    # What a resumed run may change: none of it enters the steps that follow, beyond rounding.
    FREE = (
        "out", "resume", "steps", "eval_every", "save_every", "keep", "log_rollouts", "tensorboard",
        "timeout", "threads", "micro_tokens", "batch_rows", "device", "plan", "data_parallel",
        "cp_method", "debug", "pp_schedule", "tree", "chunk_tokens", "recompute", "ac",
        "shard_ranks", "offload", "compile",
    )  # fmt: skip

    # Numbers meet float32 tensors and int64 tensors, which cannot hold anything larger.
    LARGEST = {int: 2**63 - 1, float: torch.finfo(torch.float32).max / 2}
    YEAR = 365 * 24 * 3600  # in seconds: --timeout goes to a clock in C++ that overflows later
    ZERO = "lr_warmup", "gae_lambda", "save_every"  # may be 0

    def __post_init__(self):
        # A checkpoint that demonstrations have taught more is still a checkpoint. From here on the
        # fields are numbers, also in config.json: a resumed run has those that it began with.
        start = "demos" if self.demos else "random"
        if self.model:
            start = "model"
        for name, defaults in self.BY_START.items():
            if getattr(self, name) is None:
                setattr(self, name, defaults[start])
        if self.advantage is None:
            self.advantage = "teacher" if self.teacher else "group_mean"

    # What several fields decide together, said once. None of these is a flag.

    @property
    def plans(self) -> Plans:
        """Return the generator's and the trainer's Plan; ValueError for a --plan that is wrong."""
        return parse_plans(self.plan)

    @property
    def reads_text(self) -> bool:
        """Return whether the task may read TEXT_FLAGS: `jsonl` does, and one from a file may."""
        return self.task == "jsonl" or self.task not in TASKS

    @property
    def has_whole_template(self) -> bool:
        """Return whether --template is the text of a whole prompt."""
        return self.template not in ("", "chat", "raw")

    @property
    def compute(self) -> str:
        """Return the name of the dtype in which the trainer computes."""
        return self.compute_dtype or self.dtype

    @property
    def is_mixed(self) -> bool:
        """Return whether the optimizer updates master weights finer than the model's weights."""
        return self.compute != self.dtype

    @property
    def rollout_dtype(self) -> str:
        """Return the name of the dtype of the generator's weights, to which a push rounds."""
        return self.generator_dtype or self.compute

    def check(self) -> "Config":
        """Raise ValueError for settings that cannot run, before anything is built or written."""
        # Values first: the combinations compute with them.
        wrong = self._wrong_values()
        if not wrong:
            wrong = [*self._ignored_flags(), *self._wrong_plans()]
            wrong += [text for is_wrong, text in self._wrong_combinations() if is_wrong]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def _defaults(self, name):
        """Return the defaults of a field: one, or one for each start."""
        return self.BY_START.get(name, {"always": getattr(Config, name)}).values()

    def _wrong_values(self) -> list[str]:
        """Return an error for each field whose value is wrong whatever the other fields are."""
        # One error a field: the type first, since the comparisons need numbers. An int given for a
        # float is stored as a float.
        wrong = []
        at_most = dict(gae_lambda=1, timeout=self.YEAR, staleness=MAX_STALENESS)
        for f in dataclasses.fields(self):
            flag = _flag(f.name)
            value = getattr(self, f.name)
            choices = choices_of(f)
            if f.type is float and type(value) is int:
                setattr(self, f.name, float(value))
            elif choices and value not in choices:
                wrong.append(f"{flag} must be one of {_shown(choices)}, got {value!r}")
            elif not choices and type(value) is not f.type:
                wrong.append(f"{flag} must be {f.type.__name__}, got {value!r}")
            elif f.type in (int, float) and not 0 <= value <= self.LARGEST[f.type]:
                wrong.append(f"{flag} must be finite and at least 0, got {value}")
            elif value == 0 and all(self._defaults(f.name)) and f.name not in self.ZERO:
                wrong.append(f"{flag} must be positive, got 0")
            elif value > at_most.get(f.name, value):
                wrong.append(f"{flag} must be at most {at_most[f.name]}, got {value}")
        return wrong

    def _ignored_flags(self) -> list[str]:
        """Return an error for each flag that was given and that this run would not read."""
        plan = self.plans.trainer or Plan()
        dta = self.tree == "dta"
        fsdp = self.data_parallel == "fsdp"
        old_is_own = self.proximal or (self.minibatches == 1 and not self.staleness)

        # What is needed -> (is it there?, the flags that would be ignored without it).
        needs = {
            "--dynamic-sampling": (self.dynamic_sampling, "max_rounds"),
            "--fork-turns": (self.fork_turns, "forks"),
            "--forks 2 or more": (self.forks > 1, "fork_turns"),
            "--importance-cap":
                (self.importance_cap, "importance", "importance_of", "importance_low"),
            "--advantage teacher": (self.advantage == "teacher", "teacher"),
            "--advantage gae": (self.advantage == "gae", "gae_lambda", "value_coef"),
            "--kl-coef": (self.kl_coef, "kl", "kl_in"),
            "an --advantage of rewards": (self.advantage != "teacher", "overlong_buffer"),
            "--proximal, or --minibatches 1 and no --staleness: else old is the sampler itself":
                (old_is_own, "importance_cap"),
            "--lr-warmup and --steps 2 or more":
                (self.lr_warmup and self.steps > 1, "lr_first_step"),
            "a --plan with c": (plan.cp > 1, "cp_method", "debug"),
            "a --plan with p": (plan.pp > 1, "pp_schedule"),
            "--tree dta": (dta, "chunk_tokens", "recompute"),
            "--data-parallel fsdp": (fsdp, "shard_ranks", "offload"),
            "--task jsonl": (self.reads_text, *TEXT_FLAGS),
            "--template chat": (self.template in ("", "chat"), "system"),
            "a --template without {question}":
                (not (self.has_whole_template and self.instruction), "instruction"),
            "--out DIR": (self.out, "resume"),
        }  # fmt: skip

        # What an objective reads, its function says.
        for name in ("clip_low", "clip_high", "dual_clip", "cispo_bound"):
            if getattr(self, name) != getattr(Config, name):
                readers = [x for x in OBJECTIVES if name in flags_of(x)]
                what = f"--objective {' or '.join(readers)}"
                _, *names = needs.get(what, (None,))
                needs[what] = self.objective in readers, *names, name
        return [
            f"{_flag(name)} needs {what}" for what, (is_there, *names) in needs.items()
            for name in names
            if not is_there and getattr(self, name) not in self._defaults(name)
        ]  # fmt: skip

    def _wrong_plans(self) -> list[str]:
        """Return an error for each way to share the work that does not go with the others."""
        # --tree dta runs chunks forward and backward in an order of its own. A pipeline's schedule
        # has another order, FSDP2 gathers once a step and not once a chunk, a chunk's keys come
        # from the stack of one rank, --recompute takes the place of --ac, and each chunk would be
        # compiled for a shape of its own.
        plan = self.plans.trainer or Plan()
        unfit = {
            "p": plan.pp > 1, "c": plan.cp > 1, "fsdp": self.data_parallel == "fsdp",
            "--ac": self.ac != "none", "--compile": self.compile,
        }  # fmt: skip
        wrong = []
        if self.tree == "dta":
            wrong += [f"--tree dta has no {x}; use --tree sparse" for x in unfit if unfit[x]]
            if not self.chunk_tokens:
                wrong.append("--tree dta needs --chunk-tokens, the size of a chunk")

        # A plan may name an engine. archon is AReaL's engine in plain torch, and it is accepted
        # because this project is in plain torch too. Other names promise engines that do not run.
        engines = {one.backend for one in self.plans if one} - {None, "archon"}
        if engines:
            wrong.append(
                f"--plan {self.plan}: only the engine archon runs here, got "
                f"{', '.join(sorted(engines))}; leave the name out (fsdp is --data-parallel fsdp)"
            )
        return wrong

    def _wrong_combinations(self) -> list[tuple]:
        """Return (is it wrong?, the error) for what would train something else, or fail late."""
        leaves = self.forks ** min(self.fork_turns, 64)  # beyond any group, and quickly computed
        compares_group = compared_by(self.advantage) == "group"
        return [
            (self.advantage == "teacher" and not self.teacher,
             "--advantage teacher needs --teacher DIR"),
            (self.group == 1 and compares_group,
             "--group 1 has no baseline, so advantages are 0: use 2 or more, or --advantage gae"),
            (self.dynamic_sampling and not compares_group, "--dynamic-sampling drops groups of "
             f"equal rewards, from which --advantage {self.advantage} learns"),
            (self.importance_low > self.importance_cap > 0,
             f"--importance-low {self.importance_low} is over --importance-cap"),
            (self.overlong_buffer >= self.max_new_tokens,
             f"--overlong-buffer {self.overlong_buffer} must be less than --max-new-tokens"),
            (self.teacher and self.kl_in == "reward", "--teacher has no reward: --kl-in loss"),
            (self.dynamic_sampling and (self.entropy_coef or self.kl_coef),
             "--dynamic-sampling drops groups of advantage 0, but they have entropy and KL terms: "
             "set --entropy-coef 0 and --kl-coef 0"),
            (self.group % leaves, f"--group {self.group} must divide by forks^fork_turns {leaves}"),
            (self.clip_low >= 1, f"--clip-low must be less than 1, got {self.clip_low}"),
            (self.beta2 >= 1, f"--beta2 must be less than 1, got {self.beta2}"),
            (0 < self.dual_clip <= 1 + self.clip_high,
             f"--dual-clip must be over 1 + clip_high (papers: 3), got {self.dual_clip}"),
            (self.minibatches > self.prompts,
             f"--minibatches {self.minibatches} is over --prompts {self.prompts}; one is empty"),
            (self.balance_coef and self.tree != "disabled",
             "--tree has no --balance-coef, a loss of each sequence by itself; use "
             "--router-bias-rate, or leave --tree out"),
            (has_smaller_eps(self.compute, self.dtype),
             f"--compute-dtype {self.compute} is finer than --dtype {self.dtype} of the weights"),
            (not self.model and self.hidden % (2 * self.heads),
             f"--hidden {self.hidden} must divide by --heads {self.heads} into an even head_dim"),
            (not self.model and self.heads % 2 and self.heads > 1,
             f"--heads must be 1 or even, got {self.heads}"),
            (self.task == "jsonl" and not (self.data and self.model),
             "--task jsonl needs --data FILE.jsonl and --model DIR with a tokenizer.json"),
            (self.has_whole_template and "{question}" not in self.template,
             f"--template must be chat, raw or a text with {{question}}, got {self.template!r}"),
        ]  # fmt: skip


# The learning rate of supervised steps, which is constant after --lr-warmup.
DEMO_LR = dict(random=1e-3, model=1e-5)

# The keyword arguments of `grpo_loss` that are flags.
LOSS_SETTINGS = (
    "aggregation", "objective", "clip_low", "clip_high", "dual_clip", "cispo_bound", "importance",
    "importance_of", "importance_low", "importance_cap", "kl", "kl_coef", "kl_in", "entropy_coef",
    "value_coef",
)  # fmt: skip

# The flags that only `Jsonl` reads.
TEXT_FLAGS = "data", "template", "instruction", "system", "reward"


def flags_of(objective) -> set:
    """Return the settings that an objective reads, found by calling it with one token."""
    read = set()

    class Watched:
        def __getattr__(self, name):
            read.add(name)
            return getattr(Config, name)

    one_N = torch.ones(1)
    OBJECTIVES[objective](Watched(), one_N, one_N, one_N, lambda x_N: x_N)
    return read


def has_smaller_eps(a, b) -> bool:
    """Return whether dtype a, by its name, has a smaller unit in the last place than b."""
    return torch.finfo(getattr(torch, a)).eps < torch.finfo(getattr(torch, b)).eps


def _flag(name):
    """Return a field's name as it is typed."""
    return "--" + name.replace("_", "-")


def _shown(choices, separator=", "):
    """Return a field's choices as text, without the empty default."""
    return separator.join(filter(None, choices))


@functools.cache
def _help_texts():
    """Return {field: (title of its group, help)}, from the comments of Config and of its bases.

    The result is cached, because inspect parses this whole file to find a class.
    """
    # A comment on a line of its own is the title of the fields below it.
    found = {}
    for cls in filter(dataclasses.is_dataclass, reversed(Config.__mro__)):
        title = None
        for line in inspect.getsource(cls).splitlines():
            heading = re.fullmatch(r"    # (.*)", line)
            flag = re.match(r"    (\w+): .*?  # (.*)", line)
            if heading:
                title = heading[1]
            if flag:
                found[flag[1]] = title, flag[2]
    return found


def add_flags(parser, fields):
    """Add fields of Config to a parser. A flag that is not typed is absent from the result."""
    for f in fields:
        _, text = _help_texts()[f.name]
        how = dict(type=f.type, metavar=getattr(f.type, "__name__", ""))
        if choices := choices_of(f):
            how = dict(choices=choices, metavar=_shown(choices, "|"))

        # What a default depends on is said. A bool is --FLAG or --no-FLAG, and off by default.
        default = f"{f.default!r}"
        if f.name in Config.BY_START:
            default = "{random!r}; with --demos {demos!r}; with --model {model!r}".format(
                **Config.BY_START[f.name])
        if f.name == "advantage":
            default = "'group_mean'; with --teacher 'teacher'"
        text = text.replace("%", "%%") + f" [{default}]"
        if f.type is bool:
            how = dict(action=argparse.BooleanOptionalAction)
            text = text.removesuffix(" [False]")
        parser.add_argument(_flag(f.name), default=argparse.SUPPRESS, help=text, **how)


def parse_config(argv) -> Config:
    """Return the Config of a command line; with --resume, what the run stored is the default."""
    parser = argparse.ArgumentParser(
        prog="train_grpo.py", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog=f"{PAPERS}\n{glossary()}\nThe letters of --plan\n\n{parallel.letters_table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--FLAG VALUE ...] | core | check [--all | --device D] | bench"
        " | plot RUN .. | audit RUN | eval RUN_OR_DIR | chat RUN_OR_DIR | export RUN DIR | --help",
    )  # fmt: skip

    # Fields of one title stand together in --help, also where a base class has some of them.
    groups = {}
    for f in dataclasses.fields(Config):
        title, _ = _help_texts()[f.name]
        groups.setdefault(title, []).append(f)
    for title, fields in groups.items():
        add_flags(parser.add_argument_group(title), fields)

    # Flags that were not typed are absent from `given`: a resumed run has its own values for them.
    given = vars(parser.parse_args(argv))
    path = Path(given.get("out", "")) / "config.json"
    if not (given.get("resume") and given.get("out") and path.exists()):
        return Config(**given)
    return resumed_config(path, given)


def resumed_config(path, given) -> Config:
    """Return a run's stored settings under the flags that were given.

    path: the run's config.json.
    given: {field: value}. ValueError for a value that would make the run another run.
    """
    stored = models.read_json(path, what="the configuration of a run")
    if stored.keys() != {f.name for f in dataclasses.fields(Config)}:
        raise ValueError(f"{path} is not of this version of Config: start a new run")

    # A task's file is code, and so is a reward's. The run's directory may be a stranger's, so a
    # file that it names is never imported. To go on with the run, name the file again.
    for name in ("task", "reward"):
        spec = str(stored[name])
        called = spec.rpartition(":")[2]
        is_code = spec != "" and not (name == "task" and spec in TASKS)
        if is_code and given.get(name, "").rpartition(":")[2] != called:
            raise ValueError(f"the {name} of this run is a file's; give it again, as --{name} "
                             f"FILE.py:{called} (the run had {spec!r})")  # fmt: skip
        if is_code:
            stored[name] = given[name]
    if wrong := Config(**stored)._wrong_values():
        raise ValueError(f"{path}: {'; '.join(wrong)}")

    # The rates depend on the last step if they decay, or if the old or the new number of steps is
    # shorter than the warm-up, which then ends with the run. `steps` is free only if they do not.
    free = set(Config.FREE)
    fewest = min(stored["steps"], given.get("steps", stored["steps"]))
    if stored["lr_decay"] != "constant" or fewest < stored["lr_warmup"]:
        free.remove("steps")
    changed = [name for name in given if name not in free and given[name] != stored[name]]
    if changed:
        told = ", ".join(f"{_flag(x)} {given[x]!r} (the run has {stored[x]!r})" for x in changed)
        if "steps" in changed:
            told += "; with this --lr-decay and --lr-warmup the rates depend on the last step"
        raise ValueError(f"--resume cannot change {told}; start a new run instead")
    return Config(**(stored | given))


# 10. The loss: equations (2) to (7), in this order --------------------------------------------
# Pure functions. An objective, an aggregation and a metric are each one entry of a table. Arrays of
# N hold one number for each sampled token of a micro-batch, sequence after sequence.


def ratio_of(d_N):
    """Return r of (2) for log-ratios d."""
    # NUMERICS: +-10 keeps a ratio finite where a policy has moved far from a stale one. Beyond, the
    # ratio is a constant, and has no gradient. Pinned by
    # tests/test_loss.py::test_a_log_ratio_is_clamped_to_ten_before_exp.
    return d_N.clamp(-10, 10).exp()  # (2)


# Each objective is equation (3): it returns l of each token, with a graph, and which tokens have
# lost their gradient. c: the flags of the loss. d_N: log-ratios, lp - old. A_N: advantages. lp_N:
# log-probs now. mean_of_sequence(x_N): gives each token the mean of x over its sequence. A paper's
# constants are defaults at the function.


def reinforce(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return the policy gradient's l, which knows no ratio."""
    return -A_N * lp_N, torch.zeros_like(lp_N, dtype=torch.bool)  # (3)


def clip(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return PPO's l: the worse of the gain r A and the gain at the clipped ratio."""
    # For A < 0 the minimum has no lower end: a large ratio gives a huge loss. Dual clip bounds the
    # ratio there. For A > 0 the second gain is the smaller one anyway.
    r_N = ratio_of(d_N)
    bounded_N = r_N.clamp(max=c.dual_clip or math.inf)
    gain_N = bounded_N * A_N
    clipped_gain_N = r_N.clamp(1 - c.clip_low, 1 + c.clip_high) * A_N
    clipped_N = (clipped_gain_N < gain_N) | (r_N > bounded_N) | (d_N.abs() > 10)
    return -torch.minimum(gain_N, clipped_gain_N), clipped_N  # (3)


def gspo(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return GSPO's l: PPO's, of one ratio for a whole sequence."""
    # The geometric mean of the tokens' ratios. A reward is for a sequence, and a product over
    # hundreds of tokens would be too noisy to use.
    return clip(c, mean_of_sequence(d_N), A_N, lp_N, mean_of_sequence)  # (3)


def cispo(c, d_N, A_N, lp_N, mean_of_sequence, low=0.0):
    """Return CISPO's l: a token past the bound still learns, where PPO drops its gradient."""
    r_N = ratio_of(d_N.detach())
    weight_N = r_N.clamp(low, c.cispo_bound)
    return -weight_N * A_N * lp_N, weight_N != r_N  # (3)


def sapo(c, d_N, A_N, lp_N, mean_of_sequence, up=1.0, down=1.05):
    """Return SAPO's l: a soft clip, with tau `up` where A > 0 and `down` elsewhere."""
    # The weight of a token is 1 at r = 1, and falls smoothly on both sides.
    tau_N = torch.where(A_N > 0, lp_N.new_tensor(up), down)
    gate_N = torch.sigmoid(tau_N * (ratio_of(d_N) - 1))
    return -4 / tau_N * gate_N * A_N, torch.zeros_like(lp_N, dtype=torch.bool)  # (3)


def gmpo(c, d_N, A_N, lp_N, mean_of_sequence):
    """Return GMPO's l: GSPO's mean, of log-ratios that are each clipped first."""
    # Only the side to which A leads a log-ratio is clipped. A clipped one is a constant.
    near_N = torch.where(A_N > 0, d_N.clamp(max=c.clip_high), d_N.clamp(min=-c.clip_low))
    return -ratio_of(mean_of_sequence(near_N)) * A_N, near_N != d_N  # (3)


def dppo(c, d_N, A_N, lp_N, mean_of_sequence, cap=20.0):
    """Return DPPO's l: a token learns until its probability has moved too far towards A."""
    # A ratio of 2 is much at p = .4, and nothing at p = 1e-6: so the trust region is one of
    # probabilities. Only a move in the direction of A ends a token's learning.
    d_N = d_N.detach()
    now_N = lp_N.detach()
    moved_N = now_N.exp() - (now_N - d_N).exp()
    bound_N = torch.where(A_N > 0, lp_N.new_tensor(c.clip_high), c.clip_low)
    clipped_N = (moved_N.abs() > bound_N) & ((moved_N > 0) == (A_N > 0))
    weight_N = ratio_of(d_N).clamp(max=cap) * ~clipped_N
    return -weight_N * A_N * lp_N, clipped_N  # (3)


# To add an objective, write its function and its name here.
OBJECTIVES = {
    "reinforce": reinforce, "clip": clip, "cispo": cispo, "gspo": gspo, "sapo": sapo, "gmpo": gmpo,
    "dppo": dppo,
}  # fmt: skip


# Aggregations are w and Z of (7). Of sequences with count_B sampled tokens, each returns the weight
# of a token of each sequence, and each sequence's term of Z. Two sequences, one of one token with
# loss a and one of three with losses b, c, d, sum to
#
#     token_mean     (a + b + c + d) / 4
#     sequence_mean  (a + (b + c + d) / 3) / 2             a token of a long answer weighs less
#     constant       (a + b + c + d) / (2 max_new_tokens)  Z does not depend on what was sampled


def token_mean(count_B, max_new_tokens):
    return torch.ones_like(count_B), count_B


def sequence_mean(count_B, max_new_tokens):
    # A sequence without a sampled token has no token to weigh; 1 keeps its weight finite.
    return 1 / count_B.clamp(min=1), (count_B > 0).to(count_B)


def constant(count_B, max_new_tokens):
    return torch.ones_like(count_B), torch.full_like(count_B, max_new_tokens)


AGGREGATIONS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "constant": constant}


def entry_of(table, name, what):
    """Return table[name], or raise ValueError with the names that there are."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(table)}")
    return table[name]


def loss_denominator(masks, /, *, aggregation, max_new_tokens) -> float:
    """Return these sequences' term of Z of (7), from their masks of sampled tokens.

    The sum over all ranks is Z, the trainer's num_global_valid_tokens. A sequence without a sampled
    token, such as a filtered one, counts under `constant` only.
    """
    count_B = torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.float64)
    _, term_B = entry_of(AGGREGATIONS, aggregation, "aggregation")(count_B, max_new_tokens)
    return term_B.sum().item()


def divergence(d, /, kind):
    """Return k of (5), an estimate of KL(p, reference) from d = log p - log reference.

    d is taken at tokens drawn from p. The KL is the mean of both kinds (Schulman 2020). k3 is never
    negative, and has less noise than k1.
    """
    return d if kind == "k1" else torch.exp(-d) + d - 1


class SampledTokens:
    """The sampled tokens of padded rows, in order: token n is of sequence row_N[n]."""

    def __init__(self, mask_BT, dtype):
        # NUMERICS: in float32 at least, since gspo sums over a sequence. Pinned by
        # tests/test_conformance.py::test_a_right_loss_passes_all.
        self.mask_BT = torch.atleast_2d(mask_BT)
        self.row_N, self.column_N = self.mask_BT.nonzero(as_tuple=True)
        self.count_B = self.mask_BT.sum(-1).double()
        self.dtype = torch.promote_types(dtype, torch.float32)

    def pick(self, x_BT, default=None):
        """Return x (N,) for anything that broadcasts to the rows; `default` for None."""
        if x_BT is None:
            return default
        return x_BT.expand(self.mask_BT.shape)[self.row_N, self.column_N].to(self.dtype)

    def sum_of_sequence(self, x_N):
        """Return for each token the sum of x over its sequence."""
        return x_N.new_zeros(len(self.mask_BT)).index_add(0, self.row_N, x_N)[self.row_N]

    def mean_of_sequence(self, x_N):
        """Return for each token the mean of x over its sequence."""
        return self.sum_of_sequence(x_N) / self.count_B[self.row_N].to(x_N)


def sampler_weights(c, log_x_N, tokens):
    """Return x of (4) for each token: p_old / p_sampler within its bounds. log_x_N: old - sampler.

    c.importance says what happens to an x outside importance_low .. importance_cap: `truncate`
    moves it to the bound, and `mask` makes it 0. Bounds 0.5 and 2 make of a 3 a 2, or a 0.
    c.importance_of says whose x it is: the token's, or one of its sequence: the product of its
    tokens' (`sequence`), or their geometric mean.
    """
    # The sampler drew the tokens, but (2) measures from `old`, the same policy by the trainer's
    # program and dtype: x corrects for tokens drawn more or less often than `old` says. Under the
    # sampler its mean is 1, but its tail is long, hence the bounds.
    if c.importance_of == "sequence":
        log_x_N = tokens.sum_of_sequence(log_x_N)
    if c.importance_of == "geometric":
        log_x_N = tokens.mean_of_sequence(log_x_N)
    x_N = log_x_N.exp()
    near_N = x_N.clamp(c.importance_low, c.importance_cap)
    return near_N if c.importance == "truncate" else torch.where(near_N == x_N, x_N, 0.0)


VALUE_CLIP = 0.2  # of (6), PPO's: a value that has moved this far to its return learns no more


def value_loss(value_N, old_N, return_N):
    """Return the critic's error of (6) for each token, the larger of two squares, halved."""
    near_N = old_N + (value_N - old_N).clamp(-VALUE_CLIP, VALUE_CLIP)
    return torch.maximum((value_N - return_N).square(), (near_N - return_N).square()) / 2


def grpo_loss(
    lp_BT, old_BT, advantage_BT, mask_BT, /, *, Z=None, aggregation="token_mean", max_new_tokens=16,
    objective="clip", clip_low=0.2, clip_high=0.28, dual_clip=0.0, cispo_bound=5.0, sampler_BT=None,
    importance="truncate", importance_of="token", importance_low=0.0, importance_cap=0.0,
    ref_BT=None, kl="k3", kl_coef=0.0, kl_in="loss", entropy_BT=None, entropy_coef=0.0,
    value_BT=None, old_value_BT=None, return_BT=None, value_coef=0.5,
):  # fmt: skip
    """Return the loss, (2)-(7), a scalar; and a dict of detached sums over sampled tokens.

    lp_BT            log-probs of the policy now, with a graph: (B, T), or (T,) for one sequence
    old_BT           log-probs before the step's first update; None: lp, so that every ratio is 1
    advantage_BT     A of (1), of any shape that broadcasts
    mask_BT          bool: which tokens the policy sampled. Others may hold anything, even NaN
    Z                of (7), summed over everything that one optimizer step sees; None: of these
    aggregation      of AGGREGATIONS: w and Z of (7). max_new_tokens: for the Z of `constant`
    objective        of OBJECTIVES, which read clip_low, clip_high, dual_clip and cispo_bound
    sampler_BT       log-probs of the program that drew the tokens; None: old
    importance       with _of, _low and _cap: (4), see `sampler_weights`; cap 0: no (4)
    ref_BT           log-probs of the frozen reference; None: no KL
    kl, kl_coef      which k of (5), and its weight; kl_in "reward" measures it and adds nothing
    entropy_BT       H of (5), with the weight entropy_coef
    value_BT         the critic's values now; None: no critic. With old_value_BT and return_BT, the
                     values before the step and g, and value_coef: (6)

    The sums have the names of METRICS. `loss_metrics` makes a step's metrics of them.
    """
    # t has what is known of each token. The loss and the metrics are made of it.
    tokens = SampledTokens(mask_BT, lp_BT.dtype)
    c = SimpleNamespace(
        clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, cispo_bound=cispo_bound,
        importance=importance, importance_of=importance_of, importance_low=importance_low,
        importance_cap=importance_cap,
    )  # fmt: skip
    t = SimpleNamespace(lp_N=tokens.pick(lp_BT), A_N=tokens.pick(advantage_BT), x_N=None)
    t.old_N = tokens.pick(old_BT, t.lp_N.detach())
    t.smp_N = tokens.pick(sampler_BT, t.old_N)
    t.gap_N = (t.lp_N - t.smp_N).detach().double()  # rounding, if the weights are equal
    t.ref_N, t.entropy_N = tokens.pick(ref_BT), tokens.pick(entropy_BT)
    t.kl_N = None if ref_BT is None else divergence(t.lp_N - t.ref_N, kl)
    t.critic_N = None

    # The policy's term.
    d_N = t.lp_N - t.old_N
    mean = tokens.mean_of_sequence
    t.ratio_N = ratio_of(mean(d_N) if objective == "gspo" else d_N)  # (2)
    l_of = entry_of(OBJECTIVES, objective, "objective")
    l_N, t.clipped_N = l_of(c, d_N, t.A_N, t.lp_N, mean)  # (3)
    if importance_cap:
        t.x_N = sampler_weights(c, t.old_N - t.smp_N, tokens)
        l_N = l_N * t.x_N  # (4)
    t.policy_N = l_N

    # Closeness to the reference and randomness are wanted for their own sake, whatever the reward.
    # With kl_in `reward` the rewards were lowered by the KL, before (1).
    if ref_BT is not None and kl_in == "loss":
        l_N = l_N + kl_coef * t.kl_N  # (5)
    if entropy_BT is not None and entropy_coef:
        l_N = l_N - entropy_coef * t.entropy_N  # (5)
    # A critic is one more head on the same states, so its error is one more term of the same sum.
    if value_BT is not None:
        t.critic_N = value_coef * value_loss(*map(tokens.pick, (value_BT, old_value_BT, return_BT)))
        l_N = l_N + t.critic_N  # (6)

    # Z is the whole step's, never the count of this micro-batch or this rank. A mean of micro-batch
    # means weighs a token more where its micro-batch is small; a sum over one Z does not.
    w_B, term_B = entry_of(AGGREGATIONS, aggregation, "aggregation")(tokens.count_B, max_new_tokens)
    w_N = w_B[tokens.row_N].to(l_N)
    Z = term_B.sum().item() if Z is None else Z
    t.part_N, t.policy_part_N = w_N * l_N / Z, w_N * t.policy_N / Z
    return (w_N * l_N).sum() / Z, measured(t)  # (7)


# 11. Metrics: what each is, and how it is reduced ---------------------------------------------
# The one list of the numbers in a line of metrics.jsonl. The glossary of --help, the log, the merge
# over updates and the order of an audit's rows come from it. Causes stand before their effects.


class Metric(NamedTuple):
    """What a metric is, and how it is reduced to one number of a step."""

    text: str  # its definition, for --help
    over_updates: str = ""  # of an optimizer step: mean | max | sum | first; "": once a step
    over_tokens: str = ""  # of a sampled token: mean | sum | max
    of: Callable | None = None  # of(t): its value (N,) at the tokens of `grpo_loss`, or None

    def reduce(self, found):
        """Return one number for the numbers of a step's updates."""
        if self.over_updates == "first":
            return found[0]
        reduce = {"mean": lambda found: float(np.mean(found)), "max": max, "sum": sum}
        return reduce[self.over_updates](found)


def masked_of(t):
    """Return which tokens (4) leaves out, or None without (4)."""
    return None if t.x_N is None else t.x_N == 0


METRICS = {
    "reward/mean": Metric("reward of the step's rollouts"),
    "reward/solved": Metric("fraction of them with a reward of at least 1"),
    "reward/groups_none": Metric("fraction of groups in which no rollout is solved"),
    "reward/groups_all": Metric("fraction of groups in which every rollout is solved"),
    "reward/groups_equal": Metric(
        "fraction of groups of equal rewards; gae, none_batch: 1 if all are equal"),
    "tokens/generated": Metric("sampled tokens"),
    "tokens/truncated_fraction": Metric("of rollouts, that met max_new_tokens"),
    "length/rollout_mean": Metric("sampled tokens of a rollout"),
    "length/max": Metric("the same of the longest"),
    "eval/solved_before": Metric("eval/solved before the first step, after any --demos; in line 0"),
    "logprob_gap/max": Metric(
        "|trainer - sampler| of log-probs; with --staleness K of K steps", "first", "max",
        lambda t: t.gap_N.abs()),
    "logprob_gap/mean": Metric("the same", "first", "mean", lambda t: t.gap_N.abs()),
    "logprob_gap/identical": Metric(
        "fraction of them that are 0, to the bit", "first", "mean", lambda t: t.gap_N == 0),
    "logprob_gap/kl": Metric(
        "KL(sampler, trainer) per token, by k3", "first", "mean",
        lambda t: torch.expm1(t.gap_N) - t.gap_N),
    "value/token_mean": Metric("with gae: v before the step"),
    "value/explained_variance": Metric("with gae: 1 - Var(g - v) / Var(g) over the step's tokens"),
    "advantage/token_mean": Metric("A of (1) over the sampled tokens that are trained on"),
    "advantage/token_std": Metric("its standard deviation"),
    "lr": Metric("the learning rate of the step"),
    "policy_age/update_mean": Metric("optimizer steps from the sampler's weights to an update"),
    "policy/age_mean": Metric("steps of the loop from the sampler's weights to the batch"),
    "policy/age_max": Metric("the largest of these"),
    "ratio/token_mean": Metric("r of (2), with gspo s", "mean", "mean", lambda t: t.ratio_N),
    "ratio/max": Metric("the largest of them in all updates", "max", "max", lambda t: t.ratio_N),
    "ratio/clipped_fraction": Metric(
        "of sampled tokens, whose gradient (3) bounds", "mean", "mean", lambda t: t.clipped_N),
    "importance/masked_fraction": Metric(
        "of sampled tokens, whose x of (4) is 0", "mean", "mean", masked_of),
    "entropy/token_mean": Metric("H at `temperature`", "mean", "mean", lambda t: t.entropy_N),
    "kl/token_mean": Metric("with a reference: k of (5)", "mean", "mean", lambda t: t.kl_N),
    "value/loss": Metric("with gae: (6), per sampled token", "mean", "mean", lambda t: t.critic_N),
    "loss/policy_token_mean": Metric(
        "loss/token_mean without (5) and (6)", "mean", "sum", lambda t: t.policy_part_N),
    "loss/token_mean": Metric(
        "(7) under any --aggregation, so over its Z", "mean", "sum", lambda t: t.part_N),
    "experts/load_max": Metric("an expert's tokens / their mean; of layers and updates", "max"),
    "balance/loss": Metric("(8)", "mean"),
    "grad_norm": Metric("global, before clipping", "mean"),
    "policy_version": Metric("optimizer steps taken so far, supervised ones included"),
    "updates/skipped": Metric("optimizer steps skipped so far for a non-finite gradient"),
    "tokens/trained": Metric("tokens run with gradients; of a tree its own tokens", "sum"),
    "tokens/trained_flat": Metric("the same without a tree", "sum"),
    "eval/solved": Metric("greedy, on held-out prompts; at evaluation steps and in the last line"),
    "memory/peak": Metric("megabytes at most: of tensors on CUDA, of the process on a CPU"),
    "seconds/rollout": Metric("sampling the batch"),
    "seconds/wait_rollout": Metric("training stood still for the batch"),
    "seconds/wait_train": Metric("sampling stood still for weights"),
    "seconds/train": Metric("what was neither sampling nor evaluation"),
    "seconds/eval": Metric("evaluating"),
    "seconds/total": Metric("the step"),
}  # fmt: skip


def glossary() -> str:
    """Return the metrics and their definitions, for --help."""
    lines = ["Metrics, one line of metrics.jsonl for each step. Every denominator is global.",
             "A mean, or the largest, of several updates also has the first one's, NAME_first.", ""]
    indent = dict(subsequent_indent=" " * 30, width=100)
    for name, metric in METRICS.items():
        over = {"mean": "; mean of updates", "first": "; first update"}.get(metric.over_updates, "")
        lines.append(textwrap.fill(f"  {name:<27} {metric.text}{over}", **indent))
    return "\n".join(lines)


@torch.no_grad()
def measured(t) -> dict:
    """Return the sum, or the largest, of each metric over tokens, and the number of tokens."""
    sums = {"tokens": t.lp_N.new_tensor(len(t.lp_N), dtype=torch.float64)}
    for name, metric in METRICS.items():
        x_N = metric.of(t) if metric.of else None
        if x_N is not None:
            x_N = x_N.double()
            sums[name] = x_N.sum()
            if metric.over_tokens == "max":  # of no token it is 0
                sums[name] = torch.cat([x_N, x_N.new_zeros(1)]).max()
    return sums


def loss_metrics(totals) -> dict:
    """Return metrics of a whole batch from its sums and maxima, all numbers.

    What has no sum has no metric: a run without a reference has no KL.
    """
    # Means are over sampled tokens, not over sequences, micro-batches or ranks, whatever the
    # aggregation; the loss keeps its name in all of them.
    count = max(totals["tokens"], 1.0)
    return {
        name: totals[name] / count if METRICS[name].over_tokens == "mean" else totals[name]
        for name in METRICS if name in totals
    }  # fmt: skip


def mean_metrics(updates) -> dict:
    """Merge the metrics of a step's updates by METRICS."""
    # The gap to the sampler is the first update's: only the first update sees the weights that
    # sampled, so only there is the gap rounding and not learning. What the first update measured is
    # also written alone: an audit can then tell a wrong loss from what it did to the weights.
    out = {}
    for name, metric in METRICS.items():
        found = [update[name] for update in updates if metric.over_updates and name in update]
        if found:
            out[name] = metric.reduce(found)
        if len(found) > 1 and metric.over_updates in ("mean", "max"):
            out[f"{name}_first"] = found[0]
    return out


# 12. Advantages: equation (1) -----------------------------------------------------------------
# How much better than others a rollout was, or with a critic, a tree or a teacher, a token of it.
# If you know GRPO's advantage, read the tables and skip the rest.

# Each of these takes the float64 rewards (P, G) of the P groups of a step, and the number of
# sampled tokens of each rollout. Rewards 1 0 0 1 and 0 0 0 1 of two groups:
#
#     group_mean     .5 -.5 -.5 .5    -.25 -.25 -.25 .75     Dr.GRPO
#     group_std      divided by .577  divided by .5          GRPO
#     batch_std      both divided by .518                    LitePPO
#     leave_one_out  times 4/3        times 4/3              RLOO
#     none           the rewards                             REINFORCE
#     none_batch     R - 3/8, divided by .484                REINFORCE++


def group_mean(rewards_PG, tokens_PG):
    # Equal rewards of a group say nothing, and have exact zeros.
    return np.apply_along_axis(simple_advantages, -1, rewards_PG)  # (1)


def group_std(rewards_PG, tokens_PG):
    # Hard and easy prompts count the same if each group is scaled to a spread of one.
    spread_PG = rewards_PG.std(-1, ddof=1, keepdims=True)
    return group_mean(rewards_PG, tokens_PG) / (spread_PG + 1e-4)  # (1)


def batch_std(rewards_PG, tokens_PG):
    # The spread of a few rollouts is noisy. A whole step's is less so, and keeps the groups'
    # proportions.
    return group_mean(rewards_PG, tokens_PG) / (rewards_PG.std(ddof=1) + 1e-4)  # (1)


def leave_one_out(rewards_PG, tokens_PG):
    # The same as subtracting from each reward the mean of the other G - 1 rewards.
    G = rewards_PG.shape[-1]
    return group_mean(rewards_PG, tokens_PG) * G / (G - 1)  # (1)


def none(rewards_PG, tokens_PG):
    return rewards_PG  # (1)


def none_batch(rewards_PG, tokens_PG):
    # Without a baseline the mean of the step takes its place. As in PPO, mean and spread are of
    # tokens, so a long rollout counts more.
    if np.ptp(rewards_PG) == 0:
        return np.zeros_like(rewards_PG)
    share_PG = tokens_PG / tokens_PG.mean()
    A_PG = rewards_PG - (share_PG * rewards_PG).mean()
    return A_PG / (np.sqrt((share_PG * A_PG**2).mean()) + 1e-8)  # (1)


class Advantage(NamedTuple):
    """A function that computes (1), and among which rewards it looks for differences."""

    of: Callable
    compares: str = "group"  # rewards of a group | of the whole step | nothing


# To add an advantage, write its function and its name here, or below if it is a token's own.
ADVANTAGES = {
    "group_mean": Advantage(group_mean), "group_std": Advantage(group_std),
    "batch_std": Advantage(batch_std), "leave_one_out": Advantage(leave_one_out),
    "none": Advantage(none, compares="nothing"),
    "none_batch": Advantage(none_batch, compares="step"),
}  # fmt: skip


def advantages(rewards_PG, /, kind="group_mean", *, tokens_PG=None):
    """Return A of (1) for float64 rewards (G,) of one group, or (P, G) of the P groups of a step.

    kind: of ADVANTAGES.
    tokens_PG: sampled tokens of each rollout, for none_batch. None: equally many.
    """
    tokens_PG = np.ones_like(rewards_PG) if tokens_PG is None else tokens_PG
    return entry_of(ADVANTAGES, kind, "advantage").of(rewards_PG, tokens_PG)


def kl_penalties(config, trajectory):
    """Return the KL that is subtracted from the reward at each sampled token: (T,)."""
    if not config.kl_coef or config.kl_in != "reward":
        return np.zeros(len(trajectory.mask))
    d = trajectory.sampler_logprobs - trajectory.ref_logprobs
    d = torch.from_numpy(np.where(trajectory.sampled, d, 0.0))
    return config.kl_coef * divergence(d, config.kl).numpy()


def overlong_penalty(config, t) -> float:
    """Return DAPO's soft punishment (eq. 13): 0, or up to 1 in the last `overlong_buffer` tokens.

    Of 16 new tokens with a buffer of 4: 0 for up to 12, 1/4 for 13, 1 for 16.
    """
    if not config.overlong_buffer:
        return 0.0
    prompt_tokens, _, _ = t.path[0]
    free = config.max_new_tokens - config.overlong_buffer
    return max(0, len(t.tokens) - prompt_tokens - free) / config.overlong_buffer


def table_of_groups(numbers, groups, group_size, columns, cells_of):
    """Return numbers of all ranks' trajectories, (X, P, G), on every rank. Collective.

    numbers: P group numbers, of all ranks. groups: {number: trajectories} of this rank.
    columns: X, how many numbers cells_of(trajectory) returns.
    """
    # Each rank fills in its own groups and leaves zeros elsewhere: the sum over ranks is the whole
    # table, with the same bits on every rank.
    table_XPG = np.zeros((columns, len(numbers), group_size))
    for row, number in enumerate(numbers):
        for n, t in enumerate(groups.get(number, [])):
            table_XPG[:, row, n] = cells_of(t)
    return np.array(summed(table_XPG.tolist(), own_device()))


def rewards_of_step(config, batch):
    """Return the rewards after penalties, and the sampled tokens, of all kept groups: (2, P, G)."""

    def cells_of(t):
        reward = t.reward - kl_penalties(config, t).sum() - overlong_penalty(config, t)
        return reward, t.sampled.sum()

    return table_of_groups(batch.kept, batch.groups, config.group, 2, cells_of)


def reward_advantages(trainer, batch) -> dict:
    """Give the trajectories of a step the advantages of their rewards, by ADVANTAGES."""
    if not batch.kept:
        return {}
    rewards_PG, tokens_PG = rewards_of_step(trainer.config, batch)
    A_PG = advantages(rewards_PG, trainer.config.advantage, tokens_PG=tokens_PG)
    for A_G, number in zip(A_PG, batch.kept):
        for A, t in zip(A_G, batch.groups.get(number, [])):
            t.advantages = np.full(len(t.mask), A)
    return {}


def branch_advantages(rewards_G, paths, /):
    """Return (1) `per_branch` of a group: for each rollout [(first target index, advantage)].

    paths[i] is rollout i's way from the root of the group's tree down to itself: for each segment
    (its first token's index, its first rollout, how many consecutive rollouts share it).
    """
    # A segment is worth the mean reward of the rollouts that pass through it, and its advantage is
    # what it is worth beyond its parent. Four rollouts with rewards 1, 0, 1/4, 1/4, of which 0 and
    # 1 share everything up to token 5, as 2 and 3 do (each rollout's last segment is its own):
    #
    #     rollout 0:   whole group   tokens 5..7 (0, 1)   from token 8 (0 alone)
    #     value        3/8           1/2                  1
    #     advantage                  +1/8                 +1/2       they sum to R_0 - mean R
    marked = []
    for path in paths:
        values = [rewards_G[first : first + count].mean() for _, first, count in path]
        parents = [rewards_G.mean(), *values]
        # Token `start` is target `start - 1`, for targets are tokens[1:].
        worth = zip(path, values, parents)
        marked.append([(start - 1, v - parent) for (start, *_), v, parent in worth])  # (1)
    return marked


def per_branch(trainer, batch) -> dict:
    """Give the trajectories of a step the advantages of the segments of their trees."""
    if not batch.kept:
        return {}
    rewards_PG, _ = rewards_of_step(trainer.config, batch)
    for rewards_G, number in zip(rewards_PG, batch.kept):
        group = batch.groups.get(number, [])
        for t, marks in zip(group, branch_advantages(rewards_G, [t.path for t in group])):
            # A mark says from which target on an advantage holds; the next one overwrites the rest.
            #
            #     marks [(1, 0.1), (3, 0.5)] of five targets   ->   0  0.1  0.1  0.5  0.5
            t.advantages = np.zeros(len(t.mask))
            for start, advantage in marks:
                t.advantages[start:] = advantage
    return {}


def teacher_advantages(trainer, batch) -> dict:
    """Give each token its log-prob's gain in the teacher: on-policy distillation."""
    # A token that the teacher gives a higher log-prob than the sampler did should become likelier.
    # The mean of A is -KL(sampler, teacher).
    everyone = batch.trained()
    for t, teacher in zip(everyone, trainer.forward_only(everyone, trainer.teacher)):
        t.advantages = np.where(t.sampled, teacher - t.sampler_logprobs, 0.0)  # (1)
    return {}


def gae(rewards, values, mask, /, lam):
    """Return (1) `gae` of one trajectory: advantages and returns (T,), 0 off the mask.

    rewards, values: (T,). Only sampled tokens, where mask is on, are actions and follow each
    other; the task's replies are part of the environment.
    """
    # A turn's reward may be at a token of the task: it belongs to the sampled token before it.
    #
    #     target     0    1    2    3    4        lam = 1 and all values 0
    #     sampled    yes  yes  -    -    yes
    #     reward     0    0    0    2    1        the 2 counts for target 1
    #     advantage  3    3    0    0    1
    advantages, returns = np.zeros((2, len(mask)))

    # From the last token to the first: (1) needs the next sampled token's value and advantage.
    next_value = 0.0
    next_advantage = 0.0
    pending = 0.0  # rewards that no sampled token has taken yet
    for t in reversed(range(len(mask))):
        pending += rewards[t]
        if mask[t]:
            # delta is the surprise of this one action. The sum over n in (1) is a recursion.
            delta = pending + next_value - values[t]
            advantages[t] = delta + lam * next_advantage  # (1)
            returns[t] = advantages[t] + values[t]  # g of (6): what the critic should have said
            next_value = values[t]
            next_advantage = advantages[t]
            pending = 0.0
    return advantages, returns


def critic_advantages(trainer, batch) -> dict:
    """Give all ranks' trajectories whitened advantages (1) `gae` and returns g. Return metrics."""
    config = trainer.config
    everyone = batch.trained()
    sums = np.zeros(6)  # of 1, A, A^2, g, g^2, v over this rank's sampled tokens
    for t, t.values in zip(everyone, trainer.forward_only(everyone, column=2)):
        rewards = -kl_penalties(config, t)
        for at, reward in t.turn_rewards:
            rewards[at] += reward
        rewards[-1] -= overlong_penalty(config, t)
        t.advantages, t.returns = gae(rewards, t.values, t.mask, config.gae_lambda)
        A = t.advantages[t.mask]
        g = t.returns[t.mask]
        sums += len(A), A.sum(), (A**2).sum(), g.sum(), (g**2).sum(), t.values[t.mask].sum()

    count, *totals = summed(sums.tolist(), trainer.device)
    A, AA, g, gg, v = (total / max(1.0, count) for total in totals)
    spread = math.sqrt(max(0.0, AA - A * A))
    # NUMERICS: the mean and spread are of all ranks' tokens, so that no cut of the batch enters;
    # 1e-8 only keeps a step without any spread finite. Pinned by
    # tests/test_loss.py::test_advantages_are_whitened_over_the_step.
    for t in everyone:
        t.advantages = np.where(t.mask, (t.advantages - A) / (spread + 1e-8), 0.0)  # (1)

    # g - v is A before whitening, so the variance that is left is spread^2.
    variance = gg - g * g
    explained = 1 - spread**2 / variance if variance > 1e-12 else 0.0
    return {"value/token_mean": v, "value/explained_variance": explained}


def advantage_metrics(trainer, batch) -> dict:
    """Return mean and standard deviation of all ranks' advantages. Collective."""
    # The mean is known before the first square is taken: a difference of two large sums would
    # leave rounding where all advantages are nearly the same.
    A_N = np.concatenate([t.advantages[t.mask] for t in batch] or [np.zeros(0)])
    count, total = summed([len(A_N), A_N.sum()], trainer.device)
    mean = total / max(1.0, count)
    (squares,) = summed([((A_N - mean) ** 2).sum()], trainer.device)
    spread = math.sqrt(squares / max(1.0, count))
    return {"advantage/token_mean": mean, "advantage/token_std": spread}


# Advantages of single tokens. Each is a function of the trainer and the step's batch that sets the
# trajectories' advantages and returns metrics. It is collective.
TOKEN_ADVANTAGES = {
    "gae": Advantage(critic_advantages, compares="step"), "per_branch": Advantage(per_branch),
    "teacher": Advantage(teacher_advantages, compares="nothing"),
}  # fmt: skip


def compared_by(kind) -> str:
    """Return among which rewards an advantage looks for differences: group, step or nothing."""
    return (ADVANTAGES | TOKEN_ADVANTAGES)[kind].compares


# The flags whose values are the names of a table.
TABLES = {
    "objective": (OBJECTIVES,), "aggregation": (AGGREGATIONS,),
    "advantage": (ADVANTAGES, TOKEN_ADVANTAGES),
}  # fmt: skip


def choices_of(f) -> tuple:
    """Return the values that a field of Config may have, or () if any will do."""
    tables = TABLES.get(f.name)
    return tuple(itertools.chain(*tables)) if tables else get_args(f.type)


# 13. Rollouts: episodes that fork, and who asks the task --------------------------------------
# What a step samples. Without tree rollouts, plans of several ranks and slow tasks it is the core's
# `Episode` and nothing else: skip it.


@dataclass
class Trajectory:
    """One rollout. Its vectors have an entry for each of the T targets, which are tokens[1:]."""

    group: int
    tokens: list[int]
    mask: np.ndarray  # bool: sampled by the policy, and counts in the loss
    sampler_logprobs: np.ndarray  # float64, 0 where not sampled
    truncated: bool = False
    path: list = field(default_factory=list)  # see branch_advantages
    turn_rewards: list = field(default_factory=list)  # (index of a turn's last target, reward)
    supervised: bool = False  # a demonstration: its loss is -log p
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None  # None: the policy's own, detached
    ref_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None  # of the critic, before the step
    returns: np.ndarray | None = None

    def __post_init__(self):
        self.sampled = self.mask  # stays when `--overlong filter` takes it out of the loss
        # Added turn by turn: 0.1 + 0.2 + 0.3 is more than 0.3 + 0.3, and two sums may be compared.
        self.reward = 0.0
        for _, reward in self.turn_rewards:
            self.reward += reward

    def to_json(self) -> dict:
        """Return what was sampled and heard as JSON values, which are read back bit for bit."""
        return {
            "tokens": list(map(int, self.tokens)), "sampled": self.sampled.astype(int).tolist(),
            "logprobs": self.sampler_logprobs.tolist(), "truncated": bool(self.truncated),
            "rewards": [list(pair) for pair in self.turn_rewards], "path": self.path,
        }  # fmt: skip

    @classmethod
    def from_json(cls, group, row, vocab_size):
        """Return the trajectory that `to_json` wrote; ValueError if no model can train on it."""
        # A file may come from anybody. An id past the end would be read from beyond the embedding.
        tokens = row["tokens"]
        if not all(type(t) is int and 0 <= t < vocab_size for t in tokens):
            raise ValueError(f"group {group}: expected token ids under {vocab_size}, got {tokens}")
        mask = np.array(row["sampled"], dtype=bool)
        logprobs = np.array(row["logprobs"], dtype=np.float64)
        if mask.shape != (len(tokens) - 1,) or logprobs.shape != mask.shape:
            raise ValueError(f"group {group}: expected a mask and log-probs of {len(tokens) - 1}")
        path = [tuple(segment) for segment in row["path"]]
        rewards = [(int(at), float(reward)) for at, reward in row["rewards"]]
        return cls(group, tokens, mask, logprobs, row["truncated"], path, rewards)


class ForkingEpisode(Episode):
    """An `Episode` for the rollouts number .. number + count - 1 of its group, until it forks.

    count, forks_left: 1, 0 without tree rollouts. It forks at its next forks_left turn boundaries.
    """

    def __init__(self, key, group, number, state, prompt, limit, count=1, forks_left=0):
        super().__init__(key, group, number, state, prompt, limit)
        self.count = count
        self.forks_left = forks_left
        self.path = [(self.turn, number, count)]
        self.turn_rewards = []
        self.heard = ()  # of the turn that has ended: the task's new state, reply and reward

    def origin(self) -> tuple:
        """Return the arguments that make this episode: its identity, and those after `state`."""
        limit = len(self.draws)
        identity = self.key, self.group, self.number
        return identity, (self.tokens, limit, self.count, self.forks_left)

    def hear(self, state, reply, reward):
        """Take the task's answer to the turn. Return whether the episode goes on."""
        # The reward stands at the turn's last target, which is one less than its last token.
        self.turn_rewards = [*self.turn_rewards, (len(self.tokens) - 2, float(reward))]
        return super().hear(state, reply, reward)

    def fork(self, forks) -> list:
        """Return the episodes that go on in the place of this one: itself, or its children."""
        # An episode for rollouts 4 5 6 7 becomes with forks 2 one for 4 5 and one for 6 7. Each
        # draws by the key of its own first rollout, so its tokens do not depend on its siblings.
        if not self.forks_left:
            return [self]
        children = []
        share = self.count // forks
        for first in range(self.number, self.number + self.count, share):
            child = copy.copy(self)
            for name in ("tokens", "mask", "logprobs", "queue"):
                setattr(child, name, getattr(self, name).copy())
            child.draws = uniforms((*self.key, self.group, first), len(self.draws))
            child.number = first
            child.count = share
            child.forks_left = self.forks_left - 1
            child.path = self.path + [(self.turn, first, share)]
            children.append(child)
        return children

    def trajectories(self) -> list:
        """Return a Trajectory for each rollout of this episode: equal ones if it never forked."""
        logprobs = np.array(self.logprobs)
        # NUMERICS: a token whose sampler log-prob is not finite has no ratio: it leaves loss and Z.
        # Pinned by tests/test_rollout.py::test_non_finite_sampler_logprobs_leave_the_loss.
        mask = np.array(self.mask, dtype=bool) & np.isfinite(logprobs)
        logprobs = np.where(mask, logprobs, 0.0)
        made = self.group, self.tokens, mask, logprobs, self.truncated, self.path, self.turn_rewards
        return [Trajectory(*made) for _ in range(self.count)]


REPLY_THREADS = 16


def asker_of(task):
    """Return a function that fills in `heard` of episodes whose turn has ended, by asking a task.

    A tool may take seconds, so threads ask for the episodes. The replies are put in the order of
    the episodes, so threads change no result. A task that must not be asked by several threads has
    the attribute `threads = False`.
    """

    def ask_one(episode):
        answer = episode.tokens[episode.turn :]
        with asking(task):
            state, reply, reward = task.reply(episode.state, answer)
        name = type(task).__name__
        where = f"in group {episode.group}, rollout {episode.number}"
        if not is_finite_number(reward):
            raise ValueError(f"{name} gave reward {reward} {where}, for the answer "
                             f"{task.show(answer)!r}: rewards must be finite")  # fmt: skip
        # A token outside the vocabulary would be read from whatever lies past the embedding.
        if reply is not None and not all(0 <= token < task.vocab_size for token in reply):
            raise ValueError(f"{name} replied {reply} {where}: ids end at {task.vocab_size - 1}")
        return state, reply, float(reward)

    # The replies of `guess` are arithmetic: a thread would cost more than the reply.
    safe = getattr(task, "threads", True) and type(task) is not Guess
    ask_all = ThreadPoolExecutor(REPLY_THREADS).map if safe else map

    def ask(episodes):
        for episode, heard in zip(episodes, list(ask_all(ask_one, episodes))):
            episode.heard = heard

    return ask


def is_finite_number(x) -> bool:
    """Return whether x, which a task has returned, is a finite number, or an array of one."""
    try:
        return math.isfinite(x.item() if hasattr(x, "item") else x)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


class Sampler:
    """Sample with a model of this process, or of the ranks that its plan splits it over.

    Rollouts, evaluation, tasks and the loop know these two methods of a sampler, and nothing else
    of it. To sample by another program, write a class that has them.
    """

    ELSEWHERE = "another rank has the task's state of this episode"

    def __init__(self, model):
        self.model = model

    def push(self, model, optimizer, version):
        """Take a policy's weights, one tensor at a time, in this model's dtype. Collective.

        version: the number of optimizer steps that have made them.
        """
        # What the two models hold in one memory needs no copy: see `shard_generator`.
        copy_weights(model, self.model, optimizer)

    def generate(self, rows, /, *, ending=None, **how) -> list:
        """Decode this rank's rows as `models.generate` does, whose keywords these are.

        rows: `models.Row`s. Collective under a plan: rows are `ForkingEpisode`s then.
        """
        part = getattr(self.model, "part", None)
        if part is None or part.plan.world == part.plan.dp:
            ended = generate(self.model, rows, ending=ending, **how)
            parallel.end_together(self.model)
            return ended

        # Ranks that decode together decode the rows of all of them. The draws are the rows' own,
        # and the logits are the same on all of these ranks, so they sample the same tokens.
        # NUMERICS: an all-reduce and an all-gather give every rank the same bits, and all that
        # follows is computed identically. Pinned by
        # tests/test_generator_plan.py::test_every_generator_plan_samples_the_tokens_of_one_process.
        origins, first = gather_replica(self.model, [row.origin() for row in rows])
        together = [ForkingEpisode(*of, self.ELSEWHERE, *rest) for of, rest in origins]
        together[first : first + len(rows)] = rows
        asking_once = functools.partial(self._ask_once, ending)
        ended = generate(self.model, together, ending=asking_once, **how)
        parallel.end_together(self.model)

        # What has been decoded together is distributed again.
        return [row for row in ended if row.state is not self.ELSEWHERE]

    def _ask_once(self, ask, episodes):
        """Let each rank ask its task about its own episodes, and tell the others. Collective."""
        # A task may be random, or answer by the clock: two ranks that asked by themselves might
        # decode different tokens, and wait for each other for good.
        own = [n for n, e in enumerate(episodes) if e.state is not self.ELSEWHERE]
        problem = ""  # raised after the other ranks have heard of it
        try:
            ask([episodes[n] for n in own])
        except Exception as error:
            problem = error

        # COMM: one message of each rank for all turns that a decoding step has ended; states stay.
        # Pinned by tests/test_generator_plan.py::test_a_task_is_asked_once.
        told = {} if problem else {n: episodes[n].heard[1:] for n in own}
        text = ""
        if problem:
            text = f"{problem}" or type(problem).__name__  # some errors have no text
        parts, _ = gather_replica(self.model, [(told, text)])
        if problem:
            raise problem
        for told, text in parts:
            if text:
                raise ValueError(f"on a rank that decodes the same episodes: {text}")
            for n in told.keys() - {*own}:
                episodes[n].heard = (self.ELSEWHERE, *told[n])


def play(config, task, sampler, starts, key) -> list:
    """Play every start `group` times. Return lists of trajectories, by group, in rollout order.

    starts: list of (group number, state, prompt tokens), of this rank.
    sampler: a Sampler, or an object with its methods.
    key: (seed, step). Draw t of rollout r of group g is uniforms((seed, step, g, r))[t].

    Collective under a plan.
    """
    # Without forks one episode for each rollout. With them each begins as `share` rollouts: group
    # 4, forks 2, fork_turns 1 begins with episodes 0 and 2, which represent rollouts 0 1 and 2 3.
    share = config.forks**config.fork_turns
    limit = config.max_new_tokens  # of a trajectory after its prompt, the task's replies included
    episodes = [
        ForkingEpisode(key, number, first, state, prompt, limit, share, config.fork_turns)
        for number, state, prompt in starts for first in range(0, config.group, share)
    ]  # fmt: skip

    # `generate` computes equal prompts once, lets a waiting episode enter where one has ended, and
    # calls `ending` with all whose turn has ended, then `after` with each. An episode that will
    # fork reserves a slot for each rollout, so that a fork finds its parent's keys in the cache.
    def after(episode):
        return episode.fork(config.forks) if episode.hear(*episode.heard) else []

    ended = sampler.generate(
        episodes, max_new_tokens=limit, temperature=config.temperature, end=task.end,
        ending=asker_of(task), after=after, slots=config.batch_rows,
        branches=lambda episode: episode.count,
    )  # fmt: skip

    # Episodes end in any order; a group's rollouts are put back into theirs.
    groups = {number: [] for number, _, _ in starts}
    for episode in sorted(ended, key=lambda episode: episode.number):
        groups[episode.group] += episode.trajectories()
    return list(groups.values())


# The first part of every random stream's key after the seed, so that no two streams are the same.
# ROLLOUT and EVALUATION are the core's.
DEMO_PROMPT = 3
DEMO_PLAY = 4


def draw_prompts(config, task, stream, step, groups, first=0, held_out=False):
    """Return (group, state, prompt tokens) for each group of a step that this rank plays.

    stream: ROLLOUT, EVALUATION or DEMO_PROMPT. It and step are part of the generators' keys.
    groups: group numbers of the step, of all ranks.
    first: number of the step's first prompt, counted from the start of the run.
    """
    # Group g is on rank g mod world: rank 1 of 2 plays 1, 3, 5 of six. Its generator is seeded by
    # its number and not by the rank, so any number of ranks plays the same games.
    starts = []
    for group in groups:
        if group % dist.get_world_size() == dist.get_rank():
            rng = np.random.default_rng([config.seed, stream, step, group])
            with asking(task):
                # A task from a file need not derive from Task, and may lack `demo_prompt`.
                if stream == DEMO_PROMPT and hasattr(task, "demo_prompt"):
                    state, prompt = task.demo_prompt(rng, first + group)
                else:
                    state, prompt = task.prompt(rng, first + group, held_out)
            starts.append((group, state, prompt))
    return starts


def evaluate(config, task, sampler):
    """Return the fraction of held-out prompts solved greedily, and a trajectory to show."""
    # One rollout of each prompt, and no random draw: the key is empty.
    prompts = range(config.eval_prompts)
    starts = draw_prompts(config, task, EVALUATION, 0, prompts, held_out=True)
    greedy = dataclasses.replace(config, group=1, temperature=0.0, forks=1, fork_turns=0)
    groups = play(greedy, task, sampler, starts, key=())

    # Each rank has played its own prompts; the sum over ranks is of all.
    solved_here = len([group for group in groups if group[0].reward >= 1])
    (solved,) = summed([solved_here], own_device())
    return solved / config.eval_prompts, groups[0][0] if groups else None


def demonstrations(task, starts, key, max_new_tokens=4096):
    """Return a trajectory for each start, played by `task.demo`. Its mask is where `demo` spoke.

    A play ends at the turn that reaches max_new_tokens. Draws depend on the key and the group.
    """
    trajectories = []
    ask = asker_of(task)
    for group, state, prompt in starts:
        rng = np.random.default_rng([*key, group])
        episode = ForkingEpisode(key, group, 0, state, prompt, 0)
        going = True
        while going and episode.new < max_new_tokens:
            with asking(task):
                answer = [int(token) for token in task.demo(episode.state, rng)]
            for token in answer:
                episode.append(token, 0.0)

            # The reply is queued, as in a rollout; here nobody decodes, so it is taken at once.
            ask([episode])
            going = episode.hear(*episode.heard)
            while episode.queue:
                episode.append(None, 0.0)
        trajectories += episode.trajectories()
        trajectories[-1].supervised = True
    return trajectories


# 14. Batches: what a step trains on -----------------------------------------------------------
# The full version of the core's batch source: dynamic sampling, --staleness, and demonstrations as
# the batches of the steps below 0.

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

MAX_STALENESS = 64  # steps, far more than learning bears


@dataclass
class SampledBatch(Batch):
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
        # Pinned by tests/test_staleness.py::test_ranks_and_a_resume_make_the_run_of_one_process.
        groups = [(n, [t.to_json() for t in group]) for n, group in gather_groups(self.groups)]
        return {"kept": self.kept, "sampled_by": self.sampled_by, "metrics": self.metrics,
                "groups": groups}  # fmt: skip

    @classmethod
    def from_json(cls, stored, config, vocab_size):
        """Return what `to_json` wrote, on any number of ranks; ValueError if it is not whole."""
        # Each rank looks at all of it, so that all refuse it together, and keeps the groups that it
        # would have sampled.
        groups = {}
        for number, rows in stored["groups"]:
            if len(rows) != config.group:
                raise ValueError(f"group {number} has {len(rows)} rollouts")
            groups[number] = [Trajectory.from_json(number, row, vocab_size) for row in rows]
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
            groups, rollouts, config.group, 3, lambda t: (t.reward, t.mask.sum(), t.truncated)
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
        self.pending = dict(pending or {})
        self.next = first_step + len(self.pending)
        self.last = last
        self.clock = StepClock(trainer.device)
        self.idle_since = time.perf_counter()
        self.shown = None  # a trajectory of the latest evaluation

    def get(self, step) -> SampledBatch:
        """Return the batch of a step, which begins now. Collective."""
        # First all batches are sampled that these weights sample.
        self.clock.start()
        self.trainer.where = f"step {step}"
        with timed(self.clock.seconds, "wait_rollout"):
            while self.next <= min(step + self.config.staleness, self.last):
                self.pending[self.next] = self.sample(self.next)
                self.next += 1
        return self.pending.pop(step)

    def sample(self, number) -> SampledBatch:
        """Sample a batch by the weights that the generator has now. Collective."""
        # Sampling has stood still since it or an evaluation last ended.
        seconds = {"seconds/wait_train": time.perf_counter() - self.idle_since}
        with timed(seconds, "rollout"):
            sampler = self.trainer.sampler
            rollouts, kept, metrics = collect(self.config, self.task, sampler, number)
        self.idle_since = time.perf_counter()

        # All rollouts of a batch are by the same weights, so the mean age is the largest one.
        age = min(number, self.config.staleness)
        metrics |= {"policy/age_mean": float(age), "policy/age_max": age} | seconds
        version = self.trainer.policy_version
        return SampledBatch(rollouts, kept, self.config.minibatches, version, metrics)

    def evaluate(self, step):
        """Return what the weights after a step solve. Step -1: those with which the loop begins."""
        with timed(self.clock.seconds, "eval"):
            solved, self.shown = evaluate(self.config, self.task, self.trainer.sampler)
        self.idle_since = time.perf_counter()
        return solved

    def stored(self) -> list:
        """Return the pending batches as JSON values for a checkpoint, on rank 0. Collective."""
        return [{"batch": n} | self.pending[n].to_json() for n in sorted(self.pending)]


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

    def evaluate(self, step):
        """Return None: the weights with which the loop begins are the first to be evaluated."""

    def stored(self) -> list:
        return []


def pending_batches(config, trainer, path, state) -> dict:
    """Return {number: SampledBatch} of a checkpoint's pending batches. state: its JSON values."""
    # After step s > 0 the batches s .. s + K - 1 are pending, whatever --steps was.
    step = state["step"]
    expected = list(range(step, step + config.staleness)) if step else []
    vocab_size = trainer.shape.vocab_size
    try:
        # A checkpoint of another staleness, or one that somebody has edited, is named as such.
        stored = state.get("pending", [])
        if [entry["batch"] for entry in stored] != expected:
            raise ValueError(f"expected batches {expected}")
        made = [SampledBatch.from_json(entry, config, vocab_size) for entry in stored]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__} {error}"
        raise ValueError(f"checkpoint {path}: its pending batches are damaged: {reason}") from error
    return dict(zip(expected, made))


class StepClock:
    """Measure the seconds and memory of a step. The batch source starts it, the log reads it."""

    def __init__(self, device):
        self.device = device
        self.start()

    def start(self):
        """Begin a step."""
        self.seconds = {}
        self.began = time.perf_counter()
        # Linux forgets a process's peak when a 5 is written here. Where it does not, the peak since
        # the process began is reported: a bound.
        if "cuda" in str(self.device):
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> dict:
        """Return the seconds of all phases, and the peak of memory, as metrics. Collective.

        memory/peak: the most megabytes at any moment, of the rank that had most: of its tensors on
        CUDA, of the process on a CPU.
        """
        # What was neither sampling nor evaluation was training.
        total = time.perf_counter() - self.began
        train = total - sum(self.seconds.values())
        peak = resident_peak()
        if "cuda" in str(self.device):
            peak = torch.cuda.max_memory_allocated(self.device) / 1e6
        most = torch.tensor(peak, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        found = {"seconds/train": train, "seconds/total": total, "memory/peak": most.item()}
        return self.seconds | found


@contextlib.contextmanager
def timed(seconds, phase):
    """Add the seconds of a phase to a dict, as seconds/PHASE."""
    start = time.perf_counter()
    yield
    seconds[f"seconds/{phase}"] = time.perf_counter() - start


# 15. A batch on many ranks: precisions, plans, and attention of rows --------------------------
# What the Trainer is made of: which plan and which precision a model has, its first weights, its
# optimizer, the loads of its experts. Skip it if you only want to know what a step computes.


def keep_states_wide(config, model):
    """Keep the states between layers in --dtype in mixed precision; return the model."""
    if config.is_mixed:
        own = next(model.parameters()).dtype
        model.residual_dtype = torch.promote_types(own, getattr(torch, config.dtype))
    return model


def plans_of(config) -> Plans:
    """Return the plans of --plan, with what it leaves open filled in."""
    # Without --plan every rank has all of the model. Without A of A|B the generator takes the
    # trainer's t and e, of which all other ranks hold replicas.
    world = dist.get_world_size()
    generator, trainer = config.plans
    trainer = trainer or Plan(dp=world)
    t = trainer.tp
    own = generator or Plan(dp=world // t, tp=t, ep=trainer.ep, etp=trainer.etp)
    return Plans(own, trainer)


def own_device():
    """Return where this rank computes, and where sums over ranks are made."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shard_generator(config, generator, device, *, policy, grid):
    """Turn a whole generator into this rank's part of it, with memory but without weights.

    policy, grid: weights that the policy holds in the same dtype and layout are shared, not copied.
        Its Grid serves the generator too if the degrees are equal.
    """
    plan = plans_of(config).generator
    if not plan.has_degrees_of(grid.plan):
        grid = Grid(plan, device.type)
    parallel.split_for_decoding(generator, plan, device_mesh=grid)
    parallel.share_or_allocate(policy, generator, device)


def first_weights(model, whole, directory, seed=0):
    """Fill a model with weights of a directory, or, if that is "", with random ones of a seed.

    whole: the whole model, on the meta device. The model may be a rank's part of it.
    """
    if directory:
        models.load_hf(directory, model=model, whole=whole)
    else:
        models.draw_weights(model, seed, whole)


def build_optimizer(config, model):
    """Make AdamW of this rank's parameters; with `zero1` each rank has a share of the moments."""
    settings = dict(lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay)
    make = functools.partial(torch.optim.AdamW, **settings, fused=True)
    return LocalOptimizer(model, make, zero=config.data_parallel == "zero1")


def padded(vectors, like):
    """Return ragged numpy vectors as one (B, T) tensor like `like`, each followed by zeros."""
    # numpy: a tensor for each of thousands of short vectors would cost more than the copy.
    lengths_B = np.array([len(vector) for vector in vectors])
    out_BT = np.zeros((len(vectors), lengths_B.max()))
    out_BT[np.arange(out_BT.shape[1]) < lengths_B[:, None]] = np.concatenate(vectors)
    return torch.from_numpy(out_BT).to(like)


def masked_attention(mask, group, method, debug=False):
    """Return what a layer calls: attention under a mask of the whole row, or on a group's ring.

    method, debug: of `ring_attention`.
    """

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        # A layer with a window narrows the mask further.
        options = dict(mask=mask.with_window(window), scale=scale, softcap=softcap)
        if group is None:
            return ring_attention.attend(q, k, v, **options)[0]
        options |= dict(group=group, method=method, debug=debug and f"layer {layer}")
        return ring_attention.ring_attention(q, k, v, **options)

    return attention


class ExpertLoads:
    """Count which experts the tokens of a step go to: (8), the loads, the routers' bias.

    `begin` and `end` enclose one forward_backward. A token that several trajectories share in a
    tree counts once for each of them. For a model without experts all of it does nothing.

    counts_LE: tokens of each expert in an optimizer step, for L layers with E experts each.
    parts: for each micro-batch {layer: loss} and {layer: tokens of each expert}, on this rank.
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

    def balance_of_row(self, sequence_j, token_j, *, num_sequences, groups):
        """Return the callback of the sparse layers of one micro-batch; see `balance_of_rank`."""
        how = dict(coef=self.coef_of_one, num_sequences=num_sequences, groups=groups)
        balance = models.Balance(sequence_j, token_j, **how)
        # The layers fill both in as they run. A layer that runs again fills in the same.
        self.parts.append((balance.losses, balance.counts))
        return balance

    def end(self) -> dict:
        """Return the metrics of a forward_backward. Collective."""
        if not self.layers:
            return {}

        # A rank has counted its own tokens in its own layers, so the sum over all ranks is the
        # whole. A number of tokens is exact in float64, so all ranks move the biases identically.
        sums = torch.zeros(1 + self.counts_LE.numel(), dtype=torch.float64, device=self.device)
        counts_LE = sums[1:].view_as(self.counts_LE)
        for losses, counts in self.parts:
            for loss_of_layer in losses.values():
                sums[0] += loss_of_layer
            for layer, counts_E in counts.items():
                counts_LE[self.layers.index(layer)] += counts_E
        dist.all_reduce(sums)
        counts_LE = counts_LE.cpu()
        self.counts_LE += counts_LE

        # 1: all experts of a layer got as much; E / K: every token chose the same experts.
        load_L = counts_LE.amax(1) / counts_LE.mean(1).clamp(min=1 / counts_LE.shape[1])
        balance = {"balance/loss": sums[0].item()} if self.coef else {}
        return {"experts/load_max": load_L.max().item()} | balance

    def update_bias(self, model):
        """Move the routers' biases by (11) of models.py, after an optimizer step."""
        if not self.rate:
            return
        has = [module.layer for module in model.modules() if hasattr(module, "votes")]
        counts = {layer: self.counts_LE[self.layers.index(layer)] for layer in has}
        models.update_router_bias(model, counts)


# 16. Trees: forked rollouts, and prefixes that are run once -----------------------------------
# Two uses of one shape: rollouts that fork at turn boundaries (--forks), and training on shared
# prefixes at the cost of their distinct tokens (--tree). Skip it without those flags, but for
# `RowBatches`, which trains without a tree.


class RowBatches(PackedBatches):
    """Run micro-batches that are rows of sequences end to end: `--tree disabled`.

    tokens_run is the number of tokens of the latest batch that the model has run on.
    """

    def __init__(self, model, config, experts):
        super().__init__(
            model, attention=self.attention_of_row, indices=ring_attention.indices,
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
        mask = ring_attention.Mask.documents(doc_ids=document_1S)
        return masked_attention(mask, group, self.config.cp_method, self.config.debug)

    def pack_micro_batches(self, sequences, masks):
        self.tokens_run = sum(map(len, sequences))
        return super().pack_micro_batches(sequences, masks)


class TreeBatches(RowBatches):
    """Run micro-batches that are packed trees of the sequences' prefixes: `--tree sparse`."""

    def share_out(self, batch):
        """Distribute the data-parallel ranks' trajectories: prefixes together, equal times."""
        # Context ranks share one tree's tokens.
        if self.plan.cp > 1 or self.plan.dp == 1:
            return batch
        cost = Cost(recomputed=1 / 3 if self.config.recompute else 0.0)
        sequences = [t.tokens for t in batch]
        _, share = redistribute(sequences, batch, group=self.part.grid.group["dc"], cost=cost)
        return share

    def attention_of_row(self, tree, group):
        """Return the attention to a token's path. tree: (TokenTrie, length of the padded row)."""
        how = dict(method=self.config.cp_method, debug=self.config.debug)
        return packed_tree_attention(*tree, group=group, **how)

    def pack_micro_batches(self, sequences, masks):
        """Return the sequences of each tree, as lists of indices, and the `PackedRow` of each."""
        parallel.require_batch(self.model, sequences, masks)
        # Sorted sequences share their beginnings with the sequence before them.
        trie = TokenTrie(sequences)
        lengths = trie.lengths[trie.order].tolist()
        cut = functools.partial(parallel.pack, lengths, shared=trie.shared.tolist())

        # Other ranks may need more trees than this one, and a pipeline pads all trees to the
        # longest. So trees are cut as small as their number allows, which makes them about equal.
        count = parallel.agreed_micro_batches(self.model, len(cut(self.micro_tokens)))
        most = bisect.bisect_left(
            range(self.micro_tokens), True, key=lambda tokens: len(cut(tokens)) <= count,
            lo=min(self.micro_tokens, len(trie) // max(1, count)),
            hi=min(self.micro_tokens, len(trie)),
        )  # fmt: skip
        micros = [sorted(trie.order[k] for k in run) for run in cut(most)]
        micros += [[]] * (count - len(micros))

        # A tree without a sequence is one token, of which no sequence holds a target.
        tries = [
            trie if len(indices) == len(sequences) > 0
            else TokenTrie([sequences[i] for i in indices] or [[0]]) for indices in micros
        ]  # fmt: skip
        self.tokens_run = sum(len(trie) for indices, trie in zip(micros, tries) if indices)
        lengths = parallel.row_lengths(self.plan, list(map(len, tries)))
        rows = [
            tree_row(trie, [masks[i] for i in indices] or [[]], length)
            for indices, trie, length in zip(micros, tries, lengths, strict=True)
        ]
        return micros, [row if held else row.without_sequences() for held, row in zip(micros, rows)]


def tree_row(trie, masks, length) -> parallel.PackedRow:
    """Return a tree as a row of `length` places. masks: which of a sequence's tokens[1:] count."""
    # Targets of different sequences may be one token of the tree: it is scored once, at the token
    # before it, and `entries` tells each target which of the scored tokens it is.
    edges_N, entries_K = map(torch.from_numpy, wanted_edges(trie, masks))
    mask_BT = padded(masks, torch.zeros(0, dtype=torch.bool))

    # A sequence holds the tokens of its path: a pair (sequence, token) for each of them.
    sequence_J = torch.arange(len(masks)).repeat_interleave(trie.lengths)
    return parallel.PackedRow(
        *packed_tree(trie, length), (trie, length), mask_BT,
        trie.parent[edges_N], trie.tokens[edges_N], entries_K, sequence_J, trie.paths,
    )  # fmt: skip


class ChunkBatches(TreeBatches):
    """Train on one tree chunk by chunk, in memory for a path: `--tree dta`."""

    def forward_backward(self, sequences, masks, loss_fn):
        """Add the loss's gradient to .grad. loss_fn gets sequences that end in a chunk."""
        parallel.require_batch(self.model, sequences, masks)
        trie = TokenTrie(sequences)
        self.tokens_run = len(trie)

        def loss_of_chunk(ended, *scores):
            mask_BT = padded([masks[i] for i in ended], scores[0]).bool()
            return loss_fn(ended, mask_BT, *scores)

        # COMM: experts are on other ranks, which have other trees: all make the same number of
        # calls. Pinned by tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
        sync_group = dist.group.WORLD if self.plan.ep > 1 else None
        model = self.model
        if self.plan.tp > 1:
            model = parallel.PaddedTokens(model)
        # check_finite=False: a NaN is optim_step's to find, on all ranks at once.
        config = self.config
        result = tree_backward(
            model, trie, loss_of_chunk, max_tokens=config.chunk_tokens, recompute=config.recompute,
            temperature=config.temperature, masks=masks, lockstep=sync_group, batched=True,
            check_finite=False,
        )  # fmt: skip

        # Tensor ranks have walked the same tree and found the same numbers: one of them counts.
        if parallel.speaks_for_replica(self.model):
            self.experts.parts.append(({}, result.router_counts))


BATCHES = {"disabled": RowBatches, "sparse": TreeBatches, "dta": ChunkBatches}


# 17. The trainer: policy, optimizer and generator ---------------------------------------------
# What a step computes, in the order in which `train` calls it. To use the file, skip it.


class Trainer(SimpleTrainer):
    """The core's trainer, for every plan, tree, precision, objective and sampler.

    Each method does what the core's method of this name does, and calls none of them: these run a
    whole model on padded rows, and shards, pipelines and packed rows need another order of work.

    `forward_backward` may be called any number of times before `optim_step`: gradients add up over
    calls and ranks, without an average, as every loss is divided by Z, which the caller has found.
    Every method is collective: all ranks call it, with whatever share of the batch, none included.
    """

    COUNTS = "policy_version", "skipped", "skipped_in_a_row"
    MOST_SKIPPED = 3  # non-finite gradients in a row that end a run

    def __init__(self, config, model, *, generator=None, reference=None, teacher=None):
        """Shard the models by the settings' plans, and allocate those on the meta device.

        model: Transformer. It is trained. From the meta device it gets its first weights here.
        generator: Transformer, or an object with the methods of a Sampler. It samples. Its weights
            come with the first push.
        reference: Transformer. The KL is measured against it; `write_reference` fills it.
        teacher: Transformer. --teacher's, filled here: its log-probs give the advantages.
        """
        self.config = config
        self.policy_version = 0
        self.where = "starting"  # how far the run is, in words
        self.skipped = 0
        self.skipped_in_a_row = 0
        is_empty = next(model.parameters()).is_meta
        self.device = own_device() if is_empty else next(model.parameters()).device
        self.shape = model.config
        self.size = sum(p.numel() for p in model.parameters())  # numbers of the whole model

        # There is always a plan: n ranks with whole copies have d = n, and one process has d = 1.
        self.plan = plans_of(config).trainer
        self.grid = Grid(self.plan, self.device.type, shard=config.shard_ranks or None)

        # The weights are drawn, or read, for the shapes of the whole model: a stage of a pipeline
        # has some of the tensors only.
        whole = copy.deepcopy(model) if is_empty else None
        compute_dtype = getattr(torch, config.compute) if config.is_mixed else None
        self.model = self.shard_model(keep_states_wide(config, model), compute_dtype)
        if is_empty:
            first_weights(self.model, whole, config.model, config.seed)
        self.optimizer = build_optimizer(config, self.model)
        self.experts = ExpertLoads(config, self.model, self.device)

        # A model that has memory stays as it is: a whole copy.
        self.sampler = generator
        if isinstance(generator, Transformer):
            self.sampler = Sampler(generator)
            if next(generator.parameters()).is_meta:
                shard_generator(config, generator, self.device, policy=self.model, grid=self.grid)
        self.reference = None if reference is None else self.shard_model(reference)
        self.teacher = teacher
        if teacher is not None:
            whole = copy.deepcopy(teacher)
            self.teacher = self.shard_model(teacher)
            first_weights(self.teacher, whole, config.teacher)

        # Which metrics of tokens this run has. A loss of no token says it, the same on all ranks.
        none_BT = torch.zeros(1, 0)
        given = dict(entropy_BT=none_BT, ref_BT=None if reference is None else none_BT)
        if config.advantage == "gae":
            given |= dict(value_BT=none_BT, old_value_BT=none_BT, return_BT=none_BT)
        _, sums = grpo_loss(none_BT, None, none_BT, none_BT.bool(), **self.settings(), Z=1, **given)
        self.maxima = [x for x in sums if x in METRICS and METRICS[x].over_tokens == "max"]
        self.sums = [x for x in sums if x not in self.maxima]

    def shard_model(self, model, compute_dtype=None):
        """Return this rank's part of a whole model; a model on the meta device gets memory."""
        # Each micro-batch has an attention of its own, which replaces the causal one.
        config = self.config
        is_empty = next(model.parameters()).is_meta
        model = parallelize(
            model, self.plan, device_mesh=self.grid, mode=config.data_parallel,
            attention=models.causal_attention, schedule=config.pp_schedule, ac=config.ac,
            compile=config.compile, offload=config.offload, compute_dtype=compute_dtype,
        )  # fmt: skip
        if is_empty:
            parallel.materialise(model)
        return model

    def batches(self, model) -> "RowBatches":
        """Return what runs the policy, or another model, on micro-batches of sequences."""
        # A micro-batch is a row of sequences, filled in order up to micro_tokens: lengths 6 3 5 2
        # and micro_tokens 10 give [6 3] [5 2]. With --tree it is a tree of their prefixes.
        return BATCHES[self.config.tree](model, self.config, self.experts)

    def loss_denominator(self, batch) -> float:
        """Return this rank's term of Z of (7): the sum over ranks is num_global_valid_tokens."""
        # The loss of demonstrations is the mean of their tokens, whatever the aggregation.
        is_supervised = bool(batch) and batch[0].supervised
        how = dict(max_new_tokens=self.config.max_new_tokens)
        how["aggregation"] = "token_mean" if is_supervised else self.config.aggregation
        return loss_denominator([t.mask for t in batch], **how)

    def forward_backward(self, batch, num_global_valid_tokens, *, num_sequences=None):
        """Add the gradient of (7) for this rank's trajectories; return metrics of all ranks' batch.

        batch: list of Trajectory. Of demonstrations the loss is l_t = -lp_t instead of (2)-(6).
        num_global_valid_tokens: float. Z, the sum of `loss_denominator` over ranks and over all
            calls that precede one `optim_step`. Under sequence_mean it counts sequences.
        num_sequences: int. The trajectories of these calls, for (8). Default: this call's.

        ValueError for Z <= 0.
        """
        if not num_global_valid_tokens > 0:
            raise ValueError(f"num_global_valid_tokens must be > 0, got {num_global_valid_tokens}")
        if len({t.supervised for t in batch}) > 1:
            raise ValueError("expected demonstrations or rollouts, got both: make two calls")
        Z = num_global_valid_tokens
        measured = []

        # Ranks that run one forward together first get what all of them have played. On one device
        # that is the batch itself. With trees, sequences then move to where their prefixes are.
        run = self.batches(self.model)
        gathered, _ = gather_replica(self.model, batch)
        together = run.share_out(gathered)

        def loss_of(indices, mask_BT, *scores):
            # The term of (7) of one micro-batch, whose sequences are known by their index.
            loss, sums = self.loss([together[i] for i in indices], mask_BT, *scores, Z=Z)
            measured.append(sums)
            return loss

        # Forward, loss, backward, one micro-batch after the other. Losses are terms of one sum, so
        # their gradients only have to be added, which is what backward() does to .grad. Each layer
        # of experts attaches its term of (8) as it runs.
        self.experts.begin(batch, num_sequences)
        run.forward_backward([t.tokens for t in together], [t.mask for t in together], loss_of)
        return self.metrics_of_all_ranks(measured, batch, run.tokens_run)

    def settings(self) -> dict:
        """Return the keywords of `grpo_loss` that are flags."""
        return {name: getattr(self.config, name) for name in LOSS_SETTINGS}

    def loss(self, micro, mask_BT, lp_BT, entropy_BT, value_BT=None, *, Z):
        """Return `grpo_loss` of a micro-batch: its trajectories, and the model's scores of them."""
        # Of demonstrations l_t is -lp_t, maximum likelihood: REINFORCE with advantages of 1.
        if micro and micro[0].supervised:
            one_BT = torch.ones_like(lp_BT)
            how = dict(objective="reinforce", entropy_BT=entropy_BT, Z=Z)
            return grpo_loss(lp_BT, None, one_BT, mask_BT, **how)

        def column(name):
            # `prepare` gives a column to all trajectories of a step or to none.
            vectors = [getattr(t, name) for t in micro]
            return None if vectors[0] is None else padded(vectors, lp_BT)

        return grpo_loss(
            lp_BT, column("old_logprobs"), column("advantages"), mask_BT, Z=Z, **self.settings(),
            sampler_BT=column("sampler_logprobs"), ref_BT=column("ref_logprobs"),
            entropy_BT=entropy_BT, value_BT=value_BT, old_value_BT=column("values"),
            return_BT=column("returns"),
        )  # fmt: skip

    def metrics_of_all_ranks(self, measured, batch, tokens_run) -> dict:
        """Return `loss_metrics` of all ranks' micro-batches, and how many tokens were trained on.

        measured: the sums of each micro-batch. tokens_run: fewer than the batch's in a tree.
        """
        # Of this rank: sums in float64, since a step may have millions of tokens, and the largest.
        own_sums = torch.zeros(len(self.sums), dtype=torch.float64, device=self.device)
        own_maxima = own_sums.new_zeros(len(self.maxima))
        absent = own_sums.new_zeros(())  # demonstrations have no reference and no critic
        for sums in measured:
            own_sums += torch.stack([sums.get(name, absent) for name in self.sums])
            largest = [sums.get(name, absent) for name in self.maxima]
            own_maxima = torch.maximum(own_maxima, torch.stack(largest))

        # Sums of sums: ranks hold unequal shares, so no rank's mean may enter. Ranks that work
        # together on the same trajectories have the same sums, and only one of them adds its sums.
        numbers = [*own_sums.tolist(), tokens_run]
        if not parallel.speaks_for_replica(self.model):
            numbers = [0.0] * len(numbers)
        flat_tokens = sum(len(t.tokens) for t in batch)
        dist.all_reduce(own_maxima, op=dist.ReduceOp.MAX)
        *totals, tokens_run, flat_tokens = summed([*numbers, flat_tokens], self.device)

        totals = dict(zip([*self.sums, *self.maxima], totals + own_maxima.tolist()))
        trained = {"tokens/trained": int(tokens_run), "tokens/trained_flat": int(flat_tokens)}
        return loss_metrics(totals) | trained | self.experts.end()

    def prepare(self, batch) -> dict:
        """Set what the loss needs of each trajectory. Return metrics of it. Collective.

        These are reference and old log-probs, advantages, and the final mask. Each rank has groups
        of its own.
        """
        # Everything in (1)-(7) that has no gradient is computed once, before the first update. From
        # then on the policy moves and these numbers do not. A demonstration needs none of them.
        config = self.config
        if batch.sampled_by is None:
            return {}
        everyone = batch.trained()

        # The frozen reference scores what the policy has sampled: a KL compares them on one token.
        if self.reference is not None:
            for t, ref in zip(everyone, self.forward_only(everyone, self.reference)):
                t.ref_logprobs = ref

        # Three sources of `old`. `proximal`: a forward pass of the trainer, which leaves the
        # sampler's rounding out of the ratio. Else, with several updates, or older weights that
        # sampled: what the sampler recorded; old is smp then, and the weight (4) would be 1. Else
        # None: the policy is its own old policy, so every ratio is exactly 1 and rounding cannot
        # clip a token.
        if config.proximal:
            for t, old in zip(everyone, self.forward_only(everyone)):
                t.old_logprobs = old
        elif config.minibatches > 1 or config.staleness:
            for t in everyone:
                t.old_logprobs = t.sampler_logprobs

        # A group's advantages count its truncated rollouts, which have rewards: the filter takes
        # them out of the loss only. The critic's are whitened over what is left.
        for t in everyone:
            if t.truncated and config.overlong == "filter":
                t.mask = np.zeros_like(t.mask)
        if config.advantage in TOKEN_ADVANTAGES:
            metrics = TOKEN_ADVANTAGES[config.advantage].of(self, batch)
        else:
            metrics = reward_advantages(self, batch)
        return metrics | advantage_metrics(self, everyone)

    def total(self, number) -> float:
        """Return the sum of a number over all ranks. Collective."""
        return summed([number], self.device)[0]

    def learning_rate(self, step) -> float:
        """Return AdamW's rate in a step of the loop. A step's updates share one rate."""
        # Supervised steps are those below 0, with a warm-up of their own and no decay.
        c = self.config
        total = c.steps if step >= 0 else c.demos
        how = dict(warmup=min(c.lr_warmup, total), total=total)
        if step < 0:
            lr = DEMO_LR["model" if c.model else "random"]
            return lr * lr_factor(c.demos + step, decay="constant", **how)
        return c.lr * lr_factor(step, decay=c.lr_decay, first_step=c.lr_first_step, **how)

    def forward_only(self, batch, model=None, column=0) -> list:
        """Return a model's scores of the sampled tokens, 0 elsewhere: (T,) for each trajectory.

        model: Default: the policy. column: 0 log-probs, 1 entropies, 2 a critic's values.
        """
        # All ranks of a replica run a model together, on what all of them hold. This rank's
        # trajectories begin at `first`.
        model = model or self.model
        together, first = gather_replica(model, batch)
        run = self.batches(model)
        scores = run.forward([t.tokens for t in together], [t.sampled for t in together])
        own = scores[first : first + len(batch)]
        return [columns[column].double().numpy() for columns in own]

    def optim_step(self, lr: float | None = None) -> dict:
        """Sum the gradients over ranks, clip them by their global norm, and update the weights.

        A non-finite norm skips the step on all ranks. MOST_SKIPPED in a row end the run.
        """
        # Only here do ranks add up their gradients, once a step, however many micro-batches it had.
        # The sum needs no division: Z was global. The norm is of the sum, never of a rank's part.
        suspect = reduce_gradients(self.model)
        norm = clip_grad_norm(self.model, self.config.max_grad_norm)
        lr = self.config.lr if lr is None else lr
        metrics = {"grad_norm": norm.item(), "lr": lr}

        # One NaN would stay in the weights and in AdamW's moments for good.
        if norm.isfinite():
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.experts.update_bias(self.model)
            self.policy_version += 1
            self.skipped_in_a_row = 0
        else:
            metrics["nonfinite"] = self.skip_step(suspect)
        self.optimizer.zero_grad()
        self.experts.counts_LE.zero_()
        return metrics | {"policy_version": self.policy_version}

    def skip_step(self, suspect) -> str:
        """Count a skipped step; return which rank and parameter had it first, on all ranks."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        text = parallel.name_suspects(self.model, suspect)

        # Several in a row are not an accident: the weights or the data are broken.
        if self.skipped_in_a_row >= self.MOST_SKIPPED:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite gradient, "
                f"first in {text}; lower --lr or look at that tensor's inputs"
            )
        # Said at once, since the next update may end the run.
        warn(f"{self.where}: skipped, non-finite gradient first in {text}")
        return text

    def push_weights(self) -> int:
        """Give the sampler the weights of now; return their version. Collective."""
        self.sampler.push(self.model, self.optimizer, self.policy_version)
        return self.policy_version

    def save_checkpoint(self, path, **extra) -> None:
        """Write weights, optimizer and `extra` (JSON values) to a directory, all or nothing."""
        state = {name: getattr(self, name) for name in self.COUNTS} | extra
        write_checkpoint(path, training_tensors(self.model, self.optimizer), state)

    def load_checkpoint(self, path) -> dict:
        """Restore what save_checkpoint wrote, on any number of ranks; return its JSON values."""
        state = read_training(path, self.model, self.optimizer, counts=("step", *self.COUNTS))
        for name in self.COUNTS:
            setattr(self, name, state[name])
        return state


# 18. Tasks from files -------------------------------------------------------------------------
# What a task must have, how a task of --task is made, and how its errors are told. If you only use
# `guess`, skip this section.


class Task:
    """The methods of a task. The rewards of a rollout's turns add up, and 1 or more is solved.

    A task need not derive from this class. It may lack `demo` and `demo_prompt`, which only --demos
    needs. With the attribute `threads = False` one thread asks for all replies.
    """

    vocab_size: int
    end: tuple[int, ...]  # tokens that end a turn

    def __init__(self, config=None):
        """Make the task. It is called as Class(config)."""

    def prompt(self, rng, index: int, held_out: bool):
        """Begin a group: return (state, prompt tokens). index: in the run, or in the evaluation."""
        raise NotImplementedError

    def reply(self, state, answer: list[int]):
        """Hear a turn, its end token last: return (new state, reply tokens, reward).

        The state is a plain value, so rollouts can share it. A reply of None ends the rollout. A
        turn that max_new_tokens has cut off is never heard.
        """
        raise NotImplementedError

    def demo_prompt(self, rng, index: int):
        """Begin a demonstration, as `prompt` begins a group. index counts the run's."""
        return self.prompt(rng, index, False)

    def demo(self, state, rng) -> list[int]:
        """Return a valid answer to train on before the first rollout (--demos)."""
        raise ValueError(f"{type(self).__name__} has no demonstrations; use --demos 0")

    def show(self, tokens: list[int]) -> str:
        """Return tokens as a person reads them, for samples.jsonl and errors."""
        return " ".join(map(str, tokens))


class TaskError(ValueError):
    """An error of a task's own code, with its file and line."""


@contextlib.contextmanager
def naming_the_task(file):
    """Turn whatever the code in a task's file raises into an error that names file and line.

    Left alone, a RuntimeError about a task's own connection would read as a lost rank, and
    sys.exit(0) would end the run with 0. A ValueError keeps its message, for it is meant for the
    reader; of anything else `main` prints the traceback too.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        # The innermost line of the task's own file: what it called may have raised elsewhere.
        where = Path(file).name
        for at in traceback.extract_tb(error.__traceback__):
            if Path(at.filename).resolve() == Path(file).resolve():
                where = f"{at.filename}, line {at.lineno}, in {at.name}"
        if isinstance(error, ValueError):
            raise TaskError(f"{error} ({where})") from None
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            reason = f"the task called sys.exit({error.code!r})"
        raise TaskError(f"{reason} ({where})") from error


def asking(task):
    """Return the guard around calls of a task's methods. The tasks of this project need none."""
    file = Path(sys.modules[type(task).__module__].__file__)
    own = Path(__file__), Path(__file__).with_name("text.py")
    return contextlib.nullcontext() if file in own else naming_the_task(file)


def is_held_out(data: bytes) -> bool:
    """Return whether a prompt is kept for evaluation: one in ten, by its hash."""
    return zlib.crc32(data) % 10 == 0


def jsonl(config) -> Task:
    """Make the task of text. Only this task and commands about text import text.py."""
    sys.modules.setdefault("train_grpo", sys.modules[__name__])  # as in `from_file`
    import text

    return text.Jsonl(config)


TASKS = {"guess": Guess, "jsonl": jsonl}


def names_code(spec) -> bool:
    """Return whether spec is FILE.py:NAME of a file that is there."""
    file = spec.rpartition(":")[0]
    return file.endswith(".py") and Path(file).is_file()


def from_file(spec, kind):
    """Import FILE.py of FILE.py:NAME; return (file, its NAME). kind: class or function."""
    # The module gets a name of its own, so that a file called like a module of ours hides nothing.
    # If it imports train_grpo, it gets this file, run as __main__, and not another class Task.
    file, _, name = spec.rpartition(":")
    sys.modules.setdefault("train_grpo", sys.modules[__name__])
    found = importlib.util.spec_from_file_location(f"task_{Path(file).stem}", file)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    with naming_the_task(file):
        found.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{file} has no {kind} {name!r}")
    return file, getattr(module, name)


def make_task(config) -> Task:
    """Make the task of `--task`: one of TASKS, or a class from a file; ValueError for neither."""
    if config.task in TASKS:
        return TASKS[config.task](config)
    if not names_code(config.task):
        raise ValueError(
            f"--task {config.task!r} is none of {', '.join(TASKS)}, no FILE.py:Class")
    file, make = from_file(config.task, "class")
    with naming_the_task(file):
        task = make(config)

    # A class in a file need not derive from Task, so nothing can be taken for granted.
    name = type(task).__name__
    size = getattr(task, "vocab_size", 0)
    end = getattr(task, "end", ())
    if not isinstance(end, (tuple, list)) or not end or not all(0 <= t < size for t in end):
        raise ValueError(f"{name} needs vocab_size and end, ids under it; got {size} and {end}")
    return task


# 19. The run: models, and what is refused -----------------------------------------------------
# What a run is made of: the shapes and models that its settings ask for, and what is refused before
# a directory is touched. If you only want the algorithm, skip this section.


def own_shape(config, task) -> ModelConfig:
    """Return the shape of a model with random weights: the flags', with the task's tokens."""
    return ModelConfig(
        vocab_size=task.vocab_size, eos_token_id=tuple(task.end),
        num_hidden_layers=config.layers, hidden_size=config.hidden,
        intermediate_size=3 * config.hidden, head_dim=config.hidden // config.heads,
        num_attention_heads=config.heads, num_key_value_heads=max(1, config.heads // 2),
    )  # fmt: skip


def require_rows(task, shape, source):
    """Raise ValueError if the task has tokens that the model of a directory does not have."""
    if task.vocab_size > shape.vocab_size:
        raise ValueError(f"the task has {task.vocab_size} tokens, {source} {shape.vocab_size}")


def shape_of(config, task) -> ModelConfig:
    """Return the shape of the run's model; ValueError if it does not fit task or settings."""
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    require_rows(task, shape, config.model)
    for name in ("balance_coef", "router_bias_rate"):
        if getattr(config, name) and not shape.sparse_layers:
            where = config.model or "the model of --layers and --hidden"
            raise ValueError(f"{_flag(name)} is about experts, and {where} has none: leave it 0")
    return shape


def empty_model(config, shape, dtype, *, is_teacher=False) -> Transformer:
    """Make a model on the meta device, with what the settings add to all but a teacher."""
    with torch.device("meta"):
        model = Transformer(shape).to(getattr(torch, dtype))
        if config.advantage == "gae" and not is_teacher:
            model.add_value_head()
        if config.router_bias_rate and not is_teacher:
            models.give_router_bias(model, config.router_bias_rate)
    return keep_states_wide(config, model)


def build(config, task):
    """Make policy, generator and, where there is a KL, a reference, all on the meta device.

    The Trainer shards them, allocates this rank's parts, and gives the policy its first weights.
    The first push fills the generator, and `write_reference` the reference.
    """
    # A reference never changes, so it needs no masters: it has the precision in which the policy
    # computes.
    shape = shape_of(config, task)
    model = empty_model(config, shape, config.dtype)
    generator = empty_model(config, shape, config.rollout_dtype).requires_grad_(False)
    reference = None
    if config.kl_coef:
        reference = empty_model(config, shape, config.compute).requires_grad_(False)
    return model, generator, reference


def build_teacher(config, task):
    """Make the model of --teacher, if there is one, on the meta device in the compute dtype.

    That its tokens mean the same is for the user to know: two tokenizers may differ in much.
    """
    if not config.teacher:
        return None
    shape = ModelConfig.from_hf(config.teacher)
    require_rows(task, shape, f"the model of --teacher {config.teacher}")
    return empty_model(config, shape, config.compute, is_teacher=True).requires_grad_(False)


def start_run(config, progress=None) -> int:
    """Set up a run and do it. Return the exit code. progress: of `naming_lost_ranks`."""
    progress = progress or parallel.Progress()
    progress.where = lambda: "setting up"
    task = make_task(config)
    # A task that does not derive from Task has demonstrations if it has a method `demo`.
    if config.demos and getattr(type(task), "demo", Task.demo) is Task.demo:
        raise ValueError(f"{type(task).__name__} has no demonstrations; use --demos 0")
    if config.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise ImportError("--tensorboard: pip install tensorboard")
    # What only the task, a package or the model can tell is asked before anything is written, the
    # same on all ranks.
    shape = shape_of(config, task)
    teacher = build_teacher(config, task)
    shapes = [shape] if teacher is None else [shape, teacher.config]
    for one in shapes:
        require_plans(config, one)
        require_room(config, task, one.max_position_embeddings)
    tell_of_router_loss(config, shape)

    with contextlib.ExitStack() as stack:  # the lock on the run's directory
        model, generator, reference = build(config, task)
        trainer = Trainer(config, model, generator=generator, reference=reference, teacher=teacher)
        # All that can be refused has been: only now is a directory claimed.
        out = agree(lambda: prepare_out(config, stack))
        code = run(config, task, trainer, out, progress)

        # COMM: ranks wait for each other for the last time. Then nobody needs another rank: rank 0
        # may write for longer than --timeout, and the others leave. Pinned by
        # tests/test_faults.py::test_no_rank_waits_for_the_last_export.
        progress.where = lambda: "finished"
        progress.advice = "what the run saved is whole"
        dist.barrier()
        if code == 0 and dist.get_rank() == 0:
            export(config, task, out)
        return code


def require_plans(config, shape):
    """Raise ValueError for a plan that does not fit the model's shape or the number of ranks."""
    world = dist.get_world_size()
    if config.plan:
        config.plans.trainer.require_fits(
            config=shape, world=world, ulysses=config.cp_method == "ulysses",
            shard=config.shard_ranks or None,
        )  # fmt: skip
        plans_of(config).generator.require_fits(config=shape, world=world)


def tell_of_router_loss(config, shape):
    """Say in one line if a checkpoint's experts were balanced by a loss in its training."""
    # transformers' loss is of a whole batch, so it depends on how a batch is cut; (8) does not.
    raw = models.read_json(Path(config.model) / "config.json") if config.model else {}
    coef = raw.get("router_aux_loss_coef") if shape.sparse_layers else None
    if coef:
        does = f"--balance-coef {config.balance_coef:g} does that here, for each sequence"
        if not config.balance_coef:
            does = "here nothing does: --balance-coef, a loss for each sequence, is 0"
        warn(f"the experts of {config.model} were balanced by router_aux_loss_coef {coef}; {does}")


def require_room(config, task, positions):
    """Raise ValueError if a prompt and an answer are longer than the model has positions."""
    # `generate` refuses too, but on one rank in the middle of a step. Here every rank looks at the
    # same first prompts, one to train on and one held out, so that all refuse together.
    for stream, held_out in ((ROLLOUT, False), (EVALUATION, True)):
        rng = np.random.default_rng([config.seed, stream, 0, 0])
        with asking(task):
            _, prompt = task.prompt(rng, 0, held_out)
        if len(prompt) + config.max_new_tokens > positions:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and --max-new-tokens {config.max_new_tokens} "
                f"exceed the {positions} positions of the model"
            )


# 20. The run: resume, save, log ---------------------------------------------------------------
# What surrounds the core's loop so that it can be killed, resumed, watched and trusted. If you only
# want the algorithm, skip it; `run` and `Log` say what a run writes.


def warn(text):
    """Print one line on standard error, on rank 0 alone."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr)


def say(text):
    """Print one line above the bar, on rank 0 alone."""
    if dist.get_rank() == 0:
        tqdm.write(text)


class Interrupted(Exception):
    """Raised to end the loop after a step in which a signal was seen. It holds the number."""


def run(config, task, trainer, out, progress) -> int:
    """Do the run in the directory `out`. Return the exit code: 0, or 128 + a signal's number."""
    began = time.perf_counter()
    stop = Stop()
    progress.where = lambda: trainer.where
    progress.advice = advice_of(out)
    first_step, origin, pending = restore(config, trainer, out)
    introduce(config, task, trainer, out, first_step, origin)
    # A generator has no weights before the first push.
    trainer.push_weights()
    try:
        if first_step < 0:
            source = Demonstrations(config, task, trainer, first_step)
            checkpointer = Checkpointer(config, trainer, source, out, stop)
            log = Log(config, trainer, source, out)
            logs = Logs(log, checkpointer)
            train(dataclasses.replace(config, steps=0), source, trainer, logs)
            log.close()  # the table and its bar stay on the screen

            # The loop begins with its own reference and optimizer. The second moments of a
            # converged supervised fit are tiny: kept, they would make the first
            # policy-gradient steps ten times too long.
            trainer.optimizer.state.clear()
            write_reference(out, trainer)
            checkpointer.save(0)

        queue = RolloutQueue(config, task, trainer, max(0, first_step), pending)
        log = Log(config, trainer, queue, out)
        if first_step <= 0:
            log.before(queue.evaluate(-1))
        rollouts = RolloutLog(config, task, queue, out)
        checkpointer = Checkpointer(config, trainer, queue, out, stop)
        # `log` is first: it reads the clock, and a step's seconds are without writing rollouts.
        logs = Logs(log, rollouts, IdleWarning(config), checkpointer)
        solved = train(config, queue, trainer, logs)
    except Interrupted as interrupted:
        log.close()
        return 128 + interrupted.args[0]

    if solved is None:  # resumed at its last step
        solved = queue.evaluate(config.steps - 1)
    log.close()
    if rollouts.text is not None:  # a run that was resumed at its last step has played nothing
        say(f"sample: {rollouts.text}")
    seconds = time.perf_counter() - began
    say(f"eval/solved {solved:.3f} after {config.steps} steps, {seconds:.0f} s")
    return 0


def advice_of(out) -> str:
    """Return how to go on with a run, for errors and signals."""
    return f"go on with --resume --out {out}"


def introduce(config, task, trainer, out, first_step, origin):
    """Say in three lines what is trained, how and where, and cut files to that step. Collective."""
    # All settings are in config.json.
    c = config
    world = dist.get_world_size()
    if first_step < 0:
        origin += f", first {-first_step} supervised steps"
    dtype = f"{c.dtype}, computes in {c.compute}" if c.is_mixed else c.dtype
    say(f"{c.task}: {trainer.size:,} parameters, {origin}")
    say(f"from step {max(0, first_step)} of {c.steps}: {c.prompts} groups of {c.group} a step, "
        f"{world} rank(s), plan {c.plan or f'd{world}'}, {c.data_parallel}, "
        f"{trainer.device.type}, {dtype}")  # fmt: skip
    say(f"out {out}: `plot {out}` draws it; Ctrl-C saves, --resume --out {out} goes on")
    if getattr(task, "note", ""):  # what a task has decided, such as a template
        say(task.note)

    # Lines after the checkpoint belong to steps that are now done again.
    firsts = dict.fromkeys(("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"), max(0, first_step))
    if c.demos:
        firsts["demos.jsonl"] = c.demos + min(0, first_step)

    def cut():
        for name, step in firsts.items():
            with writing(Path(out, name), advice_of(out)):
                cut_lines(Path(out, name), step)

    agree(cut)


def restore(config, trainer, out):
    """Bring a trainer to where its run goes on. Collective.

    Returns the first step to do, the source of the weights in words, and the pending batches.

    Supervised steps are the steps -K .. -1 of a run with --demos K, in checkpoints demos-NNNNNNNN
    of their own, which count from 0. When they are done, step-00000000 takes the place of these.
    """
    # The newest checkpoint of the loop, then of the supervised steps, then the very beginning.
    if config.resume:
        path, state = read_newest(out, trainer.load_checkpoint)
        if path:
            pending = pending_batches(config, trainer, path, state)
            read_reference(out, trainer)
            return state["step"], f"the weights of {path}", pending
        path, state = read_newest(out, trainer.load_checkpoint, "demos")
        if path:
            return state["step"] - config.demos, f"the weights of {path}", {}
    origin = f"the weights of {config.model}" if config.model else f"random of seed {config.seed}"
    if config.resume:
        origin += f" (no checkpoint in {out} yet)"
    if not config.demos:
        write_reference(out, trainer)
    return -config.demos, origin, {}


class Logs:
    """Tell several objects of each step, in their order. The loop has one log."""

    def __init__(self, *logs):
        self.logs = logs

    def step(self, *done):
        for log in self.logs:
            log.step(*done)


class Checkpointer:
    """Save a run after each step in which that is due, and end it after a signal."""

    def __init__(self, config, trainer, source, out, stop):
        self.config = config
        self.trainer = trainer
        self.source = source
        self.out = str(out)
        self.stop = stop

    def step(self, step, batch, metrics, updates, solved):
        """Save after a step if that is due. Collective."""
        # After the last supervised step the run saves, once the optimizer begins anew.
        if step != -1:
            self.save(step + 1)

    def save(self, step):
        """Save the run before `step` if that is due; raise Interrupted if a signal was seen."""
        # A signal is looked at between two steps, by all ranks together: they save the same step.
        # A resumed run cuts its files after the checkpoint: by now each line up to it is there.
        c = self.config
        signalled = self.stop.agreed(self.trainer.device)
        kind = "demos" if step < 0 else "step"
        done = step if step > 0 else c.demos + step
        is_last = step in (0, c.steps)  # of the supervised steps, or of the loop
        if not (is_last or signalled or (c.save_every and done % c.save_every == 0)):
            return

        state = f"saved after {step} steps" if step > 0 else f"saved after {done} supervised steps"
        saved = self.write(kind, 0 if step == 0 else done)
        if not saved:
            out = self.out
            newest = agree(lambda: newest_checkpoint(out) or newest_checkpoint(out, "demos"))
            state = f"the newest checkpoint is {newest}" if newest else f"{out} holds no checkpoint"
        if is_last and not saved:
            raise FloatingPointError(
                f"the run ends in steps that were skipped for a non-finite gradient, so its last "
                f"state is not saved; {state}"
            )
        if signalled and step < c.steps:
            say(f"{signal.Signals(signalled).name}: {state}; {advice_of(self.out)}")
            raise Interrupted(signalled)

    def write(self, kind, step) -> bool:
        """Write a checkpoint and delete what it supersedes. Return whether it was written."""
        # A run whose last gradients were not finite is about to go wrong. Its checkpoints would
        # push the good ones out. Nothing but this comparison sees a bit that flipped in one rank's
        # memory.
        out = self.out
        if self.trainer.skipped_in_a_row:
            return False
        difference = parallel.replica_difference(self.trainer.model, self.trainer.optimizer)
        if difference:
            raise FloatingPointError(
                f"{difference}; nothing is saved: look at that rank's memory, and {advice_of(out)}"
            )
        pending = self.source.stored()
        extra = {"pending": pending} if pending else {}
        self.trainer.save_checkpoint(f"{out}/{kind}-{step:08d}", step=step, **extra)

        # Once the loop has a checkpoint, the checkpoints of the supervised steps have no use.
        def outdated():
            finished = parallel.checkpoints(out, "demos") if kind == "step" else []
            return parallel.superseded(out, step, self.config.keep, kind) + finished

        for old in agree(outdated):
            shutil.rmtree(old, ignore_errors=True)
        return True


def step_metrics(trainer, batch, metrics, updates, step) -> dict:
    """Merge all metrics of a step except seconds and the evaluation."""
    found = batch.metrics | metrics | mean_metrics(updates) | {
        "lr": trainer.learning_rate(step), "policy_version": trainer.policy_version,
        "updates/skipped": trainer.skipped,
    }  # fmt: skip
    if step < 0 and updates:
        return found
    if step < 0:
        raise ValueError(f"{trainer.where}: the demonstrations hold no token to learn")
    if not updates:
        text = "no update, since nothing was left to train on: every group was dropped, or every"
        warn(f"step {step}: {text} rollout was truncated and filtered")
        return found | {"tokens/trained": 0, "tokens/trained_flat": 0}

    # The age of the sampler's weights when each update began. A skipped update made no version.
    ages = []
    version = trainer.policy_version
    for update in reversed(updates):
        if "nonfinite" not in update:
            version -= 1
        ages.append(version - batch.sampled_by)
    return found | {"policy_age/update_mean": float(np.mean(ages))}


def do_step(config, source, trainer, step) -> dict:
    """Do one step of the loop without evaluation or log, for an audit; return its metrics."""
    found = {}

    def keep(step, batch, metrics, updates, solved):
        if step >= 0:
            found.update(step_metrics(trainer, batch, metrics, updates, step))

    one = SimpleNamespace(first_step=step, get=source.get, evaluate=lambda step: None)
    train(dataclasses.replace(config, steps=step + 1), one, trainer, SimpleNamespace(step=keep))
    return found


COLUMNS = dict(
    reward="reward/mean", solved="reward/solved", eval="eval/solved", norm="grad_norm",
    entropy="entropy/token_mean", clipped="ratio/clipped_fraction", gap="logprob_gap/max",
)  # fmt: skip
DEMO_COLUMNS = dict(loss="loss/token_mean", entropy="entropy/token_mean", norm="grad_norm")

# A line of demos.jsonl. Here loss/token_mean is the mean negative log-likelihood of a token,
# whatever --aggregation says of the loop.
DEMO_METRICS = (
    "lr", "entropy/token_mean", "loss/token_mean", "grad_norm", "policy_version",
    "updates/skipped", "tokens/trained", "tokens/trained_flat", "seconds/total",
)  # fmt: skip


class Log:
    """Write a line of metrics.jsonl for each step, and print a table with a bar, on rank 0.

    The supervised steps have a Log of their own, which counts them from 0 in demos.jsonl.
    """

    EVERY = 5  # steps between rows of the table, in addition to those with an evaluation

    def __init__(self, config, trainer, source, out):
        self.trainer = trainer
        self.source = source
        self.out = Path(out)
        self.on = dist.get_rank() == 0
        self.solved_before = None  # known in the process that does step 0
        self.demos = config.demos if source.first_step < 0 else 0
        self.file = "metrics.jsonl"
        self.prefix = ""  # of TensorBoard's names
        self.columns = COLUMNS
        self.names = [x for name in METRICS for x in (f"{name}_first", name)]
        if self.demos:
            self.file = "demos.jsonl"
            self.prefix = "demos/"
            self.columns = DEMO_COLUMNS
            self.names = DEMO_METRICS
        self.events = None
        if config.tensorboard and self.on:
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(out)
        say("  step" + "".join(f"{name:>10}" for name in self.columns) + "  tokens/s")
        total = self.demos or config.steps
        done = self.demos + source.first_step
        self.bar = tqdm(total=total, initial=done, disable=None if self.on else True, unit="step")

    def before(self, solved):
        """Print the row before the loop: what the weights solve with which the loop begins."""
        self.solved_before = solved
        self.row("before", {"eval/solved": solved})

    def step(self, step, batch, metrics, updates, solved):
        """Write the line of a step. Collective."""
        seconds = self.source.clock.read()
        line = step_metrics(self.trainer, batch, metrics, updates, step) | seconds
        if step == 0:
            line["eval/solved_before"] = self.solved_before
        if solved is not None:
            line["eval/solved"] = solved
        if not self.on:
            return

        number = self.demos + step
        line = {name: line[name] for name in self.names if name in line}
        append_lines(self.out / self.file, [{"step": number} | line])
        if self.events:
            for name, value in line.items():
                self.events.add_scalar(self.prefix + name, value, number)
        shown, name = next(iter(self.columns.items()))
        self.bar.set_postfix_str(f"{shown} {line[name]:.3f}", refresh=False)
        self.bar.update()
        if solved is not None or step == -1 or number % self.EVERY == 0:
            self.row(number, line)

    def close(self):
        """End the bar, and write the events that TensorBoard's writer still holds."""
        self.bar.close()
        if self.events:
            self.events.close()

    def row(self, label, line):
        """Print a row of the table."""
        shown = [line.get(name) for name in self.columns.values()]
        cells = [" " * 10 if x is None else f"{x:10.3g}" for x in shown]
        if "seconds/total" in line:
            tokens = line.get("tokens/generated", 0) + line["tokens/trained_flat"]
            cells.append(f"{tokens / line['seconds/total']:10.0f}")
        say(f"{label:>6}{''.join(cells)}".rstrip())


class IdleWarning:
    """Say it once if some steps in a row had no two rewards to compare."""

    STEPS = 3

    def __init__(self, config):
        self.learns = compared_by(config.advantage) == "nothing"  # so from equal rewards too
        self.idle = 0  # steps in a row with nothing to learn from, up to now

    def step(self, step, batch, metrics, updates, solved):
        """Count the steps without two rewards to compare."""
        is_idle = batch.metrics["reward/groups_equal"] == 1 and not self.learns
        self.idle = self.idle + 1 if is_idle else 0
        if self.idle != self.STEPS:
            return
        # What helps depends on which reward it is that all of them have.
        text = "in each group all rewards are equal, so nothing is learned: raise --group"
        if batch.metrics["reward/groups_none"] == 1:
            text = ("no rollout is solved and no reward is better than another in its group, so "
                    "nothing is learned: read samples.jsonl; begin with --demos, reward parts of "
                    "an answer, or raise --group, --max-new-tokens or --temperature")  # fmt: skip
        if batch.metrics["reward/groups_all"] == 1:
            text = ("every rollout is solved, so nothing more is learned: stop here, or give "
                    "harder prompts")  # fmt: skip
        warn(f"warning: steps {step - self.STEPS + 1} to {step}: {text}")


class RolloutLog:
    """Write rollouts.jsonl, and samples.jsonl with a rollout of each evaluation."""

    def __init__(self, config, task, source, out):
        self.config = config
        self.task = task
        self.source = source
        self.out = Path(out)
        self.text = None  # of the latest sample

    def step(self, step, batch, metrics, updates, solved):
        """Write the rollouts of a step that --log-rollouts says, and its sample. Collective."""
        # A step whose sampler had a checkpoint's weights can be audited from that checkpoint: it is
        # logged whole, and so is the first of a run and of a resumed one. An evaluation shows one
        # group.
        c = self.config
        sampled_at = step - c.staleness
        whole = step == 0 or sampled_at == self.source.first_step or c.log_rollouts == "all"
        if c.save_every and sampled_at >= 0:
            whole = whole or sampled_at % c.save_every == 0
        shown = self.source.shown
        if solved is not None and shown and dist.get_rank() == 0:
            with asking(self.task):
                self.text = self.task.show(shown.tokens)
            line = {"step": step, "reward": shown.reward, "text": self.text}
            append_lines(self.out / "samples.jsonl", [line])
        if c.log_rollouts == "none" or not (whole or evaluates(c, step)):
            return
        one = batch.kept[0] if batch.kept else 0
        groups = {number: group for number, group in batch.groups.items() if whole or number == one}

        # Ranks have played groups of their own, and rank 0 writes: in the order of their numbers,
        # so that the file does not tell how many ranks there were.
        # COMM: what decides above is the same on all ranks, so all come here or none does.
        # Pinned by tests/test_audit.py::test_runs_of_several_ranks_are_audited_by_one.
        for _, group in gather_groups(groups):
            lines = [rollout_line(self.task, step, i, t) for i, t in enumerate(group)]
            append_lines(self.out / "rollouts.jsonl", lines)


def rollout_line(task, step, number, t) -> dict:
    """Return a line of rollouts.jsonl: rollout `number` of its group, a Trajectory."""
    # Vectors as they are, of all targets, so that a line can be read without the run.
    with asking(task):
        text = task.show(t.tokens)
    line = {"step": step, "group": t.group, "rollout": number, **t.to_json(), "text": text}
    line["advantage"] = None if t.advantages is None else t.advantages.tolist()
    del line["path"]
    return line


def append_lines(path, lines):
    """Append lines of JSON to a file of a run. JSON has no NaN: such a number becomes null."""
    with writing(path, advice_of(path.parent)), path.open("a") as file:
        for line in lines:
            for key, value in line.items():
                if isinstance(value, float) and not math.isfinite(value):
                    line = line | {key: None}
            file.write(json.dumps(line) + "\n")


def export(config, task, out):
    """Write the last weights to OUT/hf for transformers, `chat` and --model, on rank 0 alone."""
    # Only this needs the package, and the run is over: its checkpoint holds the weights.
    directory = f"{out}/hf"
    if config.router_bias_rate:
        say(f"{directory} is not written: its format has no --router-bias-rate")
        return
    if importlib.util.find_spec("safetensors") is None:
        say(f"{directory} not written: pip install safetensors, and then "
            f"python train_grpo.py export {out} {directory}")  # fmt: skip
        return

    # The weights of the last checkpoint in the generator's dtype, or in mixed precision the
    # masters, which are finer.
    dtype = config.dtype if config.is_mixed else config.rollout_dtype
    model = policy_in(newest_checkpoint(out), config, task, dtype, alone=True)
    with writing(directory, advice_of(out)):
        write_hf(model, directory, config.model)


def write_hf(model, directory, source):
    """Write a model as a Hugging Face directory, all of it or nothing. An old one is replaced.

    source: the --model directory whose text files are copied, or "".
    """
    partial = beside(directory)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        models.save_hf(model, partial)
        if source and not Path(source).is_dir():
            raise FileNotFoundError(f"the text files of --model {source} are gone")
        if source:
            models.copy_text_files(source, partial)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # half of a checkpoint would only take room
        raise

    # Between these two lines there is no directory, and never half of one. A directory cannot be
    # renamed to one that holds files, so the old one has to go first.
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def beside(directory) -> Path:
    """Return where a directory is first written. A kill leaves it, and the next try deletes it."""
    return Path(f"{Path(directory).absolute()}.tmp")


def resident_peak() -> float:
    """Return the most megabytes that this process has had in memory; 0 if the system hides it."""
    # Linux says it in kB, other systems in a unit of their own.
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 / 1e6 if found else 0.0
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
    return 0.0


def write_reference(out, trainer):
    """Make the policy of now the frozen reference, and store it, so that a resume has it."""
    # A resumed run would else measure its KL against the weights that it resumes with. Both models
    # are sharded identically, so each rank copies its own part.
    if trainer.reference is not None:
        reference = parallel.tensors_of(trainer.reference)
        for name, x in parallel.tensors_of(trainer.model).items():
            local(reference[name]).copy_(local(x))
        write_checkpoint(f"{out}/reference", reference, {})


def read_reference(out, trainer):
    """Read the frozen reference of a run that goes on."""
    try:
        if trainer.reference is not None:
            read_checkpoint(f"{out}/reference", parallel.tensors_of(trainer.reference))
    except ValueError as error:
        advice = "put a copy of it back, or begin again with another --out"
        raise ValueError(f"{error}; {advice}") from error


@contextlib.contextmanager
def writing(path, advice):
    """Name in an OSError the file that was not written, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} not written ({error}): make room or mend the directory, then {advice}"
        ) from error


def read_json_lines(path, *, skip_torn_last=False) -> list:
    """Return [(line number from 1, object)] of a file with a JSON object a line or nothing.

    ValueError names a line that holds anything else. skip_torn_last: leave out the last line if it
    is damaged and no newline ends it, as a kill or a full disk leaves a file.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")  # JSON strings may hold other line breaks
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; expected a file of JSON lines") from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
            problem = None if isinstance(value, dict) else f"it is a {type(value).__name__}"
        except (ValueError, RecursionError) as error:
            problem = error
        # The last piece is empty if the last line ends, so else it is a line that nobody finished.
        if problem is None:
            found.append((number, value))
        elif not (skip_torn_last and number == len(lines)):
            raise ValueError(f"{path} line {number} holds no JSON object: {problem}")
    return found


def whole_lines(path) -> list[dict]:
    """Return the JSON objects of a run's file of lines, but not a last line that is torn."""
    if not path.exists():
        return []
    return [line for _, line in read_json_lines(path, skip_torn_last=True)]


def cut_lines(path, step):
    """Drop the lines of `step` and later, and torn ones; the file is replaced whole."""
    lines = whole_lines(path)
    for line in lines:
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{path} has a line without a step: {json.dumps(line)[:60]}")
    # A kill between the two last lines leaves the old file and a .tmp that nobody reads.
    partial = path.with_suffix(".tmp")
    partial.write_text("".join(json.dumps(x) + "\n" for x in lines if x["step"] < step))
    partial.replace(path)


# 21. Curves -----------------------------------------------------------------------------------
# `train_grpo.py plot`: a picture of what runs wrote to metrics.jsonl. If you draw by other means,
# skip this section.


def plot(argv) -> int:
    """Draw reward/mean and eval/solved by step, into curve.png in the first run's directory."""
    parser = argparse.ArgumentParser("train_grpo.py plot", description=plot.__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run")
    runs = [Path(run) for run in parser.parse_args(argv).runs]
    for run in runs:
        if not (run / "metrics.jsonl").exists():
            raise ValueError(f"{run} holds no metrics.jsonl; give the directory of a run")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for n, run in enumerate(runs):
        lines = whole_lines(run / "metrics.jsonl")
        rewards = [x["reward/mean"] for x in lines]
        axes.plot([x["step"] + 1 for x in lines], rewards, f"C{n}", label=run.name)
        # What a step leaves is drawn after it, and what was solved before the first step at 0.
        dots = [(0, x["eval/solved_before"]) for x in lines if "eval/solved_before" in x]
        dots += [(x["step"] + 1, x["eval/solved"]) for x in lines if "eval/solved" in x]
        axes.plot([x for x, _ in dots], [y for _, y in dots], f"C{n}o", markersize=4)
    axes.set(xlabel="step", ylabel="line: reward/mean   dots: eval/solved", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(runs[0] / "curve.png", dpi=120)
    print(f"wrote {runs[0] / 'curve.png'}")
    return 0


# 22. A run, read by one process ---------------------------------------------------------------
# What `audit` and the commands of text.py need to read a run. If you only train, skip it.


# One process reads a run without its plan, which is another way to compute the same.
ONE_PROCESS = dict(
    plan="", data_parallel="ddp", ac="none", cp_method="ring", pp_schedule="1f1b", shard_ranks=0,
    offload=False, compile=False,
)  # fmt: skip


@contextlib.contextmanager
def one_process(command, device="cpu", threads=1):
    """Make a process group of this process alone, unless there is one; yield the device."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(f"{command} is one process: start it without torchrun")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")

    # Checkpoints, prompts and sums ask for their rank and for the number of ranks: 0 and 1.
    if dist.is_initialized():
        yield "cpu"
        return
    device = connect(device, threads=threads)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def policy_in(path, config, task, dtype, alone=False):
    """Return the policy of a checkpoint, whole, on the CPU. alone: no other rank calls it."""
    # The run has checked that the task fits. With --model there may be no task here.
    shape = ModelConfig.from_hf(config.model) if config.model else own_shape(config, task)
    model = empty_model(config, shape, config.dtype).to_empty(device="cpu")

    # The weights alone: AdamW's two moments of each are twice as much again, and stay on the disk.
    weights = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    weights |= {f"buffer.{name}": x for name, x in parallel.persistent_buffers(model).items()}
    read_checkpoint(path, weights, only=("model.", "buffer."), alone=alone)
    return keep_states_wide(config, model.to(getattr(torch, dtype)).requires_grad_(False))


# 23. Commands: the run's directory, main ------------------------------------------------------
# Who may write where, how an error ends the process, and which command was meant. If you only run
# the file, skip this section.


@contextlib.contextmanager
def locked(out):
    """Hold a run's directory by the kernel's lock on OUT/lock, which ends with its process."""
    # "a" makes the file where there is none and changes nothing in it. LOCK_NB: refuse at once if
    # another process has it, and do not wait for that process to end.
    with (Path(out) / "lock").open("a") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{out} is in use by another process: wait for it to end, or choose "
                             f"another --out") from error  # fmt: skip
        except (ImportError, OSError) as error:
            text = f"warning: {out} cannot be locked ({error}): let no other run write there"
            print(text, file=sys.stderr)
        yield


def refuse_directory(config, out):
    """Raise ValueError if this run may not have the directory: nothing is overwritten unasked."""
    config_json = out / "config.json"  # Hugging Face checkpoints have one too
    holds_run = config_json.exists() and '"advantage"' in config_json.read_text()
    # A start that was killed, or that is in flight, has left no more than these two files.
    found = {path.name for path in out.iterdir()} if out.exists() else set()
    if holds_run and not config.resume:
        raise ValueError(f"{out} holds a run: --resume to go on with it, or choose another --out")
    if not holds_run and found - {"config.tmp", "lock"}:
        raise ValueError(f"{out} holds files that are not a run's; choose another --out")


def first_free_directory(config):
    """Make and return the first of runs/TASK-0, runs/TASK-1, .. that does not exist yet."""
    name = config.task.rpartition(":")[2]  # of FILE.py:Class the class
    for n in itertools.count():
        out = Path("runs") / f"{name}-{n}"
        # Making it is the claim: of two runs that start in one instant, one gets this error.
        with contextlib.suppress(FileExistsError):
            out.mkdir(parents=True)
            return out


def note_data(config, out):
    """Store the checksum of the data file; on --resume, raise ValueError if it differs."""
    # A step draws lines by their number. With other lines a resumed run would go on as if nothing
    # had happened: neither the run that began, nor a run that anybody could repeat.
    if config.task != "jsonl":
        return
    sums = {"data": zlib.crc32(Path(config.data).read_bytes())}
    path = out / "data.json"
    if not (config.resume and path.exists()):
        path.write_text(json.dumps(sums) + "\n")
    elif models.read_json(path) != sums:
        raise ValueError(f"{config.data} (--data) is not what it was when {out} began: put the old "
                         f"lines back, or start a new run")  # fmt: skip


def prepare_out(config, stack) -> str:
    """Choose, lock (until `stack` is closed) and fill the run's directory on rank 0, or refuse."""
    # A directory is looked at twice: before the lock's file is written into it, because a
    # stranger's directory must not get that file, and under the lock, because only then nobody else
    # can change what was seen.
    out = Path(config.out or "runs")
    with writing(out, "start again; or choose another --out"):
        if not config.out:
            out = first_free_directory(config)
        elif not (out / "lock").exists():
            refuse_directory(config, out)
            out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(out))
        refuse_directory(config, out)
        if config.resume and not (out / "config.json").exists():
            say(f"{out} holds no run to resume: one begins")

        note_data(config, out)

        # The settings last, and whole or not at all: a directory that has them is a run's.
        stored = dataclasses.asdict(config)
        stored |= {"resume": False, "out": str(out)}
        partial = out / "config.tmp"
        partial.write_text(json.dumps(stored, indent=2) + "\n")
        partial.replace(out / "config.json")
    return str(out)


def _measuring_file(name="measure_grpo"):
    """Import tests/bench/measure_grpo.py: check (plans, trees and families) and bench."""
    tests = Path(__file__).resolve().parent / "tests"
    sys.path += [str(tests), str(tests / "bench")]
    if not importlib.util.find_spec(name):
        raise ImportError(f"check and bench need tests/bench/{name}.py in this file's folder")
    return __import__(name)


def main(argv) -> int:
    """Run what the command line says and return the exit code.

    0: done. 1: an audit disagrees with the run. 2: an error, named on stderr.
    130, 143: the run was saved after Ctrl-C or SIGTERM.
    """
    try:
        # Commands read a run, or measure. They are one process, and none of them trains.
        if argv[:1] == ["core"]:
            return core_main(argv[1:]) or 0
        if argv[:1] == ["plot"]:
            return models.quietly(plot, argv[1:])
        # audit.py and text.py import this file, under its own name. Only the arguments cross.
        if argv[:1] == ["audit"]:
            import audit

            return audit.main(argv[1:])
        if argv and argv[0] in ("eval", "chat", "export"):
            import text

            return text.main(argv)
        if argv[:2] == ["check", "--device"]:
            return _measuring_file("measure_gpu").check("train_grpo", argv[1:])
        if argv in (["check"], ["check", "--all"]) or argv[:1] == ["bench"]:
            return _measuring_file().main(argv)

        # A run. The settings are checked before a rank waits for another.
        config = parse_config(argv).check()
        progress = parallel.Progress()
        with parallel.naming_lost_ranks(progress):
            connect(config.device, timeout=config.timeout, threads=config.threads)
            code = start_run(config, progress)
    except ERRORS as error:
        return report(error)
    except KeyboardInterrupt:  # a Ctrl-C before the first step; from there on Stop has it
        print("interrupted, with nothing to save", file=sys.stderr, flush=True)
        return leave(128 + signal.SIGINT)
    # Rank 0 of several ranks may write for long. The others leave their group as it is, because to
    # destroy it might wait for rank 0.
    if dist.get_world_size() == 1:
        dist.destroy_process_group()
    return leave(code)


# What a command may raise: something is wrong with flags, files, packages or numbers.
ERRORS = ValueError, ImportError, OSError, FloatingPointError


def report(error) -> int:
    """Name an error in one line on stderr, of a task's own code with its traceback. Return 2."""
    if isinstance(error, TaskError) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    print(f"rank {os.environ.get('RANK', 0)}: error: {error}", file=sys.stderr, flush=True)
    return leave(2)  # a clean teardown would wait for ranks that may be gone or stuck


def leave(code) -> int:
    """Return the exit code. Of several ranks, end this process: gloo may abort at exit."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
