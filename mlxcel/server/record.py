"""What is known of an HTTP request while it is on its way: for its log line, for the metrics, and for its routes."""

from __future__ import annotations

import asyncio
import threading

import attrs

from mlxcel.core.result import RequestResult


@attrs.define(eq=False)
class RequestRecord:
    """Routes find it as `request.state.record`. `id` is what the client gets back; the engine's ids of its prompts are
    `engine_ids`. `started` is in seconds on the state's clock. `results` fill up as rows end, on the engine's thread.
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
    results: list[RequestResult] = attrs.field(factory=list)

    def engine_ids(self, prompts: int) -> list[str]:
        """Ids for the engine of so many prompts of this request."""
        return [self.id] if prompts == 1 else [f"{self.id}-{place}" for place in range(prompts)]


class LiveRequests:
    """Requests that are being answered, by id. They come and go on the event loop; `of_engine` is for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[str, RequestRecord] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, record: RequestRecord) -> None:
        """Where the id is taken by a live request, this one's gets a suffix."""
        with self._lock:
            wanted, number = record.id, 2
            while record.id in self._live:
                record.id = f"{wanted}.{number}"
                number += 1
            self._live[record.id] = record
        self._none.clear()

    def remove(self, record: RequestRecord) -> None:
        with self._lock:
            del self._live[record.id]
        if not self._live:
            self._none.set()

    async def none_left(self, limit: float) -> bool:
        """Wait until every request has its reply, for at most `limit` seconds."""
        try:
            await asyncio.wait_for(self._none.wait(), limit)
        except TimeoutError:
            return False
        return True

    def of_engine(self, engine_id: str) -> RequestRecord | None:
        """The request that an id of `RequestRecord.engine_ids` belongs to."""
        with self._lock:
            return self._live.get(engine_id) or self._live.get(engine_id.rpartition("-")[0])
