"""Every plan against transformers: loss, gradients, clip norm and three AdamW steps, in float64.

The oracle is transformers' own model with eager attention, autograd and torch.optim.AdamW, in one
process. Its weights reach ours through `save_pretrained` and `models.load_hf`. transformers
computes norms, softmaxes and rotations in float32 even in a float64 model; here, and only here, its
float32 is float64 (see `float32_is_float64`), so that a wrong formula cannot hide behind rounding.

The loss is a random linear functional of the last states, plus weighted log-probs and entropies
of random targets: no gradient is zero, and none is equal on two tokens.
"""

import contextlib
import functools
import re

import pytest
import torch
import torch.distributed as dist
from plan_training import LENGTH, ROWS, TEMPERATURE, Batch, Training, errors, read_cases
from test_ranks import ranks

from full.hf import load_hf
from full.places import local
from full.plans import Grid, Plan

STEPS, BUDGET = 3, 1e-10
ADAMW = dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)


# The oracle ----------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=56, hidden_size=24, intermediate_size=40, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    max_position_embeddings=64, pad_token_id=None,
)  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
FAMILIES = {
    "llama": dict(model_type="llama", attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "mistral": dict(model_type="mistral", head_dim=10, sliding_window=7, rope_parameters=ROPE),
    "qwen2": dict(model_type="qwen2", rope_parameters=ROPE),
    # 57 words: the vocabulary's parts under t are unequal
    "qwen3": dict(model_type="qwen3", head_dim=10, vocab_size=57, rope_parameters=ROPE),
    "moe": dict(model_type="qwen3_moe", head_dim=10, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=12, norm_topk_prob=True, mlp_only_layers=[1],
                rope_parameters=ROPE),
    "gemma3": dict(model_type="gemma3_text", head_dim=10, query_pre_attn_scalar=12,
                   sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2,
                   rope_parameters={"full_attention": ROPE,
                                    "sliding_attention": ROPE | {"rope_theta": 500.0}}),
}  # fmt: skip


@contextlib.contextmanager
def float32_is_float64():
    """Inside, what asks torch for float32 by name gets float64, and so does Tensor.float()."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


def batch():
    generator = torch.Generator().manual_seed(3)
    size = ROWS, LENGTH
    tokens, targets = torch.randint(1, 56, (2, *size), generator=generator)
    weights = torch.randn(size, generator=generator, dtype=torch.float64)
    states = torch.randn(*size, SIZES["hidden_size"], generator=generator, dtype=torch.float64)
    whole = Batch.of(tokens, weights, torch.zeros_like(tokens), states_BSM=states)
    return whole._replace(targets_BS=targets)


def make_truth(family, folder):
    """transformers' checkpoint in `folder`/hf; what it gives for each step in `folder`/truth."""
    transformers = pytest.importorskip("transformers", reason="see tests/requirements.txt")
    raw = SIZES | FAMILIES[family]
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(0)
    data, steps = batch(), []
    with float32_is_float64():
        eager = dict(attn_implementation="eager", experts_implementation="eager")  # not grouped:
        model = transformers.AutoModelForCausalLM.from_config(  # that has no float64
            config, dtype=torch.float64, **eager)  # fmt: skip
        with torch.no_grad():  # norms and biases away from their neutral values
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
        model.save_pretrained(folder / "hf")
        names = [name for name, _ in load_hf(folder / "hf").named_parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        for _ in range(STEPS):
            optimizer.zero_grad()
            hidden_BSM = model.model(data.tokens_BS).last_hidden_state
            assert hidden_BSM.dtype == torch.float64
            logprobs_BSV = (model.lm_head(hidden_BSM) / TEMPERATURE).log_softmax(-1)
            picked_BS = logprobs_BSV.gather(-1, data.targets_BS[..., None])[..., 0]
            entropy_BS = -(logprobs_BSV.exp() * logprobs_BSV).sum(-1)
            loss = data.loss(hidden_BSM, picked_BS.flatten(), entropy_BS.flatten())
            loss = loss / (ROWS * LENGTH)
            loss.backward()
            theirs = {name: p.grad.clone() for name, p in model.named_parameters()}
            norm = sum(g.square().sum() for g in theirs.values()).sqrt()
            # By hand: torch's own clip divides by norm + 1e-6.
            for p in model.parameters():
                p.grad *= min(1.0, 1.0 / norm.item())
            optimizer.step()
            steps.append((loss.detach(), as_ours(names, theirs), norm))
        theirs = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert steps[0][2] > 1, "the first step must clip"
    torch.save((steps, as_ours(names, theirs)), folder / "truth")


def as_ours(names, theirs):
    """Their tensors under our names. transformers 5 stores all experts of a layer as two tensors,
    gate and up one above the other; ours are three."""
    out = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        if name in theirs:
            out[name] = theirs[name]
        elif f"{path}.gate_up_proj" in theirs:
            gate, up = theirs[f"{path}.gate_up_proj"].chunk(2, 1)
            out[name] = gate if leaf == "gate_proj" else up
    assert len(out) == len(names), set(names) - set(out)
    return out


# Cases ---------------------------------------------------------------------------------------

DEFAULT = """
d2 qwen3, d2 gemma3 fsdp, d2 qwen2 zero1, t2 qwen3, t2 llama, c2 mistral, c2 gemma3, p2 gemma3,
p2 qwen3 zbv, d2e2 moe, etp moe
"""
PLANS = """
d2, d2 fsdp, d2 zero1, d2 full, t2, t2 alone, t2 zero1, t2 op, c2, c2 allgather, c2 ulysses, c2 fsdp
p2, p2 interleaved, p2 zbv, p2 fsdp, d4, d4 fsdp, d4 zero1, c4, c4 ulysses, p4
d2t2, d2t2 fsdp, d2t2 zero1, d2t2 alone, p2t2, p2t2 interleaved, p2t2 zbv, p2t2 alone
c2t2, c2t2 ulysses, c2t2 allgather, d2c2, d2c2 fsdp, d2c2 zero1, d2p2, d2p2 fsdp, d2p2 zero1 zbv
p2c2, p2c2 interleaved
"""
EXPERTS = """
d2e2, d2e2 fsdp, d2e2 zero1, d2e2 full, t2e2, t2, c2e2, (attn:t2|ffn:t2), (attn:t2|ffn:t2) alone
d4e2, d4e4 fsdp, etp, etp alone, etp fsdp, etp zero1, d2t2e2, d2t2e4, d2t2e4 fsdp, d2c2e4, d2p2e2
p2t2e2 zbv, (attn:p2t2|ffn:p2t2)
"""
SLOW = [
    f"{plan} {family} {' '.join(words)}"
    for family in FAMILIES
    for text in re.split(r"[,\n] *", (EXPERTS if family == "moe" else PLANS).strip())
    for plan, *words in [text.split()]
]
# The parameter whose gradient the last rank makes a thousandth too large in the second step.
FAULTY = {
    "d2 qwen3": "layers.1.mlp.up_proj", "t2 qwen3": "layers.0.input_layernorm",
    "c2 gemma3": "layers.2.self_attn.k_proj", "p2 gemma3": "layers.3.mlp.down_proj",
    "d2e2 moe": "layers.2.mlp.experts.gate_proj",
}  # fmt: skip
FORMS = dict(default=DEFAULT, slow=",".join(SLOW), faulty=",".join(FAULTY))
CASES = {form: read_cases(text) for form, text in FORMS.items()}


def _run_cases(rank, folder, form, names):
    """{case: this rank's worst errors of loss, gradients, clip norm, parameters}."""
    found, grids = {}, {}
    for name in names:
        text, family, options = CASES[form][name]
        if text not in grids:  # communicators are expensive, and do not depend on the model
            grids[text] = Grid(Plan.parse(text))
        model = load_hf(folder / family / "hf")
        training = Training(model, grids[text], batch(), adamw=ADAMW, **options)
        if form == "faulty":
            training.before_sum = functools.partial(_scale, FAULTY[name], iter(range(STEPS)))
        truth = torch.load(folder / family / "truth", weights_only=True)
        found[name] = errors(training.results(STEPS), truth, by_tensor=True)
    return found


def _scale(fault, steps, model):
    if next(steps) == 1 and dist.get_rank() == dist.get_world_size() - 1:
        grad = local(next(p for name, p in model.named_parameters() if fault in name).grad)
        assert grad.abs().max() > 0
        grad *= 1.001


@pytest.fixture(scope="module")
def errors_of(tmp_path_factory):
    """(form, case) -> its errors, the worst of any rank; each world starts once for all cases."""
    # Imported here, while float32 is float32: its table of dtypes would stay without it.
    pytest.importorskip("safetensors.torch", reason="see tests/requirements.txt")
    folder = tmp_path_factory.mktemp("truths")
    for family in FAMILIES:
        (folder / family).mkdir()
        make_truth(family, folder / family)
    made = {}

    def of(form, name):
        worlds = {name: Plan.parse(text).world for name, (text, _, _) in CASES[form].items()}
        if (form, name) not in made:
            names = [other for other in worlds if worlds[other] == worlds[name]]
            given = folder, form, names
            parts = ranks(tmp_path_factory.mktemp("parity"), worlds[name], _run_cases, *given)
            for other in names:
                made[form, other] = torch.tensor([part[other] for part in parts]).amax(0)
        return made[form, name]

    return of


EVERY = [("default", name) for name in CASES["default"]]
EVERY += [pytest.param("slow", name, marks=pytest.mark.slow) for name in CASES["slow"]]


@pytest.mark.parametrize("form, name", EVERY)
def test_a_plan_gives_what_transformers_gives(errors_of, form, name):
    assert errors_of(form, name).max() <= BUDGET, errors_of(form, name)


@pytest.mark.parametrize("name", CASES["faulty"])
def test_a_gradient_scaled_on_one_rank_is_seen_by_each_check(errors_of, name):
    assert errors_of("faulty", name).min() > 100 * BUDGET, errors_of("faulty", name)
