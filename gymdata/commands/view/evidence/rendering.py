"""Code, headings and strong text of messages, set as such without hiding a character.

Invariants: the text of the HTML is the given text, with the marks of its Markdown, and with escapes for what a terminal or
browser would act on; HTML, links and pictures in it stay text.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from gymdata.errors import printable

#: Longer texts are shown as they are, in characters.
_LONGEST = 200_000
_MARKED = re.compile(
    r"(?P<fence>^(?P<ticks>```|~~~)[^\n]*\n.*?(?:^(?P=ticks)[^\n]*$|\Z))"
    r"|(?P<heading>^#{1,6} [^\n]*)|(?P<code>`[^`\n]{1,500}`)|(?P<strong>\*\*(?=\S)[^*\n]{1,500}(?<=\S)\*\*)",
    re.MULTILINE | re.DOTALL,
)
_ELEMENTS = {
    "fence": ("span", "fence"),
    "heading": ("span", "heading"),
    "code": ("code", "code"),
    "strong": ("strong", "strong"),
}


def rendered(text: str) -> Markup:
    """A message as HTML."""
    text = printable(text)
    out, end = list[Markup](), 0
    for match in _MARKED.finditer(text) if len(text) <= _LONGEST else ():
        kind = next(name for name in _ELEMENTS if match[name] is not None)
        element, name = _ELEMENTS[kind]
        out += [escape(text[end : match.start()]), Markup('<{0} class="{1}">{2}</{0}>').format(element, name, match[0])]
        end = match.end()
    return Markup().join([*out, escape(text[end:])])


def hits(text: str, searched: str) -> Markup:
    """A line of a list with what was searched for marked."""
    if not searched:
        return escape(printable(text))
    parts = re.split(f"({re.escape(printable(searched))})", printable(text))
    return Markup().join(Markup("<mark>{}</mark>").format(part) if n % 2 else part for n, part in enumerate(parts))
