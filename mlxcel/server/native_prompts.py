"""What llama.cpp's clients hand in as `prompt`: a text, ids, both mixed in one list, or a list of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mlxcel.asked import AskedPrompt
from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import EmptyPrompt, RequestError, UnsupportedField, shown
from mlxcel.text.messages import refuse_half_characters
from mlxcel.text.prompt import check_ids

_KINDS: Final = "a text, a list of token ids and texts, or a list of these"


def native_prompts(prompt: Any, tokenizer: Tokenizer, *, vocab: int, added: bool, most: int) -> list[AskedPrompt]:
    """One entry a prompt, at most `most`; ids are checked against V = `vocab`, texts of a mixed list are among them.

    A list that holds an integer, and no list, is one prompt: the tokenizer adds its special tokens, where `added`, to
    its first entry if that is a text. Any other list holds a prompt an entry. RequestError, whose field is the place
    ("prompt[1][3]"); EmptyPrompt for a list of nothing.
    """
    if prompt is None:
        raise RequestError(f"prompt is missing or null, it must be {_KINDS}", field="prompt")
    reader = _Reader(tokenizer, vocab, added)
    if not isinstance(prompt, list) or _is_one(prompt):
        return [reader.prompt(prompt, "prompt")]
    if not prompt:
        raise EmptyPrompt("prompt is an empty list", field="prompt", hint="give at least one prompt")
    if len(prompt) > most:
        raise RequestError(f"prompt holds {len(prompt)} prompts, at most {most} are taken", field="prompt")
    return [reader.prompt(entry, f"prompt[{place}]") for place, entry in enumerate(prompt)]


def _is_one(entries: Sequence[Any]) -> bool:
    """Whether a list is a prompt itself. What is neither id nor text is refused as an entry of one."""
    return any(not isinstance(entry, str | list) for entry in entries) and not any(
        isinstance(entry, list | dict) for entry in entries
    )


class _Reader:
    def __init__(self, tokenizer: Tokenizer, vocab: int, added: bool) -> None:
        self._tokenizer, self._vocab, self._added = tokenizer, vocab, added

    def prompt(self, prompt: Any, place: str) -> AskedPrompt:
        if isinstance(prompt, str):
            refuse_half_characters(prompt, place)
            return AskedPrompt(text=prompt)
        if isinstance(prompt, dict):
            raise UnsupportedField(
                f"{place} is an object, it must be {_KINDS}",
                field=place,
                hint="images and audio are not read: send the text alone",
            )
        if not isinstance(prompt, list):
            raise RequestError(f"{place} is {shown(prompt)}, it must be {_KINDS}", field=place)
        if not any(isinstance(entry, str) for entry in prompt):
            return AskedPrompt(ids=check_ids(prompt, self._vocab, field=place))
        ids: list[int] = []
        for index, entry in enumerate(prompt):
            ids += self._ids(entry, place, index)
        if not ids:
            raise EmptyPrompt(f"{place} comes to no token", field=place, hint="give a text, or ids")
        return AskedPrompt(ids=ids)

    def _ids(self, entry: Any, place: str, index: int) -> Sequence[int]:
        where = f"{place}[{index}]"
        if isinstance(entry, str):
            refuse_half_characters(entry, where)
            return self._tokenizer.encode(entry, add_special=self._added and not index)
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise RequestError(f"{where} is {shown(entry)}, it must be a token id or a text", field=where)
        if not 0 <= entry < self._vocab:
            raise RequestError(
                f"{where} is {shown(entry)}, the vocabulary holds the ids 0 to {self._vocab - 1}", field=where
            )
        return (entry,)
