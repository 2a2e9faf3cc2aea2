"""A served workflow: an agent behind a URL, which calls the model at the address that each request names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from tests.environments.env_server import FORMS, Server

AGENT = f"{Path(__file__).parents[2]}/sample_data/served_workflow.py:run"


class Workflow(Server):
    """Asks the model at the address that each request names (or at ``fixed``) as often as the task says, and answers with
    what ``verdict`` adds to the task that it was sent."""

    fixed: str | None = None
    verdict: dict[str, Any] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        task = await request.json()
        if request.path == "/run":
            async with ClientSession(headers={"Authorization": f"Bearer {task['api_key']}"}) as client:
                for _ in range(task.get("calls", 1)):
                    body = {"model": task["model"], "messages": [{"role": "user", "content": task["prompt"]}]}
                    url = f"{self.fixed or task['base_url']}/chat/completions"
                    headers = {"Authorization": "Bearer EMPTY"} if self.fixed else None
                    async with client.post(url, json=body, headers=headers) as response:
                        if response.status != 200:
                            return web.json_response({"detail": await response.text()}, status=500)
                        task["said"] = (await response.json())["choices"][0]["message"]["content"]
        return await super().handle(request)

    def good(self, path: str, cookie: str | None, body: Any) -> web.StreamResponse:
        return web.json_response(
            {**body, **FORMS.get(body.get("form"), self.verdict or {"reward": body["rollout_index"] / 4, "steps": 7})}
        )
