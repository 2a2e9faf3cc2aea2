"""``gymdata eval`` with a scripted engine at the port: its figures are counted by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.collect.report import CollectPlan
from gymdata.commands.collect.setup import Parts
from gymdata.commands.eval.run import EvalReport, evaluate
from gymdata.commands.eval.settings import evaluation_of
from gymdata.commands.record.agent import load_agent
from gymdata.errors import DataError, UsageError
from gymdata.store import write_run_json
from tests.collect.fake_parts import FakeSampler, engine_fault, parts
from tests.record.scripted_engine import Letters
from tests.rollout_files import rollout, two_turns, write_run

#: Four tasks of each level; the answer is the task's number.
TASKS = [
    {"task_id": f"{level}-{n}", "prompt": f"{level} {n}", "answer": str(n), "level": level}
    for level in ("easy", "hard")
    for n in range(4)
]


def knows(*right: str) -> Any:
    """A policy that answers these prompts rightly, and 9 to all others."""

    def answer(prompt: Sequence[int], _: random.Random) -> str:
        text = bytes(i for i in prompt if i < 256).decode()
        return text[-1] if text in right else "9"

    return answer


def evaluated(output: Path, policy: Any, **settings: Any) -> EvalReport:
    scored = parts(FakeSampler(policy), rewards=["numeric"])
    report = evaluate(None, TASKS, reward="numeric", parts=scored, output=output, seed=1, **settings)
    assert isinstance(report, EvalReport)
    return report


def test_pass_at_1_is_the_share_of_tasks_that_are_right_with_wilsons_interval(tmp_path: Path) -> None:
    """3 of 8 tasks."""
    report = evaluated(tmp_path / "run", knows("easy 0", "easy 1", "hard 2"))
    assert report.pass_at_k == [
        {"k": 1, "value": 0.375, "ci95": pytest.approx([0.1368, 0.6943], abs=1e-4), "tasks": 8, "too_few": 0}
    ]
    assert (report.tasks, report.rollouts, report.missing, report.exit_code) == (8, 8, 0, 0)


def test_results_are_split_by_the_fields_of_tasks(tmp_path: Path) -> None:
    """Each value of a field with few values has its own rate; --by names others, and one that no task has is refused with
    the nearest."""
    report = evaluated(tmp_path / "run", knows("easy 0", "easy 1", "easy 2", "hard 2"))
    rates = {one["value"]: (one["pass_at_1"], one["tasks"]) for one in report.by_field["level"]}
    assert rates == {"easy": (0.75, 4), "hard": (0.25, 4)}
    by_answer = evaluated(tmp_path / "run", knows(), by=["answer"]).by_field
    assert {one["value"]: one["pass_at_1"] for one in by_answer["answer"]} == {"0": 0.5, "1": 0.5, "2": 1.0, "3": 0.0}
    with pytest.raises(UsageError, match="unknown key 'levle'") as refused:
        evaluated(tmp_path / "run", knows(), by=["levle"])
    assert "level" in str(refused.value.hint)


def test_an_earlier_run_shows_what_regressed(tmp_path: Path) -> None:
    """Task by task, and the paired difference; settings of sampling that differ are named beside it, in the rows and in the
    files: it is then not the model's alone. Without a task that moved there is no interval."""
    before = {"temperature": 1.0, "max_tokens": 64, "num_rollouts": 2}
    evaluated(tmp_path / "before", knows("easy 0", "easy 1", "hard 2"), **before)
    right = knows("easy 1", "hard 2", "hard 3")
    report = evaluated(tmp_path / "after", right, against=tmp_path / "before", max_tokens=48)
    assert report.against is not None
    assert report.against["regressed"] == [{"task_id": "easy-0", "before": 1.0, "after": 0.0, "prompt": "easy 0"}]
    assert report.against["improved"] == [{"task_id": "hard-3", "before": 0.0, "after": 1.0, "prompt": "hard 3"}]
    assert (report.against["difference"]["rate"], report.against["difference"]["n"]) == (0.0, 8)
    said = "max_tokens 64 → 48, rollouts per task 2 → 1, temperature 1.0 → 0.0"
    assert dict(report.rows())["  which was sampled otherwise"] == said
    assert f"It was sampled otherwise: {said}." in (tmp_path / "after" / "results.md").read_text()
    written = json.loads((tmp_path / "after" / "results.json").read_text())["against"]
    assert written["sampling"]["temperature"] == [1.0, 0.0]
    equal = evaluated(tmp_path / "again", right, against=tmp_path / "after", max_tokens=48)
    assert dict(equal.rows())[f"against {tmp_path / 'after'}"] == "37.5 % → 37.5 %, all 8 tasks equal"
    assert equal.against is not None
    assert equal.against["sampling"] == {}


def test_the_evaluation_of_a_trained_model_is_sampled_and_scored_as_its_data(tmp_path: Path) -> None:
    """Through the pairs between; runs of two environments, or none that is known, leave it to the user."""
    config = {"env": ["calculator.py:Calculator"], "env_args": {"digits": 3}, "reward": ["numeric"], "max_tokens": 48}
    for name, changed in (("one", {}), ("other", {"env": ["tools.py:Other"]})):
        (tmp_path / name).mkdir()
        facts = {"stage": "collect", "run_id": name, "config": config | changed}
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    for name, runs in (("pairs", ["one"]), ("mixed", ["one", "other"])):
        (tmp_path / name).mkdir()
        facts = {"stage": "pairs", "run_id": name, "parents": [{"path": str(tmp_path / run)} for run in runs]}
        (tmp_path / name / "run.json").write_text(json.dumps(facts))
    assert evaluation_of("runs/pol", str(tmp_path / "pairs")) == (
        "eval runs/pol TASKS --env calculator.py:Calculator --reward numeric --max-tokens 48 "
        """--set 'env_args={"digits": 3}'"""
    )
    unknown = "eval runs/pol TASKS --reward REWARD"
    assert [evaluation_of("runs/pol", str(tmp_path / name)) for name in ("mixed", "chat.jsonl")] == [unknown, unknown]


def test_pass_at_k_is_unbiased_over_several_rollouts(tmp_path: Path) -> None:
    """Of n rollouts with c right: 1 − C(n−c, k) / C(n, k), averaged over tasks."""
    report = evaluated(tmp_path / "run", lambda _, rng: rng.choice("0123"), num_rollouts=4, temperature=1.0)
    rewards = gymdata.open(tmp_path / "run").lazy().group_by("task_id").agg(c="reward").collect()["c"].to_list()
    at_2 = [1 - (4 - sum(r)) * (3 - sum(r)) / 12 for r in rewards]
    assert [one["k"] for one in report.pass_at_k] == [1, 2, 4]
    assert report.pass_at_k[1]["value"] == pytest.approx(sum(at_2) / 8)
    assert report.pass_at_k[2]["value"] == pytest.approx(sum(any(r) for r in rewards) / 8)


def test_rollouts_of_an_evaluation_are_training_data(tmp_path: Path) -> None:
    """An ordinary run, greedy by default: validate is clean, and the same command again samples nothing."""
    sampler = FakeSampler(knows("easy 0"))
    for _ in range(2):
        settings: dict[str, Any] = {"reward": "numeric", "output": tmp_path / "run"}
        evaluate(None, TASKS, parts=parts(sampler, rewards=["numeric"]), **settings)
    assert len(sampler.requests) == 8
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["stage"], facts["identity"]["temperature"]) == ("collect", 0.0)
    assert gymdata.validate(tmp_path / "run", ignore=["B"]).errors == 0


def test_results_are_written_as_an_object_and_as_a_table(tmp_path: Path) -> None:
    """results.json has the figures of the report, results.md says them in Markdown."""
    evaluated(tmp_path / "before", knows("easy 0"))
    report = evaluated(tmp_path / "run", knows("easy 1"), against=tmp_path / "before")
    written = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {key: written[key] for key in ("pass_at_k", "by_field", "against")} == {
        "pass_at_k": report.pass_at_k, "by_field": report.by_field, "against": report.against,
    }  # fmt: skip
    named = {name: value for name, value in report.rows() if name.startswith("results")}
    assert named == {f"results, {kind}": tmp_path / "run" / f"results.{kind}" for kind in ("json", "md")}
    text = (tmp_path / "run" / "results.md").read_text()
    assert "| pass@1 | 12.5 % |" in text
    assert "| easy | 25.0 % |" in text
    assert "12.5 % → 12.5 %, +0.0 points" in text
    assert "sampled otherwise" not in text
    assert "| easy-0 | 1 | 0 | easy 0 |" in text


def test_figures_of_a_part_are_written_nowhere(tmp_path: Path) -> None:
    """Failed rollouts are missing, not wrong: exit code 1, no results, and the figures are of those that are there."""

    def fails(request: Any) -> Any:
        if bytes(i for i in request.prompt_token_ids if i < 256) == b"hard 3":
            raise engine_fault()
        return none()

    async def none() -> None: ...

    failing = parts(FakeSampler(knows("easy 0"), before=fails), rewards=["numeric"])
    report = evaluate(None, TASKS, reward="numeric", parts=failing, output=tmp_path / "run", max_attempts=2)
    assert isinstance(report, EvalReport)
    assert (report.missing, report.rollouts, report.exit_code, report.files) == (1, 7, 1, [])
    assert not (tmp_path / "run" / "results.json").exists()
    assert report.pass_at_k[0]["value"] == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reward": None}, "nothing scores the rollouts"),
        ({"num_rollouts": 4}, "which are all the same when sampling is greedy"),
        ({"against": "nowhere"}, "nowhere"),
        ({"temperatur": 1}, "unknown key 'temperatur'"),
    ],
)
def test_what_cannot_be_an_evaluation_is_refused_before_a_sample(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """No reward, several greedy rollouts, an earlier run that is none, a setting that is misspelt."""
    sampler = FakeSampler()
    with pytest.raises((UsageError, DataError), match=said):
        evaluate(None, TASKS, **{"reward": "numeric", "parts": parts(sampler), "output": tmp_path / "run", **settings})
    assert sampler.requests == []
    assert not (tmp_path / "run").exists()


AGENT = """
import json, urllib.request

def solve(task, base_url, api_key):
    body = {"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]}
    headers = {"content-type": "application/json", "authorization": "Bearer " + api_key}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return {"reward": float(answer == task["answer"])}
"""


def test_an_agent_s_function_may_score(tmp_path: Path) -> None:
    """Without a reward of the run; a command scores nothing."""
    (tmp_path / "agent.py").write_text(AGENT)
    spec, fake = f"{tmp_path}/agent.py:solve", {"policy": "fake", "policy_hash": "fake-0"}
    played = Parts(FakeSampler(knows("easy 0", "hard 2")), Letters(), None, [], fake, agent=load_agent(spec))
    report = evaluate(None, TASKS, agent=spec, parts=played, output=tmp_path / "run", seed=1)
    assert isinstance(report, EvalReport)
    assert (report.pass_at_k[0]["value"], report.missing) == (0.25, 0)
    with pytest.raises(UsageError, match="nothing scores the rollouts"):
        evaluate(None, TASKS, agent="true {prompt}", parts=played, output=tmp_path / "other")


def test_a_dry_run_says_what_would_be_sampled(tmp_path: Path) -> None:
    """And writes nothing."""
    plan = evaluate(None, TASKS, reward="numeric", parts=parts(), output=tmp_path / "run", dry_run=True)
    assert isinstance(plan, CollectPlan)
    assert (plan.rollouts_wanted, (tmp_path / "run").exists()) == (8, False)


@pytest.mark.parametrize("way", ["rollouts", "pairs", "grandparent", "other"])
def test_tasks_that_the_model_was_trained_on_are_counted(way: str, tmp_path: Path) -> None:
    """By their content, through pairs and the models behind the model, whatever the system said; in the rows, in both
    files and in the report."""
    rows = [
        rollout(f"row-{n}", i, float(i), two_turns(5 + n, 40 + i), messages=[
            {"role": "system", "content": "Count."}, {"role": "user", "content": prompt},
            {"role": "assistant", "content": str(i), "turn": 0}])
        for n, prompt in enumerate(["elsewhere"] if way == "other" else ["easy 0", "hard 3", "elsewhere"]) for i in range(2)
    ]  # fmt: skip
    source = write_run(tmp_path / "data", rows)
    if way == "pairs":
        gymdata.pairs(source, output=tmp_path / "pairs")
        source = tmp_path / "pairs" / "pairs.parquet"
    write_run_json(tmp_path / "model", {"stage": "train-dpo" if way == "pairs" else "train-sft",
                                        "parents": [{"path": str(source)}, {"path": str(tmp_path / "base")}]})  # fmt: skip
    write_run_json(tmp_path / "child", {"stage": "train-sft", "parents": [{"path": str(tmp_path / "model")}]})
    model = tmp_path / ("child" if way == "grandparent" else "model")
    scored = parts(FakeSampler(knows("easy 0")), rewards=["numeric"])
    report = evaluate(model, TASKS, reward="numeric", parts=scored, output=tmp_path / "run", seed=1)
    assert isinstance(report, EvalReport)
    sentence = "2 of 8 tasks are in the training data of this model"
    texts = [str(dict(report.rows()).get("trained on")), (tmp_path / "run" / "results.md").read_text(),
             str(gymdata.report(tmp_path / "run", write=False).figures["headline"])]  # fmt: skip
    assert [sentence in text for text in texts] == [way != "other"] * 3
    assert json.loads((tmp_path / "run" / "results.json").read_text())["trained_tasks"] == (0 if way == "other" else 2)
