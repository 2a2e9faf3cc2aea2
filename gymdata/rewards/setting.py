"""The type of the setting ``reward``; its help lists what is registered."""

from __future__ import annotations

from typing import Annotated

import pydantic

from gymdata.rewards.named import names_and_columns

#: Rewards in the syntax of ``gymdata.rewards``.
RewardSpecs = Annotated[
    list[str],
    pydantic.Field(
        description="NAME[:ARG][=WEIGHT], path.py:function[=WEIGHT] or the URL of a reward server; repeatable. "
        f"Names: {names_and_columns()}. A function takes by name: completion (text for tasks with a text prompt and no "
        "tools, else messages), prompt, completion_ids, messages, stdout, and columns; completions or prompts, of a batch."
    ),
]
