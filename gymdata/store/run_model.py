"""The model of run.json, for who writes one and who reads one.

What a command does not have is empty. A command adds keys of its own (``trained_tokens``, ``bias`` …), which are no part of
the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from gymdata import __version__

_OPEN = ConfigDict(extra="allow", strict=True)

Stage = Literal[
    "collect", "record", "import", "filter", "select", "score", "judge", "audit", "pairs", "experiences",
    "train-sft", "train-dpo", "train-kto", "train-reward", "train-value", "train-rl", "merged-model",
    "finetune", "sweep", "serve-genrm",
]  # fmt: skip


class FileEntry(BaseModel):
    """A file of the output."""

    model_config = _OPEN

    path: str = Field(
        min_length=1, pattern=r"^[^\x00]*$", description="Its name, relative to the folder of this run.json."
    )
    rows: int | None = Field(None, ge=0, description="Rows in it; null or missing for a file without rows.")
    bytes: int | None = Field(None, ge=0, description="Its size; always there once the output is closed.")
    xxh3: str | None = Field(
        None, description="xxh3 (64 bits, hex) of its bytes; always there once the output is closed."
    )


class Attempt(BaseModel):
    """One time that the command ran on a run folder."""

    model_config = _OPEN

    started_at: str | None = Field(None, description="ISO 8601, UTC.")
    ended_at: str | None = Field(None, description="ISO 8601, UTC; null while it runs, or when it was killed.")
    pid: int | None = None
    gymdata: str | None = Field(None, description="The version that ran.")
    operation: dict[str, Any] | None = Field(None, description="Settings that may differ between attempts.")
    extent: dict[str, Any] | None = Field(None, description="What this attempt was to cover.")
    outcome: str | None = Field(None, description="closed, or the error that ended it.")
    outages: list[dict[str, Any]] | None = Field(
        None, description="When no server could be reached: began_at, and seconds, null until one could be again."
    )


class Parent(BaseModel):
    """An input of the output."""

    model_config = _OPEN

    path: str | None = None
    run_id: str | None = Field(None, description="Of the run that it belongs to.")
    run_json_xxh3: str | None = Field(None, description="xxh3 of the run.json that described it; null without one.")
    files: dict[str, str] | None = Field(None, description="xxh3 of each file of the run when it was read.")


class RunJson(BaseModel):
    """A run.json: what was run, with which settings, from which data, and which files were written."""

    model_config = _OPEN

    gymdata: str = Field(description="The version of gymdata that wrote the output, or began the run.")
    command: list[str] = Field(description="The words of the command as typed; empty when it was called from Python.")
    stage: Stage = Field(description="What made the output.")
    run_id: str | None = Field(None, description="Random, and kept when the run is resumed.")
    experiment: str | None = Field(None, description="What the output is part of.")
    tags: list[str] | None = Field(None, description="Words to find it by.")
    config: dict[str, Any] = Field(description="All settings, resolved.")
    identity: dict[str, Any] = Field(description="Settings and hashes that must be equal for the output to be resumed.")
    extent: dict[str, Any] = Field(description="What is covered, which may grow: rollouts per task, tasks.")
    attempts: list[Attempt] = Field(description="Of a run folder: each time that a command wrote to it.")
    files: list[FileEntry] = Field(description="The files of the output. Of a run folder: the sealed parts.")
    schemas: dict[str, int] = Field(description="Table → version, for the tables of the output.")
    parents: list[Parent] = Field(description="What the output was made from.")
    counts: dict[str, Any] = Field(description="What was read, written and dropped.")
    engine: dict[str, Any] | None = Field(None, description="Of sampled rollouts: what the engine said of itself.")
    model: dict[str, Any] | None = Field(
        None, description="Of sampled rollouts and of trainings: the model's identity."
    )
    chat: dict[str, Any] | None = Field(None, description="Of sampled rollouts: the chat template and its parsers.")
    notes: list[str] = Field(description="What a reader of the numbers must know.")

    @field_validator("files")
    @classmethod
    def _sealed(cls, files: list[FileEntry], info: ValidationInfo) -> list[FileEntry]:
        """Each file once; of a run that is closed, and of outputs that are there as a whole, with its size and hash."""
        attempts: list[Attempt] = info.data.get("attempts") or []
        is_run = info.data.get("stage") in ("collect", "record")
        is_closed = attempts[-1].outcome == "closed" if attempts else not is_run
        seen = set[PurePosixPath]()
        for file in files:
            if (path := PurePosixPath(file.path)) in seen:
                raise ValueError(f"{file.path} is named twice")
            seen.add(path)
            if is_closed and (file.bytes is None or file.xxh3 is None):
                raise ValueError(f"{file.path} is without its bytes or its xxh3")
        return files


def completed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """``facts`` with every key of the model: what is not there is empty. Raises ValidationError for one of another type."""
    document: dict[str, Any] = {"gymdata": __version__, "stage": "collect"}
    document |= {key: [] for key in ("command", "attempts", "files", "parents", "notes")}
    document |= {key: {} for key in ("config", "identity", "extent", "schemas", "counts")}
    document |= facts
    RunJson.model_validate(document)
    return document
