"""Whole training runs under plans: the metrics of one process, in float64.

In the default suite a few of them have two steps, with old log-probs, an evaluation and
AdamW's moments, and test_a_run_goes_on_under_another_plan has eight, two under each of four plans.
"""

import pytest
from conftest import slow
from test_ranks import TASK, _train, largest_difference, learns_something, ranks, read_metrics
from test_ranks import run_of, trained  # noqa: F401, a fixture

from full.config import LORA_TARGETS
from full.hf import save_hf
from full.tiny import tiny
from full.transformer import Transformer

SHAPE = f"{TASK} --layers 4 --hidden 16 --heads 4 --lr 0.005"
BASES = {
    "plain": SHAPE,
    # two updates a step: the second step's reference and old weights are not the policy's
    "old": f"{SHAPE} --kl-coef 0.05 --proximal --minibatches 2 --micro-tokens 100",
    "critic": f"{SHAPE} --advantage gae --kl-coef 0.05 --proximal",
    "experts": f"{TASK} --lr 0.005 --model MIXTURE",
}
# The bonus, because these prompts give no reward, and a gradient that is rounding moves AdamW, too.
FACTORS = "--lora-rank 3 --lora-alpha 6 --kl-coef 0.05 --minibatches 2 --entropy-coef 0.1"
BASES["lora"] = f"{BASES['experts']} {FACTORS} --lora-targets {LORA_TARGETS},gate,lm_head"
BASES["dense-lora"] = f"{SHAPE} {FACTORS}"
BASES["routes"] = f"{BASES['experts']} --replay-routes"
BASES["forks"] = f"{BASES['old']} --forks 2 --fork-turns 1 --advantage per_branch"
# A line: the base; steps by default, and behind `-m slow`; ranks; flags that must change nothing,
# and behind " : " flags that the run of one process has, too. Steps of the plans that are slow
# here are in test_a_run_goes_on_under_another_plan, and single ones in test_parallel.py.
RUNS = """
plain - 20 2 --data-parallel zero1
plain - 20 2 --plan t2
plain - 20 2 --plan c2
plain - 20 2 --plan c2 --cp-method ulysses
plain - 20 2 --plan p2
plain - 20 2 --plan p2 --pp-schedule zbv
plain - 20 2 --plan p2 --pp-schedule interleaved1f1b
plain - 20 4 --plan d2t2
plain - 20 4 --plan d2t2 --data-parallel fsdp
plain - 20 4 --plan d2c2 --data-parallel zero1
plain - 20 4 --plan d2p2
plain - 20 4 --plan t2c2 --cp-method allgather
plain - 20 4 --plan p2t2
plain - 20 2 --data-parallel fsdp --offload --ac op
plain - 20 4 --data-parallel fsdp --shard-ranks 2
plain - 20 4 --plan d2c2 --data-parallel fsdp --shard-ranks 1
plain - 20 4 --plan c4
plain - 20 2 --plan d2 --compile
plain - 20 2 --data-parallel fsdp --compile --ac full
plain - 20 1 --tree sparse
plain - 20 1 --tree dta --chunk-tokens 7 --recompute
plain - 20 2 --tree dta --chunk-tokens 16
plain - 20 2 --tree sparse --data-parallel zero1
plain 2 20 2 --tree sparse --plan c2
plain - 20 2 --tree sparse --data-parallel fsdp
plain - 20 2 --tree dta --chunk-tokens 16 --plan t2
plain - 20 4 --tree sparse --plan t2c2
plain - 20 2 --tree sparse --plan p2
plain - 20 2 --tree sparse --plan p2 --pp-schedule zbv --micro-tokens 40
plain - 20 4 --tree sparse --plan d2p2 --data-parallel fsdp
plain - 20 4 --tree sparse --plan p2t2 --pp-schedule interleaved1f1b
plain - 20 4 --tree sparse --plan p2c2
plain - 20 4 --tree dta --chunk-tokens 16 --plan d2t2 --data-parallel zero1
old - 4 2 --plan p2
old - 4 4 --plan d2t2
old - 4 4 --plan p2c2
old - 4 2 --plan p2 --pp-schedule zbv
forks 2 4 2 --tree dta --chunk-tokens 9
forks - 4 2 --tree sparse
forks 2 4 2 --tree sparse --plan p2
critic - 3 1 --tree dta --chunk-tokens 7 --recompute
critic - 3 2 --tree sparse --data-parallel fsdp
critic - 3 2 --plan t2
critic - 3 2 --plan c2 --tree sparse
critic 2 3 2 --plan p2
experts 2 3 2 --plan d2e2
experts - 3 2 --plan t2
experts - 3 2 --plan t2 --tree dta --chunk-tokens 9 --recompute
experts - 3 2 --plan d2e2 --tree sparse
experts - 3 4 --plan d2c2e2 --tree sparse
experts - 3 4 --plan p2d2e2 --tree sparse
plain 2 20 2 --plan t2 : --forks 2 --fork-turns 1 --advantage per_branch
plain - 20 2 --plan t2 : --kl-coef 0.05 --proximal
plain - 20 2 --plan t2 : --staleness 1
plain - 20 2 --plan t2 : --prompts 1 --minibatches 1
routes 2 - 2 --plan t2
routes - 3 2 --plan t2e2 : --forks 2 --fork-turns 1 --advantage per_branch
routes - 3 2 --plan p2 : --batch-rows 3 --dynamic-sampling --entropy-coef 0
routes - 3 2 --tree sparse --data-parallel fsdp : --advantage gae --proximal
routes - 3 4 --plan d2t2e4
routes - 3 2 --tree dta --chunk-tokens 9 --recompute : --staleness 1
lora 2 - 2 --plan t2e2
lora - 4 2 --plan p2 : --advantage gae
lora - 2 2 --plan p2 : --lora-targets gate
dense-lora - 4 2 --plan p2 --pp-schedule zbv : --lora-targets lm_head,q_proj
dense-lora - 4 2 --plan p2 --pp-schedule zbv
dense-lora - 4 2 --plan p2 --pp-schedule interleaved1f1b
dense-lora - 4 2 --plan d2 --data-parallel fsdp --ac op
lora - 4 2 --plan d2 --data-parallel fsdp : --staleness 1
lora - 4 2 --tree sparse --data-parallel zero1 : --forks 2 --fork-turns 1 --advantage per_branch
lora - 4 4 --plan p2d2e2 --data-parallel fsdp
lora - 4 4 --plan p2t2 --tree sparse
lora - 4 2 --plan d2 --ac full --data-parallel fsdp --offload
lora - 4 2 --plan c2 --cp-method ulysses
lora - 4 2 --plan t2 : --replay-routes
experts - 20 2 --plan t2e2
experts - 20 4 --plan d2t2e4 --data-parallel fsdp
""".strip().splitlines()


def cases():
    for line in RUNS:
        base, short, long, how = line.split(maxsplit=3)
        for steps, marks in ((short, []), (long, [pytest.mark.slow])):
            if steps != "-":
                yield pytest.param(base, int(steps), how, marks=marks, id=f"{base} {steps} {how}")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The directory of a model with experts."""
    config = tiny("qwen3_moe", vocab_size=12, num_experts=4, eos_token_id=(1,))
    folder = tmp_path_factory.mktemp("mixture")
    save_hf(Transformer(config).double().init_weights(0), folder)
    return folder


@pytest.mark.parametrize("base, steps, how", [*cases()])
def test_every_plan_gives_the_run_of_one_process(
    run_of, mixture, tmp_path, base, steps, how,  # noqa: F811
):  # fmt: skip
    world, more = how.split(maxsplit=1)
    more, _, of_the_run = more.partition(" : ")
    flags = BASES[base].replace("MIXTURE", str(mixture))
    flags += " --group 4" if steps == 2 else ""  # by default
    flags += f" --steps {steps} --eval-every {2 if steps < 20 else 5} {of_the_run}"
    truth = run_of(flags)
    assert base != "plain" or learns_something(truth)
    assert base != "critic" or "value/explained_variance" in truth[0]
    assert largest_difference(trained(tmp_path, int(world), f"{flags} {more}"), truth) < 1e-8


@pytest.mark.parametrize("leg, more", [(1, ""), *slow((5, ""), (2, "--kl-coef 0.05"))])
def test_a_run_goes_on_under_another_plan(run_of, tmp_path, leg, more):  # noqa: F811
    """`leg` steps under each of four plans, each begun from the checkpoint of the one before, and
    with the reference that the first one has stored."""
    flags = f"{SHAPE} --steps {4 * leg} --eval-every {leg} {more}"
    out = tmp_path / "run"
    (tmp_path / "ranks").mkdir()
    chain = [(2, "--plan d2"), (2, "--plan p2 --resume"),
             (2, "--plan t2 --data-parallel fsdp --resume"),
             (1, "--plan d1 --data-parallel zero1 --resume")]  # fmt: skip
    for n, (world, more) in enumerate(chain, 1):
        stop = f"--steps {n * leg} --save-every {leg}"
        ranks(tmp_path / "ranks", world, _train, f"{flags} {stop} {more}", out)
    assert largest_difference(read_metrics(out), run_of(flags)) < 1e-8
