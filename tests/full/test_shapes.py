"""Names say shapes: k_BHkD has four dimensions, and B is one number in all of a frame's names."""

import re
import sys

import pytest
import torch

import models
import ring_attention
import tree_attention
from full.attention import attend, masks
from full.attention import ring as full_ring
from full.learn import generate as generation
from full.model import cache
from full.model import experts, logprobs, transformer
from full.tree import chunks, trie
from check_models import CASES, path_errors
from check_attention import TinyModel, example_loss, examples, forests
from full.attention.ring import ring_attention as ring_of_masks
from full.learn.generate import generate
from full.model.cache import forward_with_cache, prefill
from full.tiny import tiny_model
from full.tree.chunks import tree_backward, tree_scores
from full.tree.trie import TokenTrie

SUFFIX = re.compile(r"_([A-Za-z0-9]*[A-Z][A-Za-z0-9]*)$")


def disagreements(function, files):
    """What local tensors of the files' frames say against their suffixes, while function() runs."""
    found = set()

    def look(frame, event, arg):
        sizes = {}
        for name, x in frame.f_locals.items() if event == "return" else ():
            letters = SUFFIX.search(name)
            if not letters or not isinstance(x, torch.Tensor):
                continue
            if x.dim() != len(letters[1]):
                found.add(f"{name} has {x.dim()} dimensions")
                continue
            for letter, size in zip(letters[1], x.shape):
                if size == 1 and not letter.isdigit():  # broadcast
                    continue
                known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
                if size != known:
                    found.add(f"{name} has {letter} = {size}, not {known}")
        return look

    sys.settrace(lambda frame, *_: look if frame.f_code.co_filename in files else None)
    try:
        function()
    finally:
        sys.settrace(None)
    return sorted(found)


def models_check():
    for family in models.CHECK_FAMILIES:
        models.check_family(family, 0.8)
    for name in ("qwen3", "qwen3_moe", "gemma3_text"):
        model_type, changes = CASES[name]
        assert all(error <= 1e-12 for _, error in path_errors(tiny_model(model_type, **changes)))
    model = tiny_model("gemma3_text")
    for prompts in ([[1, 2, 3], [4], [1, 2, 3]], [[1, 2, 3], [4], [5]]):
        generate(model, prompts, max_new_tokens=9, seed=0, end=range(0, 53, 4), slots=2)
    cache, _ = prefill(model, [[1, 2, 3, 4, 5, 6], [4]])
    forward_with_cache(model, cache, torch.ones(2, 3).long(), [3, 2])


def ring_check():
    for mask in examples(41).values():
        q, k, v = (torch.randn(2, 4, 41, 8, requires_grad=True) for _ in range(3))
        ring_of_masks(q, k, v, mask=mask).sum().backward()


def tree_check():
    trie = TokenTrie(forests()["forest"])
    loss = example_loss
    for model in (TinyModel(), tiny_model("qwen3_moe")):
        tree_scores(model, trie)
        for recompute in (False, True):
            tree_backward(model, trie, loss, max_tokens=3, recompute=recompute)


def wrong():
    a_BS, b_SD, c_B2 = torch.ones(2, 3), torch.ones(4, 5), torch.ones(2, 3)
    return a_BS, b_SD, c_B2


@pytest.mark.parametrize(
    "function, modules, expected",
    [
        (models_check, [models, transformer, experts, logprobs, cache, generation], []),
        (ring_check, [ring_attention, masks, attend, full_ring], []),
        (tree_check, [tree_attention, trie, chunks], []),
        (wrong, [sys.modules[__name__]], ["b_SD has S = 4, not 3", "c_B2 has 2 = 3, not 2"]),
    ],
)  # fmt: skip
def test_shape_suffixes_are_true(function, modules, expected):
    assert disagreements(function, {module.__file__ for module in modules}) == expected
