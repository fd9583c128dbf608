"""`stress --model`: rings of a VLA model train as one process does, and a fault would be seen."""

import json
import math
import subprocess
import sys
from unittest import mock

import measure_vla as vla
import pytest
import torch
from conftest import ROOT, shortened
from measure_ring import unshard_replicated
from test_ranks import ranks

import ring_attention as ra

seed, scale, summed = vla.sampler_seed, vla.loss_scale, vla.Rings.sum
FAULTS = {  # name: (where, what, what stands there instead)
    "rings seeded alike": (vla, "sampler_seed", lambda step, rank, size: seed(step, 0, size)),
    "a mean of the rings' means": (vla.Rings, "sum", lambda self, x, over=1: (
        2 * x if over == vla.RING else summed(self, x))),
    "each rank of a ring counts the suffix": (vla, "loss_scale", lambda size, replicated, reduce: (
        scale(size, replicated=False, reduce=reduce))),
    "a gather that does not sum gradients": (ra, "unshard", unshard_replicated),
    "PAD is seen": (vla, "mask_of", lambda block, valid, at: (
        ra.Mask(*ra.Mask.blocks(block).keys[1:3], position_BS=at))),
    "windows count PAD": (vla, "mask_of", lambda block, valid, at: ra.Mask.blocks(block, valid)),
}  # fmt: skip


def _runs(rank):
    """Three steps, and one with each fault."""
    found = {"sound": vla.on_rings(3, torch.float64)}
    for name, fault in FAULTS.items():
        with mock.patch.object(*fault):
            found[name] = vla.on_rings(1, torch.float64)
    return found


@pytest.fixture(scope="module")
def truth():
    return vla.on_one(3, torch.float64)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return ranks(tmp_path_factory.mktemp("vla"), vla.WORLD, _runs)


def test_two_rings_train_as_one_process(found, truth):
    assert max(vla.errors(found[0]["sound"][0], truth).values()) < 1e-10
    assert len({rank["sound"][1] for rank in found}) == 1
    assert all(grad.any() for grad in truth.grads[0])


@pytest.mark.parametrize("fault", shortened(FAULTS, *list(FAULTS)[:3]))
def test_a_planted_fault_is_seen(found, truth, fault):
    once = truth._replace(losses=truth.losses[:1], grads=truth.grads[:1])
    assert vla.errors(found[0][fault][0], once)["gradient"] > 1e-3


@pytest.mark.quick
def test_bf16_is_bf16_and_its_masters_are_not(truth):
    run = vla.on_one(1, torch.bfloat16)
    first, other = torch.cat(truth.grads[0]), torch.cat(run.grads[0])
    assert 1e-3 < ra.relative(other, first) < 0.1
    assert {x.dtype for x in run.weights} == {torch.float32}
    assert any((x != x.bfloat16()).any() for x in run.weights)


@pytest.mark.quick
def test_every_batch_has_every_kind_of_pad():
    census = vla.pad_census(vla.EPOCH)
    assert min(census.values()) >= 1

    def without_pad(*place):
        return {"valid": torch.ones(3, vla.P, dtype=torch.bool)}

    with mock.patch.object(vla, "draw", without_pad):
        assert vla.pad_census(vla.EPOCH) == dict.fromkeys(census, 0)


@pytest.mark.quick
def test_each_row_of_the_table_can_fail():
    losses, grads = [2.0] * 25 + [1.0] * 25, [(torch.ones(3), torch.ones(2))] * 50
    truth = vla.Run(losses, grads, [torch.ones(2)], [True] * 50)
    near = truth._replace(grads=[(torch.ones(3), torch.ones(2) * 1.01)] * 50)

    def failed(exact=truth, half=near, digests=((7, 7), (8, 8))):
        rows = vla.judge(exact, truth, half, near, digests)
        return {what for what, value, bound in rows if not value <= bound}

    assert not failed()
    grown = [(torch.ones(3), torch.ones(2) * factor) for factor in (1.001, 1.1)]
    cases = [
        failed(truth._replace(losses=[2.0] * 24 + [2.0001] + losses[25:])),
        failed(truth._replace(grads=[*grads[:-1], grown[0]])),
        failed(truth._replace(weights=[torch.full((2,), math.nan)])),
        failed(digests=((7, 7), (8, 9))),
        failed(half=near._replace(finite=[True, False])),
        failed(half=near._replace(grads=[grown[1]])),
        failed(half=near._replace(losses=[x + 0.1 for x in losses])),
    ]
    assert [len(case) for case in cases] == [1] * len(cases)
    flat = failed(half=near._replace(losses=[2.0] * 50))
    assert len(set().union(*cases, flat)) == len(cases) + 1


@pytest.mark.slow
def test_fifty_steps_in_bf16():
    command = [sys.executable, "ring_attention.py", "stress", "--model"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    line = json.loads(run.stdout.splitlines()[-1])
    assert line["ok"] and line["loss"]["bf16"][1] < 0.7 * line["loss"]["bf16"][0]
