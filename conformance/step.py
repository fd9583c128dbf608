"""Check one optimizer step of anybody's trainer, and name the term that is wrong.

    python conformance/step.py DUMP --model FILE.py:build                  # or MODULE:build
    python conformance/step.py DUMP --model FILE.py:build temperature=0.7  # replaces a setting

build() returns the model: model(tokens (1, T)) is the logits (1, T, V), or has them as `.logits`,
and perhaps a critic's values (1, T) as `.values`. DUMP is a directory. `record` of recorders.py
writes it, in about ten lines of a trainer.

step.safetensors holds B sequences, padded on their right to T tokens. Column t is about token t.
    tokens          (B, T) integers. Required.
    mask            (B, T). True for the tokens that are trained on. Required.
    logprobs        (B, T). Log-prob of token t, given those before it, by the weights before the
                    step, as the trainer computed it. Required. Unmasked entries may be anything.
    old_logprobs    (B, T). Default: the policy itself, so that all ratios are 1.
    ref_logprobs    (B, T). Of the reference model, for the KL.
    sampler_logprobs, teacher_logprobs    (B, T). Of the sampler and of a teacher.
    draws           (B, T). The random number in [0, 1) that drew token t.
    advantages      (B,) or (B, T). Default: the definition's.
    rewards, groups     (B,). A group is the sequences of one prompt.
    token_rewards, values    (B, T). For advantage=gae. values are a critic's before the step.
    returns         (B, T). What the critic should have said, for the loss of the values.
    rank, micro_batch   (B,). Where a sequence was trained on. Default: 0.
    width           (B,). Tokens of its row with padding, in the trainer. Default: T.
    length          (B,). Tokens of its row without padding. Default: T.
    before.NAME, after.NAME    Weights. Default of `before`: what build() returns.
    grad.NAME       The gradient that the optimizer got, after the clip.
    exp_avg.NAME, exp_avg_sq.NAME    AdamW's moments before the step. Default in step 1: zeros.
    exp_avg_after.NAME  The first moment after the step. It shows the gradient, too.
step.json holds the rest.
    settings        As below. The command's replace them.
    loss            Of the step, as the trainer adds it up.
    grad_norm       Before the clip.
    metrics         {name: number}, of the trained tokens of all ranks: logprob_gap/max, /mean, /kl;
                    ratio/token_mean, /max, /clipped_fraction; importance/masked_fraction;
                    entropy/token_mean; kl/token_mean; value/loss; loss/token_mean and
                    loss/policy_token_mean.
    optimizer       {"step": count after the step, "groups": [{"lr", "betas", "eps",
                    "weight_decay", "names"}]}
    changed         Names of weights that something other than the optimizer changed in the step.
A quantity that the dump lacks is not checked, and the report says so.

A step in memory is a `Step` of computed.py. Its twin is the same step in the trainer's precision:
a number may be 8 times as far from the definition's as the twin's is. A float64 trainer's twin is
in float64, with weights that are a few units in the last place off. `updates_explained` of
mistakes.py names a mistake of AdamW that shows only in the weights after several updates.

Settings, with their defaults: those of the definition, listed below, and
    micro_batches="sum", ranks="sum"   What the trainer does with the losses that `add` gets: sum or
                               mean.
    decay="groups"             Which weights decay: groups as recorded | matrices | all.
    tolerance=0                Relative. 0: 2e-5, 5e-4 or 3e-2 for float64, float32 and less.
    compute_dtype=""           The forward's, if weights are stored finer: they are rounded to it.
    gae_lambda=0.95, value_coef=0.5, value_clip=0.2    Of a critic. advantage also: none_batch | gae
                               | teacher.

Each check takes the trainer's own numbers of the checks before it, so that one mistake is one
finding. A check that fails is compared with the definition with one mistake in it, for each mistake
in a list. Some mistakes are fitted to the numbers: a coefficient, a clip's bounds, a learning rate.
A mistake is named if it explains the loss and the gradient. The exit status is 0 if the step holds,
1 if it does not, and 2 after an error.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # a script has its own folder on the path, not the package's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance import command
from conformance import definition as D
from conformance.checks import findings_of
from conformance.computed import DEFAULTS, Step


def check(directory, model, given=None):
    """Return the rows of the report and the step of a dump."""
    step = Step.read(directory, model, given)
    return rows_of(findings_of(step)), step


def rows_of(found):
    """Return the rows of a report: dicts of quantity, verdict, finding, figures, and why.

    found: {quantity: (finding, figures)}. why: the finding and the figures.
    """
    rows = []
    for quantity, (finding, figures) in found.items():
        verdict = "not checked" if finding is None else "departs" if finding else "holds"
        why = {"not checked": f"the dump has no {figures}", "holds": figures,
               "departs": f"{finding} ({figures})"}[verdict]  # fmt: skip
        rows.append(dict(quantity=quantity, verdict=verdict, finding=finding, figures=figures,
                         why=why))  # fmt: skip
    return rows


def lines_of(rows):
    """Yield the lines of a report. Quantities with one finding are one line."""
    lines = {}
    for row in rows:
        lines.setdefault(row["finding"] or row["quantity"], []).append(row)
    for finding, together in lines.items():
        quantities = ", ".join(row["quantity"] for row in together)
        figures = "; ".join(dict.fromkeys(row["figures"] for row in together))
        why = f"{finding} ({figures})" if together[0]["finding"] else together[0]["why"]
        yield f"   {quantities:14}  {together[0]['verdict']:12} {why}"


@command.one_line_errors
def main(argv):
    """Print the report of one dump. Return 1 if a check failed."""
    parser = command.parser(__doc__ + D.LOSS_SETTINGS + D.STEP_SETTINGS)
    parser.add_argument("dump", help="the directory that `record` wrote")
    parser.add_argument("--model", required=True, metavar="FILE.py:build", help="or MODULE:build")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="replaces a setting")
    options = parser.parse_intermixed_args(argv)  # settings may stand after --model
    given, build = command.settings_in(options.settings), command.load(options.model)
    rows, step = check(options.dump, build(), given)
    count = f"{len(step.sequences)} sequences, {step.ranks} ranks"
    count += f", {step.micro_batches} micro-batches"
    print(" ".join([options.dump, *command.changed(DEFAULTS, vars(step.c))]))
    print(f"   {count}, {step.dtype}", *lines_of(rows), sep="\n")
    departs = any(row["verdict"] == "departs" for row in rows)
    print("the step departs from its definition" if departs else "the step holds, where checked")
    return 1 if departs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
