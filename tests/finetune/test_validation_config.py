"""The file for validation is merged over the configuration; held-out tasks are sampled and scored with the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gymdata.commands.finetune.config_file import load
from gymdata.commands.finetune.plan import Plan, Validation
from gymdata.commands.finetune.run import plan_of
from gymdata.errors import UsageError
from tests.finetune.parts import write

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def planned(folder: Path, over: dict[str, Any], overrides: Any = (), change: Any = None) -> Plan:
    """The plan of a configuration whose validation has the file ``over``."""
    (folder / "heldout.jsonl").write_text('{"task_id": "h", "prompt": "2+2?", "answer": "4"}\n')
    (folder / "over.yaml").write_text(yaml.safe_dump(over))
    file = write(folder, change)
    given = [("finetuning.validation.config", "over.yaml"), *overrides]
    return plan_of(load(file, given), file, overrides=given)[0]


def validated(folder: Path, over: dict[str, Any], overrides: Any = (), change: Any = None) -> Validation:
    """What ``planned`` says of validation."""
    validation = planned(folder, over, overrides, change).validation
    assert validation is not None
    return validation


HELD_OUT = {"dataset": "heldout.jsonl"}


def test_the_section_of_the_file_is_used(tmp_path: Path) -> None:
    """limit, threshold, interval, settings and dataset of the file are those of validation."""
    section = {**HELD_OUT, "limit": 3, "threshold": 0.25, "interval": 2, "settings": {"temperature": 0.5}}
    found = validated(tmp_path, {"finetuning": {"validation": section}})
    assert (found.tasks, found.interval, found.threshold) == (str(tmp_path / "heldout.jsonl"), 2, 0.25)
    assert found.settings == {"temperature": 0.5, "num_generations": 1, "limit": 3}


@pytest.mark.parametrize("trained", ["reward", "genrm"])
@pytest.mark.parametrize("scored", ["reward", "genrm"])
def test_the_reward_or_the_judge_of_the_file_scores(trained: str, scored: str, tmp_path: Path) -> None:
    """reward_function and evaluators of the file score held-out rollouts, and training keeps its own: an evaluator of the
    same name may be of another kind there."""
    (tmp_path / "j").mkdir()
    kinds = {"reward": {"_type": "reward", "rewards": ["exact_match"]}, "genrm": {"_type": "genrm", "genrm": "j"}}

    def scoring(values: dict[str, Any], kind: str) -> dict[str, Any]:
        values.setdefault("eval", {})["evaluators"] = {"mine": kinds[kind]}
        values["finetuning"]["reward_function"] = {"name": "mine"}
        return values

    over = scoring({"finetuning": {"validation": HELD_OUT}}, scored)
    plan = planned(tmp_path, over, change=lambda values: scoring(values, trained))
    for at, kind in ((plan, trained), (plan.validation, scored)):
        assert at is not None
        expected = (("exact_match",), None) if kind == "reward" else ((), "mine")
        assert (at.reward, at.judging and at.judging.name) == expected


def test_sampling_that_the_file_states_is_not_beaten_by_the_greedy_default(tmp_path: Path) -> None:
    """num_generations and temperature of the file's builder and llm hold; unstated they are 1 and 0."""
    over = {
        "finetuning": {"validation": HELD_OUT},
        "llms": {"policy": {"temperature": 0.7}},
        "trajectory_builders": {"builder": {"num_generations": 4}},
    }
    validation = validated(tmp_path, over)
    assert validation.settings == {}
    builder: Any = validation.builder
    assert (builder.config.num_generations, builder.base["temperature"]) == (4, 0.7)


def test_the_tasks_of_the_file_beat_those_of_the_main_one(tmp_path: Path) -> None:
    """eval.general.dataset of the file names held-out tasks, even where the main file names others."""
    over = {"eval": {"general": {"dataset": "heldout.jsonl"}}}
    others = {"dataset": "tasks.jsonl"}
    validation = validated(tmp_path, over, change=lambda values: values["finetuning"].update(validation=others))
    assert validation.tasks == str(tmp_path / "heldout.jsonl")


def test_the_command_line_beats_the_file(tmp_path: Path) -> None:
    """An override of finetuning.validation is not lost to the validation file; one of training does not reach it."""
    over = {"finetuning": {"validation": {**HELD_OUT, "interval": 2}}, "llms": {"policy": {"temperature": 0.0}}}
    validation = validated(tmp_path, over, [("validation.interval", "3"), ("llms.policy.temperature", "0.9")])
    builder: Any = validation.builder
    assert (validation.interval, builder.base["temperature"]) == (3, 0.0)


def test_what_is_wrong_in_the_file_is_listed_at_once(tmp_path: Path) -> None:
    """Every unknown key and section is named with the file; a value of training changes nothing of it."""
    over = {
        "finetuning": {"validation": {**HELD_OUT, "treshold": 1}, "num_epochs": 3, "seed": 0},
        "trainer_adapters": {"adapter": {"_type": "trl", "rl": {"learning_rate": 1}}},
        "workflow": {},
    }
    with pytest.raises(UsageError) as caught:
        planned(tmp_path, over)
    said = str(caught.value)
    for words in ("did you mean 'threshold'", "over.yaml: the section 'workflow' cannot"):
        assert words in said
    assert len(caught.value.faults) == 2
    del over["workflow"], over["finetuning"]["validation"]["treshold"]  # type: ignore[attr-defined]
    assert (
        planned(tmp_path, over).loop.num_epochs
        == planned(tmp_path, {"finetuning": {"validation": HELD_OUT}}).loop.num_epochs
    )


def test_another_policy_is_not_validated(tmp_path: Path) -> None:
    """Its sampling may be another, its weights not."""
    with pytest.raises(UsageError, match=r"over\.yaml: llms.policy: got another policy, expected the trained one"):
        planned(tmp_path, {"finetuning": {"validation": HELD_OUT}, "llms": {"policy": {"model_name": "other"}}})


def test_settings_of_a_validation_that_has_no_tasks_are_refused(tmp_path: Path) -> None:
    """An interval without held-out tasks would be ignored."""
    file = write(tmp_path, lambda values: values["finetuning"].update(validation={"interval": 2, "limit": 1}))
    with pytest.raises(UsageError, match="has interval, limit but no dataset"):
        plan_of(load(file), file)
    with pytest.raises(UsageError, match="has config but no dataset"):
        planned(tmp_path, {})


def test_another_file_for_validation_is_another_run(tmp_path: Path) -> None:
    """What validation is scored with belongs to the identity of a run, wherever its file lies."""
    one = planned(tmp_path, {"finetuning": {"validation": HELD_OUT}}).identity
    same = planned(tmp_path, {"finetuning": {"validation": {**HELD_OUT, "interval": 3}}}).identity
    other = planned(tmp_path, {"finetuning": {"validation": {**HELD_OUT, "threshold": 0.1}}}).identity
    assert one == same
    assert one != other


def test_all_faults_of_a_configuration_are_listed_at_once(tmp_path: Path) -> None:
    """Unknown keys, wrong values, wrong parts, sections that are not honoured: one error names them all."""

    def change(values: dict[str, Any]) -> None:
        values["workflow"] = {}
        values["finetuning"] |= {"num_epoch": 3, "seed": "many"}
        values["trajectory_builders"]["builder"] |= {"max_token": 1, "temperature": -1}
        values["trainers"]["trainer"] = {"_type": "epochs", "pairs": {"strategi": "all"}, "experience": {"rewrad": 1}}
        values["eval"]["evaluators"] = {"one": {"_type": "rubric"}, "two": {"_type": "reward"}}

    with pytest.raises(UsageError) as caught:
        load(write(tmp_path, change))
    said = str(caught.value)
    for words in ("section 'workflow'", "'num_epoch'", "finetuning.seed: got 'many'", "'max_token'", "temperature",
                  "'strategi'", "'rewrad'", "evaluators.one._type", "evaluators.two.rewards"):  # fmt: skip
        assert words in said
    assert len(caught.value.faults) == 9
