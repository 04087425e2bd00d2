"""Fetches a model from a Hugging Face hub, and turns what can go wrong there into messages that say what to do.

``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and ``HF_HOME`` are honoured. Only configuration, tokenizer and
safetensors files are fetched, never code and never pickles. `huggingface_hub` is imported on first use.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from headrace.base.errors import ModelSourceError
from headrace.config.engine import ModelConfig

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
# Folders hold other formats, and "consolidated" files are a second copy of the weights.
_TOKEN_HINT = " (--hf-token or HF_TOKEN)"
_IGNORED = ("*/*", "consolidated*.safetensors")


def looks_like_hub_name(name: str) -> bool:
    """Return True for ORG/NAME."""
    return (
        _NAME.fullmatch(name) is not None and ".." not in name and not name.endswith((".gguf", ".json", ".safetensors"))
    )


def fetch_snapshot(name: str, config: ModelConfig, *, weights: bool) -> Path:
    """Return a directory with the files of a hub model; what is already in the cache is not fetched again.

    Args:
        name: ORG/NAME.
        config: uses revision, hf_token and download_dir.
        weights: fetch the safetensors too.

    Returns:
        Directory of the snapshot.

    Raises:
        ModelSourceError: not found, no access, offline and not cached, no network, no such revision.
    """
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")
    patterns = list(_SMALL_FILES + (_WEIGHT_FILES if weights else ()))
    try:
        path = snapshot_download(
            name,
            revision=config.revision,
            token=config.hf_token,
            cache_dir=config.download_dir,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            local_files_only=offline,
            allow_patterns=patterns,
            ignore_patterns=list(_IGNORED),
        )
    except Exception as error:
        raise ModelSourceError(_explain(name, config, error, offline), param="model") from error
    return Path(str(path))


def _explain(name: str, config: ModelConfig, error: Exception, offline: bool) -> str:
    from huggingface_hub import errors

    revision = f" at revision {config.revision!r}" if config.revision else ""
    if isinstance(error, errors.GatedRepoError):
        return f"{name}: access is restricted; accept the terms on the model's page and give a token{_TOKEN_HINT}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name}: there is no revision {config.revision!r} on the hub; check --revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name}: neither a local directory nor a model on the hub that can be seen with the token at hand; "
            f"check the name, or give a token if the model is private{_TOKEN_HINT}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        if offline:
            return (
                f"{name}{revision}: is not (completely) in the cache, and HF_HUB_OFFLINE forbids the network; unset it "
                "once to fetch the model"
            )
        return (
            f"{name}{revision}: the hub cannot be reached and the model is not in the cache; check the network, "
            f"HF_ENDPOINT and proxies ({error.__cause__ or error})"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            return f"{name}: the hub refused access (HTTP {status}); check the token{_TOKEN_HINT}"
        return f"{name}: the hub answered HTTP {status}: {error}"
    return f"{name}{revision}: cannot be fetched from the hub: {type(error).__name__}: {error}"
