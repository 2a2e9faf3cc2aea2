"""Family B of NeMo Gym rows: B801 to B806. Their rewards have no parts (B807), and no start times (B808): by the time
of the last response, long rollouts would be late ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gymdata.checks.codes.behavior import empty_turn, equal_rewards, loop_text, runaway, storm, unparsed
from gymdata.checks.violations import Violation
from gymdata.interop.nemo_gym.across import Names
from gymdata.interop.nemo_gym.acts import RowActs
from gymdata.interop.nemo_gym.scan import Part

_CUT = "rollouts end in a model call that was cut"


def behavior(parts: Sequence[tuple[str, Part]]) -> Iterator[Violation]:
    """The findings over all rows of all files."""
    for file, part in parts:
        for row, name, turn, period, start, end, size in part.loops:
            yield Violation("B801", row, name, turn, start, detail=loop_text(period, start, end, size), file=file)
    acts = [(file, part.acts) for file, part in parts]
    for file, of in acts:
        for one in of.odd:
            for turn, n in one.silent:
                yield _at("B803", file, one, empty_turn(n), turn)
            if (text := storm(one.failed, one.results)) is not None:
                yield _at("B804", file, one, text)
    cut = runaway(sum(of.cut for _, of in acts), sum(of.known for _, of in acts), _CUT)
    first = next(((file, of.first_cut) for file, of in acts if of.first_cut is not None), None)
    if first is not None and cut is not None:
        yield _at("B802", *first, cut, first[1].last_turn)
    count, parsed, offered = (
        sum(of.spelled for _, of in acts), any(of.parsed for _, of in acts), any(of.offered for _, of in acts)
    )  # fmt: skip
    first = next(((file, of.first_spelled) for file, of in acts if of.first_spelled is not None), None)
    if first is not None and (text := unparsed(count, parsed=parsed, offered=offered)) is not None:
        yield _at("B805", *first, text, first[1].spelled_turn)
    if (text := equal_rewards(np.concatenate([part.across.rewards for _, part in parts]))) is not None:
        firsts = ((file, part.across, part.across.first) for file, part in parts)
        yield next(
            Violation("B806", row, Names(kept)[row], detail=text, file=file)
            for file, kept, row in firsts
            if row is not None
        )


def _at(code: str, file: str, one: RowActs, text: str, turn: int | None = None) -> Violation:
    return Violation(code, one.row, one.rollout_id, turn, detail=text, file=file)
