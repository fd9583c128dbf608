"""An audit as text and as a page: the rows of audit.py, and every token's part of the loss.

What is outside, or the whole table, and the tokens of one group with their parts of the loss.

Equation numbers are those of byhand.py.
"""

import html
import os
import string

from full.byhand import OBJECTIVES


def summary(report, everything) -> str:
    """Return what the report says of the step as a whole: sentences, and the table of rows.

    everything: with all rows. Without, only what is outside and the row that is nearest to it.
    """
    rows = [row for row in report.rows if everything or not row.ok]
    lines = [f"audit of {report.run}, step {report.step}", *report.intro, ""]
    if rows:
        lines.append(f"{'':28}{'recorded':>22}{'by hand':>22}{'difference':>12}{'allowed':>10}")
    for row in rows:
        verdict = "ok" if row.ok else "OUTSIDE"
        lines.append(f"{row.key:28}{row.recorded:22.15g}{row.by_hand:22.15g}"
                     f"{row.difference:12.1e}{row.allowed:10.1e}  {verdict}")  # fmt: skip
    good = [row for row in report.rows if row.ok]
    nearest = max(good, key=lambda row: row.share)
    lines += [
        f"{len(good)} of {len(report.rows)} numbers are within what rounding explains; nearest to "
        f"its bound is {nearest.key}, {nearest.difference:.1e} of {nearest.allowed:.1e}",
        f"not determined by the step: {', '.join(report.left_out) or 'nothing'}",
    ]
    return "\n".join(lines)


def token_rows(report, s) -> list:
    """Return a dict for each token of a rollout; `part` is None where it was not trained on."""
    # Target `at` is token at + 1. Token 0 is not a target.
    place = {at + 1: n for n, at in enumerate(s.at)}
    rows = []
    for index, token in enumerate(s.tokens):
        row = dict(text=report.show([token]), part=None)
        row["why"] = "the prompt" if index < s.prompt else "the task's reply"
        if index in place:
            row["why"] = "sampled, and not trained on"
        if index in place and s.terms:
            n = place[index]
            row |= s.terms[n] | dict(smp=s.smp[n], old=s.old[n], lp=s.lp[n], A=s.A[n])
            row["part"] /= report.updates  # the loss is a mean over updates, and so is its part
        rows.append(row)
    return rows


def as_text(report, everything=True, tokens=True) -> str:
    """Return the summary, and how the tokens of one group add up to their loss."""
    lines = [summary(report, everything)]
    for s in report.groups[report.group] if tokens else ():
        lines.append(f"\ngroup {report.group}, rollout {s.number}, reward {s.reward:g}")
        lines.append(f"  {'token':>14}  sampled{'sampler':>11}{'old':>11}{'now':>11}{'ratio':>10}"
                     f"  clip{'advantage':>11}{'part of loss':>14}")  # fmt: skip
        for row in token_rows(report, s):
            # A token that is not in the loss has no numbers.
            if row["part"] is None:
                lines.append(f"  {row['text']:>14}  {row['why']}")
                continue
            clip = "yes" if row["clips"] else "no"
            lines.append(f"  {row['text']:>14}{'yes':>9}{row['smp']:11.6f}{row['old']:11.6f}"
                         f"{row['lp']:11.6f}{row['r']:10.6f}{clip:>6}{row['A']:11.6f}"
                         f"{row['part']:14.6e}")  # fmt: skip
    return "\n".join([*lines, report.loss, report.verdict])


# `--html FILE`: one file of HTML, which loads nothing and runs no script. A token is a link. Its
# numbers are hidden until the link is pointed at (:hover) or named in the page's address (:target).
PAGE = string.Template("""\
<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>$verdict</title><style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1.5em;
       color: #1c1f23; background: #fff }
h1 { font-size: 1.4em; margin-bottom: .2em } h2 { font-size: 1.1em; margin-top: 2em }
p { margin: .3em 0 } pre, .numbers, table { font: 13px/1.5 ui-monospace, monospace }
pre { white-space: pre-wrap } .ok { color: #1a7f37 } .outside { color: #cf222e }
table { border-spacing: 3px 5px; font-size: 14px; margin-bottom: 12em }
th { text-align: left; font: 13px system-ui, sans-serif; color: #6e7781; padding-right: 1em;
     white-space: nowrap }
td { position: relative; padding: 0 }
.token { display: block; padding: .15em .45em; border-radius: 4px; text-align: center;
         white-space: pre; color: inherit; text-decoration: none; min-width: 1em }
.given { color: #8c959f; font-style: italic } .shared { opacity: .35 }
.clips { text-decoration: underline 3px }
.token:hover, .token:target { outline: 2px solid #57606a; opacity: 1 }
.numbers { display: none; position: absolute; left: 0; top: 1.9em; z-index: 1; padding: .7em 1em;
           background: #fff; border: 1px solid #57606a; border-radius: 6px; white-space: pre;
           box-shadow: 0 4px 14px #0003 }
.token:hover + .numbers, .token:target + .numbers { display: block }
.token:hover + .numbers { z-index: 2 }
</style>
<h1 class="$color">$verdict</h1>
<pre>$summary</pre>
<h2>Group $group</h2>
<p>A row is a rollout, a column a place in it. Green tokens have a positive advantage, \
red ones a negative one; underlined ones are clipped; grey ones were not sampled. What is \
pale is shared with the row above. Point at a token for its part of the loss.</p>
<p>$loss</p>
<table>
$rollouts
</table>
</html>
""")


def as_page(report) -> str:
    """Return the report as one page of HTML."""
    # Sorted by their tokens, rollouts are the leaves of the tree of their prefixes from left to
    # right. The prefix that a row shares with the row above is drawn pale.
    sequences = sorted(report.groups[report.group], key=lambda s: s.tokens)
    largest = max((abs(A) for s in sequences for A in s.A or []), default=0.0) or 1.0
    lines = []
    above = []
    for s in sequences:
        shared = len(os.path.commonprefix([above, s.tokens]))
        above = s.tokens
        cells = [f"<th>rollout {s.number}, reward {s.reward:g}</th>"]
        for place, row in enumerate(token_rows(report, s)):
            kinds = {"token": True, "shared": place < shared, "given": row["part"] is None,
                     "clips": row.get("clips")}  # fmt: skip
            classes = " ".join(kind for kind in kinds if kinds[kind])
            shade = ""
            if not kinds["given"]:
                # Green for tokens that the step makes likelier, red for the others.
                rgb = "46, 160, 67" if row["A"] > 0 else "248, 81, 73"
                shade = f' style="background: rgba({rgb}, {0.75 * abs(row["A"]) / largest:.2f})"'

            # A token links to itself: named in the page's address, it shows its numbers at once.
            name = f"r{s.number}t{place}"
            text, numbers = map(html.escape, (row["text"], "\n".join(equations(report, s, row))))
            cells.append(
                f'<td><a class="{classes}" id="{name}" href="#{name}"{shade}>{text}</a>'
                f'<div class="numbers">{numbers}</div></td>'
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")

    # The names of tasks and directories are text, and not markup.
    return PAGE.substitute(
        verdict=html.escape(report.verdict), color="ok" if report.wrong is None else "outside",
        summary=html.escape(summary(report, True)), group=report.group,
        loss=html.escape(report.loss), rollouts="\n".join(lines),
    )  # fmt: skip


def equations(report, s, row) -> list:
    """Return the equations for one token with its numbers, without what the settings leave out."""
    c = report.config
    if row["part"] is None:
        return [f"{row['text']}: {row['why']}"]
    is_mean = c.objective == "gspo"
    lines = [
        f"A = {row['A']:.6f}    log-probs: sampler {row['smp']:.6f}, old {row['old']:.6f}, "
        f"now {row['lp']:.6f}",
        f"(2) r = exp({'mean of ' * is_mean}now - old) = {row['r']:.6f}",
    ]

    # l after (3) and (4). The token's `policy` is w l / Z, its share in the loss. The equation is
    # the objective's own, from its docstring, with the values of the settings.
    said = OBJECTIVES[c.objective].__doc__.removeprefix("Return the terms of ").removesuffix(".")
    for name in ("clip_low", "clip_high", "cispo_bound"):
        said = said.replace(name, f"{getattr(c, name):g}")
    weight = f", times {row['x']:.6f} (4)" if c.importance_cap else ""
    clipped = ", clipped" if row["clips"] else ""
    lines.append(f"(3) {said}{weight}: {row['policy'] * s.Z / s.w:.6f}{clipped}")

    # What is added to l, and its share in the loss of its update.
    if s.ref is not None and c.kl_in == "loss":
        lines.append(f"(5) + {c.kl_coef:g} k = {c.kl_coef:g} x {row['k']:.6f}")
    if c.entropy_coef:
        lines.append(f"(5) - {c.entropy_coef:g} H = -{c.entropy_coef:g} x {row['H']:.6f}")
    if s.v is not None:
        lines.append(f"(6) + the critic's {row['value']:.6f}")
    of = f", of {report.updates} updates" if report.updates > 1 else ""
    total = row["part"] * report.updates * s.Z / s.w
    lines.append(f"(7) w l / Z = {s.w:g} x {total:.6f} / {s.Z:g}{of}: {row['part']:.6e}")
    return lines
