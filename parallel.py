"""Data, tensor, expert and pipeline parallelism, ZeRO-1 and FSDP: each equals one process.

The rule of sums. A loss is a sum over tokens, divided by Z, the number of scored tokens of all
ranks (processes) and micro-batches of a step. So a gradient is a sum over tokens too, and each rank
computes some of its terms: a partial gradient. Ranks add partial gradients up, and never average
them. If every term is added exactly once, a plan changes nothing but rounding.

    python parallel.py core     # every plan on 1, 2 and 4 ranks of this CPU against one process

    (1)  grad = sum over ranks and micro-batches of dL_r / dtheta, L_r = sum of loss_n / Z
    (2)  f: x_r = x             dx = sum_r dx_r   before column-parallel layers y_r = x W_r^T
    (3)  g: y = sum_r y_r       dy_r = dy         after row-parallel layers y_r = x_r W_r^T
    (4)  logprob = z_t - m - log s                s = sum_r sum_(v on r) exp(z_v - m)
    (5)  entropy = log s - u / s                  u = sum_r sum_(v on r) exp(z_v - m) (z_v - m)
    (6)  norm^2  = sum of grad^2 over the distinct entries of all weights
    (7)  theta  <- AdamW(theta, grad min(1, max_norm / (norm + 1e-6)))

A plan such as p2d2t2 is a product of degrees. What each letter shares out, and what is sent:

    d  data      rows of the batch          gradients once a step: all-reduce
    c  context   tokens of each sequence    the same, and keys and values: ring_attention.py
    t  tensor    heads, widths, vocabulary  hidden states, twice a layer, and back: all-reduce
    e  expert    experts of a layer         tokens, to their experts and back: all-to-all
    p  pipeline  layers                     hidden states to the next stage, gradients back

Letters in names are dimensions: B rows, S tokens of a row, M width, N tokens of any rows, V words,
E experts, W ranks of a group. A small letter is this rank's share: v of V words.
"""

import copy
import datetime
import functools
import math
import re
import sys
import tempfile
from collections import OrderedDict, deque

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing import start_processes
from torch.utils.checkpoint import checkpoint


# 1. From a plan to process groups ---------------------------------------------------------------
class SimpleGrid:
    """The process groups of a plan such as "p2d2t2" or "t2 sp", seen from this rank.

    The ranks form a grid (p, d, c, t), and a group is a line or a plane of the grid. The t ranks
    send the most data, so t is the last axis: the ranks of a t group are neighbors on one machine.

        p2d2t2    stage 0, d 0:  0 1        t    [0 1] [2 3] [4 5] [6 7]
                  stage 0, d 1:  2 3        d    [0 2] [1 3] [4 6] [5 7]
                  stage 1, d 0:  4 5        dct  [0 1 2 3] [4 5 6 7]
                  stage 1, d 1:  6 7        p    [0 4] [1 5] [2 6] [3 7]

    Experts add no ranks. The d c t ranks of a stage form a second grid (edp, e). The ranks of an e
    group hold different experts, and the ranks of an edp group hold copies of the same experts.
    "sp" adds sequence parallelism, which t and e together need. "fsdp" is for plans without t or e.
    """

    def __init__(self, text, timeout=None):
        if not re.fullmatch(r"([pdcte][1-9]\d*)+( sp| fsdp)*", text):
            raise ValueError(f"expected a plan such as 'p2d2t2' or 't2 sp', got {text!r}")
        degrees = {letter: int(number) for letter, number in re.findall(r"([pdcte])(\d+)", text)}
        p, d, c, t, e = (degrees.get(letter, 1) for letter in "pdcte")
        self.fsdp = " fsdp" in text
        self.sequence = " sp" in text or t == 1  # with one t rank, its shard is all tokens

        self.ranks = np.arange(dist.get_world_size()).reshape(p, d, c, t)
        experts = self.ranks.reshape(p, -1, e)
        self.timeout = timeout
        self.made = {}
        self.group = {"edp": self.group_along(experts, [1]), "e": self.group_along(experts, [2])}
        for name in ("p", "d", "c", "t", "dc", "dct", "pct", ""):  # pct: with the same rows
            self.group[name] = self.group_along(self.ranks, [*map("pdct".index, name)])

    def group_along(self, ranks, axes):
        """Return this rank's group along some axes of a grid of ranks; along none, it is alone."""
        rows = ranks_along(ranks, axes)
        if len(rows[0]) == dist.get_world_size():
            return dist.group.WORLD
        if str(rows) not in self.made:
            # COMM: all ranks make all groups, in one order. A second group of all ranks may hang.
            self.made[str(rows)] = dist.new_subgroups_by_enumeration(rows, self.timeout)[0]
        return self.made[str(rows)]


def ranks_along(ranks, axes):
    """Return the ranks of each group: move the axes last, flatten them, and each row is a group."""
    size = math.prod(ranks.shape[axis] for axis in axes)
    return np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, size).tolist()


# 2. Collectives, and which one is the backward of which -----------------------------------------
def all_reduce_sum(x, group):
    """Return the sum of x over the ranks, as a new tensor."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def all_gather(x, group, dim=0):
    """Concatenate equal shards in rank order: a on rank 0, b on rank 1 become (a, b) on both."""
    x = x.contiguous()
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, x, group)
    return torch.cat(shards, dim)


def reduce_scatter(x, group, dim=0):
    """Sum over ranks and cut: (a0, b0) and (a1, b1) become a0 + a1 on rank 0, b0 + b1 on rank 1."""
    world = dist.get_world_size(group)
    if x.shape[dim] % world:
        raise ValueError(f"{world} ranks cannot share {x.shape[dim]} evenly: pad to a multiple")
    shards = [shard.contiguous() for shard in x.chunk(world, dim)]
    total = torch.empty_like(shards[0])
    dist.reduce_scatter(total, shards, group=group)
    return total


def own_chunk(x, group, dim=0):
    """Return this rank's part of a tensor that all ranks have: 6 and 5 of 11 rows on 2 ranks."""
    size = math.ceil(x.shape[dim] / dist.get_world_size(group))
    first = dist.get_rank(group) * size
    return x.movedim(dim, 0)[first : first + size].movedim(0, dim).contiguous()


# A collective is a linear function of the tensors of all ranks, where equal copies count as one
# tensor. The backward of a linear function is its transpose, which is a collective too:
#
#     forward          backward          reason
#     nothing          all-reduce        all ranks use x, so dx is the sum of their gradients
#     all-reduce       nothing           all ranks use the sum in the same way, so each has all dy
#     all-gather       reduce-scatter    as in the first line, if each rank has a shard of x
#     reduce-scatter   all-gather        as in the second line, if each rank gets a shard of y
#     all-to-all       all-to-all        gradients travel the same way back
class Communicate(torch.autograd.Function):
    """Call forward(x, group) in the forward pass, and backward(dy, group) in the backward pass."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group = group
        ctx.communicate_back = backward
        return forward(x, group) if forward else x.view_as(x)  # None sends nothing

    @staticmethod
    def backward(ctx, dy):
        dx = ctx.communicate_back(dy, ctx.group) if ctx.communicate_back else dy
        return dx, None, None, None


# Hidden states are (B, S, M), so a shard of the tokens is a part along dimension 1.
all_gather_tokens = functools.partial(all_gather, dim=1)
reduce_scatter_tokens = functools.partial(reduce_scatter, dim=1)
own_tokens = functools.partial(own_chunk, dim=1)


# The first two lines of the table are f and g of Megatron (arXiv:1909.08053). Two ranks compute
# y_0 = 2 x and y_1 = 5 x, and g adds both to y = 7 x. If dy = 1, then g gives both ranks dy_r = 1.
# Rank 0 finds dx_0 = 2, rank 1 finds dx_1 = 5, and f adds these partial gradients to dx = 7.
# Between g and the next f, all ranks compute the same norms and residuals. With sequence
# parallelism (arXiv:2205.05198), each rank does so for its own tokens only. Lines three and four
# replace f and g, in a layer with as many bytes: all-reduce = reduce-scatter + all-gather.
def copy_to_tp_region(x_BsM, group, sequence):
    """Apply f: give every rank all tokens. s is S without sequence parallelism, S / W with it."""
    pair = (all_gather_tokens, reduce_scatter_tokens) if sequence else (None, all_reduce_sum)
    return Communicate.apply(x_BsM, group, *pair)  # (2)


def reduce_from_tp_region(y_BSM, group, sequence):
    """Apply g: sum y over the ranks. Return all tokens, or this rank's shard of the tokens."""
    pair = (reduce_scatter_tokens, all_gather_tokens) if sequence else (all_reduce_sum, None)
    return Communicate.apply(y_BSM, group, *pair)  # (3)


# 3. Tensor parallelism --------------------------------------------------------------------------
# Cut the first matrix by rows and the second one by columns. Then the output shard of the first is
# the input shard of the second, and nothing is sent between them. 4 heads on 2 ranks are 2 and 2:
#
#     x --f--> [q k v: rows] --> attention of own heads ------> [o: columns] -----> g --> y
#     x --f--> [up: rows] -----> activation of own entries ---> [down: columns] --> g --> y
def parameter_shard(p, group, dim=0):
    """Return a parameter with this rank's part of p along dim, in memory of its own."""
    return nn.Parameter(own_chunk(p.detach(), group, dim).clone(), p.requires_grad)


class ColumnParallelLinear(nn.Module):
    """A linear from all features to this rank's features. Its input has been through f."""

    def __init__(self, linear, group):
        super().__init__()
        self.weight = parameter_shard(linear.weight, group)
        self.bias = None if linear.bias is None else parameter_shard(linear.bias, group)

    def forward(self, x, /):
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear from this rank's features to all features, followed by g."""

    def __init__(self, linear, group, sequence):
        super().__init__()
        self.weight = parameter_shard(linear.weight, group, 1)
        self.bias = linear.bias
        self.region = group, sequence

    def forward(self, x_BSm, /):
        # The bias is added after the sum. Before the sum, W ranks would add W biases.
        y_BsM = reduce_from_tp_region(F.linear(x_BSm, self.weight), *self.region)
        return y_BsM if self.bias is None else y_BsM + self.bias


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of an embedding. 11 words on 2 ranks are words 0 to 5 and words 6 to 10."""

    def __init__(self, embedding, group, sequence):
        super().__init__()
        self.weight = parameter_shard(embedding.weight, group)
        self.first = group.rank() * math.ceil(len(embedding.weight) / group.size())
        self.region = group, sequence

    def forward(self, tokens_BS, /):
        # Each word is on one rank, and the others add zeros. On rank 1, word 8 is row 2.
        row_BS = tokens_BS - self.first
        is_own_BS = (row_BS >= 0) & (row_BS < len(self.weight))
        x_BSM = F.embedding(row_BS.where(is_own_BS, 0), self.weight) * is_own_BS[..., None]
        return reduce_from_tp_region(x_BSM, *self.region)


def shard_layer(layer, group, sequence):
    """Shard attention and the dense MLP of a layer with Hugging Face's names, in place."""

    # q, k and v read the same input, so they share one f, and the backward sends one dx, not three.
    def enter(module, args):
        return copy_to_tp_region(args[0], group, sequence), *args[1:]

    # Norms, routers and experts stay as they are.
    blocks = [layer.self_attn] if hasattr(layer.mlp, "experts") else [layer.self_attn, layer.mlp]
    for block in blocks:
        block.register_forward_pre_hook(enter)
        for name, linear in list(block.named_children()):
            if name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                setattr(block, name, ColumnParallelLinear(linear, group))
            if name in ("o_proj", "down_proj"):
                setattr(block, name, RowParallelLinear(linear, group, sequence))


def vocab_parallel_logprobs(model, first, group, hidden_NM, targets_N, /, *, temperature=1.0):
    """Return log-probs and entropies, (N,). This rank's rows of the head start at word `first`."""
    hidden_NM = Communicate.apply(hidden_NM, group, None, all_reduce_sum)  # (2)
    z_Nv = F.linear(hidden_NM, model.head_weight) / temperature
    # NUMERICS: (4) and (5) hold for any m. With the largest logit of all ranks, exp stays finite.
    m_N = z_Nv.detach().amax(-1)
    dist.all_reduce(m_N, dist.ReduceOp.MAX, group)
    z_Nv = z_Nv - m_N[:, None]
    exp_Nv = z_Nv.exp()
    row_N = targets_N - first
    is_own_N = (row_N >= 0) & (row_N < z_Nv.shape[1])
    target_N = z_Nv.gather(-1, row_N.where(is_own_N, 0)[:, None])[:, 0] * is_own_N
    # The ranks add up three numbers per token. If rank 0 has the logits log 1 and log 2, and rank 1
    # has log 5, then m = log 5 and s = (0.2 + 0.4) + 1 = 1.6. The log-prob of the second word is
    # log 2 - log 5 - log 1.6 = log(2 / 8). All ranks get the same sums, so nothing is sent back.
    sums_3N = torch.stack((exp_Nv.sum(-1), (exp_Nv * z_Nv).sum(-1), target_N))
    s_N, u_N, target_N = Communicate.apply(sums_3N, group, all_reduce_sum, None)  # (3)
    return target_N - s_N.log(), s_N.log() - u_N / s_N  # (4), (5)


def tensor_parallel(model, group, sequence=False):
    """Shard layers, embedding and head, in place. hidden, logits and logprobs return the same."""
    vocab = len(model.head_weight)
    for layer in model.model.layers:
        shard_layer(layer, group, sequence)
    embedding = VocabParallelEmbedding(model.model.embed_tokens, group, sequence)
    model.model.embed_tokens = embedding
    if hasattr(model, "lm_head"):  # a model without one uses the embedding's rows
        model.lm_head = ColumnParallelLinear(model.lm_head, group)

    # With sequence parallelism, the final norm returns a shard of the tokens, so gather all tokens.
    # The f in logprobs has summed their gradient over the ranks already, so a rank takes its own
    # tokens of it. A reduce-scatter would count every token W times.
    def leave(norm, args, out_BsM):
        return Communicate.apply(out_BsM, group, all_gather_tokens, own_tokens)

    if sequence:
        model.model.norm.register_forward_hook(leave)

    # An all-gather needs equal shapes, so 6 and 5 logits are padded to 6 and 6. No backward here.
    def logits(hidden, /):
        own = F.linear(hidden, model.head_weight)
        size = math.ceil(vocab / dist.get_world_size(group))
        return all_gather(F.pad(own, (0, size - own.shape[-1])), group, -1)[..., :vocab]

    model.logits = logits
    model.logprobs = functools.partial(vocab_parallel_logprobs, model, embedding.first, group)


# 4. Expert parallelism --------------------------------------------------------------------------
# Each token runs through a few of E experts. All experts together are large and the row of a token
# is small, so experts stay on their ranks and rows travel (GShard, arXiv:2006.16668).
def dispatch_experts(x_NM, counts_E, experts, group, /):
    """Send rows to the ranks of their experts, run the experts there, and send the rows back.

    x_NM: rows sorted by expert, counts_E of them for each. Rank r has the r-th E / W experts, and
    calls experts(rows, counts) for rows sorted by expert. Returns (N, M). Some counts may be 0.
    """
    # COMM: counts are exchanged first, so that both sides know the size of the next message.
    counts_We = counts_E.view(dist.get_world_size(group), -1).contiguous()
    arriving_We = torch.empty_like(counts_We)
    dist.all_to_all_single(arriving_We, counts_We, group=group)
    to_rank = counts_We.sum(1).tolist()
    from_rank = arriving_We.sum(1).tolist()

    def send(rows, group, sent=to_rank, received=from_rank):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
        return out

    send_back = functools.partial(send, sent=from_rank, received=to_rank)
    # Rows arrive sorted by rank, then by expert. Sort them by expert, and undo it afterwards. Rank
    # 0 sends 3 rows to expert a and 1 row to expert b, and rank 1 sends 1 row to each:
    #
    #     as they arrive    a a a b | a b
    #     order_n           0 1 2 4 3 5
    #     sorted            a a a a b b        counts 4 2
    rows_nM = Communicate.apply(x_NM, group, send, send_back)
    expert_We = torch.arange(arriving_We.shape[1], device=x_NM.device).expand_as(arriving_We)
    order_n = expert_We.flatten().repeat_interleave(arriving_We.flatten()).argsort(stable=True)
    out_nM = experts(rows_nM[order_n], arriving_We.sum(0))
    return Communicate.apply(out_nM[order_n.argsort()], group, send_back, send)


def expert_parallel(model, group):
    """Keep this rank's E / W experts of each layer, in place. Their weights are stacked (E, ..)."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            for name, p in list(experts.named_parameters()):
                setattr(experts, name, parameter_shard(p, group))
            run = experts.forward  # called as run(x_NM, counts_E)
            experts.forward = lambda x, counts, run=run: dispatch_experts(x, counts, run, group)


# 5. Pipeline parallelism ------------------------------------------------------------------------
def keep_stage(model, stage, stages):
    """Keep the layers of one stage, in place. Stage 0 of 2 has layers 0 to 2 of 5."""
    own_layers = np.array_split(range(len(model.model.layers)), stages)[stage]
    for n in range(len(model.model.layers)):
        if n not in own_layers:
            delattr(model.model.layers, str(n))  # unlike del, this renames no other layer
    # An Identity lets the states of the stage before pass in place of tokens, and our states on.
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
    if stage < stages - 1:
        model.model.norm = nn.Identity()
        model._modules.pop("lm_head", None)  # a model without one uses the embedding's rows


# With one batch, only one stage would work at a time. So the batch is cut into micro-batches. The
# schedule is 1F1B (arXiv:2104.04473). F0 and B0 are forward and backward of micro-batch 0:
#
#     stage 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3      warm-up F0 F1     cool-down B2 B3
#     stage 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3         warm-up F0        cool-down B3
#     stage 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3            steady state only
#
# Stage i of p starts with p - 1 - i forwards. So it stores the activations of at most p - i
# micro-batches, whether there are 4 micro-batches or 400.
def run_1f1b(forward, number, like, group):
    """Run forward and backward of micro-batches 0 to number - 1. Gradients add up in .grad.

    forward(n, x) returns states, or the loss on the last stage. x: the states of the stage before,
    (B, s, M), or None on stage 0. like: a tensor of their shape, dtype and device.
    """
    stage = dist.get_rank(group)
    stages = dist.get_world_size(group)
    pending = deque()  # at most stages - stage (input, output) of micro-batches, until backward

    def exchange(neighbor, send=None, receive=False):
        if neighbor not in range(stages) or (send is None and not receive):
            return None
        # COMM: both messages start in one batch, so no two stages wait for each other's first one.
        rank = dist.get_global_rank(group, neighbor)
        received = torch.empty_like(like)
        messages = [dist.P2POp(dist.irecv, received, rank, group)] if receive else []
        if send is not None:
            messages.append(dist.P2POp(dist.isend, send.contiguous(), rank, group))
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        return received

    def forward_one(n, x):
        y = forward(n, x if x is None else x.requires_grad_())
        pending.append((x, y))
        return y.detach()

    def backward_one(dy):
        x, y = pending.popleft()
        y.backward(dy)  # the loss of the last stage has no dy, and None is its default
        return None if x is None else x.grad

    # Warm-up: forward only.
    warm_up = min(stages - 1 - stage, number)
    for n in range(warm_up):
        x = exchange(stage - 1, receive=True)
        exchange(stage + 1, send=forward_one(n, x))

    # Steady state: one forward, one backward. Our states go on, and the gradient of an earlier
    # micro-batch comes back. Then our gradient for it goes back, and the next states come.
    x = exchange(stage - 1, receive=warm_up < number)
    for n in range(warm_up, number):
        y = forward_one(n, x)
        dy = exchange(stage + 1, send=y, receive=True)
        dx = backward_one(dy)
        x = exchange(stage - 1, send=dx, receive=n < number - 1)

    # Cool-down: backward only.
    for n in range(warm_up):
        dy = exchange(stage + 1, receive=True)
        exchange(stage - 1, send=backward_one(dy))


# 6. Which group sums which gradient -------------------------------------------------------------
# Ranks that hold the same entries, but worked on other tokens or heads, have partial gradients, to
# be added up. Ranks that worked on the same tokens and heads have the same gradient.
def layout(name, grid):
    """Say how ranks share a parameter such as "model.layers.0.self_attn.q_proj.weight"."""
    # It is cut along `dim` over the group `over`. The ranks of `replicas` hold the same entries.
    # The gradients on the ranks of `partial` are partial gradients.
    *_, module, kind = name.split(".")
    # FSDP cuts a layer by rows, and its backward has summed the gradients already.
    if grid.fsdp and ".layers." in name:
        return dict(over="dc", dim=0, replicas="", partial="")
    # d and c ranks always have different tokens. For a matrix that is cut over t, that is all.
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return dict(over="t", dim=0, replicas="dc", partial="dc")
    if module in ("o_proj", "down_proj") and kind == "weight":
        return dict(over="t", dim=1, replicas="dc", partial="dc")
    # The norms of q and k are whole on every t rank, which applies them to its own heads.
    if module in ("q_norm", "k_norm"):
        return dict(over="", dim=0, replicas="dct", partial="dct")
    # Norms, routers, experts and row-parallel biases: t ranks have different tokens with sequence
    # parallelism, and the same without. An expert has got the rows of all e ranks, so edp remains.
    over, replicas = ("e", "edp") if ".experts." in name else ("", "dct")
    return dict(over=over, dim=0, replicas=replicas, partial=replicas if grid.sequence else "dc")


def simple_reduce_gradients(model, grid):
    """Sum partial gradients over ranks, in place, once a step: .grad has added up micro-batches."""
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=grid.group[layout(name, grid)["partial"]])  # (1)


# 7. The clip norm -------------------------------------------------------------------------------
# All ranks must scale by the same factor, so the norm is over all entries of all ranks, each
# counted once. If two t ranks have squares 5 and 7 of different entries of a q_proj, these count
# 5 + 7. If they have squares 8 and 8 of the same entries of an RMSNorm, these count 8 / 2 + 8 / 2.
def simple_clip_grad_norm(model, max_norm, grid):
    """Scale gradients, in place, to a norm of at most max_norm. Return the norm before that."""
    squares = 0
    for name, p in model.named_parameters():
        replicas = grid.group[layout(name, grid)["replicas"]]
        squares += p.grad.square().sum() / dist.get_world_size(replicas)
    norm = all_reduce_sum(squares, None).sqrt()  # (6); None is the group of all ranks
    for p in model.parameters():
        p.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)  # (7), with 1e-6 as in torch
    return norm


# 8. ZeRO-1: sharded optimizer states ------------------------------------------------------------
# AdamW stores two moments of every entry. Replicas would store the same ones, so ZeRO shares them
# out (arXiv:1910.02054). On 4 data ranks, with 4 bytes for each number of an entry:
#
#              weight   gradient   moments   bytes   messages
#     plain    whole    whole      whole        16   all-reduce of gradients, once a step
#     ZeRO-1   whole    whole      shard        10   the same, and all-gather of new weights
#     FSDP     shard    shard      shard         4   in a layer: 2 all-gathers, 1 reduce-scatter
class SimpleZeroAdamW:
    """AdamW with sharded moments. The replicas of a parameter must divide its number of entries."""

    def __init__(self, model, grid, **options):
        self.parts = []
        # Cut the flat parameter: 11 rows of 16 entries on 2 ranks are 88 entries each.
        for name, p in model.named_parameters():
            replicas = grid.group[layout(name, grid)["replicas"]]
            self.parts.append((p, replicas, own_chunk(p.detach().flatten(), replicas)))
        self.inner = torch.optim.AdamW([shard for _, _, shard in self.parts], **options)

    def step(self):
        """Step this rank's entries, as AdamW treats each by itself. Then gather all new entries."""
        for p, replicas, shard in self.parts:
            shard.grad = own_chunk(p.grad.flatten(), replicas)
        self.inner.step()  # (7)
        for p, replicas, shard in self.parts:
            p.data.copy_(all_gather(shard, replicas).view_as(p))


# 9. FSDP of a layer -----------------------------------------------------------------------------
def fully_shard_layer(layer, group):
    """Keep this rank's rows of each parameter, in place (arXiv:2304.11277): W divides the rows."""
    # functional_call runs a module with other tensors in place of its parameters, by their names.
    # whole_layer keeps the old forward: layer.forward is replaced below, and would call itself.
    whole_layer = nn.Module()
    whole_layer.layer = layer
    whole_layer.forward = layer.forward
    for p in layer.parameters():
        p.data = parameter_shard(p, group).data

    # The ranks have different tokens and need the same whole weights. The backward of the gather
    # is a reduce-scatter: each rank gets the gradient of its rows, summed over all ranks.
    def gather_and_run(*args):
        whole = {f"layer.{name}": Communicate.apply(p, group, all_gather, reduce_scatter)  # (1)
                 for name, p in layer.named_parameters()}  # fmt: skip
        return torch.func.functional_call(whole_layer, whole, args)

    # Autograd would keep the whole weights until the backward. A checkpoint keeps the input only,
    # and runs the layer again in the backward. So weights are gathered, freed, and gathered again.
    layer.forward = functools.partial(checkpoint, gather_and_run, use_reentrant=False)


# 10. Check: a small model under every plan, against one process ---------------------------------
# Layers 0 and 2 are dense. In layers 1 and 3, each token runs through its best of 4 experts.
VOCAB = 11
WIDTH = 16
PATIENCE = datetime.timedelta(seconds=20)
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
PLANS = {  # number of ranks -> plans
    1: ("d1",),
    2: ("d2", "t2", "t2 sp", "d2e2", "p2", "d2 fsdp"),
    4: ("d2t2", "d2t2e2 sp", "p2d2", "p2t2", "p2t2 sp", "p4", "d4", "c2d2e2", "c2t2 sp"),
}


class ToyAttention(nn.ModuleDict):
    def forward(self, x_BSM):
        linears = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (linear(x_BSM).unflatten(2, (-1, 4)).transpose(1, 2) for linear in linears)
        out = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class ToyExperts(nn.Module):
    def forward(self, x_NM, counts_E):
        parts = zip(x_NM.split(counts_E.tolist()), self.weight)
        return torch.cat([F.gelu(part @ weight) for part, weight in parts])


class ToySparseMLP(nn.ModuleDict):
    def forward(self, x_BSM):
        x_NM = x_BSM.flatten(0, 1)
        p_N, expert_N = self.gate(x_NM).softmax(-1).max(-1)
        order_N = expert_N.argsort(stable=True)
        out_NM = self.experts(x_NM[order_N], expert_N.bincount(minlength=4))
        return (p_N[:, None] * out_NM[order_N.argsort()]).view_as(x_BSM)


class ToyLayer(nn.ModuleDict):
    def forward(self, x_BSM):
        x_BSM = x_BSM + self.self_attn(self.input_layernorm(x_BSM))
        return x_BSM + self.mlp(self.post_attention_layernorm(x_BSM))


class ToyTransformer(nn.Module):
    head_weight = property(lambda self: self.lm_head.weight)

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.model.layers = nn.ModuleList()
        self.model.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        for n in range(4):
            linears = {name: nn.Linear(WIDTH, WIDTH) for name in ("q_proj", "v_proj", "o_proj")}
            linears |= dict(k_proj=nn.Linear(WIDTH, WIDTH, bias=False), q_norm=nn.RMSNorm(4))
            dense = dict(up_proj=nn.Linear(WIDTH, 8), act=nn.GELU(), down_proj=nn.Linear(8, WIDTH))
            experts = ToyExperts()
            experts.weight = nn.Parameter(torch.normal(0, 0.25, (4, WIDTH, WIDTH)))
            sparse = dict(gate=nn.Linear(WIDTH, 4, bias=False), experts=experts)  # gate: the router
            norms = {f"{at}_layernorm": nn.RMSNorm(WIDTH) for at in ("input", "post_attention")}
            mlp = ToySparseMLP(sparse) if n % 2 else nn.Sequential(OrderedDict(dense))
            parts = norms | {"self_attn": ToyAttention(linears), "mlp": mlp}
            self.model.layers.append(ToyLayer(parts))

    def hidden(self, x):
        return nn.Sequential(self.model.embed_tokens, *self.model.layers, self.model.norm)(x)

    def check_loss(self, hidden_BSM, targets_BS, mask_BS, Z):
        found = self.logprobs(hidden_BSM.flatten(0, 1), targets_BS.flatten(), temperature=0.7)
        return -((found[0] + 0.1 * found[1]) * mask_BS.flatten()).sum() / Z  # (1)

    def logits(self, hidden):
        return F.linear(hidden, self.head_weight)

    def logprobs(self, hidden_NM, targets_N, temperature):
        logp_NV = (self.logits(hidden_NM) / temperature).log_softmax(-1)
        return logp_NV.gather(-1, targets_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


class SimpleTraining:
    """A model under a plan, and what a step does with its gradients."""

    eps = 1e-6  # of (7)

    def __init__(self, model, text):
        self.model = model
        self.grid = SimpleGrid(text, PATIENCE)
        tensor_parallel(model, self.grid.group["t"], self.grid.sequence)
        expert_parallel(model, self.grid.group["e"])
        keep_stage(model, self.grid.group["p"].rank(), self.grid.group["p"].size())
        if self.grid.fsdp:
            for layer in model.model.layers:
                fully_shard_layer(layer, self.grid.group["dc"])
        self.optimizer = SimpleZeroAdamW(model, self.grid, **ADAMW)  # ZeRO-1 under every plan

    def reduce_and_clip(self, max_norm):
        simple_reduce_gradients(self.model, self.grid)
        return simple_clip_grad_norm(self.model, max_norm, self.grid)

    def parts(self, truth):
        """Yield this rank's entries of each parameter and gradient, and the true ones."""
        for name, p in self.model.named_parameters():
            part = layout(name, self.grid)
            over = self.grid.group[part["over"]]
            whole = truth.get_parameter(name)
            yield p, own_chunk(whole, over, part["dim"])
            yield p.grad, own_chunk(whole.grad, over, part["dim"])


def check_plan(text, training_class=SimpleTraining):
    """Train two steps under a plan and on one process. Return the largest error on this rank."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (8, 9))
    batch = tokens[:, :-1], tokens[:, 1:], torch.rand(8, 8) < 0.7  # inputs, targets, loss mask
    Z = batch[2].sum()
    truth = ToyTransformer()
    training = training_class(copy.deepcopy(truth), text)
    model, grid = training.model, training.grid
    truth_optimizer = torch.optim.AdamW(truth.parameters(), **ADAMW)
    # Ranks of different d or c take different rows. Ranks of different t or p take the same rows.
    micro_batches = list(zip(*(own_chunk(x, grid.group["dc"]).split(2) for x in batch)))
    t = dist.get_world_size(grid.group["t"])
    like = torch.empty(2, 8 // t if grid.sequence else 8, WIDTH)
    errors = []

    def compare(found, expected):
        errors.append((found - expected).detach().abs().max())

    def forward(n, x):
        tokens_BS, targets_BS, mask_BS = micro_batches[n]
        x = model.hidden(tokens_BS if x is None else x)
        if hasattr(model, "lm_head"):
            compare(model.logits(x), F.linear(x, truth.head_weight))
            x = model.check_loss(x, targets_BS, mask_BS, Z)
            losses.append(x.detach())
        return x

    for _ in range(2):
        losses = [torch.zeros(())]
        loss = truth.check_loss(truth.hidden(batch[0]), *batch[1:], Z)
        loss.backward()
        run_1f1b(forward, len(micro_batches), like, grid.group["p"])
        compare(all_reduce_sum(sum(losses), None), t * loss)  # each of t ranks has the loss
        norm = nn.utils.get_total_norm([p.grad for p in truth.parameters()])
        nn.utils.clip_grads_with_norm_(truth.parameters(), 0.1, norm + training.eps - 1e-6)
        compare(training.reduce_and_clip(0.1), norm)
        truth_optimizer.step()
        training.optimizer.step()
        for found, expected in training.parts(truth):
            compare(found, expected)
        truth.zero_grad()
        model.zero_grad()
    return torch.stack(errors).max()  # NaN if any error is NaN


def check_plans(plans, training_class):
    """Return the largest error of each plan. plans: number of ranks -> plans."""
    # The first AdamW imports a large package. Make one before the processes fork, so all have it.
    torch.optim.AdamW([torch.zeros(1)])
    names = [text for world in plans for text in plans[world]]
    errors = torch.full((len(names),), math.nan).share_memory_()

    def check_on_rank(rank, world, folder):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        dist.init_process_group("gloo", f"file://{folder}/{world}", PATIENCE, world, rank)
        for text in plans[world]:
            error = check_plan(text, training_class)[None]
            errors[names.index(text)] = all_gather(error, None).max()
        dist.barrier()
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        for world in plans:
            start_processes(check_on_rank, (world, folder), world, start_method="fork")
    return dict(zip(names, errors.tolist()))


def core_main(argv):
    """Print the largest error of each plan. Exit with 1 unless all are at most 1e-10."""
    errors = check_plans(PLANS, SimpleTraining)
    table = "  ".join(f"{text} {error:.0e}" for text, error in errors.items())
    print(f"{table}  largest {max(errors.values()):.1e}")
    if not all(error <= 1e-10 for error in errors.values()):  # NaN is not
        sys.exit(1)


# =================================================================================================
# The core ends here. What follows is the full version. Nobody needs it to understand the above.
# =================================================================================================
#
# It runs the core's functions on models with Hugging Face's names, such as models.py's. It adds
# plans with two parts, expert tensor parallelism, torch's FSDP2 and pipeline schedules, mixed
# precision, packed batches, generators with plans of their own, and checkpoints that any plan
# reads. Equations (1) to (7) are the core's. LETTERS in section 11 says what each letter sends.
#
# With ddp and zero1 micro-batches cost no message, so ranks may run different numbers of them, or
# none: that suits trees, whose sizes differ. Under fsdp, t, c, e and p every forward is collective:
# all ranks of a group must make the same calls. `PackedBatches` takes care of that.
#
# How it deviates: PyTorch's DDP and FSDP2 average gradients over ranks, this sums. DDP and Megatron
# overlap the sum with the backward, this does not. Not here: Float8; under t gradients of logits
# (`model(tokens)`), and embeddings as input.
#
# References: Megatron arXiv:1909.08053, sequence parallelism arXiv:2205.05198; experts: GShard
# arXiv:2006.16668, folding arXiv:2504.14960; FSDP arXiv:2304.11277; ZeRO arXiv:1910.02054; 1F1B
# arXiv:2104.04473; ZB-V arXiv:2401.10241; torch.distributed.checkpoint (DCP).

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import hashlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import textwrap  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import uuid  # noqa: E402
import warnings  # noqa: E402
import zlib  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.utils.checkpoint as ckpt  # noqa: E402
from torch.distributed import fsdp, pipelining  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402


# 11. Plans and their groups ----------------------------------------------------------------------
#
# Plan strings, which ranks form which group, and what a plan does not fit.
class Letter(NamedTuple):
    """What one letter of a plan means. See LETTERS."""

    axis: str  # the field of `Plan` that holds its degree
    splits: str
    forward: str  # what a rank sends
    backward: str
    gradients: str  # over which ranks they are summed once a step


# The one table of letters. The order is the order of the grids, outermost first: p d c t of a
# stage's ranks, and e and ffn's t of the same ranks for experts. SP is sequence parallelism, which
# is on by default.
LETTERS = {
    "p": Letter("pp", "layers", "states to the next stage", "gradients of the states, back",
                "of a tied embedding: over the first and the last stage"),
    "d": Letter("dp", "rows of the batch", "ddp, zero1: nothing. fsdp: a layer's all-gather",
                "fsdp: an all-gather and a reduce-scatter of a layer",
                "over d and c; fsdp's backward has summed them"),
    "c": Letter("cp", "tokens of each sequence", "what the attention sends",
                "what the attention sends back", "over d and c"),
    "t": Letter("tp", "heads, inner widths, vocabulary; with SP tokens in between",
                "a layer: 2 all-gathers, 2 reduce-scatters; without SP 2 all-reduces. Ends: a "
                "reduce-scatter after the embedding, an all-gather of the last states, 2 "
                "all-reduces of (N,) numbers for log-probs",
                "the same for a layer. Ends: an all-gather, an all-reduce of the last states",
                "of norms, routers and biases after g: over t too"),
    "e": Letter("ep", "experts of a layer", "3 all-to-all: counts, rows, rows back",
                "2 all-to-all", "of experts: over the d c t / (e etp) ranks with the same ones"),
    "ffn's t": Letter("etp", "the inner width of each expert", "as t, around the experts",
                      "as t, around the experts", "of routers: over t too"),
}  # fmt: skip


def letters_table() -> str:
    """Return LETTERS as text: what each letter splits, sends and sums."""
    lines = []
    for name, letter in LETTERS.items():
        lines.append(f"  {name:9}{letter.splits}")
        for field in ("forward", "backward", "gradients"):
            text = f"{field + ':':11}{getattr(letter, field)}"
            indents = dict(initial_indent=" " * 11, subsequent_indent=" " * 22)
            lines.append(textwrap.fill(text, 98, **indents))
    return "\n".join(lines)


BACKENDS = "archon", "fsdp", "megatron", "sglang", "vllm"
DEGREES = "(?:[a-z][1-9][0-9]*)+"  # one or more letters, each with a number of 1 or more
PLAN = rf"""
    (?: (?P<backend> (?!attn:|ffn:) [a-z]+ ) : )?
    (?: (?P<flat> {DEGREES} )
    |   (?P<open> \( )? attn: (?P<attn> {DEGREES} ) \| ffn: (?P<ffn> {DEGREES} ) (?(open) \) ) )
"""  # for re.VERBOSE


@dataclasses.dataclass(frozen=True)
class Plan:
    """Define how many ranks each kind of parallelism uses, and which ranks form its groups.

        d2t2            4 ranks: data 2, tensor 2             p2d2t2        8 ranks: pipeline 2 too
        d2t2e4          the same 4 ranks, experts over all    d2c2          data 2, context 2
        (attn:d2t2|ffn:e2t2)   expert tensor degree 2, on the tensor ranks
        archon:d2t2     with a backend's name in front

    LETTERS says what each letter does. A letter appears at most once, and a missing one means 1.
    The ranks are a grid (p, d, c, t), as in `SimpleGrid`. For experts, the d c t ranks of a stage
    are numbered again as a grid (expert-dp, ep, etp), where etp, ffn's t, is 1 or t.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    backend: str | None = None

    @classmethod
    def parse(cls, text) -> "Plan":
        """Read a plan from a string, or raise ValueError. `plans_on_same_ranks` takes |."""
        found = re.fullmatch(PLAN, text, re.VERBOSE) if isinstance(text, str) else None
        if found is None:
            raise ValueError(
                f"expected a plan such as d2t2, archon:d2t2 or (attn:d2t2|ffn:e2t2), got {text!r}. "
                f"Each letter has a number of 1 or more")  # fmt: skip
        if found["backend"] not in (None, *BACKENDS):
            raise ValueError(f"plan {text!r}: expected a backend of {', '.join(BACKENDS)}, got "
                             f"{found['backend']!r}")  # fmt: skip

        def degrees(part, letters):
            pairs = re.findall("([a-z])([0-9]+)", part)
            numbers = {letter: int(number) for letter, number in pairs}
            if len(numbers) < len(pairs) or not numbers.keys() <= {*letters}:
                raise ValueError(f"plan {text!r}: expected letters of {' '.join(letters)}, each at "
                                 f"most once, got {part!r}")  # fmt: skip
            return numbers

        ffn = {}
        if found["flat"]:
            attn = degrees(found["flat"], "dtpce")
        else:
            attn = degrees(found["attn"], "dtpc")
            ffn = degrees(found["ffn"], "detp")
            attn |= {"e": ffn.get("e", 1), "ffn's t": ffn.get("t", 1)}
        axes = {LETTERS[letter].axis: number for letter, number in attn.items()}
        plan = cls(**axes, backend=found["backend"])

        # Experts use the ranks of attention, in another grid. So d and p of ffn follow from the
        # other degrees: they may be left out, and must agree where they are given. For example, in
        # (attn:d4t2|ffn:d2e2t2) a copy of the experts takes e t = 4 of 8 ranks, so ffn has d2.
        for letter, degree in (("d", plan.edp), ("p", plan.pp)):
            if ffn.get(letter, degree) != degree:
                raise ValueError(f"plan {text!r}: expected {letter}{degree} in ffn, as it follows "
                                 f"from attn, got {letter}{ffn[letter]}. Leave it out")  # fmt: skip
        return plan

    def __post_init__(self):
        for name, letter in LETTERS.items():
            degree = getattr(self, letter.axis)
            if not (isinstance(degree, int) and degree > 0):
                raise ValueError(f"expected {name} to be an integer of 1 or more, got {degree!r}")
        if self.etp not in (1, self.tp):
            raise ValueError(
                f"plan {self}: expected ffn's t to be 1 or attn's t = {self.tp}, got {self.etp}")
        # A stage consists of whole groups of experts, each of e times ffn's t ranks.
        product = "d * c * t" if self.etp == 1 else "d * c"
        ranks = self.dp * self.cp * self.tp // self.etp
        if ranks % self.ep:
            raise ValueError(
                f"plan {self}: expected e to divide {product} = {ranks}, got {self.ep}")

    @property
    def world(self) -> int:
        """The number of ranks. Experts add none: they are distributed over the existing ones."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.world // (self.pp * self.ep * self.etp)

    def has_degrees_of(self, other) -> bool:
        """Return whether two plans differ at most by the name of the backend."""
        return dataclasses.replace(self, backend=other.backend) == other

    def require_fits(self, *, world=None, config=None, ulysses=False, shard=None) -> None:
        """Raise ValueError unless the plan fits the ranks and the model that are given.

        world: int. The number of ranks that were started.
        shard: int. HSDP: how many of the d ranks share the weights.
        config: ModelConfig.
        ulysses: bool. Context parallelism distributes heads, so c must divide them as well.
        """
        layers = self.pp if config is None else config.num_hidden_layers
        for is_wrong, text in (
            (world not in (None, self.world),
             f"expected p * d * c * t = {self.world} ranks, got {world}. Start {self.world} ranks, "
             f"or change the plan"),
            (shard is not None and self.dp % shard,
             f"{shard} ranks that shard must divide d = {self.dp}"),
            (config is not None and not config.sparse_layers and self.ep * self.etp > 1,
             "expected a model with experts, got a dense one. Leave e and ffn out"),
            (self.pp > layers,
             f"expected at most a stage for each of {layers} layers, got p = {self.pp}"),
        ):  # fmt: skip
            if is_wrong:
                raise ValueError(f"plan {self}: {text}")

        # Each degree splits something into equal parts.
        for letters, degree, what, size in (
            ("t", self.tp, "query heads", "num_attention_heads"),
            ("t", self.tp, "key heads", "num_key_value_heads"),
            ("t", self.tp, "intermediate_size", "intermediate_size"),
            ("t * c", ulysses * self.tp * self.cp, "query heads (ulysses)", "num_attention_heads"),
            ("e", self.ep, "experts", "num_experts"),
            ("ffn's t", self.etp, "moe_intermediate_size", "moe_intermediate_size"),
        ):
            if config is not None and degree > 1 and getattr(config, size) % degree:
                raise ValueError(f"plan {self}: expected {what} divisible by {letters} = {degree}, "
                                 f"got {getattr(config, size)}")  # fmt: skip

    def __str__(self):
        """Return the shortest string that parses to this plan."""
        text = f"p{self.pp}d{self.dp}t{self.tp}c{self.cp}"
        if self.etp > 1:
            text = f"(attn:{text}|ffn:p{self.pp}e{self.ep}t{self.etp})"
        else:
            text = f"{text}e{self.ep}"
        text = re.sub("[a-z]1(?![0-9])", "", text) or "d1"  # degrees of 1 are left out
        return f"{self.backend}:{text}" if self.backend else text


def plans_on_same_ranks(text) -> tuple[Plan, ...]:
    """Read plans joined by |, each for the same ranks, or raise ValueError.

    "t4|d2t2" is the plans t4 and d2t2, both of 4 ranks.
    """
    if "+" in text:
        raise ValueError(
            f"expected a plan such as d2t2 or d2|t2, got {text!r}. Ranks of their own for "
            f"generation, A+B, are not supported. A|B shares ranks")  # fmt: skip
    plans = tuple(Plan.parse(one) for one in re.split(r"\|(?!ffn:)", text))  # | before ffn: stays
    if len({plan.world for plan in plans}) > 1:
        worlds = ", ".join(f"{plan} has {plan.world} ranks" for plan in plans)
        raise ValueError(f"expected plans of one world on the same devices, got: {worlds}")
    return plans


class Grid(SimpleGrid):
    """The core's groups of a plan, and its meshes: grids of ranks as torch knows them.

    Making it makes all communicators of the plan, and is collective over the world.

    plan: Plan.
    device_type: "cpu" or "cuda". Where the model runs.
    shard: int. HSDP: how many of the d ranks share the weights. Default: all.

    dense: DeviceMesh (t, replicate, fsdp) of this rank's stage. fsdp: the d and c ranks that share
        the weights under FSDP. replicate: those that hold copies of them, which HSDP has.
    experts: DeviceMesh (e, etp, edp) of this rank's stage.
    ends: the first and the last stage, which both hold a tied embedding.

    A parameter is cut over the first dimensions of a mesh, and then by FSDP or ZeRO-1 over the
    last. A tensor of a DeviceMesh lists its cuts in this order.
    """

    def __init__(self, plan, device_type="cpu", *, shard=None):
        plan.require_fits(world=dist.get_world_size(), shard=shard)
        # By default torch gives each new group 10 or 30 minutes, whatever the first one was given.
        backend = dist.group.WORLD._get_backend(torch.device(device_type))
        degrees = f"p{plan.pp}d{plan.dp}c{plan.cp}t{plan.tp}e{plan.ep * plan.etp}"
        super().__init__(f"{degrees} sp", backend.options._timeout)
        self.plan = plan
        index = torch.cuda.current_device() if device_type == "cuda" else None
        self.device = torch.device(device_type, index)
        along = self.group_along
        shard = shard or plan.dp

        def mesh(ranks, *names):
            groups = [self.group[name] for name in names]
            return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)

        stage = self.group["p"].rank()
        ranks = self.ranks.reshape(plan.pp, plan.dp // shard, -1, plan.tp)
        self.group |= {"replicate": along(ranks, [1]), "fsdp": along(ranks, [2])}
        self.dense = mesh(np.moveaxis(ranks[stage], -1, 0), "t", "replicate", "fsdp")
        ranks = self.ranks.reshape(plan.pp, plan.edp, plan.ep, plan.etp)
        self.group |= {"e": along(ranks, [2]), "etp": along(ranks, [3])}
        self.experts = mesh(np.moveaxis(ranks[stage], 0, -1), "e", "etp", "edp")
        self.ends = None
        if plan.pp > 1:  # the stages in between are in no such group
            self.ends = along(self.ranks.reshape(plan.pp, -1)[[0, -1]], [0])
        wait_for_all(device_type)

    @property
    def dp_rank(self) -> int:
        """Which of the d shares of the batch this rank works on."""
        return self.group["d"].rank()


def all_gather_objects(item, group=None) -> list:
    """Return the items of all ranks of a group, in rank order. Collective. Default: of all ranks.

    item: anything that can be pickled.
    """
    items = [None] * dist.get_world_size(group)
    # COMM: an all-gather of pickled objects. The callers say what they gather, and why.
    # Pinned by tests/test_packed.py::test_ranks_are_one_process.
    dist.all_gather_object(items, item, group=group)
    return items


def wait_for_all(device="cpu") -> None:
    """Return when all ranks of the default group are here."""
    # COMM: an all-reduce. A rank that refuses its settings next leaves at once. It must not close
    # the connections, or rank 0 the store, with which another rank still joins a group.
    # Pinned by tests/test_faults.py::test_no_rank_leaves_while_another_joins.
    dist.all_reduce(torch.zeros((), device=device))


# 12. Where a rank's part lies --------------------------------------------------------------------
#
# The functions that sum and clip gradients, update, compare, write, read or send weights read the
# places of parameters. They do not ask how a model was split.
class Place(NamedTuple):
    """Where this rank's entries of a parameter lie, and which ranks share the work on them.

    A box is a range for each dimension. A matrix of 13 x 8, cut by t = 2 along dimension 0 and then
    by FSDP over d = 2 along dimension 0, on the rank with t = 1 and d = 1:

        boxes[0]   0-13, 0-8      the whole
        boxes[1]   7-13, 0-8      t = 0 has the rows 0-7
        boxes[2]   10-13, 0-8     d = 0 has the rows 7-10

    mesh: DeviceMesh, of the grid. None without a grid.
    boxes: tuple. boxes[k] holds this rank's entries after the first k cuts.
    cuts: tuple of (dimension of the tensor, name of the mesh's dimension), in the order of cutting.
    sums: tuple of process groups over which its gradient is summed, one after the other.
    holders: int. How many ranks of the world hold each entry.
    """

    mesh: DeviceMesh | None
    boxes: tuple
    cuts: tuple = ()
    sums: tuple = ()
    holders: int = 1

    @property
    def shape(self) -> tuple:
        """The shape of the whole parameter."""
        return tuple(map(len, self.boxes[0]))

    @property
    def region(self) -> tuple:
        """The slices of the whole that are on this rank."""
        return tuple(slice(r.start, r.stop) for r in self.boxes[-1])

    @property
    def pattern(self) -> tuple:
        """(dimension, ranks, distance between neighboring ranks) of each cut.

        Groups are lines of a regular grid. So if the patterns of two parameters are equal, every
        rank, and not only this one, has the same entries of both.
        """
        found = []
        for dim, name in self.cuts:
            first, second, *_ = ranks = dist.get_process_group_ranks(self.mesh.get_group(name))
            found.append((dim, len(ranks), second - first))
        return tuple(found)

    def cut(self, dim, name) -> "Place":
        """Cut this rank's entries along `dim` over a dimension of the mesh, as `own_chunk` does."""
        ranks = self.mesh[name].size()
        if ranks == 1:
            return self
        # 7 rows on 2 ranks are 4 and 3. If rows run out, the last ranks have none.
        rows = self.boxes[-1][dim]
        size = math.ceil(len(rows) / ranks)
        first = self.mesh.get_local_rank(name) * size
        box = list(self.boxes[-1])
        box[dim] = rows[first : first + size]
        return self._replace(
            boxes=(*self.boxes, tuple(box)), cuts=(*self.cuts, (dim, name)),
            holders=self.holders // ranks,
        )  # fmt: skip

    def cut_copies(self) -> "Place":
        """Cut by rows over the ranks with other tokens and the same entries."""
        # A number without dimensions has no rows: each of the ranks has it.
        return self.cut(0, self.mesh.mesh_dim_names[-1]) if self.shape else self

    def as_dtensor(self, x):
        """Return this rank's entries x as the DTensor that torch's checkpoints expect."""
        if not self.cuts:
            return x
        # The mesh has its dimensions in the order of cutting, which is what a DTensor means by two
        # cuts of one dimension.
        by_name = {name: Shard(dim) for dim, name in self.cuts}
        placements = [by_name.get(name, Replicate()) for name in self.mesh.mesh_dim_names]
        whole = dict(shape=torch.Size(self.shape))
        whole["stride"] = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, placements, run_check=False, **whole)

    @torch.no_grad()
    def gather(self, x, kept=0):
        """Undo all cuts of this rank's entries x but the first `kept`. Collective.

        It takes no more memory than the result, this rank's entries and a copy of them.
        """
        # 13 rows under t2, and then FSDP over d2:
        #
        #     t 0: 7 rows   d 0: 4  d 1: 3          gathered over d: 7 and 6 rows
        #     t 1: 6 rows   d 0: 3  d 1: 3          and then over t: 13
        for k in reversed(range(kept, len(self.cuts))):
            dim, name = self.cuts[k]
            group = self.mesh.get_group(name)
            size = len(self.boxes[k][dim])
            rows = x.movedim(dim, 0)
            piece = math.ceil(size / group.size())
            # COMM: an all-gather over the ranks of one cut. Pieces are padded to equal size, so an
            # empty one is sent too. Pinned by
            # tests/test_parallel.py::test_every_plan_is_one_process.
            if len(rows) < piece:
                rows = torch.cat([rows, rows.new_zeros(piece - len(rows), *rows.shape[1:])])
            whole = rows.new_empty(piece * group.size(), *rows.shape[1:])
            dist.all_gather_single(whole, rows.contiguous(), group=group)
            x = whole[:size].movedim(0, dim)
        return x


def place_of(name, shape, grid, mode, ends_share_embedding) -> Place:
    """Return the place of a parameter with this shape of the whole: by the core's `layout`.

    ends_share_embedding: bool. The first and the last stage share an embedding, on different ranks.
    """
    plan = grid.plan
    how = layout(f".{name}", grid)
    is_expert = ".experts." in name
    mesh = grid.experts if is_expert else grid.dense
    place = Place(mesh, (tuple(map(range, shape)),), holders=plan.world // plan.pp)
    if how["over"]:
        place = place.cut(how["dim"], how["over"])
    if is_expert:
        place = place.cut(inner_width(name), "etp")

    # Experts have got the rows of all ranks but those of edp. A router whose experts' width is cut
    # sees a partial sum of the outputs that it weighs. After the last norm all t ranks compute the
    # same: a critic's head has the whole gradient.
    partial = "edp" if is_expert else how["partial"]
    if plan.etp > 1 and ".mlp.gate." in name:
        partial = "dct"
    if partial == "dct" and not name.startswith("model."):
        partial = "dc"
    if mode == "fsdp":  # FSDP2 cuts what t and e have left, and sums over these ranks
        place = place.cut_copies()
        partial = "t" if partial == "dct" else ""
    sums = [grid.group[partial]]
    if ends_share_embedding and name == TIED and grid.ends is not None:
        sums.append(grid.ends)
        place = place._replace(holders=2 * place.holders)
    return place._replace(sums=tuple(group for group in sums if group.size() > 1))


TIED = "model.embed_tokens.weight"  # of a tied model, on the first stage and on the last


@dataclasses.dataclass
class Part:
    """What this rank has of a model, under which plan.

    places: dict. Name of a parameter -> Place.
    grid: Grid. None for a model that `parallelize` has not seen, of which each rank has a copy.
    mode, offload, compute_dtype: as given to `parallelize`.
    pipeline: a `TorchPipeline` if a rank has two stages, else None.
    """

    plan: Plan
    device: torch.device
    places: dict
    grid: object = None
    mode: str = "ddp"
    offload: bool = False
    compute_dtype: torch.dtype | None = None
    pipeline: object = None

    def stages(self, model) -> dict:
        """Return {stage: the module whose `hidden` runs its layers} of this rank's stages.

        The module of a rank's only stage is the model itself.
        """
        if self.pipeline is not None:
            return self.pipeline.own
        return {self.grid.group["p"].rank() if self.grid else 0: model}

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage of a pipeline, or all of the model."""
        if self.pipeline is not None:
            return self.pipeline.last is not None
        return self.grid is None or self.grid.group["p"].rank() == self.plan.pp - 1

    def has_head(self, root) -> bool:
        """Return whether one of `stages` has the last norm, so that it can compute log-probs."""
        return self.is_last and (self.pipeline is None or root is self.pipeline.last)


def part_of(model) -> Part:
    """Return a model's Part: what `parallelize` made, or a new one if every rank has it whole."""
    if hasattr(model, "part"):
        return model.part
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError("expected a whole model or one of parallelize, got one with DTensors")
    # Without a process group there is one rank, and no other rank to sum with.
    world = dist.get_world_size() if dist.is_initialized() else 1
    sums = (dist.group.WORLD,) if world > 1 else ()
    places = {name: whole_place(p)._replace(sums=sums, holders=world)
              for name, p in model.named_parameters()}  # fmt: skip
    return Part(Plan(dp=world), next(model.parameters()).device, places)


def whole_place(x) -> Place:
    """Return the place of a tensor that is whole on this rank."""
    return Place(None, (tuple(map(range, x.shape)),))


def local(tensor):
    """Return the plain tensor on this rank. A DTensor shares its memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_tensor(model, name, x) -> None:
    """Replace a parameter or a buffer of a model by another one."""
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, x)


def full(tensor, place=None):
    """Return the whole of a tensor of which this rank has a part. Collective if it is sharded.

    place: Place. Where the part lies, as `model.part.places` says it of a parameter and its
        gradient. Default: the tensor is whole, or a DTensor, which says it itself.
    """
    if place is not None:
        return place.gather(local(tensor.detach()))
    # COMM: all-gathers over the ranks of each cut, by torch. All of them must call it. Pinned by
    # tests/test_parallel.py::test_every_plan_is_one_process.
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(model) -> None:
    """Drop what FSDP gathered: a forward without a backward leaves the root's weights whole."""
    for root in part_of(model).stages(model).values():
        if isinstance(root, fsdp.FSDPModule):
            root.reshard()


# 13. parallelize ---------------------------------------------------------------------------------
#
# The public call, what it refuses, and the steps that it takes: t and e, stages, activation
# checkpointing, the compiler, FSDP2. (Models that only generate are split in section 18.)
AC = "none", "full", "op"
MODES = "ddp", "fsdp", "zero1"


def parallelize(
    model, plan, *, device_mesh, attention=None, mode="ddp", sequence=True, schedule="1f1b",
    ac="none", compile=False, offload=False, compute_dtype=None,
):  # fmt: skip
    """Turn a whole model, equal on all ranks, into this rank's part of a plan, and return it.

    model: a `models.Transformer`, or a module with the names of the core's `ToyTransformer`; under
        a plan of d alone with ddp or zero1, any module. On the device where it will run, or on the
        meta device, for `materialise`. It is changed.
    plan: Plan. Its world is the number of ranks.
    device_mesh: Grid. `Grid(plan)`.
    attention: the callable of context parallelism, which the layers call. Needed for c > 1.
    mode: "ddp" (whole copies), "zero1" (copies, with `LocalOptimizer(zero=True)`) or "fsdp" (FSDP2;
        HSDP if the grid replicates). Section 8 compares them.
    sequence: bool. Sequence parallelism: distribute tokens over the t ranks where no matrix is cut.
        t must divide the number of tokens.
    schedule: str. A key of SCHEDULES, for p > 1.
    ac: str. What the backward computes again. "none". "full": each layer, from its input. "op":
        all but large products and messages, see `keep_products_and_messages`.
    compile: bool. torch.compile each layer by itself, for any length.
    offload: bool. Keep the shards of fsdp, their gradients and the optimizer on the CPU.
    compute_dtype: torch.dtype. Mixed precision: products in this dtype, everything else in the
        dtype of the weights. Section 16 has the details.

    Returns the model, which has a `part`: its parameters are this rank's entries, plain tensors,
    and under fsdp DTensors of FSDP2. ValueError on every rank, before the first message and before
    the model is changed, if options do not fit together.

    `PackedBatches` runs the result. If you write your own loop: data-parallel ranks get different
    sequences, tensor- and pipeline-parallel ranks the same ones, and context-parallel ranks
    different tokens of the same ones. Each divides its loss by the global count, and tensor ranks
    all compute the same loss. Run micro-batches by `run_micro_batches`, then call reduce_gradients,
    clip_grad_norm and the optimizer's step.
    """
    for name, value, known in (
        ("mode", mode, MODES), ("schedule", schedule, SCHEDULES), ("ac", ac, AC)
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    config = getattr(model, "config", None)
    plan.require_fits(world=dist.get_world_size(), config=config)
    options = dict(attention=attention, mode=mode, sequence=sequence, schedule=schedule, ac=ac,
                   compile=compile, offload=offload, compute_dtype=compute_dtype)  # fmt: skip
    for is_wrong, text in option_conflicts(model, plan, device_mesh, **options):
        if is_wrong:
            raise ValueError(f"plan {plan}: {text}")
    if attention is not None:
        model.attention = attention
    grid = with_sequence(device_mesh, sequence)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    is_tied = not hasattr(model, "lm_head")
    shard_model(model, grid)
    pipeline = None
    if schedule != "1f1b":
        pipeline = TorchPipeline(model, grid.group["p"], schedule, is_tied)
    elif plan.pp > 1:
        keep_stage_and_ends(model, grid.group["p"].rank(), plan.pp, is_tied)
    places = {name: place_of(name, shapes[name], grid, mode, is_tied and schedule != "zbv")
              for name, _ in model.named_parameters()}  # fmt: skip
    model.part = Part(plan, grid.device, places, grid, mode, offload, compute_dtype, pipeline)

    # The order matters. What is computed again includes the messages inside a layer. FSDP is last,
    # because it cuts what the others have left.
    if ac != "none":
        checkpoint_layers(model.model.layers, ac, plan)
    if compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    if mode == "fsdp":
        for root in model.part.stages(model).values():
            apply_fsdp(root, model.part)
    return model


def option_conflicts(
    model, plan, grid, *, attention, mode, sequence, schedule, ac, compile, offload, compute_dtype
) -> list:
    """Return (whether it is so, the error) of options that need or exclude one another."""
    is_fsdp = mode == "fsdp"
    is_sparse = hasattr(model, "config") and bool(model.config.sparse_layers)
    stages = plan.pp * SCHEDULES[schedule][1]
    layers = len(model.model.layers) if plan.pp > 1 else stages
    names = dict(model.named_parameters(remove_duplicate=False))
    wide = next(model.parameters()).dtype
    coarser = compute_dtype is None or (
        compute_dtype.is_floating_point and torch.finfo(compute_dtype).eps > torch.finfo(wide).eps)
    return [
        (not plan.has_degrees_of(grid.plan),
         f"expected its grid, got that of plan {grid.plan}; use Grid(plan)"),
        (hasattr(model, "part") or isinstance(model, fsdp.FSDPModule),
         "expected a whole model, got one that is split or sharded already; split it once"),
        (not coarser,
         f"compute_dtype: expected a coarser dtype than the weights' {wide}, got {compute_dtype}"),
        (plan.tp > 1 and len(names) > len({*map(id, names.values())}),
         "one parameter with two names cannot be cut; set tie_word_embeddings"),
        (plan.pp == 1 and schedule != "1f1b", f"schedule={schedule!r} needs a pipeline, p"),
        (stages > layers, f"{schedule} cuts {stages} stages, but the model has {layers} layers"),
        (grid.group["replicate"].size() > 1 and not is_fsdp,
         f'a grid that replicates shards needs mode="fsdp", got mode={mode!r}'),
        (offload and not is_fsdp,
         f'offload=True moves shards: it needs mode="fsdp", got mode={mode!r}'),
        (plan.cp > 1 and attention is None,
         "c splits sequences: give attention=, e.g. a ring over its c ranks"),
        # zbv runs backward twice through a stage, for inputs and for weights.
        (schedule == "zbv" and (is_fsdp or ac == "op"),
         'zbv has no mode="fsdp" and no ac="op", which follow one backward of a layer'),
        (is_fsdp and ac == "op" and is_sparse and plan.edp == 1,
         'each expert is whole on one rank, and ac="op" does not follow FSDP2 there; use "full"'),
        (ac == "op" and compile and plan.tp * plan.ep > 1,
         'torch.compile cannot keep what messages have brought: use ac="full", or no compile'),
        (is_sparse and plan.tp > 1 and not sequence and plan.etp == 1,
         f"without sequence=True every tensor rank would send the same tokens to the experts; use "
         f"ffn's t = {plan.tp}"),
    ]  # fmt: skip


def with_sequence(grid, sequence) -> Grid:
    """Return a grid for models with or without sequence parallelism, with the same groups."""
    grid = copy.copy(grid)
    grid.sequence = sequence or grid.plan.tp == 1
    return grid


def shard_model(model, grid) -> None:
    """Cut a whole model by t and e, in place, by the core's functions."""
    group = grid.group
    if grid.plan.tp > 1:
        tensor_parallel(model, group["t"], grid.sequence)
        if hasattr(model, "lm_head_shard"):
            # models.py computes logits and log-probs by itself, in chunks, from a rank's rows.
            del model.logits, model.logprobs
            options = dict(group=group["t"], vocab_start=model.model.embed_tokens.first)
            model.lm_head_shard = lambda: (model.head_weight, options)
    if grid.plan.etp > 1:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                expert_tensor_parallel(layer.mlp, grid)
    if grid.plan.ep > 1:
        expert_parallel(model, group["e"])


def expert_tensor_parallel(mlp, grid) -> None:
    """Keep this rank's part of each expert's inner width, in place."""
    # The core leaves experts whole, and each t rank sends its own tokens to them. If their width is
    # split, all t ranks need all tokens: f is applied before the router, and g after the experts.
    region = grid.group["t"], grid.sequence
    mlp.register_forward_pre_hook(
        lambda _, args: (copy_to_tp_region(args[0], *region), *args[1:])
    )
    mlp.register_forward_hook(lambda _, args, y: reduce_from_tp_region(y, *region))
    for name, p in list(mlp.experts.named_parameters()):
        setattr(mlp.experts, name, parameter_shard(p, grid.group["etp"], inner_width(name)))


def inner_width(name) -> int:
    """Return the dimension of the inner width in a weight of a layer's experts."""
    # Weights are (E, inner, M), except for down_proj, which is (E, M, inner).
    return 2 if name.endswith("down_proj") else 1


def apply_fsdp(root, part) -> None:
    """Apply FSDP2 to every layer and the rest, with gradients summed over ranks, not averaged."""
    policy = fsdp.OffloadPolicy()
    if part.offload:
        policy = fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    precision = fsdp.MixedPrecisionPolicy()
    if part.compute_dtype is not None:
        # NUMERICS: FSDP2 would cast every floating tensor that enters a layer, also the cosines and
        # sines of the positions, which bf16 gets wrong from position 257 on. Pinned by
        # tests/test_precision.py::test_fsdp_computes_as_ddp_does.
        wide = next(root.parameters()).dtype
        precision = fsdp.MixedPrecisionPolicy(part.compute_dtype, wide, cast_forward_inputs=False)

    # A layer is a unit: its weights are gathered just before it runs and dropped after. Experts are
    # a unit of their own over fewer ranks, as other ranks hold copies of them than of the rest. The
    # inner units come first: fully_shard takes what is in a module and in no unit yet.
    dense = part.grid.dense
    mesh = dense["replicate", "fsdp"] if dense["replicate"].size() > 1 else dense["fsdp"]
    layers = [*root.model.layers.children()]
    units = [(layer.mlp.experts, part.grid.experts["edp"])
             for layer in layers if hasattr(layer.mlp, "experts")]  # fmt: skip
    units += [(module, mesh) for module in (*layers, root)]
    for module, ranks in units:
        fsdp.fully_shard(module, mesh=ranks, offload_policy=policy, mp_policy=precision)
        # NUMERICS: FSDP2 averages by default; the losses here are parts of a sum. gloo has no
        # pre-multiplied sum, hence the second call.
        # Pinned by tests/test_ranks.py::test_ranks_and_sharding_give_the_one_process_run.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    # The root's own weights (embedding, norm, head) are gathered when one calls the model's
    # `forward`. Training here calls `hidden`, so that must gather them too.
    fsdp.register_fsdp_forward_method(root, "hidden")


@torch.no_grad()
def materialise(model) -> None:
    """Allocate this rank's part of a model that was on the meta device when it was split.

    Its content is undefined afterwards. The largest tensor that is ever made is a part's.
    """
    part = part_of(model)
    for root in part.stages(model).values():
        root.to_empty(device="cpu" if part.offload else part.device)


# What ac="op" keeps of a layer.
KEPT = {"mm", "bmm", "addmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention"}  # fmt: skip
KEPT_MESSAGES = {"allreduce_", "allgather_", "reduce_scatter_", "alltoall_base_"}


def checkpoint_layers(layers, ac, plan) -> None:
    """Let the backward compute layers again, see `ac` of `parallelize`. No name changes."""
    options = dict(use_reentrant=False)
    if ac == "op":
        options["context_fn"] = functools.partial(keep_products_and_messages, plan)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def keep_products_and_messages(plan):
    """Return a context for a layer's forward, and one for running it again in the backward.

    Norms, activations and rotations are computed again. Products and attention are kept, and what
    the collectives of t and e have brought. A ring sends its blocks again: keeping them would undo
    what it saves. FSDP2 gathers weights by other collectives, which are not kept either.
    """

    def policy(context, op, *args, **options):
        if op._overloadpacket.__name__ in KEPT:
            return ckpt.CheckpointPolicy.MUST_SAVE
        return ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    contexts = ckpt.create_selective_checkpoint_contexts(policy)
    if plan.tp * plan.ep == 1:
        return contexts
    # Messages come first, so that torch, which counts operations, does not see what it copies.
    kept = deque()
    return [both(Messages(kept, again), context) for again, context in enumerate(contexts)]


@contextlib.contextmanager
def both(first, second):
    """Enter two contexts as one."""
    with first, second:
        yield


class Messages(TorchDispatchMode):
    """Keep what collectives bring while a layer runs, and give it back when the layer runs again.

    kept: deque of (tensors, what the collective returned), in the order of the calls.
    """

    def __init__(self, kept, again):
        super().__init__()
        self.kept = kept
        self.again = again

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace != "c10d" or op._overloadpacket.__name__ not in KEPT_MESSAGES:
            return op(*args, **(kwargs or {}))
        # COMM: torch's collectives fill their first argument. Nothing is sent again: all ranks of a
        # group run the same layers again, and none of them sends. Pinned by
        # tests/test_parallel.py::test_what_checkpointing_computes_again.
        filled = tree_leaves(args[0])
        if not self.again:
            work = op(*args, **(kwargs or {}))
            self.kept.append(([x.detach() for x in filled], work))
            return work
        brought, work = self.kept.popleft()
        for x, old in zip(filled, brought, strict=True):
            x.copy_(old)
        return work


# 14. Pipelines -----------------------------------------------------------------------------------
#
# The core's 1F1B runs one stage a rank. Two schedules of torch idle less, and give a rank two.
# Interleaved, of 4 stages on 2 ranks rank 0 has 0 and 2 (a and c below), so that a rank waits for
# half a rank's layers only. zbv: rank r has stages r and 2 p - 1 - r, a V, and a backward
# computes the gradients of weights later than those of states. Skip this section unless you use p.
#
#     rank 0   F0a F1a F0c F1c ..
#     rank 1   ... F0b F1b F0d ..
SCHEDULES = {"1f1b": (None, 1),  # torch's class, and how many stages a rank has
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
             "zbv": (pipelining.ScheduleZBVZeroBubble, 2)}  # fmt: skip


def run_micro_batches(model, forward, number, like=None) -> None:
    """Run forward and backward of micro-batches 0 to number - 1, as `run_1f1b`. Collective for p.

    forward: forward(root, n, x), where `root.hidden` runs the layers: the model, or a stage of it.
    like: as in `run_1f1b`. For p > 1 only.
    """
    part = part_of(model)
    if part.plan.pp == 1:
        # The graph of a micro-batch is freed before the next one is made.
        for n in range(number):
            forward(model, n, None).backward()
    elif part.pipeline is None:
        run_1f1b(functools.partial(forward, model), number, like, part.grid.group["p"])
    else:
        part.pipeline.run(forward, number, like)


def run_forwards(model, forward, number, like=None) -> None:
    """Run the forward of each micro-batch by itself, without gradients: see run_micro_batches."""
    # COMM: the stages of a micro-batch run one after another, and all ranks take the micro-batches
    # in one order, so each send meets the receive that waits for it. Pinned by
    # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
    part = part_of(model)
    group = part.grid.group["p"] if part.plan.pp > 1 else None
    own = part.stages(model)
    rank_of = range(part.plan.pp) if part.pipeline is None else part.pipeline.rank_of
    for n in range(number):
        x = None
        for stage, root in own.items():
            # Where one rank has two neighboring stages, as at the turn of a V, x stays.
            if stage > 0 and stage - 1 not in own:
                x = torch.empty_like(like)
                dist.recv(x, group=group, group_src=rank_of[stage - 1])
            x = forward(root, n, x)
            if stage < len(rank_of) - 1 and stage + 1 not in own:
                dist.send(x.contiguous(), group=group, group_dst=rank_of[stage + 1])


def keep_stage_and_ends(model, stage, stages, is_tied) -> None:
    """Keep the layers of a stage, in place, and what it has of the ends."""
    embedding = model.model.embed_tokens
    keep_stage(model, stage, stages)
    if stage < stages - 1:
        model._modules.pop("score", None)  # a critic's head
    elif is_tied:
        model.model.embed_tokens = embedding  # its rows are the head


class TorchPipeline:
    """The two stages that this rank has of a model, run by torch.distributed.pipelining.

    own: dict. Number of a stage -> a module with its layers, which are also the model's.
    rank_of: list. The rank of the group that has each stage.
    """

    def __init__(self, model, group, schedule, is_tied):
        p = group.size()
        self.group = group
        self.schedule, _ = SCHEDULES[schedule]
        # Which rank has each stage. 4 stages on 2 ranks: 0 1 0 1 interleaved, 0 1 1 0 as a V.
        self.rank_of = [*range(p)] * 2
        if schedule == "zbv":
            self.rank_of = [*range(p), *reversed(range(p))]
        self.stages = len(self.rank_of)
        self.own = {}
        for stage, rank in enumerate(self.rank_of):
            if rank == group.rank():
                self.own[stage] = copy_of_lists(model)
                keep_stage_and_ends(self.own[stage], stage, self.stages, is_tied)
        self.last = self.own.get(self.stages - 1)  # None on ranks that do not have it

        # The model keeps what one of its stages has: parameters have one name in it, in its stages
        # and in a checkpoint of any plan.
        held = {id(module) for stage in self.own.values() for module in stage.modules()}
        held |= {id(model.model), id(model.model.layers)}
        for owner in (model.model.layers, model.model, model):
            for name, module in [*owner._modules.items()]:
                if id(module) not in held:
                    del owner._modules[name]
        self.forward = None  # of the current step, for `_Stage`
        self.run_for = None  # (shape, number) of the micro-batches of `made`, torch's schedule
        self.made = None

    def run(self, forward, number, like) -> None:
        """Run a step, as `run_micro_batches` says."""
        # torch makes a schedule for one shape, because its stages keep buffers of that shape. Only
        # the latest schedule is kept, because each padded length brings new buffers. A length that
        # changes in every step costs a new schedule each time, some milliseconds.
        if self.run_for != (like.shape, number):
            self.run_for, self.made = (like.shape, number), None  # the old buffers go first
            self.made = self.make_schedule(like, number)
        self.forward = forward

        # A schedule hands tensors from stage to stage and nothing else. Every stage is given the
        # index of the micro-batch, the first one in place of tokens. The last one returns the loss.
        # COMM: each stage sends states to the next and their gradients back. torch's schedule
        # orders the sends and receives of neighbors so that they match. Pinned by
        # tests/test_parallel.py::test_collectives_are_those_of_the_table.
        index = torch.arange(number, device=like.device)
        inputs = (index,) if 0 in self.own else ()
        options = dict(target=index, losses=[]) if self.last is not None else {}
        self.made.step(*inputs, index=index, return_outputs=False, **options)
        self.forward = None

    def make_schedule(self, like, number):
        """Return torch's schedule for micro-batches whose states between stages are as `like`."""
        states = torch.empty_like(like, requires_grad=True)
        index = torch.zeros(1, dtype=torch.int64, device=like.device)
        loss = torch.zeros((), device=like.device, requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                _Stage(self, root), stage, self.stages, like.device, group=self.group,
                input_args=index if stage == 0 else states,
                output_args=loss if stage == self.stages - 1 else states,
            )
            for stage, root in self.own.items()
        ]  # fmt: skip
        # scale_grads=False: torch would average the losses.
        return self.schedule(stages, number, loss_fn=lambda loss, index: loss, scale_grads=False)


class _Stage(nn.Module):
    """The module that torch's schedule runs: (index of a micro-batch, or states) -> states."""

    def __init__(self, pipeline, root):
        super().__init__()
        self.pipeline = pipeline
        self.root = root

    def forward(self, x, index):
        return self.pipeline.forward(self.root, int(index), x if x.is_floating_point() else None)


def copy_of_lists(model):
    """Return a model that shares the modules of another one, but not its lists of them."""
    def shallow(module):
        copied = copy.copy(module)
        copied._modules = dict(module._modules)
        return copied

    copied = shallow(model)
    copied.model = shallow(model.model)
    copied.model.layers = shallow(model.model.layers)
    return copied


# 15. Gradients -----------------------------------------------------------------------------------
#
# Between the backward and the optimizer's step: sum, look for what is not finite, clip. The core
# does the same with one message for each parameter.
MESSAGE = 256 << 20  # bytes


@torch.no_grad()
def reduce_gradients(model) -> int:
    """Sum each parameter's gradient over ranks, in place: (1). Collective, once before each step.

    A rank without a gradient adds zeros. FSDP2 has summed over data ranks in the backward already.
    Returns, for `name_suspects`, which of this rank's gradients was not finite before any sum: the
    first in the order of the backward, 0 for the model's last parameter. -1 if all are finite.
    """
    reshard(model)  # otherwise the gradients of the root's shards are out of sight
    places = part_of(model).places
    gradients = []
    by_message = {}
    for name, p in reversed([*model.named_parameters()]):
        # A rank that had no tokens sends zeros, or the others would wait for it.
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        gradients.append(local(p.grad) if p.requires_grad else None)
        # NUMERICS: copies of a parameter must get the same bits, and the order in which an
        # all-reduce adds depends on the place in the message. Two groups may hold copies of a
        # parameter that is not cut. So it shares no message with cut ones, whose parts may differ
        # in length. Pinned by
        # tests/test_parallel_faults.py::test_replicas_hold_the_same_bits_after_three_steps.
        for group in places[name].sums if p.requires_grad else ():
            key = group, bool(places[name].cuts)
            by_message.setdefault(key, []).append(gradients[-1])
    suspect = first_non_finite(gradients)

    # COMM: the places decide what is sent, and they are the same on all ranks of a group, whatever
    # gradients a rank has. Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
    for (group, _), together in by_message.items():
        sum_in_messages(together, group)  # (1)
    return suspect


def messages_of(gradients):
    """Yield lists of gradients, in order, of at most MESSAGE bytes. A larger gradient is alone."""
    together = []
    for gradient in gradients:
        if together and sum(g.nbytes for g in together) + gradient.nbytes > MESSAGE:
            yield together
            together = []
        together.append(gradient)
    yield together


def sum_in_messages(gradients, group):
    """Sum gradients over a group, in place. Several in a message need a buffer of its size."""
    # COMM: an all-reduce for each message. All ranks of the group have the same gradients, in the
    # same order. Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
    for together in messages_of(gradients):
        if len(together) == 1 and together[0].is_contiguous():
            dist.all_reduce(together[0], group=group)
            continue
        flat = torch.cat([g.flatten() for g in together])
        dist.all_reduce(flat, group=group)
        for g, total in zip(together, flat.split([g.numel() for g in together])):
            g.copy_(total.view_as(g))


def first_non_finite(gradients) -> int:
    """Return the index of the first gradient with an entry that is not finite, or -1.

    gradients: list of tensors, or None where there is nothing to look at.
    """
    # One transfer to the host serves all gradients: on a GPU each `if` on a tensor waits for it.
    indices = [n for n, g in enumerate(gradients) if g is not None]
    finite = [gradients[n].isfinite().all() for n in indices]
    finite = torch.stack(finite).tolist() if finite else []
    return next((n for n, is_finite in zip(indices, finite) if not is_finite), -1)


def name_suspects(model, suspect: int) -> str:
    """Say which rank had which non-finite gradient first, from each rank's `reduce_gradients`."""
    names = [name for name, _ in model.named_parameters()][::-1]
    # COMM: an all-gather of one name over all ranks, which all skip the same step. Pinned by
    # tests/test_faults.py::test_a_nan_in_one_ranks_batch_is_skipped_by_all_and_named.
    found = all_gather_objects(names[suspect] if suspect >= 0 else None)
    named = [f"{name} on rank {rank}" for rank, name in enumerate(found) if name]
    return ", ".join(named) or "no single gradient: their norm overflowed"


@torch.no_grad()
def clip_grad_norm(model, max_norm: float):
    """Scale the summed gradients of all ranks to a norm of at most max_norm, in place.

    Returns the norm before that, a 0-d float64 tensor, the same on every rank. If it is not finite,
    no gradient is changed, and the caller must skip the step. Collective.
    """
    part = part_of(model)
    gradients = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    # NUMERICS: in float64, as a float32 sum of squares over 100,000 entries of an embedding is off
    # in the fifth digit. An entry that k ranks hold counts 1 / k on each. Pinned by
    # tests/test_parallel.py::test_every_plan_is_one_process.
    sum_of_squares = torch.zeros((), dtype=torch.float64, device=part.device)
    for name, g in gradients.items():
        square = torch.linalg.vector_norm(g, dtype=torch.float64).square()
        sum_of_squares += square.to(part.device) / part.places[name].holders
    # COMM: an all-reduce of one number over all ranks. Pinned by
    # tests/test_parallel.py::test_every_plan_is_one_process.
    if dist.is_initialized():
        dist.all_reduce(sum_of_squares)
    norm = sum_of_squares.sqrt()  # (6)

    # DEVIATES: torch divides by norm + 1e-6, and so does the core. This divides by the norm.
    # Pinned by tests/test_ranks.py::test_the_clip_is_exactly_the_ratio_of_norms.
    found = norm.item()  # one wait for the device, and not one for each gradient
    if max_norm < found < math.inf:
        for g in gradients.values():
            g.mul_(max_norm / found)  # (7)
    return norm


# 16. The optimizer, its precision, and the state of a run ----------------------------------------
#
# AdamW on the plain tensors of this rank, ZeRO-1, master weights; what a checkpoint stores; the
# comparison of replicas.
#
# Mixed precision. A step of lr 1e-6 moves a weight of 0.02 by 1e-6, and bf16, with 8 bits, has
# nothing between 0.02 and 0.0201: added to a bf16 weight such a step is lost, and a thousand of
# them too. So AdamW updates master weights, in float32 say, and the model computes with them
# rounded:
#
#     bytes of      computes    master    gradient    moments
#     fsdp          2 (a unit)  4         4           4 + 4      all sharded; 2 while a unit runs
#     ddp, zero1    2           4         4           4 + 4      zero1 shards master and moments
#
# Under fsdp FSDP2 does it: parameters are the masters' shards, an all-gather rounds them, and the
# reduce-scatter is of wide gradients. Elsewhere the model's parameters are the rounded ones. Their
# `grad_dtype` tells torch to cast a gradient before it is added to .grad, so the sums over
# micro-batches and over ranks are wide. The states between layers, to which each layer adds, stay
# wide too if the model has a `residual_dtype`, as torch.autocast does it.
class LocalOptimizer:
    """Run a torch optimizer on the plain tensors of this rank: whole weights, or their parts.

    model: any module, or what `parallelize` returned.
    make: from a list of parameters to the optimizer: lambda p: torch.optim.AdamW(p, lr=1e-5).
    zero: bool. ZeRO-1: each of the ranks with the same weights updates some of their rows, holds
        the state of those alone, and sends them to the others.

    mine: dict. Name -> the tensor that is updated.
    places: dict. Name -> Place of that tensor in the whole.
    """

    def __init__(self, model, make, *, zero=False):
        self.model = model
        self.part = part_of(model)
        # Ranks that shard the weights hold different rows, which must not overwrite one another.
        if zero and self.part.mode != "zero1":
            raise ValueError(
                f"zero=True shards the states of whole weights: expected a model of "
                f'parallelize(.., mode="zero1"), got mode={self.part.mode!r}')  # fmt: skip
        self.has_masters = self.part.compute_dtype is not None and self.part.mode != "fsdp"
        self.places = dict(self.part.places)
        if zero:
            self.places = {name: place.cut_copies() for name, place in self.places.items()}

        # The optimizer gets views of the model's own memory: what it updates is the model. AdamW
        # treats each entry by itself, so it needs to know neither DTensors nor the other rows.
        # Masters are not views: the model gets rounded parameters in their place.
        self.mine = {}
        for name in [name for name, _ in model.named_parameters()]:
            p = model.get_parameter(name)  # one at a time: there are never two whole models
            rows = self.own_rows(name, local(p.detach()))
            if self.has_masters:
                if zero:
                    rows = rows.clone()  # a view of some rows would keep all of them in memory
                rounded = nn.Parameter(p.detach().to(self.part.compute_dtype), p.requires_grad)
                # NUMERICS: the gradients of micro-batches, and of the two uses of a tied embedding,
                # are added in the master's precision. Pinned by
                # tests/test_precision.py::test_gradients_add_up_in_float32.
                rounded.grad_dtype = p.dtype
                set_tensor(model, name, rounded)
            self.mine[name] = nn.Parameter(rows, p.requires_grad)
        self.inner = make([*self.mine.values()])
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def own_rows(self, name, x):
        """Return the rows of a rank's tensor that this rank updates: all of them without `zero`."""
        here, own = (places[name].boxes[-1] for places in (self.part.places, self.places))
        return x[own[0].start - here[0].start :][: len(own[0])] if own != here else x

    @torch.no_grad()
    def step(self) -> None:
        """Make one update from .grad, (7). A parameter without a gradient keeps its value."""
        for name, p in self.model.named_parameters():
            grad = None if p.grad is None else self.own_rows(name, local(p.grad))
            self.mine[name].grad = grad
        self.inner.step()  # (7)
        self.copy_to_model()

    def zero_grad(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Bring updated, or loaded, weights into the model. Collective with `zero`.

        Without masters and without `zero` they are there already.
        """
        for name, p in self.model.named_parameters():
            kept = len(self.part.places[name].cuts)
            if self.has_masters or len(self.places[name].cuts) > kept:
                # COMM: an all-gather over the ranks with the same weights, of the rows that each
                # has updated. They are rounded before they are sent. Pinned by
                # tests/test_parallel.py::test_every_plan_is_one_process.
                own = self.mine[name].detach().to(p.dtype)
                local(p.detach()).copy_(self.places[name].gather(own, kept))


def weights_and_places(model, optimizer=None) -> tuple[dict, dict]:
    """Return the weights that a checkpoint stores, masters if there are, and their places."""
    reshard(model)
    if getattr(optimizer, "has_masters", False):
        return optimizer.mine, optimizer.places
    return dict(model.named_parameters()), part_of(model).places


def weights_to_store(model, optimizer=None) -> dict:
    """Return name -> weight. One of which this rank has a part is a DTensor that shares memory."""
    weights, places = weights_and_places(model, optimizer)
    return {name: places[name].as_dtensor(local(x.detach())) for name, x in weights.items()}


def persistent_buffers(model) -> dict:
    """Return name -> buffer of those that belong to a model's state, such as a router's bias."""
    names = dict(model.named_buffers())
    state = model.state_dict(keep_vars=True)
    return {name: x for name, x in state.items() if name in names}


def tensors_of(model) -> dict:
    """Return name -> tensor of the weights and of the buffers that belong to a model's state."""
    return weights_to_store(model) | persistent_buffers(model)


def training_tensors(model, optimizer) -> dict:
    """Return every tensor that a resumed run needs, under flat names. AdamW's state is made.

    model.NAME and optimizer.NAME.KEY of a parameter, buffer.NAME of a persistent buffer. A tensor
    of which this rank has a part is a DTensor, which shares the memory.

    optimizer: LocalOptimizer, or torch's AdamW.
    """
    tensors = {f"model.{name}": x for name, x in weights_to_store(model, optimizer).items()}
    places = getattr(optimizer, "places", part_of(model).places)
    for name, p in model.named_parameters():
        own = optimizer.mine[name] if isinstance(optimizer, LocalOptimizer) else p
        # Read with get: asking a torch optimizer for the state of a parameter would make one.
        state = optimizer.state.get(own, {})
        if p.requires_grad and not state:  # as AdamW makes it before its first step
            step = torch.zeros((), dtype=torch.float32, device=own.device)
            zeros = {key: torch.zeros_like(own) for key in ("exp_avg", "exp_avg_sq")}
            state = optimizer.state[own] = dict(step=step, **zeros)
        for key, x in state.items():
            # The number of steps has no dimension, and is the same on all ranks.
            tensors[f"optimizer.{name}.{key}"] = places[name].as_dtensor(local(x)) if x.dim() else x
    return tensors | {f"buffer.{name}": x for name, x in persistent_buffers(model).items()}


def read_training(path, model, optimizer, *, counts=()) -> dict:
    """Read a checkpoint of `training_tensors` into a model and its optimizer. Collective.

    Returns its JSON values. counts: as in `read_checkpoint`.
    """
    state = read_checkpoint(path, training_tensors(model, optimizer), counts=counts)
    if getattr(optimizer, "has_masters", False):
        optimizer.copy_to_model()
    return state


def replica_difference(model, optimizer=None) -> str | None:
    """Return the ranks and the first tensor at which replicas differ, None if none does.

    Two ranks that hold the same entries of a parameter, of its optimizer's state or of a buffer
    must hold the same bits, whatever the plan. The text is the same on every rank. Collective.

    optimizer: LocalOptimizer, or torch's AdamW. Default: only the model is compared.
    """
    tensors = {} if optimizer is None else training_tensors(model, optimizer)
    if optimizer is None or getattr(optimizer, "has_masters", False):
        tensors |= tensors_of(model)
    digests = {}  # (name, which part of the whole) -> digest, of each tensor on this rank
    for name, x in tensors.items():
        part = ()
        if isinstance(x, DTensor):  # its numbers along the cuts
            numbers = zip(x.device_mesh.get_coordinate(), x.placements)
            part = tuple(number for number, placement in numbers if placement.is_shard())
        bits = local(x.detach()).contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digests[name, part] = hashlib.blake2b(bits, digest_size=8).hexdigest()

    # COMM: an all-gather of 8 bytes and a name for each tensor, over all ranks. Every rank then
    # compares all tables, so that all say the same. Pinned by
    # tests/test_parallel_faults.py::test_a_flipped_bit_is_named.
    tables = all_gather_objects(digests)
    different = {}  # name -> {digest: the ranks that have it}
    for key in dict.fromkeys(key for table in tables for key in table):
        ranks_of = {}
        for rank, table in enumerate(tables):
            if key in table:
                ranks_of.setdefault(table[key], []).append(rank)
        if len(ranks_of) > 1:
            different.setdefault(key[0], ranks_of)
    if not different:
        return None

    # Nobody can say which of two replicas is right. The largest set comes first.
    name, ranks_of = next(iter(different.items()))
    sets = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), ranks))
    said = [f"rank{'s'[: len(ranks) - 1]} {' '.join(map(str, ranks))}" for ranks in sets]
    return (f"replicas differ in {name}: {' / '.join(said)} hold other bits; {len(different)} "
            f"tensors differ")  # fmt: skip


def lr_factor(
    step, /, *, warmup, total, decay="linear", min_ratio=0.0, first_step="nonzero"
) -> float:
    """Return the multiple of lr for a step: a linear warm-up, then a decay to the last step.

    step: int from 0 to total - 1. A later step has the factor at the end of the decay.
    warmup: int, at most total. The number of steps that rise to 1.
    total: int. The number of steps of the run.
    decay: "linear", "cosine" or "constant". Default: "linear".
    min_ratio: float from 0 to 1. The factor that the decay ends at. Default: 0.
    first_step: "nonzero" or "zero". The warm-up begins with 1 / warmup, as in torchtitan, or with
        0, as in Hugging Face and verl. Default: "nonzero".

    For warmup 2, total 10, linear:

        nonzero  .5  1  1  .875  .75  .625  .5  .375  .25  .125
        zero      0 .5  1  .875  .75  .625  .5  .375  .25  .125
    """
    for name, value, known in (
        ("decay", decay, ("constant", "linear", "cosine")),
        ("first_step", first_step, ("nonzero", "zero")),
    ):
        if value not in known:
            raise ValueError(f"expected a {name} of {', '.join(known)}, got {value!r}")
    if not 0 <= warmup <= total or not 0 <= min_ratio <= 1:
        raise ValueError(f"expected a warm-up of at most {total} steps and a min_ratio from 0 to "
                         f"1, got {warmup} and {min_ratio}")  # fmt: skip

    if step < warmup:
        risen = step + 1 if first_step == "nonzero" else step
        return risen / warmup

    # The decay is 0 done in the first step after the warm-up, and would be all done at `total`. If
    # all steps are warm-up, only a step past the end gets here, and max avoids a division by 0.
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return min_ratio + (1 - min_ratio) * left[decay]


# 17. A packed batch under a plan -----------------------------------------------------------------
#
# A training script has sequences of unequal lengths, and a loss. In between, plans want different
# things: t a number of tokens that it divides, c this rank's tokens of each sequence, p all
# micro-batches at once and the loss on one stage. With `PackedBatches` it reads as on one device:
#
#     batches = PackedBatches(model, attention=attention)    # model: of `parallelize`, or unsplit
#     loss = batches.forward_backward(sequences, masks, loss_fn)
#     reduce_gradients(model)
#     clip_grad_norm(model, 1.0)
#     optimizer.step()


class PackedRow(NamedTuple):
    """Sequences end to end in a row of S places. On the CPU, and the same on every rank.

    Sequences a b c and d e in 8 places, of which b, c and e are scored:

        tokens      a b c d e 0 0 0        padding is in no document, and at position 0
        document    0 0 0 1 1 - - -
        position    0 1 2 0 1 0 0 0
        mask        [[1, 1], [1, 0]]       of the targets b c and e, padded to two
        at          [0, 1, 3]              b is predicted at a, c at b, e at d
        sequence    [0, 0, 0, 1, 1]        the sequence that holds the token of this place
        token       [0, 1, 2, 3, 4]        the place; in a tree, several sequences hold one token
    """

    tokens_1S: torch.Tensor
    positions_1S: torch.Tensor
    sees: object  # for the attention: (1, S), which sequence a token is of; -1: padding
    mask_BT: torch.Tensor  # which targets are scored
    at_N: torch.Tensor  # the place of the token that predicts each scored target
    targets_N: torch.Tensor  # the tokens that are predicted
    entries_K: torch.Tensor  # for each True of the mask, which of the N it is: in this row 0 1 2
    sequence_J: torch.Tensor  # which sequences hold which tokens. No sequence holds padding
    token_J: torch.Tensor

    def without_sequences(self) -> "PackedRow":
        """Return a row that only fills up: its tokens are in no sequence."""
        return self._replace(sequence_J=self.sequence_J[:0], token_J=self.token_J[:0])


def pack_row(sequences, masks, length) -> PackedRow:
    """Lay sequences end to end and pad the row to `length`. masks: which of tokens[1:] count."""
    lengths = [len(tokens) for tokens in sequences]
    padding = np.zeros(length - sum(lengths), dtype=np.int64)
    tokens_S = np.concatenate([*map(np.asarray, sequences), padding])
    positions_S = np.concatenate([*map(np.arange, lengths), padding])
    document_S = np.repeat([*range(len(lengths)), -1], [*lengths, len(padding)])

    mask_BT = np.zeros((len(masks), max(lengths) - 1), dtype=bool)
    for b, mask in enumerate(masks):
        mask_BT[b, : len(mask)] = mask

    # The token before a scored target predicts it. In this row it predicts no other target.
    row_N, column_N = mask_BT.nonzero()
    first_B = np.cumsum([0, *lengths[:-1]])
    at_N = first_B[row_N] + column_N
    in_row = [x_S[None] for x_S in (tokens_S, positions_S, document_S)]
    scored = [mask_BT, at_N, tokens_S[at_N + 1], np.arange(len(at_N))]
    token_J = np.arange(sum(lengths))  # each token is of one sequence
    holds = [document_S[token_J], token_J]
    return PackedRow(*map(torch.from_numpy, [*in_row, *scored, *holds]))


class Micro(NamedTuple):
    """A micro-batch: (B, S) token ids, their positions, and the attention of their documents."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: object = None  # None: the model's
    on_routing: object = None  # a callback of its sparse layers; None: they attach no loss

    def through(self, stage, x):
        """Run a model, or a stage of one, on states of the stage before, or None: on the tokens."""
        options = dict(positions=self.positions, attention=self.attention)
        # Only a model with experts needs to know what a routing is.
        if self.on_routing is not None:
            options["on_routing"] = self.on_routing
        return stage.hidden(self.tokens if x is None else x, **options)


class PackedBatches:
    """Run batches of sequences and a loss on a model: one call, the same under every plan.

    model: what `parallelize` returned, or an unsplit one with `hidden` and `logprobs`.
    attention: attention(document_1S, group) makes the callable of the layers for a `PackedRow`:
        tokens see earlier tokens of their own document. group: None, or the ranks of c.
    indices: indices(length, rank, world), ascending: the tokens of a row that a rank of c has, as
        this attention wants them: `ring_attention.indices`. For c > 1 only.
    balance: balance(sequence_j, token_j, num_sequences=, groups=) makes the callback by which
        sparse layers attach their loss in training, such as a `models.Balance`. Default: no loss.
    micro_tokens: int. Most tokens of a micro-batch. A longer sequence is alone in one.
    temperature: float. Of the log-probs.

    Different data shares bring different sequences. The c, t and p ranks of one share, its replica
    group, bring the same ones: `gather_replica` makes one batch of their lists.
    """

    def __init__(self, model, *, attention, indices=None, balance=None, micro_tokens=8192,
                 temperature=1.0):  # fmt: skip
        # Under c the callers say which tokens a rank has, because it depends on their attention.
        self.model = model
        self.part = part_of(model)
        self.plan = self.part.plan
        self.device = self.part.device
        self.attention = attention
        self.balance = balance
        self.indices = indices
        self.micro_tokens = micro_tokens
        self.temperature = temperature
        if self.plan.cp > 1 and indices is None:
            raise ValueError(
                f"plan {self.plan} splits rows: give indices=, e.g. ring_attention.indices")

    def forward_backward(self, sequences, masks, loss_fn) -> torch.Tensor:
        """Add the gradient of a batch's loss to .grad. Collective.

        sequences: lists of token ids.
        masks: for each sequence a bool for each target, tokens[1:].
        loss_fn: called as loss_fn(indices, mask_BT, logprobs_BT, entropies_BT), of a critic
            values_BT too: sequence indices[b] has row b, which is 0 where nothing is scored. It
            returns this micro-batch's term of the loss, divided by the global count, and the same
            value on all c and t ranks (under p, of the last stage).

        Returns the loss, summed over data shares, float64.
        """
        micro_batches, rows = self.pack_micro_batches(sequences, masks)
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def forward(root, k, x):
            x_1sM = self.micro(rows[k], self.balance).through(root, x)
            if not self.part.has_head(root):
                return x_1sM
            scores = self.score(rows[k], x_1sM)
            if not micro_batches[k]:  # a loss of 0 with a graph: others wait for its messages
                return sum(x_BT.sum() for x_BT in scores)
            loss = loss_fn(micro_batches[k], rows[k].mask_BT.to(self.device), *scores)
            total.add_(loss.detach())
            return loss

        # backward() adds to .grad, and that is right, because the losses are terms of one sum.
        run_micro_batches(self.model, forward, len(rows), self.states_like(rows))
        # COMM: an all-reduce of one number over all ranks. Of the ranks with the same sequences one
        # counts. Pinned by tests/test_packed.py::test_ranks_are_one_process.
        total *= speaks_for_replica(self.model)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    @torch.no_grad()
    def forward(self, sequences, masks) -> list:
        """Return (logprobs, entropies), of a critic values too, of each sequence, no gradient.

        Each is (L - 1,), on the CPU, on every rank of the replica. Collective.
        """
        micro_batches, rows = self.pack_micro_batches(sequences, masks)
        found = [None] * len(sequences)

        def forward(root, k, x):
            x_1sM = self.micro(rows[k]).through(root, x)
            if not self.part.has_head(root):
                return x_1sM
            # Sequences go back to their places, without their padding.
            columns = [x_BT.cpu() for x_BT in self.score(rows[k], x_1sM)]
            for b, i in enumerate(micro_batches[k]):
                found[i] = tuple(x_BT[b, : len(sequences[i]) - 1] for x_BT in columns)

        run_forwards(self.model, forward, len(rows), self.states_like(rows))
        reshard(self.model)  # without a backward FSDP would keep the gathered weights
        if self.plan.pp == 1:
            return found

        # COMM: the last stage has the scores; an all-gather over the replica gives them to its
        # other ranks.
        # Pinned by tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
        found = found if self.part.is_last else None
        parts = all_gather_objects(found, self.part.grid.group["pct"])
        return next(part for part in parts if part is not None)

    def pack_micro_batches(self, sequences, masks):
        """Return the micro-batches, as lists of indices, and a `PackedRow` of each. Collective.

        A micro-batch without sequences has one token.
        """
        require_batch(self.model, sequences, masks)
        # Other ranks may need more micro-batches than this one has data for.
        lengths = [len(tokens) for tokens in sequences]
        micro_batches = cut_into_micro_batches(self.model, lengths, self.micro_tokens)
        counts = [sum(lengths[i] for i in indices) or 1 for indices in micro_batches]
        rows = []
        for indices, length in zip(micro_batches, row_lengths(self.plan, counts), strict=True):
            if indices:
                own = [sequences[i] for i in indices], [masks[i] for i in indices]
                rows.append(pack_row(*own, length))
            else:
                rows.append(pack_row([[0]], [[]], length).without_sequences())
        return micro_batches, rows

    def own_tokens(self, row):
        """Return the places of a row that this rank of c has, ascending: all of them without c."""
        length = row.tokens_1S.shape[1]
        if self.plan.cp == 1:
            return torch.arange(length)
        return self.indices(length, self.part.grid.group["c"].rank(), self.plan.cp)

    def micro(self, row, balance=None) -> Micro:
        """Return this rank's tokens of a row, with the attention of its documents."""
        # Attention and balance are about the whole row. Tokens and positions are this rank's.
        local_s = self.own_tokens(row)
        group = self.part.grid.group["c"] if self.plan.cp > 1 else None
        made = None
        if balance is not None:
            made = balance_of_rank(self.model, row.sequence_J, row.token_J, local_s, balance)
        own = [x_1S[:, local_s].to(self.device) for x_1S in (row.tokens_1S, row.positions_1S)]
        return Micro(*own, self.attention(row.sees, group), made)

    def states_like(self, rows):
        """Return memory for the states that one stage sends to the next: rows have one length."""
        if self.plan.pp == 1:
            return None
        p = next(self.model.parameters())
        dtype = getattr(self.model, "residual_dtype", None) or self.part.compute_dtype or p.dtype
        t = self.plan.tp if self.part.grid.sequence else 1
        shape = 1, len(self.own_tokens(rows[0])) // t, self.model.config.hidden_size
        return torch.empty(shape, dtype=dtype, device=self.device)

    def score(self, row, hidden_1sM) -> list:
        """Return log-probs, entropies, of a critic values of a row's targets, (B, T) each."""
        # Some of the N scored tokens have their state on this rank, and searchsorted finds it.
        # Example: this rank has 0 1 6 7 of 8 tokens, and 0 1 3 are scored. It scores 0 and 1.
        local_s = self.own_tokens(row)
        here_N = torch.isin(row.at_N, local_s)
        at_n = row.at_N[here_N]
        x_nM = hidden_1sM[0, torch.searchsorted(local_s, at_n).to(self.device)]
        targets_n = row.targets_N[here_N].to(self.device)
        columns = [*self.model.logprobs(x_nM, targets_n, temperature=self.temperature)]
        if getattr(getattr(self.model, "config", None), "value_head", False):
            columns.append(self.model.values(x_nM))

        # Back into (B, T). The ranks of c have filled in different entries, and the others are 0:
        # their sum is the whole, and all compute the same loss of it. Each has the whole gradient
        # of the sum, so nothing is sent backward, or it would count c times.
        here_n = here_N.nonzero()[:, 0].to(self.device)
        entries_K = row.entries_K.to(self.device)
        places = row.mask_BT.nonzero().T.to(self.device)
        scores = []
        for x_n in columns:
            x_N = x_n.new_zeros(len(here_N)).index_copy(0, here_n, x_n)
            if self.plan.cp > 1:
                x_N = reduce_from_tp_region(x_N, self.part.grid.group["c"], sequence=False)
            x_BT = x_n.new_zeros(row.mask_BT.shape)
            scores.append(x_BT.index_put((*places,), x_N[entries_K]))
        return scores


def pack(lengths, micro_tokens, shared=None) -> list:
    """Cut sequences into micro-batches of at most micro_tokens tokens, in order: lists of indices.

    A longer sequence is alone in one. shared: how many tokens each has in common with the one
    before it, where those are run once (a tree of prefixes).
    """
    # Lengths 9, 10 and 11 with micro_tokens 12, where all begin with the same 8:
    #
    #     shared None         [0] [1] [2]
    #     shared [0, 8, 8]    [0, 1] [2]     9 + 2 new ones are 11; 3 more would be 14
    packed = []
    room = 0  # tokens that the last micro-batch can still take
    for i, length in enumerate(lengths):
        count = length if shared is None else length - shared[i]
        # In a new micro-batch nothing is shared with the sequence before: it counts whole.
        if not packed or count > room:
            packed.append([])
            room = micro_tokens
            count = length
        packed[-1].append(i)
        room -= count
    return packed


def cut_into_micro_batches(model, lengths, micro_tokens) -> list:
    """Call `pack` for a model of any plan. Add [] if other ranks have more. Collective."""
    # A pipeline of p stages idles less the more micro-batches it has. This limit gives about 2 p of
    # them, of about one size, since all are padded to the longest.
    plan = part_of(model).plan
    if plan.pp > 1:
        longest = max(lengths, default=0)
        micro_tokens = min(micro_tokens, sum(lengths) // (2 * plan.pp) + longest)
    packed = pack(lengths, micro_tokens)
    count = agreed_micro_batches(model, len(packed))
    return packed + [[]] * (count - len(packed))


def agreed_micro_batches(model, count) -> int:
    """Return how many micro-batches a rank runs that has data for `count` of them. Collective."""
    # torch's schedules want at least 2 p micro-batches, and a multiple of p: 5 of them on 2 stages
    # become 6. 1F1B runs any number from 1, and an empty micro-batch costs it a whole row.
    part = part_of(model)
    p = part.plan.pp
    if part.pipeline is not None:
        count = max(2 * p, -(-count // p) * p)
    elif p > 1:
        count = max(1, count)
    if part.mode == "fsdp" or part.plan.ep > 1:
        # COMM: an all-reduce of one number over all ranks. A sharded forward gathers weights from
        # all, and tokens go to all ranks' experts, so ranks run the same number of micro-batches.
        # Pinned by tests/test_ranks.py::test_unequal_shares_sum_to_the_whole.
        most = torch.tensor(count, device=part.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        count = int(most)
    return count


def row_lengths(plan, sizes) -> list:
    """Return the lengths to which rows of these sizes are padded under a plan."""
    # Sequence parallelism cuts a row in t, and a zigzag over c cuts it in 2 c first. A pipeline
    # wants all rows of one length.
    unit = plan.tp * 2 * plan.cp if plan.cp > 1 else plan.tp
    if plan.pp > 1:
        sizes = [max(sizes)] * len(sizes)
    return [-(-size // unit) * unit for size in sizes]


def balance_of_rank(model, sequence_J, token_J, local_s, balance):
    """Return what `balance` makes of the tokens whose routing this rank counts.

    sequence_J, token_J: as in `PackedRow`.
    local_s: the tokens that this rank is given, ascending.
    """
    # A balance loss is a sum over tokens, so each token is counted on one rank, though several may
    # see it. The ranks of c have different tokens already. The t ranks are given the same ones, and
    # rank r takes the r-th chunk: with sequence parallelism its layers see no others. But around
    # experts whose inner width is split, f and g gather all of them.
    #
    #     t2, 6 tokens, rank 1     takes 3 4 5    a layer sees them as 0 1 2, with etp 2 as 3 4 5
    part = part_of(model)
    plan = part.plan
    taken_s = own_chunk(local_s, part.grid.group["t"]) if plan.tp > 1 else local_s
    seen_s = local_s if plan.etp > 1 else taken_s
    groups = [part.grid.group[x] for x, degree in (("c", plan.cp), ("t", plan.tp)) if degree > 1]

    # Tokens are numbered as the layer sees them, and sequences as in the whole row.
    is_taken_J = torch.isin(token_J, taken_s)
    token_j = torch.searchsorted(seen_s, token_J[is_taken_J])
    num_sequences = int(sequence_J.max()) + 1 if len(sequence_J) else 0
    pairs = sequence_J[is_taken_J].to(part.device), token_j.to(part.device)
    return balance(*pairs, num_sequences=num_sequences, groups=groups)


def speaks_for_replica(model) -> bool:
    """Return whether this rank's measurements count, among ranks with the same sequences."""
    part = part_of(model)
    # The first rank of its tensor group that is also the first of its context.
    #
    #     plan t2c2: tensor groups 0 1 | 2 3, contexts 0 2 | 1 3   ->   rank 0 alone
    return part.is_last and all(part.grid.group[x].rank() == 0 for x in "ct" if part.grid)


def gather_replica(model, items):
    """Return a list of the items of all ranks of this rank's replica, and where its own begin.

    Data is often distributed over all ranks, but the ranks of one c, t or p group run the same
    forward.
    items: list of anything that can be pickled. The parts are in the order of the ranks.
    """
    part = part_of(model)
    if part.plan.world == part.plan.dp:
        return items, 0
    # COMM: an all-gather over the c, t and p ranks of one data share. Pinned by
    # tests/test_packed.py::test_ranks_are_one_process.
    replica = part.grid.group["pct"]
    parts = all_gather_objects(items, replica)
    first = sum(len(part) for part in parts[: replica.rank()])
    return [item for part in parts for item in part], first


def require_batch(model, sequences, masks):
    """Raise a ValueError, on all ranks of a replica, for masks that do not fit their sequences, or
    sequences that differ among the ranks."""
    found = ""
    if len(sequences) != len(masks):
        found = f"expected a mask for each of {len(sequences)} sequences, got {len(masks)}"
    for i, (tokens, mask) in enumerate(zip(sequences, masks)):
        if not found and (len(tokens) == 0 or len(mask) != len(tokens) - 1):
            found = (f"sequence {i} has {len(tokens)} tokens and a mask of {len(mask)}; it needs a "
                     f"token, and a mask of tokens[1:]")  # fmt: skip

    # COMM: an all-gather of some bytes over the replica tells whether all of its ranks have the
    # same batch. Pinned by
    # tests/test_packed.py::test_a_batch_that_cannot_be_is_refused_on_every_rank.
    part = part_of(model)
    seen = [(found, 0)]
    if part.plan.world > part.plan.dp:
        batch = [[*map(int, x)] for x in (*sequences, *masks)]
        digest = zlib.crc32(repr(batch).encode())
        seen = all_gather_objects((found, digest), part.grid.group["pct"])
    found = next((text for text, _ in seen if text), "")
    if not found and len({digest for _, digest in seen}) > 1:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(part.grid.group["pct"])))
        found = (f"ranks {ranks} work on the same sequences in plan {part.plan}, but were given "
                 f"different ones or masks; gather_replica makes one batch of them")  # fmt: skip
    if found:
        raise ValueError(found)


class PaddedTokens:
    """A model under sequence parallelism for callers that know nothing of it, such as trees.

    It pads the tokens (1, S) to a multiple of t, runs the model, and drops the padding, which
    attention never sees. `on_routing` gets the experts of all S tokens, and router probabilities
    without a graph. Everything else is the model's.
    """

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hidden(self, tokens_1S, /, *, positions, attention, on_routing=None):
        # Sequence parallelism gives each rank 1/t of the tokens: 5 of them become 6 for t = 2. A
        # rank without any still runs t, because the other ranks wait for it.
        part = part_of(self.model)
        length = tokens_1S.shape[1]
        pad = -length % part.plan.tp if length else part.plan.tp

        def attention_without_padding(q, k, v, /, **options):
            out = attention(*(x[:, :, :length] for x in (q, k, v)), **options)
            return F.pad(out, (0, 0, 0, pad))

        # COMM: an all-gather over the t ranks, each of which has routed a part of the tokens. With
        # t inside the experts a layer has seen all tokens already. Pinned by
        # tests/test_balance.py::test_a_rank_sees_some_tokens.
        def on_routing_of_all_tokens(*found, layer):
            if part.plan.etp == 1:
                found = [all_gather(x.detach(), part.grid.group["t"]) for x in found]
            return on_routing(*(x[:length] for x in found), layer=layer)

        options = {} if on_routing is None else {"on_routing": on_routing_of_all_tokens}
        x_1SM = self.model.hidden(
            F.pad(tokens_1S, (0, pad)), positions=F.pad(positions, (0, pad)),
            attention=attention_without_padding, **options,
        )  # fmt: skip
        return x_1SM[:, :length]


# 18. Generators ----------------------------------------------------------------------------------
#
# A model that only samples, split by a plan of its own (d, t and e), and how weights reach it, one
# tensor at a time, from a model of another plan. Skip it if every rank samples with a whole model.
def require_generator_plan(plan) -> None:
    """Raise a ValueError for a plan that a generator cannot have."""
    for letter, degree, what in (("c", plan.cp, "sequences"), ("p", plan.pp, "layers")):
        if degree > 1:
            raise ValueError(
                f"plan {plan}: a generator has d, t and e, and no {letter}: it decodes one token "
                f"after the other, and ranks with other {what} would only wait")  # fmt: skip
    # A group of experts is in one replica, or consists of whole replicas, which decode in step.
    if max(plan.ep, plan.tp) % min(plan.ep, plan.tp):
        raise ValueError(f"plan {plan}: e = {plan.ep} or t = {plan.tp} must divide the other")


def split_for_decoding(model, plan, *, device_mesh):
    """Turn a whole model into this rank's part of a generator's plan, and return it.

    model, plan, device_mesh: as in `parallelize`. The result only samples: rows of experts are
    sent without gradients. The t ranks of a replica share the decoding: all of
    them get the same tokens, and compute the same logits of the whole vocabulary. `gather_replica`
    makes the same batch of their lists. Ranks that exchange rows of experts with other replicas
    need the same number of model calls: `end_together`.
    """
    require_generator_plan(plan)
    plan.require_fits(world=dist.get_world_size(), config=model.config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    # One new token in a row cannot be split along the sequence, so between f and g every tensor
    # rank has all rows.
    grid = with_sequence(device_mesh, False)
    shard_model(model, grid)
    places = {name: place_of(name, shape, grid, "ddp", False) for name, shape in shapes.items()}
    model.part = Part(plan, grid.device, places, grid)
    model.calls = None

    # All t ranks have all rows. Each sends a share of them to experts that are whole, or these
    # would get every row t times.
    if plan.tp > 1 and plan.etp == 1:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                share_out_rows(layer.mlp, grid.group["t"])
    if plan.ep * plan.etp > plan.tp:
        model.calls = CallsInStep(model, grid.group["e"])
        model.hidden = model.calls.hidden
    return model


def share_out_rows(mlp, group):
    """Let each of the t ranks, which have the same rows, send some of them to the experts."""
    run = mlp.forward

    def forward(x_BSM, /, on_routing=None):
        # 5 rows on 2 ranks are 0 1 2 and 3 4 -, where - is a row of zeros. Wherever it is routed
        # to, its result is cut off.
        rows_NM = x_BSM.flatten(0, -2)
        padded_NM = F.pad(rows_NM, (0, 0, 0, -len(rows_NM) % group.size()))
        out_1nM = run(own_chunk(padded_NM, group)[None], on_routing=on_routing)
        # COMM: an all-gather over the t ranks, which have the same number of rows. Pinned by
        # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
        return all_gather(out_1nM[0], group)[: len(rows_NM)].view_as(x_BSM)

    mlp.forward = forward


class CallsInStep:
    """The model calls of ranks that exchange rows of experts, one at a time on all of them.

        rank 0   call  call  call  call  end           a rank that has ended runs one token, for
        rank 1   call  call  end   ....  ....          nobody, as long as another one calls
    """

    def __init__(self, model, group):
        self.run = model.hidden
        self.group = group
        self.device = model.part.device

    def hidden(self, tokens_BS, /, **options):
        """Run `hidden` on a rank that has something to decode."""
        self.ranks_that_call(1)
        return self.run(tokens_BS, **options)

    def ranks_that_call(self, here) -> int:
        # COMM: an all-reduce of one number over the e ranks before each model call, so that a rank
        # which has ended knows whether the others need its experts once more. Pinned by
        # tests/test_generator_plan.py::test_replicas_that_end_early_serve_their_experts.
        count = torch.tensor(here, device=self.device)
        dist.all_reduce(count, group=self.group)
        return int(count)


@torch.no_grad()
def end_together(model) -> None:
    """Serve this rank's experts until the other ranks have decoded all they had, too."""
    calls = getattr(model, "calls", None)
    if calls is not None:
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=calls.device)
        while calls.ranks_that_call(0):
            calls.run(token_11)


def share_or_allocate(source, target, device) -> None:
    """Give a model on the meta device memory, the source's own where both have the same entries.

    What an optimizer writes into a shared parameter of the source is in the target at once, and
    `copy_weights` leaves it out. The content of new memory is undefined. Degrees decide what is
    shared, so it is the same on all ranks. source: None where there is none on these ranks.
    """
    # FSDP moves its shards' memory about, and a stage of a pipeline has some of the layers only,
    # which the other ranks of its pipeline need to be sent.
    sources = {}
    if source is not None and part_of(source).mode != "fsdp" and part_of(source).plan.pp == 1:
        sources = dict(source.named_parameters())
    for name, q in [*target.named_parameters()]:
        p = sources.get(name)
        is_shared = p is not None and p.dtype == q.dtype
        if is_shared:
            is_shared = part_of(source).places[name].pattern == target.part.places[name].pattern
        memory = p.detach() if is_shared else torch.empty_like(q, device=device)
        set_tensor(target, name, nn.Parameter(memory, requires_grad=False))
    for name, buffer in [*target.named_buffers()]:
        set_tensor(target, name, torch.zeros_like(buffer, device=device))


@torch.no_grad()
def copy_weights(source, target, optimizer=None) -> None:
    """Copy source's parameters and buffers into target's, in target's dtypes. Collective.

    source: of any plan.
    target: whole on every rank, or of `split_for_decoding`.
    optimizer: the source's, which may have masters.

    One tensor after the other is gathered, and each rank keeps its part: at most the two models'
    parts and one whole tensor are in memory. A parameter that both have in one memory is left out.
    ValueError if names or shapes differ.
    """
    part = part_of(source)
    # In compute_dtype a parameter is its master, rounded once. In another dtype it would be rounded
    # twice. The master itself may be a part of a rank's part (zero1), and then costs more messages.
    is_rounded = next(target.parameters()).dtype == part.compute_dtype
    tensors, places = weights_and_places(source, None if is_rounded else optimizer)
    tensors = tensors | persistent_buffers(source)
    places = {name: whole_place(x) for name, x in tensors.items()} | places

    # COMM: an all-gather over the stages says what each of them has. The first stage that has a
    # tensor sends it. The ranks of this group have other layers, and the same entries of
    # what t and e cut. Pinned by
    # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
    group = part.grid.group["p"] if part.plan.pp > 1 else None
    table = {name: (places[name].shape, places[name].pattern) for name in tensors}
    tables = [table] if group is None else all_gather_objects(table, group)

    # Every rank has all tables now, so all of them find a difference before any weight is sent.
    wanted = dict(target.named_parameters()) | persistent_buffers(target)
    targets = {name: whole_place(x) for name, x in wanted.items()} | part_of(target).places
    shapes = {name: shape for table in tables for name, (shape, _) in table.items()}
    differ = shapes.items() ^ {name: targets[name].shape for name in wanted}.items()
    if differ:
        raise ValueError(f"models differ: {sorted({name for name, _ in differ})}")

    for name, q in wanted.items():
        q = local(q.detach())
        x = local(tensors[name].detach()) if name in tensors else None
        if x is not None and x.is_set_to(q):
            continue
        # Where the source was first cut as the target is, by t and e of one degree, only what was
        # cut after that, by FSDP, is gathered. Degrees decide, so all ranks go the same way.
        first = next(rank for rank, table in enumerate(tables) if name in table)
        _, pattern = tables[first][name]
        there = targets[name]
        is_cut_alike = pattern[: len(there.cuts)] == there.pattern
        if x is not None:
            x = places[name].gather(x, len(there.cuts) if is_cut_alike else 0)
        if group is not None:
            # COMM: a broadcast over the stages. All take the names in one order. Pinned by
            # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
            shape = q.shape if is_cut_alike else there.shape
            x = q.new_empty(shape) if x is None else x.to(q).contiguous()
            dist.broadcast(x, group=group, group_src=first)
        q.copy_(x if is_cut_alike else x[there.region])


# 19. Joining, agreeing, leaving ------------------------------------------------------------------
#
# Process groups that survive restarts, errors that name a lost rank, and one last step for all
# ranks. Read this section if you write a training loop, or if a run does not start.


def connect(device="", *, timeout=60, threads=1) -> str:
    """Join torchrun's process group, or make a group of one rank. Return this rank's device.

    device: "cpu", "cuda" or "". The empty string takes CUDA if there is a GPU.
    timeout: seconds that a collective waits for another rank before it fails.
    threads: int. CPU threads of this rank.
    """
    torch.set_num_threads(threads)
    device = own_device(device)
    if dist.is_initialized():
        text = f"torch.distributed is on and is used as it is: timeout={timeout} has no effect"
        warnings.warn(text, stacklevel=2)
        return f"cuda:{torch.cuda.current_device()}" if "nccl" in dist.get_backend() else "cpu"

    patience = datetime.timedelta(seconds=timeout)
    where = dict(store=dist.HashStore(), rank=0, world_size=1)
    if "RANK" in os.environ:
        store, rank, world = next(dist.rendezvous("env://", timeout=patience))
        store = store_of_this_attempt(store, rank, world, timeout)
        where = dict(store=store, rank=rank, world_size=world)
    # gloo in addition to NCCL, because Python objects and checkpoints travel as CPU tensors.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, **where, timeout=patience)
    wait_for_all()
    return device


def own_device(device) -> str:
    """Choose the device of this process: "cpu", or the GPU that torchrun's LOCAL_RANK says."""
    has_cuda = torch.cuda.is_available()
    if device not in ("cpu", "cuda", "") or (device == "cuda" and not has_cuda):
        raise ValueError(f'expected "cpu", "cuda" where there is a GPU, or "", got {device!r}; '
                         f"torch.cuda.is_available() is {has_cuda}")  # fmt: skip
    if device == "cpu" or not has_cuda:
        return "cpu"
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # one process drives one device
    torch.cuda.set_device(device)
    return device


def store_of_this_attempt(store, rank, world, timeout):
    """Return the part of torchrun's key-value store that belongs to this start of the ranks.

    `torchrun --max-restarts` gives restarted ranks the old store, where gloo would find the
    addresses of dead processes. TORCHELASTIC_RESTART_COUNT cannot tell the starts apart, because
    each machine's torchrun counts its own. So rank 0 draws a new name, and each rank answers it:

        rank 0   attempt = a7f3          reads a7f3/1 = 52        a7f3/go = {"1": "52"}
        rank 1   reads attempt = a7f3    a7f3/1 = 52              reads go, finds its 52

    A rank that read an old name gets no `go`, or one without its number, and reads the name again.
    """
    # COMM: rank 0 waits for the number of every other rank, and they wait for the `go` of rank 0.
    # Each has sent before it waits, and `timeout` bounds both waits.
    # Pinned by tests/test_faults.py::test_a_killed_rank_is_started_again_and_the_run_goes_on.
    if rank == 0:
        attempt = uuid.uuid4().hex
        store.set("attempt", attempt)
        numbers = {str(r): store.get(f"{attempt}/{r}").decode() for r in range(1, world)}
        store.set(f"{attempt}/go", json.dumps(numbers))
        return dist.PrefixStore(attempt, store)

    own_number = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{rank}", own_number)
        with contextlib.suppress(dist.DistStoreError):
            store.wait([f"{attempt}/go"], datetime.timedelta(seconds=1))
            if json.loads(store.get(f"{attempt}/go")).get(str(rank)) == own_number:
                return dist.PrefixStore(attempt, store)
            time.sleep(0.1)
    raise dist.DistStoreError(f"rank 0 did not answer within {timeout} seconds")


def agree(function):
    """Call function() on rank 0. Return its value on every rank, or raise its error on every rank.

    A ValueError or an OSError becomes a ValueError of the same text on all ranks. Any other error
    of rank 0 is raised there as it is, and as a RuntimeError that quotes it on the other ranks.
    """
    box = [None, None]  # the value, and the error that the other ranks raise
    own_error = None
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = own_error = ValueError(str(error))
            if not isinstance(error, (ValueError, OSError)):
                own_error = error
                box[1] = RuntimeError(f"rank 0 ended with {type(error).__name__}: {error}")
    # COMM: rank 0 broadcasts to all ranks. It does so after an error too, so no rank waits for a
    # rank 0 that has failed.
    # Pinned by tests/test_faults.py::test_any_error_of_rank_0_reaches_all_ranks_at_once.
    dist.broadcast_object_list(box, src=0)
    value, error = box
    if own_error or error:
        raise own_error or error
    return value


def summed(values, device) -> list:
    """Sum a list of numbers, or of lists of numbers, over all ranks in float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    # COMM: an all-reduce. All ranks call it at the same place, with lists of the same shape.
    # Pinned by tests/test_ranks.py::test_ranks_and_sharding_give_the_one_process_run.
    dist.all_reduce(total)
    return total.tolist()


class Stop:
    """Remember the first SIGTERM or Ctrl-C (SIGINT), so that all ranks end at the same step.

    A handler saves nothing, because a collective inside it would hang. A second Ctrl-C ends this
    process at once, even inside a collective. torchrun repeats the terminal's Ctrl-C to its ranks,
    so a signal within a second of the first is the same key press. Make one Stop in a process.
    """

    SAME_KEY_PRESS = 1.0  # seconds
    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.number = 0  # of the first signal seen
        self.seen_at = 0.0

        # While a process waits in a collective, Python runs no handler, and two signals become
        # one. But Python's C code writes each signal's number to a pipe at once. A thread reads it.
        self.read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)  # `set_wakeup_fd` asks for this
        threading.Thread(target=self._listen, daemon=True).start()
        self._handle(write_end, lambda number, frame: None)
        # A process that a task's reward forks dies of these signals, and does not tell the run.
        os.register_at_fork(after_in_child=lambda: self._handle(-1, signal.SIG_DFL))

    def _handle(self, write_end, handler):
        signal.set_wakeup_fd(write_end)
        for number in self.SIGNALS:
            signal.signal(number, handler)

    def _listen(self):
        while True:
            for number in os.read(self.read_end, 64):
                if number in self.SIGNALS:
                    self._remember(number)

    def _remember(self, number):
        if not self.number:
            self.number = number
            self.seen_at = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self.seen_at + self.SAME_KEY_PRESS:
            os._exit(128 + number)

    def agreed(self, device) -> int:
        """Return the signal that any rank has seen, or 0. The number is the same on all ranks."""
        number = torch.tensor(self.number, device=device)
        # COMM: an all-reduce. All ranks call it after the same step, with a signal or without.
        # Pinned by tests/test_run.py::test_sigterm_to_one_rank_saves_on_all_and_says_how_to_go_on.
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)


class Progress:
    """How far a program is, and what its user can do if another rank is lost.

    where: function without arguments that returns it in words.
    advice: str. What the user can do: the remaining ranks cannot save, so it names a checkpoint.
    """

    def __init__(self):
        self.where = lambda: "starting"
        self.advice = "look at its error"


@contextlib.contextmanager
def naming_lost_ranks(progress):
    """Turn the error of a collective that lost a rank into a ConnectionError that says so.

    It is wrapped around the whole program, once. Every collective waits at most the timeout of its
    group, so a rank that is lost, stopped or slow ends the others by such an error.
    """
    try:
        yield
    except RuntimeError as error:
        # A single rank has no other to lose.
        world = int(os.environ.get("WORLD_SIZE", 1))
        if dist.is_initialized():
            world = dist.get_world_size()
        if world == 1 or not is_lost_rank(error):
            raise
        reason = str(error).splitlines()[0][:160]
        raise ConnectionError(
            f"{progress.where()}: another rank is gone or silent for too long ({reason}); this "
            f"rank leaves without saving; {progress.advice}") from error  # fmt: skip


def is_lost_rank(error) -> bool:
    """Tell whether an error, or an error that caused it, says that another rank is gone."""
    # NCCL and torch's stores raise a DistError. gloo raises a RuntimeError whose text begins with a
    # line of gloo's C++ source, which "connection timed out" of a task's database does not. torch's
    # pipelines wrap what a stage raised, hence the loop over causes.
    while error is not None:
        from_gloo = re.search(r"gloo/\S+\.cc:\d+\]|Gloo connectFullMesh failed", str(error))
        if isinstance(error, dist.DistError) or from_gloo:
            return True
        error = error.__cause__
    return False


# 20. Checkpoints ---------------------------------------------------------------------------------
#
# Write the state of a run so that it can go on under any plan, and read it back verified. DCP
# (torch.distributed.checkpoint) writes safetensors files of each rank, which say where in each
# tensor its parts lie. Reading runs no code: there is no pickle. state.json is written last. It has
# the run's own state, size and checksum of each other file, and its own checksum, the seal.
class Damaged(ValueError):
    """Files of a checkpoint are not as they were written. An older checkpoint may be whole."""


FILE = 64 << 20  # bytes


def write_checkpoint(path, tensors, state) -> None:
    """Collective. Write `tensors` by DCP and `state` as JSON into the directory `path`.

    tensors: {name: tensor}, DTensors where they are sharded. All or nothing: a temporary directory
    is renamed once every byte and its checksum are on disk. Raises on every rank: ValueError for a
    state that is not finite JSON, before anything is touched, and OSError if writing fails.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")

    try:
        sealed(state)
    except (TypeError, ValueError) as error:  # before anything is written, on every rank
        raise ValueError(f"checkpoint {path}: its state is not finite JSON: {error}") from error

    def start():
        shutil.rmtree(partial, ignore_errors=True)  # a run that was cut short may have left it
        partial.mkdir(parents=True)

    def finish():
        with (partial / "state.json").open("w") as file:
            json.dump(sealed(state | {"files": sums}), file)
            file.flush()
            os.fsync(file.fileno())
        # An older checkpoint of this name goes only now that the new one is whole.
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)

    try:
        agree(start)
        # DCP puts a file together in memory. So the tensors of a rank go into files of about FILE
        # bytes. All ranks follow the table of rank 0, which needs the names of all.
        sizes = on_all_ranks(lambda: {name: local(x).nbytes for name, x in tensors.items()})
        ends = itertools.accumulate(sizes.values())
        file_of = {name: 1 + end // FILE for name, end in zip(sizes, ends)}
        writer = dcp.HuggingFaceStorageWriter(str(partial), file_of, save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
        # By rank 0's list: the directories of a network's disk may differ for a moment.
        names = agree(lambda: sorted(file.name for file in partial.glob("*.safetensors")))
        sums = on_all_ranks(lambda: sums_of_share(partial, names))
        agree(finish)
    except (dcp.CheckpointException, ValueError, OSError) as error:  # raised on every rank
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # unfinished files take room
        raise OSError(
            f"checkpoint {path} not written ({reason_of(error)}); older ones are whole: make room "
            f"or mend the directory, then go on with --resume --out {path.parent}") from error


def reason_of(error) -> str:
    """Say which rank failed at what, if DCP says it."""
    failures = getattr(error, "failures", {})
    return "; ".join(f"rank {rank}: {e[0]}" for rank, e in failures.items()) or str(error)


def sums_of_share(path, names, alone=False) -> dict:
    """Return {name: [size, checksum]} of this rank's share of a checkpoint's files."""
    # File n is read by rank n mod world, so that each is read once. alone: this rank reads all.
    share = names if alone else names[dist.get_rank() :: dist.get_world_size()]
    sums = {}
    for name in share:
        size = total = 0
        with (Path(path) / name).open("rb") as file:
            while block := file.read(16 << 20):
                size += len(block)
                total = zlib.crc32(block, total)
        sums[name] = [size, total]
    return sums


def on_all_ranks(function) -> dict:
    """Merge the dicts that function() returns on all ranks; or raise the first error on every rank.

    What one rank refuses, all refuse, so that none waits for a rank that has left. Collective.
    """
    found = None
    try:
        found = function()
    except (ValueError, OSError) as error:
        found = error
    # COMM: an all-gather over all ranks, of results or errors. Pinned by
    # tests/test_parallel_faults.py::test_what_one_rank_cannot_read_is_refused_by_all.
    results = all_gather_objects(found)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return {name: value for result in results for name, value in result.items()}


def sealed(state) -> dict:
    """Return a checkpoint's JSON state, checksums of its files included, with its own checksum.

    ValueError for a number that is not finite: Python would write and read it, but it is not JSON.
    """
    unsealed = {key: value for key, value in state.items() if key != "seal"}
    return unsealed | {"seal": zlib.crc32(json.dumps(unsealed, allow_nan=False).encode())}


def sealed_state(path) -> dict:
    """Return a checkpoint's JSON state. `Damaged` unless all files are there, by their sizes."""
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text())
        if state != sealed(state):
            raise ValueError("its checksum differs")
        sizes = {name: size for name, (size, _) in state["files"].items()}
    # Only a file that is not there is damage. Another OSError may pass, so it is raised: a run that
    # went on from an older checkpoint would delete this one.
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError, KeyError,
            RecursionError) as error:  # fmt: skip
        raise Damaged(f"checkpoint {path}: state.json is missing or damaged: {error}") from error
    # DCP reads whatever tensor files are in the directory, also files of another program.
    found = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    for name in sorted(found.keys() | sizes.keys()):
        if found.get(name) != sizes.get(name):
            raise Damaged(f"checkpoint {path}: {name} is damaged: it has {found.get(name)} bytes, "
                          f"and state.json says {sizes.get(name)}")  # fmt: skip
    return state


def read_checkpoint(path, tensors, *, counts=(), only="", alone=False) -> dict:
    """Collective. Fill `tensors` in place from a checkpoint, and return its verified JSON state.

    The checkpoint has the same tensors by name and shape, in any sharding, or it is refused.
    counts: names in the state that must be integers of 0 or more. only: a prefix of names, or a
    tuple of prefixes; other stored tensors are ignored. "model." leaves out AdamW's state.
    alone: this rank reads by itself, into whole tensors.
    An error on any rank is raised on every rank: a ValueError, `Damaged` if bytes are not as they
    were written, or an OSError. It leaves `tensors` half filled.
    """
    together = (lambda function: function()) if alone else on_all_ranks

    def inspect():
        state = sealed_state(path)
        found = sums_of_share(path, sorted(state["files"]), alone)
        for name, sums in found.items():
            if sums != state["files"][name]:
                raise Damaged(f"checkpoint {path}: {name} is damaged (its checksum differs)")
        for name in counts:
            value = state.get(name)
            if type(value) is not int or value < 0:  # True is an int, and not a count
                raise ValueError(f"checkpoint {path}: expected {name} in state.json to be an "
                                 f"integer of 0 or more, got {value!r:.80}")  # fmt: skip
        return state

    # Files are verified before any of them is loaded. Slow files do not end a run: each rank reads
    # its share at the same time as the others do.
    state = together(inspect)
    wanted = together(lambda: {name: tuple(x.shape) for name, x in tensors.items()})
    reader = dcp.HuggingFaceStorageReader(str(path))

    def stored_shapes():
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:  # the checksums are right, and the files are of another program
            raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
        return {name: tuple(x.size) for name, x in stored.items() if name.startswith(only)}

    # Strict both ways, so that no tensor keeps its first values, and no stored one is lost.
    saved = together(stored_shapes)
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"checkpoint {path} is of another model: {name} is {saved.get(name, 'absent')} "
                f"there and {wanted.get(name, 'absent')} here")  # fmt: skip
    try:
        with warnings.catch_warnings():  # about `alone`
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except (dcp.CheckpointException, OSError) as error:  # raised on every rank, whichever failed
        raise ValueError(f"checkpoint {path} cannot be read: {reason_of(error)}") from error
    return state


def checkpoints(directory, kind="step"):
    """Return the step-NNNNNNNN directories, oldest first. kind: how else their names begin."""
    return sorted(Path(directory).glob(f"{kind}-" + "[0-9]" * 8))


def superseded(directory, step, keep, kind="step"):
    """Return the checkpoints to delete once `step` is saved, in the order of their steps.

    These are all but the newest `keep` up to `step`, and all later ones, which the resume has
    found damaged. kind: as in `checkpoints`.
    """
    # Of steps 2, 4, 6 and 8, with 6 just saved and keep 2, they are 2 and 8.
    found = checkpoints(directory, kind)
    saved = Path(directory) / f"{kind}-{step:08d}"
    up_to_it = [path for path in found if path <= saved]
    return up_to_it[:-keep] + found[len(up_to_it) :]


def newest_checkpoint(directory, kind="step"):
    """Return the newest checkpoint whose files are there and have their size, see `read_newest`.

    Only `read_newest` finds out whether the bytes of the tensors are as they were written.
    """
    return _newest(checkpoints(directory, kind), sealed_state)[0]


def read_newest(directory, read, kind="step"):
    """Collective. Return (path, read(path)) for the newest undamaged checkpoint.

    read: collective, it calls `read_checkpoint`. Where that finds damage, the checkpoint is named
    in a warning, and the next older one is read. Any other error of `read` is raised: a crash or a
    disk does not leave a right checksum on wrong contents. (None, None) if there is no checkpoint;
    if none is undamaged, ValueError, so that a run is not begun again by mistake.
    kind: as in `checkpoints`.
    """
    return _newest(agree(lambda: checkpoints(directory, kind)), read)


def _newest(found, read):
    """Implement `read_newest` for the paths of checkpoints, oldest first."""
    # The newest first. Only damage leads to an older one.
    for path in reversed(found):
        try:
            return str(path), read(path)
        except Damaged as error:
            if not dist.is_initialized() or dist.get_rank() == 0:
                print(f"warning: {error}; trying an older one", file=sys.stderr)
    if found:
        raise ValueError(
            f"no checkpoint in {found[0].parent} is whole "
            f"({', '.join(path.name for path in found)}): "
            f"put a copy of one back, or begin again with another --out")  # fmt: skip
    return None, None


# 21. check ---------------------------------------------------------------------------------------
#
# The core's plans by the core's functions and by these, and every plan with models.py. Skip it.
class FullTraining:
    """What `SimpleTraining` is, by the functions of the full version. Text: "d2t2 zero1"."""

    eps = 0.0

    def __init__(self, model, text):
        plan, mode = text.split()
        self.grid = Grid(Plan.parse(plan))
        options = dict(attention=lambda: None, mode=mode)  # here c ranks have rows of their own
        self.model = parallelize(model, self.grid.plan, device_mesh=self.grid, **options)
        make = functools.partial(torch.optim.AdamW, **ADAMW)
        self.optimizer = LocalOptimizer(self.model, make, zero=mode == "zero1")

    def reduce_and_clip(self, max_norm):
        reduce_gradients(self.model)
        return clip_grad_norm(self.model, max_norm)

    def parts(self, truth):
        """Yield this rank's entries of each parameter and gradient, and the true ones."""
        for name, p in self.model.named_parameters():
            region = self.model.part.places[name].region
            whole = truth.get_parameter(name)
            yield local(p), whole[region]
            yield local(p.grad), whole.grad[region]


def check() -> bool:
    """Compare every plan with one process, print a table of errors, and return whether it is ok."""
    # The core comes first: its ranks are forks, which need a process where autograd has not run.
    errors = {f"core, {name}": x for name, x in check_plans(PLANS, SimpleTraining).items()}
    plans = {world: [f"{plan} {mode}" for plan in dict.fromkeys(x.split()[0] for x in PLANS[world])
                     for mode in MODES] for world in PLANS}  # fmt: skip
    errors |= {f"toy, {name}": x for name, x in check_plans(plans, FullTraining).items()}
    try:
        errors |= _measuring_file().matrix()
    except ImportError as missing:
        print(f"every plan with models.py: SKIP ({missing}); it would compare them too")
    for name, error in errors.items():
        print(f"{name:36} {error:.1e}  {'ok' if error <= 1e-10 else 'FAILED'}")
    ok = all(error <= 1e-10 for error in errors.values())
    print(json.dumps({"check": "parallel", "ok": ok, "max_error": max(errors.values())}))
    return ok


def _measuring_file(name="measure_parallel"):
    """Import a file of tests/. ImportError if it, or a file that it needs, is missing."""
    tests = Path(__file__).resolve().parent / "tests"
    sys.path += [str(tests), str(tests / "bench")]
    return __import__(name)


def main(argv) -> int:
    """Run a command and return the exit code; tests/bench/measure_parallel.py has plan, bench."""
    # What tests/ has is long, needs what only tests need, and is imported when asked for.
    if argv == ["core"]:
        core_main(argv)
    elif argv == ["check"]:
        return 0 if check() else 1
    elif argv[:2] == ["check", "--device"]:
        return _measuring_file("measure_gpu").check("parallel", argv[1:])
    elif argv and argv[0] in ("plan", "bench"):
        return _measuring_file().main(argv)
    else:
        print("usage: python parallel.py core | check [--device cuda] | plan STRING | bench\n\n"
              f"The letters of a plan string:\n\n{letters_table()}", file=sys.stderr)  # fmt: skip
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
