"""``gymdata view --export``: a selection as one HTML file that needs no server and no network.

Invariants: the file holds what the pages show of these rollouts, evidence as JSON; its policy allows exactly its own script
and style, by their hashes; data in it is text or JSON, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from gymdata import __version__
from gymdata.commands.report.rollouts import codes_of
from gymdata.commands.report.sampling import sample, sampled_as
from gymdata.commands.view.app import HERE, environment
from gymdata.commands.view.evidence.listing import listed_rows, run_names, scale_of
from gymdata.commands.view.evidence.selection import Query, command_of, select
from gymdata.commands.view.pages import Pages
from gymdata.commands.view.settings import ViewConfig
from gymdata.errors import RefusedError, StoreError, UsageError, option
from gymdata.store.paths import local_output
from gymdata.store.run_json import replacing


def export(paths: Sequence[Path], config: ViewConfig) -> str:
    """Write the file that ``config.export`` names. Returns a line that says what is in it.

    Raises UsageError for a condition that is wrong, RefusedError when no rollout passes it, StoreError when another
    file is there.
    """
    assert config.export is not None
    target = local_output(config.export)
    if target.suffix not in (".html", ".htm"):
        raise UsageError.bad_value("--export", target.name, "a name ending in .html")
    text, sampled = _page(Pages(paths, config), config)
    if target.exists() and not config.overwrite and target.read_bytes() != text.encode():
        fault = f"{target}: is there already, and not the same page"
        raise StoreError(fault, hint=f"{option('overwrite', True)} replaces it; another file keeps both")
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return f"{sampled}, in {target}, {target.stat().st_size / 1e6:.1f} MB"


def _page(pages: Pages, config: ViewConfig) -> tuple[str, str]:
    """The file, and which rollouts are in it."""
    snapshot = pages.tables.snapshot()
    query = Query(where=config.where or "")
    selection = select(snapshot, query)
    if selection.error is not None:
        raise UsageError(f"--where: {selection.error}")
    if snapshot.problems or not len(selection.rows):
        none = (
            f"none of the {len(snapshot):,} rollouts passes --where"
            if len(snapshot)
            else "there are no rollouts to show"
        )
        raise RefusedError("; ".join(snapshot.problems) or none)
    selected = snapshot.table.select(["reward", "group_id"]).take(pa.array(selection.rows))
    rewards, groups_of_rows = pc.fill_null(selected["reward"], math.nan).to_numpy(), codes_of(selected["group_id"])[0]
    numbers = selection.rows[sample(config.sample, config.limit, rewards, groups_of_rows)].tolist()
    sampled = sampled_as(config.sample, len(numbers), len(selection.rows), snapshot.score)
    shown = [pages.rollout_values(snapshot, number) for number in numbers]
    evidence = [None if it["fault"] else it["tokens"].data(pages.vocabulary(it["row"])) for it in shown]
    # The groups of which several rollouts are exported.
    members: dict[str, list[int]] = {}
    for number in numbers:
        members.setdefault(snapshot.table["group_id"][number].as_py(), []).append(number)
    several = {group: mates for group, mates in members.items() if len(mates) > 1}
    groups = [pages.group_values(snapshot, mates) for mates in several.values()]
    group_anchors = {group: f"#g{n}" for n, group in enumerate(several)}
    anchors = {it["row"]["rollout_id"]: f"#r{n}" for n, it in enumerate(shown)}
    # The pairs of which both sides are exported.
    pair_rows = pages.tables.rows("pairs")
    sides = (pair_rows.table[f"{side}_rollout_id"].to_pylist() for side in ("chosen", "rejected"))
    pair_numbers = [n for n, pair in enumerate(zip(*sides, strict=True)) if anchors.keys() >= set(pair)]
    pairs = [pages.pair_values(pair_rows, n) for n in pair_numbers[: config.limit]]
    pairs_left = max(0, len(pair_numbers) - config.limit)
    script = "\n".join((HERE / "static" / name).read_text(encoding="utf-8") for name in ("tokens.js", "exported.js"))
    style = (HERE / "static" / "view.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    text = (
        environment({"rollout": anchors, "group": group_anchors, "comparison": {}})
        .get_template("export.html")
        .render(
            rows=listed_rows(snapshot, numbers),
            shown=shown,
            groups=groups,
            runs=run_names(snapshot, several=True),
            pairs=pairs,
            pairs_left=pairs_left,
            sampled=sampled,
            selection=selection,
            of=[path.name for path in snapshot.paths],
            score=snapshot.score,
            command=command_of(snapshot, query, selection),
            scale=scale_of(snapshot),
            policy=policy,
            script=Markup(script),
            style=Markup(style),
            evidence=htmlsafe_json_dumps(evidence, lambda value: orjson.dumps(value).decode()),
            gymdata_version=__version__,
        )
    )
    return text, sampled


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
