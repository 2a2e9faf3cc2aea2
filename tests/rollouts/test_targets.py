"""Training some agents only: their turns keep their masks, those of others become context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata.commands.train.settings import TrainSftConfig
from gymdata.errors import RefusedError
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.rollouts.turns import Call, TurnEncoder
from gymdata.store import read_table
from tests.rollout_files import BREAK, Calls, rollout, rollouts_table, training_data, two_turns, write_run


def by_agents(
    task: str, index: int, reward: float, calls: Calls, agents: Sequence[str | None], **more: Any
) -> dict[str, Any]:
    """A rollout whose turns name their agents."""
    encoder = TurnEncoder()
    for (prompt, generation), agent in zip(calls, agents, strict=True):
        logprobs = -np.ones(len(generation), np.float32)
        encoder.add(Call(np.array(prompt, np.int32), np.array(generation, np.int32), logprobs, "stop", agent=agent))
    return rollout(task, index, reward, calls, turns=encoder.turns, **more)


def rows() -> list[dict[str, Any]]:
    return [
        by_agents("a", 0, 1.0, two_turns(5, 40), ["planner", "solver"]),
        by_agents("a", 1, 0.0, BREAK, ["planner", None, "solver"]),
        by_agents("b", 0, 1.0, two_turns(6, 41), ["solver", "solver"], policy="other"),
        by_agents("b", 1, 0.0, two_turns(6, 42), ["planner", "planner"], policy="other"),
    ]


def trained(data: Any) -> dict[str, list[int]]:
    """Rollout → the ids that are trained, over its sequences."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(data.rollout_ids):
        ids, mask = data.lists("input_ids")[row], data.lists("loss_mask")[row]
        found.setdefault(name, []).extend(ids[mask == 1].tolist())
    return found


def test_only_their_turns_are_trained() -> None:
    """Masks are 1 on the chosen agents' generations and nowhere else, over chains and breaks; the rest is context."""
    table = rollouts_table(rows())
    everyone = training_data("sft", table, select="all")
    solver = training_data("sft", table, select="all", target_agents=["solver"])
    assert trained(solver) == {"a-0": [40, 2], "a-1": [12, 13], "b-0": [10, 11, 2, 41, 2]}
    both = training_data("sft", table, select="all", target_agents=["solver", "planner"])
    assert trained(both)["a-1"] == [10, 2, 12, 13]
    assert solver.n_trained.sum() == 9 < everyone.n_trained.sum()
    ids = {row["name"]: row["input_ids"] for row in everyone.table.to_pylist()}
    assert all(row["input_ids"] == ids[row["name"]] for row in solver.table.to_pylist())


def test_one_model_of_several() -> None:
    """Rollouts of other policies are left out before anything is chosen or labelled; the counts are of all."""
    table = rollouts_table(rows())
    assert set(training_data("sft", table, select="all", target_model="other").rollout_ids) == {"b-0", "b-1"}
    labelled = training_data("kto", table, target_model="other", target_agents=["planner"])
    assert trained(labelled) == {"b-1": [10, 11, 2, 42, 2]}


def test_a_name_that_is_not_there_is_refused() -> None:
    """The error lists the names that are."""
    table = rollouts_table(rows())
    with pytest.raises(RefusedError, match=r"no turn is of agent critic\n.*planner, solver"):
        training_data("sft", table, select="all", target_agents=["solver", "critic"])
    with pytest.raises(RefusedError, match=r"no rollout is of model big\n.*other, tiny"):
        training_data("sft", table, select="all", target_model="big")


def test_experiences_carry_the_choice(tmp_path: Path) -> None:
    """`experience --target-agents` writes masks and advantages for their tokens only; credit is the whole rollout's."""
    run = write_run(tmp_path / "run", rows())
    all_of_them = gymdata.experience(run, tmp_path / "all")
    report = gymdata.experience(run, tmp_path / "some", target_agents="solver")
    found = read_table(tmp_path / "some", EXPERIENCES).to_pylist()
    assert report.counts["trained_tokens"] == 9 < all_of_them.counts["trained_tokens"]
    whole = {(r["rollout_id"], r["sequence_index"]): r for r in read_table(tmp_path / "all", EXPERIENCES).to_pylist()}
    for row in found:
        before = whole[row["rollout_id"], row["sequence_index"]]
        assert row["input_ids"] == before["input_ids"]
        assert all(
            a == (b if m else 0.0)
            for a, b, m in zip(row["advantages"], before["advantages"], row["loss_mask"], strict=True)
        )
    with pytest.raises(RefusedError, match="critic"):
        gymdata.experience(run, tmp_path / "none", target_agents="critic")


def test_pairs_carry_the_choice(tmp_path: Path) -> None:
    """`pairs --target-agents` trains their tokens only, with log-probs 0.0 elsewhere; a side without any makes no pair."""
    played = [
        by_agents("a", 0, 1.0, two_turns(5, 40), ["planner", "solver"]),
        by_agents("a", 1, 0.0, two_turns(5, 41), ["planner", "solver"]),
        by_agents("b", 0, 1.0, two_turns(6, 41), ["solver", "solver"]),
        by_agents("b", 1, 0.0, two_turns(6, 42), ["planner", "planner"]),
    ]
    run = write_run(tmp_path / "run", played)
    everyone = gymdata.pairs(run, write=False).table.to_pylist()
    report = gymdata.pairs(run, write=False, target_agents="solver")
    (pair,) = report.table.to_pylist()
    (whole,) = (row for row in everyone if row["task_id"] == "a")
    assert len(everyone) == 2
    assert report.counts.dropped["nothing_generated"] == 1
    for side, own in (("chosen", [40, 2]), ("rejected", [41, 2])):
        assert pair[f"{side}_ids"] == whole[f"{side}_ids"]
        assert [i for i, m in zip(pair[f"{side}_ids"], pair[f"{side}_mask"], strict=True) if m] == own
        assert all((p == 0.0) == (m == 0) for p, m in zip(pair[f"{side}_logprobs"], pair[f"{side}_mask"], strict=True))
    with pytest.raises(RefusedError, match="critic"):
        gymdata.pairs(run, write=False, target_agents="critic")


def test_agents_are_given_as_words() -> None:
    """Flags and --set take ``a,b``, a file also a list."""
    given = {"model": "m", "output": "o"}
    for agents in ("a, b", ["a", "b"]):
        assert TrainSftConfig.load(None, {**given, "target_agents": agents}).target_agents == ("a", "b")
    assert TrainSftConfig.load(None, given, ["target_agents=[a, b]"]).target_agents == ("a", "b")


def test_sides_that_train_the_same_make_no_pair(tmp_path: Path) -> None:
    """Sides that differ only in what another agent says afterwards would train the same tokens after the same context."""
    played = [
        by_agents(
            "a", index, float(index), [([1, 5], [50, 2]), ([1, 5, 50, 2, 7], [40 + index, 2])], ["critic", "solver"]
        )
        for index in range(2)
    ]
    run = write_run(tmp_path / "run", played)
    assert gymdata.pairs(run, write=False).table.num_rows == 1
    report = gymdata.pairs(run, write=False, target_agents="critic")
    assert (report.table.num_rows, report.counts.dropped["identical"]) == (0, 1)
    assert gymdata.pairs(run, write=False, target_agents="solver").table.num_rows == 1
