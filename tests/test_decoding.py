"""Decoding: a step without modules is `extend`'s, for every family that has one and every cache."""

import copy
import math

import pytest
import torch
from test_ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

import models
from models import FULL, SLIDING, PlainStep, Row, extend, generate, prefill, tiny_model
from parallel import Grid, Plan, split_for_decoding

pytestmark = pytest.mark.quick
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3_text": ("gemma3_text", {}),
    "o bias": ("qwen3", dict(o_bias=True, qkv_bias=True)),
    "softcap": ("gemma3_text", dict(final_logit_softcapping=1.5)),
    "sliding qwen": ("qwen2", dict(layer_types=(SLIDING, FULL), sliding_window=3)),
    "one key head": ("qwen3", dict(num_attention_heads=3, num_key_value_heads=1)),
    "dynamic": ("qwen3", dict(max_position_embeddings=8, rope_parameters={
        FULL: dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)})),
}  # fmt: skip
MODULES = {"qwen3_moe": ("qwen3_moe", {})}  # these decode by their modules
PROMPTS = {
    "one row": [[4]],
    "of one length": [[1, 2, 3], [4, 5, 6]],
    "of unequal lengths": [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]],
}


def model_of(name, dtype=torch.float64):
    model_type, changes = (CASES | MODULES)[name]
    model = tiny_model(model_type, seed=3, dtype=dtype, **changes)
    with torch.no_grad():  # biases begin as zeros, and a bias that is left out would not show
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=list(PROMPTS))
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_extend(name, prompts, shared):
    torch.manual_seed(0)
    model = model_of(name)
    step = model.one_token_step()
    assert isinstance(step, PlainStep)
    caches = [prefill(model, prompts)[0] for _ in range(2)]
    if shared:
        for cache in caches:
            cache.share([*range(len(prompts)), 0, 0])
    for n in range(9):
        tokens = torch.randint(53, (len(caches[0].lengths.of_B), 1))
        truth = extend(model, caches[0], tokens)
        assert (step(caches[1], tokens) - truth).abs().max() < 1e-12 * truth.abs().max()
        assert caches[0].lengths.of_B.equal(caches[1].lengths.of_B)
        if n == 4:
            for cache in caches:
                cache.select([0, 0])


def test_in_float32_a_step_is_as_near_to_the_truth_as_extend():
    torch.manual_seed(0)
    exact = model_of("qwen3")
    model = copy.deepcopy(exact).to(torch.float32)
    exact.load_state_dict(model.state_dict())
    caches = [prefill(m, PROMPTS["of unequal lengths"])[0] for m in (exact, model, model)]
    steps = extend_of(exact), extend_of(model), model.one_token_step()
    errors = torch.zeros(2)
    for _ in range(20):
        tokens = torch.randint(53, (3, 1))
        truth, *found = (step(cache, tokens) for step, cache in zip(steps, caches, strict=True))
        errors += torch.stack([(x - truth).norm() / truth.norm() for x in found])
    assert 0 < errors[1] < 2 * errors[0]


def extend_of(model):
    return lambda cache, tokens: extend(model, cache, tokens)


# Models that decode by their modules -------------------------------------------------------------


def _with_hook(model):
    model.model.layers[0].register_forward_hook(lambda *args: None)


def _with_forward(model):
    model.model.layers[0].mlp.forward = lambda x, balance=None: x


def _with_hidden(model):
    model.hidden = model.hidden


def _with_module(model):
    class Other(torch.nn.Linear):
        pass

    model.lm_head.__class__ = Other


def _compiled(model):
    model.model.layers[0].compile(backend="eager")


def _of_two_dtypes(model):
    model.lm_head.to(torch.float32)


def _in_bfloat16(model):
    model.to(torch.bfloat16)


CHANGES = [
    _with_hook, _with_forward, _with_hidden, _with_module, _compiled, _of_two_dtypes, _in_bfloat16,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_decodes_by_its_modules(change):
    model = model_of("qwen2")
    assert isinstance(model.one_token_step(), PlainStep)
    change(model)
    assert not isinstance(model.one_token_step(), PlainStep)


def test_experts_and_large_models_decode_by_their_modules(monkeypatch):
    assert not isinstance(tiny_model("qwen3_moe").one_token_step(), PlainStep)
    model = model_of("qwen2")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    monkeypatch.setattr(models, "COPIED", size - 1)
    assert not isinstance(model.one_token_step(), PlainStep)


def test_new_weights_are_used_by_the_next_call():
    model = model_of("qwen2")
    found = []
    for _ in range(2):
        (row,) = generate(model, [[1, 2]], max_new_tokens=6, temperature=1.0, seed=0)
        logp = model(torch.tensor([row.tokens]))[0].log_softmax(-1)
        for n in range(1, 7):
            assert abs(row.logprobs[n] - logp[n, row.tokens[n + 1]].item()) < 1e-12
        found.append(row.logprobs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert found[0] != found[1]


# Queued tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 53])
@pytest.mark.parametrize("later", [False, True])
def test_a_queued_token_outside_of_the_vocabulary_is_named(token, later):
    row = Row([1])

    def after(row):
        row.queue.extend([3, token])
        return [row]

    if not later:
        after(row)
    every = tuple(range(53))
    with pytest.raises(ValueError, match=rf"queued tokens must be of 0..52, got \[3, {token}\]"):
        generate(model_of("qwen3"), [row], max_new_tokens=9, seed=0, end=every, after=after)


# Ahead of Python -------------------------------------------------------------------------------

STARTS = [[1, 2, 3, 4, 5, 6, 7], [8], [1, 2, 3, 4, 5, 6, 7], [9, 10, 11], [8]]
ENDS = tuple(range(0, 53, 2))  # half of the vocabulary


class Talk(Row):
    """A conversation that forks at the end of its first turn, and ends with its third."""

    def __init__(self, prompt, draws):
        super().__init__(prompt, draws)
        self.turns = 0

    def reply(self):
        self.turns += 1
        if self.turns == 3:
            return []
        self.queue.extend([5, 6, 7, 50][: len(self.tokens) % 5])
        if self.turns == 2:
            return [self]
        other = copy.deepcopy(self)
        other.draws = other.draws.flip(0)
        return [self, other]


def talks(model, look_every, temperature, **options):
    """What came of each conversation, in the order in which `generate` returns them."""
    draws = torch.rand(len(STARTS), 16, dtype=torch.float64, generator=seeded(5))
    asked = []
    rows = generate(
        model, [Talk(prompt, own) for prompt, own in zip(STARTS, draws, strict=True)],
        max_new_tokens=16, temperature=temperature, end=ENDS, look_every=look_every,
        ending=lambda rows: asked.append(len(rows)), after=Talk.reply, **options,
    )  # fmt: skip
    ends = sum(row.tokens[-1] in ENDS and row.mask[-1] for row in rows)
    return rows, asked, ends


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def told(rows):
    return [(row.tokens, row.mask, row.truncated, row.turns, row.new) for row in rows]


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.7, 9), (0, None)])
@pytest.mark.parametrize("name", CASES | MODULES)
def test_looking_less_often_changes_nothing(name, temperature, top_k):
    torch.manual_seed(0)
    model = model_of(name)
    if name == "dynamic":  # its rows need positions, and get them
        model.config.max_position_embeddings = 64
    rows, asked, ends = talks(model, 1, temperature, top_k=top_k)
    assert len(rows) > len(STARTS), "some have forked"
    if temperature:
        assert len({len(row.tokens) for row in rows}) > 2 and ends > 0
    for look_every in (3, 8, 50):
        less, asked_less, _ = talks(model, look_every, temperature, top_k=top_k)
        assert told(less) == told(rows)
        for a, b in zip(less, rows, strict=True):
            for key in ("logprobs", "full_logprobs"):
                apart = torch.tensor([getattr(a, key), getattr(b, key)]).diff(dim=0).abs().max()
                assert apart < 1e-12
        assert sum(asked_less) == sum(asked) and len(asked_less) <= len(asked)


def test_rows_come_back_by_length_and_then_in_their_order():
    torch.manual_seed(0)
    rows, *_ = talks(model_of("qwen3"), 1, 1.0)
    assert [row.new for row in rows] == sorted(row.new for row in rows)


@pytest.mark.parametrize("name", CASES | MODULES)
def test_tokens_that_are_given_back_leave_nothing_behind(name):
    """A cache that was fed 4 tokens too many, of which rows give back 4, 0 and 3."""
    torch.manual_seed(0)
    model = model_of(name)
    prompts, back = PROMPTS["of unequal lengths"], torch.tensor([4, 0, 3])
    cache, _ = prefill(model, prompts, slack=4)
    cache.share([0, 1, 2])
    rows = [list(prompt) for prompt in prompts]
    for _ in range(6):
        fed = torch.randint(53, (3, 4))
        for token in fed.T:
            extend(model, cache, token[:, None])
        cache.advance(-back)
        rows = [row + some[: 4 - n].tolist() for row, some, n in zip(rows, fed, back, strict=True)]
        assert cache.lengths.of_B.tolist() == [len(row) for row in rows]
        next_token = torch.randint(53, (3, 1))
        found = extend(model, cache, next_token)
        rows = [[*row, int(token)] for row, token in zip(rows, next_token, strict=True)]
        if name != "dynamic":  # whose angles are those of the longest row
            truth = torch.stack([model(torch.tensor([row]))[0, -1] for row in rows])
            assert (found - truth).abs().max() < 1e-12 * truth.abs().max()


def test_a_ring_has_so_many_slots_more_as_tokens_can_be_given_back():
    torch.manual_seed(0)
    model = model_of("gemma3_text")
    rings = []
    for slack in (0, 5):
        cache, _ = prefill(model, [[1, 2, 3]], slack=slack)
        for _ in range(60):
            extend(model, cache, torch.tensor([[1]]))
        rings.append(cache.layers[0].shape[3])
    assert rings == [4, 9]


def waits(function):
    """How often Python asks the device for a number while the function runs."""
    count = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal count
            count += op.overloadpacket in WAITING
            return op(*args, **kwargs or {})

    tolist = torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch, Watch():
        def counted(x):
            nonlocal count
            count += 1
            return tolist(x)

        patch.setattr(torch.Tensor, "tolist", counted)
        function()
    return count


WAITING = (
    torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal,
    torch.ops.aten.unique_dim, torch.ops.aten._unique2,
)  # fmt: skip


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "sliding qwen"])
def test_python_waits_once_for_several_tokens(name, modules, monkeypatch):
    torch.manual_seed(0)
    model = model_of(name)
    if modules:  # as on a GPU, where ids are checked by the device
        model.one_token_step = lambda: models.extend_one_token(model)
        monkeypatch.setattr(models, "require_tokens_in_vocabulary", lambda *args, **how: None)
    prompts = [[1, 2, 3, 4, 5], [6], [1, 2, 3, 4, 5]]

    def run(new, look_every):
        return waits(lambda: generate(
            model, prompts, max_new_tokens=new, seed=0, look_every=look_every))  # fmt: skip

    begin = run(1, 1)
    assert run(33, 1) == begin + 32
    assert run(33, 8) == begin + 4
    assert run(33, 33) == begin


def test_look_every_is_a_number_of_tokens():
    with pytest.raises(ValueError, match="look_every must be at least 1, got 0"):
        generate(model_of("qwen3"), [[1]], max_new_tokens=2, seed=0, look_every=0)


def test_a_gpu_is_asked_every_eighth_token():
    model = model_of("qwen3")
    assert models.checked_look_every(None, model) == 1
    with torch.device("meta"):
        elsewhere = models.Transformer(model.config)
    assert models.checked_look_every(None, elsewhere) == 8
    assert models.checked_look_every(3, elsewhere) == 3
    assert models.checked_look_every(3, model_of("dynamic")) == 1


def _talks_of_a_plan(rank, plan):
    """What is told, and log-probs, with a look at every third token, on this rank."""
    torch.manual_seed(0)
    model = model_of("gemma3_text").requires_grad_(False)
    if plan:
        grid = Grid.make(Plan.parse(plan))
        split_for_decoding(model, grid.plan, device_mesh=grid)
    rows, *_ = talks(model, 3, 1.0)
    return told(rows), [row.logprobs for row in rows]


def test_a_generator_split_by_t_may_look_less_often(tmp_path):
    truth, true_logprobs = _talks_of_a_plan(0, "")
    for rows, logprobs in ranks(tmp_path, 2, _talks_of_a_plan, "t2"):
        assert rows == truth
        for some, true in zip(logprobs, true_logprobs, strict=True):
            assert (torch.tensor(some) - torch.tensor(true)).abs().max() < 1e-12


@pytest.mark.parametrize("vocab", [11, 300, 40001])
def test_a_row_of_nan_draws_a_token_whose_logprob_is_nan(vocab):
    logits = torch.randn(2, vocab)
    logits[1] = math.nan
    drawn = models.sample(logits, torch.tensor([0.5, 0.999], dtype=torch.float64), temperature=1.0)
    assert 0 <= drawn.tokens.min() and drawn.tokens.max() < vocab
    assert drawn.logprobs.isfinite().tolist() == [True, False]
