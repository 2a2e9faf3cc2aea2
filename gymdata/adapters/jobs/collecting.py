"""The shipped trajectory builder, ``_type: collect``: ``gymdata collect`` as a process of its own, an epoch at a time.

What always holds: the engine lives and dies with that process; an epoch's settings are in ``rollouts.collect.yaml`` beside
its rollouts, so that the same collection can be repeated by hand; missing rollouts are counted, and too many are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from gymdata.config.finetune import CollectBuilder
from gymdata.config.urls import for_child
from gymdata.errors import EXIT_FAULTS, GymdataError, RewardError
from gymdata.ports import CollectOrder, Commands, Progress
from gymdata.store.run_json import plain, replacing


class CollectingBuilder:
    """``base``: what the llms and eval sections say, under the builder's own settings."""

    def __init__(self, config: CollectBuilder, commands: Commands, base: Mapping[str, Any]) -> None:
        self._config, self._commands, self._base = config, commands, dict(base)

    def collect(self, order: CollectOrder, progress: Progress) -> None:
        own = {"num_generations": self._config.num_generations, **self._base, **self._config.settings, **order.settings}
        own["num_rollouts"] = own.pop("num_generations")
        allow_missing = float(own.pop("allow_missing", self._config.allow_missing))
        decided = {
            "tasks": order.tasks, "output": str(order.output), "policy_version": order.policy_version,
            "run_id": order.run_id, "seed": order.seed, "reward": list(order.reward),
        }  # fmt: skip
        model = {"model": order.model} if order.model is not None else {}
        file = settings_file(order.output.parent / f"{order.output.name}.collect.yaml", {**own, **model, **decided})
        log = order.output.parent / "logs" / f"{order.output.name}.log"
        told = self._commands.run(["collect", "--config", str(file)], log, progress)
        if told.get("reward_faults"):
            first = next((part["first_error"] for part in told["parts"].values() if part["failed"]), None)
            why = f"{told['reward_faults']:,} rollouts could not be scored" + (f"; first: {first}" if first else "")
            raise RewardError(why, hint=f"the whole log is {log}; mend the reward and run the same command again")
        wanted = int(told["tasks"]) * own["num_rollouts"]
        missing = wanted - int(told["rollouts"])
        if told["exit_code"] == EXIT_FAULTS and missing > allow_missing * wanted:
            error = GymdataError(
                f"{missing:,} of {wanted:,} rollouts are missing, allow_missing is {allow_missing:g}",
                hint=f"{order.output}/failures.jsonl says why; the same command tries again (see max_attempts)",
            )
            error.exit_code = EXIT_FAULTS
            raise error


def settings_file(path: Path, settings: Mapping[str, Any]) -> Path:
    """Write a command's settings, as JSON, which YAML reads. Paths and other objects are text; for what is secret in URLs
    there are placeholders, which ``start`` puts into the command's environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(orjson.dumps(for_child(plain(settings)), option=orjson.OPT_INDENT_2) + b"\n")
    return path
