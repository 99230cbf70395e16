"""A result as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mlxcel.tools.load.options import METRICS

ROWS: Final = (
    ("model_id", "model"),
    ("duration", "duration, s"),
    ("completed", "requests completed"),
    ("failed", "requests failed"),
    ("total_input_tokens", "input tokens"),
    ("cached_tokens", "  from the prompt cache"),
    ("total_output_tokens", "output tokens"),
    ("request_throughput", "requests a second"),
    ("request_goodput", "  within --goodput"),
    ("output_throughput", "output tokens a second"),
    ("total_token_throughput", "tokens a second"),
    ("max_output_tokens_per_s", "output tokens of the best second"),
    ("max_concurrent_requests", "most requests at once"),
    ("mean_client_queue_ms", "wait for a place, ms"),
    ("client_cost_ms", "own cost of a chunk, ms"),
)


def table(fields: Mapping[str, Any], percentile_metrics: Sequence[str], percentiles: Sequence[float]) -> Iterator[str]:
    """Lines."""
    width = max(len(words) for _, words in ROWS)
    for name, words in ROWS:
        if fields[name] is not None:
            yield f"{words:{width}}  {_shown(fields[name])}"
    lengths = f"lengths by {fields['length_source']}"
    yield f"{lengths}, output by {fields['count_source']}" if fields["count_source"] else lengths
    yield ""
    columns = ["mean", "median", "std", *(f"p{percent:g}" for percent in percentiles)]
    yield f"{'ms':6}" + "".join(f"{column:>10}" for column in columns)
    for metric in METRICS:
        wanted = columns if metric in percentile_metrics else columns[:3]
        yield f"{metric:6}" + "".join(f"{_shown(fields[f'{column}_{metric}_ms']):>10}" for column in wanted)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)
