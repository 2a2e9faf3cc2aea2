"""Rollouts, groups and pairs in a cell of a notebook, by the templates of the pages.

Invariants: a cell is a frame of its own that runs nothing and loads nothing; what comes from data is escaped in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gymdata.errors import DataError
from gymdata.public import framed
from gymdata.show.conversations import conversations_of
from gymdata.view.app import HERE, environment
from gymdata.view.evidence.listing import scale_of
from gymdata.view.pages import Pages
from gymdata.view.settings import ViewConfig

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def rollout_cell(row: Mapping[str, Any]) -> str:
    """The messages of one rollout, with its reward."""
    template = environment({"rollout": lambda _: ""}).from_string(
        '{% from "parts.html" import conversations %}<section class="head"><div class="big"><b>{{ row.reward|number }}</b>'
        '<span>reward</span></div><dl class="chips"><div><dt>task</dt><dd>{{ row.task_id }} rollout '
        "{{ row.rollout_index }}</dd></div><div><dt>status</dt><dd>{{ row.status }}</dd></div><div><dt>turns</dt><dd>"
        "{{ row.n_turns }}</dd></div><div><dt>generated</dt><dd>{{ row.n_generated_tokens|number }}</dd></div></dl>"
        "</section>{{ conversations(listed, False) }}"
    )
    return framed(_page(template.render(row=row, listed=conversations_of(row))), 420)


def group_cell(path: Path, group_id: str) -> str:
    """The rollouts of a group side by side. Raises DataError for an unknown group."""
    with contextlib.closing(Pages([path], ViewConfig.load())) as pages:
        snapshot = pages.index.snapshot()
        mates = snapshot.where("group_id", group_id) or snapshot.where("task_id", group_id)
        if not mates:
            raise DataError.unknown_id(path, "group_id", group_id, sorted(set(snapshot.table["group_id"].to_pylist())))
        values = pages.group_values(snapshot, mates) | {"scale": scale_of(snapshot), "score": snapshot.score}
    return framed(_page(_template("group_body.html").render(values)), 560)


def pair_cell(path: Path, pair_id: str) -> str:
    """A preference pair from where its sides differ. Raises DataError for an unknown pair."""
    with contextlib.closing(Pages([path], ViewConfig.load())) as pages:
        rows = pages.stages.rows("pairs")
        numbers = rows.where("pair_id", pair_id)
        if not numbers:
            raise DataError.unknown_id(path, "pair_id", pair_id, rows.keys["pair_id"].to_pylist() if len(rows) else [])
        values = pages.pair_values(rows, numbers[0]) | {"score": pages.index.snapshot().score}
    return framed(_page(_template("pair_body.html").render(values)), 560)


def _template(name: str) -> Any:
    return environment({"rollout": lambda _: "", "comparison": lambda _: ""}).get_template(name)


def _page(body: str) -> str:
    style = (HERE / "static" / "view.css").read_text(encoding="utf-8")
    head = (
        f'<meta charset="utf-8"><meta http-equiv="content-security-policy" content="{_POLICY}"><style>{style}</style>'
    )
    return f"<!doctype html><html><head>{head}</head><body><main>{body}</main></body></html>"
