"""HTTP/1.1 from the wire: a reply's head, and its body as it comes."""

from __future__ import annotations

from typing import Final

MOST_HEAD: Final = 1 << 16
"""Bytes of a reply's head."""

MOST_CHUNK: Final = 64 << 20
"""Bytes of one chunk of a body."""


class WireFault(ValueError):
    """What came is no HTTP."""


class ReplyReader:
    """One reply. `status` is 0 until its head is here, `headers` are by lower case, `complete` once it is all there as
    far as the reply itself tells: one without a length ends with its connection. `keeps`: the connection can be used
    again behind it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keeps = False
        self._held = bytearray()
        self._chunked = False
        self._left: int | None = None  # bytes, where the head says how many

    def feed(self, data: bytes) -> bytes:
        """What of the body is in these bytes. WireFault."""
        self._held += data
        while not self.status and self._head():
            pass
        if not self.status:
            return b""
        if self._chunked:
            return self._chunks()
        body = bytes(self._held)
        self._held.clear()
        if self._left is not None:
            self._left -= len(body)
            self.complete = self._left <= 0
        return body

    def _head(self) -> bool:
        """Whether one was there: of the reply, or of what a server says before it."""
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            if len(self._held) > MOST_HEAD:
                raise WireFault(f"the head of a reply has more than {MOST_HEAD} bytes")
            return False
        first, *lines = self._held[:end].decode("latin-1").split("\r\n")
        del self._held[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise WireFault(f"a reply begins with {first[:60]!r}")
        status = int(rest[:3])
        if status < 200:
            return True
        self.status = status
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._chunked = self.headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = self.headers.get("content-length", "")
        if not self._chunked and length.isdecimal():
            self._left = int(length)
            self.complete = self._left == 0
        framed = self._chunked or self._left is not None
        self.keeps = framed and version != "HTTP/1.0" and self.headers.get("connection", "").lower() != "close"
        return True

    def _chunks(self) -> bytes:
        found = bytearray()
        while not self.complete:
            end = self._held.find(b"\r\n")
            if end < 0:
                break
            digits = bytes(self._held[:end]).partition(b";")[0].strip()
            try:
                size = int(digits, 16)
            except ValueError:
                raise WireFault(f"a chunk of a reply begins with {digits[:60]!r}") from None
            if not 0 <= size <= MOST_CHUNK:
                raise WireFault(f"a chunk of a reply has {size} bytes")
            if size and len(self._held) < end + 2 + size + 2:
                break
            found += self._held[end + 2 : end + 2 + size]
            del self._held[: end + 2 + size + 2]
            self.complete = size == 0  # what follows the last chunk is not needed
        return bytes(found)


class EventReader:
    """Server-sent events: the data of each, from bytes that are cut anywhere. Comments and other fields are nothing."""

    def __init__(self) -> None:
        self._held = b""
        self._data: list[bytes] = []

    def feed(self, body: bytes) -> list[bytes]:
        *lines, self._held = (self._held + body).split(b"\n")
        if len(self._held) > MOST_CHUNK:
            raise WireFault(f"a line of a stream has more than {MOST_CHUNK} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
