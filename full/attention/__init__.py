"""Attention over masks: documents, trees and windows, for `ring_attention.py`'s causal mask.

Read masks (a mask is two integers a key), attend (attention on one device), ring (across ranks).
Others import `Mask`, `attend`, `ring_attention`, the shards of ring, and `Attention`, which is what
the layers of a model call.
"""
