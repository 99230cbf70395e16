"""Conversations in Anthropic's shape: what becomes of their blocks, and which are refused."""

import pytest

from mlxcel.errors import RequestError, UnsupportedField
from mlxcel.server.message_blocks import asked_conversation

ASKED = {"role": "user", "content": "Hello"}
TEXT = {"type": "text", "text": "Hello"}


def test_the_system_comes_first_and_blocks_stay_apart():
    blocks = [{**TEXT, "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "there", "citations": None}]
    conversation = asked_conversation([{"role": "user", "content": blocks}], system=[TEXT])
    assert conversation.messages == [
        {"role": "system", "content": [TEXT]},
        {"role": "user", "content": [TEXT, {"type": "text", "text": "there"}]},
    ]
    assert (conversation.add_generation_prompt, conversation.continue_final_message) == (True, False)
    assert asked_conversation([ASKED], system="Be brief").messages[0] == {"role": "system", "content": "Be brief"}
    for nothing in (None, "", []):
        assert asked_conversation([ASKED], system=nothing).messages == [ASKED]


def test_a_last_message_of_the_assistant_is_gone_on_with():
    conversation = asked_conversation([ASKED, {"role": "assistant", "content": "1, 2,"}])
    assert (conversation.add_generation_prompt, conversation.continue_final_message) == (False, True)


def test_disabled_thinking_reaches_the_template():
    assert asked_conversation([ASKED], kwargs={"tone": "dry"}).chat_template_kwargs == {"tone": "dry"}
    assert asked_conversation([ASKED], thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("messages", "more", "error", "field"),
    [
        (None, {}, RequestError, "messages"),
        ("Hello", {}, RequestError, "messages"),
        ([], {}, RequestError, "messages"),
        ([ASKED] * 4097, {}, RequestError, "messages"),
        (["Hello"], {}, RequestError, "messages[0]"),
        ([{"content": "a"}], {}, RequestError, "messages[0].role"),
        ([ASKED, {"role": "system", "content": "a"}], {}, RequestError, "messages[1].role"),
        ([{"role": "user"}], {}, RequestError, "messages[0].content"),
        ([{"role": "user", "content": 5}], {}, RequestError, "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], {}, RequestError, "messages[0].content"),
        ([{"role": "user", "content": [TEXT] * 257}], {}, RequestError, "messages[0].content"),
        ([{"role": "user", "content": ["a"]}], {}, RequestError, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "a"}]}], {}, RequestError, "messages[0].content[0].type"),
        ([{"role": "user", "content": [TEXT, {"type": "text"}]}], {}, RequestError, "messages[0].content[1].text"),
        ([ASKED], {"system": 5}, RequestError, "system"),
        ([ASKED], {"system": [{"type": "image"}]}, UnsupportedField, "system[0].type"),
        ([ASKED], {"thinking": {"type": "enabled", "budget_tokens": 1024}}, UnsupportedField, "thinking.type"),
        ([ASKED], {"thinking": {"type": "adaptive"}}, UnsupportedField, "thinking.type"),
        ([ASKED], {"thinking": "off"}, RequestError, "thinking"),
        ([ASKED], {"thinking": {}}, RequestError, "thinking"),
    ],
)
def test_a_bad_conversation_is_refused_by_its_place(messages, more, error, field):
    """clients.md 3.4 and 3.5, and case H-D7."""
    with pytest.raises(error) as refused:
        asked_conversation(messages, **more)
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    "kind", ["image", "document", "tool_use", "tool_result", "thinking", "redacted_thinking", "search_result", "odd"]
)
def test_other_blocks_are_refused_by_name(kind):
    """clients.md 3.6: text alone is read; the message names the type and the place."""
    blocks = [TEXT, {"type": kind, "source": {"type": "base64"}}]
    with pytest.raises(UnsupportedField, match=rf"messages\[1\]\.content\[1\]\.type is '{kind}'") as refused:
        asked_conversation([ASKED, {"role": "user", "content": blocks}])
    assert refused.value.field == "messages[1].content[1].type"
