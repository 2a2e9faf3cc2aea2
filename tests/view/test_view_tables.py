"""Pages over what was made from rollouts: groups, pairs, comparisons, training, and the exported file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.commands.report.sampling import sample, sampled_as
from gymdata.commands.view.run import view
from gymdata.commands.view.training import curves
from gymdata.errors import RefusedError, StoreError, UsageError
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import HOSTILE, Open, Site, judged, words


def evidence(page: str) -> Any:
    """What an exported file holds of its rollouts as JSON."""
    return json.loads(page.partition('id="evidence">')[2].partition("</script>")[0])


def compared(pages: Site, tab: str) -> set[str]:
    """The comparisons that a tab lists."""
    return set(re.findall(r"comparison\?id=([\d-]+)", pages.page("/comparisons", show=tab)))


def test_a_group_stands_side_by_side(site: Open, run: Path):
    """All rollouts of the group, their common prompt once, and how often each final answer came."""
    pages = site(run)
    assert pages.page("/group", id="group-a").count('class="pane cardcol"') == 4
    text = pages.says("/group", id="group-a")
    assert text.count("question a") == 1
    assert "0.5 mean reward" in text
    assert "4 distinct" in text
    assert pages.get("/group", id="nobody").status_code == 404


def test_the_mean_of_a_large_group_is_that_of_all_its_rollouts(site: Open, tmp_path: Path) -> None:
    """Also of those without a card."""
    rows = [rollout("a", k, float(k >= 75), two_turns(20, 40)) for k in range(100)]
    assert "0.25 mean reward" in site(write_run(tmp_path / "run", rows)).says("/group", id="group-a")


def test_a_duration_that_is_no_number_is_none(site: Open, tmp_path: Path) -> None:
    """As that of an imported rollout, which has none."""
    row = rollout("a", 0, 1.0, two_turns(20, 40), duration_s=float("nan"))
    assert site(write_run(tmp_path / "run", [row])).get("/rollout", id="a-0").status_code == 200


def test_rewards_that_are_no_numbers_make_no_group_mixed(site: Open, tmp_path: Path) -> None:
    """A group in which no reward is finite has none that differ."""
    rows = [rollout("a", k, float("nan"), two_turns(20, 40)) for k in range(2)]
    text = site(write_run(tmp_path / "run", rows)).says("/", by="group")
    assert "question a" in text
    assert "mixed mean" not in text


def test_what_was_expected_stands_beside_what_was_answered(site: Open, tmp_path: Path) -> None:
    """On the page of a group and in an exported file, which names its run and the prompt of each rollout; rollouts of a
    group are in their order, whichever ended first."""
    task = {"task": '{"answer": "1,374"}'}
    rows = [rollout("a", k, float(k), two_turns(20, 40 + k)) | task for k in (1, 0)]
    folder = write_run(tmp_path / "sums", rows)
    pages, target = site(folder), tmp_path / "x.html"
    assert "expected 1,374" in pages.says("/group", id="group-a")
    last = pages.says("/rollout", id="a-1")
    assert "2 of 2 in the group" in last
    groups = pages.says("/", by="group")
    assert groups.index("rollout 0") < groups.index("rollout 1")
    view(folder, export=target)
    text = words(target.read_text())
    assert "sums, exported by gymdata" in text
    assert "a 0 question a" in text
    assert text.count("expected 1,374") == 3


def test_a_pair_parts_where_its_tokens_do(site: Open, run: Path):
    """The margin, the place of the fork, the tokens that differ on either side, and both verdicts on the two."""
    rows = gymdata.pairs(run, strategy="all").table.to_pylist()
    pages = site(run)
    pair = next(p for p in rows if (p["chosen_rollout_id"], p["rejected_rollout_id"]) == ("a-0", "a-1"))
    fork = next(n for n, (a, b) in enumerate(zip(pair["chosen_ids"], pair["rejected_ids"], strict=True)) if a != b)
    text = pages.says("/pair", id=pair["pair_id"])
    assert f"parts at token {len(pair['prompt_ids']) + fork}" in text
    assert text.count("raw output") == 2
    different = re.findall(r' dif" title="id (\d+)"', pages.page("/pair", id=pair["pair_id"]))
    assert {*map(int, different)} == {pair["chosen_ids"][fork], pair["rejected_ids"][fork]}
    why = pages.get("/data/why-in-pair", id=pair["pair_id"], side="rejected", k=fork).json()
    assert (why["id"], why["mask"], why["shared"]) == (pair["rejected_ids"][fork], 1, False)
    assert (why["logprob"], why["difference"]) == (pair["rejected_logprobs"][fork], None)
    assert pages.get("/data/why-in-pair", id="nothing", side="chosen", k=0).status_code == 404
    assert "question a 40 2 41 2" in pages.says("/pairs")


def test_a_page_beyond_the_last_is_the_last(site: Open, run: Path):
    gymdata.pairs(run, strategy="all")
    pages = site(run)
    for path, other in (("/pairs", {}), ("/comparisons", {}), ("/", {}), ("/", {"groups": "1"})):
        links = re.findall(r'href="(/(?:pair|comparison|rollout|group)\?[^"]*)"', pages.page(path, **other))
        assert links
        assert links == re.findall(
            r'href="(/(?:pair|comparison|rollout|group)\?[^"]*)"', pages.page(path, page=9, **other)
        ), path


def test_pairs_of_each_score_are_listed_apart(site: Open, run: Path):
    """One file of pairs is listed at a time, chosen by its folder and score; its means, its neighbours and its sort are its
    own. A pair names the score that it was made by."""
    gymdata.pairs(run, strategy="all")
    gymdata.score(run, reward=lambda completion: 10.0 * ("43" in str(completion)), name="tens")
    gymdata.pairs(run, strategy="all")
    pages = site(run)
    for n, own in enumerate(("4 pairs 1 tasks 1 mean margin", "3 pairs 1 tasks 10 mean margin")):
        text = pages.says("/pairs", n=n, sort="margin")
        assert "run/pairs-reward/pairs.parquet 4 pairs by reward" in text
        assert "run/pairs-tens/pairs.parquet 3 pairs by tens" in text
        assert own in text
    assert "n=1&amp;sort=-margin" in pages.page("/pairs", n=1, sort="margin")
    ids = re.findall(r"/pair\?id=(\w+)\">a<", pages.page("/pairs", n=0))
    assert len(ids) == 4
    last = pages.page("/pair", id=ids[-1])
    assert "made by reward" in words(last)
    assert 'rel="next"' not in last


def test_the_same_pair_in_two_files_is_shown_as_each_has_it(site: Open, run: Path):
    """A list leads to the pair of its own file, and from there to its neighbours."""
    gymdata.pairs(run, strategy="all")
    gymdata.pairs(run, strategy="all", output=run / "pairs-close")
    pages = site(run)
    for n, folder in enumerate(("pairs-close", "pairs-reward")):
        link = re.findall(r"data-href=\"(/pair\?[^\"]*)", pages.page("/pairs", n=n))[0]
        page = pages.page(unescape(link))
        assert f"{folder}/pairs.parquet" in page
        assert f'href="/pairs?n={n}"' in page


def test_a_rollout_shows_each_of_its_scores_by_name(site: Open, run: Path):
    """The total reward stands first where several scores could be meant; every scoring stands beside it, with its name."""
    gymdata.score(run, reward=lambda completion: 7.0, name="sevens")
    gymdata.score(run, reward=lambda completion: 9.0, name="nines")
    text = site(run).says("/rollout", id="a-0")
    for score in ("1 reward", "nines 9 ", "sevens 7 "):
        assert score in text


def test_a_judge_is_measured_by_what_is_listed(site: Open, run: Path):
    """Rates and intervals are those of the listed comparisons; flips and verdicts against the rewards are marked."""
    pages = site(run)
    text = pages.says("/comparisons")
    for rate in (
        "first position wins 75.0 %",  # 0-1, 2-3, 3-2 of four decided
        "changes its mind 50.0 %",
        "agrees with the rewards 75.0 %",
        "calls equals equal 100.0 %",
        "failures 16.7 % 1 of 6",
        "3.0 % to 56.4 %",  # Wilson, 1 of 6
    ):
        assert rate in text
    tabs = {
        "flips": {"2-3", "3-2"},
        "reversed": {"3-2"},
        "failed": {"1-3"},
        "half": set(),
        "tied": set(),
        "unequal": set(),
    }
    assert {tab: compared(pages, tab) for tab in tabs} == tabs


def test_two_judges_of_a_run_are_told_apart(site: Open, run: Path):
    """Their comparisons have the same ids: each leads to its own, and neither judge is a second opinion of the other."""
    (run / "judge-tiny").rename(run / "judge-first")
    judged(run, (0, 1, 1, 5), judge="other")
    pages = site(run)
    links = re.findall(r'<a href="(/comparison\?id=0-1[^"]*)"', pages.page("/comparisons"))
    assert [("first wins" in text, "second wins" in text) for text in map(pages.says, map(unescape, links))] == [
        (True, False),
        (False, True),
    ]
    assert "of repeated judgements" not in pages.says("/comparisons")


def test_every_kind_of_wrong_verdict_has_its_tab(site: Open, run: Path):
    """A tie of unequal rewards, a winner among equal ones, and a pair that is a tie one way only: each is counted once,
    listed in its tab, and no flip."""
    judged(
        run,
        *((0, 1, 5, 1), (1, 0, 3, 3)),  # right, then a tie: the rewards are 1 and 0
        *((0, 2, 3, 3), (2, 0, 4, 2)),  # a tie, then a winner: the rewards are 1 and 1
        *((1, 2, 4, 2), (1, 3, 3, 3)),  # the worse one won; equals called equal
    )
    pages = site(run)
    tabs = {
        "half": {"0-1", "1-0", "0-2", "2-0"},
        "tied": {"1-0"},
        "unequal": {"2-0"},
        "reversed": {"1-2"},
        "flips": set(),
    }
    assert {tab: compared(pages, tab) for tab in tabs} == tabs
    text = pages.says("/comparisons")
    assert "rewards differ 3 1 33 % 1 33 % 1 33 %" in text  # right, tie, wrong winner
    assert "rewards equal 3 2 67 % is right 1 33 %" in text
    assert "pairs same winner tie both ways tie one way flipped 2 0 0 % 0 0 % 2 100 % 0 0 %" in text
    assert "differ, but the verdict is a tie" in pages.says("/comparison", id="1-0")


def test_a_comparison_shows_what_the_judge_wrote(site: Open, run: Path):
    """Both sides, the raw output of both positions, and that the verdict flipped; the output is text."""
    page = site(run).page("/comparison", id="3-2")
    assert "raw of 2-3" in page
    assert "&lt;script&gt;window.hit=1" in page
    assert "<script>window" not in page
    assert "\x1b" not in page
    assert "flipped" in words(page)
    assert "against the verdict" in words(page)


def test_curves_leave_gaps_and_torn_lines_out(tmp_path: Path):
    """A value that is no finite number is a gap, a torn last line waits, and a step that came twice is the later one."""
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": "NaN", "kl": 0.1}\n{"step": 1, "loss": 2.5}\n{"step": 3, "lo'
    )
    assert {chart.title: chart.series for chart in curves(file)} == {
        "loss": {"loss": [(1.0, 2.5)]},
        "KL": {"kl": [(2.0, 0.1)]},
    }


def test_squares_of_an_exported_file_have_the_colors_of_the_pages(tmp_path: Path) -> None:
    """Rewards beyond 0 to 1 are told apart."""
    rewards = [0.0, 1.0, 5.0, 10.0]
    run = write_run(tmp_path / "run", [rollout("a", i, r, two_turns(1, 2 + i)) for i, r in enumerate(rewards)])
    view(run, export=tmp_path / "selection.html")
    page = (tmp_path / "selection.html").read_text()
    assert sorted(set(re.findall(r'class="square (r-\d)"', page))) == ["r-0", "r-2", "r-4"]


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
    assert [one["rollout_id"] for one in evidence(page)] == ["a-0", "a-2"]
    assert evidence(page)[0]["turns"][0]["ids"] == [10, 11, 2]
    assert not re.search(r'(src|href)="(?!#)', page)
    # Two of the group's four rollouts were chosen: they stand side by side, and what is not in the file is said.
    assert "rollouts 2 of 4 in its run" in words(page)
    assert "Comparisons and training are on the pages of gymdata view only" in words(page)


@pytest.mark.parametrize(
    ("kind", "rows", "which"),
    [
        ("first", [0, 1, 2], "the first"),
        ("best", [0, 2, 4], "those with the highest reward"),
        ("worst", [1, 3, 4], "those with the lowest reward"),
        ("mixed", [1, 2, 3], "of groups whose rewards differ"),
        ("random", None, "drawn at random"),
    ],
)
def test_a_sample_is_chosen_and_named(kind: Any, rows: list[int] | None, which: str) -> None:
    """The best first, the ends of groups whose rewards differ, or at random and the same each time."""
    rewards, groups = np.array([1.0, 0.0, 1.0, 0.0, 0.5, 0.5]), np.array([0, 0, 0, 0, 1, 1])
    first, again = (sample(kind, 3, rewards, groups).tolist() for _ in range(2))
    assert first == again == (rows or first)
    assert sampled_as(kind, 3, 6, None) == f"3 of 6 rollouts, {which}"


def test_scores_that_cannot_be_read_leave_the_pages(site: Open, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is shown, and says so."""

    def unreadable(_: Any) -> Any:
        raise PermissionError(13, "Permission denied", "scores-x")

    monkeypatch.setattr("gymdata.commands.view.evidence.tables.state_of_scores", unreadable)
    pages = site(run)
    for address in ("/", "/rollout?id=a-0"):
        response = pages.get(address)
        assert response.status_code == 200
        assert "Permission denied" in words(response.text)


def test_an_exported_file_samples_and_says_how(run: Path, tmp_path: Path) -> None:
    """The file and the command say which rollouts of how many, and the same command writes the same file."""
    target, notes = tmp_path / "x.html", list[str]()
    view(run, export=target, sample="worst", limit=3, say=notes.append)
    assert notes[0].startswith("3 of 6 rollouts, those with the lowest reward, in ")
    page = target.read_text()
    assert "3 of 6 rollouts, those with the lowest reward" in words(page)
    assert [one["rollout_id"] for one in evidence(page)] == ["a-1", "a-3", "b-0"]
    view(run, export=target, sample="worst", limit=3)
    assert target.read_text() == page


def test_another_file_is_not_replaced_by_an_exported_one(run: Path, tmp_path: Path) -> None:
    """It stays unless overwrite is given."""
    target = tmp_path / "x.html"
    view(run, export=target, limit=3)
    page = target.read_text()
    with pytest.raises(StoreError, match=r"x\.html: is there already, and not the same page"):
        view(run, export=target, limit=2)
    assert target.read_text() == page
    view(run, export=target, limit=2, overwrite=True)
    assert target.read_text() != page
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


def test_a_damaged_table_is_named_on_its_page_only(site: Open, run: Path):
    """Pairs that are cut off give a page that says which file; rollouts and comparisons are shown as before."""
    (file,) = gymdata.pairs(run).files.values()
    file.write_bytes(file.read_bytes()[:-50])
    pages = site(run)
    answer = pages.get("/pairs")
    assert answer.status_code == 422
    assert file.name in answer.text
    for address in ("/", "/comparisons", "/rollout?id=a-0"):
        assert pages.get(address).status_code == 200
