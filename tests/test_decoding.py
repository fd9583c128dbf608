"""Generation: slots, turns and forks change no token, and the cache holds what it needs."""

import copy
import weakref

import pytest
import torch
from test_models import Watching
from test_ranks import ranks

import models
from models import (
    FULL, SLIDING, KVCache, Row, Transformer, forward_with_cache, generate, prefill, tiny_model,
)  # fmt: skip
from parallel import Grid, Plan, split_for_decoding

CASES = {
    **{name: (name, {}) for name in ("qwen2", "qwen3", "mistral", "gemma3_text", "qwen3_moe")},
    "o bias": ("qwen3", dict(o_bias=True, qkv_bias=True)),
    "softcap": ("gemma3_text", dict(final_logit_softcapping=1.5)),
    "sliding qwen": ("qwen2", dict(layer_types=(SLIDING, FULL), sliding_window=3)),
    "one key head": ("qwen3", dict(num_attention_heads=3, num_key_value_heads=1)),
}
STARTS = {
    "shared": [[1, 2, 3, 4, 5, 6, 7], [8], [1, 2, 3, 4, 5, 6, 7], [9, 10, 11], [8]],
    "distinct": [[1, 2, 3, 4, 5, 6, 7], [8], [1, 2, 3], [9, 10, 11], [8, 1]],
}
ENDS = tuple(range(1, 53, 3))  # a third of the vocabulary
NEW = 16


def model_of(name):
    model_type, changes = CASES[name]
    return tiny_model(model_type, seed=3, **changes)


class Talk(Row):
    """A conversation that forks at the end of its first turn, and ends with its third."""

    def __init__(self, prompt, draws, place=()):
        super().__init__(prompt, draws)
        self.place, self.turns = place, 0

    def reply(self):
        """Queue the next turn, and return whether there is one."""
        self.turns += 1
        self.queue.extend([5, 6, 7, 50][: len(self.tokens) % 5])
        return self.turns < 3

    def fork(self):
        if not self.reply():
            return []
        other = copy.deepcopy(self)
        other.draws = other.draws[::-1]
        self.place, other.place = (*self.place, 0), (*self.place, 1)
        return [self, other] if self.turns == 1 else [self]


def talks(starts="shared"):
    draws = torch.rand(5, NEW, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    rows = zip(STARTS[starts], draws.tolist(), strict=True)
    return [Talk(prompt, own, (n,)) for n, (prompt, own) in enumerate(rows)]


def require_same(rows, truth):
    def told(row):
        return row.tokens, row.mask, row.truncated, row.turns, row.new

    assert [told(row) for row in rows] == [told(row) for row in truth]
    for a, b in zip(rows, truth):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-12, rel=0)


@pytest.fixture
def caches(monkeypatch):
    """All caches that are fed one token a row, with the number of rows of each forward."""
    fed, forward = [], models.forward_with_cache

    def watched(model, cache, tokens, counts=None):
        logits = forward(model, cache, tokens, counts)
        if counts is None:
            fed.append((len(cache.lengths), max(x.shape[1] for x in cache.layers.values())))
        return logits

    monkeypatch.setattr(models, "forward_with_cache", watched)
    return fed


# Slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 0])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", CASES)
def test_slots_change_no_token_and_no_logprob(name, starts, temperature, caches):
    model = model_of(name)
    options = dict(max_new_tokens=NEW, temperature=temperature, end=ENDS)
    truth = generate(model, talks(starts), **options)
    assert len({row.new for row in truth}) > 1
    for row in truth:  # the log-probs are those of a forward of the whole row
        logp = (model(torch.tensor([row.tokens[:-1]]))[0] / (temperature or 1)).log_softmax(-1)
        logp = logp.gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0].detach()
        assert row.logprobs == pytest.approx((logp * torch.tensor(row.mask)).tolist(), abs=1e-12)
    for slots in (1, 2, 3):
        caches.clear()
        require_same(generate(model, talks(starts), slots=slots, **options), truth)
        assert all(rows <= stored <= slots for rows, stored in caches)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("name", CASES)
def test_forks_stay_within_the_slots_and_change_no_token(name, starts, temperature, caches):
    model, asked = model_of(name), []
    options = dict(max_new_tokens=NEW, temperature=temperature, end=ENDS, after=Talk.fork)
    options |= dict(ending=lambda rows: asked.append(len(rows)))
    truth = generate(model, talks(starts), **options)
    assert len(truth) > 5 and [row.place for row in truth] == sorted(row.place for row in truth)
    turns, asked[:] = sum(asked), []
    for slots in (2, 3, 5):
        caches.clear()
        branches = dict(slots=slots, branches=lambda row: 1 if row.turns else 2)
        require_same(generate(model, talks(starts), **options, **branches), truth)
        assert all(rows <= stored <= slots for rows, stored in caches)
        assert sum(asked) == turns and min(asked) > 0
        assert slots < 5 or max(asked) > 1  # one call for all rows that ended
        asked.clear()


@pytest.mark.quick
def test_all_forks_of_a_row_that_has_reached_the_limit_are_truncated():
    start, options = Talk([1], [0.5]), dict(max_new_tokens=1, end=range(53))
    rows = generate(model_of("qwen3"), [start], after=Talk.fork, **options)
    found = [(row.place, row.new, row.truncated) for row in rows]
    assert found == [((0,), 1, True), ((1,), 1, True)]


@pytest.mark.quick
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_waiting_rows_fill_slots_and_prompts_are_kept_while_rows_need_them(slots, monkeypatch):
    rows, computed, prompts, logits_after = talks(), [], [], []
    sample, begin, hidden = models.sample, KVCache.begin, Transformer.hidden

    # Before each token: slots are full if enough rows have not ended, there are keys of their
    # prompts alone, and no logits after a prompt are kept for rows that have all entered.
    def watched_sample(logits, *draws, **options):
        alive = [row for row in rows if not row.new or row.new < NEW and row.tokens[-1] not in ENDS]
        assert len(logits) == min(slots, len(alive))
        assert 0 < len(prompts[-1].lengths) <= len({row.tokens[0] for row in alive})
        assert len(alive) > slots or not any(storage() for storage in logits_after)
        return sample(logits, *draws, **options)

    def watched_prefill(*given):
        cache, logits = prefill(*given)
        logits_after.append(weakref.ref(logits.untyped_storage()))
        return cache, logits

    def watched_begin(self, other, rows, **options):
        prompts.extend([other] if options.get("share") else [])
        begin(self, other, rows, **options)

    def watched_hidden(self, tokens, **options):
        computed.extend(tokens[:, 0].tolist())
        return hidden(self, tokens, **options)

    monkeypatch.setattr(models, "sample", watched_sample)
    monkeypatch.setattr(models, "prefill", watched_prefill)
    monkeypatch.setattr(KVCache, "begin", watched_begin)
    monkeypatch.setattr(Transformer, "hidden", watched_hidden)
    generate(model_of("qwen3"), rows, max_new_tokens=NEW, end=ENDS, slots=slots)
    assert len(computed) == 3 + sum(row.new - 1 for row in rows)  # three prompts, then each token
    assert len(logits_after) == (3 if slots == 1 else 2)  # prompts that enter together in one call


# The cache's memory ------------------------------------------------------------------------------


def held(tensors):
    """Return the bytes of the tensors' storages."""
    storages = [x.untyped_storage() for x in tensors]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def most_held(cache, function):
    """Call function(), and return the most bytes at a time, as a multiple of the cache's stores.

    Counted are the stores and the results of operations that still exist.
    """
    results, worst = weakref.WeakValueDictionary(), []

    def look(_, out):
        found = out if isinstance(out, tuple | list) else (out,)
        results.update({id(x): x for x in found if isinstance(x, torch.Tensor)})
        stores = list(cache.layers.values())
        worst.append(held([*stores, *results.values()]) / held(stores))

    with Watching(look):
        function()
    return max(worst)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_cache_never_holds_a_second_copy_of_itself(name):
    changes = dict(num_hidden_layers=16)
    if name == "mistral":
        changes |= dict(layer_types=(SLIDING,) * 16, sliding_window=250)
    model = tiny_model(name, **changes)
    cache, _ = prefill(model, [[5] * (200 - n) for n in range(8)])

    def grow_and_shrink():
        forward_with_cache(model, cache, torch.ones(8, 1).long())  # the stores grow
        for rows in range(7, 0, -1):
            cache.select([*range(1, rows + 1)])  # the worst order: all rows change places
            forward_with_cache(model, cache, torch.ones(rows, 1).long())

    assert 1.05 < most_held(cache, grow_and_shrink) <= 1.15  # one layer of 16 at a time
    cache, _ = prefill(model, [[5] * 100] * 8)
    order = [0, 1, 7, 3, 4, 5, 6]
    assert most_held(cache, lambda: cache.select(order)) <= 1.01  # only the row that moves


# Turns, queues, weights --------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [0.7, 0])
@pytest.mark.parametrize("name", CASES)
def test_the_core_generates_the_same_rows(name, temperature):
    model, options = model_of(name), dict(max_new_tokens=NEW, temperature=temperature, end=ENDS)
    rows, truth = talks(), talks()
    for row in (rows[1], truth[1]):
        row.queue.extend([4, 2])  # tokens that nobody sampled end no turn
    models.simple_generate(model, truth, **options, after=Talk.reply)
    generate(model, rows, **options, slots=2, after=lambda row: [row] if row.reply() else [])
    require_same(rows, truth)


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
    with pytest.raises(ValueError, match=rf"token id {token} at row 0, column 0 .* ids are 0..52"):
        generate(model_of("qwen3"), [row], max_new_tokens=9, seed=0, end=every, after=after)


# Python and the device ---------------------------------------------------------------------------

WAITING = (
    torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal,
    torch.ops.aten.unique_dim, torch.ops.aten._unique2,
)  # fmt: skip


def waits(function):
    """How often Python asks the device for a number while the function runs."""
    asked, tolist = [], torch.Tensor.tolist

    def counted(x):
        asked.append("tolist")
        return tolist(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", counted)
        with Watching(lambda operation, _: asked.extend([operation] * (operation in WAITING))):
            function()
    return len(asked)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "sliding qwen"])
def test_python_waits_only_for_the_tokens_and_their_logprobs(name, monkeypatch):
    # As on a GPU, where the device checks the ids.
    monkeypatch.setattr(models, "require_tokens_in_vocabulary", lambda *args, **how: None)
    model, draws = model_of(name), [0.5] * 33
    for slots, forwards in (None, 33), (2, 66):
        rows = [Row(prompt, draws) for prompt in ([1, 2, 3, 4, 5], [6], [1, 2, 3, 4, 5])]
        options = dict(max_new_tokens=33, slots=slots)
        assert waits(lambda: generate(model, rows, **options)) == 2 * forwards  # noqa: B023


def _talks_of_a_plan(rank, plan):
    """Conversations in three slots, on this rank."""
    model = model_of("gemma3_text").requires_grad_(False)
    if plan:
        grid = Grid.make(Plan.parse(plan))
        split_for_decoding(model, grid.plan, device_mesh=grid)
    options = dict(slots=3, branches=lambda row: 1 if row.turns else 2, after=Talk.fork)
    return generate(model, talks(), max_new_tokens=NEW, end=ENDS, **options)


def test_a_generator_split_by_t_forks_alike(tmp_path):
    truth = _talks_of_a_plan(0, "")
    for rows in ranks(tmp_path, 2, _talks_of_a_plan, "t2"):
        require_same(rows, truth)
