"""Whether the JAX backend on a GPU computes what it should, in the type it computes in there.

    python benchmarks/gpu_check.py --commit COMMIT [--json FILE] [--device cuda] [--gguf FILE] [SECTION ...]

Random weights of published shapes, cut to few layers of full width. Sections: reference (greedy, against
reference-numpy in float32), same (level R0: other slots, neighbours, storage, run-ahead), deterministic (level R1:
batch, chunk, prompt cache, storage, preemption), nan (a weight that is none is an error of its row), golden (the
default model against the greedy streams of another program; only with --gguf). Exits with 1 when a row says `wrong`, or
a section failed. --small runs toys, --dtype another type: to see that the script works.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from random_engines import Bench, Setup, device_facts, open_engine, prepare_jax
from section_record import Rows, SectionRecord
from witness import Seen, Witness, WitnessSampler, alone, difference, seen

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.errors import NumericFault
from mlxcel.testing.random_checkpoint import RandomCheckpoint
from mlxcel_reference_numpy.backend import NumpyBackend

SECTIONS = ("reference", "same", "deterministic", "nan", "golden")
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
    crowd: int = 32
    long: int = 2200  # tokens of a prompt that is cut at both chunks
    chunks: tuple[int, int] = (512, 2048)
    small: bool = False


SMALL = Sizes(
    layers=(("llama-3.2-1b", 1), ("qwen3-0.6b", 2)), prompts=(3, 33), steps=4, same=("llama-3.2-1b", 1),
    deterministic=(("llama-3.2-1b", 1),), crowd=10, long=300, chunks=(128, 256), small=True,
)  # fmt: skip


class Checks:
    """The sections; each gives its rows one by one."""

    def __init__(self, sizes: Sizes, make: Any, device: str, dtype: str, gguf: Path | None) -> None:
        self.sizes, self._make, self._device, self._dtype, self._gguf = sizes, make, device, dtype, gguf

    def engine(self, setup: Setup, checkpoint: Checkpoint | None = None) -> Bench:
        backend = self._make(device=self._device, dtype=self._dtype, deterministic=setup.deterministic)
        return open_engine(setup, Witness(backend), sampler=WitnessSampler, checkpoint=checkpoint)

    # --- against the reference ----------------------------------------------------------------------------------------

    def reference(self) -> Rows:
        for shape, layers in self.sizes.layers:
            context = max(self.sizes.prompts) + self.sizes.steps + 2
            setup = Setup(shape, 1, context, layers=layers, small=self.sizes.small)
            tested = self.engine(setup)
            known = open_engine(setup, Witness(NumpyBackend()), sampler=WitnessSampler)
            for length in self.sizes.prompts:
                yield {"shape": shape, "layers": layers, "prompt": length, **self._followed(tested, known, length)}
            tested.close()
            known.close()

    def _followed(self, tested: Bench, known: Bench, length: int) -> dict[str, Any]:
        """Greedy behind one prompt. Where the tested engine takes another id it begins again behind the reference's."""
        prompt, steps = known.ids(length, length), self.sizes.steps
        wanted = alone(known, prompt, steps)
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
        bound = ROUNDING[tested.engine.caps.dtype] * math.sqrt(ROUNDINGS_OF_A_LAYER * known.schema.layers + 1)
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
        dense.close()
        paged = self.engine(attrs.evolve(setup, storage="paged"))
        fresh = self.engine(setup)
        for length in (5, 70, 130):
            ids = fresh.ids(length, length)
            ways = {"paged": partial(self._beside, paged, ids, before=2, behind=1)}
            yield from self._compare(setup, length, alone(fresh, ids, self.sizes.steps), ways)
        paged.close()
        fresh.close()

    def deterministic(self) -> Rows:
        """R1: any batch, any chunk, hit or miss, dense or paged, preempted or not."""
        sizes, (small, large) = self.sizes, self.sizes.chunks
        for shape, layers in sizes.deterministic:
            setup = Setup(shape, sizes.crowd, sizes.long + 128, "dense", True, small, layers, sizes.small)
            benches = {name: self.engine(attrs.evolve(setup, storage=name)) for name in ("dense", "paged")}
            dense, paged, half = benches["dense"], benches["paged"], sizes.crowd // 2
            for length in (5, sizes.long):
                ids = dense.ids(length, length)
                lone = alone(dense, ids, sizes.steps)
                ways: dict[str, Callable[[], Seen]] = {
                    "again": partial(alone, dense, ids, sizes.steps),
                    "one of 8": partial(self._beside, dense, ids, before=3, behind=4),
                    f"one of {sizes.crowd}": partial(self._beside, dense, ids, before=half, behind=half - 1),
                    f"chunk of {large}": partial(alone, dense, ids, sizes.steps, chunk=large),
                    "paged": partial(alone, paged, ids, sizes.steps),
                    "paged, one of 8": partial(self._beside, paged, ids, before=3, behind=4),
                    "preempted": partial(self._preempted, paged, ids),
                }
                if length > small:
                    ways["a prompt cache hit"] = partial(self._hit, paged, ids)
                yield from self._compare(setup, length, lone, ways)
            for bench in benches.values():
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
        bench = self.engine(setup, _Spoilt(setup.checkpoint()))
        try:
            bench.begin(bench.ids(20, 1))
            said = "no error"
        except NumericFault as error:
            said = error.message
        bench.close()
        yield {"shape": shape, "layers": layers, "said": said, "wrong": said == "no error"}

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
    parser.add_argument("--seconds", type=float, default=180.0)
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
    for section in given.sections or SECTIONS:
        record.take(section, getattr(checks, section)())
    wrong = sum(row.get("wrong", False) for rows in record.found["sections"].values() for row in rows)
    print(f"wrong: {wrong}")
    record.end(wrong)


if __name__ == "__main__":
    main()
