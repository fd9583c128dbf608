"""Draw a picture for each idea, from what the five files compute (needs matplotlib).

    python tests/bench/draw.py              # writes assets/ring.png, tree.png and pipeline.png
    python tests/bench/draw.py ring tree    # writes two of them
    python tests/bench/draw.py rollout      # prints the README's table of a group of rollouts

The numbers are recorded, not typed in. `ring` records the blocks and masks of a ring of 4 ranks,
and `pipeline` a run of 1F1B on 4 ranks. `tree` and `rollout` show a group that a small policy
played after some training. A picture is 1400 pixels wide, for pages that show it at 700.
"""

import functools
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
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

    # Of the groups of different, well-formed games, take the one whose rollouts share most.
    def interest(group):
        members = [e for e in episodes if e.group == group]
        games = {tuple(e.tokens) for e in members}
        shared = sum(map(len, games)) - len(tree_of(members)[0])
        return min(e.reward for e in members) > 0, len(games), shared

    group = max(sorted({e.group for e in episodes}), key=interest)
    members = [e for e in episodes if e.group == group]
    scored = {}
    for n, (b, t) in enumerate(sampled):
        if episodes[b] in members:
            given = logprobs[n : n + 1], entropies[n : n + 1], 1  # the loss of this token alone
            loss = train_grpo.grpo_loss(config, episodes, [(b, t)], *given).item()
            scored[members.index(episodes[b]), t] = logprobs[n].item(), loss
    return task, config, members, scored


def tree_of(episodes):
    """Return the packed tree of some rollouts: tokens, paths, and {rollout: its path}."""
    sequences = [torch.tensor(episode.tokens) for episode in episodes]
    packed, last = tree_attention.pack(tree_attention.radix_tree(sequences))
    tokens, _, _, ends = zip(*packed)
    paths = [[j for j in range(t + 1) if t < ends[j]] for t in range(len(tokens))]
    return tokens, paths, {rollout: paths[t] for rollout, t in last.items()}


# 2. Pens ----------------------------------------------------------------------------------------


class Canvas:
    """A white page whose coordinates are inches from its upper left corner."""

    def __init__(self, height):
        self.figure = Figure(figsize=(WIDTH, height), dpi=DOTS, facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")

    def text(self, x, y, text, size=8, color=INK, **options):
        options = dict(ha="center", va="center_baseline", family="DejaVu Sans") | options
        self.axes.text(x, y, text, fontsize=size, color=color, **options)

    def title(self, text):
        self.left(0.15, 0.22, text, size=9.5)

    def left(self, x, y, text, **options):
        self.text(x, y, text, ha="left", **options)

    def box(self, x, y, width, height, fill, text="", edge="white", **options):
        """Draw a filled rectangle. Its text is white on a dark color, and dark on a light one."""
        style = dict(facecolor=fill, edgecolor=edge, linewidth=0.8)
        self.axes.add_patch(Rectangle((x, y), width, height, **style))
        dark = np.dot(to_rgb(fill), (0.3, 0.6, 0.1)) < 0.5
        options = dict(color="white" if dark else INK) | options
        self.text(x + width / 2, y + height / 2, text, **options)

    def line(self, *points, color=GRAY, width=0.8):
        self.axes.plot(*zip(*points), color=color, linewidth=width)

    def arrow(self, start, end, color):
        style = dict(arrowstyle="-|>", color=color, linewidth=1.2, mutation_scale=8)
        self.axes.annotate("", end, start, arrowprops=style | dict(shrinkA=0, shrinkB=0))


def mixed(color, share):
    """Return a color with white: a share of 1 is the color itself, and 0 is white."""
    return tuple(1 - share * (1 - x) for x in to_rgb(color))


# 3. The pictures --------------------------------------------------------------------------------


def ring(world=4, length=16):
    """Draw the hops of a ring: the block that a rank has at each hop, and the mask."""
    shares = [ring_attention.zigzag_indices(length, r, world).tolist() for r in range(world)]
    hops = record_ring(world, length)
    canvas = Canvas(6.4)

    # Who holds which token.
    canvas.title(f"{length} tokens on {world} ranks: each has an early and a late chunk")
    size = 5.9 / length
    for rank, tokens in enumerate(shares):
        for t in tokens:
            canvas.box(0.95 + t * size, 0.38, size, 0.3, COLORS[rank], str(t), size=8.5)
    canvas.left(0.15, 0.53, "tokens", color=GRAY)

    # A mask for each rank and hop. Its columns are the keys of the block, in their owner's color.
    cell, right, down, first, top = 0.2, 1.5, 1.18, 1.3, 1.3
    side = cell * length / world
    for hop in range(world):
        x = first + hop * right
        label = "hop 0: own keys" if hop == 0 else f"hop {hop}"
        canvas.text(x + side / 2, 0.96, label)
        for rank in range(world):
            y = top + rank * down
            owner, visible = hops[rank][hop]
            draw_mask(canvas, (x, y, cell), visible, COLORS[owner])
            for n, t in enumerate(shares[owner]):
                place = x + (n + 0.5) * cell, y - 0.09
                canvas.text(*place, str(t), size=7, color=COLORS[owner], weight="bold")
            canvas.text(x + side / 2, y + side + 0.1, f"{int(visible.sum())} pairs", size=7)
            if hop + 1 < world:
                to = next(r for r in range(world) if hops[r][hop + 1][0] == owner)
                end = x + right - 0.05, top + to * down + side / 2
                canvas.arrow((x + side + 0.05, y + side / 2), end, COLORS[owner])
    for rank in range(world):
        y = top + rank * down
        canvas.left(0.15, y + 0.3, f"rank {rank}", size=9, color=COLORS[rank], weight="bold")
        canvas.left(0.15, y + 0.5, "its queries", size=7, color=GRAY)
        for n, t in enumerate(shares[rank]):
            place = first - 0.14, y + (n + 0.5) * cell
            canvas.text(*place, str(t), size=7, color=COLORS[rank], weight="bold")
    text = ("A row is a query of the rank. A column is a key, in its owner's color.",
            "Keys move one rank per hop. In each hop all ranks have equally many visible pairs.")
    for n, line in enumerate(text):
        canvas.left(0.15, top + world * down + 0.05 + 0.2 * n, line, color=GRAY)
    return canvas.figure


def draw_mask(canvas, place, visible, color):
    """Draw a mask of queries (rows) and keys (columns). The pairs that are visible have a color."""
    x, y, cell = place
    for i, row in enumerate(visible.tolist()):
        for j, is_visible in enumerate(row):
            canvas.box(x + j * cell, y + i * cell, cell, cell, color if is_visible else PALE)


def tree():
    """Draw the packed tree of a group of rollouts, with its mask."""
    task, _, episodes, _ = record_group()
    tokens, paths, last_path = tree_of(episodes)
    names = [task.show([token]) for token in tokens]
    users = [sum(t in path for path in last_path.values()) for t in range(len(tokens))]
    colors = [mixed(COLORS[0], 0.25 + 0.75 * (n - 1) / (len(episodes) - 1)) for n in users]

    row, top, deep = 0.18, 1.12, 0.31
    canvas = Canvas(top + row * len(tokens) + 0.4)
    total = sum(len(e.tokens) for e in episodes)
    text = f"{len(episodes)} rollouts of one prompt: {total} tokens, {len(tokens)} of them distinct"
    canvas.title(text)
    canvas.left(0.15, 0.5, "the tree, in packed order", color=GRAY)

    # Left, a token stands at its depth, in the row of its index.
    for t, path in enumerate(paths):
        x, y = 0.15 + deep * (len(path) - 1), top + row * (t + 0.5)
        if len(path) > 1:
            corner = x - deep + 0.1, y
            canvas.line((corner[0], top + row * path[-2] + row), corner, (x, y))
        width = 0.26 if len(names[t]) == 1 else 0.47
        canvas.box(x, y - row / 2, width, row, colors[t], names[t], size=7.5)
    for i, path in last_path.items():
        x, y = 0.15 + deep * len(path), top + row * (path[-1] + 0.5)
        canvas.left(x + 0.02, y, f"rollout {i}", size=7, color=GRAY)

    # Right, the mask: a token sees the tokens on its path.
    side = WIDTH - 0.15 - row * len(tokens)
    canvas.left(side, 0.5, "the mask: a token sees its path from the root", color=GRAY)
    for t, path in enumerate(paths):
        for j in range(len(tokens)):
            color = colors[j] if j in path else "#f3f3f3"
            canvas.box(side + j * row, top + row * t, row, row, color)
        options = dict(rotation=90, va="bottom", size=7)
        canvas.text(side + (t + 0.5) * row, top - 0.05, names[t], **options)

    # The shades.
    x, y = 0.15, top + row * len(tokens) + 0.22
    for n in sorted({*users}, reverse=True):
        canvas.box(x, y - 0.08, 0.16, 0.16, colors[users.index(n)])
        canvas.left(x + 0.22, y, f"in {n} rollout{'s' * (n > 1)}", size=7.5, color=GRAY)
        x += 1.05
    return canvas.figure


def pipeline(stages=4, number=8):
    """Draw 1F1B as a timeline: what each stage does when."""
    record = record_1f1b(stages, number)
    end = max(done[-1][3] for done in record)
    canvas = Canvas(2.95)
    canvas.title(f"1F1B: {stages} pipeline stages, {number} micro-batches")
    first, top, high = 0.75, 0.8, 0.36
    unit = (WIDTH - first - 0.75) / end
    canvas.left(first + unit * end + 0.12, top - 0.18, "stored", size=7.5, color=GRAY)
    for stage, done in enumerate(record):
        y = top + high * stage
        canvas.left(0.15, y + 0.165, f"stage {stage}")
        canvas.box(first, y, unit * end, 0.33, PALE)
        stored = most = 0
        for letter, n, start, stop in done:
            color = mixed(COLORS["FB".index(letter)], 1 if n == 0 else 0.5)
            x, weight = first + unit * start, "bold" if n == 0 else "normal"
            canvas.box(x, y, unit * (stop - start), 0.33, color, str(n), weight=weight)
            stored += 1 if letter == "F" else -1
            most = max(most, stored)
        canvas.left(first + unit * end + 0.12, y + 0.165, f"{most}", weight="bold")

    # The parts of the schedule of stage 0: its first forwards, and its last backwards.
    forwards, backwards = ([work for work in record[0] if work[0] == letter] for letter in "FB")
    warm_up = stages - 1
    times = 0, forwards[warm_up][2], backwards[number - warm_up - 1][3], end
    names = "warm-up", "one forward, one backward in turn", "cool-down"
    for name, start, stop in zip(names, times, times[1:]):
        left, right = first + unit * start + 0.02, first + unit * stop - 0.02
        canvas.line((left, top - 0.06), (right, top - 0.06), width=1.5)
        canvas.text((left + right) / 2, top - 0.18, name, size=7.5, color=GRAY)

    # What the colors mean, and what more micro-batches are good for.
    y = top + high * stages + 0.12
    legend = ("forward", COLORS[0]), ("backward, twice as long", COLORS[1]), ("wait", PALE)
    for n, (name, color) in enumerate(legend):
        x = first + (0, 0.95, 2.75)[n]
        canvas.box(x, y, 0.16, 0.16, color)
        canvas.left(x + 0.22, y + 0.08, name, size=7.5, color=GRAY)
    canvas.left(4.35, y + 0.08, "stored: micro-batches in memory, at most", size=7.5, color=GRAY)
    more = 4 * number
    one, some, many = (100 * waiting(record_1f1b(stages, n)) for n in (1, number, more))
    text = f"A stage waits {one:.0f} % of the time with 1 micro-batch"
    canvas.left(first, y + 0.4, f"{text}, {some:.0f} % with {number}, {many:.0f} % with {more}.")
    return canvas.figure


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
    e = episodes[best]
    lp, l = ({t: values[n] for (i, t), values in scored.items() if i == best} for n in (0, 1))
    ratio = {t: np.exp(lp[t] - e.old[t]) for t in lp}
    low, high = 1 - config.clip_low, 1 + config.clip_high
    rows = {
        "mask: did the policy sample it?": {t: f"{mask:d}" for t, mask in enumerate(e.mask)},
        "old: its log-prob then": {t: f"{e.old[t]:.3f}" for t in lp},
        "lp: its log-prob now": {t: f"{lp[t]:.3f}" for t in lp},
        "r = exp(lp - old)": {t: f"{r:.3f}" for t, r in ratio.items()},
        f"clip(r, {low:.2f}, {high:.2f})": {t: f"{np.clip(r, low, high):.3f}"
                                            for t, r in ratio.items()},
        "A, one number for the rollout": {t: f"{e.advantage:+.3f}" for t in lp},
        "l = -min(r A, clip(r) A)": {t: f"{l[t]:.3f}" for t in lp},
    }  # fmt: skip
    tokens = dict(enumerate(task.show([token]) for token in e.tokens[1:]))
    for name, cells in {f"rollout {best} in the loss, one update later": tokens, **rows}.items():
        print(f"{name:40}", *(f"{cells.get(t, ''):>7}" for t in range(len(e.mask))))


PICTURES = {f.__name__: f for f in (ring, tree, pipeline)}


def save(figure, path):
    """Write a figure as a PNG of at most 64 colors, which is small and looks the same."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main(argv) -> int:
    """Write the pictures with these names, or all of them, or print the table."""
    if argv == ["rollout"]:
        rollout()
        return 0
    unknown = [name for name in argv if name not in PICTURES]
    if unknown:
        expected = ", ".join(["rollout", *PICTURES])
        print(f"expected names of {expected}, got {unknown[0]}", file=sys.stderr)
        return 2
    for name in argv or PICTURES:
        path = ROOT / "assets" / f"{name}.png"
        save(PICTURES[name](), path)
        print(f"wrote {path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
