"""An answer of a server whose parts are of another type."""

from __future__ import annotations

from typing import Any

import pytest

from gymdata.engines.servers.completions_response import generations, of_chat, of_completion, of_generate
from gymdata.errors import OutsideError


@pytest.mark.parametrize("read", [of_completion, of_generate, of_chat])
@pytest.mark.parametrize("logprobs", [[1, 2], "no", 5, {"content": [{"logprob": -1.0, "top_logprobs": 5}]}])
def test_log_probabilities_in_no_known_shape_are_the_servers(read: Any, logprobs: object) -> None:
    """Named as an answer that may be better next time, and not taken for a defect of ours."""
    choice = {"index": 0, "token_ids": [1], "prompt_token_ids": [1], "logprobs": logprobs, "finish_reason": "stop"}
    answer = {"prompt_token_ids": [1], "choices": [choice]}
    with pytest.raises(OutsideError) as caught:
        generations(answer, {"n": 1, "logprobs": 1, "max_tokens": 4}, read, sent=[1], vocab_size=9)
    assert caught.value.retryable
