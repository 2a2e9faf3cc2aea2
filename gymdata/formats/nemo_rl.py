"""NeMo RL's preferences."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.formats.text.export import TOOLS, TextFormat, has_tools, line, preference_parts
from gymdata.formats.text.rows import answer, conversation, pair_row
from gymdata.formats.text.words import finite


@FORMATS.register("nemo-rl-preference")
class NemoRlPreference(TextFormat):
    """``context``, and ``completions`` of ``rank`` 0 (chosen) and 1 (rejected), for NeMo RL's DPO and reward models
    (``PreferenceDataset`` in ``nemo_rl/data/datasets/preference_datasets/preference_dataset.py`` and
    ``preference_preprocessor`` in ``nemo_rl/data/processors.py`` of NVIDIA-NeMo/RL)."""

    table = "pairs"
    columns = None
    content = "preferences of NeMo RL"
    holds_text = True

    def recognise_row(self, row: JsonObject) -> bool:
        sides = row.get("completions")
        return "context" in row and isinstance(sides, list) and all(isinstance(s, dict) and "rank" in s for s in sides)

    def row(self, item: Any, importing: Importing) -> TableRow:
        sides = sorted(item["completions"], key=lambda side: finite(side, "rank"))
        ranks = [finite(side, "rank") for side in sides]
        if len(ranks) != 2 or ranks[0] == ranks[1]:
            given = [side["rank"] for side in sides]
            raise BadItem("S102", f"completions: got the ranks {given}, expected two that differ")
        chosen, rejected = (answer(side["completion"], "completion") for side in sides)
        return pair_row(item, conversation(item["context"], "context"), (chosen, rejected), importing)

    def write(self, row: TableRow, lost: Counter[str]) -> bytes:
        prompt, *sides = preference_parts(row, lost)
        lost["margins"] += not math.isnan(row["margin"])
        lost[TOOLS] += has_tools(row)
        return line({"context": prompt, "completions": [{"rank": n, "completion": c} for n, c in enumerate(sides)]})
