"""The five on a device that is not the CPU: see other_device.py, which is as strict as CUDA."""

import copy
import itertools
from math import nan

import other_device
import torch
from test_ranks import ranks

import models
import parallel
import train_grpo
from tree_attention import tree_backward, tree_logprobs

FAMILIES = dict(zip(("mistral", "qwen2", "moe", "gemma"), models.CHECK_FAMILIES, strict=True))
FAMILIES["scale"] = dict(query_pre_attn_scalar=3)
SEQUENCES = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [1, 2, 8, 9, 3], [4, 5, 6]]


def logits(model, device):
    return model.logits(model.hidden(torch.tensor([SEQUENCES[0]], device=device)))


def logprobs(model, device):
    tokens = torch.tensor(SEQUENCES[0], device=device)
    return torch.stack(model.logprobs(model.hidden(tokens[None])[0], tokens, temperature=0.7))


def packed(model, device):
    ids = torch.tensor([[0, 0, 0, 1, 1, -1]], device=device)
    tokens = torch.tensor([SEQUENCES[0]], device=device)
    return model.hidden(tokens, attention=models.packed_attention(ids))


def generated(model, device):
    rows = [models.Row(tokens, [0.3, 0.9, 0.5, 0.1]) for tokens in SEQUENCES]
    models.generate(model, rows, max_new_tokens=4, end=(7,))
    return torch.tensor([x for row in rows for x in (*row.tokens, *row.logprobs)])


def packed_tree(model, device):
    sequences = [torch.tensor(tokens, device=device) for tokens in SEQUENCES]
    return torch.cat([lp + 0.1 * H for lp, H in tree_logprobs(model, sequences)])


def depth_first(model, device, max_tokens=None):
    sequences = [torch.tensor(tokens, device=device) for tokens in SEQUENCES]
    loss, _ = tree_backward(model, sequences, lambda i, lp, H: (lp + H).sum(), max_tokens)
    return torch.tensor(loss)


def in_chunks(model, device):
    return depth_first(model, device, 2)


def step(model, device, **options):
    """Take a step of the trainer on episodes of two groups. Return its metrics."""
    config = train_grpo.Config(lr=0.1, **options)
    trainer = train_grpo.Trainer(config, model, parallel.Grid("d1"))
    episodes = []
    for n, tokens in enumerate(SEQUENCES):
        episode = train_grpo.Episode((), 0, n, (), tokens[:1], 0)
        for token in tokens[1:]:
            episode.append(token, -2.5)
        episode.reward = float(n % 2)
        episodes.append(episode)
    metrics = trainer.prepare(train_grpo.Batch({0: episodes}, [0], 1))
    metrics |= trainer.forward_backward(episodes, trainer.loss_denominator(episodes))
    return torch.tensor([*metrics.values(), trainer.optim_step(0.1)["grad_norm"]])


def tree_step(model, device):
    return step(model, device, tree=True)


def step_in_parts(model, device):
    return step(model, device, rows=2)


CASES = [logits, logprobs, packed, generated, packed_tree, depth_first, in_chunks, step, tree_step,
         step_in_parts]  # fmt: skip


def errors(rank):
    """Return {(family, case): the largest error against the CPU}, of values, gradients, weights."""
    with other_device.present():
        found = {}
        for family, case in itertools.product(FAMILIES, CASES):
            torch.manual_seed(0)
            shape = models.ModelConfig(23, 12, 20, 2, 4, 2, 6, **FAMILIES[family])
            model = models.Transformer(shape).double()
            for weight in model.parameters():
                torch.nn.init.normal_(weight, std=0.4)
            devices = other_device.NAME, "cpu"
            given = [(copy.deepcopy(model).to(device), device) for device in devices]
            pairs = zip(*(numbers(case, *x) for x in given), strict=True)
            relative = [((a - b).norm() / b.norm()).item() for a, b in pairs if b.norm() > 0]
            found[family, case.__name__] = max(relative) if all(x == x for x in relative) else nan
        return found


def numbers(case, model, device):
    """Return what a case computes, the gradients of the parameters, and the parameters."""
    found = case(model, device)
    if found.requires_grad:
        (found * found).sum().backward()
    kept = [found, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [x.detach().cpu() for x in [*kept, *model.parameters()]]


def test_every_family_has_the_numbers_and_gradients_of_the_cpu(tmp_path):
    """In a process of its own: autograd learns of devices at its first backward."""
    (found,) = ranks(tmp_path, 1, errors)
    assert len(found) == len(FAMILIES) * len(CASES)
    assert {at: error for at, error in found.items() if not error <= 1e-12} == {}
