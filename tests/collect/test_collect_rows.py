"""What collect writes, with a deterministic engine at the port."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.collect.run import collect
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_failures, read_run_json
from tests.collect.fake_parts import END, ROLE, FakeSampler, add_or_answer, parts
from tests.collect.saved_rows import rows_of

Tasks = Callable[..., Path]


def test_every_rollout_once_with_its_group(tasks: Tasks, tmp_path: Path) -> None:
    """-r 3 over 5 tasks gives 15 rows in 5 groups, all ids distinct, and exit code 0."""
    summary = collect(tasks=str(tasks(5)), output=tmp_path / "run", num_rollouts=3, parts=parts())
    rows = rows_of(tmp_path / "run")
    assert [(r["task_id"], r["rollout_index"]) for r in rows] == [(f"t{t}", i) for t in range(5) for i in range(3)]
    assert len({r["rollout_id"] for r in rows}) == 15
    assert len({r["group_id"] for r in rows}) == 5
    assert (summary.exit_code, summary.rollouts, summary.groups, summary.pending) == (0, 15, 5, 0)


def test_prompts_continue_what_was_sampled(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """Each later prompt is the ids before, the ids sampled and the bridge; expanding gives the engine's very prompts."""
    sampler = FakeSampler(add_or_answer)
    collect(tasks=str(tasks(2)), output=tmp_path / "run", seed=3, parts=parts(sampler, env=adder))
    sent = {tuple(r.prompt_token_ids) for r in sampler.requests}
    for row in rows_of(tmp_path / "run"):
        prompts = expand_prompts(row["turns"])
        assert {tuple(p.tolist()) for p in prompts} <= sent
        assert row["n_breaks"] == 0
        assert [t["parent"] for t in row["turns"]] == [-1, 0, 1]
        second = row["turns"][1]
        assert second["prompt_delta_ids"][0] == ROLE["tool"]
        assert second["prefix_length"] == len(prompts[0]) + len(row["turns"][0]["generation_token_ids"])


def test_messages_name_their_turn(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """Generated messages carry the model call that made them, tool calls are JSON text, tool output has no turn."""
    collect(tasks=str(tasks(1)), output=tmp_path / "run", parts=parts(FakeSampler(add_or_answer), env=adder))
    (row,) = rows_of(tmp_path / "run")
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [m["turn"] for m in row["messages"]] == [None, 0, None, 1, None, 2]
    call = json.loads(row["messages"][1]["tool_calls"])[0]["function"]
    assert row["messages"][2]["content"] == str(call["arguments"]["a"] + 1)
    assert json.loads(row["tools"])[0]["function"]["name"] == "add"
    assert json.loads(row["task"]) == {"task_id": "t0", "prompt": "q0", "answer": "0", "level": 0}


def test_a_cut_turn_gets_its_end_from_the_bridge_never_from_the_model(tasks: Tasks, tmp_path: Path) -> None:
    """A turn that reached --max-tokens ends the rollout as truncated, and its ids end where the engine cut."""
    collect(tasks=str(tasks(1)), output=tmp_path / "run", max_tokens=1, parts=parts(FakeSampler(lambda p, r: "12345")))
    (row,) = rows_of(tmp_path / "run")
    assert (row["status"], row["stop_reason"], row["finish_reason"]) == ("truncated", "max_tokens", "length")
    assert row["turns"][0]["generation_token_ids"] == [ord("1")]


def test_a_turn_limit_truncates(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """--max-turns ends a rollout that the environment would go on with; it is scored like any other."""
    made = parts(FakeSampler(add_or_answer), env=adder, rewards=["numeric"])
    summary = collect(tasks=str(tasks(1)), output=tmp_path / "run", max_turns=2, parts=made)
    (row,) = rows_of(tmp_path / "run")
    assert (row["status"], row["stop_reason"], row["n_turns"]) == ("truncated", "max_turns", 2)
    assert row["reward"] == 0.0
    assert summary.truncated_share == 1.0


def test_a_context_limit_truncates(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """A prompt that leaves no room for a token ends the rollout as truncated by max_context."""
    made = parts(FakeSampler(add_or_answer, max_model_len=40), env=adder)
    collect(tasks=str(tasks(1)), output=tmp_path / "run", parts=made)
    (row,) = rows_of(tmp_path / "run")
    assert (row["status"], row["stop_reason"]) == ("truncated", "max_context")


def test_rewards_keep_their_parts(tasks: Tasks, tmp_path: Path) -> None:
    """Each named part is stored as it is, and the total is the weighted sum."""
    made = parts(FakeSampler(lambda p, r: "the answer is 1"), rewards=["exact_match", "numeric=0.5", "regex:answer=2"])
    collect(tasks=str(tasks(2)), output=tmp_path / "run", parts=made)
    rows = rows_of(tmp_path / "run")
    named = [{p["name"]: p["value"] for p in r["rewards"]} for r in rows]
    assert named == [{"exact_match": 0, "numeric": 0, "regex": 1}, {"exact_match": 0, "numeric": 1, "regex": 1}]
    assert [r["reward"] for r in rows] == [2.0, 2.5]


def test_a_reward_that_raises_leaves_the_rollout_unscored(tasks: Tasks, tmp_path: Path) -> None:
    """The rollout is kept with reward null, the fault is in failures.jsonl, nothing is pending, and the exit code is 1."""
    (tmp_path / "bad.py").write_text("def picky(completions, level, **kw):\n    return [1 / (x - 1) for x in level]\n")
    made = parts(rewards=[f"{tmp_path / 'bad.py'}:picky", "exact_match"])
    summary = collect(tasks=str(tasks(3)), output=tmp_path / "run", parts=made)
    assert [r["reward"] is None for r in rows_of(tmp_path / "run")] == [False, True, False]
    (record,) = read_failures(tmp_path / "run")
    assert record["place"] == "reward picky"
    assert "ZeroDivisionError" in record["message"]
    assert (summary.exit_code, summary.pending, summary.reward_faults) == (1, 0, 1)


def test_grouped_requests_sample_the_same_rows(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """One request for a group's first turn gives the very rows that single requests give."""
    settings: dict[str, Any] = {"tasks": str(tasks(4)), "num_rollouts": 5, "seed": 9, "run_id": "same"}
    alone, grouped = FakeSampler(add_or_answer), FakeSampler(add_or_answer, groups=True)
    collect(output=tmp_path / "a", parts=parts(alone, env=adder), **settings)
    collect(output=tmp_path / "b", parts=parts(grouped, env=adder), **settings)
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert sorted(r.n for r in grouped.requests)[-4:] == [5, 5, 5, 5]


def test_the_same_seed_samples_the_same_elsewhere(tasks: Tasks, tmp_path: Path) -> None:
    """--seed repeats the samples in another folder under another run_id; another seed does not."""
    path = str(tasks(6))
    runs = [tmp_path / name for name in "abc"]
    for run, seed in zip(runs, (5, 5, 6), strict=True):
        collect(tasks=path, output=run, num_rollouts=2, seed=seed, parts=parts())
    ids = [[t["generation_token_ids"] for r in rows_of(run) for t in r["turns"]] for run in runs]
    assert ids[0] == ids[1] != ids[2]


def test_no_two_calls_share_a_seed(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """Each turn of each rollout of each task is sampled with a seed of its own."""
    sampler = FakeSampler(add_or_answer)
    summary = collect(
        tasks=str(tasks(4)), output=tmp_path / "run", num_rollouts=3, seed=3, parts=parts(sampler, env=adder)
    )
    seeds = [request.seed for request in sampler.requests]
    assert len(seeds) == sum(row["n_turns"] for row in rows_of(tmp_path / "run")) > summary.rollouts
    assert len(set(seeds)) == len(seeds)


def test_never_more_in_flight_than_asked(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """-c bounds the rollouts that exist at a time, grouped or not, however many are pending."""
    for groups in (False, True):
        sampler = FakeSampler(add_or_answer, groups=groups)
        made = parts(sampler, env=adder)
        collect(tasks=str(tasks(40)), output=tmp_path / f"run{groups}", num_rollouts=3, concurrency=7, parts=made)
        assert 2 <= sampler.peak <= 7


def test_jsonl_holds_the_same_rows(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """--format jsonl writes the rows that parquet would have."""
    settings: dict[str, Any] = {"tasks": str(tasks(3)), "num_rollouts": 2, "seed": 1, "run_id": "x"}
    for kind in ("parquet", "jsonl"):
        made = parts(FakeSampler(add_or_answer), env=adder)
        collect(output=tmp_path / kind, format=kind, parts=made, **settings)
    assert rows_of(tmp_path / "parquet") == rows_of(tmp_path / "jsonl")
    assert list((tmp_path / "jsonl" / "rollouts").glob("part-*.jsonl"))


def test_greedy_rollouts_are_requested_one_by_one(tasks: Tasks, tmp_path: Path) -> None:
    """vLLM refuses a greedy request for several generations, which would be equal."""
    sampler = FakeSampler(groups=True)
    collect(tasks=str(tasks(2)), output=tmp_path / "run", num_rollouts=2, temperature=0.0, parts=parts(sampler))
    assert [request.n for request in sampler.requests] == [1, 1, 1, 1]


def test_run_json_says_what_was_run(tasks: Tasks, tmp_path: Path) -> None:
    """run.json has the drawn seed, every sampling setting, the task file's hash, the engine's facts and the counts."""
    collect(tasks=str(tasks(2)), output=tmp_path / "run", temperature=0.7, reward=["exact_match"], parts=parts())
    facts = read_run_json(tmp_path / "run")
    assert isinstance(facts["identity"]["seed"], int)
    assert facts["identity"]["temperature"] == 0.7
    assert facts["identity"]["policy_hash"] == "fake-0"
    assert facts["tasks"]["files"][0]["xxh3"]
    assert facts["engine"]["engine"] == "fake"
    assert facts["counts"]["rollouts"] == 2


def test_alternatives_are_kept(tasks: Tasks, tmp_path: Path) -> None:
    """Alternatives that the engine reports are stored by token, with ids and log-probs."""

    class WithAlternatives(FakeSampler):
        def _one(self, request: Any, index: int) -> Any:
            import dataclasses

            made = super()._one(request, index)
            return dataclasses.replace(made, top_log_probs=[[(7, -0.5), (8, -1.5)] for _ in made.token_ids])

    collect(tasks=str(tasks(1)), output=tmp_path / "run", top_logprobs=2, parts=parts(WithAlternatives()))
    (row,) = rows_of(tmp_path / "run")
    assert row["turns"][0]["top_log_probs"][0] == [{"id": 7, "log_prob": -0.5}, {"id": 8, "log_prob": -1.5}]
    assert len(row["turns"][0]["top_log_probs"]) == len(row["turns"][0]["generation_token_ids"])


def test_an_engine_that_reads_another_prompt_is_recorded_as_it_is(tasks: Tasks, tmp_path: Path, adder: str) -> None:
    """The prompt on disk is what the engine says it read: an inserted token is in the delta, and the rest continues it."""

    class Inserting(FakeSampler):
        def _one(self, request: Any, index: int) -> Any:
            import dataclasses

            made = super()._one(request, index)
            return dataclasses.replace(made, prompt_token_ids=[399, *request.prompt_token_ids][:500])

    collect(tasks=str(tasks(1)), output=tmp_path / "run", parts=parts(Inserting(add_or_answer), env=adder))
    (row,) = rows_of(tmp_path / "run")
    prompts = expand_prompts(row["turns"])
    assert [int(p[0]) for p in prompts] == [399, 399, 399]
    assert prompts[1][:2].tolist() == [399, 399]
    assert row["n_breaks"] == 2
    assert np.all(prompts[0][-2:] == [END, ROLE["assistant"]])
