"""`--plan A+B`: generators on ranks of their own make the run of one process, and end with it.

The truth is one process with the same --staleness, which tests/test_staleness.py holds against the
schedule. Here the two sides work at the same time, and every metric must come out the same.
"""

import json
import os
import re
import signal
import threading
import time

import measure_apart
import pytest
import torch
import torch.distributed as dist
from conftest import LOOKUP, shortened
from test_audit import audited
from test_faults import fails, is_started_again
from test_plan_run import SHAPE, mixture  # noqa: F401, a fixture
from test_ranks import largest_difference, learns_something, read_metrics
from test_ranks import run_of  # noqa: F401, a fixture
from test_run import TINY, _main, begin, cli, contents, end, good, same_run, wait_for_steps

import parallel
import train_grpo
from parallel import checkpoints
from train_grpo import parse_config

FLAGS = f"{SHAPE} --eval-every 2 --timeout 20"
OF_ENDLESS = f"{TINY} --out run --staleness 1 --steps 100000 --timeout 3 --plan"
SIZES = {parallel.GENERATOR: 1, parallel.TRAINER: 1}


# The run of one process ------------------------------------------------------------------------


def two_runs(tmp_path, *runs):
    """The directories of runs, each given as its number of ranks and its flags."""
    for n, (world, flags) in enumerate(runs):
        (tmp_path / f"{n}").mkdir()
        good(tmp_path / f"{n}", f"{flags} --out run", world)
    return [tmp_path / f"{n}" / "run" for n in range(len(runs))]


def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


PLANS = {
    "d1+d1": 2,
    "d2+d1": 3,
    "d1+d2": 3,
    "d2+d2 --data-parallel zero1": 4,
    "d1+d2 --data-parallel fsdp": 3,
    "d1+t2": 3,
    "d1+c2 --cp-method ulysses": 3,
    "d1+p2 --pp-schedule zbv": 3,
    "d2+d1t2 --tree sparse": 4,
    "t2+d1": 3,
    "t2+d2 --data-parallel fsdp": 4,
    "d1+archon:d2 --tree dta --max-tokens 9": 3,
}
SHORT = [("d1+d1", 0), ("d1+d1", 1), ("d1+d1", 2), ("t2+d1", 1)]
EVERY = [pytest.param(*case, 3) for case in SHORT]
EVERY += [pytest.param(name, K, 20, marks=pytest.mark.slow) for name in PLANS for K in (0, 1, 2)]


@pytest.mark.parametrize("plan, K, steps", EVERY)
def test_two_sides_make_the_run_of_one_process(run_of, tmp_path, plan, K, steps):  # noqa: F811
    flags = f"{FLAGS} --staleness {K} --steps {steps}"
    good(tmp_path, f"{flags} --out run --plan {plan}", PLANS[plan])
    found, truth = read_metrics(tmp_path / "run"), run_of(flags)
    assert learns_something(truth) and largest_difference(found, truth) < 1e-8
    assert [line["policy/age_max"] for line in found] == [min(s, K) for s in range(steps)]
    assert not checkpoints(tmp_path / "run", "tmp") and (tmp_path / "run" / "hf").exists()


OPTIONS = {
    "a critic": "--advantage gae",
    "KL in the reward": "--kl-coef 0.1 --kl-in reward --clip-low 0.9 --clip-high 9",
    "decoupled": "--proximal --importance-cap 2",
    "demonstrations": f"--task {LOOKUP} --size 2 --demos 2 --kl-coef 0.1",
    "dynamic sampling, forks": (
        "--dynamic-sampling --max-rounds 2 --entropy-coef 0 --forks 2 --fork-turns 1"),
    "more trainers than groups": "--prompts 2 --plan d1+d3",
    "sampled in bfloat16": "--generator-dtype bfloat16",
    "masters": "--compute-dtype float32 --generator-dtype float64",
}  # fmt: skip


@pytest.mark.parametrize("name", shortened(OPTIONS, "demonstrations"))
def test_options_make_the_run_of_one_process_too(tmp_path, name):
    flags, _, plan = f"{FLAGS} --staleness 1 --steps 3 {OPTIONS[name]}".partition(" --plan ")
    plan = plan or "d1+d1"
    runs = two_runs(tmp_path, (4 if "d3" in plan else 2, f"{flags} --plan {plan}"), (1, flags))
    # rounding to bfloat16 may turn a bit of the weights around
    bound = 1e-4 if name == "sampled in bfloat16" else 1e-8
    assert largest_difference(*map(read_metrics, runs)) < bound
    texts = [[json.loads(x)["text"] for x in (run / "samples.jsonl").open()] for run in runs]
    assert texts[0] == texts[1] and texts[0]
    lines = [(run / "rollouts.jsonl").read_text().splitlines() for run in runs]
    tokens = [[json.loads(line)["tokens"] for line in of_run] for of_run in lines]
    assert tokens[0] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize("K, world, plan", [
    (0, 3, "d1+d2e2"), (2, 3, "d1+d2e2 --router-bias-rate 0.05"), (1, 3, "d2e2+d1"),
    (1, 4, "t2e2+d1p2")])  # fmt: skip
def test_experts_are_trained_apart(mixture, tmp_path, K, world, plan):  # noqa: F811
    shape = SHAPE.replace("--layers 4 --hidden 16 --heads 4", f"--model {mixture}")
    flags = f"{shape} --eval-every 2 --staleness {K} --steps 4 --balance-coef 0.1"
    alone = plan.partition(" ")[2]
    runs = two_runs(tmp_path, (world, f"{flags} --plan {plan}"), (1, f"{flags} {alone}"))
    assert largest_difference(*map(read_metrics, runs)) < 1e-8


# Stopped, resumed, audited ---------------------------------------------------------------------


def test_a_run_goes_on_apart_and_together(run_of, tmp_path):  # noqa: F811
    """2 steps apart, 2 in one process, 2 apart under another plan: the batches go along."""
    flags = f"{FLAGS} --staleness 2"
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
    flags = f"{TINY} --out run --dtype float64 --staleness 1 --timeout 20 --steps"
    processes, log = begin(tmp_path, f"{flags} 100000 --plan d1+d1", world=2)
    wait_for_steps(tmp_path / "run", 3)
    os.kill(processes[victim].pid, signal.SIGTERM)
    codes, out, err = end(processes, log, seconds=60)
    assert codes == [143, 143], err
    done = int(re.search(r"SIGTERM: saved after (\d+) steps", out[1])[1])
    assert len(read_metrics(tmp_path / "run")) == done
    good(tmp_path, f"--resume --out run --steps {done + 2}", 2)
    (one,) = two_runs(tmp_path, (1, f"{flags} {done + 2}"))
    runs = [read_metrics(run) for run in (tmp_path / "run", one)]
    for line in (*runs[0], *runs[1]):
        line.pop("eval/solved", None)  # an interrupted run may evaluate at its own last step
    assert largest_difference(*runs) < 1e-8


@pytest.mark.slow  # tests/test_staleness.py kills a run of one process
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """Both sides die in a step; from the checkpoint on it is the same run, and so is the audit."""
    flags = f"{TINY} --save-every 2 --staleness 1 --steps 6 --plan d1+d1 --timeout"
    at = "train_grpo.RolloutQueue.get", 4
    codes, _, _ = cli(tmp_path, f"{flags} 5 --out run", 2, die=at)
    assert codes[1] == -signal.SIGKILL and codes[0] == 2
    good(tmp_path, "--resume --out run --timeout 20", 2)
    same_run(tmp_path / "run", *two_runs(tmp_path, (2, f"{flags} 20")))


def test_the_audit_takes_a_run_of_two_sides(tmp_path, process_group):
    flags = f"{TINY} --out run --save-every 1 --keep 9 --staleness 2 --log-rollouts all --steps 5"
    good(tmp_path, f"{flags} --plan d1+d2 --timeout 20", 3)
    before = contents(tmp_path / "run")
    for step in (0, 3, 4):
        report = audited(tmp_path / "run", step)
        assert report.wrong is None, [row for row in report.rows if not row.ok]
    assert contents(tmp_path / "run") == before


# Lost ranks, errors ----------------------------------------------------------------------------


def _hosted(rank, world, port, cwd, log, flags, store_port):
    """As under torchrun, whose own process has the store."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    _main(rank, world, store_port, cwd, log, flags, None)


LOST = [  # plan, ranks, victim, what is sent, and what the others say
    ("d1+d1", 2, 0, signal.SIGKILL, "generator rank 0 (rank 0 of the run) is gone"),
    ("d1+d1", 2, 1, signal.SIGKILL, "trainer rank 0 (rank 1 of the run) is gone"),
    ("d1+d1", 2, 0, signal.SIGSTOP, "generator rank 0 (rank 0 of the run) is gone"),
    ("d2+d1", 3, 1, signal.SIGKILL, "generator rank 1 (rank 1 of the run) is gone"),
    ("d1+d2", 3, 2, signal.SIGKILL, "trainer rank 1 (rank 2 of the run) is gone"),
]
SOME_LOST = [pytest.param(*case, marks=[pytest.mark.slow] * (n in (1, 2, 3)))
             for n, case in enumerate(LOST)]  # fmt: skip


@pytest.mark.parametrize("plan, world, victim, number, text", SOME_LOST)
def test_losing_a_rank_ends_the_run_in_time_and_says_which(
    tmp_path, plan, world, victim, number, text
):
    hosted = store()
    processes, log = begin(tmp_path, f"{OF_ENDLESS} {plan}", world, die=hosted.port, main=_hosted)
    wait_for_steps(tmp_path / "run", 3)
    os.kill(processes[victim].pid, number)
    lost = time.monotonic()
    others = [process for n, process in enumerate(processes) if n != victim]
    for process in others:
        process.join(30)
    assert time.monotonic() - lost < 15
    processes[victim].kill()
    codes, _, err = end(processes, log, seconds=10)
    assert [code for n, code in enumerate(codes) if n != victim] == [2] * (world - 1)
    of_other_side = err[-1] if victim < int(plan[1]) else err[0]
    assert text in of_other_side and "go on with --resume" in of_other_side


def test_losing_the_rank_with_the_store_ends_the_run_too(tmp_path):
    """Without torchrun the store is in rank 0 of the run."""
    processes, log = begin(tmp_path, f"{OF_ENDLESS} d1+d1", 2)
    wait_for_steps(tmp_path / "run", 3)
    processes[0].kill()
    said = r"step \d+: .*(store|another rank).* is gone"
    fails(end(processes, log, seconds=30), None, said, codes=[-signal.SIGKILL, 2])


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
    codes, _, err = cli(tmp_path, f"{TINY} --out run --steps 3 --plan d1+d1", 2)
    assert codes == [2, 2] and "rank 1: error: run holds files that are not a run's" in err[1]
    told = "trainer rank 0 (rank 1 of the run) has ended: ValueError: run holds files that are not"
    assert told in err[0] and "--resume" not in err[0]


@pytest.mark.parametrize("flags, text", [
    ("--plan d1+d1+d1", "A|B and A+B have two plans, the generator's and the trainer's"),
    ("--plan d1|d1+d1", "A|B and A+B have two plans, the generator's and the trainer's"),
    ("--plan p2+d1", "a generator has d, t and e, and no p"),
])  # fmt: skip
def test_other_plans_are_refused(flags, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_config(flags.split()).check()


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_is_refused_by_all(tmp_path, world):
    codes, _, err = cli(tmp_path, f"{TINY} --out run --steps 3 --plan d1+d1", world)
    expected = f"expected 2 ranks, 1 to generate and 1 to train, got {world}; start 2 by torchrun"
    assert codes == [2] * world and all(expected in text for text in err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("plan, text", [
    ("t3+d1", "divisible by t = 3"), ("d1+t3", "divisible by t = 3"),
    ("d2+d2 --data-parallel fsdp --shard-ranks 3", "3 ranks that shard must divide d = 2"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_the_model_leaves_what_is_there(tmp_path, plan, text):
    """Of either side: refused by all ranks before --overwrite deletes the run that is there."""
    (tmp_path / "run").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("{}")
    done = cli(tmp_path, f"{TINY} --out run --overwrite --steps 3 --plan {plan}", 4)
    fails(done, f".*{text}", codes=[2] * 4)
    assert sorted(x.name for x in (tmp_path / "run").iterdir()) == ["config.json", "metrics.jsonl"]


# Messages, and who waits -----------------------------------------------------------------------


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
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    side = parallel.Side(parallel.TRAINER, 0, {"generator": 2, "trainer": 1}, store.clone(), 10)
    sender = parallel.WeightSender(side, None, None, torch.nn.Linear(1, 1))
    sent = threading.Thread(target=sender.send, args=({"version": 1}, False))
    sent.start()
    for rank in range(2):
        time.sleep(0.2)
        assert sent.is_alive() and not any("order" in key for key in store.list_keys())
        store.set(f"ready/0/{rank}", "1")
    sent.join(10)
    assert side.read("order/0") == {"version": 1, "weights": False}
    side.leaving.set()


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
    flags = f"{TINY} --out run --staleness 1 --steps 6 --plan d2+d1 --timeout 20"
    codes, _, err = end(*begin(tmp_path, flags, 3, die=hosted.port, main=_hosted))
    assert codes == [0, 0, 0], err
    names = [key.split("/", 1)[1] for key in hosted.list_keys() if "/" in key]
    left = [name for name in names if re.match(r"(batch|order|ready|evaluation)/", name)]
    # The batch past the last step was sampled and is in the checkpoint; the last order is kept.
    assert {name.split("/")[0] for name in left} <= {"order", "ready"}, left
    assert len(left) < 12, left


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
    flags = f"{TINY} --out run --staleness {K} --steps 8 --eval-every 100 --plan d1+d1"
    codes, _, err = end(*begin(tmp_path, flags, 2, main=_both_slow))
    assert codes == [0, 0], err
    lines = train_grpo.whole_lines(tmp_path / "run" / "metrics.jsonl")[2:]
    seconds, *waits = (
        sorted(line[f"seconds/{name}"] for line in lines)[2]
        for name in ("total", "wait_rollout", "wait_train"))  # fmt: skip
    if K == 0:
        assert seconds > 0.4 and min(waits) > 0.2
    else:
        assert seconds < 0.35 and max(waits) < 0.1


def test_a_picture_says_what_was_done_for_longest():
    events = [("T", 0.0, 4.0), ("p", 3.0, 4.0), (".", 3.0, 3.9), ("s", 5.0, 5.6)]
    assert measure_apart.picture(events, 0.0, 8.0, width=8) == "TTT. s  "
    assert measure_apart.picture(events[:2], 0.0, 4.0, width=2) == "TT"


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
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last["race"]) == set(measure_apart.RACERS) and min(last["race"].values()) > 0
