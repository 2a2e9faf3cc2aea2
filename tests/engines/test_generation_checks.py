"""Every answer is checked as the probe's is, by servers of both kinds and by the engine in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.engines.port import Conversation, Generation, SampleRequest
from gymdata.engines.sampling import AnswerFaultError, check_generation
from gymdata.engines.servers.chat_server import ChatServerSampler
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError
from tests.faulty_server import FAULTS, Settings, draw, serve

pytest.importorskip("aiohttp")
PROMPT = [5, 6, 7]
TALK = Conversation([{"role": "user", "content": "hi"}], None)
REQUEST = SampleRequest("r", PROMPT, max_tokens=6, seed=11, conversation=TALK)
SOUND = Generation([5, 6], [1, 2, 3], [-1.0, -2.0, 0.0], "stop", top_log_probs=[[(1, -1.0)], [(2, -2.0)], [(3, 0.0)]])


def against(kind: Callable[..., ServerSampler], settings: Settings, probes: int, **options: Any) -> list[Generation]:
    """One generation of a started sampler; ``settings`` hold from the first request after the ``probes``."""

    async def main() -> list[Generation]:
        runner, port = await serve(settings, 0)
        sampler = kind(f"http://127.0.0.1:{port}/v1", **{"pause_s": 0.0, "vocab_size": 200, **options})
        try:
            await sampler.start()
            assert len(settings.requests) == probes
            return await sampler.sample(REQUEST)
        finally:
            await sampler.close()
            await runner.cleanup()

    return asyncio.run(main())


ROUTES = [(ServerSampler, 2), (ChatServerSampler, 3)]


@pytest.mark.parametrize(("mode", "says"), FAULTS.items())
@pytest.mark.parametrize(("kind", "probes"), ROUTES, ids=["completions", "chat"])
def test_an_answer_of_mid_run_is_checked_as_the_probe_is(kind: Any, probes: int, mode: str, says: str) -> None:
    """A fault in what is answered is the engine's: tried again, and raised with what was got when it stays."""
    passing = Settings(mode=mode, fail_first=1, skip=probes)
    (out,) = against(kind, passing, probes)
    assert list(out.token_ids) == draw(11, PROMPT, 6, passing)[0]
    lasting = Settings(mode=mode, skip=probes)
    with pytest.raises(OutsideError) as caught:
        against(kind, lasting, probes, max_retries=1)
    assert (caught.value.system, caught.value.retryable, caught.value.fatal) == ("engine", True, False)
    assert says in str(caught.value)
    assert len(lasting.requests) == probes + 2


@pytest.mark.parametrize(("kind", "probes"), ROUTES, ids=["completions", "chat"])
def test_alternatives_are_checked(kind: Any, probes: int) -> None:
    """Ids and log-probabilities of the alternatives keep the same rules."""
    settings = Settings(mode="odd_alternatives", skip=probes)
    with pytest.raises(OutsideError, match="alternatives: the id at position 0 is not in the vocabulary: got -5"):
        against(kind, settings, probes, max_retries=0, sampling={"top_logprobs": 2})


@pytest.mark.parametrize(("kind", "probes"), ROUTES, ids=["completions", "chat"])
def test_an_empty_generation_is_no_fault(kind: Any, probes: int) -> None:
    """A model may say nothing; the row is kept (T212) and counted."""
    (out,) = against(kind, Settings(mode="empty", skip=probes), probes)
    assert (list(out.token_ids), list(out.log_probs), out.finish_reason) == ([], [], "stop")


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
