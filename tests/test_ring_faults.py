"""Eight faults, planted one at a time in a copy of ring_attention.py, and each is seen."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import shortened
from oracles import plain_attention
from test_ranks import ranks

import ring_attention as sound

SOURCE = Path(sound.__file__).read_text()
VOID = """void = (s_bGrj == -math.inf).all(-1, keepdim=True)
    p_bGrj = torch.exp(torch.where(void, 0.0, s_bGrj) - lse_bGr1.where(~void, 0.0))
    dp"""
SLICE = "(wide.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None)"
FAULTS = {  # name: [(a passage of the file, what stands there instead)]
    "swapped dK and dV": [
        ("        # Gradients are plain sums over tiles", "        dk, dv = dv, dk\n        #")
    ],
    "dropped last hop": [("hops.max(initial=0)) + 1\n", "hops.max(initial=0))\n")],
    "P = 1 on masked rows": [
        ("    dout = dout.masked_fill(blind_BHq[..., None], 0.0)\n", ""),
        ("    lse = lse.masked_fill(blind_BHq, 0.0)\n", ""),
        ("p_bGrj = torch.exp(s_bGrj - lse_bGr1)  # (3)\n    dp", VOID),
    ],
    "slice-only gather": [("AllGather.backward(ctx, wide)", SLICE)],
    "window off by one": [("- position_B1k < window", "- position_B1k <= window")],
    "lse in bf16": [("(q, k, v, out, lse)\n", "(q, k, v, out, lse.bfloat16().to(lse.dtype))\n")],
    "wrong GQA mapping": [("unflatten(1, (g, -1))", "unflatten(1, (-1, g)).transpose(1, 2)")],
    "stale K and V in the backward": [
        (".add_(part_2BgkD)\n        block_2BgkD = next_2BgkD\n", ".add_(part_2BgkD)\n")
    ],
}


def _masks(module):
    """A window, and blocks with PAD: rows that see nothing on every rank."""
    valid_BS = torch.arange(24)[None] % 5 != 0
    return [module.Mask.causal(24, window=7), module.Mask.blocks(torch.arange(24) // 4, valid_BS)]


def _largest_error(rank, path):
    """Of out, dq, dk, dv over masks and backends: of the planted file, against the oracle."""
    spec = importlib.util.spec_from_file_location("planted", path)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    worst, gen = 0.0, torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, h, 24, 8, generator=gen, dtype=torch.float64) for h in (6, 2, 2, 6)]
    for mask, own in zip(_masks(sound), _masks(planted), strict=True):
        leaves = [x.clone().requires_grad_() for x in drawn[:3]]
        out, _ = plain_attention(*leaves, mask.dense())
        truth = [out, *torch.autograd.grad(out, leaves, drawn[3])]
        for backend in ("math", "fused"):
            leaves = [x.clone().requires_grad_() for x in drawn[:3]]
            parts = [planted.shard(x, dim=2) for x in leaves]
            out = planted.ring_attention(*parts, mask=own, backend=backend)
            out = planted.unshard(out, dim=2, length=24)
            found = [out, *torch.autograd.grad(out, leaves, drawn[3] / 3)]
            for grad in found[1:]:
                dist.all_reduce(grad)
            errors = [
                sound.relative(a.detach(), b.detach()) for a, b in zip(found, truth, strict=True)
            ]
            worst = max([worst, *(math.inf if math.isnan(x) else x for x in errors)])
    return worst


def _planted(folder, fault):
    text = SOURCE
    for old, new in FAULTS.get(fault, []):
        assert old in text, f"the fault has lost its place: {old}"
        text = text.replace(old, new)
    path = folder / "planted.py"
    path.write_text(text)
    return path


def test_without_a_fault_the_comparison_is_exact(tmp_path):
    worst = ranks(tmp_path, 3, _largest_error, _planted(tmp_path, None))
    assert max(worst) < 1e-12


@pytest.mark.parametrize("fault", shortened(FAULTS, *list(FAULTS)[:5]))
def test_the_suite_catches_eight_planted_faults(tmp_path, fault):
    worst = ranks(tmp_path, 3, _largest_error, _planted(tmp_path, fault))
    assert max(worst) > 1e-4
