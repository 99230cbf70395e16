"""What stands around every route: ids, origins, keys, readiness, sizes (docs/spec/clients.md 3.5, 3.7, 3.9, 3.11)."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked_app import asked, ready
from other_threads import PATIENCE
from starlette.testclient import TestClient
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.settings import ServerSettings

KEYS = ("sk-first", "sk-sécond", "sk-voilà", "sk-Å")
"""In UTF-8 the last two end in bytes that are blanks in Latin-1."""
COMPLETION = {"prompt": "hi", "max_tokens": 1}

OPEN = [("GET", "/"), ("GET", "/assets/page.css"), ("GET", "/health"), ("GET", "/v1/health"), ("HEAD", "/health")]
CLOSED: list[tuple[str, str, int]] = [
    # a route, and what it answers to who has a key
    ("GET", "/v1/models", 200), ("GET", "/models", 200), ("GET", "/v1/models/model", 200), ("GET", "/props", 200),
    ("POST", "/props", 501), ("GET", "/slots", 200), ("GET", "/metrics", 200), ("GET", "/version", 200),
    ("GET", "/openapi.json", 200), ("GET", "/v1/cache/stats", 200), ("POST", "/v1/cache/reset", 200),
    ("POST", "/v1/completions", 200), ("POST", "/v1/chat/completions", 400), ("POST", "/chat/completions", 400),
    ("POST", "/v1/messages", 400), ("POST", "/v1/messages/count_tokens", 400), ("POST", "/completion", 200),
    ("POST", "/completions", 200), ("POST", "/tokenize", 400), ("POST", "/detokenize", 400),
    ("POST", "/apply-template", 400), ("GET", "/nowhere", 404),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[TestClient]:
    with asked(model) as client:
        yield client


@pytest.fixture(scope="module")
def locked(model: Path) -> Iterator[TestClient]:
    with asked(model, ServerSettings(api_keys=KEYS)) as client:
        yield client


def ask(client: TestClient, method: str, path: str, **headers: str) -> Any:
    body = {"json": {**COMPLETION, "content": "hi"}} if method == "POST" else {}
    return client.request(method, path, headers=headers, **body)  # type: ignore[arg-type]


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), OPEN)
def test_h_o15_what_is_open_needs_no_key(locked: TestClient, method: str, path: str) -> None:
    assert ask(locked, method, path).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), CLOSED)
def test_h_o15_everything_else_needs_a_key(locked: TestClient, method: str, path: str, status: int) -> None:
    """3.7, 3.13 test 14: none and wrong look the same; both ways to send a key work, whatever the scheme's case."""
    refused = ask(locked, method, path)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    for wrong in ({"Authorization": "Bearer nope"}, {"x-api-key": "nope"}, {"Authorization": f"Basic {KEYS[0]}"}):
        other = ask(locked, method, path, **wrong)
        assert (other.status_code, other.json().get("error")) == (401, refused.json()["error"])
    for good in (
        {"Authorization": f"Bearer {KEYS[0]}"},
        {"Authorization": f"bEARER  {KEYS[0]}"},
        {"x-api-key": KEYS[0]},
    ):
        assert ask(locked, method, path, **good).status_code == status


def test_each_key_counts_and_a_key_is_bytes(locked: TestClient) -> None:
    for key in KEYS:
        for sent in ((b"x-api-key", key.encode()), (b"Authorization", b"Bearer \t " + key.encode() + b" \t")):
            assert locked.get("/v1/models", headers=[sent]).status_code == 200, (key, sent)
    for near in (KEYS[2][:-1], KEYS[2] + "\xa0", KEYS[3].encode()[:-1].decode("latin-1"), ""):
        for sent in ((b"x-api-key", near.encode()), (b"Authorization", b"Bearer " + near.encode())):
            assert locked.get("/v1/models", headers=[sent]).status_code == 401, (near, sent)


def test_metrics_can_be_public(model: Path) -> None:
    with asked(model, ServerSettings(api_keys=KEYS, public_metrics=True)) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/slots").status_code == 401


def test_no_key_is_told_anywhere(model: Path) -> None:
    """3.12: not in replies, not in lines."""
    lines: list[str] = []
    with asked(model, ServerSettings(api_keys=KEYS), write=lines.append) as client:
        told = [ask(client, method, path, Authorization=f"Bearer {KEYS[0]}").text for method, path, _ in CLOSED]
    assert lines
    assert not any(key in text for key in KEYS for text in [*told, *lines])


# --- origins ----------------------------------------------------------------------------------------------------------

HERE = ["http://localhost", "http://localhost:3000", "https://127.0.0.1:1", "http://[::1]:8080", "HTTP://LOCALHOST"]
ELSEWHERE = ["http://example.org", "http://localhost.example.org", "null", "http://127.0.0.2", "file://", "localhost"]


def preflight(client: TestClient, origin: str) -> Any:
    asking = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "a, X-B"}
    return client.options("/v1/chat/completions", headers=asking)


@pytest.mark.parametrize("origin", HERE)
def test_h_o13_a_preflight_needs_no_key(locked: TestClient, origin: str) -> None:
    """3.7."""
    reply = preflight(locked, origin)
    assert (reply.status_code, reply.content) == (204, b"")
    told = {name: value for name, value in reply.headers.items() if name.startswith("access-control")}
    assert told == {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST, OPTIONS, HEAD",
        "access-control-allow-headers": "a, X-B",
        "access-control-max-age": "600",
        "access-control-expose-headers": "X-Request-Id, Retry-After",
    }
    assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize("origin", ELSEWHERE)
def test_other_origins_get_no_permission(locked: TestClient, origin: str) -> None:
    for reply in (preflight(locked, origin), locked.get("/health", headers={"Origin": origin})):
        assert reply.status_code in (200, 204)
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_h_o13_a_real_call_of_an_allowed_origin_needs_its_key(locked: TestClient) -> None:
    refused = locked.get("/v1/models", headers={"Origin": HERE[1]})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == HERE[1], "a page may read why it was refused"
    asked_for = locked.get("/v1/models", headers={"Origin": HERE[1], "x-api-key": KEYS[0]})
    assert (asked_for.status_code, asked_for.headers["access-control-allow-origin"]) == (200, HERE[1])


OWN, EVIL = "http://127.0.0.1:8080", "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # no browser
        ({"Origin": OWN, "Host": "127.0.0.1:8080"}, 200),
        ({"Origin": HERE[1], "Sec-Fetch-Site": "same-site"}, 200),
        ({"Origin": "https://outer.example", "Sec-Fetch-Site": "same-origin"}, 200),  # its own page, behind a proxy
        ({"Origin": "chrome-extension://abc", "Sec-Fetch-Site": "none"}, 200),
        ({"Origin": EVIL, "Host": "127.0.0.1:8080", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": EVIL, "Host": "127.0.0.1:8080"}, 403),  # a browser that tells no site
        ({"Origin": "http://evil.example:8080", "Host": "evil.example:8080"}, 403),  # a name that leads here
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "null", "Host": "127.0.0.1:8080"}, 403),
        ({"Origin": "", "Host": ""}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/reset"])
def test_other_pages_have_nothing_done(plain: TestClient, path: str, headers: dict[str, str], status: int) -> None:
    """3.7: a POST without a type, which a browser sends unasked; what only reads is answered, and unreadable there."""
    body = b'{"prompt": "hi", "max_tokens": 1}'
    reply = plain.post(path, content=body, headers=headers)
    assert reply.status_code == status, reply.text
    if status == 403:
        assert reply.json()["error"]["code"] == "forbidden"
        assert "--allowed-origins" in reply.json()["error"]["message"]
    looked = plain.get("/v1/models", headers=headers)
    assert looked.status_code == 200
    assert ("access-control-allow-origin" in looked.headers) is (headers.get("Origin") in (OWN, HERE[1]))


def test_pages_of_a_server_for_others_are_those_of_its_address(model: Path) -> None:
    """3.7: over plain http a browser tells no site."""
    body = b'{"prompt": "hi", "max_tokens": 1}'
    with asked(model, ServerSettings(host="0.0.0.0")) as client:
        for host, status in (("box.lan:8080", 200), ("box.lan", 403), ("evil.example:8080", 403)):
            headers = {"Origin": "http://box.lan:8080", "Host": host}
            assert client.post("/v1/completions", content=body, headers=headers).status_code == status


def test_with_keys_a_page_is_known_by_its_key(locked: TestClient) -> None:
    body = b'{"prompt": "hi", "max_tokens": 1}'
    for key, status in ((KEYS[0], 200), ("nope", 401)):
        headers = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "x-api-key": key}
        assert locked.post("/v1/completions", content=body, headers=headers).status_code == status


def test_origins_can_be_listed_or_any(model: Path) -> None:
    with asked(model, ServerSettings(allowed_origins=("https://a.example",))) as client:
        assert preflight(client, "https://a.example").headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in preflight(client, "http://localhost").headers
    with asked(model, ServerSettings(allowed_origins=("*",))) as client:
        reply = preflight(client, "https://b.example")
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers


def test_options_without_the_signs_of_a_preflight_is_a_method(plain: TestClient) -> None:
    reply = plain.options("/v1/models")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD")


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["a", "A.b_c-9", "x" * 128])
def test_a_request_keeps_its_own_id(plain: TestClient, given: str) -> None:
    """3.9."""
    assert plain.get("/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\tb", "ä", "a/b", '"'])
def test_an_id_that_is_none_is_made(plain: TestClient, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode()}
    reply = plain.get("/nowhere", headers=headers)  # type: ignore[arg-type]
    made = reply.headers["x-request-id"]
    assert re.fullmatch(r"req-[0-9a-f]{16}", made)
    assert reply.json()["request_id"] == made


# --- readiness --------------------------------------------------------------------------------------------------------


def test_h_k9_health_says_when_a_request_would_be_answered(model: Path) -> None:
    """3.2, 3.11: 503 while loading, with Retry-After, but for what needs no model."""
    go = threading.Event()
    with asked(model, before=lambda: go.wait(PATIENCE), wait=False) as client:
        for path in ("/health", "/v1/health"):
            reply = client.get(path)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
            assert reply.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        for method, path, _ in CLOSED:
            reply = ask(client, method, path)
            if path in ("/metrics", "/version", "/health"):
                assert reply.status_code in (200, 405)
            else:
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "5"), path
        assert client.get("/v1/models").json()["error"]["code"] == "model_loading"
        assert client.get("/").status_code == 200
        assert "mlxcel_ready 0.0" in client.get("/metrics").text
        go.set()
        ready(client)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        assert "mlxcel_ready 1.0" in client.get("/metrics").text


def test_a_model_that_cannot_be_loaded_is_said(model: Path) -> None:
    def fail() -> None:
        raise ValueError("no such weights")

    with asked(model, before=fail, wait=False) as client:
        ready(client)
        reply = client.get("/health")
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "Engine unhealthy")
        assert client.get("/v1/models").json()["error"]["code"] == "engine_unhealthy"
        assert "no such weights" in str(client.app.state.server.failure)  # type: ignore[attr-defined]


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize(
    ("path", "where"), [("/v1/completions", "code"), ("/completion", "type"), ("/v1/messages", "type")]
)
def test_a_body_is_not_read_beyond_its_bound(model: Path, stated: bool, path: str, where: str) -> None:
    """3.5: by its stated length, and counted while it is read."""
    whole = b'{"prompt": "' + b"x" * 2000 + b'"}'
    with asked(model, ServerSettings(max_body_size=1000)) as client:
        content: Any = whole if stated else (whole[start : start + 100] for start in range(0, len(whole), 100))
        reply = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code == 413
        words = {"/v1/completions": "body_too_large", "/completion": "invalid_request_error"}
        assert reply.json()["error"][where] == words.get(path, "request_too_large")
        assert "1000 bytes" in reply.json()["error"]["message"]
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_unknown_paths_and_methods_in_the_shape_of_their_family(plain: TestClient) -> None:
    """3.2."""
    openai = plain.get("/v1/nowhere").json()["error"]
    assert set(openai) == {"message", "type", "param", "code"}
    assert (openai["type"], openai["code"]) == ("not_found_error", "not_found")
    anthropic = plain.get("/v1/messages/nowhere")
    assert anthropic.status_code == 404
    assert (anthropic.json()["type"], anthropic.json()["error"]["type"]) == ("error", "not_found_error")
    native = plain.post("/slots", json={})
    assert (native.status_code, native.headers["allow"]) == (405, "GET, HEAD")
    assert native.json()["error"]["code"] == 405
    both = plain.delete("/props")
    assert (both.status_code, both.headers["allow"]) == (405, "GET, HEAD, POST")
    assert plain.get("/v1/models/").status_code == 404
    assert plain.get("/health/").status_code == 404, "no redirects"


def test_every_reply_forbids_guessing_its_kind(plain: TestClient) -> None:
    """3.12."""
    for path in ("/", "/health", "/nowhere", "/metrics"):
        assert plain.get(path).headers["x-content-type-options"] == "nosniff"
