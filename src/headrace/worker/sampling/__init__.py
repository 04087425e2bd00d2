"""Vectorised sampling: rows of logits in, token ids out. A feature that no row uses costs nothing."""
