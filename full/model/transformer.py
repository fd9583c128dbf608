"""Run `models.Transformer` in any dtype, with balanced experts and recurrent layers, on ranks.

Cost per token: 2 flops forward and 4 backward for each parameter outside the embedding that the
token meets (K of the E experts), and 4 S H D forward per layer in attention. A causal mask hides
half of that. Not here: dropout (no released model has any), quantized weights, vision towers.

Equations (1) to (9) are in models.py.

Letters:  B rows   S tokens of a row   C tokens that they may see   M width   V vocabulary
entries   H query heads   G key heads   D width of a head

References: RoPE arXiv:2104.09864; RMSNorm arXiv:1910.07467; GQA arXiv:2305.13245.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

import models
import parallel
from full.model import deltanet
from full.model.config import LINEAR, ModelConfig, rope_frequencies
from full.model.experts import SparseMLP
from full.model.logprobs import require_tokens_in_vocabulary, token_logprobs


class RMSNorm(models.RMSNorm):
    """Normalize by torch's kernel, also states that are wider than the weights.

    `models.RMSNorm` takes 1.4 times as long for a few rows.
    """

    def forward(self, x, /):
        # NUMERICS: torch's kernel accumulates the mean square of bf16/fp16 input in float32 and of
        # float64 in float64, and casts once, after w (transformers casts before w too). Pinned by
        # tests/full/test_models.py::test_rms_norm_accumulates_in_float32.
        if not self.offset:
            weight = self.weight.to(x.dtype)
            return F.rms_norm(x, weight.shape, weight, self.eps).to(self.weight.dtype)  # (4)
        # NUMERICS: in bf16 1 + w drops every w below 2^-8; Gemma adds and multiplies in float32 and
        # casts last. Pinned by tests/full/test_models.py::test_gemma_norm_keeps_small_weights.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.offset + self.weight.to(wide)
        return F.rms_norm(x.to(wide), weight.shape, weight, self.eps).to(self.weight.dtype)


class Rope:
    """Compute {layer type: (cos, sin)} of positions (B, S), once a forward for all layers."""

    def __init__(self, config):
        ropes = config.rope_parameters.items()
        self.frequencies = {kind: rope_frequencies(rope, config.rotary_dim) for kind, rope in ropes}
        self.moved = {}  # (device, layer type) -> f of (5) there, as each copy waits for the device

    def __call__(self, positions_BS, dtype, /):
        # NUMERICS: the angles of position 10^5 need float32; a bf16 position is wrong from 257 on.
        # Pinned by tests/full/test_models.py::test_bf16_model_keeps_float32_rope_angles.
        wide = torch.promote_types(dtype, torch.float32)
        ropes = {}
        for kind, (f_d, factor) in self.frequencies.items():
            at = positions_BS.device, kind
            if at not in self.moved:
                self.moved[at] = f_d.to(positions_BS.device)
            f_d = self.moved[at].to(wide)
            cos_BS1D, sin_BS1D = models.cos_and_sin(positions_BS.to(wide), f_d, wide)
            ropes[kind] = cos_BS1D * factor, sin_BS1D * factor
        return ropes


def causal_attention(q_BHSD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
    """Attend from token i of each row to tokens 0..i, or to the last `window` of them.

    With a window the cost is O(S window). For 2048 tokens `models.causal_attention` takes 2.8 times
    as long, and with a window of 256 tokens 4.6 times.
    """
    S = q_BHSD.shape[2]
    if window is None or window >= S:
        return models.masked_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=True, scale=scale)

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
        visible = models.visible_keys(place_1S[:, queries], place_1S[:, keys], window)
        qkv = q_BHSD[:, :, queries], k_BGSD[:, :, keys], v_BGSD[:, :, keys]
        out.append(models.masked_attention(*qkv, visible, scale=scale))
    return torch.cat(out, 2)


class Layer(models.Layer):
    """Run a layer of this folder's parts. A recurrent one has `linear_attn`, and no `self_attn`."""

    norm_class, sparse_class = RMSNorm, SparseMLP

    @staticmethod
    def attention_class(config, layer, norm_class):
        """Return the part of a layer in which tokens meet."""
        kind = deltanet.GatedAttention if config.attn_output_gate else models.Attention
        if config.layer_types[layer] == LINEAR:
            kind = deltanet.GatedDeltaNet
        return kind(config, layer, norm_class)

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if config.layer_types[layer] == LINEAR:  # Hugging Face's name for it
            self.linear_attn = self.self_attn
            del self.self_attn
        if layer in config.sparse_layers:
            self.mlp.layer = layer

    def forward(self, x_BSM, ropes, attention, /, **options):
        # As in models.py, with either kind of attention, and with options for the MLP.
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        h_BSM = mixer(self.input_layernorm(x_BSM), ropes, attention)
        if not self.post_norms:
            y_BSM = x_BSM + h_BSM
            return y_BSM + self.mlp(self.post_attention_layernorm(y_BSM), **options)
        y_BSM = x_BSM + self.post_attention_layernorm(h_BSM)
        h_BSM = self.mlp(self.pre_feedforward_layernorm(y_BSM), **options)
        return y_BSM + self.post_feedforward_layernorm(h_BSM)


def drawn_weights(model, seed: int):
    """Yield the name and the first weights of each parameter of a whole model, on the CPU.

    Matrices are normal(0, initializer_range), norms are 1, biases are 0; A and dt of recurrent
    layers are as transformers draws them. A critic's head is 0 too, so that the first values are 0.
    The seed decides all, identically in every dtype and under every plan.
    """
    # One tensor at a time: the draws of a tensor follow the draws of the tensor before it. In
    # float32 on the CPU, so that dtype and device do not change the draw.
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            is_offset = model.config.norm_offset and "linear_attn" not in name
            yield name, torch.full(p.shape, 0.0 if is_offset else 1.0)
        elif name.endswith("dt_bias"):
            yield name, torch.ones(p.shape)
        elif name.endswith("A_log"):  # decay slow and fast: a of (2) at rest is e^-0.01 to e^-21
            yield name, torch.empty(p.shape).uniform_(0.01, 16, generator=generator).log()
        elif name.endswith("bias") or name == "score.weight":
            yield name, torch.zeros(p.shape)
        else:
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            yield name, drawn.mul_(model.config.initializer_range)


@torch.no_grad()
def draw_weights(model, seed: int):
    """Fill a whole model with `drawn_weights`, and its buffers with 0, and return it."""
    for name, weight in drawn_weights(model, seed):
        model.get_parameter(name).copy_(weight)
    for buffer in model.buffers():
        buffer.zero_()
    return model


class Transformer(models.Transformer):
    """Run a causal language model: `models.Transformer` with the layers above.

    `forward(tokens)` gives logits (B, S, V). Training calls its two halves: `.hidden(tokens)`
    stops before the head, (B, S, M), and `.logprobs(hidden, targets)` applies the head in chunks
    to what is scored. Tied embeddings are one parameter, `model.embed_tokens.weight`: no `lm_head`.
    """

    layer_class, rope_class = Layer, Rope
    residual_dtype = None  # of the states between layers. None: the dtype of the weights
    head_dtype = None  # of the head's product, if it is wider. None: the dtype of the weights

    # What a plan sets.
    part = None  # the `Part` that this rank has. None: every rank has a copy
    shard = {}  # which rows of the head this rank has: group= and vocab_start=. {}: all
    calls = None  # of a sampler whose ranks run together: experts.CallsInStep

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.rope = self.rope_class(config)
        # Used unless `hidden` is given another one.
        self.attention = deltanet.Documents(causal_attention)

    def hidden(self, tokens_BS, /, *, positions=None, attention=None, on_routing=None):
        """Return the normalized states of the last layer, (B, S, M).

        tokens_BS: int64, (B, S). Token ids; or states (B, S, M) of a floating dtype, which later
            stages of a pipeline get from the stage before. They are not scaled as embeddings are.
        positions: int64, (B, S). For RoPE only. Default: 0..S-1.
        attention: attention(q, k, v, layer=, scale=) -> (B, H, S, D), with q (B, H, S, D) and with
            k and v (B, G, S, D). Sliding layers add window=. Gated DeltaNet layers want an
            `attend.Attention`. Default: `self.attention`.
        on_routing: a `Routing`, which each sparse layer calls once. Default: no call.

        ValueError for other shapes, and on a CPU for ids that are not in the vocabulary.
        """
        if self.calls is not None:
            self.calls.begin()
        if tokens_BS.dim() != (3 if tokens_BS.is_floating_point() else 2):
            got = tuple(tokens_BS.shape)
            raise ValueError(f"tokens: expected (B, S), or states (B, S, M), got {got}")
        x_BSM = tokens_BS if tokens_BS.is_floating_point() else self.embed(tokens_BS)

        # In mixed precision the sum of all layers stays wide, and each layer computes narrow: its
        # norms cast to the dtype of the weights.
        x_BSM = x_BSM.to(self.residual_dtype or x_BSM.dtype)
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=x_BSM.device)[None]
        ropes = self.rope(positions, x_BSM.dtype)
        for layer in self.model.layers:
            # A dense MLP has no router, and takes no option.
            options = {"on_routing": on_routing} if hasattr(layer.mlp, "experts") else {}
            x_BSM = layer(x_BSM, ropes, attention or self.attention, **options)
        return self.model.norm(x_BSM)

    def embed(self, tokens_BS, /):
        """Return the embeddings of tokens, (1): (B, S) -> (B, S, M)."""
        # Ids are checked here and not in embed_tokens, which tensor parallelism replaces. There
        # each rank has some rows, and a token that no rank has would silently become zeros.
        require_tokens_in_vocabulary(tokens_BS, self.config.vocab_size)
        x_BSM = self.model.embed_tokens(tokens_BS)  # (1)
        if not self.config.scale_embedding:
            return x_BSM
        # NUMERICS: the checkpoint was trained with sqrt(M) rounded to the weight's dtype: in bf16
        # sqrt(3072) is 55.5. Pinned by
        # tests/full/test_models.py::test_gemma_scales_by_a_rounded_root.
        return x_BSM * torch.tensor(self.embed_scale, dtype=x_BSM.dtype).item()

    def for_head(self, x, /):
        """Return states or rows of the head in the dtype of the head's product."""
        # NUMERICS: the head's product has as many terms as any other, but nothing after it averages
        # its rounding: an error of a logit is an error of a log-prob. So bfloat16 states and rows
        # are multiplied in float32 if head_dtype says so, and nothing is stored otherwise. Pinned
        # by tests/full/test_precision.py::test_a_float32_head_under_bfloat16.
        return x if self.head_dtype is None else x.to(torch.promote_types(x.dtype, self.head_dtype))

    def head(self, hidden, /):
        """Return the two factors of the head's product, with this rank's rows of the head."""
        return self.for_head(hidden), self.for_head(self.head_weight)

    def logits(self, hidden, /):
        """Apply the head to states of `hidden`: (..., M) -> (..., V), in the dtype of its product.
        """
        z = F.linear(*self.head(hidden))
        if not self.shard:
            return z
        if z.requires_grad:  # training asks for log-probs, which need no whole row
            raise ValueError("logits of a split vocabulary have no gradient; `logprobs` have one")
        # COMM: an all-gather over the t ranks. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        return parallel.all_gather(z, self.shard["group"], -1, self.config.vocab_size)

    def forward(self, tokens_BS, /, **options):
        """Return the logits (B, S, V) in the model's dtype. The options are those of `hidden`."""
        return self.logits(self.hidden(tokens_BS, **options))

    def logprobs(self, hidden, targets, /, *, temperature: float = 1.0):
        """Return (8) and (9) of targets (N,) given hidden (N, M): two (N,), float32 or better."""
        c = self.config
        return token_logprobs(
            *self.head(hidden), targets, temperature=temperature, vocab_size=c.vocab_size,
            **self.shard,
        )  # fmt: skip

    init_weights = draw_weights  # init_weights(seed)


class Critic(Transformer):
    """Compute the value of each state, and no log-probs: a critic.

    It has no head, so of a pipeline the first stage alone has the embedding. `load_hf` reads it
    from a policy's checkpoint, which has no `score`: it begins with zeros.
    """

    logprobs = None

    def __init__(self, config: ModelConfig):
        super().__init__(dataclasses.replace(config, tie_word_embeddings=True))
        self.score = nn.Linear(config.hidden_size, 1, bias=False)

    def values(self, hidden, /):
        """Return the value of each state, (..., M) -> (...), in float32 or better."""
        value = self.score(hidden)[..., 0]
        return value.to(torch.promote_types(value.dtype, torch.float32))
