"""Settings of ``gymdata report``."""

from __future__ import annotations

from pathlib import Path

import pydantic

from gymdata.settings import Config


class ReportConfig(Config):
    """``gymdata report``."""

    output: Path | None = pydantic.Field(None, description="HTML file to write (default: report.html in the folder).")
    png: Path | None = pydantic.Field(None, description="Also write each chart as a PNG into this folder.")
    reward: str | None = pydantic.Field(
        None, description="Score to report on (default: the newest score; without one the total reward)."
    )
    allow_findings: bool = pydantic.Field(
        False, description="Write the page although it holds keys or addresses that `gymdata scan` finds."
    )
    threshold: float = pydantic.Field(0.5, description="A rollout is a success if its reward is above this.")
