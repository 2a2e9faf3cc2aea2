"""Pages that leave the machine are not written with what ``gymdata scan`` finds, unless that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import RefusedError
from tests.rollout_files import rollout, two_turns, write_run
from tests.scan.planted import planted

MAIL, HOME = (planted()[kind][0] for kind in ("e-mail", "home"))


def run_with(folder: Path, text: str) -> Path:
    """Two rollouts, of which reports show the messages."""
    return write_run(folder, [rollout("t", n, float(n), two_turns(20, 21), text=f"it is {text} & 4") for n in (0, 1)])


def test_an_exported_page_with_a_finding_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its kind and never its value, and nothing is written; the flag writes it."""
    run, page = run_with(tmp_path / "run", MAIL), tmp_path / "page.html"
    assert main(["view", str(run), "--export", str(page)]) == 1
    said = capsys.readouterr().err
    assert "e-mail" in said
    assert "--redact -o OUT" in said
    assert MAIL not in said
    assert not page.exists()
    assert main(["view", str(run), "--export", str(page), "--allow-findings"]) == 0
    assert MAIL in page.read_text()


def test_a_report_with_a_finding_is_refused(tmp_path: Path) -> None:
    """Also where the page has it in an example only."""
    run = run_with(tmp_path / "run", MAIL)
    with pytest.raises(RefusedError, match="e-mail") as refused:
        gymdata.report(run)
    assert "allow_findings" in (refused.value.hint or "")
    assert not list(run.glob("*report*"))
    made = gymdata.report(run, allow_findings=True)
    assert made.path is not None
    assert MAIL in made.path.read_text()


def test_pages_of_a_redacted_copy_are_written(tmp_path: Path) -> None:
    """They have nothing of what the run had."""
    pytest.importorskip("detect_secrets", reason="the extra scan (detect-secrets) is not installed")
    secrets = [text for text, _ in planted().values()]
    rows = [rollout(f"t{n}", 0, float(n % 2), [], text=f"see {text}, 4") for n, text in enumerate(secrets)]
    out = tmp_path / "out"
    gymdata.scan(write_run(tmp_path / "run", rows), out, redact=True)
    assert main(["view", str(out), "--export", str(tmp_path / "page.html")]) == 0
    assert main(["report", str(out)]) == 0
    pages = (tmp_path / "page.html").read_text() + (out / "report.html").read_text()
    assert "[redacted:" in pages
    assert [kind for kind, (_, secret) in planted().items() if secret in pages] == []


def test_the_own_home_folder_is_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of runs and models are below it as a rule: they are no reason to refuse, and the name is not published."""
    run = run_with(tmp_path / "run", f"{HOME}/models/one")
    with pytest.raises(RefusedError, match="home-path"):
        gymdata.report(run)
    monkeypatch.setenv("HOME", HOME)
    made = gymdata.report(run)
    assert made.path is not None
    assert HOME not in made.path.read_text()
    assert "~/models/one" in made.path.read_text()
