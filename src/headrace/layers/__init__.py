"""Layers of decoders: linear maps split over ranks, norms, embeddings, attention and MLP blocks.

Plain objects, not modules: a layer allocates its parameters, says which checkpoint tensors fill them, and computes.
Must not know checkpoint formats.
"""
