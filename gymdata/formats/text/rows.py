"""Conversations that other projects have as text, as messages, and the rows of rollouts and pairs that they become.

Nothing of a row is guessed: a role, a part of a content or a call that is not known makes the row unusable, with its place.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymdata.errors import json_kind
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.rows import (
    NOT_TRAINED,
    foreign_row,
    message_of,
    prompt_group,
    refuse_surrogates,
)
from gymdata.formats.text.words import is_trained, worth
from gymdata.rollouts.messages import STRICT, JsonObject, Message, PairRow
from gymdata.rollouts.turns import TurnEncoder
from gymdata.store.formats import is_own

#: Roles of ShareGPT, whose messages have ``from`` and ``value``.
_FROM = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
}
_ROLES = {"developer": "system", "function": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
#: Names of the arguments of a call (OpenAI, Llama 3, LangChain, Anthropic), and what a call may have besides.
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_OF_CALL = ("name", "id", "type", "index", "call_id", "description", "strict")
_MEDIA = ("image", "images", "image_paths", "audio", "audios", "video", "videos")
#: Special tokens of chat templates, and the roles on lines of their own that are left of them.
_TEMPLATE = re.compile(r"<\|\w+\|>|<start_of_turn>|\[/?INST\]|<｜|^(?:system|user|assistant|model)$", re.MULTILINE)
#: Types of parts whose ``text`` is what was said; others may have a field of that name, too.
_TEXTS = (None, "text", "input_text", "output_text", "summary_text", "reasoning_text")
#: The address of an image in a text.
_PICTURE = re.compile(r"<img>[^<>\s]+</img>")
#: Columns that become messages before an answer.
BESIDE = ("system", "system_prompt", "history")
#: Columns of pairs with a number per token, which text has none of.
_LISTS = (
    *("prompt_ids", "chosen_ids", "rejected_ids"),
    *("chosen_mask", "rejected_mask", "chosen_logprobs", "rejected_logprobs"),
)
#: Default of ``rollout_row``: the columns of the row state the reward.
AS_STATED: Any = object()


def first_row(value: Any) -> JsonObject:
    """The first row of a document, which is a list of rows or one; an empty object for anything else, and for gymdata's own
    rows."""
    row = value[0] if isinstance(value, list) and value else value
    return row if isinstance(row, dict) and not is_own(row) else {}


def column(row: JsonObject, *names: str) -> str:
    """The first of these columns that ``row`` has. Raises BadItem."""
    if name := next((name for name in names if row.get(name) is not None), None):
        return name
    if name := next((name for name in names if name in row), None):
        raise BadItem.value(name, None, "text or messages", "S103")
    others = f", also as {', '.join(names[1:])}" if len(names) > 1 else ""
    raise BadItem("S103", f"{names[0]}: is missing{others}")


def ends_with_answer(messages: Any) -> bool:
    """Whether the last one of a list of messages, of either shape, is the assistant's."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return False
    return last.get("role") == "assistant" or _FROM.get(str(last.get("from")).lower()) == "assistant"


def conversation(value: Any, where: str) -> list[Message]:
    """The messages of a text, which is a user's message or all that HH-RLHF has in one, or of a list of messages of either
    shape. Raises BadItem."""
    if isinstance(value, str):
        messages = spoken(value) or [message_of("user", value)]
        return messages[:-1] if messages[-1] == message_of("assistant", "") else messages
    if not isinstance(value, list) or not value:
        raise BadItem(
            "S102", f"{where}: got {json_kind(value) if value != [] else 'no message'}, expected text or messages"
        )
    return [_message(message, f"{where}[{n}]") for n, message in enumerate(value)]


def answer(value: Any, where: str) -> list[Message]:
    """``conversation`` of what follows a prompt: a text is the assistant's message, and so is a message alone."""
    if isinstance(value, str):
        return [message_of("assistant", value)]
    messages = conversation([value] if isinstance(value, dict) else value, where)
    if messages[0]["role"] != "assistant":
        raise BadItem.value(f"{where}[0].role", messages[0]["role"], "'assistant'")
    return messages


def exchange(prompt: str, output: str, where: str) -> tuple[list[Message], list[Message]]:
    """The messages of a prompt and of what was sampled after it, both plain text. Raises BadItem for the text of a chat
    template, whose messages are not sure."""
    if _TEMPLATE.search(prompt) or _TEMPLATE.search(output):
        raise BadItem(
            "S102", f"{where}: got text of a chat template, expected a plain prompt and its answer, or messages"
        )
    return conversation(prompt, where), [message_of("assistant", output)]


def as_text(value: Any) -> Any:
    """A finite number of an answer as its text; anything else as it is."""
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    return STRICT.encode(value) if is_number else value


def spoken(text: Any) -> list[Message]:
    """The messages of a text of HH-RLHF; none when it is not one."""
    if not isinstance(text, str) or not text.startswith(("\n\nHuman:", "\n\nAssistant:")):
        return []
    _, *parts = re.split("\n\n(Human|Assistant):", text)
    return [
        message_of("user" if speaker == "Human" else "assistant", utterance.strip())
        for speaker, utterance in zip(parts[::2], parts[1::2], strict=True)
    ]


def instruction(row: JsonObject) -> str:
    """The user's message of a row: its instruction, and its input, or context, below it."""
    texts = [row["instruction"], row.get("input") or row.get("context")]
    return "\n\n".join(text for text in texts if isinstance(text, str) and text.strip())


def in_context(row: JsonObject, messages: list[Message]) -> list[Message]:
    """``messages`` after the system message and the earlier exchanges (``history``) that a row has beside them."""
    before = [
        {"role": role, "content": text}
        for exchange in row.get("history") or ()
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    if before:
        first = messages[0]["role"] == "system"
        messages = [*messages[:first], *conversation(before, "history"), *messages[first:]]
    system = text_of(row.get("system") or row.get("system_prompt"), "system")
    if not system.strip():
        return messages
    if messages[0]["role"] != "system":
        return [message_of("system", system), *messages]
    if messages[0]["content"] != system:
        raise BadItem("S102", "system: got another text than that of the system message")
    return messages


def tools_of(row: JsonObject) -> str:
    """The tools of a row as JSON text; they may be text themselves, or OpenAI's ``functions``. Raises BadItem, also for a
    row with images."""
    if media := next((name for name in _MEDIA if row.get(name)), None):
        raise BadItem("S102", f"{media}: images, audio and video are not trained")
    tools = row.get("tools") or row.get("functions") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except ValueError:
            raise BadItem("S102", "tools: got text that is not JSON, expected a list of tools") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadItem("S102", f"tools: got {json_kind(tools)}, expected a list of tools")
    return STRICT.encode([tool if "function" in tool else {"type": "function", "function": tool} for tool in tools])


def _message(message: Any, where: str) -> Message:
    """A message of OpenAI's shape, with ``role`` and ``content``, or of ShareGPT's, with ``from`` and ``value``."""
    if not isinstance(message, dict):
        raise BadItem("S102", f"{where}: got {json_kind(message)}, expected a message")
    if media := next((name for name in _MEDIA if message.get(name)), None):
        raise BadItem("S102", f"{where}.{media}: images, audio and video are not trained")
    calls = message.get("tool_calls") or message.get("function_call") or None
    if "role" not in message and "from" in message:
        speaker, content = str(message["from"]).lower(), message.get("value")
        if (role := _FROM.get(speaker)) is None:
            raise BadItem.value(f"{where}.from", message["from"], f"one of {', '.join(_FROM)}")
        if speaker == "function_call":
            content, calls = "", content
    else:
        role, content = message.get("role"), message.get("content")
        role = _ROLES.get(str(role), role)
        if role not in ("system", "user", "assistant", "tool"):
            raise BadItem.value(f"{where}.role", role, "system, user, assistant or tool")
    more: Message = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    for name in _REASONING:
        if "reasoning" not in more and (reasoning := text_of(message.get(name) or "", f"{where}.{name}")):
            more["reasoning"] = reasoning
    if calls is not None:
        more["tool_calls"] = _calls(calls, where)
    if not is_trained(message, f"{where}."):
        more["extra"] = NOT_TRAINED
    if content is None and calls is None:
        raise BadItem.value(f"{where}.content", None, "text or tool calls")
    return message_of(role, None if content is None else text_of(content, f"{where}.content"), **more)


def text_of(content: Any, where: str) -> str:
    """The text of content, which is text or parts of it. Raises BadItem for a part that is no text, by its type."""
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise BadItem("S102", f"{where}: got {json_kind(content)}, expected text")
    texts = []
    for part in content or ():
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (part, None)
        if kind not in _TEXTS or not isinstance(text, str):
            raise BadItem("S102", f"{where}: got a part of type {kind!r}, expected text (other parts are not kept)")
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, where: str) -> str:
    """Tool calls as JSON text; a call alone is its name and arguments, which may be JSON text."""
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
    except ValueError:
        raise BadItem("S102", f"{where}: got a tool call that is not JSON") from None
    tool_calls = []
    for call in calls if isinstance(calls, list) else [calls]:
        if isinstance(call, str):
            tool_calls += json.loads(_calls(call, where))
            continue
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadItem("S102", f"{where}: got a tool call without a name")
        arguments = _arguments(function, where)
        tool_calls.append(
            {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return STRICT.encode(tool_calls)


def _arguments(function: JsonObject, where: str) -> Any:
    """The arguments of a call, in the column that its writer has for them; none is an empty object. Raises BadItem for a
    call that has them in several columns or in one that is not known."""
    names = [name for name in _ARGUMENTS if function.get(name) is not None]
    if len(names) > 1 or (not names and not function.keys() <= {*_ARGUMENTS, *_OF_CALL}):
        raise BadItem("S102", f"{where}: got a tool call with {', '.join(function)}, expected name and arguments")
    return function[names[0]] if names else function.get("arguments", {})


def rollout_row(
    row: JsonObject,
    prompt: Sequence[Message],
    written: Sequence[Message],
    importing: Importing,
    *,
    reward: Any = AS_STATED,
    rewards: Mapping[str, float] | None = None,
    texts: Sequence[str] = (),
    about: Sequence[str] = (),
    group: str | None = None,
    policy: Any = None,
    truncated: bool = False,
    turns: TurnEncoder | None = None,
    known_as: Any = None,
) -> TableRow:
    """The rollouts row of ``row``. ``prompt``: the messages that are given; ``written``: the conversation from the model's
    first message on, in which all of the assistant's are trained but those that are marked; ``texts``: columns that are
    these messages, or lost; ``about``: columns of its ``extra``; the others are columns of its task; ``truncated``: a limit
    ended it; ``turns``, ``known_as``: its token data (``conversion.models.turns_of``) and id (``foreign_row``); where
    nothing is ``written`` their text is not known, and the rollout has no messages. Without a ``reward`` the row is data,
    not a rollout of a policy: its columns state what the answer is worth, and an empty answer is refused."""
    if (written or turns is None) and not any(message["role"] == "assistant" for message in written):
        raise BadItem("S103", "no message of the assistant")
    _refuse_pictures((*prompt, *written))
    if reward is AS_STATED:
        reward, rewards = worth(row)
        refuse_empty(written, "the answer")
    if group is not None and not isinstance(group, str):
        raise BadItem.value("the task", group, "text")
    policy = policy if isinstance(policy, str) and policy else "unknown"
    tools, messages = tools_of(row), [*prompt, *written] if written else []
    known = {"reward": reward, "tools": tools, "group": group, "policy": policy, "known_as": known_as}
    rollout = foreign_row(row, messages, importing, turns=turns, opening=prompt, **known)
    elsewhere = {"messages", "prompt", "tools", "functions", *texts, *about}
    task = {name: value for name, value in row.items() if name not in elsewhere}
    asked = {"messages": [{k: v for k, v in m.items() if v is not None} for m in prompt]} if prompt else {}
    try:
        rollout["task"] = STRICT.encode({**task, "task_id": rollout["task_id"], **asked})
        rollout["extra"] = STRICT.encode({name: row[name] for name in about if row.get(name) is not None})
    except ValueError:
        odd = (name for name, cell in row.items() if isinstance(cell, float) and not math.isfinite(cell))
        where = next(odd, "a field of the row")
        raise BadItem("S102", f"{where}: got NaN or Infinity, expected a finite number") from None
    if truncated:
        rollout |= {"status": "truncated", "stop_reason": "length"}
    return rollout | {"rewards": dict(rewards or {})}


def answered_row(row: JsonObject, questions: Sequence[str], answers: Sequence[str], importing: Importing) -> TableRow:
    """The rollouts row of a row with a prompt and an answer, each in the first of these columns that is there."""
    prompt_column, name = column(row, *questions), column(row, *answers)
    prompt, texts = prompt_of(row, prompt_column)
    return rollout_row(row, prompt, answer(as_text(row[name]), name), importing, texts=(name, *texts))


def prompt_of(row: JsonObject, name: str) -> tuple[list[Message], Sequence[str]]:
    """The messages of the prompt in a column, with what stands beside it, and the columns that they are made of."""
    is_instruction = name == "instruction"
    prompt = conversation(instruction(row) if is_instruction else row[name], name)
    return in_context(row, prompt), (name, *(("input", "context") if is_instruction else ()), *BESIDE)


def refuse_empty(messages: Iterable[Message], name: str) -> None:
    """Raises BadItem for an answer to train that has no text but white space, and no reasoning and no calls."""
    for message in messages:
        empty = not any((message[field] or "").strip() for field in ("content", "reasoning", "tool_calls"))
        if empty and message["role"] == "assistant" and message["extra"] != NOT_TRAINED:
            raise BadItem("S103", f"{name} is empty: got {message['content']!r:.20}, expected text or a call")


def _refuse_pictures(messages: Iterable[Message]) -> None:
    """Raises BadItem for a text with the address of an image in it, as Qwen-VL and ms-swift write them."""
    if any(_PICTURE.search(message["content"] or "") for message in messages):
        raise BadItem("S102", "<img>: images, audio and video are not trained")


def pair_row(
    row: JsonObject,
    prompt: Sequence[Message],
    sides: tuple[Sequence[Message], Sequence[Message]],
    importing: Importing,
    margin: float = math.nan,
) -> TableRow:
    """The pairs row of a prompt and the (chosen, rejected) answers to it. Raises BadItem for equal sides, and for one that
    does not end with an answer."""
    refuse_surrogates(row)
    chosen, rejected = map(list, sides)
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        refuse_empty(side, name)
        if any(message["extra"] == NOT_TRAINED for message in side):
            raise BadItem("S102", f"{name}: got a message that is not trained, expected sides that are trained whole")
    _refuse_pictures((*prompt, *chosen, *rejected))
    if last := next((side[-1]["role"] for side in sides if side[-1]["role"] != "assistant"), None):
        raise BadItem("S102", f"a side ends with a message of role {last!r}, expected 'assistant'")
    if chosen == rejected:
        raise BadItem("P601", "chosen and rejected are the same")
    refuse_contradiction(margin, importing)
    tools = tools_of(row)
    pair: TableRow = {
        "pair_id": "",
        "run_id": importing.run_id,
        "task_id": prompt_group(prompt, tools),
        "tools": tools,
        "prompt": list(prompt),
        "chosen": chosen,
        "rejected": rejected,
        "chosen_rollout_id": "",
        "rejected_rollout_id": "",
        "margin": margin,
        "weight": 1.0,
        "source": "import",
        "policy_hash": "",
        "policy_version": 0,
        "temperature": 1.0,
        **{name: [] for name in _LISTS},
    }
    return pair | {"pair_id": pair_id_of(importing, pair)}


def refuse_contradiction(margin: float, importing: Importing) -> None:
    """Raises BadItem for a pair whose own scores say that rejected is the better side, unless such pairs are kept."""
    if margin < 0 and not importing.keep_contradicting:
        raise BadItem(
            "P603", f"its scores prefer rejected by {-margin:g} (gymdata import --keep-contradicting takes it)"
        )


def pair_id_of(importing: Importing, pair: PairRow) -> str:
    """The id of the pair in hand, by its place in its file and by what it says: files of one name may be in several
    folders."""
    texts = [pair[name] for name in ("prompt", "chosen", "rejected")]
    return hashlib.blake2b(json.dumps([*importing.origin, texts]).encode(), digest_size=16).hexdigest()
