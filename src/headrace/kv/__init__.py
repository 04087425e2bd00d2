"""The KV cache as pure bookkeeping: blocks, references, the prefix hash, hits and events.

Block contents live on the device, never here. Must not import torch, a clock, randomness or anything above ``types``.
"""
