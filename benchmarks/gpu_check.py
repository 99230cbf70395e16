"""Whether the JAX backend on a GPU computes what it should, in the type it computes in there.

    python benchmarks/gpu_check.py --commit COMMIT [--json FILE] [--device cuda] [--gguf FILE] [SECTION ...]

Random weights of published shapes, cut to few layers of full width. Sections: golden (the default model against the
greedy streams of another program; only with --gguf), nan (a weight that is none is an error of its row, which names the
layer where somebody looks), same (level R0: other slots, neighbours, storage, run-ahead), deterministic (level R1:
batch, slots, chunk, prompt cache, storage, preemption), r2 (the same without being asked for, and in larger company),
reference (greedy, against reference-numpy in float32, which
other processes work out meanwhile). None takes more than its share of the time (SECONDS). Exits with 1 when a row says
`wrong`, or a section failed. --small runs toys, --dtype another type: to see that the script works.

The bound of `reference`. Rounding to the nearest value of n bits leaves an error that is spread evenly over one step;
relative to values whose logarithm is spread evenly its root mean square is r = 0.425 * 2**-n. That is 1.66e-3 for
bfloat16 (n = 8), and what one rounding of a product was measured to leave. Errors of different places are independent,
so that squares add up.

A relative error of q, or of k, moves a score by as much, and so a softmax's weight by that part of itself. The output
of attention then has the errors of: the norm, three times (v, q, k), q, k, their turns, the weights, v, the mix, the
output: 11. That of the MLP: the norm twice (gate, up), gate, up, their product, the output: 6. So a layer adds 17 r^2.
An error e of the residual stream enters a branch by two or three of these ways; with two, the branch has 2 e^2 + 17
r^2. The stream behind layer l is the sum of l such branches, of about the same size: e(l)^2 = ((l - 1) e(l - 1)^2 + 2
e(l - 1)^2 + 17 r^2) / l, which is 17 l r^2. With the norm before the head, the error of the logits relative to their
spread s is e = r sqrt(17 L + 1) for L layers: no prompt may be above that in the mean over its steps.

Where a step takes another id than the reference, the reference's gap between the two is at most the difference of the
errors of two logits, of standard deviation sqrt(2) e s; SIGMAS of them bound it over all candidates. In float32, on a
CPU, it is not these roundings that count but the order of the sums: a stated 2e-6 in the place of r.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from random_engines import Bench, Setup, device_facts, open_engine, prepare_jax
from section_record import Rows, SectionRecord
from witness import Seen, Witness, WitnessSampler, alone, difference, seen

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.source import NoProgress
from mlxcel.errors import NumericFault
from mlxcel.testing.random_checkpoint import RandomCheckpoint
from mlxcel_reference_numpy.backend import NumpyBackend

SECONDS: Final = {"golden": 40, "nan": 30, "same": 50, "deterministic": 100, "r2": 110, "reference": 100}
"""Of each section, behind which none of its rows begins."""
SECTIONS: Final = tuple(SECONDS)
TABLE: Final = ("shape", "case", "prompt", "way", "error", "error_bound", "first_other_step", "of", "wrong")
"""Columns of the table that ends the run."""
REFERENCES: Final = 2
"""Processes that compute the reference. More would take the cores of the one that is checked."""
ROUNDING: Final = {"bfloat16": 1.66e-3, "float32": 2e-6}
ROUNDINGS_OF_A_LAYER: Final = 17
SIGMAS: Final = 6
"""Of a normal value, passed once in 5e8: a run compares about 1e8 pairs."""
GOLDEN: Final = Path(__file__).parent.parent / "tests" / "data" / "golden" / "smollm2-135m.json"


@attrs.frozen
class Sizes:
    layers: tuple[tuple[str, int], ...] = (
        ("llama-3.2-1b", 2),
        ("qwen3-1.7b", 2),
        ("qwen3-0.6b", 4),
        ("llama-3.1-8b", 1),
    )
    prompts: tuple[int, ...] = (3, 33, 130)
    steps: int = 16
    same: tuple[str, int] = ("llama-3.2-1b", 2)
    deterministic: tuple[tuple[str, int], ...] = (("llama-3.2-1b", 2), ("qwen3-1.7b", 2))
    r2: tuple[tuple[str, int], ...] = (("llama-3.2-1b", 2), ("qwen3-1.7b", 1))
    crowd: int = 32
    crowds: tuple[int, ...] = (8, 32, 40)  # of `r2`: a launch of each width
    long: int = 2200  # tokens of a prompt that is cut at both chunks
    chunks: tuple[int, int] = (512, 2048)
    small: bool = False


SMALL = Sizes(
    layers=(("llama-3.2-1b", 1), ("qwen3-0.6b", 2)), prompts=(3, 33), steps=4, same=("llama-3.2-1b", 1),
    deterministic=(("llama-3.2-1b", 1),), r2=(("llama-3.2-1b", 1),), crowd=10, crowds=(8, 10),
    long=300, chunks=(128, 256), small=True,
)  # fmt: skip


class Checks:
    """The sections; each gives its rows one by one."""

    def __init__(self, sizes: Sizes, make: Any, device: str, dtype: str, gguf: Path | None) -> None:
        self.sizes, self._make, self._device, self._dtype, self._gguf = sizes, make, device, dtype, gguf
        self._pool: Any = None
        self._known: dict[Setup, Any] = {}

    def engine(
        self,
        setup: Setup,
        *,
        like: Bench | None = None,
        checkpoint: Checkpoint | None = None,
        watched: bool = False,
    ) -> Bench:
        """Its programs are compiled side by side."""
        backend = self._make(device=self._device, dtype=self._dtype, deterministic=setup.deterministic)
        if watched:
            backend.watch_numerics()
        bench = open_engine(setup, Witness(backend), sampler=WitnessSampler, checkpoint=checkpoint, like=like)
        backend.warm_up(NoProgress())
        return bench

    # --- against the reference ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let other processes begin with the reference, for `reference` to find."""
        self._pool = multiprocessing.get_context("spawn").Pool(REFERENCES)
        for setup in self._setups():
            asked = setup, self.sizes.prompts, self.sizes.steps
            self._known[setup] = self._pool.apply_async(known_rows, asked)

    def end(self) -> None:
        """Nothing of those processes is left behind this one."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None

    def _setups(self) -> list[Setup]:
        context, small = max(self.sizes.prompts) + self.sizes.steps + 2, self.sizes.small
        return [Setup(shape, 1, context, layers=layers, small=small) for shape, layers in self.sizes.layers]

    def reference(self) -> Rows:
        if self._pool is None:
            self.begin()
        for setup in self._setups():
            tested = self.engine(setup)
            for length, wanted in zip(self.sizes.prompts, self._known[setup].get(), strict=True):
                found = self._followed(tested, wanted, length)
                yield {"shape": setup.shape, "layers": setup.layers, "prompt": length, **found}
            tested.close()

    def _followed(self, tested: Bench, wanted: Seen, length: int) -> dict[str, Any]:
        """Greedy behind one prompt. Where the tested engine takes another id it begins again behind the reference's."""
        prompt, steps = tested.ids(length, length), self.sizes.steps
        places, errors, gaps = [], [], []
        done = 0
        while done <= steps:
            found = alone(tested, [*prompt, *wanted.ids[:done]], steps - done)
            for mine, drew in zip(found.logits, found.ids, strict=True):
                theirs, best = wanted.logits[done], wanted.ids[done]
                errors.append(float(np.sqrt(np.mean((mine - theirs) ** 2))) / float(theirs.std()))
                done += 1
                if drew != best:
                    places.append(done - 1)
                    gaps.append(float(theirs[best] - theirs[drew]) / float(theirs.std()))
                    break
        bound = ROUNDING[tested.engine.caps.dtype] * math.sqrt(ROUNDINGS_OF_A_LAYER * tested.schema.layers + 1)
        most = SIGMAS * math.sqrt(2) * bound
        wrong = float(np.mean(errors)) > bound or max(gaps, default=0.0) > most
        return {
            "error": float(np.mean(errors)), "error_most": max(errors), "error_bound": bound,
            "first_other_step": places[0] if places else None, "other_ids": len(places), "of": done,
            "gap_most": max(gaps, default=0.0), "gap_bound": most, "wrong": wrong,
        }  # fmt: skip

    # --- bits ---------------------------------------------------------------------------------------------------------

    def same(self) -> Rows:
        """R0: executables of the same shapes. Eight rows are one width of a decode."""
        shape, layers = self.sizes.same
        setup = Setup(shape, 8, 512, layers=layers, small=self.sizes.small)
        dense = self.engine(setup)
        for length in (5, 70, 130):
            ids = dense.ids(length, length)
            lone = alone(dense, ids, self.sizes.steps)
            ways: dict[str, Callable[[], Seen]] = {
                "again": partial(alone, dense, ids, self.sizes.steps),
                "another slot": partial(self._beside, dense, ids, before=5),
                "neighbours": partial(self._beside, dense, ids, before=3, behind=4),
                "read at once": partial(self._beside, dense, ids, ahead=False),
            }
            yield from self._compare(setup, length, lone, ways)
        paged = self.engine(attrs.evolve(setup, storage="paged"), like=dense)
        fresh = self.engine(setup, like=dense)
        for length in (5, 70, 130):
            ids = fresh.ids(length, length)
            ways = {"paged": partial(self._beside, paged, ids, before=2, behind=1)}
            yield from self._compare(setup, length, alone(fresh, ids, self.sizes.steps), ways)
        for bench in (dense, paged, fresh):
            bench.close()

    def deterministic(self) -> Rows:
        """R1: any batch, any chunk, hit or miss, dense or paged, preempted or not."""
        sizes, (small, large) = self.sizes, self.sizes.chunks
        for shape, layers in sizes.deterministic:
            setup = Setup(shape, sizes.crowd, sizes.long + 128, "dense", True, small, layers, sizes.small)
            dense, half = self.engine(setup), sizes.crowd // 2
            paged = self.engine(attrs.evolve(setup, storage="paged"), like=dense)
            single = self.engine(attrs.evolve(setup, slots=1), like=dense)
            for length in (5, sizes.long):
                ids = dense.ids(length, length)
                lone = alone(dense, ids, sizes.steps)
                ways: dict[str, Callable[[], Seen]] = {
                    "again": partial(alone, dense, ids, sizes.steps),
                    "one of 8": partial(self._beside, dense, ids, before=3, behind=4),
                    f"one of {sizes.crowd}": partial(self._beside, dense, ids, before=half, behind=half - 1),
                    f"chunk of {large}": partial(alone, dense, ids, sizes.steps, chunk=large),
                    "one slot": partial(alone, single, ids, sizes.steps),
                    "paged": partial(alone, paged, ids, sizes.steps),
                    "paged, one of 8": partial(self._beside, paged, ids, before=3, behind=4),
                    "preempted": partial(self._preempted, paged, ids),
                }
                if length > small:
                    ways["a prompt cache hit"] = partial(self._hit, paged, ids)
                yield from self._compare(setup, length, lone, ways)
            for bench in (dense, paged, single):
                bench.close()

    def r2(self) -> Rows:
        """R2 where nobody asked for it: what decodes in a launch of each width, and what a prompt's pieces compute."""
        sizes, (small, large) = self.sizes, self.sizes.chunks
        for shape, layers in sizes.r2:
            setup = Setup(shape, sizes.crowds[-1], sizes.long + 128, "paged", False, small, layers, sizes.small)
            paged = self.engine(setup)
            level = paged.engine.level
            yield {"shape": shape, "layers": layers, "level": level, "wrong": level != "R2"}
            dense = self.engine(attrs.evolve(setup, slots=1, storage="dense"), like=paged)
            for length in (5, sizes.long):
                ids = paged.ids(length, length)
                lone = alone(paged, ids, sizes.steps)
                ways: dict[str, Callable[[], Seen]] = {
                    f"one of {crowd}": partial(
                        self._beside, paged, ids, before=crowd // 2, behind=crowd - 1 - crowd // 2
                    )
                    for crowd in sizes.crowds
                }
                ways |= {
                    f"chunk of {large}": partial(alone, paged, ids, sizes.steps, chunk=large),
                    "dense": partial(alone, dense, ids, sizes.steps),
                    "preempted": partial(self._recomputed, paged, ids),
                }
                if length > small:
                    ways["a prompt cache hit"] = partial(self._hit, paged, ids)
                yield from self._compare(setup, length, lone, ways)
            for bench in (paged, dense):
                bench.close()

    def _compare(self, setup: Setup, length: int, lone: Seen, ways: dict[str, Callable[[], Seen]]) -> Rows:
        for way, run in ways.items():
            found = difference(lone, run())
            yield {"shape": setup.shape, "layers": setup.layers, "prompt": length, "way": way, "differs": found,
                   "wrong": bool(found)}  # fmt: skip

    def _beside(self, bench: Bench, ids: np.ndarray, *, before: int = 0, behind: int = 0, ahead: bool = True) -> Seen:
        """The row among others, which were opened before and behind it and take part in every step."""
        others = [bench.ids(7 + 3 * place, place) for place in range(before + behind)]
        rows = [bench.begin(other) for other in others[:before]]
        row = bench.begin(ids)
        rows = [*rows, row, *(bench.begin(other) for other in others[before:])]
        if ahead:
            bench.decode(rows, self.sizes.steps)
        else:
            for _ in range(self.sizes.steps):
                bench.engine.step(rows)
        found = seen(bench, row)
        bench.close_rows()
        bench.backend.kept.clear()
        return found

    def _preempted(self, bench: Bench, ids: np.ndarray) -> Seen:
        """Half the steps, then without its KV: the prompt by its pieces, and what was said by decodes."""
        row, steps = bench.begin(ids), self.sizes.steps
        bench.decode([row], steps // 2)
        bench.engine.preempt(row)
        bench.engine.prefill(row, bench.plan(ids, draw=False))
        while len(bench.engine.view(row).output) <= steps:
            (outcome,) = bench.engine.step([row])
            if outcome.error is not None:
                raise outcome.error
        return seen(bench, row)

    def _recomputed(self, bench: Bench, ids: np.ndarray) -> Seen:
        """The same, with what was said by pieces too."""
        row, steps = bench.begin(ids), self.sizes.steps
        bench.decode([row], steps // 2)
        known = [*ids, *bench.engine.view(row).output[:-1]]
        bench.engine.preempt(row)
        bench.engine.prefill(row, bench.plan(known, draw=False))
        bench.decode([row], steps - steps // 2)
        return seen(bench, row)

    def _hit(self, bench: Bench, ids: np.ndarray) -> Seen:
        """Behind the pieces that another row of the same prompt has computed."""
        engine, chunk = bench.engine, bench.setup.chunk
        first = bench.begin(ids)
        prefix = engine.share(first, len(ids))
        engine.close(first)
        length = (len(ids) - 1) // chunk * chunk
        row = engine.adopt(bench.spec(ids), prefix, length)
        engine.prefill(row, bench.plan(ids, length))
        bench.decode([row], self.sizes.steps)
        found = seen(bench, row)
        engine.release(prefix)
        bench.backend.kept.clear()
        return found

    # --- faults, and a real model -------------------------------------------------------------------------------------

    def nan(self) -> Rows:
        shape, layers = self.sizes.same
        setup = Setup(shape, 1, 256, layers=layers, small=self.sizes.small)
        layer = f"; first not finite in layer {setup.checkpoint().config['num_hidden_layers'] - 1}"
        for watched in (False, True):
            bench = self.engine(setup, checkpoint=_Spoilt(setup.checkpoint()), watched=watched)
            try:
                bench.begin(bench.ids(20, 1))
                said = "no error"
            except NumericFault as error:
                said = error.message
            bench.close()
            wrong = said == "no error" or (layer in said) is not watched
            yield {"shape": shape, "layers": layers, "watched": watched, "said": said, "wrong": wrong}

    def golden(self) -> Rows:
        if self._gguf is None:
            yield {"skipped": "no --gguf"}
            return
        from mlxcel.plugins.formats.gguf import GgufCheckpoint

        backend = self._make(device=self._device, dtype=self._dtype, deterministic=False)
        bench = open_engine(Setup("llama-3.2-1b", 1, 2048), Witness(backend), sampler=WitnessSampler,
                            checkpoint=GgufCheckpoint(self._gguf))  # fmt: skip
        bound = ROUNDING[bench.engine.caps.dtype] * math.sqrt(ROUNDINGS_OF_A_LAYER * bench.schema.layers + 1)
        for case in json.loads(GOLDEN.read_text())["cases"]:
            wanted, gaps = case["greedy_ids"], case["top2_gap"]
            found = alone(bench, case["prompt_ids"], len(wanted) - 1)
            place = next((n for n, (a, b) in enumerate(zip(found.ids, wanted, strict=True)) if a != b), None)
            gap = 0.0 if place is None else float(gaps[place])
            most = SIGMAS * math.sqrt(2) * bound * float(found.logits[place or 0].std())
            yield {"case": case["id"], "first_other_step": place, "of": len(wanted), "gap": gap, "gap_bound": most,
                   "wrong": gap > most}  # fmt: skip


def known_rows(setup: Setup, lengths: Sequence[int], steps: int) -> list[Seen]:
    """What the reference says behind prompts of these lengths."""
    known = open_engine(setup, Witness(NumpyBackend()), sampler=WitnessSampler)
    found = [alone(known, known.ids(length, length), steps) for length in lengths]
    known.close()
    return found


class _Spoilt:
    """A checkpoint with one value that is not a number, in the last layer's last matrix."""

    def __init__(self, checkpoint: RandomCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._name = max(name for name in checkpoint.tensors if name.endswith("mlp.down_proj.weight"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, name: str, out: np.ndarray | None = None) -> np.ndarray:
        values = self._checkpoint.read(name, out)
        if name == self._name:
            values[3, 5] = np.nan
        return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    sizes = SMALL if given.small else Sizes()
    checks = Checks(sizes, prepare_jax(given.device, given.cache), given.device, given.dtype, given.gguf)
    record = SectionRecord(device_facts(given.commit), given.json, given.seconds)
    chosen = [section for section in SECTIONS if section in (given.sections or SECTIONS)]
    if "reference" in chosen:
        checks.begin()
    for section in chosen:
        record.take(section, getattr(checks, section)(), seconds=SECONDS[section])
    checks.end()
    record.table(TABLE)
    wrong = sum(row.get("wrong", False) for rows in record.found["sections"].values() for row in rows)
    print(f"wrong: {wrong}")
    record.end(wrong)


if __name__ == "__main__":
    main()
