"""Real vLLM, in process and behind HTTP."""

from __future__ import annotations

import asyncio
import random

import pytest

from gymdata.engines._vllm import VllmSampler
from gymdata.engines.port import SampleRequest
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import OutsideError, UsageError

pytestmark = pytest.mark.engine


def requests(count: int, vocab: int, n: int = 1) -> list[SampleRequest]:
    """Prompts of 3 to 120 ids, each with its own seed."""
    rng = random.Random(0)
    prompts = [[rng.randrange(5, vocab) for _ in range(3 + 13 * (i % 10))] for i in range(count)]
    return [SampleRequest(f"r{i}", p, max_tokens=16, seed=100 * i, n=n) for i, p in enumerate(prompts)]


async def all_of(sampler, wanted):
    return await asyncio.gather(*(sampler.sample(r) for r in wanted))


def test_both_engines_give_the_same_rows(vllm_sampler, vllm_server):
    """In float32, with seeds, ids, log-probs, alternatives and finish reasons are equal to the last bit."""
    wanted = requests(60, 150, n=2)

    async def over_http():
        sampler = ServerSampler(vllm_server, "sample-policy", sampling={"top_logprobs": 2})
        try:
            facts = await sampler.start()
            assert facts["logprobs_mode"] == "processed_logprobs"
            return await all_of(sampler, wanted)
        finally:
            await sampler.close()

    here, there = vllm_sampler.run(all_of(vllm_sampler.sampler, wanted)), asyncio.run(over_http())
    assert [len(generations) for generations in here] == [len(generations) for generations in there] == [2] * 60
    unequal = [
        (request.request_id, n, name, getattr(ours, name), getattr(theirs, name))
        for request, *of_request in zip(wanted, here, there, strict=True)
        for n, (ours, theirs) in enumerate(zip(*of_request, strict=True))
        for name in ("prompt_token_ids", "token_ids", "log_probs", "top_log_probs", "finish_reason", "stop_reason")
        if getattr(ours, name) != getattr(theirs, name)
    ]
    assert unequal == []


def test_a_seed_decides_whatever_runs_beside(vllm_sampler):
    """The same seeds give the same generations in another order, alone or in company."""
    wanted = requests(40, 150)
    together = vllm_sampler.run(all_of(vllm_sampler.sampler, wanted))
    backwards = vllm_sampler.run(all_of(vllm_sampler.sampler, wanted[::-1]))
    assert together == backwards[::-1]
    assert vllm_sampler.run(vllm_sampler.sampler.sample(wanted[7])) == together[7]


def test_prompts_that_begin_alike_are_read_once(vllm_sampler):
    """Of two prompts with 40 ids in common the second finds the first block, 32 ids, in the prefix cache, and both are
    counted."""
    sampler, ids = vllm_sampler.sampler, list(range(60, 100))
    before = sampler.read_tokens, sampler.cached_tokens
    for last in (5, 6):
        vllm_sampler.run(sampler.sample(SampleRequest(f"alike-{last}", [*ids, last], max_tokens=2, seed=1)))
    assert (sampler.read_tokens - before[0], sampler.cached_tokens - before[1]) == (82, 32)


def test_a_generation_has_one_log_prob_a_token(vllm_sampler):
    """Log-probs match ids in number, are never positive, and the sampled token's alternatives are sorted."""
    for (generation,) in vllm_sampler.run(all_of(vllm_sampler.sampler, requests(20, 150))):
        assert len(generation.log_probs) == len(generation.token_ids) == len(generation.top_log_probs)
        assert max(generation.log_probs) <= 0
        assert generation.finish_reason in ("stop", "length")
        for row in generation.top_log_probs:
            assert len(row) == 2
            assert row[0][1] >= row[1][1]


def test_the_stop_token_is_kept(vllm_sampler):
    """A generation that stopped ends with the stop token that was sampled."""
    from gymdata.chat.template import TransformersChat

    chat = TransformersChat.load(vllm_sampler.sampler.model)
    prompt = chat.render([{"role": "user", "content": "What is 12+34?"}], None)
    wanted = [SampleRequest(f"s{i}", prompt, max_tokens=64, seed=i) for i in range(8)]
    stopped = [g for (g,) in vllm_sampler.run(all_of(vllm_sampler.sampler, wanted)) if g.finish_reason == "stop"]
    assert stopped
    assert all(g.token_ids[-1] in chat.stop_token_ids for g in stopped)


def test_a_full_context_is_a_length(vllm_sampler):
    """A generation that reaches the model's context ends by length; a prompt without room is refused, not retried."""
    limit = vllm_sampler.sampler.facts()["max_model_len"]
    (cut,) = vllm_sampler.run(vllm_sampler.sampler.sample(SampleRequest("f", [9] * (limit - 1), 50, seed=1)))
    assert len(cut.token_ids) == 1
    for prompt in ([9] * limit, [], [10**6]):
        with pytest.raises(OutsideError) as caught:
            vllm_sampler.run(vllm_sampler.sampler.sample(SampleRequest("g", prompt, 4)))
        assert not caught.value.retryable
        assert not caught.value.fatal


def test_cancelling_aborts(vllm_sampler):
    """A cancelled task leaves nothing running in the engine."""

    async def main():
        tasks = [asyncio.ensure_future(vllm_sampler.sampler.sample(r)) for r in requests(30, 150)]
        await tasks[0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return vllm_sampler.sampler.unfinished

    assert vllm_sampler.run(main()) == 0


def test_facts_are_complete(vllm_sampler):
    """run.json learns what decides the numbers."""
    facts = vllm_sampler.sampler.facts()
    assert facts["dtype"] == "float32"
    assert facts["logprobs_mode"] == "processed_logprobs"
    assert facts["max_num_seqs"] == 256
    assert facts["kv_cache_tokens"] % facts["block_size"] == 0 < facts["kv_cache_tokens"]
    assert facts["engine_version"]


@pytest.mark.parametrize(("max_num_seqs", "rollouts"), [(1, 2), (8, 12), (None, 384)])
def test_a_request_waits_where_another_ends(policy, max_num_seqs, rollouts):
    """Unless -c is given, half more rollouts are in flight than the engine runs, so that no slot of it stays free."""
    given = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
    assert VllmSampler(policy, engine_args=given).default_concurrency == rollouts


def test_unknown_engine_arguments_name_the_nearest(policy):
    """--set engine.KEY with a wrong key is a usage error, before any process is started."""

    async def start(args):
        sampler = VllmSampler(policy, sampling={}, engine_args=args, seed=None)
        try:
            await sampler.start()
        finally:
            await sampler.close()

    with pytest.raises(UsageError, match="max_model_len"):
        asyncio.run(start({"max_model_lenn": 100}))
    with pytest.raises(UsageError, match=r"refuses|cannot load"):
        asyncio.run(start({"max_model_len": -5}))
    with pytest.raises(UsageError, match="-m/--model"):
        VllmSampler(policy, engine_args={"model": "x"})
