"""``gymdata finetune`` whole, with an engine that answers by rule and a trainer that is a command."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from gymdata.cli.main import main
from gymdata.commands.finetune.jobs import CommandRunner
from gymdata.rollouts.schema import COMPARISONS, PAIRS
from gymdata.store import read_run_json, read_table
from tests.finetune.parts import BUILDER, by_rule, counting

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[2] / "sample_data"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Six tasks, four rollouts each."""
    return by_rule(tmp_path, tmp_path / "out", counting("echo loss went down"), algorithm="anything", limit=6)


def edited(config: Path, section: str, parts: dict[str, Any]) -> None:
    """The file, with ``parts`` of a section in place of its own."""
    values = yaml.safe_load(config.read_text())
    values[section] = parts
    config.write_text(yaml.safe_dump(values))


def test_any_trainer_is_a_command(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The epoch's pairs are exported, the command is run, its folder is the next policy; the result is a file too."""
    result_file, heldout = tmp_path / "result.json", DATA / "tasks" / "heldout.jsonl"
    words = ["finetune", "--config_file", str(config), "-o", "num_epochs", "2", "--override", "finetuning.seed", "3",
             "--validation_dataset", str(heldout), "-o", "validation.limit", "4", "--validation-interval", "2",
             "--result-file", str(result_file), "--json"]  # fmt: skip
    assert main(words) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result == json.loads(result_file.read_text()) == json.loads((tmp_path / "out" / "result.json").read_text())
    epochs = {
        0: "validate",
        1: "collect check select data train log",
        2: "collect check select data train validate log",
    }
    stages = [f"epoch {epoch}: {stage}" for epoch, names in epochs.items() for stage in names.split()]
    # A stage that takes seconds also prints its counts: `epoch 1: collect 8/24`.
    lines = [line for line in shown.err.splitlines() if not re.match(r"epoch \d: \w+ \d", line)]
    assert [line.split("  ")[0] for line in lines] == [*stages[:7], "epoch 1", *stages[7:], "epoch 2"]
    assert (result["status"], result["policy_version"], result["validation"]["last"]["epoch"]) == ("completed", 2, 2)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        folder = tmp_path / "out" / f"epoch-{row['epoch']:03d}"
        assert int((folder / "policy" / "lines").read_text()) == row["pairs"] > 0
        assert "loss went down" in (folder / "logs" / "train.log").read_text()
    assert rows[0]["validation"] is None
    assert rows[1]["validation"]["n"] == 4
    facts = read_run_json(tmp_path / "out")
    assert (facts["status"], facts["config"]["finetuning"]["seed"]) == ("completed", 3)
    assert Path(facts["parents"][0]["path"]) == tmp_path / "out" / "epoch-002" / "policy"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "4 held-out tasks</h1>" in page
    assert page.count("<li>Epoch ") == 2


@pytest.mark.full
def test_a_real_judge_in_an_epoch(config: Path, tmp_path: Path) -> None:
    """The sample judge, an evaluator of the file, scores what the sample policy said; the pairs come of its comparisons."""
    values = yaml.safe_load(config.read_text())
    values["llms"]["policy"] |= {"_type": "vllm", "max_tokens": 48}
    values["trajectory_builders"]["b"] = {
        "_type": "collect", "num_generations": 4, "env": f"{DATA / 'calculator.py'}:Calculator",
    }  # fmt: skip
    values["eval"]["evaluators"]["judge"] = {
        "_type": "genrm", "genrm": str(DATA / "genrm"), "max_tokens": 64, "show": "transcript",
        "comparison_strategy": "both_orders", "engine": {"gpu_memory_utilization": 0.1, "max_num_seqs": 32},
    }  # fmt: skip
    values["finetuning"]["reward_function"] = {"name": "judge"}
    config.write_text(yaml.safe_dump(values))
    assert main(["finetune", str(config)]) == 0
    epoch = tmp_path / "out" / "epoch-001"
    comparisons = read_table(epoch / "rollouts" / "judge-judge", COMPARISONS)
    assert comparisons.num_rows == 6 * 4 * 3
    assert set(comparisons["status"].to_pylist()) <= {"judged", "unparsed"}
    pairs = read_table(epoch / "pairs" / "pairs.parquet", PAIRS)
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert pairs.num_rows == row["pairs"] > 0
    assert set(pairs["source"].to_pylist()) == {"genrm"}


def test_a_failed_job_is_exit_code_3(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer is named with its last words; nothing says completed; mended, the same folder goes on, and the policy and
    the report are named from the current folder."""
    monkeypatch.chdir(tmp_path)
    broken = ["-o", "trainer_adapters.t.command", '[sh, -c, "echo no memory >&2; exit 9"]']
    assert main(["finetune", str(config), *broken]) == 3
    shown = capsys.readouterr()
    assert "trainer: epoch 1: the anything job failed: ended with exit code 9" in shown.err
    assert "no memory" in shown.err
    assert "completed" not in shown.out
    assert json.loads((tmp_path / "out" / "state.json").read_text())["status"] == "failed"
    assert main(["finetune", str(config), *broken]) == 3
    assert main(["finetune", str(config)]) == 0
    assert {"out/epoch-001/policy", "out/report.html"} <= set(capsys.readouterr().out.split())
    stages = json.loads((tmp_path / "out" / "state.json").read_text())["epochs"]["1"]
    assert [stages[name]["attempts"] for name in ("collect", "data", "train")] == [1, 1, 3]


def test_mistakes_are_exit_code_2(config: Path) -> None:
    """A configuration given twice or not at all, half an override."""
    assert main(["finetune", str(config), "--config_file", str(config)]) == 2
    assert main(["finetune"]) == 2
    assert main(["finetune", str(config), "-o", "num_epochs"]) == 2
    assert main(["finetune", str(config), "-o", "enabled", "false"]) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-o", "num_epoch", "3"], "-o num_epoch: unknown key 'num_epoch'\n  → did you mean 'num_epochs'?"),
        (["-o", "num_epochs", "many"], "-o num_epochs: got 'many', expected"),
        (["-o", "trainers.loop.measure_kl", "-3"], "-o trainers.loop.measure_kl: got -3, expected"),
        (["--validation-interval", "0"], "--validation-interval: got 0, expected"),
        (["-o", "seed", "-1"], "-o seed: got -1"),
        (["-o", "finetuning.limit.x", "3"], "-o finetuning.limit.x: 'limit' is a single value"),
        (["-o", "finetuning..x", "3"], "dotted key"),
    ],
)
def test_an_override_is_named_as_it_was_given(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    """A mistake on the command line is not looked for in the file."""
    assert main(["finetune", str(config), *words]) == 2
    shown = capsys.readouterr().err
    assert named in shown
    assert str(config) not in shown


#: A file with parts that cannot be used.
PARTS = """
class Trainer:
    def data(self, algorithm): return "pairs"
    async def train(self, job, progress): ...
class Builder:
    async def collect(self, order, progress): ...
class Loop:
    async def run(self, plan, builder, adapter, watch): ...
async def make(): ...
value = 3
class Failing:
    def __init__(self):
        1 / 0
"""


@pytest.mark.parametrize(
    ("section", "part", "message"),
    [
        ("trajectory_builders", {"_type": f"{BUILDER}x"}, "did you mean 'Builder'"),
        ("trajectory_builders", {"_type": BUILDER, "num_generation": 2}, "did you mean 'num_generations'"),
        ("trajectory_builders", {"_type": BUILDER.replace(":Builder", ":Sampler")}, "latency"),
        ("trajectory_builders", {"_type": "unheard-of"}, "expected one of collect"),
        ("trajectory_builders", {"_type": "parts.py:Builder"}, "parts.py:Builder: collect is async (parts.py:6)"),
        ("trainer_adapters", {"_type": "parts.py:Trainer"}, "parts.py:Trainer: train is async (parts.py:4)"),
        ("trainers", {"_type": "parts.py:Loop"}, "parts.py:Loop: run is async (parts.py:8), expected a plain method"),
        ("trainer_adapters", {"_type": "parts.py:make"}, "got an async function, expected a class"),
        ("trainer_adapters", {"_type": "parts.py:value"}, "got a value of type int, expected a class"),
        (
            "trainer_adapters",
            {"_type": "parts.py:Failing"},
            "Failing raised ZeroDivisionError: division by zero (parts.py:13, in __init__)",
        ),
    ],
    ids=lambda value: value.get("_type", "").rpartition("/")[2] if isinstance(value, dict) else "",
)
def test_a_part_of_ones_own_that_cannot_be_used_is_refused(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    section: str,
    part: dict[str, Any],
    message: str,
) -> None:
    """Exit 2 with name, file and line before anything is started: a coroutine that nobody awaits would train nothing."""
    monkeypatch.chdir(config.parent)
    (config.parent / "parts.py").write_text(PARTS)
    edited(config, section, {"mine": part})
    assert main(["finetune", str(config)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert ("asyncio.run" in shown) == ("is async" in message)
    assert "defect" not in shown


def test_a_loop_of_ones_own(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that is a class gets the plan and the parts, and what it returns is shown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(
        "class Peek:\n"
        "    def __init__(self, word):\n"
        "        self.word = word\n"
        "    def run(self, plan, builder, adapter, watch):\n"
        "        return {self.word: plan.loop.num_epochs, 'reads': adapter.data(plan.loop.algorithm)}\n"
    )
    edited(config, "trainers", {"mine": {"_type": "loop.py:Peek", "word": "wanted"}})
    assert main(["finetune", str(config), "-o", "num_epochs", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"wanted": 7, "reads": "export:trl-preference"}
    assert main(["finetune", str(config)]) == 0
    assert "wanted" in capsys.readouterr().out


def test_installed_parts_have_names(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that a package declares under gymdata.trajectory_builders is found by its name."""
    from gymdata.commands.finetune import parts as finetune_parts
    from gymdata.commands.finetune import settings as finetune_settings
    from gymdata.commands.finetune.config_file import load

    point = EntryPoint("theirs", "tests.finetune.deterministic:Builder", "gymdata.trajectory_builders")
    for module in (finetune_parts, finetune_settings):
        monkeypatch.setattr(module, "entry_points", lambda group, **_: [point] if group == point.group else [])
    edited(config, "trajectory_builders", {"b": {"_type": "theirs", "num_generations": 2}})
    made = finetune_parts.builder_of(load(config), str(config), CommandRunner(), {})
    assert type(made).__name__ == "Builder"


@pytest.mark.parametrize(
    "words",
    [["CONFIG", "-o", "runs/x"], ["-o", "runs/x", "CONFIG"], ["-o", "out", "CONFIG"], ["CONFIG", "-o", "out"],
     ["CONFIG", "-o", "out", "--json"], ["CONFIG", "-o", "./out", "-v"]],
)  # fmt: skip
def test_a_folder_given_with_o_is_told_where_it_goes(
    config: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """-o sets a key here, as published; given a folder, the error names --output."""
    assert main(["finetune", *(str(config) if word == "CONFIG" else word for word in words)]) == 2
    assert "-o is KEY VALUE here; the folder is --output" in "".join(capsys.readouterr())


#: (method, what it does, exit code, what is said)
ODD_METHODS = [
    ("data", "raise LookupError('no such data')", 1, ["LookupError: no such data", "parts.py:{line}, in data"]),
    ("data", "return 5", 2, ["the adapter's data (parts.py:{line})", "expected a str"]),
    ("train", "raise LookupError('no cluster')", 1, ["LookupError: no cluster", "parts.py:{line}, in train"]),
]


def test_a_method_of_an_adapter_that_raises_or_returns_another_kind_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error of the method's file and line, never a defect; mended, the same folder goes on to the next one."""
    monkeypatch.chdir(config.parent)
    edited(config, "trainer_adapters", {"t": {"_type": "parts.py:Adapter"}})
    good = {"data": "return 'pairs'", "train": "pass"}
    for number, (method, body, code, messages) in enumerate(ODD_METHODS):
        methods = "".join(f"    def {name}(self, *a): {one}\n" for name, one in {**good, method: body}.items())
        (config.parent / "parts.py").write_text(f"# {number}\nclass Adapter:\n{methods}")
        assert main(["finetune", str(config)]) == code
        shown = capsys.readouterr().err
        line = 3 + list(good).index(method)
        assert [text for text in messages if text.format(line=line) not in shown] == [], (method, body)
        assert "defect" not in shown
