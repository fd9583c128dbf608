"""The task of text: prompts in a checkpoint's own words, conversations, rewards.

Checkpoints are those of `released`, in the published formats. What transformers renders and encodes
is the truth about every row; `Script` of test_rollout says tokens that are known beforehand.
"""

import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import complaint_of, installed, shortened

from full.__main__ import main
from full.audit.audit import audited
from full.learn.advantages import require_positions
from full.learn.batches import RolloutQueue
from full.learn.rollouts import ReplyPool, Sampler, Trajectory, at_once, play, play_held_out
from full.model.hf import load_hf, save_hf
from full.run.build import prepare
from full.run.config import Config, resumed_config
from full.run.directory import RunDirectory
from full.run.tasks import Jsonl, is_held_out, make_task
from full.run.text import Text
transformers, _ = installed("transformers", "trl")
import released  # noqa: E402
from test_rollout import Script  # noqa: E402
from test_run import TINY, good, json_lines  # noqa: E402

FAMILIES = "qwen2", "qwen3", "gemma3"
INSTRUCTION = Config.instruction


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The directory of a family's checkpoint, made once; `base`: without a chat template."""
    made = {}

    def make(family, base=False):
        if (family, base) not in made:
            path = tmp_path_factory.mktemp(family) / "DIR"
            made[family, base] = released.make(family, path, layers=2, width=32, template=not base)
        return made[family, base]

    return make


@pytest.fixture(scope="module")
def by_transformers(directory):
    """The tokens of a conversation by transformers' apply_chat_template."""
    loaded = {}

    def tokens(family, messages, answer=False, **given):
        if family not in loaded:
            loaded[family] = transformers.AutoTokenizer.from_pretrained(directory(family))
        text = loaded[family].apply_chat_template(
            messages, add_generation_prompt=not answer, tokenize=False, **given)  # fmt: skip
        return loaded[family](text, add_special_tokens=False)["input_ids"]

    return tokens


def message(role, text):
    return {"role": role, "content": text}


user, assistant, system = (functools.partial(message, x) for x in ("user", "assistant", "system"))
QUESTIONS = [{"question": f"{n} + {n}?", "answer": f"so\n#### {2 * n}"} for n in range(40)]
# 40 conversations that are held out or not by their hash, each of its own kind.
HISTORY = [user("Hi."), assistant(" Hello. "), user("2 + 2?")]
TWICE = [user("2 + 2?"), user("And 3 + 3?"), user("No, 4 + 4?")]


def numbered(messages, answer="#### 4", count=40):
    """Rows that differ in the text of their first message."""
    rows = []
    for n in range(count):
        first = messages[0] | {"content": f"{n}: {messages[0]['content']}"}
        rows.append({"messages": [first, *messages[1:]], "answer": answer})
    return rows


def write(path, rows):
    """A file of rows; a row may also be a line that is none."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


REWARDS = """
def close(text, row):
    row["answer"] = row["answer"] + "!"
    return 1 if text == row["answer"] else len(text) / 100

def nothing(text, row):
    return None

def constant(text, row):
    return 0.25

def word(text, row):
    return "1.0"

def thoughtful(text, row):
    return float(text == "<|fim|>a<|im_start|>b")

thoughtful.special_tokens = True

def alone(text, row):
    return 0.25

alone.threads = False
"""
FILES = {
    "rewards.py": REWARDS, "empty.jsonl": "\n",
    "asks.jsonl": '{"question": "?"}\n', "good.jsonl": '{"question": "?", "answer": "1"}',
}  # fmt: skip


@pytest.fixture
def task_of(directory, tmp_path, monkeypatch):
    """task_of(model, rows, ..): a Jsonl task.

    model: a family, or a directory. base: the family's checkpoint without a chat template.
    """
    monkeypatch.chdir(tmp_path)
    for name, source in FILES.items():
        Path(name).write_bytes(source if isinstance(source, bytes) else source.encode())

    def make(model="qwen2", rows=QUESTIONS, *, base=False, **options):
        how = dict(task="jsonl", data=write(Path("rows.jsonl"), rows), max_new_tokens=60)
        how["model"] = str(model if isinstance(model, Path) else directory(model, base))
        return make_task(Config(**how | options).check())

    return make


def prompts(task):
    """{what is asked: prompt tokens} of every line, held out or not."""
    return {line.split_key: line.prompt for lines in task.rows.values() for line in lines}


def opened(task):
    """The state and the prompt of the first rollout."""
    return task.prompt(np.random.default_rng(0), 0, False)


def say(task, state, text):
    return task.reply(state, [*task.text.encode(text), task.end[0]])


# 1. Prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", shortened(released.FAMILIES, *FAMILIES))
@pytest.mark.parametrize("said", ["", "Be brief."])
def test_prompts_are_the_checkpoints_own(task_of, by_transformers, family, said):
    """A row's own system message stands."""
    own = numbered([system("Be kind."), user("Hi.")])
    conversations = [*numbered(HISTORY), *own]
    task = task_of(family, [*QUESTIONS, *conversations], template_args=json.dumps({"system": said}))
    found = prompts(task)
    before = [system(said)] if said else []
    for row in QUESTIONS:
        messages = [*before, user(f"{row['question']}\n{INSTRUCTION}")]
        assert found[row["question"]] == by_transformers(family, messages)
    for row in conversations:
        messages = row["messages"] if row in own else [*before, *row["messages"]]
        tokens = found[json.dumps(row["messages"], sort_keys=True)]
        assert tokens == by_transformers(family, messages)
    assert not task.note and task.template == "chat"


def function(name, **more):
    """A tool, as a data set has it."""
    properties = {"a": {"type": "integer", "description": "first"}, "b": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    described = dict(name=name, description=f"It is <{name}> é.", parameters=parameters)
    return {"type": "function", "function": described | more}


TOOLS = [function("add"), function("here the answer stands", strict=True)]
READ = """{%- for d in documents or [] %}<|im_start|>{{ d.title }}: {{ d.text }}<|im_end|>
{%- endfor %}
{%- if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}
{%- if style is defined %}<|im_start|>{{ style }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{{ tone }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""
TOLD = [  # a family or a template, what a row holds besides messages, and what its template gets
    ("qwen2", dict(tools=TOOLS), dict(tools=TOOLS)), ("qwen2", dict(tools=[]), dict(tools=[])),
    ("qwen2", dict(tools=None, chat_template_kwargs=None, documents=None, level=3), {}),
    ("qwen2", dict(chat_template_kwargs=dict(tools=TOOLS)), dict(tools=TOOLS)),
    ("qwen3", dict(tools=TOOLS, chat_template_kwargs=dict(enable_thinking=False)),
     dict(tools=TOOLS, enable_thinking=False)),
    ("gemma3", dict(tools=[]), {}),
    (READ, dict(documents=[dict(title="A", text="b")], tools=TOOLS[:1]),
     dict(documents=[dict(title="A", text="b")], tools=TOOLS[:1])),
    (READ, dict(chat_template_kwargs=dict(style="loud", tone="!")), dict(style="loud", tone="!")),
]  # fmt: skip


@pytest.mark.parametrize("model, fields, given", TOLD)
def test_what_a_template_reads_of_a_row_is_in_its_prompts(
    task_of, directory, tmp_path, model, fields, given
):
    """In the first prompt and in the next turn, token for token what transformers makes of it."""
    if model == READ:
        model = Path(shutil.copytree(directory("qwen2"), tmp_path / "DIR"))
        (model / "chat_template.jinja").write_text(READ)
    task = task_of(model, [*QUESTIONS, *(row | fields for row in numbered(TWICE))])
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.config.model)
    how = dict(add_generation_prompt=True, return_dict=False)
    lines = [line for line in task.rows[False] if "messages" in line.row]
    plain = [line for line in task.rows[False] if "messages" not in line.row]
    assert lines and not any(line.arguments for line in plain)
    for line in lines:
        messages = line.row["messages"][:1]
        assert line.prompt == tokenizer.apply_chat_template(messages, **how, **given)
        if given.keys() - {"tools"} or given.get("tools"):
            assert line.prompt != tokenizer.apply_chat_template(messages, **how)

        # Qwen3's template leaves thoughts out that the row has.
        answer = "four" if isinstance(model, str) else " four"
        said = say(task, (line, ()), answer)[1]
        messages = [*messages, assistant("four"), line.row["messages"][1]]
        whole = tokenizer.apply_chat_template(messages, **how, **given)
        row = [*line.prompt, *task.text.encode(answer), task.end[0], *said]
        assert row == whole if model != "qwen3" else whole[-len(said) :] == said


@pytest.mark.parametrize("family, bos", [("qwen2", ""), ("gemma3", "<bos>")])
def test_plain_text_begins_with_bos_once_and_is_never_wrapped(task_of, family, bos):
    def shown(template, **options):
        task = task_of(family, template=template, **options)
        return task.show(prompts(task)["7 + 7?"])

    mark = {"qwen2": "<|im_start|>", "gemma3": "<start_of_turn>"}[family]
    assert shown("raw") == f"{bos}7 + 7?\n{INSTRUCTION}\n"
    assert shown("raw", instruction="") == f"{bos}7 + 7?\n"
    assert shown("Q: {question} A:") == f"{bos}Q: 7 + 7? A:"
    assert shown("{question}, {question}", instruction="") == f"{bos}7 + 7?, 7 + 7?"
    assert shown(mark + "user\n{question}") == f"{bos}{mark}user\n7 + 7?"
    assert shown(f"{bos}Q: {{question}}") == f"{bos}Q: 7 + 7?"
    task = task_of(family, base=True)  # which has no template
    assert task.template == "raw" and "DIR has no chat template" in task.note


# 2. Conversations that are played ------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_played_in_the_template_and_rewarded_at_its_end(
    task_of, by_transformers, family
):
    task = task_of(family, numbered(TWICE[:2]), template_args='{"system": "Be brief."}')
    _, prompt = opened(task)
    (line,) = [line for line in task.rows[False] if line.prompt is prompt]

    # The whole row, as transformers renders it; both answers are the policy's, with their ends.
    answers = ["four", "#### 4"]
    messages = [*line.messages, assistant(answers[0]), user("And 3 + 3?")]
    row = [*by_transformers(family, messages), *task.text.encode(answers[1]), task.end[0]]
    first = [*prompt, *task.text.encode(answers[0]), task.end[0]]
    last = len(row) - len(task.text.encode(answers[1])) - 1
    assert row[: len(first)] == first
    script = [*first, *[5] * (last - len(first)), *row[last:]]  # what it says meanwhile is lost

    start = [(0, (line, ()), line.prompt)]
    config = Config(group=1, max_new_tokens=60, temperature=0)
    sampler = Sampler(Script(script, vocab=task.vocab_size))
    [[t]] = play(config, task, sampler, start, key=(0, 0))
    sampled = [*range(len(prompt), len(first)), *range(last, len(row))]
    assert (t.tokens, t.truncated) == (row, False)
    assert t.turn_rewards == [(len(first) - 2, 0.0), (len(row) - 2, 1.0)]
    assert np.flatnonzero(t.mask).tolist() == [place - 1 for place in sampled]


def test_a_state_is_shared_by_forks_and_never_changed(task_of):
    task = task_of("gemma3", numbered(TWICE))
    state, _ = opened(task)
    one, other = say(task, state, "four")[0], say(task, state, "five")[0]
    assert state[1] == () and (one[1], other[1]) == (("four",), ("five",))
    for fork in (one, other):
        now, reply, reward = say(task, fork, "eight")
        assert "No, 4 + 4?" in task.show(reply) and reward == 0.0
        assert say(task, now, "#### 4")[1:] == (None, 1.0)


def test_a_conversation_needs_room_for_what_is_said_and_an_end_of_each_answer(task_of):
    rows = numbered(TWICE[:2])
    task = task_of(rows=rows)
    count = len(say(task, opened(task)[0], "")[1])
    task_of(rows=rows, max_new_tokens=count + 2)
    with pytest.raises(ValueError, match=f"{count} tokens are said after the policy's answers"):
        task_of(rows=rows, max_new_tokens=count + 1)


def test_every_tenth_conversation_is_held_out_by_its_hash(task_of):
    task = task_of("qwen2", numbered(HISTORY) + numbered(TWICE))
    for held_out, lines in task.rows.items():
        for line in lines:
            asked = json.dumps(line.row["messages"], sort_keys=True)
            assert is_held_out(asked.encode()) == held_out
    # Whether a row brings its answer along makes no difference.
    rows = [row | {"messages": [*row["messages"], assistant("4")]} for row in numbered(HISTORY)]
    answered = task_of("qwen2", rows)
    keys = [{line.split_key for line in x.rows[True]} for x in (answered, task)]
    assert keys[0] < keys[1]


def test_lines_of_one_prompt_are_held_out_together_and_asked_once(task_of):
    """They may be questions or conversations, and what no template reads does not tell them apart.
    """
    rows = QUESTIONS[:30] * 4
    told = [{"role": "user", "content": row["question"], "id": n} for n, row in enumerate(rows)]
    rows += [{"messages": [said], "answer": "4"} for said in told]
    for family, padded in (("qwen2", []), ("gemma3", [row | {"question": f" {row['question']} "}
                                                      for row in QUESTIONS[:30]])):  # fmt: skip
        task = task_of(family, rows + padded, instruction="")
        trained, held_out = ({tuple(line.prompt) for line in task.rows[x]} for x in (False, True))
        assert not trained & held_out and len(trained | held_out) == 30
        assert len(task.rows[False]) == len(trained) * (9 if padded else 8)
        asked = [(tuple(line.prompt), line.row["answer"]) for line in task.rows[True]]
        assert len({*asked}) == len(asked) == task.held_out


@pytest.mark.parametrize("count, size, asked", [
    (70, 15, 15), (70, 70, 70), (70, 200, 70), (4, 15, 4)])  # fmt: skip
def test_an_evaluation_asks_each_line_equally_often(task_of, process_group, count, size, asked):
    rows = [{"question": f"{n} and 1?", "answer": "1"} for n in range(size)]
    how = dict(eval_data="rows.jsonl", template="{question}", max_new_tokens=4)
    task = task_of(rows=rows + rows[:3], eval_prompts=count, **how)
    sampler = Sampler(Script([9], vocab=task.vocab_size))
    starts, groups = play_held_out(task.config, task, sampler)
    lines = [line.where for _, (line, _), _ in starts]
    assert len(groups) == asked and lines == [f"rows.jsonl line {n + 1}" for n in range(asked)]
    # A task that draws, or has few secrets, is asked more often; no secret more often than another.
    for size in (7, 6, 71):
        config = Config(size=size, eval_prompts=70, max_new_tokens=4)
        secrets = [state[0] for _, state, _ in play_held_out(config, make_task(config), sampler)[0]]
        assert {secrets.count(x) for x in secrets} == {70 // size or 1}


HELD_OUT = [{"question": f"{n} and 1?", "answer": f"#### {n + 1}"} for n in range(12)]


def test_a_file_of_held_out_lines_leaves_all_of_the_data_to_train_on(task_of):
    """In the order of the file, with a note on what makes its figure another one."""
    write(Path("eval.jsonl"), HELD_OUT)
    task = task_of(eval_data="eval.jsonl", eval_prompts=12)
    shown = {held_out: [line.split_key for line in lines] for held_out, lines in task.rows.items()}
    assert shown[False] == [row["question"] for row in QUESTIONS] and task.note == ""
    assert shown[True] == [row["question"] for row in HELD_OUT]
    asked = [task.prompt(None, n, True)[0][0].split_key for n in range(13)]
    assert asked == [*shown[True], shown[True][0]]
    assert task.where(task.prompt(None, 3, True)[0]) == "eval.jsonl line 4"
    drawn = {task.prompt(np.random.default_rng(n), 0, False)[0][0].split_key for n in range(300)}
    assert drawn == {*shown[False]}

    # The seventh line of the data is among them. A file that is both is what somebody wants.
    task = task_of(rows=[*QUESTIONS, HELD_OUT[6]], eval_data="eval.jsonl", eval_prompts=5)
    assert task.note.splitlines() == [
        "1 of the 12 prompts of eval.jsonl are in rows.jsonl too, and are trained on"]
    assert not task_of(eval_data="rows.jsonl").note

    # A small file of data is enough then, and an evaluation of every line reads both as well.
    task_of(rows=QUESTIONS[:1], eval_data="eval.jsonl")
    every = Jsonl(task_of(eval_data="eval.jsonl").config, all_lines=True)
    assert [line.split_key for line in every.rows[True]] == shown[True] and not every.note


# 3. Rewards ----------------------------------------------------------------------------------

FAR = "so\n#### 1,234"  # the answer of a row, and what the default reward says to others
NEAR = {"#### 1234.0": 1.0, "1234": 0.0, "#### 12": 0.0, "#### 1\n#### 1234": 1.0, "": 0.0}


@pytest.fixture
def rewarding(task_of):
    """rewarding(**options): what the task says to an answer to line 8, also if its row had one."""

    def make(**options):
        task = task_of(**options)
        (line,) = [x for lines in task.rows.values() for x in lines if x.split_key == "7 + 7?"]

        def reward(text, answer="so\n#### 14"):
            state = line._replace(row=line.row | {"answer": answer})
            return say(task, (state, ()), text)[2]

        return reward

    return make


def test_a_reward_of_a_file_gets_the_text_and_a_row_of_its_own(rewarding):
    asked = rewarding(reward="rewards.py:close")
    for _ in range(2):  # what it changed is forgotten
        assert asked("so\n#### 14!") == 1.0 and asked("four") == 0.04
    asked = rewarding()
    assert {text: asked(text, FAR) for text in NEAR} == NEAR
    assert asked("#### Paris ", "Paris") == 1.0
    for gold, text in ((4, "4"), (4.0, "4.00"), (1e3, "1,000"), (-0.5, "-.5")):
        assert (asked(f"#### {text}", gold), asked("#### 5", gold)) == (1.0, 0.0)


def test_a_reward_sees_special_tokens_if_it_says_so(rewarding):
    """All of them but the end of its turn."""
    said = "<|fim|>a<|im_start|>b"
    assert rewarding(reward="rewards.py:thoughtful")(said) == 1.0
    assert rewarding(reward="rewards.py:close")(said) == len("<|fim|>ab") / 100


@pytest.mark.parametrize("reward, has_pool, samples_meanwhile", [
    ("", False, True), ("rewards.py:close", True, True), ("rewards.py:alone", False, False),
])  # fmt: skip
def test_who_asks_for_rewards(task_of, reward, has_pool, samples_meanwhile):
    """16 threads, unless it is arithmetic; and also while the trainer trains, unless unsafe."""
    task = task_of(reward=reward)
    assert bool(ReplyPool(task).threads) == has_pool
    trainer = SimpleNamespace(device=torch.device("cpu"), sampler=SimpleNamespace(start=print))
    queue = RolloutQueue(task.config, task, trainer)
    assert queue.start == (print if samples_meanwhile else at_once)


# 4. What is refused --------------------------------------------------------------------------


def line(row, answer="4"):
    """Rows with a bad one at the end, which is without an answer if it has none."""
    if isinstance(row, list):
        row = {"messages": row, "answer": answer}
    return dict(rows=[*QUESTIONS, row])


def rows(*first, **options):
    return dict(rows=[*first], **options)


def user_with(**fields):
    """A row of one question and more fields."""
    return {"messages": [user("q")], "answer": "4"} | fields


LINE = "rows.jsonl line 41: "
LATE = "message 3 is the assistant's, after an answer that the policy has to give"
REFUSED = [
    # Lines that cannot be played.
    ("rows.jsonl line 41 holds no JSON object: Expecting property name", line("{")),
    (LINE + "expected an answer.* got ' '", line({"question": "2 + 2?", "answer": " "})),
    (LINE + "expected a list of .messages., got .]", line([])),
    (LINE + "message 1: expected a role .*, got 'Hi.'$", line(["Hi."])),
    (LINE + "message 2: expected a role of user, assistant, and .*'asistant'",
     line([user("Hi."), message("asistant", "a")])),
    (LINE + r"message 1: .* one string of content, got {.*\[{",
     line([user([{"type": "text", "text": "Hi."}])])),
    (LINE + "message 2: expected a role of user, assistant, .*'system'",
     line([user("Hi."), system("Be kind.")])),
    (LINE + "the last message must be the user's", line([assistant("Hi.")])),
    (LINE + LATE, line([user("a"), user("b"), assistant("c"), user("d")])),
    (LINE + ".*roles must alternate", line([assistant("Hi."), user("2 + 2?")])),
    (LINE + "it holds token 4000, '<image_soft_token>'; the model's last token is 3999",
     line({"question": "What is on <image_soft_token>?", "answer": "4"})),
    (LINE + "it holds token 4000, ", line([user("a"), user("<image_soft_token>")])),
    (LINE + r".*can't encode character '\\ud800' in position .*: surrogates not allowed$",
     line({"question": "a \ud800", "answer": "4"})),
    ("rows.jsonl line 1: .*surrogates not allowed$", dict(instruction="\udc80")),
    (LINE + "expected an answer, a number or .*, or a --reward, got nan",
     line({"question": "q", "answer": float("nan")})),
    (LINE + "expected an answer, .* line .* got 'so.n4.n'",
     line({"question": "q", "answer": "so\n4\n"})),
    # What a template would not read of a row.
    (LINE + "the chat template of .* has no argument tools$", line(user_with(tools=TOOLS))),
    (LINE + "the chat template of .* has no argument content$",  # it makes this name
     line(user_with(chat_template_kwargs={"content": "a"})) | dict(model="qwen3")),
    (LINE + "expected chat_template_kwargs to be an object, got .1.$",
     line(user_with(chat_template_kwargs=[1]))),
    (LINE + "it holds enable_thinking, which the chat template reads: put it into chat_templ",
     line(user_with(enable_thinking=False)) | dict(model="qwen3")),
    (LINE + "the chat template of .* fails: ValueError: Tools should",
     line(user_with(tools="add")) | dict(model="qwen2")),
    (LINE + "it holds tools, which only --template chat can say$",
     line({"question": "q", "answer": "4", "tools": TOOLS}) | dict(template="raw")),
    # Files.
    (r"line 1: expected a string 'question' or a list .*, got \['q', 'answer'\]",
     rows({"q": "?", "answer": "1"})),
    ("line 1: expected a string 'question' or a list",
     rows({"question": "?", "messages": [user("?")], "answer": "1"})),
    ("line 1: .* only --template chat can say", rows(*numbered(HISTORY), template="raw")),
    ("--instruction follows a question; .*rows.jsonl has none",
     rows(*numbered(HISTORY), instruction="Go.")),
    ("line 1: the chat template of .*DIR fails: ValueError", dict(base=True, template="chat")),
    ("--reward gone.py:f: gone.py: no such file", dict(reward="gone.py:f")),
    ("rewards.py has no function 'gone'", dict(reward="rewards.py:gone")),
    ("expected lines in empty.jsonl to hold out, got none", dict(eval_data="empty.jsonl")),
    ("asks.jsonl line 1: expected an answer", dict(eval_data="asks.jsonl")),
    ("expected lines in rows.jsonl to train on, got none", rows(eval_data="good.jsonl")),
    ("expected lines in rows.jsonl to hold out, got none of 1;", rows(QUESTIONS[0])),
    # Flags.
    ("--template-args needs --template chat", dict(template="raw", template_args='{"a": 1}')),
    ("--template-args: .*DIR has no chat template", dict(base=True, template_args='{"a": 1}')),
    ("--template-args: .*DIR has no argument a", dict(template_args='{"a": 1}')),
    ("expected --template-args to be a JSON object, such as .*, got '.1]'",
     dict(template_args="[1]")),
    ("expected --date YYYY-MM-DD or .*, got 'today'", dict(date="today")),
    ("--template must be chat, raw or a text with {question}, got 'hello'", dict(template="hello")),
    ("--template-args: expected a text as system, got 3", dict(template_args='{"system": 3}')),
    ("--instruction needs a --template without {question}",
     dict(template="{question}", instruction="Go.")),
]


@pytest.mark.parametrize("message, options", REFUSED, ids=[message for message, _ in REFUSED])
def test_what_cannot_be_played_is_named(task_of, message, options):
    with pytest.raises((ValueError, ImportError, OSError), match=message):
        task_of(**dict(model="gemma3") | options)


def test_an_instruction_may_stand_among_conversations_and_a_reward_need_no_answer(task_of):
    task_of(rows=[*QUESTIONS, *numbered(HISTORY)], instruction="Go.")
    task_of(rows=[{"question": row["question"]} for row in QUESTIONS], reward="rewards.py:nothing")


def test_a_teacher_has_positions_for_every_prompt_and_rollout(task_of, directory, process_group):
    """For the longest prompt of any line, before a run, and for what a task's prompts become. Its
    ids mean the policy's tokens."""
    shutil.copytree(directory("qwen3"), "TEACHER")
    raw = json.loads(Path("TEACHER/config.json").read_text())
    Path("TEACHER/config.json").write_text(json.dumps(raw | {"max_position_embeddings": 150}))
    how = dict(teacher="TEACHER", advantage="teacher", max_new_tokens=60)
    prepare(task_of(**how).config)
    shutil.copy(directory("gemma3") / "tokenizer.json", "TEACHER")
    said = complaint_of(prepare, task_of(**how).config)
    assert re.fullmatch("expected a tokenizer with the tokens of .* in TEACHER, got '.*", said)
    (Path("TEACHER") / "tokenizer.json").unlink()
    long = line({"question": "word " * 60})["rows"]
    for eval_data, rows in (("", long), ("eval.jsonl", QUESTIONS)):
        write(Path("eval.jsonl"), [*HELD_OUT, {"question": "word " * 60, "answer": "1"}])
        config = task_of(rows=rows, eval_data=eval_data, reward="rewards.py:constant", **how).config
        said = complaint_of(prepare, config)
        assert re.fullmatch("a prompt of .* and 60 max_new_tokens exceed the 150 .* TEACHER", said)

    t = Trajectory(0, [5] * 151, np.ones(150, bool), np.zeros(150))
    said = complaint_of(require_positions, config, [t], 150)
    assert said == "a rollout of 151 tokens exceeds the 150 positions of the teacher TEACHER"


# 6. Runs -------------------------------------------------------------------------------------


def begin_folder(model, every):
    """Put a model and the questions here.

    Random weights draw few ends, so each `every`th token is one that no answer to be learned has.
    """
    shutil.copytree(model, "DIR")
    said = {x for row in QUESTIONS for x in Text("DIR").encode(row["answer"])}
    ends = {"eos_token_id": [*{*range(0, 3000, every)} - said]}
    Path("DIR/generation_config.json").write_text(json.dumps(ends))
    write(Path("rows.jsonl"), QUESTIONS)


def edit(name, change):
    """Change the object of a JSON file of the model."""
    path = Path("DIR") / name
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=1))


def settings(**more):
    return lambda raw: raw | more


def template(change):
    return lambda: edit("tokenizer_config.json",
                        lambda raw: raw | {"chat_template": change(raw["chat_template"])})


def rename(old, new):
    """Lay the rows of a file out in another way, in a file of another name."""
    rows = [dict(reversed(row.items())) for row in json_lines(Path(old))]
    Path(old).unlink()
    Path(new).write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def mask(raw):
    """The tokenizer writes another letter for one."""
    return raw | {"normalizer": {"type": "Replace", "pattern": {"String": "y"}, "content": "i"}}


CHANGED = "is not what it was when run began: give the old contents again, or start a new run"
TEACHER = dict(teacher="TEACHER", advantage="teacher")
EDITS = {  # what changes before a run goes on, the settings then, and what is said
    "names": (lambda: [rename("rows.jsonl", "a"), rename("eval.jsonl", "b")],
              dict(data="a", eval_data="b"), ""),
    "layout": (lambda: [edit(x, settings()) for x in ("tokenizer.json", "config.json")], {}, ""),
    "place": (lambda: [Path("DIR/chat_template.jinja").write_text(
        json.loads(Path("DIR/tokenizer_config.json").read_text())["chat_template"])], {}, ""),
    "name of the teacher": (lambda: Path("TEACHER").rename("T"), dict(teacher="T"), ""),
    "file of the teacher": (lambda: save_hf(load_hf("TEACHER"), "TEACHER", max_shard_bytes=50_000),
                            {}, ""),
    "rows": (lambda: write(Path("rows.jsonl"), QUESTIONS[1:] + QUESTIONS[:1]), {},
             f"--data 'rows.jsonl' {CHANGED}"),
    "an answer": (lambda: write(Path("eval.jsonl"), [HELD_OUT[0] | {"answer": "2"}, *HELD_OUT[1:]]),
                  {}, f"--eval-data 'eval.jsonl' {CHANGED}"),
    "no file": (lambda: None, dict(eval_data=""), f"--eval-data '' {CHANGED}"),
    "template": (template(lambda x: x + " "), {}, f"the chat template of --model 'DIR' {CHANGED}"),
    "tokenizer": (lambda: edit("tokenizer.json", mask), {},
                  f"the tokenizer of --model 'DIR' {CHANGED}"),
    "marks": (lambda: edit("tokenizer_config.json", settings(pad_token="<|im_end|>")), {},
              f"the tokenizer of --model 'DIR' {CHANGED}"),
    "ends": (lambda: edit("generation_config.json", settings(eos_token_id=[3])), {},
             f"the list of end ids of --model 'DIR' {CHANGED}"),
    "numbers": (lambda: edit("config.json", settings(rms_norm_eps=0.1)), {},
                f"the shape of --model 'DIR' {CHANGED}"),
    "teacher": (lambda: nudge("TEACHER"), {}, f"--teacher 'TEACHER' {CHANGED}"),
    "shape of the teacher": (lambda: edit("../TEACHER/config.json", settings(rms_norm_eps=0.1)), {},
                             f"--teacher 'TEACHER' {CHANGED}"),
}  # fmt: skip


def nudge(directory):
    """Change one weight of a checkpoint."""
    path = Path(directory) / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.norm.weight"][3] += 1
    safetensors.torch.save_file(weights, path)


@pytest.mark.parametrize("what", EDITS)
def test_what_a_run_is_trained_on_is_known_by_what_it_says(directory, tmp_path, monkeypatch, what):
    """Another name or layout of equal contents goes on, and other contents are refused by name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(directory("qwen2"), "DIR")
    shutil.copytree(directory("qwen3"), "TEACHER")
    write(Path("rows.jsonl"), QUESTIONS)
    write(Path("eval.jsonl"), HELD_OUT)
    Path("run").mkdir()
    config = Config(task="jsonl", model="DIR", data="rows.jsonl", eval_data="eval.jsonl", out="run",
                    **TEACHER)  # fmt: skip
    RunDirectory("run").fill(config, make_task(config))
    change, given, says = EDITS[what]
    change()
    config = resumed_config("run/config.json", dict(resume=True) | given)
    task = make_task(config)
    if says:
        assert says in complaint_of(RunDirectory("run").fill, config, task)
    else:
        RunDirectory("run").fill(config, task)
    stored = json.loads(Path("run/config.json").read_text())
    assert stored["data"] == ("rows.jsonl" if says else config.data)


MARK = "{{ when }}{{ tone }}<tool_call>"
DATED = "{% set when = strftime_now('%f') %}{% for m in messages %}<|im_start|>{{ m.role }} "
DATED += MARK + "{{ m.content }}<|im_end|>{% endfor %}"
DATED += "{% if add_generation_prompt %}<|im_start|>assistant " + MARK + "{% endif %}"


def test_a_run_goes_on_with_its_prompts_date_and_reward_and_so_do_the_commands(
    directory, tmp_path, monkeypatch, capsys, process_group
):
    """A microsecond is as good as a day."""
    monkeypatch.chdir(tmp_path)
    begin_folder(directory("qwen2"), every=3)
    write(Path("eval.jsonl"), HELD_OUT)
    Path("rewards.py").write_text("open('imported', 'w')\n" + REWARDS)
    Path("DIR/chat_template.jinja").write_text(DATED)
    tone = """--template-args '{"tone":"loud"}'"""
    flags = f"{TINY} --task jsonl --model DIR --data rows.jsonl --eval-data eval.jsonl "
    flags += f"--max-new-tokens 24 --prompts 2 --group 2 --minibatches 1 {tone} "
    flags += "--save-every 1 --out run --steps 1 --reward rewards.py"
    good(tmp_path, f"{flags}:close")
    stored = json.loads(Path("run/config.json").read_text())
    config = Config(**stored)
    day = Text("DIR").date.fromisoformat(config.date)
    first = f"{day:%f}loud"

    # The run names the file, and nobody imports it for that.
    Path("imported").unlink()
    again = "--resume --out run --steps 2"
    for command in (again, f"{again} --reward rewards.py:word", "audit run"):
        assert main(command.split()) == 2 and not Path("imported").exists()
        assert "give it again, as --reward FILE.py:close" in capsys.readouterr().err
    good(tmp_path, f"{again} --reward rewards.py:close")
    lines = json_lines(Path("run/rollouts.jsonl"))
    rewards = {reward for line in lines for _, reward in line["rewards"]}
    assert len(rewards) > 1 and rewards < {n / 100 for n in range(999)}
    report = audited("run", 1, reward="rewards.py:close")
    assert report.wrong is None
    assert {"eval/solved", "reward/values"} <= {row.key for row in report.rows}
    begins = f"<|im_start|>user {first}<tool_call>{HELD_OUT[0]['question']}\n"
    samples = json_lines(Path("run/samples.jsonl"))
    assert len(samples) == 2 and all(line["text"].startswith(begins) for line in samples)

    # An evaluation has the run's settings. A file that is named now takes the place of its files.
    evaluate = "eval run --samples 1 --eval-prompts 2 --reward rewards.py:close "
    note = f'the chat template of DIR gets tone = "loud", the date {config.date[:10]}'
    for given, rows in (("", HELD_OUT), ("--data rows.jsonl --all-lines", QUESTIONS)):
        assert main((evaluate + given).split()) == 0
        out = capsys.readouterr().out
        asked = re.findall(rf"^prompt: <.im_start.>user {first}<tool_call>(.*)$", out, re.M)
        assert asked and {*asked} <= {row["question"] for row in rows}
        assert ("40 prompts" if given else "2 held-out prompts") in out and note in out

    # Another chat template is refused, also by an audit.
    Path("DIR/chat_template.jinja").write_text(DATED + " ")
    for command in (f"{again} --reward rewards.py:close", "audit run --reward rewards.py:close"):
        assert main(command.split()) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"the chat template of --model 'DIR' {CHANGED}" in said
