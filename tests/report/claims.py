"""A second way to every number of a report: SQL over the same files, by the number's place in the report's object.

``{x}`` in a place is a word that the files decide (a part's name, an index). What is no SQL is numpy or text of what SQL
gave: a percentile bootstrap, a sentence.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from gymdata.checks.violations import CODES
from gymdata.commands.query.views import Views, find_files, open_views

Twin = Callable[..., Any]
_Z = 1.959963984540054
SCORED = "(SELECT * FROM rollouts WHERE isfinite(reward))"
PARTS = "(SELECT task_id, p.name AS name, p.value AS value FROM (SELECT task_id, unnest(rewards) AS p FROM rollouts))"


@functools.cache
def views(*paths: Path) -> Views:
    """gymdata's views over the files, opened once: each call of ``gymdata.query`` would look them up again."""
    opened = OPEN.enter_context(open_views(find_files(paths)))
    opened.prepare("")
    return opened


#: Closed by whoever asks.
OPEN = contextlib.ExitStack()


@functools.cache
def answered(query: str, *paths: Path) -> list[dict[str, Any]]:
    """Asked once: reports of several runs have the figures of each."""
    return list(views(*paths).con.sql(query).to_arrow_table().to_pylist())


def table(query: str, *paths: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in answered(query, *paths)]


def rows(query: str, *paths: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table(query, *paths)]


def one(query: str, *paths: Path) -> Any:
    """The only value of a SELECT over gymdata's views."""
    ((value,),) = rows(query, *paths)
    return value


def counts(query: str, *paths: Path) -> dict[str, int]:
    """Two columns as an object."""
    return dict(rows(query, *paths))


def plain(query: str) -> Any:
    """SQL over files that are no tables of gymdata's."""
    return duckdb.sql(query)


def fact(folder: Path, place: str, file: str = "run.json") -> Any:
    """What JSON holds at a JSON path."""
    ((text,),) = plain(f"SELECT content::JSON -> '{place}' FROM read_text('{folder / file}')").fetchall()
    return None if text is None else json.loads(text)


def log(folder: Path) -> str:
    """A trainer's log as a relation of one JSON column; lines that are no JSON are left out."""
    lines = f"SELECT unnest(string_split(content, chr(10))) AS line FROM read_text('{folder / 'metrics.jsonl'}')"
    # DuckDB takes NaN in JSON for a number, and so does Python; a torn line is neither's.
    return f"(SELECT row_number() OVER () AS nth, line FROM ({lines}) WHERE line LIKE '{{%}}')"


def wilson(count: str, n: str) -> str:
    """Wilson's interval in SQL; null where n is 0."""
    middle, square = f"({count} / {n} + {_Z**2 / 2} / {n})", f"(1 + {_Z**2} / {n})"
    half = f"{_Z} * sqrt({count} / {n} * (1 - {count} / {n}) / {n} + {_Z**2 / 4} / ({n} * {n}))"
    low = f"CASE WHEN {count} = 0 THEN 0 ELSE ({middle} - {half}) / {square} END"
    return f"CASE WHEN {n} > 0 THEN [{low}, CASE WHEN {count} = {n} THEN 1 ELSE ({middle} + {half}) / {square} END] END"


def share(count: str, n: str, source: str) -> str:
    """A proportion of what ``source`` is, as an object."""
    inner = f"SELECT ({count})::DOUBLE AS c, ({n})::DOUBLE AS n FROM {source}"
    rate = "CASE WHEN n > 0 THEN c / n END"
    return f"SELECT {{'count': c, 'n': n, 'rate': {rate}, 'ci95': {wilson('c', 'n')}}} FROM ({inner})"


def bars(values: str, bins: int = 20) -> str:
    """A histogram of the finite values of the SELECT ``values`` (one column, x): of few at equal distances each, else of
    equal bins, whole ones of whole numbers."""
    return f"""WITH v AS (SELECT x::DOUBLE AS x FROM ({values}) WHERE isfinite(x)),
      d AS (SELECT x, count(*) AS n, x - lag(x) OVER (ORDER BY x) AS gap FROM v GROUP BY x),
      f AS (SELECT min(x) AS low, max(x) AS high, coalesce(min(gap), 1) AS step FROM d),
      k AS (SELECT max(x - low) / any_value(step) < {bins}
                   AND max(abs((x - low) / step - round((x - low) / step))) < 1e-6 AS each,
                   CASE WHEN bool_and(x = round(x)) THEN ceil(any_value(high - low) / {bins})
                        ELSE any_value(high - low) / {bins} END AS part FROM d, f),
      w AS (SELECT low, CASE WHEN each THEN step ELSE part END AS wide, each,
                   CASE WHEN each THEN round((high - low) / step) + 1 ELSE ceil((high - low) / part - 1e-6) END AS n
            FROM f, k),
      c AS (SELECT CASE WHEN each THEN round((x - low) / wide) ELSE least(floor((x - low) / wide), n - 1) END AS i,
                   count(*) AS n FROM v, w GROUP BY 1)
      SELECT coalesce(list({{'low': low + i * wide, 'high': low + (i + CASE WHEN each THEN 0 ELSE 1 END) * wide,
                             'count': coalesce(c.n, 0)}} ORDER BY i), [])
      FROM (SELECT *, unnest(range(n::INT)) AS i FROM w WHERE n IS NOT NULL) LEFT JOIN c USING (i)"""


def bootstrap(cells: Sequence[tuple[Any, ...]]) -> list[float] | None:
    """The percentiles of Σ sums / Σ counts over 2,000 draws of as many tasks (their sums and counts), seed 0; None for
    tasks that are all alike."""
    kinds = sorted(Counter((float(total), float(n)) for total, n in cells).items())
    if len(kinds) < 2:
        return None
    values, times = np.array([kind for kind, _ in kinds]), np.array([n for _, n in kinds])
    drawn = np.random.default_rng(0).multinomial(len(cells), times / len(cells), size=2_000) @ values
    return [float(end) for end in np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])]


def means_ci(path: Path, source: str, value: str) -> list[float] | None:
    return bootstrap(rows(f"SELECT sum({value}), count(*) FROM {source} GROUP BY task_id", path))


def rewards_ci(path: Path) -> Any:
    alone, binary = rows(f"SELECT count(*) = count(DISTINCT task_id), bool_and(reward IN (0, 1)) FROM {SCORED}", path)[
        0
    ]
    if alone and binary:
        return one(
            f"SELECT {wilson('c', 'n')} FROM (SELECT sum(reward) AS c, count(*)::DOUBLE AS n FROM {SCORED})", path
        )
    return means_ci(path, SCORED, "reward")


def parts(path: Path) -> dict[str, Any]:
    found = {}
    for name, n, mean in rows(f"SELECT name, count(value), avg(value) FROM {PARTS} GROUP BY 1", path):
        of = f"(SELECT * FROM {PARTS} WHERE name = '{name}' AND value IS NOT NULL)"
        found[name] = {"n": n, "mean": mean, "ci95": means_ci(path, of, "value")}
    return found


def pass_at_k(path: Path) -> list[dict[str, Any]]:
    """1 − Π (n − c − i) / (n − i) over i below k, of tasks with at least k rollouts."""
    tasks = f"(SELECT count(*) AS n, count(*) FILTER (reward > 0.5) AS c FROM {SCORED} GROUP BY task_id)"
    found = []
    for (k,) in rows(f"SELECT (2 ** i)::INT FROM range(20) t(i) WHERE 2 ** i <= (SELECT max(n) FROM {tasks})", path):
        miss = f"list_aggregate(list_transform(range({k}), lambda i: greatest(n - c - i, 0) / (n - i)), 'product')"
        each = [value for (value,) in rows(f"SELECT 1 - {miss} FROM {tasks} WHERE n >= {k}", path)]
        ends = bootstrap([(value, 1) for value in each])
        if k == 1 and one(f"SELECT max(n) FROM {tasks}", path) == 1:
            ends = one(
                f"SELECT {wilson('c', 'n')} FROM (SELECT sum(c)::DOUBLE AS c, count(*)::DOUBLE AS n FROM {tasks})", path
            )
        few = one(f"SELECT count(*) FROM {tasks} WHERE n < {k}", path)
        found.append({"k": k, "value": sum(each) / len(each), "ci95": ends, "tasks": len(each), "too_few": few})
    return found


def lengths(column: str) -> str:
    return f"""SELECT {{'sum': sum({column}), 'mean': avg({column}), 'p10': quantile_cont({column}, 0.1),
      'median': median({column}), 'p90': quantile_cont({column}, 0.9), 'max': max({column}),
      'histogram': ({bars(f"SELECT {column} AS x FROM rollouts")})}} FROM rollouts"""


TOOL = "(SELECT name, regexp_matches(content, '^{ *\"error\" *: *[^ n]') AS bad FROM messages WHERE role = 'tool')"
LOGPROBS = "(SELECT unnest(generation_log_probs) AS p FROM turns)"
OVER_TIME = """WITH t AS (SELECT epoch(started_at) AS b, epoch(started_at) + duration_s AS e, n_generated_tokens AS n
    FROM rollouts), s AS (SELECT min(b) AS low, (max(e) - min(b)) / 24 AS step FROM t),
  h AS (SELECT least(floor((e - low) / step), 23) AS i, count(*) AS c, sum(n) AS n FROM t, s GROUP BY 1),
  f AS (SELECT least(floor((epoch(TRY_CAST(failures.at AS TIMESTAMPTZ)) - low) / step), 23) AS i, count(*) AS failed
        FROM failures, s WHERE TRY_CAST(failures.at AS TIMESTAMPTZ) IS NOT NULL GROUP BY 1)
  SELECT list({'s': (i + 1) * step, 'rollouts': coalesce(c, 0), 'tokens_per_s': coalesce(n, 0) / step,
               'failures': coalesce(failed, 0)} ORDER BY i)
  FROM (SELECT *, unnest(range(24)) AS i FROM s) LEFT JOIN h USING (i) LEFT JOIN f USING (i)"""

#: Faults that the runs here have, by code, as SQL counts them.
FAULTS = {
    "L301": "SELECT count(*) FROM turns WHERE len(generation_log_probs) <> len(generation_token_ids)",
    "L302": f"SELECT count(*) FROM {LOGPROBS} WHERE p IS NULL OR NOT isfinite(p)",
    "L303": f"SELECT count(*) FROM {LOGPROBS} WHERE p > 0 AND isfinite(p)",
    "L306": f"SELECT (count(*) >= 64 AND bool_and(abs(100 * p - round(100 * p)) < 1e-4))::INT FROM {LOGPROBS}",
    "R501": "SELECT count(*) FROM rollouts WHERE reward IS NULL",
    "R503": f"""SELECT count(*) FROM (SELECT 1 FROM {SCORED} GROUP BY group_id
      HAVING count(*) > 1 AND min(reward) = max(reward))""",
    "B807": f"""SELECT (corr(r, e) >= 0.99 AND abs(corr(r, s)) < 0.9)::INT FROM (SELECT reward AS r,
      list_filter(rewards, lambda p: p.name = 'exact')[1].value AS e,
      list_filter(rewards, lambda p: p.name = 'style')[1].value AS s FROM {SCORED})""",
}
_BAD_TURN = """len(t.generation_log_probs) <> len(t.generation_token_ids)
  OR len(list_filter(t.generation_log_probs, lambda p: p IS NULL OR NOT isfinite(p) OR p > 0)) > 0"""


def by_code(path: Path) -> dict[str, int]:
    return {code: n for code, query in FAULTS.items() if (n := one(query, path))}


def of_severity(severity: str) -> Twin:
    return lambda path: sum(n for code, n in by_code(path).items() if CODES[code].severity == severity)


def behavior(path: Path) -> dict[str, str]:
    if "B807" not in by_code(path):
        return {}
    exact, style = rows(FAULTS["B807"].replace("(corr(r, e) >= 0.99 AND abs(corr(r, s)) < 0.9)::INT",
                                               "corr(r, e), corr(r, s)"), path)[0]  # fmt: skip
    return {"B807": f"the reward follows part 'exact' (correlation {exact:.3f}), whatever 'style' ({style:.2f}) says"}


def examples(path: Path) -> dict[str, Any]:
    """The best, the worst and a rollout of the lower median reward, each as near the median length as there is."""
    wanted = {"best": "max(reward)", "worst": "min(reward)", "typical": "quantile_disc(reward, 0.5)"}
    found: dict[str, Any] = {}
    for name, value in wanted.items():
        chosen = one(
            f"""SELECT rollout_id FROM {SCORED}, (SELECT {value} AS v, median(n_generated_tokens) AS m FROM {SCORED})
            WHERE reward = v ORDER BY abs(n_generated_tokens - m), rollout_id LIMIT 1""", path)  # fmt: skip
        if chosen not in {row["rollout_id"] for row in found.values()}:
            found[name] = shown(path, chosen)
    return found


#: What validation finds in an example, of which the codes are compared.
FOUND = "violations"


def shown(path: Path, rollout_id: str) -> dict[str, Any]:
    """A whole row, its JSON texts parsed."""
    faults = {code: query for code, query in FAULTS.items() if code.startswith("L")}
    (row,) = table(f"SELECT * FROM rollouts WHERE rollout_id = '{rollout_id}'", path)
    for key in ("tools", "task", "extra"):
        row[key] = json.loads(row[key])
    row["messages"] = [{key: value for key, value in m.items() if value is not None} for m in row["messages"]]
    for message in row["messages"]:
        if "tool_calls" in message:
            message["tool_calls"] = json.loads(message["tool_calls"])
    of = f"turns AS (SELECT * FROM main.turns WHERE rollout_id = '{rollout_id}')"
    # These have no reference answer.
    row["expected"] = None
    return row | {FOUND: sorted(code for code, query in faults.items() if one(f"WITH {of} {query}", path))}


#: What a path without rollouts has.
NO_ROLLOUTS: dict[str, Twin] = {name: lambda _, value=value: value for name, value in
                                (("score", None), ("rewards", None), ("pass_at_k", []), ("validation", None))}  # fmt: skip

ROLLOUTS: dict[str, str | Twin] = {
    "score": lambda _: "reward",
    "rewards.n": "SELECT count(*) FROM rollouts WHERE isfinite(reward)",
    "rewards.tasks": f"SELECT count(DISTINCT task_id) FROM {SCORED}",
    "rewards.rollouts": "SELECT count(*) FROM rollouts",
    "rewards.mean": f"SELECT avg(reward) FROM {SCORED}",
    "rewards.ci95": rewards_ci,
    "rewards.min": f"SELECT min(reward) FROM {SCORED}",
    "rewards.max": f"SELECT max(reward) FROM {SCORED}",
    "rewards.binary": f"SELECT bool_and(reward IN (0, 1)) FROM {SCORED}",
    "rewards.histogram": bars(f"SELECT reward AS x FROM {SCORED}"),
    "rewards.parts": parts,
    "rewards.groups": f"""SELECT {{'n': count(*), 'of_several': count(*) FILTER (n > 1), 'mixed': count(*) FILTER (a < b),
      'without_variance': count(*) FILTER (n > 1 AND a = b),
      'means': ({bars(f"SELECT avg(reward) AS x FROM {SCORED} GROUP BY group_id")})}}
      FROM (SELECT count(*) AS n, min(reward) AS a, max(reward) AS b FROM {SCORED} GROUP BY group_id)""",
    "pass_at_k": pass_at_k,
    "lengths.generated": lengths("n_generated_tokens"),
    "lengths.context": lengths("n_context_tokens"),
    "lengths.turns": lengths("n_turns"),
    "truncated": share("count(*) FILTER (status = 'truncated')", "count(*)", "rollouts"),
    "stop_reasons": lambda p: counts(
        "SELECT stop_reason, count(*) FROM rollouts WHERE stop_reason IS NOT NULL GROUP BY 1", p
    ),
    "masked": lambda p: counts(
        """SELECT (extra->>'$.failure.kind') || ': ' || split_part((extra->>'$.failure.reason'), ': ', 1), count(*)
        FROM rollouts WHERE (extra->>'$.failure.kind') IS NOT NULL GROUP BY 1""",
        p,
    ),
    "breaks": "SELECT count(*) FROM rollouts WHERE n_breaks > 0",
    "finish_reasons": lambda p: counts("SELECT finish_reason, count(*) FROM turns GROUP BY 1", p),
    "logprobs.tokens": f"SELECT count(*) FROM {LOGPROBS} WHERE isfinite(p)",
    "logprobs.not_finite": f"SELECT count(*) FROM {LOGPROBS} WHERE p IS NULL OR NOT isfinite(p)",
    "logprobs.mean": f"SELECT avg(p::DOUBLE) FROM {LOGPROBS} WHERE isfinite(p)",
    "logprobs.entropy": f"SELECT -avg(p::DOUBLE) FROM {LOGPROBS} WHERE isfinite(p)",
    # Bins of a half from −10 to 0; what is beyond belongs to the first or the last.
    "logprobs.histogram": f"""SELECT list({{'low': i / 2 - 10, 'high': i / 2 - 9.5, 'count': coalesce(n, 0)}} ORDER BY i)
      FROM range(20) t(i) LEFT JOIN (SELECT least(greatest(floor((p + 10) * 2), 0), 19)::INT AS i, count(*) AS n
      FROM {LOGPROBS} WHERE isfinite(p) GROUP BY 1) USING (i)""",
    **{f"tools.{key}": f"SELECT x.{key} FROM ({share('count(*) FILTER (bad)', 'count(*)', TOOL)} ) t(x)"
       for key in ("count", "n", "rate", "ci95")},
    "tools.by_name.{name}": lambda p, name: one(
        share("count(*) FILTER (bad)", "count(*)", f"(SELECT * FROM {TOOL} WHERE name = '{name}')"), p
    ),
    "over_time": OVER_TIME,
    "failures.n": "SELECT count(*) FROM failures",
    "failures.by_kind": lambda p: counts("SELECT kind, count(*) FROM failures GROUP BY 1", p),
    "examples": examples,
    "validation.rollouts": "SELECT count(*) FROM rollouts",
    "validation.trainable": f"SELECT count(*) FROM rollouts WHERE len(list_filter(turns, lambda t: {_BAD_TURN})) = 0",
    "validation.errors": of_severity("error"),
    "validation.warnings": of_severity("warning"),
    "validation.infos": of_severity("info"),
    "validation.by_code": by_code,
    "validation.behavior": behavior,
}  # fmt: skip


def what(path: Path, name: str) -> Any:
    """Facts of run.json."""
    if name == "seconds":
        times = fact(path, "$.attempts") or []
        spent = [plain(f"SELECT epoch('{a['ended_at']}'::TIMESTAMPTZ - '{a['started_at']}'::TIMESTAMPTZ)").fetchall()
                 for a in times if "ended_at" in a]  # fmt: skip
        return sum(seconds for ((seconds,),) in spent)
    if name == "model":
        return next(
            v for place in ("$.policy", "$.config.model", "$.model.path") if (v := fact(path, place)) is not None
        )
    if name == "data":
        given = fact(path, "$.config.tasks")
        return given if given is not None else ", ".join(parent["path"] for parent in fact(path, "$.parents"))
    if name == "engine":
        return " ".join(v for key in ("engine", "engine_version") if (v := fact(path, f"$.engine.{key}")) is not None)
    if name == "versions":
        return ", ".join(f"{key} {value}" for key, value in fact(path, "$.versions").items())
    if name == "command":
        return " ".join(fact(path, "$.command"))
    place = {"rewards": "$.config.reward", "started": "$.attempts[0].started_at", "environment": "$.config.env"}
    return fact(path, place.get(name, f"$.{name}"))


def lineage(path: Path) -> list[dict[str, Any]]:
    """A folder, then what it was made from."""
    parents = [Path(one["path"]) for one in fact(path, "$.parents") or []]
    command = " ".join(fact(path, "$.command") or [])
    here = {"stage": fact(path, "$.stage"), "run_id": fact(path, "$.run_id"), "command": command}
    return [here | {"parents": [str(p) for p in parents]}, *(row for p in parents for row in lineage(p))]


def curve(path: Path, name: str, x: str = "step") -> list[list[float]]:
    """The points of a number of a log; what is no number there is left out."""
    value = f"TRY_CAST(json_extract_string(line, '$.\"{name}\"') AS DOUBLE)"
    query = f"SELECT (line::JSON ->> '{x}')::DOUBLE, {value} FROM {log(path)} WHERE isfinite({value}) ORDER BY nth"
    return [list(row) for row in plain(query).fetchall()]


CURVES = (
    "loss", "rewards/accuracies", "rewards/margins", "accuracy", "heldout/accuracy", "ratio/mean", "kl", "entropy",
    "mean_token_accuracy", "grad_norm", "learning_rate",
)  # fmt: skip


def curves(path: Path, _: str) -> dict[str, Any]:
    return {name: points for name in CURVES if (points := curve(path, name))}


def epochs(path: Path) -> list[Any]:
    if fact(path, "$.stage") != "finetune":
        return []
    return [json.loads(line) for (line,) in plain(f"SELECT line FROM {log(path)} ORDER BY nth").fetchall()]


_ADVANTAGES = """(SELECT list_avg(list_transform(list_filter(range(1, len(loss_mask) + 1), lambda i: loss_mask[i] <> 0),
  lambda i: advantages[i]::DOUBLE)) AS x FROM experiences)"""
_LONGER = "(SELECT list_sum(chosen_mask) AS a, list_sum(rejected_mask) AS b FROM pairs)"
#: 1 where the first answer won, −1 where the second did, 0 for a tie, null where nothing was judged.
_WON = """(SELECT *, CASE WHEN status = 'judged' THEN sign(CASE WHEN score_1 <> score_2 THEN score_1 - score_2
  ELSE 3.5 - ranking END) END AS won FROM comparisons)"""
_BOTH = f"""(SELECT a.won AS won, b.won AS other FROM {_WON} a JOIN {_WON} b ON a.rollout_i = b.rollout_j AND
  a.rollout_j = b.rollout_i AND a.judge_idx = b.judge_idx WHERE a.rollout_i < a.rollout_j AND a.won IS NOT NULL AND
  b.won IS NOT NULL)"""
_TWICE = f"""(SELECT a.won AS won, b.won AS other FROM {_WON} a JOIN {_WON} b USING (rollout_i, rollout_j)
  WHERE a.judge_idx < b.judge_idx AND a.won IS NOT NULL AND b.won IS NOT NULL)"""
_SIZED = f"""(SELECT won, sign(i.size - j.size) AS longer FROM {_WON} w JOIN sizes i ON w.rollout_i = i.rollout_id
  JOIN sizes j ON w.rollout_j = j.rollout_id)"""


def bias(folder: Path, _: str) -> dict[str, Any]:
    """Of the comparisons' own rows, and for lengths of the rollouts that were judged."""
    run = Path(fact(folder, "$.parents[0].path"))
    # The last message is the answer.
    answers = "WITH sizes AS (SELECT rollout_id, length(messages[-1].content) AS size FROM rollouts) "
    return {
        "position_bias": one(share("count(*) FILTER (won = 1)", "count(*) FILTER (won <> 0)", _WON), folder),
        "position_inconsistency": one(share("count(*) FILTER (won = other AND won <> 0)", "count(*)", _BOTH), folder),
        "ties": one(share("count(*) FILTER (won = 0)", "count(won)", _WON), folder),
        "failures": one(share("count(*) FILTER (won IS NULL)", "count(*)", _WON), folder),
        "judge_agreement": one(share("count(*) FILTER (won = other)", "count(*)", _TWICE), folder),
        "longer_wins": one(answers + share("count(*) FILTER (won = longer)", "count(*)",
                                           f"(SELECT * FROM {_SIZED} WHERE won <> 0 AND longer <> 0)"), folder, run),
    }  # fmt: skip


STAGES: dict[str, str | Twin] = {
    "path": lambda path: str(path),
    "threshold": lambda _: 0.5,
    "what.{name}": what,
    "end": lambda path: fact(path, "$", "result.json") if (path / "result.json").is_file() else None,
    "lineage": lineage,
    "pairs.{i}": lambda p, _: one(
        f"""SELECT {{'path': '{p / "pairs.parquet"}', 'pairs': count(*), 'tasks': count(DISTINCT task_id),
        'scores': list_sort(list(DISTINCT coalesce(score, source))),
        'margin': {{'mean': avg(margin), 'histogram': ({bars("SELECT margin AS x FROM pairs")})}},
        'chosen_tokens': avg(list_sum(chosen_mask)), 'rejected_tokens': avg(list_sum(rejected_mask)),
        'chosen_longer': ({share("count(*) FILTER (a > b)", "count(*) FILTER (a <> b)", _LONGER)})}} FROM pairs""", p),
    "scores.{i}": lambda p, _: one(
        f"""SELECT {{'path': '{p / "scores.parquet"}', 'name': any_value(name),
        'scored': count(*) FILTER (status = 'scored'), 'failed': count(*) FILTER (status <> 'scored'), 'mean': avg(value),
        'histogram': ({bars("SELECT value AS x FROM scores")})}} FROM scores""", p),
    "experiences.{i}": lambda p, _: {"estimator": fact(p, "$.config.estimator")} | one(
        f"""SELECT {{'path': '{p / "experiences.parquet"}', 'sequences': count(*), 'rollouts': count(DISTINCT rollout_id),
        'groups': count(DISTINCT group_id), 'tokens': sum(len(input_ids)), 'trained_tokens': sum(list_sum(loss_mask)),
        'advantage': {{'mean': (SELECT avg(x) FROM {_ADVANTAGES}), 'histogram': ({bars(f"SELECT x FROM {_ADVANTAGES}")})}},
        'positive': ({share("count(*) FILTER (x > 0)", "count(x)", _ADVANTAGES)})}} FROM experiences""", p),
    "judge.{i}.path": lambda p, _: str(p),
    "judge.{i}.judge": lambda p, _: one("SELECT any_value(judge) FROM comparisons", p),
    "judge.{i}.comparisons.{status}": lambda p, _, status: one(
        f"SELECT count(*) FROM comparisons WHERE status = '{status}'", p
    ),
    "judge.{i}.bias": bias,
    "training.{i}.path": lambda p, _: str(p),
    "training.{i}.stage": lambda p, _: fact(p, "$.stage"),
    "training.{i}.status": lambda p, _: fact(p, "$.status"),
    "training.{i}.steps": lambda p, _: fact(p, "$.steps"),
    "training.{i}.trained_tokens": lambda p, _: fact(p, "$.trained_tokens.batches.count"),
    "training.{i}.file_tokens": lambda p, _: fact(p, "$.trained_tokens.file.count"),
    "training.{i}.tokens_equal": lambda p, _: (
        fact(p, "$.trained_tokens.equal") or fact(p, "$.trained_tokens.epochs[#-1].equal")
    ),
    "training.{i}.first": lambda p, _: fact(p, "$.training.first") or {},
    "training.{i}.last": lambda p, _: fact(p, "$.training.last") or {},
    "training.{i}.ratio_by_version": lambda p, _: fact(p, "$.ratio_by_version") or {},
    "training.{i}.curves": curves,
    "epochs": epochs,
}  # fmt: skip


_BOTH_RUNS = "(SELECT task_id, avg(reward) AS r FROM rollouts WHERE isfinite(reward) GROUP BY 1)"


def moves(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Each task that both runs scored: ``a`` and ``b``, its mean rewards, and ``way``."""
    con = duckdb.connect()
    for name, path in zip("ab", paths, strict=True):
        con.register(name, views(path).con.sql(f"SELECT * FROM {_BOTH_RUNS}").to_arrow_table())
    found = con.sql(
        """SELECT task_id, a.r AS a, b.r AS b, b.r - a.r AS move, CASE WHEN abs(b.r - a.r) <= 1e-9 THEN 'same'
        WHEN b.r > a.r THEN 'up' ELSE 'down' END AS way FROM a JOIN b USING (task_id) ORDER BY task_id""")  # fmt: skip
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def only(paths: Sequence[Path], one_: int) -> int:
    tasks = [{task for (task,) in rows(f"SELECT task_id FROM {_BOTH_RUNS}", path)} for path in paths]
    return len(tasks[one_] - tasks[1 - one_])


def average(paths: Sequence[Path], column: str) -> float:
    return float(np.mean([move[column] for move in moves(paths)]))


def by_kind(paths: Sequence[Path]) -> dict[str, Any]:
    """The tasks of these runs have one field of few values: kind."""
    kinds = counts("SELECT DISTINCT task_id, task ->> 'kind' FROM rollouts", paths[1])
    ways = Counter((kinds[move["task_id"]], move["way"]) for move in moves(paths))
    values = sorted({kind for kind, _ in ways})
    means = {v: {side: float(np.mean([move[at] for move in moves(paths) if kinds[move["task_id"]] == v]))
                 for side, at in (("before", "a"), ("after", "b"))} for v in values}  # fmt: skip
    return {"kind": [{"value": v} | {way: ways[v, way] for way in ("up", "down", "same")} | means[v] for v in values]}


def moved(paths: Sequence[Path], way: str, sign: int) -> list[dict[str, Any]]:
    """The three tasks that moved most, with the worst rollout of the run that was worse and the best of the other."""
    found = [move for move in moves(paths) if move["way"] == way]
    found.sort(key=lambda move: (sign * move["move"], move["task_id"]))
    first = f"SELECT rollout_id FROM {SCORED} WHERE task_id = '{{}}' ORDER BY reward {{}}, rollout_id LIMIT 1"
    orders = ("ASC", "DESC") if way == "up" else ("DESC", "ASC")
    return [
        {"task_id": m["task_id"], "before": m["a"], "after": m["b"]}
        | {side: shown(path, one(first.format(m["task_id"], order), path))
           for side, path, order in zip(("first", "second"), paths, orders, strict=True)}
        for m in found[:3]
    ]  # fmt: skip


COMPARED: dict[str, Twin] = {
    "difference.n": lambda ps: len(moves(ps)),
    "difference.rate": lambda ps: average(ps, "move"),
    "difference.ci95": lambda ps: bootstrap([(move["move"], 1) for move in moves(ps)]),
    "difference.before": lambda ps: average(ps, "a"),
    "difference.after": lambda ps: average(ps, "b"),
    "difference.binary": lambda ps: all(one(f"SELECT bool_and(reward IN (0, 1)) FROM {SCORED}", p) for p in ps),
    "difference.only_first": lambda ps: only(ps, 0),
    "difference.only_second": lambda ps: only(ps, 1),
    **{
        f"flips.{way}": (lambda ps, way=way: sum(move["way"] == way for move in moves(ps)))
        for way in ("up", "down", "same")
    },
    "flips.by_field": by_kind,
    "flips.examples.up": lambda ps: moved(ps, "up", -1),
    "flips.examples.down": lambda ps: moved(ps, "down", 1),
}


def ask(twin: str | Twin, path: Path | Sequence[Path], words: Sequence[str]) -> Any:
    if isinstance(twin, str):
        assert isinstance(path, Path)
        return one(twin, path)
    return twin(path, *words)


def find(twins: Mapping[str, str | Twin], at: Sequence[str]) -> tuple[str, list[str]] | None:
    """The place among ``twins`` that ``at`` is, and the words that stand for its ``{x}``."""
    for place in twins:
        wanted = place.split(".")
        if len(wanted) == len(at) and all(w == a or w[0] == "{" for w, a in zip(wanted, at, strict=True)):
            return place, [a for w, a in zip(wanted, at, strict=True) if w[0] == "{"]
    return None
