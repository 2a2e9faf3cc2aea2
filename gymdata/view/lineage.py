"""What was made from what: the run.json of every file here, and of all that they name as parents, as a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gymdata.errors import GymdataError, counted
from gymdata.store.paths import RUN_JSON, RunFacts, find_run_json, read_facts
from gymdata.store.stage_output import STAGES, kind_of_stage
from gymdata.texts import command_line
from gymdata.view.text import Values

#: Columns of the graph, left to right.
KINDS = ("sources", "rollouts", "checks", "data", "models")
#: The main table of a stage that writes several, and the noun for its rows if it differs from the table's name.
_MAIN = {"judge": "comparisons", "audit": "audit", "score": "scores", "collect": "rollouts", "record": "rollouts"}
_NOUN = {"audit": "rollouts", "scores": "rows", "annotations": "rows"}
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _PAD = 188, 58, 56, 18, 8


@dataclass
class Node:
    """One file or folder. ``corner``: left and upper edge in the picture."""

    key: str
    kind: str
    title: str
    detail: str
    href: str | None = None
    facts: RunFacts = field(default_factory=dict)
    parents: list[str] = field(default_factory=list)
    missing: bool = False
    corner: tuple[int, int] = (0, 0)

    @property
    def command(self) -> str:
        return command_line(self.facts.get("command") or [])


def graph(paths: Sequence[Path]) -> Values:
    """Nodes with their places, edges as paths of an SVG, and the size of the picture."""
    nodes: dict[str, Node] = {}
    for path in paths:
        inner = sorted(path.iterdir()) if path.is_dir() and (path / RUN_JSON).is_file() else []
        for folder in (path, *(stage for stage in inner if (stage / RUN_JSON).is_file())):
            _add(nodes, folder, in_paths=True)
    # A policy that was not trained from anything here, and missing parents, are in the first column.
    for node in nodes.values():
        leads_on = any(node.key in other.parents for other in nodes.values())
        if leads_on and not node.parents and (node.kind == "models" or (node.missing and not node.facts)):
            node.kind = "sources"
    columns: dict[str, list[Node]] = {kind: [] for kind in KINDS}
    for node in nodes.values():
        columns[node.kind].append(node)
    shown = [(kind, column) for kind, column in columns.items() if column]
    for x, (_, column) in enumerate(shown):
        for y, node in enumerate(column):
            node.corner = (_PAD + x * (_WIDTH + _GAP_X), 30 + y * (_HEIGHT + _GAP_Y))
    number = {key: n for n, key in enumerate(nodes)}
    edges = [
        (_curve(nodes[parent], node), number[parent], number[node.key])
        for node in nodes.values()
        for parent in node.parents
        if parent in nodes
    ]
    return {
        "nodes": list(nodes.values()),
        "edges": edges,
        "columns": [(kind, column[0].corner[0]) for kind, column in shown],
        "width": 2 * _PAD + len(shown) * (_WIDTH + _GAP_X) - _GAP_X,
        "height": 40 + max((len(column) for _, column in shown), default=0) * (_HEIGHT + _GAP_Y),
        "box": (_WIDTH, _HEIGHT),
    }


def _add(nodes: dict[str, Node], path: Path, *, in_paths: bool) -> str:
    """The node of a path, after those of its parents."""
    try:
        run_json = find_run_json(path)
        facts = read_facts(run_json) if run_json is not None else {}
    except (GymdataError, OSError) as error:
        run_json, facts = None, {"notes": [str(error)]}
    base = run_json.parent if run_json is not None and run_json.name == RUN_JSON else path
    key = str(base.resolve())
    if key in nodes:
        return key
    stage = str(facts.get("stage") or "")
    of_model = (base / "config.json").is_file()
    kind = STAGES.get(kind_of_stage(stage), ("", "models" if of_model else "rollouts"))[1]
    missing = not path.exists()
    title = Path(key).name or key
    nodes[key] = node = Node(
        key, kind, title, _detail(facts, stage, missing), _href(stage, in_paths), facts, missing=missing
    )
    for parent in facts.get("parents") or []:
        named = Path(str(parent.get("path") or ""))
        if str(named) not in ("", "."):
            origin = named if named.is_absolute() or named.exists() or run_json is None else run_json.parent / named
            node.parents.append(_add(nodes, origin, in_paths=False))
    for file in (facts.get("tasks") or {}).get("files") or []:
        source = Path(str(file.get("path")))
        leaf, detail = str(source.resolve()), f"xxh3 {file.get('xxh3', '?')}"
        nodes.setdefault(leaf, Node(leaf, "sources", source.name, detail, missing=not source.exists()))
        node.parents.append(leaf)
    model = (facts.get("identity") or {}).get("model") or (facts.get("config") or {}).get("model")
    if isinstance(model, str) and stage.startswith(("collect", "record", "finetune", "train")):
        # The policy that rollouts were sampled with, or that a training began from.
        if Path(model).is_dir():
            node.parents.append(_add(nodes, Path(model), in_paths=False))
        else:
            detail = "a served model, or one that is not on this machine"
            nodes.setdefault(f"model {model}", Node(f"model {model}", "models", model, detail))
            node.parents.append(f"model {model}")
    node.parents = [parent_key for parent_key in dict.fromkeys(node.parents) if parent_key != key]
    return key


def _detail(facts: RunFacts, stage: str, missing: bool) -> str:
    if missing:
        return "no longer there"
    counts = facts.get("counts") or {}
    steps = facts.get("steps")
    # How many rows the main table of a folder has; those of the tables beside it are not among them.
    rows: Counter[str] = Counter()
    for file in facts.get("files") or []:
        path = Path(str(file.get("path", "")))
        if path.suffix in (".parquet", ".jsonl"):
            rows["rollouts" if path.parent.name == "rollouts" else path.stem] += int(file.get("rows") or 0)
    main = _MAIN.get(stage) or next(iter(rows), "")
    n, name = rows[main], _NOUN.get(main, main)
    much = (f"{n:,} {name[:-1] if n == 1 and name.endswith('s') else name}" if n else "") or (
        f"{steps:,} steps" if isinstance(steps, int) else ""
    )
    if stage == "score" and isinstance(counts.get("scored"), int):
        # A table of scores has a row for each time that a rollout was scored, also without a value.
        much = counted(counts["scored"], "scored rollout")
    elif not much and isinstance(counts.get("completed"), int):
        much = counted(counts["completed"], "rollout")
    named = "" if much.endswith(f" {stage}") else stage or ("" if facts else "no run.json")
    return ", ".join(filter(None, [named, much]))


def _href(stage: str, in_paths: bool) -> str | None:
    """The page that shows it, when it is among the given paths."""
    if not in_paths:
        return None
    if stage.startswith(("train", "finetune")):
        return "/training"
    of_rollouts = STAGES.get(stage, ("", ""))[1] == "rollouts"
    return {"judge": "/comparisons", "pairs": "/pairs"}.get(stage, "/" if of_rollouts else None)


def _curve(parent: Node, child: Node) -> str:
    (x1, y1), (x2, y2) = parent.corner, child.corner
    y1, y2 = y1 + _HEIGHT // 2, y2 + _HEIGHT // 2
    if x2 > x1:
        x1 += _WIDTH
        if x2 - x1 <= _GAP_X:
            return f"M{x1},{y1} C{x1 + _GAP_X // 2},{y1} {x2 - _GAP_X // 2},{y2} {x2},{y2}"
        # Past the columns between in the lane beside the child's row, where no node is.
        lane = y2 + (1 if y1 >= y2 else -1) * (_HEIGHT + _GAP_Y) // 2
        bend, out = _GAP_X // 2, f"M{x1},{y1}"
        enter = f"C{x1 + bend},{y1} {x1 + bend},{lane} {x1 + _GAP_X},{lane}"
        return f"{out} {enter} H{x2 - _GAP_X} C{x2 - bend},{lane} {x2 - bend},{y2} {x2},{y2}"
    # Against the direction of reading: a model that sampled, or a parent of the same kind.
    left = min(x1, x2) - _GAP_X // 2
    if x1 == x2:
        return f"M{x1},{y1} C{left},{y1} {left},{y2} {x2},{y2}"
    x2 += _WIDTH
    low = max(y1, y2) + _HEIGHT // 2 + _GAP_Y // 2
    return f"M{x1},{y1} C{x1 - 30},{low} {x2 + 30},{low} {x2},{y2}"
