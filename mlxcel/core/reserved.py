"""A reservation until its step, or run of steps, is submitted."""

from __future__ import annotations

import attrs

from mlxcel.core.plan import Part
from mlxcel.core.sequence import Sequence


@attrs.define
class Reserved:
    """Parts whose positions are reserved, and what their check found: it holds as long as `checked` says so."""

    parts: tuple[Part, ...]
    rows: list[Sequence]
    drawing: tuple[bool, ...]
    steps: int = 1  # so many of the parts, one behind the other
    checked: bool = True  # nothing happened to a row since
