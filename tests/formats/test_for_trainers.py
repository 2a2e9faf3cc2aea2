"""Exports for other trainers, each line as a literal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.errors import RefusedError
from gymdata.formats import exported
from gymdata.formats.input_ids import MESSAGES, NO_TOKENS, RENDERED
from gymdata.formats.nat_pairs import NO_MARGIN
from gymdata.formats.text.export import EMPTY, LOG_PROBS
from gymdata.formats.text.export import TOOLS as GIVEN_TOOLS
from gymdata.formats.trl import ABOVE_1, UNLABELLED
from gymdata.formats.verl import WITH_TOOLS
from gymdata.rollouts.schema import EXPERIENCES, PAIRS, ROLLOUTS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.definition import sequences
from tests.formats.trajectories import imported, lines
from tests.rollout_files import BREAK, SHAPES, rollout, two_turns, write_run, write_table

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_rewards_become_labels_of_kto_and_come_back_as_rewards(tmp_path: Path) -> None:
    """Above 0.5 desirable, below it not; on it, and without a reward, a rollout has no label and is left out by name."""
    rewards = [1.0, 0.0, 0.5, None, -3.0]
    rows = [rollout("a", n, reward, [([1, 2], [n, 3])], tools=json.dumps(TOOLS)) for n, reward in enumerate(rewards)]
    silent = rollout("a", 5, 1.0, [], messages=[{"role": "user", "content": "question a"}])
    done = gymdata.export(write_run(tmp_path / "run", [*rows, silent]), tmp_path / "kto.jsonl", "trl-kto")
    assert (done.rows_out, done.skipped) == (3, 3)
    assert done.lost[UNLABELLED] == 2
    assert done.account["rewards"] == {"read": 5, "written": 0, "lost": 5}
    prompt = [{"role": "user", "content": "question a"}]
    assert lines(tmp_path / "kto.jsonl") == [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": said}], "tools": TOOLS, "label": label}
        for said, label in (("0 3", True), ("1 3", False), ("4 3", False))
    ]
    back = imported(tmp_path / "kto.jsonl")
    assert [(row["reward"], row["rewards"], json.loads(row["tools"])) for row in back] == [
        (value, {"label": value}, TOOLS) for value in (1.0, 0.0, 0.0)
    ]


def test_labels_are_of_the_score_that_is_named(tmp_path: Path) -> None:
    row = rollout("a", 0, 1.0, two_turns(5, 40), rewards=[{"name": "style", "value": 0.25}])
    gymdata.export(write_run(tmp_path / "run", [row]), tmp_path / "kto.jsonl", "trl-kto", reward="style")
    (line,) = lines(tmp_path / "kto.jsonl")
    assert line["label"] is False
    assert [message["role"] for message in line["completion"]] == ["assistant", "tool", "assistant"]


def test_scores_above_1_are_told_to_have_the_label_of_a_half(tmp_path: Path) -> None:
    rows = [rollout("a", n, reward, two_turns(5, 40)) for n, reward in enumerate((1.0, 3.0, 8.5))]
    done = gymdata.export(write_run(tmp_path / "run", rows), tmp_path / "kto.jsonl", "trl-kto")
    assert (done.rows_out, done.lost[ABOVE_1]) == (3, 2)


#: Two turns in one sequence, a break that makes two, no tokens, and nothing sampled.
CUT = [two_turns(5, 40), BREAK, [], [([1, 2], [])]]
LABELS = [
    {"input_ids": [1, 5, 10, 11, 2, 30, 31, 40, 2], "labels": [-100, -100, 10, 11, 2, -100, -100, 40, 2]},
    {"input_ids": [1, 5, 10, 2, 7, 11, 2], "labels": [-100, -100, 10, 2, -100, 11, 2]},
    {"input_ids": [1, 6, 9, 12, 13], "labels": [-100, -100, -100, 12, 13]},
]


def test_input_ids_and_labels_are_the_exact_ids_and_the_mask(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [rollout("a", n, 1.0, calls) for n, calls in enumerate(CUT)])
    done = gymdata.export(run, tmp_path / "ids.jsonl", "input-ids-labels")
    assert lines(tmp_path / "ids.jsonl") == [row | {"attention_mask": [1] * len(row["input_ids"])} for row in LABELS]
    assert (done.rows_out, done.skipped) == (3, 2)
    assert done.lost == {NO_TOKENS: 2, LOG_PROBS: 2, MESSAGES: 2}


def test_a_sequence_of_skyrl_has_its_ids_and_its_whole_mask(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [rollout("a", n, 1.0, calls) for n, calls in enumerate(CUT)])
    gymdata.export(run, tmp_path / "ids.jsonl", "skyrl-pretokenized")
    assert lines(tmp_path / "ids.jsonl") == [
        {"input_ids": row["input_ids"], "loss_mask": [int(label != -100) for label in row["labels"]]} for row in LABELS
    ]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["input-ids-labels", "skyrl-pretokenized"])
def test_data_sets_load_what_was_sampled_whatever_its_shape(name: str, tmp_path: Path) -> None:
    """HF datasets reads columns of equal types; the tokens with a label are those of the mask, literally."""
    from datasets import load_dataset

    run = write_run(tmp_path / "run", [rollout("a", n, None, calls) for n, calls in enumerate(SHAPES)])
    gymdata.export(run, tmp_path / "ids.jsonl", name)
    cache = str(tmp_path / "cache")
    loaded = load_dataset("json", data_files=str(tmp_path / "ids.jsonl"), split="train", cache_dir=cache)
    made = [one for row in to_rows(read_table(run, ROLLOUTS)) for one in sequences(row["turns"], "drop")]
    made = [one for one in made if one.loss_mask[1:].any()]
    assert loaded["input_ids"][:] == [one.input_ids.tolist() for one in made]
    masks = [one.loss_mask.tolist() for one in made]
    if name == "skyrl-pretokenized":
        assert loaded["loss_mask"][:] == masks
    else:
        assert [[int(label != -100) for label in row] for row in loaded["labels"]] == masks
        assert set(loaded.column_names) == {"input_ids", "attention_mask", "labels"}


#: Exports that are one value, of all rows.
WHOLE = ("nat-trajectories", "nat-dpo-items")


@pytest.mark.torch
@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in exported() if name != "verl-skip"])  # a batch, no data set
def test_data_sets_load_every_export(name: str, tmp_path: Path) -> None:
    """Other trainers read files with HF datasets: each row of an export is one there."""
    from datasets import load_dataset

    form = exported()[name]
    run = write_run(tmp_path / "run", [rollout("a", n, float(n), [([1, 2], [n, 3])]) for n in range(2)])
    gymdata.pairs(run, strategy="all")
    gymdata.experience(run, estimator="rloo")
    file = tmp_path / f"out{form.suffixes[0]}"
    done = gymdata.export(run, file, name)
    assert (done.rows_out, done.skipped) == (1 if form.table == "pairs" else 2, 0)
    kind = "parquet" if file.suffix == ".parquet" else "json"
    loaded = load_dataset(kind, data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == (1 if name in WHOLE else done.rows_out)


def test_that_ids_were_rendered_is_told(tmp_path: Path) -> None:
    row = rollout("a", 0, 1.0, [([1, 2], [3, 4])])
    row["turns"][0]["rendered"] = True
    done = gymdata.export(write_run(tmp_path / "run", [row]), tmp_path / "ids.jsonl", "input-ids-labels")
    assert (done.rows_out, done.lost[RENDERED]) == (1, 1)


def tensor(values: list[Any], dtype: str = "float32") -> dict[str, Any]:
    return {"data": values, "dtype": dtype, "shape": [len(values)]}


def test_a_datum_of_tinker_predicts_the_token_after_each_position(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, two_turns(5, 40))])
    gymdata.export(run, tmp_path / "sft.jsonl", "tinker-sft")
    assert lines(tmp_path / "sft.jsonl") == [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 5, 10, 11, 2, 30, 31, 40]}]},
            "loss_fn_inputs": {
                "target_tokens": tensor([5, 10, 11, 2, 30, 31, 40, 2], "int64"),
                "weights": tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]),
            },
        }
    ]


def test_advantages_of_tinker_are_those_of_experiences(tmp_path: Path) -> None:
    """Of two rewards of a group, RLOO gives each its distance to the other; what was not sampled has 0 everywhere."""
    run = write_run(tmp_path / "run", [rollout("a", n, float(n), two_turns(5, 40 + n)) for n in range(2)])
    gymdata.experience(run, output=tmp_path / "experience", estimator="rloo")
    done = gymdata.export(tmp_path / "experience", tmp_path / "rl.jsonl", "tinker-rl")
    assert (done.rows_out, done.lost) == (2, {})
    first, second = lines(tmp_path / "rl.jsonl")
    assert second == {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 5, 10, 11, 2, 30, 31, 41]}]},
        "loss_fn_inputs": {
            "target_tokens": tensor([5, 10, 11, 2, 30, 31, 41, 2], "int64"),
            "logprobs": tensor([0.0, -1.0, -2.0, -3.0, 0.0, 0.0, -1.0, -2.0]),
            "advantages": tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]),
        },
    }
    assert first["loss_fn_inputs"]["advantages"] == tensor([0.0, -1.0, -1.0, -1.0, 0.0, 0.0, -1.0, -1.0])


def test_experiences_that_no_training_takes_are_not_exported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [rollout("a", n, float(n), two_turns(5, 40 + n)) for n in range(2)])
    gymdata.experience(run, output=tmp_path / "experience", estimator="rloo")
    made = write_table(read_table(tmp_path / "experience", EXPERIENCES), tmp_path / "made.jsonl", EXPERIENCES)
    (tmp_path / "odd.jsonl").write_text(made.read_text().replace("-3.0", "3.0"))
    with pytest.raises(RefusedError, match=r"a log-probability of 3\.0") as error:
        gymdata.export(tmp_path / "odd.jsonl", tmp_path / "rl.jsonl", "tinker-rl")
    assert error.value.code == "L303"
    assert not (tmp_path / "rl.jsonl").exists()


def test_a_preference_of_nemo_rl_ranks_the_chosen_answer_first_and_comes_back(tmp_path: Path) -> None:
    rows = [rollout("a", n, float(n), [([1, 2], [n, 3])], tools=json.dumps(TOOLS)) for n in range(2)]
    gymdata.pairs(write_run(tmp_path / "run", rows))
    done = gymdata.export(tmp_path / "run", tmp_path / "a.jsonl", "nemo-rl-preference")
    assert (done.lost["margins"], done.lost[GIVEN_TOOLS]) == (1, 1)
    assert lines(tmp_path / "a.jsonl") == [
        {
            "context": [{"role": "user", "content": "question a"}],
            "completions": [
                {"rank": 0, "completion": [{"role": "assistant", "content": "1 3"}]},
                {"rank": 1, "completion": [{"role": "assistant", "content": "0 3"}]},
            ],
        }
    ]
    (pair,) = imported(tmp_path / "a.jsonl", "nemo-rl-preference")
    assert [pair[side][0]["content"] for side in ("prompt", "chosen", "rejected")] == ["question a", "1 3", "0 3"]


def test_a_lower_rank_is_the_chosen_one_wherever_it_stands_and_ties_are_named(tmp_path: Path) -> None:
    def row(*ranks: int) -> str:
        sides = [
            {"rank": rank, "completion": [{"role": "assistant", "content": f"{rank} {n}"}]}
            for n, rank in enumerate(ranks)
        ]
        return json.dumps({"context": [{"role": "user", "content": "q"}], "completions": sides}) + "\n"

    (tmp_path / "a.jsonl").write_text(row(3, 2) + row(1, 1) + row(1, 2, 3))
    summary = gymdata.import_rollouts(tmp_path / "a.jsonl", tmp_path / "run")
    assert (summary.pairs, summary.reasons) == (1, {"S102": 2})
    (pair,) = to_rows(read_table(tmp_path / "run", PAIRS))
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("2 1", "3 0")
    assert "got the ranks [1, 1], expected two that differ" in (tmp_path / "run" / "rejected.jsonl").read_text()


def test_conversations_of_verl_have_texts_alone(tmp_path: Path) -> None:
    rows = [rollout("a", n, 1.0, [([1, 2], [n, 3])]) for n in range(3)]
    rows[1] |= {"tools": json.dumps(TOOLS)}
    rows[2] |= {"messages": [{"role": "user", "content": "question a"}]}
    done = gymdata.export(write_run(tmp_path / "run", rows), tmp_path / "a.parquet", "verl-sft")
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == [
        {"messages": [{"role": "user", "content": "question a"}, {"role": "assistant", "content": "0 3"}]}
    ]
    assert (done.rows_out, done.skipped, done.lost[WITH_TOOLS], done.lost[EMPTY]) == (1, 2, 1, 1)


def test_no_answer_and_no_margin_are_made_up(tmp_path: Path) -> None:
    """A task without an answer has none in verl's table; a pair without a margin has no place where one is needed."""
    gymdata.export(write_run(tmp_path / "run", [rollout("a", 0, 1.0, [([1], [2])])]), tmp_path / "a.parquet", "verl")
    (row,) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert row["reward_model"] == {"style": "rule", "ground_truth": None}
    (tmp_path / "p.jsonl").write_text('{"prompt": "q", "chosen_response": "a", "rejected_response": "b"}\n')
    gymdata.import_rollouts(tmp_path / "p.jsonl", tmp_path / "pairs")
    done = gymdata.export(tmp_path / "pairs", tmp_path / "items.jsonl", "nat-dpo-items")
    assert (done.rows_out, done.skipped, done.lost) == (0, 1, {NO_MARGIN: 1})


def test_pairs_with_rendered_ids_are_strict_json_and_come_back(tmp_path: Path) -> None:
    """Their log-probabilities are not known; JSON has no number for that."""
    rows = [rollout("a", n, float(n), [([1, 2], [n, 3])]) for n in range(2)]
    for row in rows:
        row["turns"][0] |= {"rendered": True}
    gymdata.pairs(write_run(tmp_path / "run", rows), allow_rendered=True)
    before = read_table(tmp_path / "run", PAIRS)
    nan = pa.array([[math.nan, math.nan]], PAIRS.schema.field("chosen_logprobs").type)
    for side in ("chosen_logprobs", "rejected_logprobs"):
        before = before.set_column(before.schema.get_field_index(side), PAIRS.schema.field(side), nan)
    write_table(before, tmp_path / "pairs.parquet", PAIRS)
    gymdata.export(tmp_path / "pairs.parquet", tmp_path / "items.jsonl", "nat-dpo-items")
    orjson.loads((tmp_path / "items.jsonl").read_bytes())
    assert gymdata.import_rollouts(tmp_path / "items.jsonl", tmp_path / "back").pairs == 1
    assert str(read_table(tmp_path / "back", PAIRS).to_pylist()) == str(before.to_pylist())
