"""One GRPO step of train_grpo.py against TRL's GRPOTrainer on the same work. Needs trl, datasets.

    python tests/bench/bench_trl.py [--prompt 512] [--completion 64] [--group 8] [--rounds 5] # 20 s
    python tests/bench/bench_trl.py --model DIR --prompts 8 --completion 14               # 5 min

The same random Qwen3 (hidden 128, 4 layers, vocabulary 256, float32) in both; `prompts` prompts a
step, the same in each step, and `group` answers to each of exactly `completion` tokens (no end
token is in the vocabulary), temperature 1, no reference, one AdamW step a batch, global token mean.
One process, one thread; TRL's step and ours alternate. Figures are CPU seconds; a ratio is the
median over pairs of neighboring steps, the first of which is not counted. `--model DIR` takes a
checkpoint with a chat template instead, and the sums of `tests/smollm_tasks.py` as prompts.

    generation   ours: `collect`     TRL: `_generate_single_turn`, that is transformers' generate
    training     ours: `prepare` and `update`, the push of the weights included
                 TRL: all of its step that follows generation and rewards
    tree         the same with `--tree sparse`, on the same rollouts; its share: of what it gains
                 over our flat step, against the ratio of their FLOPs (`measure.flops`)

TRL runs at its defaults but for gradient checkpointing and bf16, which are off. Its first batch is
also given to our trainer: loss and gradient must agree within 1e-5, or the script fails. With
--model the gradient's bound is 1e-4: float32 alone is 4e-5 off float64 after 30 layers.

One more step at the end is not timed. It counts the bytes of all tensors that are alive at once,
weights, moments and our generator's own copy of the weights included.
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

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from full.learn.batches import SampledBatch, collect
from full.learn.rollouts import Trajectory
from full.learn.trainer import Trainer
from full.model.config import ModelConfig
from full.model.hf import load_hf, save_hf
from full.model.transformer import Transformer
from full.ranks.joining import connect
from full.run.config import Config
from full.run.logs import do_step
from full.run.tasks import Task
from full.run.text import Text
from full.tree.trie import TokenTrie
import smollm_tasks  # noqa: E402
from measure import flops  # noqa: E402
from oracles import LiveBytes, bytes_of  # noqa: E402

VOCAB = 256
PHASES = "generation", "training", "tree"


def reward(completions, **kwargs):
    """Any numbers that are not all equal."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def build(options, folder):
    """Our model, TRL's with the same weights, its tokenizer, the prompts' tokens."""
    if options.model:
        directory = options.model
        ours = load_hf(directory, dtype=torch.float32)
        text = Text(directory)
        asked = [[{"role": "user", "content": line["question"]}] for line in smollm_tasks.sums()]
        prompts = [text.prompt(messages) for messages in asked]
        # Those of the most frequent length, so that no row is padded.
        length = statistics.mode(map(len, prompts))
        prompts = [prompt for prompt in prompts if len(prompt) == length][: options.prompts]
    else:
        directory = folder
        ours = Transformer(ModelConfig(
            vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            head_dim=32, num_attention_heads=4, num_key_value_heads=2,
        )).init_weights(0)  # fmt: skip
        save_hf(ours, directory)
        size = options.prompts, options.prompt
        prompts = np.random.default_rng(0).integers(VOCAB, size=size).tolist()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    # torch leaves the padding token out of the gradient of an embedding. In SmolLM2 this token is
    # <|im_end|>, which is in every prompt: 6 % of the embedding's gradient would be missing.
    theirs.get_input_embeddings().padding_idx = None

    # A word is one token, w7 the token 7, so that TRL takes given tokens as text. What ends and
    # what fills a row are ids after the vocabulary: no sampled token is either.
    vocab = ours.config.vocab_size
    ids = {f"w{n}": n for n in range(vocab)} | {"<pad>": vocab, "<eos>": vocab + 1}
    words = Tokenizer(tokenizer_models.WordLevel(ids))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    theirs.generation_config.eos_token_id = tokenizer.eos_token_id
    return ours, theirs, tokenizer, prompts


class Given(Task):
    """The given prompts in turn, with answers that never end: no token of the vocabulary ends."""

    def __init__(self, vocab_size, prompts):
        self.vocab_size, self.end, self.prompts = vocab_size, (vocab_size,), prompts

    def prompt(self, rng, index, held_out):
        return None, self.prompts[index % len(self.prompts)]


class Phase:
    """What a phase takes: CPU seconds or, in the step that counts memory, MB of tensors."""

    def __init__(self, counts_memory, *held):
        """held: modules and optimizers whose tensors are there before."""
        self.live = LiveBytes() if counts_memory else None
        if counts_memory:
            self.held = bytes_held(held)
            self.live.__enter__()
        self.start = time.process_time()

    def stop(self):
        if self.live is None:
            return time.process_time() - self.start
        self.live.__exit__(None, None, None)
        return (self.held + self.live.peak) / 2**20


def bytes_held(held) -> int:
    """Bytes of parameters, gradients and moments; tied weights are counted once."""
    tensors = []
    for x in held:
        if isinstance(x, torch.nn.Module):
            tensors += [t for p in x.parameters() for t in (p, p.grad)]
        else:
            tensors += [t for state in x.state.values() for t in state.values()]
    return bytes_of(t for t in tensors if torch.is_tensor(t))


class Ours:
    def __init__(self, options, model, prompts):
        self.config = Config(
            prompts=len(prompts), group=options.group, max_new_tokens=options.completion,
            minibatches=1, lr=1e-6, entropy_coef=0.0,
        ).check()  # fmt: skip
        generator = Transformer(model.config).requires_grad_(False)
        self.trainer = Trainer(self.config, model, generator=generator)
        self.trainer.push_weights()
        self.task, self.steps = Given(model.config.vocab_size, prompts), 0

    def step(self, counts_memory=False):
        """What generation, training, and training on the tree take; see `Phase`."""
        config, trainer = self.config, self.trainer
        held = trainer.model, trainer.sampler.model, trainer.optimizer
        phase = Phase(counts_memory, *held)
        mine, kept, _ = collect(config, self.task, trainer.sampler, self.steps)
        taken = [phase.stop()]
        rollouts = [t for group in kept for t in mine[group]]
        assert len(rollouts) == config.prompts * config.group
        for n, t in enumerate(rollouts):
            assert len(t.tokens) == len(self.task.prompts[0]) + config.max_new_tokens
            assert t.mask.sum() == config.max_new_tokens
            t.reward = float(n % 3)
        for tree in ("disabled", "sparse"):
            self.trainer.config = replace(config, tree=tree)
            phase = Phase(counts_memory, *held)
            version = self.trainer.policy_version
            batch = SampledBatch(mine, kept, config.minibatches, version)
            source = SimpleNamespace(get=lambda step, batch=batch: batch)
            do_step(config, source, self.trainer, 0)
            self.trainer.push_weights()
            taken.append(phase.stop())
        self.trainer.config = config
        trie = TokenTrie([t.tokens for t in rollouts])
        flat, shared = flops(self.trainer.model.config, trie, [t.mask for t in rollouts])
        self.steps, self.bound = self.steps + 1, float(flat / shared)
        return taken

    def compare(self, prepared, loss, parameters):
        """Differences of loss and gradient from TRL's on TRL's batch, before any update."""
        tokens_BL = torch.cat([prepared["prompt_ids"], prepared["completion_ids"]], 1)
        mask = np.arange(1, tokens_BL.shape[1]) >= len(self.task.prompts[0])
        batch = [
            Trajectory(0, row, mask, 0.0 * mask, advantages=np.full(len(mask), a))
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


def alternate(options, ours, theirs, tokenizer, prompts, folder):
    """Rows of (ours, theirs) for each phase, CPU seconds, in the last row MB; `Ours.compare`."""
    rows, now, differences = [], {}, []
    rows_of_a_step = len(prompts) * options.group
    steps = options.rounds + 2  # the first is warm-up, the last counts memory

    def phase():
        return Phase(len(rows) == steps - 1, theirs, trainer.optimizer)

    class After(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            training = now["training"].stop() - now["compare"]
            pairs = zip(ours.step(len(rows) == steps - 1), (now["generation"], training, training))
            rows.append(dict(zip(PHASES, pairs)))

    settings = trl.GRPOConfig(
        output_dir=folder, per_device_train_batch_size=rows_of_a_step, max_steps=steps,
        num_generations=options.group, max_completion_length=options.completion,
        temperature=1.0, beta=0.0, loss_type="dapo", gradient_checkpointing=False, report_to=[],
        save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True, bf16=False,
        generation_kwargs={"top_k": 0}, learning_rate=1e-6, shuffle_dataset=False,
    )  # fmt: skip
    texts = [{"prompt": " ".join(f"w{token}" for token in prompt)} for prompt in prompts]
    trainer = trl.GRPOTrainer(
        model=theirs, reward_funcs=reward, args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_list(texts * steps), callbacks=[After()],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    generate, prepare = trainer._generate_single_turn, trainer._prepare_inputs
    training_step = trainer.training_step

    def timed_generate(*args, **kwargs):
        generation = phase()
        completions, logprobs = generate(*args, **kwargs)
        now["generation"] = generation.stop()
        assert [len(c) for c in completions] == [options.completion] * rows_of_a_step
        return completions, logprobs

    def timed_prepare(batch):
        now["prepared"] = prepare(batch)
        # TRL shuffles the rows of a batch after it has sampled them.
        given = sorted(prompts * options.group)
        assert sorted(now["prepared"]["prompt_ids"].tolist()) == given
        now["training"] = phase()
        return now["prepared"]

    def compared_step(model, *args, **kwargs):
        loss, start = training_step(model, *args, **kwargs), time.process_time()
        now["compare"] = 0.0
        if not differences:
            parameters = dict(model.named_parameters())
            differences.extend(ours.compare(now["prepared"], loss, parameters))
            now["compare"] = time.process_time() - start
        return loss

    trainer._generate_single_turn, trainer._prepare_inputs = timed_generate, timed_prepare
    trainer.training_step = compared_step
    trainer.train()
    return rows[1:], differences


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(prompts=1, prompt=512, completion=64, group=8, rounds=5).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    connect("cpu")
    with tempfile.TemporaryDirectory() as folder:
        model, theirs, tokenizer, prompts = build(options, folder)
        work = Ours(options, model, prompts)
        rows, (loss, gradient) = alternate(options, work, theirs, tokenizer, prompts, folder)
    *rows, memory = rows
    ok = loss <= 1e-5 and gradient <= (1e-4 if options.model else 1e-5)
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, trl))
    length = options.prompt = len(prompts[0])
    print(f"a step: {len(prompts)} prompt(s) of {length} tokens, {options.group} x "
          f"{options.completion} sampled for each; float32, {torch.get_num_threads()} thread, "
          f"{versions}")  # fmt: skip
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
    print(f"{'MB of tensors, the most':26}    ours     TRL")
    for phase, (a, b) in memory.items():
        print(f"{phase:26} {a:7.0f} {b:7.0f}")
    summary["memory"] = memory
    gain = statistics.median(row["training"][0] / row["tree"][0] for row in rows)
    share = summary["share"] = gain / work.bound
    print(f"the tree: {gain:.2f} times our flat step, {share:.0%} of the bound {work.bound:.2f}")
    print(json.dumps(summary | {"gain": gain, "bound": work.bound}))
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
