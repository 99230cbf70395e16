"""KV that goes from a row to whoever keeps it, and into another row: what may go, and whether it still fits there."""

from __future__ import annotations

import numpy as np

from mlxcel.core.backend import BackendCaps
from mlxcel.core.kv import KVSpec, KVStore, SlidingKV
from mlxcel.core.prefix import DetachedKV, KVKey, Reject, refuse_adoption
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sequence import Sequence
from mlxcel.core.settings import EngineSettings
from mlxcel.errors import BatchShapeError, RewindError


def kv_key(
    spec: SequenceSpec | None, kv: KVStore, kv_spec: KVSpec, caps: BackendCaps, settings: EngineSettings
) -> KVKey:
    """What, beside the ids, the KV of such a row is the KV of (spec X2); None: of one that anybody may share."""
    return KVKey(
        model=settings.identity,
        dtype=caps.dtype,
        level=caps.level,
        kv_mode=caps.dtype,
        store=kv.name,
        page_size=kv.page_size,
        rings=rings(kv_spec, context=settings.context, chunk=settings.chunk),
        isolation=None if spec is None else spec.isolation,
        salt=None if spec is None else spec.cache_salt,
    )


def rings(spec: KVSpec, *, context: int, chunk: int) -> tuple[int, ...]:
    """Positions that the ring of each windowed layer holds, first layer first."""
    if not spec.windowed:
        return ()
    return tuple(layer.ring(context=context, chunk=chunk) for layer in spec.layers if isinstance(layer, SlidingKV))


def check_prefix(
    prefix: DetachedKV, length: int, ids: np.ndarray, *, key: KVKey, epoch: int, spec: KVSpec, chunk: int
) -> None:
    """AdoptError unless a row of `ids` [n] under `key` may begin with the first `length` positions of `prefix`
    (spec V13 to V15, X6, X14, X15). `chunk` is C, `epoch` that of the KV arrays."""
    if spec.recurrent:
        raise refuse_adoption(Reject.MODEL_OWNED_STATE, "this model keeps state that no prefix brings along")
    if prefix.epoch != epoch:
        raise refuse_adoption(Reject.FAULT, "the KV of this prefix was lost in a failed step")
    if (reason := key.difference(prefix.key)) is not None:
        raise refuse_adoption(reason, f"the prefix is KV of another kind: {reason.value}")
    if length < 1:
        raise refuse_adoption(Reject.PREFIX_TOO_SHORT, f"{length} positions are nothing to begin with")
    if length > len(ids) - 1:
        raise refuse_adoption(
            Reject.GRANULE_FLOOR, f"{length} of {len(ids)} positions would be adopted, the last must be computed"
        )
    if length > prefix.length or not np.array_equal(prefix.ids[:length], ids[:length]):
        raise refuse_adoption(
            Reject.NO_MATCH, f"the prefix has {prefix.length} positions, and not the {length} that the row begins with"
        )
    if key.level == "R1":
        if length > prefix.prefilled:
            raise refuse_adoption(
                Reject.DECODED_POSITIONS,
                f"{length} positions would be adopted, pieces computed the first {prefix.prefilled}",
            )
        if length % chunk:
            raise refuse_adoption(Reject.GRANULE_FLOOR, f"{length} positions are no multiple of the chunk of {chunk}")
    if spec.windowed:
        reach = None if prefix.payload is None else prefix.payload.reach
        if reach is None or length < reach:
            raise refuse_adoption(
                Reject.LAYOUT_CONSTRAINTS, f"the windows of this prefix can be used from position {reach} on"
            )


def reach(spec: KVSpec, written: int, *, context: int, chunk: int) -> int:
    """The least length at which the rings of a row that wrote `written` positions hold all that later tokens see."""
    least = 0
    for layer in spec.layers:
        if isinstance(layer, SlidingKV) and (gone := written - layer.ring(context=context, chunk=chunk)) > 0:
            least = max(least, gone + layer.window - 1)
    return least


def check_unwind(row: Sequence, count: int, *, most: int, spec: KVSpec, context: int, chunk: int) -> None:
    """BatchShapeError for a count that no row could be taken back by, RewindError where this one cannot be with exact
    bits (spec 1.2)."""
    if not 0 <= count <= most:
        raise BatchShapeError(f"sequence {row.id}: {count} positions to take back, it must be 0 to {most}")
    if row.in_flight:
        raise BatchShapeError(f"sequence {row.id} has a step in flight", hint="collect it first")
    if row.ended:
        raise BatchShapeError(f"sequence {row.id} is {row.state.value} and stays what it is")
    if count > row.stored - row.adopted:
        raise BatchShapeError(
            f"sequence {row.id}: {count} positions to take back, {row.stored - row.adopted} of its own are stored"
        )
    if count and spec.recurrent and count != row.rewindable:
        raise RewindError(
            f"sequence {row.id}: its state goes back by {row.rewindable} positions, not by {count}",
            hint="preempt it, and compute it anew",
        )
    if count and row.stored - count < reach(spec, row.written, context=context, chunk=chunk):
        raise RewindError(f"sequence {row.id}: its windows do not hold what position {row.stored - count} sees")
