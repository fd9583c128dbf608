"""What happens before the first step: defaults, the evaluation, five lines.

And the line that a run says where it has nothing to learn from; and a model that starts in parts.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import LOOKUP, shortened
from plan_training import read_cases
from oracles import LiveBytes
from test_ranks import ranks, read_metrics
from test_run import SAVING, TINY, good

from full.api import run
from full.audit.audit import audited
from full.learn.trainer import first_weights
from full.model.hf import load_hf, save_hf
from full.model.parallelize import materialise, parallelize
from full.model.transformer import Transformer
from full.ranks.places import full, local
from full.ranks.plans import Grid, Plan
from full.run.config import Config, _flag
from full.run.flags import parse_config
from full.run.run import lost_to_rounding
from full.tiny import tiny

FLAGS = f"{SAVING} 2 --task {LOOKUP!r} --size 2"
# Code is never imported from what a run stored, so the task is given again.
RESUME = f"--resume --out run --task {LOOKUP!r}"


# Defaults ------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("given, defaults", [
    ({}, (1e-3, 0.02)), (dict(model="DIR"), (1e-6, 0)),
    (dict(model="DIR", lora_rank=2), (1e-5, 0))])
def test_defaults_depend_on_what_the_run_begins_with(given, defaults):
    """A default is that of the start; a flag wins over it, 0 too where 0 has a meaning."""
    config = Config(**given).check()
    assert (config.lr, config.entropy_coef) == defaults
    flags = [x for name, value in given.items() for x in (_flag(name), f"{value}")]
    for entropy_coef in (0.5, 0.0):
        more = parse_config([*flags, "--entropy-coef", f"{entropy_coef}", "--lr", "3"]).check()
        assert (more.entropy_coef, more.lr) == (entropy_coef, 3.0)


# The evaluation before the first step ------------------------------------------------------------


def test_what_is_solved_before_the_first_step_is_audited(straight, tmp_path, process_group):
    run = Path(shutil.copytree(straight(FLAGS), tmp_path / "run"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert ["eval/solved_before" in json.loads(line) for line in lines] == [True, False]
    report = audited(run, 0, task=LOOKUP)
    assert report.wrong is None and any("from the first weights" in x for x in report.intro)
    before = [row for row in report.rows if row.key == "eval/solved_before"]
    assert len(before) == 1
    assert "eval/solved_before" not in {row.key for row in audited(run, 1, task=LOOKUP).rows}

    # A changed number is found.
    first = json.loads(lines[0])
    first["eval/solved_before"] += 1 / 6
    (run / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    assert audited(run, 0, task=LOOKUP).wrong == "eval/solved_before"


def test_it_is_evaluated_once_and_again_only_with_line_0(straight, tmp_path):
    finished = straight(FLAGS)
    out = (finished.parent / "out").read_text()
    lines = read_metrics(finished)
    (before,) = re.findall(r"^before +(\S+)$", out, re.M)
    assert float(before) == pytest.approx(lines[0]["eval/solved_before"], abs=1e-3)
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    out, _ = good(tmp_path, RESUME)
    assert "before" not in out and read_metrics(run) == lines
    for step in (1, 2):
        shutil.rmtree(run / f"step-{step:08d}")
    out, _ = good(tmp_path, RESUME)
    assert f"before{before:>30}\n" in out and read_metrics(run) == lines


# What is printed --------------------------------------------------------------------------------


def test_weights_that_are_too_coarse_for_a_step_are_said(tmp_path, monkeypatch, capsys):
    """As many as AdamW's first step leaves as they are. Masters are fine enough."""
    model = torch.nn.Linear(64, 64).bfloat16()
    model.bias.requires_grad_(False)
    first = model.weight.detach().clone()
    for lr in (1e-2, 1e-4, 1e-6):
        model.weight.data.copy_(first)
        model.weight.grad = torch.randn(64, 64).bfloat16()
        torch.optim.AdamW([model.weight], lr, weight_decay=0).step()
        share = (model.weight == first).double().mean().item()
        assert lost_to_rounding(model, lr) == pytest.approx(share, abs=0.01)
        model.weight.data.copy_(first)
    assert lost_to_rounding(model, 1e-6) > 0.99 > lost_to_rounding(model.float(), 1e-6) == 0

    monkeypatch.chdir(tmp_path)
    said = ("--dtype bfloat16 has no finer masters: rounding undoes a step of --lr 1e-05 in 84.5% "
            "of the weights; set --dtype float32 --compute-dtype bfloat16\n")  # fmt: skip
    for n, (flags, says) in enumerate({
        "--dtype bfloat16 --lr 1e-5": said, "--dtype bfloat16": "",  # with a rate of 0.01
        "--compute-dtype bfloat16 --lr 1e-5": "",
    }.items()):  # fmt: skip
        run(parse_config(f"{TINY} --out {n} --steps 1 {flags}".split()))
        assert capsys.readouterr().err == says


# Nothing to learn from --------------------------------------------------------------------------


def test_a_run_whose_rollouts_are_cut_off_warns_once_and_shows_it(tmp_path):
    out, err = good(tmp_path, f"{TINY} --max-new-tokens 1 --steps 3 --out run")
    shares = [x["tokens/truncated_fraction"] for x in read_metrics(tmp_path / "run")]
    assert all(0.5 < share < 1 for share in shares)  # one token may also be an end
    warning, idle = err.splitlines()
    assert warning.startswith(f"warning: step 0: {shares[0]:.0%} of the rollouts were cut off")
    assert idle.startswith("warning: steps 0 to 2: ")
    lines = [line for line in out.splitlines() if re.match(" +([0-9]+|step) ", line)]
    assert lines[0].split()[:5] == ["step", "reward", "solved", "eval", "truncated"]
    shown = {int(line.split()[0]): line.split()[-6] for line in lines[1:]}
    assert shown == {step: f"{shares[step]:.3g}" for step in shown} and len(shown) == 3


# A model that starts in parts -------------------------------------------------------------------

CASES = read_cases("""
    t2 qwen3, t2 llama, t2 gemma3_text, d2 qwen3 fsdp, d2 qwen3 fsdp offload, d2 qwen2 zero1,
    p2 qwen3, p2 gemma3_text zbv, d2e2 qwen3_moe, d4 qwen3 fsdp, d4e4 qwen3_moe, d2t2 qwen3 fsdp,
    d2p2 qwen3_moe fsdp
""")
# Wide enough that a part is more than one tensor; the vocabulary is the largest.
SHAPE = dict(vocab_size=512, hidden_size=64, num_hidden_layers=4, initializer_range=0.1)
FAMILIES = {
    "qwen3_moe": dict(num_experts=8),
    "llama": dict(qkv_bias=True, o_bias=True, mlp_bias=True),
    "gemma3_text": dict(layer_types=["sliding_attention", "full_attention"] * 2),
}


def shape_of(family):
    return tiny(family, **SHAPE, **FAMILIES.get(family, {}))


def _start(rank, name, directory):
    """Bytes of a rank's part of the weights, the most that were live, of the largest tensor; the
    largest difference from the whole model's weights, drawn and loaded."""
    text, family, options = CASES[name]
    shape, plan = shape_of(family), Plan.parse(text)
    truth = Transformer(shape).double().init_weights(3)
    if rank == 0:
        save_hf(truth, directory)
    dist.barrier()

    @torch.no_grad()
    def apart(model):
        places = model.part.places
        return max((full(p, places[name]) - truth.get_parameter(name)).abs().max().item()
                   for name, p in model.named_parameters())  # fmt: skip

    grid = Grid(plan)
    with LiveBytes() as counted:
        with torch.device("meta"):
            model = Transformer(shape).double()
        model = parallelize(model, plan, device_mesh=grid, **options)
        materialise(model)
        first_weights(model, "", 3)
    found = [apart(model)]

    own = [local(p.detach()) for p in model.parameters()]
    for p in own:
        p.fill_(7.0)
    load_hf(directory, model=model)
    largest = max(p.numel() * 8 for p in truth.parameters())
    return sum(p.numel() * 8 for p in own), counted.peak, largest, [*found, apart(model)]


@pytest.mark.parametrize("name", shortened(CASES, "d2 qwen3 fsdp", "p2 gemma3_text zbv"))
def test_a_rank_holds_its_part_and_the_weights_are_those_of_one_process(tmp_path, name):
    """The bytes of its live tensors are counted, not the process's."""
    text, family, _ = CASES[name]
    world = Plan.parse(text).world
    for part, most, largest, apart in ranks(tmp_path, world, _start, name, tmp_path / "hf"):
        assert apart == [0.0, 0.0]
        assert part <= most <= 1.1 * (part + largest)
    # That fewer bytes than the whole were counted is of use only where a part is less than it.
    whole = sum(p.numel() * 8 for p in Transformer(shape_of(family)).parameters())
    assert part < 0.7 * whole or name == "d2 qwen2 zero1" or "e" in text
