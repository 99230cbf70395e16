"""What a prompt cache keeps, into a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from mlxcel.core.prefix import refuse_adoption
from mlxcel.plugins.kv.cache_file import read_cache_file, write_cache_file
from mlxcel.plugins.kv.kept_pages import KeptPages

if TYPE_CHECKING:
    from mlxcel.core.engine import Engine


def save_kept(kept: KeptPages, engine: Engine, path: Path) -> int:
    """Every chain by itself, so that each can be read alone. Returns the positions written."""
    saved = [engine.export(record) for record in kept.records()]
    write_cache_file(path, saved)
    return sum(len(prefix.ids) for prefix in saved)


def load_kept(kept: KeptPages, engine: Engine, path: Path) -> int:
    """Returns the positions read: pages of a common beginning are read for each chain, and kept once. AdoptError, with
    nothing taken, when any of them is KV of another kind."""
    found = read_cache_file(path)
    for saved in found:
        own = attrs.evolve(engine.kv_key(), isolation=saved.key.isolation, salt=saved.key.salt)
        if (reason := own.difference(saved.key)) is not None:
            raise refuse_adoption(reason, f"{path} holds KV of another kind: {reason.value}")
    total = 0
    for saved in found:
        if (prefix := engine.restore(saved)) is None:  # no page is free
            break
        kept.take(prefix)
        total += prefix.length
    kept.enforce()
    return total
