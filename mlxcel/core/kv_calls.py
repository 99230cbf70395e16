"""The calls on an engine that begin a row, and that move its KV: nothing here runs a forward."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mlxcel.core.kv import KVStore
from mlxcel.core.prefix import DetachedKV, KVKey
from mlxcel.core.request import SequenceSpec
from mlxcel.core.reserved import Reserved
from mlxcel.core.rows import Rows
from mlxcel.core.saved_prefix import SavedPrefix
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import BatchShapeError


class KVCalls(ABC):
    """One half of `Engine`; the other runs steps over these rows."""

    def __init__(self, rows: Rows, kv: KVStore) -> None:
        self._rows = rows
        self._kv = kv
        self._reserved: Reserved | None = None

    @abstractmethod
    def _check_healthy(self) -> None:
        """EngineUnhealthy when no row may begin."""

    @property
    def shares(self) -> bool:
        """Whether rows can hold the same KV (`share`)."""
        return self._kv.shares

    def open(self, spec: SequenceSpec) -> int:
        """Begin a row. RequestError for its prompt, CapacityError without room, EngineUnhealthy. Never reuses an id."""
        self._check_healthy()
        return self._rows.open(spec).id

    def adopt(self, spec: SequenceSpec, prefix: DetachedKV, length: int) -> int:
        """Begin a row behind the first `length` positions of `prefix`, which are neither computed nor written (spec
        V14). As `open`; AdoptError, with a reason of spec 8.6, for a prefix it cannot begin with. Where pages are not
        shared they move: the record is spent."""
        self._check_healthy()
        return self._rows.open(spec, prefix, length).id

    def detach(self, sequence_id: int, length: int | None = None) -> DetachedKV:
        """The KV of a row that finished or was cancelled, `length` positions of it or all that are stored, for the
        caller, who hands it to a cache or to `release`. The row stays until `close`, without KV. BatchShapeError for
        another row, AdoptError where KV does not leave a row."""
        row = self._rows.get(sequence_id)
        return self._rows.detach(row, row.stored if length is None else length)

    def share(self, sequence_id: int, length: int | None = None) -> DetachedKV:
        """As `detach`, of any row, which keeps its KV as well: for rows that begin with the same ids. AdoptError where
        pages are not shared."""
        row = self._rows.get(sequence_id)
        return self._rows.share(row, row.stored if length is None else length)

    def release(self, prefix: DetachedKV) -> None:
        """Give up a record that was not spent."""
        self._kv.release(prefix.pages)

    def unwind(self, sequence_id: int, count: int) -> None:
        """Take back the newest `count` stored positions, 0 to 16, none that was adopted; what remains keeps its bits.
        They are fed again by pieces or, in the output, by replayed `Decode`s. RewindError where the layers cannot."""
        row = self._rows.get(sequence_id)
        self._reserved = None
        self._rows.unwind(row, count)

    def preempt(self, sequence_id: int) -> None:
        """Take KV and slot of a row, and nothing else (spec C18). A plan over prompt ++ output[:-1] with `draw=False`
        brings it back, after `resume`, or from position 0 by itself as soon as its first piece is reserved. A row that
        has neither stays so. BatchShapeError for a row that ended or has a step in flight."""
        row = self._rows.get(sequence_id)
        if row.ended or row.in_flight:
            raise BatchShapeError(
                f"sequence {row.id} is {row.state.value} with {row.in_flight} steps in flight, and keeps its KV",
                hint="collect its step first",
            )
        self._reserved = None
        if row.state is not SequenceState.PREEMPTED or row.slot is not None:
            self._rows.preempt(row)

    def resume(self, sequence_id: int, prefix: DetachedKV | None = None, length: int = 0) -> None:
        """Give a preempted row a slot again, and the first `length` positions of a prefix, as `adopt` does.
        CapacityError while no slot is free; the row then stays as it is."""
        self._check_healthy()
        row = self._rows.get(sequence_id)
        if row.state is not SequenceState.PREEMPTED or row.slot is not None:
            raise BatchShapeError(f"sequence {row.id} is {row.state.value}, and has its slot")
        self._rows.seat(row, prefix, length)

    def kv_key(self, spec: SequenceSpec | None = None) -> KVKey:
        """What, beside the ids, the KV of such a row is the KV of (spec X2); of one that anybody may share."""
        return self._rows.key(spec)

    def export(self, prefix: DetachedKV) -> SavedPrefix:
        """What a record holds, as host arrays of its valid positions (spec V16)."""
        return self._rows.export(prefix)

    def restore(self, saved: SavedPrefix) -> DetachedKV | None:
        """The reverse, for the caller; None while the store has no room. AdoptError for KV of another kind."""
        self._reserved = None
        return self._rows.restore(saved)
