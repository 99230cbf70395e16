"""A case through the scheduler: alone, behind and beside requests that share its prefix, or in a crowd."""

from __future__ import annotations

import attrs

from mlxcel.core.events import Delta, Ended
from mlxcel.core.params import SamplingParams
from mlxcel.core.prefix import Reject
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.result import RequestResult
from mlxcel.serve_engine import Serving
from mlxcel.tools.parity.arms import Arm
from mlxcel.tools.parity.crowd import Crowd, companions, rival
from mlxcel.tools.parity.request import REQUEST_ID, request_spec, stream_of
from mlxcel.tools.parity.setup import Setup
from mlxcel.tools.parity.stream import Missing, NotAvailable, Stream
from mlxcel.tools.parity.watch import RowWatch


def run_scheduled(setup: Setup, arm: Arm, serving: Serving, watch: RowWatch, case: str) -> Stream:
    """Raises what kept the request from its end. A stream that is no evidence says so."""
    options, model = setup.options, serving.model
    spec = attrs.evolve(request_spec(setup, model, case), cache_salt=f"{REQUEST_ID} {arm.name} {case}")
    watch.follow(spec.prompt_ids)
    beside = companions(spec.prompt_ids, arm.crowd, options.max_tokens, options.seed)
    shared = 0
    if arm.hit:
        _prime(serving, spec)
        shared = shared_length(len(spec.prompt_ids))
        beside = [rival(spec.prompt_ids, shared, model.facts.vocab, spec.cache_salt)]
    with Crowd.around(serving, beside) as crowd:
        reply = serving.scheduler.submit(Request((spec,)))
        tokens, result = 0, None
        for event in reply:
            if isinstance(event, Delta):
                tokens += len(event.token_ids)
                crowd.join(tokens)
            elif isinstance(event, Ended):
                result = event.result
    if result is None:
        raise RuntimeError("the request never ended")
    stream = stream_of(arm, case, model, watch, result)
    if arm.crowd and not stream.company.place:
        raise RuntimeError("the request under test shared no step, or stood first in one: there was no crowd before it")
    if stream.adopted[1] > shared:
        raise RuntimeError(
            f"{stream.adopted[1]} positions were adopted, and under the request's own salt there are {shared}: KV of "
            "another request"
        )
    if arm.hit and not stream.cached_tokens:
        return attrs.evolve(stream, missing=_no_hit(result))
    if arm.letter == "c" and not stream.paged_launches:
        return attrs.evolve(stream, missing=Missing(NotAvailable.NO_PAGED_LAUNCH))
    return stream


def _prime(serving: Serving, spec: SequenceSpec) -> None:
    """A request of the prompt's first three quarters, under the same salt: its KV is what the one under test finds."""
    shared = spec.prompt_ids[: shared_length(len(spec.prompt_ids))]
    params = SamplingParams(temperature=0.0, max_tokens=1, reasoning_format="none")
    first = SequenceSpec("prime", shared, params, cache_salt=spec.cache_salt)
    (result,) = serving.scheduler.submit(Request((first,))).results()
    if result.error is not None:
        raise result.error


def shared_length(length: int) -> int:
    """Tokens that the priming request shares with a prompt of `length`."""
    return max(1, min(3 * length // 4, length - 1))


def _no_hit(result: RequestResult) -> Missing:
    if result.cache_miss == Reject.MODEL_OWNED_STATE:
        return Missing(NotAvailable.NO_REUSABLE_PREFIX)
    return Missing(NotAvailable.NO_HIT, result.cache_miss or "unknown")
