"""Which score of a rollout a command means: the total reward, a named part of it, or a re-scoring.

Invariants: ``reward`` is the total that was stored with the rollouts, and no score is called so; a score that is not named
is the only one that can be meant, never the newest; a name means one score: a re-scoring of all runs, or of none of them.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.errors import GymdataError, UsageError, counted, option
from gymdata.rewards.port import TOTAL
from gymdata.rollouts.schema import ROLLOUTS, SCORES
from gymdata.stats import known_rewards, unit_of
from gymdata.store import hash_file, read_table
from gymdata.store.lineage import masked_rollouts, run_folder, runs_of
from gymdata.store.paths import RUN_JSON, matches, read_facts
from gymdata.store.reading import check_content

#: The threshold of ``labels`` for answers of which a file says whether they are desirable, 1 or 0.
DESIRABLE = 0.5
#: Rewards closer to the bound than this, relative to the larger of the two, are ties.
_TIE = 1e-9
#: Stage folders that hold scores: of functions, and of judges.
_KINDS = ("scores", "judge")


def default_score(
    sources: Sequence[str | Path], name: str | None, choice: str | None = None
) -> tuple[str | None, str | None]:
    """The score that a command means by ``name``, and a line about it where it was not named: None for the total reward,
    or the only re-scoring of `gymdata score` with values. Raises UsageError, listing them, where several could be meant:
    several re-scorings, or one that not all of the runs have. ``choice``: how the command names one (``--reward NAME``)."""
    choice = choice or option("reward", "NAME")
    if name is not None:
        return name, None
    folders = list(dict.fromkeys(run_folder(path) for source in sources for path in matches(source)))
    runs = [
        {score for score in _rescorings([run], ("scores",)) if _has_values(run, score)} if run else set()
        for run in folders
    ]
    names = sorted(set[str]().union(*runs))
    if not names:
        return None, None
    if len(names) == 1 and all(runs):
        total = choice.replace("NAME", TOTAL)
        return names[0], f"score: {names[0]}, the only re-scoring ({total}: the total reward of collect)"
    lacking = {score: sum(score not in run for run in runs) for score in names}
    listed = [f"{score} (not of {counted(n, 'source')})" if n else score for score, n in lacking.items()]
    raise UsageError(
        textwrap.shorten(f"{counted(len(names) + 1, 'score')} could be meant: {TOTAL}, {', '.join(listed)}", 200),
        hint=f"choose one with {choice} ({TOTAL}: the total reward that was stored with the rollouts)",
    )


def taken(sources: Sequence[str | Path], name: str | None) -> dict[str, object]:
    """What run.json records of a score that was used: its ``name``, and ``source``: for each run by its id the re-scoring's
    folder with what made it, or ``stored``."""
    by_run: dict[str, object] = {}
    for run in runs_of(sources):
        folder = next(iter(rescorings([run], name or TOTAL)), None)
        facts = {} if folder is None else read_facts(folder / RUN_JSON)
        made_by = [reward["source"] for reward in facts.get("rewards") or []] or [facts.get("judge")]
        by_run[str(read_facts(run / RUN_JSON).get("run_id") or run)] = (
            "stored" if folder is None else {"folder": folder.name, "by": made_by}
        )
    return {"name": name or TOTAL, "source": by_run or "stored"}


def state_of_scores(sources: Sequence[str | Path]) -> list[dict[str, str]]:
    """The content of the scores of each run, by folder, also those of judges: another value means that a score, or the
    default, may be another one."""
    written = ([file for kind in _KINDS for file in run.glob(f"{kind}-*/{RUN_JSON}")] for run in runs_of(sources))
    return [{file.parent.name: hash_file(file) for file in files} for files in written]


def other_scores(sources: Sequence[str | Path], used: str) -> str:
    """What ends a hint: the other scores of these rollouts that have values; empty when there are none."""
    names = dict.fromkeys(name for name in _rescorings(sources) if name != used)
    good = [*([TOTAL] if used != TOTAL else []), *(name for name in names if _why_without(sources, name) is None)]
    return f"; or choose another score: --reward {' or '.join(good)}" if good else ""


def scores_of(
    sources: Sequence[str | Path], rollouts: pa.Table, name: str | None, setting: str = "reward"
) -> tuple[str, pa.ChunkedArray, list[Path]]:
    """The score's name, one score per rollout (null for none, see ``known_rewards``), and the folders of the
    re-scorings that it came from.

    Without a name, or with ``TOTAL``, the total reward that ``collect`` stored. A re-scoring has precedence over the reward
    of the same name that was stored by ``collect``. ``setting``: what brought the name. Rollouts that their writer masked
    have no score, whoever scored them. Raises UsageError for an unknown name, and for a re-scoring that one source has and
    another lacks: a stored reward of its name may be another one.
    """
    if name is None or name == TOTAL:
        return TOTAL, _known(rollouts["reward"]), []
    places = {path: run_folder(path) for source in sources for path in matches(source)}
    tables = {path: None if run is None else _rescored(run, name) for path, run in places.items()}
    rescored = dict(table for table in tables.values() if table is not None)
    if rescored and (lacking := [path for path, table in tables.items() if table is None]):
        raise UsageError(
            f"{option(setting)} {name}: {next(iter(rescored))} re-scores some rollouts, and {lacking[0]} has no such scores",
            hint=f"`gymdata score {lacking[0]} --name {name} …` scores them alike, or give the runs one at a time",
        )
    if rescored:
        scores = _last_values(rollouts["rollout_id"], pa.concat_tables(rescored.values()))
    else:
        scores = _stored_part(rollouts["rewards"].combine_chunks(), name)
        if scores is None:
            parts = pc.unique(rollouts["rewards"].combine_chunks().flatten().field("name")).to_pylist()
            have = list(dict.fromkeys([*sorted(parts), *_rescorings(sources)]))
            there = f"available: {', '.join(have)}" if have else "no named rewards here: `gymdata score` writes them"
            raise UsageError(f"{option(setting)}: got {name!r}, not a score of these rollouts", hint=there)
    if masked := masked_rollouts(sources):
        is_masked = pc.is_in(rollouts["rollout_id"], value_set=pa.array(list(masked)))
        scores = pc.if_else(is_masked, pa.scalar(None, pa.float64()), scores)
    return name, _known(scores), list(rescored)


def _last_values(rollout_ids: pa.ChunkedArray, scores: pa.Table) -> pa.ChunkedArray:
    """The value of each rollout, null for none. Re-scoring adds rows: the last row of a rollout counts."""
    import polars as pl

    ids = pl.LazyFrame({"rollout_id": pl.from_arrow(rollout_ids)})
    last = pl.DataFrame(pl.from_arrow(scores.select(["rollout_id", "value"]))).lazy().unique("rollout_id", keep="last")
    joined = ids.join(last, on="rollout_id", how="left", maintain_order="left").collect()["value"]
    return pa.chunked_array([joined.to_arrow()])


def _stored_part(rewards: pa.ListArray, name: str) -> pa.ChunkedArray | None:
    """The reward ``name`` of each rollout, NaN for none; None where no rollout has one of the name."""
    parts = rewards.flatten()
    is_it = pc.equal(parts.field("name"), name).to_numpy(zero_copy_only=False)
    if not is_it.any():
        return None
    values, owner = np.full(len(rewards), np.nan), pc.list_parent_indices(rewards).to_numpy()
    values[owner[is_it]] = pc.fill_null(parts.field("value").filter(pa.array(is_it)), np.nan).to_numpy()
    return pa.chunked_array([pa.array(values)])


def with_score(sources: Sequence[str | Path], rollouts: pa.Table, name: str | None) -> tuple[pa.Table, list[Path]]:
    """``rollouts`` with the score ``name`` as reward (None: as they are), and the folders of its re-scorings."""
    if name is None:
        return rollouts, []
    _, values, folders = scores_of(sources, rollouts, name)
    return rollouts.set_column(rollouts.schema.get_field_index("reward"), "reward", values), folders


def _known(scores: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(known_rewards(scores), from_pandas=True)])


def unscored_hint(sources: Sequence[str | Path], refused: str | None = None) -> str:
    """What to do about rollouts without a reward: the scores that have values. ``refused``: the requested score, which has
    none; the most common reason is named."""
    reasons = {name: _why_without(sources, name) for name in _rescorings(sources)}
    reason = reasons.pop(refused or "", None)
    why = f"; {refused} has no value for any rollout, most often: {reason}" if reason else ""
    names = [name for name, without in reasons.items() if without is None]
    if not names:
        rewards = pa.concat_tables([read_table(source, ROLLOUTS, ("rewards",)) for source in sources])["rewards"]
        parts = rewards.combine_chunks().flatten()
        finite = parts.filter(pc.is_finite(pc.fill_null(parts.field("value"), np.nan)))
        names = sorted(set(pc.unique(finite.field("name")).to_pylist()) - {refused})
    if names:
        return f"choose a score that has values: --reward {' or '.join(names)}{why}"
    run = sources[0] if len(sources) == 1 else "RUN"
    return f"score them with `gymdata score {run} --reward …`, then choose that score: --reward NAME{why}"


def _why_without(sources: Sequence[str | Path], name: str) -> str | None:
    """The most common reason for which the re-scoring ``name`` gave no value to any rollout; None when it has values."""
    reasons: Counter[str] = Counter()
    for run in runs_of(sources):
        try:
            rescored = _rescored(run, name)
        except GymdataError as error:  # This is for the hint of another error.
            reasons[error.message] += 1
            continue
        if rescored is None:
            continue
        if pc.any(pc.is_finite(rescored[1]["value"])).as_py():
            return None
        for entry in rescored[1]["detail"].value_counts().to_pylist():
            reasons[entry["values"] or "no reason is stored"] += entry["counts"]
    [(why, _)] = reasons.most_common(1) or [("it has no rows", 0)]
    return textwrap.shorten(why, 200, placeholder=" …")


def _has_values(run: Path, name: str) -> bool:
    try:
        rescored = _rescored(run, name)
    except UsageError:  # its folder has another name
        return False
    return rescored is not None and bool(pc.any(pc.is_finite(rescored[1]["value"])).as_py())


def _rescorings(sources: Sequence[str | Path], kinds: Sequence[str] = _KINDS) -> list[str]:
    files = (file for run in runs_of(sources) for kind in kinds for file in run.glob(f"{kind}-*/{RUN_JSON}"))
    return sorted({file.parent.name.partition("-")[2] for file in files})


def rescorings(sources: Sequence[str | Path], name: str) -> list[Path]:
    """The folders of the re-scoring ``name``: one of each run that has it."""
    runs = runs_of(sources)
    by_run = [[run / f"{kind}-{name}" for kind in _KINDS if (run / f"{kind}-{name}").is_dir()] for run in runs]
    if twice := next((folders for folders in by_run if len(folders) > 1), None):
        raise UsageError(
            f"two scores are called {name}: {' and '.join(map(str, twice))}",
            hint=f"score again under another name: {option('name', 'NAME')}, and move one of the folders away",
        )
    return [folder for folders in by_run for folder in folders]


def _rescored(run: Path, name: str) -> tuple[Path, pa.Table] | None:
    folders = rescorings([run], name)
    if not folders:
        return None
    folder = folders[0]
    check_content([folder], SCORES)
    table = read_table(folder, SCORES)
    inside = pc.unique(table["name"]).to_pylist()
    stored_name = name if name in inside or len(inside) != 1 else inside[0]
    rows = table.filter(pc.equal(table["name"], stored_name))
    if not rows.num_rows:
        raise UsageError.unknown_choice(f"{folder}: score", name, inside)
    return folder, rows


def scores_of_pairs(pairs: pa.Table) -> list[str]:
    """The names of the scores that made ``pairs``; imported ones, which have no score, name their source."""
    columns = [pairs[name] for name in ("score", "source") if name in pairs.column_names]
    return [str(name) for name in pc.unique(pc.coalesce(*columns)).to_pylist()]


def judge_folders(sources: Sequence[str | Path], name: str | None) -> list[Path]:
    """RUN/judge-NAME of each source; without a name, that of the only judge. Raises UsageError when there are several,
    or none."""
    runs = runs_of(sources)
    folders = [p.parent for run in runs for p in sorted(run.glob("judge-*/comparisons.parquet"))]
    names = sorted({p.name.removeprefix("judge-") for p in folders})
    if not names:
        raise UsageError("these rollouts have no comparisons", hint="`gymdata judge RUN --genrm MODEL` makes them")
    if name is None and len(names) > 1:
        raise UsageError(
            f"there are comparisons of {len(names)} judges: {', '.join(names)}", hint="name one with --judge"
        )
    if name is not None and name not in names:
        raise UsageError.unknown_choice("--judge", name, names)
    return [p for p in folders if p.name == f"judge-{name or names[0]}"]


def labels(table: pa.Table, threshold: float | None) -> tuple[np.ndarray, np.ndarray]:
    """(row numbers, desirable or not) of the rollouts that have a label, rising.

    Desirable: a reward above ``threshold``, or without one above the mean of the task's known rewards; undesirable:
    below. A rollout whose reward equals that bound has no label.
    """
    reward = pc.fill_null(table["reward"], np.nan).to_numpy().astype(np.float64)
    finite = np.isfinite(reward)
    if threshold is not None:
        bar = np.full(len(reward), threshold)
    else:
        codes = table["task_id"].combine_chunks().dictionary_encode().indices.to_numpy()
        tasks = int(codes.max(initial=-1)) + 1
        # Sorted, so that the sums do not depend on the order of the rows.
        order = np.lexsort((reward, codes))
        order = order[finite[order]]
        unit = float(unit_of(np.abs(reward[finite]).max(initial=0.0)))
        total = np.bincount(codes[order], weights=reward[order] / unit, minlength=tasks)
        count = np.bincount(codes[order], minlength=tasks)
        bar = (total / np.maximum(count, 1))[codes] * unit
    with np.errstate(over="ignore"):  # a difference beyond float64 is still above or below
        apart = np.where(finite, reward - bar, 0.0)
    scale = np.maximum(np.abs(np.where(finite, reward, 0.0)), np.abs(bar))
    rows = np.flatnonzero(finite & (np.abs(apart) > _TIE * scale))
    return rows, apart[rows] > 0
