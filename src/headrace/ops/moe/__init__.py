"""Mixture of experts: routing, and computing only the chosen experts."""
