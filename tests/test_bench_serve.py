"""The numbers of `mlxcel bench serve`, on a clock that tests move (docs/spec/clients.md 8.2, 8.4)."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import pytest
from load_stub import (
    ADDRESS,
    DONE,
    HEAD,
    Cut,
    Script,
    Stall,
    Stub,
    chunk,
    delta,
    event,
    framed,
    loaded,
    posts,
    refusal,
    reply,
    run,
    text,
    usage,
)

from mlxcel.tools.load.arrivals import arrivals
from mlxcel.tools.load.client import request_bytes
from mlxcel.tools.load.dataset import Asked
from mlxcel.tools.load.measure import Load
from mlxcel.tools.load.options import LoadOptions
from mlxcel.tools.load.own_cost import own_cost
from mlxcel.tools.load.report import table
from mlxcel.tools.load.result import Facts, Result, result
from mlxcel.tools.load.statistics import deviation, mean, percentile
from mlxcel.tools.load.wire import EventReader, ReplyReader, WireFault

OPTIONS = LoadOptions(ADDRESS)
FACTS = Facts("2026-11-30T12:00:00+00:00", "m", "1", "server", own_cost=0.0)


def load(stub: Stub, plan: list[float] | None = None, **how: Any) -> Load:
    plan = plan or [0.0] * len(stub.scripts)
    return run(stub, loaded(plan, **{"timeout": 100.0, **how}))


def measured(
    *scripts: Script | None, options: LoadOptions = OPTIONS, facts: Facts = FACTS, plan: Any = None, **how: Any
) -> Result:
    asked = [Asked("p", 5, 9)] * len(scripts)
    return result(options, facts, asked, load(Stub(scripts), plan, **how))


# --- definitions (8.4, 1) ---------------------------------------------------------------------------------------------

COMPLETION: Script = [
    (0.5, HEAD + b": keep-alive\n\n"),
    (0.5, text("a")),
    (0.5, text("b")),
    (0.25, b": ping\r\n\r\n" + text("c")),
    (0.125, text("", "length")),
    (0.125, usage(7, 5, cached=4)),
    (0.25, DONE),
]
CHAT: Script = [
    (0.25, HEAD),
    (0.25, delta({"role": "assistant", "content": ""}) + b": keep-alive\n\n"),
    (0.5, delta({"reasoning_content": "a", "reasoning": "a"})),
    (0.5, delta({"content": "b"})),
    (0.25, delta({"content": "c"}) + delta({}, "length")),
    (0.5, usage(7, 5, cached=4) + DONE),
]


@pytest.mark.parametrize("script", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_times_are_as_they_are_defined(script: Script) -> None:
    """8.4, 1: TTFT, ITL, TPOT and E2EL, exactly. Comments, a chunk with the role alone, the empty one with the reason
    and the one with the usage are no tokens."""
    found = measured(script)
    assert found.detail["ttfts"] == [1.0]
    assert found.detail["itls"] == [[0.5, 0.25]]
    assert found.detail["latencies"] == [1.75]
    assert found.fields["mean_tpot_ms"] == 1000 * 0.75 / 4, "five tokens came, whatever the chunks they came in"
    assert (found.fields["mean_ttft_ms"], found.fields["mean_itl_ms"]) == (1000, 375)
    assert (found.fields["total_input_tokens"], found.fields["total_output_tokens"]) == (7, 5)
    assert (found.fields["cached_tokens"], found.fields["finish_reasons"]) == (4, {"length": 1})
    assert (found.fields["count_source"], found.fields["completed"], found.fields["failed"]) == ("usage", 1, 0)
    assert found.fields["duration"] == 2.25


def test_a_reply_of_one_chunk_has_no_time_a_token() -> None:
    """Nothing says how long its tokens took."""
    found = measured(reply(0.5, tokens=4))
    assert (found.fields["mean_ttft_ms"], found.fields["mean_e2el_ms"]) == (500, 500)
    assert (found.fields["mean_tpot_ms"], found.fields["mean_itl_ms"], found.fields["p99_itl_ms"]) == (None, None, None)


def test_a_reply_without_text_is_completed_and_has_no_times() -> None:
    found = measured([(0.5, HEAD + text("", "stop") + usage(7, 0) + DONE)], reply(0.25, 0.5))
    assert (found.fields["completed"], found.fields["failed"]) == (2, 0)
    assert found.detail["ttfts"] == [None, 0.25]
    assert found.fields["finish_reasons"] == {"stop": 1, "length": 1}


def test_several_choices_of_one_chunk_are_one_chunk() -> None:
    both = event({"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}]})
    found = measured([(0.5, HEAD + both), (0.25, both), (0.0, usage(7, 4) + DONE)])
    assert found.detail["itls"] == [[0.25]]


def test_rates_and_peaks_are_of_all_requests() -> None:
    """Two at once, one behind them; the fullest second is the first, which has five of their six chunks."""
    found = measured(reply(0.25, 0.25), reply(0.5, 0.25), reply(0.25, 0.75), plan=[0.0, 0.0, 0.5])
    fields = found.fields
    assert fields["duration"] == 1.5
    assert fields["request_throughput"] == 2
    assert fields["output_throughput"] == 4
    assert fields["total_token_throughput"] == (6 + 21) / 1.5
    assert fields["max_output_tokens_per_s"] == 5
    assert fields["max_concurrent_requests"] == 2, "the third set out as the first ended"
    assert found.detail["start_times"] == [0, 0, 0.5]


def test_goodput_counts_requests_within_every_bound() -> None:
    options = attrs.evolve(OPTIONS, goodput={"ttft": 500.0, "tpot": 250.0, "e2el": 1000.0})
    late, slow, good = reply(0.75), reply(0.5, 0.5), reply(0.5, 0.25, 0.25)
    assert measured(late, slow, good, good, options=options).fields["request_goodput"] == 2.0
    assert measured(late, good).fields["request_goodput"] is None
    nothing: Script = [(0.0, HEAD + usage(7, 0) + DONE)]
    assert measured(nothing, good, options=options).fields["request_goodput"] == 1.0


@pytest.mark.parametrize(("counted", "source", "tokens"), [(None, "chunks", 2), (len, "tokenizer", 4)])
def test_without_usage_tokens_are_counted_here(counted: Any, source: str, tokens: int) -> None:
    """8.2: by a tokenizer, else by chunks, and which of the two is said."""
    script: Script = [(0.5, HEAD + text("ab")), (0.5, text("cd")), (0.5, text("", "stop") + DONE)]
    found = measured(script, facts=attrs.evolve(FACTS, counted=counted))
    assert (found.fields["count_source"], found.fields["total_output_tokens"]) == (source, tokens)
    assert found.fields["total_input_tokens"] == 5, "what the prompt was made to have"
    assert found.fields["cached_tokens"] is None
    assert any("no usage" in warning for warning in found.fields["warnings"]) == (counted is None)


# --- arrivals (8.4, 2) ------------------------------------------------------------------------------------------------


def gaps(burstiness: float, seed: int = 0) -> list[float]:
    return [after - before for before, after in pairwise(arrivals(20_001, 5.0, burstiness, seed))]


def test_the_plan_is_the_seeds() -> None:
    """8.4, 2."""
    plan = arrivals(200, 8.0, 1.0, 3)
    assert plan == arrivals(200, 8.0, 1.0, 3)
    assert plan != arrivals(200, 8.0, 1.0, 4)
    assert plan[0] == 0
    assert plan == sorted(plan)
    assert arrivals(1, 8.0, 1.0, 3) == [0]
    assert arrivals(3, math.inf, 1.0, 3) == [0, 0, 0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("count", [2, 30, 1000])
def test_the_mean_rate_is_the_one_that_was_asked_for(burstiness: float, count: int) -> None:
    plan = arrivals(count, 5.0, burstiness, 1)
    assert (count - 1) / plan[-1] == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_spread_of_gaps(burstiness: float) -> None:
    """A gamma distribution's deviation over its mean is the root of 1 / shape; 20,000 gaps tell it to some percent."""
    found = gaps(burstiness)
    assert np.std(found) / np.mean(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_slow_server_does_not_delay_the_plan() -> None:
    """8.2: coordinated omission: each request sets out at its moment although none before it has ended."""
    plan = [0.0, 0.25, 0.5, 0.625]
    stub = Stub([reply(10.0)] * 4)
    done = load(stub, plan)
    assert [each.reply.sent for each in done.sent] == plan
    assert stub.most == 4


def test_a_generator_that_is_late_says_so() -> None:
    """The process stands still for half a second while two requests are due."""
    options = attrs.evolve(OPTIONS, request_rate=4.0)
    plan, still = [0.0, 0.25, 0.5], [(0.125, Stall(0.5)), *reply(0.0)]
    late = measured(still, reply(0.5), reply(0.5), options=options, plan=plan).fields
    assert (late["mean_send_delay_ms"], late["max_send_delay_ms"]) == (1000 * (0.375 + 0.125) / 3, 375)
    assert any("late on average" in warning for warning in late["warnings"])
    kept = measured(reply(0.5), reply(0.5), reply(0.5), options=options, plan=plan).fields
    assert (kept["max_send_delay_ms"], kept["warnings"]) == (0, [])


# --- concurrency (8.4, 3) ---------------------------------------------------------------------------------------------


def test_no_more_than_so_many_are_under_way() -> None:
    """8.4, 3: counted at the server. The wait of the others is told, and is in none of their times."""
    stub = Stub([reply(1.0)] * 5)
    done = load(stub, max_concurrency=2)
    assert stub.most == 2
    assert [each.reply.sent for each in done.sent] == [0, 0, 1, 1, 2], "first come, first served"
    fields = result(OPTIONS, FACTS, [Asked("p", 5, 9)] * 5, done).fields
    assert (fields["mean_client_queue_ms"], fields["max_client_queue_ms"]) == (800, 2000)
    assert fields["max_concurrent_requests"] == 2
    assert (fields["mean_ttft_ms"], fields["mean_e2el_ms"]) == (1000, 1000)
    assert fields["duration"] == 3


def test_each_request_is_sent_once_and_as_it_is() -> None:
    stub = Stub([reply(0.25)] * 3)
    load(stub)
    assert stub.asked == posts(3)


# --- connections ------------------------------------------------------------------------------------------------------


def test_a_connection_is_used_again_behind_a_whole_reply() -> None:
    """Two at once need two; each is taken again by whoever comes next, and the numbers are the same."""
    stub = Stub([framed(reply(0.5, 0.25))] * 6)
    done = load(stub, max_concurrency=2)
    assert (stub.connections, stub.most) == (2, 2)
    assert [each.reply.fault for each in done.sent] == [None] * 6
    assert [each.reply.times[0] - each.reply.sent for each in done.sent] == [0.5] * 6
    assert stub.asked == posts(6)


def test_a_refusal_leaves_the_connection() -> None:
    stub = Stub([refusal(503, b"{}"), framed(reply(0.5))])
    done = load(stub, max_concurrency=1)
    assert [each.reply.status for each in done.sent] == [503, 200]
    assert stub.connections == 1


@pytest.mark.parametrize("name", ["unframed", "error", "timeout", "old", "close"])
def test_a_connection_that_cannot_be_used_again_is_left(name: str) -> None:
    chunked_head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
    scripts: dict[str, Script] = {
        "unframed": reply(0.5),
        "error": framed([(0.0, HEAD), (0.5, event({"error": {"message": "gone"}}))]),
        "timeout": framed(reply(1000.0)),
        "old": [(0.0, chunked_head.replace(b"1.1", b"1.0") + b"\r\n" + chunk(DONE) + b"0\r\n\r\n")],
        "close": [(0.0, chunked_head + b"Connection: Close\r\n\r\n" + chunk(DONE) + b"0\r\n\r\n")],
    }
    stub = Stub([scripts[name], framed(reply(0.5, 0.5))])
    done = load(stub, max_concurrency=1)
    assert stub.connections == 2
    assert (done.sent[0].reply.fault is None) == (name not in ("error", "timeout"))
    assert done.sent[1].reply.fault is None
    assert len(done.sent[1].reply.times) == 2


def test_a_connection_that_the_server_closed_is_not_the_requests_fault() -> None:
    """While it was idle, or as the request set out: it is sent on another one. On a new one it is the server's."""
    idle = [*framed(reply(0.5)), (1.0, Cut())]
    stub = Stub([idle, framed(reply(0.5))])
    assert [each.reply.fault for each in load(stub, [0.0, 3.0]).sent] == [None, None]
    assert stub.connections == 2
    cut: Script = [(0.25, Cut())]
    stub = Stub([framed(reply(0.5)), cut, framed(reply(0.5))])
    done = load(stub, [0.0, 1.0])
    assert [each.reply.fault for each in done.sent] == [None, None]
    assert [each.reply.times[0] - each.reply.sent for each in done.sent] == [0.5, 0.75], "the detour counts"
    assert load(Stub([cut])).sent[0].reply.fault == "the connection ended without a reply"
    begun: Script = [(0.25, b"HTTP/1.1 200 OK\r\n"), (0.25, Cut())]
    stub = Stub([framed(reply(0.5)), begun])
    assert load(stub, [0.0, 1.0]).sent[1].reply.fault == "the connection ended without a reply"


def test_whoever_takes_a_connection_the_moment_it_is_free_has_it_alone() -> None:
    """All of a reply comes at the moment at which the next request is due, which may be the first to run. The one whose
    reply ended has no more to do with the connection."""
    (_, head), *_ = framed([(0.0, HEAD)])
    assert isinstance(head, bytes)
    whole: Script = [(0.0, head), (0.5, chunk(text(" w", "length") + usage(7, 1) + DONE) + b"0\r\n\r\n")]
    stub = Stub([whole] * 6)
    done = load(stub, [0.0, 1.0, 1.5, 2.0, 2.5])
    assert stub.asked == posts(5)
    assert stub.connections == 1
    assert [each.reply.fault for each in done.sent] == [None] * 5
    assert [each.reply.times[0] - each.reply.sent for each in done.sent] == [0.5] * 5


def test_the_end_of_a_body_may_come_behind_the_end_of_a_reply() -> None:
    """Whoever comes before that takes a new connection, whoever comes behind it the same."""
    *most, last = framed(reply(0.5))
    late = [*most, (1.0, last[1])]
    stub = Stub([late, framed(reply(0.25)), framed(reply(0.25)), framed(reply(0.25))])
    done = load(stub, [0.0, 1.0, 1.0, 2.0])
    assert [each.reply.ended for each in done.sent] == [0.5, 1.25, 1.25, 2.25]
    assert stub.connections == 3


def test_what_comes_behind_a_reply_is_no_fault_of_it() -> None:
    """The connection is not used again."""
    *most, _ = framed(reply(0.5))
    stub = Stub([[*most, (0.25, b"zz\r\n")], framed(reply(0.25))])
    done = load(stub, [0.0, 1.0])
    assert [each.reply.fault for each in done.sent] == [None, None]
    assert stub.connections == 2
    stub = Stub([[*framed(reply(0.5)), (0.25, b"HTTP/1.1 408 Timeout\r\n\r\n")], framed(reply(0.25))])
    assert [each.reply.fault for each in load(stub, [0.0, 1.0]).sent] == [None, None]
    assert stub.connections == 2


# --- a server that lies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [-1, True, 2.0, "2", [2], None, 10**400], ids=lambda told: str(told)[:8])
def test_a_usage_that_counts_no_tokens_is_not_believed(told: Any) -> None:
    """Its numbers would be in every sum, and one that no float holds would end the run."""
    usage = {"prompt_tokens": told, "completion_tokens": told, "prompt_tokens_details": {"cached_tokens": told}}
    found = measured([(0.5, HEAD + text("a")), (0.5, text("b")), (0.0, event({"choices": [], "usage": usage}) + DONE)])
    assert (found.fields["completed"], found.fields["count_source"]) == (1, "chunks")
    assert (found.fields["total_input_tokens"], found.fields["total_output_tokens"]) == (5, 2)
    assert found.fields["cached_tokens"] is None


@pytest.mark.parametrize(("told", "warned"), [(9, 0), (10, 1)])
def test_more_tokens_than_were_asked_for_are_told(told: int, warned: int) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": told}
    found = measured([(0.5, HEAD + text("a")), (0.5, text("b")), (0.0, event({"choices": [], "usage": usage}) + DONE)])
    assert sum("1 replies have more tokens" in warning for warning in found.fields["warnings"]) == warned


# --- failures (8.4, 4) ------------------------------------------------------------------------------------------------

BEGUN: Script = [(0.25, HEAD + text("a")), (0.25, text("b"))]
FAULTS: dict[str, tuple[Script | None, str]] = {
    "500": (refusal(500, b'{"error": {"message": "it broke"}}'), "status 500: it broke"),
    "503": (refusal(503, b'{"error": "full"}'), "status 503: full"),
    "text": (refusal(502, b"<html>"), "status 502: <html>"),
    "timeout": ([*BEGUN, (1000.0, DONE)], "no end within 100 s"),
    "error event": ([*BEGUN, (0.25, event({"error": {"message": "gone"}}))], "gone"),
    "cut": ([*BEGUN, (0.25, Cut())], "ended without [DONE]"),
    "no reply": ([(0.25, Cut())], "without a reply"),
    "refused": (None, "cannot be reached"),
    "whole": (
        [(0.25, b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}')],
        "ended without [DONE]",
    ),
    "no JSON": ([*BEGUN, (0.25, b"data: {\n\n")], "no JSON"),
    "no object": ([*BEGUN, (0.25, b"data: 7\n\n")], "no object"),
    "no HTTP": ([(0.25, b"SSH-2.0\r\n\r\n")], "begins with 'SSH-2.0'"),
    "no chunk": ([(0.25, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")], "chunk"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_request_is_counted_and_not_timed(name: str) -> None:
    """8.4, 4: it is in no number but `failed`; its neighbour's are its own."""
    script, says = FAULTS[name]
    found = measured(script, reply(0.5, 0.5))
    assert (found.fields["completed"], found.fields["failed"]) == (1, 1)
    assert len(found.failures) == 1
    assert says in found.failures[0]
    assert found.detail["errors"] == [found.failures[0], ""]
    assert (found.detail["ttfts"], found.detail["itls"], found.detail["latencies"]) == (
        [None, 0.5], [[], [0.5]], [None, 1.0],
    )  # fmt: skip
    assert (found.fields["mean_ttft_ms"], found.fields["std_ttft_ms"]) == (500, 0)
    assert (found.fields["total_input_tokens"], found.fields["total_output_tokens"]) == (7, 2)
    assert found.fields["finish_reasons"] == {"length": 1}
    assert any("1 of 2" in warning for warning in found.fields["warnings"])


def test_with_nothing_completed_there_is_nothing_to_tell() -> None:
    found = measured(None, None)
    assert (found.fields["completed"], found.fields["failed"]) == (0, 2)
    assert {
        found.fields[f"{kind}_{name}_ms"] for kind in ("mean", "median", "std", "p99") for name in ("ttft", "itl")
    } == {None}
    assert found.fields["count_source"] is None
    assert list(table(found.fields, OPTIONS.percentile_metrics, OPTIONS.percentiles))


# --- results (8.4, 5) -------------------------------------------------------------------------------------------------

KEYS = (
    "date label endpoint_type base_url model_id num_prompts request_rate burstiness max_concurrency duration completed "
    "failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput "
    "total_token_throughput max_output_tokens_per_s max_concurrent_requests "
    "mean_ttft_ms median_ttft_ms std_ttft_ms p50_ttft_ms p90_ttft_ms p95_ttft_ms p99_ttft_ms "
    "mean_tpot_ms median_tpot_ms std_tpot_ms p50_tpot_ms p90_tpot_ms p95_tpot_ms p99_tpot_ms "
    "mean_itl_ms median_itl_ms std_itl_ms p50_itl_ms p90_itl_ms p95_itl_ms p99_itl_ms "
    "mean_e2el_ms median_e2el_ms std_e2el_ms p50_e2el_ms p90_e2el_ms p95_e2el_ms p99_e2el_ms "
    "server_version length_source count_source cached_tokens finish_reasons "
    "mean_client_queue_ms max_client_queue_ms mean_send_delay_ms max_send_delay_ms "
    "client_cost_ms client_cost_share warnings"
)
DETAIL = "input_lens output_lens ttfts itls latencies start_times errors"


def test_the_keys_of_a_result_are_these() -> None:
    """8.4, 5."""
    found = measured(reply(0.5, 0.5))
    assert " ".join(found.fields) == KEYS
    assert " ".join(found.detail) == DETAIL


def test_percentiles_are_those_that_were_asked_for() -> None:
    options = attrs.evolve(OPTIONS, percentile_metrics=("itl",), percentiles=(99.9, 25.0))
    fields = measured(reply(0.5, 0.25, 0.5, 0.75, 1.0), options=options).fields
    named = [name for name in fields if name.startswith("p") and name.endswith("_ms")]
    assert named == ["p99.9_itl_ms", "p25_itl_ms"]
    assert fields["p25_itl_ms"] == np.percentile([250, 500, 750, 1000], 25)
    lines = "\n".join(table(fields, options.percentile_metrics, options.percentiles))
    assert "p99.9" in lines
    assert "437.50" in lines


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_statistics_are_numpys(count: int) -> None:
    """8.4, 5. The last places of a float apart: the sums have another order."""
    chance = random.Random(count)
    values = [chance.lognormvariate(0, 2) for _ in range(count)]
    assert mean(values) == pytest.approx(np.mean(values), rel=1e-12)
    assert deviation(values) == pytest.approx(np.std(values), rel=1e-12, abs=1e-12)
    for percent in (0, 1, 50, 90, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_what_a_chunk_costs_the_client_is_measured_and_compared() -> None:
    """8.2: for all replies under way, against the shortest mean gap of one, 0.25 s."""
    assert own_cost() > 0
    scripts = [reply(0.5, 0.25, 0.25), reply(0.5, 0.5, 0.5)]
    cheap, dear = (measured(*scripts, facts=attrs.evolve(FACTS, own_cost=cost)).fields for cost in (0.006, 0.007))
    assert (cheap["client_cost_share"], dear["client_cost_share"]) == (2 * 0.006 / 0.25, 2 * 0.007 / 0.25)
    assert (cheap["client_cost_ms"], cheap["warnings"]) == (6, [])
    assert any("cost this client 6%" in warning for warning in dear["warnings"])


# --- the wire ---------------------------------------------------------------------------------------------------------

HEADS = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nX-A: b: c\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]
STREAM = b': c\n\ndata: {"a": 1}\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\nid: 3\n\ndata: [DONE]\n\n'


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[place : place + size] for place in range(0, len(body), size)]
    return b"".join(f"{len(part):X};x=y\r\n".encode() + part + b"\r\n" for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("cut", [1, 2, 7, 10_000])
def test_a_stream_is_the_same_however_it_is_cut(size: int, cut: int) -> None:
    sent = HEADS + chunked(STREAM, size)
    wire, events = ReplyReader(), EventReader()
    found = [one for place in range(0, len(sent), cut) for one in events.feed(wire.feed(sent[place : place + cut]))]
    assert found == EVENTS
    assert (wire.status, wire.complete, wire.headers["x-a"]) == (200, True, "b: c")


def test_a_body_of_a_length_is_whole_with_its_last_byte() -> None:
    wire = ReplyReader()
    assert wire.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab") == b"ab"
    assert not wire.complete
    assert wire.feed(b"c") == b"c"
    assert wire.complete


@pytest.mark.parametrize(
    "sent",
    [b"x" * 70_000, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n", b"HTTP/1.1 abc\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"],
)  # fmt: skip
def test_what_is_no_reply_is_not_kept(sent: bytes) -> None:
    with pytest.raises(WireFault):
        ReplyReader().feed(sent)


def test_a_request_is_http() -> None:
    """The body's length is in bytes; the key and other headers go along."""
    address = attrs.evolve(ADDRESS, host="::1", port=81, path="/llm", key="k")
    head, _, body = request_bytes(address, "/v1/x", (("X-A", "b"),), {"p": "é"}).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert first == "POST /llm/v1/x HTTP/1.1"
    assert {"Host: [::1]:81", "Authorization: Bearer k", "X-A: b", f"Content-Length: {len(body)}"} <= set(lines)
