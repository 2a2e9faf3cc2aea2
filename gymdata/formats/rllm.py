"""Episodes of rLLM."""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import Field

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.models import Int32, Model, Number, OrEmpty, Sampled, Several, read, turns_of
from gymdata.formats.text.rows import conversation, first_row, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import JsonObject


class Step(Model):
    chat_completions: list[JsonObject] = Field(min_length=1)
    prompt_ids: Several[Int32]
    response_ids: Several[Int32]
    #: Empty where the sampler gave none.
    logprobs: Several[Number]
    reward: Number | None = None


class Trajectory(Model):
    uid: Any = None
    name: str | None = None
    steps: list[Step]
    task: Any = None
    reward: Any = None


class Episode(Model):
    id: Any = None
    task: Any = None
    termination_reason: Any = None
    is_correct: Any = None
    metrics: OrEmpty[JsonObject]


@FORMATS.register("rllm")
class Rllm(Format):
    """rLLM's episodes: a rollout per trajectory, the messages of its last step, of which those of each step before must be
    the beginning; ``reward``, and ``is_correct`` and ``metrics`` by name; ``prompt_ids``, ``response_ids``, ``logprobs`` and
    rewards of steps."""

    content = "episodes of rLLM"
    several = "trajectories"
    holds_text = holds_ids = holds_logprobs = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        trajectory = first_row(row["trajectories"]) if isinstance(row.get("trajectories"), list) else row
        return "chat_completions" in first_row(trajectory.get("steps"))

    def item_of(self, part: Any, document: JsonObject) -> Any:
        return {"trajectory": part, "episode": {k: v for k, v in document.items() if k != self.several}}

    def row(self, item: Any, importing: Importing) -> TableRow:
        item = item if "trajectory" in item else self.item_of(item, {})
        trajectory, episode = read(Trajectory, item["trajectory"]), read(Episode, item["episode"])
        steps = trajectory.steps
        histories = [step.chat_completions for step in steps]
        if not steps or any(longer[: len(shorter)] != shorter for shorter, longer in itertools.pairwise(histories)):
            raise BadItem("S102", f"steps: got {len(steps)} that are not one conversation")
        messages = conversation(histories[-1], "chat_completions")
        calls = []
        for n, step in enumerate(steps):
            said = [message for message in messages[: len(step.chat_completions)] if message["role"] == "assistant"]
            ids = step.prompt_ids, step.response_ids, step.logprobs or None
            calls.append(Sampled(f"steps[{n}]", *ids, said[-1] if said else {}, {"reward": step.reward}))
        task = episode.task if trajectory.task is None else trajectory.task
        about = {"name": trajectory.name, "termination_reason": episode.termination_reason}
        name = episode.id.split(":")[0] if isinstance(episode.id, str) and episode.id else None
        return rollout_row(
            {**(task if isinstance(task, dict) else {"task": task}), **about},
            [],
            messages,
            importing,
            reward=score(trajectory.reward, "reward"),
            rewards=named_scores({"is_correct": episode.is_correct} | episode.metrics),
            about=tuple(about),
            group=f"{name}-{trajectory.name}" if name and trajectory.name else name,
            truncated="max_" in str(episode.termination_reason).lower(),
            turns=turns_of(calls, importing, "steps"),
            known_as=[episode.id, trajectory.uid, trajectory.name] if episode.id or trajectory.uid else item,
        )
