"""What a tick costs the host: 128 rows that decode on a script, by who spends it, and what it depends on.

    python benchmarks/scheduler_tick.py [--rows 128] [--ticks 200] [--rounds 5] [--json FILE] [--profile]

The script's own part, its logits and the draw from them over V, stands for the device: its submit and read are taken
off. What is left is the scheduler's, and the engine's own (reserve, pack, resolve, text), which any client pays:
told apart by call. It is the processor time of the thread that counts, and sides run in interleaved rounds, so that a
busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from provenance import provenance

from mlxcel.core.backend import Backend
from mlxcel.core.finish import Finish
from mlxcel.core.kv import KVStore
from mlxcel.core.params import SamplingParams
from mlxcel.core.reply import Reply
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.sampling import Sampler
from mlxcel.core.scheduler import Scheduler
from mlxcel.core.scheduler_settings import SchedulerSettings
from mlxcel.plugins.finish.reply_text import TextStream
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.testing.faults import FaultPlan
from mlxcel.testing.scripted import scripted_engine

ENGINE_CALLS = {"reserve": None, "submit": "submit", "collect": "read"}
"""What the scheduler calls, each with the call of the device within it."""

ROWS = {
    "greedy": SamplingParams(temperature=0, seed=0),
    "sampled": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=0),
}


class Faultless(FaultPlan):
    """The parts as they are, without the wrappers that could let one fail."""

    def __init__(self) -> None:
        super().__init__(())

    def backend(self, backend: Backend) -> Backend:
        return backend

    def kv(self, kv: KVStore) -> KVStore:
        return kv

    def sampler(self, sampler: Sampler) -> Sampler:
        return sampler

    def finish(self, finish: Finish) -> Finish:
        return finish

    def stream(self, factory: Callable[[SequenceSpec], TextStream]) -> Callable[[SequenceSpec], TextStream]:
        return factory


class Meter:
    """Processor seconds inside the calls of the engine, each without the device's call in it, and in that."""

    def __init__(self, engine: Any, device: Any) -> None:
        self.spent = dict.fromkeys((*ENGINE_CALLS, "device"), 0.0)
        for name, inside in ENGINE_CALLS.items():
            self._wrap(engine, name, name, None)
            if inside is not None:
                self._wrap(device, inside, "device", name)

    def _wrap(self, place: Any, name: str, side: str, outside: str | None) -> None:
        inner: Callable[..., Any] = getattr(place, name)

        def timed(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return inner(*arguments)
            finally:
                took = time.thread_time() - begun
                self.spent[side] += took
                if outside is not None:
                    self.spent[outside] -= took

        setattr(place, name, timed)


class Serving:
    """`rows` rows that decode, each behind `history` positions, with V = `vocab`."""

    def __init__(self, rows: int, history: int, vocab: int, ticks: int, params: SamplingParams) -> None:
        tokenizer = ByteTokenizer()
        script = [97] * (ticks + 100)
        self.it = scripted_engine(
            lambda spec: script,
            tokenizer=tokenizer,
            vocab=vocab,
            context=history + len(script),
            slots=rows,
            faults=Faultless(),
            kv_store=PagedKV,
        )
        engine = self.it.engine
        settings = SchedulerSettings.resolve(engine.caps, engine.level, chunk=history, chunk_busy=history)
        planner = ChunkedPlanner(chunk=history, level=engine.level, caps=engine.caps)
        self.scheduler = Scheduler(
            engine, planner=planner, settings=attrs.evolve(settings, max_prefill_tokens=10**9), clock=self.it.clock
        )
        prompt = np.full(history, 98, np.int32)
        self.replies: list[Reply] = []
        for index in range(rows):
            self.replies.append(self.scheduler.submit(Request((SequenceSpec(str(index), prompt, params),))))
        self.meter = Meter(engine, self.it.backend)
        for _ in range(5):
            self.scheduler.tick()

    def milliseconds(self, ticks: int) -> dict[str, float]:
        """Of one tick: the scheduler's own part, each call of the engine, and all of it."""
        spent = self.meter.spent
        spent.update(dict.fromkeys(spent, 0.0))
        total = 0.0
        for _ in range(ticks):
            begun = time.thread_time()
            self.scheduler.tick()
            total += time.thread_time() - begun
            for reply in self.replies:  # clients read on threads of their own
                while reply.get(0) is not None:
                    pass
        calls = {name: spent[name] for name in ENGINE_CALLS}
        total -= spent["device"]
        figures = {"scheduler": total - sum(calls.values()), **calls, "all": total}
        return {name: 1000 * seconds / ticks for name, seconds in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--ticks", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="where one side spends its time, by function")
    given = parser.parse_args()
    sides = {
        "V=320, history 16": (16, 320, "greedy"),
        "V=320, history 16, sampled": (16, 320, "sampled"),
        "V=32000, history 16": (16, 32000, "greedy"),
        "V=320, history 4096": (4096, 320, "greedy"),
    }
    runs = {
        name: Serving(given.rows, history, vocab, given.ticks * given.rounds, ROWS[kind])
        for name, (history, vocab, kind) in sides.items()
    }
    if given.profile:
        profile = cProfile.Profile()
        profile.runcall(next(iter(runs.values())).milliseconds, given.ticks)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, serving in runs.items():
            rounds[name].append(serving.milliseconds(given.ticks))
    record: dict[str, Any] = {**provenance(), "rows": given.rows, "ticks": given.ticks, "milliseconds_a_tick": {}}
    for name, found in rounds.items():
        medians = {part: round(statistics.median(each[part] for each in found), 4) for part in found[0]}
        record["milliseconds_a_tick"][name] = medians
        print(f"{name:27}" + "".join(f"  {part} {value:6.3f} ms" for part, value in medians.items()))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
