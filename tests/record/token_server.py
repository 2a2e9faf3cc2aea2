"""An engine behind a recorder: a server that speaks vLLM's route of ids and samples what a test scripts.

Every generation that it answers is in ``draws``, with the prompt that it read and the exact numbers that it sent; ids are
often not those that the tokenizer would choose for their text, so that text that is encoded again is found out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gymdata.chat.template import TransformersChat
from gymdata.rollouts.messages import JsonObject

MODEL, CONTEXT = "scripted", 2048
#: Seconds that requests which a test sends together wait for each other.
_TOGETHER_S = 3.0


@dataclass(slots=True)
class Draw:
    """One generation: the prompt that was read, and what was sampled."""

    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    finish_reason: str

    @property
    def conversation(self) -> list[int]:
        """Prompt and generation."""
        return [*self.prompt, *self.ids]


@dataclass
class TokenServer:
    """``tokens``: the recorder's tokenizer and chat template; ``script``: what the next generations are; without one it
    samples a few letters. ``failing``: the status of every answer, for now."""

    tokens: TransformersChat
    script: deque[list[int]] = field(default_factory=deque)
    failing: int | None = None
    draws: list[Draw] = field(default_factory=list)
    _together: asyncio.Barrier | None = None

    def begin(self) -> None:
        """Forget what the last test left."""
        self.script.clear()
        self.draws, self.failing, self._together = [], None, None

    def hold(self, n: int) -> None:
        """Answer requests only when ``n`` of them have come; 0: at once."""
        self._together = asyncio.Barrier(n) if n else None

    def respelled(self, ids: Sequence[int]) -> list[int]:
        """Other ids of the same text, where the tokenizer has some."""
        out: list[int] = []
        for token in ids:
            text = self.tokens.decode([token])
            pieces = [i for letter in text for i in self.tokens.encode(letter)]
            plain = text.isascii() and text.strip().isalnum() and len(text) > 1
            out += pieces if plain and self.tokens.decode(pieces) == text else [token]
        return out if self.tokens.decode(out) == self.tokens.decode(ids) else list(ids)

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> Any:
        """The base URL of the engine, while it is served."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    # --- routes -----------------------------------------------------------------------------------------------------

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "root": MODEL, "parent": None, "max_model_len": CONTEXT}
        return _json({"object": "list", "data": [card]})

    async def _health(self, _: web.Request) -> web.Response:
        return _json({})

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": "0.32.0"})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body.get("messages")
        ids = (
            self.tokens.encode(body["prompt"]) if messages is None else self.tokens.render(messages, body.get("tools"))
        )
        return _json({"tokens": ids, "count": len(ids), "max_model_len": CONTEXT})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return _json({"prompt": self.tokens.decode((await request.json())["tokens"])})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return _error(400, "this engine takes token ids only")
        drawn = await self._sample(prompt, body)
        if isinstance(drawn, int):
            return _error(drawn, "the engine failed, as the test wants it")
        choices = []
        for index, (draw, stop) in enumerate(drawn):
            names = [f"token_id:{i}" for i in draw.ids]
            evidence = {"tokens": names, "token_logprobs": draw.log_probs, "text_offset": [0] * len(names)}
            top = [{name: value} for name, value in zip(names, draw.log_probs, strict=True)]
            choices.append(
                {
                    "index": index,
                    "text": self.tokens.decode(draw.ids),
                    "token_ids": draw.ids,
                    "prompt_token_ids": draw.prompt,
                    "logprobs": {**evidence, "top_logprobs": top if body.get("logprobs") else None},
                    "finish_reason": draw.finish_reason,
                    "stop_reason": stop,
                }
            )
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": MODEL, "choices": choices}
        return _json(answer)

    # --- sampling ---------------------------------------------------------------------------------------------------

    async def _sample(self, prompt: Any, parameters: JsonObject) -> list[tuple[Draw, str | None]] | int:
        """The generations of a request, each with the text that stopped it; or the status of its failure."""
        prompt = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else prompt
        if not isinstance(prompt, list) or not all(type(i) is int for i in prompt) or not prompt:
            return 400
        if self._together is not None:
            with contextlib.suppress(TimeoutError, asyncio.BrokenBarrierError):
                async with asyncio.timeout(_TOGETHER_S):
                    await self._together.wait()
        most = min(int(parameters.get("max_tokens") or 16), CONTEXT - len(prompt))
        if most < 1 or self.failing is not None:
            return self.failing or 400
        draws = []
        for _ in range(int(parameters.get("n") or 1)):
            scripted = self.script.popleft() if self.script else None
            letters = self.tokens.encode("abcdefgh")
            ids = (scripted or [letters[k % len(letters)] for k in range(most)])[:most]
            ids, stop = self._stopped(ids, parameters.get("stop"))
            ended = stop is not None or ids[-1] in self.tokens.stop_token_ids
            # A recorder asks for the most probable token first, to see whether log-probabilities are processed.
            sure = scripted is None and parameters.get("top_k") == 1
            numbers = [0.0 if sure else _log_prob(prompt, ids[: k + 1]) for k in range(len(ids))]
            draw = Draw(prompt, ids, numbers, "stop" if ended else "length")
            self.draws.append(draw)
            draws.append((draw, stop))
        return draws

    def _stopped(self, ids: list[int], stop: Any) -> tuple[list[int], str | None]:
        """``ids`` up to the first text that stops them."""
        texts = [stop] if isinstance(stop, str) else stop or []
        for end in range(1, len(ids) + 1):
            written = self.tokens.decode(ids[:end])
            if (stop_text := next((text for text in texts if text in written), None)) is not None:
                return ids[:end], stop_text
        return ids, None


def _log_prob(prompt: Sequence[int], ids: Sequence[int]) -> float:
    """A number of full float32 precision that these ids alone have."""
    digest = hashlib.blake2b(repr((prompt, ids)).encode(), digest_size=8).digest()
    (rounded,) = struct.unpack("<f", struct.pack("<f", -8 * (int.from_bytes(digest, "little") + 1) / (1 << 64)))
    return float(rounded)


def _json(body: JsonObject, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "type": "error", "code": status}}, status)
