"""transformers is the truth: small models of every family, published configurations, recipes.

A row of CASES is a model of transformers, in float64 and in files. Both loaders read it: `load_hf`
of the folder and `models.load` of the five. What they compute, write and say is transformers'.
"""

import contextlib
import copy
import dataclasses
import json
import random
import re

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, installed, shortened
from released import PUBLISHED, multimodal_gemma
from test_ranks import ranks

import models
from check_models import relative_error as relative
from full.learn.generate import generate
from full.model.config import FAMILIES, LINEAR, ModelConfig
from full.model.hf import load_hf, rows_in_file, save_hf
from full.ranks.optimizer import reduce_gradients
from full.tree.chunks import tree_backward
from full.tree.trie import TokenTrie
from models import FULL, SLIDING

transformers = installed("transformers")
# Its table of dtypes is made here, while float32 is float32.
from safetensors.torch import load_file, save_file  # noqa: E402


@contextlib.contextmanager
def float32_is_float64():
    """Inside, what asks torch for float32 by name gets float64, and so does Tensor.float().

    transformers computes norms, softmaxes and angles in float32 even in a float64 model, where a
    wrong formula could hide behind rounding.
    """
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


# Small models -----------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=64,
)  # fmt: skip
MOE = dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
GEMMA = dict(model_type="gemma3_text", head_dim=16, sliding_window=6, query_pre_attn_scalar=24)
HYBRID = dict(model_type="qwen3_5_text", head_dim=8, linear_key_head_dim=6, linear_value_head_dim=5,
              linear_num_key_heads=2, linear_num_value_heads=4)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
BETAS = dict(beta_fast=1.5, beta_slow=0.25, original_max_position_embeddings=32)
CASES = {  # transformers' own keywords; "rope": rope_parameters without the theta
    "llama": dict(model_type="llama", rms_norm_eps=1e-5, num_key_value_heads=1),
    "llama tied, biased": dict(model_type="llama", head_dim=12, tie_word_embeddings=True,
                               attention_bias=True, mlp_bias=True, theta=5e5),
    "llama linear": dict(model_type="llama", num_key_value_heads=None, mlp_bias=True,
                         rope=dict(rope_type="linear", factor=2.0)),
    "llama llama3": dict(model_type="llama", head_dim=None, tie_word_embeddings=True, rope=LLAMA3),
    "mistral": dict(model_type="mistral", head_dim=12, sliding_window=5, rms_norm_eps=1e-5),
    "mistral full": dict(model_type="mistral", sliding_window=None, theta=1e6,
                         num_key_value_heads=1),
    "mistral tied, yarn": dict(model_type="mistral", head_dim=16, sliding_window=7,
                               tie_word_embeddings=True, rope=YARN),
    "qwen3": dict(model_type="qwen3", head_dim=12, rms_norm_eps=1e-4, num_key_value_heads=1),
    "qwen3 tied": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True, theta=5e5),
    "qwen3 slides": dict(model_type="qwen3", head_dim=8, use_sliding_window=True, sliding_window=5,
                         max_window_layers=1),
    "qwen3 layer types": dict(model_type="qwen3", head_dim=8, use_sliding_window=True,
                              sliding_window=4, layer_types=[SLIDING, FULL, SLIDING]),
    "qwen3 yarn": dict(model_type="qwen3", head_dim=16, rope=YARN),
    # RoPE as released: Qwen3's long contexts, and Llama 3.2.
    "qwen3 yarn, released": dict(
        model_type="qwen3", theta=1e6, head_dim=128, max_position_embeddings=131072,
        rope=YARN | dict(original_max_position_embeddings=32768)),
    "llama llama3, released": dict(
        model_type="llama", theta=5e5, head_dim=64, max_position_embeddings=131072,
        rope=LLAMA3 | dict(factor=32.0, original_max_position_embeddings=8192)),
    "qwen3 yarn, betas": dict(model_type="qwen3", head_dim=16, rope=YARN | BETAS),
    "qwen3 yarn, factor": dict(model_type="qwen3", head_dim=16,
                               rope=YARN | dict(attention_factor=1.7)),
    "qwen2": dict(model_type="qwen2", theta=1e6, rms_norm_eps=1e-5),
    "qwen2, heads do not divide": dict(model_type="qwen2", hidden_size=50),
    "qwen2 slides": dict(model_type="qwen2", use_sliding_window=True, sliding_window=5,
                         max_window_layers=2),
    "qwen3_moe": MOE | dict(head_dim=12),
    "qwen3_moe normed": MOE | dict(norm_topk_prob=True, attention_bias=True, num_experts_per_tok=3),
    "qwen3_moe layers": MOE | dict(decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[1]),
    "qwen3_moe tied, slides": MOE | dict(tie_word_embeddings=True, use_sliding_window=True,
                                         sliding_window=5, max_window_layers=2),
    "gemma3": GEMMA,
    "gemma3 pattern": GEMMA | dict(sliding_window_pattern=2, attention_bias=True, theta=3e5),
    "gemma3 layer types": GEMMA | dict(layer_types=[FULL, SLIDING, FULL], rms_norm_eps=1e-4),
    "gemma3 all sliding": GEMMA | dict(layer_types=[SLIDING] * 3),
    "gemma3 untied, scaled": GEMMA | dict(tie_word_embeddings=False, sliding_window_pattern=3,
                                          full_rope=dict(rope_type="linear", factor=8.0)),
    "gemma3 llama3": GEMMA | dict(sliding_window_pattern=2, full_rope=LLAMA3),
    "qwen3_5": HYBRID | dict(layer_types=[LINEAR, FULL, LINEAR]),
    "qwen3_5 tied, biased, yarn": HYBRID | dict(
        num_hidden_layers=4, tie_word_embeddings=True, attention_bias=True, rms_norm_eps=1e-4,
        hidden_act="gelu_pytorch_tanh", head_dim=12, rope=YARN | dict(partial_rotary_factor=0.5)),
}  # fmt: skip
NOT_IN_THE_FIVE = {"rope", "full_rope", "linear_key_head_dim"}


def hf_config(case):
    raw = SIZES | CASES[case]
    theta, rope = raw.pop("theta", 1e4), raw.pop("rope", {"rope_type": "default"})
    kind, full = raw.pop("model_type"), raw.pop("full_rope", None)
    if kind == "gemma3_text":
        full = {"rope_theta": theta} | (full or {"rope_type": "default"})
        local = {"rope_type": "default", "rope_theta": 500.0}
        raw["rope_parameters"] = {FULL: full, SLIDING: local}
    else:
        raw["rope_parameters"] = {"rope_theta": theta} | rope
    return transformers.AutoConfig.for_model(kind, **raw)


EAGER = dict(attn_implementation="eager", experts_implementation="eager")  # grouped: no float64


def model_in_files(config, directory):
    """transformers' float64 model of a configuration, whose files are there, several of weights."""
    torch.manual_seed(0)
    with float32_is_float64():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float64, **EAGER)  # fmt: skip
    for p in model.parameters():  # numbers of float32, which `models.load` reads them in
        p.data = (p.data + 0.05 * torch.randn_like(p)).float().double()
    model.save_pretrained(directory, max_shard_size="40KB")
    return model.eval()


def make(case, directory):
    """A case, its model, and the directory."""
    model = model_in_files(hf_config(case), directory)
    assert (directory / "model.safetensors.index.json").exists()
    return case, model, directory


@pytest.fixture(scope="module", params=CASES)
def hf(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("hf"))


def their_gradient(name, parameters, config):
    """transformers' gradient of our parameter `name`; from version 5 on its experts are fused."""
    path, _, leaf = name.rpartition(".")
    rows = rows_in_file(name, config)
    if name in parameters:
        return parameters[name].grad[slice(None) if rows is None else rows]
    return parameters[f"{path}.gate_up_proj"].grad.chunk(2, 1)[leaf == "up_proj"]


def test_logits_and_gradients_are_transformers(hf):
    case, theirs, directory = hf
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 61, (2, 20), generator=generator)  # 0 is Gemma's PAD: no gradient
    upstream = torch.randn(2, 20, 61, generator=generator).double()
    theirs.zero_grad()
    with float32_is_float64():
        truth = theirs(tokens).logits
        (truth * upstream).sum().backward()
    ours = load_hf(directory)
    logits = ours(tokens)
    assert logits.dtype == torch.float64 and relative(logits, truth) < 1e-12
    grads = torch.autograd.grad(logits, list(ours.parameters()), upstream)
    known = dict(theirs.named_parameters())
    for (name, _), grad in zip(ours.named_parameters(), grads, strict=True):
        true = their_gradient(name, known, ours.config)
        assert relative(grad, true) < 1e-12 < relative(0 * grad, true), name

    # The five have fewer RoPEs, and no cap.
    if CASES[case].keys() & NOT_IN_THE_FIVE:
        with pytest.raises(ValueError, match="expected (a model of the equations|model_type)"):
            models.load(directory)
        return
    core = models.load(directory)
    assert {p.dtype for p in core.parameters()} == {torch.float32}
    core.double()
    assert relative(core.logits(core.hidden(tokens)), truth) < 1e-12


def in_the_words_of_version_4(case, raw):
    """A config.json of version 5 as transformers 4 wrote it: RoPE and layers in other words."""
    given = {key: x for key, x in raw.items() if key not in ("rope_parameters", "dtype")}
    if "layer_types" not in CASES[case]:
        given.pop("layer_types", None)
    ropes = raw["rope_parameters"]
    full = ropes.get(FULL, ropes)
    scaling = {key: x for key, x in full.items() if key != "rope_theta"}
    given |= dict(rope_theta=full["rope_theta"], torch_dtype="float64", rope_scaling=None)
    if "partial_rotary_factor" in full:
        given["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    if scaling["rope_type"] != "default":
        given["rope_scaling"] = scaling
    if SLIDING in ropes:
        given["rope_local_base_freq"] = ropes[SLIDING]["rope_theta"]
        given["sliding_window_pattern"] = CASES[case].get("sliding_window_pattern", 6)
    return given


def as_the_five_read(directory):
    """The configuration; that a RoPE is the default one may be left unsaid."""
    config = models.read_config(directory)
    for rope in config.rope_parameters.values():
        rope.pop("rope_type", None)
    return config


def test_a_checkpoint_comes_in_older_words_and_goes_as_it_came(hf, tmp_path):
    """Bit for bit; the five write the tensors and leave config.json."""
    case, theirs, directory = hf
    ours = load_hf(directory)
    old = tmp_path / "old"
    old.mkdir()
    raw = in_the_words_of_version_4(case, json.loads((directory / "config.json").read_text()))
    (old / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_hf(old) == ours.config
    save_hf(ours, tmp_path / "full", max_shard_bytes=50_000)
    assert (tmp_path / "full" / "model.safetensors.index.json").exists()
    again = load_hf(tmp_path / "full")
    assert all(map(torch.equal, ours.parameters(), again.parameters()))
    assert again.config == ours.config
    written = [tmp_path / "full"]
    if not CASES[case].keys() & NOT_IN_THE_FIVE:
        core = models.load(directory)
        assert as_the_five_read(old) == as_the_five_read(directory)
        models.save(dict(core.double().named_parameters()), tmp_path / "five", directory)
        written.append(tmp_path / "five")
    tokens = torch.arange(12)[None]
    with float32_is_float64():
        for folder in written:
            back = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, **EAGER)  # fmt: skip
            assert type(back) is type(theirs)  # layer_types would make a Ministral of a Mistral
            pairs = zip(theirs.state_dict().items(), back.state_dict().items(), strict=True)
            assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
            assert torch.equal(theirs(tokens).logits, back(tokens).logits)


# The caches that differ: one key head, windows of every pattern, experts, scaled angles.
DECODED = ("llama", "mistral tied, yarn", "qwen3 layer types", "qwen3_moe tied, slides",
           "gemma3", "gemma3 llama3", "qwen3_5")  # fmt: skip


@pytest.mark.parametrize("hf", shortened(CASES, *DECODED), indirect=True)
def test_greedy_decoding_of_a_ragged_batch_is_transformers_row_by_row(hf):
    _, theirs, directory = hf
    prompts = [list(range(5, 18)), [3, 1]]
    rows = generate(load_hf(directory), prompts, max_new_tokens=14, temperature=0)
    options = dict(max_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0)
    truth = [theirs.generate(torch.tensor([prompt]), **options)[0] for prompt in prompts]
    assert [row.tokens for row in rows] == [tokens.tolist() for tokens in truth]


HALF = "llama tied, biased", "qwen3_moe normed", "gemma3 pattern", "qwen3_5"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hf", HALF, indirect=True)
def test_half_precision_is_at_most_twice_as_wrong_as_transformers(hf, dtype):
    """Against float64 with the same rounded weights. The five: logits, and log-probs in float32."""
    case, theirs, directory = hf
    tokens = torch.randint(1, 61, (4, 40), generator=torch.Generator().manual_seed(1))
    lower = load_hf(directory, dtype=dtype)
    with torch.no_grad():
        truth = copy.deepcopy(lower).double()(tokens)
        logits = copy.deepcopy(theirs).to(dtype)(tokens).logits
        error = relative(logits, truth)
        ours = lower(tokens)
        assert ours.dtype == dtype and relative(ours, truth) < 2 * error
        if CASES[case].keys() & NOT_IN_THE_FIVE:
            return
        core = models.load(directory).to(dtype)
        hidden = core.hidden(tokens)
        assert relative(core.logits(hidden), truth) < 1.1 * error
        ours = core.logprobs(hidden.flatten(0, 1), tokens.flatten())[0]
    truth, theirs = (x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
                     .gather(-1, tokens[..., None]).flatten() for x in (truth, logits))
    assert ours.dtype == torch.float32 and relative(ours, truth) < 1.1 * relative(theirs, truth)


@pytest.mark.parametrize("old", [False, True])
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path, old):
    theirs = multimodal_gemma(vocab_size=61)
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.1 * torch.randn_like(p)
    theirs.save_pretrained(tmp_path)
    path, begin = tmp_path / "model.safetensors", "language_model.model."
    tensors = load_file(path)
    if not old:  # as transformers 4.52 and later write them
        tensors = {f"model.{name.replace(begin, 'language_model.')}": x
                   for name, x in tensors.items()}  # fmt: skip
        save_file(tensors, path)
    begin = "language_model." if old else "model.language_model."
    assert any(name.startswith(begin) for name in tensors)
    tokens = torch.randint(1, 60, (2, 11))
    got, want = load_hf(tmp_path)(tokens), theirs(input_ids=tokens).logits
    assert relative(got, want) < 1e-5
    save_hf(load_hf(tmp_path), tmp_path / "text")
    assert load_hf(tmp_path / "text")(tokens).equal(got)


def test_the_text_model_of_a_multimodal_qwen3_5(tmp_path):
    """Its vision tower, and the layers that predict further tokens, are left out."""
    text = hf_config("qwen3_5").to_dict() | dict(tie_word_embeddings=False)
    vision = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=32)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    theirs = transformers.Qwen3_5ForConditionalGeneration(config).double().eval()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"mtp.norm.weight": torch.ones(32)}, path)
    ours, tokens = load_hf(tmp_path), torch.randint(1, 60, (2, 11))
    assert relative(ours(tokens), theirs(input_ids=tokens).logits) < 1e-5
    save_hf(ours, tmp_path / "text")
    path = tmp_path / "text" / "model.safetensors"
    save_file(load_file(path) | {"mtp.norm.weight": torch.ones(32)}, path)
    assert load_hf(tmp_path / "text")(tokens).equal(ours(tokens))


# Published configurations -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name):
    """Fields that are left out are filled in by its classes, and then read by ours."""
    raw = PUBLISHED[name]
    given = {field: value for field, value in raw.items() if field != "model_type"}
    theirs = transformers.AutoConfig.for_model(raw["model_type"], **given)
    ours = ModelConfig.from_hf(raw)
    assert ModelConfig.from_hf(theirs.to_dict()) == ours == ModelConfig.from_hf(ours.to_hf())

    # The text model alone does not know the ends of turns that stand outside.
    text_config = ModelConfig.from_hf(theirs.get_text_config().to_dict())
    assert dataclasses.replace(text_config, eos_token_id=ours.eos_token_id) == ours


def test_an_absent_field_has_transformers_default():
    for kind in FAMILIES:
        whole = ModelConfig.from_hf(transformers.AutoConfig.for_model(kind).to_dict())
        assert whole == ModelConfig.from_hf({"model_type": kind}), kind


# What the five read of a config.json --------------------------------------------------------------

# A field of each family, and two values other than its default. Most families lack most of them.
FIELDS = dict(
    vocab_size=(61, 62), hidden_size=(32, 64), intermediate_size=(48, 40), num_hidden_layers=(4, 3),
    num_attention_heads=(4, 8), num_key_value_heads=(2, 4), max_position_embeddings=(64, 99),
    head_dim=(8, 12), rms_norm_eps=(1e-5, 1e-2), tie_word_embeddings=(True, False),
    hidden_act=("gelu", "silu"), hidden_activation=("silu", "gelu"), attention_bias=(True, False),
    mlp_bias=(True, False), rope_theta=(100.0, 3e3), rope_local_base_freq=(50.0, 700.0),
    rope_scaling=({"type": "default", "rope_theta": 77.0}, None),
    rope_parameters=({FULL: {"rope_theta": 30.0}, SLIDING: {"rope_theta": 900.0}},
                     {"rope_type": "default", "rope_theta": 300.0}),
    use_sliding_window=(True, False), sliding_window=(3, 5), max_window_layers=(1, 0),
    layer_types=([FULL, SLIDING, SLIDING, FULL], None), sliding_window_pattern=(2, 3),
    _sliding_window_pattern=(2, 4), query_pre_attn_scalar=(8, 24),
    num_experts=(6, 7), num_local_experts=(5, 4), num_experts_per_tok=(2, 3),
    moe_intermediate_size=(16, 24), norm_topk_prob=(True, False), decoder_sparse_step=(2, 1),
    mlp_only_layers=([1], [0, 3]),
)  # fmt: skip


def in_our_words(family, theirs):
    """The fields of `models.read_config`, of transformers' configuration."""
    L, heads = theirs.num_hidden_layers, theirs.num_attention_heads
    has_types = theirs.model_type in ("ministral", "qwen2", "qwen3", "gemma3_text")
    window = None if family == "llama" else theirs.sliding_window
    types = theirs.layer_types if has_types else [SLIDING if window else FULL] * L
    bias = {"mistral": False, "qwen2": True}.get(family, getattr(theirs, "attention_bias", False))
    found = {name: getattr(theirs, name) for name in models.SIZES}
    found |= dict(
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        rms_norm_eps=theirs.rms_norm_eps, tie_word_embeddings=theirs.tie_word_embeddings,
        layer_types=tuple(types), qkv_bias=bias, o_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and theirs.mlp_bias)  # fmt: skip
    ropes = theirs.rope_parameters
    ropes = {kind: ropes[kind] if family == "gemma3_text" else ropes for kind in types}
    found["thetas"] = {kind: rope["rope_theta"] for kind, rope in ropes.items()}
    if SLIDING in types:
        found["sliding_window"] = window
    if family == "gemma3_text":
        return found | dict(hidden_act=theirs.hidden_activation,
                            query_pre_attn_scalar=theirs.query_pre_attn_scalar)  # fmt: skip
    if family == "qwen3_moe":
        found |= {name: getattr(theirs, name) for name in (
            "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")}
        step, dense = theirs.decoder_sparse_step, theirs.mlp_only_layers
        layers = [n for n in range(L) if n not in dense and (n + 1) % step == 0]
        found["sparse_layers"] = tuple(layers)
    return found | dict(hidden_act=theirs.hidden_act)


def tried(call, *args):
    """The result of a call, or None if transformers cannot have it."""
    with contextlib.suppress(Exception):
        return call(*args)


def read_by_both(directory, raw):
    """Write a config.json. Return what transformers and the five read, None where it is refused."""
    (directory / "config.json").write_text(json.dumps(raw))
    theirs = tried(transformers.AutoConfig.from_pretrained, directory)
    return theirs, tried(models.read_config, directory)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_each_field_and_each_default_is_transformers(tmp_path, family):
    """Without each field, with another value of it, without any, and at random."""
    rng = random.Random(family)
    all_given = {name: given for name, (given, _) in FIELDS.items()} | {"model_type": family}
    free = [name for name in FIELDS if not re.search("num_|_size|use_", name)]
    cases = [{"model_type": family}, all_given]
    for name in FIELDS:
        cases += [{x: y for x, y in all_given.items() if x != name},
                  all_given | {name: FIELDS[name][1]}]  # fmt: skip
        absent, other = rng.sample(free, 6), rng.sample(free, 6)
        cases.append({x: y for x, y in all_given.items() if x not in absent}
                     | {x: rng.choice(FIELDS[x]) for x in other})  # fmt: skip
    read = 0
    for raw in cases:
        theirs, ours = read_by_both(tmp_path, raw)
        if theirs is not None and ours is not None:  # what is refused by name: test_load.py
            fields = vars(ours) | {"thetas": {
                kind: rope["rope_theta"] for kind, rope in ours.rope_parameters.items()}}
            true = in_our_words(family, theirs)
            assert {name: fields[name] for name in true} == true
            read += 1
    assert read > 0.8 * len(cases)


# Models of transformers on trees and on a ring: the code of full/RECIPES.md ----------------------

# Grouped heads in each. The two that slide have layers of both kinds; Gemma's have RoPEs of theirs.
SLIDING_FAMILIES = {"Qwen3": "qwen3 tied", "Qwen2": "qwen2 slides", "Gemma 3": "gemma3 pattern"}
OTHERS = {
    "llama": {}, "mistral": dict(sliding_window=4), "mixtral": {}, "phi3": {},
    "gemma2": dict(sliding_window=4, head_dim=8, attn_logit_softcapping=None,
                   final_logit_softcapping=None),
    "olmo3": dict(sliding_window=4), "qwen3_moe": CASES["qwen3_moe normed"] | dict(head_dim=8),
}  # fmt: skip
OTHERS["qwen3_moe"].pop("model_type")
PAGE = (ROOT / "full" / "RECIPES.md").read_text()
SECTION = PAGE.split("## Any transformers model on trees and on a ring")[1]
TEXT = re.search(r"```python\n(.*?)```", SECTION, re.S)[1]
TEMPERATURE = 0.7


def recipe():
    """The names that the recipe defines."""
    defined = {}
    exec(TEXT, defined)
    return defined


def model_of(family, attention="eager"):
    """A small float64 model of transformers, no weight of which is neutral."""
    if family in OTHERS:
        sizes = SIZES | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        config = transformers.AutoConfig.for_model(family, **sizes, **OTHERS[family])
    else:
        config = hf_config(SLIDING_FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation=attention)  # fmt: skip
    if family in ("mixtral", "qwen3_moe"):
        model.set_experts_implementation("eager")  # its grouped product has no float64
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def sequences_of_a_tree():
    """Six sequences with forks, of which one is the beginning of two others; longer than windows.

    Without the id 0, which is Gemma's PAD: its embedding has no gradient.
    """
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(1, 61, (9,), generator=generator)
    shared_and_own = ((9, 7), (9, 3), (5, 8), (5, 1), (2, 12), (9, 0))
    return [torch.cat([stem[:n], torch.randint(1, 61, (own,), generator=generator)])
            for n, own in shared_and_own]  # fmt: skip


def loss_fn(i, logprobs, entropy, coupling=0.1):
    """A loss of each sequence's own, with a term that no sum over tokens can replace."""
    weights = torch.sin(7.0 * torch.arange(1, len(logprobs) + 1) + i).double()
    return (weights * (logprobs - 0.3 * entropy)).sum() + coupling * logprobs.sum().square()


def by_itself(model, sequences, temperature=1.0, **options):
    """The loss of transformers' own logits, sequence by sequence; the gradient is in .grad."""
    model.zero_grad()
    total = 0.0
    for i, tokens in enumerate(sequences):
        logits = model(tokens[None]).logits[0, :-1]
        logp = (logits / temperature).log_softmax(-1)
        logprobs = logp.gather(1, tokens[1:, None])[:, 0]
        loss = loss_fn(i, logprobs, -(logp.exp() * logp).sum(-1), **options)
        loss.backward()
        total += loss.item()
    return total


def errors(loss, model, true_loss, true_model):
    """Relative errors of the loss and of the worst parameter's gradient."""
    pairs = list(zip(model.parameters(), true_model.parameters(), strict=True))
    assert min(q.grad.norm() for _, q in pairs) > 1e-3
    return abs(loss / true_loss - 1), max(relative(p.grad, q.grad) for p, q in pairs)


@pytest.mark.parametrize("family", shortened([*SLIDING_FAMILIES, *OTHERS], *SLIDING_FAMILIES))
def test_the_recipe_trains_a_model_of_transformers_on_a_tree(family):
    model = model_of(family)
    with float32_is_float64():
        true_loss = by_itself(model, sequences_of_a_tree(), TEMPERATURE)
        for options in {}, {"max_tokens": 4}, {"max_tokens": 9, "recompute": True}:
            policy = recipe()["Policy"](copy.deepcopy(model))
            policy.zero_grad()
            trie = TokenTrie(sequences_of_a_tree())
            result = tree_backward(policy, trie, loss_fn, temperature=TEMPERATURE, **options)
            assert max(errors(result.loss.item(), policy, true_loss, model)) < 1e-12


def _on_a_ring(rank):
    """family -> errors of one sequence on a ring, before and after the sum, and of a whole tree."""
    found = {}
    code = recipe()
    tokens = torch.cat(sequences_of_a_tree()[:2])  # 28: 27 inputs, which are dealt unevenly
    for family in SLIDING_FAMILIES:
        model = model_of(family)
        policy = code["Policy"](copy.deepcopy(model))
        with float32_is_float64():
            true_loss = by_itself(model, [tokens], coupling=0)  # a ring needs a sum over tokens
            weights = torch.sin(7.0 * torch.arange(1, len(tokens))).double()
            mine, logprobs, entropies = code["ring_logprobs"](policy, tokens)
            loss = (weights[mine] * (logprobs - 0.3 * entropies)).sum()
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            _, alone = errors(total.item(), policy, true_loss, model)
            reduce_gradients(policy)
            ring = errors(total.item(), policy, true_loss, model)

            # All ranks compute the same loss from all scores; a gradient is its rank's tokens'.
            policy.zero_grad()
            true_loss = by_itself(model, sequences_of_a_tree())
            scores = code["ring_tree_scores"](policy, TokenTrie(sequences_of_a_tree()))
            loss = sum(loss_fn(i, *score) for i, score in enumerate(scores))
            (loss / dist.get_world_size()).backward()
            reduce_gradients(policy)
            tree = errors(loss.item(), policy, true_loss, model)
        found[family] = {"alone": alone, "ring": max(ring), "tree": max(tree)}
    return found


@pytest.mark.slow  # two more processes have to import transformers
def test_the_recipe_trains_a_model_of_transformers_on_a_ring(tmp_path):
    for found in ranks(tmp_path, 2, _on_a_ring):
        assert [*found] == [*SLIDING_FAMILIES]
        for family, row in found.items():
            assert max(row["ring"], row["tree"]) < 1e-12 and row["alone"] > 1e-3, (family, row)
