"""What `python models.py inspect | bench | control` run, and the longer half of its `check`.

inspect: what a checkpoint holds and what of it would be loaded.
control: trains a tiny Gemma 3 with an action expert on a toy control task, by flow matching.
bench: tokens a second of generation and of training, against transformers if it is installed,
parameters, FLOPs and peak memory. One thread, CPU seconds, alternating; with --device cuda seconds
of the wall, and with --size large a Qwen3-0.6B in bfloat16.
"""

import argparse
import dataclasses
import json
import math
import resource
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch

import models
from models import (
    SLIDING,
    ActionExpert,
    Balance,
    ModelConfig,
    Prefix,
    Transformer,
    block_attention,
    flow_matching_loss,
    flow_time,
    generate,
    grouped_linear,
    load_hf,
    rotate,
    sample_actions,
    save_hf,
    time_features,
    tiny,
    tiny_model,
)  # fmt: skip
from models import _relative as relative

# check -----------------------------------------------------------------------------------------

ROPES = {  # one of each other type, short enough that a few tokens tell them apart
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
}  # fmt: skip
CASES = {
    f"qwen3 {kind}": ("qwen3", dict(
        max_position_embeddings=40, rope_parameters={models.FULL: {"rope_type": kind, **rope}}))
    for kind, rope in ROPES.items()
}  # fmt: skip


def rows(cases, transformers):
    """(path, error, bound) of what `models.check` shows beside its own cases, None for all."""
    mine = {} if cases else CASES
    found = [(f"{name}: {path}", e, 1e-12) for name in mine for path, e in rope_errors(name)]
    found += [(f"experts: {path}", error, bound) for path, error, bound in expert_errors()]
    return found + [*transformers_errors((cases or models.CASES) | mine if transformers else {})]


def rope_errors(name, device="cpu"):
    """(path, error) of one of CASES against `models.definition`."""
    model_type, changes = CASES[name]
    model = tiny_model(model_type, **changes)
    there = tiny_model(model_type, **changes).to(device)
    errors = models._path_errors(model, defined_frequencies, there)
    if name != "qwen3 dynamic":
        return [*errors]
    # it depends on the call's longest row: neither packed nor in pieces
    long = torch.randint(model.config.vocab_size, (50,))
    truth = models.definition(model, long, defined_frequencies)
    logits = there(long[None].to(device))[0]
    return [*islice(errors, 2), ("beyond its length", relative(logits, truth))]


def defined_frequencies(rope, D, length, longest):
    """f_n of (5) as Python floats, and the factor on cos and sin: rope's five types, one by one."""
    kind, theta, out = rope["rope_type"], rope["rope_theta"], []
    factor, old = rope.get("factor"), rope.get("original_max_position_embeddings")
    if kind == "dynamic":  # a longer call turns more slowly
        theta *= (factor * max(length, longest) / longest - factor + 1) ** (D / (D - 2))
    for n in range(D // 2):
        f = theta ** (-2 * n / D)
        turns = old and old * f / (2 * math.pi)  # over the length that the model was trained on
        if kind == "linear":
            f /= factor
        elif kind == "llama3":  # few turns: stretched by factor; many: as they are; between: mixed
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            keep = min(max((turns - low) / (high - low), 0), 1)
            f = keep * f + (1 - keep) * f / factor
        elif kind == "yarn":  # the same, with a ramp that is linear in n
            ends = [
                D * math.log(old / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
            ]
            if rope.get("truncate", True):
                ends = [math.floor(ends[0]), math.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], D - 1)
            keep = 1 - min(max((n - low) / (high - low or 0.001), 0), 1)
            f = keep * f + (1 - keep) * f / factor
        out.append(f)
    return out, models._yarn_attention_factor(rope) if kind == "yarn" else 1.0


def expert_errors(device="cpu"):
    """(path, error, bound): the grouped product, the balance loss, the action expert."""
    counts = torch.tensor([3, 0, 5, 4])
    x, weight = torch.randn(12, 16), torch.randn(4, 8, 16)
    truth = grouped_linear(x.double(), weight.double(), counts)
    error = relative(grouped_linear(x.to(device), weight.to(device), counts.to(device)), truth)
    yield "grouped product against float64's loop", error, 1e-6
    p, sequences = torch.rand(9, 6, dtype=torch.float64), [[0, 1, 2, 5], [0, 1, 6, 7, 8]]
    chosen = p.topk(2, -1).indices
    owner = torch.cat([torch.full((len(s),), n) for n, s in enumerate(sequences)])
    balance = Balance(owner.to(device), torch.tensor(sum(sequences, [])).to(device), coef=0.3)
    got = balance(p.to(device), chosen.to(device), layer=0).cpu()
    want = 0.3 * sum(
        6 / (2 * len(s) ** 2) * sum(p[t, e] for t in s for u in s for e in chosen[u])
        for s in sequences
    )
    yield "balance loss, shared tokens", abs((got - want) / want).item(), 1e-12
    model = tiny_model("gemma3_text")
    small = dataclasses.replace(model.config, hidden_size=16, intermediate_size=20)
    expert = ActionExpert(small, action_dim=3, state_dim=2).double().init_weights(2)
    tokens, tau = torch.randint(53, (2, 6)), torch.rand(2).double()
    actions, state = torch.randn(2, 5, 3).double(), torch.randn(2, 2).double()
    want = joint(model, expert, tokens, actions, tau, state)
    model, expert, tokens, actions, tau, state = (
        x.to(device) for x in (model, expert, tokens, actions, tau, state)
    )
    prefix = Prefix(block_attention(torch.zeros_like(tokens)))
    model.hidden(tokens, attention=prefix.record)
    start = torch.full((2, 1), 6, device=device)
    got = expert(actions, tau, prefix, positions_B1=start, state=state)
    yield "action expert, two streams as one", relative(got, want), 1e-12


def joint(model, expert, tokens, actions, tau, state):
    """The expert's velocity with prefix and suffix in one dense attention a layer: definition."""
    time = time_features(tau, expert.config.hidden_size)[:, None]
    s = torch.cat([expert.action_in_proj(actions), time.expand(-1, actions.shape[1], -1)], -1)
    s = expert.action_time_mlp_out(torch.nn.functional.silu(expert.action_time_mlp_in(s)))
    s = torch.cat([expert.state_proj(state)[:, None], s], 1)
    x, P, T, D = model.embed(tokens), tokens.shape[1], s.shape[1], model.config.head_dim
    block = torch.cat([torch.zeros(P), torch.ones(1), torch.full((T - 1,), 2.0)])
    place = torch.arange(P + T)
    for n, kind in enumerate(model.config.layer_types):
        parts, layers = [], (model.model.layers[n], expert.layers[n])
        for layer, stream, first in zip(layers, (x, s), (0, P)):
            at, h = layer.self_attn, layer.input_layernorm(stream)
            q, k, v = (f(h).unflatten(-1, (-1, D)) for f in (at.q_proj, at.k_proj, at.v_proj))
            turn = model.rope(first + torch.arange(stream.shape[1])[None], x.dtype)[kind]
            parts.append((rotate(at.q_norm(q), *turn), rotate(at.k_norm(k), *turn), v))
        q, k, v = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(*parts))
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        seen = block <= block[:, None]
        if kind == SLIDING:
            seen = seen & (place[:, None] - place < model.config.sliding_window)
        score = (q @ k.mT * at.scale).masked_fill(~seen, -math.inf)
        a = (score.softmax(-1) @ v).transpose(1, 2).flatten(2).split([P, T], 1)
        outs = []
        for layer, stream, part in zip(layers, (x, s), a):
            y = stream + layer.post_attention_layernorm(layer.self_attn.o_proj(part))
            h = layer.mlp(layer.pre_feedforward_layernorm(y))
            outs.append(y + layer.post_feedforward_layernorm(h))
        x, s = outs
    return expert.action_out_proj(expert.norm(s)[:, 1:])


def transformers_errors(cases):
    """(row, error, bound) of each case against transformers; prints SKIP if it is not there."""
    try:
        import safetensors  # noqa: F401
        import transformers
    except ImportError as error:
        print(f"SKIP: logits and gradients against transformers ({error})")
        return
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name, (model_type, changes) in cases.items():
        if "router_bias_rate" in changes:
            continue
        ours = tiny_model(model_type, dtype=torch.float32, **changes)
        with tempfile.TemporaryDirectory() as folder:
            save_hf(ours, folder)
            load = transformers.AutoModelForCausalLM.from_pretrained
            theirs = load(folder, dtype=torch.float32, attn_implementation="eager")
            again = load_hf(folder)
        same = all(map(torch.equal, ours.parameters(), again.parameters()))
        tokens = torch.randint(1, ours.config.vocab_size, (2, 15))  # 0: Gemma's PAD, no gradient
        a, b = ours(tokens), theirs(tokens).logits
        yield f"{name}: logits of transformers", relative(a, b) if same else math.inf, 1e-5
        upstream = torch.randn_like(b)
        (b * upstream).sum().backward()
        (a * upstream).sum().backward()
        known = dict(theirs.named_parameters())
        error = max(relative(p.grad, their_gradient(n, known)) for n, p in ours.named_parameters())
        yield f"{name}: gradients of transformers", error, 1e-5


def their_gradient(name, parameters):
    """transformers' gradient of our parameter `name`; from version 5 on its experts are fused."""
    path, _, leaf = name.rpartition(".")
    if name in parameters:
        return parameters[name].grad
    if f"{path}.gate_up_proj" in parameters:
        return parameters[f"{path}.gate_up_proj"].grad.chunk(2, 1)[leaf == "up_proj"]
    count = sum(key.startswith(path) and key.endswith(f"{leaf}.weight") for key in parameters)
    return torch.stack([parameters[f"{path}.{e}.{leaf}.weight"].grad for e in range(count)])


# inspect ---------------------------------------------------------------------------------------

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def inspect(directory):
    """Print a checkpoint's config, its tensors, and what `load_hf` would do with each.

    Of a directory that holds no weights, the config and how many parameters it asks for.
    """
    config = ModelConfig.from_hf(directory)
    weights = [name for name in WEIGHTS if (Path(directory) / name).exists()]
    tensors, others = models._open_checkpoint(directory) if weights else ({}, 0)
    print(json.dumps(dataclasses.asdict(config), indent=2))

    # The number in front is exact: who reads it with a program need not round.
    count, active = parameters(config)
    size = f"{count:,} parameters"
    if config.num_experts:
        size += f", of which a token meets {active:,}"
    if not weights:
        print(f"{size}; no weights: {directory} has no {' and no '.join(WEIGHTS)}")
        return

    # On the meta device a model has shapes and no memory.
    with torch.device("meta"):
        model = Transformer(config)
    wanted = {
        piece.name: name
        for name, p in model.named_parameters()
        for piece in models._pieces(name, p.shape, tensors)
    }
    for name, stored in sorted(tensors.items()):
        part, into = stored.part, wanted.get(name, "not loaded")
        print(f"{name:60} {part.get_dtype():5} {part.get_shape()}  {stored.path.name}"
              + ("" if into == name else f"  -> {into}"))  # fmt: skip
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    dtypes = {x.part.get_dtype() for name, x in tensors.items() if name in wanted}
    for dtype in sorted(dtypes - models.DTYPES.keys()):
        print(f"refused: tensors of dtype {dtype}")
    print(f"{size}; missing {sorted(wanted.keys() - tensors.keys())}, "
          f"refused {sorted(tensors.keys() - wanted.keys() - tied)}, "
          f"not of the text model {others} tensors")  # fmt: skip


# control ---------------------------------------------------------------------------------------


def control_case(dtype, rows=3, seed=0):
    """A prefix model, an action expert and a batch of the toy task.

    The task: go from `state` to the goal that two of six tokens name, in 4 equal steps.
    """
    base = dict(model_type="gemma3_text", head_dim=8, num_attention_heads=4, vocab_size=32,
                num_key_value_heads=2, num_hidden_layers=2, sliding_window=5)  # fmt: skip
    big = tiny(**base, hidden_size=48, intermediate_size=96, initializer_range=0.1)
    small = dataclasses.replace(big, hidden_size=24, intermediate_size=48)
    model = Transformer(big).to(dtype).init_weights(seed)
    expert = ActionExpert(small, action_dim=2, state_dim=2).to(dtype).init_weights(seed + 1)
    expert.require_fits(big)
    return model, expert, control_batch(dtype, rows, seed)


def control_batch(dtype, rows, seed):
    """Tokens (rows, 6): words that mean nothing, and the goal's two coordinates; actions in steps
    of a quarter of the way, (rows, 4, 2); noise and times for (12)."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(16, (rows, 4), generator=generator)
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
    """v(x, tau) of (12) with this batch's prefix, which is computed here, once."""
    tokens = batch["tokens"]
    prefix = Prefix(block_attention(torch.zeros_like(tokens)))
    model.hidden(tokens, attention=prefix.record)
    start = torch.full((len(tokens), 1), tokens.shape[1])
    return lambda x, tau: expert(x, tau, prefix, positions_B1=start, state=batch["state"])


def control(steps=400):
    """Train both streams; sample with 10 Euler steps; 0 if the hand arrives."""
    model, expert, _ = control_case(torch.float32)
    parameters = [*model.parameters(), *expert.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps + 1):
        batch = control_batch(torch.float32, 128, 1 + step)
        velocity = velocity_of(model, expert, batch)
        loss = flow_matching_loss(velocity, batch["actions"], batch["noise"], batch["tau"]).mean()
        if step % 100 == 0:
            with torch.no_grad():
                actions = sample_actions(velocity, batch["noise"])
            missed = (actions - batch["actions"]).mean(1).norm(dim=-1).mean().item()
            print(f"step {step:4}  loss {loss.item():.4f}  distance from the goal {missed:.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(json.dumps({"control": "flow", "ok": missed < 0.15, "distance": round(missed, 4)}))
    return 0 if missed < 0.15 else 1


# bench -----------------------------------------------------------------------------------------


def qwen3(vocab_size=4096) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=16,
    )  # fmt: skip


def parameters(config) -> tuple[int, int]:
    """All parameters, and those that one token meets (K of the E experts)."""
    with torch.device("meta"):
        model = Transformer(config)
    count = 0
    active = 0
    for name, p in model.named_parameters():
        count += p.numel()
        if ".experts." in name:
            active += p.numel() // config.num_experts * config.num_experts_per_tok
        else:
            active += p.numel()
    return count, active


def flops(config, length) -> float:
    """Forward and backward of one token in a row of `length`, causal: 6 a matrix element, and
    attention's 12 H D a visible key, of which there are length / 2 or at most the window."""
    count, active = parameters(config)
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    visible = [
        length / 2 if kind == "full_attention" else min(length / 2, config.sliding_window)
        for kind in config.layer_types
    ]
    return 6 * (active - embedding) + 12 * width * sum(visible)


def seconds_of(function, device):
    """Of this process's CPU time; on CUDA of the wall, from when the device is idle to when it is
    idle again."""
    if device == "cpu":
        start = time.process_time()
        function()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def paired(ours, theirs, repeats, device="cpu"):
    """Median seconds of both, run in turn behind a warm-up, and the ratios theirs / ours."""
    ours(), theirs()
    pairs = [(seconds_of(ours, device), seconds_of(theirs, device)) for _ in range(repeats)]
    ratios = sorted(b / a for a, b in pairs)
    return *(statistics.median(x) for x in zip(*pairs)), ratios


def generation(model, theirs, *, prompts, samples, length, new):
    """Sampling at temperature 1: `samples` completions of each of `prompts` prompts."""
    device = model.head_weight.device
    tokens = torch.randint(model.config.vocab_size, (prompts, length)).to(device)
    rows = [row.tolist() for row in tokens for _ in range(samples)]

    def run():
        generate(model, rows, max_new_tokens=new, temperature=1.0, seed=0)

    def run_theirs():
        theirs.generate(tokens, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0,
                        num_return_sequences=samples, pad_token_id=0,
                        eos_token_id=None)  # fmt: skip

    what = f"generate {prompts} x {samples} x {new}, prompt {length}"
    return what, prompts * samples * new, run, run_theirs


def training(model, theirs, *, rows, length, backward=True):
    """Forward, and backward, of the mean negative log-prob of the next token."""
    tokens = torch.randint(model.config.vocab_size, (rows, length)).to(model.head_weight.device)

    def run():
        hidden = model.hidden(tokens)[:, :-1].flatten(0, 1)
        return -model.logprobs(hidden, tokens[:, 1:].flatten())[0].mean()

    def run_theirs():
        return theirs(tokens, labels=tokens).loss

    def with_backward(model, forward):
        def both():
            model.zero_grad()
            forward().backward()

        return both

    if not backward:
        return (
            f"forward {rows} x {length}",
            rows * length,
            torch.no_grad()(run),
            torch.no_grad()(run_theirs),
        )
    return (f"train {rows} x {length}", rows * length, with_backward(model, run),
            with_backward(theirs, run_theirs))  # fmt: skip


def sizes(name):
    """([(what, configuration, dtype)], cases): what `bench --size` measures, and on which model.

    A case is `generation` or `training` and its options.
    """
    def grouped(prompts, samples, length, new):
        return generation, dict(prompts=prompts, samples=samples, length=length, new=new)

    def trained(rows, length, **options):
        return training, dict(rows=rows, length=length, **options)

    # Small enough for one thread of a CPU; the vocabulary is what weighs in generation.
    if name == "default":
        shapes = [(f"Qwen3, hidden 128, 4 layers, V {v}", qwen3(v), torch.float32)
                  for v in (4096, 32768)]  # fmt: skip
        generated = [grouped(1, 8, 512, 64), grouped(4, 8, 128, 64), grouped(8, 1, 32, 64)]
        return shapes, generated + [trained(4, 256, backward=False), trained(4, 256),
                                    trained(1, 1024)]  # fmt: skip

    # For a GPU: a released shape, prompts and answers of the lengths that are trained on it.
    if name == "large":
        shapes = [("Qwen3-0.6B", ModelConfig(**QWEN3_06B), torch.bfloat16)]
        generated = [grouped(1, 8, 4096, 128), grouped(32, 8, 512, 128), grouped(8, 1, 128, 128),
                     grouped(1, 1, 128, 128)]  # fmt: skip
        return shapes, generated + [trained(4, 2048, backward=False), trained(4, 2048),
                                    trained(1, 8192)]  # fmt: skip

    # To see that the command runs.
    shapes = [("Qwen3, hidden 128, 4 layers, V 64", qwen3(64), torch.float32)]
    return shapes, [grouped(1, 2, 8, 2), trained(2, 8, backward=False), trained(2, 8)]


SIZES = "default", "large", "toy"
QWEN3_06B = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip


def bench(repeats, device="cpu", size="default"):
    """Each case of a size beside transformers' own, in one run and in turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    shapes, cases = sizes(size)
    found = {}
    rates = {}
    for name, config, dtype in shapes:
        count, active = parameters(config)
        cached = 2 * dtype.itemsize * config.num_key_value_heads * config.head_dim
        print(f"{name}: {count / 1e6:.2f} M parameters, of which a token meets {active / 1e6:.2f} "
              f"M; {flops(config, 512) / 1e6:.1f} MFLOP a trained token at 512; "
              f"{cached * config.num_hidden_layers} bytes of cache a token")  # fmt: skip
        model, theirs = pair_of(config, device, dtype)
        for work, options in cases:
            what, tokens, run, run_theirs = work(model, theirs, **options)
            key = f"V{config.vocab_size} {what}"
            if theirs is None:
                run()
                rates[key] = tokens / seconds_of(run, device)
                print(f"  {what:36} {rates[key]:8.0f} tokens/s")
                continue
            mine, other, ratios = paired(run, run_theirs, repeats, device)
            low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
            found[key] = round(middle, 2)
            rates[key] = tokens / mine
            print(f"  {what:36} {tokens / mine:8.0f} tokens/s, transformers {tokens / other:8.0f}:"
                  f" {middle:.2f} times ({low:.2f} - {high:.2f})", flush=True)  # fmt: skip

    # On CUDA the tensors that live at once, on a CPU all of the process.
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process: {peak:.0f} MB")
    print(json.dumps({"bench": "models", "times_transformers": found, "peak_mb": round(peak),
                      "tokens_per_s": rates, "device": device}))  # fmt: skip
    return 0


def pair_of(config, device="cpu", dtype=torch.float32):
    """Our model and transformers' with the same weights, or None without transformers."""
    model = Transformer(config).to(device, dtype).init_weights(0)
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: no comparison")
        return model, None
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return load_hf(folder, dtype=dtype).to(device), theirs.to(device)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["inspect", "bench", "control"])
    parser.add_argument("directory", nargs="?", help="inspect's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="bench's")
    parser.add_argument("--size", default="default", choices=SIZES, help="of bench's model")
    args = parser.parse_args(argv)
    if args.command == "inspect":
        return inspect(args.directory) or 0
    if args.command == "control":
        return control()
    return bench(args.repeats, args.device, args.size)
