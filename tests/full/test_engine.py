"""Generation behind a URL: a run with `--engine` and the stub is the run without an engine.

The stub is in this process, or in one that is killed, and the ranks are others. What an engine may
answer: test_engine_answers.py. Real vLLM: test_vllm.py.
"""

import copy
import os
import re
from signal import SIGKILL

import numpy as np
import pytest
from conftest import slow
from stub_engine import Stub, turns_of
from test_ranks import SHAPE, as_script, join, largest_difference, learns_something, read_metrics
from test_ranks import run_of  # noqa: F401, a fixture
from test_ranks import start, trained
from test_run import _task, at, begin, cli, end, free_port, refused, until

import models
from full.config import Config
from full.engine import Engine
from full.generate import generate
from full.hf import save_hf
from full.model_config import ModelConfig
from full.transformer import Transformer

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
         *slow((1, "", "--staleness 2"), (2, "--data-parallel fsdp", "--staleness 1"),
               (2, "--data-parallel zero1", ""), (2, "--plan p2", "--staleness 1"),
               (2, "--plan c2", ""), (1, "", "--lora-rank 2 --kl-coef 0.05"),
               (2, "--plan t2 --data-parallel fsdp", "--lora-rank 2 --staleness 1"),
               (1, "", "--forks 2 --fork-turns 1 --advantage per_branch"))]  # fmt: skip


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
        f"{server.url}/v0": f"{server.url}/v0 is no SGLang, and no vLLM with VLLM_SERVER_DEV_MODE",
        f"{server.url},{short.url} --max-new-tokens 64": "exceed the 64 positions of the engine",
    }
    for engines, text in words.items():
        refused(tmp_path / "here", f"{RUN} --engine {engines}", text)
    assert not list((tmp_path / "here").iterdir())
    short.shutdown()


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
    (2, "", TURN, 60), (2, "--staleness 1", TURN, 60), (1, "", LOAD, 3), (1, "", NAME, 2),
    (2, "--data-parallel fsdp", LOAD, 3), (1, "--staleness 2", "pause", 3))]  # fmt: skip


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
    flags = f"{RUN} --out run --save-every 1 --engine {program.url} --timeout 2"
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
