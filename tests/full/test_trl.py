"""Against TRL: its loss by recorded numbers; where it is installed its trainer makes our curve.

trl_loss_golden.json has the loss and gradient of TRL 1.16 for every setting that both have.
"""

import importlib.util
import json
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conformance import recorders
from conftest import ROOT, installed
from test_loss import label, tensor
from test_rollout import checkpoint  # noqa: F401, a fixture

from full.learn.objectives import LossSettings, OtherScores, grpo_loss

GOLDEN = json.loads((ROOT / "tests" / "trl_loss_golden.json").read_text())
COVERED = [case for case in GOLDEN["cases"] if case["ours"]]  # there is no KL times the ratio
POINTS = ROOT / "tests" / "bench" / "curve_trl.jsonl"
needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"),
                               reason="trl is not installed: pip install trl")  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("case", COVERED, ids=label)
def test_loss_and_gradient_are_trls(case):
    given = {k: tensor(v) for k, v in GOLDEN.items() if isinstance(v, list) and k != "cases"}
    lp, mask = given["logprobs"].requires_grad_(), given["mask"].bool()
    old = given["old_logprobs"] if case["old"] else None
    sampler = (lp.detach() if old is None else old) - given["importance_weights"].log()
    ours = dict(case["ours"])
    Z = ours.pop("Z", None)
    others = OtherScores(sampler, given["ref_logprobs"], given["entropy"])
    own = lp, old, given["advantages"][:, None], mask
    loss, sums = grpo_loss(*own, LossSettings(**ours), others, Z=Z)
    # TRL's bonus is a mean over this batch's sampled tokens, whatever the aggregation; ours stands
    # in l, under w / Z. So the loss is made without it, and it is added as TRL does.
    loss = loss - case["entropy_coef"] * sums["entropy/token_mean"] / mask.sum()
    loss.backward()
    expected = tensor(case["grad"])
    assert abs(loss.item() - case["loss"]) <= 1e-12 and expected.norm() > 1e-3
    assert (lp.grad - expected).abs().max() <= 1e-12
    assert sums["tokens"] == mask.sum() and 0 <= sums["ratio/clipped_fraction"] <= mask.sum()


@needs_trl
def test_a_recorder_leaves_a_trainer_as_it_was_also_after_an_error(tmp_path):
    args = SimpleNamespace(gradient_accumulation_steps=2, steps_per_generation=2)
    trainer = Mock(args=args)
    loss, clip = trainer._compute_loss, trainer.accelerator.clip_grad_norm_
    with pytest.raises(ZeroDivisionError):
        with recorders.record_trl(tmp_path, trainer):
            assert trainer._compute_loss != loss
            1 / 0
    assert (trainer._compute_loss, trainer.accelerator.clip_grad_norm_) == (loss, clip)
    assert trainer.remove_callback.call_args == trainer.add_callback.call_args


@pytest.mark.slow
@needs_trl
def test_trl_makes_our_curve_of_our_rollouts(
    checkpoint, tmp_path, monkeypatch, capsys,  # noqa: F811
):  # fmt: skip
    """curve_trl.py: rewards, learning rates, updates and evaluations are the same in both."""
    import curve_trl
    import models
    import trl

    directory = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    named = dict(chat_template="{{ messages[0]['content'] }} answer:", eos_token="<end>")
    named |= dict(tokenizer_class="PreTrainedTokenizerFast", pad_token="<end>")
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    monkeypatch.setattr("smollm_tasks.reversed_words", lambda text, line: len(text) % 7 / 6)
    curves, train = [], curve_trl.train_trl

    def noted(config, task, trainer, curve):
        curves.append(curve)
        train(config, task, trainer, curve)

    def played(trainer, prompts, *_, **__):
        groups = curves[-1].examiner.get(trainer.state.global_step).groups
        rows = [episode.tokens for episodes in groups.values() for episode in episodes]
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts)], None

    monkeypatch.setattr(curve_trl, "train_trl", noted)
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", played)
    size = dict(steps=4, group=16, max_new_tokens=100, eval_prompts=20, lr=1e-3)
    weights, points = [], []
    for variant in curve_trl.VARIANTS:
        model = curve_trl.run(variant, 0, f"{directory}", **size).model
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        line = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert line["step"] == [0, 2, 4] and line["reward"][-1] > 0
        points.append([*line["reward"][1:], *line["solved"]])
    assert points[1] == points[0] and points[2] == pytest.approx(points[0])

    # Measured: 1e-5 of the change, and as much between our two ways.
    flat, tree, theirs = weights
    start = torch.cat([p.flatten() for p in models.load(directory).parameters()])
    change = (flat - start).norm()
    assert (tree - flat).norm() < 1e-4 * change and (theirs - flat).norm() < 1e-4 * change


@pytest.mark.quick
def test_the_curves_beside_trls_are_drawn_and_their_table_is_on_the_page(tmp_path, capsys):
    installed("matplotlib")
    import curve_trl

    assert curve_trl.main(["draw", f"{POINTS}", f"{tmp_path / 'curve.png'}"]) == 0
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    page = (ROOT / "full" / "RESULTS.md").read_text().splitlines()
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(curve_trl.VARIANTS) and {*rows} <= {*page}
