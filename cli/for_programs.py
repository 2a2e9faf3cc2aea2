"""Files for agents and editors: SKILL.md and llms.txt made from the topics."""

from __future__ import annotations

import json

from .examples import EXAMPLES
from .main import GROUPS
from .topics import Page

_SUMMARY = (
    "Turn LLM rollouts into training data, once, on disk, and train from those files: "
    "SFT, DPO, KTO, reward models, batch RL."
)
_USE = (
    "Use it to collect rollouts with vLLM, to check, score, judge, filter, query or look at them, to build preference pairs "
    "or experiences, and to train."
)
_RULES = """\
- Path first, settings as flags, `--config FILE` or `--set KEY=VALUE`. `-m` is the model, `-o` the output, `-n` a limit.
- `--json` prints one JSON object on stdout, errors included; everything else goes to stderr.
- Exit codes: 0 done, 1 faults found or some rows failed, 2 usage, 3 an outside system failed, 130 interrupted.
- An error names what was got, what is expected, where, and after `→` what to do. Follow the arrow.
- Rerun a command to resume it; `--overwrite` starts over; `--dry-run`, where there is one, checks and writes nothing.
- A fault has a code: `gymdata validate --explain CODE`. A module that is missing is named with the command that installs it.
- Never repair token ids by tokenizing text again: what is trained is what was sampled. `gymdata validate --fix` repairs."""


def skill(pages: list[Page]) -> str:
    """A SKILL.md: when to use gymdata, its commands with an example of each, the rules that all share, and the topics."""
    lines = [
        "---",
        "name: gymdata",
        f"description: {json.dumps(f'{_SUMMARY} {_USE}')}",
        "---",
        "",
        "# gymdata",
        "",
        _SUMMARY,
        "",
        "## Rules",
        "",
        _RULES,
        "",
        "## Commands",
        "",
        "`gymdata COMMAND --help` has every flag. `runs/x` is a run folder that `collect` or `import` wrote.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", f"### {group}", ""]
        for name, (_, _, summary) in commands.items():
            lines += [f"- `{name}`: {summary}", "", "  ```bash"]
            lines += [f"  {line}" for line in EXAMPLES[name][0].splitlines()]
            lines += ["  ```"]
    lines += ["", "## Topics", "", "`gymdata docs TOPIC` prints one.", ""]
    lines += [f"- `{page.name}`: {page.summary}" for page in pages]
    return "\n".join(lines) + "\n"


def llms(pages: list[Page]) -> str:
    """An llms.txt: one line for each topic, with its file in the repository."""
    lines = [
        "# gymdata",
        "",
        f"> {_SUMMARY}",
        "",
        "`gymdata docs TOPIC` prints a topic, `gymdata docs --skill` a SKILL.md.",
        "",
    ]
    lines += ["## Topics", ""]
    for page in pages:
        # The page of settings is made from their classes: there is no file of it.
        linked = page.title if page.name == "settings" else f"[{page.title}](gymdata/docs/{page.name}.md)"
        lines.append(f"- {linked}: {page.summary}")
    return "\n".join(lines) + "\n"
