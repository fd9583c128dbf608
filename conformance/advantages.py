"""Check anybody's advantages against their definition, from rewards and groups.

    python conformance/advantages.py FILE.py:advantages         # or MODULE:advantages
    python conformance/advantages.py FILE.py:advantages std=biased   # replaces ADVANTAGES

The file has an adapter that gets a batch and returns advantages, (B,) or (B, T). ADVANTAGES, a
dict, say what they claim to be:

    ADVANTAGES = dict(advantage="group_mean", skip=dict(order="groups are consecutive"))

    def advantages(batch):
        groups = batch.rewards.view(-1, 4)
        return (groups - groups.mean(1, keepdim=True)).flatten()

batch holds all B sequences of a step, of T tokens and less.
    rewards      (B,). Of a whole sequence.
    group        (B,), integers. A group is the sequences of one prompt, 4 of them.
    mask         (B, T), bool. False for padding and for tokens that the policy did not sample.
    smp, ref     (B, T). Log-probs under the sampler and the reference model, for kl_in="reward".
    settings     ADVANTAGES with all defaults filled in.

Settings, with their defaults: advantage, std_eps and std, as in step.py, and
    kl_in="loss"               reward: the sum over a sequence's tokens of kl_coef times k is taken
                               off its reward, before the mean. kl and kl_coef as in loss.py.
    equal_groups="kept"        left_out: groups with equal rewards are not trained on. The adapter
                               returns (advantages, whether each sequence is trained on).
    skip={}                    Properties that do not apply, and why.

The exit status is as in loss.py. The properties, by the names that `skip` takes:
"""

import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

if __name__ == "__main__":  # a script has its own folder on the path, not the package's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance import command, loss
from conformance import definition as D

DEFAULTS = dict(advantage="group_std", std_eps=1e-4, std="unbiased", kl="k3", kl_coef=0.0,
                kl_in="loss", equal_groups="kept", skip={})  # fmt: skip
REWARDS = [[1.0, 0.0, 0.25, 0.0], [0.1, 0.1, 0.1, 0.1], [-2.0, 3.0, 0.5, 1.0]]
LENGTHS = [3, 1, 4, 2, 2, 5, 1, 3, 4, 2, 1, 5]
TOLERANCE = 1e-6  # of float32, in which many trainers have rewards, relative to the largest


def make_batch(c, groups, penalized=False):
    """Return the batch of groups of rewards. penalized: whether the log-probs differ."""
    rows = [(n, R) for n, group in enumerate(groups) for R in group]
    T = max(LENGTHS)
    lengths = torch.tensor((LENGTHS * len(rows))[: len(rows)])
    mask = torch.arange(T) < lengths[:, None]
    mask[2::4, 1] = False  # a tool's reply
    smp = -1 - torch.sin(3.0 * torch.arange(len(rows) * T, dtype=torch.float64)).view(-1, T).abs()
    gap = torch.cos(2.0 * torch.arange(len(rows) * T, dtype=torch.float64)).view(-1, T)
    return SimpleNamespace(
        rewards=torch.tensor([R for _, R in rows], dtype=torch.float64), mask=mask, smp=smp,
        group=torch.tensor([n for n, _ in rows]), ref=smp + gap if penalized else smp.clone(),
        settings=vars(c),
    )  # fmt: skip


def definition(c, batch):
    """Return the advantage of each sequence, and whether it is trained on."""
    groups = {}
    for b, number in enumerate(batch.group.tolist()):
        groups.setdefault(number, []).append(b)
    rewards, kept = batch.rewards.tolist(), [True] * len(batch.rewards)
    for b, on in enumerate(batch.mask):
        smp, ref = batch.smp[b, on].tolist(), batch.ref[b, on].tolist()
        rewards[b] -= math.fsum(D.penalties(c, SimpleNamespace(smp=smp, ref=ref)))
    for rows in groups.values():
        for b in rows:
            kept[b] = D.is_kept(c, [rewards[row] for row in rows])
    found = D.advantages(c, [[rewards[b] for b in rows] for rows in groups.values()])
    by_row = dict(zip(itertools.chain(*groups.values()), itertools.chain(*found)))
    return [by_row[b] for b in range(len(rewards))], kept


def call(c, adapter, batch):
    """Return what `definition` does, by the adapter."""
    found, kept = adapter(batch), [True] * len(batch.rewards)
    if c.equal_groups == "left_out":
        found, kept = found
        kept = torch.as_tensor(kept).bool().tolist()
    found = torch.as_tensor(found).double()
    if found.dim() == 2:
        spread = torch.where(batch.mask, found, found[:, :1]) - found[:, :1]
        if not spread.abs().max() <= TOLERANCE:  # NaN too
            raise ValueError("expected one advantage for all trained tokens of a sequence")
    return (found if found.dim() == 1 else found[:, 0]).tolist(), kept


def compare(c, got, want):
    """Say how advantages differ, or return an empty text."""
    size = max(map(abs, want[0]))
    for b, (x, y) in enumerate(zip(*(found[1] for found in (got, want)))):
        if x != y:
            return f"sequence {b} is {'kept' if x else 'left out'}, and should not be"
    pairs = [(b, x, y) for b, (x, y, on) in enumerate(zip(got[0], want[0], want[1])) if on]
    at = next((b for b, x, y in pairs if not abs(x - y) <= TOLERANCE * max(size, 1e-300)), None)
    return "" if at is None else f"sequence {at} has {got[0][at]:.6g}, expected {want[0][at]:.6g}"


def check_value(c, adapter):
    """Advantages are the definition's."""
    batch = make_batch(c, REWARDS)
    got, want = call(c, adapter, batch), definition(c, batch)
    how = compare(c, got, want)
    for std in ("biased", "unbiased") if how else ():
        other = definition(SimpleNamespace(**vars(c) | dict(std=std)), batch)
        if std != c.std and not compare(c, got, other):
            how += f": the standard deviation is {std}"
    return how


def check_order(c, adapter):
    """The order of the sequences does not matter."""
    batch, turned = make_batch(c, REWARDS), torch.arange(12).view(3, 4).T.flatten()
    other = SimpleNamespace(**{name: x[turned] if torch.is_tensor(x) else x
                               for name, x in vars(batch).items()})  # fmt: skip
    want = call(c, adapter, batch)
    return compare(c, call(c, adapter, other), tuple([x[b] for b in turned] for x in want))


def check_groups(c, adapter):
    """A reward matters in its own group only, unless the batch's deviation is used."""
    if c.advantage == "batch_std":
        raise NotImplementedError("the standard deviation is of the batch")
    want = call(c, adapter, make_batch(c, REWARDS))
    got = call(c, adapter, make_batch(c, [*REWARDS[:2], [9.0, 3.0, 0.5, 1.0]]))
    return compare(c, *(tuple(x[:8] for x in found) for found in (got, want)))


def check_equal(c, adapter):
    """Equal rewards give 0 and no NaN, also if no float is exactly their mean."""
    found, kept = call(c, adapter, make_batch(c, 3 * [4 * [0.1]]))
    due = c.equal_groups == "kept"
    if kept != [due] * 12:
        return f"a group of equal rewards is {'left out' if due else 'kept'}, and should not be"
    wrong = [x for x in found if due and c.advantage != "none" and not abs(x) <= TOLERANCE]
    return f"the advantage is {wrong[0]:g}, expected 0" if wrong else ""


def check_kl(c, adapter):
    """kl_in="reward": the KL of a sequence's trained tokens is taken off its reward."""
    if c.kl_in != "reward" or not c.kl_coef:
        raise NotImplementedError("no KL in the reward")
    batch = make_batch(c, REWARDS, penalized=True)
    return compare(c, call(c, adapter, batch), definition(c, batch))


PROPERTIES = {"value": check_value, "order": check_order, "own group": check_groups,
              "equal rewards": check_equal, "KL in the reward": check_kl}  # fmt: skip


def conformance(adapter, given=None):
    """Return the rows of the report, as `loss.conformance` does, and the settings."""
    module = sys.modules.get(getattr(adapter, "__module__", ""))
    own = getattr(adapter, "ADVANTAGES", None) or getattr(module, "ADVANTAGES", {})
    settings = command.checked(DEFAULTS, D.CHOICES, own | (given or {}))
    c, rows = SimpleNamespace(**D.DEFAULTS | settings), {}
    for name, check in PROPERTIES.items():
        verdict, why = "not applicable", c.skip.get(name, "")
        try:
            if not why:
                why = check(c, adapter)
                verdict = "failed" if why else "passed"
        except NotImplementedError as error:
            why = f"{error}"
        except Exception as error:
            raise ValueError(f"the adapter raised {loss.text_of(error)}") from None
        if verdict == "failed" and name != "value" and rows["value"]["verdict"] == "failed":
            verdict, why = "not judged", "stands on value"
        rows[name] = dict(property=name, verdict=verdict, why=why, example=[])
    return [*rows.values()], c


@command.one_line_errors
def main(argv):
    """Print the table of one adapter. Return 1 if a property failed."""
    listed = [f"    {name:18}  {check.__doc__}" for name, check in PROPERTIES.items()]
    parser = command.parser("\n".join([__doc__.rstrip(), *listed]))
    parser.add_argument("target", metavar="FILE.py:function", help="or MODULE:function")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="replaces ADVANTAGES")
    options = parser.parse_args(argv)
    given, adapter = command.settings_in(options.settings), command.load(options.target)
    rows, c = conformance(adapter, given)
    return loss.report([options.target, *command.changed(DEFAULTS, vars(c))], rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
