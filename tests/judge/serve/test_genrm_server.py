"""The compare server over HTTP: the worked numbers, a judge that misbehaves in every way, and the command."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gymdata import genrm
from gymdata.cli.main import main
from gymdata.commands.judge.groups import matches_in
from gymdata.rollouts.schema import COMPARISONS
from gymdata.store import read_run_json, read_table
from tests.forks import Forks
from tests.judge.serve.conftest import (
    Server,
    compare,
    members_waiting,
    one_server,
    post_all,
    response,
    say,
    until,
    verify_all,
    verify_body,
)
from tests.judge_server import SAID, TRANSPORT, Behaviour, judge_server

# --- the worked numbers -------------------------------------------------------------------------------------------


LENGTH = ("--group-answer-length-penalty-coeff", "0.05")
PUBLISHED = ("--verdicts", "published")


@pytest.mark.parametrize(
    ("flags", "rewards"),
    [((), [1.0, 4.5]), (LENGTH, [1.025, 4.475]), (PUBLISHED, [1.0, 4.5])],
    ids=["plain", "length", "published"],
)
def test_the_worked_case_comes_out_of_compare(judge, serve, flags, rewards):
    """Rewards, also with a length coefficient, their metrics, and the published shape of everything; the same by either
    rule of reading verdicts."""
    behaviour, _ = judge
    behaviour.table = {("a", "bbb"): say(1, 5, 6), ("bbb", "a"): say(4, 1, 1)}
    server = serve(*flags)
    status, body = compare(server, "a", "bbb")
    assert status == 200
    np.testing.assert_allclose(body["rewards"], rewards, rtol=0, atol=1e-9)
    assert body["metrics"] == pytest.approx(
        {"mean_individual_score": 2.75, "std_individual_score": 1.7853571071357126, "tiebreak_usage_rate": 0.0},
        abs=1e-9,
    )
    assert body["comparison_results"] == [
        {"response_i": 0, "response_j": 1, "judge_idx": 0, "score_1": 1.0, "score_2": 5.0, "ranking": 6.0},
        {"response_i": 1, "response_j": 0, "judge_idx": 0, "score_1": 4.0, "score_2": 1.0, "ranking": 1.0},
    ]
    roles = [m["role"] for m in behaviour.requests[0]["messages"]]
    assert roles == ["user", "response_1", "response_2"]


def test_the_servers_table_holds_the_scores_that_it_paid_from(judge, serve, tmp_path):
    """Both scores and the ranking of each comparison, in its positions; aggregated again they are the same rewards."""
    judge[0].table = {("a", "bbb"): say(1, 5, 6), ("bbb", "a"): say(4, 1, 1)}
    server = serve("--num-rollouts-per-prompt", "2")
    answers = verify_all(server, [verify_body(text, group_id="g", rollout_id=text) for text in ("a", "bbb")])
    paid = [body["reward"] for _, body in answers]
    assert paid == [1.0, 4.5]
    table = read_table(tmp_path / "online", COMPARISONS)
    shown = ("rollout_i", "rollout_j", "score_1", "score_2", "ranking")
    rows = {tuple(row[name] for name in shown) for row in table.to_pylist()}
    assert rows == {("a", "bbb", 1.0, 5.0, 6.0), ("bbb", "a", 4.0, 1.0, 1.0)}
    assert genrm.aggregate(matches_in(table, {"a": 0, "bbb": 1}), 2).reward.tolist() == paid


@pytest.mark.parametrize(("flags", "rewards"), [((), [1.0, 5.0]), (PUBLISHED, [5.0, 1.0])], ids=["last", "published"])
def test_a_draft_is_not_the_verdict_of_the_server_either(judge, serve, flags, rewards):
    """The last object of an answer counts; `--verdicts published` takes the first in a fence."""
    judge[0].always = "draft"
    assert compare(serve("--comparison-strategy", "all_pairs", *flags), "a", "b")[1]["rewards"] == rewards


def test_what_the_judge_is_shown(judge, serve):
    """With --use-principle a given one is a message of its own; a blank answer is shown as None; parts reach the judge."""
    behaviour, _ = judge
    parts = [{"role": "user", "content": [{"type": "input_text", "text": text} for text in ("see ", "this")]}]
    body = {"conversation_history": parts, "response_objs": [response(" "), response("b")], "principle": "be brief"}
    assert serve("--use-principle").post("/compare", body)[0] == 200
    assert behaviour.requests[0]["messages"] == [
        {"role": "user", "content": "see this"},
        {"role": "principle", "content": "be brief"},
        {"role": "response_1", "content": "None"},
        {"role": "response_2", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("flags", "shown"), [((), [None, None]), (("--principle", "be kind"), ["be brief", "be kind"])]
)
def test_no_principle_is_shown_unless_the_server_is_to_show_one(judge, serve, flags, shown):
    """As published: a request's principle is not shown by default; with --principle it is, before the server's own."""
    behaviour, _ = judge
    server = serve(*flags)
    compare(server, "q=1", "q=2", principle="be brief")
    compare(server, "q=1 q", "q=2 q")
    by_role = [{m["role"]: m["content"] for m in request["messages"]} for request in behaviour.requests[::2]]
    assert [roles.get("principle") for roles in by_role] == shown


def test_transcripts_reach_the_judge_on_request(judge, serve):
    """--show transcript: calls and their results are shown with the answer."""
    behaviour, _ = judge
    call = {"type": "function_call", "name": "add", "arguments": '{"a": 1}'}
    used = {"output": [call, {"type": "function_call_output", "output": "2"}, *response("It is 2.")["output"]]}
    body = {"conversation_history": "How much?", "response_objs": [used, response("b")]}
    assert serve("--show", "transcript").post("/compare", body)[0] == 200
    # Both orders are requested at once, and either may arrive first.
    shown = {request["messages"][1]["content"] for request in behaviour.requests}
    assert '[calls add {"a": 1}]\n\n[tool add]\n2\n\nIt is 2.' in shown


def test_one_response_cannot_be_compared(serve):
    """One gets the default score, none an empty list; a body that is no request is refused with 422."""
    server = serve()
    assert compare(server, "a")[1]["rewards"] == [3.0]
    assert compare(server)[1]["rewards"] == []
    assert server.post("/compare", {"response_objs": "x"})[0] == 422


# --- a judge that misbehaves --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def impatient(processes: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Behaviour, Server]]:
    """A judge's behaviour and one server on it, which soon gives up."""
    flags = ["--request-timeout", "0.5", "--set", "retries=2", "--genrm-parse-retries", "1"]
    with one_server(processes, tmp_path_factory.mktemp("impatient"), *flags) as judge_and_server:
        yield judge_and_server


@pytest.mark.matrix("500", "hang", "garbage")
@pytest.mark.parametrize("fault", [*SAID, *TRANSPORT, "400"])
def test_a_judge_that_never_judges_is_an_answer_with_a_reason(impatient: tuple[Behaviour, Server], fault: str):
    """503 with the reason; every comparison is among the failures; no failure is a score or a row with numbers."""
    behaviour, server = impatient
    texts = [f"q={quality} always {fault}" for quality in (1, 5, 2)]
    expected = "unparsed" if fault in SAID else "refused" if fault == "400" else "failed"
    figure = f'comparisons_total{{status="{expected}"}}'
    behaviour.always, before = fault, server.figure(figure)
    status, body = compare(server, *texts)
    assert status == 503
    assert body["kind"] == "judge_failed"
    assert body["rewards"] == [None] * 3
    assert body["comparison_results"] == []
    assert len(body["failures"]) == 3
    assert {f["status"] for f in body["failures"]} == {expected}
    assert all(f["reason"] for f in body["failures"])
    assert server.figure(figure) - before == 3
    # The judge recovers: the same question is judged then.
    behaviour.always = None
    status, body = compare(server, *texts)
    assert (status, body["rewards"], body["failures"]) == (200, [1, 5, 2], [])


@pytest.mark.parametrize("fault", [*SAID, *TRANSPORT])
def test_a_passing_fault_leaves_no_trace_in_the_rewards(impatient: tuple[Behaviour, Server], fault: str):
    """The judge fails once a comparison and is asked again."""
    behaviour, server = impatient
    behaviour.faults, before = [fault] * 2, len(behaviour.requests)
    status, body = compare(server, f"q=1 {fault}", f"q=5 {fault}")
    assert (status, body["rewards"], body["failures"]) == (200, [1, 5], [])
    assert len(behaviour.requests) - before == 4


def test_retry_after_is_waited_for(judge, serve):
    """No request comes earlier than the judge asked for."""
    behaviour, _ = judge
    behaviour.faults, behaviour.retry_after = ["429"], "1"
    loop = asyncio.new_event_loop()
    began = loop.time()
    assert compare(serve(), "q=1", "q=5")[0] == 200
    assert loop.time() - began >= 1
    loop.close()


def test_a_missing_comparison_is_left_out_of_the_means(judge, serve):
    """One comparison fails: the others count, and the response that only it spoke of has none."""
    behaviour, _ = judge
    behaviour.poisoned = {"q=5 bad": "prose"}
    server = serve("--comparison-strategy", "all_pairs", "--genrm-parse-retries", "0")
    status, body = compare(server, "q=1", "q=2", "q=5 bad")
    assert status == 503
    assert body["rewards"] == [1, 2, None]
    assert len(body["comparison_results"]) + len(body["failures"]) == 3
    assert "no reward for response 2" in body["detail"]


def test_the_published_answer_to_a_failed_judge_is_marked(judge, serve):
    """--on-judge-failure default-score: the default score, and judge_failed."""
    behaviour, _ = judge
    behaviour.always = "prose"
    server = serve(
        "--on-judge-failure", "default-score", "--num-rollouts-per-prompt", "2", "--genrm-parse-retries", "0"
    )
    status, body = compare(server, "q=1", "q=5")
    assert (status, body["rewards"], body["judge_failed"]) == (200, [3.0, 3.0], True)
    answers = verify_all(server, [verify_body("q=1"), verify_body("q=5")])
    assert [(s, b["reward"], b["judge_failed"]) for s, b in answers] == [(200, 3.0, True)] * 2


def test_a_judge_without_schemas_is_asked_without(judge, serve):
    """Constrained output is asked for until the endpoint refuses it."""
    behaviour, _ = judge
    behaviour.refuse_schema = True
    server = serve("-c", "1")
    assert compare(server, "q=1", "q=5")[1]["rewards"] == [1, 5]
    assert ["response_format" in body for body in behaviour.requests] == [True, False, False]


# --- the command ---------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What the command says as it ends with exit code 2."""
    assert main(["serve-genrm", *flags]) == 2
    return capsys.readouterr().err


def test_without_an_output_nothing_is_kept_on_disk(judge, serve, tmp_path):
    """It says so at the start, judges all the same, and leaves the current folder as it was."""
    server = serve("--num-rollouts-per-prompt", "2", kept=False)
    assert "keeping nothing on disk (-o FOLDER keeps" in server.said
    assert compare(server, "q=1", "q=5")[1]["rewards"] == [1, 5]
    bodies = [verify_body(f"q={n}", group_id="g", rollout_id=n) for n in (1, 5)]
    assert [b["reward"] for _, b in verify_all(server, bodies)] == [1, 5]
    # As long as it runs, an answer is repeated.
    assert server.post("/verify", bodies[0])[1]["reward"] == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_server(judge, serve, tmp_path, capsys):
    """The second one on the same folder is told who has it."""
    serve()
    flags = ("--endpoint", judge[1], "-m", "x", "--port", "0", "-o", str(tmp_path / "online"))
    assert "another process" in refused(capsys, *flags)


def test_two_judge_servers_share_what_is_asked(judge, serve, tmp_path):
    """One that fails gives its requests to the other and no reward is lost; when it ends, run.json names both."""
    behaviour, url = judge
    broken = Behaviour(always="garbage")
    with judge_server(broken) as other:
        server = serve("--endpoint", other, "--num-rollouts-per-prompt", "2")
        rewards = [compare(server, f"q={n}", f"q={n + 1} {n}")[1]["rewards"] for n in (1, 2, 3)]
        assert rewards == [[1, 2], [2, 3], [3, 4]]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 130
    assert read_run_json(tmp_path / "online")["engine"]["servers"] == [url, other]
    assert len(behaviour.requests) == 6
    assert broken.requests


def test_health_and_metrics_speak_of_what_waits(judge, serve):
    """Open cohorts and waiting members are seen from outside."""
    server = serve("--cohort-timeout", "30")

    async def look() -> dict[str, Any]:
        task = asyncio.ensure_future(post_all(server.url + "/verify", [verify_body("a"), verify_body("b")]))
        await until(lambda: members_waiting(server) == 2)
        health: dict[str, Any] = json.loads(await asyncio.to_thread(server.get, "/health"))
        task.cancel()
        return health

    health = asyncio.run(look())
    assert (health["status"], health["open_cohorts"]) == ("ok", 1)
    assert server.figure("cohorts_open") == 1
    assert server.figure("comparisons_decided_total") == 0
