"""An agent with a loop of its own for the sample tasks, on the package ``openai``:
``gymdata collect sample_data/tasks/train.jsonl --agent sample_data/calculator_agent.py:solve``.

It sends what ``collect --env sample_data/calculator.py:Calculator`` renders, so with equal seeds it gets the same tokens.
"""

from __future__ import annotations

import json
from typing import Any

from gymdata.sample_data.calculator import Calculator

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Whole numbers joined by +, - or *, for example 12*34.",
                }
            },
            "required": ["expression"],
        },
    },
}


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    """Call the calculator until the model answers without it."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            completion = await client.chat.completions.create(model=model, messages=messages, tools=[TOOL])  # type: ignore[list-item]  # as the API has it
            choice = completion.choices[0]
            messages.append(choice.message.model_dump(exclude_none=True))
            if choice.finish_reason != "tool_calls":
                return
            for call in choice.message.tool_calls or []:
                result = answer(call.function.name, call.function.arguments)  # type: ignore[union-attr]  # they are functions
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def answer(name: str, arguments: str) -> str:
    """What the tool says to a call, its errors included."""
    try:
        if name != "calculate":
            raise ValueError(f"there is no tool {name!r}; the tools are: calculate")
        return Calculator().calculate(**json.loads(arguments))
    except TypeError:
        return json.dumps({"error": "calculate: takes one argument, expression"})
    except ValueError as error:
        return json.dumps({"error": str(error)})
