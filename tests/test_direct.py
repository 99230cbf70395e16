"""The direct client: one sequence, from its spec to its result."""

import pytest
from engine_rows import CAPS, scripted, spec

from mlxcel.core.observe import Observers
from mlxcel.core.plan import Span
from mlxcel.direct import generate
from mlxcel.errors import BackendFault, ContextTooLong
from mlxcel.plugins.prefill.chunked import ChunkedPlanner
from mlxcel.testing.byte_tokenizer import EOS
from mlxcel.testing.faults import Fault, FaultPlan

HELLO = [*b"hello", EOS]


def run(it, request, chunk=2048, **options):
    planner = ChunkedPlanner(chunk=chunk, level="R2", caps=CAPS)
    return generate(it.engine, request, planner=planner, clock=it.clock, **options)


def test_the_result_holds_what_a_client_reports():
    """Spec E21: counts, times, pieces as executed; times from the injected clock."""
    it = scripted({"a": HELLO}, delay=0.5)
    heard = []
    result = run(it, spec("a", b"abcdef"), chunk=4, on_text=heard.append)
    assert (result.text, "".join(heard), bytes(result.token_ids)) == ("hello", "hello", b"hello")
    assert (result.cause, result.finish_reason, result.error) == ("eos", "stop", None)
    assert result.pieces == (Span(0, 4, 4), Span(4, 6, 2))
    times = result.timings
    assert (times.ttft, times.prompt, times.predicted, times.ended) == (1.0, 1.0, 2.0, 3.5)
    assert it.engine.open_sequences == ()
    assert it.kv.stats().owned == 0


def test_no_token_leaves_the_times_empty():
    result = run(scripted({"a": HELLO}), spec("a", max_tokens=0))
    assert (result.text, result.cause, result.finish_reason, result.pieces) == ("", "max_tokens", "length", ())
    assert (result.timings.ttft, result.timings.predicted) == (None, None)


@pytest.mark.parametrize("call", range(1, 8))
def test_every_way_out_closes_the_row(call):
    """Spec E8: a fault in the n-th step ends the request with its error and what was produced before it."""
    it = scripted({"a": HELLO}, faults=FaultPlan([Fault("read", call)]))
    result = run(it, spec("a"))
    assert it.engine.open_sequences == ()
    assert it.kv.stats().owned == 0
    if call <= len(HELLO):
        assert isinstance(result.error, BackendFault)
        assert (result.cause, result.text) == ("error", "hello"[: call - 1])
    else:
        assert (result.cause, result.text) == ("eos", "hello")


def test_a_refused_request_raises_and_leaves_nothing():
    it = scripted({"a": HELLO}, context=8)
    with pytest.raises(ContextTooLong):
        run(it, spec("a", b"12345678"))
    assert it.engine.open_sequences == ()


def test_an_interrupt_keeps_what_was_said():
    """docs/spec/clients.md 1.4: the row is cancelled, its tail comes along, the result says so."""
    it = scripted({"a": [*b"ab", *"€".encode(), EOS]})
    heard = []

    def listen(text):
        heard.append(text)
        if text == "b":
            raise KeyboardInterrupt

    result = run(it, spec("a"), on_text=listen)
    assert (result.cause, result.finish_reason, result.text) == ("cancelled", None, "ab")
    assert bytes(result.token_ids) == b"ab"
    assert it.kv.stats().owned == 0


def test_observers_hear_one_end_a_request():
    """Spec E20."""

    class Ends:
        heard = ()

        def step_finished(self, report):
            """Not asked here."""

        def request_finished(self, result):
            self.heard = (*self.heard, (result.request_id, result.cause))

    ends = Ends()
    it = scripted({"a": HELLO, "b": HELLO}, faults=FaultPlan([Fault("read", 8)]))
    for name in "ab":
        run(it, spec(name), observers=Observers([ends]))
    assert ends.heard == (("a", "eos"), ("b", "error"))
    ends = Ends()
    with pytest.raises(ContextTooLong):
        run(scripted({"a": HELLO}, context=4), spec("a", b"12345"), observers=Observers([ends]))
    assert ends.heard == (("a", "rejected"),)


def test_a_listener_that_raises_cancels_its_request():
    """A reader that went away: the row is closed, the end is heard, the error reaches the caller."""

    class Ends:
        heard = ()

        def step_finished(self, report):
            """Not asked here."""

        def request_finished(self, result):
            self.heard = (*self.heard, (result.cause, result.text))

    def gone(text):
        raise BrokenPipeError

    ends, it = Ends(), scripted({"a": HELLO})
    with pytest.raises(BrokenPipeError):
        run(it, spec("a"), on_text=gone, observers=Observers([ends]))
    assert ends.heard == (("cancelled", "h"),)
    assert it.engine.open_sequences == ()
