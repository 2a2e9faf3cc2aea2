"""Answers and preferences as text are read from the formats that people have: each row becomes the messages that it says, or
is named with the reason."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.errors import DataError, UsageError
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from gymdata.store.reading import DataWarning
from tests.formats.trajectories import ANSWER, QUESTION, SYSTEM, imported, lines, rejected, said, write

WRONG = {"role": "assistant", "content": "6"}
CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {}}


ASKED = QUESTION["content"]
HUMAN, GPT = {"from": "human", "value": ASKED}, {"from": "gpt", "value": "5"}
#: The system's message and an exchange before the question, and how rows have them in columns.
BEFORE = [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
HISTORY = {"history": [["Hi", "Yes?"]]}
ADD = {"role": "user", "content": "Add.\n\n2 and 3"}
#: A conversation of OpenAI's first interface for functions.
OF_FUNCTIONS = [
    QUESTION, {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": "{}"}},
    {"role": "function", "name": "add", "content": "5"},
    {"role": "assistant", "content": [{"type": "text", "text": "5"}], "reasoning_content": "Easy."},
]  # fmt: skip
CALLED = '[{"id": null, "type": "function", "function": {"name": "add", "arguments": "{}"}}]'


@pytest.mark.parametrize(
    ("name", "row", "messages"),
    [
        ("trl-messages", {"messages": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
        ("trl-messages", {"messages": OF_FUNCTIONS}, [
            QUESTION, {"role": "assistant", "tool_calls": CALLED}, {"role": "tool", "name": "add", "content": "5"},
            ANSWER | {"reasoning": "Easy."}]),
        ("trl-prompt-completion", {"prompt": ASKED, "completion": "5"}, [QUESTION, ANSWER]),
        ("trl-prompt-completion", {"prompt": [QUESTION], "completion": [ANSWER]}, [QUESTION, ANSWER]),
        ("trl-prompt-completion", {"prompt": ASKED, "response": "5"}, [QUESTION, ANSWER]),
        ("trl-prompt-completion", {"system_prompt": "Be brief.", **HISTORY, "question": ASKED, "response": "5"},
         [*BEFORE, QUESTION, ANSWER]),
        ("alpaca", {"instruction": "Add.", "context": "2 and 3", "response": "5", "category": "closed_qa"}, [ADD, ANSWER]),
        ("alpaca", {"instruction": "Add.", "input": "2 and 3", "output": "5", "system": "Be brief.", **HISTORY},
         [*BEFORE, ADD, ANSWER]),
        ("sharegpt", {"conversations": [HUMAN, GPT]}, [QUESTION, ANSWER]),
        ("sharegpt", {"instruction": "Other", "response": "words", "conversations": [
            HUMAN | {"from": "Human"}, GPT | {"from": "GPT"}]}, [QUESTION, ANSWER]),
    ],
)  # fmt: skip
def test_an_answer_becomes_the_messages_that_its_row_says(
    name: str, row: dict[str, Any], messages: list[dict[str, Any]], tmp_path: Path
) -> None:
    (rollout,) = imported(write(tmp_path / "rows.jsonl", row), name)
    assert said(rollout["messages"]) == messages
    assert (rollout["reward"], rollout["n_turns"]) == (None, 0)


def test_calls_and_tools_of_sharegpt_are_read(tmp_path: Path) -> None:
    called = [{"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "5"}]
    row = {"conversations": [HUMAN, *called, GPT], "system": "Be brief.", "tools": json.dumps([TOOL])}
    (rollout,) = imported(write(tmp_path / "rows.jsonl", row))
    assert [m["role"] for m in rollout["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert json.loads(rollout["messages"][2]["tool_calls"])[0]["function"] == CALL
    assert json.loads(rollout["tools"]) == [{"type": "function", "function": TOOL}]


SIDES = {"chosen": "5", "rejected": "6"}
CONVERSATIONS = {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG]}


@pytest.mark.parametrize(
    ("row", "margin"),
    [
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WRONG], "margin": 2}, 2.0),
        ({"prompt": ASKED, **SIDES}, math.nan),
        (CONVERSATIONS, math.nan),
        ({"prompt": ASKED, **CONVERSATIONS, "score_chosen": 8.0, "score_rejected": 3.5}, 4.5),
        ({"prompt": f"\n\nHuman:  {ASKED}\n\nAssistant:", **CONVERSATIONS}, math.nan),
        ({"prompt": ASKED[:5], **CONVERSATIONS}, math.nan),
        ({side: f"\n\nHuman: {ASKED}\n\nAssistant: {n}" for side, n in SIDES.items()}, math.nan),
        ({"prompt": f"\n\nHuman: {ASKED}\n\nAssistant:", "response": "5", **SIDES}, math.nan),
        ({"system": "", "question": ASKED, **SIDES}, math.nan),
        ({"input": ASKED, **SIDES, "chosen-rating": 5, "rejected-rating": 3}, 2.0),
        ({"messages": [QUESTION, ANSWER], "rejected_response": "6"}, math.nan),
        ({"messages": [QUESTION, ANSWER], "rejected_messages": [QUESTION, WRONG]}, math.nan),
        ({"messages": [QUESTION, ANSWER], "rejected_messages": [WRONG]}, math.nan),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT | {"value": "6"}}, math.nan),
        ({"instruction": ASKED, "input": "", **SIDES}, math.nan),
        ({"input": {"messages": [QUESTION]}, "preferred_output": [ANSWER], "non_preferred_output": [WRONG]}, math.nan),
    ],
)
def test_a_preference_becomes_a_pair(row: dict[str, Any], margin: float, tmp_path: Path) -> None:
    name = "openai-preference" if "preferred_output" in row else "trl-preference"
    (pair,) = imported(write(tmp_path / "rows.jsonl", row), name)
    assert [said(pair[side]) for side in ("prompt", "chosen", "rejected")] == [[QUESTION], [ANSWER], [WRONG]]
    assert pair["margin"] == pytest.approx(margin, nan_ok=True)
    assert len(pair["chosen_ids"]) == 0


def test_a_system_prompt_beside_both_sides_is_a_part_of_the_prompt(tmp_path: Path) -> None:
    """Beside ms-swift's `messages` and `rejected_messages`, and beside two conversations."""
    of_swift = {"messages": [QUESTION, ANSWER], "rejected_messages": [QUESTION, WRONG]}
    for n, sides in enumerate((of_swift, CONVERSATIONS)):
        (pair,) = imported(write(tmp_path / f"{n}.jsonl", {"system": "Be brief.", **sides}))
        assert [said(pair[side]) for side in ("prompt", "chosen", "rejected")] == [
            [SYSTEM, QUESTION], [ANSWER], [WRONG],
        ]  # fmt: skip


CONTRADICTING = [
    {"prompt": ASKED, **SIDES, "chosen-rating": "2", "rejected-rating": "4", "margin": 1.0},
    {"messages": [QUESTION, ANSWER], "rejected_messages": [WRONG], "chosen_score": 0, "rejected_score": 1},
    {"history": ASKED, "human_ref_A": "5", "human_ref_B": "6", "labels": 1, "score_A": 2, "score_B": 9},
]


@pytest.mark.parametrize("row", CONTRADICTING, ids=lambda row: next(reversed(row)))
def test_a_pair_that_its_own_scores_contradict_is_left_out_by_name(row: dict[str, Any], tmp_path: Path) -> None:
    """It is a rejected row with its line and both code and reason; --keep-contradicting takes it, with a margin below 0."""
    file = write(tmp_path / "rows.jsonl", row)
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    assert (summary.pairs, summary.reasons) == (0, {"P603": 1})
    assert ("  rejected, P603 (tie)", 1) in summary.rows()
    (line,) = (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    assert (json.loads(line)["line"], "its scores prefer rejected" in line) == (1, True)
    assert gymdata.import_rollouts(file, tmp_path / "all", keep_contradicting=True).pairs == 1
    assert read_table(tmp_path / "all", PAIRS)["margin"][0].as_py() < 0


def test_equal_scores_contradict_nothing_and_rollouts_have_no_such_flag(tmp_path: Path) -> None:
    """A pair of equal scores is taken and counted; the flag is for files of pairs alone."""
    bare = {"prompt": ASKED, **SIDES}
    tie = write(tmp_path / "tie.jsonl", bare | {"score_chosen": 3, "score_rejected": 3}, bare)
    done = gymdata.import_rollouts(tie, tmp_path / "run")
    assert (done.pairs, done.equal_scores) == (2, 1)
    assert ("  with equal scores (P603)", 1) in done.rows()
    answers = write(tmp_path / "answers.jsonl", {"prompt": ASKED, "completion": "5"})
    with pytest.raises(UsageError, match="--keep-contradicting"):
        gymdata.import_rollouts(answers, tmp_path / "answers", keep_contradicting=True)


def test_rollouts_without_a_time_are_counted(tmp_path: Path) -> None:
    """Their started_at is no time at which anything was done; a format that has one is taken at its word."""
    answers = write(
        tmp_path / "answers.jsonl", {"prompt": ASKED, "completion": "5"}, {"prompt": ASKED, "completion": "6"}
    )
    done = gymdata.import_rollouts(answers, tmp_path / "answers")
    assert (done.rollouts, done.without_time) == (2, 2)
    assert ("rollouts without a time", 2) in done.rows()
    rollouts = Path(gymdata.__file__).parent.parent / "sample_data" / "rollouts" / "clean.jsonl"
    gymdata.export(rollouts, tmp_path / "atif.jsonl", "atif")
    assert gymdata.import_rollouts(tmp_path / "atif.jsonl", tmp_path / "atif").without_time == 0


def test_a_column_pair_id_alone_is_not_gymdatas(tmp_path: Path) -> None:
    """Rows of others that have one are of no known format, with their keys; gymdata's pairs where rollouts are read are
    named with the commands that take them."""
    other = write(tmp_path / "other.jsonl", {"pair_id": "p", "left": "5", "right": "6"})
    with pytest.raises(DataError, match="known format") as refused:
        gymdata.import_rollouts(other, tmp_path / "run")
    assert "pair_id, left, right" in str(refused.value.hint)
    with pytest.raises(DataError, match="unknown fields left, pair_id, right"):
        read_table(other, ROLLOUTS)
    ours = write(tmp_path / "pairs.jsonl", {"pair_id": "p", "run_id": "r", "chosen": [], "rejected": []})
    with pytest.raises(DataError, match="contains pairs, expected rollouts"):
        read_table(ours, ROLLOUTS)


def test_what_both_sides_share_before_an_answer_is_the_prompt(tmp_path: Path) -> None:
    """The shared first answer belongs to the prompt; a side that ends where the other goes on keeps its last answer."""
    row = {
        "chosen": [QUESTION, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}],
        "rejected": [QUESTION, ANSWER, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "No."}],
    }
    (pair,) = imported(write(tmp_path / "rows.jsonl", row))
    assert [len(pair[side]) for side in ("prompt", "chosen", "rejected")] == [3, 1, 1]


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("trl-prompt-completion", {"prompt": None, "completion": "x"}, "prompt: got null, expected text or messages"),
        ("trl-prompt-completion", {"completion": "x"}, "prompt: is missing, also as question, problem"),
        ("trl-preference", {"prompt": "q", "chosen": None, "rejected": "b"}, "chosen: got null, expected text or messages"),
        ("trl-messages", {"messages": None}, "messages: got null, expected text or messages"),
        ("trl-messages", {"messages": [{"role": None, "content": "x"}, ANSWER]}, "messages[0].role: got null, expected"),
        ("nat-trajectories", {"episode": None, "reward": 1.0}, "episode: got null, expected"),
        ("atif", {"schema_version": "ATIF-v1.7", "steps": None}, "steps: got null, expected"),
    ],
)  # fmt: skip
def test_a_null_where_a_value_must_be_is_named_with_its_place(
    name: str, row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "rows.jsonl", row)
    (named,) = rejected(file, name)
    assert (named["file"], named["line"], named["reason"][: len(reason)]) == (str(file), 1, reason)


#: Rows that are no conversation with an answer as text, and what is wrong with each.
UNREAD: list[tuple[Any, str]] = [
    ({"messages": [QUESTION]}, "no message of the assistant"),
    ({"messages": [{"role": "wizard", "content": "x"}, ANSWER]}, "messages[0].role: got 'wizard'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWER]},
     "messages[0].content: got a part of type 'image_url', expected text"),
    ({"messages": [QUESTION, ANSWER | {"content": None}]}, "messages[1].content: got null, expected text or tool calls"),
    ({"messages": [QUESTION, {"role": "assistant", "content": 7}]}, "messages[1].content"),
    ({"prompt": "x", "chosen": "a", "rejected": "b"}, "messages: is missing"),
    ({"messages": [{"role": "user", "content": "<image>Who?"}, ANSWER], "images": ["1.png"]}, "images: images"),
    ("x", "expected an object"),
    ({"messages": [QUESTION, ANSWER], "tools": "{"}, "tools: got text that is not JSON"),
    ({"messages": [{"role": "user", "content": "<img>https://a/b.png</img>Who?"}, ANSWER]}, "<img>: images"),
]  # fmt: skip


def test_a_row_that_says_something_else_is_named(tmp_path: Path) -> None:
    good = {"messages": [QUESTION, ANSWER]}
    named = rejected(write(tmp_path / "rows.jsonl", good, *(row for row, _ in UNREAD)))
    assert [bad["line"] for bad in named] == [n + 2 for n in range(len(UNREAD))]
    assert [reason for bad, (_, reason) in zip(named, UNREAD, strict=True) if reason not in bad["reason"]] == []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [SYSTEM, QUESTION]}, "prompt: got other messages"),
        ({"prompt": "Another question?"}, "prompt: got another text"),
        ({"chosen": [QUESTION, ANSWER, QUESTION]}, "ends with a message of role 'user'"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
    ],
)
def test_sides_that_are_no_preference_are_named(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (named,) = rejected(write(tmp_path / "rows.jsonl", CONVERSATIONS, CONVERSATIONS | row))
    assert (named["line"], named["code"]) == (2, "P601" if "same" in reason else "S102")
    assert reason in named["reason"]


@pytest.mark.parametrize("suffix", ["json", "parquet", "jsonl"])
def test_the_format_is_that_of_the_first_row_that_has_one(suffix: str, tmp_path: Path) -> None:
    rows = [{"messages": [QUESTION]}, {"messages": [QUESTION, ANSWER]}]
    file = write(tmp_path / f"rows.{suffix}", rows) if suffix == "json" else write(tmp_path / f"rows.{suffix}", *rows)
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    assert (summary.format, summary.rollouts, summary.rejected) == ("trl-messages", 1, 1)


@pytest.mark.parametrize("read", [gymdata.pairs, gymdata.report])
def test_other_commands_say_what_such_a_file_is(read: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.json", [{"messages": [QUESTION, ANSWER]}])
    with pytest.raises(DataError, match=r"chat messages with answers,? as text") as error:
        read(file, output=tmp_path / "out")
    assert f"gymdata import {file}" in str(error.value.hint)


def test_a_row_of_gymdata_is_never_that_of_another_project(tmp_path: Path) -> None:
    """Also in front of one: messages with answers are columns of rollouts, too."""
    rows = [{"rollout_id": "a", "messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER]}]
    for n, file in enumerate((write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.json", rows))):
        with pytest.raises(DataError, match="of no known format") as error:
            gymdata.import_rollouts(file, tmp_path / f"run-{n}")
        assert error.value.hint == "files of gymdata need no import"


def test_a_log_with_a_status_is_not_taken_for_rows_of_gymdata(tmp_path: Path) -> None:
    """Other projects have such columns, too: it is of no known format, and its columns are named."""
    log = {"version": 2, "status": "success", "eval": {}, "samples": [{"score": 1}]}
    for row in (log, {"trajectory_id": "a", "task_id": 3, "status": "rejected", "temperature": 1.0}):
        with pytest.raises(DataError, match="contains rows of no known format, expected rollouts or pairs") as error:
            gymdata.validate(write(tmp_path / "rows.json", row))
        assert f"its first row has the keys {', '.join(row)}" in str(error.value.hint)


def test_what_git_lfs_leaves_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    with pytest.raises(DataError, match="pointer of Git LFS"):
        gymdata.import_rollouts(file, tmp_path / "run")


@pytest.mark.parametrize("format", ["trl-messages", "trl-prompt-completion", "openai"])
def test_what_was_exported_is_read_again(format: str, tmp_path: Path) -> None:
    """Roles, texts and calls come back; ids are lost, as the export says."""
    sample = Path("sample_data/rollouts/clean.jsonl")
    gymdata.export(sample, tmp_path / "out.jsonl", format)
    before, after = to_rows(read_table(sample)), imported(tmp_path / "out.jsonl")
    fields = ("role", "content", "name")
    assert [[[m[f] or None for f in fields] for m in row["messages"]] for row in after] == [
        [[m[f] or None for f in fields] for m in row["messages"]] for row in before
    ]
    calls = [[json.loads(m["tool_calls"]) for m in row["messages"] if m["tool_calls"]] for row in after]
    assert [len(c) for c in calls] == [sum(bool(m["tool_calls"]) for m in row["messages"]) for row in before]


@pytest.mark.parametrize("format", ["trl-messages", "openai"])
def test_a_message_that_is_not_trained_has_the_weight_0_in_an_export(format: str, tmp_path: Path) -> None:
    """And only that one."""
    messages = [QUESTION, WRONG | {"weight": 0}, QUESTION, ANSWER]
    gymdata.import_rollouts(write(tmp_path / "in.jsonl", {"messages": messages}), tmp_path / "run")
    gymdata.export(tmp_path / "run", tmp_path / "out.jsonl", format)
    assert [m.get("weight") for m in lines(tmp_path / "out.jsonl")[0]["messages"]] == [None, 0, None, None]


def test_tasks_are_no_answers(tmp_path: Path) -> None:
    """Prompts, and conversations that end with the user, are for `collect`; a prompt with its answer only where answers are
    asked for (`import`, training)."""
    of_mt_bench = {"question_id": 81, "category": "math", "turns": ["How much is 2+3?", "Sure?"], "reference": ["5"]}
    of_gym = {"responses_create_params": {"input": [QUESTION]}, "expected_output": [[0]]}
    for row in ({"prompt": "How much is 2+3?", "level": "5"}, {"messages": [QUESTION]}, of_mt_bench, of_gym):
        with pytest.raises(DataError, match="of no known format") as error:
            gymdata.import_rollouts(write(tmp_path / "tasks.jsonl", row), tmp_path / "run")
        assert "gymdata collect" in str(error.value.hint)
        with pytest.raises(DataError, match="contains tasks, expected rollouts or pairs"):
            gymdata.validate(tmp_path / "tasks.jsonl")


def test_text_tables_are_read_as_rows_of_json(tmp_path: Path) -> None:
    """CSV as spreadsheets write it: a byte order mark, CRLF, line breaks in cells, labels and scores as text. A row of more
    cells than the header is left out by name."""
    table = b'\xef\xbb\xbfprompt,completion,label,score\r\n"a, ""b""\r\nc",2,FALSE,3.5\r\nd,e\r\nf,g,true,\r\n'
    (tmp_path / "rows.csv").write_bytes(table)
    summary = gymdata.import_rollouts(tmp_path / "rows.csv", tmp_path / "run")
    assert (summary.rollouts, summary.rejected) == (2, 1)
    (fault,) = lines(tmp_path / "run/rejected.jsonl")
    assert "2 cells, of 4" in fault["reason"]
    first, second = read_table(tmp_path / "run").to_pylist()
    assert [message["content"] for message in first["messages"]] == ['a, "b"\r\nc', "2"]
    assert (first["reward"], second["reward"]) == (3.5, 1.0)
    (tmp_path / "pairs.tsv").write_text("prompt\tchosen\trejected\nq\ta\tb\n")
    assert gymdata.import_rollouts(tmp_path / "pairs.tsv", tmp_path / "pairs").pairs == 1
    for name in ("tasks.csv", "tasks.TSV"):
        (tmp_path / name).write_text(f"prompt{',' if name == 'tasks.csv' else chr(9)}answer\n")
        with (tmp_path / name).open("a") as file:
            file.write("1+1,2\n" if name == "tasks.csv" else "1+1\t2\n")
        with pytest.raises(DataError, match=f"gymdata collect .*{name} -m MODEL -o RUN"):
            gymdata.validate(tmp_path / name)


@pytest.mark.parametrize(("suffix", "separator"), [("csv", b","), ("csv.gz", b";"), ("csv", b"\t"), ("tsv", b"\t")])
def test_a_text_table_is_divided_as_its_header_is(suffix: str, separator: bytes, tmp_path: Path) -> None:
    """Spreadsheets of many countries write semicolons; a table may be compressed."""
    file, text = tmp_path / f"rows.{suffix}", b"prompt" + separator + b'completion\n"1,5;\n2\t"' + separator + b"b\n"
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    (row,) = imported(file)
    assert [message["content"] for message in row["messages"]] == ["1,5;\n2\t", "b"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image> What is it?", "completion": "A cat."},
        {"prompt": "<image> What is it?", "chosen": "A cat.", "rejected": "A dog."},
    ],
)
def test_a_row_with_the_placeholder_of_an_image_and_no_image_is_warned_about(
    row: dict[str, Any], tmp_path: Path
) -> None:
    """With a column of images the row is left out by name."""
    rows = row, row | {"prompt": "Why?"}, row | {"images": ["cat.png"]}
    with pytest.warns(DataWarning, match="^1 row with <image> in the text: it is trained as text, without an image"):
        gymdata.import_rollouts(write(tmp_path / "rows.jsonl", *rows), tmp_path / "run")
    assert "images: images, audio and video are not trained" in (tmp_path / "run/rejected.jsonl").read_text()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "1+1?", "completions": ["Add.", "So 2."], "labels": [True, False]}, "keys prompt"),
        (
            {"prompt": "q", "initial_reason_steps": "1", "chosen": "a", "rejected": "b", "full_chosen": "c"},
            "keys prompt",
        ),
        ({"text": "How much is 2+3? 5"}, "text alone has no prompt and no answer to train"),
        ({"id": 1, "question": [[QUESTION]]}, "keys id, question"),
        ({"question": "What is it?", "image_path": "a.png"}, "keys question, image_path"),
    ],
)
def test_rows_that_only_look_like_tasks_or_pairs_are_unknown(row: Any, why: str, tmp_path: Path) -> None:
    """Steps of answers with a label each, pairs that continue an answer, text alone, and what is no prompt of text are not
    guessed, and not called tasks."""
    file = write(tmp_path / "rows.jsonl", row)
    for read in (gymdata.validate, lambda path: gymdata.import_rollouts(path, tmp_path / "run")):
        with pytest.raises(DataError, match="known format") as error:
            read(file)
        assert why in str(error.value.hint)
        assert "gymdata collect" not in str(error.value.hint)


def test_what_is_no_row_is_not_called_a_task(tmp_path: Path) -> None:
    pretraining = {"messages": [{"role": "pretrain", "content": "x"}]}
    for row, why in ((pretraining, "keys messages"), ("x", "its first value is text")):
        with pytest.raises(DataError, match="of no known format") as error:
            gymdata.import_rollouts(write(tmp_path / "odd.jsonl", row), tmp_path / "run")
        assert why in str(error.value.hint)
        assert "gymdata collect" not in str(error.value.hint)


def test_pairs_of_files_of_one_name_have_ids_of_their_own(tmp_path: Path) -> None:
    """Data sets have a train.jsonl in each of several folders: what stands at one place of them is not one pair."""
    files = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        row = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WRONG | {"content": f"{number}"}]}
        files.append(write(tmp_path / str(number) / "train.jsonl", row))
    gymdata.import_rollouts(files, tmp_path / "run")
    assert len(set(read_table(tmp_path / "run", PAIRS, ["pair_id"])["pair_id"].to_pylist())) == 2


def test_a_prompt_is_one_task_in_pairs_and_in_rollouts(tmp_path: Path) -> None:
    """Whatever letters it has."""
    prompt = [QUESTION | {"content": "Wie groß?"}]
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": prompt, "chosen": [ANSWER], "rejected": [WRONG]})
    rollouts = write(tmp_path / "rollouts.jsonl", {"messages": [*prompt, ANSWER]})
    gymdata.import_rollouts(pairs, tmp_path / "pairs")
    gymdata.import_rollouts(rollouts, tmp_path / "rollouts")
    tasks = [
        read_table(tmp_path / name, table, ["task_id"]) for name, table in (("pairs", PAIRS), ("rollouts", ROLLOUTS))
    ]
    assert tasks[0].to_pylist() == tasks[1].to_pylist()
