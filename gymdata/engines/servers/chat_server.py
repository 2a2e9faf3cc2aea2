"""A server that takes messages only: /v1/chat/completions with token ids and log-probabilities in its answers.

Chat messages alone do not determine token ids: the server writes them out with its template and tokenises them again,
so a later prompt need not begin with what was sampled. Three ways to say what the prompt must be are tried before any
sampling, the best first, and the first that the server proves is used for the whole run:

- ``ids``: the prompt's ids go along in ``kv_transfer_params.prompt_token_ids``, where vLLM takes the ids of a prefill
  stage, and the server reads exactly those; the messages are then for its log only;
- ``prefix``: the ids held so far go along as ``required_prefix_token_ids``, an extension of servers for training, and the
  server splices them before its rendering of what is new;
- ``messages``: nothing but messages; the prompt is what the server makes of them.

Invariants: a prompt is kept as the server reports that it read it, in every way and on every turn, never as it was
meant. The prompt that would be on policy (the ids held and the bridge to what is new; where the template rewrites the past,
the splice of the ids held into the rendering) is sent where that is possible, and nothing is ever claimed where it is not:
a reported prompt that leaves what was sampled is a break of the row, with its position, and ``--on-break fail`` makes it a
failed attempt instead. The tokens trained are then still the tokens sampled; a break only cuts the rollout into sequences.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from gymdata.chat.template import TransformersChat
from gymdata.engines.port import Conversation, Generation, SampleRequest
from gymdata.engines.sampling import Sampling
from gymdata.engines.servers.completions_response import of_chat
from gymdata.engines.servers.vllm_server import PROBE, PROBE_TOKENS, TOOL, ServerSampler
from gymdata.errors import DataError, OutsideError, RefusedError, UsageError
from gymdata.rollouts.messages import JsonObject, Message, Tools
from gymdata.rollouts.next_prompt import SpliceRefusedError, next_prompt, splice
from gymdata.store.paths import Facts

Way = Literal["ids", "prefix", "messages"]
WAYS: tuple[Way, ...] = ("ids", "prefix", "messages")

_BEGIN: list[Message] = [{"role": "user", "content": "begin"}]
_RENDERS_AGAIN = (
    "the server takes messages only and re-renders every prompt: one that no longer begins with what was sampled is kept "
    "as a break (--on-break fail refuses it)"
)


class ChatServerSampler(ServerSampler):
    """A ``Sampler`` on a server's chat route; every request needs its ``conversation``.

    ``ways``: those that may be tried, in order. The other arguments are those of ``ServerSampler``. ``way`` and
    ``tool_choice`` are known after ``start``.
    """

    _route = "/v1/chat/completions"
    _read = staticmethod(of_chat)

    def __init__(self, endpoint: str, model: str | None = None, *, ways: Sequence[Way] = WAYS, **settings: Any) -> None:
        super().__init__(endpoint, model, **settings)
        self.ways = tuple(ways)
        self.way: Way = "messages"
        self.tool_choice: str | None = None

    async def start(self) -> Facts:
        """Check the server. Raises UsageError when it cannot serve this, OutsideError when it cannot be reached."""
        await super().start()
        self._facts |= {"transport": "http, messages", "continuity": self.way, "tool_choice": self.tool_choice}
        if self.way == "messages":
            self._facts["notes"] = [_RENDERS_AGAIN]
        return self.facts()

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Continue one conversation ``request.n`` times. Raises OutsideError("engine")."""
        conversation = request.conversation
        if conversation is None:
            raise UsageError("a server that takes messages was called without a conversation")
        body = self._chat_body(conversation, self._room(request), request.n, request.seed)
        sent = None
        if self.way == "ids":
            sent = [int(i) for i in request.prompt_token_ids]
            body["kv_transfer_params"] = {"prompt_token_ids": sent}
        elif self.way == "prefix" and conversation.prefix:
            body["required_prefix_token_ids"] = [int(i) for i in conversation.prefix]
        return await self._complete({**body, "request_id": request.request_id}, sent)

    # --- the checks before any sampling -----------------------------------------------------------------------------

    async def _check_answers(self) -> str:
        """Short requests that prove the evidence, the way to say what a prompt must be, and that tools are shown."""
        begin = Conversation(_BEGIN, None)
        drawn = (await self._complete(self._chat_body(begin, PROBE_TOKENS, 1, 1, Sampling(ignore_eos=True))))[0]
        best_of = Sampling(top_k=1, ignore_eos=True)
        best = (await self._complete(self._chat_body(begin, PROBE_TOKENS, 1, 1, best_of)))[0]
        mode = self._mode(best)
        for way in self.ways:
            if await self._proves(way, drawn):
                self.way = way
                break
        self.tool_choice = "none" if self.way == "ids" else await self._shows_tools(drawn)
        return mode

    async def _proves(self, way: Way, drawn: Generation) -> bool:
        """Whether the server reads the prompt that this way gives it, in place of its own rendering."""
        if way == "messages":
            return True
        prefix = [*drawn.prompt_token_ids, *drawn.token_ids]
        if way == "ids":
            body = self._chat_body(Conversation(_BEGIN, None), 1, 1, 1)
            body["kv_transfer_params"] = {"prompt_token_ids": list(PROBE)}
        else:
            # Other words than were sampled, so that a rendering of them cannot look like the prefix.
            messages: list[Message] = [{"role": "assistant", "content": "an earlier completion"}, *_BEGIN]
            body = self._chat_body(Conversation([*_BEGIN, *messages], None), 1, 1, 1)
            body["required_prefix_token_ids"] = prefix
        read = await self._prompt_read(body)
        if read is None:
            return False
        return read == list(PROBE) if way == "ids" else read[: len(prefix)] == prefix and len(read) > len(prefix)

    async def _shows_tools(self, drawn: Generation) -> str | None:
        """The tool_choice under which tools reach the prompt, "none" before "auto": completions are parsed here."""
        for choice in ("none", "auto"):
            body = {**self._chat_body(Conversation(_BEGIN, None), 1, 1, 1), "tools": [TOOL], "tool_choice": choice}
            read = await self._prompt_read(body)
            if read is not None and read != list(drawn.prompt_token_ids):
                return choice
        return None

    async def _prompt_read(self, body: JsonObject) -> list[int] | None:
        """The prompt that the server reports; None when it refuses such a request."""
        try:
            return list((await self._complete(body))[0].prompt_token_ids)
        except OutsideError as error:
            if error.retryable or error.fatal:
                raise
            return None

    # --- one request ------------------------------------------------------------------------------------------------

    def _chat_body(
        self, conversation: Conversation, max_tokens: int, n: int, seed: int | None, sampling: Sampling | None = None
    ) -> JsonObject:
        body = self._body((), max_tokens, n, seed, sampling)
        del body["prompt"]
        body |= {
            "messages": [_api_message(m) for m in conversation.messages],
            "logprobs": True,
            "top_logprobs": (sampling or self.sampling).top_logprobs,
        }
        if conversation.tools:
            if self.tool_choice is None:
                raise UsageError(
                    f"{self.base} leaves tools out of the prompt",
                    hint="start it without --exclude-tools-when-tool-choice-none, or with --enable-auto-tool-choice and "
                    "its --tool-call-parser",
                )
            body |= {"tools": [dict(t) for t in conversation.tools], "tool_choice": self.tool_choice}
        return body


class OnPolicyPrompts:
    """What the next prompt of a conversation should be, when a server renders the prompts."""

    def __init__(self, chat: TransformersChat) -> None:
        self._chat = chat

    def __call__(
        self, prefix: Sequence[int], messages: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int]:
        """``prefix`` and what is new; without a proof of the cut, the whole rendered again, which the row will show as a
        break. ``messages`` end with the model's last message. Raises DataError when the template refuses ``new``."""
        chat = self._chat
        try:
            return next_prompt(prefix, chat.bridge(messages, new, tools), chat.end_of_turn_ids)
        except RefusedError:
            rendered = chat.render([*messages, *new], tools)
        try:
            before = chat.encode(chat.text(messages, tools, generate=False))
            return splice(prefix, before, rendered, chat.end_of_turn_ids)
        except (SpliceRefusedError, DataError):
            return rendered


def _api_message(message: Message) -> dict[str, object]:
    """A message as the chat route takes it: no nulls, and the arguments of calls as JSON text."""
    out = {key: value for key, value in message.items() if value is not None}
    if calls := out.pop("tool_calls", None):
        out["tool_calls"] = calls = [{**call, "function": dict(call["function"])} for call in calls]
        for function in (call["function"] for call in calls):
            if not isinstance(arguments := function.get("arguments"), str):
                function["arguments"] = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    elif out["role"] == "assistant":
        out.setdefault("content", "")
    return out
