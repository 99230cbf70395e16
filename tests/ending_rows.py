"""One scripted row through the whole engine, in different company: what a client sees of it."""

from collections import deque

import attrs
import numpy as np
from engine_rows import plan_for

from mlxcel.core.params import SamplingParams
from mlxcel.core.plan import Decode, Piece
from mlxcel.core.request import SequenceSpec
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import BatchShapeError
from mlxcel.testing.byte_tokenizer import EOS, TURN_END, ByteTokenizer
from mlxcel.testing.faults import Fault, FaultPlan
from mlxcel.testing.scripted import scripted_engine

MODES = ("alone", "crowd", "ahead", "preempted")


@attrs.define
class Seen:
    """What came out of a row: ids, and (content, reasoning) of each outcome."""

    output: tuple = ()
    deltas: list = attrs.field(factory=list)
    cause: str | None = None
    detail: object = None
    error: Exception | None = None

    @property
    def text(self):
        return "".join(text for text, _ in self.deltas)

    @property
    def reasoning(self):
        return "".join(reasoning for _, reasoning in self.deltas)

    @property
    def ended(self):
        return self.cause is not None or self.error is not None

    def take(self, outcome):
        self.deltas.append((outcome.text, outcome.reasoning))
        self.cause, self.detail, self.error = outcome.cause, outcome.detail, outcome.error


def drive(
    mode,
    script,
    *,
    tokenizer=None,
    prompt=(97, 98, 99),
    context=256,
    steps=None,
    reasoning=None,
    eos_ids=frozenset({EOS, TURN_END}),
    delay=0.5,
    after=2,
    faults=(),
    **params,
):
    """Run a row with `script` to its end. "crowd" has a row before it and one that joins; "ahead" keeps two steps in
    flight; "preempted" loses the row's KV once it has `after` tokens. `faults` are more faults."""
    tokenizer = tokenizer or ByteTokenizer()
    lost = [Fault("read", after + 2, "lose_kv")] if mode == "preempted" else []
    it = scripted_engine(
        {"row": script, "first": [prompt[0]] * 300, "second": [prompt[0]] * 300},
        tokenizer=tokenizer,
        context=context,
        finish_steps=steps,
        delay=delay,
        faults=FaultPlan([*lost, *faults]),
    )
    ids = np.array(prompt, np.int32)

    def opened(name, **given):
        spec = SequenceSpec(
            request_id=name,
            prompt_ids=ids,
            params=SamplingParams(**{"temperature": 0, "seed": 0, **given}),
            eos_ids=eos_ids if name == "row" else frozenset(),
            reasoning=reasoning if name == "row" else None,
        )
        return it.engine.open(spec)

    seen = Seen()
    others = []
    if mode == "crowd":
        others.append(opened("first"))
        it.engine.prefill(others[0], plan_for(ids))
        it.engine.step(others)
    if mode == "preempted":
        others.append(opened("second"))
        it.engine.prefill(others[0], plan_for(ids))
    row = opened("row", **params)
    seen.take(it.engine.prefill(row, plan_for(ids)))
    if mode == "crowd":
        others.append(opened("second"))
    (_ahead if mode == "ahead" else _in_turn)(it, row, seen, others, mode, ids, after)
    view = it.engine.view(row)
    seen.output = view.output
    if seen.cause is not None:  # spec E2; an overrun is gone
        fed_all = seen.cause in ("eos", "stop_token")
        stored = max(0, len(prompt) + len(view.output) - (0 if fed_all else 1)) if view.output or fed_all else 0
        assert view.stored == stored
    for one in (row, *others):
        it.engine.close(one)
    assert it.kv.stats().owned == 0
    return seen


def _in_turn(it, row, seen, others, mode, ids, after):
    engine = it.engine
    while not seen.ended:
        if mode == "preempted" and len(engine.view(row).output) == after and engine.view(others[0]).ending is None:
            engine.step([others[0]])
            if engine.view(row).state is SequenceState.PREEMPTED:
                known = np.concatenate([ids, np.array(engine.view(row).output[:-1], np.int32)])
                engine.prefill(row, plan_for(known, draw=False))
        parts = [Decode(row)]
        for other in others if mode == "crowd" else ():
            view = engine.view(other)
            if view.state is SequenceState.OPEN:
                parts.append(Piece(other, plan_for(ids), 0))
            elif view.ending is None:
                parts.insert(0, Decode(other))
        place = parts.index(Decode(row))
        engine.reserve(parts)
        seen.take(engine.collect(engine.submit(parts))[place])


def _ahead(it, row, seen, others, mode, ids, after):
    engine, tickets = it.engine, deque()
    while not seen.ended or tickets:
        while not seen.ended and len(tickets) < 2:
            try:
                engine.reserve([Decode(row)])
            except BatchShapeError:  # its budget is in flight
                break
            tickets.append(engine.submit([Decode(row)]))
        outcome = engine.collect(tickets.popleft())[0]
        if seen.ended:
            assert (outcome.token, outcome.text, outcome.cause) == (None, "", None)
        else:
            seen.take(outcome)
