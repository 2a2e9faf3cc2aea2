"""Configurations in the shape of the NeMo Agent Toolkit's finetuning examples: what they need, and that they run."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymdata.cli.main import main
from gymdata.commands.finetune.config_file import load
from gymdata.commands.finetune.epochs import EpochLoop
from gymdata.commands.finetune.plan import Plan
from gymdata.commands.finetune.run import finetune, plan_of
from gymdata.errors import UsageError
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_run_json, read_table
from tests.finetune.parts import BUILDER

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[2] / "sample_data"
EVALUATOR = '''
class Output:
    def __init__(self, id, score, reasoning):
        self.id, self.score, self.reasoning = id, score, reasoning

class Accuracy:
    """With the published interface; the toolkit's base class is not needed."""

    def __init__(self, max_concurrency, right=1.0):
        self.max_concurrency, self.right = max_concurrency, right

    async def evaluate_item(self, item):
        said = item.output_obj.split()[-1] if item.output_obj.split() else ""
        return Output(item.id, self.right * (said.rstrip(".") == str(item.expected_output_obj)), {})
'''
#: Batch RL through a server that trains.
ART: dict[str, Any] = {
    "llms": {
        "big": {"_type": "nim", "model_name": "some/model-70b", "temperature": 0.1},
        "player": {"_type": "openai", "model_name": "Some/Model-3B", "base_url": "http://localhost:8000/v1",
                   "api_key": "default", "temperature": 1.0, "logprobs": True, "top_logprobs": 1},
    },
    "workflow": {"_type": "sums", "larger_model": "big", "smaller_model": "player", "max_parser_retries": 3},
    "eval": {
        "general": {"max_concurrency": 8, "output_dir": ".tmp/nat/eval",
                    "dataset": {"_type": "json", "file_path": "data/data.json"}},
        "evaluators": {"accuracy": {"_type": "accuracy"}},
    },
    "trajectory_builders": {"art_builder": {"_type": "openpipe_art_traj_builder", "num_generations": 1}},
    "trainer_adapters": {"art_adapter": {
        "_type": "openpipe_art_trainer_adapter",
        "backend": {"ip": "0.0.0.0", "port": 7623, "name": "sums", "project": "p", "base_model": "Some/Model-3B",
                    "api_key": "default", "init_args": {"max_seq_length": 8192},
                    "engine_args": {"gpu_memory_utilization": 0.9, "tensor_parallel_size": 1}},
        "training": {"learning_rate": "1e-5", "beta": 0.1, "per_device_train_batch_size": 8, "sync_ref_model": True},
    }},
    "trainers": {"art_trainer": {"_type": "openpipe_art_trainer"}},
    "finetuning": {"enabled": True, "trainer": "art_trainer", "trajectory_builder": "art_builder",
                   "trainer_adapter": "art_adapter", "reward_function": {"name": "accuracy"}, "num_epochs": 1,
                   "output_dir": "./.tmp/nat/finetuning/sums"},
}  # fmt: skip
#: Preference pairs, trained by a service.
CUSTOMIZER: dict[str, Any] = {
    "llms": {"player": {"_type": "nim", "model_name": "some/model-70b"}},
    "functions": {"choose": {"_type": "choose", "llm": "player"}},
    "ttc_strategies": {"scorer": {"_type": "scorer"}},
    "workflow": {"_type": "sums_dpo"},
    "eval": {
        "general": {"max_concurrency": 8, "output_dir": ".tmp/nat/eval", "dataset": {
            "_type": "json", "file_path": "data/data.json", "id_key": "id",
            "structure": {"question_key": "question", "answer_key": "answer"}}},
        "evaluators": {"outcome": {"_type": "evaluator.py:Accuracy", "right": 2.0}},
    },
    "trajectory_builders": {"dpo_builder": {
        "_type": "dpo_traj_builder", "custom_step_name": "candidates", "exhaustive_pairs": True, "min_score_diff": 0.01,
        "max_pairs_per_turn": 5, "reward_from_score_diff": True}},
    "trainer_adapters": {"customizer": {
        "_type": "nemo_customizer_trainer_adapter", "entity_host": "http://localhost:1", "namespace": "n",
        "hyperparameters": {"training_type": "dpo", "epochs": 2, "batch_size": 4, "dpo": {"ref_policy_kl_penalty": 0.2}},
        "deploy_on_completion": True, "deployment_config": {"image_name": "nim", "gpu": 2}}},
    "trainers": {"customizer_trainer": {"_type": "nemo_customizer_trainer", "num_runs": 1, "deduplicate_pairs": True}},
    "finetuning": {"enabled": True, "trainer": "customizer_trainer", "trajectory_builder": "dpo_builder",
                   "trainer_adapter": "customizer", "output_dir": "./.tmp/nat/finetuning/dpo"},
}  # fmt: skip
#: Every part is one of the writer's own, and the policy is behind a server.
MINIMAL: dict[str, Any] = {
    "llms": {"player": {"_type": "openai", "model_name": "Some/Model-3B", "base_url": "http://localhost:8000/v1",
                        "api_key": "default"}},
    "workflow": {"_type": "my_workflow", "llm": "player"},
    "eval": {
        "general": {"max_concurrency": 16, "output_dir": ".tmp/nat/eval",
                    "dataset": {"_type": "json", "file_path": "data/none.json"}},
        "evaluators": {"accuracy": {"_type": "my_accuracy"}},
    },
    "trajectory_builders": {"my_builder": {"_type": "my_builder", "num_generations": 2}},
    "trainer_adapters": {"my_adapter": {"_type": "my_adapter"}},
    "trainers": {"my_trainer": {"_type": "my_trainer"}},
    "finetuning": {"enabled": True, "trainer": "my_trainer", "trajectory_builder": "my_builder",
                   "trainer_adapter": "my_adapter", "reward_function": {"name": "accuracy"}, "num_epochs": 10,
                   "output_dir": ".tmp/nat/finetuning"},
}  # fmt: skip
#: As the pages of these backends have them: no trainer of its own, a key of the environment, an older name of a key.
NO_TRAINER = {key: value for key, value in ART.items() if key != "trainers"}
SERVED: dict[str, Any] = {
    **CUSTOMIZER,
    "llms": {"player": {"_type": "openai", "model_name": "some/model-8b", "base_url": "http://localhost:1/v1",
                        "api_key": "${KEY_THAT_IS_NOT_SET}"}},
    "trajectory_builders": {"dpo_builder": {"_type": "dpo_traj_builder", "ttc_step_name": "candidates"}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files, six questions and the evaluator: the working directory."""
    (tmp_path / "data").mkdir()
    rows = [json.loads(line) for line in (DATA / "tasks" / "train.jsonl").read_text().splitlines()[:6]]
    questions = [{"id": n, "question": row["prompt"], "answer": row["answer"]} for n, row in enumerate(rows)]
    (tmp_path / "data" / "data.json").write_text(json.dumps(questions))
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    files = {"art": ART, "customizer": CUSTOMIZER, "minimal": MINIMAL, "no_trainer": NO_TRAINER, "served": SERVED}
    for name, values in files.items():
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(values, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cures(**more: str) -> list[str]:
    """``-o KEY VALUE`` of the local model, and of the keys in ``more`` with __ for the dot."""
    given = {"llms__player__model_name": str(DATA / "policy"), **more}
    return [word for key, value in given.items() for word in ("-o", key.replace("__", "."), value)]


#: What the DPO example needs here.
DPO = [
    ("llms.player.model_name", str(DATA / "policy")),
    ("trajectory_builders.dpo_builder.env", str(DATA / "calculator.py:Calculator")),
]


def planned(folder: Path, *more: tuple[str, str]) -> tuple[Plan, Any]:
    """The plan of the DPO example and its builder, which is of the shipped kind."""
    return plan_of(load(folder / "customizer.yml", [*DPO, *more]), folder / "customizer.yml")


def test_everything_that_is_missing_is_listed_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published file as it is: each thing to give, with the option that gives it, in one error."""
    assert main(["finetune", "--config_file", str(folder / "art.yml"), "--json"]) == 2
    said = json.loads(capsys.readouterr().out)["error"]
    faults = [(fault["message"].partition(": ")[2], fault["hint"] or "") for fault in said["faults"]]
    for what, cure in (
        ("the section 'workflow'", "-o trajectory_builders.art_builder.env path.py:Class"),
        ("Some/Model-3B", "-o llms.player.model_name FOLDER"),
        ("trajectory_builders.art_builder.num_generations", "-o trajectory_builders.art_builder.num_generations 8"),
        (
            "eval.evaluators.accuracy._type: got 'accuracy', expected one of reward, genrm, path.py:Class",
            "-o eval.evaluators.accuracy._type path.py:Class",
        ),
    ):
        assert [hint for text, hint in faults if what in text and cure in hint], what
    assert len(faults) == 4


@pytest.mark.parametrize("file", ["art.yml", "customizer.yml", "minimal.yml", "no_trainer.yml", "served.yml"])
def test_what_is_listed_at_once_is_enough_to_start(
    file: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one error names every `-o KEY VALUE` that is needed: with these, and nothing else, the loop begins."""
    values = {"FOLDER": DATA / "policy", "FILE": folder / "data" / "data.json"}
    classes = {"env": DATA / "calculator.py:Calculator", "_type": "evaluator.py:Accuracy"}
    assert main(["finetune", str(folder / file), "--json"]) == 2
    faults = json.loads(capsys.readouterr().out)["error"]["faults"]
    listed = [re.findall(r"-o (\S+) ([^\s;]+)", fault["hint"] or "") for fault in faults]
    assert all(listed), faults
    given = [
        (key, str(classes[key.rpartition(".")[2]] if value == "path.py:Class" else values.get(value, value)))
        for key, value in chain.from_iterable(listed)
    ]
    begun: list[Plan] = []

    def begins(_: EpochLoop, plan: Plan, *parts: Any) -> dict[str, Any]:
        begun.append(plan)
        return {}

    monkeypatch.setattr(EpochLoop, "run", begins)
    finetune(folder / file, given)
    assert [(plan.start, plan.served) for plan in begun] == [(DATA / "policy", False)]


def test_an_unknown_key_does_not_hide_what_else_is_missing(folder: Path) -> None:
    """It is listed with the rest."""
    with pytest.raises(UsageError) as refused:
        finetune(folder / "minimal.yml", [("llms.player.presence", 1)])
    texts = [fault.message for fault in refused.value.faults]
    assert len(texts) == 8
    assert any("unknown key 'presence'" in text for text in texts)


def test_a_fault_of_two_checks_is_listed_once(folder: Path) -> None:
    """The builder's keys are read as such, and again for its environment."""
    with pytest.raises(UsageError) as refused:
        finetune(folder / "customizer.yml", [("trajectory_builders.dpo_builder.presence", 1)])
    assert [fault.message.count("unknown key") for fault in refused.value.faults] == [0, 1, 0]


def test_sampling_keys_of_what_is_always_kept_are_named(folder: Path) -> None:
    """``logprobs`` and ``top_logprobs`` of a published section are accepted, with a line that says so."""
    notes: list[str] = []
    with pytest.raises(UsageError):
        load(folder / "art.yml", notes=notes)
    load(folder / "customizer.yml", [*DPO, ("llms.player.logprobs", True), ("llms.player.max_retries", 3)], notes=notes)
    assert "llms.player.logprobs is not read: always kept: the id and the log-prob of every sampled token" in notes
    assert any(note.startswith("llms.player.max_retries is not read") for note in notes)


def test_a_policy_is_a_name_in_the_local_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``acme/tiny`` is the snapshot of that name, as ``collect -m`` takes it."""
    cached = folder / "hub" / "models--acme--tiny"
    snapshot = cached / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(DATA / "policy")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    plan, _ = plan_of(
        load(folder / "customizer.yml", [("llms.player.model_name", "acme/tiny"), DPO[1]]), folder / "customizer.yml"
    )
    assert plan.start == snapshot


def test_a_served_policy_is_sampled_here_by_its_type(folder: Path) -> None:
    """``_type vllm`` is enough: the server's address and key stay unread, with a line each."""
    notes: list[str] = []
    given = [("llms.player._type", "vllm"), ("llms.player.model_name", str(DATA / "policy")), *(
        (f"{section}._type", kind) for section, kind in (("trainers.my_trainer", "epochs"),
        ("trainer_adapters.my_adapter", "trl"), ("trajectory_builders.my_builder", "collect"))),
        ("trajectory_builders.my_builder.env", "x.py:X"),
        ("eval.evaluators.accuracy._type", "evaluator.py:Accuracy")]  # fmt: skip
    config = load(folder / "minimal.yml", given, notes=notes)
    assert config.llms["player"].base_url is None
    assert {"llms.player.base_url", "llms.player.api_key"} <= {note.partition(" ")[0] for note in notes}


@pytest.mark.parametrize("model", ["other", "playr"])
def test_a_target_model_that_is_not_there_is_named(model: str, folder: Path) -> None:
    """With the names that are."""
    with pytest.raises(UsageError, match=rf"finetuning.target_model: got '{model}', expected one of player"):
        finetune(folder / "customizer.yml", [*DPO, ("finetuning.target_model", model)])


@pytest.mark.parametrize(
    ("file", "key"),
    [("art.yml", "trainer_adapters.art_adapter.training"), ("customizer.yml", "trainer_adapters.customizer.hyperparameters"),
     ("customizer.yml", "trainer_adapters.customizer.hyperparameters.dpo")],
)  # fmt: skip
def test_a_number_where_a_section_belongs_is_named(file: str, key: str, folder: Path) -> None:
    """The error says which key is no mapping."""
    with pytest.raises(UsageError, match=rf"{key}: got 5, expected a mapping"):
        load(folder / file, [(key, 5)])


def test_what_a_service_would_do_is_named_and_left_out(folder: Path) -> None:
    """What is carried over arrives in our settings; each other key has a line that says why it is not read."""
    notes: list[str] = []
    given = [("llms.player.model_name", str(DATA / "policy")), ("trajectory_builders.art_builder.num_generations", "4"),
             ("trajectory_builders.art_builder.env", str(DATA / "calculator.py:Calculator")),
             ("eval.evaluators.accuracy._type", "evaluator.py:Accuracy")]  # fmt: skip
    config = load(folder / "art.yml", given, notes=notes)
    assert config.llms["player"].type_ == "vllm"
    assert set(config.llms) == {"player"}
    assert config.trainer_adapters["art_adapter"].keys()["rl"] == {
        "learning_rate": 1e-5, "per_device_train_batch_size": 8, "kl_beta": 0.1,
    }  # fmt: skip
    named = {note.partition(" is not read")[0] for note in notes}
    assert {"workflow", "llms.big", "llms.player.base_url", "llms.player.api_key", "eval.general.output_dir",
            "trainer_adapters.art_adapter.backend.engine_args",
            "trainer_adapters.art_adapter.training.sync_ref_model"} <= named  # fmt: skip
    assert plan_of(config, folder / "art.yml")[0].reward == ("evaluator.py:Accuracy",)


@pytest.mark.full
def test_the_dpo_example_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a local model and an engine that answers by rule: pairs, DPO for real, 2 for each right answer."""
    # The builder of the test takes no keys of a shipped one.
    values = json.loads(json.dumps(CUSTOMIZER))
    values["trajectory_builders"]["dpo_builder"] = {"_type": BUILDER}
    values["trainers"]["customizer_trainer"] |= {"pairs": {"strategy": "all"}, "measure_kl": 0}
    (folder / "dpo.yml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert (
        main(["finetune", "--config_file", str(folder / "dpo.yml"), *cures(), "--result-file", "r.json", "--json"]) == 0
    )
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result == json.loads(Path("r.json").read_text())
    assert (result["algorithm"], result["policy_version"]) == ("dpo", 1)
    assert "functions is not read" in shown.err
    assert "trainer_adapters.customizer.deployment_config is not read" in shown.err
    run = Path(".tmp/nat/finetuning/dpo/epoch-001")
    assert set(read_table(run / "rollouts", ROLLOUTS)["reward"].to_pylist()) == {0.0, 2.0}
    settings = json.loads((run / "train.yaml").read_text())
    assert (settings["num_train_epochs"], settings["per_device_train_batch_size"], settings["beta"]) == (2, 4, 0.2)


def test_pairs_are_chosen_as_the_dpo_builder_says(folder: Path) -> None:
    """All pairs with a margin of 0.01, at most five per task; the question, the answer and the id are the named columns."""
    plan, builder = planned(folder)
    assert dict(plan.trainer.pairs) == {"min_margin": 0.01, "max_pairs_per_task": 5, "strategy": "all"}
    assert builder.base["map"] == ["prompt=question", "answer=answer", "task_id=id"]
    assert plan.reward == ('evaluator.py:Accuracy{"right": 2.0}',)


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_rl_example_trains_with_the_engine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published file with a local model, an environment, an evaluator's class and four rollouts per task."""
    pytest.importorskip("vllm")
    words = cures(
        trajectory_builders__art_builder__env=str(DATA / "calculator.py:Calculator"),
        trajectory_builders__art_builder__num_generations="4",
        llms__player__max_tokens="48",
        eval__evaluators__accuracy___type="evaluator.py:Accuracy",
    )
    assert main(["finetune", "--config_file", str(folder / "art.yml"), *words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    run = Path(".tmp/nat/finetuning/sums/epoch-001")
    assert result["trained_tokens"] > 0
    assert read_table(run / "rollouts", ROLLOUTS).num_rows == 24
    assert "default" not in json.dumps(read_run_json(run.parent)["config"]["llms"])


def test_the_key_of_a_server_comes_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``${NAME}`` is that variable, one that is not set is named, and no file holds the value."""
    llm = {"_type": "openai", "model_name": "served", "base_url": "http://localhost:1", "api_key": "${MY_KEY}",
           "model": str(DATA / "policy")}  # fmt: skip
    file = folder / "key.yml"
    file.write_text(yaml.safe_dump({**ART, "workflow": None, "llms": {"player": llm}} | {"trainer_adapters": {
        "art_adapter": {"_type": "trl"}}, "trajectory_builders": {"art_builder": {"_type": "collect"}}}))  # fmt: skip
    given = [("eval.evaluators.accuracy._type", "evaluator.py:Accuracy")]
    with pytest.raises(UsageError, match=r"llms.player.api_key: MY_KEY is not in the environment"):
        load(file, [*given, ("trajectory_builders.art_builder.env", "x.py:X")])
    monkeypatch.setenv("MY_KEY", "secret-7")
    config = load(file, [*given, ("trajectory_builders.art_builder.env", "x.py:X")])
    key = config.llms["player"].api_key
    assert key is not None
    assert key.get_secret_value() == "secret-7"
    assert "secret-7" not in config.model_dump_json()


@pytest.mark.parametrize(
    ("keywords", "said", "hint"),
    [
        (
            {"endpoint": "http://localhost:8000/generate"},
            "is a workflow's URL",
            "trajectory_builders.NAME.agent",
        ),
        ({"result_json_path": "result.json"}, "expected a JSON path", "result_file="),
        (
            {"result_json_path": "$.value"},
            "there is no agent whose answer",
            "trajectory_builders.dpo_builder.agent",
        ),
    ],
)
def test_flags_of_a_served_workflow_say_where_it_goes(
    folder: Path, keywords: dict[str, Any], said: str, hint: str
) -> None:
    """``--endpoint …/generate`` belongs to the builder's agent, and ``--result-json-path`` is a place in its answer."""
    with pytest.raises(UsageError, match=said) as caught:
        finetune(folder / "customizer.yml", DPO, **keywords)
    assert hint in str(caught.value.hint)


def test_an_agent_stands_in_for_the_sections_of_a_workflow(folder: Path) -> None:
    """With ``agent`` the workflow's sections are noted and not read; the path into its answer reaches the collection; one
    that cannot be loaded is listed as the builder's."""
    key = "trajectory_builders.dpo_builder.agent"
    overrides = [DPO[0], (key, str(DATA / "served_workflow.py:run"))]
    notes: list[str] = []
    path = ("trajectory_builders.dpo_builder.result_json_path", "$.value")
    builder: Any = plan_of(load(folder / "customizer.yml", [*overrides, path], notes=notes), folder / "customizer.yml")[
        1
    ]
    assert builder.config.settings["result_json_path"] == "$.value"
    assert {note.partition(" ")[0] for note in notes} >= {"workflow", "functions", "ttc_strategies"}
    for bad, said in ((str(DATA / "served_workflow.py:runs"), "runs"), ("no-such-agent {prompt}", "no-such-agent")):
        with pytest.raises(UsageError, match=f"{re.escape(key)}: .*{said}"):
            finetune(folder / "customizer.yml", [DPO[0], (key, bad)])
    with pytest.raises(UsageError, match="a JSON path to one place"):
        finetune(folder / "customizer.yml", overrides, result_json_path="$.a[*]")


def test_another_dataset_has_the_same_columns(folder: Path) -> None:
    """``--dataset`` names another file of the same columns: the structure that the file states stays."""
    (folder / "other.json").write_text((folder / "data" / "data.json").read_text())
    plan, builder = planned(folder, ("eval.general.dataset", "other.json"))
    assert plan.tasks == str(folder / "other.json")
    assert builder.base["map"] == ["prompt=question", "answer=answer", "task_id=id"]
