"""The compare server over HTTP: the worked numbers, a judge that misbehaves in every way, and the command."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.store import read_run_json
from tests.judge.serve.conftest import compare, members_waiting, post_all, response, say, until, verify_all, verify_body
from tests.judge_server import SAID, TRANSPORT, Behaviour, judge_server

# --- the worked numbers -------------------------------------------------------------------------------------------


def test_the_worked_case_comes_out_of_compare(judge, serve):
    """[1.0, 4.5] with its metrics, and the published shape of everything."""
    behaviour, _ = judge
    behaviour.table = {("a", "bbb"): say(1, 5, 6), ("bbb", "a"): say(4, 1, 1)}
    status, body = compare(serve(), "a", "bbb")
    assert status == 200
    np.testing.assert_allclose(body["rewards"], [1.0, 4.5], rtol=0, atol=1e-9)
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


def test_the_length_coefficient_is_that_of_the_flag(judge, serve):
    """[1.025, 4.475] with coefficient 0.05."""
    behaviour, _ = judge
    server = serve("--group-answer-length-penalty-coeff", "0.05")
    behaviour.table = {("a", "bbb"): say(1, 5, 6), ("bbb", "a"): say(4, 1, 1)}
    np.testing.assert_allclose(compare(server, "a", "bbb")[1]["rewards"], [1.025, 4.475], rtol=0, atol=1e-9)


def test_principles_and_blank_answers_reach_the_judge(judge, serve):
    """With --use-principle a given one is a message of its own; a blank answer is shown as None; parts reach the judge."""
    behaviour, _ = judge
    server = serve("--use-principle")
    parts = [
        {"role": "user", "content": [{"type": "input_text", "text": "see "}, {"type": "input_text", "text": "this"}]}
    ]
    body = {"conversation_history": parts, "response_objs": [response(" "), response("b")], "principle": "be brief"}
    assert server.post("/compare", body)[0] == 200
    assert behaviour.requests[0]["messages"] == [
        {"role": "user", "content": "see this"},
        {"role": "principle", "content": "be brief"},
        {"role": "response_1", "content": "None"},
        {"role": "response_2", "content": "b"},
    ]


def test_no_principle_is_shown_unless_the_server_is_to_show_one(judge, serve, tmp_path):
    """As published: a request's principle is not shown by default; with --principle it is, before the server's own."""
    behaviour, _ = judge
    assert compare(serve(), "q=1", "q=2", principle="be brief")[0] == 200
    assert [m["role"] for m in behaviour.requests[0]["messages"]] == ["user", "response_1", "response_2"]
    behaviour.requests.clear()
    server = serve("--principle", "be kind", folder=tmp_path / "other")
    compare(server, "q=1", "q=2", principle="be brief")
    compare(server, "q=1", "q=2")
    assert [r["messages"][1]["content"] for r in behaviour.requests[::2]] == ["be brief", "be kind"]


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


@pytest.mark.matrix("500", "hang", "garbage")
@pytest.mark.parametrize("fault", [*SAID, "500", "429", "hang", "disconnect", "garbage", "no choices", "400"])
def test_a_judge_that_never_judges_is_an_answer_with_a_reason(judge, serve, fault):
    """503 with the reason; every comparison is among the failures; no failure is a score or a row with numbers."""
    behaviour, _ = judge
    behaviour.always = fault
    server = serve("--request-timeout", "0.3", "--set", "retries=2", "--genrm-parse-retries", "1")
    status, body = compare(server, "q=1", "q=5", "q=2")
    assert status == 503
    assert body["kind"] == "judge_failed"
    assert body["rewards"] == [None] * 3
    assert body["comparison_results"] == []
    assert len(body["failures"]) == 3
    expected = "unparsed" if fault in SAID else "refused" if fault == "400" else "failed"
    assert {f["status"] for f in body["failures"]} == {expected}
    assert all(f["reason"] for f in body["failures"])
    assert server.figure(f'comparisons_total{{status="{expected}"}}') == 3
    # The judge recovers: the same question is judged then.
    behaviour.always = None
    status, body = compare(server, "q=1", "q=5", "q=2")
    assert (status, body["rewards"], body["failures"]) == (200, [1, 5, 2], [])


@pytest.mark.parametrize("fault", [*SAID, *TRANSPORT])
def test_a_passing_fault_leaves_no_trace_in_the_rewards(judge, serve, fault):
    """The judge fails once a comparison and is asked again."""
    behaviour, _ = judge
    behaviour.faults = [fault] * 2
    server = serve("--request-timeout", "0.5")
    status, body = compare(server, "q=1", "q=5")
    assert (status, body["rewards"], body["failures"]) == (200, [1, 5], [])
    assert len(behaviour.requests) == 4


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


def run_server(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gymdata.cli", "serve-genrm", *flags], capture_output=True, text=True)


def test_several_workers_are_refused(tmp_path: Path):
    """Members of a cohort would wait for each other in different processes."""
    done = run_server("--endpoint", "http://127.0.0.1:9", "-m", "x", "--workers", "2", "-o", str(tmp_path))
    assert done.returncode == 2
    assert "2 workers" in done.stderr


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


def test_a_folder_has_one_server(judge, serve, tmp_path):
    """The second one on the same folder is told who has it."""
    serve()
    done = run_server("--endpoint", judge[1], "-m", "x", "--port", "0", "-o", str(tmp_path / "online"))
    assert done.returncode == 2
    assert "another process" in done.stderr


def test_two_judge_servers_share_what_is_asked(judge, serve, tmp_path):
    """One that fails gives its requests to the other and no reward is lost; when it ends, run.json says what each did."""
    behaviour, url = judge
    broken = Behaviour(always="garbage")
    with judge_server(broken) as other:
        server = serve("--endpoint", other, "--num-rollouts-per-prompt", "2")
        rewards = [compare(server, f"q={n}", f"q={n + 1} {n}")[1]["rewards"] for n in (1, 2, 3)]
        assert rewards == [[1, 2], [2, 3], [3, 4]]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait() == 130
    servers = {one["url"]: one for one in read_run_json(tmp_path / "online")["engine"]["servers"]}
    assert servers[url]["answers"] == len(behaviour.requests) == 6
    assert servers[other]["faults"] == len(broken.requests) > 0


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
