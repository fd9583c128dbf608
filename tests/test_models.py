"""models.py against its definition, against plain torch and against Hugging Face."""

import numpy as np
import pytest
import torch
from test_ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

import models
import parallel
from models import (
    FULL,
    KVCache,
    Row,
    Transformer,
    forward_with_cache,
    generate,
    load_hf,
    packed_attention,
    packed_positions,
    sample,
    save_hf,
    tiny,
    tiny_model,
    token_logprobs,
)  # fmt: skip

DOCUMENTS = (7, 1, 6, 12, 6)


def model_of(model_type="qwen3", dtype=torch.float64, **changes):
    return tiny_model(model_type, seed=3, dtype=dtype, **changes)


def documents(seed=0, lengths=DOCUMENTS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(53, (n,), generator=generator) for n in lengths]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gradients(model):
    out = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return out


def worst(ours, truth):
    """The largest relative error of a parameter: a small one does not drown in the others."""
    return max(relative(ours[name], truth[name]) for name in truth)


# The definition --------------------------------------------------------------------------------


FEW = {name: models.CASES[name] for name in ("qwen3", "gemma3_text")}


def test_check_of_two_families_passes():
    assert models.check(FEW, transformers=False)


@pytest.mark.parametrize("wrong", [1e-6, torch.nan])
@pytest.mark.parametrize("name", ["path_errors", "check_family"])
def test_check_fails_if_one_error_is_large_or_nan(name, wrong, monkeypatch):
    errors = iter([0.0, wrong] + [0.0] * 99)
    found = {
        "check_family": lambda family, tau: torch.tensor(next(errors)),
        "path_errors": lambda model: [("a path", next(errors)), ("another", next(errors))],
    }
    monkeypatch.setattr(models, "CHECK_FAMILIES", models.CHECK_FAMILIES[:2])
    monkeypatch.setattr(models, name, found[name])
    assert not models.check(FEW, transformers=False)


FAULTS = {
    "apply_rope": lambda x, cos, sin: ROTATE(x, cos, -sin),
    "packed_attention": lambda *, doc_ids: packed_attention(doc_ids=torch.zeros_like(doc_ids)),
    "causal_attention": lambda *qkv, layer, scale, **_: ATTEND(
        *qkv, is_causal=True, scale=1.1 * scale, enable_gqa=True),
    "masked_attention": lambda q, k, v, mask=None, **how: MASKED(  # the cache forgets its mask
        q, k, v, mask if q.shape[2] == k.shape[2] else None, **how),
    "forward_with_cache": lambda model, cache, tokens, counts=None: (  # the cache forgets lengths
        forward_with_cache(model, cache, tokens)),
    "give_draws": lambda rows, needed, seed: [  # generation forgets the draws of rows
        setattr(row, "draws", [0.5] * needed) for row in rows],
}  # fmt: skip
ROTATE, MASKED = models.apply_rope, models.masked_attention
ATTEND = models.F.scaled_dot_product_attention


@pytest.mark.parametrize("name", FAULTS)
def test_check_sees_a_planted_fault(name, monkeypatch):
    monkeypatch.setattr(models, name, FAULTS[name])
    families = [tiny_model(kind, **changes) for kind, changes in FEW.values()]
    assert any(not error <= 1e-12 for x in families for _, error in models.path_errors(x))


# Packed documents ------------------------------------------------------------------------------


def packed_gradient(model, parts):
    lengths = [len(d) for d in parts]
    logits = model(torch.cat(parts)[None], positions=packed_positions(lengths),
                   attention=packed_attention(lengths))  # fmt: skip
    weights = torch.cat([torch.sin(d[:, None].double() + torch.arange(53)) for d in parts])
    (logits[0] * weights).sum().backward()
    return gradients(model)


def separate_gradient(model, parts):
    for d in parts:
        (model(d[None])[0] * torch.sin(d[:, None].double() + torch.arange(53))).sum().backward()
    return gradients(model)


@pytest.mark.quick
@pytest.mark.parametrize("lengths", [DOCUMENTS, (6, 6, 6)])
@pytest.mark.parametrize("model_type", models.TINY)
def test_packed_documents_give_the_gradients_of_separate_documents(model_type, lengths):
    model, parts = model_of(model_type), documents(lengths=lengths)
    assert worst(packed_gradient(model, parts), separate_gradient(model, parts)) < 1e-12


@pytest.mark.quick
def test_the_gradient_comparison_sees_a_zero_and_a_missing_document():
    model, parts = model_of(), documents()
    truth = separate_gradient(model, parts)
    for name in truth:  # every parameter has a gradient whose loss would be seen
        assert worst(truth | {name: torch.zeros_like(truth[name])}, truth) == 1
    assert worst(packed_gradient(model, parts[:-1]), truth) > 1e-3


@pytest.mark.quick
def test_the_order_of_documents_changes_nothing():
    model, parts = model_of(), documents()
    assert worst(packed_gradient(model, parts[::-1]), packed_gradient(model, parts)) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(6))
def test_packed_documents_equal_separate_documents(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 14, (1 + 2 * seed,), generator=generator).tolist() + [1]
    model, parts = model_of(), documents(seed, lengths)
    logits = model(torch.cat(parts)[None], positions=packed_positions(lengths),
                   attention=packed_attention(lengths))  # fmt: skip
    for got, d in zip(logits[0].split(lengths), parts, strict=True):
        assert relative(got.detach(), model(d[None])[0].detach()) < 1e-12


@pytest.mark.quick
def test_packed_attention_refuses_other_lengths():
    model, tokens = model_of(), torch.cat(documents())[None]
    with pytest.raises(ValueError, match=r"packed for \(1, 27\)"):
        model(tokens, attention=packed_attention([13, 14]))
    for lengths in ([], [3, 0]):
        with pytest.raises(ValueError, match="at least one token"):
            packed_attention(lengths)


# Log-probabilities -----------------------------------------------------------------------------


def plain_logprobs(hidden, weight, targets, temperature, softcap):
    z = hidden @ weight.T
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    logp = z.log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def logprob_case(dtype=torch.float64, n=11, width=6, vocab=17):
    generator = torch.Generator().manual_seed(1)
    draws = (torch.randn(size, width, generator=generator) for size in (n, vocab))
    hidden, weight = (x.to(dtype).requires_grad_() for x in draws)
    targets = torch.randint(vocab, (n,), generator=generator)
    upstream = torch.randn(2, n, generator=generator).double()
    return hidden, weight, targets, upstream


@pytest.mark.quick
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.7, None), (1.3, 2.0)])
def test_chunked_logprobs_have_plain_values_and_gradients(chunk, temperature, softcap):
    hidden, weight, targets, upstream = logprob_case()
    options = dict(temperature=temperature, softcap=softcap)
    got = token_logprobs(hidden, weight, targets, chunk=chunk, **options)
    truth = plain_logprobs(hidden, weight, targets, **options)
    sums = [(upstream * torch.stack(x)).sum() for x in (got, truth)]
    grads = [torch.autograd.grad(x, (hidden, weight)) for x in sums]
    for a, b in zip((*got, *grads[0]), (*truth, *grads[1])):
        assert relative(a.detach(), b.detach()) < 1e-13
        assert relative(0 * a.detach(), b.detach()) == 1  # a zero gradient would fail


@pytest.mark.quick
@pytest.mark.parametrize("chunk", [1, 3, 11, 100, None])
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_two_alone_and_a_second_backward_change_nothing(chunk, used):
    hidden, weight, targets, upstream = logprob_case()
    got = token_logprobs(hidden, weight, targets, temperature=0.7, chunk=chunk)[used]
    truth = plain_logprobs(hidden, weight, targets, 0.7, None)[used]
    want = torch.autograd.grad((upstream[0] * truth).sum(), (hidden, weight))
    for _ in range(2):  # the kept chunk is used up by the first
        again = torch.autograd.grad((upstream[0] * got).sum(), (hidden, weight), retain_graph=True)
        assert all(relative(a, b) < 1e-13 < relative(0 * a, b) for a, b in zip(again, want))


@pytest.mark.quick
def test_logprobs_pass_gradcheck():
    hidden, weight, targets, _ = logprob_case(n=4, width=3, vocab=5)
    assert torch.autograd.gradcheck(
        lambda h, w: token_logprobs(h, w, targets, temperature=0.8, softcap=3.0, chunk=3),
        (hidden, weight),
    )


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


@pytest.mark.quick
def test_logprobs_never_hold_all_the_logits():
    hidden, weight, targets, upstream = logprob_case(n=512, width=4, vocab=300)
    with Largest() as seen:
        got = torch.stack(token_logprobs(hidden, weight, targets, chunk=64))
        (got * upstream).sum().backward()
    assert 64 * 300 <= seen.numel < 2 * 64 * 300


@pytest.mark.quick
def test_bf16_logprobs_are_within_twice_plain_torch():
    half = [x.detach() for x in logprob_case(torch.bfloat16, n=4096, width=32, vocab=20)]
    truth = [x.double().requires_grad_() if x.is_floating_point() else x for x in half[:3]]
    low = [x.clone().requires_grad_() if x.is_floating_point() else x for x in half[:3]]
    naive = [x.clone().requires_grad_() if x.is_floating_point() else x for x in half[:3]]
    results = []
    for case, function in ((truth, plain_logprobs), (naive, plain_logprobs), (low, token_logprobs)):
        # 512 chunks: a head gradient summed in bfloat16 would lose most of them
        options = (1.0, None) if function is plain_logprobs else ()
        chunk = {} if function is plain_logprobs else {"chunk": 8}
        out = torch.stack([x.double() for x in function(*case, *options, **chunk)])
        (out * half[3]).sum().backward()
        results.append([out.detach(), case[0].grad, case[1].grad])
    for exact, plain, ours in zip(*results):
        assert relative(ours, exact) <= 2 * relative(plain, exact)


# The cache and the decoder ---------------------------------------------------------------------


def full_forward(model, rows):
    """The logits after each row, from one forward of the whole row without a cache."""
    return torch.stack([model(torch.tensor([row]))[0, -1] for row in rows]).detach()


@pytest.mark.quick
def test_chunks_on_ragged_rows_equal_the_full_forward():
    model, parts = model_of(), [d.tolist() for d in documents(lengths=(80, 50, 5))]
    cache, at = KVCache(3), [0, 0, 0]
    for counts in ([5, 1, 2], [7, 9, 1], [60, 3, 1], [8, 37, 1]):
        chunk = [torch.tensor(d[a : a + c]) for d, a, c in zip(parts, at, counts)]
        tokens = torch.nn.utils.rnn.pad_sequence(chunk, batch_first=True)
        logits = forward_with_cache(model, cache, tokens, torch.tensor(counts))
        at = [a + c for a, c in zip(at, counts)]
        truth = full_forward(model, [d[:a] for d, a in zip(parts, at)])
        assert all(relative(a, b) < 1e-12 for a, b in zip(logits, truth, strict=True))
    assert cache.lengths == at == [80, 50, 5]


@pytest.mark.quick
@pytest.mark.parametrize("counts", [[1, 0], [0, 0], [-1, 1], [1, 3], [1], [1, 1, 1]])
def test_each_row_must_have_a_real_token(counts):
    model, (cache, _) = model_of(), models.prefill(model_of(), [[1, 2], [3]])
    with pytest.raises(ValueError, match=r"counts: expected 2 numbers in 1\.\.2, got \["):
        forward_with_cache(model, cache, torch.tensor([[4, 5], [6, 7]]), counts)
    logits = forward_with_cache(model, cache, torch.tensor([[4, 5], [6, 7]]), [2, 1])
    assert relative(logits, full_forward(model, [[1, 2, 4, 5], [3, 6]])) < 1e-12


@pytest.mark.quick
def test_selected_rows_go_on_as_if_they_had_always_been_there():
    model, parts = model_of(), documents(lengths=(9, 9, 9))
    cache = KVCache(3)
    forward_with_cache(model, cache, torch.stack([d[:6] for d in parts]))
    order = [2, 0, 2, 2]  # dropped, reordered, repeated
    cache.select(order)
    logits = forward_with_cache(model, cache, torch.stack([parts[b][6:] for b in order]))
    assert relative(logits, full_forward(model, [parts[b].tolist() for b in order])) < 1e-12


KINDS = "qwen3", "mistral", "gemma3_text", "qwen2"


class Rows:
    """Random tokens for the rows of a cache, which are compared with full forwards."""

    def __init__(self, seed):
        self.kind, self.ragged = KINDS[seed % 4], seed % 3
        self.model, self.generator = model_of(self.kind), torch.Generator().manual_seed(seed)
        self.cache, self.tokens, self.longest = KVCache(capacity=seed % 5), [], 0

    def draw(self, high, size=(), low=0):
        return torch.randint(low, high, size, generator=self.generator).tolist()

    def feed(self, most):
        rows, S = len(self.tokens), self.draw(most + 1, low=1)
        counts = self.draw(S + 1, (rows,), low=1) if self.ragged else [S] * rows
        fed = self.draw(53, (rows, S))
        logits = forward_with_cache(self.model, self.cache, torch.tensor(fed), counts)
        self.tokens = [row + new[:c] for row, new, c in zip(self.tokens, fed, counts)]
        truth = full_forward(self.model, self.tokens)
        assert all(relative(a, b) < 1e-12 for a, b in zip(logits, truth, strict=True))
        assert self.cache.lengths == [len(row) for row in self.tokens]
        self.longest = max(self.longest, *self.cache.lengths)

    def select(self, most):
        keep = self.draw(len(self.tokens), (self.draw(most + 1, low=1),))
        self.cache.select(keep)
        self.tokens = [self.tokens[b] for b in keep]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(16))
def test_shared_prompts_change_nothing(seed):
    rows = Rows(seed)
    held = KVCache()
    for new in [(9, 3, 12), (6, 6, 6), (5,)][seed % 3], (4, 11):  # some prompts enter later
        prompts = [d.tolist() for d in documents(seed, new)]
        fresh, _ = models.prefill(rows.model, prompts)
        first = len(held.lengths)
        held.begin(fresh, range(len(new)))
        keep = rows.draw(len(new), (5,))
        rows.cache.begin(held, [first + r for r in keep], share=True)
        rows.tokens += [prompts[r] for r in keep]
        for _ in range(5):
            rows.feed(3)
            rows.select(max(2, len(rows.tokens) - 1))
    for layer, window in rows.cache.windows.items():
        if window is None:  # rows hold what follows their prompts, and room for 32 tokens more
            assert rows.cache.layers[layer].shape[3] <= 2 * 5 * 3 + 32


@pytest.mark.quick
def test_bfloat16_shared_prompts_are_as_exact_as_copies():
    generator, errors = torch.Generator().manual_seed(0), []
    q, k, v = (3 * torch.randn(1, h, 40, 16, generator=generator).bfloat16() for h in (4, 2, 2))
    row, options = [0] * 4, dict(layer=0, scale=1.0)
    for share in (True, False):
        prompt, cache = KVCache(1), KVCache()
        prompt.attention(q[:, :, :39], k[:, :, :39], v[:, :, :39], **options)
        prompt.lengths = [39]
        cache.begin(prompt, row, share=share)
        assert bool(prompt.layers) == share  # rows that do not share take the keys over
        got = cache.attention(*(x[row, :, 39:] for x in (q, k, v)), **options)
        truth = ATTEND(*(x.double() for x in (q[:, :, 39:], k, v)), scale=1.0, enable_gqa=True)
        errors.append(relative(got, truth.expand(4, -1, -1, -1)))
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(12))
def test_any_series_of_chunks_selections_and_new_rows_equals_the_full_forward(seed):
    rows = Rows(seed)
    for _ in range(8):  # to more than 49 tokens, so that stores grow
        prompts = [rows.draw(53, (n,)) for n in rows.draw(40, (2,), low=1)]
        rows.cache.begin(models.prefill(rows.model, prompts)[0], [1, 0, 1])
        rows.tokens += [prompts[r] for r in (1, 0, 1)]
        rows.feed(25)
        rows.select(4)  # rows of unequal lengths are repeated, dropped and reordered
        rows.feed(1)
    assert rows.longest > 49


@pytest.mark.quick
def test_a_row_does_not_depend_on_its_batch():
    model, draws = model_of(), np.random.default_rng(0).random((3, 12))
    prompts = [3, 4, 5], [7], [1, 2]

    def rows():
        return [Row(p, d) for p, d in zip(prompts, draws)]

    together = rows()
    generate(model, together, max_new_tokens=12, temperature=1.0)
    for alone, row in zip(rows(), together):
        generate(model, [alone], max_new_tokens=12, temperature=1.0, seed=5)  # its draws stay
        assert alone.tokens == row.tokens
        assert np.allclose(alone.logprobs, row.logprobs, rtol=0, atol=1e-12)


@pytest.mark.quick
def test_generate_feeds_queued_tokens_and_samples_the_rest():
    model, asked = model_of(), []

    def after(row):
        asked.append(list(row.tokens))
        row.queue.extend([1, 2, 3])
        return [row] if len(asked) == 1 else []

    every = tuple(range(53))  # any sampled token ends a turn
    options = dict(max_new_tokens=20, temperature=0, end=every, after=after)
    (row,) = generate(model, [Row([5, 6])], **options)
    assert row.tokens[3:6] == [1, 2, 3] and row.mask == [False, True, False, False, False, True]
    logp = model(torch.tensor([row.tokens]))[0].log_softmax(-1)
    for n, sampled in enumerate(row.mask):
        truth = logp[n, row.tokens[n + 1]].item() if sampled else 0.0
        assert row.logprobs[n] == pytest.approx(truth, abs=1e-12)


@pytest.mark.quick
def test_generate_computes_equal_prompts_once(monkeypatch):
    model, fed = model_of(), []
    original = Transformer.hidden
    monkeypatch.setattr(Transformer, "hidden", lambda self, tokens, **k: (
        fed.append(tuple(tokens.shape)), original(self, tokens, **k))[1])  # fmt: skip
    rows = [Row(p, np.linspace(0, 0.9, 4)) for p in ([3, 4, 5], [3, 4, 5], [7], [3, 4, 5])]
    done = generate(model, rows, max_new_tokens=4, temperature=1.0)
    assert fed == [(2, 3), (4, 1), (4, 1), (4, 1)] and all(row.truncated for row in done)


@pytest.mark.quick
def test_sampling_follows_the_distribution():
    p = torch.tensor([0.0, 0.1, 0.25, 0.0, 0.65, 0.0])
    uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    tokens, logprobs = sample(p.log().expand(2000, -1), uniform, temperature=1.0)
    assert torch.bincount(tokens, minlength=6).tolist() == [0, 200, 500, 0, 1300, 0]
    assert torch.allclose(logprobs, p.double().log()[tokens], atol=1e-6)
    edge = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(p.log().expand(2, -1), edge, temperature=1.0)[0].tolist() == [1, 4]
    tokens, logprobs = sample(p.log().expand(2000, -1), uniform, temperature=0.5)
    sharper = p.double().square() / p.double().square().sum()
    assert torch.bincount(tokens)[4].item() == pytest.approx(2000 * sharper[4], abs=1)
    assert torch.allclose(logprobs, sharper.log()[tokens], atol=1e-6)


@pytest.mark.quick
def test_tokens_of_a_long_tail_are_drawn_at_their_own_uniforms():
    # 150 thousand tails of 1.5e-8: float32 near 1 has steps of 6e-8, so it cannot tell them apart
    logits = torch.full((150_000,), -18.0)
    logits[0] = 0
    cdf = logits.exp().double().cumsum(0) / logits.exp().double().sum()
    tokens = torch.tensor([1, 2, 777, 74_999, 75_000, 120_001, 149_998, 149_999])
    middle = (cdf[tokens - 1] + cdf[tokens]) / 2
    assert sample(logits.expand(8, -1), middle, temperature=1.0)[0].equal(tokens)


@pytest.mark.quick
def test_the_samplers_logprobs_are_the_trainers():
    logits = torch.full((2, 150_000), -18.0)
    logits[:, 0] = 0  # added one by one to 1, the tail would be lost
    tokens, logprobs = sample(logits, torch.tensor([0.3, 0.9999]).double(), temperature=1.0)
    weight = torch.cat([logits.T[:, :1], torch.zeros(150_000, 1)], 1)
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    trained, _ = token_logprobs(hidden, weight, tokens)
    exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    for got in (logprobs, trained):
        assert (got.double() - exact).abs().max() < 2e-6 * exact.abs().max().clamp(min=0.1)


@pytest.mark.quick
def test_a_draw_does_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20, 31, generator=generator)
    uniform = torch.rand(20, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample(logits, uniform, temperature=0.7)
    for b in range(20):
        token, logprob = sample(logits[b : b + 1], uniform[b : b + 1], temperature=0.7)
        assert token == tokens[b] and torch.allclose(logprob, logprobs[b], rtol=1e-6)


@pytest.mark.quick
def test_temperature_zero_takes_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    tokens, logprobs = sample(logits, None, temperature=0)
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.double().log_softmax(-1).max(-1).values)


@pytest.mark.quick
@pytest.mark.parametrize("vocab", [11, 300, 40001])
def test_a_row_of_nan_draws_a_token_whose_logprob_is_nan(vocab):
    logits = torch.randn(2, vocab)
    logits[1] = torch.nan
    tokens, logprobs = sample(logits, torch.tensor([0.5, 0.999]).double(), temperature=1.0)
    assert 0 <= tokens.min() and tokens.max() < vocab
    assert logprobs.isfinite().tolist() == [True, False]


# Precision -------------------------------------------------------------------------------------


@pytest.mark.quick
def test_rms_norm_accumulates_in_float32():
    norm = models.RMSNorm(4096, tiny()).to(torch.bfloat16)
    x = torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    truth = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    total = torch.zeros(8, dtype=torch.bfloat16)
    for column in x.pow(2).T:  # accumulated in bfloat16, the sum stops growing at 2048
        total = total + column
    naive = x / (total[:, None] / 4096 + 1e-6).sqrt()
    assert relative(norm(x).detach(), truth) < 2**-8 < 0.3 < relative(naive, truth)


@pytest.mark.quick
def test_bf16_model_keeps_float32_rope_angles():
    positions = torch.tensor([[257, 100_003]])
    cos, sin = models.Rope(tiny(head_dim=8))(positions, torch.bfloat16)[FULL]
    angles = positions.double()[..., None] * 1e4 ** -(torch.arange(0, 8, 2).double() / 8)
    assert cos.dtype == sin.dtype == torch.float32
    # Float32 angles of size 1e5 are exact to 1e5 * 2^-24 = 6e-3. Bfloat16 angles would be random.
    assert (cos[:, :, 0, :4] - angles.cos()).abs().max() < 1e-2 and cos[..., :4].equal(cos[..., 4:])
    assert (sin[:, :, 0, 4:] - angles.sin()).abs().max() < 1e-2
    assert sin[..., 4:].equal(-sin[..., :4])


@pytest.mark.quick
def test_bf16_model_rotates_by_float32_angles_of_exact_positions(monkeypatch):
    seen = []
    monkeypatch.setattr(models, "apply_rope", lambda x, *angles: (
        seen.append(angles[0]), ROTATE(x, *angles))[1])  # fmt: skip
    model, positions = model_of(dtype=torch.bfloat16), torch.tensor([[257, 100_003]])
    model(torch.tensor([[1, 2]]), positions=positions)
    angle = positions.double()[..., None] * 1e4 ** -(torch.arange(0, 10, 2).double() / 10)
    assert len(seen) == 4 and all(x.dtype == torch.float32 for x in seen)  # q and k, two layers
    assert all((cos[:, :, 0, :5] - angle.cos()).abs().max() < 1e-2 for cos in seen)


@pytest.mark.quick
def test_weights_are_the_same_draw_in_every_dtype():
    dtypes = torch.float32, torch.float64
    single, double = (Transformer(tiny()).to(d).init_weights(5) for d in dtypes)
    for a, b in zip(single.parameters(), double.parameters()):
        assert torch.equal(a, b.float())


@pytest.mark.quick
def test_gemma_norm_keeps_small_weights():
    norm = models.RMSNorm(64, tiny("gemma3_text")).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)  # 1 + w is 1 in bfloat16
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got, plain = norm(x * 0 + 1).double(), torch.tensor(1 + 2.0**-10)
    assert got.dtype == torch.float64 and norm(x).dtype == torch.bfloat16
    wide = x.double() * (1 + 2.0**-10) / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).equal(wide.float().to(torch.bfloat16)) and plain > 1


@pytest.mark.quick
def test_gemma_scales_by_a_rounded_root():
    model = model_of("gemma3_text", dtype=torch.bfloat16, hidden_size=3072, num_hidden_layers=1,
                     layer_types=(FULL,), intermediate_size=8)  # fmt: skip
    tokens = torch.tensor([[3]])
    assert model.embed(tokens)[0, 0].equal(model.model.embed_tokens.weight[3] * 55.5)
    assert 3072**0.5 == pytest.approx(55.43, abs=0.01)


# More packing, windows and padding -------------------------------------------------------------


def rule(ids, window=None):
    """(B, S, S) bool: j <= i, same document, not PAD, less than `window` tokens of it back."""
    B, S = ids.shape
    seen = torch.zeros(B, S, S, dtype=torch.bool)
    for b in range(B):
        for i in range(S):
            own = [j for j in range(i + 1) if ids[b, i] >= 0 and ids[b, j] == ids[b, i]]
            seen[b, i, own[-window:] if window else own] = True
    return seen


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(12))
def test_packed_attention_is_dense_attention_under_the_rule(seed):
    generator = torch.Generator().manual_seed(seed)
    B, S, window = 1 + seed % 3, 17, (None, 3, 40)[seed % 3]
    runs = torch.randint(0, 6, (B, S), generator=generator).sort(dim=1).values
    ids = runs.masked_fill((torch.rand(B, 6, generator=generator) < 0.3).gather(1, runs), -1)
    q, k, v = (torch.randn(B, h, S, 4, dtype=torch.float64, generator=generator) for h in (4, 2, 2))
    for x in (q, k, v):
        x.requires_grad_()
    options = dict(layer=0, scale=0.5, window=window)
    got = packed_attention(doc_ids=ids)(q, k, v, **options)
    seen = rule(ids, window)
    score = (q @ k.repeat_interleave(2, 1).mT * 0.5).masked_fill(~seen[:, None], -1e300)
    truth = (score.softmax(-1) * seen[:, None]) @ v.repeat_interleave(2, 1)
    assert torch.allclose(got, truth, atol=1e-14, rtol=0)
    assert not got.detach().transpose(1, 2)[ids < 0].any()
    upstream = torch.randn(got.shape, dtype=torch.float64, generator=generator)
    grads = [torch.autograd.grad((x * upstream).sum(), (q, k, v)) for x in (got, truth)]
    for ours, theirs in zip(*grads):
        assert relative(ours, theirs) < 1e-13 < relative(0 * ours, theirs)


@pytest.mark.quick
@pytest.mark.parametrize("window", [1, 2, 5, 127, 128, 129, 300, 1000])
def test_a_window_is_dense_attention_under_its_band(window):
    qkv = [torch.randn(2, h, 300, 4, dtype=torch.float64) for h in (4, 2, 2)]
    got = models.causal_attention(*qkv, layer=0, scale=0.5, window=window)
    place = torch.arange(300)
    ahead = place[:, None] - place
    mask = (ahead >= 0) & (ahead < window)
    truth = ATTEND(*qkv, attn_mask=mask, scale=0.5, enable_gqa=True)
    assert relative(got, truth) < 1e-14


@pytest.mark.quick
def test_packed_attention_refuses_what_it_cannot_tell_apart():
    for between in (1, -1):
        with pytest.raises(ValueError, match="document 0 of row 0 is not in one piece"):
            packed_attention(doc_ids=torch.tensor([[0, between, 0]]))
    with pytest.raises(ValueError, match="expected either lengths or doc_ids"):
        packed_attention([3], doc_ids=torch.zeros(1, 3).long())
    with pytest.raises(ValueError, match="integers"):
        packed_attention(doc_ids=torch.zeros(1, 3))


@pytest.mark.quick
@pytest.mark.parametrize("longest", [10, 39, 60])
def test_a_sliding_layers_cache_holds_only_its_window_and_seldom_moves_it(longest, monkeypatch):
    moved, plan = [], KVCache._plan

    def planned(self, S, window):
        step = plan(self, S, window)
        moved.extend(keep for _, _, keep in step.forget)
        return step

    monkeypatch.setattr(KVCache, "_plan", planned)
    model = model_of("gemma3_text", sliding_window=40)
    cache, _ = models.prefill(model, [[5] * 10, [6] * longest])
    for step in range(90):
        forward_with_cache(model, cache, torch.full((2, 1), step % 53))
    sliding, full = cache.layers[0], cache.layers[1]
    assert 40 <= sliding.shape[3] <= 40 + 32 and full.shape[3] >= 90 + longest
    assert sum(moved) <= 2 * 90 * 2  # two slots for each token and row


@pytest.mark.quick
@pytest.mark.parametrize("model_type", models.TINY)
def test_greedy_rows_are_the_argmax_of_the_full_forward(model_type):
    model = model_of(model_type)
    rows = generate(model, [[1, 2, 3, 4, 5, 6], [7], [8, 9]], max_new_tokens=9, temperature=0)
    for row in rows:
        logits = model(torch.tensor([row.tokens]))[0]
        start = len(row.tokens) - 9
        assert logits[start - 1 : -1].argmax(-1).tolist() == row.tokens[start:]


@pytest.mark.quick
def test_rows_come_back_in_their_order_whenever_they_end():
    prompts, end = [[3], [4, 5], [3], [6]], tuple(range(25))
    rows = generate(model_of(), prompts, max_new_tokens=30, seed=3, end=end)
    assert [row.tokens[: len(p)] for row, p in zip(rows, prompts, strict=True)] == prompts
    assert len({len(row.tokens) for row in rows}) > 1
    assert all(row.tokens[-1] in end for row in rows if not row.truncated)


@pytest.mark.quick
def test_generate_gives_the_logprobs_of_the_temperature():
    model, options = model_of(), dict(max_new_tokens=12, temperature=0.7, seed=1)
    (row,) = generate(model, [[3, 4]], **options)
    logp = (model(torch.tensor([row.tokens]))[0, 1:-1] / 0.7).log_softmax(-1)
    truth = logp.gather(1, torch.tensor(row.tokens[2:])[:, None])[:, 0]
    assert row.mask == [False] + [True] * 12 and row.logprobs[0] == 0
    assert torch.allclose(torch.tensor(row.logprobs[1:]).double(), truth, atol=1e-6)
    assert row.logprobs[1:] == pytest.approx(truth.tolist(), abs=1e-12)
    assert generate(model, [[3, 4]], **options)[0].tokens == row.tokens  # the seed decides


# Configurations ---------------------------------------------------------------------------------

YARN = dict(rope_type="yarn", factor=4.0)


@pytest.mark.quick
@pytest.mark.parametrize("rope, complaint", [
    ({"type": "linear", "factor": 3.0}, "unknown.*'type'"),
    (YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}, "unknown.*'mscale', 'mscale_all_dim'"),
    (YARN | {"truncate": False}, "unknown.*'truncate'"),
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_type: expected one of .*, got 'dynamic'"),
    ({"rope_type": "linear"}, "missing.*'factor'"),
])  # fmt: skip
def test_rope_parameters_that_are_not_computed_are_refused(rope, complaint):
    with pytest.raises(ValueError, match=complaint):
        tiny(rope_parameters={FULL: rope})


# Mistakes ---------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("call, complaint", [
    (lambda m: m(torch.arange(4)), r"tokens: expected \(B, S\)"),
    (lambda m: m(torch.ones(4, 24)), r"states \(B, S, M\), got \(4, 24\)"),
    (lambda m: m.logprobs(torch.ones(2, 24), torch.ones(3).long()), r"and \(N,\), got"),
    (lambda m: m.logprobs(torch.ones(2, 24), torch.ones(2).long(), temperature=0), "temperature"),
    (lambda m: generate(m, [Row([53])], max_new_tokens=1, temperature=0), "ids are 0..52"),
    (lambda m: generate(m, [Row([])], max_new_tokens=1, temperature=0), "at least one token"),
    (lambda m: generate(m, [Row([1])], max_new_tokens=0, temperature=0), "max_new_tokens"),
    (lambda m: generate(m, [Row([1], [0.5])], max_new_tokens=2, temperature=1.0), "needs 2 draws"),
    (lambda m: generate(m, [Row([1])], max_new_tokens=10**6, temperature=0), "32768 positions"),
    *((lambda m, t=t: generate(m, [[1]], max_new_tokens=2, temperature=t), "temperature")
      for t in (-1, float("nan"), float("inf"))),
    (lambda m: generate(m, [[1]], max_new_tokens=2, temperature=0, slots=0), "slots"),
])  # fmt: skip
def test_a_callers_mistake_is_named(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call(model_of(dtype=torch.float32))


# Tokens outside the vocabulary -----------------------------------------------------------------

OUTSIDE = [(-1, 0, 0), (53, 1, 2), (2**40, 0, 3), (-(2**63), 1, 3)]


@pytest.mark.quick
@pytest.mark.parametrize("token, row, column", OUTSIDE)
def test_a_token_outside_the_vocabulary_is_named(token, row, column):
    model, tokens = model_of(), torch.arange(8).view(2, 4)
    tokens[row, column] = token
    said = f"token id {token} at row {row}, column {column} is not in the vocabulary of 53: ids are"
    for call in (model, model.hidden, model.embed, model.require_tokens):
        with pytest.raises(ValueError, match=said):
            call(tokens)
    hidden, targets = torch.randn(8, 24).double(), tokens.flatten()
    said = f"target id {token} at place {4 * row + column} is not in the vocabulary of 53: ids are"
    with pytest.raises(ValueError, match=said):
        model.logprobs(hidden, targets)
    with pytest.raises(ValueError, match=said):
        token_logprobs(hidden, model.head_weight, targets)


@pytest.mark.quick
def test_every_token_of_the_vocabulary_and_none_at_all_are_taken():
    model = model_of()
    tokens = torch.arange(53)[None]
    assert model(tokens.int()).equal(model(tokens))
    # Every layer runs without tokens, too: under FSDP the other ranks wait for its all-gather.
    calls = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *given: calls.append(given))
    assert model(tokens[:, :0]).shape == (1, 0, 53) and len(calls) == len(model.model.layers)
    logprobs, _ = model.logprobs(torch.randn(0, 24).double(), torch.zeros(0).long())
    assert logprobs.shape == (0,)
    # In mixed precision the residual is wider than the weights, and the last norm narrows it.
    model.float().residual_dtype = torch.float64
    assert model(tokens[:, :0]).dtype == torch.float32


@pytest.mark.quick
def test_off_the_cpu_the_refusal_is_an_assertion_that_waits_for_nothing(monkeypatch):
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda *given: asserted.append(given))

    def waits(*args):
        raise AssertionError("the CPU looked at what the device computes")

    monkeypatch.setattr(torch, "aminmax", waits)
    # the meta device stands for a GPU here: to look at one of its values is an error
    models.require_tokens_in_vocabulary(torch.ones(2, 3, dtype=torch.long, device="meta"), 53)
    ((condition, message),) = asserted
    assert condition.shape == () and condition.dtype == torch.bool
    assert message == "a token id is outside of 0..52"


@pytest.mark.slow
def test_the_check_of_tokens_can_be_compiled_whole():
    def check(tokens):
        models.require_tokens_in_vocabulary(tokens, 53)
        return tokens + 1

    compiled = torch.compile(check, fullgraph=True, backend="eager")
    assert compiled(torch.arange(5)).equal(torch.arange(5) + 1)
    with pytest.raises(RuntimeError, match="a token id is outside of 0..52"):
        compiled(torch.arange(50, 55))


def _outside(rank, text, mode):
    """What a rank of a plan says of a token and a target outside the vocabulary."""
    plan, said = parallel.Plan.parse(text), []
    model = tiny_model("qwen3", vocab_size=56, dtype=torch.float32)
    grid = parallel.Grid.make(plan)
    model = parallel.parallelize(model, plan, device_mesh=grid, mode=mode)
    tokens = torch.arange(8).view(1, 8)
    tokens[0, 5] = 56
    if plan.pp == 1:
        with pytest.raises(ValueError) as error:
            model.hidden(tokens)
        said.append(str(error.value))
        hidden = model.hidden(tokens.clamp(max=55))
        with pytest.raises(ValueError) as error:
            model.logprobs(hidden[0], tokens[0])
        return [*said, str(error.value)]
    for stage, part in model.parts.items():  # whoever has the tokens can ask, on every stage
        with pytest.raises(ValueError) as error:
            part.require_tokens(tokens)
        said.append(str(error.value))
        if stage == 0:
            with pytest.raises(ValueError) as error:
                part.hidden(tokens)
            assert str(error.value) == said[0]
        if part is model.last:
            with pytest.raises(ValueError) as error:
                part.logprobs(torch.randn(8, 24), tokens[0])
            said.append(str(error.value).replace("target", "token"))
            said[-1] = said[-1].replace("at place 5", "at row 0, column 5")
    return sorted({*said})


PLANS = [("t2", "ddp"), ("t2", "fsdp"), ("d2", "fsdp"), ("p2", "ddp")]


# tests/test_parity.py has t2 in the default suite
@pytest.mark.slow
@pytest.mark.parametrize("text, mode", PLANS)
def test_a_token_outside_the_vocabulary_is_refused_alike_under_every_plan(tmp_path, text, mode):
    first, second = ranks(tmp_path, 2, _outside, text, mode)
    assert first == second
    assert first[0].startswith("token id 56 at row 0, column 5 is not in the vocabulary of 56")
    if text != "p2":
        assert first[1].startswith("target id 56 at place 5 is not in the vocabulary of 56")


# The value head --------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_value_head_is_a_row_of_its_own(tmp_path):
    model = model_of(value_head=True)
    hidden = model.hidden(torch.tensor([[1, 2, 3]]))
    assert torch.allclose(model.values(hidden), hidden @ model.score.weight[0])
    fresh = model_of().add_value_head()
    assert fresh.values(hidden).eq(0).all() and fresh.config.value_head
    torch.autograd.grad(fresh.values(hidden.detach()).sum(), fresh.score.weight)
    save_hf(model, tmp_path)
    assert torch.equal(load_hf(tmp_path).score.weight, model.score.weight)
    with pytest.raises(ValueError, match="value_head"):
        load_hf(tmp_path, model=model_of())
    with pytest.raises(ValueError, match="add_value_head"):
        model_of().values(hidden)
