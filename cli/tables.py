"""Tables of the documentation that are made from the registries, so that an addition is in them without a change of a page.

``python -m gymdata.cli.tables gymdata/docs`` writes them into the pages as they are now, for readers of the repository.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gymdata.registry import Setting, shown


def rewards() -> Iterator[str]:
    """Name, when it is 1, and what it needs."""
    from gymdata.rewards.named import REWARDS

    yield from ("| name | 1 when | needs |", "| --- | --- | --- |")
    for entry in REWARDS:
        argument = f"[:{entry.object.argument}]" if entry.object.argument else ""
        yield f"| `{entry.name}{argument}` | {entry.help.rstrip('.')} | {entry.object.needs or '–'} |"


def losses() -> Iterator[str]:
    from gymdata.commands.train.losses import LOSSES

    yield "| `--loss` | loss | aggregation | settings and defaults | source | published code |"
    yield "|---|---|---|---|---|---|"
    for name, loss in LOSSES.items():
        code = {"": "–", "none": "equal"}.get(loss.differs, loss.differs)
        facts = (f"`{name}`", loss.formula, loss.aggregation, _settings(loss.options), loss.source, code)
        yield f"| {' | '.join(facts)} |"


def estimators() -> Iterator[str]:
    from gymdata.credit.estimators import ALL

    yield "| `--estimator` | advantage | settings and defaults | source | when |"
    yield "| --- | --- | --- | --- | --- |"
    yield from (f"| `{e.name}` | {e.formula} | {_settings(e.options)} | {e.source} | {e.when} |" for e in ALL.values())


def imports() -> Iterator[str]:
    """What is read of each format, what its rows have, and what is lost."""
    from gymdata.formats import exported, imported
    from gymdata.rollouts.failures import SIGNALS

    more = "masked or failed by | written, too | what is read, and what is not"
    yield f"| format | rows | token ids | log-probabilities | reward | {more} |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    written = exported()
    for name, form in imported().items():
        facts = ("yes" if fact else "–" for fact in (form.holds_ids, form.holds_logprobs, form.holds_reward))
        failing = "; ".join(map(str, SIGNALS.get(name, ()))) or ("no field" if form.table == "rollouts" else "–")
        read = " ".join((form.__doc__ or "").split()).replace("``", "`")
        cells = (f"`{name}`", form.table, *facts, failing, "yes" if name in written else "–", read)
        yield f"| {' | '.join(cells)} |"


def exports() -> Iterator[str]:
    """Name, what it is made of, the file, and what its rows have."""
    from gymdata.formats import exported

    yield from ("| `--format` | of | file | token ids | `--reward` | a row |", "| --- | --- | --- | --- | --- | --- |")
    for name, form in exported().items():
        row = " ".join((form.__doc__ or "").split()).partition(". ")[0].rstrip(".").replace("``", "`")
        has = ("yes" if fact else "–" for fact in (form.holds_ids, form.holds_reward))
        yield f"| `{name}` | {form.table} | {', '.join(form.suffixes)} | {' | '.join(has)} | {row} |"


def codes() -> Iterator[str]:
    """A paragraph for each code, below the title of its family."""
    from gymdata.checks.violations import CODES, FAMILIES

    other_families = {code.code[0]: "Of other packages" for code in CODES.values() if code.code[0] not in FAMILIES}
    for letter, title in {**FAMILIES, **other_families}.items():
        of_family = [code for code in CODES.values() if code.code.startswith(letter)]
        yield from [f"## {title}\n"] if of_family else []
        for code in of_family:
            meaning = code.meaning[0].upper() + code.meaning[1:]
            yield f"**{code.code} {code.name}** ({code.severity}). {meaning}. {code.explanation}\n"


def _settings(options: Mapping[str, Setting]) -> str:
    return ", ".join(f"`{name}` {shown(default)}" for name, (_, default) in options.items()) or "–"


TABLES = {
    "rewards": rewards,
    "losses": losses,
    "estimators": estimators,
    "codes": codes,
    "imports": imports,
    "exports": exports,
}


def filled(page: str) -> str:
    """The text of a page with its tables as they are now."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, mark, rest = page.partition(begin)
        if mark:
            text = "\n".join(table()).rstrip()
            page = f"{before}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    for path in Path(sys.argv[1]).glob("*.md"):
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
