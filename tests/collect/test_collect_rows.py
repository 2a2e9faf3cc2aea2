"""What collect writes, with a deterministic engine at the port."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from gymdata.engines.port import Generation, SampleRequest
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_failures, read_run_json
from tests.collect.fake_parts import END, ROLE, FakeSampler, add_or_answer

Play = Callable[..., tuple[Any, list[dict[str, Any]]]]


def test_every_rollout_once_with_its_group(play: Play, tmp_path: Path) -> None:
    """-r 3 over 5 tasks gives 15 rows in 5 groups, all ids distinct, and exit code 0. run.json has the drawn seed, every
    sampling setting, the task file's hash, the engine's facts and the counts."""
    summary, rows = play(5, num_rollouts=3, temperature=0.7)
    assert [(r["task_id"], r["rollout_index"]) for r in rows] == [(f"t{t}", i) for t in range(5) for i in range(3)]
    assert len({r["rollout_id"] for r in rows}) == 15
    assert len({r["group_id"] for r in rows}) == 5
    assert (summary.exit_code, summary.rollouts, summary.groups, summary.pending) == (0, 15, 5, 0)
    facts = read_run_json(tmp_path / "run")
    assert isinstance(facts["identity"]["seed"], int)
    assert (facts["identity"]["temperature"], facts["identity"]["policy_hash"]) == (0.7, "fake-0")
    assert facts["tasks"]["files"][0]["xxh3"]
    assert (facts["engine"]["engine"], facts["counts"]["rollouts"]) == ("fake", 15)


def test_the_path_of_the_model_is_kept_whole(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was named from another folder is found from any, as every other parent is."""
    play(1, run="policy")  # as a training, a run has a run.json
    monkeypatch.chdir(tmp_path)
    play(1, model="policy")
    assert [parent["path"] for parent in read_run_json(tmp_path / "run")["parents"]] == [str(tmp_path / "policy")]


class Inserting(FakeSampler):
    """Reads a token more at the beginning of each prompt."""

    async def sample(self, request: SampleRequest) -> list[Generation]:
        sampled = await super().sample(request)
        return [dataclasses.replace(g, prompt_token_ids=[399, *g.prompt_token_ids]) for g in sampled]


def test_a_break_is_kept_as_the_engine_reports_it(play: Play, tmp_path: Path, adder: str) -> None:
    """The row has the prompts that were read, and says where they leave what came before."""
    summary, (row,) = play(1, Inserting(add_or_answer), env=adder, seed=1)
    prompts = [prompt.tolist() for prompt in expand_prompts(row["turns"])]
    assert (summary.rollouts, summary.breaks, row["n_breaks"]) == (1, 2, 2)
    assert [prompt[:2] for prompt in prompts] == [[399, ROLE["user"]], [399, 399], [399, 399]]
    assert prompts[0][-2:] == [END, ROLE["assistant"]]
    assert [turn["prefix_length"] for turn in row["turns"]] == [0, 1, 2]
    assert {v.code for v in validate(tmp_path / "run").violations if v.code.startswith("T2")} == {"T200"}


def test_prompts_continue_what_was_sampled(play: Play, adder: str) -> None:
    """Each later prompt is the ids before, the ids sampled and the bridge; expanding gives the engine's very prompts. Each
    call has a seed of its own."""
    sampler = FakeSampler(add_or_answer)
    _, rows = play(4, sampler, env=adder, num_rollouts=3, seed=3)
    sent = {tuple(request.prompt_token_ids) for request in sampler.requests}
    for row in rows:
        prompts = expand_prompts(row["turns"])
        assert {tuple(p.tolist()) for p in prompts} <= sent
        assert row["n_breaks"] == 0
        assert [t["parent"] for t in row["turns"]] == [-1, 0, 1]
        second = row["turns"][1]
        assert second["prompt_delta_ids"][0] == ROLE["tool"]
        assert second["prefix_length"] == len(prompts[0]) + len(row["turns"][0]["generation_token_ids"])
    assert len({request.seed for request in sampler.requests}) == len(sampler.requests) == 4 * 3 * 3


def test_messages_name_their_turn(play: Play, adder: str) -> None:
    """Generated messages carry the model call that made them, tool calls are JSON text, tool output has no turn."""
    _, (row,) = play(1, FakeSampler(add_or_answer), env=adder)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [m["turn"] for m in row["messages"]] == [None, 0, None, 1, None, 2]
    call = json.loads(row["messages"][1]["tool_calls"])[0]["function"]
    assert row["messages"][2]["content"] == str(call["arguments"]["a"] + 1)
    assert json.loads(row["tools"])[0]["function"]["name"] == "add"
    assert json.loads(row["task"]) == {"task_id": "t0", "prompt": "q0", "answer": "0", "level": 0}


def test_a_cut_turn_gets_its_end_from_the_bridge_never_from_the_model(play: Play) -> None:
    """A turn that reached --max-tokens ends the rollout as truncated, and its ids end where the engine cut."""
    _, (row,) = play(1, FakeSampler(lambda prompt, rng: "12345"), max_tokens=1)
    assert (row["status"], row["stop_reason"], row["finish_reason"]) == ("truncated", "max_tokens", "length")
    assert row["turns"][0]["generation_token_ids"] == [ord("1")]


@pytest.mark.parametrize(
    ("stop_reason", "settings", "context"), [("max_turns", {"max_turns": 2}, None), ("max_context", {}, 40)]
)
def test_a_limit_between_turns_truncates(
    play: Play, adder: str, stop_reason: str, settings: dict[str, Any], context: int | None
) -> None:
    """A rollout that the environment would go on with ends at --max-turns, or where the context has no room for a token; it
    is scored like any other."""
    sampler = FakeSampler(add_or_answer, max_model_len=context)
    summary, (row,) = play(1, sampler, env=adder, rewards=["numeric"], **settings)
    assert (row["status"], row["stop_reason"], row["n_turns"]) == ("truncated", stop_reason, 2)
    assert row["reward"] == 0.0
    assert summary.truncated_share == 1.0


def test_rewards_keep_their_parts(play: Play) -> None:
    """Each named part is stored as it is, and the total is the weighted sum."""
    rewards = ["exact_match", "numeric=0.5", "regex:answer=2"]
    _, rows = play(2, FakeSampler(lambda prompt, rng: "the answer is 1"), rewards=rewards)
    named = [{p["name"]: p["value"] for p in r["rewards"]} for r in rows]
    assert named == [{"exact_match": 0, "numeric": 0, "regex": 1}, {"exact_match": 0, "numeric": 1, "regex": 1}]
    assert [r["reward"] for r in rows] == [2.0, 2.5]


def test_a_reward_that_raises_leaves_the_rollout_unscored(play: Play, tmp_path: Path) -> None:
    """The rollout is kept with reward null, the fault is in failures.jsonl, nothing is pending, and the exit code is 1."""
    (tmp_path / "bad.py").write_text("def picky(completions, level, **kw):\n    return [1 / (x - 1) for x in level]\n")
    summary, rows = play(3, rewards=[f"{tmp_path / 'bad.py'}:picky", "exact_match"])
    assert [r["reward"] is None for r in rows] == [False, True, False]
    (record,) = read_failures(tmp_path / "run")
    assert record["place"] == "reward picky"
    assert "ZeroDivisionError" in record["message"]
    assert (summary.exit_code, summary.pending, summary.reward_faults) == (1, 0, 1)


def test_grouped_requests_sample_the_same_rows(play: Play, adder: str) -> None:
    """One request for a group's first turn gives the very rows that single requests give."""
    settings: dict[str, Any] = {"env": adder, "num_rollouts": 5, "seed": 9, "run_id": "same"}
    grouped = FakeSampler(add_or_answer, groups=True)
    _, alone = play(4, FakeSampler(add_or_answer), run="alone", **settings)
    assert play(4, grouped, run="grouped", **settings)[1] == alone
    assert sorted(r.n for r in grouped.requests)[-4:] == [5, 5, 5, 5]


def test_the_same_seed_samples_the_same_elsewhere(play: Play) -> None:
    """--seed repeats the samples in another folder under another run_id; another seed does not."""
    runs = [play(6, run=f"run-{n}", num_rollouts=2, seed=seed)[1] for n, seed in enumerate((5, 5, 6))]
    ids = [[turn["generation_token_ids"] for row in rows for turn in row["turns"]] for rows in runs]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("groups", [False, True])
def test_never_more_in_flight_than_asked(play: Play, adder: str, groups: bool) -> None:
    """-c bounds the rollouts that exist at a time, grouped or not, however many are pending."""
    sampler = FakeSampler(add_or_answer, groups=groups)
    play(20, sampler, env=adder, num_rollouts=3, concurrency=7)
    assert 2 <= sampler.peak <= 7


def test_jsonl_holds_the_same_rows(play: Play, adder: str, tmp_path: Path) -> None:
    """--format jsonl writes the rows that parquet would have."""
    kinds = ("parquet", "jsonl")
    settings: dict[str, Any] = {"env": adder, "num_rollouts": 2, "seed": 1, "run_id": "x"}
    rows = [play(3, FakeSampler(add_or_answer), run=kind, format=kind, **settings)[1] for kind in kinds]
    assert rows[0] == rows[1]
    assert list((tmp_path / "jsonl" / "rollouts").glob("part-*.jsonl"))


def test_greedy_rollouts_are_requested_one_by_one(play: Play) -> None:
    """vLLM refuses a greedy request for several generations, which would be equal."""
    sampler = FakeSampler(groups=True)
    play(2, sampler, num_rollouts=2, temperature=0.0)
    assert [request.n for request in sampler.requests] == [1, 1, 1, 1]


class WithAlternatives(FakeSampler):
    async def sample(self, request: SampleRequest) -> list[Generation]:
        sampled = await super().sample(request)
        return [dataclasses.replace(g, top_log_probs=[[(7, -0.5), (8, -1.5)] for _ in g.token_ids]) for g in sampled]


def test_alternatives_are_kept(play: Play) -> None:
    """Alternatives that the engine reports are stored by token, with ids and log-probs."""
    _, (row,) = play(1, WithAlternatives(), top_logprobs=2)
    assert row["turns"][0]["top_log_probs"][0] == [{"id": 7, "log_prob": -0.5}, {"id": 8, "log_prob": -1.5}]
    assert len(row["turns"][0]["top_log_probs"]) == len(row["turns"][0]["generation_token_ids"])
