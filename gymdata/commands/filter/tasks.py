"""Fields of the tasks of rollouts as columns: ``task.FIELD``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import UsageError, json_kind
from gymdata.rollouts.messages import field_at, object_of
from gymdata.store.lines import decode


class Tasks:
    """Fields of the tasks' rows, inner ones by dotted path. Each task is decoded once, not once for each of its rollouts."""

    def __init__(self, texts: Iterable[pa.Array]) -> None:
        """``texts``: the JSON of each rollout's task, in chunks."""
        encoded = pa.chunked_array([pc.fill_null(chunk, "").dictionary_encode() for chunk in texts]).combine_chunks()
        distinct = encoded.dictionary.to_pylist()
        self._rows = [object_of(decode(text.encode(), exact=True) if text else None) for text in distinct]
        self._indices = encoded.indices
        self.names = {path for row in self._rows for path in _paths(row)}

    def column(self, path: str, where: str) -> pa.Array:
        """A field's values. Raises UsageError where it is no single value, or numbers that cannot be compared."""
        values = [field_at(row, path) for row in self._rows]
        types = {type(value) for value in values if value is not None}
        if not (types <= {int, float} or types in ({bool}, {str})):
            met = ", ".join(sorted({json_kind(value) for value in values if value is not None}))
            raise UsageError.bad_value(where, f"task.{path}", f"a field with one kind of value; tasks have {met}")
        try:
            return pa.array(values, None if types else pa.string(), from_pandas=True).take(self._indices)
        except (pa.ArrowInvalid, OverflowError) as error:
            expected = "integers of at most 64 bits, or of 53 beside fractions"
            raise UsageError.bad_value(where, f"task.{path}", f"{expected} ({error})") from error


def _paths(row: Mapping[str, Any], before: str = "") -> Iterable[str]:
    for key, value in row.items():
        yield before + key
        if isinstance(value, dict):
            yield from _paths(value, f"{before}{key}.")
