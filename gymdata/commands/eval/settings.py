"""Settings of ``gymdata eval``: those of collect, greedy by default, and what to report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import pydantic

from gymdata.commands.collect.settings import SAMPLED, CollectConfig
from gymdata.errors import UsageError, option
from gymdata.settings import as_set
from gymdata.store.lineage import lineage


class EvalConfig(CollectConfig):
    """``gymdata eval``."""

    given_as: ClassVar[Mapping[str, str]] = {"tasks": "the tasks file as the second argument"}
    sections: ClassVar[Mapping[str, str]] = {**CollectConfig.sections, "against": "Evaluation"}

    temperature: Annotated[float, SAMPLED] = pydantic.Field(
        0.0, ge=0.0, allow_inf_nan=False, description="Sampling temperature; 0 is greedy."
    )
    output: Path | None = pydantic.Field(
        None, description="Run folder; resumed if it exists (default: runs/eval-TASKS-TIME)."
    )
    against: Path | None = pydantic.Field(
        None, description="Earlier run on the same tasks: the paired difference, and the tasks that regressed."
    )
    by: list[str] = pydantic.Field(
        default_factory=list,
        description="Task field to split the results by; repeatable (default: fields with few values).",
    )
    threshold: float = pydantic.Field(0.5, description="A rollout is a success if its reward is above this.")

    def collecting(self) -> CollectConfig:
        """The settings of the collection that this is."""
        values = self.model_dump(include=set(CollectConfig.model_fields), exclude_unset=True)
        return CollectConfig.of({**values, "temperature": self.temperature}, "settings")

    def refuse_equal_rollouts(self) -> None:
        """Raises UsageError for several rollouts per task that would all be the same."""
        if self.num_rollouts > 1 and self.temperature == 0.0 and not self.force:
            raise UsageError(
                f"got {self.num_rollouts} rollouts per task, which are all the same when sampling is greedy",
                hint=f"raise {option('temperature')} to 1 for pass@k, or take one rollout per task",
            )


def evaluation_of(model: str | Path, source: str) -> str:
    """The command that evaluates ``model`` with the environment, the rewards and the limit of the runs that ``source`` was
    made from, where these are the same in all."""
    ways = set()
    for run in lineage(source):
        if run.get("stage") == "collect":
            config, words = run["config"], list[str]()
            for name in ("env", "user", "reward", "max_tokens"):
                value = config.get(name)
                values = value if isinstance(value, list) else [value]
                words += [f"--{name.replace('_', '-')} {shlex.quote(str(v))}" for v in values if v is not None]
            words += [as_set("env_args", json.dumps(config["env_args"]))] if config.get("env_args") else []
            ways.add(" ".join(words if config.get("env") or config.get("reward") else ["--reward REWARD", *words]))
    return f"eval {shlex.quote(str(model))} TASKS {ways.pop() if len(ways) == 1 else '--reward REWARD'}"
