"""models.py against its definition and against plain torch."""

import numpy as np
import pytest
import torch
from oracles import plain_attention
from test_ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

import models
import parallel
from models import (
    FULL, KVCache, Row, Transformer, causal_attention, forward_with_cache, generate,
    packed_attention, packed_positions, prefill, sample, tiny, tiny_model, token_logprobs,
)  # fmt: skip
from models import relative_error as relative

ATTEND = torch.nn.functional.scaled_dot_product_attention
DOCUMENTS = 7, 1, 6, 12, 6


class Watching(TorchDispatchMode):
    """Calls look(operation, result) after each operation of torch."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.look(operation.overloadpacket, out)
        return out


def model_of(model_type="qwen3", dtype=torch.float64, **changes):
    return tiny_model(model_type, seed=3, dtype=dtype, **changes)


def documents(seed=0, lengths=DOCUMENTS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(53, (n,), generator=generator) for n in lengths]


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


def generate_without_draws(model, rows, **options):
    for row in rows:
        row.draws = [0.5] * len(row.draws)
    return generate(model, rows, **options)


FAULTS = {
    "apply_rope": lambda x, cos, sin: ROTATE(x, cos, -sin),
    "packed_attention": lambda *, doc_ids: packed_attention(doc_ids=torch.zeros_like(doc_ids)),
    "causal_attention": lambda *qkv, layer, scale, **_: ATTEND(
        *qkv, is_causal=True, scale=1.1 * scale, enable_gqa=True),
    "masked_attention": lambda q, k, v, mask=None, **how: MASKED(  # the cache forgets its mask
        q, k, v, mask if q.shape[2] == k.shape[2] else None, **how),
    "forward_with_cache": lambda model, cache, tokens, counts=None: (  # the cache forgets lengths
        forward_with_cache(model, cache, tokens)),
    "generate": generate_without_draws,
}  # fmt: skip
ROTATE, MASKED = models.apply_rope, models.masked_attention


@pytest.mark.parametrize("name", FAULTS)
def test_check_sees_a_planted_fault(name, monkeypatch):
    monkeypatch.setattr(models, name, FAULTS[name])
    families = [tiny_model(kind, **changes) for kind, changes in FEW.values()]
    assert any(not error <= 1e-12 for x in families for _, error in models.path_errors(x))


# Packed documents, windows and padding ---------------------------------------------------------


def packed(model, parts):
    """Logits of documents that lie in one row."""
    lengths = [len(d) for d in parts]
    options = dict(positions=packed_positions(lengths), attention=packed_attention(lengths))
    return model(torch.cat(parts)[None], **options)[0]


def separate(model, parts):
    return torch.cat([model(d[None])[0] for d in parts])


def gradients(model, parts, logits):
    """{parameter: its gradient} for a loss that depends on each token's document alone."""
    weights = torch.cat([torch.sin(d[:, None].double() + torch.arange(53)) for d in parts])
    names, parameters = zip(*model.named_parameters())
    grads = torch.autograd.grad((logits * weights).sum(), parameters)
    return dict(zip(names, grads))


def worst(ours, truth):
    """The largest relative error of a parameter: a small one does not drown in the others."""
    return max(relative(ours[name], truth[name]) for name in truth)


def some_lengths(seed):
    generator = torch.Generator().manual_seed(seed)
    return [*torch.randint(1, 14, (1 + 2 * seed,), generator=generator).tolist(), 1]


LENGTHS = [(name, lengths) for name in models.TINY for lengths in (DOCUMENTS, (6, 6, 6))]
LENGTHS += [("qwen3", some_lengths(seed)) for seed in range(6)]


@pytest.mark.quick
@pytest.mark.parametrize("model_type, lengths", LENGTHS)
def test_packed_documents_equal_separate_documents(model_type, lengths):
    model, parts = model_of(model_type), documents(lengths=lengths)
    logits, truth = packed(model, parts), separate(model, parts)
    for got, want in zip(logits.split(list(lengths)), truth.split(list(lengths))):
        assert relative(got, want) < 1e-12
    assert worst(gradients(model, parts, logits), gradients(model, parts, truth)) < 1e-12


@pytest.mark.quick
def test_the_gradient_comparison_sees_a_zero_and_a_missing_document():
    model, parts = model_of(), documents()
    truth = gradients(model, parts, separate(model, parts))
    for name in truth:  # every parameter has a gradient whose loss would be seen
        assert worst(truth | {name: torch.zeros_like(truth[name])}, truth) == 1
    assert worst(gradients(model, parts[:-1], packed(model, parts[:-1])), truth) > 1e-3


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
    got = packed_attention(doc_ids=ids)(q, k, v, layer=0, scale=0.5, window=window)
    truth, _ = plain_attention(q, k, v, rule(ids, window)[:, None], scale=0.5)
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
    ahead = torch.arange(300)[:, None] - torch.arange(300)
    truth, _ = plain_attention(*qkv, (ahead >= 0) & (ahead < window), scale=0.5)
    assert relative(causal_attention(*qkv, layer=0, scale=0.5, window=window), truth) < 1e-14


# Log-probabilities -----------------------------------------------------------------------------


def plain_logprobs(hidden, weight, targets, *, temperature=1.0, softcap=None):
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
@pytest.mark.parametrize("chunk", [1, 3, 11, 100, None])
@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.7, None), (1.3, 2.0)])
def test_chunked_logprobs_have_plain_values_and_gradients(chunk, temperature, softcap):
    hidden, weight, targets, upstream = logprob_case()
    options = dict(temperature=temperature, softcap=softcap)
    got = token_logprobs(hidden, weight, targets, chunk=chunk, **options)
    truth = plain_logprobs(hidden, weight, targets, **options)
    assert all(relative(a, b) < 1e-13 for a, b in zip(got, truth))

    # Both, the entropies alone, the log-probs alone, and these again: what the first backward of
    # log-probs finds kept, the second has to compute.
    for used in ([0, 1], [1], [0], [0]):
        sums = [sum((upstream[n] * x[n]).sum() for n in used) for x in (got, truth)]
        grads = [torch.autograd.grad(x, (hidden, weight), retain_graph=True) for x in sums]
        for ours, theirs in zip(*grads):
            assert relative(ours, theirs) < 1e-13 < relative(0 * ours, theirs)


@pytest.mark.quick
def test_logprobs_never_hold_all_the_logits():
    hidden, weight, targets, upstream = logprob_case(n=512, width=4, vocab=300)
    sizes = []
    with Watching(lambda _, out: sizes.append(getattr(out, "numel", int)())):
        got = torch.stack(token_logprobs(hidden, weight, targets, chunk=64))
        (got * upstream).sum().backward()
    assert 64 * 300 <= max(sizes) < 2 * 64 * 300


@pytest.mark.quick
def test_bf16_logprobs_are_within_twice_plain_torch():
    *half, upstream = logprob_case(torch.bfloat16, n=4096, width=32, vocab=20)
    results = []
    for function, dtype, options in (
        (plain_logprobs, torch.float64, {}), (plain_logprobs, torch.bfloat16, {}),
        # 512 chunks: a head gradient summed in bfloat16 would lose most of them
        (token_logprobs, torch.bfloat16, dict(chunk=8)),
    ):  # fmt: skip
        hidden, weight = (x.detach().to(dtype).requires_grad_() for x in half[:2])
        out = torch.stack([x.double() for x in function(hidden, weight, half[2], **options)])
        (out * upstream).sum().backward()
        results.append([out, hidden.grad, weight.grad])
    for exact, plain, ours in zip(*results):
        assert relative(ours, exact) <= 2 * relative(plain, exact)


# The cache -------------------------------------------------------------------------------------


def full_forward(model, rows):
    """The logits after each row, from one forward of the whole row without a cache."""
    return torch.stack([model(torch.tensor([row]))[0, -1] for row in rows]).detach()


@pytest.mark.quick
@pytest.mark.parametrize("counts", [[1, 0], [0, 0], [-1, 1], [1, 3], [1], [1, 1, 1]])
def test_each_row_must_have_a_real_token(counts):
    model, (cache, _) = model_of(), prefill(model_of(), [[1, 2], [3]])
    tokens = torch.tensor([[4, 5], [6, 7]])
    with pytest.raises(ValueError, match=r"counts: expected 2 numbers in 1\.\.2, got \["):
        forward_with_cache(model, cache, tokens, counts)
    logits = forward_with_cache(model, cache, tokens, [2, 1])  # nothing has changed
    assert relative(logits, full_forward(model, [[1, 2, 4, 5], [3, 6]])) < 1e-12


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
        fresh, _ = prefill(rows.model, prompts)
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
        rows.cache.begin(prefill(rows.model, prompts)[0], [1, 0, 1])
        rows.tokens += [prompts[r] for r in (1, 0, 1)]
        rows.feed(25)
        rows.select(4)  # rows of unequal lengths are repeated, dropped and reordered
        rows.feed(1)
    assert rows.longest > 49


@pytest.mark.quick
@pytest.mark.parametrize("longest", [10, 39, 60])
def test_a_sliding_layers_cache_holds_only_its_window_and_seldom_moves_it(longest):
    model = model_of("gemma3_text", sliding_window=40)
    cache, _ = prefill(model, [[5] * 10, [6] * longest])
    moved = []

    def look(operation, out):
        if operation is torch.ops.aten.clone:
            moved.append(out.numel())

    with Watching(look):
        for step in range(90):
            forward_with_cache(model, cache, torch.full((2, 1), step % 53))
    sliding, full = cache.layers[0], cache.layers[1]
    assert 40 <= sliding.shape[3] <= 40 + 32 and full.shape[3] >= 90 + longest
    assert sum(moved) <= 2 * 90 * 2 * 40  # two slots of 40 numbers for each token and row


# Generation: tests/test_decoding.py has slots, turns and forks ---------------------------------


@pytest.mark.quick
def test_a_seed_decides_the_draws_of_rows_that_have_none():
    model, draws = model_of(), np.random.default_rng(0).random((3, 12))
    options = dict(max_new_tokens=12, temperature=1.0)
    together = generate(model, [Row([3, 4, 5], draws[0]), Row([7], draws[1])], **options)
    for row, own in zip(together, draws):
        (alone,) = generate(model, [Row(row.tokens[:-12], own)], seed=5, **options)
        assert alone.tokens == row.tokens
        assert np.allclose(alone.logprobs, row.logprobs, rtol=0, atol=1e-12)
    found = [generate(model, [[3, 4]], seed=seed, **options)[0].tokens for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


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
    tokens, logprobs = sample(p.log()[None], None, temperature=0)  # the likeliest
    assert tokens.tolist() == [4] and torch.allclose(logprobs, p.double().log()[4:5], atol=1e-6)


@pytest.mark.quick
def test_tokens_of_a_long_tail_are_drawn_at_their_own_uniforms():
    # 150 thousand tails of 1.5e-8: float32 near 1 has steps of 6e-8, so it cannot tell them apart
    logits = torch.full((150_000,), -18.0)
    logits[0] = 0
    p = logits.double().softmax(0)
    tokens = torch.tensor([1, 2, 777, 74_999, 75_000, 120_001, 149_998, 149_999])
    middle = p.cumsum(0)[tokens] - p[tokens] / 2
    found, logprobs = sample(logits.expand(8, -1), middle, temperature=1.0)
    assert found.equal(tokens)

    # And the trainer gives them the log-probs of the sampler, as it does the likely token.
    tokens = torch.cat([tokens, torch.zeros(1).long()])
    logprobs = torch.cat([logprobs, sample(logits[None], None, temperature=0)[1]])
    weight = torch.stack([logits, torch.zeros(150_000)], 1)
    trained, _ = token_logprobs(torch.tensor([[1.0, 0.0]]).expand(9, 2), weight, tokens)
    exact = p.log()[tokens]
    for got in (logprobs, trained):
        assert ((got.double() - exact).abs() < 2e-6 * exact.abs().clamp(min=0.1)).all()


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
    assert relative(norm(x), truth) < 2**-8 < 0.3 < relative(naive, truth)


@pytest.mark.quick
def test_bf16_model_keeps_float32_rope_angles(monkeypatch):
    seen = []

    def rotate(x, *cos_and_sin):
        seen.append(cos_and_sin)
        return ROTATE(x, *cos_and_sin)

    monkeypatch.setattr(models, "apply_rope", rotate)
    positions = torch.tensor([[257, 100_003]])
    model_of(dtype=torch.bfloat16)(torch.tensor([[1, 2]]), positions=positions)
    angle = positions.double()[..., None] * 1e4 ** -(torch.arange(0, 10, 2).double() / 10)
    assert len(seen) == 4  # q and k, two layers
    for cos, sin in seen:
        # Float32 angles of size 1e5 are exact to 1e5 * 2^-24 = 6e-3. Bfloat16 would be random.
        assert cos.dtype == sin.dtype == torch.float32
        assert (cos[:, :, 0, :5] - angle.cos()).abs().max() < 1e-2
        assert (sin[:, :, 0, 5:] - angle.sin()).abs().max() < 1e-2
        assert cos[..., :5].equal(cos[..., 5:]) and sin[..., 5:].equal(-sin[..., :5])


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
    wide = x.double() * (1 + 2.0**-10) / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).equal(wide.float().to(torch.bfloat16))


@pytest.mark.quick
def test_gemma_scales_by_a_rounded_root():
    model = model_of("gemma3_text", dtype=torch.bfloat16, hidden_size=3072, num_hidden_layers=1,
                     layer_types=(FULL,), intermediate_size=8)  # fmt: skip
    row = model.model.embed_tokens.weight[3]
    assert model.embed(torch.tensor([[3]]))[0, 0].equal(row * 55.5)  # 3072 ** 0.5 is 55.43


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
    (lambda m: m.values(torch.ones(1, 24)), "add_value_head"),
    (lambda m: m(torch.ones(1, 26).long(), attention=packed_attention([13, 14])),
     r"packed for \(1, 27\)"),
    (lambda m: packed_attention([]), "at least one token"),
    (lambda m: packed_attention([3, 0]), "at least one token"),
    *((lambda m, n=n: packed_attention(doc_ids=torch.tensor([[0, n, 0]])),
       "document 0 of row 0 is not in one piece") for n in (1, -1)),
    (lambda m: packed_attention([3], doc_ids=torch.zeros(1, 3).long()), "either lengths or doc_id"),
    (lambda m: packed_attention(doc_ids=torch.zeros(1, 3)), "integers"),
])  # fmt: skip
def test_a_callers_mistake_is_named(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call(model_of(dtype=torch.float32))


# Tokens outside the vocabulary -----------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("token, row, column", [
    (-1, 0, 0), (53, 1, 2), (2**40, 0, 3), (-(2**63), 1, 3)])  # fmt: skip
def test_a_token_outside_the_vocabulary_is_named(token, row, column):
    model, tokens = model_of(), torch.arange(8).view(2, 4)
    tokens[row, column] = token
    hidden, targets = torch.randn(8, 24).double(), tokens.flatten()
    at = {"token": f"row {row}, column {column}", "target": f"place {4 * row + column}"}
    calls = [(call, "token", tokens) for call in (model, model.hidden, model.embed)]
    calls += [(model.require_tokens, "token", tokens), (model.logprobs, "target", hidden, targets)]
    calls += [(token_logprobs, "target", hidden, model.head_weight, targets)]
    for call, what, *args in calls:
        said = f"{what} id {token} at {at[what]} is not in the vocabulary of 53: ids are 0..52"
        with pytest.raises(ValueError, match=said):
            call(*args)


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
    """What this rank's parts of a model say of a token, and of a target, that does not exist."""
    plan, said = parallel.Plan.parse(text), []
    model = tiny_model("qwen3", vocab_size=56, dtype=torch.float32)
    model = parallel.parallelize(model, plan, device_mesh=parallel.Grid.make(plan), mode=mode)
    tokens = torch.arange(8).view(1, 8)
    tokens[0, 5] = 56
    last = model if plan.pp == 1 else model.last
    for stage, part in ({0: model} if plan.pp == 1 else model.parts).items():
        calls = [(part.require_tokens, tokens)]  # whoever has the tokens can ask, on every stage
        calls += [(part.hidden, tokens)] if stage == 0 else []
        calls += [(part.logprobs, torch.randn(8, 24), tokens[0])] if part is last else []
        for call, *args in calls:
            with pytest.raises(ValueError) as error:
                call(*args)
            said.append(str(error.value).removesuffix(" of 56: ids are 0..55"))
    return sorted({*said})


# tests/test_parity.py has t2 in the default suite
@pytest.mark.slow
@pytest.mark.parametrize("text, mode", [
    ("t2", "ddp"), ("t2", "fsdp"), ("d2", "fsdp"), ("p2", "ddp")])  # fmt: skip
def test_a_token_outside_the_vocabulary_is_refused_alike_under_every_plan(tmp_path, text, mode):
    first, second = ranks(tmp_path, 2, _outside, text, mode)
    target, token = "target id 56 at place 5", "token id 56 at row 0, column 5"
    assert second == [f"{said} is not in the vocabulary" for said in (target, token)]
    assert first == (second[1:] if text == "p2" else second)


# The value head --------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_value_head_is_a_row_of_its_own(tmp_path):
    model = model_of(value_head=True)
    hidden = model.hidden(torch.tensor([[1, 2, 3]]))
    assert torch.allclose(model.values(hidden), hidden @ model.score.weight[0])
    fresh = model_of().add_value_head()
    assert fresh.values(hidden).eq(0).all() and fresh.config.value_head
    torch.autograd.grad(fresh.values(hidden.detach()).sum(), fresh.score.weight)
    models.save_hf(model, tmp_path)
    assert torch.equal(models.load_hf(tmp_path).score.weight, model.score.weight)
    with pytest.raises(ValueError, match="value_head"):
        models.load_hf(tmp_path, model=model_of())
