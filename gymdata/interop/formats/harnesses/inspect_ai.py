"""Logs of inspect_ai."""

from __future__ import annotations

from typing import Any

from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row
from gymdata.interop.words import named_scores
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.truth import is_number

#: inspect_ai's letters for correct, partial, incorrect and no answer, as its own ``value_to_float`` takes them.
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}


@FORMATS.register("inspect-ai")
class InspectAI(Format):
    """inspect_ai's log (``.eval`` or ``.json``): a rollout per sample. Scores are named rewards; where there is one scorer,
    it is the reward. A sample with an error has none; events are not read but for the definitions of tools."""

    content = "a log of inspect_ai"
    item = "a sample of inspect_ai"
    several = "samples"
    marks = (b'"eval"',)
    holds_text = holds_reward = True

    def recognise(self, value: Any) -> bool:
        is_log = (
            isinstance(value, dict) and isinstance(value.get("eval"), dict) and value.keys() >= {"version", "status"}
        )
        return is_log and isinstance(value.get("samples"), list) and bool(value["samples"])

    def item_of(self, part: Any, document: JsonObject) -> Any:
        return {"sample": part, "eval": document.get("eval")}

    def row(self, item: Any, importing: Importing) -> TableRow:
        sample, spec = item["sample"], item["eval"]
        failed = bool(sample.get("error"))
        scores = {name: score["value"] for name, score in (sample.get("scores") or {}).items()}
        scores = {name: _LETTERS.get(s, s) if isinstance(s, str) else s for name, s in scores.items()}
        nested = {f"{name}/{key}": part for name, s in scores.items() if isinstance(s, dict) for key, part in s.items()}
        rewards = {} if failed else named_scores({k: v for k, v in (scores | nested).items() if is_number(v)})
        calls = (event for event in sample.get("events") or () if event.get("event") == "model")
        offered = next((event.get("tools") for event in calls), None)
        tools = [{name: tool[name] for name in ("name", "description", "parameters")} for tool in offered or ()]
        messages = [_message(message, sample.get("attachments") or {}) for message in sample["messages"]]
        written = conversation(messages, "messages")
        ends = [choice.get("stop_reason") for choice in (sample.get("output") or {}).get("choices") or ()]
        texts = ("messages", "input", "output", "events", "timelines", "events_data", "attachments", "scores", "store")
        about = [name for name in sample if name not in ("id", "choices", "target", "metadata", *texts)]
        return rollout_row(
            sample | {"tools": tools},
            [],
            written,
            importing,
            reward=next(iter(rewards.values())) if len(scores) == 1 and rewards.keys() == scores.keys() else None,
            rewards=rewards,
            texts=texts,
            about=about,
            group=f"{spec.get('task')}-{sample['id']}",
            policy=spec.get("model"),
            truncated=ends[-1:] in (["max_tokens"], ["model_length"]),
        )


def _message(message: JsonObject, attachments: dict[str, str]) -> dict[str, Any]:
    """A message with its reasoning beside its text; an answer of the sample's input is not trained."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [
        part | {"text": attachments[part["text"].removeprefix("attachment://")]}
        if part["type"] == "text" and part["text"].startswith("attachment://")
        else part
        for part in parts
    ]
    chat_message = message | {"content": [part for part in texts if part["type"] != "reasoning"]}
    if thought := "".join(
        part["reasoning"] for part in parts if part["type"] == "reasoning" and not part.get("redacted")
    ):
        chat_message["reasoning"] = thought
    if message["role"] == "tool":
        chat_message["name"] = message.get("function")
    return chat_message | ({"weight": 0} if message["role"] == "assistant" and message.get("source") == "input" else {})
