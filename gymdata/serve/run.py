"""``serve``: a vLLM server of a model, started with what collecting needs, until it is stopped.

Invariants: the server is what the printed line starts, no more; the server is announced only once it answers; it ends
with this process, or, in the background, when it is stopped: from its start on its file says where it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gymdata.engines.servers.background import BackgroundServer, background_servers, stop_servers
from gymdata.engines.servers.vllm_process import ended, running, shell_line, wait_until_healthy, words_of
from gymdata.errors import GymdataError, UsageError, option, require
from gymdata.models.model_identity import policy_facts, tokenizer_folder
from gymdata.serve.settings import ServerConfig
from gymdata.urls import address_of, listening_socket
from gymdata.workers.signals import sigterm_interrupts

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
    background: bool = False,
    stop: bool = False,
    say: Callable[[str], None] = lambda _: None,
    show: Callable[[str], None] = print,
    **settings: Any,
) -> None:
    """Serve ``model`` with vLLM until a signal comes. ``show`` gets the line that starts the same server; ``say`` is
    called when it answers, with the next command. With ``dry_run`` only the line is shown.

    With ``background`` return when it answers: later commands with the model on this machine sample from it until ``stop``
    ends it, without a model the only one. It takes a free port where none is given.

    Settings are those of ``ServerConfig``. Raises UsageError for settings that vLLM does not have, where there is nothing
    to stop, and for ``stop`` with ``dry_run`` or ``background``; OutsideError when the address is taken or the server ends
    by itself; KeyboardInterrupt when SIGINT or SIGTERM ended it.
    """
    config = ServerConfig.called_with(serve, config, settings)
    if stop:
        if background or dry_run:
            raise UsageError(
                f"{option('stop')}: ends servers, so it starts none and shows no line", hint="give it alone"
            )
        if not config.model and "model" in config.model_fields_set:
            raise UsageError.bad_value(option("model"), config.model, "a model folder or a name")
        for server in stop_servers(config.model):
            say(f"stopped the server of {server.model} on {server.url}")
        return
    if not config.model:
        raise UsageError("model is missing", hint=f"give {option('model')}, or set it in {option('config')}")
    require("engine", "vllm")
    policy_hash, port = "", config.port
    if background and not dry_run:
        policy_hash = policy_facts(config.model)["policy_hash"]
        for server in background_servers():
            if (server.policy_hash, server.engine) == (policy_hash, config.engine):
                say(f"{server.name} is served on {server.url} already (process {server.pid}; log {server.log})")
                return
        port = port if "port" in config.model_fields_set else 0
    bound = None if dry_run else listening_socket(config.host, port)
    port, url = (config.port, "") if bound is None else (bound.getsockname()[1], address_of(bound))
    try:
        words, environment, notes = server_line(config, port)
    finally:
        if bound is not None:
            bound.close()
    show(shell_line(words, environment))
    for note in notes:
        say(note)
    if dry_run:
        return
    reached = url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
    handle, name = tempfile.mkstemp(prefix="gymdata-serve-", suffix=".log")
    os.close(handle)
    log = Path(name)
    say(f"starting vLLM with {config.model}; its log is {log} …")
    with sigterm_interrupts(), contextlib.ExitStack() as stack:
        started = time.time()
        process = stack.enter_context(running(words, environment, log, stays=background))
        if background:
            engine = dict(config.engine)
            model = os.path.realpath(config.model) if Path(config.model).is_dir() else config.model
            server = BackgroundServer(
                reached, served_name(config), model, policy_hash, engine, process.pid, started, str(log)
            )
            stack.push(lambda kind, *_: server.file.unlink(missing_ok=True) if kind else None)
            server.save()
        try:
            wait_until_healthy(process, reached, log)
            if background:
                say(f"serving {server.name} on {url} in the background (process {server.pid}). It is used by")
                say(f"  gymdata collect TASKS -m {config.model}")
                say(f"until it is stopped:\n  gymdata serve {config.model} --stop")
                return
            say(f"serving {served_name(config)} on {url}; Ctrl-C stops it. In another terminal:")
            say(f"  gymdata check --endpoint {reached}")
            # The base of a LoRA adapter is served, too.
            named = f" -m {served_name(config)}" if "--enable-lora" in words else ""
            say(f"  gymdata collect TASKS --endpoint {reached}{named}")
            process.wait()
        except KeyboardInterrupt:
            say("stopping vLLM …")
            raise
        raise ended(process, log)


def server_line(config: ServerConfig, port: int) -> tuple[list[str], dict[str, str], list[str]]:
    """The server's flags, the variables that it needs, and what to say about them. Raises UsageError and DataError."""
    from gymdata.engines import _vllm

    _vllm.refuse_unknown_arguments(config.engine)
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
