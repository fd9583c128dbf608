"""nano-aha-moment: compute_pg_loss, and the lines of its training loop, recorded.

    SOURCES=DIR python conformance/loss.py conformance/subjects/nano_aha.py:loss
    SOURCES=DIR python conformance/subjects/nano_aha.py DUMP
    SOURCES=DIR python conformance/step.py DUMP --model conformance/subjects/nano_aha.py:build

With CLONE=1 the loop's log-probs get labels of their own, which mends it.
"""

import gc
import logging
import os
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from take import shifted, source, take

sys.path.insert(0, f"{Path(__file__).resolve().parents[2]}")
from conformance.recorders import record

SCRIPT = "nano-aha-moment/nano_r1_script.py"
U = take("nano-aha-moment/utils.py", "prepare_model_inputs", "log_softmax_and_gather",
         "compute_token_log_probs", List=list, Dict=dict, DeepSpeedEngine=object,
         PreTrainedModel=object)  # fmt: skip
# `close_to_zero` is a metric. The script's own raises an error at this commit, see findings.py.
COMMON = dict(Dict=dict, Tuple=tuple, close_to_zero=lambda *_: torch.zeros(()))
N = take(SCRIPT, "compute_pg_loss", compute_token_log_probs=U.compute_token_log_probs, **COMMON)
GIVEN = take(SCRIPT, "compute_pg_loss", compute_token_log_probs=lambda lp, *_: lp, **COMMON)
SETTINGS = dict(objective="reinforce", kl="k3")


def loss(batch):
    """Call the loss on one rank, with the step's tokens as total_response_len."""
    ref = batch.old if batch.ref is None else batch.ref
    data = dict(dict.fromkeys(("input_ids", "attention_mask", "labels")), ref_log_probs=ref,
                labels_mask=shifted(batch.mask.long()),
                advantages=shifted(batch.advantage))  # fmt: skip
    total, coefficient = torch.tensor(float(batch.tokens)), batch.settings["kl_coef"]
    return GIVEN.compute_pg_loss(batch.lp, data, total, 1.0, coefficient)[0]


def build():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False))  # fmt: skip


class Engine(torch.nn.Module):
    """What DeepSpeed's engine does on one rank for two micro-batches, without its own scale."""

    def __init__(self, model, optimizer=None, add=None):
        super().__init__()
        self.module, self.optimizer, self.add, self.calls = model, optimizer, add, 0

    def forward(self, **inputs):
        return self.module(**inputs)

    def get_global_grad_norm(self):
        return None

    def backward(self, loss, scale_wrt_gas):
        loss.backward()

    def step(self):
        self.calls += 1
        if self.calls == 2:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.add(grad_norm=norm)
            self.optimizer.step()


def episodes():
    """Return two groups of four episodes, and the advantages of their tokens."""
    torch.manual_seed(1)
    lengths = [7, 3, 5, 2, 6, 4, 7, 1]
    answers = [torch.randint(1, 32, (n,)).tolist() for n in lengths]
    A = [0.8, -1.1, 0.2, 0.4, -0.7, 1.3, -0.2, -0.5]
    return dict(all_query_token_ids=4 * [[5, 1, 9]] + 4 * [[2, 7]],
                all_response_token_ids=answers,
                all_advantages=[[a] * n for a, n in zip(A, lengths)])  # fmt: skip


def main(directory):
    """Run the loop's lines on a tiny model, and record its step."""
    model, reference = build(), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    settings = dict(objective="reinforce", kl_coef=0.001)
    text = source(SCRIPT).read_text(encoding="utf-8").splitlines()
    first, end = (next(n for n, line in enumerate(text) if mark in line)
                  for mark in ("# Prepare training batch", "Time taken to train"))  # fmt: skip
    code = compile(textwrap.dedent("\n".join(text[first:end])), SCRIPT, "exec")

    def log_probs(model, inputs, temperature):
        if os.environ.get("CLONE"):
            inputs = inputs | dict(labels=inputs["labels"].clone())
        return U.compute_token_log_probs(model, inputs, temperature)

    with record(directory, model.named_parameters(), optimizer, settings=settings) as add:

        def compute_pg_loss(**given):
            value, metrics = N.compute_pg_loss(**given)
            b = {name: x.clone() for name, x in given["batch"].items()}
            lp = shifted(U.compute_token_log_probs(model, dict(b), 1.0))
            add(tokens=b["input_ids"], attention=b["attention_mask"], logprobs=lp, loss=value,
                mask=b["labels_mask"].bool(), ref_logprobs=shifted(b["ref_log_probs"]),
                advantages=b["advantages"])  # fmt: skip
            return value, metrics

        space = dict(
            prepare_model_inputs=U.prepare_model_inputs, compute_token_log_probs=log_probs,
            compute_pg_loss=compute_pg_loss, episodes=episodes(), curr_cuda_device="cpu",
            logger=logging.getLogger("loop"), torch=torch, gc=gc, trange=lambda *n, **_: range(*n),
            time=SimpleNamespace(time=time.time, sleep=lambda _: None), metrics={},
            dist=SimpleNamespace(get_rank=lambda: 0), EPISODES_PER_ITERATION_PER_RANK=8,
            PER_DEVICE_BATCH_SIZE=4, TEMPERATURE=1.0, KL_COEFFICIENT=0.001,
            policy_model=Engine(model, optimizer, add), reference_model=Engine(reference),
        )  # fmt: skip
        torch.cuda.empty_cache = lambda: None
        exec(code, space)


if __name__ == "__main__":
    main(sys.argv[1])
