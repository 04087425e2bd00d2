"""The HTTP surface: OpenAI's API, token endpoints, health and metrics. Talks to the engine only through `TextEngine`.

Must not import torch, and must not know how the engine works inside.
"""
