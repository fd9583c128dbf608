"""LoRA: factors beside a frozen base, under every plan, in files, in a sampler and in an audit."""

import contextlib
import copy
import dataclasses
from unittest import mock

import pytest
import torch
from conftest import shortened, slow
from oracles import rms
from test_ranks import TASK, _train, ranks
from test_run import good, refused

from full.audit.audit import audited
from full.check import do_step
from full.evaluate import load_policy
from full.learn.batches import RolloutQueue
from full.learn.trainer import Trainer
from full.model import lora
from full.model.config import Lora
from full.model.hf import save_hf
from full.model.lora import add_factors, is_factor, merged
from full.ranks.optimizer import LocalOptimizer, weights_to_store
from full.ranks.places import full
from full.run.build import build, policy_in
from full.run.config import LORA_TARGETS, Config
from full.run.directory import RunDirectory
from full.run.flags import parse_config
from full.run.tasks import make_task
from full.tiny import TINY, tiny, tiny_model

ALL = tuple(LORA_TARGETS.split(","))


def adapted(family="qwen3_moe", dtype=torch.float64, targets=ALL, **shape):
    """A small model, and the same one with random factors."""
    shape = dict(num_experts=4, sparse_layers=(1,)) | shape if family == "qwen3_moe" else shape
    plain = tiny_model(family, dtype=dtype, vocab_size=12, **shape)
    model = add_factors(copy.deepcopy(plain), Lora(3, 6.0, targets), dtype)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if is_factor(name):
            torch.nn.init.normal_(p, std=0.2, generator=generator)
    return plain, model


# One model -------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("family, dtype", [*((name, torch.float64) for name in TINY),
                                           ("qwen3", torch.bfloat16),
                                           ("gemma3_text", torch.bfloat16)])
def test_factors_have_the_gradients_of_a_merged_matrix(family, dtype):
    """Log-probs are those of a model with W + 2 B A, and dA = 2 B^T dW, dB = 2 dW A^T.

    In bfloat16 they are as near to float64 as those of the merged matrix, rounded.
    """
    targets = ALL if tiny(family).tie_word_embeddings else (*ALL, "lm_head")
    targets = (*targets, "gate") if family == "qwen3_moe" else targets
    rounded, model = adapted(family, dtype, targets=targets)
    plain = copy.deepcopy(rounded).double()
    torch.manual_seed(0)
    tokens, targets = torch.randint(12, (2, 9)), torch.randint(12, (18,))
    whole = dict(plain.named_parameters())
    factors = {name: p for name, p in model.named_parameters() if is_factor(name)}
    pairs = {}
    for name in factors:
        if name.endswith("lora_A"):
            at = name.replace(".lora_A", ".weight").replace("_lora_A", "")
            pairs[at] = factors[name], factors[name[:-1] + "B"]
            whole[at].data += 2.0 * pairs[at][1].detach().double() @ pairs[at][0].detach().double()
    assert len(pairs) >= 14
    rounded.load_state_dict(plain.state_dict())

    upstream = torch.randn(2, 18, dtype=torch.float64)
    for one in (plain, rounded, model):
        scores = one.logprobs(one.hidden(tokens).flatten(0, 1), targets, temperature=0.7)
        (torch.stack(scores) * upstream).sum().backward()
        one.found = [torch.stack(scores).detach(), one(tokens).detach()]
    for at, (A, B) in pairs.items():
        model.found += [A.grad, B.grad]
        for one in (plain, rounded):
            dW = one.get_parameter(at).grad.double()
            one.found += [2.0 * B.double().mT @ dW, 2.0 * dW @ A.double().mT]
        assert whole[at].grad.abs().max() > 1e-6, at
    if dtype == torch.float64:
        errors = [(a - b).abs().max() for a, b in zip(model.found, plain.found, strict=True)]
        assert max(errors[:2]) < 1e-12 and max(errors) < 1e-11
    assert rms(model.found, plain.found) < max(1e-11, 1.4 * rms(rounded.found, plain.found))

    # Only factors have gradients; the base alone is the model before.
    assert {name for name, p in model.named_parameters() if p.grad is not None} == factors.keys()
    before = adapted(family, dtype)[0](tokens)
    with lora.base_of(model):
        assert torch.equal(model(tokens), before)
    assert (model(tokens) - before).abs().max() > 0.01


@pytest.mark.quick
def test_the_first_factors_are_drawn_by_their_names_and_change_nothing(process_group):
    config = Config(dtype="float64", lora_rank=4, layers=2, hidden=16, heads=2)
    plain = dataclasses.replace(config, lora_rank=0)
    models = [Trainer(c, build(c, make_task(c))[0]).model for c in (config, plain)]
    factors = {n: p for n, p in models[0].named_parameters() if is_factor(n)}
    drawn = [p.flatten() for name, p in factors.items() if name.endswith("A")]
    assert len(drawn) == 14 and all(not p.any() for n, p in factors.items() if n.endswith("B"))
    for p in drawn[:2]:  # q and k of 16 inputs: within 1 / 4, of variance 1 / 48
        assert p.abs().max() < 0.25 and 0.7 < p.var() * 48 < 1.3
    assert len({p[0].item() for p in drawn}) == 14
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(models[0](tokens), models[1](tokens))

    # Another seed draws other factors and another base. A command that reads a checkpoint, which
    # has the factors alone, draws the same base.
    config = dataclasses.replace(config, seed=7)
    task = make_task(config)
    other = dict(Trainer(config, build(config, task)[0]).model.named_parameters())
    assert all(p.equal(other[n]) == n.endswith("B") for n, p in factors.items())
    with mock.patch("full.run.build.read_checkpoint"):
        again = policy_in("", config, task, "float64", merged=False)
    for name, p in again.named_parameters():
        assert is_factor(name) or torch.equal(p, other[name]), name


@pytest.mark.quick
def test_the_largest_seed_draws_factors():
    _, model = adapted("qwen2")
    lora.draw_factors(model, Config.LARGEST[int])
    assert model.get_parameter("model.layers.0.self_attn.q_proj.lora_A").abs().min() > 0


@pytest.mark.quick
def test_a_stage_without_anything_that_is_trained_has_an_optimizer():
    """Such as the first of two stages, if only the head or a later router has factors."""
    model = tiny_model("qwen2").requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    optimizer = LocalOptimizer(model, lambda p: torch.optim.AdamW(p, lr=1.0, fused=True))
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == []
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


# Runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a model with experts, and flags of a run of factors beside it."""
    folder = tmp_path_factory.mktemp("base")
    shape = dict(vocab_size=12, num_experts=4, eos_token_id=(1,), sparse_layers=(1,))
    save_hf(tiny_model("qwen3_moe", initializer_range=0.2, **shape), folder)
    small = "--lr 0.02 --entropy-coef 0.1 --steps 2 --eval-every 1 --save-every 1 --prompts 3"
    return folder, f"{TASK} {small} --group 4 --model {folder} --lora-rank 3"


def _pushed(rank, flags):
    """What a push gives the generator, and what base and factors say, after two updates."""

    config = parse_config(flags.split()).check()
    model, generator, reference = build(config, make_task(config))
    trainer = Trainer(config, model, generator=generator, reference=reference)
    before = {n: full(p, trainer.model.part.places[n]).clone()
              for n, p in trainer.model.named_parameters()}  # fmt: skip
    trainer.push_weights()
    do_step(config, RolloutQueue(config, make_task(config), trainer), trainer, 0)
    trainer.push_weights()
    masters = weights_to_store(trainer.model, trainer.optimizer)
    held = {name: full(p.detach()) for name, p in masters.items()}
    for name in held:
        assert torch.equal(before[name], held[name]) != is_factor(name), name
    target = trainer.sampler.model
    found = {n: full(p, target.part.places[n]) for n, p in target.named_parameters()}
    assert trainer.reference is (trainer.model if config.kl_coef else None)
    return held, found, trainer.model.lora.scale


PUSHES = {"d1": 1, "d2": 2, "t2": 2, "d2e2": 2, "p2d2e2": 4, "p2t2": 4}


@pytest.mark.parametrize("plan", shortened(PUSHES, "d1", "t2"))
@pytest.mark.parametrize("more", ["--kl-coef 0.1", *slow(("--data-parallel fsdp",))])
def test_what_reaches_the_generator_is_the_base_and_the_factors(base, tmp_path, plan, more):
    """Bit for bit, in the generator's dtype, wherever a matrix is cut."""
    dtypes = "--dtype float32 --compute-dtype bfloat16 --generator-dtype float32"
    more += f" --plan {plan} {dtypes}"
    for held, found, scale in ranks(tmp_path, PUSHES[plan], _pushed, f"{base[1]} {more}"):
        assert not any(map(is_factor, found))
        adapted_ones = 0
        for name in held.keys() & found.keys():  # a stage has some of the source's layers
            x = found[name]
            A, B = (name.removesuffix("weight") + ("_" * (".experts." in name)) + f"lora_{letter}"
                    for letter in "AB")  # fmt: skip
            truth = held[name].float()
            if A in held:
                adapted_ones += 1
                truth = truth + scale * (held[B].float() @ held[A].float())
            assert torch.equal(x, truth), name
        assert adapted_ones >= 10 or "p2" in plan and adapted_ones >= 5


def test_a_base_that_changed_is_refused(base, process_group, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    for file in base[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    flags = f"{base[1].replace(str(base[0]), str(folder))} --out {tmp_path}/run"
    good(tmp_path, flags.replace("--steps 2", "--steps 1"))
    refused(tmp_path, f"{flags} --resume --lora-rank 7", "--resume cannot change --lora-rank")
    save_hf(tiny_model("qwen3_moe", seed=5, vocab_size=12, num_experts=4, sparse_layers=(1,),
                       eos_token_id=(1,)), folder)  # fmt: skip
    refused(tmp_path, f"{flags} --resume", "is not what it was when")
    for command in (load_policy, audited):
        with pytest.raises(ValueError, match="is not what it was when"):
            command(tmp_path / "run")
    (tmp_path / "run/base.json").unlink()  # a run that goes on never writes it anew
    refused(tmp_path, f"{flags} --resume", "base.json")


@pytest.mark.quick
def test_a_start_that_was_killed_after_its_checksums_begins_again(process_group, tmp_path):
    folder, out = tmp_path / "base", tmp_path / "run"
    save_hf(tiny_model("qwen2"), folder)
    config = Config(model=f"{folder}", lora_rank=2, out=f"{out}", resume=True)
    with mock.patch("pathlib.Path.replace", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
            RunDirectory.claim(config, stack)
    assert {path.name for path in out.iterdir()} == {"base.json", "config.tmp", "lock"}
    with contextlib.ExitStack() as stack:
        RunDirectory.claim(config, stack)
    assert {path.name for path in out.iterdir()} == {"base.json", "config.json", "lock"}

    # A file of this name alone is a stranger's, and is not overwritten.
    (out / "config.json").unlink()
    with pytest.raises(ValueError, match="not a run's"), contextlib.ExitStack() as stack:
        RunDirectory.claim(config, stack)


AUDITED = {
    "float64": "--kl-coef 0.05 --minibatches 2",
    "float32": "--dtype float32 --kl-coef 0.05 --proximal",
    "bfloat16": "--dtype float32 --compute-dtype bfloat16",
    "critic": "--dtype float32 --advantage gae --tree sparse",
    "votes": "--router-bias-rate 0.05 --kl-coef 0.05",
}
SLIPS = {  # name -> what it does, and the row of the audit that is outside
    "a push without factors": (
        lambda: mock.patch("full.model.lora.merged", lambda weight, *given: weight), "sampling"),
    "alpha in the sampler": (
        lambda: mock.patch("full.model.lora.merged", lambda W, A, B, scale, *region: merged(
            W, A, B, 3 * scale, *region)), "sampling"),
    "a reference with factors": (
        lambda: mock.patch("full.model.lora.base_of", lambda model: mock.MagicMock()),
        "kl/token_mean_first"),
}  # fmt: skip


@pytest.mark.parametrize("name", shortened(AUDITED, "float32", "votes"))
def test_the_step_by_hand_has_the_base_and_the_factors(base, process_group, tmp_path, name):
    flags = f"{base[1]} {AUDITED[name]} --log-rollouts all --save-every 1"
    good(tmp_path, f"{flags} --out {tmp_path}/run")
    report = audited(tmp_path / "run", 1)
    assert report.wrong is None, [row for row in report.rows if not row.ok]
    assert any(row.key == "parameters" for row in report.rows)


def _slipped_run(rank, flags, out, slip):
    with SLIPS[slip][0]():
        _train(rank, flags, out)


@pytest.mark.parametrize("slip", shortened(SLIPS, "a push without factors"))
def test_the_audit_names_planted_slips(base, process_group, tmp_path, slip):
    flags = f"{base[1]} {AUDITED['float64']} --log-rollouts all"
    ranks(tmp_path, 1, _slipped_run, flags, tmp_path / "run", slip)
    assert audited(tmp_path / "run", 1).wrong == SLIPS[slip][1]
