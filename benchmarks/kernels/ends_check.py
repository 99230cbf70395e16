"""Whether each launch of a standard block's layer gives a token the same bits among many as among few, on the GPU.

    python ends_check.py [MODEL ...] [--tokens 512] [--widths 64,512] [--few 8]     # llama-3.2-1b unless named

Every launch by itself, on the same random inputs: by `HopperSteps`, 8 tokens at a time, and by `TiledSteps` for more.
Says of each thing that a launch gives how many values and tokens differ, and the first of them. Exits with 1 where any
does. mlxcel and mlxcel_jax_cuda must be importable.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from checklist import compile_all
from row_products_check import BLOCKS, random_weights

from mlxcel.core.family import StandardBlock
from mlxcel_jax_cuda.block_arrays import Shapes
from mlxcel_jax_cuda.kernels.row_products_sweep import draw
from mlxcel_jax_cuda.kernels.sizes import SMS
from mlxcel_jax_cuda.standard_hopper import HopperSteps
from mlxcel_jax_cuda.standard_steps import Carried, Rows, begin
from mlxcel_jax_cuda.standard_tiled import TiledSteps

PAGE_SIZE, VOCAB = 64, 4096
Parts = dict[str, Any]


class Inputs(NamedTuple):
    """Of `count` tokens: what every launch of a layer is given."""

    carried: Carried
    rows: Rows
    wide: Any  # [N, F / 2]: what down multiplies
    heads: Any  # [N, H d]: what o multiplies
    old: Any  # [D, N] float32

    def of(self, first: int, count: int) -> Inputs:
        def along(array: Any, axis: int) -> Any:
            return jax.lax.slice_in_dim(array, first, first + count, axis=axis)

        x, scaled, squares = self.carried
        cos, sin, page, place = self.rows
        return Inputs(
            Carried(along(x, 1), along(scaled, 0), along(squares, 1)),
            Rows(along(cos, 1), along(sin, 1), along(page, 0), along(place, 0)),
            along(self.wide, 0),
            along(self.heads, 0),
            along(self.old, 1),
        )


def inputs(block: StandardBlock, count: int) -> Inputs:
    embedded = draw(11, (count, block.hidden), 1.0)
    gain = 1 + 0.1 * draw(12, (block.hidden,), 1.0).astype(jnp.float32)
    positions = jnp.arange(count)
    angles = jnp.asarray(block.frequencies, jnp.float32)[:, None] * positions
    rows = Rows(
        jnp.cos(angles),
        jnp.sin(angles),
        (positions // PAGE_SIZE).astype(jnp.int32),
        (positions % PAGE_SIZE).astype(jnp.int32),
    )
    return Inputs(
        begin(embedded, gain, jnp.bfloat16),
        rows,
        draw(13, (count, block.ffn), 1.0),
        draw(14, (count, block.heads * block.head_dim), 1.0),
        draw(15, (block.hidden, count), 1.0).astype(jnp.float32),
    )


def launches(block: StandardBlock, steps: Any, pages: int) -> dict[str, Callable[..., Parts]]:
    """By name: weights, inputs -> what the launch gives, tokens first."""
    shapes, group = Shapes.of(block), block.heads // block.kv_heads

    def qkv(weights: Any, given: Inputs) -> Parts:
        pool = jnp.zeros((pages, block.kv_heads, PAGE_SIZE, block.head_dim), jnp.bfloat16)
        q, pools = steps.qkv(block, shapes, weights, 0, given.carried, given.rows, (pool, pool))
        page, place = given.rows.page, given.rows.place
        k, v = (pool[page, :, place] for pool in pools)
        return {"q": q[:, :, :group], "k": k, "v": v}

    def residual(name: str) -> Callable[..., Parts]:
        def run(weights: Any, given: Inputs) -> Parts:
            x = given.heads if name == "o" else given.wide
            made = steps.residual(name, shapes, weights, 0, x, given.old)
            return {"x": made.x.T, "scaled": made.scaled, "squares": made.squares.T}

        return run

    def gated(weights: Any, given: Inputs) -> Parts:
        return {"hidden": steps.gated(shapes, weights, 0, given.carried, block.eps)}

    return {"qkv": qkv, "o": residual("o"), "gate_up": gated, "down": residual("down")}


def check(name: str, tokens: int, widths: list[int], few: int) -> Iterator[bool]:
    block = attrs.evolve(BLOCKS[name], layers=1, vocab_size=VOCAB)
    weights, given, pages = random_weights(block), inputs(block, tokens), -(-tokens // PAGE_SIZE)
    by = {few: launches(block, HopperSteps(SMS), pages)}
    by |= {width: launches(block, TiledSteps(SMS), pages) for width in widths}
    programs = [(width, launch) for launch in by[few] for width in (few, *widths)]
    began = time.monotonic()
    compiled = dict(
        zip(
            programs,
            compile_all(jax.jit(by[width][launch]).lower(weights, given.of(0, width)) for width, launch in programs),
            strict=True,
        )
    )
    print(f"{name}: {len(programs)} programs in {time.monotonic() - began:.1f} s", flush=True)
    for launch in by[few]:
        found = {}
        for width in (few, *widths):
            runs = [compiled[width, launch](weights, given.of(first, width)) for first in range(0, tokens, width)]
            found[width] = {part: np.concatenate([np.asarray(run[part]) for run in runs]) for part in runs[0]}
        for width in widths:
            again = compiled[width, launch](weights, given.of(0, width))
            for part, wanted in found[few].items():
                once = found[width][part][:width]
                repeats = bool((_bits(np.asarray(again[part])) == _bits(once)).all())
                yield _told(f"{name} {launch} {part}, {width} against {few}", wanted, found[width][part], repeats)


def _told(words: str, wanted: np.ndarray, mine: np.ndarray, repeats: bool) -> bool:
    unequal = _bits(wanted) != _bits(mine)
    where = np.argwhere(unequal)
    first = ""
    if len(where):
        at = tuple(where[0].tolist())
        first = f", first {at}: {float(wanted[at])!r} and {float(mine[at])!r}"
    tokens = int(unequal.reshape(len(unequal), -1).any(axis=1).sum())
    again = "" if repeats else ", ANOTHER RESULT WHEN REPEATED"
    print(f"{words}: {unequal.sum()} of {unequal.size} values of {tokens} tokens differ{first}{again}", flush=True)
    return len(where) == 0 and repeats


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["llama-3.2-1b"], metavar="MODEL", help=f"of {', '.join(BLOCKS)}")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--widths", default="64,512")
    parser.add_argument("--few", type=int, default=8)
    asked = parser.parse_args()
    widths = [int(width) for width in asked.widths.split(",")]
    right = [same for name in asked.models for same in check(name, asked.tokens, widths, asked.few)]
    print(f"wrong: {right.count(False)} of {len(right)}")
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
