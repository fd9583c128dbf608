"""Experts are balanced in training: the loss (8), the routers' bias (11), the loads as a metric.

Under every plan and tree they are those of one process. The cells of `check` are measure_grpo's
family "balanced moe"; here are a packed batch by parallel.py alone, whole runs, and their audit.
"""

import json

import measure_grpo
import pytest
import torch
import torch.distributed as dist
from conftest import shortened
from test_audit import rows_of
from test_ranks import TASK, _train, largest_difference, ranks, read_metrics, trained
from test_ranks import run_of  # noqa: F401, a fixture

import models
import ring_attention
from models import Balance, Transformer, save_hf, tiny, tiny_model
from parallel import (
    Grid, PackedBatches, PaddedTokens, Plan, balance_of_rank, full, parallelize,
    persistent_buffers, reduce_gradients,
)  # fmt: skip
from train_grpo import Config, Trainer, build, main, make_task, masked_attention
from tree_attention import TokenTrie, tree_backward

# One batch, by parallel.py and models.py alone ------------------------------------------------

COEF = 0.3
SEQUENCES = [[1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 9, 8, 7, 6], [5], [5, 6, 6, 6]]
SHAPE = dict(vocab_size=12, num_experts=8, num_experts_per_tok=2, num_hidden_layers=4,
             sparse_layers=(0, 1, 3))  # fmt: skip
PLANS = {  # what a router sees under them: its stretch; all tokens; its tokens of a ring; a stage
    "t2": ("t2", {}),
    "etp 2": ("(attn:t2|ffn:t2)", {}),
    "etp 2 without sequence": ("(attn:t2|ffn:t2)", dict(sequence=False)),
    "t2 again": ("t2", dict(ac="full")),
    "c2": ("c2", {}),
    "p2": ("p2", {}),
    "p2 zbv": ("p2", dict(schedule="zbv")),
}


def document_attention(document_1S, group):
    """What `PackedBatches` asks for: each document of a row by itself."""
    return masked_attention(ring_attention.Mask.documents(doc_ids=document_1S), group, "ring")


def experts():
    return tiny_model("qwen3_moe", seed=3, **SHAPE)


def by_hand(model):
    """(10) of each sequence by itself: its sum, its gradient, and the counts (layers, experts)."""
    total = torch.zeros((), dtype=torch.float64)
    counts_LE = torch.zeros(4, 8, dtype=torch.float64)
    for sequence in SEQUENCES:
        balance = Balance(torch.zeros(len(sequence)).long(), coef=COEF)
        (0 * model.hidden(torch.tensor(sequence)[None], balance=balance).sum()).backward()
        total += sum(balance.losses.values())
        for layer, counts_E in balance.counts.items():
            counts_LE[layer] += counts_E
    return total, {name: p.grad for name, p in model.named_parameters()}, counts_LE


def error(model, parts, truth):
    """The worst error of loss and gradients. Counts must be equal.

    parts: (losses, counts) of this rank's `Balance` objects.
    """
    total, grads, true_LE = truth
    loss = torch.zeros(1, dtype=torch.float64)
    counts_LE = torch.zeros_like(true_LE)
    for losses, counts in parts:
        loss += sum(losses.values())
        for layer, counts_E in counts.items():
            counts_LE[layer] += counts_E
    dist.all_reduce(loss)
    dist.all_reduce(counts_LE)
    assert counts_LE.equal(true_LE)
    reduce_gradients(model)
    largest = max(g.abs().max() for g in grads.values() if g is not None)
    assert largest > 1e-3
    worst = abs(loss[0] - total) / total
    for name, p in model.named_parameters():
        true = torch.zeros(p.shape) if grads[name] is None else grads[name]
        worst = max(worst, (full(p.grad) - true).abs().max() / largest)
    return worst.item()


def _packed(rank, names, fault):
    """{plan: error} of the packed batch, in rows of two or so sequences; and of one tree."""
    found = {}
    truth = by_hand(experts())
    for name in names:
        plan, options = Plan.parse(PLANS[name][0]), PLANS[name][1]
        attention = models.causal_attention if plan.cp > 1 else None
        model = parallelize(
            experts(), plan, device_mesh=Grid.make(plan), attention=attention, **options)
        parts = []

        def balance(sequence_j, token_j, *, sequences, groups):
            groups = [] if fault else groups
            made = Balance(sequence_j, token_j, coef=COEF, sequences=sequences, groups=groups)
            parts.append((made.losses, made.counts))
            return made

        batches = PackedBatches(
            model, attention=document_attention, indices=ring_attention.indices,
            balance=balance, micro_tokens=10,
        )  # fmt: skip
        masks = [[True] * (len(x) - 1) for x in SEQUENCES]
        batches.forward_backward(SEQUENCES, masks, lambda k, mask, lp, H: 0 * lp.sum())
        found[name] = error(model, parts, truth)

        # A tree by blocks wants to know of all tokens, and all tensor ranks then say the same.
        if plan.tp > 1 and options.get("sequence", True) and "ac" not in options:
            for p in model.parameters():
                p.grad = None
            wrapped = PaddedTokens(model, 2, whole_routing=True)
            trie = TokenTrie([torch.tensor(x) for x in SEQUENCES])
            how = dict(max_tokens=3, aux_coef=COEF)
            result = tree_backward(wrapped, trie, lambda i, lp, H: 0 * lp.sum(), **how)
            parts = [({"": result.aux_loss}, result.router_counts)] if rank == 0 else []
            found[f"{name}, blocks"] = error(model, parts, truth)
    return found


FEW = "t2", "etp 2", "c2"
SOME = [pytest.param(FEW, id="few"), pytest.param(PLANS, marks=pytest.mark.slow, id="all")]


@pytest.mark.parametrize("names", SOME)
def test_a_rank_sees_some_tokens(tmp_path, names):
    """Loss, gradient and counts of (10), where ranks share out tokens, stages and experts."""
    for found in ranks(tmp_path, 2, _packed, names, False):
        assert len(found) == len(names) + 2 and max(found.values()) < 1e-12, found


@pytest.mark.slow
def test_a_sum_of_counts_that_is_left_out_is_seen(tmp_path):
    for found in ranks(tmp_path, 2, _packed, FEW, True):
        assert min(found[name] for name in FEW) > 1e-3


@pytest.mark.quick
def test_padding_and_what_fills_up_is_nobodys():
    model = experts()
    got = {}

    def balance(sequence_j, token_j, **options):
        got.update(options, pairs=list(zip(sequence_j.tolist(), token_j.tolist())))

    batches = PackedBatches(model, attention=document_attention, balance=balance)
    _, (row,) = batches.pack_micro_batches([[1, 2], [3]], [[True], []])
    balance_of_rank(model, row.sequence_J, row.token_J, torch.arange(3), balance)
    assert got == dict(pairs=[(0, 0), (0, 1), (1, 2)], sequences=2, groups=[])
    balance_of_rank(model, row.sequence_J[:0], row.token_J[:0], torch.arange(3), balance)
    assert got == dict(pairs=[], sequences=0, groups=[])


@pytest.mark.quick
def test_the_bias_selects_experts_and_does_not_weigh_them():
    layer = tiny_model("qwen3_moe", seed=3, router_bias_rate=0.1, **SHAPE).model.layers[0].mlp
    x_NM = torch.randn(20, layer.gate.in_features, generator=torch.Generator().manual_seed(0))
    x_NM = x_NM.to(layer.gate.weight.dtype)
    unbiased_NK = layer.route(x_NM)[1]
    layer.votes += torch.arange(8) - 4
    probs_NE, topk_ids_NK, weights_NK = layer.route(x_NM)
    assert not topk_ids_NK.equal(unbiased_NK)
    wanted_NK = probs_NE.gather(1, topk_ids_NK)
    assert torch.allclose(weights_NK, wanted_NK / wanted_NK.sum(1, keepdim=True))


# The Trainer's calls --------------------------------------------------------------------------


@pytest.fixture
def batch():
    """Trajectories, and the settings of a Trainer that balances experts."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = measure_grpo.setting(**measure_grpo.BALANCED["balanced moe"]).check()
    yield config, measure_grpo.rollouts(measure_grpo.setting().check())[1]
    dist.destroy_process_group()


def votes_of(trainer):
    """The votes of all routers, (layers, experts)."""
    return torch.stack([*persistent_buffers(trainer.model).values()])


def numbers(trainer):
    """All gradients and the votes, as one vector."""
    grads = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat([*grads, votes_of(trainer).flatten().double()])


@pytest.mark.quick
def test_two_calls_make_one_step(batch):
    """`sequences` says how many both have: gradient, metrics and votes are those of one call."""
    config, batch = batch
    whole, parts = (Trainer(config, measure_grpo.model_of("balanced moe")) for _ in range(2))
    Z = whole.loss_denominator(batch)
    before = votes_of(whole).clone()
    found = whole.forward_backward(batch, Z)
    halves = [parts.forward_backward(half, Z, sequences=len(batch))
              for half in (batch[:5], batch[5:])]  # fmt: skip
    assert torch.allclose(numbers(whole), numbers(parts), rtol=1e-12, atol=1e-14)
    assert sum(x["balance/loss"] for x in halves) == pytest.approx(found["balance/loss"], 1e-12)
    for trainer in (whole, parts):
        trainer.optim_step(0.0)
    assert votes_of(whole).ne(before).any(1).all() and votes_of(whole).equal(votes_of(parts))


@pytest.mark.quick
def test_a_skipped_step_moves_no_bias(batch):
    """And what it counted is forgotten, as its gradient is: the next step is a first one."""
    config, batch = batch
    trainer, fresh = (Trainer(config, measure_grpo.model_of("balanced moe")) for _ in range(2))
    trainer.forward_backward(batch[1:], 1.0)
    before = votes_of(trainer).clone()
    next(trainer.model.parameters()).grad[0] = float("nan")
    assert "nonfinite" in trainer.optim_step(0.0)
    assert votes_of(trainer).equal(before)
    for one in (trainer, fresh):
        one.forward_backward(batch[:1], 1.0)
        one.optim_step(0.0)
    assert votes_of(trainer).equal(votes_of(fresh))


# Whole runs -----------------------------------------------------------------------------------

BALANCED = "--balance-coef 0.5 --router-bias-rate 0.05"
RUNS = {  # ranks, flags
    "2 ranks": (2, ""), "t2": (2, "--plan t2"), "c2": (2, "--plan c2"), "p2": (2, "--plan p2"),
    "d2e2": (2, "--plan d2e2"), "p2 zbv": (2, "--plan p2 --pp-schedule zbv"),
    "p2 interleaved": (2, "--plan p2 --pp-schedule interleaved1f1b"),
    "fsdp": (2, "--data-parallel fsdp --ac full"),
    "sparse": (1, "--tree sparse --micro-tokens 60"),
    "sparse t2": (2, "--tree sparse --plan t2"), "sparse c2": (2, "--tree sparse --plan c2"),
    "sparse p2": (2, "--tree sparse --plan p2"),
    "sparse fsdp": (2, "--tree sparse --data-parallel fsdp"),
    "dta": (1, "--tree dta --max-tokens 9 --recompute"),
    "dta t2e2": (2, "--tree dta --max-tokens 9 --plan t2e2"),
    "d2t2e4": (4, "--plan d2t2e4 --tree dta --max-tokens 9"),
    "t2c2": (4, "--plan t2c2 --ac full"), "p2t2": (4, "--plan p2t2 --tree sparse"),
}  # fmt: skip
STEPS = {name: 4 for name in RUNS} | {"sparse": 2}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The directory of a model with experts, as transformers would write it."""
    shape = SHAPE | dict(vocab_size=7, initializer_range=0.2)  # the task has 7 tokens
    config = tiny("qwen3_moe", eos_token_id=(1,), **shape)
    folder = tmp_path_factory.mktemp("mixture")
    save_hf(Transformer(config).double().init_weights(0), folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"router_aux_loss_coef": 0.001}))
    return folder


def flags_of(mixture, steps):
    flags = f"{TASK} --lr 0.005 --eval-every 2 --model {mixture} {BALANCED} --steps {steps}"
    return f"{flags} --kl-coef 0.05 --kl k2"


@pytest.mark.parametrize("name", shortened(RUNS, "sparse"))
def test_balanced_runs_are_those_of_one_process(run_of, mixture, tmp_path, name):  # noqa: F811
    world, more = RUNS[name]
    flags = flags_of(mixture, STEPS[name])
    truth = run_of(flags)
    found = trained(tmp_path, world, f"{flags} {more}")
    assert largest_difference(found, truth) < 1e-8
    loads = [line["experts/load_max"] for line in truth]
    assert 1 < min(loads) and max(loads) <= 4 and len(set(loads)) > 1
    assert all(0.5 < line["balance/loss"] < 0.5 * 3 * 4 for line in truth)


def test_an_audit_has_rows_of_its_own_for_experts(mixture, tmp_path, capsys):
    """One process, float64: loss, load, gradient and the bias behind the step, by plain loops."""
    flags = f"{flags_of(mixture, 2)} --save-every 1 --keep 9 --prompts 3 --group 4"
    ranks(tmp_path, 1, _train, flags, tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), "--step", "1"]) == 0
    rows = rows_of(capsys.readouterr().out)
    for name in ("balance/loss", "balance/loss_first", "experts/load_max", "grad_norm", "votes"):
        assert rows[name][2] < 1e-10 and rows[name][4] == "ok"
    assert rows["balance/loss"][0] > 0.5 and rows["votes"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p2", "sparse t2", "dta t2e2", "float32"])
def test_a_run_of_any_plan_is_audited(mixture, tmp_path, capsys, name):
    world, more = RUNS.get(name, (2, "--plan c2 --dtype float32"))
    flags = f"{flags_of(mixture, 3)} {more} --save-every 1 --keep 9"
    ranks(tmp_path, world, _train, flags, tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), "--step", "2"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert {"balance/loss", "experts/load_max", "votes"} <= rows.keys()

    # A metric that was changed by a little, and a vote that was changed, are seen.
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[2]["balance/loss"] *= 1.01
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["audit", str(tmp_path / "run"), "--step", "2"]) == 1
    assert rows_of(capsys.readouterr().out)["balance/loss"][4] == "OUTSIDE"


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [("t2", "p2"), ("p2", "dta t2e2"), ("fsdp", "sparse c2")])
def test_a_resumed_run_goes_on_with_its_bias(run_of, mixture, tmp_path, first, then):  # noqa: F811
    flags = flags_of(mixture, 4)
    (tmp_path / "ranks").mkdir()
    out = tmp_path / "run"
    for name, how in (first, "--steps 2"), (then, "--resume"):
        world, more = RUNS[name]
        ranks(tmp_path / "ranks", world, _train, f"{flags} {more} {how}", out)
    assert largest_difference(read_metrics(out), run_of(flags)) < 1e-8


@pytest.mark.slow
def test_the_loss_balances(mixture, tmp_path):
    """The busiest expert of the last steps has less than without it."""
    flags = f"{TASK} --dtype float32 --lr 0.005 --eval-every 30 --model {mixture} --steps 30"
    loads = []
    for more in ("", "--balance-coef 0.5"):
        lines = trained(tmp_path, 1, f"{flags} {more}")
        loads.append(sum(line["experts/load_max"] for line in lines[-5:]) / 5)
    assert loads[1] < 0.9 * loads[0]


# What is said and refused ---------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("name", ["balance_coef", "router_bias_rate"])
def test_a_model_without_experts_refuses_what_is_about_them(name):
    config = Config(**{name: 0.1}).check()
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is about experts"):
        build(config, make_task(config))


@pytest.mark.parametrize("balanced", shortened([True, False], True))
def test_what_the_checkpoint_was_trained_with_is_said(mixture, tmp_path, capfd, balanced):
    """And that no OUT/hf is written: its format has no place for a router's bias."""
    flags = f"{TASK} --lr 0.005 --steps 1 --prompts 1 --group 2 --minibatches 1 --model {mixture}"
    flags += f" {BALANCED}" if balanced else ""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train_grpo.py"])
        assert main([*flags.split(), "--out", str(out)]) == 0
    text = capfd.readouterr()
    assert text.err.count("router_aux_loss_coef 0.001") == 1
    assert ("--balance-coef 0.5 does" in text.err) == balanced
    assert ("hf is not written" in text.out) == balanced
    assert (out / "hf").exists() != balanced
