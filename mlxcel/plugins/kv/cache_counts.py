"""What a prompt cache counts; the numbers only grow (spec X17)."""

from __future__ import annotations

from collections import Counter

import attrs

from mlxcel.core.prefix import Reject


@attrs.define
class CacheCounts:
    """Of rows that got their place, and of KV that was offered."""

    lookups: int = 0
    hits: int = 0
    reused: int = 0  # tokens
    inserts: int = 0
    rejects: Counter[Reject] = attrs.field(factory=Counter)
    last_reject: Reject | None = None

    def hit(self, length: int) -> None:
        self.lookups += 1
        self.hits += 1
        self.reused += length

    def miss(self, reason: Reject | None) -> None:
        self.lookups += 1
        if reason is not None:
            self.reject(reason)

    def reject(self, reason: Reject) -> int:
        """Returns 0: the positions that were taken or kept."""
        self.rejects[reason] += 1
        self.last_reject = reason
        return 0
