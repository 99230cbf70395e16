"""A request to the server and the library, alone and among others, to the bit (docs/spec/clients.md 2.2, 3.13: 22)."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM, SamplingParams

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "in the beginning"}]
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "max_tokens": 12}
"""What the clients' own defaults differ in, spelled out."""

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, **NEUTRAL},
    "seeded": {"temperature": 1.2, "seed": 11, **NEUTRAL},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    with running(model, backend="reference-numpy", max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, backend="reference-numpy") as made:
        yield made


def body_of(path: str, prompt: str, fields: dict[str, Any]) -> dict[str, Any]:
    given = {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
    return {**given, **fields, "return_token_ids": True}


def ids(server: ScriptServer, path: str, prompt: str, fields: dict[str, Any], *, stream: bool) -> list[int]:
    body = body_of(path, prompt, fields)
    if not stream:
        return list(server.ok(path, body)["choices"][0]["token_ids"])
    chunks = server.stream(path, body)
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


def test_choices_of_one_request_are_those_of_the_library(server: ScriptServer, llm: LLM) -> None:
    fields = {**SAMPLING["seeded"], "n": 3}
    (output,) = llm.generate("in the", SamplingParams(**fields))
    reply = server.ok(TEXT, body_of(TEXT, "in the", fields))
    assert [choice["token_ids"] for choice in reply["choices"]] == [list(each.token_ids) for each in output.outputs]


@pytest.mark.parametrize(
    ("extreme", "other"),
    [
        ({"repeat_last_n": 0}, {"repeat_last_n": -1}),  # off, and the whole context (H-E5)
        ({"dry_penalty_last_n": 0}, {"dry_penalty_last_n": -1}),
        ({"dry_sequence_breakers": [" ", "e", "t", "i", "n"]}, {"dry_sequence_breakers": []}),  # H-E11
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_h_e5_h_e11_windows_and_breakers_act_over_http_as_in_the_library(
    server: ScriptServer, llm: LLM, extreme: dict[str, Any], other: dict[str, Any], warm: bool
) -> None:
    """H-E5, H-E11: greedy and sampled: what is told is what acts, and both ends of a field differ."""
    prompt = "the in the in the in the in the"
    base = {**SAMPLING["seeded" if warm else "greedy"], "repetition_penalty": 5.0}
    base |= {"dry_multiplier": 8.0, "dry_base": 2.0, "dry_allowed_length": 1}
    base["allowed_token_ids"] = sorted(set(llm.tokenize(prompt + " it is")))  # few, so that they repeat
    replies = []
    for fields in ({**base, **extreme}, {**base, **other}):
        (output,) = llm.generate(prompt, SamplingParams(**fields))
        for stream in (False, True):
            assert ids(server, TEXT, prompt, fields, stream=stream) == list(output.outputs[0].token_ids)
        replies.append(output.outputs[0].token_ids)
        asked = {"messages": HELLO, "explain": True, **fields}
        told = server.ok("/apply-template", asked)["sampling"]
        assert all(told[name] == value for name, value in fields.items() if name != "dry_sequence_breakers")
        assert list(told["dry_sequence_breakers"]) == fields.get("dry_sequence_breakers", ["\n", ":", '"', "*"])
    assert replies[0] != replies[1]


@pytest.fixture(scope="module")
def crowd(model: Path, backend: str) -> Iterator[ScriptServer]:
    """Eight rows, on each backend."""
    with running(model, backend=backend, device="cpu", max_num_seqs=8, no_warmup=True) as made:
        yield made


@pytest.mark.on_jax(most=0)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_neighbours_change_nothing(crowd: ScriptServer, path: str, stream: bool) -> None:
    """3.13: 22. Ids and log-probabilities of a request alone and among seven others, to the last bit."""
    fields = {**SAMPLING["seeded"], "logprobs": True if path == CHAT else 2, "top_logprobs": 2}
    if path == TEXT:
        del fields["top_logprobs"]

    def ask(seed: int) -> Any:
        body = {**body_of(path, "the " * (1 + seed % 9), fields), "seed": seed}
        if not stream:
            choice = crowd.ok(path, body)["choices"][0]
            return choice["token_ids"], choice["logprobs"]
        chunks = crowd.stream(path, body)
        return [(c["token_ids"], c["logprobs"], c.get("text", c.get("delta"))) for k in chunks for c in k["choices"]]

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        among = list(pool.map(ask, range(8)))
    if stream:  # a slow reader's chunks are merged: what they hold is compared
        alone, among = ([_merged(each) for each in every] for every in (alone, among))
    assert among == alone


def _merged(parts: list[Any]) -> Any:
    tokens = [token for found, _, _ in parts for token in found]
    scores = [json.dumps(entry) for _, found, _ in parts if found for entry in _entries(found)]
    return tokens, scores


def _entries(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return list(logprobs["content"])
    return [list(each) for each in zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)]


def test_h_h1_raw_log_probabilities_do_not_know_the_temperature(server: ScriptServer, llm: LLM) -> None:
    """H-H1, H-H8: raw by default, whatever the chain does; `processed` is another thing; the library says the same."""

    def first(**more: Any) -> dict[str, float]:
        asked = {"prompt": "in the", "max_tokens": 1, "logprobs": 3, "ignore_eos": True, "seed": 1, **more}
        return dict(server.ok(TEXT, asked)["choices"][0]["logprobs"]["top_logprobs"][0])

    cold, hot = first(temperature=0.1, top_k=0), first(temperature=2.0, top_k=0)
    shared = cold.keys() & hot.keys()
    assert len(shared) >= 3
    assert {name: cold[name] for name in shared} == {name: hot[name] for name in shared}
    assert first(temperature=0.1, top_k=0, logprobs_mode="processed") != cold
    (output,) = llm.generate(
        "in the", SamplingParams(temperature=0.1, seed=1, max_tokens=1, logprobs=3, ignore_eos=True)
    )
    values = sorted(entry.logprob for entry in output.outputs[0].logprobs[0].values())
    assert values == sorted(cold.values())


def test_h_h5_an_echo_is_scored_as_a_direct_forward_scores_it(server: ScriptServer, llm: LLM) -> None:
    """3.3: what likelihood evaluation reads: the prompt's own tokens, by the engine's own scores."""
    prompt = "in the beginning was the word"
    reply = server.ok(TEXT, {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True})
    found = reply["choices"][0]["logprobs"]
    tokens = reply["choices"][0]["prompt_token_ids"]
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))
    direct = [
        None if each is None else each[token].logprob
        for token, each in zip(tokens, output.prompt_logprobs, strict=True)
    ]
    assert found["token_logprobs"] == direct
    assert reply["choices"][0]["text"] == prompt == "".join(found["tokens"])
    assert all(prompt[at:].startswith(each) for at, each in zip(found["text_offset"], found["tokens"], strict=True))
    best = [None if top is None else max(top.values()) for top in found["top_logprobs"]]
    assert all(one is None or one >= own for one, own in zip(best, direct, strict=True))


@pytest.mark.parametrize("as_text", [False, True])
def test_h_h5_likelihoods_of_a_task_are_those_of_a_direct_forward(
    server: ScriptServer, llm: LLM, as_text: bool
) -> None:
    """H-H5: twenty lines in one request, read as lm-eval's `local-completions` reads them: one token is drawn behind
    the prompt and left out; a continuation's score is the sum over its tokens, greedy where each was the best."""
    lines = [(f"the word {number} of", f" the in{number}") for number in range(20)]
    contexts = [llm.tokenize(context) for context, _ in lines]
    wholes = [
        [*ids, *llm.tokenize(more, add_special_tokens=False)] for ids, (_, more) in zip(contexts, lines, strict=True)
    ]
    prompts = [llm.detokenize(ids) for ids in wholes] if as_text else wholes
    asked = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1,
        "echo": True,
    }
    choices = sorted(server.ok(TEXT, asked)["choices"], key=lambda choice: choice["index"])
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in wholes], params)
    assert len(choices) == len(outputs) == 20
    for choice, context, output in zip(choices, contexts, outputs, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        best = choice["logprobs"]["top_logprobs"][len(context) : -1]
        greedy = all(value == max(top.values()) for value, top in zip(values, best, strict=True))
        direct = [
            (each[token].logprob, max(one.logprob for one in each.values()))
            for token, each in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            if each is not None
        ][len(context) - 1 :]
        assert sum(values) == sum(value for value, _ in direct)
        assert greedy == all(value == top for value, top in direct)


def test_prompt_logprobs_are_told_on_both_routes(server: ScriptServer, llm: LLM) -> None:
    (output,) = llm.generate("in the", SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2))
    asked = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    (choice,) = server.ok(TEXT, {"prompt": "in the", **asked})["choices"]
    wanted = [
        None if each is None else {
            str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in each.items()
        }
        for each in output.prompt_logprobs
    ]  # fmt: skip
    assert choice["prompt_logprobs"] == wanted
    chat = server.ok(CHAT, {"messages": HELLO, **asked})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    streamed = [
        chunk["prompt_logprobs"]
        for chunk in server.stream(CHAT, {"messages": HELLO, **asked})
        if "prompt_logprobs" in chunk
    ]
    assert streamed == [chat["prompt_logprobs"]]
