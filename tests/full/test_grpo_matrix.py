"""Steps by hand, and what tests/bench/measure_grpo.py measures."""

import dataclasses
import json

import measure_grpo
import pytest
from conftest import shortened
from measure_grpo import SHAPES
from torch.utils.flop_counter import FlopCounterMode

from full.steps import STEPS, step_error

# Settings whose parts are in no other setting of the default suite, or in none of test_audit.py.
BY_DEFAULT = (
    "group_mean, 2 updates", "per_branch, CISPO, TIS", "gae, KL in the reward",
    "leave_one_out, dual clip, filter", "balanced experts, filter", "dynamic sampling, 3 updates",
    "staleness 1, the sampler's old", "REINFORCE++, geometric mask", "GMPO, sequence mask",
    "SAPO, LitePPO, soft overlong, IcePop", "DPPO by trees", "GSPO, a teacher",
)  # fmt: skip


@pytest.mark.parametrize("name", shortened(STEPS, *BY_DEFAULT))
def test_a_step_is_the_step_by_hand(process_group, name):
    """Its metrics and weights after the second step of a run, of every kind of setting."""
    assert step_error(**STEPS[name]) <= 1e-12


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
