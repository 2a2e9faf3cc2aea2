"""``gymdata serve-genrm``."""

from __future__ import annotations

from gymdata.commands.judge.settings import ServeConfig

from .console import command_words, note
from .flags import with_flags
from .judge import PRINCIPLE


@with_flags(ServeConfig, PRINCIPLE)
def serve_genrm(settings: ServeConfig) -> None:
    """Routes: /compare, /verify, /health and /metrics."""
    from gymdata.commands.judge.serve import run as serving

    serving.serve_genrm(settings, say=note, command=command_words())
