"""`--staleness K`: which weights sample which batch; the audit.

The oracle is a loop that keeps every step's weights and samples each batch when it is trained, by
the weights that the schedule names. It knows no queue.
"""

import copy
import dataclasses
import shutil
from types import SimpleNamespace

import pytest
from conftest import shortened
from test_ranks import learns_something, read_metrics
from test_run import GET, _main, at, cli, good

from full.audit.audit import audited
from full.learn.batches import SampledBatch, collect
from full.learn.rollouts import Sampler, evaluate
from full.learn.trainer import Trainer
from full.run.build import build
from full.run.flags import parse_config
from full.run.logs import do_step
from full.run.tasks import make_task

TINY = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 2 --prompts 4 --group 8 "
TINY += "--lr 0.02 --lr-warmup 0 --lr-decay constant --eval-every 2 --eval-prompts 6 --out run"
SETTINGS = {
    "two updates": "",
    "one update": "--minibatches 1",
    "decoupled": "--proximal --importance-cap 2 --minibatches 1",
    "gae": "--advantage gae",
    "KL in the reward": "--kl-coef 0.1 --kl-in reward --clip-low 0.9 --clip-high 9",
    "dynamic sampling, forks": (
        "--dynamic-sampling 2 --entropy-coef 0 --forks 2 --fork-turns 1"),
}  # fmt: skip


def by_the_definition(flags):
    """The metrics of a run whose batch b is sampled with the weights of max(0, b - K) steps."""
    config = parse_config(flags.split()).check()
    task = make_task(config)
    model, generator, reference = build(config, task)
    trainer = Trainer(config, model, generator=generator, reference=reference)
    if reference is not None:
        reference.load_state_dict(model.state_dict())
    trainer.push_weights()
    weights = []
    lines = []
    for step in range(config.steps):
        copied = copy.deepcopy(generator, {id(generator.part): None})
        weights.append((trainer.policy_version, copied))
        version, sampler = weights[max(0, step - config.staleness)]
        groups, kept, metrics = collect(config, task, Sampler(sampler), step)
        batch = SampledBatch(groups, kept, config.minibatches, version, metrics)
        source = SimpleNamespace(get=lambda step, batch=batch: batch)
        metrics = do_step(config, source, trainer, step)
        trainer.push_weights()
        if step % 2 or step + 1 == config.steps:  # --eval-every 2
            metrics["eval/solved"], _ = evaluate(config, task, trainer.sampler)
        lines.append({"step": step} | metrics)
    return lines


NAMES = [f"{name}, {K}" for name in SETTINGS for K in (0, 1, 2, 5)]


@pytest.mark.parametrize("name", shortened(NAMES, "two updates, 0", "one update, 2", "gae, 1"))
def test_batches_are_sampled_with_the_weights_of_the_schedule(process_group, tmp_path, name):
    """Bit for bit; with 5 all four batches are sampled by the first weights."""
    setting, K = name.rsplit(", ", 1)
    flags = f"{TINY} {SETTINGS[setting]} --staleness {K} --steps 4"
    good(tmp_path, flags)
    found = read_metrics(tmp_path / "run")
    for line, true in zip(found, by_the_definition(flags), strict=True):
        age = min(line["step"], int(K))
        assert (line.pop("policy/age_mean"), line.pop("policy/age_max")) == (age, age)
        line.pop("eval/solved_before", None)
        assert line == {name: pytest.approx(x, abs=0, rel=0) for name, x in true.items()}
    assert learns_something(found)

    # With one update a step the ratio is 1 without staleness, and measures the age with it.
    if setting == "one update":
        first, *others = found
        assert abs(first["ratio/token_mean"] - 1) < 1e-6
        assert K == "0" or all(x["ratio/max"] > 1.01 for x in others)
        assert K == "0" or all(x["logprob_gap/max"] > 0.01 for x in others)
        ages = [line["policy_age/update_mean"] for line in found]
        assert ages == [min(step, int(K)) for step in range(4)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 5 steps with a checkpoint after each, all rollouts kept."""
    folder = tmp_path_factory.mktemp("finished")
    flags = "--staleness 2 --steps 5 --save-every 1 --keep 9 --log-rollouts all"
    good(folder, f"{TINY} {flags} --minibatches 1")
    return folder / "run"


def test_the_audit_takes_the_weights_of_the_schedule(process_group, finished, tmp_path):
    """Of checkpoints 2 and 4: step 4 was sampled with the weights of 2, and is logged whole."""
    run = shutil.copytree(finished, tmp_path / "run")
    for n in (1, 3):
        shutil.rmtree(run / f"step-{n:08d}")
    report = audited(run, 4)
    assert report.wrong is None
    keys = {row.key for row in report.rows}
    assert {"sampling", "policy/age_max", "policy_age/update_mean", "loss/token_mean"} <= keys

    # Without the weights that sampled it, or its rollouts, it cannot be audited.
    shutil.rmtree(run / "step-00000002")
    with pytest.raises(ValueError, match="all rollouts and a checkpoint before it"):
        audited(run, 4)


def _with_fresher_weights(*args):
    """As if there were no staleness, for two batches: sampled by weights of one step later."""
    def set_staleness(steps):
        def act(queue, step):
            queue.config = dataclasses.replace(queue.config, staleness=steps)

        return act

    at(GET, 2, set_staleness(1))
    at(GET, 3, set_staleness(2))
    _main(*args)


def test_a_batch_by_other_weights_is_named(process_group, tmp_path):
    """Batch 3 is sampled a step late, by fresher weights than the schedule says."""
    flags = f"{TINY} --staleness 2 --steps 5 --log-rollouts all --minibatches 1 --save-every 1"
    codes, _, err = cli(tmp_path, f"{flags} --keep 9", main=_with_fresher_weights)
    assert codes == [0], err
    assert audited(tmp_path / "run", 3).verdict == "audit of step 3: sampling is outside"
    assert audited(tmp_path / "run", 2).wrong is None
