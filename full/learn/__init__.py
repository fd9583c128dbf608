"""The step, as in `train_grpo.py`: from prompts to rollouts, to a loss, to a gradient.

Read trainer first, which calls the others in order: generate, rollouts and engine (sampling),
batches (which rollouts a step has), advantages, objectives, packing (how the model runs them),
metrics. Others import `Trainer`, `Sampler`, `Engine`, `RolloutQueue`, the tables of names, and the
functions that play prompts and describe a step.
"""
