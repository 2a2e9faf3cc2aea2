"""Jinja templates that cannot run on for ever or fill the memory: chat templates and judge prompts are untrusted
programs.

Invariants: a rendering ends after a bounded number of loop turns, seconds and characters, or fails with
``TemplateLimitError``, a TemplateError that says which limit it was; what keeps within the limits is rendered as by
``transformers`` (the same environment, filters and globals; a test compares the two). Nothing is interrupted from outside:
the counting is compiled into the template.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Limits of one rendering: iterations of loops and calls of macros, seconds, characters of one text, of all texts that
#: are made.
MAX_STEPS, MAX_SECONDS, MAX_TEXT, MAX_WORK = 5_000_000, 30.0, 100_000_000, 4_000_000_000
#: Bits of a whole number; items of a list.
_MAX_BITS, _MAX_ITEMS = 100_000, 1_000_000
#: Filters that take a list or mapping for what it is; the others make a text of it.
_OF_LISTS = frozenset({
    "length", "count", "first", "last", "list", "map", "select", "selectattr", "reject", "rejectattr", "items", "dictsort",
    "default", "d", "batch", "slice", "sort", "unique", "groupby", "sum", "min", "max", "attr", "random", "reverse",
})  # fmt: skip
_WIDTH = re.compile(r"\d{7,}")


class TemplateLimitError(TemplateError):
    """A rendering went beyond one of the limits above."""


class Budget(threading.local):
    """The remaining budget of this thread's rendering."""

    steps, work, until = MAX_STEPS, MAX_WORK, float("inf")

    def begin(self) -> None:
        self.steps, self.work, self.until = MAX_STEPS, MAX_WORK, time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError(f"its loops and macros run more than {MAX_STEPS:,} times")
        self.wait()

    def wait(self) -> None:
        if time.monotonic() > self.until:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} s")

    def make(self, size: int) -> None:
        self.work -= size
        if size > MAX_TEXT:
            raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT:,} characters")
        if self.work < 0:
            raise TemplateLimitError(f"it makes texts of more than {MAX_WORK:,} characters in all")


_budget = Budget()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates count what they do."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_output)
        for name, function in list(self.filters.items()):
            self.filters[name] = _counted(name, function)
        self.filters |= {"_tick": _tick, "_joined": _joined, "_sized": _sized}
        del self.globals["lipsum"]

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _counted(name, function)

    def _generate(self, source: nodes.Template, *more: Any, **options: Any) -> str:
        return super()._generate(_counting(source), *more, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.wait()
        if operator == "*":
            _refuse_repeated(left, right)
            _refuse_repeated(right, left)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS and operator in ("*", "**"):
                raise TemplateLimitError("it computes a number of too many digits")
        if operator == "%" and isinstance(left, str):
            _check_format(left, (right,))
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        _budget.wait()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_text_call(str(getattr(__obj, "__name__", "")), text, (*args, *kwargs.values()))
        try:
            return _made(super().call(__context, __obj, *args, **kwargs))
        except OverflowError as error:  # the sandbox's range
            raise TemplateLimitError(str(error)) from error


class Generation(Extension):
    """``{% generation %}``, which marks what a model writes: here it is written as it is."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Any) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_through"), [], [], body)
        block.set_lineno(line)
        return block

    def _through(self, caller: Callable[[], str]) -> str:
        return caller()


class BoundedTemplate:
    """A template of ``name`` that was compiled once; ``render`` raises TemplateError."""

    def __init__(self, environment: BoundedEnvironment, text: str) -> None:
        self._template = environment.from_string(text)

    def render(self, **variables: Any) -> str:
        _budget.begin()
        try:
            parts, size = [], 0
            for part in self._template.generate(**variables):
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT:
                    raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT:,} characters")
            return "".join(parts)
        except (RecursionError, MemoryError) as error:
            raise TemplateLimitError(f"it needs too much memory ({type(error).__name__})") from error
        finally:
            _budget.until = float("inf")


@functools.lru_cache(maxsize=64)
def chat_template(text: str) -> BoundedTemplate:
    """A chat template as transformers compiles it. Raises TemplateError."""
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])

    def to_json(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.add_filter("tojson", to_json)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return BoundedTemplate(environment, text)


# --- what is compiled into a template ---------------------------------------------------------------------------------


def _counting(tree: nodes.Template) -> nodes.Template:
    for loop in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        constant = sum(len(part.data) for part in loop.find_all(nodes.TemplateData))
        tick = _filter(nodes.Const(constant), "_tick")
        if isinstance(loop, nodes.For) and loop.test is not None:
            loop.test = nodes.And(_filter(nodes.Const(0), "_tick"), loop.test)
        body: list[nodes.Node] = loop.body  # type: ignore[attr-defined]  # each of the three kinds has one
        body.insert(0, nodes.ExprStmt(tick))
    for block in list(tree.find_all(nodes.AssignBlock)):
        block.filter = _filter(block.filter, "_sized")
    _replace_concats(tree)
    for node in tree.find_all(nodes.Node):
        if node.lineno is None:
            node.lineno = 1
        if node.environment is None:
            node.environment = tree.environment
    return tree


def _filter(node: nodes.Expr | None, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _replace_concats(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, field, [_replaced(one) if isinstance(one, nodes.Node) else one for one in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _replaced(value))


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace_concats(node)
    return _filter(nodes.List(node.nodes), "_joined") if isinstance(node, nodes.Concat) else node


@pass_context
def _tick(context: Any, constant: int) -> bool:  # noqa: ARG001 - with a context it is not computed while compiling
    _budget.step()
    _budget.make(constant)
    return True


@pass_context
def _sized(context: Any, value: Any) -> Any:  # noqa: ARG001 - likewise
    return _made(value)


@pass_context
def _joined(context: Any, values: Sequence[Any]) -> str:  # noqa: ARG001 - likewise
    """``a ~ b``."""
    _budget.make(sum(map(_weight, values)))
    return "".join(map(str, values))


@pass_context
def _output(context: Any, value: Any) -> Any:  # noqa: ARG001 - likewise
    """``{{ value }}``."""
    _budget.make(_weight(value))
    return value


# --- sizes --------------------------------------------------------------------------------------------------------------


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(function, "jinja_pass_arg", None)
    first = 0 if passed is None else 1

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _budget.wait()
        given = (*args[first:], *kwargs.values())
        if name not in _OF_LISTS:
            _budget.make(sum(_weight(value) for value in given if not isinstance(value, str)))
        if given and isinstance(given[0], str):
            _check_text_call(name, given[0], given[1:])
        elif any(type(value) is int and abs(value) > MAX_TEXT for value in given[1:]):
            raise TemplateLimitError(f"it uses the filter {name} with a number beyond {MAX_TEXT:,}")
        return _made(function(*args, **kwargs))

    return counted


def _made(value: Any) -> Any:
    if isinstance(value, str):
        _budget.make(len(value))
    elif isinstance(value, (list, tuple)) and len(value) > _MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {_MAX_ITEMS:,} items")
    return value


def _weight(value: Any) -> int:
    """About the characters that ``str`` makes of a value; stops counting where it is too much."""
    if isinstance(value, str):
        return len(value)
    if not isinstance(value, (list, tuple, Mapping)):
        return 1
    total, items, waiting = 0, 0, [value]
    while waiting:
        one = waiting.pop()
        items += 1
        inside: Iterable[Any] = ()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, Mapping):
            inside = (*one.keys(), *one.values())
        elif isinstance(one, (list, tuple)):
            inside = one
        waiting += inside
        if items + len(waiting) > 4 * _MAX_ITEMS or total > MAX_TEXT:
            raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT:,} characters")
    return total + items


def _refuse_repeated(value: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(value, str):
        _budget.make(max(0, len(value) * times))
    elif isinstance(times, int) and isinstance(value, (list, tuple)) and len(value) * times > _MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {_MAX_ITEMS:,} items")


def _check_text_call(name: str, text: str, given: Sequence[Any]) -> None:
    """A method or filter of a text that may make a far longer one."""
    numbers = [value for value in given if type(value) is int]
    texts = [value for value in given if isinstance(value, str)]
    if name in ("format", "format_map"):
        _check_format(text, given)
    elif name == "expandtabs":
        _budget.make(text.count("\t") * max([8, *numbers]))
    elif name == "indent":
        _budget.make((text.count("\n") + 1) * max([4, *numbers, *map(len, texts)]))
    elif name == "replace" and len(texts) > 1:
        _budget.make(text.count(texts[0]) * len(texts[1]))
    elif name == "join":
        _budget.make(
            sum(_weight(value) + len(text) * len(value) for value in given if isinstance(value, (list, tuple)))
        )
    elif name == "translate":
        _budget.make(len(text) * max((_weight(value) for value in given), default=1))
    elif numbers:
        _budget.make(max(map(abs, numbers)))


def _check_format(text: str, given: Sequence[Any]) -> None:
    if _WIDTH.search(text) or any(type(value) is int and abs(value) > MAX_TEXT for value in given):
        raise TemplateLimitError("it writes a number or text with a width of more than 6 digits")
    _budget.make((text.count("%") + text.count("{") + 1) * sum(_weight(value) for value in given))
