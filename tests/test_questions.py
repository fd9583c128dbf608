"""train_grpo.py --model DIR --data FILE: a checkpoint learns by rows, trees and plans."""

import functools
import json
import math
import shutil
import sys
from collections import Counter
from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import complaint_of, slow
from safetensors.torch import save_file
from test_ranks import join, start
from test_run import as_torchrun, free_port, json_lines
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel

import models
import parallel
import train_grpo

WORDS = ["[UNK]", *"0123", "Question", ":", "Answer", "end", "stop"]
SAID = dict(
    model_type="gemma3_text", vocab_size=len(WORDS), hidden_size=16, intermediate_size=20,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    rms_norm_eps=1e-6, query_pre_attn_scalar=2, sliding_window=3, sliding_window_pattern=2,
    rope_theta=1e4, eos_token_id=8, tie_word_embeddings=False, max_position_embeddings=64,
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip


def line_of(n) -> str:
    """A line of data: 256 different questions, whose answers are 1, 2, 3, 1, .."""
    question = f"{n // 64} {n // 16 % 4} {n // 4 % 4} {n % 4} and 1 more than {n % 3}"
    return json.dumps(dict(question=question, answer=f"so #### {n % 3 + 1}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny Gemma of random weights, its tokenizer, and a file of questions."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(SAID))
    ends = dict(eos_token_id=[8, 9])
    (folder / "generation_config.json").write_text(json.dumps(ends))
    torch.manual_seed(0)
    model = models.Transformer(models.read_config(folder))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "data.jsonl").write_text("\n".join(line_of(n) for n in range(30)))
    return folder


@pytest.fixture
def task_of(folder, tmp_path):
    """task_of(lines, change): the task of some lines, bytes, with a changed tokenizer."""

    def make(lines=None, change=None):
        shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        if change:
            change(tokenizer)
        tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
        file = tmp_path / "data.jsonl"
        file.write_bytes((folder / "data.jsonl").read_bytes() if lines is None else lines)
        config = train_grpo.Config(model=str(tmp_path / "model"), data=str(file))
        return train_grpo.Questions(config)

    return make


@pytest.mark.quick
def test_a_question_is_asked_answered_and_rewarded(task_of):
    task = task_of()
    assert {*task.end} == {8, 9} and len(task.lines[False]) == 27
    assert [number for number, _ in task.lines[True]] == [1, 2, 3]  # lines 0, 10, 20
    state, prompt = task.prompt(None, 4, True)
    assert task.show(prompt) == "Question : 0 0 2 2 [UNK] 1 [UNK] [UNK] 1 Answer :" and state == 2
    asked = [task.prompt(None, n, False)[0] for n in range(27)]
    assert sorted(asked) == sorted(n % 3 + 1 for n in range(30) if n % 10)
    for text, reward in (("3 end", 1.0), ("3 more than 2 stop", 0.0), ("end", 0.0)):
        answer = task.tokenizer.encode(text).ids
        assert task.reply(3, answer) == (3, None, reward), text


def numbers_of(lines):
    """The numbers of some questions, which their prompts have as four tokens."""
    digits = [[token - 1 for token in prompt[2:6]] for _, prompt in lines]
    return [64 * a + 16 * b + 4 * c + d for a, b, c, d in digits]


@pytest.mark.quick
@pytest.mark.parametrize("numbers", [
    [n // 4 for n in range(120)], [n * n % 31 % 30 for n in range(90)]], ids=["in a row", "some"])
def test_no_held_out_question_is_trained_on(task_of, numbers):
    """Every tenth of the different ones is held out, and the file has it once then."""
    lines = [line_of(n) for n in numbers]
    lines[-1] = lines[-1].replace("####", "therefore")  # a question is not its line
    task = task_of("\n".join(lines).encode())
    held_out = [*dict.fromkeys(numbers)][::10]
    assert numbers_of(task.lines[True]) == held_out
    assert numbers_of(task.lines[False]) == [n for n in numbers if n not in held_out]


@pytest.mark.quick
@pytest.mark.parametrize("eval_prompts, count", [(70, 15), (15, 15), (4, 4)])
def test_an_evaluation_asks_a_question_once(task_of, monkeypatch, eval_prompts, count):
    """Of 15 held-out questions; the mean is over those that were asked."""
    task = task_of("\n".join(line_of(n) for n in range(150)).encode())
    asked = []
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(models, "generate", lambda model, rows, **how: asked.extend(rows))
    trainer = SimpleNamespace(grid=SimpleNamespace(group={"d": None}), model=None, total=float)
    source = train_grpo.Source(train_grpo.Config(eval_prompts=eval_prompts), task, trainer)
    assert source.evaluate() == 0 and source.shown is asked[-1]
    assert [*Counter(tuple(row.tokens) for row in asked).values()] == [1] * count
    monkeypatch.setattr(source, "play", lambda *given: {})  # a d rank without a question
    assert source.evaluate() == 0 and source.shown is None


@pytest.mark.quick
@pytest.mark.parametrize("text, number", [
    ("12 eggs cost $1,080.", 1080), ("it is -3.50", -3.5), ("7", 7), (7, 7), ("1. 2, then 3,", 3),
    ("She has 5 + 4 = 9\n#### 9", 9), ("**42**", 42), ("\u22123", -3), ("7-3", 3), ("4.50", 4.5),
    ("121932631112635269", 121932631112635269), (".5", 0.5), ("1,2", 2), (1e20, 10**20),
    ("so 1,234,567.5", 1234567.5), (-3, -3), (2.5e-7, Decimal("2.5e-7")),
    ("1e5", 10**5), ("it is 1E5.", 10**5), ("-1.5e+3", -1500), ("2e-2", Decimal("0.02")),
    ("1e99999", 99999), ("3e4x", 4), ("10 / 4 = 2.5", 2.5), ("1/2 of 10 is 5", 5),
    # A fraction is not its denominator.
    *((text, None) for text in ("1/2", "-1/2 cup", "so 3 / 4", "1 1/2", "1,000/2", "1\u20442")),
    *((text, None) for text in ("\xbd", "3\u2153", "NaN", "none", "")),
    *((x, None) for x in (True, None, [1, 2], {"a": 1}, math.nan, -math.inf))])  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert train_grpo.last_number(text) == number


LONG = " ".join("1" * 45)  # and 4 tokens of the template
WRONG = [  # a line, and what its error says of it
    (b"{", "Expecting"), (b"[1]", "list indices"), (b'{"question": "1?"}', "'answer'"),
    (b'{"question": "1?", "answer": "none"}', "number None"),
    (b'{"question": null, "answer": "1"}', "must be str"),
    *((b'{"question": "1?", "answer": %s}' % answer, "number None") for answer in (
        b"NaN", b"Infinity", b"-Infinity", b"1e999", b"true", b"null", b"[3]", b'{"a": 3}',
        b'"1/2"', b'"NaN"', b'""')),
    # Latin-1, UTF-16, a parquet file, half of a character, a bomb, and a question without an end.
    ('{"question": "h\xe9 1?", "answer": 1}'.encode("latin-1"), "'utf-8' codec can't decode"),
    ('{"question": "1?", "answer": 1}'.encode("utf-16"), "'utf-8' codec can't decode"),
    (b"PAR1\x15\x04\x15\x80\xc0", "'utf-8' codec can't decode"),
    (rb'{"question": "\ud800 1?", "answer": 1}', "TextInputSequence must be str"),
    (b'{"question": "1?", "answer": ' + b"[" * 99999, "recursion"),
    (b'{"question": "%s", "answer": 1}' % LONG.encode(), "number 1, 49 + 16 of 64 positions"),
]


@pytest.mark.quick
@pytest.mark.parametrize("line, why", WRONG)
def test_a_line_that_cannot_be_asked_is_named(task_of, line, why):
    said = complaint_of(task_of, b'{"question": "1 and 1?", "answer": 2}\n\n' + line + b"\n")
    assert "data.jsonl, line 3: expected {" in said and why in said and len(said) < 400


@pytest.mark.quick
def test_a_token_that_the_model_does_not_have_is_named(task_of):
    """As Gemma's <image_soft_token>. The longest question that has room for an answer is asked."""
    lines = "\n".join(json.dumps(dict(question=f"{LONG[:-4]} {n}", answer=1)) for n in (2, 3))
    assert len(task_of(lines.encode()).prompt(None, 0, True)[1]) == 48
    lines += '\n{"question": "<image> 1?", "answer": 1}'
    said = complaint_of(task_of, lines.encode(), lambda x: x.add_special_tokens(["<image>"]))
    assert "line 3" in said and "id 10 of 10" in said


def marks(single):
    """A post-processor that puts marks around a text."""
    ids = [(word, WORDS.index(word)) for word in ("0", "end", "stop")]
    return processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=ids)


MARKS = {  # a post-processor, and the mark before the text, which stays
    "both": (marks("0 $A end"), [1]), "the end begins": (marks("end $A end"), [8]),
    "two of each": (marks("0 end $A end stop"), [1, 8]),
    "Bert": (processors.BertProcessing(("stop", 9), ("0", 1)), [1]),
    "several": (processors.Sequence([processors.ByteLevel(), marks("$A end")]), []),
}


@pytest.mark.quick
@pytest.mark.parametrize("processor, begins", MARKS.values(), ids=MARKS)
def test_a_prompt_has_the_mark_before_its_text_and_none_after_it(task_of, processor, begins):
    plain = task_of().prompt(None, 0, True)[1]
    changed = task_of(None, lambda x: setattr(x, "post_processor", processor))
    assert changed.prompt(None, 0, True)[1] == (*begins, *plain)


def test_a_missing_package_is_named_with_its_command(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit) as refused:
        train_grpo.main(["--model", str(folder), "--data", str(folder / "data.jsonl")])
    assert refused.value.code.endswith("expected the package tokenizers: pip install tokenizers")


def test_a_tokenizer_neither_cuts_nor_pads(task_of, folder, tmp_path):
    def cut_and_pad(tokenizer):
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=5)

    assert len(task_of(None, cut_and_pad).prompt(None, 4, True)[1]) == 13
    config = train_grpo.Config(model=f"{tmp_path}/model", data=f"{folder}/data.jsonl")
    for name, text in (("generation_config.json", "{"), ("tokenizer.json", "{}")):
        (tmp_path / "model" / name).write_text(text)
        assert f"model/{name}: " in complaint_of(train_grpo.Questions, config)
        shutil.copy(folder / name, tmp_path / "model")


@pytest.mark.parametrize("end", [None, "</s>", [[8]], -1, 10, True, 8.0])
def test_a_model_without_an_end_is_refused(folder, tmp_path, end):
    shutil.copytree(folder, tmp_path / "other")
    (tmp_path / "other" / "generation_config.json").unlink()
    raw = json.loads((folder / "config.json").read_text()) | {"eos_token_id": end}
    (tmp_path / "other" / "config.json").write_text(json.dumps(raw))
    config = train_grpo.Config(model=str(tmp_path / "other"), data=f"{folder}/data.jsonl")
    assert "expected integers as eos_token_id" in complaint_of(train_grpo.Questions, config)


def _train(rank, world, port, words):
    """A rank of train_grpo.py, without its check, which other tests run."""
    if world > 1:
        as_torchrun(rank, world, port)
    train_grpo.check = lambda: 0.0
    train_grpo.main(words.split())


@pytest.fixture(scope="module")
def trained(folder):
    """trained(world, words): the lines of --metrics of a run of two steps in float64, made once."""

    @functools.cache
    def lines(world, words):
        given = f"--model {folder} --data {folder}/data.jsonl --steps 2 --dtype float64 --lr 1e-2"
        given += f" --max-new-tokens 6 --prompts 4 --metrics {folder}/metrics.jsonl {words}"
        assert join(start(world, _train, world, free_port(), given)) == [0] * world
        return json_lines(folder / "metrics.jsonl")

    return lines


@pytest.mark.parametrize("world, words", [
    (1, "--rows 3"), (1, "--rows 5 --tree"), (2, "--plan c2"), (2, "--tree"),
    (2, "--plan t2 --tree"), (4, "--plan d2t2"), *slow(
        (3, "--plan c3"), (4, "--plan c4"), (4, "--plan d2c2"), (4, "--plan t2d2 --tree"),
        (4, "--plan c2t2"))])
def test_a_plan_logs_and_saves_what_one_process_does(folder, trained, world, words):
    """Multi-turn games are run under d2, c2 and t2 by the judge of z; the files of text are copied.
    """
    expected = trained(1, f"--rows 64 --save {folder}/one")
    saved = folder / words.replace(" ", "")
    found = trained(world, f"{words} --save {saved}")
    assert any(line["grad_norm"] > 0 for line in expected)
    for line, true in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "reward/mean"):
            assert line[name] == pytest.approx(true[name], rel=0, abs=1e-9)
    one, other, before = (models.load(x) for x in (folder / "one", saved, folder))
    for a, b, c in zip(one.parameters(), other.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert not a.equal(c)
    names = {path.name for path in saved.iterdir()}
    assert {"tokenizer.json", "generation_config.json"} <= names
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float64"


def begin(monkeypatch, words):
    """What ends the program: the beginning of its check, or a refusal."""
    monkeypatch.setattr(train_grpo, "check", lambda: sys.exit(f"{torch.get_num_threads()} thread"))
    with pytest.raises(SystemExit) as ended:
        try:
            train_grpo.main(words.split())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return ended.value.code


def test_a_directory_to_save_into_is_new_or_empty(folder, tmp_path, monkeypatch):
    """It is made before the training. After a kill it is empty, and the command runs again."""
    words = f"--model {folder} --data {folder}/data.jsonl --max-new-tokens 6 --save "
    new = tmp_path / "not" / "there"
    for _ in range(2):
        assert begin(monkeypatch, f"{words} {new}") == "1 thread" and new.is_dir()
    error = "train_grpo.py: error: "
    (new / "file").touch()
    for there in (new, new / "file"):
        expected = f"{error}expected a new or an empty directory as --save, got {there}"
        assert begin(monkeypatch, f"{words} {there}") == expected
    below = new / "file" / "below"
    assert begin(monkeypatch, f"{words} {below}") == f"{error}Not a directory: '{below}'"


@pytest.mark.parametrize("of_model", [True, False])
def test_a_check_has_one_thread_and_a_released_model_all(folder, monkeypatch, of_model):
    threads = []
    monkeypatch.setattr(parallel, "join_ranks", lambda *given: sys.exit(torch.get_num_threads()))
    of_five = f"--model {folder} --data {folder}/data.jsonl --max-new-tokens 6"
    words = of_five if of_model else ""
    torch.set_num_threads(2)
    monkeypatch.setattr(train_grpo, "check", lambda: threads.append(torch.get_num_threads()) or 0.0)
    with pytest.raises(SystemExit) as ended:
        train_grpo.main(words.split())
    torch.set_num_threads(1)
    assert threads == [1] and ended.value.code == (2 if of_model else 1)
