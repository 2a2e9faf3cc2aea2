"""An answer that no request carries on and whose client did not get it is kept, counted and left out of training, unless
``abandoned="keep"`` asks for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.train.settings import TrainKtoConfig, TrainSftConfig
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from tests.collect.fake_parts import END
from tests.record.scripted_engine import Recording, recording
from tests.record.streaming import WAITING, asked, streamed


async def gone(r: Recording, path: str, body: dict[str, Any]) -> None:
    """A client that leaves while the engine waits after ``|``, and an engine that then samples the rest."""
    left = asyncio.Event()
    r.sampler.pause = left.wait
    if body.get("stream"):
        await streamed(r, path, body, WAITING.__eq__)
    else:
        sent = [json.dumps(body).encode()]

        async def receive() -> dict[str, Any]:
            if sent:
                return {"type": "http.request", "body": sent.pop(), "more_body": False}
            return {"type": "http.disconnect"}

        async def send(_: dict[str, Any]) -> None: ...

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b""}
        scope |= {"headers": [(b"host", b"testserver"), (b"content-type", b"application/json")]}
        answering = asyncio.ensure_future(r.app()(scope, receive, send))
        while "k" not in r.recorder.sessions:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        left.set()
        await answering
    left.set()
    await r.recorder.answered(r.recorder.sessions["k"])
    r.sampler.pause = None


def retry(r: Recording) -> None:
    r.said("x")
    r.said("x", r.said("x"), "y")


def late_retry(r: Recording) -> None:
    r.said("x", r.said("x"), "y")
    r.said("x")


def client_gone(r: Recording) -> None:
    said = [{"role": "user", "content": "x"}, r.said("x"), {"role": "user", "content": "y"}]
    asyncio.run(gone(r, "/s/k/v1/chat/completions", {"model": "m", "messages": said, "stream": True}))


#: What the engine says, the unread turns, the texts of the row's messages, and what is trained of the rollout.
CASES: dict[str, tuple[Callable[[Recording], None], list[str], list[int], list[str], list[str]]] = {
    "a retry": (retry, ["a", "b", "c"], [0], ["x", "b", "y", "c"], ["b", "c"]),
    "a retry of a turn that went on": (late_retry, ["a", "b", "c"], [2], ["x", "a", "y", "b"], ["a", "b"]),
    "a client that was gone": (client_gone, ["a", "b|"], [1], ["x", "a"], ["a"]),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def recorded(run: Path, case: str) -> dict[str, Any]:
    """The row of the case, in a group with a rollout of another reward."""
    do, script, *_ = CASES[case]
    with recording(run, *script, "other") as r:
        do(r)
        r.finish(reward=1.0, task_id="t")
        r.said("x", key="second")
        r.finish("second", reward=0.0, task_id="t")
    return next(row for row in r.rows() if row["reward"] == 1.0)


def letters(ids: list[list[int]]) -> list[str]:
    """Generations as text, in order."""
    return sorted(bytes(i for i in one if i < END).decode() for one in ids)


def trained(input_ids: list[int], loss_mask: list[int]) -> Iterator[list[int]]:
    """The generations of a sequence that are trained."""
    own: list[int] = []
    for token, mask in zip([*input_ids, 0], [*loss_mask, 0], strict=True):
        if mask:
            own.append(token)
        elif own:
            yield own
            own = []


def test_it_is_kept_named_and_not_what_the_row_shows(case: str, tmp_path: Path) -> None:
    """Every turn is in the row, those that are unread in its extra, and rewards and messages are of what was read."""
    row = recorded(tmp_path / "run", case)
    _, script, unread, shown, _ = CASES[case]
    assert letters([turn["generation_token_ids"] for turn in row["turns"]]) == sorted(script)
    assert json.loads(row["extra"])["unread_turns"] == unread
    assert [message["content"] for message in row["messages"]] == shown


@pytest.mark.parametrize("abandoned", ["drop", "keep"])
def test_experience_leaves_it_out(case: str, abandoned: str, tmp_path: Path) -> None:
    """By default; with keep it is a sequence of its own, and what was read is trained by the same sequences."""
    row = recorded(tmp_path / "run", case)
    _, script, unread, _, read = CASES[case]
    given = {"abandoned": "keep"} if abandoned == "keep" else {}
    report = gymdata.experience(tmp_path / "run", tmp_path / "experience", **given)
    table = gymdata.query("SELECT * FROM experiences", tmp_path / "experience").to_pylist()
    mine = [one for one in table if one["rollout_id"] == row["rollout_id"]]
    generations = [ids for one in mine for ids in trained(one["input_ids"], one["loss_mask"])]
    assert letters(generations) == sorted(script if abandoned == "keep" else read)
    assert report.counts["abandoned_turns"] == (0 if abandoned == "keep" else len(unread))


@pytest.mark.parametrize("abandoned", ["drop", "keep"])
@pytest.mark.parametrize("config", [TrainSftConfig, TrainKtoConfig], ids=["train-sft", "train-kto"])
def test_training_on_rollouts_leaves_it_out(config: Any, case: str, abandoned: str, tmp_path: Path) -> None:
    """And counts it."""
    row = recorded(tmp_path / "run", case)
    _, script, unread, _, read = CASES[case]
    given = {"data": tmp_path / "run", "model": "m", "output": tmp_path / "out"}
    given |= {"abandoned": "keep"} if abandoned == "keep" else {}
    (data,) = config.load(None, given).parts(str(tmp_path / "run"))
    rows = [k for k, name in enumerate(data.rollout_ids) if name == row["rollout_id"]]
    ids, mask = data.lists("input_ids"), data.lists("loss_mask")
    generations = [each for k in rows for each in trained(ids[k].tolist(), mask[k].tolist())]
    assert letters(generations) == sorted(script if abandoned == "keep" else read)
    assert data.counts.get("left_out_unread", 0) == (0 if abandoned == "keep" else len(unread))


def test_pairs_leave_it_out(case: str, tmp_path: Path) -> None:
    """The chosen side is what was read, as ids and as messages."""
    recorded(tmp_path / "run", case)
    _, _, unread, shown, read = CASES[case]
    report = gymdata.pairs(tmp_path / "run", output=tmp_path / "pairs")
    (pair,) = gymdata.query("SELECT * FROM pairs", tmp_path / "pairs").to_pylist()
    assert letters(list(trained(pair["chosen_ids"], pair["chosen_mask"]))) == sorted(read)
    assert [message["content"] for message in pair["chosen"]] == shown[1:]
    assert report.counts.abandoned_turns == len(unread)


@pytest.mark.parametrize("format", ["input-ids-labels", "skyrl-pretokenized", "tinker-sft", "openai"])
def test_exports_for_training_leave_it_out(case: str, format: str, tmp_path: Path) -> None:
    """Those of ids by its turns, and those of messages because the row shows what was read."""
    recorded(tmp_path / "run", case)
    _, script, _, _, read = CASES[case]
    gymdata.export(tmp_path / "run", tmp_path / "out.jsonl", format=format)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    if format == "openai":
        said = [m["content"] for line in lines for m in line["messages"] if m["role"] == "assistant"]
        assert sorted(said) == sorted([*read, "other"])
        return
    generations = []
    for line in lines:
        if format == "tinker-sft":
            given = line["loss_fn_inputs"]
            ids, mask = given["target_tokens"]["data"], given["weights"]["data"]
        else:
            ids = line["input_ids"]
            mask = line.get("loss_mask") or [int(label >= 0) for label in line["labels"]]
        generations += trained(ids, mask)
    assert letters(generations) == sorted([*read, "other"])
    assert script


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_client_that_was_gone_has_not_read_its_answer(dialect: str, stream: bool, tmp_path: Path) -> None:
    """Whether it was streamed or not: the only turn of this rollout is recorded, and nothing of it is trained."""
    with recording(tmp_path / "run", "Hello| world", "other") as r:
        asyncio.run(gone(r, *asked(dialect, stream=stream)))
        r.finish(reward=1.0, task_id="t")
        r.said("x", key="second")
        r.finish("second", reward=0.0, task_id="t")
    first, second = read_table(tmp_path / "run", ROLLOUTS).to_pylist()
    assert json.loads(first["extra"])["unread_turns"] == [0]
    assert "unread_turns" not in json.loads(second["extra"])
    gymdata.experience(tmp_path / "run", tmp_path / "experience")
    rows = gymdata.query("SELECT rollout_id FROM experiences", tmp_path / "experience").to_pylist()
    assert [row["rollout_id"] for row in rows] == [second["rollout_id"]]


def test_an_answer_that_its_client_went_on_from_was_read(tmp_path: Path) -> None:
    """Although its client was gone before it ended: it is a turn as all others."""
    with recording(tmp_path / "run", "a|", "b") as r:
        asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        asyncio.run(gone(r, "/s/k/v1/chat/completions", asked))
        r.said("x", {"role": "assistant", "content": "a|"}, "y")
        r.finish(reward=1.0)
    row = r.row()
    assert "unread_turns" not in json.loads(row["extra"])
    assert [message["content"] for message in row["messages"]] == ["x", "a|", "y", "b"]
