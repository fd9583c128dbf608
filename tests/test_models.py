"""models.py against its definition, against plain torch and against Hugging Face."""

import json

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import models
from models import (
    KVCache, ModelConfig, Row, Transformer, extend, generate, load_hf, packed_attention,
    packed_logprobs, packed_positions, sample, save_hf, tiny, token_logprobs,
)  # fmt: skip

DOCUMENTS = (7, 1, 6, 12, 2)


def model_of(model_type="qwen3", dtype=torch.float64, **changes):
    model = Transformer(tiny(model_type, **changes)).to(dtype).init_weights(3)
    generator = torch.Generator().manual_seed(4)
    for p in model.parameters():  # norms and biases away from 1 and 0
        p.data += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
    return model


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


@pytest.mark.quick
def test_check_passes():
    assert models.check()


FAULTS = {
    "rotate": lambda x, cos, sin: torch.cat([x.chunk(2, -1)[0] * cos, x.chunk(2, -1)[1] * cos], -1),
    "packed_positions": lambda lengths: torch.arange(sum(lengths))[None] * 2,
    "packed_attention": lambda lengths: packed_attention([sum(lengths[:2]), *lengths[2:]]),
    "causal_attention": lambda *qkv, layer, scale, **_: ATTEND(
        *qkv, is_causal=True, scale=1.1 * scale, enable_gqa=True),
}  # fmt: skip
ATTEND = models.F.scaled_dot_product_attention


@pytest.mark.quick
@pytest.mark.parametrize("name", FAULTS)
def test_check_fails_with_a_planted_fault(name, monkeypatch):
    monkeypatch.setattr(models, name, FAULTS[name])
    assert not models.check()


@pytest.mark.quick
def test_check_fails_if_the_cache_forgets_lengths(monkeypatch):
    monkeypatch.setattr(KVCache, "advance", lambda self, counts: self._set_lengths(
        self.lengths_B + counts.max()))  # fmt: skip
    assert not models.check()


@pytest.mark.quick
def test_check_fails_if_the_cache_forgets_its_mask(monkeypatch):
    monkeypatch.setattr(models.F, "scaled_dot_product_attention",
                        lambda *qkv, attn_mask=None, **kw: ATTEND(*qkv, **kw))  # fmt: skip
    assert not models.check()


# Packed documents ------------------------------------------------------------------------------


def packed_gradient(model, parts, waste=1.25):
    lengths = [len(d) for d in parts]
    logits = model(torch.cat(parts)[None], positions=packed_positions(lengths),
                   attention=packed_attention(lengths, waste=waste))  # fmt: skip
    weights = torch.cat([torch.sin(d[:, None].double() + torch.arange(53)) for d in parts])
    (logits[0] * weights).sum().backward()
    return gradients(model)


def separate_gradient(model, parts):
    for d in parts:
        (model(d[None])[0] * torch.sin(d[:, None].double() + torch.arange(53))).sum().backward()
    return gradients(model)


@pytest.mark.quick
@pytest.mark.parametrize("waste", [1.0, 1.25, 100.0])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_packed_documents_give_the_gradients_of_separate_documents(model_type, waste):
    model, parts = model_of(model_type), documents()
    assert worst(packed_gradient(model, parts, waste), separate_gradient(model, parts)) < 1e-12


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
    waste = 1 + 2 * torch.rand((), generator=generator).item()
    model, parts = model_of(), documents(seed, lengths)
    logits = model(torch.cat(parts)[None], positions=packed_positions(lengths),
                   attention=packed_attention(lengths, waste=waste))  # fmt: skip
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


@pytest.mark.quick
def test_packed_logprobs_score_exactly_the_masked_targets():
    model, parts = model_of(), documents()
    mask = torch.zeros(len(parts), max(DOCUMENTS) - 1, dtype=torch.bool)
    for b, d in enumerate(parts):
        mask[b, : len(d) - 1] = torch.arange(len(d) - 1) % 2 == 0
    logprobs, entropy = packed_logprobs(model, [d.tolist() for d in parts], mask, temperature=0.9)
    for b, d in enumerate(parts):
        logp = (model(d[None])[0, :-1] / 0.9).log_softmax(-1)
        keep = mask[b, : len(d) - 1]
        truth = torch.where(keep, logp.gather(-1, d[1:, None])[:, 0], 0)
        assert torch.allclose(logprobs[b, : len(keep)], truth, atol=1e-12, rtol=0)
        truth = torch.where(keep, -(logp.exp() * logp).sum(-1), 0)
        assert torch.allclose(entropy[b, : len(keep)], truth, atol=1e-12, rtol=0)
    assert not logprobs[~mask].any() and not entropy[~mask].any()


# The cache and the decoder ---------------------------------------------------------------------


@pytest.mark.quick
def test_chunks_on_ragged_rows_equal_the_full_forward():
    model, parts = model_of(), documents(lengths=(80, 50, 3))
    cache, at, got = KVCache(3), [0, 0, 0], [[], [], []]
    for counts in ([5, 1, 2], [7, 9, 1], [60, 3, 0 + 1], [8, 37, 1]):
        counts = [min(c, len(d) - a) for c, d, a in zip(counts, parts, at)]
        chunk = [d[a : a + c] for d, a, c in zip(parts, at, counts)]
        feed = [c if len(c) else torch.zeros(1, dtype=torch.long) for c in chunk]
        tokens = torch.nn.utils.rnn.pad_sequence(feed, batch_first=True)
        logits = extend(model, cache, tokens, torch.tensor(counts))
        for b in range(3):
            at[b] += counts[b]
            got[b].append((at[b], logits[b]) if counts[b] else None)
    for b, d in enumerate(parts):
        truth = model(d[None])[0]
        for position, logits in filter(None, got[b]):
            assert relative(logits.detach(), truth[position - 1].detach()) < 1e-12


@pytest.mark.quick
def test_selected_rows_go_on_as_if_they_had_always_been_there():
    model, parts = model_of(), documents(lengths=(9, 9, 9))
    cache = KVCache(3)
    extend(model, cache, torch.stack([d[:6] for d in parts]))
    order = [2, 0, 2, 2]  # dropped, reordered, repeated
    cache.select(order)
    logits = extend(model, cache, torch.stack([parts[b][6:] for b in order]))
    for b, row in zip(order, logits):
        assert relative(row, model(parts[b][None])[0, -1].detach()) < 1e-12


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(5))
def test_any_series_of_chunks_and_selections_equals_the_full_forward(seed):
    model, generator = model_of(("qwen2", "qwen3")[seed % 2]), torch.Generator().manual_seed(seed)
    cache, rows = KVCache(3), [[], [], []]
    for _ in range(7):  # to about 70 tokens, beyond the first capacity of at most 49
        counts = torch.randint(1, 18, (len(rows),), generator=generator)
        tokens = torch.randint(53, (len(rows), int(counts.max())), generator=generator)
        logits = extend(model, cache, tokens, counts)
        rows = [row + t[:c].tolist() for row, t, c in zip(rows, tokens, counts)]
        for row, got in zip(rows, logits):
            assert relative(got, model(torch.tensor([row]))[0, -1].detach()) < 1e-12
        keep = torch.randint(len(rows), (3,), generator=generator).tolist()
        cache.select(keep)  # repeats, drops, reorders rows of unequal lengths
        rows = [rows[b] for b in keep]
    assert max(map(len, rows)) > 49 and cache.lengths_B.tolist() == [len(row) for row in rows]


@pytest.mark.quick
def test_a_row_does_not_depend_on_its_batch():
    model, draws = model_of(), np.random.default_rng(0).random((3, 12))
    prompts = [3, 4, 5], [7], [1, 2]

    def rows():
        return [Row(p, d) for p, d in zip(prompts, draws)]

    together = rows()
    generate(model, together, max_new_tokens=12, temperature=1.0)
    for alone, row in zip(rows(), together):
        generate(model, [alone], max_new_tokens=12, temperature=1.0)
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
    assert torch.allclose(logprobs, p.log()[tokens])
    edge = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sample(p.log().expand(2, -1), edge, temperature=1.0)[0].tolist() == [1, 4]
    tokens, logprobs = sample(p.log().expand(2000, -1), uniform, temperature=0.5)
    expected = 2000 * 0.4225 / (0.4225 + 0.0725)
    assert torch.bincount(tokens)[4].item() == pytest.approx(expected, abs=1)


@pytest.mark.quick
def test_tokens_of_a_long_tail_are_drawn_at_their_own_uniforms():
    # 150 thousand tails of 1.5e-8: float32 near 1 has steps of 6e-8, so it cannot tell them apart
    logits = torch.full((150_000,), -18.0)
    logits[0] = 0
    cdf = logits.double().softmax(0).cumsum(0)
    tokens = torch.tensor([1, 2, 777, 74_999, 75_000, 120_001, 149_998, 149_999])
    middle = (cdf[tokens - 1] + cdf[tokens]) / 2
    assert sample(logits.expand(8, -1), middle, temperature=1.0)[0].equal(tokens)


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
    assert torch.allclose(logprobs, logits.log_softmax(-1).max(-1).values)


# Precision -------------------------------------------------------------------------------------


@pytest.mark.quick
def test_rms_norm_accumulates_in_float32():
    norm = models.RMSNorm(4096, 1e-6).to(torch.bfloat16)
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
    cos, _ = models.rope_angles(positions, head_dim=8, theta=1e4, dtype=torch.bfloat16)
    exact = torch.cos(positions.double()[..., None] * 1e4 ** -(torch.arange(0, 8, 2).double() / 8))
    assert cos.dtype == torch.float32
    # float32 angles of size 1e5 are exact to 1e5 * 2^-24 = 6e-3; bfloat16 ones would be random
    assert (cos[:, 0] - exact).abs().max() < 1e-2


@pytest.mark.quick
def test_bf16_model_rotates_by_float32_angles_of_exact_positions(monkeypatch):
    seen, rotate = [], models.rotate
    monkeypatch.setattr(models, "rotate", lambda x, *angles: (
        seen.append(angles[0]), rotate(x, *angles))[1])  # fmt: skip
    model, positions = model_of(dtype=torch.bfloat16), torch.tensor([[257, 100_003]])
    model(torch.tensor([[1, 2]]), positions=positions)
    angle = positions.double()[..., None] * 1e4 ** -(torch.arange(0, 10, 2).double() / 10)
    assert len(seen) == 4 and all(cos.dtype == torch.float32 for cos in seen)  # q, k of 2 layers
    assert all((cos[:, 0] - angle.cos()).abs().max() < 1e-2 for cos in seen)


@pytest.mark.quick
def test_weights_are_the_same_draw_in_every_dtype():
    dtypes = torch.float32, torch.float64
    single, double = (Transformer(tiny()).to(d).init_weights(5) for d in dtypes)
    for a, b in zip(single.parameters(), double.parameters()):
        assert torch.equal(a, b.float())


# Hugging Face ----------------------------------------------------------------------------------

CASES = {
    "qwen3": dict(model_type="qwen3", head_dim=12, rms_norm_eps=1e-4, num_key_value_heads=1),
    "qwen3 tied": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True, rope_theta=5e5),
    "qwen3 bias": dict(model_type="qwen3", head_dim=10, attention_bias=True),
    "qwen2": dict(model_type="qwen2", rope_theta=1e6, rms_norm_eps=1e-5),
    "qwen2 tied": dict(model_type="qwen2", tie_word_embeddings=True, num_key_value_heads=4),
}


@pytest.fixture
def hf(tmp_path):
    transformers = pytest.importorskip("transformers", reason="see tests/requirements.txt")

    def make(case, **save):
        shape = dict(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        )  # fmt: skip
        raw = shape | CASES[case]
        theta = raw.pop("rope_theta", 1e4)
        raw["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32)
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
        model.save_pretrained(tmp_path / "hf", **save)
        return model.eval(), tmp_path / "hf"

    return make


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(hf, case):
    theirs, directory = hf(case)
    ours, generator = load_hf(directory), torch.Generator().manual_seed(1)
    tokens = torch.randint(61, (2, 20), generator=generator)
    upstream = torch.randn(2, 20, 61, generator=torch.Generator().manual_seed(2))
    a, b = ours(tokens), theirs(tokens).logits
    assert (a - b).abs().max() < 1e-5 * b.abs().max()
    (a * upstream).sum().backward()
    (b * upstream).sum().backward()
    known = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        assert relative(p.grad, known[name].grad) < 1e-5, name


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_through_our_format_is_bit_identical(hf, case, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs, directory = hf(case, max_shard_size="20KB")
    assert (directory / "model.safetensors.index.json").exists()  # sharded
    save_hf(load_hf(directory), tmp_path / "ours")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    tokens = torch.arange(12)[None]
    pairs = zip(theirs.parameters(), back.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(theirs(tokens).logits, back(tokens).logits)


@pytest.mark.parametrize("case", CASES)
def test_greedy_decoding_equals_transformers(hf, case):
    theirs, directory = hf(case)
    prompt = list(range(5, 12))
    (row,) = generate(load_hf(directory), [Row(prompt)], max_new_tokens=24, temperature=0)
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    truth = theirs.generate(torch.tensor([prompt]), **options)
    assert row.tokens == truth[0].tolist()


RAW = dict(
    model_type="qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=12,
)  # fmt: skip


@pytest.mark.quick
def test_both_spellings_of_a_config_are_read():
    old = RAW | {"rope_theta": 7e5, "rope_scaling": None, "torch_dtype": "float32"}
    new = RAW | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "dtype": "float32"}
    old, new = ModelConfig.from_hf(old), ModelConfig.from_hf(new)
    assert old == new and old.rope_theta == 7e5 and old.max_position_embeddings == 32768
    assert ModelConfig.from_hf(RAW | {"model_type": "qwen2", "head_dim": None}).head_dim == 8
    assert ModelConfig.from_hf(RAW | {"eos_token_id": [3, 4]}).eos_token_id == (3, 4)


@pytest.mark.quick
@pytest.mark.parametrize("field, named", [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),  # an older spelling
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "linear"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding"),
    ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "yarn"}}, "yarn"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "per layer type"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"rms_norm_eps": None}, "rms_norm_eps"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"hidden_act": "gelu"}, "gelu"), ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"quantization_config": {}}, "quantization_config"), ({"model_type": "llama"}, "llama"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"), ({"head_dim": 7}, "head_dim"),
])  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(field, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf(RAW | field)


def spoil_header(path, edit):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = edit(json.loads(data[8 : 8 + size]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def rename(header):
    return {k.replace("o_proj", "p_proj"): v for k, v in header.items()}


def reshape(header):
    tensor = header["model.norm.weight"]
    return header | {"model.norm.weight": tensor | {"shape": [2, tensor["shape"][0] // 2]}}


def rewrite(path, edit):
    from safetensors.torch import load_file, save_file

    save_file(edit(load_file(path)), path)


DAMAGE = {
    r"missing tensors \['model.norm.weight'\], unexpected tensors \[\]": lambda f: rewrite(
        f, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}),
    r"missing tensors \[\], unexpected tensors \['extra.weight'\]": lambda f: rewrite(
        f, lambda t: t | {"extra.weight": torch.ones(2)}),
    r"model.safetensors is truncated": lambda f: f.write_bytes(f.read_bytes()[:-7]),
    r"or no safetensors file: .*header":
        lambda f: f.write_bytes(b"\x10" + bytes(7) + b"not json at all!" + f.read_bytes()),
    "missing tensors": lambda f: spoil_header(f, rename),
    "model.norm.weight has shape": lambda f: spoil_header(f, reshape),
    "no safetensors file: .*offset": lambda f: spoil_header(f, lambda h: h | {
        "model.norm.weight": h["model.norm.weight"] | {"data_offsets": [0, 8]}}),
    "no safetensors file": lambda f: spoil_header(f, lambda h: [1]),
    "no model.safetensors": lambda f: f.unlink(),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("complaint", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_half_loaded(tmp_path, complaint):
    pytest.importorskip("safetensors", reason="tests/requirements.txt is not installed")
    save_hf(model_of(dtype=torch.float32), tmp_path)
    DAMAGE[complaint](tmp_path / "model.safetensors")
    model = Transformer(tiny()).init_weights(9)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=complaint):
        load_hf(tmp_path, model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.quick
def test_a_missing_shard_is_named(tmp_path):
    save = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(save))
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        load_hf(tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("call, complaint", [
    (lambda m: m(torch.arange(4)), r"tokens must be \(B, S\)"),
    (lambda m: m.logprobs(torch.ones(2, 24), torch.ones(3).long()), r"targets \(N,\)"),
    (lambda m: m.logprobs(torch.ones(2, 24), torch.ones(2).long(), temperature=0), "temperature"),
    (lambda m: generate(m, [Row([53])], max_new_tokens=1, temperature=0), "all of 0..52"),
    (lambda m: generate(m, [Row([])], max_new_tokens=1, temperature=0), "a prompt needs tokens"),
    (lambda m: generate(m, [Row([1])], max_new_tokens=0, temperature=0), "max_new_tokens"),
    (lambda m: generate(m, [Row([1], [0.5])], max_new_tokens=2, temperature=1.0), "needs 2 draws"),
    (lambda m: packed_logprobs(m, [[1, 2], [1, 2, 3]], torch.ones(2, 2).bool()), "beyond a sequence"),
    (lambda m: sample(torch.zeros(1, 3), torch.ones(1), temperature=1.0), "float64"),
    (lambda m: generate(m, [Row([1])], max_new_tokens=10**6, temperature=0), "32768 positions"),
])  # fmt: skip
def test_a_callers_mistake_is_named(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call(model_of(dtype=torch.float32))


@pytest.mark.quick
def test_documents_of_one_length_need_no_gather_and_no_other_result():
    model, parts = model_of(), documents(lengths=(6, 6, 6))
    assert worst(packed_gradient(model, parts), separate_gradient(model, parts)) < 1e-12


@pytest.mark.quick
def test_a_second_bad_shard_leaves_the_model_untouched(tmp_path):
    pytest.importorskip("safetensors", reason="tests/requirements.txt is not installed")
    from safetensors.torch import load_file, save_file

    save_hf(model_of(dtype=torch.float32), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_hf(tmp_path)
    model = Transformer(tiny()).init_weights(9)
    before = [p.clone() for p in model.parameters()]
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match="b.safetensors is truncated"):
        load_hf(tmp_path, model=model)
    save_file({n: tensors[n] for n in names[5:]} | {"extra": torch.ones(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="its shards disagree about extra"):
        load_hf(tmp_path, model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.quick
def test_a_model_of_another_configuration_is_not_filled(tmp_path):
    pytest.importorskip("safetensors", reason="tests/requirements.txt is not installed")
    save_hf(model_of(dtype=torch.float32), tmp_path)
    with pytest.raises(ValueError, match="rope_theta"):
        load_hf(tmp_path, model=Transformer(tiny(rope_theta=5e5)))
    with pytest.raises(ValueError, match="not both"):
        load_hf(tmp_path, model=Transformer(tiny()), dtype=torch.float64)
    with pytest.raises(ValueError, match="one attention_bias"):
        save_hf(Transformer(tiny(qkv_bias=True)), tmp_path)
