"""Failures, limits, resuming and stopping, with a deterministic engine at the port."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.collect.run import collect
from gymdata.engines.port import SampleRequest
from gymdata.errors import DataError, OutsideError, RefusedError, StoreError, UsageError
from gymdata.store import Run, read_run_json
from tests.collect.fake_parts import FakeSampler, LetterChat, add_or_answer, engine_fault, parts
from tests.collect.saved_rows import failures_of, rows_of
from tests.servers import Watcher

Play = Callable[..., tuple[Any, list[dict[str, Any]]]]
Tasks = Callable[..., Path]


def dying_after(requests: int) -> Callable[[SampleRequest], Awaitable[None]]:
    """The engine dies at the request after so many."""
    left = iter(range(requests))

    async def before(request: SampleRequest) -> None:
        if next(left, None) is None:
            raise engine_fault("the engine died", fatal=True)

    return before


async def hang(request: SampleRequest) -> None:
    await asyncio.Event().wait()


async def hang_in_the_second_turn(request: SampleRequest) -> None:
    if request.request_id.endswith("-1"):
        await hang(request)


def test_a_failed_turn_keeps_the_turns_before_it(play: Play, tmp_path: Path, adder: str) -> None:
    """An engine error in turn 1 leaves turn 0's ids and log-probs in failures.jsonl, and no rollout."""

    async def fail_second(request: SampleRequest) -> None:
        if request.request_id.endswith("-1"):
            raise engine_fault()

    summary, _ = play(1, FakeSampler(add_or_answer, before=fail_second), env=adder)
    (record,) = failures_of(tmp_path / "run")
    assert (record["kind"], record["place"], record["attempt"]) == ("engine", "turn 1", 1)
    assert len(record["turns"]) == 1
    assert len(record["turns"][0]["generation_log_probs"]) == len(record["turns"][0]["generation_token_ids"]) > 0
    assert (summary.rollouts, summary.failures, summary.pending, summary.exit_code) == (0, 1, 1, 1)


def test_failures_are_pending_until_the_attempts_are_used_up(play: Play, tmp_path: Path) -> None:
    """Each call tries a failed rollout once more; after --max-attempts none is tried; --give-up makes that exit 0."""

    async def fail(request: SampleRequest) -> None:
        if bytes(i for i in request.prompt_token_ids if i < 256).decode() == "q1":
            raise engine_fault()

    pending = []
    for _ in range(3):
        sampler = FakeSampler(before=fail)
        summary, _ = play(3, sampler, max_attempts=2)
        pending.append((summary.pending, summary.exhausted, len(sampler.requests), summary.exit_code))
    assert pending == [(1, 0, 3, 1), (0, 1, 1, 1), (0, 1, 0, 1)]
    assert f"`gymdata query :failures {tmp_path / 'run'}` says why attempts failed" in summary.remarks()
    assert [f["attempt"] for f in failures_of(tmp_path / "run")] == [1, 2]
    assert play(3, max_attempts=2, give_up=True)[0].exit_code == 0
    assert play(3, max_attempts=3)[0].rollouts == 3


def test_a_dead_engine_stops_everything_and_costs_no_attempt(play: Play, tmp_path: Path) -> None:
    """When the engine dies the command ends with the engine's error; what was in flight is pending with no attempt used."""
    sampler = FakeSampler(before=dying_after(5))
    with pytest.raises(OutsideError, match="the engine died") as caught:
        play(50, sampler, max_attempts=1, concurrency=4)
    assert caught.value.exit_code == 3
    assert len(sampler.requests) <= 5 + 4
    assert all(not f["counts"] for f in failures_of(tmp_path / "run"))
    summary, _ = play(50, max_attempts=1)
    assert (summary.rollouts, summary.exit_code) == (50, 0)


def test_a_resumed_run_equals_an_uninterrupted_one(play: Play, tmp_path: Path, adder: str) -> None:
    """Stopped by a dead engine and resumed with more rollouts, the rows are those of one uninterrupted run."""
    settings: dict[str, Any] = {"env": adder, "seed": 4, "run_id": "one"}
    with pytest.raises(OutsideError):
        play(6, FakeSampler(add_or_answer, before=dying_after(17)), num_rollouts=2, **settings)
    assert [output.state for output in gymdata.ls(tmp_path).outputs] == ["interrupted"]
    resumed, fresh = (
        play(6, FakeSampler(add_or_answer), run=run, num_rollouts=3, **settings)[1] for run in ("run", "b")
    )
    assert resumed == fresh
    assert [output.state for output in gymdata.ls(tmp_path).outputs] == ["complete", "complete"]


def test_doing_it_twice_starts_no_engine(play: Play, tmp_path: Path) -> None:
    """The same command again is a no-op with exit code 0, says so, and keeps the seed that was drawn."""
    first, again, sampler = Watcher(), Watcher(), FakeSampler()
    play(2, progress=first)
    seed = read_run_json(tmp_path / "run")["identity"]["seed"]
    summary, _ = play(2, sampler, progress=again)
    assert (sampler.started, summary.new_rollouts, summary.rollouts, summary.exit_code) == (0, 0, 2, 0)
    assert read_run_json(tmp_path / "run")["identity"]["seed"] == seed
    assert first.said == ["starting vLLM with fake …"]
    assert again.said == ["nothing to do; engine not started"]


def test_a_reward_that_raises_is_said_and_stays_a_fault(play: Play, tmp_path: Path) -> None:
    """Exit code 1, a row with count, first message and what to do, and the same when the command is run again."""
    (tmp_path / "my.py").write_text("def boom(**_):\n    raise ValueError('bang')\n")
    for new in (3, 0):
        summary, _ = play(3, rewards=[f"{tmp_path / 'my.py'}:boom", "regex", "numeric"])
        shown = {name: str(value) for name, value in summary.rows()}
        assert (summary.new_rollouts, summary.reward_faults, summary.exit_code) == (new, 3, 1)
        assert shown["reward faults"].startswith("3; first: boom raised ValueError: bang")
        assert "gymdata score" in shown["  what to do"]
        assert shown["regex does not apply"].startswith("3; it needs `--reward regex:PATTERN`")
        assert (summary.parts["numeric"].scored, summary.parts["boom"].failed) == (3, 3)


def test_an_error_that_quotes_half_a_character_is_written(play: Play, tmp_path: Path) -> None:
    """A model cut off inside a character gives a lone surrogate; what a reward says of it must not end the run."""
    (tmp_path / "my.py").write_text("def boom(**_):\n    raise ValueError('got \\ud83d')\n")
    summary, _ = play(2, rewards=[f"{tmp_path / 'my.py'}:boom"])
    assert (summary.rollouts, summary.reward_faults) == (2, 2)
    assert "boom raised ValueError: got ?" in str(dict(summary.rows())["reward faults"])


def test_a_reward_of_a_column_that_no_task_has_is_refused_before_sampling(play: Play, tmp_path: Path) -> None:
    """With what there is; where some task has the column, the others' rewards fail one by one, as they must."""
    (tmp_path / "my.py").write_text("def right(completion, gold) -> float:\n    return float(completion == gold)\n")
    sampler, rewards = FakeSampler(), [f"{tmp_path / 'my.py'}:right"]
    with pytest.raises(
        UsageError, match=r"reward right: takes 'gold', which no task has a column for; the first has .*prompt"
    ):
        play(3, sampler, rewards=rewards)
    assert (sampler.started, (tmp_path / "run").exists()) == (0, False)
    mixed = [{"prompt": "a", "gold": "1"}, {"prompt": "b"}]
    summary = collect(tasks=mixed, output=tmp_path / "run", parts=parts(rewards=rewards))
    assert (summary.new_rollouts, summary.reward_faults) == (2, 1)


@pytest.mark.parametrize(
    ("reward", "row", "note"),
    [
        ("numeric", {"gold": "3"}, "with a number in it; the first has gold, prompt; pass --map answer=gold"),
        ("numeric", {"answer": "three"}, "with a number in it; the first has answer, prompt"),
        ("exact_match", {"level": 2}, "it needs the task column `answer`; the first has level, prompt"),
        ("regex", {"answer": "3"}, "regex:PATTERN` or the task column `pattern`; the first has answer, prompt"),
        ("regex:[0-9]", {"gold": "3"}, None),
        ("numeric", {"answer": 3}, None),
    ],
)
def test_a_shipped_reward_that_applies_to_no_task_is_noted_before_sampling(
    tmp_path: Path, reward: str, row: dict[str, Any], note: str | None
) -> None:
    """The note has what the reward needs, the columns that there are, and the --map that would read one of them."""
    scored = parts(rewards=[reward])
    collect(tasks=[{**row, "prompt": "a"}], output=tmp_path / "run", parts=scored)
    notes = [text.partition("applies to no task: ")[2] for text in scored.notes if text.startswith("reward ")]
    assert [text[-len(str(note)) :] for text in notes] == ([] if note is None else [note])


def test_more_tasks_and_rollouts_may_be_asked_for(play: Play) -> None:
    """-r, -n and new tasks grow a run; only what is missing is sampled."""
    play(3, limit=2)
    sampler = FakeSampler()
    summary, _ = play(4, sampler, num_rollouts=2)
    assert (len(sampler.requests), summary.rollouts) == (6, 8)


def test_an_edited_task_is_refused(tasks: Tasks, tmp_path: Path) -> None:
    """A task_id whose content changed since its rollouts were collected is an error that names it."""
    path = tasks(2)
    collect(tasks=str(path), output=tmp_path / "run", parts=parts())
    path.write_text(path.read_text().replace('"q1"', '"q1, please"'))
    with pytest.raises(StoreError, match="'t1'"):
        collect(tasks=str(path), output=tmp_path / "run", parts=parts())


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(("before", "generated"), [(hang, False), (hang_in_the_second_turn, True)])
def test_a_time_limit_truncates_with_what_there_is(
    play: Play, adder: str, groups: bool, before: Any, generated: bool
) -> None:
    """A rollout that runs out of time is truncated, scored, and no failure; it keeps its turns, or, without any answer, one
    turn with the prompt and an empty generation."""
    sampler = FakeSampler(add_or_answer, before=before, groups=groups)
    summary, rows = play(1, sampler, env=adder, rewards=["numeric"], time_limit=0.2, num_rollouts=2)
    for row in rows:
        assert (row["status"], row["stop_reason"], row["n_turns"], row["reward"]) == ("truncated", "time_limit", 1, 0.0)
        assert bool(row["turns"][0]["generation_token_ids"]) is generated
        assert len(row["turns"][0]["prompt_delta_ids"]) > 0
    assert (len(rows), summary.failures, summary.exit_code) == (2, 0, 0)


def test_a_time_limit_before_the_first_prompt_is_the_environments_failure(play: Play, tmp_path: Path) -> None:
    """Nothing was requested of the policy, so there is no rollout that could be cut."""
    (tmp_path / "waits.py").write_text(
        "import threading\n\nclass Waits:\n    def reset(self, **_):\n        threading.Event().wait()\n\n"
        "    def respond(self, message):\n        return None\n"
    )
    summary, rows = play(1, env=f"{tmp_path / 'waits.py'}:Waits", time_limit=0.2)
    (record,) = failures_of(tmp_path / "run")
    message = "environment: gave no prompt within 0.2 s"
    assert (record["kind"], record["place"], record["message"]) == ("environment", "environment start", message)
    assert (rows, summary.exit_code) == ([], 1)


def test_a_conversation_that_the_chat_template_refuses_is_a_failure(play: Play, tmp_path: Path, adder: str) -> None:
    """At its start for good, and later with the turns so far; the other rollouts are played."""

    class Picky(LetterChat):
        def render(self, messages: Any, tools: Any) -> list[int]:
            if messages[0]["content"] == "q1":
                raise DataError("the chat template refuses a conversation of (user)")
            return super().render(messages, tools)

        def bridge(self, messages: Any, new: Any, tools: Any) -> list[int]:
            if messages[0]["content"] == "q3":
                raise RefusedError("the chat template rewrites earlier messages")
            return super().bridge(messages, new, tools)

    for attempt in (1, 2):
        picky = parts(FakeSampler(add_or_answer), env=adder)
        picky.chat = Picky()
        summary, rows = play(5, own_parts=picky)
        assert (len(rows), summary.pending, summary.exhausted, summary.exit_code) == (3, 1, 1, 1)
        records = [(r["place"], r["message"], r["final"], len(r["turns"])) for r in failures_of(tmp_path / "run")]
        assert sorted(records) == [
            ("prompt", "engine: the chat template refuses a conversation of (user)", True, 0),
            *[("turn 0", "engine: the chat template rewrites earlier messages", False, 1)] * attempt,
        ]


def test_a_resumed_run_keeps_to_its_concurrency(play: Play) -> None:
    """At most -c rollouts at a time, however many members of the first group are left."""
    play(1, FakeSampler(groups=True), num_rollouts=7)
    sampler = FakeSampler(groups=True)
    summary, _ = play(16, sampler, num_rollouts=8, concurrency=8)
    assert (summary.rollouts, summary.pending, sampler.peak) == (128, 0, 8)


def test_reasons_and_words_of_an_environment_are_its_own(play: Play, tmp_path: Path) -> None:
    """No rollout ended with an agent's exit code, or without a reward, because its environment speaks of such."""
    file = tmp_path / "maze.py"
    file.write_text(
        "from gymdata import Step\n\nclass Maze:\n    stdout = '\"reward_faults\"'\n\n"
        "    def respond(self, message):\n        return Step(reward=1.0, done=True, stop_reason='exit_found')\n"
    )
    summary, rows = play(2, env=f"{file}:Maze")
    assert {row["stop_reason"] for row in rows} == {"exit_found"}
    assert all("reward_faults" in row["extra"] for row in rows)
    assert (summary.agent_exits, summary.reward_faults, summary.exit_code) == (0, 0, 0)


def test_words_of_an_environment_take_no_reward_from_its_steps(play: Play, tmp_path: Path) -> None:
    """What it printed stands in ``extra``, and the rollout has the sum of its steps all the same."""
    file = tmp_path / "maze.py"
    file.write_text(
        "from gymdata import Step\n\nclass Maze:\n    stdout = 'a wall'\n\n"
        "    def respond(self, message):\n        return Step(reward=0.5, done=True)\n"
    )
    _, rows = play(1, own_parts=parts(env=f"{file}:Maze"))
    assert [(row["reward"], row["rewards"]) for row in rows] == [(0.5, [{"name": "steps", "value": 0.5}])] * len(rows)


def test_a_prompt_without_room_is_a_failure(play: Play, tmp_path: Path) -> None:
    """A task that does not fit the context is no rollout: it is the engine's failure, with both lengths, and the same
    command does not try it again; more attempts do."""
    for _ in range(2):
        summary, _ = play(1, max_context=4)
        (record,) = failures_of(tmp_path / "run")
        assert (record["kind"], record["place"], record["final"]) == ("engine", "prompt", True)
        assert "the prompt has 5 tokens and leaves no room to generate: --max-context is 4" in record["message"]
        assert (summary.rollouts, summary.pending, summary.exhausted, summary.exit_code) == (0, 0, 1, 1)
    play(1, max_context=4, max_attempts=4)
    assert len(failures_of(tmp_path / "run")) == 2


def test_a_prompt_that_cannot_fit_is_never_tokenised(play: Play, tmp_path: Path) -> None:
    """Where the chat knows that a prompt is too long, that is the failure, and nothing is rendered."""

    class Long(LetterChat):
        def fewest_tokens(self, messages: Any, tools: Any) -> int:
            return 4097

        def render(self, messages: Any, tools: Any) -> list[int]:
            raise AssertionError("rendered")

    long = parts(FakeSampler(max_model_len=4096))
    long.chat = Long()
    summary, _ = play(1, own_parts=long)
    (record,) = failures_of(tmp_path / "run")
    assert "at least 4,097 tokens and leaves no room to generate: max_model_len is 4,096" in record["message"]
    assert (summary.rollouts, summary.pending, summary.exhausted) == (0, 0, 1)


@pytest.mark.parametrize("groups", [False, True])
def test_one_ctrl_c_drains_and_seals(play: Play, tmp_path: Path, groups: bool) -> None:
    """After the first Ctrl-C nothing new starts, what is in flight is finished and sealed, and the exit code is 130."""
    sampler: FakeSampler

    async def interrupt(request: SampleRequest) -> None:
        if len(sampler.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)

    sampler = FakeSampler(before=interrupt, groups=groups)
    summary, _ = play(100, sampler, concurrency=4)
    assert summary.exit_code == 130
    assert 3 <= summary.rollouts < 50
    assert sampler.closed == 1
    assert not list((tmp_path / "run" / "rollouts").glob("part-*.jsonl"))
    assert play(100)[0].rollouts == 100


def test_two_ctrl_c_drop_what_is_in_flight(play: Play, tmp_path: Path) -> None:
    """The second Ctrl-C ends at once although the engine hangs; what was finished is sealed, the rest is pending."""
    sampler: FakeSampler

    async def interrupt_twice(request: SampleRequest) -> None:
        if len(sampler.requests) < 3:
            return
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await hang(request)

    sampler = FakeSampler(before=interrupt_twice)
    summary, _ = play(20, sampler, rewards=["numeric"], concurrency=1)
    assert (summary.exit_code, summary.rollouts, summary.pending) == (130, 2, 18)
    shown = dict(summary.rows())
    assert shown["pending (rerun to resume)"] == 18
    assert shown["interrupted"] == "18 rollouts are pending; rerun the same command to resume"
    assert any("2 rollouts that ended, 18 are pending" in line for line in summary.remarks())
    assert sampler.closed == 1
    assert not (tmp_path / "run" / "failures.jsonl").exists()


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_task_file_is_an_error_before_anything_is_made(tmp_path: Path, text: str) -> None:
    """No tasks: a DataError, no run folder, no engine."""
    (tmp_path / "none.jsonl").write_text(text)
    sampler = FakeSampler()
    with pytest.raises(DataError, match="is empty"):
        collect(tasks=str(tmp_path / "none.jsonl"), output=tmp_path / "run", parts=parts(sampler))
    assert not (tmp_path / "run").exists()
    assert sampler.started == 0


def test_a_full_disk_loses_nothing_that_was_journaled(play: Play, tmp_path: Path, monkeypatch: Any) -> None:
    """When a row cannot be written the command ends with exit code 3, and the next call goes on from the rows there."""
    real, rows_until_full = Run.append, iter(range(3))

    def append(self: Run, row: Any) -> None:
        if next(rows_until_full, "full") == "full":
            raise StoreError.from_os(self.folder, OSError(errno.ENOSPC, ""))
        real(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "append", append)
        with pytest.raises(StoreError, match="No space left") as caught:
            play(9)
    assert caught.value.exit_code == 3
    assert len(rows_of(tmp_path / "run")) == 3
    summary, _ = play(9)
    assert (summary.rollouts, summary.new_rollouts) == (9, 6)


def test_a_changed_file_of_user_code_is_refused_by_its_name(play: Play, tmp_path: Path) -> None:
    """A run is not resumed with another version of its reward or environment, or of a module that one of them imports; the
    files are named instead of their hashes, also where the environment failed at every start. Another folder or
    overwriting starts again."""
    text = 'import helper\n\ndef fn(completion):\n    return 0.0\n\nclass E:\n    def go(self) -> str:\n        """Go."""\n'
    text += "    def reset(self, **row):\n        raise ValueError(helper.f)\n"
    (tmp_path / "code.py").write_text(text)
    cases: dict[str, dict[str, Any]] = {
        "reward": {"rewards": [f"{tmp_path}/code.py:fn"]}, "environment": {"env": f"{tmp_path}/code.py:E"},
    }  # fmt: skip
    for run, code in cases.items():
        (tmp_path / "helper.py").write_text("f = 1\n")
        summary, _ = play(1, run=run, **code)
        assert summary.pending == (run == "environment")
        (tmp_path / "helper.py").write_text("f = 2\n")
        with pytest.raises(StoreError, match=r"helper\.py"):
            play(1, run=run, num_rollouts=2, **code)
    (tmp_path / "helper.py").write_text("f = 1\n")
    (tmp_path / "code.py").write_text(text + "\n")
    with pytest.raises(
        StoreError, match=r"environment\.file_hash: code\.py changed since\n.*and code.*overwrite"
    ) as caught:
        play(1, run="environment", **cases["environment"])
    assert "@" not in str(caught.value)
    (tmp_path / "helper.py").write_text("f = 2\n")
    with pytest.raises(StoreError, match=r"environment\.file_hash: code\.py, helper\.py changed since"):
        play(1, run="environment", **cases["environment"])
