"""Models against their definition and against plain torch. Families: test_families.py."""

import numpy as np
import pytest
import torch
from oracles import Watch, worst

import models
from check_models import relative_error as relative
from full.learn.generate import generate
from full.model.cache import KVCache, forward_with_cache, prefill
from full.model.logprobs import require_tokens_in_vocabulary, token_logprobs
from full.model.transformer import RMSNorm, Transformer
from full.tiny import tiny, tiny_model
from models import FULL, Row, sample

pytestmark = pytest.mark.quick
ATTEND = torch.nn.functional.scaled_dot_product_attention


def model_of(model_type="qwen3", dtype=torch.float64, **changes):
    return tiny_model(model_type, seed=3, dtype=dtype, **changes)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def plain_logprobs(hidden, weight, targets, *, temperature=1.0):
    z = hidden @ weight.T / temperature
    logp = z.log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def logprob_case(dtype=torch.float64, n=11, width=6, vocab=17):
    generator = seeded(1)
    draws = (torch.randn(size, width, generator=generator) for size in (n, vocab))
    hidden, weight = (x.to(dtype).requires_grad_() for x in draws)
    targets = torch.randint(vocab, (n,), generator=generator)
    upstream = torch.randn(2, n, generator=generator).double()
    return hidden, weight, targets, upstream


def test_logprobs_never_hold_all_the_logits():
    hidden, weight, targets, upstream = logprob_case(n=512, width=4, vocab=300)
    with Watch() as watch:
        got = torch.stack(token_logprobs(hidden, weight, targets, chunk=64))
        (got * upstream).sum().backward()
    assert 64 * 300 <= watch.largest < 2 * 64 * 300


@pytest.mark.parametrize("vocab", [3, 7, 1000])
def test_a_nearly_uniform_entropy(vocab):
    """log p + entropy is nearly 0 for all tokens. Their gradient is within some units in the last
    place of the logits, and not of log V: as the difference of these two it was off by 1e-4."""
    *given, targets, _ = logprob_case(torch.float32, vocab=vocab)
    grads = []
    for dtype in (torch.float64, torch.float32):
        inputs = [(0.02 * x.detach()).to(dtype).requires_grad_() for x in given]
        _, entropy = token_logprobs(*inputs, targets)
        grads.append(torch.autograd.grad(entropy.sum(), inputs))
    assert all(grad.any() for grad in grads[0]) and worst(grads[1], grads[0]) < 3e-6


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


def full_forward(model, rows):
    """The logits after each row, from one forward of the whole row without a cache."""
    return torch.stack([model(torch.tensor([row]))[0, -1] for row in rows]).detach()


def test_each_row_must_have_a_real_token():
    model, (cache, _) = model_of(), prefill(model_of(), [[1, 2], [3]])
    tokens = torch.tensor([[4, 5], [6, 7]])
    for counts in ([1, 0], [0, 0], [-1, 1], [1, 3], [1], [1, 1, 1]):
        with pytest.raises(ValueError, match=r"counts: expected 2 numbers in 1\.\.2, got \["):
            forward_with_cache(model, cache, tokens, counts)
    logits = forward_with_cache(model, cache, tokens, [2, 1])  # nothing has changed
    assert relative(logits, full_forward(model, [[1, 2, 4, 5], [3, 6]])) < 1e-12


def test_bfloat16_shared_prompts_are_as_exact_as_copies():
    generator, errors = seeded(), []
    q, k, v = (3 * torch.randn(1, h, 40, 16, generator=generator).bfloat16() for h in (4, 2, 2))
    row, options = [0] * 4, dict(layer=0, scale=1.0)
    for share in (True, False):
        prompt, cache = KVCache(1), KVCache()
        prompt.attention(q[:, :, :39], k[:, :, :39], v[:, :, :39], **options)
        prompt.lengths = [39]
        (cache.share_prompts if share else cache.append_rows)(prompt, row)
        assert bool(prompt.layers) == share  # rows that do not share take the keys over
        got = cache.attention(*(x[row, :, 39:] for x in (q, k, v)), **options)
        truth = ATTEND(*(x.double() for x in (q[:, :, 39:], k, v)), scale=1.0, enable_gqa=True)
        errors.append(relative(got, truth.expand(4, -1, -1, -1)))
    assert errors[0] < 1.5 * errors[1]


def test_a_sliding_layers_cache_holds_only_its_window_and_seldom_moves_it():
    model = model_of("gemma3_text", sliding_window=40)
    cache, _ = prefill(model, [[5] * 10, [6] * 39, [7] * 60])
    with Watch() as watch:
        for step in range(90):
            forward_with_cache(model, cache, torch.full((3, 1), step % 53))
    sliding, full = cache.layers[0], cache.layers[1]
    assert 40 <= sliding.shape[3] <= 40 + 32 and full.shape[3] >= 90 + 60
    moved = sum(args[0].numel() for args, _ in watch.calls("clone"))
    assert moved <= 3 * 90 * 2 * 40  # two slots of 40 numbers for each token and row


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


@pytest.mark.parametrize("vocab", [11, 300, 40001])
def test_a_row_of_nan_draws_a_token_whose_logprob_is_nan(vocab):
    logits = torch.randn(2, vocab)
    logits[1] = torch.nan
    tokens, logprobs = sample(logits, torch.tensor([0.5, 0.999]).double(), temperature=1.0)
    assert 0 <= tokens.min() and tokens.max() < vocab
    assert logprobs.isfinite().tolist() == [True, False]


def test_rms_norm_accumulates_in_float32():
    norm = RMSNorm(4096, tiny()).to(torch.bfloat16)
    x = torch.randn(8, 4096, generator=seeded()).bfloat16()
    truth = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert relative(norm(x), truth) < 2**-8  # 0.3 if the sum were in bfloat16, which ends at 2048


def test_bf16_model_keeps_float32_rope_angles(monkeypatch):
    """Float32 angles of 1e5 are exact to 1e5 * 2^-24 = 6e-3. The five have float64 angles."""
    positions = torch.tensor([[257, 100_003]])
    angle = positions.double()[..., None] * 1e4 ** -(torch.arange(0, 10, 2).double() / 10)
    truth = [angle.cos().repeat(1, 1, 2), torch.cat([-angle.sin(), angle.sin()], -1)]
    found = [*model_of(dtype=torch.bfloat16).rope(positions, torch.bfloat16)[FULL]]
    monkeypatch.setattr(models, "apply_rope", lambda x, *rope: found.extend(rope) or x)
    core = models.Transformer(models.ModelConfig(5, 4, 4, 1, 2, 1, 10)).bfloat16()
    core.hidden(torch.ones(1, 2).long(), positions=positions)
    for got, want, bound in zip(found[:4], 2 * truth, (1e-2, 1e-2, 1e-6, 1e-6), strict=True):
        assert got.dtype == torch.float32 and (got[:, :, 0] - want).abs().max() < bound


def test_weights_are_the_same_draw_in_every_dtype():
    dtypes = torch.float32, torch.float64
    single, double = (Transformer(tiny()).to(d).init_weights(5) for d in dtypes)
    for a, b in zip(single.parameters(), double.parameters()):
        assert torch.equal(a, b.float())


def test_gemma_norm_keeps_small_weights():
    norm = RMSNorm(64, tiny("gemma3_text")).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(2.0**-10)  # 1 + w is 1 in bfloat16
    x = torch.randn(8, 64, generator=seeded()).to(torch.bfloat16)
    wide = x.double() * (1 + 2.0**-10) / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert norm(x).equal(wide.float().to(torch.bfloat16))


def test_gemma_scales_by_a_rounded_root():
    model = model_of("gemma3_text", dtype=torch.bfloat16, hidden_size=3072, num_hidden_layers=1,
                     layer_types=(FULL,), intermediate_size=8)  # fmt: skip
    row = model.model.embed_tokens.weight[3]
    assert model.embed(torch.tensor([[3]]))[0, 0].equal(row * 55.5)  # 3072 ** 0.5 is 55.43


def test_every_token_of_the_vocabulary_and_none_at_all_are_taken():
    model, calls = model_of(), []
    tokens = torch.arange(53)[None]
    assert model(tokens.int()).equal(model(tokens))
    # Every layer runs without tokens, too: under FSDP the other ranks wait for its all-gather.
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *given: calls.append(given))
    assert model(tokens[:, :0]).shape == (1, 0, 53) and len(calls) == len(model.model.layers)
    assert model.logprobs(torch.randn(0, 24).double(), torch.zeros(0).long())[0].shape == (0,)
    # In mixed precision the residual is wider than the weights, and the last norm narrows it.
    model.float().residual_dtype = torch.float64
    assert model(tokens[:, :0]).dtype == torch.float32


def test_off_the_cpu_the_refusal_is_an_assertion_that_waits_for_nothing(monkeypatch):
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda *given: asserted.append(given))
    # The meta device stands for a GPU here: to look at one of its values is an error.
    require_tokens_in_vocabulary(torch.ones(2, 3, dtype=torch.long, device="meta"), 53)
    ((condition, message),) = asserted
    assert condition.shape == () and condition.dtype == torch.bool
    assert message == "a token id is outside of 0..52"
