"""Several responses to a prompt in one row, with or without scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.errors import json_kind
from gymdata.interop.formats import FORMATS, Format, Place
from gymdata.interop.formats.published._compared import finite
from gymdata.interop.formats.trl import BESIDE
from gymdata.interop.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.interop.text_rows import answer, column, conversation, in_context, instruction, refuse_empty, rollout_row

_PROMPTS = ("prompt", "query", "question", "instruction")
_RESPONSES = ("responses", "generations", "outputs", "output")
_SCORES = ("scores", "rewards", "ratings")


@FORMATS.register("response-lists")
class ResponseLists(Format):
    """A prompt (``prompt``, ``query``, ``question``, ``instruction``) with a list of ``responses`` (or ``generations``,
    ``outputs``, ``output``), and of ``scores`` (or ``rewards``, ``ratings``) for them, as RRHF, RLHFlow, AlpacaFarm and
    distilabel write them: a rollout per response, of the group of its prompt; its score is the reward. `gymdata pairs` makes
    pairs of the groups. Rationales, and which models the responses are of, are not read."""

    content = "lists of responses"
    item = "a response"
    marks = (b'"responses"', b'"generations"', b'"outputs"', b'"output"')
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        responses = next((row[name] for name in _RESPONSES if isinstance(row.get(name), list)), None)
        texts = responses and all(isinstance(text, str) for text in responses)
        return bool(texts) and any(isinstance(row.get(name), (str, list)) for name in _PROMPTS) and "chosen" not in row

    def items(self, value: Any) -> Iterator[tuple[Place, Any]]:
        for (_, number), item in super().items(value):
            if not isinstance(item, dict):
                yield (0, number), item
                continue
            names = (*_RESPONSES[:2], *_SCORES)
            lists = {k: v for k, v in item.items() if k in names or (k in _RESPONSES and isinstance(v, list))}
            responses = next((lists[name] for name in _RESPONSES if lists.get(name)), None)
            scores = next((lists[name] for name in _SCORES if lists.get(name) is not None), None)
            if responses is None:
                yield (0, number), BadItem("S103", "responses: missing")
            elif not isinstance(responses, list):
                yield (0, number), BadItem("S102", f"responses: got {json_kind(responses)}, expected a list")
            elif scores is not None and (not isinstance(scores, list) or len(scores) != len(responses)):
                yield (0, number), BadItem("S102", f"scores: expected one for each of the {len(responses)} responses")
            else:
                about = {name: column for name, column in item.items() if name not in lists}
                for n, (response, score) in enumerate(zip(responses, scores or [None] * len(responses), strict=True)):
                    yield (n, number), about | {"response": response, "score": score}

    def row(self, item: Any, importing: Importing) -> TableRow:
        name = column(item, *_PROMPTS)
        prompt = conversation(instruction(item) if name == "instruction" else item[name], name)
        written = answer(item["response"], "response")
        refuse_empty(written, "response")
        return rollout_row(
            item,
            in_context(item, prompt),
            written,
            importing,
            reward=None if item["score"] is None else finite(item, "score"),
            texts=(name, "input", "context", "response", "score", *BESIDE),
        )
