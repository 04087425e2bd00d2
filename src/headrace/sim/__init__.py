"""The simulator: the real scheduler and KV bookkeeping, driven at random against a device that only knows content.

No model and no tensors. Must not import anything of the data plane or the engine, and repairs nothing it finds.
"""
