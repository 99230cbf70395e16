"""What a template may take: work is counted, never timed, and refused before memory is taken for it (T13, T17)."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel.errors import TemplateError
from mlxcel.text.chat_template import ChatTemplate
from mlxcel.text.messages import MAX_MESSAGES

USER = [{"role": "user", "content": "hello there"}]

DOUBLED = {
    "lists": "{% set n.x = [n.x, n.x] %}",
    "tuples": "{% set n.x = (n.x, n.x) %}",
    "dicts": "{% set n.x = dict(a=n.x, b=n.x) %}",
    "namespaces": "{% set n.x = namespace(a=n.x, b=n.x) %}",
    "arguments": "{{ keep(n.x, n.x) }}",
}
"""60 turns make 2 ** 60 places of one value, in little memory."""

REFUSED = {
    "multiplied numbers": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "replace, filter": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) | length }}",
    "replace, method": "{{ ('a' * 10**6).replace('', 'b' * 10**6) | length }}",
    "join, method": "{{ ('x' * 10**6).join(['a'] * 10**4) | length }}",
    "join, filter": "{{ (['a'] * 10**4) | join('x' * 10**6) | length }}",
    "join, an iterator": "{{ ('x' * 10**6).join(range(9999) | map('string')) | length }}",
    "join, long items": "{{ (['x' * 10**6] * 10**4) | join | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "batch": "{{ [1] | batch(10**10, 1) | list | length }}",
    "indent": "{{ ('a\n' * 10**6) | indent(4000) | length }}",
    "indent by text": "{{ ('a\n' * 10**6) | indent('x' * 10**6) | length }}",
    "round": "{{ 3 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 10**4] * 10**4) | sum(start=[]) | length }}",
    "expandtabs": "{{ ('\t' * 10**6).expandtabs(4000) | length }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) | length }}",
    "a width in %": "{{ '%10000000000d' % 1 }}",
    "a width for %": "{{ '%*d' % (10**10, 1) }}",
    "a width in format": "{{ '{:>10000000000}'.format('a') }}",
    "a width for format": "{{ '{:>{}}'.format('a', 10**10) }}",
    "a width in the filter": "{{ '%10000000000d' | format(1) }}",
    "many widths": "{{ ('{:>4000}' * 10**5).format(*(['a'] * 10**5)) | length }}",
    "many fields": "{{ ('%(a)s' * 10**5) % {'a': 'x' * 10**5} }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') | length }}",
    "padded bytes": "{{ 'a'.encode().ljust(10**10) | length }}",
    "tojson": "{{ [[1]] | tojson(indent=10**10) }}",
    "tojson by text": "{{ [1] | tojson(indent='x' * 10**6) }}",
    "tojson, deep": "{{ ([[[[[[[[1]]]]]]]] * 10**3) | tojson(indent=4000) | length }}",
    "digits": "{{ ('f' * 10**7) | int(base=16) }}",
    "kept texts": "{% set n = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set n.l = n.l + [('x' * 1000000) ~ i] %}{% endfor %}",
    "kept lists": "{% set big = range(99999) | list %}{% set n = namespace(l=[]) %}{% for i in range(99999) %}"
    "{% set n.l = n.l + [big[:]] %}{% endfor %}",
    "a long text, often": "{% set a = 'x' * 10**7 %}{% for i in range(9**5) %}{% set x = a.upper() %}{% endfor %}",
    "comparisons": "{% set a = 'x' * 10**7 %}{% for i in range(9**5) %}{% set x = a ~ 'z' == a ~ 'y' %}{% endfor %}",
    "searches": "{% set big = range(99999) | list %}{% for i in range(9**5) %}{% set x = 'a' in big %}{% endfor %}",
    "filters": "{% for i in range(9**5) %}{% set x = range(99999) | list %}{% endfor %}",
    "copies": "{% set big = range(99999) | list %}{% for i in range(9**5) %}{% set x = big[:] %}{% endfor %}",
    "a growing dict": "{% set n = namespace(d={}) %}{% for i in range(99999) %}"
    "{% set n.d = dict(n.d, **{'k' ~ i: 1}) %}{% endfor %}",
    "text between tags": "{% set y %}{% for i in range(99999) %}" + "lorem " * 9999 + "{% endfor %}{% endset %}",
    "text in a macro": "{% macro f(n) %}" + "lorem " * 9999 + "{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(20) | length }}",
    "split": "{{ ('a ' * 10**7).split() | length }}",
    "characters": "{{ ('x' * 10**7) | list | length }}",
    "items": "{{ messages * 10**9 }}",
    "nesting": "{% set n = namespace(x=()) %}{% for i in range(9999) %}{% set n.x = (n.x,) %}{% endfor %}{{ n.x }}",
}


def render(source: str, messages: Any = None) -> str:
    template = ChatTemplate(source, special_tokens={}, origin="the test", keeps_texts=False)
    return template.render(USER if messages is None else messages, now=0.0)


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_would_never_end_is_refused_by_its_work(source: str) -> None:
    """The words are the sandbox's own: neither memory nor time ran out."""
    with pytest.raises(TemplateError, match="SecurityError"):
        render(source)


@pytest.mark.parametrize("doubled", DOUBLED.values(), ids=DOUBLED)
def test_values_that_stand_in_themselves_many_times_are_not_followed(doubled: str) -> None:
    """Printing, comparing and hashing go through every place of a value, so that it is weighed as it is made."""
    keep = "{% macro keep() %}{% set n.x = varargs %}{% endmacro %}"
    made = "{% set n = namespace(x=('x',)) %}" + keep + "{% for i in range(60) %}" + doubled + "{% endfor %}"
    with pytest.raises(TemplateError, match="work"):
        render(made + "{{ n.x ~ (n.x == [n.x, 1]) }}")


@pytest.mark.parametrize("name", ["random", "pprint", "striptags", "urlize", "wordwrap", "xmlattr"])
def test_filters_for_web_pages_are_not_there(name: str) -> None:
    with pytest.raises(TemplateError, match="No filter"):
        render("{{ messages[0].content | " + name + " }}")


def test_the_longest_conversation_is_rendered() -> None:
    """The bounds are for templates, not for people: all the messages there may be, four million characters, and a
    template that looks at all of them for some, adds its prompt up piece by piece, and compares much."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"message {i} " + "lorem ipsum " * 80}
        for i in range(MAX_MESSAGES)
    ]
    source = (
        "{% macro turn(message) %}<{{ message.role }}>{{ message.content | trim }}{% endmacro %}"
        "{% set ns = namespace(last=0, parts=[]) %}"
        "{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.last %}"
        "{% set ns.last = messages | length - loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set words = m.content.split('lorem') %}"
        "{% if m.role in ['system', 'tool'] or m.content.startswith('x') or '</think>' in m.content %}-{% endif %}"
        "{% if m == messages[-1] %}!{% endif %}{{ turn(m) ~ (words | length) }}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | unique | join(',') }}"
    )
    text = render(source, messages)
    assert text.endswith(f"!<assistant>message 4095 {'lorem ipsum ' * 79}lorem ipsum81user")
    assert len(text) > 4_000_000
