"""A strategy is one function; what it chooses are the candidates, drawn or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gymdata.commands.pairs.strategies import STRATEGIES
from tests.rollout_files import rollout, two_turns, write_run

PAIRS_OF_SEEDS = '''
import contextlib, io, json, sys
import numpy as np
from gymdata.cli.main import main
from gymdata.commands.pairs.strategies import strategy
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table

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

ids = read_table(sys.argv[1])["rollout_id"].to_pylist()
for seed in range(6):
    command = ["pairs", sys.argv[1], "--strategy", "top-random", "--seed", str(seed), "-o", f"{sys.argv[2]}/{seed}"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*command, "--json"]) == 0
    counts, table = json.loads(printed.getvalue()), read_table(f"{sys.argv[2]}/{seed}", PAIRS)
    sides = zip(table["chosen_rollout_id"].to_pylist(), table["rejected_rollout_id"].to_pylist())
    wanted = [(ids[a], ids[b]) for a, b in drawn[-1]]
    print(json.dumps([sorted(sides), sorted(wanted), counts["candidates"], sum(counts["dropped"].values())]))
'''


def test_a_drawn_strategy_gives_the_pairs_that_it_chose(tmp_path: Path) -> None:
    """Through the command, for every seed; none is lost, and other seeds give other pairs."""
    rows = [rollout(f"t{k // 8}", k % 8, float(k % 8 == 0), two_turns(k // 8, 100 + k)) for k in range(80)]
    run = write_run(tmp_path / "run", rows)
    # A process of its own: what it registers stays out of the tests of each strategy.
    command = [sys.executable, "-c", PAIRS_OF_SEEDS, str(run), str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 6
    for sides, drawn, candidates, dropped in map(json.loads, lines):
        assert sides == drawn
        assert (len(sides), candidates, dropped) == (10, 10, 0)
    assert len({json.dumps(json.loads(line)[0]) for line in lines}) == 6


def test_every_shipped_strategy_says_what_it_does() -> None:
    entries = list(STRATEGIES)
    assert {"adjacent", "all", "best-worst"} <= {entry.name for entry in entries}
    assert all(entry.help for entry in entries)
