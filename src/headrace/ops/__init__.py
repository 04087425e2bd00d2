"""Operators, one folder a family: `reference` is the readable oracle, the other files are fast paths tested against it.

Must not know layers, models or where tensors come from.
"""
