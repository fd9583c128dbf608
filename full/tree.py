"""The packed tree in one call: adds masks, critics and a ring to `tree_attention.py`'s.

In addition to (1) to (5) of tree_attention.py:

    (6)  log softmax(W h / temperature) in (2), entropies of the same distribution, and the values
         of a critic; f_i may depend on all of them

`--tree sparse` runs the whole tree in one graph, on one rank or on several. The attention of every
chunk of chunks.py is here too. Attention has sum_t (depth_t + 1) pairs, where the flat batch has
sum_i L_i (L_i + 1) / 2.

Letters:  N tokens of the tree   n tokens of one call   p tokens on the path above   m = p + n keys
H query heads   G key heads   D head size   C = 2 or 3 scores of an edge: log-prob, entropy and, for
a critic, value   U groups of W tokens, each with Y keys, A of them above

References: Tree Training arXiv:2511.00413; Prefix Grouper arXiv:2506.05433, which shares one
prefix; FlashMask arXiv:2410.01359.
"""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from full.attend import attend, checked_config
from full.masks import Mask
from full.ring import Ring, indices, ring_attention, ring_of


def tree_attention(q, k, v, /, trie, *, scale=None, window=None, softcap=None, backend=None):
    """Compute attention of every token of a tree to its ancestors and itself (1), differentiable.

    q: (1, H, N, D). k, v: (1, G, N, D). In the order of trie.tokens.
    trie: the `TokenTrie`.
    window: how many tokens, itself and the nearest ancestors, a token sees. Default: all.
    scale, softcap, backend: as in `attend.attend`, with its dtypes and errors.

    Returns (1, H, N, D) in the dtype of q.
    """
    return stretch_attention(q, k, v, trie.stretch, scale, window, softcap, backend)


def stretch_attention(q, k, v, stretch, scale, window, softcap, backend=None):
    """Compute attention of a `Stretch`: q (1, H, n, D) against k, v (1, G, p + n, D)."""
    mask = stretch.mask(window)
    options = dict(scale=scale, softcap=softcap, backend=backend)
    if backend is None and softcap is None and groups_pay(q, k, stretch):
        # A caller's mistake is the same error as in `attend`.
        scale = checked_config(q, k, v, mask, **options).scale
        return grouped_attention(q, k, v, stretch, scale, window)

    # A segment against itself is a causal triangle, and everything below it sees all of it: a full
    # rectangle. Fused kernels compute both without a mask and without a copied key:
    #
    #     5 6 7 8 / 5 6 9      0  x               rows 0 to 3 against keys 0 to 3: a triangle
    #                          1  x x             row 4 against keys 0 1: a rectangle
    #                          2  x x x           row 4 against key 4: a triangle
    #                          3  x x x x
    #                          4  x x . . x       row 4 against keys 2 3: never computed
    return attend(q, k, v, mask, **options)[0]


# Short paths: a tree of many short segments would be very many boxes of few pairs each. Instead,
# groups of WIDTH tokens attend, each to the path above its first token and to itself. It is 2 to 4
# times as fast as boxes for paths of 17 to 48 tokens, and no faster beyond SHORT.
WIDTH = 32

SHORT = 128  # tokens of the longest path

GATHERED = 1 << 22  # numbers that a layer gathers, of keys and as many of values: bounds memory


def groups_pay(q, k, stretch):
    """Return True if `grouped_attention` can compute this and is faster than boxes."""
    # It is written for one tree, and measured on a CPU only. Other shapes are for the checks.
    if q.device.type != "cpu" or q.ndim != 4 or len(q) != 1 or not q.shape[2]:
        return False

    # Each group gathers as many keys as the longest path has, and its own.
    longest = int(stretch.depth.max()) + 1
    groups = -(-q.shape[2] // WIDTH)
    gathered = groups * (WIDTH + longest) * k.shape[1] * k.shape[3]
    return longest <= SHORT and gathered <= GATHERED


def groups_of_tokens(stretch, window, dtype):
    """Return keys_UY, which keys each group of WIDTH tokens looks at, and the bias (U, 1, W, Y)."""
    # The ancestors of a group's tokens are in the group or on the path to its first token. Tokens
    # of 5 6 7 / 5 6 8 / 5 9 in groups of 3; ".": nothing, and the last group is filled up:
    #
    #     index    0 1 2 3 4    queries  0 1 2    keys  . . 0 1 2
    #     token    5 6 7 8 9             3 4 .          0 1 3 4 .
    p, m = len(stretch.above), len(stretch.end)
    count = -(-(m - p) // WIDTH)
    rows_UW = p + np.arange(count * WIDTH).reshape(count, WIDTH)
    index = np.arange(m)
    paths = [index[:t][stretch.end[:t] > t] for t in rows_UW[:, 0]]

    # "Nothing" gets an index after all queries, so that the rule of (1) hides it: j <= i < end_j.
    nothing = p + count * WIDTH
    above_UA = np.full((count, max(len(path) for path in paths)), nothing)
    for group, path in enumerate(paths):
        above_UA[group, : len(path)] = path
    keys_UY = np.concatenate([above_UA, rows_UW], 1)

    # Then all pairs of a group are one comparison.
    end = np.append(stretch.end, np.arange(m, nothing + 1) + 1)
    i_UW1 = rows_UW[:, :, None]
    j_U1Y = keys_UY[:, None]
    sees_UWY = (j_U1Y <= i_UW1) & (i_UW1 < end[j_U1Y])  # (1)
    if window is not None:
        depth = np.append(stretch.depth, np.zeros(nothing + 1 - m, np.int64))
        sees_UWY &= depth[i_UW1] - depth[j_U1Y] < window

    # Torch adds the bias to the scores. Index m and up is nothing: any key will do.
    bias_UWY = torch.zeros(sees_UWY.shape, dtype=dtype)
    bias_UWY.masked_fill_(torch.from_numpy(~sees_UWY), -math.inf)
    return torch.from_numpy(keys_UY.clip(max=m - 1)), bias_UWY[:, None]


def grouped_attention(q_1HnD, k_1GmD, v_1GmD, stretch, scale, window):
    """Compute attention of a `Stretch` with short paths: all groups in one call of torch's."""
    # NUMERICS: scores, softmax and sums are in float32 or better, as in boxes. Pinned by
    # tests/full/test_tree.py::test_tree_attention_in_low_precision_is_as_good_as_plain_torch.
    wide = torch.promote_types(q_1HnD.dtype, torch.float32)
    if (window, wide) not in stretch.groups:
        stretch.groups[window, wide] = groups_of_tokens(stretch, window, wide)
    keys_UY, bias_U1WY = stretch.groups[window, wide]

    # Queries are in order already, but for the end of the last group. Keys are gathered: each group
    # needs the path above it too, which for short paths is little.
    n = q_1HnD.shape[2]
    filled = len(keys_UY) * WIDTH - n
    q_nHD = q_1HnD[0].transpose(0, 1).to(wide)
    q_UWHD = nn.functional.pad(q_nHD, (0, 0, 0, 0, 0, filled)).unflatten(0, (-1, WIDTH))
    q_UHWD = q_UWHD.transpose(1, 2)

    def gathered(x_1GmD):
        x_mGD = x_1GmD[0].transpose(0, 1).to(wide)
        x_UYGD = x_mGD.index_select(0, keys_UY.flatten()).unflatten(0, keys_UY.shape)
        return x_UYGD.transpose(1, 2)

    out_UHWD = scaled_dot_product_attention(
        q_UHWD, gathered(k_1GmD), gathered(v_1GmD), bias_U1WY, scale=scale, enable_gqa=True
    )
    out_nHD = out_UHWD.transpose(1, 2).flatten(0, 1)[:n]
    return out_nHD.transpose(0, 1)[None].to(q_1HnD.dtype)


# The whole tree in one graph, on one rank or on several -----------------------------------------
# For: --tree sparse, and `chunks.tree_scores`. It is `tree_attention.tree_logprobs` with masks,
# padding, critics, and a ring.


def packed_tree(trie, length=None):
    """Return a tree as a row of `length` places: its tokens and their positions, (1, S) each.

    Padding follows the tree: token 0 at position 0. Default: none.
    """
    # Positions are depths: every token is where it is in its sequences.
    padding = 0 if length is None else length - len(trie)
    pad = nn.functional.pad
    return tuple(pad(x, (0, padding))[None] for x in (trie.tokens, trie.positions))


def packed_tree_attention(trie, length=None, *, group=None, debug=False, **ring_options):
    """Return what the layers call for a row of `packed_tree`: attention of each token to its path.

    group: the ranks that share the row, by `ring_attention` with ring_options. Default: one rank.
    debug: on a ring, the checks of `ring_attention`, whose message names the layer.
    """
    N = len(trie)
    length = N if length is None else length

    def on_one_rank(q, k, v, /, *, layer, scale, window=None, softcap=None):
        # Short paths are faster by `tree_attention` than by a mask. The output of padding is 0.
        options = dict(scale=scale, window=window, softcap=softcap)
        out = tree_attention(*(x[:, :, :N] for x in (q, k, v)), trie, **options)
        return out if length == N else nn.functional.pad(out, (0, 0, 0, length - N))

    if group is None:
        return on_one_rank

    # On a ring a rank holds some of the tokens, while the mask is about indices of the whole row.
    # So a tree crosses ranks like any sequence: keys and values travel, queries stay. Each token of
    # the padding is a tree by itself:
    #
    #     5 6 7 / 5 9 in 6 places     tokens 5 6 7 9 0 0    subtree_end 4 3 3 4 5 6
    _, depth_1S = packed_tree(trie, length)
    end_S = np.append(trie.subtree_end.numpy(), np.arange(N, length) + 1)
    mask = Mask(np.arange(length), end_S, position_BS=depth_1S)  # (1)

    def on_ring(q, k, v, /, *, layer, scale, window=None, softcap=None):
        options = dict(group=group, scale=scale, softcap=softcap, **ring_options)
        options |= dict(mask=mask.with_window(window), debug=debug and f"layer {layer}")
        return ring_attention(q, k, v, **options)

    return on_ring


def _is_critic(model):
    """Return True if the model has a value head: its losses get values too."""
    return getattr(getattr(model, "config", None), "value_head", False)


def _score_edges(model, hidden_nM, tokens_n, trie, edges_e, temperature):
    """Return log-probs, entropies and, of a critic, values of some edges, (e,) each.

    hidden_nM, tokens_n: states and ascending indices of tokens that include the edges' parents.
    """
    # The head is the largest matmul, so it runs at the parents of the wanted edges and nowhere
    # else. A token at a fork is used once per child:
    #
    #     5 6 7 / 5 6 8 / 5 9      edges    1 2 3 4      edge 2: token 7 given the state of 6
    #                              parents  0 1 1 0      edge 3: token 8 given the same state
    rows_e = torch.searchsorted(tokens_n, trie.parent[edges_e])
    scored_eM = hidden_nM[rows_e.to(hidden_nM.device)]
    targets_e = trie.tokens[edges_e].to(hidden_nM.device)
    scores = model.logprobs(scored_eM, targets_e, temperature=temperature)  # (2), (6)
    if _is_critic(model):
        return (*scores, model.values(scored_eM))
    return tuple(scores)


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


def _packed_scores(model, trie, temperature, masks, group, method, layout):
    """Return (2) of every edge in one graph, C of (N,), 0 where no edge is, on all ranks.

    group: None for this rank alone; else its ranks share the packed tokens.
    method, layout: of `ring_attention`.
    """
    place = Ring(None, 0, 1) if group is None else ring_of(group)
    tokens_n = indices(len(trie), place.rank, place.world, layout)
    options = {} if place.world == 1 else dict(group=group, method=method, layout=layout)
    device = next(model.parameters()).device
    tokens_1n, positions_1n = (x[:, tokens_n].to(device) for x in packed_tree(trie))
    attention = packed_tree_attention(trie, **options)
    hidden_1nM = model.hidden(tokens_1n, positions=positions_1n, attention=attention)

    # An edge is scored on the rank that has its parent's state.
    edges, _ = wanted_edges(trie, masks)
    edges_e = torch.from_numpy(edges[np.isin(trie.parent.numpy()[edges], tokens_n.numpy())])
    scores = _score_edges(model, hidden_1nM[0], tokens_n, trie, edges_e, temperature)
    columns = []
    for score_e in scores:
        column_N = score_e.new_zeros(len(trie)).index_copy(0, edges_e.to(device), score_e)
        if place.world > 1:
            # COMM: the sum over ranks of columns that are 0 elsewhere gives all scores to all
            # ranks. Each of them computes the same loss, and has the whole gradient: so only its
            # own column has a graph. A sum of gradients would count them once per rank. Pinned by
            # tests/full/test_tree_ranks.py::test_a_tree_on_a_ring_is_one_process.
            total_N = column_N.detach().clone()
            dist.all_reduce(total_N, group=place.group)
            column_N = column_N + (total_N - column_N.detach())
        columns.append(column_N)
    return tuple(columns)


def path_edges(trie, sequences, device):
    """Return the edges of some paths, (R, T), and True where an entry is inside its path.

    Sequences 5 6 7 and 5 9 of the tree 5 6 7 8 9 have the edges 1 2 and 4. Edge 0 fills up:

        edges_RT  1 2      inside_RT  x x
                  4 0                 x .
    """
    targets_R1 = trie.lengths[sequences].numpy()[:, None] - 1
    column_T = np.arange(targets_R1.max(initial=0))
    inside_RT = column_T < targets_R1
    begins_R1 = trie.begins[sequences].numpy()[:, None]
    index_RT = np.where(inside_RT, begins_R1 + 1 + column_T, 0)
    edges_RT = np.where(inside_RT, trie.paths.numpy()[index_RT], 0)
    return [torch.from_numpy(x).to(device) for x in (edges_RT, inside_RT)]
