"""An agent on the ``openai`` client that solves sums with a tool: ``python -m tests.record.calculator_agent N``.

It has its own loop, as agents have, and reports each rollout's reward.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from openai import OpenAI

from sample_data.calculator import Calculator

TASKS = Path(__file__).parents[2] / "sample_data" / "tasks" / "train.jsonl"


def tools() -> list[dict[str, Any]]:
    from gymdata.environments import load_environment
    from gymdata.rollouts.messages import Task
    from gymdata.workers.signals import run_async

    environment = load_environment(f"{TASKS.parents[1]}/calculator.py:Calculator", tool_timeout_s=5.0)
    episode = run_async(environment.start(Task("t", [], None, {}, ""), 0))
    return list(episode.tools or [])


def solve(client: OpenAI, task: dict[str, Any]) -> str:
    """The model's last words on a task; at most four calls of it."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(4):
        completion = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=48)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            try:
                result = Calculator().calculate(**json.loads(call.function.arguments))
            except (ValueError, TypeError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    TOOLS = tools()
    base = os.environ["GYMDATA_RECORD_URL"]
    for line in TASKS.read_text().splitlines()[: int(sys.argv[1])]:
        task = json.loads(line)
        key = task["task_id"]
        answer = solve(OpenAI(base_url=f"{base}/s/{key}/v1"), task)
        body = json.dumps({"reward": float(task["answer"] in answer), "task": task}).encode()
        headers = {"content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{base}/rollouts/{key}/finish", body, headers)).read()
