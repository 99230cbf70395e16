"""How close decoding with the JAX backend comes to the memory's bandwidth, and what stands around the step.

    python benchmarks/decode.py --commit COMMIT [--json FILE] [--device cuda] [--seconds 480] [--shapes A,B] [SECTION …]

Random weights of published shapes, greedy, through the engine, one step ahead of what is read. A figure is the median
of rounds, after one that only compiles and warms; beside it the least and the greatest. GB/s are of the weights and the
KV that a step reads, at the mean length of the round; they stand beside what reading and copying came to in this
process (bandwidth.py): the best of the medians of all rounds from the first section to the last, so that shares are
stated anew behind each section, and the record and the table at the end have those that count.

Sections, in the order of the default run: start (from a fresh process to its first token, compiled programs cold and
warm), lone (one row, few keys; of some shapes many, and the first token of a long prompt), bare (the engine over its
own jitted step; launches), scheduler (over the engine), storage (paged against dense), deterministic (what it costs to
ask for it), batch (rows together), concurrency, fairness (by benchmarks/fairness.py). Each shape runs all of its
sections before the next one: its weights are read once, and the programs of an engine that its sections need are
compiled side by side before its first round. A section that fails is recorded with its error and the next one runs; a
figure that takes longer than ROW_SECONDS of section_record.py ends the process. What does not begin within --seconds is
left out, and named. The record is written after each figure, and a table of all of them ends the run.

--cache keeps compiled programs in a folder, for the next run on the same machine; --compile-only measures nothing, and
fills it: processes of several shapes can do that side by side, where figures want the machine for themselves. --small
runs toys: to see that the script works.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import bandwidth
import fresh_process
from random_engines import Bench, Engines, Setup, device_facts, prepare_jax
from section_record import Rows, SectionRecord
from served_rounds import crowd_served, served

SECTIONS = ("start", "lone", "bare", "scheduler", "storage", "deterministic", "batch", "concurrency", "fairness")
OF_THE_LONG = ("storage",)
"""Sections of the shapes that many keys are measured of."""
OF_THE_FIRST = ("bare", "scheduler", "deterministic", "concurrency", "fairness", "start")
"""Sections of one shape."""

FLOOR_OF_READ = {
    ("llama-3.2-1b", 1, 256): 0.50,
    ("llama-3.2-1b", 1, 8192): 0.47,
    ("qwen3-1.7b", 1, 256): 0.46,
    ("qwen3-1.7b", 1, 8192): 0.46,
    ("llama-3.1-8b", 1, 256): 0.70,
}
"""What may not be missed on an H200, by shape, rows and keys."""
GOAL_OF_READ = {
    ("llama-3.2-1b", 1, 256): 0.85,
    ("llama-3.2-1b", 1, 8192): 0.82,
    ("llama-3.2-1b", 8, 1024): 0.80,
    ("llama-3.2-1b", 32, 1024): 0.75,
    ("llama-3.2-1b", 128, 1024): 0.75,
    ("qwen3-1.7b", 1, 256): 0.85,
    ("qwen3-1.7b", 1, 8192): 0.80,
    ("qwen3-1.7b", 8, 1024): 0.80,
    ("qwen3-1.7b", 32, 1024): 0.78,
    ("qwen3-1.7b", 128, 1024): 0.80,
    ("qwen3-0.6b", 1, 256): 0.75,
    ("llama-3.1-8b", 1, 256): 0.88,
}
"""And what the step as one kernel is for."""
FIRST_TOKEN_MS = {"llama-3.2-1b": (60, 34), "qwen3-1.7b": (95, 48)}
"""Of a prompt of 8192 tokens: what may not be missed, and the goal."""
OVER_THE_FIRST = {
    "engine over bare step": 0.01, "scheduler over engine": 0.01, "paged over dense": 0.01, "8 rows over 1 rows": 0.08,
}  # fmt: skip
START_S = {"cold": 60, "warm": 10}

TABLE = (
    *("shape", "what", "form", "arm", "programs_are", "storage", "rows", "requests", "keys", "ms", "tok_per_s"),
    *("gb_per_s", "of_read", "over_the_first", "gap_p95_ms", "ttft_ms", "s"),
)
"""Columns of the table that ends the run."""

Side = tuple[Bench, Callable[[], float]]
"""An engine, and a round of it: seconds a step."""


@attrs.frozen
class Sizes:
    shapes: tuple[str, ...] = ("llama-3.2-1b", "qwen3-1.7b", "qwen3-0.6b", "llama-3.1-8b")
    long: tuple[str, ...] = ("llama-3.2-1b", "qwen3-1.7b")  # those that many keys are measured of
    first: str = "llama-3.2-1b"  # of the sections that take one shape
    few: int = 256  # keys
    many: int = 8192
    steps: int = 128  # of a round with one row
    batches: tuple[int, ...] = (1, 8, 32, 128)
    batch_keys: int = 1024
    batch_steps: int = 32
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    reply: int = 128
    rounds: int = 5
    read: tuple[int, ...] = bandwidth.SIZES
    moved: int = bandwidth.MOVED
    chunks: tuple[int, int] = (512, 2048)
    small: bool = False


SMALL = Sizes(
    shapes=("llama-3.2-1b", "llama-3.1-8b"), long=("llama-3.2-1b",), few=40, many=150, steps=4, batches=(1, 2, 9),
    batch_keys=40, batch_steps=2, clients=(1, 3), reply=4, rounds=2, read=(1 << 20, 1 << 19), moved=1 << 22,
    chunks=(64, 128), small=True,
)  # fmt: skip


class Run:
    """The sections, over the same engines. Each gives its figures one by one."""

    def __init__(self, sizes: Sizes, device: str, make: Any) -> None:
        self.sizes, self.device = sizes, device
        self.engines = Engines(make, device)
        self._bandwidth: bandwidth.Bandwidth | None = None

    # --- engines ------------------------------------------------------------------------------------------------------

    def setups(self, section: str, shape: str) -> list[Setup]:
        """Of the engines that a section asks for."""
        lone = self.lone_setup(shape)
        return {
            "start": [],
            "storage": [attrs.evolve(lone, storage=storage) for storage in ("dense", "paged")],
            "deterministic": [attrs.evolve(lone, deterministic=asked) for asked in (False, True)],
            "batch": [self.crowd_setup(shape)],
            "concurrency": [self.crowd_setup(shape)],
            "fairness": [self.fair_setup(shape)],
        }.get(section, [lone])

    def lone_setup(self, shape: str) -> Setup:
        """One row of the longest prompt, and a round behind it; prompts are pieces of one width."""
        sizes = self.sizes
        many = shape in sizes.long
        context, piece = (sizes.many if many else sizes.few) + 2 * sizes.steps, sizes.chunks[many]
        return Setup(shape, 1, context, chunk=sizes.chunks[1], small=sizes.small, pieces=(piece,))

    def crowd_setup(self, shape: str) -> Setup:
        """As a server has it: paged."""
        sizes = self.sizes
        slots, grown = max(*sizes.batches, *sizes.clients), (sizes.rounds + 1) * sizes.batch_steps
        context = max(sizes.batch_keys + grown, sizes.few + sizes.steps)
        pieces = tuple(sorted({64, sizes.chunks[0]} if shape == sizes.first else {sizes.chunks[0]}))
        return Setup(shape, slots, context, "paged", chunk=sizes.chunks[1], small=sizes.small, pieces=pieces)

    def fair_setup(self, shape: str) -> Setup:
        import fairness

        return attrs.evolve(self.lone_setup(shape), slots=fairness.ROWS + 1, storage="paged", pieces=None)

    def compiled(self, section: str, shape: str) -> Rows:
        """The engines of a section are opened, and nothing is measured."""
        for setup in self.setups(section, shape):
            began = time.perf_counter()
            self.engines(setup)
            yield {"shape": shape, "storage": setup.storage, "rows": setup.slots, "s": time.perf_counter() - began}

    # --- bandwidth ----------------------------------------------------------------------------------------------------

    @property
    def gb_per_s(self) -> dict[str, float]:
        return {} if self._bandwidth is None else self._bandwidth.gb_per_s

    def measure_bandwidth(self) -> Rows:
        """GB/s of reading, of a copy word by word, and of the runtime's own copy of an array, by each form."""
        self._bandwidth = found = bandwidth.on_this_device(self.sizes.read, self.sizes.moved)
        for _ in range(self.sizes.rounds):
            found.round()
        yield from found.rows

    def measure_again(self, record: SectionRecord) -> None:
        """One more round, by which every share of the record is stated anew."""
        if self._bandwidth is None:
            return
        self._bandwidth.round()
        for rows in record.found["sections"].values():
            for row in rows:
                if "mb" in row:
                    row.update(self._shares(row))
        record.put("bandwidth", self._bandwidth.rows)

    # --- sections -----------------------------------------------------------------------------------------------------

    def lone(self, shape: str) -> Rows:
        bench, many = self.engines(self.lone_setup(shape)), shape in self.sizes.long
        for keys in (self.sizes.few, self.sizes.many) if many else (self.sizes.few,):
            yield self._step(bench, 1, keys, self._rounds(partial(self._decode, bench, keys)))
        if many:
            yield self._first_token(bench)

    def bare(self, shape: str) -> Rows:
        from bare_step import BareStep

        bench, few, steps = self.engines(self.lone_setup(shape)), self.sizes.few, self.sizes.steps
        step = BareStep(bench, [bench.begin(bench.ids(few, 1))])
        bench.close_rows()
        sides: dict[str, Side] = {
            "bare step": (bench, lambda: step.seconds(steps)),
            "engine": (bench, partial(self._decode, bench, few)),
        }
        yield from self._compared(sides, few)
        kinds = step.launches()
        count = sum(kinds.values())
        yield {
            "shape": bench.setup.shape, "what": "launches of the forward", "launches": count,
            "launches_a_layer": count / bench.schema.layers, "kinds": kinds,
        }  # fmt: skip

    def scheduler(self, shape: str) -> Rows:
        bench, few, steps = self.engines(self.lone_setup(shape)), self.sizes.few, self.sizes.steps
        sides: dict[str, Side] = {
            "engine": (bench, partial(self._decode, bench, few)),
            # The first token is the prompt's.
            "scheduler": (bench, lambda: mean_step(served(bench, few - steps // 2, steps + 1)[1:])),
        }
        yield from self._compared(sides, few)

    def batch(self, shape: str) -> Rows:
        """Each count of rows at the same keys, over the first."""
        bench = self.engines(self.crowd_setup(shape))
        first, *_ = counts = self.sizes.batches
        base = 0.0
        for count in counts:
            found = self._crowd(bench, count)
            base = base or found["ms"]
            over, goal = found["ms"] / base - 1, OVER_THE_FIRST.get(f"{count} rows over {first} rows")
            yield {"over_the_first": over, **found, **_goal("over_the_first", goal, partial(operator.le, over))}

    def storage(self, shape: str) -> Rows:
        benches = {setup.storage: self.engines(setup) for setup in self.setups("storage", shape)}
        for keys in (self.sizes.few, self.sizes.many):
            sides = {name: (bench, partial(self._decode, bench, keys)) for name, bench in benches.items()}
            yield from self._compared(sides, keys)

    def concurrency(self, shape: str) -> Rows:
        bench = self.engines(self.crowd_setup(shape))
        for count in self.sizes.clients:
            rates = [crowd_served(bench, count, self.sizes.reply) for _ in range(self.sizes.rounds + 1)][1:]
            whole, decoding = ([each[place] for each in rates] for place in (0, 1))
            yield {
                "shape": bench.setup.shape, "requests": count, "tok_per_s": statistics.median(whole),
                "tok_per_s_range": _range(whole), "decoding_tok_per_s": statistics.median(decoding),
            }  # fmt: skip

    def fairness(self, shape: str) -> Rows:
        """One long prompt while rows decode."""
        import fairness

        small, large = self.sizes.chunks
        bench = self.engines(self.fair_setup(shape))
        side = fairness.Side(bench.engine, time.perf_counter, lambda: None)
        for arm in (
            fairness.Arm(f"chunk {small}", small, None),
            fairness.Arm(f"chunk {large}", large, None),
            fairness.Arm("adaptive", large, small),
        ):
            each = [fairness.measure(side, arm, self.sizes.many) for _ in range(self.sizes.rounds + 1)][1:]
            medians = {name: statistics.median(figures[name] for figures in each) for name in each[0]}
            yield {"shape": bench.setup.shape, "arm": arm.name, **medians}

    def deterministic(self, shape: str) -> Rows:
        """What asking for it costs: R1, or nothing where the engine is above it anyway."""
        few, sides = self.sizes.few, {}
        for setup in self.setups("deterministic", shape):
            bench = self.engines(setup)
            name = f"{'asked for' if setup.deterministic else 'not asked for'}: {bench.engine.level}"
            sides[name] = (bench, partial(self._decode, bench, few))
        yield from self._compared(sides, few)

    def start(self, shape: str) -> Rows:
        self.engines.close()
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                found = fresh_process.seconds(self.lone_setup(shape), self.device, Path(folder))
                yield {
                    "shape": shape,
                    "programs_are": state,
                    **found,
                    **_goal("s", START_S[state], partial(operator.le, found["s"])),
                }

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _rounds(self, once: Callable[[], float]) -> list[float]:
        return [once() for _ in range(self.sizes.rounds + 1)][1:]

    def _decode(self, bench: Bench, keys: int) -> float:
        """A row of its own whose lengths lie around `keys`."""
        row = bench.begin(bench.ids(keys - self.sizes.steps // 2, 1))
        seconds = mean_step(bench.decode([row], self.sizes.steps))
        bench.close_rows()
        return seconds

    def _crowd(self, bench: Bench, count: int) -> dict[str, Any]:
        """All rows begin together and grow through the rounds, those that count around the keys that are stated."""
        steps, keys = self.sizes.batch_steps, self.sizes.batch_keys
        length = keys - steps - self.sizes.rounds * steps // 2
        rows = [bench.begin(bench.ids(length, place), chunk=self.sizes.chunks[0]) for place in range(count)]
        seconds = self._rounds(lambda: mean_step(bench.decode(rows, steps)))
        bench.close_rows()
        return self._step(bench, count, keys, seconds)

    def _first_token(self, bench: Bench) -> dict[str, Any]:
        prompt = bench.ids(self.sizes.many, 1)

        def once() -> float:
            began = time.perf_counter()
            bench.begin(prompt)
            took = time.perf_counter() - began
            bench.close_rows()
            return took

        seconds = self._rounds(once)
        middle = statistics.median(seconds)
        floor, goal = FIRST_TOKEN_MS.get(bench.setup.shape, (None, None)) if len(prompt) == 8192 else (None, None)
        return {
            "shape": bench.setup.shape, "what": f"first token of {len(prompt)}", "ms": 1e3 * middle,
            "ms_range": _range([1e3 * value for value in seconds]), "prompt_tok_per_s": len(prompt) / middle,
            **_goal("ms_floor", floor, partial(operator.le, 1e3 * middle)),
            **_goal("ms", goal, partial(operator.le, 1e3 * middle)),
        }  # fmt: skip

    def _step(self, bench: Bench, rows: int, keys: int, seconds: Sequence[float]) -> dict[str, Any]:
        step, size = statistics.median(seconds), bench.step_bytes(rows, keys)
        found = {
            "shape": bench.setup.shape, "storage": bench.setup.storage, "rows": rows, "keys": keys, "ms": 1e3 * step,
            "ms_range": _range([1e3 * value for value in seconds]), "tok_per_s": rows / step,
            "gb_per_s": size / step / 1e9, "mb": size / 1e6,
        }  # fmt: skip
        return {**found, **self._shares(found)}

    def _shares(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Of what the memory gives, as far as that is known by now."""
        shares = {f"of_{name.replace(' ', '_')}": row["gb_per_s"] / most for name, most in self.gb_per_s.items()}
        if not shares:
            return {}
        case, reached = (row["shape"], row["rows"], row["keys"]), partial(operator.ge, shares["of_read"])
        floor, goal = _goal("of_read_floor", FLOOR_OF_READ.get(case), reached), GOAL_OF_READ.get(case)
        return {**shares, **floor, **_goal("of_read", goal, reached)}

    def _compared(self, sides: Mapping[str, Side], keys: int) -> Rows:
        """Rounds of all sides in turn; how much longer each takes than the first, round by round."""
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(self.sizes.rounds + 1):
            for name, (_, once) in sides.items():
                seconds[name].append(once())
        first = next(iter(seconds))
        for name, values in seconds.items():
            ratios = [value / base for value, base in zip(values[1:], seconds[first][1:], strict=True)]
            over, goal = statistics.median(ratios) - 1, OVER_THE_FIRST.get(f"{name} over {first}")
            figures = self._step(sides[name][0], 1, keys, values[1:])
            yield {
                "what": name, "over_the_first": over, **figures,
                **_goal("over_the_first", goal, partial(operator.le, over)),
            }  # fmt: skip


def _goal(name: str, goal: float | None, met: Callable[[float], bool]) -> dict[str, Any]:
    """What is asked of a figure, and whether it holds; nothing where nothing is asked."""
    return {} if goal is None else {f"{name}_goal": goal, f"{name}_met": met(goal)}


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def mean_step(moments: Sequence[float]) -> float:
    """Seconds of a token behind the first ones. Those of one call come together: what the first call brought is where
    the time begins, and no part of what is counted."""
    mean = (moments[-1] - moments[0]) / (len(moments) - 1)
    began = next(place for place, gap in enumerate(pairwise(moments)) if gap[1] - gap[0] >= mean / 2)
    return (moments[-1] - moments[began]) / (len(moments) - 1 - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", type=lambda text: text.split(","), help="those alone, with a comma between them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    sizes = SMALL if given.small else Sizes()
    shapes = given.shapes or sizes.shapes
    unknown = [shape for shape in shapes if shape not in sizes.shapes]
    if unknown:
        parser.error(f"no shape {', '.join(unknown)}; there are {', '.join(sizes.shapes)}")
    run = Run(sizes, given.device, prepare_jax(given.device, given.cache))
    record = SectionRecord(device_facts(given.commit), given.json, given.seconds)
    if not given.compile_only:
        record.take("bandwidth", run.measure_bandwidth())
    for section, shape in planned(sizes, shapes, given.sections or SECTIONS):
        rows = run.compiled(section, shape) if given.compile_only else getattr(run, section)(shape)
        if not record.take(section, rows, words=f"{section} {shape}"):
            run.engines.close()
        run.measure_again(record)
    run.engines.close()
    record.table(TABLE)
    record.end()


def planned(sizes: Sizes, shapes: Sequence[str], sections: Sequence[str]) -> list[tuple[str, str]]:
    """(section, shape): all sections of a shape together, and fresh processes first, when no engine is open."""
    found = [
        (section, shape)
        for shape in shapes
        for section in dict.fromkeys(sections)
        if not (section in OF_THE_LONG and shape not in sizes.long)
        and not (section in OF_THE_FIRST and shape != sizes.first)
    ]
    return sorted(found, key=lambda each: each[0] != "start")


if __name__ == "__main__":
    main()
