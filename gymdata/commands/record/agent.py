"""What ``--agent`` names, and one attempt of it: a command line, a preset, or a function in a Python file.

An attempt has a folder of its own: ``work``, in which the agent runs, ``home`` (of presets, empty at first), the prompt as
a file, and what the agent wrote to stdout and stderr.

Invariants: a prompt is an argument of the command and never part of a shell's text; when an attempt ends, however it ends,
the agent's process group is ended; a command gets a task's id, prompt and files, and no other column, so that no answer is
within its reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gymdata.commands.record.presets import MODEL, PRESETS, Preset
from gymdata.commands.record.returned import AgentResult, json_path, result_of, spelt
from gymdata.errors import DataError, OutsideError, UsageError, abridged, brief
from gymdata.rollouts.messages import Task
from gymdata.store.paths import Identity
from gymdata.user_code import in_memory, in_thread, load_symbol, place_of, raised_at
from gymdata.workers.signals import OWN_GROUP

#: Bytes of stdout and stderr that rewards get and rows keep, from the end.
KEPT_BYTES = 256 * 1024
#: Bytes of an argument of a command, on Linux.
_ARGUMENT_BYTES = 128 * 1024 - 1
#: Seconds that an agent has to end after it was told to.
_GRACE_S = 5.0
_FUNCTION = re.compile(r".+\.py:\w+")
_PLACEHOLDERS = ("{prompt}", "{prompt_file}")
#: What a function may take, by name.
_ARGUMENTS = ("task", "base_url", "api_key", "model", "directory", "rollout_index")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of an agent. ``url``: the recorder's for this attempt, without /v1; ``key``: of its session."""

    task: Task
    index: int
    key: str
    url: str
    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def api_key(self) -> str:
        return f"gymdata-{self.key}"

    def output(self) -> dict[str, str]:
        """The end of what a command wrote, by ``stdout`` and ``stderr``; empty for a function."""
        texts = {}
        for name in ("stdout", "stderr"):
            with contextlib.suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - KEPT_BYTES))
                texts[name] = file.read().decode("utf-8", "replace")
        return texts


def load_agent(spec: Any, files: Path | None = None, result_json_path: str = "$") -> Agent:
    """The agent that ``--agent`` names, or a function, async or not. ``result_json_path``: where in what a function returns
    its result is. Raises UsageError."""
    if files is not None and not files.is_dir():
        raise UsageError(f"--agent-files {files}: no such folder", hint="give the folder that each attempt starts from")
    if not isinstance(spec, str) or _FUNCTION.fullmatch(spec):
        function, source = load_symbol(spec, "--agent") if isinstance(spec, str) else (spec, in_memory(spec)[1])
        return FunctionAgent(function, source, files, result_json_path)
    if json_path(result_json_path):
        text = f"--set result_json_path={result_json_path}: is a place in what a function returns, and --agent is a command"
        raise UsageError(text, hint="--agent path.py:NAME is a function")
    if spec in PRESETS:
        return CommandAgent(PRESETS[spec].words, files, preset=PRESETS[spec], name=spec)
    return CommandAgent(_words(spec, files), files)


def prompt_of(task: Task) -> str:
    """A task's messages as one text. Raises DataError for a conversation, which no agent can be given."""
    for message in task.messages:
        if message["role"] not in ("system", "user") or not isinstance(message.get("content"), str):
            raise DataError(
                f"task {task.task_id}: has a message of role {message['role']!r}, expected a prompt: an agent gets one text",
                hint="give the task a prompt, or messages of system and user alone",
            )
    text = "\n\n".join(message["content"] for message in task.messages)
    if not text:
        raise DataError(
            f"task {task.task_id}: has no prompt for the agent", hint="--map prompt=COLUMN names its column"
        )
    if "\0" in text or text != text.encode("utf-8", "replace").decode():
        raise DataError(
            f"task {task.task_id}: the prompt has characters that no command can be given: NUL or surrogates"
        )
    return text


class Agent:
    """Runs attempts, each from the same ``files``. ``source``: the identity of its code; ``identity`` goes to run.json, and
    a change of it is another run."""

    def __init__(self, source: str, files: Path | None) -> None:
        self.files = files
        digest = {} if files is None else {"files": _digest(files)}
        self.identity: Identity = {"name": "agent", "agent": source, **digest}

    def check(self, task: Task) -> None:
        """Raises DataError for a task whose prompt or files cannot be given to the agent."""
        prompt_of(task)
        for path, content in _task_files(task).items():
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or not isinstance(content, str):
                raise DataError(
                    f"task {task.task_id}: files: got {brief(path)}: {brief(content)}, expected a path below the agent's "
                    "folder, and a text",
                    hint='"files": {"src/main.py": "…"} writes one file',
                )

    def prepare(self, attempt: Attempt) -> None:
        """Make the attempt's folder: the files that are the same for all tasks, then the task's own. Raises OSError."""
        attempt.folder.mkdir(mode=0o700)
        if self.files is None:
            attempt.work.mkdir()
        else:
            shutil.copytree(self.files, attempt.work, symlinks=True)
        for path, content in _task_files(attempt.task).items():
            file = attempt.work / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)

    async def run(self, attempt: Attempt) -> AgentResult:
        """Raises OutsideError("agent", …). When it is cancelled, the agent is ended."""
        raise NotImplementedError  # a command and a function have their own


class CommandAgent(Agent):
    """A command line, run without a shell. ``preset``: with its environment and a home of its own, called ``name``."""

    def __init__(
        self, words: Sequence[str], files: Path | None, *, preset: Preset | None = None, name: str = ""
    ) -> None:
        self.words, self.preset = words, preset
        if "/" not in words[0] and shutil.which(words[0]) is None:
            hint = "give its full path" if preset is None else "install it, or add its folder to PATH"
            raise UsageError(f"--agent: {words[0]!r} is not a command that can be run", hint=hint)
        super().__init__(name or shlex.join(words), files)

    def check(self, task: Task) -> None:
        super().check(task)
        size = len(prompt_of(task).encode())
        if "{prompt}" in " ".join(self.words) and size > _ARGUMENT_BYTES:
            raise DataError(
                f"task {task.task_id}: the prompt has {size:,} bytes, an argument of a command at most {_ARGUMENT_BYTES:,}",
                hint="give the agent {prompt_file} in place of {prompt}",
            )

    def prepare(self, attempt: Attempt) -> None:
        super().prepare(attempt)
        (attempt.folder / "prompt.txt").write_text(prompt_of(attempt.task))

    async def run(self, attempt: Attempt) -> AgentResult:
        """Raises OutsideError("agent") for a command that cannot be run."""
        words = [self._filled(word, attempt) for word in self.words]
        try:
            with (attempt.folder / "stdout").open("wb") as stdout, (attempt.folder / "stderr").open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    cwd=attempt.work,
                    env=self._environment(attempt),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    **OWN_GROUP,
                )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise OutsideError("agent", f"{words[0]}: cannot be run: {why}") from error
        try:
            return AgentResult(await process.wait())
        finally:
            await _end(process)

    def _environment(self, attempt: Attempt) -> dict[str, str]:
        variables = {
            **os.environ,
            "OPENAI_BASE_URL": f"{attempt.url}/v1",
            "OPENAI_API_KEY": attempt.api_key,
            "ANTHROPIC_BASE_URL": attempt.url,
            "ANTHROPIC_API_KEY": attempt.api_key,
            "GYMDATA_TASK": attempt.task.task_id,
            "PWD": str(attempt.work),  # agents trust it
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }
        if self.preset is None:
            return variables
        home = attempt.folder / "home"
        home.mkdir(exist_ok=True)
        variables = {name: value for name, value in variables.items() if not name.startswith("XDG_")}
        more = {name: self._filled(value, attempt) for name, value in self.preset.environment.items()}
        return {**variables, **more, "HOME": str(home)}

    def _filled(self, text: str, attempt: Attempt) -> str:
        values = {
            "prompt": prompt_of(attempt.task),
            "prompt_file": str(attempt.folder / "prompt.txt"),
            "base_url": f"{attempt.url}/v1",
            "key": attempt.api_key,
        }
        return re.sub(r"\{(prompt|prompt_file|base_url|key)\}", lambda match: values[match[1]], text)


class FunctionAgent(Agent):
    """A function, async or not, called in a thread with a loop of its own, so that it cannot hold up the recorder."""

    def __init__(
        self, function: Callable[..., Any], source: str, files: Path | None, result_json_path: str = "$"
    ) -> None:
        self.function, self._path = function, json_path(result_json_path)
        try:
            parameters = inspect.signature(function).parameters.values()
        except TypeError as error:
            raise UsageError.bad_value("--agent", function, "a command line, or a function") from error
        self._takes = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        required = [p.name for p in parameters if p.name in self._takes and p.default is p.empty]
        if unknown := [name for name in required if name not in _ARGUMENTS]:
            raise UsageError(
                f"--agent: the function takes {', '.join(unknown)} ({place_of(function)})",
                hint=f"it gets, by name: {abridged(_ARGUMENTS)}",
            )
        super().__init__(source, files)
        if self._path:
            self.identity = {**self.identity, "result_json_path": spelt(self._path)}

    async def run(self, attempt: Attempt) -> AgentResult:
        """Raises OutsideError("agent") for what the function raises, and the errors of ``result_of``."""
        arguments = {
            "task": {**attempt.task.row, "task_id": attempt.task.task_id, "prompt": prompt_of(attempt.task)},
            "base_url": f"{attempt.url}/v1",
            "api_key": attempt.api_key,
            "model": MODEL,
            "directory": attempt.work,
            "rollout_index": attempt.index,
        }
        keywords = {name: arguments[name] for name in self._takes if name in arguments}
        cancel: list[Callable[[], object]] = []

        async def call() -> Any:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            assert task is not None
            cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
            value = self.function(**keywords)
            return await value if inspect.isawaitable(value) else value

        try:
            value = await in_thread(lambda: asyncio.run(call()))
        except asyncio.CancelledError:
            for end in cancel:
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    end()
            raise
        except Exception as error:
            where = raised_at(error, self.function)
            raise OutsideError("agent", f"raised {type(error).__name__}: {error} ({where})") from error
        return result_of(value, attempt.task.row, self._path, place_of(self.function))


async def _end(process: asyncio.subprocess.Process) -> None:
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await process.wait()


def _words(spec: str, files: Path | None) -> list[str]:
    """The words of a command line. Raises UsageError for one without a prompt, or with a file that is not there where the
    agent runs."""
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise UsageError.bad_value("--agent", spec, f"a command line ({error})") from error
    if not any(placeholder in spec for placeholder in _PLACEHOLDERS):
        raise UsageError(
            f"--agent {spec!r} has neither {' nor '.join(_PLACEHOLDERS)}",
            hint="write {prompt} where the task's prompt belongs; "
            f"agents known by name: {', '.join(PRESETS)}; a function: path.py:NAME",
        )
    for word in words:
        is_local = "{" not in word and not Path(word).is_absolute() and Path(word).is_file()
        if is_local and (files is None or not (files / word).exists()):
            raise UsageError(
                f"--agent: {word} is a file of this folder, and the agent runs in a folder of its own",
                hint=f"give {Path(word).resolve()}, or --agent-files with a folder that has {word}",
            )
    return words


def _task_files(task: Task) -> dict[str, Any]:
    """A task's own files by path; of Parquet, those without a content are none."""
    files = task.row.get("files") or {}
    if not isinstance(files, Mapping):
        raise DataError(
            f"task {task.task_id}: files: got {brief(files)}, expected an object of paths and texts",
            hint='"files": {"src/main.py": "…"}; a folder for all tasks: --agent-files',
        )
    return {path: content for path, content in files.items() if content is not None}


def _digest(folder: Path) -> str:
    """A digest of the paths and contents below a folder."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*")):
        content = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes() if file.is_file() else b""
        digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return digest.hexdigest()
