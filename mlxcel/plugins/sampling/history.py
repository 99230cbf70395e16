"""The token ids that stages look back on: prompt and output of a row, as the host knows them."""

from __future__ import annotations

import numpy as np


class History:
    """hist = prompt ++ output (spec S10). Grows at the end alone; the ids of a draw in flight are not in it."""

    def __init__(self, prompt: np.ndarray) -> None:
        """prompt: int32 [P]."""
        self.prompt_length = len(prompt)
        self.length = len(prompt)
        self._ids = np.array(prompt, np.int32)

    def append(self, token: int) -> None:
        """One more id of the output. Amortised constant time."""
        if self.length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(max(64, self.length), np.int32)])
        self._ids[self.length] = token
        self.length += 1

    def last(self, count: int) -> np.ndarray:
        """int32 view of the newest `count` ids; all of them for -1, none for 0 (spec S11)."""
        start = 0 if count < 0 else max(0, self.length - count)
        return self._ids[start : self.length]

    @property
    def output(self) -> np.ndarray:
        """int32 view [G]."""
        return self._ids[self.prompt_length : self.length]
