"""The topic "Validate codes" of the documentation, written from the table of codes.

``python -m gymdata.validate.codes_page --write gymdata/docs`` after a change of ``gymdata/checks/codes/``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gymdata.checks.violations import CODES, FAMILIES

NAME = "validate-codes.md"
HEAD = """# Validate codes

Every fault that `gymdata validate` and `gymdata audit` report, with its severity, what it means and what to do.

`--select T2,L` checks only these codes, `--ignore D702` skips some, `--strict` makes warnings errors, and `--explain T209`
prints one entry of this page. Errors give exit code 1. A command that depends on a property refuses rows with its code
whatever the severity: `pairs` never takes a rollout without a reward, for example.

`--fix split|truncate|drop -o OUT` writes a repaired copy: `split` starts a new sequence at a break, `truncate` keeps the
turns before it, `drop` removes the rollout. It reports how many rollouts and tokens that cost. Nothing is repaired in place.

```console
$ gymdata validate sample_data/rollouts/clean.jsonl --select T2,L
no errors, 0 warnings in 24 rollouts, 48 turns, 1,598 tokens (0.06 s); trainable: 24 of 24 rollouts
```
"""


def page() -> str:
    """The whole page in Markdown."""
    lines = [HEAD]
    for letter, title in FAMILIES.items():
        codes = [code for code in CODES.values() if code.code.startswith(letter)]
        if codes:
            lines.append(f"## {title}\n")
        for code in codes:
            meaning = code.meaning[0].upper() + code.meaning[1:]
            lines.append(f"**{code.code} {code.name}** ({code.severity}). {meaning}. {code.explanation}\n")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, metavar="FOLDER", help="folder of the documentation")
    (parser.parse_args().write / NAME).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
