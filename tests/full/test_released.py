"""A released checkpoint of each family: its text, its answers and its export are transformers'."""

import pytest
import released
import torch
from conftest import shortened

from full.generate import generate
from full.hf import copy_text_files, load_hf, save_hf
from full.text import Text

CHAT = [
    {"role": "system", "content": "You add numbers."},
    {"role": "user", "content": "What is 12 + 30?\nEnd with '#### ' and the answer."},
    {"role": "assistant", "content": "12 + 30 = 42\n#### 42"},
    {"role": "user", "content": "And  7 more, in 日本語?"},
]


def theirs(directory):
    """transformers' model and tokenizer of a directory, the model in float32."""
    transformers = pytest.importorskip("transformers", reason="see tests/requirements.txt")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True)  # fmt: skip
    wrong = {kind: names for kind, names in info.items() if names}
    assert not wrong, wrong
    return model.eval(), transformers.AutoTokenizer.from_pretrained(directory)


def same_tokens(directory, tokenizer, messages=CHAT):
    """Prompts, raw text and decoding of a directory are those of transformers; the prompt."""
    text = Text(directory)
    prompt = text.prompt(messages)
    assert prompt == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False)  # fmt: skip
    raw = messages[-1]["content"]
    assert text.encode(raw, bos=True) == tokenizer(raw).input_ids
    assert text.decode(prompt, special=True) == tokenizer.decode(prompt)
    return prompt


@torch.no_grad()
def same_logits(ours, model, prompt):
    """Our logits of a row are transformers', as near as in test_families.py."""
    tokens = torch.tensor([prompt])
    got = ours(tokens)
    want = model(tokens).logits
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    assert want.std() > 0.1  # and no constant


def same_answer(ours, model, prompt, end, *, length=12):
    """The greedy answer, up to one of the ends, is transformers'; its tokens."""
    from transformers import GenerationConfig

    # The checkpoint's own configuration says how its authors sample: at random, with a penalty for
    # what has been said before. What we do not name here would be taken from it.
    options = GenerationConfig(
        do_sample=False, max_new_tokens=length, eos_token_id=list(end), pad_token_id=0,
        repetition_penalty=1.0,
    )  # fmt: skip
    (row,) = generate(ours, [prompt], max_new_tokens=length, temperature=0, end=end)
    truth = model.generate(torch.tensor([prompt]), generation_config=options)
    assert row.tokens == truth[0].tolist()
    assert row.truncated == (row.tokens[-1] not in end)
    return row.tokens[len(prompt) :]


@pytest.mark.parametrize("family", shortened(released.FAMILIES))
def test_a_released_checkpoint_comes_and_goes_as_transformers_has_it(family, tmp_path):
    directory = released.make(family, tmp_path / "released")
    ours = load_hf(directory, dtype=torch.float32)
    assert 5e6 < sum(p.numel() for p in ours.parameters()) < 20e6
    text = Text(directory)

    # As it came.
    model, tokenizer = theirs(directory)
    prompt = same_tokens(directory, tokenizer)
    same_logits(ours, model, prompt)
    answer = same_answer(ours, model, prompt, text.end)

    # Random weights seldom end an answer by themselves, so one of its own tokens is made an end.
    end = answer[len(answer) // 2]
    short = same_answer(ours, model, prompt, (*text.end, end))
    assert short == answer[: answer.index(end) + 1]

    # The next turn of the same conversation, behind what was sampled.
    said = [*CHAT, {"role": "assistant", "content": text.decode(answer)}, CHAT[-1]]
    row = [*prompt, *answer, *text.next_turn(said, answer[-1])]
    assert row[-3:] == prompt[-3:]  # where the assistant answers
    same_logits(ours, model, row)

    # As it goes: others load it, and so do we.
    save_hf(ours, tmp_path / "hf")
    copy_text_files(directory, tmp_path / "hf")
    again, tokenizer = theirs(tmp_path / "hf")
    pairs = zip(model.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert same_tokens(tmp_path / "hf", tokenizer) == prompt
    assert Text(tmp_path / "hf").end == text.end
    assert again.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    same_logits(load_hf(tmp_path / "hf"), again, prompt)
