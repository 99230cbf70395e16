"""Runs an arm: an engine of its own, every case through the client that the arm is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from mlxcel.core.bind_params import Caps
from mlxcel.core.engine import Engine
from mlxcel.core.events import Delta, Ended
from mlxcel.core.params import SamplingParams
from mlxcel.core.prefix import Reject
from mlxcel.core.request import Request, SequenceSpec
from mlxcel.core.result import RequestResult
from mlxcel.direct import generate
from mlxcel.errors import DeviceError, UsageError
from mlxcel.load import LoadedModel
from mlxcel.prepare import Prompt, sequence_spec
from mlxcel.serve_engine import Serving
from mlxcel.tools.model_choice import ChosenModel
from mlxcel.tools.parity.arms import Arm
from mlxcel.tools.parity.cases import case_params
from mlxcel.tools.parity.crowd import Crowd, companions
from mlxcel.tools.parity.options import ParityOptions
from mlxcel.tools.parity.stream import Failed, Found, Missing, NotAvailable, Stream
from mlxcel.tools.parity.watch import RowWatch

if TYPE_CHECKING:
    from mlxcel.config import EngineConfig
    from mlxcel.core.source import Progress
    from mlxcel.plugins.manager import PluginManager

REQUEST_ID = "engine-parity"


@attrs.frozen(eq=False)
class Setup:
    """What all arms have in common: the model, its configuration, the prompt int32 [P], and who is told."""

    model: ChosenModel
    config: EngineConfig
    manager: PluginManager
    progress: Progress
    say: Callable[[str], None]
    options: ParityOptions
    prompt: np.ndarray


@attrs.frozen
class EngineFacts:
    """Of an engine as it was opened."""

    model: str
    backend: str
    device: str
    dtype: str
    level: str
    quantisation: str

    @classmethod
    def of(cls, model: LoadedModel) -> EngineFacts:
        return cls(
            model=model.facts.name,
            backend=model.backend,
            device=model.caps.device,
            dtype=model.caps.dtype,
            level=model.engine.level,
            quantisation=model.facts.quantisation,
        )


@attrs.frozen
class ArmRun:
    """By case; `facts` are None where no engine was opened."""

    found: Mapping[str, Found]
    facts: EngineFacts | None = None


def run_arm(arm: Arm, setup: Setup, score: Mapping[str, Sequence[int]] | None = None) -> ArmRun:
    """All cases of an arm, one after the other. What cannot be had here is Missing, what goes wrong Failed.

    `score` is for the pair of backends: the streams, by case, that this arm's backend scores; its own where there is
    none of a case; None: nothing is scored. Raises KeyboardInterrupt.
    """
    config = arm.config(setup.config)
    cases = setup.options.cases
    try:
        if arm.direct:
            with setup.model.load(config, setup.manager, setup.progress, say=setup.say) as model:
                watch = _watched(model)
                return ArmRun(
                    {case: _guarded(_direct, setup, arm, model, watch, case, score) for case in cases},
                    EngineFacts.of(model),
                )
        depth = max(32, arm.crowd)
        serving = setup.model.serve(
            config, setup.manager, setup.progress, max_queue_depth=depth, warm=True, say=setup.say
        )
        try:
            facts = EngineFacts.of(serving.model)
            if arm.crowd and serving.model.engine.settings.slots == 1:
                return ArmRun(dict.fromkeys(cases, Missing(NotAvailable.ONE_ROW_ONLY)), facts)
            watch = _watched(serving.model)
            return ArmRun({case: _guarded(_scheduled, setup, arm, serving, watch, case) for case in cases}, facts)
        finally:
            serving.close()
    except UsageError as error:
        if not arm.store:
            raise
        return ArmRun(dict.fromkeys(cases, Missing(NotAvailable.STORAGE_REFUSED, str(error))))
    except DeviceError as error:
        if arm.letter != "x":
            raise
        return ArmRun(dict.fromkeys(cases, Missing(NotAvailable.BACKEND_UNAVAILABLE, str(error))))


def _watched(model: LoadedModel) -> RowWatch:
    watch = RowWatch()
    model.observers.add(watch)
    return watch


def _guarded(run: Callable[..., Found], *arguments: object) -> Found:
    try:
        return run(*arguments)
    except Exception as error:
        return Failed(f"{type(error).__name__}: {error}")


def _direct(
    setup: Setup,
    arm: Arm,
    model: LoadedModel,
    watch: RowWatch,
    case: str,
    score: Mapping[str, Sequence[int]] | None,
) -> Found:
    spec = _spec(setup, model, case)
    watch.follow(spec.prompt_ids)
    result = generate(model.engine, spec, planner=model.planner, observers=model.observers)
    if result.cause == "cancelled":
        raise KeyboardInterrupt
    stream = _stream(arm, case, model, watch, result)
    if score is None:
        return stream
    tokens = score.get(case, stream.token_ids)
    return attrs.evolve(stream, scores=_scores(model.engine, spec.prompt_ids, tokens))


def _scores(engine: Engine, prompt: np.ndarray, tokens: Sequence[int]) -> tuple[float, ...]:
    """What the model says of these tokens behind the prompt."""
    ids = np.concatenate([prompt, np.asarray(tokens, np.int32)])
    return tuple(engine.score(ids, len(prompt) - 1).logprobs.tolist())


def _scheduled(setup: Setup, arm: Arm, serving: Serving, watch: RowWatch, case: str) -> Found:
    options, model = setup.options, serving.model
    spec = attrs.evolve(_spec(setup, model, case), cache_salt=f"{REQUEST_ID} {arm.name} {case}")
    watch.follow(spec.prompt_ids)
    if arm.hit:
        _prime(serving, spec)
    beside = companions(spec.prompt_ids, arm.crowd, options.max_tokens, options.seed)
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
    stream = _stream(arm, case, model, watch, result)
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


def _spec(setup: Setup, model: LoadedModel, case: str) -> SequenceSpec:
    options = setup.options
    params = case_params(case, max_tokens=options.max_tokens, seed=options.seed)
    prompt = Prompt(tuple(setup.prompt.tolist()))
    spec = sequence_spec(model, prompt, params, request_id=REQUEST_ID, caps=Caps(max_n=1))
    return attrs.evolve(spec, compared=True)


def _stream(arm: Arm, case: str, model: LoadedModel, watch: RowWatch, result: RequestResult) -> Stream:
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
