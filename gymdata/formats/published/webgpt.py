"""Preferences of WebGPT."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.published._compared import Compared, finite
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("webgpt")
class WebGpt(Compared):
    """webgpt_comparisons: the ``full_text`` of ``question``, ``answer_0``, ``answer_1``, and ``score_0``, ``score_1``, whose
    difference is the margin; equal scores are a tie. The quotes that answers refer to by number are not read."""

    content = "preferences of WebGPT"
    keys = ({"question", "answer_0", "answer_1", "score_0", "score_1"},)

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        preference = finite(item, "score_1") - finite(item, "score_0")
        return item["question"]["full_text"], (item["answer_0"], item["answer_1"]), preference, abs(preference)
