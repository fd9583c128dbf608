"""Cache keys and values of rows that enter and leave, and store a shared prompt's once.

The stores grow with need, sliding layers drop old tokens, and a row enters or leaves without a copy
of the others. To generate 8 answers of 32 tokens to a prompt of 256, `models.generate` takes 2.2
times as long. The cache has 2 G D numbers per token and layer and spare slots, in sliding layers
for the tokens of a window, and in recurrent layers H K V numbers per row, whatever its length.

Letters:  B rows   S new tokens of a row   C slots of the cache   R prompts, L slots of a prompt
H query heads   G key heads   D width of a head   V vocabulary entries   h query heads of a key head
times new tokens   In recurrent layers those of deltanet.py; T past inputs and new ones, n past
inputs
"""

import math
from typing import NamedTuple

import torch
from torch import nn

import models
from full.attention.attend import Attention
from full.model.deltanet import by_chunk
from full.model.transformer import causal_attention


class Step(NamedTuple):
    """Store what one forward does with the stores of all layers of one window."""

    lengths: list  # the cache's, before this forward
    moves: list  # (row, first, count): slots, or prompt tokens, from first on go to 0..count-1
    is_prompt: bool  # no row has a token yet
    low: int = 0  # the new tokens attend to slots low..high-1
    high: int = 0
    slot_BS: torch.Tensor | None = None  # of the new tokens. None: high-S..high-1 in every row
    visible_B1SC: torch.Tensor | None = None  # True where a new token sees a slot. None: everywhere


class KVCache(models.KVCache, Attention):
    """Store keys and values of the tokens so far, for rows of any lengths.

    The slot of a row's token is its position minus `first` of the row. `first` is 0 unless no
    window reaches the row's first tokens any more, or its prompt is in another cache:

        sliding layer, window 3     row 0   k k k k . .      lengths 6 2, first 2 0
                                    row 1   k k . . . .

    Recurrent layers have a state, and the last inputs of a convolution, for each row.

    Its `attention` is the callable for `Transformer.hidden`, and `forward_with_cache` feeds
    tokens. Lengths are Python's: nothing is read back from the device. Where new tokens go and what
    they see is decided once a forward, for all layers of one window: `Step`.
    """

    copies_prompts = False  # True: `share_prompts` copies the keys of full layers too

    def __init__(self, rows=0, device=None, capacity=0):
        super().__init__(rows, slots={})  # window -> C. Layers are (2, rows or more, G, C, D)
        self.device = device
        self.capacity = capacity  # stores have at least so many rows
        self.window_of = {}  # layer -> its window. None: a full layer
        self.first = {}  # window -> the position of each row's slot 0
        self.prompts = None  # the cache of `share_prompts`
        self.prompt_of = []  # and each row's row there
        self.groups = None  # `PromptGroups` of these, made when they are needed
        self.counts = None  # new tokens of each row that are real. None: all
        self.steps = {}  # window -> `Step` of this forward
        self.states = {}  # recurrent layer -> inputs (B, kernel - 1, X) and states (B, H, K, V)

    @property
    def attention(self):
        """Return what layers call: this cache."""
        return self

    def attend(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
        """Write the keys and values of S new tokens a row, and attend to all tokens so far."""
        step, store = self.write(k_BGSD, v_BGSD, layer, window)
        if step.is_prompt:
            # A prompt has nothing older to see. Its right padding needs no mask.
            return causal_attention(q_BHSD, k_BGSD, v_BGSD, layer=layer, scale=scale, window=window)

        B, G, S, D = k_BGSD.shape
        k_BGCD, v_BGCD = store[:, :B, :, step.low : step.high]
        if self.prompts is not None and window is None:
            return self._attend_with_prompts(q_BHSD, k_BGCD, v_BGCD, step, layer, scale)

        # For one token a row, the H / G heads of a key head are queries of one head, so that one
        # product for each key head serves them all.
        queries = q_BHSD.reshape(B, G, -1, D) if S == 1 else q_BHSD
        out = models.masked_attention(queries, k_BGCD, v_BGCD, step.visible_B1SC, scale=scale)
        return out.reshape(q_BHSD.shape)

    def windows(self, x_BSX, /, *, kernel, layer):
        """Return the last `kernel` inputs of each new token, and keep the last ones of each row."""
        B, S, X = x_BSX.shape
        past_BnX, state_BHKV = self.states.get(layer, (x_BSX.new_zeros(B, kernel - 1, X), None))
        inputs_BTX = torch.cat([past_BnX, x_BSX], 1)
        # The next token wants the last inputs that are real. With kernel 3, and 1 real token of 3:
        #     past a b   new c . .   kept b c
        first_B1 = torch.tensor(self.counts or [S] * B, device=x_BSX.device)[:, None]
        at_Bn = first_B1 + torch.arange(kernel - 1, device=x_BSX.device)
        row_B1 = torch.arange(B, device=x_BSX.device)[:, None]
        self.states[layer] = inputs_BTX[row_B1, at_Bn], state_BHKV
        return inputs_BTX.unfold(1, kernel, 1)

    def recurrence(self, q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, /, *, layer):
        """Return the outputs of the new tokens, and keep the last states."""
        # Padding would stay in a state forever, while later tokens overwrite its keys. Without
        # decay and correction the state after it is the one before it.
        inputs_BnX, state_BHKV = self.states[layer]
        S = q_BHSK.shape[2]
        if self.counts and min(self.counts) < S:
            count_B1 = torch.tensor(self.counts, device=q_BHSK.device)[:, None]
            is_real_B1S = (torch.arange(S, device=q_BHSK.device) < count_B1)[:, None]
            log_a_BHS, b_BHS = log_a_BHS * is_real_B1S, b_BHS * is_real_B1S
        out_BHSV, state_BHKV = by_chunk(q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, state_BHKV)
        self.states[layer] = inputs_BnX, state_BHKV
        return out_BHSV

    def write(self, k_BGSD, v_BGSD, layer, window):
        """Store keys and values of S new tokens a row. Return the `Step`, and the layer's store."""
        S = k_BGSD.shape[2]
        step = self.steps.get(window)
        if step is None or step.lengths is not self.lengths:  # a forward ends with a new list
            step = self.steps[window] = self._plan(S, window)
        new_2BGSD = torch.stack([k_BGSD, v_BGSD])
        store = self._store(layer, window, new_2BGSD)
        source = new_2BGSD if step.is_prompt else store
        for b, first, count in step.moves:
            store[:, b, :, :count] = source[:, b, :, first : first + count].clone()
        if not step.is_prompt:
            self._write_tokens(store, new_2BGSD, step)
        elif not step.moves:
            store[:, : len(self.lengths), :, :S] = new_2BGSD
        return step, store

    def _write_tokens(self, store, new_2BGSD, step):
        """Write S new tokens of each row into their slots."""
        _, B, _, S, _ = new_2BGSD.shape
        if step.slot_BS is None:
            store[:, :B, :, step.high - S : step.high] = new_2BGSD
            return
        # Indexing by tables, as in `models.KVCache`, gives (B, S, 2, G, D).
        row_B1 = torch.arange(B, device=store.device)[:, None]
        store[:, row_B1, :, step.slot_BS] = new_2BGSD.permute(1, 3, 0, 2, 4)

    def _plan(self, S, window):
        """Return the `Step` of S new tokens a row in the layers of one window."""
        first = self.first.setdefault(window, [0] * len(self.lengths))
        slots = self.slots.setdefault(window, 0)
        reach = window or math.inf  # tokens that a query sees, its own included
        moves = []
        if not any(self.lengths):
            # The token after a prompt sees reach - 1 of its tokens. A sliding layer stores these.
            if S >= reach:
                for b, count in enumerate(self.counts or [S] * len(self.lengths)):
                    first[b] = max(0, count - reach + 1)
                    moves.append((b, first[b], count - first[b]))
            self.slots[window] = max(slots, min(S, reach))
            return Step(self.lengths, moves, True)

        # A sliding layer whose store is full first drops the tokens that no query will see again.
        # Stores have 1.5 times the slots that they need, so that they seldom grow or move tokens.
        stored = [length - start for length, start in zip(self.lengths, first)]
        if max(stored) + S > slots:
            for b, count in enumerate(stored):
                if count >= reach:
                    first[b] += count - reach + 1
                    stored[b] = reach - 1
                    moves.append((b, count - reach + 1, reach - 1))
            need = max(stored) + S
            self.slots[window] = max(slots, need + 32, need * 3 // 2)

        # One new token in each of equally long rows sees all of a slice. Otherwise there is a mask.
        # Slots are positions up to a constant of the row, so it is `models.visible_keys`.
        low = max(0, min(stored) + 1 - reach)
        high = max(stored) + S
        is_even = min(stored) == max(stored)
        if is_even and S == 1:
            return Step(self.lengths, moves, False, low, high)
        stored_B1 = torch.tensor(stored, device=self.device)[:, None]
        slot_BS = stored_B1 + torch.arange(S, device=self.device)
        slot_1C = torch.arange(low, high, device=self.device)[None]
        visible = models.visible_keys(slot_BS, slot_1C, window)
        return Step(self.lengths, moves, False, low, high, None if is_even else slot_BS, visible)

    def _store(self, layer, window, like):
        """Return the layer's store, made or grown to hold all rows and `slots[window]` slots.

        like: keys and values (2, .., G, .., D) of its shape and dtype.
        """
        # A store that is too small is copied into a larger one, and then dropped: at no time are
        # there two stores of more than one layer. The first store of a layer grows from nothing.
        old = self.layers.get(layer, like[:, :0, :, :0])
        _, B, G, C, D = old.shape
        rows = max(B, len(self.lengths), self.capacity)
        slots = self.slots[window]
        if B < rows or C < slots:
            store = like.new_zeros(2, rows, G, slots, D)
            store[:, :B, :, :C] = old
            self.layers[layer] = store
            self.window_of[layer] = window
        return self.layers[layer]

    def select(self, rows, /):
        """Keep these rows, a list of indices, in this order. A repeated row is a fork.

        Only rows that change places are copied, and one layer after the other. To give up rows 1
        and 4 of 6, copy row 5 alone, by select([0, 5, 2, 3]).
        """
        self.lengths = [self.lengths[b] for b in rows]
        # The right-hand side is read before anything is written, so that rows can trade places.
        to = [b for b, source in enumerate(rows) if b != source]
        source = [rows[b] for b in to]
        for layer, store in self.layers.items():
            store = self._store(layer, self.window_of[layer], store)
            if to:
                store[:, to] = store[:, source]
        self.first = {window: [first[b] for b in rows] for window, first in self.first.items()}
        self.states = {layer: tuple(x[rows] for x in state) for layer, state in self.states.items()}
        if self.prompts is not None:
            self.prompt_of = [self.prompt_of[b] for b in rows]

    def append_rows(self, source, rows, /):
        """Append rows that begin with the tokens of rows of another cache, which is used up.

        source: a cache of the same layers. rows: list of indices, repeats allowed.
        """
        self._append(source, rows, [*source.first], pops=True)

    def share_prompts(self, source, rows, /):
        """Append rows whose full layers read the keys of their prompts in another cache.

        source, rows: as in `append_rows`. All rows of a prompt read its keys at once. Sliding
            layers are copied: they hold a window only.
        """
        windows = [x for x in source.first if x is not None or self.copies_prompts]
        self._append(source, rows, windows, pops=False)
        self.prompts = source
        self.prompt_of = self.prompt_of + list(rows)

    def _append(self, source, rows, windows, pops):
        """Append rows, and copy the layers of these windows; pops: take each out of the source."""
        # The other layers store nothing of the new rows yet: their slot 0 is for the token after
        # the prompt.
        old = len(self.lengths)
        self.lengths = self.lengths + [source.lengths[r] for r in rows]
        for window, first in source.first.items():
            starts = first if window in windows else source.lengths
            self.first[window] = self.first.get(window, []) + [starts[r] for r in rows]
        for layer, state in source.states.items():
            own = self.states.get(layer, [x[:0] for x in state])
            self.states[layer] = tuple(torch.cat([x, y[rows]]) for x, y in zip(own, state))
        for window in windows:
            self.slots[window] = max(self.slots.get(window, 0), source.slots[window])
        for layer, window in source.window_of.items():
            if window in windows:
                keys = source.layers.pop(layer) if pops else source.layers[layer]
                store = self._store(layer, window, keys)
                store[:, old : len(self.lengths), :, : keys.shape[3]] = keys[:, rows]

    def _attend_with_prompts(self, q_BHSD, k_BGCD, v_BGCD, step, layer, scale):
        """Attend by one softmax over a prompt's keys, read once for all its rows, and own keys."""
        lengths = self.prompts.lengths
        if self.groups is None or self.groups.prompt_of is not self.prompt_of:
            self.groups = PromptGroups(self.prompt_of, lengths, self.device)
        L = max(lengths)
        k_RGLD, v_RGLD = self.prompts.layers[layer][:, : len(lengths), :, :L]
        B, G, C, _ = k_BGCD.shape
        S = q_BHSD.shape[2]
        # NUMERICS: scores and sums in float32 or better, keys and values cast up for it. Pinned by
        # tests/full/test_models.py::test_bfloat16_shared_prompts_are_as_exact_as_copies.
        wide = torch.promote_types(q_BHSD.dtype, torch.float32)
        q_BGhD = q_BHSD.reshape(B, G, -1, q_BHSD.shape[3]).to(wide)

        # Scores of the row's own keys, masked as ever, and of the prompt's keys: shorter prompts
        # have padding to hide.
        own_BGhC = q_BGhD @ k_BGCD.to(wide).mT
        if step.visible_B1SC is not None:
            hidden_B11SC = ~step.visible_B1SC[:, :, None]
            own_BGhSC = own_BGhC.unflatten(2, (-1, S)).masked_fill(hidden_B11SC, -math.inf)
            own_BGhC = own_BGhSC.flatten(2, 3)
        shared_BGhL = self.groups.product(q_BGhD, k_RGLD.to(wide).mT)
        if self.groups.beyond_B11L is not None:
            shared_BGhL = shared_BGhL.masked_fill(self.groups.beyond_B11L, -math.inf)

        # One softmax over both, and each part of it weighs its own values.
        p_BGhk = (torch.cat([shared_BGhL, own_BGhC], -1) * scale).softmax(-1)
        p_BGhL, p_BGhC = p_BGhk.split([L, C], -1)
        out_BGhD = self.groups.product(p_BGhL, v_RGLD.to(wide)) + p_BGhC @ v_BGCD.to(wide)
        return out_BGhD.to(q_BHSD.dtype).reshape(q_BHSD.shape)


class PromptGroups:
    """Store which rows begin with each of R prompts, so that a product reads its keys once.

        prompt of each row   [0, 1, 0, 0]
        rows of each prompt  [[0, 2, 3], [1, 0, 0]]     the two last zeros are padding
        place of each row    [0, 3, 1, 2]               in the flattened table: row 1 is at 3
    """

    def __init__(self, prompt_of, lengths, device):
        groups = [[b for b, r in enumerate(prompt_of) if r == n] for n in range(len(lengths))]
        size = max(map(len, groups))
        table = [group + [0] * (size - len(group)) for group in groups]
        places = [r * size + groups[r].index(b) for b, r in enumerate(prompt_of)]
        self.prompt_of = prompt_of
        self.rows_Rn = torch.tensor(table, device=device)
        self.place_B = torch.tensor(places, device=device)
        self.in_order = sum(table, []) == [*range(len(prompt_of))]
        self.beyond_B11L = None  # slots past the end of each row's prompt
        if min(lengths) < max(lengths):
            length_B = torch.tensor([lengths[r] for r in prompt_of], device=device)
            slot_L = torch.arange(max(lengths), device=device)
            self.beyond_B11L = (slot_L >= length_B[:, None])[:, None, None]

    def product(self, x_BGhX, y_RGXY):
        """Return x[b] @ y[prompt of b], (B, G, h, Y), by one product for all rows of a prompt."""
        size = self.rows_Rn.shape
        x_RnGhX = x_BGhX.unflatten(0, size) if self.in_order else x_BGhX[self.rows_Rn]
        out_RGmY = x_RnGhX.transpose(1, 2).flatten(2, 3) @ y_RGXY
        out_RnGhY = out_RGmY.unflatten(2, (size[1], -1)).transpose(1, 2)
        return out_RnGhY.flatten(0, 1) if self.in_order else out_RnGhY.flatten(0, 1)[self.place_B]


def forward_with_cache(model, cache, tokens_BS, /, counts=None):
    """Feed the next tokens of each row, and return the logits (B, V) after each row's last one.

    tokens_BS: int64, (B, S), padded on the right.
    counts: list of int. How many tokens of each row are real. Default: S.

    ValueError unless each row has a real token.
    """
    B, S = tokens_BS.shape
    counts = [S] * B if counts is None else counts
    if len(counts) != B or not all(0 < count <= S for count in counts):
        raise ValueError(f"counts: expected {B} numbers in 1..{S}, got {counts}")
    cache.counts = counts
    return models.forward_with_cache(model, cache, tokens_BS, counts)


def cache_of(model):
    """Return the class of a model's cache."""
    return getattr(model, "cache_class", KVCache)


@torch.no_grad()
def prefill(model, prompts, /):
    """Return a cache with a row for each prompt, and the logits (B, V) after each.

    prompts: lists of token ids, of any lengths.
    """
    if not all(prompts):
        raise ValueError("prompts: expected at least one token in each")
    device = model.head_weight.device
    tokens_BS = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    cache = cache_of(model)(len(prompts), device)
    counts = [len(prompt) for prompt in prompts]
    return cache, forward_with_cache(model, cache, tokens_BS.to(device), counts)
