"""What crosses a boundary: requests, sampling, plans, results, events, cache specs, outputs, wire codec.

Plain data only. Must not import torch, nor anything above ``base``.
"""
