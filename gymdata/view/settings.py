"""Settings of ``gymdata view``."""

from __future__ import annotations

from pathlib import Path

import pydantic

from gymdata.settings import Config


class ViewConfig(Config):
    """``gymdata view``. The server answers requests that name the machine it runs on, or one of ``allow_host``.

    ``tokenizer``: folder whose tokenizer.json gives ids their text (default: that of the model that run.json names).
    ``export``: write one self-contained HTML file with the rollouts that pass ``where``, at most ``limit`` of them, in
    place of serving. ``sql_seconds``, ``sql_rows`` and ``sql_memory`` (bytes) bound each statement of the SQL page.
    """

    host: str = pydantic.Field("127.0.0.1", description="Address to listen on (default: 127.0.0.1).")
    port: int = pydantic.Field(8040, ge=0, le=65535, description="Port; 0 selects a free one (default: 8040).")
    allow_host: list[str] = pydantic.Field(
        default_factory=list, description="Allowed Host header; repeatable (default: loopback and --host)."
    )
    tokenizer: Path | None = pydantic.Field(
        None, description="Tokenizer folder for the text of tokens (default: the run's own, where it is on this machine)."
    )
    export: Path | None = pydantic.Field(
        None, description="Write one self-contained HTML file instead of serving; opens offline."
    )
    where: str | None = pydantic.Field(None, description="Export only rollouts that satisfy this condition.")
    limit: int = pydantic.Field(100, ge=1, description="Export at most N rollouts (default: 100).")
    sql_seconds: float = pydantic.Field(10.0, gt=0.0)
    sql_rows: int = pydantic.Field(1_000, ge=1)
    sql_memory: int = pydantic.Field(256 << 20, ge=16 << 20)
