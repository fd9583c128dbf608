"""Judge what a file's own check does not see: python exercise/NAME/judge.py NAME

exercise.py copies this file next to the files of an exercise. Each judge yields pairs: does it
hold? What must hold? Exit code: 1 if something does not.
"""

import math
import sys
from types import SimpleNamespace

import torch


def advantages():
    from train_grpo import advantages
    equal = torch.full((3,), 0.1, dtype=torch.float64).numpy()
    yield not advantages(equal).any(), "rewards .1 .1 .1 have advantages of exactly 0"


def norm():
    import models
    layer = models.RMSNorm(64, models.ModelConfig(1, 64, 1, 1, 1, 1, 2))
    x = torch.randn(100, 64).bfloat16()
    right = layer.bfloat16()(x) == layer.double()(x.double()).bfloat16()
    yield right.double().mean() > 0.99, "in bfloat16, results are the true ones, rounded once"


def rope():
    import models
    x, one = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), torch.ones(1, 1, 1, 4)
    yield models.apply_rope(x, one, one).dtype == x.dtype, "bfloat16 in, bfloat16 out"


def clip():
    from ring_attention import launch
    (kept,) = launch(1, small_gradient)
    yield kept, "a norm below max_norm leaves the gradients as they are"


def small_gradient():
    import parallel
    model = torch.nn.Linear(2, 2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    parallel.clip_grad_norm(model, 9.0, parallel.Grid("d1"))
    return all((p.grad == 1).all() for p in model.parameters())


def merge():
    from ring_attention import merge
    out = torch.ones(1, 2)
    for x in (-math.inf, 1000.0):
        lse = torch.tensor([x])
        found, both = merge(out, lse, out, lse)
        fits = found.isfinite().all() and both.allclose(lse + math.log(2))
        yield fits, f"two sets of the lse {x} have the lse {x} + log 2, and out is finite"


def logprobs():
    import models
    N, M, V = 64, 8, 1000
    model = models.Transformer(models.ModelConfig(V, M, M, 1, 2, 1, 4))
    model.chunk = 4
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model.logprobs(torch.randn(N, M, requires_grad=True), torch.arange(N))
    stored = sum({x.data_ptr(): x.untyped_storage().nbytes() // x.itemsize for x in kept}.values())
    found, _ = model.bfloat16().logprobs(torch.zeros(N, M).bfloat16(), torch.arange(N))
    yield found.dtype == torch.float32, "a model in bfloat16 has log-probs in float32"
    yield stored <= N * V / 2, f"less is kept than half of {N * V} logits: {stored} numbers"


def sampler():
    from models import sample
    logits_BV = torch.randn(200, 1000, dtype=torch.float64)
    logits_BV[:, [0, -1]] = -math.inf
    for draw, text in ((0.0, "first"), (1 - 2**-53, "last")):
        draws_B = torch.full((200,), draw, dtype=torch.float64)
        found, _ = sample(logits_BV, draws_B, temperature=1.0)
        yield not ((found == 0) | (found == 999)).any(), f"the {text} token, of p = 0, is not drawn"


def radix():
    from tree_attention import radix_tree
    sizes, nodes = [], [radix_tree([torch.arange(3001), torch.arange(5)], 2)]
    while nodes:
        node = nodes.pop()
        nodes += node.children
        sizes.append(len(node.tokens))
    yield max(sizes) == 2, "with max_tokens=2, a segment has at most 2 tokens"


def most_pending():
    import parallel
    rank, pending, counts = torch.distributed.get_rank(), [], []

    def forward(n, x):
        y = 2 * (torch.ones(2, requires_grad=True) if x is None else x)
        y.register_hook(lambda dy: pending.remove(n))
        pending.append(n)
        counts.append(len(pending))
        return y.sum() if rank == 2 else y

    parallel.run_1f1b(forward, 6, torch.empty(2), None)
    return max(counts)


def pipeline():
    from ring_attention import launch
    found = launch(3, most_pending)
    yield found == [3, 2, 1], f"3 stages keep 3, 2, 1 micro-batches until their backward: {found}"


def two_steps(plan):
    """Train two steps in float64. Return the losses, the norms of gradients, and the weights."""
    import parallel
    import train_grpo
    torch.distributed.group.WORLD.set_timeout(parallel.PATIENCE)
    config = train_grpo.Config(steps=2, size=3, turns=2, prompts=4, group=6, max_new_tokens=7,
                               layers=1, hidden=8, heads=4, dtype="float64", lr=0.03,
                               eval_prompts=2)  # fmt: skip
    task = train_grpo.Guess(config)
    trainer = train_grpo.Trainer(
        config, train_grpo.build_policy(config, task), parallel.Grid(plan, parallel.PATIENCE))
    numbers = []

    def log(step, batch, metrics, updates, solved):
        numbers.extend(x for update in updates for x in (update["loss"], update["grad_norm"]))

    train_grpo.train(config, train_grpo.Source(config, task, trainer), trainer, log)
    weights = [trainer.whole(name, p) for name, p in trainer.model.named_parameters()]
    return torch.cat([torch.tensor(numbers), *(p.detach().flatten() for p in weights)])


def z():
    from ring_attention import launch
    torch.optim.AdamW([torch.zeros(1)])  # imports a large package once, before ranks fork
    torch.set_default_dtype(torch.float64)
    (truth,) = launch(1, two_steps, "d1")
    for plan in ("d2", "c2", "t2"):
        error = max((x - truth).abs().max().item() for x in launch(2, two_steps, plan))
        yield error <= 1e-10, f"{plan} trains as one process does: error {error:.1e}"


def vocabulary():
    from ring_attention import launch
    (finite,) = launch(1, large_logits)
    yield finite, "logits of 1000 have finite log-probs"


def large_logits():
    import parallel
    model = SimpleNamespace(head_weight=1000 * torch.eye(3))
    found = parallel.vocab_parallel_logprobs(model, 0, None, torch.eye(3), torch.arange(3))
    return all(x.isfinite().all() for x in found)


JUDGES = (advantages, norm, rope, clip, merge, logprobs, sampler, radix, z, vocabulary, pipeline)

if __name__ == "__main__":
    judges = {judge.__name__: judge for judge in JUDGES}
    if len(sys.argv) != 2 or sys.argv[1] not in judges:
        sys.exit(f"expected {' or '.join(judges)}, got {sys.argv[1:]}")
    found = [*judges[sys.argv[1]]()]
    print("\n".join(f"{'right' if holds else 'WRONG'}: {text}" for holds, text in found))
    sys.exit(0 if all(holds for holds, _ in found) else 1)
