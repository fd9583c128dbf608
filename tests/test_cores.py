"""Each core runs by itself, in a folder with nothing but cores, and notices a slip."""

import pytest
from conftest import ROOT, shortened
from test_house import CORES, core_of
from test_ranks import as_script

QUICKER = "ring_attention", "models", "tree_attention", "train_grpo"
WORDS = {"train_grpo": ("--steps", "1")}  # after its check it trains


def cut_into(folder):
    """Write the cut files, and nothing else, into a folder."""
    tail = 'if __name__ == "__main__":\n    import sys\n\n    core_main(sys.argv[1:])\n'
    for path in CORES:
        (folder / path.name).write_text(core_of(path) + tail)


@pytest.mark.parametrize("path", CORES, ids=lambda path: path.stem)
def test_a_core_runs_alone_and_prints_its_largest_error(path, tmp_path):
    cut_into(tmp_path)
    code, out, err = as_script(path.name, *WORDS.get(path.stem, ()), cwd=tmp_path)
    assert code == 0, err
    assert float(out.split("\n")[0].split()[-1]) <= 1e-10


# The core of parallel.py takes longest, and `python -m full check parallel` runs it too: test_readme.py.
@pytest.mark.parametrize("stem", shortened([path.stem for path in CORES], *QUICKER))
def test_the_whole_file_runs_its_core_too(stem, tmp_path):
    code, out, err = as_script(ROOT / f"{stem}.py", "core", *WORDS.get(stem, ()), cwd=tmp_path)
    lines = 3 if stem == "train_grpo" else 1  # its core trains: a step, and what is solved
    assert code == 0 and out.count("\n") == lines, err


SLIPS = [  # a line of a core, and a wrong one
    ("ring_attention", "    return ds_BHqk @ k_BHkD,", "    return 2 * ds_BHqk @ k_BHkD,"),
    ("models", "weight_NK / weight_NK.sum(-1", "weight_NK / weight_NK.sum(0"),
    ("parallel", 'layout(name, grid)["partial"]', 'layout(name, grid)["replicas"]'),
    ("tree_attention", "backward(tensors, gradients)", "backward(tensors[0], gradients[0])"),
    ("train_grpo", "tokens[:, positions_s + 1]", "tokens[:, positions_s]"),
    ("train_grpo", "len(self.tokens) + len(reply)", "len(self.tokens)"),
    ("train_grpo", "torch.minimum(ratio_N", "torch.maximum(ratio_N"),
    ("train_grpo", "optim_step(trainer.learning_rate(step))", "optim_step(trainer.config.lr)"),
    ("tree_attention", "visit(child, state, path)", "visit(child, None, path)"),
]


@pytest.mark.parametrize("number", shortened(range(len(SLIPS)), 0, 1, 3, 4, 5))
def test_a_core_with_a_slip_exits_with_one(number, tmp_path):
    stem, old, new = SLIPS[number]
    cut_into(tmp_path)
    file = tmp_path / f"{stem}.py"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    code, out, _ = as_script(file.name, *WORDS.get(stem, ()), cwd=tmp_path)
    assert code == 1 and "solved" not in out
