"""Files of weights: strict, whole or not at all, sharded. Runs that go on: equivalence, faults."""

import contextlib
import copy
import json
import math
import os
import re
import resource
import shutil
import tracemalloc
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import complaint_of, slow
from oracles import LiveBytes, rms
from test_models import model_of
from test_ranks import ranks

from full.model import hf
from check_models import relative_error
from full.model.config import read_json
from full.model.hf import load_hf, save_hf
from full.model.logprobs import token_logprobs
from full.model.parallelize import parallelize
from full.model.transformer import Critic, Transformer
from full.model.parallelize import gather_weights
from full.ranks.checkpoint import read_checkpoint, write_checkpoint
from full.ranks.joining import on_all_ranks
from full.ranks.places import full, local
from full.ranks.plans import Grid, Plan
from full.run.config import Config
from full.run.directory import RunDirectory, auditable_steps, read_json_lines
from full.tiny import tiny
from models import FULL

NORM = "model.norm.weight"
EXPERTS = "model.layers.1.mlp.experts."
INDEX = "model.safetensors.index.json"


def stored(folder, model_type="qwen3", dtype=torch.float32, **changes):
    """A model, saved, and the file of its weights."""
    model = model_of(model_type, dtype, **changes)
    save_hf(model, folder)
    return model, folder / "model.safetensors"


def names_in(path):
    with safetensors.safe_open(path, framework="pt") as reader:
        return list(reader.keys())


def rewrite(path, edit):
    """edit(tensors) are the tensors of a file from now on."""
    safetensors.torch.save_file(edit(safetensors.torch.load_file(path)), path)


def rewrite_header(path, edit):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(edit(json.loads(data[8 : 8 + size]))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def rewrite_bytes(path, edit):
    path.write_bytes(edit(path.read_bytes()))


def rewrite_json(path, edit):
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


def remove(path, _):
    path.unlink()


def without(tensors, name):
    return {k: v for k, v in tensors.items() if k != name}


def spoiled(tensors, name, place, value):
    tensors[name].view(-1)[place] = value
    return tensors


def recast(tensors, name, dtype):
    return tensors | {name: torch.ones(tensors[name].shape).to(dtype)}


def same(model, other):
    return all(map(torch.equal, model.parameters(), other.parameters()))


# Refused, and nothing is half loaded -----------------------------------------------------------


def complaint_of_load(folder, config, **options):
    """The one line of what a load raises, which leaves a model that it was to fill as it was."""
    model = Transformer(config).init_weights(9)
    before = copy.deepcopy(model)
    said = complaint_of(load_hf, folder, model=model, **options)
    assert same(before, model)
    return said


def fuse(tensors):
    """Stack the experts of a layer, as transformers 5 stores them."""
    gate, up, down = (
        torch.stack([tensors.pop(f"{EXPERTS}{e}.{kind}_proj.weight") for e in range(6)])
        for kind in ("gate", "up", "down"))  # fmt: skip
    both = torch.cat([gate, up], 1)
    return tensors | {f"{EXPERTS}gate_up_proj": both, f"{EXPERTS}down_proj": down}


def fuse_half(tensors):
    return fuse(tensors) | {f"{EXPERTS}gate_up_proj": torch.zeros(6, 16, 24)}


TABLE = "model.embed_tokens.weight"
TIED = "llama", dict(tie_word_embeddings=True)  # may have a head too, if it is the embedding
TWICE = f"language_model.{NORM}", "model.language_model.norm.weight"
DAMAGE = {  # what is said: what is done to a file, by default of qwen3_moe
    r"1 tensors do not fit its config.json: model.norm.weight missing for \(24,\)":
        (rewrite, lambda tensors: without(tensors, NORM)),
    r"1 tensors do not fit .*: extra.weight \(2,\) for no parameter":
        (rewrite, lambda tensors: tensors | {"extra.weight": torch.ones(2)}),
    r"rotary_emb.cos \(5,\) for no parameter":
        (rewrite, lambda tensors: tensors | {"model.rotary_emb.cos": torch.ones(5)}),
    r"gate_up_proj \(6, 16, 24\) for \(6, 32, 24\)": (rewrite, fuse_half),
    r"4 tensors .*o_proj.weight missing for \(24, 40\).*p_proj.weight \(24, 40\) for no parameter":
        (rewrite_header, lambda header: {
            k.replace("o_proj", "p_proj"): v for k, v in header.items()}),
    r"model.norm.weight \(2, 12\) for \(24,\)":
        (rewrite_header, lambda header: header | {NORM: header[NORM] | {"shape": [2, 12]}}),
    "model.safetensors is truncated": (rewrite_bytes, lambda data: data[:-7]),
    "or not a safetensors file: .*header":
        (rewrite_bytes, lambda data: b"\x10" + bytes(7) + b"not json at all!" + data),
    r"expected one set of weights, got \[\]": (remove, None),
    f"{NORM} is stored as I8; expected one of F64, F32, F16, BF16":
        (rewrite, lambda tensors: recast(tensors, NORM, torch.int8)),
    f"{EXPERTS}0.up_proj.weight is stored as F8_E4M3":
        (rewrite, lambda tensors: recast(
            tensors, f"{EXPERTS}0.up_proj.weight", torch.float8_e4m3fn)),
    r"model.safetensors: .*lm_head.weight \(53, 24\) to equal .* as tie_word_embeddings":
        (rewrite, lambda tensors: tensors | {
            "lm_head.weight": torch.cat([tensors[TABLE][:-1], tensors[TABLE][-1:] + 1e-3])}, *TIED),
    r"model.safetensors: .*lm_head.weight \(52, 24\) to equal .* \(53, 24\)":
        (rewrite, lambda tensors: tensors | {"lm_head.weight": tensors[TABLE][:-1].clone()}, *TIED),
    f"(?=.*{TWICE[0]}).*{TWICE[1]}":
        (rewrite, lambda tensors: tensors | {name: tensors[NORM].clone() for name in TWICE},
         "gemma3_text", {}),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("complaint", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_half_loaded(tmp_path, complaint):
    damage, how, *kind = DAMAGE[complaint]
    model_type, changes = kind or ("qwen3_moe", {})
    model, path = stored(tmp_path, model_type, **changes)
    damage(path, how)
    found = [complaint_of(load_hf, tmp_path), complaint_of_load(tmp_path, model.config),
             complaint_of(load_hf, tmp_path, dtype=torch.float32)]  # fmt: skip
    for said in found:
        assert re.search(complaint, said) and said.startswith(str(tmp_path))


@pytest.mark.quick
def test_a_bad_later_file_leaves_the_model_untouched(tmp_path):
    save_hf(model_of(dtype=torch.float32), tmp_path, max_shard_bytes=8000)
    last = max(tmp_path.glob("*.safetensors"))
    whole = last.read_bytes()
    rewrite(last, lambda tensors: tensors | {"extra": torch.ones(1)})
    assert re.search(r"extra \(1,\) for no parameter", complaint_of_load(tmp_path, tiny()))
    last.write_bytes(whole[:-9])
    assert f"{last.name} is truncated" in complaint_of_load(tmp_path, tiny())
    last.unlink()
    assert re.search("tensors do not fit .* missing for ", complaint_of_load(tmp_path, tiny()))


@pytest.mark.quick
def test_a_model_of_another_configuration_is_not_filled(tmp_path):
    assert "config.json" in complaint_of(load_hf, tmp_path)
    stored(tmp_path)
    rope = Transformer(tiny(rope_parameters={FULL: {"rope_theta": 5e5}}))
    assert "rope_parameters" in complaint_of(load_hf, tmp_path, model=rope)
    assert "not both" in complaint_of_load(tmp_path, tiny(), dtype=torch.float64)
    assert "cannot say" in complaint_of(save_hf, Transformer(tiny(qkv_bias=True)), tmp_path)
    biased = Transformer(tiny("qwen3_moe", router_bias_rate=0.1)).init_weights(0)
    biased.model.layers[1].mlp.votes[0] = 1
    assert "holds a router bias" in complaint_of(save_hf, biased, tmp_path)


@pytest.mark.parametrize("dtype", hf.DTYPES.values())
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, dtype, value):
    _, path = stored(tmp_path, "qwen3_moe", dtype)
    sound = path.read_bytes()
    for name in ("model.embed_tokens.weight", f"{EXPERTS}5.up_proj.weight"):
        for place in (0, 17, -1):  # wherever it is in a vector that the processor takes at once
            path.write_bytes(sound)
            rewrite(path, lambda t, name=name, place=place: spoiled(t, name, place, value))
            said = complaint_of(load_hf, tmp_path)
            assert said.startswith(f"{path}: {name} has weights that are NaN, or not finite in")


def test_weights_that_the_wanted_dtype_cannot_hold_are_refused(tmp_path):
    _, path = stored(tmp_path)
    rewrite(path, lambda tensors: spoiled(tensors, NORM, 5, 1e5))
    load_hf(tmp_path)
    said = complaint_of(load_hf, tmp_path, dtype=torch.float16)
    assert said.endswith("not finite in torch.float16")


def _found_by_one(rank, folder):
    """What each rank says where only the last shard of a tensor, or one rank's disk, is bad."""
    plan, size = Plan(tp=2), dict(vocab_size=53)  # the second rank has the last rows
    grid = Grid(plan)
    first, second, third = (
        parallelize(Transformer(tiny(**size)).init_weights(0), plan, device_mesh=grid)
        for _ in range(3)
    )
    said = [complaint_of(load_hf, folder, model=first)]
    here = folder if rank == 0 else folder / "nothing"
    said.append(complaint_of(load_hf, here, model=second))
    # The disk is full on the rank that writes: the others would wait for its tensors.
    with no_file_beyond(3000 if rank == 0 else 10**9):
        said.append(complaint_of(save_hf, third, folder, max_shard_bytes=8000, error=OSError))
    return said


def test_what_one_rank_finds_all_ranks_raise(tmp_path):
    folder = tmp_path / "hf"
    _, file = stored(folder)
    rewrite(file, lambda tensors: spoiled(tensors, "model.embed_tokens.weight", -1, math.nan))
    first, second = ranks(tmp_path, 2, _found_by_one, folder)
    assert first == second
    found, missing, unwritten = first
    assert found.startswith(f"{file}: model.embed_tokens.weight has weights that are NaN")
    assert missing.startswith(f"no {folder / 'nothing'}")
    assert unwritten.startswith(f"cannot write {folder / 'model-00001-of-'}")
    assert "got []" in complaint_of(load_hf, folder)  # neither the old weights nor new ones


def _found_in_a_group(rank):
    """What each rank says of what rank 2 finds, in a group without rank 0."""
    group = dist.new_group([1, 2])

    def find():
        if rank == 2:
            raise ValueError("found by rank 2")

    return rank and complaint_of(on_all_ranks, find, group)


def test_what_a_rank_of_a_group_finds_its_group_raises(tmp_path):
    assert ranks(tmp_path, 3, _found_in_a_group) == [0, *["found by rank 2"] * 2]


@contextlib.contextmanager
def no_file_beyond(size):
    """The kernel refuses to let any file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What is loaded --------------------------------------------------------------------------------


DTYPES = {  # fields of config.json, the dtype of one tensor among bfloat16 ones, of the model
    "as config.json says": ({"dtype": "bfloat16"}, torch.float32, torch.bfloat16),
    "in the older spelling": ({"torch_dtype": "float16"}, torch.float32, torch.float16),
    "both, the newer one first":
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.float32, torch.bfloat16),
    "the widest": ({"dtype": None}, torch.float32, torch.float32),
    "the widest, as auto says nothing": ({"dtype": "auto"}, torch.float32, torch.float32),
    "the widest, as int8 is not a model's": ({"dtype": "int8"}, torch.float32, torch.float32),
    "the widest of two half precisions": ({}, torch.float16, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("case", DTYPES)
def test_a_checkpoint_of_several_dtypes_is_loaded_in_one(tmp_path, case):
    fields, other, want = DTYPES[case]
    for name in ("lm_head.weight", "model.embed_tokens.weight", NORM):
        model, path = stored(tmp_path, dtype=torch.bfloat16)
        rewrite(path, lambda t, name=name: t | {name: t[name].to(other)})
        rewrite_json(tmp_path / "config.json", lambda raw: without(raw, "dtype") | fields)
        loaded = load_hf(tmp_path)
        assert {p.dtype for p in loaded.parameters()} == {want} and same(model.to(want), loaded)
        given = load_hf(tmp_path, dtype=torch.float64)
        assert {p.dtype for p in given.parameters()} == {torch.float64}


SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TWO_SETS = {  # files of weights, with an index or without, and another file: which two are named
    "shards and a whole one": (SHARDS, True, "model.safetensors"),
    "shards and one that the index has not": (SHARDS, True, "model-00003-of-00003.safetensors"),
    "a whole one and a shard": (["model.safetensors"], False, SHARDS[1]),
    "a whole one and an adapter": (["model.safetensors"], False, "adapter_model.safetensors"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", TWO_SETS)
def test_two_sets_of_weights_are_refused_and_both_named(tmp_path, case):
    names, has_index, other = TWO_SETS[case]
    model, _ = stored(tmp_path)
    if has_index:
        save_hf(model, tmp_path, max_shard_bytes=4 * sum(p.numel() for p in model.parameters()) - 4)
    assert (tmp_path / INDEX).exists() == has_index
    assert {*names} == {path.name for path in tmp_path.glob("*.safetensors")}
    (tmp_path / "consolidated.safetensors").write_bytes(b"")  # Mistral's, which nobody here reads
    assert same(model, load_hf(tmp_path))
    safetensors.torch.save_file({NORM: torch.ones(24)}, tmp_path / other)
    said = complaint_of(load_hf, tmp_path)
    assert names[0] in said and other in said


def test_a_multimodal_config_names_the_dtype_of_its_text_model(tmp_path):
    stored(tmp_path, "gemma3_text")
    path = tmp_path / "config.json"
    text = json.loads(path.read_text()) | {"dtype": "float16"}
    for more, want in ({}, torch.float16), ({"dtype": "bfloat16"}, torch.bfloat16):
        path.write_text(json.dumps({"model_type": "gemma3", "text_config": text} | more))
        assert load_hf(tmp_path).head_weight.dtype == want


FORMS = {  # a model, and how its file says the same in another way
    "fused experts": ("qwen3_moe", {}, fuse),
    "frequencies, as in old files of Llama": ("llama", {}, lambda tensors: tensors | {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.rand(5) for n in range(2)}),
    "a tied matrix twice": ("llama", dict(tie_word_embeddings=True), lambda tensors: tensors | {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_a_file_are_the_same_model(tmp_path, form):
    model_type, changes, edit = FORMS[form]
    model, path = stored(tmp_path, model_type, **changes)
    rewrite(path, edit)
    assert same(model, load_hf(tmp_path))
    index = {"weight_map": dict.fromkeys(names_in(path), path.name)}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert same(model, load_hf(tmp_path))


@pytest.mark.quick
def test_filling_a_model_zeroes_what_no_checkpoint_holds(tmp_path):
    policy, _ = stored(tmp_path, "qwen3_moe")
    model = Transformer(tiny("qwen3_moe", router_bias_rate=0.1)).init_weights(5)
    critic = Critic(tiny("qwen3_moe"))
    with torch.no_grad():
        critic.score.weight.fill_(7.0)
        for buffer in model.buffers():
            buffer.fill_(7)
    load_hf(tmp_path, model=model)
    load_hf(tmp_path, model=critic)
    buffers = list(model.buffers())
    assert buffers and not any(buffer.any() for buffer in buffers) and not critic.score.weight.any()
    found = dict(model.named_parameters())
    assert all(torch.equal(p, found[name]) for name, p in policy.named_parameters())


# One tensor at a time, and each rank its part --------------------------------------------------


@contextlib.contextmanager
def bytes_read():
    """Collect the bytes of each tensor, or part of a tensor, that is read from a file."""
    sizes, opened = [], safetensors.safe_open

    class Counted:
        """An open file, or a slice of it, whose reads are noted."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def get_slice(self, name):
            return Counted(self.inner.get_slice(name))

        def __getitem__(self, cut):
            found = self.inner[cut]
            sizes.append(found.nbytes)
            return found

    with mock.patch.object(safetensors, "safe_open", lambda *x, **how: Counted(opened(*x, **how))):
        yield sizes


def _shards(rank, folder, model_type, text, options):
    """Load into a model of a plan. The whole parameters, the bytes that this rank read and those
    that it has, and the files of the model saved again."""
    plan = Plan.parse(text)
    model = Transformer(tiny(model_type)).double()
    model = parallelize(model, plan, device_mesh=Grid(plan), **options)
    with bytes_read() as sizes:
        load_hf(folder, model=model)
    own = sum(local(p).nbytes for p in model.parameters())
    with LiveBytes() as live:
        save_hf(model, f"{folder}-again", max_shard_bytes=20_000)
    dist.barrier()
    whole = {name: full(p, model.part.places[name]) for name, p in model.named_parameters()}
    return whole, sum(sizes), own, os.listdir(f"{folder}-again"), live.peak


@pytest.mark.parametrize("text, options, model_type", [
    ("d2t2", dict(mode="fsdp"), "qwen3"), ("(attn:d2t2|ffn:e2t2)", {}, "qwen3_moe")])
def test_each_rank_reads_its_part_and_save_gathers_them(tmp_path, text, options, model_type):
    truth = model_of(model_type)
    save_hf(truth, tmp_path / "hf")
    results = ranks(tmp_path, 4, _shards, tmp_path / "hf", model_type, text, options)
    size = sum(p.nbytes for p in truth.parameters())
    largest = max(p.nbytes for p in truth.parameters())
    for whole, read, own, files, peak in results:
        for name, p in truth.named_parameters():
            assert torch.equal(whole[name], p.detach()), name
        assert read == own < 0.8 * size and INDEX in files
        # A file's tensors, and one that is being gathered from a copy of a part of it.
        assert peak <= 20_000 + 3 * largest < 0.8 * size
    assert same(truth, load_hf(tmp_path / "hf-again"))


def _gathered(rank, folder, model_type, text, options, dtype):
    """What a rank gathers for a model on the meta device, and which files it writes."""
    plan = Plan.parse(text)
    model = Transformer(tiny(model_type)).double().init_weights(0)
    model = parallelize(model, plan, device_mesh=Grid(plan), **options)
    with torch.device("meta"):
        target = Transformer(tiny(model_type)).to(dtype)
    gathered, written, write = {}, [], hf.write_tensors

    def tensors():
        for name, x in gather_weights(model, target):
            gathered[name] = x.to(dtype)
            yield name, gathered[name]

    def noted(tensors, path):
        write(tensors, path)
        written.append(path.name)

    with mock.patch.object(hf, "write_tensors", noted):
        save_hf(target, folder, max_shard_bytes=9000, tensors=tensors(), untie=True)
    dist.barrier()
    return gathered, written


GATHERED = [("gemma3_text", "t2", {}, torch.bfloat16), ("qwen3", "p2", {}, torch.bfloat16),
            ("qwen3_moe", "d2", dict(mode="fsdp"), torch.float64),
            *slow(("gemma3_text", "p2", {}, torch.float64), ("qwen3_moe", "(attn:d2|ffn:e2)", {},
                  torch.float32), ("llama", "d2", dict(mode="zero1"), torch.bfloat16))]  # fmt: skip


@pytest.mark.parametrize("model_type, text, options, dtype", GATHERED)
def test_ranks_write_the_files_of_a_model_that_none_of_them_holds(
    tmp_path, model_type, text, options, dtype
):
    folder = tmp_path / "hf"
    truth = Transformer(tiny(model_type)).double().init_weights(0).to(dtype)
    results = ranks(tmp_path, 2, _gathered, folder, model_type, text, options, dtype)
    own = dict(truth.named_parameters())
    for gathered, _ in results:
        assert list(gathered) == list(own)
        assert all(torch.equal(gathered[name], own[name].detach()) for name in own)

    # File n is of rank n modulo 2. A tied head is there twice.
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert [written for _, written in results] == [files[::2], files[1::2]] and len(files) > 2
    found = {name: file for file in files for name in names_in(folder / file)}
    index = read_json(folder / INDEX)
    assert index["weight_map"] == found and "lm_head.weight" in found
    head = safetensors.torch.load_file(folder / found["lm_head.weight"])["lm_head.weight"]
    assert torch.equal(head, truth.head_weight.detach())
    is_tied = truth.config.tie_word_embeddings
    assert is_tied == (model_type == "gemma3_text")
    total = sum(p.nbytes for p in own.values()) + is_tied * head.nbytes
    assert index["metadata"]["total_size"] == total
    again = load_hf(folder)
    assert same(truth, again) and again.head_weight.dtype == dtype


def _saved(rank, folder, text):
    """The files that this rank writes of its own model, or why it writes none."""
    plan, written = Plan.parse(text), []
    model = parallelize(Transformer(tiny("qwen3")).double().init_weights(0), plan,
                        device_mesh=Grid(plan))  # fmt: skip
    with mock.patch.object(hf, "write_tensors", lambda x, path: written.append(path.name)):
        try:
            save_hf(model, folder)
        except ValueError as error:
            return f"{error}"
    return written


OF_STAGES = "expected a model without pipeline stages, got one of plan p2: "
OF_STAGES += "gather_weights joins them"


@pytest.mark.parametrize("text, answers", [("d2", [["model.safetensors"], []]),
                                           ("p2", [OF_STAGES] * 2)])
def test_one_rank_writes_a_model_that_each_rank_has_whole_and_none_half_of_one(
    tmp_path, text, answers
):
    tmp_path.joinpath("hf").mkdir()
    assert ranks(tmp_path, 2, _saved, tmp_path / "hf", text) == answers


def _vocabularies(rank, sizes):
    dtypes = torch.float64, torch.float32, torch.bfloat16
    return [_vocabulary(rank, sizes, dtype) for dtype in dtypes]


def _vocabulary(rank, sizes, dtype):
    """The largest error of log-probs, entropies and gradients; if a target outside is refused.

    In bfloat16 it is the multiple of the error that plain torch has against float64.
    """
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 6, generator=generator).to(dtype) for n in (11, sum(sizes)))
    targets = torch.randint(sum(sizes), (11,), generator=generator)
    upstream = torch.randn(2, 11, generator=generator)
    start = sum(sizes[:rank])
    own = slice(start, start + sizes[rank])
    # Ranks may cut their tokens into different numbers of chunks, as shards of a vocabulary do.
    split = dict(group=dist.group.WORLD, vocab_start=start, chunk=4 + rank, vocab_size=sum(sizes))
    worst = 0.0

    def plain_logprobs(h, w, targets, temperature=1.0):
        z = (h @ w.T).to(torch.promote_types(h.dtype, torch.float32))
        logp = (z / temperature).log_softmax(1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)

    def outcome(scores, dtype, rows=slice(None), **how):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        out = torch.stack(scores(h, w[rows], targets, **how))
        dh, dw = torch.autograd.grad((out * upstream).sum(), (h, w))
        return out.detach(), dh, dw[own]

    for options in ({}, dict(temperature=0.7)):
        found = outcome(token_logprobs, dtype, own, **split, **options)
        whole = outcome(token_logprobs, dtype, chunk=4, **options)
        error = max(map(relative_error, found, whole))
        if dtype == torch.bfloat16:
            plain, truth = (outcome(plain_logprobs, x, **options) for x in (dtype, torch.float64))
            error = rms(found, truth) / rms(plain, truth)
        worst = max(worst, error)
    lost = complaint_of(token_logprobs, hidden, weight[own], targets + 1000, **split)
    return worst, f"is not in the vocabulary of {sum(sizes)}" in lost


@pytest.mark.parametrize("sizes", [[9, 3], [4, 4, 5]])
def test_vocabulary_parallel_equals_one_process(tmp_path, sizes):
    for results in ranks(tmp_path, len(sizes), _vocabularies, sizes):
        for (error, lost), bound in zip(results, (1e-13, 2e-6, 1.5), strict=True):
            assert error < bound and lost


@pytest.mark.quick
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_the_new_one(process_group, tmp_path):
    path, tensors = tmp_path / "step-00000001", {"x": torch.zeros(3)}
    write_checkpoint(path, tensors, {})

    def killed(folder, ignore_errors=True):
        for file in folder.glob("*.json") if folder.name != f"{path.name}.tmp" else ():
            file.unlink()
            raise KeyboardInterrupt

    with mock.patch.object(shutil, "rmtree", killed), pytest.raises(KeyboardInterrupt):
        write_checkpoint(path, tensors, {"is": "new"})
    assert read_checkpoint(path, tensors)["is"] == "new"


# Files from somebody else ----------------------------------------------------------------------

JSON_DAMAGE = {  # a part of the message, and the file's bytes
    "utf-8": b'{"a": "\xff"}',
    "Expecting": b"{",
    "recursion": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "a list": b"[]",
}


def lines_in(path, **how):
    return [*read_json_lines(path, **how)]


@pytest.mark.quick
@pytest.mark.parametrize("complaint", JSON_DAMAGE)
def test_a_damaged_json_file_is_named(tmp_path, complaint):
    path = tmp_path / "some.json"
    path.write_bytes(JSON_DAMAGE[complaint])
    said = complaint_of(read_json, path)
    kind = r"JSON of another kind: expected an object, got" if "a " in complaint else "not JSON: .*"
    assert re.match(rf"{re.escape(str(path))} is {kind}.*{complaint}", said)
    path.write_bytes(b'{"good": 1}\n\n' + JSON_DAMAGE[complaint] + b'\n{"good": 2}\n')
    said = complaint_of(lines_in, path, skip_torn_last=True)
    assert said.startswith(f"{path} line 3 holds no JSON object: ") and complaint in said


def test_a_json_file_that_cannot_be_read_is_named(tmp_path):
    no = tmp_path / "no"
    said = complaint_of(read_json, no, what="a run's config")
    assert said == f"no {no}; expected a run's config"
    assert complaint_of(read_json, tmp_path).startswith(f"cannot read {tmp_path}: ")


def test_only_a_last_line_without_an_end_counts_as_torn(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1}\n{"text": "\xe2\x80\xa8"}\n'
    both = [(1, {"step": 1}), (2, {"text": "\u2028"})]
    for torn in (b"", b'{"st', b"7", b"\xc3", b"\0\0\0"):
        path.write_bytes(whole + torn)
        assert lines_in(path, skip_torn_last=True) == both
        if torn:
            assert "line 3" in complaint_of(lines_in, path)
            path.write_bytes(whole + torn + b"\n")
            assert "line 3" in complaint_of(lines_in, path, skip_torn_last=True)
    path.write_bytes(whole[:-1])  # whole, but for its end
    assert lines_in(path, skip_torn_last=True) == both


@pytest.mark.quick
def test_rollouts_are_read_line_by_line(tmp_path):
    """A long run's file has tens of GB. A resume and the end of a run need no memory for it."""
    directory, name = RunDirectory(tmp_path), RunDirectory.ROLLOUTS
    for step in range(40):
        lines = [{"step": step, "group": 0, "rollout": n, "text": 50_000 * "x"} for n in range(2)]
        directory.append(name, lines)
    tracemalloc.start()
    assert auditable_steps(Config(prompts=1, group=2), directory) == {0: (0, 0)}
    directory.cut(20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000 < (tmp_path / name).stat().st_size
    assert [line["step"] for line in directory.lines(name)] == sorted(2 * [*range(20)])


@pytest.mark.quick
def test_a_number_that_json_does_not_have_is_null(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.append("metrics.jsonl", [dict(a=math.nan, b=-math.inf, c=1.5)])
    assert (tmp_path / "metrics.jsonl").read_text() == '{"a": null, "b": null, "c": 1.5}\n'
