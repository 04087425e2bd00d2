"""``/metrics`` in Prometheus' text format. Must not record anything itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from headrace.observe.metrics import CONTENT_TYPE
from headrace.serve.context import ServeState, state_of

router = APIRouter(tags=["Operations"])


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(state: Annotated[ServeState, Depends(state_of)]) -> Response:
    """Return all metrics."""
    return Response(state.metrics.render(), media_type=CONTENT_TYPE)
