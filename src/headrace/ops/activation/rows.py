"""Element-wise functions whose bits do not depend on where in a tensor an element stands.

torch's vector and scalar exponentials differ in the last bit, and which elements are the scalar remainder depends on
where a loop begins. Rows that are not adjacent in memory make the loop begin anew in each of them, as long as no thread
splits one. Must be used where `ModelContext.invariant` holds, and may be used elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ONE_THREAD_ELEMENTS = 32768
"""torch splits an element-wise operator of this size over threads, at places that depend on the shape."""


def by_rows(x: Tensor, apply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``apply`` of every element; an element's bits depend on its row's content and width only.

    Args:
        x: [T, W].
        apply: an element-wise function that changes its argument in place.

    Returns:
        [T, W], not contiguous.
    """
    height, width = x.shape
    room = torch.empty(height, width + 1, dtype=x.dtype, device=x.device)[:, :width].copy_(x)
    step = max(1, (ONE_THREAD_ELEMENTS - 1) // max(1, width))
    for first in range(0, height, step):
        apply(room[first : first + step])
    return room
