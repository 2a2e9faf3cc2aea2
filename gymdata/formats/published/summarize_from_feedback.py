"""Comparisons of summaries by people."""

from __future__ import annotations

import math
from typing import Any

from gymdata.formats import FORMATS
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.published._compared import Compared
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("summarize-from-feedback")
class SummarizeFromFeedback(Compared):
    """The comparisons of summarize_from_feedback: ``info`` with a ``post`` or an ``article``, two ``summaries``, and
    ``choice``, the index of the better one. The prompt is the paper's, ``SUBREDDIT``, ``TITLE`` and ``POST`` before
    ``TL;DR:``, as in TRL's ``tldr_preference.py``. Confidence and notes are not read, and neither are the ratings (``axis``)
    of the same data set."""

    content = "comparisons of summaries"
    keys = ({"info", "summaries", "choice"},)

    def compared(self, item: JsonObject) -> tuple[Any, tuple[Any, Any], float, float]:
        info, choice = item["info"], item["choice"]
        if type(choice) is not int or choice not in (0, 1):
            raise BadItem("S102", f"choice: got {choice!r:.100}, expected 0 or 1")
        if len(item["summaries"]) != 2:
            raise BadItem("S102", f"summaries: got {len(item['summaries'])}, expected 2")
        if info.get("post"):
            prompt = f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}\n\nPOST: {info['post']}\n\nTL;DR:"
        else:
            prompt = f"Article:\n{info['article']}\n\nTL;DR:"
        first, second = (summary["text"].strip() for summary in item["summaries"])
        return prompt, (first, second), 1.0 if choice else -1.0, math.nan
