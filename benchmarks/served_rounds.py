"""Rounds of requests through a scheduler on its own thread, over the engines of a benchmark."""

from __future__ import annotations

import time
from functools import partial

from random_engines import Bench

from mlxcel.core.events import Delta
from mlxcel.core.reply import Reply
from mlxcel.core.request import Request
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.plugins.prefill.chunked import ChunkedPlanner

PROMPT = 32
"""Tokens of the prompts of a crowd."""


def served(bench: Bench, length: int, tokens: int) -> list[float]:
    """The moments at which the tokens of one reply came, to a client that reads on this thread."""
    moments: list[float] = []
    with _serving(bench) as scheduler:
        for event in scheduler.submit(Request((bench.spec(bench.ids(length, 1), max_tokens=tokens),))):
            if isinstance(event, Delta):
                moments += [time.perf_counter()] * len(event.token_ids)
    return moments


def crowd_served(bench: Bench, count: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of `count` requests that come together: from the first's arrival to the last's end, and while all
    of them decode (0.0: they never do)."""
    heard: list[list[float]] = [[] for _ in range(count)]
    requests = [Request((bench.spec(bench.ids(PROMPT, place), max_tokens=tokens),)) for place in range(count)]
    with _serving(bench) as scheduler:
        began = time.perf_counter()
        replies = [scheduler.submit(request) for request in requests]
        for reply, moments in zip(replies, heard, strict=True):
            reply.listen(partial(_hear, reply, moments))
        while not all(reply.over for reply in replies):
            time.sleep(0.001)
    for reply, moments in zip(replies, heard, strict=True):
        _hear(reply, moments)
    short = [place for place, moments in enumerate(heard) if len(moments) != tokens]
    if short:
        raise RuntimeError(f"requests {short} of {count} did not get their {tokens} tokens")
    begin, end = max(moments[0] for moments in heard), min(moments[-1] for moments in heard)
    between = sum(begin < moment <= end for moments in heard for moment in moments)
    whole = count * tokens / (max(moments[-1] for moments in heard) - began)
    return whole, between / (end - begin) if end > begin else 0.0


def _serving(bench: Bench) -> Scheduler:
    """Started, and ready. The engine stays open behind it."""
    engine, chunk = bench.engine, bench.setup.chunk
    settings = SchedulerSettings.resolve(engine.caps, engine.level, chunk=chunk, max_queue_depth=1024)
    planner = ChunkedPlanner(chunk=chunk, level=engine.level, caps=engine.caps)
    scheduler = Scheduler(engine, planner=planner, settings=settings, clock=time.perf_counter)
    scheduler.start()
    scheduler.wait_ready()
    return scheduler


def _hear(reply: Reply, moments: list[float]) -> None:
    """Note when each token came."""
    for event in iter(lambda: reply.get(0), None):
        if isinstance(event, Delta):
            moments += [time.perf_counter()] * len(event.token_ids)
