"""Decode rows that enter and leave: limited slots, forks, turns of a conversation.

A prompt that several rows share is computed once. Rows without draws get draws from a seed.
`models.generate` does the same without all this.
"""

import math
from collections import Counter, deque

import torch

import models
from full.model.cache import cache_of, forward_with_cache, prefill


def generate(
    model, rows, /, *, max_new_tokens, temperature=1.0, end=(), after=None, seed=None, slots=None
):
    """Decode rows (prompts of any lengths) until each has ended. Return them, in their order.

    rows: `Row`s, or lists of token ids, which become Rows.
    max_new_tokens: a row with this many tokens after its prompt ends, with `truncated` set.
    temperature, end, slots: as in `decode`.
    after: after(row) -> the rows that continue in its place. None, the default, ends it. The row
        itself, with tokens in its queue, is the next turn of a conversation; several are a fork.
        With `after`, forks are returned in the place of their row.
    seed: of the draws for rows that have none. ValueError if such a row gets no seed.
    """
    rows = [row if isinstance(row, models.Row) else models.Row(row) for row in rows]
    if seed is not None and temperature > 0:
        # Draw for every row, also for one that has draws: the draws of a row then depend on its
        # place only, not on the other rows.
        generator = torch.Generator().manual_seed(seed)
        for row in rows:
            draws = torch.rand(max_new_tokens, generator=generator, dtype=torch.float64).tolist()
            row.draws = row.draws if len(row.draws) else draws
    turns = Turns(max_new_tokens, after=after)
    return decode(model, rows, turns, temperature=temperature, end=end, slots=slots)


@torch.inference_mode()
def decode(model, rows, turns, /, *, temperature=1.0, end=(), slots=None):
    """Decode `Row`s until each has ended. Return them, in their order.

    rows: with a draw for each new token. A row that may fork has `count`, the number of rows that
        it may become. It reserves as many slots, so that a fork never waits. A row that needs more
        slots than there are enters when all others have ended.
    turns: Turns. It decides which rows follow a row's turn.
    temperature: as in `sample`. 0 is greedy and needs no draws.
    end: the stop tokens. A sampled one ends a turn.
    slots: how many rows are decoded at a time. When a row ends, a waiting row takes its slot.
        Default: all.
    """
    new = turns.limit
    if new < 1 or not 0 <= temperature < math.inf:
        raise ValueError(f"max_new_tokens, temperature: expected at least 1, and finite and not "
                         f"negative, got {new} and {temperature}")  # fmt: skip
    if slots is not None and slots < 1:
        raise ValueError(f"slots: expected at least 1, got {slots}")
    if temperature > 0 and any(len(row.draws) < new for row in rows):
        raise ValueError(f"each row needs {new} draws, one for each new token, or give a seed")
    longest = max([len(row.tokens) for row in rows], default=0)
    positions = model.config.max_position_embeddings
    if longest + new > positions:
        raise ValueError(f"a prompt of {longest} tokens and max_new_tokens {new} exceed the "
                         f"model's {positions} positions; shorten one of them")  # fmt: skip

    def reserved(row):
        return getattr(row, "count", 1)

    batch = DecodingBatch(model, rows, min(slots or math.inf, sum(map(reserved, rows))))
    waiting = deque(((n,), row) for n, row in enumerate(rows))
    while waiting or batch.rows:
        # Rows enter in their order. All ranks that decode the same rows admit the same ones.
        entering = []
        taken = sum(reserved(row) for _, row in batch.rows)
        while waiting and (not taken or taken + reserved(waiting[0][1]) <= (slots or math.inf)):
            taken += reserved(waiting[0][1])
            entering.append(waiting.popleft())
        if entering:
            batch.admit(entering)

        # Each row takes its token, sampled or queued. A fork of it is a copy of its row of the
        # cache, and takes a free slot if there is one.
        slots_of_batch = []  # (row of the cache to continue from, place, row), or None: a free slot
        forks = []
        ended = batch.sample_tokens(temperature, end)
        for b, followers in enumerate(turns.followers(batch.rows, ended)):
            first, *others = [(b, place, row) for place, row in followers] or [None]
            slots_of_batch.append(first)
            forks += others
        batch.keep_and_feed(without_holes(slots_of_batch + forks))
    return turns.rows()


class Turns:
    """Decide which rows follow the turn of a row: the row itself, its forks, or none.

    max_new_tokens, after: as in `generate`.
    ending: ending(rows), called with all rows whose turn a token has ended, before `after` is
        called with each. So a task that is on another rank is asked once for all of them.

    A row's place among all rows is its number, and after each turn also the number of the fork:
    after two turns row 3 has the places (3, 0, 0) .., in which the rows are returned.
    """

    def __init__(self, max_new_tokens, ending=None, after=None):
        self.limit = max_new_tokens
        self.ending = ending
        self.after = after
        self.done = []  # (place, row)

    def followers(self, entries, ended):
        """Yield for each (place, row) a list of the (place, row) that continue in its place.

        entries: list of (place, row), after each has got a token.
        ended: for each whether this token has ended a turn.
        """
        rows_at_end = [row for (_, row), has_ended in zip(entries, ended) if has_ended]
        if self.ending and rows_at_end:
            self.ending(rows_at_end)
        for (place, row), has_ended in zip(entries, ended, strict=True):
            followers = [(place, row)]
            if has_ended:
                forks = self.after(row) if self.after else []
                followers = [((*place, n), fork) for n, fork in enumerate(forks)]
                self.done += [] if forks else [(place, row)]
            # A row without tokens left ends, and so does a fork that has just begun.
            for _, follower in followers:
                follower.truncated = follower.new >= self.limit
            self.done += [entry for entry in followers if entry[1].truncated]
            yield [entry for entry in followers if not entry[1].truncated]

    def rows(self) -> list:
        """Return the rows that have ended, in the order of their places."""
        return [row for _, row in sorted(self.done, key=lambda entry: entry[0])]


class DecodingBatch:
    """The rows that `decode` decodes together, their cache, and the logits after each row.

    The keys of a prompt that several rows share are computed and kept once, from when the first of
    these rows enters until the last one has ended.
    """

    def __init__(self, model, rows, capacity):
        number = {}  # prompt -> its number
        self.prompt_of_row = [number.setdefault(tuple(row.tokens), len(number)) for row in rows]
        self.tokens = [*number]  # of each prompt
        self.waiting = Counter(self.prompt_of_row)  # prompt -> rows that have not entered yet
        self.shares = len(number) < len(rows)
        self.model = model
        self.device = model.head_weight.device
        self.rows = []  # (place, row), in the order of the cache's rows
        make_cache = cache_of(model)
        self.cache = make_cache(device=self.device, capacity=capacity)
        self.prompts = make_cache(device=self.device)  # the cache of shared prompts
        self.cached_prompts = []  # the number of each row of self.prompts
        self.prompt_logits = {}  # prompt -> logits (V,) after it, while rows with it wait
        self.logits_BV = None

    def admit(self, entering):
        """Let rows enter. New prompts are computed first, all at once."""
        # A prompt without logits has not been computed: they are kept while a row with it waits.
        prompts = [self.prompt_of_row[place[0]] for place, _ in entering]
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self.prompt_logits]
        if new:
            fresh, logits_RV = prefill(self.model, [self.tokens[prompt] for prompt in new])
            self.prompt_logits |= dict(zip(new, logits_RV))
            into = self.prompts if self.shares else self.cache
            into.begin(fresh, range(len(new)))
            self.cached_prompts += new
        if self.shares:
            rows_of_prompts = [self.cached_prompts.index(prompt) for prompt in prompts]
            self.cache.begin(self.prompts, rows_of_prompts, share=True)
        logits_BV = torch.stack([self.prompt_logits[prompt] for prompt in prompts])
        self.logits_BV = torch.cat([self.logits_BV, logits_BV]) if self.rows else logits_BV
        self.rows = self.rows + entering
        self.waiting.subtract(prompts)
        for prompt in [prompt for prompt in self.prompt_logits if not self.waiting[prompt]]:
            del self.prompt_logits[prompt]

    def sample_tokens(self, temperature, end):
        """Append a token to each row. Return whether it is a sampled one that ends a turn."""
        uniform_B = None
        if temperature > 0:
            draws = [row.draws[row.new] for _, row in self.rows]
            uniform_B = torch.tensor(draws, dtype=torch.float64, device=self.device)
        sample = getattr(self.model, "sample", models.sample)
        tokens_B, logprobs_B = sample(self.logits_BV, uniform_B, temperature=temperature)
        sampled = zip(self.rows, tokens_B.tolist(), logprobs_B.tolist())
        return [row.append(token, logprob) and token in end for (_, row), token, logprob in sampled]

    def keep_and_feed(self, kept):
        """Keep these rows, (row of the cache, place, row), and feed their last tokens."""
        self.rows = [(place, row) for _, place, row in kept]
        sources = [b for b, _, _ in kept]
        if sources != [*range(len(self.cache.lengths))]:
            self.cache.select(sources)
            self.drop_prompts()
        if kept:
            last_B1 = torch.tensor([row.tokens[-1:] for _, row in self.rows], device=self.device)
            self.logits_BV = forward_with_cache(self.model, self.cache, last_B1)

    def drop_prompts(self):
        """Drop the shared prompts that no row of the batch and no waiting row has."""
        used = set(self.cache.prompt_of)
        rows = [r if r in used or self.waiting[prompt] else None
                for r, prompt in enumerate(self.cached_prompts)]  # fmt: skip
        if self.shares and None in rows:
            rows = without_holes(rows)
            self.prompts.select(rows)
            self.cached_prompts = [self.cached_prompts[r] for r in rows]
            self.cache.prompt_of = [rows.index(r) for r in self.cache.prompt_of]


def without_holes(entries):
    """Return a list without its Nones, filled from the end: a _ c d -> a d c."""
    entries = list(entries)
    for b in reversed(range(len(entries))):
        if entries[b] is None:
            entries[b] = entries[-1]
            entries.pop()
    return entries
