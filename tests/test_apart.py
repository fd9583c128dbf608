"""`--plan A+B`: generators on ranks of their own make the run of one process, and end with it.

The truth is one process with the same --staleness, which tests/test_staleness.py holds against the
schedule. Here the two sides work at the same time, and every metric must be the same.
"""

import os
import re
import signal
import threading
import time

import measure_apart
import pytest
import torch
import torch.distributed as dist
from conftest import LOOKUP, shortened, slow
from test_audit import audited
from test_faults import fails, is_started_again
from test_plan_run import SHAPE, mixture  # noqa: F401, a fixture
from test_ranks import largest_difference, learns_something, read_metrics
from test_ranks import run_of  # noqa: F401, a fixture
from test_run import (
    FLAGS, TINY, _main, begin, cli, contents, end, good, json_lines, refused, struck,
    until, wait_for_steps,
)  # fmt: skip

import parallel
import train_grpo
from parallel import checkpoints

WHOLE = f"{SHAPE} --eval-every 2 --timeout 20"
OF_ENDLESS = f"{FLAGS} 100000 --staleness 1 --timeout 3 --plan"
SIZES = {parallel.GENERATOR: 1, parallel.TRAINER: 1}


def two_runs(tmp_path, *runs):
    """The directories of runs, each given as its number of ranks and its flags."""
    for n, (world, flags) in enumerate(runs):
        (tmp_path / f"{n}").mkdir()
        good(tmp_path / f"{n}", f"{flags} --out run", world)
    return [tmp_path / f"{n}" / "run" for n in range(len(runs))]


PLANS = {
    "d1+d1": 2, "d2+d1": 3, "d1+d2": 3, "d2+d2 --data-parallel zero1": 4,
    "d1+d2 --data-parallel fsdp": 3, "d1+t2": 3, "d1+c2 --cp-method ulysses": 3,
    "d1+p2 --pp-schedule zbv": 3, "d2+d1t2 --tree sparse": 4, "t2+d1": 3,
    "t2+d2 --data-parallel fsdp": 4, "d1+archon:d2 --tree dta --chunk-tokens 9": 3,
}  # fmt: skip
EVERY = [("d1+d1", 0, 3), ("d1+d1", 1, 3), ("d1+d1", 2, 3), ("t2+d1", 1, 3)]
EVERY += slow(*((name, K, 20) for name in PLANS for K in (0, 1, 2)))


@pytest.mark.parametrize("plan, K, steps", EVERY)
def test_two_sides_make_the_run_of_one_process(run_of, tmp_path, plan, K, steps):  # noqa: F811
    flags = f"{WHOLE} --staleness {K} --steps {steps}"
    good(tmp_path, f"{flags} --out run --plan {plan}", PLANS[plan])
    found, truth = read_metrics(tmp_path / "run"), run_of(flags)
    assert learns_something(truth) and largest_difference(found, truth) < 1e-8
    assert [line["policy/age_max"] for line in found] == [min(s, K) for s in range(steps)]
    assert not checkpoints(tmp_path / "run", "tmp") and (tmp_path / "run" / "hf").exists()


EXPERTS = "--model MIXTURE --balance-coef 0.1"
OPTIONS = {  # the ranks, their plan, and what both runs have
    "a critic": (2, "d1+d1", "--advantage gae"),
    "KL in the reward": (
        2, "d1+d1", "--kl-coef 0.1 --kl-in reward --clip-low 0.9 --clip-high 9"),
    "decoupled": (2, "d1+d1", "--proximal --importance-cap 2"),
    "demonstrations": (2, "d1+d1", f"--task {LOOKUP} --size 2 --demos 2 --kl-coef 0.1"),
    "dynamic sampling, forks": (
        2, "d1+d1", "--dynamic-sampling --max-rounds 2 --entropy-coef 0 --forks 2 --fork-turns 1"),
    "more trainers than groups": (4, "d1+d3", "--prompts 2"),
    "sampled in bfloat16": (2, "d1+d1", "--generator-dtype bfloat16"),
    "masters": (2, "d1+d1", "--compute-dtype float32 --generator-dtype float64"),
    "experts": (3, "d1+d2e2", f"{EXPERTS} --staleness 0"),
    "experts with votes": (3, "d1+d2e2", f"{EXPERTS} --staleness 2 --router-bias-rate 0.05"),
    "experts that sample": (3, "d2e2+d1", EXPERTS),
    "experts and stages": (4, "t2e2+d1p2", EXPERTS),
}  # fmt: skip


@pytest.mark.parametrize("name", shortened(OPTIONS, "demonstrations"))
def test_options_make_the_run_of_one_process_too(mixture, tmp_path, name):  # noqa: F811
    world, plan, more = OPTIONS[name]
    flags = f"{WHOLE} --staleness 1 --steps 4 {more.replace('MIXTURE', str(mixture))}"
    if "--model" in flags:
        flags = flags.replace("--layers 4 --hidden 16 --heads 4", "")
    runs = two_runs(tmp_path, (world, f"{flags} --plan {plan}"), (1, flags))
    # rounding to bfloat16 may turn a bit of the weights around
    bound = 1e-4 if name == "sampled in bfloat16" else 1e-8
    assert largest_difference(*map(read_metrics, runs)) < bound
    for file, key in (("samples", "text"), ("rollouts", "tokens")):
        lines = [[line[key] for line in json_lines(run / f"{file}.jsonl")] for run in runs]
        assert lines[0] == lines[1] and lines[0]


def test_a_run_goes_on_apart_and_together(run_of, tmp_path):  # noqa: F811
    """2 steps apart, 2 in one process, 2 apart under another plan: the batches go along."""
    flags = f"{WHOLE} --staleness 2"
    good(tmp_path, f"{flags} --out run --plan d1+d1 --steps 2", 2)
    good(tmp_path, "--resume --out run --steps 4 --plan d1")
    good(tmp_path, "--resume --out run --steps 6 --plan d1+t2", 3)
    found = read_metrics(tmp_path / "run")
    assert largest_difference(found, run_of(f"{flags} --steps 6")) < 1e-8

    # At its last step there is nothing to do but to say what is solved.
    _, out, _ = cli(tmp_path, "--resume --out run --plan d1+d1", 2)
    assert f"eval/solved {found[-1]['eval/solved']:.3f}" in out[1]
    assert read_metrics(tmp_path / "run") == found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_either_side_saves_and_ends_both(tmp_path, victim):
    flags = f"{TINY} --dtype float64 --staleness 1 --timeout 20"
    apart = f"{flags} --out run --plan d1+d1"
    codes, out, err = struck(tmp_path, apart, 2, victim, signal.SIGTERM)
    assert codes == [143, 143], err
    done = int(re.search(r"SIGTERM: saved after (\d+) steps", out[1])[1])
    assert len(read_metrics(tmp_path / "run")) == done
    good(tmp_path, f"--resume --out run --steps {done + 2}", 2)
    runs = tmp_path / "run", *two_runs(tmp_path, (1, f"{flags} --steps {done + 2}"))
    found, truth = map(read_metrics, runs)
    for line in found + truth:
        line.pop("eval/solved", None)  # an interrupted run may evaluate at its own last step
    assert largest_difference(found, truth) < 1e-8


def test_the_audit_takes_a_run_of_two_sides(tmp_path, process_group):
    flags = f"{FLAGS} 5 --save-every 1 --keep 9 --staleness 2 --log-rollouts all --timeout 20"
    good(tmp_path, f"{flags} --plan d1+d2", 3)
    before = contents(tmp_path / "run")
    for step in (0, 3, 4):
        report = audited(tmp_path / "run", step)
        assert report.wrong is None, [row for row in report.rows if not row.ok]
    assert contents(tmp_path / "run") == before


def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _hosted(rank, world, port, cwd, log, flags, store_port):
    """As under torchrun, whose own process has the store."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    _main(rank, world, store_port, cwd, log, flags, None)


@pytest.mark.quick
def test_a_rank_that_shows_no_sign_of_life_is_named():
    sizes = {parallel.GENERATOR: 1, parallel.TRAINER: 1}
    side = parallel.Side(parallel.TRAINER, 0, sizes, store(), timeout=0.2)
    text = r"generator rank 0 \(rank 0 of the run\) is gone or silent for more than 0.2 seconds"
    with pytest.raises(ConnectionError, match=text):
        side.wait_for("what nobody sets")
    side.leaving.set()


# plan, the victim, what is sent, and whom the other side names
LOST = [("d1+d1", 0, signal.SIGKILL, "generator rank 0 (rank 0 of the run)")]
LOST += slow(
    ("d1+d1", 1, signal.SIGKILL, "trainer rank 0 (rank 1 of the run)"),
    ("d1+d1", 0, signal.SIGSTOP, "generator rank 0 (rank 0 of the run)"),
    ("d2+d1", 1, signal.SIGKILL, "generator rank 1 (rank 1 of the run)"),
)
LOST += [("d1+d2", 2, signal.SIGKILL, "trainer rank 1 (rank 2 of the run)")]


@pytest.mark.parametrize("plan, victim, number, named", LOST)
def test_losing_a_rank_ends_the_run_in_time_and_says_which(tmp_path, plan, victim, number, named):
    hosted, world = store(), int(plan[1]) + int(plan[4])
    processes, log = begin(tmp_path, f"{OF_ENDLESS} {plan}", world, die=hosted.port, main=_hosted)
    wait_for_steps(tmp_path / "run", 3)
    os.kill(processes[victim].pid, number)
    lost = time.monotonic()
    for n, process in enumerate(processes):
        if n != victim:
            process.join(30)
    assert time.monotonic() - lost < 15
    processes[victim].kill()
    codes, _, err = end(processes, log, seconds=10)
    assert [code for n, code in enumerate(codes) if n != victim] == [2] * (world - 1)
    of_other_side = err[-1] if victim < int(plan[1]) else err[0]
    assert f"{named} is gone" in of_other_side and "go on with --resume" in of_other_side


def test_losing_the_rank_with_the_store_ends_the_run_too(tmp_path):
    """Without torchrun the store is in rank 0 of the run."""
    done = struck(tmp_path, f"{OF_ENDLESS} d1+d1", 2, 0, signal.SIGKILL)
    said = r"step \d+: .*(store|another rank).* is gone"
    fails(done, None, said, codes=[-signal.SIGKILL, 2])


@pytest.mark.slow  # torchrun itself
@pytest.mark.parametrize("machines, victim", [(1, 0), (1, 1), (2, 1)])
def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path, machines, victim):
    """The ranks that start again find the store of those before them, and nothing in it."""
    flags = f"{TINY} --save-every 2 --dtype float64 --staleness 1 --steps 60"
    is_started_again(tmp_path, machines, victim, f"{flags} --out run --plan d1+d1 --timeout 20", 7)
    runs = tmp_path / "run", *two_runs(tmp_path, (1, flags))
    assert largest_difference(*map(read_metrics, runs)) < 1e-8


BROKEN = """
from train_grpo import Guess
class Mine(Guess):
    def reply(self, state, answer):
        state, reply, reward = super().reply(state, answer)
        return state, reply, float("nan")
"""


def test_an_error_of_one_side_is_the_error_of_both(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    codes, _, err = cli(tmp_path, f"{TINY} --steps 3 --plan d1+d1 --task mine.py:Mine", 2)
    assert codes == [2, 2] and "rank 0: error: Mine gave reward nan" in err[0]
    told = "generator rank 0 (rank 0 of the run) has ended: ValueError: Mine gave reward nan"
    assert told in err[1] and "Traceback" not in err[1]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").touch()
    codes, _, err = cli(tmp_path, f"{FLAGS} 3 --plan d1+d1", 2)
    assert codes == [2, 2] and "rank 1: error: run holds files that are not a run's" in err[1]
    told = "trainer rank 0 (rank 1 of the run) has ended: ValueError: run holds files that are not"
    assert told in err[0] and "--resume" not in err[0]


@pytest.mark.parametrize("world, plan, text", [
    (4, "t3+d1", "divisible by t = 3"), (4, "d1+t3", "divisible by t = 3"),
    (4, "d2+d2 --data-parallel fsdp --shard-ranks 3", "3 ranks that shard must divide d = 2"),
    (3, "d1+d1", "expected 2 ranks, 1 to generate and 1 to train, got 3; start 2 by torchrun"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_leaves_what_is_there(tmp_path, world, plan, text):
    """Of either side: refused by all ranks before --overwrite deletes the run that is there."""
    (tmp_path / "run").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("{}")
    refused(tmp_path, f"{FLAGS} 3 --overwrite --plan {plan}", text, world)
    assert sorted(x.name for x in (tmp_path / "run").iterdir()) == ["config.json", "metrics.jsonl"]


def test_long_messages_go_in_pieces_and_leave_nothing():
    """The store refuses a value of more than 8 MiB."""
    shared = store()
    sides = [parallel.Side(name, 0, SIZES, shared, 10) for name in SIZES]
    value = {"text": "é" * (5 << 20), "number": 0.1}
    sides[0].post("long", value)
    assert sides[1].read("long") == value
    assert len([key for key in shared.list_keys() if key.startswith("long")]) > 2
    sides[1].delete("long")
    assert not [key for key in shared.list_keys() if key.startswith("long")]
    for side in sides:
        side.leaving.set()


def test_an_order_waits_until_every_generator_is_ready():
    """A generator has one copy of the weights, and reads it until it says that it is ready."""
    shared = store()
    side = parallel.Side(parallel.TRAINER, 0, {"generator": 2, "trainer": 1}, shared.clone(), 10)
    sender = parallel.WeightSender(side, None, None, torch.nn.Linear(1, 1))
    sent = threading.Thread(target=sender.send, args=({"version": 1}, False))
    sent.start()
    for rank in range(2):
        time.sleep(0.2)
        assert sent.is_alive() and not any("order" in key for key in shared.list_keys())
        shared.set(f"ready/0/{rank}", "1")
    sent.join(10)
    assert side.read("order/0") == {"version": 1, "weights": False}
    side.leaving.set()


class _Sent:
    """A group of the weights, whose broadcasts fill a tensor with a number."""

    def broadcast(self, whole, source):
        whole.fill_(self.number)
        return self

    def wait(self):
        pass


def test_a_generator_is_ready_again_when_it_has_taken_the_copy():
    shared = store()
    side = parallel.Side(parallel.GENERATOR, 0, SIZES, shared.clone(), 10)
    trainer = parallel.Side(parallel.TRAINER, 0, SIZES, shared.clone(), 10)
    side.weights, model = _Sent(), torch.nn.Linear(1, 1)
    receiver = parallel.WeightReceiver(side, model)
    for number in range(3):
        trainer.wait_for(f"ready/{number}/0")
        side.weights.number = number
        trainer.post(f"order/{number}", {"weights": True})
        until(lambda: receiver.orders, "no order came")
        time.sleep(0.2)
        assert not shared.check([f"ready/{number + 1}/0"])
        receiver.next()
        assert [p.item() for p in model.parameters()] == [number] * 2
    trainer.post("order/3", {"weights": False})
    assert receiver.next() == {"weights": False}
    for one in (side, trainer):
        one.leaving.set()


def test_the_rank_with_the_store_leaves_last():
    """After a good run it waits for all others, and after an error for a moment."""
    shared = store()
    first, other = (parallel.Side(name, 0, SIZES, shared.clone(), 10) for name in SIZES)
    left = threading.Event()
    thread = threading.Thread(target=lambda: (first.finish(), left.set()))
    thread.start()
    shared.set("done/1", "1")
    assert not left.wait(0.3), "the other rank still needs the store"
    other.finish()
    assert left.wait(5)

    # A rank that computes reads the word of the first one a little later, and then leaves.
    shared.delete_key("left/1")
    began = time.monotonic()
    late = threading.Timer(0.4, shared.set, ("left/1", "1"))
    late.start()
    with pytest.raises(KeyError), first.leaving_word():
        raise KeyError("x")
    assert 0.3 < time.monotonic() - began < 3
    with pytest.raises(ConnectionError, match=r"generator rank 0 \(rank 0 .*KeyError: 'x'"):
        other.wait(lambda: False)
    other.leaving.set()


def test_nothing_is_left_in_the_store(tmp_path):
    """Batches, orders, weights and evaluations are deleted once they are read."""
    hosted = store()
    flags = f"{FLAGS} 6 --staleness 1 --plan d2+d1 --timeout 20"
    codes, _, err = cli(tmp_path, flags, 3, die=hosted.port, main=_hosted)
    assert codes == [0, 0, 0], err
    names = [key.split("/")[1] for key in hosted.list_keys() if "/" in key]
    left = [name for name in names if name in ("batch", "order", "ready", "evaluation")]
    # The batch past the last step was sampled and is in the checkpoint; the last order is kept.
    assert {*left} <= {"order", "ready"} and len(left) < 12, left


def _both_slow(rank, world, port, cwd, log, flags, die):
    """Sampling and training of a batch take a fifth of a second, of sleep."""
    for owner, name in ((train_grpo, "collect"), (train_grpo.Trainer, "prepare")):
        original = getattr(owner, name)

        def slowed(*args, original=original, **how):
            time.sleep(0.2)
            return original(*args, **how)

        setattr(owner, name, slowed)
    _main(rank, world, port, cwd, log, flags, die)


@pytest.mark.parametrize("K", [0, 1])
def test_both_sides_work_at_the_same_time(tmp_path, K):
    """With K = 1 a step takes as long as one side needs, with K = 0 as long as both."""
    flags = f"{FLAGS} 8 --staleness {K} --eval-every 100 --plan d1+d1"
    codes, _, err = cli(tmp_path, flags, 2, main=_both_slow)
    assert codes == [0, 0], err
    lines = train_grpo.whole_lines(tmp_path / "run" / "metrics.jsonl")[2:]
    seconds, *waits = (
        sorted(line[f"seconds/{name}"] for line in lines)[2]
        for name in ("total", "wait_rollout", "wait_train"))  # fmt: skip
    if K == 0:
        assert seconds > 0.4 and min(waits) > 0.2
    else:
        assert seconds < 0.35 and max(waits) < 0.1


@pytest.mark.slow  # the only test that looks at times on a shared machine without sleeps in between
def test_the_trace_shows_both_sides_at_work():
    """With K = 0 nobody samples while somebody trains, with K = 1 it is so most of the time."""
    both = {}
    for K in (0, 1):
        generator, trainer = measure_apart.trace(K).splitlines()[1:3]
        assert generator.startswith("generator") and trainer.startswith("trainer")
        pairs = list(zip(generator[10:], trainer[10:]))
        both[K] = pairs.count(("s", "T")) / max(1, len([a for a, _ in pairs if a == "s"]))
    assert both[0] < 0.15 and both[1] > 0.5


@pytest.mark.slow
def test_the_race_is_run(capsys):
    assert measure_apart.main(["race", "--rounds", "1", "--steps", "5"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line[:22].strip() for line in lines] == [*measure_apart.RACERS]
    assert all(float(line[22:].split()[0]) > 0 for line in lines)
