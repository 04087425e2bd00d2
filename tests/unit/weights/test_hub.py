from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
from safetensors.torch import save

from headrace.base.errors import ModelSourceError, WeightLoadError
from headrace.config import ModelConfig
from headrace.weights.hub import looks_like_hub_name
from headrace.weights.source import ModelFiles, resolve_model

TOKEN = "hf_secret"


class FakeHub(ThreadingHTTPServer):
    """The part of the hub's API that a snapshot download uses: model info, tree, and files with HEAD and GET.

    ``repos``: name -> revision -> path -> content. A revision's commit is a hash of its name.
    """

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, dict[str, bytes]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos = repos
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def gets(self) -> list[str]:
        return [path for method, path in self.requests if method == "GET" and "/resolve/" in path]


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub
    quiet: ClassVar[bool] = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path))
        if self.server.broken:
            self.send(500, b"broken")
            return
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        authorised = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if name not in self.server.repos or (name in self.server.private and not authorised):
            self.send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif name in self.server.gated and not authorised:
            self.send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif api:
            self.answer_api(name, parts)
        else:
            self.answer_file(name, parts[3], "/".join(parts[4:]))

    def revision(self, name: str, wanted: str) -> str | None:
        return next((key for key in self.server.repos[name] if wanted in (key, commit_of(key))), None)

    def answer_api(self, name: str, parts: list[str]) -> None:
        kind = parts[4] if len(parts) > 4 else "revision"
        revision = self.revision(name, parts[5] if len(parts) > 5 else "main")
        if revision is None:
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return
        files = self.server.repos[name][revision]
        if kind == "tree":
            rows = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            self.send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        else:
            info = {
                "id": name,
                "modelId": name,
                "sha": commit_of(revision),
                "siblings": [{"rfilename": path} for path in files],
            }
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def answer_file(self, name: str, wanted: str, path: str) -> None:
        revision = self.revision(name, wanted)
        data = self.server.repos[name][revision].get(path) if revision is not None else None
        if revision is None or data is None:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        self.send(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit_of(revision)})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def repository(mark: str) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"mark": mark}).encode(),
        "generation_config.json": b'{"top_k": 7}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"model_max_length": 5}',
        "chat_template.jinja": f"template {mark}".encode(),
        "model.safetensors": save({"a": torch.ones(2)}),
        "consolidated.safetensors": b"second copy",
        "pytorch_model.bin": b"pickle",
        "modeling_own.py": b"print('never')",
        "original/model.safetensors": b"other format",
        "README.md": b"text",
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub(
        {
            "org/model": {"main": repository("main"), "v2": repository("v2")},
            "org/pickled": {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}},
        }
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # The library reads these once, at import.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield server
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join(10)


def resolve(hub: FakeHub, cache: Path, name: str = "org/model", **options: Any) -> ModelFiles:
    return resolve_model(ModelConfig(model=name, download_dir=str(cache), **options))


def test_a_model_is_fetched_without_code_pickles_and_folders(hub: FakeHub, tmp_path: Path) -> None:
    files = resolve(hub, tmp_path)
    assert files.name == "org/model"
    assert files.config == {"mark": "main"}
    assert files.generation_config == {"top_k": 7}
    assert files.chat_template == "template main"
    assert [path.name for path in files.weight_paths] == ["model.safetensors"]
    assert files.tokenizer_dir == files.weight_paths[0].parent
    fetched = {path.rsplit("/", 1)[1] for path in hub.gets()}
    assert fetched == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert not any("original" in path for path in hub.gets())


def test_a_second_start_fetches_no_file_again(hub: FakeHub, tmp_path: Path) -> None:
    resolve(hub, tmp_path)
    hub.requests.clear()
    resolve(hub, tmp_path)
    assert hub.gets() == []


def test_offline_after_a_download_asks_nobody(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(hub, tmp_path)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve(hub, tmp_path) == first
    assert hub.requests == []
    with pytest.raises(ModelSourceError, match="HF_HUB_OFFLINE"):
        resolve(hub, tmp_path, revision="v2")
    with pytest.raises(ModelSourceError, match="HF_HUB_OFFLINE"):
        resolve(hub, tmp_path / "other")
    assert hub.requests == []


def test_a_revision_by_name_and_by_commit(hub: FakeHub, tmp_path: Path) -> None:
    assert resolve(hub, tmp_path, revision="v2").config == {"mark": "v2"}
    assert resolve(hub, tmp_path, revision=commit_of("v2")).config == {"mark": "v2"}
    with pytest.raises(ModelSourceError, match="no revision 'v3'"):
        resolve(hub, tmp_path, revision="v3")


def test_a_private_model_needs_the_token(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private.add("org/model")
    with pytest.raises(ModelSourceError, match="token"):
        resolve(hub, tmp_path)
    assert resolve(hub, tmp_path, hf_token=TOKEN).config == {"mark": "main"}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve(hub, tmp_path / "other").config == {"mark": "main"}


def test_a_gated_model_says_so(hub: FakeHub, tmp_path: Path) -> None:
    hub.gated.add("org/model")
    with pytest.raises(ModelSourceError, match="accept the terms"):
        resolve(hub, tmp_path)
    assert resolve(hub, tmp_path, hf_token=TOKEN).kind == "safetensors"


def test_a_missing_model_says_what_was_looked_for(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="org/none: neither a local directory nor a model on the hub"):
        resolve(hub, tmp_path, "org/none")


def test_pickles_on_the_hub_are_not_even_fetched(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(WeightLoadError, match=r"no \*\.safetensors"):
        resolve(hub, tmp_path, "org/pickled")
    assert not any(path.endswith(".bin") for path in hub.gets())


def test_dummy_weights_fetch_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    files = resolve(hub, tmp_path, load_format="dummy")
    assert (files.kind, files.weight_paths) == ("dummy", ())
    assert not any(path.endswith(".safetensors") for path in hub.gets())
    assert resolve(hub, tmp_path).weight_paths != ()


def test_a_tokenizer_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    files = resolve(hub, tmp_path, "default", tokenizer="org/model")
    assert files.kind == "gguf"
    assert files.chat_template == "template main"
    assert not any(path.endswith(".safetensors") for path in hub.gets())


def test_no_way_to_the_hub(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = FakeHub({})
    closed.server_close()
    monkeypatch.setenv("HF_ENDPOINT", closed.url)
    with pytest.raises(ModelSourceError, match="cannot be reached and the model is not in the cache"):
        resolve(hub, tmp_path)


def test_the_cache_serves_when_the_hub_is_down(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(hub, tmp_path)
    closed = FakeHub({})
    closed.server_close()
    monkeypatch.setenv("HF_ENDPOINT", closed.url)
    assert resolve(hub, tmp_path) == first


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model", True),
        ("a.b/c-d_e.1", True),
        ("model", False),
        ("a/b/c", False),
        ("./a/b", False),
        ("../b", False),
        ("a/..", False),
        ("a/b.gguf", False),
        ("/a/b", False),
        ("a/", False),
    ],
)
def test_what_a_hub_name_looks_like(name: str, expected: bool) -> None:
    assert looks_like_hub_name(name) is expected
