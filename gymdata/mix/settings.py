"""Settings of ``gymdata mix``."""

from __future__ import annotations

import pydantic

from gymdata.settings import Config


class MixConfig(Config):
    """How much is taken, and what is left out."""

    rows: int | None = pydantic.Field(
        None, ge=1, description="Rows of the output (default: as many as the weights allow without repeating one)."
    )
    near_duplicates: float | None = pydantic.Field(
        None,
        ge=0.5,
        le=1.0,
        description="Leave out tasks whose prompt is at least this similar to an earlier one (MinHash, 0.8 is usual).",
    )
    test_share: float | None = pydantic.Field(
        None, gt=0.0, lt=1.0, description="Write a train and a test file; share of the tasks in the test file."
    )
    seed: int = pydantic.Field(0, description="Random seed.")
