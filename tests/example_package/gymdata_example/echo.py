"""An environment: words that are to be said again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gymdata.environments.named import ENVIRONMENTS, NamedEnvironment
from gymdata.environments.port import Verdict
from gymdata.environments.single_turn import SingleTurnEpisode
from gymdata.rollouts.messages import Message, Task


@ENVIRONMENTS.register("echo", example="echo:words")
class Echo(NamedEnvironment):
    """Words that are to be said again."""

    module, extra = "gymdata_example", "collect"

    def tasks(self) -> Iterator[dict[str, Any]]:
        for number, word in enumerate(self.arguments.get("words", ["yes", "no"])):
            yield {"task_id": f"{self.which}-{number}", "prompt": word}

    async def start(self, task: Task, rollout_index: int) -> _Said:
        return _Said(task)


class _Said(SingleTurnEpisode):
    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict:
        return Verdict(float(messages[-1]["content"] == messages[0]["content"]))
