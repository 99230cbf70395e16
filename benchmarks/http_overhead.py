"""What HTTP costs: tokens a second of streams over the server, over those straight from its scheduler.

    python benchmarks/http_overhead.py MODEL [--rows 1 32] [--prompt 16] [--tokens 128] [--rounds 5] [--json FILE]

Both run in turns in one server process, over one engine. Over HTTP the client is a process of its own, which reads
lines and does not decode them. A rate is that of all tokens behind the first ones, from the first token of any reply to
the last of all: replies must be long beside their prompts, which do not come at once over HTTP. Processor time is the
server's, of a whole round, from the first request's arrival on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np
from http_streams import Address, Heard, get, listen
from provenance import provenance
from watched_server import watched


@attrs.frozen
class Round:
    """Tokens a second, and milliseconds of the server's processor time a token."""

    rate: float
    cpu_ms: float


def bodies(rows: int, prompt: int, tokens: int) -> list[dict[str, Any]]:
    chance = np.random.default_rng(rows)
    asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
    return [{"prompt": chance.integers(10, 250, prompt).tolist(), **asked} for _ in range(rows)]


async def over_http(address: Address, asked: list[dict[str, Any]]) -> Round:
    before = (await get(address, "/held"))["cpu_s"]
    heard: list[Heard] = await asyncio.gather(*(listen(address, "/v1/completions", body) for body in asked))
    spent = (await get(address, "/held"))["cpu_s"] - before
    tokens = sum(body["max_tokens"] for body in asked)
    seconds = max(each.last for each in heard) - min(each.first for each in heard)
    return Round((tokens - len(asked)) / seconds, 1000 * spent / tokens)


async def straight(address: Address, asked: list[dict[str, Any]]) -> Round:
    found = await get(address, "/rounds", asked)
    tokens = sum(body["max_tokens"] for body in asked)
    if found["tokens"] != tokens - len(asked):
        raise RuntimeError(f"{found['tokens']} tokens came, {tokens - len(asked)} were asked for")
    return Round(found["tokens"] / found["seconds"], 1000 * found["cpu_s"] / tokens)


async def measure(address: Address, rows: int, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    asked = bodies(rows, prompt, tokens)
    pairs = []
    for number in range(rounds + 1):
        first = number % 2
        arms = {}
        for arm in (straight, over_http)[:: 1 - 2 * first]:
            arms[arm.__name__] = await arm(address, asked)
        if number:  # the first one warms up
            pairs.append((arms["straight"], arms["over_http"]))
    ratios = [http.rate / alone.rate for alone, http in pairs]
    cpu = [http.cpu_ms - alone.cpu_ms for alone, http in pairs]
    return {
        "rows": rows,
        "prompt": prompt,
        "tokens": tokens,
        "scheduler_tok_s": round(median(alone.rate for alone, _ in pairs), 1),
        "server_tok_s": round(median(http.rate for _, http in pairs), 1),
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(min(ratios), 4), round(max(ratios), 4)],
        "scheduler_cpu_ms_a_token": round(median(alone.cpu_ms for alone, _ in pairs), 3),
        "http_cpu_ms_a_token": round(median(cpu), 4),
        "http_cpu_ms_range": [round(min(cpu), 4), round(max(cpu), 4)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backend", default="reference-numpy")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt", type=int, default=16, help="its tokens")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = {
        "backend": given.backend,
        "max_num_seqs": max(given.rows),
        "max_model_len": given.prompt + given.tokens + 16,
    }
    record: dict[str, Any] = {**provenance(), "model": Path(given.model).name, "backend": given.backend, "runs": []}
    with watched(given.model, options, {"max_queue_depth": max(given.rows)}) as address:
        for rows in given.rows:
            found = asyncio.run(measure(address, rows, given.prompt, given.tokens, given.rounds))
            record["runs"].append(found)
            print(" ".join(f"{name}={value}" for name, value in found.items()), flush=True)
    record["load_average_after"] = os.getloadavg()
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
