"""SHA-256 of files, told as the phase "verify"."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from mlxcel.core.source import Progress

_CHUNK = 4 << 20  # bytes read at a time


def hash_files(paths: Sequence[Path], progress: Progress) -> list[str]:
    """The SHA-256 of each file, in hex. Raises OSError."""
    progress.start("verify", sum(path.stat().st_size for path in paths), "bytes")
    try:
        found, done = [], 0
        for path in paths:
            digest = hashlib.sha256()
            with open(path, "rb") as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    done += len(chunk)
                    progress.advance(done)
            found.append(digest.hexdigest())
        return found
    finally:
        progress.finish()
