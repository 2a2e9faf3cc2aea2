"""``collect --config`` with a configuration of NeMo Gym: its dataset is the tasks, and its server is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gymdata.commands.collect.settings import CollectConfig
from gymdata.errors import UsageError

TASKS = "resources_servers/sums/data/example.jsonl"


def written(root: Path, *datasets: dict[str, Any], **server: Any) -> Path:
    """A configuration where NeMo Gym keeps them, below its root."""
    for data in datasets:
        file = root / data["jsonl_fpath"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    agent = {"entrypoint": "app.py", "resources_server": {"name": "sums"}, "datasets": [*datasets]}
    values = {
        "sums": {"resources_servers": {"sums": {"entrypoint": "app.py", **server}}},
        "sums_simple_agent": {"responses_api_agents": {"simple_agent": agent}},
    }
    config = root / "resources_servers" / "sums" / "configs" / "sums.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(values))
    return config


def test_its_dataset_is_the_tasks(tmp_path: Path) -> None:
    """Found from the configuration's folder, with its repeats; --env says where the server listens."""
    file = written(tmp_path, {"name": "example", "type": "example", "jsonl_fpath": TASKS, "num_repeats": 3})
    config = CollectConfig.load(file, {"env": ["http://localhost:1"], "model": "m"})
    assert (config.tasks, config.num_rollouts, config.env) == (str(tmp_path / TASKS), 3, ["http://localhost:1"])


def test_given_tasks_are_taken_in_its_place(tmp_path: Path) -> None:
    file = written(tmp_path, {"name": "a", "jsonl_fpath": TASKS}, {"name": "b", "jsonl_fpath": "b.jsonl"})
    given = {"tasks": "mine.jsonl", "env": ["http://localhost:1"], "model": "m"}
    assert CollectConfig.load(file, given).tasks == "mine.jsonl"


def test_an_address_in_it_is_the_environment(tmp_path: Path) -> None:
    file = written(tmp_path, {"name": "example", "jsonl_fpath": TASKS}, host="127.0.0.1", port=18931)
    assert CollectConfig.load(file, {"model": "m"}).env == ["http://127.0.0.1:18931"]


def test_a_server_without_an_address_is_named_with_the_command(tmp_path: Path) -> None:
    file = written(tmp_path, {"name": "example", "jsonl_fpath": TASKS})
    with pytest.raises(UsageError, match="does not say where its server sums listens") as refused:
        CollectConfig.load(file, {"model": "m"})
    assert str(refused.value.hint).endswith(
        f"gymdata collect {tmp_path / TASKS} --config {file} --env http://HOST:PORT"
    )


def test_several_datasets_are_listed(tmp_path: Path) -> None:
    """None of them is chosen."""
    file = written(tmp_path, {"name": "a", "jsonl_fpath": TASKS}, {"name": "b", "jsonl_fpath": "data/train.jsonl"})
    with pytest.raises(UsageError, match=r"2 datasets \(example.jsonl, train.jsonl\), expected one"):
        CollectConfig.load(file, {"env": ["http://localhost:1"]})
