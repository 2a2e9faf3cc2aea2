"""``serve``: becomes the vLLM server of a model, with what collecting needs.

Invariants: the server is what the printed line starts, no more; its engine's processes end with it, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gymdata.commands.serve.settings import ServerConfig
from gymdata.engines.parent_death import ENGINE_OF
from gymdata.errors import GymdataError, UsageError, option, require
from gymdata.models.model_identity import tokenizer_folder
from gymdata.settings import Settings
from gymdata.urls import address_of, listening_socket
from gymdata.workers import python_module

#: ``vllm serve`` of the CPU build looks for metadata of another package and crashes; the module is the same server.
MODULE = "vllm.entrypoints.openai.api_server"
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}

#: A mark of tool calls in a chat template → vLLM's parser for it; the first match counts.
PARSERS: Mapping[str, str] = {
    "<|python_tag|>": "llama3_json",
    "[TOOL_CALLS]": "mistral",
    "<｜tool▁call": "deepseek_v3",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<|channel|>": "openai",
    "<tool_call>": "hermes",
}


def serve(
    config: ServerConfig | None = None,
    *,
    dry_run: bool = False,
    say: Callable[[str], None] = lambda _: None,
    show: Callable[[str], None] = print,
    **settings: Any,
) -> None:
    """Replace this process by a vLLM server of ``model``. ``show`` gets the line that starts the same server; ``say`` is
    called with what is done with it. With ``dry_run`` only the line is shown.

    Settings are those of ``ServerConfig``. Raises UsageError for settings that vLLM does not have; OutsideError when the
    address is taken.
    """
    config = ServerConfig.called_with(serve, config, settings)
    if not config.model:
        raise UsageError("model is missing", hint=f"give {option('model')}, or set it in {option('config')}")
    require("engine", "vllm")
    port, url = config.port, ""
    if not dry_run:
        # Before a minute of loading: an address that is taken is an error, and port 0 becomes a free one.
        with contextlib.closing(listening_socket(config.host, config.port)) as bound:
            port, url = bound.getsockname()[1], address_of(bound)
    words, environment, notes = server_line(config, port)
    show(shell_line(words, environment))
    for note in notes:
        say(note)
    if dry_run:
        return
    reached = url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    # The base of a LoRA adapter is served, too.
    named = f" -m {served_name(config)}" if "--enable-lora" in words else ""
    say(f"serving {served_name(config)} on {url} when vLLM has loaded it; Ctrl-C stops it. In another terminal:")
    say(f"  gymdata check --endpoint {reached}\n  gymdata collect TASKS --endpoint {reached}{named}")
    _become(words, environment)


def _become(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """This process is the server from here on."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [*python_module(MODULE), *words]
    # What the user set wins over what keeps vLLM from the network.
    os.execve(command[0], command, {**_QUIET, **os.environ, **environment, ENGINE_OF: str(os.getpid())})


def server_line(config: ServerConfig, port: int) -> tuple[list[str], dict[str, str], list[str]]:
    """The server's flags, the variables that it needs, and what to say about them. Raises UsageError and DataError."""
    from gymdata.engines import _vllm

    _vllm.refuse_unknown(config.engine)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    before = dict(os.environ)
    arguments, adapter = _vllm.arguments_for(config.model, config.engine)
    environment = {
        name: value for name, value in os.environ.items() if name not in before and name.startswith("VLLM_CPU")
    }
    name = served_name(config)
    frontend: dict[str, object] = {"host": config.host, "port": port, "served_model_name": name}
    if adapter is not None:
        frontend |= {"served_model_name": f"{name}-base", "lora_modules": f"{name}={adapter.resolve()}"}
    if config.chat_template is not None:
        frontend["chat_template"] = str(config.chat_template.resolve())
    arguments["model"] = str(Path(arguments["model"]).resolve())
    parser, notes = _tool_parser(config)
    tools: dict[str, object] = {"enable_auto_tool_choice": True, "tool_call_parser": parser} if parser else {}
    return (
        words_of({**arguments, **config.engine, **frontend, **tools, "disable_uvicorn_access_log": True}),
        environment,
        notes,
    )


def served_name(config: ServerConfig) -> str:
    """The name of the model for clients."""
    return config.served_name or (Path(config.model).resolve().name if Path(config.model).is_dir() else config.model)


def _tool_parser(config: ServerConfig) -> tuple[str | None, list[str]]:
    """The parser of vLLM, and what to say about the choice."""
    from gymdata.chat.template import TransformersChat
    from gymdata.engines._vllm import tool_parsers

    if config.tool_parser == "none":
        return None, []
    if config.tool_parser != "auto":
        if config.tool_parser not in (parsers := tool_parsers()):
            raise UsageError.unknown_choice("--tool-parser", config.tool_parser, ["auto", "none", *parsers])
        return config.tool_parser, []
    template = ""
    with contextlib.suppress(GymdataError):  # a model may have none
        named_template = str(config.chat_template) if config.chat_template is not None else None
        folder = tokenizer_folder(config.model)
        chat = TransformersChat.load(folder, chat_template=named_template, tool_parser="none", keep_reasoning=False)
        template = str(chat.tokenizer.chat_template)
    parser = parser_for(template)
    note = "no tool call parser fits the chat template: other clients need --tool-parser (collect parses tool calls itself)"
    return parser, [] if parser else [note]


def parser_for(template: str) -> str | None:
    """The parser of vLLM for what a chat template writes of tool calls; None where none is known."""
    return next((parser for mark, parser in PARSERS.items() if mark in template), None)


def words_of(arguments: Settings) -> list[str]:
    """Engine arguments as the server's flags: ``max_model_len=8`` is ``--max-model-len 8``, False is ``--no-…``."""
    words: list[str] = []
    for key, value in arguments.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def shell_line(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The line to type, with the variables that it needs; broken before flags with a backslash."""
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    assignments = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lines = [" ".join([*assignments, shlex.quote(python), "-m", MODULE])]
    flags: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(shlex.quote(word))
    for flag in map(" ".join, flags):
        if len(lines[-1]) + len(flag) < 100:
            lines[-1] += f" {flag}"
        else:
            lines.append(f"    {flag}")
    return " \\\n".join(lines)
