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
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from test_ranks import ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import models
from models import Transformer, load_hf, relative_error, save_hf, tiny, tiny_model
from parallel import full
from text import load_tokenizer
from train_grpo import read_json_lines

pytest.importorskip("safetensors", reason="tests/requirements.txt is not installed")

import safetensors.torch  # noqa: E402


def model_of(model_type="qwen3", dtype=torch.float64, **changes):
    return tiny_model(model_type, seed=3, dtype=dtype, **changes)


def stored(folder, model_type="qwen3", dtype=torch.float32, **changes):
    """A model, saved, and the file of its weights."""
    model = model_of(model_type, dtype, **changes)
    save_hf(model, folder)
    return model, folder / "model.safetensors"


def rewrite(path, edit):
    """edit(tensors) are the tensors of a file from now on."""
    safetensors.torch.save_file(edit(safetensors.torch.load_file(path)), path)


def rewrite_json(path, edit):
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def same(model, other):
    return all(map(torch.equal, model.parameters(), other.parameters()))


def complaint_of(function, *args, **options):
    """The one line of a ValueError."""
    with pytest.raises(ValueError) as error:
        function(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def complaint_of_load(folder, **options):
    """The one line of what a load raises, which leaves a model that it was to fill as it was."""
    model = Transformer(tiny()).init_weights(9)
    before = model_like(model)
    said = complaint_of(load_hf, folder, model=model, **options)
    assert same(before, model)
    return said


def model_like(model):
    again = Transformer(model.config)
    again.load_state_dict(model.state_dict())
    return again


# Refused, and nothing is half loaded -----------------------------------------------------------


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


DAMAGE = {
    r"1 tensors do not fit its config.json: model.norm.weight missing for \(24,\)":
        lambda f: rewrite(f, lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}),
    r"1 tensors do not fit .*: extra.weight \(2,\) for no parameter": lambda f: rewrite(
        f, lambda t: t | {"extra.weight": torch.ones(2)}),
    r"model.safetensors is truncated": lambda f: f.write_bytes(f.read_bytes()[:-7]),
    r"or not a safetensors file: .*header":
        lambda f: f.write_bytes(b"\x10" + bytes(7) + b"not json at all!" + f.read_bytes()),
    r"4 tensors .*o_proj.weight missing for \(24, 40\).*p_proj.weight \(24, 40\) for no parameter":
        lambda f: spoil_header(f, rename),
    r"model.norm.weight \(2, 12\) for \(24,\)": lambda f: spoil_header(f, reshape),
    "not a safetensors file: .*offset": lambda f: spoil_header(f, lambda h: h | {
        "model.norm.weight": h["model.norm.weight"] | {"data_offsets": [0, 8]}}),
    "not a safetensors file": lambda f: spoil_header(f, lambda h: [1]),
    "model.safetensors is missing": lambda f: f.unlink(),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("complaint", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_half_loaded(tmp_path, complaint):
    _, path = stored(tmp_path)
    DAMAGE[complaint](path)
    said = complaint_of_load(tmp_path)
    assert re.search(complaint, said) and said.startswith(str(tmp_path))


@pytest.mark.quick
def test_a_second_bad_shard_leaves_the_model_untouched(tmp_path):
    _, path = stored(tmp_path)
    tensors = safetensors.torch.load_file(path)
    names, second = sorted(tensors), tmp_path / "b.safetensors"
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        safetensors.torch.save_file({n: tensors[n] for n in part}, tmp_path / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_hf(tmp_path)
    whole = second.read_bytes()
    second.write_bytes(whole[:-9])
    assert "b.safetensors is truncated" in complaint_of_load(tmp_path)
    second.write_bytes(whole)
    rewrite(second, lambda t: t | {"extra": torch.ones(1)})
    assert re.search("its files disagree about .*extra", complaint_of_load(tmp_path))
    second.unlink()
    assert "b.safetensors is missing" in complaint_of_load(tmp_path)


@pytest.mark.quick
def test_a_model_of_another_configuration_is_not_filled(tmp_path):
    stored(tmp_path)
    rope = Transformer(tiny(rope_parameters={models.FULL: {"rope_theta": 5e5}}))
    assert "rope_parameters" in complaint_of(load_hf, tmp_path, model=rope)
    assert "not both" in complaint_of_load(tmp_path, dtype=torch.float64)
    assert "cannot say" in complaint_of(save_hf, Transformer(tiny(qkv_bias=True)), tmp_path)


@pytest.mark.quick
def test_a_config_without_weights_and_weights_without_a_config(tmp_path):
    assert "config.json" in complaint_of(load_hf, tmp_path)
    for text, said in (("[]", "JSON of another kind: expected an object, got a list"),
                       ("{", "is not JSON")):  # fmt: skip
        (tmp_path / "config.json").write_text(text)
        assert said in complaint_of(load_hf, tmp_path)


@pytest.mark.quick
def test_the_frequencies_in_old_files_of_llama_are_not_loaded(tmp_path, capsys):
    model, path = stored(tmp_path, "llama")
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    rewrite(path, lambda t: t | {name.format(n): torch.rand(5) for n in range(2)})
    assert same(model, load_hf(tmp_path))
    models.main(["inspect", str(tmp_path)])
    out = capsys.readouterr().out
    assert "missing [], refused [], not of the text model 2 tensors" in out

    # Also where an index lists them, and no other buffer.
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(_names(path), path.name)}))
    assert same(model, load_hf(tmp_path))
    index.unlink()
    rewrite(path, lambda t: t | {"model.layers.0.self_attn.rotary_emb.cos": torch.rand(5)})
    assert "rotary_emb.cos (5,) for no parameter" in complaint_of(load_hf, tmp_path)


@pytest.mark.quick
def test_a_tied_matrix_may_be_stored_twice(tmp_path):
    model, path = stored(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(path, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    assert same(model, load_hf(tmp_path))


# The dtype of a loaded model -------------------------------------------------------------------

DTYPES = {  # dtype and torch_dtype of config.json, the dtype of a loaded model
    "as config.json says": ("bfloat16", None, torch.bfloat16),
    "in the older spelling": (None, "float16", torch.float16),
    "both, the newer one first": ("bfloat16", "float16", torch.bfloat16),
    "the widest": (None, None, torch.float32),
    "the widest, as auto says nothing": ("auto", None, torch.float32),
    "the widest, as int8 is not a model's": ("int8", None, torch.float32),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", DTYPES)
@pytest.mark.parametrize("wide", ["lm_head.weight", "model.embed_tokens.weight",
                                  "model.norm.weight"])  # fmt: skip
def test_a_checkpoint_of_several_dtypes_is_loaded_in_one(tmp_path, case, wide):
    dtype, torch_dtype, want = DTYPES[case]
    model, path = stored(tmp_path, dtype=torch.bfloat16)
    rewrite(path, lambda t: t | {wide: t[wide].float()})
    given = dict(dtype=dtype, torch_dtype=torch_dtype)
    rewrite_json(tmp_path / "config.json", lambda raw: raw | given)
    loaded = load_hf(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {want} and same(model.to(want), loaded)
    assert {p.dtype for p in load_hf(tmp_path, dtype=torch.float64).parameters()} == {torch.float64}


@pytest.mark.quick
def test_the_widest_of_two_half_precisions_is_float32(tmp_path):
    _, path = stored(tmp_path, dtype=torch.bfloat16)
    name = "model.norm.weight"
    rewrite(path, lambda t: t | {name: t[name].half()})
    rewrite_json(tmp_path / "config.json", lambda raw: {k: raw[k] for k in raw if "dtype" not in k})
    assert load_hf(tmp_path).head_weight.dtype == torch.float32


@pytest.mark.quick
def test_a_multimodal_config_names_the_dtype_of_its_text_model(tmp_path):
    stored(tmp_path, "gemma3_text")
    path = tmp_path / "config.json"
    text = json.loads(path.read_text()) | {"dtype": "float16"}
    for more, want in ({}, torch.float16), ({"dtype": "bfloat16"}, torch.bfloat16):
        path.write_text(json.dumps({"model_type": "gemma3", "text_config": text} | more))
        assert load_hf(tmp_path).head_weight.dtype == want


@pytest.mark.quick
def test_filling_a_model_zeroes_what_no_checkpoint_holds(tmp_path):
    policy, _ = stored(tmp_path, "qwen3_moe")
    model = Transformer(tiny("qwen3_moe", router_bias_rate=0.1)).init_weights(5).add_value_head()
    votes = model.model.layers[1].mlp.votes
    with torch.no_grad():
        votes.fill_(7)
        model.score.weight.fill_(7.0)
    load_hf(tmp_path, model=model)
    assert not votes.any() and not model.score.weight.any()
    found = dict(model.named_parameters())
    assert all(torch.equal(p, found[name]) for name, p in policy.named_parameters())
    told = " ".join(load_hf.__doc__.split())
    assert "A router's bias, which no checkpoint holds, is set to zero" in told


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
        assert same(model, again) and again.config == model.config
        names = [path.name for path in (tmp_path / folder).iterdir()]
        assert all(name.endswith((".safetensors", ".json")) for name in names)


@pytest.mark.quick
def test_a_new_checkpoint_leaves_nothing_of_the_old_one(tmp_path):
    save_hf(model_of(), tmp_path, max_shard_bytes=4000)
    many = len(list(tmp_path.glob("model-*")))
    other, _ = stored(tmp_path, "gemma3_text")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "model.safetensors"] and same(other, load_hf(tmp_path))
    save_hf(model_of(), tmp_path, max_shard_bytes=40_000)
    assert 1 < len(list(tmp_path.glob("model-*"))) < many
    assert not (tmp_path / "model.safetensors").exists() and same(model_of(), load_hf(tmp_path))


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
    model, _ = stored(tmp_path, "qwen3_moe", torch.float64)
    with Reads() as reads, bytes_read() as sizes:
        load_hf(tmp_path, model=Transformer(model.config).double())
    assert sorted(sizes) == sorted(reads.sizes)
    whole = 8 * sum(p.numel() for p in model.parameters())
    largest = 8 * max(p[0].numel() if ".experts." in n else p.numel()
                      for n, p in model.named_parameters())  # fmt: skip
    assert sum(reads.sizes) == whole and max(reads.sizes) == largest


def _anonymous():
    """Bytes of this process that are no file's: what it allocated and uses."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])


def _peak(rank, folder):
    """Bytes that loading adds at most, watched from a thread, and that it leaves."""
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
    path, begin = tmp_path / "model.safetensors", "language_model.model."
    if not old:  # as transformers 4.52 and later write them
        rewrite(path, lambda t: {
            "model." + k.replace(begin, "language_model."): v for k, v in t.items()})  # fmt: skip
    begin = "language_model." if old else "model.language_model."
    assert any(name.startswith(begin) for name in _names(path))
    tokens = torch.randint(1, 60, (2, 11))
    got, want = load_hf(tmp_path)(tokens), theirs(input_ids=tokens).logits
    assert relative_error(got, want) < 1e-5
    save_hf(load_hf(tmp_path), tmp_path / "text")
    assert load_hf(tmp_path / "text")(tokens).equal(got)


def _names(path):
    with safetensors.safe_open(path, framework="pt") as reader:
        return list(reader.keys())


@pytest.mark.quick
def test_fused_experts_are_read_and_written_one_by_one(tmp_path):
    model, path = stored(tmp_path, "qwen3_moe", torch.float64)
    assert "model.layers.1.mlp.experts.5.up_proj.weight" in _names(path)
    begin = "model.layers.1.mlp.experts."

    def fuse(tensors):
        gate, up, down = (
            torch.stack([tensors.pop(f"{begin}{e}.{kind}_proj.weight") for e in range(6)])
            for kind in ("gate", "up", "down"))  # fmt: skip
        both = torch.cat([gate, up], 1)
        return tensors | {begin + "gate_up_proj": both, begin + "down_proj": down}

    rewrite(path, fuse)
    assert same(model, load_hf(tmp_path))
    rewrite(path, lambda t: t | {begin + "gate_up_proj": torch.zeros(6, 16, 24).double()})
    said = complaint_of(load_hf, tmp_path)
    assert "gate_up_proj (6, 16, 24) for (6, 32, 24)" in said


@pytest.mark.quick
def test_inspect_says_what_would_be_loaded(tmp_path, capsys):
    _, path = stored(tmp_path, "qwen3_moe", torch.bfloat16)
    rewrite(path, lambda t: {"extra": torch.ones(2)} | {
        k: v for k, v in t.items() if k != "model.norm.weight"})  # fmt: skip
    models.main(["inspect", str(tmp_path)])
    out = capsys.readouterr().out
    assert "missing ['model.norm.weight'], refused ['extra']" in out and "not loaded" in out
    assert "experts.0.up_proj.weight" in out and "-> model.layers.1.mlp.experts.up_proj" in out
    assert '"num_experts": 6' in out and "BF16" in out


# Into a sharded model --------------------------------------------------------------------------


class CountedPart:
    """A slice of safetensors that adds the bytes of each read to a list."""

    def __init__(self, part, sizes):
        self.part = part
        self.sizes = sizes

    def __getattr__(self, name):
        return getattr(self.part, name)

    def __getitem__(self, cut):
        found = self.part[cut]
        self.sizes.append(found.numel() * found.element_size())
        return found


class CountedReader:
    """An open file whose slices count what is read of them."""

    def __init__(self, reader, sizes):
        self.reader = reader
        self.sizes = sizes

    def keys(self):
        return self.reader.keys()

    def get_slice(self, name):
        return CountedPart(self.reader.get_slice(name), self.sizes)


@contextlib.contextmanager
def bytes_read():
    """Collect the bytes of each tensor, or part of a tensor, that is read from a file."""
    sizes, opened = [], safetensors.safe_open

    def counted(*given, **options):
        return CountedReader(opened(*given, **options), sizes)

    with mock.patch.object(safetensors, "safe_open", counted):
        yield sizes


def _shards(rank, folder, model_type, cut):
    """Load into a model that is cut like so; the whole parameters, and what this rank read."""
    config = tiny(model_type)
    model = Transformer(config).double()
    sizes = 2, dist.get_world_size() // 2
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    if cut == "fsdp":
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    elif cut == "tp and fsdp":
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
    with bytes_read() as sizes:
        load_hf(folder, model=model)
    read = sum(sizes)
    save_hf(model, f"{folder}-again", max_shard_bytes=20_000)
    dist.barrier()
    whole = {name: full(p.detach()) for name, p in model.named_parameters()}
    return whole, read, os.listdir(f"{folder}-again")


CUTS = [("fsdp", "qwen3"), ("tp and fsdp", "qwen3"), ("all", "qwen3_moe")]
MORE = [("fsdp", "qwen3_moe"), ("all", "qwen3")]
CUTS += [pytest.param(*cut, marks=pytest.mark.slow) for cut in MORE]


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
    assert same(truth, load_hf(tmp_path / "hf-again"))


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
        out.append([relative_error(a.detach(), b.detach()) for a, b in pairs])
    lost = models.token_logprobs(hidden, weight[rows], targets + 1000, group=dist.group.WORLD)
    return out, lost[0].eq(-torch.inf).all().item()


@pytest.mark.parametrize("sizes", [[5, 7], [9, 3], [4, 4, 5]])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_vocabulary_parallel_equals_one_process(tmp_path, sizes, dtype, bound):
    for errors, lost in ranks(tmp_path, len(sizes), _vocabulary, sizes, dtype):
        assert max(e for row in errors for e in row) < bound and lost


# Files from somebody else ----------------------------------------------------------------------

JSON_DAMAGE = {  # a part of the message, and the file's bytes
    "utf-8": b'{"a": "\xff"}',
    "Expecting": b"{",
    "recursion": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "a list": b"[]",
    "a int": b"5",
    "a NoneType": b"null",
}


@pytest.mark.quick
@pytest.mark.parametrize("complaint", JSON_DAMAGE)
def test_a_damaged_json_file_is_named(tmp_path, complaint):
    path = tmp_path / "some.json"
    path.write_bytes(JSON_DAMAGE[complaint])
    said = complaint_of(models.read_json, path)
    kind = r"JSON of another kind: expected an object, got" if "a " in complaint else "not JSON: .*"
    assert re.match(rf"{re.escape(str(path))} is {kind}.*{complaint}", said)
    line = JSON_DAMAGE[complaint].replace(b"\n", b" ")
    path.write_bytes(b'{"good": 1}\n\n' + line + b'\n{"good": 2}\n')
    said = complaint_of(read_json_lines, path, skip_torn_last=True)
    assert said.startswith(f"{path} line 3 holds no JSON object: ") and complaint in said


@pytest.mark.quick
def test_a_json_file_that_cannot_be_read_is_named(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert complaint_of(models.read_json, tmp_path / "no", what="a run's config") == (
        f"no {tmp_path / 'no'}; expected a run's config")  # fmt: skip
    for read in (models.read_json, read_json_lines):
        assert complaint_of(read, tmp_path / "no").startswith(f"no {tmp_path / 'no'}; expected ")
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
        assert read_json_lines(path, skip_torn_last=True) == both
        if torn:
            assert "line 3" in complaint_of(read_json_lines, path)
            path.write_bytes(whole + torn + b"\n")
            assert "line 3" in complaint_of(read_json_lines, path, skip_torn_last=True)
    path.write_bytes(whole[:-1])  # whole, but for its end
    assert read_json_lines(path, skip_torn_last=True) == both


@pytest.mark.quick
def test_a_damaged_tokenizer_is_named(tmp_path):
    pytest.importorskip("transformers", reason="tests/requirements.txt is not installed")
    for damaged in (b"{}", b"[", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(damaged)
        assert str(tmp_path / "tokenizer.json") in complaint_of(load_tokenizer, tmp_path)


@pytest.mark.quick
def test_an_index_cannot_lead_out_of_its_directory(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    model, path = stored(outside)
    inside.mkdir()
    (inside / "config.json").write_bytes((outside / "config.json").read_bytes())
    (inside / "sub").symlink_to(outside)
    names, index = _names(path), inside / "model.safetensors.index.json"

    def listing(file):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))

    whole = str(path)
    for file in ("../outside/model.safetensors", whole, "sub/model.safetensors", "..", "", "a\0b",
                 "..\\outside\\model.safetensors", 5, None, ["a"]):  # fmt: skip
        listing(file)
        said = complaint_of(load_hf, inside)
        assert str(index) in said and "expected names of files in this directory" in said
        assert said.endswith(f"got {file!r}")
    for damaged in ({"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}, {}):
        index.write_text(json.dumps(damaged))
        said = complaint_of(load_hf, inside)
        assert said.startswith(f"{index}: weight_map: expected names of files")
    (inside / "link.safetensors").symlink_to(whole)  # as in Hugging Face's cache
    listing("link.safetensors")
    assert same(model, load_hf(inside))


# Weights that are none -------------------------------------------------------------------------

NO_WEIGHTS = {
    "I8": torch.int8, "I64": torch.int64, "BOOL": torch.bool, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("kind", NO_WEIGHTS)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_of_another_dtype_are_refused_by_name(tmp_path, kind, name):
    _, path = stored(tmp_path)
    rewrite(path, lambda t: t | {name: torch.ones(t[name].shape).to(NO_WEIGHTS[kind])})
    expected = f"{path}: {name} is stored as {kind}; expected one of F64, F32, F16, BF16"
    found = [complaint_of(load_hf, tmp_path, **how) for how in ({}, dict(dtype=torch.float32))]
    assert all(said.startswith(expected) for said in [*found, complaint_of_load(tmp_path)])


@pytest.mark.quick
@pytest.mark.parametrize("dtype", models.DTYPES.values())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, dtype, value):
    _, path = stored(tmp_path, "qwen3_moe", dtype)
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
    _, path = stored(tmp_path)
    rewrite(path, lambda t: t | {"model.norm.weight": 1e5 * torch.ones(24)})
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
    _, file = stored(folder)

    def spoil(tensors):
        tensors["model.embed_tokens.weight"][-1, -1] = math.nan
        return tensors

    rewrite(file, spoil)
    first, second = ranks(tmp_path, 2, _found_by_one, folder)
    assert first == second
    found, missing, unwritten = first
    assert found.startswith(f"rank 1: {file}: model.embed_tokens.weight has weights that are NaN")
    assert missing.startswith(f"rank 1: no {folder / 'nothing'}")
    assert unwritten.startswith(f"rank 0: cannot write {folder / 'model-00001-of-'}")
    assert "is missing" in complaint_of(load_hf, folder)  # neither the old weights nor new ones


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


@pytest.mark.quick
@pytest.mark.parametrize("shard, size, named", [
    (10**9, 3000, "model.safetensors"),  # the only file of weights
    (8000, 9000, "model-00005-of-00016.safetensors"),  # a later file, with a larger tensor
    (10**9, 0, "model.safetensors"),
])  # fmt: skip
def test_a_full_disk_is_an_oserror_that_names_the_file(tmp_path, shard, size, named):
    stored(tmp_path)
    model = model_of("qwen3_moe", vocab_size=99, dtype=torch.float64)
    if "00005" in named:  # four files are written before it
        model = Transformer(tiny(vocab_size=40, intermediate_size=99)).double().init_weights(0)
    path = re.escape(str(tmp_path / named))
    with no_file_beyond(size), pytest.raises(OSError, match=f"^cannot write {path}: ") as error:
        save_hf(model, tmp_path, max_shard_bytes=shard)
    assert "\n" not in str(error.value)
    complaint_of(load_hf, tmp_path)  # the old weights are not taken for the new ones


@pytest.mark.quick
@pytest.mark.parametrize("culprit", ["config.json", "model.safetensors.index.json"])
def test_a_disk_that_fills_up_at_the_config_is_an_oserror_too(tmp_path, monkeypatch, culprit):
    write = Path.write_text

    def to_a_full_disk(path, text, **options):
        if path.name == culprit:
            path.symlink_to("/dev/full")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", to_a_full_disk)
    said = f"^cannot write {re.escape(str(tmp_path / culprit))}: .*No space left"
    with pytest.raises(OSError, match=said):
        save_hf(model_of(), tmp_path, max_shard_bytes=8000)


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
