"""models.load: one line for what it cannot load. What it loads: full/test_transformers.py."""

import json
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
    (dict(quantization_config=dict(bits=4)), "quantization_config"),
    (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    (dict(hidden_act="relu"), "relu"), (dict(hidden_size=None), "got None"),
    (dict(layer_types=["chunked_attention"] * 4), "chunked_attention"),
    (dict(layer_types=["full_attention"], model_type="qwen3"), "num_hidden_layers 4"),
    (dict(is_causal=False), "is_causal False"), (dict(head_dim=3), "head_dim 3"),
    (dict(rms_norm_eps="1e-6"), "expected rms_norm_eps of type float, got '1e-6'"),
    (dict(tie_word_embeddings="false"), "expected tie_word_embeddings of type bool, got 'false'"),
    (dict(num_hidden_layers=2.0), "float"), (dict(rope_scaling="linear"), "'str'"),
    (dict(rope_parameters=None, rope_theta=None), "NoneType"),
    (dict(attention_bias=True), "model.layers.0.self_attn.q_proj.bias"),
    (dict(num_hidden_layers=3), "Unexpected key(s) in state_dict: \"model.layers.3."),
    (dict(vocab_size=24), "size mismatch for model.embed_tokens.weight"),
    (dict(num_key_value_heads=None), "size mismatch for model.layers.0.self_attn.k_proj.weight"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("said, named", REFUSED)
def test_what_it_cannot_load_is_named_in_one_line(altered, said, named):
    assert named in complaint_of(models.load, altered(**said))


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
