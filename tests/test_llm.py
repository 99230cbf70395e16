"""LLM (docs/spec/clients.md 2): lists, checks, streams, faults, threads, and the same ids as `generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from cli_runs import Cli
from llm_rows import BACKEND, ENDLESS, GREEDY, HELLO, ids, mixed
from other_threads import idle
from plugin_doubles import Installer
from script_llm import script_options
from tiny_checkpoint import BOS, write_tiny_llama

from mlxcel import LLM, CompletionOutput, RequestOutput, SamplingParams, StreamDelta
from mlxcel.errors import (
    ContextTooLong,
    EmptyPrompt,
    MlxcelError,
    RequestError,
    TemplateError,
    UnsupportedField,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", add_bos=True)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, backend=BACKEND, max_num_seqs=3) as made:
        yield made


@pytest.fixture
def script(third_party: Installer, tmp_path: Path) -> Iterator[LLM]:
    with LLM(**script_options(third_party, tmp_path), max_num_seqs=4) as made:
        yield made


# --- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("listed", [False, True])
def test_as_many_replies_as_prompts_in_their_order(llm: LLM, count: int, listed: bool) -> None:
    """More prompts than rows and places; short and long ones end in any order."""
    prompts = mixed(count)
    params = [SamplingParams(temperature=0, max_tokens=1 + n % 7) for n in range(count)] if listed else GREEDY
    outputs = llm.generate(prompts, params)
    assert len(outputs) == count
    for n, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        alone = llm.generate([prompt], params[n] if isinstance(params, list) else params)
        assert (output.prompt_token_ids, ids(output)) == (alone[0].prompt_token_ids, ids(alone[0]))
        assert output.finished
    assert idle(llm)


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7], (5, 6), {"prompt": "hello"}, {"prompt_token_ids": [9]}])
def test_a_lone_prompt_of_any_kind_gives_a_list_of_one(llm: LLM, prompt: object) -> None:
    assert [ids(output) for output in llm.generate(prompt, GREEDY)] == [ids(llm.generate([prompt], GREEDY)[0])]


def test_a_list_of_parameters_must_be_as_long_as_the_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"3 sampling_params and 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(TypeError, match=r"sampling_params\[1\]"):
        llm.generate(["a", "b"], [GREEDY, {"temperature": 0}])
    with pytest.raises(TypeError, match="sampling_params is 0"):
        llm.generate("a", 0)


def test_a_text_is_its_ids(llm: LLM) -> None:
    """A raw text gets the BOS that its tokenizer adds, ids are taken as they are."""
    text = llm.generate("hello", GREEDY)[0]
    assert text.prompt_token_ids == tuple(llm.tokenize("hello"))
    assert (text.prompt, text.prompt_token_ids[0]) == ("hello", 0)
    given = llm.generate([list(text.prompt_token_ids)], GREEDY)[0]
    assert (ids(given), given.prompt) == (ids(text), None)
    bare = llm.generate("hello", GREEDY.clone(add_special_tokens=False))[0]
    assert bare.prompt_token_ids == text.prompt_token_ids[1:] == tuple(llm.tokenize("hello", add_special_tokens=False))


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (5, RequestError, r"prompts\[1\] is 5, a prompt is"),
        (None, RequestError, r"prompts\[1\] is None"),
        (True, RequestError, r"prompts\[1\] is True"),
        ([1, "a"], RequestError, r"prompts\[1\]: prompt\[1\] is 'a', a token id is an integer"),
        ([1, 2.0], RequestError, r"prompts\[1\]: prompt\[1\] is 2\.0"),
        ([320], RequestError, r"prompts\[1\]: prompt\[0\] is 320, the vocabulary holds the ids 0 to 319"),
        ([-1], RequestError, r"prompts\[1\]: prompt\[0\] is -1"),
        ([], EmptyPrompt, r"prompts\[1\]: prompt holds no token id"),
        ({}, RequestError, r"prompts\[1\] needs either .* it has neither"),
        ({"prompt": "a", "prompt_token_ids": [1]}, RequestError, r"prompts\[1\] needs either .* it has both"),
        ({"prompt": 5}, RequestError, r"prompts\[1\]\[\"prompt\"\] is 5"),
        ({"prompt_token_ids": "ab"}, RequestError, r"prompts\[1\]\[\"prompt_token_ids\"\] is 'ab'"),
        ({"prompt": "a", "multi_modal_data": 1}, UnsupportedField, r"prompts\[1\] has 'multi_modal_data'"),
        ([5] * 2048, ContextTooLong, r"prompts\[1\]: the prompt is 2048 tokens, the context holds 2048"),
    ],
)
def test_every_prompt_is_checked_before_any_runs(llm: LLM, bad: object, kind: type[MlxcelError], words: str) -> None:
    before = llm.stats()["scheduler"]["request_started_total"]
    with pytest.raises(kind, match=words) as caught:
        llm.generate(["fine", bad, "fine"], GREEDY)
    assert isinstance(caught.value, ValueError)
    assert caught.value.index == 1
    assert llm.stats()["scheduler"]["request_started_total"] == before


def test_parameters_are_checked_against_the_model_before_any_prompt_runs(llm: LLM) -> None:
    before = llm.stats()["scheduler"]["request_started_total"]
    for params, field in (
        (SamplingParams(logit_bias={320: 1}), "logit_bias"),
        (SamplingParams(stop_token_ids=[320]), "stop_token_ids"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(n=17), "n"),
        (SamplingParams(min_keep=321), "min_keep"),
    ):
        with pytest.raises(RequestError, match=rf"prompts\[1\]: .*{field}") as caught:
            llm.generate(["a", "b"], [GREEDY, params])
        assert (caught.value.index, caught.value.field) == (1, field)
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        llm.generate("a", on_error="ignore")
    assert llm.stats()["scheduler"]["request_started_total"] == before


# --- records ---------------------------------------------------------------------------------------------------------


def defaults(record: type) -> dict[str, object]:
    return {field.name: field.default for field in attrs.fields(record)}


def test_names_and_defaults_of_the_records() -> None:
    must = attrs.NOTHING
    request = {"request_id": must, "prompt": must, "prompt_token_ids": must, "prompt_logprobs": None, "outputs": ()}
    request |= {"finished": False, "num_cached_tokens": 0, "metrics": None, "warnings": (), "error": None}
    assert defaults(RequestOutput) == {**request, "sampling_params": None}
    reply = {"index": must, "text": "", "reasoning_content": None, "token_ids": (), "cumulative_logprob": None}
    ending = {"finish_reason": None, "finish_cause": None}
    assert defaults(CompletionOutput) == {**reply, "logprobs": None, **ending, "stop_reason": None}
    delta = {"index": must, "text": "", "reasoning_content": "", "token_ids": (), "logprobs": None}
    assert defaults(StreamDelta) == {**delta, **ending, "output": None}


def test_an_output_says_what_ran(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, top_k=3, mirostat_eta=0.5, ignore_eos=True)
    output = llm.generate("hello", params)[0]
    assert output.warnings == ("mirostat_eta has no effect: mirostat is off",)
    applied = output.sampling_params
    assert applied is not None
    assert (applied.seed >= 0, applied.top_k, params.seed) == (True, 3, -1)
    again = llm.generate("hello", params.clone(seed=applied.seed))[0]
    assert ids(again) == ids(output)
    assert output.metrics is not None
    assert (output.metrics["predicted_n"], output.metrics["prompt_n"]) == (5, len(output.prompt_token_ids))
    assert (output.outputs[0].finish_reason, output.outputs[0].finish_cause) == ("length", "max_tokens")


def test_logprobs_are_those_of_the_tokens(llm: LLM) -> None:
    """The prompt's against a reply that draws the same tokens: a prompt one id longer scores what was drawn."""
    output = llm.generate("hello", GREEDY.clone(logprobs=3, prompt_logprobs=2))[0]
    reply = output.outputs[0]
    assert reply.logprobs is not None
    assert [next(iter(place)) for place in reply.logprobs] == list(reply.token_ids)
    assert all([entry.rank for entry in place.values()] == [1, 2, 3] for place in reply.logprobs)
    drawn = [place[token].logprob for place, token in zip(reply.logprobs, reply.token_ids, strict=True)]
    assert reply.cumulative_logprob == sum(drawn)
    longer = llm.generate([[*output.prompt_token_ids, *reply.token_ids]], GREEDY.clone(prompt_logprobs=0))[0]
    assert longer.prompt_logprobs is not None
    assert output.prompt_logprobs is not None
    assert longer.prompt_logprobs[0] is None
    length = len(output.prompt_token_ids)
    scored = zip(longer.prompt_logprobs[length:], reply.token_ids, strict=True)
    assert [place[token].logprob for place, token in scored if place] == drawn
    assert len(output.prompt_logprobs) == length
    assert [len(place) for place in output.prompt_logprobs[1:]] == [
        2 if token in [*place][1:] or place[token].rank else 3
        for place, token in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    ]
    assert output.prompt_logprobs[2][output.prompt_token_ids[2]].decoded_token == "l"
    assert llm.generate("hello", GREEDY)[0].outputs[0].logprobs is None


def test_probabilities_after_the_chain_come_as_logarithms(llm: LLM) -> None:
    processed, linear = (
        llm.generate("hello", GREEDY.clone(logprobs=1, **how))[0].outputs[0]
        for how in ({"logprobs_mode": "processed"}, {"post_sampling_probs": True})
    )
    assert linear.cumulative_logprob == pytest.approx(processed.cumulative_logprob, abs=1e-5)  # exp, then log
    assert linear.logprobs is not None
    assert all(entry.logprob <= 0 for place in linear.logprobs for entry in place.values())


def test_n_choices_are_replies_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=5, n=4)
    output = llm.generate("hello", params)[0]
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in output.outputs}) == 4
    assert ids(llm.generate("hello", params.clone(n=1))[0]) == output.outputs[0].token_ids
    deltas = list(llm.stream("hello", params))
    for choice in output.outputs:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert sum((delta.token_ids for delta in own), ()) == choice.token_ids
        assert [delta.finish_cause for delta in own][-1] == "max_tokens"
    assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("héllo – 日本 🙂", {}),
        ("say END here", {"stop": ["END"]}),
        ("say EN END", {"stop": ["END"], "include_stop_str_in_output": True}),
        ("ENE", {"stop": ["END"]}),
        ("🙂 cut", {"max_tokens": 2}),
        ("abc", {"max_tokens": 0}),
        ("abcdef", {"logprobs": 1}),
    ],
)
def test_joined_deltas_are_the_reply(script: LLM, prompt: str, params: dict[str, object]) -> None:
    chosen = SamplingParams(temperature=0, **params)
    whole = script.generate(prompt, chosen)[0]
    deltas = list(script.stream(prompt, chosen))
    reply = whole.outputs[0]
    assert "".join(delta.text for delta in deltas) == reply.text
    assert sum((delta.token_ids for delta in deltas), ()) == reply.token_ids
    assert sum((delta.logprobs or () for delta in deltas), ()) == (reply.logprobs or ())
    last = deltas[-1]
    assert (last.finish_cause, last.finish_reason) == (reply.finish_cause, reply.finish_reason)
    assert last.output is not None
    assert attrs.evolve(last.output, request_id="", metrics=None, num_cached_tokens=0) == attrs.evolve(
        whole, request_id="", metrics=None, num_cached_tokens=0, sampling_params=last.output.sampling_params
    )


def test_reasoning_comes_apart(script: LLM) -> None:
    prompt = "<think>hm</think>yes"
    reply = script.generate(prompt, SamplingParams(reasoning_format="deepseek"))[0].outputs[0]
    assert (reply.reasoning_content, reply.text) == ("hm", "yes")
    deltas = list(script.stream(prompt, SamplingParams(reasoning_format="deepseek")))
    assert ("".join(delta.reasoning_content for delta in deltas), "".join(delta.text for delta in deltas)) == (
        "hm",
        "yes",
    )
    assert script.generate(prompt, SamplingParams(reasoning_format="none"))[0].outputs[0].text == prompt


def test_leaving_a_stream_frees_its_row_and_pages(llm: LLM) -> None:
    for delta in llm.stream("hello", ENDLESS):
        assert delta.finish_cause is None
        break
    assert idle(llm)
    assert llm.stats()["scheduler"]["request_finished_total"]["cancelled"] >= 1


def test_streams_that_nobody_reads_keep_no_place(llm: LLM) -> None:
    """A row that ended gives its place back, read or not."""
    streams = [llm.stream("hello", GREEDY) for _ in range(60)]
    first = [next(stream) for stream in streams]
    assert len({delta.token_ids for delta in first}) == 1
    assert ids(llm.generate("hello", GREEDY)[0]) == sum((delta.token_ids for delta in [first[0], *streams[0]]), ())


def test_a_stream_is_checked_at_once_and_runs_when_it_is_read(llm: LLM) -> None:
    before = llm.stats()["scheduler"]["request_started_total"]
    llm.stream("hello", ENDLESS)
    with pytest.raises(RequestError, match="a prompt is"):
        llm.stream(["hello"])
    with pytest.raises(RequestError, match="vocabulary"):
        llm.stream([320])
    assert llm.stats()["scheduler"]["request_started_total"] == before


# --- chat ------------------------------------------------------------------------------------------------------------


def test_a_chat_is_its_rendered_ids(llm: LLM) -> None:
    output = llm.chat(HELLO, GREEDY)[0]
    text = llm.apply_chat_template(HELLO)
    assert output.prompt == text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert list(output.prompt_token_ids) == llm.tokenize(text, add_special_tokens=False)
    assert ids(output) == ids(llm.generate([list(output.prompt_token_ids)], GREEDY)[0])
    joined = "".join(delta.text for delta in llm.stream_chat(HELLO, GREEDY))
    assert joined == output.outputs[0].text


def test_one_conversation_or_a_list_of_them(llm: LLM) -> None:
    other = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert [output.prompt for output in llm.chat([HELLO, other], GREEDY)] == [
        llm.apply_chat_template(HELLO),
        llm.apply_chat_template(other),
    ]
    assert llm.chat([]) == []
    with pytest.raises(RequestError, match=r"conversations\[1\]: messages\[0\]\.content is missing") as caught:
        llm.chat([HELLO, [{"role": "user"}]])
    assert caught.value.index == 1
    with pytest.raises(RequestError, match=r"^messages is 'hi'"):
        llm.chat("hi")


def test_a_template_that_writes_the_bos_has_one(llm: LLM) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    output = llm.chat(HELLO, GREEDY, chat_template=template)[0]
    assert output.prompt == f"{BOS}Hello"
    assert output.prompt_token_ids.count(0) == 1
    assert output.prompt_token_ids == tuple(llm.tokenize("Hello"))


def test_the_last_message_is_continued(llm: LLM) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The"}]
    output = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)[0]
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\nThe")
    with pytest.raises(ValueError, match="exclude each other"):
        llm.chat(messages, continue_final_message=True)


def test_template_variables_reach_the_template(llm: LLM) -> None:
    template = "{{ messages[0].content }} {{ mood }}"
    options = {"chat_template": template, "chat_template_kwargs": {"mood": "gay"}}
    assert llm.chat(HELLO, GREEDY, **options)[0].prompt == llm.apply_chat_template(HELLO, **options) == "Hello gay"
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        llm.chat(HELLO, chat_template_kwargs={"messages": []})
    with pytest.raises(UnsupportedField, match="tools"):
        llm.chat(HELLO, tools=[{"type": "function"}])
    with pytest.raises(TemplateError):
        llm.chat(HELLO, chat_template="{{ raise_exception('no') }}")


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_ids_as_generate(
    llm: LLM, model: Path, sampled: bool, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """docs/spec/clients.md 2.2: LLM.generate is `generate --raw`, LLM.chat is `generate`; in company too."""
    cli = Cli(monkeypatch, capfdbinary)
    values = {"temperature": 0.9, "top_p": 0.9, "seed": 11} if sampled else {"temperature": 0.0}
    flags = ["-t", "0.9", "--top-p", "0.9", "-s", "11"] if sampled else []
    params = SamplingParams(max_tokens=12, **values)
    raw, rendered = (
        json.loads(cli("generate", model, *how, "-p", "Hello", "-n", 12, "--json", "-q", *flags).out)
        for how in (["--raw"], [])
    )
    generated = llm.generate(["the", "Hello", [5, 6]], params)[1]
    chatted = llm.chat([HELLO, [{"role": "user", "content": "x"}]], params)[0]
    for output, reply in ((generated, raw), (chatted, rendered)):
        assert list(output.prompt_token_ids) == reply["prompt_token_ids"]
        assert list(ids(output)) == reply["token_ids"]
        assert output.outputs[0].text == reply["text"]
        assert output.outputs[0].finish_cause == reply["finish_cause"]
