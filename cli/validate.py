"""``gymdata validate``: like a linter, for token evidence."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gymdata.commands.validate.settings import ValidateConfig
from gymdata.errors import UsageError, counted, printable

from .console import emit_json, facts, finish, folded, grid, note, paragraphs
from .flags import Json, Overwrite, Verbose, with_flags

if TYPE_CHECKING:
    from gymdata.checks.violations import ValidationReport, Violation

#: Errors shown per code; others are only counted.
SHOWN = 50
#: Warnings shown per code; groups with equal rewards can be so many that they would bury everything else.
SHOWN_WARNINGS = 3
#: Findings shown that differ in their row only: a reward that every row lacks is one fault.
SHOWN_ALIKE = 3


@with_flags(ValidateConfig)
def validate(
    settings: ValidateConfig,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Run folder, Parquet or JSONL file (.gz, .zst), or glob.")
    ] = None,
    explain: Annotated[str | None, typer.Option("--explain", metavar="CODE", help="Explain a code.")] = None,
    fix: Annotated[
        Literal["split", "truncate", "drop"] | None, typer.Option("--fix", help="Repair rollouts with errors.")
    ] = None,
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
        return _fix(path, fix, output, overwrite, json)
    from gymdata.commands.validate.run import validate as run
    from gymdata.store.reading import warn_of_changed_scores

    warn_of_changed_scores(path)
    report = run(path, **dict(settings))
    exit_code = finish(report, lambda: _show(report, everything=verbose, quiet=quiet), json=json)
    unseen = settings.select or settings.ignore
    if not report.rollouts and not report.violations and not unseen and Path(report.path).is_file():
        note(f"{report.path}: is empty (expected rollouts or pairs)")
    if report.state in ("interrupted", "rollouts pending"):
        note(f"{report.path}: {report.state}: rows may be missing; rerun the same command to resume")
    return exit_code


def _fix(
    path: str, choice: Literal["split", "truncate", "drop"], output: str | None, overwrite: bool, as_json: bool
) -> int:
    from gymdata.commands.validate.fix import fix

    if output is None:
        hint = "gymdata validate PATH --fix split -o NEW.parquet"
        raise UsageError("--fix needs -o: nothing is repaired in place", hint=hint)
    account = fix(path, choice, output, overwrite=overwrite)

    def show() -> None:
        columns = ("", "removed", "shortened", "split", "rollouts after", "turns lost", "tokens lost")
        clean = account.rollouts_in - account.rollouts_with_errors
        rows = []
        for name, cost in account.costs.items():
            removed, shortened, parted = cost.rollouts_removed, cost.rollouts_shortened, cost.rollouts_split
            mark = f"→ {name}" if name == account.choice else name
            after = clean + cost.rollouts_after
            rows.append((mark, removed, shortened, parted, after, cost.turns_lost, cost.generated_tokens_lost))
        grid(columns, rows, title="what each choice would cost")
        facts("fix", account.rows())

    exit_code = finish(account, show, json=as_json)
    for text in account.notes:
        note(text)
    if not account.rollouts_out:
        note(f"--fix {choice} leaves no rollout: the table above has what the other choices keep")
    return exit_code


def _show(report: ValidationReport, everything: bool, quiet: bool) -> None:
    from gymdata.checks.violations import both_sides
    from gymdata.store.lines import line_numbers

    noun = "pairs" if report.rollouts and not report.turns and report.tokens else "rollouts"
    turns = "" if noun == "pairs" else f" {report.turns:,} turns,"
    size = f"{report.rollouts:,} {noun},{turns} {report.tokens:,} tokens"
    verdict = (
        counted(report.errors, "error") if report.errors else "no errors" if report.rollouts else "no rows to check"
    )
    verdict = f"{verdict}, {counted(report.warnings, 'warning')} in {size} ({report.seconds:.2f} s)"
    verdict += f"; trainable: {report.trainable:,} of {report.rollouts:,} {noun}"
    rendered = {(violation.file, violation.row) for violation in report.violations if violation.code == "T213"}
    if rendered:
        verdict += f", {len(rendered):,} with ids rendered from text: only with --allow-rendered"
    if quiet:
        paragraphs(verdict)
        return
    listed = [v for v in report.violations if everything or v.severity != "info"]
    shown = listed if everything else _worth_a_line(listed)
    rows: dict[str, set[int]] = {}
    for violation in shown:
        rows.setdefault(violation.file or report.path, set()).add(violation.row)
    # (file, row) → its line in an editor, for files of JSON lines.
    lines = {(file, row): line for file, of in rows.items() for row, line in line_numbers(file, of).items()}
    for violation in shown:
        print(folded(_line(violation, report.path, lines), sys.stdout, 10))
        if (evidence := violation.evidence) is not None:
            # The cause of a break, and both texts (or ids) with the part that differs between ⟦ and ⟧.
            print(f"    {evidence['explanation']}")
            sides = both_sides(evidence)
            for side, left, middle, right in sides:
                marked = f"\033[7m⟦{middle}⟧\033[0m" if sys.stdout.isatty() else f"⟦{middle}⟧"
                print(f"    {side}  {left}{marked}{right}")
            if sides and (more := len(evidence["spans"]) - 1) > 0:
                print(f"    {counted(more, 'more place')} of this turn differ")
    if len(listed) > len(shown):
        print(f"… and {len(listed) - len(shown):,} more: --json gives all, -v shows all")
    if report.violations:
        print()
    for meaning, count in report.rows()[1:]:
        print(folded(f"{count:>9,}  {meaning}", sys.stdout, 9))
    if report.violations:
        print()
    paragraphs(verdict)
    if report.rollouts and not report.tokens:
        paragraphs(
            "no token ids: `gymdata import FILE -m MODEL -o RUN` renders ids of the text it was made from (T213)"
        )
    if report.errors:
        worst = next(v.code for v in report.violations if v.severity == "error")
        print(f"gymdata validate --explain {worst} explains it")


def _worth_a_line(violations: list[Violation]) -> list[Violation]:
    """The first errors and the first few warnings of each code, in their order; of those alike only a few."""
    counts, alike, shown = Counter[str](), Counter[tuple[object, ...]](), []
    for v in violations:
        most = SHOWN if v.severity == "error" else SHOWN_WARNINGS
        words = (v.code, v.detail, v.expected, v.got)
        same = v.turn is None and v.position is None and alike[words] >= SHOWN_ALIKE
        if not same and counts[v.code] < most:
            counts[v.code] += 1
            alike[words] += 1
            shown.append(v)
    return shown


def _line(v: Violation, path: str, lines: Mapping[tuple[str, int], int]) -> str:
    from gymdata.checks.violations import CODES

    file = v.file or path
    where = [file, f"line {line}" if (line := lines.get((file, v.row))) is not None else f"row {v.row}"]
    if v.rollout_id:
        where.append(v.rollout_id)
    if v.turn is not None:
        where.append(f"turn {v.turn}")
    if v.position is not None:
        where.append(f"pos {v.position}")
    details = [CODES[v.code].name]
    if v.detail:
        details.append(v.detail)
    if v.expected is not None:
        details.append(f"expected {v.expected}")
    if v.got is not None:
        details.append(f"got {v.got}")
    # An id or a file name with a line end would look like another finding.
    return printable(f"{' '.join(where)}  {v.code} {'; '.join(details)}", lines=False)
