"""Commands without the optional part that they need: one line that names it, never a defect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
POLICY, BROKEN = str(ROOT / "sample_data" / "policy"), str(ROOT / "sample_data" / "rollouts" / "broken.jsonl")
TASKS = str(ROOT / "sample_data" / "tasks" / "train.jsonl")
#: Runs a command where some modules are as if they were not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
missing, real = set(sys.argv[1].split(",")), PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *a: None if name.split(".")[0] in missing else real(name, *a))
from gymdata.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("torch", ["audit", BROKEN, "-m", POLICY], "train"),
        ("torch,matplotlib", ["audit", BROKEN, "-m", POLICY], "train"),
        ("torch,transformers", ["audit", BROKEN, "-m", POLICY], "train"),
        ("vllm", ["collect", TASKS, "-m", POLICY, "-o", "OUT", "--dry-run"], "cpu"),
        ("ray", ["collect", TASKS, "-m", POLICY, "-o", "OUT", "--replicas", "2"], "ray"),
        ("trl", ["train-sft", BROKEN, "-m", POLICY, "-o", "OUT"], "train"),
        ("trl", ["finetune", str(ROOT / "sample_data" / "finetune.yaml"), "--output", "OUT"], "train"),
        ("tokenizers", ["validate", BROKEN, "--decode", "--tokenizer", POLICY], "collect"),
    ],
)
def test_a_missing_extra_is_one_line(missing: str, words: list[str], extra: str, tmp_path: Path) -> None:
    """The command ends with 2, names the module and the extra that brings it, and writes nothing."""
    given = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, missing, *given], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert "which is not installed" in done.stderr
    assert f"'{missing.partition(',')[0]}'" in done.stderr
    assert f"[{extra}" in done.stderr
    assert "defect" not in done.stderr
    assert not (tmp_path / "out").exists()
