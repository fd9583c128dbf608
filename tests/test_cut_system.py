"""The five files alone, in an empty folder, are a system that learns."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest
from test_cores import copy_the_five
from test_ranks import as_script
from test_run import FROM_ROOT, json_lines, until

import parallel
import train_grpo

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("five")
    copy_the_five(folder)
    return folder


# A shell that starts tests in the background has them ignore Ctrl-C, and programs inherit that.
# The check, which other tests run, is left out.
PROGRAM = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
PROGRAM += "import train_grpo; train_grpo.check = lambda: 0.0; train_grpo.main(sys.argv[1:])"


def run(folder, ranks, *words):
    """Run its train_grpo.py. ranks: of torchrun; 0: as a plain process."""
    left_out = ("RANK", "WORLD_SIZE", "PYTHONPATH")
    environment = {key: x for key, x in os.environ.items() if key not in left_out}
    start = (*TORCHRUN, str(ranks)) if ranks else ()
    command = [sys.executable, *start, "train_grpo.py", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


# In a pipe there is no bar: the check, an evaluation, a game, what is solved.
PRINTED = r"two runs .*: largest error \S+e-\d\d\n"
PRINTED += r"after +5 steps: reward 0\.\d{3}, solved ([01]\.\d\d) \(0\.\d\d in training\)\n"
PRINTED += r"sample: \? .*\nsolved \1\n"


@pytest.mark.quick
def test_a_tree_runs_a_shared_prefix_once(process_group):
    """Six episodes 0 1 2 3 n are six rows of four inputs, or ten tokens of a tree."""
    counts = []
    for tree in (False, True):
        config = train_grpo.Config(tree=tree)
        model = train_grpo.build_policy(config, train_grpo.Guess(config))
        trainer = train_grpo.Trainer(config, model, parallel.Grid("d1"))
        embedding = model.model.embed_tokens
        embedding.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
        episodes = [train_grpo.Episode((), 0, n, (), [0], 4) for n in range(6)]
        for n, episode in enumerate(episodes):
            for token in (1, 2, 3, n):
                episode.append(token, 0.0)
        trainer.score(config, model, episodes, trainer.grid.group["c"])
    assert counts == [24, 10]


NUMBER = "expected a number of ranks as WORLD_SIZE, got "
D_T_C = "expected a product of d, t and c such as d2t2, got --plan "
REFUSED = [  # ranks, a command line, and the end of the line that refuses it
    (2, "--tree --plan c2", "expected --tree without c, which cuts rows, got --plan c2 on 2 ranks"),
    (2, "--plan d2t2", "expected torchrun --nproc-per-node 4, got --plan d2t2 on 2 ranks"),
    (8, "--plan d2t4", "expected t that divides the 2 key heads, got --plan d2t4 on 8 ranks"),
    (30, "--plan d15t2", "expected d <= 14, because each d rank needs a group of a minibatch, "
                         "got --plan d15t2 on 30 ranks"),
    (1, "--plan d", D_T_C + "d on 1 ranks"),
    (1, "--plan p1", f"expected no p or e, which python -m full has: {D_T_C}p1 on 1 ranks"),
    (4, "--plan d2e2", f"expected no p or e, which python -m full has: {D_T_C}d2e2 on 4 ranks"),
    (4, "--plan d2d2", D_T_C + "d2d2 on 4 ranks"), (1, "--plan d01", D_T_C + "d01 on 1 ranks"),
    (2, "--plan=d2 fsdp", D_T_C + "d2 fsdp on 2 ranks"),
    ("two", "", NUMBER + "'two'"), ("0", "", NUMBER + "'0'"), ("", "", NUMBER + "''"),
    ("2.0", "", NUMBER + "'2.0'"),
    (1, "--rows 0", "expected --rows >= 1, got 0"), (1, "--group 1", "--group >= 2, got 1"),
    (1, "--prompts 1", "expected --prompts >= 2, got 1"), (1, "--steps 0", "--steps >= 1, got 0"),
    (1, "--max-new-tokens 0", "expected --max-new-tokens >= 1, got 0"),
    (1, "--temperature 0", "expected --temperature >= 1e-06, got 0.0"),
    (1, "--lr nan", "expected --lr >= 1e-09, got nan"), (1, "--lr inf", "got inf"),
    (1, "--seed -1", "expected --seed >= 0, got -1"),
    (1, "--seed 9223372036854775808", "got 9223372036854775808"),
    (1, "--save new", "expected --save with --model"),
    (1, "--step 9", "unrecognized arguments: --step 9"),
    (1, "--metrics gone/run.jsonl", "No such file or directory: 'gone/run.jsonl'"),
    (1, "--dtype float16", "expected --dtype float32 or float64, got float16"),
    (1, "--device tpu", "got tpu"),
    (1, "--data questions.jsonl", "--model and --data together"),
    (1, "--model gone", "--model and --data together"),
    (1, "--model gone --data gone", "No such file or directory: 'gone/config.json'"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("world, words, text", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(monkeypatch, tmp_path, world, words, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as refused:
        train_grpo.main([words] if "=" in words else words.split())
    assert re.fullmatch(f"train_grpo.py: error: .*{re.escape(text)}", refused.value.code)


LAUNCHED = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
HALVES = [{name: LAUNCHED[name] for name in names.split()} for names in (
    "WORLD_SIZE", "RANK", "RANK WORLD_SIZE MASTER_ADDR")] + [{"RANK": "1", "WORLD_SIZE": "2"}]


@pytest.mark.quick
@pytest.mark.parametrize("told", HALVES)
def test_a_half_of_a_launcher_is_refused_at_once(monkeypatch, told):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # other ranks than the first replace it
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits"))
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as refused:
        train_grpo.main([])
    said = "train_grpo.py: error: expected all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, got"
    assert refused.value.code == f"{said} only {', '.join(told)}"


def not_json(word):
    raise ValueError(f"{word} is not JSON")


def test_a_refusal_does_not_wait_for_the_other_ranks(folder):
    """Only rank 0 is there, and it ends all the same."""
    rank_0 = dict(WORLD_SIZE="2", RANK="0")
    code, out, err = as_script("train_grpo.py", "--plan", "d3", cwd=folder, **rank_0)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("train_grpo.py: error: ")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--plan t3", "--stpes 9", "--metrics gone/run.jsonl"])
def test_torchrun_ends_with_the_line_of_rank_0(folder, words):
    """Its own report follows, and the other rank says nothing."""
    done = run(folder, 2, *words.split())
    assert done.returncode == 1 and not done.stdout
    said, report = re.split(r"(?m)^[WE]\d{4} ", done.stderr, maxsplit=1)
    assert re.fullmatch("train_grpo.py: error: .*\n", said) and "error: " not in report


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "BrokenPipeError"])
def test_ctrl_c_and_a_reader_that_leaves_end_it_by_one_line(folder, name):
    """Both come after the check; the reader leaves as `| head -1` does."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", PROGRAM, "--metrics", f"{name}.jsonl"]
    command += ["--steps", "1"] if name == "BrokenPipeError" else []  # soon the next line
    with subprocess.Popen(command, cwd=folder, **pipes) as program:
        assert "largest error" in program.stdout.readline()
        if name == "BrokenPipeError":
            program.stdout.close()
        else:
            until((folder / f"{name}.jsonl").read_text, "no step was made")
            program.send_signal(signal.SIGINT)
        assert program.wait(300) == 130
        assert program.stderr.read() == f"\ntrain_grpo.py: ended by {name}\n"


METRICS = {"reward/mean": 0.125, "reward/solved": 0.25, "reward/groups_equal": 0.5}


@pytest.mark.quick
@pytest.mark.parametrize("equal", [0.5, 1])
def test_an_evaluation_says_that_no_group_had_two_different_rewards(capsys, equal):
    file = io.StringIO()
    log = train_grpo.Log(train_grpo.Config(steps=9), file)
    updates = [{"loss": 0.5, "grad_norm": 3.0}, {"loss": 0.25, "grad_norm": 2.0}]
    metrics = METRICS | {"reward/groups_equal": equal}
    for solved in (None, 0.5):
        log.step(0, None, metrics, updates, solved)
    log.step(1, None, metrics, [{"loss": math.nan, "grad_norm": math.inf}], None)
    lines = file.getvalue().splitlines()
    _, line, not_finite = (json.loads(x, parse_constant=not_json) for x in lines)
    assert line == {"step": 0, "loss": 0.75, "grad_norm": 2.0, **metrics, "solved": 0.5}
    assert not_finite == {"step": 1, "loss": None, "grad_norm": None, **metrics, "solved": None}
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("after   1 steps")
    assert rest == ["nothing to learn: all rollouts of each group had equal rewards"] * (equal == 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, seed", [(2, seed) for seed in range(5)] + [(0, 0)])
def test_guess_is_learned(folder, ranks, seed):
    done = run(folder, ranks, "--seed", str(seed))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1].removeprefix("solved ")) >= 0.9


@pytest.mark.slow
def test_the_folder_makes_the_run_of_the_five(folder, tmp_path):
    """The same weights, tokens and updates, to the last digits of float64."""
    words = "--dtype float64", "--steps 5"
    done = run(folder, 0, *" ".join([*words, "--metrics five.jsonl"]).split())
    assert re.fullmatch(PRINTED, done.stdout) and not done.stderr, done.stderr
    command = [sys.executable, "-m", "full", *" ".join([*words, "--out run"]).split()]
    subprocess.run(command, cwd=tmp_path, env=FROM_ROOT, check=True, capture_output=True)
    both = json_lines(folder / "five.jsonl"), json_lines(tmp_path / "run" / "metrics.jsonl")
    for line, of_folder in zip(*both, strict=True):  # of the folder the mean of two minibatches
        assert line["loss"] == pytest.approx(2 * of_folder["loss/token_mean"], rel=0, abs=1e-12)
