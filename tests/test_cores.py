"""Each of the five files runs in a folder with nothing but the five, and notices a slip."""

import shutil

import pytest
from conftest import ROOT, shortened
from test_house import FIVE
from test_ranks import as_script

WORDS = {"train_grpo": ("--steps", "1")}  # after its check it trains


def copy_the_five(folder):
    """Put the five files, and nothing else, into a folder."""
    for path in FIVE:
        shutil.copy(path, folder)


@pytest.mark.parametrize("path", FIVE, ids=lambda path: path.stem)
def test_a_file_runs_alone_and_prints_its_largest_error(path, tmp_path):
    copy_the_five(tmp_path)
    code, out, err = as_script(path.name, *WORDS.get(path.stem, ()), cwd=tmp_path)
    assert code == 0, err
    assert float(out.split("\n")[0].split()[-1]) <= 1e-10
    # After its check, train_grpo.py prints an evaluation, a game, and what is solved.
    assert out.count("\n") == (4 if path.stem == "train_grpo" else 1)


def test_parallel_alone_says_what_its_check_needs(tmp_path):
    shutil.copy(ROOT / "parallel.py", tmp_path)
    code, out, err = as_script("parallel.py", cwd=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1) and "models.py" in err


SLIPS = [  # a line of a file, and a wrong one
    ("ring_attention", "    return ds_BHqk @ k_BHkD,", "    return 2 * ds_BHqk @ k_BHkD,"),
    ("models", "weight_NK / weight_NK.sum(-1", "weight_NK / weight_NK.sum(0"),
    ("parallel", 'layout(name, grid)["partial"]', 'layout(name, grid)["replicas"]'),
    ("tree_attention", "backward(tensors, gradients)", "backward(tensors[0], gradients[0])"),
    ("train_grpo", "tokens[:, positions_s + 1]", "tokens[:, positions_s]"),
    ("train_grpo", "len(self.tokens) + len(reply)", "len(self.tokens)"),
    ("train_grpo", "torch.minimum(ratio_N", "torch.maximum(ratio_N"),
    ("train_grpo", "optim_step(trainer.learning_rate(step))", "optim_step(trainer.config.lr)"),
    ("tree_attention", "visit(child, state, path)", "visit(child, None, path)"),
    ("tree_attention", "found[i], entropies = torch", "entropies, found[i] = torch"),
    ("train_grpo", "[H[e.mask] for e, (_, H)", "[H[e.mask] for e, (H, _)"),
]


@pytest.mark.parametrize("number", shortened(range(len(SLIPS)), 0, 1, 3, 4, 5))
def test_a_file_with_a_slip_exits_with_one(number, tmp_path):
    stem, old, new = SLIPS[number]
    copy_the_five(tmp_path)
    file = tmp_path / f"{stem}.py"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    code, out, _ = as_script(file.name, *WORDS.get(stem, ()), cwd=tmp_path)
    assert code == 1 and "solved" not in out
