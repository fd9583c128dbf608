"""Route tokens to experts, and move a bias of the router that evens out the experts' loads.

    (6')  experts = the K largest of p_e + b_e, where the bias b evens out the experts' load
    (11)  b_e     = rate * (steps in which e had less than the mean load - steps it had more)

Not here: shared experts, a load-balancing loss.

Letters:  E experts   K of them for a token   I width of an expert   M width of the model   N tokens
L sparse layers

References: DeepSeek-V3 arXiv:2412.19437, equation 16; the bias (11) arXiv:2408.15664.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import models
import parallel


class Experts(models.Experts):
    """Multiply the rows of all experts by one kernel. `models.Experts` takes 1.1 times as long."""

    def forward(self, x_NM, counts_E, /):
        gate_NI = self.product("gate_proj", x_NM, counts_E)
        up_NI = self.product("up_proj", x_NM, counts_E)
        return self.product("down_proj", self.act(gate_NI) * up_NI, counts_E)

    def product(self, name, x_NM, counts_E, /):
        """Return the rows times their experts' matrices of this name."""
        return grouped_linear(x_NM, getattr(self, name), counts_E)


class SparseMLP(models.SparseMLP):
    """Run each token through K experts, in any dtype, with a bias of the router.

    The bias b = rate * votes affects the selection only. (11) counts the votes.
    """

    experts_class = Experts

    def __init__(self, config):
        super().__init__(config)
        self.layer = None  # its number, which a `Routing` gets
        self.rows_group = None  # ranks that have the same rows, and send a share of them each
        self.rate = config.router_bias_rate  # 0: the router has no bias
        # NUMERICS: votes are whole steps of b. b is not stored, so no cast of the model rounds it.
        # Pinned by tests/full/test_families.py::test_the_router_bias_survives_bfloat16.
        if self.rate:
            self.register_buffer("votes", torch.zeros(config.num_experts, dtype=torch.int64))

    def forward(self, x_BSM, /, on_routing=None):
        x_NM = rows_nM = x_BSM.flatten(0, -2)
        if self.rows_group is not None:
            # 5 rows on 2 ranks are 0 1 2 and 3 4 -, where - is a row of zeros. Its result is cut
            # off below.
            padded_NM = F.pad(x_NM, (0, 0, 0, -len(x_NM) % self.rows_group.size()))
            rows_nM = parallel.own_chunk(padded_NM, self.rows_group)
        probs_nE, topk_ids_nK, topk_weights_nK = self.route(rows_nM)
        if on_routing:
            on_routing(probs_nE, topk_ids_nK, layer=self.layer)
        # NUMERICS: nothing is added in the order that threads arrive, forward or backward. Pinned
        # by tests/full/test_families.py::test_moe_is_repeatable.
        out_nM = self.run_experts(rows_nM, topk_ids_nK, topk_weights_nK)  # (6')
        if self.rows_group is not None:
            # COMM: an all-gather over the t ranks, which have the same number of rows. Pinned by
            # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
            out_nM = parallel.all_gather(out_nM, self.rows_group)[: len(x_NM)]
        return out_nM.view_as(x_BSM)

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


class Routing:
    """Receive a forward's routing: `hidden(.., on_routing=Routing())`, a call a sparse layer."""

    def __call__(self, probs_NE, topk_ids_NK, /, *, layer):
        """Take the router's probabilities, and the ids of the experts that each token goes to."""
        raise NotImplementedError


class RoutingCounts(Routing):
    """Count which experts tokens go to, in a forward.

    copies_N: int64, (N,). The number of sequences that have each of the forward's B x S tokens. In
        a tree it is any number. It is 0 for padding, and for a token that another rank counts.

    After the forward, counts[layer] is int64, (E,), as `update_router_bias` gets it.
    """

    def __init__(self, copies_N, /):
        self.copies_N = copies_N
        self.counts = {}  # by layer: a layer that is computed again overwrites its own

    @torch.compiler.disable  # each forward has an object of its own, for which nothing is compiled
    def __call__(self, probs_NE, topk_ids_NK, /, *, layer):
        copies_NK = self.copies_N[:, None].expand_as(topk_ids_NK)
        counts_E = self.copies_N.new_zeros(probs_NE.shape[1])
        self.counts[layer] = counts_E.index_add_(0, topk_ids_NK.flatten(), copies_NK.flatten())


@torch.no_grad()
def update_router_bias(model, counts, /):
    """Move the routers' biases by (11), after an optimizer step.

    counts: {layer: (E,)}, the tokens of each expert in the whole step, over all ranks. A stage of
        a pipeline has only some of the layers.
    """
    for module in model.modules():
        if isinstance(module, SparseMLP):
            counts_E = counts[module.layer].double()
            step_E = (counts_E.mean() - counts_E).sign().long()  # (11)
            module.votes += step_E.to(module.votes.device)


class ExpertLoads:
    """Count which experts the tokens of a step go to: for the loads, and for the routers' bias.

    `begin` and `end` enclose one forward_backward. A token that several trajectories share in a
    tree counts once for each of them. Nothing happens for a model without experts.

    counts_LE: tokens of each expert in an optimizer step, for L layers with E experts each.
    parts: the `RoutingCounts` of each micro-batch on this rank.
    """

    def __init__(self, config, model, device):
        self.device = device
        self.rate = config.router_bias_rate
        self.layers = list(model.config.sparse_layers)
        self.counts_LE = torch.zeros(len(self.layers), model.config.num_experts).double()
        self.parts = []

    def begin(self):
        """Begin a forward_backward."""
        self.parts = []

    def of_micro_batch(self, copies_N) -> RoutingCounts:
        """Return the callback of a micro-batch's sparse layers; see `RoutingCounts`."""
        self.parts.append(RoutingCounts(copies_N))
        return self.parts[-1]

    def end(self) -> dict:
        """Return the metrics of a forward_backward. Collective."""
        if not self.layers:
            return {}

        # A rank has counted its own tokens in its own layers, so the sum over all ranks is the
        # whole. A number of tokens is exact in float64, so all ranks move the biases identically.
        counts_LE = torch.zeros_like(self.counts_LE, device=self.device)
        for part in self.parts:
            for layer, counts_E in part.counts.items():
                counts_LE[self.layers.index(layer)] += counts_E
        dist.all_reduce(counts_LE)
        counts_LE = counts_LE.cpu()
        self.counts_LE += counts_LE

        # 1: every expert of the layer got the same number of tokens. E / K: every token was sent
        # to the same experts.
        load_L = counts_LE.amax(1) / counts_LE.mean(1).clamp(min=1 / counts_LE.shape[1])
        return {"experts/load_max": load_L.max().item()}

    def update_bias(self, model):
        """Move the routers' biases by (11), after an optimizer step."""
        if self.rate:
            update_router_bias(model, dict(zip(self.layers, self.counts_LE)))


class CallsInStep:
    """Keep ranks in step that exchange expert rows: all make the same number of model calls.

        rank 0   call  call  call  call  end           a rank that has ended feeds one unused token
        rank 1   call  call  end   ....  ....          for each call of another rank
    """

    def __init__(self, group, device):
        self.group = group
        self.device = device
        self.has_ended = False

    def begin(self):
        """Wait until all ranks are at a model call. `Transformer.hidden` begins with it."""
        if not self.has_ended:
            self.count_calls(1)

    def count_calls(self, own) -> int:
        """Return the number of ranks that are at a model call; own: 1 if this rank is, else 0."""
        # COMM: an all-reduce of one number over the e ranks before each model call, so that a rank
        # which has ended knows whether the others need its experts once more. Pinned by
        # tests/full/test_equivalence.py::test_a_row_is_the_run_of_one_process.
        count = torch.tensor(own, device=self.device)
        dist.all_reduce(count, group=self.group)
        return int(count)


@torch.no_grad()
def end_together(model) -> None:
    """Serve this rank's experts until the other ranks have decoded their rows too."""
    calls = getattr(model, "calls", None)  # a model of the five has none
    if calls is not None:
        token_11 = torch.zeros(1, 1, dtype=torch.int64, device=calls.device)
        calls.has_ended = True
        while calls.count_calls(0):
            model.hidden(token_11)
        calls.has_ended = False
