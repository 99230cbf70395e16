"""When garbage is collected, and among what, where time counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_objects() -> Iterator[None]:
    """Objects that are there, most of them of imported modules, stay: no collection looks through them. Whoever froze
    some before says when that is over."""
    mine = gc.get_freeze_count() == 0
    gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


@contextmanager
def no_collections() -> Iterator[None]:
    """Garbage is collected before, and not inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
