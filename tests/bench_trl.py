"""One GRPO step of train_grpo.py against TRL's GRPOTrainer on the same work. Needs trl, datasets.

    python tests/bench_trl.py [--prompt 512] [--completion 64] [--group 8] [--rounds 5]  # 20 s

The same random Qwen3 (hidden 128, 4 layers, 4 query and 2 key heads of 32, vocabulary 256, float32)
in both; one prompt a step, `group` answers of exactly `completion` tokens (no end token is in the
vocabulary), temperature 1, no reference, one AdamW step a batch, global token mean. One process,
one thread; TRL's step and ours alternate, ours from a callback at the end of TRL's. Figures are CPU
seconds; a ratio is the median over pairs of neighbouring steps, the first of which is not counted.

    generation   ours: `collect`     TRL: `_generate_single_turn`, that is transformers' generate
    training     ours: `prepare` and `update`, the push of the weights included
                 TRL: all of its step that follows generation and rewards
    tree         the same with `--tree sparse`, on the same rollouts; its share: of what it gains
                 over our flat step, against the ratio of their FLOPs (`measure_grpo.flops`)

TRL runs at its defaults but for gradient checkpointing and bf16, which are off. Its first batch is
also given to our trainer: loss and gradient must agree within 1e-5, or the script fails.

A group shares its prompt, and much of what is measured comes from that: transformers' generate
computes and caches the prompt once an answer, `rollout` once a group, `--tree` trains on it once.
`--prompt 8` shows the rest.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models as tokenizer_models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import models  # noqa: E402
import train_grpo  # noqa: E402
from measure_grpo import Work, flops  # noqa: E402
from parallel import connect  # noqa: E402
from tree_attention import TokenTrie  # noqa: E402

VOCAB = 256
WORDS = [f"w{n}" for n in range(VOCAB)]
PHASES = "generation", "training", "tree"


def reward(completions, **kwargs):
    """Any numbers that are not all equal."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def build(options, folder):
    """Our model, TRL's with the same weights, its tokenizer, the prompt's tokens."""
    shape = models.ModelConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    ours = models.Transformer(shape).init_weights(0)
    models.save_hf(ours, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = dict(zip([*WORDS, "<pad>", "<eos>"], range(VOCAB + 2)))
    words = Tokenizer(tokenizer_models.WordLevel(ids))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    prompt = np.random.default_rng(0).integers(VOCAB, size=options.prompt).tolist()
    return ours, theirs, tokenizer, prompt


class Ours:
    def __init__(self, options, model, prompt):
        self.config = train_grpo.Config(
            prompts=1, group=options.group, max_new_tokens=options.completion, minibatches=1,
            lr=1e-6, entropy_coef=0.0, size=options.prompt,
        ).check()  # fmt: skip
        generator = models.Transformer(model.config).requires_grad_(False)
        self.trainer = train_grpo.Trainer(self.config, model, generator=generator)
        self.trainer.push_weights()
        self.task, self.steps = Work(self.config, VOCAB), 0

    def step(self):
        """CPU seconds of generation, of training, and of training on the tree."""
        config, generator, start = self.config, self.trainer.generator, time.process_time()
        mine, kept, _ = train_grpo.collect(config, self.task, generator, self.steps)
        seconds = [time.process_time() - start]
        for n, t in enumerate(mine[0]):
            assert len(t.tokens) == len(self.task.tokens) + config.max_new_tokens
            assert t.mask.sum() == config.max_new_tokens
            t.reward = float(n % 3)
        for tree in ("disabled", "sparse"):
            self.trainer.config, start = replace(config, tree=tree), time.process_time()
            version = self.trainer.policy_version
            batch = train_grpo.SampledBatch(mine, kept, config.minibatches, version)
            source = SimpleNamespace(get=lambda step, batch=batch: batch)
            train_grpo.do_step(config, source, self.trainer, 0)
            seconds.append(time.process_time() - start)
        self.trainer.config = config
        trie = TokenTrie([t.tokens for t in mine[0]])
        flat, shared = flops(self.trainer.model.config, trie, [t.mask for t in mine[0]])
        self.steps, self.bound = self.steps + 1, float(flat / shared)
        return seconds

    def compare(self, prepared, loss, parameters):
        """Differences of loss and gradient from TRL's on TRL's batch, before any update."""
        tokens_BL = torch.cat([prepared["prompt_ids"], prepared["completion_ids"]], 1)
        mask = np.arange(1, tokens_BL.shape[1]) >= len(self.task.tokens)
        batch = [
            train_grpo.Trajectory(0, row, mask, 0.0 * mask, advantages=np.full(len(mask), a))
            for row, a in zip(tokens_BL.tolist(), prepared["advantages"].tolist())
        ]
        Z, worst = self.trainer.loss_denominator(batch), [0.0, 0.0]
        for tree in ("disabled", "sparse"):
            self.trainer.config = replace(self.config, tree=tree)
            got = self.trainer.forward_backward(batch, Z)["loss/token_mean"]
            pairs = [(p.grad, parameters[n].grad) for n, p in self.trainer.model.named_parameters()]
            apart = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
            worst = [max(worst[0], abs(got - loss.item())), max(worst[1], apart)]
            self.trainer.optimizer.zero_grad()  # ours has made no update yet; nor shall this be one
        self.trainer.config = self.config
        return worst


def alternate(options, ours, theirs, tokenizer, prompt, folder):
    """Rows of CPU seconds, (ours, theirs) for generation and for training; `Ours.compare`."""
    rows, now, differences = [], {}, []

    class After(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            training = time.process_time() - now["start"] - now["compare"]
            pairs = zip(ours.step(), (now["generation"], training, training))
            rows.append(dict(zip(PHASES, pairs)))

    settings = trl.GRPOConfig(
        output_dir=folder, per_device_train_batch_size=options.group, num_generations=options.group,
        max_completion_length=options.completion, max_steps=options.rounds + 1, learning_rate=1e-6,
        temperature=1.0, beta=0.0, loss_type="dapo", gradient_checkpointing=False, report_to=[],
        save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
        generation_kwargs={"top_k": 0},
    )  # fmt: skip
    text = " ".join(WORDS[t] for t in prompt)
    trainer = trl.GRPOTrainer(
        model=theirs, reward_funcs=reward, args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": text}] * (options.rounds + 1)),
        callbacks=[After()],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    generate, prepare = trainer._generate_single_turn, trainer._prepare_inputs
    training_step = trainer.training_step

    def timed_generate(*args, **kwargs):
        start = time.process_time()
        completions, logprobs = generate(*args, **kwargs)
        now["generation"] = time.process_time() - start
        assert [len(c) for c in completions] == [options.completion] * options.group
        return completions, logprobs

    def timed_prepare(batch):
        now["prepared"] = prepare(batch)
        assert now["prepared"]["prompt_ids"].shape == (options.group, options.prompt)
        now["start"] = time.process_time()
        return now["prepared"]

    def compared_step(model, *args, **kwargs):
        loss, start = training_step(model, *args, **kwargs), time.process_time()
        if not differences:
            parameters = dict(model.named_parameters())
            differences.extend(ours.compare(now["prepared"], loss, parameters))
        now["compare"] = time.process_time() - start
        return loss

    trainer._generate_single_turn, trainer._prepare_inputs = timed_generate, timed_prepare
    trainer.training_step = compared_step
    trainer.train()
    return rows[1:], differences  # the first is warm-up


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(prompt=512, completion=64, group=8, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    connect("cpu")
    with tempfile.TemporaryDirectory() as folder:
        model, theirs, tokenizer, prompt = build(options, folder)
        work = Ours(options, model, prompt)
        rows, (loss, gradient) = alternate(options, work, theirs, tokenizer, prompt, folder)
    ok = loss <= 1e-5 and gradient <= 1e-5
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, trl))
    print(f"a step: prompt of {options.prompt} tokens, {options.group} x {options.completion} "
          f"sampled; float32, {torch.get_num_threads()} thread, {versions}")  # fmt: skip
    print(f"on TRL's first batch: loss differs by {loss:.1e}, gradient (worst tensor, relative) "
          f"by {gradient:.1e}  {'ok' if ok else 'FAILED'}")  # fmt: skip
    print(f"{f'CPU seconds, median of {len(rows)}':26}    ours     TRL   TRL / ours (min - max)")
    summary = {"bench": "trl", **vars(options), "loss": loss, "gradient": gradient, "ok": ok}
    for phase in PHASES:
        pairs = [row[phase] for row in rows]
        ratios = sorted(b / a for a, b in pairs)
        a, b = (statistics.median(x) for x in zip(*pairs))
        ratio = statistics.median(ratios)
        print(f"{phase:26} {a:7.3f} {b:7.3f} {ratio:9.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})")
        summary[phase] = dict(ours=a, trl=b, ratio=ratio, min=ratios[0], max=ratios[-1])
    gain = statistics.median(row["training"][0] / row["tree"][0] for row in rows)
    share = summary["share"] = gain / work.bound
    print(f"the tree: {gain:.2f} times our flat step, {share:.0%} of the bound {work.bound:.2f}")
    print(json.dumps(summary | {"gain": gain, "bound": work.bound}))
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
