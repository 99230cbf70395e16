"""KV that belongs to no row: what it is the KV of, and where it lives. Host records; the arrays stay in the backend."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import attrs
import numpy as np

from mlxcel.errors import AdoptError

FORMAT: Final = 2
"""Of what a root says; a change of what determines KV bits, or of how they are laid out, is another number."""


class Reject(StrEnum):
    """Why KV was not reused, or not kept (spec 8.6). Metrics, stats and logs are generated from this list."""

    DISABLED = "disabled"  # switched off, by flag or request
    NO_MATCH = "no_match"  # no common prefix
    PREFIX_TOO_SHORT = "prefix_too_short"  # below the shortest hit and entry
    GRANULE_FLOOR = "granule_floor"  # nothing left after flooring
    OVERSIZED = "oversized"  # entry above capacity
    EMPTY_SET = "empty_set"  # cache empty
    MODE_MISMATCH = "mode_mismatch"  # other store
    KV_MODE_MISMATCH = "kv_mode_mismatch"  # other KV dtype or mode
    ROPE_REGIME_MISMATCH = "rope_regime_mismatch"  # other position scaling
    ADAPTER_MISMATCH = "adapter_mismatch"  # other adapter
    MODEL_OWNED_STATE = "model_owned_state"  # recurrent layers
    LAYOUT_CONSTRAINTS = "layout_constraints"  # a ring that no longer holds what is needed; other sizes
    NEEDS_PROMPT_LOGITS = "needs_prompt_logits"  # prompt logprobs, echo with logprobs
    DECODED_POSITIONS = "decoded_positions"  # positions that no piece computed, at R1
    FAULT = "fault"  # the KV was lost
    SNAPSHOT_DIVERGED = "snapshot_diverged"  # reserved


@attrs.frozen
class ModelIdentity:
    """What of a loaded model determines the bits of its KV. `fingerprint` stands for names, shapes, dtypes and values
    of the weights, `rope` for the scaling of positions, `backend` for who computes."""

    fingerprint: str = ""
    quantisation: str = ""
    rope: str = ""
    adapter: str | None = None
    adapter_scale: float = 1.0
    backend: str = ""


@attrs.frozen
class KVKey:
    """Everything but the ids that determines KV bits, and who may share them (spec X2)."""

    model: ModelIdentity
    dtype: str  # of the computation
    level: str
    kv_mode: str  # how KV values are held
    store: str
    page_size: int
    rings: tuple[int, ...] = ()  # positions that the ring of each windowed layer holds (spec V9)
    isolation: bytes | None = None
    salt: str | None = None
    version: int = FORMAT

    def root(self) -> bytes:
        """BLAKE2b-256 over (tag, length, bytes) of each field, so that no field can pass for another."""
        fields: list[tuple[bytes, bytes | None]] = [
            (b"V", str(self.version).encode()),
            (b"M", self.model.fingerprint.encode()),
            (b"B", self.model.backend.encode()),
            (b"Q", self.model.quantisation.encode()),
            (b"D", self.dtype.encode()),
            (b"L", self.level.encode()),
            (b"K", self.kv_mode.encode()),
            (b"S", self.store.encode()),
            (b"P", str(self.page_size).encode()),
            (b"W", ",".join(map(str, self.rings)).encode()),
            (b"R", self.model.rope.encode()),
            (b"A", None if self.model.adapter is None else self.model.adapter.encode()),
            (b"F", repr(float(self.model.adapter_scale)).encode()),
            (b"I", self.isolation),
            (b"C", None if self.salt is None else self.salt.encode("utf-8", "surrogatepass")),
        ]
        digest = hashlib.blake2b(digest_size=32)
        for tag, value in fields:
            if value is not None:
                digest.update(tag + len(value).to_bytes(8, "little") + value)
        return digest.digest()

    def difference(self, other: KVKey) -> Reject | None:
        """The first reason why KV under `other` is none of ours, or None. Of another salt or identity nothing is said:
        it does not match (spec X16)."""
        if (self.version, self.isolation, self.salt) != (other.version, other.isolation, other.salt):
            return Reject.NO_MATCH
        same_weights = self.model.fingerprint == other.model.fingerprint
        if not same_weights or self.model.quantisation != other.model.quantisation:
            return Reject.NO_MATCH
        if (self.model.adapter, self.model.adapter_scale) != (other.model.adapter, other.model.adapter_scale):
            return Reject.ADAPTER_MISMATCH
        if self.model.rope != other.model.rope:
            return Reject.ROPE_REGIME_MISMATCH
        own = (self.model.backend, self.dtype, self.level, self.kv_mode)
        if own != (other.model.backend, other.dtype, other.level, other.kv_mode):
            return Reject.KV_MODE_MISMATCH
        if self.store != other.store:
            return Reject.MODE_MISMATCH
        same_layout = (self.page_size, self.rings) == (other.page_size, other.rings)
        return None if same_layout else Reject.LAYOUT_CONSTRAINTS


@attrs.frozen(eq=False)
class StatePayload:
    """A copy of what a row owned beside its pages (spec V9), as its backend wrote it. `arrays` are the backend's own
    kind; all that others may do is `np.asarray`, to write them to a file.

    The rings hold what tokens at `reach` and behind need; `written` positions had been written into them.
    """

    arrays: Sequence[Any]
    nbytes: int
    reach: int
    written: int


@attrs.frozen(eq=False)
class DetachedKV:
    """The KV of `length` positions, held by whoever has this record (spec V13).

    On many pages it can be adopted any number of times and each adoption takes holds of its own; on one big page
    adoption takes the page itself, and the record is spent. `Engine.release` gives up what is not spent.
    """

    ids: np.ndarray  # int32 [length]
    key: KVKey
    pages: tuple[int, ...]  # in the order of positions; the last may be partly filled
    prefilled: int  # of the positions, from 0, that pieces of a plan computed (spec V15)
    epoch: int  # of the KV arrays; after a loss they are others
    payload: StatePayload | None = None

    @property
    def length(self) -> int:
        return len(self.ids)


def refuse_adoption(reason: Reject, message: str) -> AdoptError:
    """The error of a prefix that cannot be used; the caller opens cold."""
    return AdoptError(message, reason=reason.value)
