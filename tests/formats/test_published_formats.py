"""Rows in shapes that other projects publish become rollouts and pairs, alike in every kind of file, or are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.collect.tasks import TaskFile
from gymdata.commands.validate.run import validate
from gymdata.errors import DataError
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from gymdata.store.lines import decode, encode
from tests.formats.published_rows import PUBLISHED, arena_texts
from tests.formats.trajectories import (
    ANSWER,
    QUESTION,
    ROWS,
    imported,
    lines,
    rejected,
    said,
    write,
)
from tests.rollout_files import rollout, two_turns

SURE = {"role": "user", "content": "Sure?"}


def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What messages say, without ids and empty texts; the arguments of calls, which some formats have as text, as values."""
    made = []
    for message in said(messages):
        message = {name: value for name, value in message.items() if name != "id" and value != ""}
        calls = [call["function"] for call in json.loads(message.get("tool_calls", "[]"))]
        read = [
            (c["name"], json.loads(c["arguments"]) if isinstance(c["arguments"], str) else c["arguments"])
            for c in calls
        ]
        made.append({**message, **({"tool_calls": read} if read else {})})
    return made


ASKED = QUESTION["content"]
#: (format, messages, reward) of the rows of each format.
MEANT: list[tuple[str, list[dict[str, Any]], float | None]] = [
    ("art", [QUESTION, ANSWER], 0.5),
    ("response-lists", [QUESTION, ANSWER], 0.5),
    ("rllm", [QUESTION, ANSWER, SURE, ANSWER], 1.0),
    ("ultrafeedback", [QUESTION, ANSWER], 8.5),
]  # fmt: skip
#: (format, row, messages) as LLaMA-Factory and AlpacaFarm also write them.
OTHER_SHAPES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    ("trl-messages", [QUESTION, ANSWER], [QUESTION, ANSWER]),
    ("response-lists", {"instruction": ASKED, "input": "", "output": ["5"]}, [QUESTION, ANSWER]),
]


@pytest.mark.parametrize(
    ("name", "given", "messages", "reward"),
    [
        *((name, (ROWS | PUBLISHED)[name](5), messages, reward) for name, messages, reward in MEANT),
        *((name, row, messages, None) for name, row, messages in OTHER_SHAPES),
    ],
)
def test_a_published_rollout_has_its_messages_and_reward(
    name: str, given: Any, messages: list[dict[str, Any]], reward: float | None, tmp_path: Path
) -> None:
    """Messages, calls and the reward are those that its project's format means."""
    (row,) = imported(write(tmp_path / "a.jsonl", given), name)
    assert plain([message | {"turn": None} for message in row["messages"]]) == plain(messages)
    assert row["reward"] == reward


@pytest.mark.parametrize(
    ("name", "margin"),
    [
        ("alpaca-farm", None),
        ("arena", None), ("helpsteer-preference", 2.0), ("judge-bench", None),
        ("nectar", None), ("safe-rlhf", None),
        ("shp", 4.0), ("summarize-from-feedback", None), ("webgpt", 1.0),
    ],
)  # fmt: skip
def test_a_published_preference_is_a_pair(name: str, margin: float | None, tmp_path: Path) -> None:
    """The better answer is the chosen one, and the margin is that of the row."""
    (row,) = imported(write(tmp_path / "a.jsonl", PUBLISHED[name](5)), name)
    before = {
        "summarize-from-feedback": [
            {"role": "user", "content": "SUBREDDIT: r/math\n\nTITLE: Sums\n\nPOST: I add.\n\nTL;DR:"}
        ],
    }
    assert said(row["prompt"]) == before.get(name, [QUESTION])
    assert (said(row["chosen"]), said(row["rejected"])) == ([ANSWER], [ANSWER | {"content": "x"}])
    assert row["margin"] == margin or (margin is None and row["margin"] != row["margin"])


def test_battles_as_json_text_and_preferences_of_helpsteer2_are_pairs(tmp_path: Path) -> None:
    """The older shapes of two data sets mean the same."""
    helpsteer2 = {"prompt": QUESTION["content"], "response_1": "5", "response_2": "x", "preference_strength": -3}
    for name, row in (("arena", arena_texts(5)), ("helpsteer-preference", helpsteer2)):
        (pair,) = imported(write(tmp_path / f"{name}.jsonl", row), name)
        assert (said(pair["prompt"]), said(pair["chosen"])) == ([QUESTION], [ANSWER])


def test_the_best_of_ranked_answers_is_preferred_to_each_worse_one(tmp_path: Path) -> None:
    """Of seven answers of Nectar there are six pairs, whatever the order of the row."""
    ranked = [{"answer": str(rank), "model": "m", "rank": float(rank)} for rank in (4, 2, 7, 1, 3, 6, 5)]
    rows = [PUBLISHED["nectar"](5) | {"answers": ranked}]
    pairs = imported(write(tmp_path / "a.jsonl", *rows), "nectar")
    sides = [(pair["chosen"][0]["content"], pair["rejected"][0]["content"]) for pair in pairs]
    assert sides == [("1", "4"), ("1", "2"), ("1", "7"), ("1", "3"), ("1", "6"), ("1", "5")]
    assert len({pair["pair_id"] for pair in pairs}) == 6


def test_responses_to_a_prompt_are_one_group_with_their_scores(tmp_path: Path) -> None:
    """As distilabel writes them; a list with fewer scores than responses is named."""
    row: dict[str, Any] = {"instruction": QUESTION["content"], "generations": ["5", "x"], "ratings": [5, None]}
    row["rationales"] = ["r", "r"]
    file = write(
        tmp_path / "a.jsonl", row, row | {"ratings": [5]}, row | {"ratings": [5, "high"]}, row | {"generations": "5"}
    )
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    rows = to_rows(read_table(tmp_path / "run", ROLLOUTS))
    assert (summary.format, summary.rejected) == ("response-lists", 3)
    assert {tuple(m["role"] for m in row["messages"]) for row in rows} == {("user", "assistant")}
    assert [row["messages"][1]["content"] for row in rows] == ["5", "x", "5"]
    assert [row["reward"] for row in rows] == [5.0, None, 5.0]
    assert len({row["group_id"] for row in rows}) == 1
    reasons = (tmp_path / "run" / "rejected.jsonl").read_text()
    assert "ratings: expected one for each of the 2 responses" in reasons
    assert "score: got 'high', expected a number" in reasons
    assert "responses: got text, expected a list" in reasons


@pytest.mark.parametrize("kind", ["lines.jsonl", "list.json", "pretty list.json", "lines.jsonl.gz"])
def test_lists_of_messages_are_conversations(kind: str, tmp_path: Path) -> None:
    """A list on each line, or one list of them; a file that is one list of messages is one conversation."""
    rows: Any = [[QUESTION, ANSWER], [QUESTION, ANSWER | {"content": "x"}]]
    made = imported(written(rows, kind, tmp_path), "trl-messages")
    assert [said(row["messages"]) for row in made] == rows
    (one,) = imported(written(rows[0], "pretty list.json.gz", tmp_path), "trl-messages")
    assert said(one["messages"]) == rows[0]


TRACE = ROWS["verifiers-traces"](5)["traces"][0]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("alpaca-farm", {"preference": 1.5}, "a tie: neither answer is preferred"),
        ("alpaca-farm", {"preference": -1}, "preference: got -1.0, expected a number from 1 to 2"),
        ("arena", {"winner": "tie (bothbad)"}, "a tie: neither answer is preferred"),
        ("arena", {"winner": 3}, "winner: got 3, expected model_a or model_b"),
        ("helpsteer-preference", {"overall_preference": "x"}, "overall_preference: got 'x', expected a number"),
        ("nectar", {"answers": [{"answer": "x", "rank": 1}]}, "no two answers of different rank"),
        ("webgpt", {"score_0": 0.0, "score_1": 0.0}, "a tie: neither answer is preferred"),
        ("rllm", {"trajectories": [{"steps": []}]}, "steps: got 0 that are not one conversation"),
        ("verifiers", {"completion": None}, "completion: got null, expected text or messages"),
        ("verifiers", {"reward": "high"}, "reward: got 'high', expected a number"),
        ("verifiers", {"completion": [QUESTION]}, "no message of the assistant"),
        ("verifiers", {"completion": [ANSWER | {"tool_calls": ["{"]}]}, "a tool call that is not JSON"),
        ("trl-completions", {"completion": [QUESTION]}, "completion[0].role: got 'user'"),
        ("trl-completions", {"prompt": "<|im_start|>user\n2+3?<|im_end|>\n", "completion": "5"}, "text of a chat template"),
        ("verl-dump", {"output": "a\nuser\nb\nassistant\n5"}, "input: got text of a chat template"),
        ("verl-dump", {"score": "high"}, "score: got 'high', expected a number"),
        ("verl-dump", {"output": 5}, "output: got number, expected text"),
        ("skyrl-dump", {"output_response": "5<|im_end|>"}, "input_prompt: got text of a chat template"),
        ("skyrl-dump", {"score": [0.5, None]}, "score: got [0.5, None]"),
        ("verifiers-traces", {"traces": [TRACE | {"nodes": [{"message": QUESTION}, {"message": ANSWER}]}]},
         "nodes: got 2 that are not one conversation"),
    ],
)  # fmt: skip
def test_a_published_row_that_says_something_else_is_named(
    name: str, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Nothing is guessed: the row is left out, with its reason."""
    (named,) = rejected(write(tmp_path / "a.jsonl", (ROWS | PUBLISHED)[name](5) | change), name)
    assert reason in named["reason"]


ALIKE: dict[str, list[dict[str, Any]]] = {
    **{name: [row(4), row(5)] for name, row in (ROWS | PUBLISHED).items()},
    "nemo-gym": [
        {"responses_create_params": {"input": [QUESTION]}, "reward": 1.0, "response": {"output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": str(n)}]}]}}
        for n in (4, 5)
    ],
}  # fmt: skip


def written(rows: list[dict[str, Any]], kind: str, folder: Path) -> Path:
    """A file of rows: as lines or one list, also pretty-printed or compressed."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    texts = {
        "lines.jsonl": lines,
        "list.json": json.dumps(rows),
        "pretty list.json": json.dumps(rows, indent=2),
        "lines.jsonl.gz": lines,
        "pretty list.json.gz": json.dumps(rows, indent=2),
    }
    file = folder / kind
    file.write_bytes(gzip.compress(texts[kind].encode()) if kind.endswith(".gz") else texts[kind].encode())
    return file


KINDS = ("lines.jsonl", "list.json", "pretty list.json", "lines.jsonl.gz", "pretty list.json.gz")
COLUMNS = ("messages", "prompt", "chosen", "rejected", "reward")


@pytest.mark.matrix("nemo-gym", "rllm", "helpsteer-preference", "trl-completions")
@pytest.mark.parametrize("name", ALIKE)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    """Lines, a list, pretty-printed or compressed: the same messages, in every command that reads the format."""
    found = {}
    for kind in KINDS:
        file = written(ALIKE[name], kind, tmp_path)
        summary = gymdata.import_rollouts(file, tmp_path / f"run {kind} file")
        assert (summary.format, summary.rejected) == (name, 0)
        rows = to_rows(read_table(tmp_path / f"run {kind} file", PAIRS if summary.pairs else ROLLOUTS))
        found[kind] = [[row.get(column) for column in COLUMNS] for row in rows]
        for checked in (tmp_path / f"run {kind} file", *([file] if name == "nemo-gym" else [])):
            report = validate(checked)
            assert (report.rollouts, report.errors) == (len(rows), 0)
    assert all(repr(rows) == repr(found["lines.jsonl"]) for rows in found.values())


def test_rollouts_and_tasks_of_ones_own_are_read_in_every_kind_of_file(tmp_path: Path) -> None:
    """The same of gymdata's rollouts, and of tasks."""
    rows = [decode(encode(rollout("t", n, 1.0, two_turns(5, 20 + n)))) for n in range(2)]
    tasks = [{"task_id": str(n), "prompt": "q"} for n in range(2)]
    for kind in KINDS:
        assert validate(written(rows, kind, tmp_path)).rollouts == 2
        assert [task.task_id for task in TaskFile(written(tasks, kind, tmp_path))] == ["0", "1"]


def test_steps_of_rllm_are_turns_with_their_ids_log_probabilities_and_rewards(tmp_path: Path) -> None:
    """Exactly; log-probabilities that its sampler did not give are not known, and a step with a part of its ids is named."""
    row = PUBLISHED["rllm"](4)
    gymdata.import_rollouts(write(tmp_path / "a.jsonl", row), tmp_path / "run")
    (rollout,) = to_rows(read_table(tmp_path / "run", ROLLOUTS))
    turns = rollout["turns"]
    assert [prompt.tolist() for prompt in expand_prompts(turns)] == [[1], [1, 2, 3]]
    assert [turn["generation_token_ids"].tolist() for turn in turns] == [[2], [4, 5]]
    assert [turn["generation_log_probs"].tolist() for turn in turns] == [[-0.5], [-0.25, -1.5]]
    assert ([turn["reward"] for turn in turns], rollout["n_breaks"]) == ([0.5, 0.5], 0)
    assert [message["turn"] for message in rollout["messages"]] == [None, 0, None, 1]
    assert validate(tmp_path / "run").errors == 0

    def changed(**step: Any) -> dict[str, Any]:
        (trajectory,) = row["trajectories"]
        return row | {"trajectories": [trajectory | {"steps": [trajectory["steps"][0] | step, trajectory["steps"][1]]}]}

    faults = [changed(prompt_ids=[]), changed(logprobs=[-0.5, -0.5]), changed(response_ids=[2.5])]
    summary = gymdata.import_rollouts(write(tmp_path / "b.jsonl", changed(logprobs=[]), *faults), tmp_path / "odd")
    assert (summary.rollouts, summary.turns) == (1, 2)
    assert validate(tmp_path / "odd", select=["L3"]).by_code == {"L302": 1}
    assert [(bad["code"], bad["reason"][:21]) for bad in lines(tmp_path / "odd" / "rejected.jsonl")] == [
        ("T205", "steps[0]: ids of its p"[:21]), ("L301", "steps[0]: got 2, expec"[:21]), ("S102", "steps[0].response_ids"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_a_reward_that_is_not_finite_is_refused_by_its_name(number: str, tmp_path: Path) -> None:
    """A reward of NaN is neither 0 nor unknown: its row is left out."""
    rows = {
        "score": '{"prompt": "q", "response": "a", "score": %s}',
        "reward": '{"example_id": 1, "prompt": "q", "completion": "a", "reward": %s}',
        "nemo-gym": '{"responses_create_params": {"input": "q"}, "response": {"output": []}, "reward": %s}',
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(row % number)
        gymdata.import_rollouts(tmp_path / f"{name}.jsonl", tmp_path / name)
        (named,) = lines(tmp_path / name / "rejected.jsonl")
        field = "reward" if name == "nemo-gym" else name
        assert (named["code"], named["reason"]) == ("R502", f"{field}: got {float(number)}, expected a finite number")


def test_an_unknown_file_is_answered_once_with_its_keys(tmp_path: Path) -> None:
    """A file of no known format is one message, however many lines it has."""
    row = {"timestamp": "2025-01-01", "category": "writing", "turns_of_text": ["a", "b"]}
    for kind in KINDS:
        file = written([row] * 100, kind, tmp_path)
        for read in (validate, lambda path: gymdata.import_rollouts(path, tmp_path / "run")):
            with pytest.raises(DataError) as error:
                read(file)
            assert "timestamp, category, turns_of_text" in str(error.value.hint)
        with pytest.raises(DataError) as error:
            list(TaskFile(file))
        assert "--map prompt=timestamp" not in str(error.value.hint)


def test_text_that_is_no_json_is_one_fault(tmp_path: Path) -> None:
    """A list that ends too early, over a thousand lines, is not a thousand faults; neither are several pretty-printed
    objects, which are no document, and lines that are not UTF-8: what is wrong is said with its place."""
    rows = [PUBLISHED["nectar"](n) for n in range(300)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1)[:-40])
    (tmp_path / "b.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    (tmp_path / "c.json").write_bytes("\n".join('{"prompt": "déjà"}' for _ in rows).encode("latin-1"))
    faults = {
        "a": "its JSON ends too early, on line ",
        "b": "no JSON on line ",
        "c": "not UTF-8: byte 13 of line 1 is 0xe9",
    }
    for name, fault in faults.items():
        file = tmp_path / f"{name}.json"
        for read in (validate, lambda path: gymdata.import_rollouts(path, tmp_path / "run")):
            with pytest.raises(DataError) as error:
                read(file)
            assert fault in str(error.value)
        assert gymdata.import_rollouts(file, tmp_path / f"run {name}", source="nectar").rejected == 1


def test_a_prompt_with_an_image_is_no_task_of_text(tmp_path: Path) -> None:
    """The placeholder of an image would be text, and the image lost without a word."""
    spoken = [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat"}]
    with pytest.raises(DataError, match="field 'images'"):
        list(TaskFile(write(tmp_path / "a.jsonl", {"conversations": spoken, "images": ["a.jpg"]})))
    # Columns of that name are a task's own where the prompt does not mean them.
    assert list(TaskFile(write(tmp_path / "b.jsonl", {"prompt": "Run it.", "images": ["python:3.11"]})))


def test_a_file_with_answers_is_no_file_of_tasks(tmp_path: Path) -> None:
    """collect says what such a file is, and guesses no column for its prompt."""
    with pytest.raises(DataError, match="contains battles of Chatbot Arena as text, expected tasks"):
        list(TaskFile(write(tmp_path / "a.jsonl", PUBLISHED["arena"](5))))
