"""A session's conversations as a tree: in ``show``, and on the pages of ``view``."""

from __future__ import annotations

import io
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.commands.show.conversations import conversations_of
from tests.record.scripted_engine import Recording, recording
from tests.view.conftest import serve as serve

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def session(tmp_path: Path) -> Recording:
    """A run of one rollout: a main conversation that branches and whose history is then edited, and a side conversation."""
    with recording(tmp_path / "run", "one", "a title", "two", "three", "four") as r:
        first = r.said("x", tools=TOOLS)
        r.said({"role": "system", "content": "Make a title"}, "x")
        second = r.said("x", first, "go on", tools=TOOLS)
        r.said("x", first, "or go there", tools=TOOLS)
        r.said("y", first, "go on", second, "and on", tools=TOOLS)
        r.finish(reward=1.0)
    return r


def test_branches_and_versions_come_after_what_they_come_from(session: Recording) -> None:
    """With what each has of its own, and why it is there."""
    row = session.row()
    listed = [(c.agent, c.depth, c.begins, [m.content for m in c.messages]) for c in conversations_of(row)]
    side = listed[-1][0]
    assert side.startswith("side-")
    assert listed == [
        ("main", 0, "begins at turn 0", ["x", "one", "go on", "two"]),
        ("main", 1, "branches after turn 0", ["or go there", "three"]),
        ("main.2", 1, "begins at turn 4: message 0 (user) changed", ["y", "one", "go on", "two", "and on", "four"]),
        (side, 0, "begins at turn 1", ["Make a title", "x", "a title"]),
    ]
    assert [c.shown for c in conversations_of(row)].count(True) == 1


def test_a_rollout_of_one_conversation_is_one(tmp_path: Path) -> None:
    """Without a heading of its own in ``show``."""
    with recording(tmp_path / "run", "one") as r:
        r.said("x")
        r.finish(reward=1.0)
    (only,) = conversations_of(r.row())
    assert (only.agent, only.depth, only.shown) == ("main", 0, True)


def test_show_names_each_conversation(session: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    """And every turn is shown once, with its agent."""
    assert main(["show", str(session.folder)]) == 0
    out = capsys.readouterr().out
    branches = ("main, branches after turn 0", "main.2, begins at turn 4")
    for heading in ("main, begins at turn 0", *branches, "begins at turn 1"):
        assert heading in out
    assert all(len(re.findall(rf"^assistant  turn {n}: ", out, re.M)) == 1 for n in range(5))


def test_the_page_of_a_rollout_lists_the_tree(session: Recording, serve: Any) -> None:
    """Each conversation with a link to it, and its messages under its name."""
    with urllib.request.urlopen(f"{serve(session.folder)}/rollout?id={session.row()['rollout_id']}") as page:
        text = io.TextIOWrapper(page, "utf-8").read()
    assert text.count('<section class="conversation') == 4
    assert text.count('href="#conversation-') == 4
    assert "message 0 (user) changed" in text
