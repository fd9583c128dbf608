"""The full edition, `full/`: a plan, a mode of the weights and packed rows for a tiny model.

    python conformance/parallel.py conformance/subjects/full_edition.py
    PLAN="(attn:d2t2|ffn:e2t2)" MODE=fsdp MODEL=qwen3_moe python conformance/parallel.py \
        conformance/subjects/full_edition.py --ranks 4

Run it in the repository's root. Without PLAN, 2 ranks run t2, and 4 ranks d2c2 with ZeRO-1.
"""

import math
import os

import numpy as np
import torch

from full.attention.masks import Mask
from full.attention.ring import indices
from full.learn.packing import PackedBatches
from full.model.parallelize import parallelize
from full.ranks.optimizer import LocalOptimizer, clip_grad_norm, reduce_gradients
from full.ranks.places import full
from full.ranks.plans import Grid, Plan
from full.tiny import tiny_model
from full.tree.forest import MaskedAttention

MODEL, PLAN = os.environ.get("MODEL", "gemma3_text"), os.environ.get("PLAN")
PLANS = {1: "d1", 2: "t2", 4: "d2c2"}
PLANS = {world: Plan.parse(PLAN or text) for world, text in PLANS.items()}
MODE = os.environ.get("MODE", "zero1")
MESH = {world: dict(p=plan.pp, d=plan.dp, c=plan.cp, t=plan.tp) for world, plan in PLANS.items()}
SETTINGS = dict(mesh=MESH)


def build():
    lengths = 9, 5, 7, 2, 6, 8, 3
    sequences = [torch.randint(53, (length,)).tolist() for length in lengths]
    masks = [(torch.rand(length - 1) < 0.7).tolist() for length in lengths]
    return tiny_model(MODEL), (sequences, masks)


def attention(document_1S, group):
    # A token's parent is the token before it, of the same document.
    document_S = np.asarray(document_1S[0])
    follows_S = (np.diff(document_S, prepend=-1) == 0) & (document_S >= 0)
    parent_S = np.where(follows_S, np.arange(len(document_S)) - 1, -1)
    return MaskedAttention(Mask.documents(doc_ids=document_1S), parent_S, group)


def shard(model, mesh):
    plan = PLANS[mesh.size()]
    return parallelize(model, plan, device_mesh=Grid(plan), attention=attention, mode=MODE)


def optimizer(model, **adamw):
    zero = MODE == "zero1"
    return LocalOptimizer(model, lambda given: torch.optim.AdamW(given, **adamw), zero=zero)


def gather(model, name, x):
    return full(x, model.part.places[name])


def clip(model, max_norm):
    # The definition divides by the norm + 1e-6, as torch does, and the folder by the norm.
    norm = clip_grad_norm(model, math.inf)
    clip_grad_norm(model, (max_norm * norm / (norm + 1e-6)).item())
    return norm


def loss(model, batch):
    sequences, masks = batch
    total = 0
    for tokens, mask in zip(sequences, masks, strict=True):
        logprobs_TV = model(torch.tensor([tokens]))[0, :-1].log_softmax(-1)
        total -= logprobs_TV[range(len(mask)), tokens[1:]][torch.tensor(mask)].sum()
    return total / sum(map(sum, masks))


def rank_loss(model, batch):
    plan, grid = model.part.plan, model.part.grid
    sequences, masks = (x[grid.group["d"].rank() :: plan.dp] for x in batch)
    count = sum(map(sum, batch[1]))
    batches = PackedBatches(model, attention=attention, indices=indices, micro_tokens=12)

    def loss_fn(indices, mask_BT, logprobs_BT, entropies_BT):
        return -logprobs_BT.sum() / count

    total = batches.forward_backward(sequences, masks, loss_fn)
    reduce_gradients(model)
    return total
