"""Comparisons of JudgeBench."""

from __future__ import annotations

import math
import re
from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.published._compared import Compared
from gymdata.rollouts.messages import JsonObject

_LABEL = re.compile(r"\s*A\s*([<=>]+)\s*B\s*|\s*B\s*([<=>]+)\s*A\s*", re.IGNORECASE)


@FORMATS.register("judge-bench")
class JudgeBench(Compared):
    """JudgeBench: ``question``, ``response_A``, ``response_B``, and ``label``, which says ``A>B`` or ``B>A``; ``A=B`` is a
    tie. Which model answered, and its source, are not read."""

    content = "comparisons of JudgeBench"
    keys = ({"question", "response_A", "response_B", "label"},)

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        match = _LABEL.fullmatch(str(item["label"]))
        signs = set(match[1] or match[2]) if match else set()
        if match is None or len(signs) != 1:
            raise BadItem("S102", f"label: got {item['label']!r:.100}, expected A>B or B>A")
        better = {"=": 0.0, ">": -1.0, "<": 1.0}[signs.pop()] * (1 if match[1] else -1)
        return item["question"], (item["response_A"], item["response_B"]), better, math.nan
