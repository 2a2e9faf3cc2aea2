"""Prompts that a NeMo Gym row lacks, rebuilt from the ids that it has.

A call whose generation was captured and whose prompt was not gets the prompt that the conversation's template writes:
the first call the rendering of what comes before it, a later call the ids held so far and, by ``splice``, what is new
in the rendering. Invariants: captured prompts, generations and log-probabilities are never changed; a prompt that
cannot be proved is refused by name, and one that a later captured prompt contradicts is removed. Some errors leave no
trace in the row (a first message that was edited, another tokenizer with the same ids), so rebuilt prompts stay marked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gymdata.errors import DataError, squeezed
from gymdata.interop.nemo_gym import rows as nemo_rows
from gymdata.rollouts.messages import JsonObject, Message, Tools, loads, messages_of, object_of, row_tools, walk
from gymdata.rollouts.next_prompt import SpliceRefusedError, common_length, splice

#: On an item: its prompt was not captured but rebuilt.
MARK = "prompt_token_ids_rebuilt"
#: On an item: its ids were rendered from text, not sampled.
RENDERED = "token_ids_rendered"
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text", None})


class Renders(Protocol):
    """A tokenizer with its chat template."""

    end_of_turn_ids: tuple[int, ...]
    vocab_size: int

    def text(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> str:
        """Raises DataError when the template refuses the messages."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Refused:
    """A prompt that was not rebuilt. ``turn``: the model call's number in the row; ``position``: the first id that
    contradicts it; ``expected`` and ``got``: the decoded ids around it on both sides."""

    turn: int
    reason: str
    position: int | None = None
    expected: str | None = None
    got: str | None = None


@dataclass(frozen=True, slots=True)
class NotRebuilt:
    """The same with its row: file, 1-based line and rollout."""

    file: Path
    line: int
    rollout_id: str
    refused: Refused


@dataclass(slots=True)
class Outcome:
    """The result for one row's missing prompts: model call → prompt, and the refusals in the order of the calls."""

    prompts: dict[int, list[int]] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)


def filled(row: nemo_rows.Row, line: bytes, chat: Renders) -> Outcome:
    """Put the prompts that can be proved into ``row.calls``."""
    if not any(call is not None and call.generation and not call.prompt for call in row.calls):
        return Outcome()
    outcome = _Row(chat, row.calls, json.loads(line)).outcome()
    for number, prompt in outcome.prompts.items():
        call = row.calls[number]
        assert call is not None
        row.calls[number] = call._replace(prompt=nemo_rows.TokenList(np.asarray(prompt, np.int64)))
    return outcome


class _Refusal(Exception):  # noqa: N818 - caught nearby, never shown as an error
    def __init__(self, reason: str, position: int | None = None, expected: Any = (), got: Any = ()) -> None:
        super().__init__(reason)
        self.reason, self.position, self.expected, self.got = reason, position, expected, got


class _Row:
    """One row's calls in order."""

    def __init__(self, chat: Renders, calls: Sequence[nemo_rows.Call | None], value: JsonObject) -> None:
        self._chat, self._calls = chat, calls
        params = object_of(value.get("responses_create_params"))
        output = value["response"]["output"]
        request_input = params.get("input")
        numbers = {number: number for number in range(len(calls))}
        self._messages: list[Message] = [dict(m) for m in messages_of(request_input, walk(output), numbers)]
        self._ends = {m["turn"]: i for i, m in enumerate(self._messages) if m.get("turn") is not None}
        # As templates take them.
        self._chat_message: list[Message] = []
        for message in self._messages:
            chat_message = {k: v for k, v in message.items() if v is not None and k not in ("turn", "tool_calls")}
            if message.get("tool_calls"):
                chat_message["tool_calls"] = loads(message["tool_calls"])
            self._chat_message.append(chat_message)
        self._tools: list[Any] = loads(row_tools(value)) or []
        items = [*(request_input if isinstance(request_input, list) else []), *output]
        functions = [call.get("function") for m in self._chat_message for call in m.get("tool_calls") or ()]
        sound = all(isinstance(f, dict) and isinstance(f.get("name"), str) and "arguments" in f for f in functions)
        odd_call = None if sound else "a call of a tool has no name or no arguments"
        self._unclear = _unclear(params, self._tools, items) or odd_call

    def outcome(self) -> Outcome:
        """Walk the calls. ``context``: prompt ++ generation of the call before, None when that is not known."""
        outcome = Outcome()
        refused: dict[int, Refused] = {}
        context: list[int] | None = []
        why = ""
        for number, call in enumerate(self._calls):
            if call is None or not call.generation:
                context, why = None, f"turn {number} before it has no generation ids"
                continue
            generation = _ids(call.generation)
            if call.prompt:
                prompt = _ids(call.prompt)
                if context:
                    self._against(number, prompt, context, outcome, refused)
            else:
                try:
                    if context is None:
                        raise _Refusal(why)
                    prompt = self._prompt(number, context, generation)
                except _Refusal as no:
                    refused[number] = self._named(number, no)
                    context, why = None, f"the prompt of turn {number} before it was not rebuilt"
                    continue
                outcome.prompts[number] = prompt
            context = [*prompt, *generation]
        outcome.refused = [refused[number] for number in sorted(refused)]
        return outcome

    def _prompt(self, number: int, context: list[int], generation: list[int]) -> list[int]:
        """The prompt of the call. Raises _Refusal."""
        if self._unclear:
            raise _Refusal(self._unclear)
        for ids in (context, generation):
            odd = next((i for i, token in enumerate(ids) if not 0 <= token < self._chat.vocab_size), None)
            if odd is not None:
                raise _Refusal(f"id {ids[odd]} is not one of this tokenizer's {self._chat.vocab_size}", odd)
        before = self._chat_message[: self._ends[number]]
        try:
            rendered = self._chat.encode(self._chat.text(before, self._tools or None, generate=True))
            if number == 0:
                return rendered
            end = self._ends[number - 1] + 1
            if end == len(before):
                raise _Refusal(f"no message stands between turn {number - 1} and it")
            history = self._chat.encode(self._chat.text(before[:end], self._tools or None, generate=False))
            self._check_statements(number - 1, before[end - 1], context, history)
            return splice(context, history, rendered, self._chat.end_of_turn_ids)
        except SpliceRefusedError as no:
            raise _Refusal(no.message, no.position, no.expected_ids, no.got_ids) from no
        except DataError as no:
            raise _Refusal(no.message) from no

    def _check_statements(self, number: int, message: Message, context: list[int], history: list[int]) -> None:
        """Refuse unless everything in the message before the cut is also in its ids."""
        call = self._calls[number]
        decoded = squeezed(self._chat.decode(_ids(call.generation))) if call is not None else ""
        # The contents of the message, piece by piece, each with the ways that a model may have written it.
        pieces: list[tuple[str, ...]] = [
            (str(message[name]),) for name in ("content", "reasoning") if message.get(name)
        ]
        for tool_call in message.get("tool_calls") or ():
            pieces += [(tool_call["function"]["name"],), *_leaves(tool_call["function"]["arguments"])]
        odd = next((ways[0] for ways in pieces if not any(squeezed(way) in decoded for way in ways)), None)
        if odd is not None:
            common = common_length(context, history)
            raise SpliceRefusedError(f"turn {number} says {odd[:60]!r}, which its ids do not", common, context, history)

    def _against(
        self, number: int, prompt: list[int], context: list[int], outcome: Outcome, refused: dict[int, Refused]
    ) -> None:
        """Remove prompts that were rebuilt since the last captured one and are not a beginning of this one."""
        common = common_length(prompt, context)
        since = number - 1
        while since in outcome.prompts:
            if len(outcome.prompts[since]) > common:
                del outcome.prompts[since]
                window = [ids[max(0, common - 8) : common + 8] for ids in (prompt, context)]
                reason = f"the captured prompt of turn {number} speaks against it"
                refused[since] = self._named(since, _Refusal(reason, common, *window))
            since -= 1

    def _named(self, number: int, no: _Refusal) -> Refused:
        sides = [self._window(ids) if no.position is not None else None for ids in (no.expected, no.got)]
        return Refused(number, no.reason, no.position, *sides)

    def _window(self, ids: Sequence[int]) -> str:
        return self._chat.decode([i for i in ids if 0 <= i < self._chat.vocab_size])


def _unclear(params: JsonObject, tools: Any, items: list[Any]) -> str | None:
    """Why a rendering of the messages need not be what the server wrote."""
    for options in (params, object_of(params.get("metadata"))):
        for name in ("instructions", "previous_response_id", "chat_template_kwargs", "extra_body"):
            if options.get(name):
                return f"the request has {name!r}, which changes the prompt in a way that the row does not record"
    if not all(isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools):
        return "a tool that is no function has no place in the template"
    for _, item in walk(items):
        if item.get("type") in (None, "message") and not isinstance(item.get("role"), str):
            return "a message has no role"
        content = item.get("content") if "content" in item else item.get("output")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, str) and not (isinstance(part, dict) and part.get("type") in _TEXT_PARTS):
                return "a message holds more than text"
    return None


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]
    elif value is not None:
        yield json.dumps(value), str(value)


def _ids(of: nemo_rows.TokenList) -> list[int]:
    ids: list[int] = of.all_values().tolist()
    return ids
