"""Attention over masks: documents, trees and windows, for `ring_attention.py`'s causal mask.

Read masks (a mask is two integers a key), attend (attention on one device), ring (across ranks).
Others import `Mask`, `attend`, `attend_short`, `ring_attention`, `indices`, and `Attention`, which
the layers of a model call. exact.py and the room tree also build on the tiles of attend.
"""
