"""Trajectories of the NeMo Agent Toolkit: there and back, ours and theirs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymdata.cli.main import main
from gymdata.commands.import_export.run import import_rollouts
from gymdata.formats import format_named
from gymdata.formats.nat import NO_REWARD
from gymdata.rollouts.messages import ROLES
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from gymdata.store.reading import DataWarning
from tests.formats.trajectories import (
    as_spread,
    as_stored,
    exported,
    imported,
    native,
    rejected,
    rows_read,
    same,
    some,
    text,
    there_and_back,
    through_a_run,
    through_json,
    value,
    write_lines,
)
from tests.rollout_files import rollout, two_turns, write_run

trajectory_of = format_named("nat-trajectories").trajectory  # type: ignore[attr-defined]  # of trajectories alone
_SETTINGS = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
reward = st.floats(allow_nan=False) | st.integers(-3, 3)


@_SETTINGS
@given(st.lists(native(st.floats(allow_nan=False)), min_size=1, max_size=3, unique_by=lambda r: r["rollout_id"]))
def test_ours_come_back_whole(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """Every column, message and turn of a rollout with a reward is what it was, and it is written the same again."""
    made, lost = exported(rows, trajectory_of)
    assert NO_REWARD not in lost
    file = write_lines(tmp_path / "a.jsonl", made)
    back = as_stored(rows_read("nat-trajectories", file))
    assert same(back, sorted(as_spread(rows), key=lambda row: row["rollout_id"]))
    again = [through_json(trajectory_of(row, lost)) for row in back]
    assert same(again, sorted(made, key=lambda one: one["metadata"]["gymdata"]["rollout_id"]))


@_SETTINGS
@given(native(st.floats(allow_nan=False)))
def test_what_is_written_is_what_the_toolkit_takes(row: dict[str, Any]) -> None:
    """Items have the four fields, content is text, an answer has log-probabilities, the reward is a number."""
    (made,), _ = exported([row], trajectory_of)
    assert set(made) == {"episode", "reward", "shaped_rewards", "metadata"}
    assert isinstance(made["reward"], float)
    for item, message in zip(made["episode"], row["messages"], strict=True):
        assert set(item) == {"role", "content", "logprobs", "metadata"}
        assert item["role"] == message["role"] in ROLES
        assert isinstance(item["content"], str)
        assert item["role"] != "assistant" or item["logprobs"] is not None
        assert item["metadata"] is None or isinstance(item["metadata"], dict)
    assert made["shaped_rewards"] is None or len(made["shaped_rewards"]) == len(made["episode"])


spelt = st.builds(
    lambda t, lp, top: {"token": t, "bytes": None, "logprob": lp, "top_logprobs": top},
    st.one_of(text, st.integers(0, 99).map(lambda n: f"token_id:{n}")),
    st.one_of(st.floats(-9, 0), st.floats(-9, 0, width=32), st.integers(-3, 0)),
    st.sampled_from([[], [{"token": "token_id:5", "bytes": None, "logprob": -1.5}]]),
)
log_probs = st.one_of(value, st.builds(lambda c: {"content": c, "refusal": None}, st.lists(spelt, max_size=3)))
metadata = st.one_of(
    st.none(),
    some(
        tool_calls=value, tool_call_id=text, name=value, reasoning_content=text,
        prompt_token_ids=st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=4)), gymdata=value,
    ),
)  # fmt: skip
item = st.builds(
    lambda made, role: made | {"role": role},
    some(content=st.one_of(text, value), logprobs=log_probs, metadata=metadata),
    st.one_of(st.sampled_from(ROLES), text),
)
trajectory = st.builds(
    lambda made, episode, given_reward: made | {"episode": episode, "reward": given_reward},
    some(shaped_rewards=value, metadata=st.one_of(value, some(id=st.one_of(text, value), run_id=text))),
    st.lists(item, max_size=3),
    st.one_of(reward, st.just("0.5")),
)
document = st.one_of(
    trajectory,
    st.builds(
        lambda rest, groups: rest | {"trajectories": groups},
        some(run_id=text),
        st.lists(st.lists(trajectory, max_size=2), max_size=2),
    ),
)


@pytest.mark.filterwarnings("ignore:nat-trajectories. token ids in")
@_SETTINGS
@given(document)
def test_theirs_come_back_whole(tmp_path: Path, theirs: Any) -> None:
    """Of a collection or trajectory of odd shape every rollout is, exported and imported again, what it was: ids,
    log-probabilities, rewards and texts; the others are named."""
    theirs = through_json(theirs)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(theirs, indent=1, ensure_ascii=False), encoding="utf-8")
    done, _ = through_a_run(file, "nat-trajectories")
    total = sum(map(len, theirs["trajectories"])) if "trajectories" in theirs else 1
    assert done.rollouts + done.rejected == total
    if done.rollouts:
        assert same(*there_and_back(tmp_path))


def plain(question: str, answer: str, **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": answer, "logprobs": {"content": []}, "metadata": None}
    asked = {"role": "user", "content": question, "logprobs": None, "metadata": None}
    return {"episode": [asked, said], "reward": 1.0, "shaped_rewards": None, "metadata": None} | more


def test_one_inner_list_is_not_one_group(tmp_path: Path) -> None:
    """With one generation an example, the toolkit puts all examples into one inner list: they are groups all the same."""
    group = [plain("a", "1"), plain("b", "2"), plain("a", "3"), plain("c", "4", metadata={"id": "x"})]
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"trajectories": [group], "run_id": "r"}))
    import_rollouts(file, tmp_path / "run")
    rows = read_table(tmp_path / "run").to_pylist()
    assert [r["rollout_index"] for r in rows] == [0, 0, 1, 0]
    assert rows[0]["group_id"] == rows[2]["group_id"] != rows[1]["group_id"]
    assert rows[3]["task_id"] == "x"


def test_tokens_spelt_as_ids_are_turns(tmp_path: Path) -> None:
    """An answer with ids for tokens and its prompt's ids is a turn, with step reward and alternatives; text is none."""
    content = [
        {"token": "token_id:7", "bytes": None, "logprob": -0.10536051541566849, "top_logprobs": []},
        {"token": "token_id:2", "bytes": None, "logprob": -1.0, "top_logprobs": []},
    ]
    good = plain("a", "1", shaped_rewards=[0.0, 0.25])
    good["episode"][1] |= {"logprobs": {"content": content}, "metadata": {"prompt_token_ids": [1, 5]}}
    words = plain("a", "2")
    words["episode"][1] |= {
        "logprobs": {"content": [content[0] | {"token": "Hi"}]},
        "metadata": {"prompt_token_ids": [1]},
    }
    with pytest.warns(DataWarning, match="token ids in the `episode` of 1 row are not read"):
        done, back = through_a_run(write_lines(tmp_path / "a.jsonl", [good, words]), "nat-trajectories")
    assert len(back) == 2
    assert same(*there_and_back(tmp_path))
    assert (done.turns, done.without_token_data) == (1, 1)
    row = to_rows(read_table(tmp_path / "run"))[0]
    turn = row["turns"][0]
    assert (turn["generation_token_ids"].tolist(), turn["prompt_delta_ids"].tolist()) == ([7, 2], [1, 5])
    assert (turn["reward"], row["messages"][1]["turn"]) == (0.25, 0)


def test_lines_may_be_lists_of_trajectories(tmp_path: Path) -> None:
    """Lists among the lines hold trajectories or lists of them; an export has one in each line."""
    one = [plain("a", str(n)) for n in range(9)]
    bad = [{"reward": 1}, {"reward": 2}]
    rows = [*one[:3], *bad, one[3], [[one[4], one[5]], one[6]], *one[7:]]
    done, back = through_a_run(write_lines(tmp_path / "a.jsonl", rows), "nat-trajectories")
    assert (done.rollouts, done.rejected) == (9, len(bad))
    assert [row["episode"][1]["content"] for row in back] == [row["episode"][1]["content"] for row in one]


def test_a_score_given_since_is_exported(tmp_path: Path) -> None:
    """The exported reward is the row's, not the source's."""
    (row,) = imported(write_lines(tmp_path / "a.jsonl", [plain("a", "1")]), "nat-trajectories")
    made = trajectory_of(row | {"reward": 0.25}, Counter())
    assert made is not None
    assert made["reward"] == 0.25


def test_rollouts_without_a_reward_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trajectory must have a reward: none is invented, and groups are inner lists."""
    rows = [
        rollout(task, index, reward, two_turns(1, 9))
        for task, index, reward in (("t", 0, 1.0), ("u", 0, None), ("t", 1, 0.0))
    ]
    run = write_run(tmp_path / "run", rows)
    assert main(["export", str(run), "--format", "nat-trajectories", "-o", str(tmp_path / "a.json"), "--json"]) == 0
    said = capsys.readouterr()
    assert NO_REWARD in said.err
    assert json.loads(said.out)["skipped"] == 1
    made = json.loads((tmp_path / "a.json").read_text())
    assert [[t["reward"] for t in group] for group in made["trajectories"]] == [[1.0, 0.0]]
    assert made["run_id"] == "run-1"
    assert main(["import", str(tmp_path / "a.json"), "-o", str(tmp_path / "back"), "--json"]) == 0
    before = [r for r in read_table(run).to_pylist() if r["reward"] is not None]
    assert read_table(tmp_path / "back").to_pylist() == before


def test_bad_trajectories_are_named(tmp_path: Path) -> None:
    """Each fault has its line, place and reason, and hides no other trajectory."""
    good, *bad = plain("a", "1"), {"reward": 1}, plain("a", "1", reward=None), plain("a", "1", reward=True), 7
    values = [*bad, {"trajectories": [[*bad[:2], good]]}]
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(good), "{", *map(json.dumps, values)]))
    told = rejected(tmp_path / "a.jsonl", "nat-trajectories")
    assert [t["code"] for t in told] == ["S101", "S103", "R502", "R502", "S103", "S103", "R502"]
    assert told[-1]["reason"].startswith("trajectories[0][1]")
