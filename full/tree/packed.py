"""Runs a packed tree in one call: attention along its paths, and the scores of its edges.

In addition to (1) to (5) of tree_attention.py:

    (6)  log softmax(W h / temperature) in (2), entropies of the same distribution, and the values
         of a critic; f_i may depend on all of them

micro_batches.py runs the whole tree in one graph. The attention of every chunk of
chunks.py is here too. Attention has sum_t (depth_t + 1) pairs, where the flat batch has
sum_i L_i (L_i + 1) / 2.

Letters:  N tokens of the tree   n queries, m keys   H query heads   G key heads   e edges to score;
an edge has its child's index   K targets that point to edges   R sequences   T = L - 1 of the
longest   U groups of W queries, each with Y keys

References: Tree Training arXiv:2511.00413; Prefix Grouper arXiv:2506.05433, which shares one
prefix; FlashMask arXiv:2410.01359.
"""

import math

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from full.attention.attend import attend, checked_scale, not_compiled
from full.attention.masks import Keys, Queries, visible_pairs


# Short paths: a tree of many short segments would be very many boxes of few pairs each. Instead,
# groups of WIDTH queries attend, each to all keys that one of them sees. It is 2 to 4 times as fast
# as boxes for paths of 17 to 48 tokens, and no faster beyond SHORT.
WIDTH = 32

SHORT = 128  # keys that a query sees

GATHERED = 1 << 22  # numbers that a layer gathers, of keys and as many of values: bounds memory


@not_compiled
def attend_short(q, k, v, mask, *, scale=None):
    """Compute (out,) of `attend`, in groups of queries where all of them see few keys: (1)."""
    scale = checked_scale(q, k, v, mask, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = None
    if q.device.type == "cpu" and len(q) == 1:  # measured on a CPU only
        if ("groups", wide) not in mask.cache:
            mask.cache["groups", wide] = groups_of_queries(mask, wide)
        groups = mask.cache["groups", wide]
    if groups is None or groups[0].numel() * k.shape[1] * k.shape[3] > GATHERED:
        return attend(q, k, v, mask, scale=scale)[:1]
    return (grouped_attention(q, k, v, *groups, scale),)


def groups_of_queries(mask, dtype):
    """Return keys_UY, which keys each group of WIDTH queries looks at, and the bias (U, 1, W, Y).

    None: the mask has PAD, or a query that sees more than SHORT keys.
    """
    index, rows, position = (x[0] for x in mask.queries)
    _, start, end, key_position = (x[0] for x in mask.keys)
    if not len(index) or not rows.all() or (start >= end).any():
        return None
    sees_from = np.bincount(start, minlength=index[-1] + 2)
    sees_from[: end.max() + 1] -= np.bincount(end)[: len(sees_from)]
    if sees_from.cumsum()[index].max() > SHORT:
        return None

    # Tokens of 5 6 7 / 5 6 8 / 5 9 in groups of 3; the last group repeats its last query:
    #
    #     index    0 1 2 3 4    queries  0 1 2    keys  0 1 2 .
    #     token    5 6 7 8 9             3 4 4          0 1 3 4
    rows_UW = np.arange(-(-len(index) // WIDTH) * WIDTH).clip(max=len(index) - 1).reshape(-1, WIDTH)
    seen = [(start <= index[w[-1]]) & (index[w[0]] < end) for w in rows_UW]
    seen = [np.flatnonzero(x) for x in seen]
    length_U1 = np.array([[len(x)] for x in seen])
    is_key_UY = np.arange(length_U1.max()) < length_U1
    keys_UY = np.zeros(is_key_UY.shape, np.int64)
    keys_UY[is_key_UY] = np.concatenate(seen)
    queries = Queries(index[rows_UW], rows[rows_UW], position[rows_UW])
    keys = Keys(keys_UY, start[keys_UY], end[keys_UY], key_position[keys_UY])
    sees_UWY = visible_pairs(queries, keys, mask.window) & is_key_UY[:, None]  # (1)
    bias_UWY = torch.zeros(sees_UWY.shape, dtype=dtype)
    bias_UWY.masked_fill_(torch.from_numpy(~sees_UWY), -math.inf)
    return torch.from_numpy(keys_UY), bias_UWY[:, None]


def grouped_attention(q_1HnD, k_1GmD, v_1GmD, keys_UY, bias_U1WY, scale):
    """Compute attention of all groups of `groups_of_queries` in one call of torch's."""
    # NUMERICS: scores, softmax and sums are in float32 or better, as in boxes. Pinned by
    # tests/full/test_tree.py::test_tree_attention_in_low_precision_is_as_good_as_plain_torch.
    n = q_1HnD.shape[2]
    q_nHD = q_1HnD[0].transpose(0, 1).to(bias_U1WY.dtype)
    q_UWHD = nn.functional.pad(q_nHD, (0, 0, 0, 0, 0, -n % WIDTH)).unflatten(0, (-1, WIDTH))

    # Queries are in order already. Keys are gathered: each group needs the path above it too.
    def gathered(x_1GmD):
        x_mGD = x_1GmD[0].transpose(0, 1).to(bias_U1WY.dtype)
        x_UYGD = x_mGD.index_select(0, keys_UY.flatten()).unflatten(0, keys_UY.shape)
        return x_UYGD.transpose(1, 2)

    out_UHWD = scaled_dot_product_attention(
        q_UWHD.transpose(1, 2), gathered(k_1GmD), gathered(v_1GmD), bias_U1WY, scale=scale,
        enable_gqa=True,
    )  # fmt: skip
    out_nHD = out_UHWD.transpose(1, 2).flatten(0, 1)[:n]
    return out_nHD.transpose(0, 1)[None].to(q_1HnD.dtype)


# Scores of edges --------------------------------------------------------------------------------
# For: which tokens the head runs at, and where sequences find their scores.


def wanted_edges(trie, masks=None):
    """Return the edges to score (e,), ascending, and which of them each wanted target is (K,).

    masks: a bool (L_i - 1,) for each sequence, of its targets tokens[1:]. Default: all are wanted.
        Targets come sequence after sequence. Those of several may be one token of the tree, which
        is scored once.

    Raises ValueError unless each sequence has a mask, of its shape.
    """
    # Targets are all tokens of a path but the first: 6 7, 6 8 and 9 in 5 6 7 / 5 6 8 / 5 9.
    targets = np.delete(trie.paths.numpy(), trie.begins.numpy())
    if masks is not None:
        if len(masks) != len(trie.lengths):
            raise ValueError(f"got {len(masks)} masks for {len(trie.lengths)} sequences")
        masks = [np.asarray(x.cpu() if torch.is_tensor(x) else x, bool) for x in masks]
        for i, (mask, length) in enumerate(zip(masks, trie.lengths.tolist(), strict=True)):
            if mask.shape != (length - 1,):
                raise ValueError(f"mask {i}: expected shape {(length - 1,)}, got {mask.shape}")
        targets = targets[np.concatenate([np.zeros(0, bool), *masks])]
    is_wanted_N = np.zeros(len(trie), bool)
    is_wanted_N[targets] = True
    return np.flatnonzero(is_wanted_N), (is_wanted_N.cumsum() - 1)[targets]


def scores_of(model, hidden_nM, targets_n, temperature) -> tuple:
    """Return scores of some targets, (n,) each, in this order, given the states before them.

    Log-probs and entropies; of a critic, values.
    """
    if model.logprobs is None:
        return (model.values(hidden_nM),)
    return tuple(model.logprobs(hidden_nM, targets_n, temperature=temperature))  # (2), (6)


def score_edges(model, hidden_nM, first, trie, edges_e, temperature):
    """Return the scores of some edges, (e,) each, as `scores_of` does.

    hidden_nM: the states of the tokens first .. first + n - 1, which include the edges' parents.
    """
    # The head is the largest matmul, so it runs at the parents of the wanted edges and nowhere
    # else. A token at a fork is used once per child:
    #
    #     5 6 7 / 5 6 8 / 5 9      edges    1 2 3 4      edge 2: token 7 given the state of 6
    #                              parents  0 1 1 0      edge 3: token 8 given the same state
    scored_eM = hidden_nM[(trie.parent[edges_e] - first).to(hidden_nM.device)]
    targets_e = trie.tokens[edges_e].to(hidden_nM.device)
    return scores_of(model, scored_eM, targets_e, temperature)


def path_edges(trie, sequences, device):
    """Return the edges of some paths, (R, T), and True where an entry is inside its path.

    Sequences 5 6 7 and 5 9 of the tree 5 6 7 8 9 have the edges 1 2 and 4. Edge 0 fills up:

        edges_RT  1 2      inside_RT  x x
                  4 0                 x .
    """
    paths = [trie.path(i)[1:] for i in sequences]
    edges_RT = pad_sequence(paths, batch_first=True, padding_value=-1).to(device)
    return edges_RT.clamp(min=0), edges_RT >= 0
