"""What the persistent step writes in PTX: words in device and in shared memory, and addresses.

All of it runs inside `inline_mgpu`, on values of MLIR, once for each thread of a warpgroup.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils as _utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith as _arith
from jaxlib.mlir.dialects import llvm as _llvm

from mlxcel_jax_cuda.kernels.mosaic import plgpu

arith: Any = _arith  # their stubs know the operations, not the wrappers
llvm: Any = _llvm
mosaic_utils: Any = _utils

THREADS = 128
"""Of a warpgroup."""

Words = list[Any]
"""Values of 32 bits."""


def rows_and_places(thread: Any, rounds: int, of_row: int) -> tuple[Words, Words]:
    """Row and place of each of a thread's chunks, `of_row` in a row, with as little arithmetic as there can be."""
    rows, places = [], []
    of_round = [arith.addi(thread, integer(part * THREADS)) for part in range(max(of_row // THREADS, 1))]
    own_row = arith.divui(thread, integer(of_row)) if of_row < THREADS else integer(0)
    own_place = arith.subi(thread, arith.muli(own_row, integer(of_row)))
    for j in range(rounds):
        if of_row % THREADS == 0:
            row, place = integer(j * THREADS // of_row), of_round[j % (of_row // THREADS)]
        elif THREADS % of_row == 0:
            row, place = arith.addi(own_row, integer(j * (THREADS // of_row))), own_place
        else:
            chunk = arith.addi(thread, integer(j * THREADS))
            row = arith.divui(chunk, integer(of_row))
            place = arith.subi(chunk, arith.muli(row, integer(of_row)))
        rows.append(row)
        places.append(place)
    return rows, places


def row_and_column() -> tuple[Any, Any]:
    """A thread's first row of wgmma's [64, N] float32, the other being eight below, and in bytes its first two columns;
    the others are each eight columns on."""
    thread = this_thread()
    lane, warp = arith.andi(thread, integer(31)), arith.shrui(thread, integer(5))
    row = arith.addi(arith.muli(warp, integer(16)), arith.shrui(lane, integer(2)))
    return row, arith.muli(arith.andi(lane, integer(3)), integer(8))


def meet() -> None:
    """All threads of the warpgroup have come this far, and go on together: ptxas wants to know that before `wgmma`.
    Called from a kernel, not from `inline_mgpu`."""

    @plgpu.inline_mgpu()  # type: ignore[untyped-decorator]
    def barrier(_context: Any) -> None:
        mosaic_utils.warpgroup_barrier()

    barrier()


def come_together(count: Any, blocks: int) -> None:
    """One thread adds itself to count, int32 [1] in device memory, and waits until so many blocks have; the warpgroup
    then goes on. What each wrote before, all see after it. Called from a kernel, behind `meet`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))  # type: ignore[untyped-decorator]
    def wait(_context: Any, count: Any) -> None:
        counted = mosaic_utils.SemaphoreRef(mosaic_utils.memref_ptr(count))
        counted.signal(1, memory_scope="gpu")
        counted.wait(blocks, decrement=False, memory_scope="gpu")

    wait(count)


def integer(value: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def this_thread() -> Any:
    """Of the warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    # Not to be moved out of the layers' loop, with all that is computed from it: registers would not suffice.
    number = llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True)
    return arith.andi(number, integer(THREADS - 1))


def address_of(ref: Any) -> Any:
    pointer = mosaic_utils.memref_ptr(ref)
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)


def shared_address(ref: Any) -> Any:
    pointer = mosaic_utils.memref_ptr(ref)
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


def past(address: Any, offset: Any) -> Any:
    return arith.addi(address, arith.extui(ir.IntegerType.get_signless(64), offset))


def tiled_place(row: Any, place: Any) -> Any:
    """Bytes from the begin of [8, …] bf16 in tiles of 64 columns, swizzled by 128 bytes, to the `place`-th 8 values."""
    tile, chunk = arith.shrui(place, integer(3)), arith.andi(place, integer(7))
    inside = arith.addi(arith.muli(row, integer(128)), arith.muli(arith.xori(chunk, row), integer(16)))
    return arith.addi(arith.muli(tile, integer(1024)), inside)


def of_lane(word: Any, lane: Any) -> Any:
    """A word that another thread of the warp has."""
    i32 = ir.IntegerType.get_signless(32)
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return llvm.inline_asm(i32, [word, lane], text, "=r,r,r", has_side_effects=True)


def load(address: Any, offset: Any, count: int, wanted: Any | None = None) -> Words:
    """Words from L2; zeros where not wanted."""
    return load_at(past(address, offset), 0, count, wanted)


def load_at(address: Any, offset: int, count: int, wanted: Any | None = None) -> Words:
    """The same; an offset that is known stands in the instruction and takes no register."""
    i32 = ir.IntegerType.get_signless(32)
    names = ", ".join(f"${i}" for i in range(count))
    load = f"ld.relaxed.gpu.global.v{count}.b32 {{{names}}}, [${count}+{offset}];"
    operands, outputs = [address], ",".join(["=&r"] * count)
    if wanted is None:
        text, inputs = load, "l"
    else:
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
        text, inputs = f"{zeros} @${count + 1} {load}", "l,b"
        operands.append(wanted)
    made = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * count), operands, text, f"{outputs},{inputs}", has_side_effects=True
    )
    return [llvm.extractvalue(i32, made, [i]) for i in range(count)]


def store_words(address: Any, offset: Any, words: Words) -> None:
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [past(address, offset), *words],
        "st.relaxed.gpu.global.v4.b32 [$0], {$1, $2, $3, $4};",
        "l,r,r,r,r",
        has_side_effects=True,
    )


def load_shared(address: Any, offset: Any, wanted: Any) -> Words:
    i32 = ir.IntegerType.get_signless(32)
    made = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * 4),
        [arith.addi(address, offset), wanted],
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; @$5 ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=&r,=&r,=&r,=&r,r,b",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, made, [i]) for i in range(4)]


def store_shared(address: Any, offset: Any, words: Words, wanted: Any | None = None, known: int = 0) -> None:
    predicate, inputs = ("", "r,r,r,r,r") if wanted is None else ("@$5 ", "r,r,r,r,r,b")
    more = f"+{known}" if known else ""
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [arith.addi(address, offset), *words, *([] if wanted is None else [wanted])],
        f"{predicate}st.shared.v4.b32 [$0{more}], {{$1, $2, $3, $4}};",
        inputs,
        has_side_effects=True,
    )


def store_matrices(address: Any, offset: int, words: Words) -> None:
    """Four 8 x 8 matrices of 16-bit values, each turned: a column is 16 bytes at the address that a lane gives for it,
    the first matrix by the first eight lanes. A word is a lane's two neighbours of a row, as wgmma has them."""
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [address, *words],
        f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0 + {offset}], {{$1, $2, $3, $4}};",
        "r,r,r,r,r,~{memory}",
        has_side_effects=True,
    )


def word_of(pair: Any) -> Any:
    """A vector of two 16-bit values as one word."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.bitcast(i32, pair)


def vector_of(words: Words) -> Any:
    """Words as a vector of float32."""
    return vector([arith.bitcast(ir.F32Type.get(), word) for word in words])


def vector(values: list[Any]) -> Any:
    """Values of float32 as a vector."""
    made = llvm.mlir_undef(ir.VectorType.get((len(values),), ir.F32Type.get()))
    for i, value in enumerate(values):
        made = llvm.insertelement(made, value, integer(i))
    return made


def words_of(vector: Any, count: int) -> Words:
    """The inverse of `vector_of`."""
    i32 = ir.IntegerType.get_signless(32)
    return [arith.bitcast(i32, llvm.extractelement(vector, integer(i))) for i in range(count)]


def like(template: Any, registers: Words) -> Any:
    made = np.empty(template.registers.shape, dtype=object)
    for i, register in enumerate(registers):
        made.flat[i] = register
    return type(template)(_registers=made, _layout=template.layout, _is_signed=None)
