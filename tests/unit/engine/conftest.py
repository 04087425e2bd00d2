"""Makes the fake device importable here and in core processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PARTS = Path(__file__).parents[2] / "engine_parts"
sys.path.insert(0, str(PARTS))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from fake_device import write_model

    return write_model(tmp_path_factory.mktemp("model") / "bytes")
