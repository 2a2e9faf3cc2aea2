"""What a selection says of itself: mixed groups, several runs, and input that is wrong."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.checks.violations import BREAKS, CODES
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import BROKEN, Open, words

SAMPLES = Path(__file__).parents[2] / "sample_data"
FAULTY = {
    "T206": "3d3ca74d586f0eea4ffd9720f6a55325",
    "L301": "48f2517180d15e197f9ae50c988b2f14",
    "L302": "abfb07f8d28859abe4758eadd7c7a87c",
    "L303": "31153b082b8368625b373a4aa067eb62",
    "M404": "13a10fd0749ee6a88c8d738523d63fa0",
    "R502": "1ea68989b4c1fcd776ac4e71f74e123e",
    "S102": "8c43893f86cd8917ff220a05d1f4e891",
}


def listed(page: str) -> list[str]:
    """The tasks of a list's rows."""
    return re.findall(r'<td class="task"><a[^>]*>(\w+)<', page)


@pytest.fixture
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


def leveled(tasks: int, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Rollouts of tasks whose fields differ: each is one of some values, in turn."""
    return [
        rollout(f"t{t}", 0, float(t % 3), two_turns(20, 40))
        | {"task": json.dumps({name: values[t % len(values)] for name, values in columns.items()})}
        for t in range(tasks)
    ]


def test_the_text_box_searches_tool_calls(site: Open, tmp_path: Path):
    """A call before the answer is found by its name and by its arguments, and stands in the row, marked."""
    rows = [rollout(f"t{k}", 0, 1.0, two_turns(k, 40), text=str(190 * 16)) for k in range(2)]
    call = {"function": {"name": "calculate", "arguments": {"expression": "190*16"}}}
    rows[1]["messages"][1]["tool_calls"] = json.dumps([call])
    pages = site(write_run(tmp_path / "run", rows))
    for text in ("190*16", "calculate"):
        page = pages.page("/", text=text)
        assert listed(page) == ["t1"]
        assert f"<mark>{text}</mark>" in page


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_list_shows_prompt_answer_and_reference(site: Open, tmp_path: Path, suffix: str):
    """Each in a line; a tool call where the policy wrote none, and the reference where it is not the answer. The boxes of
    texts and of conditions find both, the first without the meaning that marks have in patterns."""
    call = '[{"function": {"name": "add", "arguments": {"a": 2}}}]'
    asked = (("a", "What is\n2*3?", "6", "6"), ("b", "What is 233?", "5", "7"), ("c", "Hm", None, "1"))
    rows = []
    for task, prompt, answer, reference in asked:
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer, "tool_calls": None if answer else call, "turn": 0},
        ]
        row = rollout(task, 0, 1.0, [([1, 5], [10, 2])], messages=messages)
        rows.append(row | {"task": json.dumps({"answer": reference})})
    pages = site(write_run(tmp_path / "run", rows, suffix))
    text = pages.says("/")
    for line in ("What is 2*3? 6 1", "What is 233? 5 expected 7", 'Hm → add({"a": 2}) expected 1'):
        assert line in text
    text = pages.says("/rollout", id="b-0")
    assert "expected 7" in text
    assert '{"answer": "7"}' in text
    for box, value, tasks in (
        ("text", "2*3", ["a"]),
        ("where", "text LIKE '%5%'", ["b"]),
        ("where", "contains(prompt, 'is')", ["a", "b"]),
    ):
        assert listed(pages.page("/", **{box: value})) == tasks


def test_columns_are_chosen_and_stand_in_the_address(site: Open, tmp_path: Path):
    """The list has the columns that the address names, fields of tasks, too; a filter keeps them."""
    pages = site(write_run(tmp_path / "run", leveled(8, {"level": ("easy", "hard")})))
    page = pages.page("/", columns="reward,id,task.level,nothing", text="question t1")
    heads = [words(head).strip() for head in re.findall(r"<th [^>]*>(.*?)</th>", page)]
    assert heads == ["Task", "#", "Reward", "Id", "task.level"]
    assert "<td>hard</td>" in page
    assert 'name="columns" value="reward,id,task.level"' in page
    assert 'columns=reward%2Cid"' in page
    assert "<mark>question t1</mark>" in pages.page("/", text="question t1")


def test_an_unknown_column_or_order_of_an_address_is_named(site: Open, tmp_path: Path):
    """The list is there without it, and the page says what it could have been; counts of one have no plural."""
    pages = site(write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(20, 40))]))
    text = pages.says("/", columns="prompt,anwser", sort="rewrd")
    assert "columns: got 'anwser', expected one of prompt, answer" in text
    assert "sort: got 'rewrd', expected one of reward, task_id" in text
    assert "did you mean 'reward'?" in text
    assert "question t" in text
    assert "1 rollout 1 group 1 mean reward" in text


def test_rows_groups_and_rollouts_of_several_runs_name_their_run(site: Open, runs: list[Path]):
    """A task that both runs have stands twice, told apart by the column run; a view of one run has no such column."""
    pages = site(*runs)
    column = re.findall(r'<td class="run"[^>]*>(\w+)<', pages.page("/", task="t0"))
    assert column == ["before", "before", "after", "after"]
    assert "run after" in pages.says("/rollout", id="after-0-0")
    assert "run after" in pages.says("/group", id="after-0")
    groups = pages.says("/", task="t0", by="group")
    assert "t0 before" in groups
    assert "t0 after" in groups
    assert 'class="run"' not in site(runs[0]).page("/")


def test_a_groups_mark_and_mean_are_of_all_its_rollouts(site: Open, runs: list[Path]):
    """With reward == 0 a mixed group stays mixed, with its mean, and says how many of its rollouts are shown."""
    text = site(runs[0]).says("/", by="group", where="reward == 0")
    assert text.count("1 of 2 shown mean 0.5") == 2
    assert "2 mixed" in text
    assert "all equal" not in text


def test_a_rollout_that_fails_validation_says_its_code(site: Open):
    """Its page has the code, its meaning and its explanation."""
    pages = site(SAMPLES / "rollouts" / "broken.jsonl")
    for code, rollout_id in FAULTY.items():
        text = pages.says("/rollout", id=rollout_id)
        assert code in text
        assert CODES[code].meaning in text
        assert " ".join(CODES[code].explanation.replace("`", " ").split()) in text


def test_the_faults_of_a_page_are_those_of_validate(site: Open):
    """Each rollout has the codes of the errors that ``gymdata validate`` finds in it; breaks have lines of their own."""
    path = SAMPLES / "rollouts" / "broken.jsonl"
    pages, codes = site(path), dict[str, set[str]]()
    for violation in gymdata.validate(path).violations:
        if violation.severity == "error" and violation.code not in BREAKS:
            codes.setdefault(str(violation.rollout_id), set()).add(violation.code)
    for rollout_id in gymdata.load_rollouts(path, ["rollout_id"])["rollout_id"].to_pylist():
        shown = re.findall(r'class="breaknote error"><summary><b>(\w+)<', pages.page("/rollout", id=rollout_id))
        assert set(shown) == codes.get(rollout_id, set()), rollout_id


def test_mixed_groups_are_listed_as_groups_and_chosen_once(site: Open, runs: list[Path]):
    """The count of mixed groups leads to these groups; there it leads nowhere again."""
    pages = site(*runs)
    link = re.search(r'href="([^"]*)"[^>]*>3 mixed', pages.page("/", where="n_turns > 0"))
    assert link is not None
    page = pages.page(unescape(link[1]))
    assert page.count('<details class="group"') == 3
    assert "all equal" not in page
    assert page.count("min_reward &lt; max_reward") == page.count("n_turns &gt; 0&#39;")
    assert "3 mixed</a>" not in page


def test_several_runs_have_their_own_counts(site: Open, runs: list[Path]):
    """Rollouts, groups, mixed groups and breaks of each run."""
    text = site(*runs).says("/")
    assert "before 6 3 2 0 0.6667 first" in text
    assert "after 6 3 1 0 0.8333 +0.167" in text


def test_a_comparison_of_what_came_out_says_so(site: Open, runs: list[Path]):
    """Under a filter by reward the difference is not called better or worse; under one by task it still is."""
    pages = site(*runs)
    by_reward = pages.says("/", min=1)
    assert "The filter selects by what came out (reward)" in by_reward
    assert not re.search(r"better|worse|no clear difference", by_reward)
    by_task = pages.says("/", task="t")
    assert "came out" not in by_task
    assert "of the rollouts that pass the filter" in by_task
    assert "no clear difference" in by_task


@pytest.mark.parametrize(
    ("query", "typed", "error"),
    [
        ({"min": "abc"}, "abc", "got 'abc', expected a number"),
        ({"where": "rewrd > 1", "by": "group"}, "rewrd > 1", 'Candidate bindings: "reward"'),
    ],
    ids=["number", "column"],
)
def test_a_faulty_filter_shows_its_error_and_no_numbers(
    site: Open, runs: list[Path], query: dict[str, str], typed: str, error: str
):
    """What was typed stays in its boxes; there is no count, no table and no command."""
    answer = site(*runs).get("/", task="t0", **query)
    assert answer.status_code == 200
    assert error in unescape(answer.text)
    assert 'value="t0"' in answer.text
    assert typed in unescape(answer.text)
    for absent in ('class="facts"', "<table", "gymdata filter /", "data-copy", 'class="group"'):
        assert absent not in answer.text


def test_a_generation_that_was_cut_off_is_the_cause_of_its_break(site: Open, tmp_path: Path):
    """The headline says that its end is missing, and, where it ended at the token limit, that it did."""
    pages = site(SAMPLES / "rollouts" / "broken.jsonl", tokenizer=SAMPLES / "policy")
    text = pages.says("/break", id="8945e08efb4714d03534b8d76250e722", turn=1)
    assert "the end of what the model wrote was cut off" in text
    assert "no known cause" not in text
    assert "token limit" not in text
    row = rollout("t", 0, 1.0, BROKEN)
    row["turns"][0]["finish_reason"] = "length"
    text = site(write_run(tmp_path / "run", [row])).says("/break", id="t-0", turn=1)
    assert "turn 0 had ended at its token limit" in text


def test_values_stand_with_their_counts_and_lead_to_their_rollouts(site: Open, tmp_path: Path) -> None:
    """The fields that divide tasks into a few kinds, with mean rewards; of a selection; what all have alike is not listed,
    but for the kind of task that other conditions leave."""
    rows = [
        rollout(f"t{t}", k, float(t > 0), two_turns(20 + t, 40))
        | {"task": json.dumps({"level": "hard" if t < 2 else "easy", "answer": str(t), "same": 1})}
        for t in range(8)
        for k in range(2)
    ]
    pages = site(write_run(tmp_path / "run", rows))
    text = pages.says("/")
    assert "task.level easy 12 mean 1 hard 4 mean 0.5" in text
    assert "task.answer" not in text
    assert "task.same" not in text
    hard = pages.says("/", where="task.level == 'hard'")
    assert "task.level" not in hard.partition("By rollout")[0].partition("task.level ==")[2]
    assert "task.level hard 2 By rollout" in pages.says("/", where="reward == 0")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_filter_by_agents_and_errors_keeps_what_the_command_keeps(site: Open, tmp_path: Path, suffix: str) -> None:
    """The agents of the calls, and what failed before a rollout or in its rewards, as ``gymdata filter`` knows them."""
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
    pages = site(*paths)
    for where, count in (
        ("agents == 'main, side-1'", 2),
        ("errors == 'engine, reward exact'", 2),
        ("errors == 'environment'", 2),
        ("errors is null", 4),
    ):
        assert f"{count} rollouts of 8" in pages.says("/", where=where)
        assert gymdata.filter(paths, write=False, where=[where]).rollouts_out == count
