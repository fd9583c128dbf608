"""The conformance kit finds planted faults, each in the right property, and passes right losses.

Other code bases: their losses, and ours in their trainers. Whole steps of TRL's: test_trl.py.
"""

import importlib.util
import math
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import adapters
import pytest
import torch
from conformance import advantages, step
from conformance import loss as kit
from conftest import ROOT

CLIP = dict(objective="clip", clip_low=0.2, clip_high=0.28)
GSPO, GMPO = CLIP | dict(objective="gspo"), CLIP | dict(objective="gmpo")
SEQUENCES = dict(aggregation="sequence_mean")


NOTE = "NaN at padding"


def verdicts(loss, settings):
    """Names of the properties that fail, and of notes; each says why. A failure has an example."""
    rows = kit.conformance(loss, settings)
    assert all(row["why"] for row in rows if row["verdict"] != "passed")
    failed = [row for row in rows if row["verdict"] == "failed"]
    assert all(row["example"] for row in failed)
    return {row["property"] for row in failed + [x for x in rows if x["verdict"] == "note"]}


# Right losses ----------------------------------------------------------------------------------
# As a trainer would write them. An option is a slip, see below.


def clipped_loss(batch):
    return -gain(ratio(batch), batch)


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


def clip(batch, **slip):
    return weighted(-gain(ratio(batch), batch, **slip), batch)


def clip_of_logits(batch):
    """As the file's help says for a loss that takes logits."""
    lp = torch.where(batch.mask, batch.lp, -1.0)
    logits = torch.stack([lp, torch.log1p(-lp.exp())], -1)
    return clip(SimpleNamespace(**vars(batch) | dict(lp=logits.log_softmax(-1)[..., 0])))


def gspo(batch, padded=False):
    d, count = log_ratio(batch), batch.mask.sum(-1, keepdim=True).clamp(min=1)
    r = (d.sum(-1, keepdim=True) / (d.shape[-1] if padded else count)).exp()
    return weighted(-gain(r, batch).expand_as(batch.lp), batch)


def numerator(batch, least=0):
    """The sum over a micro-batch, and its count, as Megatron's schedule gets them."""
    return weighted(clipped_loss(batch), batch) * batch.Z, batch.mask.sum().clamp(min=least)


def surrogate(batch):
    """A loss whose gradient is the clip's, with a value of its own."""
    return clip(batch) - 2 * clip(batch).detach()


def one_for_each_sequence(batch):
    """A loss that takes advantages (B,)."""
    return clip(SimpleNamespace(**vars(batch) | dict(advantage=batch.advantage[:, 0][:, None])))


# The terms that trainers add. A slip is named by what is wrong.
LOW, CAP = 0.5, 2.0


def sampler_weight(batch, slip):
    c, old = batch.settings, batch.lp.detach() if slip == "weight of lp" else batch.old
    gap = torch.where(batch.mask, old - batch.smp, 0.0)
    if c["importance_of"] != "token":
        gap = gap.sum(-1, keepdim=True)
    if c["importance_of"] == "geometric":
        gap = gap / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    x, low, cap = gap.exp(), c["importance_low"], c["importance_cap"]
    if c["importance"] == "mask":
        return torch.where((x >= low) & (x <= cap), x, 0.0)
    return x.clamp(0.0 if slip == "no lower bound" else low, cap)


def kl_term(batch, slip):
    d, kind = torch.where(batch.mask, batch.lp - batch.ref, 0.0), batch.settings["kl"]
    k3 = (-d).exp() + d - 1
    kinds = dict(k1=d, k2=d * d / 2, k3=k3, k3_ratio=ratio(batch) * k3,
                 k3_k2=k3.detach() + d * d / 2 - (d * d / 2).detach())  # fmt: skip
    k = kinds["k2" if slip == "another kind" else kind]
    return k.detach() if slip == "no gradient" else k


def critic_term(batch, slip):
    v, old, g, clip = batch.value, batch.old_value, batch.returns, batch.settings["value_clip"]
    near = old + (v - old).clamp(-clip, clip) if clip else v
    larger = torch.minimum if slip == "the smaller error" else torch.maximum
    return larger((v - g) ** 2, (near - g) ** 2) / 2


def full_loss(batch, slip=""):
    """A clip with all terms that SETTINGS have."""
    c = batch.settings
    l = 0.0 * batch.lp if c["objective"] == "none" else clipped_loss(batch)
    if c["importance_cap"]:
        l = l * sampler_weight(batch, slip)
    if c["sample_weights"]:
        weight = batch.weight if slip != "squared weights" else batch.weight**2
        l = l * weight[:, None]
    if c["kl_coef"]:
        l = l + c["kl_coef"] * kl_term(batch, slip)
    if c["entropy_coef"]:
        l = l - (-1 if slip == "entropy's sign" else 1) * c["entropy_coef"] * batch.entropy
    if c["value_coef"]:
        l = l + c["value_coef"] * critic_term(batch, slip)
    total = weighted(l, batch)
    if c["aggregation"] == "number" and slip == "number by tokens":
        total = total * batch.Z / batch.tokens
    if c["nll_coef"]:
        right = batch.mask & (batch.reward > 0)[:, None]
        count = right.sum().clamp(min=1) if slip == "own count" else max(batch.right_tokens, 1)
        right = batch.mask if slip == "wrong answers too" else right
        total = total - c["nll_coef"] * torch.where(right, batch.lp, 0.0).sum() / count
    return total


def covariance(batch, slip=""):
    """kl_cov and clip_cov, right where a step is one micro-batch."""
    c, on, A = batch.settings, batch.mask, batch.advantage
    mean = [(x * on).sum() / on.sum().clamp(min=1) for x in (batch.lp.detach(), A)]
    cov = torch.where(on, (batch.lp.detach() - mean[0]) * (A - mean[1]), -math.inf)
    r, d = ratio(batch), log_ratio(batch)
    if c["objective"] == "kl_cov":
        count = max(1, int(c["cov_share"] * on.sum()))
        at = cov.flatten().topk(count, largest=slip != "the smallest").indices
        chosen = torch.zeros_like(on).flatten().index_fill(0, at, True).view_as(on)
        return weighted(-r * A + torch.where(chosen, c["cov_coef"] * d.abs(), 0.0), batch)
    free = r * A <= gain(r, batch).detach()  # of the clip
    chosen = (cov > c["cov_low"]) & (cov < c["cov_high"]) & free
    chosen = cov < -c["cov_low"] if slip == "another band" else chosen
    return weighted(torch.where(chosen, 0.0, clipped_loss(batch)), batch)


TIS = CLIP | dict(importance_cap=CAP, importance_low=LOW)
CRITIC = dict(objective="none", value_coef=0.5, value_clip=0.2)
LOCAL_COV = dict.fromkeys(("micro-batches", "order and ranks", "global count"), "of a micro-batch")
COV = dict(cov_low=0.1, cov_share=0.3, skip=LOCAL_COV)
EVERY_TERM = TIS | dict(kl_coef=0.1, entropy_coef=0.2, nll_coef=0.1, sample_weights=1,
                        value_coef=0.5, value_clip=0.2)  # fmt: skip
OURS = dict(
    clip=CLIP, dual_clip=CLIP | dict(dual_clip=3.0), reinforce=dict(objective="reinforce"),
    cispo=dict(objective="cispo", clip_low=1.0, clip_high=1.0), gspo=GSPO, gmpo=GMPO,
    gmpo_by_sequence=GMPO | SEQUENCES, sapo=dict(objective="sapo"),
    dppo=dict(objective="dppo", clip_low=0.15, clip_high=0.15),
)  # fmt: skip
RIGHT = {
    **{f"ours {name}": (adapters.ours, settings) for name, settings in OURS.items()},
    "clip": (clip, CLIP), "clip by sequence": (clip, CLIP | SEQUENCES),
    "clip of logits": (clip_of_logits, CLIP), "gspo by sequence": (gspo, GSPO | SEQUENCES),
    **{f"weights: {how}, {of}": (full_loss, TIS | dict(importance=how, importance_of=of))
       for how in ("truncate", "mask") for of in ("token", "sequence", "geometric")},
    **{f"KL: {kl}": (full_loss, CLIP | dict(kl=kl, kl_coef=0.3)) for kl in kit.CHOICES["kl"]},
    "critic": (full_loss, CRITIC),
    "critic without a clip": (full_loss, CRITIC | dict(value_clip=0.0)),
    "every term": (full_loss, EVERY_TERM), "every term by sequence": (
        full_loss, EVERY_TERM | SEQUENCES | dict(count_empty=True)),
    **{f"aggregation {x}": (full_loss, CLIP | dict(aggregation=x, loss_denominator=7.0))
       for x in ("sequence_sum", "constant", "number")},
    "kl_cov": (covariance, COV | dict(objective="kl_cov")),
    "clip_cov": (covariance, COV | CLIP | dict(objective="clip_cov", cov_share=1.0)),
    "numerator and count": (numerator, CLIP), "another surrogate": (surrogate, CLIP),
    "one advantage for each sequence": (one_for_each_sequence, CLIP),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_passes_all(name):
    """A value of its own is a note."""
    loss, settings = RIGHT[name]
    rows = kit.conformance(loss, settings)
    found = {row["property"]: row["verdict"] for row in rows}
    notes = {x: row["why"] for x, row in zip(found, rows) if row["verdict"] == "note" and x != NOTE}
    assert {*notes} == ({"value"} if name == "another surrogate" else set())
    assert all("gradient right, the value is another surrogate" in x for x in notes.values())
    assert not {*found.values()} & {"failed", "not judged"}
    terms = {x for x, (setting, *_) in kit.TERMS.items() if (kit.DEFAULTS | settings)[setting]}
    assert {*found} >= terms


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


def mean_over_trained(batch, count=1):
    """By the tokens of this micro-batch, not of the step."""
    total = torch.where(batch.mask, clipped_loss(batch), 0.0).sum()
    return total / (batch.mask.sum().clamp(min=1) * count)


def multiplied_mask(batch):
    l = -gain((batch.lp - batch.old).exp(), batch)
    return (l * batch.mask).sum() / batch.Z


def spread_of_the_batch(batch):
    spread = 0.1 + batch.advantage[batch.mask].std(correction=0) if batch.mask.any() else 1.0
    return weighted(clipped_loss(batch) / spread, batch)


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


def autocast(batch, dtype, coarser):
    """Round the log-ratios of a dtype to a coarser one."""
    if batch.lp.dtype != dtype:
        return clip(batch)
    d = log_ratio(batch).to(coarser).to(dtype)
    return weighted(-gain(d.exp(), batch), batch)


def advantage_in_place(batch):
    batch.advantage.mul_(batch.mask).clamp_(max=1.0)
    return clip(batch)


CALLS = []


def remembered(batch):
    CALLS.append(batch)
    return clip(batch) * (1 + 1e-9 * len(CALLS))


def ignored_factor(batch):
    """The gradient does not ask what comes back from the caller."""
    value = clip(batch)
    value.register_hook(torch.ones_like)
    return value


def with_factor(factor):
    """A loss whose caller takes means, which `factor` of both numbers undoes."""
    return lambda batch: clip(batch) * factor(batch.micro_batches, batch.ranks)


def first_advantage(batch):
    return clip(SimpleNamespace(**vars(batch) | dict(advantage=batch.advantage[:, :1])))


def own_likelihood(batch):
    """A term that SETTINGS do not have."""
    return clip(batch) - 0.1 * torch.where(batch.mask, batch.lp, 0.0).sum() / batch.Z


MEANS = CLIP | dict(micro_batches="mean", ranks="mean")
WRONG_TERMS = {  # a slip of `full_loss` or `covariance`: its settings, the properties that fail
    "weight of lp": (TIS, {"gradient", "clip edges, signs"}),
    "no lower bound": (TIS, {"sampler weights"}),
    "another kind": (CLIP | dict(kl="k3", kl_coef=0.3), {"KL"}),
    "no gradient": (CLIP | dict(kl="k2", kl_coef=0.3), {"KL"}),
    "entropy's sign": (CLIP | dict(entropy_coef=0.1), {"entropy"}),
    "the smaller error": (CRITIC, {"critic"}),
    "own count": (CLIP | dict(nll_coef=0.2), {"micro-batches"}),
    "wrong answers too": (CLIP | dict(nll_coef=0.2), {"gradient", "clip edges, signs"}),
    "squared weights": (CLIP | dict(sample_weights=1), {"sample weights"}),
    "number by tokens": (CLIP | dict(aggregation="number", loss_denominator=7.0),
                         {"value", "gradient", "global count"}),
    "the smallest": (COV | dict(objective="kl_cov"), {"value", "gradient"}),
    "another band": (COV | CLIP | dict(objective="clip_cov", cov_share=1.0),
                     {"value", "gradient"}),
}  # fmt: skip


@pytest.mark.parametrize("slip", WRONG_TERMS)
def test_a_planted_fault_of_a_term_fails_its_property(slip):
    settings, expected = WRONG_TERMS[slip]
    loss = covariance if "objective" in settings and "cov" in settings["objective"] else full_loss
    found = verdicts(partial(loss, slip=slip), settings) - {NOTE}
    assert expected <= found <= expected | {"value"}, found


OFF = {"value", "gradient"}
LOCAL = {"micro-batches"}  # ranks and the count stand on it, and are not judged
EDGES = {"clip edges, signs"}
WIDTH = {"padding"}  # what stands on it is not judged
WRONG = {  # a loss, its settings, the properties that fail
    "mean of means": (
        lambda batch: mean_over_trained(batch, batch.micro_batches * batch.ranks), CLIP, LOCAL),
    "count of a rank": (
        lambda batch: clip(batch) * batch.ranks, CLIP, {"order and ranks"}),
    "bounds swapped": (partial(clip, low=0.28, high=0.2), CLIP, OFF | EDGES),
    "multiplied mask": (multiplied_mask, CLIP, {NOTE}),
    # A micro-step counts its tokens on all ranks: this is a mean of micro-batches.
    "count of a micro-step": (
        lambda batch: clip(batch) * batch.Z / max(batch.micro_step_tokens, 1),
        CLIP | dict(micro_batches="mean"), LOCAL),
    "detached ratio": (
        lambda batch: weighted(-gain(ratio(batch).detach(), batch), batch),
        CLIP, {"gradient"}),
    "spread of the batch": (spread_of_the_batch, CLIP, OFF | LOCAL),
    "padding trained": (padding_trained, CLIP, OFF | WIDTH),
    "only the end masked": (only_the_end_masked, CLIP, {"masked tokens"}),
    "mean of an empty row": (mean_of_an_empty_row, CLIP | SEQUENCES, {"empty sequence"}),
    "no graph without tokens": (no_graph_without_tokens, CLIP, {"empty sequence"}),
    "autocast": (
        partial(autocast, dtype=torch.float32, coarser=torch.bfloat16), CLIP, {"dtype"}),
    "autocast of bfloat16": (
        partial(autocast, dtype=torch.bfloat16, coarser=torch.float8_e4m3fn), CLIP, {"dtype"}),
    "remembered": (remembered, CLIP, {"second call"}),
    # No A of the clip edges is above 1.
    "advantage in place": (advantage_in_place, CLIP, OFF | {"second call"}),
    "padded sequence ratio": (partial(gspo, padded=True), GSPO, OFF | WIDTH),
    "upstream factor ignored": (ignored_factor, CLIP, {"upstream factor"}),
    "the larger count": (with_factor(max), MEANS, {"order and ranks"}),
    "the first token's advantage": (first_advantage, CLIP, {"token advantages"}),
    "an empty row counts one": (partial(numerator, least=1), CLIP, {"empty sequence"}),
    "a term without A": (own_likelihood, CLIP, OFF | EDGES),
}  # fmt: skip


WHY = {  # properties that fail or are not judged, and what is said of them
    "mean of means": dict.fromkeys(("order and ranks", "global count"), "stands on micro-batches"),
    "a term without A": {"gradient": "A term does not depend on A: with all A 0"},
    "the first token's advantage": {
        "token advantages": "the first token's advantage is used for all"},
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_planted_fault_fails_the_right_properties(fault):
    loss, settings, expected = WRONG[fault]
    assert verdicts(loss, settings) == expected
    if fault in WHY:
        why = {row["property"]: row["why"] for row in kit.conformance(loss, settings)}
        assert all(words in why[name] for name, words in WHY[fault].items())


def test_what_the_definition_cannot_say_is_refused():
    with pytest.raises(ValueError, match=r"clip_cov draws 1 of \d tokens at random"):
        kit.conformance(covariance, COV | CLIP | dict(objective="clip_cov", cov_share=0.1))


# Advantages ------------------------------------------------------------------------------------


def group_norm(batch, slip=""):
    """Normalize within groups, as a trainer would write it."""
    c, R, kept = batch.settings, batch.rewards.clone(), []
    if c["kl_in"] == "reward":
        d = batch.smp - batch.ref
        R -= c["kl_coef"] * (d if slip == "no mask" else torch.where(batch.mask, d, 0.0)).sum(-1)
    A = torch.zeros_like(R)
    for g in batch.group.unique():
        at = batch.group == g
        at = torch.arange(len(R)) // 4 == g if slip == "consecutive" else at
        own = R[at] - R[at].mean()
        std = R[at].std(correction=0 if slip == "biased" else 1)
        A[at] = own / (std + c["std_eps"])
        kept.append(bool(R[at].max() > R[at].min()) or slip == "kept")
    if c["equal_groups"] == "left_out":
        return A, torch.tensor(kept)[batch.group]
    return A[:, None] * batch.mask if slip == "rows" else A


KL_IN = dict(kl_in="reward", kl="k1", kl_coef=0.3)
SLIPS = {  # of group_norm: a slip, settings, the properties that fail
    "": ({}, set()), "rows": ({}, set()), "biased": ({}, {"value"}),
    "consecutive": ({}, {"order"}), "no mask": (KL_IN, {"KL in the reward"}),
    "kept": (dict(equal_groups="left_out"), {"value"}),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_the_kit_of_advantages_names_planted_faults(slip):
    settings, expected = SLIPS[slip]
    for with_slip in ("", slip):
        rows, _ = advantages.conformance(partial(group_norm, slip=with_slip), settings)
        failed = {row["property"] for row in rows if row["verdict"] == "failed"}
        assert failed == (expected if with_slip else set())
    assert slip != "biased" or rows[0]["why"].endswith("the standard deviation is biased")
    left_out = KL_IN | dict(equal_groups="left_out")
    assert all(x["verdict"] != "failed" for x in advantages.conformance(group_norm, left_out)[0])


# Commands --------------------------------------------------------------------------------------

MINE = """
def advantages(batch):
    return batch.rewards

def loss(batch):
    return helper(batch.lp)

def helper(x):
    return x.nope
"""
OURS_FILE = f"{ROOT}/tests/adapters.py"


@pytest.mark.parametrize("program, argv, code, expected", [
    (kit, [f"{OURS_FILE}:ours", "objective=gspo"], 0, "empty sequence      passed"),
    (advantages, ["mine.py:advantages", "advantage=none"], 0, "passed"),
    (advantages, ["mine.py:advantages"], 1, "value               failed"),
    (advantages, ["mine.py:advantages", "std=wide"], 2,
     "std: expected unbiased | biased, got 'wide'"),
    (kit, ["mine.py:loss"], 2, "error: the adapter raised AttributeError: 'Tensor' object "
                               "has no attribute 'nope' (mine.py, line 9)"),
    (kit, [OURS_FILE], 2, "expected FILE.py:function or MODULE:function, got"),
    (kit, [f"{OURS_FILE}:our"], 2, "got 'our'"),
    (kit, ["nowhere.py:loss"], 2, "expected a file, got 'nowhere.py'"),
    (kit, [f"{OURS_FILE}:ours", "objective=clop"], 2, "objective: expected reinforce | clip"),
    (kit, [f"{OURS_FILE}:ours", "objective=m2po"], 2,
     "got 'm2po': its threshold is found by sorting"),
    (kit, [f"{OURS_FILE}:ours", "clip_low=small"], 2, "clip_low: expected a number, got 'small'"),
    (step, ["DUMP", "--model", "mine.py:loss", "temperature"], 2,
     "expected KEY=VALUE, got 'temperature'"),
])  # fmt: skip
def test_a_command_says_what_it_found_or_one_line(
    program, argv, code, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    assert program.main(argv) == code
    out, err = capsys.readouterr()
    assert expected in (err if code == 2 else out)
    assert code < 2 or not out and err.count("\n") == 1 and ".py: error: " in err
