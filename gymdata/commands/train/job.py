"""What a training is told, which ``job/job.json`` keeps for a resume, and which of several processes this one is."""

from __future__ import annotations

import os
from typing import TypedDict

from gymdata.commands.train.token_checksum import TokenFacts


class Job(TypedDict, total=False):
    """A training, besides the settings of its trainer, which lie beside these."""

    trainer: str
    data: str
    data_xxh3: list[str]
    model: str
    policy_hash: str
    #: Its folder; of a dry run a temporary one.
    output: str
    #: Keys of the library's trainer.
    settings: dict[str, object]
    own_keys: list[str]
    trained_tokens: TokenFacts
    dry_run: bool


def processes() -> int:
    """How many processes train together: as many as `accelerate launch` started, by what it says to each."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def is_first() -> bool:
    """Whether this process checks the data, writes the output and reports."""
    return int(os.environ.get("RANK") or 0) == 0
