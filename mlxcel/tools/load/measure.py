"""A load: each request sets out when the plan says so, or as soon behind that as one may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import attrs

from mlxcel.tools.load.client import ask
from mlxcel.tools.load.connections import Connections
from mlxcel.tools.load.reply import Reply


@attrs.frozen
class Sent:
    """One request. `due` is the plan's moment, `ready` when it could set out, and `reply.sent` when it did: between the
    two it waited for a place under `max_concurrency`."""

    due: float
    ready: float
    reply: Reply


@attrs.frozen
class Load:
    """All of it, in the plan's order. Moments are those of the event loop's clock."""

    began: float
    ended: float
    sent: tuple[Sent, ...]


async def run_load(
    connections: Connections,
    requests: Sequence[bytes],
    plan: Sequence[float],
    *,
    timeout: float,
    max_concurrency: int | None = None,
    over: Callable[[], None] = lambda: None,
) -> Load:
    """Send each request at its moment of the plan, in seconds from now, whatever became of those before it. `over` is
    called as each ends."""
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else nullcontext()

    async def one(request: bytes, due: float, ready: float) -> Sent:
        async with places:
            reply = await ask(connections, request, timeout=timeout)
        over()
        return Sent(due, ready, reply)

    began = loop.time()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request, offset in zip(requests, plan, strict=True):
            due = began + offset
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(request, due, loop.time())))
    return Load(began, loop.time(), tuple(task.result() for task in tasks))
