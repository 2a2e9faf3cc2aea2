"""Rollouts as a program collects them that sends its conversation as chat messages: the server writes every prompt out
again, so a later prompt need not begin with what was sampled. Each row is in NeMo Gym's shape, with the ids and log-probs
that the server reports:

    gymdata serve -m sample_data/policy
    python -m gymdata.sample_data.chat_rollouts http://127.0.0.1:8000 > rows.jsonl
    gymdata import rows.jsonl -o before
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from gymdata.sample_data.calculator_agent import TOOL, answer

TASKS, ROLLOUTS, MAX_TOKENS = 25, 6, 48
#: The tool as the environment declares it; a chat request has no place for what it returns.
CALCULATOR = {**TOOL["function"], "return": {"type": "string", "description": "The value, as a decimal integer."}}


async def rollout(client: Any, model: str, task: dict[str, Any], index: int) -> dict[str, Any]:
    """One rollout: the model is called until it answers without the calculator."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task["prompt"]}]
    output: list[dict[str, Any]] = []
    while True:
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], temperature=1.0, max_tokens=MAX_TOKENS, logprobs=True,
            seed=10_000 * int(task["task_id"].rpartition("-")[2]) + 100 * index + len(messages),
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        choice = completion.choices[0]
        called = choice.message.tool_calls or []
        call = {
            "prompt_token_ids": completion.prompt_token_ids,
            "generation_token_ids": choice.token_ids,
            "generation_log_probs": [token.logprob for token in choice.logprobs.content],
        }
        messages.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not called:
            text = choice.message.content or ""
            said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
            request = {"input": messages[:1], "tools": [{"type": "function", **CALCULATOR}], "temperature": 1.0}
            response = {"object": "response", "model": model, "output": [*output, {**said, **call}]}
            reward = float(text.strip() == task["answer"])
            return {"responses_create_params": request, "response": response, "reward": reward, **task}
        for number, one in enumerate(called):
            name, arguments = one.function.name, one.function.arguments
            item = {"type": "function_call", "call_id": one.id, "name": name, "arguments": arguments}
            output.append({**item, **(call if number == len(called) - 1 else {})})
        for one in called:
            result = answer(one.function.name, one.function.arguments)
            output.append({"type": "function_call_output", "call_id": one.id, "output": result})
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})


async def main(url: str) -> None:
    """Print the rows of the first held-out tasks."""
    from openai import AsyncOpenAI

    lines = Path(__file__).with_name("tasks").joinpath("heldout.jsonl").read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines[:TASKS]]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        jobs = (rollout(client, model, task, index) for task in tasks for index in range(ROLLOUTS))
        for row in await asyncio.gather(*jobs):
            print(json.dumps(row))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
