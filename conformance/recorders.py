"""Record one optimizer step of a trainer, as a dump that step.py holds to the definition.

About ten lines in a trainer write a dump of the step that they surround:

    with record(DUMP, model.named_parameters(), optimizer, settings=dict(aggregation="token_mean",
                max_grad_norm=1.0, temperature=0.7)) as add:
        for batch in micro_batches:
            logprobs = ...
            loss.backward()
            add(tokens=.., mask=.., logprobs=.., old_logprobs=.., advantages=.., loss=loss)
        add(grad_norm=clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()

Every rank does it, and rank 0 writes. Rows of `add` are sequences. With attention= (B, T), 1 for
tokens and 0 for padding, padding on the left is cut off, and padding on the right is known.
step.py --help says what `add` takes.

Where a function has the whole step inside, and nothing to hook into, `watch` looks at what the
model gets:

    with record(DUMP, ..) as add, watch(model, add, sequences):
        update_policy(model, optimizer, ..)

TRL's GRPOTrainer and this project's full edition have recorders of their own, `record_trl` and
`recording`. These commands run each on a tiny random model for a few steps, and record one:

    python conformance/recorders.py trl DUMP [NAME=VALUE of GRPOConfig ..]
    python conformance/recorders.py full DUMP
    torchrun --nproc-per-node 2 conformance/recorders.py trl DUMP
    python conformance/step.py DUMP --model conformance/recorders.py:build_trl
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import save_file

if __name__ == "__main__":  # a script has its own folder on the path, not the package's
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance import command
from conformance import definition as D

VOCABULARY = 64

# Any trainer ----------------------------------------------------------------------------------


def whole(x):
    """Return a detached copy of a tensor, all of it if it is sharded. Collective for a DTensor."""
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu().clone().contiguous()


@contextlib.contextmanager
def record(directory, named_parameters, optimizer, *, settings=None, step_number=1):
    """Write a dump of the optimizer step inside. Yield `add(**quantities)`. Collective.

    The weights before are copied where the step begins: on entry, or after the optimizer step
    before it. So a weight that something changes between the forward and optimizer.step() is seen.

    named_parameters: pairs (name, tensor), of the tensors that the optimizer updates.
    optimizer: a torch AdamW.
    settings: dict. What the trainer claims to compute, see step.py. Default: the definition's.
    step_number: int. Which call of optimizer.step() is the recorded one. Default: the first. What
        `add` gets of other steps is left out.
    """
    named = dict(named_parameters)
    state = SimpleNamespace(rows=[], numbers={}, tensors={}, calls=0, optimizer={})
    state.is_recorded = step_number == 1

    def add(attention=None, loss=None, **given):
        # A step ends with the first rows of the next one: a norm may be given after the step.
        if "tokens" in given:
            state.is_recorded = state.calls + 1 == step_number
        if not state.is_recorded:
            return
        # One row for each sequence. A call with tokens is one micro-batch.
        micro_batch = len({row["micro_batch"] for row in state.rows})
        for name in [x for x in given if torch.is_tensor(given[x]) and given[x].dim() == 0]:
            given[name] = given[name].item()
        if loss is not None:
            state.numbers.setdefault("loss", []).append(float(torch.as_tensor(loss).detach()))
        if "tokens" not in given:
            state.numbers.update(given)
            return
        for b, tokens in enumerate(given["tokens"]):
            real = torch.ones_like(tokens) if attention is None else attention[b]
            first = int(real.argmax())
            row = dict(micro_batch=micro_batch, width=len(tokens) - first, length=int(real.sum()))
            for name, x in given.items():
                if x is not None:
                    x = torch.as_tensor(x[b]).detach().cpu()
                    row[name] = x[first:] if x.dim() else x.item()
            state.rows.append(row)

    def snapshot(prefix, of):
        state.tensors |= {f"{prefix}.{n}": whole(x) for n, p in named.items()
                          if (x := of(p)) is not None}  # fmt: skip

    def begin_step():
        if state.calls + 1 == step_number:
            snapshot("before", lambda p: p)

    def before_step(*_):
        state.calls += 1
        if state.calls == step_number:
            state.numbers["changed"] = [
                n for n, p in named.items() if not whole(p).equal(state.tensors[f"before.{n}"])
            ]
            snapshot("grad", lambda p: p.grad)
            for key in ("exp_avg", "exp_avg_sq"):
                snapshot(key, lambda p, key=key: optimizer.state.get(p, {}).get(key))

    def after_step(*_):
        if state.calls == step_number:
            snapshot("after", lambda p: p)
            names = {id(p): n for n, p in named.items()}
            groups = [{key: g[key] for key in ("lr", "betas", "eps", "weight_decay")}
                      | {"names": [names[id(p)] for p in g["params"]]}
                      for g in optimizer.param_groups]  # fmt: skip
            done = [x["step"] for x in optimizer.state.values()]
            state.optimizer = {"step": int(max(done)), "groups": groups}
        begin_step()

    hooks = [optimizer.register_step_pre_hook(before_step),
             optimizer.register_step_post_hook(after_step)]  # fmt: skip
    begin_step()
    try:
        yield add
    finally:
        for hook in hooks:
            hook.remove()
    if state.calls < step_number:
        raise RuntimeError(f"expected optimizer step {step_number}, got {state.calls} steps")

    # Rank 0 gets the rows of all ranks. The ranks' own sums of losses are added up as settings say.
    mine, parts = (state.rows, state.numbers), None
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        if dist.get_rank() != 0:
            return
    parts = parts or [mine]
    rows = [{"rank": rank} | row for rank, (rows, _) in enumerate(parts) for row in rows]
    write_dump(directory, rows, state.tensors, state.optimizer, parts, settings or {})


@contextlib.contextmanager
def watch(model, add, sequences, temperature=1.0):
    """Call `add` for each forward with a graph inside, with its sequences and their log-probs.

    sequences: for each a dict of `tokens`, a list of all its tokens, and `prompt`, the number of
        first tokens that were not sampled, or `mask`, a list. What else it has is given to `add`.
    """
    forward, left = model.forward, list(range(len(sequences)))

    def find(row):
        """Return which sequence a row holds, and where it begins. Its last token may be missing."""
        found = []
        for n in left:
            tokens = sequences[n]["tokens"]
            for at in (0, len(row) - len(tokens), len(row) - len(tokens) + 1):
                part = row[at : at + len(tokens)] if at >= 0 else []
                if len(part) >= len(tokens) - 1 and part == tokens[: len(part)]:
                    found.append((len(part), -n, at))
        if not found:
            raise ValueError(f"expected a row of one of `sequences`, got {row}")
        _, n, at = max(found)  # a shorter sequence may be the beginning of another one
        left.remove(-n)
        left[:] = left or range(len(sequences))  # the next step has them once more
        return sequences[-n], at

    def seen(*args, **options):
        output = forward(*args, **options)
        logits = output if torch.is_tensor(output) else output.logits
        if not logits.requires_grad:  # a reference, or a rollout
            return output
        inputs = [*args, *(options[x] for x in ("input_ids", "tokens") if x in options)]
        rows = [find(row) for row in inputs[0].tolist()]
        width = max([logits.shape[1], *(at + len(s["tokens"]) for s, at in rows)])
        shape = len(rows), width
        wide = torch.promote_types(logits.dtype, torch.float32)
        columns = dict(tokens=torch.zeros(shape).long(), logprobs=torch.zeros(shape, dtype=wide),
                       mask=torch.zeros(shape).bool(), attention=torch.zeros(shape).long())
        for b, (s, at) in enumerate(rows):
            N = len(s["tokens"])
            tokens = torch.tensor(s["tokens"])
            own = [n >= s["prompt"] for n in range(N)] if "mask" not in s else s["mask"]
            lp = D.scores(logits[b, at : at + N - 1].detach(), tokens[1:].tolist(), temperature)[0]
            columns["tokens"][b, :N], columns["attention"][b, :N] = tokens, 1
            columns["logprobs"][b, 1:N], columns["mask"][b, :N] = lp.cpu(), torch.tensor(own).bool()
        for name in {*sequences[0]} - {"tokens", "prompt", "mask"}:
            columns[name] = torch.tensor([s[name] for s, _ in rows])
        add(**columns)
        return output

    model.forward = seen
    try:
        yield
    finally:
        model.forward = forward


def write_dump(directory, rows, tensors, optimizer, parts, settings):
    """Write step.json and step.safetensors. parts: (rows, numbers) of each rank."""
    T = max(len(row["tokens"]) for row in rows)
    for name in rows[0]:
        columns = [torch.as_tensor(row[name]) for row in rows]
        if columns[0].dim():
            columns = [torch.nn.functional.pad(x, (0, T - len(x))) for x in columns]
        tensors[name] = torch.stack(columns)
    numbers = dict(parts[0][1])
    if "loss" in numbers:
        losses = [part["loss"] for _, part in parts]
        is_mean = [settings.get(key, "sum") == "mean" for key in ("micro_batches", "ranks")]
        losses = [sum(x) / (len(x) if is_mean[0] else 1) for x in losses]
        numbers["loss"] = sum(losses) / (len(losses) if is_mean[1] else 1)
    Path(directory).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(directory, "step.safetensors"))
    text = json.dumps(numbers | dict(settings=settings, optimizer=optimizer), indent=1)
    Path(directory, "step.json").write_text(text + "\n", encoding="utf-8")


# TRL ------------------------------------------------------------------------------------------


def trl_settings(args):
    """Return what a GRPOConfig says that the trainer computes, as settings of step.py."""
    objective = {"cispo": "cispo", "sapo": "sapo"}.get(args.loss_type, "clip")
    sequence = args.importance_sampling_level == "sequence"
    kinds = {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "constant"}
    return dict(
        objective="gspo" if sequence else objective, clip_low=args.epsilon,
        clip_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        aggregation=kinds.get(args.loss_type, "token_mean"), temperature=args.temperature,
        max_new_tokens=args.max_completion_length, count_empty=True, kl_coef=args.beta,
        kl="k3_ratio" if args.use_bias_correction_kl else "k3", ranks="mean",
        advantage={"group": "group_std", "batch": "batch_std"}.get(args.scale_rewards,
                                                                   "group_mean"),
        max_grad_norm=args.max_grad_norm,
    )  # fmt: skip


@contextlib.contextmanager
def record_trl(directory, trainer, step_number=1):
    """Record a step of trainer.train(), a GRPOTrainer's. Its methods are wrapped until the end."""
    # The trainer makes its optimizer when it begins to train. A callback then starts the recorder.
    import transformers

    state = dict(step=0, lp=None)
    names = ("_compute_loss", "_get_per_token_logps_and_entropies", "_calculate_rewards",
             "_generate_and_score_completions")  # fmt: skip
    own = {name: getattr(trainer, name) for name in names}
    clip = trainer.accelerator.clip_grad_norm_

    def is_recorded():
        return trainer.model.training and trainer.state.global_step + 1 == step_number

    def rewards(*args):
        state["rewards"] = own["_calculate_rewards"](*args)
        return state["rewards"]

    def generate(inputs):
        # Rewards and groups are shuffled and split with what else is known of a completion. The
        # rewards are of all ranks, in their order.
        output = own["_generate_and_score_completions"](inputs)
        total = (state["rewards"] * trainer.reward_weights).nansum(1)
        count = len(output["advantages"])
        here = slice(trainer.accelerator.process_index * count, None)
        groups = torch.arange(len(total)) // trainer.num_generations
        new = 1000 * trainer.state.global_step
        return output | dict(rewards=total[here][:count], groups=new + groups[here][:count])

    def forward(*args, **options):
        found = own["_get_per_token_logps_and_entropies"](*args, **options)
        state["lp"] = found[0].detach()
        return found

    def loss_of(model, inputs):
        loss = own["_compute_loss"](model, inputs)
        if is_recorded():
            zeros = torch.zeros_like(inputs["prompt_ids"])

            def row(x):
                return None if x is None else torch.cat([zeros.to(x.dtype), x], 1)

            mask = inputs["completion_mask"]
            mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
            state["add"](
                tokens=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                attention=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                mask=row(mask).bool(), logprobs=row(state["lp"]), advantages=inputs["advantages"],
                old_logprobs=row(inputs.get("old_per_token_logps")),
                ref_logprobs=row(inputs.get("ref_per_token_logps")), loss=loss.detach(),
                rewards=inputs["rewards"] if has_whole_groups else None,
                groups=inputs["groups"] if has_whole_groups else None,
            )  # fmt: skip
        return loss

    def clip_grad_norm(*args, **options):
        norm = clip(*args, **options)
        if is_recorded():
            state["add"](grad_norm=norm)
        return norm

    class Start(transformers.TrainerCallback):
        def on_train_begin(self, args, *_, model=None, optimizer=None, **options):
            optimizer = getattr(optimizer, "optimizer", optimizer)
            recorder = record(
                directory, model.named_parameters(), optimizer, settings=trl_settings(args),
                step_number=step_number)  # fmt: skip
            state["add"] = stack.enter_context(recorder)

    args = trainer.args
    has_whole_groups = args.gradient_accumulation_steps % args.steps_per_generation == 0
    new = dict(zip(names, (loss_of, forward, rewards, generate)))
    with contextlib.ExitStack() as stack:  # an error inside leaves the trainer as it was, too
        start = Start()
        trainer.add_callback(start)
        stack.callback(trainer.remove_callback, start)
        for name in names:
            stack.callback(setattr, trainer, name, own[name])
            setattr(trainer, name, new[name])
        stack.callback(setattr, trainer.accelerator, "clip_grad_norm_", clip)
        trainer.accelerator.clip_grad_norm_ = clip_grad_norm
        yield
        if "add" not in state:
            raise RuntimeError("expected a call of trainer.train(), got none")


def build_trl():
    """Return a Qwen3 of 2 layers with random weights."""
    import transformers

    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        eos_token_id=list(range(3, 12)), pad_token_id=2, bos_token_id=None,
    ))  # fmt: skip


def run_trl(directory, step_number=1, **changes):
    """Train with TRL on random prompts, and record a step."""
    import datasets
    import tokenizers
    import transformers
    import trl

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )
    # Prompts of different lengths, so that rows have padding on both sides.
    text = [{"prompt": " ".join(f"w{3 + (7 * i + j) % 61}" for j in range(2 + i % 3))}
            for i in range(64)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(
            output_dir=folder, per_device_train_batch_size=4, num_generations=4,
            gradient_accumulation_steps=2, max_completion_length=8, max_steps=step_number,
            learning_rate=1e-3, weight_decay=0.1, gradient_checkpointing=False, bf16=False,
            temperature=0.9, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
            lr_scheduler_type="constant", logging_strategy="no",
        )  # fmt: skip
        build_trl().save_pretrained(folder)  # the reference is read from there
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = trl.GRPOTrainer(
            model, lambda completions, **_: [float(sum(map(ord, x)) % 7) for x in completions],
            trl.GRPOConfig(**settings | changes), datasets.Dataset.from_list(text),
            processing_class=tokenizer,
        )  # fmt: skip
        with record_trl(directory, trainer, step_number):
            trainer.train()


# This project's full edition --------------------------------------------------------------------


def full_settings(config):
    """Return what a Config says that the trainer computes, as settings of step.py."""
    from full.audit.replay import settings

    given = D.DEFAULTS | settings(config)
    return {name: given[name] for name in D.LOSS_DEFAULTS | D.STEP_DEFAULTS}


def recording(trainer_class, directory, step_number=1):
    """Return a subclass of full.learn.trainer.Trainer that records one of its optimizer steps.

    The weights must be whole on each rank: plans of d, with data_parallel ddp.
    """

    class Recording(trainer_class):
        recorder = None

        def forward_backward(self, batch, num_global_valid_tokens, **options):
            if self.recorder is None and self.policy_version + 1 == step_number:
                self.recorder = record(
                    directory, self.optimizer.mine.items(), self.optimizer.inner,
                    settings=full_settings(self.config))  # fmt: skip
                self.add = self.recorder.__enter__()
            return super().forward_backward(batch, num_global_valid_tokens, **options)

        def loss(self, micro, mask_BT, lp_BT, *scores, Z):
            loss, sums = super().loss(micro, mask_BT, lp_BT, *scores, Z=Z)
            if self.recorder is not None and micro:
                self.add(**self.columns(micro, mask_BT, lp_BT), loss=loss.detach())
            return loss, sums

        def columns(self, micro, mask_BT, lp_BT):
            # The trainer's column t is about target t, which is token t + 1.
            def column(vectors):
                rows = torch.zeros(len(micro), lp_BT.shape[-1] + 1, dtype=torch.float64)
                for row, vector in zip(rows, vectors):
                    if vector is None:
                        return None
                    row[1 : len(vector) + 1] = torch.as_tensor(vector).double()
                return rows

            lp_BT, mask_BT = torch.atleast_2d(lp_BT.detach()), torch.atleast_2d(mask_BT)
            tokens = torch.zeros(len(micro), lp_BT.shape[-1] + 1, dtype=torch.long)
            attention = torch.zeros_like(tokens)
            for b, t in enumerate(micro):
                tokens[b, : len(t.tokens)] = torch.tensor(t.tokens)
                attention[b, : len(t.tokens)] = 1
            return dict(
                tokens=tokens, attention=attention, mask=column(mask_BT).bool(),
                logprobs=column(lp_BT).to(lp_BT.dtype), advantages=column(
                    [t.advantages for t in micro]),
                old_logprobs=column([t.old_logprobs for t in micro]),
                ref_logprobs=column([t.ref_logprobs for t in micro]),
                rewards=torch.tensor([t.reward for t in micro]),
                groups=torch.tensor([t.group for t in micro]))  # fmt: skip

        def optim_step(self, lr=None):
            metrics = super().optim_step(lr)
            if self.recorder is not None and self.policy_version == step_number:
                self.add(grad_norm=metrics["grad_norm"])
                self.recorder.__exit__(None, None, None)
                self.recorder = None
            return metrics

    return Recording


FULL_SHAPE = dict(size=2, layers=1, hidden=16, heads=2)


def build_full():
    """Return the policy of `run_full`. Its weights come from the dump."""
    # The command has put this file's folder first, which has a parallel.py of its own.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from full.run.config import Config
    from full.run.build import own_shape
    from full.run.tasks import make_task
    from full.model.transformer import Transformer

    config = Config(**FULL_SHAPE)
    return Transformer(own_shape(config, make_task(config)))


def run_full(directory, step_number=1, **flags):
    """Train `guess` by the folder, and record an optimizer step. Flags as Config's."""
    from full import __main__ as program
    from full.run import run

    run.Trainer = recording(run.Trainer, directory, step_number)
    with tempfile.TemporaryDirectory() as folder:
        flags = FULL_SHAPE | dict(
            prompts=4, group=12, steps=step_number, minibatches=1, dtype="float64",
            micro_tokens=150, eval_prompts=7, lr_warmup=0, out=folder) | flags  # fmt: skip
        words = [f"--{name.replace('_', '-')}={x}" for name, x in flags.items()]
        return program.main(words)


@command.one_line_errors
def main(argv):
    """Run a trainer, and record one step."""
    kinds = dict(trl=run_trl, full=run_full)
    if len(argv) < 2 or argv[0] not in kinds:
        raise ValueError(f"expected {' | '.join(kinds)} and a directory, got {' '.join(argv)!r}")
    torch.set_num_threads(1)
    return kinds[argv[0]](argv[1], **command.settings_in(argv[2:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
