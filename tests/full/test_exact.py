"""`--exact`: the sampler's log-probs are the trainer's, to the bit, and the ordinary ones but that.

The tests with bits say what kernels of this machine do; `require_exact_kernels` refuses a machine
that has others, and is tried on one whose product is spoiled.
"""


import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import shortened, slow
from test_audit import edit_line
from test_ranks import TASK, trained

import models
from full.audit.audit import audited
from full.learn.generate import generate
from full.learn.packing import PackedBatches
from full.model import exact
from full.model.exact import exact_attention, make_exact, packed_attention, require_exact_kernels
from full.tiny import TINY, tiny_model

SHAPE = f"{TASK} --layers 2 --hidden 24 --heads 4 --lr 0.01 --steps 3 --eval-every 2"
FAMILIES = [(name, dtype) for name in TINY for dtype in ("float32", "float64", "bfloat16")]


@pytest.fixture(autouse=True, scope="module")
def machine():
    """Skip the file where `--exact` refuses the machine."""
    try:
        for name, dtype in FAMILIES:
            require_exact_kernels(make_exact(tiny_model(name, dtype=getattr(torch, dtype))))
    except ValueError as error:
        pytest.skip(f"{error}")


def played(model, **how):
    """Rows of several prompts, some of them equal, at temperature 0.7."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 53, n).tolist() for n in (1, 3, 3, 17, 30, 90)]
    rows = [models.Row(prompt, rng.random(40)) for prompt in prompts * 2]
    how = dict(max_new_tokens=40, temperature=0.7, end=(7,)) | how
    return generate(model, rows, **how)


def gaps(model, rows):
    """The trainer's log-prob minus the sampler's, of each sampled token, at temperature 0.7."""
    batches = PackedBatches(model, attention=lambda document, group: packed_attention(document),
                            micro_tokens=400, temperature=0.7)  # fmt: skip
    scores = batches.forward([row.tokens for row in rows], [row.mask for row in rows])
    found = []
    for row, (logprobs, _) in zip(rows, scores):
        sampled = torch.tensor(row.logprobs, dtype=torch.float64).to(logprobs)
        found.append((logprobs - sampled)[torch.tensor(row.mask)])
    return torch.cat(found)


@pytest.mark.parametrize("name", shortened(
    [f"{name} {dtype}" for name, dtype in FAMILIES],
    "gemma3_text float32", "qwen3_moe bfloat16"))  # fmt: skip
def test_every_family_samples_with_the_bits_of_the_trainer(name):
    """Prompts of all lengths, rows that enter and leave, forks; windows, norms, biases, experts."""
    name, dtype = name.split()
    model = make_exact(tiny_model(name, dtype=getattr(torch, dtype)).requires_grad_(False))
    require_exact_kernels(model)

    def fork(row):
        if getattr(row, "forked", False) or len(row.tokens) > 80:
            return []
        children = [models.Row(row.tokens) for _ in range(2)]
        for n, child in enumerate(children):
            child.__dict__ |= {k: list(v) if isinstance(v, list) else v
                               for k, v in row.__dict__.items() if k != "queue"}  # fmt: skip
            child.forked, child.draws = True, np.roll(row.draws, n)
            child.queue.extend((3, 4))
        return children

    for how in ({}, dict(after=fork, slots=5)):
        found = gaps(model, played(model, **how))
        assert len(found) > 100 and (found == 0).all(), how


def test_the_ordinary_model_does_not():
    """So the tests above can fail."""
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    found = gaps(model, played(model))
    assert (found != 0).any() and found.abs().max() < 1e-4


@pytest.mark.parametrize("window", [None, 1, 70])
def test_attention_is_the_definition(window):
    """In float64, of prompts, of later tokens at unequal positions, and its lse."""
    torch.manual_seed(0)
    first, S, C = [60, 3, 0], 9, 131
    q, k, v = (torch.randn(3, n, m, 10).double() for n, m in ((4, S), (2, C), (2, C)))
    at_BS = torch.tensor(first)[:, None] + torch.arange(S)
    visible = models.visible_keys(at_BS, torch.arange(C)[None], window)
    out, lse = exact_attention(q, k, v, first, 0.3, window)
    truth = models.masked_attention(q, k, v, visible, scale=0.3)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(out, truth, atol=1e-13, rtol=0)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-13, rtol=0)


# A slip in each mechanism: of one side, since equal slips of both cancel.
SLIPS = {
    "products": ("product", lambda x, weight: (x.double() @ weight.double().T).float()),
    "block": ("KEYS", 48),
    "functions": ("NUMBERS", 1),
    "float32 log-probs": ("ExactLogprobs", None),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_each_mechanism_shows(monkeypatch, name):
    model = make_exact(tiny_model(dtype=torch.float32).requires_grad_(False))
    rows = played(model)
    assert (gaps(model, rows) == 0).all()
    where, what = SLIPS[name]
    if name == "float32 log-probs":

        def logprobs(hidden, targets, *, temperature):
            lp_NV = (model.logits(hidden) / temperature).log_softmax(-1)
            return lp_NV.gather(-1, targets[:, None])[:, 0], lp_NV.sum(-1)

        monkeypatch.setattr(model, "logprobs", logprobs)
    elif name == "functions":  # of the sampler, whose tensors are small: most of it is an end
        x = torch.linspace(-3, 3, 6400)
        if torch.equal(torch.cat([F.silu(y) for y in x.split(5)]), F.silu(x)):
            pytest.skip("the end of a tensor is not computed otherwise on this machine")
        with monkeypatch.context() as patch:
            patch.setattr(exact, where, what)
            rows = played(model)
    else:
        monkeypatch.setattr(exact, where, what)
    found = gaps(model, rows)
    assert (found != 0).any() and found.abs().max() < 1e-4


@pytest.fixture
def untried():
    """Forget what was tried on this machine, before and after a test that spoils its kernels."""
    exact.tile_of.cache_clear(), exact.rows_are_free.cache_clear()
    yield
    exact.tile_of.cache_clear(), exact.rows_are_free.cache_clear()


def spoil(monkeypatch, owner, name, is_spoiled):
    """Let a kernel of two tensors round otherwise for some of its arguments."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda a, b: right(a, b) * (1 + 1e-6 * is_spoiled(a)))


def test_a_machine_with_other_kernels_takes_rows_by_16(untried, monkeypatch):
    """Products and batched products whose bits depend on whether there are more than 16 rows."""
    spoil(monkeypatch, exact.F, "linear", lambda x: len(x) > 16)
    spoil(monkeypatch, torch, "bmm", lambda a: a.shape[1] > 16)
    model = make_exact(tiny_model("qwen3_moe", dtype=torch.float32).requires_grad_(False))
    require_exact_kernels(model)
    assert exact.tile_of(40, 24, torch.float32, torch.device("cpu")) == 16
    assert (gaps(model, played(model)) == 0).all()


@pytest.mark.parametrize("owner, name, is_spoiled, text", [
    (exact.F, "linear", lambda x: x[0, 0] > x[1, 0], "the bits of a product of width"),
    (torch, "bmm", lambda a: len(a) < 5, "the bits of attention with heads of 10"),
])  # fmt: skip
def test_a_machine_without_such_kernels_is_refused(
    untried, monkeypatch, owner, name, is_spoiled, text
):
    model = make_exact(tiny_model(dtype=torch.float32))
    require_exact_kernels(model)
    exact.tile_of.cache_clear(), exact.rows_are_free.cache_clear()
    spoil(monkeypatch, owner, name, is_spoiled)
    with pytest.raises(ValueError, match=f"^exact: on this machine {text}"):
        require_exact_kernels(model)


RUNS = [(1, "float32", ""),
        *slow((2, "float32", "--data-parallel zero1 --staleness 1"),
              (1, "bfloat16", "--forks 2 --fork-turns 1 --batch-rows 7"),
              (1, "float32", "--compute-dtype bfloat16 --kl-coef 0.1"),
              (2, "float64", "--proximal --importance-cap 2 --ac full"),
              (1, "float32", "--advantage gae --micro-tokens 60"),
              (2, "float32", "--prompts 2 --minibatches 2"),  # a rank without a token
              )]  # fmt: skip


@pytest.mark.parametrize("world, dtype, more", RUNS)
def test_a_run_has_no_gap(tmp_path, world, dtype, more):
    """On-policy; and with --staleness 1 in the first step, whose batch is."""
    flags = f"{SHAPE} {more} --exact".replace("float64", dtype)
    lines = trained(tmp_path, world, flags)
    for line in lines[: 1 if "--staleness" in more else None]:
        assert line["logprob_gap/identical"] == 1 and line["logprob_gap/max"] == 0
        assert line.get("ratio/max_first", line["ratio/max"]) == 1
    if "--staleness" in more:
        assert lines[-1]["logprob_gap/max"] > 0


def test_the_audit_allows_nothing(process_group, tmp_path):
    """At --staleness 1, with the sampler's weights of a checkpoint; then a log-prob is changed."""
    flags = f"{SHAPE} --exact --staleness 1 --save-every 1 --keep 9 --log-rollouts all"
    flags += " --prompts 2 --group 4"
    trained(tmp_path, 1, flags.replace("float64", "float32"))
    (run,) = tmp_path.glob("run-*")
    report = audited(run, 2)
    rows = {row.key: row for row in report.rows}
    assert report.wrong is None
    assert rows["sampling/bits"].allowed == rows["sampling/tokens"].allowed == 0
    assert rows["sampling/tokens"].recorded > 30

    edit_line(run, "logprobs", lambda x: np.nextafter(x, 0), "rollouts.jsonl")
    assert audited(run, 2).wrong == "sampling/bits"
