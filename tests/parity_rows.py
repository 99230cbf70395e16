"""Streams of `engine-parity` made by hand."""

from __future__ import annotations

from typing import Any

from mlxcel.tools.parity.pairs import Row
from mlxcel.tools.parity.stream import Stream
from mlxcel.tools.parity.watch import Company


def stream(*tokens: int, gap: float = 0.5, second: int = 900, **changed: Any) -> Stream:
    """Of these ids; at each step `second` stood below the drawn one by `gap`."""
    values: dict[str, Any] = {
        "case": "greedy",
        "arm": "a:direct",
        "token_ids": tokens,
        "best": tuple(((token, -1.0), (second, -1.0 - gap)) for token in tokens),
        "adopted": (0, 0),
        "pieces": ((0, 10, 0),),
        "kv_storage": "dense",
        "launches": {"decode": {"dense_gather": 4}},
        "cached_tokens": 0,
        "reproduces": True,
        "finish_cause": "max_tokens",
        "ms": 1.0,
        "company": Company(None, 1, 1),
    }
    return Stream(**{**values, **changed})


def row(result: Any, group: str = "client", **changed: Any) -> Row:
    return Row("greedy", group, "a:direct", "b:dense", result, **changed)
