"""A request at a server: a thread reads its stream, and whoever asked takes the events when it likes."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mlxcel.errors import MlxcelError, QueueFull, RequestError, ServerError
from mlxcel.places import Places, Ring
from mlxcel.remote_errors import error_told
from mlxcel.remote_http import Address, Closed, Exchange
from mlxcel.remote_request import About, Came, Finish, Piece, RemoteRequest, scored

log = logging.getLogger("mlxcel.client")

ASK_AGAIN: Final = 1
"""Seconds after which a full queue is asked again, where the server does not say when."""

FACTS: Final = ("prompt_token_ids", "prompt_logprobs", "usage", "warnings")

_HEADER_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Sending:
    """Sent at once. Gives its places back when its last choice ended, read or not; `ring` is called whenever an event
    came."""

    def __init__(
        self, address: Address, request: RemoteRequest, places: Places, held: int, ring: Ring | None = None
    ) -> None:
        self._address, self._request = address, request
        self._places, self._held, self._ring = places, held, ring
        self._changed = threading.Condition()
        self._came: deque[Came] = deque()
        self._open = set(range(request.choices))
        self._over = False
        self._stopped = threading.Event()
        self._exchange: Exchange | None = None
        self._thread = threading.Thread(target=self._run, name="mlxcel-request", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether every choice ended and every event was read."""
        with self._changed:
            return self._over and not self._came

    def events(self) -> Iterator[Came]:
        """Those that are there."""
        while self._came:
            yield self._came.popleft()

    def __iter__(self) -> Iterator[Came]:
        """All to the end, waiting for each."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._came or self._over)
                if not self._came:
                    return
            yield self._came.popleft()

    def cancel(self) -> None:
        """Close the connection, by which the server ends what still runs. Harmless behind the end. Does not wait."""
        self._stopped.set()
        with self._changed:
            exchange = self._exchange
        if exchange is not None:
            exchange.close()

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._until_taken()
        except Closed:
            pass
        except MlxcelError as failure:
            error = failure
        except Exception as failure:
            log.warning("the reply of %s cannot be read", self._address.url, exc_info=failure)
            error = ServerError(
                f"{self._address.url} sent a reply that is none: {failure!r}", hint="is it `mlxcel serve`?"
            )
        cause = "cancelled" if error is None else "rejected" if isinstance(error, RequestError) else "error"
        for choice in sorted(self._open):
            self._put(Finish(choice, cause, error=error))
        self._put(None, over=True)

    def _until_taken(self) -> None:
        """While the server's queue is full, ask again: it has fewer places than its clients have requests."""
        while not self._stopped.is_set():
            exchange = Exchange(self._address)
            with self._changed:
                self._exchange = exchange
            try:
                if not self._stopped.is_set():
                    self._read(exchange)
                return
            except QueueFull as full:
                self._stopped.wait(full.values.get("retry_after", ASK_AGAIN))
            finally:
                exchange.done()

    def _read(self, exchange: Exchange) -> None:
        request = self._request
        named = {"X-Request-Id": request.request_id} if _HEADER_ID.fullmatch(request.request_id) else {}
        reply = exchange.ask("POST", request.route, request.body, named)
        held: Finish | None = None
        for line in exchange.lines(reply):
            if line == b"data: [DONE]":
                if held is not None:
                    self._put(held)
                return
            if not line.startswith(b"data: "):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise error_told(chunk["error"])
            held = self._chunk(chunk) or held
        raise ServerError("the connection ended before the reply did", hint="the server may be shutting down")

    def _chunk(self, chunk: Mapping[str, Any]) -> Finish | None:
        """Hand on what a chunk says. The finish of the last choice is given back: facts of the whole come behind it."""
        held = None
        for choice in chunk["choices"]:
            index, chat = choice["index"], "delta" in choice
            delta = choice["delta"] if chat else choice
            text, reasoning = delta.get("content" if chat else "text") or "", delta.get("reasoning_content") or ""
            ids = tuple(choice.get("token_ids") or ())
            by_id = (choice.get("logprobs") or {}).get("by_id") or []
            scores = tuple(entry for entry in scored(by_id) if entry is not None)
            if text or reasoning or ids or scores:
                self._put(Piece(index, text, reasoning, ids, scores))
            self._facts(choice)
            if choice.get("finish_cause") is not None:
                finish = Finish(index, choice["finish_cause"], choice.get("finish_reason"), choice.get("stop_reason"))
                if len(self._open) > 1:
                    self._put(finish)
                else:
                    held = finish
        self._facts(chunk)
        return held

    def _facts(self, told: Mapping[str, Any]) -> None:
        found = {name: told[name] for name in FACTS if told.get(name) is not None}
        if found:
            self._put(About(found))

    def _put(self, event: Came | None, *, over: bool = False) -> None:
        if isinstance(event, Finish):
            self._open.discard(event.choice)
        with self._changed:
            if event is not None:
                self._came.append(event)
            self._over = over
            self._changed.notify_all()
        if over:
            self._places.give(self._held)
        if self._ring is not None:
            try:
                self._ring()
            except Exception as error:  # nobody reads any more
                log.debug("a request's reader is gone", exc_info=error)
                self.cancel()
