"""Every claim of a report equals SQL over the same files; a claim without a second way to it fails."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import gymdata
from tests.report.claims import COMPARED, FOUND, NO_ROLLOUTS, OPEN, ROLLOUTS, STAGES, Twin, ask, find
from tests.report.made import AFTER, BEFORE, faulty, finetuned, judged, make, model

#: Texts that test_printed.py reads number by number, and where the page was written.
SAID = ("headline", "path", "paths", "settings")


def differences(found: Any, wanted: Any, at: str) -> Iterator[str]:
    """Where two values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        if FOUND in found:
            found = {**found, FOUND: sorted({one["code"] for one in found[FOUND]})}
        keys = found.keys()
        if keys != wanted.keys():
            yield f"{at}: keys {sorted(keys)}, SQL has {sorted(wanted)}"
        for key in keys & wanted.keys():
            yield from differences(found[key], wanted[key], f"{at}.{key}")
    elif isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            yield f"{at}: {len(found)} items, SQL has {len(wanted)}"
        for i, (a, b) in enumerate(zip(found, wanted, strict=False)):
            yield from differences(a, b, f"{at}.{i}")
    elif isinstance(found, float) and isinstance(wanted, (int, float)):
        if not (math.isnan(found) and math.isnan(wanted)) and found != pytest.approx(wanted, rel=1e-12, abs=1e-12):
            yield f"{at}: {found}, SQL has {wanted}"
    elif found != wanted:
        yield f"{at}: {found!r}, SQL has {wanted!r}"


def disagreements(
    value: Any, twins: Mapping[str, str | Twin], path: Path | Sequence[Path], at: tuple[str, ...], seen: set[str]
) -> Iterator[str]:
    """Walk to every leaf: a twin answers for what is below its place."""
    name = ".".join(at)
    if (place := find(twins, at)) is not None:
        seen.add(place[0])
        yield from differences(value, ask(twins[place[0]], path, place[1]), name)
    elif isinstance(value, (dict, list)) and (value or not at):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in items:
            yield from disagreements(one, twins, path, (*at, str(key)), seen)
    # Without a stage of a kind its list is empty, and there is nothing to claim.
    elif value != []:
        yield f"{name}: no SQL computes this: {value!r}"


def of_one(figures: Mapping[str, Any], path: Path, seen: set[str]) -> list[str]:
    twins = {**(ROLLOUTS if figures["rewards"] is not None else NO_ROLLOUTS), **STAGES}
    return list(disagreements(dict(figures), twins, path, (), seen))


def figures_of(*paths: Path) -> dict[str, Any]:
    found = gymdata.report(*paths, write=False).to_dict()
    return {key: value for key, value in found.items() if key not in SAID}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """One of each kind of folder that has a report."""
    root = tmp_path_factory.mktemp("places")
    run = make(root / "run", BEFORE)
    gymdata.pairs(run, output=root / "pairs", strategy="all")
    gymdata.experience(run, output=root / "experiences", estimator="grpo")
    yield {
        "run": run,
        "after": make(root / "after", AFTER, run_id="run-2"),
        "faulty": faulty(root / "faulty"),
        "alone": make(root / "alone", {name: [float(name < "c")] for name in "abcde"}),
        "pairs": root / "pairs",
        "experiences": root / "experiences",
        "judge": judged(root / "judge", run),
        "model": model(root / "model"),
        "finetuned": finetuned(root / "finetuned"),
    }
    OPEN.close()


ONE = ("run", "after", "faulty", "alone", "pairs", "experiences", "judge", "model", "finetuned")


@pytest.mark.parametrize("name", ONE)
def test_every_claim_about_one_path_equals_sql(places: dict[str, Path], name: str) -> None:
    """Leaf by leaf, whatever the folder is of."""
    assert of_one(figures_of(places[name]), places[name], set()) == []


@pytest.mark.parametrize("names", [("run", "after"), ("faulty", "run")], ids="-".join)
def test_every_claim_of_a_comparison_equals_sql(places: dict[str, Path], names: tuple[str, str]) -> None:
    """The paired difference and flips; the figures of each run; and their copies at the top."""
    paths = [places[name] for name in names]
    found = figures_of(*paths)
    for key in ("rewards", "pass_at_k", "validation", "training"):
        assert found.pop(key) == [run[key] for run in found["runs"]]
    for run, path in zip(found.pop("runs"), paths, strict=True):
        assert of_one(run, path, set()) == []
    assert list(disagreements(found, COMPARED, paths, (), set())) == []


def test_a_claim_without_sql_is_noticed(places: dict[str, Path]) -> None:
    """The test above fails for a number that nobody wrote SQL for, for a wrong one, and for one that is gone."""
    figures = figures_of(places["run"])
    assert of_one({**figures, "new": {"number": 3}}, places["run"], set()) == ["new.number: no SQL computes this: 3"]
    wrong = {**figures, "breaks": 1, "failures": {"n": 0}}
    assert of_one(wrong, places["run"], set()) == ["breaks: 1, SQL has 0"]


def test_no_sql_is_left_over(places: dict[str, Path]) -> None:
    """Each query here is of a claim that some report makes."""
    seen: set[str] = set()
    for name in ONE:
        of_one(figures_of(places[name]), places[name], seen)
    paths = [places["run"], places["after"]]
    found = figures_of(*paths)
    of_one(found.pop("runs")[0], paths[0], seen)
    list(disagreements(found, COMPARED, paths, (), seen))
    assert {*ROLLOUTS, *STAGES, *COMPARED, *NO_ROLLOUTS} - seen == set()
