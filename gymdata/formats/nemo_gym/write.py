"""Rollouts as NeMo Gym rows, with whole prompts on the item that ends each model call.

Invariants: ids, log-probabilities, rewards, texts and failures read back as they were; turns that no message names are
counted, never dropped in silence; a rollout that is not to be trained is masked.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gymdata.formats.conversion.models import shortest
from gymdata.formats.nemo_gym.cut import RENDERED
from gymdata.formats.nemo_gym.read import RESPONSE
from gymdata.rollouts.failures import FAILURE, UNSCORED, failure_of
from gymdata.rollouts.messages import (
    GENERATION,
    LOG_PROBS,
    PROMPT,
    JsonObject,
    Message,
    RolloutRow,
    items_of,
    loads,
    messages_of,
    object_of,
    response_tools,
    with_call_ids,
)
from gymdata.rollouts.turns import prompts_of

#: Columns that a NeMo Gym row has no place for; they go into its object "gymdata".
_OWN = (
    *("run_id", "task_id", "group_id", "rollout_index", "policy", "policy_hash", "policy_version"),
    *("status", "stop_reason", "duration_s"),
)

#: Fields of a function among the tools of a request, of which NeMo Gym's model allows no others and needs the last two.
_FUNCTION = ("type", "name", "description", "parameters", "strict")
#: Reasons of a stop that cut the last generation itself, which have one name in the Responses shape.
_CUT = ("max_output_tokens", "max_tokens", "max_context", "length", "repetition")


def nemo_gym_row(row: RolloutRow) -> tuple[JsonObject, Collection[int]]:
    """The NeMo Gym row of a rollouts row (as ``store.columns.to_rows`` gives it), with arrays as its token lists, and the
    turns that its items hold. Raises DataError for turns that were changed after collection."""
    task, extra = object_of(loads(row["task"])), object_of(loads(row["extra"]))
    unscored = object_of(extra.pop(UNSCORED, None)) if row["reward"] is None else {}
    asked = object_of(task.get("responses_create_params"))
    messages = with_call_ids(row["messages"])
    first = _first_answer(messages, asked)
    output, placed = _output(messages[first:], first, row)
    params = _request(row, messages[:first], asked)
    kept = {k: v for k, v in object_of(extra.pop(RESPONSE, None)).items() if k != "output"}
    written: JsonObject = {
        "responses_create_params": params,
        "response": _response(row, output, params) | ({} if "fixed" in extra else kept),
        "reward": unscored.get("reward") if row["reward"] is None else row["reward"],
    }
    # Fields that an imported row has besides these, and those of a resource server's /verify besides the reward.
    written |= {k: v for k, v in task.items() if k not in written and k != "gymdata"}
    written |= {k: v for k, v in object_of(extra.pop("environment", None)).items() if k not in written}
    written |= {name: row[name] for name in ("rollout_id", "task_id", "group_id")}
    if FAILURE in extra and failure_of("nemo-gym", written) is None:
        written["mask_sample"] = True
    own = {name: row[name] for name in _OWN} | {"rewards": row["rewards"] or unscored.get("rewards") or {}}
    own |= {"tools": loads(row["tools"])}
    hidden = {k: v for k, v in task.items() if k in written and k != "responses_create_params" and written[k] != v}
    own |= {k: v for k, v in (("extra", extra), ("task", hidden)) if v}
    return written | {"gymdata": own}, placed


def _first_answer(messages: Sequence[Message], asked: JsonObject) -> int:
    """Where the output begins: behind the input of an imported row, else at the first answer that is a turn, else at the
    first."""
    given = list(messages_of(asked.get("input"), (), {}))
    if given and [(m["role"], m.get("content")) for m in given] == [
        (m["role"], m["content"]) for m in messages[: len(given)]
    ]:
        return len(given)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [i for i in answers if messages[i].get("turn") is not None]
    return next(iter(turns or answers), len(messages))


def _output(messages: Sequence[Message], first: int, row: RolloutRow) -> tuple[list[JsonObject], set[int]]:
    """The items of ``messages``, with the lists of each turn on the item that ends it, and these turns."""
    turns, prompts = row["turns"], prompts_of(row)
    output: list[JsonObject] = []
    placed: set[int] = set()
    for number, message in enumerate(messages, first):
        *others, (turn_index, last) = items_of([message], number)
        items = [item for _, item in others] + [last]
        if turn_index is not None and 0 <= turn_index < len(turns) and turn_index not in placed:
            placed.add(turn_index)
            turn = turns[turn_index]
            last |= {PROMPT: prompts[turn_index], GENERATION: turn["generation_token_ids"]}
            last |= {RENDERED: True} if turn.get("rendered") else {LOG_PROBS: turn["generation_log_probs"]}
        elif (
            items[0]["type"] == "function_call" and output and output[-1]["type"] == "message" and PROMPT in output[-1]
        ):
            # Calls that follow a message with ids are read as its calls; these are of another message, without ids.
            output += [item for _, item in items_of([{"role": "assistant"}], number)]
        output += items
    return output, placed


def _request(row: RolloutRow, messages: Sequence[Message], asked: JsonObject) -> JsonObject:
    tools = [
        {"parameters": {}, "strict": False, **{k: tool[k] for k in _FUNCTION if k in tool}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in response_tools(loads(row["tools"]))
    ]
    items = [item for _, item in items_of(messages)]
    return {**asked, "input": items, "tools": tools, "temperature": shortest(row["temperature"])}


def _response(row: RolloutRow, output: list[JsonObject], params: JsonObject) -> JsonObject:
    truncated = row["status"] == "truncated"
    return {
        "id": f"resp_{row['rollout_id']}",
        "created_at": row["started_at"].timestamp(),
        "model": row["policy"],
        "object": "response",
        "output": output,
        # NeMo Gym's own model of a response needs these three.
        "tools": params["tools"],
        "tool_choice": params.get("tool_choice") or "auto",
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated and row["stop_reason"] in _CUT else None,
    }
