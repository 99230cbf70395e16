"""A request's end as the plain objects that `--json` prints (docs/spec/clients.md 0.5 and 1.6)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from mlxcel.core.acting_order import acting_order
from mlxcel.core.result import RequestResult, Timings

if TYPE_CHECKING:
    from mlxcel.core.params import SamplingParams
    from mlxcel.load import LoadedModel


def usage(result: RequestResult) -> dict[str, Any]:
    prompt, completion = len(result.prompt_ids), len(result.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }


def timings(result: RequestResult) -> dict[str, Any]:
    """Milliseconds and rates; null where the moment never came. The predicted rates are over n - 1 intervals."""
    evaluated = sum(span.length for span in result.pieces)
    return timings_of(result.timings, cached=result.cached_tokens, evaluated=evaluated, predicted=len(result.token_ids))


def timings_of(times: Timings, *, cached: int, evaluated: int, predicted: int) -> dict[str, Any]:
    """As `timings`, of so many tokens of the prompt and of the reply."""
    intervals = predicted - 1
    prompt_ms, predicted_ms, ttft_ms = (_ms(value) for value in (times.prompt, times.predicted, times.ttft))
    return {
        "cache_n": cached,
        "prompt_n": evaluated,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _over(prompt_ms, evaluated),
        "prompt_per_second": _over(evaluated * 1000.0, prompt_ms),
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _over(predicted_ms, intervals),
        "predicted_per_second": _over(intervals * 1000.0, predicted_ms) if intervals > 0 else None,
        "queue_ms": _ms(times.started - times.accepted),
        "ttft_ms": ttft_ms,
    }


def sampling(result: RequestResult, vocab: int) -> dict[str, Any]:
    """The values that were applied, as `effective` has them."""
    return effective(result.params, result.origin, vocab)


def effective(params: SamplingParams, origin: Mapping[str, str], vocab: int) -> dict[str, Any]:
    """Values in the shape in which a request gives them; `order`, the stages that act; `origin`, where each value came
    from."""
    return {
        **attrs.asdict(params, recurse=False),
        "logit_bias": [[token, False if added is None else added] for token, added in params.logit_bias],
        "loop_detection": None if params.loop_detection is None else attrs.asdict(params.loop_detection),
        "logits_processors": [
            {"name": processor.name, "args": json.loads(processor.args)} for processor in params.logits_processors
        ],
        "order": list(acting_order(params, vocab)),
        "origin": dict(origin),
    }


def reply(result: RequestResult, model: LoadedModel) -> dict[str, Any]:
    """The object of `generate --json`, keys in the specified order."""
    load, download = model.times.load, model.times.download
    facts, caps = model.facts, model.caps
    return {
        "text": result.text,
        "reasoning_content": result.reasoning,
        "token_ids": list(result.token_ids),
        "prompt_token_ids": list(result.prompt_ids),
        "finish_reason": result.finish_reason,
        "finish_cause": result.cause,
        "stop_reason": result.stop_reason,
        "usage": usage(result),
        "timings": {**timings(result), "load_ms": _ms(load), "download_ms": _ms(download)},
        "backend": model.backend,
        "model": facts.name,
        "sampling": sampling(result, facts.vocab),
        "warnings": list(result.warnings),
        "details": {
            "device": caps.device,
            "platform": caps.platform,
            "dtype": caps.dtype,
            "level": result.level,
            "kv_storage": result.kv_storage,
            "prefill_chunk": result.prefill_chunk,
            "model": {
                "source": facts.source,
                "format": facts.format,
                "family": facts.family,
                "quantisation": facts.quantisation,
                "context": facts.context,
                "sha256": facts.sha256,
            },
        },
    }


def statistics(result: RequestResult, model: LoadedModel) -> str:
    """One line for people, the parts that exist, in the words of docs/spec/clients.md 1.2."""
    numbers = timings(result)
    ttft, rate = numbers["ttft_ms"], numbers["predicted_per_second"]
    parts = [
        f"{len(result.prompt_ids)} prompt ({result.cached_tokens} cached)",
        "" if ttft is None else f"ttft {ttft:.0f} ms",
        f"{len(result.token_ids)} tokens",
        "" if rate is None else f"{rate:.1f} tok/s",
        result.cause,
        f"{model.backend}/{model.caps.platform}",
    ]
    return " · ".join(part for part in parts if part)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _over(amount: float | None, count: float | None) -> float | None:
    return round(amount / count, 3) if amount is not None and count is not None and count > 0 else None
