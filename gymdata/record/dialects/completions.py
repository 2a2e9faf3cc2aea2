"""OpenAI's completions of text or ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from gymdata.record.dialects import dialect
from gymdata.record.dialects._wire import Body, Choices, Fields, usage
from gymdata.record.dialects.chat import SAMPLING, STREAM_WITHOUT_EFFECT
from gymdata.record.request import AgentCompletion, AgentRequest, CompletionDelta, RequestError
from gymdata.rollouts.messages import JsonObject

_REFUSED = ("suffix", "echo", "logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos")


@dialect("completions")
class Completions(Choices):
    """OpenAI's completions of a text or of ids, with vLLM's ``return_token_ids`` and sampling parameters."""

    name, id_prefix, objects = "completions", "cmpl", ("text_completion", "text_completion")
    paths: tuple[str, ...] = ("/v1/completions",)

    def parse(self, body: Body, headers: Mapping[str, str]) -> AgentRequest:  # noqa: ARG002 - the port's signature
        fields = Fields(body, without_effect=["user"], refused=_REFUSED)
        n = fields.integer("n", 1, 128) or 1
        fields.refuse("best_of", unless=(n,))
        options = Fields(fields.section("stream_options"), "stream_options.", without_effect=STREAM_WITHOUT_EFFECT)
        request = AgentRequest(
            model=fields.text("model") or "",
            messages=(),
            sampling=fields.sampling(*SAMPLING),
            max_tokens=fields.integer("max_tokens", 1) or 16,
            stop=fields.stop("stop"),
            n=n,
            stream=fields.flag("stream"),
            stream_usage=options.flag("include_usage"),
            logprobs=fields.integer("logprobs", 0, 20),
            return_token_ids=fields.flag("return_token_ids"),
            prompt=_prompt(fields.take("prompt", (str, list), "text or token ids")),
        )
        options.refuse_rest()
        fields.refuse_rest()
        return request

    def response(self, request: AgentRequest, completions: Sequence[AgentCompletion]) -> JsonObject:
        choices = [_choice(request, completion, completion.text) for completion in completions]
        return self.body(request, completions[0], choices) | {"usage": usage(completions)}

    def chunks(self, request: AgentRequest) -> Callable[[CompletionDelta], Sequence[JsonObject]]:
        def of(delta: CompletionDelta) -> Sequence[JsonObject]:
            part = {"index": delta.index, "text": delta.content, "logprobs": None, "finish_reason": None}
            last = [] if delta.end is None else [_choice(request, delta.end, "")]
            choices: list[JsonObject] = [*([part] if delta.content else []), *last]
            return [self.body(request, delta, [choice], chunk=True) for choice in choices]

        return of


def _prompt(prompt: Any) -> str | list[int]:
    single = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int) else prompt
    ids = isinstance(single, list) and single and all(isinstance(i, int) and not isinstance(i, bool) for i in single)
    if isinstance(single, str) or ids:
        return single  # type: ignore[no-any-return]  # a text or ids, by the line above
    if isinstance(prompt, list) and len(prompt) > 1:
        several = f"got {len(prompt)} prompts, expected one; send a request for each"
        raise RequestError.field("prompt", several, "unsupported")
    raise RequestError.field("prompt", f"got {prompt!r:.80}, expected text or token ids")


def _choice(request: AgentRequest, completion: AgentCompletion, text: str) -> JsonObject:
    logprobs = None
    if request.logprobs is not None and completion.logprobs is not None:
        tokens = [token.token for token in completion.logprobs]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [token.logprob for token in completion.logprobs],
            "top_logprobs": [dict(token.top) for token in completion.logprobs],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
        }
    ids = {"token_ids": list(completion.token_ids), "prompt_token_ids": list(completion.prompt_token_ids)}
    return {
        "index": completion.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": "length" if completion.finish_reason == "length" else "stop",
        **(ids if request.return_token_ids else {}),
    }
