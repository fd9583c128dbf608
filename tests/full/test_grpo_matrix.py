"""Steps by hand, of every kind of setting."""

import subprocess
from types import SimpleNamespace

import pytest
from conftest import shortened

from full.check import STEPS, main, step_error
from full.run.config import Config

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


@pytest.mark.quick
@pytest.mark.parametrize("codes, code", [((0, 0), 0), ((0, -9), 1), ((1, 0), 1)])
def test_all_checks_fail_if_one_does(monkeypatch, codes, code):
    """Also one that a signal has ended."""
    each = iter(codes)
    monkeypatch.setattr(subprocess, "run", lambda _: SimpleNamespace(returncode=next(each)))
    assert main([]) == code
