"""A resource server whose judge is down answers as NeMo Gym's wrapper does; no attempt of it is a rollout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.collect.run import Parts, collect
from gymdata.environments.resource_server import ResourceServer, read_verdict
from gymdata.errors import OutsideError
from gymdata.store import read_failures
from tests.collect.fake_parts import parts
from tests.collect.saved_rows import rows_of
from tests.environments.env_server import FORMS, JUDGE, Server, serving


class Judged(Server):
    """Its verdict on a rollout is the form that the task names; what was sent is echoed, as NeMo Gym does."""

    def good(self, path: str, cookie: str | None, body: Any) -> Any:
        from aiohttp import web

        return (
            web.json_response({**body, **FORMS[body["form"]]})
            if path == "/verify"
            else super().good(path, cookie, body)
        )


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Judged()) as up:
        yield up


def served(server: Server, **settings: Any) -> Parts:
    """A run's parts with that resource server."""
    return replace(parts(**settings), environment=ResourceServer(server.url, pause_s=0.01))


@pytest.fixture
def forms(tmp_path: Path) -> str:
    """A task for each of the forms."""
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"task_id": form, "prompt": form, "form": form}) + "\n" for form in FORMS))
    return str(file)


def test_six_verdicts_are_1_scored_2_masked_and_3_failed_attempts(server: Server, forms: str, tmp_path: Path) -> None:
    """The failed ones stay pending, and the exit code is 1."""
    run = tmp_path / "run"
    summary = collect(tasks=forms, output=run, parts=served(server))
    rows = {row["task_id"]: row for row in rows_of(run)}
    assert {task: row["reward"] for task, row in rows.items()} == {
        "plain": 1,
        "mask_sample": None,
        "instance_config": None,
    }
    assert summary.reward["n"] == 1
    assert summary.masked == {"masked: mask_sample": 1, "masked: instance_config.mask_sample": 1}
    assert (summary.failures, summary.pending, summary.exit_code) == (3, 3, 1)
    attempts = {attempt["task_id"]: attempt for attempt in read_failures(run)}
    kinds = {"judge_failed": "judge", "transient": "environment", "no_persist": "environment"}
    assert {task: attempt["kind"] for task, attempt in attempts.items()} == kinds
    assert "judge_failed: ClientConnectorError: refused" in attempts["judge_failed"]["message"]
    extra = json.loads(rows["mask_sample"]["extra"])
    assert extra["failure"] == {"kind": "masked", "reason": "mask_sample"}
    assert extra["unscored"] == {"reward": 1.0}


def test_an_unreachable_judge_scores_nothing(server: Server, play: Callable[..., Any], tmp_path: Path) -> None:
    """Six rollouts are six failed attempts with what was sampled in them, and no rollout has a reward of 0."""
    server.modes["/verify"], server.answers["down"] = ["down"], json.dumps({"reward": 0.0, **JUDGE})
    summary, rows = play(3, own_parts=served(server), num_rollouts=2)
    assert (rows, summary.reward["n"], summary.failures, summary.exit_code) == ([], 0, 6, 1)
    assert [len(attempt["turns"]) for attempt in read_failures(tmp_path / "run")] == [1] * 6


def test_a_masked_rollout_gets_no_reward_of_another_function(
    server: Server, play: Callable[..., Any], tmp_path: Path
) -> None:
    """A reward function beside the environment does not score what the environment took out."""
    server.modes["/verify"], server.answers["masked"] = ["masked"], json.dumps(FORMS["mask_sample"])
    _, (row,) = play(1, own_parts=served(server, rewards=["regex:."]))
    assert (row["reward"], row["rewards"]) == (None, [])


@pytest.mark.parametrize(("terminal", "again"), [(False, True), (True, False)])
def test_another_attempt_is_made_unless_the_failure_is_terminal(terminal: bool, again: bool) -> None:
    """``_ng_failure_terminal`` makes the error final."""
    with pytest.raises(OutsideError) as caught:
        read_verdict({"reward": 0.0, **JUDGE, "_ng_failure_terminal": terminal}, {}, "http://server/verify")
    assert (caught.value.system, caught.value.retryable, caught.value.final) == ("judge", again, not again)


@pytest.mark.parametrize(
    ("answer", "system"),
    [
        ({"reward": 3.0, "judge_failed": True, "judge_failure": "no verdict in 4 answers"}, "judge"),
        ({"reward": 0.0, "response": {"output": [], "status": "failed"}}, "environment"),
        ({"reward": 0.0, "response": {"output": [], "status": "completed", "error": {"message": "x"}}}, "environment"),
    ],
)
def test_a_default_score_and_a_response_that_failed_are_no_verdict(answer: dict[str, Any], system: str) -> None:
    """As in a row that is imported: the mark of ``serve-genrm``, and what the server writes into the response."""
    with pytest.raises(OutsideError) as caught:
        read_verdict(answer, {"response": {"output": [], "status": "completed"}}, "http://server/verify")
    assert (caught.value.system, caught.value.retryable) == (system, True)


def test_a_field_of_the_task_is_no_verdict() -> None:
    """What a server echoes of the row that it was sent says nothing of the rollout."""
    sent = {"error": "find the bug", "mask_sample": True}
    assert read_verdict({**sent, "reward": 0.5}, sent, "http://server/verify").reward == 0.5
