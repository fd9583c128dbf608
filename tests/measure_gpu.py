"""What tests/gpu.sh asks of a GPU: runs its commands, keeps what they print, writes the page.

    python tests/measure_gpu.py record NAME -- COMMAND ..    runs a command and keeps its rows
    python tests/measure_gpu.py results                      the GPU section of tests/RESULTS.md

A record is a line of OUT/NAME.jsonl: the command, the device, the versions, the seconds, the exit
code, all that was printed, and as `result` the last line of it, which every measurement of this
repository prints as JSON. Nothing is thrown away: a command that is run again adds a line, and the
page takes the last.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- gpu.sh: begin -->", "<!-- gpu.sh: end -->"
DEVICES = "cuda", "cpu"
SIZES = "full", "toy"
LIMIT = 600.0  # seconds that a command may take

# record -----------------------------------------------------------------------------------------


def machine(device) -> dict:
    """What a figure depends on besides the code."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
    return dict(device=device, machine=name, torch=torch.__version__, cuda=torch.version.cuda)


def record(name, command, out, device, size, limit=LIMIT) -> int:
    """Run a command, show what it prints, and append what came of it to OUT/NAME.jsonl.

    Returns the command's exit code; 124 if it was ended for taking longer than limit.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device here; DEVICE=cpu SIZE=toy is the dry run")
    out.mkdir(parents=True, exist_ok=True)
    where = machine(device)  # before the command is there: it may want all of the device's memory
    begun = time.perf_counter()
    lines = []

    # A session of its own, so that what the command has started (torchrun's ranks) ends with it.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        late = threading.Event()

        def end():
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:  # Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
    if late.is_set():
        code = 124
        print(f"{name}: ended, for it took more than {limit:.0f} s", file=sys.stderr)

    kept = dict(name=name, size=size, command=command, code=code) | where
    kept |= dict(seconds=round(time.perf_counter() - begun, 1), printed=lines)
    kept |= dict(result=last_json(lines) if code == 0 else None)
    with open(out / f"{name}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n")
    return code


def last_json(lines):
    """The object of the last line, which every measurement ends with."""
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("the command's last line is no JSON object: it is no measurement")
    return found


# results ----------------------------------------------------------------------------------------


def newest(out, device, size) -> dict:
    """{name: the last record} of a device and size, in the order in which gpu.sh lists them."""
    found = {}
    for path in sorted(out.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            kept = json.loads(line)
            if (kept["device"], kept["size"]) == (device, size):
                found[kept["name"]] = kept
    return found


def table(header, rows) -> list:
    """Lines of Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return lines + ["| " + " | ".join(f"{cell}" for cell in row) + " |" for row in rows]


def checks(records) -> list:
    """Of the `check`s: the largest error in float64, whether all was in bounds."""
    rows = []
    for name, kept in records.items():
        result = kept["result"]
        rows.append((f"`{name}`", f"{result['max_error']:.0e}", f"{kept['seconds']:.0f} s"))
    return table(("check, in float64", "largest error", "took"), rows)


def ring_rows(kept) -> list:
    seconds = kept["result"]["bench"]
    rows = []
    for key, value in seconds.items():
        way, tokens = key.rsplit(", ", 1)
        share = value / seconds[f"SDPA, causal, {tokens}"]
        rows.append((tokens, way, f"{1000 * value:.2f}", f"{share:.2f}"))
    return table(("tokens", "kernel", "ms, forward and backward", "of SDPA's"), rows)


def tree_rows(kept) -> list:
    rows = []
    for row in kept["result"]["rows"]:
        share = row["speedup"] / row["flop_bound"]
        numbers = f"{row['cpu_s']:.3f}", f"{row['peak_mb']:.0f}", f"{row['speedup']:.2f}"
        rows.append((row["shape"], row["way"], *numbers, f"{row['flop_bound']:.2f}, {share:.0%}"))
    header = "sequences", "way", "seconds", "MiB", "times flat", "FLOP bound, of it"
    return table(header, rows)


def step_rows(kept) -> list:
    rows = []
    for row in kept["result"]["rows"]:
        s = row["seconds"]
        numbers = [f"{s[key]:.3f}" for key in ("rollout", "train flat", "train tree")]
        numbers += [f"{row['gain']:.2f} of {row['bound']:.2f}", f"{row['tokens_per_second']:.0f}"]
        flat, tree = row["gflops_flat"] / 1e3, row["gflops"] / 1e3
        share = "" if "utilisation" not in row else f", {row['utilisation']:.0%} of the peak"
        rows.append((row["shape"], *numbers, f"{flat:.3g}, {tree:.3g}{share}"))
    header = "step", "rollout s", "flat s", "tree s", "gain of bound", "tokens/s", "TFLOP/s"
    return table(header, rows)


def generation_rows(kept) -> list:
    result = kept["result"]
    rows = []
    for work, rate in result["tokens_per_s"].items():
        times = result["times_transformers"].get(work, "transformers is not installed")
        rows.append((work, f"{rate:.0f}", times))
    return table(("work", "tokens/s", "times transformers"), rows)


TABLES = {  # how gpu.sh's names begin -> what is shown of their records
    "ring": ring_rows, "tree": tree_rows, "step": step_rows, "generation": generation_rows,
}  # fmt: skip


def section(records, names) -> str:
    """The text between the page's two markers. names: all commands that there are."""
    unknown = sorted(records.keys() - set(names))
    if unknown:
        raise ValueError(f"records of no command of tests/gpu.sh: {', '.join(unknown)}")
    missing = [name for name in names if name not in records]
    lines = []
    if not records:
        lines.append("Not run on a GPU yet: " + ", ".join(f"`{name}`" for name in names) + ".")
        return "\n".join(lines)

    # A page of figures from two machines would compare what cannot be compared.
    places = {(x["machine"], x["torch"], x["cuda"]) for x in records.values()}
    if len(places) > 1:
        raise ValueError(f"the records come from different machines or versions: {places}")
    ((name, version, cuda),) = places
    cuda = f", CUDA {cuda}" if cuda else ""
    lines.append(f"{name}, torch {version}{cuda}. Each part has the command that made it.")

    good = {name: kept for name, kept in records.items() if kept["result"] is not None}
    of_checks = {name: kept for name, kept in good.items() if name.startswith("check-")}
    if of_checks:
        lines += ["", *checks(of_checks)]
    for name in names:
        if name in good and name not in of_checks:
            kept = good[name]
            lines += ["", f"`sh tests/gpu.sh {name}`, {kept['seconds']:.0f} s:", ""]
            lines += TABLES[name.split("-")[0]](kept)

    # What went wrong and what is not there is said, and not left out.
    failed = [f"`{x}` (exit code {records[x]['code']})" for x in records if x not in good]
    if failed:
        lines += ["", f"Failed: {', '.join(failed)}."]
    if missing:
        lines += ["", "Not run: " + ", ".join(f"`{name}`" for name in missing) + "."]
    return "\n".join(lines)


def write_results(page, target, records, names) -> None:
    """target: page with a new section between its markers; all else stays as it is."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    new = f"{before}{begin}\n{section(records, names)}\n\n{end}{after}"
    target.write_text(new, encoding="utf-8")


# main -------------------------------------------------------------------------------------------


def main(argv) -> int:
    command = []
    if "--" in argv:
        at = argv.index("--")
        command = argv[at + 1 :]
        argv = argv[:at]
    parser = argparse.ArgumentParser("measure_gpu.py")
    parser.add_argument("what", choices=("record", "results"))
    parser.add_argument("names", nargs="+", help="record's name; of results, all that there are")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--size", choices=SIZES, default="full")
    options = parser.parse_args(argv)
    out, device, size = options.out, options.device, options.size
    try:
        if options.what == "record":
            return record(options.names[0], command, out, device, size)

        # Only whole figures of a GPU go into the repository's page; others into a copy of it.
        page = ROOT / "tests" / "RESULTS.md"
        target = page if (device, size) == ("cuda", "full") else out / "RESULTS.md"
        write_results(page, target, newest(out, device, size), options.names)
        print(f"written: {target}")
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
