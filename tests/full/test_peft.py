"""Against PEFT: it reads our adapters, and computes with them what we do."""

import functools

import pytest
import torch
from conftest import installed
from test_ranks import TASK
from test_run import good

from full.__main__ import main
from full.evaluate import load_policy
from full.model.config import Lora
from full.model.hf import load_hf, save_factors, save_hf
from full.model.lora import add_factors, is_factor
from full.model.transformer import Transformer
from full.run.config import LORA_TARGETS
from full.tiny import tiny_model


@pytest.mark.parametrize("family, targets", [
    ("qwen2", LORA_TARGETS), ("qwen3_5_text", "in_proj_qkv,in_proj_a,out_proj,q_proj")])
def test_export_merges_and_an_adapter_is_read_by_peft(process_group, tmp_path, family, targets):
    """A dense model in float64: transformers' logits of the export, and peft's of the adapter."""
    # Imported here: peft takes longer than torch, and every process of tests imports this file.
    peft, transformers = installed("peft", "transformers")

    folder = tmp_path / "dense"
    save_hf(tiny_model(family, vocab_size=12, eos_token_id=(1,)), folder)
    flags = f"{TASK} --model {folder} --lora-rank 3 --lora-targets {targets}"
    small = "--steps 2 --lr 0.02 --entropy-coef 0.1 --prompts 2 --group 4"
    good(tmp_path, f"{flags} {small} --out {tmp_path}/run")
    model, _ = load_policy(tmp_path / "run")
    tokens = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(0))
    truth = model(tokens)
    assert type(model) is Transformer
    assert (truth - load_hf(folder)(tokens)).abs().max() > 1e-3

    load = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float64)  # fmt: skip
    # transformers has norms and RoPE in float32, so it is near to itself and less near to us.
    whole = load(tmp_path / "run" / "hf")(tokens).logits
    assert (whole - truth).abs().max() < 1e-5

    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/adapter", "--adapters"]) == 0
    theirs = peft.PeftModel.from_pretrained(
        load(folder), tmp_path / "adapter", autocast_adapter_dtype=False)  # fmt: skip
    assert (theirs(tokens).logits - whole).abs().max() < 1e-6


def test_an_export_is_the_stored_base_and_the_factors(process_group, tmp_path):
    """Though the run has rounded the base: what peft makes of the base and the adapter."""
    peft, transformers = installed("peft", "transformers")
    folder, run = tmp_path / "dense", tmp_path / "run"
    save_hf(tiny_model("qwen2", dtype=torch.float32, vocab_size=12, eos_token_id=(1,)), folder)
    flags = f"{TASK} --dtype float32 --model {folder} --lora-rank 3 --compute-dtype bfloat16"
    small = "--steps 2 --lr 0.02 --entropy-coef 0.1 --prompts 2 --group 4"
    good(tmp_path, f"{flags} {small} --out {run}")
    for target in ("merged", "adapter --adapters"):
        assert main(f"export {run} {tmp_path}/{target}".split()) == 0

    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(0))
    base = load(folder, dtype=torch.float32)(tokens).logits
    theirs = peft.PeftModel.from_pretrained(load(folder, dtype=torch.float32), tmp_path / "adapter")
    truth = theirs(tokens).logits
    effect = (truth - base).abs().max()
    for directory in (run / "hf", tmp_path / "merged"):
        whole = load(directory)
        assert whole.dtype == torch.float32
        assert (whole(tokens).logits - truth).abs().max() < 1e-5 * effect
    sampled, _ = load_policy(run, dtype="float32")  # by which the run has sampled
    assert (sampled(tokens) - truth).abs().max() > 1e-3 * effect


@pytest.mark.parametrize("more", ["", ",lm_head"])
def test_an_adapter_of_a_multimodal_base_is_read_by_peft(process_group, tmp_path, more):
    """The language model is a part of it, and its vision tower has a q_proj too."""
    peft, transformers = installed("peft", "transformers")
    text = dict(
        vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, sliding_window_pattern=2,
        tie_word_embeddings=not more)  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                  image_size=16, patch_size=8)  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision,
                                       mm_tokens_per_image=4, tie_word_embeddings=not more)
    folder = tmp_path / "base"
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    load = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float64)
    tokens = torch.randint(12, (2, 9))

    # Every tensor has a place, and none is added to the vision tower.
    targets = tuple((LORA_TARGETS + more).split(","))
    model = add_factors(load_hf(folder, dtype=torch.float64), Lora(3, 6.0, targets), torch.float64)
    for name, p in model.named_parameters():
        if is_factor(name):
            torch.nn.init.normal_(p, std=0.2)
    save_factors(model, tmp_path / "adapter", f"{folder}")
    theirs = peft.PeftModel.from_pretrained(
        load(), tmp_path / "adapter", autocast_adapter_dtype=False)  # fmt: skip
    assert sum("lora_" in name for name, _ in theirs.named_parameters()) == sum(
        is_factor(name) for name, _ in model.named_parameters())
    assert (load()(tokens).logits - model(tokens)).abs().max() > 1e-2
    assert (theirs(tokens).logits - model(tokens)).abs().max() < 1e-5
