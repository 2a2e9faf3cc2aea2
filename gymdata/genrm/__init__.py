"""Pairwise judging, without the judge: which comparisons are made, how a judge's text is parsed, and how verdicts
become rewards.

Invariants: a comparison that failed is missing and never a number; swapping the positions of every comparison changes
no reward; the order of the rows changes nothing. "As published" names the reference behaviour that users know; where
ours differs, the function says how.
"""

from __future__ import annotations

from gymdata.genrm.aggregate import AGGREGATORS, Adjustments, Rewards, Sizes, aggregate, simple_tiebreaker
from gymdata.genrm.bias import against_rewards, bias_report
from gymdata.genrm.matches import Matches, position_inconsistency, winners
from gymdata.genrm.preferences import Preferences, preferences
from gymdata.genrm.ranking import bradley_terry, win_rate
from gymdata.genrm.schedule import STRATEGIES, Match, all_pairs, both_orders, circular, schedule
from gymdata.genrm.text import EMPTY, answer_text, plain_text, reasoning_text, response_texts, shown, style_density
from gymdata.genrm.verdict import VERDICT_SCHEMA, Verdict, parse_last, parse_published

__all__ = [
    "AGGREGATORS",
    "EMPTY",
    "STRATEGIES",
    "VERDICT_SCHEMA",
    "Adjustments",
    "Match",
    "Matches",
    "Preferences",
    "Rewards",
    "Sizes",
    "Verdict",
    "against_rewards",
    "aggregate",
    "all_pairs",
    "answer_text",
    "bias_report",
    "both_orders",
    "bradley_terry",
    "circular",
    "parse_last",
    "parse_published",
    "plain_text",
    "position_inconsistency",
    "preferences",
    "reasoning_text",
    "response_texts",
    "schedule",
    "shown",
    "simple_tiebreaker",
    "style_density",
    "win_rate",
    "winners",
]
