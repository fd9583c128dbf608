"""parallel.py's plans (grammar, groups, what is refused and how), the model of what a rank holds
and sends, and the learning-rate schedule."""

import itertools
import re
import shlex

import measure_parallel
import pytest
import torch
from conftest import ROOT
from measure_parallel import PUBLISHED, WIRE, Rank, Step, read_cases
from test_ranks import ranks

import models
import parallel
import ring_attention as ring
from parallel import KINDS, Allocation, Plan, connect, lr_factor

GOOD = {
    "d1": Plan(),
    "d2": Plan(dp=2),
    "t2d4": Plan(dp=4, tp=2),
    "p2d2t2": Plan(pp=2, dp=2, tp=2),
    "d2c2e4": Plan(dp=2, cp=2, ep=4),
    "d2t2e4": Plan(dp=2, tp=2, ep=4),
    "archon:d4p2t2": Plan(dp=4, pp=2, tp=2, backend="archon"),
    "archon[actor]:d2": Plan(dp=2, backend="archon", name="actor"),
    "(attn:d2t2|ffn:e2t2)": Plan(dp=2, tp=2, ep=2, etp=2),
    "attn:d2t2|ffn:e2t2": Plan(dp=2, tp=2, ep=2, etp=2),
    "(attn:p2d2t2|ffn:p2e2t2)": Plan(pp=2, dp=2, tp=2, ep=2, etp=2),
    "(attn:p2d2t2|ffn:e2t2)": Plan(pp=2, dp=2, tp=2, ep=2, etp=2),
    "(attn:d1p4t2c2|ffn:d1p4t1e4)": Plan(pp=4, tp=2, cp=2, ep=4),
    "(attn:d4t2|ffn:d2e2t2)": Plan(dp=4, tp=2, ep=2, etp=2),
    "(attn:d4t2|ffn:e8)": Plan(dp=4, tp=2, ep=8),
    "(attn:d2t2c2|ffn:e1t2)": Plan(dp=2, tp=2, cp=2, etp=2),
    "megatron:(attn:d2t2|ffn:t2)": Plan(dp=2, tp=2, etp=2, backend="megatron"),
}


@pytest.mark.quick
@pytest.mark.parametrize("text", GOOD)
def test_a_plan_is_read_and_written_without_loss(text):
    plan = Plan.parse(text)
    assert plan == GOOD[text]
    assert Plan.parse(str(plan)) == plan
    assert str(Plan.parse(str(plan))) == str(plan)


def every_plan(degrees=(1, 2, 3, 4)):
    """All plans of these degrees that may exist."""
    for d, c, t, p, e in itertools.product(degrees, degrees, degrees, (1, 2), (1, 2, 4, 6, 8)):
        for etp in {1, t}:
            try:
                yield Plan(dp=d, cp=c, tp=t, pp=p, ep=e, etp=etp)
            except ValueError:
                pass


@pytest.mark.quick
def test_every_plan_survives_its_string_and_its_groups_are_partitions():
    plans = list(every_plan())
    assert len(plans) > 200
    for plan in plans:
        assert Plan.parse(str(plan)) == plan
        sizes = dict(dp=plan.dp, cp=plan.cp, tp=plan.tp, pp=plan.pp, ep=plan.ep, etp=plan.etp)
        sizes |= {"expert-dp": plan.edp, "fsdp": plan.dp * plan.cp}
        for kind in KINDS:
            groups = plan.groups(kind)
            assert {len(group) for group in groups} == {sizes[kind]}, (plan, kind)
            assert sorted(sum(groups, [])) == list(range(plan.world))
            assert all(group == sorted(group) for group in groups)


@pytest.mark.quick
def test_ranks_are_laid_out_pp_dp_cp_tp_and_the_experts_regroup_a_stage():
    plan = Plan.parse("p2d2c2t2")

    def rank(pp, dp, cp, tp):
        return ((pp * 2 + dp) * 2 + cp) * 2 + tp

    for n, kind in enumerate(("pp", "dp", "cp", "tp")):
        for group in plan.groups(kind):
            places = [p for p in itertools.product((0, 1), repeat=4) if rank(*p) in group]
            assert len(places) == 2  # they differ in this kind alone
            assert [a != b for a, b in zip(*places, strict=True)] == [k == n for k in range(4)]
    assert plan.groups("fsdp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    expert = Plan.parse("(attn:d4t2|ffn:e2t2)")
    assert expert.groups("etp") == expert.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert expert.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert expert.groups("expert-dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    flat = Plan.parse("d2t2e4")
    assert flat.groups("ep") == [[0, 1, 2, 3]] and flat.groups("expert-dp") == [[0], [1], [2], [3]]


@pytest.mark.quick
def test_describe_is_a_line_of_degrees_and_the_grid():
    assert Plan.parse("p2d4t2").describe().splitlines()[0] == "pp=2 dp=4 cp=1 tp=2 ep=1 etp=1"
    assert Plan.parse("p2d2t2").describe().splitlines()[1:] == [
        "pp 0  dp 0  cp 0 | 0 1", "pp 0  dp 1  cp 0 | 2 3",
        "pp 1  dp 0  cp 0 | 4 5", "pp 1  dp 1  cp 0 | 6 7",
    ]  # fmt: skip


@pytest.mark.quick
def test_allocations_join_plans_on_separate_and_on_the_same_devices():
    both = Allocation.parse("sglang:d4t2+archon:d4p2t2")
    rollout, trainer = Plan(dp=4, tp=2, backend="sglang"), Plan(dp=4, pp=2, tp=2, backend="archon")
    assert both.groups == ((rollout,), (trainer,)) and both.world == 24
    shared = Allocation.parse("sglang:d2|archon:t2+vllm:d3")  # | binds tighter
    assert [len(plans) for plans in shared.groups] == [2, 1] and shared.world == 5
    nested = Allocation.parse("sglang:d4|archon:(attn:d2t2|ffn:e2t2)")
    assert nested.groups[0][1].etp == 2
    for one in (both, shared, nested):
        assert Allocation.parse(str(one)) == one
    with pytest.raises(ValueError, match="got: sglang:d2 has 2 ranks, archon:t4 has 4"):
        Allocation.parse("sglang:d2|archon:t4")


@pytest.mark.quick
@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a plan such as d2t2, .*, got ''. Each letter has a number of 1 or more"),
        ("d0", "expected a plan such as .*, got 'd0'"),
        ("d02", "got 'd02'"),
        ("d-1", "got 'd-1'"),
        ("d2.5", "got 'd2.5'"),
        ("d4d2", "plan 'd4d2': expected letters of d t p c e, each at most once, got 'd4d2'"),
        ("d2x2", "expected letters of d t p c e, each at most once, got 'd2x2'"),
        ("D2", "got 'D2'"),
        ("d2 t2", "got 'd2 t2'"),
        ("d2\n", r"got 'd2\\n'"),
        ("d\u0663", "got 'd\u0663'"),  # a digit, but not of ours
        ("(d2", r"got '\(d2'"),
        ("(d2)", r"got '\(d2\)'"),
        ("(attn:d2|ffn:e2", r"got '\(attn:d2\|ffn:e2'"),
        ("attn:d2|ffn:e2)", r"got 'attn:d2\|ffn:e2\)'"),
        ("((attn:d2|ffn:e2))", r"got '\(\(attn"),
        ("attn:d2", "got 'attn:d2'"),
        ("ffn:e2|attn:d2", r"got 'ffn:e2\|attn:d2'"),
        ("(attn:d2e2|ffn:e2)", "expected letters of d t p c, each at most once, got 'd2e2'"),
        ("(attn:d2|ffn:c2)", "expected letters of d e t p, each at most once, got 'c2'"),
        ("(attn:p2d2|ffn:p1e2)", "expected p2 in ffn, as it follows from attn, got p1"),
        ("(attn:d2t2|ffn:d2e4)", "expected d1 in ffn, as it follows from attn, got d2"),
        ("(attn:d2t4|ffn:e2t2)", "plan .*: expected ffn's t to be 1 or attn's t = 4, got 2"),
        ("d2t2e3", r"plan d2t2e3: expected e to be a multiple of c \* t = 2, got 3"),
        ("d2t2e8", r"plan d2t2e8: expected e to divide d \* c \* t = 4, got 8"),
        ("d3e2", r"expected e to divide d \* c \* t = 3, got 2"),
        ("(attn:d2t2c2|ffn:e3t2)", "expected e to be a multiple of c = 2, got 3"),
        ("(attn:d2t2|ffn:e4t2)", r"expected e to divide d \* c = 2, got 4"),
        ("torch:d2", "expected a backend of archon, .*, got 'torch'"),
        ("archon[]:d2", "got 'archon"),
        ("archon:d2+sglang:d2", r"got 'archon:d2\+sglang:d2'"),
        ("d2|d2", r"got 'd2\|d2'"),
        (None, "got None"),
    ],
)
def test_what_is_not_a_plan_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.parse(text)


@pytest.mark.quick
def test_what_is_not_an_allocation_is_refused():
    for text in ("", "d2+", "d2|", "|d2", "d2++d2", "attn:d2|d2", "d2|ffn:e2", 2):
        with pytest.raises(ValueError, match="expected a plan such as d2t2"):
            Allocation.parse(text)


@pytest.mark.quick
@pytest.mark.parametrize("degree", [0, -2, 1.5, "2", None])
def test_degrees_are_positive_integers(degree):
    with pytest.raises(ValueError, match="expected c to be an integer of 1 or more"):
        Plan(cp=degree)
    with pytest.raises(ValueError, match="expected a backend with the name 'x'"):
        Plan(name="x")


@pytest.mark.quick
def test_a_plan_says_what_must_divide_what():
    dense, moe = models.tiny("qwen3"), models.tiny("qwen3_moe", num_experts=6)
    Plan.parse("d2t2p2").require_fits(world=8, config=models.tiny("qwen3", vocab_size=54))
    cases = [
        ("d2t2", dict(world=8), r"plan d2t2: expected p \* d \* c \* t = 4 ranks, got 8"),
        ("p4", dict(microbatches=3), "expected a micro-batch for each of 4 stages, got 3"),
        ("p4", dict(config=dense), "expected at most a stage for each of 2 layers, got p = 4"),
        ("t4", dict(config=dense), "expected key heads divisible by t = 4, got 2"),
        ("t3", dict(config=dense), "expected query heads divisible by t = 3, got 4"),
        ("d2e2", dict(config=dense), "expected a model with experts, got a dense one"),
        ("d4e4", dict(config=moe), "expected experts divisible by e = 4, got 6"),
    ]
    for text, given, message in cases:
        with pytest.raises(ValueError, match=message):
            Plan.parse(text).require_fits(**given)
    fourteen = models.tiny("qwen3", num_attention_heads=14, vocab_size=54)
    Plan.parse("t2c2").require_fits(config=fourteen)
    with pytest.raises(ValueError, match=r"\(ulysses\) divisible by t \* c = 4, got 14"):
        Plan.parse("t2c2").require_fits(config=fourteen, ulysses=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    "options, factors",
    [
        (dict(), [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (dict(first_step="zero"), [0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (dict(decay="cosine"),
         [0.5, 1, 1, 0.9619, 0.8536, 0.6913, 0.5, 0.3087, 0.1464, 0.0381]),
        (dict(decay="constant"), [0.5] + [1] * 9),
        (dict(min_ratio=0.2), [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
    ],
)  # fmt: skip
def test_lr_factors_are_these(options, factors):
    found = [lr_factor(step, warmup=2, total=10, **options) for step in range(10)]
    assert found == pytest.approx(factors, abs=5e-5)


@pytest.mark.quick
def test_a_warm_up_may_be_the_whole_run_and_later_steps_stay_at_the_end():
    assert [lr_factor(step, warmup=4, total=4) for step in range(4)] == [0.25, 0.5, 0.75, 1]
    assert lr_factor(4, warmup=4, total=4) == 1
    assert lr_factor(12, warmup=2, total=10, min_ratio=0.25) == 0.25


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong", [dict(decay="sqrt"), dict(first_step="one"), dict(warmup=11), dict(warmup=-1),
              dict(min_ratio=2), dict(min_ratio=-0.1)],
)  # fmt: skip
def test_schedules_that_do_not_exist_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^expected .*, got "):
        lr_factor(3, **dict(warmup=2, total=10) | wrong)


SENDS = {  # a case of read_cases: micro-batches of a replica
    "d2 dense": 2, "d2 dense zero1": 1, "d2 dense fsdp": 2, "t2 dense": 2, "t2 dense full": 1,
    "t2 tied full": 1, "t2 moe full": 1, "c2 dense": 2, "c2 dense full": 1, "d2e2 moe": 2,
    "d2e2 moe fsdp full": 2, "p2 dense": 4, "p2 tied": 2, "d2 dense zero1 mixed": 1,
    "d2 dense fsdp mixed": 2, "t2 moe full mixed": 1, "c2 dense mixed": 2, "d2e2 moe mixed": 2,
    "p2 tied mixed": 2,
}  # fmt: skip
SENDS_4 = {
    "c4 dense": 1, "d2t2 dense fsdp": 2, "t2c2 dense full": 1, "d2t2e4 moe": 2, "etp moe full": 1,
    "d2p2 dense zero1": 2, "d2p2 dense fsdp": 4, "p2t2 dense": 2, "p4 deep": 4,
    "d2t2 dense fsdp mixed": 2,
}  # fmt: skip
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SENDS_4]


def case_of(name):
    """(plan, kind of model, options, micro-batches a replica)."""
    return *read_cases(name)[name], (SENDS | SENDS_4)[name]


def _handed_over(rank, cases):
    return [measure_parallel.handed_over(*case) for case in cases]


@pytest.fixture(scope="module")
def handed_over(tmp_path_factory):
    """Case -> what each rank hands over; all cases of two ranks in one start of them."""
    made = {}

    def of_case(name):
        names = SENDS if name in SENDS else [name]
        if name not in made:
            cases = [case_of(name) for name in names]
            world = Plan.parse(cases[0][0]).world
            found = ranks(tmp_path_factory.mktemp("sends"), world, _handed_over, cases)
            made.update(zip(names, zip(*found)))
        return made[name]

    return of_case


@pytest.mark.parametrize("name", [*SENDS, *SLOW])
def test_the_bytes_that_plan_tells_are_what_ranks_hand_over(handed_over, name):
    """Exactly, on average over ranks: experts' rows are as many as the tokens, wherever they go."""
    text, kind, options, micros = case_of(name)
    plan = Plan.parse(text)
    found, told = handed_over(name), []
    config = measure_parallel.build(kind, torch.float32, vocab_size=56).config
    tokens = 8 * measure_parallel.LENGTH // plan.dp
    ac, mode = options.get("ac", "none"), options.get("mode", "ddp")
    compute = 2 if "compute_dtype" in options else 0
    step = Step(mode=mode, tokens=tokens, micros=micros, ac=ac, compute=compute)
    for stage in range(plan.pp):
        given = {}
        for message in Rank(plan, config, step, stage).messages():
            given[message.op] = given.get(message.op, 0) + message.given
        told += [given] * (plan.world // plan.pp)

    def total(sent):
        ops = {op for of_rank in sent for op in of_rank}
        sums = {op: sum(of_rank.get(op, 0) for of_rank in sent) for op in ops}
        return {op: size for op, size in sums.items() if size}

    assert total(told) == pytest.approx(total(found), rel=1e-12) and total(found)


@pytest.mark.quick
def test_what_is_on_the_wire_of_a_ring():
    """Pieces of n numbers, one from each of 4 ranks: a rank passes on all but the last it gets."""
    n, k = 12, 4
    assert n / k * WIRE["allgather"](k) == n * WIRE["reducescatter"](k) == 9
    assert WIRE["allreduce"](k) == 2 * WIRE["reducescatter"](k)  # which it is made of, and a gather
    assert n * WIRE["alltoall"](k) == n - n / k  # all but its own
    assert WIRE["send"](2) == 1


def kept_shape(kind, layers):
    sparse = dict(sparse_layers=tuple(range(layers))) if kind == "moe" else {}
    sizes = dict(hidden_size=128, head_dim=32, intermediate_size=320, vocab_size=56)
    return sizes | sparse | dict(num_hidden_layers=layers)


def _kept(text, kind, dtype, layers, mixed):
    """Bytes that autograd keeps of a forward of 32 tokens, without parameters."""
    plan = Plan.parse(text)
    model = measure_parallel.build(kind, dtype, **kept_shape(kind, layers))
    options = {}
    if mixed:
        options["compute_dtype"] = torch.bfloat16
        model.residual_dtype = dtype
    model = parallel.parallelize(model, plan, device_mesh=parallel.Grid.make(plan), **options)
    if mixed:
        parallel.LocalOptimizer(model, torch.optim.AdamW)
    own = {parallel.local(p).untyped_storage().data_ptr() for p in model.parameters()}
    seen, alive = {}, []

    def pack(x):
        alive.append(x)
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.hidden(torch.arange(32)[None])
    return sum(size for pointer, size in seen.items() if pointer not in own)


@pytest.mark.parametrize("case", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("text, kind", [("d1", "dense"), ("d1", "moe"), ("t2", "dense")])
def test_activations_are_what_is_kept(text, kind, case):
    """Of one layer more, within 5 %: the model leaves out norms' scales and experts' numbers."""
    plan = Plan.parse(text)
    mixed = case == "mixed"
    dtype = torch.float32 if mixed else getattr(torch, case)
    args = text, kind, dtype
    kept = [max(ring.launch(plan.world, _kept, *args, layers, mixed)) for layers in (2, 3)]
    config = measure_parallel.build(kind, dtype, **kept_shape(kind, 3)).config
    step = Step(tokens=32, micros=1, size=dtype.itemsize, ac="none", compute=2 if mixed else 0)
    rank = Rank(plan, config, step)
    # On a CPU, F.rms_norm of float32 is several operations and keeps its normalized input. On CUDA
    # it is one kernel, which does not, and neither does it in bfloat16.
    heads = config.num_attention_heads + config.num_key_value_heads
    widths = {"float32": 2 * config.hidden_size + heads * config.head_dim,
              "mixed": 2 * config.hidden_size}  # fmt: skip
    norms = 32 * 4 * widths.get(case, 0) / plan.tp
    assert kept[1] - kept[0] == pytest.approx(rank.layer() + norms, rel=0.05)
    assert rank.activations() == 3 * rank.layer()


@pytest.mark.quick
def test_with_layers_computed_again_only_their_inputs_wait():
    """The middle of 3 stages has 2 of 4 micro-batches under way, one layer, 32 numbers wide."""
    config = models.tiny("qwen3", num_hidden_layers=3, hidden_size=32)
    rank = Rank(Plan.parse("p3t2"), config, Step(tokens=64, micros=4, size=2), stage=1)
    assert rank.activations() == 2 * (16 // 2) * 32 * 2 + rank.layer()


@pytest.mark.quick
def test_the_published_shapes_have_their_published_sizes():
    for name, count in (("qwen3-8b", 8_190_735_360), ("qwen3-30b-a3b", 30_532_122_624)):
        config = models.ModelConfig.from_hf(PUBLISHED[name])
        assert Rank(Plan(), config, Step()).whole == count
        parts = measure_parallel.memory(Plan(), config, Step(size=2))
        assert parts["weights"] == parts["gradients"] == parts["moments"] / 2 == 2 * count


@pytest.mark.quick
def test_plan_refuses_what_does_not_divide(capsys):
    for text, more, message in (
        ("t3", [], "heads divisible by t = 3"),
        ("p4", ["--micro-batches", "2"], "expected a micro-batch for each of 4 stages, got 2"),
        ("c8", ["--tokens", "100"], r"100 tokens of a replica must divide by .* = 64"),
    ):
        assert parallel.main(["plan", text, "--model", "qwen3-8b", *more]) == 2
        assert re.search(message, capsys.readouterr().err)


def commands():
    """The `parallel.py plan` commands of the page of results."""
    page = (ROOT / "tests" / "RESULTS.md").read_text()
    page = page.split("## What a rank holds and sends")[1].split("\n## ")[0]
    found = re.findall(r"python parallel\.py (plan .*)", page.replace("\\\n", " "))
    assert len(found) > 1
    return page, [shlex.split(command.split("#")[0]) for command in found]


def test_the_rows_of_the_results_are_what_plan_prints(capsys):
    page, found = commands()
    for command in found:
        assert parallel.main(command) == 0
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
        assert rows and all(row in page for row in rows)


def test_the_training_commands_of_the_recipes_have_plans_that_fit():
    page = (ROOT / "tests" / "RECIPES.md").read_text()
    page = page.split("## Several machines")[1].split("\n## ")[0]
    config = models.ModelConfig.from_hf(PUBLISHED["qwen3-8b"])
    runs = re.findall(r"torchrun --nnodes (\d+) --nproc-per-node (\d+).*?--plan (\S+)", page, re.S)
    assert [int(nodes) for nodes, _, _ in runs] == [2, 64]
    for nodes, each, plan in runs:
        Plan.parse(plan).require_fits(world=int(nodes) * int(each), config=config)


@pytest.mark.quick
def test_a_process_group_that_is_there_is_used_with_a_warning(process_group):
    # the last test here: the group stays, and ranks are forked above
    with pytest.warns(UserWarning, match="timeout=5 has no effect"):
        assert connect("cpu", timeout=5) == "cpu"
