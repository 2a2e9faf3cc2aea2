"""The wheel that this checkout makes, in environments of its own outside the checkout."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
#: What a wheel is made of. Built from a copy, so that no leftover of the checkout can stand in for a missing module.
SOURCES = ["pyproject.toml", ".ci", "README.md", "LICENSE", "gymdata", "cli", "sample_data"]


@dataclass(frozen=True)
class Installed:
    """An environment, and an empty folder outside the checkout to work in."""

    env: Path
    work: Path

    @property
    def data(self) -> Path:
        return next(self.env.glob("lib/python*/site-packages/gymdata/sample_data"))

    def gymdata(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.env / "bin" / "gymdata", *command], cwd=self.work, env=_environment(), capture_output=True, text=True
        )

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.env / "bin" / "python", *words], cwd=self.work, env=_environment(), capture_output=True, text=True
        )

    def install(self, *words: str) -> None:
        """With pip and the pinned versions, into this environment."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.env / "bin" / "python")]
        words = ("install", "--quiet", "--no-compile", "--disable-pip-version-check", "--progress-bar", "off", *words)
        pins = {"PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt")}
        done = subprocess.run(
            [*pip, *words], cwd=self.work, env=_environment() | pins, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr[-3000:]}"


def _environment() -> dict[str, str]:
    """This process's, without what would let the checkout in."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


@pytest.fixture(scope="session")
def outside() -> Iterator[Path]:
    """A folder outside the checkout, gone afterwards: environments are large."""
    folder = Path(tempfile.mkdtemp(prefix="gymdata-wheel-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def wheel(outside: Path) -> Path:
    """The wheel of this checkout."""
    source = outside / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "-w", str(outside / "dist"), str(source)], env=_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (made,) = (outside / "dist").glob("*.whl")
    return made


def _empty(folder: Path) -> Installed:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (folder / "work").mkdir()
    return Installed(folder / "env", folder / "work")


@pytest.fixture(scope="session")
def base(outside: Path, wheel: Path) -> Installed:
    """The wheel with what it declares to need, and nothing else."""
    environment = _empty(outside / "base")
    environment.install(str(wheel))
    return environment


@pytest.fixture(scope="session")
def made(base: Installed) -> Path:
    """A folder with pairs and experiences of the shipped rollouts."""
    for kind in ("pairs", "experience"):
        done = base.gymdata(kind, str(base.data / "rollouts" / "clean.jsonl"), "-o", f"made/{kind}")
        assert done.returncode == 0, done.stderr
    return base.work / "made"


@pytest.fixture(scope="session")
def training(outside: Path, wheel: Path) -> Installed:
    """The wheel, then what its own hint installs for `train-dpo`."""
    environment = _empty(outside / "training")
    # torch first: the build for processors must be there before a dependent asks for any build.
    environment.install("torch")
    environment.install(str(wheel))
    environment.gymdata("pairs", str(environment.data / "rollouts" / "clean.jsonl"), "-o", "pairs")
    said = environment.gymdata("train-dpo", "pairs", "-m", str(environment.data / "policy"), "-o", "trained")
    assert said.returncode == 2, said.stderr
    pip, install, *what = shlex.split(said.stderr.strip().splitlines()[-1].removeprefix("  → "))
    assert (pip, install) == ("pip", "install")
    environment.install(*what)
    return environment
