"""One long prompt arrives while 8 rows decode: what it does to them, and they to it, by the chunk of its pieces.

    python benchmarks/fairness.py [--prompt 8192] [--small 512] [--large 2048] [--model FILE] [--json FILE]

Three arms: pieces of the small chunk, of the large one, and adaptive ones (small while rows decode, large otherwise).
Figures are of the time from the prompt's arrival to its first token: p95 over all gaps between tokens of the rows that
decode, from the one that the arrival falls into on, and that time itself, the prompt's time to first token. The verdict
compares adaptive with the better arm of each figure. docs/performance.md says at which costs both can be had.

Without --model the steps run on a script and take what a cost model says, on a clock of their own: `--step-ms` a step
and `--token-ms` for each of its tokens. The defaults are the default model's on NumPy (cpu-decode among the results: 31
ms to decode one row, 185 prompt tokens a second). Where a step costs as much as many tokens, small pieces pay that more
often: give a GPU's figures to see it. With --model it is that model, in processor time of this process, so that a busy
machine does not show; OPENBLAS_NUM_THREADS=1 keeps threads that wait for each other out of it. 64 positions of its
context are for the rows, so that a model of 8192 takes `--prompt 8128`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from provenance import provenance

from mlxcel.config import EngineConfig
from mlxcel.core.events import Delta
from mlxcel.core.params import SamplingParams
from mlxcel.core.reply import Reply
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.core.source import NoProgress
from mlxcel.load import load_model
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.manager import PluginManager
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.testing.scripted import scripted_engine

ROWS = 8
NEVER_ENDS = 1 << 20


@attrs.frozen
class Arm:
    name: str
    chunk: int
    busy: int | None


@attrs.frozen
class Side:
    """An engine without requests, and its clock."""

    engine: Any
    clock: Callable[[], float]
    close: Callable[[], None]


def script(prompt: int, step_ms: float, token_ms: float) -> Side:
    """The scripted backend, whose steps take what the cost model says."""
    it = scripted_engine(
        lambda spec: [97] * NEVER_ENDS, tokenizer=ByteTokenizer(), context=prompt + 4096, slots=ROWS + 1,
        kv_store=PagedKV,
    )  # fmt: skip
    backend, costs = it.backend, []
    submit, read = backend.submit, backend.read

    def noted(plan: Any) -> Any:
        costs.append((step_ms + token_ms * plan.num_tokens) / 1000)
        return submit(plan)

    def timed(handle: Any) -> Any:
        it.clock.advance(costs.pop(0))
        return read(handle)

    backend.submit, backend.read = noted, timed  # type: ignore[method-assign]
    return Side(it.engine, it.clock, it.engine.shutdown)


def model(path: str, prompt: int, chunk: int) -> Side:
    config = EngineConfig.resolve(
        {"model": path, "kv_storage": "paged", "max_model_len": prompt + 64, "prefill_chunk": chunk}, environ={}
    )
    loaded = load_model(config, PluginManager.load(only=(), trace=None), NoProgress(), slots=ROWS + 1)
    return Side(loaded.engine, time.process_time, loaded.close)


def measure(side: Side, arm: Arm, prompt: int) -> dict[str, float]:
    """p95 of the gaps and the time to first token, in milliseconds."""
    engine = side.engine
    settings = SchedulerSettings.resolve(
        engine.caps, engine.level, chunk=arm.chunk, chunk_busy=arm.busy or arm.chunk, adaptive=arm.busy is not None
    )
    planners = [
        ChunkedPlanner(chunk=size, level=engine.level, caps=engine.caps) for size in (arm.chunk, arm.busy) if size
    ]
    scheduler = Scheduler(engine, planner=planners[0], busy_planner=planners[-1], settings=settings, clock=side.clock)
    rows = [scheduler.submit(request(engine, f"row {index}", 16, -1)) for index in range(ROWS)]
    came: list[list[float]] = [[] for _ in rows]  # when each row's tokens did
    for row, times in zip(rows, came, strict=True):
        row.listen(partial(hear, row, side.clock, times))
    for _ in range(8):
        scheduler.tick()
    arrived = side.clock()
    long = scheduler.submit(request(engine, "long", prompt, 1))
    while not long.over:
        scheduler.tick()
    first_token = side.clock() - arrived
    scheduler.close()
    gaps = [end - start for times in came for start, end in itertools.pairwise(times) if end > arrived]
    return {"gap_p95_ms": 1000 * float(np.percentile(gaps, 95)), "ttft_ms": 1000 * first_token}


def request(engine: Any, name: str, length: int, tokens: int) -> Request:
    ids = np.random.default_rng(length).integers(0, engine.settings.vocab, length).astype(np.int32)
    params = SamplingParams(temperature=0, seed=0, max_tokens=tokens)
    return Request((SequenceSpec(name, ids, params),))


def hear(reply: Reply, clock: Callable[[], float], times: list[float]) -> None:
    """Note the moment of each token that came."""
    for event in iter(lambda: reply.get(0), None):
        if isinstance(event, Delta):
            times += [clock()] * len(event.token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--small", type=int, default=512)
    parser.add_argument("--large", type=int, default=2048)
    parser.add_argument("--step-ms", type=float, default=26.0)
    parser.add_argument("--token-ms", type=float, default=5.3)
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    arms = [
        Arm(f"chunk {given.small}", given.small, None),
        Arm(f"chunk {given.large}", given.large, None),
        Arm("adaptive", given.large, given.small),
    ]
    record: dict[str, Any] = {**provenance(), "prompt": given.prompt, "rows": ROWS, "arms": {}}
    record["model"] = None if given.model is None else Path(given.model).name
    if given.model is None:
        record |= {"step_ms": given.step_ms, "token_ms": given.token_ms}
    for arm in arms:
        side = (
            script(given.prompt, given.step_ms, given.token_ms)
            if given.model is None
            else model(given.model, given.prompt, given.large)
        )
        figures = {name: round(value, 1) for name, value in measure(side, arm, given.prompt).items()}
        side.close()
        record["arms"][arm.name] = figures
        print(f"{arm.name:12} p95 gap {figures['gap_p95_ms']:10.1f} ms   first token {figures['ttft_ms']:10.1f} ms")
    for name in ("gap_p95_ms", "ttft_ms"):
        *others, adaptive = (figures[name] for figures in record["arms"].values())
        record[f"adaptive_to_best_{name}"] = round(adaptive / min(others), 3)
        print(f"adaptive is {adaptive / min(others):.3f} of the better one in {name}")
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
