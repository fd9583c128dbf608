"""An idea is one entry of one table: an objective, an advantage, an aggregation, a metric. Or one
class: a sampler, a kind of layer."""

import json
import re

import pytest
from torch import nn
from test_run import TINY

from full import api
from full.__main__ import main
from full.learn import rollouts
from full.learn.advantages import ADVANTAGES, Advantage
from full.learn.metrics import METRICS, Metric
from full.learn.objectives import AGGREGATIONS, OBJECTIVES
from full.learn.trainer import Trainer
from full.model.transformer import Layer, Transformer
from full.run.flags import parse_config
from models import Attention

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A run of this process with some flags: the lines of its metrics."""
    monkeypatch.chdir(tmp_path)

    def run(flags):
        assert main(f"{TINY} --steps 2 --out run {flags}".split()) == 0
        return [json.loads(line) for line in open("run/metrics.jsonl")]

    return run


class Halving(rollouts.Sampler):
    def generate(self, rows, /, **how):
        return super().generate(rows[::2], **how)


WRONG = {  # what is wrong with an idea: the table, the entry, flags, and what is said
    "an objective of a matrix": (
        OBJECTIVES, lambda c, d, A, lp, mean: (-lp[:, None], d > 1), "--objective mine",
        r"objective mine: expected \(l_N, clipped_N\) of shape \((\d+),\), got \(\1, 1\)"),
    "an objective of a sum": (
        OBJECTIVES, lambda c, d, A, lp, mean: (-lp.sum(), d > 1), "--objective mine",
        r"got \(\), "),
    "a metric without its reduction": (
        METRICS, Metric("x", "mean", "avg", lambda t: t.lp_N), "",
        "metric mine: .* got 'avg', 'mean'"),
    "a metric left out of updates": (
        METRICS, Metric("x", "", "mean", lambda t: t.lp_N), "", "metric mine: .* got 'mean', ''"),
    "a metric of a mean": (
        METRICS, Metric("x", "mean", "mean", lambda t: t.lp_N.mean()), "", r"mine: .* got \(\)"),
    "a sampler that drops rollouts": (
        None, Halving, "", "expected 1 rollouts of group 1 from Halving.generate, got 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_idea_is_refused(run, monkeypatch, capsys, name):
    """Each of these would broadcast, be summed or count as a reward of 0, and train."""
    table, entry, flags, told = WRONG[name]
    if table is None:
        monkeypatch.setattr(Trainer, "sampler_class", entry)
    else:
        monkeypatch.setitem(table, "mine", entry)
    with pytest.raises((SystemExit, ValueError, AssertionError)) as error:
        run(f"--group 8 {flags}")
    assert re.search(told, f"{error.value}{capsys.readouterr().err}")


def halved(c, d_N, A_N, lp_N, mean_of_sequence, share=0.5):
    """It reads one flag, and has a constant of its own."""
    return -share * lp_N, d_N > c.clip_high


def of_the_best(rewards_PG, tokens_PG):
    return rewards_PG - rewards_PG.max(-1, keepdims=True)


IDEAS = {  # the table, the entry, flags, and what a line of its metrics must have
    "an objective": (
        OBJECTIVES, halved, "--objective mine --clip-high 0.01 --minibatches 1",
        lambda line: line["loss/policy_token_mean"] != 0 == line["ratio/clipped_fraction"]),
    "an advantage": (ADVANTAGES, Advantage(of_the_best), "--advantage mine",
                     lambda line: line["advantage/token_mean"] < 0),
    "an aggregation": (
        AGGREGATIONS, lambda count_B, limit: (count_B / count_B, count_B > -1),
        "--aggregation mine", lambda line: line["loss/token_mean"] != 0),
    "a metric": (METRICS, Metric("log-ratio", "mean", "mean", lambda t: t.ratio_N.log()),
                 "--minibatches 2", lambda line: line["mine"] != 0),
}  # fmt: skip


@pytest.mark.parametrize("name", IDEAS)
def test_an_idea_is_one_entry_of_a_table(run, monkeypatch, capsys, name):
    table, entry, flags, has = IDEAS[name]
    monkeypatch.setitem(table, "mine", entry)
    assert any(map(has, run(flags)))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "mine" in capsys.readouterr().out


def test_a_kind_of_layer(run, monkeypatch):
    """Every second layer has another attention, with a matrix of its own."""
    gated = set()

    class Gated(Attention):
        def __init__(self, config, layer, norm_class):
            super().__init__(config, layer, norm_class)
            self.gate_proj = nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, x_BSM, ropes, attention, /):
            gated.add(self.options["layer"])
            return self.gate_proj(x_BSM).sigmoid() * super().forward(x_BSM, ropes, attention)

    class EitherLayer(Layer):
        def __init__(self, config, layer):
            self.attention_class = Gated if layer % 2 else Attention
            super().__init__(config, layer)

    monkeypatch.setattr(Transformer, "layer_class", EitherLayer)
    (first, _) = run("--layers 3")
    assert first["grad_norm"] > 0 and gated == {1}


def test_a_sampler(tmp_path, monkeypatch):
    """In a process that goes on, which closes the groups of a sampler of its own."""
    class Guesses:
        def __init__(self, model):
            pass

        def push(self, model, optimizer, version):
            self.version = version

        def generate(self, rows, *, end, ending, after, **how):
            for row in rows:
                row.append(self.version % 3, -1.0), row.append(end[0], -1.0)
            ending(rows)
            return [row for row in rows if not after(row)]

    monkeypatch.setattr(Trainer, "sampler_class", Guesses)
    flags = f"{TINY} --steps 2 --turns 1 --prompts 3 --out {tmp_path}/run"
    lines = api.run(parse_config(flags.split())).metrics
    assert [line["reward/solved"] for line in lines] == [1 / 3, 1 / 3]
