"""Conformance of what a family keeps: `check_kv_spec(MyFamily(), checkpoint)` in a test of its own distribution.

On reference-numpy. A row must be the same bits wherever it lives and whoever lived there before: its pages, rings and
states are full of NaN when it comes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.engine import Engine
from mlxcel.core.family import ModelFamily
from mlxcel.core.kv import BLOCK, KVLayout, KVSpec, SlidingKV, ceil_block
from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Piece
from mlxcel.core.request import SequenceSpec
from mlxcel.core.settings import EngineSettings
from mlxcel.errors import BatchShapeError
from mlxcel.plugins.kv.dense import DenseKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.family_run import Feed, LoadedFamily, Place, pieces_of
from mlxcel.testing.laws import broken, same_bits
from mlxcel_reference_numpy.backend import NumpyBackend
from mlxcel_reference_numpy.storage import Pages, make_storage

ITEM = 4
"""Bytes of a float32."""
LENGTH = 300
"""Tokens of a prompt that has a block border, a second one, and positions behind it."""
PAGES = (16, 64, 128)
BEYOND = 6
"""Tokens of a prompt behind the ring of its largest window."""
SHORT = 9
"""Tokens of the rows that a slot sees one after the other."""


def check_kv_spec(family: ModelFamily, checkpoint: Checkpoint) -> None:
    """All laws of what a family keeps, on one checkpoint. AssertionError says which law broke, and where.

    - bytes: what the KV spec says a position and a row take is what the arrays of a backend take.
    - storage: on one big page and on pages of 16, 64 and 128 the same bits, whatever the arrays held before.
    - ring: a prompt that goes round the ring of its windows is the same bits as one that does not.
    - overrun: a step that was dropped leaves no trace in its row.
    - slot: a row in the slot and pages of one that is gone, with a step of it dropped, is the same bits as in new ones.
    - chunk: a piece that is longer than the windows were made for is refused, and costs no forward.
    """
    loaded = LoadedFamily.load(family, checkpoint)
    kv = family.kv_spec(loaded.config)
    context, vocab = loaded.config.context, loaded.config.vocab_size
    rng = np.random.default_rng(0)
    _check_bytes(kv, context)
    _check_storage(loaded, rng.integers(0, vocab, min(LENGTH, context), np.int32))
    for chunk in (1, 7):
        ring = max((layer.ring(context=context, chunk=chunk) for layer in _windows(kv)), default=0)
        if 0 < ring < context:
            _check_ring(loaded, rng.integers(0, vocab, min(ring + BEYOND, context), np.int32), chunk, ring)
    if context > 2:
        ids = rng.integers(0, vocab, min(SHORT, context), np.int32)
        _check_overrun(loaded, ids)
        _check_slot(loaded, ids, rng.integers(0, vocab, len(ids), np.int32))
    _check_chunk(kv, vocab)


def _windows(kv: KVSpec) -> list[SlidingKV]:
    return [layer for layer in kv.layers if isinstance(layer, SlidingKV)]


def _check_bytes(kv: KVSpec, context: int) -> None:
    pages, page_size, slots = 3, 16, 2
    for chunk in (1, BLOCK):
        layout = KVLayout(kv, pages, page_size, paged=True, slots=slots, context=context, chunk=chunk)
        taken = {"position": 0, "row": 0}
        for layer in make_storage(layout):
            taken["position" if isinstance(layer, Pages) else "row"] += sum(array.nbytes for array in layer.arrays)
        said = {
            "position": pages * page_size * kv.bytes_per_position(ITEM),
            "row": slots * kv.bytes_per_row(ITEM, context=context, chunk=chunk),
        }
        for what, count in (("position", pages * page_size), ("row", slots)):
            if said[what] != taken[what]:
                raise broken(
                    "bytes",
                    f"bytes_per_{what} gives {said[what]} for {count} {what}s of context {context} and chunk {chunk}, "
                    f"the arrays take {taken[what]}",
                )


def _check_storage(loaded: LoadedFamily, ids: np.ndarray) -> None:
    """Pieces end beside every border of pages and blocks."""
    total = len(ids)
    dense = loaded.logits(ids)
    if not np.isfinite(dense).all():
        position, token = np.argwhere(~np.isfinite(dense))[0]
        raise broken("storage", f"logit {token} at position {position} is {dense[position, token]}")
    borders = {border + off for border in (*PAGES, 2 * BLOCK) for off in (-1, 0, 1)}
    cuts = sorted(cut for cut in {1, *borders} if cut < total)
    for page_size in (ceil_block(total), *PAGES):
        count = -(-total // page_size)
        order = np.random.default_rng(page_size).permutation(count + 3)
        place = Place(1, tuple(order[:count].tolist()))
        what = f"in pieces that end at {cuts} on pages of {page_size}, all arrays NaN before"
        (got,) = loaded.run(
            [ids], [[f] for f in pieces_of(0, total, cuts)], places=[place], page_size=page_size, held=np.nan
        )
        same_bits("storage", what, got, dense)


def _check_ring(loaded: LoadedFamily, ids: np.ndarray, chunk: int, ring: int) -> None:
    context = loaded.config.context
    whole = loaded.logits(ids, context=context)
    cuts = list(range(chunk, len(ids), chunk))
    steps = [[feed] for feed in pieces_of(0, len(ids), cuts)]
    (got,) = loaded.run([ids], steps, context=context, chunk=chunk, held=np.nan)
    what = f"in pieces of {chunk} round a ring of {ring} positions"
    same_bits("ring", what, got, whole)


def _check_overrun(loaded: LoadedFamily, ids: np.ndarray) -> None:
    """After an odd and an even number of steps, so that each copy of a state is once the older one."""
    total = len(ids)
    usual = loaded.logits(ids)
    for steps in (1, 2):
        other = (ids[steps : steps + 1] + 1) % loaded.config.vocab_size
        run = [*pieces_of(0, steps, range(1, steps)), Feed(0, steps, steps + 1, overrun=other), Feed(0, steps, total)]
        (got,) = loaded.run([ids], [[feed] for feed in run])
        what = f"behind {steps} steps, and one that was dropped"
        same_bits("overrun", what, got, usual)


def _check_slot(loaded: LoadedFamily, ids: np.ndarray, former: np.ndarray) -> None:
    total, place = len(ids), Place(0, (0,))
    usual = loaded.logits(ids)
    for steps in (1, 2):
        gone = pieces_of(0, total - 1, range(1, steps))
        run = [*gone, Feed(0, total - 1, total, overrun=former[-1:]), *pieces_of(1, total, [1])]
        got = loaded.run([former, ids], [[feed] for feed in run], places=[place, place])[1]
        what = f"in the slot of a row that ran {len(gone)} steps, and one that was dropped"
        same_bits("slot", what, got, usual)


class _Idle:
    """The sampler and the finish step of an engine that runs no step."""

    def open(self, spec: SequenceSpec, **bounds: int) -> None:
        """A row has no state."""

    def memoryless(self, state: None) -> bool:
        """It draws nothing."""
        return True


def _check_chunk(kv: KVSpec, vocab: int) -> None:
    """By an engine whose chunk is one token. Its backend has no weights: a forward would raise."""
    idle: Any = _Idle()
    store = DenseKV(kv_spec=kv, slots=1, context=BLOCK, page_size=16)
    settings = EngineSettings(vocab, BLOCK, 1, chunk=1)
    backend = NumpyBackend()
    with Engine(backend=backend, kv_spec=kv, kv=store, sampler=idle, finish=idle, settings=settings) as engine:
        ids = np.zeros(2, np.int32)
        row = engine.open(SequenceSpec("row", ids, SamplingParams(temperature=0, seed=0)))
        plan = ChunkedPlanner(chunk=2, level=engine.level, caps=backend.caps).build(ids)
        try:
            engine.reserve([Piece(row, plan, 0)])
        except BatchShapeError:
            refused = True
        else:
            refused = False
        if refused != bool(_windows(kv)):
            raise broken("chunk", f"a piece of 2 tokens is {'refused' if refused else 'taken'} where the chunk is 1")
