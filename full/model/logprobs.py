"""Compute log-probs and entropies in chunks, on ranks that may share the vocabulary.

Sums are in float32 or better. The five's log-probs, by autograd, take 1.3 times as long with
their backward for V = 4096, and 1.8 times for V = 32768.

Equations (8) and (9) are in models.py.

Letters:  N tokens   M width   V vocabulary entries, v on this rank
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

import parallel


def require_tokens_in_vocabulary(tokens, vocab_size, /, *, what="token") -> None:
    """Refuse token ids that are not in 0..vocab_size - 1.

    On the CPU a ValueError names the first such id and its place. On a GPU an assertion of the
    device ends the process at some later call, because otherwise each forward would wait for it.
    """
    outside = (tokens < 0) | (tokens >= vocab_size)  # looked at on the CPU only, where it is cheap
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(~outside.any(), f"a {what} id is outside of 0..{vocab_size - 1}")
        return
    if not outside.any():
        return
    place = outside.nonzero()[0].tolist()
    where = f"row {place[0]}, column {place[1]}" if len(place) == 2 else f"place {place[0]}"
    raise ValueError(f"{what} id {tokens[tuple(place)].item()} at {where} is not in the vocabulary "
                     f"of {vocab_size}: ids are 0..{vocab_size - 1}")  # fmt: skip


LOGITS = 2**22  # in memory at a time by default: 16 MiB in float32

CACHED_LOGITS = 2**19  # what a CPU core's cache holds: 2 MiB in float32


class LogprobOptions(NamedTuple):
    """Store the options of `token_logprobs` for its forward and backward."""

    temperature: float
    chunk: int  # rows of hidden at a time
    cached_chunks: int  # the last chunks, whose exponentials stay for the backward
    group: object  # None, or the process group that shares the rows of the vocabulary
    vocab_start: int


def token_logprobs(
    hidden_NM, weight_vM, targets_N, /, *, temperature=1.0, chunk=None,
    group=None, vocab_start=0, vocab_size=None,
):  # fmt: skip
    """Return the log-prob of each target, (8), and the entropy of each distribution, (9).

    Both are (N,) in float32 (float64 for float64), differentiable in hidden and weight. No tensor
    is larger than (chunk, V), but for LOGITS numbers that stay for the backward. ValueError for
    other shapes and for targets that are not in 0..V-1.

    hidden_NM, weight_vM: (N, M) and (V, M), of one floating dtype.
    targets_N: int64, (N,), in 0..V-1.
    temperature: tau of (8).
    chunk: rows of hidden per matmul. Default: LOGITS / V (on a CPU CACHED_LOGITS / V), but at least
        128, and at most half of N.
    group: vocabulary-parallel. Every rank of the group calls with the same hidden and targets, and
        with its rows of the weight. Every rank gets the same results, the whole gradient of
        hidden, and its rows' gradient of the weight.
    vocab_start: this rank has the v rows of the vocabulary from there on.
    vocab_size: V, for the ranks of a group.
    """
    if hidden_NM.dim() != 2 or targets_N.shape != hidden_NM.shape[:1]:
        got = f"{tuple(hidden_NM.shape)} and {tuple(targets_N.shape)}"
        raise ValueError(f"hidden and targets: expected (N, M) and (N,), got {got}")
    if not temperature > 0 or chunk is not None and chunk < 1:
        raise ValueError(f"temperature and chunk: expected positive, got {temperature} and {chunk}")
    v = len(weight_vM)
    require_tokens_in_vocabulary(targets_N, vocab_size or v, what="target")

    # On a CPU the logits of a chunk stay in the core's cache between the passes over them. At least
    # two chunks: never are all logits in memory.
    cached_chunks = 0
    if chunk is None:
        numbers = CACHED_LOGITS if weight_vM.device.type == "cpu" else LOGITS
        chunk = max(1, min((len(targets_N) + 1) // 2, max(128, numbers // v)))
        if torch.is_grad_enabled():
            cached_chunks = min(LOGITS // (chunk * v), -(-len(targets_N) // chunk))
    options = LogprobOptions(temperature, chunk, cached_chunks, group, vocab_start)
    return TokenLogprobs.apply(hidden_NM, weight_vM, targets_N, options)


class TokenLogprobs(torch.autograd.Function):
    """Compute (8), (9), d logprob(t)/dz = onehot(t) - p, and d entropy/dz = -p (log p + entropy).

    A chunk's logits are dropped, and computed again in the backward, for 2 M V flops a token. The
    exponentials of the last chunks stay, for the backward of log-probs alone. Without them it takes
    1.18 and 1.13 times as long with its backward for V = 512 and 4096.
    """

    @staticmethod
    def forward(ctx, hidden_NM, weight_vM, targets_N, options):
        # A chunk's logits z become four numbers a token: the largest, m; the target's; and the sums
        # total = sum e^(z - m) and weighted = sum (z - m) e^(z - m). Both results come from these,
        # and the backward needs only lse and the mean of z.
        dtype = torch.promote_types(hidden_NM.dtype, torch.float32)
        sums_3N = torch.zeros(3, len(targets_N), dtype=dtype, device=hidden_NM.device)
        largest_N = torch.empty(len(targets_N), dtype=dtype, device=hidden_NM.device)
        ctx.exponentials = {}  # first token of a chunk -> e^(z - m), and its m
        starts = range(0, len(targets_N), options.chunk)

        # Memory for one chunk after the other: new pages would cost as much as what fills them.
        size = min(options.chunk, len(targets_N)), len(weight_vM)
        product_nv = hidden_NM.new_empty(size)
        exponential_nv = sums_3N.new_empty(size)
        for n in starts:
            rows = slice(n, n + options.chunk)
            count = min(options.chunk, len(targets_N) - n)
            z_nv = scaled_logits(hidden_NM[rows], weight_vM, options, product_nv[:count])
            local_n1, owned_n1 = local_targets(targets_N[rows], len(weight_vM), options)
            target_n = torch.where(owned_n1, z_nv.gather(-1, local_n1), 0)[:, 0]

            # In place wherever possible: z becomes z - m, and then (z - m) e^(z - m).
            largest_N[rows] = z_nv.amax(-1)
            shifted_nv = z_nv.sub_(largest_N[rows, None])
            is_cached = n in starts[len(starts) - options.cached_chunks :]
            e_nv = torch.exp(shifted_nv, out=None if is_cached else exponential_nv[:count])
            weighted_n = shifted_nv.mul_(e_nv).sum(-1)
            sums_3N[:, rows] = torch.stack([target_n, e_nv.sum(-1), weighted_n])
            if is_cached:
                ctx.exponentials[n] = e_nv, largest_N[rows, None]
        if options.group is not None:
            largest_N, sums_3N = combine_over_ranks(largest_N, sums_3N, options.group)

        # log p = z - m - log total, so that -sum p log p = log total - weighted / total.
        target_N, total_N, weighted_N = sums_3N
        lse_N = largest_N + total_N.log()
        logprobs_N = target_N - lse_N  # (8)
        shift_N = weighted_N / total_N
        entropy_N = total_N.log() - shift_N  # (9)
        ctx.save_for_backward(hidden_NM, weight_vM, targets_N, lse_N, largest_N + shift_N)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, dlogprobs_N, dentropy_N):
        if torch.is_grad_enabled():  # autograd does not know that lse depends on z
            raise NotImplementedError("log-probs have no second derivative here: no create_graph")
        hidden_NM, weight_vM, targets_N, lse_N, mean_N = ctx.saved_tensors
        options = ctx.options
        # z was divided by the temperature, so its gradient is divided too.
        dlogprobs_N = torch.zeros_like(lse_N) if dlogprobs_N is None else dlogprobs_N
        dlogprobs_N = dlogprobs_N / options.temperature
        dentropy_N = None if dentropy_N is None else dentropy_N / options.temperature

        # NUMERICS: the head's gradient is a sum over chunks, so it is summed in float32 or better.
        # Pinned by tests/full/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
        dhidden_NM = torch.empty_like(hidden_NM)
        dweight_vM = None  # of a frozen head
        if ctx.needs_input_grad[1]:
            dweight_vM = torch.zeros_like(weight_vM, dtype=lse_N.dtype)
        for n in range(0, len(targets_N), options.chunk):
            rows = slice(n, n + options.chunk)
            lse_n1, dlogprobs_n1 = lse_N[rows, None], dlogprobs_N[rows, None]
            if n in ctx.exponentials and dentropy_N is None:
                # p is e^(z - m) times e^(m - lse), so one product gives the part -dlogprob p. A
                # second backward has no exponentials any more.
                e_nv, largest_n1 = ctx.exponentials.pop(n)
                dz_nv = e_nv.mul_(-dlogprobs_n1 * (largest_n1 - lse_n1).exp())
            else:
                z_nv = scaled_logits(hidden_NM[rows], weight_vM, options)
                dentropy_n1 = None if dentropy_N is None else dentropy_N[rows, None]
                dz_nv = dlogits(z_nv, lse_n1, mean_N[rows, None], dlogprobs_n1, dentropy_n1)

            # onehot(t) adds the log-prob's gradient at the target, on the rank that has it.
            local_n1, owned_n1 = local_targets(targets_N[rows], len(weight_vM), options)
            dz_nv.scatter_add_(-1, local_n1, torch.where(owned_n1, dlogprobs_n1, 0))
            dz_nv = dz_nv.to(hidden_NM.dtype)

            # z = hidden weight^T, so its gradient goes to both. One dtype: add without a copy.
            dhidden_NM[rows] = dz_nv @ weight_vM
            if dweight_vM is None:
                continue
            if dweight_vM.dtype == dz_nv.dtype:
                dweight_vM.addmm_(dz_nv.T, hidden_NM[rows])
            else:
                dweight_vM += dz_nv.T @ hidden_NM[rows]
        if options.group is not None:  # a sum over all rows of the weight
            dhidden_NM = parallel.all_reduce_sum(dhidden_NM, options.group)
        if dweight_vM is not None:
            dweight_vM = dweight_vM.to(weight_vM.dtype)
        return dhidden_NM, dweight_vM, None, None


def scaled_logits(hidden_NM, weight_vM, options, out_Nv=None):
    """Return z / tau of (8), (N, v), if possible in out_Nv. It may be overwritten."""
    # NUMERICS: the product is in the model's dtype, everything after it in float32 or better.
    # Pinned by tests/full/test_models.py::test_bf16_logprobs_are_within_twice_plain_torch.
    z_Nv = torch.mm(hidden_NM, weight_vM.T, out=out_Nv)
    z_Nv = z_Nv.to(torch.promote_types(z_Nv.dtype, torch.float32))
    return z_Nv if options.temperature == 1 else z_Nv / options.temperature


def dlogits(z_nv, lse_n1, mean_n1, dlogprobs_n1, dentropy_n1):
    """Return the gradient of z but for the target's: -p (dlogprob + dentropy (log p + entropy)).

    It is written into z. dentropy_n1: None, the entropy is not used.
    """
    factor = -dlogprobs_n1
    if dentropy_n1 is not None:
        # NUMERICS: log p + entropy is z less its mean. Where p is nearly uniform, the former is a
        # difference of numbers near log V, with the same rounding for all of them. Pinned by
        # tests/full/test_models.py::test_a_nearly_uniform_entropy.
        factor = factor + dentropy_n1 * mean_n1
        factor = torch.addcmul(factor, z_nv, dentropy_n1, value=-1)
    return z_nv.sub_(lse_n1).exp_().mul_(factor)


def local_targets(targets_N, rows, options):
    """Return targets relative to this rank's vocabulary rows, and which of them it owns, (N, 1).

    Targets of other ranks become 0, so that a gather stays in range.
    """
    local_N1 = targets_N[:, None] - options.vocab_start
    owned_N1 = (local_N1 >= 0) & (local_N1 < rows)
    return torch.where(owned_N1, local_N1, 0), owned_N1


def combine_over_ranks(largest_N, sums_3N, group):
    """Return the largest logit and the sums around it, over the vocabulary rows of all ranks."""
    # COMM: two messages whatever the chunks, which may differ: shards of a vocabulary are uneven.
    # Pinned by tests/full/test_checkpoints.py::test_vocabulary_parallel_equals_one_process.
    all_N = largest_N.clone()
    dist.all_reduce(all_N, dist.ReduceOp.MAX, group)

    # Sums around this rank's largest logit m become sums around the largest of all, m': each term
    # shrinks by e^(m - m'), and (z - m') is (z - m) + (m - m').
    target_N, total_N, weighted_N = sums_3N
    lower_N = largest_N - all_N
    weighted_N = weighted_N + lower_N * total_N
    shrink_N = lower_N.exp()
    sums_3N = torch.stack([target_N, total_N * shrink_N, weighted_N * shrink_N])
    dist.all_reduce(sums_3N, group=group)
    return all_N, sums_3N
