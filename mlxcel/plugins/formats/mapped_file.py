"""A file's bytes, memory-mapped, with errors that name it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlxcel.errors import CheckpointError


def map_bytes(path: Path) -> np.ndarray:
    """The whole file as a read-only uint8 array [bytes]; nothing is read before it is looked at."""
    try:
        size = path.stat().st_size
        if size == 0:  # mmap refuses an empty file
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def describe_start(data: np.ndarray) -> str:
    """The first bytes in words, for a file that is not what its name says."""
    head = data[:16].tobytes()
    if not head:
        return "the file is empty"
    known = (
        (b"version https:/", "a Git LFS pointer: the weights themselves were not downloaded"),
        (b"PK\x03\x04", "a zip archive, as PyTorch pickles are"),
        (b"\x80", "a Python pickle"),
        (b"<", "an HTML or XML page, as a failed download leaves"),
        (b"GGUF", "GGUF"),
        (b"tjgg", "GGJT, a format older than GGUF"),
        (b"lmgg", "GGML, a format older than GGUF"),
        (b"fmgg", "GGMF, a format older than GGUF"),
    )
    meaning = next((f" ({text})" for magic, text in known if head.startswith(magic)), "")
    return f"it begins with {head[:8]!r}{meaning}"
