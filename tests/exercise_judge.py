"""Judge what a file's own check does not see: python exercise/NAME/judge.py NAME

exercise.py copies this file next to the files of an exercise. A judge gets the module that the
student has written in. It yields pairs: does it hold, and what must hold. Exit code: 1 if something
does not.
"""

import importlib
import math
import sys
from types import SimpleNamespace

import torch


def advantages(train_grpo):
    equal = torch.full((3,), 0.1, dtype=torch.float64).numpy()
    yield not train_grpo.advantages(equal).any(), "rewards .1 .1 .1 have advantages of exactly 0"


def norm(models):
    layer = models.RMSNorm(64, models.ModelConfig(1, 64, 1, 1, 1, 1, 2))
    x = torch.randn(100, 64).bfloat16()
    right = layer.bfloat16()(x) == layer.double()(x.double()).bfloat16()
    yield right.double().mean() > 0.99, "in bfloat16, results are the true ones, rounded once"


def rope(models):
    x, one = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), torch.ones(1, 1, 1, 4)
    yield models.apply_rope(x, one, one).dtype == x.dtype, "bfloat16 in, bfloat16 out"


def clip(parallel):
    parallel.join_ranks("cpu", parallel.PATIENCE)
    model = torch.nn.Linear(257, 1, dtype=torch.bfloat16)
    model.weight.grad = torch.ones_like(model.weight)
    norm = parallel.clip_grad_norm(model, 99.0, parallel.Grid("d1"))
    yield (model.weight.grad == 1).all(), "a norm below max_norm leaves the gradients as they are"
    fits = abs(norm.item() / math.sqrt(257) - 1) <= 1e-3
    yield fits, f"257 gradients of 1 in bfloat16 have the norm 16.031: {norm.item():.3f}"


def merge(ring_attention):
    for x in (-math.inf, 1000.0):
        given = [torch.ones(1, 2).requires_grad_(), torch.tensor([x]).requires_grad_()]
        out, lse = ring_attention.merge(*given, *given)
        fits = out.isfinite().all() and lse.allclose(given[1] + math.log(2))
        yield fits, f"two sets of lse {x} merge to lse {x} + log 2, with a finite out"
        grads = torch.autograd.grad(out.sum(), given)
        yield all(g.isfinite().all() for g in grads), f"two sets of lse {x} have finite gradients"
    out, lse = torch.ones(1, 2, dtype=torch.bfloat16), torch.zeros(1)
    found, both = ring_attention.merge(out, lse, out, lse)
    fits = found.dtype == out.dtype and both.dtype == lse.dtype
    yield fits, "an out in bfloat16 stays so, with its lse in float32"


def logprobs(models):
    N, M, V = 64, 8, 1000
    model = models.Transformer(models.ModelConfig(V, M, M, 1, 2, 1, 4)).bfloat16()
    model.chunk = 4
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found, _ = model.logprobs(torch.randn(N, M).bfloat16(), torch.arange(N))
    yield found.dtype == torch.float32, "a model in bfloat16 has log-probs in float32"
    stored = sum({x.data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())
    yield stored <= N * V, f"autograd keeps fewer bytes than {N * V}, half of the logits: {stored}"


def sampler(models):
    logits_BV = torch.randn(200, 1000, dtype=torch.float64)
    logits_BV[:, [0, -1]] = -math.inf
    for draw, text in ((0.0, "first"), (1 - 2**-53, "last")):
        draws_B = torch.full((200,), draw, dtype=torch.float64)
        found, _ = models.sample(logits_BV, draws_B, temperature=1.0)
        yield not ((found == 0) | (found == 999)).any(), f"the {text} token, of p = 0, is not drawn"


def radix(tree_attention):
    sizes, nodes = [], [tree_attention.radix_tree([torch.arange(3001), torch.arange(5)], 2)]
    while nodes:
        node = nodes.pop()
        nodes += node.children
        sizes.append(len(node.tokens))
    yield max(sizes) == 2, "with max_tokens=2, a segment has at most 2 tokens"


def vocabulary(parallel):
    parallel.join_ranks("cpu", parallel.PATIENCE)
    given = SimpleNamespace(head_weight=1000 * torch.eye(3)), 0, None, torch.eye(3), torch.arange(3)
    found = torch.stack(parallel.vocab_parallel_logprobs(*given))
    yield found.isfinite().all(), "logits of 1000 have finite log-probs"


def pipeline(parallel):
    from ring_attention import launch

    found = launch(3, most_pending, parallel)
    yield found == [3, 2, 1], f"3 stages keep 3, 2, 1 micro-batches until their backward: {found}"


def most_pending(parallel):
    """Return the most micro-batches of this stage whose backward has not run."""
    pending, counts = [], []

    def forward(n, x):
        y = 2 * (torch.ones(2, requires_grad=True) if x is None else x)
        y.register_hook(lambda dy: pending.remove(n))
        pending.append(n)
        counts.append(len(pending))
        return y.sum() if torch.distributed.get_rank() == 2 else y

    parallel.run_1f1b(forward, 6, torch.empty(2), None)
    return max(counts)


def z(train_grpo):
    from ring_attention import launch

    torch.optim.AdamW([torch.zeros(1)])  # imports a large package once, before ranks fork
    (truth,) = launch(1, two_steps, train_grpo, "d1")
    for plan in ("d2", "c2", "t2"):
        found = torch.stack(launch(2, two_steps, train_grpo, plan))
        error = (found - truth).abs().max()
        yield error <= 1e-10, f"{plan} has the losses and norms of one process: error {error:.1e}"


def two_steps(train_grpo, plan):
    """Return the losses and the norms of the gradients of two steps in float64."""
    grid = train_grpo.parallel.Grid(plan, train_grpo.parallel.PATIENCE)
    torch.distributed.group.WORLD.set_timeout(train_grpo.parallel.PATIENCE)
    c = train_grpo.Config(steps=2, size=3, turns=2, prompts=4, group=6, max_new_tokens=7, layers=1,
                          hidden=8, heads=4, dtype="float64", temperature=0.01)  # fmt: skip
    task = train_grpo.Guess(c)
    trainer = train_grpo.Trainer(c, train_grpo.build_policy(c, task), grid)
    steps = []
    train_grpo.train(c, train_grpo.Source(c, task, trainer), trainer, lambda *x: steps.append(x))
    updates = [update for *_, updates, _ in steps for update in updates]
    return torch.tensor([(x["loss"], x["grad_norm"]) for x in updates], dtype=torch.float64)


JUDGES = {
    "models": (norm, rope, logprobs, sampler), "ring_attention": (merge,),
    "tree_attention": (radix,), "parallel": (clip, vocabulary, pipeline),
    "train_grpo": (advantages, z),
}  # fmt: skip

if __name__ == "__main__":
    judges = {x.__name__: (module, x) for module, some in JUDGES.items() for x in some}
    if len(sys.argv) != 2 or sys.argv[1] not in judges:
        sys.exit(f"expected {' or '.join(judges)}, got {sys.argv[1:]}")
    module, judge = judges[sys.argv[1]]
    found = [*judge(importlib.import_module(module))]
    print("\n".join(f"{'right' if holds else 'WRONG'}: {text}" for holds, text in found))
    sys.exit(0 if all(holds for holds, _ in found) else 1)
