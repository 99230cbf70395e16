"""Exchange between the blocks of a persistent step: which words a thread reads, and where it puts them.

No GPU is needed: the operations that a kernel is made of are done with Python's numbers, each thread's in turn. What
must come out is known from the layouts of wgmma's operands and sums.
"""

import contextlib
import itertools
import operator
import types

import numpy as np
import pytest

from mlxcel_jax_cuda.kernels import persistent_pieces as pieces
from mlxcel_jax_cuda.kernels import persistent_ptx as ptx
from mlxcel_jax_cuda.kernels import persistent_words as words
from mlxcel_jax_cuda.kernels.mosaic import WGMMA
from mlxcel_jax_cuda.kernels.persistent_shape import ROWS

THREADS, TILE = 128, 64
LOOKED = object()
"""What a thread has seen of a piece: another for each."""

ARITHMETIC = types.SimpleNamespace(
    CmpIPredicate=types.SimpleNamespace(ult=operator.lt, ugt=operator.gt, eq=operator.eq),
    addi=operator.add,
    subi=operator.sub,
    muli=operator.mul,
    divui=operator.floordiv,
    andi=operator.and_,
    shrui=operator.rshift,
    xori=operator.xor,
    addf=lambda a, b: (a[0] + b[0], a[1] + b[1]),
    select=lambda condition, a, b: a if condition else b,
    extui=lambda kind, a: a,
    cmpi=lambda compare, a, b: compare(a, b),
)
NUMBERS = types.SimpleNamespace(
    IntegerType=types.SimpleNamespace(get_signless=lambda bits: bits), MemRefType=lambda kind: kind
)


class Ref:
    """An array in memory of either kind, from byte `base` on."""

    def __init__(self, shape, itemsize, base=0):
        self.shape, self.base, self.type = shape, base, self
        strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        self.get_strides_and_offset = lambda: (strides, 0)
        self.places = {
            base + itemsize * number: place for number, place in enumerate(itertools.product(*map(range, shape)))
        }


class Machine:
    """The threads of a warpgroup, one after the other. A word of device memory is the place of its first value in its
    array; shared memory is a dict from bytes to words."""

    def __init__(self, monkeypatch, arrays):
        self.device = {address: place for array in arrays for address, place in array.places.items()}
        self.shared, self.thread, self.told, self.given = {}, 0, {}, []
        self.registers = np.empty(1, dtype=object)  # of the template for what is one a column
        self.registers[0] = ("", "")
        own = {
            "arith": ARITHMETIC,
            "ir": NUMBERS,
            "integer": int,
            "this_thread": lambda: self.thread,
            "address_of": lambda ref: ref.base,
            "shared_address": lambda ref: ref.base,
            "load_at": self.load,
            "meet": lambda: None,
            "store_shared": self.store_shared,
            "vector_of": tuple,
            "words_of": self.words_of,
            "of_lane": lambda word, lane: self.told.get(self.thread // 32 * 32 + lane, (None, None))[word],
            "like": lambda template, registers: registers,
        }
        for name, value in own.items():
            monkeypatch.setattr(ptx, name, value)
        for module in (words, pieces):
            monkeypatch.setattr(module, "arith", ARITHMETIC)
            monkeypatch.setattr(module, "ir", NUMBERS)
            monkeypatch.setattr(module, "once_there", self.once_there)
        monkeypatch.setattr(words, "_when_there", lambda patient, notes, read, count: self.whole(read(), count))
        monkeypatch.setattr(words, "_templates", lambda columns: (None, self))
        monkeypatch.setattr(words.plgpu, "commit_smem", lambda: None)
        monkeypatch.setattr(words.plgpu, "layout_cast", lambda value, layout: value)
        monkeypatch.setattr(words.plgpu, "inline_mgpu", self.inline)
        no_branch = types.SimpleNamespace(when=lambda condition: contextlib.nullcontext())
        monkeypatch.setattr(words, "mosaic_utils", no_branch)

    def inline(self, **_types):
        def decorate(function):
            def call(*given):
                for self.thread in range(THREADS):
                    own = [self.looks[self.thread] if each is LOOKED else each for each in given]
                    self.given.append(function(None, *own))
                return self.given[-1]

            return call

        return decorate

    def bring(self, x, first, depth, target, used, **gaps):
        exchange, given = words.Exchange(), (x, scalar(first), depth)
        if len(x.shape) == 2 and x.shape[0] == 8:
            exchange.tokens(*given, target, scalar(used), **gaps)
            return
        piece = pieces.Piece(*given, scalar(used), **gaps)
        pieces.ask(exchange, piece)
        self.looks = [types.SimpleNamespace(registers=types.SimpleNamespace(flat=found)) for found in self.given]
        pieces.put(exchange, piece, LOOKED, target)

    def load(self, address, offset, count, wanted=None):
        return [0 if wanted is False else self.device[address + offset + 4 * i] for i in range(count)]

    def whole(self, found, count):
        assert len(found) == count
        return found

    def once_there(self, patient, notes, found, read, few):
        """Words that are not there yet are missing: so it is what is read behind the few."""
        assert found == read()
        assert set(few()) <= set(found)
        return found

    def store_shared(self, address, offset, values, wanted=True, known=0):
        for i, value in enumerate(values if wanted else ()):
            assert address + offset + known + 4 * i not in self.shared
            self.shared[address + offset + known + 4 * i] = value

    def words_of(self, vector, count):
        if count == 4:
            return list(vector)
        self.told[self.thread] = vector
        return [0, 1]


def scalar(value):
    return types.SimpleNamespace(registers=np.array([value], dtype=object))


def pairs(shape, base=0):
    """An array of bf16, whose words hold two values."""
    ref = Ref((*shape[:-1], shape[-1] // 2), 4, base)
    ref.places = {address: (*place[:-1], 2 * place[-1]) for address, place in ref.places.items()}
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    ref.shape, ref.get_strides_and_offset = shape, lambda: (strides, 0)
    return ref


@pytest.mark.parametrize(
    ("rows", "depth", "width", "first", "used"),
    [
        (8, 512, 2048, 1024, 8),
        (16, 1024, 1024, 1024, 9),
        (16, 512, 1024, 512, 16),
        (32, 512, 512, 512, 17),
        (32, 128, 512, 0, 32),
    ],
)
def test_tokens_come_to_where_wgmma_looks_for_them(rows, depth, width, first, used, monkeypatch):
    x, target = pairs((rows, 2048)), Ref((rows, width), 2, base=1 << 20)
    machine = Machine(monkeypatch, [x])
    machine.bring(x, first, depth, target, used)
    found = {}
    for address, word in machine.shared.items():
        at = address - target.base
        tile, within = divmod(at, 1024)
        tile_row, tile_column = divmod(tile, width // TILE)
        row, chunk = within // 128, within % 128 // 16 ^ within // 128
        found[8 * tile_row + row, TILE * tile_column + 8 * chunk + at % 16 // 2] = word
    assert set(found) == set(itertools.product(range(rows), range(0, depth, 2)))
    assert all(word == ((row, first + column) if row < used else 0) for (row, column), word in found.items())


def test_what_lies_between_the_heads_of_a_group_is_left_out(monkeypatch):
    """Attention leaves 8 columns of a KV head, of which its heads fill four."""
    mixed, target = pairs((16, 2, 8, 64)), Ref((16, 512), 2, base=1 << 20)
    machine = Machine(monkeypatch, [mixed])
    machine.bring(mixed, 0, 512, target, 16, run=4 * 64, gap=4 * 64)
    assert set(machine.shared.values()) == set(itertools.product(range(16), range(2), range(4), range(0, 64, 2)))


@pytest.mark.parametrize("rows", ROWS)
def test_sums_come_as_wgmma_has_them(rows, monkeypatch):
    """Of a thread: rows lane / 4 of its warp's 16 and eight below, two columns of each eight."""
    whole = [size for size in WGMMA.to_mgpu().registers_shape((TILE, rows)) if size > 1]
    assert whole == [rows // 8, 2] if rows > 8 else [2]
    parts = [Ref((TILE, rows), 4), Ref((TILE, rows), 4, 1 << 20)]
    machine = Machine(monkeypatch, parts)
    words.Exchange().sums(parts)
    assert len(machine.given) == THREADS
    for thread, (first, second) in enumerate(machine.given):
        warp, lane = divmod(thread, 32)
        columns = [8 * tile + 2 * (lane % 4) for tile in range(rows // 8)]
        expected = [
            tuple((16 * warp + lane // 4 + below, column + i) for i in (0, 1)) for column in columns for below in (0, 8)
        ]
        assert first == second == expected


@pytest.mark.parametrize("rows", ROWS)
def test_squares_are_added_in_index_order_for_every_column(rows, monkeypatch):
    """Words are strings here, so that a sum shows its order."""
    squares = Ref((5, rows), 4)
    squares.places = {address: f"{row}:{column} " for address, (row, column) in squares.places.items()}
    machine = Machine(monkeypatch, [squares])
    for _ in range(2):  # what a thread is told, others have found before
        machine.given = []
        words.Exchange().squares(squares)
    for thread, found in enumerate(machine.given):
        columns = [8 * tile + 2 * (thread % 4) for tile in range(rows // 8)]
        total = {column: "".join(f"{row}:{column} " for row in range(5)) for column in range(rows)}
        assert found == [(total[column], total[column + 1]) for column in columns]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (128, 2)])
def test_the_heads_of_a_row_come_to_where_attention_looks_for_them(rows, head_dim, group, monkeypatch):
    width, together = head_dim // 2, 128 // head_dim
    made, row = pairs((12, 2, rows, TILE)), rows - 3
    queries, newest = Ref((8, head_dim), 2, 1 << 20), Ref((2, head_dim), 2, 2 << 20)
    machine = Machine(monkeypatch, [made])
    numbers = [*range(4, 4 + group), 9, 11]
    items = [scalar(number // together) for number in numbers]
    within = [scalar(number % together) for number in numbers]
    words.Exchange().heads(made, scalar(row), items, within, width, (queries, newest))
    assert len(machine.shared) == (group + 2) * head_dim // 2
    for place, number in enumerate(numbers):
        for dim in range(0, head_dim, 2):
            if place < group:
                swizzled = dim % TILE // 8 ^ place
                at = queries.base + dim // TILE * 1024 + place * 128 + swizzled * 16 + dim % 8 * 2
            else:
                at = newest.base + (place - group) * 2 * head_dim + 2 * dim
            item, half = number // together, dim // width
            assert machine.shared[at] == (item, half, row, number % together * width + dim % width)
