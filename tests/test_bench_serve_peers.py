"""Load generators of others against this server (docs/spec/clients.md 8.3, 8.4: 8); lm-eval has a file of its own.

Each needs more packages than the tests have: it is taken from the path, and its test is skipped by name without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_programs import program, run
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

ASKED = 6
TOKENS = 8
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    with running(model, backend="reference-numpy", max_num_seqs=4) as made:
        yield made
        assert made.idle()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openai", "openai-chat"])
def test_vllms_own_client(server: ScriptServer, model: Path, tmp_path: Path, kind: str) -> None:
    vllm = program("vllm", "`pip install vllm` has it")
    route = "/v1/chat/completions" if kind == "openai-chat" else "/v1/completions"
    where = ["--backend", kind, "--endpoint", route, "--base-url", server.url, "--model", "tiny", "--tokenizer", model]
    load = ["--dataset-name", "random", "--random-input-len", 32, "--random-output-len", TOKENS, "--ignore-eos"]
    how = ["--num-prompts", ASKED, "--max-concurrency", 2, "--save-result", "--result-filename", "found.json"]
    ran = run([vllm, "bench", "serve", *where, *load, *how], tmp_path, **OFFLINE)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (ASKED, ASKED * TOKENS)


@pytest.mark.slow
def test_guidellm(server: ScriptServer, model: Path, tmp_path: Path) -> None:
    guidellm = program("guidellm", "`pip install guidellm` has it")
    options = {
        "backend": f"kind=openai_http,target={server.url}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={ASKED}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}",
        "tokenizer": f"kind=huggingface_auto,model={model}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    ran = run([guidellm, "run", *words, "--output", "kind=json,path=found.json"], tmp_path, **OFFLINE)
    assert ran.returncode == 0, ran.stderr[-2000:] + ran.stdout[-2000:]
    (found,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    requests: dict[str, list[Any]] = found["requests"]
    assert {name: len(each or ()) for name, each in requests.items() if name != "total"} == {
        "successful": ASKED,
        "errored": 0,
        "incomplete": 0,
    }
    assert [each["output_metrics"]["text_tokens"] for each in requests["successful"]] == [TOKENS] * ASKED


@pytest.mark.slow
def test_llama_benchy(server: ScriptServer, model: Path, tmp_path: Path) -> None:
    """It cuts its prompts out of a book, which is here some text in the place where it keeps one."""
    benchy = program("llama-benchy", "`pip install llama-benchy` has it")
    book = "https://example.org/book.txt"
    cache = tmp_path / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    name = hashlib.md5(book.encode(), usedforsecurity=False).hexdigest()
    (cache / f"{name}.txt").write_text("".join(f"In line {number} there is the same again.\n" for number in range(500)))
    where = ["--base-url", f"{server.url}/v1", "--model", "tiny", "--tokenizer", model, "--book-url", book]
    load = ["--pp", 64, "--tg", TOKENS, "--exact-tg", "--no-cache", "--runs", ASKED, "--skip-coherence"]
    ran = run([benchy, *where, *load, "--format", "json", "--save-result", "found.json"], tmp_path, **OFFLINE)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (found,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert found["response_size"] == TOKENS
    assert len(found["tg_throughput"]["values"]) == ASKED
    assert "rror" not in ran.stdout + ran.stderr
