"""Preferences of HelpSteer2 and HelpSteer3."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.published._compared import Compared, finite
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("helpsteer-preference")
class HelpSteerPreference(Compared):
    """HelpSteer2's preferences (``prompt``, ``response_1``, ``response_2``, ``preference_strength``) and HelpSteer3's
    (``context``, ``response1``, ``response2``, ``overall_preference``): the number is the margin. Reasons and the
    preferences of each annotator are not read. HelpSteer's ratings of one answer are ``trl-prompt-completion``."""

    content = "preferences of HelpSteer"
    keys = (
        {"prompt", "response_1", "response_2", "preference_strength"},
        {"context", "response1", "response2", "overall_preference"},
    )

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        if "overall_preference" in item:
            preference = finite(item, "overall_preference")
            return item["context"], (item["response1"], item["response2"]), preference, abs(preference)
        preference = finite(item, "preference_strength")
        return item["prompt"], (item["response_1"], item["response_2"]), preference, abs(preference)
