"""A real ``gymdata demo`` is killed between its commands, and started again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forks as starting
from tests.finetune.deterministic import Sampler
from tests.forks import Fork, Forks, forks
from tests.kills import kill_when

pytestmark = [pytest.mark.torch, pytest.mark.full]

_LOADED = [
    "gymdata.cli.main", "gymdata.commands.demo.run", "gymdata.commands.report.run", "gymdata.commands.pairs.run",
    "gymdata.commands.validate.run", "aiohttp", "gymdata.commands.collect.run", "gymdata.commands.train.run",
    "gymdata.commands.train.process", "gymdata.commands.train.trainers.run",
    "gymdata.commands.train.trainers.dpo", "polars", "pyarrow.dataset", "torch",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto",
]  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
            patch.setenv(name, "1")
        with forks(*_LOADED) as made:
            yield made


def run(*given: Any) -> int:
    """``forks.run`` with an engine that answers without a model."""
    from gymdata.commands.collect import run as collecting

    load = collecting.load_parts

    def load_parts(*named: Any) -> Any:
        parts = load(*named)
        tokenizer: Any = parts.chat
        parts.sampler = Sampler(
            tokenizer, lambda text: tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"], 0.0
        )
        return parts

    collecting.load_parts = load_parts
    return starting.run(*given)


def held(work: Path) -> dict[str, Any]:
    """Names of all files, the figures without the time, and the policy's weights."""
    out = work / "out"
    figures = json.loads((out / "summary.json").read_text())
    weights = (out / "round-1" / "policy" / "model.safetensors").read_bytes()
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.name != "gymdata.log")
    figures = {k: v for k, v in figures.items() if k not in ("seconds", "output")}
    return {"names": names, "weights": weights, "figures": figures}


@pytest.mark.timeout(1200)
def test_a_demo_that_was_killed_finishes(processes: Forks, tmp_path: Path) -> None:
    """The same command ends with the same rollouts, policy and figures, and with no file more; so does --overwrite. Killed
    once its first rollouts are there, once its first pairs are, and once its policy is trained."""
    out, said = tmp_path / "work" / "out", tmp_path / "said"
    words = ["demo", "-o", str(out), "-n", "4", "--rounds", "1", "-r", "4", "--judged-groups", "0", "--no-threshold"]

    def begin(*more: str) -> Fork:
        return processes.start(run, [*words, *more], said, [7])

    out.parent.mkdir()
    assert begin().wait() == 0, said.read_text()
    expected = held(out.parent)
    shutil.rmtree(out)
    moments = "round-1/rollouts/run.json", "round-1/**/pairs.parquet", "round-1/policy/model.safetensors"
    killed = [kill_when(begin().pid, lambda name=name: any(out.glob(name))) for name in moments]
    assert killed == [True, True, True]
    assert begin().wait() == 0, said.read_text()
    assert held(out.parent) == expected
    assert begin("--overwrite").wait() == 0, said.read_text()
    assert held(out.parent) == expected
