"""schemathesis against the server, from its own OpenAPI document (docs/spec/clients.md 3.2, 3.5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from client_programs import program, run
from script_server import running
from tiny_checkpoint import write_tiny_llama

from mlxcel.server.settings import ServerSettings

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
"""That all data of the schema are taken is not among them: fields must also fit each other, the model and its context,
which no schema says."""

REFUSED = "post_props"
"""501 is the answer that it has, and the program counts that among server errors."""

SECONDS = 90


@pytest.mark.slow
def test_requests_made_from_the_document_meet_no_server_error(tmp_path: Path) -> None:
    """3.2, 3.5: none of some thousand requests, good and bad, is a fault of ours; replies are of the schemas, statuses
    of the document, and what is against a schema is refused. Then a good request, and nothing is left behind."""
    fuzz = program("schemathesis", "`pip install schemathesis` has it")
    model = write_tiny_llama(tmp_path / "tiny")
    good = {"prompt": "in the beginning", "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    options: dict[str, Any] = {"backend": "reference-numpy", "max_num_seqs": 4, "max_model_len": 256}
    with running(model, ServerSettings(max_queue_depth=64), **options) as server:
        (before,) = server.ok("/v1/completions", good)["choices"]
        limits = ["-n", 10, "--seed", 1, "--max-time", SECONDS, "--continue-on-failure"]
        places = [f"{server.url}/openapi.json", "--url", server.url, "--exclude-operation-id", REFUSED]
        ran = run([fuzz, "run", *places, "--checks", ",".join(CHECKS), *limits, "--report", "ndjson"], tmp_path)
        assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
        (report,) = tmp_path.rglob("*.ndjson")
        kinds = [next(iter(json.loads(line))) for line in report.read_text().splitlines()]
        assert kinds.count("ScenarioFinished") > 20
        assert server.ok("/v1/completions", good)["choices"] == [before]
        assert server.idle()
