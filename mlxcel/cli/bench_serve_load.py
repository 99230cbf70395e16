"""The load that the flags of `mlxcel bench serve` describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mlxcel.cli.bench_serve_options import bound
from mlxcel.cli.options import conflict
from mlxcel.config import openai_key_variable
from mlxcel.errors import UsageError
from mlxcel.remote_http import Address
from mlxcel.tools.load.options import LoadOptions, RandomSizes

SIZES: Final = ("input_len", "output_len", "range_ratio", "prefix_len")


def load_options(given: Mapping[str, Any], more_bounds: Sequence[str]) -> LoadOptions:
    """`given` has the value of each flag, None where it is not given. `more_bounds` are words behind the value of
    --goodput. UsageError."""
    values = {name: value for name, value in given.items() if value is not None}
    base_url, host, port, key = (values.pop(name, None) for name in ("base_url", "host", "port", "api_key"))
    if any(name.lower() == "authorization" for name, _ in given["headers"]):
        if key is not None:
            raise conflict("--api-key", "--header Authorization=...")
    elif key is None:
        key = openai_key_variable()
    dataset, tokenizer = values.pop("dataset", "random"), values.pop("tokenizer", None)
    sizes = {name: values.pop(name) for name in SIZES if name in values}
    if dataset != "random" and (idle := next((name for name in sizes if name != "output_len"), None)):
        raise conflict("--dataset FILE", f"--random-{idle.replace('_', '-')}")
    bounds = _bounds(values.pop("goodput"), more_bounds)
    return LoadOptions(
        _address(base_url, host, port, key),
        sizes=RandomSizes(**sizes),
        goodput=bounds,
        dataset=None if dataset == "random" else Path(dataset),
        tokenizer=None if tokenizer is None else Path(tokenizer),
        **values,
    )


def _bounds(given: Sequence[tuple[str, float]], more: Sequence[str]) -> dict[str, float]:
    if more and not given:
        raise UsageError(f"unexpected argument {more[0]!r}", hint="`mlxcel bench serve --help` lists what it takes")
    bounds = [*given]
    for word in more:
        try:
            bounds.append(bound(word))
        except ValueError:
            raise UsageError(
                f"{word!r} is no bound of --goodput", hint="it takes such as ttft:200 tpot:50 e2el:5000"
            ) from None
    if len(dict(bounds)) < len(bounds):
        raise UsageError("--goodput bounds a metric twice", hint="give each once")
    return dict(bounds)


def _address(base_url: str | None, host: str | None, port: int | None, key: str | None) -> Address:
    if base_url is not None:
        for flag, value in (("--host", host), ("--port", port)):
            if value is not None:
                raise conflict("--base-url", flag)
        return Address.parse(base_url, key)
    name = host or "127.0.0.1"
    return Address.parse(f"http://{f'[{name}]' if ':' in name else name}:{port or 8080}", key)
