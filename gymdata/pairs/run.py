"""``gymdata pairs``: scored rollouts in, a pairs file out, and an account of what became of every candidate.

Invariants: the ids, masks and log-probs of a pair are the saved ones; what was left out is counted and said; the
same rollouts and settings give the same file; the output's run.json leads back to the rollouts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import genrm
from gymdata.errors import DataError, RefusedError, UsageError
from gymdata.judge.groups import MATCH_COLUMNS, matches_in, refuse_odd_matches
from gymdata.pairs import select
from gymdata.pairs.contents import CONTENTS, contents
from gymdata.pairs.select import at_fork
from gymdata.pairs.settings import PairsConfig
from gymdata.public import Report, Row, paths_of
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.ragged import Ragged, content_codes, joined_keys
from gymdata.rollouts.schema import COMPARISONS, PAIRS, ROLLOUTS
from gymdata.rollouts.sequences import require_agents
from gymdata.store import StageOutput, read_table, resolve, scan_batches
from gymdata.store.lineage import (
    Paths,
    changed_rollouts,
    concat,
    judge_folders,
    parent_of,
    refuse_duplicates,
    run_folder,
    scores_of,
    vocabulary,
)
from gymdata.store.paths import output_file
from gymdata.store.stage_output import described_by

_SCALARS = (
    "rollout_id", "run_id", "task_id", "group_id", "rollout_index", "policy_hash", "policy_version", "status", "reward",
    "rewards", "temperature", "n_turns", "n_breaks", "n_generated_tokens",
)  # fmt: skip
#: Rollouts whose tokens are in memory at a time while they are turned into flat columns.
_BATCH_ROWS = 4_096


@dataclass(frozen=True, slots=True, repr=False)
class PairsReport(Report):
    """What ``gymdata.pairs`` made. ``table``: the pairs (of the training side); ``heldout``: those of the held-out tasks.

    ``files`` are the written files by side, empty when nothing was to be written; ``left_out`` counts rollouts that were
    never candidates (breaks, branches); ``counts`` accounts for everything else.
    """

    table: pa.Table
    heldout: pa.Table | None
    counts: select.PairCounts
    left_out: dict[str, int]
    score: str
    files: dict[str, Path] = field(default_factory=dict)
    #: What a reader of the pairs must know.
    notes: list[str] = field(default_factory=list)
    #: What the comparisons say, where pairs come from them: compared pairs, contradictions, cycles.
    comparisons: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report without the tables; ``pairs`` counts both sides."""
        sides = {"train": self.table.num_rows} | (
            {"heldout": self.heldout.num_rows} if self.heldout is not None else {}
        )
        files = {side: str(path) for side, path in self.files.items()}
        more = {"comparisons": self.comparisons} if self.comparisons else {}
        whole = {"left_out": self.left_out, "sides": sides, "score": self.score, "files": files, "notes": self.notes}
        return asdict(self.counts) | whole | more

    def rows(self) -> list[Row]:
        counts, sides = self.counts, {"train": self.table, "heldout": self.heldout}
        written: list[Row] = [("written to", str(path)) for path in self.files.values()]
        if self.heldout is not None:
            titles = {"train": "train pairs", "heldout": "held-out pairs"}
            written = [(titles[side], f"{sides[side].num_rows:,} in {path}") for side, path in self.files.items()]
        return [
            ("rollouts", counts.rollouts),
            *((f"  left out: {why}", n) for why, n in self.left_out.items() if n),
            *([("  not scored", counts.rollouts_unscored)] if counts.rollouts_unscored else []),
            *((name.replace("_", " "), n) for name, n in self.comparisons.items() if n),
            ("groups", counts.groups),
            *([("  fewer than two scored", counts.groups_too_small)] if counts.groups_too_small else []),
            ("  without variance", counts.groups_without_variance),
            ("candidates", counts.candidates),
            *((f"  dropped: {reason.replace('_', ' ')}", n) for reason, n in counts.dropped.items() if n),
            ("pairs", counts.pairs),
            *written,
        ]


def pairs(
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
    Raises RefusedError for rollouts with breaks (T200), without token data (T205), with ids or log-probabilities that cannot
    be used (T206, L301 to L303), with ids rendered from text (T213; not with ``allow_rendered``) or listed twice (D701);
    StoreError when the output holds pairs that were made with other settings.
    """
    config = config or PairsConfig.load(overrides=settings)
    sources = paths_of(path, "pairs")
    notes = changed_rollouts(sources)
    with contextlib.ExitStack() as stack:
        out = None
        if write:
            target = _target(sources, output, config)
            heldout = target.with_name(f"heldout{target.suffix}")
            if target.name != "pairs.parquet":
                heldout = target.with_name(f"{target.stem}.heldout{target.suffix}")
            names = [target.name] if config.split is None else [target.name, heldout.name]
            out = StageOutput(described_by(target, "pairs.parquet"), "pairs", names, overwrite=overwrite)
            stack.enter_context(out)
            made = "pairs that were made"
            out.refuse_other("config", config.model_dump(mode="json"), made, parents=[parent_of(p) for p in sources])
        report, scored_by = _build(sources, config, notes)
        if out is not None:
            report.files.update(_write(out, report, sources, scored_by, config, command))
        return report


def _build(sources: Sequence[str | Path], config: PairsConfig, notes: list[str]) -> tuple[PairsReport, Sequence[Path]]:
    """The pairs, and the re-scorings that they come from."""
    rollouts = concat([read_table(p, ROLLOUTS, _SCALARS) for p in sources])
    if not rollouts.num_rows:
        raise DataError.empty(sources[0], "scored rollouts")
    refuse_duplicates(rollouts)
    judged_in = judge_folders(sources, config.judge) if config.source == "comparisons" else []
    name = judged_in[0].name.removeprefix("judge-") if judged_in else config.reward
    score_name, scores, scored_by = scores_of(sources, rollouts, name)
    rollouts, left_out = _without_breaks(rollouts.append_column("score", scores), config.breaks)
    if rollouts.num_rows and not int(pc.sum(pc.is_finite(rollouts["score"])).as_py() or 0):
        raise RefusedError(
            f"none of the {rollouts.num_rows:,} rollouts has a score {score_name!r}",
            code="R501",
            hint="score them with `gymdata score RUN --reward …`",
        )
    eligible = select.eligible(rollouts, config.strategy, config.min_margin)
    rollouts = _with_tokens(sources, rollouts, eligible, config.target_agents, rendered=bool(config.allow_rendered))
    left_out["branches"] = _count_branches(rollouts, config.breaks)
    direct = _direct(judged_in, rollouts) if judged_in else None
    selection = select.select_pairs(
        rollouts,
        config.strategy,
        min_margin=config.min_margin,
        max_per_task=config.max_pairs_per_task,
        length_balance=config.length_balance,
        truncated=config.truncated,
        duplicates="keep" if config.keep_duplicates else "drop",
        seed=config.seed,
        reject=partial(direct.rejections, both_positions=config.order != "any") if direct is not None else None,
    )
    made_from: Literal["reward", "genrm"] = "genrm" if judged_in else "reward"
    table = select.pair_rows(rollouts, selection, source=made_from, score_name=score_name)
    table = at_fork(table) if config.fork else table
    train, heldout = _sides(table, config)
    if "rendered" in table.column_names:
        n = int(pc.sum(table["rendered"]).as_py() or 0)
        notes.append(f"{n:,} of {table.num_rows:,} pairs have ids rendered from text, not sampled (T213): no logprobs")
    report = PairsReport(train, heldout, selection.counts, left_out, score_name, notes=notes)
    if direct is not None:
        report.comparisons.update(_account(direct, rollouts))
    return report, scored_by


def pairs_of_run(path: str | Path) -> list[Path] | None:
    """The pairs files that a run folder leads to, in one stage folder below it; None for any other path.

    Raises UsageError when several stage folders hold pairs, DataError when nothing is there.
    """
    given = Path(path)
    files = [source.path for source in resolve(path, PAIRS)]
    if not given.is_dir() or any(file.parent == given for file in files):
        return None
    folders = sorted({file.parent for file in files})
    if not folders and resolve(path):
        raise DataError.other_table(path, "rollouts", "pairs", ())
    if not folders:
        raise DataError.empty(path, "pairs; `gymdata pairs` makes them")
    if len(folders) > 1:
        names = ", ".join(map(str, folders))
        raise UsageError(f"{path}: {len(folders)} folders of it hold pairs: {names}", hint="give one of them")
    return files


def _direct(folders: Sequence[Path], rollouts: pa.Table) -> genrm.Preferences:
    """What the comparisons of these rollouts say, rollouts numbered by row."""
    number = {rollout: n for n, rollout in enumerate(rollouts["rollout_id"].to_pylist())}
    tables = [read_table(folder, COMPARISONS, MATCH_COLUMNS) for folder in folders]
    ids = rollouts["rollout_id"].combine_chunks()
    groups = rollouts["group_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    for folder, table in zip(folders, tables, strict=True):
        refuse_odd_matches(table, ids, groups, folder / "comparisons.parquet")
    return genrm.preferences(matches_in(concat(tables), number))


def _account(direct: genrm.Preferences, rollouts: pa.Table) -> dict[str, int]:
    """Contradictions and cycles among the comparisons, whether or not a pair would have come of them."""
    groups = rollouts["group_id"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    triples, _ = direct.cycles(groups)
    contradicted = {"order_flipped": int(direct.flipped.sum()), "contradicted": int(direct.mixed.sum())}
    return {
        "compared": len(direct.low),
        "in_both_positions": int(direct.both_positions.sum()),
        **contradicted,
        "cycles": triples,
    }


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


def _with_tokens(
    sources: Sequence[str | Path],
    rollouts: pa.Table,
    needed: np.ndarray,
    agents: Sequence[str] = (),
    *,
    rendered: bool = False,
) -> pa.Table:
    """``rollouts`` with token columns, messages and content keys; null where no pair can need them.

    With ``agents`` the generated tokens are recounted: those of others are context.
    """
    wanted = rollouts.filter(pa.array(needed))
    ids = wanted["rollout_id"].combine_chunks()
    parts = []
    if agents:
        turns = (batch.column("turns") for s in sources for batch in scan_batches(s, ROLLOUTS, ("turns",), _BATCH_ROWS))
        require_agents(turns, agents, ", ".join(map(str, sources)))
    for source in sources if len(ids) else ():
        vocab_size = vocabulary(source)
        for batch in scan_batches(
            source, ROLLOUTS, ("rollout_id", "n_turns", "messages", "tools", "turns"), _BATCH_ROWS
        ):
            part = batch.filter(pc.is_in(batch.column("rollout_id"), value_set=ids))
            if part.num_rows:
                parts.append(contents(part, agents, where=str(source), vocab_size=vocab_size, rendered=rendered))
    flat = pa.concat_tables(parts) if parts else CONTENTS.empty_table()
    _refuse_without_tokens(flat)
    flat = flat.unify_dictionaries()
    keys = joined_keys([Ragged.of(flat[name]).keys() for name in ("prompt_ids", "completion_ids")])
    flat = flat.append_column("content_key", pa.array(content_codes(keys)))
    place = pc.index_in(rollouts["rollout_id"], value_set=flat["rollout_id"].combine_chunks())
    for name in flat.column_names:
        if name != "rollout_id":
            rollouts = rollouts.append_column(name, flat[name].take(place))
    if agents:
        masks = Ragged.of(rollouts["completion_mask"])
        place_of = rollouts.schema.get_field_index("n_generated_tokens")
        rollouts = rollouts.set_column(place_of, "n_generated_tokens", pa.array(masks.sums(masks.values)))
    return rollouts.append_column("truncated", pc.equal(rollouts["status"], "truncated"))


def _refuse_without_tokens(flat: pa.Table) -> None:
    without = int(pc.sum(pc.equal(flat["n_sequences"], 0)).as_py() or 0)
    if without:
        raise RefusedError(
            f"{without:,} of {flat.num_rows:,} rollouts have no token ids, so no pair of them can be trained as sampled",
            code="T205",
            hint="collect with gymdata, import files that carry token ids, or render ids with `gymdata tokenize`",
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


def _sides(table: pa.Table, config: PairsConfig) -> tuple[pa.Table, pa.Table | None]:
    if config.split is None:
        return table, None
    held = split_tasks(table["task_id"].to_pylist(), config.split, config.seed)
    is_held = pc.is_in(table["task_id"], value_set=pa.array(sorted(held), pa.string()))
    return table.filter(pc.invert(is_held)), table.filter(is_held)


def _target(sources: Sequence[str | Path], output: str | Path | None, config: PairsConfig) -> Path:
    if output is not None:
        return output_file(output, "pairs.parquet")
    run = run_folder(sources[0])
    if len(sources) > 1 or run is None or not Path(sources[0]).is_dir():
        raise UsageError("-o/--output is required unless the input is a single run folder")
    chosen = (config.judge or "comparisons") if config.source == "comparisons" else config.reward or "reward"
    name = re.sub(r"[^\w.+-]", "_", chosen)
    return run / f"pairs-{name}" / "pairs.parquet"


def _write(
    out: StageOutput,
    report: PairsReport,
    sources: Sequence[str | Path],
    scored_by: Sequence[Path],
    config: PairsConfig,
    command: Sequence[str],
) -> dict[str, Path]:
    sides = {"train": report.table} | ({"heldout": report.heldout} if report.heldout is not None else {})
    for name, (side, table) in zip(out.names, sides.items(), strict=True):
        out.table(name, table, PAIRS, side=side)
    # A held-out side of an earlier split goes: its tasks are in the training side now.
    out.finish(
        {
            "command": list(command),
            "config": config.model_dump(mode="json"),
            "parents": [parent_of(p) for p in [*sources, *scored_by]],
            "counts": {key: value for key, value in report.to_dict().items() if key not in ("files", "notes")},
            "notes": report.notes,
        }
    )
    return {side: out.folder / name for side, name in zip(sides, out.names, strict=True)}
