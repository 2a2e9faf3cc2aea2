"""Rollouts that arrive one by one at /verify: cohorts, deadlines, repeats, many at once."""

from __future__ import annotations

import asyncio
import json
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata import genrm
from gymdata.commands.judge.pairwise import Candidate, Comparison, PairwiseJudge
from gymdata.commands.judge.port import JudgeAnswer
from gymdata.commands.judge.serve.cohorts import Cohorts, Member
from gymdata.commands.judge.serve.group_judge import GroupJudge
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache, VerdictLog
from gymdata.genrm.matches import Matches
from gymdata.genrm.schedule import Match
from gymdata.rollouts.schema import COMPARISONS
from gymdata.store import read_table
from gymdata.workers.serving import Refused
from tests.judge.serve.conftest import verify_all, verify_body
from tests.judge_server import verdict

# --- cohorts ------------------------------------------------------------------------------------------------------


def test_each_member_gets_its_own_reward(judge, serve):
    """A cohort is judged when its last member is there; the answer repeats the request and adds the reward."""
    server = serve("--num-rollouts-per-prompt", "4")
    bodies = [verify_body(f"q={n}", group_id="g", rollout_id=n, extra={"kept": n}) for n in (1, 2, 4, 5)]
    answers = verify_all(server, bodies)
    assert [b["reward"] for _, b in answers] == [1, 2, 4, 5]
    assert answers[2][1] == {**bodies[2], "reward": 4.0, "judge_failed": False}


def test_a_single_rollout_gets_the_default_score(serve):
    """One rollout a prompt cannot be compared."""
    assert serve("--num-rollouts-per-prompt", "1").post("/verify", verify_body("a"))[1]["reward"] == 3.0


def test_a_member_that_never_arrives_ends_the_cohort(judge, serve):
    """At the deadline those who wait are told how many came; the judge is not asked; a late member waits its own time."""
    behaviour, _ = judge
    server = serve("--num-rollouts-per-prompt", "3", "--cohort-timeout", "0.4")
    ids = [{"group_id": "g", "rollout_id": n} for n in range(3)]
    for status, body in verify_all(server, [verify_body(f"q={n}", **ids[n]) for n in (0, 1)]):
        assert (status, body["kind"]) == (503, "cohort_incomplete")
        assert "2 of 3" in body["detail"]
    assert server.post("/verify", verify_body("q=2", **ids[2]))[1]["detail"].startswith("1 of 3")
    assert behaviour.requests == []
    assert server.figure("cohorts_expired_total") == 2
    # All three again, in time: nothing of the ended cohort stands in the way.
    answers = verify_all(server, [verify_body(f"q={n + 1}", **ids[n]) for n in range(3)])
    assert [b["reward"] for _, b in answers] == [1, 2, 3]


def test_a_repeated_member_is_not_a_second_one(judge, serve):
    """With ids, a request sent twice joins its first; sent after the end, it gets the same answer; other content is 409."""
    behaviour, _ = judge
    server = serve("--num-rollouts-per-prompt", "2")
    twice = verify_body("q=1", group_id="g", rollout_id="a")
    last = verify_body("q=5", group_id="g", rollout_id="b")
    answers = verify_all(server, [twice, twice, twice, last])
    assert [(s, b["reward"]) for s, b in answers] == [(200, 1.0)] * 3 + [(200, 5.0)]
    asked = len(behaviour.requests)
    assert server.post("/verify", last)[1]["reward"] == 5.0
    assert len(behaviour.requests) == asked
    status, body = server.post("/verify", verify_body("q=4", group_id="g", rollout_id="b"))
    assert (status, body["kind"]) == (409, "conflict")
    # Another attempt is another cohort.
    again = [verify_body(f"q={q}", group_id="g", attempt=1, rollout_id=r) for q, r in ((2, "a"), (4, "b"))]
    assert [b["reward"] for _, b in verify_all(server, again)] == [2, 4]


def test_a_seventeenth_of_sixteen_opens_another_cohort(judge, serve):
    """Sixteen are answered among themselves; the extra one waits for its own cohort and is told when nobody comes."""
    server = serve("--cohort-timeout", "3")
    bodies = [verify_body(f"q={1 + n % 5}", group_id="g", rollout_id=n) for n in range(17)]
    answers = verify_all(server, bodies)
    assert sorted(status for status, _ in answers) == [200] * 16 + [503]
    late = next(body for status, body in answers if status == 503)
    assert late["detail"].startswith("1 of 16")
    for n, (status, body) in enumerate(answers):
        assert status == 503 or body["reward"] == 1 + n % 5


def test_prompts_tasks_and_principles_keep_cohorts_apart(judge, serve):
    """As published: task index and prompt, else prompt id and prompt, else prompt; so one id never joins two prompts."""
    server = serve("--num-rollouts-per-prompt", "2")
    kinds = [
        {"prompt": "p1", "_ng_task_index": 0},
        {"prompt": "p1", "_ng_task_index": 1},
        {"prompt": "p1", "prompt_id": "a"},
        {"prompt": "p2", "prompt_id": "a"},
        {"prompt": "p2"},
        {"prompt": "p2", "principle": "x"},
        {"prompt": "p1", "group_id": "g"},
        {"prompt": "p2", "group_id": "g"},
    ]
    bodies = [verify_body(f"q={q} of {n}", **kind) for q in (1, 5) for n, kind in enumerate(kinds)]
    answers = verify_all(server, bodies)
    assert [b["reward"] for _, b in answers] == [1] * 8 + [5] * 8
    assert answers[0][1] == {**bodies[0], "reward": 1.0, "judge_failed": False}


def test_members_that_name_no_group_are_told_apart_by_task_and_index(judge, serve):
    """Two responses of one task and prompt meet, whatever else they bring; an index sent again with the same response joins
    the first, with another it is another member; without any id the same body twice is two members."""
    server = serve("--num-rollouts-per-prompt", "2")
    first = verify_body("q=1", _ng_task_index=3, prompt_id="a", _ng_rollout_index=0)
    second = verify_body("q=5", task_index=3, prompt_id="b", _ng_rollout_index=1)
    # The order of a prompt's keys says nothing.
    second["responses_create_params"] = {"input": [{"type": "message", "content": "q", "role": "user"}]}
    assert [b["reward"] for _, b in verify_all(server, [first, first, first, second])] == [1, 1, 1, 5]
    # The next epoch has the same indices, and other responses.
    epoch = [verify_body(f"q={q}", _ng_task_index=3, _ng_rollout_index=0) for q in (2, 4)]
    assert [b["reward"] for _, b in verify_all(server, epoch)] == [2, 4]
    assert [b["reward"] for _, b in verify_all(server, [verify_body("q=4"), verify_body("q=4")])] == [4, 4]


def test_a_member_left_without_a_reward_can_ask_again(judge, serve):
    """Its repetition asks only for what failed; the others keep their answers."""
    behaviour, _ = judge
    behaviour.poisoned = {"q=5": "500"}
    flags = ("--num-rollouts-per-prompt", "3", "--comparison-strategy", "all_pairs", "--set", "retries=0")
    server = serve(*flags)
    bodies = [verify_body(f"q={q}", group_id="g", rollout_id=q) for q in (1, 2, 5)]
    answers = verify_all(server, bodies)
    assert [s for s, _ in answers] == [200, 200, 503]
    behaviour.poisoned, before = {}, len(behaviour.requests)
    status, body = server.post("/verify", bodies[2])
    assert (status, body["reward"]) == (200, 5.0)
    assert len(behaviour.requests) - before == 2


class Answering:
    """A judge in this process, which gives ``text``."""

    def __init__(self, text: str) -> None:
        self.text, self.identity, self.default_concurrency = text, {"model": "m"}, 4

    async def start(self) -> dict[str, Any]:
        return {}

    async def compare(self, *_: Any) -> JudgeAnswer:
        return JudgeAnswer(self.text)

    async def close(self) -> None: ...


def group_judge_of(judge: Answering, log: VerdictLog) -> GroupJudge:
    config = ServeConfig(genrm="m", genrm_parse_retries=0, comparison_strategy="all_pairs")
    pairwise = PairwiseJudge(config, judge, VerdictCache(None), retry_unparsed=True, stop_when_gone=False)
    return GroupJudge(config, pairwise, log)


def member_of(rollout_id: str) -> Member:
    conversation = [{"role": "user", "content": "q"}]
    own = Comparison("r", "g", "t", conversation, [Candidate(rollout_id, 0, f"answer {rollout_id}")])
    return Member("key", own, ("g", "0", rollout_id))


def rows_in(file: Path) -> list[Any]:
    """The rollouts of each comparison, and what came of it."""
    names = ("rollout_i", "rollout_j", "status", "score_1", "score_2", "ranking")
    return [tuple(json.loads(line)[name] for name in names) for line in file.read_text().splitlines()]


def test_comparisons_say_what_a_reward_came_of(tmp_path: Path) -> None:
    """A comparison that is judged when a member asks again is there with its verdict, which decided the reward."""
    judge, log = Answering("nothing"), VerdictLog(tmp_path / "c.jsonl", "comparison_id")
    cohorts = Cohorts(2, 60.0, group_judge_of(judge, log).judge, VerdictCache(None))

    async def ask() -> list[Any]:
        first = await asyncio.gather(*(cohorts.join(member_of(name)) for name in "ab"), return_exceptions=True)
        judge.text = verdict("q=5", "q=1")
        return [*map(type, first), await cohorts.join(member_of("a"))]

    assert asyncio.run(ask()) == [Refused, Refused, 5.0]
    assert rows_in(tmp_path / "c.jsonl") == [("a", "b", "judged", 5.0, 1.0, 1.0)]


def test_a_groups_next_cohort_is_another_after_a_restart(tmp_path: Path) -> None:
    """Its comparisons are kept beside those of the first."""

    async def ask(names: str) -> None:
        log, answers = VerdictLog(tmp_path / "c.jsonl", "comparison_id"), VerdictCache(tmp_path / "answers.journal")
        cohorts = Cohorts(2, 60.0, group_judge_of(Answering(verdict("q=5", "q=1")), log).judge, answers)
        await asyncio.gather(*(cohorts.join(member_of(name)) for name in names))
        log.close()
        answers.close()

    for names in ("ab", "cd"):
        asyncio.run(ask(names))
    assert rows_in(tmp_path / "c.jsonl") == [("a", "b", "judged", 5.0, 1.0, 1.0), ("c", "d", "judged", 5.0, 1.0, 1.0)]


# --- many at once --------------------------------------------------------------------------------------------------


def expected_rewards(texts: list[str]) -> np.ndarray:
    """What an honest judge's circle adds up to."""
    rows = [(Match(i, j), genrm.parse_last(verdict(texts[i], texts[j]))) for i, j in genrm.circular(len(texts))]
    return genrm.simple_tiebreaker(Matches.of(rows), len(texts)).reward


@pytest.mark.full
@pytest.mark.timeout(300)
def test_two_hundred_cohorts_interleaved(judge, serve, tmp_path):
    """Every reward rests on every comparison that was made; nothing is lost, doubled or mixed up."""
    behaviour, _ = judge
    behaviour.latency, behaviour.first_position_bias = 0.02, 0.0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    draw = random.Random(0)
    groups = {f"g{g}": [f"q={draw.randint(10, 50) / 10} r{n} of g{g}" for n in range(16)] for g in range(200)}
    bodies = [
        verify_body(text, prompt=f"prompt {g}", group_id=g, rollout_id=n)
        for g, texts in groups.items()
        for n, text in enumerate(texts)
    ]
    draw.shuffle(bodies)
    server = serve("-c", "256")
    answers = verify_all(server, bodies)
    assert {status for status, _ in answers} == {200}
    got = {(b["group_id"], b["rollout_id"]): b["reward"] for _, b in answers}
    for g, texts in groups.items():
        np.testing.assert_allclose([got[g, n] for n in range(16)], expected_rewards(texts), rtol=0, atol=1e-9)
    assert len(behaviour.requests) == 3200
    table = read_table(tmp_path / "online", COMPARISONS)
    assert table.num_rows == 3200
    assert len(set(table["comparison_id"].to_pylist())) == 3200
    assert server.figure("cohorts_completed_total") == 200
