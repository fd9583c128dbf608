"""`--head-dtype float32`: the head's product under bfloat16, in sampler and trainer."""


import pytest
import torch
from conftest import slow
from test_audit import edit_line
from test_ranks import TASK, read_metrics
from test_run import good

from full.audit import audited
from full.build import build, build_teacher
from full.config import Config
from full.flags import parse_config
from full.export import policy_in
from full.generate import forward_with_cache, prefill
from full.hf import load_hf
from full.questions import make_task
from full.tiny import tiny_model
from full.trainer import keep_wide

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
    return keep_wide(config, model.bfloat16())


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


@pytest.mark.quick
def test_decoding_and_a_finer_model():
    """The logits after a cache are float32; a model in float64 stays in float64."""
    model = model_of("float32")
    cache, logits_BV = prefill(model, [[1, 2], [3]])
    more_BV = forward_with_cache(model, cache, torch.tensor([[4], [5]]))
    assert logits_BV.dtype == more_BV.dtype == torch.float32
    assert model.double().logits(torch.zeros(1, model.config.hidden_size).double()).dtype == (
        torch.float64)  # fmt: skip


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
    edit_line(run, 1, "logprob_gap/mean", lambda x: x + 0.05, "metrics.jsonl")
    assert audited(run, 1).wrong == "logprob_gap/mean"


def test_the_checkpoint_stays_as_it_is(tmp_path, process_group):
    """The first weights are those of a run without, and an export is in the run's dtype."""
    for name, more in (("without", ""), ("with", HEAD)):
        good(tmp_path, f"{RUN} {more} --steps 1 --lr 1e-9 --out {tmp_path / name}")
        good(tmp_path, f"export {tmp_path / name} {tmp_path / name}-hf")
    models = [load_hf(f"{tmp_path / name}-hf") for name in ("without", "with")]
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert p.dtype == q.dtype and torch.allclose(p, q, atol=1e-6)


def test_every_model_of_a_run_has_it(tmp_path, process_group):
    """Policy, generator, reference and teacher, and the policy of a checkpoint."""
    run = tmp_path / "run"
    good(tmp_path, f"{RUN} {HEAD} --steps 1 --out {run}")
    good(tmp_path, f"export {run} {tmp_path / 'hf'}")
    more = f"--kl-coef 0.1 --teacher {tmp_path / 'hf'}"
    config = parse_config(f"{RUN} {HEAD} {more}".split())
    task = make_task(config)
    path = next(run.glob("step-*"))
    models = [*build(config, task), build_teacher(config, task),
              policy_in(path, config, task, "bfloat16")]  # fmt: skip
    assert [model.head_dtype for model in models] == [torch.float32] * 5
