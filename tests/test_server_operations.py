"""Routes for whoever runs a server: models, properties, rows, cache, version, page (docs/spec/clients.md 3.2, 3.6)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked_app import asked
from scheduler_rows import bench
from starlette.testclient import TestClient
from tiny_checkpoint import write_tiny_llama

from mlxcel.core.prefix import Reject
from mlxcel.core.resolve_sampling import resolve_sampling
from mlxcel.errors import EngineUnhealthy
from mlxcel.server.page_routes import KINDS, POLICY, files
from mlxcel.server.settings import ServerSettings
from mlxcel.server.slots import TEXTS, busy, idle
from mlxcel.server.snapshot import Snapshot, Snapshots
from mlxcel.server.unknown_fields import UnknownFields
from mlxcel.version import commit, version


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[TestClient]:
    with asked(model, served_model_name=("org/sub/name", "other"), max_num_seqs=2, max_n=2) as found:
        yield found


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models", "/models"])
def test_models_are_listed_under_every_name(client: TestClient, path: str) -> None:
    """3.6."""
    told = client.get(path).json()
    assert told["object"] == "list"
    assert [entry["id"] for entry in told["data"]] == ["org/sub/name", "other"]
    first = told["data"][0]
    assert set(first) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "meta"}
    assert (first["object"], first["owned_by"], first["root"]) == ("model", "mlxcel", "org/sub/name")
    assert first["max_model_len"] == first["meta"]["n_ctx"]
    assert set(first["meta"]) == {"n_ctx", "n_ctx_train", "n_vocab", "n_params", "size"}
    assert all(type(value) is int and value > 0 for value in first["meta"].values())
    assert client.get(path).json() == told, "`created` does not change"


@pytest.mark.parametrize("spelled", ["org/sub/name", "org%2Fsub%2Fname", "other"])
def test_h_o17_one_model_by_its_name_slashes_and_all(client: TestClient, spelled: str) -> None:
    told = client.get(f"/v1/models/{spelled}")
    assert (told.status_code, told.json()["id"]) == (200, spelled.replace("%2F", "/"))


@pytest.mark.parametrize("spelled", ["name", "org", "sub/name", "", "org/sub/name/"])
def test_h_o17_another_name_is_told_the_served_ones(client: TestClient, spelled: str) -> None:
    told = client.get(f"/v1/models/{spelled}")
    assert (told.status_code, told.json()["error"]["code"]) == (404, "model_not_found")
    assert "org/sub/name, other" in told.json()["error"]["message"]


# --- properties -------------------------------------------------------------------------------------------------------


def test_props_says_what_is_in_force(client: TestClient) -> None:
    """3.2."""
    told = client.get("/props").json()
    assert set(told) == {
        "default_generation_settings", "total_slots", "model_alias", "model_path", "modalities", "chat_template",
        "bos_token", "eos_token", "build_info", "is_sleeping", "backend", "device", "level", "kv_storage",
        "prefill_chunk", "samplers", "eos_token_ids", "origin", "endpoints",
    }  # fmt: skip
    assert (told["total_slots"], told["backend"], told["model_path"]) == (2, "script", "org/sub/name")
    assert told["modalities"] == {"vision": False, "audio": False}
    assert told["is_sleeping"] is False
    params = told["default_generation_settings"]["params"]
    assert set(told["origin"]) <= set(params)
    assert {"temperature", "top_k", "top_p", "min_p", "max_tokens"} <= set(told["origin"])


def test_h_c8_props_names_the_origin_of_each_value(tmp_path: Path) -> None:
    """0.1, 3.13 test 20: flags go before generation_config.json, which goes before the server's own."""
    beside = {"temperature": 0.3, "top_k": 7, "do_sample": True, "repetition_penalty": 1.5}
    folder = write_tiny_llama(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps(beside))
    with asked(folder, ServerSettings(sampling={"top_k": 9})) as client:
        told = client.get("/props").json()
    params = told["default_generation_settings"]["params"]
    own = resolve_sampling("srv", fresh_seed=lambda: -1).params
    assert {name: (params[name], told["origin"][name]) for name in ("temperature", "top_k", "top_p")} == {
        "temperature": (0.3, "generation_config"),
        "top_k": (9, "flag"),
        "top_p": (own.top_p, "default"),
    }
    assert params["repetition_penalty"] == 1.0, "penalties are never inherited"
    for kind in ("eos", "none"):
        with asked(folder, generation_config=kind) as client:
            told = client.get("/props").json()
        assert told["default_generation_settings"]["params"]["temperature"] == own.temperature
        assert set(told["origin"].values()) == {"default"}


def test_props_cannot_be_changed(client: TestClient) -> None:
    reply = client.post("/props", json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (501, "not_supported_error")


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_without_work_are_idle(client: TestClient) -> None:
    """3.2."""
    told = client.get("/slots").json()
    assert [(row["id"], row["state"], row["is_processing"], row["id_task"]) for row in told] == [
        (0, "idle", False, -1),
        (1, "idle", False, -1),
    ]
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200


def test_a_row_is_told_by_its_numbers_and_never_by_its_text() -> None:
    """3.2: reading its prompt, answering, and thrown out by one that came earlier."""
    it = bench(store="paged", slots=2, chunk=16)
    it.ask("r", b"secret words " * 3, n=2, stop=("hidden",), max_tokens=8)
    seen: list[tuple[Any, ...]] = []
    told = ""
    while it.scheduler.tick():
        rows = [busy(row, 256, 256) for row in it.scheduler.rows()]
        told += json.dumps(rows)
        seen += [(row["id"], row["state"], row["prompt_done"], row["next_token"]["n_decoded"]) for row in rows]
        for row in rows:
            assert row["request_id"] == "r"
            assert set(row) == set(idle(0, 256))
            assert row["id_task"] == 0
            assert set(TEXTS) & set(row["params"]) == set()
            assert row["next_token"]["n_remain"] == 8 - row["next_token"]["n_decoded"]
    assert {state for _, state, _, _ in seen} == {"prefill", "decode"}
    assert {slot for slot, *_ in seen} == {0, 1}
    assert max(done for _, _, done, _ in seen) == 39
    assert "secret" not in told
    assert "hidden" not in told
    assert it.scheduler.rows() == []


def test_a_row_without_a_place_is_preempted() -> None:
    it = bench(store="paged", slots=2, pages=4, chunk=16, busy=16)
    replies = [it.ask(name, b"x" * 20, max_tokens=30) for name in ("a", "b")]
    states = set()
    while it.scheduler.tick():
        states |= {(row.phase, row.slot is None) for row in it.scheduler.rows()}
    assert ("preempted", True) in states
    assert all(slot is (phase == "preempted") for phase, slot in states)
    assert [reply.over for reply in replies] == [True, True]


def test_routes_that_are_off_name_their_flag(model: Path) -> None:
    """3.1."""
    with asked(model, ServerSettings(ui=False, slots=False, metrics=False)) as client:
        for path, flag in (("/slots", "--no-slots"), ("/metrics", "--no-metrics")):
            reply = client.get(path)
            assert (reply.status_code, flag in reply.json()["error"]["message"]) == (501, True)
        for path in ("/", "/assets/page.css"):
            assert client.get(path).status_code == 404


# --- the prompt cache -------------------------------------------------------------------------------------------------


def test_cache_stats_and_reset(client: TestClient) -> None:
    """3.2, 3.13 test 17."""
    client.post("/v1/cache/reset")
    before = client.get("/v1/cache/stats").json()
    assert set(before) == {
        "enabled", "page_size", "entries", "pages", "bytes", "capacity_bytes", "lookups", "hits", "hit_rate",
        "tokens_reused", "inserts", "evictions", "rejects", "last_reject",
    }  # fmt: skip
    assert set(before["rejects"]) == {reason.value for reason in Reject}
    assert (before["enabled"], before["entries"], before["bytes"]) == (True, 0, 0)
    body = {"prompt": "the same beginning of a prompt, again and again", "max_tokens": 1}
    replies = [client.post("/v1/completions", json=body).json() for _ in range(2)]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    assert cached[0] == 0 < cached[1]
    assert replies[0]["choices"] == replies[1]["choices"]
    stats = client.get("/v1/cache/stats").json()
    assert (stats["hits"] - before["hits"], stats["tokens_reused"] - before["tokens_reused"]) == (1, cached[1])
    freed = client.post("/v1/cache/reset").json()
    assert freed == {"cleared": True, "freed_entries": stats["entries"], "freed_bytes": stats["bytes"]}
    assert client.get("/v1/cache/stats").json()["pages"] == 0


def test_h_p7_keys_and_salts_divide_the_cache(model: Path) -> None:
    """3.12: the same salt shares, another does not; each key has its own; `off` shares among keys."""
    body = {"prompt": "a prompt that is long enough to be kept by the cache", "max_tokens": 1}

    def cached(client: TestClient, key: str, salt: str | None = None) -> int:
        reply = client.post("/v1/completions", json={**body, "cache_salt": salt}, headers={"x-api-key": key})
        found: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    with asked(model, ServerSettings(api_keys=("one", "two"))) as client:
        assert [cached(client, "one"), cached(client, "one") > 0] == [0, True]
        assert cached(client, "two") == 0
        assert [cached(client, "one", "s"), cached(client, "one", "s") > 0, cached(client, "one", "t")] == [0, True, 0]
    with asked(model, ServerSettings(api_keys=("one", "two"), cache_isolation="off")) as client:
        assert [cached(client, "one"), cached(client, "two") > 0] == [0, True]


def test_a_cache_that_is_off_says_so(model: Path) -> None:
    with asked(model, enable_prefix_caching=False) as client:
        stats = client.get("/v1/cache/stats").json()
        assert (stats["enabled"], stats["lookups"], set(stats["rejects"])) == (
            False,
            0,
            {each.value for each in Reject},
        )
        reset = client.post("/v1/cache/reset").json()
        assert reset == {"cleared": False, "freed_entries": 0, "freed_bytes": 0}


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_version_and_head(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": version(), "commit": commit()}
    for path in ("/version", "/health", "/v1/models", "/props", "/slots", "/metrics", "/v1/cache/stats", "/"):
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.headers["content-type"]) == (200, whole.headers["content-type"])


def test_the_page_is_served_as_it_lies_there(client: TestClient) -> None:
    """4."""
    page = client.get("/")
    assert page.headers["content-type"] == KINDS[".html"]
    assert page.content == files()["index.html"].content
    for name, file in files().items():
        reply = client.get(f"/assets/{name}")
        assert (reply.content, reply.headers["content-security-policy"]) == (file.content, POLICY)
        again = client.get(f"/assets/{name}", headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["../app.py", "..%2Fapp.py", "%2e%2e/app.py", "__init__.py", "x", ""])
def test_nothing_else_of_the_package_is_served(client: TestClient, name: str) -> None:
    """3.12."""
    assert client.get(f"/assets/{name}").status_code == 404


def test_a_look_that_fails_is_told_and_the_next_one_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of before are for an engine that is busy or gone, not for a mistake of ours."""
    looks: list[Any] = [ValueError("a mistake"), EngineUnhealthy("gone"), "new"]

    def take(serving: object) -> Any:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(Snapshot, "take", take)

    async def main() -> None:
        snapshots: Any = Snapshots(None, "old")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a mistake"):
            await snapshots.newest()
        assert await snapshots.newest() == "old"
        assert await snapshots.newest() == "new"

    asyncio.run(main())


def test_an_unknown_field_is_logged_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """3.9: whatever a path of a plugin's route may hold."""
    UnknownFields().ignored("a\nb", "POST /x/\r\n2026 forged")
    (line,) = caplog.messages
    assert line.splitlines() == [line]
    assert "forged" in line
