"""A model that starts in parts: made on the meta device, split, allocated, filled.

Nothing whole is ever on a rank: the bytes of its live tensors are counted, not the process's.
"""

import weakref

import pytest
import torch
import torch.distributed as dist
from conftest import shortened
from measure_parallel import read_cases
from test_ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

import models
from parallel import Grid, Plan, full, materialise, parallelize, part_of

CASES = read_cases("""
    t2 qwen3, t2 llama, t2 gemma3_text, d2 qwen3 fsdp, d2 qwen3 fsdp offload, d2 qwen2 zero1,
    p2 qwen3, p2 gemma3_text zbv, d2e2 qwen3_moe, d4 qwen3 fsdp, d4e4 qwen3_moe, d2t2 qwen3 fsdp,
    d2p2 qwen3_moe fsdp
""")
# Wide enough that a part is more than one tensor; the vocabulary is the largest.
SHAPE = dict(vocab_size=512, hidden_size=64, num_hidden_layers=4, initializer_range=0.1)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made in here had at once, storages counted once."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                self.count(x)
        return out

    def count(self, x):
        storage = getattr(x, "_local_tensor", x).untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.most = max(self.most, sum(self.live.values()))


def shape_of(family):
    more = dict(num_experts=8) if family == "qwen3_moe" else {}
    if family == "llama":
        more = dict(qkv_bias=True, o_bias=True, mlp_bias=True)
    if family == "gemma3_text":
        more = dict(layer_types=["sliding_attention", "full_attention"] * 2)
    return models.tiny(family, **SHAPE, **more)


def _start(rank, name, directory):
    """(a rank's part of the weights in bytes, the most that were live, the largest tensor), and
    the largest difference from the whole model's weights, drawn and loaded."""
    plan, family, options = CASES[name]
    shape = shape_of(family)
    truth = models.Transformer(shape).double().init_weights(3)
    if rank == 0:
        models.save_hf(truth, directory)
    dist.barrier()

    plan = Plan.parse(plan)
    grid = Grid.make(plan)
    with LiveBytes() as counted:
        with torch.device("meta"):
            whole = models.Transformer(shape).double()
            model = models.Transformer(shape).double()
        model = parallelize(model, plan, device_mesh=grid, **options)
        materialise(model)
        for part in part_of(model).stages:
            models.draw_weights(part, 3, whole)
    found = [_apart(model, truth)]

    for part in part_of(model).stages:
        for p in part.parameters():
            getattr(p, "_local_tensor", p.detach()).fill_(7.0)
        models.load_hf(directory, model=part, whole=whole)
    found.append(_apart(model, truth))
    own = {getattr(p, "_local_tensor", p) for p in model.parameters()}
    largest = max(p.numel() * 8 for p in whole.parameters())
    return sum(p.numel() * 8 for p in own), counted.most, largest, found


@torch.no_grad()
def _apart(model, truth):
    whole = dict(truth.named_parameters())
    return max((full(p) - whole[name]).abs().max().item() for name, p in model.named_parameters())


@pytest.mark.parametrize("name", shortened(CASES, "d2 qwen3 fsdp", "p2 gemma3_text zbv"))
def test_a_rank_holds_its_part_and_the_weights_are_those_of_one_process(tmp_path, name):
    plan, family, _ = CASES[name]
    world = Plan.parse(plan).world
    for part, most, largest, apart in ranks(tmp_path, world, _start, name, tmp_path / "hf"):
        assert apart == [0.0, 0.0]
        assert part <= most <= 1.1 * (part + largest)
    # That fewer bytes than the whole were counted is of use only where a part is less than it.
    whole = sum(p.numel() * 8 for p in models.Transformer(shape_of(family)).parameters())
    assert part < 0.7 * whole or name == "d2 qwen2 zero1" or "e" in plan
