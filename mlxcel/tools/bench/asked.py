"""What somebody wants to have measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.tools.bench.cells import Cell, Path

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig


@attrs.frozen
class Asked:
    """What is measured. Lists are in the order in which they are run; `compare` names a file of earlier records."""

    paths: tuple[Path, ...]
    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    max_tokens: int
    repeats: int
    warmup_tokens: int
    sampling: str
    random_weights: str | None = None
    weights_seed: int = 0
    label: str | None = None
    compare: str | None = None
    copies: bool = True
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)

    def shape(self, cell: Cell, config: EngineConfig) -> dict[str, Any]:
        """The fields of a record that say which cell it is of."""
        return {
            "path": cell.path,
            "batch": cell.batch,
            "prompt_target_len": cell.prompt_target_len,
            "max_tokens": cell.max_tokens,
            "sampling": self.sampling,
            "prefill_chunk": config.prefill_chunk,
            "kv_storage_asked": config.kv_storage,
        }
