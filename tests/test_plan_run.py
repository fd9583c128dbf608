"""Whole training runs under plans: the metrics of one process, in float64.

Three steps here, with old log-probs, an evaluation and AdamW's moments; behind `-m slow` twenty.
In the default suite test_a_run_goes_on_under_another_plan has eight, two under each of four.
"""

import pytest
from conftest import shortened
from test_ranks import (
    TASK,
    _train,
    largest_difference,
    learns_something,
    ranks,
    read_metrics,
    run_of,  # noqa: F401, a fixture
    trained,
)

import models

SHAPE = f"{TASK} --layers 4 --hidden 16 --heads 4 --lr 0.005"

RUNS = {
    "d2": (2, "--plan d2"),
    "d2 zero1": (2, "--data-parallel zero1"),
    "t2": (2, "--plan t2"),
    "c2": (2, "--plan c2"),
    "c2 ulysses": (2, "--plan c2 --cp-method ulysses"),
    "p2": (2, "--plan p2"),
    "p2 zbv": (2, "--plan p2 --pp-schedule zbv"),
    "p2 interleaved": (2, "--plan p2 --pp-schedule interleaved1f1b"),
    "d2t2": (4, "--plan d2t2"),
    "d2t2 fsdp": (4, "--plan d2t2 --data-parallel fsdp"),
    "d2c2 zero1": (4, "--plan d2c2 --data-parallel zero1"),
    "d2p2": (4, "--plan d2p2"),
    "t2c2": (4, "--plan t2c2 --cp-method allgather"),
    "p2t2": (4, "--plan p2t2"),
    "2 ranks offload": (2, "--data-parallel fsdp --offload --ac layers"),
    "4 ranks hsdp": (4, "--data-parallel fsdp --shard-ranks 2"),
    "d2c2 hsdp": (4, "--plan d2c2 --data-parallel fsdp --shard-ranks 1"),
    "c4 usp": (4, "--plan c4 --cp-method usp"),
    "d2 compile": (2, "--plan d2 --compile"),
    "2 ranks compile fsdp": (2, "--data-parallel fsdp --compile --ac full"),
}


@pytest.fixture(scope="module")
def one_process(run_of):  # noqa: F811
    """steps -> flags of a run of so many steps, and its metrics in one process."""

    def run(steps):
        flags = f"{SHAPE} --steps {steps} --eval-every {2 if steps < 20 else 5}"
        assert learns_something(run_of(flags))
        return flags, run_of(flags)

    return run


# d2, p2, t2 with FSDP2 and ZeRO-1 have their steps in test_a_run_goes_on_under_another_plan, of the
# same flags; single steps of the other plans are those of test_parallel.py.
QUICKER = ("t2", "c2", "p2 zbv")
EVERY = [pytest.param(name, 3) for name in QUICKER]
EVERY += [pytest.param(name, 20, marks=pytest.mark.slow) for name in RUNS]


@pytest.mark.parametrize("name, steps", EVERY)
def test_every_plan_gives_the_run_of_one_process(one_process, tmp_path, name, steps):
    world, more = RUNS[name]
    flags, metrics = one_process(steps)
    assert largest_difference(trained(tmp_path, world, f"{flags} {more}"), metrics) < 1e-8


# Two steps of two updates: the second step's reference and old weights are not the policy's.
OPTIONS = "--kl-coef 0.05 --proximal --minibatches 2 --micro-tokens 100 --steps"
ZBV = "p2 --pp-schedule zbv"  # p2 has a pipeline's log-probs, and zbv's three steps are above
SOME = [("p2", 2), *(
    pytest.param(plan, 4, marks=pytest.mark.slow) for plan in ("d2t2", "p2c2", ZBV))]  # fmt: skip


@pytest.mark.parametrize("plan, steps", SOME)
def test_old_and_reference_log_probs_too(run_of, tmp_path, plan, steps):  # noqa: F811
    flags, world = f"{SHAPE} {OPTIONS} {steps}", 2 if plan in ("p2", ZBV) else 4
    found = trained(tmp_path, world, f"{flags} --plan {plan}")
    assert largest_difference(found, run_of(flags)) < 1e-8


EXPERTS = {
    "d2e2": 2,
    "t2": 2,
    "d2e2 --tree sparse": 2,
    "d2e2 --tree dta --max-tokens 9 --recompute": 2,
    "t2e2 --tree dta --max-tokens 9": 2,
    "d2t2e4 --tree dta --max-tokens 9": 4,
    "d2c2e2 --tree sparse": 4,
    "p2d2e2 --tree sparse": 4,
}
LATER = [name for name in EXPERTS if name not in ("d2e2", "t2")]
SOME = [pytest.param(k, marks=[pytest.mark.slow] * (k in LATER)) for k in EXPERTS]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The directory of a model with experts."""
    config = models.tiny("qwen3_moe", vocab_size=12, num_experts=4, eos_token_id=(1,))
    folder = tmp_path_factory.mktemp("mixture")
    models.save_hf(models.Transformer(config).double().init_weights(0), folder)
    return folder


@pytest.mark.parametrize("plan", SOME)
def test_experts_train_alike_under_a_plan(run_of, mixture, tmp_path, plan):  # noqa: F811
    flags = f"{TASK} --lr 0.005 --steps 3 --eval-every 3 --model {mixture}"
    found = trained(tmp_path, EXPERTS[plan], f"{flags} --plan {plan}")
    assert largest_difference(found, run_of(flags)) < 1e-8


@pytest.mark.parametrize("leg, more", [
    (2, ""), pytest.param(5, "", marks=pytest.mark.slow),
    pytest.param(2, "--kl-coef 0.05", marks=pytest.mark.slow)])  # fmt: skip
def test_a_run_goes_on_under_another_plan(run_of, tmp_path, leg, more):  # noqa: F811
    """`leg` steps under each of four plans, each begun from the checkpoint of the one before, and
    with the reference that the first one has stored."""
    flags = f"{SHAPE} --steps {4 * leg} --eval-every {2 if leg < 5 else 5} {more}"
    out = tmp_path / "run"
    (tmp_path / "ranks").mkdir()
    chain = [(2, "--plan d2"), (2, "--plan p2 --resume"),
             (2, "--plan t2 --data-parallel fsdp --resume"),
             (1, "--plan d1 --data-parallel zero1 --resume")]  # fmt: skip
    for n, (world, more) in enumerate(chain, 1):
        stop = f"--steps {n * leg} --save-every {leg}"
        ranks(tmp_path / "ranks", world, _train, f"{flags} {stop} {more}", out)
    assert largest_difference(read_metrics(out), run_of(flags)) < 1e-8


TREES = {
    "sparse": (1, "--tree sparse"),
    "dta": (1, "--tree dta --max-tokens 7 --recompute"),
    "dta, 2 ranks": (2, "--tree dta --max-tokens 16"),
    "sparse zero1": (2, "--tree sparse --data-parallel zero1"),
    "sparse c2": (2, "--tree sparse --plan c2"),
    "sparse fsdp": (2, "--tree sparse --data-parallel fsdp"),
    "dta t2": (2, "--tree dta --max-tokens 16 --plan t2"),
    "sparse t2c2": (4, "--tree sparse --plan t2c2"),
    "sparse p2": (2, "--tree sparse --plan p2"),
    "sparse p2 zbv": (2, "--tree sparse --plan p2 --pp-schedule zbv --micro-tokens 40"),
    "sparse d2p2 fsdp": (4, "--tree sparse --plan d2p2 --data-parallel fsdp"),
    "sparse p2t2": (4, "--tree sparse --plan p2t2 --pp-schedule interleaved1f1b"),
    "sparse p2c2": (4, "--tree sparse --plan p2c2"),
    "dta d2t2 zero1": (4, "--tree dta --max-tokens 16 --plan d2t2 --data-parallel zero1"),
}
# dta has its run below; `train_grpo.py check` has all the others.
QUICKEST = ("sparse c2", "sparse p2")
SOME = [pytest.param(name, 3) for name in QUICKEST]
SOME += [pytest.param(name, 20, marks=pytest.mark.slow) for name in TREES]


@pytest.mark.parametrize("name, steps", SOME)
def test_trees_give_the_run_of_one_process_without_them(one_process, tmp_path, name, steps):
    world, more = TREES[name]
    flags, metrics = one_process(steps)
    assert largest_difference(trained(tmp_path, world, f"{flags} {more}"), metrics) < 1e-8


DTA = "dta --max-tokens 9"
SOME = [(DTA, 2), ("sparse --plan p2", 2)]
SOME += [pytest.param(tree, 4, marks=pytest.mark.slow) for tree in (DTA, "sparse")]


@pytest.mark.parametrize("tree, steps", SOME)
def test_old_and_reference_log_probs_of_trees_too(run_of, tmp_path, tree, steps):  # noqa: F811
    flags = f"{SHAPE} {OPTIONS} {steps} --forks 2 --fork-turns 1 --advantage per_branch"
    found = trained(tmp_path, 2, f"{flags} --tree {tree}")
    assert largest_difference(found, run_of(flags)) < 1e-8


CRITIC = f"{TASK} --layers 4 --hidden 16 --heads 4 --lr 0.005 --steps 3 --eval-every 3"
CRITIC += " --advantage gae --kl-coef 0.05 --proximal"
CRITICS = {
    "": (1, "--tree dta --max-tokens 7 --recompute"),
    "d2": (2, "--tree sparse --data-parallel fsdp"),
    "t2": (2, "--plan t2"),
    "c2": (2, "--plan c2 --tree sparse"),
    "p2": (2, "--plan p2"),
}
SOME = shortened(CRITICS, "p2")


@pytest.mark.parametrize("name", SOME)
def test_a_critic_trains_alike_under_every_plan_and_tree(run_of, tmp_path, name):  # noqa: F811
    world, more = CRITICS[name]
    found = trained(tmp_path, world, f"{CRITIC} {more}")
    assert "value/explained_variance" in run_of(CRITIC)[0]
    assert largest_difference(found, run_of(CRITIC)) < 1e-8
