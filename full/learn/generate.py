"""Decodes rows that come and go: limited slots, forks, turns of a conversation.

Prompts that several rows have are computed once, and rows without draws get some from a seed.
`models.generate` is the same without all this.
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
    after: after(row) -> the rows that go on in its place. None, the default, ends it. The row
        itself, with tokens in its queue, is the next turn of a conversation; several are a fork.
        With `after`, forks are returned in the place of their row.
    seed: makes the draws of rows that have none. ValueError if such a row gets no seed.
    """
    rows = [row if isinstance(row, models.Row) else models.Row(row) for row in rows]
    if seed is not None and temperature > 0:
        # The generator draws for every row, also for one that has draws of its own: what a row gets
        # depends on its place, and not on what other rows brought.
        generator = torch.Generator().manual_seed(seed)
        for row in rows:
            drawn = torch.rand(max_new_tokens, generator=generator, dtype=torch.float64).tolist()
            row.draws = row.draws if len(row.draws) else drawn
    turns = Turns(max_new_tokens, after=after)
    return decode(model, rows, turns, temperature=temperature, end=end, slots=slots)


@torch.inference_mode()
def decode(model, rows, turns, /, *, temperature=1.0, end=(), slots=None):
    """Decode `Row`s until each has ended. Return them, in their order.

    rows: with a draw for each new token. One that may fork has `count`, the number of rows that it
        may be in the end. It reserves as many slots, so that a fork never waits. A row that needs
        more than there are enters when all others have ended.
    turns: Turns. What follows a row's turn.
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

    batch = Batch(model, rows, min(slots or math.inf, sum(map(reserved, rows))))
    waiting = deque(((n,), row) for n, row in enumerate(rows))
    while waiting or batch.rows:
        # Rows enter in their order. All ranks that decode the same rows let the same ones in.
        entering = []
        taken = sum(reserved(row) for _, row in batch.rows)
        while waiting and (not taken or taken + reserved(waiting[0][1]) <= (slots or math.inf)):
            taken += reserved(waiting[0][1])
            entering.append(waiting.popleft())
        if entering:
            batch.admit(entering)

        # Each row takes its token, sampled or queued. A fork of it is a copy of a row of the cache,
        # and takes a free slot if there is one.
        going = []  # (slot of the batch to go on from, place, row), or None: a free slot
        forks = []
        ended = batch.draw(temperature, end)
        for b, followers in enumerate(turns.followers(batch.rows, ended)):
            kept = [(b, place, row) for place, row in followers]
            going.append(kept[0] if kept else None)
            forks += kept[1:]
        batch.go_on(without_holes(going + forks))
    return turns.rows()


class Turns:
    """What follows the turns of rows: more turns, forks, or the end.

    max_new_tokens, after: as in `generate`.
    ending: ending(rows), called with the rows that a token has ended, before `after` is called with
        each. So a task that is on another rank is asked once for all of them.

    A row's place among all rows is its number, and after each turn also the number of the fork:
    after two turns row 3 has the places (3, 0, 0) .., in which the rows are returned.
    """

    def __init__(self, max_new_tokens, ending=None, after=None):
        self.limit = max_new_tokens
        self.ending = ending
        self.after = after
        self.done = []  # (place, row)

    def followers(self, entries, ended):
        """Yield for each (place, row) a list of those that go on in its place.

        entries: list of (place, row). They have got tokens.
        ended: whether the last token ended a turn of the row. Then `ending` is called with all of
            these rows, and `after` with each says what goes on: nothing, the row, or its forks.
        """
        finished = [row for (_, row), has_ended in zip(entries, ended) if has_ended]
        if self.ending and finished:
            self.ending(finished)
        for (place, row), has_ended in zip(entries, ended, strict=True):
            found = [(place, row)]
            if has_ended:
                forks = self.after(row) if self.after else []
                found = [((*place, n), fork) for n, fork in enumerate(forks)]
                self.done += [] if forks else [(place, row)]
            # Who has no token left goes on no more, a fork that has just begun neither.
            for _, follower in found:
                follower.truncated = follower.new >= self.limit
            self.done += [entry for entry in found if entry[1].truncated]
            yield [entry for entry in found if not entry[1].truncated]

    def rows(self) -> list:
        """Return the rows that have ended, in the order of their places."""
        return [row for _, row in sorted(self.done, key=lambda entry: entry[0])]


class Batch:
    """The rows that `decode` decodes together, their cache, and the logits after each row.

    A prompt that several rows have is computed once, and its keys are kept once, from when the
    first of these rows enters until the last one has ended.
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
        make = cache_of(model)
        self.cache = make(device=self.device, capacity=capacity)
        self.prompts = make(device=self.device)  # those that rows share
        self.held = []  # their numbers
        self.after = {}  # prompt -> logits (V,), while rows wait for them
        self.logits_BV = None

    def admit(self, entering):
        """Let rows in, after prompts that are not there yet have been computed, all at once."""
        # A prompt whose logits are not kept has not been computed: they are kept for as long as a
        # row with this prompt waits.
        wanted = [self.prompt_of_row[place[0]] for place, _ in entering]
        new = [prompt for prompt in dict.fromkeys(wanted) if prompt not in self.after]
        if new:
            prompts = [self.tokens[prompt] for prompt in new]
            fresh, logits_RV = prefill(self.model, prompts)
            self.after |= dict(zip(new, logits_RV))
            into = self.prompts if self.shares else self.cache
            into.append_rows(fresh, range(len(new)))
            self.held += new
        if self.shares:
            self.cache.share_prompts(self.prompts, [self.held.index(p) for p in wanted])
        logits_BV = torch.stack([self.after[prompt] for prompt in wanted])
        self.logits_BV = torch.cat([self.logits_BV, logits_BV]) if self.rows else logits_BV
        self.rows = self.rows + entering
        self.waiting.subtract(wanted)
        for prompt in [prompt for prompt in self.after if not self.waiting[prompt]]:
            del self.after[prompt]

    def draw(self, temperature, end):
        """Let each row take a token. Return whether it is a sampled one that ends a turn."""
        uniform_B = None
        if temperature > 0:
            draws = [row.draws[row.new] for _, row in self.rows]
            uniform_B = torch.tensor(draws, dtype=torch.float64, device=self.device)
        sample = getattr(self.model, "sample", models.sample)
        tokens_B, logprobs_B = sample(self.logits_BV, uniform_B, temperature=temperature)
        drawn = zip(self.rows, tokens_B.tolist(), logprobs_B.tolist())
        return [row.append(token, logprob) and token in end for (_, row), token, logprob in drawn]

    def go_on(self, going):
        """Keep these rows of the cache, (row of the cache, place, row), and feed their tokens."""
        self.rows = [(place, row) for _, place, row in going]
        origins = [b for b, _, _ in going]
        if origins != [*range(len(self.cache.lengths))]:
            self.cache.select(origins)
            # Give up the prompts with which no row of the batch and no waiting row begins.
            used = set(self.cache.prompt_of)
            kept = [r if r in used or self.waiting[p] else None for r, p in enumerate(self.held)]
            if self.shares and None in kept:
                kept = without_holes(kept)
                self.prompts.select(kept)
                self.held = [self.held[r] for r in kept]
                self.cache.prompt_of = [kept.index(r) for r in self.cache.prompt_of]
        if going:
            last_B1 = torch.tensor([row.tokens[-1:] for _, row in self.rows], device=self.device)
            self.logits_BV = forward_with_cache(self.model, self.cache, last_B1)


def without_holes(entries):
    """Return a list without its Nones, which are filled from the end: a _ c d -> a d c."""
    entries = list(entries)
    for b in reversed(range(len(entries))):
        if entries[b] is None:
            entries[b] = entries[-1]
            entries.pop()
    return entries
