"""What TRL's online trainers log with ``log_completions``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import Importing, TableRow
from gymdata.formats.text.rows import answer, column, conversation, exchange, rollout_row
from gymdata.formats.text.words import named_scores
from gymdata.rollouts.truth import is_number

if TYPE_CHECKING:
    from gymdata.store.paths import Source

_COLUMNS = {"step", "prompt", "completion", "advantage"}


@FORMATS.register("trl-completions")
class TrlCompletions(Format):
    """TRL's ``completions_*.parquet``: ``step``, ``prompt``, ``completion``, a column per reward function, ``advantage``.
    All columns of numbers are named rewards; only where there is one is the total known. Text of a chat template is refused;
    whether a limit cut an answer is not in the file."""

    content = "completions that TRL logged"
    item = "a row of completions"
    holds_text = holds_reward = True
    keys = (_COLUMNS,)

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """Each row has all columns of numbers of its file: a function that does not apply to a row gave it NaN, which
        pandas writes as null."""
        import pyarrow as pa

        from gymdata.store.parquet import schema_of

        for source in sources:
            schema = schema_of(source.path) if source.kind == "parquet" else ()
            numbers = [f.name for f in schema if pa.types.is_floating(f.type) and f.name not in _COLUMNS]
            for _, line, value, text in super().documents([source]):
                row = dict.fromkeys(numbers, math.nan) | value if isinstance(value, dict) else value
                yield source, line, row, text

    def row(self, item: Any, importing: Importing) -> TableRow:
        prompt, completion = (item[column(item, name)] for name in ("prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            opening, written = exchange(prompt, completion, "prompt")
        else:
            opening, written = conversation(prompt, "prompt"), answer(completion, "completion")
        numbers = [name for name in item if name not in _COLUMNS and is_number(item[name])]
        rewards = named_scores(item, numbers)
        total = rewards.get(numbers[0]) if len(numbers) == 1 else None
        texts = ("completion", *numbers)
        return rollout_row(
            item, opening, written, importing, reward=total, rewards=rewards, texts=texts, about=("step", "advantage")
        )
