"""``make compare-trainers``: the table of what each trainer learns from one saved set of rollouts."""

from __future__ import annotations

import sys
from pathlib import Path

from gymdata.errors import GymdataError
from tests.benchmarks.comparing import compare_trainers, markdown


def main(output: str) -> int:
    try:
        compare_trainers(output, overwrite=True, say=lambda line: print(line, file=sys.stderr))
    except GymdataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        _show(Path(output) / "summary.json")
    return 0


def _show(file: Path) -> None:
    import json

    if file.is_file():
        print(markdown(json.loads(file.read_text())))
        print(f"\nwritten to {file}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
