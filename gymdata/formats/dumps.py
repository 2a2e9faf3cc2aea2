"""Text that verl, SkyRL and TRL write of their rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gymdata.errors import json_kind
from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.text.rows import answer, column, conversation, exchange, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import JsonObject
from gymdata.rollouts.truth import is_number

if TYPE_CHECKING:
    from gymdata.store.paths import Source

#: Columns of TRL's file besides those of its reward functions.
_OF_TRL = {"step", "prompt", "completion", "advantage"}


@FORMATS.register("verl-dump")
class VerlDump(Format):
    """verl's ``rollout_data_dir`` and ``validation_data_dir``: ``input``, ``output``, ``score``, ``step``, the ground truth
    ``gts``, and what its reward function returned, of which numbers are named rewards. Plain prompts with their answers are
    read: the text of a chat template is refused. A limit that cut an answer is not named."""

    content = "rollouts that verl dumped"
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        return row.keys() >= {"input", "output", "score", "step"} and isinstance(row["input"], str)

    def row(self, item: Any, importing: Importing) -> TableRow:
        columns = ("input", "output", "score", "gts", "step")
        numbers = [name for name in item if name not in columns and is_number(item[name])]
        about = [name for name in item if name not in (*columns[:4], *numbers)]
        row = item | ({"ground_truth": item["gts"]} if item.get("gts") is not None else {})
        return _row(
            row,
            ("input", "output"),
            importing,
            rewards=named_scores(item, numbers),
            texts=("gts", *numbers),
            about=about,
        )


@FORMATS.register("skyrl-dump")
class SkyRLDump(Format):
    """SkyRL's dumps of an evaluation: ``input_prompt``, ``output_response``, ``score`` (a list is summed, as SkyRL does),
    ``stop_reason``, ``env_class``, ``env_extras``, ``data_source``. Plain prompts with their answers are read: the text of a
    chat template is refused."""

    content = "rollouts that SkyRL dumped"
    holds_text = holds_reward = True
    keys = ({"input_prompt", "output_response", "score"},)

    def row(self, item: Any, importing: Importing) -> TableRow:
        about = ("stop_reason", "exception_type", "error_treatment", "env_metrics")
        return _row(item, ("input_prompt", "output_response"), importing, about=about)


def _row(item: JsonObject, names: tuple[str, str], importing: Importing, **more: Any) -> TableRow:
    """The row of a prompt and an output (``names``), both text, with a ``score``."""
    prompt, output = (item[name] for name in names)
    if other := next((name for name in names if not isinstance(item[name], str)), None):
        raise BadItem("S102", f"{other}: got {json_kind(item[other])}, expected text")
    scores = item["score"] if isinstance(item["score"], list) else [item["score"]]
    numbers = [number for part in scores if (number := score(part, "score")) is not None]
    if len(numbers) < len(scores) and item["score"] is not None:
        raise BadItem.value("score", item["score"], "a number")
    reward = sum(numbers) if numbers else None
    opening, written = exchange(prompt, output, names[0])
    texts = (*names, "score", *more.pop("texts", ()))
    cut = item.get("stop_reason") == "length"
    return rollout_row(item, opening, written, importing, reward=reward, texts=texts, truncated=cut, **more)


@FORMATS.register("trl-completions")
class TrlCompletions(Format):
    """TRL's ``completions_*.parquet``: ``step``, ``prompt``, ``completion``, a column per reward function, ``advantage``.
    All columns of numbers are named rewards; only where there is one is the total known. Text of a chat template is refused;
    whether a limit cut an answer is not in the file."""

    content = "completions that TRL logged"
    holds_text = holds_reward = True
    keys = (_OF_TRL,)

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """Each row has all columns of numbers of its file: a function that does not apply to a row gave it NaN, which
        pandas writes as null."""
        import pyarrow as pa

        from gymdata.store.parquet import schema_of

        for source in sources:
            schema = schema_of(source.path) if source.kind == "parquet" else ()
            numbers = [f.name for f in schema if pa.types.is_floating(f.type) and f.name not in _OF_TRL]
            for _, line, value, text in super().documents([source]):
                row = dict.fromkeys(numbers, math.nan) | value if isinstance(value, dict) else value
                yield source, line, row, text

    def row(self, item: Any, importing: Importing) -> TableRow:
        prompt, completion = (item[column(item, name)] for name in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            opening, written = exchange(prompt, completion, "prompt")
        else:
            opening, written = conversation(prompt, "prompt"), answer(completion, "completion")
        numbers = [name for name in item if name not in _OF_TRL and is_number(item[name])]
        rewards = named_scores(item, numbers)
        total = rewards.get(numbers[0]) if len(numbers) == 1 else None
        texts = ("completion", *numbers)
        return rollout_row(
            item, opening, written, importing, reward=total, rewards=rewards, texts=texts, about=("step", "advantage")
        )
