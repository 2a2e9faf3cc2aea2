"""Training from files of answers or preferences as text: they are imported and rendered first, into the output's folder."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gymdata.commands.train.settings import RenderedConfig, TrainConfig, TrainKtoConfig, TrainSftConfig
from gymdata.errors import DataError, GymdataError, UsageError, counted
from gymdata.progress import Progress
from gymdata.rollouts.column_names import columns_of
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.scores.chosen import DESIRABLE
from gymdata.stats import known_rewards
from gymdata.store import read_table
from gymdata.store.formats import first_values, head, table_of

if TYPE_CHECKING:
    from gymdata.formats import Format
    from gymdata.store.paths import Source

#: The folder in a training's output for what was made of its text.
TEXT = "data"
#: The folder in it with the two sides of a split by task, and the side that is trained.
SPLIT, TRAIN = "split", "split/train.parquet"
#: A list of token ids that is not empty.
_IDS = re.compile(rb'_ids"\s*:\s*\[\s*\d')
_Settings = TypeVar("_Settings", bound=RenderedConfig)


def text_format(source: str, files: Sequence[Source], settings: TrainConfig) -> Format | None:
    """The format of ``files``, when they are answers or preferences as text; None for what is trained as it is.

    Raises UsageError for a trainer that needs sampled tokens, DataError for preferences where answers are needed, or the
    reverse.
    """
    if Path(source).is_dir() or not files:
        refuse_text_settings(settings, source)
        return None
    from gymdata.formats import format_in

    columns = columns_of(settings.map) if isinstance(settings, RenderedConfig) else {}
    formats = [format_in(file, columns) for file in files]
    format = formats[0]
    of_text = format is not None and _is_text(format, files)
    if not of_text:
        refuse_text_settings(settings, source)
    if format is None:
        table_of(files[0], settings.table.name)  # refuses tasks and rows of no known format
    if format is None or any(other is None or other.name != format.name for other in formats) or not of_text:
        return None
    if not isinstance(settings, RenderedConfig):
        raise UsageError(
            f"{source}: contains {format.content}; train-{settings.algorithm} takes tokens that a policy sampled",
            hint="train-sft, train-dpo, train-kto and train-reward train from text",
        )
    if format.table == "rollouts" and settings.table is PAIRS and (format.holds_reward or _scored(files)):
        return format
    if format.table != settings.table.name:
        other = "train-dpo and train-reward" if format.table == "pairs" else "train-sft and train-kto"
        raise DataError(
            f"{source}: contains {format.content}, expected {settings.table.name}", hint=f"{other} train from it"
        ).at(source, format.content, settings.table.name)
    return format


def _is_text(format: Format, files: Sequence[Source]) -> bool:
    """Whether rows have no token ids: of a format that never has any, or the first rows of one that may have them."""
    if not format.holds_ids or format.table == "pairs":
        return format.holds_text
    may_be = (format.holds_text or format.read_in_place) and all(file.kind == "jsonl" for file in files)
    return may_be and not any(_IDS.search(row) for file in files for row in head(file))


def refuse_text_settings(settings: TrainConfig, source: str) -> None:
    """Raises UsageError for settings of text where ``source`` has token ids."""
    if isinstance(settings, RenderedConfig) and (settings.map or settings.test_share):
        flag = "--map" if settings.map else "--test-share"
        raise UsageError(
            f"{flag}: {source} is not a file of answers or preferences as text",
            hint="leave it out; `gymdata filter --split-by task` and `gymdata pairs --split` divide by task",
        )


@contextlib.contextmanager
def naming_file(folder: Path, file: Path) -> Iterator[None]:
    """Errors name the user's ``file`` instead of what was made of it in ``folder``, which is gone after a dry run."""
    try:
        yield
    except GymdataError as error:
        for each in (error, *(error.faults if isinstance(error, UsageError) else ())):
            for name in ("message", "reason", "hint", "where"):
                if isinstance(text := getattr(each, name), str):
                    setattr(each, name, re.sub(rf"{re.escape(str(folder))}/\w+", lambda _: str(file), text))
        raise


def rendered(
    format: Format,
    files: Sequence[Source],
    settings: _Settings,
    folder: Path,
    *,
    overwrite: bool,
    progress: Progress,
    command: Sequence[str],
) -> tuple[str, _Settings]:
    """(data, settings) to train with: ``files`` are imported into ``folder``/tokens, rendered with the template of the
    model; a share of the tasks is held out in ``folder``/split/test.parquet, and answers with rewards
    become ``folder``/pairs where pairs are trained. What was made there of the same text is taken, unless ``overwrite``.
    Raises DataError when no row can be used, StoreError where other text is there."""
    from gymdata.commands.import_export.run import import_rollouts

    tokens = folder / "tokens"
    imported = import_rollouts(
        [file.path for file in files],
        tokens,
        source=format.name,
        model=settings.model,
        map=settings.map,
        test_share=settings.test_share if overwrite else None,
        seed=settings.trainer.get("seed", 0),
        overwrite=overwrite,
        command=command,
    )
    first = ""
    if imported.rejected:
        with (tokens / "rejected.jsonl").open(encoding="utf-8") as lines:
            row = json.loads(next(lines))
        first = f"line {row['line']}: {row['reason']}"
    if not imported.rollouts + imported.pairs:
        raise DataError(f"{files[0].path}: no row can be used, of {imported.rows_in:,} (first: {first})")
    progress.message(
        f"{files[0].path}: contains {format.content} ({counted(imported.rows_in, 'row')}); their tokens are those of the "
        f"chat template of {settings.model}, not sampled (T213)"
    )
    if imported.rejected:
        progress.message(f"left out: {counted(imported.rejected, 'row')} that cannot be used (first: {first})")
    # One reason for all of them is that of the first.
    for name, n in imported.refused.items() if len(imported.refused) > 1 else ():
        progress.message(f"  {n:,} of them: {name[:250]}")
    for name, n in imported.twins.items():
        progress.message(f"{counted(n, 'row')} rendered with the training template {name}, which TRL ships")
    for name, n in imported.control_tokens.items():
        progress.message(f"{counted(n, 'row')} with {name} in a text: it is trained as the control token")
    if imported.unopened:
        progress.message(f"{counted(imported.unopened, 'answer')} without the reasoning that the prompt opens")
    if overwrite:
        _divide(format, settings, folder, imported.tasks, progress, command)
    source = next(path for part in (PAIRS.name, TRAIN, "tokens") if (path := folder / part).exists())
    update: dict[str, object] = {"allow_rendered": True}
    if isinstance(settings, TrainSftConfig) and imported.without_reward == imported.rollouts:
        update |= {"select": "all", "min_reward": None}
        if settings.min_reward is not None:
            progress.message(f"min_reward {settings.min_reward:g} is not applied: no row has a reward")
    elif (
        isinstance(settings, TrainSftConfig | TrainKtoConfig) and settings.reward is None and (label := _label(tokens))
    ):
        # Beside a score, too: the label says which answers are good.
        update["reward"] = label
        if isinstance(settings, TrainSftConfig) and "select" not in settings.model_fields_set:
            update |= {
                "select": "above",
                "min_reward": DESIRABLE if settings.min_reward is None else settings.min_reward,
            }
            progress.message("answers with a false label are not trained (--select all trains them)")
    settings = settings.model_copy(update=update)
    if isinstance(settings, TrainKtoConfig) and settings.threshold is None:
        stored = read_table(str(source), ROLLOUTS, ("task_id", "reward", "policy"))
        rewards = known_rewards(settings.scored(stored, str(source))["reward"])
        rewards = rewards[np.isfinite(rewards)]
        if len(rewards) and np.isin(rewards, (0, 1)).all():
            update["threshold"] = DESIRABLE
            progress.message(f"desirable: a label of 1, undesirable: of 0 (--threshold {DESIRABLE})")
        elif len(rewards):
            progress.message(
                "desirable: a score above the mean of its prompt's, undesirable: below it (--threshold X: above, below X)"
            )
    return str(source), settings.model_copy(update=update)


def _divide(
    format: Format,
    settings: RenderedConfig,
    folder: Path,
    tasks: Mapping[str, int],
    progress: Progress,
    command: Sequence[str],
) -> None:
    """Take the split of the tokens in ``folder`` out of them, and make pairs where answers have rewards. ``tasks``: of each
    side of a split."""
    from gymdata.commands.pairs.run import pairs

    source = tokens = folder / "tokens"
    for earlier in (SPLIT, PAIRS.name):
        shutil.rmtree(folder / earlier, ignore_errors=True)
    if tasks:
        (tokens / SPLIT).rename(folder / SPLIT)
        source = folder / TRAIN
        where = settings.output / TEXT / SPLIT / "test.parquet"
        progress.message(f"held out: {tasks['test']:,} of {counted(sum(tasks.values()), 'task')}, in {where}")
    if format.table != settings.table.name:
        report = pairs(
            source,
            output=folder / PAIRS.name,
            command=command,
            reward=_label(tokens),
            allow_rendered=True,
        )
        counts = report.counts
        without = {
            "with fewer than two answers that have a reward": counts.groups_too_small,
            "whose answers have equal rewards": counts.groups_without_variance,
            "whose pairs were dropped": counts.groups_all_dropped,
        }
        none = ", ".join(f"{n:,} {why}" for why, n in without.items() if n)
        none = f"; {sum(without.values()):,} of {counted(counts.groups, 'prompt')} gave none: {none}" if none else ""
        progress.message(
            f"{counted(counts.pairs, 'pair')} of the best and the worst answer to each prompt, by reward{none}"
        )


def _scored(files: Sequence[Source]) -> bool:
    """Whether the first rows of ``files`` state what their answers are worth."""
    from gymdata.formats.text.words import LABELS, SCORES

    rows = [row for file in files for row in first_values(file) if isinstance(row, dict)]
    return any(row.get(name) is not None for row in rows for name in (*SCORES, *LABELS))


def _label(text: Path) -> str | None:
    """The column of labels that rows of ``text`` have."""
    from gymdata.formats.text.words import LABELS

    rewards = read_table(text, ROLLOUTS, ("rewards",))["rewards"]
    names = {name for chunk in rewards.chunks for name in chunk.flatten().field("name").unique().to_pylist()}
    return next((name for name in LABELS if name in names), None)
