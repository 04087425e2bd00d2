"""The tensor-parallel group: the one object from which every layer takes its rank and its collectives.

A group of one rank never imports torch.distributed. Must not know models; who starts the ranks is in the executors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.base.errors import ConfigError, invariant

if TYPE_CHECKING:
    from torch import Tensor


class TensorParallel:
    """Ranks that share each layer. Every rank must call the same collectives in the same order.

    Args:
        rank: of this process, in [0, size).
        size: ranks in the group.
        group: process group of torch.distributed; None is the default group.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        invariant(0 <= rank < size, f"rank {rank} outside a group of {size}")
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks; ``tensor`` may be overwritten with it."""
        if self.size == 1:
            return tensor
        import torch.distributed as dist

        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def all_gather_last(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors side by side in the last dimension, in rank order; all have one shape."""
        if self.size == 1:
            return tensor
        import torch
        import torch.distributed as dist

        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor, group=self._group)
        return torch.cat(parts, dim=-1)

    def share(self, count: int, what: str) -> int:
        """Return how many of ``count`` things this rank has.

        Args:
            count: things in the whole model.
            what: their name, for the message.

        Raises:
            ConfigError: they do not divide evenly.
        """
        if count % self.size:
            raise ConfigError(
                f"{what} {count} cannot be split over --tensor-parallel-size {self.size}: "
                f"{count} is not a multiple of {self.size}",
                param="tensor_parallel_size",
            )
        return count // self.size
