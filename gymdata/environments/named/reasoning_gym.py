"""Task families of reasoning-gym: procedural questions with a verifier each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from gymdata.environments.named import ENVIRONMENTS, NamedEnvironment
from gymdata.environments.port import Verdict
from gymdata.environments.single_turn import ScoredEpisode
from gymdata.environments.step import reward_of
from gymdata.errors import OutsideError, UsageError, raised
from gymdata.rollouts.messages import Task


@ENVIRONMENTS.register("reasoning_gym", example="reasoning_gym:chain_sum")
class ReasoningGym(NamedEnvironment):
    """A task family of reasoning-gym; ``env_args``: those of its configuration (``seed`` 0, ``size`` 500, …)."""

    module, extra = "reasoning_gym", "reasoning-gym"

    def __init__(self, which: str, arguments: Mapping[str, Any], timeout_s: float) -> None:
        super().__init__(which, arguments, timeout_s)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if which not in DATASETS:
            raise UsageError.unknown_choice("--env reasoning_gym", which, sorted(DATASETS))
        try:
            self.dataset = reasoning_gym.create_dataset(which, **self.arguments)
        except (TypeError, ValueError, AssertionError) as error:
            text = f"--set env_args of reasoning_gym:{which}: {raised(error)}"
            raise UsageError(text, hint=f"its settings are those of {DATASETS[which][1].__name__}") from error

    def tasks(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.dataset)):
            entry = self.dataset[index]
            row = {"task_id": f"{self.which}-{index}", "prompt": entry["question"], "index": index}
            yield row | ({"answer": entry["answer"]} if isinstance(entry["answer"], str) else {})

    async def start(self, task: Task, rollout_index: int) -> ScoredEpisode:  # noqa: ARG002 - the port's signature
        index = task.row.get("index")
        if not isinstance(index, int) or not 0 <= index < len(self.dataset):
            text = f"task {task.task_id}: index: got {index!r}, expected the number of a task below {len(self.dataset)}"
            raise OutsideError("environment", text, hint="leave TASKS out, so that the tasks are the family's own")
        return ScoredEpisode(task, "score_answer", partial(self.score, index), self.timeout_s)

    def score(self, index: int, text: str) -> Verdict:
        """The family's own score of what stands in the last ``<answer>…</answer>``, or of the text where there is none. Some
        verifiers raise at an answer of another form, and give no score."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(text)
        answer = text.strip() if answer is None else answer
        try:
            score = reward_of(self.dataset.score_answer(answer, self.dataset[index]), "score_answer")
        except Exception as error:  # noqa: BLE001 - the tokens are good, whatever the verifier raises
            return Verdict(None, {"scored_answer": answer, "score_error": raised(error)})
        return Verdict(score, {"scored_answer": answer})
