"""Judge what a file's own check cannot see: what two ranks compute, and what autograd stores.

    python exercise/z/judge.py ranks           # train on 2 ranks, against one process
    python exercise/logprobs/judge.py memory   # count what log-probs keep for their backward

exercise.py copies this file next to the files of an exercise. Exit code: 1 if they are wrong.
"""

import sys

import torch


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


def ranks():
    """Say whether plans of 2 ranks log the numbers, and train the weights, of one process."""
    from ring_attention import launch

    # The first AdamW imports a large package. Make one before the processes fork, so all have it.
    torch.optim.AdamW([torch.zeros(1)])
    torch.set_default_dtype(torch.float64)
    (truth,) = launch(1, two_steps, "d1")
    errors = {}
    for plan in ("d2", "c2", "t2"):
        errors[plan] = max((x - truth).abs().max().item() for x in launch(2, two_steps, plan))
    print("2 ranks against one process:", *(f"{plan} {x:.1e}" for plan, x in errors.items()))
    return all(x <= 1e-10 for x in errors.values())


def memory():
    """Say whether log-probs of 64 tokens keep less than half of one copy of their logits."""
    import models

    N, M, V = 64, 8, 1000
    model = models.Transformer(models.ModelConfig(V, M, M, 1, 2, 1, 4))
    model.chunk = 4
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        model.logprobs(torch.randn(N, M, requires_grad=True), torch.arange(N))
    stored = sum({x.data_ptr(): x.untyped_storage().size() // x.itemsize for x in kept}.values())
    print(f"numbers kept for the backward: {stored}; logits: {N * V}")
    return stored <= N * V / 2


if __name__ == "__main__":
    judges = dict(ranks=ranks, memory=memory)
    if len(sys.argv) != 2 or sys.argv[1] not in judges:
        sys.exit(f"expected {' or '.join(judges)}, got {sys.argv[1:]}")
    sys.exit(0 if judges[sys.argv[1]]() else 1)
