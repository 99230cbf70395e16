"""A hub of models on loopback that speaks as much of Hugging Face's HTTP interface as downloading needs.

Facts of the interface: `GET /api/models/REPO/revision/REV?blobs=true` lists a commit; `HEAD` and `GET` of
`/REPO/resolve/REV/FILE` give a file, a large one by a redirect to another host, here `localhost` for `127.0.0.1`.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import attrs

if TYPE_CHECKING:
    import pytest

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".gguf", ".bin")  # these are kept apart from Git, as the hub keeps them


@attrs.define
class Repository:
    """One repository at one commit. `refused` is a status and headers that every question gets for an answer,
    `files_refused` only those for files."""

    files: Mapping[str, bytes]
    card: Mapping[str, object] = attrs.field(factory=lambda: {"license": "apache-2.0"})
    revisions: tuple[str, ...] = ("main",)
    refused: tuple[int, Mapping[str, str]] | None = None
    files_refused: tuple[int, Mapping[str, str]] | None = None
    served: dict[str, bytes] = attrs.field(factory=dict)
    """What goes over the wire instead of a file's bytes."""


@attrs.define
class Hub:
    """`asked` has a line for each question: method, path, whether a token came along."""

    repositories: dict[str, Repository]
    asked: list[tuple[str, str, bool]] = attrs.field(factory=list)
    goes_on: threading.Event | None = None
    """Where set, a large file's second half waits for it."""
    on_stall: Callable[[], object] = lambda: None
    address: str = ""

    def paths(self, method: str) -> list[str]:
        return [path for asked, path, _ in self.asked if asked == method and "/api/agent" not in path]


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        if hub.goes_on is not None:
            hub.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving_alone(repositories: dict[str, Repository], monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[Hub]:
    """As `serving`, with the library's own variables naming this hub and nothing else, also for children."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with serving(repositories) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(home))
        yield hub


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("authorization") is not None))
            if path.startswith("/api/models/"):
                repository, _, revision = path.removeprefix("/api/models/").partition("/revision/")
                self._list(repository, revision)
            elif "/resolve/" in path:
                repository, _, rest = path[1:].partition("/resolve/")
                self._file(repository, *rest.split("/", 1))
            elif path.startswith("/cdn/"):
                repository, _, name = path.removeprefix("/cdn/").partition("::")
                found = hub.repositories[repository]
                self._send(200, found.served.get(name, found.files[name]), stalls=hub.goes_on is not None)
            else:
                self._send(404, b"")

        def _known(self, repository: str, revision: str) -> Repository | None:
            found = hub.repositories.get(repository)
            if found is None:
                self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif found.refused is not None:
                self._send(found.refused[0], b"{}", found.refused[1])
            elif revision not in (*found.revisions, COMMIT):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                return found
            return None

        def _list(self, name: str, revision: str) -> None:
            found = self._known(name, revision)
            if found is None:
                return
            siblings = [
                {"rfilename": file, "size": len(data), "blobId": blob_id(data)}
                | ({"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 130}} if large(file) else {})
                for file, data in found.files.items()
            ]
            body = {
                "id": name,
                "modelId": name,
                "sha": COMMIT,
                "private": False,
                "tags": [],
                "downloads": 1,
                "likes": 1,
            }
            body |= {"siblings": siblings, "cardData": found.card}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str, revision: str, file: str) -> None:
            found = self._known(name, revision)
            if found is None:
                return
            if found.files_refused is not None:
                self._send(found.files_refused[0], b"{}", found.files_refused[1])
                return
            if file not in found.files:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            data = found.files[file]
            if large(file):
                headers = {
                    "X-Repo-Commit": COMMIT,
                    "X-Linked-Size": str(len(data)),
                    "X-Linked-ETag": f'"{sha256(data)}"',
                    "Location": f"http://localhost:{urlsplit(hub.address).port}/cdn/{name}::{file}?signature=secret",
                }
                self._send(302, b"", headers)
            else:
                body = found.served.get(file, data)
                self._send(200, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{blob_id(data)}"'})

        def _send(
            self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, stalls: bool = False
        ) -> None:
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            if stalls and hub.goes_on is not None:
                hub.on_stall()
                hub.goes_on.wait()
            with suppress(ConnectionError):  # the one who asked is gone
                self.wfile.write(body[half:])

    return Handler


WEIGHTS = bytes(range(256)) * 3000
SAFETENSORS = {
    "model.safetensors": WEIGHTS,
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "LICENSE": b"Permission is granted.\n",
    "README.md": b"# n\n",
    "pytorch_model.bin": b"\x80\x04evil",
}
GGUFS = {"m-Q8_0.gguf": WEIGHTS, "m-Q4_0.gguf": WEIGHTS[:1000], "LICENSE": b"l"}


def two_repositories() -> dict[str, Repository]:
    """One of safetensors, one of two GGUF files."""
    return {"o/n": Repository(SAFETENSORS), "o/g": Repository(GGUFS)}


def large(name: str) -> bool:
    return name.endswith(LARGE)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    """Git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
