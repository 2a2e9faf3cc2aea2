"""Errors say what they are by their type, ``code`` and ``reason``; nothing reads the words of a message."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from gymdata.checks.batches import Checks
from gymdata.checks.violations import CheckSettings, Selection, ValidationReport
from gymdata.commands.validate.pairs import check_pairs
from gymdata.engines.sampling import AnswerFaultError
from gymdata.errors import (
    DataError,
    GymdataError,
    OutsideError,
    RefusedError,
    RewardError,
    UsageError,
    counted,
    json_kind,
    json_value,
)
from gymdata.rewards import load_rewards
from gymdata.rewards.port import RewardFunction
from gymdata.store.paths import Source

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def nodes() -> list[tuple[Path, ast.AST]]:
    """Every part of the sources, with its file."""
    files = sorted([*(ROOT / "gymdata").rglob("*.py"), *(ROOT / "cli").glob("*.py")])
    return [(file.relative_to(ROOT), node) for file in files for node in ast.walk(ast.parse(file.read_text()))]


def reads_a_message(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        asked = any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
        return asked and any(isinstance(c, ast.Attribute) and c.attr == "message" for c in node.comparators)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        held = node.func.value
        return (
            node.func.attr in ("startswith", "endswith") and isinstance(held, ast.Attribute) and held.attr == "message"
        )
    if isinstance(node, ast.Attribute):
        return node.attr == "__new__" or (node.attr == "args" and isinstance(node.ctx, ast.Store))
    return False


def test_no_code_asks_what_a_message_says(nodes: list[tuple[Path, ast.AST]]):
    """No condition on an error's message, no ``__new__`` in place of a constructor, no ``args`` written over."""
    reading = [(file, node) for file, node in nodes if isinstance(node, ast.expr) and reads_a_message(node)]
    assert [f"{file}:{node.lineno}" for file, node in reading] == []


def test_the_name_of_a_file_does_not_decide_a_code(tmp_path: Path):
    """A broken file of pairs is S101, also when its name has the words of another fault."""
    file = tmp_path / "newer lacks the column.parquet"
    file.write_bytes(b"PAR1 cut off")
    checked = check_pairs(Source(file, "parquet"), Checks(CheckSettings(), Selection()), ValidationReport(str(file)))
    assert [violation.code for violation in checked.violations] == ["S101"]


def test_codes_of_data_errors():
    """A missing column is S103, changed turns have the code that they are refused with."""
    assert DataError.missing_columns("f", "pairs", ["a"], ["b"]).code == "S103"
    assert DataError.altered("T209", "turn 1", "changed").code == "T209"
    assert DataError("anything").code is None


def test_the_reason_of_an_error_is_without_its_place():
    """``reason`` has what was got and expected, for those who name another place."""
    assert (
        DataError.bad_row("f.jsonl", 3, "reward", "'x'", "a number").reason
        == "field 'reward': got 'x', expected a number"
    )
    assert RewardError("no answer").reason == "no answer"


@pytest.mark.parametrize(
    "error",
    [
        UsageError.several([UsageError("a", hint="b"), UsageError.bad_value("c", 1, "2")]),
        OutsideError("engine", "gone", hint="wait", retryable=True, retry_after_s=2.0, fatal=True, status=503),
        RewardError("no answer"),
        UsageError.missing_extra("torch", "train"),
        DataError.bad_row("f.jsonl", 3, "reward", "text", "a number"),
        RefusedError("turn 1", code="T201"),
        AnswerFaultError("length", "it is longer"),
    ],
)
def test_an_error_is_the_same_after_it_was_pickled(error: GymdataError) -> None:
    """The error of an actor or of a training process comes to the command with all that decides what follows from it."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.to_dict(), str(copy), copy.args) == (error.to_dict(), str(error), error.args)


@pytest.mark.parametrize("spec", ["exact_match", "numeric", "path.py:brevity"])
def test_rewards_have_every_attribute_of_the_protocol(spec: str, tmp_path: Path):
    """What the scheduler reads of a reward is named in the protocol, and every reward has it."""
    if ":" in spec:
        (tmp_path / "r.py").write_text("def brevity(completions, **_):\n    return [0.0 for _ in completions]\n")
        spec = f"{tmp_path}/r.py:brevity"
    ((function, _),) = load_rewards([spec])
    assert isinstance(function, RewardFunction)
    assert function.bounded is False


def test_no_text_leaves_the_plural_to_the_reader(nodes: list[tuple[Path, ast.AST]]):
    """A message counts "1 row" and "2 rows", never "2 row(s)"."""
    texts = [(file, node) for file, node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = [(file, node) for file, node in texts if re.search(r"(?<![({ ])\b[a-z]+\(s\)", str(node.value))]
    left = [f"{file}:{node.lineno}" for file, node in found]
    assert left == []


@pytest.mark.parametrize(
    ("value", "kind", "named"),
    [
        (None, "null", "null"), (True, "boolean", "true"), (7, "number", "number 7"), (2.5, "number", "number 2.5"),
        ("high", "text", "text high"), ([1], "list", "list"), ({"a": 1}, "object", "object"), (b"", "bytes", "bytes"),
    ],
)  # fmt: skip
def test_values_are_named_as_json_names_them(value: object, kind: str, named: str):
    """What a file holds is null, text, a number, a list or an object, whatever the language that reads it calls them."""
    assert (json_kind(value), json_value(value)) == (kind, named)


def test_a_number_agrees_with_its_noun():
    """One is singular, every other number plural, and so is what must agree with it."""
    assert [counted(n, "row") for n in (0, 1, 2_000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(n, "group has", "groups have") for n in (1, 2)] == ["1 group has", "2 groups have"]


def test_names_that_would_fill_a_screen_are_counted() -> None:
    """With the nearest ones; a few are all listed."""
    games = [f"Game{number}-v0" for number in range(300)]
    many = UsageError.unknown_choice("--env", "Game1", games)
    assert many.expected is not None
    assert re.fullmatch(r"one of 300, such as (Game\d+-v0(, )?){5}", many.expected)
    assert UsageError.unknown_choice("--env", "Game1", games[:3]).expected == "one of Game0-v0, Game1-v0, Game2-v0"


def test_a_folder_with_failures_alone_names_the_query_of_them(tmp_path: Path) -> None:
    """Failures are no rollouts: what shows rollouts cannot read them."""
    (tmp_path / "failures.jsonl").touch()
    assert f"gymdata query :failures {tmp_path}" in str(DataError.empty(tmp_path, "rollouts").hint)
    (tmp_path / "rollouts.jsonl").touch()
    assert "rollouts.jsonl: give one of these" in str(DataError.empty(tmp_path, "rollouts").hint)
