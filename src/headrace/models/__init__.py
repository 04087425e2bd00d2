"""Models: one small file a family, a registry from architecture name to class. Must not know checkpoint formats."""
