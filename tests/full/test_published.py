"""Read the published configurations of Llama, Mistral, Qwen and Gemma 3 as `inspect` does.

Each is the released config.json without most fields that no reader of a model asks for. No weights
are needed: a model on the meta device has shapes alone.
"""

import dataclasses
import json
import re

import pytest

from full.__main__ import main
from full.model_config import ModelConfig
from models import FULL, SLIDING

QWEN = dict(
    attention_dropout=0.0, bos_token_id=151643, hidden_act="silu", initializer_range=0.02,
    rms_norm_eps=1e-6, rope_theta=1000000.0, torch_dtype="bfloat16", use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
QWEN3 = QWEN | dict(
    attention_bias=False, eos_token_id=151645, head_dim=128, max_position_embeddings=40960,
    model_type="qwen3", rope_scaling=None, sliding_window=None,
)  # fmt: skip
SCALED = {"factor": 8.0, "rope_type": "linear"}
GEMMA = dict(
    eos_token_id=[1, 106], initializer_range=0.02, model_type="gemma3", torch_dtype="bfloat16",
    vision_config=dict(hidden_size=1152, model_type="siglip_vision_model", num_hidden_layers=27),
)  # fmt: skip

# SmolLM2 and TinyLlama are Llamas in all but name.
LLAMA = dict(
    bos_token_id=1, eos_token_id=2, hidden_act="silu", initializer_range=0.02, rms_norm_eps=1e-5,
    model_type="llama", rope_scaling=None, tie_word_embeddings=False, torch_dtype="bfloat16",
    vocab_size=32000,
)  # fmt: skip
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
MISTRAL = dict(
    bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096, initializer_range=0.02,
    intermediate_size=14336, max_position_embeddings=32768, model_type="mistral",
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5,
    tie_word_embeddings=False, torch_dtype="bfloat16",
)  # fmt: skip

# name -> (parameters of the text model, config.json)
PUBLISHED = {
    "SmolLM2-135M": (134_515_008, LLAMA | dict(
        attention_bias=False, bos_token_id=0, eos_token_id=0, hidden_size=576,
        initializer_range=0.041666666666666664, intermediate_size=1536,
        max_position_embeddings=8192, mlp_bias=False, num_attention_heads=9, num_hidden_layers=30,
        num_key_value_heads=3, rope_theta=100000, tie_word_embeddings=True, vocab_size=49152)),
    "TinyLlama-1.1B": (1_100_048_384, LLAMA | dict(
        attention_bias=False, hidden_size=2048, intermediate_size=5632, rope_theta=10000.0,
        max_position_embeddings=2048, num_attention_heads=32, num_hidden_layers=22,
        num_key_value_heads=4)),
    "Llama-2-7b": (6_738_415_616, LLAMA | dict(
        hidden_size=4096, intermediate_size=11008, max_position_embeddings=4096,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
        torch_dtype="float16")),
    "Llama-3.2-1B": (1_235_814_400, LLAMA | dict(
        attention_bias=False, attention_dropout=0.0, bos_token_id=128000, eos_token_id=128001,
        head_dim=64, hidden_size=2048, intermediate_size=8192, max_position_embeddings=131072,
        mlp_bias=False, num_attention_heads=32, num_hidden_layers=16, num_key_value_heads=8,
        rope_scaling=LLAMA3, rope_theta=500000.0, tie_word_embeddings=True, vocab_size=128256)),
    "Mistral-7B-v0.1": (7_241_732_096, MISTRAL | dict(
        rope_theta=10000.0, sliding_window=4096, vocab_size=32000)),
    "Mistral-7B-v0.3": (7_248_023_552, MISTRAL | dict(
        attention_dropout=0.0, rope_theta=1000000.0, sliding_window=None, vocab_size=32768)),
    "Qwen2.5-0.5B": (494_032_768, QWEN | dict(
        eos_token_id=151643, hidden_size=896, intermediate_size=4864, max_position_embeddings=32768,
        max_window_layers=24, model_type="qwen2", num_attention_heads=14, num_hidden_layers=24,
        num_key_value_heads=2, sliding_window=32768, tie_word_embeddings=True, use_mrope=False)),
    "Qwen3-0.6B": (596_049_920, QWEN3 | dict(
        hidden_size=1024, intermediate_size=3072, max_window_layers=28, num_attention_heads=16,
        num_hidden_layers=28, num_key_value_heads=8, tie_word_embeddings=True)),
    "Qwen3-8B": (8_190_735_360, QWEN3 | dict(
        hidden_size=4096, intermediate_size=12288, max_window_layers=36, num_attention_heads=32,
        num_hidden_layers=36, num_key_value_heads=8, tie_word_embeddings=False)),
    "Qwen3-30B-A3B": (30_532_122_624, QWEN3 | dict(
        decoder_sparse_step=1, hidden_size=2048, intermediate_size=6144, max_window_layers=48,
        mlp_only_layers=[], model_type="qwen3_moe", moe_intermediate_size=768, norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
        num_key_value_heads=4, output_router_logits=False, router_aux_loss_coef=0.001,
        tie_word_embeddings=False)),
    "Gemma 3 1B": (999_885_952, dict(
        attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=None, bos_token_id=2,
        eos_token_id=[1, 106], final_logit_softcapping=None,
        head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=1152,
        initializer_range=0.02, intermediate_size=6912, max_position_embeddings=32768,
        model_type="gemma3_text", num_attention_heads=4, num_hidden_layers=26,
        num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, torch_dtype="bfloat16", vocab_size=262144)),
    # What these two leave out of text_config has the defaults of transformers' class.
    "Gemma 3 4B": (3_880_263_168, GEMMA | dict(text_config=dict(
        hidden_size=2560, intermediate_size=10240, model_type="gemma3_text", num_hidden_layers=34,
        rope_scaling=SCALED, sliding_window=1024))),
    "Gemma 3 27B": (27_009_346_304, GEMMA | dict(text_config=dict(
        head_dim=128, hidden_size=5376, intermediate_size=21504, model_type="gemma3_text",
        num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16,
        query_pre_attn_scalar=168, rope_scaling=SCALED, sliding_window=1024))),
}  # fmt: skip


def inspected(folder, raw, capsys):
    """(config as printed, last line) of `python -m full inspect` on a config alone."""
    (folder / "config.json").write_text(json.dumps(raw))
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr()
    *config, last = printed.out.splitlines()
    assert not printed.err and json.loads("\n".join(config))
    return last


@pytest.mark.parametrize("name", PUBLISHED)
def test_inspect_counts_the_parameters_of_a_published_config(name, tmp_path, capsys):
    count, raw = PUBLISHED[name]
    last = inspected(tmp_path, raw, capsys)
    assert last.startswith(f"{count:,} parameters")
    assert f"; no weights: {tmp_path} has no model.safetensors" in last

    # Of 30B with 128 experts a token meets 8, which the name rounds to 3B.
    active = re.search(r"([\d,]+) of them for one token", last)
    assert bool(active) == ("A3B" in name)
    assert not active or 3.3e9 < int(active[1].replace(",", "")) < 3.4e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name):
    """Fields that are left out are filled in by transformers' classes, and then read by ours."""
    transformers = pytest.importorskip("transformers", reason="see tests/requirements.txt")
    _, raw = PUBLISHED[name]
    given = {field: value for field, value in raw.items() if field != "model_type"}
    theirs = transformers.AutoConfig.for_model(raw["model_type"], **given)
    ours = ModelConfig.from_hf(raw)
    assert ModelConfig.from_hf(theirs.to_dict()) == ours

    # The text model alone does not know the ends of turns that stand outside.
    text_config = ModelConfig.from_hf(theirs.get_text_config().to_dict())
    assert dataclasses.replace(text_config, eos_token_id=ours.eos_token_id) == ours


def rope(theta, **scaled):
    return {"rope_type": "default", "rope_theta": theta} | scaled


LLAMAS = {  # name -> (head_dim, type of every layer, window, RoPE, ends)
    "SmolLM2-135M": (64, FULL, None, rope(1e5), (0,)),
    "TinyLlama-1.1B": (64, FULL, None, rope(1e4), (2,)),
    "Llama-2-7b": (128, FULL, None, rope(1e4), (2,)),
    "Llama-3.2-1B": (64, FULL, None, rope(5e5, **LLAMA3), (128001,)),
    "Mistral-7B-v0.1": (128, SLIDING, 4096, rope(1e4), (2,)),
    "Mistral-7B-v0.3": (128, FULL, None, rope(1e6), (2,)),
}  # fmt: skip
MEANT = {name: dict(
    head_dim=width, layer_types=(kind,) * PUBLISHED[name][1]["num_hidden_layers"], mlp_bias=False,
    sliding_window=window, rope_parameters={kind: turns}, eos_token_id=ends, qkv_bias=False,
    o_bias=False, qk_norm=False, rms_norm_eps=1e-5,
) for name, (width, kind, window, turns, ends) in LLAMAS.items()}  # fmt: skip
MEANT["Gemma 3 4B"] = dict(
    model_type="gemma3_text", vocab_size=262208, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, layer_types=((SLIDING,) * 5 + (FULL,)) * 5 + (SLIDING,) * 4,
    rope_parameters={FULL: rope(1e6, **SCALED), SLIDING: rope(1e4)}, tie_word_embeddings=True,
    query_pre_attn_scalar=256, eos_token_id=(1, 106), max_position_embeddings=131072,
)  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", MEANT)
def test_what_a_published_config_says_and_leaves_out(name):
    config = ModelConfig.from_hf(PUBLISHED[name][1])
    assert {field: getattr(config, field) for field in MEANT[name]} == MEANT[name]
    assert ModelConfig.from_hf(config.to_hf()) == config  # in the spelling of transformers 5
