"""What pages and scripts are answered besides pages."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from gymdata.texts import REFUSAL, short


class Missing(Exception):  # noqa: N818 - an answer, not a defect
    """The thing that an address names does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__(short(message, REFUSAL))


def json_answer(value: Any, status: int = 200) -> Response:
    """JSON; numbers that it has no form for are null."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY, default=str), status, media_type="application/json"
    )
