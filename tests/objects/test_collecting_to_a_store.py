"""The whole path on an object store: collected, killed, resumed elsewhere, validated, queried, paired and trained."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from tests.objects.faulty_store import FaultyStore
from tests.server_process import FAULTY, server_processes

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
URL = "s3://bucket/runs/collected"


@pytest.fixture(scope="module")
def policy_server() -> Iterator[str]:
    """A small HTTP server whose answers depend on seed and prompt alone."""
    from gymdata.engines.chat.template import TransformersChat

    end = TransformersChat.load(str(POLICY)).end_of_turn_ids[0]
    with server_processes(FAULTY) as up:
        yield up("--latency", "0.02", "--eos", str(end)).url


def words(server: str, output: str, *more: str) -> list[str]:
    return [
        "collect", str(ROOT / "sample_data" / "tasks" / "train.jsonl"), "-o", output, "-n", "12", "-r", "3", "-c", "4",
        "--reward", "numeric", "--max-tokens", "16", "--seed", "11", "--run-id", "r", "--endpoint", server, "-m", "fake",
        "--tokenizer", str(POLICY), *more,
    ]  # fmt: skip


def test_a_run_on_a_store_from_collecting_to_training(
    policy_server: str, store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Killed once the first part is there, resumed on another machine with --take-over: the rows are those of an
    uninterrupted local run, and every later command takes the URL."""
    first = words(policy_server, URL, "--rows-per-file", "5", "--spool", str(tmp_path / "a"))
    writer: list[subprocess.Popen[bytes]] = []

    def kill() -> None:
        writer[0].kill()

    store.fail("stop after", "PUT", "part-00001", act=kill)
    writer.append(subprocess.Popen([sys.executable, "-m", "gymdata.cli", *first], stderr=subprocess.PIPE))
    _, said = writer[0].communicate(timeout=300)
    assert writer[0].returncode == -9, said
    again = words(policy_server, URL, "--rows-per-file", "5", "--spool", str(tmp_path / "b"))
    assert main(again) == 2
    refused = capsys.readouterr().err
    assert "another machine writes this run" in refused
    assert "--take-over" in refused
    assert main([*again, "--take-over", "--upload-every", "60"]) == 0
    assert str(tmp_path / "b") not in capsys.readouterr().out
    assert main(words(policy_server, str(tmp_path / "local"))) == 0
    columns = ["rollout_id", "task_id", "rollout_index", "reward", "n_generated_tokens"]
    there, here = (gymdata.load_rollouts(path, columns).sort_by("rollout_id") for path in (URL, tmp_path / "local"))
    assert there.num_rows == 36
    assert there.equals(here)
    assert main(["validate", URL]) == 0
    assert main(["query", "select count(*) from turns", URL]) == 0
    assert main(["filter", URL, "--where", "rollout_index<2", "-o", f"{URL}-kept"]) == 0
    capsys.readouterr()
    assert main(["train-sft", f"{URL}-kept", "-m", str(POLICY), "-o", str(tmp_path / "t"), "--dry-run"]) == 0
    assert main(again) == 0
    assert "nothing to do" in "".join(capsys.readouterr())


@pytest.mark.parametrize("flag", [["--spool", "x"], ["--take-over"], ["--upload-every", "5"]])
def test_what_only_a_store_needs_is_refused_without_one(
    flag: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--spool, --take-over and --upload-every do nothing for a local run, and say so."""
    assert main(words("http://127.0.0.1:9", str(tmp_path / "run"), *flag)) == 2
    assert f"{flag[0]}: got" in capsys.readouterr().err
