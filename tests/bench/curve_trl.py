"""Learning curves of train_grpo.py and of TRL's GRPOTrainer on one task. Needs trl, datasets.

    python tests/bench/curve_trl.py run VARIANT SEED [--model runs/smollm] >> FILE.jsonl   # 2 min
    python tests/bench/curve_trl.py draw FILE.jsonl PICTURE.png      # and prints the table

VARIANT: `flat` is train_grpo.py by rows, `tree` the same with --tree, `trl` is GRPOTrainer.

SmolLM2-135M-Instruct learns to write three words in reverse order (`tests/smollm_tasks.py`), in
float32, on one process with one thread. `run` prints a line of JSON, with four lists of a point
before training and after every second step:

    step       optimizer steps so far. A step is one batch of rollouts and one AdamW update
    seconds    CPU seconds of the process since training began, without evaluations
    reward     mean reward of this step's rollouts, sampled. Before training: none
    solved     share of the held-out prompts that greedy decoding solves

The same in both: weights, prompts' tokens and order, group, limit of tokens, temperature, end
token, reward of each answer, advantage (reward minus the group's mean), loss (sum over sampled
tokens, divided by their number; no KL), clip, learning rate of each step, AdamW, gradient norm.
The evaluation is train_grpo.py's own in both: it reads TRL's weights in place.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import print_table

import models
import parallel
import smollm_tasks
import train_grpo

VARIANTS = dict(flat="ours, flat", tree="ours, tree", trl="TRL")
EVERY = 2  # steps between evaluations
SETTINGS = dict(
    steps=6, prompts=3, group=8, minibatches=1, rows=24, max_new_tokens=12, temperature=0.7,
    lr=2e-5, lr_warmup=2, entropy_coef=0.0, eval_prompts=40,
)  # fmt: skip


class Words:
    """Reverse three words, in the model's chat template. Every tenth line is held out."""

    def __init__(self, directory, seed):
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.end = (self.tokenizer.eos_token_id,)
        self.seed = seed
        lines = smollm_tasks.words()
        self.lines = {False: [x for n, x in enumerate(lines) if n % 10], True: lines[::10]}

    def line(self, index, held_out):
        """Return a line of the data, and its prompt as text."""
        lines = self.lines[held_out]
        n = index % len(lines) if held_out else train_grpo.deal(self.seed, index, len(lines))
        asked = [{"role": "user", "content": lines[n]["question"]}]
        render = self.tokenizer.apply_chat_template
        return lines[n], render(asked, tokenize=False, add_generation_prompt=True)

    def prompt(self, rng, index, held_out):
        line, text = self.line(index, held_out)
        return line, self.tokenizer(text).input_ids

    def reply(self, line, answer):
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return line, None, smollm_tasks.reversed_words(text, line)

    def reward(self, answer, line):
        """Return what train_grpo.py gives: 0 for an answer that reaches the limit of tokens."""
        return self.reply(line, answer)[2] if answer[-1] in self.end else 0.0


class Source(train_grpo.Source):
    """Plays rollouts as in train_grpo.py. The loop's own evaluation is left to `Curve`."""

    def evaluate(self):
        return None


class Curve:
    """The points of a run. Its clock stands still while it evaluates."""

    def __init__(self, config, task, trainer):
        self.examiner = train_grpo.Source(config, task, trainer)
        self.points = dict(step=[], seconds=[], reward=[], solved=[])
        self.begin = time.process_time()
        self.point(0, None)

    def point(self, step, reward):
        """Note a step, if it is due."""
        if step % EVERY == 0:
            now = time.process_time()
            values = step, round(now - self.begin, 2), reward, self.examiner.evaluate()
            for column, value in zip(self.points.values(), values):
                column.append(value)
            self.begin += time.process_time() - now


def train_ours(config, task, trainer, curve):
    """Train by train_grpo.py."""
    source = Source(config, task, trainer)

    def log(step, batch, metrics, updates, solved):
        curve.point(step + 1, metrics["reward/mean"])

    train_grpo.train(config, source, trainer, log)


def train_trl(config, task, trainer, curve):
    """Train by TRL's GRPOTrainer. trainer: ours, whose weights and learning rates TRL gets."""
    import transformers
    import trl
    from datasets import Dataset

    model = transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    weights = dict(model.named_parameters())
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, weights[name])
        p.data = weights[name].data  # so the evaluation reads what TRL trains

    # torch leaves the padding token out of the gradient of an embedding. In SmolLM2 this token is
    # <|im_end|>, which is in every prompt and ends every answer.
    model.get_input_embeddings().padding_idx = None

    # transformers' own warm-up begins with a learning rate of 0, ours with 1 / lr_warmup of it.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, config.beta2), weight_decay=0.0
    )
    factors = [trainer.learning_rate(step) / config.lr for step in range(config.steps)]
    factors.append(0.0)  # asked for after the last step
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, factors.__getitem__)
    count = config.prompts * config.group
    sampled = []  # the rewards of a step

    def reward(completion_ids, line, **others):
        sampled[:] = [task.reward(*pair) for pair in zip(completion_ids, line)]
        return sampled

    class After(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            curve.point(state.global_step, sum(sampled) / count)

    lines = [task.line(n, False) for n in range(config.steps * config.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder, seed=config.seed, max_steps=config.steps, use_cpu=True, bf16=False,
            per_device_train_batch_size=count, num_generations=config.group, num_iterations=1,
            max_completion_length=config.max_new_tokens, temperature=config.temperature,
            beta=0.0, loss_type="dapo", scale_rewards="none", epsilon=config.clip_low,
            epsilon_high=config.clip_high, max_grad_norm=config.max_grad_norm,
            shuffle_dataset=False, gradient_checkpointing=False, disable_tqdm=True,
            report_to=[], save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        theirs = trl.GRPOTrainer(
            model=model, reward_funcs=reward, args=settings, processing_class=task.tokenizer,
            train_dataset=Dataset.from_list([dict(prompt=text, line=x) for x, text in lines]),
            callbacks=[After()], optimizers=(optimizer, rates),
        )  # fmt: skip
        theirs.remove_callback(transformers.PrinterCallback)
        generate = theirs._generate_single_turn

        def checked_generate(prompts, *others, **named):
            first = theirs.state.global_step * config.prompts
            rows = [task.prompt(None, first + n, False)[1] for n in range(config.prompts)]
            assert prompts == [row for row in rows for _ in range(config.group)]
            return generate(prompts, *others, **named)

        theirs._generate_single_turn = checked_generate
        theirs.train()


def run(variant, seed, directory, **changed):
    """Train once, and print the points. Return our Trainer, which has the trained weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    settings = SETTINGS | dict(seed=seed, model=directory, tree=variant == "tree") | changed
    config = train_grpo.Config(**settings)
    task = Words(directory, seed)
    trainer = train_grpo.Trainer(config, models.load(directory), parallel.Grid("d1"))
    curve = Curve(config, task, trainer)
    train = train_trl if variant == "trl" else train_ours
    train(config, task, trainer, curve)
    print(json.dumps(dict(variant=variant, seed=seed) | curve.points))
    dist.destroy_process_group()
    return trainer


def cell(values, digits):
    """Return a mean and, in parentheses, the values of the seeds in order."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ({', '.join(f'{x:.{digits}f}' for x in values)})"


def draw(points, picture):
    """Draw what was solved over steps and over CPU seconds, and yield the rows of the table."""
    from draw import COLORS, DOTS, GRAY, INK, PALE, WIDTH, save
    from matplotlib.figure import Figure

    lines = [json.loads(x) for x in Path(points).read_text().splitlines()]
    figure = Figure(figsize=(WIDTH, 3.1), dpi=DOTS, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for color, (variant, name) in zip(COLORS, VARIANTS.items()):
        runs = sorted((x for x in lines if x["variant"] == variant), key=lambda x: x["seed"])
        steps, solved = runs[0]["step"], [*zip(*(run["solved"] for run in runs), strict=True)]
        for axes, key in zip(panels, ("step", "seconds")):
            # A thin line is a seed. The thick line is the mean of the seeds, step by step.
            for run in runs:
                axes.plot(run[key], run["solved"], color=color, lw=0.7, alpha=0.45)
            means = [[*map(statistics.mean, zip(*(run[x] for run in runs)))]
                     for x in (key, "solved")]  # fmt: skip
            # Flat and tree coincide over steps: dashes leave the line below them visible.
            is_tree = variant == "tree"
            axes.plot(*means, "o", color=color, markersize=4 if is_tree else 6, lw=2.6, label=name,
                      ls=(0, (2, 1.4)) if is_tree else "-")  # fmt: skip
        row = {"solved after step": name}
        row |= {f"{step}": cell(at, 3) for step, at in zip(steps, solved, strict=True)}
        rates = cell([run["seconds"][-1] / steps[-1] for run in runs], 1)
        yield row | {"CPU s a step": rates, "reward": cell([run["reward"][-1] for run in runs], 2)}
    titles = "held-out prompts solved, by step", "by CPU seconds of training"
    for axes, title in zip(panels, titles):
        axes.set_title(title, loc="left", fontsize=9.5, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(GRAY)
        axes.tick_params(colors=GRAY, labelsize=8)
        axes.grid(color=PALE)
    panels[0].set(ylim=(-0.02, 0.8), xticks=steps)
    panels[1].legend(loc="lower right", frameon=False, fontsize=8)
    save(figure, picture)


def main(argv) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="train once, and print points")
    one.add_argument("variant", choices=VARIANTS)
    one.add_argument("seed", type=int)
    one.add_argument("--model", default="runs/smollm", help="of tests/smollm.py")
    one.add_argument("--steps", type=int, default=SETTINGS["steps"])
    picture = commands.add_parser("draw", help="draw the points, and print a table")
    picture.add_argument("points")
    picture.add_argument("picture")
    options = parser.parse_args(argv)
    if options.command == "draw":
        print_table(draw(options.points, options.picture))
    else:
        run(options.variant, options.seed, options.model, steps=options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
