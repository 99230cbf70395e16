"""Random legal and illegal calls against the invariants E1 to E6 of docs/spec/engine.md 1.1."""

from collections import deque

from engine_rows import opened, pieces, plan_for, scripted
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxcel.core.plan import Decode
from mlxcel.core.sequence import SequenceState
from mlxcel.errors import BackendFault, BatchShapeError, CapacityError, UnknownSequence
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import Fault, FaultPlan

SLOTS = 3
GOING = (SequenceState.OPEN, SequenceState.PREFILLING, SequenceState.DECODING, SequenceState.PREEMPTED)
REFUSALS = (BatchShapeError, CapacityError, UnknownSequence)


def script(name):
    """What row `name` says, from its name alone, so that the model needs no state of its own."""
    number = int(name[1:])
    text = f"{name}:{number * 7919}" * (1 + number % 3)
    return [*text.encode()[: 1 + number % 5], EOS, *b"never said" * 3]


class Calls(RuleBasedStateMachine):
    """A client without manners: it opens, closes, cancels, runs ahead and asks for nonsense."""

    @initialize(faulty=st.booleans(), together=st.sampled_from([1, 3]))
    def start(self, faulty, together):
        # A step in eleven fails, three of them with the KV lost.
        faults = [Fault("read", n, "lose_kv" if n % 3 == 0 else "raise") for n in range(11, 400, 11)]
        scripts = {f"r{number}": script(f"r{number}") for number in range(400)}
        faults = FaultPlan(faults if faulty else [])
        self.it = scripted(scripts, slots=SLOTS, context=40, faults=faults, decode_run=together)
        self.engine = self.it.engine
        self.rows = {}  # id -> (name, plan)
        self.said = {}
        self.closed = set()
        self.tickets = deque()
        self.lost = set()  # numbers of tickets whose results are void
        self.run_of = {}  # of a run, by the number of each ticket those of all
        self.interrupted = None  # the backend's method that raises in its next call
        self.count = 0

    def pick(self, index):
        return list(self.rows)[index % len(self.rows)] if self.rows else 10_000

    @rule(length=st.integers(1, 12), chunk=st.integers(3, 9), budget=st.sampled_from([-1, -1, 0, 1, 2, 7]))
    def open(self, length, chunk, budget):
        name = f"r{self.count}"
        before = self.it.kv.stats()
        try:
            row, plan = opened(self.engine, name, bytes(range(65, 65 + length)), chunk, max_tokens=budget)
        except CapacityError:
            assert before.free == 0
            return
        assert row not in self.rows
        assert row not in self.closed
        self.rows[row] = (name, plan)
        self.said[row] = b""
        self.count += 1

    def next_part(self, row):
        """The part that would continue a row, or a decode where none does. A row that lost its KV starts over."""
        view = self.engine.view(row)
        if view.state is not SequenceState.DECODING:
            plan = self.rows[row][1]
            if view.output:
                prompt = bytes(range(65, 65 + view.prompt_tokens))
                plan = plan_for([*prompt, *view.output[:-1]], chunk=len(prompt), draw=False)
            here = view.stored + self._fed(row)
            for piece in pieces(row, plan):
                if plan.pieces[piece.index].start == here:
                    return piece
        return Decode(row)

    @rule(method=st.sampled_from(["submit", "read"]))
    def interrupt(self, method):
        """The next call of the backend's method meets a KeyboardInterrupt."""
        self.interrupted = method

    def arm(self):
        if self.interrupted is not None:

            def raise_once(_argument, method=self.interrupted):
                delattr(self.it.backend, method)
                raise KeyboardInterrupt

            setattr(self.it.backend, self.interrupted, raise_once)
            self.interrupted = None

    def submit(self, parts, together=1):
        """One step, or so many together."""
        self.arm()
        steps = self.it.backend.steps
        try:
            self.engine.reserve(parts, together)
            if together == 1:
                self.tickets.append(self.engine.submit(parts))
            else:
                run = self.engine.submit_run(parts, together)
                self.tickets.extend(run)
                numbers = frozenset(each.number for each in run)
                self.run_of |= dict.fromkeys(numbers, numbers)
        except (*REFUSALS, KeyboardInterrupt):
            assert self.it.backend.steps == steps
        else:
            assert self.it.backend.steps == steps + together

    @rule(keep=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS), ahead=st.integers(1, 2))
    def go_on(self, keep, ahead):
        """Any part of the rows that can go on, up to two steps ahead."""
        for _ in range(ahead):
            going = [row for row in self.rows if self.engine.view(row).state in GOING]
            chosen = [row for row, kept in zip(going, keep, strict=False) if kept] or going
            if chosen:
                self.submit([self.next_part(row) for row in chosen])

    @rule(ahead=st.integers(1, 2))
    def all_go_on(self, ahead):
        self.go_on([True] * SLOTS, ahead)
        self.collect()

    @rule(keep=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS), ahead=st.integers(1, 2))
    def run_on(self, keep, ahead):
        """Any of the rows that may run several steps together, their prompts first; up to two runs ahead. Others come
        in the place of those that ended."""
        for row in list(self.rows):
            if self.engine.view(row).state not in GOING:
                self.engine.close(row)
                self.closed.add(row)
                del self.rows[row]
        while self.tickets:
            self.collect()
        while len(self.rows) < SLOTS:
            self.open(length=5, chunk=9, budget=-1)
        for row in self.rows:
            self.prefill(row)
        for _ in range(ahead):
            going = [Decode(row) for row in self.rows if self.engine.view(row).state is SequenceState.DECODING]
            able = [part for part in going if self.engine.run_length([part]) > 1]
            chosen = [part for part, kept in zip(able, keep, strict=False) if kept] or able
            if chosen:
                self.submit(chosen, self.engine.run_length(chosen))

    def prefill(self, row):
        """Feed what is left of a prompt, but for an interrupt or a fault."""
        for _ in range(self.engine.view(row).prompt_tokens):
            while self.tickets:
                self.collect()
            state = self.engine.view(row).state
            if state not in GOING or state is SequenceState.DECODING:
                return
            self.submit([self.next_part(row)])

    @rule(picks=st.lists(st.integers(0, 9), max_size=4), together=st.sampled_from([1, 1, 2, 3]))
    def ask_for_nonsense(self, picks, together):
        self.submit([Decode(self.pick(index)) for index in picks], together)

    def _fed(self, row):
        return sum(
            1 if isinstance(part, Decode) else part.plan.pieces[part.index].length
            for ticket in self.tickets
            if ticket.number not in self.lost
            for part in ticket.parts
            if part.sequence_id == row
        )

    @rule()
    def collect(self):
        if not self.tickets:
            return
        ticket = self.tickets.popleft()
        self.arm()
        try:
            outcomes = self.engine.collect(ticket)
        except KeyboardInterrupt:
            self.lost |= {ahead.number for ahead in self.tickets}
            return
        if any(isinstance(o.error, BackendFault) and not o.error.kv_intact for o in outcomes):
            self.lost |= {ahead.number for ahead in self.tickets}
        if any(isinstance(o.error, BackendFault) for o in outcomes):
            self.lost |= self.run_of.get(ticket.number, set())
        assert [o.sequence_id for o in outcomes] == [part.sequence_id for part in ticket.parts]
        for outcome in outcomes:
            assert outcome.error is None or outcome.cause is None
            if outcome.sequence_id in self.rows and outcome.appended:
                self.said[outcome.sequence_id] += bytes([outcome.token])

    @rule(index=st.integers(0, 9))
    def close(self, index):
        row = self.pick(index)
        assert self.engine.close(row) is (row in self.rows)
        if self.rows.pop(row, None):
            self.closed.add(row)

    @rule(index=st.integers(0, 9))
    def cancel(self, index):
        if self.rows:
            outcome = self.engine.cancel(self.pick(index))
            assert (outcome.cause is None) is (outcome.error is not None)

    @invariant()
    def rows_are_sound(self):
        for row, (name, _plan) in self.rows.items():
            view = self.engine.view(row)
            expected = bytes(script(name)[: script(name).index(EOS)])
            produced = len(view.output)
            assert bytes(view.output) == self.said[row] == expected[:produced], "E6 and the script"
            assert 0 <= produced <= view.max_new, "E4"
            assert view.prompt_tokens + produced <= view.context, "E4"
            if view.in_flight == 0 and view.state is SequenceState.DECODING:
                assert view.stored == view.prompt_tokens + produced - 1, "E1"
            if view.in_flight == 0 and view.state is SequenceState.FINISHED and view.max_new:
                cause = view.ending.cause
                if cause == "eos":
                    assert view.stored == view.prompt_tokens + produced, "E2"
                elif cause in ("max_tokens", "context"):
                    assert view.stored == view.prompt_tokens + produced - 1, "E2"
            if self.engine.slot(row) is None:  # its KV was lost
                assert view.stored == 0, "E18"
                continue
            assert len(self.it.kv.page_table(row)) == 1, "E5"
            # What an ended row has in flight is taken back when the last of it is collected.
            if view.state in GOING or (view.state is SequenceState.FINISHED and view.in_flight == 0):
                assert self.it.kv.trim(row, 10_000) == view.stored + self._fed(row), "E3"

    @invariant()
    def nothing_leaks(self):
        stats = self.it.kv.stats()
        waiting = {p.sequence_id for t in self.tickets for p in t.parts if p.sequence_id in self.closed}
        assert stats.free + stats.owned == stats.total == SLOTS
        seated = sum(self.engine.slot(row) is not None for row in self.rows)
        assert stats.owned == seated + len(waiting)

    def teardown(self):
        if hasattr(self, "engine"):
            while self.tickets:
                self.collect()
            for row in list(self.rows):
                self.engine.close(row)
            assert self.it.kv.stats().owned == 0


Calls.TestCase.settings = settings(max_examples=150, stateful_step_count=70, deadline=None)
TestCalls = Calls.TestCase
