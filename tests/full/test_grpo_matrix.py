"""`python -m full check grpo | bench`: some of its cells, and that its cells can be wrong."""

import dataclasses
import json

import measure_grpo
import pytest
import torch
from conftest import shortened
from measure_grpo import SHAPES, STEPS, errors
from test_ranks import ranks
from torch.utils.flop_counter import FlopCounterMode

FAMILIES = "qwen3_moe", "gemma3_text"
# Settings whose parts are in no other setting of the default suite, or in none of test_audit.py.
BY_DEFAULT = (
    "group_mean, 2 updates", "per_branch, CISPO, TIS", "gae, KL in the reward",
    "leave_one_out, dual clip, filter", "balanced experts, filter", "dynamic sampling, 3 updates",
    "staleness 1, the sampler's old", "REINFORCE++, geometric mask", "GMPO, sequence mask",
    "SAPO, LitePPO, soft overlong, IcePop", "DPPO by trees", "GSPO, a teacher",
)  # fmt: skip


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """One process without trees, by family; the batch."""
    return ranks(tmp_path_factory.mktemp("one"), 1, _truths)[0]


def _truths(rank):
    return measure_grpo.truths(FAMILIES)


def _some(rank, truths, batch):
    cells = [("t2", "sparse", "gemma3_text")]
    cells += [("d2e2", "sparse", family) for family in FAMILIES]
    return measure_grpo.run_cells(2, cells, truths, batch)


def test_some_cells_of_the_matrix(truth, tmp_path):
    """A dense model under t2, experts under d2e2; `check` has all, and is run behind `-m slow`."""
    first, second = ranks(tmp_path, 2, _some, *truth)
    refused = {cell for cell, error in first.items() if error == "refused"}
    assert refused == {cell for cell in first if cell[0] == "d2e2" and cell[2] == "gemma3_text"}
    errors = [max(first[cell], second[cell]) for cell in first.keys() - refused]
    assert len(errors) == 2 and max(errors) < 1e-12 and min(errors) > 0


def test_check_shows_each_pair_that_can_be_shown():
    """Each plan with each tree and family, each tree with each family, in few of all cells."""
    every = measure_grpo.all_cells()
    some = measure_grpo.some_cells()
    run = {cell for cell in every if not measure_grpo.refused(
        measure_grpo.cell_setting(cell), cell[2], measure_grpo.PLANS[cell[0]][0])}  # fmt: skip
    for pair in ((0, 1), (0, 2), (1, 2)):
        shown = {tuple(cell[n] for n in pair) for cell in some}
        assert shown == {tuple(cell[n] for n in pair) for cell in run}
    assert set(some) <= run and len(set(some)) == len(some) < len(run) / 2


@pytest.mark.parametrize("name", shortened(STEPS, *BY_DEFAULT))
def test_a_step_is_the_step_by_hand(process_group, name):
    """Its metrics and weights after the second step of a run, of every kind of setting."""
    assert measure_grpo.step_error(**STEPS[name]) <= 1e-12


def test_the_error_sees_each_of_its_parts():
    torch.manual_seed(0)
    w = {"w": torch.randn(3, 3, dtype=torch.float64)}
    truth = [(1.0, w, 2.0)], w
    assert errors(truth, truth) == 0
    for k, wrong in enumerate((1.1, {"w": 0 * w["w"]}, 2.1)):
        step = [wrong if k == n else x for n, x in enumerate(truth[0][0])]
        assert errors(([tuple(step)], w), truth) > 0.04
    assert errors((truth[0], {"w": w["w"] + 1e-3}), truth) > 1e-5


@pytest.mark.parametrize("shape", ["guess branching", "256 + 8 x 64"])
def test_bench_runs_at_toy_size(shape, monkeypatch, capsys):
    toy = dict(prompts=1, minibatches=1, hidden=16, layers=1, size=7)
    monkeypatch.setitem(SHAPES, shape, dataclasses.replace(SHAPES[shape], **toy))
    argv = ["bench", "--shape", shape, "--steps", "1", "--peak-tflops", "0.1"]
    assert measure_grpo.main(argv) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["bound"] > 1 and row["share"] == row["gain"] / row["bound"]
    assert 0 < row["utilisation"] and row["peak_mb"]["tree"] > 0
    assert {"push", "rollout", "prepare", "train flat", "train tree"} <= set(row["seconds"])


@pytest.mark.quick
def test_flops_are_those_that_torch_counts(process_group):
    config, task, trainer = measure_grpo.made("256 + 8 x 64", "cpu")
    batch = measure_grpo.rolled_out(config, task, trainer, measure_grpo.Clock("cpu"), 0)[:1]
    trie, masks = measure_grpo.TokenTrie([t.tokens for t in batch]), [t.mask for t in batch]
    flat, tree = measure_grpo.flops(trainer.model.config, trie, masks)
    # Attention's kernels are not counted alike.
    pairs = measure_grpo.stats_of(trie).flat_pairs * 14 * 4 * 32 * 4
    with FlopCounterMode(display=False) as counter:
        trainer.forward_backward(batch, 64.0)
    parts = counter.get_flop_counts()["Global"]
    matrices = sum(n for op, n in parts.items() if "attention" not in str(op))
    assert flat == tree and abs(matrices / (flat - pairs) - 1) < 0.02
