"""Weights: where a model comes from, how its tensors are stored, and loading each of them exactly once.

Must not know models or layers, and importing this package, `source` or `gguf_file` must not import torch.
"""
