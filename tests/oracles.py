"""Attention as one writes it on a blackboard: what the tests hold every other form against."""

import math

import torch


def plain_attention(q, k, v, visible, *, scale=None, softcap=None):
    """Return out (B, H, q, D) and lse (B, H, q), with all scores in memory.

    q: (B, H, q, D). k, v: (B, G, k, D). Each key head serves H / G consecutive query heads.
    visible: bool, broadcastable to (B, H, q, k). True where query i sees key j.
    scale: factor of the scores. Default: D ** -0.5.
    softcap: c of c tanh(score / c). Default: none.

    A query that sees no key has out 0, lse -inf, and gradients of 0.
    """
    # The query heads of a key head get a dimension of their own, c, so that no key is copied.
    width = q.shape[-1]
    q = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bgcqd,bgkd->bgcqk", q, k).flatten(1, 2)
    scores = scores * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    # A blind query pretends that it sees every key with a score of 0. Both results are overwritten,
    # which also cuts their gradients.
    visible = visible.expand_as(scores)
    blind = ~visible.any(-1)
    scores = scores.masked_fill(~visible, -math.inf).masked_fill(blind[..., None], 0.0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(blind[..., None], 0.0)
    out = torch.einsum("bgcqk,bgkd->bgcqd", weights.unflatten(1, (k.shape[1], -1)), v)
    return out.flatten(1, 2), lse.masked_fill(blind, -math.inf)
