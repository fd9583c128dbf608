"""Refusals: one table: a command, and the line that it says instead of beginning.

Commands are called in this process, in a folder that holds a finished run. A refusal exits with
2, says one line, and leaves the folder as it is. So does a call that is refused before it runs.
"""

import dataclasses
import functools
import io
import json
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from example_tasks import Sort
from test_run import SAVING, TINY, TOML, _task, call, contents

from conformance.parallel import subject_of  # noqa: F401, of a row
import check_attention
from full.__main__ import main
from full.api import Config, run  # noqa: F401, of a row
from full.attention import attend, masks, ring
from full.learn import generate as generation
from full.learn.objectives import grpo_loss  # noqa: F401, of a row
from full.model import experts, logprobs, lora, parallelize
from full.model.config import Lora  # noqa: F401, of a row
from full.model.hf import save_factors  # noqa: F401, of a row
from full.model.lora import add_factors  # noqa: F401, of a row
from full.ranks.joining import connect  # noqa: F401, of a row
from full.run.flags import parse_config
from full.tiny import tiny_model
from full.tree import chunks, trie

BEGIN = f"{TINY} --out new --steps 2"
TORCHRUN = "is one process: start it without torchrun"
RUNS = {  # more flags of a run, and what the one line must say
    "--steps 0": "--steps must be positive", "--lr nan": "--lr must be finite",
    "--lr 0": "--lr must be", "--seed 99999999999999999999": "--seed",
    "--kl k1": "--kl needs --kl-coef", "--group 1": "--group 1",
    "--group 4 --forks 3 --fork-turns 1": "--group 4", "--forks 2": "--fork-turns",
    "--fork-turns 2": "--forks", "--clip-low 1": "--clip-low",
    "--dual-clip 1.1": "--dual-clip", "--objective cispo --dual-clip 3": "--dual-clip",
    "--dynamic-sampling 1.5": "--dynamic-sampling: invalid int",
    "--objective sapo --clip-low 0.1": "--clip-low needs --objective clip or gspo or gmpo or dppo",
    "--teacher DIR --advantage gae": "--teacher needs --advantage teacher",
    "--advantage teacher": "--advantage teacher needs --teacher",
    "--critic-lr 3": "--critic-lr needs --advantage gae",
    "--dynamic-sampling": "--entropy-coef 0", "--importance-cap 2": "--proximal",
    "--dynamic-sampling --entropy-coef 0 --kl-coef 1": "--kl-coef 0",
    "--hidden 6": "--hidden 6",
    "--heads 3 --hidden 12": "--heads must",
    "--plan sglang:d1": "expected a plan such as d2t2 or (attn:d2t2|ffn:e2t2), got 'sglang:d1'",
    "--plan e2": "expected e to divide d * c * t = 1, got 2. Experts add no ranks: d2e2 has 2\n",
    "--plan d1 --pp-schedule zbv": "--pp-schedule needs a --plan with p",
    "--shard-ranks 2": "--shard-ranks needs --data-parallel fsdp",
    "--data-parallel fsdp --shard-ranks 2": "2 ranks that shard must divide d = 1",
    "--tree dta": "--tree dta needs --chunk-tokens",
    "--tree sparse --chunk-tokens 9": "--chunk-tokens needs --tree dta",
    "--tree dta --chunk-tokens 9 --plan p2": "--tree dta does not support p; use --tree sparse",
    "--tree dta --chunk-tokens 9 --data-parallel fsdp": "--tree dta does not support fsdp",
    "--tree dta --chunk-tokens 9 --plan c2": "--tree dta does not support c",
    "--tree dta --chunk-tokens 9 --plan d2e2": "--tree dta does not support e; use --tree sparse",
    "--tree dta --chunk-tokens 9 --ac op": "--tree dta does not support --ac; use --tree sparse",
    "--tree dta --chunk-tokens 9 --compile": "--tree dta does not support --compile",
    "--ac most": "ac: expected none, full, op or memory_budget=X with X from 0 to 1, got 'most'",
    "--ac memory_budget=0.5": "it needs compile=True",
    "--compile --ac memory_budget=1.5": "got 'memory_budget=1.5'",
    "--compile --ac memory_budget": "got 'memory_budget'",
    "--compile --ac memory_budget=-1": "got 'memory_budget=-1'",
    "--advantage gae --dynamic-sampling --entropy-coef 0": "from which --advantage gae",
    "--staleness 1 --importance-cap 2 --minibatches 1": "--importance-cap needs --proximal",
    "--proximal --importance-cap 1 --importance mask": "mask needs a 1 between its bounds",
    "--staleness 65": "at most 64", "--staleness -1": "at least 0",
    "--stpes 3": "expected a flag that --help lists, got --stpes; did you mean --steps?",
    "--log_rolouts=all": "got --log_rolouts=all; did you mean --log-rollouts?",
    "--xyz": "expected a flag that --help lists, got --xyz\n",
    "--task jsonl": "needs --data FILE.jsonl and --model DIR",
    "--minibatches 3 --prompts 2":
    "--minibatches 3 is over --prompts 2, so one would be empty: lower --minibatches",
    "adit": "expected a command that --help lists, got adit\n",
    "--task nonsense": "expected --task guess, jsonl or FILE.py:Class, got 'nonsense'",
    "--task gone.py:Task": "--task gone.py:Task: gone.py: no such file", "--task ../gone": "gone",
    **{f"--task task.py:{name}": f"task.py has no class '{name}'" for name in ("Nothing", "")},
    "--head-dtype float32": "--head-dtype needs products in bfloat16",
    "--head-dtype float32 --compute-dtype bfloat16 --exact":
        "--exact does not support --head-dtype",
    "--lora-rank 2 --exact": "--exact does not support --lora-rank",
    "--lora-targets q_proj": "--lora-targets needs --lora-rank",
    "--dtype bfloat16 --compute-dtype float32": "expected a coarser dtype",
    "--clip-high 1e300": "--clip-high must be finite",
    **{f"{flag} x": f"{flag} needs --task jsonl"
       for flag in ("--data", "--date", "--reward", "--eval-data")},
    **{f"--reply-timeout 3{more}": "--reply-timeout needs --reward FILE.py:function or --task FILE"
       for more in ("", " --task jsonl --data FILE --model DIR")},
    # Only when ranks meet, or a task or a model is made.
    "--plan t2": "plan t2: expected p * d * c * t = 2 ranks, got 1",
    "--device cuda": "got 'cuda'", "--model gone": "gone",
    "--task jsonl --data gone --model gone": "gone", "--max-new-tokens 40000": "40000",
    "--router-bias-rate 0.1": "--router-bias-rate is about experts",
    "--task task.py:Mine --reply-timeout 3": "--reply-timeout: Mine has threads = False",
}  # fmt: skip
COMMANDS = {  # a command, and what its line must say
    f"{TINY} --out run --steps 2":
        "error: run holds a run: --resume to go on with it, or choose another --out\n",
    **{f"{TINY} --out {name} --steps 2{resume}": f"error: {name}"
       for name in ("thesis", "model") for resume in ("", " --resume")},
    "--confg settings.toml": "did you mean --config?",
    "--config setings.toml": "error: [Errno 2] No such file or directory: 'setings.toml'\n",
    "--config other": "error: no other; expected",
    "--config settings.toml --resume --out run":
        "--resume cannot change --group 8 (the run has 4)",
    "--resume": "--resume needs --out DIR",
    "--resume --out run --staleness 1": "--resume cannot change --staleness 1 (the run has 0)",
    "--resume --out run --compute-dtype bfloat16": "--resume cannot change --compute-dtype",
    "--resume --out run --group 8 --kl-coef 1": "--group 8 (the run has 4), --kl-coef 1.0",
    "eval run --samples 0": "--samples must be positive, got 0",
    "eval run --step 1": "no such checkpoint; those that it holds are of: 3, 4",
    "eval run --temperature 0": "--temperature must be positive",
    "eval run --size 4": "is of another model",
    "eval run --max-new-tokens 40000": "exceed the 32768 positions",
    "eval run --all-lines": "--all-lines is for --task jsonl, not guess",
    "eval run/hf": "say what to ask it: --task NAME",
    "eval run/hf --task guess --step 3": "--step is of a run",
    "eval run/hf --task guess": "the task has 11 tokens, ",
    "eval run/step-00000002": "run/step-00000002 is not a run, so say what to ask it: --task",
    "eval run --task echo.py:Echo": "echo.py: no such file",
    **{command: "no nowhere; expected the config" for command in ("eval lost", "export lost new")},
    "export run new --task echo.py:Echo": "needs none",
    "export run run": "is not empty", "export run run/lock": "is not empty",
    "export run/hf new": "expected the directory of a run, got run/hf\n",
    "export run new --step 1": "those that it holds are of: 3, 4",
    "export nothing new": "expected the directory of a run, got nothing\n",
    "export run old": "old.tmp is there",
    "audit run --step 9": "expected one of the 4 steps of metrics.jsonl",
    "audit nothing": "the directory of a run, got nothing: it holds no config.json",
    "plot nothing": "nothing holds no metrics.jsonl", "plot run thesis": "thesis holds no metrics",
    **{f"eval run {flag} 3": f"unrecognized arguments: {flag}"  # they would do nothing
       for flag in ("--lr", "--steps", "--model", "--advantage", "--out")},
    **{f"{words} 3": f"unrecognized arguments: {words.split()[-1]}"  # no abbreviations
       for words in ("eval run --dtyp", "export run new --ste", "audit run --ste")},
}  # fmt: skip
TABLE = {f"{BEGIN} {flags}": text for flags, text in RUNS.items()} | COMMANDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run of 4 steps; one whose model is gone; other people's files."""
    folder = tmp_path_factory.mktemp("refusals")
    assert main(f"{SAVING} 4 --out {folder}/run".split()) == 0
    lost = shutil.copytree(folder / "run", folder / "lost")
    config = json.loads((lost / "config.json").read_text())
    (lost / "config.json").write_text(json.dumps(config | {"model": "nowhere"}))
    for name in ("thesis/thesis.tex", "model/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text('{"model_type": "qwen3"}')  # as Hugging Face has it
    (folder / "settings.toml").write_text("group = 8")
    (folder / "old.tmp").mkdir()
    _task(folder)
    text = (folder / "task.py").read_text()
    text = text.replace("class Mine:", "from full.run.tasks import Task\nclass Mine(Task):")
    (folder / "task.py").write_text(text.replace("vocab_size,", "threads = False\n    vocab_size,"))
    return folder


def refusal(capsys, command):
    """The one line, or the last after argparse's usage, of a command that exits with 2."""
    code, out, err = call(capsys, command)
    assert (code, out) == (2, ""), err
    assert "error: " in err.splitlines()[-1] and "Traceback" not in err
    assert err.count("\n") == 1 or err.startswith("usage: ")
    return err


@pytest.mark.quick
@pytest.mark.parametrize("command", TABLE)
def test_a_mistake_is_one_line_and_nothing_is_written(folder, monkeypatch, capsys, command):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("?\n"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, names = contents(folder), {*folder.iterdir()}
    assert TABLE[command] in refusal(capsys, command)
    assert contents(folder) == before and {*folder.iterdir()} == names


ENVIRONMENTS = [  # what the environment says, a command, and its line
    (dict(RANK="0", WORLD_SIZE="1"), BEGIN, "expected a free port at 127.0.0.1:"),
    (dict(RANK="0", WORLD_SIZE=""), BEGIN, "variable WORLD_SIZE expected, but not set"),
    (dict(WORLD_SIZE="2"), BEGIN, "variable RANK expected, but not set"),
    (dict(LOCAL_RANK="0"), BEGIN, "variable RANK expected, but not set"),
    (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR=""), BEGIN, "variable MASTER_ADDR expected, but"),
    (dict(RANK="0", WORLD_SIZE="0"), BEGIN, "world size cannot be 0"),
    (dict(RANK="1", WORLD_SIZE="2"), "eval run", TORCHRUN),
    (dict(RANK="1", WORLD_SIZE="2"), "export run new", TORCHRUN),
    (dict(RANK="1", WORLD_SIZE="2"), "audit run", TORCHRUN),
    (dict(RANK=""), "export nothing new", "error: expected the directory"),  # as one not set
    (dict(WORLD_SIZE=""), "export nothing new", "error: expected the directory of a run"),
    *[(dict(OMP_NUM_THREADS=text), f"{BEGIN} --group 1", "--group 1") for text in ("", "1,2")],
    *[(dict(OMP_NUM_THREADS=text), BEGIN, f"expected a positive OMP_NUM_THREADS, got '{text}'")
      for text in ("all", "0", "-1", "1.5")],
]  # fmt: skip


@pytest.mark.parametrize("environment, command, says", ENVIRONMENTS)
def test_an_environment_that_is_wrong_is_one_line(
    folder, monkeypatch, capsys, environment, command, says
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("os._exit", sys.exit)  # how a rank leaves
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{held.getsockname()[1]}")
        for name, value in (where | environment).items():
            monkeypatch.setenv(name, value)
        assert re.search(says, refusal(capsys, command))


SETTINGS = {  # a file of settings, its text, and what is said of it
    ("a.toml", "stpes = 3"): "expected a field of Config, got stpes; did you mean steps?",
    ("a.toml", "lr-decay = 'constant'"): "got lr-decay; did you mean lr_decay?",
    ("a.toml", "steps = '3'\nlr = true"):
        "--config a.toml: --steps must be int, got '3'; --lr must be float, got True",
    ("a.toml", "steps = 3.0"): "--steps must be int, got 3.0",
    ("a.toml", f"lr = 1{400 * '0'}"): "--lr must be finite, at least 0 and at most 1.70",
    ("a.toml", "clip_low = -1"): "--clip-low must be finite, at least 0 and at most 1.70",
    ("a.toml", "exact = 1"): "--exact must be bool, got 1",
    ("a.toml", "kl = 'k4'"): "--kl must be one of k1, k3, got 'k4'",
    ("a.toml", "pp_schedule = 'zbv'"): "--pp-schedule needs a --plan with p",
    ("a.toml", "steps ="): "a.toml is not TOML: Invalid value",
    ("a.toml", "task = 'gone.py:Task'"):
        "the task of a.toml is a file's; give it again, as --task FILE.py:Task (a.toml has 'gone.p",
    ("a.json", '{"reward": "gone.py:f"}'): "the reward of a.json is a file's; give it again",
    ("a.json", '{"lr": null}'): "--lr must be float, got None",
    ("a.json", "[1]"): "a.json is JSON of another kind: expected an object, got a list",
    ("a.json", TOML): "a.json is not JSON", ("a.tml", TOML): "a.tml is not JSON",
}  # fmt: skip


def stored(flags, **changes):
    """What config.json holds of a run of these flags."""
    config = parse_config(["--lr-decay", "constant", *flags.split()])
    return json.dumps(dataclasses.asdict(config) | changes)


FIXED = "--resume cannot change --steps [48] .*the rates depend on the last step"
STORED = [  # what config.json holds, the steps of a resume, and how it is refused, if it is
    (stored("--steps 9 --lr-decay linear"), 8, FIXED),
    (stored("--steps 2"), 4, FIXED),  # a warm-up of 2 would become one of 4
    (stored("--steps 9"), 4, FIXED),  # a warm-up of 5 would become one of 4
    (stored("--steps 9"), 5, None),
    (stored("--steps 2"), 2, None),
    (stored("--steps 2 --lr-warmup 0"), 1, None),
    (stored("", steps="9"), 8, "config.json: --steps must be"),
    (stored("", lr_decay="never"), 8, "config.json: --lr-decay must be"),
    (stored("", lr_warmup=None), 8, "config.json: --lr-warmup must be"),
    (stored("", length=4), 8, "is not of this version of Config"),
    (stored("").replace('"staleness": 0, ', ""), 8, "is not of this version of Config"),
    ("[]", 8, "config.json is"), ('{"task": "x"}', 8, "config.json is"),
]  # fmt: skip
FILES = [("here/config.json", text, f"--out here --resume --steps {steps}", says)
         for text, steps, says in STORED]  # fmt: skip
FILES += [(name, text, f"--config {name}", f"^error: .*{re.escape(says)}")
          for (name, text), says in SETTINGS.items()]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name, text, command, says", FILES)
def test_wrong_settings_of_a_file_are_one_clear_line(
    tmp_path, monkeypatch, capsys, name, text, command, says
):
    """Steps of a resume are free while the rates do not depend on them."""
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    if says is None:
        assert parse_config(command.split()).check().steps == int(command.split()[-1])
    else:
        assert re.search(says, refusal(capsys, command))
    assert [*contents(tmp_path)] == [name]


@pytest.mark.quick
def test_one_answer_is_a_group_where_nothing_is_compared():
    assert Config(group=1, advantage="none").check().group == 1


# Calls -------------------------------------------------------------------------------------------
# What is refused before anything runs, on one process. A call of several ranks is refused alike on
# all of them, and is tested with its file.

TWO = [[1, 2, 3], [1, 4, 5]]


def qkv(**changes):
    """q, k and v, (2, 4, 5, 8) and (2, 2, 5, 8), of other shapes."""
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8)} | changes
    return [torch.zeros(shapes[name]) for name in "qkv"]


def over_a_tree(*given, window=None, **options):
    """Attention of five tokens in groups, which says what boxes say."""
    mask = trie.TokenTrie([[1, 2, 3], [1, 2, 4], [5]]).row_mask(5)
    return attend.attend_short(*given, mask.with_window(window), **options)[0]


def train(model, trie, **options):
    chunks.tree_backward(model, trie, lambda i, logprobs, entropy: logprobs.sum(), **options)


@functools.cache
def small(**shape):
    """A dense model of 53 tokens and a width of 24."""
    return tiny_model("qwen3", dtype=torch.float32, **shape)


def logits_of_a_share():
    model = tiny_model("qwen3")
    model.shard = dict(group=None, vocab_start=0)
    model(torch.tensor([[0, 1]]))


def decoded(*prompts, **options):
    how = dict(max_new_tokens=2, temperature=0.0) | options
    return generation.generate(small(), prompts, **how)


class Ending(Sort):
    """A task whose answers end by these tokens."""

    def __init__(self, end):
        super().__init__(given())
        self.end = end


def given(words="", **more):
    """The Config of a tiny run, with the fields that were typed."""
    return Config(**parse_config(f"{TINY} --out run --size 6 {words}".split()).given() | more)


def assigned(**fields):
    """A Config to which fields were assigned."""
    config = Config()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


OUTSIDE = "is not in the vocabulary of 53: ids are 0..52"
JSONL = "given('--task jsonl --model DIR --data rows.jsonl')"
CALLS = {  # a call, and what its ValueError says
    # Settings, when they are made.
    "Config(objetive='clip')":
        "^expected a field of Config, got objetive; did you mean objective.$",
    "Config(zzz=1, lrr=2.0)": "^expected a field of Config, got zzz; .* got lrr; did you mean lr.$",
    "assigned(stpes=3).check()": "^expected a field of Config, got stpes; did you mean steps.$",
    "Config(advantage='median', aggregation=3)":
        "^--advantage must be .*, got 'median'; --aggregation must be one of .*, got 3$",
    "assigned(dtype='float8').check()": "^--dtype must be one of .*, got 'float8'$",
    # Runs from Python, of which nothing is left.
    "run(Config(out=5, resume=True))": "--out must be str, got 5",
    "run(Config(steps=0))": "--steps must be positive",
    **{f"run(given(), task=Ending({end}))": f"Ending needs vocab_size and end, .*{re.escape(end)}"
       for end in ("()", "(99,)")},
    "run(given(task='x.py:X'), task=Sort(given()))": "expected one task",
    "run(Config(task='python:Sort'))": "got 'python:Sort'",
    "run(given(task='x.py:X'), reward=max)": "expected one task",
    "run(given(), task=Sort(given()), reward=max)": "gives its own",
    "run(given(), dataset='rows.jsonl')": "expected dataset row 1 to be a dict, got 'r'",
    "run(given(), dataset=[{}, {'a': {1}}])": "dataset row 2: TypeError: Object of type set",
    f"run({JSONL}, dataset=[{{}}])": r"expected one data, got Config\(data='rows",
    "Sort(Config(size=3))": "--size 3: expected at least 4 symbols to sort",
    # Devices, and the kit of parallelisms.
    **{f"connect('{name}')": f"expected .*got '{name}'" for name in ("cdua", "cuda:0", "CPU")},
    "subject_of(dict(build=id, loss=id))": "got no shard",
    "subject_of(dict(build=id, loss=id, shard=id, SETTINGS=dict(ranks='max')))":
        r"same \| mean \| sum, got 'max'",
    "subject_of(dict(build=id, loss=id, shard=id, SETTINGS=dict(rank='mean')))":
        "expected a setting of ranks, mesh, tolerance, got 'rank'",
    # Trees.
    "TokenTrie([[1, 2], []])": "sequence 1: expected 1-D integers, 1 token or more",
    "TokenTrie([[1.5, 2.0]])": "sequence 0: expected 1-D integers",
    "train(TinyModel().requires_grad_(False), TokenTrie(TWO))":
        "no parameter of the model requires a gradient",
    "torch.inference_mode()(train)(TinyModel(), TokenTrie(TWO))": "use tree_scores",
    "tree_backward(TinyModel(), TokenTrie(TWO), lambda i, x, _: x if i else x.sum(), max_tokens=2)":
        r"expected one number from loss_fn.*sequences \[1\]",
    "train(TinyModel(), TokenTrie(TWO), masks=[[True, True]])": "got 1 masks for 2 sequences",
    "train(TinyModel(), TokenTrie(TWO), masks=[[True, True], [True]])":
        r"mask 1: expected shape \(2,\), got \(1,\)",
    **{f"partition_tree(TokenTrie(TWO), {n})": f"expected max_tokens of 1 or more.*got {n}"
       for n in (0, -1, 2.5)},
    "redistribute([[1], [2]], ['a'])": "2 sequences, but data for 1; one for each",
    "redistribute([[]], ['a'])": "sequence 0: expected 1-D integers",
    # Attention. In groups of a tree it says what it says in boxes.
    "attend(*qkv(q=(2, 4, 8)))": r"expected q \(B, H, q, D\).*\(2, 4, 8\)",
    "attend(*qkv(v=(2, 2, 6, 8)))": "k and v of one shape",
    "attend(*qkv(q=(1, 4, 5, 8)))": "batch and head size",
    "attend(*qkv(q=(2, 4, 5, 16)))": "batch and head size",
    "attend(*qkv(q=(2, 3, 5, 8)))": "multiple of key heads",
    "attend(*qkv(q=(2, 0, 5, 8)))": "multiple of key heads",
    "attend(*qkv(q=(2, 4, 5, 513), k=(2, 2, 5, 513), v=(2, 2, 5, 513)))": "1 to 512",
    "attend(*qkv()[:2], qkv()[2].double())": "one dtype",
    "attend(*(x.long() for x in qkv()))": "one dtype",
    "attend(*qkv(), Mask.causal(6))": r"a mask of \(5, 5\) queries and keys, got \(6, 6\)",
    "attend(*qkv(), Mask.causal(5, batch=3))": "batch of 3",
    "attend(*qkv(), torch.ones(5, 5) > 0)": "expected a Mask or None as mask, got Tensor",
    "attend(*qkv(), scale=-1.0)": "expected a positive number or None as scale",
    "over_a_tree(*qkv()[:2], qkv()[2].double())": "in one dtype",
    "over_a_tree(*torch.zeros(3, 1, 4, 6, 8))":
        "expected a mask of .6, 6. queries and keys, got .5, 5.",
    "over_a_tree(*qkv(), scale=-1)": "positive number or None as scale, got -1",
    "ring_attention(*qkv(), group=object())": "not been initialized",
    "ring_attention(*qkv(), method='rings')": "ring, allgather or ulysses as method, got 'rings'",
    "indices(4, 2, 2)": "^expected 0 <= rank < world",
    # Models.
    "small()(torch.arange(4))": r"tokens: expected \(B, S\)",
    "small()(torch.ones(4, 24))": r"states \(B, S, M\), got \(4, 24\)",
    "small().logprobs(torch.ones(2, 24), torch.ones(3).long())": r"and \(N,\), got",
    "small().logprobs(torch.ones(2, 24), torch.ones(2).long(), temperature=0)": "temperature",
    "small()(torch.tensor([[0, 1], [2, 53]]))": f"^token id 53 at row 1, column 1 {OUTSIDE}",
    "small().embed(torch.tensor([[-1, 1]]))": f"^token id -1 at row 0, column 0 {OUTSIDE}",
    "small().logprobs(torch.ones(2, 24), torch.tensor([3, 2**40]))":
        f"^target id 1099511627776 at place 1 {OUTSIDE}",
    "token_logprobs(torch.ones(1, 24), small().head_weight, torch.tensor([-1]))":
        f"^target id -1 at place 0 {OUTSIDE}",
    "logits_of_a_share()": "logits of a split vocabulary",
    "decoded([53])": "ids are 0..52", "decoded([])": "at least one token",
    "decoded([1], max_new_tokens=0)": "max_new_tokens", "decoded([1], slots=0)": "slots",
    "decoded(models.Row([1], [0.5]), temperature=1.0)": "needs 2 draws",
    "decoded([1], max_new_tokens=10**6)": "32768 positions",
    **{f"decoded([1], temperature=float('{t}'))": "temperature" for t in (-1, "nan", "inf")},
    "copy_weights(tiny_model('qwen3_moe', router_bias_rate=0.1), tiny_model('qwen3_moe'))":
        "models differ: .*votes",
    **{f"add_factors(tiny_model('{family}'), Lora(2, 1.0, ('{target}',)), None)":
       text for family, target, text in [
        ("qwen2", "qkv_proj", "no matrix to adapt called 'qkv_proj'"),
        ("qwen2", "", "no matrix to adapt called ''"),
        ("gemma3_text", "lm_head", "its head is its embedding"),
        ("qwen2", "embed_tokens", "'embed_tokens'"),
        ("qwen3_moe", "act", "'act'"), ("qwen3_moe", "training", "'training'"),  # not matrices
    ]},
    "save_factors(add_factors(tiny_model('qwen3_moe'), Lora(2, 1.0, ('up_proj',)), None), '', '')":
        "no factors of experts",
    # The loss.
    "grpo_loss(torch.ones(3, 3), None, torch.ones(3), torch.ones(3, 3) > 0)":
        r"a number for each of 3 sequences as \(3, 1\), got \(3,\)",
    # Masks.
    "Mask([0, 1], [2, 2, 2])": r"one shape.*start \(1, 2\), end \(1, 3\)",
    "Mask([0.5, 1], [2, 2])": "integers as a mask's start, got float64",
    "Mask(torch.zeros(1, 1, 2), [2, 2])": r"\(B, S\) or \(S,\)",
    "Mask([0, 0], [2, 2], window=0)": "at least 1 as a window, got 0",
    "Mask.causal(4).with_window(2.5)": "got 2.5", "Mask.causal(4, window=True)": "got True",
    "Mask.documents()": "integers as a mask.s position_ids, got object",
    "Mask.documents(doc_ids=[0, 1, 0])": "row 0: a document continues after another",
    "Mask.blocks([[0, 0], [1, 0]])": "row 1: block numbers decrease",
    "Mask.tree([1, 1])": "subtree_end", "Mask.tree([3, 2])": "subtree_end",
    "Mask.causal(2).slice([False, True], ALL)": "arrays of integers",
    "Mask.causal(4).slice([2, 1], ALL)": "ascending",
    "Mask.causal(4).slice([1, 1], ALL)": "ascending",
    "Mask.causal(4).slice(ALL, slice(None, None, -1))": "ascending",
}  # fmt: skip
MODULES = (attend, check_attention, chunks, experts, generation, logprobs, lora, masks,
           parallelize, ring, trie)  # fmt: skip
NAMES = globals() | {name: x for module in MODULES for name, x in vars(module).items()}


@pytest.mark.quick
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_cannot_be_is_refused(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    had_group = dist.is_initialized()
    with pytest.raises(ValueError, match=CALLS[call]) as error:
        eval(call, dict(NAMES))
    assert "\n" not in str(error.value)
    assert not [*tmp_path.iterdir()] and dist.is_initialized() == had_group
