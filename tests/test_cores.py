"""Each of the five files notices a slip, in a folder with nothing but the five."""

import copy
import math
import shutil

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, complaint_of, shortened
from test_house import FIVE
from test_ranks import as_script, ranks

import models
import parallel
import ring_attention
import train_grpo

WORDS = {"train_grpo": ("--steps", "1")}  # after its check it trains


def copy_the_five(folder):
    """Put the five files, and nothing else, into a folder."""
    for path in FIVE:
        shutil.copy(path, folder)


SLIPS = [  # a line of a file, and a wrong one
    ("ring_attention", "    return scale * (ds_BHqk @ k_BHkD),", "    return (ds_BHqk @ k_BHkD),"),
    ("models", "weight_NK / weight_NK.sum(-1", "weight_NK / weight_NK.sum(0"),
    ("parallel", 'layout(name, grid)["partial"]', 'layout(name, grid)["replicas"]'),
    ("tree_attention", "backward(tensors, gradients)", "backward(tensors[0], gradients[0])"),
    ("train_grpo", "tokens[:, positions_s + 1]", "tokens[:, positions_s]"),
    ("train_grpo", "len(self.tokens) + len(reply)", "len(self.tokens)"),
    ("train_grpo", "torch.minimum(ratio_N", "torch.maximum(ratio_N"),
    ("train_grpo", "optim_step(trainer.learning_rate(step))", "optim_step(trainer.config.lr)"),
    ("tree_attention", "visit(child, state, path)", "visit(child, None, path)"),
    ("tree_attention", "found[i], entropies = torch", "entropies, found[i] = torch"),
    ("train_grpo", "[H[e.mask] for e, (_, H)", "[H[e.mask] for e, (H, _)"),
    # A layer's window or its scale is dropped.
    ("ring_attention", "layout = world, q_2BHnD.shape[3], window", "layout = world, 8, math.inf"),
    ("models", "visible_keys(slot_BS, slot_1C, window)", "visible_keys(slot_BS, slot_1C)"),
    ("tree_attention", "apply(q, scale, window,", "apply(q, scale, None,"),
    ("train_grpo", "group=ring, scale=scale, window=window", "group=ring, scale=scale"),
    ("ring_attention", "v_BHnD, visible_nn, scale)", "v_BHnD, visible_nn, 0.41)"),
    ("ring_attention", "torch.cat(positions), window)", "torch.cat(positions), math.inf)"),
    ("ring_attention", "visible_keys(order, order, window)", "visible_keys(order, order, 64)"),
    ("models", "v_BGSD, visible_B1SS, scale=scale)", "v_BGSD, visible_B1SS)"),
    ("tree_attention", "v, near_NN, scale=scale,", "v, near_NN,"),
    ("tree_attention", "v, near_NN, scale=scale,", "v, visible_NN, scale=scale,"),
    ("tree_attention", "before_Gr = lse_Gr", "before_Gr = 0 * lse_Gr"),
    ("train_grpo", "group=ring, scale=scale, window=window", "group=ring, window=window"),
]


@pytest.mark.parametrize("number", shortened(range(len(SLIPS)), 4, 5, 11, 12, 13, 14))
def test_a_file_with_a_slip_exits_with_one(number, tmp_path):
    stem, old, new = SLIPS[number]
    copy_the_five(tmp_path)
    file = tmp_path / f"{stem}.py"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    code, out, _ = as_script(file.name, *WORDS.get(stem, ()), cwd=tmp_path)
    assert code == 1 and "solved" not in out


def check_in_a_part():
    """Check a ring of one rank, or of ranks 1 to 3, which are ranks 0 to 2 of their group."""
    return ring_attention.check(dist.new_subgroups_by_enumeration([[0], [1, 2, 3]])[0])


def test_a_ring_may_be_a_part_of_the_ranks():
    errors = ring_attention.launch(4, check_in_a_part)
    assert all(error <= 1e-10 and multiple <= 1.3 for error, multiple in errors)  # NaN is not


def costs_of_ways():
    """{way: what a rank sends in its forward and in its backward, in bytes}, and its blocks.

    Of 8 query heads that read one key head, 8 tokens a rank, in bfloat16. Blocks: how many without
    a mask and with one, with and without a window of 5.
    """
    sent, blocks, attend = [], [], ring_attention.block_attention
    post, trade = dist.batch_isend_irecv, dist.all_to_all_single

    def counted_post(ops):
        sent.extend(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return post(ops)

    def counted_trade(received, x, group):
        sent.append(x[1:].nbytes)  # one of its parts stays
        return trade(received, x, group=group)

    def counted_attention(q, k, v, visible, scale):
        assert q.shape[2] == k.shape[2] == 4  # a pair of chunks
        blocks.append(visible is not None)
        return attend(q, k, v, visible, scale)

    dist.batch_isend_irecv, dist.all_to_all_single = counted_post, counted_trade
    ring_attention.block_attention = counted_attention
    found = {}
    for way in (ring_attention.ring_attention, ring_attention.allgather_attention,
                ring_attention.ulysses_attention):  # fmt: skip
        q, k, v = (torch.ones(1, n, 8, 2).bfloat16().requires_grad_() for n in (8, 1, 1))
        sent.clear()
        out = way(q, k, v)
        forward = sum(sent)
        out.sum().backward()
        found[way.__name__] = [forward, sum(sent) - forward]
    causal = [blocks.count(False), blocks.count(True)]
    blocks.clear()
    ring_attention.ring_attention(q, k, v, window=5)
    return found, causal, [blocks.count(False), blocks.count(True)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_ways_send_and_compute_what_the_file_says(world):
    """The table of its section 4, and 2 W + 1 of 4 W pairs of chunks, two of them with a mask."""
    H, G, W, unit = 8, 1, world, 8 * 2  # numbers of B s D
    block, total = 2 * G * (W - 1) * unit * 2, 2 * G * unit * 4
    traded = 2 * (H + math.lcm(G, W)) * (W - 1) * unit * 2 // W
    table = {"ring_attention": [block, block + total * W], "ulysses_attention": [traded, traded]}
    table["allgather_attention"] = [block, total * (W - 1)]
    for rank, (found, causal, near) in enumerate(ring_attention.launch(world, costs_of_ways)):
        assert found == table
        assert causal == [2 * W - 1, 2]
        assert near == [0, 4 if rank else 3]  # a chunk sees itself and the one before it


def dtypes_of_messages():
    """Return the dtypes of what a rank sends in a step of the ring: of blocks, and of sums."""
    dtypes = []
    shift = ring_attention.shift
    ring_attention.shift = lambda x, group: dtypes.append(x.dtype) or shift(x, group)
    q, k, v = (torch.ones(1, n, 2, 2, dtype=torch.bfloat16, requires_grad=True) for n in (2, 1, 1))
    ring_attention.ring_attention(q, k, v).sum().backward()
    return dtypes


def test_the_ring_sends_no_message_that_nobody_needs():
    """Of W ranks, one sends W - 1 blocks forward, W - 1 blocks again backward, and W sums."""
    block, total = torch.bfloat16, torch.float32
    sent = [block, block, block, total, block, total, total]
    assert ring_attention.launch(3, dtypes_of_messages) == [sent] * 3


# What the file's own check leaves out. Its model fits on 3 ranks by layers alone: ZeRO-1 divides 16
# entries by d and c. p2d2t2 is the example of the file.
MORE_PLANS = {
    3: ["p3"],
    4: ["c4", "d2c2", "p2c2", "d2t2 sp", "d4e2", "d4e4", "p2d2e2", "p2d2 fsdp", "c2d2 fsdp"],
    8: ["p2d2t2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", MORE_PLANS)
def test_more_plans_equal_one_process(world):
    plans = {world: MORE_PLANS[world]}
    errors = parallel.check_plans(plans, parallel.Training, parallel.check_model())
    assert all(error <= 1e-10 for error in errors.values()), errors  # NaN is not


def sharded_linears(rank):
    """Gradients of two linears with 5 and 2 rows, of which 3 ranks have 2 2 1 and 1 1 0."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2)).double()
    whole = copy.deepcopy(layer)
    x = torch.randn(3, 6, 4).double()
    parallel.fully_shard_layer(layer, dist.group.WORLD)
    layer(x[rank]).square().sum().backward()
    whole(x).square().sum().backward()
    pairs = zip(layer.parameters(), whole.parameters(), strict=True)
    assert min(q.grad.abs().min() for q in whole.parameters()) > 1e-3
    return [(p.grad - parallel.own_chunk(q.grad, None)).abs().sum().item() for p, q in pairs]


def test_ranks_need_not_divide_the_rows_of_a_sharded_layer(tmp_path):
    assert all(max(errors) <= 1e-12 for errors in ranks(tmp_path, 3, sharded_linears))


@pytest.mark.quick
def test_a_sharded_layer_sends_two_all_gathers_and_one_reduce_scatter(process_group, monkeypatch):
    """However many parameters it has: here 18."""
    sent = []

    def counted(name, call):
        return lambda *given, **options: sent.append(name) or call(*given, **options)

    for name in ("all_gather", "reduce_scatter"):
        monkeypatch.setattr(dist, name, counted(name, getattr(dist, name)))
    model = parallel.check_model()
    parallel.fully_shard_layer(model.model.layers[0], dist.group.WORLD)
    model.hidden(torch.arange(8)[None]).sum().backward()
    assert sent == ["all_gather", "all_gather", "reduce_scatter"]


@pytest.mark.quick
@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
@pytest.mark.parametrize("shapes, options, why", [
    (((1, 4, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2)), {}, "s even, got [(1, 4, 3, 2),"),
    (((1, 3, 4, 2), (1, 2, 4, 2), (1, 2, 4, 2)), {}, "H divisible by G"),
    (((1, 4, 4, 2), (1, 2, 4, 2), (1, 1, 4, 2)), {}, "expected q (B, H, s, D)"),
    (((2, 4, 4, 2), (1, 2, 4, 2), (1, 2, 4, 2)), {}, "expected q (B, H, s, D)"),
    (((1, 4, 4, 2), (1, 2, 2, 2), (1, 2, 2, 2)), {}, "expected q (B, H, s, D)"),
    (((1, 4, 4, 2),) * 3, {"window": 0}, "a window of at least 1 token, got 0"),
    (((1, 4, 4, 2),) * 3, {"window": -1}, "a window of at least 1 token, got -1"),
    (((1, 4, 4, 2),) * 3, {"group": dist.GroupMember.NON_GROUP_MEMBER}, "a group with rank 0"),
])  # fmt: skip
def test_attention_refuses_what_does_not_fit(process_group, monkeypatch, way, shapes, options, why):
    """Before it sends anything."""
    for name in ("batch_isend_irecv", "all_to_all_single"):
        monkeypatch.setattr(dist, name, None)
    attention = getattr(ring_attention, f"{way}_attention")
    assert why in complaint_of(attention, *map(torch.ones, shapes), **options)


@pytest.mark.quick
def test_ulysses_needs_query_heads_for_every_rank(process_group, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    q = torch.ones(1, 6, 4, 2)
    said = complaint_of(ring_attention.ulysses_attention, q, q, q)
    assert said == "expected query heads in a multiple of the 4 ranks, got 6"


@pytest.mark.quick
@pytest.mark.parametrize("way", ["ring", "allgather", "ulysses"])
def test_a_scale_of_zero_is_the_mean_of_what_is_seen(process_group, way):
    q, k, v = torch.randn(3, 1, 2, 4, 2, dtype=torch.float64)
    mean = v.cumsum(2) / torch.arange(1, 5)[:, None]
    out = getattr(ring_attention, f"{way}_attention")(q, k, v, scale=0.0)
    torch.testing.assert_close(out, mean)
    visible = torch.ones(4, 4, dtype=torch.bool).tril()
    torch.testing.assert_close(ring_attention.attention_definition(q, k, v, visible, 0.0)[0], mean)


@pytest.mark.quick
@pytest.mark.parametrize("given, why", [
    ((30, 0, 4), "divisible by 2 * world = 8 and a rank of 0 to 3, got length 30 and rank 0"),
    ((4, 0, 4), "got length 4"), ((16, 4, 4), "and rank 4"), ((16, -1, 4), "and rank -1"),
])  # fmt: skip
def test_a_zigzag_says_what_it_needs(given, why):
    assert why in complaint_of(ring_attention.zigzag_indices, *given)


@pytest.mark.quick
@pytest.mark.parametrize("plan, why", [
    ("t2 fsdp", "without t or e"), ("d2e2 fsdp", "without t or e"), ("t2e2", "expected sp"),
    ("d2d2", "a plan such as"), ("d0", "a plan such as"), ("x2", "a plan such as"),
])  # fmt: skip
def test_a_plan_that_would_compute_something_else_is_refused(process_group, plan, why):
    assert why in complaint_of(parallel.Grid, plan)


@pytest.mark.quick
def test_a_sharded_head_has_the_defaults_of_a_whole_one():
    heads = models.Transformer.logprobs, parallel.vocab_parallel_logprobs
    assert [head.__kwdefaults__ for head in heads] == [{"temperature": 1.0}] * 2


@pytest.mark.quick
@pytest.mark.parametrize("token", [-1, 5, 6])
def test_a_word_that_there_is_not_is_refused_by_a_sharded_embedding(process_group, token):
    embedding = torch.nn.Embedding(5, 2)
    sharded = parallel.VocabParallelEmbedding(embedding, dist.group.WORLD, False)
    word = torch.tensor([[4]])
    assert sharded(word).equal(embedding(word))
    with pytest.raises(IndexError):
        sharded(torch.tensor([[token]]))


@pytest.mark.quick
def test_a_draw_decides_with_all_of_its_digits(monkeypatch):
    """In float32 the draw 1 - 2**-50 would be 1."""
    draws = []
    sample = models.sample

    def sample_and_note(logits_BV, uniform_B, /, **given):
        draws.append(uniform_B)
        return sample(logits_BV, uniform_B, **given)

    monkeypatch.setattr(models, "sample", sample_and_note)
    model = models.Transformer(models.ModelConfig(5, 4, 4, 1, 2, 1, 2))
    models.generate(model, [models.Row([0], [1 - 2**-50])], max_new_tokens=1)
    assert draws[0].tolist() == [1 - 2**-50]


@pytest.mark.quick
def test_greedy_decoding_needs_no_draws_and_sampling_says_how_many():
    model = models.Transformer(models.ModelConfig(5, 4, 4, 1, 2, 1, 2))
    row = models.Row([1, 2, 3])
    models.generate(model, [row], max_new_tokens=4, temperature=0.0)
    assert len(row.tokens) == 7
    rows = [models.Row([1], [0.5] * 4), models.Row([1], [0.5] * 3)]
    assert "expected 4 draws for each row, got 3" in complaint_of(
        models.generate, model, rows, max_new_tokens=4)


@pytest.mark.quick
def test_a_policy_begins_with_norms_of_one_and_small_matrices():
    config = train_grpo.Config()
    task = train_grpo.Guess(config)
    weights, again = (list(train_grpo.build_policy(config, task).parameters()) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(weights, again, strict=True))
    assert all((weight == 1).all() for weight in weights if weight.dim() == 1)
    entries = torch.cat([weight.flatten() for weight in weights if weight.dim() == 2])
    assert entries.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.quick
def test_an_evaluation_is_the_fraction_of_solved_prompts(process_group, monkeypatch):
    config = train_grpo.Config(eval_prompts=4)
    task = train_grpo.Guess(config)
    trainer = train_grpo.Trainer(config, train_grpo.build_policy(config, task), parallel.Grid("d1"))
    source = train_grpo.Source(config, task, trainer)
    episodes = [train_grpo.Episode((), 0, n, (), [0], 1) for n in range(4)]
    for episode, reward in zip(episodes, (1.0, 0.2, 1.0, 1.0), strict=True):
        episode.reward = reward
    monkeypatch.setattr(source, "play", lambda *given: {n: [e] for n, e in enumerate(episodes)})
    assert source.evaluate() == 0.75 and source.shown is episodes[3]
