"""Words by which a row says what an answer is worth: labels, scores, and marks of what is not trained.

Invariant: each of these columns is understood or makes its row unusable, in every format; only a null and an empty cell say
nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gymdata.formats.conversion.importing import BadItem
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.truth import NUMBER, is_number, truth

#: Columns of whether an answer is desirable.
LABELS = ("label", "kto_tag")
#: Columns of a score; the first that is there is the reward, before the labels.
SCORES = ("reward", "rewards", "score")
#: Ratings of HelpSteer, which are named rewards.
_RATINGS = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
#: A key of a message that may say whether it is trained.
_MAY_MARK = re.compile(r"loss|train|mask|weight|supervis", re.IGNORECASE)
#: Whether a message, or a row, is trained. ``train_detail``: of axolotl, a mark for each span of a message.
MARKS = ("weight", "loss_weight", "trainable", "train", "training", "loss", "loss_mask", "masked", "train_detail")


def number_of(value: Any, name: str) -> float | None:
    """The number of a column, which may be text, or a boolean (1 or 0); None where it says nothing. Raises BadItem for
    anything else."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        text = value.strip()
        number = float(text) if NUMBER.fullmatch(text) else {"true": 1.0, "false": 0.0}.get(text.casefold())
    else:
        number = as_float(value) if is_number(value) else None
    if number is None:
        raise BadItem.value(name, value, "a number")
    return number


def score(value: Any, name: str) -> float | None:
    """``number_of`` what an answer is worth, which is finite: NaN is neither 0 nor unknown. Raises BadItem."""
    number = number_of(value, name)
    if number is not None and not math.isfinite(number):
        raise BadItem("R502", f"{name}: got {number}, expected a finite number")
    return number


def finite(row: JsonObject, name: str) -> float:
    """The score in a column. Raises BadItem where there is none."""
    if (number := score(row.get(name), name)) is None:
        raise BadItem.value(name, row.get(name), "a number")
    return number


def named_scores(values: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, float]:
    """The scores of these columns, by default of all, but NaN: a reward that is not known has no name. Raises BadItem."""
    cells = {name: values.get(name) for name in (values if names is None else names)}
    numbers = {name: score(cell, name) for name, cell in cells.items() if cell == cell}
    return {name: number for name, number in numbers.items() if number is not None}


def worth(row: JsonObject) -> tuple[float | None, dict[str, float]]:
    """(reward, named rewards) that a row states of its answer. Raises BadItem for a column of these names that says
    something else."""
    parts = row.get("rewards")
    if isinstance(parts, list) and len(parts) == 1:
        row = row | {"rewards": parts[0]}
    named = named_scores(parts) if isinstance(parts, dict) else {}
    rewards = {name: score(row.get(name), name) for name in SCORES if not (name == "rewards" and named)}
    for name in LABELS:
        if row.get(name) not in (None, ""):
            if (label := truth(row[name])) is None:
                expected = "a label: true or false, 1 or 0, yes or no, desirable or undesirable, chosen or rejected"
                raise BadItem.value(name, row[name], expected)
            rewards[name] = float(label)
    known = {name: number for name, number in rewards.items() if number is not None}
    total = next(iter(known.values() if known or len(named) != 1 else named.values()), None)
    # A category, as "hard", may have the name of a rating.
    ratings = [n for n in _RATINGS if is_number(row.get(n)) or NUMBER.fullmatch(str(row.get(n)))]
    return total, known | named | named_scores(row, ratings)


def as_float(value: float) -> float:
    """A whole number that no float can hold is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_trained(holder: Mapping[str, Any], where: str = "") -> bool:
    """Whether a message, or a row, is trained: not where one of its marks says that it is not. Raises BadItem for a mark
    that is not understood. ``where``: before the mark's name in the error."""
    trained = True
    if where and (
        odd := next((n for n in holder if n not in MARKS and _MAY_MARK.search(n) and _says(holder[n])), None)
    ):
        raise BadItem("S102", f"{where}{odd}: is not known, expected one of {', '.join(MARKS)}")
    for name in MARKS:
        value = holder.get(name)
        if not _says(value):
            continue
        if (mark := truth(value)) is None:
            raise BadItem.value(where + name, value, "whether all of it is trained: true or false, 1 or 0")
        trained &= mark is not (name == "masked")
    return trained


def _says(value: Any) -> bool:
    """Whether a cell says something."""
    return value is not None and value not in ("", [])
