"""Weights that engines of one process use one behind the other: only the first of them reads any."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from mlxcel.core.backend import Backend, SharesWeights
from mlxcel.memory_plan import Memory


@attrs.define(eq=False)
class KeptWeights:
    """Of one model on one backend, with settings that the weights depend on: its type, device and level. A backend that
    cannot share reads them each time. `close` frees them; engines that run keep theirs."""

    _holder: Backend | None = None

    def load(self, backend: Backend, read: Callable[[], None], another: Callable[[], Backend]) -> None:
        """Into `backend`: those that are kept, else by `read`. `another` makes a backend like it, which keeps them when
        `backend` is closed."""
        if self._holder is not None and isinstance(backend, SharesWeights):
            backend.take_weights(self._holder)
            return
        read()
        if isinstance(backend, SharesWeights):
            holder = another()
            assert isinstance(holder, SharesWeights)
            holder.take_weights(backend)
            self._holder = holder

    def beside(self, memory: Memory | None) -> Memory | None:
        """What there would be of a memory if they were still to be read, so that plans count them once."""
        if memory is None or self._holder is None:
            return memory
        return attrs.evolve(memory, free=memory.free + self._holder.weight_bytes)

    def close(self) -> None:
        if self._holder is not None:
            self._holder.close()
        self._holder = None
