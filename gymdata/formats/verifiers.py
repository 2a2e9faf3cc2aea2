"""Rollouts of verifiers and prime-rl: results, and traces from version 1 of its interface on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, JsonObject, TableRow, has_content
from gymdata.formats.conversion.models import Int32, Model, Number, Sampled, Several, read, turns_of
from gymdata.formats.text.rows import answer, column, conversation, first_row, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import Message
from gymdata.rollouts.truth import truth

#: Columns of the rollout, which are no fields of its task.
_ABOUT = (
    *("error", "error_chain", "long_error_chain", "is_completed", "is_truncated", "stop_condition"),
    *("metrics", "timing", "generation_ms", "scoring_ms", "total_ms", "token_usage", "advantage"),
)
_ABOUT_TRACES = (
    *("ok", "is_completed", "is_timeout", "stop_condition", "errors"),
    *("metrics", "info", "timing", "verifiers"),
)
_LOST = ("trajectory", "reward", "completion", "tool_defs")


@FORMATS.register("verifiers")
class Verifiers(Format):
    """``results.jsonl`` of verifiers and rollouts of prime-rl: ``prompt`` and ``completion`` (messages or text), ``reward``,
    ``metrics`` as named rewards. Ids and log-probabilities of a ``trajectory`` are not read."""

    content = "rollouts of verifiers"
    holds_text = holds_reward = True
    keys = ({"example_id", "prompt", "completion", "reward"},)

    def row(self, item: Any, importing: Importing) -> TableRow:
        reward = score(item["reward"], "reward")
        if reward is None and item["reward"] is not None:
            raise BadItem.value("reward", item["reward"], "a number")
        importing.count_unread(item, "trajectory", "tokens", "prompt_ids")
        metrics = item.get("metrics")
        if not isinstance(metrics, dict):
            # Earlier versions have them beside the other columns.
            not_metrics = {"example_id", "reward", *_ABOUT}
            metrics = {name: value for name, value in item.items() if type(value) is float and name not in not_metrics}
        return rollout_row(
            item if item.get("tools") else item | {"tools": item.get("tool_defs")},
            _messages(item[column(item, "prompt")], "prompt", "user"),
            _messages(item[column(item, "completion")], "completion", "assistant"),
            importing,
            reward=reward,
            rewards=named_scores(metrics),
            texts=(*_LOST, *metrics),
            about=_ABOUT,
            truncated=truth(item.get("is_truncated")) is True,
            group="-".join(
                str(item[name]) for name in ("env_id", "task", "example_id") if isinstance(item.get(name), (str, int))
            ),
        )


def _messages(value: Any, where: str, speaker: str) -> list[Message]:
    """Messages of a prompt or a completion; text, also as messages of the role ``text``, is the speaker's."""
    if isinstance(value, list):
        texts = [isinstance(message, dict) and message.get("role") == "text" for message in value]
        value = [m | {"role": speaker} if text else m for m, text in zip(value, texts, strict=True)]
    return answer(value, where) if speaker == "assistant" and isinstance(value, str) else conversation(value, where)


#: Log-probabilities that do not all have four decimals by chance.
_ENOUGH = 4


class Term(Model):
    score: Number | bool
    weight: Number | bool = 1.0


class Scored(Model):
    #: A term that is null was not scored.
    rewards: dict[str, Term | None]


class Node(Model):
    sampled: Any = None
    token_ids: Several[Int32]
    mask: Several[bool]
    logprobs: Several[Number]


@FORMATS.register("verifiers-traces")
class VerifiersTraces(Format):
    """``traces.jsonl`` of verifiers and prime-rl (episodes, or traces alone): the messages of ``nodes``, ``rewards`` with
    their weights, ``metrics``; ``token_ids``, ``mask`` and ``logprobs`` of the nodes, where a training's client wrote them.
    verifiers 0.4 rounds log-probabilities to four decimals, which is counted. A trace with several branches, or of an agent
    that is not trained, is refused. What the trainer put there (``advantages``, ``reference_logprobs``, ``loss_weights``)
    is not read."""

    content = "traces of verifiers"
    several = "traces"
    holds_text = holds_ids = holds_logprobs = holds_reward = True

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
        chat = conversation(messages, "nodes")
        read_nodes = [read(Node, node) for node in nodes]
        log_probs = [number for node in read_nodes for number in node.logprobs]
        is_rounded = len(log_probs) >= _ENOUGH and all(round(number, 4) == number for number in log_probs)
        importing.unread["log-probabilities beyond the fourth decimal, which the file rounds,"] += is_rounded
        calls = _calls(read_nodes, chat)
        offered = item.get("tools") or nodes[0].get("tools") or ()  # the first node has them from verifiers 0.4 on
        tools = [{k: t[k] for k in ("name", "description", "parameters") if k in t} for t in offered]
        terms = read(Scored, {"rewards": item.get("rewards") or {}}).rewards
        scored = {name: term for name, term in terms.items() if term is not None}
        is_whole = bool(scored) and len(scored) == len(terms)
        total = sum(term.score * term.weight for term in scored.values()) if is_whole else None
        named = {name: term.score for name, term in scored.items()} | (item.get("metrics") or {})
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
                **{name: item[name] for name in _ABOUT_TRACES if name in item},
            },
            [],
            chat,
            importing,
            reward=total,
            rewards=named_scores(named),
            about=(*_ABOUT_TRACES, "trace_id"),
            group=group,
            policy=model,
            turns=turns_of(calls, importing, "nodes"),
            known_as=item.get("id") or item,
        )


def _calls(nodes: Sequence[Node], messages: Sequence[Message]) -> list[Sampled]:
    """The model calls of a conversation: what a node adds is the generation prompt, and then what was sampled. Raises
    BadItem for a mask that is otherwise, with its first position, and for a message without ids that the model read.

    Where the client did not part a prompt by its messages, none of these has ids, and all are on the answer's node."""
    calls, before = list[Sampled](), list[int]()
    is_parted = any(node.token_ids and truth(node.sampled) is not True for node in nodes)
    lost: int | None = None  # the first message since the last answer that has no ids
    for n, (node, message) in enumerate(zip(nodes, messages, strict=True)):
        if len(node.mask) != len(node.token_ids):
            raise BadItem(
                "L301", f"nodes[{n}].mask: got {len(node.mask)}, expected {len(node.token_ids)}, one per token"
            )
        first = node.mask.index(True) if True in node.mask else len(node.mask)
        if True in node.mask and truth(node.sampled) is not True:
            raise BadItem("S102", f"nodes[{n}].mask[{first}]: got true in a message that was not sampled")
        if False in node.mask[first:]:
            raise BadItem("S102", f"nodes[{n}].mask[{node.mask.index(False, first)}]: got false after a sampled token")
        if truth(node.sampled) is not True:
            if lost is None and not node.token_ids and has_content(message):
                lost = n
        else:
            if lost is not None and node.token_ids and (is_parted or not first):
                raise BadItem("T205", f"nodes[{lost}].token_ids: missing in a message that the call of nodes[{n}] read")
            lost = None
            prompt = [*before, *node.token_ids[:first]] if node.token_ids else []
            calls.append(Sampled(f"nodes[{n}]", prompt, node.token_ids[first:], node.logprobs or None, message))
        before += node.token_ids
    return calls
