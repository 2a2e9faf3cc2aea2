"""``gymdata demo`` killed at each change that it makes itself, and as each of its commands begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import kills
from tests.finetune.deterministic import Sampler
from tests.forks import Forks, forks

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
    """``kills.run`` with an engine that answers without a model."""
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
    return kills.run(*given)


def held(work: Path) -> dict[str, Any]:
    """Names of all files, the figures without the time, and the policy's weights."""
    out = work / "out"
    figures = json.loads((out / "summary.json").read_text())
    weights = (out / "round-1" / "policy" / "model.safetensors").read_bytes()
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.name != "gymdata.log")
    figures = {k: v for k, v in figures.items() if k not in ("seconds", "output")}
    return {"names": names, "weights": weights, "figures": figures}


def demo(processes: Forks, folder: Path) -> kills.Killed:
    words = ["demo", "-o", str(folder / "work" / "out"), "-n", "4", "--rounds", "1", "-r", "4", "--judged-groups", "0"]
    return kills.Killed(processes, folder, [*words, "--no-threshold"], held, [7], how=run)


@pytest.mark.timeout(3600)
def test_a_demo_that_was_killed_finishes(processes: Forks, tmp_path: Path) -> None:
    """The same command ends with the same rollouts, policy and figures, and with no file more; so does --overwrite. Killed
    before it replaces a file, once before each other line of its own that changes one, and as each command begins: what is
    within a command is killed by the tests of that command, and what --overwrite removes by those of ``clear``."""
    begun: set[str] = set()

    def wanted(what: str) -> bool:
        own = what.startswith("command")
        line = kills.line_of(what) if own else " ".join(what.split()[:3])
        new = line not in begun or (own and what.endswith(".tmp of 0 bytes"))
        begun.add(line)
        return new

    killed = demo(processes, tmp_path)
    wrong, tried = killed.faults(wanted)
    assert wrong == []
    assert tried > 7
    expected = held(killed.work)
    killed.words.append("--overwrite")
    assert killed.finish()[0] == 0
    assert held(killed.work) == expected
