"""The step kit names planted mistakes of a trainer, and passes right trainers.

A toy trainer takes one step as 2 ranks with 3 micro-batches each would, in one process. Each
planted mistake is one option of it. The reports that some of them come from:

    ms-swift 10116, 10117       divided by the accumulation steps twice
    NeMo Automodel 3830, 3846   the sum of local means over ranks and micro-batches
    verl 7200, 7225             a loss normalized in each micro-batch, and summed
    verl 6957                   the same, of the critic's loss
    AReaL 1273                  divided by the number of micro-batches once more
    slime 2235                  advantages normalized among a rank's own part
    trl 6439                    the denominator counts tokens that the mask leaves out
    trl 6380                    a reported number is the mean of the ranks' means
"""

import doctest
import itertools
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conformance import definition, plain_loop, recorders, step
from conftest import ROOT, installed, shortened
from safetensors.torch import load_file, save_file

RANKS, MICROS = 2, 3
SETTINGS = dict(aggregation="token_mean", advantage="group_std", temperature=0.7, clip_high=0.28,
                kl="k3", kl_coef=0.3, max_grad_norm=0.05, decay="matrices")  # fmt: skip


def toy_model():
    return plain_loop.build().double()


def data():
    """Twelve sequences in three groups of four; two in each micro-batch of each rank."""
    torch.manual_seed(1)
    tokens = torch.randint(13, (12, 12))
    first = torch.tensor(6 * [3, 4])
    last = torch.tensor([12, 6, 9, 5, 10, 12, 6, 7, 11, 5, 12, 6])
    at = torch.arange(12)
    mask = (at >= first[:, None]) & (at < last[:, None])
    mask[[0, 5, 10], 7] = False  # a tool's reply
    return SimpleNamespace(
        tokens=tokens, mask=mask, length=last, rewards=torch.randint(4, (12,)).double() / 3,
        groups=torch.tensor(4 * [0, 1, 2]), rank=torch.arange(12) // 6,
        micro_batch=torch.arange(12) // 2 % 3,
        noise=0.3 * torch.randn(12, 12).double(), away=0.5 * torch.randn(12, 12).double(),
    )  # fmt: skip


def log_probs(model, tokens, temperature, shift=0):
    logp = (model(tokens) / temperature).log_softmax(-1)
    at = (torch.arange(tokens.shape[1] - 1) + shift).clamp(0, tokens.shape[1] - 1)
    picked = logp[:, at].gather(2, tokens[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(picked, (1, 0))


def advantages_of(d, bug):
    """Group-normalized rewards, as a trainer would write them."""
    A = torch.empty(12).double()
    for rank in range(RANKS) if bug == "advantages by rank" else [None]:
        own = (d.rank == rank) if rank is not None else torch.ones(12, dtype=torch.bool)
        for g in range(3):
            rows = own & (d.groups == g)
            R = d.rewards[rows]
            A[rows] = (R - R.mean()) / (R.std(correction=bug != "biased std") + 1e-4)
    return (A + 0) if bug != "no std" else d.rewards - torch.stack(
        [d.rewards[d.groups == g].mean() for g in d.groups])  # fmt: skip


def mask_of(d, bug):
    """Return the tokens that a trainer with a mistake trains on."""
    at, mask = torch.arange(12), d.mask.clone()
    if bug == "padding":
        return mask | (at >= d.length[:, None])
    if bug in ("prompt", "prompt with the right Z"):
        return (at >= 1) & (at < d.length[:, None])
    if bug == "tool reply":
        mask[[0, 5, 10], 7] = True
    if bug.startswith("first token"):
        mask &= mask.cumsum(1) > 1
    return mask


def micro_batch_of(model, d, rows, A, bug, temperature):
    """Return the loss of each token of some sequences, and what a trainer records of them."""
    lp = log_probs(model, d.tokens[rows], temperature, shift=bug == "shift")
    old, ref = (lp + d.noise[rows]).detach(), (lp + d.away[rows]).detach()
    ratio = (lp - (ref if bug == "ratio" else old)).exp()
    smaller = torch.maximum if bug == "max for min" else torch.minimum
    gain = smaller(ratio * A[rows, None], ratio.clamp(0.8, 1.28) * A[rows, None])
    kl = lp - ref if bug == "k1" else (ref - lp).exp() - (ref - lp) - 1
    columns = dict(logprobs=lp, old_logprobs=old, ref_logprobs=ref, advantages=A[rows])
    columns |= {name: getattr(d, name)[rows] for name in (
        "tokens", "mask", "rewards", "groups", "rank", "length", "micro_batch")}  # fmt: skip
    return 0.3 * kl - gain, columns


def clipped(by_rank, bug, limit, shapes):
    """Return the norm that a trainer reports, and the flat gradient that it steps with."""
    def clip(g, norm):
        return g * min(1, limit / (norm + 1e-6))

    if bug == "clip by rank":
        total = sum(clip(g, g.norm()) for g in by_rank)
        return total.norm(), total
    g = by_rank[0] if bug == "rank 0" else sum(by_rank)
    norm = g.norm()
    if bug == "shard norm":
        whole = [x.view(s) for x, s in zip(g.split([s.numel() for s in shapes]), shapes)]
        norm = torch.cat([torch.tensor_split(x, RANKS)[0].flatten() for x in whole]).norm()
    return norm, clip(g, norm)


def toy_step(directory, bug="", settings=SETTINGS, steps=2):
    """Take two steps, and record the second."""
    model, d = toy_model(), data()
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [dict(params=decayed), dict(params=others, weight_decay=0.5 if bug == "decay" else 0.0)],
        lr=1e-2, weight_decay=0.5, eps=1e-4 if bug == "eps" else 1e-8)  # fmt: skip
    plant(optimizer, parameters, bug)
    T = 1.0 if bug == "temperature" else settings["temperature"]
    A, mask = advantages_of(d, bug), mask_of(d, bug)
    Z_of = d.mask if bug == "prompt with the right Z" else mask
    means = {"micro-batch means": 6, "sum of means": 1, "sum of micro-batches' means": RANKS}
    with recorders.record(directory, model.named_parameters(), optimizer, settings=settings,
                          step_number=steps) as add:  # fmt: skip
        for n in range(steps):
            losses, by_rank = [0.0] * RANKS, [0.0] * RANKS
            for rank, micro in itertools.product(range(RANKS), range(MICROS)):
                rows = (d.rank == rank) & (d.micro_batch == micro)
                tokens, columns = micro_batch_of(model, d, rows, A, bug, T)
                Z = mask[rows].sum() * means[bug] if bug in means else Z_of.sum()
                if bug == "rank means":
                    Z = mask[d.rank == rank].sum() * RANKS
                if settings["aggregation"] in ("sequence_sum", "number"):
                    count = 12 if bug.endswith("right Z") else mask.any(1).sum()
                    Z = count if settings["aggregation"] == "sequence_sum" else 7
                Z = Z + 3 if bug == "masked tokens count" else Z
                Z = Z * {"accumulation twice": MICROS, "ranks twice": RANKS}.get(bug, 1)
                loss = (tokens * mask[rows]).sum() / Z
                losses[rank] += loss.item()
                g = torch.autograd.grad(loss, parameters)
                by_rank[rank] = by_rank[rank] + torch.cat([x.flatten() for x in g])
                add(**columns)
            if bug == "reported loss":  # the mean of the ranks' means
                count = [mask[d.rank == rank].sum() / mask.sum() for rank in range(RANKS)]
                losses = [(x / share / RANKS).item() for x, share in zip(losses, count)]
            shapes = [p.shape for p in parameters]
            norm, g = clipped(by_rank, bug, settings["max_grad_norm"], shapes)
            for p, x in zip(parameters, g.split([p.numel() for p in parameters])):
                p.grad = x.view_as(p).clone()
            add(loss=sum(losses))
            add(grad_norm=norm)
            if bug == "changed weight" and n == steps - 1:
                model.head.weight.data[0, 0] += 0.01
            optimizer.step()
    return directory


def plant(optimizer, parameters, bug):
    """Replace what AdamW does by a mistake. It is there before the recorder's hooks look."""
    before = []

    def note(*_):
        before[:] = [p.detach().clone() for p in parameters]

    def replace(*_):
        groups = {id(p): h for h in optimizer.param_groups for p in h["params"]}
        for p, old in zip(parameters, before):
            h, state = groups[id(p)], optimizer.state[p]
            m, v, count = state["exp_avg"], state["exp_avg_sq"], int(state["step"])
            update = m / (v.sqrt() + h["eps"])  # without bias correction
            if bug == "eps":
                b1, b2 = h["betas"]
                update = m / (1 - b1**count) / (v / (1 - b2**count) + h["eps"]).sqrt()
            p.data = old * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * update

    if bug in ("bias correction", "eps"):
        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(replace)


class Output(dict):
    """What a model of transformers returns: it has logits, and `values` is a method of a dict."""

    __getattr__ = dict.get


def report(directory, model=None, given=None):
    """{quantity: (verdict, why)}."""
    if model is None:
        model = toy_model()
        model.register_forward_hook(lambda model, given, logits: Output(logits=logits))
    rows, _ = step.check(directory, model, given)
    return {row["quantity"]: (row["verdict"], row["why"]) for row in rows}


BUGS = {
    "accumulation twice": ("gradient norm", "divided by the number of micro-batches (3) twice"),
    "ranks twice": ("gradient norm", "divided by the number of ranks (2) twice"),
    "sum of means": ("gradient norm", "the sum of micro-batches and ranks (6)"),
    "sum of micro-batches' means": ("gradient norm", "the sum of micro-batches (3)"),
    "micro-batch means": ("gradient norm", "the mean of the micro-batches' means"),
    "rank means": ("gradient norm", "the mean of the ranks' means"),
    "masked tokens count": ("gradient norm", "the denominator counts masked tokens"),
    "reported loss": ("loss", "the mean of the ranks' means"),
    "rank 0": ("gradient norm", "rank 0's alone"),
    "biased std": ("advantages", "a biased standard deviation"),
    "no std": ("advantages", "not divided by a standard deviation"),
    "advantages by rank": ("advantages", "among the rank's own sequences"),
    "temperature": ("log-probs", "at temperature 1"),
    "shift": ("log-probs", "of the logits at the token itself"),
    "padding": ("gradient norm", "the padding is trained on"),
    "prompt": ("gradient norm", "the prompt is trained on"),
    "tool reply": ("gradient norm", "masked tokens between"),
    "ratio": ("gradient norm", "the ratio is to the reference"),
    "k1": ("gradient norm", "the KL is k1"),
    "clip by rank": ("gradient", "each rank's gradient is clipped"),
    "shard norm": ("gradient norm", "rank 0's shard"),
    "bias correction": ("weights", "bias correction is missing"),
    "eps": ("weights", "eps is inside the square root"),
    "decay": ("weights", "norms and biases decay too"),
    "max for min": ("gradient", "max in place of min"),
    "prompt with the right Z": (
        "gradient", "the prompt is trained on, and the denominator is right"),
    "changed weight": ("weights", "something other than the optimizer changed head.weight"),
}  # fmt: skip


SUM, NUMBER = dict(aggregation="sequence_sum"), dict(aggregation="number", loss_denominator=7)
CLAIMS = {  # a mistake, other settings of the trainer, what the command says of them, what departs
    "nothing": ("", {}, {}, None),
    "a sum of sequences": ("", SUM, {}, None),
    "a number": ("", NUMBER, {}, None),
    "std": ("", {}, dict(std="biased"), ("advantages", "use an unbiased standard deviation (")),
    "the likelihood of right answers": ("", {}, dict(nll_coef=0.1), ("loss", "")),
    "padding, a sum of sequences": ("padding", SUM, {}, ("gradient", "padding is trained on (")),
    "tool reply, a number": (
        "tool reply", NUMBER, {}, ("gradient", "between trained ones are trained on (")),
    "first token, a sum of sequences": (
        "first token", SUM, {}, ("gradient", "each sequence is not trained on (")),
    "first token with the right Z, a sum of sequences": (
        "first token with the right Z", SUM, {},
        ("gradient", "each sequence is not trained on, and the denominator is right (")),
}  # fmt: skip
QUICK = "accumulation twice", "biased std", "temperature", "eps", "max for min"
QUICK += "prompt with the right Z", "changed weight", *CLAIMS
CLAIMS |= {bug: (bug, {}, {}, departs) for bug, departs in BUGS.items()}


@pytest.mark.quick
@pytest.mark.parametrize("name", shortened(CLAIMS, *QUICK))
def test_a_right_step_holds_and_a_planted_mistake_is_found_and_named(tmp_path, name):
    bug, settings, given, departs = CLAIMS[name]
    found = report(toy_step(tmp_path, bug, SETTINGS | settings), given=given)
    if departs is None:
        assert {verdict for verdict, _ in found.values()} == {"holds"} and len(found) == 6
    else:
        verdict, why = found[departs[0]]
        assert verdict == "departs" and departs[1] in why


@pytest.mark.quick
@pytest.mark.parametrize("bug, words, norm", [
    ("eps", "eps is inside the square root", False),
    ("tool reply", "masked tokens between", True), ("tool reply", "masked tokens between", False),
    ("changed weight", "something other than the optimizer changed head.weight", True),
])  # fmt: skip
def test_new_weights_are_enough_to_name_a_mistake(tmp_path, bug, words, norm):
    """The dump has no gradient, and perhaps no norm."""
    toy_step(tmp_path, bug)
    tensors, numbers = load_file(tmp_path / "step.safetensors"), tmp_path / "step.json"
    save_file({name: x for name, x in tensors.items() if not name.startswith("grad.")},
              tmp_path / "step.safetensors")  # fmt: skip
    if not norm:
        numbers.write_text(numbers.read_text().replace('"grad_norm"', '"unused"'))
    verdict, why = report(tmp_path)["weights"]
    assert verdict == "departs" and words in why


@pytest.mark.quick
@pytest.mark.parametrize("column, quantity", [
    ("logprobs", "log-probs"), ("advantages", "advantages"), ("grad.head.weight", "gradient"),
    ("after.head.weight", "weights"),
])  # fmt: skip
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_not_finite_departs(tmp_path, column, quantity, number):
    """One is enough, and it is not the first of its column: `max` would drop it."""
    toy_step(tmp_path)
    tensors = load_file(tmp_path / "step.safetensors")
    x, at = tensors[column], (*tensors["mask"].nonzero()[-1],)
    x[at if x.shape == tensors["mask"].shape else at[:1]] = number
    save_file(tensors, tmp_path / "step.safetensors")
    assert report(tmp_path)[quantity][0] == "departs"


@pytest.mark.quick
def test_one_finding_is_one_line(tmp_path):
    """Of the loss, the norm and the gradient. Two mistakes at once are one finding, too."""
    for bug in ("rank means", "sum of means"):
        rows, _ = step.check(toy_step(tmp_path / bug, bug), toy_model())
        departs = [line for line in step.lines_of(rows) if "departs" in line]
        assert len(departs) == 1 and departs[0].startswith("   loss, gradient norm, gradient ")
    with pytest.raises(ValueError, match="got 'temprature'"):
        step.check(tmp_path / bug, toy_model(), dict(temprature=0.8))


# The definition ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_example_of_the_definition_is_right():
    failed, attempted = doctest.testmod(definition)
    assert not failed and attempted


SLOPES = [dict(objective=objective, kl=kl, kl_coef=0.3) for objective, kl in itertools.product(
    definition.CHOICES["objective"], definition.CHOICES["kl"])]  # fmt: skip
SLOPES += [dict(objective="kl_cov", importance_cap=1.5, kl_coef=0.3, entropy_coef=0.2, nll_coef=0.1,
                cov_share=0.4, aggregation="sequence_mean")]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("settings", SLOPES)
def test_derivatives_of_the_definition_are_differences_of_its_loss(settings):
    """In the log-prob, the entropy and the value of each token.

    The weights of cispo and dppo are numbers, so their moves are taken off the difference. k3_k2
    has the gradient of another KL.
    """
    c = SimpleNamespace(**definition.DEFAULTS | settings)
    A, W = [1.5, -0.5, 1.0] if c.nll_coef else [1.5] * 3, 0.7

    def loss_of(c, **changed):
        rows = dict(lp=[-1.1, -2.0, -0.9], H=[0.4, 0.6, 0.1], v=[0.2, -0.4, 0.6]) | changed
        given = dict(smp=[-1.2, -1.6, -0.5], ref=[-1.2, -2.0, -1.1], v_old=[0.3, 0.2, 0.55],
                     g=[0.9, 0.1, -0.3], R=1.0, W=W)  # fmt: skip
        first = definition.Sequence(old=[-1.0, -2.1, -0.7], A=A, **given, **rows)
        other = definition.Sequence([-0.3], [-0.4], [-2.0], smp=[-0.4], ref=[-0.1], R=0.5)
        loss, terms = definition.definition(c, [first, other])
        return loss, terms[0], rows

    _, terms, rows = loss_of(c)
    like = SimpleNamespace(**vars(c) | dict(kl="k2" if c.kl == "k3_k2" else c.kl))
    for leaf, t in itertools.product(("lp", "H", "v"), range(3)):
        up, down = ([x + (n == t) * h for n, x in enumerate(rows[leaf])] for h in (1e-6, -1e-6))
        slope = (loss_of(like, **{leaf: up})[0] - loss_of(like, **{leaf: down})[0]) / 2e-6
        term = terms[t]
        if leaf == "lp" and c.objective in ("cispo", "dppo"):  # l is -w A lp, and w moves as r does
            slope += W * A[t] * rows["lp"][t] * term.r * term.share
        assert term.share * getattr(term, f"d{leaf}") == pytest.approx(slope, abs=1e-8)


def test_a_loop_without_hooks_is_recorded_from_what_its_model_gets(tmp_path):
    """Rows may lack their last token, and be padded on either side. A stranger is an error."""
    model, d = toy_model(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sequences = [dict(tokens=d.tokens[b, :n].tolist(), prompt=3, advantages=0.5 - b % 2)
                 for b, n in enumerate(d.length.tolist())]  # fmt: skip
    rows = [d.tokens[b].where(torch.arange(12) < n, 0) for b, n in enumerate(d.length)]
    left = [torch.cat([row[n:], row[:n]]) for row, n in zip(rows, d.length)]

    def loop():
        Z, last = sum(len(s["tokens"]) - 3 for s in sequences), len(sequences)
        for at in (slice(0, 6), slice(6, last)):
            tokens = torch.stack(rows[at])
            logp = model.forward(tokens[:, :-1]).log_softmax(-1)
            lp = logp.gather(2, tokens[:, 1:, None])[..., 0]
            on = (torch.arange(1, 12) >= 3) & (torch.arange(1, 12) < d.length[at, None])
            A = torch.tensor([s["advantages"] for s in sequences[at]])[:, None]
            (-(A * lp)[on].sum() / Z).backward()
        optimizer.step()

    settings = dict(objective="reinforce", max_grad_norm=0.0)
    forward = model.forward
    with recorders.record(tmp_path, model.named_parameters(), optimizer, settings=settings) as add:
        with recorders.watch(model, add, sequences):
            loop()
            add(grad_norm=1.5)  # of the recorded step, though after it
            loop()
            add(grad_norm=2.5)
        assert model.forward == forward
    found = report(tmp_path, toy_model())
    assert {found[x][0] for x in ("log-probs", "gradient", "weights")} == {"holds"}, found
    assert json.loads((tmp_path / "step.json").read_text())["grad_norm"] == 1.5

    seen = []
    with recorders.watch(model, lambda **row: seen.append(row), sequences):
        model(torch.stack(left[:2]))
        with torch.no_grad():
            model(torch.zeros(1, 5).long())  # a rollout
        assert len(seen) == 1 and seen[0]["tokens"][0, :12].tolist() == rows[0].tolist()
        with pytest.raises(ValueError, match="expected a row of one of `sequences`"):
            model(torch.zeros(1, 5).long())


def test_an_error_inside_leaves_no_hook_and_no_dump(tmp_path):
    model = toy_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ZeroDivisionError):
        with recorders.record(tmp_path, model.named_parameters(), optimizer):
            1 / 0
    hooks = optimizer._optimizer_step_pre_hooks | optimizer._optimizer_step_post_hooks
    assert not hooks and not [*tmp_path.iterdir()]


RUNS = [("full", "plan=d2 minibatches=2 step_number=2 micro_tokens=60", 2, "")]
RUNS += [("trl", settings, world, words) for settings, world, words in [
    *itertools.product(("", "loss_type=grpo beta=0.05 step_number=2",
                        "loss_type=dr_grpo scale_rewards=none step_number=3"), (1, 2), [""]),
    ("loss_type=bnpo", 1, "the mean of the micro-batches' means"),
    ("steps_per_generation=4", 1, "as if Z were 43 and not 41"),
    ("loss_type=grpo importance_sampling_level=sequence beta=0.1 num_iterations=2 step_number=2 "
     "learning_rate=0.02", 1, "the KL is k3 times the sequence's ratio")]]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, settings, world, words", RUNS)
def test_a_real_run_holds_or_departs_by_these_words(tmp_path, name, settings, world, words):
    if name == "trl":
        installed("trl")
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    program += [str(ROOT / "conformance/recorders.py"), name, str(tmp_path), *settings.split()]
    subprocess.run(program, check=True, timeout=300, capture_output=True)
    found = report(tmp_path, getattr(recorders, f"build_{name}")())
    if not words:
        assert {verdict for verdict, _ in found.values()} == {"holds"}
    verdict, why = found["gradient norm"]
    assert words in why and (verdict == "departs") == bool(words)


def test_the_first_use_of_the_readme_runs_as_written(tmp_path, monkeypatch, capfd):
    page = (ROOT / "conformance/README.md").read_text().split("## First use")[1]
    page = page.split("\n## ")[0]
    (code,), (shown,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.S)
                         for kind in ("python", "text"))  # fmt: skip
    commands = re.findall(r"^python (.*)", page, re.M)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("conformance").symlink_to(ROOT / "conformance")

    def said(words):
        monkeypatch.setattr(sys, "argv", words.split())
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            return end.code, "".join(capfd.readouterr())
        return 0, ""

    Path("my_loss.py").write_text(code)
    codes, texts = zip(*map(said, commands))
    assert codes == (1, 0, 0, 1, 1) and shown in texts[0] and "11 passed, 2 failed" in texts[0]
    prose = re.sub(r"```.*?```", "", page, flags=re.S).replace("\n", " ")
    quoted = re.findall(r"\"(.*?)\"", prose)
    assert len(quoted) == 3 and all(x in y for x, y in zip(quoted, texts[2:], strict=True))
    Path("my_loss.py").write_text(code.replace(".mean()", ".sum() / batch.Z"))
    assert said(commands[0])[0] == 0
