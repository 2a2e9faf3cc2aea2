"""Data sets that are published in shapes of their own: preferences, ratings, conversations, calls of tools."""

from gymdata.interop.formats.published import (
    arena,
    function_calling,
    helpsteer,
    safe_rlhf,
    shp,
    turns_of_text,
    ultrafeedback,
)

__all__ = [
    "arena",
    "function_calling",
    "helpsteer",
    "safe_rlhf",
    "shp",
    "turns_of_text",
    "ultrafeedback",
]
