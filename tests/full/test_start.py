"""What happens before the first step: defaults, the evaluation, five lines.

And the line that a run says where it has nothing to learn from; and a model that starts in parts.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

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
from full.run.logs import Warnings
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


STREAK = [1, 1, 0.9, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1]
STREAK = [{"reward/groups_equal": equal, "reward/groups_none": 1.0 if step < 9 else 0.5,
           "reward/groups_all": float(step > 12)} for step, equal in enumerate(STREAK)]  # fmt: skip
CUT = [{"tokens/truncated_fraction": x} for x in (0.0, 0.5, 0.75, 0.2, 0.9, 1.0)]
OWN, EQUAL = Config(task="jsonl", reward="mine.py:f"), {"reward/values": 1}
HALF = EQUAL | CUT[1]
RIGHT, MOST = HALF | {"reward/solved": 0.5, "reward/mean": 0.5}, HALF | CUT[2]
NO_FUNCTION, WITH_TEACHER = Config(task="jsonl"), Config(task="jsonl", teacher="DIR")
SAID = [  # settings, the steps' metrics, and how the warnings begin, with what they advise
    (Config(), STREAK, ["steps 3 to 5: .*no rollout is solved.*--temp", "steps 9 to 11: .*--group",
                        "steps 13 to 15: .*every rollout.*give harder prompts"]),
    (Config(max_new_tokens=3), CUT, ["step 2: 75% of .* cut off after --max-new-tokens 3, .*rais"]),
    (Config(), CUT[:2], []),
    (OWN, [{}, HALF, EQUAL, EQUAL], ["step 1: --reward mine.py:f gave 0.2 to every answer: read"]),
    (OWN, [RIGHT], ["step 0: --reward mine.py:f gave 1 to every answer: read"]),
    (OWN, [{}, RIGHT, RIGHT], []),  # a policy that has learned all
    (OWN, [MOST, {"reward/values": 0}], [".*were cut off"]),
    (NO_FUNCTION, [EQUAL], [".*no answer ends in '#### '.*--instruction"]),
    (NO_FUNCTION, [RIGHT], [".*every answer is right.*--data"]),
    (Config(), [EQUAL], []), (WITH_TEACHER, [EQUAL], []),  # nobody needs rewards
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("config, steps, said", SAID)
def test_it_warns_once_of_what_cannot_be_learned_from(process_group, capsys, config, steps, said):
    usual = {"tokens/truncated_fraction": 0.0, "reward/values": 2, "reward/solved": 0.0,
             "reward/groups_equal": 0, "reward/mean": 0.1}  # fmt: skip
    log = Warnings(config)
    for step, metrics in enumerate(steps):
        log.step(step, SimpleNamespace(metrics=usual | metrics), {}, [], None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    for line, pattern in zip(lines, said, strict=True):
        assert re.match(f"warning: {pattern}", line), line


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
