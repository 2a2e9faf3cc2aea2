"""Results of tau-bench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS, Format

if TYPE_CHECKING:
    from gymdata.interop.importing import Importing, TableRow


@FORMATS.register("tau-bench")
class TauBench(Format):
    """Results of tau-bench: ``traj`` (messages), ``reward``, ``task_id``, the task in ``info``. Definitions of tools are not
    in the file; a run that ended with an error is refused, for its reward of 0 is none."""

    content = "results of tau-bench"
    item = "a result of tau-bench"
    marks = (b'"traj"', b'"task_id"')
    holds_text = holds_reward = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        return row.keys() >= {"task_id", "reward", "info", "traj"} and isinstance(row["traj"], list)

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.interop.importing import BadItem
        from gymdata.interop.rows import number_or_none
        from gymdata.interop.text_rows import conversation, rollout_row

        info = item["info"]
        reward = number_or_none(item["reward"])
        if reward is None:
            raise BadItem("S102", f"reward: got {item['reward']!r:.100}, expected a number")
        if "error" in info:
            raise BadItem("S103", f"info.error: the run ended with {info['error']!r:.200}")
        return rollout_row(
            item | {"task": info.get("task")},
            [],
            conversation(item["traj"], "traj"),
            importing,
            reward=reward,
            texts=("traj", "reward", "task_id"),
            about=("info", "trial"),
            group=str(item["task_id"]),
        )
