"""What OpenAI's clients hand in as `prompt`: a text, ids, or a list of either."""

from __future__ import annotations

from typing import Any, Final

from mlxcel.asked import AskedPrompt
from mlxcel.errors import EmptyPrompt, RequestError, shown
from mlxcel.text.prompt import check_ids

_KINDS: Final = "a text, a list of token ids, or a list of either"


def openai_prompts(prompt: Any, *, vocab: int, most: int) -> list[AskedPrompt]:
    """One entry a prompt, at most `most`; ids are checked against V = `vocab`. A list of integers is one prompt.

    RequestError, whose field is the place ("prompt[1][3]"); EmptyPrompt for a list of nothing.
    """
    if isinstance(prompt, str):
        return [AskedPrompt(text=prompt)]
    if not isinstance(prompt, list):
        raise RequestError(f"prompt is {shown(prompt)}, it must be {_KINDS}", field="prompt")
    if not prompt:
        raise EmptyPrompt("prompt is an empty list", field="prompt", hint="give at least one prompt, or one id")
    if not isinstance(prompt[0], str | list):
        return [AskedPrompt(ids=check_ids(prompt, vocab))]
    if len(prompt) > most:
        raise RequestError(f"prompt holds {len(prompt)} prompts, at most {most} are taken", field="prompt")
    return [_entry(entry, f"prompt[{place}]", vocab) for place, entry in enumerate(prompt)]


def _entry(entry: Any, place: str, vocab: int) -> AskedPrompt:
    if isinstance(entry, str):
        return AskedPrompt(text=entry)
    if not isinstance(entry, list):
        raise RequestError(f"{place} is {shown(entry)}, beside other prompts it must be a text or ids", field=place)
    return AskedPrompt(ids=check_ids(entry, vocab, field=place))
