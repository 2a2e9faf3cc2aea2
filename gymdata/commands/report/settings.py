"""Settings of ``gymdata report``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pydantic

from gymdata.commands.report.sampling import Sample
from gymdata.settings import Config, OnlyWith


class ReportConfig(Config):
    """``gymdata report``."""

    only_with: ClassVar[OnlyWith] = {"limit": ("{sample}", lambda c: c.sample is not None)}

    output: Path | None = pydantic.Field(None, description="HTML file to write (default: report.html in the folder).")
    reward: str | None = pydantic.Field(
        None, description="Score to report on (default: the only re-scoring; without one the total reward)."
    )
    sample: Sample | None = pydantic.Field(
        None,
        description="Rollouts shown as examples; mixed: of groups whose rewards differ, random: the same each time "
        "(default: the best, the worst and a typical one).",
    )
    limit: int = pydantic.Field(10, ge=1, description="Examples of --sample.")
    threshold: float = pydantic.Field(0.5, description="A rollout is a success if its reward is above this.")
