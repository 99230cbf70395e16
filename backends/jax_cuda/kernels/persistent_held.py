"""A product whose weights wait in registers: their ring slots are free before its tokens are there.

The chain is that of a product out of shared memory: `wgmma` after `wgmma` into the same float32 sums, in the order of
the depth. It is written as one piece of PTX, since LLVM takes the addresses of tokens that never move out of the loop
over the layers, and then has no registers for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm as _llvm

from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels.mosaic import TILED, WGMMA, plgpu
from mlxcel_jax_cuda.kernels.persistent_shape import FEW
from mlxcel_jax_cuda.kernels.sizes import TILE

llvm: Any = _llvm  # their stubs know the operations, not the wrappers

DEPTH = 16
"""Values of the depth that one `wgmma` takes."""

WORDS = 4
"""Registers of a thread for them, and for its sums."""

_SWIZZLED = 0x40000040
"""The upper half of wgmma's description of an operand: rows of 128 bytes, swizzled, in groups of 8."""


def held_product(weights: Sequence[jax.Array], tokens: Any) -> jax.Array:
    """weights: [64, 64] bf16 each, as wgmma has them in registers, one behind the other along the depth. tokens
    [8, …] bf16 in shared memory, tiled for wgmma, of which the first values of each row are those of this depth.
    Returns [64, 8] float32, for the chain to go on with."""

    @plgpu.inline_mgpu(  # type: ignore[untyped-decorator]
        arg_types=(*[WGMMA] * len(weights), plgpu.RefType(TILED), WGMMA),
        return_type=plgpu.ShapeDtypeStruct((TILE, FEW), jnp.float32, layout=WGMMA),
    )
    def multiply(_context: Any, *given: Any) -> Any:
        *pieces, tokens, template = given
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        steps = [piece[:, at : at + DEPTH] for piece in pieces for at in range(0, TILE, DEPTH)]
        words = [llvm.bitcast(i32, pair) for step in steps for pair in step.registers.flat]
        made = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * WORDS),
            [*words, ptx.shared_address(tokens)],
            _text(len(steps)),
            ",".join(["=&f"] * WORDS + ["r"] * (len(words) + 1)),
            has_side_effects=True,
        )
        sums = [llvm.extractvalue(f32, made, [i]) for i in range(WORDS)]
        return ptx.like(template, [ptx.vector(sums[i : i + 2]) for i in range(0, WORDS, 2)])

    template = plgpu.layout_cast(jnp.zeros((TILE, FEW), jnp.float32), WGMMA)
    found: jax.Array = multiply(*weights, tokens, template)
    return found


def _text(steps: int) -> str:
    sums, address = ", ".join(f"${i}" for i in range(WORDS)), f"${WORDS * (steps + 1)}"
    lines = [
        ".reg .pred adds; .reg .b32 first, place; .reg .b64 operand;",
        f"bfe.u32 first, {address}, 4, 14;",
        "shfl.sync.idx.b32 first, first, 0, 31, -1;",  # the same in all lanes anyway: now ptxas knows
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(steps):
        words = ", ".join(f"${WORDS * (step + 1) + i}" for i in range(WORDS))
        tile, within = divmod(step, TILE // DEPTH)
        lines += [
            f"setp.ne.u32 adds, {step}, 0;",
            f"add.u32 place, first, {(tile * TILE * FEW + within * DEPTH) * 2 >> 4};",
            f"mov.b64 operand, {{place, {_SWIZZLED}}};",
            f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{sums}}}, {{{words}}}, operand, adds, 1, 1, 0;",
        ]
    return "{ " + "\n".join([*lines, "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]) + " }"
