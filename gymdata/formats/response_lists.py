"""Several responses to a prompt in one row, with or without scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymdata.errors import json_kind
from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, JsonObject, TableRow
from gymdata.formats.text.rows import answer, column, prompt_of, refuse_empty, rollout_row
from gymdata.formats.text.words import LABELS, named_scores, worth

_PROMPTS = ("prompt", "query", "question", "instruction")
_RESPONSES = ("responses", "generations", "outputs", "output")
#: Columns of numbers for the responses, the first is the reward; and how the entries of each are read.
_SCORES = {"scores": "score", "rewards": "score", "ratings": "score", "score": "score", "reward": "score"}
_SCORES |= dict.fromkeys(("labels", *LABELS), "label")


@FORMATS.register("response-lists")
class ResponseLists(Format):
    """A prompt (``prompt``, ``query``, ``question``, ``instruction``) with a list of ``responses`` (or ``generations``,
    ``outputs``, ``output``), and of ``scores`` (or ``rewards``, ``ratings``, ``score``, ``reward``, ``labels``, ``label``)
    for them, as RRHF, RLHFlow, AlpacaFarm and distilabel write them: a rollout per response, of the group of its prompt; its
    score is the reward. `gymdata pairs` makes pairs of the groups. Rationales, and which models the responses are of, are
    not read."""

    content = "lists of responses"
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        responses = next((row[name] for name in _RESPONSES if isinstance(row.get(name), list)), None)
        texts = responses and all(isinstance(text, str) for text in responses)
        return bool(texts) and any(isinstance(row.get(name), (str, list)) for name in _PROMPTS) and "chosen" not in row

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        for place, item in super().items(value):
            if not isinstance(item, dict):
                yield place, item
                continue
            names = (*_RESPONSES[:2], *_SCORES)
            lists = {k: v for k, v in item.items() if k in names or (k in _RESPONSES and isinstance(v, list))}
            responses = next((lists[name] for name in _RESPONSES if lists.get(name)), None)
            scores = {name: lists[name] for name in _SCORES if lists.get(name) is not None}
            if responses is None:
                yield place, BadItem("S103", "responses: missing")
            elif not isinstance(responses, list):
                yield place, BadItem("S102", f"responses: got {json_kind(responses)}, expected a list")
            elif odd := _unlike(item, scores, len(responses)):
                yield place, BadItem("S102", odd)
            else:
                about = {name: column for name, column in item.items() if name not in lists}
                for n, response in enumerate(responses):
                    scored = {name: numbers[n] for name, numbers in scores.items()}
                    yield place, about | {"response": response, "scored": scored}

    def row(self, item: Any, importing: Importing) -> TableRow:
        prompt, columns = prompt_of(item, column(item, *_PROMPTS))
        written = answer(item["response"], "response")
        numbers = {n: worth({_SCORES[n]: cell})[0] for n, cell in item["scored"].items()}
        refuse_empty(written, "response")
        return rollout_row(
            item,
            prompt,
            written,
            importing,
            reward=next((number for number in numbers.values() if number is not None), None),
            rewards=named_scores(numbers) if len(numbers) > 1 else {},
            texts=("response", "scored", *columns),
        )


def _unlike(item: JsonObject, scores: JsonObject, count: int) -> str:
    """What is wrong with the numbers of the responses, or with truth values of which it is not known what they say of
    them."""
    if odd := next((n for n, cells in scores.items() if not isinstance(cells, list) or len(cells) != count), ""):
        return f"{odd}: expected one for each of the {count} responses"
    unknown = (
        (n, cells) for n, cells in item.items() if isinstance(cells, list) and len(cells) == count and not scores
    )
    flags = next((n for n, cells in unknown if all(type(cell) is bool for cell in cells)), "")
    return (
        f"{flags}: got true or false for each response; name it where it is its label: --map label={flags}"
        if flags
        else ""
    )
