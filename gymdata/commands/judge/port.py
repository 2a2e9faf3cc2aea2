"""The protocol of judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gymdata.rollouts.messages import Message
from gymdata.store.paths import Facts, Identity


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """A judge's completion. ``refused``: why it would not judge; ``usage``: token counts as the engine reports them;
    ``finish_reason``: as the engine names it, where it does."""

    text: str
    usage: Mapping[str, Any] | None = None
    refused: str | None = None
    finish_reason: str | None = None


class Judge(Protocol):
    """Compares two responses to one conversation. ``identity`` is what makes its verdicts its own: model, template and
    every sampling setting; equal identities may share saved verdicts."""

    @property
    def identity(self) -> Identity: ...

    @property
    def default_concurrency(self) -> int:
        """Judgements to keep in flight unless the user says otherwise."""
        ...

    async def start(self) -> Facts:
        """Bring it up; returns facts for run.json."""
        ...

    async def compare(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None, seed: int | None
    ) -> JudgeAnswer:
        """One judgement, sampled with ``seed``. Raises OutsideError("judge", …)."""
        ...

    async def close(self) -> None: ...
