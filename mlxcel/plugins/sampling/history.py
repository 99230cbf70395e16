"""The token ids that stages look back on: prompt and output of a row, as the host knows them."""

from __future__ import annotations

import numpy as np

from mlxcel.plugins.sampling.counts import TokenCounts

EVERYTHING = -1
"""A window over all of prompt and output (spec S11)."""


class History:
    """hist = prompt ++ output (spec S10). Grows at the end alone; the ids of a draw in flight are not in it.

    Counts that were asked for once are kept from then on, one addition and one removal a token.
    """

    def __init__(self, prompt: np.ndarray) -> None:
        """prompt: int32 [P]."""
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self._ids = np.array(prompt, np.int32)
        self._output_counts: TokenCounts | None = None
        self._window_counts: dict[int, TokenCounts] = {}

    def append(self, token: int) -> None:
        """One more id of the output. Amortised constant time."""
        if self.length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(max(64, self.length), np.int32)])
        self._ids[self.length] = token
        self.length += 1
        if self._output_counts is not None:
            self._output_counts.add(token)
        for window, counts in self._window_counts.items():
            counts.add(token)
            if 0 <= window < self.length:
                counts.remove(int(self._ids[self.length - 1 - window]))

    def last(self, count: int) -> np.ndarray:
        """int32 view of the newest `count` ids; all of them for -1, none for 0 (spec S11)."""
        start = 0 if count < 0 else max(0, self.length - count)
        return self._ids[start : self.length]

    @property
    def output(self) -> np.ndarray:
        """int32 view [G]."""
        return self._ids[self.prompt_length : self.length]

    def output_counts(self) -> TokenCounts:
        """Of `output`."""
        if self._output_counts is None:
            self._output_counts = TokenCounts(self.output)
        return self._output_counts

    def window_counts(self, window: int) -> TokenCounts:
        """Of `last(window)`."""
        if window not in self._window_counts:
            self._window_counts[window] = TokenCounts(self.last(window))
        return self._window_counts[window]

    def leaving(self, window: int) -> int | None:
        """The id that leaves `last(window)` when one more comes; None while there is room."""
        full = window != EVERYTHING and self.length >= window > 0
        return int(self._ids[self.length - window]) if full else None
