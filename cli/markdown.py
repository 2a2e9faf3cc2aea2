"""Markdown in a terminal."""

from __future__ import annotations

from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.text import Text


class _Code(CodeBlock):
    """Lines as they are: a line that Rich breaks at the width of the terminal is copied as two."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in str(self.text).rstrip().splitlines():
            yield Text("  " + line, style="cyan", no_wrap=True, overflow="ignore")


class _Page(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "fence": _Code, "code_block": _Code}


def show(text: str) -> None:
    """Print Markdown; lines of code may be wider than the terminal, which then wraps them itself."""
    Console().print(_Page(text), crop=False)
