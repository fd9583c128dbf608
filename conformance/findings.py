"""The findings of README.md once more, each in at most ten lines and without a kit.

    python conformance/findings.py                       # those whose packages are installed
    python conformance/findings.py auxiliary_loss        # one
    PYTHONPATH=DIR python conformance/findings.py m2po   # DIR: see the first lines of its subject
    SOURCES=DIR python conformance/findings.py likelihood    # the same

Each function computes a number with a package and by its definition, on tiny random models in
float64, and gives pairs of a text and a number. The kits use other sizes, so some numbers differ.
"""

import functools
import importlib.util
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from conformance import definition

TINY = dict(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=4, tie_word_embeddings=False, pad_token_id=None,
    initializer_range=0.2,
)  # fmt: skip


# What they share --------------------------------------------------------------------------------


def on_ranks(world, function, *given):
    """Call function(*given) on `world` processes. Return what each returns, in a list."""

    def call(rank, folder):
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
        torch.manual_seed(0)
        torch.save([*function(*given)], f"{folder}/{rank}")
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory() as folder:
        start_processes(call, (folder,), world, start_method="fork")
        return [torch.load(f"{folder}/{rank}") for rank in range(world)]


def load(kind):
    """Return a model, the same one split over the ranks by its tp_plan, and tokens. Collective."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    transformers.logging.disable_progress_bar()
    how = dict(experts_implementation="eager")
    config = transformers.AutoConfig.for_model(kind, **TINY)
    whole = transformers.AutoModelForCausalLM.from_config(config, **how)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    whole.save_pretrained(folder[0], is_main_process=dist.get_rank() == 0)
    dist.barrier()
    how |= dict(distributed_config=DistributedConfig(tp_size=dist.get_world_size()))
    split = transformers.AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float64, **how)
    return whole.eval(), split.eval(), torch.randint(12, (4, 8))


def gradients(model, parts):
    """Return the gradients of a model after a backward pass for each part of a batch, by name."""
    model.zero_grad()
    for tokens in parts:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def off(found, expected):
    """Return the relative error of a tensor."""
    return (found - expected).norm() / expected.norm()


def trl_gradient(lp, old, ref, mask, advantage, micro_batches=1, **changes):
    """Return the gradient that GRPOTrainer's loss has in the log-probs lp (B, T)."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    lp, total = lp.clone().requires_grad_(), mask.sum()
    given = dict(
        epsilon_low=0.2, epsilon_high=0.2, beta=0.0, importance_sampling_level="token",
        off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
        aux_loss_enabled=False, top_entropy_quantile=1.0, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=micro_batches, use_bias_correction_kl=True, delta=None,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x,
                                    reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)), steps_per_generation=micro_batches,
    )  # fmt: skip
    trainer = SimpleNamespace(**given | changes)
    trainer.args = trainer  # the trainer and its arguments have no name twice
    for rows in torch.arange(len(lp)).chunk(micro_batches):
        scored = lp[rows], torch.zeros_like(lp[rows]), None
        trainer._get_per_token_logps_and_entropies = lambda *_, scored=scored, **__: scored
        inputs = dict(prompt_ids=mask[rows, :1], prompt_mask=mask[rows, :1],
                      completion_ids=mask[rows], completion_mask=mask[rows],
                      advantages=advantage[rows], old_per_token_logps=old[rows],
                      ref_per_token_logps=ref[rows], num_items_in_batch=total)  # fmt: skip
        GRPOTrainer._compute_loss(trainer, None, inputs).backward()
    return lp.grad


def answers(rows=4, length=6):
    """Return log-probs now, before and of a reference, masks of unequal lengths, advantages."""
    torch.manual_seed(0)
    lp, old, ref = (-2 * torch.rand(3, rows, length, dtype=torch.float64)).unbind()
    mask = (torch.arange(length) < torch.tensor([6, 6, 1, 2])[:, None]).long()
    return lp, old, ref, mask, torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)


# transformers -----------------------------------------------------------------------------------


def replicated_norms():
    """Finding 1: a norm's gradient after the second of two backward passes under tp_plan."""
    whole, split, tokens = load("qwen3")
    name, parts = "model.layers.0.self_attn.q_norm.weight", tokens.chunk(2)
    g1, g2 = (gradients(whole, [part])[name].clone() for part in parts)
    found = gradients(split, parts)[name]
    return [("q_norm: from 2 g1 + g2", off(found, 2 * g1 + g2)),
            ("from g1 + g2", off(found, g1 + g2)),
            ("one backward pass: from g1", off(gradients(split, parts[:1])[name], g1))]  # fmt: skip


def activation():
    """Finding 2: the gradients of xIELU's scalars on the ranks, and their sum."""
    whole, split, tokens = load("apertus")
    name = "model.layers.0.mlp.act_fn.alpha_p"
    right, mine = (gradients(model, [tokens])[name].clone() for model in (whole, split))
    total = mine.clone()
    dist.all_reduce(total)
    return [("alpha_p: a rank's gradient, from the right one", off(mine, right)),
            ("the ranks' sum", off(total, right))]  # fmt: skip


def cut_matrices():
    """Finding 3: the weights that HRM has on the ranks, put together again, before any step."""
    whole, split, _ = load("hrm_text")
    right, wrong = dict(whole.named_parameters()), []
    for name, p in split.named_parameters():
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        wrong += [name] if not torch.equal(p, right[name]) else []
    return [("parameters", len(right)), ("with other values", len(wrong))]


def auxiliary_loss():
    """Finding 8: what the auxiliary loss adds to the router's gradient, of equal rows."""
    trainer, world, found, numbers = trainer_stub(), dist.get_world_size(), {}, []
    for parts in (1, 2, 4):
        for coefficient in (0.1, 0.0):
            ddp = DistributedDataParallel(mixture(coefficient))
            for part in torch.arange(8).expand(8 // world, 8).chunk(parts):
                given = dict(input_ids=part, labels=part, use_cache=False)
                trainer.compute_loss(ddp, given, num_items_in_batch=torch.tensor(56)).backward()
            found[coefficient] = ddp.module.model.layers[0].mlp.gate.weight.grad
        numbers.append((f"norm, {parts} micro-batch(es)", (found[0.1] - found[0.0]).norm()))
    return numbers


def mixture(coefficient):
    """Return a Mixtral of one layer with an auxiliary loss."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    config = MixtralConfig(**TINY | dict(num_hidden_layers=1), num_local_experts=4,
                           output_router_logits=True, router_aux_loss_coef=coefficient)  # fmt: skip
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def trainer_stub():
    """Return the fields that Trainer.compute_loss reads, by the defaults of TrainingArguments."""
    from transformers import Trainer

    trainer = SimpleNamespace(
        args=SimpleNamespace(average_tokens_across_devices=True, n_gpu=1), label_smoother=None,
        compute_loss_func=None, model_accepts_loss_kwargs=True, get_tp_size=lambda: 1,
        accelerator=SimpleNamespace(num_processes=dist.get_world_size(), parallelism_config=None),
    )  # fmt: skip
    trainer.compute_loss = functools.partial(Trainer.compute_loss, trainer)
    return trainer


# TRL ----------------------------------------------------------------------------------------------


def distillation():
    """Finding 7: the norm of GKDTrainer's gradient in one step under DDP, of 8 equal rows."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.experimental.gkd import GKDTrainer

    teacher, student = (LlamaForCausalLM(LlamaConfig(**TINY)) for _ in range(2))
    rows = torch.arange(8).expand(8 // dist.get_world_size(), 8)
    loss_of = GKDTrainer.generalized_jsd_loss
    trainer = SimpleNamespace(teacher_model=teacher, beta=0.5, generalized_jsd_loss=loss_of)
    given = dict(input_ids=rows, labels=rows, attention_mask=torch.ones_like(rows))
    ddp, tokens = DistributedDataParallel(student), torch.tensor(8 * 7)  # of all ranks
    GKDTrainer.compute_loss(trainer, ddp, given, num_items_in_batch=tokens).backward()
    return [("norm", torch.cat([p.grad.flatten() for p in student.parameters()]).norm())]


def sequence_kl():
    """Finding 10: a KL's gradient with the sequence's ratio, and with each token's own ratio."""
    lp, old, ref, mask, advantage = answers()
    how = dict(loss_type="grpo", beta=1.0, importance_sampling_level="sequence")
    found = trl_gradient(lp, old, ref, mask, 0 * advantage, **how)
    ratio = (lp - old).exp() / mask.sum(1, keepdim=True) / len(lp)
    right = ratio * (lp - ref) * mask  # the derivative of ratio k3, divided as grpo divides
    cosine = (found * right).sum() / found.norm() / right.norm()
    return [("norm, times the right one", found.norm() / right.norm()), ("cosine", cosine)]


def generation_tokens():
    """Finding 9: the first of two steps of a generation batch, which have 12 and 3 tokens."""
    lp, old, ref, mask, advantage = answers()
    how = dict(loss_type="dapo", steps_per_generation=2)  # of one micro-batch each
    found = trl_gradient(lp, old, ref, mask, advantage, **how)[:2]
    alone = trl_gradient(*(x[:2] for x in (lp, old, ref, mask, advantage)), loss_type="dapo")
    return [("norm, times the token mean's", found.norm() / alone.norm())]


def bnpo():
    """Finding 11: two micro-batches of 12 and 3 tokens, a mean of means."""
    given = answers()
    found = trl_gradient(*given, micro_batches=2, loss_type="bnpo")
    right = trl_gradient(*given, micro_batches=2, loss_type="dapo")
    parts = zip(found.split(2), right.split(2))
    return [("norm of a part, times the token mean's", x.norm() / y.norm()) for x, y in parts]


# Others: their subjects import them without their dependencies ------------------------------------


def subject(name):
    """Import a file of subjects/."""
    sys.path.insert(0, str(Path(__file__).resolve().parent / "subjects"))
    return importlib.import_module(name)


def m2po():
    """Finding 5: the gradient of the same 24 tokens in 1, 2 and 4 micro-batches."""
    loss = subject("areal_losses").AREAL.grpo_loss_fn
    lp, old = -torch.rand(2, 4, 6, generator=torch.manual_seed(0), dtype=torch.float64)
    engine, A = old + 0.5 * torch.sin(7 * lp), torch.sin(9 * old).sign()
    for parts in (1, 2, 4):
        now = lp.clone().requires_grad_()
        for rows in torch.arange(4).chunk(parts):
            batch = dict(prox_logp=old, logprobs=engine, advantages=A, loss_mask=torch.ones(4, 6))
            batch = {name: x[rows] for name, x in batch.items()}
            value = loss(now[rows], 0 * now[rows], batch, 0.2, 0.28, None, m2_threshold=0.04)
            (value * len(rows) / 4).backward()  # the engine's weight: its share of the tokens
        yield f"norm, {parts} micro-batch(es)", now.grad.norm()


def undivided_kl():
    """Finding 4: the loss of kl_cov for 50 and for 5000 tokens whose log-probs moved by 0.1."""
    skyrl, found = subject("skyrl_losses"), []
    config = SimpleNamespace(kl_cov=SimpleNamespace(kl_cov_frac=1.0, ppo_kl_coef=1.0),
                             off_policy_correction=skyrl.NO_CORRECTION, loss_reduction="token_mean")
    for tokens in (50, 5000):
        old = torch.zeros(1, tokens)
        scaled = torch.zeros(1, tokens)  # advantages of 0, divided by the number of tokens
        loss = skyrl.SKYRL.PolicyLossRegistry.get("kl_cov")
        value = loss(old + 0.1, old, scaled, config, loss_mask=torch.ones(1, tokens))[0]
        found.append((f"loss of {tokens} tokens", value))
    return found


def generation_steps():
    """Finding 6: the gradient of a step, where 1, 2 and 4 steps' answers were generated at once."""
    swift, found = subject("ms_swift_losses"), []
    ones, settings = torch.ones(2, 5, dtype=torch.float64), defaultdict(float, objective="clip")
    settings |= dict(clip_low=0.2, clip_high=0.2, aggregation="token_mean", max_new_tokens=5)
    for swift.GENERATION in (1, 2, 4):
        lp = (-ones).requires_grad_()
        batch = SimpleNamespace(settings=settings, lp=lp, old=-ones, mask=ones.bool(), tokens=10,
                                advantage=ones, micro_batches=1, ranks=1)  # fmt: skip
        swift.loss(batch).backward()
        found.append((f"sum of the gradient, {swift.GENERATION} step(s)", lp.grad.sum()))
    return found


# By what subjects/take.py lifts from SOURCES ------------------------------------------------------


def zeroed_labels():
    """Finding 13: the tokens that nano-aha-moment counts before and after the reference's turn."""
    U = subject("nano_aha").U
    given = [[1, 2, 3], [4, 5]], [[6, 7], [8]], [[0.5, 0.8], [0.3]]  # its docstring's example
    batch = U.prepare_model_inputs(*given, "cpu")
    numbers = [("tokens of answers", (batch["labels"] != -100).sum())]
    part = {name: x[0:2] for name, x in batch.items()}

    def model(input_ids, **_):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 10))

    U.compute_token_log_probs(model, part, 1.0)
    return numbers + [("total_response_len", (batch["labels"] != -100).sum())]


def one_ratio():
    """Finding 14: torchtune's loss of two completions whose ratios are e^.15 and e^-.15."""
    os.environ["KIND"] = "GRPOCompletionLoss"
    function = subject("torchtune").L.GRPOCompletionLoss(epsilon=0.2, kl_coeff=0.0)
    old, now = torch.full((2, 3), -1.0), torch.tensor([[-0.95] * 3, [-1.05] * 3])
    A, r = torch.tensor([1.0, -1.0]), (now - old).sum(1).exp()
    right = -torch.minimum(r * A, r.clamp(0.8, 1.2) * A).mean()
    found = function(old, now, old, A, torch.ones(2, 3).bool())[0]
    return [("loss, by the docstring", right), ("loss", found)]


def luspo():
    """Finding 15: the gradient of luspo at the first of 2 tokens, in 2 and in 4 columns."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction as Liger

    for columns in (2, 4):
        lp = torch.full((1, columns), -1.0, requires_grad=True)
        mask = (torch.arange(columns) < 2).long()[None]
        Liger.ppo_loss_fn(lp, mask, torch.ones(1), mask, old_per_token_logps=lp.detach(), beta=0.0,
                          loss_type="luspo")[0].backward()  # fmt: skip
        yield f"gradient in {columns} columns, expected -1", lp.grad[0, 0]


def masked_sample():
    """Finding 16: what slime counts for 4 tokens and a masked sample of 4."""
    os.environ["PER_TOKEN"] = "1"
    slime, ones = subject("slime"), torch.ones(2, 4)
    names = "smp ref entropy value old_value returns reward weight"
    batch = SimpleNamespace(
        **dict.fromkeys(names.split()), lp=-ones, old=-ones, advantage=ones, ranks=1,
        mask=torch.tensor([4 * [True], 4 * [False]]), micro_batches=1, sequences=2,
        settings=definition.DEFAULTS | dict(kl_coef=0.0))  # fmt: skip
    return [("count of 4 trained tokens", slime.loss(batch)[1])]


def likelihood():
    """Finding 17: the sum of the gradient of NeMo-RL's likelihood of 4 rows of 3 tokens."""
    nemo = subject("nemo_rl")
    settings = definition.DEFAULTS | dict(nll_coef=0.1, aggregation="token_mean")
    for parts in (1, 2, 4):
        lp = torch.full((4, 3), -1.0, requires_grad=True)
        for rows in torch.arange(4).chunk(parts):
            ones = torch.ones(len(rows), 3)
            nemo.loss(SimpleNamespace(
                settings=settings, lp=lp[rows], old=-ones, smp=None, ref=None, ranks=1, tokens=12,
                mask=ones.bool(), advantage=0 * ones, reward=ones[:, 0], sequences=4)).backward()
        yield f"{parts} micro-batch(es)", lp.grad.sum()


def unmasked_mean():
    """Finding 18: ROLL's token mean of 1 and 1, where masked tokens have 100 and -50."""
    x, mask = torch.tensor([[1.0, 100.0], [1.0, -50.0]]), torch.tensor([[1, 0], [1, 0]])
    return [("mean", subject("roll").R.agg_loss(x, mask, "token-mean", batch_num_tokens=2))]


def local_tokens():
    """Finding 19: AsyncGRPO's gradient of 6 and of 2 tokens, in one micro-batch and in two."""
    loss, lengths = subject("trl_async").loss, torch.tensor([6, 2])
    torch.set_default_dtype(torch.float32)  # it adds up in it
    for parts in (1, 2):
        lp, mask = -torch.ones(2, 6), torch.arange(6) < lengths[:, None]
        lp.requires_grad_()
        for rows in torch.arange(2).chunk(parts):
            loss(SimpleNamespace(
                settings=definition.DEFAULTS, lp=lp[rows], old=-torch.ones(len(rows), 6), ranks=1,
                advantage=torch.ones(len(rows), 6), mask=mask[rows], micro_batches=parts,
                micro_step_tokens=int(mask[rows].sum()))).backward()  # fmt: skip
        yield f"{parts} micro-batch(es): at the second row's token", lp.grad[1, 0]


def smoothing():
    """Finding 20: Megatron's smoothed cross-entropy of probabilities .7 .1 .1 .1 on 2 ranks."""
    os.environ["KIND"] = "megatron_smooth"
    loss = subject("vocab_parallel").M.vocab_parallel_cross_entropy
    p, a, y = torch.tensor([0.7, 0.1, 0.1, 0.1]), 0.1, torch.zeros(1).long()
    right = -((1 - a) * p[0].log() + a / 3 * p[1:].log().sum())
    part = p.log().chunk(dist.get_world_size())[dist.get_rank()][None].clone()
    both = [None, None]
    dist.all_gather_object(both, loss(part, y, a, dist.group.WORLD).item())
    return [("loss", right), ("rank 0", both[0]), ("rank 1", both[1])]


def first_label():
    """Finding 21: accelerate's count of labels, and the losses that a causal model adds up."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    labels = torch.arange(11).expand(4, 11)  # 4 rows, all labels are trained
    loss = ForCausalLMLoss(torch.zeros(4, 11, 12), labels, 12, num_items_in_batch=labels.numel())
    return [("loss, times the mean's", loss / torch.tensor(12.0).log()), ("40 of 44", 40 / 44)]


def ignored_factor():
    """Finding 22: the sum of the gradient of 1 and of 8 times unsloth's loss."""
    U, mask = subject("unsloth").U, torch.ones(1, 2).long()
    for k in (1, 8):
        lp = torch.zeros(1, 2, requires_grad=True)
        given = lp, torch.zeros(1, 2), None, None, None, mask, mask, torch.ones(1), 0.0, None, 1
        (k * U.UnslothEfficientGRPO.apply(*given, dict(loss_type="grpo"))[0]).backward()
        yield f"{k} times the loss", lp.grad.sum()


def local_covariances():
    """Finding 23: how many of 8 tokens verl's kl_cov chooses with a share of 1/8."""
    kl_cov, lp = subject("verl_terms").kl_cov, -torch.arange(1.0, 9.0).view(4, 2) / 8
    settings = definition.DEFAULTS | dict(objective="kl_cov", cov_share=1 / 8)
    for parts in (1, 4):
        total = 0.0
        for rows in torch.arange(4).chunk(parts):  # advantages of 0: the loss is the KL's
            total += kl_cov(SimpleNamespace(
                settings=settings, lp=lp[rows], old=lp[rows] - 1, advantage=0 * lp[rows], ranks=1,
                mask=torch.ones(len(rows), 2).bool(), tokens=8, sequences=4))  # fmt: skip
        yield f"tokens that are chosen in {parts} micro-batch(es)", 8 * total


# A name, the numbers of ranks on which it runs, and the package or the clone that it needs.
FINDINGS = {
    replicated_norms: ((2,), "transformers"), activation: ((2,), "transformers"),
    cut_matrices: ((2,), "transformers"), undivided_kl: ((1,), "skyrl"), m2po: ((1,), "areal"),
    generation_steps: ((1,), "swift"), distillation: ((1, 2, 4), "trl"),
    auxiliary_loss: ((1, 2), "transformers"), generation_tokens: ((1,), "trl"),
    sequence_kl: ((1,), "trl"), bnpo: ((1,), "trl"),
    zeroed_labels: ((1,), "SOURCES/nano-aha-moment"), one_ratio: ((1,), "SOURCES/torchtune"),
    luspo: ((1,), "liger_kernel"), masked_sample: ((1,), "SOURCES/slime"),
    likelihood: ((1,), "SOURCES/RL"), unmasked_mean: ((1,), "SOURCES/ROLL"),
    local_tokens: ((1,), "trl"), smoothing: ((2,), "SOURCES/Megatron-LM"),
    first_label: ((1,), "transformers"), ignored_factor: ((1,), "SOURCES/unsloth-zoo"),
    local_covariances: ((1,), "SOURCES/verl"),
}  # fmt: skip


def is_there(package):
    """Return whether a package is installed, or a clone is in SOURCES."""
    if package.startswith("SOURCES/"):
        return Path(os.environ.get("SOURCES", "."), package.removeprefix("SOURCES/")).is_dir()
    return importlib.util.find_spec(package) is not None


def main(argv) -> int:
    """Print the numbers of the findings with these names, or of all."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    for finding, (worlds, package) in FINDINGS.items():
        name = finding.__name__
        if argv and name not in argv:
            continue
        if not is_there(package):
            print(f"{name}: no {package}")
            continue
        for world in worlds:
            for text, number in on_ranks(world, finding)[0]:
                print(f"{name}, {world} rank(s): {text} {float(number):.3g}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
