"""The command that installs an extra fits how this copy of gymdata was installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from gymdata.errors import BROUGHT_BY, DataError, UsageError, needs, require
from gymdata.installed import install_command
from gymdata.rollouts.schema import refuse_newer

ROOT = Path(__file__).parent.parent
METADATA = """Metadata-Version: 2.4
Name: gymdata
Version: 0.1.0
Requires-Dist: numpy>=1.26
Requires-Dist: aiohttp>=3.10; extra == "collect"
Requires-Dist: gymdata[collect]; extra == "train"
Requires-Dist: trl<1.17,>=1.16; extra == "train"
"""


def made(folder: Path, direct_url: object | None) -> importlib.metadata.Distribution:
    """A distribution as pip leaves it in site-packages."""
    info = folder / "gymdata-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA)
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    return importlib.metadata.Distribution.at(info)


def of(tmp_path: Path, direct_url: object | None, extra: str = "train") -> str:
    site = tmp_path / "site-packages"
    return install_command(extra, package=site / "gymdata", dist=made(site, direct_url))


def test_a_checkout_is_installed_again_in_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """From inside the checkout `.`, from elsewhere its path."""
    monkeypatch.chdir(ROOT)
    assert install_command("train") == "pip install -e '.[train]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("train,cpu") == f"pip install -e '{ROOT}[train,cpu]'"


def test_a_wheel_file_is_named_while_it_is_there(tmp_path: Path):
    """The file that pip installed from, spaces and all."""
    wheel = tmp_path / "my wheels" / "gymdata-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    direct_url = {"url": wheel.as_uri(), "archive_info": {}}
    assert "%20" in direct_url["url"]
    assert of(tmp_path, direct_url) == f"pip install '{wheel}[train]'"


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        # As pip got it: not editable.
        ({"url": Path("/tmp").as_uri(), "dir_info": {}}, "pip install '/tmp[train]'"),
        (
            {"url": "https://host/gymdata-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'gymdata[train] @ https://host/gymdata-0.1.0-py3-none-any.whl'",
        ),
        # Nothing to install again from: the requirements themselves, those of extras within the extra too.
        (None, "pip install 'aiohttp>=3.10' 'trl<1.17,>=1.16'"),
        ({"url": "file:///nowhere/gymdata.whl", "archive_info": {}}, "pip install 'aiohttp>=3.10' 'trl<1.17,>=1.16'"),
    ],
)
def test_what_pip_installed_from_is_named(tmp_path: Path, direct_url: object, command: str):
    """A folder, an archive behind a URL; without the source what the extra needs."""
    assert of(tmp_path, direct_url) == command


def test_a_repository_is_named_at_the_commit_that_is_installed(tmp_path: Path):
    """An extra must not bring other code. No password is repeated."""
    vcs = {"vcs": "git", "commit_id": "0a1b2c", "requested_revision": "main"}
    direct_url = {"url": "https://user:secret@host/g.git", "vcs_info": vcs}
    assert of(tmp_path, direct_url) == "pip install 'gymdata[train] @ git+https://host/g.git@0a1b2c'"


def test_newer_data_is_refused_with_its_version():
    """It is a fault of its own, S104."""
    with pytest.raises(DataError, match="rollouts version 99 is newer") as newer:
        refuse_newer("a.parquet", "rollouts", 99)
    assert (newer.value.code, newer.value.hint) == ("S104", "install a newer gymdata")


def test_a_missing_library_becomes_its_extra(monkeypatch: pytest.MonkeyPatch):
    """Around an import, and before one; a library that is there passes both."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(UsageError, match="'trl', which is not installed") as caught, needs("train"):
        import trl  # noqa: F401 - hidden above
    assert caught.value.hint == "pip install -e '.[train]'"
    with pytest.raises(UsageError, match="'no_such_module'") as caught:
        require("engine", "json", "no_such_module")
    assert caught.value.hint == "pip install -e '.[cpu]'   (on a machine with a GPU: pip install -e '.[vllm]')"
    require("train", "json")


def test_a_missing_module_of_gymdata_is_no_missing_extra():
    """That is a defect, which installing an extra does not mend."""
    with pytest.raises(ModuleNotFoundError), needs("train"):
        import gymdata.no_such_module  # noqa: F401  # there is no such module


def test_every_library_that_an_extra_brings_is_declared_there():
    """The table of errors.py and pyproject.toml agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = {module: extra for module, extra in BROUGHT_BY.items() if extra != "engine"}
    below = {"huggingface_hub": "transformers", "tokenizers": "transformers", "safetensors": "peft"}
    for module, extra in declared.items():
        name = below.get(module, module).replace("_", "-")
        assert any(line.startswith(name) for line in extras[extra]), module
    assert not {line.split(">")[0] for line in project["dependencies"]} & {m.replace("_", "-") for m in declared}


def test_windows_is_refused_by_name():
    """Locks and process groups are POSIX's: the import says so in place of a missing module."""
    code = "import sys; sys.platform = 'win32'; import gymdata"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1].startswith("ImportError: gymdata runs on Linux and macOS")


def test_every_pinned_release_accepts_the_oldest_python_that_gymdata_does() -> None:
    """`make setup` takes these releases on each Python from 3.11 on; Debian 12 has 3.11.2."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    for dist in importlib.metadata.distributions():
        name = canonicalize_name(dist.metadata["Name"])
        if pinned.get(name) == dist.version:
            assert "3.11.0" in SpecifierSet(dist.metadata["Requires-Python"] or ""), (name, dist.version)
