"""``gymdata pairs``: scored rollouts in, a pairs file out, and an account of every candidate.

The ids, masks and log-probs of a pair are the saved ones; what is left out is counted and reported; the
same rollouts and settings give the same file; the output's run.json leads back to the rollouts; memory holds numbers of
every rollout, and the tokens of few.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata import genrm
from gymdata.commands.judge.groups import MATCH_COLUMNS, matches_in, refuse_odd_matches
from gymdata.commands.pairs import select
from gymdata.commands.pairs.candidates import Candidates, PairBatches, read_rollouts
from gymdata.commands.pairs.settings import PairsConfig
from gymdata.errors import DataError, RefusedError, UsageError, counted
from gymdata.public import Figures, Report, Row, paths_of
from gymdata.rollouts.messages import split_tasks
from gymdata.rollouts.schema import COMPARISONS, PAIRS, ROLLOUTS
from gymdata.scores.chosen import default_score, judge_folders, other_scores, scores_of, taken, unscored_hint
from gymdata.store import StageOutput, read_table, resolve
from gymdata.store.formats import tables_in
from gymdata.store.lineage import (
    Paths,
    masked_rollouts,
    parents_of,
    refuse_duplicates,
    stage_folder,
)
from gymdata.store.paths import local_output, refuse_inputs
from gymdata.store.reading import check_content
from gymdata.workers.tuning import give_back

#: What to change when no candidate became a pair, by the reason that dropped most of them.
_REMEDIES = {
    "tie": "collect more rollouts per task, or at a higher temperature",
    "margin": "lower --min-margin",
    "not_in_both_positions": "judge in both positions, or --order any",
    "order_flipped": "--order any takes comparisons of one position, too",
    "other_prompt": "--fork extends prompts to where the two rollouts diverge",
    "identical": "collect at a higher temperature",
    "several_sequences": "`gymdata validate` shows where rollouts branch",
    "truncated": "--truncated keep, or collect with a larger --max-tokens",
    "length_balance": "raise --length-balance",
}


@dataclass(frozen=True, slots=True, repr=False)
class PairsReport(Report):
    """The result of ``gymdata.pairs``. ``table``: the pairs (of the training side); ``heldout``: those of the held-out
    tasks. ``ok``: there are pairs.

    ``files`` are the written files by side, empty when nothing was to be written; ``sides`` counts the pairs of each;
    ``left_out`` counts rollouts that were never candidates (breaks, branches); ``counts`` accounts for everything else.
    """

    counts: select.PairCounts
    sides: dict[str, int]
    left_out: dict[str, int]
    score: str
    files: dict[str, Path] = field(default_factory=dict)
    #: Notes for the reader of the pairs.
    notes: list[str] = field(default_factory=list)
    #: Figures of the comparisons, when pairs are made from them: compared pairs, contradictions, cycles.
    comparisons: dict[str, int] = field(default_factory=dict)
    #: Tables by side, once they are in memory.
    _tables: dict[str, pa.Table] = field(default_factory=dict)
    #: The fingerprint of each written file, to detect that it was replaced.
    _written: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.counts.pairs > 0

    @property
    def table(self) -> pa.Table:
        """The pairs of the training side. Written ones are read at the first use; raises DataError where their file was
        replaced or removed since."""
        return self._table("train")

    @property
    def heldout(self) -> pa.Table | None:
        """The pairs of the held-out tasks; None without ``split``."""
        return self._table("heldout") if "heldout" in self.sides else None

    def _table(self, side: str) -> pa.Table:
        if side not in self._tables:
            path = self.files[side]
            if not path.is_file() or _state(path) != self._written[side]:
                raise DataError(
                    f"{path}: the pairs of this report were replaced or removed since", hint="make them again"
                )
            self._tables[side] = read_table(path, PAIRS)
        return self._tables[side]

    def __repr__(self) -> str:
        """Tables are counted without being read."""
        counted = {"train": "table", "heldout": "heldout"}
        sides = "".join(f", {counted[side]}={n} rows" for side, n in self.sides.items())
        return f"{Report.__repr__(self)[:-1]}{sides})"

    def to_dict(self) -> Figures:
        """The report without the tables; ``pairs`` counts both sides."""
        files = {side: str(path) for side, path in self.files.items()}
        more = {"comparisons": self.comparisons} if self.comparisons else {}
        figures = {
            "left_out": self.left_out,
            "sides": self.sides,
            "score": self.score,
            "files": files,
            "notes": self.notes,
        }
        return asdict(self.counts) | figures | more

    def rows(self) -> list[Row]:
        counts = self.counts
        written: list[Row] = [("written to", str(path.parent)) for path in self.files.values()]
        if "heldout" in self.sides:
            titles = {"train": "train pairs", "heldout": "held-out pairs"}
            written = [(titles[side], f"{self.sides[side]:,} in {path}") for side, path in self.files.items()]
        return [
            ("rollouts", counts.rollouts + sum(self.left_out.values())),
            *((f"  left out: {why}", n) for why, n in self.left_out.items() if n),
            *([("  not scored", counts.rollouts_unscored)] if counts.rollouts_unscored else []),
            *((name.replace("_", " "), n) for name, n in self.comparisons.items() if n),
            ("groups", counts.groups),
            *([("  fewer than two scored", counts.groups_too_small)] if counts.groups_too_small else []),
            ("  without variance", counts.groups_without_variance),
            ("candidates", counts.candidates),
            *((f"  dropped: {reason.replace('_', ' ')}", n) for reason, n in counts.dropped.items() if n),
            ("pairs", counts.pairs),
            *([("  abandoned turns dropped", counts.abandoned_turns)] if counts.abandoned_turns else []),
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

    ``config`` is a ``PairsConfig``. Written to ``RUN/pairs-<reward name or "reward">/pairs.parquet`` unless
    ``output`` names another folder; held-out pairs go to ``heldout.parquet`` beside it.
    Raises RefusedError for rollouts with breaks (T200), without token data (T205), with ids or log-probabilities that cannot
    be used (T206, L301 to L303), with ids rendered from text (T213; not with ``allow_rendered``) or listed twice (D701);
    StoreError when the output holds pairs that were made with other settings.
    """
    config = PairsConfig.called_with(pairs, config, settings)
    sources = paths_of(path, "pairs")
    notes = check_content(sources, ROLLOUTS)
    if config.source is None:
        reward, note = default_score(sources, config.reward)
        config = config.model_copy(update={"reward": reward})
        notes += [note] if note else []
    with contextlib.ExitStack() as stack:
        out = None
        if write:
            chosen = config.source or config.reward or "reward"
            if config.source == "comparisons":
                chosen = config.judge or chosen
            place = local_output(output or stage_folder(sources, "pairs", chosen))
            out = StageOutput(place, "pairs", overwrite=overwrite)
            refuse_inputs(place, sources, ROLLOUTS, "paired")
            stack.enter_context(out)
            out.refuse_other("config", config, "pairs that were made", parents=parents_of(sources))
        folder = out.new if out is not None else None
        report, scored_by, pairs_of = _build(sources, config, folder, notes, stack)
        if out is not None and report.ok:
            names = {side: "pairs.parquet" if side == "train" else f"{side}.parquet" for side in pairs_of}
            files = {side: out.place / name for side, name in names.items()}
            for side, batches in pairs_of.items():
                out.batches(files[side].name, batches, PAIRS, batches.schema, side=side)
            out.finish(
                {
                    "command": list(command),
                    "config": config.model_dump(mode="json"),
                    "parents": parents_of([*sources, *scored_by]),
                    "scored_by": [taken(sources, report.score)],
                    "counts": {key: value for key, value in report.to_dict().items() if key not in ("files", "notes")},
                    "notes": report.notes,
                }
            )
            report.files.update(files)
            report._written.update({side: _state(path) for side, path in report.files.items()})
        else:
            report._tables.update({side: batches.table() for side, batches in pairs_of.items()})
        return report


def _build(
    sources: Sequence[str | Path],
    config: PairsConfig,
    folder: Path | None,
    notes: list[str],
    stack: contextlib.ExitStack,
) -> tuple[PairsReport, Sequence[Path], dict[str, PairBatches]]:
    """The account of every candidate, the re-scorings that the pairs come from, and the pairs of each side."""
    judged_in = judge_folders(sources, config.judge) if config.source == "comparisons" else []
    name = judged_in[0].name.removeprefix("judge-") if judged_in else config.reward
    rollouts, files = read_rollouts(sources, config, () if name is None else ("rewards",))
    if not rollouts.num_rows:
        raise DataError.empty(sources[0], "scored rollouts")
    refuse_duplicates(rollouts, sources)
    score_name, scores, scored_by = scores_of(sources, rollouts, name)
    rollouts = rollouts.append_column("score", scores)
    sound, left_out = _sound(rollouts, masked_rollouts(sources), config)
    if len(sound) and not int(pc.sum(pc.is_finite(rollouts["score"].take(sound))).as_py() or 0):
        raise RefusedError(
            f"none of the {len(sound):,} rollouts has a score {score_name!r}",
            code="R501",
            hint=unscored_hint(sources, score_name),
        )
    candidates = Candidates(rollouts, files, sound, config, folder)
    stack.callback(candidates.close)
    del rollouts, scores
    frame = candidates.frame
    direct = None
    if judged_in:
        # The direct preferences in the comparisons of these rollouts, numbered by row.
        number = {rollout: n for n, rollout in enumerate(frame["rollout_id"].to_pylist())}
        notes += check_content(judged_in, COMPARISONS)
        tables = [read_table(folder, COMPARISONS, MATCH_COLUMNS) for folder in judged_in]
        ids, groups = frame["rollout_id"].combine_chunks(), _codes(frame["group_id"])
        for judged, table in zip(judged_in, tables, strict=True):
            refuse_odd_matches(table, ids, groups, judged / "comparisons.parquet")
        direct = genrm.preferences(matches_in(pa.concat_tables(tables), number))
    selection = _select(candidates, config, direct)
    left_out["branches"] = int((candidates.n_sequences > 1).sum())
    made_from = "genrm" if judged_in else "reward"
    give_back()
    arrays = (selection.chosen, selection.rejected, selection.margin)
    pairs = PairBatches(candidates, *arrays, source=made_from, score_name=score_name, fork=bool(config.fork))
    if n := pairs.n_rendered:
        pairs = replace(pairs, rendered=True)
        notes.append(
            f"{n:,} of {counted(len(pairs), 'pair')} have ids rendered from text, not sampled (T213): no logprobs"
        )
    by_side = {"train": pairs}
    if config.split is not None:
        tasks = pairs.task_ids.cast(pa.string())
        heldout_tasks = split_tasks(pc.unique(tasks).to_pylist(), config.split, config.seed)
        is_held = pc.is_in(tasks, value_set=pa.array(sorted(heldout_tasks), pa.string())).to_numpy()
        by_side = {"train": pairs.only(~is_held), "heldout": pairs.only(is_held)}
    sides = {side: len(batches) for side, batches in by_side.items()}
    used = np.union1d(selection.chosen, selection.rejected)
    selection.counts.abandoned_turns = int(candidates.abandoned_turns[used].sum())
    report = PairsReport(selection.counts, sides, left_out, score_name, notes=notes)
    if direct is not None:
        report.comparisons.update(
            compared=len(direct.low),
            in_both_positions=int(direct.both_positions.sum()),
            order_flipped=int(direct.flipped.sum()),
            contradicted=int(direct.mixed.sum()),
            cycles=direct.cycles(_codes(frame["group_id"]).astype(np.int64))[0],
        )
    if not report.ok:
        note = _no_pairs(report, pc.min_max(frame["score"]).as_py())
        notes.append(f"{note}{other_scores(sources, score_name)}; nothing was written")
    return report, scored_by, by_side


def _sound(rollouts: pa.Table, masked: Mapping[str, str], config: PairsConfig) -> tuple[np.ndarray, dict[str, int]]:
    """The rows that may be in pairs, and how many of the others there are, by reason. Raises RefusedError (T200)."""
    # A rollout with breaks has no single token sequence that was sampled as it stands.
    broken = pc.greater(rollouts["n_breaks"], 0).to_numpy()
    # Also of comparisons, a masked one is neither side of a pair.
    is_masked = pc.is_in(rollouts["rollout_id"], value_set=pa.array(masked, pa.string())).to_numpy()
    n_broken = int((broken & ~is_masked).sum())
    if n_broken and config.breaks == "refuse":
        raise RefusedError(
            f"{n_broken:,} of {counted(rollouts.num_rows, 'rollout')} have breaks: their turns are no single "
            "sequence of sampled tokens",
            code="T200",
            hint="`gymdata validate` shows where; `--breaks drop` makes pairs from the others",
        )
    return np.flatnonzero(~broken & ~is_masked), {"breaks": n_broken, **Counter(masked.values())}


def _no_pairs(report: PairsReport, scores: Mapping[str, float | None]) -> str:
    """The note of a result without pairs: what dropped rollouts and candidates, and what to change. ``scores``: ``min`` and
    ``max`` of the rollouts."""
    counts = report.counts
    dropped = {reason.replace("_", " "): n for reason, n in counts.dropped.items() if n}
    causes = [
        *((n, f"{n:,} left out for {why}") for why, n in report.left_out.items()),
        (counts.rollouts_unscored, f"{counted(counts.rollouts_unscored, 'rollout')} not scored"),
        (counts.groups_too_small, f"{counted(counts.groups_too_small, 'group')} with fewer than two scored rollouts"),
        (counts.groups_without_variance, f"{counted(counts.groups_without_variance, 'group')} without variance"),
        (len(dropped), "dropped: " + ", ".join(f"{n:,} {reason}" for reason, n in dropped.items())),
    ]
    reasons = "; ".join(text for n, text in causes if n)
    remedy = "collect more rollouts per task, or score those that have no score"
    if dropped:
        most = max(counts.dropped, key=lambda reason: counts.dropped[reason])
        remedy = _REMEDIES.get(most, "`gymdata show RUN` shows the rollouts")
    elif report.left_out["breaks"] or report.left_out["branches"]:
        remedy = "`gymdata validate` shows where the breaks are"
    if counts.rollouts > 1 and scores["min"] is not None and scores["min"] == scores["max"]:
        remedy = (
            f"every {report.score} is {scores['min']:g}: is it right? `gymdata score RUN --reward SPEC -n 20` tries "
            "another, without -n it scores all"
        )
    gave = f"{counted(counts.rollouts, 'rollout')} of {counted(counts.groups, 'group')} gave"
    return f"no pairs: {gave} {counted(counts.candidates, 'candidate')}; {reasons}\n  → {remedy}"


def pairs_of_run(path: str | Path, command: Sequence[str] = ()) -> list[Path] | None:
    """The pairs files that a run folder leads to, in one stage folder below it; None for any other path.

    Raises UsageError when several stage folders hold pairs (the first is put into ``command``), DataError when nothing is
    there.
    """
    folder = Path(path)
    files = [source.path for source in resolve(path, PAIRS)]
    if not folder.is_dir() or any(file.parent == folder for file in files):
        return None
    folders = sorted({file.parent for file in files})
    if not folders and (other := next(iter(tables_in(path)), None)) is not None:
        raise DataError.other_table(path, other, "pairs")
    if not folders:
        raise DataError.empty(path, "pairs; `gymdata pairs` makes them")
    if len(folders) > 1:
        words = shlex.join(str(folders[0]) if word == str(path) else word for word in command)
        raise UsageError(
            f"{path}: {len(folders)} folders of it hold pairs: {', '.join(map(str, folders))}",
            hint=f"give one of them{f', as in: {words}' if words else ''}",
        )
    return files


def _codes(names: pa.ChunkedArray) -> np.ndarray:
    """A number for each name."""
    numbers: np.ndarray = names.combine_chunks().dictionary_encode().indices.to_numpy()
    return numbers


def _select(
    candidates: Candidates,
    config: PairsConfig,
    direct: genrm.Preferences | None,
) -> select.Selection:
    """The pairs. Whether a rollout is one sequence is known only from its turns, which are read for pairs alone: where some
    are not, and are to be dropped, the others are selected again."""
    n_sequences = np.ones(len(candidates.frame), np.int32)
    while True:
        selection = select.select_pairs(
            candidates.frame.append_column("n_sequences", pa.array(n_sequences)),
            config.strategy,
            min_margin=config.min_margin,
            max_per_task=config.max_pairs_per_task,
            length_balance=config.length_balance,
            truncated=config.truncated,
            duplicates="keep" if config.keep_duplicates else "drop",
            seed=config.seed,
            reject=partial(direct.rejections, both_positions=config.order != "any") if direct is not None else None,
        )
        used = np.union1d(selection.chosen, selection.rejected)
        candidates.read(used)
        of_used = candidates.n_sequences[used]
        if without := int((of_used == 0).sum()):
            raise RefusedError(
                f"{without:,} of {counted(len(used), 'rollout')} in pairs have no token ids, so no pair of them can be "
                "trained as sampled",
                code="T205",
                hint="collect with gymdata, import files with token ids, or render text (`gymdata import FILE -m MODEL`)",
            )
        if (of_used == 1).all():
            return selection
        if config.breaks == "refuse" and (count := int((of_used > 1).sum())):
            raise RefusedError(
                f"{counted(count, 'rollout branches', 'rollouts branch')} into several token sequences, so there is "
                "no single answer to prefer",
                code="T211",
                hint="`--breaks drop` makes pairs from the others",
            )
        n_sequences = np.where(candidates.n_sequences < 0, 1, candidates.n_sequences)


def _state(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
