"""Import and export: every row is accounted for, odd shapes are read, formats say what they lose."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.import_export.run import import_rollouts
from gymdata.errors import DataError, StoreError, UsageError
from gymdata.formats import exported as exported_formats
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.store import read_run_json, read_table
from tests.formats.trajectories import lines, through_a_run
from tests.rollout_files import rollout, two_turns, write_run
from tests.validate.generate import nemo_rows, with_ids, write_lines

SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "<think>a</think>b"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def bare(output: list[Any], **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": "q"}, "response": {"output": output}, "reward": 1.0} | more


#: Shapes that real files have: each is a rollout.
ODD = {
    "no reward": {"responses_create_params": {"input": "q"}, "response": {"output": [SAID]}},
    "no params": {"response": {"output": [SAID]}, "reward": -100},
    "input missing": bare([SAID], responses_create_params={}),
    "input empty": bare([SAID], responses_create_params={"input": []}),
    "content as text": bare([{"role": "assistant", "content": "x"}]),
    "user inside output": bare([SAID, {"role": "user", "content": "more"}, {"role": "system", "content": "s"}, SAID]),
    "call without output": bare([CALL]),
    "ends with reasoning": bare([SAID, {"type": "reasoning", "summary": []}]),
    "ends with tool output": bare([CALL, {"type": "function_call_output", "call_id": "c", "output": "r"}]),
    "nested output": bare([[CALL], [[SAID]]]),
    "empty output": bare([]),
    "null ids": bare([SAID | {"prompt_token_ids": None, "generation_token_ids": None}]),
    "empty ids": bare([SAID | {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []}]),
    "reward 19.4": bare([SAID], reward=19.4),
    "NaN in a field": bare([SAID], score=float("nan")),
}
#: Lines that are no rollouts, with their codes.
BAD: dict[str, tuple[Any, str]] = {
    "placeholder": ("<PLACEHOLDER ROW>", "S101"),
    "cut off": ('{"response": {"output": [', "S101"),
    "a list": ([1], "S101"),
    "no response": ({"responses_create_params": {"input": "q"}, "reward": 1}, "S103"),
    "null response": ({"responses_create_params": {}, "response": None}, "S103"),
    "twice the key": ('{"response": {"output": []}, "response": {"output": []}}', "S102"),
    "ids as text": (bare([SAID | {"prompt_token_ids": ["1"], "generation_token_ids": [2]}]), "S102"),
    "id beyond 32 bits": (bare([SAID | {"prompt_token_ids": [2**31], "generation_token_ids": [2]}]), "S102"),
    "lone surrogate": ('{"response": {"output": []}, "x": "\\ud800"}', "S101"),
}


def test_odd_shapes_are_imported_and_come_back(tmp_path: Path) -> None:
    """Each shape becomes a rollout without token data; exported and imported again, it says the same."""
    source = write_lines(tmp_path / "odd.jsonl", list(ODD.values()))
    summary, _ = through_a_run(source, "nemo-gym")
    assert (summary.rollouts, summary.rejected, summary.without_token_data) == (len(ODD), 0, len(ODD))
    assert summary.without_reward == 1
    again = import_rollouts(tmp_path / "back.jsonl", tmp_path / "again")
    assert (again.rollouts, again.without_reward) == (len(ODD), 1)
    rows, back = (read_table(tmp_path / name).to_pylist() for name in ("run", "again"))
    for name in ("rollout_id", "group_id", "rollout_index", "reward", "status"):
        assert [row[name] for row in back] == [row[name] for row in rows]
    texts = [[[m["content"] or "" for m in row["messages"]] for row in of] for of in (rows, back)]
    assert texts[0] == texts[1]


def test_bad_rows_are_named_and_no_good_one_is_lost(tmp_path: Path) -> None:
    """Good rows between bad ones are imported; rejected.jsonl has every bad line, its code, reason and beginning."""
    good = nemo_rows(n=len(BAD) + 1)
    rows = [good[0]]
    for (bad, _), row in zip(BAD.values(), good[1:], strict=True):
        rows += [bad, row]
    summary = import_rollouts(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert (summary.rows_in, summary.rollouts, summary.rejected) == (len(rows), len(good), len(BAD))
    rejected = lines(tmp_path / "run" / "rejected.jsonl")
    assert [(r["line"], r["code"]) for r in rejected] == [(2 * i + 2, code) for i, (_, code) in enumerate(BAD.values())]
    assert all(r["reason"] and r["text"] for r in rejected)
    assert summary.turns == 4 * len(good) == sum(read_table(tmp_path / "run")["n_turns"].to_pylist())


def test_an_import_is_its_rollouts_and_no_others(tmp_path: Path) -> None:
    """Without its rejected.jsonl, which holds none, it is read as before; with a part of another run it is refused."""
    source = write_lines(tmp_path / "a.jsonl", [*nemo_rows(n=2), {"no": "row"}])
    run, other = tmp_path / "run", tmp_path / "other"
    assert import_rollouts(source, run).rejected == 1
    (run / "rejected.jsonl").unlink()
    assert read_table(run).num_rows == 2
    import_rollouts(write_lines(tmp_path / "b.jsonl", nemo_rows(n=3)), other)
    (other / "rollouts" / "part-00000.parquet").rename(run / "rollouts" / "part-00001.parquet")
    with pytest.raises(DataError, match=r"part-00001\.parquet: is not among the files of"):
        read_table(run)


def test_importing_again_does_nothing_and_other_files_are_refused(tmp_path: Path) -> None:
    """The same files give the same run once, in which validate finds nothing; other files are another run."""
    first, other = (write_lines(tmp_path / f"{n}.jsonl", nemo_rows(n=n)) for n in (4, 6))
    for _ in range(2):
        assert import_rollouts(first, tmp_path / "run").rollouts == 4
        assert read_table(tmp_path / "run").num_rows == 4
    assert gymdata.validate(tmp_path / "run").violations == []
    with pytest.raises(StoreError, match=r"run: was imported from .*4\.jsonl, got .*6\.jsonl") as refused:
        import_rollouts(other, tmp_path / "run")
    assert refused.value.hint == "overwrite=True replaces it; another output folder keeps both"
    assert import_rollouts(other, tmp_path / "run", overwrite=True).rollouts == 6
    assert read_table(tmp_path / "run").num_rows == 6
    assert read_run_json(tmp_path / "run")["counts"]["rollouts"] == 6


def test_an_import_of_a_file_that_changed_names_the_file(tmp_path: Path) -> None:
    first, second = (write_lines(tmp_path / f"{n}.jsonl", nemo_rows(n=n)) for n in (2, 3))
    import_rollouts([first, second], tmp_path / "run")
    write_lines(second, nemo_rows(n=4))
    with pytest.raises(StoreError, match=r"run: was imported before \S+/3\.jsonl changed") as refused:
        import_rollouts([first, second], tmp_path / "run")
    assert refused.value.hint == "overwrite=True replaces it; another output folder keeps both"


def test_an_import_is_in_the_file_format_that_was_asked_for(tmp_path: Path) -> None:
    """Rollouts and pairs; in another one it is another import."""
    texts = write_lines(tmp_path / "a.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    for file, table, name in (
        (write_lines(tmp_path / "b.jsonl", nemo_rows(n=2)), ROLLOUTS, "rollouts/part-00000.jsonl"),
        (texts, PAIRS, "pairs.jsonl"),
    ):
        run = tmp_path / table.name
        import_rollouts(file, run)
        with pytest.raises(StoreError, match="format: run has 'parquet', now 'jsonl'"):
            import_rollouts(file, run, format="jsonl")
        rows = read_table(run, table).num_rows
        import_rollouts(file, run, format="jsonl", overwrite=True)
        assert (run / name).is_file()
        assert read_table(run, table).num_rows == rows


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.json"])
def test_an_import_is_a_folder_and_not_called_as_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"-o: got 'runs/{name}', expected the name of a folder"):
        import_rollouts(write_lines(tmp_path / "b.jsonl", nemo_rows(n=2)), f"runs/{name}")
    assert not (tmp_path / "runs").exists()


def test_the_tokens_of_an_import_are_counted(tmp_path: Path) -> None:
    """As the columns of its rollouts have them; of pairs those of the masks."""
    summary = import_rollouts(write_lines(tmp_path / "b.jsonl", nemo_rows(n=3)), tmp_path / "run")
    rollouts = read_table(tmp_path / "run")
    columns = [sum(rollouts[name].to_pylist()) for name in ("n_generated_tokens", "n_context_tokens")]
    assert [summary.tokens_generated, summary.tokens_context] == columns
    assert min(columns) > 0
    rows = [rollout("a", n, float(n), [([1, 2, 5], [n, 3])]) for n in range(2)]
    gymdata.pairs(write_run(tmp_path / "sampled", rows), output=tmp_path / "made")
    gymdata.export(tmp_path / "made", tmp_path / "items.jsonl", "nat-dpo-items")
    again = import_rollouts(tmp_path / "items.jsonl", tmp_path / "pairs")
    assert (again.tokens_generated, again.tokens_context) == (4, 3)


def test_a_format_that_is_none_is_refused_by_where_all_are_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        gymdata.export(run, tmp_path / "x.jsonl", "opnai")
    assert refused.value.hint == "did you mean 'openai'?; `gymdata docs your-data` lists all"
    with pytest.raises(UsageError) as refused:
        import_rollouts(tmp_path / "x.jsonl", tmp_path / "run", source="zzz")
    assert refused.value.hint == "`gymdata docs your-data` lists all"


def test_what_is_no_file_of_the_kind_is_refused(tmp_path: Path) -> None:
    """A missing file, an empty one, and rows of gymdata."""
    with pytest.raises(DataError, match="no such file"):
        import_rollouts(tmp_path / "none.jsonl", tmp_path / "run")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="empty"):
        import_rollouts(tmp_path / "empty.jsonl", tmp_path / "run")
    with pytest.raises(DataError, match="expected one that `gymdata docs your-data` lists"):
        import_rollouts(write_lines(tmp_path / "b.jsonl", [{"a": 1}]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_read_paths_take_foreign_files(tmp_path: Path) -> None:
    """load_rollouts, query, pairs and validate take a NeMo Gym file, compressed as well, without an import."""
    rows = nemo_rows(n=6)
    path = write_lines(tmp_path / "a.jsonl", rows)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for source in (path, packed):
        table = gymdata.load_rollouts(source)
        expanded = gymdata.expand_turns(table)["turns"].to_pylist()
        assert [t["prompt_token_ids"] for t in expanded[2]] == [
            with_ids(rows[2], k)["prompt_token_ids"] for k in range(4)
        ]
        assert gymdata.query("SELECT count(*) AS n, sum(n_turns) AS t FROM rollouts", source).to_pylist() == [
            {"n": 6, "t": 24}
        ]
    assert gymdata.pairs(path, write=False).counts.groups == 3
    assert gymdata.validate(path).ok


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two collected rollouts with a tool call, reasoning and a role that OpenAI lacks; a third without an answer."""
    call = [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": json.dumps(call), "turn": 0},
        {"role": "tool", "content": "r", "tool_call_id": "c0"},
        {"role": "environment", "content": "e"},
        {"role": "assistant", "content": "done", "turn": 1},
    ]
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    task = json.dumps({"task_id": "t", "answer": "42"})
    rows = [
        rollout(
            "t", i, float(i), two_turns(5, 20 + i), messages=[*messages[:-1], messages[-1] | {"content": f"done {i}"}]
        )
        | {"task": task, "tools": tools}
        for i in (0, 1)
    ]
    rows.append(rollout("u", 0, None, [], messages=messages[:2]))
    return write_run(tmp_path / "run", rows)


def test_collected_rollouts_become_nemo_gym_rows(run: Path, tmp_path: Path) -> None:
    """Messages become items, whole prompts stand on the item that ends a call, and importing gives the turns back."""
    summary = gymdata.export(run, tmp_path / "a.jsonl", "nemo-gym")
    assert (summary.rows_out, summary.turns, summary.turns_lost, summary.lost) == (3, 4, 0, {})
    made = lines(tmp_path / "a.jsonl")
    assert [i["type"] for i in made[0]["response"]["output"]] == [
        "reasoning", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip
    assert made[0]["response"]["output"][1]["prompt_token_ids"] == [1, 5]
    assert with_ids(made[1], 1)["prompt_token_ids"] == [1, 5, 10, 11, 2, 30, 31]
    assert import_rollouts(tmp_path / "a.jsonl", tmp_path / "back").rollouts == 3
    before, after = read_table(run).to_pylist(), read_table(tmp_path / "back").to_pylist()
    for name in ("rollout_id", "turns", "messages", "reward", "group_id", "n_turns", "temperature"):
        assert [r[name] for r in before[:2]] == [r[name] for r in after[:2]]


def test_a_turn_that_no_message_names_is_told(tmp_path: Path) -> None:
    """Turns without a message cannot be placed; the summary counts them."""
    row = rollout("t", 0, 1.0, two_turns(1, 2), messages=[{"role": "assistant", "content": "x", "turn": 1}])
    summary = gymdata.export(write_run(tmp_path / "run", [row]), tmp_path / "a.jsonl", "nemo-gym")
    assert (summary.turns, summary.turns_lost) == (2, 1)
    assert summary.lost == {"turns that no message names": 1}


def test_verl_rows(run: Path, tmp_path: Path) -> None:
    """verl's Parquet has the first prompt and the task's answer."""
    gymdata.export(run, tmp_path / "a.parquet", "verl")
    first = pq.read_table(tmp_path / "a.parquet").to_pylist()[0]
    assert first["prompt"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "42"}
    kinds = {f.name: str(f.type) for f in pq.read_schema(tmp_path / "a.parquet").field("extra_info").type}
    assert (kinds["index"], kinds["reward"], kinds["task"]) == ("int64", "double", "string")


def test_preferences_come_from_pairs(run: Path, tmp_path: Path) -> None:
    """A run that holds pairs gives prompt, chosen and rejected; one that holds none is refused."""
    with pytest.raises(DataError):
        gymdata.export(run, tmp_path / "a.jsonl", "trl-preference")
    gymdata.pairs(run)
    assert gymdata.export(run, tmp_path / "a.jsonl", "trl-preference").rows_out == 1
    (pair,) = lines(tmp_path / "a.jsonl")
    assert pair["prompt"][-1] == {"role": "user", "content": "q"}
    assert pair["chosen"][-1]["content"] == "done 1"
    assert pair["margin"] == 1.0


def test_outputs_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    """An existing file and a wrong suffix are refused."""
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(StoreError, match="exists"):
        gymdata.export(run, tmp_path / "a.jsonl", "openai")
    with pytest.raises(UsageError, match="verl"):
        gymdata.export(run, tmp_path / "b.jsonl", "verl")
    assert (tmp_path / "a.jsonl").read_text() == "mine"


def test_the_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """import exits 1 when rows were rejected and says where they are; export tells losses on stderr and in --json."""
    source = write_lines(tmp_path / "a.jsonl", [*nemo_rows(n=2), "no row"])
    assert main(["import", str(source), "-o", str(tmp_path / "in"), "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["rejected"] == 1
    assert "rejected.jsonl" in said.err
    for name, form in exported_formats().items():
        if form.table == "rollouts" and ".jsonl" in form.suffixes:
            out = tmp_path / f"{name}.jsonl"
            assert main(["export", str(run), "--format", name, "-o", str(out), "--json"]) == 0
            said = capsys.readouterr()
            assert json.loads(said.out)["output"] == str(out)
            assert ("token ids" in said.err) is not form.holds_ids


def test_an_export_without_a_row_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When the format can hold none of the rollouts, the command says why and ends with 1, as `filter` does."""
    silent = write_run(tmp_path / "run", [rollout("a", 0, 1.0, [], messages=[{"role": "user", "content": "q"}])])
    assert main(["export", str(silent), "--format", "openai", "-o", str(tmp_path / "a.jsonl")]) == 1
    said = capsys.readouterr()
    assert "lost: rollouts without an assistant message" in said.out
    assert said.err == ""
    assert "left out" in said.out


@pytest.mark.parametrize("name", ["nemo-gym", "trl-preference"])
def test_an_import_without_rows_is_not_exported(tmp_path: Path, name: str) -> None:
    """The error says that there are 0 rows and where the rejected ones are; nothing is written."""
    (tmp_path / "bad.jsonl").write_text('{"responses_create_params": {"input": []}, "response": {"output": 5}}\n')
    assert import_rollouts(tmp_path / "bad.jsonl", tmp_path / "run", source="nemo-gym").rejected == 1
    with pytest.raises(DataError, match=r"got 0 (rollouts|pairs), expected at least 1 to export") as refused:
        gymdata.export(tmp_path / "run", tmp_path / "out.jsonl", name)
    assert "rejected.jsonl" in str(refused.value.hint)
    assert not list(tmp_path.glob("out*"))


def test_an_import_of_nothing_is_no_success(tmp_path: Path) -> None:
    """A file of blank lines gives an empty run and exit code 1, as for validate and export."""
    (tmp_path / "blank.jsonl").write_text("\n \n")
    made = gymdata.import_rollouts(tmp_path / "blank.jsonl", tmp_path / "run", source="nemo-gym")
    assert (made.rows_in, made.ok, made.exit_code) == (0, False, 1)
