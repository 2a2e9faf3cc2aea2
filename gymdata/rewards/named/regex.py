"""The reward ``regex``."""

from __future__ import annotations

import re

from gymdata.errors import RewardError, UsageError, option
from gymdata.rewards.named import REWARDS, NamedReward
from gymdata.rewards.port import TaskRow


@REWARDS.register("regex")
class Regex(NamedReward):
    """The pattern is found in the last message."""

    needs = "`--reward regex:PATTERN` or the task column `pattern`"
    column = "pattern"
    argument = "PATTERN"
    # A pattern can take exponential time, so it runs where it can be left behind: it is not quick.

    def prepare(self, argument: str) -> str:
        try:
            re.compile(argument)
        except re.error as error:
            raise UsageError.bad_value(
                option("reward", "regex"), argument, f"a regular expression ({error})"
            ) from error
        return argument

    def check(self, text: str, task: TaskRow) -> float | None:
        pattern = self.given if self.given is not None else task.get("pattern")
        if not isinstance(pattern, str):
            return None
        try:
            return float(re.search(pattern, text) is not None)
        except re.error as error:
            raise RewardError(f"regex: the task's pattern is not one: {error}") from error
