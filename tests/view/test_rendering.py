"""Code, headings and strong text of rollouts are set as such, and every character stays."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.commands.view.evidence.rendering import hits, rendered
from gymdata.errors import printable

#: Elements that a text can have: none of them loads, links or runs anything.
ALLOWED = {"span", "code", "strong", "mark"}
PIECES = st.sampled_from(
    [
        *("*", "**", "`", "~~~", ">", "|", "$", "$$", "\\(", "\\)", "\\[", "\\]", "\\"),
        *("a", "<b>", "&amp;", "{", "}", ","),
        *("```python\n", "\n", "\n\n", "\r\n", "- ", "1. ", "# ", "|---|---|\n", "    ", "\t", '"', '{"a": [1, {}]}'),
    ]
)


class Parsed(HTMLParser):
    """The text of some HTML, and its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.elements, self.attributes = "", set[str](), set[str]()
        self.feed(html)
        self.close()

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}


@given(st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=60))
def test_every_character_stays(text: str) -> None:
    """The text of the HTML is the text of the rollout, whatever it is, and nothing of it is an element with a will."""
    for html in (rendered(text), hits(text, "a")):
        parsed = Parsed(str(html))
        assert parsed.text == printable(text)
        assert parsed.elements <= ALLOWED
        assert parsed.attributes <= {"class"}


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** `c`", 'a <strong class="strong">**b**</strong> <code class="code">`c`</code>'),
        ("a\n## A\nb", 'a\n<span class="heading">## A</span>\nb'),
        ("```py\n1 **b**\n```\nc", '<span class="fence">```py\n1 **b**\n```</span>\nc'),
        ("~~~\na", '<span class="fence">~~~\na</span>'),
        ('{"a": 1}', "{&#34;a&#34;: 1}"),
        ("<img src=x> [a](javascript:b) ![c](http://d)", "&lt;img src=x&gt; [a](javascript:b) ![c](http://d)"),
    ],
)  # fmt: skip
def test_what_is_set(text: str, html: str) -> None:
    """Code, headings and strong text have elements; HTML, links and pictures are text."""
    assert str(rendered(text)) == html


def test_what_was_searched_for_is_marked() -> None:
    """Each place of it, in a line of the list."""
    assert str(hits("a.b a.b", "a.")) == "<mark>a.</mark>b <mark>a.</mark>b"
