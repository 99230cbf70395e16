"""What a compiled program is found by: whatever may change it changes that, and what cannot be told is not kept."""

import enum
import math
import re
import types
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import attrs
import jax
import numpy as np
import pytest

from mlxcel.core.kv import FullKV, KVLayout, KVSpec, RecurrentKV, SlidingKV
from mlxcel.plugins.families.llama import Llama
from mlxcel.plugins.families.qwen import Qwen3
from mlxcel.plugins.sampling.chain import ChainSampler
from mlxcel.testing.byte_tokenizer import ByteTokenizer
from mlxcel.testing.random_checkpoint import SHAPES, random_checkpoint
from mlxcel_jax_cuda import sources
from mlxcel_jax_cuda.block_arrays import BlockIndex
from mlxcel_jax_cuda.drawing import DrawShape
from mlxcel_jax_cuda.fingerprint import NotPlain, fingerprint
from mlxcel_jax_cuda.launch import Shape
from mlxcel_jax_cuda.model import Model
from mlxcel_jax_cuda.numerics import Numerics
from mlxcel_jax_cuda.weights import Linear, WeightIndex


class Pair(NamedTuple):
    a: object
    b: object


class Other(NamedTuple):
    a: object
    b: object


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


ONE_WAY, OTHER_WAY = (enum.Enum("Way", names, module=__name__) for names in ("A B", "B A"))


@attrs.frozen
class Record:
    a: object
    b: object = attrs.field(default=None, eq=False, repr=False)


class Stateless:
    pass


class AlsoStateless(Stateless):
    pass


APART = [
    None, False, True, 0, 1, -1, 1 << 70, 0.0, -0.0, 1.0, math.nextafter(1.0, 2), math.inf, 1j, "", "1", "None", b"",
    b"1", (), (1,), (1, 2), ((1,), 2), ((1, 2),), (1, (2,)), ("12", "3"), ("1", "23"), ["12", "3"], [], [1], {},
    {1: 2}, {"1": 2}, {2: 1}, {1: 2, 3: 4}, {3: 4, 1: 2}, {1: 4, 3: 2}, frozenset(), frozenset({1}), {1}, 1 << 20000,
    Pair(1, 2), Other(1, 2), Pair(2, 1),
    Colour.RED, Colour.GREEN, Rights(0), Rights(1), Rights(3), ONE_WAY.A, OTHER_WAY.A,
    Record(1), Record(1, 2), Record(2), Record((1,)), Stateless(), AlsoStateless(),
    np.int32(1), np.int64(1), np.float32(1), np.array(1), np.array([1]), np.array([[1]]), np.array([1, 2]),
    np.array([[1], [2]]), np.array([1, 2], ">i8"), np.array([1.0, 2.0]), np.array("1"),
    np.dtype("int32"), np.dtype(">i4"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    """As if this file had been read with nothing behind it, and were older than the process: pytest runs code that
    nobody finds by reading."""
    monkeypatch.setattr("mlxcel_jax_cuda.fingerprint.OWN", (*sources.OWN, __name__))


def test_values_that_differ_in_anything_are_told_apart():
    prints = [fingerprint(value) for value in APART]
    assert len(set(prints)) == len(APART)
    assert [fingerprint([value]) for value in APART] != prints
    assert prints == [fingerprint(value) for value in APART]


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"a": 1, "b": 2}, types.MappingProxyType({"a": 1, "b": 2})),
        ({"a": 1, "b": 2}, OrderedDict(a=1, b=2)),
        (frozenset("abcdefgh"), frozenset(reversed("abcdefgh"))),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (Record(1), Record(a=1, b=None)),
    ],
)
def test_kinds_of_mappings_and_memory_do_not_count(one, same):
    """Nor the order of what has none; that of a mapping does, since a loop over it may be traced."""
    assert fingerprint(one) == fingerprint(same)


class Stateful:
    def __init__(self):
        self.seen = 0


class Slotted:
    __slots__ = ("seen",)


class Number(int):
    pass


def made_here():
    class Local:
        pass

    return Local()


class Grown(Record):
    """As a config of a third party that says more than what it inherits."""

    def __init__(self, a, more):
        super().__init__(a)
        object.__setattr__(self, "more", more)


class Slot(Record):
    __slots__ = ("more",)


@attrs.frozen(slots=False)
class Table(dict):
    a: int


class Named(Pair):
    """With a dict of its own."""


UNTOLD = {
    "more than the fields of a record": Grown(1, 2),
    "a slot beside the fields of a record": Slot(1),
    "a record that is a dict": Table(1),
    "more than the fields of a tuple": (named := Named(1, 2), setattr(named, "more", 1))[0],
    "a masked array": np.ma.array([1, 2], mask=[True, False]),
    "an array of records": np.zeros(1, [("a", np.int32)]),
    "a type of records": np.dtype([("a", np.int32)]),
    "a mapping that makes values": defaultdict(int),
    "an object with state": Stateful(),
    "one with a slot": Slotted(),
    "one inside": {"a": (1, [Stateful()])},
    "a function": lambda: 1,
    "a method": [].append,
    "a class": Stateless,
    "a module": math,
    "of C": re.compile("a"),
    "of C, and of Python's own": range(3),
    "of C, in a package of Python": np.add,
    "a kind of number": Number(3),
    "objects in an array": np.array([None, 1]),
    "a class that a function made": made_here(),
    "an object": object(),
    "a generator": (each for each in ()),
}


@pytest.mark.parametrize("value", UNTOLD.values(), ids=UNTOLD)
def test_what_cannot_be_told_is_refused(value):
    with pytest.raises(NotPlain):
        fingerprint(value)
    with pytest.raises(NotPlain):
        fingerprint(Record(1, value))


# --- static arguments ----------------------------------------------------------------------------------------------


def statics(vocab=320, tokenizer=None):
    """All kinds of them, each with something in every field."""
    shape = {**SHAPES["llama-3.2-1b"], "num_hidden_layers": 2, "vocab_size": 128, "hidden_size": 256}
    family = Llama()
    config = family.parse_config(random_checkpoint(family, shape))
    spec = KVSpec((FullKV(2, 64, 64), SlidingKV(2, 64, 64, 100), RecurrentKV(((2, 3), (4,)))))
    layout = KVLayout(spec, pages=4, page_size=64, paged=True, slots=3, context=128, chunk=32)
    block = family.standard_block(config, 128)
    index = WeightIndex(2, ((("qkv", 0), Linear(3, 4, (5, 6), BlockIndex.of(block).shapes.qkv)),), ((("norm", 0), 1),))
    numerics = Numerics("cpu", "float32", "R2", 132)
    sampler = ChainSampler(vocab=vocab, tokenizer=tokenizer)
    draws = [DrawShape.of(sampler, sampling, 8) for sampling in sampler.stage_sets(8)]
    models = [Model(family, config, kind, layout, numerics, block) for kind in (index, BlockIndex.of(block))]
    return [*models, Shape(8, 1, 8, 2), *draws]


def changed(value):
    """Values of the same kind as one, each of which differs from it in one place."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield f"{value}x"
    elif value is None:
        yield 0
    elif isinstance(value, np.ndarray):
        yield np.concatenate([value, value])
    elif isinstance(value, tuple | list):
        yield value[:-1] if value else type(value)((0,))
        for place, each in enumerate(value):
            yield from (type(value)((*value[:place], new, *value[place + 1 :])) for new in changed(each))
    elif isinstance(value, frozenset):
        yield value | {"another"}
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            for new in changed(getattr(value, field.name)):
                other = object.__new__(type(value))  # no check and no conversion of a constructor
                for each in attrs.fields(type(value)):
                    object.__setattr__(other, each.name, new if each is field else getattr(value, each.name))
                yield other
    elif isinstance(value, Llama):
        yield Qwen3()
    elif isinstance(value, ChainSampler):
        yield ChainSampler(vocab=321)
        yield ChainSampler(vocab=320, tokenizer=ByteTokenizer())


def test_a_field_of_static_arguments_that_changes_is_another_program():
    """Each of every record, however deep. Dicts are not among them: records that are hashed have none."""
    total = 0
    for static in statics():
        prints = [fingerprint(static), *map(fingerprint, changed(static))]
        assert len(set(prints)) == len(prints)
        total += len(prints)
    assert total > 300


def test_equal_static_arguments_made_anew_are_the_same_program():
    assert [fingerprint(static) for static in statics()] == [fingerprint(static) for static in statics()]


class Newlines(ByteTokenizer):
    def token_bytes(self, token):
        return b"\n" if token == 7 else super().token_bytes(token)


def test_a_draw_goes_by_the_tokens_that_it_reads():
    """XTC spares newlines; the other stages know no token by its text."""
    first, second = (statics(tokenizer=tokenizer)[3:] for tokenizer in (ByteTokenizer(), Newlines()))
    differ = [fingerprint(a) != fingerprint(b) for a, b in zip(first, second, strict=True)]
    assert differ == ["xtc" in shape.stages for shape in first]
    assert any(differ)


class Fewer(ChainSampler):
    def stage_sets(self, rows):
        return super().stage_sets(rows)[:1]


class Coarser(ChainSampler):
    def _all_newlines(self):
        return np.ones(320, bool)


class Begun(ChainSampler):
    def __init__(self, **given):
        super().__init__(**given)
        self._stages = self._stages[1:]


class Unsaid:
    name = "unsaid"

    def draw(self, xp, logits, sampling, carry):
        raise NotImplementedError


def test_another_sampler_has_a_draw_of_its_own_unless_it_changes_the_host_alone():
    _, _, _, shape, *_ = statics()
    fewer = attrs.evolve(shape, sampler=Fewer(vocab=320))
    assert fingerprint(fewer) == fingerprint(shape)
    for sampler in (Coarser(vocab=320), Begun(vocab=320), Unsaid()):
        with pytest.raises(NotPlain, match="a draw of the sampler"):
            fingerprint(attrs.evolve(shape, sampler=sampler))


class Louder:
    """A third party's logits processor."""

    stage, history = "processors", 0

    def prepare(self, args, spec):
        return {"by": np.float32(2)}

    def apply(self, xp, logits, params, history):
        return logits * params["by"][:, None]


def test_a_draw_with_a_third_partys_processor_is_not_kept():
    sampler = ChainSampler(vocab=320, processors={"louder": Louder()})
    known = DrawShape.of(sampler, sampler.stage_sets(8)[0], 8)
    assert fingerprint(known) == fingerprint(statics()[3])
    with pytest.raises(NotPlain):
        fingerprint(attrs.evolve(known, stages=("processors.0.louder",)))


def test_keys_of_jax_are_no_addresses():
    """Else no other process would find a program."""
    assert " at 0x" not in repr(sorted(jax.config.values.items()))
