"""What a model offers for each tensor of a checkpoint: the shape it expects and where the values go.

The model builds these; the loader fills them. Must not import torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WeightTarget:
    """One parameter as the checkpoint stores it.

    Attributes:
        shape: full shape in the checkpoint, before any split over ranks.
        load: takes the full tensor, of any float type, on the CPU; takes this rank's part, casts and copies it. It must
            not keep the tensor, whose memory may be the mapped file.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
