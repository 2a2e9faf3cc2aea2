"""From a file as it is published to a trained model, with no conversion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gymdata.cli.main import main
from gymdata.store import read_run_json, read_table

pytestmark = pytest.mark.engine
DATA = Path(__file__).parents[2] / "sample_data"
TASKS = [json.loads(line) for line in (DATA / "tasks" / "train.jsonl").read_text().splitlines()[:8]]


def gsm8k(folder: Path) -> Path:
    """Parquet with the whole solution as the answer."""
    rows = [
        {"question": t["prompt"], "answer": f"It is <<{t['left']}{t['operator']}{t['right']}>>.\n#### {t['answer']}"}
        for t in TASKS
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    return folder / "train-00000-of-00001.parquet"


def alpaca(folder: Path) -> Path:
    """One JSON array."""
    rows = [{"instruction": t["prompt"], "input": "", "output": t["answer"]} for t in TASKS]
    (folder / "alpaca_data.json").write_text(json.dumps(rows, indent=4))
    return folder / "alpaca_data.json"


def sharegpt(folder: Path) -> Path:
    """One JSON array of conversations that end with the answer."""
    rows = [
        {
            "id": t["task_id"],
            "conversations": [{"from": "human", "value": t["prompt"]}, {"from": "gpt", "value": t["answer"]}],
        }
        for t in TASKS
    ]
    (folder / "sg_90k.json").write_text(json.dumps(rows))
    return folder / "sg_90k.json"


def sft(folder: Path) -> Path:
    """JSON lines of messages that end with the answer."""
    rows = [
        {"messages": [{"role": "user", "content": t["prompt"]}, {"role": "assistant", "content": t["answer"]}]}
        for t in TASKS
    ]
    (folder / "train_sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train_sft.jsonl"


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize(
    ("make", "train", "said"),
    [
        (gsm8k, "train-sft", "prompt = question"),
        (alpaca, "train-dpo", "prompt = instruction, answer = output"),
        (sharegpt, "train-kto", "messages = conversations, answer = the last message"),
        (sft, "train-rl", "answer = the last message"),
    ],
)
def test_a_published_file_trains_a_model(
    make: Callable[[Path], Path],
    train: str,
    said: str,
    tmp_path: Path,
    vllm_server: str,
    policy: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """collect reads the file, scores against its answers, and what it writes trains; the first line says which columns."""

    def run(*words: Any) -> None:
        assert main([str(word) for word in words]) == 0

    rollouts, trained = tmp_path / "run", tmp_path / "trained"
    server = ("--endpoint", vllm_server, "-m", "sample-policy", "--tokenizer", policy)
    sampling = ("-r", 4, "--max-tokens", 48, "--seed", 1, "--env", f"{DATA / 'calculator.py'}:Calculator")
    run("collect", make(tmp_path), *server, *sampling, "--reward", "numeric", "-o", rollouts)
    assert said in capsys.readouterr().err
    rewards = read_table(rollouts)["reward"].to_pylist()
    assert len(rewards) == 32
    assert {0.0, 1.0} <= set(rewards)
    before = {"train-dpo": ("pairs", "pairs-reward"), "train-rl": ("experience", "experience")}.get(train)
    if before is not None:
        run(before[0], rollouts)
    made = sorted(p for p in rollouts.iterdir() if before and p.is_dir() and p.name.startswith(before[1]))
    words = ("--set", "num_train_epochs=1", "--set", "per_device_train_batch_size=8")
    run(train, made[0] if made else rollouts, "-m", policy, "-o", trained, *words)
    assert read_run_json(trained)["trained_tokens"]["equal"] is True
    assert (trained / "model.safetensors").is_file()
