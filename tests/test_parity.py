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
import os
import traceback
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import models
import ring_attention as ring
from parallel import (
    Grid,
    LocalOptimizer,
    Micro,
    Pipeline,
    Plan,
    clip_grad_norm,
    copy_weights,
    full,
    parallelize,
    read_checkpoint,
    reduce_gradients,
    training_tensors,
    write_checkpoint,
)
from test_ranks import join, ranks, start

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
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # the grouped product has no float64
        )
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


FSDP, ZERO1 = dict(mode="fsdp"), dict(mode="zero1")
INTERLEAVED, ZBV = dict(schedule="interleaved1f1b"), dict(schedule="zbv")
ALLGATHER, ULYSSES = dict(method="allgather"), dict(method="ulysses")
ALONE = dict(sequence=False)
ETP = "(attn:d2t2|ffn:e2t2)"

DEFAULT = {
    "d2": Case("d2", "qwen3"),
    "d2 fsdp": Case("d2", "gemma3", FSDP),
    "d2 zero1": Case("d2", "qwen2", ZERO1),
    "t2": Case("t2", "qwen3"),
    "t2 llama": Case("t2", "llama"),
    "c2 mistral": Case("c2", "mistral"),
    "c2": Case("c2", "gemma3"),
    "p2": Case("p2", "gemma3"),
    "p2 zbv": Case("p2", "qwen3", ZBV),
    "d2e2": Case("d2e2", "moe"),
    "d2t2": Case("d2t2", "qwen2"),
    "d2t2e2 etp": Case(ETP, "moe"),
}
# The same with a gradient that one rank scales in the second of the three steps.
FAULTY = {
    "d2": DEFAULT["d2"]._replace(fault="layers.1.mlp.up_proj"),
    "t2": DEFAULT["t2"]._replace(fault="layers.0.input_layernorm"),
    "c2": DEFAULT["c2"]._replace(fault="layers.2.self_attn.k_proj"),
    "p2": DEFAULT["p2"]._replace(fault="layers.3.mlp.down_proj"),
    "d2e2": DEFAULT["d2e2"]._replace(fault="layers.2.mlp.experts.gate_proj"),
}
PLANS = {  # name -> plan, options; of a dense family
    "d2": ("d2", {}),
    "d2 fsdp": ("d2", FSDP),
    "d2 zero1": ("d2", ZERO1),
    "t2": ("t2", {}),
    "t2 without sequence": ("t2", ALONE),
    "t2 zero1": ("t2", ZERO1),
    "c2": ("c2", {}),
    "c2 allgather": ("c2", ALLGATHER),
    "c2 ulysses": ("c2", ULYSSES),
    "c2 fsdp": ("c2", FSDP),
    "p2": ("p2", {}),
    "p2 interleaved": ("p2", INTERLEAVED),
    "p2 zbv": ("p2", ZBV),
    "p2 fsdp": ("p2", FSDP),
    "d2 ac full": ("d2", dict(ac="full")),
    "t2 ac op": ("t2", dict(ac="op")),
    "d4": ("d4", {}),
    "d4 fsdp": ("d4", FSDP),
    "d4 zero1": ("d4", ZERO1),
    "c4": ("c4", {}),
    "c4 ulysses": ("c4", ULYSSES),
    "p4": ("p4", {}),
    "d2t2": ("d2t2", {}),
    "d2t2 fsdp": ("d2t2", FSDP),
    "d2t2 zero1": ("d2t2", ZERO1),
    "d2t2 without sequence": ("d2t2", ALONE),
    "p2t2": ("p2t2", {}),
    "p2t2 interleaved": ("p2t2", INTERLEAVED),
    "p2t2 zbv": ("p2t2", ZBV),
    "p2t2 without sequence": ("p2t2", ALONE),
    "c2t2": ("c2t2", {}),
    "c2t2 ulysses": ("c2t2", ULYSSES),
    "c2t2 allgather": ("c2t2", ALLGATHER),
    "d2c2": ("d2c2", {}),
    "d2c2 fsdp": ("d2c2", FSDP),
    "d2c2 zero1": ("d2c2", ZERO1),
    "d2p2": ("d2p2", {}),
    "d2p2 fsdp": ("d2p2", FSDP),
    "d2p2 zero1, zbv": ("d2p2", ZERO1 | ZBV),
    "p2c2": ("p2c2", {}),
    "p2c2 interleaved": ("p2c2", INTERLEAVED),
}
EXPERTS = {  # and of the mixture
    "d2e2": ("d2e2", {}),
    "d2e2 fsdp": ("d2e2", FSDP),
    "d2e2 zero1": ("d2e2", ZERO1),
    "d2e2 ac full": ("d2e2", dict(ac="full")),
    "t2e2": ("t2e2", {}),
    "t2, experts whole": ("t2", {}),
    "c2e2": ("c2e2", {}),
    "etp": ("(attn:t2|ffn:t2)", {}),
    "etp without sequence": ("(attn:t2|ffn:t2)", ALONE),
    "d4e2": ("d4e2", {}),
    "d4e4 fsdp": ("d4e4", FSDP),
    "d2t2e2 etp": (ETP, {}),
    "d2t2e2 etp without sequence": (ETP, ALONE),
    "d2t2e2 etp fsdp": (ETP, FSDP),
    "d2t2e2 etp zero1": (ETP, ZERO1),
    "d2t2e2": ("d2t2e2", {}),
    "d2t2e4": ("d2t2e4", {}),
    "d2t2e4 fsdp": ("d2t2e4", FSDP),
    "d2c2e4": ("d2c2e4", {}),
    "d2p2e2": ("d2p2e2", {}),
    "p2t2e2 zbv": ("p2t2e2", ZBV),
    "p2 etp": ("(attn:p2t2|ffn:p2t2)", {}),
}
SLOW = {
    f"{family} {name}": Case(plan, family, options)
    for family in FAMILIES
    for name, (plan, options) in (EXPERTS if family == "moe" else PLANS).items()
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
    forms = {"default": DEFAULT, "faulty": FAULTY, "slow": SLOW}

    def errors(form, name):
        world = Plan.parse(forms[form][name].plan).world
        if (form, world) not in made:
            cases = {k: c for k, c in forms[form].items() if Plan.parse(c.plan).world == world}
            by_rank = ranks(tmp_path_factory.mktemp("parity"), world, _run_cases, truths, cases)
            made[form, world] = {
                k: {kind: max(found[k][kind] for found in by_rank) for kind in BUDGET}
                for k in cases
            }
        return made[form, world][name]

    return errors


def require_within_budget(errors):
    over = {kind: errors[kind] for kind in BUDGET if not errors[kind] <= BUDGET[kind]}
    assert not over, over


@pytest.mark.parametrize("name", DEFAULT)
def test_a_plan_gives_what_transformers_gives(errors_of, name):
    require_within_budget(errors_of("default", name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_plan_and_family_gives_what_transformers_gives(errors_of, name):
    require_within_budget(errors_of("slow", name))


@pytest.mark.parametrize("name", FAULTY)
def test_a_gradient_scaled_on_one_rank_is_seen_by_each_check(errors_of, name):
    errors = errors_of("faulty", name)
    for kind in BUDGET:
        assert errors[kind] > 100 * BUDGET[kind], kind


# A router's bias -----------------------------------------------------------------------------

VOTING = ["d2", "d2e2", "t2e2", "(attn:t2|ffn:t2)", "p2"]


def _mixture(votes):
    sizes = dict(num_hidden_layers=2, sparse_layers=(0, 1), num_experts=4)
    config = models.tiny("qwen3_moe", router_bias_rate=0.1, **sizes)
    model = models.Transformer(config).double().init_weights(0)
    for layer, buffer in enumerate(model.buffers()):
        buffer.copy_(votes * (torch.arange(4) + 10 * layer + 1))
    return model


def _buffers(model):
    parts = model.parts.values() if isinstance(model, Pipeline) else [model]
    return {name: buffer.clone() for part in parts for name, buffer in part.named_buffers()}


def _keep_votes(rank, folder, plans):
    """plan -> whether a checkpoint, and whether a copy into a whole model, has the votes."""
    found, truth = {}, _buffers(_mixture(1))

    def split(model, plan, grid):
        part = parallelize(model, plan, device_mesh=grid)
        return part, LocalOptimizer(part, lambda x: torch.optim.AdamW(x, lr=0.01))

    for n, text in enumerate(plans):
        plan = Plan.parse(text)
        grid = Grid.make(plan)
        part, optimizer = split(_mixture(1), plan, grid)
        write_checkpoint(folder / f"votes-{n}", training_tensors(part, optimizer), {})
        other, optimizer = split(_mixture(0), plan, grid)
        read_checkpoint(folder / f"votes-{n}", training_tensors(other, optimizer))
        read = _buffers(other)
        assert read, "this rank holds a sparse layer"
        target = _mixture(0)
        copy_weights(part, target)
        copied = _buffers(target)
        found[text] = dict(
            read=all(torch.equal(read[name], truth[name]) for name in read),
            copied=all(torch.equal(copied[name], truth[name]) for name in truth),
        )
    return found


@pytest.fixture(scope="module")
def votes_kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("votes")
    (folder / "ranks").mkdir()
    return ranks(folder / "ranks", 2, _keep_votes, folder, VOTING)


@pytest.mark.parametrize("how", ["read", "copied"])
@pytest.mark.parametrize("plan", VOTING)
def test_the_votes_for_experts_survive(votes_kept, plan, how):
    assert all(found[plan][how] for found in votes_kept)


# What all ranks refuse -----------------------------------------------------------------------


def _dense(**changes):
    config = models.tiny("qwen3", vocab_size=57, **changes)
    return models.Transformer(config).double().init_weights(0)


def _bad_tokens(bad):
    tokens = torch.arange(1, 25).view(1, -1).clone()
    tokens[0, 5] = bad
    return tokens


def _beyond(plan, bad):
    part = parallelize(_dense(), plan, device_mesh=Grid.make(plan))
    part.hidden(_bad_tokens(bad))


def _beyond_57(plan):
    _beyond(plan, 57)


def _beyond_0(plan):
    _beyond(plan, -1)


def _zero_on_fsdp(plan):
    part = parallelize(_dense(), plan, device_mesh=Grid.make(plan), mode="fsdp")
    LocalOptimizer(part, lambda x: torch.optim.AdamW(x, lr=0.01), zero=True)


def _another_plans_grid(plan):
    grid = Grid.make(Plan.parse("d2"))
    part = parallelize(_dense(), plan, device_mesh=grid)
    part.hidden(_bad_tokens(1)).sum().backward()


def _27_tokens(plan):
    grid = Grid.make(plan)

    def attention(q, k, v, /, *, layer, scale, window=None, softcap=None):
        mask = ring.Mask.causal(27, window=window)
        return ring.ring_attention(q, k, v, group=grid.context, mask=mask, scale=scale)

    part = parallelize(_dense(), plan, device_mesh=grid, attention=attention)
    take = ring.indices(27, dist.get_rank(grid.context), plan.cp)
    part.hidden(torch.arange(1, 28)[None][:, take], positions=take[None])


def _refused(rank, world, folder, function, plan):
    """Leaves the error's kind and text in the folder, and leaves at once, as a rank that fails."""
    torch.set_num_threads(1)
    meet = dict(init_method=f"file://{folder}/store", timeout=timedelta(seconds=20))
    dist.init_process_group("gloo", rank=rank, world_size=world, **meet)
    text = "no error"
    try:
        function(Plan.parse(plan))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        (folder / f"traceback-{rank}").write_text(traceback.format_exc())
    (folder / f"text-{rank}").write_text(text)
    os._exit(0)


def texts_of_ranks(folder, function, plan):
    """"KIND: TEXT" of what each rank raised, or "no error"."""
    world = Plan.parse(plan).world
    join(start(world, _refused, world, folder, function, plan), 60)
    return [(folder / f"text-{rank}").read_text() for rank in range(world)]


def text_of_one_process(bad):
    try:
        _dense().hidden(_bad_tokens(bad))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("bad, function", [(57, _beyond_57), (-1, _beyond_0)])
def test_a_token_beyond_the_vocabulary_is_refused_alike_with_and_without_t(tmp_path, bad, function):
    texts = texts_of_ranks(tmp_path, function, "t2")
    assert texts[0].startswith("ValueError: ")
    assert {*texts} == {text_of_one_process(bad)}


REFUSED = {
    "zero1's optimiser on fsdp": (_zero_on_fsdp, "d2"),
    "a grid of another plan": (_another_plans_grid, "t2"),
    "27 tokens over c2t2": (_27_tokens, "c2t2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses_alike(tmp_path, name):
    texts = texts_of_ranks(tmp_path, *REFUSED[name])
    assert texts[0].startswith("ValueError: ") and len({*texts}) == 1, texts


def test_a_mistake_that_is_refused_today_is_seen_as_refused(tmp_path):
    texts = texts_of_ranks(tmp_path, _wrong_mode, "d2")
    assert texts[0].startswith("ValueError: mode: expected one of") and len({*texts}) == 1


def _wrong_mode(plan):
    parallelize(_dense(), plan, device_mesh=Grid.make(plan), mode="zero2")
