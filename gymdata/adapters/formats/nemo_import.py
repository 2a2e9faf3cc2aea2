"""NeMo Gym rows as rows of the rollouts table, with their token evidence.

What always holds: ids and log-probabilities are taken over exactly, and a call without ids gives no turn; everything of
the source row that has no column is kept in ``extra``, token lists apart, so that the row can be written again; a row
that cannot be imported is named, and never hides another.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.adapters.formats import nemo_rows
from gymdata.adapters.formats.nemo_fix import walk, written_by_model
from gymdata.core.tokens import Call, TurnEncoder
from gymdata.errors import DataError
from gymdata.store.lines import iter_lines
from gymdata.store.paths import Source, resolve

_TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_ROLES = {"developer": "system"}
_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool", "function", "environment"})
#: Called with file, 1-based line, and why a row was left out.
Reject = Callable[[Path, int, str], None]


def read_nemo_gym(
    path: str | Path, *, run_id: str | None = None, reject: Reject | None = None
) -> Iterator[dict[str, Any]]:
    """The rollouts rows of NeMo Gym files: dicts as ``Run.append`` takes them, turns with numpy arrays.

    ``run_id`` defaults to a hash of the file names. Rows of one prompt (or of one ``task_id``) are a group. A log-prob
    that the source lacks is NaN. With ``reject`` bad rows are told to it and passed over; without it they raise DataError.
    """
    sources: list[Source] = resolve(str(path))
    names = "\n".join(str(s.path) for s in sources)
    run = run_id or "import-" + hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    seen: Counter[str] = Counter()
    for source in sources:
        for number, line in iter_lines(source):
            try:
                value, row = nemo_rows.load(line), nemo_rows.slow(line)
            except nemo_rows.BadRow as bad:
                if reject is None:
                    raise DataError.bad_row(source.path, number, None, bad.detail, "a NeMo Gym rollout") from bad
                reject(source.path, number, f"{bad.code}: {bad.detail}")
                continue
            group = row.group or f"row-{sum(seen.values())}"
            index = seen[group]
            seen[group] += 1
            yield _rollout(value, row, run, group, index)


def _rollout(value: dict[str, Any], row: nemo_rows.Row, run: str, group: str, index: int) -> dict[str, Any]:
    response = value["response"]
    params = value.get("responses_create_params")
    params = params if isinstance(params, dict) else {}
    encoder, turn_of = _turns(row, response)
    model = str(response.get("model") or params.get("model") or "unknown")
    status, why = _status(response)
    temperature = params.get("temperature")
    identity = json.dumps([run, group, index], ensure_ascii=False).encode()
    return {
        "rollout_id": row.rollout_id or hashlib.blake2b(identity, digest_size=16).hexdigest(),
        "run_id": run,
        "task_id": group,
        "group_id": group,
        "rollout_index": index,
        "policy": model,
        "policy_hash": f"served:{model}",
        "policy_version": 0,
        "status": status,
        "stop_reason": why,
        "finish_reason": encoder.turns[-1]["finish_reason"] if encoder.turns else None,
        "reward": row.reward,
        "rewards": [],
        "temperature": float(temperature) if isinstance(temperature, (int, float)) else 1.0,
        "n_turns": len(encoder.turns),
        "n_breaks": encoder.n_breaks,
        "n_context_tokens": encoder.n_context_tokens,
        "n_generated_tokens": encoder.n_generated_tokens,
        "messages": list(_messages(params.get("input"), response["output"], turn_of)),
        "tools": _json([_tool(t) for t in params.get("tools") or []]),
        "task": _json({k: v for k, v in value.items() if k not in ("response", "reward")}),
        "extra": _json({"nemo_gym": _without_tokens(value)}),
        "turns": encoder.turns,
        "started_at": _time(response.get("created_at")),
        "duration_s": 0.0,
    }


def _turns(row: nemo_rows.Row, response: Mapping[str, Any]) -> tuple[TurnEncoder, dict[int, int]]:
    """The encoded turns, and for each model call with ids the turn that it became."""
    encoder = TurnEncoder()
    turn_of: dict[int, int] = {}
    cut = _status(response)[0] == "truncated"
    for number, call in enumerate(row.calls):
        if call is None or not (call[0] and call[1]):
            continue
        prompt, generation = (np.frombuffer(part, np.int64).astype(np.int32) for part in call[:2])
        given = np.frombuffer(call[2] or b"", np.float64).astype(np.float32)
        log_probs = np.full(len(generation), np.nan, np.float32)
        # Too few or too many: which belongs to which token is not known, so none is.
        if len(given) == len(generation):
            log_probs = given
        turn_of[number] = len(encoder.turns)
        last = number == len(row.calls) - 1
        encoder.add(Call(prompt, generation, log_probs, "length" if last and cut else "stop"))
    return encoder, turn_of


def _status(response: Mapping[str, Any]) -> tuple[str, str | None]:
    details = response.get("incomplete_details")
    if response.get("status") == "incomplete" or details:
        reason = details.get("reason") if isinstance(details, dict) else None
        return "truncated", str(reason) if reason else "incomplete"
    return "completed", None


def _messages(given: Any, output: list[Any], turn_of: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    if isinstance(given, str):
        yield {"role": "user", "content": given}
    elif isinstance(given, list):
        yield from _merged(given, {})
    yield from _merged(output, turn_of)


def _merged(items: list[Any], turn_of: Mapping[int, int]) -> Iterator[dict[str, Any]]:
    """Items as messages; what one model call wrote is one message."""
    said: dict[str, Any] | None = None
    speaker = -1
    for call, item in walk(items):
        if written_by_model(item):
            if said is not None and call != speaker:
                yield _assistant(said)
                said = None
            if said is None:
                said, speaker = {"turn": turn_of.get(call), "content": [], "reasoning": [], "calls": []}, call
            _add(said, item)
            continue
        if said is not None:
            yield _assistant(said)
            said = None
        if item.get("type") == "function_call_output":
            yield {"role": "tool", "content": _text(item.get("output")), "tool_call_id": _name(item.get("call_id"))}
        else:
            role = str(item.get("role") or "other")
            role = _ROLES.get(role, role)
            message = {"role": role if role in _KNOWN_ROLES else "other", "content": _text(item.get("content"))}
            yield message | {k: item[k] for k in ("tool_call_id", "name") if isinstance(item.get(k), str)}
    if said is not None:
        yield _assistant(said)


def _add(said: dict[str, Any], item: Mapping[str, Any]) -> None:
    if item.get("type") == "reasoning":
        said["reasoning"].append(_text(item.get("summary") or item.get("content")))
    elif item.get("type") == "function_call":
        function = {"name": str(item.get("name")), "arguments": _arguments(item.get("arguments"))}
        said["calls"].append({"id": _name(item.get("call_id")), "type": "function", "function": function})
    else:
        said["content"].append(_text(item.get("content")))
        said["calls"] += [c for c in item.get("tool_calls") or [] if isinstance(c, dict)]


def _assistant(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "\n".join(said["content"]) if said["content"] else None,
        "reasoning": "\n".join(said["reasoning"]) if said["reasoning"] else None,
        "tool_calls": _json(said["calls"]) if said["calls"] else None,
        "turn": said["turn"],
    }


def _text(content: Any) -> str:
    """Content as text: parts are joined, what is no text is JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(p if isinstance(p, str) else str(p.get("text", p.get("refusal", ""))) for p in content if p)
    return _json(content)


def _arguments(value: Any) -> Any:
    """A call's arguments as an object where the text is one, else as they stand."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value


def _name(value: Any) -> str | None:
    return None if value is None else str(value)


def _tool(tool: Any) -> Any:
    """A Responses tool in the chat shape."""
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    return tool


def _without_tokens(value: Any) -> Any:
    """The row without token lists; which items had them is marked, so that they can be put back."""
    made = dict(value)
    made["response"] = {**value["response"], "output": _strip(value["response"]["output"])}
    return made


def _strip(items: list[Any]) -> list[Any]:
    stripped: list[Any] = []
    for item in items:
        if isinstance(item, list):
            stripped.append(_strip(item))
        elif any(isinstance(item.get(key), list) for key in _TOKEN_KEYS):
            kept = {k: v for k, v in item.items() if k not in _TOKEN_KEYS or not isinstance(v, list)}
            stripped.append(
                {**kept, "_token_ids": [k for k in item if isinstance(item.get(k), list) and k in _TOKEN_KEYS]}
            )
        else:
            stripped.append(item)
    return stripped


def _time(seconds: Any) -> datetime:
    known = isinstance(seconds, (int, float)) and 0 <= seconds < 2**34
    return datetime.fromtimestamp(seconds if known else 0, UTC)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
