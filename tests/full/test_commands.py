"""`eval` and `export`, and OUT/hf: what becomes of a run's weights.

Runs are processes of their own, as in test_run.py; the commands are called in this one. Of
checkpoints in the released form transformers is the oracle: what it loads, and what it answers.
"""

import itertools
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, installed, slow
from pages import Page
from test_ranks import as_script, start
from test_rollout import Chat, random_model
from test_run import _main, _task, call, cli, contents, end, good, json_lines

from full.evaluate import evaluated, pass_at_k, wilson
from full.learn.generate import generate
from full.learn.rollouts import Sampler
from full.model.hf import load_hf
from full.run.config import Config
from full.run.directory import RunDirectory
from full.run.tasks import make_task
from full.run.text import Text

SMALL = "--size 3 --turns 3 --device cpu --layers 1 --hidden 32 --heads 2 --prompts 12 --group 8 "
SMALL += "--lr 0.007 --lr-warmup 0 --lr-decay constant --eval-every 3 --eval-prompts 6 --out run "
SMALL += "--max-new-tokens 8 --generator-dtype bfloat16 --no-proximal --save-every 3 --keep 9 "
SMALL += "--steps"
ASK = "--task guess --size 3 --turns 3 --eval-prompts 6 --max-new-tokens 8".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 9 steps that solves 0, 1/3 and 2/3 of its prompts at its three checkpoints."""
    folder = tmp_path_factory.mktemp("commands")
    good(folder, f"{SMALL} 9")
    return folder / "run"


def figures_of(out):
    return json.loads(out.splitlines()[-1])


def test_transformers_is_imported_only_where_text_is(tmp_path):
    """Neither by --help nor by a run on token ids, its audit or its export."""
    # The server of ranks may have imported transformers for other tests.
    program = f"""
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
    del sys.modules[name]
sys.path.insert(0, "{ROOT}")
from full.__main__ import main
try: main(sys.argv[1:])
finally: print("transformers" in sys.modules)
"""
    (tmp_path / "program.py").write_text(program)
    small = f"{SMALL.replace('--prompts 12', '--prompts 2')} 1"
    for flags in ("--help", small, "audit run", "export run again"):
        code, out, err = as_script("program.py", *flags.split(), cwd=tmp_path)
        assert code == 0 and out.splitlines()[-1] == "False", err


LATIN = f"""
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="latin-1")
sys.path.insert(0, "{ROOT}")
from full import api
from full.__main__ import main
small = "--steps 1 --layers 1 --hidden 32 --heads 2 --prompts 2 --group 2 --eval-prompts 2"
assert main(f"{{small}} --task task.py:Mine --max-new-tokens 4 --device cpu --out run".split()) == 0
assert main("eval run --samples 1 --task task.py:Mine".split()) == 0
assert main("audit run --task task.py:Mine".split()) == 0
api.run(api.Config.from_file("run/config.json", task="task.py:Mine", out="again"))
sys.stdout.flush()
assert sys.stdout.errors == "strict"  # as the program had it
"""


def test_what_cannot_be_encoded_ends_nothing(tmp_path):
    """Prints replace it, and files are UTF-8."""
    _task(tmp_path)
    path = tmp_path / "task.py"
    path.write_text(path.read_text().replace("str(tokens)", "'日本 ' + str(tokens)"))
    (tmp_path / "program.py").write_text(LATIN)
    code, out, err = as_script("program.py", cwd=tmp_path)
    assert code == 0, err
    assert out.count("sample: ?? ") == 2 and "prompt: ?? " in out and '"solved"' in out
    samples = (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert all("日本" in str(json.loads(line)) for line in samples)
    assert all((tmp_path / name / "hf" / "config.json").exists() for name in ("run", "again"))


def test_the_greedy_figure_is_the_runs_own(run, capsys):
    lines = json_lines(run / "metrics.jsonl")
    solved = {line["step"] + 1: line["eval/solved"] for line in lines if "eval/solved" in line}
    assert len(set(solved.values())) == 3, solved
    for step, value in solved.items():
        _, out, _ = call(capsys, "eval", run, "--step", step, "--samples", 2)
        assert figures_of(out)["solved"][0] == value and f"step-{step:08d}" in out
    newest = call(capsys, "eval", run, "--samples", 2)
    assert newest == (0, out, "")
    _, of_directory, _ = call(capsys, "eval", run / "hf", "--samples", 2, *ASK)
    assert of_directory.splitlines()[1:] == out.splitlines()[1:]


def test_an_evaluation_is_a_function_of_its_seed(run, capsys):
    same = [call(capsys, "eval", run, "--step", 6, *more)
            for more in ([], ["--batch-rows", 8], ["--device", "cpu", "--seed", 0])]  # fmt: skip
    assert same[0] == same[1] == same[2] and same[0][0] == 0
    other = call(capsys, "eval", run, "--step", 6, "--seed", 1)
    colder = call(capsys, "eval", run, "--step", 6, "--temperature", 0.5)
    wider = call(capsys, "eval", run, "--step", 6, "--dtype", "float64")
    assert len({result[1] for result in (same[0], other, colder, wider)}) >= 3
    assert figures_of(other[1])["pass@1"] != figures_of(same[0][1])["pass@1"]
    assert re.search(r"6 held-out prompts, 3 different; 8 samples each .* seed 0\n", same[0][1])
    assert same[0][1].count("\nprompt: ?\nanswer: ") == 3


def test_pass_at_k_and_wilsons_interval_are_what_they_are_by_definition():
    """The mean over all choices of k samples; chances that are 1.96 deviations from the mean."""
    for count, solved in itertools.product(range(1, 7), range(7)):
        outcomes = [n < solved for n in range(count)]
        for k in range(1, count + 1):
            chosen = [any(some) for some in itertools.combinations(outcomes, k)]
            assert pass_at_k(min(solved, count), count, k) == pytest.approx(np.mean(chosen))
    assert pass_at_k(1, 4000, 2000) == pytest.approx(0.5)

    for mean, count in itertools.product((0.0, 0.1, 0.5, 1.0), (1, 7, 200)):
        low, high = wilson(mean, count)
        assert 0 <= low <= mean <= high <= 1
        assert (low == 0) == (mean == 0) and (high == 1) == (mean == 1)
        for p in (low, high):
            if 0 < p < 1:
                deviations = abs(mean - p) / math.sqrt(p * (1 - p) / count)
                assert deviations == pytest.approx(1.959964)


class Graded(Chat):
    """A task in which any token ends an answer; answers to prompt n get the rewards of row n."""

    end, threads = tuple(range(10)), False

    def __init__(self, rewards):
        self.rewards = [iter(row) for row in rewards]

    def prompt(self, rng, index, held_out):
        state = min(index, len(self.rewards) - 1)
        return state, [state]

    def reply(self, state, answer):
        return state, None, next(self.rewards[state])


def test_figures_are_of_the_groups_that_were_played(process_group):
    """Of 4 samples of three prompts 4, 1 and 0 are solved, and the third prompt comes twice."""
    greedy = [1], [0], [0, 0]
    sampled = [1, 1, 2, 1], [0, 0.9, 0, 1], [0, 0, 0.5, 0, 0, 0, 0, 0.5]
    task = Graded(first + others for first, others in zip(greedy, sampled))
    sampler = Sampler(random_model(10))
    figures, different, shown = evaluated(Config(eval_prompts=4), task, sampler, 4)
    values = {name: value for name, (value, *_) in figures.items()}
    assert values == {"solved": 0.25, "pass@1": 5 / 16, "pass@2": 1.5 / 4, "pass@4": 0.5}
    assert different == 3 and figures["pass@1"] == (5 / 16, *wilson(5 / 16, 3))
    assert [(prompt, reward) for prompt, _, reward in shown] == [("0", 1), ("1", 0), ("2", 0)]


def _under_torchrun(*args):
    """A rank whose store is not rank 0's, but of the process that has started the ranks."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    _main(*args)


def test_an_error_of_all_ranks_is_named_once(tmp_path):
    """By the first rank that has it, after the ranks have met."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log, flags = tmp_path / "log", "--plan t2 --heads 1 --steps 1"
    processes = start(2, _under_torchrun, 2, store.port, tmp_path, log, flags, None)
    codes, out, err = end(processes, log, seconds=60)
    assert codes == [2, 2] and out == ["", ""]
    named = [re.findall(r"^rank \d: error: .*", text, re.M) for text in err]
    assert not named[1] and "expected query heads divisible by t = 2" in named[0][0], err


def test_the_printed_flags_go_on_with_a_run_of_files(tmp_path):
    """A file is never imported because a run's directory names it, so the flags name it again."""
    out, _ = good(tmp_path, _task(tmp_path))
    (flags,) = re.findall(r"Ctrl-C saves, (.*) goes on$", out, re.M)
    assert flags == "--resume --out run --task task.py:Mine"
    good(tmp_path, flags)

    path = tmp_path / "run" / "config.json"
    stored = json.loads(path.read_text()) | {"task": "jsonl", "reward": "my rewards.py:score"}
    path.write_text(json.dumps(stored))
    flags = RunDirectory(tmp_path / "run").flags_to_resume
    assert flags.endswith("/run --reward 'my rewards.py:score'")


def test_help_is_printed_by_rank_0_alone(tmp_path):
    codes, (first, second), _ = cli(tmp_path, "--help", world=2)
    assert codes == [0, 0] and "--max-new-tokens" in first and second == ""


def test_the_newest_checkpoint_exported_is_what_the_run_wrote(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name in ("new/below", "empty"):
        code, out, _ = call(capsys, "export", run, tmp_path / name)
        assert code == 0 and "step-00000009" in out
        assert contents(tmp_path / name) == contents(run / "hf")
    code, _, _ = call(capsys, "export", run, tmp_path / "older", "--step", 3)
    names = {name for name, raw in contents(tmp_path / "older").items()
             if raw != contents(run / "hf")[name]}  # fmt: skip
    assert code == 0 and names == {"model.safetensors"}


REWARD = """
def reward(text, row):
    return float((len(text) + int(row["answer"])) % 2)
"""
ROAD = "--task jsonl --data rows.jsonl --reward odd.py:reward --prompts 2 --group 2 --lr 1e-3 "
ROAD += "--lr-warmup 0 --lr-decay constant --eval-prompts 8 --max-new-tokens 6 --device cpu"


# The default suite has a small one; behind `-m slow` are 5 to 20 million parameters a family.
FAMILIES = "qwen2", "qwen3", "qwen3_moe", "gemma3"
ROADS = [("gemma3", dict(layers=2, width=64)), *slow(*((family, {}) for family in FAMILIES))]


@pytest.mark.parametrize("family, size", ROADS)
def test_a_released_checkpoint_from_the_first_step_to_an_evaluation(
    family, size, tmp_path, monkeypatch, capsys
):
    """Train, load, evaluate: each as transformers has it."""
    _, transformers = installed("tokenizers", "transformers")
    import released

    monkeypatch.chdir(tmp_path)
    released.make(family, "released", **size)

    # Random weights hardly ever draw an end, and greedily they repeat themselves. Here the token
    # that they say first ends an answer, and so do two tokens of three.
    turn = [{"role": "user", "content": "What is 3 and 3?"}]
    text = Text("released")
    greedy = dict(max_new_tokens=1, temperature=0.0)
    (row,) = generate(load_hf("released"), [text.prompt(turn)], **greedy)
    ends = [n for n in range(text.vocab_size) if (n - row.tokens[-1]) % 3 != 1]
    path = Path("released/generation_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    Path("odd.py").write_text(REWARD)
    rows = [json.dumps({"question": f"What is {n}?", "answer": f"{n // 2}"}) for n in range(200)]
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    good(tmp_path, f"{ROAD} --model released --out run --steps 3")

    # Whatever is said has the tokens of their template; below, their answers show their numbers.
    theirs = transformers.AutoModelForCausalLM.from_pretrained("run/hf", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained("run/hf")
    text = Text("run/hf")
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    assert prompt == text.prompt(turn)

    def answer(tokens):
        """Their greedy answer to a row."""
        row = theirs.generate(
            torch.tensor([tokens]), max_new_tokens=6, do_sample=False, repetition_penalty=1.0,
            eos_token_id=list(text.end), pad_token_id=0)  # fmt: skip
        return row[0, len(tokens) :].tolist()

    # The evaluation's greedy figure, and the answers of its samples' prompts.
    code, out, err = call(capsys, "eval", "run", "--reward", "odd.py:reward", "--samples", 1)
    assert code == 0, err
    task = make_task(Config(**json.loads(Path("run/config.json").read_text())))
    rewards = []
    for n in range(8):
        state, tokens = task.prompt(None, n, True)
        said_by_theirs = answer(tokens)
        ended = said_by_theirs[-1] in text.end
        rewards.append(task.reply(state, said_by_theirs)[2] if ended else 0.0)
    assert figures_of(out)["solved"][0] == np.mean(rewards)
    assert len(set(rewards)) == 2 or family == "qwen3"  # whose weights repeat a token, with no end

    # The manual's conversation: two questions, of which the second follows the first's answer.
    (code,) = [x for x in Page("full/README.md").code("python") if "pipeline" in x]
    said = iter(["What is 3 and 3?", "And 4?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    capsys.readouterr()
    spoken = {}
    greedily = "6, do_sample=False, repetition_penalty=1.0"
    exec(code.replace("runs/reverser", "run/hf").replace("256", greedily), spoken)
    one, two = (x["content"] for x in spoken["messages"] if x["role"] == "assistant")
    assert capsys.readouterr().out == f"{one}\n{two}\n"
    assert one == tokenizer.decode(answer(prompt), skip_special_tokens=True)
    assert [x["role"] for x in spoken["messages"]] == ["user", "assistant"] * 2

    # A file of its own is asked line by line, however short it is.
    Path("few.jsonl").write_text("\n".join(rows[:3]) + "\n")
    ask = "--task jsonl --data few.jsonl --all-lines --reward odd.py:reward --max-new-tokens 6"
    code, out, err = call(capsys, "eval", "run/hf", *ask.split(), "--samples", 3)
    assert code == 0 and "jsonl, 3 prompts, 3 different; 3 samples each" in out, err
    assert list(figures_of(out)) == ["solved", "pass@1", "pass@2", "pass@3"]
