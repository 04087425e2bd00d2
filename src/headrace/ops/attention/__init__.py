"""Attention as plain mathematics: the oracle of the backends."""
