"""The conformance kit finds planted faults, each in the right property, and passes right losses.

Other code bases: their losses, and ours in their trainers. Whole steps of TRL's: test_trl.py.
"""

import importlib.util
import re
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import adapters
import pytest
import torch
from conformance import loss as kit
from conftest import ROOT
from test_ranks import as_script

CLIP = dict(objective="clip", clip_low=0.2, clip_high=0.28)
GSPO, GMPO = CLIP | dict(objective="gspo"), CLIP | dict(objective="gmpo")
CISPO = CLIP | dict(objective="cispo", clip_high=1.0)
SAPO, DPPO = dict(objective="sapo"), dict(objective="dppo", clip_low=0.15, clip_high=0.15)
SEQUENCES = dict(aggregation="sequence_mean")


NOTE = "NaN at padding"


def verdicts(loss, settings):
    """Names of the properties that fail, and of notes; each says why. A failure has an example."""
    rows = kit.conformance(loss, settings)
    assert all(row["why"] for row in rows if row["verdict"] != "passed")
    failed = [row for row in rows if row["verdict"] == "failed"]
    assert all(row["example"] for row in failed)
    return {row["property"] for row in failed + [x for x in rows if x["verdict"] == "note"]}


# Right losses, as a trainer would write them ---------------------------------------------------
# An option of a loss is a slip of it, see below.


def weighted(l, batch):
    """Sum of the tokens' losses with the weights of the aggregation."""
    weight = 1.0
    if batch.settings["aggregation"] == "sequence_mean":
        weight = 1 / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return (weight * torch.where(batch.mask, l, 0.0)).sum() / batch.Z


def log_ratio(batch):
    return torch.where(batch.mask, batch.lp - batch.old, 0.0)


def ratio(batch):
    return log_ratio(batch).exp()


def gain(r, batch, low=0.2, high=0.28):
    A = batch.advantage
    return torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)


def mean_ratio(d, batch):
    """The ratio of a sequence."""
    return (d.sum(-1, keepdim=True) / batch.mask.sum(-1, keepdim=True).clamp(min=1)).exp()


def clip(batch, **slip):
    return weighted(-gain(ratio(batch), batch, **slip), batch)


def clip_of_logits(batch):
    """As the file's help says for a loss that takes logits."""
    lp = torch.where(batch.mask, batch.lp, -1.0)
    logits = torch.stack([lp, torch.log1p(-lp.exp())], -1)
    return clip(SimpleNamespace(**vars(batch) | dict(lp=logits.log_softmax(-1)[..., 0])))


def reinforce(batch, weight=1.0):
    return weighted(-weight * batch.advantage * batch.lp, batch)


def cispo(batch, detach=torch.detach):
    return reinforce(batch, detach(ratio(batch).clamp(0.8, 2.0)))


def gspo(batch, ratio_of=mean_ratio):
    r = ratio_of(log_ratio(batch), batch)
    return weighted(-gain(r, batch).expand_as(batch.lp), batch)


def sapo(batch, tau_neg=1.05):
    r, A = ratio(batch), batch.advantage
    tau = torch.where(A > 0, 1.0, tau_neg)
    return weighted(-4 / tau * torch.sigmoid(tau * (r - 1)) * A, batch)


def gmpo(batch):
    d, A = log_ratio(batch), batch.advantage
    d = torch.where(A > 0, d.clamp(max=0.28), torch.where(A < 0, d.clamp(min=-0.2), d))
    return weighted((-mean_ratio(d, batch) * A).expand_as(d), batch)


def dppo(batch, two_sided=False):
    p, q, A = batch.lp.exp(), batch.old.exp(), batch.advantage
    far = torch.where(A > 0, p - q > 0.15, q - p > 0.15)
    far = (p - q).abs() > 0.15 if two_sided else far
    return reinforce(batch, torch.where(far, 0.0, ratio(batch).clamp(max=20.0)).detach())


OURS = dict(
    clip=CLIP, dual_clip=CLIP | dict(dual_clip=3.0), cispo=CISPO | dict(clip_low=1.0), gspo=GSPO,
    gmpo=GMPO, sapo=SAPO, reinforce=dict(objective="reinforce"), dppo=DPPO,
)  # fmt: skip
RIGHT = {
    **{f"ours {name}": (adapters.ours, settings) for name, settings in OURS.items()},
    "clip": (clip, CLIP), "clip by sequence": (clip, CLIP | SEQUENCES),
    "clip of logits": (clip_of_logits, CLIP),
    "reinforce": (reinforce, dict(objective="reinforce")), "cispo": (cispo, CISPO),
    "gspo": (gspo, GSPO), "gspo by sequence": (gspo, GSPO | SEQUENCES), "sapo": (sapo, SAPO),
    "gmpo": (gmpo, GMPO), "gmpo by sequence": (gmpo, GMPO | SEQUENCES), "dppo": (dppo, DPPO),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_passes_all(name):
    assert verdicts(*RIGHT[name]) == set()


def needs(name):
    return pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"pip install {name}")


FAILURES = {  # for each of adapters.CASES, as in the table of full/RESULTS.md
    adapters.verl: 8 * [{}] + [{"micro-batches": "2.000 times"}, {}],
    adapters.trl: 7 * [{}] + [{"empty sequence": "the loss is"}],
    adapters.openrlhf: 4 * [{}],
}  # fmt: skip
THEIRS = [
    pytest.param(adapter, settings, failures, marks=needs(adapter.__name__))
    for adapter, cases in adapters.CASES.items()
    for settings, failures in zip(cases, FAILURES[adapter], strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize("adapter, settings, failures", THEIRS)
def test_the_losses_of_other_code_bases_are_what_the_table_says(adapter, settings, failures):
    """Of verl 0.9.1, TRL 1.16.0 and OpenRLHF 0.11.2."""
    _, failed = adapters.outcome(adapter, settings)
    assert failed.keys() == failures.keys()
    for name, words in failures.items():
        assert words in failed[name]


MEASURED = {"value", "gradient"}
SUBJECTS = [  # file, package, environment, settings, and the properties that fail
    ("skyrl_losses", "skyrl", {}, [], set()),
    ("skyrl_losses", "skyrl", dict(COV="clip_cov"), [], set()),
    ("skyrl_losses", "skyrl", dict(COV="kl_cov"), [],
     MEASURED | {"clip edges, signs", "global count"}),
    ("areal_losses", "areal", {}, ["objective=gspo"], set()),
    ("areal_losses", "areal", dict(M2PO="0.04"), [],
     MEASURED | {"micro-batches", "clip edges, signs"}),
    ("ms_swift_losses", "swift", {}, [], set()),
    ("ms_swift_losses", "swift", dict(GENERATION="2"), [], MEASURED),
    ("torchtitan_losses", "torchtitan", {}, [], set()),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("file, package, environment, settings, failed", [
    pytest.param(*row, marks=needs(row[1])) for row in SUBJECTS
])  # fmt: skip
def test_a_loss_of_the_subjects_is_what_the_table_says(
    file, package, environment, settings, failed, tmp_path
):
    """Of SkyRL 0.3.0, AReaL 1.0.4, ms-swift 4.6.0 and torchtitan 0.3.0, on the Python path."""
    target = f"{ROOT}/conformance/subjects/{file}.py:loss"
    code, out, err = as_script(
        ROOT / "conformance" / "loss.py", target, *settings, cwd=tmp_path, **environment
    )
    assert {name for name in kit.PROPERTIES if re.search(f"{name} +failed", out)} == failed, err
    assert code == bool(failed)


# Our loss in other code bases ------------------------------------------------------------------


def recipe(name):
    """What the section of full/RECIPES.md defines for a package, as a dict."""
    page = (ROOT / "full" / "RECIPES.md").read_text()
    section = page.split("## Our loss in other code bases")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    found = {}
    exec(next(text for text in blocks if f"from {name}." in text or f"from {name} " in text), found)
    return found


@pytest.mark.slow
@needs("verl")
def test_our_loss_in_verl_passes_all(monkeypatch):
    recipe("verl")
    monkeypatch.setitem(adapters.VERL_MODES, "clip", "ours")
    assert verdicts(adapters.verl, {}) == set()


@pytest.mark.slow
@needs("trl")
def test_our_loss_in_trl_passes_all(monkeypatch):
    monkeypatch.setattr("trl.trainer.grpo_trainer.GRPOTrainer", recipe("trl")["Trainer"])
    assert verdicts(adapters.trl, {}) == set()


def stand_in(monkeypatch, name, **what):
    """Put a module in place of one that cannot be installed here."""
    module = ModuleType(name)
    vars(module).update(what)
    parts = name.split(".")
    for n in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), ModuleType(parts[n - 1]))
    monkeypatch.setitem(sys.modules, name, module)


def test_our_loss_for_slime_passes_all(monkeypatch):
    """slime's forward is a stand-in; the caller divides by the tokens of the step."""
    stand_in(
        monkeypatch, "slime.backends.megatron_utils.loss",
        get_log_probs_and_entropy=lambda logits, **_: (None, {"log_probs": [*logits]}),
    )  # fmt: skip
    their_loss = recipe("slime")["loss"]

    def loss(batch):
        lists = dict.fromkeys(("unconcat_tokens", "total_lengths", "response_lengths"))
        lists |= dict(log_probs=[*batch.old], advantages=[*batch.advantage])
        lists["loss_masks"] = [*batch.mask]
        args = SimpleNamespace(eps_clip=0.2, eps_clip_high=0.28)
        return their_loss(args, lists, batch.lp, None)[0] / batch.tokens

    assert verdicts(loss, CLIP) == set()


def test_our_loss_for_prime_rl_passes_all(monkeypatch):
    """prime-rl calls it for one sequence after another and divides by the tokens of the step."""
    stand_in(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=SimpleNamespace)
    their_loss = recipe("prime_rl")["loss"]

    def loss(batch):
        total = 0.0
        for lp, old, A, mask in zip(batch.lp, batch.old, batch.advantage, batch.mask):
            inputs = SimpleNamespace(
                trainer_logprobs=lp, inference_logprobs=old, advantages=A / 2, loss_mask=mask,
                loss_weights=torch.full_like(lp, 2.0),
            )  # fmt: skip
            total = total + their_loss(inputs, clip_high=0.28).loss
        return total / batch.tokens

    assert verdicts(loss, CLIP) == set()


# Wrong losses ----------------------------------------------------------------------------------


def clipped_loss(batch):
    return -gain(ratio(batch), batch)


def mean_over_trained(batch, count=1):
    """By the tokens of this micro-batch, not of the step."""
    total = torch.where(batch.mask, clipped_loss(batch), 0.0).sum()
    return total / (batch.mask.sum().clamp(min=1) * count)


def dual_clip_for_both_signs(batch):
    return weighted(-torch.maximum(gain(ratio(batch), batch), 1.2 * batch.advantage), batch)


def multiplied_mask(batch):
    l = -gain((batch.lp - batch.old).exp(), batch)
    return (l * batch.mask).sum() / batch.Z


def spread_of_the_batch(batch):
    spread = 0.1 + batch.advantage[batch.mask].std(correction=0) if batch.mask.any() else 1.0
    return weighted(clipped_loss(batch) / spread, batch)


def padding_counted(batch):
    share = batch.mask.sum() / batch.mask.numel()
    return clip(batch) * share * batch.Z / batch.tokens


def padding_trained(batch):
    return -gain((batch.lp - batch.old).exp(), batch).sum() / batch.Z


def only_the_end_masked(batch):
    trained = batch.mask.flip(-1).cumsum(-1).flip(-1) > 0
    r = torch.where(trained, batch.lp - batch.old, 0.0).exp()
    return torch.where(trained, -gain(r, batch), 0.0).sum() / batch.Z


def mean_of_an_empty_row(batch):
    l = torch.where(batch.mask, clipped_loss(batch), 0.0)
    return (l.sum(-1) / batch.mask.sum(-1)).sum() / batch.Z


def no_graph_without_tokens(batch):
    return clip(batch) if batch.mask.any() else torch.zeros(())


def rows_weighted_by_place(batch):
    place = torch.arange(len(batch.lp), dtype=batch.lp.dtype)[:, None]
    return weighted(clipped_loss(batch) * (1 + 0.1 * place), batch)


def autocast(batch):
    if batch.lp.dtype != torch.float32:
        return clip(batch)
    d = log_ratio(batch).bfloat16().to(torch.float32)
    return weighted(-gain(d.exp(), batch), batch)


def advantage_in_place(batch):
    batch.advantage.mul_(batch.mask).clamp_(max=1.0)
    return clip(batch)


CALLS = []


def remembered(batch):
    CALLS.append(batch)
    return clip(batch) * (1 + 1e-9 * len(CALLS))


def mean_of_rows(batch):
    """GMPO as a mean over the rows of the micro-batch: many times too large with many of them."""
    d, A = log_ratio(batch), batch.advantage
    d = torch.where(A > 0, d.clamp(max=0.28), d.clamp(min=-0.2))
    s = (d.sum(-1) / (batch.mask.sum(-1) + 1e-8)).exp()
    A = torch.where(batch.mask, A, 0.0).sum(-1) / (batch.mask.sum(-1) + 1e-8)
    return (-s * A).mean()


OFF = {"value", "gradient"}
LOCAL = {"micro-batches"}  # ranks and the count stand on it, and are not judged
EDGES = {"clip edges, signs"}
WIDTH = {"padding"}  # what stands on it is not judged
SPLIT = {"micro-batches"}
WRONG = {  # a loss, its settings, the properties that fail
    "mean of means": (
        lambda batch: mean_over_trained(batch, batch.micro_batches * batch.ranks), CLIP, LOCAL),
    "count of a rank": (
        lambda batch: clip(batch) * batch.ranks, CLIP, {"order and ranks"}),
    "bounds swapped": (partial(clip, low=0.28, high=0.2), CLIP, OFF | EDGES),
    "dual clip for both signs": (dual_clip_for_both_signs, CLIP | dict(dual_clip=1.2), OFF | EDGES),
    "multiplied mask": (multiplied_mask, CLIP, {NOTE}),
    "detached ratio": (
        lambda batch: weighted(-gain(ratio(batch).detach(), batch), batch),
        CLIP, {"gradient"}),
    "spread of the batch": (spread_of_the_batch, CLIP, OFF | SPLIT),
    "padding counted": (padding_counted, CLIP, OFF | WIDTH),
    "padding trained": (padding_trained, CLIP, OFF | WIDTH),
    "only the end masked": (only_the_end_masked, CLIP, {"masked tokens"}),
    "mean of an empty row": (mean_of_an_empty_row, CLIP | SEQUENCES, {"empty sequence"}),
    "no graph without tokens": (no_graph_without_tokens, CLIP, {"empty sequence"}),
    "rows weighted by place": (rows_weighted_by_place, CLIP, OFF | SPLIT | EDGES),
    "autocast": (autocast, CLIP, {"dtype"}),
    "remembered": (remembered, CLIP, {"second call"}),
    # No A of the clip edges is above 1.
    "advantage in place": (advantage_in_place, CLIP, OFF | {"second call"}),
    "summed sequence ratio": (
        partial(gspo, ratio_of=lambda d, batch: d.sum(-1, keepdim=True).exp()), GSPO, OFF),
    "padded sequence ratio": (
        partial(gspo, ratio_of=lambda d, batch: d.mean(-1, keepdim=True).exp()), GSPO, OFF | WIDTH),
    "gradient through the weight": (
        partial(cispo, detach=lambda w: w), CISPO, {"gradient"} | EDGES),
    "one tau": (partial(sapo, tau_neg=1.0), SAPO, OFF | EDGES),
    "mean of rows": (mean_of_rows, GMPO | SEQUENCES, LOCAL),
    "both directions": (partial(dppo, two_sided=True), DPPO, OFF | EDGES),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_planted_fault_fails_the_right_properties(fault):
    loss, settings, expected = WRONG[fault]
    assert verdicts(loss, settings) == expected


def test_the_command_prints_a_row_for_each_property(capsys):
    """0 if all pass, 1 if one fails."""
    how = [f"{ROOT}/tests/adapters.py:ours", "objective=gspo", "aggregation=sequence_mean"]
    assert kit.main(how) == 0
    assert capsys.readouterr().out.count("passed") >= 12


OURS_FILE = f"{ROOT}/tests/adapters.py"


@pytest.mark.parametrize("argv, expected", [
    ([OURS_FILE], "expected FILE.py:function or MODULE:function, got"),
    ([f"{OURS_FILE}:our"], "got 'our'"),
    (["nowhere.py:loss"], "expected a file, got 'nowhere.py'"),
    ([f"{OURS_FILE}:ours", "objektive=clip"], "got 'objektive'"),
    ([f"{OURS_FILE}:ours", "objective=clop"], "objective: expected reinforce | clip"),
    ([f"{OURS_FILE}:ours", "clip_low=small"], "clip_low: expected a number, got 'small'"),
    ([f"{OURS_FILE}:ours", "clip_low"], "expected KEY=VALUE, got 'clip_low'"),
])  # fmt: skip
def test_a_slip_of_the_command_is_one_line(argv, expected, capsys):
    assert kit.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("loss.py: error: ")
    assert expected in err
