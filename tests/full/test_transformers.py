"""Models of transformers on trees and on a ring, by the code of full/RECIPES.md itself.

The truth is the model as transformers runs it: its own attention, one sequence at a time.
"""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, shortened
from test_families import CASES, SIZES, hf_config
from test_ranks import ranks

from full.check import relative_error as relative
from full.chunks import tree_backward
from full.optimizer import reduce_gradients
from full.trie import TokenTrie
# Grouped heads in each. The two that slide have layers of both kinds; Gemma's have RoPEs of theirs.
FAMILIES = {"Qwen3": "qwen3 tied", "Qwen2": "qwen2 slides", "Gemma 3": "gemma3 pattern"}
OTHERS = {
    "llama": {}, "mistral": dict(sliding_window=4), "mixtral": {}, "phi3": {},
    "gemma2": dict(sliding_window=4, head_dim=8, attn_logit_softcapping=None),
    "olmo3": dict(sliding_window=4), "qwen3_moe": CASES["qwen3_moe normed"] | dict(head_dim=8),
}  # fmt: skip
OTHERS["qwen3_moe"].pop("model_type")
PAGE = (ROOT / "full" / "RECIPES.md").read_text()
SECTION = PAGE.split("## Any transformers model on trees and on a ring")[1]
TEXT = re.search(r"```python\n(.*?)```", SECTION, re.S)[1]
TEMPERATURE = 0.7


class KeepFloat64(torch.overrides.TorchFunctionMode):
    """Lifts transformers' casts to float32, of float64 tensors: RMSNorm's, eager softmax's, RoPE's.

    A wrong formula shows without them as 1e-2 and rounding as 1e-15.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and torch.is_tensor(args[0]) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def recipe(was="", now=""):
    """The names that the recipe defines, with one of its texts replaced by another."""
    assert was in TEXT
    defined = {}
    exec(TEXT.replace(was, now) if was else TEXT, defined)
    return defined


def model_of(family, attention="eager"):
    """A small float64 model of transformers, no weight of which is neutral."""
    transformers = pytest.importorskip("transformers", reason="see tests/requirements.txt")
    if family in OTHERS:
        sizes = SIZES | dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        config = transformers.AutoConfig.for_model(family, **sizes, **OTHERS[family])
    else:
        config = hf_config(FAMILIES[family])
    if family == "Gemma 3":
        config.final_logit_softcapping = 3.0
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation=attention)  # fmt: skip
    if family in ("mixtral", "qwen3_moe"):
        model.set_experts_implementation("eager")  # its grouped product has no float64
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def sequences_of_a_tree():
    """Six sequences with forks, of which one is the beginning of two others; longer than windows.

    Without the id 0, which is Gemma's PAD: its embedding has no gradient.
    """
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(1, 61, (9,), generator=generator)
    shared_and_own = ((9, 7), (9, 3), (5, 8), (5, 1), (2, 12), (9, 0))
    return [torch.cat([stem[:n], torch.randint(1, 61, (own,), generator=generator)])
            for n, own in shared_and_own]  # fmt: skip


def loss_fn(i, logprobs, entropy, coupling=0.1):
    """A loss of each sequence's own, with a term that no sum over tokens can replace."""
    weights = torch.sin(7.0 * torch.arange(1, len(logprobs) + 1) + i).double()
    return (weights * (logprobs - 0.3 * entropy)).sum() + coupling * logprobs.sum().square()


def by_itself(model, sequences, temperature=1.0, **options):
    """The loss of transformers' own logits, sequence by sequence; the gradient is in .grad."""
    model.zero_grad()
    total = 0.0
    for i, tokens in enumerate(sequences):
        logits = model(tokens[None]).logits[0, :-1]
        logp = (logits / temperature).log_softmax(-1)
        logprobs = logp.gather(1, tokens[1:, None])[:, 0]
        loss = loss_fn(i, logprobs, -(logp.exp() * logp).sum(-1), **options)
        loss.backward()
        total += loss.item()
    return total


def errors(loss, model, true_loss, true_model):
    """Relative errors of the loss and of the worst parameter's gradient."""
    pairs = list(zip(model.parameters(), true_model.parameters(), strict=True))
    assert min(q.grad.norm() for _, q in pairs) > 1e-3
    return abs(loss / true_loss - 1), max(relative(p.grad, q.grad) for p, q in pairs)


def tree_errors(model, code=None, ways=({},)):
    """Errors of `tree_backward`, by some form of the recipe, in each of some ways."""
    found = []
    true_loss = by_itself(model, sequences_of_a_tree(), TEMPERATURE)
    for options in ways:
        policy = (code or recipe())["Policy"](copy.deepcopy(model))
        policy.zero_grad()
        trie = TokenTrie(sequences_of_a_tree())
        result = tree_backward(policy, trie, loss_fn, temperature=TEMPERATURE, **options)
        found += errors(result.loss.item(), policy, true_loss, model)
    return found


@pytest.mark.parametrize("family", shortened([*FAMILIES, *OTHERS], *FAMILIES))
def test_the_recipe_trains_a_model_of_transformers_on_a_tree(family):
    with KeepFloat64():
        ways = {}, {"max_tokens": 4}, {"max_tokens": 9, "recompute": True}
        assert max(tree_errors(model_of(family), ways=ways)) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_casts_are_the_only_difference(family):
    """Its norms round gradients to float32, each sequence's by itself."""
    error, gradient_error = tree_errors(model_of(family, "sdpa"))
    assert error < 1e-12 and 1e-9 < gradient_error < 1e-6


@pytest.mark.parametrize("was, now", [
    ("window=sliding_window", "window=None"), ("position_ids=positions", "position_ids=None"),
    ("scale=scaling", "scale=1.1 * scaling"),
    ("temperature=temperature, softcap=softcap", "temperature=temperature"),
])  # fmt: skip
def test_whatever_the_recipe_left_out_would_show(was, now):
    with KeepFloat64():
        assert max(tree_errors(model_of("Gemma 3"), recipe(was, now))) > 1e-4


def test_what_a_tree_cannot_have_is_refused():
    model = model_of("Qwen3").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="without dropout"):
        tree_errors(model)
    with pytest.raises(TypeError, match="s_aux"):  # attention sinks, as transformers calls them
        call = recipe()["call_attention"]
        call(None, None, None, None, None, attention=None, scaling=1, s_aux=0)


def _on_a_ring(rank):
    """family -> errors of one sequence on a ring, before and after the sum, and of a whole tree."""
    found = {}
    code = recipe()
    tokens = torch.cat(sequences_of_a_tree()[:2])  # 28: 27 inputs, which are dealt unevenly
    for family in FAMILIES:
        model = model_of(family)
        policy = code["Policy"](copy.deepcopy(model))
        with KeepFloat64():
            true_loss = by_itself(model, [tokens], coupling=0)  # a ring needs a sum over tokens
            weights = torch.sin(7.0 * torch.arange(1, len(tokens))).double()
            mine, logprobs, entropies = code["ring_logprobs"](policy, tokens)
            loss = (weights[mine] * (logprobs - 0.3 * entropies)).sum()
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            _, alone = errors(total.item(), policy, true_loss, model)
            reduce_gradients(policy)
            ring = errors(total.item(), policy, true_loss, model)

            # All ranks compute the same loss from all scores; a gradient is its rank's tokens'.
            policy.zero_grad()
            true_loss = by_itself(model, sequences_of_a_tree())
            scores = code["ring_tree_scores"](policy, TokenTrie(sequences_of_a_tree()))
            loss = sum(loss_fn(i, *score) for i, score in enumerate(scores))
            (loss / dist.get_world_size()).backward()
            reduce_gradients(policy)
            tree = errors(loss.item(), policy, true_loss, model)
        found[family] = {"alone": alone, "ring": max(ring), "tree": max(tree)}
    return found


@pytest.mark.slow  # two more processes have to import transformers
def test_the_recipe_trains_a_model_of_transformers_on_a_ring(tmp_path):
    pytest.importorskip("transformers", reason="see tests/requirements.txt")
    for found in ranks(tmp_path, 2, _on_a_ring):
        assert [*found] == [*FAMILIES]
        for family, row in found.items():
            assert max(row["ring"], row["tree"]) < 1e-12 and row["alone"] > 1e-3, (family, row)
