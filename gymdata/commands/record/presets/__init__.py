"""Coding agents that ``--agent`` knows by name: the command of each, and its environment.

``{prompt}``, ``{base_url}`` (of the OpenAI API, with /v1) and ``{key}`` stand for those of the attempt, in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import orjson

#: What agents call the model; which one it is, is the recorder's to say.
MODEL = "policy"


class Preset(NamedTuple):
    """``words``: of the command line."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


_CODEX = {
    "model": MODEL,
    "model_provider": "gymdata",
    "approval_policy": "never",
    "model_providers.gymdata.name": "gymdata",
    "model_providers.gymdata.base_url": "{base_url}",
    "model_providers.gymdata.env_key": "OPENAI_API_KEY",
    "model_providers.gymdata.wire_api": "responses",
}
_OPENCODE = {
    "permission": "allow",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "gymdata": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{base_url}", "apiKey": "{key}"},
            "models": {MODEL: {}},
        }
    },
}

PRESETS: Mapping[str, Preset] = {
    "codex": Preset(
        ("codex", "exec", "--skip-git-repo-check", "-s", "workspace-write",
         *(word for name, value in _CODEX.items() for word in ("-c", f'{name}="{value}"')), "{prompt}"),
        {},
    ),
    "claude": Preset(
        ("claude", "--model", MODEL, "--allowedTools", "Bash(*)", "Edit", "Write", "Agent", "-p", "{prompt}"),
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    "opencode": Preset(
        ("opencode", "run", "-m", f"gymdata/{MODEL}", "{prompt}"),
        {"OPENCODE_CONFIG_CONTENT": orjson.dumps(_OPENCODE).decode()},
    ),
    "qwen": Preset(
        ("qwen", "--auth-type", "openai", "--openai-api-key", "{key}", "--openai-base-url", "{base_url}", "-m", MODEL,
         "--yolo", "-p", "{prompt}"),
        {},
    ),
}  # fmt: skip
