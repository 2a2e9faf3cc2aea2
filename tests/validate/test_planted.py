"""Faults planted in thousands of rollouts on a real tokenizer: found at their place, with their cause; none else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import sample_data
from gymdata.checks.violations import BREAKS as BREAK_CODES
from gymdata.rollouts.turns import encode_turns
from gymdata.validate.run import fix, validate
from tests.check.matrix import FAMILIES, has_family, save_family
from tests.rollout_files import rollout
from tests.validate.generate import _lists, chat, nemo_row, write_lines, write_native
from tests.validate.planted import BREAKS, CHATML, FAULTS, HEADERS, Maker, Planted, encoded

pytestmark = pytest.mark.torch

POLICY = Path(sample_data.__file__).parent / "policy"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer folder for each style: the sample policy's, and the same with another template's marks."""
    other = tmp_path_factory.mktemp("headers")
    changed = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    changed.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    changed.save(str(other / "tokenizer.json"))
    return {"chatml": POLICY, "headers": other}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of the tokenizer families that the template matrix uses, made when asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if not has_family(name):
            pytest.skip("its vocabulary is not installed")
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def plants(folder: Path, style: str, each: int, seed: int) -> tuple[list[Planted], list[Any]]:
    """``each`` conversations of every fault, and as many clean ones."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    maker = Maker(tokenizer, {"chatml": CHATML, "headers": HEADERS}[style], seed)
    faulty = [maker.plant(name) for _ in range(each) for name in FAULTS]
    return faulty, [maker.talk().calls() for _ in range(each)]


def foreign(calls: list[Any], index: int) -> dict[str, Any]:
    row = nemo_row([(prompt, generation) for prompt, generation, _ in calls], f"q{index}", 1.0, index)
    ends = [i for i in row["response"]["output"] if "prompt_token_ids" in i]
    for item, (_, _, log_probs) in zip(ends, calls, strict=True):
        item["generation_log_probs"] = log_probs
    return row


def native(calls: list[Any], index: int) -> dict[str, Any]:
    turns = encode_turns(list(encoded(calls)))
    row = rollout(f"t{index}", 0, 1.0, [], messages=chat(len(turns)))
    counts = {
        "n_turns": len(turns),
        "n_context_tokens": sum(len(t["prompt_delta_ids"]) for t in turns),
        "n_generated_tokens": sum(len(t["generation_token_ids"]) for t in turns),
    }
    row = _lists(row | counts | {"turns": turns})
    return row | {"messages": chat(len(turns))}


def check(path: Path, folder: Path, faulty: list[Planted]) -> str:
    """Every plant is found once, where it is; its cause is right in 99 % of what is decidable, which is 90 %.

    Returns the shares, for the record of the test.
    """
    report = validate(path, tokenizer=folder, ignore=["D702", "R503", "L304", "B"])
    found: dict[int, list[Any]] = {}
    for v in report.violations:
        found.setdefault(v.row, []).append(v)
    assert sorted(found) == list(range(len(faulty))), "a clean rollout is flagged, or a fault was missed"
    right: Counter[str] = Counter()
    named: Counter[str] = Counter()
    wrong = []
    for row, plant in enumerate(faulty):
        codes = {v.code for v in found[row]}
        if plant.code not in BREAK_CODES:
            assert codes == {plant.code}, (plant.name, found[row])
        place = found[row][0]
        assert (place.turn, place.position) == (plant.turn, plant.position), (plant.name, place)
        assert len(found[row]) == 1, (plant.name, found[row])
        if plant.code in BREAK_CODES:
            named[plant.name] += place.code != "T200"
            right[plant.name] += place.code == plant.code
            if place.code not in (plant.code, "T200"):
                wrong.append((plant.name, plant.code, place.code, place.evidence))
    breaks = sum(p.code in BREAK_CODES for p in faulty)
    decidable = named.total()
    assert decidable >= 0.9 * breaks
    assert right.total() >= 0.99 * decidable, wrong[:3]
    assert set(right) == set(BREAKS)
    return f"decidable {decidable} of {breaks} breaks, right {right.total()}: {dict(right)}"


@pytest.mark.parametrize("form", ["nemo", "parquet"])
@pytest.mark.parametrize("style", ["chatml", "headers"])
def test_planted_faults(tmp_path: Path, folders: dict[str, Path], style: str, form: str, record_property: Any) -> None:
    """A few of every fault, in both formats and two templates' marks."""
    record_property("classes", _run(tmp_path, folders[style], style, form, each=20, seed=3))


@pytest.mark.full
@pytest.mark.parametrize("form", ["nemo", "parquet"])
@pytest.mark.parametrize("style", ["chatml", "headers"])
def test_thousands_of_planted_faults(
    tmp_path: Path, folders: dict[str, Path], style: str, form: str, record_property: Any
) -> None:
    """The same with thousands."""
    record_property("classes", _run(tmp_path, folders[style], style, form, each=300, seed=11))


@pytest.mark.parametrize(("name", "style"), [("spaces", "headers"), ("bytes", "chatml")])
def test_planted_faults_in_other_families(
    tmp_path: Path, family: Callable[[str], Path], name: str, style: str, record_property: Any
) -> None:
    """A few of every fault on tokenizers that mark leading spaces, and on a byte-level one."""
    record_property("classes", _run(tmp_path, family(name), style, "parquet", each=12, seed=3))


@pytest.mark.full
@pytest.mark.parametrize("style", ["chatml", "headers"])
@pytest.mark.parametrize("name", FAMILIES)
def test_hundreds_of_planted_faults_in_every_family(
    tmp_path: Path, family: Callable[[str], Path], name: str, style: str, record_property: Any
) -> None:
    """The same in hundreds, with a large real vocabulary as well."""
    record_property("classes", _run(tmp_path, family(name), style, "parquet", each=100, seed=5))


def _run(tmp_path: Path, folder: Path, style: str, form: str, each: int, seed: int) -> str:
    faulty, clean = plants(folder, style, each, seed)
    calls = [*(p.calls for p in faulty), *clean]
    if form == "nemo":
        path = write_lines(tmp_path / "a.jsonl", [foreign(c, i) for i, c in enumerate(calls)])
    else:
        path = write_native(tmp_path, [native(c, i) for i, c in enumerate(calls)], "parquet")
    return check(path, folder, faulty)


@pytest.mark.parametrize("choice", ["split", "truncate", "drop"])
def test_planted_faults_are_repaired(tmp_path: Path, folders: dict[str, Path], choice: Any) -> None:
    """The copy has no errors, its account adds up, and every token in it was in the source."""
    faulty, clean = plants(folders["chatml"], "chatml", 4, 5)
    kept = [p.calls for p in faulty if p.name != "id_range"]
    path = write_lines(tmp_path / "a.jsonl", [foreign(c, i) for i, c in enumerate([*kept, *clean])])
    account = fix(path, choice, tmp_path / "fixed.jsonl")
    assert account.errors_after == 0
    assert (account.rollouts_in, account.rollouts_with_errors) == (len(kept) + len(clean), len(kept))
    cost = account.costs[choice]
    assert account.rollouts_out == len(clean) + cost.rollouts_after
    before, after = (validate(p) for p in (path, tmp_path / "fixed.jsonl"))
    assert after.turns == before.turns - cost.turns_lost
