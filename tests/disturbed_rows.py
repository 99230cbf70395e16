"""Rows of a real engine that are driven to the same end whatever happens to their steps on the way."""

import numpy as np
from real_engine import assert_same_bits

from mlxcel.core.parts import part_length
from mlxcel.core.plan import Decode, Piece
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import BackendFault
from mlxcel.plugins.prefill.chunked import ChunkedPlanner


class DisturbedRows:
    """Rows over prompts, each to draw `steps` tokens behind its first, in pieces of `chunk`."""

    def __init__(self, real, prompts, steps, chunk):
        self.real, self.engine = real, real.engine
        self.steps = steps
        self.planner = ChunkedPlanner(chunk=chunk, level="R2", caps=real.backend.caps)
        self.prompts = {real.open(prompt): prompt for prompt in prompts}

    @property
    def going(self):
        return [row for row in self.prompts if len(self.engine.view(row).output) <= self.steps]

    def next_part(self, row, ahead=None):
        """What continues a row behind the part `ahead` that is in flight, or None where that ends it: a piece of its
        prompt, of a replay where its KV is lost, or a decode."""
        view = self.engine.view(row)
        at = view.stored + (part_length(ahead) if ahead else 0)
        coming = isinstance(ahead, Decode) or (ahead is not None and ahead.plan.draw and ahead.plan.length == at)
        if len(view.output) + coming > self.steps:
            return None
        if view.state is not SequenceState.DECODING:
            known = [*self.prompts[row], *view.output[:-1]]
            plan = self.planner.build(np.asarray(known, np.int32), draw=not view.output)
            if at < plan.length:
                return Piece(row, plan, plan.piece_at(at))
        return Decode(row)

    def submit(self, rows, ahead=()):
        """A step of these rows behind the parts `ahead`; its ticket, or None where no row can go on."""
        before = {part.sequence_id: part for part in ahead}
        parts = [part for row in rows if (part := self.next_part(row, before.get(row))) is not None]
        if not parts:
            return None
        self.engine.reserve(parts)
        return self.engine.submit(parts)

    def turn(self, rows, later=None):
        """A step of `rows`, and with `later` one of these rows that is submitted before the first is collected. All
        that was submitted is collected, and an interrupt comes out behind that."""
        caught = None
        tickets = [self.submit(rows)]
        if later is not None:
            try:
                tickets.append(self.submit(later, tickets[0].parts if tickets[0] else ()))
            except KeyboardInterrupt as error:
                caught = error
        for ticket in filter(None, tickets):
            try:
                self.engine.collect(ticket)
            except KeyboardInterrupt as error:
                caught = error
        if caught:
            raise caught

    def to_end(self):
        while rows := self.going:
            self.turn(rows)

    def check(self, alone):
        """Every logit and token is that of `alone`, one (logits, ids) for each row, in the order of the prompts."""
        kept = self.real.backend.kept
        for index, (row, prompt) in enumerate(self.prompts.items()):
            logits, output = alone[index]
            assert self.engine.view(row).output == output
            got = np.stack([kept[row, position] for position in range(len(prompt), len(prompt) + self.steps + 1)])
            assert_same_bits(logits, got, f"row {index}")

    def lose_kv(self, monkeypatch, *, kv_intact):
        """A step of a row of its own fails, with a step of all others ahead."""
        victim = self.real.open([1, 2])
        part = Piece(victim, self.planner.build(np.array([1, 2], np.int32)), 0)
        self.engine.reserve([part])
        first = self.engine.submit([part])
        second = self.submit(self.going)
        with monkeypatch.context() as patch:

            def fail(handle):
                raise BackendFault("gone", kv_intact=kv_intact)

            patch.setattr(self.real.backend, "read", fail)
            assert isinstance(self.engine.collect(first)[0].error, BackendFault)
        self.engine.collect(second)
        self.engine.close(victim)


def interrupted(patch, owner, method, *, nth=1, behind=True):
    """`owner.method` raises KeyboardInterrupt in its nth call from now on, `behind` or before what it does."""
    real, calls = getattr(owner, method), iter(range(1, 10**6))

    def call(*args, **options):
        if next(calls) != nth:
            return real(*args, **options)
        if behind:
            real(*args, **options)
        raise KeyboardInterrupt

    patch.setattr(owner, method, call)
