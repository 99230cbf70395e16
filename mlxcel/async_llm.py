"""AsyncLLM: the same for asyncio (docs/spec/clients.md 2)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from mlxcel.asked import asked_prompt, own, paired
from mlxcel.client import Came, Connected, Sent
from mlxcel.errors import RequestError, shown

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams
    from mlxcel.core.tokenizer import Tokenizer
    from mlxcel.outputs import RequestOutput, StreamDelta

MAX_ID: Final = 128
"""Characters of a request id."""


class AsyncLLM(Connected):
    """A model, and a thread that runs it, for coroutines. Arguments as of LLM; the model is loaded here and now, which
    takes its time: `await asyncio.to_thread(AsyncLLM, ...)` where other tasks must go on.

    Leaving a loop over `generate` or `stream` early, or cancelling its task, cancels the row.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        progress: bool = False,
        base_url: str | None = None,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, tokenizer=tokenizer, progress=progress, base_url=base_url, api_key=api_key, **options)
        self._reading: dict[str, _Reader] = {}

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """One prompt's reply, again and again as it grows; the last output is `finished`.

        Prompts as of `LLM.generate`, one of them. RequestError, a ValueError, for what cannot run, and for a
        `request_id` of a request that still runs. An error of the row is raised where the reply broke off.
        """
        reader = self._reader(request_id)
        try:
            gathered = await reader.begin(prompt, sampling_params, growing=True)
            while not gathered.finished:
                if await reader.deltas(gathered):
                    yield _sound(gathered.output())
        finally:
            reader.leave()

    async def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[StreamDelta]:
        """As `generate`, in deltas."""
        reader = self._reader(request_id)
        try:
            gathered = await reader.begin(prompt, sampling_params, growing=False)
            while not gathered.finished:
                for delta in await reader.deltas(gathered):
                    if delta.output is not None:
                        _sound(delta.output)
                    yield delta
        finally:
            reader.leave()

    async def abort(self, request_id: str) -> bool:
        """End a request, whose reply then ends with the cause `cancelled`. Whether there was one of this id."""
        self._leave_closed_loops()
        reader = self._reading.get(request_id)
        if reader is None:
            return False
        reader.abort()
        return True

    async def close(self) -> None:
        """Cancel what runs, end the engine's thread, free the model. Again: nothing."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _reader(self, request_id: str | None) -> _Reader:
        self._client.check_open()
        self._leave_closed_loops()
        if request_id is None:
            request_id = f"req-{secrets.token_hex(8)}"
        elif not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_ID:
            raise RequestError(
                f"request_id is {shown(request_id)}, it must be a text of 1 to {MAX_ID} characters", field="request_id"
            )
        elif request_id in self._reading:
            raise RequestError(f"a request of the id {shown(request_id)} still runs", field="request_id")
        reader = self._reading[request_id] = _Reader(self, request_id)
        return reader

    def _leave_closed_loops(self) -> None:
        """A loop that was closed runs no `finally` of a generator that it had begun."""
        for reader in list(self._reading.values()):
            if reader.unread:
                reader.leave()


class _Reader:
    """One request, read by a coroutine: it never blocks the loop."""

    def __init__(self, asked: AsyncLLM, request_id: str) -> None:
        self._asked, self._client, self._request_id = asked, asked._client, request_id
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._running: Sent | None = None
        self._aborted = False

    @property
    def unread(self) -> bool:
        """Whether nobody can read on: its loop is closed."""
        return self._loop.is_closed()

    async def begin(self, prompt: Any, params: SamplingParams | None, *, growing: bool) -> Came:
        """Check the request, off the loop, and wait for a place."""
        client = self._client
        asked, chosen = asked_prompt(prompt), paired(params, 1)[0]

        def prepare() -> Any:
            return client.prepare(asked, client.resolve(chosen), self._request_id)

        prepared = await asyncio.to_thread(prepare)
        gathered = client.gathered(prepared, growing=growing)
        while not self._aborted:
            self._woken.clear()
            self._running = client.begin(prepared, self._ring, heard=self._ring)
            if self._running is not None:
                break
            await self._woken.wait()
        return gathered

    async def deltas(self, gathered: Came) -> Sequence[StreamDelta]:
        """What came, waited for; the deltas of a request that was ended before it had a place."""
        if self._running is None:
            return gathered.drop()
        while True:
            self._woken.clear()
            taken = [gathered.take(event) for event in self._running.events()]
            if taken:
                return [delta for delta in taken if delta is not None]
            await self._woken.wait()

    def abort(self) -> None:
        self._aborted = True
        if self._running is not None:
            self._running.cancel()
        self._ring()

    def leave(self) -> None:
        self._client.places.leave(self._ring)
        if self._running is not None:
            self._running.cancel()
        if self._asked._reading.get(self._request_id) is self:
            del self._asked._reading[self._request_id]

    def _ring(self) -> None:
        """From any thread. RuntimeError once the loop is closed: then nobody reads."""
        self._loop.call_soon_threadsafe(self._woken.set)


def _sound(output: RequestOutput) -> RequestOutput:
    """The output, unless its row failed: then the error, once all rows of it have ended."""
    if output.finished and output.error is not None:
        raise own(output.error)
    return output
