"""The tokens of a product of more than 8 rows: a piece of the depth at a time, asked for while the last one is used.

A piece is as much as registers hold beside the sums. On its way it is in registers: so what a product waits for is a
move to shared memory, where it would be a trip to L2.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith

from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels.mosaic import TILED, plgpu
from mlxcel_jax_cuda.kernels.persistent_ptx import THREADS, Words
from mlxcel_jax_cuda.kernels.persistent_words import SCALAR, VALUES, Exchange, once_there

arith: Any = _arith  # their stubs know the operations, not the wrappers


@attrs.frozen
class Piece:
    """`depth` values, a power of two, of each row from `first` on. Rows from `used` on are zeros."""

    x: Any  # [N, …] bf16 in device memory
    first: Any
    depth: int
    used: Any
    run: int = 0  # behind every `run` values of x are `gap` that are not meant
    gap: int = 0

    @property
    def of_row(self) -> int:
        """Threads side by side in a row, of `VALUES` each."""
        return self.depth // VALUES

    @property
    def rounds(self) -> range:
        """The first row of those that the warpgroup moves at a time."""
        return range(0, self.x.shape[0], THREADS // self.of_row)

    @property
    def layout(self) -> tuple[int, Any]:
        """How many values of 32 bits a piece is in registers, and which has which."""
        size = 4 * len(self.rounds) * THREADS
        return size, plgpu.Layout.WG_STRIDED((size,), vec_size=4)


def ask(exchange: Exchange, piece: Piece) -> jax.Array:
    """A look at a piece, for `put`. Nobody waits."""
    size, layout = piece.layout
    template = plgpu.layout_cast(jnp.zeros((size,), jnp.float32), layout)

    @exchange.inline(
        layout, plgpu.RefType(), SCALAR, SCALAR, out=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout)
    )
    def look(_wait: Any, template: Any, x: Any, first: Any, used: Any) -> Any:
        words = _Place.of(piece, x, first, used).words(piece.rounds)
        return ptx.like(template, [ptx.vector_of(words[i : i + 4]) for i in range(0, len(words), 4)])

    found: jax.Array = look(template, piece.x, piece.first, piece.used)
    return found


def put(exchange: Exchange, piece: Piece, looked: jax.Array, target: Any) -> None:
    """A piece that was asked for, once all of it is there -> target [N, …] bf16 in shared memory, tiled for wgmma.
    Followed by `commit_smem`."""
    width, rounds = target.shape[1], piece.rounds

    @exchange.inline(piece.layout[1], plgpu.RefType(), SCALAR, SCALAR, plgpu.RefType(TILED), waiting=once_there)
    def move(wait: Any, looked: Any, x: Any, first: Any, used: Any, target: Any) -> None:
        own = _Place.of(piece, x, first, used)
        words = [word for four in looked.registers.flat for word in ptx.words_of(four, 4)]
        words = wait(words, lambda: own.words(rounds), lambda: own.words(rounds[:1]))
        shared, eight = ptx.shared_address(target), 8 // rounds.step
        places = [ptx.tiled_place(arith.addi(own.row, ptx.integer(before)), own.place) for before in rounds[:eight]]
        for j, before in enumerate(rounds):
            tiles_before = before // 8 * (8 * 2 * width)
            ptx.store_shared(shared, places[j % eight], words[4 * j : 4 * j + 4], known=tiles_before)

    move(looked, piece.x, piece.first, piece.used, target)


@attrs.frozen
class _Place:
    """What a thread has of a piece."""

    row: Any  # in the first round
    place: Any  # in the row, by `VALUES`
    used: Any
    address: Any
    stride: int  # of a row, in bytes

    @classmethod
    def of(cls, piece: Piece, x: Any, first: Any, used: Any) -> _Place:
        first, used = (scalar.registers.flat[0] for scalar in (first, used))
        stride, thread = ir.MemRefType(x.type).get_strides_and_offset()[0][0] * 2, ptx.this_thread()
        row, place = arith.divui(thread, ptx.integer(piece.of_row)), arith.andi(thread, ptx.integer(piece.of_row - 1))
        chunk = arith.addi(place, arith.divui(first, ptx.integer(VALUES)))
        if piece.gap:
            runs = arith.divui(chunk, ptx.integer(piece.run // VALUES))
            chunk = arith.addi(chunk, arith.muli(runs, ptx.integer(piece.gap // VALUES)))
        address = ptx.past(ptx.address_of(x), arith.muli(chunk, ptx.integer(2 * VALUES)))
        return cls(row, place, used, ptx.past(address, arith.muli(row, ptx.integer(stride))), stride)

    def words(self, rounds: range) -> Words:
        found: Words = []
        for before in rounds:
            there = arith.cmpi(arith.CmpIPredicate.ult, arith.addi(self.row, ptx.integer(before)), self.used)
            found += ptx.load_at(self.address, before * self.stride, 4, there)
        return found
