"""The kit of parallelisms finds planted bugs, names what they look like, and passes right ones.

Two parallelisms, written as a trainer would write them, with an option for each bug: tensor with
sequence parallelism, and data parallelism. The third one is the full edition.
"""

import functools
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conformance import parallel as kit
from conftest import ROOT, installed, shortened
from test_ranks import as_script, ranks
from torch import nn

CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # parameters that are split, and where


# Tensor and sequence parallelism -----------------------------------------------------------------


class Talk(torch.autograd.Function):
    """One function on the way forward, another one on the way back."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.backward_of(dy), None, None


def all_gather(x, dim=1):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def own(x, dim=1, shift=0):
    world = dist.get_world_size()
    return x.chunk(world, dim)[(dist.get_rank() + shift) % world].contiguous()


def reduced(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


class Block(nn.Module):
    """A residual MLP. With `bug` None or a text it runs on a rank's own tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.up, self.down, self.out = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x, bug="whole"):
        self.tokens += 0 if bug == "stale buffer" else x.shape[0] * x.shape[1]
        if bug == "whole":
            h = self.first(x)
            return self.out(h + self.down(self.up(self.norm(h)).tanh()))

        h = self.first(own(x))
        back = own if bug == "own slice" else lambda dy: own(reduced(dy))
        y = Talk.apply(self.norm(h), all_gather, back)
        y = y.detach() if bug == "detached gather" else y
        inside = self.down.bias if bug == "bias everywhere" else None
        y = F.linear(self.up(y).tanh(), self.down.weight, inside)
        y = Talk.apply(y, lambda y: own(reduced(y)), all_gather)
        return self.out(h + (y if inside is not None else y + self.down.bias))


def build():
    return Block(), (torch.randn(2, 4, 4), torch.randn(2, 4, 3))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def shard(bug, model, mesh):
    for name, dim in CUT.items():
        shift = int(bug == "wrong shard" and name == "up.weight")
        p = model.get_parameter(name)
        p.data = own(p.data, dim, shift)
    if bug == "random start":
        torch.manual_seed(dist.get_rank())
        model.out.reset_parameters()
    model.last = {}
    return model


def rank_loss(bug, model, batch):
    terms = (model(batch[0], bug) - own(batch[1])).square().sum() / batch[1].numel()
    terms.backward()
    for name, p in model.named_parameters():
        if name not in CUT and not (bug == "norm forgotten" and name.startswith("norm.")):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            if bug == "summed twice":
                dist.all_reduce(p.grad)
            if bug == "mean":
                p.grad /= dist.get_world_size()
        if bug == "kept":
            p.grad += model.last.get(name, 0)
            model.last[name] = p.grad.clone()
    return terms.detach()


def gather(model, name, x):
    return all_gather(x, CUT[name])


def clip(bug, model, max_norm):
    def square(name, p):
        x = p.grad.square().sum()
        if bug == "local norm":
            return x
        return reduced(x) if name in CUT or bug == "replicas in norm" else x

    norm = sum(square(name, p) for name, p in model.named_parameters()).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def optimizer(bug, model, **adamw):
    if bug == "old parameters":  # it was made before `down` was split
        model = nn.ModuleList(x for name, x in model.named_children() if name != "down")
    if bug == "no decay":
        adamw["weight_decay"] = 0
    return torch.optim.AdamW(model.parameters(), **adamw)


def tensor_parallel(bug):
    functions = dict(shard=shard, rank_loss=rank_loss, clip=clip, optimizer=optimizer)
    functions = {name: functools.partial(f, bug) for name, f in functions.items()}
    settings = dict(ranks="sum", mesh={2: dict(tp=2)})
    return dict(functions, build=build, loss=loss, gather=gather, SETTINGS=settings)


# Data parallelism --------------------------------------------------------------------------------


def build_rows():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(8, 7)


def square(model, rows):
    return (model(rows[:, :4]) - rows[:, 4:]).square().mean()


def data_loss(bug, model, batch):
    # Three micro-batches of a row each on rank 0, or four, of as many rows on the other rank.
    parts = batch.split((2, 6) if bug == "uneven" else (4, 4))
    rows = parts[0 if bug == "same rows" else dist.get_rank()]
    rows = rows[:3] if bug == "lost row" else rows
    value = square(model, rows) / (3 if bug == "divided again" else 1)
    value.backward()
    for p in model.parameters():
        if bug != "not reduced" and hasattr(model, "replicas"):
            p.grad = reduced(p.grad) / dist.get_world_size()
    return value.detach() * (3 if bug == "divided again" else 1)


def replicate(model, mesh):
    model.replicas = mesh.size()
    return model


def data_parallel(bug):
    settings = dict(ranks="mean", mesh={2: dict(dp=2)})
    return dict(build=build_rows, shard=replicate, loss=square, SETTINGS=settings,
                rank_loss=functools.partial(data_loss, bug))  # fmt: skip


# The full edition --------------------------------------------------------------------------------


def full_edition(bug):
    """Its adapter, under t2 and ZeRO-1. With a bug, no gradient is summed over the ranks."""
    adapter = runpy.run_path(str(ROOT / "conformance/subjects/full_edition.py"))

    def shard(model, mesh):
        model = adapter["shard"](model, mesh)
        for name, place in model.part.places.items():
            model.part.places[name] = place._replace(gradient_groups=())
        return model

    return adapter | dict(shard=shard) if bug else adapter


# What the kit says -------------------------------------------------------------------------------

BUGS = {  # for each bug: the parallelism, a stage with a finding, and what the finding says
    "norm forgotten": (tensor_parallel, "gradient, step 1", "norm.weight.* partial over tp"),
    "mean": (tensor_parallel, "gradient, step 1", "a mean over tp where a sum is due"),
    "summed twice": (tensor_parallel, "gradient, step 1", "summed twice over tp"),
    "detached gather": (tensor_parallel, "gradient, step 1", "norm.weight.* a missing gradient"),
    "own slice": (tensor_parallel, "gradient, step 1", "right from the loss to up.* from here on"),
    "kept": (tensor_parallel, "gradient, step 2", "the step before is still in it"),
    "wrong shard": (tensor_parallel, "weights before", "up.weight.* a wrong rank's shard"),
    "random start": (tensor_parallel, "weights before", "out.weight.* start from different"),
    "bias everywhere": (tensor_parallel, "loss, step 1", "down.bias counts 2 times: every rank"),
    "local norm": (tensor_parallel, "clip norm, step 1", "the norm of this rank's gradients only"),
    "replicas in norm": (tensor_parallel, "clip norm, step 1", "replicas are counted once for"),
    "old parameters": (tensor_parallel, "weights, step 1", "down.weight.* did not step"),
    "no decay": (tensor_parallel, "weights, step 1", "no weight decay"),
    "stale buffer": (tensor_parallel, "buffers after", "tokens.* a stale buffer"),
    "uneven": (data_parallel, "gradient, step 1", "the ranks' means.* count 0.25 and 0.75"),
    "same rows": (data_parallel, "gradient, step 1", "computed the same part of the batch"),
    "lost row": (data_parallel, "gradient, step 1", "a part of the batch is on no rank"),
    "divided again": (data_parallel, "gradient, step 1", "divided by 3 once too often"),
    "not reduced": (data_parallel, "gradient, step 1", "not reduced over dp"),
    "not summed": (full_edition, "gradient, step 1", "layernorm.* partial over t: "),
}
QUICK = ("norm forgotten", "bias everywhere", "uneven", "local norm", "wrong shard", "own slice",
         "not summed")  # fmt: skip
RIGHT = {"tensor": tensor_parallel(None), "data": data_parallel(None), "full": full_edition(None)}


def of_rank_0(model, name, x):
    return torch.cat([gather(model, name, x).chunk(2, CUT[name])[0]] * 2, CUT[name])


class KeyBias(nn.Module):
    """A softmax does not depend on the bias of its keys, so this has a gradient of rounding."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ x + 0 * self.unused(x)


BLIND = {  # what the comparison cannot see, of which parameters and ranks
    "a gather of rank 0": (tensor_parallel(None) | dict(gather=of_rank_0), {("up.weight", 1)}),
    "rounding and zero": (
        dict(build=lambda: (KeyBias(), torch.randn(3, 5, 4)), shard=lambda model, mesh: model,
             loss=lambda model, x: model(x).square().sum()),
        {(name, r) for name in ("k.bias", "unused.bias", "unused.weight") for r in range(2)}),
}  # fmt: skip
SUBJECTS = RIGHT | {name: functions for name, (functions, _) in BLIND.items()}
FAST = [*SUBJECTS, *QUICK]


def rows_of(rank, names):
    """What the kit finds in some subjects, on the ranks of a group."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        subject = kit.subject_of(BUGS[name][0](name) if name in BUGS else SUBJECTS[name])
        found[name] = kit.examine(subject, kit.define(subject), kit.mesh_of(subject, 2))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """name -> what the kit finds in a subject. The subjects of the default suite share ranks."""
    made = {}

    def of(name):
        if name not in made:
            names = FAST if name in FAST else [x for x in BUGS if x not in FAST]
            made.update(ranks(tmp_path_factory.mktemp("kit"), 2, rows_of, names)[0])
        return made[name]

    return of


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_parallelism_agrees(name, found):
    rows = found(name)
    assert rows["findings"] == [] and rows["hidden"] == []
    assert rows["planted"] == {"tensor": 20, "data": 8, "full": 56}[name]
    assert max(rows["errors"].values()) < 1e-10


@pytest.mark.parametrize("bug", shortened(BUGS, *QUICK))
def test_a_planted_bug_is_found_and_named(bug, found):
    _, stage, text = BUGS[bug]
    lines = [f"{at}: {', '.join(some)}: {what}" for at, some, _, what in found(bug)["findings"]]
    assert any(re.match(f"{stage}: .*{text}", line) for line in lines), lines


@pytest.mark.parametrize("name", BLIND)
def test_what_the_comparison_cannot_see_is_reported(name, found):
    """A gradient that is zero, or rounding, is not a difference. It is named."""
    hidden = BLIND[name][1]
    assert {*map(tuple, found(name)["hidden"])} >= hidden
    lines, right = kit.report(2, dict(tp=2), found(name))
    assert not right and all(f"not compared: {x}" in "\n".join(lines) for x, _ in hidden)
    assert ("NOT ALL COMPARED" in lines[0]) == (name != "a gather of rank 0")


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_loss_that_draws_random_numbers_is_refused(float64):
    functions = dict(build=build_rows, shard=replicate,
                     loss=lambda model, rows: square(model, rows) * torch.rand(()))  # fmt: skip
    with pytest.raises(ValueError, match="turn dropout off"):
        kit.define(kit.subject_of(functions))


@pytest.mark.parametrize("factors, said", [
    ((0.3, 0.3, 0.7, 0.7), "partial over dp: the ranks' gradients add up"),
    ((0.3, 0.7, 0.3, 0.7), "partial over tp: the ranks' gradients add up"),
    ((0.1, 0.2, 0.3, 0.4), "partial over dp and tp: the ranks' gradients add up"),
    ((0.6, 0.6, 1.4, 1.4), "not reduced over dp: the ranks' mean"),
    ((4, 4, 4, 4), "summed 4 times over dp and tp"),
    ((0.5, 0.5, 0.5, 0.5), "a mean over dp or tp where a sum is due"),
    ((1, 1, 1, 1.5), "the ranks differ: 1, 1, 1 and 1.5 times"),
    ((1, 1, 0, 1), "a missing gradient"),
])  # fmt: skip
def test_a_pattern_of_four_ranks_names_the_dimension(factors, said, float64):
    """Ranks 0 and 1 are a tp group, ranks 0 and 2 a dp group."""
    sizes = dict(dp=2, tp=2)
    subject = kit.subject_of(dict(build=build_rows, shard=replicate, loss=square))
    truth = kit.define(subject, steps=1)
    step, records = truth["steps"][0], []
    for r, factor in enumerate(factors):
        gradient = {name: x * (factor if name == "0.weight" else 1)
                    for name, x in step["gradient"].items()}  # fmt: skip
        found = [dict(step, gradient=gradient, local=gradient)]
        place = dict(dp=r // 2, tp=r % 2)
        records.append(dict(truth, steps=found, own=None, blind=[], place=place))
    findings = kit.Judge(subject, truth, records, sizes).rows()["findings"]
    stage, names, bad, text = findings[0]
    assert bad == [r for r in range(4) if factors[r] != 1]
    assert (stage, names) == ("gradient, step 1", ["0.weight"]) and text.startswith(said), text


# The command and the README's table --------------------------------------------------------------

FOLDER = ROOT / "conformance"
README = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"`((?:[A-Z]\w*=\S+ )*python (?:conformance|tests)/[^`]*)`", README)


def test_each_command_of_the_table_names_files_that_exist():
    assert len(COMMANDS) >= 10
    paths = {path for command in COMMANDS for path in re.findall(r"[\w/]+\.py", command)}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    subjects = {path.name for path in FOLDER.glob("subjects/*.py")} - {"take.py"}
    assert {path.split("/")[-1] for path in paths if "/subjects/" in path} >= subjects


SUBJECT = """
import os
import torch
import torch.distributed as dist
from torch import nn

def build():
    return nn.Linear(4, 4), torch.randn(2, 4)

def shard(model, mesh):
    SHARD
    return model

def loss(model, batch):
    return model(batch).square().mean()
"""
LAUNCHED = "r, w = dist.get_rank(), dist.get_world_size(); seen = os.environ; "
LAUNCHED += "assert [seen['RANK'], seen['LOCAL_RANK'], seen['WORLD_SIZE']] == [f'{r}', f'{r}', "
LAUNCHED += "f'{w}'] and seen['MASTER_ADDR'] == '127.0.0.1' and int(seen['MASTER_PORT']) > 0"


@pytest.mark.parametrize("shard, code, said", [
    (LAUNCHED, 0, "agrees"),  # without it a library takes each process for a run of its own
    ("model.weight.data *= 2", 1, "DIFFERS"),
    ("if mesh.get_rank() == 1: raise OSError('no disk'); dist.barrier()", 2, "OSError: no disk"),
    ("model.weight.data = model.weight.data[:2]", 2, "weight: expected (4, 4), got (2, 4)"),
    ("model.more = nn.Linear(1, 1)", 2, "expected equal names of parameters, got more.bias"),
])  # fmt: skip
def test_the_command_prints_its_verdict_or_the_error_of_a_rank(shard, code, said, tmp_path):
    subject = tmp_path / "subject.py"
    subject.write_text(SUBJECT.replace("SHARD", shard))
    command = FOLDER / "parallel.py", f"{subject}", "--ranks", "2"
    ended, out, err = as_script(*command, cwd=tmp_path)
    assert ended == code and said in (err if code == 2 else out), err


CODES = {"pass": 0, "agree": 0, "differ": 1, "raise": 2}  # of a verdict


def rows_of_the_tables():
    """(exit code, verdict, command) of each command of a kit on the page.

    The first command of a row has the row's first verdict, and so on.
    """
    for line in README.splitlines():
        *_, said, commands = line.split("|")[1:-1] if line.count("|") == 5 else ["", ""]
        codes = [CODES[word] for word in re.findall("|".join(CODES), said.lower())]
        commands = re.findall(r"`([^`]*conformance/(?:loss|parallel)\.py [^`]*)`", commands)
        for n, command in enumerate(commands):
            yield codes[min(n, len(codes) - 1)], said, command


@pytest.mark.slow
@pytest.mark.parametrize("code, said, command", [*rows_of_the_tables()])
def test_a_subject_has_the_result_of_its_row(code, said, command):
    """On 2 ranks. Of a loss that differs, a property that the row names has failed."""
    if "DIR" in command and "SOURCES" not in os.environ:
        pytest.skip("SOURCES: a folder with clones, and PYTHONPATH, with packages")
    *names, program, subject = re.findall(r"[A-Z_]+=\w+|(?:conformance|tests)/\S+", command)
    environment = dict(name.split("=") for name in names if not name.endswith("=DIR"))
    settings = command.partition(subject)[2].split()
    if program.endswith("parallel.py"):
        settings += ["--ranks", "2"]
    done = subprocess.run(
        [sys.executable, program, subject, *settings], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | environment)  # fmt: skip
    if "No module named" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == code, done.stdout + done.stderr
    for name in ("micro-batches", "empty sequence"):
        is_named = code == 1 and program.endswith("loss.py") and name in said
        assert not is_named or re.search(f"{name} +failed", done.stdout), done.stdout


# The findings without a kit ----------------------------------------------------------------------

# The last number that conformance/findings.py prints for each; 24 of HRM's 35 parameters are wrong.
FIGURES = dict(replicated_norms=4e-16, activation=9e-16, cut_matrices=24, distillation=0.143,
               auxiliary_loss=0.268, generation_tokens=1.6, sequence_kl=0.846, bnpo=2.5,
               local_tokens=-0.25, first_label=0.909)
IN_CLONES = dict(zeroed_labels=8, one_ratio=0, masked_sample=5, likelihood=-0.4, unmasked_mean=26,
                 smoothing=0.746, ignored_factor=-1, local_covariances=4)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES | IN_CLONES)
def test_a_finding_is_there_without_a_kit(name):
    """In clones, at the commits that conformance/README.md names."""
    installed("transformers", "trl")
    if name in IN_CLONES and "SOURCES" not in os.environ:
        pytest.skip("SOURCES: a folder with clones")
    code, out, err = as_script("conformance/findings.py", name, cwd=ROOT)
    assert code == 0, err
    number, figure = float(out.split()[-1]), (FIGURES | IN_CLONES)[name]
    is_rounding = 0 < figure < 1e-14
    assert number < 1e-14 if is_rounding else number == pytest.approx(figure, abs=1e-9)
