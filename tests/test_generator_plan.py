"""Generators with a plan of their own, `--plan A|B`: the tokens of one process, and the push."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from conftest import shortened
from test_ranks import ranks

import models
import train_grpo
from parallel import Grid, Plan, split_for_decoding
from train_grpo import Config, Task, Trainer, collect, evaluate, make_task

# The tokens ------------------------------------------------------------------------------------

FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {},
    "qwen3_moe": dict(num_experts=4),
    "biased moe": dict(
        model_type="qwen3_moe", num_experts=8, num_hidden_layers=2, sparse_layers=(0, 1)),
}  # fmt: skip
SETTINGS = {
    "flat": dict(prompts=5, batch_rows=8),
    "forks": dict(prompts=3, forks=2, fork_turns=1),
}
GENERATORS = {  # name -> ranks, the plan of the generator, of which families
    "d2": (2, "d2", tuple(FAMILIES)),
    "t2": (2, "t2", tuple(FAMILIES)),
    "d2e2": (2, "d2e2", ("qwen3_moe", "biased moe")),
    "t2e2": (2, "t2e2", ("qwen3_moe", "biased moe")),
    "t2 of experts": (2, "(attn:t2|ffn:t2)", ("qwen3_moe",)),
    "d2t2": (4, "d2t2", tuple(FAMILIES)),
    "d4e4": (4, "d4e4", ("qwen3_moe", "biased moe")),
    "d2t2e4": (4, "d2t2e4", ("qwen3_moe", "biased moe")),
    "d2t2e2": (4, "d2t2e2", ("qwen3_moe",)),
    "d2t2e2 of experts": (4, "(attn:d2t2|ffn:e2t2)", ("qwen3_moe",)),
}


def model_of(family, seed=2):
    """A random model; 13 tokens, so that two ranks have unequal parts of the vocabulary."""
    shape = dict(model_type=family, vocab_size=13) | FAMILIES[family]
    model = models.tiny_model(seed=seed, **shape)
    if family == "biased moe":
        models.give_router_bias(model, 0.05)
        for n, votes in enumerate(model.buffers()):
            votes.copy_(torch.arange(len(votes)).roll(n) % 3)
    return model


def without_memory(model):
    """A model of this shape on the meta device, for the Trainer to allocate."""
    with torch.device("meta"):
        bare = models.Transformer(dataclasses.replace(model.config, router_bias_rate=0.0)).double()
        if model.config.router_bias_rate:
            models.give_router_bias(bare, model.config.router_bias_rate)
    return bare.requires_grad_(False)


def _sampled(rank, plan, families):
    """{(family, setting): this rank's {group: [(tokens, log-probs, reward)]}, eval, its sample}."""
    found = {}
    for family in families:
        for name, setting in SETTINGS.items():
            config = Config(dtype="float64", group=4, eval_prompts=3, plan=plan, **setting).check()
            task = make_task(config)
            model = model_of(family)
            trainer = Trainer(config, model, generator=without_memory(model))
            trainer.push_weights()
            rollouts, _, _ = collect(config, task, trainer.generator, 1)
            groups = {
                n: [(t.tokens, t.sampler_logprobs.tolist(), t.reward) for t in group]
                for n, group in rollouts.items()
            }
            solved, shown = evaluate(config, task, trainer.generator)
            found[family, name] = groups, solved, shown and shown.tokens
    return found


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """What one process samples."""
    return ranks(tmp_path_factory.mktemp("one"), 1, _sampled, "", tuple(FAMILIES))[0]


@pytest.mark.parametrize("name", shortened(GENERATORS, *list(GENERATORS)[:5]))
def test_every_generator_plan_samples_the_tokens_of_one_process(truth, tmp_path, name):
    world, plan, families = GENERATORS[name]
    parts = ranks(tmp_path, world, _sampled, f"{plan}|d{world}", families)
    for key in parts[0]:
        groups, solved, shown = truth[key]
        merged = {}
        for rank, part in enumerate(parts):
            mine, solved_here, _ = part[key]
            assert not merged.keys() & mine.keys()
            assert all(n % world == rank for n in mine)
            assert solved_here == solved
            merged |= mine
        assert parts[0][key][2] == shown
        assert merged.keys() == groups.keys()
        lengths = set()
        for n, group in groups.items():
            for (tokens, logprobs, reward), ours in zip(group, merged[n], strict=True):
                assert (tokens, reward) == (ours[0], ours[2])
                assert np.abs(np.subtract(logprobs, ours[1])).max() < 1e-12
                lengths.add(len(tokens))
        assert len(lengths) > 1, "some rollouts end before others"


SAMPLINGS = {
    "none": dict(temperature=4.0),
    "top-k": dict(top_k=3, temperature=4.0),
    "top-p": dict(top_p=0.7, temperature=4.0),
    "min-p": dict(min_p=0.3, temperature=4.0),
    "all": dict(top_k=8, top_p=0.9, min_p=0.05, temperature=3.0),
    "greedy": dict(temperature=0.0),
}


def _generated(rank, plan):
    """{sampling: tokens and both log-probs of rows that all ranks decode}."""
    model = model_of("gemma3_text").requires_grad_(False)
    if plan:
        plan = Plan.parse(plan)
        split_for_decoding(model, plan, device_mesh=Grid.make(plan))
    found = {}
    for name, how in SAMPLINGS.items():
        rows = models.generate(model, [[1, 2, 3], [4], [1, 2, 3]], max_new_tokens=9, seed=3, **how)
        found[name] = [(row.tokens, row.logprobs, row.full_logprobs) for row in rows]
    return found


def test_cut_distributions_are_sampled_alike(tmp_path):
    (truth,) = ranks(tmp_path, 1, _generated, "")
    parts = ranks(tmp_path, 2, _generated, "t2")
    assert len({str(rows) for rows in truth.values()}) == len(SAMPLINGS)
    for part in parts:
        for name, rows in truth.items():
            for row, ours in zip(rows, part[name], strict=True):
                assert row[0] == ours[0]
                assert np.abs(np.subtract(row[1:], ours[1:])).max() < 1e-12


def _served(rank, prompts):
    """How many model calls this rank has made for itself, and how many in all; its groups."""
    # Four rows at a time: rank 0 decodes its two groups of three one after the other.
    setting = dict(group=4, batch_rows=4, prompts=prompts, minibatches=1)
    config = Config(dtype="float64", plan="d2e2", **setting).check()
    task = make_task(config)
    model = model_of("qwen3_moe")
    trainer = Trainer(config, model, generator=without_memory(model))
    trainer.push_weights()
    calls = trainer.generator.calls
    own, run = [], calls.run
    calls.run = lambda tokens, **how: own.append(len(how)) or run(tokens, **how)
    rollouts, _, _ = collect(config, task, trainer.generator, 0)
    return len([n for n in own if n]), len(own), list(rollouts)


@pytest.mark.parametrize("prompts", [1, 3])
def test_replicas_that_end_early_serve_their_experts(tmp_path, prompts):
    """A rank without a prompt too: a call for nobody has no options."""
    first, second = ranks(tmp_path, 2, _served, prompts)
    assert first[1] == second[1] == max(first[0], second[0])
    assert first[0] != second[0] and (second[0] == 0) == (prompts == 1)
    assert (first[2], second[2]) == ([*range(0, prompts, 2)], [*range(1, prompts, 2)])


class Moody(Task):
    """Replies and rewards are made up anew at each call: no two ranks would hear the same."""

    vocab_size, end = 13, (0, 1, 2, 3)
    asked = []

    def prompt(self, rng, index, held_out):
        return {"index": index, "unpicklable": lambda: None}, [4 + index % 5]

    def reply(self, state, answer):
        chance = random.Random()  # from the machine's own entropy
        if self.asked is None:
            raise KeyError("no mood")
        self.asked.append(state["index"])
        reply = [chance.randrange(13) for _ in range(chance.randrange(3))]
        return state, reply if chance.random() < 0.7 else None, chance.random()


def _asked(rank, fault):
    """Which prompts this rank's task was asked about; what it has decoded, by group."""
    setting = dict(group=4, prompts=3, minibatches=1, forks=2, fork_turns=1, max_new_tokens=12)
    config = Config(dtype="float64", plan="t2", **setting).check()
    task = Moody()
    Moody.asked = None if fault and rank == 1 else []
    model = model_of("qwen3")
    trainer = Trainer(config, model, generator=without_memory(model))
    trainer.push_weights()
    decoded = {}
    rollout = train_grpo.rollout

    def watched(*args, **how):
        groups = rollout(*args, **how)
        for (n, _, _), group in zip(args[2], groups, strict=True):
            decoded[n] = [(t.tokens, t.reward, t.turn_rewards) for t in group]
        return groups

    train_grpo.rollout = watched
    if fault:
        with pytest.raises((ValueError, KeyError)) as error:
            collect(config, task, trainer.generator, 0)
        return f"{error.value}"
    rollouts, _, _ = collect(config, task, trainer.generator, 0)
    return Moody.asked, decoded, {n: [t.tokens for t in group] for n, group in rollouts.items()}


def test_a_task_is_asked_once(tmp_path):
    """By the rank whose group it is; both ranks hear the same and decode the same."""
    first, second = ranks(tmp_path, 2, _asked, False)
    assert set(first[0]) == {0, 2} and set(second[0]) == {1}
    assert first[1] == second[1] and first[1].keys() == {0, 1, 2}
    assert first[2].keys() == {0, 2} and second[2].keys() == {1}
    for mine in (first, second):
        assert all([t[0] for t in mine[1][n]] == group for n, group in mine[2].items())


def test_all_ranks_of_a_replica_hear_of_a_tasks_error(tmp_path):
    first, second = ranks(tmp_path, 2, _asked, True)
    assert "no mood" in second and "a rank that decodes the same plays: " in first
    assert "no mood" in first
