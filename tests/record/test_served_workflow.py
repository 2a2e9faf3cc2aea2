"""A served workflow through ``collect --agent``: what it samples is recorded, and its answer is a reward or a failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import gymdata
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.record.agent import load_agent
from gymdata.commands.record.returned import result_of
from gymdata.commands.validate.run import validate
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.store import read_run_json, read_table
from gymdata.store.journal import read_failure_file
from tests.collect.fake_parts import FakeSampler, engine_fault
from tests.environments.env_server import FORMS, serving
from tests.record.recorded_agent import collected
from tests.record.workflow_server import AGENT, Workflow

TASKS = [{"task_id": f"t{k}", "prompt": f"q{k}", "answer": str(k % 3)} for k in range(4)]
EVALUATOR = """
class Output:
    def __init__(self, id, score, reasoning):
        self.id, self.score, self.reasoning = id, score, reasoning

class Length:
    async def evaluate_item(self, item):
        return Output(item.id, len(item.output_obj), {})
"""


@pytest.fixture
def workflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workflow]:
    with serving(Workflow()) as up:
        assert isinstance(up, Workflow)
        monkeypatch.setenv("WORKFLOW_URL", f"{up.url}/run")
        yield up


def rows_of(run: Path) -> dict[str, Any]:
    return {row["task_id"]: row for row in read_table(run, ROLLOUTS).to_pylist()}


def failures_of(run: Path) -> list[dict[str, Any]]:
    return read_failure_file(run / "failures.jsonl")


def test_a_rollout_is_what_the_workflow_asked_of_the_model(workflow: Workflow, tmp_path: Path) -> None:
    """Each task's group is recorded with the ids that were sampled, by an address of its own, and scored by the answer; what
    else the answer adds is kept, what it repeats is not; and the run is complete when it is resumed."""
    run, sampler = tmp_path / "run", FakeSampler()
    summary = collected(TASKS, run, sampler, agent=AGENT, num_rollouts=2)
    assert (summary.rollouts, summary.failures, summary.exit_code, len(sampler.requests)) == (8, 0, 0, 8)
    sent = workflow.bodies("/run")
    assert len({body["base_url"] for body in sent}) == len({body["api_key"] for body in sent}) == 8
    assert sorted((body["task_id"], body["answer"], body["rollout_index"]) for body in sent) == sorted(
        (task["task_id"], task["answer"], index) for task in TASKS for index in range(2)
    )
    for row in read_table(run, ROLLOUTS).to_pylist():
        (turn,) = row["turns"]
        assert bytes(i for i in turn["generation_token_ids"] if i < 256).decode() == row["messages"][-1]["content"]
        assert row["reward"] == row["rollout_index"] / 4
        assert row["rewards"] == [{"name": "reported", "value": row["reward"]}]
        left = json.loads(row["extra"])["environment"]
        assert left["steps"] == 7
        assert not {"answer", "reward", "prompt"} & set(left)
    assert validate(run).ok
    assert gymdata.experience(run, output=tmp_path / "e").counts["sequences"] == 8
    assert collected(TASKS, run, sampler, agent=AGENT, num_rollouts=2).new_rollouts == 0


def test_six_verdicts_are_1_scored_2_masked_and_3_failed_attempts(workflow: Workflow, tmp_path: Path) -> None:
    """As of a resource server: the failed ones stay pending, and nothing else scores what the workflow took out."""
    run, tasks = tmp_path / "run", [{"task_id": form, "prompt": form, "form": form} for form in FORMS]
    summary = collected(tasks, run, FakeSampler(), agent=AGENT, reward=["regex:."])
    rows = rows_of(run)
    assert {task: row["reward"] for task, row in rows.items()} == {
        "plain": 2.0,
        "mask_sample": None,
        "instance_config": None,
    }
    assert (rows["mask_sample"]["rewards"], summary.reward["n"]) == ([], 1)
    assert summary.masked == {"masked: mask_sample": 1, "masked: instance_config.mask_sample": 1}
    assert (summary.failures, summary.pending, summary.exit_code) == (3, 3, 1)
    attempts = {attempt["task_id"]: attempt for attempt in failures_of(run)}
    kinds = {"judge_failed": "judge", "transient": "agent", "no_persist": "agent"}
    assert {task: attempt["kind"] for task, attempt in attempts.items()} == kinds
    assert "judge_failed: ClientConnectorError: refused" in attempts["judge_failed"]["message"]
    extra = json.loads(rows["mask_sample"]["extra"])
    assert extra["failure"] == {"kind": "masked", "reason": "mask_sample"}
    assert extra["unscored"] == {"reward": 1.0}


def test_a_workflow_that_does_not_take_the_address_is_refused(workflow: Workflow, tmp_path: Path) -> None:
    """One that asks no model, or the recorder without a session, has no rollout: which one it is of is not guessed."""
    collected([{**TASKS[0], "calls": 0}], tmp_path / "none", FakeSampler(), agent=AGENT)
    (fault,) = failures_of(tmp_path / "none")
    assert fault["message"] == "agent: returned without a model call: its client's base URL is the argument base_url"

    class Fixed(Workflow):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            self.fixed = (await request.json())["base_url"].partition("/s/")[0] + "/v1"
            return await super().handle(request)

    with serving(Fixed()) as fixed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKFLOW_URL", f"{fixed.url}/run")
        collected(TASKS[:1], tmp_path / "fixed", FakeSampler(), agent=AGENT)
    (fault,) = failures_of(tmp_path / "fixed")
    assert (fault["kind"], len(fault["turns"])) == ("agent", 0)
    assert "the request names no session" in fault["message"]


def test_an_engine_that_fails_is_not_the_workflows_fault(workflow: Workflow, tmp_path: Path) -> None:
    """The attempt is the engine's failure, also when the workflow answers with an error."""

    async def out(_: object) -> None:
        raise engine_fault()

    collected(TASKS[:1], tmp_path / "run", FakeSampler(before=out), agent=AGENT)
    assert {(f["kind"], f["message"]) for f in failures_of(tmp_path / "run")} == {("engine", "engine: out of luck")}


def test_a_budget_truncates_a_workflow_that_stumbles_over_it(workflow: Workflow, tmp_path: Path) -> None:
    """``--max-turns`` keeps what was sampled, scored by the run's rewards."""
    collected([{**TASKS[0], "calls": 3}], tmp_path / "run", FakeSampler(), agent=AGENT, max_turns=2, reward=["regex:."])
    row = rows_of(tmp_path / "run")["t0"]
    assert (row["status"], row["stop_reason"], row["n_turns"], row["reward"]) == ("truncated", "max_turns", 2, 1.0)


@pytest.mark.parametrize(
    ("verdict", "path", "reward", "output"),
    [
        ({"value": "It is 3."}, "$.value", 8.0, "It is 3."),
        ({"outputs": [{"text": "no"}, {"text": "yes"}]}, "$.outputs[-1].text", 3.0, "yes"),
        ({"value": {"reward": 4, "output_obj": "ab"}}, "$['value']", 6.0, "ab"),
        ({"score": 0.5, "said": ""}, "$.score", None, None),
    ],
)
def test_the_result_may_stand_inside_the_answer(
    workflow: Workflow, tmp_path: Path, verdict: dict[str, Any], path: str, reward: float | None, output: str | None
) -> None:
    """``result_json_path`` leads to the object, the reward or the text; an evaluator is given the text. The path is of the
    run's identity."""
    (tmp_path / "length.py").write_text(EVALUATOR)
    workflow.verdict, run = verdict, tmp_path / "run"
    settings: dict[str, Any] = {"agent": AGENT, "result_json_path": path, "reward": [f"{tmp_path}/length.py:Length"]}
    assert collected(TASKS[:1], run, FakeSampler(), **settings).exit_code == 0
    row = rows_of(run)["t0"]
    assert row["reward"] == (0.5 + len(row["messages"][-1]["content"]) if reward is None else reward)
    assert json.loads(row["extra"])["environment"].get("output_obj") == output
    gymdata.score(run, reward=settings["reward"], output=tmp_path / "scores")
    parts = {part["name"]: part["value"] for part in row["rewards"]}
    assert read_table(tmp_path / "scores", SCORES)["value"].to_pylist() == [parts["Length"]]
    assert "result_json_path" in read_run_json(run)["identity"]["environment"]


def test_a_place_that_is_not_there_is_named(workflow: Workflow, tmp_path: Path) -> None:
    """It is the workflow's fault; a path to several places, one of a command, and one without an agent are refused."""
    collected(TASKS[:1], tmp_path / "run", FakeSampler(), agent=AGENT, result_json_path="$.value")
    (fault,) = failures_of(tmp_path / "run")
    assert "expected something at $['value'] (result_json_path)" in fault["message"]
    for path in ("$.a[*]", "value", "$..value", "$.a b"):
        with pytest.raises(UsageError, match="result_json_path"):
            load_agent(AGENT, None, path)
    with pytest.raises(UsageError, match="--agent is a command"):
        load_agent("true {prompt}", None, "$.value")
    with pytest.raises(UsageError, match="no effect without agent"):
        CollectConfig.of({"tasks": "-", "result_json_path": "$.value"}, "test")


def test_what_an_answer_repeats_is_no_failure() -> None:
    """A field of the task says nothing of the rollout, and the conversation is the recorder's."""
    sent = {"error": "find the bug", "mask_sample": True}
    result = result_of({**sent, "reward": 1, "messages": [], "response": {"output": []}, "steps": 2}, sent)
    assert (result.reward, result.answer, result.masked) == (1.0, {"steps": 2}, {})
    with pytest.raises(OutsideError, match=r"failed: response.error|boom"):
        result_of({"reward": 1, "response": {"error": "boom"}}, sent)
    final = {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_terminal": True}
    with pytest.raises(OutsideError) as caught:
        result_of(final, sent)
    assert (caught.value.system, caught.value.final) == ("judge", True)
