"""A packed batch under a plan, by parallel.py alone: a user's sequences, loss and model.

One process computes the truth sequence by sequence, from logits. The runs of
full/equivalence.py hold packed batches under plans to it.
"""

import copy
import re

import numpy as np
import pytest
import torch
from conftest import ROOT
from conftest import complaint_of as _fails
from plan_training import build
from test_ranks import ranks

from full.attention import ring
from full.learn.packing import PackedBatches
from full.model.parallelize import parallelize
from full.model.transformer import causal_attention
from full.ranks.plans import Grid, Plan

LENGTHS = [5, 2, 9, 1, 7, 3, 6]  # a sequence of one token has no target
TEMPERATURE = 0.7

# The page's own code runs under all of these plans.
PAGE = (ROOT / "full" / "RECIPES.md").read_text().split("## Your own loss under any plan")[1]
RECIPE = {}
for code in re.findall(r"```python\n(.*?)```", PAGE.split("\n## ")[0], re.S):
    exec(code, RECIPE)
attention = RECIPE["attention"]


def draw():
    """Sequences, masks, and a weight for each sequence."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(56, size=n).tolist() for n in LENGTHS]
    masks = [rng.random(n - 1) < 0.7 for n in LENGTHS]
    masks[1][:] = False  # nothing is scored
    masks[4] = masks[4].tolist()  # any sequence of truth values will do
    return sequences, masks, torch.from_numpy(rng.standard_normal(len(LENGTHS)))


def user_loss(weights_B, mask_BT, logprobs_BT, entropies_BT):
    """Not linear in the tokens of a sequence, and so of whole sequences only."""
    count_B = mask_BT.sum(-1).clamp(min=1)
    mean_B = logprobs_BT.sum(-1) / count_B
    return (weights_B * mean_B.square() - 0.1 * entropies_BT.sum(-1)).sum() / len(LENGTHS)


def truth_of(kind, model=None):
    """Loss, gradients by name, and scores of each sequence, by the definition."""
    model = model or build(kind, torch.float64)
    sequences, masks, weights = draw()
    loss, scores = 0.0, []
    for i, (tokens, mask) in enumerate(zip(sequences, masks, strict=True)):
        tokens, mask = torch.tensor(tokens), torch.tensor(mask, dtype=torch.bool)
        logits = model(tokens[None])[0, :-1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        logp = (logits.to(wide) / TEMPERATURE).log_softmax(-1)
        logprobs = logp.gather(-1, tokens[1:, None])[:, 0] * mask
        entropies = -(logp.exp() * logp).sum(-1) * mask
        loss = loss + user_loss(weights[i], mask[None], logprobs[None], entropies[None])
        scores.append((logprobs.detach(), entropies.detach()))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, scores


def errors(model, truth, micro_tokens):
    """The worst error of scores, loss and gradients, each relative to 1 or to the largest."""
    loss, gradients, scores = truth
    sequences, masks, weights = draw()
    batches = PackedBatches(
        model, attention=attention, indices=ring.indices, micro_tokens=micro_tokens,
        temperature=TEMPERATURE,
    )  # fmt: skip
    found = {"scores": 0.0}
    for columns, true in zip(batches.forward(sequences, masks), scores, strict=True):
        for x, y in zip(columns, true, strict=True):
            assert x.shape == y.shape and not x.requires_grad
            found["scores"] = max(found["scores"], (x - y).abs().max().item() if len(x) else 0.0)

    def loss_fn(indices, *columns):
        assert indices and all(len(x) == len(indices) for x in columns)
        return user_loss(weights[indices], *columns)

    found["loss"] = abs(batches.forward_backward(sequences, masks, loss_fn).item() - loss)
    largest = max(g.abs().max() for g in gradients.values())
    named = dict(model.named_parameters())
    found["gradient"] = max(
        (p.grad - gradients[name]).abs().max() / largest for name, p in named.items()).item()
    return found


@pytest.mark.quick
@pytest.mark.parametrize("micro_tokens", [1, 12, 1000])
def test_an_unsplit_model_needs_no_group(micro_tokens):
    model, truth = build("dense", torch.float64), truth_of("dense")
    assert max(errors(model, truth, micro_tokens).values()) < 1e-12
    # Nothing has zeroed .grad: twice the gradient is as wrong as none, and is seen.
    assert errors(model, truth, micro_tokens)["gradient"] == pytest.approx(1.0)


@pytest.mark.quick
def test_in_bfloat16_a_row_is_as_good_as_its_sequences():
    """Gradients: root mean square over parameters and three models."""
    squares = np.zeros(2)
    for seed in range(3):
        model = build("dense", torch.bfloat16).init_weights(seed)
        exact, alone = (truth_of("", copy.deepcopy(model).to(x))[1]
                        for x in (torch.float64, torch.bfloat16))  # fmt: skip
        errors(model, (0, alone, truth_of("", copy.deepcopy(model))[2]), 12)
        packed = {name: p.grad for name, p in model.named_parameters()}
        for name, truth in exact.items():
            both = [(x[name].double() - truth).norm() / truth.norm() for x in (packed, alone)]
            squares += np.square(both)
    assert squares[0] <= 1.3**2 * squares[1]


def _refused_batches(rank):
    built = {}
    for text in ("t2", "c2"):
        plan, model = Plan.parse(text), build("dense", torch.float64)
        place = dict(device_mesh=Grid(plan), attention=causal_attention)
        built[text] = parallelize(model, plan, **place)
    on_ring = PackedBatches(built["c2"], attention=attention, indices=ring.indices)
    call = PackedBatches(built["t2"], attention=attention).forward_backward
    cases = [
        ([[1, 2, 3 + rank]], [[True, True]]),
        ([[1, 2, 3]], [[True, rank == 0]]),
        ([[1, 2, 3], [4]], [[True] * (2 + rank), []]),
        ([[1, 2, 3], []], [[True, True], []]),
        ([[1, 2, 3]], []),
    ]
    return [
        _fails(PackedBatches, built["c2"], attention=attention),
        _fails(on_ring.forward, [[1, 2, 3, 99]], [[True] * 3]),  # rank 1 has the tokens 2 and 3
        *(_fails(call, *case, None) for case in cases),
    ]


SAID = [
    "plan c2 splits rows: give indices=",
    "token id 99 at row 0, column 3 is not in the vocabulary",
    *["ranks 0, 1 work on the same sequences in plan t2, but were given different"] * 2,
    "sequence 0 has 3 tokens and a mask of 3; it needs .* tokens",
    "sequence 1 has 0 tokens and a mask of 0",
    "expected a mask for each of 1 sequences, got 0",
]


def test_a_batch_that_cannot_be_is_refused_on_every_rank(tmp_path):
    first, second = ranks(tmp_path, 2, _refused_batches)
    assert first == second
    for text, pattern in zip(first, SAID, strict=True):
        assert re.search(pattern, text), text


def _by_the_recipes(rank, plans):
    """Of each plan, by the page's code: losses of packed steps; of rows norms and {row: loss}.

    A rank knows the losses of its own rows. A ring of rows is left out.
    """
    sequences, found, rows = draw()[0], [], torch.arange(4 * 12).view(4, 12) % 53
    masks = [[True] * (len(tokens) - 1) for tokens in sequences]
    for plan in map(Plan.parse, plans):
        packed = RECIPE["train"](build("dense", torch.float64), plan, sequences, masks, 3)
        norms, losses = [], {}
        if plan.cp == 1:
            norms, losses = RECIPE["train_rows"](build("dense", torch.float64), plan, rows, 3)
        share = rank % plan.dp if plan.pp == 1 else 0
        losses = {share + plan.dp * n: loss.item() for n, loss in losses.items()}
        found.append((torch.tensor(packed).tolist(), [norm.item() for norm in norms], losses))
    return found


def test_the_recipes_give_one_loss_under_every_plan(tmp_path):
    """The second has a micro-batch for each row, by run_micro_batches and run_forwards."""
    (((packed, norms, losses),),) = ranks(tmp_path, 1, _by_the_recipes, ["d1"])
    assert packed[2] < packed[0] - 0.1 and len({*losses.values()}) == 4  # it learns
    for of_rank in ranks(tmp_path, 2, _by_the_recipes, ["d2", "t2", "p2", "c2"]):
        for found, of_norms, of_rows in of_rank:
            assert found == pytest.approx(packed, rel=0, abs=1e-10)
            assert of_norms in ([], pytest.approx(norms, rel=1e-10))
            assert of_rows == pytest.approx({n: losses[n] for n in of_rows}, rel=1e-10)
        assert [len(of_norms) for _, of_norms, _ in of_rank] == [3, 3, 3, 0]
