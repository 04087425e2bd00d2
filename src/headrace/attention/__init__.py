"""Attention: backend contract, capability records, selector, backends. Must not know models or weights."""
