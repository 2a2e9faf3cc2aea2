"""collect through a server that takes messages only: its prompts are the truth, and a break is kept or refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.chat.template import TransformersChat
from gymdata.collect.run import Parts, collect
from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.servers.chat_server import ChatServerSampler, OnPolicyPrompts
from gymdata.environments import load_environment
from gymdata.errors import StoreError, UsageError
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted
from gymdata.store import read_run_json, read_table
from gymdata.validate.run import validate
from tests.collect.fake_parts import FakeSampler, add_or_answer, parts
from tests.collect.saved_rows import failures_of, rows_of
from tests.faulty_server import Settings

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
ENV = f"{ROOT / 'sample_data' / 'calculator.py'}:Calculator"
TASKS = str(ROOT / "sample_data" / "tasks" / "train.jsonl")


class Rereading(FakeSampler):
    """Reads another first token from the second turn on, as a server that writes the history anew may."""

    async def sample(self, request: SampleRequest) -> list[Generation]:
        out = await super().sample(request)
        assert request.conversation is not None
        if not request.conversation.held:
            return out
        return [dataclasses.replace(g, prompt_token_ids=[299, *g.prompt_token_ids[1:]]) for g in out]


def test_a_break_is_kept_as_the_engine_reports_it(tmp_path: Path, tasks: Callable[..., Path], adder: str) -> None:
    """The row has the prompt that was read, and says where it leaves what came before."""
    made = parts(Rereading(add_or_answer), env=adder)
    summary = collect(parts=made, tasks=str(tasks(1)), output=tmp_path / "run", seed=1)
    (row,) = rows_of(tmp_path / "run")
    assert (summary.rollouts, summary.breaks) == (1, 1)
    assert row["n_breaks"] == 1
    assert row["turns"][1]["prefix_length"] == 0
    assert row["turns"][1]["prompt_delta_ids"][0] == 299
    assert [v.code for v in validate(tmp_path / "run").violations if v.code.startswith("T2")] == ["T200"]


def test_a_break_can_be_refused(tmp_path: Path, tasks: Callable[..., Path], adder: str) -> None:
    """With --on-break fail the attempt fails with everything sampled in it, and the rollout stays pending."""
    made = parts(Rereading(add_or_answer), env=adder)
    summary = collect(parts=made, tasks=str(tasks(1)), output=tmp_path / "run", seed=1, on_break="fail")
    assert (summary.rollouts, summary.pending, summary.exit_code) == (0, 1, 1)
    (failure,) = failures_of(tmp_path / "run")
    assert (failure["kind"], failure["place"], len(failure["turns"])) == ("engine", "turn 1", 2)
    assert "leaves what came before at token 0" in failure["message"]


@pytest.fixture
def served(tasks: Callable[..., Path], tmp_path: Path, policy: str) -> dict[str, Any]:
    return {"tasks": str(tasks(2)), "output": tmp_path / "run", "model": "fake", "tokenizer": policy, "num_rollouts": 2,
            "max_tokens": 8, "seed": 2, "retries": 1}  # fmt: skip


@pytest.mark.parametrize("way", ["ids", "prefix", "messages"])
def test_run_json_says_how_prompts_are_made(server: Any, served: dict[str, Any], way: str) -> None:
    """The way that the server proved is on record; rows have the ids that it reports."""
    at = Settings(way=way)
    summary = collect(chat_endpoint=server(at), **served)
    assert (summary.rollouts, summary.exit_code) == (4, 0)
    assert read_run_json(served["output"])["engine"]["continuity"] == way
    assert all(r["turns"][0]["prompt_delta_ids"] for r in rows_of(served["output"]))
    assert [r["n"] for r in at.requests][-2:] == [2, 2]


def test_ids_and_messages_are_never_one_run(server: Any, served: dict[str, Any]) -> None:
    """A run collected in ids does not go on in messages, and both addresses at once are refused."""
    url = server(Settings())
    collect(endpoint=url, **{**served, "num_rollouts": 1})
    with pytest.raises(StoreError, match="protocol"):
        collect(chat_endpoint=url, **served)
    with pytest.raises(UsageError, match="both given"):
        collect(endpoint=url, chat_endpoint=url, **{**served, "overwrite": True})


def test_a_run_of_the_old_key_is_resumed(server: Any, served: dict[str, Any]) -> None:
    """A run whose identity names the protocol as 0.1.0-dev did is resumed; a new run names it "chat"."""
    url = server(Settings())
    collect(chat_endpoint=url, **{**served, "num_rollouts": 1})
    file = served["output"] / "run.json"
    facts = json.loads(file.read_text())
    assert facts["identity"].pop("protocol") == "chat"
    file.write_text(json.dumps(facts | {"identity": facts["identity"] | {"speaks": "messages"}}))
    assert (summary := collect(chat_endpoint=url, **served)).exit_code == 0
    assert summary.rollouts == 4


def test_a_vllm_server_reads_the_ids_that_go_with_the_messages(vllm_server: str, policy: str, tmp_path: Path) -> None:
    """Multi-turn tool rollouts over the chat route have no break, and are those of the ids route, token for token."""
    settings: dict[str, Any] = {"tasks": TASKS, "limit": 12, "num_rollouts": 4, "max_tokens": 48, "seed": 1, "env": ENV,
                                "model": "sample-policy", "tokenizer": policy, "reward": ["numeric"]}  # fmt: skip
    summary = collect(chat_endpoint=vllm_server, output=tmp_path / "chat", **settings)
    collect(endpoint=vllm_server, output=tmp_path / "ids", **settings)
    assert (summary.rollouts, summary.breaks, summary.exit_code) == (48, 0, 0)
    assert read_run_json(tmp_path / "chat")["engine"]["continuity"] == "ids"
    assert validate(tmp_path / "chat").errors == 0
    chat, ids = (
        sorted(rows_of(tmp_path / n), key=lambda r: (r["task_id"], r["rollout_index"])) for n in ("chat", "ids")
    )
    assert any(r["n_turns"] > 1 for r in chat)
    for a, b in zip(chat, ids, strict=True):
        assert (a["messages"], a["reward"]) == (b["messages"], b["reward"])
        for x, y in zip(a["turns"], b["turns"], strict=True):
            assert [x[k] for k in ("prompt_delta_ids", "generation_token_ids", "prefix_length")] == [
                y[k] for k in ("prompt_delta_ids", "generation_token_ids", "prefix_length")
            ]


@pytest.mark.full
def test_a_vllm_server_with_messages_only_breaks_honestly(vllm_server: str, policy: str, tmp_path: Path) -> None:
    """Told messages only, the server tokenises again: rollouts that it rewrote are breaks whose cause is re-tokenising or
    re-templating, every other one is as sampled, and those with a break can be refused."""
    chat = TransformersChat.load(policy)

    def made() -> Parts:
        sampling = {"temperature": 1.0, "stop_token_ids": chat.stop_token_ids}
        sampler = ChatServerSampler(vllm_server, "sample-policy", ways=("messages",), sampling=sampling)
        rewards = [Weighted(function, weight) for function, weight in load_rewards(["numeric"])]
        model = {"policy": "sample-policy", "policy_hash": "served:sample-policy"}
        return Parts(sampler, chat, load_environment(ENV), rewards, model, [], OnPolicyPrompts(chat))

    settings: dict[str, Any] = {"tasks": TASKS, "limit": 40, "num_rollouts": 8, "max_tokens": 48, "seed": 1}
    summary = collect(parts=made(), output=tmp_path / "kept", **settings)
    rows = read_table(tmp_path / "kept").to_pylist()
    broken = {r["rollout_id"] for r in rows if r["n_breaks"]}
    assert (len(rows), summary.breaks, summary.exit_code) == (320, len(broken), 0)
    assert 0 < len(broken) < 100
    report = validate(tmp_path / "kept", tokenizer=policy)
    found = [v for v in report.violations if v.severity == "error"]
    assert {v.rollout_id for v in found} == broken
    assert {v.code for v in found} <= {"T201", "T202"}
    collect(parts=made(), output=tmp_path / "refused", on_break="fail", max_attempts=1, **settings)
    refused = read_table(tmp_path / "refused").to_pylist()
    key = lambda r: (r["task_id"], r["rollout_index"])  # noqa: E731  # used twice below
    assert {key(r) for r in refused} == {key(r) for r in rows if not r["n_breaks"]}
    assert {"break: the prompt" in json.dumps(f) for f in failures_of(tmp_path / "refused")} == {True}
