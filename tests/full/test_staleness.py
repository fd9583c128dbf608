"""`--staleness K`: the audit, which knows the weights that sample a batch.

That every batch has the weights of the schedule is a row of test_grpo_matrix.py.
"""

import dataclasses
import shutil

import pytest
from test_ranks import read_metrics
from test_run import GET, _main, at, cli

from full.audit.audit import audited

TINY = "--size 3 --turns 3 --device cpu --layers 1 --hidden 16 --heads 2 --prompts 4 --group 8 "
TINY += "--lr 0.02 --lr-warmup 0 --lr-decay constant --eval-every 2 --eval-prompts 6 --out run"


def _with_fresher_weights(*args):
    """As if there were no staleness, for two batches: sampled by weights of one step later."""
    def set_staleness(steps):
        def act(queue, step):
            queue.config = dataclasses.replace(queue.config, staleness=steps)

        return act

    at(GET, 2, set_staleness(1))
    at(GET, 3, set_staleness(2))
    _main(*args)


def test_the_audit_takes_the_weights_of_the_schedule_and_names_others(process_group, tmp_path):
    """Batch 3 is sampled a step late, by fresher weights than the schedule says; others are not."""
    flags = f"{TINY} --staleness 2 --steps 5 --log-rollouts all --minibatches 1 --save-every 1"
    codes, _, err = cli(tmp_path, f"{flags} --keep 9", main=_with_fresher_weights)
    assert codes == [0], err
    run = tmp_path / "run"
    lines = read_metrics(run)
    assert [line["policy/age_mean"] for line in lines] == [0, 1, 2, 2, 2]
    assert [line["policy/age_max"] for line in lines] == [0, 1, 2, 2, 2]
    assert [line["policy_age/update_mean"] for line in lines] == [0, 1, 2, 1, 2]
    assert audited(run, 3).verdict == "audit of step 3: sampling is outside"
    assert audited(run, 2).wrong is None

    # Of checkpoints 2 and 4: step 4 was sampled with the weights of 2, and is logged whole.
    for n in (1, 3):
        shutil.rmtree(run / f"step-{n:08d}")
    report = audited(run, 4)
    assert report.wrong is None
    keys = {row.key for row in report.rows}
    assert {"sampling", "policy/age_max", "policy_age/update_mean", "loss/token_mean"} <= keys
    shutil.rmtree(run / "step-00000002")
    with pytest.raises(ValueError, match="all rollouts and a checkpoint before it"):
        audited(run, 4)
