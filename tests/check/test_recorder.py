"""``gymdata check --recorder``: gymdata's own recorder passes every case, and each wrong one is named by one that fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.check.conformance.engine import Draw
from gymdata.check.conformance.evidence import RecordedTurn, difference
from gymdata.check.conformance.probe import CASES
from gymdata.cli.main import main
from gymdata.errors import OutsideError
from gymdata.record.recorder import Recorder
from gymdata.urls import address_of, listening_socket
from gymdata.validate.run import validate
from tests.check import recorders
from tests.kills import fork

pytestmark = pytest.mark.torch
#: What each wrong recorder is told, by a case of this name.
WRONG: dict[type[Recorder], tuple[str, str]] = {
    recorders.Rounded: ("an answer", "the log-probabilities are rounded: at token 0 got"),
    recorders.Rerendered: ("a second turn continues the ids", "an earlier message was rendered again"),
    recorders.WithoutTools: ("a tool call, sent back in another form", "the prompt that the engine read lacks 'add'"),
    recorders.StaleHistory: ("an edited message begins a branch", "the prompt that the engine read"),
    recorders.OtherText: ("an answer", "the client got 'It  is  1242"),
    recorders.Swapped: ("parallel requests are branches", "its generation was sampled after another prompt"),
    recorders.LostTurn: ("the same request again", "2 of 3 samples are not recorded"),
    recorders.FailuresAreTurns: ("an engine that fails", "a request that the engine failed is recorded as a turn"),
}


def test_gymdata_s_recorder_passes_every_case(tmp_path: Path) -> None:
    """In all four dialects, and what it wrote is clean."""
    report = recorders.check(tmp_path / "run")
    assert [case for case in report.cases if case.result != "passed"] == []
    assert report.exit_code == 0
    assert len(report.cases) == len(CASES) >= 30
    assert {case.case.partition(":")[0] for case in report.cases} == {"chat", "responses", "messages", "completions"}
    assert validate(tmp_path / "run").ok


#: What the engine sampled, and a prompt that it failed.
DRAWS = [Draw([1, 2], [5, 6, 9], [-0.5, -0.25, -1.0], "stop"), Draw([1, 3], [7, 9], [-0.5, -0.125], "stop")]
FAILED = [[1, 4]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"log_probs": [-0.5, -0.25]}, "2 log-probabilities for 3 generated tokens"),
        ({"log_probs": [-0.5, -0.5, -0.25]}, "the log-probabilities are shifted by one token: at token 1 got -0.5"),
        ({"log_probs": [-0.5, -0.2500001, -1.0]}, "the log-probabilities are rounded: at token 1 got -0.2500001"),
        (
            {"log_probs": [-2.0, -3.0, -4.0]},
            "the log-probabilities are not the engine's: at token 0 got -2, sampled -0.5",
        ),
        ({"finish_reason": "length"}, "finish_reason is 'length', the engine's was 'stop'"),
        ({"ids": [0, 0, 0]}, "its generated ids are all 0"),
        ({"prompt": [1, 4]}, "the engine failed this request, and it is recorded as a turn"),
        ({"prompt": [1, 2, 5], "ids": [6, 9]}, "the border between prompt and generation is shifted by 1: 2 generated"),
        ({"ids": [5, 6]}, "the last generated token is missing: the stop token was dropped"),
        ({"prompt": [1, 3]}, "its generation was sampled after another prompt: branches are swapped"),
        ({"prompt": [1, 8]}, "its prompt is not the one that the engine read: from token 1 got 'i' [8]"),
        ({"ids": [15, 6, 9]}, "its text was encoded again into other ids: from token 0 got 'fgj' [15, 6, 9]"),
        ({"ids": [5, 8, 9]}, "its ids are not those that were sampled after this prompt: from token 1"),
        ({"prompt": [2], "ids": [3]}, "the engine sampled neither its ids nor after its prompt"),
        ({"prompt": [1, 3], "ids": [7, 9], "log_probs": [-0.5, -0.125]}, "another turn has the same sample"),
    ],
)
def test_a_wrong_turn_is_named_by_what_it_looks_like(changes: dict[str, Any], words: str | None) -> None:
    """The first of two turns is not what was sampled; of ids that differ by ten, the text is the same."""
    turns = [RecordedTurn(draw.prompt, draw.ids, draw.log_probs, draw.finish_reason, "main") for draw in DRAWS]
    turns[0] = replace(turns[0], **changes)
    what = difference(turns, DRAWS, FAILED, decode)
    assert what is None if words is None else words in str(what)


def decode(ids: Sequence[int]) -> str:
    return "".join("abcdefghij"[i % 10] for i in ids)


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_a_wrong_recorder_is_named(kind: type[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a case whose message says what is wrong; the same case passes with the right one (above)."""
    name, words = WRONG[kind]
    monkeypatch.setattr("gymdata.check.conformance.run.CASES", [case for case in CASES if case.name == name])
    report = recorders.check(tmp_path / "run", kind)
    assert report.exit_code == 1
    failed = [case for case in report.cases if case.result == "failed"]
    assert failed, report.cases
    assert all(words in case.detail for case in failed), failed


def test_the_command_checks_a_recorder_that_starts_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves the engine, waits for the recorder in front of it, and prints each case."""
    monkeypatch.setattr("gymdata.check.conformance.run.CASES", [case for case in CASES if case.name == "an answer"])
    bound = [listening_socket("127.0.0.1", 0) for _ in range(2)]
    upstream, own = (address_of(socket).rpartition(":")[2] for socket in bound)
    for socket in bound:
        socket.close()
    record = ["-o", str(tmp_path / "run"), "--port", own, "--endpoint", f"http://127.0.0.1:{upstream}"]
    started: list[BaseProcess] = []

    def note(text: str) -> None:
        if text.startswith("waiting for"):
            started.append(fork([*record, "--tokenizer", recorders.POLICY], "record"))

    monkeypatch.setattr("gymdata.cli.check.note", note)
    try:
        code = main(["check", "--recorder", f"http://127.0.0.1:{own}/v1", "--upstream-port", upstream, "--json"])
    finally:
        for process in started:
            process.kill()
            process.join()
    printed = json.loads(capfd.readouterr().out)
    assert (code, printed["ok"], len(printed["cases"])) == (0, True, 3)


def test_the_documentation_says_how_many_cases_there_are() -> None:
    """And each case has a name of its own in its dialect."""
    page = (Path(__file__).parents[2] / "gymdata" / "docs" / "record-your-agent.md").read_text()
    assert f"in {len(CASES)} cases" in page.replace("\n", " ")
    assert len({case.title for case in CASES}) == len(CASES)


def test_a_recorder_that_does_not_answer_is_an_outside_fault() -> None:
    """With the place, and what to start."""
    with pytest.raises(OutsideError, match=r"recorder: http://127.0.0.1:9 did not answer within 0.1 s"):
        gymdata.check_recorder("http://127.0.0.1:9", upstream_port=0, wait=0.1)
