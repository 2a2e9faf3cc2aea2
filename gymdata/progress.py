"""What a running command reports to whoever watches."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What a stage tells whoever watches. Never raises."""

    def update(self, **counts: float) -> None: ...

    def message(self, text: str) -> None: ...


class NullProgress:
    """Progress that nobody watches."""

    def update(self, **counts: float) -> None: ...

    def message(self, text: str) -> None: ...
