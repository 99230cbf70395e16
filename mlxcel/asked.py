"""What callers of the Python API hand in, as lists: prompts of every kind, conversations, parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from mlxcel.core.params import SamplingParams
from mlxcel.errors import RequestError, UnsupportedField, shown

if TYPE_CHECKING:
    from mlxcel.outputs import RequestOutput

_KINDS: Final = 'a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


@attrs.frozen
class AskedPrompt:
    """A text, or ids that nobody checked yet."""

    text: str | None = None
    ids: Sequence[Any] | None = None


def asked_prompts(prompts: Any) -> tuple[list[AskedPrompt], bool]:
    """One prompt or a list of them, kinds mixed, as a list, and whether a list was given. A list that begins with an
    integer is one prompt of ids.

    RequestError for anything else; its message says which entry of the list.
    """
    if not _is_list(prompts) or _is_ids(prompts):
        return [asked_prompt(prompts)], False
    asked = []
    for index, prompt in enumerate(prompts):
        try:
            asked.append(asked_prompt(prompt, f"prompts[{index}]"))
        except RequestError as error:
            raise indexed(error, index, ()) from None
    return asked, True


def asked_prompt(prompt: Any, place: str = "prompt") -> AskedPrompt:
    """One prompt. RequestError, whose field is `place`, for anything else."""
    if isinstance(prompt, str):
        return AskedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt, place)
    if _is_ids(prompt) or (_is_list(prompt) and not len(prompt)):
        return AskedPrompt(ids=prompt)
    raise RequestError(f"{place} is {shown(prompt)}, a prompt is {_KINDS}", field=place)


def asked_conversations(messages: Any) -> tuple[list[Any], bool]:
    """One conversation or a list of them, as a list, and whether a list was given. Messages are checked when they are
    rendered."""
    if not _is_list(messages):
        raise RequestError(f"messages is {shown(messages)}, a list of messages is needed", field="messages")
    listed = all(_is_list(entry) for entry in messages)
    return (list(messages), True) if listed else ([messages], False)


def paired(params: Any, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts: none, one for all, or a list of equal length.

    RequestError, a ValueError, with both lengths; TypeError for what is no SamplingParams.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise TypeError(f"sampling_params is {shown(params)}, a SamplingParams or a list of them is needed")
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise TypeError(f"sampling_params[{index}] is {shown(each)}, a SamplingParams is needed")
    if len(params) != count:
        raise RequestError(
            f"there are {len(params)} sampling_params and {count} prompts",
            field="sampling_params",
            hint="give one for all, or one for each",
        )
    return list(params)


def placed(error: Exception, place: str | None, index: int) -> Exception:
    """The error of a prompt, its message naming the place it has among others, if there are any."""
    if place is not None:
        message, *more = error.args or (str(error),)
        error.args = (f"{place}: {message}", *more)
    return indexed(error, index, ())


def indexed(error: Exception, index: int, outputs: Sequence[RequestOutput]) -> Exception:
    """With `index`, whose prompt it concerns, and `outputs`, what became of all prompts."""
    vars(error).update(index=index, outputs=list(outputs))
    return error


def own(error: Exception) -> Exception:
    """A copy to be raised: rows of one step share an error, and calls must not write into each other's."""
    kind = type(error)
    copy: Exception = kind.__new__(kind, *error.args)
    copy.args = error.args
    vars(copy).update(vars(error))
    copy.__cause__ = error
    return copy


def _of_mapping(prompt: Mapping[str, Any], place: str) -> AskedPrompt:
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids"):
            raise UnsupportedField(f"{place} has {shown(name)}, which is not read", field=place, hint=f"give {_KINDS}")
    if len(prompt) != 1:
        raise RequestError(
            f'{place} needs either "prompt" or "prompt_token_ids", it has {"both" if prompt else "neither"}',
            field=place,
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if "prompt" in prompt:
        if not isinstance(text, str):
            raise RequestError(f'{place}["prompt"] is {shown(text)}, a text is needed', field=place)
        return AskedPrompt(text=text)
    if not _is_list(ids):
        raise RequestError(f'{place}["prompt_token_ids"] is {shown(ids)}, a list of ids is needed', field=place)
    return AskedPrompt(ids=ids)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_ids(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and isinstance(value[0], Integral) and not isinstance(value[0], bool)
