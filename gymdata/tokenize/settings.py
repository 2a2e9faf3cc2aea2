"""Settings of ``gymdata tokenize``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from gymdata.settings import Config

#: Which of the assistant's messages are trained.
Mask = Literal["completion", "assistant", "last"]


class TokenizeConfig(Config):
    """With what the text of rollouts is rendered."""

    tokenizer: str = pydantic.Field(description="Tokenizer or model folder whose chat template renders the text.")
    chat_template: Path | None = pydantic.Field(None, description="Chat template file that replaces the tokenizer's.")
    mask: Mask = pydantic.Field(
        "completion",
        description="Messages to train: completion (the assistant's, after the prompt that a row names), assistant (all of "
        "them) or last.",
    )
    keep_reasoning: bool = pydantic.Field(True, description="Patch a known chat template that rewrites earlier turns.")
