"""A request's sampling fields under the names of other programs' APIs, as ours (docs/spec/clients.md 0.3, 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mlxcel.core.param_table import FIELDS, RULES
from mlxcel.errors import RequestError, UnsupportedField, shown

OUR_NAME: Final[Mapping[str, str]] = {name: field.name for field in FIELDS for name in (field.name, *field.other)}
"""Every name of a field in a request -> the field."""

_STRUCTURED: Final = "structured output is not in this version"

REFUSED: Final[Mapping[str, tuple[str, tuple[Any, ...]]]] = {
    "response_format": (_STRUCTURED, ({"type": "text"},)),
    "grammar": (_STRUCTURED, ("",)),
    "json_schema": (_STRUCTURED, ()),
    "structured_outputs": (_STRUCTURED, ()),
    "guided_json": (_STRUCTURED, ()),
    "guided_regex": (_STRUCTURED, ()),
    "guided_choice": (_STRUCTURED, ()),
    "guided_grammar": (_STRUCTURED, ()),
    "guided_json_object": (_STRUCTURED, (False,)),
    "regex": (_STRUCTURED, ()),
    "ebnf": (_STRUCTURED, ()),
    "structural_tag": (_STRUCTURED, ()),
    "grammar_lazy": (_STRUCTURED, (False,)),
    "p_less": ("it is not offered: min_p cuts by the same idea with a threshold that can be seen", (False, 0)),
    "tfs_z": ("tail-free sampling is not offered: typical_p and min_p cut the tail", (1,)),
    "top_a": ("it is not offered: min_p is its like", (0,)),
    "smoothing_factor": ("quadratic sampling is not offered", (0,)),
    "penalize_nl": ("a newline is penalised like every token: logit_bias can lift it", (True,)),
    "use_beam_search": ("there is no beam search", (False,)),
    "length_penalty": ("there is no beam search that it would act on", (1,)),
    "early_stopping": ("there is no beam search that it would act on", (False,)),
    "best_of": ("replies are not ranked: it can only be n", ()),
    "suffix": ("text cannot be filled in between", ("",)),
    "spaces_between_special_tokens": ("special tokens are written as the tokenizer decodes them", (True,)),
}
"""Sampling fields of other programs that would change the answer and are not honoured: why, and the values that ask for
nothing."""


def canonical(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a request by our names, those that were given: null is "not given". Others are left out;
    the first error in the request's order is raised.

    `logprobs` may be OpenAI's boolean with `top_logprobs`. UnsupportedField for one of REFUSED; RequestError, with the
    name that the request uses, for a value out of range, and for two names of one field with different values (S8).
    """
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in _counted_logprobs({name: value for name, value in fields.items() if value is not None}).items():
        if name in REFUSED:
            _refuse(name, value, fields)
        field = OUR_NAME.get(name)
        if field is None:
            continue
        read = RULES[field](name, value)
        if values.get(field, read) != read:
            first = spelled[field]
            raise RequestError(
                f"{first} and {name} are one field, and their values differ: {shown(values[field])} and {shown(read)}",
                field=name,
                hint="give one of them",
            )
        values[field] = read
        spelled.setdefault(field, name)
    if values.get("post_sampling_probs") and values.get("logprobs_mode") == "raw":
        raise RequestError(
            "post_sampling_probs true means probabilities after the chain, and logprobs_mode raw those before it",
            field="post_sampling_probs",
            hint="give one of them",
        )
    return values


def _refuse(name: str, value: Any, fields: Mapping[str, Any]) -> None:
    reason, idle = REFUSED[name]
    if name == "best_of":
        idle = (fields.get("n") or 1,)
    if not any(_same(value, other) for other in idle):
        raise UnsupportedField(f"{name} is not supported: {reason}", field=name, hint="leave it out")


def _same(value: Any, other: Any) -> bool:
    """Equal, and true is not 1."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def _counted_logprobs(given: dict[str, Any]) -> dict[str, Any]:
    """`logprobs` true is as many as `top_logprobs` says, else 0, the drawn token alone; false is "not given". So is
    llama-server's `n_probs` 0."""
    if given.get("n_probs") == 0 and type(given["n_probs"]) is int:
        del given["n_probs"]
    if not isinstance(given.get("logprobs"), bool):
        return given
    counts = [name for name in ("top_logprobs", "n_probs") if name in given]
    if given.pop("logprobs"):
        return given if counts else {**given, "logprobs": 0}
    if any(RULES["logprobs"](name, given[name]) != 0 for name in counts):
        raise RequestError(f"{counts[0]} is given and logprobs is false", field=counts[0], hint="set logprobs to true")
    return {name: value for name, value in given.items() if name not in counts}
