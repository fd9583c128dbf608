"""Every plan against transformers: loss, gradients, clip norm and three AdamW steps, in float64.

The oracle shares no code with this project: transformers' own model with eager attention, autograd
and torch.optim.AdamW, in one process. Its weights reach ours through `save_pretrained` and
`models.load_hf`. transformers computes norms, softmaxes and rotations in float32 even in a float64
model; here, and only here, its float32 is float64 (see `float32_is_float64`), so that the budget
can be 1e-10 and a wrong formula cannot hide behind rounding.

The loss is a random linear functional of the last states, plus weighted log-probs and entropies
of random targets: no gradient is zero, and none is equal on two tokens.

Ranks start once for each number of ranks and form (default, slow) and go through all of its cases.
"""

import contextlib
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import models
import ring_attention as ring
from parallel import Grid, LocalOptimizer, Micro, Pipeline, Plan
from parallel import clip_grad_norm, full, parallelize, reduce_gradients
from test_ranks import ranks

ROWS, LENGTH, VOCABULARY, WIDTH, STEPS = 4, 24, 56, 24, 3
TEMPERATURE, MAX_NORM = 0.7, 1.0
ADAMW = dict(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)

# Relative to the largest entry: of the tensor for gradients, of all for parameters.
BUDGET = dict(loss=1e-10, gradient=1e-10, norm=1e-10, parameters=1e-10)


# The oracle ----------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=4,
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


class Data(NamedTuple):
    """Of all rows: inputs, targets, and the weights of the loss."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    weight_BS: torch.Tensor  # of log-probs, and absolute of entropies
    states_BSM: torch.Tensor  # of the last states

    @classmethod
    def draw(cls):
        generator = torch.Generator().manual_seed(3)
        size = ROWS, LENGTH
        tokens, targets = torch.randint(1, VOCABULARY, (2, *size), generator=generator)
        weight = torch.randn(size, generator=generator, dtype=torch.float64)
        states = torch.randn(*size, WIDTH, generator=generator, dtype=torch.float64)
        return cls(tokens, targets, weight, states)

    def part(self, rows, take):
        return Data(*(x[rows][:, take] for x in self))

    def loss(self, hidden_BSM, logprobs_N, entropies_N):
        """This part's terms of the loss; the divisor is that of all rows."""
        weight_N = self.weight_BS.flatten()
        scored = (weight_N * logprobs_N + 0.1 * weight_N.abs() * entropies_N).sum()
        return (0.1 * (self.states_BSM * hidden_BSM).sum() - scored) / (ROWS * LENGTH)


def make_truth(family, folder):
    """transformers' checkpoint in `folder`/hf; what it gives for each step in `folder`/truth."""
    transformers = pytest.importorskip("transformers", reason="see tests/requirements.txt")
    raw = SIZES | FAMILIES[family]
    config = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(0)
    data = Data.draw()
    with float32_is_float64():
        eager = dict(attn_implementation="eager", experts_implementation="eager")  # not grouped:
        model = transformers.AutoModelForCausalLM.from_config(  # that has no float64
            config, dtype=torch.float64, **eager)  # fmt: skip
        with torch.no_grad():  # norms and biases away from their neutral values
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
        model.save_pretrained(folder / "hf")
        names = [name for name, _ in models.load_hf(folder / "hf").named_parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        steps = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            hidden_BSM = model.model(data.tokens_BS).last_hidden_state
            assert hidden_BSM.dtype == torch.float64
            logprobs_BSV = (model.lm_head(hidden_BSM) / TEMPERATURE).log_softmax(-1)
            picked_BS = logprobs_BSV.gather(-1, data.targets_BS[..., None])[..., 0]
            entropy_BS = -(logprobs_BSV.exp() * logprobs_BSV).sum(-1)
            loss = data.loss(hidden_BSM, picked_BS.flatten(), entropy_BS.flatten())
            loss.backward()
            theirs = {name: p.grad.clone() for name, p in model.named_parameters()}
            norm = sum(g.square().sum() for g in theirs.values()).sqrt()
            # By hand: torch's own clip divides by norm + 1e-6.
            for p in model.parameters():
                p.grad *= min(1.0, MAX_NORM / norm.item())
            optimizer.step()
            grads = as_ours(names, theirs)
            steps.append(dict(loss=loss.detach(), gradients=grads, norm=norm))
        theirs = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert steps[0]["norm"] > MAX_NORM, "the first step must clip"
    torch.save(dict(steps=steps, parameters=as_ours(names, theirs)), folder / "truth")


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


# A case on its ranks -------------------------------------------------------------------------


class Case(NamedTuple):
    plan: str
    family: str
    options: dict = {}  # of parallelize; method: of ring_attention
    fault: str = ""  # part of the name of a parameter whose gradient is scaled on one rank


def run_case(case, folder, grids):
    """The worst error of each kind of `BUDGET` on this rank, against the truth in `folder`."""
    data, truth = Data.draw(), torch.load(folder / case.family / "truth", weights_only=True)
    options, plan = dict(case.options), Plan.parse(case.plan)
    method = options.pop("method", "ring")
    if case.plan not in grids:  # communicators are dear, and do not depend on the model
        grids[case.plan] = Grid.make(plan)
    grid = grids[case.plan]

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        mask = ring.Mask.causal(LENGTH, window=window)
        return ring.ring_attention(
            q, k, v, group=grid.context, mask=mask, method=method, scale=scale, softcap=softcap
        )

    model = models.load_hf(folder / case.family / "hf")
    model = parallelize(
        model, plan, device_mesh=grid, attention=attention if plan.cp > 1 else None, **options
    )
    zero = options.get("mode") == "zero1"
    optimizer = LocalOptimizer(model, lambda x: torch.optim.AdamW(x, **ADAMW), zero=zero)

    # This rank's tokens: rows by d, and of each row its zigzag part by c.
    take = ring.indices(LENGTH, dist.get_rank(grid.context), plan.cp)
    rows = torch.arange(ROWS).chunk(plan.dp)[grid.dp_rank]
    worst = dict.fromkeys(BUDGET, 0.0)
    for step, true in enumerate(truth["steps"]):
        mine = backward(model, data, rows, take)
        # The ranks of a tensor group have the same loss, and those of a pipeline all but one none.
        total = mine.double() / plan.tp
        dist.all_reduce(total)
        if case.fault and step == 1:
            plant(model, case.fault)
        reduce_gradients(model)
        found = {name: full(p.grad).clone() for name, p in model.named_parameters()}
        norm = clip_grad_norm(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        errors = dict(
            loss=abs(total - true["loss"]) / abs(true["loss"]),
            norm=abs(norm - true["norm"]) / true["norm"],
            gradient=max(off(found[name], true["gradients"][name]) for name in found),
        )
        worst |= {kind: max(worst[kind], float(errors[kind])) for kind in errors}
    # Each kind of parameter moves by about lr whatever its gradient, so one scale is enough.
    scale = max(p.abs().max() for p in truth["parameters"].values())
    found = {name: full(p.detach()) for name, p in model.named_parameters()}
    worst["parameters"] = max(
        ((found[name] - truth["parameters"][name]).abs().max() / scale).item() for name in found
    )
    return worst


def off(found, truth):
    """The largest error of a tensor, by its largest entry."""
    return ((found - truth).abs().max() / truth.abs().max()).item()


def backward(model, data, rows, take):
    """Gradients of this rank's terms; their sum, which is 0 on ranks without the last stage."""
    if not isinstance(model, Pipeline):
        part = data.part(rows, take)
        positions = take.expand(len(rows), -1)
        hidden = model.hidden(part.tokens_BS, positions=positions)
        targets = part.targets_BS.flatten()
        scored = model.logprobs(hidden.flatten(0, 1), targets, temperature=TEMPERATURE)
        loss = part.loss(hidden, *scored)
        loss.backward()
        return loss.detach()
    parts = [data.part(row[None], take) for row in rows]  # a row a microbatch

    def loss_of(k, hidden):
        targets = parts[k].targets_BS.flatten()
        scored = model.last.logprobs(hidden.flatten(0, 1), targets, temperature=TEMPERATURE)
        return parts[k].loss(hidden, *scored)

    micros = [Micro(part.tokens_BS, take[None]) for part in parts]
    return sum(model.forward_backward(micros, loss_of), torch.zeros((), dtype=torch.float64))


def plant(model, fault):
    """The last rank scales a gradient that it has, a thousandth too large."""
    if dist.get_rank() < dist.get_world_size() - 1:
        return
    name, p = next((name, p) for name, p in model.named_parameters() if fault in name)
    assert p.grad is not None, name
    grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
    assert grad.abs().max() > 0, name
    grad *= 1.001


def _run_cases(rank, folder, cases):
    grids = {}
    return {name: run_case(case, folder, grids) for name, case in cases.items()}


# A case is written as its plan and words of this table.
OPTIONS = {
    "fsdp": dict(mode="fsdp"), "zero1": dict(mode="zero1"), "alone": dict(sequence=False),
    "interleaved": dict(schedule="interleaved1f1b"), "zbv": dict(schedule="zbv"),
    "allgather": dict(method="allgather"), "ulysses": dict(method="ulysses"),
    "full": dict(ac="full"), "op": dict(ac="op"),
}  # fmt: skip
ETP = "(attn:d2t2|ffn:e2t2)"


def case(family, name, fault=""):
    """name: "PLAN WORD WORD ..". fault: see `Case`."""
    plan, *words = name.split()
    options = {}
    for word in words:
        options |= OPTIONS[word]
    return Case(plan, family, options, fault)


DEFAULT = [
    ("qwen3", "d2"), ("gemma3", "d2 fsdp"), ("qwen2", "d2 zero1"), ("qwen3", "t2"), ("llama", "t2"),
    ("mistral", "c2"), ("gemma3", "c2"), ("gemma3", "p2"), ("qwen3", "p2 zbv"), ("moe", "d2e2"),
    ("qwen2", "d2t2"), ("moe", ETP),
]  # fmt: skip
# A gradient that one rank scales in the second of the three steps.
FAULTY = [
    ("qwen3", "d2", "layers.1.mlp.up_proj"), ("qwen3", "t2", "layers.0.input_layernorm"),
    ("gemma3", "c2", "layers.2.self_attn.k_proj"), ("gemma3", "p2", "layers.3.mlp.down_proj"),
    ("moe", "d2e2", "layers.2.mlp.experts.gate_proj"),
]  # fmt: skip
PLANS = """
d2, d2 fsdp, d2 zero1, d2 full, t2, t2 alone, t2 zero1, t2 op, c2, c2 allgather, c2 ulysses, c2 fsdp
p2, p2 interleaved, p2 zbv, p2 fsdp, d4, d4 fsdp, d4 zero1, c4, c4 ulysses, p4
d2t2, d2t2 fsdp, d2t2 zero1, d2t2 alone, p2t2, p2t2 interleaved, p2t2 zbv, p2t2 alone
c2t2, c2t2 ulysses, c2t2 allgather, d2c2, d2c2 fsdp, d2c2 zero1, d2p2, d2p2 fsdp, d2p2 zero1 zbv
p2c2, p2c2 interleaved
"""
EXPERTS = """
d2e2, d2e2 fsdp, d2e2 zero1, d2e2 full, t2e2, t2, c2e2, (attn:t2|ffn:t2), (attn:t2|ffn:t2) alone
d4e2, d4e4 fsdp, ETP, ETP alone, ETP fsdp, ETP zero1, d2t2e2, d2t2e4, d2t2e4 fsdp, d2c2e4, d2p2e2
p2t2e2 zbv, (attn:p2t2|ffn:p2t2)
""".replace("ETP", ETP)
SLOW = [
    (family, name)
    for family in FAMILIES
    for name in (EXPERTS if family == "moe" else PLANS).strip().replace("\n", ", ").split(", ")
]
CASES = {
    form: {f"{given[0]} {given[1]}": case(*given) for given in cases}
    for form, cases in dict(default=DEFAULT, faulty=FAULTY, slow=SLOW).items()
}


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    """A directory with each family's checkpoint and truth."""
    # Imported here, while float32 is float32: its table of dtypes would stay without it.
    pytest.importorskip("safetensors.torch", reason="see tests/requirements.txt")
    folder = tmp_path_factory.mktemp("truths")
    for family in FAMILIES:
        (folder / family).mkdir()
        make_truth(family, folder / family)
    return folder


@pytest.fixture(scope="module")
def errors_of(truths, tmp_path_factory):
    """(form, number of ranks) -> {case: its errors, the worst of any rank}; each made once."""
    made = {}

    def errors(form, name):
        world = Plan.parse(CASES[form][name].plan).world
        if (form, world) not in made:
            cases = {k: c for k, c in CASES[form].items() if Plan.parse(c.plan).world == world}
            by_rank = ranks(tmp_path_factory.mktemp("parity"), world, _run_cases, truths, cases)
            made[form, world] = {
                k: {kind: max(found[k][kind] for found in by_rank) for kind in BUDGET}
                for k in cases
            }
        return made[form, world][name]

    return errors


EVERY = [("default", name) for name in CASES["default"]]
EVERY += [pytest.param("slow", name, marks=pytest.mark.slow) for name in CASES["slow"]]


@pytest.mark.parametrize("form, name", EVERY)
def test_a_plan_gives_what_transformers_gives(errors_of, form, name):
    errors = errors_of(form, name)
    over = {kind: errors[kind] for kind in BUDGET if not errors[kind] <= BUDGET[kind]}
    assert not over, over


@pytest.mark.parametrize("name", CASES["faulty"])
def test_a_gradient_scaled_on_one_rank_is_seen_by_each_check(errors_of, name):
    errors = errors_of("faulty", name)
    for kind in BUDGET:
        assert errors[kind] > 100 * BUDGET[kind], kind
