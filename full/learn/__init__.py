"""The step: from prompts to rollouts, to a loss, to a gradient. It carries on `train_grpo.py`.

Read trainer first, which calls the others in order: generate, rollouts and engine (who samples),
batches (which rollouts a step has), advantages, objectives, packing (how they meet the model),
metrics. Others import `Trainer`, `Sampler`, `Engine`, `RolloutQueue`,
the tables of names, and the functions that play prompts and describe a step.
"""
