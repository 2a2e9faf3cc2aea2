"""The sample tasks and the calculator that serves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymdata.sample_data.calculator import Calculator
from gymdata.sample_data.make_tasks import RETRIES, main, pair_of, value_of
from gymdata.sample_data.tutor import tutor

TASKS = Path(__file__).parents[2] / "sample_data" / "tasks"


def _rows(name: str, folder: Path = TASKS) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_heldout_pairs_are_unseen() -> None:
    """No operand pair of a held-out task, in either order and under any operator, occurs in training."""
    train, heldout = _rows("train"), _rows("heldout")
    assert len(train) >= 600
    assert len(heldout) >= 500
    assert not {pair_of(row) for row in train} & {pair_of(row) for row in heldout}


def test_task_ids_are_unique() -> None:
    """A task id names one task over all files."""
    names = [row["task_id"] for row in _rows("train") + _rows("heldout") + _rows("tutor")]
    assert len(names) == len(set(names))


def test_tutored_pairs_are_held_out_too() -> None:
    """The tutored tasks share no operand pair with the others, and each has what the tutor says."""
    tutored, others = _rows("tutor"), _rows("train") + _rows("heldout")
    assert len(tutored) == 300
    assert not {pair_of(row) for row in tutored} & {pair_of(row) for row in others}
    assert {row["retry"] for row in tutored} == set(RETRIES)


@pytest.mark.parametrize(
    ("said", "reward", "done", "reply"),
    [
        (["46"], 1.0, True, None),
        (["45"], 0.0, False, "No. Try again."),
        (["45", " 46 "], 0.5, True, None),
        (["45", "45"], 0.0, True, None),
        ([None], 0.0, False, "No. Try again."),
    ],
)
def test_the_tutor_gives_one_second_try(said: list[str | None], reward: float, done: bool, reply: str | None) -> None:
    """A right answer ends the conversation, worth 1 at first and 0.5 on the second try; so does a second wrong one."""
    messages: list[dict] = []
    for answer in said:
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    step = tutor(messages, {"answer": "46", "retry": "No. Try again."})
    assert (step.reward, step.done, step.content) == (reward, done, reply)


def test_answers_are_what_the_tool_says() -> None:
    """Each prompt asks for its own expression, and the calculator gives the stored answer."""
    for row in _rows("train") + _rows("heldout") + _rows("tutor"):
        expression = f"{row['left']}{row['operator']}{row['right']}"
        assert expression in row["prompt"]
        assert row["answer"] == Calculator().calculate(expression)
        assert row["answer"] == str(value_of(row["left"], row["operator"], row["right"]))


def test_files_come_from_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running the script again writes the files that are committed."""
    monkeypatch.setattr("sys.argv", ["make_tasks.py", "-o", str(tmp_path)])
    main()
    for name in ("train", "heldout", "nemo_gym", "tutor"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (TASKS / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize(
    "expression", ["", "417-", "2**9**9", "7/2", "1.5+1", "True+1", "__import__('os')", "a+b", "(" * 500, "9" * 500]
)
def test_nonsense_is_refused(expression: str) -> None:
    """What is not integer arithmetic raises ValueError, and is never run."""
    with pytest.raises(ValueError, match=r"expression|arithmetic|whole numbers"):
        Calculator().calculate(expression)


def test_calculator_values() -> None:
    """Precedence, signs and brackets are those of arithmetic."""
    assert Calculator().calculate("2+3*4") == "14"
    assert Calculator().calculate(" -(7-9)*10 ") == "20"
