"""Greedy against what is computed elsewhere: reference-numpy in float32, and streams of another program.

The bound of `reference`. Rounding to the nearest value of n bits leaves an error that is spread evenly over one step;
relative to values whose logarithm is spread evenly its root mean square is r = 0.425 * 2**-n. That is 1.66e-3 for
bfloat16 (n = 8), and what one rounding of a product was measured to leave. Errors of different places are independent,
so that squares add up.

A relative error of q, or of k, moves a score by as much, and so a softmax's weight by that part of itself. The output
of attention then has the errors of: the norm, three times (v, q, k), q, k, their turns, the weights, v, the mix, the
output: A = 11. That of the MLP: the norm twice (gate, up), gate, up, their product, the output: M = 6. Fused steps
round less, a head when it is turned and gates never: A = 8 (the norm three times, q, k, the weights, v, the mix), M = 3
(the norm twice, the product).

An error e of the residual stream enters the MLP by two of these ways, gate and up: its output has 2 e^2 + M r^2. The
embeddings, of random weights, are small beside what layers add to them, and the mix of many values is small beside the
output of an MLP. So the first MLP gets all that attention's output has, e^2 = A r^2, and what it gives is the stream
behind layer 1: e(1)^2 = (2 A + M) r^2. Behind layer l the stream is the sum of l such outputs, of about the same size:
e(l)^2 = ((l - 1) e(l - 1)^2 + 2 e(l - 1)^2 + M r^2) / l, which is ((A + M) l + A) r^2. With the norm before the head,
the error of the logits relative to their spread s is e = r sqrt((A + M) L + A + 1) for L layers: no prompt may be above
that in the mean over its steps. Short prompts, whose mix is not small, and more layers, whose attention has the same
tokens to look at again, are below it: with roundings put one by one into float64, 17 to 19 r^2 of 20 for a layer and
130 tokens, 7 of 20 for 3, 24 to 27 of 31 for two layers.

Where a step takes another id than the reference, the reference's gap between the two is at most the difference of the
errors of two logits, of standard deviation sqrt(2) e s; SIGMAS of them bound it over all candidates. In float32, on a
CPU, it is not these roundings that count but the order of the sums: a stated 2e-6 in the place of r.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from check_engines import Checks, Rows, Sizes
from random_engines import Bench, Setup, open_engine
from witness import Seen, Witness, WitnessSampler, alone, decode

from mlxcel.config import set_variables
from mlxcel_reference_numpy.backend import NumpyBackend

REFERENCES: Final = 2
"""Processes that compute the reference, with THREADS each, behind the one that is checked but not at the very end: on a
machine whose cores are all busy that would be for ever."""
THREADS: Final = "4"
NICE: Final = 5
ROUNDING: Final = {"bfloat16": 1.66e-3, "float32": 2e-6}
ROUNDINGS: Final = {"op by op": (11, 6), "fused": (8, 3)}
"""Of attention and of an MLP, as far as their outputs have them: A and M."""
SIGMAS: Final = 6
"""Of a normal value, passed once in 5e8: a run compares about 1e8 pairs."""
GOLDEN: Final = Path(__file__).parent.parent / "tests" / "data" / "golden" / "smollm2-135m.json"


def error_bound(bench: Bench) -> float:
    """Of logits against float32, relative to their spread."""
    caps = bench.engine.caps
    fused = caps.platform == "cuda" and caps.level == "R2"  # of a GPU it is the level of fused steps alone
    attention, mlp = ROUNDINGS["fused" if fused else "op by op"]
    return ROUNDING[caps.dtype] * math.sqrt((attention + mlp) * bench.schema.layers + attention + 1)


def gap_bound(bench: Bench) -> float:
    """Of another id's logit to the best one, relative to the spread of all."""
    return SIGMAS * math.sqrt(2) * error_bound(bench)


def relative_error(mine: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((mine - exact) ** 2))) / float(exact.std())


class Known:
    """What the reference says, worked out by other processes from now on."""

    def __init__(self, sizes: Sizes) -> None:
        set_variables({}, unless_set={"OPENBLAS_NUM_THREADS": THREADS})
        self._pool = multiprocessing.get_context("spawn").Pool(REFERENCES, initializer=partial(os.nice, NICE))
        self._rows = {
            setup: self._pool.apply_async(known_rows, (setup, sizes.prompts, sizes.steps)) for setup in setups(sizes)
        }

    def rows(self, setup: Setup) -> list[Seen]:
        found: list[Seen] = self._rows[setup].get()
        return found

    def end(self) -> None:
        """Nothing of those processes is left behind this one."""
        self._pool.terminate()
        self._pool.join()


def setups(sizes: Sizes) -> list[Setup]:
    context = max(sizes.prompts) + sizes.steps + 2
    return [Setup(shape, 1, context, layers=layers, small=sizes.small) for shape, layers in sizes.shapes]


def known_rows(setup: Setup, lengths: Sequence[int], steps: int) -> list[Seen]:
    """What the reference says behind prompts of these lengths."""
    known = open_engine(setup, Witness(NumpyBackend()), sampler=WitnessSampler)
    found = [alone(known, known.ids(length, length), steps) for length in lengths]
    known.close()
    return found


def reference(checks: Checks, known: Known | None = None) -> Rows:
    """What is not `known` is worked out meanwhile."""
    sizes = checks.sizes
    asked = known or Known(sizes)
    try:
        for setup in setups(sizes):
            tested = checks.engines(setup, sizes.rows[:1], sizes.tokens[:2])
            for length, wanted in zip(sizes.prompts, asked.rows(setup), strict=True):
                found = _followed(tested, wanted, length, sizes.steps)
                yield {"shape": setup.shape, "layers": setup.layers, "prompt": length, **found}
    finally:
        if known is None:
            asked.end()


def _followed(tested: Bench, wanted: Seen, length: int, steps: int) -> dict[str, Any]:
    """Greedy behind one prompt. Where the tested engine takes another id it begins again behind the reference's."""
    prompt = tested.ids(length, length)
    places, errors, gaps = [], [], []
    done = 0
    while done <= steps:
        found = alone(tested, [*prompt, *wanted.ids[:done]], steps - done)
        for mine, drew in zip(found.logits, found.ids, strict=True):
            theirs, best = wanted.logits[done], wanted.ids[done]
            errors.append(relative_error(mine, theirs))
            done += 1
            if drew != best:
                places.append(done - 1)
                gaps.append(float(theirs[best] - theirs[drew]) / float(theirs.std()))
                break
    bound, most = error_bound(tested), gap_bound(tested)
    wrong = float(np.mean(errors)) > bound or max(gaps, default=0.0) > most
    return {
        "error": float(np.mean(errors)), "error_most": max(errors), "error_bound": bound,
        "first_other_step": places[0] if places else None, "other_ids": len(places), "of": done,
        "gap_most": max(gaps, default=0.0), "gap_bound": most, "wrong": wrong,
    }  # fmt: skip


def golden(checks: Checks) -> Rows:
    """The default model against the greedy streams of another program: all prompts side by side, with the two programs
    of a step that they need."""
    if checks.gguf is None:
        yield {"skipped": "no --gguf"}
        return
    from mlxcel.plugins.formats.gguf import GgufCheckpoint

    cases = json.loads(GOLDEN.read_text())["cases"]
    setup = Setup("llama-3.2-1b", len(cases), 256)
    checkpoint = GgufCheckpoint(checks.gguf)
    bench = checks.engines(setup, checks.sizes.rows[:1], checks.sizes.tokens[:1], checkpoint=checkpoint)
    rows = [bench.begin(case["prompt_ids"]) for case in cases]
    decode(bench, rows, max(len(case["greedy_ids"]) for case in cases) - 1)
    for case, row in zip(cases, rows, strict=True):
        wanted, gaps = case["greedy_ids"], case["top2_gap"]
        ids = bench.engine.view(row).output
        place = next((n for n, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b), None)
        gap = 0.0 if place is None else float(gaps[place])
        logits = bench.backend.kept[row, len(case["prompt_ids"]) + (place or 0)]
        most = gap_bound(bench) * float(logits.std())
        yield {"case": case["id"], "first_other_step": place, "of": len(wanted), "gap": gap, "gap_bound": most,
               "wrong": gap > most}  # fmt: skip
    bench.close()
