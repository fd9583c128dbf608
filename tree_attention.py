"""Tree attention: train on sequences that share prefixes, at the cost of their distinct tokens.

The trick in one sentence: run a shared segment once, give its children detached copies of what they
read, and when they are done, backpropagate the gradients of the copies into it.

Sequences that begin identically (GRPO groups, branching or multi-turn rollouts) form a tree. A
causal model gives a shared token the same state in all of them, so one forward and one backward per
distinct token is enough. Of the 8 tokens in 5 6 7 / 5 6 8 / 5 9 five are distinct. Each loss still
sees its whole sequence. The gradient is the gradient of training on every sequence by itself.

    python tree_attention.py       # check it against each sequence by itself, in float64, 10 s

What it must equal, for sequences x^1 .. x^R of L_i tokens and a loss f_i of each:

    (1)  token i of the tree sees token j  iff  j is an ancestor of i, or i itself
         and, in a layer with a window w,       depth of i - depth of j < w
         s_ij = scale q_i . k_j   lse_i = log sum_j exp(s_ij)   out_i = sum_j exp(s_ij - lse_i) v_j
    (2)  lp^i_s     =  log p[x^i_s],  p = softmax(W h),  where h is the state of the token before it
         H^i_s      =  -sum_v p[v] log p[v]
    (3)  loss       =  sum_i f_i(lp^i, H^i)
    (4)  dloss/dlp_t   =  sum of df_i/dlp^i at token t over the sequences i that contain t
         dloss/dH_t    likewise, with df_i/dH^i
    (5)  P_ij = exp(s_ij - lse_i)      dS_ij = P_ij (dout_i . v_j - dout_i . out_i)
         dv_j = sum_i P_ij dout_i     dk_j = scale sum_i dS_ij q_i     dq_i = scale sum_j dS_ij k_j
         where i runs over all tokens that see j, in the segment of j and in segments below it

Letters in names are dimensions:  N tokens of the tree   n tokens of a segment   k keys of a segment
B rows   S tokens of a row   H query heads   G key heads   r = n H / G   D head size   M width
V vocabulary
"""

import math
import sys

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

# 1. The definition: each sequence by itself ---------------------------------------------------


def definition(model, sequences, loss_fn, /, **options):
    """Compute the loss and its gradient one sequence at a time: everything below must equal this.

    model: has .hidden(tokens (1, n), positions=, attention=) -> (1, n, M) and .logprobs(states
        (n, M), targets (n,)) -> (log-probs, entropies), (n,) each. Each layer calls attention(q
        (1, H, n, D), k, v (1, G, n, D), layer=, scale=) -> (1, H, n, D) once, after RoPE. Sliding
        layers add window=.
    sequences: 1-D int64 tensors of L_i tokens.
    loss_fn: loss_fn(i, logprobs, entropies), (L_i - 1,) each, returns the loss of sequence i.
    options: for model.logprobs, for example temperature=.

    Returns the loss and a list of log-probs (L_i - 1,), detached. Adds to .grad.
    """
    total = 0.0
    logprobs = []
    for i, x in enumerate(sequences):
        # The state of a token predicts the next token. So L tokens have L - 1 log-probs.
        states_nM = model.hidden(x[None])[0, :-1]
        scores = model.logprobs(states_nM, x[1:], **options)  # (2)
        loss = loss_fn(i, *scores)
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()  # (3)
        logprobs.append(scores[0].detach())
    return total, logprobs


# 2. A radix tree ----------------------------------------------------------------------------------


class Node:
    """A segment: tokens without a fork, the nodes below it, and the sequences that end with it."""

    def __init__(self, tokens, depth):
        self.tokens = tokens
        self.depth = depth  # of the first token: its position in every sequence
        self.children = []
        self.ends = []


def depth_first(call):
    """Run a generator that yields the recursive calls to make: recursion of any depth."""
    # Python allows a thousand nested calls. A chain of 1,500 chunks needs more.
    calls = [call]
    while calls:
        inner = next(calls[-1], None)
        if inner is None:
            calls.pop()
        else:
            calls.append(inner)


def radix_tree(sequences):
    """Return the root of the tree of all prefixes, an empty segment.

        sequences  5 6 7 / 5 6 8 / 5 9       root - [5] - [6] - [7]
                                                     |     `--- [8]
                                                      `--- [9]
    """

    def grow(node, members, end):
        # members: the sequences that run through the node; end: the depth after its last token.
        node.ends = [i for i in members if len(sequences[i]) == end]
        branches = {}
        for i in members:
            if len(sequences[i]) > end:
                branches.setdefault(sequences[i][end], []).append(i)

        # One child per next token. It is as long as all its sequences agree and none ends.
        for some in branches.values():
            stop = end + 1
            while all(len(sequences[i]) > stop for i in some):
                if len({sequences[i][stop] for i in some}) > 1:
                    break
                stop += 1
            child = Node(sequences[some[0]][end:stop], end)
            node.children.append(child)
            yield grow(child, some, stop)

    sequences = [x.tolist() for x in sequences]
    root = Node([], 0)
    depth_first(grow(root, range(len(sequences)), 0))
    return root


# 3. The whole tree in one call ------------------------------------------------------------------
#
# Pack the tokens in preorder: a token, then everything below it, branch after branch. Then the
# descendants of token j are the tokens right after it, up to an end. So (1) is two comparisons:
# i sees j iff j <= i < end of j. The position of a token is its depth. 5 6 7 / 5 6 8 / 5 9:
#
#     index   0 1 2 3 4       token 5   sees  0  x
#     token   5 6 7 8 9             6         1  x x
#     depth   0 1 2 2 1             7         2  x x x
#     parent  . 0 1 1 0             8         3  x x . x         key 1, token 6, has the end 4:
#     end     5 4 3 4 5             9         4  x . . . x       tokens 1, 2 and 3 see it


def pack(root):
    """Return [token, depth, parent, end] of each token in preorder, and {sequence: last index}.

    parent: the index of the token before it, or -1 if it is the first of its sequences.
    end: the index after its last descendant. last index: of the token with which a sequence ends.
    """
    packed = []
    last = {}

    def visit(node, parent):
        # A parent comes before everything below it. So the next free index is the token's index.
        segment = []
        for depth, token in enumerate(node.tokens, node.depth):
            segment.append([token, depth, parent, None])
            parent = len(packed)
            packed.append(segment[-1])
        for i in node.ends:
            last[i] = parent
        for child in node.children:
            yield visit(child, parent)

        # Everything below has been packed. The tokens of a segment have the same last descendant.
        for entry in segment:
            entry[3] = len(packed)

    depth_first(visit(root, -1))
    return packed, last


def tree_logprobs(model, sequences, **options):
    """Return (log-probs, entropies) of each sequence, (L_i - 1,) each: one forward of the tree."""
    packed, last = pack(radix_tree(sequences))
    device = sequences[0].device
    tokens_N, depth_N, parent_N, end_N = torch.tensor(packed, device=device).T
    index_N = torch.arange(len(packed), device=device)
    visible_NN = (index_N <= index_N[:, None]) & (index_N[:, None] < end_N)  # (1)
    behind_NN = depth_N[:, None] - depth_N

    # Any kernel that takes a mask computes (1) and (5): there is one segment, the whole tree.
    def attention(q, k, v, /, *, layer, scale, window=None):
        near_NN = visible_NN & (behind_NN < (window or math.inf))  # (1)
        return scaled_dot_product_attention(q, k, v, near_NN, scale=scale, enable_gqa=True)

    hidden_NM = model.hidden(tokens_N[None], positions=depth_N[None], attention=attention)[0]

    # Token t is scored from the state of its parent, so a token at a fork predicts several. The
    # first token of a path has no parent: -1 picks any state, since its score is not used.
    scores = model.logprobs(hidden_NM[parent_N], tokens_N, **options)  # (2)

    # The last token of a sequence sees the whole path: its row of the mask picks the scores of the
    # path, in order. Autograd sums over the sequences that read a score (4).
    paths = [visible_NN[last[i]] for i in range(len(sequences))]
    return [tuple(x_N[path_N][1:] for x_N in scores) for path_N in paths]


# 4. Depth first, with detached leaves -----------------------------------------------------------
#
# The graph of the whole tree may not fit into memory. So call the model once per segment, depth
# first. A segment needs three things from the segments above it: their keys and values, the state
# of the last token above, which predicts its first token, and the log-probs and entropies of the
# path so far. It gets them as leaves: detached copies that each collect a gradient of their
# own.
#
#     forward [5], forward [6], forward [7]       [7] reads leaves of [5] and [6]
#     backward [7], forward [8], backward [8]     both add to the gradients of these leaves
#     backward [6]                                starts from what the leaves of [6] have collected
#     forward [9], backward [9], backward [5]
#
# So every segment has one forward and one backward, however many sequences run through it. All that
# reads a segment is below it, and has had its backward before: depth first is the graph reversed.
#
# Two things still grow: a segment may be long, and the graphs of a whole path wait for their
# backward. With max_tokens, segments are cut into chunks, and no graph waits: a chunk runs without
# a graph on the way down, and once more, with a graph, on the way up. Then memory holds the keys
# and values of one path, on one stack, and the graph of one chunk.


def stack_heads(x_1HnD, num_key_heads):
    """Return x_GrD: the queries of all heads that read a key head are rows of one matrix."""
    # NUMERICS: scores and sums are float32 or better. Results are rounded once.
    wide = torch.promote_types(x_1HnD.dtype, torch.float32)
    return x_1HnD.to(wide).reshape(num_key_heads, -1, x_1HnD.shape[3])


def path_scores(q_GrD, scale, window, path):
    """Yield s_Grk, k_GkD and v_GkD of each segment of a path, from the own one up."""
    # Number positions from the first query on, so that the segment above ends at 0. With n = 2,
    # segments of 1 and 2 tokens above, without a window and with a window of 3:
    #
    #     x .   x   x x        x .   x   . x
    #     x x   x   x x        x x   x   . .
    n = path[0].shape[2]
    query_n = torch.arange(n, device=q_GrD.device)
    end = n
    for k_1GkD, v_1GkD in zip(path[::2], path[1::2], strict=True):
        start = end - k_1GkD.shape[2]
        k_GkD, v_GkD = k_1GkD[0].to(q_GrD), v_1GkD[0].to(q_GrD)
        s_Grk = q_GrD @ k_GkD.mT * scale
        if end > 0 or n - 1 - start >= (window or math.inf):  # else every query sees every key
            behind_nk = query_n[:, None] - torch.arange(start, end, device=q_GrD.device)
            visible_nk = (behind_nk >= 0) & (behind_nk < (window or math.inf))  # (1)
            s_Grk = s_Grk.masked_fill(~visible_nk.repeat(q_GrD.shape[1] // n, 1), -math.inf)
        yield s_Grk, k_GkD, v_GkD
        end = start


class PathAttention(torch.autograd.Function):
    """Causal attention from the n tokens of a segment to themselves and the segments above."""

    @staticmethod
    def forward(ctx, q_1HnD, scale, window, *path):
        """Return out_1HnD, equation (1).

        path: k (1, G, k, D) and v of the segment, then of the one above it, and so on to the root.
        """
        # Segment after segment, out becomes the output over all keys so far: the lse grows, and the
        # weights of earlier keys shrink. Scores 0, 0 with values 1, 3 have the lse log 2 and the
        # output 2. With a score log 2 and a value 6, the lse is log 4, and the output is
        # 2 exp(log 2 - log 4) + 6 exp(log 2 - log 4) = 4. A query sees itself, so the lse is finite
        # once the own segment, the first, is done.
        q_GrD = stack_heads(q_1HnD, path[0].shape[1])
        out_GrD = torch.zeros_like(q_GrD)
        lse_Gr = q_GrD.new_full(q_GrD.shape[:2], -math.inf)
        for s_Grk, _, v_GkD in path_scores(q_GrD, scale, window, path):
            before_Gr = lse_Gr
            lse_Gr = torch.logaddexp(before_Gr, s_Grk.logsumexp(2))
            out_GrD = out_GrD * torch.exp(before_Gr - lse_Gr)[..., None]
            out_GrD = out_GrD + torch.exp(s_Grk - lse_Gr[..., None]) @ v_GkD  # (1)
        out_1HnD = out_GrD.reshape(q_1HnD.shape).to(q_1HnD.dtype)

        # The graph refers to the keys and values of the segments above, and holds no copy of them.
        ctx.save_for_backward(q_1HnD, out_1HnD, lse_Gr, *path)
        ctx.options = scale, window
        return out_1HnD

    @staticmethod
    def backward(ctx, dout_1HnD):
        """Return the gradients of q and of all keys and values of the path, equation (5)."""
        # dk and dv of a segment above go to its leaves, where those of all segments below add up.
        q_1HnD, out_1HnD, lse_Gr, *path = ctx.saved_tensors
        scale, window = ctx.options
        G = path[0].shape[1]
        q_GrD, out_GrD, dout_GrD = (stack_heads(x, G) for x in (q_1HnD, out_1HnD, dout_1HnD))
        delta_Gr = (dout_GrD * out_GrD).sum(2)
        dq_GrD = torch.zeros_like(q_GrD)
        dpath = []
        for s_Grk, k_GkD, v_GkD in path_scores(q_GrD, scale, window, path):
            p_Grk = torch.exp(s_Grk - lse_Gr[..., None])
            ds_Grk = p_Grk * (dout_GrD @ v_GkD.mT - delta_Gr[..., None]) * scale
            dq_GrD += ds_Grk @ k_GkD
            dpath += [(ds_Grk.mT @ q_GrD)[None], (p_Grk.mT @ dout_GrD)[None]]  # (5)
        return dq_GrD.reshape(q_1HnD.shape).to(q_1HnD.dtype), None, None, *dpath


def tree_backward(model, sequences, loss_fn, max_tokens=None, **options):
    """Add the gradient of (3) to .grad; return the loss and the log-probs, like `definition`.

    loss_fn: loss_fn(i, logprobs, entropies), (L_i - 1,) each, returns the loss of sequence i.
    max_tokens: tokens of a chunk. One chunk has a graph at a time. Default: whole segments, with
        the graphs of one path at a time.
    options: for model.logprobs, as in `definition`.
    """
    recompute = max_tokens is not None
    root = radix_tree(sequences)
    if recompute:
        depth_first(cut_segments(root, max_tokens))
    losses = []
    found = {}
    stack = {}  # layer -> [(k, v) of each segment from the root down], all leaves

    def visit(node, state_above, path_above):
        """Run a segment forward, then everything below it, then the segment backward.

        state_above: leaf (1, M), the state before the first token, or None.
        path_above: [leaf (2, n) of the log-probs and entropies of each segment above].
        """
        own_kv = {}
        tokens_n = torch.tensor(node.tokens, device=sequences[0].device)
        given = tokens_n, node.depth, state_above

        def attention(q, k, v, /, *, layer, scale, window=None):
            own_kv[layer] = (k, v)
            above = [x for kv in reversed(stack.get(layer, [])) for x in kv]
            return PathAttention.apply(q, scale, window, k, v, *above)

        with torch.set_grad_enabled(not recompute):
            scores_2n, state_1M = run_segment(model, *given, attention, **options)

        # Detach what others read: the keys and values, the last state, the scores.
        for layer, kv in own_kv.items():
            stack.setdefault(layer, []).append([leaf_of(x) for x in kv])
        state = leaf_of(state_1M)
        path = [*path_above, leaf_of(scores_2n)]

        # The losses of the sequences that end here, then everything below.
        for i in node.ends:
            found[i], entropies = torch.cat(path, 1)
            loss = loss_fn(i, found[i], entropies)
            if loss.requires_grad:
                loss.backward()  # (4): sequences with a common token add to the same leaf
            losses.append(loss.item())
        for child in node.children:
            yield visit(child, state, path)

        # Everything below is done, so the leaves have all of their gradient. Pop them before the
        # second run, which must read the keys above the segment, and not its own keys as well.
        # (The loss would stay right, and only the gradient would be wrong.)
        leaves = {layer: stack[layer].pop() for layer in own_kv}
        if recompute:
            scores_2n, state_1M = run_segment(model, *given, attention, **options)

        # Backpropagate from the tensors that the leaves copy, all in one call, with the gradients
        # that the leaves have collected. A leaf that no segment read has no gradient.
        pairs = [(scores_2n, path[-1]), (state_1M, state)]
        for layer, kv in own_kv.items():
            pairs += zip(kv, leaves[layer], strict=True)
        pairs = [(x, leaf.grad) for x, leaf in pairs if leaf.grad is not None]
        if pairs:
            tensors, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, gradients)  # (5)

    for child in root.children:
        depth_first(visit(child, None, []))
    return sum(losses), [found[i].detach() for i in range(len(sequences))]  # (3)


def leaf_of(x):
    """Return x without its graph, ready to collect a gradient in .grad."""
    # NUMERICS: the sum over all segments below is float32 or better: in bfloat16 256 + 1 is 256.
    leaf = x.detach().requires_grad_()
    leaf.grad_dtype = torch.promote_types(x.dtype, torch.float32)
    return leaf


def run_segment(model, tokens_n, depth, state_above, attention, **options):
    """Return log-probs and entropies of a segment's tokens, (2, n), and its last state (1, M)."""
    depth_n = torch.arange(depth, depth + len(tokens_n), device=tokens_n.device)
    hidden_nM = model.hidden(tokens_n[None], positions=depth_n[None], attention=attention)[0]

    # Each token is scored from the state before it. The first token of a sequence has none.
    if state_above is None:
        scores = model.logprobs(hidden_nM[:-1], tokens_n[1:], **options)
    else:
        states_nM = torch.cat([state_above, hidden_nM[:-1]])
        scores = model.logprobs(states_nM, tokens_n, **options)  # (2)
    return torch.stack(scores), hidden_nM[-1:]


def cut_segments(node, max_tokens):
    """Cut every segment below a node into chunks of at most max_tokens tokens, in place."""
    # 7 tokens and max_tokens = 3: the node keeps 3, and a new child takes over the other 4, all
    # children and all ends. Then the child is cut in turn.
    if len(node.tokens) > max_tokens:
        rest = Node(node.tokens[max_tokens:], node.depth + max_tokens)
        rest.children = node.children
        rest.ends = node.ends
        node.tokens = node.tokens[:max_tokens]
        node.children = [rest]
        node.ends = []
    for child in node.children:
        yield cut_segments(child, max_tokens)


# 5. The check -----------------------------------------------------------------------------------


class CheckModel(nn.Module):
    """A small transformer in float64: grouped heads, RoPE, MLP, a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        # V = 11, M = 16 and D = 4. The 8 heads of qkv are 4 of queries, 2 of keys and 2 of values.
        # One tensor for all layers of a kind: the first dimension is the layer.
        shapes = {"embed": (11, 16), "qkv": (2, 8 * 4, 16), "out": (2, 16, 4 * 4)}
        shapes |= {"up": (2, 32, 16), "down": (2, 16, 32)}
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
            setattr(self, name, nn.Parameter(drawn))

    def hidden(self, tokens_BS, /, *, positions=None, attention=None):
        return check_hidden(self, tokens_BS, positions, attention or self.plain_attention)

    def logprobs(self, states_nM, targets_n, /, *, temperature=1.0):
        return check_logprobs(self, states_nM, targets_n, temperature)

    @staticmethod
    def plain_attention(q, k, v, /, *, layer, scale, window=math.inf):
        S = q.shape[2]
        seen = torch.tensor([[j <= i < j + window for j in range(S)] for i in range(S)])
        return scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)


def check_hidden(model, tokens_BS, positions_BS, attention):
    """Return the states (B, S, M) of a `CheckModel`."""
    if positions_BS is None:
        positions_BS = torch.arange(tokens_BS.shape[1])[None]
    x_BSM = model.embed[tokens_BS]

    # RoPE as a rotation in the complex plane: pairs of numbers turn by angles that grow with the
    # position. In a tree the position is the depth.
    angles_B1S1 = positions_BS[:, None, :, None].to(x_BSM)
    turn_B1S2 = torch.polar(torch.ones_like(angles_B1S1), angles_B1S1 * x_BSM.new_tensor([1, 0.1]))

    def turned(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(3, (2, 2))) * turn_B1S2)

    for layer in range(len(model.qkv)):
        heads = (x_BSM @ model.qkv[layer].T).unflatten(2, (8, 4)).transpose(1, 2)
        q, k, v = heads.split([4, 2, 2], 1)
        # The scale is not D ** -0.5, and layer 0 has a window: an attention that drops them shows.
        kind = dict(layer=layer, scale=0.4) | (dict(window=3) if layer == 0 else {})
        out = attention(turned(q).flatten(3), turned(k).flatten(3), v, **kind)
        x_BSM = x_BSM + out.transpose(1, 2).flatten(2) @ model.out[layer].T
        x_BSM = x_BSM + torch.tanh(x_BSM @ model.up[layer].T) @ model.down[layer].T
    return x_BSM


def check_logprobs(model, states_nM, targets_n, temperature):
    """Return the log-probs of the targets and the entropies, (n,) each, of a `CheckModel`."""
    logp_nV = (states_nM @ model.embed.T / temperature).log_softmax(-1)
    return logp_nV.gather(1, targets_n[:, None])[:, 0], -(logp_nV.exp() * logp_nV).sum(-1)


def check_loss(i, logprobs, entropies):
    """Return a loss that depends on i, on each token, and on the sequence as a whole."""
    weights = torch.cos(torch.arange(len(logprobs)) * 3.0 + i).to(logprobs)
    terms = weights * logprobs + weights.square() * entropies
    return terms.sum() + 0.1 * logprobs.sum().square()


def check_packed(model, sequences, loss_fn):
    """Do what `definition` does with one call of the packed tree."""
    scores = tree_logprobs(model, sequences)
    loss = sum(loss_fn(i, *given) for i, given in enumerate(scores))
    loss.backward()
    return loss.detach(), [logprobs.detach() for logprobs, _ in scores]


def check():
    """Return the largest relative error of loss, log-probs and gradients, over trees and ways."""
    trees = {
        "forks": ["567", "568", "59", "56", "12342", "123993", "12397"],
        "duplicates and prefixes": ["8123456", "812", "8123456", "8", "7"],
        "one long path": ["12345678901234567890"],
    }
    ways = [definition, check_packed, tree_backward]
    for size in (1, 2, 3, 8):
        ways.append(lambda *given, size=size: tree_backward(*given, size))

    model = CheckModel()
    errors = []
    for texts in trees.values():
        sequences = [torch.tensor([int(digit) for digit in text]) for text in texts]
        results = []
        for way in ways:
            model.zero_grad()
            loss, logprobs = way(model, sequences, check_loss)
            loss = torch.as_tensor(loss, dtype=torch.float64)
            results.append([loss, *logprobs, *(p.grad.clone() for p in model.parameters())])
        for found in results[1:]:
            for a, b in zip(found, results[0], strict=True):
                errors.append((a - b).norm() / b.norm() if b.numel() else b.sum())
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def main(argv):
    """Check every way. Exit with 1 unless the largest error is at most 1e-10."""
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    if argv:
        sys.exit(f"expected no arguments, got {argv}")
    torch.set_num_threads(1)  # more threads do not help a small model
    worst = check()
    print(f"packed, depth first, in chunks: largest error {worst:.1e}")
    if not worst <= 1e-10:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
