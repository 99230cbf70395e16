"""Keys and values of the newest token onto their pages, for the steps to come: nothing in this one waits for it."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils as _utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm

from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels.mosaic import WGMMA, plgpu
from mlxcel_jax_cuda.kernels.persistent_shape import Step
from mlxcel_jax_cuda.kernels.persistent_words import EIGHT, SCALAR

arith: Any = _arith  # their stubs know the operations, not the wrappers
llvm: Any = _llvm
mosaic_utils: Any = _utils


def keep(
    step: Step, pools: tuple[Any, Any], where: tuple[Any, Any], layer: Any, head: Any, halves: list[jax.Array]
) -> None:
    """halves [64, N] float32: of the heads of a pair of qkv's row tiles, from `head` on, which are keys or values.
    pools: of keys and values [L * pages, K, page_size, d] bf16. where: page, -1 for a row that is padding, and place on
    it, [N] int32. Each thread writes the values that it has."""
    width, K = step.head_dim // 2, step.kv_heads

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(WGMMA, WGMMA, *[plgpu.RefType()] * 4, SCALAR, SCALAR)
    )
    def write(_context: Any, first: Any, second: Any, *given: Any) -> None:
        keys, values, pages, places = (ptx.address_of(ref) for ref in given[:4])
        base, head = (scalar.registers.flat[0] for scalar in given[4:])
        of_values = arith.cmpi(arith.CmpIPredicate.uge, head, ptx.integer(step.heads + K))
        pool = arith.select(of_values, values, keys)
        own = arith.subi(head, arith.select(of_values, ptx.integer(step.heads + K), ptx.integer(step.heads)))
        row, column = ptx.row_and_column()  # columns in bytes of float32, as of int32
        pages, places = ptx.past(pages, column), ptx.past(places, column)
        of_tiles = range(0, 4 * step.rows, 4 * EIGHT)
        own_pages = [word for tile in of_tiles for word in ptx.load_at(pages, tile, 2)]
        own_places = [word for tile in of_tiles for word in ptx.load_at(places, tile, 2)]
        for number_of_column, (page, place) in enumerate(zip(own_pages, own_places, strict=True)):
            tile, i = divmod(number_of_column, 2)
            real = arith.cmpi(arith.CmpIPredicate.sge, page, ptx.integer(0))
            number = arith.addi(arith.muli(arith.addi(base, page), ptx.integer(K)), own)
            for rows in (0, 1):
                of_tile = arith.addi(row, ptx.integer(8 * rows))
                head_in_tile = arith.divui(of_tile, ptx.integer(width))
                dim = arith.subi(of_tile, arith.muli(head_in_tile, ptx.integer(width)))
                line = _wide(arith.addi(number, head_in_tile))
                line = arith.addi(arith.muli(line, _wide(ptx.integer(step.page_size))), _wide(place))
                to = arith.addi(arith.muli(line, _wide(ptx.integer(step.head_dim))), _wide(dim))
                to = arith.addi(pool, arith.muli(to, _wide(ptx.integer(2))))
                for half, sums in enumerate((first, second)):
                    value = llvm.extractelement(sums.registers.flat[2 * tile + rows], ptx.integer(i))
                    at = arith.addi(to, _wide(ptx.integer(half * width * 2)))
                    llvm.inline_asm(
                        ir.Type.parse("!llvm.void"),
                        [at, value, real],
                        "{ .reg .b16 rounded; cvt.rn.bf16.f32 rounded, $1; @$2 st.global.b16 [$0], rounded; }",
                        "l,f,b",
                        has_side_effects=True,
                    )

    write(*halves, *pools, *where, layer * step.pages, head)


def _wide(value: Any) -> Any:
    return arith.extsi(ir.IntegerType.get_signless(64), value)
