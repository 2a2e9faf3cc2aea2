"""The sample tasks' agent on the OpenAI Agents SDK, which owns the loop."""

from __future__ import annotations

from typing import Any

from sample_data.calculator_agent import TOOL, answer


async def solve(task: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    """One run of the SDK's agent, by the ``model`` of the SDK that the task names; the policy's mistakes end it."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    function = TOOL["function"]

    async def call(_: Any, arguments: str) -> str:
        return answer(function["name"], arguments)

    tool = agents.FunctionTool(
        function["name"], function["description"], function["parameters"], call, strict_json_schema=False
    )
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        speaks = getattr(agents, task.get("model", "OpenAIChatCompletionsModel"))
        agent = agents.Agent(name="calculator", tools=[tool], model=speaks(model=model, openai_client=client))
        try:
            if task.get("stream"):
                async for _ in agents.Runner.run_streamed(agent, task["prompt"]).stream_events():
                    pass
            else:
                await agents.Runner.run(agent, task["prompt"])
        except agents.exceptions.ModelBehaviorError:
            return


async def solve_streamed(task: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    """The same, reading streams."""
    await solve({**task, "stream": True}, base_url, api_key, model)
