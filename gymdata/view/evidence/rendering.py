"""Markdown, code, JSON and formulas in the texts of rollouts, set as such without hiding a character.

Invariants: the text of the HTML is the given text, with the marks of its Markdown, and with escapes for what a terminal or
browser would act on; HTML, links and pictures in it stay text; what a library cannot read is shown as it is.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape
from pygments.lexers import get_lexer_by_name
from pygments.token import Token as Kind
from pygments.util import ClassNotFound

from gymdata.errors import printable

#: Longer texts are shown as they are, in characters.
_LONGEST = 200_000
_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
#: Code, formulas (``$$ $$``, ``\[ \]``, ``\( \)``, ``$ $`` around no blank), strong and emphasized text.
_INLINE = re.compile(
    r"(?P<code>(?<!`)(?P<ticks>`+)(?!`).{1,2000}?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<formula>\$\$.{1,2000}?\$\$|\\\[.{1,2000}?\\\]|\\\(.{1,2000}?\\\)"
    r"|(?<![\w\\$])\$(?=[^\s$])[^$\n]{1,500}(?<=[^\s\\])\$(?![\w$]))"
    r"|(?P<strong>\*\*(?=[^\s*]).{1,2000}?(?<=\S)\*\*)"
    r"|(?P<em>(?<![\w*])\*(?=[^\s*])[^*\n]{1,500}(?<=\S)\*(?![\w*]))",
    re.DOTALL,
)
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s")
_QUOTE = re.compile(r"\s*>")
_CELL = re.compile(r"\|?(?:\\.|[^|])+|\|", re.DOTALL)
_JSON = re.compile(r'\{\s*\}|"(?:[^"\\]|\\.)*"|,\s*|[{}\[\]:]|\s+|[^\s"{}\[\],:]+')
#: Colors of code, by kind of token.
_COLORS = (
    (Kind.Comment, "y-c"),
    (Kind.Keyword, "y-k"),
    (Kind.Literal.String, "y-s"),
    (Kind.Literal.Number, "y-n"),
    (Kind.Name.Function, "y-f"),
    (Kind.Name.Class, "y-f"),
    (Kind.Name.Tag, "y-f"),
)


def rendered(text: str) -> Markup:
    """A message as HTML: an object or a list of JSON by its members, everything else as Markdown."""
    text = printable(text)
    if len(text) > _LONGEST:
        return escape(text)
    if (members := _json(text)) is not None:
        return members
    lines = _LINE.findall(text)
    out, end = list[Markup](), 0
    for token in _parser().parse(text):
        if token.map is None or token.map[0] < end:
            continue
        first, last = token.map
        block = "".join(lines[first:last])
        if token.type == "fence":
            html = _fence(token, lines[first:last])
        elif token.type == "heading_open":
            html = _span(f"heading {token.tag}", _inline(block))
        elif token.type == "table_open":
            rows = ([_span("td", _inline(cell)) for cell in _CELL.findall(line)] for line in lines[first:last])
            html = _span("table", Markup().join(_span("tr", Markup().join(cells)) for cells in rows))
        elif token.type == "paragraph_open" and (_QUOTE.match(block) or _ITEM.match(block)):
            kind = "quote" if _QUOTE.match(block) else f"item in-{min(token.level // 2, 3)}"
            html = _span(kind, _inline(block))
        elif token.type == "paragraph_open":
            html = _inline(block)
        else:
            continue
        out += [escape("".join(lines[end:first])), html]
        end = last
    return Markup().join([*out, escape("".join(lines[end:]))])


def rendered_arguments(text: str) -> Markup:
    """The arguments of a tool call as HTML."""
    text = printable(text)
    return (_json(text) if len(text) <= _LONGEST else None) or escape(text)


def hits(text: str, searched: str) -> Markup:
    """A line of a list with what was searched for marked."""
    if not searched:
        return escape(printable(text))
    parts = re.split(f"({re.escape(printable(searched))})", printable(text))
    return Markup().join(Markup("<mark>{}</mark>").format(part) if n % 2 else part for n, part in enumerate(parts))


@cache
def _parser() -> MarkdownIt:
    # Text is set by ``_inline``, which keeps its marks; what only looks like an indented or underlined block is none.
    return (
        MarkdownIt("commonmark", {"html": False}).enable("table").disable(["inline", "reference", "code", "lheading"])
    )


@lru_cache(256)
def _lexer(language: str) -> Any:
    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


def _span(kind: str, inner: Markup) -> Markup:
    return Markup('<span class="{}">{}</span>').format(kind, inner)


def _fence(token: Token, block: list[str]) -> Markup:
    """Code between its marks, colored where its language is known."""
    closed = len(block) > 1 and block[-1].strip().startswith(token.markup)
    end = len(block) - 1 if closed else len(block)
    text, lexer = "".join(block[1:end]), _lexer(token.info.partition(" ")[0].strip())
    tokens = [] if lexer is None else list(lexer.get_tokens_unprocessed(text))
    code = escape(text)
    if "".join(value for _, _, value in tokens) == text:
        colors = [next((color for family, color in _COLORS if kind in family), "") for _, kind, _ in tokens]
        values = [escape(value) for _, _, value in tokens]
        code = Markup().join(_span(c, value) if c else value for c, value in zip(colors, values, strict=True))
    opening, closing = (Markup("<i>{}</i>").format(line) for line in (block[0], "".join(block[end:])))
    return _span("fence", opening + code + closing)


def _inline(text: str) -> Markup:
    out, end = list[Markup](), 0
    for match in _INLINE.finditer(text):
        kind, matched = str(match.lastgroup), match[0]
        out.append(escape(text[end : match.start()]))
        if kind in ("strong", "em"):
            mark = "**" if kind == "strong" else "*"
            inner = _inline(matched[len(mark) : -len(mark)])
            out.append(Markup("<{0}><i>{1}</i>{2}<i>{1}</i></{0}>").format(kind, mark, inner))
        else:
            out.append(Markup('<code class="{}">{}</code>').format(kind, matched))
        end = match.end()
    return Markup().join([*out, escape(text[end:])])


def _json(text: str) -> Markup | None:
    """An object or a list of JSON, the members of objects on lines of their own, as they may be already; None for another
    text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    out, inside, in_one_line = list[Markup](), list[str](), "\n" not in text
    for match in _JSON.finditer(text):
        part = match[0]
        html = escape(part)
        if part in ("{", "["):
            inside.append(part)
            html = Markup('{<span class="members"><span>') if part == "{" and in_one_line else html
        elif part in ("}", "]"):
            html = Markup("</span></span>}") if inside.pop() == "{" and in_one_line else html
        elif part[0] == "," and inside[-1] == "{" and in_one_line:
            html += Markup("</span><span>")
        elif part[0] == '"':
            is_name = text[match.end() : match.end() + 20].lstrip()[:1] == ":"
            # What comes after an escaped line break begins a line, too.
            lines = re.sub(r"\\.", lambda part: part[0] + "<br>" * (part[0] == "\\n"), str(html))
            html = _span("y-f" if is_name else "y-s", Markup(lines))
        elif part[0] not in "{,: \t\r\n":
            html = _span("y-n", html)
        out.append(html)
    return Markup().join(out)
