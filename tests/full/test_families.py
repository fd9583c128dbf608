"""Families: models.py's own check, what a config.json means and what is refused, experts.

test_transformers.py holds each family to transformers.
"""

import json
import math

import pytest
import torch

from check_models import CASES, path_errors, relative_error as relative
from full.model.config import FAMILIES, QWEN, ModelConfig
from full.model.experts import grouped_linear
from full.model.hf import full_definition, load_hf, save_hf
from full.model.transformer import Transformer
from full.tiny import tiny, tiny_model
from models import FULL, SLIDING

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


@pytest.mark.parametrize("name", CASES)
def test_every_path_of_a_model_is_its_definition(name):
    """Values, gradients, packed rows, the cache, log-probs, generation in slots."""
    model_type, changes = CASES[name]
    torch.manual_seed(0)
    for path, error in path_errors(tiny_model(model_type, **changes)):
        assert error <= 1e-12, path


RAW = dict(
    model_type="qwen3", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=12,
)  # fmt: skip


def config_of(**changes):
    """The `ModelConfig` of RAW with changes; ... for a field that is absent."""
    raw = {name: value for name, value in (RAW | changes).items() if value is not ...}
    return ModelConfig.from_hf(raw)


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e5}
INSIDE = {"hidden_size": 64, "num_hidden_layers": 7}
MEANINGS = [  # fields of a config.json, what they mean, and other spellings of them
    # (test_transformers.py has each field by itself.)
    # Where both are said, the words of transformers 4 win.
    *((dict(model_type=kind, rope_parameters=LINEAR), dict(rope_parameters={FULL: LINEAR}),
       *(dict(rope_theta=7e5, rope_scaling={key: "linear", "factor": 2.0},
              rope_parameters={"rope_type": "default", "rope_theta": 8e5})
         for key in ("type", "rope_type"))) for kind in ("qwen3", "llama")),
    (dict(rope_parameters=YARN), dict(rope_parameters={FULL: YARN | {"rope_theta": 1e4}}),
     dict(rope_scaling={"type": "yarn", "factor": 4.0}, original_max_position_embeddings=16)),
    # YaRN reaches factor x original, and no less than the config says.
    *((dict(rope_parameters=YARN | {"rope_theta": 1e4}, max_position_embeddings=said),
       dict(max_position_embeddings=room)) for said, room in ((16, 64), (40, 64), (80, 80))),
    (dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.5},
          max_position_embeddings=100), dict(max_position_embeddings=250)),
    (dict(model_type="qwen3_moe", num_local_experts=9),
     dict(num_experts=9, sparse_layers=(0, 1)), dict(num_experts=9, num_local_experts=...)),

    (dict(eos_token_id=[3, 4]), dict(eos_token_id=(3, 4))),
    (dict(model_type="gemma3", text_config=INSIDE, eos_token_id=[1, 106]),
     dict(model_type="gemma3_text", eos_token_id=(1, 106), head_dim=256,
          layer_types=(SLIDING,) * 5 + (FULL, SLIDING))),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("raw, meaning, spellings", [(a, b, rest) for a, b, *rest in MEANINGS])
def test_what_the_fields_of_a_config_mean(raw, meaning, spellings):
    config = config_of(**raw)
    assert {name: getattr(config, name) for name in meaning} == meaning
    for other in spellings:
        assert config_of(**raw | {"rope_parameters": ...} | other) == config
    written = config.to_hf()
    ropes = written.pop("rope_parameters")
    # What transformers 4 reads. It has one scaling for all layers, and Gemma 3 one for each kind.
    assert ModelConfig.from_hf(written) == config or config.model_type == "gemma3_text"
    ropes.clear()  # a copy
    assert all(config.rope_parameters.values())


def written(**changes):
    return tiny(**changes).to_hf()


SLIDES = dict(layer_types=(SLIDING, FULL), sliding_window=3)
EXPERTS = dict(sparse_layers=(1,), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
REFUSED = {  # who refuses: fields, and a pattern of what is said
    config_of: [  # a config.json that asks for what is not implemented
        (dict(rope_scaling={"type": "su", "factor": 4.0}), "'su'"),  # an older spelling
        (dict(rope_scaling={"rope_type": "yarn"}), "missing .*factor"),
        (dict(rope_scaling={"rope_type": "default", "mrope_section": [1]}), "mrope_section"),
        (dict(rope_scaling=YARN | {"truncate": False}), "unknown .*truncate"),
        *((fields, "partial_rotary_factor") for fields in (
            dict(partial_rotary_factor=0), dict(rope_scaling={"partial_rotary_factor": 0.25}))),
        (dict(layer_types=[FULL, "chunked_attention"]), "chunked_attention"),
        (dict(layer_types=[FULL, SLIDING], sliding_window=None), "sliding_window"),
        (dict(model_type="gemma3_text", sliding_window=None), "sliding_window"),
        (dict(model_type="qwen3_5_text", layer_types=[SLIDING, FULL], sliding_window=4),
         "attn_output_gate True"),
        (dict(is_causal=False), "is_causal"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(model_type="mixtral"), "mixtral"), (dict(model_type=None), "None"),
        (dict(model_type=["qwen3"]), "model_type: expected one of .*'qwen3'"),
        (dict(rope_scaling={"rope_type": ["linear"], "factor": 2.0}), "rope_type: expected"),
        (dict(model_type="gemma3_text", rope_parameters={FULL: "linear"}), "'dict' and 'str'"),
        *((dict(model_type=kind, use_sliding_window=True, layer_types=[FULL, SLIDING]), "no mix")
          for kind in ("qwen3_moe", "mistral")),
    ],
    written: [(fields, "cannot say|no mix") for fields in (  # what no config.json can say
        dict(qkv_bias=True), dict(model_type="qwen2", qk_norm=True), dict(scale_embedding=True),
        dict(model_type="gemma3_text", o_bias=True),
        *(dict(model_type=kind, **SLIDES) for kind in ("llama", "qwen3_moe", "mistral")),
        # Fields that the class of another family has, and that this class ignores.
        SLIDES | dict(model_type="llama", layer_types=(SLIDING, SLIDING)),
        dict(model_type="mistral", qkv_bias=True, o_bias=True), dict(mlp_bias=True),
        dict(model_type="llama", query_pre_attn_scalar=5.0), EXPERTS)],
    tiny: [(fields, f"expected a qwen3 model, got .*{words}") for fields, words in (
        *((dict(layer_types=kinds), "layer_types") for kinds in ((FULL,), (FULL, "chunked"))),
        (dict(num_key_value_heads=3), "num_key_value_heads 3"), (dict(head_dim=7), "head_dim 7"),
        (dict(hidden_act="relu2"), "hidden_act"),
        *((SLIDES | dict(sliding_window=window), "sliding_window") for window in (None, 0, -1)),
        *((EXPERTS | dict(sparse_layers=(layer,)), "sparse_layers") for layer in (2, -1)),
        *((EXPERTS | {name: 0}, "num_experts ") for name in EXPERTS
          if name != "sparse_layers"),
        (EXPERTS | dict(num_experts_per_tok=5), "num_experts_per_tok 5"),
        *(({name: -0.1}, name) for name in
          ("rms_norm_eps", "initializer_range", "router_bias_rate")),
        *((dict(query_pre_attn_scalar=value), "query_pre_attn_scalar") for value in (0, -1.0)),
        (dict(rope_parameters={"chunked_attention": {"rope_theta": 1e4}}), "rope_parameters"))],
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("call, fields, said", [
    (call, *row) for call, rows in REFUSED.items() for row in rows])  # fmt: skip
def test_what_makes_no_model_is_refused_by_name(call, fields, said):
    with pytest.raises(ValueError, match=said) as error:
        call(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.quick
@pytest.mark.parametrize("field", COUNTS)
def test_a_size_that_is_not_a_positive_integer_is_refused_by_field_and_file(field, tmp_path):
    for value in (0, -1, 1.5, 1e9, math.nan, "x", None, []):
        with pytest.raises(ValueError, match=f"^{field}: expected a positive integer, got "):
            tiny(**{field: value})
    with pytest.raises(ValueError, match=f"^{field}: expected at most "):
        tiny(**{field: 2**62})  # before anything has this size
    path = tmp_path / "config.json"
    path.write_text(json.dumps(RAW | {field: -1}))
    for given in (path, tmp_path):
        with pytest.raises(ValueError) as error:
            ModelConfig.from_hf(given)
        assert str(error.value) == f"{path}: {field}: expected a positive integer, got -1"


WRONG_TYPES = {  # what is expected: the values of fields that are not
    "a finite number": [
        dict(rms_norm_eps="1e-6"), dict(rms_norm_eps=math.nan), dict(rms_norm_eps=10**400),
        dict(initializer_range=None), dict(model_type="gemma3_text", rope_local_base_freq="1e4")],
    "give no angles": [
        dict(rope_parameters={"rope_type": "linear", "factor": "8"}),
        dict(rope_parameters={"rope_theta": None}),
        dict(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 0.0}),
        dict(rope_parameters={"rope_theta": 0.0}),  # all but the first are infinite
        dict(rope_parameters=LLAMA3 | {"rope_theta": 1e4, "factor": math.nan}),
        dict(rope_parameters=YARN | {"rope_theta": 1e4, "attention_factor": math.inf}),
        dict(rope_parameters=YARN | {"rope_theta": 1.0}),  # which is divided by its logarithm
        dict(model_type="gemma3_text", rope_parameters={SLIDING: {"rope_theta": "1e6"}})],
    "an integer": [
        dict(num_hidden_layers=2.0), dict(num_hidden_layers="2"), dict(hidden_size=None),
        dict(num_attention_heads=True), dict(num_key_value_heads=2.0),
        dict(model_type="qwen3_moe", num_experts=None)],
    "integers": [dict(eos_token_id=2.0), dict(eos_token_id=["2"])],
    "true or false": [dict(tie_word_embeddings="false"), dict(tie_word_embeddings=0),
                      dict(attention_bias=None)],
    "a string": [dict(hidden_act=["silu"])],
    "a list of layers": [dict(layer_types=FULL), dict(layer_types=[1, 2]),
                         dict(model_type="qwen3_moe", mlp_only_layers=["0"])],
    "an object": [dict(rope_scaling="linear"), dict(rope_parameters=[1]), dict(text_config=[])],
    "a positive integer": [dict(num_attention_heads=0),
                           dict(model_type="qwen3_moe", decoder_sparse_step=0)],
    "at most 65536": [dict(num_hidden_layers=10**9)],
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("expected, fields", [
    (expected, fields) for expected, rows in WRONG_TYPES.items() for fields in rows])
def test_a_field_of_another_type_is_refused_by_file_field_type_and_value(
    tmp_path, expected, fields
):
    path = tmp_path / "config.json"
    raw = RAW | fields
    path.write_text(json.dumps(raw))
    files = [raw]
    if raw["model_type"] == "gemma3_text":  # and inside a multimodal model's
        files.append({"model_type": "gemma3", "text_config": raw})
    for content in files:
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError) as error:
            ModelConfig.from_hf(tmp_path)
        said, field = str(error.value), [*fields][-1]
        assert said.startswith(f"{path}: {field}") and "\n" not in said and len(said) < 400
        assert expected in said


def test_a_field_that_a_family_does_not_have_may_hold_anything():
    assert config_of(num_experts=None, mlp_bias="x", decoder_sparse_step=None) == config_of()


@pytest.mark.quick
@pytest.mark.parametrize("field, value", [
    ("vocab_size", 2**22), ("num_hidden_layers", 99), ("num_experts", 2**12)])
def test_sizes_of_another_model_meet_the_tensors_before_anything_is_allocated(
    tmp_path, monkeypatch, field, value
):
    good = RAW | EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [0]}
    save_hf(Transformer(ModelConfig.from_hf(good)), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(good | {field: value}))
    monkeypatch.setattr(Transformer, "to_empty", None)  # asks for the memory
    with pytest.raises(ValueError, match="tensors do not fit its config.json") as error:
        load_hf(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: ") and len(str(error.value)) < 2000


@pytest.mark.quick
def test_a_new_family_is_a_row(tmp_path, monkeypatch):
    own = dict(head_dim=6, hidden_act="gelu", rope_theta=3e3, num_hidden_layers=2)
    fixed = dict(qk_norm=False, scale_embedding=True)
    monkeypatch.setitem(FAMILIES, "toy", ("ToyForCausalLM", fixed, QWEN | own))
    raw = {name: RAW[name] for name in RAW if name not in own} | {"model_type": "toy"}
    config = ModelConfig.from_hf(raw)
    assert config.head_dim == 6 and config.rope_parameters[FULL]["rope_theta"] == 3e3
    model = Transformer(config).double().init_weights(0)
    tokens = torch.arange(9)
    assert relative(model(tokens[None])[0], full_definition(model, tokens)) < 1e-12
    save_hf(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["ToyForCausalLM"]
    assert load_hf(tmp_path)(tokens[None]).equal(model(tokens[None]))


@pytest.mark.quick
@pytest.mark.parametrize("dtype, bound", [
    (torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])  # fmt: skip
@pytest.mark.parametrize("counts", [[3, 0, 5, 4], [12, 0, 0, 0], [0, 0, 0, 12], [0, 0, 0, 0]])
@pytest.mark.parametrize("width", [16, 10])  # torch's kernel takes rows of 16 bytes, a loop others
def test_grouped_product_is_a_product_per_expert(dtype, bound, counts, width):
    x = torch.randn(sum(counts), width, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 8, width, dtype=dtype, requires_grad=True)
    got = grouped_linear(x, weight, torch.tensor(counts))
    owner = torch.arange(4).repeat_interleave(torch.tensor(counts))
    truth = torch.einsum("nm,nim->ni", x.double(), weight.double()[owner])
    assert got.dtype == dtype and got.shape == truth.shape
    upstream = torch.randn(got.shape)
    assert not sum(counts) or relative(got, truth) < bound
    sums = [(y * upstream.to(y.dtype)).sum() for y in (got, truth)]
    grads = [torch.autograd.grad(total, (x, weight)) for total in sums]
    for ours, theirs in zip(*grads):
        assert not theirs.any() or relative(ours, theirs) < bound < relative(0 * ours, theirs)


@pytest.mark.quick
@pytest.mark.parametrize("tokens", [1, 40])
def test_moe_is_repeatable(tokens):
    model = tiny_model("qwen3_moe", dtype=torch.float32)
    x, found = torch.randn(1, tokens, 24, requires_grad=True), []
    for _ in range(3):
        mlp = model.model.layers[1].mlp
        out = mlp(x)
        found.append((out, *torch.autograd.grad(out.sum(), (x, *mlp.parameters()))))
    first = found[0][0]
    assert all(a.equal(b) for again in found[1:] for a, b in zip(found[0], again))
    order = torch.randperm(tokens)
    assert relative(model.model.layers[1].mlp(x[:, order]), first[:, order]) < 1e-6


@pytest.mark.quick
def test_the_router_works_in_float32():
    mlp = tiny_model("qwen3_moe", dtype=torch.bfloat16, router_bias_rate=0.1).model.layers[1].mlp
    x = torch.randn(50, 24).bfloat16()
    scores, chosen, weight = mlp.route(x)
    exact = mlp.gate(x).float().softmax(-1)
    assert scores.dtype == torch.float32 and scores.equal(exact) and weight.dtype == torch.bfloat16

    # The bias selects experts and does not weigh them.
    assert chosen.equal((exact + 0.1 * mlp.votes).topk(3).indices)
    picked = exact.gather(1, chosen)
    assert weight.equal((picked / picked.sum(1, keepdim=True)).bfloat16())
    assert not chosen.equal(exact.topk(3).indices)


@pytest.mark.quick
def test_the_router_bias_survives_bfloat16():
    model = tiny_model("qwen3_moe", router_bias_rate=0.001)
    model.model.layers[1].mlp.votes.fill_(1001)  # which is not a bfloat16
    assert model.bfloat16().model.layers[1].mlp.votes.tolist() == [1001] * 6
