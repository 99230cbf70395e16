"""Where a model's reasoning stands in its text, as data (spec T8 to T10)."""

from __future__ import annotations

import attrs


@attrs.frozen
class MarkerPair:
    """What a model writes before its reasoning and behind it."""

    open: str
    close: str


@attrs.frozen
class ReasoningSplit:
    """How the reply of one row is split. A row that has none is not split: all of it is content.

    `pairs` are the markers that may begin the reply, no `open` of which begins another. `inside` is the pair whose
    block the prompt left open. With `whole` the content keeps everything, markers and reasoning too.
    """

    pairs: tuple[MarkerPair, ...]
    inside: MarkerPair | None = None
    whole: bool = False
