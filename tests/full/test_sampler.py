"""The sampler of several ranks: who asks the task, how weights reach it.

That ranks sample the tokens of one process is in rows of full/equivalence.py.
"""

import dataclasses
import random

import pytest
import torch
from conftest import shortened
from oracles import LiveBytes
from test_faults import fails, kill, run
from test_ranks import SHAPE as FLAGS
from test_ranks import ranks

from full.learn import rollouts as rollouts_py
from full.learn.batches import collect
from full.learn.trainer import Trainer
from full.model.transformer import Transformer
from full.ranks.optimizer import persistent_buffers, tensors_of
from full.ranks.places import full, local
from full.run.config import Config
from full.run.tasks import Task
from full.tiny import tiny, tiny_model


class Moody(Task):
    """Replies and rewards are made up anew at each call: no two ranks would hear the same."""

    vocab_size, end = 13, (0, 1, 2, 3)

    def __init__(self, fails):
        self.fails, self.asked = fails, set()

    def prompt(self, rng, index, held_out):
        return {"index": index, "unpicklable": lambda: None}, [4 + index % 5]

    def reply(self, state, answer):
        chance = random.Random()  # from the machine's own entropy
        if self.fails:
            raise KeyError("no mood")
        self.asked.add(state["index"])
        reply = [chance.randrange(13) for _ in range(chance.randrange(3))]
        return state, reply if chance.random() < 0.7 else None, chance.random()


def _asked(rank, fault):
    """Which prompts this rank's task was asked about; what it has decoded, by group; its groups."""
    task = Moody(fault and rank == 1)
    setting = dict(minibatches=1, forks=2, fork_turns=1, max_new_tokens=12, group=4, prompts=3)
    config = Config(dtype="float64", plan="t2", **setting).check()
    model = tiny_model("qwen3", seed=2, vocab_size=13)
    with torch.device("meta"):  # for the Trainer to allocate
        bare = Transformer(model.config).double()
    trainer = Trainer(config, model, generator=bare.requires_grad_(False))
    trainer.push_weights()
    decoded = {}
    decode = rollouts_py.decode

    def watched(*args, **how):
        ended = decode(*args, **how)
        for e in sorted(ended, key=lambda e: e.number):
            turns = [(t.tokens, t.reward, t.turn_rewards) for t in e.trajectories()]
            decoded[e.group] = decoded.get(e.group, []) + turns
        return ended

    rollouts_py.decode = watched
    try:
        rollouts, _, _ = collect(config, task, trainer.sampler, 0)
    except (KeyError, RuntimeError) as error:
        return f"{error}"
    return task.asked, decoded, {n: [t.tokens for t in group] for n, group in rollouts.items()}


def test_a_task_is_asked_once(tmp_path):
    """By the rank whose group it is; both ranks hear the same and decode the same."""
    first, second = ranks(tmp_path, 2, _asked, False)
    assert (first[0], second[0]) == ({0, 2}, {1})
    assert first[1] == second[1] and first[1].keys() == {0, 1, 2}
    assert first[2].keys() == {0, 2} and second[2].keys() == {1}
    for mine in (first, second):
        assert all([t[0] for t in mine[1][n]] == group for n, group in mine[2].items())

    # And both hear of its error.
    first, second = ranks(tmp_path, 2, _asked, True)
    assert "no mood" in second and first == f"rank 1 ended with KeyError: {second}"


# Wide enough that a part is more than one tensor; the vocabulary is the largest.
SHAPE = dict(vocab_size=512, hidden_size=64, num_hidden_layers=4, initializer_range=0.1)
FAMILIES = {
    "qwen3_moe": dict(num_experts=8),
    "llama": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"] * 2),
}


def shape_of(family):
    return tiny(family, **SHAPE, **FAMILIES.get(family, {}))


FSDP = dict(data_parallel="fsdp")
ZERO1 = dict(data_parallel="zero1")
MIXED = dict(compute_dtype="float32")
WIDE = dict(generator_dtype="float64")
# name -> ranks, --plan, family, more settings, whether the generator is in the policy's memory
PUSHES = {
    "d2 zero1": (2, "d2", "qwen2", ZERO1, True),
    "t2 fsdp": (2, "t2", "qwen3", FSDP, False),
    "p2 tied": (2, "p2", "gemma3_text", dict(pp_schedule="zbv"), False),
    "p2 bfloat16": (2, "p2", "qwen3", dict(generator_dtype="bfloat16"), False),
    "d2e2": (2, "d2e2", "qwen3_moe", ZERO1, True),
    "t2e2": (2, "t2e2", "qwen3_moe", {}, True),
    "d2e2 fsdp": (2, "d2e2", "qwen3_moe", FSDP, False),
    "t2 mixed zero1": (2, "t2", "gemma3_text", MIXED | ZERO1, True),
    "d2 mixed, masters": (2, "d2", "qwen3", MIXED | ZERO1 | WIDE, False),
    "d2p2": (4, "d2p2", "qwen3", {}, False),  # a stage is not the rank of that number
    "(attn:p2t2|ffn:t2)": (4, "(attn:p2t2|ffn:t2)", "qwen3_moe", {}, False),
}


def _pushed(rank, name):
    """Look at a push of fresh weights, and of changed ones."""
    world, plan, family, more, is_shared = PUSHES[name]
    shape = dataclasses.replace(shape_of(family), router_bias_rate=0.1 * (family == "qwen3_moe"))
    config = Config(**dict(dtype="float64", plan=plan, seed=3) | more).check()
    dtype = getattr(torch, config.generator_dtype or config.compute_dtype or "float64")

    # A model starts in parts: no rank ever has the whole, or all that is drawn for it.
    with LiveBytes() as begun:
        with torch.device("meta"):
            model = Transformer(shape).double()
        model = Trainer(config, model).model
    largest = max(p.numel() * 8 for p in Transformer(shape).parameters())
    assert begun.peak <= 1.1 * (_bytes(map(local, model.parameters())) + largest) or config.is_mixed

    with LiveBytes() as counted:
        with torch.device("meta"):
            model = Transformer(shape).double()
            generator = Transformer(shape).to(dtype).requires_grad_(False)
        trainer = Trainer(config, model, generator=generator)
        trainer.push_weights()
    truth = Transformer(shape).double().init_weights(3)
    assert _equal(trainer.sampler.model, truth, dtype)
    masters = [*trainer.optimizer.mine.values()] if trainer.optimizer.has_masters else []
    with torch.no_grad():
        for p in [*truth.parameters(), *trainer.model.parameters(), *masters]:
            local(p).mul_(-3)
        for model in (truth, trainer.model):  # the votes of routers are pushed too
            for votes in persistent_buffers(model).values():
                votes.add_(3)
    trainer.push_weights()
    assert _equal(trainer.sampler.model, truth, dtype)

    # What of the generator is the policy's own memory.
    policy, mine = tensors_of(trainer.model), tensors_of(trainer.sampler.model)
    shared = {path for path, q in mine.items()
              if path in policy and local(q).is_set_to(local(policy[path].detach()))}  # fmt: skip
    assert shared == {path for path, _ in truth.named_parameters() if is_shared}

    own = _bytes([*{local(p) for p in trainer.model.parameters()}, *masters])
    generators = _bytes(local(q) for path, q in mine.items()
                        if path not in shared and not path.endswith("votes"))  # fmt: skip
    assert own + generators <= counted.peak <= 1.1 * (own + generators + 2 * largest)
    if not is_shared and "mixed" not in name and "t2" in name:
        assert counted.peak < 1.5 * _bytes(truth.parameters()), "neither is a whole model here"


def _bytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@torch.no_grad()
def _equal(generator, truth, dtype):
    wanted = tensors_of(truth)
    return all(full(q).equal(wanted[path].to(dtype)) for path, q in tensors_of(generator).items())


QUICK = ("t2 fsdp", "p2 tied", "t2e2", "d2p2", "t2 mixed zero1", "d2 mixed, masters")


@pytest.mark.parametrize("name", shortened(PUSHES, *QUICK))
def test_a_push_goes_tensor_by_tensor_from_any_layout(tmp_path, name):
    ranks(tmp_path, PUSHES[name][0], _pushed, name)


ASKING = "full.learn.rollouts.Sampler.ask_once"
DECODING = "parallel.all_gather"


@pytest.mark.parametrize("where", shortened([ASKING, DECODING], ASKING))
def test_a_rank_that_is_lost_while_others_decode_with_it_ends_the_run(tmp_path, where):
    done = run(tmp_path, f"{FLAGS} --out run --steps 3 --plan t2", (1, where, 5, kill))
    fails(done, ".*another rank is gone.*go on with --resume --out run", None, codes=[2, -9])
