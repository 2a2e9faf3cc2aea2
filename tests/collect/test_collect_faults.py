"""Failures, limits, resuming and stopping, with a deterministic engine at the port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.collect.run import collect
from gymdata.engines.port import SampleRequest
from gymdata.errors import DataError, OutsideError, StoreError, UsageError
from gymdata.store import read_run_json
from tests.collect.fake_parts import FakeSampler, LetterChat, add_or_answer, engine_fault, parts
from tests.collect.saved_rows import failures_of, rows_of
from tests.servers import Watcher

Tasks = Callable[..., Path]


def test_a_failed_turn_keeps_the_turns_before_it(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """An engine error in turn 1 leaves turn 0's ids and log-probs in failures.jsonl, and no rollout."""

    async def fail_second(request: SampleRequest) -> None:
        if request.request_id.endswith("-1"):
            raise engine_fault()

    made = parts(FakeSampler(add_or_answer, before=fail_second), env=adder)
    summary = collect(tasks=str(tasks(1)), output=tmp_path / "run", parts=made)
    (record,) = failures_of(tmp_path / "run")
    assert (record["kind"], record["place"], record["attempt"]) == ("engine", "turn 1", 1)
    assert len(record["turns"]) == 1
    assert len(record["turns"][0]["generation_log_probs"]) == len(record["turns"][0]["generation_token_ids"]) > 0
    assert (summary.rollouts, summary.failures, summary.pending, summary.exit_code) == (0, 1, 1, 1)


def test_failures_are_pending_until_the_attempts_are_used_up(tasks: Tasks, tmp_path: Path) -> None:
    """Each call tries a failed rollout once more; after --max-attempts none is tried; --give-up makes that exit 0."""
    bad = "q1"

    async def fail(request: SampleRequest) -> None:
        if bytes(i for i in request.prompt_token_ids if i < 256).decode() == bad:
            raise engine_fault()

    settings: dict[str, Any] = {"tasks": str(tasks(3)), "output": tmp_path / "run", "max_attempts": 2}
    pending = []
    for _ in range(3):
        sampler = FakeSampler(before=fail)
        summary = collect(parts=parts(sampler), **settings)
        pending.append((summary.pending, summary.exhausted, len(sampler.requests), summary.exit_code))
    assert pending == [(1, 0, 3, 1), (0, 1, 1, 1), (0, 1, 0, 1)]
    assert f"`gymdata query :failures {tmp_path / 'run'}` says why attempts failed" in summary.remarks()
    assert [f["attempt"] for f in failures_of(tmp_path / "run")] == [1, 2]
    assert collect(parts=parts(), give_up=True, **settings).exit_code == 0
    assert collect(parts=parts(), **{**settings, "max_attempts": 3}).rollouts == 3


def test_a_dead_engine_stops_everything_and_costs_no_attempt(tasks: Tasks, tmp_path: Path) -> None:
    """When the engine dies the command ends with the engine's error; what was in flight is pending with no attempt used."""
    seen = 0

    async def die(request: SampleRequest) -> None:
        nonlocal seen
        seen += 1
        if seen > 5:
            raise engine_fault("the engine died", fatal=True)

    dying = parts(FakeSampler(before=die))
    with pytest.raises(OutsideError, match="the engine died") as caught:
        collect(tasks=str(tasks(50)), output=tmp_path / "run", max_attempts=1, concurrency=4, parts=dying)
    assert caught.value.exit_code == 3
    assert seen <= 5 + 4
    assert all(not f["counts"] for f in failures_of(tmp_path / "run"))
    summary = collect(tasks=str(tasks(50)), output=tmp_path / "run", max_attempts=1, parts=parts())
    assert (summary.rollouts, summary.exit_code) == (50, 0)


def test_a_resumed_run_equals_an_uninterrupted_one(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """Stopped by a dead engine and resumed with more rollouts, the rows are those of one uninterrupted run."""
    count = 0

    async def die(request: SampleRequest) -> None:
        nonlocal count
        count += 1
        if count > 17:
            raise engine_fault(fatal=True)

    settings: dict[str, Any] = {"tasks": str(tasks(6)), "seed": 4, "run_id": "one"}
    dying = parts(FakeSampler(add_or_answer, before=die), env=adder)
    with pytest.raises(OutsideError):
        collect(output=tmp_path / "a", num_rollouts=2, parts=dying, **settings)
    assert [output.state for output in gymdata.ls(tmp_path).outputs] == ["interrupted"]
    collect(output=tmp_path / "a", num_rollouts=3, parts=parts(FakeSampler(add_or_answer), env=adder), **settings)
    collect(output=tmp_path / "b", num_rollouts=3, parts=parts(FakeSampler(add_or_answer), env=adder), **settings)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert [output.state for output in gymdata.ls(tmp_path).outputs] == ["complete", "complete"]


def test_doing_it_twice_starts_no_engine(tasks: Tasks, tmp_path: Path) -> None:
    """The same command again is a no-op with exit code 0, and keeps the seed that was drawn."""
    collect(tasks=str(tasks(2)), output=tmp_path / "run", parts=parts())
    seed = read_run_json(tmp_path / "run")["identity"]["seed"]
    sampler = FakeSampler()
    summary = collect(tasks=str(tasks(2)), output=tmp_path / "run", parts=parts(sampler))
    assert (sampler.started, summary.new_rollouts, summary.rollouts, summary.exit_code) == (0, 0, 2, 0)
    assert read_run_json(tmp_path / "run")["identity"]["seed"] == seed


def test_a_reward_that_raises_is_said_and_stays_a_fault(tasks: Tasks, tmp_path: Path) -> None:
    """Exit code 1, a row with count, first message and what to do, and the same when the command is run again."""
    (tmp_path / "my.py").write_text("def boom(**_):\n    raise ValueError('bang')\n")
    for new in (3, 0):
        made = parts(rewards=[f"{tmp_path / 'my.py'}:boom", "regex", "numeric"])
        summary = collect(tasks=str(tasks(3)), output=tmp_path / "run", parts=made)
        said = {name: str(value) for name, value in summary.rows()}
        assert (summary.new_rollouts, summary.reward_faults, summary.exit_code) == (new, 3, 1)
        assert said["reward faults"].startswith("3; first: boom raised ValueError: bang")
        assert "gymdata score" in said["  what to do"]
        assert said["regex does not apply"].startswith("3; it needs `--reward regex:PATTERN`")
        assert (summary.parts["numeric"].scored, summary.parts["boom"].failed) == (3, 3)


def test_a_reward_of_a_column_that_no_task_has_is_refused_before_sampling(tasks: Tasks, tmp_path: Path) -> None:
    """With what there is; where some task has the column, the others' rewards fail one by one, as they must."""
    (tmp_path / "my.py").write_text("def right(completion, gold) -> float:\n    return float(completion == gold)\n")
    sampler, made = FakeSampler(), [f"{tmp_path / 'my.py'}:right"]
    with pytest.raises(
        UsageError, match=r"reward right: takes 'gold', which no task has a column for; the first has .*prompt"
    ):
        collect(tasks=str(tasks(3)), output=tmp_path / "run", parts=parts(sampler, rewards=made))
    assert (sampler.started, (tmp_path / "run").exists()) == (0, False)
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"prompt": "a", "gold": "1"}\n{"prompt": "b"}\n')
    summary = collect(tasks=str(mixed), output=tmp_path / "run", parts=parts(rewards=made))
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
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps({**row, 'prompt': 'a'})}\n")
    made = parts(rewards=[reward])
    collect(tasks=str(tmp_path / "tasks.jsonl"), output=tmp_path / "run", parts=made)
    notes = [text.partition("applies to no task: ")[2] for text in made.notes if text.startswith("reward ")]
    assert [text[-len(str(note)) :] for text in notes] == ([] if note is None else [note])


def test_an_error_that_quotes_half_a_character_is_written(tasks: Tasks, tmp_path: Path) -> None:
    """A model cut off inside a character gives a lone surrogate; what a reward says of it must not end the run."""
    (tmp_path / "my.py").write_text("def boom(**_):\n    raise ValueError('got \\ud83d')\n")
    made = parts(rewards=[f"{tmp_path / 'my.py'}:boom"])
    summary = collect(tasks=str(tasks(2)), output=tmp_path / "run", parts=made)
    assert (summary.rollouts, summary.reward_faults) == (2, 2)
    assert "boom raised ValueError: got ?" in str(dict(summary.rows())["reward faults"])


def test_whoever_waits_is_told_why(tasks: Tasks, tmp_path: Path) -> None:
    """Before the engine starts it is named; when nothing is pending that is said and no engine is started."""
    first, again = Watcher(), Watcher()
    collect(tasks=str(tasks(1)), output=tmp_path / "run", parts=parts(), progress=first)
    collect(tasks=str(tasks(1)), output=tmp_path / "run", parts=parts(), progress=again)
    assert first.said == ["starting vLLM with fake …"]
    assert again.said == ["nothing to do; engine not started"]


def test_more_tasks_and_rollouts_may_be_asked_for(tasks: Tasks, tmp_path: Path) -> None:
    """-r, -n and new tasks grow a run; only what is missing is sampled."""
    collect(tasks=str(tasks(3)), output=tmp_path / "run", limit=2, parts=parts())
    sampler = FakeSampler()
    summary = collect(tasks=str(tasks(4)), output=tmp_path / "run", num_rollouts=2, parts=parts(sampler))
    assert (len(sampler.requests), summary.rollouts) == (6, 8)


def test_an_edited_task_is_refused(tasks: Tasks, tmp_path: Path) -> None:
    """A task_id whose content changed since its rollouts were collected is an error that names it."""
    path = tasks(2)
    collect(tasks=str(path), output=tmp_path / "run", parts=parts())
    path.write_text(path.read_text().replace('"q1"', '"q1, please"'))
    with pytest.raises(StoreError, match="'t1'"):
        collect(tasks=str(path), output=tmp_path / "run", parts=parts())


def test_a_time_limit_truncates_with_what_there_is(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """A rollout that runs out of time is truncated, scored, keeps its turns, and is no failure."""

    async def hang(request: SampleRequest) -> None:
        if request.request_id.endswith("-1"):
            await asyncio.Event().wait()

    for groups in (False, True):
        made = parts(FakeSampler(add_or_answer, before=hang, groups=groups), env=adder, rewards=["numeric"])
        run = tmp_path / f"run{groups}"
        summary = collect(tasks=str(tasks(1)), output=run, time_limit=0.2, num_rollouts=2, parts=made)
        for row in rows_of(run):
            assert (row["status"], row["stop_reason"]) == ("truncated", "time_limit")
            assert (row["n_turns"], row["reward"]) == (1, 0.0)
        assert (summary.failures, summary.exit_code) == (0, 0)


def test_a_time_limit_in_the_first_turn_keeps_what_was_asked(tasks: Tasks, tmp_path: Path) -> None:
    """Without any answer the row has one turn with the prompt and an empty generation."""

    async def hang(request: SampleRequest) -> None:
        await asyncio.Event().wait()

    for groups in (False, True):
        run = tmp_path / f"run{groups}"
        made = parts(FakeSampler(before=hang, groups=groups))
        collect(tasks=str(tasks(1)), output=run, time_limit=0.1, num_rollouts=2, parts=made)
        for row in rows_of(run):
            assert row["stop_reason"] == "time_limit"
            assert row["turns"][0]["generation_token_ids"] == []
            assert len(row["turns"][0]["prompt_delta_ids"]) > 0


def test_a_prompt_without_room_is_a_failure(tasks: Tasks, tmp_path: Path) -> None:
    """A task that does not fit the context is no rollout: it is the engine's failure, with both lengths, and the same
    command does not try it again; more attempts do."""
    settings: dict[str, Any] = {"tasks": str(tasks(1)), "output": tmp_path / "run", "max_context": 4}
    summary = collect(parts=parts(), **settings)
    (record,) = failures_of(tmp_path / "run")
    assert (record["kind"], record["place"], record["final"]) == ("engine", "prompt", True)
    assert "the prompt has 5 tokens and leaves no room to generate: --max-context is 4" in record["message"]
    assert (summary.rollouts, summary.pending, summary.exhausted, summary.exit_code) == (0, 0, 1, 1)
    summary = collect(parts=parts(), **settings)
    assert (len(failures_of(tmp_path / "run")), summary.exhausted, summary.exit_code) == (1, 1, 1)
    collect(parts=parts(), max_attempts=4, **settings)
    assert len(failures_of(tmp_path / "run")) == 2


def test_a_prompt_that_cannot_fit_is_never_tokenised(tasks: Tasks, tmp_path: Path) -> None:
    """Where the chat knows that a prompt is too long, that is the failure, and nothing is rendered."""

    class Long(LetterChat):
        def fewest_tokens(self, messages: Any, tools: Any) -> int:
            return 4097

        def render(self, messages: Any, tools: Any) -> list[int]:
            raise AssertionError("rendered")

    made = parts(FakeSampler(max_model_len=4096))
    made.chat = Long()
    summary = collect(tasks=str(tasks(1)), output=tmp_path / "run", parts=made)
    (record,) = failures_of(tmp_path / "run")
    assert "at least 4,097 tokens and leaves no room to generate: max_model_len is 4,096" in record["message"]
    assert (summary.rollouts, summary.pending, summary.exhausted) == (0, 0, 1)


@pytest.mark.parametrize("groups", [False, True])
def test_one_ctrl_c_drains_and_seals(tasks: Tasks, tmp_path: Path, groups: bool) -> None:
    """After the first Ctrl-C nothing new starts, what is in flight is finished and sealed, and the exit code is 130."""
    sampler: FakeSampler

    async def interrupt(request: SampleRequest) -> None:
        if len(sampler.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0)

    sampler = FakeSampler(before=interrupt, groups=groups)
    path = str(tasks(500))
    summary = collect(tasks=path, output=tmp_path / "run", concurrency=4, parts=parts(sampler))
    assert summary.exit_code == 130
    assert 3 <= summary.rollouts < 100
    assert sampler.closed == 1
    assert not list((tmp_path / "run" / "rollouts").glob("*.journal"))
    assert collect(tasks=path, output=tmp_path / "run", parts=parts()).rollouts == 500


def test_two_ctrl_c_drop_what_is_in_flight(tasks: Tasks, tmp_path: Path) -> None:
    """The second Ctrl-C ends at once although the engine hangs; what was finished is sealed, the rest is pending."""
    sampler: FakeSampler

    async def hang(request: SampleRequest) -> None:
        if len(sampler.requests) < 3:
            return
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    sampler = FakeSampler(before=hang)
    summary = collect(tasks=str(tasks(20)), output=tmp_path / "run", concurrency=1, parts=parts(sampler))
    assert (summary.exit_code, summary.rollouts, summary.pending) == (130, 2, 18)
    said = dict(summary.rows())
    assert (said["pending (rerun to resume)"], said["interrupted"]) == (
        18,
        "18 rollouts are pending; rerun the same command to resume",
    )
    assert summary.reward["n"] == 0 or any(
        "2 rollouts that ended, 18 are pending" in line for line in summary.remarks()
    )
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


def test_a_full_disk_loses_nothing_that_was_journaled(tasks: Tasks, tmp_path: Path, monkeypatch: Any) -> None:
    """When a row cannot be written the command ends with exit code 3, and the next call goes on from the rows there."""
    from gymdata.store import Run

    real, written = Run.append, 0

    def append(self: Run, row: Any) -> None:
        nonlocal written
        written += 1
        if written == 4:
            raise StoreError.disk(self.folder, "No space left on device")
        real(self, row)

    monkeypatch.setattr(Run, "append", append)
    with pytest.raises(StoreError, match="No space left") as caught:
        collect(tasks=str(tasks(9)), output=tmp_path / "run", parts=parts())
    assert caught.value.exit_code == 3
    assert len(rows_of(tmp_path / "run")) >= 3
    assert collect(tasks=str(tasks(9)), output=tmp_path / "run", parts=parts()).rollouts == 9


def test_a_changed_helper_of_user_code_is_refused_by_its_name(tasks: Tasks, tmp_path: Path) -> None:
    """A run is not resumed with another version of a module that its reward or environment imports."""
    (tmp_path / "helper.py").write_text("f = 0.0\n")
    (tmp_path / "rw.py").write_text("import helper\n\ndef fn(completion):\n    return helper.f\n")
    (tmp_path / "en.py").write_text(
        'import helper\n\nclass E:\n    def go(self) -> str:\n        """Go."""\n        return ""\n'
    )
    for more in ({"rewards": [f"{tmp_path}/rw.py:fn"]}, {"env": f"{tmp_path}/en.py:E"}):
        (tmp_path / "helper.py").write_text("f = 0.0\n")
        settings: dict[str, Any] = {"tasks": str(tasks(2)), "output": tmp_path / f"run-{min(more)}"}
        collect(parts=parts(**more), **settings)
        (tmp_path / "helper.py").write_text("f = 0.5\n")
        with pytest.raises(StoreError, match=r"helper\.py"):
            collect(parts=parts(**more), num_rollouts=2, **settings)


def test_a_file_that_was_edited_is_named_instead_of_its_hashes(tasks: Tasks, tmp_path: Path) -> None:
    """Also of an environment that failed at every start: another folder or overwriting starts again."""
    (tmp_path / "helper.py").write_text("f = 1\n")
    text = 'import helper\n\nclass E:\n    def go(self) -> str:\n        """Go."""\n        return ""\n'
    text += "    def reset(self, **row):\n        raise ValueError(helper.f)\n"
    (tmp_path / "en.py").write_text(text)
    settings: dict[str, Any] = {"tasks": str(tasks(1)), "output": tmp_path / "run"}
    assert collect(parts=parts(env=f"{tmp_path}/en.py:E"), **settings).pending
    (tmp_path / "en.py").write_text(text + "\n")
    with pytest.raises(
        StoreError, match=r"environment\.file_hash: en\.py changed since\n.*and code.*overwrite"
    ) as caught:
        collect(parts=parts(env=f"{tmp_path}/en.py:E"), **settings)
    assert "@" not in str(caught.value)
    (tmp_path / "helper.py").write_text("f = 2\n")
    with pytest.raises(StoreError, match=r"environment\.file_hash: en\.py, helper\.py changed since"):
        collect(parts=parts(env=f"{tmp_path}/en.py:E"), **settings)
