"""Formats of the NeMo Agent Toolkit: trajectories, preference pairs as JSON lines, and trajectories of pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from gymdata.formats import FORMATS, Format, Place
from gymdata.formats.conversion.importing import BadItem, Importing
from gymdata.formats.conversion.rows import KINDS
from gymdata.rollouts.messages import JsonObject, TableRow, json_text

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.stage_output import Part


class _Nested(Format):
    """Trajectories, or rows of pairs, which may be in collections and lists."""

    suffixes: ClassVar[tuple[str, ...]] = (".json", ".jsonl")
    #: The column by which trajectories are put into inner lists.
    group = "group_id"

    def recognise(self, value: Any) -> bool:
        # Other projects call their lists trajectories, too.
        first = [item for _, item in islice(self.items(value), 20) if isinstance(item, dict) and "episode" in item]
        step = next((item["episode"][0] for item in first if item["episode"]), None)
        of_pairs = isinstance(step, dict) and "chosen_response" in step
        return bool(first) and of_pairs == (self.table == "pairs")

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        """((group, place in it), trajectory) of a document."""
        groups = value.get("trajectories", [value]) if isinstance(value, dict) else value
        if not isinstance(groups, list):
            yield (0, 0), BadItem("S102", "trajectories: expected a list") if isinstance(value, dict) else value
            return
        for g, group in enumerate(groups):
            for i, trajectory in enumerate(group if isinstance(group, list) else [group]):
                yield (g, i), trajectory

    def place(self, value: Any, group: int, number: int) -> str:
        return (
            f"{'trajectories' if isinstance(value, dict) else 'row '}[{group}][{number}]: " if group or number else ""
        )

    def trajectory(self, row: TableRow, lost: Counter[str]) -> JsonObject | None:
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


@FORMATS.register("nat-trajectories")
class NatTrajectories(_Nested):
    """Trajectories of the NeMo Agent Toolkit: a collection (``.json``), or a trajectory per line."""

    content = "trajectories of the NeMo Agent Toolkit"
    holds_ids = holds_logprobs = True
    item = "a trajectory"
    holds_reward = True
    carries = KINDS["rollouts"]

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.formats.trajectories.nat import row_of

        return row_of(item, importing)

    def trajectory(self, row: TableRow, lost: Counter[str]) -> JsonObject | None:
        from gymdata.formats.trajectories.nat import trajectory_of

        return trajectory_of(row, lost)


class _Pairs(_Nested):
    """Either shape of pairs is read, whatever the format is called."""

    table = "pairs"
    item = "a pair"
    holds_text = True
    group = "task_id"

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.formats.trajectories.nat_pairs import row_of

        return row_of(item, importing)


@FORMATS.register("nat-dpo-items")
class NatDpoItems(_Pairs):
    """Preference pairs as trajectories of one ``DPOItem`` each."""

    content = "trajectories of DPO items"
    holds_ids = True
    carries = KINDS["pairs"]

    def trajectory(self, row: TableRow, lost: Counter[str]) -> JsonObject | None:
        from gymdata.formats.trajectories.nat_pairs import dpo_trajectory

        return dpo_trajectory(row, lost)


@FORMATS.register("nat-dpo")
class NatDpo(_Pairs):
    """Preference pairs as JSON lines: ``prompt``, ``chosen_response`` and ``rejected_response``."""

    content = "DPO rows of the NeMo Agent Toolkit"
    suffixes = (".jsonl",)

    def recognise(self, value: Any) -> bool:
        row = value[0] if isinstance(value, list) and value else value
        return isinstance(row, dict) and {"prompt", "chosen_response"} <= row.keys() and "episode" not in row

    def trajectory(self, row: TableRow, lost: Counter[str]) -> JsonObject | None:
        from gymdata.formats.trajectories.nat_pairs import dpo_line

        return dpo_line(row, lost)
