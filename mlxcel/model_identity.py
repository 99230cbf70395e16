"""What of a loaded model determines the bits of its KV, cheap enough for every start (docs/spec/engine.md X2)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlxcel.core.checkpoint import Checkpoint
from mlxcel.core.prefix import ModelIdentity
from mlxcel.errors import CheckpointError

END_BYTES: Final = 64 << 10
"""Of the beginning and the end of each weight file."""


def identify(checkpoint: Checkpoint, context: int) -> ModelIdentity:
    """Tensors' names, shapes and dtypes, the config, and both ends of every weight file. Reads 128 KiB a file.

    Where positions are scaled, the bound of `context` positions may choose how, and counts as well.
    """
    settings = {name: value for name, value in checkpoint.config.items() if _plain(value)}
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps([checkpoint.format, checkpoint.architecture]).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(json.dumps([name, list(info.shape), info.dtype, info.nbytes]).encode())
    digest.update(_json({name: value for name, value in settings.items() if not _scales_positions(name)}))
    for file in _weight_files(checkpoint.path):
        digest.update(_ends(file))
    rope = {name: value for name, value in settings.items() if _scales_positions(name)}
    if any(_is_scaled(name, value) for name, value in rope.items()):
        rope["context"] = context
    return ModelIdentity(
        fingerprint=digest.hexdigest(),
        quantisation=checkpoint.quantisation,
        rope=hashlib.blake2b(_json(rope), digest_size=16).hexdigest(),
    )


def _scales_positions(name: str) -> bool:
    return name.startswith("rope")


def _is_scaled(name: str, value: Any) -> bool:
    """Whether a setting of the rope is about more than its base; nested ones, a rope for each kind of layer, count."""
    if isinstance(value, Mapping):
        kind = value.get("rope_type", value.get("type"))
        return kind not in (None, "default") or any(_is_scaled(key, each) for key, each in value.items())
    return "scaling" in name and bool(value)


def _plain(value: Any) -> bool:
    """Whether a value of a config is settings, and not a vocabulary."""
    if isinstance(value, Mapping):
        return all(_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return len(value) <= 1024 and all(_plain(each) for each in value)
    return value is None or isinstance(value, str | int | float)


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.suffix.lower() == ".safetensors")
    return [path] if path.is_file() else []


def _ends(file: Path) -> bytes:
    """Size, and what the first and last bytes are."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            digest = hashlib.blake2b(opened.read(END_BYTES), digest_size=32)
            opened.seek(max(0, size - END_BYTES))
            digest.update(opened.read(END_BYTES))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    return size.to_bytes(8, "little") + digest.digest()
