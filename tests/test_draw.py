"""tests/bench/draw.py: each picture is drawn, and shows what the code has done; so a table."""

import pytest
import torch
from conftest import installed

installed("matplotlib")

import draw


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_small(name, tmp_path):
    path = tmp_path / "picture.png"
    draw.save(draw.PICTURES[name](), path)
    assert 5000 < path.stat().st_size < 120_000


def test_the_table_of_a_group_has_its_rewards_ratios_and_losses(capsys):
    """The ratio times A is -l where no clip acts, and the advantages add up to 0."""
    draw.main(["rollout"])
    lines = capsys.readouterr().out.splitlines()
    rewards, advantages = zip(*(map(float, line.split()[-2:]) for line in lines[1:-8]))
    assert len({*rewards}) > 1 and abs(sum(advantages)) < 0.03
    numbers = [torch.tensor([float(x) for x in line[40:].split()]) for line in lines[-6:]]
    old, lp, ratio, clipped, A, loss = numbers
    assert torch.allclose((lp - old).exp(), ratio, atol=2e-3) and len(loss) > 1
    assert torch.allclose(-torch.minimum(ratio * A, clipped * A), loss, atol=2e-3)


def test_what_is_recorded_is_a_schedule_and_a_ring():
    """Stages wait (p - 1) / (p - 1 + n), of p stages and n micro-batches, arXiv:2104.04473."""
    record = draw.record_1f1b(3, 4)
    assert draw.waiting(record) == pytest.approx(2 / 6)
    assert "".join(f"{letter}{n}" for letter, n, _, _ in record[0]) == "F0F1F2B0F3B1B2B3"
    ranks = draw.record_ring(2, 8)
    assert [[int(mask.sum()) for _, mask in hops] for hops in ranks] == [[10, 8]] * 2
    assert [[owner for owner, _ in hops] for hops in ranks] == [[0, 1], [1, 0]]
