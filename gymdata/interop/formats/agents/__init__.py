"""Sessions and trajectories of coding agents."""

from gymdata.interop.formats.agents import (
    opencode,
    openhands,
    session_traces,
    sessions,
    swe_trajectories,
)

__all__ = [
    "opencode",
    "openhands",
    "session_traces",
    "sessions",
    "swe_trajectories",
]
