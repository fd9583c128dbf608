"""One GRPO step of train_grpo.py against TRL's GRPOTrainer on the same work. Needs trl (and datasets).

    python tests/bench_trl.py [--prompt 512] [--completion 64] [--group 8] [--rounds 5]

The same random Qwen3 (hidden 128, 4 layers, 4 query and 2 key heads of 32, vocabulary 256, float32)
in both; one prompt a step, `group` answers of exactly `completion` tokens (no end token is in the
vocabulary), temperature 1, no reference, one AdamW step a batch, global token mean. One process,
one thread; TRL's step and ours alternate, ours from a callback at the end of TRL's. Figures are CPU
seconds: "generation" is transformers' generate as TRL calls it against `rollout`; "training" is all
of TRL's step behind its generation (loss, backward, clipping, optimiser) against `forward_backward`
and `optim_step`. TRL runs at its defaults but for gradient checkpointing, which is off.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

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
from parallel import connect  # noqa: E402

VOCAB = 256
WORDS = [f"w{n}" for n in range(VOCAB)]


class Work(train_grpo.Task):
    """One turn that never ends: the end token is outside the vocabulary."""

    vocab_size, end = VOCAB, (VOCAB,)

    def __init__(self, prompt):
        self.tokens = prompt

    def prompt(self, rng, index, held_out):
        return None, self.tokens


def reward(completions, **kwargs):
    """Any numbers that are not all equal."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def build(options, folder):
    shape = models.ModelConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    ours = models.Transformer(shape).init_weights(0)
    models.save_hf(ours, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = Tokenizer(tokenizer_models.WordLevel(dict(zip(WORDS, range(VOCAB))) | {"<pad>": 256, "<eos>": 257}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    prompt = np.random.default_rng(0).integers(VOCAB, size=options.prompt).tolist()
    return ours, theirs, tokenizer, prompt


class Ours:
    def __init__(self, options, model, prompt):
        self.config = train_grpo.Config(
            prompts=1, group=options.group, max_new_tokens=options.completion, minibatches=1, lr=1e-6,
            entropy_coef=0.0,
        ).check()  # fmt: skip
        generator = models.Transformer(model.config).requires_grad_(False)
        self.trainer = train_grpo.Trainer(self.config, model, generator=generator)
        self.trainer.push_weights()
        self.task, self.prompt, self.steps = Work(prompt), prompt, 0

    def step(self):
        """CPU seconds of generation and of training."""
        start = time.process_time()
        mine, kept, _ = train_grpo.collect(self.config, self.task, self.trainer.generator, self.steps)
        middle = time.process_time()
        for n, t in enumerate(mine[0]):
            assert t.mask.sum() == self.config.max_new_tokens
            t.reward = float(n % 3)
        train_grpo.prepare(self.config, self.trainer, [mine[0]])
        train_grpo.update(self.config, self.trainer, mine, kept, 0)
        self.steps += 1
        return middle - start, time.process_time() - middle


def alternate(options, ours, theirs, tokenizer, prompt, folder):
    """Rows of CPU seconds: (ours, theirs) for generation and for training."""
    rows, now = [], {}

    class After(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            training = time.process_time() - now["prepared"]
            generation, update = ours.step()
            rows.append(dict(generation=(generation, now["generation"]), training=(update, training)))

    settings = trl.GRPOConfig(
        output_dir=folder, per_device_train_batch_size=options.group, num_generations=options.group,
        max_completion_length=options.completion, max_steps=options.rounds + 1, learning_rate=1e-6,
        temperature=1.0, beta=0.0, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False, generation_kwargs={"top_k": 0},
    )  # fmt: skip
    text = " ".join(WORDS[t] for t in prompt)
    trainer = trl.GRPOTrainer(
        model=theirs, reward_funcs=reward, args=settings, processing_class=tokenizer, callbacks=[After()],
        train_dataset=Dataset.from_list([{"prompt": text}] * (options.rounds + 1)),
    )  # fmt: skip
    generate, prepare = trainer._generate_single_turn, trainer._prepare_inputs

    def timed_generate(*args, **kwargs):
        start = time.process_time()
        completions, logprobs = generate(*args, **kwargs)
        now["generation"] = time.process_time() - start
        assert [len(c) for c in completions] == [options.completion] * options.group
        return completions, logprobs

    def timed_prepare(batch):
        prepared = prepare(batch)
        assert prepared["prompt_ids"].shape == (options.group, options.prompt)
        now["prepared"] = time.process_time()
        return prepared

    trainer._generate_single_turn, trainer._prepare_inputs = timed_generate, timed_prepare
    trainer.train()
    return rows[1:]  # the first is warm-up


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(prompt=512, completion=64, group=8, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    connect("cpu")
    with tempfile.TemporaryDirectory() as folder:
        model, theirs, tokenizer, prompt = build(options, folder)
        tokens = torch.tensor([prompt])
        gap = (model(tokens).log_softmax(-1) - theirs(tokens).logits.log_softmax(-1)).abs().max().item()
        rows = alternate(options, Ours(options, model, prompt), theirs, tokenizer, prompt, folder)
    print(f"prompt {options.prompt}, {options.group} answers of {options.completion}; float32, 1 thread; "
          f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}; "
          f"largest difference of log-probs before training {gap:.1e}")  # fmt: skip
    print("CPU seconds, median of", len(rows), "   ours     TRL   TRL / ours (min - max)")
    summary = {"bench": "trl", **vars(options), "logprob_difference": gap}
    for phase in ("generation", "training"):
        pairs = [row[phase] for row in rows]
        ratios = sorted(b / a for a, b in pairs)
        a, b = (statistics.median(x) for x in zip(*pairs))
        ratio = statistics.median(ratios)
        print(f"{phase:26} {a:7.3f} {b:7.3f} {ratio:12.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})")
        summary[phase] = {"ours": a, "trl": b, "ratio": ratio}
    print(json.dumps(summary))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
