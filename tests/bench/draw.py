"""Draw a picture for each idea, from what the five files compute (needs matplotlib).

    python tests/bench/draw.py            # writes assets/ring.png, tree.png and pipeline.png
    python tests/bench/draw.py ring       # writes one of them
    python tests/bench/draw.py rollout    # prints the README's table of a group of rollouts

The numbers are recorded, not typed in. `ring` records the blocks and masks of a ring of 4 ranks,
and `pipeline` a run of 1F1B on 4 ranks. `tree` and `rollout` show a group that a small policy
played after some training. A picture is 1400 pixels wide, for pages that show it at 700.
"""

import argparse
import functools
import itertools
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import parallel
import ring_attention
import train_grpo
import tree_attention

WIDTH = 7  # inches
DOTS = 200  # per inch
INK, GRAY, PALE = "#222222", "#6b6b6b", "#e6e6e6"
COLORS = "#4477aa", "#ee8866", "#44aa99", "#aa5599"  # of ranks, of groups of ranks


# 1. What is drawn -------------------------------------------------------------------------------


def record_ring(world, length):
    """Run a ring. Return, for each rank and hop, the owner of the block and the mask (s, s)."""

    def run():
        hops = []
        pairs_of = ring_attention.visible_pairs

        # A hop asks once which chunks of a block our chunks see.
        def watched(rank, owner, world, n, *given):
            mask = torch.zeros(2 * n, 2 * n, dtype=torch.bool)
            hops.append((owner, mask))
            for a, b, visible in pairs_of(rank, owner, world, n, *given):
                some = mask[a * n : a * n + n, b * n : b * n + n]
                some[:] = True if visible is None else visible
                yield a, b, visible

        ring_attention.visible_pairs = watched  # in this process, which ends soon
        q = torch.zeros(1, 1, length // world, 2)
        ring_attention.ring_attention(q, q, q)
        return hops

    return ring_attention.launch(world, run)


def record_1f1b(stages, number):
    """Run 1F1B. Return, for each stage, the tuples (F or B, micro-batch, start, end), in order."""

    # Seconds on a shared CPU say little. So each stage has a clock, a forward takes 1 and a
    # backward 2, and a message is the time at which it was sent: it cannot be used before.
    def run():
        done = []

        def work(letter, n, message, duration):
            start = max(message.item(), done[-1][3] if done else 0.0)
            done.append((letter, n, start, start + duration))
            return torch.full_like(message, start + duration)

        class Work(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, n):
                ctx.n = n
                return work("F", n, x, 1)

            @staticmethod
            def backward(ctx, dy):
                return work("B", ctx.n, dy, 2), None

        def forward(n, x):
            return Work.apply(torch.zeros(1, requires_grad=True) if x is None else x, n)

        parallel.run_1f1b(forward, number, torch.zeros(1), dist.group.WORLD)
        return done

    return ring_attention.launch(stages, run)


@functools.cache
def record_group():
    """Train a small policy on `guess`, and return a group that it plays then.

    Returns the task, the settings, the rollouts, and {(rollout, target): (log-prob now, loss)}. Now
    is before the second update of a step, when the first one has changed the policy. There is no
    entropy bonus, so the loss of a token is equation (3).
    """
    config = train_grpo.Config(
        seed=3, steps=50, size=5, turns=3, layers=1, hidden=32, heads=2, prompts=16, group=4,
        max_new_tokens=8, lr=0.01, entropy_coef=0.0,
    )  # fmt: skip
    task = train_grpo.Guess(config)

    def run():
        grid = parallel.Grid("d1")
        trainer = train_grpo.Trainer(config, train_grpo.build_policy(config, task), grid)
        source = train_grpo.Source(config, task, trainer)
        for step in range(23):  # by then it plays well-formed games, and not only the best ones
            batch = source.get(step)
            trainer.prepare(batch)
            for episodes in batch.minibatches():
                with torch.no_grad():
                    scores = trainer.score(config, trainer.model, episodes, grid.group["c"])
                trainer.forward_backward(episodes, trainer.loss_denominator(episodes))
                trainer.optim_step(trainer.learning_rate(step))
        return episodes, scores

    ((episodes, (sampled, logprobs, entropies)),) = ring_attention.launch(1, run)

    # The last group of the step has four different, well-formed games that share beginnings.
    first, scored = len(episodes) - config.group, {}
    for n, (b, t) in enumerate(sampled):
        if b >= first:
            given = logprobs[n : n + 1], entropies[n : n + 1], 1  # the loss of this token alone
            loss = train_grpo.grpo_loss(config, episodes, [(b, t)], *given).item()
            scored[b - first, t] = logprobs[n].item(), loss
    return task, config, episodes[first:], scored


def tree_of(episodes):
    """Return the packed tree of some rollouts: tokens, paths, and {rollout: its path}."""
    sequences = [torch.tensor(episode.tokens) for episode in episodes]
    packed, last = tree_attention.pack(tree_attention.radix_tree(sequences))
    tokens, _, _, ends = zip(*packed)
    paths = [[j for j in range(t + 1) if t < ends[j]] for t in range(len(tokens))]
    return tokens, paths, {rollout: paths[t] for rollout, t in last.items()}


# 2. Pens ----------------------------------------------------------------------------------------


def page(width, height):
    """Return the axes of a white page of some units, all of one length, from its upper left."""
    size = WIDTH, WIDTH * height / width
    axes = Figure(figsize=size, dpi=DOTS).add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes


def write(axes, x, y, text, size=8, color=INK, **options):
    options = dict(ha="center", va="center_baseline") | options
    axes.text(x, y, text, fontsize=size, color=color, **options)


def left(axes, x, y, text, **options):
    write(axes, x, y, text, ha="left", **options)


def cells(axes, x, y, colors, width=1, height=1):
    """Draw a table of colors, [row][column]."""
    colors = np.array([[to_rgb(color) for color in row] for row in colors])
    rows, columns, _ = colors.shape
    edges = x + width * np.arange(columns + 1), y + height * np.arange(rows + 1)
    axes.pcolormesh(*edges, colors, edgecolors="white", linewidth=0.4)


def on(color):
    """Return the color of a text on a color."""
    return "white" if np.dot(to_rgb(color), (0.3, 0.6, 0.1)) < 0.5 else INK


def mixed(color, share):
    """Return a color with white: a share of 1 is the color itself, and 0 is white."""
    return tuple(1 - share * (1 - x) for x in to_rgb(color))


# 3. The pictures --------------------------------------------------------------------------------


def ring(world=4, length=16):
    """Draw the hops of a ring: the block that a rank has at each hop, and the mask."""
    shares = [ring_attention.zigzag_indices(length, r, world).tolist() for r in range(world)]
    hops = record_ring(world, length)
    axes = page(35, 32)  # a unit is the side of a pair in a mask
    left(axes, 0.75, 1.1, f"{length} tokens on {world} ranks: each has an early and a late chunk",
         size=9.5)  # fmt: skip

    # Who holds which token.
    left(axes, 0.75, 2.65, "tokens", color=GRAY)
    for rank, tokens in enumerate(shares):
        for t in tokens:
            cells(axes, 4.75 + 1.84 * t, 1.9, [[COLORS[rank]]], 1.84, 1.5)
            write(axes, 5.67 + 1.84 * t, 2.65, t, size=8.5, color=on(COLORS[rank]))

    # A mask for each rank and hop. Its columns are the keys of the block, in their owner's color.
    for hop in range(world):
        x = 6.5 + 7.5 * hop
        write(axes, x + 2, 4.8, "hop 0: own keys" if hop == 0 else f"hop {hop}")
        for rank in range(world):
            y = 6.5 + 5.9 * rank
            owner, visible = hops[rank][hop]
            cells(axes, x, y, np.where(visible, COLORS[owner], PALE))
            for n, t in enumerate(shares[owner]):
                write(axes, x + n + 0.5, y - 0.45, t, 7, COLORS[owner], weight="bold")
            write(axes, x + 2, y + 4.5, f"{int(visible.sum())} pairs", size=7)
            if hop + 1 < world:
                to = next(r for r in range(world) if hops[r][hop + 1][0] == owner)
                style = dict(arrowstyle="-|>", color=COLORS[owner], shrinkA=0, shrinkB=0)
                ends = (x + 7.25, 6.5 + 5.9 * to + 2), (x + 4.25, y + 2)
                axes.annotate("", *ends, arrowprops=style | dict(linewidth=1.2, mutation_scale=8))
    for rank, color in enumerate(COLORS):
        y = 6.5 + 5.9 * rank
        left(axes, 0.75, y + 1.5, f"rank {rank}", size=9, color=color, weight="bold")
        left(axes, 0.75, y + 2.5, "its queries", size=7, color=GRAY)
        for n, t in enumerate(shares[rank]):
            write(axes, 5.8, y + n + 0.5, t, size=7, color=color, weight="bold")
    text = ("A row is a query of the rank. A column is a key, in its owner's color.",
            "Keys move one rank per hop. In each hop all ranks have equally many visible pairs.")
    for n, line in enumerate(text):
        left(axes, 0.75, 30.35 + n, line, color=GRAY)
    return axes.figure


def tree():
    """Draw the packed tree of a group of rollouts, with its mask."""
    task, _, episodes, _ = record_group()
    tokens, paths, last_path = tree_of(episodes)
    names = [task.show([token]) for token in tokens]
    users = [sum(t in path for path in last_path.values()) for t in range(len(tokens))]
    colors = [mixed(COLORS[0], 0.25 + 0.75 * (n - 1) / (len(episodes) - 1)) for n in users]
    total, count = sum(len(e.tokens) for e in episodes), len(tokens)
    axes = page(39, 8.5 + count)  # a unit is a row of the tree and the side of a pair in the mask
    text = f"{len(episodes)} rollouts of one prompt: {total} tokens, {count} of them distinct"
    left(axes, 0.8, 1.2, text, size=9.5)
    left(axes, 0.8, 2.8, "the tree, in packed order", color=GRAY)
    side = 38.2 - count
    left(axes, side, 2.8, "the mask: a token sees its path from the root", color=GRAY)

    # Left, a token stands at its depth, in the row of its index. Right, a token sees its path.
    cells(axes, side, 6.2, [[colors[j] if j in path else "#f3f3f3" for j in range(count)]
                            for path in paths])  # fmt: skip
    for t, path in enumerate(paths):
        x, y, width = 1.72 * len(path) - 0.9, 6.7 + t, 1.5 if len(names[t]) == 1 else 2.6
        if len(path) > 1:
            axes.plot([x - 1.2, x - 1.2, x], [7.2 + path[-2], y, y], color=GRAY, linewidth=0.8)
        cells(axes, x, y - 0.5, [[colors[t]]], width)
        write(axes, x + width / 2, y, names[t], size=7.5, color=on(colors[t]))
        write(axes, side + t + 0.5, 5.9, names[t], size=7, rotation=90, va="bottom")
    for i, path in last_path.items():
        left(axes, 1.72 * len(path) + 0.9, 6.7 + path[-1], f"rollout {i}", size=7, color=GRAY)
    for place, n in enumerate(sorted({*users}, reverse=True)):
        x, y = 0.8 + 5.8 * place, count + 7
        cells(axes, x, y, [[colors[users.index(n)]]], 0.9, 0.9)
        left(axes, x + 1.2, y + 0.45, f"in {n} rollout{'s' * (n > 1)}", size=7.5, color=GRAY)
    return axes.figure


def pipeline(stages=4, number=8):
    """Draw 1F1B as a timeline: what each stage does when."""
    record = record_1f1b(stages, number)
    end = max(done[-1][3] for done in record)
    axes = page(end + 9, 0.42 * (end + 9))  # a unit is the time of a forward
    left(axes, 1, 1.4, f"1F1B: {stages} pipeline stages, {number} micro-batches", size=9.5)
    left(axes, end + 5.2, 3.7, "stored", size=7.5, color=GRAY)
    for stage, done in enumerate(record):
        y = 4.8 + 2.2 * stage
        left(axes, 1, y + 1, f"stage {stage}")
        cells(axes, 4.5, y, [[PALE]], end, 2)
        for letter, n, start, stop in done:
            color = mixed(COLORS["FB".index(letter)], 1 if n == 0 else 0.5)
            cells(axes, 4.5 + start, y, [[color]], stop - start, 2)
            weight = "bold" if n == 0 else "normal"
            write(axes, 4.5 + (start + stop) / 2, y + 1, n, color=on(color), weight=weight)
        stored = np.cumsum([1 if letter == "F" else -1 for letter, *_ in done])
        left(axes, end + 5.2, y + 1, max(stored), weight="bold")

    # The parts of the schedule of stage 0: its first forwards, and its last backwards.
    forwards, backwards = ([work for work in record[0] if work[0] == letter] for letter in "FB")
    times = 0, forwards[stages - 1][2], backwards[number - stages][3], end
    names = "warm-up", "one forward, one backward in turn", "cool-down"
    for name, start, stop in zip(names, times, times[1:]):
        axes.plot([start + 4.6, stop + 4.4], [4.4, 4.4], color=GRAY, linewidth=1.5)
        write(axes, (start + stop) / 2 + 4.5, 3.7, name, size=7.5, color=GRAY)

    # What the colors mean, and what more micro-batches are good for.
    for name, color, x in (("forward", COLORS[0], 0), ("wait", PALE, 16.5),
                           ("backward, twice as long", COLORS[1], 5.7)):  # fmt: skip
        cells(axes, 4.5 + x, 14.3, [[color]])
        left(axes, 5.9 + x, 14.8, name, size=7.5, color=GRAY)
    left(axes, 26, 14.8, "stored: micro-batches in memory, at most", size=7.5, color=GRAY)
    shares = {n: 100 * waiting(record_1f1b(stages, n)) for n in (1, number, 4 * number)}
    (one, a), (some, b), (many, c) = shares.items()
    left(axes, 4.5, 16.8, f"A stage waits {a:.0f} % of the time with {one} micro-batch, "
         f"{b:.0f} % with {some}, {c:.0f} % with {many}.")  # fmt: skip
    return axes.figure


def waiting(record) -> float:
    """Return the part of the time in which a stage waits, the mean of all stages."""
    end = max(done[-1][3] for done in record)
    busy = [sum(stop - start for _, _, start, stop in done) for done in record]
    return 1 - np.mean(busy) / end


def rollout():
    """Print a group of rollouts, and what the loss makes of one of them."""
    task, config, episodes, scored = record_group()
    prompt = f"one prompt, {len(episodes)} rollouts: find the hidden number {episodes[0].state[0]}"
    print(f"{prompt:60}  reward R  advantage A")
    for i, e in enumerate(episodes):
        names = [task.show([token]) for token in e.tokens]
        said = [f"[{x}]" if on else x for x, on in zip(names, [False, *e.mask], strict=True)]
        print(f"rollout {i}  {' '.join(said):49}  {e.reward:8.2f}  {e.advantage:+11.2f}")

    best = max(range(len(episodes)), key=lambda i: episodes[i].advantage)
    e, low, high = episodes[best], 1 - config.clip_low, 1 + config.clip_high
    labels = (
        f"rollout {best} in the loss, one update later", "mask: did the policy sample it?",
        "old: its log-prob then", "lp: its log-prob now", "r = exp(lp - old)",
        f"clip(r, {low:.2f}, {high:.2f})", "A, one number for the rollout",
        "l = -min(r A, clip(r) A)",
    )  # fmt: skip
    columns = []
    for t, (token, mask) in enumerate(zip(e.tokens[1:], e.mask, strict=True)):
        columns.append([task.show([token]), f"{mask:d}"])
        if mask:
            lp, loss = scored[best, t]
            ratio = np.exp(lp - e.old[t])
            numbers = e.old[t], lp, ratio, np.clip(ratio, low, high)
            columns[-1] += [*(f"{x:.3f}" for x in numbers), f"{e.advantage:+.3f}", f"{loss:.3f}"]
    for label, *cells in itertools.zip_longest(labels, *columns, fillvalue=""):
        print(f"{label:40}", *(f"{x:>7}" for x in cells))


PICTURES = {f.__name__: f for f in (ring, tree, pipeline)}


def save(figure, path):
    """Write a figure as a PNG of at most 64 colors, which is small and looks the same."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main(argv):
    """Write one picture, or all of them, or print the table."""
    parser = argparse.ArgumentParser("draw.py", description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", choices=[*PICTURES, "rollout"])
    chosen = parser.parse_args(argv).name
    if chosen == "rollout":
        return rollout()
    for name in [chosen] if chosen else PICTURES:
        path = ROOT / "assets" / f"{name}.png"
        save(PICTURES[name](), path)
        print(f"wrote {path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
