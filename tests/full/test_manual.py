"""The folder's pages: their commands run, at toy size; what they name exists; errors are check's.

The pages are README.md, RECIPES.md and RESULTS.md of full/. TABLE holds every command of them:
more flags for it, which win over its own, or its test: FILE::NAME is tests/test_FILE.py::test_NAME.
"""

import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys

import imports
import numpy as np
import pytest
import torch
from conftest import ROOT, shortened
from pages import FIVE, Page, lines_of, require_names_exist, require_whole_table
from test_ranks import as_script, ranks
from test_rollout import checkpoint, folder  # noqa: F401, fixtures
from test_run import cli

from full.check import SUBJECTS
from full.config import Config
from full.flags import parse_config
from full.metrics import METRICS

MANUAL = Page("full/README.md")
RECIPES = Page("full/RECIPES.md")
RESULTS = Page("full/RESULTS.md")
PAGES = Page("full/README.md", "full/RECIPES.md", "full/RESULTS.md")

TINY = " --layers 1 --hidden 16 --heads 4 --prompts 2 --group 2 --eval-prompts 4 --steps 2"
TINY += " --lr-warmup 0 --device cpu"
JSONL = " --max-new-tokens 8 --template {question}" + TINY
RUN = "python -m full"
TRAIN = "torchrun --nproc-per-node 2 -m full"
EXAMPLE = f"{RUN} --task tests/example_tasks.py"
BENCH = "python tests/bench/measure"
ROAD = "commands::a_released_checkpoint_from_the_first_step_to_a_conversation"
GPU = "gpu::the_list_names_each_command"
SECTION = RECIPES.text.split("## A released model")[1].split("\n## ")[0]
RELEASED = [line for line in lines_of(SECTION) if line.startswith(RUN)]
SEVERAL = {command for command in PAGES.commands if command.startswith("torchrun --nnodes ")}
PLAN = {command for command in RESULTS.commands if command.startswith(f"{RUN} plan ")}
TABLE = {
    **dict.fromkeys((
        RUN, TRAIN, f"{TRAIN} --plan t2",
        f"{RUN} --compute-dtype bfloat16", f"{RUN} --tree sparse", f"{RUN} --staleness 1",
        f"{RUN} --staleness 2 --proximal --importance-cap 2", f"{RUN} --advantage gae",
        f"{RUN} --tree dta --chunk-tokens 2048", f"{EXAMPLE}:Sort --steps 250"), TINY),
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
    f"{RUN} --task jsonl --data questions.jsonl --model DIR --lora-rank 16 "
    "--compute-dtype bfloat16 --lr 1e-3 --out runs/lora": JSONL,
    f"{RUN} export RUN DIR --adapters":
        "lora::export_merges_and_an_adapter_is_read_by_peft",
    "torchrun --nproc-per-node 2 mine.py":
        "api::a_script_under_torchrun_gives_the_run_of_the_command_line",
    f"{RUN} inspect DIR": " ",
    f"{RUN} plan d2t2 --model qwen3-8b": " ",
    "python tests/bench/imports.py": "manual::the_graph_of_imports_has_every_file",

    # Commands that read a run.
    f"{RUN} audit runs/guess-0": "audit::the_audit_of_an_honest_run",
    f"{RUN} plot runs/guess-0": "run::plot_is_a_png_or_says_what_to_install",
    f"{RUN} eval runs/words": "commands::the_greedy_figure_is_the_runs_own",
    f"{RUN} eval DIR --task jsonl --data FILE.jsonl": ROAD,
    **dict.fromkeys((f"{RUN} chat runs/words", f"{RUN} chat runs/mine"),
                    "commands::a_pipe_is_answered_a_line_a_line"),
    **dict.fromkeys((f"{RUN} export runs/words runs/reverser", f"{RUN} export runs/mine HF"),
                    "commands::the_newest_checkpoint_exported_is_what_the_run_wrote"),
    **dict.fromkeys(RELEASED, "smollm::the_commands_of_the_pages_run"),
    "python tests/bench/measure_objectives.py runs/objectives 5":
        "objectives::a_row_of_runs_that_are_there_is_printed",

    # Checks.
    **dict.fromkeys(("grep NUMERICS *.py full/*.py", "grep COMM *.py full/*.py"),
                    "house::every_tag_ends_in_a_test_that_exists"),
    **dict.fromkeys((f"{RUN} check", *(f"{RUN} check {subject}" for subject in SUBJECTS)),
                    "manual::a_check_finds_the_error_of_the_results"),
    "python tests/adapters.py table":
        "conformance::the_losses_of_other_code_bases_are_what_the_table_says",
    "python conformance/loss.py tests/adapters.py:ours objective=gspo aggregation=sequence_mean":
        "conformance::the_command_prints_a_row_for_each_property",
    "python tests/example_action_expert.py check": "action::the_check_passes_and_fails",
    "python tests/full/test_flags.py --seed 0 --count 1000":
        "flags::random_flags_finish_or_are_refused_by_all_ranks_alike",
    **dict.fromkeys(("python tests/mutate.py", "python tests/mutate.py models.py --seed 1"),
                    "mutate::a_slip_is_caught_or_listed"),

    # Measurements.
    "python tests/bench/measure_exact.py": "exact::the_table_has_a_row_for_each_way",
    "python tests/bench/measure_head.py DIR --device cuda --rollouts 64 --tokens 64":
        "head::the_measurement_prints_its_tables",
    "python tests/bench/measure_routes.py": "routes::the_measurement_prints_a_row_for_each_dtype",
    f"{BENCH}_ring.py --repeats 5": " --repeats 1 --tokens 64",
    f"{BENCH}_ring.py memory": " --tokens 64",
    f"{BENCH}_ring.py longest --budget-mb 100": " --budget-mb 5 --world 1",
    f"{BENCH}_ring.py stress --model": "action::fifty_steps_in_bf16",
    f"{BENCH}_tree.py --repeats 7": "tree::bench_runs_at_toy_size",
    f"{BENCH}_models.py --repeats 7": " --repeats 1",
    "python tests/bench/bench_trl.py --model DIR --prompts 4 --completion 14 --rounds 3":
        "conformance::a_checkpoint_is_measured_on_its_own_prompts",
    "python tests/bench/bench_trl.py --rounds 7":
        "conformance::trl_gives_our_loss_and_gradient_on_its_own_batch",
    "python tests/bench/honest_runs.py FOLDER 40": "audit::a_run_with_random_settings_is_audited",
    "python tests/bench/curve_trl.py run VARIANT SEED >> tests/bench/curve_trl.jsonl":
        "conformance::trl_makes_our_curve_of_our_rollouts",
    "python tests/bench/curve_trl.py draw tests/bench/curve_trl.jsonl assets/curve.png":
        "conformance::the_curves_beside_trls_are_drawn_and_their_table_is_on_the_page",

    # Several machines, and a GPU.
    **dict.fromkeys(SEVERAL, "plan::the_training_commands_of_the_recipes_have_plans_that_fit"),
    **dict.fromkeys(PLAN, "plan::the_rows_of_the_results_are_what_plan_prints"),
    **dict.fromkeys(("torchrun --max-restarts 3", "torchrun --max-restarts 3 .. --resume"),
                    "faults::a_killed_rank_is_started_again_and_the_run_goes_on"),
    **dict.fromkeys(("sh tests/gpu.sh",
                     "python tests/bench/measure_gpu.py check models --device cuda"), GPU),
    "sh tests/gpu.sh results": "gpu::results_shows_what_was_run_and_names_what_was_not",
    **dict.fromkeys(("sh tests/gpu.sh ring", "sh tests/gpu.sh step"), "gpu::each_command_runs"),
}  # fmt: skip
# Those with vLLM: the test starts one by the same flags, if it finds a vLLM.
VLLM = "vllm::a_run_samples_by_the_weights_that_it_has_pushed"
TABLE |= {command: VLLM for command in PAGES.commands if re.search(r"\bvllm(/bin/|$)", command)}
SLOW = (f"{BENCH}_models", f"{BENCH}_ring.py memory", f"{BENCH}_ring.py longest")
COMMANDS_RUN = [pytest.param(command, marks=[pytest.mark.slow] * command.startswith(SLOW))
                for command, how in TABLE.items() if how.startswith(" ")]  # fmt: skip


# Commands ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_every_command_is_in_the_table_and_who_runs_it_is_there():
    require_whole_table(PAGES.commands, TABLE)


# The line over the manual's piece of a run's output.
HEADER = re.findall(r"^ *step .*$", MANUAL.code("text")[0], re.M)


@pytest.mark.parametrize("command", COMMANDS_RUN)
def test_a_command_runs_at_toy_size(folder, command):  # noqa: F811
    """`python -m full ..` in a folder of its own; torchrun's two ranks are two such processes."""
    line = re.sub(r"\[.*\]", "", command + TABLE[command])
    words = shlex.split(line)
    words = [x.replace("tests/example_tasks", f"{ROOT}/tests/example_tasks") for x in words]
    if words[1].endswith(".py"):
        code, out, err = as_script(ROOT / words[1], *words[2:], cwd=folder)
        assert code == 0 and json.loads(out.splitlines()[-1]), err
        return
    flags = words[words.index("full") + 1 :]
    if not flags or flags[0].startswith("--"):
        codes, out, err = cli(folder, shlex.join(flags), 2 if words[0] == "torchrun" else 1)
        assert not any(codes), err
        out = "".join(out)  # one rank prints
        (run,) = (folder / "runs").iterdir()
        assert {"config.json", "metrics.jsonl", "samples.jsonl"} <= {x.name for x in run.iterdir()}
        assert (run / "hf" / "config.json").exists()
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 2 and "eval/solved" in out
        assert command != TRAIN or set(HEADER) <= set(out.splitlines())
    else:
        code, out, err = as_script("full", *flags, cwd=folder)
        assert code == 0 and out, err


@pytest.mark.parametrize("flags", shortened(["--steps 1", ""], "--steps 1"))
def test_the_task_of_the_manual_is_learned(tmp_path, flags):
    (tmp_path / "mine.py").write_text(MANUAL.code("python")[0])
    code, out, err = as_script("full", "--task", "mine.py:Majority", *flags.split(), cwd=tmp_path)
    assert code == 0, out + err
    assert flags or float(re.search(r"eval/solved (\S+) after", out)[1]) >= 0.95


# Any nn.Module -------------------------------------------------------------------------------


def _own_model():
    """A module without a name of ours, with one frozen parameter, and batches for it."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    layers[2].bias.requires_grad = False
    rows = torch.randn(5, 7, 4, dtype=torch.float64)  # 7 rows: two ranks have 4 and 3
    return torch.nn.Sequential(*layers).double(), list(zip(rows, rows[:, :, :2].flip(0) * 9))


def _weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train_own_model(rank, folder, world):  # noqa: F811
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

    text = RECIPES.code("python")[0]
    without = re.sub(r"\breduce_gradients\(model\)", "pass", text)
    for name, code, world in (("one", text, 1), ("two", text, 2), ("without", without, 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_model.py").write_text(code)
        for weights, found in ranks(tmp_path, world, _train_own_model, tmp_path / name, world):
            error = abs(weights - _weights(model).numpy()).max()
            assert error > 1e-4 if name == "without" else error < 1e-12
            assert name == "without" or abs(found - norms).max() < 1e-12


# Numbers -------------------------------------------------------------------------------------

ERRORS = {subject: float(error) for error, subject in re.findall(
    r"^\|.*\| (\S+e-\d+) \| `python -m full check (\w+)` \|$", RESULTS.text, re.M)}  # fmt: skip


@pytest.mark.quick
def test_the_results_have_an_error_of_every_check():
    assert {*ERRORS} == {*SUBJECTS}


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_check_finds_the_error_of_the_results(subject, tmp_path):
    code, out, err = as_script("full", "check", subject, cwd=tmp_path)
    assert code == 0, out + err
    last = json.loads(out.splitlines()[-1])
    assert last["ok"] and last["check"] == subject
    assert ERRORS[subject] / 3 <= last["max_error"] <= 3 * ERRORS[subject]


# Names and flags -----------------------------------------------------------------------------

ELSEWHERE = {"padding_idx", "log_softmax", "torchrun", "NCCL_SOCKET_IFNAME"}  # torch's, NCCL's
ELSEWHERE |= {"OUT/hf", "OUT/engine", "tokenizer.json", "questions.jsonl"}  # a run's files
FLAGS_ELSEWHERE = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"}
FLAGS_ELSEWHERE |= {"--max-restarts", "--no-deps", "--local-dir"}  # torchrun's, pip's, hf's
FLAGS_ELSEWHERE |= {"--port", "--host", "--enable-scale-out", "--logprobs-mode", "--max-model-len"}
FLAGS_ELSEWHERE |= {"--enforce-eager", "--block-size", "--hf-overrides"}  # vLLM's
FLAGS_ELSEWHERE |= {"--enable-deterministic-inference", "--enable-fp32-lm-head"}  # SGLang's
FLAGS_ELSEWHERE |= {"--rounds", "--completion", "--prompt", "--count"}  # bench_trl's, test_flags'


@pytest.mark.quick
def test_what_is_in_backticks_exists():
    require_names_exist(PAGES, ROOT / "full", ELSEWHERE)


@pytest.mark.quick
def test_every_flag_is_one():
    programs = [*ROOT.glob("full/*.py"), *ROOT.glob("tests/bench/*.py")]
    code = "".join(path.read_text() for path in programs)
    known = {f"--{name.replace('_', '-')}" for name in Config.__dataclass_fields__}
    fields = dataclasses.fields(Config)
    known |= {f"--no-{f.name.replace('_', '-')}" for f in fields if f.type is bool}
    known |= set(re.findall(r'"(--[\w-]+)"', code)) | FLAGS_ELSEWHERE
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGES.text)) <= known
    for span in PAGES.spans:
        if span.startswith("--") and " " in span:
            config = parse_config(span.split())
            # A text task needs its files too, which a page names with the flag in question only.
            if not any(getattr(config, name) for name in ("template", "reward")):
                config.check()


def rows_of(title):
    """Return the rows of the table in a section of the manual, each a list of cells."""
    section = MANUAL.text.split(f"## {title}\n")[1].split("\n## ")[0]
    _, _, *rows = re.findall(r"^\|(.*)\|$", section, re.M)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


@pytest.mark.quick
def test_the_table_of_purposes_has_every_flag_once_in_the_group_that_help_has(capsys):
    by_manual, group = {}, ""
    for title, _, flags in rows_of("Flags by purpose"):
        group = title or group
        by_manual.setdefault(group, []).extend(re.findall(r"`(--[\w-]+)`", flags))
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    shown = capsys.readouterr().out.split("\nPapers and")[0].split("\n\n")
    by_help = {text.split(":\n")[0]: re.findall(r"^  (--[\w-]+)", text, re.M) for text in shown}
    groups = {title: sorted(flags) for title, flags in by_manual.items()}
    assert groups == {title: sorted(flags) for title, flags in by_help.items() if flags}
    names = [field.name.replace("_", "-") for field in dataclasses.fields(Config)]
    listed = [flag for flags in by_manual.values() for flag in flags]
    assert sorted(listed) == sorted(f"--{name}" for name in ("config", *names))


@pytest.mark.quick
def test_the_map_of_what_looks_wrong_names_metrics_and_flags():
    rows = rows_of("When something looks wrong")
    assert 8 <= len(rows) <= 25
    for seen, look, change in rows:
        names = [name for name in re.findall(r"`([\w/.]+)`", look) if "/" in name]
        assert [name for name in names if not name.endswith(".py") and name not in METRICS] == []
        assert re.search(r"`--[\w-]+`", change), seen
    text = "\n".join(map(str, rows))
    for seen in ("entropy collapses", "all rewards are equal", "the gap grows", "out of memory",
                 "solved does not rise", "loss is NaN", "rollouts are truncated", "engine is slow",
                 "rollouts are stale"):  # fmt: skip
        assert seen in text


@pytest.mark.quick
def test_the_settings_of_the_manual_are_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MANUAL.code("toml")[0])
    config = parse_config(["--config", f"{path}", "--group", "4"]).check()
    assert (config.task, config.group, config.lr) == ("jsonl", 4, 2e-6)
    assert Config.from_file(path, steps=20) == dataclasses.replace(config, group=8, steps=20)


@pytest.mark.quick
def test_the_lines_of_prose_are_short():
    lines = [x for x in PAGES.text.split("\n") if not x.startswith(("|", "Not run on a GPU"))]
    assert [line for line in lines if len(line) > 128] == []


# Imports -------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_graph_of_imports_has_every_file():
    """And a file of the five imports none of the folder."""
    command = [sys.executable, ROOT / "tests" / "bench" / "imports.py"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    graph = imports.graph()
    assert re.findall(r"^ *\d+  (\S+)", out, re.M) == [*graph]
    assert {*re.findall(r"^ *\d+  ([^.\s]+)(?: |$)", out, re.M)} == {*FIVE}
    assert not [name for name in FIVE if {*graph[name]} - {*FIVE}]
