"""Agents over a scripted engine: of a script of (text, tool, arguments), a conversation with tools calls the first tool
whose text its prompt has, and then says that it is done."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.commands.collect.report import CollectSummary
from gymdata.commands.collect.run import collect
from gymdata.commands.collect.settings import CollectConfig
from gymdata.commands.collect.setup import Parts
from gymdata.commands.record.agent import load_agent
from gymdata.engines.port import Generation, SampleRequest
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted
from tests.collect.fake_parts import ROLE, FakeSampler
from tests.record.scripted_engine import TOOL_SET, Letters

#: By which mini-swe-agent ends.
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
Script = Sequence[tuple[str, str, Mapping[str, Any]]]


class KeptSampler(FakeSampler):
    """Follows the script, and keeps what it read and sampled. A conversation with the text ``delegates`` that has called a
    tool goes on once another one of its session was answered: some agents end with their first conversation, whatever the
    others do."""

    def __init__(self, script: Script, delegates: str | None = None) -> None:
        super().__init__(lambda prompt, _: answer(script, prompt))
        self.sampled: list[dict[str, list[int]]] = []
        self._delegates = delegates
        self._delegated = defaultdict[str, asyncio.Event](asyncio.Event)

    async def sample(self, request: SampleRequest) -> list[Generation]:
        prompt = request.prompt_token_ids
        starts = self._delegates is not None and self._delegates.encode() in bytes(i for i in prompt if i < 256)
        if starts and ROLE["tool"] in prompt:
            await self._delegated[request.group].wait()
        generations = await super().sample(request)
        if not starts and TOOL_SET in prompt:
            self._delegated[request.group].set()
        self.sampled += [
            {"prompt": list(request.prompt_token_ids), "generation": list(g.token_ids)} for g in generations
        ]
        return generations


def answer(script: Script, prompt: Sequence[int]) -> str:
    text = bytes(i for i in prompt if i < 256).decode()
    if TOOL_SET not in prompt:
        return "A title"
    if ROLE["tool"] not in prompt:
        return next(f"CALL {tool} {json.dumps(arguments)}" for part, tool, arguments in script if part in text)
    if SUBMIT in text:
        return f'CALL bash {{"command": "echo {SUBMIT}"}}'
    return "THINK It worked.|It is done."


#: An agent that sends its prompt, writes the answer to a file, and ends with the code that the answer's length says.
ASK = """
import json, os, sys, urllib.request
prompt, code = sys.argv[1], int(sys.argv[2])
body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
text = answer["choices"][0]["message"]["content"]
open("answer.txt", "w").write(text)
print("wrote", text)
print("of", os.environ["GYMDATA_TASK"], file=sys.stderr)
sys.exit(code)
"""


def asking(code: int = 0) -> str:
    """The command of an agent that asks once."""
    return f"{sys.executable} -c '{ASK}' {{prompt}} {code}"


def collected(tasks: Any, run: Path, sampler: FakeSampler, **settings: Any) -> CollectSummary:
    """Collect with an agent and a scripted engine."""
    config = CollectConfig.of({"tasks": "-", "output": run, "seed": 3, **settings}, "test")
    rewards = [Weighted(function, weight) for function, weight in load_rewards(config.reward)]
    agent = load_agent(config.agent, config.agent_files, config.result_json_path)
    parts = Parts(sampler, Letters(), None, rewards, {"policy": "fake", "policy_hash": "fake-0"}, agent=agent)
    summary = collect(tasks, config=config, parts=parts)
    assert isinstance(summary, CollectSummary)
    return summary
