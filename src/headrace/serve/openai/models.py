"""``GET /v1/models`` and ``/v1/models/{id}``: the one model that is served. Must not know the engine's inside."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.responses import Response

from headrace.serve.context import ServeState, state_of
from headrace.serve.generation import json_answer
from headrace.serve.openai.documented import ERRORS

router = APIRouter(tags=["OpenAI"], responses={401: ERRORS[401], 503: ERRORS[503]})


class ModelCard(BaseModel):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


def _card(state: ServeState) -> dict[str, Any]:
    return {
        "id": state.engine.model_name,
        "object": "model",
        "created": state.created_unix_s,
        "owned_by": "headrace",
        "max_model_len": state.engine.max_model_len,
    }


@router.get("/v1/models", response_model=ModelList)
async def list_models(state: Annotated[ServeState, Depends(state_of)]) -> Response:
    """List the served model."""
    state.require_ready()
    return json_answer({"object": "list", "data": [_card(state)]})


@router.get("/v1/models/{model_id:path}", response_model=ModelCard, responses={404: ERRORS[404]})
async def show_model(model_id: str, state: Annotated[ServeState, Depends(state_of)]) -> Response:
    """Describe the served model."""
    state.require_ready()
    state.require_model(model_id)
    return json_answer(_card(state))
