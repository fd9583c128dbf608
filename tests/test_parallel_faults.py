"""What parallel.py must refuse, keep and notice: hostile checkpoints, buffers, calls, replicas."""

import gc
import json
import pickle
import re
import time
import weakref
import zlib
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import complaint_of as _fails
from conftest import shortened
from measure_parallel import LENGTH, ROWS, Training, backward, batch, build
from test_ranks import ranks
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import models
import parallel
from parallel import TIED, Damaged, Grid, LocalOptimizer, Plan
from parallel import clip_grad_norm, copy_weights, local, parallelize, persistent_buffers
from parallel import read_checkpoint, read_newest, reduce_gradients, replica_difference, sealed
from parallel import superseded, training_tensors, write_checkpoint


def equal_on_ranks(tmp_path, world, function, *args):
    """What function returns on every rank."""
    first, *others = ranks(tmp_path, world, function, *args)
    assert all(found == first for found in others)
    return first


# A checkpoint's files and its state --------------------------------------------------------------

SHARDS = [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]


def tensors():
    """What the checkpoints here hold: two dtypes, a tensor without dimensions, equal sizes."""
    generator = torch.Generator().manual_seed(0)
    floats = {name: torch.randn(3, 4, generator=generator) for name in ("first", "second")}
    return floats | {"votes": torch.arange(12).view(3, 4), "step": torch.tensor(7.0)}


@pytest.fixture(scope="module")
def whole(process_group, tmp_path_factory):
    """The files of a good checkpoint, by name."""
    path = tmp_path_factory.mktemp("whole") / "saved"
    write_checkpoint(path, tensors(), {"step": 3, "policy_version": 5})
    return {file.name: file.read_bytes() for file in path.iterdir()}


def lay(path, files):
    """Write a checkpoint's files, under a state with checksums that agree, sealed."""
    path.mkdir(parents=True, exist_ok=True)
    state = json.loads(files["state.json"])
    for name, raw in files.items():
        (path / name).write_bytes(raw)
        if name != "state.json":
            state["files"][name] = [len(raw), zlib.crc32(raw)]
    (path / "state.json").write_text(json.dumps(sealed(state)))
    return path


def refuses(path, text, **options):
    with pytest.raises(ValueError, match=f"checkpoint {path}.*{text}"):
        read_checkpoint(path, tensors(), **options)


FOREIGN = {  # what is in the place of our tensors, with a checksum that agrees
    "garbage": lambda raw: b"garbage",
    "nothing": lambda raw: b"",
    "half": lambda raw: raw[: len(raw) // 2],
    "a header of 1 TB": lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:],
    "a header that is no JSON": lambda raw: raw[:8] + b"x" + raw[9:],
    "a pickle": lambda raw: pickle.dumps([1, {}]),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_is_not_ours_is_refused_by_name(whole, tmp_path, name):
    path = lay(tmp_path / "saved", whole | {SHARDS[0]: FOREIGN[name](whole[SHARDS[0]])})
    refuses(path, "cannot be read")


@pytest.mark.quick
def test_a_model_of_another_shape_is_refused_by_the_name_of_a_tensor(whole, tmp_path):
    path = lay(tmp_path / "saved", whole)
    other = tensors() | {"first": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match=r"another model: first is \(3, 4\) there and \(4, 4\)"):
        read_checkpoint(path, other)


STATES = {  # what state.json begins with, which has the seal that fits
    '{"step": NaN': "Out of range",
    '{"step": -Infinity': "Out of range",
    '{"step": 1e999': "Out of range",
    '{"step": -3': "step in state.json to be an integer of 0 or more, got -3",
    '{"step": 3.0': "step in state.json to be an integer .*, got 3.0",
    '{"step": true': "step in state.json to be an integer .*, got True",
    '{"step": "3"': "step in state.json to be an integer .*, got '3'",
    '{"note": 1': "step in state.json to be an integer .*, got None",
}


FILES = {
    "none": (lambda files: {}, "is damaged"),
    "a list": (lambda files: SHARDS, "state.json is missing or damaged"),
    "a path": (lambda files: files | {"../../x": [0, 0]}, "../../x is damaged"),
    "an absolute path": (lambda files: files | {"/dev/null": [0, 0]}, "/dev/null is damaged"),
    "no sizes": (lambda files: files | {SHARDS[0]: 3}, "state.json is missing or damaged"),
    "a file too long": (lambda files: {SHARDS[0]: [10**12, 0]}, "is damaged"),
    "a file too many": (lambda files: files, "other.safetensors is damaged"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", [*STATES, *FILES])
def test_a_state_that_is_not_ours_is_refused(whole, tmp_path, name):
    """Of improper counts, or of other files than those that are there."""
    path = lay(tmp_path / "saved", whole)
    state = json.loads((path / "state.json").read_text())
    if name in STATES:
        state, text = json.loads(f'{name}, "files": {json.dumps(state["files"])}}}'), STATES[name]
    else:
        edit, text = FILES[name]
        state["files"] = edit(state["files"])
    if name == "a file too many":
        (path / "other.safetensors").write_bytes(whole[SHARDS[0]])
    state.pop("seal", None)
    state["seal"] = zlib.crc32(json.dumps(state).encode())
    (path / "state.json").write_text(json.dumps(state))
    refuses(path, text, counts=("step",))


@pytest.mark.quick
@pytest.mark.parametrize("step", [float("nan"), float("inf"), object()])
def test_a_state_that_could_not_be_read_is_not_written(process_group, tmp_path, step):
    with pytest.raises(ValueError, match="not finite JSON"):
        write_checkpoint(tmp_path / "saved", tensors(), {"step": step})
    assert not list(tmp_path.iterdir())


@pytest.mark.quick
@pytest.mark.parametrize(
    "step, keep, gone", [(6, 2, "28"), (8, 2, "24"), (6, 9, "8"), (2, 1, "468")]
)
def test_superseded_checkpoints_are_old_or_later(tmp_path, step, keep, gone):
    """Of steps 2, 4, 6 and 8."""
    for saved in "2468":
        (tmp_path / f"step-0000000{saved}").mkdir()
    assert "".join(path.name[-1] for path in superseded(tmp_path, step, keep)) == gone


def _rows_of(rank, value, rows):
    """Tensors of 2 * rows KiB, half of them on each of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    here = torch.full((rows, 256), float(value))
    return {name: DTensor.from_local(here.clone(), mesh, [Shard(0)], run_check=False)
            for name in ("a", "b", "c")}  # fmt: skip


def _nowhere(rank, folder):
    """A directory inside a file: only rank 0 makes it, and no rank waits for its failure."""
    (folder / "file").touch()
    with pytest.raises(OSError, match="file/saved") as caught:
        write_checkpoint(folder / "file" / "saved", _rows_of(rank, 1, 4), {"step": 1})
    return str(caught.value)


def test_a_directory_that_cannot_be_made_is_an_error_of_all_ranks(tmp_path):
    equal_on_ranks(tmp_path, 2, _nowhere, tmp_path)


def _damaged_on_two_ranks(rank, folder):
    """What a rank says of damages that the checksums agree with; a shard is on each."""
    write_checkpoint(folder / "good", _rows_of(rank, rank + 1, 4), {"step": 1})
    files = {file.name: file.read_bytes() for file in (folder / "good").iterdir()}
    found = _rows_of(rank, 0, 4)
    assert read_checkpoint(folder / "good", found, counts=("step",))["step"] == 1
    assert all((local(x) == rank + 1).all() for x in found.values())

    data = files[SHARDS[1]]
    for name, raw in (("cut", data[:-30]), ("of-zeros", bytes(len(data))), ("gone", b"")):
        if rank == 0:
            lay(folder / name, files | {SHARDS[1]: raw})
        dist.barrier()
        yield _fails(read_checkpoint, folder / name, _rows_of(rank, 0, 4))


def _listed(rank, function, *args):
    return [*function(rank, *args)]


def test_what_one_rank_cannot_read_is_refused_by_all(tmp_path):
    folder = tmp_path / "saved"
    texts = equal_on_ranks(tmp_path, 2, _listed, _damaged_on_two_ranks, folder)
    for text, name in zip(texts, ("cut", "of-zeros", "gone"), strict=True):
        assert f"saved/{name} cannot be read" in text and "\n" not in text, text


def _slow(rank, folder):
    """Write and resume where a rank's own share takes longer than a collective may wait."""
    dist.barrier()
    dist.destroy_process_group()
    patience = dict(init_method=f"file://{folder}/slow-store", timeout=timedelta(seconds=5))
    dist.init_process_group("gloo", rank=rank, world_size=2, **patience)
    rows = 512
    seconds_per_byte = 6 / (3 * rows * 1024)

    def slow(data, value=0):
        time.sleep(len(data) * seconds_per_byte)
        return zlib.crc32(data, value)

    parallel.zlib = SimpleNamespace(crc32=slow)
    path = folder / "step-00000001"
    write_checkpoint(path, _rows_of(rank, rank + 1, rows), {"step": 1})
    found = _rows_of(rank, 0, rows)
    read_newest(folder, lambda path: read_checkpoint(path, found))
    return all((local(x) == rank + 1).all().item() for x in found.values())


def test_slow_files_do_not_end_a_run(tmp_path):
    """A share takes 6 s to sum, and a collective waits for 5 s."""
    (tmp_path / "run").mkdir()
    assert ranks(tmp_path, 2, _slow, tmp_path / "run") == [True, True]


def _bytes_read():
    """Bytes that this process has read so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def _resumed(rank, folder):
    """Bytes read by a resume, by sharding."""
    rows = 4096
    write_checkpoint(folder / "step-00000001", _rows_of(rank, rank + 1, rows), {"step": 1})
    before = _bytes_read()
    read_newest(folder, lambda path: read_checkpoint(path, _rows_of(rank, 0, rows)))
    between = _bytes_read()
    whole = {name: torch.zeros(2 * rows, 256) for name in ("a", "b", "c")}
    read_newest(folder, lambda path: read_checkpoint(path, whole))
    assert all(x[0, 0] == 1 and x[-1, -1] == 2 for x in whole.values())
    return between - before, _bytes_read() - between


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads Linux's /proc")
def test_a_resume_hashes_each_byte_on_one_rank(tmp_path):
    """What is loaded is mapped into memory, which /proc does not count."""
    (tmp_path / "run").mkdir()
    share = 3 * 4096 * 1024
    for sharded, whole in ranks(tmp_path, 2, _resumed, tmp_path / "run"):
        assert share < sharded < 1.02 * share and share < whole < 1.02 * share


def _damaged_then_older(rank, folder):
    """Which step is read if one byte of rank 1's newest file differs, and what it fills."""
    for step in (1, 2):
        tensors = _rows_of(rank, 10 * step + rank, 4)
        write_checkpoint(folder / f"step-{step:08d}", tensors, {"step": step})
    data = folder / "step-00000002" / SHARDS[1]
    if rank == 0:
        raw = bytearray(data.read_bytes())
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
    dist.barrier()
    found = _rows_of(rank, 0, 4)
    path, state = read_newest(folder, lambda path: read_checkpoint(path, found))
    assert all((local(x) == 10 + rank).all() for x in found.values())
    with pytest.raises(Damaged, match=f"step-00000002: {SHARDS[1]} is damaged"):
        read_checkpoint(folder / "step-00000002", found)

    # Another model is refused: an older checkpoint of the same run would not be another one.
    with pytest.raises(ValueError, match="of another model") as error:
        read_newest(folder, lambda path: read_checkpoint(path, found | {"d": torch.zeros(1)}))
    assert not isinstance(error.value, Damaged)
    return Path(path).name, state["step"]


def test_damage_that_one_rank_finds_is_passed_over_by_all(tmp_path):
    (tmp_path / "run").mkdir()
    found = ranks(tmp_path, 2, _damaged_then_older, tmp_path / "run")
    assert found == [("step-00000001", 1)] * 2


def test_a_part_of_a_checkpoint_is_read_by_the_beginning_of_its_names(tmp_path, process_group):
    """And is as strict: a tensor too many or too few under these names is refused."""
    stored = {"model.a": torch.ones(2), "model.b": torch.ones(3), "optimizer.a": torch.ones(2)}
    write_checkpoint(tmp_path / "saved", stored, {"step": 1})
    found = {"model.a": torch.zeros(2), "model.b": torch.zeros(3)}
    assert read_checkpoint(tmp_path / "saved", found, only="model.")["step"] == 1
    assert all(x.eq(1).all() for x in found.values())
    with pytest.raises(ValueError, match=r"optimizer.a is \(2,\) there and absent here"):
        read_checkpoint(tmp_path / "saved", found)
    with pytest.raises(ValueError, match=r"model.b is \(3,\) there and absent here"):
        read_checkpoint(tmp_path / "saved", {"model.a": torch.zeros(2)}, only="model.")
    with pytest.raises(ValueError, match="model.c is absent there"):
        read_checkpoint(tmp_path / "saved", found | {"model.c": torch.zeros(1)}, only="model.")


# Buffers ---------------------------------------------------------------------------------------


def _biased(seed):
    """A model whose routers have a bias, which moves where tokens go."""
    model = models.tiny_model(
        "qwen3_moe", seed=seed, dtype=torch.float64, vocab_size=56, num_experts=4,
        num_hidden_layers=2, router_bias_rate=0.1, sparse_layers=(0, 1))  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for votes in model.buffers():
        votes.copy_(torch.randint(-9, 9, votes.shape, generator=generator))
    return model


WITH_BUFFERS = [("d2", "ddp"), ("d2", "fsdp"), ("d2", "zero1"), ("t2", "ddp"), ("d2e2", "ddp")]
WITH_BUFFERS += [("p2", "ddp"), ("p2", "fsdp"), ("t2e2", "ddp"), ("(attn:t2|ffn:t2)", "ddp")]


def _carried(rank, folder):
    """Buffers of a checkpoint read under each plan, and what the whole model's copy says."""
    tokens, true = torch.arange(12)[None], _biased(1)
    wanted = persistent_buffers(true)
    for n, (text, mode) in enumerate(WITH_BUFFERS):
        grid = Grid.make(Plan.parse(text))
        written, read = (Training(_biased(seed), grid, batch(), mode=mode) for seed in (1, 2))
        write_checkpoint(folder / f"{n}", training_tensors(written.model, written.optimizer), {})
        read_checkpoint(folder / f"{n}", training_tensors(read.model, read.optimizer))
        held = persistent_buffers(read.model)
        assert held and all(torch.equal(votes, wanted[name]) for name, votes in held.items())
        assert held.keys() == dict(read.model.named_buffers()).keys()
        copy = _biased(3)
        copy_weights(read.model, copy)
        parallel.reshard(read.model)
        assert torch.equal(copy.hidden(tokens), true.hidden(tokens)), (text, mode)
    other = dict(num_experts=4, num_hidden_layers=2, sparse_layers=(0, 1))
    copy = models.tiny_model("qwen3_moe", vocab_size=56, **other)
    assert re.search("models differ: .*votes", _fails(copy_weights, _biased(1), copy))
    return True


def test_buffers_travel_with_checkpoints_and_copies_under_every_plan(tmp_path):
    moved = _biased(1)
    for votes in moved.buffers():
        votes.zero_()
    hidden = [model.hidden(torch.arange(12)[None]) for model in (_biased(1), moved)]
    assert (hidden[0] - hidden[1]).norm() > 0.01 * hidden[0].norm()  # they do matter
    assert all(ranks(tmp_path, 2, _carried, tmp_path / "saved"))


# Calls that cannot be --------------------------------------------------------------------------


def _model(kind="dense"):
    return build(kind, torch.float64)


def _call(text, kind="dense", *, grid=None, length=LENGTH, rows=4, bad=1, **options):
    """What is said of a plan, of the grid of another one, or of tokens that cannot be."""
    model, plan, parts = _model(kind), Plan.parse(text), []
    tokens = torch.ones(1, length, dtype=torch.int64)
    tokens[0, 5] = bad

    def call():
        mesh = Grid.make(Plan.parse(grid or text))
        parts.append(part := parallelize(model, plan, device_mesh=mesh, **options))
        part.hidden(tokens)

    said = _fails(call)
    if not parts:  # it is still the whole model that computes on one process
        tokens = torch.arange(LENGTH)[None]
        assert torch.equal(model.hidden(tokens), _model(kind).hidden(tokens))
    return said


CALLS = [  # plan, kind of model, options of `_call`, what all ranks say
    ("t2", "dense", dict(length=23), "2 ranks cannot share 23 evenly: pad to a multiple"),
    ("d2", "dense", dict(mode="zero3"), "mode: expected one of ddp, fsdp, zero1, got 'zero3'"),
    ("d2", "dense", dict(ac="layers"), "ac: expected one of none, full, op, got 'layers'"),
    ("p2", "dense", dict(schedule="gpipe"), "schedule: expected one of 1f1b, interleaved1f1b"),
    ("d2", "dense", dict(offload=True), 'offload=True moves shards: it needs mode="fsdp"'),
    ("c2", "dense", {}, "plan c2: c splits sequences: give attention="),
    ("d4", "dense", {}, r"plan d4: expected p \* d \* c \* t = 4 ranks, got 2"),
    ("d2e2", "dense", {}, "expected a model with experts, got a dense one"),
    ("t2", "moe", dict(sequence=False), "every tensor rank would send the same tokens"),
    ("p2", "deep", dict(schedule="zbv", mode="fsdp"), 'zbv has no mode="fsdp"'),
    ("p2", "deep", dict(schedule="zbv", ac="op"), 'zbv has .* no ac="op"'),
    ("d2e2", "moe", dict(mode="fsdp", ac="op"), "plan d2e2: each expert is whole on one rank"),
    ("p2", "dense", dict(schedule="zbv"), "zbv cuts 4 stages, but the model has 2 layers"),
    ("p2", "dense", dict(schedule="zbv", attention=print), "zbv cuts 4 stages, but the model"),
    ("d2", "dense", dict(grid="t2"), "plan d2: expected its grid, got that of plan t2"),
    ("t2", "dense", dict(grid="d2"), "plan t2: expected its grid, got that of plan d2"),
    ("d2", "dense", dict(schedule="zbv"), "plan d2: schedule='zbv' needs a pipeline, p"),
]


def _split(model, text, **options):
    plan = Plan.parse(text)
    return parallelize(model, plan, device_mesh=Grid.make(plan), **options)


def _refused(rank):
    """(what is said, what it must match) of each wrong call."""
    for text, kind, options, pattern in CALLS:
        yield _call(text, kind, **options), pattern
    for bad in (57, -1):  # with t and without the same is said
        row = torch.ones(1, LENGTH, dtype=torch.int64)
        row[0, 5] = bad
        yield _call("t2", bad=bad), re.escape(_fails(_model().hidden, row))

    fsdp.fully_shard(sharded := _model())
    for model, text in ((_split(_model(), "t2"), "t2"), (_split(_model(), "p2"), "p2"),
                        (sharded, "d2")):  # fmt: skip
        yield _fails(_split, model, text), "expected a whole model, got one that is split or shard"
    zero = "zero=True .* expected a model of .*zero1.*, got mode="
    for model, pattern in (
        (_split(_model(), "d2"), zero + "'ddp'"),
        (_split(_model(), "d2", mode="fsdp"), zero + "'fsdp'"),
        (sharded, "expected a whole model or one of parallelize, got one with DTensors"),
        (_model(), zero + "'ddp'"),
    ):
        yield _fails(LocalOptimizer, model, torch.optim.AdamW, zero=True), pattern

    plan = Plan.parse("d2e2")
    splits = parallel.split_for_decoding, _model(), plan
    yield _fails(*splits, device_mesh=Grid.make(plan)), "expected a model with experts"

    tied = _model()  # a parameter with two names
    tied.lm_head.weight = tied.model.embed_tokens.weight
    yield _fails(_split, tied, "t2"), "one parameter with two names"
    reduce_gradients(_split(tied, "d2"))


def test_what_cannot_be_is_refused_alike_on_every_rank(tmp_path):
    for text, pattern in equal_on_ranks(tmp_path, 2, _listed, _refused):
        assert re.search(pattern, text), (text, pattern)


def _own_parameter(rank):
    """The gradient of a parameter after the last norm under t2: no sum of equal terms."""
    model = _model()
    model.scale = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model = _split(model, "t2")
    model.scale.grad = torch.ones(3, dtype=torch.float64)
    reduce_gradients(model)
    return model.scale.grad.tolist()


def test_modules_with_parameters_of_their_own(tmp_path):
    assert ranks(tmp_path, 2, _own_parameter) == [[1.0] * 3] * 2


# Replicas --------------------------------------------------------------------------------------


def _trained(text, kind, *, shards=None, sizes=None, **options):
    """A model and its optimizer after three AdamW steps; without a plan where text is ""."""
    model, whole = build(kind, torch.float64, **(sizes or {})), batch(is_packed=False)
    grid = Grid.make(Plan.parse(text), shard=shards) if text else None
    share = grid.dp_rank if text else dist.get_rank()
    rows = torch.tensor([share % ROWS, (share + 1) % ROWS])  # unequal gradients on every share
    if text:
        training = Training(model, grid, whole, rows=rows, **options)
        for _ in range(3):
            training.backward()
            training.update()
        return training.model, training.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        backward(model, [whole.part(rows, torch.arange(LENGTH), "cpu")], [None], 1)
        reduce_gradients(model)
        clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _flip(model, optimizer, name, key):
    """The last bit of the first entry that is here, of a parameter, its state or a buffer."""
    tensor = dict(model.named_parameters(), **persistent_buffers(model))[name]
    if key:
        tensor = optimizer.mine[name] if isinstance(optimizer, LocalOptimizer) else tensor
        tensor = tensor if key == "master" else optimizer.state[tensor][key]
    here = local(tensor.detach())
    here.view(torch.int32 if here.element_size() == 4 else torch.int64)[(0,) * here.dim()] ^= 1


def _compared(rank, cases):
    """For each case what is said without a fault, with each flipped bit, and of the model alone."""
    for text, kind, options, flips in cases:
        model, optimizer = _trained(text, kind, **options)
        found = [replica_difference(model, optimizer)]
        for culprit, name, key, _ in flips:
            if rank == culprit:
                _flip(model, optimizer, name, key)
            found.append(replica_difference(model, optimizer))
            if rank == culprit:
                _flip(model, optimizer, name, key)
        yield [*found, replica_difference(model)]


NORM, UP, GATE = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.gate"
EXPERT, VOTES = "model.layers.1.mlp.experts.up_proj", "model.layers.1.mlp.votes"
Q_NORM = "model.layers.0.self_attn.q_norm.weight"
BOTH = "rank 0 / rank 1"
# ranks -> (plan, model, options, (rank whose bit is flipped, where, of which state, who differs))
COMPARED = {
    2: [
        ("", "dense", {}, [(1, UP, "", BOTH), (0, NORM, "exp_avg", BOTH)]),
        ("d2", "tied", {}, [(1, UP, "", BOTH), (1, UP, "exp_avg_sq", BOTH)]),
        ("d2", "dense", dict(mode="zero1"), [(1, UP, "", BOTH), (1, UP, "exp_avg", None)]),
        ("t2", "dense", {},
         [(1, NORM, "", BOTH), (1, UP, "", None), (0, Q_NORM, "exp_avg", BOTH)]),
        ("t2", "dense", dict(sequence=False), [(1, NORM, "", BOTH)]),
        ("d2", "dense", dict(compute_dtype=torch.float32), [(1, NORM, "master", BOTH)]),
        ("d2", "dense", dict(mode="fsdp"), [(1, UP, "", None), (1, UP, "step", BOTH)]),
        ("p2", "tied", {}, [(1, TIED, "", BOTH), (0, UP, "", None), (0, TIED, "exp_avg", BOTH)]),
        ("d2e2", "starved", {},
         [(1, GATE + ".weight", "", BOTH), (1, EXPERT, "", None), (1, VOTES, "", BOTH)]),
    ],
    4: [
        ("d2t2", "dense", {},
         [(2, UP, "", "rank 0 / rank 2"), (3, NORM, "", "ranks 0 1 2 / rank 3")]),
        ("d2t2", "tied", dict(mode="zero1"),
         [(1, NORM, "exp_avg", BOTH), (0, NORM, "", "ranks 1 2 3 / rank 0")]),
        ("d2t2", "tied", dict(mode="fsdp"), [(3, NORM, "", "rank 2 / rank 3")]),
        ("d4", "dense", dict(mode="fsdp", shards=2),
         [(3, UP, "", "rank 1 / rank 3"), (0, UP, "exp_avg", "rank 0 / rank 2")]),
        ("d4e2", "moe", {}, [(3, EXPERT, "", "rank 1 / rank 3")]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("world", shortened(COMPARED, 2))
def test_a_flipped_bit_is_named(tmp_path, world):
    cases = COMPARED[world]
    said = equal_on_ranks(tmp_path, world, _listed, _compared, cases)
    for (text, _, options, flips), (clean, *found, model_only) in zip(cases, said, strict=True):
        assert clean is None and model_only is None, (text, options, clean)
        for (_, name, key, who), words in zip(flips, found, strict=True):
            key = "" if key == "master" else key
            pattern = rf"replicas differ in \S*{re.escape(name)}\S*{key}: {who} hold"
            assert words is None if who is None else re.search(pattern, words), words


def _after_three_steps(rank, cases):
    return [replica_difference(*_trained(text, kind, **options)) for text, kind, options in cases]


# Two layers at one end and one at the other, and a long vocabulary: the tied embedding lies at
# other places of the ends' messages, over the borders at which the order of additions turns.
UNEVEN = dict(sizes=dict(num_hidden_layers=3, vocab_size=600))
SIX = [
    ("p2d3", "deep_tied", UNEVEN), ("p2d3", "deep_tied", UNEVEN | dict(mode="zero1")),
    ("p2d3", "deep_tied", UNEVEN | dict(mode="fsdp")), ("d3t2", "dense", {}),
    ("d3t2", "dense", dict(sequence=False)),
]  # fmt: skip


@pytest.mark.parametrize("cases", [SIX[:1], pytest.param(SIX, marks=pytest.mark.slow)], ids=len)
def test_replicas_hold_the_same_bits_after_three_steps(tmp_path, cases):
    """Three ranks a sum: two orders of addition would show, unlike with two."""
    assert ranks(tmp_path, 6, _after_three_steps, cases) == [[None] * len(cases)] * 6


def _unequal_states(rank):
    """What is said where rank 0 alone has made a step."""
    model = _split(_model(), "d2")
    optimizer = LocalOptimizer(model, lambda x: torch.optim.AdamW(x, lr=0.0))
    if rank == 0:
        for p in optimizer.mine.values():
            p.grad = torch.zeros_like(p)
        optimizer.inner.step()
    return replica_difference(model, optimizer)


def test_a_state_that_one_replica_lacks_is_named(tmp_path):
    assert f"step: {BOTH}" in equal_on_ranks(tmp_path, 2, _unequal_states)


@pytest.mark.quick
def test_a_model_is_freed_without_the_garbage_collector(process_group):
    model = _split(_model(), "d1")
    dropped = weakref.ref(model)
    gc.disable()
    del model
    gc.enable()
    assert dropped() is None
