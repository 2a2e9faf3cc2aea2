"""A server's streamed answer, put together as the answer that it would have given at once.

Invariants: what comes out is read and checked like any other answer (``completions_response``); ids are passed on as they
come, each one of the vocabulary; an error in the stream, or a stream without its end, is the engine's fault and never a
generation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from gymdata.engines.sampling import check_ids
from gymdata.engines.servers.completions_response import garbage
from gymdata.errors import OutsideError
from gymdata.rollouts.messages import JsonObject

#: What one chunk has of a choice's tokens; in the last chunk of a choice come the other fields.
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content")


class CompletionStream:
    """The chunks of /v1/completions. ``on_tokens`` gets the number of one of ``n`` choices and its new ids."""

    def __init__(self, on_tokens: Callable[[int, Sequence[int]], None], n: int, vocab_size: int | None) -> None:
        self._on_tokens, self._n, self._vocab_size = on_tokens, n, vocab_size
        self.passed_on = False
        self.begin()

    def begin(self) -> None:
        """Another try begins."""
        self._rest, self._ended = b"", False
        #: Lines that are no chunk: of a server that does not stream, the answer.
        self._plain = b""
        self._answer: JsonObject = {}
        self._choices: dict[Any, JsonObject] = {}

    def feed(self, part: bytes) -> None:
        """The next bytes. Raises OutsideError for an error that the server sends, and for what is no chunk."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self._ended = True
            elif line.startswith(b"data:"):
                self._take(data)
            else:
                self._plain += line

    def answer(self) -> JsonObject:
        """The whole answer. Raises OutsideError when the stream has no end."""
        plain = self._plain + self._rest
        if not self._choices and plain.lstrip().startswith(b"{"):
            self._take(plain)
        elif not self._ended:
            raise OutsideError("engine", "the server's stream ended before its end", retryable=True)
        return {**self._answer, "choices": list(self._choices.values())}

    def _take(self, data: bytes) -> None:
        try:
            chunk = orjson.loads(data)
            if error := chunk.get("error"):
                fields = error if isinstance(error, dict) else {"message": error}
                status = fields["code"] if isinstance(fields.get("code"), int) else 500
                text = f"the server's stream ends with an error: {fields.get('message')}"
                raise OutsideError("engine", text, retryable=True, status=status)
            self._answer |= {name: value for name, value in chunk.items() if name != "choices" and value is not None}
            for choice in chunk["choices"]:
                self._merge(choice)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise garbage("a stream of choices", data[:200]) from error

    def _merge(self, choice: JsonObject) -> None:
        index, ids = choice["index"], choice.get("token_ids")
        merged = self._choices.setdefault(index, {})
        for name, value in choice.items():
            if name == "token_ids":
                merged.setdefault(name, []).extend(value or ())
            elif name == "logprobs":
                if value is not None:
                    lists = merged.setdefault(name, {})
                    for part in _LISTS:
                        if value.get(part) is not None:
                            lists.setdefault(part, []).extend(value[part])
            elif value is not None:
                merged[name] = value
        if ids:
            if type(index) is not int or not 0 <= index < self._n:
                raise garbage(f"a stream of {self._n} choices", choice)
            check_ids(ids, self._vocab_size, "generation")
            self.passed_on = True
            self._on_tokens(index, ids)
