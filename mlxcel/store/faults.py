"""Why a model could not be fetched or stored, and the ways on."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxcel.core.source import ModelSource
from mlxcel.errors import DownloadError
from mlxcel.store.record import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


def require_space(folder: Path, needed: int) -> None:
    """Raises DownloadError where the disk of `folder` has fewer than `needed` bytes free. Asked before any network."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"the disk of {folder} is too full: {format_bytes(free)} free, {format_bytes(needed)} needed",
            hint=f"free {format_bytes(needed - free)} there",
        )


@contextmanager
def explained(source: ModelSource, folder: Path) -> Iterator[None]:
    """Turns what goes wrong while `source` is put into `folder` into a DownloadError that names the ways on.

    A source may say in the error's value `obtain` how its files can be had elsewhere.
    """
    try:
        yield
    except DownloadError as error:
        hint = _ways_on(error.hint, source, folder, error.values.get("obtain"))
        raise DownloadError(error.message, hint=hint, **error.values) from error
    except OSError as error:
        message, step = _told(error, source, folder.parent)
        raise DownloadError(message, hint=_ways_on(step, source, folder)) from error


def _told(error: OSError, source: ModelSource, root: Path) -> tuple[str, str | None]:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return (
            f"the disk of the model store {root} is full: {reason} while {source.name} was stored",
            f"free {format_bytes(2 * source.bytes)} there",
        )
    if error.errno in _CLOSED:
        return f"the model store {root} cannot be written: {error.filename}: {reason}", "check its owner and mode"
    return f"{source.name} could not be fetched: {error}", None


def _ways_on(step: str | None, source: ModelSource, folder: Path, obtain: str | None = None) -> str:
    by_hand = None
    if all(file.sha256 is not None for file in source.files) and source.revision is None:  # known without a network
        names = ", ".join(file.name for file in source.files)
        by_hand = f"put {names} into {folder} and try again: it is only verified then"
    ways = (
        step,
        f"{by_hand} ({obtain})" if obtain and by_hand else by_hand or obtain,
        "name a model of your own with -m PATH",
        "set MLXCEL_MODELS_DIR to another model store",
    )
    return "; or ".join(way for way in ways if way)
