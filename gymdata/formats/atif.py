"""ATIF, the Agent Trajectory Interchange Format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing
from gymdata.formats.conversion.rows import KINDS
from gymdata.rollouts.messages import RolloutRow, TableRow, json_text

if TYPE_CHECKING:
    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.stage_output import Part


@FORMATS.register("atif")
class Atif(Format):
    """ATIF trajectories, 1.x: a trajectory per line, or one or a list of them in a ``.json`` file."""

    content = "ATIF trajectories"
    item = "an ATIF trajectory"
    suffixes = (".jsonl", ".json")
    holds_ids = holds_logprobs = holds_reward = True
    carries = KINDS["rollouts"]

    def recognise(self, value: Any) -> bool:
        if isinstance(value, list):
            return any(map(self.recognise, value[:20]))
        return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF-")

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.formats.trajectories.atif import row_of

        return row_of(item, importing)

    def write(self, row: RolloutRow, lost: Counter[str]) -> bytes | None:
        from gymdata.formats.trajectories.atif import trajectory_of

        trajectory = trajectory_of(row, lost)
        return None if trajectory is None else json_text(trajectory).encode() + b"\n"

    def save(self, converted: Iterable[bytes], part: Part, export: Export) -> None:
        """One trajectory is a ``.json`` document itself, several are a list."""
        super().save(converted, part, export)
        if part.name.endswith(".json"):
            text = part.path.read_bytes().rstrip(b"\n")
            part.path.write_bytes(text if export.written < 2 else b"[" + text.replace(b"\n", b",\n") + b"]\n")
