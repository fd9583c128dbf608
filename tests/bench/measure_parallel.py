"""Plans: `python tests/bench/measure_parallel.py [bench | check]`.

check: the rows of `python -m full check parallel`, and every plan of CASES against one process:
loss, every gradient, clip norm, three AdamW steps.
bench: tokens a second by plan, and the bytes handed over.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]

from full import ring
from full.attend import attend
from full.check import check_parallel
from full.estimate import WIRE
from full.masks import Mask
from full.optimizer import LocalOptimizer, clip_grad_norm, reduce_gradients
from full.packing import Micro, run_micro_batches
from full.parallelize import parallelize
from full.places import full, part_of
from full.plans import Grid, Plan
from full.ring import indices
from full.tiny import tiny_model
from ring_attention import launch
# check ------------------------------------------------------------------------------------------

KINDS = {
    "dense": dict(model_type="qwen3", vocab_size=57, num_hidden_layers=2),
    "tied": dict(model_type="gemma3_text", vocab_size=57),
    "bias": dict(model_type="llama", vocab_size=56, qkv_bias=True, o_bias=True, mlp_bias=True),
    "moe": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4),
    "starved": dict(model_type="qwen3_moe", vocab_size=56, num_experts=4, router_bias_rate=1.0),
}
KINDS["deep"] = KINDS["dense"] | dict(num_hidden_layers=4)
KINDS["deep_tied"] = KINDS["deep"] | dict(tie_word_embeddings=True)
LENGTH, ROWS, TEMPERATURE = 24, 4, 0.7
BENCH = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
             num_key_value_heads=2, intermediate_size=384, vocab_size=2048)  # fmt: skip


class Batch(NamedTuple):
    """Rows of tokens and their loss."""

    tokens_BS: torch.Tensor
    targets_BS: torch.Tensor
    weight_BS: torch.Tensor  # of log-probs, and a tenth of its absolute value of entropies
    documents_BS: torch.Tensor
    positions_BS: torch.Tensor  # in the document
    states_BSM: torch.Tensor | None = None  # weights of the last states

    @classmethod
    def of(cls, tokens, weights, documents, **more):
        """The targets are the next tokens."""
        positions = (documents[:, :, None] == documents[:, None]).tril().sum(-1) - 1
        return cls(tokens, tokens.roll(-1, 1), weights, documents, positions, **more)

    def part(self, rows, take, device):
        return Batch(*(x if x is None else x[rows][:, take].to(device) for x in self))

    def loss(self, hidden_BSM, logprobs_N, entropies_N):
        """This part's terms of the loss, a sum."""
        w = self.weight_BS.flatten().to(logprobs_N)
        loss = -(w * logprobs_N + 0.1 * w.abs() * entropies_N).sum()
        if self.states_BSM is None:
            return loss
        return loss + 0.1 * (self.states_BSM * hidden_BSM).sum()


def batch(is_packed=True, without=0) -> Batch:
    """Rows of several documents, or of one each; the last `without` rows have no target."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(56, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([[24], [9], [13], [24]] if is_packed else [[LENGTH]] * ROWS)
    documents = torch.arange(LENGTH) // lengths
    weights = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    last = documents != documents.roll(-1, 1)
    last[:, -1] = True
    last[ROWS - without :] = True
    return Batch.of(tokens, weights.masked_fill(last, 0.0), documents)


def build(kind, dtype, **changes):
    sizes = dict(KINDS[kind]) | changes
    model = tiny_model(sizes.pop("model_type"), seed=2, dtype=dtype, **sizes)
    for name, votes in model.named_buffers():
        assert name.endswith("votes") and kind == "starved"
        votes.copy_(torch.tensor([9, 9, 0, 0]))  # all go to the first two
    return model


def backward(model, parts, attentions, total):
    """Add the gradients of micro-batches; their loss, 0 on ranks without the last stage.

    attentions: of each micro-batch, None is the model's own. total: the loss's divisor.
    """
    micros = [Micro(x.tokens_BS, x.positions_BS, of) for x, of in zip(parts, attentions)]
    part, losses = part_of(model), []

    def forward(root, k, x):
        hidden = micros[k].through(root, x)
        if not part.has_head(root):
            return hidden
        targets = parts[k].targets_BS.flatten()
        scored = model.logprobs(hidden.flatten(0, 1), targets, temperature=TEMPERATURE)
        loss = parts[k].loss(hidden, *scored) / total
        losses.append(loss.detach())
        return loss

    like = None
    if part.plan.pp > 1:  # the states between stages
        rows, length = micros[0].tokens.shape
        length //= part.plan.tp if part.grid.sequence else 1
        p = next(model.parameters())
        dtype = getattr(model, "residual_dtype", None) or part.compute_dtype or p.dtype
        like = torch.empty(rows, length, model.config.hidden_size, dtype=dtype, device=p.device)
    run_micro_batches(model, forward, len(micros), like)
    return sum(losses, torch.zeros(()))


def one_process(kind, dtype, whole, steps):
    """[(loss, gradients, clip norm)] of each step, and the parameters after them."""
    model, found = build(kind, dtype), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def attention(q, k, v, /, *, layer, scale, window=None):
        mask = Mask.documents(doc_ids=whole.documents_BS, window=window)
        return attend(q, k, v, mask, scale=scale)[0]

    for _ in range(steps):
        loss = backward(model, [whole], [attention], ROWS * LENGTH)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / norm.item())
        found.append((loss, grads, norm))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


@functools.lru_cache
def truth_of(kind, steps, dtype=torch.float64, without=0):
    """`one_process` of a kind of model; without: see `batch`."""
    return one_process(kind, dtype, batch(without=without), steps)


class Training:
    """A model under a plan, its optimizer, and this rank's micro-batches.

    rows: of this rank. Default: its share by d.
    micros: how many micro-batches they make. Default: a row each in a pipeline, else one.
    method: of ring_attention. adamw: AdamW's options. options: of `parallelize`.
    """

    def __init__(self, model, grid, whole, *, rows=None, micros=0, method="ring",
                 adamw=None, **options):  # fmt: skip
        plan, device = grid.plan, next(model.parameters()).device
        count, length = whole.tokens_BS.shape
        if rows is None:
            rows = torch.arange(count).chunk(plan.dp)[grid.group["d"].rank()]
        is_packed = bool(whole.documents_BS.any())

        def attention(q, k, v, /, *, layer, scale, window=None, of=rows):
            mask = Mask.causal(length, window=window)
            if is_packed:
                mask = Mask.documents(doc_ids=whole.documents_BS[of], window=window)
            given = dict(mask=mask, method=method, scale=scale)
            return ring.ring_attention(q, k, v, group=grid.group["c"], **given)

        own = attention if is_packed or plan.cp > 1 else None
        self.model = parallelize(model, plan, device_mesh=grid, attention=own, **options)
        make = lambda p: torch.optim.AdamW(p, **adamw or dict(lr=0.01))  # noqa: E731
        self.optimizer = LocalOptimizer(self.model, make, zero=options.get("mode") == "zero1")

        # The model's own attention is that of all rows.
        of_micros = rows.chunk(micros or (len(rows) if plan.pp > 1 else 1))
        take = indices(length, grid.group["c"].rank(), plan.cp)
        self.parts = [whole.part(some, take, device) for some in of_micros]
        self.attentions = [None] * len(of_micros)
        if is_packed and len(of_micros) > 1:
            self.attentions = [functools.partial(attention, of=some) for some in of_micros]
        self.total, self.tp = whole.tokens_BS.numel(), plan.tp
        self.before_sum = lambda model: None  # a test's fault

    def backward(self):
        """Add this rank's gradients and sum them over ranks; its loss."""
        loss = backward(self.model, self.parts, self.attentions, self.total)
        self.before_sum(self.model)
        reduce_gradients(self.model)
        return loss

    def update(self):
        """Clip the gradients and apply them; their norm before."""
        norm = clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def results(self, steps):
        """What `one_process` gives, of this rank's parameters; the loss is that of all ranks."""
        found, places = [], self.model.part.places
        for _ in range(steps):
            loss = self.backward().double() / self.tp  # the ranks of a t group have the same loss
            dist.all_reduce(loss)
            grads = {name: full(p.grad, places[name]).cpu().clone()
                     for name, p in self.model.named_parameters()}  # fmt: skip
            found.append((loss.cpu(), grads, self.update().cpu()))
        return found, {name: full(p, places[name]).cpu()
                       for name, p in self.model.named_parameters()}  # fmt: skip


def off(found, truth, by_tensor=False):
    """The largest error of some tensors, by the largest entry of all, or of the tensor itself."""
    scale = max(x.abs().max() for x in truth.values())
    errors = [
        (found[name] - truth[name]).abs().max() / (truth[name].abs().max() if by_tensor else scale)
        for name in found
    ]
    return torch.stack(errors).max()


def errors(found, truth, by_tensor=False) -> list:
    """The worst errors of loss, gradients, clip norm of any step; of the parameters after them."""
    rows = []
    for (loss, grads, norm), (true_loss, true_grads, true_norm) in zip(
        found[0], truth[0], strict=True
    ):
        of_step = (loss / true_loss - 1).abs(), off(grads, true_grads, by_tensor)
        rows.append([*of_step, (norm / true_norm - 1).abs(), off(found[1], truth[1])])
    return torch.tensor(rows).nan_to_num(nan=math.inf).amax(0).tolist()


def compare(rank, text, kind, options, steps=3, dtype=torch.float64, truth=None, device="cpu"):
    """This rank's worst errors: loss, gradients, clip norm, parameters after `steps` steps.

    truth: what `truth_of` gives for this plan, where the ranks need not all find it out again.
    device: of the plan without c and p; the truth is found on the CPU.
    """
    plan, options = Plan.parse(text), dict(options)
    without = ROWS // plan.dp if options.pop("empty", False) else 0
    truth = truth or truth_of(kind, steps, dtype, without)
    # Tests have a device that is only a name. The CPU's backend carries its messages.
    backend = "cuda" if torch.device(device).type == "cuda" else "cpu"
    grid = Grid(plan, backend, shard=options.pop("shard", None))
    training = Training(build(kind, dtype).to(device), grid, batch(without=without), **options)
    found = training.results(steps)
    held = found[1].keys()
    assert held == truth[1].keys() if plan.pp == 1 else held < truth[1].keys()
    return errors(found, truth)


# A case is written as its plan, the kind of its model, and words of this table.
OPTIONS = {  # of `parallelize`; method: of ring_attention; shard: of Grid; empty: see `compare`
    "fsdp": dict(mode="fsdp"), "zero1": dict(mode="zero1"), "hsdp": dict(mode="fsdp", shard=2),
    "offload": dict(offload=True), "mixed": dict(compute_dtype=torch.bfloat16),
    "alone": dict(sequence=False), "allgather": dict(method="allgather"),
    "ulysses": dict(method="ulysses"), "interleaved": dict(schedule="interleaved1f1b"),
    "zbv": dict(schedule="zbv"), "full": dict(ac="full"), "op": dict(ac="op"),
    "compile": dict(compile=True), "empty": dict(empty=True),
}  # fmt: skip
ETP = {"etp": "(attn:d2t2|ffn:e2t2)", "p2etp": "(attn:p2d2t2|ffn:p2e2t2)"}


def read_cases(text) -> dict:
    """{"PLAN KIND WORD ..": (plan, kind, options)} of a text with commas between its cases."""
    cases = {}
    for case in text.strip().strip(",").split(","):
        plan, kind, *words = case.split()
        options = {key: value for word in words for key, value in OPTIONS[word].items()}
        cases[" ".join(case.split())] = ETP.get(plan, plan), kind, options
    return cases


# empty: a rank with nothing to learn; starved: a rank's experts get no token
CASES = read_cases("""
    d2 dense, d2 dense empty, d4 dense hsdp, d2 tied fsdp, t2 dense, t2 dense alone, t2 tied,
    t2 bias, c2 dense, c2 tied ulysses, c4 dense, d2t2 tied, d2t2 tied fsdp, d2t2c2 dense,
    d2t2c2 dense zero1, c2t2e2 moe, t2 moe op, d2e2 moe, t2 moe, d2t2e4 moe, etp moe,
    etp moe alone, d2e2 moe fsdp, d2t2e4 moe fsdp,
    etp moe fsdp, d2c2e4 moe, d2e2 starved, d2e2 starved fsdp, d2 tied zero1, d2 moe fsdp offload,
    d2t2e4 moe zero1, etp moe zero1, c2p2 tied zero1, d2 moe full, t2 tied op,
    d2t2e4 moe fsdp full, c2 dense op, p2 dense full, d2 dense compile,
    t2 dense compile, d2 dense fsdp full compile, p2 dense, p2 tied, p2 deep interleaved,
    p2 deep_tied interleaved, p2 deep zbv, p2 deep_tied zbv, p2 deep interleaved fsdp,
    p2t2 deep_tied zbv, t2 tied zero1, d2p2 tied fsdp, p2c2 dense, p2d2t2 tied, p2etp moe,
""")


def matrix():
    """{case: the worst error of any rank}: CASES but those that wait for a compiler."""
    found = {}
    for name, (text, _, _) in CASES.items():
        if "compile" not in name:
            parts = launch(Plan.parse(text).world, _case, name)
            found[name if text in name else f"{name} ({text})"] = max(map(max, parts))
    return found


def _case(name):
    return compare(dist.get_rank(), *CASES[name])


# bench ------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):
    """Bytes that this rank hands to each collective and each P2P send inside: of a gather its part,
    of a scatter-add and an all-to-all all parts. `WIRE` says what a ring then puts on the wire."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].replace("_", "")
        op = next((op for op in WIRE if name.startswith(op)), None)
        if "c10d" in function.namespace and op is not None:
            first = op in ("send", "allreduce") or "functional" in function.namespace
            given = (x for x in tree_leaves(args[0 if first else 1]) if torch.is_tensor(x))
            self.bytes[op] = self.bytes.get(op, 0) + sum(x.nbytes for x in given)
        return function(*args, **(kwargs or {}))


def training_of(plan, model, options, rows, length, micros):
    """A plan's training on rows of random tokens, one document each."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (rows, length), generator=generator)
    whole = Batch.of(tokens, torch.ones(rows, length), torch.zeros_like(tokens))
    return Training(model, Grid(plan), whole, micros=micros, **options)


def handed_over(text, kind, options, micros, rows=8):
    """What `Sent` counts in a step and its update, of a model of KINDS with 56 words."""
    model = build(kind, torch.float32, vocab_size=56)
    if options.get("compute_dtype"):
        model.residual_dtype = torch.float32
    training = training_of(Plan.parse(text), model, options, rows, LENGTH, micros)
    training.backward()  # what only the first step sends, the shapes of a pipeline, say
    with Sent() as sent:
        training.backward()
        training.optimizer.step()
    return sent.bytes


def _timed(plan_text, rows, length, steps):
    """Median seconds of a step of this rank, and the bytes it sent by collective."""
    plan = Plan.parse(plan_text)
    torch.set_num_threads(max(1, 2 // plan.world))
    model = tiny_model("qwen3", dtype=torch.float32, **BENCH)
    training = training_of(plan, model, {}, rows, length, 0)
    seconds = []
    for _ in range(steps + 1):
        dist.barrier()
        begun = time.perf_counter()
        training.backward()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        training.optimizer.zero_grad()
    with Sent() as sent:
        training.backward()
    return statistics.median(seconds[1:]), sent.bytes


def bench(argv):
    """Tokens a second by plan, against one process with as many threads; bytes sent a step."""
    parser = argparse.ArgumentParser("measure_parallel.py")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plans", nargs="+", default=["d1", "d2", "t2", "c2", "p2"])
    options = parser.parse_args(argv)
    rows, whole = [], None
    print(f"{'plan':>8} {'tokens/s':>9} {'of one process':>15}  kB a rank sends a step")
    for text in options.plans:
        world = Plan.parse(text).world
        found = launch(world, _timed, text, options.rows, options.length, options.steps)
        rate = options.rows * options.length / max(seconds for seconds, _ in found)
        whole = whole or rate
        rows.append(dict(plan=text, tokens_per_s=rate, of_one=rate / whole, bytes=found[0][1]))
        kilo = ", ".join(f"{name} {size / 1000:.0f}" for name, size in found[0][1].items())
        print(f"{text:>8} {rate:9.0f} {rate / whole:15.0%}  {kilo}")
    print(json.dumps({"bench": "parallel", "torch": torch.__version__, "rows": rows}))
    return 0


def check(argv) -> int:
    """Return 1 if an error is over its bound."""
    return 0 if check_parallel(matrix) else 1


COMMANDS = {"bench": bench, "check": check}


def main(argv) -> int:
    """Run a command, by default `bench`. Return its exit code."""
    name, *rest = argv if argv and argv[0] in COMMANDS else ["bench", *argv]
    return COMMANDS[name](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
