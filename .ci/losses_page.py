"""The tables of losses and estimators in the documentation.

``python .ci/losses_page.py --write gymdata/docs`` after a change."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from gymdata.credit.estimators import ALL
from gymdata.registry import Setting, shown
from gymdata.train.losses import LOSSES

PAGE = "batch-rl.md"


def table() -> str:
    """The losses in Markdown."""
    lines = [
        "| `--loss` | loss | aggregation | settings and defaults | source | published code |",
        "|---|---|---|---|---|---|",
    ]
    for name, loss in LOSSES.items():
        code = {"": "–", "none": "equal"}.get(loss.differs, loss.differs)
        lines.append(
            f"| `{name}` | {loss.formula} | {loss.aggregation} | {_settings(loss.options)} | {loss.source} | {code} |"
        )
    return "\n".join(lines) + "\n"


def estimators() -> str:
    """The estimators in Markdown."""
    lines = [
        "| `--estimator` | advantage | settings and defaults | source | when |",
        "| --- | --- | --- | --- | --- |",
        *(f"| `{e.name}` | {e.formula} | {_settings(e.options)} | {e.source} | {e.when} |" for e in ALL.values()),
    ]
    return "\n".join(lines) + "\n"


def _settings(options: Mapping[str, Setting]) -> str:
    return ", ".join(f"`{name}` {shown(option.default)}" for name, option in options.items()) or "–"


def with_table(page: str) -> str:
    """The text of the documentation with the tables as they are now."""
    for name, text in (("losses", table()), ("estimators", estimators())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="FOLDER", help="folder of the documentation")
    page = parser.parse_args().write / PAGE
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
