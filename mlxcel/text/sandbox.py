"""The Jinja environment in which every chat template is compiled and run, wherever the template came from.

Immutable and without loaders. Beyond Jinja's own sandbox an unsafe attribute raises at once instead of printing
nothing, what draws random numbers is taken out, and all that a render does is metered. Imported only to render.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlxcel.text.template_guards import (
    COMPARING_TESTS,
    DROPPED_FILTERS,
    guard_filter,
    guard_format,
    guard_method,
    guard_operator,
)
from mlxcel.text.template_work import CALL, CHARACTER, MAX_CHARACTERS, NODE, Meter, refuse_size


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; for a prompt its body is ordinary template."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Has loops, macros, and what is no call, operator or filter report to the environment."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node, nodes.Concat):
            return _call("joined", node.nodes)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            cut = node.arg
            return _call("cut", [node.node, *(part or nodes.Const(None) for part in (cut.start, cut.stop, cut.step))])
        if isinstance(node, nodes.Compare):
            node.expr = _weighed(node.expr)
            for operand in node.ops:
                operand.expr = _weighed(operand.expr)
        elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _weighed(node)
        elif isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            units = nodes.Const(_units(node))
            if isinstance(node, nodes.For) and node.test is not None:  # items that a condition drops are turns too
                node.test = nodes.And(_call("step", [units]), node.test)
            node.body.insert(0, nodes.ExprStmt(_call("step", [units])))
        return node


def _units(node: nodes.Node) -> int:
    """Of one turn: for its nodes, and for the text between them."""
    inner = list(node.find_all(nodes.Node))
    return NODE * len(inner) + CHARACTER * sum(len(n.data) for n in inner if isinstance(n, nodes.TemplateData))


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("weighed", [node])


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment. Renders in several threads do not share their meters."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            finalize=self.printed,
        )
        self._local = threading.local()
        self.filters["tojson"] = tojson
        for name in DROPPED_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._metered_filter(name, function)
        for name in COMPARING_TESTS:
            self.tests[name] = self._metered_test(cast("Callable[..., Any]", self.tests[name]))
        del self.globals["lipsum"]  # equal requests give equal prompts

    @property
    def _meter(self) -> Meter:
        """Of the render or compilation that this thread is in."""
        meter: Meter = self._local.meter
        return meter

    def compiled(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError, or RecursionError for a template nested too deep."""
        self._local.meter = Meter()  # what is constant is computed here
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
        self._local.meter = Meter()
        parts: list[str] = []
        length = 0
        for part in template.generate(variables):
            length += len(part)
            if length > MAX_CHARACTERS:
                refuse_size()
            parts.append(part)
        return "".join(parts)

    def step(self, units: int) -> bool:
        self._local.meter.step(units)
        return True

    def printed(self, value: Any) -> str:
        """The text of an expression; constants pass here while the template is compiled."""
        text = value if isinstance(value, str) else self._text(value)
        self._meter.write(text)
        return text

    def joined(self, *values: Any) -> str:
        texts = [value if isinstance(value, str) else self._text(value) for value in values]
        self._meter.room(sum(map(len, texts)))
        return "".join(texts)

    def weighed(self, value: Any) -> Any:
        self._meter.weigh(value)
        return value

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self._meter.grown(value[start:stop:step])

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # hashed each time
            self._meter.weigh(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        guard_operator(self._meter, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if owner is self:  # what the metering put into the template
            return function(*args)
        if isinstance(owner, str):  # it would go through them at once
            args = tuple(list(self._meter.counted(arg)) if isinstance(arg, Iterator) else arg for arg in args)
        given = [value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")]  # Jinja's own
        guard_method(self._meter, getattr(function, "__name__", ""), owner, [*args, *given])
        return self._meter.grown(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def metered(*args: Any, **kwargs: Any) -> str:
            guard_format(self._meter, value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return metered

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")

    def _text(self, value: Any) -> str:
        self._meter.room(self._meter.weigh(value))
        return str(value)

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or what else it asks Jinja for

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            values = list(args[leading:])
            guard_filter(self._meter, name, values, kwargs)
            return self._meter.grown(function(*args[:leading], *values, **kwargs))

        return metered

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any) -> Any:
            self._meter.charge(CALL)
            for arg in args:
                self._meter.weigh(arg)
            return function(*args)

        return metered


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter writes <, >, & and ' as escapes for HTML. The signature is Hugging Face's."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    parts: list[str] = []
    length = 0
    for part in encoder.iterencode(value):  # indentation grows with depth and number of items together
        length += len(part)
        if length > MAX_CHARACTERS:
            refuse_size()
        parts.append(part)
    return "".join(parts)
