"""parallel.py's plans (grammar, groups, what is refused and how), and the rates of a schedule."""

import dataclasses
import itertools
import re

import pytest
import torch.distributed as dist
from conftest import ROOT
from test_ranks import ranks

from full.model.config import ModelConfig
from full.ranks.optimizer import lr_factor
from full.ranks.plans import Grid, Plan
from full.run.build import ONE_PROCESS
from full.run.config import Config
from full.run.conflicts import of_parts
from full.tiny import tiny
from parallel import Grid as SimpleGrid

# The grammar -----------------------------------------------------------------------------------

GOOD = {
    "d1": Plan(),
    "t2d4": Plan(dp=4, tp=2),
    "p2d2t2": Plan(pp=2, dp=2, tp=2),
    "d2c2e4": Plan(dp=2, cp=2, ep=4),
    "(attn:d2t2|ffn:e2t2)": Plan(dp=2, tp=2, ep=2, etp=2),
    "attn:d2t2|ffn:e2t2": Plan(dp=2, tp=2, ep=2, etp=2),
    "(attn:p2d2t2|ffn:p2e2t2)": Plan(pp=2, dp=2, tp=2, ep=2, etp=2),
    "(attn:p2d2t2|ffn:e2t2)": Plan(pp=2, dp=2, tp=2, ep=2, etp=2),
    "(attn:d1p4t2c2|ffn:d1p4t1e4)": Plan(pp=4, tp=2, cp=2, ep=4),
    "(attn:d4t2|ffn:e8)": Plan(dp=4, tp=2, ep=8),
    "(attn:d2t2|ffn:t2)": Plan(dp=2, tp=2, etp=2),
}


def every_plan(degrees=(1, 2, 3, 4)):
    """All plans of these degrees that may exist."""
    for d, c, t, p, e in itertools.product(degrees, degrees, degrees, (1, 2), (1, 2, 4, 6, 8)):
        for etp in {1, t}:
            try:
                yield Plan(dp=d, cp=c, tp=t, pp=p, ep=e, etp=etp)
            except ValueError:
                pass


@pytest.mark.quick
def test_every_plan_survives_its_string():
    plans = list(every_plan())
    assert len(plans) > 200
    for text, plan in [*GOOD.items(), *((str(plan), plan) for plan in plans)]:
        assert Plan.parse(text) == Plan.parse(str(plan)) == plan


GROUPS = {  # plan -> kind -> groups
    "p2d2t2": {
        "p": [[n, n + 4] for n in range(4)], "d": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "c": [[n] for n in range(8)], "t": [[0, 1], [2, 3], [4, 5], [6, 7]],
    },
    "p2c2t2": {
        "c": [[0, 2], [1, 3], [4, 6], [5, 7]], "dct": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "pct": [[*range(8)]], "fsdp": [[0, 2], [1, 3], [4, 6], [5, 7]],
    },
    "(attn:d4t2|ffn:e2t2)": {
        "t": [[0, 1], [2, 3], [4, 5], [6, 7]], "etp": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "e": [[0, 2], [1, 3], [4, 6], [5, 7]], "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    },
    # HSDP: how many of the d ranks share the weights.
    "d8e2 4": {
        "fsdp": [[0, 1, 2, 3], [4, 5, 6, 7]], "replicate": [[n, n + 4] for n in range(4)],
        "edp": [[0, 2, 4, 6], [1, 3, 5, 7]], "experts fsdp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "experts replicate": [[0, 4], [1, 5], [2, 6], [3, 7]],
    },
    "d4t2e4 1": {
        "fsdp": [[n] for n in range(8)], "replicate": [[0, 2, 4, 6], [1, 3, 5, 7]],
        "experts fsdp": [[n] for n in range(8)],
        "experts replicate": [[n, n + 4] for n in range(4)],
    },
}  # fmt: skip


def _groups(rank):
    for text, kinds in GROUPS.items():
        plan, _, shard = text.partition(" ")
        grid = Grid(Plan.parse(plan), shard=int(shard) if shard else None)
        groups = grid.group | {f"experts {name}": grid.experts.get_group(name)
                               for name in grid.experts.mesh_dim_names}  # fmt: skip
        for kind, expected in kinds.items():
            found = dist.get_process_group_ranks(groups[kind])
            assert [found] == [x for x in expected if rank in x], (text, kind)


def test_ranks_are_laid_out_pp_dp_cp_tp_and_the_experts_regroup_a_stage(tmp_path):
    ranks(tmp_path, 8, _groups)


# What is refused -------------------------------------------------------------------------------

NO_PLANS = (
    "d0", "d02", "d-1", "d2.5", "D2", "d2 t2", "d2\n", "d\u0663", "(d2)", "(attn:d2|ffn:e2",
    "((attn:d2|ffn:e2))", "attn:d2", "ffn:e2|attn:d2", "archon:d2", "d2|d2", "d2|ffn:e2", None,
)  # fmt: skip
PLANS = [(text, f"expected a plan such as .*got {re.escape(repr(text))}") for text in NO_PLANS]
PLANS += [
    ("", "expected a plan such as d2t2 or .*, got ''. Each letter has a number of 1 or more"),
    ("d4d2", "plan 'd4d2': expected letters of d t p c e, each at most once, got 'd4d2'"),
    ("d2x2", "expected letters of d t p c e, each at most once, got 'd2x2'"),
    ("(attn:d2e2|ffn:e2)", "expected letters of d t p c, each at most once, got 'd2e2'"),
    ("(attn:d2|ffn:c2)", "expected letters of d e t p, each at most once, got 'c2'"),
    ("(attn:p2d2|ffn:p1e2)", "expected p2 in ffn, as it follows from attn, got p1"),
    ("(attn:d2t2|ffn:d2e4)", "expected d1 in ffn, as it follows from attn, got d2"),
    ("(attn:d2t4|ffn:e2t2)", "plan .*: expected ffn's t to be 1 or attn's t = 4, got 2"),
    ("d2t2e3", r"plan d2t2e3: expected e to divide d \* c \* t = 4, got 3"),
    ("e2", r"d \* c \* t = 1, got 2. Experts add no ranks: d2e2 has 2$"),
    ("c4e6", "got 6. Experts add no ranks: d3c4e6 has 12$"),
    ("(attn:t2|ffn:e2t2)", r"got 2. Experts add no ranks: \(attn:d2t2\|ffn:e2t2\) has 4$"),
    ("(attn:d2t2c2|ffn:e3t2)", r"expected e to divide d \* c = 4, got 3"),
]
DENSE, SIX = tiny("qwen3"), tiny("qwen3_moe", num_experts=6)
FOURTEEN = tiny("qwen3", num_attention_heads=14, vocab_size=54)
FITS = [
    ("d2t2", dict(world=8), r"plan d2t2: expected p \* d \* c \* t = 4 ranks, got 8"),
    ("t4", dict(config=DENSE), "expected key heads divisible by t = 4, got 2"),
    ("t2", dict(config=tiny("qwen3_5_text", linear_num_key_heads=1)),
     "expected key heads of recurrent layers divisible by t = 2, got 1"),
    ("t3", dict(config=DENSE), "expected query heads divisible by t = 3, got 4"),
    ("d2e2", dict(config=DENSE), "expected a model with experts, got a dense one"),
    ("d4e4", dict(config=SIX), "expected experts divisible by e = 4, got 6"),
]
@pytest.mark.quick
def test_ulysses_needs_heads_for_t_and_c():
    text = "--cp-method ulysses divides the 14 query heads of the model of --layers and --hidden "
    text += "over t * c = 4 ranks: use ring"
    for plan, method, said in (("t2c2", "ulysses", [text]), ("t2c2", "ring", []),
                               ("t2", "ulysses", [])):  # fmt: skip
        pairs = of_parts(Config(plan=plan, cp_method=method), None, FOURTEEN)
        assert [text for is_wrong, text in pairs if is_wrong] == said


@pytest.mark.quick
def test_what_cannot_be_is_refused():
    for text in ("d2 zero1", "d2x2", "t2sp", "d0", ""):
        with pytest.raises(ValueError, match=f"expected a plan such as .*got '{text}'"):
            SimpleGrid(text)
    for text, message in PLANS:
        with pytest.raises(ValueError, match=message):
            Plan.parse(text)
    for text, given, message in FITS:
        with pytest.raises(ValueError, match=message):
            Plan.parse(text).require_fits(**given)
    Plan.parse("d2t2p2").require_fits(world=8, config=tiny("qwen3", vocab_size=54))
    Plan.parse("t2c2").require_fits(config=FOURTEEN)
    Plan.parse("d4").require_fits(shard=2)
    # An audit and `eval` take a run of any plan into one process.
    options = dict(plan="p2d2c2", shard_ranks=2, cp_method="ulysses", pp_schedule="zbv")
    options |= dict(data_parallel="fsdp", ac="memory_budget=0.5", compile=True)
    dataclasses.replace(Config(**options).check(), **ONE_PROCESS).check()


# The learning rate -----------------------------------------------------------------------------

FACTORS = [
    (dict(), [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0]),
    (dict(decay="cosine"), [0.5, 1, 1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381]),
    (dict(decay="constant"), [0.5] + [1] * 9),
    (dict(warmup=4, total=4), [0.25, 0.5, 0.75, 1, 1]),
]


@pytest.mark.quick
@pytest.mark.parametrize("options, factors", FACTORS)
def test_lr_factors_are_these(options, factors):
    given = dict(warmup=2, total=10) | options
    found = [lr_factor(step, **given) for step in range(len(factors))]
    assert found == pytest.approx(factors, abs=5e-5 if "decay" in options else 1e-15)


# The recipes -----------------------------------------------------------------------------------


def test_the_training_commands_of_the_recipes_have_plans_that_fit():
    page = (ROOT / "full" / "RECIPES.md").read_text()
    page = page.split("## Several machines")[1].split("\n## ")[0]
    config = ModelConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    runs = re.findall(r"torchrun --nnodes (\d+) --nproc-per-node (\d+).*?--plan (\S+)", page, re.S)
    assert [int(nodes) for nodes, _, _ in runs] == [2, 64]
    for nodes, each, plan in runs:
        Plan.parse(plan).require_fits(world=int(nodes) * int(each), config=config)
