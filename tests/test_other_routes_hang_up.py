"""Clients of llama.cpp's and Anthropic's routes that leave (docs/spec/clients.md 3.6: disconnect)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from other_threads import PATIENCE, comes_to
from script_server import GATE, ScriptServer, running
from tiny_checkpoint import write_tiny_llama

LONG = "<<" + "a" * 1500 + ">>"
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": [LONG, LONG]},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1500},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with running(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), max_num_seqs=1) as made:
        yield made


@pytest.fixture(autouse=True)
def open_gate() -> Iterator[None]:
    yield
    GATE.open.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_h_k3_a_client_that_hangs_up_ends_its_rows(server: ScriptServer, path: str, stream: bool) -> None:
    """H-K3: also rows of prompts that wait for the one that runs."""
    before = server.serving.stats()["scheduler"]
    GATE.shut()
    connection = server.raw(path, {**BODIES[path], "stream": stream})
    assert GATE.waited.wait(PATIENCE)
    connection.close()
    server.heard_hang_ups()
    GATE.open.set()
    assert server.idle()
    after = server.serving.stats()["scheduler"]
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 50
    ended = [stats["request_finished_total"].get("cancelled", 0) for stats in (before, after)]
    assert ended[1] - ended[0] == len(BODIES[path].get("prompt", [LONG]))
    comes_to(lambda: len(server.state.requests), 0)
