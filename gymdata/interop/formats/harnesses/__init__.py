"""Rollouts that other harnesses saved as text, a file for each harness or shape."""

from gymdata.interop.formats.harnesses import (
    chat_logs,
    dumps,
    inspect_ai,
    sessions,
    swe_agent,
    tau_bench,
    trl_completions,
    verifiers,
    verifiers_traces,
)

__all__ = [
    "chat_logs",
    "dumps",
    "inspect_ai",
    "sessions",
    "swe_agent",
    "tau_bench",
    "trl_completions",
    "verifiers",
    "verifiers_traces",
]
