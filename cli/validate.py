"""``gymdata validate``: like a linter, for token evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gymdata.commands.validate.settings import ValidateConfig
from gymdata.errors import UsageError, counted, printable

from .console import emit_json, facts, finish, note, paragraphs, say
from .flags import Json, Overwrite, Verbose, with_flags

if TYPE_CHECKING:
    from gymdata.checks.violations import ValidationReport, Violation

_Choice = Literal["split", "truncate", "drop"]
#: Errors shown per code; others are only counted.
SHOWN = 50
#: Warnings shown per code, and findings that differ in their row only: a reward that every row lacks is one fault.
SHOWN_ALIKE = 3


@with_flags(ValidateConfig)
def validate(
    settings: ValidateConfig,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Run folder, Parquet or JSONL file (.gz, .zst), or glob.")
    ] = None,
    explain: Annotated[str | None, typer.Option("--explain", metavar="CODE", help="Explain a code.")] = None,
    fix: Annotated[_Choice | None, typer.Option("--fix", help="Repair rollouts with errors.")] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Output of --fix: a new .parquet or .jsonl file.")
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print only the last line.")] = False,
    overwrite: Overwrite = False,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Exit code 1 when errors were found. -v lists every finding, infos included."""
    if explain is not None:
        from gymdata.checks.violations import explain as explained

        code = explained(explain)
        if json:
            emit_json(asdict(code))
        else:
            paragraphs(f"{code}\n\nWhat to do: {code.advice}")
        return 0
    if path is None:
        raise UsageError("no path given", hint="gymdata validate PATH, or gymdata validate --explain CODE")
    if fix is not None:
        return _fix(path, fix, output, overwrite=overwrite, quiet=quiet, json=json)
    from gymdata.commands.validate.run import validate as run
    from gymdata.store.reading import warn_of_changed_scores

    warn_of_changed_scores(path)
    report = run(path, **dict(settings))

    def show() -> None:
        if not quiet:
            _show_findings(report, everything=verbose)
        paragraphs(_verdict(report))
        if report.rollouts and not report.tokens and not quiet:
            paragraphs(
                "no token ids: `gymdata import FILE -m MODEL -o RUN` renders ids of the text it was made from (T213)"
            )
        if report.errors and not quiet:
            say("gymdata validate --explain CODE says what a code means, and what to do")

    exit_code = finish(report, show, json=json)
    unseen = settings.select or settings.ignore
    if not report.rollouts and not report.violations and not unseen and Path(report.path).is_file():
        note(f"{report.path}: is empty (expected rollouts or pairs)")
    if report.state in ("interrupted", "rollouts pending"):
        note(f"{report.path}: {report.state}: rows may be missing; rerun the same command to resume")
    return exit_code


def _fix(path: str, choice: _Choice, output: str | None, *, overwrite: bool, quiet: bool, json: bool) -> int:
    from gymdata.commands.validate.fix import fix

    if output is None:
        hint = "gymdata validate PATH --fix split -o NEW.parquet"
        raise UsageError("--fix needs -o: nothing is repaired in place", hint=hint)
    account = fix(path, choice, output, overwrite=overwrite)
    costs = [asdict(cost) for cost in account.costs.values()]
    columns = ["", *(name.replace("_", " ") for name in costs[0])]
    names = [f"→ {name}" if name == choice else name for name in account.costs]
    rows = [[name, *cost.values()] for name, cost in zip(names, costs, strict=True)]
    written = f"{account.rollouts_out:,} of {counted(account.rollouts_in, 'rollout')} in {account.output}"
    text = (lambda: paragraphs(written)) if quiet else "fix"
    exit_code = finish(account, text, json=json, above=[(columns, rows, "what each choice makes of them")])
    for line in account.notes:
        note(line)
    if not account.rollouts_out:
        note(f"--fix {choice} leaves no rollout: the table above has what the other choices keep")
    return exit_code


def _verdict(report: ValidationReport) -> str:
    noun = "pairs" if report.rollouts and not report.turns and report.tokens else "rollouts"
    turns = "" if noun == "pairs" else f" {report.turns:,} turns,"
    errors = (
        counted(report.errors, "error") if report.errors else "no errors" if report.rollouts else "no rows to check"
    )
    size = f"{report.rollouts:,} {noun},{turns} {report.tokens:,} tokens ({report.seconds:.2f} s)"
    verdict = f"{errors}, {counted(report.warnings, 'warning')} in {size}"
    verdict += f"; trainable: {report.trainable:,} of {report.rollouts:,} {noun}"
    if rendered := {(violation.file, violation.row) for violation in report.violations if violation.code == "T213"}:
        verdict += f", {len(rendered):,} with ids rendered from text: only with --allow-rendered"
    return verdict


def _show_findings(report: ValidationReport, *, everything: bool) -> None:
    """A line for each, with both sides of a break, and the count of each code."""
    from gymdata.checks.violations import both_sides
    from gymdata.store.lines import line_numbers

    listed = [v for v in report.violations if everything or v.severity != "info"]
    shown = listed if everything else _worth_a_line(listed)
    rows: dict[str, set[int]] = {}
    for violation in shown:
        rows.setdefault(violation.file or report.path, set()).add(violation.row)
    # (file, row) → its line in an editor, for files of JSON lines.
    lines = {(file, row): line for file, of in rows.items() for row, line in line_numbers(file, of).items()}
    for violation in shown:
        paragraphs(_line(violation, report.path, lines), 10)
        if (evidence := violation.evidence) is not None:
            # The cause of a break, and both texts (or ids) with the part that differs between ⟦ and ⟧.
            say(f"    {evidence['explanation']}")
            sides = both_sides(evidence)
            for side, left, middle, right in sides:
                say(f"    {side}  {left}⟦{middle}⟧{right}")
            if sides and (more := len(evidence["spans"]) - 1) > 0:
                say(f"    {counted(more, 'more place')} of this turn differ")
    if len(listed) > len(shown):
        say(f"… and {len(listed) - len(shown):,} more: --json gives all, -v shows all")
    if report.violations:
        facts("findings", report.rows()[1:])


def _worth_a_line(violations: list[Violation]) -> list[Violation]:
    """The first errors and the first few warnings of each code, in their order; of those alike only a few."""
    counts, shown = Counter[object](), []
    for v in violations:
        words = (v.code, v.detail, v.expected, v.got)
        same = v.turn is None and v.position is None and counts[words] >= SHOWN_ALIKE
        if not same and counts[v.code] < (SHOWN if v.severity == "error" else SHOWN_ALIKE):
            counts.update([v.code, words])
            shown.append(v)
    return shown


def _line(v: Violation, path: str, lines: Mapping[tuple[str, int], int]) -> str:
    from gymdata.checks.violations import CODES

    file = v.file or path
    where = [file, f"line {line}" if (line := lines.get((file, v.row))) is not None else f"row {v.row}"]
    where += [v.rollout_id] if v.rollout_id else []
    where += [f"turn {v.turn}"] if v.turn is not None else []
    where += [f"pos {v.position}"] if v.position is not None else []
    details = [CODES[v.code].name]
    details += [v.detail] if v.detail else []
    details += [f"expected {v.expected}"] if v.expected is not None else []
    details += [f"got {v.got}"] if v.got is not None else []
    # An id or a file name with a line end would look like another finding.
    return printable(f"{' '.join(where)}  {v.code} {'; '.join(details)}", lines=False)
