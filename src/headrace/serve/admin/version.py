"""``/version``. Must not need an API key."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from headrace.version import __version__

router = APIRouter(tags=["Operations"])


class VersionAnswer(BaseModel):
    """Answer of ``GET /version``."""

    version: str


@router.get("/version")
async def version() -> VersionAnswer:
    """Return the version of Headrace."""
    return VersionAnswer(version=__version__)
