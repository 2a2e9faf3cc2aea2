"""What collect says at its end: what the policy did that is odd, and what slowed the run down."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.collect import spent
from gymdata.collect.run import collect
from gymdata.collect.spent import Spent, crowded
from tests.faulty_server import Settings

Tasks = Callable[..., Path]
#: Of an engine that takes 100 requests at once.
FEW = "few requests in flight: {} on average, the engine takes 100"


@pytest.mark.parametrize(
    ("seconds", "wall", "concurrency", "line"),
    [
        ((900.0, 0.0, 10.0), 10.0, 256, None),
        ((0.0, 0.0, 0.0), 10.0, 256, None),
        ((100.0, 300.0, 0.0), 10.0, 256, "slow environment: 75% of the time that rollouts waited"),
        ((100.0, 20.0, 480.0), 10.0, 256, "slow rewards: 80% of the time that rollouts waited"),
        ((100.0, 10.0, 0.0), 10.0, 256, f"{FEW.format(10)}; more tasks or rollouts per task fill it"),
        ((80.0, 0.0, 0.0), 10.0, 8, f"{FEW.format(8)}; raise -c above 8"),
        ((530.0, 0.0, 0.0), 10.0, 54, f"{FEW.format(53)}; raise -c above 54"),
        ((530.0, 0.0, 0.0), 10.0, 100, None),
        ((400.0, 0.0, 0.0), 4.9, 256, None),
    ],
)
def test_the_slowest_part_is_named(
    seconds: tuple[float, float, float], wall: float, concurrency: int, line: str | None
) -> None:
    """By where rollouts waited most; of the engine, by how many requests it had. Where -c is what keeps them few, that is
    what to change; a full engine, or -c that fills it, is no finding. Below five seconds most of a run is start and end."""
    times = Spent()
    times.seconds = dict(zip(("engine", "environment", "reward"), seconds, strict=True))
    assert times.slowed_by(wall, 100, concurrency) == line


@pytest.mark.parametrize(
    ("facts", "rollouts", "max_tokens", "needed"),
    [
        ({}, 300, 60, None),  # six rollouts share a prompt of 40 tokens: 17 prompts and 100 answers
        ({"prefix_caching": False}, 300, 60, "100 requests at once may need 10,000"),
        ({}, 300, 93, None),
        ({}, 300, 94, "100 requests at once may need 10,080"),
        ({}, 50, 190, None),
        ({}, 50, 194, "50 requests at once may need 10,060"),
        ({}, 300, None, None),
        ({"kv_cache_tokens": None}, 300, 100, None),
    ],
)
def test_requests_that_the_cache_of_the_engine_cannot_hold_are_named(
    facts: dict[str, Any], rollouts: int, max_tokens: int | None, needed: str | None
) -> None:
    """Before the first one is sampled; where an engine behind HTTP does not say what it holds, nothing is said."""
    engine = {"device": "cpu", "kv_cache_tokens": 9_999, "max_num_seqs": 100, "prefix_caching": True, **facts}
    line = f"the KV cache holds 9,999 tokens, and {needed}: some will wait (raise VLLM_CPU_KVCACHE_SPACE (GiB), or lower -c)"
    assert crowded(engine, rollouts, 6, 40, max_tokens) == (line if needed else None)


@pytest.mark.parametrize("concurrency", [2, 300])
def test_what_a_server_takes_is_not_taken_from_the_concurrency(
    server: Callable[[Settings], str], tasks: Tasks, tmp_path: Path, served: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, concurrency: int,
) -> None:  # fmt: skip
    """A server does not say how many requests it runs at once, vLLM's default is 256: with two in flight, -c is too low."""
    monkeypatch.setattr(spent, "SHORTEST_S", 0.0)
    url = server(Settings(latency=0.05))
    done = collect(str(tasks(20)), endpoint=url, output=tmp_path / "run", concurrency=concurrency, **served)
    hint = "raise -c above 2" if concurrency == 2 else "more tasks or rollouts per task fill it"
    assert re.fullmatch(rf"few requests in flight: \d+ on average, the engine takes 256; {hint}", str(done.slowed_by))


def test_waits_are_counted_however_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request for three members counts three times, and so does one that fails."""
    now = [10.0]
    monkeypatch.setattr(spent.time, "monotonic", lambda: now[0])
    times = Spent()
    with times.on("engine", 3):
        now[0] += 2.0

    def fail() -> None:
        with times.on("environment"):
            now[0] += 0.5
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert times.seconds == {"engine": 6.0, "environment": 0.5, "reward": 0.0}


def test_odd_behavior_is_named_at_the_end(play: Callable[..., Any], tmp_path: Path) -> None:
    """Eight rollouts of one reward are B806 in the report, not again when nothing was to do, and none that differ."""
    (tmp_path / "zero.py").write_text("def zero(completions, **_):\n    return [0.0 for _ in completions]\n")
    summary, again = (play(8, rewards=[f"{tmp_path / 'zero.py'}:zero"])[0] for _ in range(2))
    assert summary.to_dict()["behavior"]["B806"] == "reward 0 for all 8 scored rollouts"
    assert "B806: reward 0 for all 8 scored rollouts (gymdata validate --explain B806)" in summary.remarks()
    assert again.remarks() == []
