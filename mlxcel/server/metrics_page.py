"""The numbers of a server in Prometheus' words (docs/spec/clients.md 3.8). All are there from the start, not only once
something went wrong; none carries a text of a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, get_args

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from mlxcel.core.prefix import Reject
from mlxcel.core.prompt_cache import Eviction
from mlxcel.core.result import OPENAI_REASON
from mlxcel.server.histogram import Histogram
from mlxcel.server.metrics import Metrics
from mlxcel.server.snapshot import Snapshot
from mlxcel.version import commit, version

if TYPE_CHECKING:
    from mlxcel.server.served import ServedModel
    from mlxcel.server.state import ServerState

PREFIX: Final = "mlxcel_"
STEPS: Final = ("prefill", "decode", "mixed")

Number = int | float


def families(state: ServerState, snapshot: Snapshot | None) -> Iterator[Metric]:
    """What a scrape gets. `snapshot` is None while there is no model."""
    yield from _http(state, state.metrics)
    served = state.served
    if served is not None and snapshot is not None:
        yield from _requests(snapshot, state.metrics)
        yield from _kv(served, snapshot)
        yield from _cache(snapshot)
        yield from _steps(snapshot, state.metrics)
        yield from _model(served, snapshot)


class Page:
    """What an encoder of prometheus_client reads: families, made already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _http(state: ServerState, metrics: Metrics) -> Iterator[Metric]:
    requests = CounterMetricFamily(f"{PREFIX}requests", "HTTP requests.", labels=("route", "status"))
    for (route, status), count in sorted(metrics.requests.items()):
        requests.add_metric((route, str(status)), count)
    yield requests
    yield _count("stream_disconnects", "Streams whose client left.", metrics.disconnects)
    yield _count("unknown_fields", "Fields of requests that were ignored.", state.unknown.count)
    yield _gauge("ready", "Whether a request would be answered.", int(state.refusal() is None))
    model = None if state.served is None else state.served.serving.model
    labels = {
        "version": version(),
        "commit": commit(),
        "backend": "" if model is None else model.backend,
        "device": "" if model is None else model.caps.device,
        "model": "" if model is None else model.facts.name,
    }
    yield _info("build_info", "What runs.", labels)


def _requests(snapshot: Snapshot, metrics: Metrics) -> Iterator[Metric]:
    now = snapshot.counters
    yield _count("request_started", "Rows that were asked for.", now.request_started_total)
    causes = {**dict.fromkeys(OPENAI_REASON, 0), **now.request_finished_total}
    yield _counts("request_finished", "Rows that ended.", "cause", causes)
    yield _count("prompt_tokens", "Tokens of prompts that began.", now.prompt_tokens_total)
    yield _count("prompt_tokens_cached", "Of these, from the prompt cache.", now.prompt_tokens_cached_total)
    yield _count("generation_tokens", "Tokens of replies.", now.generation_tokens_total)
    for name, words, histogram in (
        ("time_to_first_token_seconds", "From a request until its first token.", metrics.ttft),
        ("inter_token_latency_seconds", "Between two tokens of a row.", metrics.between),
        ("request_time_per_output_token_seconds", "Mean time between tokens, row by row.", metrics.per_token),
        ("e2e_request_latency_seconds", "From a request until the end of a row.", metrics.whole),
        ("request_queue_time_seconds", "Before a row began.", metrics.queue),
        ("request_prefill_time_seconds", "From its beginning until the first token.", metrics.prefill),
        ("request_decode_time_seconds", "From the first token until the last.", metrics.decode),
    ):
        yield _histogram(name, words, histogram)
    yield _gauge("num_requests_running", "Requests of which every choice began.", now.num_requests_running)
    yield _gauge("num_requests_waiting", "Requests in the queue.", now.num_requests_waiting)
    yield _gauge("rows_total", "Rows that can be open at once.", now.rows_total)
    yield _gauge("rows_busy", "Rows that are open.", now.rows_busy)
    yield _counts(
        "preemptions",
        "Rows that lost their KV for a while.",
        "kind",
        {"parked": 0, "running": 0, **now.preemptions_total},
    )
    yield _count("slow_clients", "Requests that were ended since their client did not read.", now.slow_clients_total)


def _kv(served: ServedModel, snapshot: Snapshot) -> Iterator[Metric]:
    kv, model = snapshot.kv, served.serving.model
    page = kv.page_size * model.facts.position_bytes
    state = snapshot.counters.rows_total * model.facts.row_bytes
    used = kv.owned + kv.cached
    yield _gauge("kv_pages_total", "Pages of the KV.", kv.total)
    yield _gauge("kv_pages_used", "Pages in the tables of rows.", kv.owned)
    yield _gauge("kv_pages_cached", "Pages that the prompt cache alone holds.", kv.cached)
    yield _gauge("kv_pages_pinned", "Pages with more than one holder.", kv.pinned)
    yield _gauge("kv_cache_usage_ratio", "Pages in use over all.", used / kv.total if kv.total else 0.0)
    yield _gauge("kv_bytes_total", "Bytes of all pages and of what rows own beside them.", kv.total * page + state)
    yield _gauge("kv_bytes_used", "Bytes of pages in use.", used * page)
    yield _gauge("kv_state_bytes", "Bytes that rows own beside pages.", state)
    yield _count("kv_page_allocs", "Pages that were taken.", kv.taken)
    yield _count("kv_page_frees", "Pages that came free.", kv.returned)
    yield _count("kv_cow_copies", "Pages that were copied before a row wrote to them.", kv.copied)
    failures = {"admission": 0, "piece": 0, "decode": 0, **snapshot.counters.kv_reserve_failures_total}
    yield _counts("kv_reserve_failures", "Reservations that found no room.", "phase", failures)
    requested = served.kv_requested
    rows = "one row" if snapshot.counters.rows_total == 1 else "many rows"
    yield _info(
        "kv_storage_info",
        "Where the KV lives.",
        {"requested": requested, "effective": model.kv_storage, "reason": rows if requested == "auto" else "asked for"},
    )


def _cache(snapshot: Snapshot) -> Iterator[Metric]:
    cache, now = snapshot.cache, snapshot.counters
    asked = 0 if cache is None else now.prompt_tokens_total
    yield _count("prefix_cache_queries", "Tokens of prompts that were looked up.", asked)
    yield _count("prefix_cache_hits", "Tokens that were found.", now.prompt_tokens_cached_total)
    evictions: dict[str, Number] = dict.fromkeys(get_args(Eviction), 0)
    rejects: dict[str, Number] = dict.fromkeys((reason.value for reason in Reject), 0)
    if cache is not None:
        evictions |= {str(reason): count for reason, count in cache.evictions.items()}
        rejects |= cache.rejects
    yield _counts("prefix_cache_evictions", "Kept prompts that were let go of.", "reason", evictions)
    yield _counts("prefix_cache_reject", "Prompts that were not reused, or not kept.", "reason", rejects)
    yield _gauge("prefix_cache_bytes", "Bytes that the prompt cache alone holds.", 0 if cache is None else cache.bytes)
    yield _gauge("prefix_cache_entries", "Kept prompts.", 0 if cache is None else cache.entries)


def _steps(snapshot: Snapshot, metrics: Metrics) -> Iterator[Metric]:
    now = snapshot.counters
    yield _counts("steps", "Steps.", "kind", {**dict.fromkeys(STEPS, 0), **now.steps_total})
    yield _count("step_faults", "Steps that failed.", now.step_faults_total)
    yield _histogram("step_rows", "Rows of a step.", metrics.step_rows)
    yield _histogram("step_tokens", "Tokens of a step.", metrics.step_tokens)
    host = SummaryMetricFamily(
        f"{PREFIX}tick_host_seconds",
        "The scheduler's own work for a tick.",
        count_value=now.ticks_total,
        sum_value=now.tick_host_seconds,
    )
    yield host
    launches = CounterMetricFamily(
        f"{PREFIX}attention_launches", "Calls of attention, a layer each.", labels=("phase", "route")
    )
    for (phase, route), count in sorted(metrics.launches.items()):
        launches.add_metric((phase, route), count)
    yield launches
    yield _counts("observer_errors", "Faults of observers.", "observer", snapshot.observer_errors)
    compiled = snapshot.compilations
    phases = {"warm_up": compiled.warm_up, "service": compiled.service}
    yield _counts("compiles", "Programs that were compiled.", "phase", phases)
    yield _count("compiles_after_ready", "Programs that were compiled while requests waited.", compiled.service)


def _model(served: ServedModel, snapshot: Snapshot) -> Iterator[Metric]:
    model, kv = served.serving.model, snapshot.kv
    state = snapshot.counters.rows_total * model.facts.row_bytes
    memory = {
        "weights": model.facts.weight_bytes,
        "kv": kv.total * kv.page_size * model.facts.position_bytes + state,
    }
    if snapshot.memory is not None:
        memory |= {"total": snapshot.memory.total, "free": snapshot.memory.free}
    yield _gauges("device_memory_bytes", "Bytes on the device.", "kind", memory)
    yield _gauge("model_load_seconds", "Time that loading took.", model.times.load)


# --- the kinds --------------------------------------------------------------------------------------------------------


def _count(name: str, words: str, value: Number) -> Metric:
    return CounterMetricFamily(PREFIX + name, words, value=value)


def _counts(name: str, words: str, label: str, values: Mapping[str, Number]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, words, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _gauge(name: str, words: str, value: Number) -> Metric:
    return GaugeMetricFamily(PREFIX + name, words, value=value)


def _gauges(name: str, words: str, label: str, values: Mapping[str, Number]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, words, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _info(name: str, words: str, labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, words, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), 1)
    return family


def _histogram(name: str, words: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(PREFIX + name, words, buckets=histogram.buckets(), sum_value=histogram.sum)
