"""`mlxcel bench serve`: a load on any OpenAI endpoint, over HTTP alone (docs/spec/clients.md 8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import attrs

from mlxcel.core.source import NoProgress, Progress
from mlxcel.errors import MlxcelError, ServerError
from mlxcel.remote_http import Exchange
from mlxcel.tools.load.arrivals import arrivals
from mlxcel.tools.load.client import ask, request_bytes
from mlxcel.tools.load.connections import Connections
from mlxcel.tools.load.dataset import Asked, file_prompts
from mlxcel.tools.load.lengths import TokenizerCounter, counter
from mlxcel.tools.load.measure import Load, run_load
from mlxcel.tools.load.options import LoadOptions
from mlxcel.tools.load.own_cost import own_cost
from mlxcel.tools.load.random_prompts import random_prompts
from mlxcel.tools.load.result import Facts, Result, result


def bench_serve(
    options: LoadOptions, progress: Progress | None = None, say: Callable[[str], None] = lambda line: None
) -> Result:
    """Put the load on the endpoint. `say` hears of warm-ups that failed.

    Raises ServerError where the endpoint does not say which model it has and none is named, UsageError for what cannot
    be sent. Requests that fail are counted.
    """
    model = options.model or _first_model(options)
    texts = _Texts.of(options, model)
    bodies = [_body(options, model, one) for one in texts.asked]
    requests = [request_bytes(options.address, options.route, options.headers, body) for body in bodies]
    plan = arrivals(texts.measured, options.request_rate, options.burstiness, options.seed)
    load = asyncio.run(_under_load(options, requests, plan, progress or NoProgress(), say))
    facts = Facts(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model,
        server_version=_version(options),
        length_source=texts.source,
        own_cost=own_cost(),
        missed=texts.missed,
        counted=texts.counted,
    )
    return result(options, facts, texts.asked[: texts.measured], load)


@attrs.frozen
class _Texts:
    """Prompts: first those that are measured, then those of the warm-ups."""

    asked: Sequence[Asked]
    measured: int
    source: str
    missed: int = 0
    counted: Callable[[str], int] | None = None

    @classmethod
    def of(cls, options: LoadOptions, model: str) -> _Texts:
        if options.dataset is not None:
            return cls._of_file(options)
        counts = counter(options, model, lambda method, route, body: call(options, method, route, body))
        wanted = options.num_prompts + options.num_warmups
        asked, missed = random_prompts(wanted, options.sizes, counts, options.seed)
        counted = counts.reply_tokens if isinstance(counts, TokenizerCounter) else None
        return cls(asked, options.num_prompts, counts.source, missed, counted)

    @classmethod
    def _of_file(cls, options: LoadOptions) -> _Texts:
        """Warm-ups take lines behind the measured ones, and the first ones again where there are none."""
        assert options.dataset is not None
        found = file_prompts(
            options.dataset,
            options.num_prompts + options.num_warmups,
            chat=options.chat,
            output_len=options.sizes.output_len,
        )
        measured, more = found[: options.num_prompts], found[options.num_prompts :]
        more += [measured[place % len(measured)] for place in range(options.num_warmups - len(more))]
        if options.tokenizer is None:
            return cls((*measured, *more), len(measured), "usage")
        tokenizer = TokenizerCounter.load(options.tokenizer, special=not options.chat)
        return cls((*measured, *more), len(measured), "usage", counted=tokenizer.reply_tokens)


async def _under_load(
    options: LoadOptions,
    requests: Sequence[bytes],
    plan: Sequence[float],
    progress: Progress,
    say: Callable[[str], None],
) -> Load:
    connections = Connections(options.address)
    for request in requests[len(plan) :]:
        reply = await ask(connections, request, timeout=options.timeout)
        if reply.fault is not None:
            say(f"warning: a warm-up failed: {options.without_secrets(reply.fault)}")
    done = 0

    def over() -> None:
        nonlocal done
        done += 1
        progress.advance(done)

    progress.start("generate", len(plan), "requests")
    try:
        return await run_load(
            connections,
            requests[: len(plan)],
            plan,
            timeout=options.timeout,
            max_concurrency=options.max_concurrency,
            over=over,
        )
    finally:
        progress.finish()
        connections.close()


def _body(options: LoadOptions, model: str, asked: Asked) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model}
    if options.chat:
        text = asked.prompt
        body["messages"] = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        body["max_completion_tokens"] = asked.output_len
    else:
        body["prompt"] = asked.prompt
        body["max_tokens"] = asked.output_len
    body |= {"temperature": options.temperature, "stream": True, "stream_options": {"include_usage": True}}
    if options.top_p is not None:
        body["top_p"] = options.top_p
    if options.ignore_eos:
        body["ignore_eos"] = True
    return {**body, **options.extra_body}


def call(options: LoadOptions, method: str, route: str, body: Any = None) -> Any:
    """A short request beside the load. Its errors do not quote what was sent."""
    exchange = Exchange(options.address)
    try:
        return exchange.whole(exchange.ask(method, route, body, dict(options.headers)))
    except MlxcelError as error:
        error.args = (options.without_secrets(error.message),)
        raise
    finally:
        exchange.done()


def _first_model(options: LoadOptions) -> str:
    told = call(options, "GET", "/v1/models")
    models = told.get("data") if isinstance(told, Mapping) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, Mapping) else None
    if not isinstance(name, str):
        raise ServerError(f"{options.address.url}/v1/models names no model", hint="name one with --model")
    return name


def _version(options: LoadOptions) -> str | None:
    """What the server says of itself, where it has a route for that."""
    with suppress(MlxcelError):
        told = call(options, "GET", "/version")
        version = told.get("version") if isinstance(told, Mapping) else None
        return version if isinstance(version, str) else None
    return None
