"""What ``collect --agent`` needs of a coding agent that it knows by name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from gymdata.errors import EXIT_FAULTS, EXIT_OK, UsageError
from gymdata.public import Report, Row
from gymdata.record.agent import load_agent
from gymdata.record.isolation import why_not
from gymdata.record.presets import PRESETS


@dataclass(frozen=True, slots=True, repr=False)
class AgentReport(Report):
    """``path``: of its command, None where it is missing; ``install``: what brings it; ``home``: files that it gets;
    ``no_isolation``: why this machine cannot isolate it."""

    agent: str
    path: str | None
    install: str | None
    home: list[str]
    no_isolation: str | None

    @property
    def exit_code(self) -> int:
        """1 where its command is missing."""
        return EXIT_OK if self.path is not None else EXIT_FAULTS

    def rows(self) -> list[Row]:
        return [
            ("command", self.path or "missing"),
            *([("  what to do", self.install)] if self.path is None else []),
            ("configured by", ", ".join(f"~/{name}" for name in self.home) or "flags and variables"),
            ("--isolate", "possible" if self.no_isolation is None else f"not possible: {self.no_isolation}"),
        ]


def check_agent(agent: str) -> AgentReport:
    """Look for the command of ``agent``, a name or a command line. Raises UsageError for one that cannot be meant."""
    preset = PRESETS.get(agent)
    if preset is None:
        if "{" not in agent and " " not in agent and not agent.endswith(".py"):
            raise UsageError.unknown_choice("--agent", agent, PRESETS)
        load_agent(agent)
    command = agent.split()[0] if preset is None else preset.words[0]
    return AgentReport(
        agent=agent,
        path=shutil.which(command) or (command if preset is None else None),
        install=None if preset is None else f"npm install -g {preset.package}",
        home=[] if preset is None else list(preset.home),
        no_isolation=why_not(),
    )
