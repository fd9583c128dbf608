"""Compute every sum of a model in a fixed order, so that the sampler is the trainer bit for bit.

A sum of floats depends on its order: (1e8 + 1) - 1e8 is 0 in float32, and (1e8 - 1e8) + 1 is 1. A
kernel chooses the order by the shapes of its arguments. So a token that is decoded in a batch of
48 rows has other log-probs than the same token in a trainer's row of 3,000 tokens, and the ratio of
a policy to itself is not 1. In an `ExactTransformer` no result depends on other tokens, or
on how many there are:

    products    rows are padded to a multiple of 16 (ROWS), and at most 256 are multiplied at once:
                many kernels sum along K in one order from some number of rows on. If this machine's
                kernel does not, 16 rows are multiplied at once.
    attention   over blocks of 64 keys, one after another. The first begins at position 0.
                A block that a query does not see adds exact zeros, so it may be left out.
    functions   exp, log, cos, silu and the like get a multiple of 64 numbers. Kernels compute the
                last few of a tensor without vector instructions, by another approximation.
    log-probs   the sampler and the trainer compute them by one formula, from equal logits.

All else in the model works on one token at a time, by sums of one row and by + - * / and roots,
which IEEE 754 rounds in one way. No library promises that a kernel keeps its order: each shape is
tried, and `require_exact_kernels` refuses a machine on which there is no order.
The backward is the ordinary one. The cost is in full/RESULTS.md.

Equations (1) and (3) are in ring_attention.py, (7) to (9) in models.py.

Letters:  B rows   S new tokens of a row, C of its keys   H query heads   G key heads   D width of
a head   N tokens   K, I widths of a product   V vocabulary entries   n groups of R
queries of a key head
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

import models
from full.attention.attend import TiledAttention, backward_tiles, checked_scale
from full.attention.masks import Mask
from full.model.cache import KVCache
from full.model.experts import Experts, SparseMLP
from full.model.logprobs import LogprobOptions, TokenLogprobs, require_tokens_in_vocabulary
from full.model.transformer import Layer, Rope, Transformer
from full.ranks.places import set_tensor, variant_of

ROWS = 16  # the rows of a product are padded to a multiple of ROWS
TILES = 256, ROWS  # most rows of one product: the first of these that is exact on this machine
KEYS = 64  # of a block
NUMBERS = 64  # a function gets a multiple of this: more than any vector register holds


def elementwise(function, x):
    """Return function(x), such as exp: the bits of a number do not depend on its place."""
    flat = F.pad(x.flatten(), (0, -x.numel() % NUMBERS))
    return function(flat)[: x.numel()].view_as(x)


def tiles_of(x_NK, weight_IK, tile):
    """Return x weight^T, (N, I), by products of at most `tile` rows."""
    tiles = []
    for x_nK in x_NK.split(tile):
        padded = F.pad(x_nK, (0, 0, 0, -len(x_nK) % ROWS))
        tiles.append(F.linear(padded, weight_IK)[: len(x_nK)])
    return torch.cat(tiles) if len(tiles) > 1 else tiles[0]


def product(x_NK, weight_IK):
    """Return x weight^T, (N, I): the bits of a row do not depend on the other rows."""
    tile = tile_of(*weight_IK.shape, weight_IK.dtype, weight_IK.device)
    return tiles_of(x_NK, weight_IK, tile)


@functools.cache
def tile_of(I, K, dtype, device) -> int:
    """Return the largest of TILES with which products of a shape are exact on this machine.

    Rows are taken alone, and in groups of other sizes and places. ValueError if none is exact.
    """
    x_NK, weight_IK = draw(TILES[0], K, dtype, device), draw(I, K, dtype, device)
    for tile in TILES:
        whole_NI = tiles_of(x_NK, weight_IK, tile)
        groups = [slice(*ends) for ends in ((0, 1), (3, 4), (5, 22), (9, 100), (200, len(x_NK)))]
        if all(torch.equal(tiles_of(x_NK[n], weight_IK, tile), whole_NI[n]) for n in groups):
            return tile
    refuse(f"a product of width {K} to {I} in {dtype}")


def refuse(kernel):
    """Raise the ValueError of a kernel that is not exact on this machine."""
    raise ValueError(f"exact: on this machine the bits of {kernel} depend on other rows; try "
                     f"another machine, or another torch")  # fmt: skip


def batched_product(a_nRX, b_nXY):
    """Return a[n] @ b[n], (n, R, Y), for R in whole groups of ROWS: a row's bits are its own."""
    if rows_are_free(*b_nXY.shape[1:], a_nRX.dtype, a_nRX.device):
        return torch.bmm(a_nRX, b_nXY)
    groups = a_nRX.shape[1] // ROWS
    tiles = torch.bmm(a_nRX.reshape(-1, ROWS, a_nRX.shape[2]), b_nXY.repeat_interleave(groups, 0))
    return tiles.view(*a_nRX.shape[:2], -1)


@functools.cache
def rows_are_free(X, Y, dtype, device) -> bool:
    """Return whether the bits of torch.bmm depend on neither the rows nor the matrices."""
    # q k^T has a transposed factor, and p v has not.
    a_nRX = draw(6 * 8 * ROWS, X, dtype, device).view(6, -1, X)
    numbers = draw(6 * X, Y, dtype, device)
    cuts = (slice(1), slice(ROWS)), (slice(1, 4), slice(ROWS, 4 * ROWS)), (slice(5, 6), slice(128))
    for b_nXY in numbers.view(6, X, Y), numbers.view(6, Y, X).mT:
        whole = torch.bmm(a_nRX, b_nXY)
        for n, r in cuts:
            if not torch.equal(torch.bmm(a_nRX[n, r].contiguous(), b_nXY[n]), whole[n, r]):
                return False
    return True


def draw(N, K, dtype, device):
    """Return random numbers (N, K), the same in each call."""
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(device, dtype)


class Product(torch.autograd.Function):
    """Compute `product` with an ordinary gradient: no sampler is compared with it."""

    @staticmethod
    def forward(ctx, x_NK, weight_IK):
        ctx.save_for_backward(x_NK, weight_IK)
        return product(x_NK, weight_IK)

    @staticmethod
    def backward(ctx, dout_NI):
        x_NK, weight_IK = ctx.saved_tensors
        return dout_NI @ weight_IK, dout_NI.T @ x_NK


class ExactLinear(nn.Module):
    """Run a linear by exact products."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x, /):
        out = Product.apply(x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class ExactExperts(Experts):
    """Run `Experts` by exact products of each expert's rows."""

    def product(self, name, x_NM, counts_E, /):
        parts = zip(x_NM.split(counts_E.tolist()), getattr(self, name))
        return torch.cat([Product.apply(x_nM, weight_IM) for x_nM, weight_IM in parts])


class ExactSparseMLP(SparseMLP):
    """Run `SparseMLP` with exact experts."""

    experts_class = ExactExperts


class ExactLayer(Layer):
    """Run `Layer` with exact experts, linears and activations."""

    sparse_class = ExactSparseMLP

    def __init__(self, config, layer):
        super().__init__(config, layer)
        for path, part in [*self.named_modules()]:
            if isinstance(part, nn.Linear):
                set_tensor(self, path, ExactLinear(part))
            if hasattr(part, "act"):
                part.act = functools.partial(elementwise, part.act)


# Attention ---------------------------------------------------------------------------------------


def exact_attention(q_BHSD, k_BGCD, v_BGCD, first_B, scale, window=None):
    """Attend from S new tokens of each row to the tokens before them; return out, lse, both wide.

    k_BGCD, v_BGCD: the token at position p of a row is in slot p.
    first_B: position of each row's first new token. list of int.
    """
    # NUMERICS: in float32 or better, as the ordinary attention is. Pinned by
    # tests/full/test_exact.py::test_attention_is_the_definition.
    wide = torch.promote_types(q_BHSD.dtype, torch.float32)
    B, H, S, D = q_BHSD.shape
    G, C = k_BGCD.shape[1:3]
    h = H // G

    # The queries of a key head are rows of one product: token 0 of its h heads, then token 1.
    q_nRD = q_BHSD.unflatten(1, (G, h)).permute(0, 1, 3, 2, 4).reshape(B * G, S * h, D).to(wide)
    q_nRD = F.pad(q_nRD, (0, 0, 0, -S * h % ROWS))
    R = q_nRD.shape[1]
    first_B1 = torch.tensor(first_B, device=q_nRD.device)[:, None]
    at_BR = first_B1 + torch.arange(R, device=q_nRD.device)[None] // h
    at_nR1 = at_BR.repeat_interleave(G, 0)[..., None]

    # A running maximum, and two sums relative to it: online softmax.
    top_nR1 = q_nRD.new_full((B * G, R, 1), -math.inf)
    total_nR1 = torch.zeros_like(top_nR1)
    out_nRD = torch.zeros_like(q_nRD)
    for start in range(0, C, KEYS):
        end = start + KEYS
        rows = queries_that_see(start, end, first_B, h, R, window)
        if rows.start >= rows.stop:
            continue
        blocks = (x_BGCD[:, :, start:end].flatten(0, 1).to(wide) for x_BGCD in (k_BGCD, v_BGCD))
        k_nKD, v_nKD = (F.pad(x, (0, 0, 0, KEYS - x.shape[1])).contiguous() for x in blocks)
        key_K = torch.arange(start, end, device=q_nRD.device)
        hidden_nRK = key_K > at_nR1[:, rows]
        if window is not None:
            hidden_nRK = hidden_nRK | (key_K <= at_nR1[:, rows] - window)
        s_nRK = batched_product(q_nRD[:, rows].contiguous(), k_nKD.mT) * scale  # (1)
        s_nRK = s_nRK.masked_fill_(hidden_nRK, -math.inf)

        # A query that has seen nothing yet has a maximum of -inf, and no difference to it.
        before = top_nR1[:, rows]
        top = torch.maximum(before, s_nRK.amax(-1, keepdim=True))
        finite = top.masked_fill(top == -math.inf, 0.0)
        p_nRK = elementwise(torch.exp, s_nRK - finite)
        keep = elementwise(torch.exp, before - finite)
        total_nR1[:, rows] = total_nR1[:, rows] * keep + p_nRK.sum(-1, keepdim=True)
        out_nRD[:, rows] = out_nRD[:, rows] * keep + batched_product(p_nRK, v_nKD)
        top_nR1[:, rows] = top

    def per_head(x_nRX):
        x_BGShX = x_nRX[:, : S * h].reshape(B, G, S, h, -1)
        return x_BGShX.permute(0, 1, 3, 2, 4).reshape(B, H, S, -1)

    return per_head(out_nRD / total_nR1), per_head(top_nR1 + total_nR1.log())[..., 0]


def queries_that_see(start, end, first_B, h, R, window):
    """Return the slice of R rows, h a token, that may see the keys at positions start .. end - 1.

    It consists of whole groups of ROWS, rounded outwards, and may be empty.
    """
    # Tokens at positions `start` and later see them, and with a window up to end + window - 2.
    low = max(0, start - max(first_B)) * h // ROWS * ROWS
    if window is None:
        return slice(low, R)
    last = max(0, end + window - 1 - min(first_B)) * h
    return slice(low, min(R, -(-last // ROWS) * ROWS))


class ExactCache(KVCache):
    """Attend exactly. All layers store all tokens, and rows share no prompt."""

    copies_prompts = True

    def attend(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
        """Write the keys and values of S new tokens a row, and attend to all tokens so far."""
        B, _, S, _ = k_BGSD.shape
        step, store = self.write(k_BGSD, v_BGSD, layer, None)
        k_BGCD, v_BGCD = store[:, :B, :, : S if step.is_prompt else step.high]
        out, _ = exact_attention(q_BHSD, k_BGCD, v_BGCD, self.lengths, scale, window)
        return out.to(q_BHSD.dtype)


def packed_attention(document_1S):
    """Return the attention of a trainer's row. document_1S: numbers of documents, -1 is padding."""
    # Documents 0 0 0 1 1 - have places [[0, 1, 2], [3, 4, 4]]. The last one is not real.
    mask = Mask.documents(doc_ids=document_1S)
    _, counts = torch.unique_consecutive(document_1S[0], return_counts=True)
    first_B1 = (counts.cumsum(0) - counts)[:, None]
    place_BL = first_B1 + torch.arange(int(counts.max()))
    is_real_BL = place_BL < first_B1 + counts[:, None]
    place_BL = place_BL.clamp(max=document_1S.shape[1] - 1)

    def forward(q_1HSD, k_1GSD, v_1GSD, mask, scale):
        # Each document is a row that begins at position 0.
        places, is_real = (x.to(q_1HSD.device) for x in (place_BL, is_real_BL))
        qkv = (x_1XSD[0, :, places].transpose(0, 1) for x_1XSD in (q_1HSD, k_1GSD, v_1GSD))
        first = [0] * len(places)
        out_BHLD, lse_BHL = exact_attention(*qkv, first, scale, mask.window)
        place_S = places[is_real]
        out_1HSD = torch.zeros_like(q_1HSD, dtype=out_BHLD.dtype)
        lse_1HS = out_1HSD.new_full(q_1HSD.shape[:3], -math.inf)
        out_1HSD[0, :, place_S] = out_BHLD.transpose(1, 2)[is_real].transpose(0, 1)
        lse_1HS[0, :, place_S] = lse_BHL.transpose(1, 2)[is_real].T
        return out_1HSD, lse_1HS

    def attention(q, k, v, /, *, layer, scale, window=None):
        scale = checked_scale(q, k, v, mask, scale)
        narrowed = mask.with_window(window)  # below, the backward is the ordinary one
        return TiledAttention.apply(q, k, v, forward, backward_tiles, narrowed, scale)[0]

    return attention


# Log-probs, and the model ------------------------------------------------------------------------


class ExactLogprobs(TokenLogprobs):
    """Compute log-probs as `models.sample` does, and entropies; backward by `TokenLogprobs`."""

    @staticmethod
    def forward(ctx, hidden_NM, weight_VM, targets_N, options, logits):
        wide = torch.promote_types(hidden_NM.dtype, torch.float32)
        columns = []
        for x_nM, target_n in zip(hidden_NM.split(options.chunk), targets_N.split(options.chunk)):
            # NUMERICS: in float64, as `models.sample` computes it, and rounded once. Pinned by
            # tests/full/test_exact.py::test_a_slip_in_each_mechanism_shows.
            z_nV = logits(x_nM).double() / options.temperature
            p_nV = z_nV.softmax(-1)
            logprob_n = elementwise(torch.log, p_nV.gather(-1, target_n[:, None])[:, 0])  # (8)
            lse_n = z_nV.logsumexp(-1)
            mean_n = (p_nV * z_nV).sum(-1)
            entropy_n = lse_n - mean_n  # (9)
            columns.append(torch.stack([logprob_n, entropy_n, lse_n, mean_n]).to(wide))
        logprobs_N, entropy_N, lse_N, mean_N = torch.cat(columns, 1)
        ctx.save_for_backward(hidden_NM, weight_VM, targets_N, lse_N, mean_N)
        ctx.options = options
        ctx.exponentials = {}
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, dlogprobs_N, dentropy_N):
        return *TokenLogprobs.backward(ctx, dlogprobs_N, dentropy_N), None


class ExactRope(Rope):
    """Compute the angles of `Rope` exactly."""

    def __call__(self, positions_BS, dtype, /):
        N = positions_BS.numel()
        padded_1N = F.pad(positions_BS.flatten(), (0, -N % NUMBERS))[None]
        return {kind: tuple(x[0, :N].view(*positions_BS.shape, 1, -1) for x in pair)
                for kind, pair in super().__call__(padded_1N, dtype).items()}  # fmt: skip


class ExactTransformer(Transformer):
    """Run `Transformer` with exact logits and log-probs, and an exact cache.

    Its attention is exact where `hidden` is given `packed_attention`, or that of its cache_class.
    One thread: torch cuts a tensor among several, and each part has an end.
    """

    layer_class, rope_class, cache_class = ExactLayer, ExactRope, ExactCache

    def logits(self, hidden, /):
        """Apply the head to states of `hidden`: (..., M) -> (..., V), in the model's dtype."""
        weight_VM = self.head_weight
        return product(hidden.flatten(0, -2), weight_VM).view(*hidden.shape[:-1], len(weight_VM))

    def sample(self, logits_BV, uniform_B, /, *, temperature):
        """Draw a token from each row of logits, as `models.sample` does."""
        B = len(logits_BV)
        more = -B % NUMBERS
        logits_BV = F.pad(logits_BV, (0, 0, 0, more))
        uniform_B = None if uniform_B is None else F.pad(uniform_B, (0, more))
        drawn = models.sample(logits_BV, uniform_B, temperature=temperature)
        return tuple(x[:B] for x in drawn)

    def logprobs(self, hidden, targets, /, *, temperature: float = 1.0):
        """Return (8) and (9) of targets (N,) given hidden (N, M): two (N,), float32 or better."""
        options = LogprobOptions(temperature, TILES[0], 0, None, 0)
        require_tokens_in_vocabulary(targets, self.config.vocab_size, what="target")
        return ExactLogprobs.apply(hidden, self.head_weight, targets, options, self.logits)


def make_exact(model) -> ExactTransformer:
    """Return an `ExactTransformer` that shares the parameters of a `Transformer`."""
    return variant_of(model, ExactTransformer)


@torch.no_grad()
def require_exact_kernels(model, device="cpu") -> None:
    """Raise ValueError if this machine has a kernel whose bits depend on other rows or numbers.

    model: its shapes and dtype are tried; it may be on the meta device.
    """
    c = model.config
    dtype = model.head_weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    device = torch.device(device)
    for p in [p for p in model.parameters() if p.dim() > 1]:
        tile_of(*p.shape[-2:], p.dtype, device)

    # A row of tokens, and each of some of its tokens alone.
    sizes = dict(H=c.num_attention_heads, G=c.num_key_value_heads)
    S, D = 2 * KEYS + 5, c.head_dim
    q, k, v = (draw(3 * sizes[x] * S, D, wide, device).view(3, -1, S, D) for x in "HGG")
    out, _ = exact_attention(q, k, v, [0] * 3, 1.0)
    for n in (0, 17, KEYS, S - 1):
        keys = [x[1:2, :, : n + 1] for x in (k, v)]
        alone, _ = exact_attention(q[1:2, :, n : n + 1], *keys, [n], 1.0)
        require_equal(alone, out[1:2, :, n : n + 1], f"attention with heads of {D}")

    # Functions of numbers, and sums of rows.
    x_NM = draw(67, c.hidden_size, dtype, device)
    functions = {"exp": torch.exp, "cos": torch.cos, "sin": torch.sin, "tanh": torch.tanh,
                 c.hidden_act: models.ACTIVATIONS[c.hidden_act]}  # fmt: skip
    functions = {name: functools.partial(elementwise, f) for name, f in functions.items()}
    functions["norms"] = functools.partial(F.rms_norm, normalized_shape=x_NM.shape[1:])
    functions["softmax"] = lambda x: x.double().softmax(-1)
    for name, function in functions.items():
        require_equal(function(x_NM)[5:9], function(x_NM[5:9]), f"{name} in {dtype}")


def require_equal(a, b, kernel):
    """Raise ValueError unless two tensors are equal to the bit."""
    if not torch.equal(a, b):
        refuse(kernel)
