"""Structure of rows: S101 to S104. Readers find those of single rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gymdata.checks.violations import CHECKS, Check, Violation, code_pages
from gymdata.errors import json_value
from gymdata.rollouts.turn_columns import Evidence

_CODES = code_pages("""
S101 unreadable row (error): the row cannot be read
The line is not JSON, not UTF-8, not an object, or torn; or a whole file is cut off or corrupt (then row is 0 and the
detail names the file). Nothing of the row was checked. A torn last line usually means that the writer was killed:
`gymdata collect` repairs its own lines when it resumes.

S102 wrong type (error): a field holds a value of the wrong type
For example ids that are floats or strings, nested id lists, a number beyond 64 bits, a list where an object must be, a
key given twice, a text that is not the JSON that its column holds, or a count column that disagrees with the turns.

S103 missing column (error): a column or field that the table must have is absent
The checks that need the column were not run. The tables and their columns are in schemas/.

S104 newer schema (error): the file was written by a newer gymdata
Its table version is above the one that this gymdata knows, so its meaning is not known. Upgrade gymdata.
""")


@CHECKS.register("structure")
class Structure(Check):
    """Rows and columns that can be read."""

    codes = _CODES

    def find(self, e: Evidence) -> Iterator[Violation]:
        """S102 where a column disagrees with the turns, or has a text that means nothing there; T205 for rollouts without
        turns."""
        turns = e.turns
        per_rollout = np.diff(turns.offsets)
        real = {
            "n_turns": per_rollout,
            "n_context_tokens": turns.by_rollout(turns.delta).lengths,
            "n_generated_tokens": turns.by_rollout(turns.generation).lengths,
        }
        for name, counted in real.items():
            recorded = e.counts.get(name, counted)
            for r in np.flatnonzero(recorded != counted):
                values = {"expected": str(counted[r]), "got": str(recorded[r])}
                yield self.at_rollout(e, int(r), "S102", **values, detail=f"{name} disagrees with turns")
        for r, name, expected, odd in e.odd_texts:
            yield self.at_rollout(e, r, "S102", expected=expected, got=json_value(odd), detail=name)
        temperature = e.temperature if e.temperature is not None else np.empty(0)
        for r in np.flatnonzero(~((temperature >= 0) & (temperature < np.inf))):
            got = str(temperature[r])
            yield self.at_rollout(e, int(r), "S102", expected="a number, at least 0", got=got, detail="temperature")
        for r in np.flatnonzero(per_rollout == 0) if not e.foreign else ():
            yield self.at_rollout(e, int(r), "T205", detail="the rollout has no turns")
