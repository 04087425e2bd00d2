"""Ranks: groups, collectives, rendezvous, executors. Must not know models or requests."""
