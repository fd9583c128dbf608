"""What tests/gpu.sh asks of a GPU: runs its commands, keeps what they print, writes the page.

A record is OUT/NAME.json: the device, the versions, the seconds, the exit code, all that was
printed, and as `result` its last line, which every measurement prints as JSON.

    python tests/bench/gpu.py check SUBJECT --device cuda      models, ring, tree, parallel, grpo
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness import ROOT, print_table

import check_attention
from check_attention import TinyModel, rows_of_rank, tree_rows
from check_models import CASES, path_errors
from full import equivalence
from full.check import STEPS, step_error
from full.ranks.joining import connect
from full.tiny import tiny_model

BEGIN, END = "<!-- gpu.sh: begin -->", "<!-- gpu.sh: end -->"
LIMIT = 600.0  # seconds that a command may take
HERE, MEASURE = "tests/bench/gpu.py", "tests/bench/measure.py"
COMMANDS = {  # name: the program and its words, and what it asks
    "check-models": (f"{HERE} check models", "every path of a model, in float64, against the CPU"),
    "check-ring": (f"{HERE} check ring", "every mask and kernel of attention, on one rank"),
    "check-tree": (f"{HERE} check tree", "every shape of tree and size of chunk"),
    "check-parallel": (f"{HERE} check parallel", "runs in every mode and with every tree"),
    "check-grpo": (f"{HERE} check grpo", "steps of every kind of setting against steps by hand"),
    "ring": (f"{MEASURE} kernel", "a block of the ring against SDPA and flash, bfloat16"),
    "tree-star": (f"{MEASURE} tree --only GRPO", "a 0.6B model, 8 answers of 1024, tree and flat"),
    "tree-chain": (f"{MEASURE} tree --only multi", "the same on a conversation of 8 turns"),
    "generation": (f"{MEASURE} models --repeats 2", "the 0.6B model against transformers"),
}


def words_of(name, device, size) -> list:
    """Return the command of a name: a program and its words."""
    return [*COMMANDS[name][0].split(), "--device", device, "--size", size]


# record -----------------------------------------------------------------------------------------


def machine(device) -> dict:
    """What a figure depends on besides the code."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    return dict(device=device, machine=name, torch=torch.__version__, cuda=torch.version.cuda)


def record(name, command, options, limit=LIMIT) -> int:
    """Run a command, show what it prints, and write what came of it to OUT/NAME.json.

    Returns the command's exit code; 124 if it was ended for taking longer than limit.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    where = machine(options.device)  # before the command, which may want all of its memory
    begun, lines = time.perf_counter(), []

    # `timeout` ends what the command has started (torchrun's ranks) with it, also at a Ctrl-C.
    watched = ["timeout", "--kill-after", "10", f"{limit:g}", *command]
    with subprocess.Popen(watched, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
            code = process.wait()
        finally:
            process.terminate()
    kept = dict(name=name, size=options.size, code=code) | where
    kept |= dict(seconds=round(time.perf_counter() - begun, 1), printed=lines)
    kept |= dict(result=json.loads(lines[-1]) if code == 0 else None)
    (options.out / f"{name}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return code


# results ----------------------------------------------------------------------------------------


def section(records, names) -> str:
    """Return the text between the page's two markers. names: all commands that there are."""
    missing = ", ".join(f"`{name}`" for name in names if name not in records)
    if not records:
        return f"Not run on a GPU yet: {missing}."

    # A page of figures from two machines would compare what cannot be compared.
    places = {(x["machine"], x["torch"], x["cuda"]) for x in records.values()}
    if len(places) > 1:
        raise ValueError(f"the records come from different machines or versions: {places}")
    ((name, version, cuda),) = places
    lines = [f"{name}, torch {version}, CUDA {cuda}. Each part has the command that made it."]

    good = {name: records[name] for name in names if records.get(name, {}).get("result")}
    checks = {name: x for name, x in good.items() if name.startswith("check-")}
    lines += ["", "| check, in float64 | largest error | took |", "|---|---|---|"] * bool(checks)
    lines += [f"| `{name}` | {x['result']['max_error']:.0e} | {x['seconds']:.0f} s |"
              for name, x in checks.items()]  # fmt: skip
    for name in [name for name in good if name not in checks]:
        rows = [line for line in good[name]["printed"] if line.startswith("|")]
        lines += ["", f"`{name}`, {good[name]['seconds']:.0f} s:", "", *rows]

    # What went wrong and what is not there is said, and not left out.
    failed = [f"`{x}` (exit code {records[x]['code']})" for x in records if x not in good]
    lines += ["", f"Failed: {', '.join(failed)}."] * bool(failed)
    lines += ["", f"Not run: {missing}."] * bool(missing)
    return "\n".join(lines)


def write_results(page, target, records, names) -> None:
    """Write the page to target with a new section between its markers; all else stays."""
    before, rest = page.read_text(encoding="utf-8").split(f"{BEGIN}\n")
    _, after = rest.split(f"{END}\n")
    new = f"{before}{BEGIN}\n\n{section(records, names)}\n\n{END}\n{after}"
    target.write_text(new, encoding="utf-8")


# check ------------------------------------------------------------------------------------------
#
# What one device can show of each file. The slow definition is computed on the CPU, in float64, and
# the file's own paths on the device, in float64 too: a wrong formula shows as 1e-2, another order
# of sums as 1e-15. With one GPU there is one rank, and so of messages only that NCCL is there.


def model_rows(device, few):
    """(row, error, bound) of models.py: every path of every family."""
    torch.manual_seed(0)
    cases = {name: CASES[name] for name in (("qwen3",) if few else CASES)}
    for name, (model_type, changes) in cases.items():
        model = tiny_model(model_type, **changes)
        there = tiny_model(model_type, **changes).to(device)
        for path, error in path_errors(model, mine=there):
            yield f"{name}: {path}", error, 1e-12


def ring_rows(device, few):
    """(row, error, bound) of ring_attention.py on one rank: every mask, way and dtype."""
    for name, row, bound, columns in rows_of_rank(8 if few else 23, device):
        for column, error in columns.items():
            yield f"{name}: {row}, {column}", error, bound


def forest_rows(device, few):
    """(row, error, bound) of tree_attention.py: every shape of tree, every size of chunk."""
    forests = check_attention.forests()
    names = ("prefixes", "star") if few else forests
    rows = tree_rows(TinyModel(), {name: forests[name] for name in names}, TinyModel().to(device))
    for row, line in rows if few else [*rows, *check_attention.family_rows(device).items()]:
        for column, error in line.items():
            yield f"{row}, {column}", error, 1e-10


def parallel_rows(device, few):
    """(row, error, bound) of the runs of one rank: each mode and tree, the truth on the CPU."""
    rows = [row for row in equivalence.ROWS if row.ranks == 1]
    if device == OTHER:  # it has no FSDP, and no checkpointing by torch
        rows = [row for row in rows if not re.search("fsdp|--ac", row.flags)]
    rows = rows[:2] if few else rows
    truths = equivalence.references(rows)
    for row in rows:
        found = equivalence.row_errors(row, truths[row.family, row.run], device)
        yield row.name, max(found.values()), row.bound


def grpo_rows(device, few):
    """(row, error, bound) of steps by hand."""
    some = "CISPO, TIS", "balanced experts, filter"
    for name in some if few else STEPS:
        yield f"a step by hand: {name}", step_error(device, **STEPS[name]), 1e-12


OTHER = "other"  # the device of tests/other_device.py: no FSDP, and no checkpointing by torch
CHECKS = {
    "models": model_rows, "ring": ring_rows, "tree": forest_rows, "parallel": parallel_rows,
    "grpo": grpo_rows,
}  # fmt: skip


def check(subject, device, size) -> int:
    """Return 1 if an error is over its bound."""
    # One rank, with the backend that the device has among several.
    where = connect(device, timeout=600)
    is_good = show_rows(subject, device, CHECKS[subject](where, size == "toy"))
    dist.destroy_process_group()
    return 0 if is_good else 1


def show_rows(subject, device, rows) -> bool:
    """Print the table and, for a program, its last line; whether every row is in its bound."""
    print(f"{subject} on {device} against the CPU, float64 where no other dtype is said")
    rows = print_table(dict(check=name, error=error, bound=bound,
                            verdict="ok" if error <= bound else "FAILED")  # a NaN is in no bound
                       for name, error, bound in rows)  # fmt: skip
    ok = all(row["verdict"] == "ok" for row in rows)
    exact = [row["error"] for row in rows if row["bound"] <= 1e-10]
    told = dict(check=subject, device=device, ok=ok, rows=len(rows), max_error=np.max(exact).item())
    print(json.dumps(told))
    return ok


# main -------------------------------------------------------------------------------------------


def results(options) -> int:
    """Write the page of the records that are in OUT, of this device and size."""
    # Only whole figures of a GPU go into the repository's page; others into a copy of it.
    page, where = ROOT / "full" / "RESULTS.md", (options.device, options.size)
    target = page if where == ("cuda", "large") else options.out / "RESULTS.md"
    found = [json.loads(path.read_text()) for path in options.out.glob("*.json")]
    found = {x["name"]: x for x in found if (x["device"], x["size"]) == where}
    write_results(page, target, found, [*COMMANDS])
    print(f"written: {target}")
    return 0


def main(argv) -> int:
    parser = argparse.ArgumentParser("gpu.py")
    parser.add_argument("what", choices=("list", "results", "check", *COMMANDS))
    parser.add_argument("of", nargs="?", choices=CHECKS, help="check's subject")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("large", "toy"), default="large")
    options = parser.parse_args(argv)
    name, device, size = options.what, options.device, options.size
    try:
        if name == "list":
            print("\n".join(f"{name}: {asked}" for name, (_, asked) in COMMANDS.items()))
            return 0
        if name == "results":
            return results(options)
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device here; DEVICE=cpu SIZE=toy is the dry run")
        if name == "check":
            if options.of is None:
                raise ValueError(f"expected check of {', '.join(CHECKS)}")
            return check(options.of, device, size)
        return record(name, [sys.executable, *words_of(name, device, size)], options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
