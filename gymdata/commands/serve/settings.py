"""Settings of ``gymdata serve``."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import ClassVar

import pydantic

from gymdata.settings import Config, Settings


class ServerConfig(Config):
    """Settings of the server: what is served, and where."""

    key_only: ClassVar[Set[str]] = frozenset(["engine"])

    model: str = pydantic.Field("", description="Model folder, LoRA adapter folder, or cached hub name.")
    host: str = pydantic.Field("127.0.0.1", description="Address to serve on; 0.0.0.0 for other machines.")
    port: int = pydantic.Field(8000, ge=0, le=65535, description="Port to serve on; 0 takes a free one.")
    served_name: str | None = pydantic.Field(
        None, description="Name that clients use for the model (default: the folder's name)."
    )
    chat_template: Path | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
    tool_parser: str = pydantic.Field(
        "auto", description="vLLM's tool call parser: auto (by the chat template), none, or its name."
    )
    engine: Settings = pydantic.Field(default_factory=dict, description="vLLM engine arguments, passed through.")
