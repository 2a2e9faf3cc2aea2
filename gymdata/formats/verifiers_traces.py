"""Traces of verifiers from version 1 of its interface on."""

from __future__ import annotations

from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.formats.text.rows import conversation, first_row, rollout_row
from gymdata.formats.text.words import named_scores
from gymdata.rollouts.truth import truth

_ABOUT = ("ok", "is_completed", "is_timeout", "stop_condition", "errors", "metrics", "info", "timing", "verifiers")


@FORMATS.register("verifiers-traces")
class VerifiersTraces(Format):
    """``traces.jsonl`` of verifiers (episodes) and prime-rl (traces): the messages of ``nodes``, ``rewards`` with their
    weights, ``metrics``. Ids and log-probabilities, which the file rounds, are not read; a trace with several branches,
    or of an agent that is not trained, is refused."""

    content = "traces of verifiers"
    item = "a trace of verifiers"
    several = "traces"
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        trace = first_row(row["traces"]) if "traces" in row else row
        return trace.keys() >= {"nodes", "task", "agent"} and isinstance(trace["nodes"], list)

    def row(self, item: Any, importing: Importing) -> TableRow:
        nodes, agent, task = item["nodes"], item["agent"], item["task"]
        if truth(agent.get("trainable")) is False:
            raise BadItem("S103", f"agent.trainable: the agent {agent.get('name')!r} is not trained")
        if not nodes or [node.get("parent") for node in nodes] != [None, *range(len(nodes) - 1)]:
            raise BadItem(
                "S102", f"nodes: got {len(nodes)} that are not one conversation, but several branches or none"
            )
        input_flags = [
            node["message"]["role"] == "assistant" and truth(node.get("sampled")) is not True for node in nodes
        ]
        messages = [n["message"] | ({"weight": 0} if flag else {}) for n, flag in zip(nodes, input_flags, strict=True)]
        tools = [{k: t[k] for k in ("name", "description", "parameters") if k in t} for t in item.get("tools") or ()]
        terms = item.get("rewards") or {}
        is_scored = all(isinstance(reward, dict) for reward in terms.values())
        scores = {name: reward["score"] for name, reward in terms.items()} if is_scored else {}
        total = sum(reward["score"] * reward.get("weight", 1.0) for reward in terms.values()) if scores else None
        named = scores | (item.get("metrics") or {} if is_scored else {})
        group = task.get("key") or task.get("hash")
        if group is not None and not isinstance(group, str):
            raise BadItem.value("task.key", group, "text")
        model = next((call.get("model") for call in item.get("calls") or ()), None)
        data = task["data"] if isinstance(task.get("data"), dict) else {}
        return rollout_row(
            {
                **data,
                "tools": tools,
                "trace_id": item.get("id"),
                **{name: item[name] for name in _ABOUT if name in item},
            },
            [],
            conversation(messages, "nodes"),
            importing,
            reward=total,
            rewards=named_scores(named),
            about=(*_ABOUT, "trace_id"),
            group=group,
            policy=model,
        )
