"""The README.md of a published output: what it is, where it is from, its figures, its columns, and how it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from gymdata import __version__
from gymdata.errors import GymdataError, counted
from gymdata.public import markdown_table
from gymdata.report.run import report
from gymdata.rollouts.schema import Table
from gymdata.store.paths import RUN_JSON, RunFacts

CARD = "README.md"
#: A card with this line was written by push, and is written again; one without it is a person's, and stays.
MARK = "<!-- Written by gymdata push, and again by the next one. Without this line it is kept as it is. -->"
#: Settings of run.json's identity that a card names.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_turns", "seed")
#: Rows below which a data set is of a size, as the Hub names them.
_SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}


def card(
    source: str | Path,
    facts: RunFacts,
    table: Table,
    schema: pa.Schema,
    splits: Mapping[str, Sequence[str]],
    previews: Mapping[str, str],
    n_rows: int,
    name: str,
) -> str:
    """The text of the card. ``splits``: split → files of the table; ``previews``: split → its file of plain columns;
    ``name``: what the data set is called, ORG/NAME or a folder's name."""
    size = next((label for most, label in _SIZES.items() if n_rows < most), "n>10M")
    configs: list[tuple[str, Mapping[str, Sequence[str]]]] = [(table.name, splits)]
    if previews:
        configs.insert(0, ("preview", {split: [file] for split, file in previews.items()}))
    front = ["---", f"pretty_name: {name.rpartition('/')[2]}", "tags:", "- gymdata", f"- {table.name}"]
    front += ["size_categories:", f"- {size}", "configs:"]
    for config, files in configs:
        front += [
            f"- config_name: {config}",
            *(["  default: true"] if config == configs[0][0] else []),
            "  data_files:",
        ]
        for split, paths in files.items():
            front += [f"  - split: {split}", "    path:", *(f"    - {path}" for path in paths)]
    stage = facts.get("stage")
    about = [("rows", f"{counted(n_rows, 'row')} of the table `{table.name}`"), *_origin(facts)]
    with contextlib.suppress(GymdataError):  # a table that no report is about
        about.insert(1, ("result", report(source, write=False).headline))
    texts = [(key, f"{value:,}" if isinstance(value, int) else str(value).replace("\n", " ")) for key, value in about]
    columns = [(f"`{field.name}`", f"`{_brief(field.type)}`") for field in schema]
    return "\n".join(
        [
            *front,
            "---",
            MARK,
            "",
            f"# {name}",
            "",
            f"Made with `gymdata {stage}` {facts.get('gymdata') or __version__}, with the token ids and log-probabilities"
            " as the engine sampled them, where it gave them.",
            "",
            markdown_table(("", ""), texts),
            "## Read it",
            "",
            "```bash",
            f"gymdata pull hf:{name} -o runs/{name.rpartition('/')[2]}",
            "```",
            "",
            *(["`preview` has the texts and rewards as plain columns."] if previews else []),
            f"`{table.name}` is the whole table; `{RUN_JSON}` says where each number is from, with the size and the hash of"
            " every file.",
            "",
            "## Columns",
            "",
            markdown_table(("column", "type"), columns),
        ]
    )


def _origin(facts: RunFacts) -> list[tuple[str, object]]:
    """What made the rows: the policy, its sampling, the rewards and the counts of run.json."""
    identity: Mapping[str, Any] = facts.get("identity") or {}
    counts: Mapping[str, Any] = facts.get("counts") or {}
    listed: list[tuple[str, object]] = []
    if policy := facts.get("policy"):
        weights = f" (weights {identity['policy_hash']})" if identity.get("policy_hash") else ""
        listed.append(("policy", f"{Path(str(policy)).name}{weights}"))
    if sampling := [f"{key} {identity[key]}" for key in _SAMPLING if identity.get(key) is not None]:
        listed.append(("sampling", ", ".join(sampling)))
    if parts := counts.get("parts"):
        listed.append(("rewards", ", ".join(parts)))
    return listed + [
        (key.replace("_", " "), value)
        for key, value in counts.items()
        if isinstance(value, int) and not isinstance(value, bool) and value
    ]


def _brief(kind: pa.DataType) -> str:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list of {_brief(kind.value_type)}"
    return f"{{{', '.join(field.name for field in kind)}}}" if pa.types.is_struct(kind) else str(kind)
