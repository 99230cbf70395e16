"""The request under test, and the stream that its result comes to."""

from __future__ import annotations

import attrs
import numpy as np

from mlxcel.core.bind_params import Caps
from mlxcel.core.request import SequenceSpec
from mlxcel.core.result import RequestResult
from mlxcel.load import LoadedModel
from mlxcel.prepare import Prompt, sequence_spec
from mlxcel.tools.parity.arms import Arm
from mlxcel.tools.parity.cases import case_params
from mlxcel.tools.parity.setup import Setup
from mlxcel.tools.parity.stream import Stream
from mlxcel.tools.parity.watch import RowWatch

REQUEST_ID = "engine-parity"


def request_spec(setup: Setup, model: LoadedModel, case: str) -> SequenceSpec:
    """Of a case, for this model. RequestError for a prompt that is not for it."""
    options = setup.options
    params = case_params(case, setup.prompt, model.tokenizer, max_tokens=options.max_tokens, seed=options.seed)
    prompt = Prompt(tuple(setup.prompt.tolist()))
    spec = sequence_spec(model, prompt, params, request_id=REQUEST_ID, caps=Caps(max_n=1))
    return attrs.evolve(spec, compared=True)


def stream_of(arm: Arm, case: str, model: LoadedModel, watch: RowWatch, result: RequestResult) -> Stream:
    """Raises the error of a request that failed."""
    if result.error is not None:
        raise result.error
    cold = model.planner.build(np.asarray(result.prompt_ids, np.int32))
    timings = result.timings
    return Stream(
        case=case,
        arm=arm.name,
        token_ids=result.token_ids,
        best=tuple(each.top for each in result.logprobs),
        adopted=watch.adopted,
        pieces=tuple(watch.pieces),
        kv_storage=result.kv_storage,
        launches=watch.launches,
        cached_tokens=result.cached_tokens,
        reproduces=watch.plan is not None and watch.plan.reproduces(cold),
        finish_cause=result.cause,
        ms=1000 * (timings.ended - timings.accepted),
        company=watch.company,
    )
