"""The page of a report: one HTML file that opens anywhere, in light and dark.

Invariants: what files hold is data, so all of it is escaped; the page loads nothing and runs nothing, and its content
security policy says so; a number on it is a number of the figures.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from gymdata.checks.violations import CODES
from gymdata.commands.report.charts import Figures, charts_of
from gymdata.commands.report.drawing import svg
from gymdata.commands.report.several import charts_of_several
from gymdata.commands.report.stages import value_at
from gymdata.commands.show.rollout import messages_of
from gymdata.errors import counted, printable
from gymdata.rollouts.logprobs import ratio_of_version

_GENERATOR = '<meta name="generator" content="gymdata">'


def is_page(file: Path) -> bool:
    """Whether a file is a report."""
    with file.open("rb") as stream:
        return _GENERATOR.encode() in stream.read(1_000)


def page(figures: Figures) -> str:
    """The page of the figures of one run, or of several."""
    folder = files("gymdata.commands.report")
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # What a terminal or browser would act on is an escape; Markup comes from the template itself.
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "charts": charts_of,
        "columns": lambda row, *names: [row[name] for name in names],
        "counted": counted,
        "ratio_of_version": ratio_of_version,
        "ends": lambda ends: "–" if not ends else f"{ends[0]:.4g} to {ends[1]:.4g}",
        "svg": lambda chart: Markup(svg(chart)),
        "text": text,
        "value_at": value_at,
    }
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        {"runs": [figures], **figures},
        codes=CODES,
        several=charts_of_several,
        messages_of=messages_of,
        generator=Markup(_GENERATOR),
        policy=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        style=Markup(style),
    )


def text(value: object) -> str:
    """A value as people read it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and "rate" in value:
        ends = value.get("ci95")
        rate = "–" if value["rate"] is None else f"{100 * value['rate']:.1f} %"
        count = f", {value['count']:,} of {value['n']:,}" if value.get("n") else ""
        return rate + (f" ({100 * ends[0]:.1f}–{100 * ends[1]:.1f})" if ends and None not in ends else "") + count
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)
