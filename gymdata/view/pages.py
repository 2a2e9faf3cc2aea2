"""What each page of ``gymdata view`` shows: an address to the name of its template and the values in it.

Invariant: pages only read; a page that is asked for something that is not there says what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from starlette.requests import Request
from starlette.responses import Response

from gymdata import __version__
from gymdata.engines.vocabulary import Vocabulary, find_tokenizer, load_vocabulary
from gymdata.errors import GymdataError
from gymdata.rollouts.violations import CODES
from gymdata.view.index import RolloutIndex, Snapshot
from gymdata.view.rollout import Tokens, shown_messages
from gymdata.view.selection import PAGE_GROUPS, PAGE_ROWS, Query, Selection, Selector, command_of
from gymdata.view.settings import ViewConfig
from gymdata.view.stages import Stages, facts_of
from gymdata.view.why import counts_over_run, why

Page = tuple[str, dict[str, Any]]
_TABLE = ["rollout_id", "run_id", "task_id", "group_id", "rollout_index", "status", "stop_reason", "reward", "rewards",
          "n_turns", "n_breaks", "n_context_tokens", "n_generated_tokens", "duration_s"]  # fmt: skip
#: Tokens that a break page shows before and after what differs.
_AROUND = 24
_MOST_SHOWN = 400


class Missing(Exception):  # noqa: N818 - an answer, not a defect
    """What an address names is not there."""


def json_answer(value: Any, status: int = 200) -> Response:
    """JSON; numbers that it has no form for are null."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=str), status, media_type="application/json"
    )


class Pages:
    """All pages over one set of paths."""

    def __init__(self, paths: Sequence[Path], config: ViewConfig) -> None:
        self.config = config
        self.index = RolloutIndex(paths)
        self.stages = Stages(self.index.paths)
        self.selector = Selector(self.index)

    def close(self) -> None:
        self.index.close()

    def html(self) -> Mapping[str, Callable[[Request], Page]]:
        """Address → page."""
        return {"/": self.rollouts, "/rollout": self.rollout, "/break": self.break_}

    def data(self) -> Mapping[str, Callable[[Request], Response]]:
        """Address → what scripts fetch."""
        return {
            "/data/state": self.answering(self.state),
            "/data/tokens": self.answering(self.tokens),
            "/data/token": self.answering(self.token),
            "/data/why": self.answering(self.why),
        }

    def answering(self, make: Callable[[Request], Any]) -> Callable[[Request], Response]:
        """``make`` as an endpoint: its value as JSON, an error as an object with ``error``."""

        def answer(request: Request) -> Response:
            try:
                return json_answer(make(request))
            except Missing as missing:
                return json_answer({"error": str(missing)}, 404)
            except (GymdataError, OSError) as error:
                return json_answer({"error": str(error)}, 422)

        return answer

    def around(self, request: Request, *, bare: bool = False) -> dict[str, Any]:
        """What every page has: navigation, the state of the data, the color scheme."""
        snapshot = self.index.snapshot()
        theme = request.cookies.get("theme", "")
        return {
            "bare": bare,
            "theme": theme if theme in ("light", "dark") else "",
            "version": snapshot.version,
            "growing": snapshot.growing,
            "problems": [] if bare else snapshot.problems,
            "paths": [str(path) for path in self.index.paths],
            "here": request.url.path,
            "there": {} if bare else self.stages.counts(),
            "gymdata_version": __version__,
        }

    def state(self, _: Request) -> dict[str, Any]:
        """What a page asks for now and then: whether something has changed."""
        snapshot = self.index.snapshot()
        return {"version": snapshot.version, "growing": snapshot.growing, "rollouts": len(snapshot)}

    # -- rollouts ------------------------------------------------------------------------------------------------

    def rollouts(self, request: Request) -> Page:
        query = Query.of(request.query_params)
        snapshot = self.index.snapshot()
        selection = self.selector.select(snapshot, query)
        values = {
            "query": query,
            "selection": selection,
            "total": len(snapshot),
            "statuses": sorted(pc.unique(snapshot.table["status"]).to_pylist()),
            "runs": sorted(pc.unique(snapshot.table["run_id"]).to_pylist()),
            "command": command_of(self.index.paths, query) if query.conditions() else "",
            "highest": max((bar.count for bar in selection.bars), default=1),
        }
        values |= (
            self._by_group(snapshot, query, selection) if query.groups else self._by_row(snapshot, query, selection)
        )
        return "rollouts.html", values

    def _by_row(self, snapshot: Snapshot, query: Query, selection: Selection) -> dict[str, Any]:
        pages = max(1, -(-len(selection.rows) // PAGE_ROWS))
        page = min(query.page, pages)
        rows = selection.rows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
        listed = _rows_of(snapshot, rows)
        return {"rows": listed, "page": page, "pages": pages, "scale": _scale(snapshot)}

    def _by_group(self, snapshot: Snapshot, query: Query, selection: Selection) -> dict[str, Any]:
        names = snapshot.table["group_id"].take(pa.array(selection.rows)).combine_chunks().dictionary_encode()
        codes = names.indices.to_numpy(zero_copy_only=False)
        pages = max(1, -(-len(names.dictionary) // PAGE_GROUPS))
        page = min(query.page, pages)
        first, last = (page - 1) * PAGE_GROUPS, page * PAGE_GROUPS
        here = np.flatnonzero((codes >= first) & (codes < last))
        listed = _rows_of(snapshot, selection.rows[here])
        groups: dict[int, list[dict[str, Any]]] = {}
        for code, row in zip(codes[here].tolist(), listed, strict=True):
            groups.setdefault(code, []).append(row)
        shown = [_group(rows) for _, rows in sorted(groups.items())]
        return {"groups": shown, "page": page, "pages": pages, "scale": _scale(snapshot)}

    # -- one rollout ---------------------------------------------------------------------------------------------

    def row_of(self, request: Request) -> tuple[Snapshot, int]:
        """The rollout that an address names with ``id``: a whole id, or a beginning that fits one only."""
        given = request.query_params.get("id", "")
        snapshot = self.index.snapshot()
        if not given:
            raise Missing("the address names no rollout: it ends with ?id=ROLLOUT_ID")
        number = snapshot.find(given)
        if number is None:
            raise Missing(f"there is no rollout {given!r} among the {len(snapshot):,} here")
        return snapshot, number

    def rollout(self, request: Request) -> Page:
        snapshot, number = self.row_of(request)
        row = self.index.row(snapshot, number)
        mates = snapshot.where("group_id", row["group_id"])
        place = mates.index(number)
        ids = snapshot.table["rollout_id"]
        fault, breaks, tokens = "", [], None
        try:
            tokens = Tokens(row, self.stages)
            breaks = [r for r in tokens.relations(self.vocabulary(row)) if r.code != "T211"]
        except GymdataError as error:
            fault = str(error)
        return "rollout.html", {
            "row": row,
            "messages_list": shown_messages(row),
            "rewards": [(r["name"], r["value"]) for r in row["rewards"]],
            "place": place + 1,
            "mates": [str(ids[n].as_py()) for n in mates],
            "before": ids[mates[place - 1]].as_py() if place else None,
            "after": ids[mates[place + 1]].as_py() if place + 1 < len(mates) else None,
            "fault": fault,
            "breaks": breaks,
            "codes": CODES,
            "turns": len(row["turns"]),
            "has": _colors(tokens),
            "notes": tokens.notes if tokens is not None else [],
            "text_known": self.vocabulary(row) is not None,
        }

    def tokens(self, request: Request) -> dict[str, Any]:
        """All tokens of a rollout."""
        snapshot, number = self.row_of(request)
        row = self.index.row(snapshot, number)
        return Tokens(row, self.stages).data(self.vocabulary(row))

    def token(self, request: Request) -> dict[str, Any]:
        """What else was likely at one sampled token."""
        snapshot, number = self.row_of(request)
        row = self.index.row(snapshot, number)
        tokens, vocabulary = Tokens(row), self.vocabulary(row)
        turn, k = _whole(request, "turn", len(tokens.turns)), _whole(request, "k", 1 << 30)
        listed = tokens.alternatives(turn, k)
        return {"alternatives": [{**one, "text": _shown(vocabulary, one["id"])} for one in listed]}

    def why(self, request: Request) -> dict[str, Any]:
        """Why one sampled token is trained."""
        snapshot, number = self.row_of(request)
        row = self.index.row(snapshot, number)
        tokens, vocabulary = Tokens(row, self.stages), self.vocabulary(row)
        turn = _whole(request, "turn", len(tokens.turns))
        k = _whole(request, "k", len(tokens.turns[turn]["generation_token_ids"]))
        found = why(tokens, row, turn, k, snapshot)
        return found | {"text": _shown(vocabulary, found["id"]), "run": counts_over_run(tokens)}

    def vocabulary(self, row: Mapping[str, Any]) -> Vocabulary | None:
        """What gives this rollout's ids their text."""
        if self.config.tokenizer is not None:
            return load_vocabulary(self.config.tokenizer)
        for path in self.index.paths:
            facts = facts_of(path)
            if len(self.index.paths) == 1 or facts.get("run_id") == row["run_id"]:
                file = find_tokenizer(facts)
                if file is not None:
                    return load_vocabulary(file)
        file = find_tokenizer({"policy": row["policy"]})
        return load_vocabulary(file) if file is not None else None

    # -- a break -------------------------------------------------------------------------------------------------

    def break_(self, request: Request) -> Page:
        snapshot, number = self.row_of(request)
        row = self.index.row(snapshot, number)
        tokens, vocabulary = Tokens(row), self.vocabulary(row)
        turn = _whole(request, "turn", len(tokens.turns))
        found = [r for r in tokens.relations(vocabulary) if r.turn == turn and r.code != "T211"]
        if not found:
            raise Missing(f"turn {turn} of this rollout continues what came before")
        relation = found[0]
        parent = int(tokens.turns[turn]["parent"])
        before = np.concatenate((tokens.prompts[parent], tokens.turns[parent]["generation_token_ids"]))
        prompt = tokens.prompts[turn]
        spans = (relation.evidence or {}).get("spans", [])
        generated = np.zeros(len(before), np.bool_)
        generated[len(tokens.prompts[parent]) :] = True
        return "break.html", {
            "row": row,
            "relation": relation,
            "turn": turn,
            "parent": parent,
            "code": CODES[relation.code],
            "explanation": (relation.evidence or {}).get("explanation", relation.detail),
            "before": _side(before, [s["before"] for s in spans], vocabulary, generated),
            "prompt": _side(prompt, [s["prompt"] for s in spans], vocabulary, None),
            "texts": [(_text_of(s["before"]), _text_of(s["prompt"])) for s in spans[:20]],
            "n_spans": len(spans),
            "kept": int(tokens.turns[turn]["prefix_length"]),
            "before_length": len(before),
            "prompt_length": len(prompt),
            "text_known": vocabulary is not None,
        }


def _rows_of(snapshot: Snapshot, rows: Any) -> list[dict[str, Any]]:
    some: list[dict[str, Any]] = snapshot.table.select(_TABLE).take(pa.array(rows, pa.int64())).to_pylist()
    for row in some:
        row["parts"] = [(part["name"], part["value"]) for part in row.pop("rewards")]
    return some


def _scale(snapshot: Snapshot) -> tuple[float, float]:
    """The least and the highest reward of all, at least 0 to 1."""
    found = pc.min_max(snapshot.table["reward"]).as_py()
    low, high = found["min"], found["max"]
    if low is None or not np.isfinite([low, high]).all():
        return 0.0, 1.0
    return min(0.0, low), max(1.0, high)


def _group(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "id": rows[0]["group_id"],
        "task": rows[0]["task_id"],
        "rows": rows,
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "mixed": len(set(rewards)) > 1,
    }


def _colors(tokens: Tokens | None) -> dict[str, bool]:
    """What tokens can be colored by, and what they cannot."""
    if tokens is None:
        return {}
    has_text = any(len(turn["generation_token_ids"]) for turn in tokens.turns)
    return {
        "logprob": has_text,
        "entropy": any(v is not None for v in tokens.entropy),
        "advantage": any(v is not None for v in tokens.advantages),
        "mask": True,
        "ratio": any(v is not None for v in tokens.reference),
        "turn": True,
    }


def _whole(request: Request, name: str, below: int) -> int:
    """A whole number of an address."""
    text = request.query_params.get(name, "")
    if not text.isdecimal() or len(text) > 12 or int(text) >= below:
        raise Missing(f"{name}: got {text!r}, expected a whole number below {below:,}")
    return int(text)


def _shown(vocabulary: Vocabulary | None, token: int) -> str:
    from gymdata.view.text import visible

    return visible(vocabulary.text(token)) if vocabulary is not None else str(token)


def _text_of(side: Mapping[str, Any]) -> str | None:
    from gymdata.view.text import visible

    return None if side["text"] is None else visible(side["text"])


def _side(
    ids: Any, spans: Sequence[Mapping[str, Any]], vocabulary: Vocabulary | None, generated: Any
) -> list[dict[str, Any]]:
    """Tokens of one side of a break around its differing spans; long agreement between two spans is left out."""
    marked = np.zeros(len(ids), np.bool_)
    shown = np.zeros(len(ids), np.bool_)
    for span in spans:
        marked[span["start"] : span["end"]] = True
        shown[max(0, span["start"] - _AROUND) : span["end"] + _AROUND] = True
        shown[span["start"] + _MOST_SHOWN : span["end"]] = False
    special = vocabulary.special if vocabulary is not None else frozenset()
    out: list[dict[str, Any]] = []
    hidden = 0
    for at in range(len(ids)):
        if not shown[at]:
            hidden += 1
            continue
        if hidden:
            out.append({"gap": hidden})
            hidden = 0
        token = int(ids[at])
        text = _shown(vocabulary, token).replace("\n", "⏎\n")
        out.append({"at": at, "id": token, "text": text, "differs": bool(marked[at]), "special": token in special,
                    "sampled": generated is not None and bool(generated[at])})  # fmt: skip
        if len(out) > 4 * _MOST_SHOWN:
            break
    if hidden := hidden + (len(ids) - at - 1 if len(ids) else 0):
        out.append({"gap": hidden})
    return out
