"""Preferences of PKU-SafeRLHF."""

from __future__ import annotations

import math
from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.published._compared import Compared
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("safe-rlhf")
class SafeRlhf(Compared):
    """PKU-SafeRLHF: ``prompt``, ``response_0``, ``response_1``, and ``better_response_id``, which says what is more helpful.
    Which answer is safer, and its labels of harm, are not read."""

    content = "preferences of PKU-SafeRLHF"
    keys = ({"prompt", "response_0", "response_1", "better_response_id"},)

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        better = item["better_response_id"]
        if type(better) is not int or better not in (0, 1):
            raise BadItem("S102", f"better_response_id: got {better!r:.100}, expected 0 or 1")
        return item["prompt"], (item["response_0"], item["response_1"]), 1.0 if better else -1.0, math.nan
