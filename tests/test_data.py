"""The task of text: prompts in a checkpoint's own words, conversations, rewards, demonstrations.

Checkpoints are those of `released`, in the published formats. What transformers renders and encodes
is the truth about every row; `Script` of test_rollout says tokens that are known beforehand.
"""

import functools
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import shortened

import audit
import models
import text
import train_grpo
from train_grpo import Config, demonstrations, draw_prompts, is_held_out, make_task

pytest.importorskip("transformers", reason="text needs transformers")
pytest.importorskip("safetensors", reason="checkpoints are safetensors")
pytest.importorskip("trl", reason="has the published chat templates")
import released  # noqa: E402
from test_rollout import Script  # noqa: E402
from test_run import TINY, cli, good  # noqa: E402

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
    transformers = pytest.importorskip("transformers")
    loaded = {}

    def tokens(family, messages, answer=False):
        if family not in loaded:
            loaded[family] = transformers.AutoTokenizer.from_pretrained(directory(family))
        text = loaded[family].apply_chat_template(
            messages, add_generation_prompt=not answer, tokenize=False)  # fmt: skip
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
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def task_of(model, folder, rows=QUESTIONS, learn=None, **options):
    """A Jsonl task on rows, with the demonstrations `learn` in a file of their own."""
    if learn is not None:
        options |= {"demos": 1, "demo_data": write(folder / "demos.jsonl", learn)}
    options = dict(max_new_tokens=60, data=write(folder / "rows.jsonl", rows)) | options
    return make_task(Config(task="jsonl", model=str(model), **options).check())


def prompts(task):
    """{what is asked: prompt tokens} of every line, held out or not."""
    return {line.shown: line.prompt for lines in task.rows.values() for line in lines}


# 1. Prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", shortened(released.FAMILIES, *FAMILIES))
@pytest.mark.parametrize("said", ["", "Be brief."])
def test_prompts_are_the_checkpoints_own(directory, by_transformers, tmp_path, family, said):
    task = task_of(directory(family), tmp_path, [*QUESTIONS, *numbered(HISTORY)], system=said)
    before = [system(said)] if said else []
    found = prompts(task)
    for row in QUESTIONS:
        messages = [*before, user(f"{row['question']}\n{INSTRUCTION}")]
        assert found[row["question"]] == by_transformers(family, messages)
    for row in numbered(HISTORY):
        tokens = found[json.dumps(row["messages"], sort_keys=True)]
        assert tokens == by_transformers(family, [*before, *row["messages"]])
    assert not task.note and task.template == "chat"


def test_a_system_message_of_a_rows_own_stands(directory, by_transformers, tmp_path):
    rows = numbered([system("Be kind."), user("Hi.")])
    (*_, tokens) = prompts(task_of(directory("qwen3"), tmp_path, rows, system="Be brief.")).values()
    assert tokens in [by_transformers("qwen3", row["messages"]) for row in rows]


@pytest.mark.parametrize("family, bos", [("qwen2", ""), ("gemma3", "<bos>")])
def test_plain_text_begins_with_bos_once_and_is_never_wrapped(directory, tmp_path, family, bos):
    def shown(template, **options):
        task = task_of(directory(family), tmp_path, template=template, **options)
        return task.show(prompts(task)["7 + 7?"])

    mark = {"qwen2": "<|im_start|>", "gemma3": "<start_of_turn>"}[family]
    assert shown("raw") == f"{bos}7 + 7?\n{INSTRUCTION}\n"
    assert shown("raw", instruction="") == f"{bos}7 + 7?\n"
    assert shown("Q: {question} A:") == f"{bos}Q: 7 + 7? A:"
    assert shown("{question}, {question}", instruction="") == f"{bos}7 + 7?, 7 + 7?"
    assert shown(mark + "user\n{question}") == f"{bos}{mark}user\n7 + 7?"
    assert shown(f"{bos}Q: {{question}}") == f"{bos}Q: 7 + 7?"


def test_without_a_chat_template_prompts_are_plain_text_and_a_note_says_so(directory, tmp_path):
    task = task_of(directory("qwen2", base=True), tmp_path)
    assert task.show(prompts(task)["7 + 7?"]) == f"7 + 7?\n{INSTRUCTION}\n"
    assert "DIR has no chat template: prompts are plain text (--template raw)" in task.note
    assert not task_of(directory("qwen2", base=True), tmp_path, template="raw").note


# 2. Conversations that are played ------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_played_in_the_template_and_rewarded_at_its_end(
    directory, by_transformers, tmp_path, family
):
    rows = numbered([user("2 + 2?"), user("And 3 + 3?")])
    task = task_of(directory(family), tmp_path, rows, system="Be brief.")
    _, prompt = task.prompt(np.random.default_rng(0), 0, False)
    (line,) = [line for line in task.rows[False] if line.prompt is prompt]

    # The whole row, as transformers renders it; both answers are the policy's, with their ends.
    answers = ["four", "#### 4"]
    messages = [*line.messages, assistant(answers[0]), user("And 3 + 3?")]
    row = [*by_transformers(family, messages), *task.text.encode(answers[1]), task.end[0]]
    first = [*prompt, *task.text.encode(answers[0]), task.end[0]]
    last = len(row) - len(task.text.encode(answers[1])) - 1
    assert row[: len(first)] == first
    script = [*first, *[5] * (last - len(first)), *row[last:]]  # what it says meanwhile is lost

    heard = []
    task._reward = lambda line, text: heard.append((line.where, text)) or 0.25
    start = [(0, (line, ()), line.prompt)]
    options = dict(group=1, max_new_tokens=60, temperature=0, key=(0, 0))
    [[t]] = train_grpo.rollout(Script(script, vocab=task.vocab_size), task, start, **options)
    sampled = [*range(len(prompt), len(first)), *range(last, len(row))]
    assert (t.tokens, t.reward, t.truncated) == (row, 0.25, False)
    assert np.flatnonzero(t.mask).tolist() == [place - 1 for place in sampled]
    assert heard == [(line.where, answers[1])]


def test_a_state_is_shared_by_forks_and_never_changed(directory, tmp_path):
    task = task_of(directory("gemma3"), tmp_path, numbered(TWICE))
    state, _ = task.prompt(np.random.default_rng(0), 0, False)

    def said(state, text):
        return task.reply(state, [*task.text.encode(text), task.end[0]])

    one, other = said(state, "four")[0], said(state, "five")[0]
    assert state[1] == () and (one[1], other[1]) == (("four",), ("five",))
    for fork in (one, other):
        now, reply, reward = said(fork, "eight")
        assert "No, 4 + 4?" in task.show(reply) and reward == 0.0
        assert said(now, "#### 4")[1:] == (None, 1.0)


def test_a_conversation_needs_room_for_what_is_said_and_an_end_of_each_answer(directory, tmp_path):
    model, rows = directory("qwen2"), numbered([user("2 + 2?"), user("And 3 + 3?")])
    task = task_of(model, tmp_path, rows)
    state, _ = task.prompt(np.random.default_rng(0), 0, False)
    reply = task.reply(state, [task.end[0]])[1]
    task_of(model, tmp_path, rows, max_new_tokens=len(reply) + 2)
    message = f"{len(reply)} tokens are said after the policy's answers"
    with pytest.raises(ValueError, match=message):
        task_of(model, tmp_path, rows, max_new_tokens=len(reply) + 1)


def test_every_tenth_conversation_is_held_out_by_its_hash(directory, tmp_path):
    task = task_of(directory("qwen2"), tmp_path, numbered(HISTORY) + numbered(TWICE))
    for held_out, lines in task.rows.items():
        for line in lines:
            asked = json.dumps(line.row["messages"], sort_keys=True)
            assert is_held_out(asked.encode()) == held_out
    with_answers = [row | {"messages": [*row["messages"], assistant("4")]} for row in
                    numbered(HISTORY)]  # fmt: skip
    answered = task_of(directory("qwen2"), tmp_path, with_answers)
    assert {line.shown for line in answered.rows[True]} < {line.shown for line in task.rows[True]}


# 3. Rewards ----------------------------------------------------------------------------------

REWARDS = """
def close(text, row):
    row["answer"] = row["answer"] + "!"
    return 1 if text == row["answer"] else len(text) / 100

def broken(text, row):
    return {}["nothing"]

def leaves(text, row):
    raise SystemExit(0)

def nothing(text, row):
    return None

def infinite(text, row):
    return float("inf")

def word(text, row):
    return "1.0"
"""


def rewarding(directory, folder, name, **options):
    """What the task says to an answer, by --reward rewards.py:name."""
    (folder / "rewards.py").write_text(REWARDS)
    reward = f"{folder / 'rewards.py'}:{name}"
    task = task_of(directory("qwen2"), folder, reward=reward, **options)
    (line,) = [line for lines in task.rows.values() for line in lines if line.shown == "7 + 7?"]
    return lambda text: task.reply((line, ()), [*task.text.encode(text), task.end[0]])[2]


def test_a_reward_of_a_file_gets_the_text_and_a_row_of_its_own(directory, tmp_path):
    asked = rewarding(directory, tmp_path, "close")
    for _ in range(2):  # what it changed is forgotten
        assert asked("so\n#### 14!") == 1.0 and asked("four") == 0.04
    assert isinstance(asked("so\n#### 14!"), float)


@pytest.mark.parametrize("name, message", [
    ("broken", r"KeyError: 'nothing' \(.*rewards.py, line 7, in broken\),"),
    ("leaves", r"sys.exit\(0\) \(.*rewards.py, line 10, in leaves\),"),
    ("nothing", r"rewards.py:nothing gave None"), ("infinite", r"rewards.py:infinite gave inf"),
    ("word", r"rewards.py:word gave '1.0'"),
])  # fmt: skip
def test_a_reward_that_fails_names_its_line_and_the_row(directory, tmp_path, name, message):
    asked = rewarding(directory, tmp_path, name)
    with pytest.raises(ValueError, match=f"{message} for the answer 'four' to .*rows.jsonl line 8"):
        asked("four")


def test_an_answer_is_needed_only_where_nothing_else_says_what_is_right(directory, tmp_path):
    rows = [{"question": row["question"]} for row in QUESTIONS]
    (tmp_path / "rewards.py").write_text(REWARDS)
    with pytest.raises(ValueError, match="rows.jsonl line 1: it holds no question and answer"):
        task_of(directory("qwen2"), tmp_path, rows)
    task_of(directory("qwen2"), tmp_path, rows, reward=f"{tmp_path / 'rewards.py'}:nothing")


# 4. Demonstrations ---------------------------------------------------------------------------


def learned(task, count=4, groups=()):
    """Demonstrations as a run's supervised steps make them."""
    config = task.config
    starts = draw_prompts(config, task, train_grpo.DEMO_PROMPT, 0, groups or range(count))
    return demonstrations(task, starts, (0, 4, 1), config.max_new_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_is_the_template_with_the_answers(
    directory, by_transformers, tmp_path, family, process_group
):
    """One turn in full by transformers, up to the end of the turn; of two, each answer's tokens."""
    demo = [user("Hi."), assistant(" So. ")]
    task = task_of(directory(family), tmp_path, learn=[{"messages": demo}])
    truth = by_transformers(family, demo, answer=True)
    (t,) = learned(task, 1)
    assert t.tokens == truth[: len(t.tokens)] and t.tokens[-1] == task.end[0]
    assert task.show(truth[len(t.tokens) :]) == "\n"
    prompt = len(by_transformers(family, [user("Hi.")]))
    assert t.mask.tolist() == [n >= prompt for n in range(1, len(t.tokens))] and t.reward == 0.0

    # Answers in between are learned too, in the row that a rollout would have.
    demo = [system("Be kind."), user("2 + 2?"), assistant("four"), user("3 + 3?"), assistant("six")]
    (t,) = learned(task_of(directory(family), tmp_path, learn=[{"messages": demo}]), 1)
    spoken = [task.show([token]) for token, on in zip(t.tokens[1:], t.mask) if on]
    thoughts = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
    end = task.show([task.end[0]])
    assert "".join(spoken) == f"{thoughts}four{end}{thoughts}six{end}"
    truth = task.show(by_transformers(family, demo, answer=True))  # without earlier thoughts
    assert task.show(t.tokens).replace(thoughts, "") + "\n" == truth.replace(thoughts, "")


def test_lines_of_the_data_are_learned_as_they_are_played(directory, tmp_path, process_group):
    rows = numbered([*HISTORY, assistant("#### 4")])
    task = task_of(directory("qwen2"), tmp_path, [*QUESTIONS, *rows], demos=1)
    shown = [task.show(t.tokens) for t in learned(task, 30)]
    assert all(t.reward == 1.0 and t.mask[-1] for t in learned(task, 30))
    history = [text for text in shown if "Hello." in text]
    assert 0 < len(history) < 30
    assert all(text.endswith("assistant\n#### 4<|im_end|>") for text in history)
    t = learned(task_of(directory("qwen2"), tmp_path, template="Q: {question} A:", demos=1), 1)[0]
    assert re.fullmatch(r"Q: (\d+) \+ \1\? A:so\n#### \d+<\|im_end\|>", task.show(t.tokens))


def test_a_file_of_demonstrations_is_dealt_and_nothing_held_out_is_learned(
    directory, tmp_path, process_group
):
    task = task_of(directory("qwen2"), tmp_path, learn=QUESTIONS)
    held_out = {line.shown for line in task.rows[True]}
    said = f"{len(held_out)} of 40 lines of .*demos.jsonl are held out for evaluation"
    assert held_out and re.search(said, task.note)
    count = 40 - len(held_out)
    for deck in range(2):
        dealt = learned(task, groups=range(deck * count, (deck + 1) * count))
        assert len({str(t.tokens) for t in dealt}) == count
        assert not any(line.prompt == t.tokens[: len(line.prompt)] for t in dealt
                       for line in task.rows[True])  # fmt: skip
    with pytest.raises(ValueError, match="demos.jsonl holds no line that is not held out"):
        only = [row for row in QUESTIONS if row["question"] in held_out]
        task_of(directory("qwen2"), tmp_path, learn=only)


@pytest.mark.parametrize("answer", ["", " ", "2 and 2 make\n#### "])
def test_an_answer_that_says_nothing_is_refused(directory, tmp_path, answer):
    for row in ({"question": "2 + 2?"}, {"messages": [user("2 + 2?")]}):
        with pytest.raises(ValueError, match="rows.jsonl line 41: its answer is empty"):
            task_of(directory("qwen3"), tmp_path, [*QUESTIONS, row | {"answer": answer}])


@pytest.mark.parametrize("said", ["{}", "{}\n" + INSTRUCTION])
def test_a_held_out_question_is_not_learned_from_messages_either(directory, tmp_path, said):
    learn = [
        {"messages": [user(said.format(row["question"])), assistant(row["answer"])]}
        for row in QUESTIONS
    ]
    task = task_of(directory("qwen3"), tmp_path, learn=learn, system="Be brief.")
    held_out = {line.shown for line in task.rows[True]}
    learned = {line.messages[-1]["content"].partition("\n")[0] for line in task.demos}
    assert held_out and learned == {row["question"] for row in QUESTIONS} - held_out


def test_a_held_out_conversation_is_not_learned_with_answers_in_it(directory, tmp_path):
    rows = numbered(TWICE)
    learn = [
        {"messages": [turn for said in row["messages"] for turn in (said, assistant("#### 4"))]}
        for row in rows
    ]
    task = task_of(directory("qwen3"), tmp_path, rows, learn, max_new_tokens=90)
    held_out = {line.messages[0]["content"] for line in task.rows[True]}
    learned = {line.messages[0]["content"] for line in task.demos}
    assert held_out and learned == {row["messages"][0]["content"] for row in rows} - held_out


SYSTEM_FIRST = """\
{%- if messages[0].role != 'system' %}{{ raise_exception('a system first') }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_demonstration_is_counted_with_the_mark_that_ends_its_answers(
    directory, tmp_path, process_group
):
    """Its template's mark is not the first end: a template of another form is asked in vain."""
    model = tmp_path / "DIR"
    shutil.copytree(directory("qwen2"), model)
    mark, document = text.Text(model).end
    (model / "chat_template.jinja").write_text(SYSTEM_FIRST)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [document, mark]}))
    learn = [{"messages": [system("Be kind."), *HISTORY[2:], assistant("four"), user("3 + 3?"),
                           assistant("six")]}]  # fmt: skip

    def task(**options):
        return task_of(model, tmp_path, learn=learn, system="Be kind.", **options)

    (t,) = learned(task(), 1)
    assert task().end == (document, mark) and t.tokens[-1] == mark and document not in t.tokens
    count = len(t.tokens) - len(task().demos[0].prompt)
    task(max_new_tokens=count)
    with pytest.raises(ValueError, match=f"a demonstration of {count} tokens is over"):
        task(max_new_tokens=count - 1)


def test_a_task_that_knows_no_demo_prompt_is_asked_for_a_prompt(process_group):
    task = SimpleNamespace(prompt=lambda rng, index, held_out: (index, [int(held_out)]))
    config = Config()
    for stream, held_out in ((train_grpo.DEMO_PROMPT, False), (train_grpo.EVALUATION, True)):
        starts = draw_prompts(config, task, stream, 3, range(2), first=7, held_out=held_out)
        assert starts == [(0, 7, [int(held_out)]), (1, 8, [int(held_out)])]


# 5. What is refused --------------------------------------------------------------------------

ANSWER = {"answer": "4"}
BAD = {
    "it holds no messages, a list": {"messages": []} | ANSWER,
    "message 1 has no role": {"messages": ["Hi."]} | ANSWER,
    "message 2 has no role": {
        "messages": [user("Hi."), {"role": "asistant", "content": "a"}]} | ANSWER,
    "message 3 has no role": {"messages": [*HISTORY[:2], {"role": "user"}]} | ANSWER,
    "message 2 is the system's": {"messages": [user("Hi."), system("Be kind.")]} | ANSWER,
    "end with no user's": {"messages": [assistant("Hi.")]} | ANSWER,
    "message 3 is the assistant's, after an answer that the policy has to give": {
        "messages": [user("a"), user("b"), assistant("c"), user("d")]} | ANSWER,
    "it holds no answer, a string": {"messages": [user("Hi.")], "answer": 4},
    "roles must alternate": {"messages": [assistant("Hi."), user("2 + 2?")]} | ANSWER,
    "tokens are said after the policy's answers": {
        "messages": [user("a"), user("why " * 60)]} | ANSWER,
    r"it holds token 4000, '<image_soft_token>'; the model's last token is 3999": {
        "question": "What is on <image_soft_token>?"} | ANSWER,
}  # fmt: skip
BAD_DEMOS = {
    "it holds no question and answer": {"question": "2 + 2?"},
    "needs a user's message, and an assistant's at its end": {"messages": [user("Hi.")]},
    "message 2 is the user's; a demonstration needs the assistant's there": {
        "messages": [user("a"), user("b"), assistant("c")]},
    "message 3 is the assistant's; a demonstration needs the user's there": {
        "messages": [user("a"), assistant("b"), assistant("c")]},
    r"a demonstration of \d+ tokens is over --max-new-tokens 60": {
        "question": "2 + 2?", "answer": "four " * 60},
    "holds a mark that would end it": {"question": "2 + 2?", "answer": "4<end_of_turn>5"},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_a_line_that_cannot_be_played_is_named(directory, tmp_path, message):
    with pytest.raises(ValueError, match=f"rows.jsonl line 41: .*{message}"):
        task_of(directory("gemma3"), tmp_path, [*QUESTIONS, BAD[message]])


@pytest.mark.parametrize("message", BAD_DEMOS)
def test_a_demonstration_that_cannot_be_learned_is_named(directory, tmp_path, message):
    with pytest.raises(ValueError, match=f"demos.jsonl line 2: .*{message}"):
        task_of(directory("gemma3"), tmp_path, learn=[QUESTIONS[0], BAD_DEMOS[message]])


def test_a_line_without_a_demonstration_is_named(directory, tmp_path):
    for rows in (numbered(HISTORY), numbered([*TWICE, assistant("8")])):
        with pytest.raises(ValueError, match=r"rows.jsonl line \d+: it holds no demonstration"):
            task_of(directory("qwen2"), tmp_path, rows, demos=1)


JSONL = dict(task="jsonl", data="rows.jsonl", model="DIR")
FLAGS = [
    ("--template must be chat, raw or a text with {question}, got 'hello'", dict(template="hello")),
    ("--system needs --template chat", dict(template="{question}", system="Be kind.")),
    ("--instruction needs a --template without {question}", dict(
        template="{question}", instruction="Go.")),
    ("--system needs --template chat", dict(template="raw", system="Be kind.")),
    ("--demo-data needs --demos", dict(demo_data="demos.jsonl")),
    ("--reward needs --task jsonl; --demo-data needs --task jsonl", dict(
        task="guess", data="", model="", reward="a.py:f", demo_data="b", demos=1)),
    ("--data needs --task jsonl", dict(task="guess")),
]  # fmt: skip


@pytest.mark.parametrize("message, options", FLAGS)
def test_flags_that_do_not_go_together_are_named(message, options):
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(**JSONL | options).check()


def test_flags_that_a_checkpoint_or_a_file_rules_out_are_named(directory, tmp_path):
    def refuses(message, rows=QUESTIONS, base=False, **options):
        with pytest.raises(ValueError, match=message):
            task_of(directory("qwen2", base=base), tmp_path, rows, **options)

    refuses("--template chat: .*DIR has no chat template", base=True, template="chat")
    refuses("--system: .*DIR has no chat template", base=True, system="Be kind.")
    refuses("rows.jsonl line 1: .* only --template chat can say", numbered(HISTORY), template="raw")
    refuses("--instruction follows a question; .*rows.jsonl has none", numbered(HISTORY),
            instruction="Go.")  # fmt: skip
    refuses("expected --reward FILE.py:function, got 'gone.py:f'", reward="gone.py:f")
    both = [{"question": "?", "messages": [user("?")], "answer": "1"}]
    refuses("line 1: it holds both a question and messages", both)
    refuses("no question and answer, two strings, .* 'answer': 'int'",
            [{"question": "?", "answer": 1}])  # fmt: skip
    refuses("--demo-lr needs --demos", demo_lr=0.125)
    (tmp_path / "one.py").write_text("def one(text):\n    return 1.0\n")
    refuses("one.py:one cannot be called with .text, row.: too many",
            reward=f"{tmp_path / 'one.py'}:one")  # fmt: skip
    (tmp_path / "rewards.py").write_text(REWARDS)
    refuses("rewards.py has no function 'gone'", reward=f"{tmp_path / 'rewards.py'}:gone")
    (tmp_path / "rewards.py").write_text("import nothing_of_this_name")
    refuses(r"ModuleNotFoundError.*rewards.py, line 1", reward=f"{tmp_path / 'rewards.py'}:close")


# 6. Runs -------------------------------------------------------------------------------------


def test_a_run_goes_on_and_is_audited_with_its_reward_given_again(
    directory, tmp_path, monkeypatch, capsys, process_group
):
    """A base model, so that the run has to say how its prompts are made."""
    (tmp_path / "DIR").symlink_to(directory("qwen2", base=True))
    write(tmp_path / "rows.jsonl", QUESTIONS)
    write(tmp_path / "demos.jsonl", QUESTIONS[:9])
    (tmp_path / "rewards.py").write_text("open('imported', 'w')\n" + REWARDS)
    flags = f"{TINY} --task jsonl --model DIR --data rows.jsonl --demo-data demos.jsonl --demos 9 "
    flags += "--demo-lr 0.01 "
    flags += "--max-new-tokens 24 --prompts 2 --group 2 --minibatches 1 --save-every 1 --out run "
    out, _ = good(tmp_path, f"{flags} --steps 1 --reward rewards.py:close")
    assert out.count("DIR has no chat template: prompts are plain text (--template raw)") == 1

    # The run names the file, and nobody imports it for that.
    monkeypatch.chdir(tmp_path)
    Path("imported").unlink()
    again = "--resume --out run --steps 2"
    for command in (again, f"{again} --reward rewards.py:word", "audit run"):
        assert train_grpo.main(command.split()) == 2 and not Path("imported").exists()
        assert "give it again, as --reward FILE.py:close" in capsys.readouterr().err
    good(tmp_path, f"{again} --reward rewards.py:close")
    lines = [json.loads(line) for line in Path("run/rollouts.jsonl").read_text().splitlines()]
    rewards = {reward for line in lines for _, reward in line["rewards"]}
    assert len(rewards) > 1 and rewards < {n / 100 for n in range(999)}
    assert audit.audited("run", 1, reward="rewards.py:close").wrong is None

    # An evaluation has the run's settings, but for those of its supervised start.
    evaluate = "eval run --samples 1 --eval-prompts 2 --reward rewards.py:close"
    assert train_grpo.main(evaluate.split()) == 0

    # `chat` puts a line into the prompts that the run was trained on, though no flag named them.
    rows = []

    def recorded(model, given, **how):
        rows.append(list(given[0].tokens))
        return models.generate(model, given, **how)

    monkeypatch.setattr(text, "generate", recorded)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"0 + 0?\nAnd 1?\n")))
    assert train_grpo.main("chat run --temperature 0 --max-new-tokens 2".split()) == 0
    assert "each line is put into the run's prompt, --template 'raw'" in capsys.readouterr().err
    show = text.Text("DIR").decode
    assert show(rows[0], special=True) == f"0 + 0?\n{INSTRUCTION}\n"
    assert show(rows[1], special=True).endswith(f"And 1?\n{INSTRUCTION}\n")

    # A run does not go on with other questions.
    write(Path("rows.jsonl"), QUESTIONS[1:] + QUESTIONS[:1])
    codes, _, err = cli(tmp_path, f"{again.replace('2', '3')} --reward rewards.py:close")
    assert codes == [2]
    assert "rows.jsonl (--data) is not what it was when run began" in err[0]


def test_a_number_of_numpy_is_one():
    numbers = [np.True_, np.float32(0.5), np.array(0.5), np.array([1]), np.int8(1)]
    assert all(map(train_grpo.is_finite_number, [True, 1, 0.5, *numbers]))
    others = [None, "1", np.nan, np.float32("inf"), np.array([1, 2]), np.array("a"), [1]]
    assert not any(map(train_grpo.is_finite_number, others))


def test_a_reward_that_fails_ends_the_run_with_its_row(directory, tmp_path):
    (tmp_path / "DIR").symlink_to(directory("qwen2"))
    write(tmp_path / "rows.jsonl", QUESTIONS)
    (tmp_path / "rewards.py").write_text(REWARDS)
    flags = f"{TINY} --task jsonl --model DIR --data rows.jsonl --demos 1 --steps 1 --out run"
    codes, _, err = cli(tmp_path, f"{flags} --reward rewards.py:broken")
    assert codes == [2] and "Traceback" in err[0]
    last = err[0].splitlines()[-1]
    assert re.search(r"error: KeyError: 'nothing' \(.*rewards.py, line 7, in broken\), ", last)
    assert re.search(r"to rows.jsonl line \d+$", last)
