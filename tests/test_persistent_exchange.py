"""Where the threads of the persistent step read and write words, with integers in the place of MLIR's values: one
thread after the other, without a GPU. What the whole kernel computes: benchmarks/kernels/persistent_check.py."""

import operator
import types

import numpy as np
import pytest
from test_persistent_step import LLAMA_1B, QWEN_17B, step_of

from mlxcel_jax_cuda.kernels import persistent_pages, persistent_ptx, persistent_words
from mlxcel_jax_cuda.kernels.persistent_ptx import THREADS

SHAPES = pytest.mark.parametrize("sizes", [{}, LLAMA_1B, QWEN_17B], ids=["small", "llama-3.2-1b", "qwen3-1.7b"])
COMPARED = {"eq": operator.eq, "ne": operator.ne, "ult": operator.lt, "slt": operator.lt, "uge": operator.ge}
COMPARED |= {"sge": operator.ge, "ugt": operator.gt}
ARITH = types.SimpleNamespace(
    CmpIPredicate=types.SimpleNamespace(**{name: name for name in COMPARED}),
    addi=operator.add, subi=operator.sub, muli=operator.mul, divui=operator.floordiv, andi=operator.and_,
    shrui=operator.rshift, xori=operator.xor, ori=operator.or_, cmpi=lambda how, a, b: COMPARED[how](a, b),
    select=lambda condition, a, b: a if condition else b, extui=lambda _, value: value, extsi=lambda _, value: value,
)  # fmt: skip


def scalar(value):
    return types.SimpleNamespace(registers=np.array([value], object))


class Machine:
    """Device memory by address, and the thread whose turn it is. Values may be anything."""

    def __init__(self, monkeypatch):
        self.memory, self.written, self.thread = {}, {}, 0
        inline = types.SimpleNamespace(
            inline_mgpu=lambda arg_types, return_type=None: lambda function: lambda *given: function(None, *given),
            RefType=lambda *_: None,
            ShapeDtypeStruct=lambda *_, **__: None,
            commit_smem=lambda: None,
        )
        mlir = types.SimpleNamespace(
            IntegerType=types.SimpleNamespace(get_signless=int), Type=types.SimpleNamespace(parse=str)
        )
        for module in (persistent_words, persistent_pages, persistent_ptx):
            for name, fake in (("arith", ARITH), ("ir", mlir), ("plgpu", inline)):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fake)
        monkeypatch.setattr(persistent_words, "_when_there", lambda patient, notes, read, count: read())
        monkeypatch.setattr(persistent_words, "_templates", lambda columns: (None, None))
        for name, fake in {
            "integer": int, "this_thread": lambda: self.thread, "address_of": int, "load_at": self.load,
            "meet": lambda: None, "vector_of": tuple, "like": lambda template, pairs: list(pairs),
        }.items():  # fmt: skip
            monkeypatch.setattr(persistent_ptx, name, fake)
        store = types.SimpleNamespace(extractelement=lambda pair, i: pair[i], inline_asm=self.store)
        monkeypatch.setattr(persistent_pages, "llvm", store)

    def load(self, address, offset, count, wanted=None):
        return [0] * count if wanted is False else [self.memory[address + offset + 4 * i] for i in range(count)]

    def store(self, _type, operands, *_, **__):
        address, value, wanted = operands
        if wanted:
            assert address not in self.written
            self.written[address] = value

    def row_and_column(self):
        """Of wgmma's [64, 8] float32: the other row is eight below, the other column the next."""
        return self.thread // 32 * 16 + self.thread % 32 // 4, self.thread % 4 * 2


@SHAPES
def test_a_run_of_partials_comes_to_the_threads_that_have_their_rows_and_columns(sizes, monkeypatch):
    """Items lie as far apart as `strides` says; those from `used` on are not read."""
    step, machine = step_of(**sizes), Machine(monkeypatch)
    K, d, count, used, stats = step.kv_heads, step.head_dim, 4, 3, 10**7
    strides = K * d * 8, K * 2 * 8
    for item in range(used):
        for column in range(8):
            machine.memory |= {4 * (item * strides[0] + row * 8 + column): (item, row, column) for row in range(64)}
            for which in (0, 1):
                address = stats + 4 * (item * strides[1] + which * 8 + column)
                machine.memory[address] = item, "max" if which == 0 else "sum", column
    for machine.thread in range(THREADS):
        row, column = machine.row_and_column()
        found = persistent_words.Exchange().partials(0, stats, strides, count, scalar(used))
        for item in range(used):
            maxima, sums, values = (kind[item] for kind in found)
            assert maxima == [tuple((item, "max", column + i) for i in (0, 1))]
            assert sums == [tuple((item, "sum", column + i) for i in (0, 1))]
            assert values == [tuple((item, row + down, column + i) for i in (0, 1)) for down in (0, 8)]
        assert [kind[used] for kind in found] == [[(0, 0)], [(0, 0)], [(0, 0), (0, 0)]]


@SHAPES
def test_new_keys_and_values_go_to_their_places_on_the_pages(sizes, monkeypatch):
    """Each value of each row that is not padding once, and nothing else."""
    step, width = step_of(**sizes), step_of(**sizes).head_dim // 2
    pages, places = [3, -1, 0, 5, 1, 2, -1, 4], [9, 0, 63, 5, 40, 33, 0, 1]
    pools, K = (10**12, 2 * 10**12), step.kv_heads
    for head in range(step.heads, step.heads + 2 * K, step.together):
        machine = Machine(monkeypatch)
        machine.memory |= {4 * row: page for row, page in enumerate(pages)}
        machine.memory |= {100 + 4 * row: place for row, place in enumerate(places)}
        for machine.thread in range(THREADS):
            row, column = machine.row_and_column()
            halves = []
            for half in (0, 1):
                pairs = [[(half, row + down, column + i) for i in (0, 1)] for down in (0, 8)]
                halves.append(types.SimpleNamespace(registers=types.SimpleNamespace(flat=pairs)))
            persistent_pages.keep(step, pools, (0, 100), Layer(2), scalar(head), halves)
        wanted = {}
        for column, (page, place) in enumerate(zip(pages, places, strict=True)):
            for half in (0, 1):
                for row in range(64) if page >= 0 else ():
                    own, dim = head + row // width, half * width + row % width
                    line = ((2 * step.pages + page) * K + (own - step.heads) % K) * step.page_size + place
                    pool = pools[own >= step.heads + K]
                    wanted[pool + 2 * (line * step.head_dim + dim)] = half, row, column
        assert machine.written == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 64, 136])
def test_one_missing_word_is_found_among_all_that_are_read(count, monkeypatch):
    """Wherever it is. The greatest of words is that of numbers without a sign."""
    monkeypatch.setattr(persistent_words, "arith", types.SimpleNamespace(maxui=max))
    words = np.random.default_rng(count).integers(2**32 - 1, size=count).tolist()
    assert persistent_words._greatest(words) == max(words) < 2**32 - 1
    for place in range(count):
        assert persistent_words._greatest([*words[:place], 2**32 - 1, *words[place + 1 :]]) == 2**32 - 1


class Layer(int):
    """A layer's number; its product is a scalar of the kernel."""

    def __mul__(self, pages):
        return scalar(int(self) * pages)
