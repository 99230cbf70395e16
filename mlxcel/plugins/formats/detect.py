"""What a path holds, by names and first bytes only. The readers do the checking and the refusing."""

from __future__ import annotations

from pathlib import Path

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def is_gguf(path: Path) -> bool:
    """A file that is named as GGUF or begins with its magic; a damaged one is for the reader to explain."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def is_safetensors_folder(path: Path) -> bool:
    """A folder with config.json or weights of any kind, or one weight file out of such a folder.

    Pickles count: the reader refuses them by name, which helps more than "nothing here".
    """
    suffixes = (".safetensors", *PICKLE_SUFFIXES)
    if path.is_file():
        return path.suffix.lower() in suffixes
    if not path.is_dir():
        return False
    return (path / "config.json").is_file() or any(child.suffix.lower() in suffixes for child in path.iterdir())
