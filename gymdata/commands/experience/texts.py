"""The texts behind saved experiences, read from the rollouts that they were made from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gymdata.errors import DataError, StoreError
from gymdata.rollouts.messages import joined_contents, json_text, loads, object_of, split_messages
from gymdata.rollouts.schema import EXPERIENCES, ROLLOUTS
from gymdata.store import scan_batches
from gymdata.store.lineage import refuse_replaced, rollouts_behind
from gymdata.store.paths import resolve

#: Rollouts that are read at a time, so that the first batch of experiences waits for few.
_BATCH_ROWS = 512
_COLUMNS = ("rollout_id", "messages", "n_turns", "task")


class _Texts(NamedTuple):
    prompts: str
    labels: str | None
    references: str | None


#: The fields of ``Experience`` that hold texts.
FIELDS = _Texts._fields


class RolloutTexts:
    """The texts of rollouts, for the fields ``names``: ``prompts``, the contents of the messages before the first
    generated one, joined by blank lines; ``labels`` and ``references``, the columns ``label`` and ``answer`` of the task.

    Rollouts are read in their order and no further than they are asked for. Those that are gone or overwritten have no
    texts.
    """

    def __init__(self, experiences: str | Path, names: Collection[str]) -> None:
        self.names = names
        self._unread = _read(experiences) if names else iter(())
        self._by_rollout: dict[str, _Texts] = {}
        self._distinct: dict[_Texts, _Texts] = {}

    def of(self, rollout_ids: Sequence[str]) -> dict[str, list[str | None] | None]:
        """The texts of the rollouts by field; None for a field where no rollout has one."""
        missing = set(rollout_ids) - self._by_rollout.keys()
        while missing and (rollouts := next(self._unread, None)) is not None:
            # Rollouts of a task have the same texts, which are held once.
            self._by_rollout |= {name: self._distinct.setdefault(texts, texts) for name, texts in rollouts.items()}
            missing -= rollouts.keys()
        texts = [self._by_rollout.get(rollout_id) for rollout_id in rollout_ids]
        fields = {name: [getattr(row, name, None) for row in texts] for name in self.names}
        return {name: values if any(value is not None for value in values) else None for name, values in fields.items()}


def _read(experiences: str | Path) -> Iterator[dict[str, _Texts]]:
    behind = dict[str | Path, None]()
    for file in resolve(experiences, EXPERIENCES):
        try:
            refuse_replaced(file.path)
        except (DataError, StoreError):
            continue
        behind |= dict.fromkeys(rollouts_behind(file.path))
    for path in behind:
        try:
            for batch in scan_batches(path, ROLLOUTS, _COLUMNS, _BATCH_ROWS):
                ids, messages, n_turns, tasks = (batch.column(name) for name in _COLUMNS)
                prompts = joined_contents(split_messages(messages, n_turns.to_numpy())[0])
                answers = (
                    (row.get("label"), row.get("answer")) for row in map(object_of, map(loads, tasks.to_pylist()))
                )
                texts = (
                    [value if value is None or isinstance(value, str) else json_text(value) for value in pair]
                    for pair in answers
                )
                rows = zip(ids.to_pylist(), prompts.to_pylist(), texts, strict=True)
                yield {rollout_id: _Texts(prompt, *task) for rollout_id, prompt, task in rows}
        except (DataError, StoreError):
            continue  # a model or a table of scores, or rollouts that are gone
