"""What makes an answer one that can be stored; what comes of one that is not is in ``tests/test_faults.py``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.sampling import AnswerFaultError, check_generation
from gymdata.engines.servers.completions_response import generations
from gymdata.errors import OutsideError, UsageError
from tests.engines.against import against, sampling, started
from tests.faulty_server import Settings

pytest.importorskip("aiohttp")
PROMPT = [5, 6, 7]
SAMPLE = sampling(SampleRequest("r", PROMPT, max_tokens=6, seed=11))
SOUND = Generation([5, 6], [1, 2, 3], [-1.0, -2.0, 0.0], "stop", top_log_probs=[[(1, -1.0)], [(2, -2.0)], [(3, 0.0)]])
#: How many requests a start takes.
PROBES = 2


def test_an_empty_generation_is_no_fault() -> None:
    """A model may say nothing; the row is kept (T212) and counted."""
    (out,) = against(Settings(mode="empty", skip=PROBES), SAMPLE)
    assert (list(out.token_ids), list(out.log_probs), out.finish_reason) == ([], [], "stop")


@pytest.mark.parametrize(
    ("mode", "says"),
    [("no_ids", "return_token_ids"), ("no_logprobs", "max-logprobs"), ("wrong_prompt_ids", "changes prompts")],
)
def test_servers_that_cannot_give_evidence_are_refused_at_once(mode: str, says: str) -> None:
    """No ids, no log-probabilities or changed prompts: refused before anything is sampled, naming what to switch on."""
    with pytest.raises(UsageError, match=says):
        against(Settings(mode=mode), started)


def test_raw_log_probs_are_refused_where_they_differ() -> None:
    """Raw log-probs are refused at temperature 0.7, named in the facts at temperature 1, and allowed on request."""
    warm = {"sampling": {"temperature": 0.7}}
    with pytest.raises(UsageError, match="processed_logprobs"):
        against(Settings(mode="raw"), started, **warm)
    for options in ({}, {**warm, "allow_raw_logprobs": True}):
        assert against(Settings(mode="raw"), started, **options)["logprobs_mode"] == "raw_logprobs"


@pytest.mark.parametrize("logprobs", [[1, 2], "no", 5])
def test_log_probabilities_in_no_known_shape_are_the_servers(logprobs: object) -> None:
    """Named as an answer that may be better next time, and not taken for a defect of ours."""
    choice = {"index": 0, "token_ids": [1], "prompt_token_ids": [1], "logprobs": logprobs, "finish_reason": "stop"}
    with pytest.raises(OutsideError) as caught:
        generations({"choices": [choice]}, {"prompt": [1], "n": 1, "logprobs": 1, "max_tokens": 4}, vocab_size=9)
    assert caught.value.retryable


def test_a_sound_generation_passes() -> None:
    """Zero, rounding just above it, and the last id of the vocabulary are sound."""
    check_generation(SOUND, max_tokens=3, vocab_size=7, sent=[5, 6])
    check_generation(
        dataclasses.replace(SOUND, log_probs=[1e-6, -9998.0, -0.0]), max_tokens=3, vocab_size=4, sent=[5, 6]
    )


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0)), max_size=8),
    st.integers(0, 7),
    st.sampled_from([("id", -1), ("id", 10), ("id", 2**64), ("id", True), ("id", None), ("lp", math.nan), ("lp", math.inf),
                     ("lp", 1e-5), ("lp", -9999.0), ("lp", -math.inf), ("lp", None), ("lp", "0")]),
)  # fmt: skip
def test_one_bad_value_anywhere_is_found(drawn: list[tuple[int, float]], at: int, planted: tuple[str, Any]) -> None:
    """A generation with one value outside the rules is refused wherever that value stands; without it, it passes."""
    ids: list[Any] = [i for i, _ in drawn]
    values: list[Any] = [v for _, v in drawn]
    check_generation(Generation([1], list(ids), list(values), "stop"), max_tokens=8, vocab_size=10, sent=[1])
    ids.insert(at, planted[1] if planted[0] == "id" else 0)
    values.insert(at, planted[1] if planted[0] == "lp" else 0.0)
    with pytest.raises(AnswerFaultError):
        check_generation(Generation([1], ids, values, "stop"), max_tokens=9, vocab_size=10, sent=[1])
