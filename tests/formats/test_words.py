"""Labels, scores and marks of "not trained" are understood however they are spelled, in every format, or name their row; a
task is all that was given; an answer without words is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.errors import DataError
from gymdata.formats.text.words import LABELS, MARKS
from gymdata.rollouts.truth import truth
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.formats.trajectories import ANSWER, QUESTION, imported, lines, rejected, verifiers, verifiers_traces, write

ASKED = QUESTION["content"]
#: A row of each format of answers as text.
ROWS: dict[str, dict[str, Any]] = {
    "trl-messages": {"messages": [QUESTION, ANSWER]},
    "trl-prompt-completion": {"prompt": ASKED, "completion": "5"},
    "alpaca": {"instruction": "Add.", "output": "5"},
    "sharegpt": {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "5"}]},
}
#: How files spell true and false, and what is neither.
GOOD = (True, 1, 1.0, "1", "1.0", "true", "TRUE", "yes", " Y ", "desirable", "chosen", "good", "positive", "correct")
BAD = (False, 0, 0.0, "0", "0.0", "false", "no", "N", "undesirable", "rejected", "bad", "negative", "incorrect")
ODD: tuple[Any, ...] = ("perhaps", "", 2, -1, 0.5, None, [1], {"a": 1})
ULTRA = {"instruction": ASKED, "completions": [{"response": "5", "annotations": {"honesty": {"Rating": "N/A"}}}]}
EPISODE = {
    "id": "t1:0", "is_correct": "true", "metrics": {"acc": "0.5"},
    "trajectories": [{"name": "solver", "reward": "0.5", "steps": [{"chat_completions": [QUESTION, ANSWER]}]}],
}  # fmt: skip


def test_true_and_false_are_understood_in_any_spelling() -> None:
    assert [truth(value) for value in GOOD] == [True] * len(GOOD)
    assert [truth(value) for value in BAD] == [False] * len(BAD)
    assert [truth(value) for value in ODD] == [None] * len(ODD)


@pytest.mark.parametrize("name", ROWS)
def test_labels_scores_and_marks_of_a_row_are_read_in_every_format(name: str, tmp_path: Path) -> None:
    rows = [ROWS[name] | {label: value} for label in LABELS for value in ("no", 1)]
    rows.append(ROWS[name] | {"score": "-3.5", "loss_mask": "0"})
    rollouts = imported(write(tmp_path / "rows.jsonl", *rows), name)
    assert [rollout["reward"] for rollout in rollouts] == [0.0, 1.0, 0.0, 1.0, -3.5]
    assert rollouts[2]["rewards"] == {"kto_tag": 0.0}
    marks = [[m["extra"] for m in rollout["messages"] if m["role"] == "assistant"] for rollout in rollouts]
    assert marks == [[None]] * 4 + [['{"weight": 0}']]


def test_a_column_that_says_something_else_names_its_row(tmp_path: Path) -> None:
    columns = [{name: "perhaps"} for name in (*LABELS, *MARKS, "reward", "score")]
    columns += [{"label": 2}, {"score": [1, 2]}, {"rewards": {"a": "b"}}, {"rewards": ["high"]}]
    row = ROWS["trl-messages"]
    named = rejected(write(tmp_path / "rows.jsonl", row, *(row | more for more in columns), row | {"label": None}))
    assert [bad["line"] for bad in named] == [n + 2 for n in range(len(columns))]
    for bad, (name,) in zip(named, columns, strict=True):
        assert bad["reason"].startswith(f"{name}: got ") or bad["reason"].startswith("a: got 'b'")


def test_a_mark_of_not_trained_is_understood_on_a_message_and_on_a_row(tmp_path: Path) -> None:
    """``masked`` says the reverse of the others."""
    marks = [{mark: value} for mark in MARKS for value in (("yes", 0) if mark == "masked" else ("no", 1))]
    rows = [{"messages": [QUESTION, ANSWER | mark]} for mark in marks]
    rows += [{"messages": [QUESTION, ANSWER], **mark} for mark in marks]
    rollouts = imported(write(tmp_path / "rows.jsonl", *rows))
    assert [rollout["messages"][1]["extra"] for rollout in rollouts] == ['{"weight": 0}', None] * len(MARKS) * 2


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


#: Columns beside an answer, its reward and its named rewards.
STATED: list[tuple[dict[str, Any], float | None, dict[str, float]]] = [
    ({"reward": 0.5}, 0.5, {"reward": 0.5}), ({"score": "-3.5"}, -3.5, {"score": -3.5}),
    ({"reward": "1e-1"}, 0.1, {"reward": 0.1}), ({"reward": True}, 1.0, {"reward": 1.0}),
    ({"score": "False"}, 0.0, {"score": 0.0}), ({"rewards": [0.25]}, 0.25, {"rewards": 0.25}),
    ({"rewards": {"style": "2"}}, 2.0, {"style": 2.0}),
    ({"rewards": {"style": 1, "fact": 0}}, None, {"style": 1.0, "fact": 0.0}),
    ({"rewards": {"style": 1, "fact": 0}, "reward": 0.3}, 0.3, {"style": 1.0, "fact": 0.0, "reward": 0.3}),
    ({"score": 3, "label": "no"}, 3.0, {"score": 3.0, "label": 0.0}), ({"score": ""}, None, {}),
    ({"helpfulness": 4, "verbosity": 1}, None, {"helpfulness": 4.0, "verbosity": 1.0}),
]  # fmt: skip


def test_scores_beside_an_answer_are_read(tmp_path: Path) -> None:
    """Attributes, as HelpSteer has them, are named rewards, and no total is made of them."""
    rows = [ROWS["trl-messages"] | columns for columns, _, _ in STATED]
    rollouts = imported(write(tmp_path / "rows.jsonl", *rows))
    assert [(rollout["reward"], rollout["rewards"]) for rollout in rollouts] == [stated[1:] for stated in STATED]


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


@pytest.mark.parametrize(
    ("row", "column"),
    [
        (ROWS["alpaca"], "output"), (ROWS["trl-prompt-completion"], "completion"),
        ({"prompt": ASKED, "chosen": "5", "rejected": "6"}, "chosen"),
        ({"prompt": ASKED, "chosen": "5", "rejected": "6"}, "rejected"),
        ({"prompt": ASKED, "response_0": "5", "response_1": "6", "better_response_id": 0}, "response_1"),
    ],
)  # fmt: skip
def test_an_answer_without_words_is_named_and_left_out(row: dict[str, Any], column: str, tmp_path: Path) -> None:
    rows = [row, *(row | {column: empty} for empty in ("", "  \n", "\u2003"))]
    summary = gymdata.import_rollouts(write(tmp_path / "rows.jsonl", *rows), tmp_path / "run")
    assert (summary.rollouts + summary.pairs, summary.reasons) == (1, {"S103": 3})
    named = lines(tmp_path / "run/rejected.jsonl")
    assert [bad["line"] for bad in named if " is empty: got " in bad["reason"]] == [2, 3, 4]


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


@pytest.mark.parametrize("name", ["arguments", "parameters", "args", "input"])
def test_arguments_of_a_call_are_read_under_each_of_their_names(name: str, tmp_path: Path) -> None:
    """In the call or in its function, in both shapes of messages."""
    function = {"name": "add", name: {"a": 2}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}, function]}
    spoken = [{"from": "human", "value": ASKED}, {"from": "function_call", "value": json.dumps(function)}]
    for n, row in enumerate(({"messages": [QUESTION, called]}, {"conversations": spoken})):
        (rollout,) = imported(write(tmp_path / f"{n}.jsonl", row))
        calls = json.loads(rollout["messages"][1]["tool_calls"])
        assert [call["function"] for call in calls] == [{"name": "add", "arguments": {"a": 2}}] * (2 - n)


@pytest.mark.parametrize("more", [{"kwargs": {"a": 2}}, {"arguments": {"a": 1}, "parameters": {"a": 2}}])
def test_a_call_whose_arguments_are_not_sure_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", **more}]}
    (bad,) = rejected(write(tmp_path / "a.jsonl", {"messages": [QUESTION, answer]}))
    assert "got a tool call with name, " in bad["reason"]


def test_a_mark_of_a_message_that_is_not_known_is_refused(tmp_path: Path) -> None:
    marks = {"loss_scale": 0, "mask": False, "train_on_turn": "0", "no_loss": 1, "is_masked": 0, "supervised": False}
    rows = [{"messages": [QUESTION, ANSWER | {key: None}]} for key in marks]
    rows += [{"messages": [QUESTION, ANSWER | {key: value}]} for key, value in marks.items()]
    named = rejected(write(tmp_path / "a.jsonl", *rows))
    assert [bad["reason"].partition(":")[0] for bad in named] == [f"messages[1].{key}" for key in marks]


def test_the_mark_of_a_call_is_read(tmp_path: Path) -> None:
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {}}', "weight": 0}
    gpt = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "5"}]
    (rollout,) = imported(write(tmp_path / "a.jsonl", {"conversations": [gpt[0], call, *gpt]}), "sharegpt")
    assert [m["extra"] for m in rollout["messages"] if m["role"] == "assistant"] == ['{"weight": 0}', None]


def test_reasoning_in_parts_is_read_and_other_reasoning_is_refused(tmp_path: Path) -> None:
    parts = ([{"type": "text", "text": "Hm."}], "Hm.", {"steps": ["Hm."]})
    file = write(tmp_path / "a.jsonl", *({"messages": [QUESTION, ANSWER | {"reasoning": part}]} for part in parts))
    (bad,) = rejected(file)
    assert (bad["line"], "expected text" in bad["reason"]) == (3, True)
    rows = to_rows(read_table(gymdata.import_rollouts(file, tmp_path / "run").run))
    assert [row["messages"][1]["reasoning"] for row in rows] == ["Hm.", "Hm."]


def test_a_reward_that_is_given_twice_is_neither_of_them(tmp_path: Path) -> None:
    """A row with a key twice is rejected with its line, and a document that is one value is refused, in every format."""
    good = json.dumps({"prompt": ASKED, "completion": "5", "reward": 1})
    bad = f'{good[:-1]}, "reward": 0}}'
    file = tmp_path / "a.jsonl"
    file.write_text(f"{good}\n{bad}\n")
    (reject,) = rejected(file)
    assert (reject["line"], reject["code"], reject["reason"]) == (2, "S102", "the key 'reward' is given twice")
    document = tmp_path / "a.json"
    document.write_text(f"[{good},\n {bad}]")
    with pytest.raises(DataError, match="the key 'reward' is given twice"):
        imported(document)


def test_a_system_prompt_that_is_given_twice_is_one(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    row = {"messages": [system, QUESTION, ANSWER], "history": [["a", "b"]]}
    file = write(tmp_path / "a.jsonl", row | {"system": "Be brief."}, row | {"system": "Be long."})
    (bad,) = rejected(file)
    assert (bad["line"], bad["reason"]) == (2, "system: got another text than that of the system message")
    (good,) = imported(write(tmp_path / "b.jsonl", row))
    assert [m["role"] for m in good["messages"]] == ["system", "user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("name", ["scores", "rewards", "ratings", "score", "reward", "labels", "label"])
def test_numbers_of_responses_are_read_under_each_of_their_names(name: str, tmp_path: Path) -> None:
    row = {"prompt": ASKED, "responses": ["5", "6"]}
    values: list[Any] = [[1, 0], ["1", "0"], [True, False], [1.0, None], [1], 1, "high"]
    file = write(tmp_path / "a.jsonl", *(row | {name: value} for value in values))
    assert [bad["reason"] for bad in rejected(file)] == [f"{name}: expected one for each of the 2 responses"] * 3
    rows = to_rows(read_table(gymdata.import_rollouts(file, tmp_path / "run").run))
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, None]


def test_truth_values_of_responses_are_named_to_be_read(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": ASKED, "responses": ["5", "6"], "verified": [True, False]})
    assert "--map label=verified" in rejected(file)[0]["reason"]
    run = gymdata.import_rollouts(file, tmp_path / "run", map={"label": "verified"}).run
    assert [row["reward"] for row in read_table(run).to_pylist()] == [1.0, 0.0]


def test_an_agent_or_an_answer_that_is_not_trained_is_understood_in_any_spelling(tmp_path: Path) -> None:
    """In traces of verifiers: of an agent the row is left out, of an answer that was not sampled the message."""
    (trace,), (other,) = verifiers_traces(1)["traces"], verifiers_traces(2)["traces"]
    trace["nodes"][1] |= {"sampled": "false", "mask": [False, False], "logprobs": []}
    other["agent"]["trainable"] = "0"
    file = write(tmp_path / "a.jsonl", trace, other)
    (bad,) = rejected(file, "verifiers-traces")
    assert (bad["line"], bad["reason"]) == (2, "agent.trainable: the agent 'agent' is not trained")
    run = gymdata.import_rollouts(file, tmp_path / "run", source="verifiers-traces").run
    (row,) = read_table(run).to_pylist()
    assert [m["extra"] for m in row["messages"] if m["role"] == "assistant"] == ['{"weight": 0}', None]


def test_a_limit_that_cut_an_answer_is_known_in_any_spelling(tmp_path: Path) -> None:
    rows = [verifiers(1) | {"is_truncated": cut} for cut in (True, "true", 1)]
    episode = EPISODE | {"termination_reason": "TerminationReason.MAX_TURNS_EXCEEDED"}
    cut = [*imported(write(tmp_path / "a.jsonl", *rows), "verifiers"), *imported(write(tmp_path / "b.jsonl", episode))]
    assert [(row["status"], row["stop_reason"]) for row in cut] == [("truncated", "length")] * 4


def test_a_battle_has_one_winner_and_ranks_are_numbers(tmp_path: Path) -> None:
    """Flags may be text, as in a CSV file; two winners, or a rank that is no number, prefer neither side."""
    battle = {"prompt": '["q"]', "response_a": '["a"]', "response_b": '["b"]'}
    flags = {"winner_model_a": "0", "winner_model_b": "1", "winner_tie": "0"}
    file = write(tmp_path / "a.jsonl", battle | flags, battle | flags | {"winner_model_a": "1"})
    assert [bad["line"] for bad in rejected(file, "arena")] == [2]
    (pair,) = imported(write(tmp_path / "b.jsonl", battle | flags), "arena")
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("b", "a")
    sides = [{"rank": rank, "completion": [ANSWER | {"content": str(rank)}]} for rank in (float("nan"), 0)]
    assert rejected(write(tmp_path / "c.jsonl", {"context": [QUESTION], "completions": sides}), "nemo-rl-preference")
