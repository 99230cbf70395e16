"""A reply as reasoning and content (spec 6.2): which markers a model uses, and the one parser of them.

A block of reasoning begins the reply, with nothing but white space before it, and there is one: an answer that names
the markers is not cut up. What the markers enclose and what follows them is left as it is, white space included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mlxcel.core.finish import Released
from mlxcel.core.reasoning import MarkerPair, ReasoningSplit
from mlxcel.text.held_text import HeldText, Run, shown_text

KNOWN_PAIRS: Final = (
    MarkerPair("<think>", "</think>"),
    MarkerPair("<thinking>", "</thinking>"),
    MarkerPair("<thought>", "</thought>"),
    MarkerPair("<reasoning>", "</reasoning>"),
    MarkerPair("<seed:think>", "</seed:think>"),
    MarkerPair("[THINK]", "[/THINK]"),
    MarkerPair("◁think▷", "◁/think▷"),
    MarkerPair("<|START_THINKING|>", "<|END_THINKING|>"),
    MarkerPair("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
)
"""Markers that chat templates are searched for."""

MOST_SPACE: Final = 64
"""Characters of white space that may stand before a block: a reply of nothing else is content, and is not held back."""


def marker_pairs(template: str) -> tuple[MarkerPair, ...]:
    """The pairs that the source of a chat template writes or looks for."""
    return tuple(pair for pair in KNOWN_PAIRS if pair.open in template or pair.close in template)


def reasoning_split(
    wanted: str, *, template: str | None, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None = None
) -> ReasoningSplit | None:
    """How to split a reply (spec T9, T10), or None: not at all.

    `wanted` is a `reasoning_format`; `template` the source of the model's chat template where it has one; `prompt` the
    prompt's text, None where only its ids are known; `messages` what was rendered to it, None for a raw prompt, which
    `auto` does not split.
    """
    pairs = marker_pairs(template or "")
    if wanted == "none" or (wanted == "auto" and (messages is None or not pairs)):
        return None
    pairs = pairs or KNOWN_PAIRS[:1]
    return ReasoningSplit(pairs, _left_open(prompt or "", pairs, messages), wanted == "deepseek-legacy")


def _left_open(
    prompt: str, pairs: Sequence[MarkerPair], messages: Sequence[Mapping[str, Any]] | None
) -> MarkerPair | None:
    """The pair whose block the prompt opens last and leaves open, unless the marker is part of a message: then only
    where that is the assistant's and the prompt goes on with it. A raw prompt must end with the marker."""
    pair = max(pairs, key=lambda pair: prompt.rfind(pair.open))
    place = prompt.rfind(pair.open)
    if place < 0 or prompt.find(pair.close, place) >= 0:
        return None
    if messages is None:
        return pair if prompt.rstrip().endswith(pair.open) else None
    said = [(message, text) for message in messages for text in _texts(message.get("content"))]
    for message, text in said:
        if _covers(text, prompt, place, pair.open):
            if prompt.count(text) > sum(other.count(text) for _, other in said):
                return pair  # the template wrote the same once more, behind all messages
            goes_on = message is messages[-1] and message.get("role") == "assistant"
            return pair if goes_on and prompt.rstrip().endswith(text) else None
    return pair


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _covers(text: str, prompt: str, place: int, marker: str) -> bool:
    """Whether the marker at `place` of the prompt is that of an occurrence of `text`."""
    inside = text.find(marker)
    while inside >= 0:
        if inside <= place and prompt.startswith(text, place - inside):
            return True
        inside = text.find(marker, inside + 1)
    return False


class ReasoningParser:
    """The text of one row, split as it comes. Joined, what `push` and then `flush` return is what one call with the
    whole text would. A proper beginning of a marker waits for its rest (spec T8)."""

    def __init__(self, split: ReasoningSplit) -> None:
        self._split = split
        self._held = HeldText()
        self._begun = split.inside is not None
        self._pair = split.inside  # whose block this is

    def push(self, runs: Sequence[Run]) -> Released:
        self._held.add(runs)
        reasoning: list[Run] = []
        if not self._begun:
            self._begin()
        if self._begun and self._pair is not None:
            reasoning = self._inside(self._pair)
        content = self._held.take_all() if self._begun and self._pair is None else []
        return self._released(runs, content, reasoning)

    def flush(self) -> Released:
        """What still waited, once, at the end."""
        rest = self._held.take_all()
        return self._released([], rest, []) if self._pair is None else self._released([], [], rest)

    def _released(self, runs: Sequence[Run], content: Sequence[Run], reasoning: Sequence[Run]) -> Released:
        return Released(shown_text(runs if self._split.whole else content), shown_text(reasoning))

    def _begin(self) -> None:
        text = self._held.text
        word = text.lstrip()
        space = len(text) - len(word)
        for pair in self._split.pairs:
            if word.startswith(pair.open):
                self._held.take(space + len(pair.open))
                self._begun, self._pair = True, pair
                return
        waits = any(pair.open.startswith(word) for pair in self._split.pairs)
        self._begun = not waits or space > MOST_SPACE

    def _inside(self, pair: MarkerPair) -> list[Run]:
        text = self._held.text
        end = text.find(pair.close)
        if end < 0:
            return self._held.take(len(text) - _waiting(text, pair.close))
        reasoning = self._held.take(end)
        self._held.take(len(pair.close))
        self._pair = None
        return reasoning


def _waiting(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
