"""Chat templates and prompt files are programs of strangers: each is rendered once in a process that can be ended.

That process has a limit of time, memory and text; what is wrong with the template otherwise shows where it is used. This
file is that process as well, and imports nothing heavy for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2 import ChainableUndefined, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Bytes of memory and characters for one template; seconds by the clock, on a busy machine.
MEMORY, CHARACTERS, WALL_S = 2 << 30, 100_000_000, 120.0
_TOO_MUCH = 3
_TIMES_OUT = (-signal.SIGXCPU, -signal.SIGKILL)
#: What was wrong with each template that was tried in this process.
_faults: dict[str, str | None] = {}
_USER = {"role": "user", "content": "begin"}
_ASSISTANT = {"role": "assistant", "content": "said"}
_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
#: What a chat template is tried with.
CONVERSATIONS = tuple(
    {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": generate, **_SPECIAL_TOKENS}
    for messages in ([_USER], [{"role": "system", "content": "brief"}, _USER, _ASSISTANT, _USER])
    for generate in (False, True)
)


class TemplateLimitError(TemplateError):
    """A template does not end, or makes far too much."""


def refuse_endless(template: str, renderings: Sequence[Mapping[str, Any]], cpu_s: int = 10) -> None:
    """Render ``template`` with each of these variables in a process of its own, once in the life of this one. Raises
    TemplateLimitError when it needs more than ``cpu_s`` seconds of processor time, or too much memory."""
    if template not in _faults:
        order = json.dumps({"template": template, "renderings": renderings, "cpu_s": cpu_s}, default=str)
        # -P: the folder of this file is no place for modules.
        command, silent = [sys.executable, "-P", __file__], subprocess.DEVNULL
        status = _TIMES_OUT[0]  # where it is ended here
        with suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                command, input=order.encode(), timeout=WALL_S, check=False, stdout=silent, stderr=silent
            ).returncode
        _faults[template] = f"it does not end within {cpu_s} s" if status in _TIMES_OUT else None
        if status == _TOO_MUCH:
            memory = f"more than {MEMORY >> 30} GiB of memory"
            _faults[template] = f"it makes a text of more than {CHARACTERS:,} characters, or needs {memory}"
    if (fault := _faults[template]) is not None:
        raise TemplateLimitError(fault)


class _Generation(Extension):
    """``{% generation %}``, which marks what a model writes."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _render_all(order: Mapping[str, Any]) -> int:
    """The exit status of the process."""
    environment = ImmutableSandboxedEnvironment(
        undefined=ChainableUndefined, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, default=str)
    environment.globals |= {"raise_exception": lambda _: "", "strftime_now": lambda _: "now"}
    for variables in order["renderings"]:
        size = 0
        try:
            for part in environment.from_string(order["template"]).generate(**variables):
                size += len(part)
                if size > CHARACTERS:
                    return _TOO_MUCH
        except MemoryError:
            return _TOO_MUCH
        except Exception:  # noqa: BLE001 - in the process that uses the template it is an error with a name
            continue
    return 0


if __name__ == "__main__":
    import resource

    order = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (order["cpu_s"], order["cpu_s"] + 1))
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os._exit(_render_all(order))
