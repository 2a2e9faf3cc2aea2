"""One file of answers or preferences as text, one command, a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import gymdata
from gymdata.commands.ls.run import ls
from gymdata.commands.train import run
from gymdata.commands.train.from_text import text_format
from gymdata.commands.train.settings import (
    TrainConfig,
    TrainDpoConfig,
    TrainKtoConfig,
    TrainRewardConfig,
    TrainSftConfig,
)
from gymdata.errors import DataError, RefusedError, UsageError
from gymdata.progress import NullProgress
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_run_json, read_table, resolve
from gymdata.store.lineage import lineage
from tests.formats.trajectories import write
from tests.train.prepared_only import only_prepared
from tests.train.trainers.running import gymdata as command_of

pytestmark = pytest.mark.torch

POLICY = "sample_data/policy"


class Said(NullProgress):
    """Keeps what a training says."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


CONVERSATION = [{"role": "user", "content": "How much is 2+3?"}, {"role": "assistant", "content": "5"}]


def test_a_file_of_answers_is_trained_by_one_command(tmp_path: Path) -> None:
    """The same command again resumes it; rows that cannot be used are counted with the first reason."""
    rows = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:1]}, {"messages": [*CONVERSATION, *CONVERSATION]}]
    file = write(tmp_path / "chat.jsonl", rows[0], rows[1], rows[2])
    command = ["train-sft", file, "-m", POLICY, "-o", tmp_path / "policy", "--set", "max_steps=1"]
    done = command_of(*command)
    assert done.returncode == 0, done.stderr
    assert "contains chat messages with answers (3 rows)" in done.stderr
    assert "left out: 1 row that cannot be used (first: line 2: no message of the assistant)" in done.stderr
    facts = read_run_json(tmp_path / "policy")
    assert facts["trained_tokens"]["equal"]
    assert facts["counts"]["rollouts_chosen"] == 2
    assert facts["parents"][0]["path"].endswith("policy/data/tokens")
    again = command_of(*command)
    assert (again.returncode, "nothing to do" in again.stderr) == (0, True), again.stderr


def test_a_trained_model_leads_to_the_model_that_it_started_from(tmp_path: Path) -> None:
    """Its parents are its data and that model, so that ls and the lineage go on to what that was trained on."""
    file = write(tmp_path / "chat.jsonl", {"messages": CONVERSATION})
    for start, out in ((POLICY, "first"), (tmp_path / "first", "second")):
        done = command_of("train-sft", file, "-m", start, "-o", tmp_path / out, "--set", "max_steps=1")
        assert done.returncode == 0, done.stderr
    first, second = (read_run_json(tmp_path / name) for name in ("first", "second"))
    assert [Path(parent["path"]).parts[-1] for parent in first["parents"]] == ["tokens"]
    assert [Path(parent["path"]).parts[-1] for parent in second["parents"]] == ["tokens", "first"]
    assert sum(facts["stage"] == "train-sft" for facts in lineage(tmp_path / "second")) == 2
    shown = {Path(output.path).name: output.parents for output in ls(tmp_path).outputs}
    assert any(Path(parent).name == "first" for parent in shown["second"])


def checked(kind: type[TrainConfig], source: Path, **settings: Any) -> dict[str, int]:
    """What would be trained."""
    config = kind.load(None, {"model": POLICY, "output": source.parent / "model", **settings})
    return run.train(source, config, run_job=only_prepared, dry_run=True).counts


@pytest.mark.parametrize(("kind", "settings"), [(TrainDpoConfig, {}), (TrainRewardConfig, {"split": 0.0})])
def test_preferences_are_trained_though_their_margins_are_not_known(
    kind: type[TrainConfig], settings: dict[str, Any], tmp_path: Path
) -> None:
    """They are refused only where a loss reads them; a dry run writes nothing."""
    rows = [{"prompt": f"How much is 2+{n}?", "chosen": str(2 + n), "rejected": str(3 + n)} for n in range(4)]
    file = write(tmp_path / "rows.jsonl", *rows)
    assert checked(kind, file, **settings)["pairs"] == 4
    assert not (tmp_path / "model").exists()
    with pytest.raises(DataError, match="4 pairs have no margin"):
        checked(kind, file, margin_scale=1.0, **settings)


@pytest.mark.parametrize("nested", [True, False])
def test_dpo_items_of_the_nemo_agent_toolkit_are_trained_by_one_command(nested: bool, tmp_path: Path) -> None:
    """A collection of trajectories, and a trajectory per line."""
    items = [
        {
            "episode": [{"prompt": f"How much is 2+{n}?", "chosen_response": str(2 + n), "rejected_response": "9"}],
            "reward": 0.5,
        }
        for n in range(4)
    ]
    rows: list[dict[str, Any]] = [{"trajectories": [items], "run_id": "r"}] if nested else items
    assert checked(TrainDpoConfig, write(tmp_path / ("a.json" if nested else "a.jsonl"), *rows))["pairs"] == 4


def test_a_label_says_what_is_desirable(tmp_path: Path) -> None:
    """Also where a prompt has a single answer."""
    rows = [{"prompt": f"How much is 2+{n}?", "completion": "4", "label": str(n == 2)} for n in range(2)]
    rows += [{"prompt": f"How much is 2+{n}?", "completion": "4", "label": n == 2} for n in range(2, 4)]
    counts = checked(TrainKtoConfig, write(tmp_path / "rows.jsonl", *rows))
    assert (counts["desirable"], counts["undesirable"]) == (1, 3)


def test_a_score_of_an_answer_is_desirable_above_the_mean_of_its_prompt(tmp_path: Path) -> None:
    """Scores of 1 to 10 have no bar of their own: one per prompt needs ``threshold``, attributes need their name."""
    rows = [{"prompt": f"How much is 2+{n // 2}?", "completion": str(n), "score": 3 + n % 2} for n in range(8)]
    file = write(tmp_path / "rows.jsonl", *rows)
    for settings, counts in (({}, (4, 4)), ({"threshold": 3.5}, (4, 4)), ({"threshold": 2}, (8, 0))):
        report = checked(TrainKtoConfig, file, **settings)
        assert (report["desirable"], report["undesirable"]) == counts
    with pytest.raises(RefusedError, match="8 rewards equals their task's mean") as refused:
        checked(TrainKtoConfig, write(file, *({**row, "prompt": f"{n}"} for n, row in enumerate(rows))))
    assert "--threshold" in str(refused.value.hint)
    rated = [{"prompt": "How much?", "response": str(n), "helpfulness": n, "correctness": 4 - n} for n in (1, 4)]
    with pytest.raises(RefusedError, match="none of 2 rollouts has a reward") as unscored:
        checked(TrainKtoConfig, write(file, *rated))
    assert "--reward correctness or helpfulness" in str(unscored.value.hint)
    assert checked(TrainKtoConfig, file, reward="helpfulness")["desirable"] == 1


ASKED = "How much is 2+3?"
SPOKEN = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": "5"}]
PREFERENCES = [{"prompt": f"How much is {n}+3?", "chosen": str(n + 3), "rejected": "6"} for n in (1, 2)]
#: (trainer, rows, sequences or pairs that are trained) of files as people have them.
FILES: dict[str, tuple[str, list[dict[str, Any]], int]] = {
    "OpenAI chat": ("sft", [{"messages": CONVERSATION}, {"messages": [*CONVERSATION, *CONVERSATION]}], 2),
    "ShareGPT": ("sft", [{"conversations": SPOKEN}, {"conversations": SPOKEN * 2}], 2),
    "Alpaca": ("sft", [{"instruction": "Add.", "input": f"2 and {n}", "output": str(2 + n)} for n in (3, 4)], 2),
    "TRL preferences": ("dpo", PREFERENCES, 2),
    "TRL preferences, a reward model": ("reward", PREFERENCES, 2),
    "KTO labels": ("kto", [{"prompt": ASKED, "completion": str(n), "label": n == 5} for n in (5, 6)], 2),
    "reward scores": ("sft", [{"prompt": ASKED, "completion": str(n), "score": 0.5 * (n == 5)} for n in (5, 6)], 1),
    "ranked answers": ("dpo", [{"prompt": f"\n\nHuman: {ASKED}\n\nAssistant: ", "num_responses": 3, "answers": [
        {"answer": str(4 + n), "rank": float(n)} for n in (1, 2, 3)]}], 2),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_one_command_makes_a_trained_model_of_a_file(name: str, tmp_path: Path) -> None:
    """Exit code 0; the saved model loads, its weights have moved, and what was trained is what the file has."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    trainer, rows, n_trained = FILES[name]
    out = tmp_path / "model"
    more = [f"--set={setting}" for setting in ("max_steps=1", "learning_rate=0.01", "warmup_steps=0")]
    more += ["--split=0"] if trainer == "reward" else []
    done = command_of(f"train-{trainer}", write(tmp_path / "rows.jsonl", *rows), "-m", POLICY, "-o", out, *more)
    assert done.returncode == 0, done.stderr
    facts = read_run_json(out)
    assert facts["trained_tokens"]["equal"]
    assert facts["trained_tokens"]["file"]["count"] > 0
    assert facts["counts"]["sequences" if trainer in ("sft", "kto") else "pairs"] == n_trained
    loaded = AutoModelForSequenceClassification if trainer == "reward" else AutoModelForCausalLM
    before = AutoModelForCausalLM.from_pretrained(POLICY, local_files_only=True).state_dict()
    after = loaded.from_pretrained(out, local_files_only=True).state_dict()
    shared = before.keys() & after.keys()
    assert len(shared) > 10
    assert any((before[weight] != after[weight]).any() for weight in shared)


def test_answers_that_are_labelled_undesirable_are_not_trained_by_sft(tmp_path: Path) -> None:
    """Also when each prompt has a single answer; ``select`` trains them."""
    rows = [{"prompt": f"How much is 2+{n}?", "completion": "4", "label": n < 3} for n in range(4)]
    file = write(tmp_path / "rows.jsonl", *rows)
    chosen = [checked(TrainSftConfig, file, **select)["rollouts_chosen"] for select in ({}, {"select": "all"})]
    assert chosen == [3, 4]


def test_a_floor_of_rewards_is_not_applied_to_answers_without_any(tmp_path: Path) -> None:
    """The settings of the sample data have one; where some rows have a reward it holds, and can be unset."""
    file, config = write(tmp_path / "rows.jsonl", {"prompt": ASKED, "completion": "5"}), tmp_path / "sft.yaml"
    config.write_text("min_reward: 1.0\n")
    command = ["train-sft", file, "-m", POLICY, "-o", tmp_path / "out", "--config", config, "--dry-run"]
    done = command_of(*command)
    assert (done.returncode, "min_reward 1 is not applied: no row has a reward" in done.stderr) == (0, True)
    write(file, {"prompt": ASKED, "completion": "5", "reward": 0.5}, {"prompt": ASKED, "completion": "6"})
    refused = command_of(*command)
    assert refused.returncode == 1
    assert (
        "none of 2 rollouts has a reward of at least min_reward 1; the highest is 0.5\n"
        "  → lower --min-reward, or train without it: --set min_reward=null"
    ) in refused.stderr
    assert command_of(*command, "--set", "min_reward=null").returncode == 0


def test_a_row_that_is_there_twice_is_an_example_of_its_own(tmp_path: Path) -> None:
    """As in data sets that were put together. SFT trains what is equal once, and counts it; preferences twice."""
    answer = {"prompt": "How much is 2+3?", "completion": "5"}
    preference = {"prompt": "2+3?", "chosen": "5", "rejected": "6"}
    answers = write(tmp_path / "answers.jsonl", answer, answer, answer | {"completion": "6"})
    assert checked(TrainSftConfig, answers) | {"left_out_duplicate": 1, "sequences": 2} == checked(
        TrainSftConfig, answers
    )
    pairs = write(tmp_path / "pairs.jsonl", preference, preference)
    assert checked(TrainDpoConfig, pairs)["pairs"] == 2
    imported = gymdata.import_rollouts(answers, tmp_path / "imported")
    assert imported.duplicates == 0
    assert len(set(read_table(tmp_path / "imported")["rollout_id"].to_pylist())) == 3


def test_an_error_of_a_dry_run_names_the_file(tmp_path: Path) -> None:
    """What was made of it is gone then."""
    file = write(tmp_path / "rows.jsonl", {"prompt": "How much is 2+3?", "completion": "5"})
    with pytest.raises(RefusedError) as error:
        gymdata.train_sft(file, POLICY, tmp_path / "out", max_length=2, dry_run=True)
    assert str(error.value).startswith(f"T205: {file}: with --max-length 2 none of 1 sequence")


def test_questions_with_answers_alone_are_trained(tmp_path: Path) -> None:
    """Of a CSV file, too; a context beside them may be part of what is asked, and is not left out."""
    file = tmp_path / "answers.csv"
    file.write_text('question,answer,level\nHow much is 2+3?,5,easy\n"How much is 4+4, then?",8,hard\n')
    assert checked(TrainSftConfig, file)["rollouts_chosen"] == 2
    later = write(tmp_path / "later.jsonl", *[{"question": f"{n}+1?", "answer": "2"} for n in range(30)],
                  {"question": "And?", "answer": "2", "context": "Add."})  # fmt: skip
    assert checked(TrainSftConfig, later)["rollouts_chosen"] == 30
    with pytest.raises(DataError, match="contains prompts with completions, expected pairs"):
        checked(TrainDpoConfig, file)


def test_rows_of_no_known_format_are_one_verdict(tmp_path: Path) -> None:
    """The one of `validate` and `import`: the keys of the first row, and what to do."""
    file = write(tmp_path / "rows.jsonl", {"question": "1+1?", "answer": "2", "context": "Add."})
    with pytest.raises(DataError, match="context: may be part of the question") as error:
        gymdata.train_sft(file, POLICY, tmp_path / "model")
    assert error.value.hint == "name both: --map prompt=question --map answer=answer"
    file = write(tmp_path / "odd.jsonl", {"id": 1, "words": ["x"]})
    with pytest.raises(DataError, match="contains rows of no known format, expected rollouts") as error:
        gymdata.train_sft(file, POLICY, tmp_path / "model")
    assert "keys id, words" in str(error.value.hint)


def test_text_for_another_trainer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", {"prompt": "x", "chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match="contains preference pairs, expected rollouts") as error:
        gymdata.train_sft(pairs, POLICY, tmp_path / "model")
    assert "train-dpo" in str(error.value.hint)
    for train in (gymdata.train_rl, gymdata.train_value):
        with pytest.raises(UsageError, match="takes tokens that a policy sampled"):
            train(pairs, POLICY, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_answers_with_rewards_train_dpo_in_one_command(tmp_path: Path) -> None:
    """The best and the worst answer to each prompt are a pair; without rewards it is refused."""
    rows = [{"prompt": f"{n}+1?", "completion": str(n + k), "reward": k} for n in (1, 2) for k in (0, 1)]
    assert checked(TrainDpoConfig, write(tmp_path / "rewarded.jsonl", *rows))["pairs"] == 2
    bare = write(tmp_path / "bare.jsonl", *({k: v for k, v in row.items() if k != "reward"} for row in rows))
    with pytest.raises(DataError, match="contains prompts with completions, expected pairs"):
        checked(TrainDpoConfig, bare)


def test_prompts_that_give_no_pair_are_counted_by_reason(tmp_path: Path) -> None:
    """Of four prompts one has a pair; the others have one answer, or answers of equal rewards."""
    rewards = {"1+1?": (0, 1), "1+2?": (1, 1), "1+3?": (1,), "1+4?": (0,)}
    rows = [
        {"prompt": prompt, "completion": str(n), "reward": reward}
        for prompt, values in rewards.items()
        for n, reward in enumerate(values)
    ]
    said = Said()
    file = write(tmp_path / "rewarded.jsonl", *rows)
    gymdata.train_dpo(file, POLICY, tmp_path / "model", dry_run=True, progress=said)
    assert (
        "1 pair of the best and the worst answer to each prompt, by reward; 3 of 4 prompts gave none: 2 with fewer than "
        "two answers that have a reward, 1 whose answers have equal rewards"
    ) in said.messages


def test_a_row_that_is_left_out_is_counted_once(tmp_path: Path) -> None:
    """An answer of weight 0 is no second row beside the rows that cannot be used; several reasons are parts of these."""
    asked, rows = {"role": "user", "content": "1+1?"}, []
    for weight in (1, 0, 0):
        rows.append({"messages": [asked, {"role": "assistant", "content": "2", "weight": weight}]})
    said = Said()
    gymdata.train_sft(write(tmp_path / "a.jsonl", *rows), POLICY, tmp_path / "model", dry_run=True, progress=said)
    left_out = [line for line in said.messages if "left out" in line or "of them" in line]
    first = "first: line 2: no assistant message that the model wrote"
    assert left_out == [f"left out: 2 rows that cannot be used ({first})"]


@pytest.mark.parametrize("model", [None, POLICY], ids=["text", "rendered"])
@pytest.mark.parametrize("kind", ["answers", "pairs"])
def test_one_task_cannot_be_divided_and_nothing_is_written(kind: str, model: str | None, tmp_path: Path) -> None:
    """Neither by an import nor by a training; two tasks can, however late the second one comes."""
    rows: list[dict[str, Any]] = [{"prompt": "1+1?", "chosen": str(n), "rejected": f"{n}."} for n in range(3)]
    if kind == "answers":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    one, two = (
        write(tmp_path / f"{n}.jsonl", *rows, *more) for n, more in enumerate(([], [{**rows[0], "prompt": "2?"}]))
    )
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    train = gymdata.train_sft if kind == "answers" else gymdata.train_dpo
    with pytest.raises(UsageError, match="got 1 task, expected at least 2"):
        gymdata.import_rollouts(one, tmp_path / "run", model=model, test_share=0.5)
    if model is not None:
        with pytest.raises(UsageError, match="got 1 task, expected at least 2"):
            train(one, model, tmp_path / "trained", test_share=0.5)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    done = gymdata.import_rollouts(two, tmp_path / "run", model=model, test_share=0.5)
    assert (done.tasks, done.rendered) == ({"train": 1, "test": 1}, 4 if model else 0)


def test_a_share_of_the_tasks_is_held_out_for_eval(tmp_path: Path) -> None:
    """Of a file of text, by task; sampled rollouts are divided by their own commands."""
    rows = [{"question": f"{n}+1?", "answer": a} for n in range(4) for a in (str(n + 1), f"It is {n + 1}.")]
    file = write(tmp_path / "rows.jsonl", *rows)
    done = gymdata.import_rollouts(file, tmp_path / "run", test_share=0.25)
    assert done.tasks == {"train": 3, "test": 1}
    sides = [read_table(tmp_path / f"run/split/{side}.parquet", ROLLOUTS, ["task_id"]) for side in done.tasks]
    train, test = (set(side["task_id"].to_pylist()) for side in sides)
    assert ([side.num_rows for side in sides], train & test) == ([6, 2], set())
    report = gymdata.train_sft(file, POLICY, tmp_path / "model", test_share=0.25, dry_run=True)
    assert report.counts["rollouts_chosen"] == 6
    with pytest.raises(UsageError, match=r"--test-share: .* is not a file of answers or preferences as text"):
        gymdata.train_sft("sample_data/rollouts/clean.jsonl", POLICY, tmp_path / "x", test_share=0.5)


@pytest.mark.parametrize("kind", [TrainSftConfig, TrainDpoConfig])
def test_rows_of_nemo_gym_without_ids_are_trained_from_their_text(kind: type[TrainConfig], tmp_path: Path) -> None:
    """As files of any format without ids; rows with ids are trained as they were sampled, and not taken for text."""
    rows = [json.loads(line) for line in Path("sample_data/rollouts/nemo_gym.jsonl").read_text().splitlines()]
    with_ids = write(tmp_path / "ids.jsonl", *rows)
    assert text_format(str(with_ids), resolve(with_ids), kind.load(None, {"model": POLICY, "output": tmp_path})) is None
    for item in (item for row in rows for item in row["response"]["output"]):
        for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            item.pop(name, None)
    counts = checked(kind, write(tmp_path / "rows.jsonl", *rows))
    assert counts["pairs" if kind is TrainDpoConfig else "rollouts_chosen"] == 8
