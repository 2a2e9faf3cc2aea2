"""Two renderings of one tool call are equal, however they are spelt; others are not."""

from __future__ import annotations

import pytest

from gymdata.checks.chat_text import normal, same_turn

CODER = (
    "<tool_call>\n<function=look>\n<parameter=word>\na tree\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n"
    "</tool_call>"
)
DSML = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">3</｜DSML｜parameter></｜DSML｜invoke>'
INVOKED = '<invoke name="look"><parameter name="n">3</parameter><parameter name="word">a tree</parameter></invoke>'


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # JSON in any spelling and white space in any amount are equal; text inside JSON is not touched.
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "é"}}\n</tool_call>',
         '<tool_call>{"arguments":{"b":"\\u00e9","a":1.0},"name":"f"}</tool_call>', True),
        ('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": "{\\"a\\": 1}"}', True),
        ("a  b\n", "a b", True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": "x  y"}', '{"a": "x y"}', False),
        ("ab", "a b", False),
        # Elements are compared by name and arguments: order, line feeds and the spelling of constants are nothing.
        (CODER, CODER.replace("\n", ""), True),
        (CODER, CODER.replace("3", "4"), False),
        (CODER, CODER.replace("=n>", "=m>"), False),
        (CODER, CODER.replace("=look", "=see"), False),
        (f"So: {CODER}", CODER, False),
        (INVOKED, '<invoke name="look">\n<parameter name="word">a tree</parameter>\n<parameter name="n">3</parameter>\n'
                  "</invoke>", True),
        (DSML, DSML.replace("true", "false"), False),
        ("<function=f><parameter=on>True</parameter></function>", "<function=f><parameter=on>true</parameter></function>",
         True),
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
         "<tool_call>f<arg_key>a</arg_key><arg_value>[1,2]</arg_value></tool_call>", True),
        ("<tool_call>f\n</tool_call>", "<tool_call>g\n</tool_call>", False),
        # Keyword arguments of Python calls that are constants are read; anything else is text.
        ('[f(a=1, b="x"), g()]', "[f(b='x',a=1.0),g( )]", True),
        ('f(a=[1, {"k": None}])', "f(a=[1,{'k':null}])", True),
        ("f(on=True, n=-2)", "f(n=-2, on=true)", True),
        ("f(a=1)", "f(a=2)", False),
        ("f(a=1)", "g(a=1)", False),
        ('f(a="x  y")', 'f(a="x y")', False),
        ("f(1, 2)", "f(2, 1)", False),
        ("f(a=b)", "f(a= b)", False),
        ('f(a=")", b="\\"(")', "f(b='\"(', a=')')", True),
        ("the sum (a=1) of", "the sum ( a = 1 ) of", False),
    ],
)  # fmt: skip
def test_renderings_are_equal_when_they_say_the_same(one: str, other: str, same: bool) -> None:
    """In JSON, elements or Python calls."""
    assert same_turn(one, other) is same


@pytest.mark.matrix("[", "<function=f>")
@pytest.mark.parametrize(
    "text", ["[", "f(", "<function=f>", "<function=f><parameter=a>", "<tool_call>f<arg_key>", "f(a='\\d',"]
)
def test_hostile_text_is_text(text: str) -> None:
    """Beginnings without an end, many times over, neither raise nor take long."""
    assert same_turn(text * 10_000, text * 10_001) is False
    assert normal(text)
