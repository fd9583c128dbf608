"""Qwen, Llama, Mistral and Gemma as one Transformer, with its KV cache and its sampler.

The model does not know which token sees which. Every layer hands its queries, keys and values to
a function attention(q, k, v, layer=, scale=) that the caller chose. Causal attention, packed
documents and the KV cache are three such functions; a ring of ranks and a tree are two more.

    python models.py core           # 6 s: the model against itself, token by token, in float64
    python models.py check          # 20 s: every path of the full version, in float64

For token ids t_1..t_S, x a vector of width M, and [.] the concatenation of heads:

    (1)  x_i      = embed[t_i]                                         Gemma: times sqrt(M)
    (2)  y_i      = x_i + O [sum_j softmax_j(scale q_i . k_j) v_j]     over visible j, as j <= i
         q_i      = rope_i(norm(Q norm(x_i))), k_i likewise with K, v_i = V norm(x_i)
    (3)  x'_i     = y_i + ffn(norm(y_i)), ffn(h) = down(act(gate h) * up h)
    (4)  norm(x)  = w x / sqrt(mean(x^2) + eps)                        Gemma: (1 + w)
    (5)  rope_p   turns each pair (x_n, x_(n+D/2)) by the angle p f_n, f_n = theta^(-2n/D)
    (6)  experts: ffn(h) = sum of p_e ffn_e(h) over the K largest of p = softmax(router h)
    (7)  z_i      = head norm(x_i), x_i of the last layer
    (8)  logprob_i(t) = z_it / tau - log sum_u exp(z_iu / tau)         tau: the temperature
    (9)  entropy_i    = -sum_u exp(logprob_i(u)) logprob_i(u)

B rows, S new tokens of a row, C tokens that they may see, N tokens of any rows, M width, V words, H
query heads, G key heads, D width of a head (scale: D^-1/2, or as configured), E experts, K of them
for a token, X any number, 1 a dimension of one. A small letter is a part of the capital letter.
"""

import math
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

# 1. The model -----------------------------------------------------------------------------------

FULL = "full_attention"
SLIDING = "sliding_attention"
GELU_TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": GELU_TANH}


@dataclass
class SimpleConfig:
    """The shape of a model, in Hugging Face's field names. A family is a set of values."""

    vocab_size: int  # V
    hidden_size: int  # M
    intermediate_size: int  # width inside a dense MLP
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # G: each group of H / G query heads shares a key head
    head_dim: int  # D, which may differ from M / H
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False  # the head's matrix is the embedding's
    rope_parameters: dict = field(default_factory=dict)  # type of layer -> {"rope_theta": ..}
    layer_types: tuple[str, ...] = ()  # FULL or SLIDING for each layer. Default: all FULL
    sliding_window: int | None = None  # tokens that a SLIDING layer sees, the token itself included
    qk_norm: bool = True  # norms of q and k in (2): Qwen3 and Gemma
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"  # a key of ACTIVATIONS
    norm_offset: bool = False  # (4) with 1 + w: Gemma
    post_norms: bool = False  # a second norm after attention and after the MLP: Gemma
    scale_embedding: bool = False  # sqrt(M) in (1): Gemma
    query_pre_attn_scalar: float | None = None  # scale is its -1/2 power. Default: head_dim
    num_experts: int = 0  # E
    num_experts_per_tok: int = 0  # K
    moe_intermediate_size: int = 0  # width inside an expert
    norm_topk_prob: bool = False  # divide the K weights of (6) by their sum
    sparse_layers: tuple[int, ...] = ()  # the layers with experts

    def __post_init__(self):
        self.layer_types = tuple(self.layer_types) or (FULL,) * self.num_hidden_layers
        theta = {"rope_theta": 10000.0}
        kinds = sorted(set(self.layer_types))
        self.rope_parameters = {kind: theta | self.rope_parameters.get(kind, {}) for kind in kinds}


class SimpleNorm(nn.Module):
    """Divide each vector by its root mean square, then scale it: (..., M) -> (..., M)."""

    def __init__(self, width, config):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.offset = 1.0 if config.norm_offset else 0.0
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))

    def forward(self, x, /):
        mean_square = x.square().mean(-1, keepdim=True)
        return (self.offset + self.weight) * x / (mean_square + self.eps).sqrt()  # (4)


def simple_frequencies(rope, head_dim, /):
    """Return the D / 2 frequencies of (5), in radians per token, float64."""
    # D = 4 and theta = 100 give 1 and 0.1. Fast pairs tell neighbors apart, slow ones far tokens.
    n = torch.arange(head_dim // 2, dtype=torch.float64)
    return rope["rope_theta"] ** (-2 * n / head_dim)


def cos_and_sin(positions_BS, f_d, /):
    """Return cos and sin of the angles of (5), each (B, S, 1, D), for both halves of a head."""
    angle_BS1d = positions_BS[:, :, None, None] * f_d
    sin_BS1d = angle_BS1d.sin()
    return angle_BS1d.cos().repeat(1, 1, 1, 2), torch.cat([-sin_BS1d, sin_BS1d], -1)


def apply_rope(x_BSXD, cos_BS1D, sin_BS1D, /):
    """Turn each pair (x_n, x_(n+D/2)) of each head by the angle of its token's position."""
    # (a, b) becomes (a cos - b sin, b cos + a sin): a roll swaps a and b, and sin has the signs.
    # A product of two turned vectors depends on the difference of their angles alone, on i - j.
    swapped_BSXD = x_BSXD.roll(x_BSXD.shape[-1] // 2, -1)
    return (x_BSXD * cos_BS1D + swapped_BSXD * sin_BS1D).to(x_BSXD.dtype)  # (5)


# Attention of q (B, H, S, D) to k and v (B, G, C, D), where a mask (B, 1, S, C) is true. Query head
# h reads key head h G / H, rounded down. With H = 4 and G = 2, heads 0 and 1 read key head 0.
masked_attention = partial(F.scaled_dot_product_attention, enable_gqa=True)


def visible_keys(query_BS, key_BC, window=None):
    """Return from int64 positions, as (B, 1, S, C) bool, which of C keys each of S queries sees."""
    # The query at position 5 sees keys 3, 4 and 5 if the window is 3, and keys 0 to 5 without one.
    behind_BSC = query_BS[:, :, None] - key_BC[:, None, :]
    return ((behind_BSC >= 0) & (behind_BSC < (window or math.inf)))[:, None]


def simple_causal_attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, mask=True):
    """Attend from token i of each row to tokens 0..i, or to the last `window` of them."""
    # Rows may be padded on the right, because no real token sees a later one. A mask hides more.
    place_1S = torch.arange(q_BHSD.shape[2], device=q_BHSD.device)[None]
    visible_B1SS = visible_keys(place_1S, place_1S, window) & mask
    return masked_attention(q_BHSD, k_BGSD, v_BGSD, visible_B1SS, scale=scale)


class SimpleAttention(nn.Module):
    """Equation (2) without its residual: (B, S, M) -> (B, S, M)."""

    def __init__(self, config, layer, norm_class):
        super().__init__()
        M = config.hidden_size
        D = config.head_dim
        self.head_dim = D
        self.kind = config.layer_types[layer]
        self.options = dict(layer=layer, scale=(config.query_pre_attn_scalar or D) ** -0.5)
        if self.kind == SLIDING:
            self.options["window"] = config.sliding_window
        # Modules have Hugging Face's names, so a checkpoint needs no table of names.
        self.q_proj = nn.Linear(M, config.num_attention_heads * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(M, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(M, config.num_key_value_heads * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * D, M, bias=config.o_bias)
        self.q_norm = norm_class(D, config) if config.qk_norm else nn.Identity()
        self.k_norm = norm_class(D, config) if config.qk_norm else nn.Identity()

    def forward(self, x_BSM, ropes, attention, /):
        # -1: a rank that has some rows of a projection has some of the heads, and nothing changes.
        # Each head is normalized by itself, and before RoPE, as the models were trained.
        q_BSHD = self.q_norm(self.q_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))
        k_BSGD = self.k_norm(self.k_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))
        v_BGSD = self.v_proj(x_BSM).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q_BHSD = apply_rope(q_BSHD, *ropes[self.kind]).transpose(1, 2)
        k_BGSD = apply_rope(k_BSGD, *ropes[self.kind]).transpose(1, 2)

        # The seam: whoever made `attention` decides who sees whom, and where keys are kept.
        out_BHSD = attention(q_BHSD, k_BGSD, v_BGSD, **self.options)
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """ffn of (3): (..., M) -> (..., M)."""

    def __init__(self, config, width):
        super().__init__()
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, h, /):
        # The gate decides, entry by entry, how much of `up` goes down.
        return self.down_proj(self.act(self.gate_proj(h)) * self.up_proj(h))


class SimpleExperts(nn.Module):
    """Equation (6): each token runs through the K experts that its router prefers."""

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)  # the router
        widths = [config.moe_intermediate_size] * config.num_experts
        self.experts = nn.ModuleList(MLP(config, width) for width in widths)

    def forward(self, x_BSM, /):
        x_NM = x_BSM.flatten(0, 1)
        p_NE = self.gate(x_NM).softmax(-1)
        weight_NK, expert_NK = p_NE.topk(self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)

        # If tokens 0 and 1 chose experts [2, 0] and [1, 2], expert 2 gets the tokens n = [0, 1], as
        # their choices k = [0, 1]. A choice has no gradient: the router learns through the weights.
        out_NM = torch.zeros_like(x_NM)
        for e, expert in enumerate(self.experts):
            n, k = (expert_NK == e).nonzero(as_tuple=True)
            out_NM = out_NM.index_add(0, n, weight_NK[n, k, None] * expert(x_NM[n]))  # (6)
        return out_NM.view_as(x_BSM)


class SimpleLayer(nn.Module):
    """Equations (2) and (3): attention and MLP, each with a norm before it and a residual."""

    norm_class = SimpleNorm  # so in all classes: a subclass may be made of other parts
    experts_class = SimpleExperts

    def __init__(self, config, layer):
        super().__init__()
        sparse = layer in config.sparse_layers
        self.self_attn = SimpleAttention(config, layer, self.norm_class)
        width = config.intermediate_size
        self.mlp = self.experts_class(config, layer) if sparse else MLP(config, width)
        # Hugging Face's post_attention_layernorm is two things: in Gemma the norm after attention,
        # in the other families the norm before the MLP.
        self.post_norms = config.post_norms
        self.input_layernorm = self.norm_class(config.hidden_size, config)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config)
        if config.post_norms:
            self.pre_feedforward_layernorm = self.norm_class(config.hidden_size, config)
            self.post_feedforward_layernorm = self.norm_class(config.hidden_size, config)

    def forward(self, x_BSM, ropes, attention, /, **mlp_options):
        # Between layers x is never normalized. Each part adds what it computes from a norm of x, so
        # along the sums the gradient of the last layer reaches the first one undiminished.
        h_BSM = self.self_attn(self.input_layernorm(x_BSM), ropes, attention)
        if not self.post_norms:
            y_BSM = x_BSM + h_BSM  # (2)
            return y_BSM + self.mlp(self.post_attention_layernorm(y_BSM), **mlp_options)  # (3)
        y_BSM = x_BSM + self.post_attention_layernorm(h_BSM)  # (2), Gemma
        h_BSM = self.mlp(self.pre_feedforward_layernorm(y_BSM), **mlp_options)
        return y_BSM + self.post_feedforward_layernorm(h_BSM)  # (3), Gemma


class SimpleTransformer(nn.Module):
    """A causal language model: `hidden` runs its layers, `logits` and `logprobs` its head."""

    layer_class = SimpleLayer

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        self.model = nn.Module()  # Hugging Face's name for everything but the head
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.model.layers = nn.ModuleList(self.layer_class(config, n) for n in layers)
        self.model.norm = self.layer_class.norm_class(config.hidden_size, config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self):
        """The matrix of (7), (V, M)."""
        return (self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight

    def hidden(self, tokens_BS, /, *, positions=None, attention=simple_causal_attention):
        """Return the normalized states of the last layer, (B, S, M), of int64 ids (B, S).

        positions: int64, (B, S). For RoPE alone. Default: 0..S-1 in each row.
        attention: attention(q, k, v, layer=, scale=) -> (B, H, S, D), called once in each layer,
            with q (B, H, S, D) and with k and v (B, G, S, D). Sliding layers add window=.
        """
        x_BSM = self.embed_scale * self.model.embed_tokens(tokens_BS)  # (1)
        # Positions tell how far apart two tokens are, and not whether they see each other.
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1])[None]
        ropes = {}
        for kind, rope in self.config.rope_parameters.items():
            ropes[kind] = cos_and_sin(positions, simple_frequencies(rope, self.config.head_dim))
        for layer in self.model.layers:
            x_BSM = layer(x_BSM, ropes, attention)
        return self.model.norm(x_BSM)

    def logits(self, hidden, /):
        """Apply the head to states of `hidden`, which have had the norm: (..., M) -> (..., V)."""
        return F.linear(hidden, self.head_weight)  # (7)

    def logprobs(self, hidden_NM, targets_N, /, *, temperature=1.0):
        """Return (8) of the targets and (9), both (N,), given the states before the targets."""
        return ChunkedLogprobs.apply(hidden_NM, self.head_weight, targets_N, temperature, 256)


# 2. Training: log-probs and packed documents ----------------------------------------------------


def simple_logprobs(hidden_NM, weight_VM, targets_N, temperature):
    """Return (8) of each target and (9) of each distribution, both (N,)."""
    logp_NV = (F.linear(hidden_NM, weight_VM) / temperature).log_softmax(-1)
    logprobs_N = logp_NV.gather(-1, targets_N[:, None])[:, 0]  # (8)
    return logprobs_N, -(logp_NV.exp() * logp_NV).sum(-1)  # (9)


class ChunkedLogprobs(torch.autograd.Function):
    """`simple_logprobs` with the logits of one chunk in memory at a time, backward included.

    Logits are the largest tensor of training, 5 GB in float32 for 8,192 tokens and a vocabulary of
    151,936. Autograd would keep several. Here the backward computes the logits again.
    """

    @staticmethod
    def forward(ctx, hidden_NM, weight_VM, targets_N, temperature, chunk):
        ctx.save_for_backward(hidden_NM, weight_VM, targets_N)
        ctx.options = temperature, chunk
        chunks = zip(hidden_NM.split(chunk), targets_N.split(chunk))
        found = [simple_logprobs(h_nM, weight_VM, t_n, temperature) for h_nM, t_n in chunks]
        return tuple(torch.cat(parts) for parts in zip(*found))

    @staticmethod
    def backward(ctx, dlogprobs_N, dentropy_N):
        hidden_NM, weight_VM, targets_N = ctx.saved_tensors
        temperature, chunk = ctx.options
        dhidden_NM = torch.empty_like(hidden_NM)
        dweight_VM = torch.zeros_like(weight_VM)
        for start in range(0, len(targets_N), chunk):
            n = slice(start, start + chunk)
            logp_nV = (F.linear(hidden_NM[n], weight_VM) / temperature).log_softmax(-1)
            p_nV = logp_nV.exp()

            # With z = hidden weight^T / temperature, d logprob(t)/dz_u = [u = t] - p_u, and
            # d entropy/dz_u = -p_u (log p_u + entropy).
            entropy_n1 = -(p_nV * logp_nV).sum(-1, keepdim=True)
            dz_nV = -p_nV * (dlogprobs_N[n, None] + (logp_nV + entropy_n1) * dentropy_N[n, None])
            dz_nV.scatter_add_(-1, targets_N[n, None], dlogprobs_N[n, None])

            # Then back through the temperature, and to both factors of the product.
            dz_nV /= temperature
            dhidden_NM[n] = dz_nV @ weight_VM
            dweight_VM += dz_nV.T @ hidden_NM[n]
        return dhidden_NM, dweight_VM, None, None, None


def simple_packed_attention(doc_ids_BS):
    """Return an attention by which tokens see the earlier tokens of their own document only.

    doc_ids_BS: int64, (B, S). The tokens of a document are side by side and have its number.
    Padding has a number of its own. Positions may run on: RoPE depends on their differences alone.
    """
    #     doc_ids  0 0 1 1      query 0   x
    #                           query 1   x x
    #                           query 2       x
    #                           query 3       x x
    same_B1SS = (doc_ids_BS[:, :, None] == doc_ids_BS[:, None, :])[:, None]
    return partial(simple_causal_attention, mask=same_B1SS)


# 3. Generation: cache, sampling, rows -----------------------------------------------------------


class SimpleCache:
    """Keys and values of the tokens so far. The token at position p of a row is in slot p.

    row 0   k k k k . .      lengths 4 and 2, C = 6 slots: the next token of row 1 goes into
    row 1   k k . . . .      slot 2, whatever row 0 does
    """

    def __init__(self, rows, slots):
        self.lengths = [0] * rows
        self.slots = slots
        self.layers = {}  # layer -> keys and values (2, B, G, C, D)

    def attention(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
        """Write the keys and values of S new tokens a row, and attend to all tokens so far."""
        B, G, S, D = k_BGSD.shape
        if layer not in self.layers:
            self.layers[layer] = k_BGSD.new_zeros(2, B, G, self.slots, D)
        k_BGCD, v_BGCD = self.layers[layer]

        # Lengths 4 and 2, S = 2: slots [[4, 5], [2, 3]]. Indexing by tables gives (B, S, G, D).
        slot_BS = torch.tensor(self.lengths)[:, None] + torch.arange(S)
        row_B1 = torch.arange(B)[:, None]
        k_BGCD[row_B1, :, slot_BS] = k_BGSD.transpose(1, 2)
        v_BGCD[row_B1, :, slot_BS] = v_BGSD.transpose(1, 2)

        # Slots are positions, so the causal mask also hides empty slots, and what the padding of a
        # shorter row has left in later slots. The row's next tokens overwrite that.
        visible_B1SC = visible_keys(slot_BS, torch.arange(self.slots)[None], window)
        return masked_attention(q_BHSD, k_BGCD, v_BGCD, visible_B1SC, scale=scale)

    def select(self, rows):
        """Keep these rows, a list of indices, in this order."""
        self.lengths = [self.lengths[b] for b in rows]
        self.layers = {layer: kv[:, rows] for layer, kv in self.layers.items()}


@torch.no_grad()
def simple_forward_with_cache(model, cache, tokens_BS, counts, /):
    """Feed the next tokens of each row, and return the logits (B, V) after each row's last one.

    tokens_BS: int64, (B, S), padded on the right. counts: how many tokens of each row are real.
    """
    length_B1 = torch.tensor(cache.lengths, device=tokens_BS.device)[:, None]
    positions_BS = length_B1 + torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    x_BSM = model.hidden(tokens_BS, positions=positions_BS, attention=cache.attention)
    # Lengths move on only now, when all layers have written their keys.
    cache.lengths = [length + count for length, count in zip(cache.lengths, counts)]
    return model.logits(x_BSM[range(len(counts)), [count - 1 for count in counts]])


@torch.no_grad()
def sample(logits_BV, uniform_B, /, *, temperature):
    """Draw a token from each row of logits. Return tokens (B,) and their log-probs (8), (B,).

    uniform_B: float64, (B,), in [0, 1). The randomness, one number a token.
    temperature: tau of (8). 0 takes the likeliest token, with its log-prob at temperature 1.
    """
    # NUMERICS: in float64, because a running sum in float32 loses a long tail of rare tokens.
    p_BV = (logits_BV.double() / (temperature or 1)).softmax(-1)
    if temperature == 0:
        token_B1 = p_BV.argmax(-1, keepdim=True)
    else:
        # The running sum of .2 .5 .3 is .2 .7 1. It first exceeds .6 at token 1, as it does for
        # half of all numbers in [0, 1). So a token of probability 0 is never drawn, provided that a
        # number stays below the whole sum when it is multiplied by it. NaN exceeds nothing.
        sums_BV = p_BV.cumsum(-1)
        below_B1 = torch.nextafter(sums_BV[:, -1:], torch.zeros(()).double())
        at_B1 = (uniform_B[:, None] * sums_BV[:, -1:]).minimum(below_B1)
        token_B1 = torch.searchsorted(sums_BV, at_B1, right=True).clamp(max=p_BV.shape[1] - 1)
    return token_B1[:, 0], p_BV.gather(-1, token_B1)[:, 0].log()


class Row:
    """A sequence that is being generated: a prompt and the tokens after it."""

    def __init__(self, prompt, draws=()):
        self.tokens = list(prompt)
        self.draws = draws  # draws[n] in [0, 1) decides token n after the prompt, if it is sampled
        self.queue = deque()  # tokens that come next whatever is sampled: the user's next turn
        self.new = 0  # tokens after the prompt
        self.truncated = False  # ended by the limit on new tokens
        self.mask = [False] * (len(prompt) - 1)  # for each of tokens[1:]: was it sampled?
        self.logprobs = [0.0] * (len(prompt) - 1)  # for each of tokens[1:]: its log-prob, or 0

    def append(self, token, logprob):
        """Append the first queued token, or this one if none is queued. Return True if this."""
        sampled = not self.queue
        self.tokens.append(token if sampled else self.queue.popleft())
        self.mask.append(sampled)
        self.logprobs.append(logprob if sampled else 0.0)
        self.new += 1
        return sampled


def simple_generate(model, rows, *, max_new_tokens, temperature=1.0, end=(), after=None):
    """Extend rows, a list of `Row`, in place, until each has ended.

    max_new_tokens: a row with this many tokens after its prompt ends, with `truncated` set.
    end: tokens that end a turn when they are sampled.
    after: after(row), called at the end of a turn. If it returns true, the row goes on, with what
        `after` has put into its queue. Default: every row ends with its first turn.
    """
    fresh = [torch.tensor(row.tokens) for row in rows]  # tokens that the cache does not hold
    cache = SimpleCache(len(rows), max(len(tokens) for tokens in fresh) + max_new_tokens)
    while rows:
        tokens_BS = nn.utils.rnn.pad_sequence(fresh, batch_first=True)
        counts = [len(tokens) for tokens in fresh]
        logits_BV = simple_forward_with_cache(model, cache, tokens_BS, counts)

        # Each row has draws of its own, so what it gets does not depend on its neighbors.
        uniform_B = torch.tensor([row.draws[row.new] for row in rows], dtype=torch.float64)
        tokens_B, logprobs_B = sample(logits_BV, uniform_B, temperature=temperature)

        # A row takes its token. A queued end of a turn, such as the user's, ends nothing.
        going = []
        for b, row in enumerate(rows):
            ended = row.append(tokens_B[b].item(), logprobs_B[b].item()) and row.tokens[-1] in end
            goes_on = not ended or (after is not None and after(row))
            row.truncated = bool(goes_on and row.new >= max_new_tokens)
            if goes_on and not row.truncated:
                going.append(b)
        # Rows that have ended leave the batch. Of the others, the cache lacks the last token.
        cache.select(going)
        rows = [rows[b] for b in going]
        fresh = [torch.tensor(row.tokens[-1:]) for row in rows]


# 4. The same model token by token, and the check ------------------------------------------------


def logits_definition(model, tokens, /, weights=None, frequencies=simple_frequencies):
    """Return the float64 logits (S, V) of tokens (S,) by (1) to (7), without the model's code."""
    c = model.config
    weights = {n: w.double() for n, w in (weights or dict(model.named_parameters())).items()}

    def linear(name, x):
        return weights[name + ".weight"] @ x + weights.get(name + ".bias", 0)

    def norm(name, x):
        weight = weights[name + ".weight"] + (1 if c.norm_offset else 0)
        return weight * x * (x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) ** -0.5

    # Queries (G, H / G, D / 2) or keys (G, 1, D / 2) of one token, whose products bring each key
    # head to its query heads. A pair of (5) is a complex number, and e^(i angle) turns it.
    def heads(name, x, angle_d):
        y = linear(name + "_proj", x).view(c.num_key_value_heads, -1, c.head_dim)
        a, b = (norm(name + "_norm", y) if c.qk_norm else y).chunk(2, -1)
        return torch.complex(a, b) * torch.exp(1j * angle_d)

    def ffn(name, h, sparse):
        if not sparse:
            gate = ACTIVATIONS[c.hidden_act](linear(name + "gate_proj", h))
            return linear(name + "down_proj", gate * linear(name + "up_proj", h))
        p = linear(name + "gate", h).softmax(0)
        chosen = (-p - weights.get(name + "choice_bias", 0)).argsort()[: c.num_experts_per_tok]
        total = p[chosen].sum() if c.norm_topk_prob else 1
        return sum(p[e] / total * ffn(f"{name}experts.{e}.", h, False) for e in chosen.tolist())

    embed_scale = c.hidden_size**0.5 if c.scale_embedding else 1
    states = list(embed_scale * weights["model.embed_tokens.weight"][tokens])
    for n, kind in enumerate(c.layer_types):
        name = f"model.layers.{n}."
        attn = name + "self_attn."
        oldest = -c.sliding_window if kind == SLIDING else 0  # [-3:] of a list is its last 3
        keys = []
        values = []
        for i, x in enumerate(states):
            h = norm(name + "input_layernorm", x)
            angle_d = i * frequencies(c.rope_parameters[kind], c.head_dim)
            q = heads(attn + "q", h, angle_d) * (c.query_pre_attn_scalar or c.head_dim) ** -0.5
            keys.append(heads(attn + "k", h, angle_d))
            values.append(linear(attn + "v_proj", h).view(-1, 1, c.head_dim))
            scores = (q * torch.stack(keys[oldest:]).conj()).real.sum(-1, keepdim=True)
            out = (scores.softmax(0) * torch.stack(values[oldest:])).sum(0)
            h = linear(attn + "o_proj", out.flatten())

            # Gemma has a norm after each part, and another name for the norm before the MLP.
            y = x + (norm(name + "post_attention_layernorm", h) if c.post_norms else h)
            before = "pre_feedforward" if c.post_norms else "post_attention"
            h = ffn(name + "mlp.", norm(f"{name}{before}_layernorm", y), n in c.sparse_layers)
            states[i] = y + (norm(name + "post_feedforward_layernorm", h) if c.post_norms else h)
    head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
    return torch.stack([linear(head, norm("model.norm", x)) for x in states])


CHECK_FAMILIES = (
    dict(qk_norm=False, layer_types=(SLIDING, SLIDING), sliding_window=4),  # Llama, Mistral
    dict(qk_norm=False, qkv_bias=True, o_bias=True, mlp_bias=True),  # Qwen2, with every bias
    dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=8, norm_topk_prob=True,
         sparse_layers=(1,)),  # Qwen3 in layer 0, Qwen3-MoE in layer 1
    dict(norm_offset=True, post_norms=True, scale_embedding=True, query_pre_attn_scalar=9,
         hidden_act="gelu_pytorch_tanh", layer_types=(SLIDING, FULL), sliding_window=3,
         rope_parameters={FULL: {"rope_theta": 1e6}}, tie_word_embeddings=True),  # Gemma 3
)  # fmt: skip


def check_family(family, temperature):
    """Return the largest error of a model with V = 23, M = 12, 2 layers, H = 4, G = 2 and D = 6."""
    torch.manual_seed(0)
    model = SimpleTransformer(SimpleConfig(23, 12, 20, 2, 4, 2, 6, **family)).double()
    assert (model.model.norm.offset + model.model.norm.weight == 1).all()
    assert simple_frequencies({"rope_theta": 100.0}, 4).tolist() == [1.0, 0.1]
    parameters = list(model.parameters())
    for weight in parameters:
        nn.init.normal_(weight, std=0.4)

    # Documents of 5, 1 and 4 tokens: by themselves, and in a row with padding between them.
    ids = torch.tensor([[-1, 0, 0, 0, 0, 0, -2, 1, -3, 2, 2, 2, 2]])
    tokens = torch.randint(23, ids.shape)
    documents = [tokens[ids == n] for n in range(3)]
    alone = torch.cat([model.hidden(document[None])[0] for document in documents])
    packed = model.hidden(tokens, attention=simple_packed_attention(ids))[ids >= 0]
    z = torch.cat([logits_definition(model, document) for document in documents])

    # Log-probs and entropies in chunks of 4 tokens.
    targets = torch.randint(23, (10,))
    chunked = ChunkedLogprobs.apply(packed, model.head_weight, targets, 0.7, 4)
    p = (z / 0.7).softmax(-1)
    found = [model.logits(alone), model.logits(packed), *chunked]
    truth = [z, z, p[range(10), targets].log(), -(p * p.log()).sum(-1)]

    # The gradients that random gradients of all these tensors give to every parameter.
    upstream = [torch.randn_like(x) for x in truth]
    found += torch.autograd.grad(found, parameters, upstream)
    truth += torch.autograd.grad(truth, parameters, upstream)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, truth)]

    # Rows whose first two tokens are queued. Queued tokens are like two more tokens of the prompt.
    rows = [Row(document.tolist(), torch.rand(12).tolist()) for document in documents]
    for row in rows:
        row.queue.extend([3, 9])  # 3 is an end, but nobody sampled it
    options = dict(max_new_tokens=12, end=range(7), after=lambda row: 2 < row.new < 8)
    simple_generate(model, rows, temperature=temperature, **options)
    for row, document in zip(rows, documents):
        plain = [*document.tolist(), 3, 9]
        z_SV = logits_definition(model, torch.tensor(row.tokens))
        logp_SV = (z_SV / (temperature or 1)).log_softmax(-1)
        for u, logp_V in zip(row.draws[2:], logp_SV[len(document) + 1 :]):
            below = [logp_V[: t + 1].exp().sum() <= u for t in range(23)]
            plain.append(int(sum(below) if temperature else logp_V.argmax()))
            if plain[-1] < 7 and len(plain) >= len(document) + 8:
                break
        mask = [False] * (len(document) + 1) + [True] * (row.new - 2)
        assert row.tokens == plain and row.mask == mask
        logprobs = logp_SV[range(len(mask)), plain[1:]] * torch.tensor(mask)
        errors.append((torch.tensor(row.logprobs, dtype=z.dtype) - logprobs).abs().max().item())
    return torch.tensor(errors).max()  # NaN if any error is NaN


def core_main(argv):
    """Check the core. Print its largest error, and exit with 1 unless that is at most 1e-10."""
    errors = [check_family(family, tau) for family in CHECK_FAMILIES for tau in (0.0, 0.8)]
    error = torch.stack(errors).max().item()
    print(f"largest error of models.py's core: {error:.1e}")
    if not error <= 1e-10:
        sys.exit(1)


# ================================================================================================
# The core ends here. The full version follows: any dtype, split models, checkpoints, guards.
# ================================================================================================
#
# What it must equal, in addition to (1) to (9):
#
#     (7')  z_i     = c tanh(head norm(x_i) / c), if there is a final soft cap c (Gemma 2's)
#     (6')  experts = the K largest of p_e + b_e, where the bias b evens out the experts' load
#     (10)  balance = coef sum_s E / (K T_s^2) sum_e n_se sum_(i in s) p_ie, over sequences s of T_s
#                     tokens, n_se of whose T_s K choices fell on e (a constant for the gradient)
#     (11)  b_e     = rate * (steps in which e had less than the mean load - steps it had more)
#
# Cost per token: 2 flops forward and 4 backward for each parameter outside the embedding that the
# token meets (K of the E experts), and 4 S H D forward per layer in attention, of which a causal
# mask hides half. The cache holds 2 G D numbers per token and layer, in sliding layers for about
# one and a half windows at most.
#
# Not here: dropout (no released model has any), quantized weights, vision towers, shared experts.
#
# References: Llama arXiv:2407.21783; Mistral arXiv:2310.06825; Qwen2 arXiv:2407.10671; Qwen3
# arXiv:2505.09388; Gemma 3 arXiv:2503.19786; RoPE arXiv:2104.09864; RMSNorm arXiv:1910.07467; GQA
# arXiv:2305.13245; YaRN arXiv:2309.00071; DeepSeek-V3 arXiv:2412.19437, equations 16 to 20; the
# bias (11) arXiv:2408.15664.
#
# More letters: I width of an expert, J pairs of a sequence and a token, R prompts, L slots of a
# prompt, U documents of one length L, h query heads of a key head times new tokens, v the part of
# the vocabulary on this rank.

import dataclasses  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import reprlib  # noqa: E402
from collections import Counter  # noqa: E402
from functools import reduce  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor._utils import (  # noqa: E402
    compute_local_shape_and_global_offset as local_shape_and_offset,
)

# 5. Configuration, RoPE for long contexts --------------------------------------------------------
# `ModelConfig` adds to `SimpleConfig` what checkpoints, critics and balanced routers need, and
# refuses values that make no model.


@dataclass
class ModelConfig(SimpleConfig):
    """The shape of a `Transformer`. ValueError for values that describe no model.

    Field names are Hugging Face's wherever it has one. A family is a set of values: see FAMILIES.
    """

    model_type: str = "qwen3"  # a key of FAMILIES
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    final_logit_softcapping: float | None = None  # c of (7')
    router_bias_rate: float = 0.0  # the rate of (11). 0: the router has no bias
    value_head: bool = False  # a critic, see `Transformer.values`

    def __post_init__(self):
        sizes = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
            "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
        )  # fmt: skip
        for name in sizes:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected a positive integer, got {reprlib.repr(size)}")

            # Bytes of a matrix must fit into 63 bits, and RoPE allocates head_dim / 2 frequencies.
            most = 2**16 if name in ("num_hidden_layers", "head_dim") else 2**28
            if size > most:
                raise ValueError(f"{name}: expected at most {most}, got {size}")
        given = self.rope_parameters
        super().__post_init__()

        # What is needed -> is it met?
        layers = range(self.num_hidden_layers)
        kinds = set(self.layer_types)
        experts = (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size)
        needs = {
            f"layer_types: {len(layers)} of {FULL} or {SLIDING}":
                len(self.layer_types) == len(layers) and kinds <= {FULL, SLIDING},
            "num_attention_heads: a multiple of num_key_value_heads":
                self.num_attention_heads % self.num_key_value_heads == 0,
            "head_dim: an even number, for RoPE": self.head_dim % 2 == 0,
            f"hidden_act (or hidden_activation): one of {[*ACTIVATIONS]}":
                self.hidden_act in ACTIVATIONS,
            "sliding_window: a positive number, for sliding layers":
                SLIDING not in kinds or (self.sliding_window or 0) > 0,
            "sparse_layers: numbers of layers": set(self.sparse_layers) <= set(layers),
            "num_experts, num_experts_per_tok, moe_intermediate_size: positive in sparse layers":
                not self.sparse_layers or min(experts) > 0,
            "num_experts_per_tok: at most num_experts":
                self.num_experts_per_tok <= self.num_experts,
            "rms_norm_eps, initializer_range, router_bias_rate: not negative":
                min(self.rms_norm_eps, self.initializer_range, self.router_bias_rate) >= 0,
            "query_pre_attn_scalar, final_logit_softcapping: positive, or null":
                all(x is None or x > 0
                    for x in (self.query_pre_attn_scalar, self.final_logit_softcapping)),
            "eos_token_id: integers": all(isinstance(token, int) for token in self.eos_token_id),
            f"rope_parameters: for {FULL} or {SLIDING} layers": set(given) <= {FULL, SLIDING},
        }  # fmt: skip
        wrong = [need for need, met in needs.items() if not met]
        if wrong:
            raise ValueError(f"a {self.model_type} config needs {'; '.join(wrong)}; got {self}")
        for kind, rope in self.rope_parameters.items():
            self.rope_parameters[kind] = self._complete_rope(rope)

    def _complete_rope(self, rope):
        """Return RoPE parameters with their defaults; ValueError for what (5) does not cover."""
        rope = {"rope_type": "default"} | rope
        kind = rope["rope_type"]
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type: expected one of {[*ROPE_TYPES]}, got {kind!r}")
        needed, optional = ROPE_TYPES[kind]
        if "original_max_position_embeddings" in needed:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)

        # A key that is not known here may change the angles, so it is refused and not ignored.
        unknown = sorted(rope.keys() - {"rope_type", "rope_theta", *needed, *optional})
        missing = [key for key in needed if rope.get(key) is None]
        if unknown or missing:
            raise ValueError(
                f"rope_parameters of rope_type {kind}: expected {['rope_theta', *needed]}, unknown "
                f"{unknown}, missing {missing}"
            )

        # Numbers that are possible one by one may still divide by zero together.
        try:
            f_d, factor = rope_frequencies(rope, self.head_dim)
            if not (f_d.isfinite().all() and math.isfinite(factor)):
                raise ValueError("they are not finite")
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ValueError(f"rope_parameters {rope} give no angles: {error}") from error
        return rope

    @classmethod
    def from_hf(cls, raw, /) -> "ModelConfig":
        """Read a Hugging Face config: a directory, a config.json, or the dict itself.

        Absent fields get transformers' defaults. A field that would change the numbers and is not
        implemented is a ValueError that names it.
        """
        if isinstance(raw, dict):
            return read_config(raw)
        path = Path(raw) / "config.json" if Path(raw).is_dir() else Path(raw)
        raw = read_json(path, what="the config of a Hugging Face checkpoint directory")
        try:
            return read_config(raw)
        except ValueError as error:  # whatever is wrong with a field, say in which file
            raise ValueError(f"{path}: {error}") from error

    def to_hf(self) -> dict:
        """Return the config.json that transformers 4 and 5 and `from_hf` read back to this."""
        return write_config(self)


ROPE_TYPES = {  # rope_type -> the keys that it needs, and those that it may have
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings"), ()),
    "yarn": (("factor", "original_max_position_embeddings"),
             ("attention_factor", "beta_fast", "beta_slow")),
}  # fmt: skip


def rope_frequencies(rope, head_dim, /):
    """Return f of (5), (D/2,) float64 on the CPU, and a factor for cos and sin.

    rope: {"rope_type", "rope_theta", ..}. The types other than default reach beyond the lengths of
        the training, by turning more slowly.
    """
    with torch.device("cpu"):
        f_d = simple_frequencies(rope, head_dim)
        n_d = torch.arange(head_dim // 2, dtype=torch.float64)
    factor = rope.get("factor")
    if rope["rope_type"] == "linear":
        return f_d / factor, 1.0

    # Llama 3: pairs that turn often over the trained length stay as they are, pairs that turn
    # seldom are divided by the factor, and in between the two are mixed.
    if rope["rope_type"] == "llama3":
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        turns_d = rope["original_max_position_embeddings"] * f_d / (2 * math.pi)
        keep_d = ((turns_d - low) / (high - low)).clamp(0, 1)
        return torch.lerp(f_d / factor, f_d, keep_d), 1.0

    # YaRN: the same with a ramp that is linear in n, between the n that turn beta times. The factor
    # on cos and sin keeps attention as sharp as before the stretching.
    if rope["rope_type"] == "yarn":
        trained = rope["original_max_position_embeddings"] / (2 * math.pi)
        scale = head_dim / (2 * math.log(rope["rope_theta"]))
        low = max(math.floor(scale * math.log(trained / (rope.get("beta_fast") or 32))), 0)
        high = math.ceil(scale * math.log(trained / (rope.get("beta_slow") or 1)))
        high = min(high, head_dim - 1)
        stretched_d = ((n_d - low) / ((high - low) or 0.001)).clamp(0, 1)
        grown = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return torch.lerp(f_d, f_d / factor, stretched_d), rope.get("attention_factor") or grown
    return f_d, 1.0


class Rope:
    """positions (B, S) -> {layer type: (cos, sin)}, once a forward for all layers."""

    def __init__(self, config):
        ropes = config.rope_parameters.items()
        self.frequencies = {kind: rope_frequencies(rope, config.head_dim) for kind, rope in ropes}
        self.moved = {}  # (device, layer type) -> f of (5) there, as each copy waits for the device

    def __call__(self, positions_BS, dtype, /):
        # NUMERICS: the angles of position 10^5 need float32; a bf16 position is wrong from 257 on.
        # Pinned by tests/test_models.py::test_bf16_model_keeps_float32_rope_angles.
        wide = torch.promote_types(dtype, torch.float32)
        ropes = {}
        for kind, (f_d, factor) in self.frequencies.items():
            at = positions_BS.device, kind
            if at not in self.moved:
                self.moved[at] = f_d.to(positions_BS.device)
            cos_BS1D, sin_BS1D = cos_and_sin(positions_BS.to(wide), self.moved[at].to(wide))
            ropes[kind] = cos_BS1D * factor, sin_BS1D * factor
        return ropes


# 6. The model ------------------------------------------------------------------------------------
# The core's classes, made for float16 and bfloat16, for models that are split over ranks, and for
# mixtures of experts whose load is balanced.


class RMSNorm(SimpleNorm):
    """Adds to `SimpleNorm`: lower precision, and states that are wider than the weights."""

    def forward(self, x, /):
        # NUMERICS: torch's kernel accumulates the mean square of bf16/fp16 input in float32 and of
        # float64 in float64, and casts once, after w (transformers casts before w too). Pinned by
        # tests/test_models.py::test_rms_norm_accumulates_in_float32.
        if not self.offset:
            weight = self.weight.to(x.dtype)
            return F.rms_norm(x, weight.shape, weight, self.eps).to(self.weight.dtype)  # (4)
        # NUMERICS: in bf16 1 + w drops every w below 2^-8; Gemma adds and multiplies in float32 and
        # casts last. Pinned by tests/test_models.py::test_gemma_norm_keeps_small_weights.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.offset + self.weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(self.weight.dtype)


def causal_attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
    """Attend from token i of each row to tokens 0..i, or to the last `window` of them.

    The default of `Transformer.hidden`. With a window the cost is O(S window).
    """
    S = q_BHSD.shape[2]
    if window is None or window >= S:
        return masked_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, scale=scale)

    # Blocks of queries, against the keys that they can see. With window 2 and blocks of 3 queries:
    #
    #     queries 0 1 2   keys 0 1 2          (blocks have at least 128, one kernel call each)
    #     queries 3 4 5   keys 2 3 4 5        the first query sees window - 1 keys before it
    place_1S = torch.arange(S, device=q_BHSD.device)[None]
    block = max(window, 128)
    out = []
    for start in range(0, S, block):
        queries = slice(start, start + block)
        keys = slice(max(0, start - window + 1), start + block)
        visible = visible_keys(place_1S[:, queries], place_1S[:, keys], window)
        qkv = q_BHSD[:, :, queries], k_BGSD[:, :, keys], v_BGSD[:, :, keys]
        out.append(masked_attention(*qkv, visible, scale=scale))
    return torch.cat(out, 2)


class SparseMLP(nn.Module):
    """Adds to `SimpleExperts`: all experts in one product, a balance loss, a bias of the router.

    A mixture-of-experts layer sums the selected experts' outputs, weighted by router probability.
    The bias b = rate * votes affects the selection only. (11) counts the votes.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.top_k = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.rate = config.router_bias_rate
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        if self.rate:
            # NUMERICS: votes are whole steps of b. b is not stored, so no cast of the model rounds
            # it. Pinned by tests/test_families.py::test_the_router_bias_survives_bfloat16.
            self.register_buffer("votes", torch.zeros(config.num_experts, dtype=torch.int64))

    def forward(self, x_BSM, /, on_routing=None):
        x_NM = x_BSM.flatten(0, -2)
        probs_NE, topk_ids_NK, topk_weights_NK = self.route(x_NM)

        # Each token is copied K times, and the copies are sorted by expert, so that the rows of an
        # expert lie together. Two tokens with K = 2 of E = 3 experts:
        #
        #     topk_ids_NK [[2, 0], [1, 2]]   flattened 2 0 1 2
        #     order       [1, 2, 0, 3]       copy 1 goes to expert 0, copy 2 to 1, 0 and 3 to 2
        #     counts_E    [1, 1, 2]          and order.argsort() = [2, 0, 1, 3] is the way back
        #
        # NUMERICS: permutations and then one sum over K: nothing is added in the order that threads
        # arrive, forward or backward. Pinned by tests/test_families.py::test_moe_is_repeatable.
        order = topk_ids_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(topk_ids_NK.flatten(), minlength=probs_NE.shape[1])
        copies_nM = x_NM[:, None].expand(-1, self.top_k, -1).flatten(0, 1)
        out_nM = self.experts(copies_nM.index_select(0, order), counts_E)
        out_NKM = out_nM.index_select(0, order.argsort()).unflatten(0, (-1, self.top_k))
        out_BSM = (out_NKM * topk_weights_NK[:, :, None]).sum(1).view_as(x_BSM)  # (6')

        # The balance loss (10) is not returned. `AttachLoss` returns the output as it is, and its
        # backward adds the gradient of the loss, in whichever pipeline stage this layer runs.
        loss = on_routing(probs_NE, topk_ids_NK, layer=self.layer) if on_routing else None
        return out_BSM if loss is None else AttachLoss.apply(out_BSM, loss)

    def route(self, x_NM, /):
        """Return p (N, E), the ids of the selected experts (N, K), and their weights (N, K)."""
        # NUMERICS: softmax and its sum in float32 or better, weights cast back, as the models were
        # trained. Pinned by tests/test_families.py::test_the_router_works_in_float32.
        wide = torch.promote_types(x_NM.dtype, torch.float32)
        probs_NE = self.gate(x_NM).softmax(-1, dtype=wide)
        biased_NE = probs_NE + self.rate * self.votes if self.rate else probs_NE
        topk_ids_NK = biased_NE.topk(self.top_k, dim=-1).indices
        topk_weights_NK = probs_NE.gather(-1, topk_ids_NK)
        if self.normalize:
            topk_weights_NK = topk_weights_NK / topk_weights_NK.sum(-1, keepdim=True)
        return probs_NE, topk_ids_NK, topk_weights_NK.to(x_NM.dtype)


class Layer(SimpleLayer):
    """Adds to `SimpleLayer`: a callback that receives the routing of its experts."""

    norm_class = RMSNorm
    experts_class = SparseMLP

    def forward(self, x_BSM, ropes, attention, on_routing=None, /):
        # A dense MLP has no router, and takes no option.
        options = {"on_routing": on_routing} if hasattr(self.mlp, "experts") else {}
        return super().forward(x_BSM, ropes, attention, **options)


class Transformer(SimpleTransformer):
    """Adds to `SimpleTransformer`: any dtype, split vocabularies, a value head, guards.

    `forward(tokens)` gives logits (B, S, V). Training calls its two halves: `.hidden(tokens)`
    stops before the head, (B, S, M), and `.logprobs(hidden, targets)` applies the head in chunks
    to what is scored. Tied embeddings are one parameter, `model.embed_tokens.weight`: no `lm_head`.
    """

    layer_class = Layer

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.rope = Rope(config)
        self.attention = causal_attention  # used unless `hidden` is given another one
        self.residual_dtype = None  # of the states between layers. None: as the weights
        if config.value_head:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def hidden(self, tokens_BS, /, *, positions=None, attention=None, on_routing=None):
        """Return the normalized states of the last layer, (B, S, M).

        tokens_BS: int64, (B, S). Token ids; or states (B, S, M) of a floating dtype, which later
            stages of a pipeline get from the stage before. They are not scaled as embeddings are.
        positions: int64, (B, S). For RoPE only. Default: 0..S-1.
        attention: attention(q, k, v, layer=, scale=) -> (B, H, S, D), with q (B, H, S, D) and with
            k and v (B, G, S, D). Sliding layers add window=. Default: `self.attention`.
        on_routing: on_routing(p (N, E), ids of experts (N, K), layer=), called once in each sparse
            layer. It returns a loss to attach, or None. Such as a `Balance`. Default: no call.

        ValueError for other shapes, and on a CPU for ids that are not in the vocabulary.
        """
        if tokens_BS.dim() != (3 if tokens_BS.is_floating_point() else 2):
            found = tuple(tokens_BS.shape)
            raise ValueError(f"tokens: expected (B, S), or states (B, S, M), got {found}")
        x_BSM = tokens_BS if tokens_BS.is_floating_point() else self.embed(tokens_BS)

        # In mixed precision the sum of all layers stays wide, and each layer computes narrow: its
        # norms cast to the dtype of the weights.
        x_BSM = x_BSM.to(self.residual_dtype or x_BSM.dtype)
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=x_BSM.device)[None]
        ropes = self.rope(positions, x_BSM.dtype)
        for layer in self.model.layers:
            x_BSM = layer(x_BSM, ropes, attention or self.attention, on_routing)
        return self.model.norm(x_BSM)

    def embed(self, tokens_BS, /):
        """Return the embeddings of tokens, (1): (B, S) -> (B, S, M)."""
        # Ids are checked here and not in embed_tokens, which tensor parallelism replaces. There
        # each rank has some rows, and a token that no rank has would silently become zeros.
        self.require_tokens(tokens_BS)
        x_BSM = self.model.embed_tokens(tokens_BS)  # (1)
        if not self.config.scale_embedding:
            return x_BSM
        # NUMERICS: the checkpoint was trained with sqrt(M) rounded to the weight's dtype: in bf16
        # sqrt(3072) is 55.5. Pinned by tests/test_models.py::test_gemma_scales_by_a_rounded_root.
        return x_BSM * torch.tensor(self.embed_scale, dtype=x_BSM.dtype).item()

    def lm_head_shard(self):
        """Return this rank's rows of `head_weight`, and the options of `token_logprobs` that say
        which rows they are. Tensor parallelism replaces this method."""
        return self.head_weight, {}

    def logits(self, hidden, /):
        """Apply the head to states of `hidden`: (..., M) -> (..., V), in the model's dtype."""
        weight_vM, shard = self.lm_head_shard()
        z = F.linear(hidden, weight_vM)
        cap = self.config.final_logit_softcapping
        z = cap * torch.tanh(z / cap) if cap else z  # (7')
        return all_gather_logits(z, shard["group"], self.config.vocab_size) if shard else z

    def forward(self, tokens_BS, /, **options):
        """Return the logits (B, S, V) in the model's dtype. The options are those of `hidden`."""
        return self.logits(self.hidden(tokens_BS, **options))

    def logprobs(self, hidden, targets, /, *, temperature: float = 1.0):
        """Return (8) and (9) of targets (N,) given hidden (N, M): two (N,), float32 or better."""
        weight_vM, shard = self.lm_head_shard()
        return token_logprobs(
            hidden, weight_vM, targets, temperature=temperature,
            softcap=self.config.final_logit_softcapping, vocab_size=self.config.vocab_size, **shard,
        )  # fmt: skip

    def values(self, hidden, /):
        """Return a critic's value of each state, (..., M) -> (...), in float32 or better."""
        if not self.config.value_head:
            raise ValueError("this model has no value head; call add_value_head() first")
        value = self.score(hidden)[..., 0]
        return value.to(torch.promote_types(value.dtype, torch.float32))

    def add_value_head(self) -> "Transformer":
        """Give a model without one a value head of zeros: a critic starts from a policy."""
        if not self.config.value_head:
            self.config = dataclasses.replace(self.config, value_head=True)
            weight = self.head_weight
            self.score = nn.Linear(weight.shape[1], 1, False, weight.device, weight.dtype)
            nn.init.zeros_(self.score.weight)
        return self

    def init_weights(self, seed: int) -> "Transformer":
        """Draw all weights from a seed, the same ones in every dtype; see `draw_weights`."""
        return draw_weights(self, seed)

    def require_tokens(self, tokens, /) -> None:
        """Raise a ValueError unless all token ids are in the vocabulary (on a GPU, later)."""
        require_tokens_in_vocabulary(tokens, self.config.vocab_size)


def require_tokens_in_vocabulary(tokens, vocab_size, /, *, what="token") -> None:
    """Refuse token ids that are not in 0..vocab_size - 1.

    On the CPU a ValueError names the first such id and its place. On a GPU an assertion of the
    device ends the process at some later call, because otherwise each forward would wait for it.
    """
    outside = (tokens < 0) | (tokens >= vocab_size)  # looked at on the CPU only, where it is cheap
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(~outside.any(), f"a {what} id is outside of 0..{vocab_size - 1}")
        return
    if not outside.any():
        return
    place = outside.nonzero()[0].tolist()
    where = f"row {place[0]}, column {place[1]}" if len(place) == 2 else f"place {place[0]}"
    raise ValueError(f"{what} id {tokens[tuple(place)].item()} at {where} is not in the vocabulary "
                     f"of {vocab_size}: ids are 0..{vocab_size - 1}")  # fmt: skip


@torch.no_grad()
def draw_weights(model, seed: int, whole=None):
    """Draw normal(0, initializer_range) matrices, unit norms and zero biases, and return the model.

    model: it may be a rank's part of a model, of `parallelize` or with DTensors.
    seed: decides all weights, which are the same in every dtype and under every plan.
    whole: a model, as of `load_hf`, that has the shapes of all parameters. Default: `model`.

    A value head starts with zeros, so that the first values are 0.
    """
    generator = torch.Generator().manual_seed(seed)
    own = dict(model.named_parameters())
    for name, shape in whole_shapes(whole or model).items():
        # One whole tensor at a time, also of parameters that are not on this rank: the draws of a
        # tensor follow the draws of the tensor before it. In float32 on the CPU, so that dtype and
        # device do not change the draw.
        if name.endswith("norm.weight"):
            weight = torch.full(shape, 0.0 if model.config.norm_offset else 1.0)
        elif name.endswith("bias") or name == "score.weight":
            weight = torch.zeros(shape)
        else:
            weight = torch.randn(shape, generator=generator, dtype=torch.float32)
            weight *= model.config.initializer_range
        if name in own:
            local, region = local_part(model, name, own[name])
            local.copy_(weight[region])
    for buffer in model.buffers():
        buffer.zero_()
    return model


def local_part(model, name, parameter):
    """Return this rank's tensor of a parameter, and which part of the whole it is, as slices."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if hasattr(model, "part"):  # of `parallelize`
        return local, model.part.places[name].region
    sizes = parameter.shape
    starts = [0] * len(sizes)
    if isinstance(parameter, DTensor):
        how = parameter.device_mesh, parameter.placements
        sizes, starts = local_shape_and_offset(parameter.shape, *how)
    return local, tuple(slice(a, a + n) for a, n in zip(starts, sizes))


def whole_shapes(model) -> dict:
    """Return name -> shape of each parameter, before `parallelize` has split the model."""
    places = model.part.places if hasattr(model, "part") else {}
    return {name: places[name].shape if name in places else tuple(p.shape)
            for name, p in model.named_parameters()}  # fmt: skip


# 7. Experts: their product, the balance of their load --------------------------------------------
# For training mixtures of experts. Skip it for dense models.


class Experts(nn.Module):
    """ffn_e of (6') for rows that are sorted by expert: (N, M), counts (E,) -> (N, M)."""

    def __init__(self, config):
        super().__init__()
        E = config.num_experts
        M = config.hidden_size
        INNER = config.moe_intermediate_size
        self.act = ACTIVATIONS[config.hidden_act]
        # One tensor for all experts of a kind. A checkpoint has one for each: `stored_tensors`.
        self.gate_proj = nn.Parameter(torch.empty(E, INNER, M))
        self.up_proj = nn.Parameter(torch.empty(E, INNER, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, INNER))
        for weight in self.parameters():
            nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, x_NM, counts_E, /):
        gate_NI = grouped_linear(x_NM, self.gate_proj, counts_E)
        up_NI = grouped_linear(x_NM, self.up_proj, counts_E)
        return grouped_linear(self.act(gate_NI) * up_NI, self.down_proj, counts_E)


def grouped_linear(x_NM, weight_EIM, counts_E, /):
    """Return x[n] @ weight[e(n)].T, (N, I): the first counts[0] rows go to expert 0, and so on.

    counts_E: int64, (E,), sums to N. Zeros are fine.
    """
    # torch has this as one kernel, for some dtypes, rows of 16 bytes, and one row at least.
    dtypes = [torch.bfloat16]
    if x_NM.device.type == "cpu":
        dtypes += [torch.float32, torch.float16]
    aligned = all(size * x_NM.element_size() % 16 == 0 for size in weight_EIM.shape[1:])
    if x_NM.dtype == weight_EIM.dtype and x_NM.dtype in dtypes and aligned and len(x_NM) > 0:
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_NM, weight_EIM.transpose(1, 2), offs=offsets_E)
    # The loop is its definition.
    parts = zip(x_NM.split(counts_E.tolist()), weight_EIM, strict=True)
    return torch.cat([F.linear(x_nM, weight_IM) for x_nM, weight_IM in parts])


class AttachLoss(torch.autograd.Function):
    """Return x as it is, and add the gradient of a loss to every backward that reaches x.

    So a layer adds a loss of its own wherever it runs, in a pipeline stage too.
    """

    @staticmethod
    def forward(ctx, x, loss):
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.one


class Balance:
    """(10) over the sparse layers of one forward: `hidden(.., on_routing=Balance(..))`.

    sequence_J, token_J: int64, (J,). Pair j says that sequence sequence_J[j] holds the forward's
        token token_J[j], counted over its B x S tokens. A token that several sequences share has a
        pair for each of them; padding has none. Default of token_J: 0..J-1.
    coef: the factor of (10).
    num_sequences: how many sequences there are on all ranks of `groups`. Default: the largest + 1.
    groups: process groups whose ranks share the tokens of each sequence, one group for each way of
        sharing. A rank gives the pairs of its own tokens, and gets terms of a sum over the ranks.

    The layers attach the loss to their outputs, so every backward adds its gradient. It is a sum
    over sequences, so micro-batches and ranks add up. After the forward, losses[layer] is (10),
    detached, and counts[layer] (E,) the tokens that each expert got, for `update_router_bias`.
    """

    def __init__(self, sequence_J, /, token_J=None, *, coef=0.0, num_sequences=None, groups=()):
        if token_J is None:
            token_J = torch.arange(len(sequence_J), device=sequence_J.device)
        if sequence_J.shape != token_J.shape or sequence_J.dim() != 1:
            found = f"{tuple(sequence_J.shape)} and {tuple(token_J.shape)}"
            raise ValueError(f"sequences and tokens: expected two tensors (J,), got {found}")
        if num_sequences is None:
            num_sequences = int(sequence_J.max()) + 1 if len(sequence_J) else 0
        self.sequence_J = sequence_J
        self.token_J = token_J
        self.coef = coef
        self.num_sequences = num_sequences
        self.groups = groups
        self.losses = {}  # by layer: a layer that is computed again overwrites its own
        self.counts = {}

    @torch.compiler.disable  # each forward has an object of its own, for which nothing is compiled
    def __call__(self, probs_NE, topk_ids_NK, /, *, layer):
        # n_se of (10): each pair (sequence, token) adds the token's K choices to its sequence.
        N, E = probs_NE.shape
        K = topk_ids_NK.shape[1]
        chosen_NE = probs_NE.new_zeros(N, E).scatter_(1, topk_ids_NK, 1)
        n_SE = probs_NE.new_zeros(self.num_sequences, E)
        n_SE.index_add_(0, self.sequence_J, chosen_NE[self.token_J])
        self.counts[layer] = n_SE.sum(0)
        if not self.coef or not self.num_sequences:
            return None

        # COMM: n is about whole sequences, and this rank has seen some tokens of them. All ranks of
        # a group run the same layers of the same micro-batches, and recompute the same layers, so
        # every all-reduce meets its counterparts. p needs no message, as each rank attaches the
        # loss of its own tokens. Pinned by tests/test_balance.py::test_a_rank_sees_some_tokens.
        for group in self.groups:
            dist.all_reduce(n_SE, group=group)

        # All but p is a constant: collect it for each token and expert, then one product with p.
        length_S1 = n_SE.sum(1, keepdim=True) / K
        factor_SE = self.coef * E / K * n_SE / length_S1.square().clamp(min=1)
        factor_NE = torch.zeros_like(chosen_NE)
        factor_NE.index_add_(0, self.token_J, factor_SE[self.sequence_J])
        loss = (factor_NE * probs_NE).sum()  # (10)
        self.losses[layer] = loss.detach()
        return loss


@torch.no_grad()
def update_router_bias(model, counts, /):
    """Move the routers' biases by (11), after an optimizer step.

    counts: {layer: (E,)}, the tokens of each expert in the whole step, over all ranks.
    """
    # By the numbers of the layers: a stage of a pipeline has only some of them.
    routers = {module.layer: module for module in model.modules() if hasattr(module, "votes")}
    for layer, counts_E in counts.items():
        if layer not in routers:
            raise ValueError(f"layer {layer} has no router bias; set config.router_bias_rate")
        counts_E = counts_E.double()
        routers[layer].votes += (counts_E.mean() - counts_E).sign().long()  # (11)


def give_router_bias(model, rate: float) -> Transformer:
    """Give a model without one the bias b of (6'), which is 0 until (11) moves it."""
    model.config = dataclasses.replace(model.config, router_bias_rate=rate)
    for module in model.modules():
        if isinstance(module, SparseMLP):
            module.rate = rate
            votes_E = torch.zeros(model.config.num_experts, dtype=torch.int64)
            module.register_buffer("votes", votes_E.to(module.gate.weight.device))
    return model


# 8. Log-probs in chunks, of any dtype, with a vocabulary that is split over ranks ----------------
# Adds to `ChunkedLogprobs`: sums over ranks, a soft cap, sums in float32, and less work in the
# backward for small vocabularies.

LOGITS = 2**22  # held at a time by default: 16 MiB in float32
CACHED_LOGITS = 2**19  # what a CPU core's cache holds: 2 MiB in float32


class LogprobOptions(NamedTuple):
    """What `token_logprobs` tells its forward and backward."""

    temperature: float
    softcap: float | None
    chunk: int  # rows of hidden at a time
    kept: int  # number of chunks whose exponentials stay for the backward
    group: object  # None, or the process group that shares the rows of the vocabulary
    vocab_start: int


def token_logprobs(
    hidden_NM, weight_vM, targets_N, /, *, temperature=1.0, softcap=None, chunk=None,
    group=None, vocab_start=0, vocab_size=None,
):  # fmt: skip
    """Return the log-prob of each target, (8), and the entropy of each distribution, (9).

    Both are (N,) in float32 (float64 for float64), differentiable in hidden and weight. No tensor
    is larger than (chunk, V), but for LOGITS numbers that stay for the backward. ValueError for
    other shapes and for targets that are not in 0..V-1.

    hidden_NM, weight_vM: (N, M) and (V, M), of one floating dtype.
    targets_N: int64, (N,), in 0..V-1.
    temperature: tau of (8).
    softcap: c of (7'), applied before the temperature.
    chunk: rows of hidden per matmul. Default: LOGITS / V (on a CPU CACHED_LOGITS / V), but at least
        128, and at most half of N.
    group: vocabulary-parallel. Every rank of the group calls with the same hidden and targets, and
        with its rows of the weight. Every rank gets the same results, the whole gradient of
        hidden, and its rows' gradient of the weight.
    vocab_start: this rank has the v rows of the vocabulary from there on.
    vocab_size: V, for the ranks of a group. Without it a target in nobody's rows gives -inf.
    """
    if hidden_NM.dim() != 2 or targets_N.shape != hidden_NM.shape[:1]:
        found = f"{tuple(hidden_NM.shape)} and {tuple(targets_N.shape)}"
        raise ValueError(f"hidden and targets: expected (N, M) and (N,), got {found}")
    if not temperature > 0 or chunk is not None and chunk < 1:
        raise ValueError(f"temperature and chunk: expected positive, got {temperature} and {chunk}")
    v = len(weight_vM)
    if vocab_size is not None or group is None:
        require_tokens_in_vocabulary(targets_N, vocab_size or v, what="target")

    # On a CPU the logits of a chunk are to stay in the core's cache while they are passed over. At
    # least two chunks, so that less than all is held.
    kept = 0
    if chunk is None:
        held = CACHED_LOGITS if weight_vM.device.type == "cpu" else LOGITS
        chunk = max(1, min((len(targets_N) + 1) // 2, max(128, held // v)))
        if torch.is_grad_enabled() and softcap is None:
            kept = min(LOGITS // (chunk * v), -(-len(targets_N) // chunk))
    options = LogprobOptions(temperature, softcap, chunk, kept, group, vocab_start)
    return TokenLogprobs.apply(hidden_NM, weight_vM, targets_N, options)


class TokenLogprobs(torch.autograd.Function):
    """(8) and (9), and d logprob(t)/dz = onehot(t) - p, d entropy/dz = -p (log p + entropy).

    A chunk's logits are dropped, and computed again in the backward, for 2 M V flops a token. The
    exponentials of the last chunks are kept, for the backward of log-probs alone.
    """

    @staticmethod
    def forward(ctx, hidden_NM, weight_vM, targets_N, options):
        # A chunk's logits z become five numbers a token: the largest, m; the target's; the sums
        # total = sum e^(z - m) and weighted = sum (z - m) e^(z - m); and how many ranks own the
        # target. Both results come from these, and the backward needs only lse and the mean of z.
        dtype = torch.promote_types(hidden_NM.dtype, torch.float32)
        sums_4N = torch.zeros(4, len(targets_N), dtype=dtype, device=hidden_NM.device)
        largest_N = torch.empty(len(targets_N), dtype=dtype, device=hidden_NM.device)
        ctx.exponentials = {}  # first token of a chunk -> e^(z - m), and its m
        starts = range(0, len(targets_N), options.chunk)

        # Memory for one chunk after the other: new pages would cost as much as what fills them.
        size = min(options.chunk, len(targets_N)), len(weight_vM)
        product_nv = hidden_NM.new_empty(size)
        exponential_nv = sums_4N.new_empty(size)
        for n in starts:
            rows = slice(n, n + options.chunk)
            count = min(options.chunk, len(targets_N) - n)
            z_nv = scaled_logits(hidden_NM[rows], weight_vM, options, product_nv[:count])
            local_n1, owned_n1 = local_targets(targets_N[rows], len(weight_vM), options)
            target_n = torch.where(owned_n1, z_nv.gather(-1, local_n1), 0)[:, 0]

            # In place wherever possible: z becomes z - m, and then (z - m) e^(z - m).
            largest_N[rows] = z_nv.amax(-1)
            shifted_nv = z_nv.sub_(largest_N[rows, None])
            keep = n in starts[len(starts) - options.kept :]
            e_nv = torch.exp(shifted_nv, out=None if keep else exponential_nv[:count])
            weighted_n = shifted_nv.mul_(e_nv).sum(-1)
            sums_4N[:, rows] = torch.stack([target_n, e_nv.sum(-1), weighted_n, owned_n1[:, 0]])
            if keep:
                ctx.exponentials[n] = e_nv, largest_N[rows, None]
        if options.group is not None:
            largest_N, sums_4N = combine_over_ranks(largest_N, sums_4N, options.group)

        # log p = z - m - log total, so that -sum p log p = log total - weighted / total. A target
        # that nobody owns has no logit.
        target_N, total_N, weighted_N, owners_N = sums_4N
        lse_N = largest_N + total_N.log()
        logprobs_N = (target_N - lse_N).masked_fill(owners_N == 0, -math.inf)  # (8)
        shift_N = weighted_N / total_N
        entropy_N = total_N.log() - shift_N  # (9)
        ctx.save_for_backward(hidden_NM, weight_vM, targets_N, lse_N, largest_N + shift_N)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, dlogprobs_N, dentropy_N):
        hidden_NM, weight_vM, targets_N, lse_N, mean_N = ctx.saved_tensors
        options = ctx.options
        # z was divided by the temperature, so its gradient is divided too.
        dlogprobs_N = torch.zeros_like(lse_N) if dlogprobs_N is None else dlogprobs_N
        dlogprobs_N = dlogprobs_N / options.temperature

        # NUMERICS: the head's gradient is a sum over chunks, so it is summed in float32 or better.
        # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
        dhidden_NM = torch.empty_like(hidden_NM)
        dweight_vM = torch.zeros_like(weight_vM, dtype=lse_N.dtype)
        for n in range(0, len(targets_N), options.chunk):
            rows = slice(n, n + options.chunk)
            if n in ctx.exponentials and dentropy_N is None:
                # p is e^(z - m) times e^(m - lse), so one product gives the part -dlogprob p. A
                # second backward has no exponentials any more.
                e_nv, largest_n1 = ctx.exponentials.pop(n)
                shrink_n1 = (largest_n1 - lse_N[rows, None]).exp()
                dz_nv = e_nv.mul_(-dlogprobs_N[rows, None] * shrink_n1)
            else:
                z_nv = scaled_logits(hidden_NM[rows], weight_vM, options)
                if options.softcap is not None:  # c tanh(z / c) has the slope 1 - tanh^2
                    slope_nv = 1 - (z_nv * options.temperature / options.softcap).square()
                factor = -dlogprobs_N[rows, None]
                if dentropy_N is not None:
                    # NUMERICS: log p + entropy is z less its mean. Where p is nearly uniform, the
                    # former is a difference of numbers near log V, with the same rounding for all
                    # of them. Pinned by tests/test_models.py::test_a_nearly_uniform_entropy.
                    dentropy_n1 = dentropy_N[rows, None] / options.temperature
                    factor = factor + dentropy_n1 * mean_N[rows, None]
                    factor = torch.addcmul(factor, z_nv, dentropy_n1, value=-1)
                dz_nv = z_nv.sub_(lse_N[rows, None]).exp_().mul_(factor)

            # onehot(t) adds the log-prob's gradient at the target, on the rank that has it.
            local_n1, owned_n1 = local_targets(targets_N[rows], len(weight_vM), options)
            dz_nv.scatter_add_(-1, local_n1, torch.where(owned_n1, dlogprobs_N[rows, None], 0))
            if options.softcap is not None:
                dz_nv.mul_(slope_nv)
            dz_nv = dz_nv.to(hidden_NM.dtype)

            # z = hidden weight^T, so its gradient goes to both. One dtype: add without a copy.
            dhidden_NM[rows] = dz_nv @ weight_vM
            if dweight_vM.dtype == dz_nv.dtype:
                dweight_vM.addmm_(dz_nv.T, hidden_NM[rows])
            else:
                dweight_vM += dz_nv.T @ hidden_NM[rows]
        if options.group is not None:
            dist.all_reduce(dhidden_NM, group=options.group)  # a sum over all rows of the weight
        return dhidden_NM, dweight_vM.to(weight_vM.dtype), None, None


def scaled_logits(hidden_NM, weight_vM, options, out_Nv=None):
    """Return z / tau of (8), soft-capped, (N, v), if possible in out_Nv. It may be overwritten."""
    # NUMERICS: the product is in the model's dtype, everything after it in float32 or better.
    # Pinned by tests/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
    z_Nv = torch.mm(hidden_NM, weight_vM.T, out=out_Nv)
    z_Nv = z_Nv.to(torch.promote_types(z_Nv.dtype, torch.float32))
    if options.softcap is not None:
        z_Nv = options.softcap * torch.tanh(z_Nv / options.softcap)
    return z_Nv if options.temperature == 1 else z_Nv / options.temperature


def local_targets(targets_N, rows, options):
    """Return targets relative to this rank's vocabulary rows, and which of them it owns, (N, 1).

    Targets of other ranks become 0, so that a gather stays in range.
    """
    local_N1 = targets_N[:, None] - options.vocab_start
    owned_N1 = (local_N1 >= 0) & (local_N1 < rows)
    return torch.where(owned_N1, local_N1, 0), owned_N1


def combine_over_ranks(largest_N, sums_4N, group):
    """Return the largest logit and the sums around it, over the vocabulary rows of all ranks."""
    # COMM: two messages whatever the chunks, which may differ: shards of a vocabulary are uneven.
    # Pinned by tests/test_checkpoints.py::test_vocabulary_parallel_equals_one_process.
    all_N = largest_N.clone()
    dist.all_reduce(all_N, dist.ReduceOp.MAX, group)

    # Sums around this rank's largest logit m become sums around the largest of all, m': each term
    # shrinks by e^(m - m'), and (z - m') is (z - m) + (m - m').
    target_N, total_N, weighted_N, owners_N = sums_4N
    lower_N = largest_N - all_N
    weighted_N = weighted_N + lower_N * total_N
    shrink_N = lower_N.exp()
    sums_4N = torch.stack([target_N, total_N * shrink_N, weighted_N * shrink_N, owners_N])
    dist.all_reduce(sums_4N, group=group)
    return all_N, sums_4N


def all_gather_logits(z_Xv, group, vocab_size):
    """Return the logits (.., V) of all rows of the head on every rank, given its own (.., v).

    Without a gradient, for sampling. Training asks for log-probs, which need no whole row.
    """
    if z_Xv.requires_grad:
        raise ValueError("logits of a split vocabulary have no gradient; `logprobs` have one")
    # Ranks have ceil(V / t) rows each, and the last ones the rest, which is padded for the message.
    # COMM: an all-gather of equal parts. Pinned by
    # tests/test_generator_plan.py::test_every_generator_plan_samples_the_tokens_of_one_process.
    world = dist.get_world_size(group)
    v = -(-vocab_size // world)
    own_Xv = F.pad(z_Xv, (0, v - z_Xv.shape[-1])).contiguous()
    parts = [torch.empty_like(own_Xv) for _ in range(world)]
    dist.all_gather(parts, own_Xv, group)
    return torch.cat(parts, -1)[..., :vocab_size]


# 9. The cache, for rows that come and go ---------------------------------------------------------
# Adds to `SimpleCache`: memory that grows with need, sliding layers that forget, rows that leave
# and enter without a copy of the others, and prompts whose keys several rows share.


class Step(NamedTuple):
    """What one forward does with the stores of all layers of one window."""

    lengths: list  # the cache's, before this forward
    kept: list  # (row, first, count): only these of its slots, or prompt, stay: in slots 0..count-1
    is_prompt: bool  # no row has a token yet
    low: int = 0  # the new tokens attend to slots low..high-1
    high: int = 0
    slot_BS: torch.Tensor | None = None  # where they go. None: slots high-S..high-1 in every row
    visible_B1SC: torch.Tensor | None = None  # which of the slots they see. None: all


class KVCache(SimpleCache):
    """Keys and values of the tokens so far, for rows of any lengths.

    The slot of a row's token is its position minus `first` of the row, which is 0, but for tokens
    that no window reaches any more, and for a prompt that is kept in another cache:

        sliding layer, window 3     row 0   k k k k . .      lengths 6 2, first 2 0
                                    row 1   k k . . . .

    `cache.attention` is the callable for `Transformer.hidden`, and `forward_with_cache` feeds
    tokens. Lengths are Python's: nothing is read back from the device. Where new tokens go and what
    they see is decided once a forward, for all layers of one window: `Step`.
    """

    def __init__(self, rows=0, device=None, capacity=0):
        super().__init__(rows, slots={})  # window -> C. Layers are (2, rows or more, G, C, D)
        self.device = device
        self.capacity = capacity  # rows that stores are made for, if there are not more
        self.windows = {}  # layer -> its window. None: a full layer
        self.first = {}  # window -> the position of each row's slot 0
        self.prompts = None  # the cache that holds the prompts of `begin`
        self.prompt_of = []  # and each row's row there
        self.groups = None  # `PromptGroups` of these, made when they are needed
        self.counts = None  # new tokens of each row that are real. None: all
        self.steps = {}  # window -> `Step` of this forward

    def attention(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
        """Write the keys and values of S new tokens a row, and attend to all tokens so far."""
        B, G, S, D = k_BGSD.shape
        step = self.steps.get(window)
        if step is None or step.lengths is not self.lengths:  # a forward ends with a new list
            step = self.steps[window] = self._plan(S, window)
        new_2BGSD = torch.stack([k_BGSD, v_BGSD])
        store = self._store(layer, window, new_2BGSD)
        if step.is_prompt:
            # A prompt has nothing older to see. Its right padding needs no mask.
            if not step.kept:
                store[:, :B, :, :S] = new_2BGSD
            for b, first, count in step.kept:
                store[:, b, :, :count] = new_2BGSD[:, b, :, first : first + count]
            return causal_attention(q_BHSD, k_BGSD, v_BGSD, layer=layer, scale=scale, window=window)

        for b, first, count in step.kept:
            store[:, b, :, :count] = store[:, b, :, first : first + count].clone()
        if step.slot_BS is None:
            store[:, :B, :, step.high - S : step.high] = new_2BGSD
        else:
            # Indexing by tables, as in the core, gives (B, S, 2, G, D).
            row_B1 = torch.arange(B, device=store.device)[:, None]
            store[:, row_B1, :, step.slot_BS] = new_2BGSD.permute(1, 3, 0, 2, 4)
        k_BGCD, v_BGCD = store[:, :B, :, step.low : step.high]
        if self.prompts is not None and window is None:
            return self._attend_with_prompts(q_BHSD, k_BGCD, v_BGCD, step, layer, scale)

        # For one token a row, the H / G heads of a key head are queries of one head, so that one
        # product for each key head serves them all.
        queries = q_BHSD.reshape(B, G, -1, D) if S == 1 else q_BHSD
        out = masked_attention(queries, k_BGCD, v_BGCD, step.visible_B1SC, scale=scale)
        return out.reshape(q_BHSD.shape)

    def _plan(self, S, window):
        """Return the `Step` of S new tokens a row in the layers of one window."""
        first = self.first.setdefault(window, [0] * len(self.lengths))
        slots = self.slots.setdefault(window, 0)
        reach = window or math.inf  # tokens that a query sees, its own included
        kept = []
        if not any(self.lengths):
            # The token after a prompt sees reach - 1 of its tokens. A sliding layer keeps these.
            if S >= reach:
                for b, count in enumerate(self.counts or [S] * len(self.lengths)):
                    first[b] = max(0, count - reach + 1)
                    kept.append((b, first[b], count - first[b]))
            self.slots[window] = max(slots, min(S, reach))
            return Step(self.lengths, kept, True)

        # A sliding layer whose store is full forgets first what no query will see again.
        # Stores have half as many slots again as they need, so that they seldom grow or forget.
        stored = [length - start for length, start in zip(self.lengths, first)]
        if max(stored) + S > slots:
            for b, count in enumerate(stored):
                if count >= reach:
                    first[b] += count - reach + 1
                    stored[b] = reach - 1
                    kept.append((b, count - reach + 1, reach - 1))
            need = max(stored) + S
            self.slots[window] = max(slots, need + 32, need * 3 // 2)

        # One new token in each of equally long rows sees all of a slice. Otherwise a mask says what
        # it sees. Slots are positions up to a constant of the row, so it is the core's mask.
        low = max(0, min(stored) + 1 - reach)
        high = max(stored) + S
        even = min(stored) == max(stored)
        if even and S == 1:
            return Step(self.lengths, kept, False, low, high)
        stored_B1 = torch.tensor(stored, device=self.device)[:, None]
        slot_BS = stored_B1 + torch.arange(S, device=self.device)
        slot_1C = torch.arange(low, high, device=self.device)[None]
        visible = visible_keys(slot_BS, slot_1C, window)
        return Step(self.lengths, kept, False, low, high, None if even else slot_BS, visible)

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
            self.windows[layer] = window
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
            store = self._store(layer, self.windows[layer], store)
            if to:
                store[:, to] = store[:, source]
        self.first = {window: [first[b] for b in rows] for window, first in self.first.items()}
        if self.prompts is not None:
            self.prompt_of = [self.prompt_of[b] for b in rows]

    def begin(self, other, rows, /, *, share=False):
        """Append rows that begin with the tokens that rows of another cache hold.

        other: a cache of the same layers. rows: list of indices, repeats allowed.
        share: keep reading the keys of full layers there, where all rows of one prompt read them at
            once. Sliding layers are copied: they hold a window only. Default: all layers are
            copied, one after the other, and `other` is used up.
        """
        # Shared layers store nothing of the new rows yet: their slot 0 is for the token after the
        # prompt.
        old = len(self.lengths)
        copied = [window for window in other.first if not share or window is not None]
        self.lengths = self.lengths + [other.lengths[r] for r in rows]
        for window, first in other.first.items():
            starts = first if window in copied else other.lengths
            self.first[window] = self.first.get(window, []) + [starts[r] for r in rows]
        for window in copied:
            self.slots[window] = max(self.slots.get(window, 0), other.slots[window])
        for layer, window in other.windows.items():
            if window in copied:
                theirs = other.layers[layer] if share else other.layers.pop(layer)
                store = self._store(layer, window, theirs)
                store[:, old : len(self.lengths), :, : theirs.shape[3]] = theirs[:, rows]
        if share:
            self.prompts = other
            self.prompt_of = self.prompt_of + list(rows)

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
        # tests/test_models.py::test_bfloat16_shared_prompts_are_as_exact_as_copies.
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
    """Which rows begin with each of R prompts, so that a product reads a prompt's keys once.

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
        """Return x[b] @ y[prompt of b], (B, G, h, Y): a prompt's rows are side by side in it."""
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
    counts = [S] * B if counts is None else [int(count) for count in counts]
    if len(counts) != B or not all(0 < count <= S for count in counts):
        raise ValueError(f"counts: expected {B} numbers in 1..{S}, got {counts}")
    cache.counts = counts
    return simple_forward_with_cache(model, cache, tokens_BS, counts)


# 10. Generation ----------------------------------------------------------------------------------
# Adds to `simple_generate`: a limited number of slots that waiting rows take over, forks of rows,
# prompts that are computed once, draws from a seed.


@torch.no_grad()
def prefill(model, prompts, /):
    """Return a cache with a row for each prompt, and the logits (B, V) after each.

    prompts: lists of token ids, of any lengths.
    """
    if not all(prompts):
        raise ValueError("prompts: expected at least one token in each")
    device = model.head_weight.device
    tokens_BS = nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True)
    cache = KVCache(len(prompts), device)
    counts = [len(prompt) for prompt in prompts]
    return cache, forward_with_cache(model, cache, tokens_BS.to(device), counts)


@torch.inference_mode()
def generate(
    model, rows, /, *, max_new_tokens, temperature=1.0, end=(), ending=None, after=None, seed=None,
    slots=None, branches=None,
):  # fmt: skip
    """Decode rows (prompts of any lengths) until each has ended. Return them, in their order.

    rows: `Row`s, or lists of token ids, of which Rows are made.
    max_new_tokens: a row with this many tokens after its prompt ends, with `truncated` set.
    temperature: as in `sample`. 0 is greedy and needs no draws.
    end: the stop tokens. A sampled one calls `after`.
    ending: ending(rows), called with the rows that this token has ended, before `after` is called
        with each. So a task that is on another rank is asked once for all of them.
    after: after(row) -> the rows that go on in its place. None, the default, ends it. The row
        itself, with tokens in its queue, is the next turn of a conversation; several are a fork.
        With `after`, forks are returned in the place of their row.
    seed: makes the draws of rows that have none. ValueError if such a row gets no seed.
    slots: how many rows are decoded at a time. When a row ends, a waiting row takes its slot.
        Default: all.
    branches: branches(row) -> slots that a row reserves, one for each row into which it may have
        forked in the end, so that a fork never waits. Default: 1. A row that needs more than there
        are enters when all others have ended.
    """
    if max_new_tokens < 1 or not 0 <= temperature < math.inf:
        raise ValueError(f"max_new_tokens, temperature: expected at least 1, and finite and not "
                         f"negative, got {max_new_tokens} and {temperature}")  # fmt: skip
    if slots is not None and slots < 1:
        raise ValueError(f"slots: expected at least 1, got {slots}")
    rows = [row if isinstance(row, Row) else Row(row) for row in rows]
    give_draws(rows, max_new_tokens if temperature > 0 else 0, seed)
    longest = max([len(row.tokens) for row in rows], default=0)
    positions = model.config.max_position_embeddings
    if longest + max_new_tokens > positions:
        raise ValueError(f"a prompt of {longest} tokens and max_new_tokens {max_new_tokens} exceed "
                         f"the model's {positions} positions; shorten one of them")  # fmt: skip

    # A row's place among all rows is its number, and after each fork also the number of the fork.
    reserved = branches or (lambda row: 1)
    batch = Batch(model, rows, min(slots or math.inf, sum(map(reserved, rows))))
    waiting = deque(((n,), row) for n, row in enumerate(rows))
    done = []
    while waiting or batch.rows:
        # Rows enter in their order. All ranks that decode the same rows let the same ones in.
        entering = []
        taken = sum(reserved(row) for _, row in batch.rows)
        while waiting and (not taken or taken + reserved(waiting[0][1]) <= (slots or math.inf)):
            taken += reserved(waiting[0][1])
            entering.append(waiting.popleft())
        if entering:
            batch.admit(entering)

        # Each row takes its token, sampled or queued.
        ended = batch.draw(temperature, end)
        if ending and any(ended):
            ending([row for (_, row), is_over in zip(batch.rows, ended) if is_over])

        # What goes on may be nothing, the row itself, or several forks. A fork is a copy of a row
        # of the cache, and takes a free slot if there is one.
        going = []  # (slot of the batch to go on from, place, row), or None: a free slot
        forks = []
        for b, (place, row) in enumerate(batch.rows):
            followers = [(place, row)]
            if ended[b]:
                found = after(row) if after else []
                followers = [((*place, n), follower) for n, follower in enumerate(found)]
                if not followers:
                    done.append((place, row))
            for _, follower in followers:
                follower.truncated = follower.new >= max_new_tokens
            done += [(at, follower) for at, follower in followers if follower.truncated]
            kept = [(b, at, follower) for at, follower in followers if not follower.truncated]
            going.append(kept[0] if kept else None)
            forks += kept[1:]
        batch.go_on(without_holes(going + forks))
    return [row for _, row in sorted(done, key=lambda entry: entry[0])]


class Batch:
    """The rows that `generate` decodes together, their cache, and the logits after each row.

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
        self.cache = KVCache(device=self.device, capacity=capacity)
        self.prompts = KVCache(device=self.device)  # those that rows share
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
            fresh, logits_RV = prefill(self.model, [self.tokens[prompt] for prompt in new])
            self.after |= dict(zip(new, logits_RV))
            into = self.prompts if self.shares else self.cache
            into.begin(fresh, range(len(new)))
            self.held += new
        if self.shares:
            self.cache.begin(self.prompts, [self.held.index(p) for p in wanted], share=True)
        logits_BV = torch.stack([self.after[prompt] for prompt in wanted])
        self.logits_BV = torch.cat([self.logits_BV, logits_BV]) if self.rows else logits_BV
        self.rows = self.rows + entering
        self.waiting.subtract(wanted)
        self.after = {prompt: z_V for prompt, z_V in self.after.items() if self.waiting[prompt]}

    def draw(self, temperature, end):
        """Let each row take a token. Return whether it is a sampled one that ends a turn."""
        uniform_B = None
        if temperature > 0:
            draws = [row.draws[row.new] for _, row in self.rows]
            uniform_B = torch.tensor(draws, dtype=torch.float64, device=self.device)
        tokens_B, logprobs_B = sample(self.logits_BV, uniform_B, temperature=temperature)
        drawn = zip(self.rows, tokens_B.tolist(), logprobs_B.tolist())
        return [row.append(token, logprob) and token in end for (_, row), token, logprob in drawn]

    def go_on(self, going):
        """Keep these rows of the cache, (row of the cache, place, row), and feed their tokens."""
        self.rows = [(place, row) for _, place, row in going]
        origins = [b for b, _, _ in going]
        if origins != [*range(len(self.cache.lengths))]:
            self.cache.select(origins)
            self.give_up_prompts()
        if going:
            last_B1 = torch.tensor([row.tokens[-1:] for _, row in self.rows], device=self.device)
            self.logits_BV = forward_with_cache(self.model, self.cache, last_B1)

    def give_up_prompts(self):
        """Give up the prompts with which no row of the batch and no waiting row begins."""
        used = set(self.cache.prompt_of)
        kept = [r if r in used or self.waiting[p] else None for r, p in enumerate(self.held)]
        if self.shares and None in kept:
            kept = without_holes(kept)
            self.prompts.select(kept)
            self.held = [self.held[r] for r in kept]
            self.cache.prompt_of = [kept.index(r) for r in self.cache.prompt_of]


def without_holes(entries):
    """Return a list without its Nones, which are filled from the end: a _ c d -> a d c."""
    entries = list(entries)
    for b in reversed(range(len(entries))):
        if entries[b] is None:
            entries[b] = entries[-1]
            entries.pop()
    return entries


def give_draws(rows, needed, seed):
    """Give rows without draws some from the seed. ValueError if a row has less than `needed`."""
    # The generator draws for every row, also for one that has draws of its own: what a row gets
    # depends on its place, and not on what other rows brought.
    if seed is not None and needed:
        generator = torch.Generator().manual_seed(seed)
        for row in rows:
            made = torch.rand(needed, generator=generator, dtype=torch.float64).tolist()
            row.draws = row.draws if len(row.draws) else made
    if any(len(row.draws) < needed for row in rows):
        raise ValueError(f"each row needs {needed} draws, one for each new token, or give a seed")


# 11. Hugging Face's configurations ---------------------------------------------------------------
# From a config.json to `ModelConfig` and back. To add a family, write a row of FAMILIES, and its
# rules into `read_config`. A difference that no field of ModelConfig can say needs a field, an
# equation and a line in `logits_definition`.

# What the fields of a config.json mean where a file does not have them: transformers' defaults.
QWEN = dict(
    vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=32768,
    rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.02, rope_theta=10000.0,
    sliding_window=4096, max_window_layers=28, attention_bias=False, hidden_act="silu",
)  # fmt: skip
LLAMA = QWEN | dict(
    vocab_size=32000, intermediate_size=11008, num_key_value_heads=None,
    max_position_embeddings=2048, eos_token_id=2,
)  # fmt: skip
FAMILIES = {  # model_type -> (transformers' class, what no config changes, defaults)
    # Biases of q, k, v and o, and of the MLP, by the config. RoPE of type llama3.
    "llama": ("LlamaForCausalLM", dict(qk_norm=False), LLAMA | dict(mlp_bias=False)),
    # No biases. A window in every layer, or none.
    "mistral": ("MistralForCausalLM", dict(qk_norm=False, qkv_bias=False, o_bias=False),
                LLAMA | dict(intermediate_size=14336, num_key_value_heads=8,
                             max_position_embeddings=131072)),
    # Biases of q, k and v.
    "qwen2": ("Qwen2ForCausalLM", dict(qk_norm=False, qkv_bias=True, o_bias=False), QWEN),
    # Norms of q and k, a width of heads of its own.
    "qwen3": ("Qwen3ForCausalLM", dict(qk_norm=True), QWEN | dict(head_dim=128)),
    # And experts, in all layers or in some.
    "qwen3_moe": ("Qwen3MoeForCausalLM", dict(qk_norm=True), QWEN | dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_key_value_heads=4,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False,
        decoder_sparse_step=1)),
    # Norms with 1 + w, four of them a layer, sqrt(M), two RoPE bases: layers slide, but every 6th.
    "gemma3_text": (
        "Gemma3ForCausalLM",
        dict(qk_norm=True, norm_offset=True, post_norms=True, scale_embedding=True),
        QWEN | dict(
            vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
            num_attention_heads=8, num_key_value_heads=4, head_dim=256, rope_theta=1e6,
            max_position_embeddings=131072, tie_word_embeddings=True, eos_token_id=1,
            hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
            final_logit_softcapping=None)),
}  # fmt: skip
SAME = (  # of one name and meaning in config.json and in ModelConfig
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "initializer_range",
)  # fmt: skip
MAYBE = (  # the same, in families whose defaults have them; ignored in others, as by transformers
    "query_pre_attn_scalar", "final_logit_softcapping", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob", "mlp_bias", "value_head",
)  # fmt: skip
REFUSED = "attention_dropout", "use_bidirectional_attention", "quantization_config"


def read_config(raw) -> ModelConfig:
    """Return the `ModelConfig` of a config.json's dict, in either spelling of transformers."""
    if raw.get("text_config"):
        # Multimodal: the language model's part. The ends of turns, and tying, may stand outside.
        outer = {key: raw[key] for key in ("eos_token_id", "tie_word_embeddings")
                 if raw.get(key) is not None}  # fmt: skip
        raw = {"model_type": f"{raw.get('model_type')}_text"} | raw["text_config"] | outer
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type: expected one of {', '.join(FAMILIES)}, got {family!r}")
    _, fixed, defaults = FAMILIES[family]
    raw = defaults | raw
    asked = [name for name in REFUSED if raw.get(name)]
    if asked:
        raise ValueError(f"config asks for {', '.join(asked)}: not implemented in models.py")

    # Which layers slide, where no list says so. Files of Gemma spell the 6 in two ways.
    layers = range(raw["num_hidden_layers"])
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    slides = {
        "llama": lambda n: False,
        "mistral": lambda n: True,
        "qwen3_moe": lambda n: raw.get("use_sliding_window"),
        "gemma3_text": lambda n: (n + 1) % pattern,
    }.get(family, lambda n: raw.get("use_sliding_window") and n >= raw["max_window_layers"])
    window = raw["sliding_window"]
    has_window = window is not None or family == "gemma3_text"  # which is refused without one
    kinds = tuple(SLIDING if has_window and slides(n) else FULL for n in layers)
    listed = tuple(raw.get("layer_types") or kinds)
    if family in ("llama", "mistral", "qwen3_moe") and len(set(listed)) > 1:
        raise ValueError(f"layer_types {list(listed)} in {family}: transformers has no mix")
    kinds = kinds if family == "llama" else listed

    # Every step-th layer has experts, from layer step - 1 on, unless it is listed as dense.
    experts = 0
    if "num_experts" in defaults:
        experts = raw.get("num_local_experts") or raw["num_experts"]
    dense = raw.get("mlp_only_layers") or ()
    step = raw.get("decoder_sparse_step")
    sparse = tuple(n for n in layers if experts and n not in dense and (n + 1) % step == 0)

    heads = raw["num_attention_heads"]
    eos = raw.get("eos_token_id")
    ends = eos if isinstance(eos, list | tuple) else [eos]
    fields = {name: raw[name] for name in SAME}
    known = {"value_head", *defaults}
    fields |= {name: raw[name] for name in MAYBE if name in known and raw.get(name) is not None}
    fields |= dict(
        num_key_value_heads=raw["num_key_value_heads"] or heads, num_experts=experts,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        qkv_bias=raw["attention_bias"], o_bias=raw["attention_bias"],
        hidden_act=raw.get("hidden_activation") or raw["hidden_act"],
        layer_types=kinds, sparse_layers=sparse,
        sliding_window=window if SLIDING in kinds else None,
        rope_parameters={kind: read_rope(raw, kind) for kind in set(kinds)},
        eos_token_id=tuple(token for token in ends if token is not None),
    )  # fmt: skip
    return ModelConfig(**fields | fixed)


def read_rope(raw, kind) -> dict:
    """Return the RoPE parameters of a type of layer.

    transformers 4: rope_theta and rope_scaling. transformers 5: rope_parameters, and in Gemma one
    such dict for each type of layer; rope_scaling, if it is there too, wins. Sliding layers of
    Gemma have rope_local_base_freq and are never scaled.
    """
    scaling = raw.get("rope_scaling") or {}
    new = raw.get("rope_parameters") or {}
    theta = raw["rope_theta"]
    if raw["model_type"] == "gemma3_text":
        theta = raw.get("rope_local_base_freq", 10000.0) if kind == SLIDING else theta
        rope = (new.get(kind) or {}) | (scaling if kind == FULL else {})
    else:
        rope = scaling or new
    rope = {("rope_type" if key == "type" else key): value for key, value in rope.items()}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters per layer type in {raw['model_type']}: transformers has "
                         f"none, got {rope}")  # fmt: skip
    rope = {"rope_theta": theta, "rope_type": "default"} | rope
    partial_factors = rope.pop("partial_rotary_factor", None), raw.get("partial_rotary_factor")
    if any(factor not in (None, 1) for factor in partial_factors):
        raise ValueError("partial_rotary_factor other than 1: not implemented in models.py")
    trained = raw.get("original_max_position_embeddings")
    if trained and rope["rope_type"] in ("yarn", "llama3"):  # outside the dict in older files
        rope["original_max_position_embeddings"] = trained
    return rope | {"rope_theta": float(rope["rope_theta"])}


def write_config(config) -> dict:
    """Return the config.json of a `ModelConfig`, in both spellings of transformers."""
    ropes = {kind: dict(rope) for kind, rope in config.rope_parameters.items()}
    full = ropes.get(FULL) or ropes[SLIDING]
    raw = {name: getattr(config, name) for name in SAME}
    raw |= {name: getattr(config, name) for name in MAYBE if getattr(config, name)}
    raw |= dict(
        architectures=[FAMILIES[config.model_type][0]], head_dim=config.head_dim,
        num_key_value_heads=config.num_key_value_heads, attention_bias=config.o_bias,
        attention_dropout=0.0, hidden_act=config.hidden_act,
        eos_token_id=list(config.eos_token_id) or None,
        rope_parameters=full, rope_theta=full["rope_theta"],
        rope_scaling=None if full["rope_type"] == "default" else full,
    )  # fmt: skip
    if config.model_type == "gemma3_text":
        raw |= dict(hidden_activation=raw.pop("hidden_act"), rope_parameters=ropes)
        raw |= dict(rope_local_base_freq=ropes[SLIDING]["rope_theta"]) if SLIDING in ropes else {}
        raw.pop("rope_scaling")
    if config.sliding_window or config.model_type == "mistral":  # where an absent one means 4096
        raw |= dict(sliding_window=config.sliding_window)
    if config.model_type not in ("llama", "mistral"):  # transformers takes these for others then
        raw |= dict(layer_types=list(config.layer_types))
        raw |= dict(use_sliding_window=SLIDING in config.layer_types)
    if config.num_experts:
        dense = sorted({*range(config.num_hidden_layers)} - {*config.sparse_layers})
        raw |= dict(mlp_only_layers=dense, decoder_sparse_step=1)

    # Written is right if it reads back: a family's config cannot say every ModelConfig.
    without_bias = dataclasses.replace(config, router_bias_rate=0.0)
    require_same_numbers(
        read_config(raw), without_bias, f"a {config.model_type} config cannot say this: it"
    )
    return raw


def require_same_numbers(config, other, where) -> None:
    """Raise a ValueError if a model of the other configuration would compute something else."""
    for f in dataclasses.fields(config):
        mine = getattr(config, f.name)
        theirs = getattr(other, f.name)
        if f.name not in ("initializer_range", "eos_token_id") and mine != theirs:
            raise ValueError(f"{where} has {f.name} {mine}, the model {theirs}")


def read_json(path, /, *, what="a JSON file") -> dict:
    """Return the object in a JSON file. Whatever is wrong with it is a ValueError that names it.

    what: what the file should be, for the message.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"no {path}; expected {what}") from error
    except OSError as error:  # a directory, no permission, a broken disk
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"{path} is JSON of another kind: expected an object, got a {kind}")
    return found


# 12. Checkpoints ---------------------------------------------------------------------------------
# Weights in Hugging Face's directories, both ways, whole or into a model that is split over ranks.

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX = "model.safetensors.index.json"


def _safetensors():
    """Return the library, with its submodule for torch. Only checkpoints need it."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("checkpoints need safetensors: pip install safetensors") from error
    return safetensors


class Stored(NamedTuple):
    """A tensor in a safetensors file, read when asked for."""

    path: Path
    part: object  # safetensors' slice: get_shape(), get_dtype(), [ranges]


def open_checkpoint(directory) -> tuple[dict[str, Stored], int]:
    """Return the tensors of a checkpoint by name, and how many others it has.

    Of a multimodal Gemma 3 they are the language model's, under a text model's names.
    """
    directory = Path(directory)
    files = {}  # tensor -> file, as the index says
    if (directory / INDEX).exists():
        # A checkpoint comes from somebody else: a name that leads out of its directory would have
        # us read any file of this machine.
        found = read_json(directory / INDEX, what="an index of tensors").get("weight_map")
        files = found if isinstance(found, dict) else {}
        plain = re.compile(r"[\w.-]*\w")
        wrong = [x for x in files.values() if not isinstance(x, str) or not plain.fullmatch(x)]
        wrong = wrong if files else [found]
        if wrong:
            raise ValueError(f"{directory / INDEX}: weight_map: expected names of files in this "
                             f"directory, got {wrong[0]!r}")  # fmt: skip
    tensors = {}
    for file in sorted(set(files.values())) or ["model.safetensors"]:
        path = directory / file
        module = _safetensors()
        try:
            reader = module.safe_open(path, framework="pt")
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing") from error
        except (module.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
        tensors |= {name: Stored(path, reader.get_slice(name)) for name in reader.keys()}
    places = {name: stored.path.name for name, stored in tensors.items()}
    wrong = sorted(n for n in files.keys() | places.keys() if files.get(n) != places.get(n))
    if files and wrong:
        raise ValueError(f"{directory / INDEX} and its files disagree about {wrong[:4]}")

    # Frequencies of RoPE, which Llama 2's files hold, follow from the config.
    text = {n: x for n, x in tensors.items() if not n.endswith("rotary_emb.inv_freq")}
    if any("language_model." in name for name in text):
        text = {name.replace("language_model.", ""): x for name, x in text.items()
                if "language_model." in name or name == "lm_head.weight"}  # fmt: skip
    return text, len(tensors) - len(text)


class Place(NamedTuple):
    """Where a part of one of our parameters is in a checkpoint."""

    name: str
    shape: tuple  # of the stored tensor
    expert: int | None = None  # the part is [expert]. None: all of the parameter
    row: int = 0  # its first row in the stored tensor, in the second to last dimension


def places_of(name, shape, stored=()) -> list[Place]:
    """Return the places of a parameter. stored: names of a checkpoint, if one is read."""
    # We have the experts of a layer in one parameter. Checkpoints of transformers 4 have one tensor
    # for each expert; later ones stack the experts, with the rows of gate first and then of up.
    path, _, leaf = name.rpartition(".")
    if not path.endswith(".experts") or name in stored:
        return [Place(name, tuple(shape))]
    E, rows, M = shape
    if f"{path}.gate_up_proj" in stored:
        first = rows if leaf == "up_proj" else 0
        return [Place(f"{path}.gate_up_proj", (E, 2 * rows, M), None, first)]
    return [Place(f"{path}.{e}.{leaf}.weight", (rows, M), e) for e in range(E)]


def stored_tensors(name, whole) -> dict:
    """Return a parameter's tensors under their names in a checkpoint; views of `whole`."""
    places = places_of(name, whole.shape)
    return {x.name: whole if x.expert is None else whole[x.expert] for x in places}


def load_hf(directory, *, model=None, dtype=None, device=None, whole=None) -> Transformer:
    """Load a Hugging Face checkpoint directory, strictly: every tensor has a place and the reverse.

    model: fill this one as it is. If it is split, by `parallelize` or as DTensors, each rank reads
        its own part. All ranks must call, and what one rank finds wrong in its part, all raise.
    dtype, device: of a new model. Default: the `dtype` of config.json, or the widest dtype that is
        stored if config.json does not say; the CPU.
    whole: if `model` is a stage of a pipeline, a model on the meta device with all parameters.

    Names, shapes and dtypes (F64, F32, F16, BF16) are checked before anything is allocated or
    copied; then one tensor at a time is read. Weights that are NaN or infinite, also in the model's
    dtype, are refused. This is seen while they are read: after this refusal the weights of a given
    `model` are undefined, and after every other refusal untouched. A router's bias, which no
    checkpoint holds, is set to zero, and so is a value head that the checkpoint does not have.
    """
    if model is not None and (dtype or device):
        raise ValueError("give load_hf a model to fill, or dtype and device of a new one, not both")
    problem = None
    try:
        loaded = _load(Path(directory), model, dtype, device, whole)
    except Exception as error:  # raised below, after the other ranks have heard of it
        problem = error
    split = whole is not None or model is not None and is_split(model)
    _raise_on_all_ranks(problem, split)
    return loaded


@torch.no_grad()
def _load(directory, model, dtype, device, whole) -> Transformer:
    """`load_hf` on this rank."""
    config = ModelConfig.from_hf(directory)
    stored, _ = open_checkpoint(directory)
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)  # some writers store the tied matrix twice

    # A model on the meta device has shapes and no memory. Whatever sizes a damaged config asks for,
    # they are compared with the stored tensors before anything is allocated.
    new = model is None
    if new:
        with torch.device("meta"):
            model = Transformer(config)
    as_stored = dict(router_bias_rate=0.0, value_head=config.value_head)
    require_same_numbers(config, dataclasses.replace(model.config, **as_stored), directory)
    shapes = whole_shapes(whole or model)
    if not config.value_head:
        shapes.pop("score.weight", None)  # of a critic that starts from a policy
    places = {name: places_of(name, shape, stored) for name, shape in shapes.items()}
    wanted = {place.name: place.shape for some in places.values() for place in some}
    found = {name: tuple(x.part.get_shape()) for name, x in stored.items()}
    wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    if wrong:
        told = [f"{name} {found.get(name, 'missing')} for {wanted.get(name, 'no parameter')}"
                for name in wrong[:8]]  # fmt: skip
        raise ValueError(f"{directory}: {len(wrong)} tensors do not fit its config.json: "
                         f"{'; '.join(told)}")  # fmt: skip

    # Quantized weights mean something only together with their scales, and integers are not
    # weights at all. A cast would train them all the same.
    for name, (path, part) in stored.items():
        if part.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: {name} is stored as {part.get_dtype()}; expected one of "
                             f"{', '.join(DTYPES)}: convert the checkpoint")  # fmt: skip
    if new:
        kept = dtype or _checkpoint_dtype(directory, stored)
        model = model.to(kept).to_empty(device=device or "cpu")
    for name, parameter in model.named_parameters():
        if name in places:
            _copy_in(*local_part(model, name, parameter), places[name], stored)
        else:
            parameter.zero_()
    for buffer in model.buffers():
        buffer.zero_()
    return model


def _checkpoint_dtype(directory, stored):
    """Return the dtype that a checkpoint's config.json names, or the widest of its tensors."""
    raw = read_json(directory / "config.json")
    # Not the dtype of whichever tensor comes first: a checkpoint in bfloat16 may have a norm or a
    # router in float32.
    for part in (raw, raw.get("text_config") or {}):
        said = part.get("dtype") or part.get("torch_dtype")
        if said in [str(x).removeprefix("torch.") for x in DTYPES.values()]:
            return getattr(torch, said)
    return reduce(torch.promote_types, {DTYPES[x.part.get_dtype()] for x in stored.values()})


def _copy_in(local, region, places, stored):
    """Copy this rank's part of a parameter, and read no more of each stored tensor."""
    for place in places:
        # What to read, and where it goes. An expert's tensor goes into that expert's slice, if this
        # rank has it. Stacked gate and up begin at a row of their own.
        cut = list(region)
        into = local
        if place.expert is not None:
            experts, *cut = region
            if not experts.start <= place.expert < experts.stop:
                continue
            into = local[place.expert - experts.start]
        if place.row:
            cut[-2] = slice(cut[-2].start + place.row, cut[-2].stop + place.row)
        if into.numel():
            path, part = stored[place.name]
            into.copy_(part[tuple(cut)])
            # NUMERICS: extremes pass NaN and infinity on, and need no memory. Taken of what was
            # copied, so that a weight which the model's dtype cannot hold is seen as well. Pinned
            # by tests/test_checkpoints.py::test_weights_that_are_not_finite_are_refused_by_name.
            if not torch.stack(torch.aminmax(into)).isfinite().all():
                raise ValueError(f"{path}: {place.name} has weights that are NaN, or not finite in "
                                 f"{into.dtype}")  # fmt: skip


def is_split(model) -> bool:
    """Return whether each rank has a part of the parameters (FSDP, TP)."""
    if hasattr(model, "part"):
        return any(place.cuts for place in model.part.places.values())
    return any(isinstance(p, DTensor) for p in model.parameters())


def _raise_on_all_ranks(problem, split) -> None:
    """Raise this rank's problem, if it has one; of a split model, on all ranks the first one.

    Of a model whose parameters are not split, every rank is on its own, and no message is sent.
    """
    if split and dist.is_initialized():
        # COMM: each rank comes here once, whatever it met before: a rank that raised on its own
        # would leave the others waiting for it. An all-gather of the texts, over all ranks. Pinned
        # by tests/test_checkpoints.py::test_what_one_rank_finds_all_ranks_raise.
        texts = [None] * dist.get_world_size()
        kind = OSError if isinstance(problem, OSError) else ValueError
        dist.all_gather_object(texts, None if problem is None else (kind, f"{problem}"))
        for rank, found in enumerate(texts):
            if found is not None:
                kind, text = found
                raise kind(f"rank {rank}: {text}") from problem
    if problem is not None:
        raise problem


@torch.no_grad()
def save_hf(model, directory, *, max_shard_bytes=5 * 10**9) -> None:
    """Write a checkpoint, in the model's own dtype, for transformers and load_hf.

    Of a split model, every rank must call: each tensor is gathered, and the first rank writes.
    Experts are written one by one. Parameters that are larger than max_shard_bytes in all go into
    several files with an index; at most one file's tensors are in memory. Weights of an older
    checkpoint in the directory are removed first: if you still need it, write to another directory
    and rename that. If the disk is full, all ranks raise an OSError.
    """
    if any(buffer.any() for buffer in model.buffers()):
        raise ValueError("no Hugging Face checkpoint holds a router bias: save the state dict")
    raw = model.config.to_hf() | {"dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    directory = Path(directory)
    split = is_split(model)
    writes = not split or dist.get_rank() == 0

    # Names and parameters, file by file. One parameter alone may be larger than a file should be.
    files = [[]]
    size = 0
    own = dict(model.named_parameters())
    sizes = {name: math.prod(shape) * own[name].element_size()
             for name, shape in whole_shapes(model).items()}  # fmt: skip
    for name, p in own.items():
        size += sizes[name]
        if size > max_shard_bytes and files[-1]:
            files.append([])
            size = sizes[name]
        files[-1].append((name, p))

    # The rank that writes goes on to gather after a failed write, as the others wait for it.
    weight_map = {}  # tensor name -> file name
    problem = None
    for n, parameters in enumerate(files, 1):
        tensors = {}
        for name, p in parameters:
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            if hasattr(model, "part"):
                whole = model.part.places[name].gather(local_part(model, name, p)[0])
            if writes:
                for stored_name, part in stored_tensors(name, whole).items():
                    tensors[stored_name] = part.detach().cpu().contiguous().clone()
        place = f"-{n:05}-of-{len(files):05}" if len(files) > 1 else ""
        weight_map |= dict.fromkeys(tensors, f"model{place}.safetensors")
        if writes:
            try:
                _write_tensors(tensors, directory / f"model{place}.safetensors", first=n == 1)
            except OSError as error:
                problem = error
                writes = False
    if writes:
        texts = {"config.json": raw}
        if len(files) > 1:
            total = sum(sizes.values())
            texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        try:
            for name, value in texts.items():
                text = json.dumps(value, indent=2) + "\n"
                (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            problem = OSError(f"cannot write {directory / name}: {error}")
    _raise_on_all_ranks(problem, split)


def _write_tensors(tensors, path, *, first) -> None:
    """Write one safetensors file, the first one after removing an older checkpoint's weights."""
    module = _safetensors()
    # Old files that the new checkpoint does not have would be read with it.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if first:
            for old in [path.parent / INDEX, *path.parent.glob("model*.safetensors")]:
                old.unlink(missing_ok=True)
        module.torch.save_file(tensors, path, metadata={"format": "pt"})
    except (module.SafetensorError, OSError) as error:
        raise OSError(f"cannot write {path}: {error}") from error


# The files of a checkpoint besides its weights and config.json: all that text.py needs, and how its
# authors sample. Some say the same in an older form.
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def copy_text_files(source, target) -> list[str]:
    """Replace a checkpoint's text files by another checkpoint's. Return the names copied.

    A file of `target` that `source` does not have is removed, so that no template of another model
    is left.
    """
    source = Path(source)
    target = Path(target)
    present = [name for name in TEXT_FILES if (source / name).is_file()]
    target.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        return present  # nothing to do, and nothing to lose

    for name in set(TEXT_FILES) - set(present):
        (target / name).unlink(missing_ok=True)
    for name in present:
        # Under another name first: after a kill each file is the old one or the new one, whole.
        partial = target / f"{name}.partial"
        partial.write_bytes((source / name).read_bytes())
        os.replace(partial, target / name)
    return present


# 13. check, main ---------------------------------------------------------------------------------
# For `python models.py check`: tiny models of every family, each path against the core's
# `logits_definition`. Tests use `tiny` and `tiny_model` too.

TINY = {  # what a tiny model of each family needs in addition to the sizes
    "llama": dict(qk_norm=False),
    "mistral": dict(qk_norm=False, layer_types=(SLIDING, SLIDING), sliding_window=5),
    "qwen2": dict(qk_norm=False, qkv_bias=True),
    "qwen3": dict(),
    "qwen3_moe": dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, sparse_layers=(1,),
        norm_topk_prob=True,
    ),
    "gemma3_text": dict(
        norm_offset=True, post_norms=True, scale_embedding=True, sliding_window=4,
        layer_types=(SLIDING, FULL), hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=12,
        tie_word_embeddings=True, rope_parameters={
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}  # fmt: skip
CASES = {
    **{model_type: (model_type, {}) for model_type in TINY},
    "llama biased, tied": ("llama", dict(
        tie_word_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True)),
    "qwen3 tied, slides": ("qwen3", dict(
        tie_word_embeddings=True, layer_types=(FULL, SLIDING), sliding_window=3)),
    "qwen3 linear": ("qwen3", dict(
        rope_parameters={FULL: {"rope_type": "linear", "factor": 3.0}})),
    "qwen3_moe biased": ("qwen3_moe", dict(
        router_bias_rate=0.05, norm_topk_prob=False, sparse_layers=(0, 1))),
    "gemma3_text capped": ("gemma3_text", dict(final_logit_softcapping=4.0)),
}  # fmt: skip


def tiny(model_type="qwen3", **changes) -> ModelConfig:
    """Return a small configuration with grouped heads and nothing square, for tests."""
    base = dict(
        vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=10,
        num_attention_heads=4, num_key_value_heads=2, model_type=model_type, initializer_range=0.3,
    )  # fmt: skip
    return ModelConfig(**base | TINY[model_type] | changes)


def tiny_model(model_type="qwen3", seed=1, dtype=torch.float64, **changes) -> Transformer:
    """Return a `tiny` model whose norms, biases and votes are away from their neutral values."""
    model = Transformer(tiny(model_type, **changes)).to(dtype).init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
        for votes in model.buffers():
            votes.copy_(torch.randint(-9, 9, votes.shape, generator=generator))
    return model


def full_definition(model, tokens, /, frequencies=None):
    """Return `logits_definition`, (S, V), with a `Transformer`'s soft cap, router bias and RoPE.

    frequencies: frequencies(rope, head_dim) -> f of (5). Default: from `rope_frequencies`.
    """
    config = model.config
    weights = {}
    for name, p in model.named_parameters():
        weights |= stored_tensors(name, p)
    for name, votes_E in model.named_buffers():
        weights[name.replace("votes", "choice_bias")] = config.router_bias_rate * votes_E

    # A factor on cos and sin multiplies q and k, so their product by its square: as a scale does.
    (factor,) = {factor for _, factor in model.rope.frequencies.values()}
    scalar = (config.query_pre_attn_scalar or config.head_dim) / factor**4
    alike = nn.Module()
    alike.config = dataclasses.replace(config, query_pre_attn_scalar=scalar)
    frequencies = frequencies or (lambda rope, head_dim: rope_frequencies(rope, head_dim)[0])
    z_SV = logits_definition(alike, tokens, weights, frequencies)
    cap = config.final_logit_softcapping
    return cap * torch.tanh(z_SV / cap) if cap else z_SV  # (7')


def relative_error(a, b):
    """Return |a - b| / |b|, infinite for a NaN. a may be on another device."""
    error = ((a.cpu().double() - b.double()).norm() / b.double().norm()).item()
    return error if error == error else math.inf


def worst_gradient(mine, got, model, want):
    """Return the largest relative error of a parameter's gradient, under one random upstream.

    got was computed with the model `mine`, want with `model`, which has the same weights.
    """
    upstream = torch.randn_like(want)
    grads = [
        torch.autograd.grad((x * upstream.to(x)).sum(), list(m.parameters()), retain_graph=True)
        for m, x in ((mine, got), (model, want))
    ]
    return max(map(relative_error, *grads))


def check(cases=None, transformers=True) -> bool:
    """Compare each path with the definition, float64; print a table. True if all rows are <= 1e-12.

    cases: some of CASES. Default: all. With tests/bench/measure_models.py in place, experts and the
    other RoPE types too, and, if transformers is installed, logits and gradients against it in
    float32, <= 1e-5.
    """
    torch.manual_seed(0)
    core = [check_family(family, tau).item() for family in CHECK_FAMILIES for tau in (0.0, 0.8)]
    rows = [("core: against itself token by token", torch.tensor(core).max().item(), 1e-12)]
    rows += [
        (f"{name}: {path}", error, 1e-12)
        for name, (model_type, changes) in (cases or CASES).items()
        for path, error in path_errors(tiny_model(model_type, **changes))
    ]

    # The rows that need other files. With this one alone it says what is not shown.
    try:
        rows += measuring_file().rows(cases, transformers)
    except ImportError as missing:
        print(f"SKIP ({missing}): RoPE types yarn and llama3; the experts' grouped product and "
              "balance loss; logits and gradients against transformers")  # fmt: skip

    # A table to read, and one line for a program. NaN counts as infinitely wrong.
    print(f"{'path against its definition':55} relative error")
    for name, error, bound in rows:
        print(f"{name:55} {error:.1e}  {'ok' if error <= bound else f'FAILED, above {bound}'}")
    ok = all(error <= bound for _, error, bound in rows)
    exact = max(error for _, error, bound in rows if bound == 1e-12)
    print(json.dumps({"check": "models", "ok": ok, "max_error": exact}))
    return ok


def path_errors(model, mine=None):
    """Yield (path, error) of one model: values, gradients, packing, cache, log-probs, generation.

    mine: the same model on another device, which is then compared with the definition on the CPU.
    """
    mine = mine or model
    device = mine.head_weight.device
    documents = [torch.randint(model.config.vocab_size, (n,)) for n in (7, 6, 1, 12)]
    truth = torch.cat([full_definition(model, d) for d in documents])
    alone = torch.cat([mine(d[None].to(device))[0] for d in documents])
    yield "one at a time", relative_error(alone, truth)
    yield "gradient, worst parameter", worst_gradient(mine, alone, model, truth)

    # Two rows of two documents, one PAD before each.
    with torch.no_grad():
        tokens = torch.cat([F.pad(d, (1, 0)) for d in documents]).view(2, 15)
        positions = torch.cat([torch.arange(-1, len(d)) for d in documents]).view(2, 15)
        ids = torch.where(positions < 0, -1, (positions < 0).cumsum(1))
        tokens, positions, there = (x.to(device) for x in (tokens, positions, ids))
        packed = mine(tokens, positions=positions, attention=simple_packed_attention(there))
        yield "packed, PAD anywhere", relative_error(packed.cpu()[ids >= 0], truth)
        yield "cache, ragged rows", relative_error(*logits_by_cache(mine, documents, truth))

    # (8) and (9) from the definition's logits, with torch's own softmax.
    logp = (truth / 0.7).log_softmax(-1)
    targets = torch.randint(model.config.vocab_size, (len(truth),))
    hidden = torch.cat([mine.hidden(d[None].to(device))[0] for d in documents])
    options = dict(temperature=0.7, softcap=model.config.final_logit_softcapping, chunk=5)
    got = torch.stack(token_logprobs(hidden, mine.head_weight, targets.to(device), **options))
    want = torch.stack([logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)])
    yield "log-probs and entropy in chunks", relative_error(got, want)
    yield "gradient in chunks, worst parameter", worst_gradient(mine, got, model, want)

    # Seven rows of three prompts in two slots, against the core's generation of all at once.
    prompts = [documents[n].tolist() for n in (0, 1, 1, 2, 0, 0, 1)]
    draws = torch.rand(7, 9, dtype=torch.float64).tolist()
    ways = [[Row(prompt, u) for prompt, u in zip(prompts, draws)] for _ in range(2)]
    options = dict(max_new_tokens=9, temperature=0.9, end=range(20))
    generate(mine, ways[0], slots=2, **options)
    simple_generate(model, ways[1], **options)
    same = all(a.tokens == b.tokens for a, b in zip(*ways))
    logprobs = [sum([row.logprobs for row in rows], []) for rows in ways]
    got, want = (torch.tensor(values, dtype=torch.float64) for values in logprobs)
    yield "generation by slots", relative_error(got, want) if same else math.inf


def logits_by_cache(model, documents, truth):
    """Return logits by halves as ragged prompts, then token by token, and the same of `truth`."""
    got = []
    want = []
    # A row: a document, its logits by the definition, and how many of its tokens the cache has.
    parts = zip(documents, truth.split([len(d) for d in documents]))
    rows = [(d, z, (len(d) + 1) // 2) for d, z in parts]
    cache, logits = prefill(model, [d[:n].tolist() for d, _, n in rows])
    while True:
        got += [*logits]
        want += [z[n - 1] for _, z, n in rows]
        keep = [b for b, (d, _, n) in enumerate(rows) if n < len(d)]
        if not keep:
            return torch.stack(got), torch.stack(want)

        # Rows at their end leave the cache, and the others are fed one token more.
        cache.select(keep)
        rows = [(d, z, n + 1) for d, z, n in (rows[b] for b in keep)]
        tokens = torch.stack([d[n - 1 : n] for d, _, n in rows])
        logits = forward_with_cache(model, cache, tokens.to(logits.device))


def measuring_file(name="measure_models"):
    """Import a file of tests/. ImportError where it, or a file that it needs, is missing."""
    tests = Path(__file__).resolve().parent / "tests"
    sys.path += [str(tests), str(tests / "bench")]
    return __import__(name)


USAGE = "usage: python models.py core | check [--device cuda] | inspect DIR | bench"


def main(argv) -> int:
    """Run a command, and return its exit code; tests/bench/measure_models.py has inspect, bench."""
    return quietly(_run_command, argv)


def quietly(command, argv) -> int:
    """Return the exit code of a command whose output may go to `| head`."""
    try:
        code = command(argv)
        print(end="", flush=True)
        return code
    except BrokenPipeError:
        # The reader of our output has seen enough. What is still buffered would fail once more as
        # Python ends, so it goes nowhere. 141 is what a shell gives for such an end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run_command(argv) -> int:
    if argv[:1] == ["core"]:
        return core_main(argv[1:]) or 0
    if argv == ["check"]:
        return 0 if check() else 1
    if argv[:1] not in (["inspect"], ["bench"]) and argv[:2] != ["check", "--device"]:
        print(USAGE, file=sys.stderr)
        return 2

    # These commands need what only tests need, and are imported when they are asked for.
    try:
        if argv[0] == "check":
            return measuring_file("measure_gpu").check("models", argv[1:])
        return measuring_file().main(argv)
    except ModuleNotFoundError as missing:
        print(f"{argv[0]} needs the tests of this repository: {missing}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
