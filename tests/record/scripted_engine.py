"""A recorder over an engine that says what a test scripts, in letters that are their own ids."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from starlette.testclient import TestClient

from gymdata.commands.collect.setup import Parts
from gymdata.commands.record.recorder import Recorder
from gymdata.commands.record.server import Service, create_app
from gymdata.commands.record.settings import RecordConfig
from gymdata.commands.validate.run import validate
from gymdata.engines.port import Generation, SampleRequest
from gymdata.errors import OutsideError
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import Run, read_table
from tests.collect.fake_parts import END, FakeSampler, LetterChat

#: Stands for the tools of a conversation.
TOOL_SET = 305


class Letters(LetterChat):
    """Letters that are also encoded alone; what follows ``THINK …|`` is content, before it is reasoning."""

    stop_token_ids = (END,)

    def render(self, messages: Sequence[Any], tools: Any) -> list[int]:
        return [*([TOOL_SET] if tools else []), *super().render(messages, tools)]

    def bridge(self, messages: Sequence[Any], new: Sequence[Any], tools: Any) -> list[int]:
        return super().render(new, tools)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def parse(self, token_ids: Sequence[int], tools: Any, *, calls: bool = True) -> dict[str, Any]:
        thought, bar, rest = self.decode(token_ids).partition("|")
        if not (bar and thought.startswith("THINK ")):
            return super().parse(token_ids, tools, calls=calls)
        return super().parse(rest.encode(), tools, calls=calls) | {"reasoning": thought.removeprefix("THINK ")}


class Scripted(FakeSampler):
    """Says the next text of the script, letter by letter; an error in it is raised. ``pause`` is awaited after ``|``."""

    def __init__(self, *script: str | OutsideError, max_model_len: int | None = None) -> None:
        super().__init__(max_model_len=max_model_len)
        self.script = list(script)
        self.sampled: list[Generation] = []
        self.pause: Callable[[], Awaitable[Any]] | None = None
        #: Alternatives per token of requests that ask for none, as an engine gives those of the run's own settings.
        self.alternatives = 0
        #: Of the generations that end by themselves.
        self.finish: tuple[Any, str | None] = ("stop", None)

    async def sample(self, request: SampleRequest) -> list[Generation]:
        self.requests.append(request)
        made = []
        for _ in range(request.n):
            said = self.script.pop(0)
            if isinstance(said, OutsideError):
                raise said
            ids = [*said.encode(), END][: request.max_tokens]
            for token in ids:
                if token == ord("|") and self.pause is not None:
                    await self.pause()
            reason, stop_reason = self.finish if ids[-1] == END else ("length", None)
            k = (request.sampling or {}).get("top_logprobs", self.alternatives)
            top = [[(i + rank, -0.25 - rank) for rank in range(k)] for i in ids] if k else None
            prompt = list(request.prompt_token_ids)
            made.append(Generation(prompt, ids, [-0.25] * len(ids), reason, stop_reason, top_log_probs=top))
        self.sampled += made
        return made


@dataclass
class Recording:
    """A client of the recorder, and what is behind it."""

    client: TestClient
    recorder: Recorder
    sampler: Scripted
    folder: Path
    service: Service
    headers: dict[str, str] = field(default_factory=dict)
    #: What the recorder says to its user.
    notes: list[str] = field(default_factory=list)

    def chat(self, *messages: dict[str, Any] | str, key: str = "k", **more: Any) -> Any:
        """POST /v1/chat/completions in session ``key``; texts are a user's."""
        given = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        path = f"/s/{key}/v1/chat/completions" if key else "/v1/chat/completions"
        return self.client.post(path, json={"model": "m", "messages": given, **more}, headers=self.headers)

    def said(self, *messages: dict[str, Any] | str, **more: Any) -> dict[str, Any]:
        """The message of the first choice."""
        response = self.chat(*messages, **more)
        assert response.status_code == 200, response.text
        return dict(response.json()["choices"][0]["message"])

    def end(self, key: str = "k", **body: Any) -> Any:
        """The answer to POST /rollouts/KEY/finish."""
        return self.client.post(f"/rollouts/{key}/finish", json=body)

    def finish(self, key: str = "k", **body: Any) -> dict[str, Any]:
        response = self.end(key, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    @contextlib.asynccontextmanager
    async def http(self, service: Service | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the recorder in the loop of the test."""
        transport = httpx.ASGITransport(self.app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            yield client

    def app(self, service: Service | None = None) -> Any:
        """The application of the recorder, which runs already."""

        async def nothing() -> None: ...

        return create_app(service or Service(self.recorder.config, self.recorder), nothing, nothing)

    def rows(self) -> list[dict[str, Any]]:
        """What the run holds once it is sealed, which is sound."""
        assert validate(self.folder).ok
        return read_table(self.folder, ROLLOUTS).to_pylist()

    def row(self) -> dict[str, Any]:
        """Its only row."""
        (row,) = self.rows()
        return row

    def prompts(self) -> list[str]:
        """The prompts that the engine read, with role marks as /."""
        return ["".join(chr(i) if i < 256 else "/" for i in r.prompt_token_ids) for r in self.sampler.requests]


@contextlib.contextmanager
def recording(folder: Path, *script: str | OutsideError, rewards: Sequence[str] = (), context: int | None = None,
              **settings: Any) -> Iterator[Recording]:  # fmt: skip
    """A recorder on ``folder``, which is sealed at the end."""
    config = RecordConfig.of({"output": folder, "allow_host": ["testserver"], **settings}, "test")
    sampler = Scripted(*script, max_model_len=context)
    weighted = [Weighted(function, weight) for function, weight in load_rewards(rewards)]
    parts = Parts(sampler, Letters(), None, weighted, {"policy": "fake", "policy_hash": "fake-0"})
    identity = {"temperature": 1.0}
    with Run.open(folder, identity=identity, extent={}, operation={}, facts={"stage": "record"}) as run:
        notes = list[str]()
        recorder = Recorder(config, parts, run, 7, notes.append)

        async def stop() -> None:
            recorder.log.close()

        service = Service(config, recorder)
        with TestClient(create_app(service, recorder.start, stop)) as client:
            yield Recording(client, recorder, sampler, folder, service, notes=notes)
