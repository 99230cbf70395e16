"""The chat page: files of the folder `page`, as they are (docs/spec/clients.md 4)."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import Final

import attrs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcel.errors import shown
from mlxcel.server.refusals import NotFound
from mlxcel.server.state import ServerState

KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
"""Files of another kind are not served."""

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
INDEX: Final = "index.html"


@attrs.frozen
class File:
    content: bytes
    headers: dict[str, str]


@functools.cache
def files() -> dict[str, File]:
    """All of the folder, by name. They do not change while the server runs."""
    found = {}
    for entry in resources.files("mlxcel.server").joinpath("page").iterdir():
        kind = KINDS.get(f".{entry.name.rpartition('.')[2]}")
        if kind is not None and entry.is_file():
            content = entry.read_bytes()
            headers = {
                "Content-Type": kind,
                "Cache-Control": "no-cache",
                "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
                "Content-Security-Policy": POLICY,
                "Referrer-Policy": "no-referrer",
            }
            found[entry.name] = File(content, headers)
    return found


async def page(request: Request) -> Response:
    return _file(request, INDEX)


async def asset(request: Request) -> Response:
    return _file(request, request.path_params["name"])


def _file(request: Request, name: str) -> Response:
    state: ServerState = request.app.state.server
    found = files().get(name)
    if not state.settings.ui or found is None:
        raise NotFound(f"there is no {shown(request.url.path)}", hint="the chat page is off with --no-ui")
    if request.headers.get("if-none-match") == found.headers["ETag"]:
        return Response(status_code=304, headers=found.headers)
    return Response(found.content, headers=found.headers)


ROUTES: Final = [
    Route("/", page),
    Route("/assets/{name}", asset),
]
