"""What sampling settings do to the log-probabilities that were saved with them.

What always holds: only the settings decide, and one that is absent is neutral. Needs no numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def sampling_bias(settings: Mapping[str, Any]) -> str | None:
    """Why log-probabilities sampled with these settings are biased, or None. Absent settings are neutral."""

    def number(name: str, neutral: float) -> float:
        value = settings.get(name)
        return float(value) if isinstance(value, (int, float)) else neutral

    penalties = settings.get("penalties")
    flat = {**settings, **(penalties if isinstance(penalties, Mapping) else {})}
    temperature = number("temperature", 1.0)
    reasons = []
    if temperature == 0:
        reasons.append("greedy decoding (temperature 0)")
    elif temperature != 1 and str(settings.get("logprobs_mode", "processed_logprobs")).startswith("raw"):
        reasons.append(f"raw log-probabilities at temperature {temperature:g}")
    if number("top_p", 1.0) < 1:
        reasons.append(f"top_p {settings['top_p']}")
    if number("top_k", 0) > 0:
        reasons.append(f"top_k {settings['top_k']}")
    if number("min_p", 0.0) > 0:
        reasons.append(f"min_p {settings['min_p']}")
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name, calm in neutral.items():
        value = flat.get(name)
        if isinstance(value, (int, float)) and value != calm:
            reasons.append(f"{name} {value}")
    return ", ".join(reasons) or None
