"""train_grpo.py --model DIR --data FILE: a checkpoint learns by rows, trees and plans."""

import functools
import json
import shutil
import sys

import pytest
import torch
from conftest import complaint_of
from safetensors.torch import save_file
from test_ranks import join, start
from test_run import as_torchrun, free_port, json_lines

import models
import train_grpo

WORDS = ["[UNK]", *"0123", "Question", ":", "Answer", "end", "stop"]
SAID = dict(
    model_type="gemma3_text", vocab_size=len(WORDS), hidden_size=16, intermediate_size=20,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
    rms_norm_eps=1e-6, query_pre_attn_scalar=2, sliding_window=3, sliding_window_pattern=2,
    rope_theta=1e4, eos_token_id=8, tie_word_embeddings=False,
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny Gemma of random weights, its tokenizer, and a file of questions."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

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
    pairs = [(f"1 more than {n % 3}", f"so #### {n % 3 + 1}") for n in range(30)]
    lines = [json.dumps(dict(question=question, answer=answer)) for question, answer in pairs]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.quick
def test_a_question_is_asked_answered_and_rewarded(folder):
    config = train_grpo.Config(model=str(folder), data=str(folder / "data.jsonl"))
    task = train_grpo.Questions(config)
    assert {*task.end} == {8, 9} and len(task.lines[False]) == 27
    assert [number for number, _ in task.lines[True]] == [1, 2, 3]  # lines 0, 10, 20
    state, prompt = task.prompt(None, 4, True)
    assert task.show(prompt) == "Question : 1 [UNK] [UNK] 1 Answer :" and state == 2
    asked = [task.prompt(None, n, False)[0] for n in range(27)]
    assert sorted(asked) == sorted(n % 3 + 1 for n in range(30) if n % 10)
    for text, reward in (("3 end", 1.0), ("3 more than 2 stop", 0.0), ("end", 0.0)):
        answer = task.tokenizer.encode(text).ids
        assert task.reply(3, answer) == (3, None, reward), text


@pytest.mark.quick
@pytest.mark.parametrize("text, number", [
    ("12 eggs cost $1,080.", 1080), ("it is -3.50", -3.5), ("7", 7), (7, 7), ("1. 2, then 3,", 3),
    ("She has 5 + 4 = 9\n#### 9", 9), ("**42**", 42), ("\u22123", -3), ("7-3", 3), ("4.50", 4.5),
    ("121932631112635269", 121932631112635269), (".5", 0.5), ("1,2", 2), (1e20, 10**20),
    ("so 1,234,567.5", 1234567.5)])  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert train_grpo.last_number(text) == number


@pytest.mark.quick
@pytest.mark.parametrize("line", [
    "{", "[1]", '{"question": "1?"}', '{"question": "1?", "answer": "none"}',
    '{"question": null, "answer": "1"}'])  # fmt: skip
def test_a_line_without_a_question_or_a_number_is_named(folder, tmp_path, line):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 and 1?", "answer": 2}\n' + line + "\n")
    config = train_grpo.Config(model=str(folder), data=str(data))
    assert "data.jsonl, line 2: expected" in complaint_of(train_grpo.Questions, config)


def test_a_missing_package_is_named_with_its_command(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit) as refused:
        train_grpo.main(["--model", str(folder), "--data", str(folder / "data.jsonl")])
    assert refused.value.code.endswith("expected the package tokenizers: pip install tokenizers")


def test_a_tokenizer_neither_cuts_nor_pads(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    task = train_grpo.Questions(train_grpo.Config(model=str(folder), data=f"{folder}/data.jsonl"))
    task.tokenizer.enable_truncation(3)
    task.tokenizer.enable_padding(length=5)
    task.tokenizer.save(str(path))
    config = train_grpo.Config(model=str(tmp_path / "other"), data=f"{folder}/data.jsonl")
    assert len(train_grpo.Questions(config).prompt(None, 4, True)[1]) == 8

    path.write_text("{}")
    assert "tokenizer.json: " in complaint_of(train_grpo.Questions, config)


@pytest.mark.parametrize("end", [None, "</s>", [[8]]])
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
    (2, "--plan t2 --tree"), (4, "--plan d2t2")])
def test_a_plan_logs_and_saves_what_one_process_does(folder, trained, world, words):
    """test_cut_system.py has the other plans; the files of text are copied."""
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


def test_a_directory_to_save_into_is_new_and_made_before_the_training(folder, monkeypatch):
    monkeypatch.setattr(train_grpo, "check", lambda: pytest.fail("it has begun"))
    words = f"--model {folder} --data {folder}/data.jsonl --save {folder}"
    with pytest.raises(SystemExit, match="File exists: "):
        train_grpo.main(words.split())
