"""What collect says at its end: what the policy did that is odd, and what slowed the run down."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gymdata.collect import spent
from gymdata.collect.run import collect
from gymdata.collect.spent import Spent
from tests.collect.fake_parts import FakeSampler, parts
from tests.faulty_server import Settings

Tasks = Callable[..., Path]


def slowed(
    engine: float, environment: float, reward: float, *, wall: float = 10.0, concurrency: int = 256
) -> str | None:
    """Of a run whose engine takes 100 requests at once."""
    times = Spent()
    times.seconds = {"engine": engine, "environment": environment, "reward": reward}
    return times.slowed_by(wall, 100, concurrency)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ((900.0, 0.0, 10.0), None),
        (
            (100.0, 10.0, 0.0),
            "few requests in flight: 10 on average, the engine takes 100; more tasks or rollouts per task fill it",
        ),
        ((100.0, 300.0, 0.0), "slow environment: 75% of the time that rollouts waited"),
        ((100.0, 20.0, 480.0), "slow rewards: 80% of the time that rollouts waited"),
        ((0.0, 0.0, 0.0), None),
    ],
)  # fmt: skip
def test_the_slowest_part_is_named(seconds: tuple[float, float, float], line: str | None) -> None:
    """By where rollouts waited most; of the engine, by how many requests it had."""
    assert slowed(*seconds) == line


def test_a_low_concurrency_is_named() -> None:
    """Where -c is what keeps requests few, that is what to change; a full engine, or -c that fills it, is no finding."""
    line = slowed(80.0, 0.0, 0.0, concurrency=8)
    assert line == "few requests in flight: 8 on average, the engine takes 100; raise -c above 8"
    assert slowed(530.0, 0.0, 0.0, concurrency=54) == (
        "few requests in flight: 53 on average, the engine takes 100; raise -c above 54"
    )
    assert slowed(530.0, 0.0, 0.0, concurrency=100) is None


@pytest.mark.parametrize("concurrency", [2, 300])
def test_what_a_server_takes_is_not_taken_from_the_concurrency(
    server: Callable[[Settings], str], tasks: Tasks, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
) -> None:  # fmt: skip
    """A server does not say how many requests it runs at once, vLLM's default is 256: with two in flight, -c is too low."""
    monkeypatch.setattr(spent, "SHORTEST_S", 0.0)
    done = collect(
        tasks=str(tasks(20)), endpoint=server(Settings(latency=0.05)), model="fake", tokenizer=policy,
        output=tmp_path / "run", num_rollouts=1, max_tokens=4, concurrency=concurrency,
    )  # fmt: skip
    hint = "raise -c above 2" if concurrency == 2 else "more tasks or rollouts per task fill it"
    assert re.fullmatch(rf"few requests in flight: \d+ on average, the engine takes 256; {hint}", str(done.slowed_by))


def test_a_short_run_says_nothing() -> None:
    """Below five seconds most of a run is its start and its end."""
    assert slowed(400.0, 0.0, 0.0, wall=4.9) is None


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


def test_odd_behavior_is_named_at_the_end(tasks: Tasks, tmp_path: Path) -> None:
    """Eight rollouts of one reward are B806 in the report, not again when nothing was to do, and none that differ."""
    settings = {"tasks": str(tasks(8)), "output": tmp_path / "run"}
    (tmp_path / "zero.py").write_text("def zero(completions, **_):\n    return [0.0 for _ in completions]\n")
    made = parts(FakeSampler(), rewards=[f"{tmp_path / 'zero.py'}:zero"])
    summary = collect(parts=made, **settings)
    assert summary.to_dict()["behavior"]["B806"] == "reward 0 for all 8 scored rollouts"
    assert "B806: reward 0 for all 8 scored rollouts (gymdata validate --explain B806)" in summary.remarks()
    assert collect(parts=made, **settings).remarks() == []
