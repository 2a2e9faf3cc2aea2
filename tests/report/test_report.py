"""Reports: comparisons, refusals, and a safe, whole page; ``test_claims.py`` computes every figure a second time."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.commands.report.charts import Chart, charts_of
from gymdata.commands.report.drawing import numbers, svg, ticks
from gymdata.commands.report.page import page
from gymdata.errors import DataError, UsageError
from gymdata.store import write_run_json
from tests.report.made import AFTER, BEFORE, make, model
from tests.rollout_files import rollout, two_turns, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "run", BEFORE)


def test_examples_are_a_sample_where_one_is_named(tmp_path: Path) -> None:
    """The page says which rollouts of how many; of several runs each shows its own."""
    runs = [
        write_run(tmp_path / name, [rollout("a", k, k / 4, two_turns(20, 40 + k)) for k in range(4)]) for name in "ab"
    ]
    page = gymdata.report(runs[0], output=tmp_path / "x.html", sample="worst", limit=2)
    assert [(name, row["rollout_id"]) for name, row in page.figures["examples"].items()] == [
        ("worst 1", "a-0"),
        ("worst 2", "a-1"),
    ]
    assert "2 of 4 rollouts, those with the lowest reward" in (tmp_path / "x.html").read_text()
    gymdata.report(*runs, output=tmp_path / "x.html", sample="random", limit=3)
    assert (tmp_path / "x.html").read_text().count("3 of 4 rollouts, drawn at random") == 2


def test_headlines(run: Path, tmp_path: Path) -> None:
    """One sentence with the number, its interval and what it is of."""
    after = make(tmp_path / "after", AFTER, run_id="run-2")
    graded = make(tmp_path / "graded", {"a": [0.25, 0.5], "b": [-1.0, 0.75]})
    unscored = make(tmp_path / "unscored", {"a": [None]})
    interval = r"\(-?\d+\.\d+(–| to )\+?\d+\.\d+\)"
    for paths, headline in (
        ([run], rf"42\.9 % correct {interval}, 14 scored rollouts of 8 tasks"),
        ([run, after], rf"46\.4 % → 58\.3 %, \+11\.9 points {interval}, 7 tasks"),
        ([graded], r"mean reward 0\.125 \(.*"),
        ([unscored], "1 rollout, none scored"),
        ([model(tmp_path / "model")], "train-dpo: 2 steps, 9 tokens, loss 1.9 → 1.6"),
    ):
        shown = gymdata.report(*paths, write=False).headline
        assert re.fullmatch(headline, shown), shown


def test_what_cannot_be_reported_is_an_error(run: Path, tmp_path: Path) -> None:
    """Runs without a common task, a path with nothing in it, and a page that is no HTML file."""
    other = make(tmp_path / "other", {"q": [1.0]})
    with pytest.raises(DataError, match="no scored task in common"):
        gymdata.report(run, other)
    write_run_json(tmp_path / "empty", {"stage": "collect"})
    with pytest.raises(DataError, match="expected rollouts, pairs"):
        gymdata.report(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"ending in \.html"):
        gymdata.report(run, output=tmp_path / "page.pdf")
    assert gymdata.report(run, output=tmp_path / "folder").path == tmp_path / "folder" / "report.html"
    (tmp_path / "mine.html").write_text("precious")
    with pytest.raises(UsageError, match="exists and is no report"):
        gymdata.report(run, output=tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "precious"
    for _ in range(2):
        assert gymdata.report(run, output=tmp_path / "again.html").path == tmp_path / "again.html"


def test_a_changed_file_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sealed file that is not as it was recorded gives no report, unless that was allowed."""
    facts = json.loads((run / "run.json").read_text())
    facts["files"][0]["bytes"] = 3
    (run / "run.json").write_text(json.dumps(facts))
    assert main(["report", str(run)]) == 1
    assert "differs from what" in capsys.readouterr().err
    assert not (run / "report.html").exists()
    assert main(["report", str(run), "--allow-changed"]) == 0


class Page(HTMLParser):
    """Checks the nesting, and gathers tags, attributes and text."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_loads_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Well-formed, with charts and every section, no script, no address, no inline style; the headline is printed, too."""
    after = make(tmp_path / "after", AFTER)
    of_one = ("Rewards", "Lengths and endings", "Over time", "Validation", "Examples", "Lineage", "What was run")
    of_two = ("What changed", "By kind", "Tasks that went up", "Rewards of", "Validation of", "What was run")
    for arguments, sections in (([run], of_one), ([run, after], of_two)):
        assert main(["report", *map(str, arguments)]) == 0
        said = capsys.readouterr().out
        text = (arguments[-1] / "report.html").read_text()
        page = Page(text)
        assert {"svg", "table", "details", "main"} <= page.tags
        assert not {"script", "img", "link", "iframe", "object"} & page.tags
        assert "style" not in page.attributes
        assert not [name for name in page.attributes if name.startswith("on") or name in ("href", "src")]
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "unsafe" not in text
        for section in sections:
            assert section in page.text
        assert said.splitlines()[0] in page.text


def test_a_task_without_a_question_can_move(tmp_path: Path) -> None:
    """Rollouts of a file may begin with an answer; the table of what moved has a dash for what was asked."""
    messages = [{"role": "assistant", "content": "x", "turn": 1}]
    paths = [
        write_run(tmp_path / f"{reward}", [rollout("t", 0, reward, two_turns(20, 40), messages=messages)])
        for reward in (0.0, 1.0)
    ]
    assert '<td class="t">t</td><td>–</td>' in page(gymdata.report(*paths, write=False).to_dict())


def test_what_files_hold_is_text_on_the_page(tmp_path: Path) -> None:
    """Markup, handlers and terminal escapes in messages, ids, names, fields and commands stay text."""
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e'\""
    rewards: dict[str, list[float | None]] = {f"{evil}{i}": [float(i % 2)] for i in range(8)}
    run = make(tmp_path / "run", rewards, command=[evil], policy=evil)
    other = make(tmp_path / "other", {task: [1.0] for task in rewards}, command=[evil], policy=evil)
    for paths in ([run], [run, other]):
        text = Path(gymdata.report(*paths).path or "").read_text()
        page = Page(text)
        assert not {"script", "img"} & page.tags
        assert "<script>alert(1)</script>" in page.text
        for act in ("\x1b", "\u202e"):
            assert act not in text


def test_json_writes_no_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the figures and writes only where -o says; with -o, both."""
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"headline", "rewards", "pass_at_k", "validation", "training"} <= found.keys()
    assert not (run / "report.html").exists()
    assert main(["report", str(run), "--json", "-o", str(run.parent / "x" / "page.html")]) == 0
    assert (run.parent / "x" / "page.html").is_file()


@pytest.mark.parametrize("table", ["pairs", "file"])
def test_stages_and_files_have_reports(run: Path, table: str) -> None:
    """A pairs folder, its file, and a file of rollouts without a run.json."""
    gymdata.pairs(run)
    paths = {"pairs": [run / "pairs-reward", run / "pairs-reward" / "pairs.parquet"],
             "file": [next((run / "rollouts").glob("part-*"))]}[table]  # fmt: skip
    for path in paths:
        report = gymdata.report(path, output=run.parent / "page.html")
        assert (report.headline == "1 pair of 1 task") == (table == "pairs")


@pytest.mark.parametrize(
    "chart",
    [
        Chart("a", "one bar", "bars", "x", bins=[(1.0, 1.0, 3.0)]),
        Chart("a", "ranges", "bars", "x", bins=[(0.0, 0.5, 3.0), (0.5, 1.0, 0.0)]),
        Chart("a", "a point", "lines", "x", series={"y": [(1.0, 2.0)]}),
        Chart("a", "flat", "lines", "x", series={"y": [(1.0, 2.0), (2.0, 2.0)], "z": [(1.0, 1e9)]}),
        Chart("a", "no interval", "rates", rates=[("p", 0.5, None, None)], bounds=(0.5, 0.5)),
    ],
    ids=lambda chart: chart.title,
)
def test_charts_of_little_data_are_drawn(chart: Chart) -> None:
    """One bar, one point, a flat line and a rate without an interval give numbers and not NaN."""
    text = svg(chart)
    Page(text)
    assert "nan" not in text.lower()
    assert "inf" not in text.lower()


def test_charts_without_data_are_left_out(run: Path) -> None:
    """A chart is on the page in its section and order; one without data, or of rollouts that are not there, is not."""
    page = gymdata.report(run)
    text = (page.path or Path()).read_text()
    titles = [
        "Rewards of rollouts",
        "Mean reward of groups",
        "pass@k",
        "Generated tokens per rollout",
        "Tokens per second",
    ]
    assert sorted(titles, key=lambda title: text.index(f"<h3>{title}</h3>")) == titles
    assert "Margins of" not in text
    (figures,) = page.figures.get("runs", [page.figures])
    assert [chart.name for chart in charts_of(figures, "rewards")] == ["rewards", "groups", "pass-at-k", "parts"]
    assert charts_of({**figures, "rewards": None}, "sizes") == []


def test_ticks_are_round_numbers_within_the_bounds() -> None:
    """Steps of 1, 2 or 5 times a power of ten."""
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-3.0, 9.0) == [0.0, 5.0]
    assert ticks(0.0, 4_500.0) == [0.0, 1_000.0, 2_000.0, 3_000.0, 4_000.0]
    assert ticks(2.0, 2.0) == [2.0]
    assert [text for _, text in numbers([0.692, 0.693, 0.694])] == ["0.692", "0.693", "0.694"]
    assert [text for _, text in numbers([0.6924, 0.6926, 0.6928])] == ["0.6924", "0.6926", "0.6928"]
