"""Marks of people: written by a page, kept beside the run, and read by filter, query, pairs and scores."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.scores.marks import FILE, Mark, Marks, append, read_marks
from tests.kills import full_disk
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import BROKEN, Open, Site


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [rollout("a", k, float(k == 0), two_turns(20, 40 + k)) for k in range(4)])


def token_of(pages: Site) -> str:
    return re.findall(r'data-marks="([^"]+)"', pages.page("/rollout", id="a-0"))[0]


def mark(run: Path, *marks: tuple[str, str, str | float | None, str | None], who: str = "ann") -> None:
    for n, (kind, rollout_id, value, over) in enumerate(marks):
        append(run / FILE, Mark(kind, rollout_id, "a", who, f"2026-01-01T00:00:{n:02}", value, over))  # type: ignore[arg-type]  # one of the kinds


def test_a_page_writes_what_a_person_says(site: Open, run: Path) -> None:
    """A tag, a comment, a reward, a choice and a bad task stand beside the run, with who and when, and on the page."""
    pages = site(run, annotate=True)
    token = token_of(pages)
    for fields in (
        {"kind": "tag", "value": "good", "who": "ann"},
        {"kind": "comment", "value": "<b>odd</b>", "who": "ann"},
        {"kind": "reward", "value": 0.5, "who": "ben"},
        {"kind": "choice", "over": "a-2", "who": "ben"},
        {"kind": "bad_task", "who": "ben"},
    ):
        status, now = pages.post(token, id="a-1", **fields)
        assert status == 200
    assert now["tags"] == ["good"]
    assert now["comments"] == {"ann": "<b>odd</b>"}
    assert (now["reward"], now["better_than"], now["bad_task"]) == (0.5, {"a-2": ["ben"]}, True)
    lines = [json.loads(line) for line in (run / FILE).read_text().splitlines()]
    assert (lines[0]["kind"], lines[0]["who"]) == ("tag", "ann")
    assert all(line["marked_at"].endswith("+00:00") for line in lines)
    page = pages.page("/rollout", id="a-1")
    assert "&lt;b&gt;odd&lt;/b&gt;" in page
    assert "reward corrected to 0.5" in page


def test_a_mark_is_on_the_disk_whole_or_refused(run: Path) -> None:
    """A disk that takes a part of a mark leaves the marks before it, and is named."""
    mark(run, ("tag", "a-1", "good", None))
    before = (run / FILE).read_bytes()
    with full_disk(len(before) + 40), pytest.raises(StoreError, match="free space"):
        mark(run, ("tag", "a-1", "fine", None))
    assert (run / FILE).read_bytes() == before


def test_marks_that_cannot_be_read_are_named_on_every_page(site: Open, run: Path) -> None:
    """With file and line, in place of pages that would be without what people said."""
    mark(run, ("tag", "a-1", "good", None))
    with (run / FILE).open("a") as file:
        file.write('{"kind": "tag", "rollout_id": "a-1", "task_id": "a", "who": 1, "marked_at": "", "value": "b"}\n')
    answer = site(run).get("/")
    assert (answer.status_code, f"{run / FILE}, line 2" in answer.text) == (422, True)


def test_nothing_is_written_without_annotate_or_the_pages_token(site: Open, run: Path) -> None:
    """Another site knows no token; a server without --annotate has none; from another machine nothing is written."""
    assert site(run, annotate=True).post("guess", kind="tag", id="a-1", value="good")[0] == 403
    assert site(run).post("", kind="tag", id="a-1", value="good")[0] == 403
    assert not (run / FILE).exists()
    with pytest.raises(UsageError, match="no login"):
        gymdata.view(run, annotate=True, host="0.0.0.0")


@pytest.mark.parametrize(
    ("fields", "status", "why"),
    [
        ({"kind": "tag", "id": "a-1", "value": "a,b"}, 422, "without a comma"),
        ({"kind": "reward", "id": "a-1", "value": "high"}, 422, "a finite number"),
        ({"kind": "reward", "id": "a-1", "value": "inf"}, 422, "a finite number"),
        ({"kind": "choice", "id": "a-1", "over": "a-1"}, 422, "another rollout"),
        ({"kind": "selection", "over": "x", "value": "javascript:alert(1)"}, 422, "begins with /"),
        ({"kind": "love", "id": "a-1"}, 422, "kind of mark"),
        ({"kind": "tag", "id": "zz", "value": "x"}, 404, "there is no rollout"),
        ({"kind": "selection", "value": "/r", "over": ["x"]}, 422, "expected an id or a name"),
        ({"kind": "bad_task", "id": "a-1", "value": {"a": [1]}}, 422, "expected a text or a number"),
        ({"kind": "comment", "id": "a-1", "value": "\ud800"}, 422, "expected text that is Unicode"),
    ],
)
def test_a_mark_that_says_nothing_is_refused(
    site: Open, run: Path, fields: dict[str, Any], status: int, why: str
) -> None:
    """The answer says what was expected, and nothing is written."""
    pages = site(run, annotate=True)
    answer = pages.post(token_of(pages), **fields)
    assert answer[0] == status
    assert why in answer[1]["error"]
    assert not (run / FILE).exists()


def test_what_is_no_number_leaves_a_corrected_reward(site: Open, run: Path) -> None:
    """It is refused with what was got; an emptied box takes the correction back."""
    pages = site(run, annotate=True)
    token = token_of(pages)
    assert pages.post(token, kind="reward", id="a-1", value="0.5")[0] == 200
    for value in ("abc", "0,5", "nan", None):
        status, answer = pages.post(token, kind="reward", id="a-1", value=value)
        assert status == 422
        assert "expected a finite number" in answer["error"]
        assert str(value) in answer["error"]
    assert read_marks([run]).rewards == {"a-1": 0.5}
    assert pages.post(token, kind="reward", id="a-1", value="")[0] == 200
    assert read_marks([run]).rewards == {}


@pytest.mark.parametrize(("by", "bad"), [("rollout", 4), ("group", 1)])
def test_lists_show_what_people_marked(site: Open, run: Path, by: str, bad: int) -> None:
    """A corrected reward, tags and a bad task stand in the row of the list, and of a group."""
    mark(run, ("reward", "a-1", 0.25, None), ("tag", "a-1", "odd", None), ("bad_task", "a-1", None, None))
    page = site(run).page("/", by=by)
    assert page.count(">→ 0.25</span>") == 1
    assert page.count('<span class="tag">odd</span>') == 1
    assert page.count("bad task</span>") == bad


def test_two_people_at_once_lose_nothing(site: Open, run: Path) -> None:
    """Marks of two servers and eight threads are all there, whole, and each once."""
    servers = [(pages, token_of(pages)) for pages in (site(run, annotate=True), site(run, annotate=True))]

    def write(person: int) -> None:
        pages, token = servers[person % 2]
        for n in range(5):
            pages.post(token, kind="tag", id="a-1", value=f"{person}-{n}", who=f"p{person}")

    threads = [threading.Thread(target=write, args=(person,)) for person in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_marks([run]).tags["a-1"]) == sorted(f"{p}-{n}" for p in range(8) for n in range(5))


def test_a_line_that_was_cut_off_is_no_mark(run: Path) -> None:
    """The next mark stands on a line of its own; a line that says something else is an error with its number."""
    mark(run, ("tag", "a-1", "good", None))
    with (run / FILE).open("ab") as log:
        log.write(b'{"kind": "tag", "roll')
    mark(run, ("tag", "a-1", "late", None))
    with pytest.warns(UserWarning, match="line 2 was not finished"):
        marks = read_marks([run])
    assert marks.tags["a-1"] == ["good", "late"]
    (run / FILE).write_text('{"kind": "tag"}\n')
    with pytest.raises(DataError, match="line 1"):
        read_marks([run])


def test_a_later_mark_stands_for_an_earlier_one() -> None:
    """Tags, corrections and choices are taken back, and one person's last choice of two counts."""
    marks = Marks()
    for one in [
        Mark("tag", "r", "t", "ann", "1", "x"),
        Mark("untag", "r", "t", "ann", "2", "x"),
        Mark("reward", "r", "t", "ann", "3", 1.0),
        Mark("reward", "r", "t", "ann", "4", None),
        Mark("choice", "r", "t", "ann", "5", None, "s"),
        Mark("choice", "s", "t", "ann", "6", None, "r"),
        Mark("choice", "u", "t", "ann", "7", None, "v"),
        Mark("choice", "v", "t", "ben", "8", None, "u"),
        Mark("choice", "x", "t", "ann", "9", None, "y"),
        Mark("unchoice", "y", "t", "ben", "91", None, "x"),
        Mark("choice", "w", "t", "ann", "92", None, "z"),
        Mark("unchoice", "z", "t", "ann", "93", None, "w"),
    ]:
        marks.add(one)
    assert marks.tags == {"r": []}
    assert marks.rewards == {}
    # Two people who are divided prefer neither; a choice is taken back from either side, by the person who made it.
    assert marks.preferred() == {("s", "r"): 1, ("x", "y"): 1}


def test_conditions_and_sql_read_marks(run: Path) -> None:
    """Tags, comments and bad tasks are columns of --where and of rollouts in SQL, which has every mark, too."""
    mark(run, ("tag", "a-1", "good", None), ("comment", "a-2", "off by one", None), ("bad_task", "a-3", None, None))
    for where in ("contains(tags, 'good')", "contains(comments, 'off')"):
        assert gymdata.filter(run, write=False, where=[where]).rollouts_out == 1
    with pytest.raises(RefusedError, match="none of 4 rollouts is left"):
        gymdata.filter(run, write=False, where=["not bad_task"])
    rows = gymdata.query("SELECT kind, who, value FROM marks ORDER BY marked_at", run).to_pylist()
    assert rows[0] == {"kind": "tag", "who": "ann", "value": "good"}
    columns = "rollout_id, tags, comments, bad_task"
    assert gymdata.query(f"SELECT {columns} FROM rollouts ORDER BY rollout_id LIMIT 3", run).to_pylist() == [
        {"rollout_id": "a-0", "tags": "", "comments": "", "bad_task": True},
        {"rollout_id": "a-1", "tags": "good", "comments": "", "bad_task": True},
        {"rollout_id": "a-2", "tags": "", "comments": "off by one", "bad_task": True},
    ]


def test_marks_are_columns_of_a_file_of_a_run_and_of_a_run_without_any(run: Path) -> None:
    """A part alone has those of its run; without marks the columns are empty, and a comment that was taken back is gone."""
    sql = "SELECT count(*) AS n, count_if(bad_task) AS bad, max(comments) AS comments FROM rollouts WHERE tags = ''"
    assert gymdata.query(sql, run).to_pylist() == [{"n": 4, "bad": 0, "comments": ""}]
    mark(run, ("comment", "a-0", "first", None), ("bad_task", "a-0", None, None))
    mark(run, ("comment", "a-0", "", None), who="ben")
    for path in (run, next((run / "rollouts").iterdir())):
        assert gymdata.query(sql, path).to_pylist() == [{"n": 4, "bad": 4, "comments": "first"}]
    assert "bad_task" not in gymdata.query("SELECT kind FROM marks", run).column_names


def test_pairs_from_marks_are_what_people_chose(run: Path) -> None:
    """a-2 over a-1 over a-0, against the rewards, and nothing that nobody compared; a circle gives no pair."""
    mark(run, ("choice", "a-2", None, "a-1"), ("choice", "a-1", None, "a-0"))
    report = gymdata.pairs(run, write=False, source="marks")
    rows = report.table.to_pylist()
    pairs = {(row["chosen_rollout_id"], row["rejected_rollout_id"]) for row in rows}
    assert pairs == {("a-1", "a-0"), ("a-2", "a-1")}
    assert {row["source"] for row in rows} == {"marks"}
    assert report.counts.pairs == 2
    mark(run, ("choice", "a-0", None, "a-2"), who="zoe")
    circle = gymdata.pairs(run, source="marks", write=False)
    assert circle.counts.pairs == 0
    assert circle.counts.dropped["tie"] == 3


def test_pairs_from_marks_look_at_no_rollout_that_nobody_compared(tmp_path: Path) -> None:
    """A break in a-3 refuses no choice between a-0 and a-1; a choice of a task that was marked as bad gives no pair."""
    rows = [rollout(task, k, 0.0, two_turns(20, 40 + k)) for task in "ab" for k in range(3)]
    run = write_run(tmp_path / "run", [*rows, rollout("a", 3, 0.0, BROKEN)])
    mark(run, ("choice", "a-1", None, "a-0"))
    assert gymdata.pairs(run, source="marks", write=False).counts.pairs == 1
    mark(run, ("bad_task", "a-2", None, None))
    with pytest.raises(RefusedError, match="every choice that people made is of a task that was marked as bad"):
        gymdata.pairs(run, source="marks", write=False)
    append(run / FILE, Mark("choice", "b-1", "b", "ann", "2026-01-02T00:00:00", None, "b-0"))
    report = gymdata.pairs(run, source="marks", write=False)
    assert report.counts.pairs == 1
    assert "1 choice is of a task that was marked as bad, and gave no pair" in report.notes


def test_a_corrected_reward_is_a_score(run: Path) -> None:
    """--reward marks: the reward of collect, where nobody corrected it."""
    mark(run, ("reward", "a-1", 2.0, None))
    (row,) = gymdata.pairs(run, write=False, reward="marks").table.to_pylist()
    assert (row["chosen_rollout_id"], row["margin"]) == ("a-1", 2.0)
    assert gymdata.filter(run, write=False, where=["reward_marks >= 1"]).rollouts_out == 2
