"""Generators with a plan of their own, `--plan A|B`: the tokens of one process, and the push."""

import contextlib
import dataclasses
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import shortened
from measure_parallel import Rank, Step
from test_faults import fails, fills_up, kill
from test_faults import run as run_with_faults
from test_plan_run import SHAPE as FLAGS
from test_ranks import _train, largest_difference, ranks, read_metrics
from test_ranks import run_of  # noqa: F401, a fixture
from test_run import contents
from test_start import SHAPE, LiveBytes, shape_of

import models
import parallel
import train_grpo
from parallel import Allocation, Grid, Plan, full, local, split_for_decoding, tensors_of
from train_grpo import Config, Task, Trainer, collect, evaluate, make_task

# The tokens ------------------------------------------------------------------------------------

FAMILIES = {
    "qwen2": {},
    "llama": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen3": {},
    "gemma3_text": {},
    "qwen3_moe": dict(num_experts=4),
    "biased moe": dict(
        model_type="qwen3_moe", num_experts=8, num_hidden_layers=2, sparse_layers=(0, 1)),
}  # fmt: skip
SETTINGS = {
    "flat": dict(prompts=3, batch_rows=8),
    "forks": dict(prompts=3, forks=2, fork_turns=1),
}
GENERATORS = {  # name -> ranks, the plan of the generator, of which families
    "d2": (2, "d2", tuple(FAMILIES)[1:]),
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


def trainer_of(family, plan, **how):
    """A Trainer in float64 whose generator has a random model's weights, its config and task."""
    config = Config(dtype="float64", plan=plan, **dict(group=4) | how).check()
    model = model_of(family)
    with torch.device("meta"):  # for the Trainer to allocate
        bare = models.Transformer(dataclasses.replace(model.config, router_bias_rate=0.0)).double()
        if model.config.router_bias_rate:
            models.give_router_bias(bare, model.config.router_bias_rate)
    trainer = Trainer(config, model, generator=bare.requires_grad_(False))
    trainer.push_weights()
    return trainer, config


def _sampled(rank, plan, families):
    """{(family, setting): this rank's {group: [(tokens, log-probs, reward)]}, eval, its sample}."""
    found = {}
    for family in families:
        for name, setting in SETTINGS.items():
            setting = dict(eval_prompts=3, temperature=4.0) | setting
            trainer, config = trainer_of(family, plan, **setting)
            task = make_task(config)
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
    """What one process samples with some families, made once for each."""
    made = {}

    def of(families):
        missing = tuple(family for family in families if (family, "flat") not in made)
        if missing:
            made.update(ranks(tmp_path_factory.mktemp("one"), 1, _sampled, "", missing)[0])
        return made

    return of


# By default the families that differ most, of which each plan that splits anything has one or two.
QUICK = {"t2": ("gemma3_text", "qwen3_moe"), "d2e2": ("qwen3_moe",), "t2e2": ("biased moe",)}
EVERY = [pytest.param(name, families, id=name) for name, families in QUICK.items()]
EVERY += [
    pytest.param(name, families, id=f"{name} every", marks=pytest.mark.slow)
    for name, (_, _, families) in GENERATORS.items()
]


@pytest.mark.parametrize("name, families", EVERY)
def test_every_generator_plan_samples_the_tokens_of_one_process(truth, tmp_path, name, families):
    world, plan, _ = GENERATORS[name]
    truth = truth(families)
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
    "hot": dict(temperature=4.0),
    "two slots": dict(temperature=3.0, slots=2, end=(2, 5, 7)),
    "greedy": dict(temperature=0.0),
}


def _generated(rank, plan):
    """{sampling: tokens and log-probs of rows that all ranks decode}."""
    model = model_of("gemma3_text").requires_grad_(False)
    if plan:
        plan = Plan.parse(plan)
        split_for_decoding(model, plan, device_mesh=Grid.make(plan))
    found = {}
    for name, how in SAMPLINGS.items():
        rows = models.generate(model, [[1, 2, 3], [4], [1, 2, 3]], max_new_tokens=9, seed=3, **how)
        found[name] = [(row.tokens, row.logprobs) for row in rows]
    return found


def test_all_ranks_of_a_split_generator_sample_alike(tmp_path):
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
    setting = dict(batch_rows=4, prompts=prompts, minibatches=1)
    trainer, config = trainer_of("qwen3_moe", "d2e2", **setting)
    task = make_task(config)
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
    task = Moody()
    Moody.asked = None if fault and rank == 1 else []
    setting = dict(prompts=3, minibatches=1, forks=2, fork_turns=1, max_new_tokens=12)
    trainer, config = trainer_of("qwen3", "t2", **setting)
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
    assert "no mood" in second and "a rank that decodes the same episodes: " in first
    assert "no mood" in first


# The push --------------------------------------------------------------------------------------

FSDP = dict(data_parallel="fsdp")
ZERO1 = dict(data_parallel="zero1")
MIXED = dict(compute_dtype="float32")
WIDE = dict(generator_dtype="float64")
# name -> ranks, --plan, family, more settings, what of the generator is in the policy's memory
PUSHES = {
    "d2|d2": (2, "d2|d2", "qwen3", {}, "all"),
    "d2|d2 fsdp": (2, "d2|d2", "qwen3", FSDP, "none"),
    "t2|d2 fsdp": (2, "t2|d2", "gemma3_text", FSDP, "none"),
    "t2|d2 zero1": (2, "t2|d2", "qwen2", ZERO1, "norms"),
    "d2|t2": (2, "d2|t2", "qwen3", {}, "norms"),
    "t2|t2": (2, "t2|t2", "gemma3_text", {}, "all"),
    "t2|t2 fsdp": (2, "t2|t2", "qwen3", FSDP, "none"),
    "t2|p2": (2, "t2|p2", "qwen3", {}, "none"),
    "t2|p2 tied": (2, "t2|p2", "gemma3_text", dict(pp_schedule="zbv"), "none"),
    "d2|p2 bfloat16": (2, "d2|p2", "qwen3", dict(generator_dtype="bfloat16"), "none"),
    "d2e2|d2e2": (2, "d2e2|d2e2", "qwen3_moe", ZERO1, "all"),
    "d2|d2 mixed": (2, "d2|d2", "qwen3", MIXED, "all"),
    "t2|d2 mixed zero1": (2, "t2|d2", "qwen3", MIXED | ZERO1, "norms"),
    "t2|d2 mixed fsdp": (2, "t2|d2", "qwen3", MIXED | FSDP, "none"),
    "d2|d2 mixed, masters": (2, "d2|d2", "qwen3", MIXED | ZERO1 | WIDE, "none"),
    "t2|p2 mixed, masters": (2, "t2|p2", "qwen3", MIXED | ZERO1 | WIDE, "none"),
    "t2e2|d2e2": (2, "t2e2|d2e2", "qwen3_moe", {}, "experts"),
    "d2e2|p2": (2, "d2e2|p2", "qwen3_moe", {}, "none"),
    "t4|d4 fsdp": (4, "t4|d4", "wide", FSDP, "none"),
    "d2t2e4|d2c2 fsdp": (4, "d2t2e4|d2c2", "qwen3_moe", FSDP, "none"),
    "d2t2|d2t2 fsdp": (4, "d2t2|d2t2", "qwen3", FSDP, "none"),
    "d4|d2p2": (4, "d4|d2p2", "qwen3", {}, "none"),  # a stage is not the rank of that number
    "(attn:d2t2|ffn:e2t2)|d2p2": (4, "(attn:d2t2|ffn:e2t2)|d2p2", "qwen3_moe", {}, "none"),
}


def wide():
    """A model with heads for four ranks."""
    return models.tiny("qwen3", **SHAPE, num_key_value_heads=4)


def _pushed(rank, name):
    """Whether the generator's tensors are the policy's, before and after it moves; which of them
    are in its memory; and the bytes: of the trainer's and the generator's part, of the largest
    tensor, the most that were live, of the whole model, and of what came in by a push."""
    _, plan, family, more, _ = PUSHES[name]
    shape = wide() if family == "wide" else shape_of(family)
    config = Config(**dict(dtype="float64", plan=plan, seed=3) | more).check()
    dtype = getattr(torch, config.generator_dtype or config.compute_dtype or "float64")

    with LiveBytes() as counted:
        with torch.device("meta"):
            model = models.Transformer(shape).double()
            generator = models.Transformer(shape).to(dtype).requires_grad_(False)
        trainer = Trainer(config, model, generator=generator)
        trainer.push_weights()
    most = counted.most

    truth = models.Transformer(shape).double().init_weights(3)
    found = [_equal(trainer.generator, truth, dtype)]
    masters = []
    if trainer.optimizer.has_masters:
        masters = [*trainer.optimizer.mine.values()]
    with torch.no_grad():
        for p in [*truth.parameters(), *trainer.model.parameters(), *masters]:
            local(p).mul_(-3)
    with _bytes_that_come() as came:
        trainer.push_weights()
    found.append(_equal(trainer.generator, truth, dtype))

    policy = tensors_of(trainer.model)
    shared = {
        path for path, q in tensors_of(trainer.generator).items()
        if path in policy and local(q).is_set_to(local(policy[path].detach()))
    }
    parts = {local(p) for p in trainer.model.parameters()}
    own = sum(p.numel() * p.element_size() for p in [*parts, *masters])
    generators = sum(
        local(q).numel() * q.element_size() for path, q in tensors_of(trainer.generator).items()
        if path not in shared)  # fmt: skip
    largest = max(p.numel() * 8 for p in truth.parameters())
    whole = sum(p.numel() * 8 for p in truth.parameters())
    return found, shared, own, generators, largest, most, whole, sum(came)


@contextlib.contextmanager
def _bytes_that_come():
    """A list of the bytes that this rank gets by each message of a push."""
    came = []
    gather, broadcast = parallel.gather_pieces, dist.broadcast

    def gathering(x, *how):
        out = gather(x, *how)
        came.append(out.numel() * out.element_size() - x.numel() * x.element_size())
        return out

    def broadcasting(x, src, group):
        came.append(x.numel() * x.element_size() if dist.get_rank() != src else 0)
        return broadcast(x, src=src, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "gather_pieces", gathering)
        patch.setattr(dist, "broadcast", broadcasting)
        yield came


@torch.no_grad()
def _equal(generator, truth, dtype):
    wanted = tensors_of(truth)
    return all(full(q).equal(wanted[path].to(dtype)) for path, q in tensors_of(generator).items())


def told_by_plan(name):
    """(bytes of the generator besides the policy, bytes that come in) of each rank, by formulas."""
    world, text, family, more, _ = PUSHES[name]
    compute = 4 if "compute_dtype" in more else 0
    size = dict(bfloat16=2, float64=8).get(more.get("generator_dtype"), compute or 8)
    step = Step(more.get("data_parallel", "ddp"), tokens=64, micros=4, size=8, compute=compute)
    ((generator, trainer),) = Allocation.parse(text).groups
    config = wide() if family == "wide" else shape_of(family)
    sampler = Rank(generator, config, step)
    told = []
    for rank in range(world):
        stage = rank * trainer.pp // world
        of_rank = Rank(trainer, config, step, stage)
        told.append((of_rank.generator(sampler, size), of_rank.pushed(sampler, size)))
    return told


QUICK = "d2|d2 fsdp", "t2|t2", "t2|p2", "t2e2|d2e2", "d4|d2p2"


@pytest.mark.parametrize("name", shortened(PUSHES, *QUICK))
def test_a_push_goes_tensor_by_tensor_from_any_layout_to_any(tmp_path, name):
    world, _, family, _, sharing = PUSHES[name]
    names = {path for path, _ in models.Transformer(shape_of(
        "qwen3" if family == "wide" else family)).named_parameters()}  # fmt: skip
    expected = {
        "all": names, "none": set(), "norms": {n for n in names if n.endswith("norm.weight")},
        "experts": {n for n in names if "experts" in n or "norm" in n or "gate.weight" in n},
    }[sharing]  # fmt: skip
    told = told_by_plan(name)
    for rank, (found, shared, own, generators, largest, most, whole, came) in enumerate(
        ranks(tmp_path, world, _pushed, name)
    ):
        assert found == [True, True]
        # Where four ranks share rows out that they do not divide, the formulas are of the first
        # rank; of a tied model both ends have the embedding, and one gets it again.
        if "tied" not in name and (world == 2 or rank == 0):
            assert (generators, came) == told[rank]
        assert shared == expected
        assert own + generators <= most <= 1.1 * (own + generators + 2 * largest)
        if sharing == "none" and "mixed" not in name and ("t2" in name or "t4" in name):
            assert most < 1.5 * whole, "neither is a whole model here"


# Whole runs ------------------------------------------------------------------------------------

def test_a_run_goes_on_with_another_generator_and_is_audited(
    run_of, tmp_path, capsys,  # noqa: F811
):  # fmt: skip
    """A step with each of three generators; the last one is split, and writes OUT/hf."""
    flags = f"{FLAGS} --steps 3 --eval-every 1"
    out = tmp_path / "run"
    (tmp_path / "ranks").mkdir()
    for n, (world, more) in enumerate(
        [(2, "--plan d2|t2"), (1, "--plan d1 --resume"), (2, "--plan t2|d2 --resume")], 1
    ):
        stop = f"--steps {n} --save-every 1 --keep 9"
        ranks(tmp_path / "ranks", world, _train, f"{flags} {stop} {more}", out)
    assert largest_difference(read_metrics(out), run_of(flags)) < 1e-8

    # One process reads it, whatever made it, and writes the same weights.
    for step in (0, 2):
        assert train_grpo.main(["audit", str(out), "--step", str(step)]) == 0
        assert f"audit of step {step}: ok" in capsys.readouterr().out
    assert train_grpo.main(["export", str(out), str(tmp_path / "hf")]) == 0
    assert contents(tmp_path / "hf") == contents(out / "hf")
    assert not (out / "hf.tmp").exists()


def test_a_split_generator_that_cannot_be_written_ends_all_ranks_by_name(tmp_path):
    fault = (0, "models.save_hf", 1, fills_up, None, 3000)
    flags = f"{FLAGS} --out run --steps 1 --plan t2|d2"
    fails(run_with_faults(tmp_path, flags, fault), ".*run/hf not written .*File too large")


@pytest.mark.parametrize("where", shortened(
    ["train_grpo.Replies.ask", "models.all_gather_logits"], "train_grpo.Replies.ask"
))  # fmt: skip
def test_a_rank_that_is_lost_while_others_decode_with_it_ends_the_run(tmp_path, where):
    fault = (1, where, 5, kill)
    done = run_with_faults(tmp_path, f"{FLAGS} --out run --steps 3 --plan t2|d2", fault)
    fails(done, ".*another rank is gone.*go on with --resume --out run", None, codes=[2, -9])
