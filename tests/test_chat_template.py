"""Chat templates: what is rendered, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny_checkpoint import CHATML

from mlxcel.errors import RequestError, TemplateError, UnsupportedField
from mlxcel.text.chat_template import MAX_WORDS, ChatTemplate
from mlxcel.text.messages import MAX_MESSAGES, MAX_PARTS

NOON = 1_700_000_000.0
SYSTEM_FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}[S]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)


def template(source: str, **settings: Any) -> ChatTemplate:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<img>"}
    return ChatTemplate(source, special_tokens=tokens, origin="the test", **settings)


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER = [message("user", "hello there")]


def rendered(source: str, messages: Any = None, **settings: Any) -> str:
    """The template's text, followed by the user's: what a template of the test leaves out is not its point."""
    return template(source, keeps_texts=False).render(USER if messages is None else messages, now=NOON, **settings)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ image_token }}{{ pad_token }}", "<s><img>"),
        ("{%- for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{{ {'é<b>': [1, none]} | tojson }}", '{"é<b>": [1, null]}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, indent=1, separators=(',', ':'), sort_keys=true) }}",
         '{\n "a":"\\u00e9",\n "b":1\n}'),
        ("{{ messages[0].content.upper().split(' ')[0].strip('H') }}", "ELLO"),
        ("{{ messages[0].items() | list | length }}{{ messages[0].get('x', 7) }}{{ [3, 4].index(4) }}", "271"),
        ("{{ '{}-{:>3}'.format('a', 'b') }}{{ '%s' % 'c' }}{{ 1 ~ none ~ 'd' ~ nothing }}", "a-  bc1Noned"),
        ("{% generation %}{% set x = 3 %}y{% endgeneration %}{{ x }}", "y3"),
        ("{% macro m(a) %}<{{ a }}{{ caller() }}>{% endmacro %}{% call m(1) %}in{% endcall %}", "<1in>"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2, 3] if i != 2 %}{% set ns.n = ns.n + i %}{% endfor %}"
         "{{ ns.n }}", "4"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}", "123"),
        ("{% for x in [] %}a{% else %}none{% endfor %}{{ tools is none }}{{ documents is none }}", "noneTrueTrue"),
        ("{{ add_generation_prompt }}", "True"),
        ("{{ 'a<b' ~ '&' }}{{ [1, 2] + [3] }}{{ 'ab' * 2 }}{{ 2 ** 10 }}", "a<b&[1, 2, 3]abab1024"),
    ],
)  # fmt: skip
def test_what_templates_may_use(source: str, text: str) -> None:
    """T13."""
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__ }}",
        "{% for m in messages %}{{ m.content.__class__ }}{% endfor %}",
        "{{ [messages] | map(attribute='__class__') | list }}",
        "{% macro m() %}{% endmacro %}{{ m.__call__ }}",
    ],
)
def test_h_p1_python_behind_the_template_is_out_of_reach(source: str) -> None:
    """T13 and T17: stopped with an error, not printed as nothing."""
    with pytest.raises(TemplateError, match="unsafe"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ messages.clear() }}", "{{ messages[0].update(role='x') }}",
     "{% set _ = messages[0].pop('role') %}", "{% do messages.pop() %}", "{{ messages[0].setdefault('x', 1) }}"],
)  # fmt: skip
def test_h_p1_a_template_changes_nothing(source: str) -> None:
    messages = [message("user", "hello there")]
    with pytest.raises(TemplateError):
        rendered(source, messages)
    assert messages == USER


@pytest.mark.parametrize(
    "source",
    ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends 'x' %}", "{{ lipsum() }}",
     "{{ messages | random }}"],
)  # fmt: skip
def test_nothing_is_loaded_or_drawn(source: str) -> None:
    """T13 and T18."""
    with pytest.raises(TemplateError):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = y %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * ['x'] }}",
        "{{ messages[0].content.center(10**10) }}",
        "{{ messages[0].content.ljust(width=10**10) if false else 'x'.zfill(10**10) }}",
        "{{ messages[0].content | center(width=10**10) }}",
        "{{ messages[0].content | indent(10**10, first=true) }}",
        "{{ 2 ** (10 ** 9) }}",
        "{% set x %}" + "long literal " * 5000 + "{% endset %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "(" * 100 + "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
)
def test_endless_templates_end(source: str) -> None:
    """T17: recursion, loops and growth are bounded, and are errors of the request."""
    with pytest.raises(TemplateError):
        rendered(source)


def test_a_bound_counts_for_one_render_alone() -> None:
    counting = template(
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    )
    with pytest.raises(TemplateError, match="steps"):
        counting.render(USER, kwargs={"n": 1000}, now=NOON)
    with ThreadPoolExecutor(4) as pool:
        renders = [pool.submit(counting.render, USER, kwargs={"n": 300}, now=NOON) for _ in range(4)]
    assert [render.result() for render in renders] == ["hello there"] * 4


@pytest.mark.parametrize("words", ["Conversation roles must alternate user/assistant", "ärger 😀", "x" * 5000])
def test_the_templates_own_words_are_the_error(words: str) -> None:
    """T17: at most 512 characters of them."""
    with pytest.raises(TemplateError) as caught:
        rendered(f"{{{{ raise_exception('{words}') }}}}")
    assert caught.value.message == words[:MAX_WORDS]
    assert (caught.value.code, caught.value.field) == ("template_error", "messages")


@pytest.mark.parametrize(
    "source",
    ["{{ nothing.x }}", "{{ 1 / 0 }}", "{{ 1 + 'a' }}", "{{ nothing() }}", "{{ nothing | tojson }}", "{% if",
     "{{ messages[0].content + 5 }}", "{{ 'a' | no_such_filter }}", "{{ messages[7].content.x }}", "{% endfor %}",
     "{{ '" + "y" * 2000 + "'.x.y.z }}", "{{ raise_exception() }}"],
)  # fmt: skip
def test_any_failure_is_a_template_error(source: str) -> None:
    """T17: bounded, and with the place the template is from where its own words do not tell."""
    with pytest.raises(TemplateError) as caught:
        rendered(source)
    assert 0 < len(caught.value.message) <= MAX_WORDS


def test_h_d3_only_an_assistant_message_is_the_templates_business() -> None:
    messages = [message("assistant", "I begin.")]
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}"
    with pytest.raises(TemplateError, match=r"^the user begins$"):
        template(refusing).render(messages, now=NOON)
    prompt = template(CHATML).render(messages, now=NOON)
    assert prompt == "<|im_start|>assistant\nI begin.<|im_end|>\n<|im_start|>assistant\n"


def test_h_d7_no_message_is_refused_and_the_next_request_works() -> None:
    chatml = template(CHATML)
    with pytest.raises(RequestError, match="at least one") as caught:
        chatml.render([], now=NOON)
    assert caught.value.field == "messages"
    assert "hello there" in chatml.render(USER, now=NOON)


@pytest.mark.parametrize("prefix", ["1, 2, 3,", "", "ends with space ", "continuehere", "long " * 500])
@pytest.mark.parametrize("source", [CHATML, CHATML.replace("message['content']", "message['content'] | trim")])
def test_h_d5_a_continued_message_stays_open(prefix: str, source: str) -> None:
    """T15: the prompt ends with the content, a space at its end included."""
    messages = [*USER, message("assistant", prefix)]
    before = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    prompt = template(source).render(messages, add_generation_prompt=False, continue_final_message=True, now=NOON)
    assert prompt == before + prefix
    assert messages[-1]["content"] == prefix


def test_h_d5_both_flags_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude") as caught:
        template(CHATML).render([*USER, message("assistant", "1,")], continue_final_message=True, now=NOON)
    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize("last", ["user", "system", "tool"])
def test_only_the_assistants_message_is_continued(last: str) -> None:
    """T15."""
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(
            [*USER, message(last, "x")], add_generation_prompt=False, continue_final_message=True, now=NOON
        )
    assert caught.value.field == "messages[1].role"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].content }}{{ messages[1].content | upper }}",
        "{{ messages[0].content }}{{ messages[1].content.split(',')[-1] }}",
        "{{ messages[0].content }}{{ messages[1].content | replace('1', 'one') }}",
        "{{ messages[0].content }}{{ messages[1].content | tojson }}",
    ],
)
def test_a_template_that_rewrites_the_last_message_cannot_continue_it(source: str) -> None:
    """T15: the sentinel is not found, or something else than the content stands before it."""
    with pytest.raises(TemplateError, match="continued"):
        template(source).render(
            [*USER, message("assistant", 'She said "1, 2')],
            add_generation_prompt=False,
            continue_final_message=True,
            now=NOON,
        )


def test_a_template_that_writes_the_last_message_twice_leaves_no_mark() -> None:
    """T15: the prompt is cut behind the last place, and nothing but the content stands in the others."""
    source = "{{ messages | map(attribute='content') | join('/') }}|" + CHATML
    prompt = template(source).render(
        [*USER, message("assistant", "1,")], add_generation_prompt=False, continue_final_message=True, now=NOON
    )
    assert prompt == "hello there/1,|<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n1,"


def test_without_generation_prompt_the_last_turn_is_closed() -> None:
    assert template(CHATML).render(USER, add_generation_prompt=False, now=NOON).endswith("hello there<|im_end|>\n")


def test_h_d10_kwargs_reach_the_template_and_unknown_ones_are_harmless() -> None:
    source = (
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    thinking = template(source)
    assert thinking.render(USER, now=NOON) == "hello there"
    assert thinking.render(USER, kwargs={"enable_thinking": False}, now=NOON) == "hello there<think></think>"
    assert thinking.render(USER, kwargs={"unheard_of": {"a": [1]}}, now=NOON) == "hello there"
    assert rendered("{{ documents[0] }}", kwargs={"documents": ["d"]}) == "d"


@pytest.mark.parametrize(
    ("source", "given", "wanted"),
    [
        ("{% if enable_thinking %}on{% else %}off{% endif %}", None, "on"),
        ("{% if enable_thinking %}on{% else %}off{% endif %}", False, "off"),
        ("{{ 'on' if enable_thinking else 'off' }}", None, "on"),
        ("{{ 'off' if not enable_thinking else 'on' }}", None, "on"),
        ("{{ 'off' if enable_thinking is defined and enable_thinking is false else 'on' }}", None, "on"),
        ("{{ 'off' if enable_thinking is defined and enable_thinking is false else 'on' }}", False, "off"),
        ("{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}", None, "off"),
        ("{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}", True, "on"),
        ("{% if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif %}"
         "{{ 'on' if enable_thinking else 'off' }}", None, "off"),
        ("{% if enable_thinking is undefined %}off{% else %}on{% endif %}", None, "off"),
        ("{{ 'on' if enable_thinking | default(false) else 'off' }}", None, "off"),
        ("{{ 'on' if enable_thinking | d(true) else 'off' }}", None, "on"),
        ("{{ 'on' if thinking else 'off' }}", None, "off"),
        ("{{ messages[0].enable_thinking is defined }}", None, "False"),
    ],
)  # fmt: skip
def test_thinking_is_on_where_the_template_has_no_default_of_its_own(source: str, given: Any, wanted: str) -> None:
    """T11: request > the template's own default > true where the template knows it."""
    kwargs = None if given is None else {"enable_thinking": given}
    assert rendered(source, kwargs=kwargs) == wanted


def test_the_requests_kwargs_win_over_the_operators() -> None:
    """T11 and T16: name by name."""
    both = template(
        "{{ messages[0].content }} {{ enable_thinking }} {{ tone }}", kwargs={"enable_thinking": False, "tone": 1}
    )
    assert both.render(USER, now=NOON) == "hello there False 1"
    assert both.render(USER, kwargs={"enable_thinking": True}, now=NOON) == "hello there True 1"
    assert both.render(USER, kwargs={"tone": 2}, now=NOON) == "hello there False 2"
    with pytest.raises(RequestError):
        template("{{ tone }}", kwargs={"messages": []})


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "pad_token",
     "image_token", "raise_exception", "strftime_now", "additional_special_tokens"],
)  # fmt: skip
def test_reserved_names_are_refused(name: str) -> None:
    """T16."""
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(USER, kwargs={"harmless": 1, name: None}, now=NOON)
    assert caught.value.field == f"chat_template_kwargs.{name}"


def test_kwargs_must_be_an_object() -> None:
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(USER, kwargs=["enable_thinking"], now=NOON)  # type: ignore[arg-type]  # as JSON may be
    assert caught.value.field == "chat_template_kwargs"


def test_h_d12_requests_within_a_second_get_the_same_prompt() -> None:
    """T18: whole seconds of the time that is handed in."""
    clock = template("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }} {{ messages[0].content }}")
    first, same, later = (clock.render(USER, now=NOON + extra) for extra in (0.0, 0.999, 1.0))
    assert first == same != later
    assert ".000000 " in first
    assert template("{{ strftime_now('%Y') }}{{ messages[0].content }}").render(USER, now=NOON) == "2023hello there"


def test_h_d8_a_system_message_that_is_dropped_is_an_error() -> None:
    """T19: the error names the message; one that the template writes, wherever it writes it, is fine."""
    messages = [*USER, message("assistant", "Hi."), message("system", "Speak like a pirate."), message("user", "go on")]
    with pytest.raises(RequestError, match="pirate") as caught:
        template(SYSTEM_FIRST_ONLY).render(messages, now=NOON)
    assert caught.value.field == "messages[2]"
    assert "Speak like a pirate." in template(CHATML).render(messages, now=NOON)
    hoisting = "{% for m in messages if m.role == 'system' %}{{ m.content }} {% endfor %}" + SYSTEM_FIRST_ONLY
    assert template(hoisting).render(messages, now=NOON).startswith("Speak like a pirate. ")


@pytest.mark.parametrize(
    ("messages", "lost"),
    [
        ([message("user", "first"), message("user", "second")], 0),
        ([message("user", "same"), message("user", "same")], 1),
        ([message("developer", "be brief"), message("user", "hi")], 0),
        ([message("system", "be brief"), message("user", "please be brief")], 0),
    ],
)
def test_dropped_texts_are_found(messages: list[dict[str, Any]], lost: int) -> None:
    """T19, also where another message has the same words."""
    with pytest.raises(RequestError) as caught:
        template("{{ messages[-1].content }}").render(messages, now=NOON)
    assert caught.value.field == f"messages[{lost}]"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content | trim }}", [message("user", "  padded \n"), message("user", " ")]),
        ("{{ messages[0].content }}", [*USER, message("assistant", "dropped"), message("tool", "dropped")]),
        (
            "{% for m in messages | reverse %}{{ m.content }};{% endfor %}",
            [message("user", t) for t in ("ab", "b", "a")],
        ),
    ],
)
def test_what_is_not_lost_is_not_refused(source: str, messages: list[dict[str, Any]]) -> None:
    """T19: white space at the ends does not count, nor do other roles, nor the order."""
    template(source).render(messages, now=NOON)


def test_a_template_that_rewrites_texts_is_exempt_by_data() -> None:
    """T19."""
    shouting = "{{ messages[0].content | upper }}"
    with pytest.raises(RequestError, match="does not appear"):
        template(shouting).render(USER, now=NOON)
    assert template(shouting, keeps_texts=False).render(USER, now=NOON) == "HELLO THERE"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered("{{ messages[0].content }}", [message("user", parts)]) == "one\ntwo"
    assert rendered("{{ messages[0].content | length }}", [message("user", [])]) == "0"


def test_other_keys_reach_the_template_and_null_beside_tool_calls_is_empty() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [message("assistant", None, tool_calls=[call], name="Bo", reasoning_content="hm")]
    source = (
        "{{ messages[0].content }}|{{ messages[0].tool_calls[0].function.name }}|{{ messages[0].reasoning_content }}"
    )
    assert rendered(source, messages) == "|f|hm"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        (None, "messages"),
        (USER * (MAX_MESSAGES + 1), "messages"),
        ([*USER, "hello"], "messages[1]"),
        ([{1: 2}], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([message("", "x")], "messages[0].role"),
        ([message(5, "x")], "messages[0].role"),  # type: ignore[arg-type]  # as JSON may be
        ([*USER, {"role": "user"}], "messages[1].content"),
        ([*USER, message("assistant", None)], "messages[1].content"),
        ([*USER, message("assistant", None, tool_calls=[])], "messages[1].content"),
        ([message("user", 5)], "messages[0].content"),
        ([message("user", {"type": "text", "text": "x"})], "messages[0].content"),
        ([message("user", [{"type": "text", "text": "x"}] * (MAX_PARTS + 1))], "messages[0].content"),
        ([message("user", ["x"])], "messages[0].content[0]"),
        ([message("user", [{"text": "x"}])], "messages[0].content[0].type"),
        ([message("user", [{"type": "text", "text": "x"}, {"type": "text"}])], "messages[0].content[1].text"),
        ([message("user", [{"type": "text", "text": None}])], "messages[0].content[0].text"),
        ([message("user", "x", name=3)], "messages[0].name"),
        ([message("tool", "x", tool_call_id=[])], "messages[0].tool_call_id"),
        ([message("assistant", "x", tool_calls={})], "messages[0].tool_calls"),
        ([message("assistant", "x", tool_calls=[1])], "messages[0].tool_calls"),
    ],
)
def test_a_wrong_shape_is_named_by_its_path(messages: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        template(CHATML).render(messages, now=NOON)
    assert caught.value.field == field
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "x" * 1000])
def test_parts_other_than_text_are_refused_by_name(kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:"}}
    with pytest.raises(UnsupportedField, match=kind[:50]) as caught:
        template(CHATML).render([message("user", [{"type": "text", "text": "x"}, part])], now=NOON)
    assert caught.value.field == "messages[0].content[1].type"
    assert len(caught.value.message) < 200


def test_jinja_is_imported_by_the_first_render_only() -> None:
    program = (
        "import sys\n"
        "from mlxcel.text import chat_template, end_ids, generation_config, prompt\n"
        "template = chat_template.ChatTemplate('{{ messages[0].content }}', special_tokens={}, origin='test')\n"
        "assert 'jinja2' not in sys.modules\n"
        "template.render([{'role': 'user', 'content': 'x'}], now=0.0)\n"
        "assert 'jinja2' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
