"""The Jinja environment in which every chat template is compiled and run, wherever the template came from.

Immutable and without loaders. Beyond Jinja's own sandbox an unsafe attribute raises at once instead of printing
nothing, what draws random numbers is taken out, and one render is bounded in steps and in characters. Imported only to
render.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 300_000  # turns of loops and calls of macros, about a second; 4,096 messages take a few each
MAX_CHARACTERS: Final = 1 << 25  # printed in one render, also into variables
MAX_POWER_BITS: Final = 4096


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt its body is ordinary template."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Has every loop and macro report its turns, and every `~` its size, to the environment."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node, nodes.Concat):
            return _call("joined", node.nodes)
        if isinstance(node, nodes.For) and node.test is not None:  # items that a condition drops are turns too
            node.test = nodes.And(_call("step", []), node.test)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            node.body.insert(0, nodes.ExprStmt(_call("step", [])))
        return node


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment. Renders in several threads do not share their meters."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            finalize=self.printed,
        )
        self._meter = threading.local()
        self.filters["tojson"] = tojson
        for name in ("center", "indent"):
            self.filters[name] = _narrow(self.filters[name])
        del self.filters["random"], self.globals["lipsum"]  # equal requests give equal prompts

    def compiled(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError, or RecursionError for a template nested too deep."""
        tree = _Metering().visit(self.parse(source))
        for node in tree.find_all(nodes.Node):
            node.lineno = node.lineno or 1
        code = self.compile(tree.set_environment(self))
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def takes_for_granted(self, source: str, name: str) -> bool:
        """Whether a template reads a variable and nowhere says what it is when nobody gives it: it never asks whether
        it is defined, sets it, or gives a default."""
        tree = self.parse(source)
        used = [found for found in tree.find_all(nodes.Name) if found.name == name]
        asked = [
            *(test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")),
            *(default.node for default in tree.find_all(nodes.Filter) if default.name in ("default", "d")),
        ]
        return bool(used) and not any(found.ctx != "load" or any(found is node for node in asked) for found in used)

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Whatever the template raises comes through as it is."""
        self._meter.steps, self._meter.characters = 0, 0
        parts: list[str] = []
        length = 0
        for part in template.generate(variables):
            length += len(part)
            if length > MAX_CHARACTERS:
                _refuse_size()
            parts.append(part)
        return "".join(parts)

    def step(self) -> bool:
        self._meter.steps += 1
        if self._meter.steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        return True

    def printed(self, value: Any) -> Any:
        """Counts the text of an expression; constants pass here once more while the template is compiled."""
        text = str(value)
        used = getattr(self._meter, "characters", 0) + len(text)
        if used > MAX_CHARACTERS:
            _refuse_size()
        self._meter.characters = used
        return text

    def joined(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        if sum(map(len, texts)) > MAX_CHARACTERS:
            _refuse_size()
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
                raise SecurityError(f"a power of more than {MAX_POWER_BITS} bits")
        elif _length(operator, left, right) > MAX_CHARACTERS:
            _refuse_size()
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(function, "__self__", None), str):  # center, ljust, zfill ...
            _refuse_width(*args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")


def _length(operator: str, left: Any, right: Any) -> int:
    """Items of `left + right` or `left * right` where these are sequences, else 0."""
    sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    if sizes[0] is not None and isinstance(right, int):
        return sizes[0] * right
    return sizes[1] * left if sizes[1] is not None and isinstance(left, int) else 0


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses to pad a text beyond what a template may write."""

    @wraps(function)
    def narrow(value: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_width(*args, *kwargs.values())
        return function(value, *args, **kwargs)

    return narrow


def _refuse_width(*arguments: Any) -> None:
    if any(isinstance(argument, int) and argument > MAX_CHARACTERS for argument in arguments):
        _refuse_size()


def _refuse_size() -> NoReturn:
    raise SecurityError(f"the template writes more than {MAX_CHARACTERS} characters")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter writes <, >, & and ' as escapes for HTML. The signature is Hugging Face's."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
