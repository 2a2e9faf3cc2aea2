"""Files that are replaced whole."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gymdata.errors import StoreError
from gymdata.store.run_json import replacing, unnamed_file


def test_two_writers_never_share_a_temporary_file(tmp_path: Path) -> None:
    """The second is refused while the first writes; afterwards it may, and what a killed one left is taken over."""
    path = tmp_path / "table.parquet"
    with replacing(path) as first:
        first.write_text("first")
        with pytest.raises(StoreError, match="another process is writing it"), replacing(path):
            pass
        assert first.read_text() == "first"
    assert path.read_text() == "first"
    (tmp_path / ".table.parquet.tmp").write_text("left by a killed writer, and longer")
    with replacing(path) as second:
        second.write_text("second")
    assert path.read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["table.parquet"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Told as the disk's fault, with its name."""
    with pytest.raises(StoreError, match="could not be written"), replacing(tmp_path / "no" / "a.json"):
        pass


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EISDIR, None])
def test_scratch_data_never_has_a_name_beside_an_output(
    refusal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any moment leaves no file in the folder, also on a file system that has no files without a name."""
    out, elsewhere, named, plain_open = tmp_path / "out", tmp_path / "elsewhere", list[Path](), os.open
    out.mkdir()
    elsewhere.mkdir()

    def opening(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if refusal and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(refusal, os.strerror(refusal))
        if flags & os.O_CREAT:
            named.append(Path(path).parent)
        return plain_open(path, flags, *more, **options)

    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setattr(os, "open", opening)
    with unnamed_file(out) as file:
        file.write(b"tokens")
        file.seek(0)
        assert file.read() == b"tokens"
        assert not any(out.iterdir())
    assert named == ([elsewhere] if refusal else [])
