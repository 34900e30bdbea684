"""Runs a template that came with a model, and so from strangers, without letting it out or letting it run away.

Jinja's sandbox already keeps templates from attributes, files and modules, and caps one ``range`` at 100,000.  What it
leaves open is work: nested loops, macros that call each other, strings doubled in a loop.  A ``Budget`` is charged for
each turn of a loop, each call and filter, and each character that is made; beyond it the template ends with an error.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # turns of loops, calls and filters in one rendering
MAX_CHARS = 1 << 28  # characters made in one rendering, intermediate strings counted
MAX_NUMBER = 100_000  # largest width, count or length that may be handed to a function
MAX_SECONDS = 10.0  # only for work that the counts above miss

_WIDE = re.compile(r"\d{6,}|\*")


class Budget:
    """Owns what one rendering has used.  Promises: ``SecurityError`` at the first use beyond a bound."""

    def __init__(self) -> None:
        self._steps = 0
        self._chars = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} steps: it probably loops without end")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")

    def text(self, chars: int) -> None:
        self._chars += chars
        if self._chars > MAX_CHARS:
            raise SecurityError(f"more than {MAX_CHARS} characters")


_budget: ContextVar[Budget] = ContextVar("octavo_template_budget")


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """The template's text, under a fresh budget; raises what the template raises."""
    token = _budget.set(Budget())
    try:
        return template.render(variables)
    finally:
        _budget.reset(token)


def _size(value: Any, limit: int) -> int:
    """About how many characters ``value`` prints as, or anything beyond ``limit``.

    A list that holds one list many times counts it each time, as printing does; each item weighs 64, so that doubled
    lists end after some million items.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, (list, tuple)):
        return 8
    total = 2
    for item in value:
        total += 64 + _size(item, limit - total)
        if total > limit:
            break
    return total


def _charge(value: Any) -> None:
    budget = _budget.get(None)
    if budget is not None:  # constants are folded at compile time, without one
        budget.text(_size(value, MAX_CHARS))


def _check_numbers(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"the number {value if abs(value) < 10**20 else 'given'} is beyond {MAX_NUMBER}")


class _Counted:
    """An iterable that charges one step for each of its items; sized if the original is."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for item in self._items:
            budget.step()
            yield item


class _CountedSized(_Counted):
    def __len__(self) -> int:
        return len(self._items)


def _counted(items: Any) -> Any:
    return _CountedSized(items) if hasattr(items, "__len__") else _Counted(items)


class _CountLoops(NodeTransformer):
    """Puts a counter into every loop and a charge on every ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [nodes.Filter(part, "_charged", [], [], None, None) for part in node.nodes]
        return node


class _Generation(Extension):
    """``{% generation %}``, with which training marks answers; here its body is simply printed."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace, but printing it doesn't print its contents, which may be huge."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes <, > and & for HTML, which a prompt doesn't want.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    prints = name in {"tojson", "string", "pprint", "join", "format", "xmlattr", "urlencode", "indent", "sum"}

    @wraps(function)  # keeps Jinja's mark for filters that want the context or environment first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get(None)
        if budget is not None:
            budget.step()
        given = [*args, *kwargs.values()]
        _check_numbers(given[1:])
        if prints:
            for value in given:
                if not isinstance(value, (ImmutableSandboxedEnvironment, Context)):
                    _charge(value)
            if name == "format" and any(isinstance(value, str) and _WIDE.search(value) for value in given):
                raise SecurityError("a format with so wide a field is not allowed")
        if name in {"join", "replace"}:
            _charge_method(name, [v for v in given if isinstance(v, (str, list, tuple))])
        return function(*args, **kwargs)

    return bounded


def _charge_method(name: str, values: list[Any]) -> None:
    """Charges for the result of ``join`` and ``replace`` before it is made; ``values``: text first for replace."""
    budget = _budget.get(None)
    if budget is None or len(values) < 2:
        return
    if name == "replace" and len(values) >= 3 and all(isinstance(v, str) for v in values[:3]):
        text, old, new = values[:3]
        budget.text(len(text) + text.count(old) * len(new))
    elif name == "join":
        separator, items = (values[0], values[1]) if isinstance(values[0], str) else (values[1], values[0])
        if isinstance(separator, str) and isinstance(items, (str, list, tuple)):
            budget.text(_size(items, MAX_CHARS) + len(separator) * len(items))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with Hugging Face's settings and functions, inside a ``Budget``."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._output
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["_counted"] = _counted
        self.filters["_charged"] = self._output
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace)

    def load(self, source: str) -> tuple[Template, nodes.Template]:
        """Compiles ``source``; also gives its syntax tree.  Raises ``TemplateSyntaxError``."""
        tree = self.parse(source)
        counted = _CountLoops().visit(self.parse(source))
        return Template.from_code(self, self.compile(counted), self.make_globals(None)), tree

    @staticmethod
    def _output(value: Any) -> Any:
        _charge(value)
        return value

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get(None)
        if budget is not None:
            budget.step()
        if isinstance(obj, LoopContext) and args:  # {% for ... recursive %}: loop(children)
            args = (_counted(args[0]), *args[1:])
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_numbers([*args, *kwargs.values()])
            if name in {"format", "format_map"}:
                texts = [owner, *(v for v in [*args, *kwargs.values()] if isinstance(v, str))]
                if any(_WIDE.search(text) for text in texts if "{" in owner and ":" in owner):
                    raise SecurityError("a format with so wide a field is not allowed")
            _charge_method(name, [owner, *args])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                self._charge_length(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            grown = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if operator in ("*", "**") and grown > MAX_NUMBER:
                raise SecurityError("a number of so many digits is not allowed")
        elif operator == "*":
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(repeated, (str, list, tuple)):
                self._charge_length(len(repeated) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            if re.search(r"%[^a-zA-Z%]*(\d{6}|\*)", left):
                raise SecurityError("a format with so wide a field is not allowed")
            _charge(right)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def _charge_length(length: int) -> None:
        budget = _budget.get(None)
        if budget is not None:
            budget.text(length)
        elif length > MAX_NUMBER:  # folded at compile time
            raise SecurityError(f"a constant of {length} characters is not allowed")
