"""A strategy is one file, shipped or of another package; what it chooses are the candidates, drawn or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymdata.errors import UsageError
from gymdata.pairs.strategies import STRATEGIES
from tests.rollout_files import rollout, two_turns, write_run

TOP_RANDOM = '''
import numpy as np
from gymdata.pairs.strategies import strategy

drawn = []

@strategy("top-random")
def top_random(groups):
    """The best rollout of each group, and any lower one."""
    top, other = [], []
    for start, size in zip(groups.start, groups.size):
        lower = [k for k in range(start, start + size) if groups.score[k] < groups.score[start]]
        if lower:
            top.append(start)
            other.append(groups.rng.choice(lower))
    drawn.append(sorted(zip(groups.row[top].tolist(), groups.row[other].tolist())))
    return np.array(other), np.array(top)
'''
PAIRS_OF_SEEDS = """
import contextlib, io, json, sys
import more_strategies
from gymdata.cli.main import main
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table
ids = read_table(sys.argv[1])["rollout_id"].to_pylist()
for seed in range(6):
    command = ["pairs", sys.argv[1], "--strategy", "top-random", "--seed", str(seed), "-o", f"{sys.argv[2]}/{seed}"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*command, "--json"]) == 0
    counts, table = json.loads(printed.getvalue()), read_table(f"{sys.argv[2]}/{seed}", PAIRS)
    sides = zip(table["chosen_rollout_id"].to_pylist(), table["rejected_rollout_id"].to_pylist())
    wanted = [(ids[a], ids[b]) for a, b in more_strategies.drawn[-1]]
    print(json.dumps([sorted(sides), sorted(wanted), counts["candidates"], sum(counts["dropped"].values())]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed package with the strategy top-random, besides gymdata."""
    folder = tmp_path / "site"
    (folder / "more_strategies-1.dist-info").mkdir(parents=True)
    (folder / "more_strategies.py").write_text(TOP_RANDOM)
    (folder / "more_strategies-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: more-strategies\nVersion: 1\n"
    )
    (folder / "more_strategies-1.dist-info" / "entry_points.txt").write_text(
        "[gymdata.strategies]\ntop-random = more_strategies:top_random\n"
    )
    return folder


def python(package: Path, *words: str) -> str:
    program = f"import sys; sys.path.insert(0, {str(package)!r})\n"
    command = [sys.executable, "-c", program + words[0], *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_drawn_strategy_gives_the_pairs_that_it_chose(tmp_path: Path, package: Path) -> None:
    """Through the command, for every seed; none is lost, and other seeds give other pairs."""
    rows = [rollout(f"t{k // 8}", k % 8, float(k % 8 == 0), two_turns(k // 8, 100 + k)) for k in range(80)]
    run = write_run(tmp_path / "run", rows)
    lines = [json.loads(line) for line in python(package, PAIRS_OF_SEEDS, str(run), str(tmp_path)).splitlines()]
    assert len(lines) == 6
    for sides, drawn, candidates, dropped in lines:
        assert sides == drawn
        assert (len(sides), candidates, dropped) == (10, 10, 0)
    assert len({json.dumps(sides) for sides, *_ in lines}) == 6


def test_a_strategy_of_another_package_is_in_the_help_and_completed(package: Path) -> None:
    """Its name comes from the registry, as the shipped ones' do."""
    text = python(package, "import sys; from gymdata.cli.main import main; sys.exit(main(['pairs', '--help']))")
    assert "best-worst|top-random" in text.replace(" ", "").replace("│", "").replace("\n", "")


def test_every_shipped_strategy_says_what_it_does() -> None:
    entries = list(STRATEGIES)
    assert {"adjacent", "all", "best-worst"} <= {entry.name for entry in entries}
    assert all(entry.help for entry in entries)


def test_an_unknown_strategy_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"strategy: got 'bestworst', expected one of .*best-worst"):
        STRATEGIES["bestworst"]
