"""A case through the client of `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from mlxcel.core.engine import Engine
from mlxcel.direct import generate
from mlxcel.load import LoadedModel
from mlxcel.tools.parity.arms import Arm
from mlxcel.tools.parity.request import request_spec, stream_of
from mlxcel.tools.parity.setup import Setup
from mlxcel.tools.parity.stream import Stream
from mlxcel.tools.parity.watch import RowWatch


def run_direct(
    setup: Setup,
    arm: Arm,
    model: LoadedModel,
    watch: RowWatch,
    case: str,
    score: Mapping[str, Sequence[int]] | None,
) -> Stream:
    """`score` as in `run_arm`. Raises what kept the request from its end, KeyboardInterrupt too."""
    spec = request_spec(setup, model, case)
    watch.follow(spec.prompt_ids)
    result = generate(
        model.engine,
        spec,
        planner=model.planner,
        observers=model.observers,
        run_ahead=case != "ahead" and not setup.config.force_sync,
    )
    if result.cause == "cancelled":
        raise KeyboardInterrupt
    stream = stream_of(arm, case, model, watch, result)
    if score is None:
        return stream
    tokens = score.get(case, stream.token_ids)
    return attrs.evolve(stream, scores=_scores(model.engine, spec.prompt_ids, tokens))


def _scores(engine: Engine, prompt: np.ndarray, tokens: Sequence[int]) -> tuple[float, ...]:
    """What the model says of these tokens behind the prompt."""
    ids = np.concatenate([prompt, np.asarray(tokens, np.int32)])
    return tuple(engine.score(ids, len(prompt) - 1).logprobs.tolist())
