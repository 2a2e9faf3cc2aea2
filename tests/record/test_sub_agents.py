"""Two sub-agents at once inside one rollout, on real clients: told apart, labelled, and every id is the engine's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.validate.run import validate
from gymdata.engines.port import Generation, SampleRequest
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_table
from tests.collect.fake_parts import ROLE, FakeSampler
from tests.record.recorded_agent import collected

TASKS = [{"task_id": "a", "prompt": "write it up"}, {"task_id": "b", "prompt": "write it up again"}]
ROLES = {"researcher": ("look_up", "found 1242"), "writer": ("write_file", "written")}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def says(prompt: Any, _: object) -> str:
    """Each agent calls its tool and then reports; the main one delegates first."""
    text, has_result = bytes(i for i in prompt if i < 256).decode(), ROLE["tool"] in prompt
    for role, (name, report) in ROLES.items():
        if f"You are a {role}" in text:
            return report if has_result else f"CALL {name} {{}}"
    return "Both are done." if has_result else "CALL delegate {}"


class Meeting(FakeSampler):
    """Samples the first turns of both sub-agents of a rollout only when both were sent."""

    def __init__(self) -> None:
        super().__init__(says, concurrency=1)
        self.met: dict[str, asyncio.Barrier] = {}
        self.sampled: list[Generation] = []

    async def sample(self, request: SampleRequest) -> list[Generation]:
        text = bytes(i for i in request.prompt_token_ids if i < 256).decode()
        if "You are a" in text and ROLE["tool"] not in request.prompt_token_ids:
            async with asyncio.timeout(60):
                await self.met.setdefault(request.group, asyncio.Barrier(2)).wait()
        made = await super().sample(request)
        self.sampled += made
        return made


async def conversation(client: Any, messages: list[Any], name: str, results: Any, *, stream: bool) -> str:
    """Talk until the model calls no tool; ``results`` gives the result of a call."""
    while True:
        request = {"model": "m", "messages": messages, "tools": [tool(name)]}
        if stream:
            async with client.chat.completions.stream(**request) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**request)).choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": await results()})


async def team(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """A main agent whose one tool runs two others at the same time, one of which streams."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def sub_agent(role: str) -> str:
            messages = [
                {"role": "system", "content": f"You are a {role}"},
                {"role": "user", "content": f"{task['prompt']}: {role}"},
            ]

            async def done() -> str:
                return "ok"

            return await conversation(client, messages, ROLES[role][0], done, stream=role == "writer")

        async def delegate() -> str:
            return "; ".join(await asyncio.gather(*map(sub_agent, ROLES)))

        await conversation(client, [{"role": "user", "content": task["prompt"]}], "delegate", delegate, stream=False)


def test_two_sub_agents_at_once_are_conversations_of_one_rollout(tmp_path: Path) -> None:
    """``main`` is the one that began; each of the others has a label of its own; nothing breaks, and all ids are proven."""
    pytest.importorskip("openai")
    sampler, run = Meeting(), tmp_path / "run"
    summary = collected(TASKS, run, sampler, agent=f"{__file__}:team", concurrency=1)
    assert (summary.rollouts, summary.failures) == (2, 0)
    checked = validate(run)
    assert checked.ok, checked.violations
    seen = {(tuple(g.prompt_token_ids), tuple(g.token_ids)) for g in sampler.sampled}
    assert len(seen) == 12
    for row in read_table(run, ROLLOUTS).to_pylist():
        agents = [turn["agent"] for turn in row["turns"]]
        assert (row["n_turns"], row["n_breaks"], row["status"]) == (6, 0, "completed")
        assert agents[0] == agents[-1] == "main"
        sides = sorted(set(agents) - {"main"})
        assert len(sides) == 2
        assert all(side.startswith("side-") and agents.count(side) == 2 for side in sides)
        # Both began before either went on.
        assert set(agents[1:3]) == set(sides)
        for prompt, turn in zip(expand_prompts(row["turns"]), row["turns"], strict=True):
            seen.remove((tuple(prompt.tolist()), tuple(turn["generation_token_ids"])))
        assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert row["messages"][2]["content"] == "found 1242; written"
        extra = json.loads(row["extra"])
        assert [c["agent"] for c in extra["conversations"]] == ["main", *agents[1:3]]
        assert {other["agent"] for other in extra["other_messages"]} == set(sides)
    assert seen == set()
