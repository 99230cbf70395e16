"""A server in a process of its own, with two routes more: what the process holds, and a round of replies without HTTP.

    python benchmarks/watched_server.py MODEL '{"backend": "reference-numpy"}' '{"max_queue_depth": 256}'

The first record is of engine options, the second of `ServerSettings`. Prints its address once it answers. Lines on
requests are made and thrown away. Benchmarks start it by `watched`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mlxcel.asked import AskedPrompt
from mlxcel.config import EngineConfig
from mlxcel.core.events import Delta
from mlxcel.core.reply import Reply
from mlxcel.server.app import create_app
from mlxcel.server.run import listen, run, url
from mlxcel.server.served import ServedModel
from mlxcel.server.settings import ServerSettings


@contextmanager
def watched(model: str, options: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Host and port of such a server, ended by SIGTERM behind the block. RuntimeError unless it ends with 0."""
    command = [sys.executable, __file__, model, json.dumps(options), json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().removeprefix("http://").rpartition(":")
        if not port:
            raise RuntimeError("the server did not start")
        yield host, int(port)
        process.terminate()
        if code := process.wait(60):
            raise RuntimeError(f"the server ended with {code}")
    finally:
        process.kill()
        process.wait()


async def held(request: Request) -> JSONResponse:
    """Tasks, threads, open files, resident MiB, and seconds of processor time so far; garbage is collected first."""
    if request.query_params.get("collect"):
        gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return JSONResponse(
        {
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "rss_mib": int(resident.split()[1]) / 1024,
            "cpu_s": time.process_time(),
        }
    )


async def rounds(request: Request) -> JSONResponse:
    """Replies to so many bodies of POST /v1/completions, straight from the scheduler: `seconds` from the first token to
    the last one, `tokens` without the first of each, and processor time of it all."""
    bodies = await request.json()
    return JSONResponse(await asyncio.to_thread(in_process, request.app.state.server.model, bodies))


def in_process(served: ServedModel, bodies: list[dict[str, Any]]) -> dict[str, float]:
    prepared = []
    for place, body in enumerate(bodies):
        fields = {name: value for name, value in body.items() if name not in ("prompt", "stream", "cache_prompt")}
        resolved = served.resolve(fields)
        prompt = AskedPrompt(ids=body["prompt"])
        prepared.append(served.prepare(prompt, resolved, request_id=f"round-{place}", use_cache=False))
    heard = [_Heard() for _ in prepared]
    began = time.process_time()
    for each, hearing in zip(prepared, heard, strict=True):
        hearing.listen(served.serving.scheduler.submit(each.request))
    for hearing in heard:
        hearing.over.wait()
    seconds = max(hearing.last for hearing in heard) - min(hearing.first for hearing in heard)
    tokens = sum(hearing.tokens - 1 for hearing in heard)
    return {"seconds": seconds, "tokens": tokens, "cpu_s": time.process_time() - began}


@attrs.define
class _Heard:
    """When a reply's tokens came, noted on the engine's thread."""

    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    over: threading.Event = attrs.field(factory=threading.Event)

    def listen(self, reply: Reply) -> None:
        def hear() -> None:
            for event in iter(lambda: reply.get(0), None):
                if isinstance(event, Delta):
                    self.last = time.perf_counter()
                    self.first = self.first or self.last
                    self.tokens += len(event.token_ids)
            if reply.ended:
                self.over.set()

        reply.listen(hear)


def main() -> None:
    model, options, given = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    settings = ServerSettings(port=0, **given)
    config = EngineConfig.resolve({"model": model, **options}, environ={})
    with open(os.devnull, "w") as sink:
        app = create_app(settings, config=config, write=lambda line: print(line, file=sink, flush=True))
        app.router.routes += [Route("/held", held), Route("/rounds", rounds, methods=["POST"])]
        sock = listen(settings)
        where = url(settings, sock)
        run(app, sock, ready=lambda: print(where, flush=True))


if __name__ == "__main__":
    main()
