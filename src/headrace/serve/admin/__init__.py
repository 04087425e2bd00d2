"""Endpoints for operators: health, version, metrics."""
