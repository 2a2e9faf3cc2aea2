"""Episodes of rLLM."""

from __future__ import annotations

import itertools
from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.text.rows import conversation, first_row, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("rllm")
class Rllm(Format):
    """rLLM's episodes: a rollout per trajectory, the messages of its last step, of which those of each step before must be
    the beginning; ``reward``, and ``is_correct`` and ``metrics`` by name. Ids and log-probabilities of its steps are not
    read."""

    content = "episodes of rLLM"
    several = "trajectories"
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        trajectory = first_row(row["trajectories"]) if isinstance(row.get("trajectories"), list) else row
        return "chat_completions" in first_row(trajectory.get("steps"))

    def item_of(self, part: Any, document: JsonObject) -> Any:
        return {"trajectory": part, "episode": {k: v for k, v in document.items() if k != self.several}}

    def row(self, item: Any, importing: Importing) -> TableRow:
        item = item if "trajectory" in item else self.item_of(item, {})
        trajectory, episode = item["trajectory"], item["episode"]
        importing.count_unread(trajectory, "steps", "response_ids")
        histories = [step["chat_completions"] for step in trajectory["steps"]]
        if not histories or any(longer[: len(shorter)] != shorter for shorter, longer in itertools.pairwise(histories)):
            raise BadItem("S102", f"steps: got {len(histories)} that are not one conversation")
        correct, metrics = episode.get("is_correct"), episode.get("metrics") or {}
        named = {"is_correct": correct}
        task = trajectory.get("task") if trajectory.get("task") is not None else episode.get("task")
        row = dict(task) if isinstance(task, dict) else {"task": task}
        row |= {"name": trajectory.get("name"), "termination_reason": episode.get("termination_reason")}
        episode_id = episode.get("id")
        name = episode_id.split(":")[0] if isinstance(episode_id, str) and episode_id else None
        return rollout_row(
            row,
            [],
            conversation(histories[-1], "chat_completions"),
            importing,
            reward=score(trajectory.get("reward"), "reward"),
            rewards=named_scores(named | metrics),
            about=("name", "termination_reason"),
            group=f"{name}-{trajectory['name']}" if name and trajectory.get("name") else name,
            truncated="max_" in str(episode.get("termination_reason")).lower(),
        )
