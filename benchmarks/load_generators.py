"""Whether load generators see the same: `mlxcel bench serve` and guidellm on one server whose times are known.

    python benchmarks/load_generators.py TOKENIZER_FOLDER [--guidellm PROGRAM] [--rounds 3] [--json FILE]

The server is a stub in this process: each reply begins after 200 ms and has a token every 20 ms. The generators run in
turns, 4 requests at once, chats of 32 tokens. A ratio is a generator's median over what the stub planned, so what the
machine adds is in it; that of both over each other is the one that says whether they mean the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from provenance import provenance

FIRST = 0.2
GAP = 0.02
TOKENS = 32
ASKED = 24
STREAMS = 4
TRUTH = {"ttft": 1000 * FIRST, "tpot": 1000 * GAP, "e2el": 1000 * (FIRST + (TOKENS - 1) * GAP)}
"""Milliseconds."""


def event(choices: list[Any], usage: Any = None) -> bytes:
    told = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "stub", "choices": choices}
    body = b"data: " + json.dumps({**told, "usage": usage}).encode() + b"\n\n"
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Requests of one connection, until it ends."""
    clock = asyncio.get_running_loop().time
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            began = clock()
            fields = [line.partition(b":") for line in head.lower().split(b"\r\n")]
            await reader.readexactly(next((int(value) for name, _, value in fields if name == b"content-length"), 0))
            if not head.startswith(b"POST"):
                body = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode()
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                writer.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for place in range(TOKENS):
                await asyncio.sleep(began + FIRST + place * GAP - clock())
                writer.write(event([{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]))
            writer.write(event([{"index": 0, "delta": {}, "finish_reason": "length"}]))
            writer.write(event([], {"prompt_tokens": 16, "completion_tokens": TOKENS, "total_tokens": 16 + TOKENS}))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client left
    finally:
        writer.close()


async def program(words: list[str], folder: str) -> bytes:
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec(
        *words, cwd=folder, env={**os.environ, **offline}, stdout=pipe, stderr=pipe
    )
    out, err = await started.communicate()
    if started.returncode:
        raise RuntimeError(f"{words[0]} ended with {started.returncode}: {err.decode()[-1000:]}")
    return out


async def ours(url: str, tokenizer: str) -> dict[str, float]:
    how = ["--num-prompts", str(ASKED), "--max-concurrency", str(STREAMS), "--random-output-len", str(TOKENS)]
    kind = ["--endpoint-type", "openai-chat", "--random-input-len", "16", "--tokenizer", tokenizer, "--json", "-q"]
    command = [sys.executable, "-m", "mlxcel", "bench", "serve", "--base-url", url, *how, *kind]
    found = json.loads(await program(command, "."))
    return {name: found[f"median_{name}_ms"] for name in TRUTH}


async def guidellm(name: str, url: str, tokenizer: str) -> dict[str, float]:
    options = {
        "backend": f"kind=openai_http,target={url}",
        "profile": f"kind=concurrent,streams={STREAMS}",
        "constraint": f"kind=max_requests,count={ASKED}",
        "data": f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}",
        "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
        "output": "kind=json,path=found.json",
    }
    with tempfile.TemporaryDirectory() as folder:
        await program([name, "run", *(word for key, value in options.items() for word in (f"--{key}", value))], folder)
        (found,) = json.loads((Path(folder) / "found.json").read_text())["benchmarks"]
    told = {key: value["successful"]["median"] for key, value in found["metrics"].items() if key in GUIDELLM.values()}
    return {name: told[key] * (1000 if name == "e2el" else 1) for name, key in GUIDELLM.items()}


GUIDELLM = {"ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms", "e2el": "request_latency"}
"""Its names: a request's mean gap is its inter-token latency; the whole of it is in seconds."""


async def measure(tokenizer: str, other: str, rounds: int) -> dict[str, Any]:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pairs = []
    for number in range(rounds):
        pair = {}
        for arm in ("ours", "guidellm")[:: 1 - 2 * (number % 2)]:
            pair[arm] = await (ours(url, tokenizer) if arm == "ours" else guidellm(other, url, tokenizer))
        pairs.append(pair)
    server.close()

    def ratios(name: str, top: str, bottom: str | None) -> list[float]:
        found = [pair[top][name] / (TRUTH[name] if bottom is None else pair[bottom][name]) for pair in pairs]
        return [round(value, 4) for value in (median(found), min(found), max(found))]

    return {
        name: {
            "planned_ms": TRUTH[name],
            "ours_over_plan": ratios(name, "ours", None),
            "guidellm_over_plan": ratios(name, "guidellm", None),
            "ours_over_guidellm": ratios(name, "ours", "guidellm"),
        }
        for name in TRUTH
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="a folder, as --export-tokenizer writes it")
    parser.add_argument("--guidellm", default="guidellm", help="the program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    record = {**provenance(), "rounds": given.rounds, "median_min_max": True}
    record["metrics"] = asyncio.run(measure(str(given.tokenizer.resolve()), given.guidellm, given.rounds))
    record["load_average_after"] = os.getloadavg()
    for name, found in record["metrics"].items():
        print(name, " ".join(f"{key}={value}" for key, value in found.items()))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
