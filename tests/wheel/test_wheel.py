"""The wheel alone, in an empty environment outside the checkout, does what the documentation says of each install."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from gymdata.cli.main import COMMANDS
from tests.wheel.conftest import ROOT, Installed

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path):
    """Every module and data file that the checkout has is in the wheel, with the licence and the mark of types."""
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"gymdata/py.typed"}
    for folder, package in {"gymdata": "gymdata", "cli": "gymdata/cli", "sample_data": "gymdata/sample_data"}.items():
        wanted |= {
            f"{package}/{file.relative_to(ROOT / folder)}"
            for file in (ROOT / folder).rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
    assert wanted - held == set()
    assert [name for name in held if name.endswith("licenses/LICENSE")]


def test_every_command_has_its_help_without_extras(base: Installed):
    """--help of every command works on the base install."""
    helps = (
        "import sys; from gymdata.cli.main import main\nfor command in sys.argv[1:]: print(main([command, '--help']))"
    )
    done = base.python("-c", helps, *COMMANDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: gymdata") == len(COMMANDS)


@pytest.mark.full
def test_the_light_commands_run_on_the_shipped_data(base: Installed):
    """What needs no extra runs with the declared dependencies only."""
    clean, nemo = str(base.data / "rollouts" / "clean.jsonl"), str(base.data / "rollouts" / "nemo_gym.jsonl")
    shipped = [
        ("validate", clean),
        ("score", clean, "--reward", "numeric", "-o", "scores"),
        ("filter", clean, "scores", "--where", "reward_numeric == 1", "-o", "filtered"),
        ("filter", clean, "--where", "reward == 1", "--where", "task.left > 3", "-o", "by-task"),
        ("pairs", clean, "-o", "pairs"),
        ("experience", clean, "-o", "experience"),
        ("query", "select count(*) as n, avg(reward) from rollouts", clean),
        ("query", "select * from rollouts limit 1", clean, "--json"),
        ("import", nemo, "-o", "imported"),
        ("validate", "imported"),
        ("doctor",),
        ("demo", "--dry-run", "-o", "demo"),
        ("tour", "--no-view", "-o", "tour"),
        *(("export", clean, "--format", kind, "-o", f"{kind}.jsonl") for kind in ("nemo-gym", "atif", "trl-messages")),
        ("export", "pairs", "--format", "trl-preference", "-o", "preference.jsonl"),
        ("import", "nemo-gym.jsonl", "-o", "imported-again"),
    ]
    for command in shipped:
        done = base.gymdata(*command)
        assert done.returncode == 0, f"gymdata {' '.join(command)}\n{done.stdout}{done.stderr}"


def test_light_commands_load_no_module_that_is_not_declared(base: Installed):
    """pandas is not a dependency, and is not in the environment either: nothing above can have used it."""
    assert base.python("-c", "import pandas").returncode == 1


@pytest.mark.matrix("cpu-collect", "collect-check", "train-train-sft", "serve-serve-genrm", "rewards-score0")
@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("cpu", "collect {data}/tasks/train.jsonl -m {data}/policy -o out --reward numeric"),
        ("collect", "collect {data}/tasks/train.jsonl -m {data}/policy -o out --reward numeric --endpoint http://127.0.0.1:9"),
        ("collect", "check {data}/policy"),
        ("cpu", "judge {data}/rollouts/clean.jsonl --genrm {data}/genrm"),
        ("train", "audit {data}/rollouts/clean.jsonl -m {data}/policy"),
        ("train", "train-sft {data}/rollouts/clean.jsonl -m {data}/policy -o out"),
        ("train", "train-kto {data}/rollouts/clean.jsonl -m {data}/policy -o out"),
        ("train", "train-dpo {made}/pairs -m {data}/policy -o out"),
        ("train", "train-reward {made}/pairs -m {data}/policy -o out"),
        ("train", "train-rl {made}/experience -m {data}/policy -o out"),
        (
            "train,cpu",
            "finetune --config_file {data}/finetune.yaml --dataset {data}/tasks/train.jsonl"
            " --validation_dataset {data}/tasks/heldout.jsonl -o llms.policy.model_name {data}/policy"
            " -o trajectory_builders.calculator.env {data}/calculator.py:Calculator",
        ),
        ("serve", "serve-genrm --genrm {data}/genrm"),
        ("rewards", "score {data}/rollouts/clean.jsonl --reward math_verify -o out"),
        ("rewards", "score {data}/rollouts/clean.jsonl --reward json_schema -o out"),
    ],
    ids=lambda value: value.split()[0],
)  # fmt: skip
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    base: Installed, made: Path, wheel: Path, extra: str, command: str
):
    """Two lines and exit code 2: what is missing, and a pip command with the file that this copy came from."""
    done = base.gymdata(*command.format(data=base.data, made=made).split())
    assert done.returncode == 2, done.stdout + done.stderr
    missing, hint = done.stderr.strip().splitlines()[-2:]
    assert missing.startswith("error: this needs the Python module ")
    assert hint.startswith(f"  → pip install '{wheel}[{extra}]'")


@pytest.mark.full
def test_one_training_step_with_the_train_extra_alone(training: Installed):
    """What the hint of `train-dpo` installs is enough to train: one step on the shipped policy, on the exact tokens."""
    clean, policy = str(training.data / "rollouts" / "clean.jsonl"), str(training.data / "policy")
    for command in [
        ("train-dpo", "pairs", "-m", policy, "-o", "trained", "--set", "max_steps=1"),
        ("audit", clean, "-m", policy, "-o", "audit"),
    ]:
        done = training.gymdata(*command)
        assert done.returncode == 0, f"gymdata {' '.join(command)}\n{done.stdout}{done.stderr[-3000:]}"
    facts = json.loads((training.work / "trained" / "run.json").read_text())
    assert facts["trained_tokens"]["equal"]
    assert (training.work / "trained" / "model.safetensors").is_file()
