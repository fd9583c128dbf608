"""The pages: their commands run at toy size, their code runs, their flags exist.

The pages are README.md, those of full/, the map of the tests and the course.
"""

import dataclasses
import importlib
import re
import shlex
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, shortened
from pages import Page
from test_ranks import as_script, ranks
from test_rollout import checkpoint, folder  # noqa: F401, fixtures
from test_run import cli

from full.run.config import Config
from full.run.flags import parse_config

MANUAL = Page("full/README.md")
RECIPES = Page("full/RECIPES.md")
MAP = Page("tests/README.md")
PAGES = Page("README.md", "full/README.md", "full/RECIPES.md", "full/RESULTS.md", "tests/README.md",
             "tests/EXERCISES.md")  # fmt: skip

TINY = " --layers 1 --hidden 16 --heads 4 --prompts 2 --group 2 --eval-prompts 4 --steps 2"
TINY += " --lr-warmup 0 --device cpu"
JSONL = " --max-new-tokens 8 --template {question}" + TINY
RUN = "python -m full"
TRAIN = "torchrun --nproc-per-node 2 -m full"
TOY = {  # command: more flags with which it runs here; they win over its own
    **dict.fromkeys((
        RUN, TRAIN, f"{TRAIN} --plan t2",
        f"{RUN} --compute-dtype bfloat16", f"{RUN} --tree sparse", f"{RUN} --staleness 1",
        f"{RUN} --staleness 2 --proximal --importance-cap 2",
        f"{RUN} --tree dta --chunk-tokens 2048",
        f"{RUN} --advantage gae --steps 60", f"{RUN} --objective gspo --seed 0",
        f"{RUN} --exact --steps 20",
        f"{RUN} --task tests/example_tasks.py:Sort --steps 250"), TINY),
    f"{RUN} --task tests/example_tasks.py:Lookup --size 5 --advantage group_std": TINY,
    f"{RUN} --task jsonl --data questions.jsonl --model DIR "
    "--generator-dtype bfloat16 --proximal --importance-cap 2 --advantage group_std "
    "--max-new-tokens 512 --batch-rows 64 --prompts 32 --group 8 --steps 200 "
    "--save-every 20 --out runs/mine": JSONL,
    "torchrun --nproc-per-node 8 [--nnodes ..]": " -m full --task jsonl --model DIR "
    "--data questions.jsonl --data-parallel fsdp --timeout 99 --out runs/mine" + JSONL,
    f"{RUN} --task jsonl --data questions.jsonl --model DIR --lora-rank 16 "
    "--compute-dtype bfloat16 --lr 1e-3 --out runs/lora": JSONL,
}  # fmt: skip
ELSEWHERE = {  # what a command begins with: test_NAME.py, which runs it, or who else does
    "torchrun --nproc-per-node 2 train_grpo.py": "cut_system", "python FILE.py": "readme",
    "python conformance/": "step_kit", "python tests/adapters.py": "conformance",
    "python tests/mutate.py": "mutate", f"{RUN} check": "grpo_matrix",
    f"{RUN} audit ": "audit", f"{RUN} plot ": "run", f"{RUN} eval ": "commands",
    f"{RUN} export ": "commands", "grep ": "house",
    "torchrun --nproc-per-node 2 mine.py": "api", "torchrun --nnodes": "plan",
    "torchrun --max-restarts 3": "faults", "sh tests/gpu.sh": "gpu",
    "python tests/example_action_expert.py check": "action",
    "python tests/exercise.py": "exercise", "python exercise/": "exercise",
    "python tests/bench/measure": "measure",
    "python tests/bench/precision.py": "measure",
    "python tests/bench/gpu.py": "gpu",
    "python tests/bench/honest_runs.py": "audit", "python tests/bench/draw.py": "draw",
    "python tests/bench/curve_trl.py": "trl", "python -m pytest": "the tests themselves",
    "pip install": ".ci/run", "python3 -m venv": ".ci/run", ". .venv": ".ci/run",
}  # fmt: skip
SMOLLM = r"runs/(smollm|sums|words|reverser)"  # the commands of test_smollm.py
VLLM = r"^(VLLM_|python3 -m venv vllm|vllm/bin/)"  # of test_vllm.py


@pytest.mark.quick
def test_every_command_is_run_by_a_test_and_every_path_exists():
    for command in PAGES.commands:
        runs = [name for start, name in ELSEWHERE.items() if command.startswith(start)]
        runs += ["smollm"] * bool(re.search(SMOLLM, command))
        runs += ["vllm"] * bool(re.search(VLLM, command))
        assert command in TOY or runs, command
        for name in runs:
            assert not name.isidentifier() or [*ROOT.glob(f"tests/**/test_{name}.py")], name
    assert not {*TOY} - PAGES.commands
    named = re.findall(r"\b(?:tests|assets|conformance|full)/[\w/]+\.\w+", PAGES.text)
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("command", TOY)
def test_a_command_runs_at_toy_size(folder, command):  # noqa: F811
    """`python -m full ..` in a folder of its own; torchrun's two ranks are two such processes."""
    line = re.sub(r"\[.*\]", "", command + TOY[command])
    tasks = "tests/example_tasks"
    words = [word.replace(tasks, f"{ROOT}/{tasks}") for word in shlex.split(line)]
    flags = words[words.index("full") + 1 :]
    if flags and not flags[0].startswith("--"):
        code, out, err = as_script("full", *flags, cwd=folder)
        assert code == 0 and out, err
        return
    codes, out, err = cli(folder, shlex.join(flags), 2 if words[0] == "torchrun" else 1)
    assert not any(codes), err
    (run,) = (folder / "runs").iterdir()
    assert {"config.json", "metrics.jsonl", "samples.jsonl"} <= {x.name for x in run.iterdir()}
    assert (run / "hf" / "config.json").exists()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert "eval/solved" in "".join(out)  # one rank prints


@pytest.mark.quick
def test_the_map_names_every_file_of_tests():
    files = {path.name for path in ROOT.glob("tests/**/test_*.py")}
    assert set(re.findall(r"test_\w+\.py", MAP.text)) == files


# The pages' code --------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", shortened(["--steps 1", ""], "--steps 1"))
def test_the_task_of_the_manual_is_learned(tmp_path, flags):
    (tmp_path / "mine.py").write_text(MANUAL.code("python")[0])
    code, out, err = as_script("full", "--task", "mine.py:Majority", *flags.split(), cwd=tmp_path)
    assert code == 0, out + err
    assert flags or float(re.search(r"eval/solved (\S+) after", out)[1]) >= 0.95


@pytest.mark.quick
def test_the_settings_of_the_manual_are_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MANUAL.code("toml")[0])
    config = parse_config(["--config", f"{path}", "--group", "4"]).check()
    assert (config.task, config.group, config.lr) == ("jsonl", 4, 2e-6)
    assert Config.from_file(path, steps=20) == dataclasses.replace(config, group=8, steps=20)


def _own_model():
    """A module without a name of ours, with one frozen parameter, and batches for it."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    layers[2].bias.requires_grad = False
    rows = torch.randn(5, 7, 4, dtype=torch.float64)  # 7 rows: two ranks have 4 and 3
    return torch.nn.Sequential(*layers).double(), list(zip(rows, rows[:, :, :2].flip(0) * 9))


def _train_own_model(rank, folder, world):  # noqa: F811
    """The weights, and the norms before the clip."""
    sys.path.insert(0, str(folder))
    model, batches = _own_model()
    own, norms = importlib.import_module("own_model"), []
    clip = own.clip_grad_norm
    own.clip_grad_norm = lambda *given: norms.append(clip(*given))
    own.train(model, batches, rank, world)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy(), np.array(norms)


def test_the_example_of_a_model_is_one_process_and_needs_its_sum(tmp_path):
    """Against plain torch on the whole batch; the clip is on in every step."""
    model, batches = _own_model()
    trained, norms = [p for p in model.parameters() if p.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for rows, targets in batches:
        (model(rows) - targets).square().mean().backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained]).item())
        assert norms[-1] > 1
        for p in trained:
            p.grad /= norms[-1]
        optimizer.step()
        model.zero_grad()
    truth = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()

    text = RECIPES.code("python")[0]
    without = re.sub(r"\breduce_gradients\(model\)", "pass", text)
    for name, code, world in (("one", text, 1), ("two", text, 2), ("without", without, 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_model.py").write_text(code)
        for weights, found in ranks(tmp_path, world, _train_own_model, tmp_path / name, world):
            error = abs(weights - truth).max()
            assert error > 1e-4 if name == "without" else error < 1e-12
            assert name == "without" or abs(found - norms).max() < 1e-12


# Flags ------------------------------------------------------------------------------------------

OF_OTHERS = """
    --nproc-per-node --nnodes --rdzv-backend --rdzv-endpoint --rdzv-id --max-restarts
    --no-deps --torch-backend --local-dir
    --port --host --enable-scale-out --logprobs-mode --max-model-len --enforce-eager --block-size
    --hf-overrides --enable-deterministic-inference --enable-fp32-lm-head
"""  # torchrun's, pip's and hf's, vLLM's and SGLang's


@pytest.mark.quick
def test_every_flag_is_one():
    programs = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("tests/*/*.py")]
    fields = dataclasses.fields(Config)
    known = {f"--{name.replace('_', '-')}" for name in Config.__dataclass_fields__}
    known |= {f"--no-{f.name.replace('_', '-')}" for f in fields if f.type is bool}
    known |= set(re.findall(r'"(--[\w-]+)"', "".join(path.read_text() for path in programs)))
    used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGES.text))
    assert used - known - {*OF_OTHERS.split()} == set()
    for span in PAGES.spans:
        if span.startswith("--") and " " in span and "=" not in span:
            config = parse_config(span.split())
            # A text task needs its files too, which a page names with the flag in question only.
            if not any(getattr(config, name) for name in ("template", "reward")):
                config.check()


@pytest.mark.quick
def test_the_table_of_purposes_has_every_flag_once_in_the_group_that_help_has(capsys):
    section = MANUAL.text.split("## Flags by purpose\n")[1].split("\n## ")[0]
    by_manual, group = {}, ""
    for title, flags in re.findall(r"^\| ([^|]*?) *\|[^|]*\|(.*)\|$", section, re.M)[1:]:
        group = title or group
        by_manual.setdefault(group, []).extend(re.findall(r"`(--[\w-]+)`", flags))
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    shown = capsys.readouterr().out.split("\nPapers and")[0].split("\n\n")
    by_help = {text.split(":\n")[0]: re.findall(r"^  (--[\w-]+)", text, re.M) for text in shown}
    groups = {title: sorted(flags) for title, flags in by_manual.items()}
    assert groups == {title: sorted(flags) for title, flags in by_help.items() if flags}
    listed = sorted(flag for flags in by_manual.values() for flag in flags)
    names = [field.name.replace("_", "-") for field in dataclasses.fields(Config)]
    assert listed == sorted(f"--{name}" for name in ("config", *names))


@pytest.mark.quick
def test_the_lines_of_prose_are_short():
    skipped = "|", "Not run on a GPU", "python", "pip "
    lines = [x for x in PAGES.text.split("\n") if not x.startswith(skipped)]
    assert [line for line in lines if len(line) > 128] == []
