"""What OpenAPI says about endpoints that read their body and write their answer themselves.

Must not influence what an endpoint does.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headrace.serve.openai.schema_common import ErrorEnvelope

_BODIES: dict[str, type[BaseModel]] = {}
_REF = "#/components/schemas/"

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorEnvelope, "description": "Wrong request: the message names the field."},
    401: {"model": ErrorEnvelope, "description": "Missing or wrong API key."},
    404: {"model": ErrorEnvelope, "description": "No such model."},
    413: {"model": ErrorEnvelope, "description": "Body above the limit."},
    415: {"model": ErrorEnvelope, "description": "Body not declared as JSON."},
    500: {"model": ErrorEnvelope, "description": "Fault of the server."},
    501: {"model": ErrorEnvelope, "description": "Known to the API, not implemented."},
    503: {"model": ErrorEnvelope, "description": "Starting, restarting, overloaded or stopping; try again."},
}


def documents(body: type[BaseModel], *, stream: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of a route decorator that document the body, the errors and the stream."""
    responses = dict(ERRORS)
    schemas = [body]
    if stream is not None:
        schemas.append(stream)
        responses[200] = {
            "content": {"text/event-stream": {"schema": {"$ref": _REF + stream.__name__}}},
            "description": "The answer; with stream=true, events of this shape, then [DONE].",
        }
    for schema in schemas:
        _BODIES[schema.__name__] = schema
    request_body = {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + body.__name__}}}}
    return {"responses": responses, "openapi_extra": {"requestBody": request_body}}


def install_openapi(app: FastAPI) -> None:
    """Make ``/openapi.json`` contain the bodies too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            _, definitions = models_json_schema(
                [(schema, "validation") for schema in _BODIES.values()], ref_template=_REF + "{model}"
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
