"""Text: tokens from text and back, stop strings, chat templates, sampling defaults of a model.

Must not import torch or transformers.
"""
