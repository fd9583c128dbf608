"""Experts: adds a fast product and balanced loads to `models.SparseMLP`.

    (6')  experts = the K largest of p_e + b_e, where the bias b evens out the experts' load
    (10)  balance = coef sum_s E / (K T_s^2) sum_e n_se sum_(i in s) p_ie, over sequences s of T_s
                    tokens, n_se of whose T_s K choices fell on e (a constant for the gradient)
    (11)  b_e     = rate * (steps in which e had less than the mean load - steps it had more)

Not here: shared experts.

Letters:  E experts   K of them for a token   I width of an expert   M width of the model   N tokens
J pairs of a sequence and a token   L sparse layers

References: DeepSeek-V3 arXiv:2412.19437, equations 16 to 20; the bias (11) arXiv:2408.15664.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import models


class Experts(models.Experts):
    """Adds to `models.Experts`: the product of all experts by one kernel."""

    def forward(self, x_NM, counts_E, /):
        gate_NI = self.product("gate_proj", x_NM, counts_E)
        up_NI = self.product("up_proj", x_NM, counts_E)
        return self.product("down_proj", self.act(gate_NI) * up_NI, counts_E)

    def product(self, name, x_NM, counts_E, /):
        """Return the rows times their experts' matrices of this name."""
        return grouped_linear(x_NM, getattr(self, name), counts_E)


class SparseMLP(models.SparseMLP):
    """Adds to `models.SparseMLP`: lower precision, a balance loss, a bias of the router.

    The bias b = rate * votes affects the selection only. (11) counts the votes.
    """

    experts_class = Experts

    def __init__(self, config):
        super().__init__(config)
        self.layer = None  # its number, which `on_routing` is told
        self.rate = config.router_bias_rate  # 0: the router has no bias
        # NUMERICS: votes are whole steps of b. b is not stored, so no cast of the model rounds it.
        # Pinned by tests/full/test_families.py::test_the_router_bias_survives_bfloat16.
        if self.rate:
            self.register_buffer("votes", torch.zeros(config.num_experts, dtype=torch.int64))

    def forward(self, x_BSM, /, on_routing=None):
        K = self.config.num_experts_per_tok
        x_NM = x_BSM.flatten(0, -2)
        probs_NE, topk_ids_NK, topk_weights_NK = self.route(x_NM)

        # `models.SparseMLP` finds the choices of each expert in a table (E, N, K) and adds up the
        # outputs one by one. Sorting needs no table. Two tokens with K = 2 of E = 3 experts:
        #
        #     topk_ids_NK [[2, 0], [1, 2]]   flattened 2 0 1 2
        #     order       [1, 2, 0, 3]       copy 1 goes to expert 0, copy 2 to 1, 0 and 3 to 2
        #     counts_E    [1, 1, 2]          and order.argsort() = [2, 0, 1, 3] is the way back
        #
        # NUMERICS: permutations and then one sum over K: nothing is added in the order that threads
        # arrive, forward or backward. Pinned by
        # tests/full/test_families.py::test_moe_is_repeatable.
        order = topk_ids_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(topk_ids_NK.flatten(), minlength=probs_NE.shape[1])
        copies_nM = x_NM[:, None].expand(-1, K, -1).flatten(0, 1)
        out_nM = self.experts(copies_nM.index_select(0, order), counts_E)
        out_NKM = out_nM.index_select(0, order.argsort()).unflatten(0, (-1, K))
        out_BSM = (out_NKM * topk_weights_NK[:, :, None]).sum(1).view_as(x_BSM)  # (6')

        # The balance loss (10) is not returned. `AttachLoss` returns the output as it is, and its
        # backward adds the gradient of the loss, in whichever pipeline stage this layer runs.
        loss = on_routing(probs_NE, topk_ids_NK, layer=self.layer) if on_routing else None
        return out_BSM if loss is None else AttachLoss.apply(out_BSM, loss)

    def route(self, x_NM, /):
        """Return p (N, E), the ids of the selected experts (N, K), and their weights (N, K)."""
        # NUMERICS: softmax and its sum in float32 or better, weights cast back, as the models were
        # trained. Pinned by tests/full/test_families.py::test_the_router_works_in_float32.
        wide = torch.promote_types(x_NM.dtype, torch.float32)
        probs_NE = self.gate(x_NM).softmax(-1, dtype=wide)
        biased_NE = probs_NE + self.rate * self.votes if self.rate else probs_NE
        topk_ids_NK = biased_NE.topk(self.config.num_experts_per_tok, dim=-1).indices
        topk_weights_NK = probs_NE.gather(-1, topk_ids_NK)
        if self.config.norm_topk_prob:
            topk_weights_NK = topk_weights_NK / topk_weights_NK.sum(-1, keepdim=True)
        return probs_NE, topk_ids_NK, topk_weights_NK.to(x_NM.dtype)


def grouped_linear(x_NM, weight_EIM, counts_E, /):
    """Return x[n] @ weight[e(n)].T, (N, I): the first counts[0] rows go to expert 0, and so on.

    counts_E: int64, (E,), sums to N. Zeros are fine.
    """
    # torch has this as one kernel, for some dtypes, rows of 16 bytes, and one row at least.
    dtypes = [torch.bfloat16]
    if x_NM.device.type == "cpu":
        dtypes += [torch.float32, torch.float16]
    aligned = all(size * x_NM.element_size() % 16 == 0 for size in weight_EIM.shape[1:])
    if x_NM.dtype == weight_EIM.dtype and x_NM.dtype in dtypes and aligned and len(x_NM) > 0:
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_NM, weight_EIM.transpose(1, 2), offs=offsets_E)
    # The loop is its definition.
    parts = zip(x_NM.split(counts_E.tolist()), weight_EIM, strict=True)
    return torch.cat([F.linear(x_nM, weight_IM) for x_nM, weight_IM in parts])


class AttachLoss(torch.autograd.Function):
    """Return x as it is, and add the gradient of a loss to every backward that reaches x.

    So a layer adds a loss of its own wherever it runs, in a pipeline stage too.
    """

    @staticmethod
    def forward(ctx, x, loss):
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.one


class Balance:
    """(10) over the sparse layers of one forward: `hidden(.., on_routing=Balance(..))`.

    sequence_J, token_J: int64, (J,). Pair j says that sequence sequence_J[j] holds the forward's
        token token_J[j], counted over its B x S tokens. A token that several sequences share has a
        pair for each of them; padding has none. Default of token_J: 0..J-1.
    coef: the factor of (10).
    num_sequences: how many sequences there are on all ranks of `groups`. Default: the largest + 1.
    groups: process groups whose ranks share the tokens of each sequence, one group for each way of
        sharing. A rank gives the pairs of its own tokens, and gets terms of a sum over the ranks.

    The layers attach the loss to their outputs, so every backward adds its gradient. It is a sum
    over sequences, so micro-batches and ranks add up. After the forward, losses[layer] is (10),
    detached, and counts[layer] (E,) the tokens that each expert got, for `update_router_bias`.
    """

    def __init__(self, sequence_J, /, token_J=None, *, coef=0.0, num_sequences=None, groups=()):
        if token_J is None:
            token_J = torch.arange(len(sequence_J), device=sequence_J.device)
        if sequence_J.shape != token_J.shape or sequence_J.dim() != 1:
            found = f"{tuple(sequence_J.shape)} and {tuple(token_J.shape)}"
            raise ValueError(f"sequences and tokens: expected two tensors (J,), got {found}")
        if num_sequences is None:
            num_sequences = int(sequence_J.max()) + 1 if len(sequence_J) else 0
        self.sequence_J = sequence_J
        self.token_J = token_J
        self.coef = coef
        self.num_sequences = num_sequences
        self.groups = groups
        self.losses = {}  # by layer: a layer that is computed again overwrites its own
        self.counts = {}

    @torch.compiler.disable  # each forward has an object of its own, for which nothing is compiled
    def __call__(self, probs_NE, topk_ids_NK, /, *, layer):
        # n_se of (10): each pair (sequence, token) adds the token's K choices to its sequence.
        N, E = probs_NE.shape
        K = topk_ids_NK.shape[1]
        chosen_NE = probs_NE.new_zeros(N, E).scatter_(1, topk_ids_NK, 1)
        n_SE = probs_NE.new_zeros(self.num_sequences, E)
        n_SE.index_add_(0, self.sequence_J, chosen_NE[self.token_J])
        self.counts[layer] = n_SE.sum(0)
        if not self.coef or not self.num_sequences:
            return None

        # COMM: n is about whole sequences, and this rank has seen some tokens of them. All ranks of
        # a group run the same layers of the same micro-batches, and recompute the same layers, so
        # every all-reduce meets its counterparts. p needs no message, as each rank attaches the
        # loss of its own tokens. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        for group in self.groups:
            dist.all_reduce(n_SE, group=group)

        # All but p is a constant: collect it for each token and expert, then one product with p.
        length_S1 = n_SE.sum(1, keepdim=True) / K
        factor_SE = self.coef * E / K * n_SE / length_S1.square().clamp(min=1)
        factor_NE = torch.zeros_like(chosen_NE)
        factor_NE.index_add_(0, self.token_J, factor_SE[self.sequence_J])
        loss = (factor_NE * probs_NE).sum()  # (10)
        self.losses[layer] = loss.detach()
        return loss


@torch.no_grad()
def update_router_bias(model, counts, /):
    """Move the routers' biases by (11), after an optimizer step. ValueError if there are none.

    counts: {layer: (E,)}, the tokens of each expert in the whole step, over all ranks. A stage of
        a pipeline has only some of the layers.
    """
    if not model.config.router_bias_rate:
        raise ValueError("expected a model with a router_bias_rate, got one without")
    for module in model.modules():
        if isinstance(module, SparseMLP):
            counts_E = counts[module.layer].double()
            step_E = (counts_E.mean() - counts_E).sign().long()  # (11)
            module.votes += step_E.to(module.votes.device)


class ExpertLoads:
    """Count which experts the tokens of a step go to: balance loss, loads, the routers' bias.

    `begin` and `end` enclose one forward_backward. A token that several trajectories share in a
    tree counts once for each of them. For a model without experts all of it does nothing.

    counts_LE: tokens of each expert in an optimizer step, for L layers with E experts each.
    parts: for each micro-batch {layer: loss} and {layer: tokens of each expert}, on this rank.
    """

    def __init__(self, config, model, device):
        self.device = device
        self.coef = config.balance_coef
        self.rate = config.router_bias_rate
        self.layers = list(model.config.sparse_layers)
        self.counts_LE = torch.zeros(len(self.layers), model.config.num_experts).double()
        self.coef_of_one = 0.0
        self.parts = []

    def begin(self, batch, num_sequences=None):
        """Begin a forward_backward of this rank's batch. num_sequences: of the step, all ranks."""
        # The mean of the balance losses is over the whole step: so nothing depends on the cut.
        self.parts = []
        if self.coef and self.layers:
            if num_sequences is None:
                count = torch.tensor(float(len(batch)), dtype=torch.float64, device=self.device)
                dist.all_reduce(count)
                num_sequences = count.item()
            self.coef_of_one = self.coef / max(1, num_sequences)

    def balance_of_row(self, sequence_j, token_j, *, num_sequences, groups):
        """Return the callback of a micro-batch's sparse layers; see `PackedBatches.routing`."""
        how = dict(coef=self.coef_of_one, num_sequences=num_sequences, groups=groups)
        balance = Balance(sequence_j, token_j, **how)
        # The layers fill these in as they run. A layer that runs again fills in the same.
        self.parts.append((balance.losses, balance.counts))
        return balance

    def end(self) -> dict:
        """Return the metrics of a forward_backward. Collective."""
        if not self.layers:
            return {}

        # A rank has counted its own tokens in its own layers, so the sum over all ranks is the
        # whole. A number of tokens is exact in float64, so all ranks move the biases identically.
        sums = torch.zeros(1 + self.counts_LE.numel(), dtype=torch.float64, device=self.device)
        counts_LE = sums[1:].view_as(self.counts_LE)
        for losses, counts in self.parts:
            for loss_of_layer in losses.values():
                sums[0] += loss_of_layer
            for layer, counts_E in counts.items():
                counts_LE[self.layers.index(layer)] += counts_E
        dist.all_reduce(sums)
        counts_LE = counts_LE.cpu()
        self.counts_LE += counts_LE

        # 1: all experts of a layer got as much; E / K: every token chose the same experts.
        load_L = counts_LE.amax(1) / counts_LE.mean(1).clamp(min=1 / counts_LE.shape[1])
        metrics = {"experts/load_max": load_L.max().item()}
        if self.coef:
            metrics["balance/loss"] = sums[0].item()
        return metrics

    def update_bias(self, model):
        """Move the routers' biases by (11), after an optimizer step."""
        if self.rate:
            update_router_bias(model, dict(zip(self.layers, self.counts_LE)))


def conflicts(c) -> list:
    """Return (is it wrong?, the error) pairs about the flags of experts."""
    return [
        (c.critic == "separate" and (c.balance_coef or c.router_bias_rate),
         "--critic separate has no --balance-coef and no --router-bias-rate, which balance the "
         "policy's experts alone"),
        (c.balance_coef and c.tree != "disabled",
         "--tree has no --balance-coef, a loss of each sequence by itself; use "
         "--router-bias-rate, or leave --tree out"),
    ]  # fmt: skip
