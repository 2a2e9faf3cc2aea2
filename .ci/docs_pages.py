"""What is made from the code in ``gymdata/docs``: tables of the registries in the pages, the page of settings, and the files
for coding agents.

``python .ci/docs_pages.py gymdata/docs`` writes all of it as it is now.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from gymdata.cli.docs import configurable, pages
from gymdata.cli.examples import EXAMPLES
from gymdata.cli.flags import described
from gymdata.cli.main import GROUPS
from gymdata.registry import Setting, shown

_SETTINGS_HEAD = """# Settings

Every setting of every command: its key in `--config` files, in `--set KEY=VALUE` and in Python, its flag, and its default.

`--set` beats flags, which beat the file. A setting whose flag is `--set` has none of its own. `gymdata COMMAND --help` shows
flags that are no settings as well; [Finetune](finetune.md) has a file of its own.
"""
_SUMMARY = (
    "Turn LLM rollouts into training data, once, on disk, and train from those files: "
    "SFT, DPO, KTO, reward models, batch RL."
)
_USE = (
    "Use it to collect rollouts with vLLM, to check, score, judge, filter, query or look at them, to build preference pairs "
    "or experiences, and to train."
)
_RULES = """\
- Path first, settings as flags, `--config FILE` or `--set KEY=VALUE`. `-m` is the model, `-o` the output, `-n` a limit.
- `--json` prints one JSON object on stdout, errors included; everything else goes to stderr.
- Exit codes: 0 done, 1 faults found or some rows failed, 2 usage, 3 an outside system failed, 130 interrupted.
- An error names what was got, what is expected, where, and after `→` what to do. Follow the arrow.
- Rerun a command to resume it; `--overwrite` starts over; `--dry-run`, where there is one, checks and writes nothing.
- A fault has a code: `gymdata validate --explain CODE`. A module that is missing is named with the command that installs it.
- Never repair token ids by tokenizing text again: what is trained is what was sampled. `gymdata validate --fix` repairs."""


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


def settings_page() -> str:
    """The page of every setting of every command, in Markdown."""
    lines = [_SETTINGS_HEAD]
    for command, (kind, flags) in configurable().items():
        lines.append(f"## {command}\n")
        for name, field in kind.model_fields.items():
            flag = "`--set`" if name in kind.key_only else f"`{flags[name]}`" if name in flags else "an argument"
            choices = ", ".join(f"`{choice}`" for choice in _choices_of(field.annotation))
            lines.append(f"- `{name}` ({flag}{f': {choices}' if choices else ''}). {described(field)}")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _choices_of(hint: object) -> tuple[str, ...]:
    """The words that a setting may be."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return next((choices for part in typing.get_args(hint) if (choices := _choices_of(part))), ())


def skill() -> str:
    """A SKILL.md: when to use gymdata, its commands with an example of each, the rules that all share, and the topics."""
    about = f"---\nname: gymdata\ndescription: {json.dumps(f'{_SUMMARY} {_USE}')}\n---\n\n# gymdata\n\n{_SUMMARY}\n"
    lines = [about, f"## Rules\n\n{_RULES}\n", "## Commands\n"]
    lines.append(
        "`gymdata COMMAND --help` has every flag. `runs/x` is a run folder that `collect` or `import` wrote.\n"
    )
    for group, commands in GROUPS.items():
        lines.append(f"### {group}\n")
        for name, (_, _, summary) in commands.items():
            example = EXAMPLES[name][0].replace("\n", "\n  ")
            lines.append(f"- `{name}`: {summary}\n\n  ```bash\n  {example}\n  ```")
        lines.append("")
    lines.append("## Topics\n\n`gymdata docs TOPIC` prints one.\n")
    return "\n".join([*lines, *(f"- `{page.name}`: {page.summary}" for page in pages())]) + "\n"


def llms() -> str:
    """An llms.txt: one line for each topic, with its file in the repository."""
    head = "`gymdata docs TOPIC` prints a topic, `gymdata docs --skill` a SKILL.md."
    lines = [f"# gymdata\n\n> {_SUMMARY}\n\n{head}\n\n## Topics\n"]
    lines += [f"- [{page.title}](gymdata/docs/{page.name}.md): {page.summary}" for page in pages()]
    return "\n".join(lines) + "\n"


def files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file of the folder of pages that is made here, or has a table, and its text as it is now. The last ones have the
    summaries of the others."""
    yield folder / "settings.md", settings_page()
    for path in sorted(folder.glob("*.md")):
        yield path, filled(path.read_text(encoding="utf-8"))
    yield folder / "skill.txt", skill()
    yield folder / "llms.txt", llms()


if __name__ == "__main__":
    for path, text in files(Path(sys.argv[1])):
        path.write_text(text, encoding="utf-8")
