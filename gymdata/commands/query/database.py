"""The views as a DuckDB file, for DuckDB's own shell and pages, and for every other of its clients."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gymdata.commands.query.views import find_files, open_views
from gymdata.errors import StoreError, UsageError, option
from gymdata.store.paths import local_output


def write_database(target: str | Path, paths: Sequence[str | Path], *, overwrite: bool = False) -> tuple[str, ...]:
    """Write the views of ``query`` over ``paths`` to a .duckdb file that appears whole. Returns their names.

    Views over Parquet name the files where they are, and are read by DuckDB, which checks no checksums; rows of other
    files are copied. Raises UsageError for another name, StoreError for a file that is there, without ``overwrite``.
    """
    from gymdata.store.stage_output import single_file

    path = local_output(target)
    if path.suffix != ".duckdb":
        raise UsageError.bad_value("--database", str(target), "a name ending in .duckdb")
    if not paths:
        raise UsageError("no path given", hint="gymdata query PATH --database FILE.duckdb")
    files = find_files(paths)
    if path.exists() and not overwrite:
        raise StoreError(f"{path}: is there already", hint=f"{option('overwrite', True)} replaces it")
    with single_file(path, overwrite=True) as temporary, tempfile.TemporaryDirectory(prefix="gymdata-query-") as folder:
        made = Path(folder, "views.duckdb")
        with open_views(files, made) as views:
            views.store()
        shutil.copyfile(made, temporary)
    return views.names
