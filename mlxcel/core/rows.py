"""Which rows there are, and what each holds: a slot and KV while it is seated, and state that outlives both."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import attrs

from mlxcel.core.bind_params import check_bounds, reply_bound
from mlxcel.core.engine_parts import EngineParts
from mlxcel.core.finish import Ending, Released
from mlxcel.core.handover import check_prefix, check_unwind, kv_key, reach
from mlxcel.core.kv import UNWIND
from mlxcel.core.plan import Part, RowOutcome
from mlxcel.core.prefix import DetachedKV, KVKey, Reject, StatePayload, refuse_adoption
from mlxcel.core.prompt_ids import check_prompt
from mlxcel.core.request import SequenceSpec
from mlxcel.core.saved_prefix import SavedPrefix, export, restore
from mlxcel.core.sequence import Sequence, SequenceState
from mlxcel.errors import BatchShapeError, CapacityError, TrimError, UnknownSequence

log = logging.getLogger("mlxcel.engine")


class Rows:
    """The rows of an engine. A row that lost its KV has no slot; it is seated again by the next reservation."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._rows: dict[int, Sequence] = {}
        self._free_slots = list(range(parts.settings.slots - 1, -1, -1))
        self._next_id = 1
        self._epoch = 0  # of the KV arrays: one more with each loss

    def __iter__(self) -> Iterator[Sequence]:
        """In the order they were opened, those that wait for a step to be forgotten too."""
        return iter(list(self._rows.values()))

    def find(self, sequence_id: int) -> Sequence | None:
        """The row, unless it is closed."""
        row = self._rows.get(sequence_id)
        return None if row is None or row.closing else row

    def get(self, sequence_id: int) -> Sequence:
        """UnknownSequence for a row that was never open, or is closed."""
        row = self._rows.get(sequence_id)
        if row is None or row.closing:
            raise UnknownSequence(sequence_id)
        return row

    def get_all(self, parts: Iterable[Part]) -> list[Sequence]:
        """As `get`, the row of each part."""
        rows = []
        for part in parts:
            row = self._rows.get(part.sequence_id)
            if row is None or row.closing:
                raise UnknownSequence(part.sequence_id)
            rows.append(row)
        return rows

    # --- coming and going -------------------------------------------------------------------------------------------

    def open(self, spec: SequenceSpec, prefix: DetachedKV | None = None, length: int = 0) -> Sequence:
        """A new row, behind the first `length` positions of `prefix` where there is one. What a stage that fails came
        behind is undone."""
        parts, context = self._parts, self._parts.settings.context
        check_prompt(spec.prompt_ids, vocab=parts.settings.vocab, context=context)
        max_new = reply_bound(spec.params, len(spec.prompt_ids), context)
        check_bounds(spec.params, vocab=parts.settings.vocab, max_new=max_new)
        row = Sequence(self._next_id, spec, None, max_new, context, None, None)
        self.seat(row, prefix, length)
        try:
            row.sampler_state = parts.sampler.open(spec)
            row.runs = spec.params.logprobs is None and parts.sampler.memoryless(row.sampler_state)
            row.finish_state = parts.finish.open(spec, max_new=max_new, context=context)
        except BaseException:
            self._leave(row, to_holder=prefix is not None)
            raise
        self._next_id += 1
        self._rows[row.id] = row
        if max_new == 0:
            row.state, row.ending = SequenceState.FINISHED, Ending("max_tokens")
        return row

    def forget(self, row: Sequence) -> None:
        """The row is gone, with all it held."""
        del self._rows[row.id]
        self.unseat(row)

    def forget_closed(self, rows: Iterable[Sequence]) -> None:
        """Those that were closed while a step of them was in flight, now that none is."""
        for row in rows:
            if row.closing and row.in_flight == 0 and row.id in self._rows:
                self.forget(row)

    # --- slot and KV --------------------------------------------------------------------------------------------------

    def seat(self, row: Sequence, prefix: DetachedKV | None = None, length: int = 0) -> None:
        """Give a row a slot and KV: none, or the first `length` positions of `prefix`. CapacityError without room,
        AdoptError for a prefix that it cannot begin with; nothing changed then."""
        parts = self._parts
        if not self._free_slots:
            raise CapacityError(f"all {parts.settings.slots} rows are taken", hint="close a sequence first")
        capacity = min(row.context, row.prompt_length + row.max_new)
        if prefix is None:
            parts.kv.open(row.id, capacity)
        else:
            self._check_prefix(row, prefix, length)
            parts.kv.adopt(row.id, capacity, prefix.pages, length)
        slot = self._free_slots[-1]
        try:
            parts.backend.open(slot, row.spec)
            if prefix is not None and prefix.payload is not None:
                try:
                    parts.backend.import_state(slot, prefix.payload.arrays)
                except BaseException:
                    parts.backend.release(slot)
                    raise
        except BaseException:
            if prefix is None or parts.kv.shares:
                parts.kv.free(row.id)
            else:
                parts.kv.detach(row.id, length)
            raise
        self._free_slots.pop()
        row.slot, row.epoch = slot, self._epoch
        row.stored = row.adopted = row.written = length
        row.prefilled = 0
        if prefix is not None:
            row.prefilled = min(length, prefix.prefilled)
            row.written = length if prefix.payload is None else prefix.payload.written

    def seat_all(self, rows: Iterable[Sequence]) -> list[Sequence]:
        """Seat those of `rows` that lost their KV; returns which. All of them or none."""
        seated: list[Sequence] = []
        try:
            for row in rows:
                if row.slot is None:
                    self.seat(row)
                    seated.append(row)
        except BaseException:
            self.unseat_all(seated)
            raise
        return seated

    def unseat(self, row: Sequence) -> None:
        """Take slot and KV away. Harmless where there is none."""
        if row.slot is not None:
            self._leave(row, to_holder=False)
            row.stored = row.adopted = row.prefilled = row.written = row.rewindable = 0

    def unseat_all(self, rows: Iterable[Sequence]) -> None:
        for row in rows:
            self.unseat(row)

    def _leave(self, row: Sequence, *, to_holder: bool) -> None:
        """Give the slot back, and the KV; with `to_holder`, pages that moved here go back to where they came from."""
        slot, row.slot = row.slot, None
        if slot is None:
            return
        self._free_slots.append(slot)
        try:
            if to_holder and not self._parts.kv.shares:
                self._parts.kv.detach(row.id, row.adopted)
            else:
                self._parts.kv.free(row.id)
        finally:
            self._parts.backend.release(slot)

    def trim(self, row: Sequence) -> TrimError | None:
        """Give back positions beyond what is stored and in flight."""
        if row.slot is None:
            return None
        length = row.stored + row.fed
        try:
            kept = self._parts.kv.trim(row.id, length)
        except Exception as error:
            log.warning("sequence %d could not be trimmed", row.id, exc_info=error)
            return TrimError(f"sequence {row.id}: the KV store cannot trim to {length} positions: {error!r}")
        if kept == length:
            return None
        return TrimError(f"sequence {row.id}: the KV store kept {kept} positions where {length} are valid")

    def trim_all(self) -> None:
        """Behind an interrupt: the KV store again counts what the rows count."""
        for row in self:
            if (short := self.trim(row)) is not None and not row.ended:
                self.fail(row, short)

    # --- what befalls a row -------------------------------------------------------------------------------------------

    def preempt(self, row: Sequence) -> None:
        """The row loses KV and slot and nothing else (spec C18): a plan over prompt ++ output[:-1] brings it back."""
        row.state = SequenceState.PREEMPTED
        self._parts.finish.pause(row.finish_state)
        self.unseat(row)

    def lose_kv(self) -> None:
        """The KV arrays are gone: rows that had something in them start over (spec E18)."""
        self._epoch += 1
        for row in self:
            if not row.ended and row.slot is not None and (row.stored or row.state is not SequenceState.OPEN):
                self.preempt(row)

    def unwind(self, row: Sequence, count: int) -> None:
        """Take back `count` stored positions. TrimError, and the row failed, where the store keeps too few."""
        parts = self._parts
        check_unwind(
            row,
            count,
            most=UNWIND,
            spec=parts.kv_spec,
            context=parts.settings.context,
            chunk=parts.settings.chunk,
        )
        if count == 0:
            return
        row.stored -= count
        row.prefilled = min(row.prefilled, row.stored)
        if row.rewindable:
            row.steps -= 1
            row.rewindable = 0
        if row.state is SequenceState.DECODING and row.stored < row.prompt_length:
            row.state = SequenceState.PREFILLING
        if (short := self.trim(row)) is not None:
            self.fail(row, short)
            raise short

    def fail(self, row: Sequence, error: Exception, tail: Released | None = None) -> RowOutcome:
        """The row ends with an error, and with the text that waited (spec F13) unless `tail` says what of it counts."""
        if tail is None and not row.ended:
            try:
                tail = self._parts.finish.flush(row.finish_state)
            except Exception as lost:
                log.warning("sequence %d lost the end of its text", row.id, exc_info=lost)
        row.state, row.error, row.ending = SequenceState.FAILED, error, None
        tail = tail or Released()
        return RowOutcome(row.id, text=tail.text, reasoning=tail.reasoning, error=error)

    # --- KV that leaves a row -----------------------------------------------------------------------------------------

    def key(self, spec: SequenceSpec | None) -> KVKey:
        parts = self._parts
        return kv_key(spec, parts.kv, parts.kv_spec, parts.backend.caps, parts.settings)

    def detach(self, row: Sequence, length: int) -> DetachedKV:
        """The first `length` positions, for the caller; the row has neither KV nor slot any more (spec V13)."""
        if row.state is not SequenceState.FINISHED or row.in_flight:
            raise BatchShapeError(
                f"sequence {row.id} is {row.state.value} with {row.in_flight} steps in flight, and keeps its KV",
                hint="detach a row that finished or was cancelled",
            )
        record = self._record(row, length)
        record = attrs.evolve(record, pages=self._parts.kv.detach(row.id, length))
        slot, row.slot = row.slot, None
        if slot is not None:
            self._free_slots.append(slot)
            self._parts.backend.release(slot)
        return record

    def share(self, row: Sequence, length: int) -> DetachedKV:
        """The first `length` positions, for the caller too (spec V3): a running row goes on and copies what it writes
        into."""
        if not self._parts.kv.shares:
            raise refuse_adoption(
                Reject.MODE_MISMATCH, f"the KV storage {self._parts.kv.name!r} shares nothing between rows"
            )
        record = self._record(row, length)
        self._parts.kv.retain(record.pages)
        return record

    def export(self, prefix: DetachedKV) -> SavedPrefix:
        """What a record holds, as host arrays of its valid positions."""
        return export(self._parts.backend, prefix)

    def restore(self, saved: SavedPrefix) -> DetachedKV | None:
        """What `export` gave, on pages of this store, for the caller; None while it has no room. AdoptError for KV of
        another kind."""
        own = attrs.evolve(self.key(None), isolation=saved.key.isolation, salt=saved.key.salt)
        if (reason := own.difference(saved.key)) is not None:
            raise refuse_adoption(reason, f"the saved prefix is KV of another kind: {reason.value}")
        return restore(self._parts.backend, self._parts.kv, saved, epoch=self._epoch)

    def _record(self, row: Sequence, length: int) -> DetachedKV:
        parts, settings = self._parts, self._parts.settings
        if parts.kv_spec.recurrent:
            raise refuse_adoption(
                Reject.MODEL_OWNED_STATE, f"sequence {row.id} keeps state that does not leave its row"
            )
        if not 0 < length <= row.stored:
            raise BatchShapeError(f"sequence {row.id}: {length} positions to hand over, {row.stored} are stored")
        if row.slot is None or row.epoch != self._epoch:
            raise refuse_adoption(Reject.FAULT, f"the KV of sequence {row.id} was lost in a failed step")
        payload = None
        if parts.kv_spec.windowed:
            arrays, nbytes = parts.backend.export_state(row.slot)
            least = reach(parts.kv_spec, row.written, context=settings.context, chunk=settings.chunk)
            payload = StatePayload(arrays, nbytes, least, row.written)
        table = parts.kv.page_table(row.id)[: -(-length // parts.kv.page_size)]
        return DetachedKV(
            ids=row.tokens(0, length),
            key=self.key(row.spec),
            pages=tuple(table.tolist()),
            prefilled=min(row.prefilled, length),
            epoch=self._epoch,
            payload=payload,
        )

    def _check_prefix(self, row: Sequence, prefix: DetachedKV, length: int) -> None:
        check_prefix(
            prefix,
            length,
            row.tokens(0, row.length),
            key=self.key(row.spec),
            epoch=self._epoch,
            spec=self._parts.kv_spec,
            chunk=self._parts.settings.chunk,
        )
