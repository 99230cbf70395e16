"""What a model says of given ids: the log-probability of each token, with nothing drawn and no row left behind.

The ids are the prompt of a row of their own, prefilled by a plan whose pieces give logits at each position from `start`
on. What a step holds is bounded by cutting pieces, not by a second kind of forward: at R2 a cut changes no bit; at R1
the cuts are those that a longer piece has anyway (spec P3); at R0 they may change last bits, which R0 never promised to
keep over chunk sizes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from mlxcel.core.backend import BackendCaps, Level
from mlxcel.core.bind_params import cap_logprobs
from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Piece, PrefillPlan, Scores, Scoring, Span, id_bytes
from mlxcel.core.prompt_ids import check_prompt
from mlxcel.core.request import SequenceSpec
from mlxcel.errors import RequestError

if TYPE_CHECKING:
    from mlxcel.core.engine import Engine

REQUEST_ID = "score"
"""Of the row, towards the backend."""

LOGITS_BYTES = 1 << 26
"""Most bytes of float32 logits in a step that scores: 341 positions of 49,152 ids, 64 of 262,144."""


def score(engine: Engine, caps: BackendCaps, ids: np.ndarray, start: int, top: int) -> Scores:
    """Scores of `ids` int32 [P] from position `start` on, with the `top` best of each; -1 is V.

    Refused as `Engine.open` is, and with RequestError for a start outside [0, P) and a top over the cap (spec S41). A
    fault of the row or its step is raised. However it ends, the row is closed.
    """
    settings = engine.settings
    prompt = np.asarray(ids)
    check_prompt(prompt, vocab=settings.vocab, context=settings.context)
    if not 0 <= start < len(prompt):
        raise RequestError(f"start is {start}, it must be from 0 to {len(prompt) - 1}", field="start")
    if top < -1:
        raise RequestError(f"top is {top}, it must be 0 or more, or -1 for all", field="top")
    top = cap_logprobs("top", top, settings.vocab, settings.max_logprobs)
    prompt = prompt.astype(np.int32)
    plan = score_plan(prompt, start, top, vocab=settings.vocab, chunk=settings.chunk, level=engine.level, caps=caps)
    spec = SequenceSpec(REQUEST_ID, prompt, SamplingParams(temperature=0, max_tokens=1))
    found = [Scores.none(top)]
    sequence_id = engine.open(spec)
    try:
        for index in range(len(plan.pieces)):
            part = Piece(sequence_id, plan, index)
            engine.reserve([part])
            outcome = engine.collect(engine.submit([part]))[0]
            if outcome.error is not None:
                raise outcome.error
            if outcome.scores is not None:
                found.append(outcome.scores)
    finally:
        engine.close(sequence_id)
    return Scores.joined(found)


def score_plan(
    ids: np.ndarray, start: int, top: int, *, vocab: int, chunk: int, level: Level, caps: BackendCaps
) -> PrefillPlan:
    """A plan over all of `ids` [P] but the last, which has no token behind it, that draws nothing.

    Pieces end at multiples of `chunk`. From `start` on these are cut further, each from its own beginning, so that no
    more is scored at once than LOGITS_BYTES holds logits of V = `vocab` for, or than R1 runs at once. P = 1 has no
    piece.
    """
    end = len(ids) - 1
    step = caps.r1_tokens if level == "R1" and caps.r1_tokens else 1
    group = max(1, LOGITS_BYTES // (4 * vocab) // step) * step
    cuts = {0, end}
    for begin in range(0, end, chunk):
        cuts |= {begin, *(cut for cut in range(begin, min(begin + chunk, end), group) if cut > start)}
    pieces = tuple(
        Span(low, high, caps.piece_width(high - low, level)) for low, high in itertools.pairwise(sorted(cuts))
    )
    scoring = Scoring(range(start, end), top)
    return PrefillPlan(ids=id_bytes(ids[:end]), start=0, pieces=pieces, level=level, draw=False, scoring=scoring)
