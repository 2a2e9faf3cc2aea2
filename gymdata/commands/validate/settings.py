"""Settings of ``gymdata validate``."""

from __future__ import annotations

import pydantic

from gymdata.settings import Config


class ValidateConfig(Config):
    """The keywords of ``gymdata.validate`` that a command line or a file gives."""

    select: list[str] = pydantic.Field(default_factory=list, description="Check only these codes or prefixes (T2).")
    ignore: list[str] = pydantic.Field(default_factory=list, description="Skip these codes or prefixes.")
    strict: bool = pydantic.Field(False, description="Treat warnings as errors.")
    tokenizer: str | None = pydantic.Field(
        None, description="Tokenizer folder: checks ID bounds and explains breaks by text."
    )
    decode: bool = pydantic.Field(
        False, description="Compare generations with their messages (T207); needs a tokenizer."
    )
    check: list[str] = pydantic.Field(default_factory=list, description="Your own check, path.py:Class (repeatable).")
