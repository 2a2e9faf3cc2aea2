"""Coding agents that ``--agent`` knows by name: the command of each, and what it reads from its home folder.

``{prompt}``, ``{base_url}`` (of the OpenAI API, with /v1) and ``{key}`` stand for those of the attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

#: What agents call the model; which one it is, is the recorder's to say.
MODEL = "policy"


@dataclass(frozen=True, slots=True)
class Preset:
    """``words``: of the command line; ``package``: on npm; ``home``: files below the home folder; ``variables``: more of
    the environment."""

    words: tuple[str, ...]
    package: str
    home: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


_CODEX = f"""model = "{MODEL}"
model_provider = "gymdata"
approval_policy = "never"
[model_providers.gymdata]
name = "gymdata"
base_url = "{{base_url}}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_PI = {
    "providers": {
        "gymdata": {
            "baseUrl": "{base_url}",
            "api": "openai-completions",
            "apiKey": "{key}",
            "models": [{"id": MODEL, "contextWindow": 131_072, "maxTokens": 32_768}],
        }
    }
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
        ("codex", "exec", "--skip-git-repo-check", "-s", "workspace-write", "{prompt}"),
        "@openai/codex",
        {".codex/config.toml": _CODEX},
    ),
    "claude": Preset(
        ("claude", "--model", MODEL, "--allowedTools", "Bash(*)", "Edit", "Write", "Agent", "-p", "{prompt}"),
        "@anthropic-ai/claude-code",
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    "opencode": Preset(
        ("opencode", "run", "-m", f"gymdata/{MODEL}", "{prompt}"),
        "opencode-ai",
        {".config/opencode/opencode.json": orjson.dumps(_OPENCODE).decode()},
    ),
    "pi": Preset(
        ("pi", "--provider", "gymdata", "--model", MODEL, "-p", "{prompt}"),
        "@mariozechner/pi-coding-agent",
        {".pi/agent/models.json": orjson.dumps(_PI).decode()},
    ),
    "qwen": Preset(
        ("qwen", "--auth-type", "openai", "--openai-api-key", "{key}", "--openai-base-url", "{base_url}", "-m", MODEL,
         "--yolo", "-p", "{prompt}"),
        "@qwen-code/qwen-code",
    ),
}  # fmt: skip
