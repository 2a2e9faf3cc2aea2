"""Settings of ``gymdata check``."""

from __future__ import annotations

import pydantic

from gymdata.settings import Config


class CheckConfig(Config):
    """What is probed: a model's chat template, or the server at an endpoint."""

    model: str | None = pydantic.Field(
        None, description="Model or tokenizer folder; with --endpoint, the served model name."
    )
    endpoint: str | None = pydantic.Field(None, description="Base URL of a vLLM server to probe.")
    chat_template: str | None = pydantic.Field(None, description="Chat template file that replaces the model's.")
