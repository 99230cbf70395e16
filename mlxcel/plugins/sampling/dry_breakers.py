"""Sequence breakers: strings that end a repetition, as heads and tails of token ids (spec 4.5, step 2).

A token breaks where it contains the string, or where it ends with a beginning of the string and the ids of the rest,
its tail, come next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import attrs
import numpy as np

from mlxcel.core.tokenizer import Tokenizer

LONGEST_TAIL = 20
"""Ids of a tail; what is longer is cut off."""

KEPT_STRINGS = 128
"""Strings whose heads are kept, the ones used last."""

_BETWEEN = b"\xff"
"""Stands in no UTF-8 text, so that no breaker is found across two tokens."""


@attrs.frozen(eq=False)
class Heads:
    """What one string breaks on."""

    whole: np.ndarray  # int32, ids that contain it
    tailed: tuple[tuple[int, tuple[int, ...]], ...]  # (id, tail)


@attrs.frozen(eq=False)
class Breakers:
    """All strings of a row together. `is_head` is bool [V]; `tails` holds those that are not empty, longest first."""

    is_head: np.ndarray
    whole: np.ndarray  # bool [V]: heads with an empty tail
    tails: dict[int, tuple[tuple[int, ...], ...]]

    def limit(self, newest_first: np.ndarray, history: np.ndarray) -> int:
        """How far back repetitions are looked for: int32 [n] ids, newest first, and the same oldest first -> 0 … n."""
        for place in np.flatnonzero(self.is_head[newest_first]).tolist():
            head = int(newest_first[place])
            for tail in self.tails.get(head, ()):
                after = len(history) - place  # of the head, in `history`
                if tuple(history[after : after + len(tail)].tolist()) == tail:
                    return int(place - len(tail))
            if self.whole[head]:
                return int(place)
        return len(newest_first)


class BreakerTable:
    """Heads by string, found once for a tokenizer. Its vocabulary is read when the first string is looked up."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._words: _Words | None = None
        self._heads: OrderedDict[str, Heads] = OrderedDict()
        self._used: WeakValueDictionary[tuple[str, ...], Breakers] = WeakValueDictionary()

    def breakers(self, strings: Sequence[str]) -> Breakers:
        """Of 1 to 40 bytes of UTF-8 each. The choices of a request share one, which lives as long as they do."""
        found = self._used.get(tuple(strings))
        if found is None:
            found = self._used[tuple(strings)] = self._together(strings)
        return found

    def _together(self, strings: Sequence[str]) -> Breakers:
        whole = np.zeros(self._vocab, bool)
        tails: dict[int, set[tuple[int, ...]]] = {}
        for string in strings:
            heads = self.heads(string)
            whole[heads.whole] = True
            for token, tail in heads.tailed:
                if tail:
                    tails.setdefault(token, set()).add(tail)
                else:
                    whole[token] = True
        is_head = whole.copy()
        is_head[list(tails)] = True
        return Breakers(is_head, whole, {token: tuple(sorted(found, key=_longest)) for token, found in tails.items()})

    def heads(self, string: str) -> Heads:
        if string not in self._heads:
            if self._words is None:
                self._words = _Words(self._tokenizer, self._vocab)
            self._heads[string] = self._find(self._words, string)
            if len(self._heads) > KEPT_STRINGS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(string)
        return self._heads[string]

    def _find(self, words: _Words, string: str) -> Heads:
        text = string.encode()
        whole = words.containing(text)
        containing = frozenset(whole.tolist())
        tailed = []
        for split in range(1, len(text)):
            ending = [token for token in words.ending_with(text[:split]) if token not in containing]
            tail = self._tail(words, string, split) if ending else None
            if tail is not None:
                tailed += [(token, tail) for token in ending]
        return Heads(whole, tuple(tailed))

    def _tail(self, words: _Words, string: str, split: int) -> tuple[int, ...] | None:
        """Ids of the string's bytes from `split` on, special tokens left alone; None where no tokens spell them.

        Inside a character there is no text to encode: its remaining bytes are single tokens, unless the ids of the
        whole string have a border there.
        """
        text = string.encode()
        rest = text[split:]
        inside = next(place for place, byte in enumerate((*rest, 0)) if byte & 0xC0 != 0x80)
        if inside:
            at = 0
            ids = self._encode(string)
            for place, token in enumerate(ids):
                if at == split:
                    return tuple(ids[place : place + LONGEST_TAIL])
                at += len(self._tokenizer.token_bytes(token))
        single = [words.spelling(rest[place : place + 1]) for place in range(inside)]
        ids = [token for token in single if token is not None]
        if len(ids) < inside:
            return None
        return tuple((ids + self._encode(rest[inside:].decode()))[:LONGEST_TAIL])

    def _encode(self, text: str) -> list[int]:
        """Ids of a text that stands inside another: some tokenizers put a space before what begins one."""
        if not text:
            return []
        plain: list[int] = []
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special=False, parse_special=False)
            plain = plain or ids
            spelt = [self._tokenizer.token_bytes(token) for token in ids]
            for start in range(len(ids)):
                if b"".join(spelt[start:]) == text.encode():
                    return ids[start:]
        return plain


class _Words:
    """The bytes of every token, control tokens apart, to be searched by substring and by ending."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        ids = [token for token in range(min(tokenizer.size, vocab)) if not tokenizer.is_special(token)]
        words = [tokenizer.token_bytes(token) for token in ids]
        self._ids = np.array(ids, np.int32)
        self._all = _BETWEEN.join(words)
        self._starts = np.cumsum([0, *(len(word) + len(_BETWEEN) for word in words[:-1])])
        self._reversed = sorted((word[::-1], token) for word, token in zip(words, ids, strict=True))

    def containing(self, text: bytes) -> np.ndarray:
        """int32, the tokens in whose bytes `text` occurs."""
        at = np.fromiter(self._occurrences(text), np.int64)
        places = np.unique(np.searchsorted(self._starts, at, side="right") - 1)
        found: np.ndarray = self._ids[places]
        return found

    def ending_with(self, text: bytes) -> Iterator[int]:
        backwards = text[::-1]
        for word, token in self._reversed[bisect_left(self._reversed, (backwards, -1)) :]:
            if not word.startswith(backwards):
                return
            yield token

    def spelling(self, text: bytes) -> int | None:
        """The lowest token whose bytes are these."""
        place = bisect_left(self._reversed, (text[::-1], -1))
        found = place < len(self._reversed) and self._reversed[place][0] == text[::-1]
        return self._reversed[place][1] if found else None

    def _occurrences(self, text: bytes) -> Iterator[int]:
        at = self._all.find(text)
        while at >= 0:
            yield at
            at = self._all.find(text, at + 1)


def _longest(tail: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return -len(tail), tail
