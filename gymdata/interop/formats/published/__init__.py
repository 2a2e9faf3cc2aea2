"""Data sets that are published in shapes of their own: preferences, ratings, conversations, calls of tools."""

from gymdata.interop.formats.published import (
    alpaca_farm,
    arena,
    function_calling,
    helpsteer,
    nectar,
    oasst,
    response_lists,
    safe_rlhf,
    shp,
    summarize_from_feedback,
    turns_of_text,
    ultrafeedback,
    webgpt,
)

__all__ = [
    "alpaca_farm",
    "arena",
    "function_calling",
    "helpsteer",
    "nectar",
    "oasst",
    "response_lists",
    "safe_rlhf",
    "shp",
    "summarize_from_feedback",
    "turns_of_text",
    "ultrafeedback",
    "webgpt",
]
