"""Names of the columns that data has for a prompt and its answer, and ``FIELD=COLUMN``: one list for tasks and for answers
that are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import pydantic

from gymdata.rollouts.messages import field_at

#: Columns of published datasets besides ``prompt``, ``messages`` and ``answer``, most telling first.
PROMPTS = ("question", "problem", "instruction", "query", "input")
CONVERSATIONS = ("conversations", "conversation")
ANSWERS = ("solution", "target", "output", "expected_answer", "ground_truth", "response", "completion")
#: The fields of ``--map`` for tasks, and for answers and preferences.
TASK_FIELDS = ("prompt", "messages", "answer", "system", "tools", "task_id")
TEXT_FIELDS = ("prompt", "messages", "answer", "chosen", "rejected", "label", "reward", "system", "tools")
_KNOWN = {*PROMPTS, *CONVERSATIONS, *ANSWERS, *TEXT_FIELDS, "system_prompt", "kto_tag", "score", "rewards", "margin"}


def lower_case(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """``row`` with the columns that are known but for their case, and spaces around them, under their known names; the same
    object where it has none."""
    names = {name: name.strip().lower() for name in row if isinstance(name, str) and name not in _KNOWN}
    names = {name: known for name, known in names.items() if known in _KNOWN and known not in row}
    return {names.get(name, name): value for name, value in row.items()} if names else row


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """``lower_case`` of ``row`` with the columns that ``columns`` (field → column, a dotted name reaches into one) names
    under the names of their fields; an answer is its ``completion``, for an ``answer`` may be a reference beside one."""
    if columns:
        values = {"completion" if f == "answer" else f: field_at(row, column) for f, column in columns.items()}
        rest = {name: value for name, value in row.items() if name not in columns.values()}
        row = rest | {field: value for field, value in values.items() if value is not None}
    return lower_case(row)


def columns_of(texts: Sequence[str]) -> dict[str, str]:
    """Field → column of texts ``FIELD=COLUMN``."""
    pairs = (text.partition("=") for text in texts)
    return {name.strip(): column.strip() for name, _, column in pairs}


def fields_in(fields: Sequence[str]) -> Callable[[Any], list[str]]:
    """A validator of ``map``, as a list of ``FIELD=COLUMN`` or a mapping. Raises ValueError."""

    def checked(columns: Any) -> list[str]:
        texts = [f"{k}={v}" for k, v in columns.items()] if isinstance(columns, Mapping) else columns
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"FIELD=COLUMN, where FIELD is one of {', '.join(fields)}")
        for text in texts:
            ((name, column),) = columns_of([text]).items()
            if name not in fields or not column or len(columns_of(texts)) < len(texts):
                raise ValueError(f"FIELD=COLUMN, each FIELD once, one of {', '.join(fields)}; not {text!r}")
        return list(texts)

    return checked


#: ``map`` and ``test_share`` of files of text, of `import` and of training.
TextColumns = Annotated[
    list[str],
    pydantic.Field(
        default_factory=list,
        description="Column that a field of text is read from, such as prompt=question; repeatable. Fields: "
        f"{', '.join(TEXT_FIELDS)}.",
    ),
    pydantic.BeforeValidator(fields_in(TEXT_FIELDS)),
]
TestShare = Annotated[
    float | None,
    pydantic.Field(
        gt=0.0,
        lt=1.0,
        description="Share of the tasks to hold out: also write split/train.parquet and test.parquet (in the output, or in "
        "OUTPUT/data of a training from text).",
    ),
]
