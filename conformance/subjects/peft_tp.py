"""PEFT's LoRA on a tiny Llama that transformers has split by its `tp_plan`.

    python conformance/parallel.py conformance/subjects/peft_tp.py
    TARGETS=down_proj python conformance/parallel.py conformance/subjects/peft_tp.py --ranks 2

TARGETS names the modules that get an adapter. MODEL is another model_type of transformers.
"""

import os

import peft
import transformers_tp
from transformers_tp import SETTINGS, clip, loss  # noqa: F401, what the kit reads

TARGETS = os.environ.get("TARGETS", "q_proj k_proj v_proj gate_proj up_proj").split()
CONFIG = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)


def build():
    model, batch = transformers_tp.build()
    return peft.get_peft_model(model, CONFIG), batch


def shard(model, mesh):
    # The base is loaded under the plan, and gets an adapter. The adapter's weights are the model's.
    weights = peft.get_peft_model_state_dict(model)
    split = transformers_tp.shard(model.unload(), mesh)
    split = peft.get_peft_model(split, CONFIG, autocast_adapter_dtype=False)
    peft.set_peft_model_state_dict(split, weights)
    return split.eval()
