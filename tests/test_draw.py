"""tests/bench/draw.py: each picture is drawn, and shows what the code has done."""

import pytest

pytest.importorskip("matplotlib", reason="draws PNGs")

import draw
from PIL import Image


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_wide_and_small(name, tmp_path):
    path = tmp_path / "picture.png"
    draw.save(draw.PICTURES[name](), path)
    width, height = Image.open(path).size
    assert width == 1400 and height <= 1400 and path.stat().st_size < 120_000


def test_a_stage_waits_as_long_as_the_paper_says():
    """(p - 1) / (p - 1 + n), of p stages and n micro-batches, arXiv:2104.04473."""
    record = draw.record_1f1b(3, 4)
    assert draw.waiting(record) == pytest.approx(2 / 6)
    assert "".join(f"{letter}{n}" for letter, n, _, _ in record[0]) == "F0F1F2B0F3B1B2B3"


def test_all_ranks_of_a_ring_have_equally_many_visible_pairs_at_a_hop():
    ranks = draw.record_ring(2, 8)
    assert [[int(mask.sum()) for _, mask in hops] for hops in ranks] == [[10, 8]] * 2
    assert [[owner for owner, _ in hops] for hops in ranks] == [[0, 1], [1, 0]]


def test_a_name_without_a_picture_is_refused(capsys):
    assert draw.main(["ring", "rign"]) == 2
    told = capsys.readouterr().err
    assert told == "expected names of ring, tree, plan, pipeline, rollout, got rign\n"
