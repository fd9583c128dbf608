"""prime-rl: default_loss_fn (DPPO), one sequence after another. Gradients are summed.

    SOURCES=DIR python conformance/loss.py conformance/subjects/prime_rl.py:loss
"""

from types import SimpleNamespace

from take import take

P = take(
    "prime-rl/src/prime_rl/trainer/rl/loss.py", "LossInputs", "LossOutputs", "_safe_mean",
    "compute_importance_ratio_and_mismatch_kl", "default_loss_fn", "compute_loss", LossFn=None,
)  # fmt: skip
SETTINGS = dict(objective="dppo", ratio_cap=1e9, clip_low=0.2, clip_high=0.2)


def loss(batch):
    """Call compute_loss as the trainer does, with the step's tokens as the scale."""
    c = batch.settings
    config = SimpleNamespace(
        dppo_mask_low=c["clip_low"], dppo_mask_high=c["clip_high"], adv_tau=1.0, kl_tau=0.0)
    rows = [[*x.unbind(0)] for x in (batch.lp, batch.old, batch.advantage, batch.mask)]
    return P.compute_loss(
        *rows[:2], None, *rows[2:], None, None, None,
        lambda inputs: P.default_loss_fn(inputs, config), batch.tokens, 1, 1)[0]  # fmt: skip
