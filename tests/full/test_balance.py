"""Experts are balanced in training: the loss (8), the routers' bias (11), the loads as a metric.

Under every plan they are those of one process, and without the loss under every tree. The cells of
`check` are measure_grpo's families "balanced moe" and "biased moe"; here are a packed batch by
parallel.py alone, whole runs, and their audit.
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

from full.__main__ import main
from full.build import build
from full.chunks import tree_backward
from full.config import Config
from full.experts import Balance
from full.hf import save_hf
from full.masks import Mask
from full.micro_batches import masked_attention
from full.optimizer import persistent_buffers, reduce_gradients
from full.packing import PackedBatches, PaddedTokens
from full.parallelize import parallelize
from full.places import full
from full.plans import Grid, Plan
from full.questions import make_task
from full.ring import indices
from full.tiny import tiny, tiny_model
from full.trainer import Trainer
from full.transformer import Transformer, causal_attention
from full.trie import TokenTrie

COEF = 0.3
SEQUENCES = [[1, 2, 3, 4, 5], [1, 2], [1, 2, 3, 9, 8, 7, 6], [5], [5, 6, 6, 6]]
SHAPE = dict(vocab_size=12, num_experts=8, num_experts_per_tok=2, num_hidden_layers=4,
             sparse_layers=(0, 1, 3))  # fmt: skip
PLANS = [  # what a router sees under them: its stretch; all tokens; its tokens of a ring; a stage
    ("t2", {}), ("(attn:t2|ffn:t2)", {}), ("c2", {}), ("(attn:t2|ffn:t2)", dict(sequence=False)),
    ("t2", dict(ac="full")), ("p2", {}), ("p2", dict(schedule="zbv")),
]  # fmt: skip


def experts():
    return tiny_model("qwen3_moe", seed=3, **SHAPE)


def added(parts):
    """Sum losses, and counts (layers, experts), over some (losses, counts) of `Balance` objects."""
    loss, counts_LE = torch.zeros(1, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)
    for losses, counts in parts:
        loss += sum(losses.values())
        for layer, counts_E in counts.items():
            counts_LE[layer] += counts_E
    return loss, counts_LE


def by_hand(model):
    """(10) of each sequence by itself: its sum, its gradient, and the counts (layers, experts)."""
    parts = []
    for sequence in SEQUENCES:
        balance = Balance(torch.zeros(len(sequence)).long(), coef=COEF)
        (0 * model.hidden(torch.tensor(sequence)[None], on_routing=balance).sum()).backward()
        parts.append((balance.losses, balance.counts))
    return *added(parts), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.quick
def test_by_default_experts_are_only_counted():
    balance = Balance(torch.tensor([0, 0, 1]))
    experts().hidden(torch.tensor([[1, 2, 3]]), on_routing=balance)
    assert balance.losses == {} and [n.sum() for n in balance.counts.values()] == [6] * 3


def error(model, parts, truth):
    """The worst error of loss and gradients, over the ranks. Counts must be equal."""
    true_loss, true_LE, grads = truth
    loss, counts_LE = added(parts)
    dist.all_reduce(loss)
    dist.all_reduce(counts_LE)
    assert counts_LE.equal(true_LE)
    reduce_gradients(model)
    largest = max(g.abs().max() for g in grads.values() if g is not None)
    assert largest > 1e-3
    errors = [abs(loss - true_loss) / true_loss]
    for name, p in model.named_parameters():
        found = full(p.grad, model.part.places[name])
        true = torch.zeros(found.shape) if grads[name] is None else grads[name]
        errors.append((found - true).abs().max() / largest)
    return max(errors).item()


def _packed(rank, plans):
    """Errors of the packed batch, in rows of two or so sequences, under each plan; counts of trees.
    """
    found, truth = [], by_hand(experts())
    for text, options in plans:
        plan, parts = Plan.parse(text), []
        attention = causal_attention if plan.cp > 1 else None
        model = parallelize(
            experts(), plan, device_mesh=Grid(plan), attention=attention, **options)

        def balance(*pairs, **options):
            made = Balance(*pairs, coef=COEF, **options)
            parts.append((made.losses, made.counts))
            return made

        batches = PackedBatches(
            model, indices=indices, balance=balance, micro_tokens=10,
            attention=lambda document_1S, group: masked_attention(
                Mask.documents(doc_ids=document_1S), group, "ring"))  # fmt: skip
        masks = [[True] * (len(x) - 1) for x in SEQUENCES]
        batches.forward_backward(SEQUENCES, masks, lambda k, mask, lp, H: 0 * lp.sum())
        found.append(error(model, parts, truth))

        # A tree by chunks wants to know of all tokens, and all tensor ranks then say the same.
        if plan.tp > 1 and not options:
            trie = TokenTrie([torch.tensor(x) for x in SEQUENCES])
            loss = lambda i, lp, H: 0 * lp.sum()  # noqa: E731
            sequences_N, told = torch.bincount(trie.paths, minlength=len(trie)), []

            def routing(chunk):
                sequences_n = sequences_N[chunk.start : chunk.stop]  # noqa: B023
                held_J = torch.arange(len(sequences_n)).repeat_interleave(sequences_n)
                told.append(Balance(0 * held_J, held_J))  # noqa: B023
                return told[-1]  # noqa: B023

            tree_backward(PaddedTokens(model), trie, loss, max_tokens=3, routing=routing)
            assert added([({}, x.counts) for x in told])[1].equal(truth[1])
    return found


@pytest.mark.parametrize("plans", [
    pytest.param(PLANS[:3], id="few"), pytest.param(PLANS, marks=pytest.mark.slow, id="all")])
def test_a_rank_sees_some_tokens(tmp_path, plans):
    """Loss, gradient and counts of (10), where ranks share out tokens, stages and experts."""
    for found in ranks(tmp_path, 2, _packed, plans):
        assert len(found) == len(plans) and max(found) < 1e-12, found


@pytest.fixture
def batch():
    """Trajectories, and two Trainers that balance experts alike."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = measure_grpo.setting(**measure_grpo.BALANCED["balanced moe"]).check()
    trainers = [Trainer(config, measure_grpo.model_of("balanced moe")) for _ in range(2)]
    yield measure_grpo.rollouts(measure_grpo.setting().check())[1], *trainers
    dist.destroy_process_group()


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


BIASED = "--router-bias-rate 0.05"
BALANCED = f"--balance-coef 0.5 {BIASED}"
RUNS = {  # ranks, flags
    "one": (1, ""), "float32": (2, "--plan c2 --dtype float32"),
    "2 ranks": (2, ""), "t2": (2, "--plan t2"), "c2": (2, "--plan c2"), "p2": (2, "--plan p2"),
    "d2e2": (2, "--plan d2e2"), "p2 zbv": (2, "--plan p2 --pp-schedule zbv"),
    "p2 interleaved": (2, "--plan p2 --pp-schedule interleaved1f1b"),
    "fsdp": (2, "--data-parallel fsdp --ac full"),
    "sparse": (1, "--tree sparse --micro-tokens 60"),
    "sparse t2": (2, "--tree sparse --plan t2"), "sparse c2": (2, "--tree sparse --plan c2"),
    "sparse p2": (2, "--tree sparse --plan p2"),
    "sparse fsdp": (2, "--tree sparse --data-parallel fsdp"),
    "dta": (1, "--tree dta --chunk-tokens 9 --recompute"),
    "t2c2": (4, "--plan t2c2 --ac full"), "p2t2": (4, "--plan p2t2"),
    "sparse p2t2": (4, "--plan p2t2 --tree sparse"),
}  # fmt: skip


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


@pytest.fixture
def flags(mixture):
    """The flags of a run with more flags, which a tree trains without the loss."""
    run = f"{TASK} --lr 0.005 --eval-every 2 --model {mixture} --kl-coef 0.05"

    def with_more(steps, more="", has_tree=None):
        has_tree = "--tree" in more if has_tree is None else has_tree
        return f"{run} {BIASED if has_tree else BALANCED} --steps {steps} {more}"

    return with_more


@pytest.mark.parametrize("name", shortened([*RUNS][2:], "sparse"))
def test_balanced_runs_are_those_of_one_process(run_of, flags, tmp_path, name):  # noqa: F811
    world, more = RUNS[name]
    steps, has_tree = 2 if name == "sparse" else 4, "--tree" in more
    truth = run_of(flags(steps, has_tree=has_tree))
    assert largest_difference(trained(tmp_path, world, flags(steps, more)), truth) < 1e-8
    loads = [line["experts/load_max"] for line in truth]
    assert 1 < min(loads) and max(loads) <= 4 and len(set(loads)) > 1
    losses = [line["balance/loss"] for line in truth if "balance/loss" in line]
    assert len(losses) == (0 if has_tree else steps)
    assert all(0.5 < loss < 0.5 * 3 * 4 for loss in losses)


@pytest.mark.quick
@pytest.mark.parametrize("tree", [dict(tree="sparse"), dict(tree="dta", chunk_tokens=9)])
def test_a_tree_has_no_balance_loss(tree):
    Config(router_bias_rate=0.5, **tree).check()
    with pytest.raises(ValueError, match="--tree has no --balance-coef"):
        Config(balance_coef=0.5, **tree).check()


AUDITED = "one", "p2", "t2", "sparse t2", "float32"


@pytest.mark.parametrize("name", shortened(AUDITED, "one"))
def test_a_run_of_any_plan_is_audited(flags, tmp_path, capsys, name):
    """Loss, load, gradient and the bias behind the step, by plain loops."""
    world, more = RUNS[name]
    run = tmp_path / "run"
    more += " --save-every 1 --keep 9 --prompts 3 --group 4"
    ranks(tmp_path, world, _train, flags(2, more), run)
    assert main(["audit", str(run), "--all", "--step", "1"]) == 0
    rows = rows_of(capsys.readouterr().out)
    losses = [] if "--tree" in more else ["balance/loss", "balance/loss_first"]
    for key in (*losses, "experts/load_max", "grad_norm", "votes"):
        assert name == "float32" or rows[key][2] < 1e-10
    assert all(rows[key][0] > 0.5 for key in losses[:1]) and rows["votes"][0] > 0

    # A metric that was changed by a little is seen.
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    changed = losses[0] if losses else "experts/load_max"
    lines[1][changed] *= 1.01
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["audit", str(run), "--all", "--step", "1"]) == 1
    assert rows_of(capsys.readouterr().out)[changed][4] == "OUTSIDE"


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [
    ("t2", "p2"), ("sparse p2", "sparse c2")])
def test_a_resumed_run_goes_on_with_its_bias(run_of, flags, tmp_path, first, then):  # noqa: F811
    (tmp_path / "ranks").mkdir()
    out = tmp_path / "run"
    for name, how in (first, "--steps 2"), (then, "--resume"):
        world, more = RUNS[name]
        ranks(tmp_path / "ranks", world, _train, f"{flags(4, more)} {how}", out)
    truth = run_of(flags(4, has_tree="--tree" in RUNS[then][1]))
    assert largest_difference(read_metrics(out), truth) < 1e-8


@pytest.mark.slow
def test_the_loss_balances(mixture, tmp_path):
    """The busiest expert of the last steps has less than without it."""
    flags = f"{TASK} --dtype float32 --lr 0.005 --eval-every 30 --model {mixture} --steps 30"
    loads = []
    for more in ("", "--balance-coef 0.5"):
        lines = trained(tmp_path, 1, f"{flags} {more}")
        loads.append(sum(line["experts/load_max"] for line in lines[-5:]) / 5)
    assert loads[1] < 0.9 * loads[0]


@pytest.mark.quick
@pytest.mark.parametrize("name", ["balance_coef", "router_bias_rate"])
def test_a_model_without_experts_refuses_what_is_about_them(name):
    config = Config(**{name: 0.1}).check()
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is about experts"):
        build(config, make_task(config))


@pytest.mark.parametrize("balanced", [True, False])
def test_what_the_checkpoint_was_trained_with_is_said(mixture, tmp_path, capfd, balanced):
    """And that no OUT/hf is written: its format has no place for a router's bias."""
    flags = f"{TASK} --lr 0.005 --steps 1 --prompts 1 --group 2 --minibatches 1 --model {mixture}"
    flags += f" {BALANCED}" if balanced else ""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["full"])
        assert main([*flags.split(), "--out", str(out)]) == 0
    text = capfd.readouterr()
    assert text.err.count("router_aux_loss_coef 0.001") == 1
    assert ("--balance-coef 0.5 does" in text.err) == balanced
    assert ("here nothing does" in text.err) != balanced
    assert ("hf is not written" in text.out) == balanced
    assert (out / "hf").exists() != balanced
