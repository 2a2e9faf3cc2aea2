"""Files of trajectories, as the NeMo Agent Toolkit writes them: collections of lists, or a trajectory per line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from gymdata.formats import Format
from gymdata.formats.conversion.importing import BadItem
from gymdata.formats.text.rows import first_row
from gymdata.rollouts.messages import JsonObject, TableRow, json_text

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.stage_output import Part


class Nested(Format):
    """Trajectories, or rows of pairs, which may be in collections and lists."""

    suffixes: ClassVar[tuple[str, ...]] = (".json", ".jsonl")
    #: The column by which trajectories are put into inner lists.
    group = "group_id"

    def recognise(self, value: Any) -> bool:
        # Other projects call their lists trajectories, too.
        items = (item for _, item in islice(self.items(value), 20) if isinstance(item, dict) and "episode" in item)
        step = next((first_row(item["episode"]) for item in items), None)
        return step is not None and ("chosen_response" in step) == (self.table == "pairs")

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        groups = value.get("trajectories", [value]) if isinstance(value, dict) else value
        if not isinstance(groups, list):
            groups = [BadItem("S102", "trajectories: expected a list") if isinstance(value, dict) else value]
        name = "trajectories" if isinstance(value, dict) else "row "
        for g, group in enumerate(groups):
            for i, trajectory in enumerate(group if isinstance(group, list) else [group]):
                yield f"{name}[{g}][{i}]: " if g or i else "", trajectory

    def trajectory(self, row: TableRow, lost: Counter[str]) -> JsonObject | None:
        """The trajectory of a row (as ``to_rows`` gives it); None when it has no place in the format."""
        raise NotImplementedError

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[tuple[str, str, bytes]]:
        """(group, run, JSON) of each trajectory."""
        from gymdata.store.columns import to_rows

        for row in export.rows(batches, to_rows):
            if (trajectory := self.trajectory(row, export.lost)) is not None:
                export.carry(self.carries)
                yield row[self.group], row["run_id"], json_text(trajectory).encode()

    def save(self, converted: Iterable[tuple[str, str, bytes]], part: Part, export: Export) -> None:
        """A trajectory per line, or a collection with a list for each group, in the order in which they first appear."""
        if part.name.endswith(".jsonl"):
            super().save((text + b"\n" for _, _, text in converted), part, export)
            return
        groups: dict[str, list[bytes]] = {}
        runs: set[str] = set()
        for group, run, text in converted:
            groups.setdefault(group, []).append(text)
            runs.add(run)
            export.written += 1
        lists = b", ".join(b"[" + b", ".join(group) + b"]" for group in groups.values())
        names = json_text(", ".join(sorted(runs))).encode()
        part.path.write_bytes(b'{"trajectories": [' + lists + b'], "run_id": ' + names + b"}")
