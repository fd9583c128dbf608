"""Names say shapes: k_BHkD has four dimensions, and B is one number in all of a frame's names."""

import re
import sys

import pytest
import torch

import models
import ring_attention
import tree_attention

SUFFIX = re.compile(r"_([A-Za-z0-9]*[A-Z][A-Za-z0-9]*)$")


def disagreements(function, path):
    """What local tensors of the file's frames say against their suffixes, while function() runs."""
    found = set()

    def look(frame, event, arg):
        if event == "return":
            sizes, where = {}, frame.f_code.co_qualname if sys.version_info > (3, 11) else ""
            for name, x in frame.f_locals.items():
                letters = SUFFIX.search(name)
                if not letters or not isinstance(x, torch.Tensor):
                    continue
                if x.dim() != len(letters[1]):
                    found.add(f"{where}: {name} has {x.dim()} dimensions")
                    continue
                for letter, size in zip(letters[1], x.shape):
                    if size == 1 and not letter.isdigit():  # broadcast
                        continue
                    known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
                    if size != known:
                        found.add(f"{where}: {name} has {letter} = {size}, not {known}")
        return look

    def trace(frame, event, arg):
        return look if frame.f_code.co_filename == path else None

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return sorted(found)


def models_check():
    few = {name: models.CASES[name] for name in ("qwen3", "qwen3_moe", "gemma3_text")}
    assert models.check(few, transformers=False)
    model = models.tiny_model("gemma3_text")
    for prompts in ([[1, 2, 3], [4], [1, 2, 3]], [[1, 2, 3], [4], [5]]):
        models.generate(model, prompts, max_new_tokens=9, seed=0, end=range(0, 53, 4), slots=2)
    cache, _ = models.prefill(model, [[1, 2, 3, 4, 5, 6], [4]])
    models.forward_with_cache(model, cache, torch.ones(2, 3).long(), [3, 2])


def ring_check():
    for mask in ring_attention.examples(41, 4).values():
        q, k, v = (torch.randn(2, 4, 41, 8, requires_grad=True) for _ in range(3))
        ring_attention.ring_attention(q, k, v, mask=mask).sum().backward()


def tree_check():
    forests = tree_attention.forests()
    few = {"prefixes": forests["prefixes"]}
    for _ in tree_attention._tree_rows(tree_attention.TinyModel(), few):
        pass
    moe, trie = models.tiny_model("qwen3_moe"), tree_attention.TokenTrie(forests["forest"])
    tree_attention.tree_backward(moe, trie, tree_attention.example_loss, max_tokens=3, aux_coef=0.1)


@pytest.mark.parametrize(
    "function, module",
    [(models_check, models), (ring_check, ring_attention), (tree_check, tree_attention)],
)
def test_shape_suffixes_are_true(function, module):
    assert disagreements(function, module.__file__) == []


def test_the_tracer_sees_a_wrong_suffix():
    def wrong():
        a_BS, b_SD, c_B2 = torch.ones(2, 3), torch.ones(4, 5), torch.ones(2, 3)
        return a_BS, b_SD, c_B2

    found = disagreements(wrong, __file__)
    assert [line.split(": ")[1] for line in found] == [
        "b_SD has S = 4, not 3", "c_B2 has 2 = 3, not 2"]  # fmt: skip
