"""The HTTP sampler against a small real server that misbehaves on demand; what every sampler of servers does with a wrong
answer is in ``tests/test_faults.py``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gymdata.engines.port import SampleRequest
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError, UsageError
from tests.engines.against import against, sampling, started
from tests.faulty_server import Settings, draw

pytest.importorskip("aiohttp")
PROMPT = [5, 6, 7]
SAMPLE = sampling(SampleRequest("r", PROMPT, max_tokens=6, seed=11))


def test_generations_are_what_the_server_drew():
    """Ids, log-probs and the finish reason arrive unchanged, one seed up for each of n."""
    settings = Settings()
    out = against(settings, sampling(SampleRequest("r", PROMPT, max_tokens=6, seed=11, n=3)))
    for i, generation in enumerate(out):
        ids, values, reason = draw(11 + i, PROMPT, 6, settings)
        assert (generation.token_ids, generation.log_probs, generation.finish_reason) == (ids, values, reason)
        assert generation.prompt_token_ids == PROMPT


def test_alternatives_come_by_id():
    """Asked for K alternatives, every token has the K most probable ids."""
    (out,) = against(Settings(), SAMPLE, sampling={"top_logprobs": 2})
    assert [len(row) for row in out.top_log_probs] == [2] * len(out.token_ids)
    assert [row[0] for row in out.top_log_probs] == list(zip(out.token_ids, out.log_probs, strict=True))


def test_retry_after_is_kept_and_capped_by_the_timeout():
    """The server's wish to wait is handed on with the error."""
    with pytest.raises(OutsideError) as caught:
        against(Settings(mode="429", skip=2, retry_after="17"), SAMPLE, max_retries=0)
    assert caught.value.retry_after_s == 17.0


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "nothing answers at 127.0.0.1:1"), ("nobody.invalid", "no host is named nobody.invalid")],
)
def test_nobody_there_is_fatal(host, why):
    """A port where nobody listens, or a name that leads to no machine, in plain words: no other request will survive it."""
    with pytest.raises(OutsideError) as caught:
        asyncio.run(ServerSampler(f"http://{host}:1", max_retries=1, pause_s=0.0).start())
    assert caught.value.fatal
    assert f"http://{host}:1 cannot be reached: {why}" in str(caught.value)
    assert "ssl:default" not in str(caught.value)
    assert "start the server, or correct the URL" in str(caught.value)


def test_facts_name_the_server():
    """The facts say what is served and its limits, and that processed log-probs were proved."""
    facts = against(Settings(), started)
    assert facts["served_model"] == "fake"
    assert facts["max_model_len"] == 4096
    assert facts["logprobs_mode"] == "processed_logprobs"
    assert facts["engine_version"] == "0.0.faulty"


def test_the_context_limit_is_kept_here():
    """max_tokens shrinks to the room that is left, and a prompt without room is refused without asking."""
    settings = Settings(max_model_len=8)

    async def use(sampler: ServerSampler) -> Any:
        await SAMPLE(sampler)
        with pytest.raises(OutsideError, match=r"has 8 tokens .* max_model_len is 8") as caught:
            await sampler.sample(SampleRequest("r", list(range(8)), max_tokens=4))
        assert not caught.value.retryable

    against(settings, use)
    assert settings.requests[-1]["max_tokens"] == 5


def test_every_setting_is_sent():
    """Nothing is left to a server's own defaults."""
    settings = Settings()
    against(settings, SAMPLE, sampling={"temperature": 0.5, "top_k": -1})
    sent = settings.requests[-1]
    assert sent["temperature"] == 0.5
    assert (sent["top_p"], sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)


def test_settings_and_urls_are_checked():
    """An unknown sampling setting names the nearest; an endpoint must be a URL."""
    with pytest.raises(UsageError, match="temperature"):
        ServerSampler("http://x", sampling={"temprature": 1})
    with pytest.raises(UsageError, match="http://localhost"):
        ServerSampler("localhost")
