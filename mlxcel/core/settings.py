"""The bounds of an engine."""

from __future__ import annotations

import attrs

from mlxcel.core.kv import KVLayout, KVSpec, KVStore
from mlxcel.core.prefix import ModelIdentity


@attrs.frozen
class EngineSettings:
    """`vocab` is V, `context` N (positions a row may hold), `slots` the most rows open at once, `chunk` the most tokens
    of a piece where a layer keeps a window of positions (spec V10), `max_logprobs` the most ids that are listed for a
    position, -1 for V (spec S41). `identity` is what of the model determines the bits of its KV."""

    vocab: int
    context: int
    slots: int
    chunk: int = 2048
    max_consecutive_faults: int = 8
    max_logprobs: int = 20
    identity: ModelIdentity = attrs.field(factory=ModelIdentity)

    def layout(self, spec: KVSpec, kv: KVStore) -> KVLayout:
        """What a backend makes its KV arrays from."""
        return KVLayout(
            spec=spec,
            pages=kv.num_pages,
            page_size=kv.page_size,
            paged=kv.paged,
            slots=self.slots,
            context=self.context,
            chunk=self.chunk,
        )
