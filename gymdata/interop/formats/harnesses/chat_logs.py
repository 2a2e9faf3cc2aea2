"""Requests and responses of chat models, as logs and batches have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS, Format

if TYPE_CHECKING:
    from gymdata.interop.importing import Importing, TableRow
    from gymdata.store.paths import Source


class _Logs(Format):
    item = "a request with its response"
    holds_text = True


@FORMATS.register("request-log")
class RequestLog(_Logs):
    """A request and its ``response`` per row: ``messages`` and ``model_parameters`` as LiteLLM logs them, or a ``request``;
    the response is OpenAI's with one choice, or Anthropic's message. There is no reward."""

    content = "requests with responses of a chat model"
    marks = (b'"response"', b'"messages"', b'"request"')

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        asked, response = _asked(row), row.get("response")
        return isinstance(asked, dict) and isinstance(asked.get("messages"), list) and _is_response(response)

    def row(self, item: Any, importing: Importing) -> TableRow:
        about = [name for name in item if name not in ("messages", "request", "response", "model_parameters")]
        return _row(item, _asked(item), item["response"], importing, ("request", "response", "model_parameters"), about)


@FORMATS.register("openai-batch")
class OpenAIBatch(_Logs):
    """OpenAI's batches of chat completions: the files of requests and of responses, imported together, are joined by
    ``custom_id``; a request without a response, and the reverse, is refused, and so is an id that two requests have."""

    content = "requests or responses of a batch"
    marks = (b'"custom_id"',)
    joined = True

    def recognise(self, value: Any) -> bool:
        from gymdata.interop.text_rows import first_row

        row = first_row(value)
        response = row.get("response")
        body = row.get("body") or (response.get("body") if isinstance(response, dict) else None)
        of_exchange = isinstance(body, dict) and (isinstance(body.get("messages"), list) or _is_response(body))
        return isinstance(row.get("custom_id"), str) and of_exchange

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        from gymdata.interop.importing import BadItem

        requests_of: dict[str, list[tuple[Source, int, Any, bytes]]] = {}
        answers = []
        for document in super().documents(sources):
            value = document[2]
            if (
                isinstance(value, dict)
                and isinstance(value.get("body"), dict)
                and isinstance(value.get("custom_id"), str)
            ):
                requests_of.setdefault(value["custom_id"], []).append(document)
            else:
                answers.append(document)
        for source, line, value, text in answers:
            name = str(value.get("custom_id")) if isinstance(value, dict) else ""
            if len(requests := requests_of.get(name, ())) == 1:
                value = value | {"request": requests_of.pop(name)[0][2]["body"]}
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

    def row(self, item: Any, importing: Importing) -> TableRow:
        from gymdata.interop.importing import BadItem

        if "request" not in item:
            raise BadItem("S103", f"custom_id {item['custom_id']!r}: no request in these files; import both together")
        if item.get("error"):
            raise BadItem("S103", f"error: the request failed with {item['error']!r:.200}")
        texts = ("request", "response", "id", "error")
        return _row(item, item["request"], item["response"]["body"], importing, texts, ())


def _asked(row: Mapping[str, Any]) -> Any:
    parameters = row.get("model_parameters")
    own = parameters if isinstance(parameters, dict) else {}
    return row.get("request") or {**own, "messages": row.get("messages")}


def _is_response(value: Any) -> bool:
    return isinstance(value, dict) and (
        isinstance(value.get("choices"), list)
        or (value.get("role") == "assistant" and isinstance(value.get("content"), list))
    )


def _row(
    item: Mapping[str, Any],
    asked: Mapping[str, Any],
    response: Mapping[str, Any],
    importing: Importing,
    texts: Iterable[str],
    about: Iterable[str],
) -> TableRow:
    from gymdata.interop.blocks import of_anthropic
    from gymdata.interop.importing import BadItem
    from gymdata.interop.text_rows import conversation, rollout_row

    tools = asked.get("tools")
    if "choices" in response:
        if len(response["choices"]) != 1:
            raise BadItem("S102", f"choices: got {len(response['choices'])}, expected 1")
        choice = response["choices"][0]
        answer, end = [choice["message"]], choice.get("finish_reason")
        messages = asked["messages"]
    else:
        answer, end = of_anthropic([response]), response.get("stop_reason")
        messages = of_anthropic(asked["messages"], asked.get("system"))
        tools = [
            {"name": t["name"], "description": t.get("description"), "parameters": t["input_schema"]}
            for t in tools or ()
        ]
    prompt, written = conversation(messages, "messages"), conversation(answer, "response")
    row = {**item, "tools": tools, "functions": asked.get("functions")}
    cut = end in ("length", "max_tokens")
    model = response.get("model")
    return rollout_row(row, prompt, written, importing, texts=(*texts,), about=(*about,), policy=model, truncated=cut)
