"""How the ranks of one machine find each other: a file in a private folder. No TCP store, no port, no race for one.

A TCP store listens on every interface even when given the loopback address; a file store listens nowhere, and gloo's
own connections are bound to the loopback interface here. Must not know workers.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class PrivateFolder:
    """A fresh folder that only this user can enter (mode 0700).

    Args:
        parent: where to make it; None is the system's temporary directory.
    """

    def __init__(self, parent: str | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="headrace-ranks-", dir=parent))

    def remove(self) -> None:
        """Delete the folder and all in it. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)


def single_node(folder: Path) -> str:
    """Return an init method for the ranks of one machine: a unique file in a folder.

    Args:
        folder: private to this user.
    """
    return f"file://{folder / f'group-{secrets.token_hex(8)}'}"


@contextmanager
def process_group(init_method: str, rank: int, size: int, timeout_s: float) -> Iterator[None]:
    """Join the default process group over gloo for as long as the context lasts.

    After an error the group is left as it is: taking it down would wait for the ranks that are lost.

    Args:
        init_method: from `single_node`.
        rank: of this process.
        size: number of ranks.
        timeout_s: bound of every collective, so that a rank never waits for ever for a lost one.

    Raises:
        RuntimeError: from torch, if the group does not come together in time.
    """
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    yield
    dist.destroy_process_group()
