"""Generation: slots, turns and forks change no token, and the cache holds what it needs."""

import copy

import pytest
import torch
from conftest import diagonal
from oracles import LiveBytes, Watch, bytes_of

import models
from full.learn.generate import Turns, decode, generate
from full.model.cache import KVCache, forward_with_cache, prefill
from full.tiny import tiny_model
from models import FULL, SLIDING, Row

CASES = {
    **{name: (name, {}) for name in ("qwen2", "qwen3", "mistral", "gemma3_text", "qwen3_moe")},
    "o bias": ("qwen3", dict(o_bias=True, qkv_bias=True)),
    "sliding qwen": ("qwen2", dict(layer_types=(SLIDING, FULL), sliding_window=3)),
    "one key head": ("qwen3", dict(num_attention_heads=3, num_key_value_heads=1)),
}
HYBRID = {"hybrid": ("qwen3_5_text", {})}  # the core's cache has no states
STARTS = {
    "shared": [[1, 2, 3, 4, 5, 6, 7], [8], [1, 2, 3, 4, 5, 6, 7], [9, 10, 11], [8]],
    "distinct": [[1, 2, 3, 4, 5, 6, 7], [8], [1, 2, 3], [9, 10, 11], [8, 1]],
}
ENDS = tuple(range(1, 53, 3))  # a third of the vocabulary
NEW = 16


def model_of(name):
    model_type, changes = (CASES | HYBRID)[name]
    return tiny_model(model_type, seed=3, **changes)


class Talk(Row):
    """A conversation that forks at the end of its first turn, and has at most three."""

    def __init__(self, prompt, draws, place=(0,)):
        super().__init__(prompt, draws)
        self.place, self.turns = place, 0

    def reply(self):
        """Queue the next turn, and return whether there is one."""
        self.turns += 1
        self.queue.extend([5, 6, 7, 50][: len(self.tokens) % 5])
        return self.turns < 3 - self.place[0] % 3

    def fork(self):
        if not self.reply():
            return []
        other = copy.deepcopy(self)
        other.draws = other.draws[::-1]
        self.place, other.place = (*self.place, 0), (*self.place, 1)
        return [self, other] if self.turns == 1 else [self]


class ForkingTalk(Talk):
    """A `Talk` that reserves the slots for its forks."""

    @property
    def count(self):
        return 1 if self.turns else 2


def talks(starts="shared", kind=Talk):
    draws = torch.rand(5, NEW, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rows = zip(STARTS[starts], draws.tolist(), strict=True)
    rows = [kind(prompt, own, (n,)) for n, (prompt, own) in enumerate(rows)]
    rows[1].queue.extend([4, 2])  # tokens that nobody sampled end no turn
    return rows


def require_same(rows, truth):
    def told(row):
        return row.tokens, row.mask, row.truncated, row.turns, row.new

    assert [told(row) for row in rows] == [told(row) for row in truth]
    for a, b in zip(rows, truth):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-12, rel=0)


@pytest.fixture
def caches(monkeypatch):
    """All caches that are fed one token a row, with the number of rows of each forward."""
    fed, forward = [], forward_with_cache

    def watched(model, cache, tokens, counts=None):
        logits = forward(model, cache, tokens, counts)
        if counts is None:
            fed.append((len(cache.lengths), max(x.shape[1] for x in cache.layers.values())))
        return logits

    monkeypatch.setattr("full.learn.generate.forward_with_cache", watched)
    return fed


@pytest.mark.parametrize(
    "name, starts, temperature", diagonal([*CASES, *HYBRID], [*STARTS], [1.0, 0.7, 0]))
def test_forks_stay_within_the_slots_and_change_no_token(name, starts, temperature, caches):
    model, asked = model_of(name), []

    def decoded(slots=None):
        turns = Turns(NEW, lambda rows: asked.append(len(rows)), Talk.fork)
        how = dict(temperature=temperature, end=ENDS, slots=slots)
        return decode(model, talks(starts, ForkingTalk), turns, **how)

    truth = decoded()
    assert len(truth) > 5 and [row.place for row in truth] == sorted(row.place for row in truth)
    for row in truth:  # the log-probs of the sampled tokens by a forward of the whole row
        logp = (model(torch.tensor([row.tokens[:-1]]))[0] / (temperature or 1)).log_softmax(-1)
        logp = logp.gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0].detach()
        assert row.logprobs == pytest.approx((logp * torch.tensor(row.mask)).tolist(), abs=1e-12)
    turns, asked[:] = sum(asked), []
    for slots in (2, 3, 5):
        caches.clear()
        found = decoded(slots)
        require_same(found, truth)
        assert all(rows <= stored <= slots for rows, stored in caches)
        assert sum(asked) == turns and min(asked) > 0
        assert slots < 5 or max(asked) > 1  # one call for all rows that ended
        asked.clear()


@pytest.mark.quick
def test_all_forks_of_a_row_that_has_reached_the_limit_are_truncated():
    start, options = Talk([1], [0.5]), dict(max_new_tokens=1, end=range(53))
    rows = generate(model_of("qwen3"), [start], after=Talk.fork, **options)
    found = [(row.place, row.new, row.truncated) for row in rows]
    assert found == [((0, 0), 1, True), ((0, 1), 1, True)]


@pytest.mark.quick
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_waiting_rows_fill_slots_and_prompts_are_kept_while_rows_need_them(slots, monkeypatch):
    model, rows, computed, prompts = model_of("qwen3"), talks(), [], []
    rows[1].queue.clear()
    sample, share_prompts = models.sample, KVCache.share_prompts
    model.model.embed_tokens.register_forward_hook(
        lambda _, given, out: computed.append(len(given[0])))  # fmt: skip

    # Before each token: slots are full if enough rows have not ended, and there are keys of their
    # prompts alone.
    def watched_sample(logits, *draws, **options):
        alive = [row for row in rows if not row.new or row.new < NEW and row.tokens[-1] not in ENDS]
        assert len(logits) == min(slots, len(alive))
        assert 0 < len(prompts[-1].lengths) <= len({row.tokens[0] for row in alive})
        return sample(logits, *draws, **options)

    def watched_share(self, source, rows):
        prompts.append(source)
        share_prompts(self, source, rows)

    monkeypatch.setattr("models.sample", watched_sample)
    monkeypatch.setattr(KVCache, "share_prompts", watched_share)
    generate(model, rows, max_new_tokens=NEW, end=ENDS, slots=slots)
    assert sum(computed) == 3 + sum(row.new - 1 for row in rows)  # three prompts, then each token
    assert computed[0] == min(slots, 2)  # prompts that enter together are computed together


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_cache_never_holds_a_second_copy_of_itself(name):
    """Of 16 layers, one at a time, and of that the rows that change places."""
    changes = dict(num_hidden_layers=16)
    if name == "mistral":
        changes |= dict(layer_types=(SLIDING,) * 16, sliding_window=250)
    cache, _ = prefill(tiny_model(name, **changes), [[5] * 200] * 8)
    stored = bytes_of(cache.layers.values())
    for rows, most in ([1, 2, 3, 4, 5, 6, 7, 0], 1 / 15), ([0, 1, 7, 3, 4, 5, 6], 1 / 100):
        with LiveBytes() as live:
            cache.select(rows)
        assert 0 < live.peak <= most * stored


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "sliding qwen"])
@pytest.mark.parametrize("slots, forwards", [(None, 33), (2, 66)])
def test_python_waits_only_for_the_tokens_and_their_logprobs(name, slots, forwards, monkeypatch):
    # As on a GPU, where the device checks the ids.
    skipped = "full.model.logprobs.require_tokens_in_vocabulary"
    monkeypatch.setattr(skipped, lambda *args, **how: None)
    asked, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: asked.append(x) or tolist(x))
    rows = [Row(prompt, [0.5] * 33) for prompt in ([1, 2, 3, 4, 5], [6], [1, 2, 3, 4, 5])]
    model = model_of(name)
    with Watch() as watch:
        generate(model, rows, max_new_tokens=33, slots=slots)
    waiting = {"_local_scalar_dense", "nonzero", "equal", "unique_dim", "_unique2"}
    assert len(asked) + sum(name in waiting for name, *_ in watch.ran) == 2 * forwards
