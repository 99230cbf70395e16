"""Whether the JAX backend on a GPU computes what it should, in the type it computes in there.

    python benchmarks/gpu_check.py --commit COMMIT [--json FILE] [--device cuda] [--gguf FILE] [SECTION ...]

Random weights of published shapes, cut to few layers of full width. Sections, each within its share of the time
(SECONDS), behind which none of its rows begins:

- golden: the default model against the greedy streams of another program; only with --gguf
- nan: a weight that is none is an error of its row, which names the layer where somebody looks
- same: level R0, other slots, neighbours, storage, run-ahead
- deterministic: level R1, batch, slots, chunk, prompt cache, storage, preemption
- r2: the same without being asked for, in larger company, two models in turns
- widths: batches of 1 to 128 rows and pieces of 1 to 300 tokens, each token as it is alone
- products: the same of every weight by itself, compared on the device
- schedules: 64 random schedules of rows that come and go, greedy and sampled; --schedule N runs one again
- steps: 10,000 steps of a batch that changes, without a hang
- context: a prompt of nearly 32k tokens in other chunks, and against float32
- reference: greedy, against reference-numpy in float32, which other processes work out meanwhile; its bound is derived
  in check_reference.py

Exits with 1 when a row says `wrong`, or a section failed. An engine has the programs alone that its check runs, and
sections that want the same one share it. --small runs toys, --dtype another type: to see that the script works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
from check_bits import deterministic, r2, same, widths
from check_crowds import schedules, steps
from check_engines import SMALL, CheckEngines, Checks, Rows, Sizes
from check_long import context
from check_products import products
from check_reference import Known, golden, reference
from random_engines import Setup, device_facts, prepare_jax
from section_record import SectionRecord

from mlxcel.errors import NumericFault
from mlxcel.testing.random_checkpoint import RandomCheckpoint

TABLE: Final = ("shape", "case", "prompt", "way", "error", "error_bound", "first_other_step", "of", "differs", "wrong")
"""Columns of the table that ends the run."""


def nan(checks: Checks) -> Rows:
    sizes = checks.sizes
    shape, layers = sizes.shapes[0]
    setup = Setup(shape, 1, 256, layers=layers, small=sizes.small)
    layer = f"; first not finite in layer {setup.checkpoint().config['num_hidden_layers'] - 1}"
    for watched in (False, True):
        spoilt: Any = _Spoilt(setup.checkpoint())
        bench = checks.engines(setup, sizes.rows[:1], sizes.tokens[:1], checkpoint=spoilt, watched=watched)
        try:
            bench.begin(bench.ids(20, 1))
            said = "no error"
        except NumericFault as error:
            said = error.message
        bench.close()
        wrong = said == "no error" or (layer in said) is not watched
        yield {"shape": shape, "layers": layers, "watched": watched, "said": said, "wrong": wrong}


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


def quick_compiling() -> None:
    """Of toys, which take nearly all of their time to compile."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)  # type: ignore[no-untyped-call]


SECTIONS: Final[dict[str, Callable[[Checks], Rows]]] = {
    section.__name__: section
    for section in (golden, nan, same, deterministic, r2, widths, products, schedules, steps, context, reference)
}
SECONDS: Final = {
    "golden": 60, "nan": 40, "same": 60, "deterministic": 110, "r2": 110, "widths": 90, "products": 100,
    "schedules": 110, "steps": 60, "context": 90, "reference": 100,
}  # fmt: skip
SECONDS_IN_ALL: Final = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, help="for all; what the sections' shares leave of them is shared too")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of schedules and steps")
    parser.add_argument("--schedule", type=int, action="append", default=[], help="these schedules alone")
    parser.add_argument("--model", action="append", default=[], help="these models alone")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    chosen = [name for name in SECTIONS if name in (given.sections or SECTIONS)]
    if given.schedule:
        chosen = ["schedules"]
    sizes = SMALL if given.small else Sizes()
    if given.model:
        shapes = tuple(shape for shape in sizes.shapes if shape[0] in given.model)
        if not shapes:
            parser.error(f"no model {', '.join(given.model)}; there are {', '.join(name for name, _ in sizes.shapes)}")
        sizes = attrs.evolve(sizes, shapes=shapes, bits=len(shapes))
    backend = prepare_jax(given.device, given.cache)
    if given.small:
        quick_compiling()
    engines = CheckEngines(backend, given.device, given.dtype)
    checks = Checks(sizes, engines, given.gguf, given.seed, tuple(given.schedule))
    seconds = SECONDS_IN_ALL if given.seconds is None else given.seconds
    record = SectionRecord({**device_facts(given.commit), "seed": str(given.seed)}, given.json, seconds)
    record.found["starts"] = engines.starts
    sections = dict(SECTIONS)
    known = None
    if "reference" in chosen:
        known = Known(sizes)
        sections["reference"] = partial(reference, known=known)
    shares = sum(SECONDS[name] for name in chosen)
    more = 1.0 if given.seconds is None else max(1.0, seconds / shares)
    for name in chosen:
        record.take(name, sections[name](checks), seconds=more * SECONDS[name])
    if known is not None:
        known.end()
    engines.close()
    record.table(TABLE)
    wrong = sum(row.get("wrong", False) for rows in record.found["sections"].values() for row in rows)
    print(f"wrong: {wrong}")
    record.end(wrong)


if __name__ == "__main__":
    main()
