"""unsloth-zoo: grpo_compute_loss, and with CHUNKS its autograd Function around it.

    SOURCES=DIR python conformance/loss.py conformance/subjects/unsloth.py:loss
    SOURCES=DIR CHUNKS=1 python conformance/loss.py conformance/subjects/unsloth.py:loss
"""

import os
import sys
from types import ModuleType

from take import take

for NAME in ("unsloth_zoo", "unsloth_zoo.temporary_patches", "unsloth_zoo.temporary_patches.utils"):
    sys.modules[NAME] = ModuleType(NAME)
    sys.modules[NAME].__path__ = []
sys.modules[NAME].torch_compile_with_fallback = lambda **_: lambda function: function
U = take("unsloth-zoo/unsloth_zoo/rl_replacements.py", "grpo_compute_loss", "UnslothEfficientGRPO",
         torch_compile_options={})  # fmt: skip
SETTINGS = dict(clip_low=0.2, clip_high=0.28, ranks="mean", equal_rows=True, count_empty=True)
CHUNKS = int(os.environ.get("CHUNKS", "0"))


def loss(batch):
    """Call the loss with the options that the trainer gives it."""
    c = batch.settings
    kinds = dict(token_mean="dapo", sequence_mean="grpo", constant="dr_grpo", sequence_sum="luspo")
    kind = kinds[c["aggregation"]]
    kind = c["objective"] if c["objective"] in ("cispo", "sapo") else kind
    options = dict(
        loss_type=kind, epsilon_low=c["clip_low"], epsilon_high=c["clip_high"] + (kind == "cispo"),
        max_completion_length=c["max_new_tokens"], delta=c["dual_clip"] or None,
        num_items_in_batch=batch.tokens, num_processes=batch.ranks,
        importance_sampling_level="sequence" if c["objective"] == "gspo" else "token",
        current_gradient_accumulation_steps=batch.micro_batches,
        sapo_temperature_pos=c["tau_pos"], sapo_temperature_neg=c["tau_neg"])  # fmt: skip
    mask, A, beta = batch.mask.long(), batch.advantage[:, 0], c["kl_coef"]
    if CHUNKS:
        given = (batch.lp, batch.old, batch.ref, None, None, mask, mask, A, beta, None)
        return U.UnslothEfficientGRPO.apply(*given, CHUNKS, options)[0]
    given = (batch.ref, batch.lp, batch.old, None, mask, mask, beta, A)
    return U.grpo_compute_loss(*given, **options)[0]
