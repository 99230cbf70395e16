"""HTTP/1.1 as a client of a server needs it: one request a connection, which anybody may close while it is read."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from mlxcel.errors import RequestError, ServerError, UsageError
from mlxcel.remote_errors import MOST, error_of_reply

CONNECT: Final = 10.0
"""Seconds for a connection."""

SILENCE: Final = 300.0
"""Seconds without a byte until a server counts as gone. In streams it says every few seconds that it is there."""

_FAULTS: Final = (OSError, http.client.HTTPException)


class Closed(Exception):
    """The connection was closed from here."""


@attrs.frozen
class Address:
    """Where a server is, and the key that it wants."""

    secure: bool
    host: str
    port: int
    path: str  # before every route
    key: str | None = attrs.field(repr=False)

    @classmethod
    def parse(cls, url: str, key: str | None) -> Address:
        """Of `http://HOST:PORT`, with or without the `/v1` that other clients want behind it. UsageError."""
        hint = "base_url is such as http://127.0.0.1:8080"
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # a name that no resolver takes
        except (ValueError, AttributeError, TypeError) as error:
            raise UsageError(f"base_url {url!r} is no URL: {error}", hint=hint) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"base_url {url!r} is not the address of a server", hint=hint)
        if parts.username is not None or parts.password is not None:
            raise UsageError("base_url holds a name or a password", hint="a key is given as api_key")
        if key is not None and not (
            isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key
        ):
            raise UsageError("api_key holds what no header can: printable ASCII is needed")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(secure, parts.hostname, port or (443 if secure else 80), path, key)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.path}"


class Exchange:
    """One request and its reply. `close` may be called from any thread, at any time."""

    def __init__(self, address: Address) -> None:
        kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
        self._address = address
        self._connection = kind(address.host, address.port, timeout=CONNECT)
        self._socket: socket.socket | None = None
        self._reply: http.client.HTTPResponse | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, method: str, route: str, body: Any, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        """The reply, of which nothing was read but its head. Raises what it means where it is no success, ServerError
        where none comes, Closed."""
        try:
            data = None if body is None else json.dumps(body).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the request cannot be written as JSON: {error}") from error
        sent = {"Accept": "application/json", **headers}
        if data is not None:
            sent["Content-Type"] = "application/json"
        if self._address.key is not None:
            sent["Authorization"] = f"Bearer {self._address.key}"
        try:
            self._connection.connect()
            with self._lock:
                if self._closed:
                    raise Closed
                self._socket = self._connection.sock
            self._socket.settimeout(SILENCE)
            self._connection.request(method, self._address.path + route, data, sent)
            reply = self._reply = self._connection.getresponse()
            if reply.status == 200:
                return reply
            error_body = reply.read(MOST)
        except _FAULTS as error:
            raise self._gone(error) from error
        raise error_of_reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, error_body)

    def lines(self, reply: http.client.HTTPResponse) -> Iterator[bytes]:
        """Of a stream, without their ends. Raises as `ask`."""
        try:
            while line := reply.readline():
                yield line.rstrip(b"\r\n")
        except (*_FAULTS, ValueError) as error:
            raise self._gone(error) from error
        if self._closed:
            raise Closed

    def whole(self, reply: http.client.HTTPResponse) -> Any:
        """The JSON of a reply. Raises as `ask`."""
        try:
            return json.loads(reply.read())
        except _FAULTS as error:
            raise self._gone(error) from error
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"{self._address.url} answered with what is not JSON", hint="is it `mlxcel serve`?"
            ) from error

    def close(self) -> None:
        """Whoever reads gets Closed, or is done."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with suppress(OSError):  # a TLS socket's own shutdown is not for two threads
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def done(self) -> None:
        """For who read: give the connection back."""
        with self._lock:
            self._socket = None
        if self._reply is not None:
            self._reply.close()
        self._connection.close()

    def _gone(self, error: Exception) -> Exception:
        if self._closed:
            return Closed()
        url = self._address.url
        if isinstance(error, TimeoutError):
            return ServerError(f"{url} was silent for too long", hint="its log may say why")
        return ServerError(
            f"{url} cannot be asked: {error or type(error).__name__}",
            hint="is the server running, and is this its address?",
        )


def call(address: Address, method: str, route: str, body: Any = None) -> Any:
    """One request whose reply is one JSON value. Raises as `Exchange.ask`."""
    exchange = Exchange(address)
    try:
        return exchange.whole(exchange.ask(method, route, body, {}))
    finally:
        exchange.done()
