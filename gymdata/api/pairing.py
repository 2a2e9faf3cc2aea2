"""``gymdata pairs``: scored rollouts in, a pairs file out, and an account of what became of every candidate.

What always holds: the ids, masks and log-probs of a pair are the saved ones; what was left out is counted and said; the
same rollouts and settings give the same file; the output's run.json leads back to the rollouts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.config.pairs import PairsConfig
from gymdata.core import chains, pairs
from gymdata.core.schema import PAIRS, ROLLOUTS, SCORES
from gymdata.errors import DataError, RefusedError, StoreError, UsageError
from gymdata.store import hash_file, read_run_json, read_table, resolve, scan_batches, write_run_json, write_table
from gymdata.store.paths import find_run_json
from gymdata.store.run_json import differences

_SCALARS = (
    "rollout_id", "run_id", "task_id", "group_id", "rollout_index", "policy_hash", "policy_version", "status", "reward",
    "rewards", "temperature", "n_turns", "n_breaks", "n_generated_tokens",
)  # fmt: skip
#: Rollouts whose tokens are in memory at a time while they are turned into flat columns.
_BATCH_ROWS = 4_096
_LISTS = ("prompt_ids", "completion_ids", "completion_mask", "completion_logprobs")

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True, slots=True)
class PairsReport:
    """What ``build_pairs`` made. ``table``: the pairs (of the training side); ``heldout``: those of the held-out tasks.

    ``files`` are the written files by side, empty when nothing was to be written; ``left_out`` counts rollouts that were
    never candidates (breaks, branches); ``counts`` accounts for everything else.
    """

    table: pa.Table
    heldout: pa.Table | None
    counts: pairs.PairCounts
    left_out: dict[str, int]
    score: str
    files: dict[str, Path] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The report without the tables; ``pairs`` counts both sides."""
        sides = {"train": self.table.num_rows} | (
            {"heldout": self.heldout.num_rows} if self.heldout is not None else {}
        )
        files = {side: str(path) for side, path in self.files.items()}
        return asdict(self.counts) | {"left_out": self.left_out, "sides": sides, "score": self.score, "files": files}


def build_pairs(
    path: Paths,
    *,
    output: str | Path | None = None,
    config: PairsConfig | None = None,
    write: bool = True,
    overwrite: bool = False,
    command: Sequence[str] = (),
    **settings: Any,
) -> PairsReport:
    """Build preference pairs from the scored rollouts under ``path`` (run folder, file, glob, or several of them).

    ``settings`` are those of ``PairsConfig``. Written to ``RUN/pairs-<reward name or "reward">/pairs.parquet`` unless
    ``output`` names a folder or a .parquet/.jsonl file; held-out pairs go to ``heldout.parquet`` beside it.
    Raises RefusedError for rollouts with breaks (T200), without token data (T205) or listed twice (D701); StoreError when
    the output holds pairs that were made with other settings.
    """
    config = config or PairsConfig.load(overrides=settings)
    sources = [path] if isinstance(path, (str, Path)) else list(path)
    for source in sources:
        resolve(source, ROLLOUTS)
    target = _target(sources, output, config) if write else None
    if target is not None:
        _refuse_other_settings(target, config, overwrite)
    rollouts = _concat([read_table(p, ROLLOUTS, _SCALARS) for p in sources])
    if not rollouts.num_rows:
        raise DataError.empty(sources[0], "scored rollouts")
    _refuse_duplicates(rollouts)
    score_name, scores, scored_by = _scores(sources, rollouts, config.reward)
    rollouts, left_out = _without_breaks(rollouts.append_column("score", scores), config.breaks)
    if rollouts.num_rows and not int(pc.sum(pc.is_finite(rollouts["score"])).as_py() or 0):
        raise RefusedError(
            f"none of the {rollouts.num_rows:,} rollouts has a score {score_name!r}",
            code="R501",
            hint="score them with `gymdata score RUN --reward …`",
        )
    rollouts = _with_tokens(sources, rollouts, pairs.contenders(rollouts, config.strategy, config.min_margin))
    left_out["branches"] = _count_branches(rollouts, config.breaks)
    selection = pairs.select_pairs(
        rollouts,
        config.strategy,
        min_margin=config.min_margin,
        max_per_task=config.max_pairs_per_task,
        length_balance=config.length_balance,
        truncated=config.truncated,
        seed=config.seed,
    )
    table = pairs.pair_rows(rollouts, selection, source="reward", score_name=score_name)
    train, heldout = _sides(table, config)
    report = PairsReport(train, heldout, selection.counts, left_out, score_name)
    if target is not None:
        report.files.update(_write(target, report, sources, scored_by, config, command))
    return report


def _concat(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def _refuse_duplicates(rollouts: pa.Table) -> None:
    extra = rollouts.num_rows - pc.count_distinct(rollouts["rollout_id"]).as_py()
    if extra:
        raise RefusedError(
            f"{extra:,} rollout(s) are there more than once",
            code="D701",
            hint="`gymdata validate` lists them; give each file once",
        )


def _without_breaks(rollouts: pa.Table, breaks: str) -> tuple[pa.Table, dict[str, int]]:
    """A rollout with a break has no single token sequence that was sampled as it stands."""
    broken = pc.greater(rollouts["n_breaks"], 0)
    count = int(pc.sum(broken).as_py() or 0)
    if count and breaks == "refuse":
        raise RefusedError(
            f"{count:,} of {rollouts.num_rows:,} rollouts have breaks: their turns are no single sequence of sampled tokens",
            code="T200",
            hint="`gymdata validate` shows where; `--breaks drop` makes pairs from the others",
        )
    return rollouts.filter(pc.invert(broken)) if count else rollouts, {"breaks": count}


def _with_tokens(sources: Sequence[str | Path], rollouts: pa.Table, needed: np.ndarray) -> pa.Table:
    """``rollouts`` with token columns, messages and content keys; null where no pair can need them."""
    wanted = rollouts.filter(pa.array(needed))
    ids = wanted["rollout_id"].combine_chunks()
    parts = []
    for source in sources if len(ids) else ():
        for batch in scan_batches(source, ROLLOUTS, ("rollout_id", "n_turns", "messages", "turns"), _BATCH_ROWS):
            part = batch.filter(pc.is_in(batch.column("rollout_id"), value_set=ids))
            if part.num_rows:
                parts.append(_flat(part))
    schema = pa.schema([*chains.CHAINS, *_MORE])
    flat = pa.concat_tables(parts) if parts else schema.empty_table()
    _refuse_without_tokens(flat)
    place = pc.index_in(rollouts["rollout_id"], value_set=flat["rollout_id"].combine_chunks())
    for name in flat.column_names:
        if name != "rollout_id":
            rollouts = rollouts.append_column(name, flat[name].take(place))
    return rollouts.append_column("truncated", pc.equal(rollouts["status"], "truncated"))


_MESSAGES = ROLLOUTS.schema.field("messages").type
_MORE = [
    pa.field("rollout_id", pa.string()),
    pa.field("prompt_messages", _MESSAGES),
    pa.field("completion_messages", _MESSAGES),
    pa.field("text_key", pa.uint64()),
]


def _flat(batch: pa.RecordBatch) -> pa.Table:
    flat = chains.chain_columns(batch.column("turns"), batch.column("rollout_id"))
    prompt, completion = chains.split_messages(batch.column("messages"), batch.column("n_turns").to_numpy())
    more = (batch.column("rollout_id"), prompt, completion, pa.array(chains.text_keys(completion)))
    for column_field, column in zip(_MORE, more, strict=True):
        flat = flat.append_column(column_field, column.cast(column_field.type))
    return flat


def _refuse_without_tokens(flat: pa.Table) -> None:
    without = int(pc.sum(pc.equal(flat["n_sequences"], 0)).as_py() or 0)
    if without:
        raise RefusedError(
            f"{without:,} of {flat.num_rows:,} rollouts have no token ids, so no pair of them can be trained as sampled",
            code="T205",
            hint="collect with gymdata, or import files that carry token ids",
        )


def _count_branches(rollouts: pa.Table, breaks: str) -> int:
    count = int(pc.sum(pc.greater(rollouts["n_sequences"], 1)).as_py() or 0)
    if count and breaks == "refuse":
        raise RefusedError(
            f"{count:,} rollouts branch into several token sequences, so there is no single answer to prefer",
            code="T211",
            hint="`--breaks drop` makes pairs from the others",
        )
    return count


def _scores(
    sources: Sequence[str | Path], rollouts: pa.Table, name: str | None
) -> tuple[str, pa.ChunkedArray, list[Path]]:
    """The score's name, one score a rollout, and the files of a re-scoring that it came from.

    A re-scoring that was made on purpose is preferred to the part of the same name that was stored while collecting.
    """
    if name is None:
        return "reward", rollouts["reward"], []
    found = [table for source in sources if (table := _rescored(source, name)) is not None]
    if found:
        rows = pa.concat_tables([table for _, table in found])
        # Re-scoring adds rows: the last one of a rollout counts.
        values = dict(zip(rows["rollout_id"].to_pylist(), rows["value"].to_pylist(), strict=True))
        mine = [values.get(r) for r in rollouts["rollout_id"].to_pylist()]
        return name, pa.chunked_array([pa.array(mine, pa.float64())]), [folder for folder, _ in found]
    parts = rollouts["rewards"].combine_chunks()
    flat = parts.flatten()
    names = flat.field("name")
    known = sorted(set(pc.unique(names).to_pylist()))
    if name not in known:
        have = [*known, *(n for source in sources for n in _rescorings(source))]
        raise UsageError.unknown_choice("--reward", name, have or ["(no named rewards in these rollouts)"])
    owner = np.repeat(np.arange(len(parts)), np.diff(parts.offsets.to_numpy()))
    is_it = pc.equal(names, name).to_numpy(zero_copy_only=False)
    values_of = np.full(len(parts), np.nan)
    values_of[owner[is_it]] = pc.fill_null(flat.field("value").filter(pa.array(is_it)), np.nan).to_numpy()
    return name, pa.chunked_array([pa.array(values_of)]), []


def _run_folder(source: str | Path) -> Path | None:
    found = find_run_json(source)
    return found.parent if found is not None and found.name == "run.json" else None


def _rescorings(source: str | Path) -> list[str]:
    run = _run_folder(source)
    return sorted(p.name.removeprefix("scores-") for p in run.glob("scores-*") if p.is_dir()) if run else []


def _rescored(source: str | Path, name: str) -> tuple[Path, pa.Table] | None:
    run = _run_folder(source)
    if run is None or not (run / f"scores-{name}").is_dir():
        return None
    folder = run / f"scores-{name}"
    table = read_table(folder, SCORES)
    inside = pc.unique(table["name"]).to_pylist()
    wanted = name if name in inside or len(inside) != 1 else inside[0]
    rows = table.filter(pc.equal(table["name"], wanted))
    if not rows.num_rows:
        raise UsageError.unknown_choice(f"{folder}: score", name, inside)
    return folder, rows


def _sides(table: pa.Table, config: PairsConfig) -> tuple[pa.Table, pa.Table | None]:
    if config.split is None:
        return table, None
    held = pairs.split_tasks(table["task_id"].to_pylist(), config.split, config.seed)
    is_held = pc.is_in(table["task_id"], value_set=pa.array(sorted(held), pa.string()))
    return table.filter(pc.invert(is_held)), table.filter(is_held)


def _target(sources: Sequence[str | Path], output: str | Path | None, config: PairsConfig) -> Path:
    if output is not None:
        target = Path(output)
        return target if target.suffix in (".parquet", ".jsonl") else target / "pairs.parquet"
    run = _run_folder(sources[0])
    if len(sources) > 1 or run is None or not Path(sources[0]).is_dir():
        raise UsageError("-o is needed: pairs of something other than one run folder have no place of their own")
    name = re.sub(r"[^\w.+-]", "_", config.reward or "reward")
    return run / f"pairs-{name}" / "pairs.parquet"


def _describes(target: Path) -> Path:
    """Where ``write_run_json`` puts the description of ``target``."""
    return target.parent if target.name == "pairs.parquet" else target


def _refuse_other_settings(target: Path, config: PairsConfig, overwrite: bool) -> None:
    if overwrite or not target.exists():
        return
    was: Mapping[str, Any] = read_run_json(target).get("config", {})
    other = differences(was, config.model_dump(mode="json"))
    if other:
        changed = "; ".join(f"{key}: {before!r} there, now {now!r}" for key, before, now in other)
        raise StoreError(
            f"{target}: holds pairs that were made with other settings ({changed})",
            hint="--overwrite replaces them; -o keeps both",
        )


def _write(
    target: Path,
    report: PairsReport,
    sources: Sequence[str | Path],
    scored_by: Sequence[Path],
    config: PairsConfig,
    command: Sequence[str],
) -> dict[str, Path]:
    import gymdata

    files = {"train": write_table(report.table, target, PAIRS)}
    heldout = target.with_name(f"heldout{target.suffix}")
    if target.name != "pairs.parquet":
        heldout = target.with_name(f"{target.stem}.heldout{target.suffix}")
    if report.heldout is not None:
        files["heldout"] = write_table(report.heldout, heldout, PAIRS)
    else:
        # Of an earlier split: its tasks are in the training side now.
        heldout.unlink(missing_ok=True)
    facts = {
        "stage": "pairs",
        "version": gymdata.__version__,
        "schema": {"pairs": PAIRS.version},
        "command": list(command),
        "config": config.model_dump(mode="json"),
        "parents": [_parent(p) for p in [*sources, *scored_by]],
        "files": [_entry(side, path, report) for side, path in files.items()],
        "counts": {key: value for key, value in report.as_json().items() if key != "files"},
    }
    write_run_json(_describes(target), facts)
    return files


def _entry(side: str, path: Path, report: PairsReport) -> dict[str, Any]:
    rows = report.table.num_rows if side == "train" or report.heldout is None else report.heldout.num_rows
    return {"side": side, "path": path.name, "rows": rows, "bytes": path.stat().st_size, "xxh3": hash_file(path)}


def _parent(path: str | Path) -> dict[str, Any]:
    found = find_run_json(path)
    if found is None:
        return {"path": str(Path(path).resolve()), "run_id": None, "run_json_xxh3": None}
    facts = read_run_json(found)
    return {"path": str(Path(path).resolve()), "run_id": facts.get("run_id"), "run_json_xxh3": hash_file(found)}
