"""Metrics and the lines on requests: everything is counted once, and nothing is told of (clients 3.8, 3.9)."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from asked_app import asked
from other_threads import until
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed
from script_server import running
from starlette.testclient import TestClient
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.prefix import Reject
from mlxcel.core.prompt_cache import Eviction
from mlxcel.core.result import OPENAI_REASON
from mlxcel.server.access_log import MOST, escaped, repeated
from mlxcel.server.histogram import Histogram
from mlxcel.server.record import RequestRecord
from mlxcel.server.settings import ServerSettings

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

NAMES = [
    "requests_total", "request_started_total", "request_finished_total", "prompt_tokens_total",
    "prompt_tokens_cached_total", "generation_tokens_total", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "num_requests_running", "num_requests_waiting", "rows_total", "rows_busy", "kv_pages_total", "kv_pages_used",
    "kv_pages_cached", "kv_pages_pinned", "kv_cache_usage_ratio", "kv_bytes_total", "kv_bytes_used",
    "kv_state_bytes", "kv_page_allocs_total", "kv_page_frees_total", "kv_cow_copies_total",
    "kv_reserve_failures_total", "kv_storage_info", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "prefix_cache_evictions_total", "prefix_cache_reject_total", "prefix_cache_bytes", "prefix_cache_entries",
    "preemptions_total", "steps_total", "step_faults_total", "step_rows", "step_tokens", "tick_host_seconds",
    "attention_launches_total", "observer_errors_total", "compiles_total", "compiles_after_ready_total",
    "stream_disconnects_total", "slow_clients_total", "unknown_fields_total", "device_memory_bytes",
    "model_load_seconds", "ready", "build_info",
]  # fmt: skip
"""docs/spec/clients.md 3.8, without the prefix."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def client(model: Path, lines: list[str]) -> Iterator[TestClient]:
    with asked(model, write=lines.append, max_num_seqs=2) as found:
        yield found


def last_of(lines: list[str]) -> str:
    """The line of a request that was answered; it comes behind the reply."""
    return until(lambda: list(lines))[-1]


def samples(client: TestClient) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parsed(client.get("/metrics").text)
        for sample in family.samples
    }


def counted(found: Samples, name: str, **labels: str) -> float:
    """The sum of all series of a name with these labels."""
    wanted = set(labels.items())
    return sum(value for (key, has), value in found.items() if key == f"mlxcel_{name}" and wanted <= set(has))


def complete(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/completions", json={"prompt": "abc", **body})


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_every_metric_is_there_from_the_start(client: TestClient) -> None:
    """3.13 test 15: every cause and every reason too."""
    page = client.get("/metrics").text
    families = {family.name: family for family in parsed(page)}
    for name in NAMES:
        assert f"mlxcel_{name}" in families or f"mlxcel_{name.removesuffix('_total')}" in families, name
    assert all(family.documentation for family in families.values())
    found = samples(client)
    assert {dict(has)["cause"] for name, has in found if name == "mlxcel_request_finished_total"} == set(OPENAI_REASON)
    reasons = {dict(has)["reason"] for name, has in found if name == "mlxcel_prefix_cache_reject_total"}
    assert reasons == {reason.value for reason in Reject}
    evicted = {dict(has)["reason"] for name, has in found if name == "mlxcel_prefix_cache_evictions_total"}
    assert evicted == set(get_args(Eviction))
    assert counted(found, "kv_storage_info", requested="auto", effective="paged") == 1
    assert counted(found, "build_info", backend="script", model="model") == 1
    assert counted(found, "request_started_total") == 0, "rows that warm up are nobody's"


def test_a_scraper_gets_the_form_that_it_asks_for(client: TestClient) -> None:
    reply = client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert reply.headers["content-type"].startswith("application/openmetrics-text")
    assert "mlxcel_requests" in {family.name for family in openmetrics(reply.text)}
    assert client.get("/metrics").headers["content-type"].startswith("text/plain")


def test_h_q3_counters_only_grow_over_mixed_requests(client: TestClient) -> None:
    """3.13 test 15: 200 requests, good and bad, streamed and not."""
    draw = random.Random(15)
    before = samples(client)
    sent = Counter[str]()
    for number in range(200):
        kind = draw.choice(["good", "stream", "bad", "two", "long", "unknown"])
        sent[kind] += 1
        body: dict[str, Any] = {
            "good": {"max_tokens": draw.randrange(4)},
            "stream": {"stream": True, "max_tokens": 2},
            "bad": {"temperature": -1},
            "two": {"n": 2, "seed": number},
            "long": {"prompt": "x" * 10_000},
            "unknown": {"foo": 1, "max_tokens": 1},
        }[kind]
        status = complete(client, **body).status_code
        assert status == (400 if kind in ("bad", "long") else 200)
        if number % 20 == 0:
            now = samples(client)
            fell = [key for key, value in before.items() if key[0].endswith("_total") and now.get(key, 0) < value]
            assert [key for key in fell if key[0] != "mlxcel_rows_total"] == []
            before = now
    found = samples(client)
    good = sum(sent.values()) - sent["bad"] - sent["long"]
    assert counted(found, "requests_total", route="/v1/completions", status="200") == good
    assert counted(found, "requests_total", route="/v1/completions", status="400") == sent["bad"] + sent["long"]
    assert counted(found, "request_started_total") == good + sent["two"] == counted(found, "request_finished_total")
    assert counted(found, "unknown_fields_total") == sent["unknown"]
    assert counted(found, "compiles_after_ready_total") == 0
    for gauge in ("num_requests_running", "num_requests_waiting", "rows_busy", "kv_pages_used"):
        assert counted(found, gauge) == 0, gauge
    assert counted(found, "kv_page_allocs_total") - counted(found, "kv_page_frees_total") == counted(
        found, "kv_pages_cached"
    )
    assert counted(found, "e2e_request_latency_seconds_count") == counted(found, "request_finished_total")
    assert counted(found, "step_rows_count") == counted(found, "steps_total")


def test_no_label_carries_a_text_of_a_request(client: TestClient) -> None:
    client.get("/v1/models/secret")
    client.get("/secret", headers={"X-Request-Id": "secret"})
    complete(client, prompt="secret", secret=1, stop=["secret"])
    assert "secret" not in client.get("/metrics").text


def test_routes_are_counted_by_what_they_are_called(client: TestClient) -> None:
    client.get("/v1/models/a")
    client.get("/v1/models/b")
    client.get("/nowhere")
    client.put("/health")
    client.post("/chat/completions", json={})
    found = samples(client)
    assert counted(found, "requests_total", route="/v1/models/{name:path}", status="404") == 2
    assert counted(found, "requests_total", route="unmatched", status="404") == 1
    assert counted(found, "requests_total", route="/health", status="405") == 1
    assert counted(found, "requests_total", route="/v1/chat/completions", status="400") == 1


def test_a_histogram_counts_what_a_list_counts() -> None:
    values = [random.Random(3).expovariate(1) for _ in range(200)] + [0.5, 1.0, 2.0]
    histogram = Histogram((0.5, 1.0, 2.0))
    for value in values:
        histogram.observe(value)
    expected = [(str(bound), float(sum(value <= bound for value in values))) for bound in (0.5, 1.0, 2.0)]
    assert histogram.buckets() == [*expected, ("+Inf", float(len(values)))]
    assert histogram.sum == pytest.approx(sum(values))


# --- the lines --------------------------------------------------------------------------------------------------------

FIELDS = [
    "id", "route", "status", "stream", "prompt", "cached", "cache_miss_reason", "generated", "queue_ms", "ttft_ms",
    "tok_s", "cause", "total_ms", "client", "key",
]  # fmt: skip


def test_a_line_says_what_the_specification_lists(client: TestClient, lines: list[str]) -> None:
    """3.9."""
    client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}, headers={"X-Request-Id": "mine"})
    word, *pairs = last_of(lines).split(" ")
    told = dict(pair.split("=", 1) for pair in pairs)
    assert (word, list(told)) == ("request", FIELDS)
    named = {name: told[name] for name in ("id", "route", "status", "stream", "prompt", "cached", "generated", "cause")}
    assert named == {
        "id": "mine", "route": "/v1/completions", "status": "200", "stream": "false", "prompt": "3", "cached": "0",
        "generated": "2", "cause": "max_tokens",
    }  # fmt: skip
    assert told["cache_miss_reason"] == "empty_set"
    assert told["key"] == "-"
    assert all(float(told[name]) >= 0 for name in ("queue_ms", "ttft_ms", "tok_s", "total_ms"))


def test_lines_can_be_json_of_the_same_names(model: Path, lines: list[str]) -> None:
    settings = ServerSettings(log_format="json", log_prompts=True, api_keys=("k",))
    with asked(model, settings, write=lines.append) as client:
        client.post("/v1/completions", json={"prompt": "a\u2028\nb", "max_tokens": 3}, headers={"x-api-key": "k"})
    told = json.loads(last_of(lines))
    assert list(told) == ["event", *FIELDS, "prompt_text", "reply_text"]
    assert told["prompt_text"] == "a\\u2028\\x0ab"
    assert re.fullmatch("[0-9a-f]{6}", told["key"])


def test_lines_can_be_left_out(model: Path, lines: list[str]) -> None:
    with asked(model, ServerSettings(log_requests=False), write=lines.append) as client:
        assert complete(client, max_tokens=1).status_code == 200
    assert lines == []


def test_requests_that_repeat_have_their_lines_at_debug_level(
    client: TestClient, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Checks, scrapes and counts of tokens do not hide the others; what was refused and what changes something is seen,
    and the metrics count each."""
    quiet = ["/health", "/metrics", "/slots", "/tokenize", "/apply-template"]
    with caplog.at_level("DEBUG", "mlxcel.access"):
        for route in [*quiet[:3], "/v1/models"]:
            assert client.get(route).status_code == 200
        assert client.post("/tokenize", json={"content": "a"}).status_code == 200
        assert client.post("/apply-template", json={"messages": [{"role": "user", "content": "a"}]}).status_code == 200
        assert client.post("/tokenize", json={"content": 1}).status_code == 400
        assert client.get("/nowhere").status_code == 404
        assert client.post("/v1/cache/reset").status_code == 200
        assert complete(client, max_tokens=0).status_code == 200
        until(lambda: len(lines) == 5)
        assert counted(samples(client), "requests_total", route="/health") == 1
    routes = [re.findall(r"route=(\S+) status=(\d+)", line)[0] for line in lines]
    assert routes == [
        ("/v1/models", "200"),
        ("/tokenize", "400"),
        ("unmatched", "404"),
        ("/v1/cache/reset", "200"),
        ("/v1/completions", "200"),
    ]
    debug = [r.getMessage() for r in caplog.records if (r.name, r.levelname) == ("mlxcel.access", "DEBUG")]
    assert [re.findall(r"route=(\S+) ", line)[0] for line in debug][:5] == quiet


@pytest.mark.parametrize(
    ("method", "route", "status", "quiet"),
    [
        ("GET", "/health", 503, True),
        ("GET", "/health", 401, False),
        ("GET", "/v1/models", 200, False),
        ("GET", "/v1/models", 503, False),
        ("OPTIONS", "/v1/chat/completions", 200, True),
        ("POST", "/v1/messages/count_tokens", 200, True),
        ("GET", "/props", 200, False),
        ("GET", "/slots", 501, False),
    ],
)
def test_what_goes_wrong_and_what_comes_once_is_not_hidden(method: str, route: str, status: int, quiet: bool) -> None:
    """A server that is loading answers who asks for its health."""
    assert repeated(RequestRecord("a", method, "-", 0.0, route=route, status=status)) == quiet


def test_several_prompts_are_one_line(client: TestClient, lines: list[str]) -> None:
    complete(client, prompt=["aa", "bbbb"], n=2, max_tokens=1)
    assert " prompt=6 " in last_of(lines)
    assert " generated=4 " in last_of(lines)


def test_prompts_are_not_in_lines(client: TestClient, lines: list[str]) -> None:
    complete(client, prompt="secret words", max_tokens=3, stop=["unlikely"])
    assert last_of(lines)
    assert not any("secret" in line or "unlikely" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 日本", "plain äöü 日本"),
        ("a\nb\r\x1b[31m\x00\x7f", "a\\x0ab\\x0d\\x1b[31m\\x00\\x7f"),
        ("\u2028\u2029\x85\u202e\ufeff", "\\u2028\\u2029\\x85\\u202e\\ufeff"),
        ("\ud800\udfff", "\\ud800\\udfff"),
        ("\U000e0001", "\\U000e0001"),
        ("x" * 1000, "x" * MOST),
    ],
)
def test_what_came_from_outside_is_written_on_one_line(text: str, shown: str) -> None:
    """3.9."""
    assert escaped(text) == shown
    assert escaped(text).encode()


def test_a_log_that_fails_fails_no_request(model: Path) -> None:
    def broken(line: str) -> None:
        raise OSError("disk full")

    with asked(model, write=broken) as client:
        assert complete(client, max_tokens=1).status_code == 200
        assert client.get("/health").status_code == 200


def test_odd_bytes_everywhere_do_no_harm(client: TestClient, lines: list[str]) -> None:
    """3.13 test 16."""
    odd: list[tuple[bytes, bytes]] = [
        (b"X-Request-Id", b"\xff\xfe"),
        (b"Authorization", b"Bearer \xff"),
        (b"X-Forwarded-For", b"\x80"),
    ]
    for content in (b"\xff\xfe\x00", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"\\u2028": 1, "prompt": "a"}'):
        reply = client.post("/v1/completions", content=content, headers=odd)  # type: ignore[arg-type]
        assert reply.status_code in (200, 400), reply.text
        from_nowhere = [*odd, (b"Origin", b"\x80")]
        assert client.post("/v1/completions", content=content, headers=from_nowhere).status_code == 403  # type: ignore[arg-type]
    assert client.get("/%ff%0a%e2%80%a8").status_code == 404
    assert all(line.isprintable() and line.count("request id=") == 1 for line in lines)


def test_h_k14_every_request_ends_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """3.13 test 16: finished, failed, refused and left, over real connections: as many ends as beginnings, in the lines
    and in the metrics."""

    def said() -> list[str]:
        return [record.message for record in caplog.records if record.name == "mlxcel.access"]

    draw = random.Random(16)
    kinds = [draw.choice(["finished", "failed", "refused", "left", "streamed"]) for _ in range(120)]
    with caplog.at_level("INFO", "mlxcel.access"), running(model, max_num_seqs=2) as server:
        for number, kind in enumerate(kinds):
            body: dict[str, Any] = {"prompt": f"<<{kind} {number}>>", "max_tokens": 20}
            if kind == "left":
                server.raw("/v1/completions", {**body, "stream": bool(number % 2)}).close()
                continue
            body |= {"failed": {"prompt": "<<ab!>>"}, "refused": {"n": 0}, "streamed": {"stream": True}}.get(kind, {})
            if kind == "streamed":
                server.stream("/v1/completions", body)
            else:
                status, _, _ = server.post("/v1/completions", body)
                assert status == {"finished": 200, "failed": 500, "refused": 400}[kind]
        until(lambda: len(said()) >= len(kinds))  # who left may not have been heard yet
        assert server.idle()
        counters = server.serving.stats()["scheduler"]
        ends = counters["request_finished_total"]
        assert sum(ends.values()) == counters["request_started_total"]
        assert (ends["eos"] + ends.get("max_tokens", 0) >= kinds.count("finished"), ends["error"]) == (
            True,
            kinds.count("failed"),
        )
        lines = said()
    assert len(lines) == len(kinds)
    assert len({line.split(" ")[1] for line in lines}) == len(kinds)
    routes = Counter(re.findall(r"status=(\d+)", "\n".join(lines)))
    assert (routes["500"], routes["400"]) == (kinds.count("failed"), kinds.count("refused"))
    assert sum("cause=-" in line for line in lines if "status=200" in line) == 0
