"""LLM and AsyncLLM with base_url (docs/spec/clients.md 2.1): a server answers as a model in this process does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from llm_rows import BACKEND, GREEDY, HELLO, ids, mixed
from other_threads import PATIENCE
from script_plugin import GATE
from script_server import ScriptServer, running
from tiny_checkpoint import write_tiny_llama

from mlxcel import LLM, AsyncLLM, RequestOutput, SamplingParams
from mlxcel.errors import (
    ContextTooLong,
    EmptyPrompt,
    MlxcelError,
    QueueFull,
    RequestError,
    ServerError,
    TemplateError,
    UnknownModel,
    UnsupportedField,
    UsageError,
)
from mlxcel.remote_http import Address, Exchange
from mlxcel.remote_reply import RemoteReply
from mlxcel.server.settings import ServerSettings

UNLIKE = ("request_id", "metrics", "num_cached_tokens")
"""Of a RequestOutput: each request has its own id, replies of OpenAI's kind have no timings, and what is cached depends
on what was asked before."""

REJECTING = (
    "{{ raise_exception('no such role') if messages[0]['role'] == 'judge' else 'said ' + messages[0]['content'] }}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ScriptServer]:
    """The real backend, and an operator with other ideas of sampling."""
    settings = ServerSettings(sampling={"temperature": 0.3, "min_p": 0.2}, allow_request_templates=True)
    with running(model, settings, backend=BACKEND) as made:
        yield made


@pytest.fixture(scope="module")
def near(model: Path) -> Iterator[LLM]:
    with LLM(model, backend=BACKEND) as made:
        yield made


@pytest.fixture(scope="module")
def far(server: ScriptServer) -> Iterator[LLM]:
    with LLM(base_url=server.url) as made:
        yield made


@pytest.fixture
def script(model: Path) -> Iterator[ScriptServer]:
    """Of which a prompt says what is said: tests/script_plugin.py."""
    with running(model, max_num_seqs=2) as made:
        yield made


def alike(far: RequestOutput, near: RequestOutput) -> None:
    for field in attrs.fields(RequestOutput):
        if field.name not in UNLIKE:
            assert getattr(far, field.name) == getattr(near, field.name), field.name


# --- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        GREEDY.clone(seed=1),
        SamplingParams(seed=5, max_tokens=12),
        SamplingParams(seed=7, max_tokens=6, n=3, temperature=0.7, top_k=40, top_p=0.9),
        SamplingParams(seed=7, max_tokens=6, logprobs=3, prompt_logprobs=2, logprobs_mode="processed", top_k=9),
        SamplingParams(seed=2, max_tokens=5, logprobs=0, post_sampling_probs=True),
        SamplingParams(seed=2, max_tokens=9, logit_bias=((70, 4.0), (71, None)), stop=("e", "zz"), bad_words=("q",)),
        SamplingParams(seed=2, max_tokens=9, stop_token_ids=(100, 101), ignore_eos=True, min_tokens=3),
        SamplingParams(seed=2, max_tokens=0),
        SamplingParams(
            seed=2, max_tokens=4, add_special_tokens=False, skip_special_tokens=False, truncate_prompt_tokens=3
        ),
        SamplingParams(temperature=0, top_k=7, max_tokens=4, seed=3),
    ],
    ids=lambda params: "-".join(sorted(params.given)),
)
def test_outputs_are_those_of_a_model_here(far: LLM, near: LLM, params: SamplingParams) -> None:
    """Lists of mixed prompts and conversations: all fields, with the library's defaults and not the operator's."""
    prompts = ["hello", [5, 6, 7, 8], {"prompt": "in the"}, {"prompt_token_ids": (9, 10, 11, 12)}]
    for theirs, ours in zip(far.generate(prompts, params), near.generate(prompts, params), strict=True):
        alike(theirs, ours)
    conversations = [HELLO, [{"role": "system", "content": "be"}, *HELLO]]
    for theirs, ours in zip(far.chat(conversations, params), near.chat(conversations, params), strict=True):
        alike(theirs, ours)


def test_a_continued_message_and_a_template_of_ones_own(far: LLM, near: LLM) -> None:
    open_end = [*HELLO, {"role": "assistant", "content": "Deep"}]
    params = GREEDY.clone(seed=1)
    for messages, options in (
        (open_end, {"add_generation_prompt": False, "continue_final_message": True}),
        (HELLO, {"chat_template": REJECTING}),
        (
            HELLO,
            {"chat_template": "{{ mood }}{{ messages[0].content }}", "chat_template_kwargs": {"mood": "glad"}},
        ),
    ):
        alike(far.chat(messages, params, **options)[0], near.chat(messages, params, **options)[0])
        assert far.apply_chat_template(messages, **options) == near.apply_chat_template(messages, **options)


def test_order_and_length_of_many(far: LLM, near: LLM) -> None:
    prompts = mixed(40)
    params = [SamplingParams(seed=n, max_tokens=1 + n % 5) for n in range(40)]
    outputs = far.generate(prompts, params)
    assert [ids(output) for output in outputs] == [ids(output) for output in near.generate(prompts, params)]
    assert far.generate([], GREEDY) == []


def test_a_drawn_seed_is_reported_and_repeats(far: LLM) -> None:
    """At a "!" rows of this server fail."""
    first, second = far.generate(["a", "a"], SamplingParams(max_tokens=8, logit_bias=((ord("!"), None),)))
    assert first.sampling_params is not None
    assert second.sampling_params is not None
    assert first.sampling_params.seed != second.sampling_params.seed
    assert ids(far.generate("a", first.sampling_params)[0]) == ids(first)


def test_deltas_joined_are_the_reply(far: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=15, n=2, logprobs=1)
    for stream, whole in (
        (far.stream("hello", params), far.generate("hello", params)[0]),
        (far.stream_chat(HELLO, params), far.chat(HELLO, params)[0]),
    ):
        deltas = list(stream)
        for choice in whole.outputs:
            own = [delta for delta in deltas if delta.index == choice.index]
            assert "".join(delta.text for delta in own) == choice.text
            assert tuple(token for delta in own for token in delta.token_ids) == choice.token_ids
            assert tuple(entry for delta in own for entry in delta.logprobs or ()) == choice.logprobs
            assert own[-1].finish_cause == choice.finish_cause
        assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].output is not None
        assert deltas[-1].output.outputs == whole.outputs


def test_texts_and_state(far: LLM, near: LLM) -> None:
    for text in ("hello", "", "<|im_end|>é🙂"):
        for added in (True, False):
            assert far.tokenize(text, added) == near.tokenize(text, added)
    listed = [*near.tokenize("<|im_start|>hello"), 3]
    for skipped in (True, False):
        assert far.detokenize(listed, skipped) == near.detokenize(listed, skipped)
    assert far.detokenize([]) == ""
    far.generate("the " * 60, GREEDY)
    again = far.generate("the " * 60, GREEDY)[0]
    assert again.num_cached_tokens > 0
    assert far.stats()["prompt_cache"]["entries"] > 0
    far.reset_prefix_cache()
    assert far.stats()["prompt_cache"]["entries"] == 0
    with pytest.raises(UsageError, match="the tokenizer is the server's"):
        far.get_tokenizer()


# --- the same refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda llm: llm.generate(["fine", [5] * 3000]), ContextTooLong),
        (lambda llm: llm.generate(["fine", "the " * 3000]), ContextTooLong),
        (lambda llm: llm.generate(["fine", [1, 2, -3]]), RequestError),
        (lambda llm: llm.generate(["fine", [1, 999999]]), RequestError),
        (lambda llm: llm.generate(["fine", []]), EmptyPrompt),
        (lambda llm: llm.generate(["a", "fine"], [GREEDY, SamplingParams(logit_bias=((9999, 1.0),))]), RequestError),
        (lambda llm: llm.generate(["a", "fine"], [GREEDY, SamplingParams(min_tokens=5000)]), RequestError),
        (lambda llm: llm.chat([HELLO, [{"role": 3}]]), RequestError),
        (lambda llm: llm.chat([HELLO, [{"role": "user", "content": "the " * 3000}]]), ContextTooLong),
    ],
)
def test_refusals_name_the_prompt(far: LLM, near: LLM, call: Callable[[LLM], Any], kind: type[MlxcelError]) -> None:
    """Before any prompt is run, by the same class, for the same prompt."""
    said = []
    for llm in (far, near):
        with pytest.raises(kind) as raised:
            call(llm)
        assert type(raised.value) is kind
        assert (raised.value.index, list(raised.value.outputs)) == (1, [])
        said.append(str(raised.value).split(":")[0])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("call", "kind", "field"),
    [
        (lambda llm: llm.generate("", GREEDY), None, None),
        (lambda llm: llm.generate("", SamplingParams(add_special_tokens=False)), EmptyPrompt, "prompt"),
        (lambda llm: llm.generate("a", SamplingParams(n=17)), RequestError, "n"),
        (lambda llm: llm.generate("a", SamplingParams(logprobs=21)), RequestError, "logprobs"),
        (lambda llm: llm.chat([{"role": "judge", "content": "a"}], chat_template=REJECTING), TemplateError, "messages"),
        (lambda llm: llm.chat(HELLO, tools=[{"type": "function"}]), UnsupportedField, "tools"),
        (lambda llm: llm.chat(HELLO, continue_final_message=True), RequestError, None),
        (lambda llm: llm.stream("a", SamplingParams(stop_token_ids=(5000,))), RequestError, "stop_token_ids"),
    ],
)
def test_refusals_are_of_the_same_class(
    far: LLM, near: LLM, call: Callable[[LLM], Any], kind: type[MlxcelError] | None, field: str | None
) -> None:
    for llm in (far, near):
        if kind is None:
            assert list(call(llm))
            continue
        with pytest.raises(kind) as raised:
            list(call(llm))
        assert type(raised.value) is kind
        if field is not None:
            assert str(getattr(raised.value, "field", "")).split("[")[0] == field


def test_a_failing_row_leaves_the_others_alone(script: ScriptServer) -> None:
    with LLM(base_url=script.url) as llm:
        prompts = ["<<one>>", "<<tw!o>>", "<<three>>"]
        outputs = llm.generate(prompts, GREEDY.clone(max_tokens=-1), on_error="return")
        assert [output.outputs[0].text for output in outputs] == ["one", "tw", "three"]
        assert [output.outputs[0].finish_cause for output in outputs] == ["eos", "error", "eos"]
        assert isinstance(outputs[1].error, ServerError)
        assert outputs[1].error.code == "internal_error"
        with pytest.raises(ServerError) as raised:
            llm.generate(prompts, GREEDY)
        assert raised.value.index == 1
        assert [output.error is None for output in raised.value.outputs] == [True, False, True]
        with pytest.raises(ServerError):
            list(llm.stream("<<a!>>", GREEDY))
        assert llm.generate("<<fine>>", GREEDY)[0].outputs[0].text == "fine"


def test_a_full_queue_is_asked_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts than the server has rows and places: all are answered, in order."""
    real, refused = Exchange.ask, []

    def ask(exchange: Exchange, *arguments: Any) -> Any:
        try:
            return real(exchange, *arguments)
        except QueueFull as full:
            GATE.open.set()
            refused.append(full.values["retry_after"])
            full.values["retry_after"] = 0.01
            raise

    monkeypatch.setattr(Exchange, "ask", ask)
    with running(model, ServerSettings(max_queue_depth=1), max_num_seqs=1) as server, LLM(base_url=server.url) as llm:
        GATE.shut()
        outputs = llm.generate([f"<<{n}>>" for n in range(5)], GREEDY)
    assert [output.outputs[0].text for output in outputs] == [str(n) for n in range(5)]
    assert refused
    assert min(refused) >= 1


def test_leaving_a_stream_frees_the_row(script: ScriptServer) -> None:
    with LLM(base_url=script.url) as llm:
        deltas = llm.stream("<<" + "a" * 500 + ">>", SamplingParams(temperature=0))
        assert isinstance(deltas, Generator)
        GATE.shut(after=50)
        assert next(deltas).text == "a"
        assert GATE.waited.wait(PATIENCE)
        deltas.close()
        script.heard_hang_ups()
        GATE.open.set()
        assert script.idle()
        assert script.serving.stats()["scheduler"]["generation_tokens_total"] < 500


def test_an_interrupt_ends_the_rows_and_the_object_stays_usable(
    script: ScriptServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(reply: RemoteReply, event: object) -> None:
        raise KeyboardInterrupt

    with LLM(base_url=script.url) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(RemoteReply, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["<<" + "a" * 800 + ">>"] * 5, SamplingParams(temperature=0))
        assert script.idle()
        assert llm.generate("<<b>>", GREEDY)[0].outputs[0].text == "b"


def test_close_ends_what_runs_and_what_comes_after(script: ScriptServer) -> None:
    llm = LLM(base_url=script.url)
    GATE.shut()
    outputs: list[RequestOutput] = []
    thread = threading.Thread(
        target=lambda: outputs.extend(llm.generate("<<aaaa>>", GREEDY, on_error="return")), name="caller"
    )
    thread.start()
    assert GATE.waited.wait(PATIENCE)
    llm.close()
    thread.join(PATIENCE)
    llm.close()
    GATE.open.set()
    assert [output.outputs[0].finish_cause for output in outputs] == ["cancelled"]
    assert script.idle()
    for call in (lambda: llm.generate("a"), lambda: llm.tokenize("a"), llm.stats, lambda: llm.stream("a")):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            call()
    assert not [each for each in threading.enumerate() if each.name == "mlxcel-request"]


# --- asyncio ----------------------------------------------------------------------------------------------------------


def test_coroutines_and_an_abort(script: ScriptServer) -> None:
    async def last(llm: AsyncLLM, prompt: str, request_id: str | None = None) -> RequestOutput:
        found = [output async for output in llm.generate(prompt, SamplingParams(temperature=0), request_id)]
        texts = [output.outputs[0].text for output in found]
        assert all(after.startswith(before) for before, after in pairwise(texts))
        return found[-1]

    async def work() -> None:
        async with AsyncLLM(base_url=script.url) as llm:
            outputs = await asyncio.gather(*(last(llm, f"<<say {n}>>") for n in range(12)))
            assert [output.outputs[0].text for output in outputs] == [f"say {n}" for n in range(12)]
            GATE.shut()
            task = asyncio.create_task(last(llm, "<<never>>", "tale"))
            gone = asyncio.create_task(last(llm, "<<never>>"))
            await asyncio.to_thread(GATE.waited.wait, PATIENCE)
            assert await llm.abort("tale")
            assert (await task).outputs[0].finish_cause == "cancelled"
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            GATE.open.set()
            assert await asyncio.to_thread(script.idle)
            assert not await llm.abort("tale")
            deltas = [delta async for delta in llm.stream("<<ab>>", GREEDY)]
            assert "".join(delta.text for delta in deltas) == "ab"

    asyncio.run(work())


# --- servers that are none --------------------------------------------------------------------------------------------


def test_keys(model: Path) -> None:
    with running(model, ServerSettings(api_keys=("right",))) as server:
        for key in (None, "wrong"):
            with pytest.raises(ServerError, match="needs an API key") as raised:
                LLM(base_url=server.url, api_key=key)
            assert (raised.value.code, raised.value.status) == ("invalid_api_key", 401)
        with LLM(base_url=server.url, api_key="right") as llm:
            assert llm.generate("<<yes>>", GREEDY)[0].outputs[0].text == "yes"
    assert "right" not in repr(Address.parse(server.url, "right"))


def test_a_served_name(script: ScriptServer) -> None:
    with LLM("tiny", base_url=script.url) as llm:
        assert llm.generate("<<a>>", GREEDY)[0].outputs[0].text == "a"
    with pytest.raises(UnknownModel, match="serves no model 'other'"):
        LLM("other", base_url=f"{script.url}/v1/")


def test_another_process_is_refused(far: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxcel.remote_client.os.getpid", lambda: -1)
    for call in (lambda: far.generate("a"), lambda: far.tokenize("a")):
        with pytest.raises(RuntimeError, match="made in another process"):
            call()
