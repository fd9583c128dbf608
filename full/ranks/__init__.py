"""Ranks: which rank holds what, and who sends. It carries on `parallel.py`.

Read joining (ranks meet, agree and leave), plans (groups), places (parts of parameters, stages),
optimizer (gradients, clip norm, AdamW) and checkpoint (a state that any plan reads).
It imports no other room. Others import any name of it that has no underscore.
"""
