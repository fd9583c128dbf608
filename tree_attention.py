"""Tree attention: train on sequences that share prefixes, at the cost of their distinct tokens.

The trick in one sentence: run a shared segment once, give its children detached copies of what they
read, and when they are done, backpropagate the gradients of the copies into it.

Sequences that begin identically (GRPO groups, branching or multi-turn rollouts) form a tree. A
causal model gives a shared token the same state in all of them, so one forward and one backward per
distinct token is enough. Of the 8 tokens in 5 6 7 / 5 6 8 / 5 9 five are distinct. Each loss still
sees its whole sequence. The gradient is the gradient of training on every sequence by itself.

    python tree_attention.py       # check it against each sequence by itself, 2 CPU seconds

What it must equal, for sequences x^1 .. x^R of L_i tokens and a loss f_i of each:

    (1)  token i of the tree sees token j  iff  j is an ancestor of i, or i itself
         and, in a layer with a window w,       depth of i - depth of j < w
         s_ij = scale q_i . k_j    P_ij = exp(s_ij) / sum_j exp(s_ij)    out_i = sum_j P_ij v_j
    (2)  lp^i_s     =  log p[x^i_s],  p = softmax(W h),  where h is the state of the token before it
         H^i_s      =  -sum_v p[v] log p[v]
    (3)  loss       =  sum_i f_i(lp^i, H^i)
    (4)  dloss/dlp_t   =  sum of df_i/dlp^i at token t over the sequences i that contain t
         dloss/dH_t    likewise, with df_i/dH^i
    (5)  dS_ij = P_ij (dout_i . v_j - dout_i . out_i)       dq_i = scale sum_j dS_ij k_j
         dv_j  = sum_i P_ij dout_i                          dk_j = scale sum_i dS_ij q_i
         where i runs over all tokens that see j, in the segment of j and in segments below it

Letters in names are dimensions:  N tokens of the tree   n tokens of a segment   m tokens of its
path from the root   H query heads   G key heads   r = n H / G   D head size   M width
V vocabulary   2 the pair k, v, or the pair log-prob, entropy
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


def radix_tree(sequences, max_tokens=math.inf):
    """Return the root of the tree of all prefixes. No segment has more than max_tokens tokens.

        sequences  5 6 7 / 5 6 8 / 5 9       root [] - [5] - [6] - [7]
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
            while stop < end + max_tokens and all(len(sequences[i]) > stop for i in some):
                if len({sequences[i][stop] for i in some}) > 1:
                    break
                stop += 1
            child = Node(sequences[some[0]][end:stop], end)
            node.children.append(child)
            yield grow(child, some, stop)

    if max_tokens < 1:
        raise ValueError(f"expected max_tokens of at least 1, got {max_tokens}")
    for x in sequences:
        if not torch.is_tensor(x) or x.dtype != torch.int64 or x.dim() != 1 or len(x) == 0:
            kind = f"{x.dtype} of shape {[*x.shape]}" if torch.is_tensor(x) else type(x).__name__
            raise ValueError(f"expected sequences in 1-D int64 tensors, not empty, got {kind}")
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
    if len(sequences) == 0:
        return []
    packed, last = pack(radix_tree(sequences))
    tokens_N, depth_N, parent_N, end_N = torch.tensor(packed, device=sequences[0].device).T
    index_N = torch.arange(len(packed), device=tokens_N.device)
    visible_NN = (index_N <= index_N[:, None]) & (index_N[:, None] < end_N)  # (1)
    behind_NN = depth_N[:, None] - depth_N

    # Any kernel that takes a mask computes (1) and (5): there is one segment, the whole tree.
    def attention(q, k, v, /, *, layer, scale, window=None):
        near_NN = visible_NN if window is None else visible_NN & (behind_NN < window)  # (1)
        return scaled_dot_product_attention(q, k, v, near_NN, scale=scale, enable_gqa=True)

    hidden_NM = model.hidden(tokens_N[None], positions=depth_N[None], attention=attention)[0]

    # Token t is scored from the state of its parent, so a token at a fork predicts several. The
    # first token of a path has no parent: -1 picks any state, since its score is not used.
    scores = model.logprobs(hidden_NM[parent_N], tokens_N, **options)  # (2)

    # The last token of a sequence sees the whole path: its row of the mask picks the scores of the
    # path, in order. Autograd sums over the sequences that read a score (4).
    paths = [visible_NN[last[i]] for i in range(len(sequences))]
    return [tuple(x_N[path_N][1:] for x_N in scores) for path_N in paths]


# 4. Tree attention, as an autograd Function ------------------------------------------------------
#
# The graph of the whole tree may not fit into memory. So section 5 runs the model once per segment.
# Then the keys and values of a path are in pieces, a tensor (2, G, tokens, D) of each segment from
# the root down. Each piece needs its own gradient, so the backward, equation (5), is written out.
#
# The graph of a segment holds the pieces, which other segments read too. It holds no copy of the
# path and no P: the backward computes both again. So it has the same size at every depth.


def widen(x):
    """Return x in float32, or as it is if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def path_weights(q_1HnD, scale, window, path):
    """Return P_Grm of (1), and q_GrD, k_GmD and v_GmD of the path, from which it is computed."""
    # The queries of all H / G heads that read a key head are rows of one matrix. So a matmul reads
    # the key head in place, and the matmuls of (5) sum over the heads that read it.
    # NUMERICS: scores and sums are float32 or better. Results are rounded once.
    k_GmD, v_GmD = widen(torch.cat(path, 2))
    q_GrD = widen(q_1HnD).reshape(len(k_GmD), -1, q_1HnD.shape[3])

    # Query i is token m - n + i of the path. Its bias is -inf for later tokens, and for tokens
    # above its window. With n = 2 and m = 5, it is 0 at x, without a window and with one of 3:
    #
    #     x x x x .        . x x x .
    #     x x x x x        . . x x x
    n, m = q_1HnD.shape[2], k_GmD.shape[1]
    hidden_nm = q_GrD.new_full((n, m), -math.inf)
    bias_nm = hidden_nm.triu(m - n + 1)  # (1)
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1 token, got {window}")
    if window is not None:
        bias_nm += hidden_nm.tril(m - n - window)

    # Scores are the largest matrices, so change them in place.
    s_Grm = (scale * q_GrD) @ k_GmD.mT
    s_Grm += bias_nm.repeat(s_Grm.shape[1] // n, 1)
    return s_Grm.softmax(2), q_GrD, k_GmD, v_GmD  # (1)


class TreeAttention(torch.autograd.Function):
    """Attend from the n tokens of a segment to the m tokens of its path, itself included."""

    @staticmethod
    def forward(ctx, q_1HnD, scale, window, *path):
        """Return out_1HnD, equation (1)."""
        p_Grm, _, _, v_GmD = path_weights(q_1HnD, scale, window, path)
        out_1HnD = (p_Grm @ v_GmD).reshape(q_1HnD.shape).to(q_1HnD.dtype)  # (1)
        ctx.save_for_backward(q_1HnD, out_1HnD, *path)
        ctx.options = scale, window
        return out_1HnD

    @staticmethod
    def backward(ctx, dout_1HnD):
        """Return the gradients of q and of each piece of the path, equation (5)."""
        q_1HnD, out_1HnD, *path = ctx.saved_tensors
        scale, window = ctx.options
        p_Grm, q_GrD, k_GmD, v_GmD = path_weights(q_1HnD, scale, window, path)
        dout_GrD, out_GrD = (widen(x).reshape(q_GrD.shape) for x in (dout_1HnD, out_1HnD))

        # dS = P (dout . v - dout . out), in place.
        ds_Grm = dout_GrD @ v_GmD.mT
        ds_Grm -= (dout_GrD * out_GrD).sum(2, keepdim=True)
        ds_Grm *= p_Grm
        dq_GrD = scale * (ds_Grm @ k_GmD)
        dk_GmD = scale * (ds_Grm.mT @ q_GrD)
        dv_GmD = p_Grm.mT @ dout_GrD

        # These dk and dv are sums over the queries of this segment alone. The leaf of each piece
        # adds up the sums of all segments that read it (5).
        dpath = torch.stack([dk_GmD, dv_GmD]).split([piece.shape[2] for piece in path], 2)
        return dq_GrD.reshape(q_1HnD.shape).to(q_1HnD.dtype), None, None, *dpath


# 5. Depth first, with detached leaves -----------------------------------------------------------
#
# A segment has outputs that segments below read: k and v of each layer (2, G, n, D), its last state
# (1, M), which predicts their first token, and its scores (2, n), the log-probs and entropies. They
# read leaves: detached copies of the outputs that each collect a gradient of their own.
#
#     forward [5], forward [6], forward [7]       [7] reads leaves of [5] and [6]
#     backward [7], forward [8], backward [8]     both add to the gradients of these leaves
#     backward [6]                                starts from what the leaves of [6] have collected
#     forward [9], backward [9], backward [5]
#
# So every segment has one forward and one backward, however many sequences run through it. All that
# reads a segment is below it, and has had its backward before: depth first is the graph reversed.
#
# The graphs of a whole path wait for their backward. With max_tokens, none waits: a chunk with
# others below runs without a graph on the way down, and once more, with a graph, on the way up.
# Then memory holds the keys and values of one path, and the graph of one chunk.


def leaf_of(x):
    """Return x without its graph, ready to collect a gradient in .grad."""
    # NUMERICS: the sum over all segments below is float32 or better: in bfloat16 256 + 1 is 256.
    leaf = x.detach().requires_grad_()
    leaf.grad_dtype = torch.promote_types(x.dtype, torch.float32)
    return leaf


def run_segment(model, tokens_n, depth, above, **options):
    """Return {"state": .., "scores": .., and number of a layer: its k and v}, the outputs.

    above: the leaves of the outputs of each segment above, from the root down.
    """
    outputs = {}

    def attention(q, k, v, /, *, layer, scale, window=None):
        outputs[layer] = torch.cat((k, v))
        return TreeAttention.apply(q, scale, window, *(x[layer] for x in above), outputs[layer])

    depth_n = torch.arange(depth, depth + len(tokens_n), device=tokens_n.device)
    hidden_nM = model.hidden(tokens_n[None], positions=depth_n[None], attention=attention)[0]
    outputs["state"] = hidden_nM[-1:].clone()  # a view would keep all n states

    # Each token is scored from the state before it. The first token of a sequence has none: take
    # any state, since its score is not used.
    before_1M = above[-1]["state"] if above else outputs["state"]
    states_nM = torch.cat([before_1M, hidden_nM[:-1]])
    outputs["scores"] = torch.stack(model.logprobs(states_nM, tokens_n, **options))  # (2)
    return outputs


def tree_backward(model, sequences, loss_fn, max_tokens=None, **options):
    """Add the gradient of (3) to .grad; return the loss and the log-probs, like `definition`.

    loss_fn, options: as in `definition`.
    max_tokens: tokens of a chunk. One chunk has a graph at a time. Default: chunks of 256 tokens,
        so that their matrices of scores stay small. All chunks of a path have a graph.
    """
    losses = []
    found = {}

    def visit(node, above):
        """Run a segment forward, then everything below it, then the segment backward."""
        tokens_n = torch.tensor(node.tokens, device=sequences[0].device)
        given = model, tokens_n, node.depth, above
        runs_twice = max_tokens is not None and len(node.children) > 0
        with torch.set_grad_enabled(not runs_twice):
            outputs = run_segment(*given, **options)
        leaves = {name: leaf_of(x) for name, x in outputs.items()}
        path = [*above, leaves]

        # The losses of the sequences that end here, then everything below.
        for i in node.ends:
            found[i], entropies = torch.cat([x["scores"] for x in path], 1)[:, 1:]
            loss = loss_fn(i, found[i], entropies)
            if loss.requires_grad:
                loss.backward()  # (4): sequences with a common token add to the same leaf
            losses.append(loss.item())
        for child in node.children:
            yield visit(child, path)

        # Everything below is done, so the leaves have all of their gradient. Backpropagate from the
        # outputs, all in one call. A leaf that no segment and no loss read has no gradient.
        # NUMERICS: each chunk adds to .grad. Give weights in bfloat16 the grad_dtype float32.
        if runs_twice:
            outputs = run_segment(*given, **options)
        read = [name for name, leaf in leaves.items() if leaf.grad is not None]
        tensors = [outputs[name] for name in read]
        torch.autograd.backward(tensors, [leaves[name].grad for name in read])  # (5)

    root = radix_tree(sequences, 256 if max_tokens is None else max_tokens)
    for child in root.children:
        depth_first(visit(child, []))
    return sum(losses), [found[i].detach() for i in range(len(sequences))]  # (3)


# 6. The check -----------------------------------------------------------------------------------


def plain_attention(q, k, v, /, *, layer, scale, window=math.inf):
    """Attend from each token of a sequence to the tokens up to itself, or to the last `window`."""
    S = q.shape[2]
    seen = torch.tensor([[j <= i < j + window for j in range(S)] for i in range(S)])
    return scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)


def check_hidden(model, tokens_1n, /, *, positions=None, attention=plain_attention):
    """Return the states (1, n, M) of a `CheckModel`."""
    # A position has the embedding of a token, so a wrong one shows. In a tree it is the depth.
    if positions is None:
        positions = torch.arange(tokens_1n.shape[1])[None]
    x_1nM = model.embed[tokens_1n] + model.embed[positions % 11]
    for layer in range(len(model.qkv)):
        # The scale is not D ** -0.5, and layer 0 has a window: an attention that drops them shows.
        kind = dict(layer=layer, scale=0.4) | (dict(window=3) if layer == 0 else {})
        heads = (x_1nM @ model.qkv[layer].T).unflatten(2, (8, 4)).transpose(1, 2)
        out = attention(*heads.split([4, 2, 2], 1), **kind)
        x_1nM = x_1nM + out.transpose(1, 2).flatten(2) @ model.out[layer].T
    return x_1nM


def check_logprobs(model, states_nM, targets_n, /, *, temperature=1.0):
    """Return the log-probs of the targets and the entropies, (n,) each, of a `CheckModel`."""
    logp_nV = (widen(states_nM @ model.embed.T) / temperature).log_softmax(-1)
    return logp_nV.gather(1, targets_n[:, None])[:, 0], -(logp_nV.exp() * logp_nV).sum(-1)


class CheckModel(nn.Module):
    """A small transformer in float64: two layers of attention, a head tied to the embedding."""

    hidden = check_hidden
    logprobs = check_logprobs

    def __init__(self):
        super().__init__()
        # V = 11, M = 16 and D = 4. Of the 8 heads of qkv 4 are queries, 2 keys and 2 values.
        generator = torch.Generator().manual_seed(0)
        for name, *shape in [("embed", 11, 16), ("qkv", 2, 8 * 4, 16), ("out", 2, 16, 4 * 4)]:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / 4
            setattr(self, name, nn.Parameter(drawn))


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


def check(dtype):
    """Return the largest error of loss, log-probs and gradients over all ways.

    Relative to the truth or, in bfloat16, to the error of each sequence by itself in bfloat16.
    """
    # Forks, duplicates and prefixes, and a long path.
    trees = "567 568 59 56 12342 123993 12397", "8123456 812 8123456 8 7", "1234567890" * 6

    def numbers(model, way, **options):
        parts = []
        for tree in trees:
            sequences = [torch.tensor([int(token) for token in x]) for x in tree.split()]
            model.zero_grad()
            loss, logprobs = way(model, sequences, check_loss, **options)
            parts += [torch.as_tensor(loss, dtype=torch.float64), *logprobs]
            parts += [p.grad for p in model.parameters()]
        return torch.cat([x.double().flatten() for x in parts])

    # In bfloat16, .grad adds up many chunks in float32, as in training.
    model = CheckModel().to(dtype)
    for p in model.parameters():
        p.grad_dtype = torch.promote_types(dtype, torch.float32)
    truth = numbers(CheckModel().to(dtype).double(), definition)  # of the same weights
    unit = truth if dtype == torch.float64 else numbers(model, definition) - truth
    found = [numbers(model, check_packed)]
    for size in (None, 1, 2, 3, 8):
        found.append(numbers(model, tree_backward, max_tokens=size))
    errors = [(x - truth).norm() / unit.norm() for x in found]
    return torch.stack(errors).max().item()  # NaN if any error is NaN


def main(argv):
    """Check every way. Exit with 1 unless the errors are at most 1e-10, and 1.3 in bfloat16."""
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    if argv:
        sys.exit(f"expected no arguments, got {argv}")
    torch.set_num_threads(1)  # more threads do not help a small model
    worst, multiple = check(torch.float64), check(torch.bfloat16)
    print(f"packed, depth first, in chunks: bfloat16 {multiple:.2f} times the error of each "
          f"sequence by itself, float64 largest error {worst:.1e}")  # fmt: skip
    if not (worst <= 1e-10 and multiple <= 1.3):
        sys.exit(f"expected at most 1e-10 and 1.3 in bfloat16, got {worst:.1e} and {multiple:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
