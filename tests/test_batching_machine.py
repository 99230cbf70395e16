"""Rows of a real model that are opened, fed, preempted, cancelled, kept and taken up in any order: each is as alone.

docs/spec/engine.md: V3 to V5, V13, V14, V17, X8, X10, C18, C19, E1, E4, E22. The machine calls the engine and the
prompt cache as a scheduler might, in orders that no scheduler would choose.
"""

from collections import deque

import attrs
import numpy as np
import pytest
from cache_rows import caching
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lone_rows import CHUNK, CONTEXT, FULL, KINDS, LENGTHS, PAGE, PROMPTS, SLOTS, checkpoint, lone, spec_of
from real_engine import assert_same_bits
from tested_backends import REFERENCE, backend_in_test

from mlxcel.core.parts import part_length
from mlxcel.core.plan import Decode, Piece
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import AdoptError, CapacityError, RewindError
from mlxcel.plugins.kv.kept_pages import CacheLimits
from mlxcel.plugins.kv.paged import PagedKV
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import ByteTokenizer

INDEX = st.integers(0, 7)
OFTEN_RUN = st.sampled_from(["seeded", "filtered", "greedy", *sorted(KINDS)])


def going(view):
    return view.state not in (SequenceState.FINISHED, SequenceState.FAILED)


def prompted(view):
    return going(view) and view.state is not SequenceState.DECODING


def speaking(view):
    return going(view) and len(view.output) > 1


def ended(view):
    return view.state is SequenceState.FINISHED


def rewindable(view):
    return view.state is SequenceState.DECODING and not view.in_flight and view.stored > view.adopted


@attrs.frozen
class Asked:
    """What a row is to become."""

    prompt: int
    kind: str
    length: int


class Machine(RuleBasedStateMachine):
    operations = 0

    @initialize(
        model=st.sampled_from(["full", "full", "full", "window", "window", "state"]),
        store=st.sampled_from(["paged", "paged", "dense"]),
        pages=st.sampled_from([FULL, FULL + 3, 2 * FULL, 8 * FULL]),
        limit=st.sampled_from([None, None, 6]),
        kept=st.lists(st.integers(6, len(PROMPTS) - 1), min_size=1, max_size=3),
    )
    def start(self, model, store, pages, limit, kept):
        if backend_in_test() != REFERENCE:  # fewer programs: models of two kinds of layers, one size of pool
            model, pages = model if model != "full" else "window", FULL + 3
        self.model = model
        self.it = caching(
            checkpoint(model),
            store=store,
            slots=SLOTS,
            context=CONTEXT,
            chunk=CHUNK,
            pages=pages if store == "paged" else None,
            limits=CacheLimits(min_prefix=1, ttl=100, entries=limit or 0),
            tokenizer=ByteTokenizer(),
        )
        self.engine, self.cache, self.kv = self.it.engine, self.it.cache, self.it.kv
        self.rows = {}  # id -> Asked
        self.seated = set()  # those of them with a slot
        self.flights = deque()  # of each step (ticket, {row: tokens fed}, {row that draws}, what it was submitted with)
        self.submitted = 0
        self.records = []  # DetachedKV that the machine itself holds
        for prompt in kept:
            spec = spec_of(prompt, "seeded", 5)
            row, _ = self.cache.open(self.engine, spec)
            self.begin(row, Asked(prompt, "seeded", 5))
            self.finish(row)
            self.cache.donate(self.engine, row)
            self.forget(row)

    # --- what a row needs next ------------------------------------------------------------------------------------

    def in_flight(self, row):
        """Positions fed and tokens drawn by steps that were not collected."""
        fed = sum(fed.get(row, 0) for _, fed, _, _ in self.flights)
        return fed, sum(row in drew for _, _, drew, _ in self.flights)

    def next_part(self, row, chunk):
        """The part that continues a row and whether it draws, or None where nothing may run now."""
        view = self.engine.view(row)
        fed, drawing = self.in_flight(row)
        at, known = view.stored + fed, view.prompt_tokens + len(view.output)
        if not going(view):
            return None
        target = known - 1 if view.output else known  # positions that pieces may compute
        part, draws = Decode(row), at == known - 1 + drawing
        if view.state is not SequenceState.DECODING and at < target:
            planner = ChunkedPlanner(chunk=chunk, level="R2", caps=self.engine.caps)
            plan = planner.build(self.engine.tokens(row)[:target], adopted=at, draw=not view.output)
            part, draws = Piece(row, plan, 0), plan.draw and plan.is_terminal(0)
        if draws and len(view.output) + drawing >= view.max_new:
            return None
        if draws and drawing and not self.engine.closed(row):
            return None
        return part, draws

    def reserve(self, parts, steps=1):
        """False where pages or slots are short, which must be true then."""
        try:
            self.engine.reserve(parts, steps)
        except CapacityError:
            stats = self.engine.kv_stats
            seats = len(self.seated.union(part.sequence_id for part in parts))
            # A piece takes a page where it begins one, and one for the copy of a shared tail.
            wanted = sum(-(-steps * part_length(part) // stats.page_size) + 1 for part in parts)
            assert stats.free < wanted or seats > SLOTS, "refused, and there was room"
            return False
        self.seated.update(part.sequence_id for part in parts)
        return True

    def submit(self, rows, chunk, run=False):
        """One step of these rows or, with `run`, of those that may have several submitted together so many steps. False
        where none can go on."""
        while len({together for *_, together in self.flights}) == 2:
            self.collect_one()
        chosen = [(row, found) for row in rows if (found := self.next_part(row, chunk)) is not None]
        if run:
            chosen = [one for one in chosen if self.engine.run_length([one[1][0]]) > 1] or chosen
        parts = [part for _, (part, _) in chosen]
        steps = self.engine.run_length(parts) if run and parts else 1
        if not parts or not self.reserve(parts, steps):
            return False
        tickets = [self.engine.submit(parts)] if steps == 1 else self.engine.submit_run(parts, steps)
        fed = {part.sequence_id: part_length(part) for part in parts}
        self.submitted += 1
        for ticket in tickets:
            self.flights.append((ticket, fed, {row for row, (_, draws) in chosen if draws}, self.submitted))
        return True

    def collect_one(self):
        ticket, fed, *_ = self.flights.popleft()
        for outcome in self.engine.collect(ticket):
            assert outcome.error is None, outcome.error
        self.leave(fed)

    def leave(self, rows):
        """A closed row has its slot until nothing of it is in flight."""
        self.seated -= {row for row in rows if row not in self.rows and not self.in_flight(row)[0]}

    def settle(self):
        while self.flights:
            self.collect_one()

    def those(self, wanted):
        """Rows of which `wanted` is true, by their views."""
        return [row for row in self.rows if wanted(self.engine.view(row))]

    def check(self, row):
        """A row so far is its lone run so far, in ids and in every bit of its logits."""
        asked, view = self.rows[row], self.engine.view(row)
        ids, logits = lone(self.model, asked.prompt, asked.kind, asked.length)
        assert view.output == ids[: len(view.output)], asked
        kept = self.it.real.backend.kept
        first = view.prompt_tokens
        for step in range(len(view.output)):
            got = kept[row, first + step]
            if got.tobytes() != logits[step].tobytes():
                assert_same_bits(logits[step : step + 1], got[None], f"{asked} at token {step}")
        if view.state is SequenceState.FINISHED and view.ending.cause == "max_tokens":
            assert view.output == ids

    def forget(self, row):
        self.engine.close(row)
        del self.rows[row]
        self.leave([row])
        for key in [key for key in self.it.real.backend.kept if key[0] == row]:
            del self.it.real.backend.kept[key]

    def finish(self, row):
        """Drive one row to its end at the cost of all others."""
        self.settle()
        while self.engine.view(row).state is not SequenceState.FINISHED:
            while not self.submit([row], CHUNK):
                self.make_room(row)
            self.collect_one()
        self.check(row)

    def make_room(self, row):
        """What C23 allows, all of it; afterwards a lone row fits."""
        if self.cache.reclaim(1):
            return
        for record in self.records:
            self.engine.release(record)
        if self.records:
            self.records = []
            return
        others = [other for other in self.rows if other != row and other in self.seated]
        assert others, "a lone row does not fit"
        if self.engine.view(others[-1]).state is SequenceState.FINISHED:
            self.forget(others[-1])
        else:
            self.take_away(others[-1])

    def take_away(self, row):
        self.engine.preempt(row)
        self.seated.discard(row)

    # --- what is done to rows ---------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) < SLOTS + 2)
    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1), kind=OFTEN_RUN, length=st.sampled_from(LENGTHS),
        cached=st.sampled_from([True, True, False]),
    )  # fmt: skip
    def open(self, prompt, kind, length, cached):
        spec = spec_of(prompt, kind, length)
        free = self.kv.stats().free
        try:
            if cached:
                row, match = self.cache.open(self.engine, spec)
                assert match.length < len(spec.prompt_ids), "X6: one token is always computed"
            else:
                row = self.engine.open(spec)
        except CapacityError:
            assert len(self.seated) == SLOTS or (free == 0 and not self.kv.shares)
            return
        self.begin(row, Asked(prompt, kind, length))

    def begin(self, row, asked):
        assert row not in self.rows, "E6: ids are not used twice"
        self.rows[row] = asked
        self.seated.add(row)
        assert len(self.seated) <= SLOTS

    @precondition(lambda self: self.rows)
    @rule(
        chosen=st.lists(st.booleans(), min_size=2 * SLOTS, max_size=2 * SLOTS),
        chunk=st.sampled_from([1, 7, 16, CHUNK]), backwards=st.booleans(), ahead=st.booleans(), run=st.booleans(),
    )  # fmt: skip
    def advance(self, chosen, chunk, backwards, ahead, run):
        """Some rows, in some order, by pieces and decodes in one step, or by a run of steps; perhaps another before the
        first is read."""
        rows = [row for row, wanted in zip(self.rows, chosen, strict=False) if wanted]
        self.submit(rows[::-1] if backwards else rows, chunk, run)
        if not ahead:
            self.settle()

    @precondition(lambda self: self.rows)
    @rule(steps=st.integers(1, 15), run=st.booleans())
    def all_advance(self, steps, run):
        for _ in range(steps):
            if not self.submit(list(self.rows), CHUNK, run):
                break
        self.settle()

    @precondition(lambda self: self.those(going))
    @rule(runs=st.integers(1, 4), settled=st.booleans())
    def all_run(self, runs, settled):
        """Behind their prompts, runs of steps; the last two are perhaps not read."""
        self.settle()
        while self.submit(self.those(prompted), CHUNK):
            self.settle()
        for _ in range(runs):
            if not self.submit(list(self.rows), CHUNK, run=True):
                break
        if settled:
            self.settle()

    @precondition(lambda self: self.flights)
    @rule()
    def collect(self):
        self.collect_one()

    @precondition(lambda self: self.those(going))
    @rule(index=INDEX, back=st.sampled_from(["later", "cache", "cache"]))
    def preempt(self, index, back):
        """It comes back by a reservation of its own some time, or at once with what the prompt cache has of it."""
        self.settle()
        if not (rows := self.those(speaking) or self.those(going)):
            return
        row = rows[index % len(rows)]
        view = self.engine.view(row)
        self.take_away(row)
        assert self.engine.view(row).stored == 0
        assert self.engine.view(row).output == view.output
        if back == "cache":
            self.seat_again(row, cached=True)

    @precondition(lambda self: self.rows.keys() - self.seated)
    @rule(index=INDEX, cached=st.sampled_from([True, True, False]))
    def resume(self, index, cached):
        row = sorted(self.rows.keys() - self.seated)[index % len(self.rows.keys() - self.seated)]
        if self.engine.view(row).state is SequenceState.PREEMPTED:  # not cancelled meanwhile
            self.seat_again(row, cached)

    def seat_again(self, row, cached):
        free = self.kv.stats().free
        try:
            if cached:
                match = self.cache.resume(self.engine, row)
                assert self.engine.view(row).stored == match.length
            else:
                self.engine.resume(row)
        except CapacityError:
            assert len(self.seated) == SLOTS or (free == 0 and not self.kv.shares)
        else:
            self.seated.add(row)

    @precondition(lambda self: self.those(rewindable))
    @rule(index=INDEX, count=st.integers(1, 16))
    def unwind(self, index, count):
        rows = self.those(rewindable)
        row = rows[index % len(rows)]
        view = self.engine.view(row)
        count = min(count, view.stored - view.adopted)
        try:
            self.engine.unwind(row, count)
        except RewindError:
            assert self.model != "full"
            assert self.engine.view(row).stored == view.stored
        else:
            assert self.engine.view(row).stored == view.stored - count

    @precondition(lambda self: self.those(going))
    @rule(index=INDEX)
    def cancel(self, index):
        rows = self.those(going)
        self.engine.cancel(rows[index % len(rows)])

    @precondition(lambda self: self.those(going))
    @rule(index=INDEX)
    def abandon(self, index):
        rows = self.those(going)
        self.forget(rows[index % len(rows)])

    @precondition(lambda self: self.those(ended))
    @rule(index=INDEX, keep=st.sampled_from(["donate", "donate", "donate", "detach", "close"]))
    def end(self, index, keep):
        """A row that ended leaves: to the cache, to the machine, or for good. With a step in flight it only closes."""
        rows = self.those(ended)
        row = rows[index % len(rows)]
        view = self.engine.view(row)
        self.check(row)
        if view.state is SequenceState.FINISHED and not view.in_flight and view.stored:
            if keep == "donate":
                assert self.cache.donate(self.engine, row) in (0, view.stored)
            elif keep == "detach":
                try:
                    self.records.append(self.engine.detach(row, 1 + view.stored // 2))
                except AdoptError:
                    assert self.model == "state"
        self.forget(row)

    @precondition(lambda self: self.rows)
    @rule(index=INDEX, by=st.sampled_from(["cache", "hand"]))
    def share(self, index, by):
        row = list(self.rows)[index % len(self.rows)]
        view = self.engine.view(row)
        if by == "cache":
            assert self.cache.share(self.engine, row) <= view.prompt_tokens
        elif view.stored and len(self.records) < 3:
            try:
                self.records.append(self.engine.share(row, view.stored))
            except AdoptError:
                assert self.model == "state" or not self.kv.shares

    @precondition(lambda self: self.records and len(self.rows) < SLOTS + 2)
    @rule(less=st.integers(0, 40), kind=st.sampled_from(sorted(KINDS)), length=st.sampled_from(LENGTHS))
    def adopt(self, less, kind, length):
        """A row of any prompt that a record holds the beginning of."""
        record = self.records[-1]
        fitting = [i for i, prompt in enumerate(PROMPTS) if self.common(record, prompt) > 0]
        if not fitting:
            return
        prompt = fitting[less % len(fitting)]
        usable = self.common(record, PROMPTS[prompt])
        try:
            row = self.engine.adopt(spec_of(prompt, kind, length), record, max(1, usable - less // 2))
        except CapacityError:
            assert len(self.seated) == SLOTS
            return
        except AdoptError:
            assert self.model == "window", "its rings may have gone on"
            return
        self.begin(row, Asked(prompt, kind, length))
        if not self.kv.shares:
            self.records.pop()

    @staticmethod
    def common(record, prompt):
        most = min(record.length, len(prompt) - 1)
        same = record.ids[:most] == np.asarray(prompt[:most], np.int32)
        return most if same.all() else int(same.argmin())

    @precondition(lambda self: self.records)
    @rule()
    def release(self):
        self.engine.release(self.records.pop(0))

    @rule(how=st.sampled_from(["reclaim", "reclaim", "reclaim", "age", "reset"]), pages=st.integers(1, 6))
    def evict(self, how, pages):
        if how == "reclaim":
            before = self.kv.stats().free
            assert self.cache.reclaim(pages) == self.kv.stats().free - before
        elif how == "age":
            self.it.clock.advance(20 * pages)
            self.cache.sweep()
        else:
            self.cache.reset()

    # --- what holds always --------------------------------------------------------------------------------------------

    @invariant()
    def rows_are_as_alone(self):
        type(self).operations += 1
        for row in self.rows:
            self.check(row)

    @invariant()
    def the_pool_adds_up(self):
        stats = self.engine.kv_stats
        assert stats.free + stats.owned + stats.cached == stats.total
        if not isinstance(self.kv, PagedKV):
            return
        self.kv.check()
        for row in () if self.flights else self.rows.keys() & self.seated:
            assert len(self.kv.page_table(row)) == -(-self.engine.view(row).stored // PAGE), (
                "V17: none it does not need"
            )

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for row in list(self.rows):
            if row in self.rows and self.engine.view(row).state is not SequenceState.FINISHED:
                self.finish(row)
        self.settle()
        for row in list(self.rows):
            self.forget(row)
        for record in self.records:
            self.engine.release(record)
        self.cache.reset()
        stats = self.engine.kv_stats
        assert (stats.free, stats.owned, stats.cached) == (stats.total, 0, 0), "a page leaked"
        self.engine.shutdown()


def operate(examples, steps):
    """Runs the machine; how many operations that came to."""
    counted = type("Counted", (Machine,), {"operations": 0})
    run_state_machine_as_test(
        counted,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return counted.operations


@pytest.mark.on_jax(most=0)
def test_any_order_of_calls_gives_each_row_its_lone_run(backend):
    examples = 50 if backend == REFERENCE else 8
    assert operate(examples, 60) >= 40 * examples


@pytest.mark.slow
def test_any_order_of_calls_gives_each_row_its_lone_run_at_length():
    assert operate(1200, 120) >= 100_000
