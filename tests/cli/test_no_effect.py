"""What was typed and would do nothing, or something else than it seems to, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gymdata.cli.main import main
from tests.rollout_files import rollout, two_turns, write_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "run", [rollout("t", i, float(i), two_turns(4, 50 + i)) for i in range(2)])


@pytest.mark.parametrize(
    ("command", "refused", "needed"),
    [
        ("pairs run --judge x", "--judge: got 'x'", "--from comparisons"),
        ("pairs run --from comparisons --reward exact", "--reward: got 'exact'", "--from rewards"),
        ("filter run --best-by n_turns -o kept", "--best-by: got 'n_turns'", "--best-n"),
        ("experience run --overlong-factor 0.5", "--overlong-factor: got 0.5", "--overlong-buffer"),
        ("train-sft run -m x -o y --pack-length 64", "--pack-length: got 64", "--packing"),
    ],
)
def test_an_option_without_effect_is_refused(
    run: Path, command: str, refused: str, needed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its flag, with what it needs; nothing is written."""
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert f"{refused}, which has no effect without {needed}" in " ".join(error.split())
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


@pytest.mark.parametrize("command", ["pairs run", "experience run", "train-sft run -m x -o y"])
def test_a_choice_of_no_agent_is_refused(run: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would have trained all of them."""
    for names in (",", "", " , "):
        assert main([*command.split(), "--target-agents", names]) == 2
        assert "--target-agents: got" in capsys.readouterr().err
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


@pytest.mark.parametrize("command", ["pairs run", "export run --format nemo-gym", "train-sft run -m tiny"])
def test_an_output_of_a_dash_is_refused(run: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``-`` means standard output elsewhere; no command makes a file or folder of that name."""
    assert main([*command.split(), "-o", "-"]) == 2
    assert "-o -: writing to standard output is not supported" in capsys.readouterr().err
    assert not Path("-").exists()


def test_the_beginning_of_codes_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    """``--explain L3`` is no code, and says which begin so."""
    assert main(["validate", "--explain", "l3"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "L301 " in error
    assert "L305 " in error
    assert "T200" not in error


def test_token_columns_that_are_not_there_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As every missing path is."""
    assert main(["experience", "run", "--token-columns", "nope.parquet"]) == 2
    assert "nope.parquet: no such file or folder" in " ".join(capsys.readouterr().err.split())


def test_errors_of_settings_and_models_have_their_parts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault of the whole is said without the word settings; a model that is not there says where, for programs."""
    assert main(["score", "run"]) == 2
    assert capsys.readouterr().err.startswith("error: no reward given: --reward,")
    assert main(["check", "nothere", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["where"], error["got"]) == ("nothere", "nothing")
    assert error["expected"].startswith("the folder of a model")
