"""Markdown in a terminal."""

from __future__ import annotations

from typing import IO, ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, MarkdownElement, TableElement
from rich.table import Table
from rich.text import Text


class _Code(CodeBlock):
    """Lines as they are: a line that Rich breaks at the width of the terminal is copied as two."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in str(self.text).rstrip().splitlines():
            yield Text("  " + line, style="cyan", no_wrap=True, overflow="ignore")


class _Table(TableElement):
    """Words that are wider than their column continue on the next line, where Rich would cut them off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            for column in part.columns if isinstance(part, Table) else ():
                column.overflow = "fold"
            yield part


class _Page(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "table_open": _Table,
    }


def show(text: str, file: IO[str]) -> None:
    """Print Markdown; lines of code may be wider than the terminal, which then wraps them itself."""
    Console(file=file).print(_Page(text), crop=False)
