"""Where the odd values of NeMo Gym rows are: positions of ids and log-probabilities, and relations between calls.

What always holds: this is loaded only when a scan has met something odd; it finds every place, in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gymdata.adapters.formats.nemo_rows import Row
from gymdata.core import breaks, tokens
from gymdata.core.causes import Reader
from gymdata.core.checks import POSITIVE_TOLERANCE
from gymdata.core.violations import Violation

#: (row, rollout id, turn, offset of the part in its list, prompt or generation)
IdOwner = tuple[int, str | None, int, int, str]
#: (row, rollout id, turn)
LogProbOwner = tuple[int, str | None, int]


def odd_ids(parts: Sequence[bytes], owners: Sequence[IdOwner], limit: int) -> list[Violation]:
    """T206 for every id that is negative or not below ``limit``. ``parts``: int64 bytes, one an owner."""
    ids = np.frombuffer(b"".join(parts), np.int64)
    places = np.flatnonzero((ids < 0) | (ids >= limit))
    found = []
    ends = np.cumsum([len(part) // 8 for part in parts])
    for place in places:
        k = int(np.searchsorted(ends, place, side="right"))
        row, name, turn, offset, what = owners[k]
        position = offset + int(place - (ends[k - 1] if k else 0))
        found.append(
            Violation("T206", row, name, turn, position, f"0 to {limit - 1}", str(ids[place]), f"in the {what}")
        )
    return found


def odd_log_probs(parts: Sequence[bytes], owners: Sequence[LogProbOwner]) -> list[Violation]:
    """L302 and L303 for every log-probability that is not finite, or positive. ``parts``: float64 bytes, one an owner."""
    values = np.frombuffer(b"".join(parts), np.float64)
    places = np.flatnonzero(~np.isfinite(values) | (values > POSITIVE_TOLERANCE))
    found = []
    ends = np.cumsum([len(part) // 8 for part in parts])
    for place in places:
        k = int(np.searchsorted(ends, place, side="right"))
        position = int(place - (ends[k - 1] if k else 0))
        code, expected = ("L303", "at most 0") if np.isfinite(values[place]) else ("L302", "a finite number")
        found.append(Violation(code, *owners[k], position, expected, str(values[place])))
    return found


def relations(number: int, row: Row, reader: Reader | None = None) -> list[Violation]:
    """Breaks, branches and turns out of order of one row, in which some prompt does not extend the one before."""
    turns, calls = [], []
    for turn, call in enumerate(row.calls):
        if call is not None and call[0]:
            turns.append(turn)
            calls.append(tokens.Call(_int32(call[0]), _int32(call[1]), np.empty(0, np.float32), "stop"))
    return [
        Violation(found.code, number, row.rollout_id, **{**found.place(), "turn": turns[found.turn]})
        for found in breaks.relations(tokens.encode_turns(calls), reader)
    ]


def _int32(data: bytes) -> tokens.Ids:
    return np.frombuffer(data, np.int64).astype(np.int32)
