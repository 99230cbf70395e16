"""The result of a load, under the names that `vllm bench serve` has for it (docs/spec/clients.md 8.2)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs

from mlxcel.tools.load.dataset import Asked
from mlxcel.tools.load.measure import Load
from mlxcel.tools.load.numbers import Numbers, milliseconds, most_at_once, most_tokens_in_a_second
from mlxcel.tools.load.options import METRICS, LoadOptions
from mlxcel.tools.load.statistics import deviation, mean, percentile

LATE: Final = 0.05
"""Of the mean interval: a generator that sends later than that does not keep its plan."""

COSTLY: Final = 0.05
"""Of the shortest mean gap between the chunks of a reply, for all replies that are under way at once."""


@attrs.frozen
class Facts:
    """What is known beside the load itself. `own_cost` is the generator's processor time for a chunk, in seconds;
    `missed` is how many prompts have another length than was asked for; `date` has its offset from UTC."""

    date: str
    model: str
    server_version: str | None
    length_source: str
    own_cost: float
    missed: int = 0
    counted: Callable[[str], int] | None = None


@attrs.frozen
class Result:
    """`fields` is the object that is printed and saved, `detail` what --save-detailed adds to it, `failures` are the
    messages of requests that failed."""

    fields: dict[str, Any]
    detail: dict[str, Any]
    failures: tuple[str, ...]


def result(options: LoadOptions, facts: Facts, asked: Sequence[Asked], load: Load) -> Result:
    replies = [each.reply for each in load.sent]
    pairs = zip(asked, replies, strict=True)
    each = [Numbers.of(one, reply, facts.counted) if reply.fault is None else None for one, reply in pairs]
    done = [numbers for numbers in each if numbers is not None]
    failures = tuple(options.without_secrets(reply.fault) for reply in replies if reply.fault is not None)
    good = [reply for reply in replies if reply.fault is None]
    duration = load.ended - load.began
    read, written = sum(one.input_tokens for one in done), sum(one.output_tokens for one in done)

    def rate(count: float) -> float | None:
        return count / duration if duration > 0 else None

    cached = [reply.cached for reply in good if reply.cached is not None]
    fields: dict[str, Any] = {
        "date": facts.date,
        "label": options.label,
        "endpoint_type": options.endpoint_type,
        "base_url": options.address.url,
        "model_id": facts.model,
        "num_prompts": len(asked),
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "duration": duration,
        "completed": len(done),
        "failed": len(failures),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": rate(len(done)),
        "request_goodput": rate(sum(one.within(options.goodput) for one in done)) if options.goodput else None,
        "output_throughput": rate(written),
        "total_token_throughput": rate(read + written),
        "max_output_tokens_per_s": most_tokens_in_a_second(done, load.began),
        "max_concurrent_requests": most_at_once(load.sent),
        **dict(_metrics(options, done)),
        "server_version": facts.server_version,
        "length_source": facts.length_source,
        "count_source": "+".join(sorted({one.source for one in done})) or None,
        "cached_tokens": sum(cached) if cached else None,
        "finish_reasons": dict(Counter(reason for reply in good for reason in reply.finish_reasons)),
        **_client(options, facts, load, done),
    }
    overlong = sum(
        one.source == "usage" and one.output_tokens > prompt.output_len
        for one, prompt in zip(each, asked, strict=True)
        if one is not None
    )
    fields["warnings"] = list(_warnings(options, facts, fields, overlong))
    return Result(fields, _detail(options, each, asked, load), failures)


def _metrics(options: LoadOptions, done: Sequence[Numbers]) -> Iterator[tuple[str, float | None]]:
    for name in METRICS:
        values = milliseconds(name, done)
        yield f"mean_{name}_ms", mean(values)
        yield f"median_{name}_ms", percentile(values, 50)
        yield f"std_{name}_ms", deviation(values)
        for percent in options.percentiles if name in options.percentile_metrics else ():
            yield f"p{percent:g}_{name}_ms", percentile(values, percent)


def _client(options: LoadOptions, facts: Facts, load: Load, done: Sequence[Numbers]) -> dict[str, Any]:
    """What the generator did by itself, so that it is not taken for the server's doing."""
    waits = [1000 * (one.reply.sent - one.ready) for one in load.sent]
    delays = [1000 * (one.ready - one.due) for one in load.sent]
    gaps = [(one.times[-1] - one.times[0]) / (len(one.times) - 1) for one in done if len(one.times) > 1]
    shortest = min(gaps, default=0.0)
    busy = facts.own_cost * most_at_once(load.sent)
    return {
        "mean_client_queue_ms": mean(waits),
        "max_client_queue_ms": max(waits),
        "mean_send_delay_ms": mean(delays),
        "max_send_delay_ms": max(delays),
        "client_cost_ms": 1000 * facts.own_cost,
        "client_cost_share": busy / shortest if shortest > 0 else None,
    }


def _warnings(options: LoadOptions, facts: Facts, fields: dict[str, Any], overlong: int) -> Iterator[str]:
    """`overlong` replies have more tokens than they may, if their usage is true."""
    if fields["failed"]:
        yield f"{fields['failed']} of {fields['num_prompts']} requests failed"
    if facts.missed:
        yield f"{facts.missed} prompts have another length than was asked for: no text of just so many tokens was found"
    if overlong:
        yield f"{overlong} replies have more tokens, by the server's usage, than were asked for: do not trust the rates"
    if "chunks" in (fields["count_source"] or ""):
        yield "the server tells no usage: a chunk counts as one token; --tokenizer counts what it holds"
    interval = 1000 / options.request_rate
    if interval > 0 and fields["mean_send_delay_ms"] > LATE * interval:
        yield (
            f"requests were sent {fields['mean_send_delay_ms']:.3g} ms late on average, more than {LATE:.0%} of the "
            f"{interval:.3g} ms between two: the load was not the one that was asked for"
        )
    share = fields["client_cost_share"]
    if share is not None and share > COSTLY:
        yield (
            f"chunks of {fields['max_concurrent_requests']} replies cost this client {share:.0%} of the shortest time "
            f"between two of one reply, more than {COSTLY:.0%}: times are partly its own"
        )


def _detail(options: LoadOptions, each: Sequence[Numbers | None], asked: Sequence[Asked], load: Load) -> dict[str, Any]:
    """One entry a request, in the plan's order; seconds. A request that failed has an error and no times."""
    faults = [one.reply.fault for one in load.sent]
    return {
        "input_lens": [
            one.input_tokens if one is not None else prompt.input_len for one, prompt in zip(each, asked, strict=True)
        ],
        "output_lens": [one.output_tokens if one is not None else 0 for one in each],
        "ttfts": [one.ttft if one is not None else None for one in each],
        "itls": [one.itls if one is not None else [] for one in each],
        "latencies": [one.e2el if one is not None else None for one in each],
        "start_times": [one.reply.sent - load.began for one in load.sent],
        "errors": ["" if fault is None else options.without_secrets(fault) for fault in faults],
    }
