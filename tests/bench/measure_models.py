"""Models and generation: `python tests/bench/measure_models.py [bench | check] ..`.

check: the rows of `python -m full check models`, experts, and transformers' numbers.
bench: tokens a second of generation and of training, against transformers if it is installed, and
peak memory. One thread, CPU seconds, alternating; with --device cuda seconds of the wall, and with
--size large a Qwen3-0.6B in bfloat16.
"""

import argparse
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

from full import check
from full.check import relative_error as relative
from full.experts import Balance, grouped_linear
from full.generate import generate
from full.hf import load_hf, save_hf
from full.contents import parameters
from full.model_config import ModelConfig
from full.tiny import tiny_model
from full.transformer import Transformer


def rows():
    """(path, error, bound) of what `check` shows beside the cases of full/check.py."""
    found = [(f"experts: {path}", error, bound) for path, error, bound in expert_errors()]
    return found + [*transformers_errors(check.CASES)]


def expert_errors(device="cpu"):
    """(path, error, bound): the grouped product, the balance loss."""
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
        again, theirs = through_files(ours, attn_implementation="eager")
        same = all(map(torch.equal, ours.parameters(), again.parameters()))
        tokens = torch.randint(1, ours.config.vocab_size, (2, 15))  # 0: Gemma's PAD, no gradient
        a, b = ours(tokens), theirs(tokens).logits
        yield f"{name}: logits of transformers", relative(a, b) if same else math.inf, 1e-5
        upstream = torch.randn_like(b)
        for logits in (a, b):
            (logits * upstream).sum().backward()
        known = dict(theirs.named_parameters())
        error = max(relative(p.grad, their_gradient(n, known)) for n, p in ours.named_parameters())
        yield f"{name}: gradients of transformers", error, 1e-5


def through_files(model, dtype=torch.float32, **options):
    """Our model and transformers' that a saved model is loaded as."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load_hf(folder, dtype=dtype), load(folder, dtype=dtype, **options)


def their_gradient(name, parameters):
    """transformers' gradient of our parameter `name`; from version 5 on its experts are fused."""
    path, _, leaf = name.rpartition(".")
    if name in parameters:
        return parameters[name].grad
    if f"{path}.gate_up_proj" in parameters:
        return parameters[f"{path}.gate_up_proj"].grad.chunk(2, 1)[leaf == "up_proj"]
    count = sum(key.startswith(path) and key.endswith(f"{leaf}.weight") for key in parameters)
    return torch.stack([parameters[f"{path}.{e}.{leaf}.weight"].grad for e in range(count)])


SMALL = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=16,
)  # fmt: skip
QWEN3_06B = dict(
    hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
SIZES = {  # models and dtype; (prompts, samples, length, new tokens); (rows, length, is trained)
    # Small enough for one thread of a CPU; the vocabulary is what weighs in generation.
    "default": (
        [SMALL | dict(vocab_size=V) for V in (4096, 32768)], torch.float32,
        [(1, 8, 512, 64), (4, 8, 128, 64), (8, 1, 32, 64)],
        [(4, 256, False), (4, 256, True), (1, 1024, True)]),
    # For a GPU: a released shape, prompts and answers of the lengths that are trained on it.
    "large": (
        [QWEN3_06B], torch.bfloat16,
        [(1, 8, 4096, 128), (32, 8, 512, 128), (8, 1, 128, 128), (1, 1, 128, 128)],
        [(4, 2048, False), (4, 2048, True), (1, 8192, True)]),
    # To see that the command runs.
    "toy": (
        [SMALL | dict(vocab_size=64)], torch.float32, [(1, 2, 8, 2)],
        [(2, 8, False), (2, 8, True)]),
}  # fmt: skip


def seconds_of(function, device):
    """Seconds of CPU time; on CUDA of the wall, between two times at which the device is idle."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    idle = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    idle()
    start = clock()
    function()
    idle()
    return clock() - start


def generation(model, theirs, prompts, samples, length, new):
    """Sampling at temperature 1: `samples` completions of each of `prompts` prompts."""
    tokens = torch.randint(model.config.vocab_size, (prompts, length)).to(model.head_weight.device)
    rows = [row.tolist() for row in tokens for _ in range(samples)]
    options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0)
    options |= dict(num_return_sequences=samples, eos_token_id=None)

    def ours():
        generate(model, rows, max_new_tokens=new, temperature=1.0, seed=0)

    what = f"generate {prompts} x {samples} x {new}, prompt {length}"
    return what, prompts * samples * new, ours, lambda: theirs.generate(tokens, **options)


def training(model, theirs, rows, length, backward):
    """Forward, and backward, of the mean negative log-prob of the next token."""
    tokens = torch.randint(model.config.vocab_size, (rows, length)).to(model.head_weight.device)

    def loss():
        hidden = model.hidden(tokens)[:, :-1].flatten(0, 1)
        return -model.logprobs(hidden, tokens[:, 1:].flatten())[0].mean()

    def run(trained, forward):
        with torch.set_grad_enabled(backward):
            trained.zero_grad()
            value = forward()
            if backward:
                value.backward()

    what = f"{'train' if backward else 'forward'} {rows} x {length}"
    of_theirs = lambda: run(theirs, lambda: theirs(tokens, labels=tokens).loss)  # noqa: E731
    return what, rows * length, lambda: run(model, loss), of_theirs


def bench(repeats, device="cpu", size="default"):
    """Each case of a size, in turn with transformers' own if it is installed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    shapes, dtype, generated, trained = SIZES[size]
    found, rates = {}, {}
    for shape in shapes:
        config = ModelConfig(**shape)
        print(f"Qwen3, hidden {config.hidden_size}, {config.num_hidden_layers} layers, "
              f"V {config.vocab_size}: {parameters(config)[0] / 1e6:.2f} M parameters")  # fmt: skip
        model, theirs = Transformer(config).to(device, dtype).init_weights(0), None
        try:
            model, theirs = (x.to(device) for x in through_files(model, dtype))
        except ImportError:
            print("transformers is not installed: no comparison")
        cases = [generation(model, theirs, *case) for case in generated]
        cases += [training(model, theirs, *case) for case in trained]
        for what, tokens, *runs in cases:
            # Median seconds of both after a warm-up, and the ratios of each pair.
            for run in runs[: 1 + bool(theirs)]:
                run()
            pairs = [[seconds_of(run, device) for run in runs[: 1 + bool(theirs)]]
                     for _ in range(repeats)]  # fmt: skip
            key = f"V{config.vocab_size} {what}"
            mine, *other = (tokens / statistics.median(seconds) for seconds in zip(*pairs))
            rates[key], line = mine, f"  {what:36} {mine:8.0f} tokens/s"
            if theirs:
                ratios = sorted(b / a for a, b in pairs)
                found[key] = round(statistics.median(ratios), 2)
                line += f", transformers {other[0]:8.0f}: {found[key]:.2f} times"
                line += f" ({ratios[0]:.2f} - {ratios[-1]:.2f})"
            print(line, flush=True)

    # On CUDA the tensors that live at once, on a CPU all of the process.
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process: {peak:.0f} MB")
    print(json.dumps({"bench": "models", "times_transformers": found, "peak_mb": round(peak),
                      "tokens_per_s": rates, "device": device}))  # fmt: skip
    return 0


def main(argv):
    parser = argparse.ArgumentParser("measure_models.py", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("bench", "check"), default="bench")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="bench's")
    parser.add_argument("--size", default="default", choices=SIZES, help="of bench's model")
    args = parser.parse_args(argv)
    if args.command == "bench":
        return bench(args.repeats, args.device, args.size)
    return 0 if check.check_models(more=rows()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
