"""Multi-turn environments in plain Python, from a file of the user's: ``--env path.py:Name``.

``Name`` is a class, one instance a rollout: its public methods are the tools, except ``reset(**task_row)`` (called first;
a string that it returns is appended to the last message), ``respond(message)`` (called when the policy calls no tool: what
the user says next, or None to end), ``step_reward(message)`` (called after each step with the policy's message),
``get_reward()`` (called at the end; it adds to the last turn's reward) and ``close()``. Or ``Name`` is a function or a list
of functions: stateless tools. That is TRL's ``environment_factory`` convention, so such classes run unchanged. An attribute
``stdout`` with text in it, at the end of the rollout, is kept with the rollout and is there for rewards. Schemas come from
signatures and docstrings.

Invariants: without ``respond`` the episode is over when the policy calls no tool. What the policy does wrong (an unknown
tool, bad arguments, a call that makes the tool raise) is returned to the policy in a tool message ``{"error": …}``. What the
environment does wrong (a tool that hangs; anything else that raises, hangs or returns what it must not) is an OutsideError.
Output above 64 KiB is cut, and the message says so. Plain functions run in daemon threads, never in the loop.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymdata.environments.port import StepResult, Talk, Verdict
from gymdata.environments.step import Step, gives_steps, guarded, hung, plus, reward_of, tool_message, user_answer
from gymdata.environments.tool_error import as_text, tool_error_message
from gymdata.errors import OutsideError, UsageError, raised
from gymdata.models._transformers import schema_of
from gymdata.rollouts.messages import Message, Task, ToolCall, ToolDefinition
from gymdata.store.paths import Identity
from gymdata.user_code import called, in_memory, load_symbol, place_of, raised_at

_PLAIN = ("close", "get_reward", "reset")
NOT_TOOLS = frozenset({*_PLAIN, "respond", "step_reward"})
Tool = Callable[..., Any]


class PythonTools:
    """An environment from a Python file."""

    def __init__(
        self,
        target: Any,
        identity: Identity,
        *,
        timeout_s: float,
        make: Callable[[], Any] | None = None,
        tools: bool = True,
    ) -> None:
        """``target``: a class, a function or a list of functions; ``make``: what gives an instance of the class when not
        the class itself; ``tools``: whether its public methods are tools. Raises UsageError when it is no use."""
        self.identity = identity
        self.timeout_s = timeout_s
        self._type = target
        self.factory: Callable[[], Any] | None = (make or target) if inspect.isclass(target) else None
        self.responds = self.factory is not None and hasattr(target, "respond")
        if self.factory is not None:
            methods = [name for name, _ in inspect.getmembers(target, inspect.isfunction)] if tools else []
            self._names = [name for name in methods if not name.startswith("_") and name not in NOT_TOOLS]
            for name in _PLAIN:
                if inspect.iscoroutinefunction(method := getattr(target, name, None)):
                    # Called like the others, it would do nothing, and the rollouts would look whole.
                    raise UsageError(
                        f"{identity['spec']}: {name} is async ({place_of(method)}), expected a plain method",
                        hint="tools, respond and step_reward may be async; run other async work inside with asyncio.run(…)",
                    )
            functions: list[Tool] = [getattr(target, name) for name in self._names]
        else:
            functions = list(target) if isinstance(target, (list, tuple)) else [target]
            if not all(callable(tool) for tool in functions):
                raise UsageError.bad_value(f"{identity['spec']}", type(target).__name__, "a class or functions")
            self._names = [tool.__name__ for tool in functions]
        plays = tools and any(hasattr(target, name) for name in ("reset", "get_reward", "step_reward"))
        if not functions and not self.responds and not plays:
            lack = "no public methods, so it gives the policy no tools, and no respond" if tools else "no respond"
            raise UsageError(f"{identity['spec']} has {lack}")
        self._functions = dict(zip(self._names, functions, strict=True))
        self.schemas = [_schema(tool, str(identity["spec"])) for tool in functions]
        self.rewards_steps = hasattr(target, "step_reward") or any(
            gives_steps(function) for function in (*functions, *([target.respond] if self.responds else []))
        )

    @classmethod
    def load(cls, spec: str, *, timeout_s: float, arguments: Mapping[str, Any] | None = None) -> PythonTools:
        """From ``path.py:Name``; ``arguments``: those of the class. Raises UsageError."""
        target, source = load_symbol(spec, "--env")
        where, _, digest = source.partition("@")
        identity: Identity = {"name": "python_tools", "spec": where, "file_hash": digest}
        if not arguments:
            return cls(target, identity, timeout_s=timeout_s)
        if not inspect.isclass(target):
            raise UsageError(f"--set env_args: {spec} is no class, so it takes no arguments")
        signature = inspect.signature(target)
        try:
            bound = signature.bind(**arguments).arguments
        except TypeError as error:
            raise UsageError(f"--set env_args: {spec}: {error}", hint=f"it is {signature}") from error
        for name, value in bound.items():
            stated = signature.parameters[name].annotation
            stated = getattr(stated, "__name__", stated)
            if isinstance(value, str) and stated in ("int", "float", "bool"):
                where = f"--set env_args: {spec}: {name}"
                raise UsageError.bad_value(where, value, f"a value of type {stated}", hint=f"it is {signature}")
        identity = {**identity, "arguments": dict(arguments)}
        return cls(target, identity, timeout_s=timeout_s, make=lambda: target(**copy.deepcopy(arguments)))

    @classmethod
    def from_object(cls, target: Any, *, timeout_s: float) -> PythonTools:
        """From a class, an instance (each rollout gets a copy of it), a function or a list of functions.

        Raises UsageError."""
        if isinstance(target, (list, tuple)):
            if not target:
                raise UsageError("env: got no functions, expected at least one")
            names, sources = zip(*map(in_memory, target), strict=True)
            digest = hashlib.blake2b("".join(sources).encode(), digest_size=16).hexdigest()
            source = f"in memory:{','.join(names)}@{digest}"
        else:
            _, source = in_memory(target)
        where, _, digest = source.partition("@")
        identity = {"name": "python_tools", "spec": where, "file_hash": digest}
        if inspect.isclass(target) or inspect.isroutine(target) or isinstance(target, (list, tuple)):
            return cls(target, identity, timeout_s=timeout_s)
        return cls(type(target), identity, timeout_s=timeout_s, make=lambda: copy.deepcopy(target))

    async def start(self, task: Task, rollout_index: int) -> ToolEpisode:  # noqa: ARG002 - the port's signature
        """A fresh instance, reset with the task's row. Raises OutsideError when that raises or hangs."""
        instance = None
        messages = task.messages
        if self.factory is not None:
            instance, greeting = await self.guarded("reset", self._make, task)
            if isinstance(greeting, str) and greeting:
                last = messages[-1]
                messages = [*messages[:-1], {**last, "content": (last.get("content") or "") + as_text(greeting)}]
        tools = {n: getattr(instance, n) if instance is not None else f for n, f in self._functions.items()}
        return ToolEpisode(self, instance, tools, messages)

    async def close(self) -> None: ...

    def _make(self, task: Task) -> tuple[Any, Any]:
        assert self.factory is not None
        try:
            instance = self.factory()
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise OutsideError.user_code("__init__", error, raised_at(error, self._type)) from error
        reset = getattr(instance, "reset", None)
        try:
            # A copy, because all rollouts of the task share the row, and it is written with each.
            return instance, reset(**copy.deepcopy(task.row)) if reset is not None else None
        except (Exception, SystemExit) as error:
            raise OutsideError.user_code("reset", error, raised_at(error, reset)) from error

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        """One tool call, with a copy of its arguments; async tools run in the loop. Raises TimeoutError when it hangs, or
        what the tool raises."""
        arguments = copy.deepcopy(arguments)
        answer = called(functools.partial(tool, **arguments))
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                return await answer
        except TimeoutError as error:
            if limit.expired():
                raise
            # The tool's own, of a request that it made: as any other error that it raises.
            raise RuntimeError(raised(error)) from error

    async def guarded(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The environment's own code: whatever it raises is its fault."""
        return await guarded(name, function, *arguments, timeout_s=self.timeout_s)


class ToolEpisode:
    """One rollout's instance, messages and tools."""

    def __init__(
        self, environment: PythonTools, instance: Any, functions: Mapping[str, Tool], messages: list[Message]
    ) -> None:
        self.messages = messages
        self.tools: list[ToolDefinition] | None = environment.schemas or None
        self.rewards_steps = environment.rewards_steps
        #: Who answers where no tool is called, in the place of the instance's own ``respond``.
        self.user: Talk | None = None
        self._environment = environment
        self._instance = instance
        self._functions = functions

    async def step(self, message: Message) -> StepResult:
        """Run the message's tool calls, in order, up to one that ends the rollout; without any, the user answers, and
        without a user the episode is over."""
        calls = message.get("tool_calls") or []
        result = await (self._called(calls) if calls else self.reply(message))
        if hasattr(self._instance, "step_reward"):
            result = await self._rewarded(result, message)
        if result.done:
            result = replace(result, reward=plus(result.reward, await self._reward()))
        return result

    async def reply(self, message: Message) -> StepResult:
        """The user's answer to a message without tool calls."""
        if self.user is not None:
            return await self.user.reply(message)
        if not self._environment.responds:
            return StepResult(done=True)
        return user_answer(await self._environment.guarded("respond", self._instance.respond, message), "respond")

    async def verdict(self, messages: Sequence[Message], stop_reason: str | None) -> Verdict | None:  # noqa: ARG002 - the port's
        """``get_reward`` of a rollout that a limit ended (otherwise it was called at the last step); and the attribute
        ``stdout`` of the instance, where it is text."""
        reward = None if stop_reason is None else await self._reward()
        stdout = getattr(self._instance, "stdout", None)
        extra = {"stdout": as_text(stdout)} if isinstance(stdout, str) else {}
        return Verdict(None, extra, last_step=reward) if extra or reward is not None else None

    async def close(self) -> None:
        if self._instance is not None and hasattr(self._instance, "close"):
            await self._environment.guarded("close", self._instance.close)

    async def _called(self, calls: Sequence[ToolCall]) -> StepResult:
        answers: list[Message] = []
        steps: list[Step] = []
        for call in calls:
            function = call.get("function") or {}
            steps.append(await self._run(str(function.get("name")), function.get("arguments")))
            answers.append(tool_message(call, steps[-1].content))
            if steps[-1].done:
                break
        rewards = [reward_of(step.reward, "the reward of a tool") for step in steps]
        return StepResult(answers, steps[-1].done, plus(*rewards), steps[-1].ended)

    async def _rewarded(self, result: StepResult, message: Message) -> StepResult:
        value = await self._environment.guarded("step_reward", self._instance.step_reward, message)
        step = value if isinstance(value, Step) else Step(reward=value)
        if step.content is not None:
            raise OutsideError("environment", "step_reward gave a Step with content, expected a reward alone")
        reward = plus(result.reward, reward_of(step.reward, "step_reward"))
        return replace(
            result, reward=reward, done=result.done or step.done, stop_reason=result.stop_reason or step.ended
        )

    async def _reward(self) -> float | None:
        if self._instance is None or not hasattr(self._instance, "get_reward"):
            return None
        return reward_of(await self._environment.guarded("get_reward", self._instance.get_reward), "get_reward")

    async def _run(self, name: str, arguments: Any) -> Step:
        """The tool's answer as text, with what else it says of the step."""
        tool = self._functions.get(name)
        if tool is None:
            return Step(tool_error_message(f"there is no tool {name!r}; the tools are: {', '.join(self._functions)}"))
        if not isinstance(arguments, dict):
            return Step(tool_error_message(f"the arguments of {name} must be a JSON object"))
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return Step(tool_error_message(f"{name}: {error}"))
        try:
            answer = await self._environment.call(tool, arguments)
        except TimeoutError as error:
            raise hung(f"tool {name}", self._environment.timeout_s) from error
        except Exception as error:  # noqa: BLE001 - whatever the tool raises is an answer to the policy's call
            return Step(tool_error_message(raised(error).partition(": ")[2] or type(error).__name__))
        if isinstance(answer, Step):
            return replace(answer, content="" if answer.content is None else as_text(answer.content))
        return Step(as_text(answer))


def _schema(tool: Tool, spec: str) -> ToolDefinition:
    try:
        schema = schema_of(tool)
    except UsageError:
        raise
    except NameError as error:
        raise UsageError(
            f"{spec}: tool {tool.__name__!r}: its type hint {error.name!r} is not defined ({place_of(tool)})",
            hint="import the type where the tool is defined, or correct its name",
        ) from error
    except Exception as error:  # its own exception types; all mean that the signature or docstring is not usable
        raise UsageError(
            f"{spec}: no tool schema for {getattr(tool, '__name__', tool)!r}: {error}",
            hint="give it type hints and a docstring with an 'Args:' line for each argument",
        ) from error
    return schema
