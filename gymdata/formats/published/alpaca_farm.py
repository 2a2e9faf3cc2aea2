"""Preferences of AlpacaFarm and AlpacaEval."""

from __future__ import annotations

import math
from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.published._compared import Compared, finite
from gymdata.formats.text.rows import instruction
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("alpaca-farm")
class AlpacaFarm(Compared):
    """AlpacaFarm's preferences and AlpacaEval's annotations: ``instruction`` (with ``input`` below it), ``output_1``,
    ``output_2``, and ``preference``: below 1.5 the first is the better one, above it the second."""

    content = "preferences of AlpacaFarm"
    keys = ({"instruction", "output_1", "output_2", "preference"},)

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        preference = finite(item, "preference")
        if not 1 <= preference <= 2:
            raise BadItem("S102", f"preference: got {preference}, expected a number from 1 to 2")
        return instruction(item), (item["output_1"], item["output_2"]), preference - 1.5, math.nan
