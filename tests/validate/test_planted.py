"""Breaks planted in thousands of rollouts on a real tokenizer: found at their place, with their cause; none else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import sample_data
from gymdata.commands.validate.run import validate
from gymdata.rollouts.turns import TurnEncoder
from tests.check.matrix import FAMILIES, has_family, save_family
from tests.rollout_files import rollout
from tests.validate.generate import chat, nemo_row, write_lines, write_native
from tests.validate.planted import BREAKS, CHATML, HEADERS, Maker, Planted, encoded

pytestmark = pytest.mark.torch

POLICY = Path(sample_data.__file__).parent / "policy"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tokenizer folders by name, made when asked for: the sample policy's, the same with another template's marks, and the
    families that the template matrix uses."""

    @functools.cache
    def folder(name: str) -> Path:
        if name == "chatml":
            return POLICY
        target = tmp_path_factory.mktemp(name)
        if name == "headers":
            changed = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
            changed.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
            changed.save(str(target / "tokenizer.json"))
            return target
        if not has_family(name):
            pytest.skip("its vocabulary is not installed")
        return save_family(name, target)

    return folder


def plants(folder: Path, style: str, each: int, seed: int) -> tuple[list[Planted], list[Any]]:
    """``each`` conversations of every break, and as many clean ones."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    maker = Maker(tokenizer, STYLES[style], seed)
    broken = [maker.plant(name) for _ in range(each) for name in BREAKS]
    return broken, [maker.talk().calls() for _ in range(each)]


def foreign(calls: list[Any], index: int) -> dict[str, Any]:
    row = nemo_row([(prompt, generation) for prompt, generation, _ in calls], f"q{index}", 1.0, index)
    ends = [i for i in row["response"]["output"] if "prompt_token_ids" in i]
    for item, (_, _, log_probs) in zip(ends, calls, strict=True):
        item["generation_log_probs"] = log_probs
    return row


def native(calls: list[Any], index: int) -> dict[str, Any]:
    encoder = TurnEncoder()
    for call in encoded(calls):
        encoder.add(call)
    return rollout(f"t{index}", 0, 1.0, [], messages=chat(len(encoder.turns)), **encoder.columns())


def check(path: Path, folder: Path, broken: list[Planted]) -> None:
    """Every break is found once, where it is; its cause is right in 99 % of what is decidable, which is 90 %."""
    report = validate(path, tokenizer=folder, ignore=["D702", "R503", "L304", "B"])
    places = [(v.row, v.turn, v.position) for v in report.violations]
    assert places == [(row, plant.turn, plant.position) for row, plant in enumerate(broken)]
    decided = [(plant, v) for plant, v in zip(broken, report.violations, strict=True) if v.code != "T200"]
    wrong = [(plant.name, plant.code, v.code, v.evidence) for plant, v in decided if v.code != plant.code]
    assert len(decided) >= 0.9 * len(broken)
    assert len(wrong) <= 0.01 * len(decided), wrong[:3]


STYLES = {"chatml": CHATML, "headers": HEADERS}
#: Tokenizer, style, format, conversations with each break, seed: a few; with make test-full thousands, and hundreds in every
#: family, with a large real vocabulary as well.
CASES = [
    *((style, style, form, 20, 3) for style in STYLES for form in ("nemo", "parquet")),
    ("spaces", "headers", "parquet", 12, 3),  # a tokenizer that marks leading spaces
    ("bytes", "chatml", "parquet", 12, 3),
    *((style, style, form, 300, 11) for style in STYLES for form in ("nemo", "parquet")),
    *((family, style, "parquet", 100, 5) for family in FAMILIES for style in STYLES),
]


@pytest.mark.parametrize(
    ("tokenizer", "style", "form", "each", "seed"),
    [pytest.param(*case, marks=pytest.mark.full if case[3] > 20 else ()) for case in CASES],
)
def test_planted_breaks(
    tmp_path: Path, folder_of: Callable[[str], Path], tokenizer: str, style: str, form: str, each: int, seed: int
) -> None:
    """Every break, in both formats, two templates' marks and the families of tokenizers."""
    broken, clean = plants(folder_of(tokenizer), style, each, seed)
    calls = [*(p.calls for p in broken), *clean]
    if form == "nemo":
        path = write_lines(tmp_path / "a.jsonl", [foreign(c, i) for i, c in enumerate(calls)])
    else:
        path = write_native(tmp_path, [native(c, i) for i, c in enumerate(calls)], "parquet")
    check(path, folder_of(tokenizer), broken)
