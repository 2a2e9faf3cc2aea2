"""``gymdata judge`` against a real judge server: tables, accounting, resuming, and what the judge is shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.judge.groups import final_answer, response_transcript, transcript
from gymdata.commands.judge.prompt import DEFAULT_PROMPT, Prompt
from gymdata.commands.judge.run import judge as run_judge
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.rollouts.schema import COMPARISONS, SCORES
from gymdata.store import read_run_json, read_table
from gymdata.store.reading import reading
from tests.judge_server import Behaviour, judge_server
from tests.rollout_files import rollout, two_turns, write_run, write_table


@pytest.fixture
def judge():
    """A judge's behaviour, and its URL."""
    behaviour = Behaviour()
    with judge_server(behaviour) as url:
        yield behaviour, url


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups of three and one of one; qualities 1, 5, 2 in the first group, 3, 3, 4 in the second."""
    rows = [
        rollout(task, index, 0.0, two_turns(1, 40 + index), text=f"q={q} says {task}{index}")
        for task, qualities in (("a", (1, 5, 2)), ("b", (3, 3, 4)), ("c", (1,)))
        for index, q in enumerate(qualities)
    ]
    return write_run(tmp_path / "run", rows)


def judged(run: Path, url: str, **settings):
    quick = {"genrm_parse_retry_sleep_s": 0.0, "retry_pause": 0.0, "model": "judge", "endpoint": url}
    return run_judge(path=str(run), **{**quick, **settings})


def test_every_two_are_judged_in_both_positions(judge, run):
    """Comparisons and rewards lie beside the rollouts, with what the judge said, and the counts add up."""
    summary = judged(run, judge[1])
    table = read_table(run / "judge-judge", COMPARISONS)
    assert table.num_rows == 12 == sum(summary.comparisons.values())
    assert summary.comparisons["judged"] == 12
    assert summary.groups_of_one == 1
    first = table.to_pylist()[0]
    assert "score_1" in first["raw"]
    assert json.loads(first["usage"]) == {"prompt_tokens": 10, "completion_tokens": 5}
    scores = read_table(run / "judge-judge", SCORES)
    got = dict(zip(scores["rollout_id"].to_pylist(), scores["value"].to_pylist(), strict=True))
    assert got == {"a-0": 1, "a-1": 5, "a-2": 2, "b-0": 3, "b-1": 3, "b-2": 4}
    assert set(scores["name"].to_pylist()) == {"judge"}
    facts = read_run_json(run / "judge-judge")
    assert facts["bias"]["position_inconsistency"] == {
        "rate": 0,
        "count": 0,
        "n": 6,
        "ci95": pytest.approx([0, 0.39], abs=0.01),
    }
    assert facts["parents"][0]["run_id"] == "run-1"
    assert read_table(run).num_rows == 7


def test_a_second_run_asks_nothing(judge, run):
    """Everything is kept: the same tables, no request, and none for another aggregation either."""
    behaviour, url = judge
    judged(run, url)
    before = read_table(run / "judge-judge", COMPARISONS)
    asked = len(behaviour.requests)
    summary = judged(run, url)
    assert (summary.asked, summary.cached) == (0, 12)
    assert read_table(run / "judge-judge", COMPARISONS).equals(before)
    again = run_judge(path=str(run), aggregate_only=True, aggregator_method="bradley_terry")
    assert again.aggregator == "bradley_terry"
    assert again.bias["ties"] == summary.bias["ties"]
    values = read_table(run / "judge-judge", SCORES)["value"].to_pylist()
    assert values[1] > values[2] > values[0]
    assert len(behaviour.requests) == asked


def test_stopping_at_any_moment_repays_nothing(judge, run):
    """The judge goes away after some requests; the next run asks only for the rest."""
    behaviour, url = judge
    behaviour.poisoned = {"q=4 says b2": "400"}
    first = judged(run, url, concurrency=2, constrain="off")
    assert first.comparisons["refused"] == 4
    assert first.unscored == 1
    assert first.exit_code == 1
    behaviour.poisoned, before = {}, len(behaviour.requests)
    second = judged(run, url, constrain="off")
    assert (second.asked, second.cached, second.exit_code) == (4, 8, 0)
    assert len(behaviour.requests) - before == 4


def test_a_masked_rollout_is_not_compared(judge, tmp_path):
    """Its writer took it back: the others have the scores that they have without it."""
    rows = [rollout("a", n, 0.0, two_turns(1, 40 + n), text=f"q={q} says {n}") for n, q in enumerate((1, 5, 2))]
    rows[1] |= {"reward": None, "extra": json.dumps({"failure": {"kind": "masked", "reason": "mask_sample"}})}
    summary = judged(write_run(tmp_path / "run", rows), judge[1])
    assert sum(summary.comparisons.values()) == 2
    scores = read_table(tmp_path / "run" / "judge-judge", SCORES)
    assert scores["rollout_id"].to_pylist() == ["a-0", "a-2"]


def test_a_rollout_that_is_there_twice_is_refused(judge, run, tmp_path):
    """It would be compared with itself, and paid for."""
    behaviour, url = judge
    part = next((run / "rollouts").glob("*.parquet"))
    for name in ("a", "b"):
        shutil.copy(part, tmp_path / f"{name}.parquet")
    with pytest.raises(RefusedError, match="D701"):
        judged(tmp_path / "*.parquet", url, output=tmp_path / "out")
    assert behaviour.requests == []


def test_a_conversation_that_a_prompt_cannot_show_is_refused_alone(judge, run, tmp_path):
    """The comparisons of the other groups are judged."""
    _, url = judge
    prompt = tmp_path / "prompt.jinja"
    prompt.write_text(
        "{{ conversation[0].content }}{% if 'question b' in conversation[0].content %}{{ none.x }}{% endif %} asks\n\n"
        "# Response 1\n{{ response_1 }}\n\n# Response 2\n{{ response_2 }}\n\nWhich?\n"
    )
    summary = judged(run, url, judge_prompt=prompt)
    assert {status: n for status, n in summary.comparisons.items() if n} == {"judged": 6, "refused": 6}
    rows = read_table(run / "judge-judge", COMPARISONS).to_pylist()
    assert {(row["task_id"], row["status"]) for row in rows} == {("a", "judged"), ("b", "refused")}


def test_equal_answers_are_judged_one_by_one(judge, tmp_path):
    """Two comparisons with equal texts are two judgements, and both are found again."""
    behaviour, url = judge
    rows = [rollout("a", n, 0.0, two_turns(1, 40), text="q=2") for n in range(3)]
    run = write_run(tmp_path / "same", rows)
    assert judged(run, url).asked == 6
    assert behaviour.asked == {("q=2", "q=2"): 6}
    assert judged(run, url).cached == 6


def test_unparsed_answers_are_kept_and_asked_again_only_on_request(judge, run):
    """What was paid for is not paid for again, unless --retry-unparsed says so."""
    behaviour, url = judge
    behaviour.always = "prose"
    first = judged(run, url, genrm_parse_retries=1)
    assert (first.comparisons["unparsed"], first.asked, first.scored) == (12, 24, 0)
    raw = read_table(run / "judge-judge", COMPARISONS)["raw"].to_pylist()
    assert set(raw) == {"Both are fine, I like the first."}
    behaviour.always = None
    assert judged(run, url, genrm_parse_retries=1).asked == 0
    again = judged(run, url, genrm_parse_retries=1, retry_unparsed=True)
    assert (again.asked, again.comparisons["judged"]) == (12, 12)


@pytest.mark.parametrize("always", ["cut", "open think", "reasoning apart", "beside a call"])
def test_a_draft_in_an_unfinished_answer_is_unparsed(judge, run, always):
    """An answer cut by length, in reasoning never closed or given apart, or beside a call of a tool, has no verdict."""
    behaviour, url = judge
    behaviour.always = always
    summary = judged(run, url, genrm_parse_retries=0)
    assert (summary.comparisons["unparsed"], summary.scored) == (12, 0)


@pytest.mark.parametrize(("verdicts", "expected"), [("last", (1.0, 5.0, 6.0)), ("published", (5.0, 1.0, 1.0))])
def test_verdicts_says_which_object_of_an_answer_counts(judge, run, verdicts, expected):
    """By default the last, under `published` the first in a fence; a folder holds verdicts of one kind."""
    behaviour, url = judge
    behaviour.always = "draft"
    judged(run, url, verdicts=verdicts)
    rows = read_table(run / "judge-judge", COMPARISONS).to_pylist()
    assert {(row["score_1"], row["score_2"], row["ranking"]) for row in rows} == {expected}
    with pytest.raises(StoreError, match="verdicts"):
        judged(run, url, verdicts="published" if verdicts == "last" else "last")


@pytest.mark.parametrize("verdicts", ["last", "published"])
def test_answers_with_one_verdict_give_the_same_numbers_under_both_rules(judge, run, verdicts):
    """The published numbers do not depend on which rule reads the verdicts."""
    judged(run, judge[1], verdicts=verdicts)
    assert read_table(run / "judge-judge", SCORES)["value"].to_pylist() == [1, 5, 2, 3, 3, 4]


def test_retries_are_sampled_afresh(judge, run):
    """Each try has a seed of its own, and a run repeated elsewhere has the same seeds."""
    behaviour, url = judge
    behaviour.always = "prose"
    judged(run, url, limit=1, comparison_strategy="all_pairs")
    seeds = [body["seed"] for body in behaviour.requests]
    assert len(set(seeds)) == len(seeds) == 12
    judged(run, url, limit=1, comparison_strategy="all_pairs", output=run / "again")
    assert sorted(body["seed"] for body in behaviour.requests[12:]) == sorted(seeds)
    # What is asked again on request is another sample, too.
    judged(run, url, limit=1, comparison_strategy="all_pairs", retry_unparsed=True)
    assert len({body["seed"] for body in behaviour.requests}) == 24


def test_other_settings_are_refused_in_the_same_place(judge, run):
    """Comparisons by another schedule would be mixed up with those that are there."""
    judged(run, judge[1])
    with pytest.raises(StoreError, match="comparison_strategy"):
        judged(run, judge[1], comparison_strategy="circular")
    summary = judged(run, judge[1], comparison_strategy="circular", overwrite=True)
    assert sum(summary.comparisons.values()) == 6
    assert summary.asked == 0


def test_bias_is_seen(judge, run):
    """A judge that favours the first position flips with the order."""
    behaviour, url = judge
    behaviour.first_position_bias = 2.0
    report = judged(run, url).bias
    assert report["position_inconsistency"]["count"] == 4
    assert report["position_bias"]["rate"] > 0.5


def test_what_the_judge_sees_of_a_rollout(judge, run):
    """The conversation before the policy's first word; then the final answer, or the transcript."""
    behaviour, url = judge
    judged(run, url, limit=1, principle="be right")
    shown = behaviour.requests[0]["messages"]
    assert [m["role"] for m in shown] == ["user", "principle", "response_1", "response_2"]
    assert shown[0]["content"] == "question a"
    assert shown[2]["content"].startswith("q=")
    judged(run, url, limit=1, show="transcript", name="whole")
    text = behaviour.requests[-1]["messages"][1]["content"]
    assert text.startswith("calling\n\n[tool]\n42\n\nq=")


def test_final_answers_and_transcripts():
    """A rollout that ends with a tool has no answer; calls are shown, reasoning is not; items of the Responses API with the
    same content are the same text."""
    call = json.dumps([{"function": {"name": "add", "arguments": {"a": 1}}}])
    messages = [
        {"role": "assistant", "content": "Let me see.", "reasoning": "secret", "tool_calls": call},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    assert final_answer(messages[:2]) == ""
    assert final_answer(messages) == "It is 2."
    shown = 'Let me see.\n[calls add {"a": 1}]\n\n[tool add]\n2\n\nIt is 2.'
    assert transcript(messages) == shown
    assert transcript([{**messages[0], "content": None}]) == '[calls add {"a": 1}]'
    items = [
        {"type": "reasoning", "summary": [{"text": "secret"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "message", "content": "It is 2."},
    ]
    assert response_transcript({"output": items}) == shown


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ([{"type": "function_call", "name": "add", "arguments": "{"}], '[calls add "{"]'),
        ([{"type": "function_call_output", "call_id": ["?"], "output": "2"}], "[tool]\n2"),
        ("text", ""),
        (None, ""),
    ],
)
def test_a_response_that_is_odd_has_a_transcript(output, shown):
    """Arguments that are no JSON, a result without its call, and no items at all."""
    assert response_transcript({"output": output}) == shown


def test_an_ordinary_model_is_asked_by_a_prompt(judge, run):
    """The default prompt shows both responses once; what they say is never read as a template."""
    behaviour, url = judge
    summary = judged(run, url, judge_prompt="default")
    assert summary.scored == 6
    assert [m["role"] for m in behaviour.requests[0]["messages"]] == ["user"]
    one, two = "{{ response_2 }}{% raw %}", "{% include 'x' %} {{ 7 * 7 }}"
    text = Prompt(DEFAULT_PROMPT).messages([{"role": "user", "content": "{{ principle }}"}], one, two, None)[0][
        "content"
    ]
    assert one in text
    assert two in text
    assert "{{ principle }}" in text


def test_a_prompt_that_hides_a_response_is_refused(tmp_path):
    """A template must show both; an unknown variable or a syntax error is named."""
    with pytest.raises(UsageError, match="response_2"):
        Prompt("{{ response_1 }}")
    with pytest.raises(DataError, match="nonsense"):
        Prompt("{{ response_1 }}{{ response_2 }}{{ nonsense }}")
    with pytest.raises(DataError, match="Jinja"):
        Prompt("{{ response_1 ")
    with pytest.raises(DataError, match="no such file"):
        Prompt.load(tmp_path / "missing.jinja")


def test_length_weights_in_judge_count_an_empty_answer_as_long(judge, tmp_path):
    """Ours: an empty answer is not rewarded for its length; the judge sees it as None."""
    behaviour, url = judge
    rows = [rollout("a", n, 0.0, two_turns(1, 40), text=text) for n, text in enumerate(["", "q=3", "q=3 and more"])]
    run = write_run(tmp_path / "empty", rows)
    judged(run, url, group_answer_length_penalty_coeff=1.0)
    assert ("None", "q=3") in behaviour.asked
    values = read_table(run / "judge-judge", SCORES)["value"].to_numpy()
    np.testing.assert_allclose(values, [3 - 1 / 3, 3 + 2 / 3, 3 - 1 / 3], atol=1e-9)


@pytest.mark.filterwarnings("ignore::gymdata.store.reading.DataWarning")
@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("status", "bogus", r"line 3, field 'status': got 'bogus', expected one of judged"),
        ("rollout_j", "a-0", r"line 3, field 'rollout_j': got 'a-0', which is rollout_i as well"),
        ("rollout_j", "b-1", r"line 3, field 'rollout_j': got 'b-1', which is of another group than 'a-0'"),
    ],
)
def test_comparisons_that_no_judge_makes_are_refused(judge, run, column, value, told):
    """A comparison with itself, across groups or with an unknown status is refused with its row wherever it is used."""
    judged(run, judge[1])
    file = run / "judge-judge" / "comparisons.parquet"
    rows = read_table(file, COMPARISONS).to_pylist()
    rows[2] |= {"rollout_i": "a-0", "rollout_j": "a-1", column: value}
    write_table(pa.Table.from_pylist(rows, schema=COMPARISONS.schema), file, COMPARISONS)
    with reading(allow_changed=True):
        with pytest.raises(DataError, match=rf"comparisons\.parquet, {told}"):
            run_judge(path=str(run), aggregate_only=True)
        with pytest.raises(DataError, match=rf"comparisons\.parquet, {told}"):
            gymdata.pairs(run, source="comparisons", write=False)
        rows[2] |= {"status": "judged", "rollout_j": "of another run"}
        write_table(pa.Table.from_pylist(rows, schema=COMPARISONS.schema), file, COMPARISONS)
        assert run_judge(path=str(run), aggregate_only=True).scored == 6
