"""Writes schemas/templates.md: what each chat template that TRL ships does to a conversation that goes on.

python -m tests.check.table
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from gymdata.chat.template import ChatRendering, training_twin
from gymdata.check.template import TemplateCheck, check_template
from tests.check import families

FILE = Path(__file__).parents[2] / "schemas" / "templates.md"
_INTRO = """# Chat templates and multi-turn tokens

What `gymdata check` says about each chat template that TRL {trl} ships, made by `python -m tests.check.table`.

- **rendered again**: whether messages rendered again, with what came after, begin with what the model read and wrote.
  Where they do not, the column says what changes; training on rendered messages would then train on other tokens.
- **cure**: the training form of the template that does not change anything; `gymdata collect` uses it by default.
  "also changes" names a training form that changes the same things.
- **ids in, ids out**: whether the environment's tokens are provably cut, so that `gymdata collect` holds the sampled ids
  and nothing of the above matters to its rollouts.
- **splice**: of random conversations that had to be rendered by a server, the share whose sampled ids could be put back
  with proof, on three tokenizers and with the cure where there is one; all others were refused, and none came out different.

| template | rendered again | cure | ids in, ids out | splice | ends a turn | does not write |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table() -> str:
    """The whole file."""
    rows = [_row(name) for name in families.template_names() if not name.endswith("_training")]
    return _INTRO.format(trl=version("trl")) + "".join(rows)


def trl_of_file() -> str:
    """The TRL version that the file was made with."""
    return FILE.read_text(encoding="utf-8").split("that TRL ")[1].split(" ships")[0]


def _row(name: str) -> str:
    chat = families.chat(name, "bytes", keep_reasoning=False)
    found = check_template(ChatRendering(chat))
    twin = training_twin(families.template_text(name))
    cure = "–"
    if twin is not None and not found.ok:
        again = check_template(ChatRendering(chat.with_template(twin.text)))
        cure = f"`{twin.name}`" if again.ok else f"`{twin.name}` also changes"
    ends = " ".join(f"`{text}`" for _, text in found.end_of_turn)
    cells = [
        f"`{name}`",
        "the same" if found.prefix_preserving else _changes(found),
        cure,
        _holds(found),
        _splices(name),
        ends.replace("|", "\\|"),
        ", ".join([*found.ignores, *(_leaves_out(found))]) or "–",
    ]
    return "| " + " | ".join(cells) + " |\n"


def _changes(found: TemplateCheck) -> str:
    parts = []
    if found.strips:
        parts.append(f"takes {', '.join(found.strips)} away")
    if any(b.where == "generation prompt" for b in found.breaks):
        parts.append("drops the opened reasoning")
    return "; ".join(parts) or "changes earlier turns"


def _holds(found: TemplateCheck) -> str:
    if found.bridges:
        return "holds"
    return "refused" if len(found.no_bridge) + len(found.refused) == 7 else "refused in part"


def _leaves_out(found: TemplateCheck) -> list[str]:
    if "tool call" in found.refused:
        return ["tool calls"]
    return ["parallel tool calls"] if "parallel tool calls" in found.refused else []


def _splices(name: str) -> str:
    from tests.check.matrix import check_cell

    counts = [check_cell(name, family, seeds=1) for family in families.FAMILIES if families.has_family(family)]
    exact, steps = sum(c["exact"] for c in counts), sum(c["steps"] for c in counts)
    return f"{exact / steps:.0%}"


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
