"""The YAML file: published names, overrides that are applied, keys that are named, sections that are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymdata.cli.docs import config_schema
from gymdata.commands.finetune.config_file import load
from gymdata.commands.finetune.parts import adapter_of
from gymdata.commands.finetune.run import finetune, plan_of
from gymdata.errors import DataError, UsageError
from gymdata.texts import COMMAND_LINE
from tests.finetune.parts import MINIMAL, ROOT, write

SHIPPED = ROOT / "sample_data" / "finetune.yaml"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_published_names_are_read(tmp_path: Path) -> None:
    """Every published key of the loop arrives where it belongs."""
    config = load(write(tmp_path))
    plan, _ = plan_of(config, tmp_path / "config.yaml")
    assert plan.loop.num_epochs == 10
    assert plan.tasks == str(tmp_path / "tasks.jsonl")
    assert (plan.curriculum.expansion_interval, plan.curriculum.random_subsample) == (5, None)
    assert plan.start == ROOT / "sample_data" / "policy"
    assert plan.output == Path.cwd() / "out"


@pytest.mark.parametrize(
    ("key", "text", "found"),
    [
        ("finetuning.num_epochs", "20", lambda c: c.finetuning.num_epochs == 20),
        ("algorithm", "dpo", lambda c: c.finetuning.algorithm == "dpo"),
        ("num_epochs", "3", lambda c: c.finetuning.num_epochs == 3),
        ("curriculum_learning.min_reward_diff", "0.2", lambda c: c.finetuning.curriculum_learning.min_reward_diff == 0.2),
        ("eval.general.max_concurrency", "4", lambda c: c.eval.general.max_concurrency == 4),
        ("trainer_adapters.adapter.rl.learning_rate", "1e-4",
         lambda c: c.trainer_adapters["adapter"].keys()["rl"]["learning_rate"] == 1e-4),
        ("trainer_adapters.adapter.dpo.loss_type", "[sigmoid, sft]",
         lambda c: c.trainer_adapters["adapter"].keys()["dpo"]["loss_type"] == ["sigmoid", "sft"]),
        ("llms.policy.model_name", "elsewhere", lambda c: c.llms["policy"].model_name == "elsewhere"),
    ],
)  # fmt: skip
def test_overrides_are_really_applied(tmp_path: Path, key: str, text: str, found: Any) -> None:
    """Dotted keys reach every section, a bare one is of finetuning, the value has YAML's type, and the last one wins."""
    assert found(load(write(tmp_path), [(key, "null"), (key, text)]))


def test_a_section_that_is_missing_is_given_by_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hint is a -o that makes the section, so that all of them in one command leave only values to be chosen."""
    monkeypatch.setenv(COMMAND_LINE, "1")
    file = tmp_path / "config.yaml"
    file.write_text("finetuning: {algorithm: dpo}\n")
    with pytest.raises(UsageError) as refused:
        load(file)
    hints = [str(fault.hint) for fault in refused.value.faults]
    assert len(hints) == 4
    found = [re.fullmatch(r"give -o (\S+) (\S+), or set it in the file", hint) for hint in hints]
    given = {match[1]: match[2] for match in found if match is not None}
    assert list(given) == [
        "llms.policy.model_name",
        "trajectory_builders.collect._type",
        "trainer_adapters.trl._type",
        "finetuning.reward_function.name",
    ]
    config = load(file, list(given.items()))
    assert (config.llms["policy"].model_name, config.trainer_adapters["trl"].type_) == ("FOLDER", "trl")


def test_what_a_file_lacks_is_listed_in_one_round_however_long_it_is(tmp_path: Path) -> None:
    """A list to work through, unlike other refusals, which have at most 300 characters."""
    file = tmp_path / "config.yaml"
    file.write_text("finetuning: {algorithm: dpo, " + ", ".join(f"wrong_{n}: 1" for n in range(20)) + "}\n")
    with pytest.raises(UsageError) as refused:
        load(file)
    assert all(f"unknown key 'wrong_{n}'" in str(refused.value) for n in range(20))
    assert "llms is missing" in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("finetunig", {}, "did you mean 'finetuning'"),
        ("finetuning.num_epoch", 3, "did you mean 'num_epochs'"),
        ("finetuning.curriculum_learning.min_reward_dif", 1, "did you mean 'min_reward_diff'"),
        ("eval.general.max_concurency", 1, "did you mean 'max_concurrency'"),
        ("eval.general.dataset.file_pth", "x", "did you mean 'file_path'"),
        ("llms.policy.model", None, None),
        ("llms.policy.model_nam", "x", "llms.policy: unknown key 'model_nam'"),
        ("trajectory_builders.builder.num_generation", 1, "did you mean 'num_generations'"),
        ("trajectory_builders.builder.max_token", 1, "did you mean 'max_tokens'"),
        ("trajectory_builders.builder.run_id", "x", "unknown key 'run_id'"),
        ("trajectory_builders.builder.temperature", -1, "temperature"),
        ("trajectory_builders.builder._type", "colect", "did you mean 'collect'"),
        ("trainer_adapters.adapter.lr", 1, "unknown key 'lr'"),
        ("finetuning.curriculum_learning", True, "got True, expected an object of settings"),
        ("trainer_adapters.adapter.rl.learning_rte", 1, "did you mean 'learning_rate'"),
        (
            "trainer_adapters.adapter.settings",
            {"num_train_epochs": "many"},
            "num_train_epochs: got 'many', expected float",
        ),
        ("trainer_adapters.adapter.rl.clip_low", 2, "clip_low: got 2"),
        ("trainers.trainer.pairs", {"strategi": "all"}, "did you mean 'strategy'"),
        ("trainers.trainer.pairs", {"split": 0.5}, "split cannot be honoured"),
        ("finetuning.trainer", "trainr", "did you mean 'trainer'"),
        ("finetuning.target_model", "polcy", "did you mean 'policy'"),
        (
            "finetuning.target_functions",
            ["search"],
            "target_agents in the sft or kto section of the trainer adapter chooses turns by agent",
        ),
        ("finetuning.num_epochs", "many", "finetuning.num_epochs: got 'many'"),
        ("finetuning.validation", {"settings": {"temprature": 1}}, "did you mean 'temperature'"),
        ("eval.general.profiler", {}, "eval.general.profiler cannot be honoured"),
        ("eval.evaluators", {"numeric": {"_type": "rubric"}}, "expected one of reward, genrm"),
        ("eval.evaluators", {"numeric": {"_type": "genrm", "genrn": "x"}}, "did you mean 'genrm'"),
        ("eval.evaluators", {"numeric": {"_type": "genrm"}}, "no judge given"),
        ("workflow", {"_type": "react_agent"}, "the section 'workflow' cannot be honoured"),
        ("functions", {}, "the section 'functions' cannot be honoured"),
    ],
)
def test_what_is_not_known_or_not_honoured_is_named(tmp_path: Path, path: str, value: Any, message: str | None) -> None:
    """A misspelt key names the nearest, in every section; what cannot be honoured is refused by its name."""

    def change(values: dict[str, Any]) -> None:
        at = values
        *parents, last = path.split(".")
        for word in parents:
            at = at.setdefault(word, {})
        at[last] = value

    file = write(tmp_path, change)

    def whole() -> None:
        config = load(file)
        plan_of(config, file)
        adapter_of(config, str(file))

    if message is None:
        whole()
        return
    with pytest.raises(UsageError) as caught:
        whole()
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_reward_function_is_a_spec_an_entry_or_a_judge(tmp_path: Path) -> None:
    """A name of eval.evaluators is looked up there; any other is a reward spec."""
    (tmp_path / "mine.py").write_text("def short(completions, **columns):\n    return [1.0 for _ in completions]\n")
    evaluators = {
        "both": {"_type": "reward", "rewards": ["numeric=0.5", "mine.py:short=0.5"]},
        "judge": {"_type": "genrm", "genrm": "judges/j", "comparison_strategy": "all_pairs"},
    }
    (tmp_path / "judges" / "j").mkdir(parents=True)
    file = write(tmp_path, lambda values: values["eval"].update(evaluators=evaluators))

    def scoring(name: str) -> Any:
        plan, _ = plan_of(load(file, [("reward_function.name", name)]), file)
        return plan.reward, plan.judging

    assert scoring("mine.py:short") == (("mine.py:short",), None)
    assert scoring("both") == (("numeric=0.5", "mine.py:short=0.5"), None)
    reward, judging = scoring("judge")
    assert (reward, judging.name) == ((), "judge")
    assert judging.settings == {"genrm": "judges/j", "comparison_strategy": "all_pairs"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("numerc", "finetuning.reward_function.name: got 'numerc', expected one of"),
        ("mine.py", "finetuning.reward_function.name: got 'mine.py', which names no function\n  → mine.py:FUNCTION"),
        ("both", "eval.evaluators.both: got 'exact', expected one of"),
    ],
)
def test_a_wrong_reward_is_named_by_its_key(tmp_path: Path, name: str, said: str) -> None:
    """The error names the file and the key, not the flag of another command."""
    evaluators = {"both": {"_type": "reward", "rewards": ["exact"]}}
    file = write(tmp_path, lambda values: values["eval"].update(evaluators=evaluators))
    with pytest.raises(UsageError) as caught:
        plan_of(load(file, [("reward_function.name", name)]), file)
    assert f"{file}: {said}" in str(caught.value)
    assert "--reward" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("trajectory_builders.builder.env", "trajectory_builders.builder.env"),
        ("trajectory_builders.builder.user", "trajectory_builders.builder.user"),
        ("finetuning.validation.settings.env", "finetuning.validation.settings.env"),
    ],
)
@pytest.mark.parametrize(
    ("spec", "why"),
    [("nowhere.py:Env", "nowhere.py: no such file"), ("mine.py:Evn", "got 'Evn', expected one of Env")],
)
def test_a_wrong_environment_is_found_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, key: str, spec: str, why: str
) -> None:
    """Its file and class are looked up when the configuration is read, not by the first epoch that plays in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Env:\n    def add(self, a: int) -> int:\n        return a\n")
    file = write(tmp_path)
    with pytest.raises(UsageError) as caught:
        finetune(file, [("validation.dataset", "tasks.jsonl"), (path, spec)])
    assert f"{file}: {key}" in str(caught.value)
    assert why in str(caught.value)
    assert "--env" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_algorithm_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One letter of three is no likeness: ppo is not a misspelt dpo."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        finetune(write(tmp_path), [("algorithm", "ppo")])
    assert "finetuning.algorithm: got 'ppo', expected one of sft, dpo, kto, rl" in str(caught.value)
    assert caught.value.hint is None


def test_the_output_may_be_named_after_the_algorithm(tmp_path: Path) -> None:
    """Two algorithms of one file do not meet in one folder."""
    file = write(tmp_path)
    loaded = load(file, [("output_dir", "runs/{algorithm}"), ("algorithm", "dpo")])
    assert plan_of(loaded, file)[0].output == Path.cwd() / "runs" / "dpo"


def test_an_endpoint_that_is_never_told_trains_one_epoch(tmp_path: Path) -> None:
    """Ten epochs on a server that goes on serving the first policy are refused, unless a command deploys the new ones."""
    llm = {"_type": "openai", "base_url": "http://localhost:1", "model_name": "served",
           "model": str(ROOT / "sample_data" / "policy")}  # fmt: skip
    file = write(tmp_path, llms={"policy": llm})
    with pytest.raises(UsageError, match="keeps serving the first policy, num_epochs is 10"):
        plan_of(load(file), file)
    assert plan_of(load(file, [("num_epochs", "1")]), file)[0].served
    assert plan_of(load(file, [("deploy", "[reload, '{model}']")]), file)[0].loop.deploy == ["reload", "{model}"]


def test_paths_are_those_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the command line: what lies beside the file alone is not found."""
    (tmp_path / "here").mkdir()
    file = write(tmp_path)
    plan_of(load(file), file)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError, match=r"tasks\.jsonl"):
        plan_of(load(file), file)
    assert plan_of(load(file, [("eval.general.dataset", "../tasks.jsonl")]), file)[0].tasks.endswith("tasks.jsonl")


def test_the_shipped_file_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """sample_data/finetune.yaml loads from the folder above it, with batch RL and with DPO."""
    monkeypatch.chdir(ROOT)
    for algorithm in ("rl", "dpo"):
        plan, _ = plan_of(load(SHIPPED, [("algorithm", algorithm)]), SHIPPED)
        assert (plan.loop.num_epochs, plan.loop.algorithm) == (4, algorithm)
        assert plan.curriculum.expansion_interval == 1
        assert plan.validation is not None
        assert Path(plan.validation.tasks).name == "heldout.jsonl"


def test_the_schema_says_what_is_read() -> None:
    """The JSON Schema takes the shipped file and refuses a misspelt one."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = config_schema("finetune")
    jsonschema.Draft202012Validator.check_schema(schema)
    check = jsonschema.Draft202012Validator(schema)
    assert check.is_valid(MINIMAL)
    assert check.is_valid(yaml.safe_load(SHIPPED.read_text()))
    assert not check.is_valid(MINIMAL | {"finetunig": {}})
    assert not check.is_valid(MINIMAL | {"trajectory_builders": {"b": {"num_generations": 2}}})
    assert check.is_valid(MINIMAL | {"trajectory_builders": {"b": {"_type": "mine.py:Builder", "anything": 2}}})
    assert check.is_valid(MINIMAL | {"workflow": {"_type": "react_agent"}})
