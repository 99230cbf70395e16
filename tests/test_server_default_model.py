"""The default model behind the server, against an independent implementation's replies (tests/data/golden)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from script_server import ScriptServer, running

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "smollm2-135m.json").read_text())["cases"]
CASES = [case for case in GOLDEN if case["id"] in ("raw-capital", "chat-system")]
TOKENS = 2
"""Of each reply that are compared: one of a prefill and one of a decode step."""

DECISIVE_GAP, TOLERANCE = 5e-4, 2e-4
"""Of float32 sums in another order, as in tests/test_golden.py."""


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[ScriptServer]:
    with running(smollm2_path, backend="reference-numpy", max_num_seqs=4, max_model_len=512) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_h_d9_ids_and_log_probabilities_are_the_independent_ones(server: ScriptServer, case: dict[str, Any]) -> None:
    """H-D9, 1.10: 5: the prompt's ids, greedy ids and the best log-probabilities, streamed and not."""
    chat = "messages" in case
    path = "/v1/chat/completions" if chat else "/v1/completions"
    given = {"messages": case["messages"]} if chat else {"prompt": case["prompt"]}
    scores = {"logprobs": True, "top_logprobs": 5} if chat else {"logprobs": 5}
    asked = {**given, **scores, "temperature": 0, "max_tokens": TOKENS, "return_token_ids": True}
    reply = server.ok(path, asked)
    (choice,) = reply["choices"]
    assert (reply if chat else choice)["prompt_token_ids"] == case["prompt_ids"]
    assert min(case["top2_gap"][:TOKENS]) > DECISIVE_GAP
    assert choice["token_ids"] == case["greedy_ids"][:TOKENS]
    for place, best in enumerate(case["top5_logprobs"][:TOKENS]):
        logprobs = choice["logprobs"]
        found = (
            [each["logprob"] for each in logprobs["content"][place]["top_logprobs"]]
            if chat
            else list(logprobs["top_logprobs"][place].values())
        )
        assert found == pytest.approx([value for _, value in best], abs=TOLERANCE)
    chunks = server.stream(path, asked)
    assert [token for chunk in chunks for each in chunk["choices"] for token in each["token_ids"]] == choice[
        "token_ids"
    ]
