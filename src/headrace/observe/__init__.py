"""What operators see: metrics and the start-up table. Must not decide anything and must not import torch."""
