"""From messages, text or ids to the ids of a prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import BOS, CHATML, write_tiny_gguf, write_tiny_llama

from mlxcel.core.tokenizer import Tokenizer
from mlxcel.errors import EmptyPrompt, RequestError, TemplateError
from mlxcel.plugins.formats.gguf import GgufCheckpoint
from mlxcel.plugins.formats.safetensors import SafetensorsCheckpoint
from mlxcel.plugins.tokenizers import gguf_tokenizer, hf_json
from mlxcel.text.chat_template import ChatTemplate, select_template
from mlxcel.text.prompt import check_ids, encode_chat, encode_raw

GOLDEN = Path(__file__).parent / "data" / "golden"
HELLO = [{"role": "user", "content": "hello"}]
BOS_ID = 0


@pytest.fixture(scope="module", params=["hf", "gguf"])
def tokenizers_by_bos(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Tokenizer]:
    """The tiny tokenizer from each format, with a BOS that it adds and without."""
    folder = tmp_path_factory.mktemp(request.param)
    made: dict[bool, Tokenizer] = {}
    for adds in (False, True):
        if request.param == "hf":
            made[adds] = hf_json.load(SafetensorsCheckpoint(write_tiny_llama(folder / str(adds), add_bos=adds)))
        else:
            made[adds] = gguf_tokenizer.load(GgufCheckpoint(write_tiny_gguf(folder / f"{adds}.gguf", add_bos=adds)))
    return made


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": BOS}, origin="the test")


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("written", "count"), [("{{ bos_token }}", 1), ("", 0)])
def test_h_d1_a_rendered_chat_has_the_bos_that_the_template_writes(
    tokenizers_by_bos: dict[bool, Tokenizer], adds: bool, written: str, count: int
) -> None:
    """T14: the template is the whole truth, whatever the tokenizer adds to a text."""
    prompt = encode_chat(tokenizers_by_bos[adds], template(written + CHATML), HELLO, now=0.0)
    assert prompt.ids.count(BOS_ID) == count
    assert prompt.ids[:1] == ((BOS_ID,) if count else (2,))
    assert tokenizers_by_bos[adds].decode(prompt.ids, skip_special=False) == prompt.text


@pytest.mark.parametrize(
    ("adds", "text", "add_special", "count"),
    [
        (True, "hello", True, 1),
        (True, f"{BOS}hello", True, 1),
        (True, "hello", False, 0),
        (True, f"{BOS}hello", False, 1),
        (False, "hello", True, 0),
        (False, f"{BOS}hello", True, 1),
        (True, "", True, 1),
        (True, BOS, True, 1),
    ],
)
def test_a_raw_text_gets_one_bos_at_most(
    tokenizers_by_bos: dict[bool, Tokenizer], adds: bool, text: str, add_special: bool, count: int
) -> None:
    """T14."""
    prompt = encode_raw(tokenizers_by_bos[adds], text, add_special)
    assert prompt.ids.count(BOS_ID) == count
    assert prompt.ids == (
        *[BOS_ID] * count,
        *tokenizers_by_bos[False].encode(text.removeprefix(BOS), add_special=False),
    )
    assert prompt.text == text


@pytest.mark.parametrize(("adds", "add_special"), [(False, True), (False, False), (True, False)])
def test_the_empty_raw_prompt_without_bos_is_refused(
    tokenizers_by_bos: dict[bool, Tokenizer], adds: bool, add_special: bool
) -> None:
    with pytest.raises(EmptyPrompt) as caught:
        encode_raw(tokenizers_by_bos[adds], "", add_special)
    assert (caught.value.code, caught.value.field) == ("empty_prompt", "prompt")


def test_the_empty_text_with_an_end_added_and_no_beginning_is_refused() -> None:
    """The rule asks for a BOS: an EOS alone is no prompt."""

    class OnlyEnd:
        adds_bos = False

        def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
            return [1] if add_special else []

    with pytest.raises(EmptyPrompt):
        encode_raw(OnlyEnd(), "")  # type: ignore[arg-type]  # what encoding needs, no more


def test_an_empty_message_runs_if_the_template_renders_tokens(tokenizers_by_bos: dict[bool, Tokenizer]) -> None:
    empty = [{"role": "user", "content": ""}]
    assert encode_chat(tokenizers_by_bos[False], template(CHATML), empty, now=0.0).ids
    for adds in (False, True):
        with pytest.raises(EmptyPrompt) as caught:
            encode_chat(tokenizers_by_bos[adds], template("{{ messages[0].content }}"), empty, now=0.0)
        assert caught.value.field == "messages"


def test_a_chat_without_a_template_names_the_flag(tokenizers_by_bos: dict[bool, Tokenizer]) -> None:
    """T20."""
    with pytest.raises(TemplateError, match="no chat template") as caught:
        encode_chat(tokenizers_by_bos[False], None, HELLO, now=0.0)
    assert "--chat-template-file" in str(caught.value.hint)


def test_h_d5_a_continued_prompt_ends_inside_the_turn(tokenizers_by_bos: dict[bool, Tokenizer]) -> None:
    """T15, in ids: no end of turn behind the content."""
    messages = [*HELLO, {"role": "assistant", "content": "1, 2, 3,"}]
    tok = tokenizers_by_bos[False]
    prompt = encode_chat(
        tok, template(CHATML), messages, add_generation_prompt=False, continue_final_message=True, now=0.0
    )
    tail = tok.encode("1, 2, 3,", add_special=False)
    assert list(prompt.ids[-len(tail) :]) == tail


def test_h_d10_a_kwarg_changes_the_ids(tokenizers_by_bos: dict[bool, Tokenizer]) -> None:
    plain = template(CHATML + "{{ extra }}")
    with_it, without = (
        encode_chat(tokenizers_by_bos[True], plain, HELLO, kwargs=kwargs, now=0.0)
        for kwargs in ({"extra": "zz", "other": 1}, {"other": 1})
    )
    assert len(with_it.ids) == len(without.ids) + len(tokenizers_by_bos[True].encode("zz", add_special=False))


HALVES = ("\ud83d", "a\ude00", "\ude00\ud83d", "\ud83d\ud83d\ude00", "😀\udfff")


@pytest.mark.parametrize("text", HALVES, ids=ascii)
@pytest.mark.parametrize("path", ["content", "role", "content[0].text"])
def test_h_a1_half_a_character_in_a_message_is_refused_by_its_path(
    tokenizers_by_bos: dict[bool, Tokenizer], path: str, text: str
) -> None:
    """A client that cuts texts by UTF-16 units: the model would read U+FFFD there, which nobody wrote."""
    parts: Any = [{"type": "text", "text": text}] if "[" in path else text
    last = {"role": "user", "content": "hi", path.split("[")[0]: parts}
    with pytest.raises(RequestError, match="half a character") as caught:
        encode_chat(tokenizers_by_bos[False], template(CHATML), [{"role": "user", "content": "x"}, last], now=0.0)
    assert caught.value.field == f"messages[1].{path}"


@pytest.mark.parametrize("text", HALVES, ids=ascii)
def test_h_a1_half_a_character_in_a_raw_prompt_is_refused(tokenizers_by_bos: dict[bool, Tokenizer], text: str) -> None:
    with pytest.raises(RequestError, match="half a character"):
        encode_raw(tokenizers_by_bos[False], text)


def test_both_halves_of_a_character_are_the_character(tokenizers_by_bos: dict[bool, Tokenizer]) -> None:
    tokenizer = tokenizers_by_bos[False]
    assert encode_raw(tokenizer, "\ud83d\ude42").ids == encode_raw(tokenizer, "🙂").ids


@pytest.mark.parametrize("ids", [[0, 319], (5,), np.array([1, 2], np.int32), iter([3])])
def test_ids_are_taken_as_given(ids: Any) -> None:
    """T14."""
    checked = check_ids(ids, 320)
    assert all(type(value) is int for value in checked)
    assert checked in {(0, 319), (5,), (1, 2), (3,)}


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, [1], -1, 320, 2**40, 10**200, np.bool_(True), np.float32(1)])
def test_an_id_that_is_none_is_named_by_its_place(bad: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_ids([1, 2, bad], 320)
    assert caught.value.field == "prompt[2]"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("ids", ["12", b"12", None, 5, {1: 2}])
def test_ids_must_be_a_list(ids: Any) -> None:
    with pytest.raises(RequestError, match="list of token ids"):
        check_ids(ids, 320)


def test_no_ids_are_an_empty_prompt() -> None:
    with pytest.raises(EmptyPrompt):
        check_ids([], 320)


def test_h_d9_the_default_models_prompts_are_the_reference_ones(smollm2_path: Path) -> None:
    """H-D9: ids of rendered chats and of raw texts equal those of the reference, and nothing of it is imported."""
    checkpoint = GgufCheckpoint(smollm2_path)
    tok, chat = gguf_tokenizer.load(checkpoint), select_template(checkpoint)
    references = {
        case["id"]: case["prompt_ids"] for case in json.loads((GOLDEN / "smollm2-135m.json").read_text())["cases"]
    }
    for case in json.loads((GOLDEN / "prompts.json").read_text(encoding="utf-8")):
        if "messages" in case:
            prompt = encode_chat(tok, chat, case["messages"], now=0.0)
        else:
            prompt = encode_raw(tok, case["prompt"])
        assert list(prompt.ids) == references[case["id"]], case["id"]
    assert "transformers" not in sys.modules


@pytest.mark.parametrize("place", [0, 1, 2])
def test_h_d8_the_default_model_keeps_a_system_message_anywhere(smollm2_path: Path, place: int) -> None:
    chat = select_template(GgufCheckpoint(smollm2_path))
    assert chat is not None
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    messages.insert(place, {"role": "system", "content": "Speak like a pirate."})
    assert "Speak like a pirate." in chat.render(messages, now=0.0)


def test_h_d3_the_default_model_takes_only_an_assistant_message(smollm2_path: Path) -> None:
    chat = select_template(GgufCheckpoint(smollm2_path))
    assert chat is not None
    assert chat.render([{"role": "assistant", "content": "I begin."}], now=0.0).endswith("<|im_start|>assistant\n")
