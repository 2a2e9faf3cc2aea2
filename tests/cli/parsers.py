"""The parser and the help of each command, made once for all tests."""

from __future__ import annotations

import contextlib
import io
from functools import cache
from typing import Any

import pytest

from gymdata.cli.main import build, main


@cache
def parser_of(command: str) -> Any:
    """The command as the parser has it; ``params`` are its arguments and options."""
    return build(command).commands[command]


def flags_of(command: str) -> set[str]:
    """Every name of every option."""
    return {"--help", *(name for param in parser_of(command).params for name in (*param.opts, *param.secondary_opts))}


@cache
def help_of(*words: str, width: int = 80) -> str:
    """What ``gymdata WORDS --help`` prints on a terminal of this width."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", str(width))
        assert main([*words, "--help"]) == 0
    return shown.getvalue()
