"""Settings of ``gymdata import`` and ``gymdata export``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import pydantic

from gymdata.formats import exported, imported
from gymdata.rollouts.column_names import TestShare, TextColumns
from gymdata.settings import Config, OnlyWith

if TYPE_CHECKING:
    SourceName = str
    FormatName = str
else:
    SourceName, FormatName = Literal[tuple(imported())], Literal[tuple(exported())]


class ImportConfig(Config):
    """The keywords of ``gymdata.import_rollouts`` that a command line or a file gives."""

    only_with: ClassVar[OnlyWith] = {"chat_template": ("--model", lambda c: c.model is not None)}
    sections: ClassVar[Mapping[str, str]] = {"keep_contradicting": "Rows"}

    model: str | None = pydantic.Field(
        None,
        description="Model or tokenizer folder: render token IDs of text with its chat template (default: do not).",
    )
    chat_template: Path | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
    source: SourceName | None = pydantic.Field(None, description="Format of the files (default: auto-detect).")
    run_id: str | None = pydantic.Field(None, description="Run ID (default: random).")
    format: Literal["parquet", "jsonl"] = pydantic.Field("parquet", description="File format.")
    keep_contradicting: bool = pydantic.Field(
        False, description="Keep pairs whose own scores prefer the rejected side (default: leave them out, by name)."
    )
    map: TextColumns
    test_share: TestShare = None
    seed: int = pydantic.Field(0, ge=0, description="Random seed of --test-share.")


class ExportConfig(Config):
    """Settings of ``gymdata export``."""

    format: FormatName = pydantic.Field(description="Format to write.")
    reward: str | None = pydantic.Field(
        None, description="Score to write as the reward (default: the only re-scoring; without one the total reward)."
    )
