"""Qwen, Llama, Mistral and Gemma 3 as one Transformer, with its KV cache and its sampler.

The model does not know which token sees which. Every layer hands its queries, keys and values to
a function attention(q, k, v, layer=, scale=) that the caller chose. Causal attention, packed
documents and the KV cache are three such functions; a ring of ranks and a tree are two more.

    python models.py       # check it: the same model token by token, in float64, 3 CPU seconds
    load("Qwen3-0.6B")     # a Hugging Face checkpoint as a model, given its directory

For token ids t_1..t_S, x of width M, [.] for concatenated heads, and matrices Q K V O gate up down:

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

Letters in names are dimensions: B rows, S new tokens of a row, C tokens that they may see, N tokens
of any rows, M width, V vocabulary, H query heads, G key heads, D width of a head (scale: D^-1/2),
E experts of width I, K of them a token, X any number. A small letter is a part of the capital one.
"""

import json
import math
import shutil
import sys
from collections import deque
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# 1. The model -----------------------------------------------------------------------------------
FULL, SLIDING = "full_attention", "sliding_attention"  # types of layer
ACTIVATIONS = dict(silu=F.silu, gelu=F.gelu, gelu_pytorch_tanh=partial(F.gelu, approximate="tanh"))


@dataclass
class ModelConfig:
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
    mlp_bias: bool = False  # of dense MLPs: experts have none
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
    max_position_embeddings: int | None = None  # tokens of the longest row. Default: any number

    def __post_init__(self):
        self.layer_types = tuple(self.layer_types) or (FULL,) * self.num_hidden_layers
        theta = {"rope_theta": 10000.0}
        kinds = sorted(set(self.layer_types))
        self.rope_parameters = {kind: theta | self.rope_parameters.get(kind, {}) for kind in kinds}

    def frequencies(self, kind):
        """Return the D / 2 frequencies of (5) in a type of layer, in radians per token, float64."""
        # D = 4 and theta = 100: 1 and 0.1. Fast pairs tell neighbors apart, slow ones far tokens.
        n = torch.arange(self.head_dim // 2, dtype=torch.float64)
        return self.rope_parameters[kind]["rope_theta"] ** (-2 * n / self.head_dim)


def widen(x):
    """Return x in float32, or in float64 if it is float64: for sums and for exponentials."""
    # NUMERICS: bfloat16 has 8 bits. It would round a log-prob of -9.03 to -9.
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, then scale it: (..., M) -> (..., M)."""

    def __init__(self, width, config):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.offset = 1.0 if config.norm_offset else 0.0
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))

    def forward(self, x, /):
        wide = widen(x)
        mean_square = wide.square().mean(-1, keepdim=True)
        weight = self.offset + widen(self.weight)
        return (weight * wide / (mean_square + self.eps).sqrt()).to(x.dtype)  # (4)


def cos_and_sin(positions_BS, f_d, dtype, /):
    """Return (cos, cos) and (-sin, sin) of the angles of (5), each (B, S, 1, D)."""
    # NUMERICS: late positions need float64 angles. Their cos and sin are rounded to dtype.
    angle_BS1d = positions_BS[:, :, None, None] * f_d.to(positions_BS.device)
    cos_BS1d, sin_BS1d = angle_BS1d.cos().to(dtype), angle_BS1d.sin().to(dtype)
    return torch.cat([cos_BS1d, cos_BS1d], -1), torch.cat([-sin_BS1d, sin_BS1d], -1)


def apply_rope(x_BSXD, cos_BS1D, sin_BS1D, /):
    """Turn each pair (x_n, x_(n+D/2)) of each head by the angle of its token's position."""
    # (a, b) becomes (a cos - b sin, b cos + a sin). A roll swaps a and b; sin_BS1D is (-sin, sin).
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


def causal_attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None, mask=True):
    """Attend from token i of each row to tokens 0..i, or to the last `window` of them."""
    # Rows may be padded on the right, because no real token sees a later one. A mask hides more.
    place_1S = torch.arange(q_BHSD.shape[2], device=q_BHSD.device)[None]
    visible_B1SS = visible_keys(place_1S, place_1S, window) & mask
    return masked_attention(q_BHSD, k_BGSD, v_BGSD, visible_B1SS, scale=scale)


class Attention(nn.Module):
    """Compute equation (2) without its residual: (B, S, M) -> (B, S, M)."""

    def __init__(self, config, layer, norm_class):
        super().__init__()
        M = config.hidden_size
        D = self.head_dim = config.head_dim
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
        # -1 counts the heads: a tensor-parallel rank has some of them. Each head is normalized by
        # itself, and before RoPE, as the models were trained.
        q_BSHD = self.q_norm(self.q_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))
        k_BSGD = self.k_norm(self.k_proj(x_BSM).unflatten(-1, (-1, self.head_dim)))
        v_BGSD = self.v_proj(x_BSM).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q_BHSD = apply_rope(q_BSHD, *ropes[self.kind]).transpose(1, 2)
        k_BGSD = apply_rope(k_BSGD, *ropes[self.kind]).transpose(1, 2)
        out_BHSD = attention(q_BHSD, k_BGSD, v_BGSD, **self.options)
        return self.o_proj(out_BHSD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Compute ffn of (3): (..., M) -> (..., M)."""

    def __init__(self, config):
        super().__init__()
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, h, /):
        # The gate decides, entry by entry, how much of `up` goes down.
        return self.down_proj(self.act(self.gate_proj(h)) * self.up_proj(h))


class Experts(nn.Module):
    """Compute ffn_e of (6) for rows that are sorted by expert: (N, M) -> (N, M)."""

    def __init__(self, config):
        super().__init__()
        E, I, M = config.num_experts, config.moe_intermediate_size, config.hidden_size
        self.act = ACTIVATIONS[config.hidden_act]
        # The matrices of all experts are stacked, so that a rank can keep a part of each stack.
        self.gate_proj = nn.Parameter(torch.randn(E, I, M) / M**0.5)
        self.up_proj = nn.Parameter(torch.randn(E, I, M) / M**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, M, I) / I**0.5)

    def forward(self, x_NM, counts_E, /):
        # Expert 0 gets the first counts_E[0] rows, expert 1 the next counts_E[1], and so on.
        out = []
        stacks = self.gate_proj, self.up_proj, self.down_proj
        for x_nM, gate_IM, up_IM, down_MI in zip(x_NM.split(counts_E.tolist()), *stacks):
            h_nI = self.act(x_nM @ gate_IM.T) * (x_nM @ up_IM.T)
            out.append(h_nI @ down_MI.T)
        return torch.cat(out)


class SparseMLP(nn.Module):
    """Run each token through the K experts that its router prefers, equation (6)."""

    experts_class = Experts

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)  # the router
        self.experts = self.experts_class(config)

    def forward(self, x_BSM, /):
        x_NM = x_BSM.flatten(0, 1)
        p_NE = widen(self.gate(x_NM)).softmax(-1)
        weight_NK, expert_NK = p_NE.topk(self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        # A choice has no gradient: the router learns through the weights.
        return self.run_experts(x_NM, expert_NK, weight_NK).to(x_BSM.dtype).view_as(x_BSM)

    def run_experts(self, x_NM, expert_NK, weight_NK, /):
        """Return the weighted sum of each token's K experts, (N, M)."""
        # Copy each token K times, and sort the copies by expert. If tokens 0 and 1 chose experts
        # [2, 0] and [1, 2], the order of copies 0 to 3 is 1 2 0 3, and its inverse is 2 0 1 3.
        order_X = expert_NK.flatten().argsort(stable=True)
        counts_E = expert_NK.flatten().bincount(minlength=self.config.num_experts)
        copies_XM = x_NM.repeat_interleave(expert_NK.shape[1], 0)
        out_XM = self.experts(copies_XM[order_X], counts_E)[order_X.argsort()]
        return (out_XM.unflatten(0, expert_NK.shape) * weight_NK[:, :, None]).sum(1)  # (6)


class Layer(nn.Module):
    """Apply attention and an MLP, each with a norm before it and a residual, (2) and (3)."""

    # A variant of the model is a subclass that names other parts.
    norm_class, attention_class, sparse_class = RMSNorm, Attention, SparseMLP

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn = self.attention_class(config, layer, self.norm_class)
        self.mlp = (self.sparse_class if layer in config.sparse_layers else MLP)(config)
        # Hugging Face's post_attention_layernorm is two things: in Gemma the norm after attention,
        # in the other families the norm before the MLP.
        self.post_norms = config.post_norms
        self.input_layernorm = self.norm_class(config.hidden_size, config)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config)
        if config.post_norms:
            self.pre_feedforward_layernorm = self.norm_class(config.hidden_size, config)
            self.post_feedforward_layernorm = self.norm_class(config.hidden_size, config)

    def forward(self, x_BSM, ropes, attention, /):
        # Between layers x is never normalized. Each part adds what it computes from a norm of x, so
        # along the sums the gradient of the last layer reaches the first one undiminished.
        h_BSM = self.self_attn(self.input_layernorm(x_BSM), ropes, attention)
        if not self.post_norms:
            y_BSM = x_BSM + h_BSM  # (2)
            return y_BSM + self.mlp(self.post_attention_layernorm(y_BSM))  # (3)
        y_BSM = x_BSM + self.post_attention_layernorm(h_BSM)  # (2), Gemma
        h_BSM = self.mlp(self.pre_feedforward_layernorm(y_BSM))
        return y_BSM + self.post_feedforward_layernorm(h_BSM)  # (3), Gemma


class Transformer(nn.Module):
    """A causal language model: `hidden` runs its layers, `logits` and `logprobs` its head."""

    layer_class = Layer
    chunk = 256  # tokens whose logits are in memory at a time

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_scale = config.hidden_size**0.5 if config.scale_embedding else 1.0
        self.model = nn.Module()  # Hugging Face's name for everything but the head
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (self.layer_class(config, n) for n in range(config.num_hidden_layers))
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = self.layer_class.norm_class(config.hidden_size, config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self):
        """Return the matrix of (7), (V, M)."""
        return (self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight

    def hidden(self, tokens_BS, /, *, positions=None, attention=causal_attention):
        """Return the normalized states of the last layer, (B, S, M), of int64 ids (B, S).

        positions: int64, (B, S). For RoPE alone. Default: 0..S-1 in each row.
        attention: attention(q, k, v, layer=, scale=) -> (B, H, S, D), called once in each layer,
            with q (B, H, S, D) and with k and v (B, G, S, D). Sliding layers add window=.
        """
        x_BSM = self.embed_scale * self.model.embed_tokens(tokens_BS)  # (1)
        # Positions tell how far apart two tokens are, and not whether they see each other.
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        c, wide = self.config, torch.promote_types(x_BSM.dtype, torch.float32)
        ropes = {x: cos_and_sin(positions, c.frequencies(x), wide) for x in c.rope_parameters}
        for layer in self.model.layers:
            x_BSM = layer(x_BSM, ropes, attention)
        return self.model.norm(x_BSM)

    def logits(self, hidden, /):
        """Apply the head to states of `hidden`, which have had the norm: (..., M) -> (..., V)."""
        return F.linear(hidden, self.head_weight)  # (7)

    def logprobs(self, hidden_NM, targets_N, /, *, temperature=1.0):
        """Return (8) of the targets and (9), both (N,), given the states before the targets."""
        # Logits are the largest tensor of training: 5 GB for 8,192 tokens of a vocabulary of
        # 151,936. Autograd would keep several. A checkpoint computes a chunk's once more instead.
        chunks = zip(hidden_NM.split(self.chunk), targets_N.split(self.chunk))
        rest = dict(weight_VM=self.head_weight, temperature=temperature)
        found = [checkpoint(token_logprobs, *pair, **rest, use_reentrant=False) for pair in chunks]
        return tuple(torch.cat(parts) for parts in zip(*found))


# 2. Training: log-probs and packed documents ----------------------------------------------------
def token_logprobs(hidden_NM, targets_N, weight_VM, temperature):
    """Return (8) of each target and (9) of each distribution, both (N,)."""
    logp_NV = (widen(F.linear(hidden_NM, weight_VM)) / temperature).log_softmax(-1)
    logprobs_N = logp_NV.gather(-1, targets_N[:, None])[:, 0]  # (8)
    return logprobs_N, -(logp_NV.exp() * logp_NV).sum(-1)  # (9)


def packed_attention(doc_ids_BS):
    """Return an attention by which tokens see the earlier tokens of their own document only.

    doc_ids_BS: int64, (B, S). The tokens of a document are side by side and have its number.
    Padding has a number of its own. Positions may run on: RoPE depends on their differences alone.
    """
    #     doc_ids  0 0 1 1      query 0   x
    #                           query 1   x x
    #                           query 2       x
    #                           query 3       x x
    same_B1SS = (doc_ids_BS[:, :, None] == doc_ids_BS[:, None, :])[:, None]
    return partial(causal_attention, mask=same_B1SS)


# 3. Generation: cache, sampling, rows -----------------------------------------------------------
class KVCache:
    """Keys and values of the tokens so far. The token at position p of a row is in slot p.

    row 0   k k k k . .      lengths 4 and 2, C = 6 slots: the next token of row 1 goes into
    row 1   k k . . . .      slot 2, whatever row 0 does
    """

    def __init__(self, rows, slots):
        self.lengths = [0] * rows
        self.positions_BS = None  # of the S new tokens of each row: `forward_with_cache` knows
        self.slots = slots
        self.layers = {}  # layer -> keys and values (2, B, G, C, D)

    def attention(self, q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
        """Write the keys and values of S new tokens a row, and attend to all tokens so far."""
        B, G, _, D = k_BGSD.shape
        if layer not in self.layers:
            self.layers[layer] = k_BGSD.new_zeros(2, B, G, self.slots, D)
        k_BGCD, v_BGCD = self.layers[layer]
        # Lengths 4 and 2, S = 2: slots [[4, 5], [2, 3]]. Indexing by tables gives (B, S, G, D).
        slot_BS, row_B1 = self.positions_BS, torch.arange(B, device=k_BGSD.device)[:, None]
        k_BGCD[row_B1, :, slot_BS] = k_BGSD.transpose(1, 2)
        v_BGCD[row_B1, :, slot_BS] = v_BGSD.transpose(1, 2)
        # Slots are positions, so the causal mask also hides empty slots, and what the padding of a
        # shorter row has left in later slots. The row's next tokens overwrite that.
        slot_1C = torch.arange(self.slots, device=k_BGSD.device)[None]
        visible_B1SC = visible_keys(slot_BS, slot_1C, window)
        return masked_attention(q_BHSD, k_BGCD, v_BGCD, visible_B1SC, scale=scale)

    def select(self, rows):
        """Keep these rows, a list of indices, in this order."""
        self.lengths = [self.lengths[b] for b in rows]
        self.layers = {layer: kv[:, rows] for layer, kv in self.layers.items()}


@torch.no_grad()
def forward_with_cache(model, cache, tokens_BS, counts, /):
    """Feed the next tokens of each row, and return the logits (B, V) after each row's last one.

    tokens_BS: int64, (B, S), right-padded. counts: how many tokens of each row are real.
    """
    length_B1 = torch.tensor(cache.lengths, device=tokens_BS.device)[:, None]
    cache.positions_BS = length_B1 + torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    x_BSM = model.hidden(tokens_BS, positions=cache.positions_BS, attention=cache.attention)
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
        # half of all numbers in [0, 1). A token of probability 0 is never drawn, since the product
        # is below the whole sum, even rounded. For NaN searchsorted returns V, and clamp V - 1.
        sums_BV = p_BV.cumsum(-1)
        at_B1 = uniform_B[:, None] * sums_BV[:, -1:]
        token_B1 = torch.searchsorted(sums_BV, at_B1, right=True).clamp(max=p_BV.shape[1] - 1)
    return token_B1[:, 0], p_BV.gather(-1, token_B1)[:, 0].log()


class Row:
    """A sequence that is being generated: a prompt and the tokens after it."""

    def __init__(self, prompt, draws=()):
        self.tokens = list(prompt)
        self.draws = draws  # draws[n] in [0, 1) decides token n after the prompt; greedy needs none
        self.queue = deque()  # tokens that come next whatever is sampled: the user's next turn
        self.new = 0  # tokens after the prompt
        self.truncated = False  # ended by the limit on new tokens
        self.mask = [False] * (len(prompt) - 1)  # for each of tokens[1:]: was it sampled?
        self.logprobs = [0.0] * (len(prompt) - 1)  # for each of tokens[1:]: its log-prob, or 0

    def append(self, token, logprob):
        """Append the first queued token, or else `token`. Return whether it was the sampled one."""
        sampled = not self.queue
        self.tokens.append(token if sampled else self.queue.popleft())
        self.mask.append(sampled)
        self.logprobs.append(logprob if sampled else 0.0)
        self.new += 1
        return sampled


def generate(model, rows, *, max_new_tokens, temperature=1.0, end=(), after=None):
    """Extend rows, a list of `Row`, in place, until each has ended.

    max_new_tokens: a row with this many tokens after its prompt ends, with `truncated` set.
    end: tokens that end a turn when they are sampled.
    after: after(row), called at the end of a turn. If it returns true, the row goes on, with what
        `after` has put into its queue. Default: every row ends with its first turn.
    """
    fewest = min((len(row.draws) for row in rows), default=max_new_tokens)
    if temperature > 0 and fewest < max_new_tokens:
        advice = f"Row(prompt, torch.rand({max_new_tokens}).tolist())"
        raise ValueError(f"expected {max_new_tokens} draws for each row, got {fewest}: {advice}")
    fresh = [torch.tensor(row.tokens) for row in rows]  # tokens that the cache does not hold
    cache = KVCache(len(rows), max(map(len, fresh), default=0) + max_new_tokens)
    while rows:
        tokens_BS = nn.utils.rnn.pad_sequence(fresh, batch_first=True).to(model.head_weight.device)
        counts = [len(tokens) for tokens in fresh]
        logits_BV = forward_with_cache(model, cache, tokens_BS, counts)
        draws = [row.draws[row.new] if temperature > 0 else 0.0 for row in rows]
        uniform_B = logits_BV.new_tensor(draws, dtype=torch.float64)
        tokens_B, logprobs_B = sample(logits_BV, uniform_B, temperature=temperature)
        # A row takes its token. A queued end token does not stop the row.
        going = []
        drawn = zip(rows, tokens_B.tolist(), logprobs_B.tolist())
        for b, (row, token, logprob) in enumerate(drawn):
            ended = row.append(token, logprob) and row.tokens[-1] in end
            goes_on = not ended or (after is not None and after(row))
            row.truncated = bool(goes_on and row.new >= max_new_tokens)
            if goes_on and not row.truncated:
                going.append(b)
        # Rows that have ended leave the batch. Of the others, the cache lacks the last token.
        cache.select(going)
        rows = [rows[b] for b in going]
        fresh = [torch.tensor(row.tokens[-1:]) for row in rows]


# 4. A released model, in Hugging Face's files ---------------------------------------------------
# What a config.json means. transformers has a class of settings for each family. A setting that is
# not in the file has the default of the class, and a setting that is not in the class is ignored.
# So a family is three things: where its equations differ from the defaults of ModelConfig, the
# defaults of SIZES, and its own settings with their defaults. All families have those of COMMON.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads", "max_position_embeddings")  # fmt: skip
COMMON = dict(head_dim=None, hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False,
              attention_bias=False, rope_theta=1e4, rope_scaling={}, rope_parameters={})
LAYERS = dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28, layer_types=[])
FAMILIES = {
    "llama": (dict(qk_norm=False), (32000, 4096, 11008, 32, 32, None, 2048), dict(mlp_bias=False)),
    "mistral": (dict(qk_norm=False, qkv_bias=False, o_bias=False),
                (32000, 4096, 14336, 32, 32, 8, 131072), dict(sliding_window=4096, layer_types=[])),
    "qwen2": (dict(qk_norm=False, qkv_bias=True, o_bias=False),
              (151936, 4096, 22016, 32, 32, 32, 32768), LAYERS),
    "qwen3": (dict(), (151936, 4096, 22016, 32, 32, 32, 32768), LAYERS | dict(head_dim=128)),
    "qwen3_moe": (dict(), (151936, 2048, 6144, 24, 32, 4, 32768), dict(
        use_sliding_window=False, sliding_window=4096, num_experts=128, num_local_experts=None,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False,
        decoder_sparse_step=1, mlp_only_layers=[])),
    "gemma3_text": (dict(norm_offset=True, post_norms=True, scale_embedding=True),
                    (262208, 2304, 9216, 26, 8, 4, 131072), dict(
        hidden_activation="gelu_pytorch_tanh", head_dim=256, query_pre_attn_scalar=256.0,
        tie_word_embeddings=True, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window=4096,
        sliding_window_pattern=6, layer_types=[])),
}  # fmt: skip
# Settings that change the numbers, and that no equation above has.
NOT_HERE = ("quantization_config", "final_logit_softcapping", "attention_dropout",
            "use_bidirectional_attention", "per_layer_config")  # fmt: skip


def config_fields(c, differs, /):
    """Return {field of ModelConfig: value}, given all fields that a family reads, and `differs`."""
    heads = c["num_attention_heads"]
    absent = dict(num_key_value_heads=heads, head_dim=c["hidden_size"] // heads)
    c = c | {name: value for name, value in absent.items() if c[name] is None}
    # Qwen's layers slide from max_window_layers on. Of Gemma's, every sixth one does not.
    layers = range(c["num_hidden_layers"])
    first, every = c.get("max_window_layers", 0), c.get("sliding_window_pattern", math.inf)
    window = c.get("sliding_window") if c.get("use_sliding_window", True) else None
    types = [SLIDING if window and n >= first and (n + 1) % every else FULL for n in layers]
    # transformers 4 writes rope_theta and rope_scaling, and in Gemma another base for SLIDING
    # layers. Version 5 writes rope_parameters, in Gemma a dict for each type of layer.
    old, new = c["rope_scaling"] or {}, c["rope_parameters"] or {}
    full = local = {"rope_theta": c["rope_theta"]} | (old or new)
    if "rope_local_base_freq" in c:
        full = {"rope_theta": c["rope_theta"]} | (new.get(FULL) or {}) | old
        local = {"rope_theta": c["rope_local_base_freq"]} | (new.get(SLIDING) or {})
    # If decoder_sparse_step is 2, layers 1, 3 and 5 have experts, but for the mlp_only_layers.
    E = c.get("num_local_experts") or c.get("num_experts", 0)  # the names in transformers 5 and 4
    dense, step = c.get("mlp_only_layers") or (), c.get("decoder_sparse_step")
    c |= dict(
        qkv_bias=c["attention_bias"], o_bias=c["attention_bias"], num_experts=E,
        hidden_act=c.get("hidden_activation", c["hidden_act"]), sliding_window=window,
        layer_types=c.get("layer_types") or types, rope_parameters={FULL: full, SLIDING: local},
        sparse_layers=tuple(n for n in layers if E and n not in dense and (n + 1) % step == 0))
    return {x.name: c[x.name] for x in fields(ModelConfig) if x.name in c} | differs


def read_config(directory):
    """Return the ModelConfig of a directory's config.json. ValueError for what it cannot say."""
    try:
        hf_config = json.loads((Path(directory) / "config.json").read_text("utf-8"))
        family = hf_config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"expected model_type {' or '.join(FAMILIES)}, got {family!r}")
        differs, sizes, own = FAMILIES[family]
        defaults = COMMON | dict(zip(SIZES, sizes)) | own
        said = {name: hf_config.get(name, default) for name, default in defaults.items()}
        for name, default in defaults.items():
            value, kind = said[name], int if default is None else type(default)
            has_null = name in ("num_key_value_heads", "sliding_window") and "gemma" not in family
            if value is None and (has_null or default in (None, [], {})):
                continue
            # Python takes the string "false" for true, and true for the number 1.
            if type(value) is not kind and (type(value), kind) != (int, float):
                raise ValueError(f"expected {name} of type {kind.__name__}, got {value!r}")
            least = 0 if name in ("max_window_layers", "rms_norm_eps") else 1
            if kind in (int, float) and not least <= value < math.inf:
                raise ValueError(f"expected {name} >= {least}, got {value}")
        c = ModelConfig(**config_fields(said, differs))
        keys = ("rope_type", "type", FULL, SLIDING)  # the last two: a dict that only Gemma has
        types = [rope.get(x, "default") for rope in c.rope_parameters.values() for x in keys]
        finite = [c.frequencies(kind).isfinite().all() for kind in c.rope_parameters]
        unknown = {  # setting -> has it a value that the equations above do not have?
            "is_causal": hf_config.get("is_causal") is False,
            "hidden_act": c.hidden_act not in ACTIVATIONS,
            "layer_types": {*(hf_config.get("layer_types") or c.layer_types)} - {FULL, SLIDING},
            "num_hidden_layers": c.num_hidden_layers != len(c.layer_types),
            "sliding_window": SLIDING in c.layer_types and c.sliding_window is None,
            "num_key_value_heads": c.num_attention_heads % c.num_key_value_heads,
            "num_experts_per_tok": c.num_experts_per_tok > c.num_experts,
            "head_dim": c.head_dim % 2 or c.head_dim == 0,  # 0: more heads than hidden_size
            "rope_parameters": types.count("default") < len(types) or not all(finite),
        } | {name: hf_config.get(name) for name in NOT_HERE}
        for name in filter(unknown.get, unknown):  # the first such setting
            value = hf_config.get(name, getattr(c, name, None))
            raise ValueError(f"expected a model of the equations above, got {name} {value}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{directory}/config.json: {error}") from error
    return c


def stored(name, p, /):
    """Return {name: tensor} of a parameter in a file, which has a matrix for each expert."""
    path, is_stack, part = name.partition(".experts.")
    if not is_stack:
        return {name: p}
    return {f"{path}.experts.{e}.{part}.weight": p_e for e, p_e in enumerate(p)}


def load(directory):
    """Load the model of a Hugging Face directory, in float32. ValueError for odd tensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    config = read_config(directory)
    files = sorted(Path(directory).glob("model*.safetensors"))
    adapters = sorted(Path(directory).glob("adapter_*"))  # transformers adds one to its base
    try:
        tensors = [pair for file in files for pair in load_file(file).items()]
        found = dict(tensors)
        if adapters or not 0 < len(found) == len(tensors):
            names = [file.name for file in files + adapters]
            raise ValueError(f"expected one set of weights, got {names}")
        # Old files also have the frequencies of (5), and some have a copy of a tied head.
        found = {name: x for name, x in found.items() if not name.endswith("rotary_emb.inv_freq")}
        copy = found.pop("lm_head.weight", None) if config.tie_word_embeddings else None
        if copy is not None and not copy.equal(found.get("model.embed_tokens.weight", copy)):
            raise ValueError("expected a tied head, got a lm_head.weight that is not the embedding")
        # Our experts are stacked. torch names tensors that are missing, left over or misshapen.
        with torch.device("meta"):  # shapes without memory
            model = Transformer(config)
        for name, p in model.named_parameters():
            if ".experts." in name:
                found[name] = torch.stack([found.pop(x) for x in stored(name, p)])
        model.load_state_dict(found, assign=True)
        model.to(torch.float32)
        wrong = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        if wrong:
            raise ValueError(f"expected finite weights, got NaN or infinity in {wrong[0]}")
    except (AttributeError, LookupError, RuntimeError, SafetensorError, ValueError) as error:
        raise ValueError(f"{directory}: {' '.join(str(error).split())[:500]}") from error
    return model


def save(weights, directory, source):
    """Write weights, {name: whole tensor}, and other files of `source` for transformers."""
    from safetensors.torch import save_file
    wrong = [name for name, p in weights.items() if not p.isfinite().all()]
    if wrong:
        raise ValueError(f"expected finite weights, got NaN or infinity in {wrong[0]}")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, p in weights.items():
        tensors |= stored(name, p.detach().cpu().contiguous())
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    # The tokenizer and its template are the source's, and so is the config but for the dtype. Other
    # files may be of other weights: an adapter, an index, an optimizer's state.
    names = "config.json generation_config.json tokenizer* *tokens*.json chat_* vocab.* merges.txt"
    for path in (path for name in names.split() for path in Path(source).glob(name)):
        shutil.copy(path, target)
    dtype = str(p.dtype).removeprefix("torch.")
    hf_config = json.loads((target / "config.json").read_text("utf-8"))
    hf_config |= dict(dtype=dtype, torch_dtype=dtype)  # the names of transformers 5 and 4
    (target / "config.json").write_text(json.dumps(hf_config, indent=2), "utf-8")


# 5. The same model token by token, and the check ------------------------------------------------
class Definition:
    """The same model in float64 by (1) to (7), one token after another, without the code above."""

    def __init__(self, model):
        self.config = model.config
        self.weights = {name: weight.double() for name, weight in model.named_parameters()}

    def linear(self, name, x):
        return self.weights[name + ".weight"] @ x + self.weights.get(name + ".bias", 0)

    def norm(self, name, x):
        weight = self.weights[name + ".weight"] + (1 if self.config.norm_offset else 0)
        return weight * x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) ** -0.5

    def heads(self, name, x, angle_d):
        # Queries (G, H / G, D / 2) or keys (G, 1, D / 2) of one token, whose products bring each
        # key head to its query heads. A pair of (5) is a complex number; e^(i angle) turns it.
        c = self.config
        y = self.linear(name + "_proj", x).view(c.num_key_value_heads, -1, c.head_dim)
        a, b = (self.norm(name + "_norm", y) if c.qk_norm else y).chunk(2, -1)
        return torch.complex(a, b) * torch.exp(1j * angle_d)

    def attention(self, n, name, states):  # (2) without its residual, of normalized states
        c = self.config
        oldest = -c.sliding_window if c.layer_types[n] == SLIDING else 0  # [-3:] is the last 3
        keys, values = [], []
        for i, h in enumerate(states):
            angle_d = i * c.frequencies(c.layer_types[n])
            q = self.heads(name + "q", h, angle_d) * (c.query_pre_attn_scalar or c.head_dim) ** -0.5
            keys.append(self.heads(name + "k", h, angle_d))
            values.append(self.linear(name + "v_proj", h).view(-1, 1, c.head_dim))
            scores = (q * torch.stack(keys[oldest:]).conj()).real.sum(-1, keepdim=True)
            out = (scores.softmax(0) * torch.stack(values[oldest:])).sum(0)
            yield self.linear(name + "o_proj", out.flatten())

    def ffn(self, n, name, h):  # (3), or (6) in a sparse layer
        c = self.config
        if n not in c.sparse_layers:
            gate = ACTIVATIONS[c.hidden_act](self.linear(name + "gate_proj", h))
            return self.linear(name + "down_proj", gate * self.linear(name + "up_proj", h))
        p = self.linear(name + "gate", h).softmax(0)
        chosen = self.choose(name, p)
        total = p[chosen].sum() if c.norm_topk_prob else 1
        stacks = [self.weights[f"{name}experts.{part}_proj"] for part in ("gate", "up", "down")]
        gate_KIM, up_KIM, down_KMI = (stack[chosen] for stack in stacks)
        inner_KI = ACTIVATIONS[c.hidden_act](gate_KIM @ h) * (up_KIM @ h)
        return torch.einsum("k,kmi,ki->m", p[chosen] / total, down_KMI, inner_KI)

    def choose(self, name, p):  # the K experts of the largest p (E,)
        return p.argsort(descending=True)[: self.config.num_experts_per_tok]

    def logits(self, tokens):  # (7), from (S,) to (S, V)
        c = self.config
        embed_scale = c.hidden_size**0.5 if c.scale_embedding else 1
        states = list(embed_scale * self.weights["model.embed_tokens.weight"][tokens])
        for n in range(c.num_hidden_layers):
            name = f"model.layers.{n}."
            normed = [self.norm(name + "input_layernorm", x) for x in states]
            for i, h in enumerate(self.attention(n, name + "self_attn.", normed)):
                # Gemma has a norm after each part, and another name for the norm before the MLP.
                post = c.post_norms
                y = states[i] + (self.norm(name + "post_attention_layernorm", h) if post else h)
                before = name + ("pre_feedforward" if post else "post_attention") + "_layernorm"
                h = self.ffn(n, name + "mlp.", self.norm(before, y))
                states[i] = y + (self.norm(name + "post_feedforward_layernorm", h) if post else h)
        head = "model.embed_tokens" if c.tie_word_embeddings else "lm_head"
        return torch.stack([self.linear(head, self.norm("model.norm", x)) for x in states])


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
    model = Transformer(ModelConfig(23, 12, 20, 2, 4, 2, 6, **family)).double()
    assert (model.model.norm.offset + model.model.norm.weight == 1).all()
    parameters = list(model.parameters())
    for weight in parameters:
        nn.init.normal_(weight, std=0.4)
    # Documents of 5, 1 and 4 tokens: by themselves, and in a row with padding between them.
    ids = torch.tensor([[-1, 0, 0, 0, 0, 0, -2, 1, -3, 2, 2, 2, 2]])
    tokens = torch.randint(23, ids.shape)
    documents = [tokens[ids == n] for n in range(3)]
    alone = torch.cat([model.hidden(document[None])[0] for document in documents])
    packed = model.hidden(tokens, attention=packed_attention(ids))[ids >= 0]
    definition = Definition(model)
    z = torch.cat([definition.logits(document) for document in documents])
    # Log-probs and entropies in chunks of 4 tokens.
    model.chunk = 4
    targets = torch.randint(23, (10,))
    chunked = model.logprobs(packed, targets, temperature=0.7)
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
        row.queue.extend([3, 9])  # 3 is an end token, but it is not sampled
    options = dict(max_new_tokens=12, end=range(7), after=lambda row: 2 < row.new < 8)
    generate(model, rows, temperature=temperature, **options)
    for row, document in zip(rows, documents):
        plain = [*document.tolist(), 3, 9]
        z_SV = definition.logits(torch.tensor(row.tokens))
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


def main(argv):
    """Check every family. Exit with 1 unless the largest error is at most 1e-10."""
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    if argv:
        sys.exit(f"expected no arguments, got {argv}")
    torch.set_num_threads(1)  # more threads do not help a small model
    errors = [check_family(family, tau) for family in CHECK_FAMILIES for tau in (0.0, 0.8)]
    error = torch.stack(errors).max().item()
    print(f"every family against the same model token by token: largest error {error:.1e}")
    if not error <= 1e-10:
        sys.exit(f"expected an error of at most 1e-10, got {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
