"""Ranks: which rank holds what, and who sends. It carries on `parallel.py`, and knows no model.

Read joining (ranks meet, agree and leave), plans (groups), places (parts of parameters), optimizer
(gradients, clip norm, AdamW), pipeline (schedules), checkpoint (a state that any plan reads).
Others import from each file what `full/__init__.py` lists, and joining's and places' functions.
"""
