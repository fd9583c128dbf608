"""Read a command line: a flag for each field of Config, --help, and the papers' settings.

If you know the flags, skip this file.
"""

import argparse
import dataclasses

from full.learn.metrics import glossary
from full.ranks.joining import is_rank_0
from full.ranks.plans import letters_table
from full.run.config import (
    Config, choices_of, flag_name, joined_choices, nearest, read_settings,
)  # fmt: skip

# What --help ends with. full/RECIPES.md has the settings of other code bases that mean the same.
PAPERS = """\
Papers and their settings. The rest stays at its default, and each paper has its own learning rates.

  GRPO         2402.03300  --advantage group_std --aggregation sequence_mean --clip-high 0.2
                           --kl-coef 0.04 --entropy-coef 0
  Dr.GRPO      2503.20783  --aggregation constant --clip-high 0.2 --entropy-coef 0
  RLOO         2402.14740  --advantage leave_one_out --kl-coef 0.05 --kl k1 --kl-in reward
                           --minibatches 1 --entropy-coef 0
  REINFORCE++  2501.03262  --advantage none_batch --kl-coef 0.01 --kl k1 --kl-in reward
                           --clip-high 0.2 --entropy-coef 0
  LitePPO      2508.08221  --advantage batch_std --clip-high 0.2 --entropy-coef 0
  PPO          1707.06347  --advantage gae --clip-high 0.2 --entropy-coef 0
  dual clip    1912.09729  --dual-clip 3
  DAPO         2503.14476  --advantage group_std --dynamic-sampling 3
                           --overlong filter --overlong-buffer 4 --entropy-coef 0
  CISPO        2506.13585  --objective cispo --advantage group_std --entropy-coef 0
  GSPO         2507.18071  --objective gspo --advantage group_std --aggregation sequence_mean
                           --clip-low 3e-4 --clip-high 4e-4 --entropy-coef 0
  GMPO         2507.20673  --objective gmpo --advantage group_std --aggregation sequence_mean
                           --clip-low 0.4 --clip-high 0.4 --entropy-coef 0
  SAPO         2511.20347  --objective sapo --advantage group_std --aggregation sequence_mean
                           --entropy-coef 0
  DPPO         2602.04879  --objective dppo --clip-low 0.15 --clip-high 0.15
                           --advantage group_std --entropy-coef 0
  decoupled PPO  2110.00641  --proximal --importance-cap 1e9: the paper's weights have no bound
  TIS            1802.01561  --proximal --importance-cap 2: the same weights, truncated as V-trace's
  IcePop         2510.18855  --proximal --importance mask --importance-low 0.5 --importance-cap 5
  sequence mask  TRL         --proximal --importance mask --importance-of sequence
                             --importance-cap 3
  distillation, on-policy    --teacher DIR --objective reinforce --minibatches 1
"""

CONFIG_HELP = "settings: a run's config.json, or JSON or .toml of its fields; flags win"


def parse_config(argv) -> Config:
    """Return the Config of a command line; with --resume, what the run stored is the default."""
    parser = argparse.ArgumentParser(
        prog="python -m full", description="GRPO and its relatives, by any plan.",
        allow_abbrev=False,
        epilog=f"{PAPERS}\n{glossary()}\nThe letters of --plan\n\n{letters_table()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--FLAG VALUE ...] | plot RUN .. | audit RUN | eval RUN_OR_DIR"
        " | export RUN DIR | check | --help",
    )  # fmt: skip

    # Flags are listed in the order of Config's lines, where a title begins a group.
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for name in filter(fields.get, Config.__annotations__):
        if title := fields[name].metadata["title"]:
            group = parser.add_argument_group(title)
        if title == "the run":
            group.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
        add_flags(group, [fields[name]])

    # Flags that were not typed are absent from `given`: a resumed run has its own values for them.
    def refuse(reason):  # argparse would print its usage and exit
        raise ValueError(reason)

    parser.error = refuse
    if not is_rank_0():
        parser.print_help = lambda: None  # rank 0 prints it for all
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        what, near = "command", ""
        if unknown[0].startswith("-"):
            name = unknown[0].partition("=")[0].strip("-").replace("-", "_")
            what, near = "flag", nearest(name, ["config", *fields], flag_name)
        refuse(f"expected a {what} that --help lists, got {unknown[0]}{near}")
    given = vars(known)
    file = given.pop("config")
    if file is not None:
        given = read_settings(file, given) | given
    return Config.of(given)


def add_flags(parser, fields):
    """Add fields of Config to a parser. A flag that is not typed is absent from the result."""
    for f in fields:
        how = dict(type=f.type, metavar=getattr(f.type, "__name__", ""))
        if choices := choices_of(f):
            how = dict(choices=choices, metavar=joined_choices(choices, "|"))

        # What a default depends on is said. A bool is --FLAG or --no-FLAG, and off by default.
        default = f"{f.default!r}"
        if f.name in Config.BY_START:
            default = "{random!r}; with --model {model!r}, and with --lora-rank too {lora!r}"
            default = default.format(**Config.BY_START[f.name])
        if f.name == "advantage":
            default = "'group_mean'; with --teacher 'teacher'"
        if f.name == "proximal":
            default = "on with bfloat16 or --engine, but not with --staleness"
        text = f.metadata["help"].replace("%", "%%") + f" [{default}]"
        if f.metadata["alone"] is not None:
            how |= dict(nargs="?", const=f.metadata["alone"])
        if f.type is bool:
            how = dict(action=argparse.BooleanOptionalAction)
            text = text.removesuffix(" [False]")
        parser.add_argument(flag_name(f.name), default=argparse.SUPPRESS, help=text, **how)

