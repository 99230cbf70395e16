"""What is known of an HTTP request while it is on its way: for its log line, for the metrics, and for its routes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final

import attrs

from mlxcel.core.request import Request
from mlxcel.core.result import RequestResult

OF_PROMPT: Final = "#"
"""Between a request's id, which never has it, and the place of a prompt."""


@attrs.define(eq=False)
class RequestRecord:
    """Routes find it as `request.state.record`. `id` is what the client gets back. `started` and `answered` are in
    seconds on the state's clock. `results` fill up as rows end, on the engine's thread; `rows` were handed to it.
    """

    id: str
    method: str
    client: str
    started: float
    route: str = "unmatched"
    key: str = "-"
    status: int = 0
    stream: bool = False
    left: bool = False  # the client hung up before the end of its reply
    isolation: bytes | None = None  # who may share cached prompts with it
    answered: float | None = None
    rows: int = 0
    results: list[RequestResult] = attrs.field(factory=list)

    def engine_ids(self, prompts: int) -> list[str]:
        """Ids for the engine of so many prompts of this request: no client can have one of several for its own."""
        return [self.id] if prompts == 1 else [f"{self.id}{OF_PROMPT}{place}" for place in range(prompts)]

    @property
    def over(self) -> bool:
        """Whether its client has all it will get, and every row has ended."""
        return self.answered is not None and len(self.results) >= self.rows


class LiveRequests:
    """Requests that are being answered, by id, and those whose rows still run. `done` is called once for each, on the
    event loop, when both are over."""

    def __init__(self, done: Callable[[RequestRecord], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._live: dict[str, RequestRecord] = {}
        self._answering = 0
        self._answered = asyncio.Event()
        self._answered.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._live)

    @property
    def replying(self) -> int:
        """Requests that had rows and are without the end of their replies."""
        with self._lock:
            return sum(record.rows > 0 and record.answered is None for record in self._live.values())

    # --- on the event loop --------------------------------------------------------------------------------------------

    def add(self, record: RequestRecord) -> None:
        """Where the id is taken by a live request, this one's gets a suffix."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            wanted, number = record.id, 2
            while record.id in self._live:
                record.id = f"{wanted}.{number}"
                number += 1
            self._live[record.id] = record
            self._answering += 1
            self._answered.clear()

    def answered(self, record: RequestRecord, now: float) -> None:
        """Its client has all it will get."""
        with self._lock:
            self._answering -= 1
            if not self._answering:
                self._answered.set()
            record.answered = now
            over = self._forget(record)
        if over:
            self._done(record)

    async def all_answered(self, limit: float) -> bool:
        """Wait until no request is without its reply, for at most `limit` seconds; whether that is so."""
        try:
            await asyncio.wait_for(self._answered.wait(), limit)
        except TimeoutError:
            return False
        return True

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submitted(self, request: Request) -> None:
        """The scheduler took it: each of its choices will have a result."""
        with self._lock:
            if (record := self._of(request.request_id)) is not None:
                record.rows += len(request.choices)

    def ended(self, result: RequestResult) -> None:
        """A row has ended, or was refused."""
        with self._lock:
            record = self._of(result.request_id)
            if record is None:
                return
            record.results.append(result)
            over, loop = self._forget(record), self._loop
        if over and loop is not None:
            try:
                loop.call_soon_threadsafe(self._done, record)
            except RuntimeError:  # the loop ended before this row
                self._done(record)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _forget(self, record: RequestRecord) -> bool:
        """Whether it is over now."""
        return record.over and self._live.pop(record.id, None) is not None

    def _of(self, engine_id: str) -> RequestRecord | None:
        """The request that an id of `RequestRecord.engine_ids` belongs to."""
        return self._live.get(engine_id) or self._live.get(engine_id.rpartition(OF_PROMPT)[0])
