"""Rollouts that other harnesses saved as text, a file for each harness or shape."""

from gymdata.interop.formats.harnesses import (
    art,
    chat_logs,
    dumps,
    inspect_ai,
    otel,
    rllm,
    swe_agent,
    tau_bench,
    trl_completions,
    verifiers,
    verifiers_traces,
)

__all__ = [
    "art",
    "chat_logs",
    "dumps",
    "inspect_ai",
    "otel",
    "rllm",
    "swe_agent",
    "tau_bench",
    "trl_completions",
    "verifiers",
    "verifiers_traces",
]
