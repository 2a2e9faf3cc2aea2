"""A refusal is at most 300 characters with its hint, however many names or long a value it is about."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gymdata
from gymdata.commands.record.request import RequestError
from gymdata.commands.view.answers import Missing
from gymdata.errors import DataError, GymdataError, OutsideError, RewardError, UsageError
from gymdata.texts import abridged
from gymdata.workers.serving import Refused


def _kinds(kind: type[GymdataError]) -> Iterator[type[GymdataError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__.startswith("gymdata."):
            yield from _kinds(below)


MANY = [f"column_number_{n}" for n in range(60)]
LONG = "x" * 5_000


@pytest.mark.parametrize(
    "error",
    [
        UsageError.unknown_key("wrong", MANY, "sft.yaml"),
        UsageError.unknown_key(LONG, MANY, "sft.yaml"),
        UsageError.unknown_key("wrong", MANY, "sft.yaml", dict.fromkeys(MANY)),
        UsageError.unknown_choice("--from", "wrong", MANY),
        UsageError.bad_value("--reward", LONG, "a number"),
        UsageError.bad_value("--reward", MANY, "a number"),
        DataError.missing_columns("a.parquet", "rollouts", MANY, MANY),
    ],
)
def test_a_refusal_about_many_names_or_a_long_value_is_short(error: GymdataError) -> None:
    assert len(str(error)) <= 300


@pytest.mark.parametrize("read", [gymdata.validate, lambda file: gymdata.import_rollouts(file, file.parent / "run")])
def test_rows_of_many_columns_are_refused_in_short(read: Callable[[Path], object], tmp_path: Path) -> None:
    """The path aside, which is as long as it is."""
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(dict.fromkeys(MANY, 1)) + "\n")
    with pytest.raises(DataError) as refused:
        read(file)
    assert len(str(refused.value).replace(str(tmp_path), "")) <= 300
    assert "column_number_0" in str(refused.value)


@pytest.mark.parametrize("long", [LONG, "x " * 2_500, f"{MANY}", "`x x`" * 900, "a/b" * 900, "/a " * 900, "é\n" * 900])
@pytest.mark.parametrize("kind", [kind for kind in _kinds(GymdataError) if kind.__module__ == GymdataError.__module__])
def test_no_error_of_any_kind_is_longer_whatever_it_is_made_of(kind: type[GymdataError], long: str) -> None:
    """Programs read all of it in ``message``; people its beginning, its end and the paths that it names."""
    system = ("engine",) if issubclass(kind, OutsideError) and kind is not RewardError else ()
    for hint in (None, "add it", f"give /b.yaml {long} in `one`"):
        error = kind(
            *system, f"/runs/a.jsonl, line 7: got {long} where /runs/b.jsonl has {long}, expected text", hint=hint
        )
        shown, _, advice = str(error).partition("\n  → ")
        assert len(str(error)) <= 300
        assert "/runs/a.jsonl, line 7:" in shown
        assert shown.endswith("expected text")
        assert hint is None or (advice[:3] == hint[:3] and advice[-3:] == hint[-3:])
        assert long in error.message


def test_errors_of_every_part_are_shown_alike() -> None:
    """Whoever derives from an error has its bound."""
    shown = {GymdataError.shown, UsageError.shown}
    assert [kind for kind in _kinds(GymdataError) if kind.__str__ is not GymdataError.__str__] == []
    assert [kind for kind in _kinds(GymdataError) if kind.shown not in shown] == []


def test_a_long_path_is_whole_and_not_counted() -> None:
    path = f"/{'folder/' * 40}a.jsonl"
    error = DataError(f"{path}: {' '.join(MANY)}", hint=f"`gymdata import {path} -o RUN` reads it")
    assert str(error).count(path) == 2
    assert len(str(error).replace(path, "")) <= 300


def test_several_errors_are_counted_and_those_of_a_listing_all_shown() -> None:
    faults = [UsageError(f"a.yaml: {name} is missing", hint=f"add {name}: …") for name in MANY]
    short, listed = UsageError.several(faults), UsageError.several(faults, listed=True)
    assert len(str(short)) <= 300
    assert str(short).startswith("60 errors:\n- a.yaml: column_number_0 is missing\n- ")
    assert re.search(r"\n- and 5\d more$", str(short))
    assert all(f"- {fault}" in str(listed) for fault in faults)
    assert str(UsageError.several(faults[:2])) == f"2 errors:\n- {faults[0]}\n- {faults[1]}"
    assert short.faults == listed.faults == tuple(faults)


@pytest.mark.parametrize("long", [LONG, ", ".join(MANY)])
def test_answers_that_refuse_a_request_are_short(long: str) -> None:
    refused = Refused(422, {"detail": f"the body: {long}", "kind": "not_json"})
    assert len(refused.body["detail"]) <= 300
    for answer in (RequestError.field("tools", long), Missing(long)):
        assert len(str(answer)) <= 300
    assert len(RequestError.field("tools", long).message) <= 300


def test_an_abridged_list_says_how_many_more_there_are() -> None:
    """Names are whole, but for one that alone is too long."""
    assert abridged(["a", "b"]) == "a, b"
    assert abridged([]) == ""
    *first, last = abridged(MANY).split(", ")
    assert set(first) < set(MANY)
    assert last == f"{MANY[len(first)]} and {len(MANY) - len(first) - 1} more"
    assert len(abridged([LONG, "b"])) < 140
