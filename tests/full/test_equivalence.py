"""The rows of full/equivalence.py: whoever computes, a run is the run of one process.

Ranks start once for all rows of a mark and a world. Slips of one line are planted, and each must be
found by the row that is named with it.
"""

import pickle
from typing import get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_ranks import ranks

import train_grpo
from full import equivalence
from full.equivalence import ROWS, Outcome, errors, is_right, row_errors, rows_of_this_world
from full.learn import packing, trainer
from full.learn.rollouts import Sampler
from full.learn.trainer import Trainer
from full.model import experts, lora, parallelize
from full.model.parallelize import AC
from full.ranks import places
from full.ranks.optimizer import LocalOptimizer
from full.run import config

MARKS = {"quick": [pytest.mark.quick], "ordinary": [], "slow": [pytest.mark.slow]}
EVERY = [pytest.param(row, marks=MARKS[row.mark], id=row.name) for row in ROWS]


def _truths(rank, rows):
    return equivalence.references(rows)


def _of_world(rank, rows, true):
    return rows_of_this_world(rows, pickle.loads(true))


@pytest.fixture(scope="module")
def truths(tmp_path_factory):
    """truths(rows): what one process does, by family and run, made once; pickled."""
    made = {}

    def of(rows):
        missing = [row for row in rows if (row.family, row.run) not in made]
        if missing:
            made.update(ranks(tmp_path_factory.mktemp("one"), 1, _truths, missing)[0])
        return pickle.dumps(made)

    return of


@pytest.fixture(scope="module")
def found(truths, tmp_path_factory):
    """found(row): its errors. All rows of its mark and world are done together."""
    made = {}

    def of(row):
        if row.name not in made:
            rows = [x for x in ROWS if (x.mark, x.ranks) == (row.mark, row.ranks)]
            true = truths([x for x in ROWS if x.mark == row.mark])
            parts = ranks(tmp_path_factory.mktemp("ranks"), row.ranks, _of_world, rows, true)
            made.update(parts[0])
        return made[row.name]

    return of


@pytest.mark.parametrize("row", EVERY)
def test_a_row_is_the_run_of_one_process(found, row):
    assert is_right(row, found(row)), found(row)


@pytest.mark.quick
def test_each_name_and_each_way_to_share_the_work_is_in_a_row():
    """Those of the default suite: each family, run and value of a flag, and no row twice."""
    assert len({row.name for row in ROWS}) == len(ROWS)
    rows = [row for row in ROWS if row.mark != "slow" and not row.refused]
    assert {row.family for row in rows} == {*equivalence.FAMILIES}
    assert {row.run for row in rows} | {"plain", "lora"} == {*equivalence.RUNS}
    told = " ".join(row.flags for row in rows)
    fields = config.Config.__dataclass_fields__
    assert all(f"--ac {ac}" in told for ac in AC[1:])
    for name in ("tree", "data_parallel", "pp_schedule"):
        for value in {*get_args(fields[name].type)} - {fields[name].default}:
            assert f"--{name.replace('_', '-')} {value}" in told
    assert all(f"{letter}2" in told for letter in "pdcte")


@pytest.mark.quick
def test_the_comparison_sees_each_part():
    w = torch.tensor([1.0, -2.0])
    truth = Outcome({(0, 0): [[1, 2]]}, {(0, "loss"): 3.0}, {(0, "w"): w}, {"model.w": w})
    assert set(errors(truth, truth).values()) == {0.0}
    for part, wrong in (
        ("tokens", {(0, 0): [[1, 3]]}), ("metrics", {(0, "loss"): 3.1}),
        ("metrics", {(0, "loss"): float("nan")}), ("gradients", {(0, "w"): 0 * w}),
        ("tensors", {"model.w": w * float("nan")}),
    ):  # fmt: skip
        off = errors(Outcome(**vars(truth) | {part: wrong}), truth)
        assert not off.pop(part) < 0.01 and set(off.values()) == {0.0}
    row = ROWS[0]
    assert not is_right(row, {"metrics": float("nan")}) and not is_right(row, "expected")

# Slips ------------------------------------------------------------------------------------------


def slipped(owner, name, slip, ranks=(1,)):
    """A patch: on some ranks slip(function, ..) is called in the place of function(..)."""
    function = getattr(owner, name)

    def call(*args, **options):
        slips = dist.get_rank() in ranks
        return slip(function, *args, **options) if slips else function(*args, **options)

    return mock.patch.object(owner, name, call)


def scale_gradients(reduce_gradients, model):
    for p in model.parameters():
        if p.grad is not None:  # a rank may have nothing to train on
            p.grad *= 1.0001
    return reduce_gradients(model)


def place_of_each_rank(place_of_factor, name, shape, grid, mode):
    """Each t rank trains an A of its own, from its part of the gradient."""
    whole = places.place_of(lora.matrix_of(name), shape, grid, mode, False)
    return place_of_factor(name, shape, grid, mode)._replace(gradient_groups=whole.gradient_groups)


def experts_of_each_rank(place_of, name, *given):
    """The gradients of experts are not summed over the ranks that have the same ones."""
    place = place_of(name, *given)
    return place._replace(gradient_groups=()) if ".mlp.experts." in name else place


def without_moments(load_checkpoint, trainer, path):
    """A run that goes on begins with moments of 0."""
    state = load_checkpoint(trainer, path)
    for moments in trainer.optimizer.state.values():
        moments["exp_avg"].zero_()
    return state


def first_push(push, sampler, model, optimizer, version):
    """The generator keeps the first weights."""
    if version == 0:
        push(sampler, model, optimizer, version)


D2, T2, EACH = "--plan d2 --data-parallel zero1", "--plan t2", (0, 1)
SLIPS = {  # name -> a patch, and the row of two ranks that finds it
    "a gradient is scaled": (
        lambda: slipped(trainer, "reduce_gradients", scale_gradients), "dense", "old", D2),
    "a gradient is scaled under t": (
        lambda: slipped(trainer, "reduce_gradients", scale_gradients), "biases", "old", T2),
    "a gradient is scaled under p": (
        lambda: slipped(trainer, "reduce_gradients", scale_gradients), "tied", "critic",
        "--plan p2"),
    "a token is counted twice": (
        lambda: slipped(Trainer, "loss_denominator", lambda run, *x: run(*x) + 1), "tied", "forks",
        "--plan c2 --tree sparse"),
    "every rank of t adds its metrics": (
        lambda: mock.patch.object(trainer, "is_replica_leader", lambda model: True),
        "biases", "old", T2),
    "experts are not summed": (
        lambda: slipped(parallelize, "place_of", experts_of_each_rank, EACH), "routers", "biased",
        "--plan d2"),
    "factors of each rank of t": (
        lambda: slipped(lora, "place_of_factor", place_of_each_rank, EACH), "routers", "lora-all",
        T2),
    "a leaf of the tree is dropped": (
        lambda: slipped(packing.RowBatches, "share_out", lambda run, *x: run(*x)[:-1]),
        "tied", "forks", "--tree dta --chunk-tokens 16"),
    "a rank does not update": (
        lambda: slipped(LocalOptimizer, "step", lambda *given: None), "dense", "reward",
        "--plan d2"),
    "a rank keeps its rounded weights": (
        lambda: slipped(LocalOptimizer, "copy_to_model", lambda *given: None), "experts", "rounded",
        f"{equivalence.MIXED} --plan t2"),
    "a rank's bias stays": (
        lambda: slipped(experts.ExpertLoads, "update_bias", lambda *given: None), "routers",
        "biased", "--plan d2e2"),
    "the generator's weights stay": (
        lambda: slipped(Sampler, "push", first_push, EACH), "tied", "sequences",
        "--data-parallel fsdp-offload --ac full"),
    "a rank draws by its number": (
        lambda: slipped(train_grpo, "uniforms", lambda run, *x: run(*x)[::-1]), "dense",
        "filtered", "--plan d2"),
    "moments are forgotten": (
        lambda: slipped(Trainer, "load_checkpoint", without_moments, EACH), "dense", "stale",
        f"{D2} then --plan p2"),
}  # fmt: skip


def row_of(slip):
    (row,) = [x for x in ROWS if x.ranks == 2 and (x.family, x.run, x.flags) == SLIPS[slip][1:]]
    return row


def _slipped(rank, true):
    found, true = {}, pickle.loads(true)
    for name, (patch, *_) in SLIPS.items():
        row = row_of(name)
        with patch():
            found[name] = row_errors(row, true[row.family, row.run])
    return found


@pytest.fixture(scope="module")
def found_slips(truths, tmp_path_factory):
    true = truths([row_of(slip) for slip in SLIPS])
    return ranks(tmp_path_factory.mktemp("slips"), 2, _slipped, true)[0]


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_slip_is_found(found_slips, slip):
    assert not max(found_slips[slip].values()) < 100 * row_of(slip).bound, found_slips[slip]
