"""PEFT's LoRA on a model that transformers has sharded by its `tp_plan`, for a tiny Llama.

    python conformance/parallel.py conformance/subjects/peft_tp.py
    MODEL=qwen3 python conformance/parallel.py conformance/subjects/peft_tp.py

MODEL is another model_type of transformers. TARGETS names the modules that get an adapter.
"""

import os

import peft
import torch
import transformers_tp as base
from transformers_tp import MESH, TOLERANCE, clip, loss  # noqa: F401, what the kit reads

TARGETS = os.environ.get("TARGETS", "q_proj v_proj o_proj gate_proj down_proj").split()
CONFIG = dict(
    r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False,
    use_rslora=bool(int(os.environ.get("RSLORA", 0))), use_dora=bool(int(os.environ.get("DORA", 0))),
)


def build():
    model, batch = base.build()
    return peft.get_peft_model(model, peft.LoraConfig(**CONFIG)), batch


def shard(model, mesh):
    # The base is saved and loaded under the plan, then gets adapters with the weights of model's.
    whole = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n or "magn" in n}
    sharded = base.shard(model.unload(), mesh)
    torch.manual_seed(1)
    sharded = peft.get_peft_model(sharded, peft.LoraConfig(**CONFIG)).double()
    missing = peft.set_peft_model_state_dict(sharded, {n.replace(".default", ""): x for n, x in whole.items()})
    assert not missing.unexpected_keys, missing.unexpected_keys
    return sharded.eval()
