"""The topics of ``gymdata docs``: installed files, and the page of all settings, which is made from their classes."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple

from .settings_page import HEAD, settings_page
from .tables import filled

#: Topics in the order of the path from tasks to a checkpoint; each is a file of ``gymdata/docs``.
TOPICS = (
    "installing",
    "your-data",
    "your-reward",
    "your-environment",
    "your-server",
    "record-your-agent",
    "validate-codes",
    "audit",
    "filter-and-score",
    "judge",
    "train-and-watch",
    "batch-rl",
    "recipes",
    "finetune",
    "looking",
    "querying",
    "viewing",
    "python-api",
    "settings",
    "file-format",
    "scale",
    "nemo-gym",
    "nemo-agent-toolkit",
    "differences",
    "without-gymdata",
)


class Page(NamedTuple):
    """One topic: its title, its first sentence and its whole text in Markdown."""

    name: str
    title: str
    summary: str
    text: str


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_page(topic: str) -> Page:
    """A topic by its file name, its title, a word of its name, or a command that it alone shows. Raises UsageError for an
    unknown one."""
    from gymdata.checks.violations import CODES
    from gymdata.errors import UsageError, nearest

    from .main import COMMANDS

    name = _slug(topic.removesuffix(".md"))
    if name not in TOPICS:
        # A word of one topic's name is enough: reward for your-reward.
        named = [t for t in TOPICS if name in t.split("-")]
        titled = [page.name for page in pages() if _slug(page.title) == name]
        if not titled and len(named) != 1 and topic in COMMANDS:
            command = re.compile(rf"gymdata {topic}(?![\w-])")
            named = [t for t in TOPICS if t != "settings" and command.search(_written(t))]
        if len(titled or named) != 1:
            hint = nearest(topic, TOPICS) or "`gymdata docs` lists them with a line each"
            unknown = UsageError.bad_value("topic", topic, f"one of {len(TOPICS)} topics", hint)
            # A code or a command.
            if topic.upper() in CODES:
                unknown.hint = f"gymdata validate --explain {topic.upper()}"
            elif topic in COMMANDS:
                unknown.hint = f"gymdata {topic} --help" + f", or gymdata docs {' or '.join(named)}" * bool(named)
            raise unknown
        (name,) = titled or named
    return _page(name, settings_page() if name == "settings" else filled(_written(name)))


def pages() -> list[Page]:
    """Every topic, for lists: of the page of settings its head alone, without loading the classes."""
    return [_page(name, HEAD if name == "settings" else _written(name)) for name in TOPICS]


def _written(name: str) -> str:
    return files("gymdata").joinpath("docs", f"{name}.md").read_text(encoding="utf-8")


def _page(name: str, source: str) -> Page:
    # Comments are notes to the tests that run the blocks.
    text = re.sub(r"^<!--.*?-->\n", "", source, flags=re.MULTILINE | re.DOTALL)
    title, summary = text.split("\n\n")[:2]
    return Page(name, title.removeprefix("# "), " ".join(summary.split()), text)
