"""Compute gated DeltaNet, the recurrent layers of Qwen3.5, token by token and in chunks.

A recurrent layer keeps one matrix S per head instead of all keys and values. A token first lets S
fade, then replaces what S holds under its key by its value, then reads S with its query. For the
tokens t = 1, 2, .. of a document, per head, with x the layer's input and |k| = |q| = 1:

    (1)  q, k, v = silu(conv(Wx)),  conv_t = sum_n w_n (Wx)_(t-n), n = 0..kernel-1, a w per channel
    (2)  a_t     = exp(-exp(A) softplus(x_t . W_a + dt))  in (0, 1),  b_t = sigmoid(x_t . W_b)
    (3)  u_t     = b_t (v_t - (a_t S_(t-1))^T k_t)   the error of the value that S stores under k_t
         S_t     = a_t S_(t-1) + k_t u_t^T           S_0 = 0
         o_t     = S_t^T q_t / sqrt(K)
    (4)  y_t     = O [norm(o_t) * silu(Z x_t)]
    (5)  for C tokens after the state S_0. D_ij = a_(j+1) .. a_i is left of token j's write at i:
         (I + [b_i D_ij k_i . k_j]_(j<i)) U = b (V - D_i0 K S_0)
         o_i = D_i0 q_i S_0 + sum_(j<=i) D_ij (q_i . k_j) u_j,   S_C = D_C0 S_0 + sum_j D_Cj k_j u_j
    (6)  S_C = A S_0 + B and o_i = R_i S_0 + o0_i: run (3) with values [v 0] from the state [0 I],
         and it returns [o0 R] and [B A], since no column of S depends on another

As with attention, the layer does not know which tokens come before which. It calls two methods of
an `attend.Attention`, such as `Documents`, which knows. (5) has C times fewer steps than (3), and
products of (C, C) matrices in addition. Every fourth layer is softmax attention, `GatedAttention`.
Not here: the fused kernels of flash-linear-attention.

Letters:  B rows   S tokens   M width   H heads, G = H / r of keys   K width of a key   V of a value
X = 2 G K + H V channels of the convolution   C chunk   c = C + 1   k kernel   D width of a head

References: Yang et al. arXiv:2406.06484 (chunks), arXiv:2412.06464 (the gate).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.linalg import solve_triangular

import models
from full.attention.attend import Attention
from full.model.config import rope_frequencies

CHUNK = 64  # tokens of (5). With more, the triangular system grows and there are fewer steps

# The recurrence ---------------------------------------------------------------------------------
# Token by token, which is the definition, and in chunks, which trains.


def by_token(q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, S_BHKV=None):
    """Return the outputs (B, H, S, V) and the last state: equation (3) and nothing else."""
    S_BHKV = first_state(k_BHSK, v_BHSV) if S_BHKV is None else S_BHKV
    out = []
    # With a slice for each token, the backward would be quadratic in the number of tokens.
    tokens = zip(*(x.unbind(2) for x in (q_BHSK, k_BHSK, v_BHSV, log_a_BHS.exp(), b_BHS)))
    for q_BHK, k_BHK, v_BHV, a_BH, b_BH in tokens:
        S_BHKV = a_BH[..., None, None] * S_BHKV
        u_BHV = b_BH[..., None] * (v_BHV - torch.einsum("bhkv,bhk->bhv", S_BHKV, k_BHK))
        S_BHKV = S_BHKV + k_BHK[..., None] * u_BHV[..., None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", S_BHKV, q_BHK))  # (3)
    return torch.stack(out, 2), S_BHKV


def first_state(k_BHSK, v_BHSV):
    """Return the state before the first token, zeros (B, H, K, V)."""
    return v_BHSV.new_zeros(*k_BHSK.shape[:2], k_BHSK.shape[3], v_BHSV.shape[3])


def one_chunk(q_BHCK, k_BHCK, v_BHCV, log_a_BHC, b_BHC, restart_BC, S_BHKV):
    """Return the outputs (B, H, C, V) and the last state of C tokens, by (5)."""
    # Index 0 of D is the state before the chunk, index i is token i. With a restart at token 3,
    # numbers are 0 0 0 1 1, and nothing before token 3 is left at it. A decay of 0 would have no
    # logarithm, so a restart is a mask and never a decay.
    log_a_BHc = F.pad(log_a_BHC.masked_fill(restart_BC[:, None], 0.0), (1, 0))
    number_Bc = F.pad(restart_BC.cumsum(-1), (1, 0))
    left_B1cc = (number_Bc[:, :, None] == number_Bc[:, None, :]).tril()[:, None]
    # NUMERICS: log D_ij is a sum over j + 1 .. i for each i and j. A difference of two sums from
    # the chunk's start would lose what a strong decay before j leaves of it, and its gradient is a
    # large number minus itself. Pinned by
    # tests/full/test_deltanet.py::test_gradients_of_decays_in_float32.
    c = log_a_BHc.shape[-1]
    log_D_BHcc = log_a_BHc[..., None].expand(-1, -1, c, c).tril(-1).cumsum(-2)
    D_BHcc = log_D_BHcc.exp().masked_fill(~left_B1cc, 0.0)
    of_state_BHC1 = D_BHcc[..., 1:, :1]  # D_i0
    D_BHCC = D_BHcc[..., 1:, 1:]

    # Each correction depends on the earlier ones: a triangular system instead of C steps.
    system_BHCC = b_BHC[..., None] * D_BHCC * (k_BHCK @ k_BHCK.mT)  # its diagonal is not read
    right_BHCV = b_BHC[..., None] * (v_BHCV - of_state_BHC1 * (k_BHCK @ S_BHKV))
    u_BHCV = solve_triangular(system_BHCC, right_BHCV, upper=False, unitriangular=True)
    out_BHCV = of_state_BHC1 * (q_BHCK @ S_BHKV) + (D_BHCC * (q_BHCK @ k_BHCK.mT)) @ u_BHCV
    at_end_BHC1 = D_BHcc[..., -1, 1:, None]  # D_Cj
    return out_BHCV, D_BHcc[..., -1:, :1] * S_BHKV + (at_end_BHC1 * k_BHCK).mT @ u_BHCV  # (5)


def by_chunk(q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, S_BHKV=None, restart_BS=None, size=CHUNK):
    """Return what `by_token` returns, computed `size` tokens at a time by (5).

    S_BHKV: the state before the first token. Default: 0.
    restart_BS: bool. Where a document begins, with the state 0. Default: nowhere.
    """
    S_BHKV = first_state(k_BHSK, v_BHSV) if S_BHKV is None else S_BHKV
    if restart_BS is None:
        restart_BS = torch.zeros_like(b_BHS[:, 0], dtype=torch.bool)
    out = []
    chunks = [x.split(size, 2) for x in (q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS)]
    for *qkv_decay_gate, restart_BC in zip(*chunks, restart_BS.split(size, 1)):
        out_BHCV, S_BHKV = one_chunk(*qkv_decay_gate, restart_BC, S_BHKV)
        out.append(out_BHCV)
    return torch.cat(out, 2), S_BHKV


# Rows of documents ------------------------------------------------------------------------------


class Documents(Attention):
    """Compute all layers on rows of documents that are next to each other.

    attention: the callable of the softmax layers, in which tokens see their own document.
    ids_BS: int64. The number of each token's document. Default: each row is a document.
    """

    def __init__(self, attention, ids_BS=None):
        self.attention = attention
        self.ids_BS = ids_BS

    def attend(self, q, k, v, /, **options):
        return self.attention(q, k, v, **options)

    def windows(self, x_BSX, /, *, kernel, layer):
        # With kernel 3 and documents 0 0 1 1, the windows are ..0, .01, ..2 and .23. A dot is 0.
        inputs_BSXk = F.pad(x_BSX, (0, 0, kernel - 1, 0)).unfold(1, kernel, 1)
        if self.ids_BS is None:
            return inputs_BSXk
        ids_BSk = F.pad(self.ids_BS, (kernel - 1, 0), value=-2).unfold(1, kernel, 1)
        same_BSk = (ids_BSk == ids_BSk[..., -1:]).to(x_BSX.device)
        return inputs_BSXk * same_BSk[:, :, None]

    def recurrence(self, q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, /, *, layer):
        restart_BS = None
        if self.ids_BS is not None:
            restart_BS = (self.ids_BS.diff(prepend=self.ids_BS[:, :1]) != 0).to(q_BHSK.device)
        return by_chunk(q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, restart_BS=restart_BS)[0]


class TokenByToken(Documents):
    """Compute rows that are a document each, by (3) instead of (5), for audits."""

    def recurrence(self, q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS, /, *, layer):
        return by_token(q_BHSK, k_BHSK, v_BHSV, log_a_BHS, b_BHS)[0]


# The layers -------------------------------------------------------------------------------------


class GatedDeltaNet(nn.Module):
    """Compute (1) to (4): (B, S, M) -> (B, S, M). Names are Hugging Face's."""

    def __init__(self, config, layer, norm_class):
        super().__init__()
        self.layer = layer
        self.kernel = config.linear_conv_kernel_dim
        self.act = models.ACTIVATIONS[config.hidden_act]
        self.key_width = config.linear_key_head_dim  # K
        self.value_width = config.linear_value_head_dim  # V
        self.values_per_key = config.linear_num_value_heads // config.linear_num_key_heads  # r
        M, H = config.hidden_size, config.linear_num_value_heads
        width_q = config.linear_num_key_heads * self.key_width
        width_v = H * self.value_width
        X = 2 * width_q + width_v  # in the order of `rows_in_file`
        self.in_proj_qkv = nn.Linear(M, X, bias=False)
        self.in_proj_z = nn.Linear(M, width_v, bias=False)
        self.in_proj_b = nn.Linear(M, H, bias=False)
        self.in_proj_a = nn.Linear(M, H, bias=False)
        self.conv1d = nn.Conv1d(X, X, self.kernel, groups=X, bias=False)  # (X, 1, kernel)
        self.A_log = nn.Parameter(torch.zeros(H))
        self.dt_bias = nn.Parameter(torch.ones(H))
        # It scales by w, also where the other norms of the model scale by 1 + w.
        plain = SimpleNamespace(rms_norm_eps=config.rms_norm_eps, norm_offset=False)
        self.norm = norm_class(self.value_width, plain)
        self.out_proj = nn.Linear(width_v, M, bias=False)

    def forward(self, x_BSM, ropes, attention, /):
        if not isinstance(attention, Attention):
            name = getattr(attention, "__qualname__", type(attention).__name__)
            raise ValueError(f"layer {self.layer} is a gated DeltaNet: expected an `Attention`, "
                             f"got {name}")  # fmt: skip
        # NUMERICS: the decay, the state and what enters it are float32 where the model computes in
        # less: errors of a state stay in it for as long as it lasts. Pinned by
        # tests/full/test_deltanet.py::test_a_bfloat16_model_keeps_float32_states.
        wide = torch.promote_types(x_BSM.dtype, torch.float32)
        inputs_BSXk = attention.windows(
            self.in_proj_qkv(x_BSM), kernel=self.kernel, layer=self.layer)
        y_BSX = self.act((inputs_BSXk.to(wide) * self.conv1d.weight[:, 0].to(wide)).sum(-1))  # (1)

        # -1: a rank that has some of the rows has some of the key heads, with all of their values.
        K, width_v = self.key_width, self.values_per_key * self.value_width
        y_BSGX = y_BSX.unflatten(-1, (-1, 2 * K + width_v))
        q_BSGK, k_BSGK, v_BSGX = y_BSGX.split([K, K, width_v], -1)
        v_BHSV = v_BSGX.flatten(2).unflatten(-1, (-1, self.value_width)).transpose(1, 2)
        # The value heads of a key head are consecutive.
        q_BHSK, k_BHSK = (unit(x).repeat_interleave(self.values_per_key, 2).transpose(1, 2)
                          for x in (q_BSGK, k_BSGK))  # fmt: skip
        raw_BSH = self.in_proj_a(x_BSM).to(wide) + self.dt_bias.to(wide)
        log_a_BSH = -self.A_log.to(wide).exp() * F.softplus(raw_BSH)
        b_BSH = self.in_proj_b(x_BSM).to(wide).sigmoid()  # (2)
        qkv = q_BHSK * K**-0.5, k_BHSK, v_BHSV
        out_BHSV = attention.recurrence(*qkv, log_a_BSH.mT, b_BSH.mT, layer=self.layer)
        gate_BSX = F.silu(self.in_proj_z(x_BSM).to(wide))
        out_BSX = self.norm(out_BHSV.transpose(1, 2)).flatten(2) * gate_BSX
        return self.out_proj(out_BSX.to(x_BSM.dtype))  # (4)


def rows_in_file(config):
    """Return the file's row of each of our rows of in_proj_qkv, or of conv1d, int64 (X,)."""
    # A file has all q, then all k, then all v. Our rows have a key head's q and k and the v of its
    # value heads in sequence, so that ranks of t have whole heads. 2 key heads of width 1, r = 2:
    #     file   q0 q1 k0 k1 v0 v1 v2 v3
    #     ours   q0 k0 v0 v1 q1 k1 v2 v3
    G = config.linear_num_key_heads
    width_q = G * config.linear_key_head_dim
    width_v = config.linear_num_value_heads * config.linear_value_head_dim
    q, k, v = torch.arange(2 * width_q + width_v).split([width_q, width_q, width_v])
    return torch.cat([x.view(G, -1) for x in (q, k, v)], 1).flatten()


def unit(x_BSGK):
    """Return vectors of length 1, or of 0 where a vector is 0."""
    # The 1e-6 is inside the root, as the models were trained.
    return x_BSGK * (x_BSGK.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class GatedAttention(models.Attention):
    """Compute `models.Attention` with a gate on the output, and RoPE on a part of each head."""

    def __init__(self, config, layer, norm_class):
        super().__init__(config, layer, norm_class)
        self.rotary_dim = config.rotary_dim  # R: the first entries of a head, which RoPE turns
        width = 2 * config.num_attention_heads * config.head_dim  # query and gate, head by head
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)

    def forward(self, x_BSM, ropes, attention, /):
        D, R = self.head_dim, self.rotary_dim
        q_BSHD, gate_BSHD = self.q_proj(x_BSM).unflatten(-1, (-1, 2 * D)).chunk(2, -1)
        k_BSGD = self.k_proj(x_BSM).unflatten(-1, (-1, D))
        v_BGSD = self.v_proj(x_BSM).unflatten(-1, (-1, D)).transpose(1, 2)
        q_BHSD, k_BGSD = (
            torch.cat([models.apply_rope(x[..., :R], *ropes[self.kind]), x[..., R:]], -1)
            .transpose(1, 2) for x in (self.q_norm(q_BSHD), self.k_norm(k_BSGD)))  # fmt: skip
        out_BHSD = attention(q_BHSD, k_BGSD, v_BGSD, **self.options)
        return self.o_proj((out_BHSD.transpose(1, 2) * gate_BSHD.sigmoid()).flatten(2))


# The definition ---------------------------------------------------------------------------------


class HybridDefinition(models.Definition):
    """Compute `models.Definition` with recurrent layers and gated attention, not by the code above.
    """

    def attention(self, n, name, states):
        if self.config.layer_types[n] == models.FULL:
            return self.gated_attention(name, states)
        return self.recurrent(name.replace("self_attn", "linear_attn"), states)

    def turned(self, x_XD, position):
        """Turn the first R entries of each head: entries n and n + R / 2 are a complex number."""
        c = self.config
        f_d, factor = rope_frequencies(c.rope_parameters[models.FULL], c.rotary_dim)
        a, b, rest = x_XD.split([len(f_d), len(f_d), c.head_dim - 2 * len(f_d)], -1)
        z = torch.complex(a, b) * torch.exp(1j * position * f_d) * factor
        return torch.cat([z.real, z.imag, rest], -1)

    def gated_attention(self, name, states):
        D = self.config.head_dim
        keys, values = [], []
        for i, h in enumerate(states):
            query, gate = self.linear(name + "q_proj", h).view(-1, 2, D).unbind(1)
            key = self.norm(name + "k_norm", self.linear(name + "k_proj", h).view(-1, D))
            keys.append(self.turned(key, i))
            values.append(self.linear(name + "v_proj", h).view(-1, D))
            query = self.turned(self.norm(name + "q_norm", query), i).unflatten(0, (len(key), -1))
            p = torch.einsum("grd,jgd->grj", query, torch.stack(keys)) * D**-0.5
            out = torch.einsum("grj,jgd->grd", p.softmax(-1), torch.stack(values)).flatten(0, 1)
            yield self.linear(name + "o_proj", (out * gate.sigmoid()).flatten())

    def recurrent(self, name, states):
        c = self.config
        G, H = c.linear_num_key_heads, c.linear_num_value_heads
        K, V = c.linear_key_head_dim, c.linear_value_head_dim
        # The rows of a file: all q, all k, all v.
        to_file = rows_in_file(c).argsort()
        into = self.weights[name + "in_proj_qkv.weight"][to_file]
        filters = self.weights[name + "conv1d.weight"][to_file, 0]  # the last is of the token
        inputs, S = [], torch.zeros(H, K, V, dtype=torch.float64)
        for h in states:
            inputs.append(into @ h)
            window = torch.stack(inputs[-c.linear_conv_kernel_dim :], -1)
            mixed = (filters[:, -window.shape[1] :] * window).sum(-1)
            q, k, v = models.ACTIVATIONS[c.hidden_act](mixed).split([G * K, G * K, H * V])  # (1)
            q, k = (x.view(G, K) for x in (q, k))
            q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            dt = self.linear(name + "in_proj_a", h) + self.weights[name + "dt_bias"]
            a = torch.exp(-self.weights[name + "A_log"].exp() * torch.log1p(dt.exp()))
            b = self.linear(name + "in_proj_b", h).sigmoid()  # (2)
            heads = []
            for n, value in enumerate(v.view(H, V)):
                key, query = (x[n * G // H] for x in (k, q))
                faded = a[n] * S[n]
                state = faded + torch.outer(key, b[n] * (value - key @ faded))
                heads.append((state, query @ state * K**-0.5))  # (3)
            S, out = (torch.stack(x) for x in zip(*heads))
            gate = self.linear(name + "in_proj_z", h)
            gate = gate * gate.sigmoid()
            # This norm scales by w, also where the others scale by 1 + w.
            shrink = (out.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) ** -0.5
            out = self.weights[name + "norm.weight"] * out * shrink
            yield self.linear(name + "out_proj", out.flatten() * gate)  # (4)
