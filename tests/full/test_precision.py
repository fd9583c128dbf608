"""Mixed precision: `--compute-dtype`, with masters, gradients and moments in `--dtype`.

Plans with masters in float64 and products in float32 are rows of full/equivalence.py. Here the
error in bfloat16 is held to torch.autocast's. `--head-dtype float32`: the head's own product.
"""

import copy
import json
import statistics

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import slow
from safetensors.torch import load_file
from test_audit import edit_line
from test_ranks import TASK, ranks, read_metrics
from test_run import good
from torch.distributed import fsdp

from full.audit.audit import audited
from full.learn import trainer
from full.learn.batches import RolloutQueue
from full.learn.objectives import critic_loss
from full.run.build import build, build_teacher, policy_in
from check_models import relative_error as relative
from full.evaluate import load_policy, settings_of_run
from full.learn.trainer import set_wide_dtypes
from full.model.hf import load_hf
from full.model.parallelize import parallelize
from full.model.transformer import Critic, Transformer
from full.ranks.optimizer import LocalOptimizer, reduce_gradients, training_tensors
from full.ranks.places import full, part_of
from full.ranks.plans import Grid, Plan
from full.run.config import Config
from full.run.flags import parse_config
from full.run.tasks import make_task
from full.tiny import tiny, tiny_model
from models import FULL, SLIDING

BF16 = "--compute-dtype bfloat16"
TINY = "--size 3 --turns 3 --device cpu --layers 2 --hidden 16 --heads 4 --prompts 4 --group 4 "
TINY += "--lr 0.01 --lr-warmup 0 --eval-every 2 --eval-prompts 6 --save-every 1 --keep 9 --out run"


def mixed_model(model, dtype=torch.bfloat16, plan=None, **options):
    """A model and its optimiser in mixed precision, of a plan of one rank by default."""
    plan = plan or Plan()
    model.residual_dtype = next(model.parameters()).dtype
    grid = Grid(plan)
    model = parallelize(model, plan, device_mesh=grid, compute_dtype=dtype, **options)
    zero = options.get("mode") == "zero1"
    make = lambda p: torch.optim.AdamW(p, lr=1e-6)  # noqa: E731
    return model, LocalOptimizer(model, make, zero=zero)


def gradient(model):
    return torch.cat([full(p.grad, part_of(model).places[name]).double().flatten()
                      for name, p in model.named_parameters()])  # fmt: skip


# What its rounding must not do ------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("tree", ["disabled", "sparse"])
def test_rounding_clips_no_token_of_the_first_minibatch(process_group, tree):
    """Its ratios are all exactly 1; a later minibatch is held against a pass before the step.

    With the sampler's log-probs rounding moves ratios, and with a clip as narrow as here it takes
    the gradient of most tokens.
    """
    sizes = dict(size=3, turns=3, layers=2, hidden=16, heads=4, prompts=4, group=8, tree=tree)
    found = {}
    for proximal in (None, False):
        config = Config(**sizes, compute_dtype="bfloat16", clip_low=1e-9, clip_high=1e-9,
                        proximal=proximal).check()  # fmt: skip
        task = make_task(config)
        model, generator, _ = build(config, task)
        policy = trainer.Trainer(config, model, generator=generator)
        batch = RolloutQueue(config, task, policy).get(0)
        policy.prepare(batch)
        first, later = batch.minibatches()
        for t in first:
            t.advantages = np.ones(len(t.mask))
        Z = policy.loss_denominator(first)
        found[proximal] = policy.forward_backward(first, Z)
        of_sampler = [np.array_equal(t.old_logprobs, t.sampler_logprobs) for t in later]
        assert of_sampler == [proximal is False] * len(later)
        assert all((t.old_logprobs is None) == (proximal is None) for t in first)
    assert found[None]["ratio/max"] == found[None]["ratio/token_mean"] == 1
    assert found[None]["ratio/clipped_fraction"] == 0 < found[None]["logprob_gap/max"]
    assert found[False]["ratio/clipped_fraction"] > 0 and found[False]["ratio/max"] > 1


@pytest.mark.quick
def test_where_rounding_would_clip_old_is_the_trainers():
    """Not with --exact, which has no gap, nor where old is the policy or corrects for an age."""
    for flags, is_on in (
        (BF16, True), ("--dtype bfloat16", True), ("--generator-dtype bfloat16", True),
        ("--engine http://127.0.0.1:1", True), ("", False), ("--dtype float64", False),
        ("--dtype float64 --generator-dtype float32", False), (f"{BF16} --exact", False),
        (f"{BF16} --minibatches 1", False), (f"{BF16} --staleness 1", False),
        (f"{BF16} --no-proximal", False), (f"{BF16} --staleness 1 --proximal", True),
    ):  # fmt: skip
        assert parse_config(flags.split()).check().proximal is is_on, flags


# How large its errors are ----------------------------------------------------------------------


SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=4, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.02,
)  # fmt: skip
EXPERTS = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, sparse_layers=(0, 1, 2, 3)
)
LAYERS = [SLIDING, FULL] * 2
FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "gemma3_text": dict(sliding_window=16, layer_types=LAYERS, query_pre_attn_scalar=16),
    "biased moe": EXPERTS | dict(model_type="qwen3_moe", router_bias_rate=0.05),
}


def drawn(family, seed):
    """A float32 model with weights as large as a released one's, norms and votes off neutral."""
    config = tiny(**dict(model_type=family) | SIZES | FAMILIES[family])
    model = Transformer(config).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.2 * torch.randn(p.shape, generator=generator)
        for votes in model.buffers():
            votes.copy_(torch.randint(-2, 3, votes.shape, generator=generator))
    return model


def plain_loss(model, tokens, weights):
    logits = model(tokens[:, :-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.to(wide).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (weights.to(wide) * logprobs).sum()


def our_loss(model, tokens, weights):
    hidden = model.hidden(tokens[:, :-1]).flatten(0, 1)
    logprobs, _ = model.logprobs(hidden, tokens[:, 1:].flatten())
    assert logprobs.dtype == torch.float32
    return (weights.flatten() * logprobs).sum()


def errors_of(family, seed):
    """The gradient's error against float64: of torch.autocast training, and of ours."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SIZES["vocab_size"], (8, 129), generator=generator)
    weights = torch.randn(8, 128, generator=generator) / 1024
    true = drawn(family, seed).double()
    plain_loss(true, tokens, weights).backward()

    auto = drawn(family, seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = plain_loss(auto, tokens, weights)
    loss.backward()

    ours, _ = mixed_model(drawn(family, seed))
    assert ours.hidden(tokens[:1]).dtype == torch.bfloat16
    our_loss(ours, tokens, weights).backward()
    return [relative(gradient(model), gradient(true)) for model in (auto, ours)]


@pytest.mark.parametrize("family, seeds", [("gemma3_text", 3), *slow(*((x, 5) for x in FAMILIES))])
def test_gradients_are_as_good_as_those_of_autocast(process_group, family, seeds):
    """At most 1.25 times its error, the median of 5 seeds. `-s` shows a row of RESULTS.md."""
    errors = [errors_of(family, seed) for seed in range(seeds)]
    ratios = [ours / auto for auto, ours in errors]
    autos, ours = (statistics.median(column) for column in zip(*errors, strict=True))
    print(f"\n| {family} | {autos:.4f} | {ours:.4f} | {statistics.median(ratios):.2f} | "
          f"{min(ratios):.2f} to {max(ratios):.2f} |")  # fmt: skip
    assert 0.5 < statistics.median(ratios) < 1.25


def _summed(rank, mode):
    """Whether losses of 256, 1 and 1 times the same gradient add up to 258 times it."""
    alone, tokens = tiny_model("qwen3", dtype=torch.bfloat16), torch.arange(8)[None]
    model = parallelize(copy.deepcopy(alone), Plan(dp=3), device_mesh=Grid(Plan(dp=3)), mode=mode)
    alone.hidden(tokens).sum().backward()
    (model.hidden(tokens).sum() * (256, 1, 1)[rank]).backward()
    reduce_gradients(model)
    found = {name: full(p.grad, model.part.places[name]) for name, p in model.named_parameters()}
    return all(torch.equal(found[name], (258 * p.grad.float()).bfloat16())
               for name, p in alone.named_parameters() if p.grad is not None)  # fmt: skip


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_add_bfloat16_in_float32(tmp_path, mode):
    """In bfloat16, 256 + 1 + 1 is 256."""
    assert ranks(tmp_path, 3, _summed, mode) == [True] * 3


@pytest.mark.quick
def test_values_of_a_critic_are_as_good_as_plain_torch(process_group):
    """In bfloat16: the loss and the head's gradient of 256 micro-batches, against one batch."""
    generator = torch.Generator().manual_seed(0)
    h_NM, weight_1M = (torch.randn(n, 64, generator=generator).bfloat16() for n in (4096, 1))
    return_N = F.linear(h_NM.double(), weight_1M.double())[:, 0]
    return_N = (return_N + torch.randn(4096, generator=generator)).float()
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        w_1M = weight_1M.to(dtype).requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        loss = F.mse_loss(F.linear(h_NM.to(dtype), w_1M)[:, 0].to(wide), return_N.to(wide))
        results.append([loss.detach(), *torch.autograd.grad(loss, w_1M)])
    critic, _ = mixed_model(Critic(tiny(**SIZES)))
    critic.score.weight.data = weight_1M
    loss, options = 0.0, dict(Z=4096, aggregation="token_mean", value_coef=2.0)
    for h_nM, return_n in zip(h_NM.split(16), return_N.split(16)):
        value_1n = critic.values(h_nM)[None]
        columns = value_1n, value_1n.detach(), return_n[None].to(value_1n), return_n[None] < 99
        term, _ = critic_loss(*columns, **options)
        term.backward()
        loss += term.item()
    truth, plain = results
    for found, theirs, true in zip([torch.tensor(loss), critic.score.weight.grad], plain, truth):
        assert relative(found, true) <= 1.3 * relative(theirs, true)


def _far(rank, cast=False):
    """How far gradients of a row of 600 tokens are apart under ddp and under fsdp."""
    if cast:
        policy = fsdp.MixedPrecisionPolicy
        fsdp.MixedPrecisionPolicy = lambda *given, **no_cast: policy(*given)
    found = []
    for mode in ("ddp", "fsdp"):
        model = tiny_model("gemma3_text", dtype=torch.float32, max_position_embeddings=600)
        model, _ = mixed_model(model, plan=Plan(dp=dist.get_world_size()), mode=mode)
        tokens = (torch.arange(600)[None] + rank) % 53
        model.hidden(tokens).to(torch.float32).pow(3).sum().backward()
        reduce_gradients(model)
        found.append(gradient(model))
    return relative(*found)


def test_fsdp_computes_as_ddp_does(tmp_path):
    """Bit for bit on one rank, also behind position 256: FSDP2's own cast of inputs would round
    the states, and the cosines of the positions. A sum of two ranks is in the weights' dtype."""
    assert ranks(tmp_path, 1, _far) == [0.0]
    assert max(ranks(tmp_path, 2, _far)) < 1e-6
    assert ranks(tmp_path, 1, _far, True)[0] > 1e-3  # with that cast


# What a run writes ----------------------------------------------------------------------------


def test_what_a_run_writes_is_its_masters(tmp_path, process_group):
    """OUT/hf and `export` are in --dtype; `eval` and the run sample with their rounding."""
    good(tmp_path, f"{TINY} {BF16} --steps 2")
    run = tmp_path / "run"
    stored = {}
    for file in (run / "step-00000002").glob("*.safetensors"):
        stored |= load_file(file)
    assert all((x != x.bfloat16()).any() for name, x in stored.items()
               if name.startswith("model.") and x.dim() == 2)
    written = load_hf(run / "hf")
    for name, p in written.named_parameters():
        assert p.dtype == torch.float32 and torch.equal(p, stored[f"model.{name}"])
    good(tmp_path, "export run again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        run / "hf" / "model.safetensors").read_bytes()  # fmt: skip

    task = make_task(settings_of_run(run))
    policy, _ = load_policy(run, task)
    for name, p in policy.named_parameters():
        assert torch.equal(p, stored[f"model.{name}"].bfloat16())
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    out, _ = good(tmp_path, "eval run --samples 1")
    assert json.loads(out.splitlines()[-1])["solved"][0] == line["eval/solved"]


# What cannot be --------------------------------------------------------------------------------


@pytest.mark.quick
def test_products_finer_than_the_weights_are_refused(process_group):
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match="expected a coarser dtype than the weights'"):
            mixed_model(tiny_model(dtype=torch.float32), dtype)


@pytest.mark.quick
def test_frozen_parameters_have_no_moments():
    model = torch.nn.Linear(3, 7)
    model.weight.requires_grad_(False)
    stored = training_tensors(model, LocalOptimizer(model, torch.optim.AdamW))
    kinds = {"exp_avg", "exp_avg_sq", "step"}
    assert {*stored} == {"model.weight", "model.bias", *(f"optimizer.bias.{x}" for x in kinds)}


@pytest.mark.quick
def test_a_gradient_that_is_a_view_is_read_right():
    """AdamW's first step moves each entry by lr against the sign of its gradient."""
    model = torch.nn.Linear(3, 7, bias=False)
    before = model.weight.detach().clone()
    make = lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, fused=True)  # noqa: E731
    optimizer = LocalOptimizer(model, make)
    model.weight.grad = torch.randn(7, 5)[:, 1:4]
    assert not model.weight.grad.is_contiguous()
    optimizer.step()
    moved = (before - model.weight.detach()) / 0.01
    assert (moved - model.weight.grad.sign()).abs().max() < 1e-3


# The head ---------------------------------------------------------------------------------------

V, N = 49152, 64
RUN = f"{TASK} --dtype float32 --compute-dtype bfloat16 --layers 2 --hidden 32 --heads 4 --steps 2"
RUN += " --lr 0.01 --eval-every 2 --save-every 1 --prompts 3 --group 4"
HEAD = "--head-dtype float32"


def model_of(head_dtype="", tied=False):
    """A model in bfloat16 whose logits have a deviation of about 5, as a trained one's have."""
    model = tiny_model("qwen3", dtype=torch.float32, vocab_size=V, tie_word_embeddings=tied)
    with torch.no_grad():
        torch.manual_seed(0)
        model.head_weight.normal_(std=5 / model.config.hidden_size**0.5)
    config = Config(dtype="bfloat16", head_dtype=head_dtype).check()
    return set_wide_dtypes(config, model.bfloat16())


def states_of(model):
    """Random states and targets that their distributions draw."""
    torch.manual_seed(1)
    hidden_NM = torch.randn(N, model.config.hidden_size).bfloat16()
    exact_NV = hidden_NM.double() @ model.head_weight.detach().double().T
    targets_N = exact_NV.softmax(-1).multinomial(1)[:, 0]
    return hidden_NM, targets_N, exact_NV.log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]


@pytest.mark.quick
def test_a_float32_head_under_bfloat16():
    """Of ratios to the exact product in float64 most are off by over 1 %, and none with it."""
    hidden_NM, targets_N, exact_N = states_of(model_of())
    off = {}
    for head_dtype in ("", "float32"):
        model = model_of(head_dtype)
        logits_NV = model.logits(hidden_NM)
        assert logits_NV.dtype == (torch.float32 if head_dtype else torch.bfloat16)
        assert model.head_weight.dtype == torch.bfloat16
        cached_N = logits_NV.double().log_softmax(-1).gather(-1, targets_N[:, None])[:, 0]
        chunked_N, _ = model.logprobs(hidden_NM, targets_N)
        for lp_N in (cached_N, chunked_N):
            off.setdefault(head_dtype, []).append((lp_N - exact_N).abs().detach())
    assert all((x_N.expm1() > 0.01).float().mean() > 0.4 for x_N in off[""])
    assert all(x_N.max() < 1e-5 for x_N in off["float32"])
    assert model.double().logits(hidden_NM.double()).dtype == torch.float64  # a finer model stays


@pytest.mark.quick
@pytest.mark.parametrize("tied", [False, True])
def test_its_gradient_is_that_of_a_product_in_float32(tied):
    model = model_of("float32", tied)
    hidden_NM, targets_N, _ = states_of(model)
    hidden_NM.requires_grad_()
    logprobs_N, entropy_N = model.logprobs(hidden_NM, targets_N, temperature=0.7)
    (logprobs_N.sum() + 0.1 * entropy_N.sum()).backward()
    found = hidden_NM.grad, model.head_weight.grad
    assert all(x.dtype == torch.bfloat16 for x in found)

    wide = [x.detach().float().requires_grad_() for x in (hidden_NM, model.head_weight)]
    logp_NV = (wide[0] @ wide[1].T / 0.7).log_softmax(-1)
    entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    (logp_NV.gather(-1, targets_N[:, None]).sum() + 0.1 * entropy_N.sum()).backward()
    for mine, true in zip(found, wide):
        assert (mine - true.grad).norm() < 3e-3 * true.grad.norm()  # one rounding to bfloat16


@pytest.mark.parametrize("more, world", [
    ("--plan t2", 2), *slow(("", 1), ("--data-parallel fsdp", 2), ("--plan p2", 2),
                   ("--tree dta --chunk-tokens 9", 1), ("--kl-coef 0.1 --proximal", 1)),
])  # fmt: skip
def test_sampler_and_trainer_have_it_and_are_audited(tmp_path, process_group, more, world):
    run = tmp_path / "run"
    good(tmp_path, f"{RUN} {HEAD} --log-rollouts all {more} --out {run}", world)
    assert audited(run, 1).wrong is None
    gap = read_metrics(run)[1]["logprob_gap/mean"]
    assert gap < 0.02

    # A log-prob that is off by the rounding of a logit in bfloat16, 2^-9 of 3, is still no fault.
    # An audit that did not know of the head would find the gap of a head in bfloat16.
    edit_line(run, "logprob_gap/mean", lambda x: x + 0.05, "metrics.jsonl", step=1)
    assert audited(run, 1).wrong == "logprob_gap/mean"


def test_every_model_of_a_run_has_it(tmp_path, process_group):
    """Policy, generator, reference and teacher, and the policy of a checkpoint."""
    run = tmp_path / "run"
    good(tmp_path, f"{RUN} {HEAD} --steps 1 --out {run}")
    good(tmp_path, f"export {run} {tmp_path / 'hf'}")
    more = f"--kl-coef 0.1 --teacher {tmp_path / 'hf'}"
    config = parse_config(f"{RUN} {HEAD} {more}".split())
    task = make_task(config)
    path = next(run.glob("step-*"))
    models = [*build(config, task), build_teacher(config),
              policy_in(path, config, task, "bfloat16")]  # fmt: skip
    assert [model.head_dtype for model in models] == [torch.float32] * 5
