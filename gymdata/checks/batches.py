"""All checks over the batches of a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gymdata.checks.breaks import Reader
from gymdata.checks.violations import CHECKS, Check, CheckSettings, Selection, Violation
from gymdata.rollouts.ragged import Ints
from gymdata.rollouts.turn_columns import Evidence

if TYPE_CHECKING:
    import pyarrow as pa


class Checks:
    """One object of each check that is needed: its codes are selected, or make rollouts untrainable. ``user_checks``:
    those of a user besides the registered ones."""

    def __init__(self, settings: CheckSettings, selection: Selection, user_checks: Sequence[type[Check]] = ()) -> None:
        kinds = [*(entry.object for entry in CHECKS), *user_checks]
        self.running = [
            check(settings)
            for check in kinds
            if any(code.code in selection.codes or code.severity == "error" for code in check.codes)
        ]

    def find(self, e: Evidence) -> list[Violation]:
        """The violations of a batch, by row, then turn, then position."""
        return sorted((violation for check in self.running for violation in check.find(e)), key=sort_key)

    def find_pairs(self, batch: pa.RecordBatch, rows: Ints, file: str) -> list[Violation]:
        """The same of a batch of the pairs table."""
        return [violation for check in self.running for violation in check.find_pairs(batch, rows, file)]

    def finish(self) -> list[Violation]:
        """The violations that need all rows."""
        return [violation for check in self.running for violation in check.finish()]


def check_batch(e: Evidence, *, vocab_size: int | None = None, reader: Reader | None = None) -> list[Violation]:
    """Every violation of a batch that needs no other batch, by row, then turn, then position. ``reader`` loads the
    tokenizer, and is called only when a turn breaks."""
    checks = Checks(CheckSettings(vocab_size, reader=reader), Selection())
    checks.running = [check for check in checks.running if type(check).finish is Check.finish]
    return checks.find(e)


def sort_key(v: Violation) -> tuple[int, int, str, int]:
    """By which the violations of a file are sorted."""
    return v.row, -1 if v.turn is None else v.turn, v.code, v.position or 0
