"""``check --env``: an environment in Python tried without an engine: tools as the model sees them, sampled calls, plays.

Invariants: nothing is written; whatever the user's code does (raises, hangs, blocks the event loop) is a
finding with file and line, and the check ends; what a tool raises for arguments that it refuses is no fault.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from gymdata.commands.collect.task_shapes import TaskShape, checked
from gymdata.commands.collect.tasks import TaskFile
from gymdata.environments import PythonTools, server_url
from gymdata.environments.port import StepResult
from gymdata.environments.python_tools import NOT_TOOLS, ToolEpisode
from gymdata.environments.step import Step
from gymdata.environments.tool_error import MAX_OUTPUT_BYTES
from gymdata.errors import OutsideError, UsageError, brief, counted, option, raised
from gymdata.models._transformers import schema_of
from gymdata.public import Figures, Report, Row, path_of
from gymdata.rollouts.messages import Message, Task, ToolDefinition
from gymdata.user_code import from_here, load_symbol, place_of, raised_at

#: Sampled calls of each tool and task; turns of a random play.
_CALLS, _TURNS = 3, 8
#: The least that may be a full reward.
_FULL = 1.0
#: Seconds without a beat after which an event loop is blocked, between two looks at it, and for its end.
LIMIT_S, _LOOK_S, _END_S = 3.0, 0.25, 20.0
#: How much slower time passes while a tool imports a module, which blocks the loop at its first call alone.
_IMPORT = 10
_NEVER_ENDS = "never ends"
#: The task where no file of tasks is given.
_MADE_UP = "made-up"
#: What a tool raises by a slip rather than to refuse arguments; SystemExit, which is no Exception, would end the command.
_SLIPS = (NameError, AttributeError, ImportError, RecursionError, NotImplementedError, SystemExit)
_ODD = (TypeError, LookupError, ArithmeticError, AssertionError)
_PLAIN: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "dict": (dict,), "list": (list,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault. ``severity``: error, or warning where the environment works and may not be meant so; ``where``:
    ``file.py:12``."""

    severity: str
    what: str
    where: str
    detail: str


@dataclass(frozen=True, slots=True)
class Play:
    """One episode. ``policy``: scripted (each tool once), random, empty (one empty answer), or human; ``reward``: the sum of
    its steps' rewards, None without any; ``ended``: why, None where the play stopped it; ``state``: the instance's public
    attributes at the end."""

    policy: str
    task_id: str
    steps: int
    reward: float | None
    ended: str | None
    state: dict[str, str]


@dataclass(frozen=True, slots=True, repr=False)
class EnvironmentCheck(Report):
    """What an environment did. ``tools``: schemas as the model sees them; ``calls``: tool calls with
    random arguments; ``refused``: those that a tool answered with an error, as it should where they make no sense."""

    spec: str
    tasks: int
    tools: list[ToolDefinition] = field(default_factory=list)
    calls: int = 0
    refused: int = 0
    plays: list[Play] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> Figures:
        return {"ok": self.ok, **asdict(self)}

    def rows(self) -> list[Row]:
        errors = sum(finding.severity == "error" for finding in self.findings)
        return [
            ("tools", ", ".join(str(tool["function"]["name"]) for tool in self.tools) or "none"),
            ("tasks", self.tasks),
            (
                "random calls",
                f"{self.calls:,}: {self.calls - self.refused:,} answered, {self.refused:,} refused by the tool",
            ),
            ("plays", len(self.plays)),
            ("errors", errors),
            ("warnings", len(self.findings) - errors),
            ("time", f"{self.seconds:.2f} s"),
        ]


#: Gives a person's next message, None to stop, from the episode and what it answered last; once more when it has ended.
Human = Callable[[ToolEpisode, StepResult | None], Message | None]


def check_environment(
    env: str,
    tasks: str | Path | None = None,
    *,
    map: Sequence[str] = (),
    limit: int = 3,
    timeout: float = 1.0,
    arguments: Mapping[str, Any] | None = None,
    human: Human | None = None,
) -> EnvironmentCheck:
    """Try the environment ``path.py:Name`` on the first ``limit`` tasks of a file, or on one made-up task.

    ``map``: the columns of the tasks, as for ``gymdata.collect``; ``timeout``: seconds per call of the user's code;
    ``arguments``: those of the class; ``human`` gives the messages of a further play of each task. Raises UsageError for
    what is no environment in Python, DataError for tasks that cannot be read.
    """
    if server_url(env) is not None:
        raise UsageError(
            f"{env}: is a server; an environment in Python is checked",
            hint=f"gymdata collect TASKS {option('env')} URL --dry-run",
        )
    first = [Task(_MADE_UP, [{"role": "user", "content": "What now?"}], None, {"prompt": "What now?"}, "")]
    if tasks is not None:
        shape = TaskShape.of(checked(map), None, None)
        first = list(islice(TaskFile(str(path_of(tasks, "check_environment")), shape=shape), limit))
    began = time.monotonic()
    trial = _Trial(env, first, timeout, arguments, human)
    environment = trial.loaded()
    # Code that blocks the event loop can be left behind in a thread.
    thread = threading.Thread(target=trial.run, args=(environment,), daemon=True)
    thread.start()
    silent_s, beats = 0.0, 0
    # Looks are counted, not the clock: on a busy machine neither this thread nor the loop may get any time.
    while thread.is_alive() and not trial.ended and (human is not None or silent_s < max(LIMIT_S, timeout)):
        thread.join(_LOOK_S)
        stack = traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
        importing = any("importlib._bootstrap" in frame.f_code.co_filename for frame, _ in stack)
        silent_s = silent_s + _LOOK_S / (_IMPORT if importing else 1) if trial.beats == beats else 0.0
        beats = trial.beats
    if trial.ended:
        thread.join(_END_S)
    elif thread.is_alive():
        trial.report(
            "error", _NEVER_ENDS, trial.hanging_at(), "blocks the event loop: an async tool must not wait in it"
        )
    return EnvironmentCheck(
        env,
        len(first),
        trial.schemas,
        trial.calls_of.total(),
        len(trial.raised),
        trial.plays,
        sorted(trial.findings, key=lambda finding: finding.severity),
        round(time.monotonic() - began, 3),
    )


class _Trial:
    """The state of a check, which grows in its thread."""

    def __init__(
        self,
        spec: str,
        tasks: Sequence[Task],
        timeout_s: float,
        arguments: Mapping[str, Any] | None,
        human: Human | None,
    ) -> None:
        self.spec, self.tasks, self.timeout_s, self.arguments, self.human = spec, tasks, timeout_s, arguments, human
        self.schemas: list[ToolDefinition] = []
        self.findings: list[Finding] = []
        self.plays: list[Play] = []
        #: Sampled calls by tool, and what tools raised.
        self.calls_of = Counter[str]()
        self.raised: list[tuple[str, BaseException]] = []
        self._target: Any = None
        #: How often the event loop was free, and whether the trial has ended.
        self.beats, self.ended = 0, False

    def report(self, severity: str, summary: str, where: str, detail: str) -> None:
        """Add a finding, one of a kind for each place."""
        if not any((finding.what, finding.where) == (summary, where) for finding in self.findings):
            self.findings.append(Finding(severity, summary, where, detail))

    def hanging_at(self) -> str:
        """Where in the user's file a thread is now."""
        module = sys.modules.get(getattr(self._target, "__module__", ""))
        file = getattr(module, "__file__", None) or self.spec.rpartition(":")[0]
        for frame in sys._current_frames().values():
            for caller, line in traceback.walk_stack(frame):
                if Path(caller.f_code.co_filename).resolve() == Path(file).resolve():
                    return f"{from_here(caller.f_code.co_filename)}:{line}, in {caller.f_code.co_name}"
        return self._defined(self._target)

    def _defined(self, target: Any) -> str:
        """Where a function or a class of the user's is defined."""
        if inspect.isclass(target):
            return f"{from_here(inspect.getfile(target))}:{inspect.getsourcelines(target)[1]}"
        return place_of(target) if callable(target) else self.spec

    def run(self, environment: _Watched | None) -> None:
        """In a thread of its own."""

        async def beat() -> None:
            while True:
                self.beats += 1
                await asyncio.sleep(_LOOK_S / 2)

        async def run_trial(environment: _Watched) -> None:
            beats = asyncio.create_task(beat())
            try:
                await self._try(environment)
            finally:
                beats.cancel()
                self.ended = True

        if environment is not None:
            try:
                asyncio.run(run_trial(environment))
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, also what ends programs
                self.report("error", "ends the check", self._defined(self._target), raised(error))

    def loaded(self) -> _Watched | None:
        """The environment; None where its tools have no schema, each of which is a finding. Raises UsageError."""
        self._target, _ = load_symbol(self.spec, option("env"))
        try:
            environment = _Watched(
                PythonTools.load(self.spec, timeout_s=self.timeout_s, arguments=self.arguments), self
            )
        except UsageError as error:
            for name, tool in self._public():
                try:
                    schema_of(tool)
                except Exception as fault:  # noqa: BLE001 - whatever transformers raises means that it has no schema
                    self.report("error", f"tool {name} has no schema", place_of(tool), str(fault))
            if not self.findings:
                raise error from None
            return None
        self.schemas = environment.schemas
        return environment

    def _public(self) -> list[tuple[str, Any]]:
        if inspect.isclass(self._target):
            methods = inspect.getmembers(self._target, inspect.isfunction)
            return [(name, method) for name, method in methods if not name.startswith("_") and name not in NOT_TOOLS]
        tools = self._target if isinstance(self._target, (list, tuple)) else [self._target]
        return [(getattr(tool, "__name__", str(tool)), tool) for tool in tools if callable(tool)]

    async def _try(self, environment: _Watched) -> None:
        for number, task in enumerate(self.tasks):
            # What hangs would hang again.
            if any(finding.what == _NEVER_ENDS for finding in self.findings):
                return
            draw = random.Random(number)
            script = [self._call(tool, task, draw) for _ in range(_CALLS) for tool in self.schemas]
            scripted = [await self._play("scripted", environment, task, _scripted(script)) for _ in range(2)]
            if None in scripted:
                continue
            if scripted[0] != scripted[1]:
                where = self._defined(self._public()[0][1] if self._public() else self._target)
                self.report(
                    "warning", "not the same twice", where, "two instances answered the same calls in different ways: "
                    "chance without a seed of the task, or state that instances share",
                )  # fmt: skip
            calls = [self._call(draw.choice(self.schemas), task, draw) for _ in range(_TURNS) if self.schemas]
            await self._play("random", environment, task, _scripted(calls, str(draw.randrange(1_000))))
            await self._play("empty", environment, task, _scripted([], ""))
            if self.human is not None:
                await self._play("human", environment, task, self.human)
        for policy in ("empty", "random"):
            if (rewards := self._full_rewards(policy)) is not None:
                tasks = counted(len(rewards), "task")
                text = (
                    f"{min(rewards):g} or more on {tasks}, and no other play earns more: the reward ignores the answer"
                )
                self.report(
                    "warning", f"a policy of {policy} answers earns the full reward", self._defined(self._target), text
                )
        for tool in self.schemas:
            name = str(tool["function"]["name"])
            errors = [error for of, error in self.raised if of == name]
            if errors and len(errors) >= self.calls_of[name]:
                function = dict(self._public())[name]
                text = f"all {len(errors)} sampled calls raised; the first: {raised(errors[0])}"
                self.report("warning", f"tool {name} answers with errors only", raised_at(errors[0], function), text)

    def _full_rewards(self, policy: str) -> list[float] | None:
        """The rewards of a policy by task, where each is at least 1 and that of every other play; else None."""
        best: dict[str, float] = {}
        for play in self.plays:
            best[play.task_id] = max(best.get(play.task_id, _FULL), play.reward or 0.0)
        earned = {play.task_id: play.reward or 0.0 for play in self.plays if play.policy == policy}
        return list(earned.values()) if earned and earned == {task: best[task] for task in earned} else None

    def _call(self, tool: ToolDefinition, task: Task, draw: random.Random) -> Message:
        """A message that calls a tool with arguments drawn from its schema."""
        function = tool["function"]
        schema = function.get("parameters") or {}
        arguments = {name: _sampled(inner, task, draw) for name, inner in (schema.get("properties") or {}).items()}
        return calling(str(function["name"]), arguments)

    async def _play(self, policy: str, environment: _Watched, task: Task, say: Human) -> list[Any] | None:
        """One episode, whose messages ``say`` gives. What it answered; None where it failed."""
        answers, ended, result, episode = list[Any](), None, None, None
        try:
            episode = await environment.start(task, 0)
            while (message := say(episode, result)) is not None:
                result = await episode.step(copy.deepcopy(message))
                answers.append((result.messages, result.reward, result.done))
                if result.done:
                    ended = result.stop_reason or "the policy called no tool"
                    say(episode, result)
                    break
        except OutsideError as error:
            self._fault(error)
            return None
        finally:
            if episode is not None:
                try:
                    await episode.close()
                except OutsideError as error:
                    self._fault(error)
        rewards = [reward for _, reward, _ in answers if reward is not None]
        reward = sum(rewards) if rewards else None
        self.plays.append(Play(policy, task.task_id, len(answers), reward, ended, environment.state()))
        return answers

    def _fault(self, error: OutsideError) -> None:
        """What the environment's own code did, with its place: in the text, or that of the method which it names."""
        text = str(error).splitlines()[0].removeprefix("environment: ")
        words = text.split()
        hung = "gave no answer within" in text
        method = words[1] if words[0] == "tool" else words[3] if text.startswith("the reward of") else words[0]
        function = getattr(self._target, method, None) or dict(self._public()).get(method) or self._target
        where = self.hanging_at() if hung else self._defined(function)
        if text.endswith(")") and " (" in text:
            text, _, where = text[:-1].rpartition(" (")
        if method == "reset" and self.tasks[0].task_id == _MADE_UP:
            text += f"; the task was made up, with a prompt only: {option('tasks')} takes a file of real ones"
        self.report("error", _NEVER_ENDS if hung else "fails", where, text)


class _Watched(PythonTools):
    """An environment whose tool calls are looked at."""

    def __init__(self, inner: PythonTools, trial: _Trial) -> None:
        self.__dict__.update(inner.__dict__)
        self._trial = trial
        self.last: Any = None

    def state(self) -> dict[str, str]:
        """The public attributes of the newest instance."""
        attributes = getattr(self.last, "__dict__", {})
        return {name: brief(value) for name, value in attributes.items() if not name.startswith("_")}

    def _make(self, task: Task) -> tuple[Any, Any]:
        self.last, greeting = super()._make(task)
        if greeting is not None and not isinstance(greeting, str):
            text = f"reset returned {brief(greeting)}, which is not shown to the policy: only text is"
            self._trial.report("warning", "reset returns no text", place_of(type(self.last).reset), text)
        return self.last, greeting

    async def call(self, tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        trial, name = self._trial, str(getattr(tool, "__name__", tool))
        trial.calls_of[name] += 1
        try:
            answer = await super().call(tool, arguments)
        except TimeoutError:
            raise
        except Exception as error:  # looked at, and raised again
            trial.raised.append((name, error))
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
            if isinstance(cause, (*_SLIPS, *_ODD)):
                severity = "error" if isinstance(cause, _SLIPS) else "warning"
                text = f"{raised(cause)} for {json.dumps(dict(arguments), default=str)}"
                trial.report(severity, f"tool {name} raises", raised_at(error, tool), text)
            raise
        _look_at(answer, tool, trial)
        return answer


def calling(name: str, arguments: Any) -> Message:
    """A message of the policy that calls a tool."""
    call = {"type": "function", "id": "c1", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _scripted(script: Sequence[Message], last: str = "Done.") -> Human:
    """Says the messages of a script, then a text that ends the episode."""
    messages = iter([*script, {"role": "assistant", "content": last}])
    return lambda *_: next(messages, None)


def _look_at(answer: Any, tool: Callable[..., Any], trial: _Trial) -> None:
    """Findings on what a tool returned."""
    name, where = getattr(tool, "__name__", str(tool)), place_of(tool)
    content = answer.content if isinstance(answer, Step) else answer
    if content is None and not isinstance(answer, Step):
        trial.report("warning", f"tool {name} returns nothing", where, "the policy reads null")
        return
    if not isinstance(content, str):
        try:
            json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            text = f"returned {brief(content)}, which is not JSON ({error}): the policy reads it as text"
            trial.report("error", f"tool {name} returns no JSON", where, text)
            return
    size = len(content.encode("utf-8", "replace")) if isinstance(content, str) else 0
    if size > MAX_OUTPUT_BYTES:
        text = f"{size:,} bytes, of which the policy reads {MAX_OUTPUT_BYTES:,}"
        trial.report("warning", f"tool {name} returns too much", where, text)
    stated = inspect.signature(tool).return_annotation
    stated = stated if isinstance(stated, str) else getattr(stated, "__name__", "")
    if stated in _PLAIN and not isinstance(answer, (*_PLAIN[stated], Step)):
        text = f"says that it returns {stated}, and returned {brief(answer)}"
        trial.report("warning", f"tool {name} returns another type", where, text)


def _sampled(schema: Mapping[str, Any], task: Task, draw: random.Random) -> Any:
    """A value of a JSON schema; texts are of the task where it has some."""
    if schema.get("enum"):
        return draw.choice(list(schema["enum"]))
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "integer":
        return draw.choice([0, 1, 2, 3, 7, -1])
    if kind == "number":
        return draw.choice([0.0, 0.5, 1.0, -2.5])
    if kind == "boolean":
        return draw.random() < 0.5
    if kind == "array":
        return [_sampled(schema.get("items") or {}, task, draw) for _ in range(draw.randint(0, 2))]
    if kind == "object":
        return {name: _sampled(inner, task, draw) for name, inner in (schema.get("properties") or {}).items()}
    texts = [value for value in task.row.values() if isinstance(value, str) and len(value) < 200]
    return draw.choice([*texts, "1", "a", ""])
