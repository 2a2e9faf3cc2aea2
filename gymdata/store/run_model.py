"""The content of a run.json: one model for every command, from which ``schemas/run.schema.json`` is generated.

Invariant: every run.json that gymdata writes has all of these keys, with these types. A command adds keys of its own beside
them (``engine``, ``trained_tokens``, ``bias`` …), which are no part of the model. Entries of lists may lack keys: a
run that an earlier version began is written again when it is resumed.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

_OPEN = ConfigDict(extra="allow", strict=True)


class FileEntry(BaseModel):
    """A file of the output."""

    model_config = _OPEN

    path: str = Field(min_length=1, description="Its name, relative to the folder of this run.json.")
    rows: int | None = Field(None, ge=0, description="Rows in it; null or missing for a file without rows.")
    bytes: int | None = Field(None, ge=0, description="Its size.")
    xxh3: str | None = Field(None, description="xxh3 (64 bits, hex) of its bytes.")


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


class Parent(BaseModel):
    """Something that the output was made from."""

    model_config = _OPEN

    path: str | None = None
    run_id: str | None = Field(None, description="Of the run that it belongs to.")
    run_json_xxh3: str | None = Field(None, description="xxh3 of the run.json that described it; null without one.")


class RunJson(BaseModel):
    """What was run, with which settings, from which data, and which files came out."""

    model_config = _OPEN

    gymdata: str = Field(description="The version of gymdata that wrote the output, or began the run.")
    command: list[str] = Field(description="The words of the command as typed; empty when it was called from Python.")
    stage: str = Field(description="What made the output: collect, import, score, judge, pairs, train-dpo …")
    run_id: str | None = Field(None, description="Random, and kept when the run is resumed.")
    config: dict[str, Any] = Field(description="All settings, resolved.")
    identity: dict[str, Any] = Field(description="Settings and hashes that must be equal for the output to be resumed.")
    extent: dict[str, Any] = Field(description="What is covered, which may grow: rollouts per task, tasks.")
    attempts: list[Attempt] = Field(description="Of a run folder: each time that a command wrote to it.")
    files: list[FileEntry] = Field(description="The files of the output. Of a run folder: the sealed parts.")
    schemas: dict[str, int] = Field(description="Table → version, for the tables of the output.")
    parents: list[Parent] = Field(description="What the output was made from.")
    counts: dict[str, Any] = Field(description="What was read, written and dropped.")
    notes: list[str] = Field(description="What a reader of the numbers must know.")
