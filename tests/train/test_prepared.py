"""What is trained, prepared in files part by part: the sequences of the whole table, made again when that was cut short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.train.prepared import PREPARED, ROWS, opened, prepare
from gymdata.commands.train.settings import TRAINERS, TrainRlConfig, TrainValueConfig
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.store import read_table
from tests.rollout_files import experiences, rollout, two_turns, write_run, write_table

SAMPLE = Path(__file__).parents[2] / "sample_data" / "rollouts" / "clean.jsonl"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What each trainer reads."""
    folder = tmp_path_factory.mktemp("sources")
    assert main(["pairs", str(SAMPLE), "-o", str(folder / "pairs")]) == 0
    assert main(["experience", str(SAMPLE), "-o", str(folder / "experiences")]) == 0
    assert main(["experience", str(SAMPLE), "--estimator", "gae", "-o", str(folder / "returns")]) == 0
    built = {"dpo": "pairs", "reward": "pairs", "rl": "experiences", "value": "returns"}
    return {name: folder / built[name] if name in built else SAMPLE for name in TRAINERS}


def config_of(algorithm: str, **settings: Any) -> Any:
    return TRAINERS[algorithm].load(None, {"model": "model", "output": "out", **settings})


def one_part(config: Any, source: str) -> Any:
    (data,) = config.parts(source, 1_000_000)
    return data


def plain(data: Any) -> Any:
    """All that data holds, as Python has it, in memory or mapped."""
    columns = sorted(name for name in data.table.column_names if name != "row")
    return data.table.select(columns).to_pylist(), data.facts, data.heldout and plain(data.heldout)


@pytest.mark.parametrize("rows", [3, 1000])
@pytest.mark.parametrize("algorithm", TRAINERS)
def test_prepared_files_are_the_sequences_of_the_table(
    algorithm: str, rows: int, sources: dict[str, Path], tmp_path: Path
) -> None:
    """In parts of any size: ids, masks, numbers beside them, names, counts, checksums and costs of the whole table."""
    config, source = config_of(algorithm, max_length=60), str(sources[algorithm])
    whole = one_part(config, source)
    found = prepare(tmp_path / "data", config.parts(source, rows))
    assert plain(found) == plain(whole)
    assert found.trained() == whole.trained()
    assert found.read_by_loss == whole.read_by_loss == [n for n in found.due if n not in ("input_ids", "context_ids")]
    assert set(found.read_by_loss) <= set(found.table.column_names)
    assert found.counts == whole.counts
    assert found.numbers("row").tolist() == list(range(len(whole)))
    every = np.arange(len(whole))
    assert found.rollouts_of(every) == whole.rollouts_of(every)
    assert (
        not found.lists("input_ids").values.flags.writeable or rows == 3
    )  # the lists of several parts are put together


RL: Any = TrainRlConfig.load(None, {"model": "model", "output": "out"})


def test_a_column_that_one_row_lacks_is_in_none(tmp_path: Path) -> None:
    """ref_logprobs of all rows but one are no reference, whichever part that row is in; of all rows they are kept."""
    given = {"ref_logprobs": [0.0, -2.0, -2.0]}
    source = experiences(tmp_path, [given, given, {}, given])
    assert "ref_logprobs" not in prepare(tmp_path / "three", RL.parts(source, 1)).read_by_loss
    source = experiences(tmp_path, [given, given, given])
    assert prepare(tmp_path / "all", RL.parts(source, 1)).lists("ref_logprobs")[2].tolist() == [0.0, -2.0, -2.0]


def test_parts_without_a_trained_token_say_nothing_of_columns(tmp_path: Path) -> None:
    """A first and a last part of which nothing is trained: the weights of the part between them are there."""
    weight = {"rl_weight": [0.0, 0.0, 0.0]}
    source = experiences(tmp_path, [{"loss_mask": [0, 0, 0], **weight}, {"rl_weight": [0.0, 1.0, 2.0]},
                                    {"loss_mask": [0, 0, 0], **weight}])  # fmt: skip
    found = prepare(tmp_path / "data", RL.parts(source, 1))
    assert found.table["rl_weight"].to_pylist() == [[0.0, 1.0, 2.0]]
    assert (found.facts.cost.rows, list(found.facts.cost.nothing_trained)) == (3, ["r0/0", "r2/0"])
    assert found.facts.policy_hashes == {"policy-0", "policy-1"}


def test_what_only_the_whole_file_shows_is_refused(tmp_path: Path) -> None:
    """In parts of one row: a sequence that is there twice, a weight that 2 of 3 rows have, the number of a bad row."""
    source = experiences(tmp_path, [{}, {}, {"rollout_id": "r0"}])
    with pytest.raises(DataError, match="duplicate experience r0/0"):
        prepare(tmp_path / "data", RL.parts(source, 1))
    given = {"ce_weight": [0.0, 1.0, 1.0]}
    for rows in ([given, given, {}], [{}, given, given]):
        with pytest.raises(DataError, match="ce_weight is missing in 1 of 3 rows"):
            prepare(tmp_path / "data", RL.parts(experiences(tmp_path, rows), 1))
    with pytest.raises(RefusedError, match=r"row 2 \(r2/0\): advantages has 1 entries"):
        prepare(tmp_path / "data", RL.parts(experiences(tmp_path, [{}, {}, {"advantages": [1.0]}]), 1))


def test_pairs_and_rollouts_that_are_there_twice_are_refused_across_parts(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    """The same row in two parts of one row is found as it is in one table."""
    for algorithm, table, name, says in (
        ("dpo", PAIRS, "pairs.parquet", r"duplicate pair \w+"),
        ("sft", ROLLOUTS, "rollouts.parquet", r"duplicate rollout \w+"),
    ):
        rows = read_table(sources[algorithm], table)
        file = write_table(pa.concat_tables([rows.slice(0, 3), rows.slice(1, 1)]), tmp_path / name, table)
        config = config_of(algorithm, **({"select": "all"} if algorithm == "sft" else {}))
        with pytest.raises(DataError, match=says):
            prepare(tmp_path / "data", config.parts(str(file), 1))


@pytest.mark.parametrize("algorithm", ["sft", "kto"])
def test_what_is_trained_once_is_so_across_parts(algorithm: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Rollouts with the ids of another one, in other parts: left out and counted as of the whole table, or all kept."""
    rows = read_table(sources[algorithm], ROLLOUTS)
    names = pa.array([f"copy-{i}" for i in range(len(rows))])
    copies = rows.set_column(rows.column_names.index("rollout_id"), rows.schema.field("rollout_id"), names)
    source = str(write_table(pa.concat_tables([rows, copies]), tmp_path / "rollouts.parquet", ROLLOUTS))
    for settings in ({}, {"keep_duplicates": True}):
        config = config_of(algorithm, **settings, **({"select": "all"} if algorithm == "sft" else {}))
        whole = one_part(config, source)
        found = prepare(tmp_path / f"data-{len(settings)}", config.parts(source, 4))
        assert plain(found) == plain(whole)
        assert (found.counts["left_out_duplicate"] >= len(found)) == (not settings)


@pytest.mark.parametrize("algorithm", ["sft", "kto"])
def test_rollouts_that_were_scored_later_are_trained_by_those_scores(tmp_path: Path, algorithm: str) -> None:
    """Without a reward the refusal names the score that has values, and --reward chooses by it, in parts as whole."""
    run = write_run(tmp_path / "run", [rollout("t", k, None, two_turns(4, 20 + k)) for k in range(3)])
    with pytest.raises(RefusedError, match=r"gymdata score .*--reward NAME"):
        list(config_of(algorithm).parts(str(run)))

    def second(completion_ids: list[list[int]]) -> list[float]:
        return [float(21 in ids) for ids in completion_ids]

    made = gymdata.score(run, reward=second)
    with pytest.raises(RefusedError, match="has values: --reward second"):
        list(config_of(algorithm).parts(str(run)))
    config = config_of(algorithm, reward="second")
    assert config.scored_by(str(run)) == [Path(made.path)]
    found = prepare(tmp_path / "data", config.parts(str(run), 2))
    assert plain(found) == plain(one_part(config, str(run)))
    assert list(found.rollout_ids) == (["t-1"] if algorithm == "sft" else ["t-0", "t-1", "t-2"])
    with pytest.raises(UsageError, match=r"reward=: got 'third', not a score of these rollouts[^$]*second"):
        list(config_of(algorithm, reward="third").parts(str(run)))


def test_an_agent_or_a_model_that_no_rollout_has_is_refused_in_parts(sources: dict[str, Path], tmp_path: Path) -> None:
    """As of the whole table: the agents and models that are there are named."""
    for settings, says in (({"target_agents": ["judge"]}, "no turn is of agent judge"),
                           ({"target_model": "other"}, "no rollout is of model other")):  # fmt: skip
        with pytest.raises(RefusedError, match=says):
            prepare(tmp_path / "data", config_of("sft", **settings).parts(str(sources["sft"]), 4))


def test_held_out_tasks_are_those_of_the_whole_file(tmp_path: Path) -> None:
    """A part of which all rows are held out, or none, changes neither side."""
    source = experiences(tmp_path, [{"values": [0.0, 0.5, 0.5]} for _ in range(8)])
    config: Any = TrainValueConfig.load(None, {"model": "model", "output": "out", "split": 0.4, "value_clip": 0.2})
    whole = one_part(config, source)
    found = prepare(tmp_path / "data", config.parts(source, 2))
    assert len(set(found.heldout.tasks)) == 2
    assert plain(found) == plain(whole)
    lacking = experiences(tmp_path, [{"values": [0.0, 0.5, 0.5]}, {}] * 4)
    with pytest.raises(UsageError, match="--value-clip needs the values"):
        prepare(tmp_path / "none", config.parts(lacking, 2))


def test_another_process_opens_what_was_prepared(sources: dict[str, Path], tmp_path: Path) -> None:
    """An earlier preparation is replaced, and an incomplete one is refused."""
    data = tmp_path / "data"
    data.mkdir()
    (data / ROWS).write_bytes(b"half")
    with pytest.raises(StoreError, match="is not complete"):
        opened(data)
    (data / PREPARED).touch()
    with pytest.raises(StoreError, match="is not complete"):
        opened(data)
    for algorithm in TRAINERS:
        prepared = prepare(data, config_of(algorithm).parts(str(sources[algorithm]), 4))
        assert plain(opened(data)) == plain(prepared)


def test_the_count_of_the_file_is_not_that_of_the_prepared_ids(tmp_path: Path) -> None:
    """An id that was written wrong does not change what the file is known to hold."""
    data = tmp_path / "data"
    expected = prepare(data, RL.parts(experiences(tmp_path, [{}, {}]))).trained()
    written, ids = (data / ROWS).read_bytes(), np.array([5, 6, 7, 5, 6, 8], "<i4").tobytes()
    assert written.count(ids) == 1
    (data / ROWS).write_bytes(written.replace(ids, np.array([5, 6, 9, 5, 6, 8], "<i4").tobytes()))
    found = opened(data)
    assert (found.lists("input_ids")[0].tolist(), found.trained()) == ([5, 6, 9], expected)


def test_the_file_is_a_dataset_of_rows(sources: dict[str, Path], tmp_path: Path) -> None:
    """datasets maps it: one row per pair, what it has of each side in a list of two, and what is due of it."""
    from datasets import Dataset

    found = prepare(tmp_path / "data", config_of("dpo").parts(str(sources["dpo"]), 4))
    rows = Dataset.from_file(str(tmp_path / "data" / ROWS))
    assert len(rows) == len(found) > 4
    assert (rows[4]["row"], rows[4]["name"]) == (4, found.table["name"][4].as_py())
    assert rows[4]["input_ids"] == [found.lists("input_ids")[k].tolist() for k in (8, 9)]
    assert rows[4]["due.input_ids"] == found.due["input_ids"][4]
