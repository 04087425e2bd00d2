"""Real core processes on the fake device. Every wait is bounded; nothing may be left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PARTS = Path(__file__).parents[1] / "engine_parts"
sys.path.insert(0, str(PARTS))
DEADLINE_S = 60.0


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fake_device import write_model

    return write_model(tmp_path_factory.mktemp("model") / "bytes")


@pytest.fixture
def runtime_parent(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where socket directories go; afterwards there must be none, and no child process."""
    import tempfile

    parent = Path(tempfile.mkdtemp(prefix="hr"))  # pytest's own paths are too long for socket names
    monkeypatch.setenv("HEADRACE_RUNTIME_DIR", str(parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PARTS), os.environ.get("PYTHONPATH", "")]))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield parent
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    names = [path.name for path in parent.iterdir()]
    for path in parent.iterdir():
        path.rmdir()
    parent.rmdir()
    assert not left, f"processes left behind: {left}"
    assert not names, f"directories left behind: {names}"


@pytest.fixture
async def bounded() -> Callable[[Awaitable[Any]], Awaitable[Any]]:
    """Await something for at most `DEADLINE_S`."""

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(awaitable, DEADLINE_S)

    return wait


@pytest.fixture
async def make_client(runtime_parent: Path, model_dir: Path) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Start clients on a factory of the fake device; they are stopped at the end."""
    from fake_device import engine_config

    from headrace.engine.client import CoreClient

    clients: list[CoreClient] = []

    async def start(factory: str, *, max_restarts: int = 5, **options: Any) -> CoreClient:
        client = CoreClient(
            engine_config(model_dir, **options), max_restarts=max_restarts, executor_factory=f"fake_device:{factory}"
        )
        clients.append(client)
        await asyncio.wait_for(client.start(), DEADLINE_S)
        return client

    yield start
    for client in clients:
        await asyncio.wait_for(client.stop(), DEADLINE_S)
