"""The examples run, against a live server, and show what they promise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(server, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run([*command, server.url], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_openai_client(server):
    shown = run(server, sys.executable, str(EXAMPLES / "openai_client.py"))
    assert "model: fake-model" in shown
    assert "answer: Hello, 世界 🙂!" in shown
    assert "did you mean 'top_k'" in shown


def test_streaming(server):
    shown = run(server, sys.executable, str(EXAMPLES / "streaming.py"))
    assert "Hello, 世界 🙂!" in shown
    assert shown.rstrip().endswith("tokens]")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server):
    shown = run(server, "bash", str(EXAMPLES / "curl.sh"))
    for words in ('"state":"ready"', '"text_offset"', "data: [DONE]", '"token_strs"', "did you mean 'temperature'"):
        assert words in shown
    assert "headrace:generation_tokens_total" in shown
