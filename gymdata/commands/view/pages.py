"""The pages of ``gymdata view``: an address to the name of its template and the values in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from gymdata import __version__
from gymdata.checks.breaks import Reading
from gymdata.checks.violations import BREAKS, CODES
from gymdata.commands.report.drawing import svg
from gymdata.commands.show.conversations import conversations_of
from gymdata.commands.show.rollout import messages_of, violations
from gymdata.commands.view import comparing, training
from gymdata.commands.view.answers import Missing, json_answer
from gymdata.commands.view.evidence.facets import facets, task_fields
from gymdata.commands.view.evidence.lines import TEXTS, texts_of
from gymdata.commands.view.evidence.listing import (
    LISTED,
    by_group,
    by_row,
    finite_rewards,
    listed_rows,
    run_names,
    scale_of,
)
from gymdata.commands.view.evidence.rollout import Tokens, both_sides, text_of
from gymdata.commands.view.evidence.selection import (
    COLUMNS,
    Query,
    command_of,
    compare_runs,
    page_of,
    page_slice,
    select,
)
from gymdata.commands.view.evidence.tables import Rows, Snapshot, Tables, facts_of
from gymdata.commands.view.settings import ViewConfig
from gymdata.commands.view.text import Values
from gymdata.commands.view.why import why, why_in_pair
from gymdata.errors import GymdataError
from gymdata.models.vocabulary import Vocabulary, find_tokenizer, load_vocabulary
from gymdata.rollouts.messages import RolloutRow
from gymdata.store.lineage import vocabulary as vocabulary_size

Page = tuple[str, Values]


class Pages:
    """All pages over one set of paths."""

    def __init__(self, paths: Sequence[Path], config: ViewConfig) -> None:
        self.config = config
        self.tables = Tables(paths)
        self._verdicts: comparing.Verdicts | None = None

    def html(self) -> Mapping[str, Callable[[Request], Page]]:
        """Address → page."""
        return {
            "/": self.rollouts,
            "/rollout": self.rollout,
            "/break": self.break_,
            "/group": self.group,
            "/pairs": self.pairs,
            "/pair": self.pair,
            "/comparisons": self.comparisons,
            "/comparison": self.comparison,
            "/training": self.training,
        }

    def data(self) -> Mapping[str, Callable[[Request], Response]]:
        """Address → what scripts fetch."""
        return {
            "/data/state": self.answering(self.state),
            "/data/tokens": self.answering(self.tokens),
            "/data/token": self.answering(self.token),
            "/data/why": self.answering(self.why),
            "/data/why-in-pair": self.answering(self.why_in_pair),
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

    def around(self, request: Request, *, bare: bool = False) -> Values:
        """Values of every page: navigation, the state of the data, the color scheme."""
        snapshot = self.tables.snapshot()
        theme = request.cookies.get("theme", "")
        return {
            "bare": bare,
            "theme": theme if theme in ("light", "dark") else "",
            "version": self.version(request.url.path),
            "growing": snapshot.growing,
            "problems": [] if bare else snapshot.problems,
            "repeated": [] if bare else snapshot.repeated,
            "score": snapshot.score,
            "paths": [str(path) for path in self.tables.paths],
            "here": request.url.path,
            "there": {} if bare else {name: self.tables.has(name) for name in ("pairs", "comparisons")},
            "gymdata_version": __version__,
        }

    def state(self, request: Request) -> Values:
        """Polled by pages: whether something has changed."""
        page, growing = request.query_params.get("page", "/"), self.tables.snapshot().growing
        return {"version": self.version(page), "growing": growing}

    def version(self, page: str) -> str:
        """Another one where what a page shows may have changed."""
        if page != "/training":
            return str(self.tables.snapshot().version)
        return "-".join(str(file.stat().st_size) for file in training.find_metrics(self.tables.paths))

    # -- rollouts ------------------------------------------------------------------------------------------------

    def rollouts(self, request: Request) -> Page:
        snapshot = self.tables.snapshot()
        runs = run_names(snapshot)
        offered = [name for name in COLUMNS if name != "run" or len(runs) > 1]
        offered += [field.name for field in task_fields(snapshot)]
        query = Query.of(request.query_params, offered)
        selection = select(snapshot, query)
        rows = selection.rows
        return "rollouts.html", {
            "query": query,
            "selection": selection,
            "total": len(snapshot),
            "statuses": sorted(pc.unique(snapshot.table["status"]).to_pylist()),
            "runs": runs,
            "compared": compare_runs(snapshot, rows),
            "outcomes": query.outcomes(),
            "command": command_of(snapshot, query, selection),
            "facets": facets(snapshot, query, rows),
            "columns": offered,
            "highest": max((bar.count for bar in selection.bars), default=1),
            "scale": scale_of(snapshot),
            **(by_group if query.groups else by_row)(snapshot, query, rows),
        }

    # -- one rollout ---------------------------------------------------------------------------------------------

    def row_of(self, request: Request) -> RolloutRow:
        snapshot, number = self.named_by(request)
        return snapshot.row(number)

    def named_by(self, request: Request) -> tuple[Snapshot, int]:
        """The rollout that an address names with ``id``."""
        if not (rollout_id := request.query_params.get("id", "")):
            raise Missing("the address names no rollout: it ends with ?id=ROLLOUT_ID")
        snapshot = self.tables.snapshot()
        number = snapshot.find(rollout_id)
        if number is None:
            raise Missing(f"there is no rollout {rollout_id!r} among the {len(snapshot):,} here")
        return snapshot, number

    def rollout(self, request: Request) -> Page:
        snapshot, number = self.named_by(request)
        values = self.rollout_values(snapshot, number)
        indices, ids = snapshot.table["rollout_index"], snapshot.table["rollout_id"]
        group = snapshot.where("group_id", values["row"]["group_id"])
        mates = sorted(group, key=lambda mate: indices[mate].as_py())
        place = mates.index(number)
        before, after = mates[place - 1 : place], mates[place + 1 : place + 2]
        return "rollout.html", {
            "it": values,
            "place": place + 1,
            "mates": len(mates),
            "before": ids[before[0]].as_py() if before else None,
            "after": ids[after[0]].as_py() if after else None,
        }

    def rollout_values(self, snapshot: Snapshot, number: int) -> Values:
        """What is shown of one rollout. ``rewards``: its other scores by name; ``fault``: why its tokens are not shown."""
        row = snapshot.row(number)
        vocabulary = self.vocabulary(row)
        (batch,) = snapshot.whole(number).combine_chunks().to_batches()
        reading = Reading(vocabulary.decode, vocabulary.special) if vocabulary is not None else None
        faults = violations(batch, 0, vocabulary_size(snapshot.file(number)), lambda: reading)
        parts = [(part["name"], part["value"]) for part in row["rewards"]]
        scores = dict([("reward", batch.column("reward")[0].as_py()), *(parts if len(parts) > 1 else [])])
        rows = self.tables.rows("scores")
        for n in rows.where("rollout_id", row["rollout_id"]):
            # Scoring again adds rows: the last one counts.
            scores[rows.table["name"][n].as_py()] = rows.table["value"][n].as_py()
        scores.pop(snapshot.score or "reward", None)
        values: Values = {
            "row": row,
            # Before the lists of the turns are made into arrays.
            "conversations": conversations_of(row),
            "rewards": list(scores.items()),
            # Breaks have lines of their own, and missing tokens are shown otherwise.
            "violations": [
                v for v in faults if v.code not in BREAKS and (v.severity == "error" or v.code[0] not in "TR")
            ],
            "reference": texts_of([], row["task"]).reference,
            "run": run_names(snapshot, several=True).get(row["run_id"]),
            "text_known": vocabulary is not None,
            "notes": [],
            "tokens": None,
            "breaks": [],
            "fault": "",
        }
        try:
            tokens = Tokens(row, self.tables)
            breaks = [relation for relation in tokens.relations(vocabulary) if relation.code != "T211"]
            return values | {"tokens": tokens, "notes": tokens.notes, "breaks": breaks}
        except GymdataError as error:
            return values | {"fault": str(error)}

    def tokens(self, request: Request) -> Values:
        row = self.row_of(request)
        return Tokens(row, self.tables).data(self.vocabulary(row))

    def token(self, request: Request) -> Values:
        """The alternatives of one sampled token."""
        row = self.row_of(request)
        tokens, vocabulary = Tokens(row), self.vocabulary(row)
        turn, k = _whole(request, "turn", len(tokens.turns)), _whole(request, "k", 1 << 30)
        return {"alternatives": [{**a, "text": text_of(vocabulary, a["id"])} for a in tokens.alternatives(turn, k)]}

    def why(self, request: Request) -> Values:
        """Why one sampled token is trained."""
        snapshot, number = self.named_by(request)
        row = snapshot.row(number)
        tokens, vocabulary = Tokens(row, self.tables), self.vocabulary(row)
        turn = _whole(request, "turn", len(tokens.turns))
        k = _whole(request, "k", len(tokens.turns[turn]["generation_token_ids"]))
        facts = why(tokens, row, turn, k, snapshot)
        return facts | {"text": text_of(vocabulary, facts["id"])}

    def why_in_pair(self, request: Request) -> Values:
        """How one token of a pair's completion is trained."""
        rows, side = self.tables.rows("pairs"), request.query_params.get("side", "")
        numbers = _named(rows, "pair_id", request)
        if not numbers or side not in ("chosen", "rejected"):
            raise Missing("the address names no pair that is here, or no side of it")
        (row,) = rows.read(numbers[:1]).to_pylist()
        return why_in_pair(row, side, _whole(request, "k", len(row[f"{side}_ids"])))

    def vocabulary(self, row: RolloutRow) -> Vocabulary | None:
        """The vocabulary that decodes this rollout's ids."""
        if self.config.tokenizer is not None:
            return load_vocabulary(self.config.tokenizer)
        for path in self.tables.paths:
            facts = facts_of(path)
            if len(self.tables.paths) == 1 or facts.get("run_id") == row["run_id"]:
                file = find_tokenizer(facts)
                if file is not None:
                    return load_vocabulary(file)
        file = find_tokenizer({"policy": row["policy"]})
        return load_vocabulary(file) if file is not None else None

    # -- a break -------------------------------------------------------------------------------------------------

    def break_(self, request: Request) -> Page:
        row = self.row_of(request)
        tokens, vocabulary = Tokens(row), self.vocabulary(row)
        turn = _whole(request, "turn", len(tokens.turns))
        relation = next((r for r in tokens.relations(vocabulary) if r.turn == turn and r.code != "T211"), None)
        if relation is None:
            raise Missing(f"turn {turn} of this rollout continues what came before")
        values = both_sides(tokens, relation, vocabulary)
        return "break.html", {**values, "row": row, "code": CODES[relation.code], "text_known": vocabulary is not None}

    # -- side by side --------------------------------------------------------------------------------------------

    def group(self, request: Request) -> Page:
        group_id = request.query_params.get("id", "")
        snapshot = self.tables.snapshot()
        mates = snapshot.where("group_id", group_id)
        if not mates:
            raise Missing(f"there is no group {group_id!r} among the {len(snapshot):,} rollouts here")
        return "group.html", {"group": self.group_values(snapshot, mates), "scale": scale_of(snapshot)}

    def group_values(self, snapshot: Snapshot, mates: list[int]) -> Values:
        """What is shown of some rollouts of a group."""
        texts = snapshot.read(mates, TEXTS).to_pylist()
        listed = snapshot.table.select(LISTED).take(pa.array(mates)).to_pylist()
        rewards = finite_rewards(snapshot, mates)
        return {
            **comparing.group_cards([row | text for row, text in zip(listed, texts, strict=True)]),
            "task": snapshot.table["task_id"][mates[0]].as_py(),
            "whole": len(snapshot.where("group_id", snapshot.table["group_id"][mates[0]].as_py())),
            "run": run_names(snapshot, several=True).get(snapshot.table["run_id"][mates[0]].as_py()),
            "reference": texts_of([], texts[0]["task"]).reference,
            "mean": float(np.mean(rewards)) if rewards else None,
            "std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        }

    def pairs(self, request: Request) -> Page:
        sort = request.query_params.get("sort", "")
        rows = self.tables.rows("pairs")
        number = _chosen(request, len(rows.files))
        values = comparing.list_pairs(rows, number, page_of(request.query_params), sort)
        snapshot = self.tables.snapshot()
        ids = {row[f"{side}_rollout_id"] for row in values["rows"] for side in ("chosen", "rejected")}
        numbers = [row for rollout in ids if (row := snapshot.find(rollout)) is not None]
        lines = {row["rollout_id"]: row["line"] for row in listed_rows(snapshot, numbers)}
        return "pairs.html", values | {"sort": sort, "lines": lines}

    def pair(self, request: Request) -> Page:
        pair_id = request.query_params.get("id", "")
        rows = self.tables.rows("pairs")
        numbers = _named(rows, "pair_id", request)
        if not numbers:
            raise Missing(f"there is no pair {pair_id!r} among the {len(rows):,} here")
        file = rows.file_number(numbers[0])
        near = [n if n in rows.span(file) else None for n in (numbers[0] - 1, numbers[0] + 1)]
        neighbours = [None if n is None else rows.table["pair_id"][n].as_py() for n in near]
        return "pair.html", {"one": self.pair_values(rows, numbers[0]), "neighbours": neighbours, "number": file}

    def pair_values(self, rows: Rows, number: int) -> Values:
        (row,) = rows.read([number]).to_pylist()
        snapshot = self.tables.snapshot()
        ids = (row["chosen_rollout_id"], row["rejected_rollout_id"])
        indices = [snapshot.find(rollout) for rollout in ids]
        source = {"run_id": row["run_id"], "policy": ""}
        if indices[0] is not None:
            source["policy"] = snapshot.table["policy"][indices[0]].as_py()
        listed: list[Values] = []
        if (comparisons := self.tables.rows("comparisons")) and len(comparisons):
            verdicts = self.verdicts(comparisons, snapshot)
            second = comparisons.table["rollout_j"]
            sides = (ids, ids[::-1])
            numbers = [n for i, j in sides for n in comparisons.where("rollout_i", i) if second[n].as_py() == j]
            listed = verdicts.listed(numbers)
        values = comparing.pair_page(row, self.vocabulary(source))
        for side, rollout, n in zip(values["sides"].values(), ids, indices, strict=True):
            side |= {"id": rollout, "known": n is not None, "reward": None if n is None else snapshot.reward(n)}
        return values | {"verdicts": listed, "file": str(rows.file(number))}

    def verdicts(self, rows: Rows, snapshot: Snapshot) -> comparing.Verdicts:
        """All comparisons with what they decided, made once for one state of the files."""
        verdicts = self._verdicts
        if verdicts is None or verdicts.rows is not rows or verdicts.snapshot is not snapshot:
            self._verdicts = verdicts = comparing.Verdicts(rows, snapshot)
        return verdicts

    def comparisons(self, request: Request) -> Page:
        rows = self.tables.rows("comparisons")
        verdicts = self.verdicts(rows, self.tables.snapshot())
        show, task = request.query_params.get("show", "all"), request.query_params.get("task", "").strip()
        numbers = verdicts.select(show, task)
        page, pages, on_page = page_slice(page_of(request.query_params), len(numbers), comparing.PAGE)
        return "comparisons.html", {
            "show": show,
            "task": task,
            "figures": verdicts.figures(),
            "rows": verdicts.listed(numbers[on_page].tolist()),
            "count": len(numbers),
            "page": page,
            "pages": pages,
            "judges": pc.unique(rows.table["judge"]).to_pylist(),
            "outcomes": verdicts.outcomes(),
            "totals": {name: int(mask.sum()) for name, mask in verdicts.tabs().items()},
        }

    def comparison(self, request: Request) -> Page:
        comparison_id = request.query_params.get("id", "")
        rows, snapshot = self.tables.rows("comparisons"), self.tables.snapshot()
        numbers = _named(rows, "comparison_id", request)
        if not numbers:
            raise Missing(f"there is no comparison {comparison_id!r} among the {len(rows):,} here")
        verdicts = self.verdicts(rows, snapshot)
        (row,) = rows.read(numbers[:1]).to_pylist()
        sides = []
        for name in ("rollout_i", "rollout_j"):
            number = snapshot.find(row[name])
            if number is None:
                sides.append({"id": row[name], "messages": None, "reward": None, "index": None})
                continue
            (said,) = snapshot.read([number], ["messages"])["messages"].to_pylist()
            start = comparing.completion(said)
            prompt, answer = (messages_of(part, ()) for part in (said[:start], said[start:]))
            facts = {"id": row[name], "reward": snapshot.reward(number), "messages": answer, "prompt": prompt}
            sides.append(facts | {"index": snapshot.table["rollout_index"][number].as_py()})
        (listed,) = verdicts.listed(numbers[:1])
        swapped = [listed["swapped"]] if listed["swapped"] >= 0 else []
        return "comparison.html", {
            "row": row | listed,
            "sides": sides,
            "other": verdicts.listed(swapped)[0] if swapped else None,
            "other_raw": rows.read(swapped, ["raw"])["raw"][0].as_py() if swapped else None,
        }

    # -- the whole -----------------------------------------------------------------------------------------------

    def training(self, request: Request) -> Page:
        files = training.find_metrics(self.tables.paths)
        number = _chosen(request, len(files))
        charts = [chart for file in files[number : number + 1] for chart in training.curves(file)]
        return "training.html", {
            "trainings": [training.described(file) for file in files],
            "number": number,
            "curves": [(chart.title, Markup(svg(chart))) for chart in charts],
        }


def _named(rows: Rows, column: str, request: Request) -> list[int]:
    """The rows of the address's ``id``, those of its file ``n`` first: two judges, or files of pairs, use the same ids."""
    file = request.query_params.get("n")
    return sorted(
        rows.where(column, request.query_params.get("id", "")), key=lambda n: str(rows.file_number(n)) != file
    )


def _chosen(request: Request, below: int) -> int:
    text = request.query_params.get("n", "0")
    return min(int(text), max(below - 1, 0)) if text.isdecimal() and len(text) < 9 else 0


def _whole(request: Request, name: str, below: int) -> int:
    """A whole number of an address."""
    text = request.query_params.get(name, "")
    if not text.isdecimal() or len(text) > 12 or int(text) >= below:
        raise Missing(f"{name}: got {text!r}, expected a whole number below {below:,}")
    return int(text)
