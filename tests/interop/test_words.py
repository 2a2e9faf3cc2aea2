"""Labels, scores and marks of "not trained" are understood however they are spelled, in every format, or name their row; a
task is all that was given; an answer without words is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.interop.words import LABELS, MARKS
from tests.interop.trajectories import ANSWER, QUESTION, imported, lines, rejected, write

ASKED = QUESTION["content"]
#: A row of each format of answers as text.
ROWS: dict[str, dict[str, Any]] = {
    "trl-messages": {"messages": [QUESTION, ANSWER]},
    "trl-prompt-completion": {"prompt": ASKED, "completion": "5"},
    "alpaca": {"instruction": "Add.", "output": "5"},
    "sharegpt": {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "5"}]},
    "lima": {"conversations": [ASKED, "5"]},
    "capybara": {"conversation": [{"input": ASKED, "output": "5"}]},
}
GOOD = [True, 1, 1.0, "1", "1.0", "true", "TRUE", "yes", " Y ", "desirable", "chosen", "good", "positive", "correct"]
BAD = [
    False,
    0,
    0.0,
    "0",
    "0.0",
    "false",
    "False",
    "no",
    "N",
    "undesirable",
    "rejected",
    "bad",
    "negative",
    "incorrect",
]
ODD = ["perhaps", 2, -1, 0.5, [1], {"a": 1}]
ULTRA = {"instruction": ASKED, "completions": [{"response": "5", "annotations": {"honesty": {"Rating": "N/A"}}}]}
EPISODE = {
    "id": "t1:0", "is_correct": "true", "metrics": {"acc": "0.5"},
    "trajectories": [{"name": "solver", "reward": "0.5", "steps": [{"chat_completions": [QUESTION, ANSWER]}]}],
}  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("name", ROWS)
def test_a_label_is_understood_in_every_spelling_and_format(name: str, label: str, tmp_path: Path) -> None:
    rows = [ROWS[name] | {label: value} for value in (*GOOD, *BAD)]
    rollouts = imported(write(tmp_path / "rows.jsonl", *rows), name)
    assert [rollout["reward"] for rollout in rollouts] == [1.0] * len(GOOD) + [0.0] * len(BAD)
    assert {tuple(rollout["rewards"]) for rollout in rollouts} == {(label,)}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("column", [*LABELS, *MARKS, "reward", "score", "rewards"])
def test_a_column_that_says_something_else_names_its_row(name: str, column: str, tmp_path: Path) -> None:
    odd = ["high", [1, 2], {"a": "b"}] if column in ("reward", "score", "rewards") else ODD
    rows = [ROWS[name], *(ROWS[name] | {column: value} for value in odd), ROWS[name] | {column: None}]
    named = rejected(write(tmp_path / "rows.jsonl", *rows), name)
    assert [row["line"] for row in named] == [n + 2 for n in range(len(odd))]
    assert all(column in row["reason"] or "a: got 'b'" in row["reason"] for row in named)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("on_row", [False, True], ids=["message", "row"])
def test_a_mark_of_not_trained_is_understood_on_a_message_and_on_a_row(mark: str, on_row: bool, tmp_path: Path) -> None:
    """``masked`` says the reverse of the others."""
    untrained, trained = (GOOD, BAD) if mark == "masked" else (BAD, GOOD)
    rows = [
        {"messages": [QUESTION, ANSWER], mark: value} if on_row else {"messages": [QUESTION, ANSWER | {mark: value}]}
        for value in (*untrained, *trained)
    ]
    rollouts = imported(write(tmp_path / "rows.jsonl", *rows))
    marks = [rollout["messages"][1]["extra"] for rollout in rollouts]
    assert marks == ['{"weight": 0}'] * len(untrained) + [None] * len(trained)


@pytest.mark.parametrize("name", ROWS)
def test_a_mark_on_a_row_is_read_in_every_format(name: str, tmp_path: Path) -> None:
    (rollout,) = imported(write(tmp_path / "rows.jsonl", ROWS[name] | {"loss_mask": "0"}), name)
    assert [m["extra"] for m in rollout["messages"] if m["role"] == "assistant"] == ['{"weight": 0}']


def test_spans_of_a_message_that_are_not_trained_are_refused_by_name(tmp_path: Path) -> None:
    """axolotl's ``train_detail``: a message is trained whole or not at all."""
    spans = [{"begin_offset": 0, "end_offset": 7, "train": False}]
    row = {"messages": [QUESTION, ANSWER | {"train_detail": spans}]}
    (named,) = rejected(write(tmp_path / "rows.jsonl", row))
    assert named["reason"].startswith("messages[1].train_detail: got [{'begin_offset': 0")


def test_a_side_of_a_pair_that_is_not_trained_is_refused_by_name(tmp_path: Path) -> None:
    pair = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "6"}]}
    marked = [ANSWER | {"trainable": "no"}]
    rows = [pair, pair | {"chosen": marked}, pair | {"train": 0}, pair | {"prompt": [QUESTION, *marked, QUESTION]}]
    named = rejected(write(tmp_path / "rows.jsonl", *rows))
    assert [(row["line"], row["reason"][:30]) for row in named] == [
        (2, "chosen: got a message that is "), (3, "the row says that it is not tr"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(
    ("columns", "reward", "rewards"),
    [
        ({"reward": 0.5}, 0.5, {"reward": 0.5}), ({"score": "-3.5"}, -3.5, {"score": -3.5}),
        ({"reward": "1e-1"}, 0.1, {"reward": 0.1}), ({"reward": True}, 1.0, {"reward": 1.0}),
        ({"score": "False"}, 0.0, {"score": 0.0}), ({"rewards": [0.25]}, 0.25, {"rewards": 0.25}),
        ({"rewards": {"style": "2"}}, 2.0, {"style": 2.0}),
        ({"rewards": {"style": 1, "fact": 0}}, None, {"style": 1.0, "fact": 0.0}),
        ({"rewards": {"style": 1, "fact": 0}, "reward": 0.3}, 0.3, {"style": 1.0, "fact": 0.0, "reward": 0.3}),
        ({"score": 3, "label": "no"}, 3.0, {"score": 3.0, "label": 0.0}), ({"score": ""}, None, {}),
    ],
)  # fmt: skip
def test_scores_beside_an_answer_are_read(
    name: str, columns: dict[str, Any], reward: float | None, rewards: dict[str, float], tmp_path: Path
) -> None:
    (rollout,) = imported(write(tmp_path / "rows.jsonl", ROWS[name] | columns), name)
    assert (rollout["reward"], rollout["rewards"]) == (reward, rewards)


def test_a_label_decides_what_is_trained_also_beside_a_score(tmp_path: Path) -> None:
    row = ROWS["trl-messages"]
    other = {"messages": [QUESTION | {"content": "2+4?"}, ANSWER | {"content": "6"}]}
    file = write(tmp_path / "rows.jsonl", row | {"label": "no", "score": 9}, other | {"label": "yes", "score": 1})
    for train in (gymdata.train_sft, gymdata.train_kto):
        report = train(file, "sample_data/policy", tmp_path / "out", dry_run=True)
        kept = {"rollouts_chosen": 1} if train is gymdata.train_sft else {"desirable": 1, "undesirable": 1}
        assert report.counts.items() >= kept.items()


def test_scores_as_text_are_read_by_formats_with_scores_of_their_own(tmp_path: Path) -> None:
    """Or their row is named: none is dropped."""
    rated = ULTRA["completions"][0]
    texts = ({"overall_score": s, "annotations": {"honesty": {"Rating": s}}} for s in ("8.5", "great"))
    good, bad = (ULTRA | {"completions": [rated | text]} for text in texts)
    (rollout,) = imported(write(tmp_path / "rated.jsonl", good), "ultrafeedback")
    assert (rollout["reward"], rollout["rewards"]) == (8.5, {"honesty": 8.5})
    assert rejected(write(tmp_path / "bad.jsonl", bad))[0]["reason"].startswith("overall_score: got 'great'")
    (rollout,) = imported(write(tmp_path / "episodes.jsonl", EPISODE), "rllm")
    assert (rollout["reward"], rollout["rewards"]) == (0.5, {"is_correct": 1.0, "acc": 0.5})
    (trajectory,) = EPISODE["trajectories"]
    high = EPISODE | {"trajectories": [trajectory | {"reward": "high"}]}
    assert rejected(write(tmp_path / "high.jsonl", high))[0]["reason"] == "reward: got 'high', expected a number"
    lists = {"prompt": ASKED, "responses": ["5", "6"], "scores": ["1", True]}
    assert [r["reward"] for r in imported(write(tmp_path / "lists.jsonl", lists), "response-lists")] == [1.0, 1.0]


GIVEN = [QUESTION, ANSWER]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": [*GIVEN, {"role": "user", "content": q}], "completion": "5"} for q in "ab"],
        [{"prompt": [*GIVEN, {"role": "user", "content": q}], "responses": ["5"]} for q in "ab"],
        [{"chosen": f"\n\nHuman: 1\n\nAssistant: 2\n\nHuman: {q}\n\nAssistant: 5",
          "rejected": f"\n\nHuman: 1\n\nAssistant: 2\n\nHuman: {q}\n\nAssistant: 6"} for q in "ab"],
        [{"messages": [QUESTION, ANSWER], "tools": tools} for tools in ([], [TOOL])],
        [{"prompt": ASKED, "chosen": "5", "rejected": "6", "tools": tools} for tools in ([], [TOOL])],
        [{"messages": [QUESTION, ANSWER | {"weight": 0}, {"role": "user", "content": q}, ANSWER]} for q in "ab"],
        [{"prompt": ASKED, "completion": "5", "system": s} for s in ("Be brief.", "Be long.")],
    ],
)  # fmt: skip
def test_two_prompts_that_begin_alike_are_two_tasks(rows: list[Any], tmp_path: Path) -> None:
    """A task is all messages that were given, and the tools."""
    tasks = [row["task_id"] for row in imported(write(tmp_path / "rows.jsonl", *rows, rows[0]))]
    assert tasks[0] == tasks[2] != tasks[1]


@pytest.mark.parametrize("name", ["verifiers", "rllm"])
def test_one_id_of_two_prompts_is_two_tasks(name: str, tmp_path: Path) -> None:
    """Files that both count from 0 are joined; the first prompt keeps the id, and its later answers do, too."""
    asked = [QUESTION, QUESTION | {"content": "How much is 4+4?"}, QUESTION]
    if name == "rllm":
        (part,) = EPISODE["trajectories"]
        rows = [EPISODE | {"trajectories": [part | {"steps": [{"chat_completions": [q, ANSWER]}]}]} for q in asked]
    else:
        rows = [{"example_id": 0, "prompt": [q], "completion": [ANSWER], "reward": 1.0} for q in asked]
    rollouts = imported(write(tmp_path / "rows.jsonl", *rows), name)
    first, other, again = ((row["task_id"], row["group_id"]) for row in rollouts)
    assert first == again == (("t1-solver",) * 2 if name == "rllm" else ("0", "0"))
    assert other[0] == other[1] != first[0]
    assert other[0].startswith(f"{first[0]}-")


@pytest.mark.parametrize("empty", ["", "  \n", "\u2003"])
@pytest.mark.parametrize(
    ("row", "column"),
    [
        (ROWS["alpaca"], "output"), (ROWS["trl-prompt-completion"], "completion"),
        ({"prompt": ASKED, "chosen": "5", "rejected": "6"}, "chosen"),
        ({"prompt": ASKED, "chosen": "5", "rejected": "6"}, "rejected"),
        ({"prompt": ASKED, "response_0": "5", "response_1": "6", "better_response_id": 0}, "response_1"),
    ],
)  # fmt: skip
def test_an_answer_without_words_is_named_and_left_out(
    empty: str, row: dict[str, Any], column: str, tmp_path: Path
) -> None:
    summary = gymdata.import_rollouts(write(tmp_path / "rows.jsonl", row, row | {column: empty}), tmp_path / "run")
    assert (summary.rollouts + summary.pairs, summary.reasons) == (1, {"S103": 1})
    (named,) = lines(tmp_path / "run/rejected.jsonl")
    assert named["line"] == 2
    assert " is empty: got " in named["reason"]


def test_a_message_of_only_a_call_or_only_reasoning_is_an_answer(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    thought = {"role": "assistant", "content": "", "reasoning": "5."}
    assert len(imported(write(tmp_path / "a.jsonl", *({"messages": [QUESTION, m]} for m in (called, thought))))) == 2


def test_a_number_as_an_answer_is_its_text(tmp_path: Path) -> None:
    rows = [{"prompt": ASKED, "completion": n} for n in (5, -0.5)] + [{"instruction": "Add.", "output": 200}]
    texts = [imported(write(tmp_path / f"{n}.jsonl", row))[0]["messages"][1]["content"] for n, row in enumerate(rows)]
    assert texts == ["5", "-0.5", "200"]
    (named,) = rejected(write(tmp_path / "b.jsonl", rows[0], rows[0] | {"completion": True}))
    assert named["reason"] == "completion: got boolean, expected text or messages"
