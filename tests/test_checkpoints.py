"""Checkpoints: strict, whole or not at all, one tensor at a time, sharded, multimodal."""

import contextlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from test_ranks import ranks
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import models
from models import Transformer, load_hf, save_hf, tiny, tiny_model

pytest.importorskip("safetensors", reason="tests/requirements.txt is not installed")


def model_of(model_type="qwen3", dtype=torch.float64, **changes):
    return tiny_model(model_type, seed=3, dtype=dtype, **changes)


RAW = dict(
    model_type="qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=12,
)  # fmt: skip


def spoil_header(path, edit):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = edit(json.loads(data[8 : 8 + size]))
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def rename(header):
    return {k.replace("o_proj", "p_proj"): v for k, v in header.items()}


def reshape(header):
    tensor = header["model.norm.weight"]
    return header | {"model.norm.weight": tensor | {"shape": [2, tensor["shape"][0] // 2]}}


def rewrite(path, edit):
    from safetensors.torch import load_file, save_file

    save_file(edit(load_file(path)), path)


DAMAGE = {
    r"missing tensors \['model.norm.weight'\], unexpected tensors \[\]": lambda f: rewrite(
        f, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}),
    r"missing tensors \[\], unexpected tensors \['extra.weight'\]": lambda f: rewrite(
        f, lambda t: t | {"extra.weight": torch.ones(2)}),
    r"model.safetensors is truncated": lambda f: f.write_bytes(f.read_bytes()[:-7]),
    r"or no safetensors file: .*header":
        lambda f: f.write_bytes(b"\x10" + bytes(7) + b"not json at all!" + f.read_bytes()),
    "missing tensors": lambda f: spoil_header(f, rename),
    "model.norm.weight has shape": lambda f: spoil_header(f, reshape),
    "no safetensors file: .*offset": lambda f: spoil_header(f, lambda h: h | {
        "model.norm.weight": h["model.norm.weight"] | {"data_offsets": [0, 8]}}),
    "no safetensors file": lambda f: spoil_header(f, lambda h: [1]),
    "no model.safetensors": lambda f: f.unlink(),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("complaint", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_half_loaded(tmp_path, complaint):
    save_hf(model_of(dtype=torch.float32), tmp_path)
    DAMAGE[complaint](tmp_path / "model.safetensors")
    model = Transformer(tiny()).init_weights(9)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=complaint):
        load_hf(tmp_path, model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.quick
def test_a_missing_shard_is_named(tmp_path):
    save = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(save))
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        load_hf(tmp_path)


@pytest.mark.quick
def test_a_second_bad_shard_leaves_the_model_untouched(tmp_path):
    from safetensors.torch import load_file, save_file

    save_hf(model_of(dtype=torch.float32), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_hf(tmp_path)
    model = Transformer(tiny()).init_weights(9)
    before = [p.clone() for p in model.parameters()]
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match="b.safetensors is truncated"):
        load_hf(tmp_path, model=model)
    save_file(
        {n: tensors[n] for n in names[5:]} | {"extra": torch.ones(1)}, tmp_path / "b.safetensors"
    )
    with pytest.raises(ValueError, match="its shards disagree about extra"):
        load_hf(tmp_path, model=model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.quick
def test_a_model_of_another_configuration_is_not_filled(tmp_path):
    save_hf(model_of(dtype=torch.float32), tmp_path)
    with pytest.raises(ValueError, match="rope_parameters"):
        load_hf(
            tmp_path, model=Transformer(tiny(rope_parameters={models.FULL: {"rope_theta": 5e5}}))
        )
    with pytest.raises(ValueError, match="not both"):
        load_hf(tmp_path, model=Transformer(tiny()), dtype=torch.float64)
    with pytest.raises(ValueError, match="cannot say"):
        save_hf(Transformer(tiny(qkv_bias=True)), tmp_path)


# Several files, one tensor at a time -----------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("model_type", models.TINY)
def test_a_sharded_checkpoint_is_the_single_one(tmp_path, model_type):
    model = model_of(model_type)
    save_hf(model, tmp_path / "one")
    save_hf(model, tmp_path / "many", max_shard_bytes=4000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for folder in ("one", "many"):
        again = load_hf(tmp_path / folder)
        assert all(map(torch.equal, model.parameters(), again.parameters()))
        assert again.config == model.config and not list((tmp_path / folder).glob("*.partial"))


@pytest.mark.quick
def test_a_new_checkpoint_leaves_nothing_of_the_old_one(tmp_path):
    save_hf(model_of(), tmp_path, max_shard_bytes=4000)
    other = model_of("gemma3_text")
    save_hf(other, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors"]
    assert all(map(torch.equal, other.parameters(), load_hf(tmp_path).parameters()))


class Reads(TorchDispatchMode):
    """Bytes that copies read from, one after the other."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[1].numel() * args[1].element_size())
        return func(*args, **(kwargs or {}))


@pytest.mark.quick
def test_loading_holds_one_tensor_at_a_time(tmp_path):
    model = model_of("qwen3_moe")
    save_hf(model, tmp_path)
    with Reads() as reads:
        load_hf(tmp_path, model=Transformer(model.config).double())
    stored = 8 * sum(p.numel() for p in model.parameters())
    largest = 8 * max(p[0].numel() if ".experts." in n else p.numel()
                      for n, p in model.named_parameters())  # fmt: skip
    assert sum(reads.sizes) == stored and max(reads.sizes) == largest


def _anonymous():
    """Bytes of this process that are no file's: what it allocated and uses."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])


def _peak(rank, folder):
    """Bytes that loading adds at most, watched from a thread, and that it leaves."""
    models._safetensors()
    stop, most, before = threading.Event(), [0], _anonymous()

    def watch():
        while not stop.is_set():
            most[0] = max(most[0], _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    model = load_hf(folder)
    stop.set()
    thread.join()
    return most[0] - before, _anonymous() - before, sum(p.numel() for p in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_loading_needs_the_model_and_at_most_its_largest_tensor(tmp_path):
    config = tiny(vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    model = Transformer(config).init_weights(0)
    save_hf(model, tmp_path / "hf")
    ((most, left, count),) = ranks(tmp_path, 1, _peak, tmp_path / "hf")
    largest = 4 * max(p.numel() for p in model.parameters())
    assert count * 4 > 200e6 and left > 0.95 * 4 * count
    assert most < 4 * count + largest + 20e6


# Multimodal, fused experts ---------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path, old):
    transformers = pytest.importorskip("transformers", reason="see tests/requirements.txt")
    text = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                head_dim=8, num_attention_heads=4, num_key_value_heads=2, sliding_window=4,
                sliding_window_pattern=2)  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                  image_size=16, patch_size=8)  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.1 * torch.randn_like(p)
    theirs.save_pretrained(tmp_path)
    if not old:  # as transformers 4.52 and later write them
        rewrite(
            tmp_path / "model.safetensors",
            lambda t: {
                "model." + k.replace("language_model.model.", "language_model."): v
                for k, v in t.items()
            },
        )
    names = _names(tmp_path / "model.safetensors")
    assert any(n.startswith("language_model." if old else "model.language_model.") for n in names)
    tokens = torch.randint(1, 60, (2, 11))
    got, want = load_hf(tmp_path)(tokens), theirs(input_ids=tokens).logits
    assert models._relative(got, want) < 1e-5
    save_hf(load_hf(tmp_path), tmp_path / "text")
    assert load_hf(tmp_path / "text")(tokens).equal(got)


def _names(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as reader:
        return list(reader.keys())


@pytest.mark.quick
def test_fused_experts_are_read_and_written_one_by_one(tmp_path):
    model = model_of("qwen3_moe")
    save_hf(model, tmp_path)
    path = tmp_path / "model.safetensors"
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in _names(path)

    def fuse(tensors):
        parts = {kind: [tensors.pop(f"model.layers.1.mlp.experts.{e}.{kind}_proj.weight")
                        for e in range(6)] for kind in ("gate", "up", "down")}  # fmt: skip
        at = "model.layers.1.mlp.experts."
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"])]
        return tensors | {
            at + "gate_up_proj": torch.stack(both),
            at + "down_proj": torch.stack(parts["down"]),
        }

    rewrite(path, fuse)
    assert all(map(torch.equal, model.parameters(), load_hf(tmp_path).parameters()))
    rewrite(
        path,
        lambda t: t | {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(6, 16, 24).double()},
    )
    with pytest.raises(ValueError, match=r"gate_up_proj has shape \[6, 16, 24\], .* \[6, 32, 24\]"):
        load_hf(tmp_path)


@pytest.mark.quick
def test_a_config_without_weights_and_weights_without_a_config(tmp_path):
    with pytest.raises(ValueError, match="config.json"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold an object"):
        load_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_hf(tmp_path)


@pytest.mark.quick
def test_inspect_says_what_would_be_loaded(tmp_path, capsys):
    save_hf(model_of("qwen3_moe", dtype=torch.bfloat16), tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda t: {
        k: v for k, v in t.items() if k != "model.norm.weight"
        } | {"extra": torch.ones(2)})  # fmt: skip
    models.main(["inspect", str(tmp_path)])
    out = capsys.readouterr().out
    assert "missing ['model.norm.weight'], refused ['extra']" in out and "not loaded" in out
    assert "experts.0.up_proj.weight" in out and "-> model.layers.1.mlp.experts.up_proj" in out
    assert '"num_experts": 6' in out and "BF16" in out


# Into a sharded model --------------------------------------------------------------------------


def _shards(rank, folder, model_type, cut):
    """Load into a model that is cut like so; the whole parameters, and what this rank read."""
    config = tiny(model_type)
    model = Transformer(config).double()
    mesh = dist.init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp")
    )
    if cut == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    elif cut == "tp and fsdp":
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        plan = {"self_attn.q_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh["tp"], plan)
            fully_shard(layer, mesh=mesh["dp"])
    else:  # every placement of every parameter with two dimensions
        places = [Shard(0), Shard(1), Replicate()]
        for n, module in enumerate(model.modules()):
            for name, p in list(module.named_parameters(recurse=False)):
                place = [places[(n + rank_dim) % 3] for rank_dim in (0, 1)]
                if p.dim() < 2:
                    place = [Shard(0), Replicate()]
                whole = torch.nn.Parameter(distribute_tensor(p.data, mesh, place))
                module.register_parameter(name, whole)
    with Reads() as reads:
        load_hf(folder, model=model)
    read = sum(reads.sizes)
    save_hf(model, f"{folder}-again", max_shard_bytes=20_000)
    dist.barrier()
    whole = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()
    }
    return {n: p.detach() for n, p in whole.items()}, read, os.listdir(f"{folder}-again")


CUTS = [("fsdp", "qwen3"), ("tp and fsdp", "qwen3"), ("all", "qwen3_moe")]
CUTS += [
    pytest.param(*cut, marks=pytest.mark.slow) for cut in (("fsdp", "qwen3_moe"), ("all", "qwen3"))
]


@pytest.mark.parametrize("cut, model_type", CUTS)
def test_each_rank_reads_its_part_and_save_gathers_them(tmp_path, cut, model_type):
    truth = model_of(model_type)
    save_hf(truth, tmp_path / "hf")
    results = ranks(tmp_path, 4, _shards, tmp_path / "hf", model_type, cut)
    for whole, _, files in results:
        for name, p in truth.named_parameters():
            assert torch.equal(whole[name], p.detach()), name
        assert "model.safetensors.index.json" in files
    size = 8 * sum(p.numel() for p in truth.parameters())
    assert max(read for _, read, _ in results) < size * (0.51 if cut == "fsdp" else 0.8)
    again = load_hf(tmp_path / "hf-again")
    assert all(map(torch.equal, truth.parameters(), again.parameters()))


# Vocabulary-parallel ---------------------------------------------------------------------------


def _vocabulary(rank, sizes, dtype):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 6, generator=generator).to(dtype) for n in (11, sum(sizes)))
    targets = torch.randint(sum(sizes), (11,), generator=generator)
    upstream = torch.randn(2, 11, generator=generator)
    start = sum(sizes[:rank])
    rows = slice(start, start + sizes[rank])
    out = []
    # ranks may cut their tokens into different numbers of chunks, as shards of a vocabulary do
    for options in ({}, dict(temperature=0.7, softcap=2.0)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        v = weight[rows].clone().requires_grad_()
        here = torch.stack(models.token_logprobs(
            h, v, targets, group=dist.group.WORLD, vocab_start=start, chunk=4 + rank,
            **options))  # fmt: skip
        got = torch.autograd.grad((here * upstream).sum(), (h, v))
        whole = torch.stack(models.token_logprobs(h, w, targets, chunk=4, **options))
        want = torch.autograd.grad((whole * upstream).sum(), (h, w))
        pairs = (here, whole), (got[0], want[0]), (got[1], want[1][rows])
        out.append([models._relative(a.detach(), b.detach()) for a, b in pairs])
    lost = models.token_logprobs(hidden, weight[rows], targets + 1000, group=dist.group.WORLD)
    return out, lost[0].eq(-torch.inf).all().item()


@pytest.mark.parametrize("sizes", [[5, 7], [9, 3], [4, 4, 5]])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_vocabulary_parallel_equals_one_process(tmp_path, sizes, dtype, bound):
    for errors, lost in ranks(tmp_path, len(sizes), _vocabulary, sizes, dtype):
        assert max(e for row in errors for e in row) < bound and lost


# Files from somebody else ----------------------------------------------------------------------

JSON_DAMAGE = {  # what stands in the file, and what is said of it
    "is not JSON: .*utf-8": b'{"a": "\xff"}',
    "is not JSON: Expecting": b"{",
    "is not JSON: .*recursion": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "is not JSON: NaN is no number": b'{"a": NaN}',
    "is not JSON: -Infinity is no number": b'{"a": [-Infinity]}',
    "is not JSON: 1e999 is beyond float64": b'{"a": 1e999}',
    "is not JSON: .*digits": b'{"a": ' + b"9" * 5000 + b"}",
    "is not JSON: .*surrogates": b'{"a": "\\ud800"}',
    "must hold an object, got a list": b"[]",
    "must hold an object, got a int": b"5",
    "must hold an object, got a NoneType": b"null",
}


def complaint_of(function, *args, **options):
    """The one line of a ValueError."""
    with pytest.raises(ValueError) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("complaint", JSON_DAMAGE)
def test_a_damaged_json_file_is_named(tmp_path, complaint):
    path = tmp_path / "some.json"
    path.write_bytes(JSON_DAMAGE[complaint])
    said = complaint_of(models.read_json, path)
    assert said.startswith(str(path)) and re.search(complaint, said)
    line = JSON_DAMAGE[complaint].replace(b"\n", b" ")
    path.write_bytes(b'{"good": 1}\n\n' + line + b'\n{"good": 2}\n')
    said = complaint_of(models.read_json_lines, path, skip_torn_last=True)
    assert said.startswith(f"{path} line 3 ") and re.search(complaint, said)


@pytest.mark.quick
def test_a_json_file_that_cannot_be_read_is_named(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for read in (models.read_json, models.read_json_lines):
        assert complaint_of(read, tmp_path / "no", what="a run's config") == (
            f"no {tmp_path / 'no'}; expected a run's config")  # fmt: skip
        assert complaint_of(read, tmp_path) == f"cannot read {tmp_path}: Is a directory"
        assert complaint_of(read, loop).startswith(f"cannot read {loop}: ")
    good = {"a": "é \U0001f600 \u2028", "b": [1.5, None, True], "c": {"d": 10**30}}
    (tmp_path / "good").write_text(json.dumps(good))
    assert models.read_json(tmp_path / "good") == good


@pytest.mark.quick
def test_only_a_last_line_without_an_end_counts_as_torn(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1}\n{"text": "\xe2\x80\xa8"}\n'
    both = [(1, {"step": 1}), (2, {"text": "\u2028"})]
    for torn in (b"", b'{"st', b"7", b"\xc3", b"\0\0\0"):
        path.write_bytes(whole + torn)
        assert models.read_json_lines(path, skip_torn_last=True) == both
        if torn:
            assert "line 3" in complaint_of(models.read_json_lines, path)
            path.write_bytes(whole + torn + b"\n")
            assert "line 3" in complaint_of(models.read_json_lines, path, skip_torn_last=True)
    path.write_bytes(whole[:-1])  # whole, but for its end
    assert models.read_json_lines(path, skip_torn_last=True) == both


@pytest.mark.quick
def test_a_damaged_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers", reason="tests/requirements.txt is not installed")
    for text in (b"{}", b"[", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(text)
        assert str(tmp_path / "tokenizer.json") in complaint_of(models.load_tokenizer, tmp_path)


@pytest.mark.quick
def test_an_index_cannot_lead_out_of_its_directory(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    model = model_of(dtype=torch.float32)
    save_hf(model, outside)
    inside.mkdir()
    (inside / "config.json").write_bytes((outside / "config.json").read_bytes())
    (inside / "sub").symlink_to(outside)
    names, index = _names(outside / "model.safetensors"), inside / "model.safetensors.index.json"

    def listing(file):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))

    whole = str(outside / "model.safetensors")
    for file in ("../outside/model.safetensors", whole, "sub/model.safetensors", "..", "", "a\0b",
                 "..\\outside\\model.safetensors", 5, None, ["a"]):  # fmt: skip
        listing(file)
        said = complaint_of(load_hf, inside)
        assert str(index) in said and "name of a file in the same directory" in said
    for damaged in ({"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}, {}):
        index.write_text(json.dumps(damaged))
        said = complaint_of(load_hf, inside)
        assert str(index) in said and "weight_map must be an object" in said
    (inside / "link.safetensors").symlink_to(whole)  # as in Hugging Face's cache
    listing("link.safetensors")
    assert all(map(torch.equal, model.parameters(), load_hf(inside).parameters()))


# Weights that are none -------------------------------------------------------------------------

NO_WEIGHTS = {
    "I8": torch.int8, "I64": torch.int64, "BOOL": torch.bool, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("stored", NO_WEIGHTS)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_of_another_dtype_are_refused_by_name(tmp_path, stored, name):
    save_hf(model_of(dtype=torch.float32), tmp_path)
    path = tmp_path / "model.safetensors"
    rewrite(path, lambda t: t | {name: torch.ones(t[name].shape).to(NO_WEIGHTS[stored])})
    model = Transformer(tiny()).init_weights(9)
    before = [p.clone() for p in model.parameters()]
    for options in ({}, dict(dtype=torch.float32), dict(model=model)):
        said = complaint_of(load_hf, tmp_path, **options)
        assert said.startswith(f"{path}: {name} is stored as {stored}; weights must be one of F64")
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", models.DTYPES.values())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, dtype, value):
    save_hf(model_of("qwen3_moe", dtype=dtype), tmp_path)
    path = tmp_path / "model.safetensors"
    sound = path.read_bytes()
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.experts.5.up_proj.weight"):
        for place in (0, 17, -1):  # wherever it is in a vector that the processor takes at once
            path.write_bytes(sound)

            def spoil(tensors, name=name, place=place):
                tensors[name].view(-1)[place] = value
                return tensors

            rewrite(path, spoil)
            said = complaint_of(load_hf, tmp_path)
            assert said.startswith(f"{path}: {name} has weights that are NaN, or not finite in")


@pytest.mark.quick
def test_weights_beyond_the_models_dtype_are_refused(tmp_path):
    save_hf(model_of(dtype=torch.float32), tmp_path)
    large = {"model.norm.weight": 1e5 * torch.ones(24)}
    rewrite(tmp_path / "model.safetensors", lambda t: t | large)
    load_hf(tmp_path)
    said = complaint_of(load_hf, tmp_path, dtype=torch.float16)
    assert "model.norm.weight has weights that are NaN, or not finite in torch.float16" in said


def _found_by_one(rank, folder):
    """What each rank says where only the last shard of a tensor, or one rank's disk, is bad."""
    config = tiny()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def cut(model):
        for module in list(model.modules()):
            for name, p in list(module.named_parameters(recurse=False)):
                whole = distribute_tensor(p.data, mesh, [Shard(0)])
                module.register_parameter(name, torch.nn.Parameter(whole))
        return model

    said = [complaint_of(load_hf, folder, model=cut(Transformer(config)))]
    here = folder if rank == 0 else folder / "nothing"
    said.append(complaint_of(load_hf, here, model=cut(Transformer(config))))
    # a disk that is full on the rank that writes: the others would wait for its tensors
    model = cut(Transformer(config).init_weights(0))
    with no_file_beyond(3000 if rank == 0 else 10**9), pytest.raises(OSError) as error:
        save_hf(model, folder, max_shard_bytes=8000)
    return [*said, str(error.value)]


def test_what_one_rank_finds_all_ranks_raise(tmp_path):
    folder = tmp_path / "hf"
    save_hf(model_of(dtype=torch.float32), folder)

    def spoil(tensors):
        tensors["model.embed_tokens.weight"][-1, -1] = math.nan
        return tensors

    rewrite(folder / "model.safetensors", spoil)
    before = contents(folder)
    first, second = ranks(tmp_path, 2, _found_by_one, folder)
    assert first == second
    found, missing, unwritten = first
    file = folder / "model.safetensors"
    assert found.startswith(f"rank 1: {file}: model.embed_tokens.weight has weights that are NaN")
    assert missing.startswith(f"rank 1: no {folder / 'nothing'}")
    assert unwritten.startswith(f"rank 0: cannot write {folder / 'model-00001-of-'}")
    assert contents(folder) == before


# A full disk -----------------------------------------------------------------------------------


@contextlib.contextmanager
def no_file_beyond(size):
    """The kernel refuses to let any file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.quick
@pytest.mark.parametrize("shard, size, named", [
    (10**9, 3000, "model.safetensors.partial"),  # the only file of weights
    (8000, 9000, "model-00005-of-00016"),  # a later one, with a larger tensor
    (10**9, 0, "model.safetensors.partial"),
])  # fmt: skip
def test_a_full_disk_is_an_oserror_and_the_old_checkpoint_stays(tmp_path, shard, size, named):
    save_hf(model_of(dtype=torch.float32), tmp_path)
    before, model = contents(tmp_path), model_of("qwen3_moe", vocab_size=99, dtype=torch.float64)
    if "00005" in named:  # four files are written, and have to go again
        model = Transformer(tiny(vocab_size=40, intermediate_size=99)).double().init_weights(0)
    with no_file_beyond(size), pytest.raises(OSError, match=f"cannot write .*{named}") as error:
        save_hf(model, tmp_path, max_shard_bytes=shard)
    assert "\n" not in str(error.value) and contents(tmp_path) == before


@pytest.mark.quick
def test_a_disk_that_fills_up_at_the_config_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save_hf(model_of(dtype=torch.float32), tmp_path)
    before, write = contents(tmp_path), Path.write_text
    full = {"config.json.partial", "model.safetensors.index.json.partial"}
    for culprit in full:

        def to_a_full_disk(path, text, culprit=culprit, **options):
            if path.name == culprit:
                path.symlink_to("/dev/full")
            return write(path, text, **options)

        monkeypatch.setattr(Path, "write_text", to_a_full_disk)
        with pytest.raises(OSError, match=f"cannot write .*{culprit}.*No space left"):
            save_hf(model_of(), tmp_path, max_shard_bytes=8000)
        assert contents(tmp_path) == before


# Output that nobody reads ----------------------------------------------------------------------


def test_a_closed_pipe_ends_inspect_quietly(tmp_path):
    save_hf(model_of(num_hidden_layers=40), tmp_path)
    end, start = os.pipe()
    os.close(end)  # `| head` that has gone already
    done = subprocess.run(
        [sys.executable, str(ROOT / "models.py"), "inspect", str(tmp_path)],
        stdout=start, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(start)
    assert done.returncode == 141 and done.stderr == ""


@pytest.mark.quick
def test_inspect_says_in_one_line_what_is_wrong(tmp_path, capsys):
    assert models.main(["inspect", str(tmp_path / "nothing")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("no ") and said.count("\n") == 1 and "Traceback" not in said
