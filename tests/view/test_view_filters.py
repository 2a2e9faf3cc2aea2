"""What a selection says of itself: faults with their codes, mixed groups, several runs, and input that is wrong."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from html import unescape
from pathlib import Path

import pytest

import gymdata
from gymdata.checks.violations import CODES
from gymdata.query.saved import SAVED
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import Serve

ROOT = Path(__file__).parents[2]
BROKEN = ROOT / "sample_data" / "rollouts" / "broken.jsonl"
FAULTY = {
    "T206": "3d3ca74d586f0eea4ffd9720f6a55325",
    "L301": "48f2517180d15e197f9ae50c988b2f14",
    "L302": "abfb07f8d28859abe4758eadd7c7a87c",
    "L303": "31153b082b8368625b373a4aa067eb62",
    "M404": "13a10fd0749ee6a88c8d738523d63fa0",
    "R502": "1ea68989b4c1fcd776ac4e71f74e123e",
    "S102": "8c43893f86cd8917ff220a05d1f4e891",
}


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def shown(url: str) -> str:
    """What the main part of a page says, without its markup."""
    page = get(url)[1].partition("<main")[2].partition("</main>")[0]
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page)))


def runs(tmp_path: Path) -> list[Path]:
    """Two runs of three tasks with two rollouts each: rewards 0 and 1 of two tasks before, of one after, else equal."""
    made = []
    for name, mixed in (("before", 2), ("after", 1)):
        rows = [
            rollout(f"t{t}", k, float(k) if t < mixed else 1.0, two_turns(20 + t, 40), run_id=name,
                    rollout_id=f"{name}-{t}-{k}", group_id=f"{name}-{t}")
            for t in range(3) for k in range(2)
        ]  # fmt: skip
        made.append(write_run(tmp_path / name, rows))
        (made[-1] / "run.json").write_text((made[-1] / "run.json").read_text().replace("run-1", name))
    return made


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_filter_box_searches_texts(serve: Serve, tmp_path: Path, suffix: str):
    """What a prompt and an answer say, of files of either kind."""
    answers = ("I cannot", "12", "cannot say")
    rows = [rollout(f"t{k}", 0, 1.0, two_turns(k, 40), text=text) for k, text in enumerate(answers)]
    base = serve(write_run(tmp_path / "run", rows, suffix))
    for where, ids in (("text LIKE '%cannot%'", {"t0-0", "t2-0"}), ("contains(prompt, 't1')", {"t1-0"})):
        status, listed = get(f"{base}/?{urllib.parse.urlencode({'where': where})}")
        assert (status, set(re.findall(r"/rollout\?id=([\w-]+)", listed))) == (200, ids)


def test_the_text_box_searches_tool_calls(serve: Serve, tmp_path: Path):
    """A call before the answer is found by its name and by its arguments, and stands in the row, marked."""
    rows = [rollout(f"t{k}", 0, 1.0, two_turns(k, 40), text=str(190 * 16)) for k in range(2)]
    call = {"function": {"name": "calculate", "arguments": {"expression": "190*16"}}}
    rows[1]["messages"][1]["tool_calls"] = json.dumps([call])
    base = serve(write_run(tmp_path / "run", rows))
    for text in ("190*16", "calculate"):
        listed = get(f"{base}/?text={urllib.parse.quote(text)}")[1]
        assert re.findall(r'<td class="task"><a[^>]*>(\w+)<', listed) == ["t1"]
        assert f"<mark>{text}</mark>" in listed


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_list_shows_prompt_answer_and_reference(serve: Serve, tmp_path: Path, suffix: str):
    """Each in a line; a tool call where the policy wrote none, and the reference where it is not the answer. The text box
    finds both as they are written, without the meaning that marks have in patterns."""
    call = '[{"function": {"name": "add", "arguments": {"a": 2}}}]'
    asked = (("a", "What is\n2*3?", "6", "6"), ("b", "What is 233?", "5", "7"), ("c", "Hm", None, "1"))
    rows = []
    for task, prompt, answer, reference in asked:
        row = rollout(task, 0, 1.0, [([1, 5], [10, 2])])
        row["task"] = json.dumps({"answer": reference})
        row["messages"] = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer, "tool_calls": None if answer else call, "turn": 0},
        ]
        rows.append(row)
    url = serve(write_run(tmp_path / "run", rows, suffix))
    page = shown(url)
    for line in ("What is 2*3? 6 1", "What is 233? 5 expected 7", 'Hm → add({"a": 2}) expected 1'):
        assert line in page
    assert "expected 7" in shown(f"{url}/rollout?id=b-0")
    assert '{ "answer" : "7" }' in shown(f"{url}/rollout?id=b-0")
    found = get(f"{url}/?text={urllib.parse.quote('2*3')}")[1]
    assert re.findall(r'<td class="task"><a[^>]*>(\w+)<', found) == ["a"]


def test_columns_are_chosen_and_stand_in_the_address(serve: Serve, tmp_path: Path):
    """The list has the columns that the address names, fields of tasks, too; a filter keeps them."""
    rows = [
        rollout(f"t{t}", 0, 1.0, two_turns(20, 40)) | {"task": json.dumps({"level": ("easy", "hard")[t % 2]})}
        for t in range(8)
    ]
    base = serve(write_run(tmp_path / "run", rows))
    page = get(f"{base}/?columns=reward,id,task.level,nothing&text=question+t1")[1]
    heads = [re.sub(r"<[^>]*>", "", head).strip() for head in re.findall(r"<th [^>]*>(.*?)</th>", page)]
    assert heads == ["Task", "#", "Reward", "Id", "task.level"]
    assert "<td>hard</td>" in page
    assert 'name="columns" value="reward,id,task.level"' in page
    assert 'columns=reward%2Cid"' in page
    assert "<mark>question t1</mark>" in get(f"{base}/?text=question+t1")[1]


def test_an_unknown_column_or_order_of_an_address_is_named(serve: Serve, tmp_path: Path):
    """The list is there without it, and the page says what it could have been."""
    base = serve(write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(20, 40))]))
    page = shown(f"{base}/?columns=prompt,anwser&sort=rewrd")
    assert "columns: got 'anwser', expected one of prompt, answer" in page
    assert "sort: got 'rewrd', expected one of reward, task_id" in page
    assert "did you mean 'reward'?" in page
    assert "question t" in page


def test_rows_groups_and_rollouts_of_several_runs_name_their_run(serve: Serve, tmp_path: Path):
    """A task that both runs have stands twice, told apart by the column run; a view of one run has no such column."""
    before, after = runs(tmp_path)
    base = serve(before, after)
    listed = get(f"{base}/?task=t0")[1]
    assert re.findall(r'<td class="run"[^>]*>(\w+)<', listed) == ["before", "before", "after", "after"]
    assert "run after" in shown(f"{base}/rollout?id=after-0-0")
    assert "run after" in shown(f"{base}/group?id=after-0")
    groups = shown(f"{base}/?task=t0&by=group")
    assert "t0 before" in groups
    assert "t0 after" in groups
    assert 'class="run"' not in get(serve(before))[1]


def test_a_chosen_value_of_a_field_can_be_switched(serve: Serve, tmp_path: Path):
    """Its facet stays with all its values and marks the chosen one; a click on another replaces it, on itself removes it."""
    rows = [
        rollout(f"t{t}", 0, float(t % 3), two_turns(20, 40)) | {"task": json.dumps({"operator": "+-*"[t % 3]})}
        for t in range(12)
    ]
    base = serve(write_run(tmp_path / "run", rows))

    def values(address: str) -> dict[str, tuple[str, bool]]:
        dl = get(base + address)[1].partition("<dt>task.operator</dt>")[2].partition("</dl>")[0]
        links = re.findall(r'<a href="([^"]*)"([^>]*)>(\S+) <b>4</b>', dl)
        return {label: (unescape(href), "aria-current" in more) for href, more, label in links}

    first = values("/?where=n_turns+%3E+0")
    assert [chosen for _, chosen in first.values()] == [False, False, False]
    times = values(first["*"][0])
    assert {label: chosen for label, (_, chosen) in times.items()} == {"+": False, "-": False, "*": True}
    minus = values(times["-"][0])
    assert minus["-"][1]
    assert minus["*"] == (first["*"][0], False)
    assert values(minus["-"][0]) == first


def test_a_groups_mark_and_mean_are_of_all_its_rollouts(serve: Serve, tmp_path: Path):
    """With reward == 0 a mixed group stays mixed, with its mean, and says how many of its rollouts are shown."""
    before, _ = runs(tmp_path)
    page = shown(f"{serve(before)}/?by=group&where=reward+%3D%3D+0")
    assert page.count("1 of 2 shown mean 0.5") == 2
    assert "2 mixed" in page
    assert "all equal" not in page


@pytest.mark.parametrize("code", FAULTY)
def test_a_rollout_that_fails_validation_says_its_code(serve: Serve, code: str):
    """Its page has code and meaning and leads to the explanation; the list marks it and can be filtered by the code."""
    base = serve(BROKEN)
    page = shown(f"{base}/rollout?id={FAULTY[code]}")
    assert code in page
    assert CODES[code].meaning in page
    explanation = shown(f"{base}/code?code={code}")
    assert " ".join(CODES[code].explanation.replace("`", " ").split()) in explanation
    assert "1 rollout here with it" in explanation
    status, listed = get(f"{base}/?fault={code}")
    assert status == 200
    assert set(re.findall(r"/rollout\?id=(\w+)", listed)) == {FAULTY[code]}
    assert f'href="/code?code={code}"' in listed


def test_an_unknown_code_is_not_here(serve: Serve):
    """The address of a code that there is not names those that there are."""
    status, page = get(serve(BROKEN) + "/code?code=X999")
    assert status == 404
    assert "T206" in page


def test_mixed_groups_are_listed_as_groups_and_chosen_once(serve: Serve, tmp_path: Path):
    """The count of mixed groups leads to these groups; there it leads nowhere again."""
    base = serve(*runs(tmp_path))
    page = get(base + "/?where=n_turns+%3E+0")[1]
    link = re.search(r'href="([^"]*)"[^>]*>3 mixed', page)
    assert link is not None
    status, page = get(base + unescape(link[1]))
    assert status == 200
    assert page.count('<details class="group"') == 3
    assert "all equal" not in page
    assert page.count("min_reward &lt; max_reward") == page.count("n_turns &gt; 0&#39;")
    assert "3 mixed</a>" not in page


def test_several_runs_have_their_own_counts(serve: Serve, tmp_path: Path):
    """Rollouts, groups, mixed groups and breaks of each run; the saved query of mixed tasks has a line for each run."""
    base = serve(*runs(tmp_path))
    page = shown(base + "/")
    assert re.search(r"before 6 3 2 0 0\.6667 first", page)
    assert re.search(r"after 6 3 1 0 0\.8333 \+0\.167", page)
    found = shown(f"{base}/sql?{urllib.parse.urlencode({'q': SAVED['mixed-tasks']})}")
    assert "t0 after 2 0.5" in found
    assert "t0 before 2 0.5" in found
    assert "t1 before 2 0.5" in found


def test_a_comparison_of_what_came_out_says_so(serve: Serve, tmp_path: Path):
    """Under a filter by reward the difference is not called better or worse; under one by task it still is."""
    base = serve(*runs(tmp_path))
    outcome = shown(base + "/?min=1")
    assert "The filter selects by what came out (reward)" in outcome
    assert not re.search(r"better|worse|no clear difference", outcome)
    given = shown(base + "/?task=t")
    assert "came out" not in given
    assert "of the rollouts that pass the filter" in given
    assert "no clear difference" in given


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/?min=abc&task=t0", "got 'abc', expected a number"),
        ("/?where=rewrd+%3E+1&by=group&task=t0", "did you mean 'reward'"),
    ],
)
def test_a_faulty_filter_shows_its_error_and_no_numbers(serve: Serve, tmp_path: Path, address: str, said: str):
    """What was typed stays in its boxes; there is no count, no table and no command."""
    status, page = get(serve(*runs(tmp_path)) + address)
    assert status == 200
    assert said in unescape(page)
    assert 'value="t0"' in page
    assert "abc" in page or "rewrd &gt; 1" in page
    for absent in ('class="facts"', "<table", "gymdata filter /", "data-copy", 'class="group"'):
        assert absent not in page


def test_one_group_is_no_groups(serve: Serve, tmp_path: Path):
    """Counts of one have no plural."""
    page = shown(serve(write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(20, 40))])) + "/")
    assert "1 rollout 1 group 1 mean reward" in page


def test_a_generation_that_was_cut_off_is_the_cause_of_its_break(serve: Serve, tmp_path: Path):
    """The headline says that its end is missing, and, where it ended at the token limit, that it did."""
    tokenizer = ROOT / "sample_data" / "policy"
    base = serve(BROKEN, tokenizer=tokenizer)
    page = shown(f"{base}/break?id=8945e08efb4714d03534b8d76250e722&turn=1")
    assert "the end of what the model wrote was cut off" in page
    assert "no known cause" not in page
    assert "token limit" not in page
    row = rollout("t", 0, 1.0, [([1, 20], [10, 11, 2]), ([1, 20, 10, 99, 2, 30], [40, 2])])
    row["turns"][0]["finish_reason"] = "length"
    page = shown(serve(write_run(tmp_path / "run", [row])) + "/break?id=t-0&turn=1")
    assert "turn 0 had ended at its token limit" in page


def test_errors_of_statements_are_about_the_statement(serve: Serve, tmp_path: Path):
    """The page gives no advice about flags or arguments, but a name that was meant."""
    base = serve(*runs(tmp_path))

    def problem(text: str) -> str:
        page = get(f"{base}/sql?{urllib.parse.urlencode({'q': text})}")[1]
        found = re.search(r'class="problem"[^>]*>(.*?)</div>', page, re.DOTALL)
        assert found is not None
        return unescape(found[1])

    beyond = "SELECT * FROM read_text('/etc/passwd')"
    for text in ("DROP TABLE rollouts", "SELECT 1; SELECT 2", beyond, "SELECT rewrd FROM rollouts"):
        assert not re.search(r"-o |query only|query takes|given after|available views", problem(text)), text
    assert "did you mean 'reward'" in problem("SELECT rewrd FROM rollouts")
    assert "got '2 statements', expected one SELECT" in problem("SELECT 1; SELECT 2")


def test_a_long_statement_is_answered(serve: Serve, tmp_path: Path):
    """An address of 200 kB, as a long list of ids makes it, is read whole."""
    base = serve(*runs(tmp_path))
    many = ", ".join(f"'{n:032x}'" for n in range(4_000))
    text = f"SELECT count(*) AS n FROM rollouts WHERE rollout_id NOT IN ({many})"
    status, page = get(f"{base}/sql?{urllib.parse.urlencode({'q': text})}")
    assert status == 200
    assert re.findall(r"<td[^>]*>([^<]*)</td>", page) == ["12"]


def test_values_stand_with_their_counts_and_lead_to_their_rollouts(serve: Serve, tmp_path: Path) -> None:
    """Status and the fields that divide tasks into a few kinds, with mean rewards; of a selection; what all have alike is
    not listed, but for the kind of task that other conditions leave."""
    rows = [
        rollout(f"t{t}", k, float(t > 0), two_turns(20 + t, 40), status="completed" if k else "truncated")
        | {"task": json.dumps({"level": "hard" if t < 2 else "easy", "answer": str(t), "same": 1})}
        for t in range(8)
        for k in range(2)
    ]
    url = serve(write_run(tmp_path / "run", rows))
    text = shown(url)
    assert "status completed 8 mean 0.875 truncated 8 mean 0.875" in text
    assert "task.level easy 12 mean 1 hard 4 mean 0.5" in text
    assert "task.answer" not in text
    assert "task.same" not in text
    hard = shown(url + "/?" + urllib.parse.urlencode({"where": "task.level == 'hard'"}))
    assert "status completed 2 mean 0.5 truncated 2 mean 0.5" in hard
    assert "task.level" not in hard.partition("By rollout")[0].partition("task.level ==")[2]
    failed = shown(url + "/?" + urllib.parse.urlencode({"where": "reward == 0"}))
    assert "task.level hard 2 By rollout" in failed


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_agents_and_errors_stand_with_their_counts(serve: Serve, tmp_path: Path, suffix: str) -> None:
    """Programs by run, the agents of the calls, and what failed before a rollout or in its rewards; each value leads to a
    condition of ``gymdata filter``, which keeps the same rollouts."""
    paths = []
    for name in ("claude-code", "opencode"):
        rows = [
            rollout(f"{name}-t{t}", 0, 1.0, two_turns(20 + t, 40), run_id=name, rollout_id=f"{name}-{t}")
            for t in range(4)
        ]
        for t, row in enumerate(rows):
            row["turns"][0]["agent"], row["turns"][1]["agent"] = "main", "side-1" if t == 3 else "main"
        run = write_run(tmp_path / name, rows, suffix)
        facts = json.loads((run / "run.json").read_text()) | {"run_id": name, "config": {"agent": name}}
        (run / "run.json").write_text(json.dumps(facts))
        faults = [("engine", "turn 1", 0), ("reward", "reward exact", 0), ("environment", "environment start", 1)]
        lines = [json.dumps({"kind": k, "place": p, "rollout_id": f"{name}-{t}"}) + "\n" for k, p, t in faults]
        (run / "failures.jsonl").write_text("".join(lines))
        paths.append(run)
    url = serve(*paths)
    text = shown(url)
    assert "agent claude-code 4 mean 1 opencode 4 mean 1 agents main 6 mean 1 main, side-1 2 mean 1" in text
    assert "errors engine, reward exact 2 mean 1 environment 2 mean 1" in text
    links = re.findall(r'<dd><a href="([^"]*)">\s*(\S[^<]*) <b>(\d)</b>', get(url)[1])
    for name, label, count in (
        ("agent", "opencode", "4"),
        ("agents", "main, side-1", "2"),
        ("errors", "environment", "2"),
    ):
        address = next(unescape(href) for href, of, n in links if (of, n) == (label, count))
        assert f"{count} rollouts of 8" in shown(url + address), name
        (where,) = urllib.parse.parse_qs(urllib.parse.urlsplit(address).query)["where"]
        summary = gymdata.filter(paths, output=tmp_path / f"kept-{name}", where=[where])
        assert summary.rollouts_out == int(count)
    assert gymdata.filter(paths, output=tmp_path / "fine", where=["errors is null"]).rollouts_out == 4
