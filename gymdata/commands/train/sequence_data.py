"""Experiences as rows of training, with what each algorithm needs besides ids and masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.commands.train.data import MASK, Facts, LengthCost, TrainingData
from gymdata.commands.train.pair_data import NamedSequences, check_numbers, numbers
from gymdata.commands.train.token_checksum import IDS
from gymdata.errors import DataError, RefusedError, UsageError, counted
from gymdata.rollouts.heads import head_fault
from gymdata.rollouts.ragged import Ragged, list_parts, offsets_of
from gymdata.rollouts.schema import HEAD
from gymdata.rollouts.soundness import Lists, is_rendered, refuse_unsound

#: Weights of the parts of a loss, a number per token each.
WEIGHTS = ("rl_weight", "ce_weight", "ref_kl_weight")
#: Columns of an experiences file that training reads; those from ``ref_logprobs`` on only where there are any.
EXPERIENCE_COLUMNS: tuple[str, ...] = (
    "rollout_id",
    "sequence_index",
    "input_ids",
    "loss_mask",
    "logprobs",
    "turn_starts",
    "advantages",
    "weight",
    "temperature",
    "policy_hash",
    "policy_version",
    "reward",
    "ref_logprobs",
    *WEIGHTS,
    "optimal_value",
)


def sequence_names(table: pa.Table) -> list[str]:
    """The name of each row of experiences."""
    numbers = table["sequence_index"].to_pylist()
    return [f"{rollout}/{index}" for rollout, index in zip(table["rollout_id"].to_pylist(), numbers, strict=True)]


def training_experiences(
    table: pa.Table,
    max_length: int | None = None,
    where: str = "experiences",
    first_row: int = 0,
    k: int = 0,
    *,
    ratios: bool = True,
) -> TrainingData:
    """The rows of a table (``EXPERIENCE_COLUMNS``), cut to ``max_length`` tokens when given; the first is row ``first_row``
    of ``where``. ``k``: with the sampler's heads, of k ids (−1: none) and log-probs (−∞: none) per trained token.
    ``ratios``: whether log-probs are needed, else a row may have none that are known.

    A sequence without a trained token (after the cut) is left out and named in ``cost``. Raises DataError for rows that
    contradict themselves and RefusedError (T205, T206, L301 to L303, R502) for rows that must not be trained on.
    """
    names = sequence_names(table)
    ids = Ragged.of(table["input_ids"], np.int32)
    mask, logprobs, advantages = (
        _beside(table, name, kind, ids, names, where, first_row)
        for name, kind in (("loss_mask", np.int8), ("logprobs", np.float32), ("advantages", np.float32))
    )
    _refuse_odd_turn_starts(table, ids, names, where, first_row)
    NamedSequences(ids, mask, logprobs, names).refuse_odd_mask(where)
    mask = mask.like(mask.values.copy())
    mask.values[ids.offsets[:-1][ids.lengths > 0]] = 0
    full = NamedSequences(ids, mask, logprobs, names)
    full.refuse_unsound("input_ids", "sequence", where, is_rendered(table), ratios=ratios)
    reference = _reference(table, full, where, first_row)
    _refuse_not_finite("advantages", advantages, full, where)
    check_numbers(table, {"weight": 0.0, "temperature": 0.0}, "sequence", names, where, first_row)
    weights = _weights(table, full, where, first_row)
    longest = int(full.lengths.max(initial=0))
    lengths = np.minimum(full.lengths, longest if max_length is None else max_length)
    short = full if (lengths == full.lengths).all() else full.cut(int(lengths.max()))
    trained = short.loss_mask.sums(short.is_trained)
    rows = np.flatnonzero(trained > 0)
    cost = LengthCost(
        "sequence",
        max_length,
        len(full),
        longest,
        rows_cut=int((lengths < full.lengths).sum()),
        trained_tokens_lost=int(full.is_trained.sum() - trained[rows].sum()),
        nothing_trained=tuple(names[i] for i in np.flatnonzero(trained == 0)),
    )
    facts = Facts(
        cost,
        policy_hashes=frozenset(table["policy_hash"].unique().to_pylist()),
        temperatures=frozenset(table["temperature"].unique().to_pylist()),
    )
    per_token = {"advantages": advantages, **reference, **weights, **_values(table, short, where)}
    lists = {IDS: short.token_ids, MASK: short.loss_mask, "logprobs": short.logprobs}
    lists |= {name: column.first(lengths) for name, column in per_token.items()}
    if k:
        is_used = full.is_trained & full.token_ids.is_head(lengths)
        offsets = offsets_of(k * short.n_trained)
        heads = _heads(table, full, is_used, k, where, first_row)
        lists |= {name: Ragged(head.ravel(), offsets) for name, head in zip(HEAD, heads, strict=True)}
    columns = {
        "name": pa.array(names, pa.string()),
        "weight": numbers(table, "weight"),
        "temperature": numbers(table, "temperature"),
        **{name: table[name] for name in ("rollout_id", "task_id", "policy_version") if name in table.column_names},
        **{name: column.to_arrow() for name, column in lists.items()},
    }
    return TrainingData(pa.table(columns), facts).take(rows)


def _refuse_odd_turn_starts(table: pa.Table, ids: Ragged, names: Sequence[str], where: str, first_row: int) -> None:
    """Raises DataError for a turn that begins outside of its row; rows that are made of rollouts have no such column."""
    if "turn_starts" not in table.column_names:
        return
    starts = Ragged.of(table["turn_starts"])
    odd = np.flatnonzero((starts.values < 0) | (starts.values > starts.spread(ids.lengths)))
    for row, _ in map(starts.locate, odd[:1]):
        raise DataError(
            f"{where}, row {first_row + row}, sequence {names[row]}: turn_starts: got {starts.values[odd[0]]}, expected "
            f"a place among its {counted(ids.lengths[row], 'token')}",
            hint="correct these rows, or leave them out",
        )


def _reference(table: pa.Table, sequences: NamedSequences, where: str, first_row: int) -> dict[str, Ragged]:
    """The saved log-probs of the reference, where every row has some. Raises RefusedError (L302, L303) for one of a trained
    token that is none."""
    if "ref_logprobs" not in table.column_names or table["ref_logprobs"].null_count:
        return {}
    ids, names = sequences.token_ids, sequences.names
    reference = _beside(table, "ref_logprobs", np.float32, ids, names, where, first_row)
    checked = reference.like(np.where(sequences.is_trained, reference.values, 0))
    refuse_unsound((Lists("input_ids", ids),), Lists("ref_logprobs", checked), lambda k: f"sequence {names[k]}", where)
    return {"ref_logprobs": reference}


def _values(table: pa.Table, cut: NamedSequences, where: str) -> dict[str, Ragged]:
    """The returns of a critic's training, and the ``values`` that an earlier one gave, where every row has some. Raises
    RefusedError (R502) for one that is not finite; ``cut``: the sequences of the rows, cut."""
    ids, columns = Ragged.of(table["input_ids"], np.int32), {}
    for name in ("returns", "values"):
        if name in table.column_names and (name == "returns" or not table[name].null_count):
            columns[name] = _beside(table, name, np.float32, ids, cut.names, where)
            _refuse_not_finite(name, columns[name].first(cut.lengths), cut, where)
    return columns


def _heads(
    table: pa.Table, sequences: NamedSequences, trained: np.ndarray, k: int, where: str, first_row: int
) -> tuple[np.ndarray, np.ndarray]:
    """The columns ``HEAD`` of the tokens that are true in ``trained``, (n, k) each, −1 and −∞ where there is none. Raises
    RefusedError for lists that do not fit, and as ``head_fault`` finds."""
    lists, names = {}, sequences.names
    for name in HEAD:
        rows = [list_parts(chunk) for chunk in table[name].chunks]
        flat = Ragged.joined(
            [Ragged.of(of_rows) for _, of_rows in rows] or [Ragged(np.empty(0), np.zeros(1, np.int64))]
        )
        lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(offsets) for offsets, _ in rows)])
        wrong = np.flatnonzero((lengths != sequences.lengths) & (lengths > 0))
        if len(wrong):
            row = int(wrong[0])
            raise RefusedError(
                f"{where}: row {first_row + row} ({names[row]}): {name} has {lengths[row]} lists, input_ids has "
                f"{sequences.lengths[row]} tokens ({counted(len(wrong), 'such row')})"
            )
        # The tokens of a row without heads take the list of no token, at the end.
        places = np.full(len(trained), len(flat), np.int64)
        places[sequences.token_ids.spread(lengths > 0)] = np.arange(len(flat))
        lists[name] = Ragged(flat.values, np.append(flat.offsets, flat.offsets[-1])).take(places[trained])
    ids, logprobs = (lists[name] for name in HEAD)
    if found := head_fault(ids, logprobs):
        token, code, what = found
        row, position = sequences.token_ids.locate(int(np.flatnonzero(trained)[token]))
        raise RefusedError(f"{where}: token {position} of {names[row]}: {what}", code=code)
    return _wide(ids, k, -1), _wide(logprobs, k, -np.inf)


def _wide(lists: Ragged, k: int, filler: float) -> np.ndarray:
    padded = lists.padded(filler)
    return np.pad(padded, ((0, 0), (0, k - padded.shape[1])), constant_values=filler)


def _weights(table: pa.Table, sequences: NamedSequences, where: str, first_row: int) -> dict[str, Ragged]:
    """The columns of weights that are there. Raises RefusedError for a weight that is not finite, is below 0, or is at
    a token that is not trained."""
    weights_of = {}
    for name in WEIGHTS:
        if name not in table.column_names or table[name].null_count == len(table):
            continue
        ids, names = sequences.token_ids, sequences.names
        weights_of[name] = weights = _beside(table, name, np.float32, ids, names, where, first_row)
        values = weights.values.copy()
        values[weights.offsets[:-1][weights.lengths > 0]] = 0
        for bad, why in (
            (~(np.isfinite(values) & (values >= 0)), "expected a finite weight of at least 0"),
            ((values != 0) & ~sequences.is_trained, "but its loss_mask is 0: set that to 1 to train it"),
        ):
            if tokens := np.flatnonzero(bad).tolist():
                row, token = weights.locate(tokens[0])
                raise RefusedError(
                    f"{where}: {name} of token {token} of {sequences.names[row]} is {values[tokens[0]]:g}, {why} "
                    f"({counted(len(tokens), 'such token')})"
                )
    return weights_of


def with_optimal_advantages(table: pa.Table, loss: str, where: str) -> pa.Table:
    """The table with reward − optimal_value as the advantage of every token. Raises UsageError when there is no such
    column."""
    if "optimal_value" not in table.column_names or table["optimal_value"].null_count:
        raise UsageError(
            f"--loss {loss} needs the column optimal_value, which {where} does not have in every row",
            hint="`gymdata experience RUN --optimal-value-beta 0.5 -o OUT` writes it",
        )
    advantage = pc.subtract(pc.fill_null(table["reward"], np.nan), table["optimal_value"]).to_numpy()
    ids = Ragged.of(table["input_ids"], np.int32)
    column = ids.like(ids.spread(advantage).astype(np.float32)).to_arrow()
    return table.set_column(table.column_names.index("advantages"), "advantages", column)


def _refuse_not_finite(what: str, numbers: Ragged, sequences: NamedSequences, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(numbers.values) & sequences.is_trained)
    if len(bad):
        raise RefusedError(
            f"{where}: {what} of {sequences.names[numbers.locate(bad[0])[0]]} is {numbers.values[bad[0]]} on a trained "
            f"token ({counted(len(bad), 'such token')})",
            code="R502",
        )


def _beside(
    table: pa.Table, name: str, kind: type, ids: Ragged, names: Sequence[str], where: str, first_row: int = 0
) -> Ragged:
    lists = Ragged.of(table[name], kind)
    wrong = np.flatnonzero(lists.lengths != ids.lengths)
    if len(wrong):
        row = int(wrong[0])
        raise RefusedError(
            f"{where}: row {first_row + row} ({names[row]}): {name} has {lists.lengths[row]} entries, input_ids has "
            f"{ids.lengths[row]} ({counted(len(wrong), 'such row')})",
            code="L301" if name == "logprobs" else None,
        )
    return lists


#: Columns of an experiences file that a critic's training reads; ``values`` only where there are any.
VALUE_COLUMNS: tuple[str, ...] = (*EXPERIENCE_COLUMNS[:-1], "task_id", "returns", "values")
