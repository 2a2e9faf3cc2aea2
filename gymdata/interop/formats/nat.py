"""Formats of the NeMo Agent Toolkit: trajectories, preference pairs as JSON lines, and trajectories of pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS, Format, Place
from gymdata.interop.importing import Importing
from gymdata.interop.rows import KINDS
from gymdata.interop.trajectories import nat, nat_pairs
from gymdata.interop.trajectories.own import named_turns
from gymdata.rollouts.messages import JsonObject, RolloutRow, TableRow
from gymdata.store.lines import encode_any

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.interop.exporting import Export
    from gymdata.store.stage_output import Part


class _Nested(Format):
    """Trajectories, which may be in collections and lists."""

    suffixes = (".json", ".jsonl")
    #: The column by which trajectories are put into inner lists.
    group = "group_id"

    def recognise(self, value: Any) -> bool:
        if not nat.is_nested(value) or nat.holds_pairs(value) != (self.table == "pairs"):
            return False
        # Other projects call their lists trajectories, too.
        first = [trajectory for _, trajectory in islice(nat.trajectories_of(value), 20) if isinstance(trajectory, dict)]
        if not first:
            groups = value.get("trajectories") if isinstance(value, dict) else value
            return isinstance(groups, list) and all(isinstance(group, list) for group in groups)
        return any("episode" in trajectory for trajectory in first)

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        return nat.trajectories_of(value)

    def place(self, value: Any, group: int, number: int) -> str:  # noqa: ARG002 - all of its documents nest
        return f"trajectories[{group}][{number}]: " if group or number else ""

    def trajectory(self, row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
        raise NotImplementedError

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[tuple[str, str, JsonObject]]:
        from gymdata.store.columns import to_rows

        for row in export.rows(batches, to_rows):
            turns = self.written_turns(row)
            if (trajectory := self.trajectory(row, export.lost)) is not None:
                export.carry(self.carries, turns)
                yield row[self.group], row["run_id"], trajectory

    def save(self, converted: Iterable[Any], part: Part, export: Export) -> None:
        export.written = nat.write(converted, part.path, lines=part.name.endswith(".jsonl"))


@FORMATS.register("nat-trajectories")
class NatTrajectories(_Nested):
    """Trajectories of the NeMo Agent Toolkit: a collection (``.json``), or a trajectory per line."""

    content = "trajectories of the NeMo Agent Toolkit"
    holds_ids = holds_logprobs = True
    item = "a trajectory"
    holds_reward = True
    carries = KINDS["rollouts"]

    def written_turns(self, row: TableRow) -> Collection[int] | None:
        return named_turns(row)

    def row(self, item: Any, importing: Importing) -> TableRow:
        return nat.row_of(item, importing)

    def trajectory(self, row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
        return nat.trajectory_of(row, lost)


class _Pairs(Format):
    """Either shape of pairs is read, whatever the format is called."""

    table = "pairs"
    item = "a pair"
    holds_text = True

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        lines = any(map(nat_pairs.is_dpo_line, value[:20])) if isinstance(value, list) else nat_pairs.is_dpo_line(value)
        return super().items(value) if lines else nat.trajectories_of(value)

    def place(self, value: Any, group: int, number: int) -> str:
        nested = nat.is_nested(value) and (group or number)
        return f"trajectories[{group}][{number}]: " if nested else super().place(value, group, number)

    def row(self, item: Any, importing: Importing) -> TableRow:
        return nat_pairs.row_of(item, importing)


@FORMATS.register("nat-dpo-items")
class NatDpoItems(_Pairs, _Nested):
    """Preference pairs as trajectories of one ``DPOItem`` each."""

    content = "trajectories of DPO items"
    holds_ids = True
    carries = KINDS["pairs"]
    group = "task_id"

    def trajectory(self, row: RolloutRow, lost: Counter[str]) -> JsonObject | None:
        return nat_pairs.dpo_trajectory(row, lost)


@FORMATS.register("nat-dpo")
class NatDpo(_Pairs):
    """Preference pairs as JSON lines: ``prompt``, ``chosen_response`` and ``rejected_response``."""

    content = "DPO rows of the NeMo Agent Toolkit"
    suffixes = (".jsonl",)

    def recognise(self, value: Any) -> bool:
        return nat_pairs.is_dpo_line(value[0] if isinstance(value, list) and value else value)

    def write(self, row: RolloutRow, lost: Counter[str]) -> bytes | None:
        line = nat_pairs.dpo_line(row, lost)
        return None if line is None else encode_any(line) + b"\n"
