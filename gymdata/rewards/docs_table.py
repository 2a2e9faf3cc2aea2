"""The table of the shipped rewards in the documentation: ``python -m gymdata.rewards.docs_table --write gymdata/docs``."""

from __future__ import annotations

import argparse
from pathlib import Path

from gymdata.rewards.named import REWARDS

PAGE = "your-reward.md"
BEGIN, END = "<!-- rewards -->\n", "<!-- end of rewards -->\n"


def table() -> str:
    """Name, when it is 1, and what it needs, in Markdown."""
    rows = ["| name | 1 when | needs |", "| --- | --- | --- |"]
    for entry in REWARDS:
        argument = f"[:{entry.object.argument}]" if entry.object.argument else ""
        rows.append(f"| `{entry.name}{argument}` | {entry.help.rstrip('.')} | {entry.object.needs or '–'} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """The text of the page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="FOLDER", help="folder of the documentation")
    page = parser.parse_args().write / PAGE
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
