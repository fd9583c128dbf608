"""tests/bench/measure.py: each subject runs at toy size, and its figures are what they say."""

import json
import math
from types import SimpleNamespace

import measure
import pytest
import torch
from conftest import ROOT, installed, shortened
from test_ranks import as_script
from torch.utils.flop_counter import FlopCounterMode

from full.tiny import tiny_model
from full.tree.trie import TokenTrie


def of_bound(row):
    return row["bound"] >= 1 and math.isclose(row["of_bound"], row["times"] / row["bound"])


HOLDS = {  # what each row of a subject has
    "ring": lambda row: row["way"] != "SDPA" or row["of_sdpa"] == row["of_ideal"] == 1,
    "kernel": lambda row: row["seconds"] > 0, "five": lambda row: row["times"] > 0,
    "tree": lambda row: row["shape"].startswith("hybrid") or of_bound(row),
    "models": lambda row: row["tokens/s"] > 0,
}  # fmt: skip


@pytest.mark.parametrize("subject", shortened(HOLDS, "five"))
def test_a_subject_prints_rows_and_a_line_of_json(subject, capsys):
    assert measure.main([subject, "--size", "toy", "--repeats", "1"]) == 0
    head, rule, *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert len(rows) >= 2 and len(lines) >= len(rows) and rule == "|" + "---|" * len(rows[0])
    assert head == f"| {' | '.join(rows[0])} |"
    assert all(HOLDS[subject](row) for row in rows), rows


@pytest.mark.quick
def test_flops_are_those_that_torch_counts():
    forked = TokenTrie([[5, 6, 7], [5, 6, 8], [5, 9]])  # 8 tokens and 15 pairs, 5 and 11 as a tree
    sizes = dict(head_dim=1, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    shape = SimpleNamespace(hidden_size=1, intermediate_size=0, vocab_size=1, **sizes)
    assert measure.flops(shape, forked) == (8 * 24 + 15 * 14 + 5 * 6, 5 * 24 + 11 * 14 + 4 * 6)
    shape = dict(vocab_size=256, hidden_size=128, head_dim=32, intermediate_size=384,
                 num_hidden_layers=4)  # fmt: skip
    model = tiny_model("qwen3", dtype=torch.float32, **shape)
    tokens = torch.arange(320) % 53
    flat, tree = measure.flops(model.config, TokenTrie([tokens]))
    # Attention's kernels are not counted alike.
    pairs = 320 * 321 // 2 * 14 * 4 * 32 * 4
    with FlopCounterMode(display=False) as counter:
        measure.ways_to_train(model, [tokens])["flat"]()
    parts = counter.get_flop_counts()["Global"]
    matrices = sum(n for op, n in parts.items() if "attention" not in str(op))
    assert flat == tree and abs(matrices / (flat - pairs) - 1) < 0.02


@pytest.mark.slow
def test_nothing_in_bfloat16_is_1_3_times_worse_than_the_plain_way(tmp_path):
    installed("transformers")
    code, out, err = as_script(ROOT / "tests" / "bench" / "precision.py", cwd=tmp_path)
    assert code == 0, err
    times = {row.split(" | ")[0]: float(row.split()[-2]) for row in out.splitlines()[2:]}
    assert len(times) == 6 and max(times.values()) <= 1.3, times


@pytest.mark.quick
def test_without_a_gpu_it_says_so(capsys):
    if not torch.cuda.is_available():
        assert measure.main(["kernel", "--device", "cuda"]) == 2
        assert "no CUDA device here" in capsys.readouterr().err
