"""Short words for tests of the finish step without an engine."""

import attrs
import numpy as np

from mlxcel.core.params import SamplingParams
from mlxcel.core.request import SequenceSpec
from mlxcel.plugins.finish.standard import StandardFinish
from mlxcel.testing.clock import ManualClock
from mlxcel.text.detokeniser import Detokeniser


@attrs.frozen
class Reply:
    """What a row came to: `deltas` are (content, reasoning) of each token."""

    tokens: int
    text: str
    reasoning: str
    cause: str | None
    detail: object
    deltas: tuple


def finish_row(tokenizer, *, eos_ids=frozenset(), reasoning=None, clock=None, steps=None, **params):
    """A finish step and the state of a row in it."""
    spec = SequenceSpec(
        request_id="row",
        prompt_ids=np.zeros(1, np.int32),
        params=SamplingParams(seed=0, **params),
        eos_ids=eos_ids,
        reasoning=reasoning,
    )
    step = StandardFinish(
        stream=lambda row: Detokeniser(tokenizer, skip_special=row.params.skip_special_tokens),
        steps=steps or {},
        clock=clock or ManualClock(),
    )
    return step, step.open(spec, max_new=10**6, context=10**6)


def reply(tokenizer, ids, **options):
    """Resolve `ids` until the row ends; a row that does not is cancelled behind the last one."""
    step, state = finish_row(tokenizer, **options)
    deltas, tokens, ending = [], 0, None
    for token in ids:
        resolution = step.resolve(state, token)
        tokens += resolution.appended
        deltas.append((resolution.released.text, resolution.released.reasoning))
        ending = resolution.ending
        if ending is not None:
            break
    if ending is None:
        tail = step.flush(state)
        deltas.append((tail.text, tail.reasoning))
    return Reply(
        tokens=tokens,
        text="".join(text for text, _ in deltas),
        reasoning="".join(reasoning for _, reasoning in deltas),
        cause=ending and ending.cause,
        detail=ending and ending.detail,
        deltas=tuple(deltas),
    )
