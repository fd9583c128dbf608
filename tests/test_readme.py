"""The pages: their commands run, at toy size; what they name exists; errors are those of `check`.

The pages are the README, full/RECIPES.md and full/RESULTS.md. TABLE holds every command of them:
more flags for it, which win over its own, or its test: FILE::NAME is tests/test_FILE.py::test_NAME.
"""

import ast
import contextlib
import importlib
import json
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, shortened
from test_ranks import as_script, join, ranks, start
from test_rollout import checkpoint, folder  # noqa: F401, fixtures
from test_run import cli

from full.config import Config, parse_config

README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "full" / "RECIPES.md").read_text()
RESULTS = (ROOT / "full" / "RESULTS.md").read_text()
PAGES = "\n".join([README, RECIPES, RESULTS])
FILES = ("train_grpo.py", "models.py", "parallel.py", "ring_attention.py", "tree_attention.py")
SOURCES = {file: (ROOT / file).read_text() for file in (*FILES, "text.py")}
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES, flags=re.S | re.M)
PROSE = re.sub(r"^```.*?^```$", "", PAGES, flags=re.S | re.M)
SPANS = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PROSE)]
STARTS = r"(python3?|pip|torchrun|grep|longest) |memory$"  # the last two are ring_attention.py's
LINES_OF_SHELL = [" ".join(line.split()) for language, text in BLOCKS if not language
                  for line in text.replace("\\\n", "").splitlines()]  # fmt: skip
COMMANDS = {command for text in [*LINES_OF_SHELL, *(x for x in SPANS if re.match(STARTS, x))]
            for command in text.split(" && ")}  # fmt: skip

TINY = " --layers 1 --hidden 16 --heads 4 --prompts 2 --group 2 --eval-prompts 4 --steps 2"
TINY += " --lr-warmup 0 --device cpu"
JSONL = " --max-new-tokens 8 --template {question}" + TINY
TRAIN = "torchrun --nproc-per-node 2 train_grpo.py"


CHECK = "readme::check_passes_alone_with_the_error_of_the_file_table"
ROAD = "commands::a_released_checkpoint_from_the_first_step_to_a_conversation"
EXAMPLE = "python -m full --task tests/example_tasks.py"
RESTARTED = "faults::a_killed_rank_is_started_again_and_the_run_goes_on"
SEVERAL = {command for command in COMMANDS if command.startswith("torchrun --nnodes ")}
PLAN = {command for command in COMMANDS if command.startswith("python -m full plan ")}
INSTALL = "-m pip install -q --no-compile -r"
CUT = [line for line in LINES_OF_SHELL if line.startswith(("for f in ", "(cd core;"))]
SECTION = RECIPES.split("## A released model")[1].split("\n## ")[0].replace("\\\n", "")
RELEASED = [" ".join(line.split()) for line in re.findall(r"^(?:python|pip) .*", SECTION, re.M)]
BY_CI = {  # what stands for it in .ci/run, or in a requirements.txt that it installs
    "python3 -m venv .venv": "python3 -m venv ",
    ". .venv/bin/activate": 'export PATH="$venv/bin:$PATH"',
    "pip install -r requirements.txt": f"{INSTALL} requirements.txt",
    "pip install -r tests/requirements.txt": f"{INSTALL} tests/requirements.txt",
    "pip install safetensors transformers": "transformers>=",
    "pip install trl": "\ntrl>=",
}
PYTEST = (  # arguments of python -m pytest, which CI runs
    "", " -m quick", " -m slow", " tests/test_faults.py", " tests/test_flags.py",
    " tests/test_audit.py -m slow -s -k made_in_any_way", " tests/test_parity.py -m slow",
    " tests/test_precision.py -s -k autocast",
)  # fmt: skip
BY_CI |= {f"python -m pytest{flags}": "\npython -m pytest\n" for flags in PYTEST}
RUN = "python train_grpo.py"
TABLE = {
    **dict.fromkeys(("grep NUMERICS *.py", "grep COMM *.py"),
                    "house::every_tag_ends_in_a_test_that_exists"),
    **dict.fromkeys(CUT, "cut_system::two_lines_of_the_readme_cut_the_files_out_and_run_them"),
    **dict.fromkeys(["python FILE check", *(f"python {file} check" for file in FILES)], CHECK),
    "python ring_attention.py": "cores::the_whole_file_runs_its_core_too",
    f"{RUN} audit runs/guess-0": "audit::the_audit_of_an_honest_run",
    f"{RUN} eval runs/mine": "commands::the_greedy_figure_is_the_runs_own",
    f"{RUN} eval DIR --task jsonl --data FILE.jsonl": ROAD,
    f"{RUN} chat runs/mine": "commands::a_pipe_is_answered_a_line_a_line",
    f"{RUN} export runs/mine HF": "commands::the_newest_checkpoint_exported_is_what_the_run_wrote",
    f"{RUN} check": "grpo_matrix::some_cells_of_the_matrix",
    f"{RUN} bench": "grpo_matrix::bench_runs_at_toy_size",
    f"{RUN} plot DIR [DIR ...]": "run::plot_is_a_png_or_says_what_to_install",
    **dict.fromkeys((
        RUN, TRAIN, f"{TRAIN} --plan t2", f'{TRAIN} --plan "d2|t2"',
        f'{TRAIN} --plan "t2|d2" --data-parallel fsdp',
        f"{RUN} --compute-dtype bfloat16", f"{RUN} --tree sparse", f"{RUN} --staleness 1",
        f"{RUN} --staleness 2 --proximal --importance-cap 2", f"{RUN} --advantage gae",
        f"{RUN} --tree dta --chunk-tokens 2048", f"{EXAMPLE}:Sort --steps 250"), TINY),
    **dict.fromkeys(("sh tests/gpu.sh", "python -m full check models --device cuda"),
                    "gpu::the_list_names_each_command"),
    "sh tests/gpu.sh results": "gpu::results_shows_what_was_run_and_names_what_was_not",
    **dict.fromkeys(("sh tests/gpu.sh ring", "sh tests/gpu.sh step"), "gpu::each_command_runs"),
    "python -m full bench ring stress --model": "action::fifty_steps_in_bf16",
    f"{EXAMPLE}:Addition --demos 80 --steps 60 --temperature 0.6": " --demos 1" + TINY,
    f"{EXAMPLE}:Calculator --demos 80 --steps 60": " --demos 1" + TINY,
    f"{EXAMPLE}:Lookup --size 5 --demos 20 --advantage group_std "
    "--lr 3e-4 --entropy-coef 0.03": " --demos 2" + TINY,
    f"{RUN} --task jsonl --data questions.jsonl --model DIR "
    "--generator-dtype bfloat16 --proximal --importance-cap 2 --advantage group_std "
    "--max-new-tokens 512 --batch-rows 64 --prompts 32 --group 8 --steps 200 "
    "--save-every 20 --out runs/mine": JSONL,
    "torchrun --nproc-per-node 8 [--nnodes ..]": " -m full --task jsonl --model DIR "
    "--data questions.jsonl --data-parallel fsdp --timeout 99 --out runs/mine" + JSONL,
    "python -m full inspect DIR": " ",
    "python tests/smollm_tasks.py RUN [RUN ..] FILE.png": "smollm::runs_of_both_tasks_are_drawn",
    **dict.fromkeys(RELEASED, "smollm::the_commands_of_the_recipe_run"),
    "python tests/bench/measure_objectives.py runs/objectives 5 objectives.png":
        "objectives::the_curves_are_drawn_of_runs_that_are_there",
    "python tests/adapters.py table":
        "conformance::the_losses_of_other_code_bases_are_what_the_table_says",
    "python tests/conformance.py tests/adapters.py:ours objective=gspo aggregation=sequence_mean":
        "conformance::the_command_prints_a_row_for_each_property",
    "python tests/example_action_expert.py check": "action::the_check_passes_and_fails",
    "python -m full bench models --repeats 7": " --repeats 1",
    **dict.fromkeys(SEVERAL, "plan::the_training_commands_of_the_recipes_have_plans_that_fit"),
    **dict.fromkeys(PLAN, "plan::the_rows_of_the_results_are_what_plan_prints"),
    **dict.fromkeys(("torchrun --max-restarts 3", "torchrun --max-restarts 3 .. --resume"),
                    RESTARTED),
    "python tests/test_flags.py --seed 0 --count 1000":
        "flags::random_flags_finish_or_are_refused_by_all_ranks_alike",
    **dict.fromkeys(("python tests/mutate.py", "python tests/mutate.py models.py --seed 1"),
                    "mutate::a_slip_is_caught_or_listed"),
    "python -m full bench parallel": "parallel::bench_runs_at_toy_size",
    "python -m full bench ring --repeats 5": " --repeats 1 --tokens 64",
    "memory": " --tokens 64",
    "longest --budget-mb 100": " --budget-mb 5 --world 1",
    "python -m full bench tree --repeats 7": "tree::bench_runs_at_toy_size",
    "python tests/bench/bench_trl.py --model DIR --prompts 4 --completion 14 --rounds 3":
        "conformance::a_checkpoint_is_measured_on_its_own_prompts",
    "python tests/bench/bench_trl.py --rounds 7":
        "conformance::trl_gives_our_loss_and_gradient_on_its_own_batch",
}  # fmt: skip
SLOW = ("python -m full bench models", "memory", "longest")
COMMANDS_RUN = [pytest.param(command, marks=[pytest.mark.slow] * command.startswith(SLOW))
       for command, how in TABLE.items() if how.startswith(" ")]  # fmt: skip


# Commands ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_every_command_is_in_the_table_and_who_runs_it_is_there():
    assert COMMANDS == {*TABLE, *BY_CI}
    for file, name in {tuple(how.split("::")) for how in TABLE.values() if "::" in how}:
        text = (ROOT / f"tests/test_{file}.py").read_text()
        assert re.search(rf"^def test_{name}\(", text, re.M), (file, name)
    files = (".ci/run", "requirements.txt", "tests/requirements.txt")
    installed = "\n".join((ROOT / file).read_text() for file in files)
    assert [text for text in BY_CI.values() if text not in installed] == []
    for path in re.findall(r"\btests/[\w/]+\.py", " ".join(COMMANDS)):
        assert (ROOT / path).exists(), path


def _command(rank, file, words, log):
    with open(log, "w") as out, contextlib.redirect_stdout(out):
        code = importlib.import_module(file.removesuffix(".py")).main(words)
    sys.exit(code)


# The line over the README's piece of a run's output. It is the first block of text.
HEADER = re.findall(r"^ *step .*$", next(text for kind, text in BLOCKS if kind == "text"), re.M)


@pytest.mark.parametrize("command", COMMANDS_RUN)
def test_a_command_runs_at_toy_size(folder, command):  # noqa: F811
    line = re.sub(r"\[.*\]", "", command + TABLE[command])
    words = shlex.split(line.replace("tests/example_tasks", f"{ROOT}/tests/example_tasks"))
    file = next((word for word in words if word.endswith(".py")), "ring_attention.py")
    flags = words[words.index(file) + 1 :] if file in words else words
    if file == "train_grpo.py":
        codes, out, err = cli(folder, " ".join(flags), 2 if words[0] == "torchrun" else 1)
        assert not any(codes), err
        out = "".join(out)  # one rank prints
        (run,) = (folder / "runs").iterdir()
        assert {"config.json", "metrics.jsonl", "samples.jsonl"} <= {x.name for x in run.iterdir()}
        assert (run / "hf" / "config.json").exists()
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2 and "eval/solved" in out
        assert command != TRAIN or set(HEADER) <= set(out.splitlines())
    else:
        assert join(start(1, _command, file, flags, folder / "log"), 600) == [0]
        assert "inspect" in flags or json.loads((folder / "log").read_text().splitlines()[-1])


EXAMPLES = [text for language, text in BLOCKS if language == "python"]  # a task, any nn.Module


def _own_model():
    """A module without a name of ours, with one frozen parameter, and batches for it."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    layers[2].bias.requires_grad = False
    rows = torch.randn(5, 7, 4, dtype=torch.float64)  # 7 rows: two ranks have 4 and 3
    return torch.nn.Sequential(*layers).double(), list(zip(rows, rows[:, :, :2].flip(0) * 9))


def _weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train_own_model(rank, folder, world):
    """The weights, and the norms before the clip."""
    sys.path.insert(0, str(folder))
    model, batches = _own_model()
    own, norms = importlib.import_module("own_model"), []
    clip = own.clip_grad_norm
    own.clip_grad_norm = lambda *given: norms.append(clip(*given))
    own.train(model, batches, rank, world)
    return _weights(model).numpy(), np.array(norms)


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

    text = EXAMPLES[1]
    without = re.sub(r"\breduce_gradients\(model\)", "pass", text)
    for name, code, world in (("one", text, 1), ("two", text, 2), ("without", without, 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_model.py").write_text(code)
        for weights, found in ranks(tmp_path, world, _train_own_model, tmp_path / name, world):
            error = abs(weights - _weights(model).numpy()).max()
            assert error > 1e-4 if name == "without" else error < 1e-12
            assert name == "without" or abs(found - norms).max() < 1e-12


# Numbers -------------------------------------------------------------------------------------

ERRORS = {file: float(error) for file, error in
          re.findall(r"^\| `(\w+\.py)` \|.*\| (\S+e-\d+) \|$", README, re.M)}  # fmt: skip
SKIPPED = {"parallel.py": "every plan with models.py: SKIP", "tree_attention.py": "families: SKIP"}
ONE_RANK = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")


def check_error(file, folder, **environment):
    """(max_error of the last line, all that was printed) of `python FILE check` in a folder."""
    code, out, err = as_script(file, "check", cwd=folder, **environment)
    assert code == 0, out + err
    last = json.loads(out.splitlines()[-1])
    assert last["ok"] and last["check"] == file.removesuffix(".py")
    return last["max_error"], out


@pytest.mark.quick
def test_the_tables_name_the_five_files_and_agree():
    assert tuple(ERRORS) == FILES
    for page in (README, RESULTS):
        rows = re.findall(r"^\|.*\| (\S+) \| `python (\w+\.py) check` \|$", page, re.M)
        rows = [(float(error), file) for error, file in rows if "e-" in error]
        assert {file for _, file in rows} == set(FILES)
        assert all(error == ERRORS[file] for error, file in rows)


ALONE = [file for file in FILES[1:] if file != "tree_attention.py"]  # of which check takes longest


@pytest.mark.parametrize("file", shortened(FILES[1:], *ALONE))
def test_check_passes_alone_with_the_error_of_the_file_table(file, tmp_path):
    """The ring on one rank; test_the_whole_check_has_the_error_of_the_file_table has four."""
    shutil.copy(ROOT / file, tmp_path)
    if file == "tree_attention.py":
        shutil.copy(ROOT / "ring_attention.py", tmp_path)
    few = ONE_RANK if file == "ring_attention.py" else {}
    error, out = check_error(file, tmp_path, **few)
    assert ERRORS[file] / 30 <= error <= 3 * ERRORS[file]  # a machine rounds as it likes
    assert SKIPPED.get(file, "") in out


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in FILES if file != "models.py"])
def test_the_whole_check_has_the_error_of_the_file_table(file):
    error, out = check_error(file, ROOT)
    assert ERRORS[file] / 3 <= error <= 3 * ERRORS[file] and "SKIP" not in out


@pytest.mark.parametrize("flags", shortened(["--steps 1", ""], "--steps 1"))
def test_the_task_of_the_readme_is_learned(tmp_path, flags):
    (tmp_path / "mine.py").write_text(EXAMPLES[0])
    words = "--task", "mine.py:Majority", *flags.split()
    code, out, err = as_script(ROOT / "train_grpo.py", *words, cwd=tmp_path)
    assert code == 0, out + err
    assert flags or float(re.search(r"eval/solved (\S+) after", out)[1]) >= 0.95


# Names ---------------------------------------------------------------------------------------

ELSEWHERE = {"padding_idx", "log_softmax", "torchrun", "NCCL_SOCKET_IFNAME"}  # torch's, NCCL's
ELSEWHERE |= {"OUT/hf", "tokenizer.json", "questions.jsonl"}  # a run's files
FLAGS_ELSEWHERE = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
FLAGS_ELSEWHERE |= {"--max-restarts", "--no-deps", "--local-dir"}  # torchrun's, pip's, hf's
FLAGS_ELSEWHERE |= {"--rounds", "--completion", "--prompt"}  # bench_trl.py's


@pytest.mark.quick
def test_what_is_in_backticks_exists():
    more = [ROOT / "audit.py", ROOT / "tests" / "example_tasks.py"]
    code = "\n".join([*SOURCES.values(), *(path.read_text() for path in more)])
    tests = "\n".join(path.read_text() for path in sorted(ROOT.glob("tests/test_*.py")))
    for span in SPANS:
        if re.match(r"(tests|assets|\.ci)/|\w+\.py$", span):
            assert (ROOT / span.split("::")[0]).exists(), span
            assert "::" not in span or f"def {span.split('::')[1]}(" in (ROOT / span).read_text()
        elif re.match(r"test_\w+$", span):
            assert re.search(rf"^def {span}\(", tests, re.M), span
        elif re.match(r"[A-Za-z_][\w./]*(\(.*\))?$", span) and span not in ELSEWHERE:
            name = re.match(r"[\w./]*", span)[0].split(".")[-1]
            assert re.search(rf"\b{name}\b", code), span
    for link in re.findall(r"\]\(([^):]+)\)", PROSE):
        assert (ROOT / link).exists(), link


@pytest.mark.quick
def test_every_flag_is_one():
    programs = [*ROOT.glob("*.py"), *ROOT.glob("tests/bench/*.py"), ROOT / "tests/test_flags.py"]
    code = "".join(path.read_text() for path in programs)
    known = {f"--{name.replace('_', '-')}" for name in Config.__dataclass_fields__}
    known |= set(re.findall(r'"(--[\w-]+)"', code)) | FLAGS_ELSEWHERE
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGES)) <= known
    for span in SPANS:
        if span.startswith("--") and " " in span:
            config = parse_config(span.split())
            # A text task needs its files too, which a page names with the flag in question only.
            if not any(getattr(config, name) for name in ("template", "reward")):
                config.check()


@pytest.mark.quick
def test_the_reading_order_names_what_its_files_define():
    section = README.split("## Reading order")[1].split("\n##")[0]
    for item in re.split(r"^\d\. ", section, flags=re.M)[1:]:
        file, *names = re.findall(r"`([^`]+)`", item)
        for name in names:
            assert re.search(rf"\b(def|class) {name.split('.')[-1]}\b", SOURCES[file]), name


def letters_of(file):
    """Capital letters of the shapes in the names of a file: B, H, S and D of q_BHSD."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[file])):
        name = getattr(node, "id", getattr(node, "arg", getattr(node, "attr", None)))
        suffix = re.match(r"[a-z]\w*_([A-Za-z0-9]*[A-Z][A-Za-z0-9]*)$", name or "")
        found |= {letter for letter in suffix[1] if letter.isupper()} if suffix else set()
    return found


@pytest.mark.quick
def test_the_table_of_letters_is_that_of_the_files():
    """Every letter of a file stands in a row that names it, and no row names a file in vain."""
    used = {file.removesuffix(".py"): letters_of(file) for file in FILES}
    said = {name: set() for name in used}
    for row, names in re.findall(r"^\| ([A-Z](?:, [A-Z])*) \|.*\| (.*) \|$", README, re.M):
        letters = set(row.split(", "))
        assert letters <= set().union(*used.values())
        for name in used if names == "all" else names.split(", "):
            assert letters & used[name], (row, name)
            said[name] |= letters
    assert {name: used[name] - said[name] for name in used if used[name] - said[name]} == {}
