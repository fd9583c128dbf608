"""A run's steps as the steps of `conformance/step.py`, which verifies them.

Read audit (from a run's settings to the kit), replay (the task says the rollouts again), models
(each model in float64 and in the run's precision). `full.api` imports `audited` and its
`Report`; check also imports `compare_step` and `StepModels`, for a step in memory.
"""
