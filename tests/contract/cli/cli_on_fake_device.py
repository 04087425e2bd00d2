"""The ``headrace`` command, with engine cores on the fake device of ``tests/engine_parts``; tests start it."""

import sys
from pathlib import Path

PARTS = Path(__file__).resolve().parents[2] / "engine_parts"
sys.path.insert(0, str(PARTS))


def use_fake_device():
    """Let `TextEngine` start cores on the fake device."""
    from headrace.engine.text_engine import TextEngine

    TextEngine.__init__.__kwdefaults__["executor_factory"] = "fake_device:make"


if __name__ == "__main__":
    from headrace.cli.main import main

    use_fake_device()
    sys.exit(main())
