"""Many streams at once, some slow, some broken off: what the server holds afterwards, and what it said.

    python benchmarks/server_load.py MODEL [--streams 200] [--seconds 60] [--json FILE]

Bodies of four routes are first answered one by one. Then so many streams run at a time, a new one for each that ends:
3 in 10 leave at a random time, half of them with a reset; 2 in 10 read slowly. What a stream said must be what its body
was answered alone, or the beginning of it. After a third of the time, and at the end, all is let run out and the
process is looked at: pages, rows, tasks, files, memory. GET /health is asked all the while, and beside a long prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from http_streams import NOW, Address, Said, get, stream
from provenance import provenance
from watched_server import watched

LEAVE, SLOW = 0.3, 0.2
PAUSE = 0.01
"""Seconds between two lines for a slow reader: several times what the others need."""

ROUTES: Final = ("/v1/completions", "/v1/chat/completions", "/completion", "/v1/messages")
SETTLING = 20.0
"""Seconds in which everything of a request must be gone: a server holds a closed connection for a while."""


@attrs.frozen
class Case:
    path: str
    body: dict[str, Any]
    text: dict[int, str]


def bodies(count: int, seed: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """Prompts of 1 to 300 letters, some of them with a beginning in common, replies of 1 to 150 tokens; with their
    log-probabilities they are more than buffers between a server and a slow reader hold."""
    chance, made = random.Random(seed), []
    common = "".join(chance.choices("abc defgh", k=150))
    for place in range(count):
        path = ROUTES[place % len(ROUTES)]
        prompt = common * chance.randrange(2) + "".join(chance.choices("abc defgh", k=chance.randint(1, 150)))
        sampling: dict[str, Any] = {"max_tokens": chance.randint(1, 120), "temperature": chance.choice((0, 0.8))}
        if path != "/v1/messages":
            sampling |= {"seed": place, "ignore_eos": bool(place % 3)}
        else:
            sampling["temperature"] = 0
        if path == "/v1/completions" and place % 8 == 0:
            sampling["n"] = 2
        if path == "/v1/chat/completions" and place % 8 == 1:
            sampling |= {"logprobs": True, "top_logprobs": 20, "max_tokens": 150}
        plain = path in ("/v1/completions", "/completion")
        given: dict[str, Any] = {"prompt": prompt} if plain else {"messages": [{"role": "user", "content": prompt}]}
        if path == "/v1/messages":
            given["model"] = ""
        made.append((path, {**given, **sampling}))
    return made


class Load:
    """Streams as they come and go, and what was wrong with any. `usual` is how long a reply takes here, in seconds."""

    def __init__(self, address: Address, cases: list[Case], streams: int) -> None:
        self._address, self._cases, self._streams = address, cases, streams
        self._chance = random.Random(2)
        self._usual = 1.0
        self.whole = self.left = 0
        self.wrong: list[str] = []

    async def run(self, seconds: float) -> None:
        end = NOW() + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._streams):
                group.create_task(self._keep_asking(end))

    async def _keep_asking(self, end: float) -> None:
        while NOW() < end:
            chance, case = self._chance, self._chance.choice(self._cases)
            leave = chance.uniform(0, 1.5 * self._usual) if chance.random() < LEAVE else None
            pause = PAUSE if chance.random() < SLOW else 0.0
            began, abrupt = NOW(), chance.random() < 0.5
            said = await stream(self._address, case.path, case.body, pause=pause, leave_after=leave, abrupt=abrupt)
            if leave is None:
                self._usual = 0.95 * self._usual + 0.05 * (NOW() - began)
            self._check(case, said, left=leave is not None)

    def _check(self, case: Case, said: Said, *, left: bool) -> None:
        self.whole += said.whole
        self.left += not said.whole
        same = all(case.text.get(choice, "").startswith(text) for choice, text in said.text.items())
        if said.whole:
            same = dict(said.text) == case.text
        if not same or said.fault or said.status not in ((0, 200) if left else (200,)) or not (said.whole or left):
            self.wrong.append(f"{case.path} {case.body}: {said} instead of {case.text}")


async def look(address: Address, tasks: float) -> dict[str, float]:
    """What the process holds once nothing runs and there are no more tasks than so many, or after SETTLING."""
    end = NOW() + SETTLING
    while True:
        held = await _held(address)
        if NOW() > end or (held["tasks"] <= tasks and not held["rows_busy"] and not held["pages_used"]):
            return held
        await asyncio.sleep(0.5)


async def _held(address: Address) -> dict[str, float]:
    found: dict[str, float] = await get(address, "/held?collect=1")
    gauges = dict(line.rsplit(" ", 1) for line in (await get(address, "/metrics")).splitlines() if line[0] != "#")
    names = ("rows_busy", "num_requests_running", "num_requests_waiting")
    rows = {name: float(gauges[f"mlxcel_{name}"]) for name in names}
    pages = {f"pages_{name}": float(gauges[f"mlxcel_kv_pages_{name}"]) for name in ("used", "cached", "total")}
    return {**found, **rows, **pages}


async def health_beside(address: Address, work: Awaitable[object], every: float) -> list[float]:
    """Milliseconds that GET /health took, again and again until `work` is done."""
    taken, task = [], asyncio.ensure_future(work)
    while not task.done():
        began = NOW()
        await get(address, "/health")
        taken.append(1000 * (NOW() - began))
        await asyncio.sleep(every)
    await task
    return taken


def percentiles(taken: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(taken, (50, 99))
    return {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2), "asked": len(taken)}


async def measure(address: Address, given: argparse.Namespace) -> dict[str, Any]:
    tasks, cases = (await _held(address))["tasks"], []
    for path, body in bodies(given.bodies):
        said = await stream(address, path, body)
        if not said.whole:
            raise RuntimeError(f"{path} {body}: {said}")
        cases.append(Case(path, body, dict(said.text)))
    load = Load(address, cases, given.streams)
    idle = await health_beside(address, asyncio.sleep(2), 0.02)
    await health_beside(address, load.run(given.seconds / 3), 0.1)
    before = await look(address, tasks)
    loaded = await health_beside(address, load.run(given.seconds * 2 / 3), 0.1)
    after = await look(address, tasks)
    prompt = np.random.default_rng(3).integers(1, 250, given.long).tolist()
    long = {"prompt": prompt, "max_tokens": 1, "cache_prompt": False, "temperature": 0}

    async def prefills() -> None:
        end = NOW() + given.prefill_seconds
        while NOW() < end:
            await stream(address, "/v1/completions", long)

    beside = await health_beside(address, prefills(), 0.02)
    return {
        "whole": load.whole,
        "left": load.left,
        "wrong": load.wrong[:5],
        "before": before,
        "after": after,
        "health": {"idle": percentiles(idle), "load": percentiles(loaded), "prefill": percentiles(beside)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--bodies", type=int, default=32)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--long", type=int, default=1900, help="tokens of the long prompt")
    parser.add_argument("--prefill-seconds", type=float, default=10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = {"backend": "reference-numpy", "max_num_seqs": given.rows, "kv_storage": "paged", "max_model_len": 2048}
    asked = {name: getattr(given, name) for name in ("streams", "seconds", "rows", "long")}
    record = {**provenance(), "model": Path(given.model).name, **asked}
    with watched(given.model, options, {"max_queue_depth": 2 * given.streams}) as address:
        record |= asyncio.run(measure(address, given))
    record["load_average_after"] = os.getloadavg()
    print(json.dumps({name: value for name, value in record.items() if name != "wrong"}, indent=1))
    for line in record["wrong"]:
        print(line)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return bool(record["wrong"])


if __name__ == "__main__":
    sys.exit(main())
