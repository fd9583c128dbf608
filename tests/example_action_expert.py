"""Add an action expert to a language model through its attention callable.

    python tests/example_action_expert.py check      # 5 s: prints the largest error, float64
    python tests/example_action_expert.py control    # 20 s: trains on a toy task, prints its error

Every layer of models.py calls attention(q, k, v, layer=, scale=), in sliding layers with window=
too. The callable can record keys and values, and it can attend to more keys than the layer
computed. A robot policy like pi0 needs nothing else. The language model reads a prefix, such as
images and an instruction. The expert is a narrower stack of the same layers. Its tokens, the
suffix, attend to the prefix and to each other. Its output v is a velocity, learned by flow
matching (1) and integrated to actions (2):

    (1) flow = mean |v(x_tau, tau) - (a - eps)|^2 with x_tau = tau a + (1 - tau) eps
    (2) x_(tau + 1/n) = x_tau + v(x_tau, tau) / n, from x_0 = eps to x_1, the actions

a is the actions, eps is noise, and tau in 0..1 is the time of the flow. `check` compares v with
its definition, where prefix and suffix are one sequence in one dense attention per layer.

    B batch rows      S tokens of any row     P prefix tokens     M width of the expert
    N actions         A numbers an action     T suffix tokens: one for the state, if any, and N
    H query heads     G key/value heads       D head size

pi0: arXiv:2410.24164. Stopped gradient (knowledge insulation): arXiv:2505.23705.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from full.model.transformer import Layer, RMSNorm, Rope, Transformer, draw_weights
from full.tiny import tiny
from models import SLIDING, apply_rope

def masked_attention(q_BHTD, k_BGSD, v_BGSD, seen_BTS, /, *, scale):
    """Attend to the keys that a (B, T, S) mask selects. A query that sees nothing gets 0."""
    # NUMERICS: for such a query some kernels give 0 and others NaN. It sees all keys here and is
    # zeroed afterwards. Pinned by tests/full/test_action.py::test_padding_gives_zero_not_nan.
    alive_BT1 = seen_BTS.any(-1, keepdim=True)
    options = dict(attn_mask=(seen_BTS | ~alive_BT1)[:, None], scale=scale, enable_gqa=True)
    out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSD, **options)
    return torch.where(alive_BT1[:, None], out_BHTD, 0)


def block_attention(block_BS, valid_BS, positions_BS, /):
    """Return an attention callable: a token sees its own block and all blocks before it.

    block_BS: integers, ascending along S. Blocks 0 0 1: tokens 0 and 1 see each other, and token 2
        sees all three. Blocks 0 1 2: causal attention.
    valid_BS: bool, off for PAD. No token sees PAD, and the output of PAD is 0.
    positions_BS: integers. A sliding window reaches back by positions, because PAD has none.
    """
    seen_BSS = block_BS[:, None] <= block_BS[:, :, None]
    seen_BSS = seen_BSS & valid_BS[:, None] & valid_BS[:, :, None]
    back_BSS = positions_BS[:, :, None] - positions_BS[:, None]

    # There may be fewer queries than keys. Then the queries are the last tokens.
    def attention(q_BHTD, k_BGSD, v_BGSD, /, *, layer, scale, window=None):
        now_BSS = seen_BSS if window is None else seen_BSS & (back_BSS < window)
        now_BTS = now_BSS[:, -q_BHTD.shape[2] :]
        return masked_attention(q_BHTD, k_BGSD, v_BGSD, now_BTS, scale=scale)

    return attention


class Prefix:
    """Record a prefix's keys and values by layer, and let a suffix attend to them: `velocity_of`.

    block_BP, valid_BP, positions_BP: as in `block_attention`. Default: no PAD, positions 0..P-1.
    detach: bool. Stop the gradient at the recorded keys and values, so that the expert's noisy
        gradient does not damage a pretrained model. Default: False.
    """

    def __init__(self, block_BP, valid_BP=None, positions_BP=None, *, detach=False):
        ones_BP = torch.ones_like(block_BP)
        valid_BP = ones_BP if valid_BP is None else valid_BP
        positions_BP = ones_BP.cumsum(1) - 1 if positions_BP is None else positions_BP
        self.tokens = block_BP, valid_BP.bool(), positions_BP
        self.attention = block_attention(*self.tokens)
        self.detach = detach
        self.layers = {}  # layer -> k and v, each (B, G, P, D)

    def record(self, q_BHPD, k_BGPD, v_BGPD, /, *, layer, **options):
        """Attend within the prefix, and keep the layer's keys and values."""
        self.layers[layer] = tuple(x.detach() if self.detach else x for x in (k_BGPD, v_BGPD))
        return self.attention(q_BHPD, k_BGPD, v_BGPD, layer=layer, **options)

    def after(self, positions_BT, blocks_T, /):
        """Return the attention callable of a suffix, whose blocks follow the prefix's blocks."""
        block_BT = (self.tokens[0].max() + 1 + blocks_T).expand_as(positions_BT)
        after = block_BT, torch.ones_like(block_BT).bool(), positions_BT
        attention = block_attention(*(torch.cat(pair, 1) for pair in zip(self.tokens, after)))

        def suffix(q_BHTD, k_BGTD, v_BGTD, /, *, layer, **options):
            pairs = zip(self.layers[layer], (k_BGTD, v_BGTD))
            k_BGSD, v_BGSD = (torch.cat(pair, 2) for pair in pairs)
            return attention(q_BHTD, k_BGSD, v_BGSD, layer=layer, **options)

        return suffix


class ActionExpert(nn.Module):
    """Compute v of (1) with layers that attend to a prefix. Module names are openpi's.

    config: ModelConfig of the expert. `require_fits` checks that it agrees with the prefix's model.
    action_dim: A.
    state_dim: size of the robot's state, which becomes a token before the actions. Default: none.
    """

    def __init__(self, config, *, action_dim, state_dim=0):
        super().__init__()
        M = config.hidden_size
        if config.sparse_layers or M % 2:
            raise ValueError(f"expected dense layers of even width, got {config}")
        self.config = config
        self.rope = Rope(config)
        self.action_in_proj = nn.Linear(action_dim, M)
        self.action_time_mlp_in = nn.Linear(2 * M, M)
        self.action_time_mlp_out = nn.Linear(M, M)
        self.action_out_proj = nn.Linear(M, action_dim)
        self.state_proj = nn.Linear(state_dim, M) if state_dim else None
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(M, config)

    def require_fits(self, prefix_config):
        """Raise ValueError if the expert cannot attend to the keys of such a prefix."""
        for name in ("num_hidden_layers", "head_dim", "num_key_value_heads", "layer_types"):
            ours, theirs = getattr(self.config, name), getattr(prefix_config, name)
            if ours != theirs:
                raise ValueError(f"{name} is {ours} in the expert and {theirs} in the prefix")

    def forward(self, actions_BNA, tau_B, /, prefix, *, positions_B1, state=None):
        """Return the velocity (B, N, A) of noisy actions at times tau.

        prefix: a `Prefix` that has recorded, or any object with the same method `after`.
        positions_B1: int64. Position of the first suffix token, after the prefix's last position.
        state: (B, state_dim), for an expert with a state.
        """
        if (self.state_proj is None) != (state is None):
            raise ValueError(f"this expert {'needs a' if self.state_proj else 'has no'} state")

        # Each action's token is made of the noisy action and the time, as in pi0.
        N = actions_BNA.shape[1]
        time_BM = time_features(tau_B, self.config.hidden_size).to(actions_BNA.dtype)
        time_BNM = time_BM[:, None].expand(-1, N, -1)
        x_BTM = torch.cat([self.action_in_proj(actions_BNA), time_BNM], -1)
        x_BTM = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(x_BTM)))
        if state is not None:
            x_BTM = torch.cat([self.state_proj(state)[:, None], x_BTM], 1)

        # The state is block 0 and sees no action. The actions are block 1: they see the state and
        # each other, because the expert plans all of them at once.
        place_T = torch.arange(x_BTM.shape[1], device=x_BTM.device)
        positions_BT = positions_B1 + place_T
        ropes = self.rope(positions_BT, x_BTM.dtype)
        attention = prefix.after(positions_BT, (place_T >= len(place_T) - N).long())
        for layer in self.layers:
            x_BTM = layer(x_BTM, ropes, attention)
        return self.action_out_proj(self.norm(x_BTM)[:, -N:])


def time_features(tau_B, width, /):
    """Return sines and cosines of tau, (B, width), with pi0's periods from 0.004 to 4."""
    dtype = torch.promote_types(tau_B.dtype, torch.float32)
    fraction = torch.linspace(0, 1, width // 2, dtype=dtype, device=tau_B.device)
    angle_Bm = 2 * math.pi * tau_B.to(dtype)[:, None] / (0.004 * 1000**fraction)
    return torch.cat([angle_Bm.sin(), angle_Bm.cos()], -1)


def flow_time(uniform, /):
    """Map uniform draws to tau = 0.999 (1 - s), s from Beta(1.5, 1), as in pi0's appendix B."""
    # Small tau, near the noise, is more likely: the expert still has to choose the actions there.
    return 0.999 * (1 - uniform ** (2 / 3))


def flow_matching_loss(velocity, actions_BNA, noise_BNA, tau_B, /):
    """Return each row's loss, equation (1), (B,), in float32 or better."""
    # The path from noise to actions is straight, so its velocity is the same at every tau.
    tau_B11 = tau_B[:, None, None]
    x_BNA = tau_B11 * actions_BNA + (1 - tau_B11) * noise_BNA
    error_BNA = velocity(x_BNA, tau_B) - (actions_BNA - noise_BNA)
    dtype = torch.promote_types(error_BNA.dtype, torch.float32)
    return error_BNA.to(dtype).square().mean((1, 2))  # (1)


@torch.no_grad()
def sample_actions(velocity, noise_BNA, /, *, steps=10):
    """Integrate the velocity from noise to actions (B, N, A), by Euler's method."""
    # NUMERICS: the steps add up in float32 or better: in bfloat16 1 + 1/1000 is 1. Pinned by
    # tests/full/test_action.py::test_in_bfloat16_the_expert_is_as_good_as_one_dense_attention.
    x_BNA = noise_BNA.to(torch.promote_types(noise_BNA.dtype, torch.float32))
    for n in range(steps):
        tau_B = noise_BNA.new_full(noise_BNA.shape[:1], n / steps)
        x_BNA = x_BNA + velocity(x_BNA.to(noise_BNA.dtype), tau_B) / steps  # (2)
    return x_BNA.to(noise_BNA.dtype)


def control_case(dtype, rows=3, seed=0):
    """Return a prefix model, an action expert and a batch of the toy task."""
    sizes = dict(model_type="gemma3_text", head_dim=8, num_attention_heads=4, vocab_size=32,
                 num_key_value_heads=2, num_hidden_layers=2, sliding_window=5)  # fmt: skip
    big = tiny(**sizes, hidden_size=48, intermediate_size=96, initializer_range=0.1)
    small = dataclasses.replace(big, hidden_size=24, intermediate_size=48)
    model, expert = Transformer(big), ActionExpert(small, action_dim=2, state_dim=2)
    for n, module in enumerate((model, expert)):
        draw_weights(module.to(dtype), seed + n)
    expert.require_fits(big)
    return model, expert, control_batch(dtype, rows, seed)


def control_batch(dtype, rows, seed):
    """Draw a batch: go from `state` to the goal that two of six tokens name, in 4 equal steps."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(16, (rows, 4), generator=generator)  # they mean nothing
    bins = torch.randint(16, (rows, 2), generator=generator)
    state = torch.rand(rows, 2, generator=generator).to(dtype) * 2 - 1
    goal = (bins + 0.5).to(dtype) / 8 - 1
    return dict(
        tokens=torch.cat([words[:, :2], bins[:, :1] + 16, words[:, 2:], bins[:, 1:] + 16], 1),
        state=state, actions=(goal - state)[:, None].expand(-1, 4, -1),
        noise=torch.randn(rows, 4, 2, generator=generator).to(dtype),
        tau=flow_time(torch.rand(rows, generator=generator).to(dtype)),
    )  # fmt: skip


def velocity_of(model, expert, batch):
    """Run the batch's prefix once, and return v(x, tau) of equation (1)."""
    tokens, state = batch["tokens"], batch["state"]
    prefix = Prefix(torch.zeros_like(tokens))
    model.hidden(tokens, attention=prefix.record)
    first = torch.full_like(tokens[:, :1], tokens.shape[1])
    return lambda x, tau: expert(x, tau, prefix, positions_B1=first, state=state)


def control(steps=400):
    """Train both streams, sample actions, and return 0 if they end near the goal."""
    model, expert, _ = control_case(torch.float32)
    parameters = [*model.parameters(), *expert.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps + 1):
        # Every step draws new rows, so the distance is measured before they are trained on.
        batch = control_batch(torch.float32, 128, 1 + step)
        velocity = velocity_of(model, expert, batch)
        loss = flow_matching_loss(velocity, batch["actions"], batch["noise"], batch["tau"]).mean()
        if step % 100 == 0:
            actions = sample_actions(velocity, batch["noise"])
            missed = (actions - batch["actions"]).mean(1).norm(dim=-1).mean().item()
            print(f"step {step:4}  loss {loss.item():.4f}  distance from the goal {missed:.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(json.dumps({"control": "flow", "ok": missed < 0.15, "distance": round(missed, 4)}))
    return 0 if missed < 0.15 else 1


def joint(model, expert, batch):
    """Return v by definition: prefix and suffix in one dense attention per layer."""
    s = expert.action_in_proj(batch["noise"])
    time = time_features(batch["tau"], expert.config.hidden_size)[:, None].to(s).expand_as(s)
    s = expert.action_time_mlp_out(F.silu(expert.action_time_mlp_in(torch.cat([s, time], -1))))
    s = torch.cat([expert.state_proj(batch["state"])[:, None], s], 1)
    x = model.embed(batch["tokens"])
    P, T, D = x.shape[1], s.shape[1], model.config.head_dim
    block, place = torch.tensor([0] * P + [1] + [2] * (T - 1)), torch.arange(P + T)
    for n, kind in enumerate(model.config.layer_types):
        # Each stream has its own weights. Queries, keys and values have the same shape per token.
        parts, layers = [], (model.model.layers[n], expert.layers[n])
        for layer, stream, at in zip(layers, (x, s), place.split([P, T])):
            attn, h = layer.self_attn, layer.input_layernorm(stream)
            q, k, v = (f(h).unflatten(-1, (-1, D)) for f in (attn.q_proj, attn.k_proj, attn.v_proj))
            turn = model.rope(at[None], x.dtype)[kind]
            parts.append((apply_rope(attn.q_norm(q), *turn), apply_rope(attn.k_norm(k), *turn), v))

        # From here on the P + T tokens are one sequence of blocks: prefix, state, actions.
        q, k, v = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(*parts))
        seen = block <= block[:, None]
        if kind == SLIDING:
            seen = seen & (place[:, None] - place < model.config.sliding_window)
        options = dict(scale=attn.options["scale"], enable_gqa=True)
        a = F.scaled_dot_product_attention(q, k, v, seen, **options).transpose(1, 2).flatten(2)

        # The streams part again, for the output projections and the feed-forward parts.
        outs = []
        for layer, stream, part in zip(layers, (x, s), a.split([P, T], 1)):
            y = stream + layer.post_attention_layernorm(layer.self_attn.o_proj(part))
            h = layer.mlp(layer.pre_feedforward_layernorm(y))
            outs.append(y + layer.post_feedforward_layernorm(h))
        x, s = outs
    return expert.action_out_proj(expert.norm(s)[:, 1:])


@torch.no_grad()
def largest_error():
    """Return the largest relative error of v against `joint`, over the rows of a batch."""
    model, expert, batch = control_case(torch.float64)
    torch.manual_seed(0)
    for p in (*model.parameters(), *expert.parameters()):
        p += 0.1 * torch.randn_like(p)  # norms and biases leave their neutral values
    want = joint(model, expert, batch)
    error = velocity_of(model, expert, batch)(batch["noise"], batch["tau"]) - want
    return (error.flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max().item()


def main(argv):
    """Run one of the two commands, and return its exit code."""
    if argv == ["control"]:
        return control()
    if argv != ["check"]:
        print("usage: python tests/example_action_expert.py check | control", file=sys.stderr)
        return 2
    error = largest_error()
    print(f"largest relative error against one dense attention: {error:.1e}")
    return 0 if error <= 1e-12 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
