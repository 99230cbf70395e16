"""Flags of `mlxcel bench serve` (docs/spec/clients.md 8.1)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs
import click

from mlxcel.cli.options import KindType, SectionOption
from mlxcel.option_values import JSON_OBJECT, NAME, TEXT, Kind, one_of, real, real_in, whole

SERVER: Final = "Server"
LOAD: Final = "Load"
REQUESTS: Final = "Requests"
NUMBERS: Final = "Numbers"

_METRICS: Final = ("ttft", "tpot", "itl", "e2el")
_PATH: Final = re.compile(r"/[\x21-\x7e]*", re.ASCII)
_HEADER: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)=([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)", re.ASCII)
_OURS: Final = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection", "accept"})
_FIXED: Final = ("stream", "prompt", "messages")
"""Fields of a body that --extra-body may not have: without them there is nothing to measure."""


@attrs.frozen
class LoadFlag:
    """A flag that takes a value. `field` is that of LoadOptions or RandomSizes, `default` is what people read."""

    field: str
    flags: tuple[str, ...]
    kind: Kind
    default: str
    help: str
    section: str
    repeatable: bool = False


def _text_kind(metavar: str, words: str, read: Any) -> Kind:
    return Kind(metavar, words, read, read)


def _refuse(text: str) -> Any:
    raise ValueError(text)


def _rate(text: str) -> float:
    return math.inf if text == "inf" else _POSITIVE.from_text(text)


def _path(text: str) -> str:
    return text if _PATH.fullmatch(text) else str(_refuse(text))


def _header(text: str) -> tuple[str, str]:
    found = _HEADER.fullmatch(text)
    return (found[1], found[2]) if found and found[1].lower() not in _OURS else _refuse(text)


def _metrics(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(names)) if all(name in _METRICS for name in names) else _refuse(text)


def _percentiles(text: str) -> tuple[float, ...]:
    numbers = [real().from_text(part.strip()) for part in text.split(",")]
    return tuple(dict.fromkeys(numbers)) if all(0 <= number <= 100 for number in numbers) else _refuse(text)


def bound(text: str) -> tuple[str, float]:
    """A metric and its milliseconds. ValueError."""
    name, _, most = text.partition(":")
    return (name, _POSITIVE.from_text(most)) if name in ("ttft", "tpot", "e2el") else _refuse(text)


def _extra(text: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = JSON_OBJECT.from_text(text)
    return _refuse(text) if any(name in found for name in _FIXED) else found


_POSITIVE: Final = real_in(0, 1e9, "a number above 0, up to 1000000000", above=True)
_RATIO: Final = real_in(0, 1, "a number from 0 to 1")
_ONE_UP: Final = whole(1, 2**24, "an integer from 1 to 16777216")
_FROM_NONE: Final = whole(0, 2**24, "an integer from 0 to 16777216")
_SEED: Final = whole(0, 2**63 - 1, "an integer of 0 or more")
_EXTRA_WORDS: Final = f"a JSON object without {', '.join(_FIXED[:-1])} and {_FIXED[-1]}"

FLAGS: Final = (
    LoadFlag("base_url", ("--base-url",), NAME, "http://127.0.0.1:8080", "The server, with or without /v1.", SERVER),
    LoadFlag("host", ("--host",), NAME, "127.0.0.1", "Its host, instead of --base-url.", SERVER),
    LoadFlag("port", ("--port",), whole(1, 65535, "an integer from 1 to 65535"), "8080", "Its port, as well.", SERVER),
    LoadFlag(
        "endpoint_type", ("--endpoint-type",), one_of("openai", "openai-chat"), "openai",
        "Completions, or chats.", SERVER,
    ),
    LoadFlag(
        "endpoint", ("--endpoint",), _text_kind("PATH", "a path that begins with /", _path), "that of the type",
        "Where it is.", SERVER,
    ),
    LoadFlag("model", ("--model",), NAME, "the first of /v1/models", "Name of the model, as requests have it.", SERVER),
    LoadFlag("api_key", ("--api-key",), TEXT, "OPENAI_API_KEY", "Key of the server. The variable is safer.", SERVER),
    LoadFlag(
        "headers", ("--header",), _text_kind("NAME=VALUE", "NAME=VALUE, of a header that is not set anyway", _header),
        "none", "A header of each request; repeatable.", SERVER, repeatable=True,
    ),
    LoadFlag("num_prompts", ("--num-prompts",), _ONE_UP, "100", "Requests that are measured.", LOAD),
    LoadFlag(
        "request_rate", ("--request-rate",), _text_kind("R", "inf or a number above 0", _rate), "inf",
        "Requests a second, on average; inf: all at once.", LOAD,
    ),
    LoadFlag("burstiness", ("--burstiness",), _POSITIVE, "1", "1: Poisson arrivals; less: bursts.", LOAD),
    LoadFlag("max_concurrency", ("--max-concurrency",), _ONE_UP, "any", "Requests at once; others wait here.", LOAD),
    LoadFlag("num_warmups", ("--num-warmups",), _FROM_NONE, "1", "Requests before, which do not count.", LOAD),
    LoadFlag(
        "timeout", ("--timeout",), real_in(0, 1e6, "a number of seconds above 0, up to 1000000", "S", above=True),
        "600", "Time of a request.", LOAD,
    ),
    LoadFlag("seed", ("--seed",), _SEED, "0", "Of prompts and arrivals.", LOAD),
    LoadFlag(
        "dataset", ("--dataset",), _text_kind("random|FILE", "random or the name of a file", NAME.from_text), "random",
        'Prompts; a file has lines {"prompt" or "messages", "output_len"?}.', REQUESTS,
    ),
    LoadFlag("input_len", ("--random-input-len",), _ONE_UP, "256", "Tokens of a random prompt.", REQUESTS),
    LoadFlag("output_len", ("--random-output-len",), _ONE_UP, "128", "Tokens of a reply.", REQUESTS),
    LoadFlag("range_ratio", ("--random-range-ratio",), _RATIO, "0", "Lengths from 1-X to 1+X times theirs.", REQUESTS),
    LoadFlag("prefix_len", ("--random-prefix-len",), _FROM_NONE, "0", "Tokens before all prompts, the same.", REQUESTS),
    LoadFlag(
        "tokenizer", ("--tokenizer",), _text_kind("PATH", "the name of a file or folder", NAME.from_text),
        "the server's /tokenize", "tokenizer.json, or its folder, that counts.", REQUESTS,
    ),
    LoadFlag("temperature", ("--temperature",), real_in(0, 100, "a number from 0 to 100"), "0", "As sent.", REQUESTS),
    LoadFlag("top_p", ("--top-p",), _RATIO, "not sent", "As sent.", REQUESTS),
    LoadFlag(
        "extra_body", ("--extra-body",), Kind("JSON", _EXTRA_WORDS, _extra, _extra), "none",
        "More fields of each request.", REQUESTS,
    ),
    LoadFlag(
        "percentile_metrics", ("--percentile-metrics",),
        _text_kind("LIST", f"a list of {', '.join(_METRICS)}", _metrics), ",".join(_METRICS),
        "Metrics that have percentiles.", NUMBERS,
    ),
    LoadFlag(
        "percentiles", ("--metric-percentiles",), _text_kind("LIST", "a list of numbers from 0 to 100", _percentiles),
        "50,90,95,99", "Which percentiles.", NUMBERS,
    ),
    LoadFlag(
        "goodput", ("--goodput",),
        _text_kind("NAME:MS", "ttft, tpot or e2el with milliseconds, such as ttft:200", bound), "none",
        "Bounds of a good request; several may follow.", NUMBERS, repeatable=True,
    ),
    LoadFlag("label", ("--label",), TEXT, "none", "A text for the result.", NUMBERS),
)  # fmt: skip


def load_flags() -> list[click.Parameter]:
    """As click options, and --ignore-eos. A flag that is not given has the value None, () where it is repeatable."""
    made: list[click.Parameter] = [
        SectionOption(
            (*flag.flags, flag.field),
            type=KindType(flag.kind),
            metavar=flag.kind.metavar,
            multiple=flag.repeatable,
            help=f"{flag.help}  [{flag.default}]",
            section=flag.section,
        )
        for flag in FLAGS
    ]
    ignore = SectionOption(
        ("--ignore-eos/--no-ignore-eos",), default=True, section=REQUESTS,
        help="Replies as long as they may be.  [on]",
    )  # fmt: skip
    return [*made, ignore]
