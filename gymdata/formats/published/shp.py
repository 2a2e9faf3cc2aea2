"""Preferences of SHP."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.published._compared import Compared, finite
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("shp")
class Shp(Compared):
    """SHP: ``history``, ``human_ref_A``, ``human_ref_B``, and ``labels``, 1 where A is preferred. The margin is the
    difference of the scores, which Reddit's voters gave."""

    content = "preferences of SHP"
    keys = ({"history", "human_ref_A", "human_ref_B", "labels"},)

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        label = item["labels"]
        if type(label) is not int or label not in (0, 1):
            raise BadItem("S102", f"labels: got {label!r:.100}, expected 1 (A is preferred) or 0")
        margin = finite(item, "score_A") - finite(item, "score_B")
        answers = item["human_ref_A"], item["human_ref_B"]
        return item["history"], answers, -1.0 if label else 1.0, margin if label else -margin
