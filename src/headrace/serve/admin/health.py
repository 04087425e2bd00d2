"""``/health`` and ``/ping``: 200 when requests can be served, else 503 with the reason. Must not need an API key."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from headrace.serve.context import ServeState, state_of

router = APIRouter(tags=["Operations"])
_UNREADY: dict[int | str, dict[str, Any]] = {503: {"description": "Not ready; 'state' and 'reason' say why."}}


def _report(state: ServeState) -> tuple[int, dict[str, Any]]:
    health = state.engine.health()
    document: dict[str, Any] = msgspec.to_builtins(health)
    if state.stopping:
        document.update(state="stopping", reason="the server is shutting down")
    document["in_flight"] = len(state.in_flight)
    return (200 if document["state"] == "ready" else 503), document


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=_UNREADY)
async def health(state: Annotated[ServeState, Depends(state_of)]) -> Response:
    """Say whether requests can be served, from the engine's progress and not from its mere existence."""
    status, document = _report(state)
    headers = {} if status == 200 else {"retry-after": "1"}
    return Response(msgspec.json.encode(document), status, headers=headers, media_type="application/json")


@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
@router.get("/ping", responses=_UNREADY)
async def ping(state: Annotated[ServeState, Depends(state_of)]) -> Response:
    """Answer like ``/health``, without a body."""
    status, _ = _report(state)
    return Response(status_code=status)
