"""The whole path on an object store: collected, killed, resumed elsewhere, validated, queried, paired and trained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.store import read_run_json
from tests.objects.conftest import parquet_held
from tests.objects.stores import FaultyStore
from tests.servers import FAULTY, server_processes

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "sample_data" / "policy"
URL = "s3://bucket/runs/collected"


@pytest.fixture(scope="module")
def policy_server() -> Iterator[str]:
    """A small HTTP server whose answers depend on seed and prompt alone."""
    from gymdata.chat.template import TransformersChat

    end = TransformersChat.load(str(POLICY)).end_of_turn_ids[0]
    with server_processes(FAULTY) as up:
        yield up("--latency", "0.02", "--eos", str(end)).url


def words(server: str, output: str, *more: str) -> list[str]:
    return [
        "collect", str(ROOT / "sample_data" / "tasks" / "train.jsonl"), "-o", output, "-n", "12", "-r", "3",
        "-c", "4", "--reward", "regex:[aeiou]", "--max-tokens", "16", "--seed", "11", "--run-id", "r", "--endpoint", server,
        "-m", "fake", "--tokenizer", str(POLICY), *more,
    ]  # fmt: skip


@dataclass
class Disk:
    """The most Parquet that lay on this machine's disk at any request to the store, by what was done then."""

    folder: Path
    store: FaultyStore
    doing: str = ""
    most: dict[str, int] = field(default_factory=dict)
    left: list[Path] = field(default_factory=list)

    def look(self) -> None:
        self.most[self.doing] = max(self.most.get(self.doing, 0), parquet_held(self.folder))

    def look_for_what_was_sent(self) -> None:
        """At each run.json that is sent: what is left here of the parts that the one before it named."""
        self.look()
        name = "runs/collected/run.json"
        if self.store.asked[-1] == ("PUT", f"/bucket/{name}") and name in self.store.names():
            named = json.loads(self.store.get(f"bucket/{name}"))["files"]
            here = [file for entry in named for file in self.folder.rglob(Path(entry["path"]).name)]
            self.left += [file for file in here if file.stat().st_blocks]

    def run(self, *words: str, code: int = 0) -> None:
        self.doing = words[0]
        assert main(list(words)) == code
        self.look()


def test_a_run_on_a_store_from_collecting_to_training(
    policy_server: str, store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Killed once the second part is there, resumed on another machine with --take-over, then validated, queried, filtered,
    turned into pairs and trained: the rows are those of an uninterrupted local run, every token that is trained was
    compared with them, and this machine never holds a copy of the rollouts."""
    disk = Disk(tmp_path, store)
    first = words(policy_server, URL, "--rows-per-file", "5", "--spool", str(tmp_path / "a"))
    writer: list[subprocess.Popen[bytes]] = []

    def kill() -> None:
        writer[0].kill()

    store.fail("stop after", "PUT", "part-00001", act=kill)
    writer.append(subprocess.Popen([sys.executable, "-m", "gymdata.cli", *first], stderr=subprocess.PIPE))
    _, said = writer[0].communicate(timeout=300)
    assert writer[0].returncode == -9, said
    # The machine that was lost.
    shutil.rmtree(tmp_path / "a")
    again = words(policy_server, URL, "--rows-per-file", "5", "--spool", str(tmp_path / "b"))
    assert main(again) == 2
    refused = capsys.readouterr().err
    assert "another machine writes this run" in refused
    assert "--take-over" in refused
    store.look = disk.look_for_what_was_sent
    disk.run(*again, "--take-over")
    assert disk.left == []
    store.look = disk.look
    assert str(tmp_path / "b") not in capsys.readouterr().out
    disk.run("validate", URL)
    disk.run("query", "select count(*) from turns", URL)
    disk.run("filter", URL, "--where", "rollout_index<2", "-o", f"{URL}-kept")
    disk.run("pairs", URL)
    out, steps = tmp_path / "trained", ("--set", "num_train_epochs=1", "--set", "per_device_train_batch_size=12")
    disk.run("train-dpo", URL, "-m", str(POLICY), "-o", str(out / "dpo"), *steps)
    disk.run("train-sft", URL, "-m", str(POLICY), "-o", str(out / "sft"), *steps)
    disk.run(*again)
    assert "nothing to do" in "".join(capsys.readouterr())
    store.look = lambda: None
    size = sum(len(store.get(f"bucket/{key}")) for key in store.names() if key.startswith("runs/collected/rollouts/"))
    most = {name: found for name, found in disk.most.items() if name not in ("collect", "filter", "pairs")}
    assert most == dict.fromkeys(("validate", "query", "train-dpo", "train-sft"), 0)
    for name in ("dpo", "sft"):
        facts = read_run_json(out / name)
        assert facts["trained_tokens"]["equal"] is True
        assert facts["trained_tokens"]["file"]["count"] > 0
        assert facts["parents"][0]["path"].startswith(URL)
    assert main(words(policy_server, str(tmp_path / "local"))) == 0
    columns = ["rollout_id", "task_id", "rollout_index", "reward", "n_generated_tokens"]
    there, here = (gymdata.load_rollouts(path, columns).sort_by("rollout_id") for path in (URL, tmp_path / "local"))
    assert there.num_rows == 36
    assert there.equals(here)
    ids = there["rollout_id"].to_pylist()
    sys.stdout.write(
        f"\nON A STORE: {size:,} bytes of rollouts; rows lost {36 - len(set(ids))}, doubled {len(ids) - len(set(ids))}; "
        f"most Parquet on the disk: {', '.join(f'{name} {found:,}' for name, found in disk.most.items())}\n"
    )


@pytest.mark.parametrize("flag", [["--spool", "x"], ["--take-over"], ["--upload-every", "5"]])
def test_what_only_a_store_needs_is_refused_without_one(
    flag: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--spool, --take-over and --upload-every do nothing for a local run, and say so."""
    assert main(words("http://127.0.0.1:9", str(tmp_path / "run"), *flag)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {flag[0]}")
    assert "has no effect without --output with a URL" in err
