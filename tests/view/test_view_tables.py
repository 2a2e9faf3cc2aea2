"""Pages over what was made from rollouts: groups, pairs, comparisons, SQL, training, lineage, and the exported file."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.errors import RefusedError, StoreError, UsageError
from gymdata.rollouts.schema import COMPARISONS
from gymdata.scores.marks import Mark, append
from gymdata.store import write_table
from gymdata.view.run import view
from gymdata.view.training import curves
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import Serve

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m'


def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def text_of(page: str) -> str:
    """What a page says, without its markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def comparison(i: int, j: int, score_1: float | None, score_2: float | None, **columns: Any) -> dict[str, Any]:
    ranking = None if score_1 is None or score_2 is None else 3.5 - (score_1 - score_2) / 2
    row = {
        "comparison_id": f"{i}-{j}", "group_id": "group-a", "task_id": "a", "rollout_i": f"a-{i}", "rollout_j": f"a-{j}",
        "response_i": i, "response_j": j, "judge_idx": 0, "score_1": score_1, "score_2": score_2, "ranking": ranking,
        "status": "judged" if ranking is not None else "failed", "raw": f"raw of {i}-{j}", "judge": "tiny", "run_id": "r",
    }  # fmt: skip
    return row | columns


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four rollouts of a task, with rewards 1, 0, 1, 0, and what a judge said of them; two of another."""
    rows = [rollout("a", k, float(k % 2 == 0), two_turns(20, 40 + k)) for k in range(4)]
    folder = write_run(tmp_path / "run", [*rows, *(rollout("b", k, 0.5, two_turns(21, 50)) for k in range(2))])
    said = [
        comparison(0, 1, 5, 1), comparison(1, 0, 1, 5),  # right, in both positions
        comparison(2, 3, 5, 1), comparison(3, 2, 5, 1, raw=HOSTILE, judge="tiny"),  # the first position both times: a flip
        comparison(0, 2, 3, 3), comparison(1, 3, None, None),  # equals called equal; a failure
    ]  # fmt: skip
    table = pa.Table.from_pylist(said, COMPARISONS.schema)
    write_table(table, folder / "judge-tiny" / "comparisons.parquet", COMPARISONS)
    (folder / "judge-tiny" / "run.json").write_text('{"stage": "judge", "parents": [{"path": ".."}]}')
    return folder


def test_a_group_stands_side_by_side(serve: Serve, run: Path):
    """All rollouts of the group, their common prompt once, and how often each final answer came."""
    status, page = get(serve(run) + "/group?id=group-a")
    assert status == 200
    shown = text_of(page)
    assert page.count('class="pane cardcol"') == 4
    assert shown.count("question a") == 1
    assert "0.5 mean reward" in shown
    assert "4 distinct" in shown
    assert get(serve(run) + "/group?id=nobody")[0] == 404


def test_what_was_expected_stands_beside_what_was_answered(serve: Serve, tmp_path: Path) -> None:
    """On the page of a group and in an exported file, which names its run and the prompt of each rollout; rollouts of a
    group are in their order, whichever ended first."""
    task = {"task": '{"answer": "1,374"}'}
    rows = [rollout("a", k, float(k), two_turns(20, 40 + k)) | task for k in (1, 0)]
    folder = write_run(tmp_path / "sums", rows)
    url, target = serve(folder, annotate=True), tmp_path / "x.html"
    assert "expected 1,374" in text_of(get(url + "/group?id=group-a")[1])
    last = text_of(get(url + "/rollout?id=a-1")[1])
    assert "2 of 2 in the group" in last
    assert "Better than – rollout 0: 0" in last
    listed = text_of(get(url + "/?by=group")[1])
    assert listed.index("rollout 0") < listed.index("rollout 1")
    view(folder, export=target)
    page = text_of(target.read_text())
    assert "sums, exported by gymdata" in page
    assert "a 0 question a" in page
    assert page.count("expected 1,374") == 3


def test_a_pair_parts_where_its_tokens_do(serve: Serve, run: Path):
    """The margin, the place of the fork, the tokens that differ on either side, and both verdicts on the two."""
    made = gymdata.pairs(run, strategy="all")
    base = serve(run)
    pairs = pq.read_table(next(iter(made.files.values()))).to_pylist()
    pair = next(p for p in pairs if (p["chosen_rollout_id"], p["rejected_rollout_id"]) == ("a-0", "a-1"))
    status, page = get(f"{base}/pair?id={pair['pair_id']}")
    assert status == 200
    fork = next(n for n, (a, b) in enumerate(zip(pair["chosen_ids"], pair["rejected_ids"], strict=True)) if a != b)
    assert f"parts at token {len(pair['prompt_ids']) + fork}" in text_of(page)
    assert sorted(map(int, re.findall(r' dif" title="id (\d+)"', page))) == sorted(
        [pair["chosen_ids"][fork], pair["rejected_ids"][fork]]
    )
    about = urllib.parse.urlencode({"id": pair["pair_id"], "side": "rejected", "k": fork})
    why = json.loads(get(f"{base}/data/why-in-pair?{about}")[1])
    assert (why["id"], why["mask"], why["shared"]) == (pair["rejected_ids"][fork], 1, False)
    assert (why["logprob"], why["difference"]) == (pair["rejected_logprobs"][fork], None)
    assert get(f"{base}/data/why-in-pair?id=nothing&side=chosen&k=0")[0] == 404
    shown = text_of(page)
    assert shown.count("raw output") == 2
    assert "question a 40 2 41 2" in text_of(get(base + "/pairs")[1])


def test_pairs_of_each_score_are_listed_apart(serve: Serve, run: Path):
    """One file of pairs is listed at a time, chosen by its folder and score; its means, its neighbours and its sort are its
    own. A pair names the score that it was made by."""
    gymdata.pairs(run, strategy="all")
    gymdata.score(run, reward=lambda completion: 10.0 * ("43" in str(completion)), name="tens")
    gymdata.pairs(run, strategy="all")
    base = serve(run)
    by_file = [text_of(get(f"{base}/pairs?n={n}&sort=margin")[1]) for n in (0, 1)]
    for page in by_file:
        assert "run/pairs-reward/pairs.parquet 4 pairs by reward" in page
        assert "run/pairs-tens/pairs.parquet 3 pairs by tens" in page
    assert "4 pairs 1 tasks 1 mean margin" in by_file[0]
    assert "3 pairs 1 tasks 10 mean margin" in by_file[1]
    assert "n=1&amp;sort=-margin" in get(f"{base}/pairs?n=1&sort=margin")[1]
    listed = re.findall(r"/pair\?id=(\w+)\">a<", get(base + "/pairs?n=0")[1])
    assert len(listed) == 4
    last = get(f"{base}/pair?id={listed[-1]}")[1]
    assert "made by reward" in text_of(last)
    assert 'rel="next"' not in last


def test_a_rollout_shows_each_of_its_scores_by_name(serve: Serve, run: Path):
    """The newest score stands first; what collect stored and every other scoring stand beside it, each with its name."""
    gymdata.score(run, reward=lambda completion: 7.0, name="sevens")
    gymdata.score(run, reward=lambda completion: 9.0, name="nines")
    shown = text_of(get(serve(run) + "/rollout?id=a-0")[1])
    assert "9 nines" in shown
    assert "reward 1 " in shown
    assert "sevens 7 " in shown


def test_a_judge_is_measured_by_what_is_listed(serve: Serve, run: Path):
    """Rates and intervals are those of the listed comparisons; flips and verdicts against the rewards are marked."""
    base = serve(run)
    shown = text_of(get(base + "/comparisons")[1])
    assert "first position wins 75.0 %" in shown  # 0-1, 2-3, 3-2 of four decided
    assert "changes its mind 50.0 %" in shown
    assert "agrees with the rewards 75.0 %" in shown
    assert "calls equals equal 100.0 %" in shown
    assert "failures 16.7 % 1 of 6" in shown
    assert "3.0 % to 56.4 %" in shown  # Wilson, 1 of 6
    flips = get(base + "/comparisons?show=flips")[1]
    assert set(re.findall(r"comparison\?id=([\d-]+)", flips)) == {"2-3", "3-2"}
    assert listed(base, "reversed") == {"3-2"}
    assert listed(base, "failed") == {"1-3"}
    assert listed(base, "half") == listed(base, "tied") == listed(base, "unequal") == set()


def listed(base: str, tab: str) -> set[str]:
    return set(re.findall(r"comparison\?id=([\d-]+)", get(f"{base}/comparisons?show={tab}")[1]))


def test_every_kind_of_wrong_verdict_has_its_tab(serve: Serve, run: Path):
    """A tie of unequal rewards, a winner among equal ones, and a pair that is a tie one way only: each is counted once,
    listed in its tab, and no flip."""
    said = [
        comparison(0, 1, 5, 1), comparison(1, 0, 3, 3),  # right, then a tie: the rewards are 1 and 0
        comparison(0, 2, 3, 3), comparison(2, 0, 4, 2),  # a tie, then a winner: the rewards are 1 and 1
        comparison(1, 2, 4, 2), comparison(1, 3, 3, 3),  # the worse one won; equals called equal
    ]  # fmt: skip
    write_table(pa.Table.from_pylist(said, COMPARISONS.schema), run / "judge-tiny" / "comparisons.parquet", COMPARISONS)
    base = serve(run)
    assert listed(base, "half") == {"0-1", "1-0", "0-2", "2-0"}
    assert listed(base, "tied") == {"1-0"}
    assert listed(base, "unequal") == {"2-0"}
    assert listed(base, "reversed") == {"1-2"}
    assert listed(base, "flips") == set()
    shown = text_of(get(base + "/comparisons")[1])
    assert "rewards differ 3 1 33 % 1 33 % 1 33 %" in shown  # right, tie, wrong winner
    assert "rewards equal 3 2 67 % is right 1 33 %" in shown
    assert "pairs same winner tie both ways tie one way flipped 2 0 0 % 0 0 % 2 100 % 0 0 %" in shown
    assert "differ, but the verdict is a tie" in text_of(get(base + "/comparison?id=1-0")[1])


def test_a_comparison_shows_what_the_judge_wrote(serve: Serve, run: Path):
    """Both sides, the raw output of both positions, and that the verdict flipped; the output is text."""
    page = get(serve(run) + "/comparison?id=3-2")[1]
    assert "raw of 2-3" in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "flipped" in text_of(page)
    assert "against the verdict" in text_of(page)


def sql(base: str, text: str) -> str:
    return get(f"{base}/sql?{urllib.parse.urlencode({'q': text})}")[1]


def test_sql_reads_and_does_nothing_else(serve: Serve, run: Path, tmp_path: Path):
    """One SELECT is answered; anything that writes, reads elsewhere or never ends is refused or stopped, and says so."""
    base = serve(run, sql_seconds=0.3)
    page = sql(base, "SELECT task_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1")
    assert re.findall(r"<td[^>]*>(?:<a[^>]*>)?([^<]*)(?:</a>)?</td>", page) == ["a", "4", "b", "2"]
    target = tmp_path / "stolen.csv"
    for text, why in [
        (f"COPY rollouts TO '{target}'", "expected a SELECT"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("SELECT * FROM read_text('/etc/passwd')", "disabled by configuration"),
        ("SELECT count(*) FROM range(100000000000) a, range(1000) b", "took longer than 0.3 s"),
        ("SELECT rewrd FROM rollouts", "did you mean"),
    ]:
        assert why in sql(base, text), text
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "chosen", "kind", "drawn"),
    [
        ("SELECT task_id, count(*) AS n FROM rollouts GROUP BY 1 ORDER BY 1", "", "bars", "<title>a</title>"),
        ("SELECT rollout_index AS i, avg(reward) AS r FROM rollouts GROUP BY 1", "", "line", "<title>r</title>"),
        ("SELECT rollout_id, reward FROM rollouts", "", "histogram", "<title>1: "),
        (
            "SELECT task_id, 1 AS a, 2.5 AS b FROM rollouts",
            "&chart=histogram&y=b",
            "histogram",
            "<title>2.5: 6</title>",
        ),
        ("SELECT task_id, reward FROM rollouts", "&chart=line", "line", "no two numbers"),
    ],
)
def test_a_result_of_sql_is_drawn(serve: Serve, run: Path, text: str, chosen: str, kind: str, drawn: str):
    """Names and numbers are bars, numbers by numbers a line, numbers of rollouts a histogram; or what the address says."""
    page = get(f"{serve(run)}/sql?{urllib.parse.urlencode({'q': text})}{chosen}")[1]
    assert f"<option selected>{kind}</option>" in page
    assert drawn in page


def test_ids_in_a_result_of_sql_are_links(serve: Serve, run: Path):
    """A rollout, a group and a task open as their pages; one row of text has no chart."""
    page = sql(serve(run), "SELECT rollout_id, group_id, task_id FROM rollouts LIMIT 1")
    for address in ("/rollout?id=a-0", "/group?id=group-a", "/?task=a"):
        assert f'href="{address}"' in page
    assert 'id="chart"' not in page


@pytest.mark.parametrize(
    ("headers", "query", "runs"),
    [
        ({}, "", True),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "navigate"}, "", True),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, "", False),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, "", False),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, "", True),
        ({"host": "box"}, "", False),
        ({"host": "box"}, "&run=guessed", False),
        ({"host": "box"}, "&run={token}", True),
    ],
)
def test_a_statement_of_another_sites_link_is_shown_and_not_run(
    serve: Serve, run: Path, headers: dict[str, str], query: str, runs: bool
):
    """A statement runs when these pages or a program on this machine sent it; else it stands in the box, and its
    download is refused."""
    base = serve(run, allow_host=["box"])
    token = re.findall(r'name="run" value="([^"]+)"', get(base + "/sql")[1])[0]
    query = "q=SELECT+41%2B1+AS+found" + query.format(token=token)
    page = get(f"{base}/sql?{query}", headers)[1]
    assert "SELECT 41+1 AS found</textarea>" in page
    assert (">42<" in page) == runs
    assert ("press Run" in page) != runs
    assert get(f"{base}/sql/download?format=csv&{query}", headers)[0] == (200 if runs else 403)


def test_a_statement_that_takes_all_memory_ends_alone(serve: Serve, run: Path):
    """The list of two billion numbers is an error that names the limit, and the server answers the next request."""
    base = serve(run, sql_memory=1 << 30, sql_seconds=60)
    assert "out of memory: the statement needs more than its limit of 1.07 GB" in sql(
        base, "SELECT list_sum(range(2000000000::BIGINT))"
    )
    assert ">1<" in sql(base, "SELECT 1 AS found")


def test_sql_shows_so_many_rows_and_downloads_all(serve: Serve, run: Path):
    """The page is cut at its limit and says so; CSV, JSON and Parquet have the whole result."""
    base = serve(run, sql_rows=2)
    text = "SELECT rollout_id, reward FROM rollouts ORDER BY rollout_id"
    page = sql(base, text)
    assert "first 2 rows" in text_of(page)
    wanted = gymdata.query(text, run).to_pylist()
    query = urllib.parse.urlencode({"q": text})
    lines = get(f"{base}/sql/download?format=csv&{query}")[1].splitlines()
    assert len(lines) == 1 + len(wanted)
    rows = [json.loads(line) for line in get(f"{base}/sql/download?format=jsonl&{query}")[1].splitlines()]
    assert rows == wanted
    with urllib.request.urlopen(f"{base}/sql/download?format=parquet&{query}") as answer:
        assert pq.read_table(io.BytesIO(answer.read())).to_pylist() == wanted
        assert "attachment" in answer.headers["content-disposition"]


def test_a_result_with_rollouts_becomes_a_filter_command(serve: Serve, run: Path):
    """Rows that name rollouts give the command that keeps these, and it does."""
    page = sql(serve(run), "SELECT rollout_id FROM rollouts WHERE reward = 1")
    assert "gymdata filter" in page
    where = 'rollout_id in ["a-0", "a-2"]'
    assert where.replace('"', "&#34;") in page
    assert gymdata.filter(run, write=False, where=[where]).rollouts_out == 2


def test_curves_leave_gaps_and_torn_lines_out(tmp_path: Path):
    """A value that is no finite number is a gap, a torn last line waits, and a step that came twice is the later one."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": "NaN", "kl": 0.1}\n{"step": 1, "loss": 2.5}\n{"step": 3, "lo'
    )
    found = curves(file)
    assert found["steps"] == [1.0, 2.0]
    panels = {panel["title"]: panel["series"] for panel in found["panels"]}
    assert panels == {"loss": {"loss": [2.5, None]}, "KL": {"kl": [None, 0.1]}}


def test_trainings_are_overlaid(serve: Serve, tmp_path: Path):
    """A panel for each series that two have, over the steps of both, and the settings that differ."""
    for name, rate, losses in (("a", 0.1, (3.0, 2.0)), ("b", 0.2, (4.0, 1.0, 0.5))):
        folder = tmp_path / name
        folder.mkdir()
        facts = {"stage": "train-sft", "config": {"learning_rate": rate, "seed": 1}}
        (folder / "run.json").write_text(json.dumps(facts))
        rows = [{"step": step, "loss": loss, f"only_{name}": 1.0} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = serve(tmp_path / "a", tmp_path / "b")
    page = text_of(get(base + "/training?n=all")[1])
    assert "Settings that differ setting a b learning_rate 0.1 0.2" in page
    found = json.loads(get(base + "/data/curves?n=all")[1])
    assert found["steps"] == [1.0, 2.0, 3.0]
    assert found["panels"] == [{"title": "loss", "series": {"a": [3.0, 2.0, None], "b": [4.0, 1.0, 0.5]}}]


def test_lineage_draws_what_run_json_names(serve: Serve, run: Path, tmp_path: Path):
    """Tasks, rollouts, the judge, pairs and a model, with an edge for each parent; one that is gone says so."""
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(
        json.dumps(facts | {"stage": "collect", "tasks": {"files": [{"path": "gone.jsonl", "xxh3": "1"}]}})
    )
    gymdata.pairs(run)
    model = tmp_path / "model"
    model.mkdir()
    (model / "run.json").write_text(
        json.dumps({"stage": "train-dpo", "parents": [{"path": str(run / "pairs-reward")}]})
    )
    judge = json.loads((run / "judge-tiny" / "run.json").read_text())
    files = [{"path": "comparisons.parquet", "rows": 6}, {"path": "scores.parquet", "rows": 4}]
    (run / "judge-tiny" / "run.json").write_text(json.dumps(judge | {"files": files}))
    scores = run / "scores-mine"
    scores.mkdir()
    made = {"stage": "score", "files": [{"path": "scores.parquet", "rows": 8}], "counts": {"rollouts": 4, "scored": 3}}
    (scores / "run.json").write_text(json.dumps(made))
    page = get(serve(run, model) + "/lineage")[1]
    # A rollout that was scored twice has two rows, and one without a value has one.
    assert "score, 3 scored rollouts" in text_of(page)
    # The rows of its scores are no comparisons.
    assert "judge, 6 comparisons" in text_of(page)
    names = re.findall(r'<text class="name"[^>]*>([^<]*)</text>', page)
    assert set(names) >= {"run", "judge-tiny", "pairs-reward", "model", "gone.jsonl"}
    assert page.count('class="edge"') >= 4
    assert "no longer there" in page or "missing" in page


def test_an_exported_file_needs_nothing_else(run: Path, tmp_path: Path):
    """One file with the selection's evidence as JSON, a policy that allows its own script only, and no address in it."""
    target, said = tmp_path / "selection.html", list[str]()
    view(run, export=target, where="reward == 1", say=said.append)
    assert said[0].startswith("2 rollouts, in ")
    page = target.read_text()
    assert target.stat().st_size < 1_000_000
    scripts = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    allowed = re.search(r"script-src '(sha256-[^']*)'", page.replace("&#39;", "'"))
    assert allowed is not None
    assert [f"sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}" for s in scripts] == [allowed[1]]
    evidence = re.search(r'id="evidence">(.*?)</script>', page, re.DOTALL)
    assert evidence is not None
    tokens = json.loads(evidence[1])
    assert [one["rollout_id"] for one in tokens] == ["a-0", "a-2"]
    assert tokens[0]["turns"][0]["ids"] == [10, 11, 2]
    assert not re.search(r'(src|href)="(?!#)', page)
    # Two of the group's four rollouts were chosen: they stand side by side, and what is not in the file is said.
    assert "rollouts 2 of 4 in its run" in text_of(page)
    assert "Comparisons, SQL, training and lineage are on the pages of gymdata view only" in text_of(page)


@pytest.mark.parametrize(
    ("sample", "ids", "which"),
    [
        ("first", ["a-0", "a-1", "a-2"], "the first"),
        ("best", ["a-0", "a-2", "b-0"], "those with the highest reward"),
        ("worst", ["a-1", "a-3", "b-0"], "those with the lowest reward"),
        ("mixed", ["a-0", "a-1", "a-2"], "of groups whose rewards differ"),
        ("random", None, "drawn at random"),
    ],
)
def test_an_exported_file_samples_and_says_how(run: Path, tmp_path: Path, sample: str, ids: Any, which: str) -> None:
    """The best first, groups whose rewards differ, or at random and the same each time; the file and the command say which
    rollouts of how many."""
    target, notes = tmp_path / "x.html", list[str]()
    view(run, export=target, sample=sample, limit=3, say=notes.append)
    assert notes[0].startswith(f"3 of 6 rollouts, {which}, in ")
    page = target.read_text()
    assert f"3 of 6 rollouts, {which}" in text_of(page)
    evidence = re.search(r'id="evidence">(.*?)</script>', page, re.DOTALL)
    assert evidence is not None
    chosen = [row["rollout_id"] for row in json.loads(evidence[1])]
    assert chosen == (ids or chosen)
    view(run, export=target, sample=sample, limit=3)
    assert target.read_text() == page


def test_another_file_is_not_replaced_by_an_exported_one(run: Path, tmp_path: Path) -> None:
    """The same page may be written again; another file stays unless overwrite is given. Marks are not made in a file."""
    target = tmp_path / "x.html"
    view(run, export=target, limit=3)
    view(run, export=target, limit=3)
    page = target.read_text()
    with pytest.raises(StoreError, match=r"x\.html: is there already, and not the same page"):
        view(run, export=target, limit=2)
    assert target.read_text() == page
    view(run, export=target, limit=2, overwrite=True)
    assert target.read_text() != page
    with pytest.raises(UsageError, match=r"annotate.* has no effect with"):
        view(run, export=target, annotate=True)
    with pytest.raises(UsageError, match=r"overwrite.* has no effect without"):
        view(run, overwrite=True)


def test_a_sample_without_rewards_to_choose_by_is_refused(tmp_path: Path) -> None:
    """Without rewards there is no best rollout, and without different ones no mixed group; without a file to write the
    choice has no effect, which is an error."""
    equal = write_run(tmp_path / "equal", [rollout("a", k, 1.0, two_turns(20, 40)) for k in range(2)])
    target = tmp_path / "x.html"
    with pytest.raises(RefusedError, match="no group of 2 rollouts has different rewards"):
        view(equal, export=target, sample="mixed")
    bare = write_run(tmp_path / "bare", [rollout("a", 0, None, two_turns(20, 40))])
    with pytest.raises(RefusedError, match="none of 1 rollout has a reward"):
        view(bare, export=target, sample="worst")
    with pytest.raises(UsageError, match="sample"):
        view(bare, sample="random")
    assert not target.exists()


def test_marks_are_shown_in_an_exported_file(run: Path, tmp_path: Path) -> None:
    """Tags, comments with who made them, corrected rewards, choices that lead to the other rollout, and bad tasks."""
    for kind, rollout_id, value, over in (
        ("tag", "a-0", "clean", None), ("comment", "a-0", HOSTILE, None), ("reward", "a-0", 0.25, None),
        ("choice", "a-0", None, "a-3"), ("bad_task", "b-0", None, None),
    ):  # fmt: skip
        append(run / "marks.jsonl", Mark(kind, rollout_id, rollout_id[0], "ada", "2026-11-01T10:00:00Z", value, over))
    target = tmp_path / "x.html"
    view(run, export=target, limit=5)
    page = target.read_text()
    text = text_of(page)
    assert "a 0 clean question a" in text
    assert "clean reward corrected to 0.25 better than" in text
    assert '<a href="#r3">rollout 3</a>' in page
    assert "ada" in text
    assert "<img" not in page
    assert text.count("bad task") == 1
    gymdata.report(run, output=tmp_path / "report.html")
    text = text_of((tmp_path / "report.html").read_text())
    assert "Marked: clean; reward corrected to 0.25; better than a-3" in text


def test_an_exported_file_is_safe_with_hostile_rollouts(tmp_path: Path):
    """What would end a script inside JSON, and markup in messages, stays text."""
    messages = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE, "turn": 1}]
    row = rollout(HOSTILE, 0, 1.0, two_turns(20, 40), messages=messages)
    row["turns"][0]["finish_reason"] = HOSTILE
    target = tmp_path / "x.html"
    view(write_run(tmp_path / "run", [row]), export=target)
    page = target.read_text()
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "\x1b" not in page


def test_a_selection_without_rollouts_is_not_exported(run: Path, tmp_path: Path):
    """A wrong condition or name is a usage error, and no file is written."""
    with pytest.raises(UsageError, match="rewrd"):
        view(run, export=tmp_path / "x.html", where="rewrd > 1")
    with pytest.raises(UsageError, match=r"\.html"):
        view(run, export=tmp_path / "x.csv")
    assert not list(tmp_path.glob("x.*"))


def test_a_damaged_table_is_named_on_its_page_only(serve: Serve, run: Path):
    """Pairs that are cut off give a page that says which file; rollouts and comparisons are shown as before."""
    made = gymdata.pairs(run)
    file = next(iter(made.files.values()))
    file.write_bytes(file.read_bytes()[:-50])
    base = serve(run)
    status, page = get(base + "/pairs")
    assert status == 422
    assert file.name in page
    assert get(base + "/")[0] == 200
    assert get(base + "/comparisons")[0] == 200
    assert get(base + "/rollout?id=a-0")[0] == 200
