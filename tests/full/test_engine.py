"""Generation behind a URL: a run with `--engine` and the stub is the run without an engine.

The stub is in this process, or in one that is killed, and the ranks are others. Its answers are
spoiled, too: turns in two dialects, and faults, each of which is named. Whatever an engine answers,
no rollout gets a token that the pushed weights did not sample. Real vLLM: test_vllm.py.
"""

import contextlib
import copy
import json
import math
import os
import re
import shutil
import threading
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import torch
from conftest import shortened, slow
from stub_engine import Handler, Stub, turns_of
from test_audit import assert_right, in_rollout
from test_ranks import SHAPE, as_script, join, largest_difference, learns_something, read_metrics
from test_ranks import run_of  # noqa: F401, a fixture
from test_ranks import start, trained
from test_run import _task, at, begin, cli, end, free_port, good, refused, until

import models
from full.audit.audit import audited
from full.learn import engine as engine_py
from full.learn.engine import VLLM, Engine, SGLang
from full.learn.generate import generate
from full.model.config import ModelConfig
from full.model.hf import save_hf
from full.model.transformer import Transformer
from full.run.config import Config
from full.run.flags import parse_config
from full.run.run import set_up
from full.run.tasks import make_task

# Of the tokens of `guess`: a server begins with other weights than a run pushes to it.
GUESS = dict(vocab_size=12, hidden_size=16, intermediate_size=48, num_hidden_layers=1,
             num_attention_heads=4, num_key_value_heads=2, head_dim=4)  # fmt: skip
# A run of one process, whose metrics other runs are compared with.
RUN = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 2 --prompts 3 --group 4 "
RUN += "--dtype float64 --lr 0.01 --lr-warmup 0 --lr-decay constant --eval-every 2 "
RUN += "--eval-prompts 6 --steps 4"


def model_of(seed, **changes):
    return Transformer(ModelConfig(**GUESS | changes)).double().init_weights(seed)


def serve(directory):
    """Serve a directory in this process; return the Stub, which knows the draws of `sampled`."""
    server = Stub(directory).begin()
    server.draws |= turns_of(DRAWS)
    return server


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The first weights of all servers."""
    directory = tmp_path_factory.mktemp("served") / "other"
    save_hf(model_of(9), directory)
    return directory


@pytest.fixture(scope="module")
def server(directory):
    server = serve(directory)
    yield server
    server.shutdown()


def engine_of(server, folder, seed=5, **changes):
    """An Engine that has pushed the weights of `model_of(seed)`."""
    policy = model_of(seed)
    engine = Engine(Config(engine=server.url, **changes), copy.deepcopy(policy).to("meta"))
    engine.begin(folder)
    engine.push(policy, None, 0)
    return engine


PROMPT, DRAWS = [3, 0, 6], [0.31, 0.77, 0.52, 0.11, 0.93, 0.64]


def sampled(sampler, **how):
    """The tokens and log-probs of one turn by an engine, or by a model."""
    row = models.Row(PROMPT, DRAWS)
    how = dict(max_new_tokens=6, temperature=0.9) | how
    if isinstance(sampler, Engine):
        sampler.generate([row], **how)
    else:
        generate(sampler, [row], **how)
    return row.tokens[3:], row.logprobs[2:]


def same_turn(turn, truth):
    assert turn[0] == truth[0]
    return np.abs(np.subtract(turn[1], truth[1])).max() < 1e-12


# Runs ------------------------------------------------------------------------------------------

# Ranks, flags that must change nothing, and flags of the run of one process as well.
PLANS = [(1, "", "--minibatches 2"), (2, "--plan t2", "--staleness 1"),
         *slow((2, "--data-parallel fsdp", "--lora-rank 2 --staleness 2"),
               (2, "--data-parallel zero1", ""), (2, "--plan p2", "--staleness 1"),
               (1, "", "--forks 2 --fork-turns 1"))]  # fmt: skip


def test_a_task_for_one_thread_is_asked_by_the_main_thread(server, directory, tmp_path):
    """There it may use `signal`, as without an engine. The run is the same, also of two engines."""
    ask = "signal.signal(signal.SIGALRM, signal.SIG_DFL); signal.alarm(9); signal.alarm(0)"
    flags = _task(tmp_path, top="import signal", init="self.threads = False", reply=ask)
    flags += " --staleness 1"
    second = serve(directory)
    for more in ("", f" --engine {server.url},{second.url}"):
        codes, _, err = cli(tmp_path, flags.replace("--out run", f"--out run{bool(more)}") + more)
        assert codes == [0], err
    runs = (read_metrics(tmp_path / name) for name in ("runFalse", "runTrue"))
    assert largest_difference(*runs) < 1e-3
    assert second.version == server.version != "default"
    second.shutdown()


@pytest.mark.parametrize("world, plan, more", PLANS)
def test_ranks_and_plans_push_and_sample_as_one_process(
    run_of, server, tmp_path, world, plan, more,  # noqa: F811
):  # fmt: skip
    flags = f"{SHAPE} --steps 3 --eval-every 2 {more}"
    truth = run_of(flags)
    assert learns_something(truth)
    found = trained(tmp_path, world, f"{flags} {plan} --engine {server.url}")
    assert largest_difference(found, truth) < 1e-12


# Engines that go, and come back ------------------------------------------------------------------


def test_no_engine_at_the_start_is_one_line_and_nothing_is_written(server, tmp_path):
    save_hf(model_of(9, max_position_embeddings=64), tmp_path / "short")
    short = serve(tmp_path / "short")
    (tmp_path / "here").mkdir()
    nobody = f"http://127.0.0.1:{free_port()}"
    words = {
        nobody: f"expected an engine at {nobody}, got: [Errno 111] Connection refused",
        f"{server.url}/v0": f"{server.url}/v0 is neither SGLang nor vLLM with VLLM_SERVER_DEV_MODE",
        f"{server.url},{short.url} --max-new-tokens 64": "exceed the 64 positions of the engine",
    }
    for engines, text in words.items():
        refused(tmp_path / "here", f"{RUN} --engine {engines}", text)
    assert not list((tmp_path / "here").iterdir())
    short.shutdown()


@pytest.mark.parametrize("shown", [{}, {"max_model_len": 16}])
def test_an_engine_may_have_fewer_positions_than_yarn_and_need_not_tell_them(
    server, process_group, monkeypatch, tmp_path, shown
):
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1e4)
    save_hf(model_of(3, rope_parameters={models.FULL: yarn}), tmp_path / "model")
    answer = {"data": [{"id": "stub"} | shown]}
    monkeypatch.setitem(server.answers, "/v1/models", lambda body: answer)
    flags = f"{RUN} --engine {server.url} --model {tmp_path / 'model'} --max-new-tokens 20"
    expected = contextlib.nullcontext()
    if shown:
        expected = pytest.raises(ValueError, match="exceed the 16 positions of the engine")
    with expected:
        set_up(parse_config(flags.split()).check(), make_task)


def _program(rank, directory, port, ready, *die):
    """The stub, which is killed right before a call of a function."""
    if die:
        at(*die, lambda *args: os.kill(os.getpid(), SIGKILL))
    server = Stub(directory, port)
    ready.touch()
    server.serve_forever()


@pytest.fixture
def program(directory, tmp_path):
    """Start the program at a port, on which it may have been killed: program(where, count)."""
    port = free_port()
    started = []

    def program(*die):
        ready = tmp_path / f"engine-{len(started)}"
        started.extend(start(1, _program, directory, port, ready, *die))
        until(ready.exists, "no server", 60)
        return started[-1]

    program.url = f"http://127.0.0.1:{port}"
    yield program
    for process in started:
        process.kill()
        process.join()


GONE = r"(\[Errno (32|104|111)\] .*|Remote end closed connection without response)"


TURN, LOAD, NAME = "generate", "load", "rename"
KILLS = [(1, "", TURN, 60), *slow(
    (2, "--staleness 1", TURN, 60), (1, "", NAME, 2), (2, "--data-parallel fsdp", LOAD, 3))]


@pytest.mark.parametrize("world, more, where, count", KILLS)
def test_a_killed_engine_that_is_started_again_gets_the_weights_again(
    run_of, program, tmp_path, world, more, where, count,  # noqa: F811
):  # fmt: skip
    (tmp_path / "here").mkdir()
    killed = program(f"stub_engine.Stub.{where}", count)
    run = begin(tmp_path / "here", f"{RUN} {more} --out run --engine {program.url}", world)
    assert join([killed]) == [-SIGKILL]
    assert len((tmp_path / "here/run/metrics.jsonl").read_text().splitlines()) < 4
    program()
    codes, _, errs = end(*run)
    assert codes == [0] * world, errs
    found = read_metrics(tmp_path / "here/run")
    assert largest_difference(found, run_of(f"{RUN} {more}")) < 1e-12
    lines = [line for err in errs for line in err.splitlines()]
    assert lines and all(re.fullmatch(f"waiting for the engine at {program.url}: {GONE}", line)
                         for line in lines), errs  # fmt: skip


@pytest.mark.parametrize("world", [1, *slow((2,))])
def test_a_run_without_its_engine_ends_and_can_be_resumed(
    run_of, program, tmp_path, world,  # noqa: F811
):  # fmt: skip
    (tmp_path / "here").mkdir()
    killed = program("stub_engine.Stub.generate", 70)
    flags = f"{RUN} --out run --save-every 1 --engine {program.url} --timeout {world}"
    codes, _, errs = cli(tmp_path / "here", flags, world)
    assert join([killed]) == [-SIGKILL] and codes == [2] * world
    lines = errs[0].splitlines()
    assert re.fullmatch(f"waiting for the engine at {program.url}: {GONE}", lines[0])
    name = f"(rank 0: )?error: (rank [01]: )?the engine at {program.url}(/[a-z0-9_/]+)?"
    assert re.fullmatch(f"{name} does not answer: {GONE}", lines[-1]), errs
    before = read_metrics(tmp_path / "here/run")
    truth = run_of(RUN)
    assert 0 < len(before) < len(truth)
    assert largest_difference(before, truth[: len(before)]) < 1e-12

    program()
    codes, _, errs = cli(tmp_path / "here", "--resume --out run", world)
    assert codes == [0] * world and "waiting" not in errs[0]
    assert largest_difference(read_metrics(tmp_path / "here/run"), truth) < 1e-12


def test_a_second_run_on_an_engine_is_noticed_by_the_first(
    server, tmp_path, process_group, monkeypatch, capsys
):
    first = engine_of(server, tmp_path / "first", seed=5)
    truth = sampled(model_of(5))
    assert same_turn(sampled(first), truth)
    capsys.readouterr()
    second = engine_of(server, tmp_path / "second", seed=6)
    other = f"{server.url} has the weights {first.version}, of a run that must have ended"
    assert capsys.readouterr().err == f"{other}\n"
    assert same_turn(sampled(second), sampled(model_of(6)))
    said = (f"another run uses {server.url}: it has the weights {second.version} and not "
            f"{first.version}; give each run an engine")  # fmt: skip
    row = models.Row(PROMPT, DRAWS)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        first.generate([row], max_new_tokens=6)
    assert row.tokens == PROMPT
    with pytest.raises(ValueError, match="another run uses .* give each run an engine$"):
        first.push(model_of(5), None, 1)
    assert same_turn(sampled(second), sampled(model_of(6)))


def test_a_proxy_is_not_asked(server, tmp_path):
    (tmp_path / "here").mkdir()
    dead = f"http://127.0.0.1:{free_port()}"
    proxies = {name: dead for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")}
    proxies |= dict(NO_PROXY="", no_proxy="")
    flags = f"{RUN} --steps 1 --engine {server.url}".split()
    code, out, err = as_script("full", *flags, cwd=tmp_path / "here", **proxies)
    assert code == 0 and "eval/solved" in out and "waiting" not in err


# Answers that are wrong ------------------------------------------------------------------------


def turn(change):
    """A fault: change(tokens, entries of their log-probs, choice) makes a turn a wrong turn."""

    def spoil(handler, answer):
        (choice,) = answer["choices"]
        change(choice["token_ids"], choice["logprobs"]["content"], choice)
        handler.good(answer)

    return spoil


def raw(text, code=200, **headers):
    """A fault: bytes instead of an answer."""

    def spoil(handler, answer):
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(text)

    return spoil


def first_token(token):
    return turn(lambda tokens, entries, choice: tokens.__setitem__(0, token))


def first_logprob(logprob):
    return turn(lambda tokens, entries, choice: entries[0].update(logprob=logprob))


def versions(*names):
    spans = [{"version": name} for name in names]
    return turn(lambda tokens, entries, choice: choice.update(weight_versions=spans))


def hang(handler, answer):
    handler.server.hung.wait(20)


# A fault and what is said of it. The turn is of 4 tokens, of which the last is the end token 10.
WRONG, BROKEN = "after 4 attempts: ", "failed 8 times: "
ONE_TO_SIX = f"{WRONG}expected 1 to 6 tokens, each with a log-prob, got "
SHORT = f"{WRONG}expected 6 tokens, or up to one of [END], got ["
ODD = f"{WRONG}expected a turn, got "
IDS = f"{WRONG}expected token ids under 12, got ["
VERSION = f"{WRONG}expected tokens by the weights RUN, got ["
NUMBERS = f"{WRONG}expected log-probs that are numbers, got ["
FAULTS = {
    "one token too few": (turn(lambda t, e, c: (t.pop(), e.pop())), SHORT),
    "one after the end": (turn(lambda t, e, c: (t.append(0), e.append(e[0]))), SHORT),
    "twice the tokens": (turn(lambda t, e, c: (t.extend(t), e.extend(e))), f"{ONE_TO_SIX}8 and 8"),
    "no token": (turn(lambda t, e, c: (t.clear(), e.clear())), f"{ONE_TO_SIX}0 and 0"),
    "one log-prob too few": (turn(lambda t, e, c: e.pop()), f"{ONE_TO_SIX}4 and 3"),
    "an id past the vocabulary": (first_token(12), f"{IDS}12, "),
    "a negative id": (first_token(-1), f"{IDS}-1, "),
    "true for an id": (first_token(True), f"{IDS}True, "),
    "NaN": (first_logprob(math.nan), f"{NUMBERS}nan, "),
    "infinity": (first_logprob(math.inf), f"{NUMBERS}inf, "),
    "null": (first_logprob(None), f"{NUMBERS}None, "),
    "another version": (versions("b-1"), f"{VERSION}'b-1']"),
    "two versions": (versions("b-1", "c"), f"{VERSION}'b-1', 'c']"),
    "another shape": (raw(b'{"choices": [[]]}'), f"{ODD}TypeError "),
    "no field": (raw(b'{"text": "hm"}'), f"{ODD}KeyError 'choices' in "),
    "a list": (raw(b"[1, 2]"), f"{BROKEN}expected a JSON object, got b'[1, 2]'"),
    "a page": (raw(b"<html>"), f"{BROKEN}Expecting value: line 1 column 1 (char 0)"),
    "no UTF-8": (raw(b"\xff\xfe\xff"), f"{BROKEN}'utf-16"),
    "a deep nest": (raw(b"[" * 99999), f"{BROKEN}maximum recursion depth exceeded"),
    "500": (raw(b'{"error":\n"no room"}', 500), f'{BROKEN}500 {{"error": "no room"}}'),
    "503": (raw(b"loading", 503), "does not answer: 503 loading"),
    "429": (raw(b"", 429), "does not answer: 429"),
    "half an answer": (raw(b'{"ch', Content_Length="99"), f"{BROKEN}Unterminated string"),
    "a closed connection": (lambda handler, answer: None, "does not answer: Remote end closed"),
    "a hang": (hang, "does not answer: timed out"),
    "404": (raw(b"no", 404), "REFUSES404 no"),
    "a redirect": (raw(b"", 307, Location="/v1/models"), "REFUSES307"),
}  # fmt: skip
ENDS_A_RUN = "404", "a redirect"


class Clock:
    """The time for full/learn/engine.py: it passes where it sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(scope="module")
def spoiled(directory, tmp_path_factory, process_group):
    """An Engine whose server spoils some answers; its server, and a turn that has not been."""
    server = serve(directory)
    engine = engine_of(server, tmp_path_factory.mktemp("weights"))
    tokens, _ = sampled(model_of(5))
    assert tokens[3] not in tokens[:3]
    yield engine, server, sampled(model_of(5), end=tokens[3:4])
    server.shutdown()


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_answer_is_named_and_a_later_right_one_is_taken(
    spoiled, monkeypatch, capsys, name
):
    spoil, text = FAULTS[name]
    engine, server, truth = spoiled
    end_token = truth[0][-1]
    monkeypatch.setattr(engine_py, "time", Clock())
    monkeypatch.setattr(engine, "timeout", 0.4 if name == "a hang" else 20)
    server.hung = threading.Event()
    left = []  # answers that will be spoiled

    def some(handler, answer):
        is_turn = handler.path == VLLM.path
        (spoil if is_turn and left and left.pop() else Handler.good)(handler, answer)

    monkeypatch.setattr(server, "spoil", some)
    if name not in ENDS_A_RUN:
        left[:] = [1]
        assert same_turn(sampled(engine, end=(end_token,)), truth) and not left

    left[:] = [1] * 1000
    capsys.readouterr()
    row = models.Row(PROMPT, DRAWS)
    with pytest.raises((ValueError, ConnectionError)) as caught:
        engine.generate([row], max_new_tokens=6, temperature=0.9, end=(end_token,))
    server.hung.set()
    problem = f"{caught.value}"
    url = re.escape(server.url)
    text = text.replace("END", str(end_token)).replace("RUN", engine.version)
    prefix = f"the engine at {url}({VLLM.path})? "
    if "REFUSES" in text:
        prefix, text = f"the engine refuses {url}{VLLM.path}: ", text.removeprefix("REFUSES")
    elif WRONG in text:
        prefix = f"the engine at {url}, "
    assert re.match(prefix + re.escape(text), problem) and "\n" not in problem, problem
    assert len(problem) < 450
    assert row.tokens == PROMPT and len(row.logprobs) == 2

    # While it waits, one line says so.
    waits = "failed" in text or "does not answer" in text
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == waits and all(line.startswith("waiting for the ") for line in lines)


def test_a_log_prob_of_minus_infinity_is_taken_and_will_leave_the_loss(spoiled, monkeypatch):
    engine, server, (tokens, logprobs) = spoiled
    monkeypatch.setattr(server, "spoil", first_logprob(-math.inf))
    found, taken = sampled(engine, end=tokens[-1:])
    assert found == tokens and taken[0] == -math.inf and same_turn((found[1:], taken[1:]),
                                                                   (tokens[1:], logprobs[1:]))


# The dialects: recorded shapes -------------------------------------------------------------------
# vLLM 0.32: entrypoints/scale_out/token_in_token_out/protocol.py and serving.py (turns),
# entrypoints/rl/online/api_router.py (pause, versions), entrypoints/serve/dev/rpc/api_router.py
# and entrypoints/serve/dev/cache/api_router.py (loads), outputs.py (WeightVersionSpan). The answer
# was written by vLLM's own classes.

VLLM_ANSWER = """{"request_id": "x", "model": "m", "created": 1, "usage": {"prompt_tokens": 3,
    "total_tokens": 5, "completion_tokens": 2}, "prompt_logprobs": null, "metrics": null,
    "output_mode": "tokens", "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": 2,
    "token_ids": [504, 2], "routed_experts": null, "sampling_mask": null,
    "weight_versions": [{"version": "9f3c51aa-12", "start": 0, "end": 2}],
    "logprobs": {"content": [
        {"token_id": 504, "logprob": -0.57, "rank": 1,
         "top_logprobs": [{"token_id": 504, "logprob": -0.57, "rank": 1}]},
        {"token_id": 2, "logprob": -9999.0, "rank": null, "top_logprobs": []}]}}]}"""


def test_what_vllm_is_asked_and_answers():
    assert VLLM.request([1, 9, 8], 12, 0.7, [2], 5) == {
        "token_ids": [1, 9, 8],
        "sampling_params": {
            "max_tokens": 12, "temperature": 0.7, "seed": 5, "logprobs": 0, "stop_token_ids": [2],
            "ignore_eos": True, "detokenize": False},
    }  # fmt: skip
    answer = json.loads(VLLM_ANSWER)
    assert VLLM.read(answer) == ([504, 2], [-0.57, -math.inf], {"9f3c51aa-12"})
    # Aborted before its first token: vLLM gives no span then.
    (choice,) = answer["choices"]
    choice |= {"finish_reason": "abort", "token_ids": [], "logprobs": {"content": []}}
    for spans in ([], None):
        assert VLLM.read({"choices": [choice | {"weight_versions": spans}]}) == ([], [], set())
    assert VLLM.load("/runs/w", "9f3c51aa-12") == [
        ("/pause?mode=abort", {}), ("/update_weight_version", {"new_version": "9f3c51aa-12"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/runs/w"}}),
        ("/reset_prefix_cache", {}), ("/resume", {})]  # fmt: skip


# SGLang 0.5.23, below python/sglang: api/v1/api_types.py (which fields a request may have),
# srt/managers/schedule_batch.py (ends of a turn), srt/managers/tokenizer_manager.py (meta_info),
# srt/utils/weight_versions.py, srt/managers/io_struct.py (loads), srt/entrypoints/http_server.py.

SGLANG_ANSWER = """{"text": "", "output_ids": [504, 2], "meta_info": {"id": "x", "prompt_tokens": 3,
    "finish_reason": {"type": "stop", "matched": 2}, "completion_tokens": 2, "cached_tokens": 0,
    "num_retractions": 0, "reasoning_tokens": 0, "weight_version": "9f3c51aa-12",
    "weight_versions": [{"version": "9f3c51aa-11", "start": 0, "end": 1},
                        {"version": "9f3c51aa-12", "start": 1, "end": 2}],
    "input_token_logprobs": [], "output_token_logprobs": [[-0.57, 504, null], [-0.01, 2, null]],
    "output_token_logprobs_length": 2, "e2e_latency": 0.1}}"""


def test_what_sglang_is_asked_and_answers():
    # With `ignore_eos` SGLang would go on past stop_token_ids, too: `_check_token_based_finish`.
    assert SGLang.request([1, 9, 8], 12, 0.7, [2], 5) == {
        "input_ids": [1, 9, 8], "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 12, "temperature": 0.7, "sampling_seed": 5, "stop_token_ids": [2],
            "top_p": 1.0, "top_k": -1},
    }  # fmt: skip
    answer = json.loads(SGLANG_ANSWER)
    turn = [504, 2], [-0.57, -0.01]
    assert SGLang.read(answer) == (*turn, {"9f3c51aa-11", "9f3c51aa-12"})
    del answer["meta_info"]["weight_versions"]  # as of an older SGLang
    assert SGLang.read(answer) == (*turn, {"9f3c51aa-12"})
    load = {"model_path": "/runs/w", "weight_version": "9f3c51aa-12", "flush_cache": True}
    assert SGLang.load("/runs/w", "9f3c51aa-12") == [
        ("/pause_generation", {"mode": "abort"}), ("/update_weights_from_disk", load),
        ("/continue_generation", {})]  # fmt: skip


def test_an_engine_of_sglangs_dialect_is_recognized(server, directory, process_group):
    other = serve(directory)
    other.answers = {SGLang.info: other.answers[VLLM.info],
                     "/v1/models": other.answers["/v1/models"]}  # fmt: skip
    model = model_of(5).to("meta")
    assert Engine(Config(engine=other.url), model).dialect is SGLang
    assert Engine(Config(engine=server.url), model).dialect is VLLM
    with pytest.raises(ValueError, match="^expected engines of one kind, got "):
        Engine(Config(engine=f"{other.url},{server.url}"), model)
    other.shutdown()


# Audits: what an engine draws is its own, and all else is held to the definition ----------------

AUDITED = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 4 --prompts 2 --group 6 "
AUDITED += "--lr 0.02 --lr-warmup 0 --lr-decay constant --eval-every 2 --eval-prompts 3 --out run "
AUDITED += "--seed 1 --save-every 1 --keep 9 --log-rollouts all --steps"
AUDITED_RUN = f"{AUDITED} 4 --dtype float64 --kl-coef 0.05 --staleness 1 --minibatches 2"


@pytest.fixture
def copied(straight, server, tmp_path):
    """copied(flags, world): a copy of a run with the engine, which is made once."""
    def copy_of(flags=AUDITED_RUN, world=1):
        run = straight(f"{flags} --engine {server.url}", world)
        return Path(shutil.copytree(run, tmp_path / "run"))

    return copy_of


MORE = [
    ("--plan t2 --staleness 1", 2), ("--dynamic-sampling --entropy-coef 0", 1),
    ("--dtype float64 --forks 2 --fork-turns 1", 1),
    ("--generator-dtype bfloat16 --proximal --importance-cap 2", 1),
    ("--proximal --minibatches 1", 1),
]
MORE = slow(*((f"{AUDITED} 3 {flags}", world) for flags, world in MORE))


@pytest.mark.parametrize("flags, world", [(AUDITED_RUN, 1), *MORE])
def test_a_run_with_an_engine_is_audited(copied, process_group, flags, world):
    report = audited(copied(flags, world), 2)
    assert_right(report)
    assert "so no draw is compared" in "\n".join(report.intro)
    apart = {row.key: row.difference for row in report.rows}
    assert apart.pop("sampling/surprise") > 0 and {"sampling", "parameters"} < {*apart}
    assert max(apart.values()) < 1e-12 or "float64" not in flags
    # Of one minibatch `old` is the policy itself, in the audit as in the run: no ratio is off.
    distance = {row.key: row.distance for row in report.rows}
    assert distance["ratio/max"] == 0 or "--minibatches 1" not in flags


CHANGES = {  # what is changed, and the first row that must be outside
    "a log-prob": (in_rollout("logprobs"), "sampling"),
    "a token that is not masked": (in_rollout("sampled", lambda x: 0), "rollouts/sampled"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(copied, process_group, name):
    change, key = CHANGES[name]
    run = copied()
    change(run)
    assert audited(run, 2).verdict == f"audit of step 2: {key} is outside"


SLIPS = {  # by what the engine multiplies the temperature, and the verdict
    "none": (1.0, "ok"), "greedy": (0.0, "sampling/surprise is outside"),
    "another temperature": (1.15, "sampling/mean is outside"),
}  # fmt: skip


@pytest.mark.parametrize("name", shortened(SLIPS, "none", "greedy"))
def test_a_slip_of_the_engine_is_named(server, process_group, tmp_path, monkeypatch, name):
    """With a model that prefers some tokens: an even choice is the same at any temperature."""
    model = model_of(9, num_hidden_layers=1)
    with torch.no_grad():
        model.head_weight.mul_(30)
    save_hf(model, tmp_path / "model")
    factor, verdict = SLIPS[name]
    real = models.sample

    def sample(logits_BV, uniform_B, *, temperature):
        return real(logits_BV, uniform_B, temperature=factor * temperature)

    with monkeypatch.context() as patch:
        patch.setattr(models, "sample", sample)
        good(tmp_path, f"--size 3 --turns 3 --device cpu --prompts 4 --group 6 --steps 1 --out run "
             f"--model model --generator-dtype bfloat16 --engine {server.url}")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert audited("run", 0).verdict == f"audit of step 0: {verdict}"
