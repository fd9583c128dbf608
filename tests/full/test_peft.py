"""Against PEFT: it reads our adapters, and computes with them what we do."""

import functools

import pytest
import torch
from conftest import installed
from released import multimodal_gemma
from test_ranks import TASK
from test_run import good

from full.__main__ import main
from full.evaluate import load_policy
from full.model.config import Lora
from full.model.hf import load_hf, save_factors, save_hf
from full.model.lora import add_factors, is_factor
from full.run.config import LORA_TARGETS
from full.tiny import tiny_model


ROUNDED = "--dtype float32 --compute-dtype bfloat16"  # a run that samples by a rounded base


@pytest.mark.parametrize("family, targets, more", [
    ("qwen2", LORA_TARGETS, ""), ("qwen2", LORA_TARGETS, ROUNDED),
    ("qwen3_5_text", "in_proj_qkv,in_proj_a,out_proj,q_proj", "")])
def test_an_export_is_what_peft_makes_of_the_stored_base_and_the_adapter(
    process_group, tmp_path, family, targets, more
):
    # Imported here: peft takes longer than torch, and every process of tests imports this file.
    peft, transformers = installed("peft", "transformers")
    folder, run = tmp_path / "dense", tmp_path / "run"
    dtype = torch.float32 if more else torch.float64
    save_hf(tiny_model(family, dtype=dtype, vocab_size=12, eos_token_id=(1,)), folder)
    flags = f"{TASK} --model {folder} --lora-rank 3 --lora-targets {targets} {more}"
    small = "--steps 2 --lr 0.02 --entropy-coef 0.1 --prompts 2 --group 4"
    good(tmp_path, f"{flags} {small} --out {run}")
    for target in ("merged", "adapter --adapters"):
        assert main(f"export {run} {tmp_path}/{target}".split()) == 0

    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(0))
    base = load(folder, dtype=dtype)(tokens).logits
    theirs = peft.PeftModel.from_pretrained(
        load(folder, dtype=dtype), tmp_path / "adapter", autocast_adapter_dtype=False)
    truth = theirs(tokens).logits
    effect = (truth - base).abs().max()
    assert effect > 1e-3
    for directory in (run / "hf", tmp_path / "merged"):
        whole = load(directory)
        assert whole.dtype == dtype
        assert (whole(tokens).logits - truth).abs().max() < (1e-5 * effect if more else 1e-6)
    sampled, _ = load_policy(run, dtype="float32" if more else "")
    error = (sampled(tokens) - truth).abs().max()  # transformers has norms and RoPE in float32
    assert error > 1e-3 * effect if more else error < 1e-5


@pytest.mark.parametrize("more", ["", ",lm_head"])
def test_an_adapter_of_a_multimodal_base_is_read_by_peft(process_group, tmp_path, more):
    """The language model is a part of it, and its vision tower has a q_proj too."""
    peft, transformers = installed("peft", "transformers")
    folder = tmp_path / "base"
    multimodal_gemma(vocab_size=12, tie_word_embeddings=not more).save_pretrained(folder)
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
