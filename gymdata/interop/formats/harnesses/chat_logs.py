"""Requests and responses of chat models, as logs and batches have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gymdata.interop.blocks import function_of, of_anthropic, of_responses
from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import BadItem, Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row
from gymdata.rollouts.messages import JsonObject

if TYPE_CHECKING:
    from gymdata.store.paths import Source


class _Logs(Format):
    item = "a request with its response"
    holds_text = True


@FORMATS.register("request-log")
class RequestLog(_Logs):
    """A request and its ``response`` per row: ``messages`` and ``model_parameters`` as LiteLLM logs them, or a ``request``;
    the response is OpenAI's with one choice (``choices`` may be in the row itself) or of its Responses interface, or
    Anthropic's message. There is no reward."""

    content = "requests with responses of a chat model"
    marks = (b'"response"', b'"messages"', b'"request"', b'"choices"')

    def recognise_row(self, row: JsonObject) -> bool:
        request, response = _request(row), row.get("response", row)
        if not isinstance(request, dict) or not _is_response(response):
            return False
        return isinstance(request.get("messages"), list) or ("output" in response and "input" in request)

    def row(self, item: Any, importing: Importing) -> TableRow:
        texts = ("request", "response", "model_parameters", "choices")
        about = [name for name in item if name not in ("messages", *texts)]
        return _row(item, _request(item), item.get("response", item), importing, texts, about)


class _Batch(_Logs):
    """Batches of requests: the files of requests and of results, imported together, are joined by ``custom_id``; a request
    without a result, and the reverse, is refused, and so is an id that two requests have."""

    marks = (b'"custom_id"',)
    joined = True
    #: The column of a request.
    request = ""

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        requests_of: dict[str, list[tuple[Source, int, Any, bytes]]] = {}
        answers = []
        for source, line, value, text in super().documents(sources):
            for row in value if isinstance(value, list) else [value]:
                name = row.get("custom_id") if isinstance(row, dict) else None
                if isinstance(name, str) and isinstance(row.get(self.request), dict):
                    requests_of.setdefault(name, []).append((source, line, row, text))
                else:
                    answers.append((source, line, row, text))
        for source, line, value, text in answers:
            name = str(value.get("custom_id")) if isinstance(value, dict) else ""
            if len(requests := requests_of.get(name, ())) == 1:
                value = value | {"request": requests_of.pop(name)[0][2][self.request]}
            elif requests:
                # Ids are told apart within a batch only.
                value = BadItem(
                    "S102", f"custom_id {name!r}: {len(requests)} requests have it; import one batch at a time"
                )
            yield source, line, value, text
        for requests in requests_of.values():
            for source, line, value, text in requests:
                why = "several requests have it" if len(requests) > 1 else "no response in these files"
                yield source, line, BadItem("S103", f"custom_id {value['custom_id']!r}: {why}"), text

    def response(self, item: JsonObject) -> Any:
        """The response in a result. Raises BadItem for a request that failed."""
        raise NotImplementedError

    def row(self, item: Any, importing: Importing) -> TableRow:
        if "request" not in item:
            raise BadItem("S103", f"custom_id {item['custom_id']!r}: no request in these files; import both together")
        texts = ("request", "response", "result", "id", "error")
        return _row(item, item["request"], self.response(item), importing, texts, ())


@FORMATS.register("openai-batch")
class OpenAIBatch(_Batch):
    """OpenAI's batches of chat completions: the files of requests and of responses, imported together, are joined by
    ``custom_id``; a request without a response, and the reverse, is refused, and so is an id that two requests have."""

    content = "requests or responses of a batch"
    request = "body"

    def recognise_row(self, row: JsonObject) -> bool:
        response = row.get("response")
        body = row.get("body") or (response.get("body") if isinstance(response, dict) else None)
        of_exchange = isinstance(body, dict) and (isinstance(body.get("messages"), list) or _is_response(body))
        return isinstance(row.get("custom_id"), str) and of_exchange

    def response(self, item: JsonObject) -> Any:
        if item.get("error"):
            raise BadItem("S103", f"error: the request failed with {item['error']!r:.200}")
        return item["response"]["body"]


@FORMATS.register("anthropic-batch")
class AnthropicBatch(_Batch):
    """Anthropic's batches of messages: requests with ``params``, and results, imported together and joined by ``custom_id``
    as OpenAI's are."""

    content = "requests or results of a batch of Anthropic"
    request = "params"

    def recognise_row(self, row: JsonObject) -> bool:
        request, result = row.get("params"), row.get("result")
        of_exchange = (isinstance(request, dict) and isinstance(request.get("messages"), list)) or (
            isinstance(result, dict) and "type" in result
        )
        return isinstance(row.get("custom_id"), str) and of_exchange

    def response(self, item: JsonObject) -> Any:
        if item["result"].get("type") != "succeeded":
            why = item["result"].get("error") or item["result"].get("type")
            raise BadItem("S103", f"result: the request failed with {why!r:.200}")
        return item["result"]["message"]


def _request(row: JsonObject) -> Any:
    parameters = row.get("model_parameters")
    settings = parameters if isinstance(parameters, dict) else {}
    return row.get("request") or {**settings, "messages": row.get("messages")}


def _is_response(value: Any) -> bool:
    return isinstance(value, dict) and (
        isinstance(value.get("choices"), list)
        or (value.get("object") == "response" and isinstance(value.get("output"), list))
        or (value.get("role") == "assistant" and isinstance(value.get("content"), list))
    )


def _row(
    item: JsonObject,
    request: JsonObject,
    response: JsonObject,
    importing: Importing,
    texts: Iterable[str],
    about: Iterable[str],
) -> TableRow:
    tools = request.get("tools")
    if "choices" in response:
        if len(response["choices"]) != 1:
            raise BadItem("S102", f"choices: got {len(response['choices'])}, expected 1")
        choice = response["choices"][0]
        answer, end = [choice["message"]], choice.get("finish_reason")
        messages = request["messages"]
    elif "output" in response:
        answer, end = of_responses(response["output"]), (response.get("incomplete_details") or {}).get("reason")
        items, system = request["input"], request.get("instructions")
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        messages = [*([{"role": "system", "content": system}] if system else ()), *of_responses(items)]
    else:
        answer, end = of_anthropic([response]), response.get("stop_reason")
        messages = of_anthropic(request["messages"], request.get("system"))
        tools = [function_of(tool) for tool in tools or ()]
    prompt, written = conversation(messages, "messages"), conversation(answer, "response")
    row = {**item, "tools": tools, "functions": request.get("functions")}
    cut = end in ("length", "max_tokens", "max_output_tokens")
    model = response.get("model")
    return rollout_row(row, prompt, written, importing, texts=(*texts,), about=(*about,), policy=model, truncated=cut)
