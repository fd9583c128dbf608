"""Experts: those that the sampler recorded are replayed, weighted by the trainer's own router; they
are balanced in training, by a loss and by the routers' bias."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import shortened
from test_ranks import TASK, read_metrics, trained
from test_run import good

import models
from full import equivalence
from full.audit import audited
from full.batches import RolloutQueue
from full.equivalence import BASE, trainer_of
from full.experts import Balance, Replay, RouteRecorder
from full.export import policy_in
from full.flags import parse_config
from full.generate import generate
from full.hf import save_hf
from full.optimizer import persistent_buffers
from full.questions import make_task
from full.rollouts import Sampler, Trajectory
from full.talk import evaluated, settings_of_run
from full.tiny import TwoTurns, tiny_model

SHAPE = dict(vocab_size=12, num_experts=8, num_experts_per_tok=2, num_hidden_layers=3,
             sparse_layers=(0, 2), initializer_range=0.2)  # fmt: skip


def moe():
    """A small model with experts in two of three layers."""
    return tiny_model("qwen3_moe", **SHAPE)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The flags of a run with a model that has experts."""
    folder = tmp_path_factory.mktemp("moe")
    save_hf(tiny_model("qwen3_moe", eos_token_id=(1,), **SHAPE), folder)
    small = "--lr 0.01 --steps 2 --eval-every 2 --save-every 1 --prompts 3 --group 4"
    return f"{TASK} {small} --model {folder}"


# One model -------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("slots", [None, 2])
def test_a_row_records_the_experts_of_each_token_that_was_fed(slots):
    """Shared prompts of any lengths, rows that wait, forks and a user's turn."""
    model = moe()
    rng = np.random.default_rng(0)
    prompts = [[1, 2, 3], [4], [1, 2, 3], [5, 6]]
    rows = [models.Row(prompt, rng.random(12)) for prompt in prompts]

    def after(row):
        row.queue.extend([9, 8])
        return [row] if row.new < 6 else []

    done = generate(model, rows, max_new_tokens=10, end=(2, 3, 7), after=after, slots=slots,
                    routes=True)  # fmt: skip
    assert any(9 in row.tokens for row in done)
    for row in done:
        recorder = RouteRecorder()
        model.hidden(torch.tensor([row.tokens[:-1]]), on_routing=recorder)
        assert (np.stack(row.routes) == recorder.routes()).all()
        assert len(row.routes) == len(row.tokens) - 1


class Rollout:
    """A sequence with random experts."""

    def __init__(self, seed, length=9):
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, 12, length).tolist()
        drawn = [[rng.permutation(8)[:2] for _ in range(2)] for _ in range(length - 1)]
        self.routes = np.array(drawn).tolist()


@pytest.mark.quick
@pytest.mark.parametrize("normalized", [True, False])
def test_a_layer_weights_the_recorded_experts_token_by_token(normalized):
    """Equations (6) and (12) in loops, with no code of `route`."""
    mlp = moe().model.layers[0].mlp
    mlp.config = dataclasses.replace(mlp.config, norm_topk_prob=normalized)
    M, K = mlp.config.hidden_size, 2
    torch.manual_seed(0)
    x_NM = torch.randn(5, M, dtype=torch.float64)
    ids_NK = torch.stack([torch.randperm(8)[:K] for _ in range(5)])
    out_1NM = mlp(x_NM[None], on_routing=Replay(ids_NK[:, None], [0]))
    counts = torch.eye(8, dtype=torch.int64)
    for x_M, ids_K, out_M in zip(x_NM, ids_NK, out_1NM[0]):
        p_E = (mlp.gate.weight @ x_M).softmax(-1)
        weights_K = p_E[ids_K] / (p_E[ids_K].sum() if normalized else 1)
        true_M = sum(w * mlp.experts(x_M[None], counts[e])[0] for w, e in zip(weights_K, ids_K))
        assert (out_M - true_M).abs().max() < 1e-13


@pytest.mark.quick
def test_the_order_of_a_set_of_experts_is_kept_and_is_not_a_change():
    ids_NK = torch.tensor([[3, 1], [0, 2], [5, 4]])
    replay = Replay(torch.tensor([[[1, 3]], [[0, 1]], [[-1, -1]]]), [7])
    used = replay.choose(ids_NK, layer=7)
    assert used.tolist() == [[1, 3], [0, 1], [5, 4]]
    assert replay.changed[7].tolist() == [1, 2]


# Runs ------------------------------------------------------------------------------------------

def test_replay_makes_the_gap_of_a_run_in_bfloat16_smaller(flags, tmp_path):
    run = f"{flags} --dtype float32 --compute-dtype bfloat16 --minibatches 1 --group 32 --steps 1"
    plain = trained(tmp_path, 1, run)[0]
    replayed = trained(tmp_path, 1, f"{run} --replay-routes")[0]
    assert 0 < replayed["experts/replay_changed"] < 0.1
    assert replayed["tokens/generated"] == plain["tokens/generated"]
    assert replayed["logprob_gap/max"] < plain["logprob_gap/max"] / 2
    assert replayed["logprob_gap/kl"] < plain["logprob_gap/kl"] / 2


AUDITED = {
    "bfloat16": "--compute-dtype bfloat16 --dtype float32", "float64": "",
    "stale": "--staleness 1 --dtype float32 --generator-dtype bfloat16 --kl-coef 0.1",
    "bias": "--router-bias-rate 0.05 --balance-coef 0.1 --kl-coef 0.05 --dtype float32",
    "forks": "--tree sparse --forks 2 --fork-turns 1 --advantage per_branch --dtype float32",
    "exact": "--exact --dtype float32",
}
# What becomes of the recorded experts of rollouts.jsonl, (T, L, K), and what the audit says.
SLIPS = {
    "another layer's": (lambda routes: [x[::-1] for x in routes], "sampling/routes is outside"),
    "the token before's": (lambda routes: [routes[0], *routes[:-1]], "sampling/routes is outside"),
    "none": (lambda routes: None, "is not a rollout: expected routes"),
}


@pytest.fixture(scope="module")
def runs(flags, tmp_path_factory):
    """name -> the directory of a run that is audited, made once."""
    made = {}

    def run(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("run") / "run"
            more = f"--replay-routes --log-rollouts all {AUDITED[name]}"
            good(made[name].parent, f"{flags} {more} --out {made[name]}")
        return made[name]

    return run


@pytest.mark.parametrize("name", shortened(AUDITED, "bfloat16", "stale", "bias"))
def test_the_step_by_hand_uses_the_recorded_experts(runs, process_group, name):
    report = audited(runs(name), 1)
    assert report.wrong is None
    rows = {row.key: row for row in report.rows}
    assert {"sampling/routes", "experts/replay_changed"} <= rows.keys()
    of_bias = {"balance/loss", "balance/loss_first", "experts/load_max", "votes"}
    assert name != "bias" or of_bias <= rows.keys()
    line = read_metrics(runs(name))[1]
    assert (line["experts/replay_changed"] > 0) == (name != "float64" or line["ratio/max"] > 1)


@pytest.mark.parametrize("slip", shortened(SLIPS, "another layer's", "none"))
def test_the_audit_names_experts_that_no_router_selected(runs, process_group, tmp_path, slip):
    change, says = SLIPS[slip]
    run = shutil.copytree(runs("bfloat16"), tmp_path / "run")
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").open()]
    changed = [json.dumps(line | dict(routes=change(line["routes"]))) for line in lines]
    (run / "rollouts.jsonl").write_text("\n".join(changed) + "\n")
    try:
        verdict = audited(run, 1).verdict
    except ValueError as error:
        verdict = f"{error}"
    assert says in verdict


# Experts are balanced ----------------------------------------------------------------------------
# That loss (8), bias (11) and loads are those of one process under every plan is a row of
# full/equivalence.py. Here is what one process counts, skips and refuses.


@pytest.mark.quick
def test_by_default_experts_are_only_counted():
    balance = Balance(torch.tensor([0, 0, 1]))
    moe().hidden(torch.tensor([[1, 2, 3]]), on_routing=balance)
    assert balance.losses == {} and [n.sum() for n in balance.counts.values()] == [6] * 2


@pytest.fixture
def batch(process_group):
    """Trajectories, and two Trainers that balance experts alike."""
    config = parse_config(f"{BASE} {equivalence.RUNS['balanced']}".split()).check()
    trainers = [trainer_of(config, "routers") for _ in range(2)]
    played = RolloutQueue(config, TwoTurns(), trainers[0]).get(0)
    trainers[0].prepare(played)
    return played.trained(), *trainers


def votes_of(trainer):
    return torch.stack([*persistent_buffers(trainer.model).values()])  # (layers, experts)


@pytest.mark.quick
def test_two_calls_make_one_step(batch):
    """`sequences` says how many both have: gradient, metrics and votes are those of one call."""
    batch, whole, parts = batch
    Z = whole.loss_denominator(batch)
    before = votes_of(whole).clone()
    found = whole.forward_backward(batch, Z)
    halves = [parts.forward_backward(half, Z, num_sequences=len(batch))
              for half in (batch[:5], batch[5:])]  # fmt: skip
    for a, b in zip(whole.model.parameters(), parts.model.parameters()):
        assert a.grad is b.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-14)
    assert sum(x["balance/loss"] for x in halves) == pytest.approx(found["balance/loss"], 1e-12)
    for trainer in (whole, parts):
        trainer.optim_step(0.0)
    assert votes_of(whole).ne(before).any(1).all() and votes_of(whole).equal(votes_of(parts))


@pytest.mark.quick
def test_a_skipped_step_moves_no_bias(batch):
    """And what it counted is forgotten, as its gradient is: the next step is a first one."""
    batch, trainer, fresh = batch
    trainer.forward_backward(batch[1:], 1.0)
    before = votes_of(trainer).clone()
    next(trainer.model.parameters()).grad[0] = float("nan")
    assert "nonfinite" in trainer.optim_step(0.0)
    assert votes_of(trainer).equal(before)
    for one in (trainer, fresh):
        one.forward_backward(batch[:1], 1.0)
        one.optim_step(0.0)
    assert votes_of(trainer).equal(votes_of(fresh))


@pytest.mark.parametrize("balanced", [True, False])
def test_what_the_checkpoint_was_trained_with_is_said(flags, tmp_path, balanced):
    """And that no OUT/hf is written: its format has no place for a router's bias."""
    folder = flags.split("--model ")[1]
    model = shutil.copytree(folder, tmp_path / "model")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"router_aux_loss_coef": 0.001}))
    more = "--steps 1 --prompts 1 --group 2 --minibatches 1 --out run"
    more += " --balance-coef 0.5 --router-bias-rate 0.05" * balanced
    out, err = good(tmp_path, f"{flags.replace(folder, str(model))} {more}")
    assert err.count("router_aux_loss_coef 0.001") == 1
    assert ("--balance-coef 0.5 does" in err) == balanced
    assert ("here nothing does" in err) != balanced
    assert ("hf is not written" in out) == balanced
    assert (tmp_path / "run/hf").exists() != balanced


# What is refused -------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("change", [
    lambda x: x[:-1], lambda x: x + [x[0]], lambda x: [[[8, 1], y[1]] for y in x],
    lambda x: [[[1, 1], y[1]] for y in x], lambda x: [[[-1, 1], y[1]] for y in x],
    lambda x: [[[0.5, 1], y[1]] for y in x], lambda x: [y[:1] for y in x], lambda x: "routes",
    lambda x: [[["a", 1], y[1]] for y in x],
])  # fmt: skip
def test_damaged_routes_are_an_error(change):
    config = moe().config
    s = Rollout(2)
    row = dict(tokens=s.tokens, sampled=[1] * 8, logprobs=[0.0] * 8, truncated=False, path=[],
               rewards=[], routes=s.routes)  # fmt: skip
    made = Trajectory.from_json(0, row, config)
    assert made.to_json()["routes"] == s.routes
    with pytest.raises(ValueError, match=r"group 0: expected routes \(8, 2, 2\)"):
        Trajectory.from_json(0, row | dict(routes=change(s.routes)), config)


class WithoutRoutes(Sampler):
    """A sampler that records none, as an engine."""

    def generate(self, rows, /, **how):
        assert "routes" not in how
        return super().generate(rows, **how)


def test_held_out_prompts_are_played_without_routes(runs, process_group):
    """By the run's own evaluation, by `eval` with any sampler, and by the audit."""
    config = dataclasses.replace(settings_of_run(runs("bfloat16")), eval_prompts=2)
    task = make_task(config)
    model = policy_in(runs("bfloat16") / "step-00000002", config, task, "float32")
    figures, *_ = evaluated(config, task, WithoutRoutes(model), 2)
    assert {"solved", "pass@1", "pass@2"} <= figures.keys()
