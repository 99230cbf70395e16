"""One request through every door gives the same ids: commands, library and each route, streamed and not
(docs/spec/clients.md 2.2, 3.13: 21)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from cli_runs import Cli
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM, RequestOutput, SamplingParams

TEXT, CHAT, NATIVE, MESSAGES = "/v1/completions", "/v1/chat/completions", "/completion", "/v1/messages"
PROMPT = "In the beginning"
TURNS = [{"role": "user", "content": PROMPT}]
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
"""What the clients' own defaults differ in, spelled out."""

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, **NEUTRAL},
    "seeded": {"temperature": 1.0, "seed": 11, **NEUTRAL},
    "chain": {"temperature": 0.9, "seed": 3, **NEUTRAL, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.3},
}
FLAGS = {
    "temperature": "--temp", "seed": "--seed", "top_k": "--top-k", "top_p": "--top-p", "min_p": "--min-p",
    "max_tokens": "-n", "repetition_penalty": "--repeat-penalty",
}  # fmt: skip


@attrs.frozen
class Doors:
    """One model behind a server, behind the library, and as a path for commands."""

    model: Path
    server: ScriptServer
    llm: LLM
    tokens: int

    def fields(self, sampling: str) -> dict[str, Any]:
        return {**SAMPLING[sampling], "max_tokens": self.tokens}


@pytest.fixture(scope="module", params=["tiny", pytest.param("default", marks=pytest.mark.slow)])
def doors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    if request.param == "tiny":
        model, tokens = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"), 12
    else:
        model, tokens = request.getfixturevalue("smollm2_path"), 4
    options: dict[str, Any] = {"backend": "reference-numpy", "max_model_len": 128}
    with running(model, max_num_seqs=4, **options) as server, LLM(model, **options) as llm:
        yield Doors(model, server, llm, tokens)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Cli:
    return Cli(monkeypatch, capfdbinary)


def command(cli: Cli, doors: Doors, name: str, fields: dict[str, Any], *how: str) -> list[int]:
    flags = [word for field, flag in FLAGS.items() if field in fields for word in (flag, str(fields[field]))]
    ran = cli(name, doors.model, "--backend", "reference-numpy", *how, "-p", PROMPT, "--json", "--ignore-eos", *flags)
    assert ran.code == 0, ran.err
    return list(json.loads(ran.out)["token_ids"])


def over_openai(server: ScriptServer, path: str, body: dict[str, Any]) -> list[list[int]]:
    """Ids of the whole reply, and of the stream."""
    asked = {**body, "return_token_ids": True}
    chunks = server.stream(path, asked)
    return [
        server.ok(path, asked)["choices"][0]["token_ids"],
        [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]],
    ]


def over_native(server: ScriptServer, body: dict[str, Any]) -> list[list[int]]:
    asked = {**body, "return_tokens": True}
    lines = server.raw_stream(NATIVE, asked).removesuffix("\n\n").split("\n\n")
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]
    return [server.ok(NATIVE, asked)["tokens"], [token for piece in pieces[:-1] for token in piece["tokens"]]]


def over_messages(server: ScriptServer, body: dict[str, Any]) -> list[tuple[str, int]]:
    """Text and number of tokens, which is all that this route tells of them."""
    reply = server.ok(MESSAGES, body)
    events = [
        json.loads(lines.partition("data: ")[2])
        for lines in server.raw_stream(MESSAGES, body).removesuffix("\n\n").split("\n\n")
        if lines.startswith("event:")
    ]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    (last,) = [event for event in events if event["type"] == "message_delta"]
    return [
        (reply["content"][0]["text"], reply["usage"]["output_tokens"]),
        (text, last["usage"]["output_tokens"]),
    ]


def drawn(output: RequestOutput, doors: Doors) -> list[int]:
    ids = list(output.outputs[0].token_ids)
    assert len(ids) == doors.tokens
    return ids


@pytest.mark.parametrize("sampling", SAMPLING)
def test_h_g4_a_prompt_as_it_is(doors: Doors, cli: Cli, sampling: str) -> None:
    """H-G4, 2.2, 3.13: 21: `generate --raw`, the library, completions and the native route."""
    fields = doors.fields(sampling)
    (output,) = doors.llm.generate(PROMPT, SamplingParams(**fields))
    wanted = drawn(output, doors)
    assert command(cli, doors, "generate", fields, "--raw") == wanted
    assert over_openai(doors.server, TEXT, {"prompt": PROMPT, **fields}) == [wanted, wanted]
    assert over_native(doors.server, {"prompt": PROMPT, **fields}) == [wanted, wanted]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_h_g4_a_chat(doors: Doors, cli: Cli, sampling: str) -> None:
    """H-G4, 2.2: `generate`, `run`, the library, chat and messages; the rendered prompt is the same one too."""
    fields = doors.fields(sampling)
    (output,) = doors.llm.chat(TURNS, SamplingParams(**fields))
    wanted = drawn(output, doors)
    assert command(cli, doors, "generate", fields) == wanted
    assert command(cli, doors, "run", fields) == wanted
    asked = {"messages": TURNS, **fields}
    assert over_openai(doors.server, CHAT, asked) == [wanted, wanted]
    assert over_messages(doors.server, asked) == [(output.outputs[0].text, doors.tokens)] * 2
    prompt = list(output.prompt_token_ids)
    assert doors.server.ok(CHAT, {**asked, "return_token_ids": True})["prompt_token_ids"] == prompt
    assert over_native(doors.server, {"prompt": prompt, **fields}) == [wanted, wanted]
    assert doors.server.ok(f"{MESSAGES}/count_tokens", asked)["input_tokens"] == len(prompt)


def test_prompts_are_told_apart(doors: Doors) -> None:
    """What the tests above compare does differ where the question does."""
    fields = doors.fields("greedy")
    raw, chat = doors.llm.generate(PROMPT, SamplingParams(**fields)), doors.llm.chat(TURNS, SamplingParams(**fields))
    assert drawn(raw[0], doors) != drawn(chat[0], doors)
