"""Settings of ``gymdata view``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pydantic

from gymdata.commands.report.sampling import Sample
from gymdata.settings import Config, OnlyWith


class ViewConfig(Config):
    """``gymdata view``. The server answers requests that name the machine it runs on, or one of ``allow_host``."""

    only_with: ClassVar[OnlyWith] = dict.fromkeys(
        ("where", "sample", "limit", "overwrite"), ("{export}", lambda c: c.export is not None)
    )

    host: str = pydantic.Field("127.0.0.1", description="Address to listen on.")
    port: int = pydantic.Field(8040, ge=0, le=65535, description="Port; 0 selects a free one.")
    allow_host: list[str] = pydantic.Field(
        default_factory=list, description="Allowed Host header; repeatable (default: loopback and --host)."
    )
    tokenizer: Path | None = pydantic.Field(
        None,
        description="Tokenizer folder for the text of tokens (default: the run's own, where it is on this machine).",
    )
    export: Path | None = pydantic.Field(
        None, description="Write one self-contained HTML file instead of serving; opens offline."
    )
    overwrite: bool = pydantic.Field(False, description="Start over, replacing existing output.")
    where: str | None = pydantic.Field(None, description="Export only rollouts that satisfy this condition.")
    sample: Sample = pydantic.Field(
        "first", description="Rollouts to export; mixed: of groups whose rewards differ, random: the same each time."
    )
    limit: int = pydantic.Field(100, ge=1, description="Export at most N rollouts.")
