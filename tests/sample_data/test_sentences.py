"""The tasks and the rewards of the real demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymdata.sample_data.sentences import all_right, main, right_values

TASKS = Path(__file__).parents[2] / "sample_data" / "tasks"
NAMES = ("sentences-train", "sentences-heldout")


def _rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"name": "Vera", "age": 40}', 1.0),
        ('```json\n{"age": "40", "name": "vera"}\n```', 1.0),
        (' ```\n{"name": "Vera", "age": 40}```\n', 1.0),
        ('{"name": "Vera", "age": 41}', 0.55),
        ('{"name": null, "age": [40]}', 0.1),
        ('{"name": "Vera"}', 0.0),
        ('{"name": "Vera", "age": 40, "city": "Oslo"}', 0.0),
        ('Here it is: {"name": "Vera", "age": 40}', 0.0),
        ('[{"name": "Vera", "age": 40}]', 0.0),
        ('{"name": "Vera", "age": 40', 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_values(completion: str, reward: float) -> None:
    """1 is an answer in which everything is right; 0 is one that is not the object that was asked for."""
    assert right_values(completion, {"name": "Vera", "age": 40}) == pytest.approx(reward)
    assert all_right(completion, {"name": "Vera", "age": 40}) == (reward == 1.0)


def test_tasks_ask_for_what_their_sentence_says() -> None:
    """300 and 200 different prompts; each has its values and its keys."""
    train, heldout = map(_rows, NAMES)
    assert (len(train), len(heldout)) == (300, 200)
    assert len({row["prompt"] for row in train + heldout}) == 500
    for row in train + heldout:
        for key, value in row["answer"].items():
            assert str(value) in row["prompt"]
            assert key in row["prompt"]


def test_heldout_names_cities_and_jobs_are_unseen() -> None:
    """No name, city or job of a held-out task is in a training task."""
    train, heldout = (
        {str(value) for row in _rows(name) for key, value in row["answer"].items() if key != "age"} for name in NAMES
    )
    assert train
    assert not train & heldout


def test_the_files_come_from_the_script(tmp_path: Path) -> None:
    """Running it again writes the files that are committed."""
    main(tmp_path)
    for name in NAMES:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (TASKS / f"{name}.jsonl").read_bytes()
