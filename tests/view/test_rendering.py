"""Texts of rollouts are set as Markdown, code, JSON and formulas, and every character of them stays."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.errors import printable
from gymdata.view.evidence.rendering import hits, rendered, rendered_arguments

A = '<span class="y-f">&#34;a&#34;</span>'
ONE = '<span class="y-n">1</span>'
#: Elements that a text can have: none of them loads, links or runs anything.
ALLOWED = {"span", "code", "strong", "em", "i", "br", "mark"}
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
def test_every_character_stays(text: str):
    """The text of the HTML is the text of the rollout, whatever it is, and nothing of it is an element with a will."""
    for html in (rendered(text), rendered_arguments(text), hits(text, "a")):
        parsed = Parsed(str(html))
        assert parsed.text == printable(text)
        assert parsed.elements <= ALLOWED
        assert parsed.attributes <= {"class"}


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** `c`", 'a <strong><i>**</i>b<i>**</i></strong> <code class="code">`c`</code>'),
        ("# A", '<span class="heading h1"># A</span>'),
        ("- a\n  - b", '<span class="item in-1">- a\n</span><span class="item in-2">  - b</span>'),
        ("> a", '<span class="quote">&gt; a</span>'),
        ("it is $x^2$, for $5 or $6", 'it is <code class="formula">$x^2$</code>, for $5 or $6'),
        ("\\[ x < y \\]", '<code class="formula">\\[ x &lt; y \\]</code>'),
        ("```py\n1 #\n```", f'<span class="fence"><i>```py\n</i>{ONE} <span class="y-c">#</span>\n<i>```</i></span>'),
        ("~~~nothing-known\na", '<span class="fence"><i>~~~nothing-known\n</i>a<i></i></span>'),
        ('{"a": 1}', f'{{<span class="members"><span>{A}: {ONE}</span></span>}}'),
        ('["b\\nc"]', '[<span class="y-s">&#34;b\\n<br>c&#34;</span>]'),
        ('{"a": 1, "a": 1}', f'{{<span class="members"><span>{A}: {ONE}, </span><span>{A}: {ONE}</span></span>}}'),
        ('{\n"a": 1\n}', f"{{\n{A}: {ONE}\n}}"),
        ("[1, null]", f'[{ONE}, <span class="y-n">null</span>]'),
        ("{not JSON}", "{not JSON}"),
        ("<img src=x> [a](javascript:b) ![c](http://d)", "&lt;img src=x&gt; [a](javascript:b) ![c](http://d)"),
    ],
)  # fmt: skip
def test_what_is_set(text: str, html: str):
    """Markdown, code, JSON and formulas have elements; HTML, links and pictures are text."""
    assert str(rendered(text)) == html


def test_a_table_has_rows_and_cells():
    """A table is set as one, its bars and its rule stay in it."""
    html = str(rendered("| a | b |\n|---|---|\n| 1 | 2 |\n"))
    assert html.count('class="tr"') == 3
    assert '<span class="td">| a </span><span class="td">| b </span>' in html


def test_what_was_searched_for_is_marked():
    """Each place of it, in a line of the list."""
    assert str(hits("a.b a.b", "a.")) == "<mark>a.</mark>b <mark>a.</mark>b"
