"""Steps by hand, of every kind of setting."""

import pytest
from conftest import shortened

from full.run.config import Config
from full.check import STEPS, step_error

# Settings whose parts are in no other setting of the default suite, or in none of test_audit.py.
BY_DEFAULT = (
    "group_mean, 2 updates", "CISPO, TIS", "gae, KL in the reward",
    "leave_one_out, dual clip, filter", "balanced experts, filter", "dynamic sampling, 3 updates",
    "staleness 1, the sampler's old", "REINFORCE++, geometric mask", "GMPO, sequence mask",
    "SAPO, LitePPO, soft overlong, IcePop", "DPPO by trees", "GSPO, a teacher",
)  # fmt: skip


@pytest.mark.quick
def test_every_setting_is_one_that_a_run_may_have():
    for changes in STEPS.values():
        Config(**changes)


@pytest.mark.parametrize("name", shortened(STEPS, *BY_DEFAULT))
def test_a_step_is_the_step_by_hand(process_group, name):
    """Its metrics and weights after the second step of a run, of every kind of setting."""
    assert step_error(**STEPS[name]) <= 1e-12
