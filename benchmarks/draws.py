"""What the draw of a step takes on a GPU, and whether its narrow search draws what the wide one draws.

    python benchmarks/draws.py --commit COMMIT [--json FILE] [--device cuda] [--vocab 128256] [--rows 8,32,128]

Sets of stages as docs/sampling.md counts them: 1 is greedy, 2 the usual draw (temperature 0.8, top_k 40, top_p 0.95,
min_p 0.05), 3 the same by the search for any top_k. Logits stay on the device; a figure is the median of rounds of
CALLS draws, the last of which is waited for. Rows that `same` looks at: logits of a model's spread, of whole numbers
(ties everywhere), of one value, with most ids removed, and with one id alone. Exits with 1 where a token differs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from random_engines import device_facts, prepare_jax
from section_record import Rows, SectionRecord

from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import SamplingArrays
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.sampling.chain import ChainSampler

CALLS: Final = 20
ROUNDS: Final = 9
USUAL: Final = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
KINDS: Final = ("spread", "ties", "one value", "most removed", "one id")
TABLE: Final = ("rows", "set", "kind", "us", "us_range", "differ", "wrong")
"""Columns of the table that ends the run."""


class Draws:
    """Draws of R rows over logits [R, V]."""

    def __init__(self, vocab: int) -> None:
        self._vocab, self._sampler = vocab, ChainSampler(vocab=vocab)

    def arrays(self, rows: int, number: int) -> SamplingArrays:
        """Of a step whose rows ask for what a set has; each row has a seed of its own."""
        params = {"temperature": 0} if number == 1 else USUAL
        states = [
            self._sampler.open(SequenceSpec("row", np.zeros(1, np.int32), SamplingParams(seed=row, **params)))
            for row in range(rows)
        ]
        packed = self._sampler.pack(states, list(range(5, 5 + rows)), [False] * rows, closed=True)
        return packed if number < 3 else attrs.evolve(packed, stages=(*packed.stages, "far"))

    def logits(self, rows: int, kind: str) -> np.ndarray:
        rng = np.random.default_rng(rows)
        z = (rng.standard_normal((rows, self._vocab)) * 3).astype(np.float32)
        if kind == "ties":
            z = np.round(z)
        elif kind == "one value":
            z[:] = -1.25
        elif kind == "most removed":
            z[rng.random(z.shape) < 0.9995] = -np.inf
            z[:, self._vocab // 2] = 1.5
        elif kind == "one id":
            z[:] = -np.inf
            z[np.arange(rows), rng.integers(0, self._vocab, rows)] = 0.5
        return z

    def call(self, rows: int, number: int) -> Any:
        """A function from logits on the device to what was drawn."""
        import jax.numpy as jnp

        from mlxcel_jax_cuda.drawing import Asked, LastDrawn, draw

        asked = Asked.of(self._sampler, self.arrays(rows, number), np.arange(rows, dtype=np.int32))

        def run(logits: Any) -> Any:
            last = LastDrawn(jnp.zeros(rows + 1, jnp.int32), jnp.zeros(rows + 1, jnp.float32))
            for _ in range(CALLS):
                last, found = draw(asked.shape, logits, last, asked.buffer)
            return found.words

        return run

    def times(self, sizes: list[int]) -> Rows:
        import jax

        for rows in sizes:
            logits = jax.device_put(self.logits(rows, "spread"))
            for number in (1, 2, 3):
                run, seconds = self.call(rows, number), []
                for _ in range(ROUNDS + 1):
                    began = time.perf_counter()
                    jax.block_until_ready(run(logits))  # type: ignore[no-untyped-call]
                    seconds.append((time.perf_counter() - began) / CALLS)
                each = [1e6 * value for value in seconds[1:]]
                yield {"rows": rows, "set": number, "us": statistics.median(each), "us_range": [min(each), max(each)]}

    def same(self, sizes: list[int]) -> Rows:
        for rows in sizes:
            narrow, wide = self.call(rows, 2), self.call(rows, 3)
            for kind in KINDS:
                logits = self.logits(rows, kind)
                differ = int(np.sum(np.any(np.asarray(narrow(logits)) != np.asarray(wide(logits)), axis=0)))
                yield {"rows": rows, "kind": kind, "differ": differ, "wrong": differ > 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=lambda text: [int(rows) for rows in text.split(",")], default=[8, 32, 128])
    given = parser.parse_args()
    prepare_jax(given.device)
    draws = Draws(given.vocab)
    record = SectionRecord(device_facts(given.commit), given.json, given.seconds)
    record.take("same", draws.same(given.rows))
    record.take("times", draws.times(given.rows))
    record.table(TABLE)
    record.end(sum(row.get("wrong", False) for rows in record.found["sections"].values() for row in rows))


if __name__ == "__main__":
    main()
