"""``train-dpo`` whole: the command, its process, and the folder that it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gymdata.models.model_identity import model_facts
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_run_json, read_table
from tests.rollout_files import write_table
from tests.train.trainers.running import gymdata

pytestmark = pytest.mark.torch


@pytest.fixture
def told_pairs(policy: Path, make_pairs: Any) -> Path:
    """Pairs that lead back to a run of this policy."""
    facts = model_facts(str(policy))
    return make_pairs({"tokenizer_hash": facts.tokenizer_hash, "chat_template_hash": facts.chat_template_hash})


def test_the_output_is_a_model_with_its_proof(policy: Path, told_pairs: Path, tmp_path: Path) -> None:
    """One command gives a folder that loads as a model, keeps the tokenizer's files, and holds run.json, metrics, curve."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "trained"
    done = gymdata(
        "train-dpo", told_pairs, "-m", policy, "-o", out, "--json", "--set", "num_train_epochs=2", "--set",
        "learning_rate=1e-3", "--set", "loss_type=[sigmoid, sft]", "--set", "loss_weights=[1, 0.2]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts == read_run_json(out)
    assert facts["trained_tokens"]["file"] == facts["trained_tokens"]["batches"]
    assert facts["trained_tokens"]["equal"] is True
    assert facts["proof"] == {"equal": True, "columns": ["context_ids", "input_ids", "margin", "weight"]}
    assert f"checksum {facts['trained_tokens']['file']['checksum']}" in done.stderr
    assert "warning" not in done.stderr.lower()
    assert (out / "SUCCESS").is_file()
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps[:4]] == [1, 2, 3, 4]
    AutoModelForCausalLM.from_pretrained(out)
    AutoTokenizer.from_pretrained(out)
    before, after = model_facts(str(policy)), model_facts(str(out))
    assert (before.tokenizer_hash, before.chat_template_hash) == (after.tokenizer_hash, after.chat_template_hash)
    assert before.policy_hash != after.policy_hash


def begun(words: list[Any], out: Path) -> subprocess.Popen[str]:
    """The command in a process group of its own, once its training has saved a checkpoint."""
    code = "import sys; from gymdata.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stderr=subprocess.PIPE, start_new_session=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    while process.poll() is None and not list(out.glob("checkpoints/checkpoint-*/gymdata_proof.json")):
        pass
    return process


@pytest.mark.full
def test_an_interrupted_training_says_how_to_go_on(policy: Path, told_pairs: Path, tmp_path: Path) -> None:
    """While it runs, the same command is told who writes there. SIGINT to the command alone reaches its trainer, which
    saves; the command ends with 130 and says that it resumes."""
    out = tmp_path / "stopped"
    words = ["train-dpo", told_pairs, "-m", policy, "-o", out]
    words += ["--set", "num_train_epochs=9999", "--set", "save_steps=5"]
    process = begun(words, out)
    second = gymdata(*words)
    assert (second.returncode, f"another process writes to this run (pid {process.pid}" in second.stderr) == (2, True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "the same command resumes from the last checkpoint" in said
    assert read_run_json(out)["failure"] == "interrupted"
    assert not (out / "SUCCESS").exists()
    # The same tokens with other weights are another training.
    table = read_table(told_pairs, PAIRS)
    weights = pa.array([2.0] * table.num_rows)
    file = told_pairs if told_pairs.is_file() else told_pairs / "pairs.parquet"
    write_table(table.set_column(table.column_names.index("weight"), "weight", weights), file, PAIRS)
    other = gymdata(*words)
    assert (other.returncode, "data_xxh3" in other.stderr) == (2, True)


def test_a_file_of_the_working_folder_is_no_library(policy: Path, told_pairs: Path, tmp_path: Path) -> None:
    """A folder with rewards may have a datasets.py of its own."""
    (tmp_path / "datasets.py").write_text("")
    words = [Path(sys.executable).with_name("gymdata"), "train-dpo", told_pairs, "-m", policy, "-o", "out", "--dry-run"]
    done = subprocess.run([*map(str, words)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("ImportError")) == (0, 0), done.stderr
