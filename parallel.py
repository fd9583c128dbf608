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
        plan, *words = text.split()
        degrees = {letter: int(number) for letter, number in re.findall(r"([pdcte])(\d+)", plan)}
        p, d, c, t, e = (degrees.get(letter, 1) for letter in "pdcte")
        self.fsdp = "fsdp" in words
        self.sequence = "sp" in words or t == 1  # with one t rank, its shard is all tokens

        # A group lies along some axes of a grid: "dct", or "", which is this rank by itself. Move
        # the axes last and flatten them, then each row is a group.
        def group_along(grid, axes):
            size = math.prod(grid.shape[axis] for axis in axes)
            rows = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, size).tolist()
            # COMM: all ranks make all groups, in one order. A second group of all ranks may hang.
            make = dist.new_subgroups_by_enumeration
            return make(rows, timeout)[0] if len(rows) > 1 else dist.group.WORLD

        rank_grid = np.arange(dist.get_world_size()).reshape(p, d, c, t)
        expert_grid = rank_grid.reshape(p, -1, e)
        self.group = {"edp": group_along(expert_grid, [1]), "e": group_along(expert_grid, [2])}
        for name in ("p", "d", "c", "t", "dc", "dct", ""):
            self.group[name] = group_along(rank_grid, ["pdct".index(letter) for letter in name])


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
    shards = [shard.contiguous() for shard in x.chunk(dist.get_world_size(group), dim)]
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
def keep_stage(model, group):
    """Keep the layers of this rank's stage, in place. Stage 0 of 2 has layers 0 and 1 of 4."""
    stage = dist.get_rank(group)
    stages = dist.get_world_size(group)
    layers_per_stage = math.ceil(len(model.model.layers) / stages)
    for n in range(len(model.model.layers)):
        if n // layers_per_stage != stage:
            delattr(model.model.layers, str(n))  # unlike del, this renames no other layer
    # An Identity lets the states of the stage before pass in place of tokens, and our states on.
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
    if stage < stages - 1:
        model.model.norm = nn.Identity()
        del model.lm_head


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
    pending = deque(maxlen=stages - stage)  # (input, output) of micro-batches, until backward

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
    # It is cut along `dim` over the ranks of `over`. The ranks of `replicas` hold the same entries.
    # The gradients on the ranks of `partial` are partial gradients.
    group = grid.group
    *_, module, kind = name.split(".")
    # FSDP cuts a layer by rows, and its backward has summed the gradients already.
    if grid.fsdp and ".layers." in name:
        return dict(over=group["dc"], dim=0, replicas=group[""], partial=group[""])
    # d and c ranks always have different tokens. For a matrix that is cut over t, that is all.
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"):
        return dict(over=group["t"], dim=0, replicas=group["dc"], partial=group["dc"])
    if module in ("o_proj", "down_proj") and kind == "weight":
        return dict(over=group["t"], dim=1, replicas=group["dc"], partial=group["dc"])
    # The norms of q and k are whole on every t rank, which applies them to its own heads.
    if module in ("q_norm", "k_norm"):
        return dict(over=group[""], dim=0, replicas=group["dct"], partial=group["dct"])
    # Norms, routers, experts and row-parallel biases: t ranks have different tokens with sequence
    # parallelism, and the same without. An expert has got the rows of all e ranks, so edp remains.
    over, replicas = ("e", "edp") if ".experts." in name else ("", "dct")
    partial = replicas if grid.sequence else "dc"
    return dict(over=group[over], dim=0, replicas=group[replicas], partial=group[partial])


def simple_reduce_gradients(model, grid):
    """Sum partial gradients over ranks, in place, once a step: .grad has added up micro-batches."""
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=layout(name, grid)["partial"])  # (1)


# 7. The clip norm -------------------------------------------------------------------------------
# All ranks must scale by the same factor, so the norm is over all entries of all ranks, each
# counted once. If two t ranks have squares 5 and 7 of different entries of a q_proj, these count
# 5 + 7. If they have squares 8 and 8 of the same entries of an RMSNorm, these count 8 / 2 + 8 / 2.
def simple_clip_grad_norm(model, max_norm, grid):
    """Scale gradients, in place, to a norm of at most max_norm. Return the norm before that."""
    squares = 0
    for name, p in model.named_parameters():
        squares += p.grad.square().sum() / dist.get_world_size(layout(name, grid)["replicas"])
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
            replicas = layout(name, grid)["replicas"]
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
    names = [name for name, _ in whole_layer.named_parameters()]
    for p in layer.parameters():
        p.data = parameter_shard(p, group).data

    # The ranks have different tokens and need the same whole weights. The backward of the gather
    # is a reduce-scatter: each rank gets the gradient of its rows, summed over all ranks.
    def gather_and_run(*args):
        shards = layer.parameters()
        whole = [Communicate.apply(p, group, all_gather, reduce_scatter) for p in shards]  # (1)
        return torch.func.functional_call(whole_layer, dict(zip(names, whole)), args)

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

    def logprobs(self, hidden_NM, targets_N, temperature):
        logp_NV = (F.linear(hidden_NM, self.head_weight) / temperature).log_softmax(-1)
        return logp_NV.gather(-1, targets_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


def check_plan(text):
    """Train two steps under a plan and on one process. Return the largest error on this rank."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (8, 9))
    batch = tokens[:, :-1], tokens[:, 1:], torch.rand(8, 8) < 0.7  # inputs, targets, loss mask
    Z = batch[2].sum()
    truth = ToyTransformer()
    model = copy.deepcopy(truth)
    grid = SimpleGrid(text, PATIENCE)
    tensor_parallel(model, grid.group["t"], grid.sequence)
    expert_parallel(model, grid.group["e"])
    keep_stage(model, grid.group["p"])
    if grid.fsdp:
        for layer in model.model.layers:
            fully_shard_layer(layer, grid.group["dc"])
    truth_optimizer = torch.optim.AdamW(truth.parameters(), **ADAMW)
    optimizer = SimpleZeroAdamW(model, grid, **ADAMW)  # ZeRO-1 under every plan
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
        simple_reduce_gradients(model, grid)
        norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        compare(simple_clip_grad_norm(model, 0.1, grid), norm)
        truth_optimizer.step()
        optimizer.step()
        for name, p in model.named_parameters():
            part = layout(name, grid)
            whole = truth.get_parameter(name)
            compare(p, own_chunk(whole, part["over"], part["dim"]))
            compare(p.grad, own_chunk(whole.grad, part["over"], part["dim"]))
        truth.zero_grad()
        model.zero_grad()
    return torch.stack(errors).max()  # NaN if any error is NaN


def core_main(argv):
    """Print and return the largest error of each plan. Exit with 1 unless all are at most 1e-10."""
    # The first AdamW imports a large package. Make one before the processes fork, so all have it.
    torch.optim.AdamW([torch.zeros(1)])
    plans = [text for world in PLANS for text in PLANS[world]]
    errors = torch.full((len(plans),), math.nan).share_memory_()

    def check_on_rank(rank, world, folder):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        dist.init_process_group("gloo", f"file://{folder}/{world}", PATIENCE, world, rank)
        for text in PLANS[world]:
            errors[plans.index(text)] = all_gather(check_plan(text)[None], None).max()
        dist.barrier()
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        for world in PLANS:
            start_processes(check_on_rank, (world, folder), world, start_method="fork")
    table = "  ".join(f"{text} {error:.0e}" for text, error in zip(plans, errors.tolist()))
    print(f"{table}  largest {errors.max().item():.1e}")
    if not errors.max() <= 1e-10:
        sys.exit(1)
    return dict(zip(plans, errors.tolist()))


# =================================================================================================
# The core ends here. What follows is the full version: strict, fast and connected. Nobody needs it
# to understand the lines above.
# =================================================================================================
#
# It adds plans with engines' names and expert tensor parallelism, torch's FSDP2 and pipeline
# schedules, mixed precision, packed batches, generators with plans of their own, checkpoints that
# any plan reads, and ranks that generate while others train. Equations (1) to (7) are the core's.
#
# What a plan shares out, and what it sends. SP: sequence parallelism. Ends: the embedding, and the
# last norm with the head.
#
#     d   Rows of the batch. ddp, zero1: nothing in forward and backward. fsdp: an all-gather of a
#         layer in each, and a reduce-scatter of its gradient.
#     t   Heads, inner widths, vocabulary; with SP tokens in between. A layer: 2 all-gathers and 2
#         reduce-scatters forward, as many backward. Without SP: 2 all-reduces each.
#         Ends, forward: a reduce-scatter after the embedding and an all-gather of the last states
#         (without SP 1 all-reduce), and 2 all-reduces of (N,) numbers for log-probs. Ends,
#         backward: an all-gather (without SP nothing), an all-reduce of the last states' gradient.
#     c   Tokens of each sequence. What the attention sends; with t and SP 1 all-gather of lengths.
#     e   Experts. A sparse layer: 3 all-to-all forward (counts, rows, rows back), 2 backward. Its
#         balance loss, under t and under c: 1 all-reduce of counts each, forward.
#     p   Layers. States to the next stage, and their gradients back.
#
# Once a step gradients are summed: over d and c (fsdp has done it; experts over expert-dp); of
# norms, router and biases after g also over t (without SP only router and norms of q and k); of a
# tied embedding also over the first and the last stage.
#
# With ddp and zero1 micro-batches cost no message, so ranks may run different numbers of them, or
# none: that suits trees, whose sizes differ. Under fsdp, t, c, e and p every forward is collective:
# all ranks of a group must make the same calls. `PackedBatches` takes care of that.
#
# Numbers that a rank sends for Q parameters on W ranks: ddp 2 Q (W - 1) / W a step; fsdp Q (W - 1)
# / W for each forward, each backward's all-gather and reduce-scatter; t 4 S M (t - 1) / t a layer
# each way.
#
# How it deviates: PyTorch's DDP averages and overlaps; this sums and does not overlap. FSDP2
# averages by default; section 14 tells it to sum. Without SP, training needs etp = t for experts.
# Not here: Float8; under t gradients of logits (`model(tokens)`), and embeddings as input.
#
# References: Megatron arXiv:1909.08053, sequence parallelism arXiv:2205.05198; experts: GShard
# arXiv:2006.16668, folding arXiv:2504.14960; FSDP arXiv:2304.11277; ZeRO arXiv:1910.02054; 1F1B
# arXiv:2104.04473; ZB-V arXiv:2401.10241; torch.distributed.checkpoint (DCP).

import contextlib  # noqa: E402
import dataclasses  # noqa: E402
import hashlib  # noqa: E402
import inspect  # noqa: E402
import io  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import pickletools  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import types  # noqa: E402
import uuid  # noqa: E402
import warnings  # noqa: E402
import weakref  # noqa: E402
import zlib  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import NamedTuple  # noqa: E402

import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.utils.checkpoint as ckpt  # noqa: E402
from torch.distributed import fsdp, pipelining  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

# 11. Plans ---------------------------------------------------------------------------------------
#
# Plan strings, which ranks form which group, and what a plan does not fit.

KINDS = "dp", "cp", "tp", "pp", "ep", "etp", "expert-dp", "fsdp"
BACKENDS = "archon", "fsdp", "megatron", "sglang", "vllm"

# The grammar of plan strings, as regular expressions for re.VERBOSE. `Plan` has examples.
DEGREES = "(?:[a-z][1-9][0-9]*)+"  # one or more letters, each with a number of 1 or more
PLAN = rf"""
    (?:
        (?!attn:|ffn:)              # these two look like backends and are not
        (?P<backend> [a-z]+ )
        (?: \[ (?P<name> \w+ ) \] )?
        :
    )?
    (?:
        (?P<flat> {DEGREES} )       # attention and experts together
    |
        (?P<open> \( )?
        attn: (?P<attn> {DEGREES} )
        \|
        ffn: (?P<ffn> {DEGREES} )
        (?(open) \) )               # closed if and only if it was opened
    )
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Define how many ranks each kind of parallelism uses, and which ranks form its groups.

        d2t2            4 ranks: data 2, tensor 2             p2d2t2        8 ranks: pipeline 2 too
        d2t2e4          the same 4 ranks, experts over all    d2c2          data 2, context 2
        (attn:d2t2|ffn:e2t2)   expert tensor degree 2, on the tensor ranks
        archon:d2t2     with a backend's name; archon[actor]:d2t2 with the name of a role too

    The letters d t p c e appear at most once each, in any order; a missing letter means 1. The
    ranks are the cells of a grid (pp, dp, cp, tp). The grid is numbered with tp innermost, because
    tensor ranks send most and should be neighbors:

        p2d2t2    pp 0: dp 0: 0 1      groups("tp"): [0 1] [2 3] [4 5] [6 7]
                        dp 1: 2 3      groups("dp"): [0 2] [1 3] [4 6] [5 7]
                  pp 1: dp 0: 4 5      groups("pp"): [0 4] [1 5] [2 6] [3 7]
                        dp 1: 6 7      groups("fsdp"): the dp groups; with context, d and c together

    For experts, the d c t ranks of a stage are numbered again as a grid (expert-dp, ep, etp). etp
    is innermost, and is 1 or tp. The ranks of one expert-dp group hold the same experts.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    backend: str | None = None
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Read a plan from a string, or raise ValueError. `plans_on_same_ranks` takes |."""
        found = re.fullmatch(PLAN, text, re.VERBOSE) if isinstance(text, str) else None
        if found is None:
            raise ValueError(
                f"expected a plan such as d2t2, archon:d2t2 or (attn:d2t2|ffn:e2t2), got {text!r}. "
                f"Each letter has a number of 1 or more")  # fmt: skip
        if found["backend"] not in (None, *BACKENDS):
            raise ValueError(
                f"plan {text!r}: expected a backend of {', '.join(BACKENDS)}, got "
                f"{found['backend']!r}")  # fmt: skip

        def degrees(part, letters):
            """Return {letter: number} of one part of the text."""
            pairs = re.findall("([a-z])([0-9]+)", part)
            numbers = {letter: int(number) for letter, number in pairs}
            if len(numbers) < len(pairs) or not numbers.keys() <= {*letters}:
                raise ValueError(
                    f"plan {text!r}: expected letters of {' '.join(letters)}, each at most once, "
                    f"got {part!r}")  # fmt: skip
            return numbers

        if found["flat"]:
            attn = degrees(found["flat"], "dtpce")
            ffn = {"e": attn.get("e", 1)}
        else:
            attn = degrees(found["attn"], "dtpc")
            ffn = degrees(found["ffn"], "detp")
        plan = cls(
            dp=attn.get("d", 1), cp=attn.get("c", 1), tp=attn.get("t", 1), pp=attn.get("p", 1),
            ep=ffn.get("e", 1), etp=ffn.get("t", 1), backend=found["backend"], name=found["name"],
        )  # fmt: skip

        # Experts use the ranks of attention, in another grid. So d and p of ffn follow from the
        # other degrees: they may be left out, and must agree where they are given. For example, in
        # (attn:d4t2|ffn:d2e2t2) a copy of the experts takes e t = 4 of 8 ranks, so ffn has d2.
        for letter, degree in (("d", plan.edp), ("p", plan.pp)):
            given = ffn.get(letter, degree)
            if given != degree:
                raise ValueError(
                    f"plan {text!r}: expected {letter}{degree} in ffn, as it follows from attn, "
                    f"got {letter}{given}. Leave it out")  # fmt: skip
        return plan

    def __post_init__(self):
        degrees = dict(d=self.dp, c=self.cp, t=self.tp, p=self.pp, e=self.ep, etp=self.etp)
        for letter, degree in degrees.items():
            if not (isinstance(degree, int) and degree > 0):
                raise ValueError(f"expected {letter} to be an integer of 1 or more, got {degree!r}")
        if self.name is not None and self.backend is None:
            raise ValueError(f"expected a backend with the name {self.name!r}, as in archon[x]:d2")
        if self.etp not in (1, self.tp):
            raise ValueError(
                f"plan {self}: expected ffn's t to be 1 or attn's t = {self.tp}, got {self.etp}")

        # An expert group consists of whole context groups, and also of whole tensor groups unless
        # the tensor ranks split each expert. A stage consists of whole expert groups. For example,
        # c2t2e2 is refused, and c2t2e4 is not.
        if self.etp == 1:
            inner = self.cp * self.tp
            product = "c * t"
        else:
            inner = self.cp
            product = "c"
        outer = self.dp * inner
        if self.ep > 1 and self.ep % inner:
            raise ValueError(
                f"plan {self}: expected e to be a multiple of {product} = {inner}, got {self.ep}")
        if outer % self.ep:
            raise ValueError(
                f"plan {self}: expected e to divide d * {product} = {outer}, got {self.ep}")

    @property
    def world(self) -> int:
        """Return the number of ranks.

        Expert parallelism adds no ranks; experts are distributed over the existing ones.
        """
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Return the number of ranks that hold the same experts: d c t / (e etp)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def shapes(self) -> tuple[dict, dict]:
        """Return the rank grids of attention and of experts, name to degree, outermost first."""
        attention = dict(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)
        experts = {"pp": self.pp, "expert-dp": self.edp, "ep": self.ep, "etp": self.etp}
        return attention, experts

    def groups(self, kind: str) -> list[list[int]]:
        """List the ranks of each group of a kind (see KINDS), without making communicators."""
        if kind not in KINDS:
            raise ValueError(f"expected a kind of {', '.join(KINDS)}, got {kind!r}")
        attention, experts = self.shapes
        shape = attention if kind in attention or kind == "fsdp" else experts

        # Which ranks form a group? Lay all ranks out as the grid and move the dimension of the
        # group last. Each row is then a group. For d2t2 and "dp":
        #
        #     grid (dp, tp)   [[0 1]     dp last   [[0 2]     groups   [0 2] and [1 3]
        #                      [2 3]]               [1 3]]
        names = ("dp", "cp") if kind == "fsdp" else (kind,)
        wanted = [n for n, name in enumerate(shape) if name in names]
        grid = np.arange(self.world).reshape([*shape.values()])
        grid = np.moveaxis(grid, wanted, range(-len(wanted), 0))
        return grid.reshape(-1, math.prod(shape[name] for name in names)).tolist()

    def require_fits(
        self, *, world=None, config=None, microbatches=None, ulysses=False, shard=None
    ) -> None:
        """Raise ValueError unless the plan fits the ranks, the model and the batch that are given.

        world: int. The number of ranks that were started.
        shard: int. HSDP: how many of the d ranks share the weights.
        config: ModelConfig.
        microbatches: int. The number of micro-batches of a step.
        ulysses: bool. Context parallelism distributes heads, so c must divide them as well.
        """
        if world is not None and world != self.world:
            raise ValueError(
                f"plan {self}: expected p * d * c * t = {self.world} ranks, got {world}. Start "
                f"{self.world} ranks, or change the plan")  # fmt: skip
        if microbatches is not None and self.pp > 1 and microbatches < self.pp:
            raise ValueError(
                f"plan {self}: expected a micro-batch for each of {self.pp} stages, got "
                f"{microbatches}. Split the batch into more micro-batches")  # fmt: skip
        if shard is not None and self.dp % shard:
            raise ValueError(f"plan {self}: {shard} ranks that shard must divide d = {self.dp}")
        if config is None:
            return
        if not config.sparse_layers and self.ep * self.etp > 1:
            raise ValueError(
                f"plan {self}: expected a model with experts, got a dense one. Leave e and ffn out")
        if self.pp > config.num_hidden_layers:
            raise ValueError(
                f"plan {self}: expected at most a stage for each of {config.num_hidden_layers} "
                f"layers, got p = {self.pp}")  # fmt: skip

        # Each degree splits something into equal parts. The fields of experts count only if the
        # plan splits experts, because a dense model may have any values there.
        heads = config.num_attention_heads
        splits = [
            ("t", self.tp, "query heads", heads),
            ("t", self.tp, "key heads", config.num_key_value_heads),
            ("t", self.tp, "intermediate_size", config.intermediate_size),
        ]
        if ulysses:
            splits.append(("t * c", self.tp * self.cp, "query heads (ulysses)", heads))
        if self.ep > 1:
            splits.append(("e", self.ep, "experts", config.num_experts))
        if self.etp > 1:
            width = config.moe_intermediate_size
            splits.append(("ffn's t", self.etp, "moe_intermediate_size", width))
        for letter, degree, what, size in splits:
            if size % degree:
                raise ValueError(
                    f"plan {self}: expected {what} divisible by {letter} = {degree}, got {size}")

    def describe(self) -> str:
        """Return a line of degrees, then each tensor group on a line with its place in the grid."""
        degrees = self.shapes[0] | {"ep": self.ep, "etp": self.etp}
        lines = [" ".join(f"{kind}={degree}" for kind, degree in degrees.items())]

        # Tensor groups are in the order of the grid without its last dimension, tp.
        width = len(str(self.world - 1))
        places = itertools.product(range(self.pp), range(self.dp), range(self.cp))
        for (p, d, c), ranks in zip(places, self.groups("tp"), strict=True):
            row = " ".join(f"{rank:>{width}}" for rank in ranks)
            lines.append(f"pp {p}  dp {d}  cp {c} | {row}")
        return "\n".join(lines)

    def __str__(self):
        """Return the shortest string that parses to this plan."""
        text = f"p{self.pp}d{self.dp}t{self.tp}c{self.cp}"
        if self.etp > 1:
            text = f"(attn:{text}|ffn:p{self.pp}e{self.ep}t{self.etp})"
        else:
            text = f"{text}e{self.ep}"
        text = re.sub("[a-z]1(?![0-9])", "", text) or "d1"  # degrees of 1 are left out
        name = f"[{self.name}]" if self.name else ""
        return f"{self.backend}{name}:{text}" if self.backend else text


def plans_on_same_ranks(text) -> tuple[Plan, ...]:
    """Read plans joined by |, each for the same ranks, or raise ValueError.

    "t4|d2t2" is the plans t4 and d2t2, both of 4 ranks.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected a plan such as d2t2 or d2|t2, got {text!r}")
    if "+" in text:
        raise ValueError(
            f"expected a plan such as d2t2 or d2|t2, got {text!r}. Ranks of their own for "
            f"generation, A+B, are not supported. A|B shares ranks")  # fmt: skip

    # The | before ffn: is inside one plan.
    plans = tuple(Plan.parse(one) for one in re.split(r"\|(?!ffn:)", text))
    if len({plan.world for plan in plans}) > 1:
        worlds = ", ".join(f"{plan} has {plan.world} ranks" for plan in plans)
        raise ValueError(f"expected plans of one world on the same devices, got: {worlds}")
    return plans


# 12. Communicators -------------------------------------------------------------------------------
#
# The process groups and device meshes of a plan. Skip it unless ranks wait for each other while
# groups are made.


class Grid(NamedTuple):
    """The communicators of a plan. Every rank makes all of them, in the same order.

    A DeviceMesh is a grid of ranks with a process group along each of its named dimensions.
    """

    plan: Plan
    dense: DeviceMesh  # (pp, replicate, fsdp, tp). fsdp: the d and c ranks, over which FSDP shards
    experts: DeviceMesh  # (pp, expert-dp, ep, etp)
    context: dist.ProcessGroup  # the ranks that share sequences
    data: dist.ProcessGroup  # the ranks with other tokens and the same weights: d and c
    replica: dist.ProcessGroup  # the ranks that work on the same sequences: c, t and p
    ends: dist.ProcessGroup | None  # first and last stage, which both hold a tied embedding

    @classmethod
    def make(cls, plan, device_type="cpu", *, shard=None) -> "Grid":
        """Make all communicators of a plan. Collective over the world.

        plan: Plan. For as many ranks as there are.
        device_type: "cpu" or "cuda". Where the model runs.
        shard: int. HSDP: how many of the d ranks share the weights. Default: all.
        """
        plan.require_fits(world=dist.get_world_size(), shard=shard)
        shard = plan.dp if shard is None else shard
        timeout = timeout_of_world(device_type)
        made = {}  # lists of ranks -> this rank's group among them, so that none is made twice

        def group_among(lists):
            lists = tuple(tuple(ranks) for ranks in lists)
            if lists == (tuple(range(plan.world)),):
                return dist.group.WORLD
            if lists not in made:
                # COMM: every rank makes every group, in one order, its own among them.
                # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
                made[lists], _ = dist.new_subgroups_by_enumeration(lists, timeout=timeout)
            return made[lists]

        def mesh_of(shape):
            ranks = np.arange(plan.world).reshape([*shape.values()])
            groups = []
            for n, degree in enumerate(shape.values()):
                along = np.moveaxis(ranks, n, -1).reshape(-1, degree)
                groups.append(group_among(along.tolist()))
            return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(shape))

        # The ranks that work on the same sequences are all stages, c and t of one d. In p2d2 the
        # ranks by (pp, dp) are [0 1] and [2 3], so the replicas are [0 2] and [1 3].
        dense = dict(pp=plan.pp, replicate=plan.dp // shard, fsdp=shard * plan.cp, tp=plan.tp)
        by_stage = np.arange(plan.world).reshape(plan.pp, plan.dp, -1)
        replicas = by_stage.swapaxes(0, 1).reshape(plan.dp, -1).tolist()
        ends = None
        if plan.pp > 1:
            ends = group_among([[stages[0], stages[-1]] for stages in plan.groups("pp")])
        grid = cls(
            plan, dense=mesh_of(dense), experts=mesh_of(plan.shapes[1]),
            context=group_among(plan.groups("cp")), data=group_among(plan.groups("fsdp")),
            replica=group_among(replicas), ends=ends,
        )  # fmt: skip
        wait_for_all(device_type)
        return grid

    @property
    def dp_rank(self) -> int:
        """Which of the d shares of the batch this rank works on."""
        return dist.get_rank() // (self.plan.cp * self.plan.tp) % self.plan.dp

    @property
    def device(self) -> torch.device:
        """Where this rank's model runs, even if its shards wait on the CPU."""
        kind = self.dense.device_type
        return torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)


def timeout_of_world(device_type) -> datetime.timedelta:
    """Return how long the default group's collectives wait for a rank.

    torch gives every other group the default of its backend, 30 minutes for gloo and 10 for NCCL,
    whatever the default group was given. So the other groups are given this one.
    """
    backend = dist.group.WORLD._get_backend(torch.device(device_type))
    return backend.options._timeout


# 13. Where a rank's part lies --------------------------------------------------------------------
#
# A plan cuts a parameter once or several times. `Place` says, for one parameter, which entries are
# on this rank, and which ranks have other terms of their gradient. `Part` has the places of all
# parameters. `parallelize` makes them once. The functions that sum and clip gradients, and that
# update, compare, write, read or send weights, read the places. They do not ask how a model was
# split.


class Place(NamedTuple):
    """Where this rank's entries of a parameter lie, and which ranks share the work on them.

    A box is a range for each dimension. A matrix of 13 x 8, cut by t = 2 along dimension 0 and then
    by FSDP over d = 2 along dimension 0, on the rank with t = 1 and d = 1:

        boxes[0]   0-13, 0-8      the whole
        boxes[1]   7-13, 0-8      t = 0 has the rows 0-7
        boxes[2]   10-13, 0-8     d = 0 has the rows 7-10

    mesh: DeviceMesh, of the grid. The cuts are along its dimensions. None without a grid.
    boxes: tuple. boxes[k] holds this rank's entries after the first k cuts.
    cuts: tuple of (dimension of the tensor, name of the mesh's dimension), in the order of cutting.
    replicas: name of the mesh's dimension along which ranks have the same entries, other tokens.
    sums: tuple of three process groups, or None, over which its gradient is summed, in this order:
        the ranks with other tokens; the t ranks, if each has a partial gradient; both ends of a
        pipeline, if they hold one embedding.
    holders: int. How many ranks of the world hold each entry.
    """

    mesh: DeviceMesh | None
    boxes: tuple
    cuts: tuple = ()
    replicas: str = ""
    sums: tuple = (None, None, None)
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
            first, second, *_ = dist.get_process_group_ranks(self.mesh.get_group(name))
            found.append((dim, self.mesh[name].size(), second - first))
        return tuple(found)

    def cut(self, dim, name) -> "Place":
        """Cut this rank's entries along `dim` over a dimension of the mesh, as torch.chunk does."""
        ranks = self.mesh[name].size()
        if ranks == 1:
            return self
        # 7 rows on 2 ranks are 4 and 3. If rows run out, the last ranks have none.
        rows = self.boxes[-1][dim]
        first = self.mesh.get_local_rank(name) * -(-len(rows) // ranks)
        box = list(self.boxes[-1])
        box[dim] = rows[first : first + -(-len(rows) // ranks)]
        return self._replace(
            boxes=(*self.boxes, tuple(box)), cuts=(*self.cuts, (dim, name)),
            holders=self.holders // ranks,
        )  # fmt: skip

    def label(self, x):
        """Return this rank's entries x as the DTensor that torch's checkpoints and FSDP2 expect."""
        if not self.cuts:
            return x
        # A DTensor lists its cuts in the order of the mesh, and takes that for the order of cutting
        # too. _StridedShard tells it about cuts of the same dimension that were made before, though
        # their dimension of the mesh comes later. 8 rows, cut by t = 2 and then by d = 2:
        #
        #     t 0, d 0: rows 0 1    t 0, d 1: rows 2 3    t 1, d 0: rows 4 5    t 1, d 1: rows 6 7
        #
        # On the mesh (d, t), Shard(0) for d would mean that d = 0 has the rows 0-3.
        order = self.mesh.mesh_dim_names.index
        placements = {}
        for k, (dim, name) in enumerate(self.cuts):
            factor = 1
            for earlier_dim, earlier in self.cuts[:k]:
                if earlier_dim == dim and order(earlier) > order(name):
                    factor *= self.mesh[earlier].size()
            placements[name] = Shard(dim)
            if factor > 1:
                placements[name] = _StridedShard(dim, split_factor=factor)
        names = sorted(placements, key=order)
        stride = torch.empty(self.shape, device="meta").stride()
        whole = dict(shape=torch.Size(self.shape), stride=stride)
        placed = [placements[name] for name in names]
        return DTensor.from_local(x, self.mesh[tuple(names)], placed, run_check=False, **whole)

    @torch.no_grad()
    def gather(self, x, kept=0):
        """Undo all cuts of this rank's entries x but the first `kept`, on every rank. Collective.

        It takes no more memory than the result and a part. full_tensor() of torch has up to two
        copies of the whole in addition.
        """
        # 13 rows under t2, and then FSDP over d2:
        #
        #     t 0: 7 rows   d 0: 4  d 1: 3          gathered over d: 7 and 6 rows
        #     t 1: 6 rows   d 0: 3  d 1: 3          and then over t: 13
        for k in reversed(range(kept, len(self.cuts))):
            dim, name = self.cuts[k]
            x = gather_pieces(x, dim, len(self.boxes[k][dim]), self.mesh.get_group(name))
        return x


def gather_pieces(x, dim, size, group):
    """All-gather pieces along a dimension, which are equal but for the last ones. Collective."""
    piece = -(-size // dist.get_world_size(group))
    rows = x.movedim(dim, 0)
    if len(rows) < piece:
        padded = rows.new_zeros(piece, *rows.shape[1:])
        padded[: len(rows)] = rows
        rows = padded
    # torch 2.13 has a new name for the function that 2.11 calls all_gather_into_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    # COMM: an all-gather over the ranks of one cut. Pieces are padded to equal size, so that all
    # ranks send the same amount, also one whose piece is empty. Pinned by
    # tests/test_generator_plan.py::test_a_push_goes_tensor_by_tensor_from_any_layout_to_any.
    whole = rows.new_empty(piece * dist.get_world_size(group), *rows.shape[1:])
    gather(whole, rows.contiguous(), group=group)
    return whole[:size].movedim(0, dim)


TIED = "model.embed_tokens.weight"  # of a tied model, on the first stage and on the last


class Places(dict):
    """The places of a model's parameters, by name."""

    def __missing__(self, name):
        raise ValueError(f"expected a parameter that parallelize has seen, got {name}")


class Part:
    """Say where all parameters of this rank's stages of a model lie, and under which plan.

    grid: Grid. None for a model that `parallelize` has not seen: each rank has a copy of all of it.
    plan: Plan. The plan of the grid. Without a grid: data parallelism over all ranks.
    places: dict. Name of a parameter -> Place.
    device: torch.device. Where the model runs.
    mode, sequence, offload, compute_dtype: as given to `parallelize`.
    """

    def __init__(self, model, grid=None, *, mode="ddp", sequence=False, offload=False,
                 compute_dtype=None):  # fmt: skip
        self.grid = grid
        self.model = weakref.ref(model)  # which refers to this Part: memory is freed with the model
        self.split_tie = getattr(model, "split_tie", False)
        self.mode = mode
        self.sequence = sequence
        self.offload = offload
        self.compute_dtype = compute_dtype
        self.places = Places()
        if grid is not None:
            self.plan = grid.plan
            self.device = grid.device
            return

        if any(isinstance(p, DTensor) for p in model.parameters()):
            raise ValueError("expected a whole model or one of parallelize, got one with DTensors")
        # Without a process group there is one rank, and no other rank to sum with.
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.plan = Plan(dp=world)
        self.device = next(model.parameters()).device
        everyone = dist.group.WORLD if world > 1 else None
        for name, p in model.named_parameters():
            place = Place(None, (whole_box(p),), sums=(everyone, None, None), holders=world)
            self.places[name] = place

    def place(self, name, shape, shape_here) -> Place:
        """Return the place of a parameter, given the shapes of the whole and of what t and e left.

        Where the two shapes differ, the dimension was cut. FSDP comes last: it cuts what is left.
        """
        plan = self.plan
        is_expert = ".mlp.experts." in name
        mesh = self.grid.experts if is_expert else self.grid.dense
        place = Place(
            mesh, (tuple(map(range, shape)),), replicas="expert-dp" if is_expert else "fsdp",
            holders=plan.world // plan.pp,
        )  # fmt: skip
        for dim, (size, size_here) in enumerate(zip(shape, shape_here, strict=True)):
            if size != size_here:
                letters = "ep" if dim == 0 else "etp"
                place = place.cut(dim, letters if is_expert else "tp")

        # Which ranks have other terms of its gradient, see `Place.sums`.
        tokens = mesh.get_group("expert-dp") if is_expert else self.grid.data
        tensor = None
        if plan.tp > 1 and not is_expert and not place.cuts and self.is_partial(name):
            tensor = self.grid.dense.get_group("tp")
        ends = self.grid.ends if name == TIED and self.split_tie else None
        if ends is not None:
            place = place._replace(holders=2 * place.holders)
        if self.mode == "fsdp":
            place = place.cut(0, place.replicas)
            tokens = None  # FSDP2 sums over these ranks in the backward
        return place._replace(sums=(tokens, tensor, ends))

    def is_partial(self, name) -> bool:
        """Whether t ranks, which all hold a parameter whole, have partial gradients of it."""
        # The norms of q and k see the heads of this rank only.
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            return True
        # A router weighs the rows of this rank, if experts are whole. If their width is split, it
        # sees all rows, but only a partial sum of the outputs that it weighs.
        if ".mlp.gate." in name:
            return True
        # Up to the last norm, norms and biases see this rank's tokens, and without SP all tokens.
        # After it all t ranks compute the same: a critic's head has the whole gradient.
        return self.sequence and name.startswith("model.")

    @property
    def stages(self) -> list:
        """List this rank's stages of a pipeline, or the model itself."""
        model = self.model()
        return [model] if isinstance(model, nn.Module) else list(model.parts.values())

    @property
    def is_pipeline(self) -> bool:
        return self.plan.pp > 1

    @property
    def is_fsdp(self) -> bool:
        return self.mode == "fsdp"

    def reshard(self) -> None:
        """Drop what FSDP gathered: a forward without a backward leaves the root's weights whole."""
        if self.is_fsdp:
            for stage in self.stages:
                stage.reshard()

    def named_modules(self):
        """Yield (name, module) of all stages, under the names of the whole model."""
        for stage in self.stages:
            yield from stage.named_modules()


def whole_box(x) -> tuple:
    """Return the box of a tensor that is whole on this rank."""
    return tuple(map(range, x.shape))


def part_of(model) -> Part:
    """Return the Part that `parallelize` made of a model; a whole model is the part of one rank."""
    return getattr(model, "part", None) or Part(model)


def plan_of(model) -> Plan:
    """Return the plan of a model, or of an object in its place. Default: the plan of one rank."""
    part = getattr(model, "part", None)
    return Plan() if part is None else part.plan


def local(tensor):
    """Return the plain tensor on this rank. That of a DTensor shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor):
    """Return the whole of a tensor that may be sharded. Collective if it is a DTensor."""
    # COMM: all-gathers over the ranks of each cut, by torch. All of them must call it. Pinned by
    # tests/test_parallel.py::test_every_plan_is_one_process.
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def join_name(prefix, name) -> str:
    """Return the full name of a module's own parameter or buffer."""
    return f"{prefix}.{name}" if prefix else name


# 14. parallelize ---------------------------------------------------------------------------------
#
# The public call, what it refuses, and the steps that it takes: t and e, activation checkpointing,
# the compiler, FSDP2. (Models that only generate are split in section 19.)

AC = "none", "full", "layers", "op"
MODES = "ddp", "fsdp", "zero1"


def parallelize(
    model, plan, *, device_mesh, attention=None, mode="ddp", sequence=True, schedule="1f1b",
    ac="none", compile=False, offload=False, compute_dtype=None,
):  # fmt: skip
    """Turn a whole model, equal on all ranks, into this rank's part of a plan, and return it.

    model: a `models.Transformer`, or a module with the names in NEEDED. On the device where it will
        run, or on the meta device, for `materialise`. It is changed.
    plan: Plan. Its world is the number of ranks.
    device_mesh: Grid. `Grid.make(plan)`.
    attention: the callable of context parallelism, which the layers call. Needed for c > 1.
    mode: "ddp" (whole copies), "zero1" (copies, with `LocalOptimizer(zero=True)`) or "fsdp" (FSDP2;
        HSDP if the grid replicates). Section 8 compares them.
    sequence: bool. Sequence parallelism: distribute tokens over the t ranks where no matrix is cut.
        t must divide the number of tokens.
    schedule: str. A key of SCHEDULES, for p > 1.
    ac: str. What the backward computes again: "none", "full", "layers" or "op", see
        `checkpoint_layers`.
    compile: bool. torch.compile each layer by itself, for any length.
    offload: bool. Keep the shards of fsdp, their gradients and the optimizer on the CPU.
    compute_dtype: torch.dtype. Mixed precision: products in this dtype, everything else in the
        dtype of the weights. Section 17 has the details.

    Returns the model, or with p > 1 a `Pipeline`. Both have a `part`. ValueError on every rank,
    before the first message and before the model is changed, if options do not fit together.

    `PackedBatches` runs the result. If you write your own loop: data-parallel ranks get different
    sequences, tensor- and pipeline-parallel ranks the same ones, and context-parallel ranks
    different tokens of the same ones. Each divides its loss by the global count, and tensor ranks
    all compute the same loss. Then call reduce_gradients, clip_grad_norm and the optimizer's step.
    """
    options = dict(mode=mode, sequence=sequence, offload=offload, compute_dtype=compute_dtype)
    require_possible(
        model, plan, device_mesh, attention=attention, schedule=schedule, ac=ac, **options)
    if attention is not None:
        model.attention = attention
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if plan.pp > 1:
        model = Pipeline(model, device_mesh, schedule, compute_dtype)
    model.part = Part(model, device_mesh, **options)
    for stage in model.part.stages:
        stage.part = model.part

    # The order matters. Cut plain weights by t and e. Then wrap the layers: what is computed again
    # includes the messages inside a layer. FSDP is last, because it cuts what the others have left.
    split_weights(model.part, shapes)
    for stage in model.part.stages:
        if ac != "none":
            checkpoint_layers(stage.model.layers, ac)
        if compile:
            for layer in stage.model.layers:
                layer.compile(dynamic=True)
        if mode == "fsdp":
            apply_fsdp(stage, model.part)
        if plan.cp > 1 and plan.tp > 1 and sequence and plan.pp == 1:
            check_lengths_first(stage, device_mesh)
    return model


def require_possible(
    model, plan, grid, *, attention, mode, sequence, schedule, ac, offload, compute_dtype
):
    """Raise a ValueError if options do not fit together, on every rank.

    Takes the parameters of `parallelize`. No message was sent yet, and the model is unchanged, so a
    caller may correct the call and repeat it.
    """
    for name, value, known in (
        ("mode", mode, MODES), ("schedule", schedule, SCHEDULES), ("ac", ac, AC)
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    if compute_dtype is not None:
        require_lower_precision(compute_dtype, model)
    require_whole_model(model, plan, grid)
    config = model.config
    plan.require_fits(world=dist.get_world_size(), config=config)

    # Pairs of a condition and its text, for options that need or exclude one another.
    t = plan.tp
    p = plan.pp
    fsdp_on = mode == "fsdp"
    stages = p * SCHEDULES[schedule][1]
    vocab = config.vocab_size if t > 1 else 0
    uneven = vocab % t > 0 and plan.dp * plan.cp > 2
    named = list(model.named_parameters(remove_duplicate=False))
    same_rows = bool(config.sparse_layers) and t > 1 and not sequence and plan.etp == 1
    for refused, text in (
        (p == 1 and schedule != "1f1b",
         f"schedule={schedule!r} needs a pipeline, but plan {plan} has no p"),
        (p > 1 and stages > config.num_hidden_layers,
         f"{schedule} cuts {stages} stages, but the model has {config.num_hidden_layers} layers"),
        (grid.dense["replicate"].size() > 1 and not fsdp_on,
         f'a grid that replicates shards needs mode="fsdp", got mode={mode!r}'),
        (uneven and mode != "ddp",
         f"t = {t} cuts {vocab} rows of the vocabulary unevenly, and torch cannot save "
         f'such parts sharded again over d c > 2; pad the vocabulary, or use mode="ddp"'),
        (offload and not fsdp_on,
         f'offload=True moves shards: it needs mode="fsdp", got mode={mode!r}'),
        (plan.cp > 1 and attention is None,
         f"plan {plan} splits sequences: give attention=, e.g. a ring over its c ranks"),
        (schedule == "zbv" and ac == "op",
         "zbv runs backward twice through a stage, for inputs and for weights, and torch's "
         'selective checkpoint allows one; use ac="full" or another schedule'),
        (fsdp_on and ac == "op" and config.sparse_layers and plan.edp == 1,
         f"under plan {plan} each expert is whole on one rank, and torch's selective checkpoint "
         f'does not follow FSDP2 there; use ac="full" or mode="zero1"'),
        (schedule == "zbv" and fsdp_on,
         "zbv computes a stage's weight gradients apart from its backward, which FSDP2 does not "
         'follow; use schedule="1f1b" or mode="zero1"'),
        (t > 1 and len(named) > len(list(model.named_parameters())),
         f"plan {plan}: one parameter with two names cannot be cut; set tie_word_embeddings"),
        (same_rows,
         f"plan {plan}: without sequence=True every tensor rank would send the same tokens to "
         f"the experts; use ffn's t = {t}"),
    ):  # fmt: skip
        if refused:
            raise ValueError(text)


# What the letters of a plan need of a model; "" is every plan. `layer.` is each layer, `dense.` and
# `sparse.` are the layers without and with experts. Needed too: hidden(tokens, positions=,
# attention=), logprobs(hidden, targets, temperature=), and for e experts(rows, counts).
NEEDED = {
    "": "hidden logprobs model.layers config.num_hidden_layers config.num_attention_heads "
        "config.num_key_value_heads config.intermediate_size config.sparse_layers",
    "c": "attention",
    "t": "lm_head_shard head_weight model.embed_tokens model.norm lm_head config.vocab_size "
         "config.tie_word_embeddings layer.self_attn.q_proj.weight layer.self_attn.k_proj.weight "
         "layer.self_attn.v_proj.weight layer.self_attn.o_proj.weight dense.mlp.gate_proj.weight "
         "dense.mlp.up_proj.weight dense.mlp.down_proj.weight sparse.mlp.gate.weight",
    "e": "config.num_experts config.moe_intermediate_size sparse.mlp.experts.gate_proj "
         "sparse.mlp.experts.up_proj sparse.mlp.experts.down_proj",
    "p": "attention require_tokens model.embed_tokens model.norm lm_head config.hidden_size "
         "config.tie_word_embeddings",
}  # fmt: skip


def require_whole_model(model, plan, grid):
    """Raise a ValueError unless a model is whole, has all NEEDED names, and the grid is the plan's.

    One message lists all names that are absent. Of a layer, the first one that lacks a name.
    """
    # The degrees decide. The name of an engine may differ.
    if plan.shapes != grid.plan.shapes:
        raise ValueError(
            f"expected the grid of plan {plan}, got that of plan {grid.plan}; use Grid.make(plan)")
    if hasattr(model, "part") or isinstance(model, fsdp.FSDPModule):
        raise ValueError(
            "expected a whole model, got one that is split or sharded already; split it once")

    degrees = {"": 2, "c": plan.cp, "t": plan.tp, "e": plan.ep * plan.etp, "p": plan.pp}
    layers = model.model.layers if has(model, "model.layers") else []
    sparse = model.config.sparse_layers if has(model, "config.sparse_layers") else ()
    tied = has(model, "config.tie_word_embeddings") and model.config.tie_word_embeddings
    absent = {}  # an ordered set: two letters may need the same name
    for path in " ".join(NEEDED[letter] for letter, n in degrees.items() if n > 1).split():
        kind, _, rest = path.partition(".")
        if kind in ("layer", "dense", "sparse"):
            for n, layer in enumerate(layers):
                if kind in ("layer", "sparse" if n in sparse else "dense") and not has(layer, rest):
                    absent[f"model.layers[{n}].{rest}"] = True
                    break
        elif not has(model, path) and not (tied and path == "lm_head"):
            absent[path] = True
    if has(model, "hidden"):
        takes = inspect.signature(model.hidden).parameters
        absent |= {f"hidden(.., {x}=)": True for x in ("positions", "attention") if x not in takes}
    if absent:
        raise ValueError(
            f"parallelize needs for plan {plan} what models.Transformer has; "
            f"{type(model).__name__} has no .{', no .'.join(absent)}")  # fmt: skip


def has(owner, path) -> bool:
    """Return whether owner has an attribute `a.b.c` that is not None."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
        if owner is None:
            return False
    return True


def require_lower_precision(dtype, model):
    """Raise a ValueError unless products in `dtype` make mixed precision of the model's weights."""
    # Only a coarser dtype saves anything: the masters are then worth their memory.
    of_weights = next(model.parameters()).dtype
    lower = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    lower = lower and torch.finfo(dtype).eps > torch.finfo(of_weights).eps
    if not lower:
        raise ValueError(
            f"compute_dtype: expected a coarser dtype than the weights' {of_weights}, got {dtype}; "
            f"without it products are in {of_weights} too")  # fmt: skip
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ValueError(
            f"compute_dtype needs Tensor.grad_dtype of torch 2.10 and later; this is torch "
            f"{torch.__version__}")  # fmt: skip


def require_divisible(length, t):
    """Raise a ValueError for sequences whose tokens t ranks cannot share evenly."""
    if length % t:
        raise ValueError(
            f"{length} tokens a sequence must divide by t = {t} where tokens are shared out; "
            f"pad to {-(-length // t) * t}")  # fmt: skip


def require_even_lengths(grid, lengths) -> None:
    """Raise a ValueError if t does not divide these lengths, or the lengths on another rank of c.

    lengths: list of int. Of the sequences of one forward, or of all micro-batches of a step.
    """
    # One length represents all of them: the first that t does not divide, if there is one.
    t, c = grid.plan.tp, grid.plan.cp
    length_here = [*(length for length in lengths if length % t), *lengths, 0][0]
    if c == 1:
        require_divisible(length_here, t)
        return

    # 27 tokens in a zigzag over 2 ranks are 14 and 13: under t = 2 only one rank would refuse its
    # part, and the other would wait for its keys until the timeout.
    # COMM: an all-gather of one number over the ranks that share the sequence, once a forward, so
    # that all of them refuse, with the same text. Pinned by
    # tests/test_parallel_faults.py::test_an_odd_share_of_a_sequence_is_refused_by_every_rank.
    parts = [torch.zeros(1, dtype=torch.int64, device=grid.device) for _ in range(c)]
    dist.all_gather(parts, torch.tensor([length_here], device=grid.device), group=grid.context)
    found = [int(part) for part in parts]
    if any(length % t for length in found):
        raise ValueError(
            f"the {c} ranks that share a sequence have {', '.join(map(str, found))} tokens of it; "
            f"each must divide by t = {t} where tokens are shared out; pad the sequence, for a "
            f"zigzag to a multiple of 2 c t = {2 * c * t}")  # fmt: skip


def check_lengths_first(model, grid):
    """Let `hidden` first compare the lengths of the ranks that share a sequence."""
    # A pipeline does it once a step, before its first micro-batch.
    run = model.hidden

    def hidden(tokens_BS, /, **options):
        require_even_lengths(grid, [tokens_BS.shape[1]])
        return run(tokens_BS, **options)

    model.hidden = hidden


# Tensor and expert parallelism: the core's layers, whose parameters become DTensors -------------


def split_weights(part, shapes) -> None:
    """Cut the weights of this rank's stages by t and e, and write down all places.

    shapes: dict. Name of a parameter -> shape of the whole.
    """
    plan, grid = part.plan, part.grid
    if plan.tp > 1:
        group = grid.dense.get_group("tp")
        embeddings = {}  # a rank with the first and the last stage has one embedding in both
        for stage in part.stages:
            for layer in stage.model.layers:
                shard_layer(layer, group, part.sequence)
                # The core leaves experts whole, and each t rank sends its own tokens to them. If
                # their width is split, f is applied before the router, and g after the experts.
                if hasattr(layer.mlp, "experts") and plan.etp > 1:
                    enter_and_leave(layer.mlp, group, part.sequence)
            shard_ends(stage, part, embeddings)
    for stage in part.stages:
        if plan.etp > 1:
            for experts in experts_of(stage):
                shard_width(experts, grid.experts.get_group("etp"))
        if plan.ep > 1:
            expert_parallel(stage, grid.experts.get_group("ep"))

    for stage in part.stages:
        for name, p in stage.named_parameters():
            if name not in part.places:
                part.places[name] = part.place(name, shapes[name], p.shape)
        label_parameters(stage, part)


def enter_and_leave(module, group, sequence):
    """Apply f to the first argument of a module, and g to its result."""
    module.register_forward_pre_hook(
        lambda _, args: (copy_to_tp_region(args[0], group, sequence), *args[1:])
    )
    module.register_forward_hook(lambda _, args, y: reduce_from_tp_region(y, group, sequence))


def shard_ends(stage, part, embeddings):
    """Split the vocabulary, and gather the last states, where a stage has the ends of a model."""
    group = part.grid.dense.get_group("tp")
    t = dist.get_world_size(group)
    inner = stage.model
    if hasattr(inner, "embed_tokens"):
        whole = inner.embed_tokens
        if id(whole) not in embeddings:
            embeddings[id(whole)] = VocabParallelEmbedding(whole, group, part.sequence)
        inner.embed_tokens = embeddings[id(whole)]
        if part.sequence:
            inner.embed_tokens.register_forward_pre_hook(
                lambda _, args: require_divisible(args[0].shape[1], t)
            )
    if hasattr(stage, "lm_head"):
        stage.lm_head = ColumnParallelLinear(stage.lm_head, group)

    # `logprobs` and `logits` of the model get their weight here: each rank has its rows of the
    # head, and `token_logprobs` sums over the group the numbers that the softmax needs of them.
    first = dist.get_rank(group) * -(-stage.config.vocab_size // t)

    def lm_head_shard():
        weight_vM = stage.head_weight.to_local(grad_placements=[Shard(0)])
        return weight_vM, dict(group=group, vocab_start=first)

    stage.lm_head_shard = lm_head_shard
    if part.sequence and not isinstance(inner.norm, torch.nn.Identity):
        # All t ranks compute the same from the gathered states: see `tensor_parallel`.
        inner.norm.register_forward_hook(
            lambda _, args, x: Communicate.apply(x, group, all_gather_tokens, own_tokens)
        )


def shard_width(experts, group):
    """Keep this rank's part of each expert's inner width: rows of gate and up, columns of down."""
    # A weight of a layer's experts is (E, inner, M), except for down_proj, which is (E, M, inner).
    for name, p in list(experts.named_parameters()):
        dim = 2 if name == "down_proj" else 1
        setattr(experts, name, parameter_shard(p, group, dim))


def label_parameters(stage, part) -> None:
    """Turn each parameter that was cut into a DTensor, which a running module sees as plain."""
    for prefix, module in stage.named_modules():
        cut = {}
        for name, p in list(module.named_parameters(recurse=False)):
            place = part.places.get(join_name(prefix, name))
            if place is None:  # a second name of a parameter, such as a tied head's
                continue
            cuts = tuple(cut for cut in place.cuts if cut[1] != place.replicas)  # FSDP comes later
            if cuts and not isinstance(p, DTensor):
                labeled = place._replace(cuts=cuts).label(p.detach())
                setattr(module, name, torch.nn.Parameter(labeled, requires_grad=p.requires_grad))
                cut[name] = labeled.placements
        if cut:
            show_plain(module, cut)


def show_plain(module, placements):
    """Let a module see its DTensor parameters as the plain tensors of this rank while it runs.

    placements: dict. Name of the parameter -> its placements.
    """
    # Before the module runs, an entry in its __dict__ shadows the parameter: Python looks there
    # first, and only then does nn.Module look into _parameters. So `self.weight` is for that time
    # the plain tensor of this rank, as a function of the DTensor, into whose .grad the backward
    # then goes. After the module has run, or failed, the entry is taken out again.
    def show(module, args):
        for name, placement in placements.items():
            p = module._parameters[name]
            module.__dict__[name] = p.to_local(grad_placements=placement)

    def cover(module, args, output):
        for name in placements:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(cover, always_call=True)


def experts_of(model) -> list:
    """Return the modules that hold all experts of a layer."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


# FSDP2 ------------------------------------------------------------------------------------------


def apply_fsdp(stage, part) -> None:
    """Apply FSDP2 to every layer and the rest, with gradients summed over ranks, not averaged."""
    pinned = torch.cuda.is_available()
    policy = fsdp.CPUOffloadPolicy(pin_memory=pinned) if part.offload else fsdp.OffloadPolicy()

    # A layer is a unit: its weights are gathered just before it runs and dropped after. Experts are
    # a unit of their own over fewer ranks, as other ranks hold copies of them than of the rest. The
    # inner units come first: fully_shard takes what is in a module and in no unit yet.
    dense = part.grid.dense
    mesh = dense["replicate", "fsdp"] if dense["replicate"].size() > 1 else dense["fsdp"]
    units = [(experts, part.grid.experts["expert-dp"]) for experts in experts_of(stage)]
    units += [(module, mesh) for module in (*stage.model.layers, stage)]
    precision = fsdp_precision(stage, part.compute_dtype)
    for module, ranks in units:
        fsdp.fully_shard(module, mesh=ranks, offload_policy=policy, mp_policy=precision)
        # NUMERICS: FSDP2 averages by default; the losses here are parts of a sum. gloo has no
        # pre-multiplied sum, hence the second call.
        # Pinned by tests/test_ranks.py::test_ranks_and_sharding_give_the_one_process_run.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    # The root's own weights (embedding, norm, head) are gathered when one calls the model's
    # `forward`. Training here calls `hidden`, so that must gather them too.
    fsdp.register_fsdp_forward_method(stage, "hidden")


def fsdp_precision(model, compute_dtype):
    """Return FSDP2's policy: gather in compute_dtype, add gradients in the dtype of the weights."""
    if compute_dtype is None:
        return fsdp.MixedPrecisionPolicy()
    # NUMERICS: FSDP2 would cast every floating tensor that enters a layer, also the cosines and
    # sines of the positions, which bf16 gets wrong from position 257 on. The embedding gives states
    # of the right dtype by itself. Pinned by
    # tests/test_precision.py::test_fsdp_computes_as_ddp_does.
    return fsdp.MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=next(model.parameters()).dtype,
        cast_forward_inputs=False,
    )  # fmt: skip


@torch.no_grad()
def materialise(model) -> None:
    """Allocate this rank's part of a model that was on the meta device when it was split.

    Its content is undefined afterwards. The largest tensor that is ever made is a part's.
    """
    part = part_of(model)
    for stage in part.stages:
        stage.to_empty(device="cpu" if part.offload else part.device)


# Activations ------------------------------------------------------------------------------------

# "op" keeps products, and what costs a message. Norms, activations, rotations are computed again.
KEPT = {"mm", "bmm", "addmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention"}  # fmt: skip


def checkpoint_layers(layers, ac) -> None:
    """Compute layers again in the backward instead of keeping their activations.

    ac: "full": of every layer, only the input is kept. "layers": the same for every second layer,
        and the others keep everything. "op": products and attention are kept (KEPT), the rest is
        computed again. No parameter's name changes.
    """

    def policy(context, op, *args, **options):
        if op._overloadpacket.__name__ in KEPT:
            return ckpt.CheckpointPolicy.MUST_SAVE
        return ckpt.CheckpointPolicy.PREFER_RECOMPUTE

    options = dict(use_reentrant=False)
    if ac == "op":
        options["context_fn"] = functools.partial(ckpt.create_selective_checkpoint_contexts, policy)

    # The layer object keeps its place and its names; only its forward is replaced. run=run binds
    # each layer's own forward.
    chosen = layers[::2] if ac == "layers" else layers
    for layer in chosen:
        run = layer.forward
        layer.forward = lambda *args, run=run: ckpt.checkpoint(run, *args, **options)


# 15. Pipelines by torch's schedules --------------------------------------------------------------
#
# The core runs 1F1B by hand. Here torch.distributed.pipelining runs it, and two schedules that
# idle less, whose ranks have two stages each. Skip it unless you use p.


class Micro(NamedTuple):
    """A micro-batch: (B, S) token ids, their positions, and the attention of their documents."""

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: object = None  # None: the model's
    on_routing: object = None  # a callback of its sparse layers; None: they attach no loss

    def through(self, stage, x):
        """Run a model, or a stage of one, on x: the tokens, or the states of the stage before."""
        options = dict(positions=self.positions, attention=self.attention)
        # Only a model with experts needs to know what a routing is.
        if self.on_routing is not None:
            options["on_routing"] = self.on_routing
        return stage.hidden(x, **options)


SCHEDULES = {"1f1b": (pipelining.Schedule1F1B, 1),  # and how many stages a rank has
             "interleaved1f1b": (pipelining.ScheduleInterleaved1F1B, 2),
             "zbv": (pipelining.ScheduleZBVZeroBubble, 2)}  # fmt: skip


def stage_part(model, stage, stages):
    """Return a copy of one stage of a whole model: its layers under their own names, and the ends.

    Layers are distributed evenly, and the first stages get one more. A tied embedding is in the
    first stage and, as the head, in the last.
    """
    first = stage == 0
    last = stage == stages - 1

    # 5 layers in 2 stages are [0 1 2] and [3 4]. Layers keep their numbers, so that a parameter has
    # one name in the model, in its stage and in a checkpoint of any plan.
    own_layers = np.array_split(np.arange(len(model.model.layers)), stages)[stage]
    others = [layer for n, layer in enumerate(model.model.layers) if n not in own_layers]
    if not last:
        others += [model.model.norm, getattr(model, "lm_head", None), getattr(model, "score", None)]
    if not first and not (last and model.config.tie_word_embeddings):
        others.append(model.model.embed_tokens)

    # deepcopy looks up by id(object) what it has copied already. Entries made beforehand tell it to
    # put None where the other stages' modules are, so that they are never copied, and to share
    # attention, which may hold a process group and cannot be copied.
    copied = {id(module): None for module in others}
    copied[id(model.attention)] = model.attention
    part = copy.deepcopy(model, copied)
    for module in (part, part.model, part.model.layers):
        module._modules = {name: m for name, m in module._modules.items() if m is not None}

    # A stage that others follow passes its states on as they are, without the last norm.
    if not last:
        part.model.norm = torch.nn.Identity()
    return part


class _Stage(torch.nn.Module):
    """The module that torch's schedule runs: (index of a micro-batch, or states) -> states.

    A schedule hands tensors from stage to stage and nothing else. So each stage looks up positions
    and attention of a micro-batch itself, by the index that all stages are given.
    """

    def __init__(self, stage, micros):
        super().__init__()
        self.stage = stage
        self.micros = micros

    def forward(self, x, index):
        micro = self.micros[int(index)]
        return micro.through(self.stage, x if x.is_floating_point() else micro.tokens)


class Pipeline:
    """This rank's stages of a model, run by a schedule of torch.distributed.pipelining.

    1f1b gives a rank one stage, the others two. Interleaved, of 4 stages on 2 ranks, rank 0 has 0
    and 2 (a and c below), so that a rank waits for half a rank's layers only:

        rank 0   F0a F1a F0c F1c ..
        rank 1   ... F0b F1b F0d ..

    zbv: rank r has stages r and 2 p - 1 - r, a V, and a backward's weights are done apart from its
    inputs. A Pipeline has the parameters of its stages under the names of the whole model.
    """

    def __init__(self, model, grid, schedule, compute_dtype=None):
        p = grid.plan.pp
        rank = grid.dense["pp"].get_local_rank()
        self.dtype_after_norm = compute_dtype or next(model.parameters()).dtype  # last stage's
        dtype = getattr(model, "residual_dtype", None) or self.dtype_after_norm
        self.like = dict(dtype=dtype, device=grid.device)  # the states between stages
        self.grid = grid
        self.config = model.config
        self.schedule, per_rank = SCHEDULES[schedule]
        self.group = grid.dense.get_group("pp")

        # `_Stage` and the loss look these up in the current step. `forward_backward` fills them.
        self.micros = []
        self.loss_fn = None
        self.run = None  # torch's schedule for micro-batches of `run_for`: (shape, number)
        self.run_for = None

        # Which rank has each stage. 4 stages on 2 ranks: 0 1 0 1 interleaved, 0 1 1 0 as a V.
        self.stages = p * per_rank
        self.rank_of = [*range(p)] * per_rank
        if schedule == "zbv":
            self.rank_of = [*range(p), *reversed(range(p))]
        own = [stage for stage, holder in enumerate(self.rank_of) if holder == rank]
        self.parts = {stage: stage_part(model, stage, self.stages) for stage in own}

        # A tied embedding is in the first and in the last stage. Under zbv one rank has both, and
        # they share it; else two ranks have it, and reduce_gradients sums over them (`split_tie`).
        tied = model.config.tie_word_embeddings
        self.split_tie = tied and schedule != "zbv"
        if tied and schedule == "zbv" and rank == 0:
            self.parts[self.stages - 1].model.embed_tokens = self.parts[0].model.embed_tokens

    @property
    def last(self):
        """The stage with the head. None on ranks that do not have it."""
        return self.parts.get(self.stages - 1)

    def named_parameters(self):
        named = (pair for part in self.parts.values() for pair in part.named_parameters())
        return iter(dict(named).items())

    def parameters(self):
        return (p for _, p in self.named_parameters())

    def named_buffers(self):
        named = (pair for part in self.parts.values() for pair in part.named_buffers())
        return iter(dict(named).items())

    def forward_backward(self, micros, loss_fn) -> list:
        """Add the gradient of the sum of loss_fn(k, hidden of micro-batch k) to .grad.

        micros: list of Micro, of the same number and shape on all ranks of the plan, each padded to
            the longest.
        loss_fn: called on ranks that have `last`, where `last.logprobs` is.

        Returns the losses where `last` is, else []. Collective.
        """
        shape = tuple(micros[0].tokens.shape)
        n = len(micros)
        p = self.grid.plan.pp
        if any(tuple(micro.tokens.shape) != shape for micro in micros):
            raise ValueError("micro-batches of a step must have one shape; pad them to the longest")
        self._require_tokens(micros)
        self.grid.plan.require_fits(microbatches=n)
        if self.stages > p and n % p:
            raise ValueError(f"{n} microbatches must divide by the {p} ranks of the pipeline")

        # torch makes a schedule for one shape, because its stages keep buffers of that shape. Only
        # the latest schedule is kept, because each padded length brings new buffers. A length that
        # changes in every step costs a new schedule each time, some milliseconds. The stages hold
        # on to the list `micros`, so it is filled and not replaced.
        if self.run_for != (shape, n):
            self.run_for, self.run = (shape, n), None  # the old buffers go before the new ones come
            self.run = self._schedule_of(shape, n)
        self.micros[:] = micros
        self.loss_fn = loss_fn

        # Only the first stage is given an input and only the last one targets. Both are indices of
        # micro-batches: `_Stage` and `loss_fn` look up the rest.
        # COMM: each stage sends states to the next and their gradients back. torch's schedule
        # orders the sends and receives of neighbors so that they match. Pinned by
        # tests/test_parallel.py::test_collectives_are_those_of_the_table.
        losses = []
        index = torch.arange(n, device=self.like["device"])
        inputs = (index,) if 0 in self.parts else ()
        options = dict(target=index, losses=losses) if self.last is not None else {}
        self.run.step(*inputs, index=index, return_outputs=False, **options)
        return [loss.detach() for loss in losses]

    def _schedule_of(self, shape, n):
        """Return torch's schedule for n micro-batches of a shape."""
        # Examples of what a stage takes and gives: under sequence parallelism some of the tokens,
        # but the last stage has gathered them. scale_grads=False: torch would average the losses.
        states = torch.empty(self._states_shape(shape), **self.like, requires_grad=True)
        after_norm = self.like | dict(dtype=self.dtype_after_norm)
        whole = torch.empty(*shape, states.shape[2], **after_norm, requires_grad=True)
        index = states.new_zeros(1, dtype=torch.int64)
        stages = []
        for number, part in self.parts.items():
            stages.append(pipelining.PipelineStage(
                _Stage(part, self.micros), number, self.stages, states.device,
                input_args=index if number == 0 else states,
                output_args=whole if part is self.last else states, group=self.group,
            ))  # fmt: skip

        def loss_of(hidden, index):
            return self.loss_fn(int(index), hidden)

        given = stages if self.stages > self.grid.plan.pp else stages[0]
        return self.schedule(given, n, loss_fn=loss_of, scale_grads=False)

    @torch.no_grad()
    def forward(self, micros) -> list | None:
        """Return `hidden` of each micro-batch where `last` is, None elsewhere. Collective."""
        # DEVIATES: torch's schedules cannot run zbv forward only (2.13), so these few lines do, for
        # all of them. COMM: a micro-batch's stages run one after another, and all ranks take the
        # micro-batches in one order, so each send meets the receive that waits for it. Pinned by
        # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
        self._require_tokens(micros)
        at = [dist.get_global_rank(self.group, rank) for rank in self.rank_of]
        out = []
        for micro in micros:
            x = micro.tokens
            for stage, part in sorted(self.parts.items()):
                # Where one rank has two neighboring stages, as at the turn of a V, x stays.
                if stage and at[stage - 1] != dist.get_rank():
                    x = torch.empty(*self._states_shape(micro.tokens.shape), **self.like)
                    dist.recv(x, at[stage - 1], group=self.group)
                x = micro.through(part, x)
                if part is not self.last and at[stage + 1] != dist.get_rank():
                    dist.send(x.contiguous(), at[stage + 1], group=self.group)
            out.append(x)
        return out if self.last is not None else None

    def _require_tokens(self, micros):
        """Raise a ValueError on every stage for tokens that only the first one would find wrong."""
        part = next(iter(self.parts.values()))
        for micro in micros:
            part.require_tokens(micro.tokens)
        if self.part.sequence and self.grid.plan.tp > 1:
            require_even_lengths(self.grid, [micro.tokens.shape[1] for micro in micros])

    def _states_shape(self, shape):
        """Return the shape of the states that one stage sends to the next, for tokens (B, S)."""
        t = self.grid.plan.tp if self.part.sequence else 1
        return shape[0], shape[1] // t, self.config.hidden_size


# 16. Gradients -----------------------------------------------------------------------------------
#
# Between the backward and the optimizer's step: sum, look for what is not finite, clip. The core
# does the same with one message for each parameter.


def reduce_gradients(model) -> int:
    """Sum each parameter's gradient over ranks, in place: (1). Collective, once before each step.

    A rank without a gradient adds zeros. FSDP2 has summed over data ranks in the backward already.
    Returns, for `name_suspects`, which of this rank's gradients was not finite before any sum: the
    first in the order of the backward, 0 for the model's last parameter. -1 if all are finite.
    """
    part = part_of(model)
    part.reshard()  # otherwise the gradients of the root's shards are out of sight

    # Go from the last parameter to the first, as the backward does. A rank that had no tokens has
    # no gradients. It must send zeros, or the others would wait for it.
    gradients = {}
    named = list(model.named_parameters())[::-1]
    for name, p in named:
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
            gradients[name] = local(p.grad)
    suspect = first_non_finite([gradients.get(name) for name, _ in named])

    # NUMERICS: copies of a parameter must get the same bits. An all-reduce gives its own ranks the
    # same bits, but two groups (0 + 2 and 1 + 3) may add in different orders, because the order
    # depends on the place in the message. So the sum over t comes last. A copy that has no such sum
    # (a norm without SP) must be at the same place in the messages of both groups: it shares none
    # with cut parameters, whose parts may differ in length and would shift it. Pinned by
    # tests/test_parallel_faults.py::test_replicas_hold_the_same_bits_after_three_steps.
    #
    # COMM: the places decide what is sent, and they are the same on all ranks of a group, whatever
    # gradients a rank has. Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
    for kind in range(3):
        by_message = {}
        for name, gradient in gradients.items():
            group = part.places[name].sums[kind]
            if group is not None:
                key = group, bool(part.places[name].cuts)
                by_message.setdefault(key, []).append(gradient)
        for (group, _), together in by_message.items():
            sum_in_messages(together, group)  # (1)
    return suspect


MESSAGE = 256 << 20  # bytes


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
    """Sum gradients over a group, in place, several in a message, because a message costs time.

    A message of several gradients has a buffer of its size. One of a single gradient has none.
    """
    if dist.get_world_size(group) == 1:
        return
    for together in messages_of(gradients):
        is_alone = len(together) == 1 and together[0].is_contiguous()
        flat = together[0] if is_alone else torch.cat([g.reshape(-1) for g in together])
        # COMM: an all-reduce over the group. All its ranks have the same gradients in the same
        # order. Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
        dist.all_reduce(flat, group=group)
        if not is_alone:
            sizes = [g.numel() for g in together]
            for g, sum_of_g in zip(together, flat.split(sizes), strict=True):
                g.copy_(sum_of_g.view_as(g))


def first_non_finite(gradients) -> int:
    """Return the index of the first gradient with an entry that is not finite, or -1.

    gradients: list of tensors, or None where there is nothing to look at.
    """
    # One transfer to the host for all of them: on a GPU each `if` on a tensor waits for the device.
    indices = [n for n, g in enumerate(gradients) if g is not None]
    finite = [gradients[n].isfinite().all() for n in indices]
    finite = torch.stack(finite).tolist() if finite else []
    return next((n for n, is_finite in zip(indices, finite) if not is_finite), -1)


def name_suspects(model, suspect: int) -> str:
    """Say which rank had which non-finite gradient first, from each rank's `reduce_gradients`."""
    names = [name for name, _ in model.named_parameters()][::-1]
    found = [None] * dist.get_world_size()
    # COMM: an all-gather of one name over all ranks, which all skip the same step. Pinned by
    # tests/test_faults.py::test_a_nan_in_one_ranks_batch_is_skipped_by_all_and_named.
    dist.all_gather_object(found, names[suspect] if suspect >= 0 else None)
    named = [f"{name} on rank {rank}" for rank, name in enumerate(found) if name]
    return ", ".join(named) or "no single gradient: their norm overflowed"


def clip_grad_norm(model, max_norm: float):
    """Scale the summed gradients of all ranks to a norm of at most max_norm, in place.

    Returns the norm before scaling, a 0-d float64 tensor, the same on every rank. If it is not
    finite, no gradient is changed, and the caller must skip the step. Collective if some rank has
    only a part of some parameter.
    """
    part = part_of(model)
    # COMM: an all-reduce of one number over all ranks, because other stages and shards hold other
    # entries. Where every rank has every entry, as in ddp, each rank finds the norm by itself.
    # Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
    is_spread = any(place.holders < part.plan.world for place in part.places.values())
    gradients = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    squares = []
    for name, gradient in gradients.items():
        # A float32 sum of squares over 100,000 entries of an embedding is off in the fifth digit.
        norm_of_p = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        # NUMERICS: an entry that k ranks hold counts 1 / k on each, so that one sum over all ranks
        # counts it once. Pinned by tests/test_parallel.py::test_every_plan_is_one_process.
        squares.append(norm_of_p.square() / (part.places[name].holders if is_spread else 1))
    sum_of_squares = torch.stack(squares).sum()
    if is_spread:
        dist.all_reduce(sum_of_squares)
    norm = sum_of_squares.sqrt()  # (6)

    # DEVIATES: torch divides by norm + 1e-6, and so does the core. This divides by the norm.
    # Pinned by tests/test_ranks.py::test_the_clip_is_exactly_the_ratio_of_norms.
    if norm.isfinite() and norm > max_norm:
        for gradient in gradients.values():
            gradient.mul_(max_norm / norm.item())  # (7)
    return norm


# 17. The optimizer, its precision, and the state of a run ----------------------------------------
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
# `grad_dtype` (torch 2.10 and later) tells torch to cast a gradient before it is added to .grad, so
# the sums over micro-batches and over ranks are wide. The states between layers, to which each
# layer adds, stay wide too if the model has a `residual_dtype`, as torch.autocast does it. Products
# round their inputs right before they run. tests/RESULTS.md has the errors of gradients.


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
        self.zero = zero
        # If ranks shard the weights too, they hold different rows: sending them around would
        # overwrite one rank's rows with another's.
        if zero and self.part.mode != "zero1":
            raise ValueError(
                f"zero=True shards the states of whole weights: expected a model of "
                f'parallelize(.., mode="zero1"), got mode={self.part.mode!r}')  # fmt: skip
        self.has_masters = self.part.compute_dtype is not None and not self.part.is_fsdp

        # The optimizer gets views of the model's own memory: what it updates is the model. AdamW
        # treats each entry by itself, so it needs to know neither DTensors nor the other rows.
        # Masters are not views: the model gets rounded parameters in their place.
        self.places = dict(self.part.places)
        if zero:
            self.places = {name: x.cut(0, x.replicas) for name, x in self.places.items()}
        self.mine = {}
        for name, p in self.master_parameters():
            rows = self.own_rows(name, local(p.detach()))
            if zero and self.has_masters:
                rows = rows.clone()  # a view of some rows would keep all of them in memory
            self.mine[name] = torch.nn.Parameter(rows, requires_grad=p.requires_grad)
        self.inner = make([*self.mine.values()])
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def own_rows(self, name, x):
        """Return the rows of a rank's tensor that this rank updates: all of them without `zero`."""
        if not self.zero:
            return x
        here, own = self.part.places[name].boxes[-1][0], self.places[name].boxes[-1][0]
        return x[own.start - here.start :][: len(own)]

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
            here = local(p.detach())
            own = self.mine[name].detach()
            cuts = len(self.part.places[name].cuts)
            if len(self.places[name].cuts) > cuts:
                # COMM: an all-gather over the ranks with the same weights, of the rows that each
                # has updated. They are rounded before they are sent. Pinned by
                # tests/test_parallel.py::test_every_plan_is_one_process.
                here.copy_(self.places[name].gather(own.to(here.dtype), cuts))
            elif self.has_masters:
                here.copy_(own)

    def master_parameters(self):
        """Yield (name, parameter) of a model, which gets rounded parameters in place of masters.

        A generator: one parameter is rounded at a time, so that there are never two whole models.
        """
        if not self.has_masters:
            yield from self.model.named_parameters()
            return
        done = set()
        for prefix, module in self.part.named_modules():
            for last, p in list(module.named_parameters(recurse=False)):
                # Under zbv both ends of a model on one rank share their embedding.
                name = join_name(prefix, last)
                if name in done:
                    continue
                done.add(name)
                rounded = p.detach().to(self.part.compute_dtype)
                rounded = torch.nn.Parameter(rounded, requires_grad=p.requires_grad)
                # NUMERICS: the gradients of micro-batches, and of the two uses of a tied embedding,
                # are added in the master's precision. Pinned by
                # tests/test_precision.py::test_gradients_add_up_in_float32.
                rounded.grad_dtype = p.dtype
                setattr(module, last, rounded)
                yield name, p


def weights_to_store(model, optimizer) -> dict:
    """Return name -> the weight that a checkpoint stores: the master, if there is one."""
    if not getattr(optimizer, "has_masters", False):
        return {name: p.detach() for name, p in model.named_parameters()}
    return {name: optimizer.places[name].label(x.detach()) for name, x in optimizer.mine.items()}


def state_of(optimizer, name, p) -> dict:
    """Return a parameter's state in a LocalOptimizer or in an optimizer of torch; empty if none."""
    # Read with get: asking a torch optimizer for the state of a parameter would make one.
    key = optimizer.mine[name] if isinstance(optimizer, LocalOptimizer) else p
    return optimizer.state.get(key, {})


def make_adamw_state(optimizer, name, p) -> None:
    """Make AdamW's state of a parameter, as before its first step, if it is absent."""
    if not state_of(optimizer, name, p):
        x = optimizer.mine[name] if isinstance(optimizer, LocalOptimizer) else p
        step = torch.zeros((), dtype=torch.float32, device=x.device)
        optimizer.state[x] |= dict(
            step=step, exp_avg=torch.zeros_like(x), exp_avg_sq=torch.zeros_like(x))


def persistent_buffers(model) -> dict:
    """Return name -> buffer of those that belong to a model's state, such as a router's bias."""
    found = {}
    for prefix, module in part_of(model).named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[join_name(prefix, name)] = buffer
    return found


def training_tensors(model, optimizer) -> dict:
    """Return every tensor that a resumed run needs, under flat names. AdamW's state is made.

    model.NAME and optimizer.NAME.KEY of a parameter, buffer.NAME of a persistent buffer. A tensor
    of which this rank has a part is a DTensor, which shares the memory.

    optimizer: LocalOptimizer, or torch's AdamW.
    """
    part = part_of(model)
    part.reshard()
    places = getattr(optimizer, "places", part.places)
    weights = weights_to_store(model, optimizer)
    tensors = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = weights[name]
        make_adamw_state(optimizer, name, p)
        for key, x in state_of(optimizer, name, p).items():
            # The number of steps has no dimension, and is the same on all ranks.
            tensors[f"optimizer.{name}.{key}"] = places[name].label(local(x)) if x.dim() else x
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

    optimizer: LocalOptimizer, or torch's. Default: only the model is compared.
    """
    part = part_of(model)
    part.reshard()
    places = getattr(optimizer, "places", part.places)
    digests = {}  # (name, box) -> digest, of each tensor on this rank

    def enter(name, x, box=()):
        bits = local(x.detach()).contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        digests[name, box] = hashlib.blake2b(bits, digest_size=8).hexdigest()

    for name, p in model.named_parameters():
        enter(name, p, part.places[name].boxes[-1])
        box = places[name].boxes[-1]
        if getattr(optimizer, "has_masters", False):
            enter(f"{name} (master)", optimizer.mine[name], box)
        state = {} if optimizer is None else state_of(optimizer, name, p)
        # A state that one replica has and another lacks is a difference too.
        keys = torch.tensor([*repr(sorted(state)).encode()], dtype=torch.uint8)
        enter(f"{name} (names of its states)", keys)
        for key, x in state.items():
            if torch.is_tensor(x):
                enter(f"{name} ({key})", x, box if x.dim() else ())
    for name, buffer in persistent_buffers(model).items():
        enter(name, buffer)

    # COMM: an all-gather of 8 bytes and a name for each tensor, over all ranks. Every rank then
    # compares all tables, so that all say the same. Pinned by
    # tests/test_parallel_faults.py::test_a_flipped_bit_is_named.
    tables = [None] * dist.get_world_size()
    dist.all_gather_object(tables, digests)
    first = None
    names = set()
    for key in dict.fromkeys(key for table in tables for key in table):
        ranks_of = {}  # digest -> the ranks that have it
        for rank, table in enumerate(tables):
            if key in table:
                ranks_of.setdefault(table[key], []).append(rank)
        if len(ranks_of) > 1:
            first = first or (key[0], ranks_of)
            names.add(key[0])
    if first is None:
        return None

    # Nobody can say which of two replicas is right. The largest set comes first.
    sets = sorted(first[1].values(), key=lambda ranks: (-len(ranks), ranks))
    said = []
    for ranks in sets:
        word = "ranks" if len(ranks) > 1 else "rank"
        said.append(f"{word} {' '.join(map(str, ranks))}")
    more = f"; {len(names) - 1} more tensors differ" if len(names) > 1 else ""
    return f"replicas differ in {first[0]}: {' / '.join(said)} hold other bits{more}"


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
    if decay not in ("constant", "linear", "cosine"):
        raise ValueError(f"expected a decay of constant, linear, cosine, got {decay!r}")
    if first_step not in ("nonzero", "zero"):
        raise ValueError(f"expected a first_step of nonzero, zero, got {first_step!r}")
    if not 0 <= warmup <= total:
        raise ValueError(f"expected a warm-up of at most {total} steps, got {warmup}")
    if not 0 <= min_ratio <= 1:
        raise ValueError(f"expected a min_ratio from 0 to 1, got {min_ratio}")

    if step < warmup:
        risen = step + 1 if first_step == "nonzero" else step
        return risen / warmup

    # The decay is 0 done in the first step after the warm-up, and would be all done at `total`. If
    # all steps are warm-up, only a step past the end gets here, and max avoids a division by 0.
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return min_ratio + (1 - min_ratio) * left[decay]


# 18. A packed batch under a plan -----------------------------------------------------------------
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

        def loss_of_states(k, hidden_1sM):
            scores = self.score(rows[k], hidden_1sM)
            if not micro_batches[k]:  # a loss of 0 with a graph: others wait for its messages
                return sum(x_BT.sum() for x_BT in scores)
            return loss_fn(micro_batches[k], rows[k].mask_BT.to(self.device), *scores)

        # A pipeline runs all micro-batches by its schedule. Otherwise it is as on one device:
        # forward, loss, backward, whose graph is freed before the next one. backward() adds to
        # .grad, and that is right, because the losses are terms of one sum.
        losses = []
        if self.part.is_pipeline:
            micros = [self.micro(row, self.balance) for row in rows]
            losses = self.model.forward_backward(micros, loss_of_states)
        else:
            for k, row in enumerate(rows):
                loss = loss_of_states(k, self.states(row, self.balance))
                loss.backward()
                losses.append(loss.detach())

        # Of the ranks with the same sequences one counts.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if speaks_for_replica(self.model):
            for loss in losses:
                total += loss
        if dist.is_initialized():
            # COMM: an all-reduce of one number over all ranks. Pinned by
            # tests/test_packed.py::test_ranks_are_one_process.
            dist.all_reduce(total)
        return total

    @torch.no_grad()
    def forward(self, sequences, masks) -> list:
        """Return (logprobs, entropies), of a critic values too, of each sequence, no gradient.

        Each is (L - 1,), on the CPU, on every rank of the replica. Collective.
        """
        micro_batches, rows = self.pack_micro_batches(sequences, masks)
        if self.part.is_pipeline:
            states = self.model.forward([self.micro(row) for row in rows]) or ()
        else:
            states = map(self.states, rows)  # one row after the other: never two at once

        # Sequences go back to their places, without their padding.
        found = [None] * len(sequences)
        for indices, row, hidden_1sM in zip(micro_batches, rows, states):
            columns = [x_BT.cpu() for x_BT in self.score(row, hidden_1sM)]
            for b, i in enumerate(indices):
                found[i] = tuple(x_BT[b, : len(sequences[i]) - 1] for x_BT in columns)
        self.part.reshard()  # without a backward FSDP would keep the gathered weights
        if not self.part.is_pipeline:
            return found

        # COMM: the last stage has the scores; an all-gather over the replica gives them to its
        # other ranks.
        # Pinned by tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
        replica = self.part.grid.replica
        parts = [None] * dist.get_world_size(replica)
        mine = None if self.model.last is None else found
        dist.all_gather_object(parts, mine, group=replica)
        return next(part for part in parts if part is not None)

    def pack_micro_batches(self, sequences, masks):
        """Return the micro-batches, as lists of indices, and a `PackedRow` of each. Collective.

        A micro-batch without sequences has one token.
        """
        require_batch(self.model, sequences, masks)
        # Other ranks may need more micro-batches than this one has data for.
        lengths = [len(tokens) for tokens in sequences]
        micro_batches = cut_into_micro_batches(self.model, lengths, self.micro_tokens)
        contents = []
        for indices in micro_batches:
            contents.append(([sequences[i] for i in indices], [masks[i] for i in indices]))
            if not indices:
                contents[-1] = [[0]], [[]]

        sizes = row_lengths(self.plan, [sum(map(len, tokens)) for tokens, _ in contents])
        rows = [pack_row(*content, size) for content, size in zip(contents, sizes, strict=True)]
        rows = [row if indices else row.without_sequences()
                for indices, row in zip(micro_batches, rows, strict=True)]  # fmt: skip
        return micro_batches, rows

    def own_tokens(self, row):
        """Return the places of a row that this rank of c has, ascending: all of them without c."""
        length = row.tokens_1S.shape[1]
        if self.plan.cp == 1:
            return torch.arange(length)
        return self.indices(length, dist.get_rank(self.part.grid.context), self.plan.cp)

    def micro(self, row, balance=None) -> Micro:
        """Return this rank's tokens of a row, with the attention of its documents."""
        # Attention and balance are about the whole row. Tokens and positions are this rank's.
        local_s = self.own_tokens(row)
        group = self.part.grid.context if self.plan.cp > 1 else None
        made = None
        if balance is not None:
            made = balance_of_rank(self.model, row.sequence_J, row.token_J, local_s, balance)
        own = [x_1S[:, local_s].to(self.device) for x_1S in (row.tokens_1S, row.positions_1S)]
        return Micro(*own, self.attention(row.sees, group), made)

    def states(self, row, balance=None):
        """Return the states (1, s, M) of this rank's tokens of a row."""
        micro = self.micro(row, balance)
        return micro.through(self.model, micro.tokens)

    def score(self, row, hidden_1sM) -> list:
        """Return log-probs, entropies, of a critic values of a row's targets, (B, T) each."""
        # Some of the N scored tokens have their state on this rank, and searchsorted finds it.
        # Example: this rank has 0 1 6 7 of 8 tokens, and 0 1 3 are scored. It scores 0 and 1.
        model = self.model.last if self.part.is_pipeline else self.model
        local_s = self.own_tokens(row)
        here_N = torch.isin(row.at_N, local_s)
        at_n = row.at_N[here_N]
        x_nM = hidden_1sM[0, torch.searchsorted(local_s, at_n).to(self.device)]
        targets_n = row.targets_N[here_N].to(self.device)
        columns = [*model.logprobs(x_nM, targets_n, temperature=self.temperature)]
        if getattr(model.config, "value_head", False):
            columns.append(model.values(x_nM))

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
                x_N = reduce_from_tp_region(x_N, self.part.grid.context, sequence=False)
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


def cut_into_micro_batches(model, lengths, micro_tokens, shared=None) -> list:
    """Call `pack` for a model of any plan. Add [] if other ranks have more. Collective."""
    # A pipeline of p stages idles less the more micro-batches it has: at least 2 p of them, of
    # about one size, since all are padded to the longest.
    plan = part_of(model).plan
    if plan.pp > 1:
        longest = max(lengths, default=0)
        micro_tokens = min(micro_tokens, sum(lengths) // (2 * plan.pp) + longest)
    packed = pack(lengths, micro_tokens, shared)
    count = agreed_micro_batches(model, len(packed))
    return packed + [[]] * (count - len(packed))


def agreed_micro_batches(model, count) -> int:
    """Return how many micro-batches a rank runs that has data for `count` of them. Collective."""
    # A pipeline of p stages wants at least 2 p, and interleaved schedules a multiple of p: 5
    # micro-batches on 2 stages become 6.
    part = part_of(model)
    p = part.plan.pp
    if p > 1:
        count = max(2 * p, -(-count // p) * p)
    if part.is_fsdp or part.plan.ep > 1:
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
    groups = []
    first = 0  # of local_s, the first that a sparse layer sees
    taken_s = local_s
    if plan.cp > 1:
        groups.append(part.grid.context)
    if plan.tp > 1:
        chunk = -(-len(local_s) // plan.tp)
        start = part.grid.dense.get_local_rank("tp") * chunk
        taken_s = local_s[start : start + chunk]
        first = start if plan.etp == 1 else 0
        groups.append(part.grid.dense.get_group("tp"))

    # Tokens are numbered as the layer sees them, and sequences as in the whole row.
    is_taken_J = torch.isin(token_J, taken_s)
    token_j = torch.searchsorted(local_s, token_J[is_taken_J]) - first
    num_sequences = int(sequence_J.max()) + 1 if len(sequence_J) else 0
    pairs = sequence_J[is_taken_J].to(part.device), token_j.to(part.device)
    return balance(*pairs, num_sequences=num_sequences, groups=groups)


def speaks_for_replica(model) -> bool:
    """Return whether this rank's measurements count, among ranks with the same sequences."""
    part = part_of(model)
    if part.is_pipeline and model.last is None:
        return False
    if part.plan.tp * part.plan.cp == 1:
        return True

    # The first rank of its tensor group that is also the first of its context.
    #
    #     plan t2c2: tensor groups 0 1 | 2 3, contexts 0 2 | 1 3   ->   rank 0 alone
    first_of_tensor = part.grid.dense.get_local_rank("tp") == 0
    return first_of_tensor and dist.get_rank(part.grid.context) == 0


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
    replica = part.grid.replica
    parts = [None] * dist.get_world_size(replica)
    dist.all_gather_object(parts, items, group=replica)
    first = sum(len(part) for part in parts[: dist.get_rank(replica)])
    return [item for part in parts for item in part], first


def require_batch(model, sequences, masks):
    """Raise a ValueError, on all ranks of a replica, for masks that do not fit their sequences, or
    sequences that differ among the ranks."""
    found = ""
    if len(sequences) != len(masks):
        found = f"expected a mask for each of {len(sequences)} sequences, got {len(masks)}"
    for i, (tokens, mask) in enumerate(zip(sequences, masks)):
        if not found and (len(tokens) == 0 or len(mask) != len(tokens) - 1):
            found = (
                f"sequence {i} has {len(tokens)} tokens and a mask of {len(mask)}; it needs a "
                f"token at least, and an entry of the mask for each of tokens[1:]")  # fmt: skip

    # COMM: an all-gather of eight bytes over the replica tells whether all of its ranks have the
    # same batch. Pinned by
    # tests/test_packed.py::test_a_batch_that_cannot_be_is_refused_on_every_rank.
    part = part_of(model)
    if part.plan.world > part.plan.dp:
        digest = hashlib.blake2b(digest_size=8)
        for tokens, mask in zip(sequences, masks):
            digest.update(np.asarray([len(tokens), *tokens], dtype=np.int64).tobytes())
            digest.update(np.asarray(mask, dtype=bool).tobytes())
        replica = part.grid.replica
        parts = [None] * dist.get_world_size(replica)
        dist.all_gather_object(parts, (digest.digest(), found), group=replica)
        found = next((text for _, text in parts if text), "")
        if not found and len({seen for seen, _ in parts}) > 1:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(replica)))
            found = (
                f"ranks {ranks} work on the same sequences in plan {part.plan}, but were given "
                f"different ones or masks; gather_replica makes one batch of them")  # fmt: skip
    if found:
        raise ValueError(found)


class PaddedTokens:
    """A model under sequence parallelism for callers that know nothing of it, such as trees.

    It pads the tokens (1, S) to a multiple of t, runs the model, and drops the padding, which
    attention never sees. `on_routing` gets the experts of all S tokens, and router probabilities
    without a graph. Everything else is the model's.
    """

    def __init__(self, model, multiple):
        self.model = model
        self.multiple = multiple

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hidden(self, tokens_1S, /, *, positions, attention, on_routing=None):
        # Sequence parallelism gives each rank 1/t of the tokens: 5 of them become 6 for t = 2. A
        # rank without any still runs t, because the other ranks wait for it.
        length = tokens_1S.shape[1]
        pad = max(1, -(-length // self.multiple)) * self.multiple - length

        def attention_without_padding(q, k, v, /, **options):
            out = attention(*(x[:, :, :length] for x in (q, k, v)), **options)
            return F.pad(out, (0, 0, 0, pad))

        def on_routing_of_all_tokens(scores_nE, chosen_nK, /, *, layer):
            scores_NE = self._of_all_ranks(scores_nE)
            chosen_NK = self._of_all_ranks(chosen_nK)
            return on_routing(scores_NE[:length], chosen_NK[:length], layer=layer)

        options = {} if on_routing is None else {"on_routing": on_routing_of_all_tokens}
        x_1SM = self.model.hidden(
            F.pad(tokens_1S, (0, pad)), positions=F.pad(positions, (0, pad)),
            attention=attention_without_padding, **options,
        )  # fmt: skip
        return x_1SM[:, :length]

    @torch.no_grad()
    def _of_all_ranks(self, x_nE):
        """All-gather what the t ranks' routers found, in the order of the tokens."""
        # COMM: an all-gather over the t ranks, each of which has a part of the tokens. With t
        # inside the experts a layer has seen all tokens already. Pinned by
        # tests/test_balance.py::test_a_rank_sees_some_tokens.
        part = part_of(self.model)
        return x_nE if part.plan.etp > 1 else all_gather(x_nE, part.grid.dense.get_group("tp"))


# 19. Generators ----------------------------------------------------------------------------------
#
# A model that only samples, split by a plan of its own (d, t and e), and how weights reach it, one
# tensor at a time, from a model of another plan. Skip it if every rank samples with a whole model.


def require_generator_plan(plan) -> None:
    """Raise a ValueError for a plan with letters that a generator cannot have."""
    for letter, degree, what in (("c", plan.cp, "sequences"), ("p", plan.pp, "layers")):
        if degree > 1:
            raise ValueError(
                f"plan {plan}: a generator has d, t and e, and no {letter}: it decodes one token "
                f"after the other, and ranks with other {what} would only wait")  # fmt: skip


def split_for_decoding(model, plan, *, device_mesh):
    """Turn a whole model into this rank's part of a generator's plan, without gradients; return it.

    Takes the parameters of `parallelize`. The t ranks of a replica share the decoding: all of
    them get the same tokens, and compute the same logits of the whole vocabulary. `gather_replica`
    makes the same batch of their lists. Ranks that exchange rows of experts with other replicas
    need the same number of model calls: `end_together`.
    """
    require_generator_plan(plan)
    require_whole_model(model, plan, device_mesh)
    plan.require_fits(world=dist.get_world_size(), config=model.config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    model.part = Part(model, device_mesh)
    model.calls = None
    split_weights(model.part, shapes)

    # One new token in a row cannot be split along the sequence, so between f and g every tensor
    # rank has all rows. Experts whose width is not split get each row once all the same.
    if plan.tp > 1 and plan.etp == 1:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                share_out_rows(layer.mlp, device_mesh.dense.get_group("tp"))

    # If experts are on more ranks than a replica has, replicas decode in step.
    if plan.ep * plan.etp > plan.tp:
        model.calls = CallsInStep(model, device_mesh.experts.get_group("ep"))
        model.hidden = model.calls.hidden
    return model


def share_out_rows(mlp, group):
    """Let each of the t ranks, which have the same rows, send some of them to the experts."""
    run = mlp.forward
    world = dist.get_world_size(group)

    def forward(x_BSM, /, on_routing=None):
        # 5 rows on 2 ranks are 0 1 2 and 3 4 -, where - is a row of zeros. Wherever it is routed
        # to, its result is cut off.
        rows_NM = x_BSM.flatten(0, -2)
        N = len(rows_NM)
        padded_NM = F.pad(rows_NM, (0, 0, 0, -N % world))
        out_1nM = run(own_chunk(padded_NM, group)[None], on_routing=on_routing)
        # COMM: an all-gather over the t ranks, which have the same number of rows. Pinned by
        # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
        return all_gather(out_1nM[0], group)[:N].view_as(x_BSM)

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
    def end(self):
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self.ranks_that_call(0):
            self.run(token_11)


def end_together(model) -> None:
    """Serve this rank's experts until the other ranks have decoded all they had, too."""
    calls = getattr(model, "calls", None)
    if calls is not None:
        calls.end()


def share_or_allocate(source, target, device) -> None:
    """Give a model on the meta device memory, the source's own where that is possible.

    It is possible where both have the same entries of a parameter in one dtype. The content of new
    memory is undefined.

    What an optimizer writes into a shared parameter of the source is in the target at once, and
    `copy_weights` leaves it out. Degrees decide what is shared, so it is the same on all ranks.
    """
    # FSDP moves its shards' memory about, and a stage of a pipeline has some of the layers only,
    # which the other ranks of its pipeline need to be sent.
    given = part_of(source)
    sources = {}
    if not (given.is_fsdp or given.is_pipeline):
        sources = dict(source.named_parameters())
    part = part_of(target)
    for prefix, module in target.named_modules():
        for name, q in module.named_parameters(recurse=False):
            full_name = join_name(prefix, name)
            place = part.places[full_name]
            p = sources.get(full_name)
            same = p is not None and p.dtype == q.dtype
            if same and given.places[full_name].pattern == place.pattern:
                memory = local(p.detach())
            else:
                memory = torch.empty_like(local(q.detach()), device=device)
            q = torch.nn.Parameter(place.label(memory), requires_grad=False)
            setattr(module, name, q)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device=device)


def tensors_of(model) -> dict:
    """Return name -> tensor of the parameters and of the buffers that belong to a model's state."""
    return dict(model.named_parameters()) | persistent_buffers(model)


class Weights:
    """The tensors of a model of any plan, given out one at a time.

    All ranks of the model ask for the same names in the same order.

    source: model, of any plan.
    optimizer: the source's LocalOptimizer, which may have masters. Default: none.
    dtype: torch.dtype of the model that gets the weights.

    shapes: dict. Name -> shape of the whole, the same on all ranks.
    patterns: dict. Name -> `Place.pattern`.
    """

    def __init__(self, source, optimizer=None, dtype=None):
        part = part_of(source)
        part.reshard()
        tensors = dict(source.named_parameters())
        places = part.places
        # In compute_dtype a parameter is its master, rounded once. In another dtype it would be
        # rounded twice. The master itself may be a part of a rank's part (zero1), and then costs
        # more messages.
        if getattr(optimizer, "has_masters", False) and dtype != part.compute_dtype:
            tensors, places = optimizer.mine, optimizer.places
        self.tensors = {name: (local(x.detach()), places[name]) for name, x in tensors.items()}
        for name, x in persistent_buffers(source).items():
            self.tensors[name] = x, Place(None, (whole_box(x),))

        found = {name: (place.shape, place.pattern) for name, (_, place) in self.tensors.items()}
        self.senders = {}
        self.group = None
        if part.is_pipeline:
            # COMM: an all-gather over the stages says what each of them has. Who sends a tensor is
            # the first stage that has it. The ranks of this group have other layers, and the same
            # entries of what t and e cut. Pinned by
            # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
            self.group = part.grid.dense.get_group("pp")
            of_stages = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(of_stages, found, group=self.group)
            found = {}
            for stage, of_stage in enumerate(of_stages):
                for name in of_stage.keys() - found.keys():
                    self.senders[name] = dist.get_global_rank(self.group, stage)
                found = of_stage | found
        self.shapes = {name: shape for name, (shape, _) in found.items()}
        self.patterns = {name: pattern for name, (_, pattern) in found.items()}

    @torch.no_grad()
    def gather(self, name, dtype, device, kept=0, shape=None):
        """Return a tensor on every rank: the whole, or what its first `kept` cuts leave of it.

        dtype, device: of the result, if another stage has the tensor.
        shape: of the result, if `kept` is not 0. Collective.
        """
        if name in self.tensors:
            x, place = self.tensors[name]
            x = place.gather(x, kept)
        else:
            x = torch.empty(shape or self.shapes[name], dtype=dtype, device=device)
        if name in self.senders:
            # COMM: a broadcast over the stages, from the first one that has the tensor. All stages
            # take the names in one order. Pinned by
            # tests/test_plan_run.py::test_every_plan_gives_the_run_of_one_process.
            x = x.to(device, dtype).contiguous()
            dist.broadcast(x, src=self.senders[name], group=self.group)
        return x


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
    weights = Weights(source, optimizer, next(target.parameters()).dtype)
    wanted = tensors_of(target)
    places = part_of(target).places

    # Compared before the first of them moves, and by what every rank knows now.
    wants = {name: tuple(x.shape) for name, x in wanted.items()}
    if weights.shapes != wants:
        differ = sorted({name for name, _ in weights.shapes.items() ^ wants.items()})
        raise ValueError(f"models differ: {differ}")

    for name, q in wanted.items():
        q = local(q.detach())
        own, _ = weights.tensors.get(name, (None, None))
        if own is not None and own.is_set_to(q):
            continue
        # Where the source was first cut as the target is, by t and e of one degree, only what was
        # cut after that, by FSDP, is gathered. Degrees decide, so all ranks go the same way.
        pattern = places[name].pattern if name in places else ()
        if weights.patterns[name][: len(pattern)] == pattern:
            q.copy_(weights.gather(name, q.dtype, q.device, len(pattern), q.shape))
        else:
            whole = weights.gather(name, q.dtype, q.device)
            q.copy_(whole[places[name].region])


# 20. Joining, agreeing, leaving ------------------------------------------------------------------
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
    with naming_lost_ranks(lambda: "starting", "look at its error"):
        store = dist.HashStore()
        rank = 0
        world = 1
        if "RANK" in os.environ:  # torchrun's ranks meet in its store
            store, rank, world = next(dist.rendezvous("env://", timeout=patience))
            store = store_of_this_attempt(store, rank, world, timeout)
        # gloo in addition to NCCL, because Python objects and checkpoints travel as CPU tensors.
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        where = dict(store=store, rank=rank, world_size=world)
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
    # One process drives one device.
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(device)
    return device


def wait_for_all(device="cpu") -> None:
    """Return when all ranks of the default group are here."""
    # COMM: an all-reduce. A rank that refuses its settings next leaves at once. It must not close
    # the connections, or rank 0 the store, with which another rank still joins a group.
    # Pinned by tests/test_faults.py::test_no_rank_leaves_while_another_joins.
    dist.all_reduce(torch.zeros((), device=device))


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
            if json.loads(store.get(f"{attempt}/go"))[str(rank)] == own_number:
                return dist.PrefixStore(attempt, store)
            time.sleep(0.1)
    raise dist.DistStoreError(f"rank 0 did not answer within {timeout} seconds")


def agree(function):
    """Call function() on rank 0. Return its value on every rank, or raise its error on every rank.

    A ValueError or an OSError becomes a ValueError of the same text on all ranks. Any other error
    of rank 0 is raised there as it is, and as a RuntimeError that quotes it on the other ranks.
    """
    box = [None, None, ""]  # the value; or the kind of error that the other ranks raise, its text
    own_error = None
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as error:
            box[1:] = ValueError, str(error)
        except Exception as error:
            own_error = error
            box[1:] = RuntimeError, f"rank 0 ended with {type(error).__name__}: {error}"
    # COMM: rank 0 broadcasts to all ranks. It does so after an error too, so no rank waits for a
    # rank 0 that has failed.
    # Pinned by tests/test_faults.py::test_any_error_of_rank_0_reaches_all_ranks_at_once.
    dist.broadcast_object_list(box, src=0)
    if own_error is not None:
        raise own_error
    value, kind, text = box
    if kind is not None:
        raise kind(text)
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


@contextlib.contextmanager
def naming_lost_ranks(where, advice):
    """Turn the error of a collective that lost a rank into a ConnectionError with advice.

    where: function without arguments. Its text says how far this rank was.
    advice: str. What the user can do. The newest checkpoint is whole, and saving another one would
        need the lost rank.
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
            f"{where()}: another rank is gone or silent for too long ({reason}); this rank leaves "
            f"without saving; {advice}") from error  # fmt: skip


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


# 21. Checkpoints ---------------------------------------------------------------------------------
#
# Write the state of a run so that it can go on under any plan, and read it back verified.
# Skip it unless a checkpoint was refused, or you write checkpoints of your own.
#
# DCP (torch.distributed.checkpoint) writes one file per rank, the chunks of its tensors end to end,
# and a table of contents, .metadata. state.json is written last. It has the run's own state, its
# own checksum, and for each other file the running checksum at the end of each chunk:
#
#     "__0_0.distcp": [[1500, c1], [2700, c2]]     bytes 0 to 1499 sum to c1, 0 to 2699 to c2
#
# A CRC can be continued, so a rank that needs bytes 1500 to 2699 reads only these: started at c1,
# their checksum must be c2. The last pair is the size and the checksum of the whole file.


class Damaged(ValueError):
    """Files of a checkpoint are not as they were written. An older checkpoint may be whole."""


class _SummedFile(io.BufferedWriter):
    """A file that notes the checksum of its bytes at each flush, {position: checksum}.

    DCP writes from front to back, and flushes after each chunk.
    """

    def __init__(self, path):
        super().__init__(io.FileIO(path, "w"))
        self.sum = 0
        self.sums = {}

    def write(self, data):
        self.sum = zlib.crc32(data, self.sum)
        return super().write(data)

    def flush(self):
        super().flush()
        self.sums[self.tell()] = self.sum

    def fileno(self):
        # DCP asks for the number to sync the file. It syncs .metadata before it flushes it.
        self.flush()
        return super().fileno()


class _SummedFiles(dcp.filesystem.FileSystem):
    """DCP's file system, with the checksums of the files that this rank writes, by name."""

    def __init__(self):
        self.sums = {}

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with _SummedFile(path) as file:
            self.sums[path.name.removesuffix(".tmp")] = file.sums  # .metadata.tmp is renamed
            yield file


def write_checkpoint(path, tensors, state) -> None:
    """Collective. Write `tensors` by DCP and `state` as JSON into the directory `path`.

    tensors: {name: tensor}, DTensors where they are sharded. All or nothing: a temporary directory
    is renamed once every byte and its checksum are on disk. Raises on every rank: ValueError for a
    state that is not finite JSON, before anything is touched, and OSError if writing fails.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".tmp")

    def require_json():
        try:
            sealed(state)
        except (TypeError, ValueError) as error:
            raise ValueError(f"checkpoint {path}: its state is not finite JSON: {error}") from error

    # Refuse it before anything is deleted.
    agree(require_json)

    def start():
        # A run that was cut short may have left either directory.
        for stale in (partial, path):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir(parents=True)

    def finish():
        files = {name: [*sums.items()] for of_rank in written for name, sums in of_rank.items()}
        with (partial / "state.json").open("w") as file:
            json.dump(sealed(state | {"files": files}), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    try:
        agree(start)
        # Names are flat, so the table needs no record of how they were nested. Nor does it need
        # the path of the checkpoint, which `storage_meta` would add.
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        writer = dcp.FileSystemWriter(partial)
        writer.storage_meta = lambda: None
        writer.fs = _SummedFiles()
        dcp.save(tensors, storage_writer=writer, planner=planner)

        # COMM: each rank sends the checksums of the chunks that it wrote. No rank reads a file of
        # another rank while the others wait for it.
        # Pinned by tests/test_parallel_faults.py::test_slow_files_do_not_end_a_run.
        written = [None] * dist.get_world_size()
        dist.all_gather_object(written, writer.fs.sums)
        agree(finish)
    except (dcp.CheckpointException, ValueError) as error:  # raised on every rank, whichever failed
        failures = getattr(error, "failures", {0: [error]})
        reason = "; ".join(f"rank {rank}: {e[0]}" for rank, e in failures.items())
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)  # unfinished files take room
        raise OSError(
            f"checkpoint {path} not written ({reason}); older ones are whole: make room or mend "
            f"the directory, then go on with --resume --out {path.parent}"
        ) from error


def sealed(state) -> dict:
    """Return a checkpoint's JSON state, checksums of its files included, with its own checksum.

    ValueError for a number that is not finite: Python would write and read it, but it is not JSON.
    """
    unsealed = {key: value for key, value in state.items() if key != "seal"}
    return unsealed | {"seal": zlib.crc32(json.dumps(unsealed, allow_nan=False).encode())}


def _sealed_state(path):
    """Return a checkpoint's JSON state and the bytes of its table.

    `Damaged` unless both have their checksum, and each other file its size. The bytes of the
    tensors are verified by the ranks that read them.
    """
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text())
        if state != sealed(state):
            raise ValueError("its checksum differs")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"checkpoint {path}: state.json is missing or damaged: {error}") from error

    # A name with a slash would lead out of the directory, and reading a pipe might never end.
    try:
        files = state.get("files")
        if not isinstance(files, dict) or ".metadata" not in files:
            raise ValueError("state.json lists no .metadata among its files")
        for name, sums in files.items():
            if name in (".", "..") or not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"state.json lists {name!r:.80}, not a file of the directory")
            pairs = sums and all([type(n) for n in pair] == [int, int] for pair in sums)
            if not pairs or sums != sorted(sums):
                raise ValueError(f"state.json has no size and checksum of {name}")
            if not (path / name).is_file():
                raise ValueError(f"{name} is missing or not a file")
            if (path / name).stat().st_size != sums[-1][0]:
                raise ValueError(f"{name} is damaged (its size differs)")
        raw = (path / ".metadata").read_bytes()
        if zlib.crc32(raw) != files[".metadata"][-1][1]:
            raise ValueError(".metadata is damaged (its checksum differs)")
    except (OSError, ValueError, TypeError) as error:
        raise Damaged(f"checkpoint {path}: {error}") from error
    return state, raw


def read_checkpoint(path, tensors, *, counts=(), only="", alone=False) -> dict:
    """Collective. Fill `tensors` in place from a checkpoint, and return its verified JSON state.

    The checkpoint has the same tensors by name and shape, in any sharding, or it is refused.
    counts: names in the state that must be integers of 0 or more. only: a prefix of names, or a
    tuple of prefixes; other stored tensors are ignored. "model." leaves out AdamW's state.
    alone: this rank reads by itself, into whole tensors.
    An error on any rank is a ValueError on every rank, `Damaged` if bytes are not as they were
    written. It leaves `tensors` half filled.
    """
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes = [mine] * dist.get_world_size()
    if not alone:
        dist.all_gather_object(shapes, mine)  # a pipeline's ranks hold different parameters
    wanted = {name: shape for of_rank in shapes for name, shape in of_rank.items()}

    def inspect():
        try:
            state, raw = _sealed_state(path)
        except Damaged as error:
            return error, None  # as a value: `agree` would raise a ValueError like any other
        for name in counts:
            value = state.get(name)
            if type(value) is not int or value < 0:  # True is an int, and not a count
                raise ValueError(
                    f"checkpoint {path}: expected {name} in state.json to be an integer of 0 or "
                    f"more, got {value!r:.80}")  # fmt: skip

        # Strict both ways, so that no tensor keeps its first values, and no stored one is lost.
        table = read_table(path, raw, state["files"])
        saved = {
            name: tuple(entry.size)
            for name, entry in table.state_dict_metadata.items()
            if name.startswith(only)
        }
        for name in sorted(saved.keys() | wanted.keys()):
            if saved.get(name) != wanted.get(name):
                raise ValueError(
                    f"checkpoint {path} is of another model: {name} is {saved.get(name, 'absent')} "
                    f"there and {wanted.get(name, 'absent')} here")  # fmt: skip
        return state, table

    # COMM: rank 0 reads the table and broadcasts it, so that all ranks refuse a bad one together.
    # Pinned by tests/test_parallel_faults.py::test_what_one_rank_cannot_read_is_refused_by_all.
    state, table = inspect() if alone else agree(inspect)
    if table is None:
        raise state
    try:
        with warnings.catch_warnings():  # about `alone`
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, storage_reader=SafeReader(path, table), no_dist=alone)
    except dcp.CheckpointException as error:  # raised on every rank, whichever failed
        errors = {rank: e[0] for rank, e in sorted(error.failures.items())}
        damaged = dict.fromkeys(str(e) for e in errors.values() if isinstance(e, Damaged))
        if damaged:
            raise Damaged(f"checkpoint {path}: {'; '.join(damaged)}") from error
        reason = "; ".join(f"rank {rank}: {e}" for rank, e in errors.items())
        raise ValueError(f"checkpoint {path} cannot be read: {reason}") from error
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
    later = [path for path in found if path > saved]
    return up_to_it[:-keep] + later


def newest_checkpoint(directory, kind="step"):
    """Return the newest checkpoint whose files are there and have their size, see `read_newest`.

    Only `read_newest` finds out whether the bytes of the tensors are as they were written.
    """
    return _newest(checkpoints(directory, kind), _sealed_state)[0]


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
            f"put a copy of one back, or begin again with another --out"
        )
    return None, None


# 22. The table of contents of a checkpoint, read without running it ------------------------------
#
# DCP pickles its table, and unpickling a stranger's file can run a stranger's program.
# Skip it unless you load checkpoints that somebody else could have written.


# A pickle is a program for a small stack machine. Its instructions import any object by name, call
# it, and set attributes of any object, classes included. Three things keep it harmless:
#
#     _require_plain     allows the instructions that DCP's table needs, and no tuple as a key
#     find_class         replaces each name of DCP's by a class that stores what it is called with
#     read_table         makes DCP's objects, of values of the right type and range

DTYPES = {f"torch.{dtype}": getattr(torch, dtype) for dtype in (
    "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
)}  # fmt: skip
RECORDS = {
    "torch.Size", "torch.serialization._get_layout",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *(f"torch.distributed.checkpoint.metadata.{record}" for record in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip
TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
INSTRUCTIONS = TUPLES | set(
    "PROTO FRAME STOP MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 "
    "LONG1 SHORT_BINUNICODE BINUNICODE MARK EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "STACK_GLOBAL REDUCE NEWOBJ BUILD".split()
)


class _Record:
    """An object that a pickle asks for: the arguments of its call, and its state."""

    def __new__(cls, *arguments):
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    # Pickle calls it with the state alone. On the class itself that fails: `self` is missing.
    def __setstate__(self, state):
        self.state = state


class _TableUnpickler(pickle.Unpickler):
    """An unpickler that makes records, texts and numbers, and never an object of torch."""

    def find_class(self, module, name):
        full = f"{module}.{name}"
        if full not in RECORDS and full not in DTYPES:
            raise ValueError(f"it asks for {module:.60}.{name:.60}: not on the allow-list")
        return _Record if full in RECORDS else full


def _require_plain(raw):
    """Raise ValueError for a pickle with instructions that DCP's table does not need."""
    before = ""
    memo = []  # the instruction that made each object to which the pickle can refer again
    for opcode, value, _ in pickletools.genops(raw):
        name = opcode.name
        if name not in INSTRUCTIONS:
            raise ValueError(f"instruction {name} is not on the allow-list")
        if name == "MEMOIZE":
            memo.append(before)
            continue

        # A tuple as a key would be hashed with all that is in it. With 60 tuples, each of which
        # holds the tuple before it twice, that takes years. A very deep tuple exhausts the stack.
        # DCP's tuples are arguments and states: the next instruction uses them.
        again = name in ("BINGET", "LONG_BINGET") and memo[value] in TUPLES
        used = name in ("REDUCE", "NEWOBJ", "BUILD", "TUPLE1")
        if again or (before in TUPLES and not used):
            raise ValueError("a tuple that is neither arguments nor a state")
        before = name


def _size(record):
    """Return the torch.Size that a record asks for: integers of 0 or more, not bools."""
    (sizes,) = record.arguments
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError("sizes and offsets must be integers of 0 or more")
    return torch.Size(sizes)


def _tensor_entry(name, record) -> dcp.metadata.TensorStorageMetadata:
    """Return a tensor's dtype and size, and the chunks into which it is cut, which tile it."""
    # A dtype that DCP may load, and the one layout whose chunks can be narrowed.
    dtype, layout, *_ = record.state["properties"].state
    if not isinstance(name, str) or layout.arguments != ("torch.strided",):
        raise ValueError(f"{name!r:.80} is not a strided tensor with a name")
    properties = dcp.metadata.TensorProperties(dtype=DTYPES[dtype])

    # Where its chunks lie. A table with a hole, or with two chunks over one entry, would load half.
    size = _size(record.state["size"])
    chunks = []
    for chunk in record.state["chunks"]:
        offsets, sizes = _size(chunk.state["offsets"]), _size(chunk.state["sizes"])
        chunks.append(dcp.metadata.ChunkStorageMetadata(offsets, sizes))
    _require_tiled(name, size, chunks)
    return dcp.metadata.TensorStorageMetadata(properties, size, chunks)


def _require_tiled(name, size, chunks):
    """Raise ValueError unless every entry of a tensor is in exactly one of its chunks."""
    # Inside the tensor, with as many entries as it has, and no two over one entry.
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    ends = [[o + s for o, s in zip(c.offsets, c.sizes, strict=True)] for c in filled]
    inside = all(end <= n for row in ends for end, n in zip(row, size, strict=True))
    count = sum(math.prod(chunk.sizes) for chunk in filled)
    if not inside or count != math.prod(size):
        raise ValueError(f"the chunks of {name:.80} do not tile it")

    # Two boxes meet if they meet in every dimension. C chunks, D dimensions, c chunks after n.
    begin_CD = np.array([chunk.offsets for chunk in filled], dtype=np.int64)
    end_CD = np.array(ends, dtype=np.int64)
    for n in range(len(filled) - 1):
        meets_cD = (begin_CD[n + 1 :] < end_CD[n]) & (begin_CD[n] < end_CD[n + 1 :])
        if meets_cD.all(axis=1).any():
            raise ValueError(f"chunks of {name:.80} overlap")


class Stored(NamedTuple):
    """A chunk as it is stored: bytes of a file, the checksum up to each end, what they hold."""

    file: str
    start: int
    end: int
    sum_before: int
    sum_after: int
    dtype: torch.dtype
    shape: torch.Size


def _places(records, entries, files) -> dict:
    """Return where each chunk is stored, {index of a chunk: Stored}.

    ValueError unless every chunk is stored once and chunks fill every file end to end. files: as
    in `read_table`.
    """
    chunks = {
        dcp.metadata.MetadataIndex(name, chunk.offsets): (entry.properties.dtype, chunk.sizes)
        for name, entry in entries.items()
        for chunk in entry.chunks
    }
    sums = {name: {0: 0} | dict(pairs) for name, pairs in files.items()}
    spans = {name: [] for name in files}
    places = {}
    for index, record in records.items():
        where = dcp.metadata.MetadataIndex(index.state["fqn"], _size(index.state["offset"]))
        file, start, length = map(record.state.get, ("relative_path", "offset", "length"))
        if file not in files:
            raise ValueError(f"it names the file {file!s:.80}, which state.json does not list")
        if record.state.get("transform_descriptors"):
            raise ValueError(f"{where.fqn:.80} would have to be decoded")
        if where in places or where not in chunks:
            raise ValueError(f"a chunk of {where.fqn:.80} is stored twice, or is not of a tensor")
        end = start + length
        spans[file].append((start, end))
        ends = sums[file].get(start), sums[file].get(end)
        places[where] = Stored(file, start, end, *ends, *chunks[where])

    # DCP may leave out a chunk without entries, such as the rows of a rank that has none.
    if any(math.prod(shape) for where, (_, shape) in chunks.items() if where not in places):
        raise ValueError("the chunks of its tensors are not those that it stores")

    # Bytes that two chunks share would be loaded into the wrong tensor.
    for file, found in spans.items():
        if found and sorted(found) != [*itertools.pairwise([0, *(end for end, _ in files[file])])]:
            raise ValueError(f"the chunks in {file} do not fill it end to end")
    return places


def read_table(path, raw, files) -> dcp.metadata.Metadata:
    """Return DCP's table of contents of a checkpoint, made of verified values, else ValueError.

    raw: the bytes of .metadata. files: {name: [[end of a chunk, checksum up to it], ..]} of the
    checkpoint's files; the table may name no others.
    """
    try:
        _require_plain(raw)
        table = _TableUnpickler(io.BytesIO(raw)).load().state
        named = table["state_dict_metadata"]
        entries = {name: _tensor_entry(name, record) for name, record in named.items()}
        places = _places(table["storage_data"], entries, files)
        return dcp.metadata.Metadata(entries, storage_data=places)
    except Exception as error:  # a damaged program may fail anywhere, and in any way
        raise ValueError(
            f"checkpoint {path}: .metadata is damaged or not of this program: "
            f"{type(error).__name__}: {error!s:.200}") from error  # fmt: skip


class SafeReader(dcp.FileSystemReader):
    """A DCP reader of a verified table: tensors only (`weights_only`), each as the table has it."""

    def __init__(self, path, table):
        super().__init__(path)
        self.table = table

    # Without keyword arguments: with them DCP, where this fails on one rank, tries again for a
    # table of that rank, and if it finds one leaves the others waiting in a collective.
    def read_metadata(self):
        return self.table

    def read_data(self, plan, planner):
        try:
            for item in plan.items:
                self._read(item, planner)
        except Damaged:
            raise
        except Exception as error:  # of any kind, and DCP pickles what is raised to tell the others
            text = str(error).splitlines()[0] if str(error) else ""
            raise ValueError(f"{type(error).__name__}: {text}") from error
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, item, planner):
        """Read one stored chunk, and copy the part that a tensor of this rank wants into it."""
        index = item.storage_index
        place = self.table.storage_data[index]
        try:
            with (Path(self.path) / place.file).open("rb") as file:
                file.seek(place.start)
                raw = file.read(place.end - place.start)
        except OSError as error:
            raise Damaged(f"{place.file} is unreadable: {error}") from error
        if zlib.crc32(raw, place.sum_before) != place.sum_after:
            raise Damaged(f"{place.file} is damaged (the checksum of {index.fqn} differs)")

        # These bytes of the file are a torch.save of one chunk.
        saved = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        tensor = isinstance(saved, torch.Tensor) and saved.layout == torch.strided
        if not tensor or (saved.dtype, saved.shape) != (place.dtype, place.shape):
            raise ValueError(f"{place.file}: {index.fqn} is not stored as the table says")

        # A plan with other shards wants a box of the chunk: cut it out, dimension by dimension.
        target = planner.resolve_tensor(item).detach()
        for dimension, start in enumerate(item.storage_offsets):
            saved = saved.narrow(dimension, start, item.lengths[dimension])
        target.copy_(saved)
        planner.commit_tensor(item, target)


# 23. check ---------------------------------------------------------------------------------------
#
# The core's plans, the full version on the core's model, and every plan with models.py. Skip it.


class _Toy(ToyTransformer):
    """The core's model, with the names that `parallelize` needs for d."""

    config = types.SimpleNamespace(
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, intermediate_size=8,
        sparse_layers=(1, 3),
    )  # fmt: skip

    def hidden(self, tokens_BS, positions=None, attention=None):
        return super().hidden(tokens_BS)


def _check_toy(rank, mode, folder):
    """Train two steps in a mode, on 2 ranks with 5 and 2 rows, and leave the error in a file."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", f"file://{folder}/{mode}", PATIENCE, 2, rank)
    torch.manual_seed(0)
    tokens = torch.randint(VOCAB, (7, 9))
    truth = _Toy()
    plan = Plan.parse("d2")
    model = parallelize(copy.deepcopy(truth), plan, device_mesh=Grid.make(plan), mode=mode)
    make = functools.partial(torch.optim.AdamW, **ADAMW)
    truth_optimizer = make(truth.parameters())
    optimizer = LocalOptimizer(model, make, zero=mode == "zero1")
    errors = []
    for max_norm in (0.1, 1e9):  # the first step clips, the second does not
        for module, rows in ((truth, tokens), (model, tokens[:5] if rank == 0 else tokens[5:])):
            hidden_BSM = module.hidden(rows[:, :-1])
            module.check_loss(hidden_BSM, rows[:, 1:], torch.ones(len(rows), 8), 7 * 8).backward()
        reduce_gradients(model)
        norm = nn.utils.get_total_norm([p.grad for p in truth.parameters()])
        for p in truth.parameters():
            p.grad *= min(1.0, max_norm / norm)
        errors.append((clip_grad_norm(model, max_norm) - norm).abs())
        truth_optimizer.step()
        optimizer.step()
        for (_, p), whole in zip(model.named_parameters(), truth.parameters(), strict=True):
            errors += [(full(p.grad) - whole.grad).abs().max(), (full(p) - whole).abs().max()]
        optimizer.zero_grad()
        truth_optimizer.zero_grad()
    if rank == 0:
        torch.save(torch.stack(errors).max().item(), f"{folder}/error")
    dist.barrier()
    dist.destroy_process_group()


def check() -> bool:
    """Compare every plan with one process, print a table of errors, and return whether it is ok."""
    # The core comes first: its ranks are forks, which need a process where autograd has not run.
    errors = {f"core, {name}": error for name, error in core_main([]).items()}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            start_processes(_check_toy, (mode, folder), 2, start_method="fork")
            errors[f"toy, d2 {mode}"] = torch.load(f"{folder}/error", weights_only=True)
    try:
        errors |= _measuring_file().matrix()
    except ImportError as missing:
        print(f"every other plan: SKIP ({missing}); it would compare them with one process")
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
    if argv[:1] == ["core"]:
        core_main(argv[1:])
        return 0
    if argv == ["check"]:
        return 0 if check() else 1

    # The rest is long, needs what only tests need, and is imported when asked for.
    if argv[:2] == ["check", "--device"]:
        return _measuring_file("measure_gpu").check("parallel", argv[1:])
    if argv and argv[0] in ("plan", "bench"):
        return _measuring_file().main(argv)
    print("usage: python parallel.py core | check [--device cuda] | plan STRING | bench",
          file=sys.stderr)  # fmt: skip
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
