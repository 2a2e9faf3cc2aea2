"""The body of a request as a strict model.

Invariant: every field of a body is read, has no effect on what a model writes, or is refused by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import pydantic

from gymdata.commands.record.request import ErrorKind, RequestError
from gymdata.rollouts.messages import JsonObject
from gymdata.settings import expected_text


class Body(pydantic.BaseModel):
    """An object of a request. Null is no value. ``without_effect``: fields that change nothing that the model writes:
    accounts, caches, storage, advice on effort; ``unsupported``: those that are refused where they ask for something."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    without_effect: ClassVar[Sequence[str]] = ()
    unsupported: ClassVar[Sequence[str]] = ()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _with_a_meaning(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        left_out = {*cls.without_effect, *(name for name in cls.unsupported if body.get(name) in (False, "", [], {}))}
        return {name: value for name, value in body.items() if value is not None and name not in left_out}

    @classmethod
    def of(cls, body: JsonObject, where: str = "") -> Self:
        """The object at ``where`` as its model. Raises RequestError with the first field that is wrong or unknown."""
        try:
            return cls.model_validate(body)
        except pydantic.ValidationError as error:
            fault = error.errors(include_url=False)[0]
            for key in fault["loc"]:
                where += f"[{key}]" if isinstance(key, int) else f".{key}" if where else key
            problem = f"got {fault['input']!r:.80}, expected {expected_text(fault)}"
            problem = {"extra_forbidden": "not supported by gymdata record; leave it out", "missing": "is missing"}.get(
                fault["type"], problem
            )
            kind: ErrorKind = "unsupported" if fault["type"] in ("extra_forbidden", "literal_error") else "invalid"
            raise RequestError.field(where, problem, kind) from error
