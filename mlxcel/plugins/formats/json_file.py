"""JSON files beside the weights, bounded and with errors that name the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from mlxcel.errors import CheckpointError

MAX_BYTES: Final = 1 << 26  # an index of 100,000 tensors has about 2**23
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of one; two of them in order spell one character


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the file. Raises CheckpointError when it is missing, too long, no JSON, or no object."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path} has {size} bytes, a JSON file of a checkpoint has at most {MAX_BYTES}")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json_object(text, str(path))


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """`what` names the text in errors. A key that occurs twice in one object is refused: one of the two is wrong.

    So is an escaped lone surrogate: no text has one, and no tokenizer, file name or terminal would take it.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} is not valid JSON: {error}", hint="the file is damaged or incomplete: download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, an object is needed")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} occurs twice")
    return value
