"""Every claim of a report equals SQL over the same files, and every number that a person reads on the page is a claim: of
the headline, of tables and of sentences. A claim without a second way to it fails."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import gymdata
from tests.report.claims import COMPARED, FOUND, NO_ROLLOUTS, OPEN, ROLLOUTS, STAGES, Twin, ask, find
from tests.report.made import AFTER, BEFORE, faulty, finetuned, judged, make, model

Twins = Mapping[str, str | Twin]
#: Texts, whose numbers are looked for one by one, and where the page was written.
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


def claims_of(
    value: Any, twins: Twins, at: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, tuple[str, list[str]] | None]]:
    """Each claim's place and value, and its twin, which answers for all that is below its place."""
    twin = find(twins, at)
    if twin is None and isinstance(value, (dict, list)) and (value or not at):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from claims_of(one, twins, (*at, str(key)))
    # Without a stage of a kind its list is empty, and there is nothing to claim.
    elif twin is not None or value != []:
        yield ".".join(at), value, twin


def disagreements(value: Any, twins: Twins, path: Path | Sequence[Path]) -> list[str]:
    """Claims that no SQL computes, and those that it computes otherwise."""
    faults: list[str] = []
    for name, claim, twin in claims_of(value, twins):
        if twin is None:
            faults.append(f"{name}: no SQL computes this: {claim!r}")
        else:
            faults += differences(claim, ask(twins[twin[0]], path, twin[1]), name)
    return faults


def twins_of(figures: Mapping[str, Any]) -> Twins:
    return {**(ROLLOUTS if figures["rewards"] is not None else NO_ROLLOUTS), **STAGES}


def figures_of(*paths: Path) -> dict[str, Any]:
    return {key: value for key, value in reported(*paths).items() if key not in SAID}


@functools.cache
def reported(*paths: Path) -> dict[str, Any]:
    return gymdata.report(*paths, write=False).to_dict()


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
    figures = figures_of(places[name])
    assert disagreements(figures, twins_of(figures), places[name]) == []


@pytest.mark.parametrize("names", [("run", "after"), ("faulty", "run")], ids="-".join)
def test_every_claim_of_a_comparison_equals_sql(places: dict[str, Path], names: tuple[str, str]) -> None:
    """The paired difference and flips; the figures of each run; and their copies at the top."""
    paths = [places[name] for name in names]
    figures = figures_of(*paths)
    for key in ("rewards", "pass_at_k", "validation", "training"):
        assert figures.pop(key) == [run[key] for run in figures["runs"]]
    for run, path in zip(figures.pop("runs"), paths, strict=True):
        assert disagreements(run, twins_of(run), path) == []
    assert disagreements(figures, COMPARED, paths) == []


def test_a_claim_without_sql_is_noticed(places: dict[str, Path]) -> None:
    """The test above fails for a number that nobody wrote SQL for, and for a wrong one."""
    figures, path = figures_of(places["run"]), places["run"]
    more = {**figures, "new": {"number": 3}}
    assert disagreements(more, twins_of(more), path) == ["new.number: no SQL computes this: 3"]
    assert disagreements({**figures, "breaks": 1}, twins_of(figures), path) == ["breaks: 1, SQL has 0"]


def test_no_sql_is_left_over(places: dict[str, Path]) -> None:
    """Each query here is of a claim that some report makes."""
    reports = [figures_of(places[name]) for name in ONE]
    compared = figures_of(places["run"], places["after"])
    reports += compared.pop("runs")
    claims = [claims_of(figures, twins_of(figures)) for figures in reports] + [claims_of(compared, COMPARED)]
    used = {twin[0] for of_report in claims for _, _, twin in of_report if twin is not None}
    assert {*ROLLOUTS, *STAGES, *COMPARED, *NO_ROLLOUTS} - used == set()


#: Numbers that stand alone: not part of a name, an id, a path or a version.
NUMBER = re.compile(r"(?<![\w.:/@#-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w:/]|\.\d)")
#: Words of the page that have a number: "95 %" is what an interval is, "10–90 %" which quantiles are given.
WORDS = re.compile(r"10–90 %|95 %")
READ = ("h1", "td", "dd", "li", "p", "summary")


class Texts(HTMLParser):
    """The text of each element that states something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in READ:
            self.open.append(tag)
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in READ:
            self.open.remove(tag)

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[-1] += data


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
        if isinstance(value, dict):
            yield from value
    else:
        yield value


def spellings(figures: dict[str, Any]) -> set[str]:
    """Every number of the figures as the page may round it, and the numbers in their texts."""
    found: set[str] = set()
    for value in leaves({key: one for key, one in figures.items() if key != "headline"}):
        if isinstance(value, str):
            found.update(NUMBER.findall(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            plain = {f"{value:,}", f"{value:.4g}", f"{value:.3f}", f"{100 * value:.1f}", f"{value:,.0f}"}
            found |= plain | {f"+{one}" for one in plain}
    return found


def strangers(page: str, figures: dict[str, Any]) -> list[str]:
    """Texts with a number that the figures do not have."""
    known = spellings(figures)
    return [text for text in Texts(page).texts if set(NUMBER.findall(WORDS.sub("", text))) - known]


@pytest.mark.parametrize("names", [*((name,) for name in ONE if name != "alone"), ("run", "after")], ids="-".join)
def test_numbers_on_the_page_are_those_of_the_figures(
    places: dict[str, Path], tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Headline, tables, facts and sentences: each number is one of ``--json``, rounded."""
    report = gymdata.report(*(places[name] for name in names), output=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert report.headline in Texts(page).texts
    assert sum(len(NUMBER.findall(text)) for text in Texts(page).texts) > 3
    assert strangers(page, report.to_dict()) == []


def test_a_number_that_is_not_in_the_figures_is_noticed(places: dict[str, Path], tmp_path: Path) -> None:
    """The test above fails for a page with another count."""
    report = gymdata.report(places["run"], output=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text().replace("<td>14</td>", "<td>13,999</td>")
    assert set(strangers(page, report.to_dict())) == {"13,999"}
