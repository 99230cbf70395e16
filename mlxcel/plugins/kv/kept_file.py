"""What a prompt cache keeps, into a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from mlxcel.core.prefix import refuse_adoption
from mlxcel.errors import CacheFileError
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
    """Returns the positions read: pages of a common beginning are read for each chain, and kept once. What was used
    last comes last, and where room is short older chains go for it. AdoptError, with nothing taken, when any of them is
    KV of another kind; CacheFileError when a chain is not what its key says."""
    found = read_cache_file(path)
    for saved in found:
        own = attrs.evolve(engine.kv_key(), isolation=saved.key.isolation, salt=saved.key.salt)
        if (reason := own.difference(saved.key)) is not None:
            raise refuse_adoption(reason, f"{path} holds KV of another kind: {reason.value}")
    total, store = 0, engine.kv_stats
    for saved in found:
        if -(-len(saved.ids) // store.page_size) > store.total:
            continue
        try:
            while (prefix := engine.restore(saved)) is None and kept.reclaim(1):
                pass
        except ValueError as error:
            raise CacheFileError(f"{path} holds arrays that do not fit: {error}", hint="remove the file") from error
        if prefix is not None:
            kept.take(prefix)
            total += prefix.length
    kept.enforce()
    return total
