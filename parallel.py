"""Data, tensor, expert and pipeline parallelism, ZeRO-1 and FSDP: each equals one process.

The rule of sums. A loss is a sum over tokens, divided by Z, the number of scored tokens of all
ranks (processes) and micro-batches of a step. So a gradient is a sum over tokens too, and each rank
computes some of its terms: a partial gradient. Ranks add partial gradients up, and never average
them. If every term is added exactly once, a plan changes nothing but rounding.

    python parallel.py     # check every plan on 1, 2 and 4 ranks of this CPU against one process
    torchrun --nproc-per-node 4 parallel.py   # the plans of 4 ranks, on their GPUs if there are any

    (1)  grad = sum over ranks and micro-batches of dL_r / dtheta, L_r = sum of (loss_n / Z)
    (2)  f: x_r = x             dx = sum_r dx_r   before column-parallel layers y_r = x W_r^T
    (3)  g: y = sum_r y_r       dy_r = dy         after row-parallel layers y_r = x_r W_r^T
    (4)  logprob = z_t - m - log s                s = sum_r sum_(v on r) exp(z_v - m), m = max z
    (5)  entropy = log s - u / s                  u = sum_r sum_(v on r) exp(z_v - m) (z_v - m)
    (6)  norm^2  = sum of grad^2 over the distinct entries of all weights
    (7)  theta  <- AdamW(theta, grad min(1, max_norm / (norm + 1e-6)))

A plan such as p2d2t2 is a product of degrees. What each letter splits, and what ranks send:

    d  data      rows of the batch          gradients once a step: all-reduce
    c  context   tokens of each sequence    the same, and keys and values: ring_attention.py
    t  tensor    heads, widths, vocabulary  hidden states, twice a dense layer, and back: all-reduce
    e  expert    experts of a layer         tokens, to their experts and back: all-to-all
    p  pipeline  layers                     hidden states to the next stage, gradients back

Letters in names are dimensions: B rows, S tokens of a row, M width, N tokens of any rows, V
vocabulary, E experts, W ranks of a group. A small letter is this rank's share: v of V tokens.
"""

import copy
import datetime
import functools
import importlib.util
import math
import os
import re
import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


# 1. From a plan to process groups ---------------------------------------------------------------
def require(holds, expected):
    """Raise ValueError unless something holds. All ranks ask the same, so all raise."""
    if not holds:
        raise ValueError(f"expected {expected}")


def join_ranks(kind, timeout):
    """Join the ranks of torchrun, or a group of one. Return this rank's device: cpu or its GPU."""
    # NCCL sends tensors of GPUs, and gloo those of CPUs. A group that knows its GPU connects all of
    # its ranks at once. Otherwise the first message of two stages would wait for the other stages.
    options = dict(timeout=timeout)
    if "RANK" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        options |= dict(store=dist.HashStore(), rank=0, world_size=1)
    if kind == "cuda":
        options["device_id"] = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(options["device_id"])
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **options)
    return options.get("device_id", torch.device("cpu"))


class Grid:
    """The process groups of a plan such as "p2d2t2" or "t2 sp", seen from this rank.

    The ranks form a grid (p, d, c, t), and a group is a line or a plane of the grid. The t ranks
    send in every layer, so t is the last axis: the ranks of a t group are neighbors on a machine.

        p2d2t2    stage 0, d 0:  0 1        t    [0 1] [2 3] [4 5] [6 7]
                  stage 0, d 1:  2 3        d    [0 2] [1 3] [4 6] [5 7]
                  stage 1, d 0:  4 5        dct  [0 1 2 3] [4 5 6 7]
                  stage 1, d 1:  6 7        p    [0 4] [1 5] [2 6] [3 7]

    Experts add no ranks. The d c t ranks of a stage form a second grid (edp, e). The ranks of an e
    group hold different experts. An edp (expert data parallel) group has the same experts.
    "sp" adds sequence parallelism (section 2), "fsdp" shards layers over d and c (section 9).
    """

    def __init__(self, text, timeout=None):
        # \w*\2 is the same letter again, later in the plan.
        is_plan = re.fullmatch(r"(([pdcte])(?!\w*\2)[1-9]\d*)+( sp| fsdp)*", text)
        require(is_plan, f"a plan such as 'p2d2t2' or 't2 sp', got {text!r}")
        degrees = {letter: int(number) for letter, number in re.findall(r"([pdcte])(\d+)", text)}
        p, d, c, t, e = (degrees.get(letter, 1) for letter in "pdcte")
        self.fsdp = " fsdp" in text
        self.sequence = " sp" in text or t == 1  # with one t rank, its shard is all tokens
        require(not self.fsdp or t * e == 1, f"fsdp without t or e, got {text!r}")
        require(t == 1 or e == 1 or self.sequence, f"sp, as t goes with e, got {text!r}")
        world = dist.get_world_size()
        fits = p * d * c * t == world and d * c * t % e == 0
        require(fits, f"a plan of {world} ranks, with e that divides d c t, got {text!r}")
        self.ranks = np.arange(world).reshape(p, d, c, t)
        experts = self.ranks.reshape(p, -1, e)
        self.timeout = timeout
        self.made = {str([[*range(world)]]): dist.group.WORLD}  # a second one of all may hang
        self.group = {"edp": self.group_along(experts, [1]), "e": self.group_along(experts, [2])}
        for name in ("p", "d", "c", "t", "dc", "dct", "pct", ""):  # a pct group has the same rows
            self.group[name] = self.group_along(self.ranks, [*map("pdct".index, name)])

    def group_along(self, ranks, axes):
        """Return this rank's group along some axes of a grid of ranks; along none, it is alone."""
        # Move the axes last and flatten them. Then each row is a group.
        size = math.prod(ranks.shape[axis] for axis in axes)
        rows = np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, size).tolist()
        if str(rows) not in self.made:
            # COMM: all ranks make all groups, in one order.
            self.made[str(rows)] = dist.new_subgroups_by_enumeration(rows, self.timeout)[0]
        return self.made[str(rows)]


# 2. Collectives, and the backward of each -------------------------------------------------------
def widen(x):
    """Return a float tensor in float32, or as it is if it is float64."""
    # NUMERICS: ranks add in float32 or better, and round once. In bfloat16, 256 + 1 + 1 is 256.
    return x.to(torch.promote_types(x.dtype, torch.float32))


def all_reduce_sum(x, group):
    """Return the sum of x over the ranks, as a new tensor."""
    total = widen(x).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def all_gather(x, group, dim=0, length=None):
    """Concatenate shards in rank order: a on rank 0, b on rank 1 become (a, b) on both."""
    # Shards that `own_chunk` cut along the last dimension may differ. Then length is that of the
    # whole: 6 and 5 of 11 columns travel as 6 and 6, and the last column is dropped.
    world = dist.get_world_size(group)
    if length is not None:
        x = F.pad(x, (0, math.ceil(length / world) - x.shape[-1]))
    shards = [torch.empty_like(x.contiguous()) for _ in range(world)]
    dist.all_gather(shards, x.contiguous(), group)
    return torch.cat(shards, dim)[..., :length]


def reduce_scatter(x, group, dim=0):
    """Sum over ranks and cut: (a0, b0) and (a1, b1) become a0 + a1 on rank 0, b0 + b1 on rank 1."""
    world = dist.get_world_size(group)
    require(x.shape[dim] % world == 0, f"a multiple of {world} to cut, got {x.shape[dim]}: pad it")
    shards = [shard.contiguous() for shard in widen(x).chunk(world, dim)]
    total = torch.empty_like(shards[0])
    dist.reduce_scatter(total, shards, group=group)
    return total.to(x.dtype)


def own_chunk(x, group, dim=0):
    """Return this rank's part of a tensor that all ranks have: 6 and 5 of 11 rows on 2 ranks."""
    size = math.ceil(x.shape[dim] / dist.get_world_size(group))
    first = dist.get_rank(group) * size
    return x.movedim(dim, 0)[first : first + size].movedim(0, dim).contiguous()


# A collective is a linear function of the ranks' tensors: all-reduce maps x_0 and x_1 of 2 ranks to
# x_0 + x_1. Equal copies count as one tensor, so the sum that both ranks get is one output. The
# backward of a linear function is its transpose, which is a collective too:
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
        ctx.way_back = group, backward, forward  # of dy, which may have a gradient too
        return forward(x, group) if forward else x.view_as(x)  # None sends nothing

    @staticmethod
    def backward(ctx, dy):
        return Communicate.apply(dy, *ctx.way_back), None, None, None


# Hidden states are (B, S, M), so a shard of the tokens is a part along dimension 1.
all_gather_tokens = functools.partial(all_gather, dim=1)
reduce_scatter_tokens = functools.partial(reduce_scatter, dim=1)
own_tokens = functools.partial(own_chunk, dim=1)


# The first two lines of the table are f and g of Megatron (arXiv:1909.08053). Two ranks compute
# y_0 = 2 x and y_1 = 5 x, and g adds both to y = 7 x. If dy = 1, then g gives both ranks dy_r = 1.
# Rank 0 finds dx_0 = 2, rank 1 finds dx_1 = 5, and f adds these partial gradients to dx = 7. After
# g, all ranks compute the same norms and residuals. With sequence parallelism (arXiv:2205.05198),
# each rank does so for its own tokens only, and lines three and four replace f and g.
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
COLUMN_PARALLEL = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"
ROW_PARALLEL = "o_proj", "down_proj"


def parameter_shard(p, group, dim=0):
    """Return a parameter with this rank's part of p along dim, in memory of its own."""
    return nn.Parameter(own_chunk(p.detach(), group, dim).clone(), p.requires_grad)


def shard_rows(module, group):
    """Keep this rank's rows of each parameter, in place. A linear becomes column-parallel."""
    for name, p in list(module.named_parameters()):
        setattr(module, name, parameter_shard(p, group))


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
    """This rank's rows of an embedding. 11 rows on 2 ranks are rows 0 to 5 and rows 6 to 10."""

    def __init__(self, embedding, group, sequence):
        super().__init__()
        self.weight = parameter_shard(embedding.weight, group)
        V = self.vocab_size = len(embedding.weight)
        W = dist.get_world_size(group)
        size = math.ceil(V / W)
        require(size * (W - 1) < V, f"rows for each of {W} t ranks, got a vocabulary of {V}")
        self.first = dist.get_rank(group) * size
        self.region = group, sequence

    def forward(self, tokens_BS, /):
        # One rank has the row of a token, and the others add zeros. Token 8 is row 2 of rank 1. An
        # id outside the vocabulary is looked up by every rank, so that all raise an IndexError.
        row_BS = tokens_BS - self.first
        is_own_BS = (row_BS >= 0) & (row_BS < len(self.weight))
        is_outside_BS = (tokens_BS < 0) | (tokens_BS >= self.vocab_size)
        x_BSM = F.embedding(row_BS.where(is_own_BS | is_outside_BS, 0), self.weight)
        x_BSM = x_BSM * is_own_BS[..., None]
        return reduce_from_tp_region(x_BSM, *self.region)


def vocab_parallel_logprobs(model, first, group, hidden_NM, targets_N, /, *, temperature=1.0):
    """Return log-probs and entropies, (N,). This rank's rows of the head begin with row `first`."""
    hidden_NM = Communicate.apply(hidden_NM, group, None, all_reduce_sum)  # (2)
    z_Nv = widen(F.linear(hidden_NM, model.head_weight)) / temperature
    # NUMERICS: (4) and (5) hold for any m. With the largest logit of all ranks, exp stays finite.
    m_N = z_Nv.detach().amax(-1)
    dist.all_reduce(m_N, dist.ReduceOp.MAX, group)
    z_Nv = z_Nv - m_N[:, None]
    exp_Nv = z_Nv.exp()
    row_N = targets_N - first
    is_own_N = (row_N >= 0) & (row_N < z_Nv.shape[1])
    z_target_N = z_Nv.gather(-1, row_N.where(is_own_N, 0)[:, None])[:, 0] * is_own_N
    # The ranks add up three numbers per token. If rank 0 has the logits log 1 and log 2, and rank 1
    # has log 5, then m = log 5 and s = (0.2 + 0.4) + 1 = 1.6. The log-prob of the second token is
    # log 2 - log 5 - log 1.6 = log(2 / 8). All ranks get the same sums, so nothing is sent back.
    sums_3N = torch.stack((exp_Nv.sum(-1), (exp_Nv * z_Nv).sum(-1), z_target_N))
    s_N, u_N, z_target_N = Communicate.apply(sums_3N, group, all_reduce_sum, None)  # (3)
    return z_target_N - s_N.log(), s_N.log() - u_N / s_N  # (4), (5)


def tensor_parallel(model, group, sequence=False):
    """Shard a model of models.py, in place. hidden, logits and logprobs return the same."""
    W = dist.get_world_size(group)
    for heads in (model.config.num_attention_heads, model.config.num_key_value_heads):
        require(heads % W == 0, f"t that divides {heads} heads, got {W}")
    embedding = VocabParallelEmbedding(model.model.embed_tokens, group, sequence)
    model.model.embed_tokens = embedding
    if hasattr(model, "lm_head"):  # a model without one uses the embedding's rows
        shard_rows(model.lm_head, group)

    # q, k and v read the same input, so they share one f, and the backward sends one dx, not three.
    def enter(block, args):
        return copy_to_tp_region(args[0], group, sequence), *args[1:]

    # Norms, routers, experts and layers without attention stay as they are.
    children = [block for layer in model.model.layers for block in layer.children()]
    for block in [x for x in children if {*ROW_PARALLEL} & {*x._modules}]:
        block.register_forward_pre_hook(enter)
        for name, linear in list(block.named_children()):
            if name in COLUMN_PARALLEL:
                shard_rows(linear, group)
            if name in ROW_PARALLEL:
                setattr(block, name, RowParallelLinear(linear, group, sequence))

    # With sequence parallelism, the final norm returns a shard of the tokens: gather all tokens. In
    # the backward, f in logprobs has summed their gradient already, so a rank takes its own tokens.
    if sequence:
        model.model.norm.register_forward_hook(
            lambda norm, args, out: Communicate.apply(out, group, all_gather_tokens, own_tokens)
        )

    model.logits = lambda hidden: all_gather(  # without a backward
        F.linear(hidden, model.head_weight), group, -1, embedding.vocab_size)
    model.logprobs = functools.partial(vocab_parallel_logprobs, model, embedding.first, group)


# 4. Expert parallelism --------------------------------------------------------------------------
# Each token runs through a few of E experts. All experts together are large and the row of a token
# is small, so experts stay on their ranks and rows travel (GShard, arXiv:2006.16668).
def dispatch_experts(x_NM, counts_E, experts, group, /):
    """Send rows to the ranks of their experts, run the experts there, and send the rows back.

    x_NM: rows sorted by expert, counts_E of them for each, and 0 of some. Rank r has the r-th E / W
    experts, and calls experts(rows, counts) for rows sorted by expert. Returns (N, M).
    """
    # COMM: counts are exchanged first, so that both sides know the size of the next message.
    counts_We = counts_E.view(dist.get_world_size(group), -1).contiguous()
    arriving_We = torch.empty_like(counts_We)
    dist.all_to_all_single(arriving_We, counts_We, group=group)
    to_rank, from_rank = (x_We.sum(1).tolist() for x_We in (counts_We, arriving_We))

    def send(rows, group, sent=to_rank, received=from_rank):
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group)  # of out, of rows
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
    W = dist.get_world_size(group)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            E = len(next(experts.parameters()))
            require(E % W == 0, f"e that divides {E} experts, got {W}")
            shard_rows(experts, group)
            run = experts.forward  # called as run(x_NM, counts_E)
            experts.forward = lambda x, counts, run=run: dispatch_experts(x, counts, run, group)


# 5. Pipeline parallelism ------------------------------------------------------------------------
def keep_stage(model, stage, stages):
    """Keep the layers of one stage, in place. Stage 0 of 2 has layers 0 to 2 of 5."""
    count = len(model.model.layers)
    require(stages <= count, f"a layer for each of {stages} stages, got {count} layers")
    for n in range(count):
        if n not in np.array_split(range(count), stages)[stage]:
            delattr(model.model.layers, str(n))  # unlike del, this renames no other layer
    # An Identity lets the states of the stage before pass in place of tokens, and our states on.
    if stage > 0:
        model.model.embed_tokens = nn.Identity()
        model.embed_scale = 1.0  # Gemma's factor of embeddings
    if stage < stages - 1:
        model.model.norm = nn.Identity()
        model._modules.pop("lm_head", None)  # a model without one uses the embedding's rows


# With one batch, only one stage would work at a time. So the batch is cut into micro-batches. The
# schedule is 1F1B, "one forward, one backward" (arXiv:2104.04473). F0 is the forward of micro-batch
# 0, B0 is its backward, and .. is a stage that waits:
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
    (B, s, M), or None on stage 0. like: a tensor of their shape, dtype and device. group: the ranks
    that have the stages, in order. None: all ranks.
    """
    stage = dist.get_rank(group)
    stages = dist.get_world_size(group)
    pending = []  # at most stages - stage (input, output) of micro-batches, until backward

    def exchange(neighbor, send, receive):
        if neighbor not in range(stages) or (send is None and not receive):
            return None
        # COMM: both messages start in one batch, so no two stages wait for each other's first one.
        received = torch.empty_like(like)
        to = dict(group=group, group_peer=neighbor)
        messages = [dist.P2POp(dist.irecv, received, **to)] if receive else []
        if send is not None:
            messages.append(dist.P2POp(dist.isend, send.detach().contiguous(), **to))
        for request in dist.batch_isend_irecv(messages):
            request.wait()
        return received

    # Step n is forward n and backward n - warm_up, if there are such. A stage sends states to the
    # next stage while it receives a gradient from it, and then the same with the stage before.
    warm_up = min(stages - 1 - stage, number)
    x = exchange(stage - 1, None, number > 0)
    for n in range(number + warm_up):
        y = dx = None
        if n < number:
            y = forward(n, x if x is None else x.requires_grad_())
            pending.append((x, y))
        dy = exchange(stage + 1, y, n >= warm_up)
        if n >= warm_up:
            x, y = pending.pop(0)
            y.backward(dy)  # the loss of the last stage has no dy, and None is its default
            dx = None if x is None else x.grad
        x = exchange(stage - 1, dx, n + 1 < number)


# 6. Which group sums which gradient -------------------------------------------------------------
# Ranks that hold the same entries, but worked on other tokens or heads, have partial gradients, to
# be added up. Ranks that worked on the same tokens and heads have the same gradient.
WHOLE = "", 0, "dct"  # cut over no group, along dimension 0, and the same on all dct ranks
SHARES = dict.fromkeys(("embed_tokens", "lm_head", *COLUMN_PARALLEL), ("t", 0, "dc"))
SHARES |= dict.fromkeys(ROW_PARALLEL, ("t", 1, "dc")) | {"experts": ("e", 0, "edp")}
SHARES |= dict.fromkeys(
    ("gate", "norm", "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm",
     "pre_feedforward_layernorm", "post_feedforward_layernorm"), WHOLE)  # fmt: skip


def layout(name, grid):
    """Say how ranks share a parameter such as "model.layers.0.self_attn.q_proj.weight".

    It is cut along `dim` over the group `over`. The ranks of `replicas` hold the same entries. The
    gradients on the ranks of `partial` are partial gradients.
    grid: a Grid, or an object with its `fsdp`, `sequence` and groups t, e, dc, edp, dct and "".
    """
    *path, kind = name.split(".")
    module = path[-1] if path else ""
    # FSDP cuts a layer by rows, and its backward has summed the gradients already.
    if grid.fsdp and "layers" in path:
        return dict(over="dc", dim=0, replicas="", partial="")
    # If ranks cut weights, a q_proj with another name would be counted once for each t rank.
    is_cut = grid.fsdp or max(dist.get_world_size(grid.group[x]) for x in "te") > 1
    known = ("embed_tokens", "lm_head", "norm") if grid.fsdp else SHARES
    is_known = module in known and "experts" not in path[:-1]
    require(is_known or not is_cut, f"the name of a parameter of models.py, got {name!r}")
    is_bias = module in ROW_PARALLEL and kind == "bias"
    over, dim, replicas = WHOLE if is_bias else SHARES.get(module, WHOLE)
    # d and c ranks have different tokens, so all gradients are partial. t ranks have other entries
    # of a cut matrix, and other heads after the norms of q and k. Elsewhere they differ in tokens,
    # and only with sequence parallelism. An e rank has received all rows of its experts.
    differ = grid.sequence or module in ("q_norm", "k_norm")
    return dict(over=over, dim=dim, replicas=replicas, partial=replicas if differ else "dc")


def reduce_gradients(model, grid):
    """Sum partial gradients over ranks, once a step: .grad has added up the micro-batches."""
    # COMM: ranks first say which gradients they have, so that all call the same all-reduces.
    # A missing one counts as zeros if another rank has it, and is skipped otherwise.
    parameters = list(model.named_parameters())
    found = torch.tensor([p.grad is not None for _, p in parameters], dtype=torch.float32)
    counts = all_reduce_sum(found.to(parameters[0][1].device), grid.group["dct"]).tolist()
    for (name, p), count in zip(parameters, counts):
        if count > 0:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
            p.grad = all_reduce_sum(p.grad, grid.group[layout(name, grid)["partial"]])  # (1)


# 7. The clip norm -------------------------------------------------------------------------------
# All ranks must scale by the same factor, so the norm is over all entries of all ranks, each
# counted once. If two t ranks have squares 5 and 7 of different entries of a q_proj, these count
# 5 + 7. If they have squares 8 and 8 of the same entries of an RMSNorm, these count 8 / 2 + 8 / 2.
def clip_grad_norm(model, max_norm, grid):
    """Scale gradients, in place, to a norm of at most max_norm. Return the norm before that."""
    squares = widen(next(model.parameters()).new_zeros(()))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        replicas = grid.group[layout(name, grid)["replicas"]]
        squares += widen(gradient).square().sum() / dist.get_world_size(replicas)
    norm = all_reduce_sum(squares, None).sqrt()  # (6); None is the group of all ranks
    for gradient in gradients.values():
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)  # (7), with 1e-6 as in torch
    return norm


# 8. ZeRO-1: sharded optimizer states ------------------------------------------------------------
# AdamW stores two moments of every entry. Replicas would store the same ones, so ZeRO distributes
# the moments (arXiv:1910.02054). On 4 data ranks, with 4 bytes for each number of an entry:
#
#              weight   gradient   moments   bytes   messages
#     plain    whole    whole      whole        16   a step: all-reduce of gradients
#     ZeRO-1   whole    whole      shard        10   a step: the same, all-gather of new weights
#     FSDP     shard    shard      shard         4   a micro-batch: see section 9
#
# In bfloat16, a step from 1 to 1.001 rounds to no step, and 256 + 1 + 1 micro-batches to 256. So
# gradients add up in float32, and each rank steps a float32 copy of its shard of the weights.
class ZeroAdamW:
    """AdamW with sharded moments."""

    def __init__(self, model, grid, **options):
        self.parts = []
        # Cut the flat parameter: 11 rows of 16 entries on 2 ranks are 88 entries each.
        for name, p in model.named_parameters():
            replicas = grid.group[layout(name, grid)["replicas"]]
            shard = own_chunk(widen(p.detach()).flatten(), replicas)
            p.grad_dtype = shard.dtype
            self.parts.append((p, replicas, shard))
        self.inner = torch.optim.AdamW([shard for _, _, shard in self.parts], **options)

    def step(self):
        """Step this rank's entries, as AdamW treats each by itself. Then gather all new entries."""
        for p, replicas, shard in self.parts:
            shard.grad = None if p.grad is None else own_chunk(p.grad.flatten(), replicas)
        self.inner.step()  # (7)
        for p, replicas, shard in self.parts:
            p.data.copy_(all_gather(shard.to(p.dtype), replicas, 0, p.numel()).view_as(p))


# 9. FSDP of a layer -----------------------------------------------------------------------------
# Each rank keeps some rows of each parameter (arXiv:2304.11277). A layer's parameters travel in one
# message. If a layer has a matrix a of 5 rows and b of 3, each of 2 ranks sends 3 + 2 rows:
#
#     rank 0   a0 a1 a2 | b0 b1      . is padding. The left part, rank after rank, is a, and the
#     rank 1   a3 a4 .  | b2 .       right part is b.
def fully_shard_layer(layer, group):
    """Keep this rank's rows of each parameter, in place."""
    # functional_call runs a module with other tensors in place of its parameters, by their names.
    # whole_layer keeps the old forward: layer.forward is replaced below, and would call itself.
    whole_layer = nn.ModuleDict({"layer": layer})
    whole_layer.forward = layer.forward
    W = dist.get_world_size(group)
    shapes = {name: p.shape for name, p in layer.named_parameters()}
    sizes = [math.ceil(shape[0] / W) * shape[1:].numel() for shape in shapes.values()]
    for p in layer.parameters():
        p.data = parameter_shard(p, group).data

    # The ranks have different tokens and need the same whole weights. The backward of the gather
    # is a reduce-scatter: each rank gets the gradient of its rows, summed over all ranks.
    def gather_and_run(*args):
        shards = [F.pad(p.flatten(), (0, n - p.numel())) for p, n in zip(layer.parameters(), sizes)]
        all_WX = Communicate.apply(torch.cat(shards), group, all_gather, reduce_scatter)  # (1)
        whole = {}
        for (name, shape), x_Wx in zip(shapes.items(), all_WX.view(W, -1).split(sizes, 1)):
            whole[f"layer.{name}"] = x_Wx.flatten()[: shape.numel()].view(shape)
        return torch.func.functional_call(whole_layer, whole, args)

    # Autograd would keep the whole weights until the backward. A checkpoint keeps the input only,
    # and runs the layer again in the backward. So weights are gathered, freed, and gathered again.
    layer.forward = functools.partial(checkpoint, gather_and_run, use_reentrant=False)


# 10. Check: a model of models.py under every plan, against one process --------------------------
VOCAB = 11
WIDTH = 16
PATIENCE = datetime.timedelta(seconds=20)
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
PLANS = {  # number of ranks -> plans
    1: ("d1",),
    2: ("d2", "c2", "t2", "t2 sp", "d2e2", "p2", "d2 fsdp"),
    4: ("d2t2", "d2t2e2 sp", "p2d2", "p2t2", "p2t2 sp", "p4", "d4", "c2d2e2", "c2t2 sp"),
}


def check_model(dtype=torch.float64):
    """Return a model of 4 layers with everything that a plan splits."""
    import models  # not at the top: all but the check works without models.py
    # Layers 0 and 2 are dense. In layers 1 and 3, each token runs through 2 of 4 experts. Rounding
    # to bfloat16 would change which 2 a token prefers, so there it runs through all 4.
    torch.manual_seed(0)
    config = models.ModelConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, scale_embedding=True,
        qkv_bias=True, o_bias=True, mlp_bias=True, sparse_layers=(1, 3), num_experts=4,
        num_experts_per_tok=2 if dtype == torch.float64 else 4, norm_topk_prob=True,
        moe_intermediate_size=6, sliding_window=3, query_pre_attn_scalar=9,
        layer_types=(models.SLIDING, models.FULL) * 2,
    )  # fmt: skip
    return models.Transformer(config).to(dtype)


def check_loss(model, hidden_BSM, targets_BS, mask_BS, Z):
    """Return this rank's terms of the loss, of log-probs and of entropies, divided by Z."""
    given = hidden_BSM.flatten(0, 1), targets_BS.flatten()
    logprob_N, entropy_N = model.logprobs(*given, temperature=0.7)
    return -((logprob_N + 0.1 * entropy_N) * mask_BS.flatten()).sum() / Z  # (1)


def check_share(grid, batch):
    """Return this rank's share of a batch of 8 tokens a row, and the options of `hidden` for it."""
    from ring_attention import ring_attention, zigzag_indices
    # d ranks have different rows, and c ranks different tokens of each row, which attend to one
    # another in a ring. Ranks of one t or p group have the same rows and tokens.
    ring = grid.group["c"]
    own_s = zigzag_indices(8, dist.get_rank(ring), dist.get_world_size(ring), batch[0].device)
    share = [own_chunk(x, grid.group["d"])[:, own_s] for x in batch]

    def attention(*qkv, layer, **options):
        return ring_attention(*qkv, group=ring, **options)

    return share, dict(positions=own_s[None], attention=attention)


class Training:
    """A model under a plan and its steps. The checks below take any class with these methods."""

    def __init__(self, model, text):
        self.model = model
        self.grid = Grid(text, PATIENCE)
        tensor_parallel(model, self.grid.group["t"], self.grid.sequence)
        expert_parallel(model, self.grid.group["e"])
        keep_stage(model, self.grid.group["p"].rank(), self.grid.group["p"].size())
        if self.grid.fsdp:
            for layer in model.model.layers:
                fully_shard_layer(layer, self.grid.group["dc"])
        self.optimizer = ZeroAdamW(model, self.grid, **ADAMW)  # ZeRO-1 under every plan

    def reduce_and_clip(self, max_norm):
        reduce_gradients(self.model, self.grid)
        return clip_grad_norm(self.model, max_norm, self.grid)

    def parts(self, whole_model):
        """Yield this rank's entries of each parameter and gradient, and those of a whole model."""
        for name, p in self.model.named_parameters():
            part = layout(name, self.grid)
            over = self.grid.group[part["over"]]
            whole = whole_model.get_parameter(name)
            yield p, own_chunk(whole, over, part["dim"])
            yield p.grad, own_chunk(whole.grad, over, part["dim"])


def check_plan(text, training_class, model):
    """Train two steps under a plan, and on one process in float64. Return the relative error."""
    torch.manual_seed(0)
    weight = model.head_weight  # has the dtype and the device of all others
    tokens = torch.randint(VOCAB, (8, 9)).to(weight.device)
    mask = (torch.rand(8, 8) < 0.7).to(weight.device)
    batch = tokens[:, :-1], tokens[:, 1:], mask
    Z = mask.sum()
    truth = copy.deepcopy(model).double()
    training = training_class(copy.deepcopy(model), text)
    model, grid = training.model, training.grid
    truth_optimizer = torch.optim.AdamW(truth.parameters(), **ADAMW)
    share, options = check_share(grid, batch)
    micro_batches = list(zip(*(x.split(2) for x in share)))
    t = dist.get_world_size(grid.group["t"])
    like = weight.new_empty(2, share[0].shape[1] // (t if grid.sequence else 1), WIDTH)
    sums = truth.head_weight.new_zeros(5, 2)  # of loss, norm, logits, weights and gradients

    @torch.no_grad()
    def compare(kind, found, expected):
        sums[kind] += torch.stack([(found - expected).square().sum(), expected.square().sum()])

    def forward(n, x):
        tokens_BS, targets_BS, mask_BS = micro_batches[n]
        # With sequence parallelism x is a shard, but attention and RoPE run on all t ranks' tokens.
        x = model.hidden(tokens_BS if x is None else x, **options)
        if hasattr(model, "lm_head"):
            compare(2, model.logits(x), truth.logits(x.double()))
            x = check_loss(model, x, targets_BS, mask_BS, Z)
            losses.append(x.detach())
        return x

    for _ in range(2):
        losses = [weight.new_zeros(())]
        loss = check_loss(truth, truth.hidden(batch[0]), *batch[1:], Z)
        loss.backward()
        run_1f1b(forward, len(micro_batches), like, grid.group["p"])
        compare(0, all_reduce_sum(sum(losses), None), t * loss)  # each of t ranks has the loss
        norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1)
        compare(1, training.reduce_and_clip(0.1), norm)
        truth_optimizer.step()
        training.optimizer.step()
        for n, (found, expected) in enumerate(training.parts(truth)):
            compare(3 + n % 2, found, expected)
        truth.zero_grad()
        model.zero_grad()
    wrong, whole = all_reduce_sum(sums, None).T
    return (wrong / whole).sum().sqrt().item()


def check_each(texts, training_class, model):
    """Return {plan: its error} of plans for the ranks that are there. All of them call."""
    dist.group.WORLD.set_timeout(PATIENCE)
    return {text: check_plan(text, training_class, model) for text in texts}


def check_plans(plans, training_class, model):
    """Return {plan: its error}. plans: number of ranks -> plans."""
    from ring_attention import launch
    if dist.is_initialized():  # by torchrun
        return check_each(plans[dist.get_world_size()], training_class, model)
    # The first AdamW imports a large package. Make one before the processes fork, so all have it.
    torch.optim.AdamW([torch.zeros(1)])
    errors = {}
    for world, texts in plans.items():
        errors |= launch(world, check_each, texts, training_class, model)[0]
    return errors


def main(argv):
    """Print the error of each plan. Exit with 1 unless all are as small as they must be."""
    if {"-h", "--help"} & {*argv}:
        return print(__doc__)
    if argv:
        sys.exit(f"expected no arguments, got {argv}")
    for name in ("models", "ring_attention"):  # the check splits a model, whose c ranks are a ring
        if not importlib.util.find_spec(name):
            print(f"expected {name}.py next to parallel.py, for the check", file=sys.stderr)
            sys.exit(2)
    exact, rounded = check_model(torch.float64), check_model(torch.bfloat16)
    alone = check_plans({1: ["d1"]}, Training, rounded)["d1"]  # one process has errors too
    if "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        try:  # torch says which variable of torchrun is missing
            device = join_ranks("cuda" if torch.cuda.is_available() else "cpu", PATIENCE)
            require(dist.get_world_size() in PLANS, f"{' or '.join(map(str, PLANS))} ranks")
        except ValueError as error:
            sys.exit(f"parallel.py: {error}")
        exact, rounded = exact.to(device), rounded.to(device)
    errors, multiples = (check_plans(PLANS, Training, x) for x in (exact, rounded))
    if os.environ.get("RANK", "0") == "0":
        table = "  ".join(f"{x} {errors[x]:.0e} {multiples[x] / alone:.2f}" for x in errors)
        error, multiple = (np.max([*x.values()]) for x in (errors, multiples))  # NaN if any is
        print(f"{table}  bfloat16: {multiple / alone:.2f} times d1's, float64: largest {error:.1e}")
    if not all(errors[x] <= 1e-10 and multiples[x] <= 1.3 * alone for x in errors):  # NaN is not
        sys.exit("expected at most 1e-10, and at most 1.3 times d1's error in bfloat16")


if __name__ == "__main__":
    main(sys.argv[1:])
