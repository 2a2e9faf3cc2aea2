"""The tasks of two turns and their user."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymdata import Step
from gymdata.sample_data.lessons import main, teach

TASKS = Path(__file__).parents[2] / "sample_data" / "tasks"
NAMES = ("lessons-train", "lessons-heldout")
TASK = {
    "prompt": "Vera is 40. As JSON:",
    "shown": {"name": "Vera", "age": 40},
    "second": "Otto is 51. As JSON:",
    "answer": {"name": "Otto", "age": 51},
}
QUESTION = [{"role": "user", "content": TASK["prompt"]}]
CORRECTION = 'Right is:\n{"name": "Vera", "age": 40}\nOtto is 51. As JSON:'


def _rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("first", ['{"name": "Vera", "age": 40}', '{"name": "Vera"}', "Vera is 40.", None])
def test_the_right_answer_is_shown_whatever_the_first_one_is(first: str | None) -> None:
    """The first answer has no reward and does not end the conversation; the second sentence follows."""
    assert teach([*QUESTION, {"role": "assistant", "content": first}], TASK) == Step(CORRECTION)


@pytest.mark.parametrize(
    ("second", "reward"),
    [
        ('{"name": "Otto", "age": 51}', 1.0),
        ('```json\n{"age": "51", "name": "Otto"}\n```', 1.0),
        ('{"name": "Otto", "age": 40}', 0.55),
        ('{"name": "Vera", "age": 40}', 0.1),
        ('{"age": 51}', 0.0),
        ("Otto is 51.", 0.0),
        (None, 0.0),
    ],
)
def test_the_second_answer_is_scored_and_ends_the_conversation(second: str | None, reward: float) -> None:
    """Right are the values of the second sentence; the answer that was shown is no longer."""
    first, shown = {"role": "assistant", "content": "{}"}, {"role": "user", "content": CORRECTION}
    step = teach([*QUESTION, first, shown, {"role": "assistant", "content": second}], TASK)
    assert (step.content, step.done, step.stop_reason) == (None, True, "answered")
    assert step.reward == pytest.approx(reward)


def test_both_sentences_of_a_task_ask_for_the_same_keys() -> None:
    """Each of the 200 and 100 tasks has the values of its answers in its sentences, and its prompts are no other task's."""
    rows = [row for name in NAMES for row in _rows(name)]
    assert [len(_rows(name)) for name in NAMES] == [200, 100]
    assert len({text for row in rows for text in (row["prompt"], row["second"])}) == 600
    for row in rows:
        assert row["shown"].keys() == row["answer"].keys()
        for text, answer in ((row["prompt"], row["shown"]), (row["second"], row["answer"])):
            assert all(str(word) in text for word in (*answer, *answer.values()))


def test_the_files_come_from_the_script_and_share_no_name_city_or_job(tmp_path: Path) -> None:
    """Running it again writes the files that are committed."""
    main(tmp_path)
    for name in NAMES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (TASKS / f"{name}.jsonl").read_bytes()
    train, heldout = (
        {
            str(value)
            for row in _rows(name)
            for key, value in (*row["shown"].items(), *row["answer"].items())
            if key != "age"
        }
        for name in NAMES
    )
    assert train
    assert not train & heldout
