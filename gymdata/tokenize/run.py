"""``gymdata tokenize``: rollouts or pairs that have only text in, the same with ids rendered by a chat template out.

Invariants: what was sampled stays as it was read, byte for byte; rendered turns and pairs are marked as such, have no
log-probabilities, and its run.json names the tokenizer, the template and the files that it was made from; a row that cannot
be rendered is in the output without ids, and the reason is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gymdata.checks.breaks import Reading, relations
from gymdata.checks.violations import CODES
from gymdata.errors import DataError, RefusedError, UsageError, counted
from gymdata.progress import NullProgress, Progress
from gymdata.public import Report, Row, paths_of
from gymdata.rollouts.messages import RolloutRow
from gymdata.rollouts.schema import PAIRS, ROLLOUTS, Table
from gymdata.rollouts.turn_columns import TurnColumns
from gymdata.store import StageOutput, scan_batches
from gymdata.store.columns import build, to_rows
from gymdata.store.lineage import Paths, common_identity, parents_of
from gymdata.store.lines import decode, encode
from gymdata.store.paths import files_apart
from gymdata.store.stage_output import described_by
from gymdata.store.tables import holds_pairs
from gymdata.tokenize.rendering import rendered_pair, rendered_row
from gymdata.tokenize.settings import Mask, TokenizeConfig

if TYPE_CHECKING:
    from gymdata.chat.template import TransformersChat

_BATCH_ROWS = 512
_SIDES = ("prompt", "chosen", "rejected")
_BREAKS = ("T200", "T201", "T202", "T203", "T204")
_HASHES = ("tokenizer_hash", "chat_template_hash")


@dataclass(slots=True, repr=False)
class TokenizeReport(Report):
    """The result of ``tokenize``. ``rollouts``, or ``pairs``, = ``rendered`` + ``sampled`` (they had ids, and are as they
    were) + those of ``not_rendered`` (id → why); ``breaks``: turns whose prompt rewrites earlier ones, by code."""

    tokenizer: str
    template: str
    rollouts: int = 0
    pairs: int = 0
    rendered: int = 0
    sampled: int = 0
    turns: int = 0
    tokens_generated: int = 0
    tokens_context: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    first_break: str | None = None
    not_rendered: dict[str, str] = field(default_factory=dict)
    file: str = ""

    @property
    def ok(self) -> bool:
        """No rollout stays without ids."""
        return not self.not_rendered

    def rows(self) -> list[Row]:
        names = {code: f"{code} {CODES[code].name}" for code in self.breaks}
        first = next(iter(self.not_rendered.items()), None)
        return [
            ("pairs", self.pairs) if self.pairs else ("rollouts", self.rollouts),
            ("rendered from text (T213)", self.rendered),
            *([("with sampled ids, kept", self.sampled)] if self.sampled else []),
            *([("not rendered", len(self.not_rendered)), ("  first", ": ".join(first))] if first else []),
            *([] if self.pairs else [("turns rendered", self.turns)]),
            ("tokens", f"{self.tokens_generated:,} of the assistant, {self.tokens_context:,} of context"),
            *((f"breaks: {names[code]}", n) for code, n in self.breaks.items()),
            *([("  first", self.first_break)] if self.first_break else []),
            ("tokenizer", self.tokenizer),
            ("chat template", self.template),
            ("logprobs", "none: nothing was sampled"),
            ("written to", self.file),
        ]


def tokenize(
    path: Paths,
    output: str | Path | None = None,
    *,
    config: TokenizeConfig | None = None,
    overwrite: bool = False,
    command: Sequence[str] = (),
    progress: Progress | None = None,
    **settings: Any,
) -> TokenizeReport:
    """Write the rollouts, or the pairs, under ``path`` (run folder, file, glob, or several of them); those without token ids
    get the ids that the chat template of ``tokenizer`` gives their text.

    ``config`` is a ``TokenizeConfig``. ``output``: a folder (``rollouts.parquet`` or ``pairs.parquet``) or a
    .parquet/.jsonl file.
    Rendered turns are marked (T213) and have no log-probabilities: pairs and all trainers but batch RL take them with
    ``allow_rendered``. Raises DataError when there is no tokenizer, UsageError when its template cannot be used or sampled
    rollouts among them are of another tokenizer, RefusedError when there is nothing to render.
    """
    from gymdata.chat.template import TransformersChat

    config = TokenizeConfig.called_with(tokenize, config, settings)
    sources = paths_of(path, "tokenize")
    table = PAIRS if all(map(holds_pairs, sources)) else ROLLOUTS
    target = files_apart(output, f"{table.name}.parquet", sources, table, "rendered", dry_run=False)["kept"]
    template = str(config.chat_template) if config.chat_template is not None else None
    chat = TransformersChat.load(
        config.tokenizer, chat_template=template, tool_parser="none", keep_reasoning=config.keep_reasoning
    )
    facts = chat.facts()
    shown = (
        "replaced by its form that keeps earlier turns" if facts["chat_template_replaced"] else "the tokenizer's own"
    )
    report = TokenizeReport(config.tokenizer, template or shown, file=str(target))
    how = {"tokenizer": config.tokenizer, **{name: facts[name] for name in _HASHES}}
    with StageOutput(
        described_by(target, f"{table.name}.parquet"), "tokenize", [target.name], overwrite=overwrite
    ) as out:
        parents = parents_of(sources)
        out.refuse_other("rendered", how, "rollouts that were rendered", parents=parents)
        batches = _batches(sources, table, chat, config.mask, report, progress or NullProgress())
        schema = pa.schema([table.schema.field(name) for name in _names(table)], metadata=table.metadata)
        out.batches(target.name, batches, table, schema)
        if not report.rendered and not report.not_rendered:
            raise RefusedError(
                f"{', '.join(map(str, sources))}: all {report.rollouts + report.pairs:,} {table.name} have token ids: "
                "nothing to render",
                hint="they can be used as they are",
            )
        identity = common_identity(sources)
        was = identity.get("tokenizer_hash")
        if (
            report.sampled and was is not None and was != facts["tokenizer_hash"]
        ):  # one file holds the ids of one tokenizer
            raise UsageError(
                f"--tokenizer {report.tokenizer}: {counted(report.sampled, 'rollout was', 'rollouts were')} sampled "
                "with another tokenizer",
                hint="give the tokenizer of their model, or leave them out with `gymdata filter`",
            )
        out.finish(
            {
                "command": list(command),
                "config": config.model_dump(mode="json"),
                "identity": {**identity, **{name: facts[name] for name in _HASHES}},
                "chat": facts,
                "rendered": how,
                "parents": parents,
                "counts": {k: v for k, v in asdict(report).items() if k not in ("file", "not_rendered", "first_break")},
                "not_rendered": report.not_rendered,
                "notes": ["token ids were rendered from text by a chat template, not sampled (T213)"],
            }
        )
    return report


def _names(table: Table) -> list[str]:
    return table.schema.names if table is ROLLOUTS else [*table.required(), "tools", "rendered"]


def _batches(
    sources: Sequence[str | Path],
    table: Table,
    chat: TransformersChat,
    mask: Mask,
    report: TokenizeReport,
    progress: Progress,
) -> Iterator[pa.RecordBatch]:
    """The rows in order: those with ids as they are, between those that are rendered."""
    names = _names(table)
    for source in sources:
        for batch in scan_batches(source, table, None if table is ROLLOUTS else names, _BATCH_ROWS):
            # The rows that have no token ids, rising.
            if table is PAIRS:
                n_ids = pc.list_value_length(batch.column("chosen_ids")).to_numpy()
            else:
                turns = TurnColumns.of(batch.column("turns"))
                n_ids = turns.count(turns.generation.lengths + turns.delta.lengths > 0)
            without_ids = list(map(int, np.flatnonzero(n_ids == 0)))
            report.sampled += batch.num_rows - len(without_ids)
            start = 0
            for row in without_ids:
                (text,) = to_rows(batch.slice(row, 1))
                try:
                    rendered = rendered_pair(text, chat) if table is PAIRS else rendered_row(text, chat, mask)
                except DataError as error:
                    report.not_rendered[text["pair_id" if table is PAIRS else "rollout_id"]] = error.message
                    continue
                report.rendered += 1
                if table is PAIRS:
                    trained = int(rendered["chosen_mask"].sum() + rendered["rejected_mask"].sum())
                    report.tokens_generated += trained
                    report.tokens_context += sum(len(rendered[f"{side}_ids"]) for side in _SIDES) - trained
                else:
                    _count(rendered, chat, report)
                if row > start:
                    yield batch.slice(start, row - start)
                # Through JSON, from which batches are built.
                yield build([decode(encode(rendered))], table, names, f"rendered {table.name}", [row])
                start = row + 1
            if start < batch.num_rows:
                yield batch.slice(start)
            setattr(report, table.name, getattr(report, table.name) + batch.num_rows)
            progress.update(done=report.rollouts + report.pairs, tokens=report.tokens_generated)


def _count(row: RolloutRow, chat: TransformersChat, report: TokenizeReport) -> None:
    """Count a rendered rollout's turns and tokens, and the breaks that the template causes, by code."""
    report.turns += row["n_turns"]
    report.tokens_generated += row["n_generated_tokens"]
    report.tokens_context += row["n_context_tokens"]
    if row["n_breaks"]:
        special = frozenset(chat.tokenizer.all_special_ids)
        breaks = [r for r in relations(row["turns"], lambda: Reading(chat.decode, special)) if r.code in _BREAKS]
        counts = Counter(report.breaks) + Counter(relation.code for relation in breaks)
        report.breaks = dict(sorted(counts.items()))
        if report.first_break is None and breaks:
            where = f"rollout {row['rollout_id']}, turn {breaks[0].turn}"
            report.first_break = f"{where}: {CODES[breaks[0].code].meaning.removeprefix('a break: ')}"
