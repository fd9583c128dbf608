"""models.load: one line for what it cannot load. What it loads: full/test_transformers.py."""

import json
import math
import shutil

import pytest
import torch
from conftest import complaint_of
from safetensors.torch import load_file, save_file

import models

SAID = dict(
    model_type="llama", vocab_size=23, hidden_size=16, intermediate_size=20, num_hidden_layers=4,
    head_dim=6, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture
def altered(tmp_path):
    """altered(**said): a Llama's directory whose config.json says other things than its file."""

    def make(source=SAID, **said):
        (tmp_path / "config.json").write_text(json.dumps(source))
        torch.manual_seed(0)
        model = models.Transformer(models.read_config(tmp_path))
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.4)
        save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(source | said))
        return tmp_path

    return make


LLAMA3 = dict(rope_type="llama3", factor=8.0, rope_theta=5e5)
REFUSED = [  # fields of config.json, and what the error names
    (dict(model_type="gpt2"), "gpt2"), (dict(model_type=None), "None"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "linear"),
    (dict(rope_parameters=LLAMA3), "llama3"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 30.0}}), "rope_parameters"),
    (dict(quantization_config=dict(bits=4)), "quantization_config"),
    (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    (dict(hidden_act="relu"), "relu"), (dict(hidden_size=None), "got None"),
    (dict(layer_types=["chunked_attention"] * 4), "chunked_attention"),
    (dict(layer_types=["full_attention"], model_type="qwen3"), "num_hidden_layers 4"),
    (dict(is_causal=False), "is_causal False"), (dict(head_dim=3), "head_dim 3"),
    (dict(rms_norm_eps="1e-6"), "expected rms_norm_eps of type float, got '1e-6'"),
    (dict(tie_word_embeddings="false"), "expected tie_word_embeddings of type bool, got 'false'"),
    (dict(num_hidden_layers=2.0), "expected num_hidden_layers of type int, got 2.0"),
    (dict(rope_scaling="linear"), "expected rope_scaling of type dict, got 'linear'"),
    (dict(rope_parameters=None, rope_theta=None), "expected rope_theta of type float, got None"),
    (dict(attention_bias=True), "model.layers.0.self_attn.q_proj.bias"),
    (dict(num_hidden_layers=3), "Unexpected key(s) in state_dict: \"model.layers.3."),
    (dict(vocab_size=24), "size mismatch for model.embed_tokens.weight"),
    (dict(num_key_value_heads=None), "size mismatch for model.layers.0.self_attn.k_proj.weight"),
    (dict(head_dim=None, num_attention_heads=32), "head_dim"),
    (dict(per_layer_config={"0": {"rms_norm_eps": 0.1}}), "per_layer_config"),
    (dict(rope_parameters=dict(rope_theta=-1.0)), "rope_parameters {'rope_theta': -1.0}"),
    *((dict(model_type="gemma3_text", sliding_window=x), "sliding_window") for x in (None, "4")),
    *((dict(model_type=kind, layer_types=["sliding_attention"] * 4, sliding_window=None),
       "sliding_window None") for kind in ("qwen3", "mistral")),
    (dict(model_type="qwen3", use_sliding_window="false"), "use_sliding_window of type bool"),
    # Numbers that no model has: a rule of read_config each, and the fields that are its exceptions.
    *((dict(vocab_size=x), f"vocab_size of type int, got {x!r}") for x in (1.5, True, [4])),
    *((dict(hidden_size=x), f"expected hidden_size >= 1, got {x}") for x in (0, -1)),
    *((dict(rms_norm_eps=x), "expected rms_norm_eps >= 0") for x in (-1e-6, math.nan, math.inf)),
    *((dict(rope_theta=x), "expected rope_theta >= 1, got 0") for x in (0, 0.0)),
    *((dict(num_key_value_heads=x), f"num_key_value_heads {x}") for x in (3, 99)),
    *((dict(head_dim=x), f"expected head_dim >= 1, got {x}") for x in (0, -1)),
    (dict(model_type="mistral", sliding_window=0), "expected sliding_window >= 1, got 0"),
    (dict(model_type="qwen3", max_window_layers=-1), "expected max_window_layers >= 0, got -1"),
    (dict(model_type="qwen3", max_window_layers=None), "max_window_layers of type int, got None"),
    *((dict(model_type="qwen3_moe", moe_intermediate_size=8, num_experts=4, num_experts_per_tok=x),
       f"num_experts_per_tok {x}") for x in (5, 99)),
    (dict(model_type="qwen3_moe", num_local_experts=0), "num_local_experts >= 1, got 0"),
    (dict(model_type="gemma3_text", query_pre_attn_scalar=0), "query_pre_attn_scalar >= 1, got 0"),
]  # fmt: skip

@pytest.mark.quick
@pytest.mark.parametrize("said, named", REFUSED)
def test_what_it_cannot_load_is_named_in_one_line(altered, said, named):
    folder = altered(**said)
    told = complaint_of(models.load, folder)
    assert told.startswith(f"{folder}") and named in told


@pytest.mark.quick
def test_a_stored_head_that_is_not_the_tied_embedding_is_refused(altered):
    folder = altered(SAID | dict(tie_word_embeddings=True))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    for head, is_copy in ((embedding, True), (embedding + 1, False), (embedding[1:], False)):
        save_file(tensors | {"lm_head.weight": head.clone()}, file)
        if is_copy:
            models.load(folder)
        else:
            assert "lm_head.weight" in complaint_of(models.load, folder)


@pytest.mark.quick
def test_two_sets_of_weights_in_a_directory_are_refused(altered):
    folder = altered()
    whole, shard = folder / "model.safetensors", folder / "model-1.safetensors"
    shutil.copy(whole, shard)
    assert shard.name in complaint_of(models.load, folder)
    names = dict.fromkeys(load_file(whole), shard.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert f"'{whole.name}'" in complaint_of(models.load, folder)
    whole.unlink()
    twice = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}  # as in old files
    save_file(load_file(shard) | twice, shard)
    models.load(folder)


@pytest.mark.quick
@pytest.mark.parametrize("name", [
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])  # fmt: skip
def test_an_adapter_next_to_its_base_is_refused(altered, name):
    """transformers adds it to the weights, or loads those of another base."""
    folder = altered()
    models.load(folder)
    (folder / name).write_text("{}")
    assert name in complaint_of(models.load, folder)


@pytest.mark.quick
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.mlp.up_proj.weight"])
def test_weights_that_are_not_finite_are_neither_loaded_nor_saved(altered, tmp_path, name, value):
    folder = altered()
    weights = dict(models.load(folder).named_parameters())
    weights[name].data.view(-1)[-1] = value
    assert name in complaint_of(models.save, weights, tmp_path / "saved", folder)
    assert not (tmp_path / "saved").exists()
    save_file(weights, folder / "model.safetensors")
    assert name in complaint_of(models.load, folder)
    large = {key: x.double() for key, x in weights.items()}
    large[name].data.view(-1)[-1] = 1e300  # infinity in float32
    save_file(large, folder / "model.safetensors")
    assert name in complaint_of(models.load, folder)


OF_THE_MODEL = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt",
}  # fmt: skip
OF_OTHER_WEIGHTS = {
    "adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors",
    "optimizer.pt", "trainer_state.json", "scheduler.pt", "training_args.bin", "params.json",
    "quantize_config.json", "quant_config.json", "hf_quant_config.json", "global_step9.json",
}  # fmt: skip


@pytest.mark.quick
def test_files_of_other_weights_are_not_copied(altered, tmp_path):
    """To a directory that has the files of the tokenizer, and loads."""
    folder = altered()
    weights = dict(models.load(folder).named_parameters())
    for name in OF_OTHER_WEIGHTS | OF_THE_MODEL - {"config.json"}:
        (folder / name).write_text("{}")
    models.save(weights, tmp_path / "saved", folder)
    assert {x.name for x in (tmp_path / "saved").iterdir()} == {*OF_THE_MODEL, "model.safetensors"}
    saved = models.load(tmp_path / "saved")
    assert all(p.equal(weights[name]) for name, p in saved.named_parameters())
