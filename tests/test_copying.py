"""The README's table of what one copies: each function with what the table says it needs, and run.

A script gets the imports of the file, the functions of one row, the pieces that the row asks for,
and nothing else. Names that it lacks are found without running it; then it runs, in float64,
against an oracle.
"""

import ast
import builtins
import functools
import math
import re
import symtable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

pytestmark = pytest.mark.quick
FILES = ("ring_attention.py", "models.py", "tree_attention.py", "parallel.py", "train_grpo.py")
SIBLINGS = {file.removesuffix(".py") for file in FILES}
WHOLE_FILE = "take the file"  # a need that is everything


# The table ---------------------------------------------------------------------------------------


def rows_of_table():
    """[(functions, what they need, as the README says it)] of the table whose head says "needs"."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "README.md").read_text(), re.M):
        head, _, *lines = table.splitlines()
        if "needs" in head:
            cells = [line.strip("| ").split(" | ", 1) for line in lines]
            rows += [(re.findall(r"`(\w+)`", functions), needs) for functions, needs in cells]
    return rows


class Source:
    """A file's definitions at the top level: name -> lines; and in which section each stands."""

    def __init__(self, file):
        self.lines = (ROOT / file).read_text().splitlines()
        self.imports = []  # (statement, the names that it makes)
        self.span = {}  # name -> first and last line
        for node in ast.parse("\n".join(self.lines)).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                made = {(x.asname or x.name).split(".")[0] for x in node.names}
                if not SIBLINGS & {getattr(node, "module", None), *(x.name for x in node.names)}:
                    self.imports.append((ast.unparse(node), made))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                self.span[node.name] = first, node.end_lineno
            elif isinstance(node, ast.Assign):
                names = [x.id for x in ast.walk(node.targets[0]) if isinstance(x, ast.Name)]
                self.span |= dict.fromkeys(names, (node.lineno, node.end_lineno))

        ruler = re.compile(r"# (?:Appendix )?(\w+)\. .*-----$")
        rulers = [(n, ruler.match(line)) for n, line in enumerate(self.lines, 1)]
        self.rulers = [(n, found[1]) for n, found in rulers if found]

    def section_of(self, name):
        above = [section for n, section in self.rulers if n < self.span[name][0]]
        return above[-1] if above else None

    def script(self, names):
        """A script of these definitions, in the order of the file, behind the imports they use."""
        spans = sorted({self.span[name] for name in names})
        pieces = "\n\n".join("\n".join(self.lines[a - 1 : b]) for a, b in spans)
        used = names_from_outside(pieces)
        return "\n".join([text for text, made in self.imports if made & used] + [pieces])


@functools.cache
def source_of(file):
    return Source(file)


def file_of(function):
    """The one file that defines a function."""
    defined = re.compile(rf"^(?:def|class) {function}\b", re.M)
    (file,) = [file for file in FILES if defined.search((ROOT / file).read_text())]
    return file


def needed(source, text):
    """The names of a file that a cell of the table asks for: in backticks, or by their section."""
    if WHOLE_FILE in text:
        return set(source.span)
    listed = re.findall(r"[Ss]ections? (\w+(?:(?:, | and )\w+)*)", text)
    sections = set(re.findall(r"\w+", " ".join(listed))) - {"and"}
    by_name = set(re.findall(r"`(\w+)`", text)) & set(source.span)
    return by_name | {name for name in source.span if source.section_of(name) in sections}


def names_from_outside(script):
    """Names that a script reads and that neither it nor Python defines."""
    table = symtable.symtable(script, "script", "exec")
    read, tables = set(), [table]
    for one in tables:  # the list grows: first the script, then what is inside
        tables += one.get_children()
        read |= {x.get_name() for x in one.get_symbols() if x.is_global() and x.is_referenced()}
    made = {x.get_name() for x in table.get_symbols() if x.is_assigned() or x.is_imported()}
    return read - made - {*dir(builtins), "__file__", "ring"}  # ring_attention, imported as ring


# Oracles -----------------------------------------------------------------------------------------


def close(found, truth):
    assert found.dtype == torch.float64 and ((found - truth).abs() < 1e-12).all()


def run_merge(merge):
    s, v = torch.randn(3, 5, 9).double(), torch.randn(3, 9, 2).double()
    s[1, 2, :4] = -math.inf  # a row that sees nothing in the first part
    parts = [(s[..., :4].softmax(-1).nan_to_num() @ v[:, :4], s[..., :4].logsumexp(-1))]
    parts += [(s[..., 4:].softmax(-1) @ v[:, 4:], s[..., 4:].logsumexp(-1))]
    out, lse = merge(*parts[0], *parts[1])
    close(out, s.softmax(-1) @ v)
    close(lse, s.logsumexp(-1))


def run_grpo_loss(grpo_loss):
    """(2) to (7), token by token: the clip, a capped weight, k3, entropy, a clipped critic."""
    lp, old, sampler, ref, entropy, value, old_value, g = 0.3 * torch.randn(8, 3, 4).double()
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    advantage = torch.tensor([[1.5], [-0.7], [2.0]]).double()
    leaves = [x.clone().requires_grad_() for x in (lp, entropy, value)]
    loss, sums = grpo_loss(
        leaves[0], old, advantage, mask, sampler_BT=sampler, importance_cap=1.1, ref_BT=ref,
        kl_coef=0.1, entropy_BT=leaves[1], entropy_coef=0.02, value_BT=leaves[2],
        old_value_BT=old_value, return_BT=g,
    )  # fmt: skip
    found = torch.autograd.grad(loss, leaves)

    slow = [x.clone().requires_grad_() for x in (lp, entropy, value)]
    terms = []
    for b, t in mask.nonzero().tolist():
        lp_t, entropy_t, v = (x[b, t] for x in slow)
        r, a = (lp_t - old[b, t]).exp(), advantage[b, 0]
        l_t = -min(r * a, min(max(r, 0.8), 1.28) * a)
        l_t = l_t * min((old[b, t] - sampler[b, t]).exp(), 1.1)
        d = lp_t - ref[b, t]
        l_t = l_t + 0.1 * ((-d).exp() + d - 1) - 0.02 * entropy_t
        near = old_value[b, t] + min(max(v - old_value[b, t], -0.2), 0.2)
        terms.append(l_t + 0.5 * max((v - g[b, t]) ** 2, (near - g[b, t]) ** 2) / 2)
    truth = sum(terms) / len(terms)
    close(loss, truth)
    for grad, true_grad in zip(found, torch.autograd.grad(truth, slow), strict=True):
        close(grad, true_grad)
    assert sums["tokens"] == 4


def run_advantages(advantages):
    rewards = np.array([1.0, 0.0, 0.0, 0.25])
    others = [(rewards.sum() - x) / 3 for x in rewards]
    np.testing.assert_allclose(advantages(rewards, "leave_one_out"), rewards - others)


def run_gae(gae):
    """The sum of (1) over the later sampled tokens, which are targets 0, 1 and 3."""
    rewards, values = np.array([0.0, 0.5, 2.0, 1.0]), np.array([0.3, -0.2, 9.0, 0.7])
    found, returns = gae(rewards, values, np.array([True, True, False, True]), 0.9, 0.8)
    u, v = [0.0, 2.5, 1.0], [0.3, -0.2, 0.7, 0.0]
    delta = [u[t] + 0.9 * v[t + 1] - v[t] for t in range(3)]
    truth = [sum(0.72**n * delta[t + n] for n in range(3 - t)) for t in range(3)]
    np.testing.assert_allclose(found[[0, 1, 3]], truth)
    np.testing.assert_allclose(returns[[0, 1, 3]], np.add(truth, v[:3]))


def run_branch_advantages(branch_advantages):
    paths = [[(6, 0, 2), (9, i, 1)] for i in (0, 1)] + [[(6, 2, 2), (9, i, 1)] for i in (2, 3)]
    marked = branch_advantages(np.array([1.0, 0.0, 0.25, 0.25]), paths)
    assert marked[:2] == [[(5, 0.125), (8, 0.5)], [(5, 0.125), (8, -0.5)]]
    assert marked[2:] == [[(5, -0.125), (8, 0.0)]] * 2


def run_token_logprobs(token_logprobs):
    hidden, weight = torch.randn(7, 5).double(), torch.randn(11, 5).double()
    targets, upstream = torch.randint(11, (7,)), torch.randn(2, 7).double()
    results = []
    for fast in (True, False):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if fast:
            options = dict(temperature=0.7, softcap=3.0, chunk=3)
            pair = token_logprobs(leaves[0], leaves[1], targets, **options)
        else:
            logp = (3 * torch.tanh(leaves[0] @ leaves[1].T / 3) / 0.7).log_softmax(-1)
            pair = logp[torch.arange(7), targets], -(logp.exp() * logp).sum(-1)
        results.append([*pair, *torch.autograd.grad((torch.stack(pair) * upstream).sum(), leaves)])
    for found, truth in zip(*results, strict=True):
        close(found, truth)


class TwoLayers:
    """What `generate` asks of a model: one full layer and one of window 3, places instead of RoPE.
    """

    config = SimpleNamespace(vocab_size=11, max_position_embeddings=32)

    def __init__(self):
        self.head_weight = torch.randn(11, 8).double()
        self.places = torch.randn(32, 8).double()
        self.qkv = torch.randn(2, 3, 8, 8).double() / 3

    def hidden(self, tokens, *, positions, attention):
        x = self.head_weight[tokens] + self.places[positions]
        for layer, window in enumerate((None, 3)):
            qkv = ((x @ w).unflatten(-1, (2, 4)).transpose(1, 2) for w in self.qkv[layer])
            out = attention(*qkv, layer=layer, scale=0.5, window=window)
            x = x + out.transpose(1, 2).flatten(2)
        return x

    def logits(self, hidden):
        return hidden @ self.head_weight.T


def defined_attention(q, k, v, *, layer, scale, window):
    """Causal attention by a table of who sees whom."""
    i = torch.arange(q.shape[2])
    seen = i[:, None] >= i
    if window:
        seen &= i[:, None] - i < window
    return (q @ k.mT * scale).masked_fill(~seen, -math.inf).softmax(-1) @ v


def run_generate(generate):
    """Greedy and drawn answers, to a prompt that two rows share and to one of another length."""
    model, prompts = TwoLayers(), [[1, 2, 3, 4, 5], [7, 8], [1, 2, 3, 4, 5]]
    for options in (dict(temperature=0), dict(temperature=1.0, seed=3)):
        for row, prompt in zip(generate(model, prompts, max_new_tokens=6, **options), prompts):
            tokens = torch.tensor([row.tokens])
            places = torch.arange(tokens.shape[1])[None]
            x = model.hidden(tokens, positions=places, attention=defined_attention)
            logp = model.logits(x)[0, len(prompt) - 1 : -1].log_softmax(-1)
            new = tokens[0, len(prompt) :]
            assert len(new) == 6 and row.tokens[: len(prompt)] == prompt
            assert options["temperature"] or torch.equal(new, logp.argmax(-1))
            found = torch.tensor(row.logprobs[len(prompt) - 1 :], dtype=torch.float64)
            close(found, logp[torch.arange(6), new])


def run_TokenTrie(TokenTrie):
    """The tokens of the tree are the prefixes that occur, each fork's largest branch first."""
    sequences = [[5, 6, 7], [5, 6, 8], [5, 9], [5, 6, 7], [5], [2]]
    trie = TokenTrie(sequences)
    occur = {tuple(x[: n + 1]) for x in sequences for n in range(len(x))}

    def size(prefix):
        return sum(x[: len(prefix)] == prefix for x in occur)

    # A branch comes by how much is below each of its tokens, and equal ones by their tokens.
    prefixes = sorted(occur, key=lambda x: [(-size(x[: n + 1]), x[n]) for n in range(len(x))])
    assert trie.tokens.tolist() == [x[-1] for x in prefixes]
    assert trie.positions.tolist() == [len(x) - 1 for x in prefixes]
    assert trie.parent.tolist() == [prefixes.index(x[:-1]) if x[1:] else -1 for x in prefixes]
    below = [[y[: len(x)] == x for y in prefixes] for x in prefixes]
    assert trie.subtree_end.tolist() == [n + sum(row) for n, row in enumerate(below)]
    for i, sequence in enumerate(sequences):
        assert trie.tokens[trie.path(i)].tolist() == sequence
    assert trie.stats().tree_tokens == len(prefixes)


def run_clip_grad_norm(clip_grad_norm):
    model = torch.nn.Linear(3, 4).double()
    given = [torch.randn_like(p) for p in model.parameters()]
    norm = math.sqrt(sum(float((x * x).sum()) for x in given))
    for most, factor in ((0.5 * norm, 0.5), (2 * norm, 1.0)):
        for p, x in zip(model.parameters(), given, strict=True):
            p.grad = x.clone()
        assert abs(float(clip_grad_norm(model, most)) - norm) < 1e-12
        for p, x in zip(model.parameters(), given, strict=True):
            close(p.grad, factor * x)


ORACLES = {
    "merge": run_merge, "grpo_loss": run_grpo_loss, "advantages": run_advantages, "gae": run_gae,
    "branch_advantages": run_branch_advantages, "token_logprobs": run_token_logprobs,
    "generate": run_generate, "TokenTrie": run_TokenTrie, "clip_grad_norm": run_clip_grad_norm,
}  # fmt: skip


# Tests -------------------------------------------------------------------------------------------


def test_the_table_has_what_people_copy_most():
    listed = {name for functions, _ in rows_of_table() for name in functions}
    assert {*ORACLES, "KVCache"} <= listed


@pytest.mark.parametrize(
    "functions, needs", rows_of_table(), ids=[functions[0] for functions, _ in rows_of_table()]
)
def test_a_row_of_the_table_runs_by_itself(functions, needs):
    source = source_of(file_of(functions[0]))
    names = needed(source, needs) | {*functions}
    missing = names_from_outside(source.script(names))
    assert not missing, f"{functions}: the table leaves out {sorted(missing)}"

    # What the table names one by one must be needed by something else in the script.
    for name in set(re.findall(r"`(\w+)`", needs)) & set(source.span) - {*functions}:
        without = source.script(names - {name})
        assert name in names_from_outside(without), f"{functions} do not need {name}"

    torch.manual_seed(0)
    copied = {"__name__": "copied"}
    exec(compile(source.script(names), "copied", "exec"), copied)
    for function in functions:
        if function in ORACLES:
            ORACLES[function](copied[function])
