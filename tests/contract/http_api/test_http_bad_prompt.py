"""What only the engine can refuse arrives with its own status, streaming or not."""

from __future__ import annotations

import httpx
import pytest
from http_fake_engine import FakeTextEngine

from headrace.base.errors import NeverFitsError, NumericalError, OverloadedError


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(http: httpx.Client, stream: bool):
    response = http.post("/v1/completions", json={"prompt": "x" * 2000, "stream": stream})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "2001" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (NeverFitsError("needs 9 blocks of 4"), 400, "kv_cache_too_small", "false"),
        (OverloadedError("full"), 503, "overloaded", "true"),
        (NumericalError("NaN"), 500, "non_finite_logits", "false"),
        (KeyError("bug"), 500, "internal_error", "false"),
    ],
)
def test_refusals(http: httpx.Client, engine: FakeTextEngine, stream: bool, error: Exception, status, code, retry):
    engine.script = lambda call: [error]
    response = http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["x-should-retry"] == retry
