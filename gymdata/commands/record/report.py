"""What a recording amounts to."""

from __future__ import annotations

from dataclasses import dataclass

from gymdata.errors import EXIT_FAULTS, EXIT_INTERRUPTED, EXIT_OK, counted
from gymdata.public import Figures, Report, Row


@dataclass(frozen=True, slots=True, repr=False)
class RecordSummary(Report):
    """The whole run (``rollouts`` … ``tokens_generated``) and this call: ``new_rollouts``, ``failures`` of the engine,
    ``unparsed_calls``: answers that spell a tool call and have none, ``unread_turns``: see ``stitch``, ``command_exit``: of
    the command that was run, ``interrupted``: by a signal. ``open``: sessions that are not ended; the same command resumes
    them."""

    path: str
    run_id: str
    rollouts: int
    completed: int
    truncated: int
    turns: int
    tokens_generated: int
    reward: Figures
    new_rollouts: int
    failures: int
    open: int
    command_exit: int | None
    interrupted: bool
    seconds: float
    unparsed_calls: int = 0
    unread_turns: int = 0

    @property
    def exit_code(self) -> int:
        """130 interrupted; 1 when the command failed; else 0."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAULTS if self.command_exit else EXIT_OK

    def rows(self) -> list[Row]:
        mean, n_scored = self.reward["mean"], self.reward["n"]
        scored = "" if n_scored == self.rollouts else f" ({n_scored:,} of {counted(self.rollouts, 'rollout')} scored)"
        optional: list[Row] = [
            ("failed requests", self.failures),
            (
                "unparsed tool calls",
                self.unparsed_calls and f"{self.unparsed_calls:,}: they are text; see --tool-parser",
            ),
            ("unread turns", self.unread_turns and f"{self.unread_turns:,}: trained with --abandoned keep alone"),
            ("open sessions", self.open and f"{counted(self.open, 'session')}: rerun to resume"),
            ("exit code of the command", self.command_exit),
        ]
        return [
            ("rollouts", f"{self.rollouts:,} ({self.new_rollouts:,} new)"),
            ("turns", self.turns),
            ("tokens generated", self.tokens_generated),
            ("reward", "not scored" if mean is None else f"{mean:.3f}{scored}"),
            *(row for row in optional if row[1]),
            ("time", f"{self.seconds:.1f} s"),
            ("written to", self.path),
        ]
