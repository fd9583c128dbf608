"""GRPO on multi-turn tasks: play each prompt several times, and make better games more probable.

Two rules make a run the same on any number of ranks, until rounding changes a sampled token. A loss
is a sum over sampled tokens, divided by **one Z**, their number in the minibatch on all ranks: so
gradients are summed and never averaged. **A draw depends on (seed, step, group, rollout)** alone.

    python train_grpo.py                                     # learn `guess`, on one process
    torchrun --nproc-per-node 4 train_grpo.py --plan d2t2    # cut the batch, and each layer, in two
    python train_grpo.py --model DIR --data FILE.jsonl --save NEW    # a released model learns

A group is the games, or rollouts, of one prompt. Rollout i has the reward R_i and sampled tokens t.
Of softmax(logits / temperature), lp_t is the log-prob now, old_t when sampled, H_t the entropy now.

    (1)  A_i  = R_i - mean of the group's rewards
    (2)  r_t  = exp(lp_t - old_t)
    (3)  l_t  = -min(r_t A_i, clip(r_t, 1 - low, 1 + high) A_i)  gradient -r_t A_i dlp_t, or 0
    (4)  l_t <- l_t - entropy_coef H_t
    (5)  loss = sum of l_t / Z over all ranks

What is GRPO (arXiv:2402.03300) here, and what is not:
    (1)  GRPO also divides by the group's standard deviation. Dr. GRPO (2503.20783) does not.
    (3)  is the clip of PPO (1707.06347), as in GRPO. The wider upper bound is DAPO's (2503.14476).
    (4)  is the entropy bonus of PPO. GRPO, Dr. GRPO and DAPO have none, and --model sets it to 0.
    (5)  is the token mean of DAPO. GRPO takes the mean of each rollout, then of all rollouts, so a
         token of a long rollout counts less. Dr. GRPO divides by a constant.
    KL   GRPO adds a KL penalty to a reference. DAPO and Dr. GRPO do not. The folder full/ has all.

Letters in names are dimensions:  B rows   G rollouts of a group   N sampled tokens   V vocabulary
M width   S targets of a row: its tokens but the first   s this rank's share of S
"""

import argparse
import copy
import datetime
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import models
import parallel
from ring_attention import ring_attention, zigzag_indices
from tree_attention import tree_logprobs

# 1. Settings, and random numbers ----------------------------------------------------------------
def flag(default, text, least=None):
    """Return a field of `Config` that is a flag of the command line, with its help and bound."""
    return field(default=default, metadata={"help": text, "least": least})


@dataclass
class Config:
    """The settings of a run."""
    # the run
    seed: int = flag(0, "of weights, data and sampling", least=0)
    steps: int = flag(150, "batches of rollouts", least=1)
    # the task
    size: int = 7  # guess: numbers
    turns: int = 4  # guess: answers allowed
    data: str | None = flag(None, "questions: a file of JSON lines")
    # the model
    layers: int = 3  # decoder layers
    hidden: int = 96  # model width
    heads: int = 4  # query heads; half as many key heads
    dtype: str = flag("float32", "float32 or float64")
    model: str | None = flag(None, "a Hugging Face checkpoint")  # None: random weights
    save: str | None = flag(None, "gets the trained weights of --model")
    # rollouts
    prompts: int = flag(28, "groups of a step", least=2)  # over all ranks, for 2 minibatches
    group: int = flag(16, "rollouts of a prompt", least=2)
    max_new_tokens: int = flag(16, "maximum of a rollout", least=1)  # with the task's replies
    temperature: float = flag(1.0, "of sampling", least=1e-6)  # and of every log-prob
    # the loss
    clip_low: float = 0.2  # ratio clip below 1
    clip_high: float = 0.28  # ratio clip above 1; 0.28 is DAPO's
    entropy_coef: float = 0.02  # weight of the entropy bonus
    # the optimizer
    minibatches: int = 2  # optimizer steps for each batch of rollouts
    rows: int = flag(256, "rollouts per forward pass", least=1)  # for the memory of activations
    lr: float = flag(1e-3, "of AdamW", least=1e-9)
    lr_warmup: int = 5  # steps of linear warm-up, at most --steps; 0: none
    beta2: float = 0.99  # AdamW
    max_grad_norm: float = 1.0  # clip the global norm
    # the ranks
    plan: str = flag("d1", "d2, t2, c2, or a product as d2t2")  # data, tensor, context (ring)
    tree: bool = flag(False, "compute shared prefixes once")
    device: str = flag("cpu", "cpu, or cuda: a GPU for each rank")
    # evaluation
    eval_every: int = 10  # steps between evaluations; the last step always evaluates
    eval_prompts: int = 70  # prompts of one evaluation, at most
    metrics: str = flag(os.devnull, "gets a JSON line for each step")


# A released model has learned already: smaller steps, and fewer and longer rollouts than `guess`.
RELEASED = dict(lr=1e-5, entropy_coef=0.0, prompts=8, group=8, rows=8, max_new_tokens=128)
# A prompt is drawn by the key (seed, stream, step, group). Training and evaluation are two streams.
ROLLOUT, EVALUATION = 1, 2
LAUNCHER = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"  # what torchrun tells a rank


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


# The text of a prompt, which suits most models. Edit it, for example to the chat template of yours:
# Qwen's and SmolLM2's is "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n".
TEMPLATE = "Question: {question}\nAnswer:"


def last_number(text) -> Decimal | None:
    """Return the last number of a text, exactly: 1080 of `12 eggs are $1,080.` None without one."""
    text = str(text) if type(text) in (str, int, float) else ""  # a JSON file has lists, too
    # The sign of -3 may be U+2212, as in a book, and is not the dash of 7-3. 1,080 is one number,
    # and 1,2 are two. 1e5 is 100000. A fraction is not a number: 1/2 is neither 1 nor 2.
    number = r"(?:(?<!\w)-)?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d{1,3}\b)?"
    fraction = rf"[\xbc-\xbe\u2150-\u215e]|{number}(?:\s*[/\u2044]\s*{number})+"
    found = re.findall(f"{fraction}|{number}", text.replace("\u2212", "-"))
    last = found[-1].replace(",", "") if found else ""
    return Decimal(last) if re.fullmatch(number, last) else None


class Questions:
    """Answer a question of a file. Reward 1 if the last number of the answer is right.

        {"question": "How many legs do 3 cats have?", "answer": "3 * 4 = 12 #### 12"}

    A line's right number is the last one of its answer, in GSM8K what follows `####`. Every tenth
    question is held out, for evaluation. An answer that reaches the limit of tokens has reward 0.
    """

    def __init__(self, config):
        from tokenizers import Tokenizer
        self.seed = config.seed
        shape = models.read_config(config.model)
        V, room, new = shape.vocab_size, shape.max_position_embeddings, config.max_new_tokens
        ends = []
        try:
            # config.json and generation_config.json may name end tokens, as a number or a list.
            for path in Path(config.model).glob("*config.json"):
                end = json.loads(path.read_text("utf-8")).get("eos_token_id")
                ends += end if isinstance(end, list) else [end]
            path = Path(config.model, "tokenizer.json")
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"{path}: {error}") from error
        self.tokenizer.no_truncation()  # a file may ask for both, for batches of equal length
        self.tokenizer.no_padding()
        self.end = tuple(end for end in ends if end is not None)
        if not self.end or any(type(end) is not int or not 0 <= end < V for end in self.end):
            raise ValueError(f"{config.model}: expected integers as eos_token_id, got {ends}")
        # All lines are read now, so that a wrong one is named before the training.
        lines = []
        numbered = enumerate(Path(config.data).read_bytes().splitlines(), 1)
        for n, text in (pair for pair in numbered if pair[1].strip()):
            try:
                line = json.loads(text.decode("utf-8-sig"))
                number = last_number(line["answer"])
                encoded = self.tokenizer.encode(TEMPLATE.replace("{question}", line["question"]))
                # The tokenizer may put marks around a text. An end mark would end the prompt.
                own = [n for n, is_mark in enumerate(encoded.special_tokens_mask) if not is_mark]
                prompt = tuple(encoded.ids[: own[-1] + 1])
                if number is None or len(prompt) + new > room or max(prompt) >= V:
                    told = f"{len(prompt)} + {new} of {room} positions, id {max(prompt)} of {V}"
                    raise ValueError(f"number {number}, {told}")
            except (LookupError, RecursionError, TypeError, ValueError) as error:
                wanted = '{"question": TEXT, "answer": TEXT WITH A NUMBER}'
                got = repr(text.decode("utf-8", "backslashreplace")[:60])
                raise ValueError(f"{config.data}, line {n}: expected {wanted}, got {got}: {error}")
            lines.append((number, prompt))
        # Hold out every tenth of the different prompts. No line trains on one of these.
        different = list({prompt: (number, prompt) for number, prompt in lines}.values())
        asked = {prompt for _, prompt in different[::10]}
        self.lines = {True: different[::10], False: [x for x in lines if x[1] not in asked]}
        self.held_out = len(asked)  # questions of an evaluation
        if not self.lines[False]:
            raise ValueError(f"{config.data}: expected at least 2 questions, got {len(different)}")

    def prompt(self, rng, index, held_out):
        lines = self.lines[held_out]
        return lines[index % len(lines) if held_out else deal(self.seed, index, len(lines))]

    def reply(self, state, answer):
        # A task of one turn. The state is the right number.
        return state, None, float(last_number(self.tokenizer.decode(answer)) == state)

    def show(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


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
        self.group = group  # number of the group in the step
        self.state = state  # what the task remembers
        self.reward = 0.0  # the sum over the turns so far
        self.turn = len(prompt)  # index of the first token of the current turn: 1, then 4

    def hear(self, state, reply, reward):
        """Take what the task returned for the finished turn. Return whether the rollout goes on."""
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
    kept: list  # numbers of the groups to train on, here all. DAPO drops groups of equal rewards
    count: int  # minibatches

    def minibatches(self):
        """Yield this rank's episodes of each minibatch, which has whole groups."""
        # 5 groups in 2 minibatches are groups 0 1 and 2 3 4. With d = 2, rank 0 has played groups
        # 0 2 4, so it yields its episodes of 0, then of 2 and 4.
        cuts = [m * len(self.kept) // self.count for m in range(self.count + 1)]
        for first, last in zip(cuts, cuts[1:]):
            yield [e for n in self.kept[first:last] for e in self.groups.get(n, [])]


@dataclass
class Source:
    """Plays the rollouts of a step, and evaluates."""
    config: Config
    task: Guess | Questions
    trainer: "Trainer"
    shown: Episode | None = None  # a game of the latest evaluation

    def get(self, step) -> Batch:
        """Return the batch of a step: `group` rollouts of each prompt."""
        c = self.config
        groups = self.play(ROLLOUT, step, c.prompts, c.group, c.temperature)
        return Batch(groups, range(c.prompts), c.minibatches)

    def evaluate(self) -> float:
        """Return the fraction of evaluation prompts that greedy decoding solves."""
        # Each held-out question of a file is asked once. Other tasks make any number of prompts.
        prompts = min(self.config.eval_prompts, getattr(self.task, "held_out", np.inf))
        groups = self.play(EVALUATION, 0, prompts, 1, 0.0)
        count = len([episode for (episode,) in groups.values() if episode.reward >= 1])
        self.shown = groups[max(groups)][0] if groups else None  # of 1 prompt, d rank 1 has none
        return self.trainer.total(count) / prompts

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
        models.generate(
            self.trainer.model, sum(groups.values(), []), max_new_tokens=limit, end=self.task.end,
            after=lambda e: e.hear(*self.task.reply(e.state, e.tokens[e.turn :])),
            temperature=temperature)  # fmt: skip
        return groups


# 4. Advantages, the loss, and its log-probs: by rows, a ring or a tree ----------------------------
def advantages(rewards_G):
    """Return A of (1), an array (G,), for the float64 rewards (G,) of one group."""
    # Equal rewards say nothing, and get exact zeros: in floats, the mean of .1 .1 .1 is not .1.
    if (rewards_G == rewards_G[0]).all():
        return np.zeros_like(rewards_G)
    # Rewards 1 0 0 1 become .5 -.5 -.5 .5. The mean is a baseline that needs no critic.
    return rewards_G - rewards_G.mean()  # (1)


def grpo_loss(config, episodes, sampled, logprobs_N, entropy_N, Z):
    """Return this rank's part of the loss, (2) to (5).

    sampled: N pairs (b, t), target t of episodes[b]. logprobs_N and entropy_N are their lp and H.
    Z: sampled tokens of the minibatch on all ranks.
    If you have tensors: sampled is mask_BS.nonzero(), for bool, True at sampled targets; an episode
        is types.SimpleNamespace(old=old_BS[b], advantage=advantage_B[b]).
    """
    # `Trainer.prepare` has set `old` and `advantage`. Take one number for each sampled token.
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
    l_N = l_N - config.entropy_coef * entropy_N  # (4)
    return l_N.sum() / Z  # (5)


def score_rows(config, model, episodes, ring):
    """Return the sampled tokens as pairs (b, t), their log-probs (N,) and their entropies (N,)."""
    # Each of c ranks scores a share of a row. Pad rows on the right to a multiple of 2c targets.
    # No real token attends to padding. A late chunk costs more than an early one, so the zigzag
    # gives each rank one of both: of chunks 0 1 2 3, rank 0 has 0 3 and rank 1 has 1 2.
    c = dist.get_world_size(ring)
    S = max(len(episode.mask) for episode in episodes)
    S += -S % (2 * c)
    device = model.head_weight.device
    positions_s = zigzag_indices(S, dist.get_rank(ring), c, device)
    padded = [e.tokens + [0] * (S + 1 - len(e.tokens)) for e in episodes]
    tokens = torch.tensor(padded, device=device)
    mask_BS = torch.tensor([e.mask + [False] * (S - len(e.mask)) for e in episodes], device=device)
    # Keys and values travel around a ring. With one rank, it is plain causal attention.
    def attention(q, k, v, /, *, layer, scale, window=None):
        return ring_attention(q, k, v, group=ring, scale=scale, window=window)
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
    device = model.head_weight.device
    sequences = [torch.tensor(episode.tokens, device=device) for episode in episodes]
    scores = tree_logprobs(model, sequences, temperature=config.temperature)
    # The tree scores every token of a rollout. Take those that the policy sampled, in order.
    sampled = [(b, t) for b, e in enumerate(episodes) for t in range(len(e.mask)) if e.mask[t]]
    logprobs_N = torch.cat([lp[e.mask] for e, (lp, _) in zip(episodes, scores, strict=True)])
    entropy_N = torch.cat([H[e.mask] for e, (_, H) in zip(episodes, scores, strict=True)])
    return sampled, logprobs_N, entropy_N


# 5. The trainer ---------------------------------------------------------------------------------
class Trainer:
    """The policy and its optimizer. All ranks call every method, each with its own episodes."""

    def __init__(self, config, model, grid):
        # The plan and the tree are decided here, once. `model` is whole, the same on all ranks.
        # grid.group has the process groups of this rank along the axes d, t, c, and d with c: "dc".
        self.config = config
        self.grid = grid
        self.model = model
        parallel.tensor_parallel(model, grid.group["t"])
        self.score = score_tree if config.tree else score_rows
        # A part of a minibatch has whole groups, if a group fits, as each part is a tree of its
        # own: 8 rollouts of 4 tokens after a prompt of 20 are 52 tokens in one tree, 72 in two.
        self.rows = config.rows // config.group * config.group or config.rows
        self.skipped = 0  # updates in a row whose gradient was not finite
        options = dict(lr=config.lr, betas=(0.9, config.beta2), weight_decay=0.0)
        self.optimizer = torch.optim.AdamW(model.parameters(), **options)

    def total(self, x, axes="d") -> float:
        """Return the sum of a number over ranks. Default: the ranks with different episodes."""
        x = torch.tensor(x, dtype=torch.float64, device=self.model.head_weight.device)
        return parallel.all_reduce_sum(x, self.grid.group[axes]).item()

    def whole(self, name, p):
        """Return a whole parameter, on the CPU. Each t rank may have a shard of it."""
        shard = parallel.layout(name, self.grid)
        group = self.grid.group[shard["over"]]
        shards = [None] * dist.get_world_size(group)
        dist.all_gather_object(shards, p.detach().cpu(), group)  # they may differ in size
        return torch.cat(shards, shard["dim"])

    def prepare(self, batch) -> dict:
        """Set what has no gradient: A of (1), old of (2). Return metrics of all ranks."""
        # This policy sampled the tokens, so its sampling log-probs are the old ones.
        rewards = []
        solved = equal = 0
        for episodes in batch.groups.values():
            rewards_G = np.array([episode.reward for episode in episodes])
            for episode, advantage in zip(episodes, advantages(rewards_G)):
                episode.advantage = advantage
                episode.old = episode.logprobs
            rewards += rewards_G.tolist()
            solved += int((rewards_G >= 1).sum())
            equal += bool((rewards_G == rewards_G[0]).all())
        count = self.total(len(rewards))
        return {"reward/mean": self.total(sum(rewards)) / count,
                "reward/solved": self.total(solved) / count,
                "reward/groups_equal": self.total(equal) / len(batch.kept)}  # fmt: skip

    def loss_denominator(self, episodes) -> int:
        """Count the sampled tokens of these episodes."""
        # The c and t ranks have the same episodes, so Z is the sum over the d ranks.
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
        # The loss is a sum, so the gradients of its parts add up. Each part frees its activations.
        self.optimizer.zero_grad()
        total = 0.0
        for first in range(0, len(episodes), self.rows):
            part = episodes[first : first + self.rows]
            scores = self.score(self.config, self.model, part, self.grid.group["c"])
            loss = grpo_loss(self.config, part, *scores, Z)
            loss.backward()
            total += loss.item()
        # Sum over d, with different episodes, and c, with different tokens. t ranks have the same.
        return {"loss": self.total(total, "dc")}

    def optim_step(self, lr) -> dict:
        """Sum the gradients over ranks, clip them by their global norm, and update the weights."""
        # There is no division by the number of ranks, because Z counted the tokens of all ranks.
        # With 10 tokens on a rank and 30 on another, a mean of the ranks' means would give a token
        # of the first rank three times the weight of a token of the second.
        parallel.reduce_gradients(self.model, self.grid)
        norm = parallel.clip_grad_norm(self.model, self.config.max_grad_norm, self.grid).item()
        # An update with NaN would stay in the weights, so skip it. All ranks have the same norm.
        self.skipped = 0 if np.isfinite(norm) else self.skipped + 1
        if self.skipped == 1:
            print(f"skipped an update, because its gradient has the norm {norm}", flush=True)
        if self.skipped == 3:
            raise FloatingPointError("expected finite gradients, got 3 updates without: lower --lr")
        if not self.skipped:
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
        return {"grad_norm": norm}


# 6. The loop ------------------------------------------------------------------------------------
def train(config, source, trainer, log, first_step=0):
    """Train, log each step, and return the fraction of prompts solved in the last evaluation."""
    # first_step: where to go on, if you resume a run from weights and an optimizer of your own.
    solved = None
    for step in range(first_step, config.steps):
        # Collect: the policy plays each prompt several times, and the task rewards each rollout.
        batch = source.get(step)

        # Compute advantages and old log-probs once. The updates change the policy, not these.
        metrics = trainer.prepare(batch)

        # Take several optimizer steps on a batch. Ranks divide their parts of the loss by Z, so
        # counts are summed first. If groups are dropped, a minibatch may be empty: 0 / 0 is NaN.
        updates = []
        for minibatch in batch.minibatches():
            Z = trainer.total(trainer.loss_denominator(minibatch))
            if Z > 0:
                update = trainer.forward_backward(minibatch, Z)
                updates.append(update | trainer.optim_step(trainer.learning_rate(step)))

        is_due = (step + 1) % config.eval_every == 0 or step + 1 == config.steps
        solved = source.evaluate() if is_due else None
        log(step, batch, metrics, updates, solved)
    return solved


class Log:
    """Shows a bar, prints a line for each evaluation, and writes a line for each step to a file."""

    def __init__(self, config, file):
        # disable=None: the bar is for a terminal, and not for a pipe.
        self.file = file
        self.bar = tqdm(total=config.steps, unit="step", file=sys.stdout, disable=None)

    def step(self, step, batch, metrics, updates, solved):
        """Log a step: the sum of its updates' losses, and the norm of the last update, if any."""
        line = {"step": step, "loss": sum(update["loss"] for update in updates)}
        line["grad_norm"] = updates[-1]["grad_norm"] if updates else None
        line |= metrics | {"solved": solved}
        line = {name: x if np.isfinite(x or 0) else None for name, x in line.items()}
        print(json.dumps(line), file=self.file, flush=True)  # JSON has no NaN
        reward = metrics["reward/mean"]
        if solved is not None:
            self.bar.clear()  # so that the line stands above the bar
            print(f"after {step + 1:3} steps: reward {reward:.3f}, solved {solved:.2f} "
                  f"({metrics['reward/solved']:.2f} in training)", flush=True)  # fmt: skip
            if metrics["reward/groups_equal"] == 1:
                print("nothing to learn: all rollouts of each group had equal rewards", flush=True)
            self.bar.set_description(f"solved {solved:.2f}")
        self.bar.set_postfix(reward=f"{reward:.3f}", refresh=False)
        self.bar.update()


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
                loss = loss + config.entropy_coef * (logp_SV[t].exp() * logp_SV[t]).sum()  # (4)
                # The first minibatch has the weights that sampled. Inverse-CDF sampling: of
                # p = .2 .5 .3, the draw .6 takes token 1.
                if update is updates[0]:
                    token = (logp_SV[t].exp().cumsum(0) <= e.draws[t]).sum().item()
                    errors += [e.tokens[t + 1] - token, e.logprobs[t] - lp.item()]
        loss = loss / sum(sum(e.mask) for e in episodes)  # (5)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        errors += [update["loss"] - loss.item(), update["grad_norm"] - norm.item()]
    return errors


def check():
    """Return the largest error of a game, and of runs on one process, by rows and by a tree."""
    # Of these answers, 3 and 1 agree with the replies before them. The second 1 and 4 do not.
    task = Guess(Config())
    episode = Episode((), 0, 0, *task.prompt(None, 2, True), 0)
    for number in (3, 1, 1, 4):
        episode.tokens += [*episode.queue, number, *task.end]
        episode.queue.clear()
        episode.hear(*task.reply(episode.state, episode.tokens[episode.turn :]))
    game = "? 3 . lower 1 . higher 1 . higher 4 . <50>"  # token 50 has no name
    errors = [episode.reward - 0.1, task.show([*episode.tokens, 50]) != game]
    # An attention that drops a layer's window or scale shows, and so does a part of a minibatch.
    family = dict(layer_types=[models.SLIDING], sliding_window=3, query_pre_attn_scalar=3)
    config = Config(seed=8, steps=4, size=2, turns=2, prompts=3, group=6, max_new_tokens=7, rows=5,
                    layers=1, hidden=8, heads=2, dtype="float64", temperature=0.8, lr=0.03,
                    lr_warmup=2, max_grad_norm=0.1, eval_every=3, eval_prompts=2)  # fmt: skip
    for config.tree in (False, True):
        alone = build_policy(config, Guess(config), **family)
        for weight in alone.parameters():
            weight.data *= 20 if weight.dim() == 2 else 1  # far from equal probabilities
        trainer = Trainer(config, copy.deepcopy(alone), parallel.Grid("d1"))
        record = []
        source = Source(config, Guess(config), trainer)
        train(config, source, trainer, lambda *given: record.append(given))
        # Repeat its four steps, given its draws. Steps 2 and 3 evaluate.
        optimizer = torch.optim.AdamW(alone.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
        for step, batch, metrics, updates, solved in record:
            optimizer.param_groups[0]["lr"] = (0.015, 0.03, 0.03, 0.015)[step]
            errors += plain_step(config, alone, optimizer, batch, updates)
            errors.append((solved is None) != (step < 2))
            errors += [batch.groups[g][0].state[0] - deal(8, 3 * step + g, 2) for g in range(3)]
        for a, b in zip(trainer.model.parameters(), alone.parameters(), strict=True):
            errors += [*(a - b).flatten().tolist(), *(a.grad - b.grad).flatten().tolist()]
    return torch.tensor(errors, dtype=torch.float64).abs().max().item()  # NaN if any error is NaN


# 8. The program ---------------------------------------------------------------------------------
def build_policy(config, task, **family):
    """Return the model of --model, or a small one with random weights, the same on every rank."""
    if config.model:
        return models.load(config.model).to(getattr(torch, config.dtype))
    shape = models.ModelConfig(
        vocab_size=task.vocab_size, num_hidden_layers=config.layers, hidden_size=config.hidden,
        intermediate_size=3 * config.hidden, head_dim=config.hidden // config.heads,
        num_attention_heads=config.heads, num_key_value_heads=config.heads // 2, **family,
    )  # fmt: skip
    model = models.Transformer(shape).to(getattr(torch, config.dtype))
    generator = torch.Generator().manual_seed(config.seed)
    for weight in model.parameters():
        if weight.dim() == 2:  # norms keep their ones. 0.02 is GPT-2's
            weight.data.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    return model


def refuse(reason):
    """End the program before the ranks meet. Rank 0 prints a line; every rank fails."""
    # torchrun ends all ranks when one exits, so the others leave rank 0 the time to print.
    if os.environ.get("RANK", "0") != "0" and all(name in os.environ for name in LAUNCHER):
        time.sleep(30)
        sys.exit(1)
    sys.exit(f"train_grpo.py: error: {reason}")


def parse_config(argv):
    """Return the settings of a command line. Refuse what cannot run."""
    world = os.environ.get("WORLD_SIZE", "1")
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    released = RELEASED if any(word.startswith("--model") for word in argv) else {}
    parser = argparse.ArgumentParser(description="Learn a task.", allow_abbrev=False)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.error = refuse
    kinds = {int: dict(type=int, metavar="N"), float: dict(type=float, metavar="X")}
    kinds[bool] = dict(action="store_true")
    for x in fields(Config):
        if x.metadata:
            name, kind = "--" + x.name.replace("_", "-"), kinds.get(x.type, dict(metavar="TEXT"))
            parser.add_argument(name, default=x.default, help=x.metadata["help"], **kind)
    parser.set_defaults(plan=f"d{world}", device=devices[-1], **released)
    config = Config(**vars(parser.parse_args(argv)))
    for holds, expected in requirements(config, world, devices):
        if not holds:
            refuse(f"expected {expected}")
    return config


def requirements(c, world, devices):
    """Yield pairs for the settings c: does it hold? What is expected?"""
    yield re.fullmatch("[1-9][0-9]*", world), f"a number of ranks as WORLD_SIZE, got {world!r}"
    for x in fields(Config):
        name, least, found = x.name.replace("_", "-"), x.metadata.get("least"), getattr(c, x.name)
        limit = np.inf if x.type is float else 2**63
        yield least is None or least <= found < limit, f"--{name} >= {least}, got {found}"
    yield c.dtype in ("float32", "float64"), f"--dtype float32 or float64, got {c.dtype}"
    yield c.device in devices, f"--device {' or '.join(devices)}, got {c.device}"
    yield bool(c.model) == bool(c.data), "--model and --data together"
    yield c.model or not c.save, "--save with --model"
    in_use = c.save and (os.path.isfile(c.save) or any(Path(c.save).glob("*")))
    yield not in_use, f"a new or an empty directory as --save, got {c.save}"
    got = f"got --plan {c.plan} on {world} ranks"
    product = f"a product of d, t and c such as d2t2, {got}"
    yield not {"p", "e"} & {*c.plan}, f"no p or e, which python -m full has: expected {product}"
    yield re.fullmatch(r"(([dtc])(?!\w*\2)[1-9]\d*)+", c.plan), product  # \w*\2: a letter again
    # Of d2c4, d is 2 and c is 4. A letter that is not there is 1: t is.
    d, t, ring = (int(*re.findall(rf"{letter}(\d+)", c.plan) or "1") for letter in "dtc")
    yield d * t * ring == int(world), f"torchrun --nproc-per-node {d * t * ring}, {got}"
    most = c.prompts // c.minibatches
    yield d <= most, f"d <= {most}, because each d rank needs a group of a minibatch, {got}"
    heads = models.read_config(c.model).num_key_value_heads if c.model else c.heads // 2
    yield heads % t == 0, f"t that divides the {heads} key heads, {got}"
    yield ring == 1 or not c.tree, f"--tree without c, which cuts rows, {got}"
    told = [name for name in LAUNCHER if name in os.environ]
    is_alone = world == "1" and "RANK" not in told
    yield is_alone or len(told) == 4, f"all of {', '.join(LAUNCHER)}, got only {', '.join(told)}"


def main(argv):
    """Check this file, then learn a task. Print a game and what is solved in the end."""
    is_first = os.environ.get("RANK", "0") == "0"
    if not is_first:
        sys.stdout = open(os.devnull, "w")  # all ranks do the same, and rank 0 alone prints
    try:
        config = parse_config(argv)
        task = Questions(config) if config.model else Guess(config)
        model = build_policy(config, task)
        file = open(config.metrics if is_first else os.devnull, "w")
        if config.save and is_first:
            Path(config.save).mkdir(parents=True, exist_ok=True)  # now, and not after the training
    except (OSError, ValueError) as error:  # a file is not there, or is not as it should be
        refuse(re.sub(r"^\[Errno \d+\] ", "", str(error)))
    except ModuleNotFoundError as missing:
        refuse(f"expected the package {missing.name}: pip install {missing.name}")
    threads = torch.get_num_threads() if config.model else 1  # more do not help a small model
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=600 if config.model else 60)  # of waits for other ranks
    # Each rank runs the check alone, in a process group of size 1.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    error = check()
    print(f"two runs against loops over tokens: largest error {error:.1e}", flush=True)
    if not error <= 1e-10:  # rounding is below 1e-12, and a mistake far above
        refuse(f"expected an error of at most 1e-10, got {error:.1e}")
    # Then the ranks of torchrun meet. One process goes on by itself.
    torch.set_num_threads(threads)
    dist.destroy_process_group()
    device = parallel.join_ranks(config.device, timeout)
    trainer = Trainer(config, model.to(device), parallel.Grid(config.plan, timeout))
    source = Source(config, task, trainer)
    try:
        if config.model:  # a random one solves nothing yet
            print(f"before training, {threads} threads: solved {source.evaluate():.2f}", flush=True)
        log = Log(config, file)
        solved = train(config, source, trainer, log.step)
    except (BrokenPipeError, KeyboardInterrupt) as error:  # `| head` has read enough, or Ctrl-C
        print(f"\ntrain_grpo.py: ended by {type(error).__name__}", file=sys.stderr)
        os._exit(130)
    except FloatingPointError as error:
        refuse(error)
    log.bar.close()
    if config.save:
        pairs = ((name, trainer.whole(name, p)) for name, p in trainer.model.named_parameters())
        weights = {name: whole for name, whole in pairs if is_first}  # all ranks call, 0 keeps them
        if is_first:
            models.save(weights, config.save, config.model)
    print(f"sample: {source.task.show(source.shown.tokens)}\nsolved {solved:.2f}", flush=True)
    dist.barrier()  # no rank leaves while another one still needs its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
