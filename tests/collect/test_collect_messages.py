"""collect through a server that takes messages only: its prompts are the truth, and a break is kept or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymdata.collect.run import collect
from gymdata.engines.port import Generation, SampleRequest
from gymdata.errors import StoreError, UsageError
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_run_json
from gymdata.validate.run import validate
from tests.collect.fake_parts import END, ROLE, FakeSampler, add_or_answer
from tests.collect.saved_rows import failures_of, rows_of
from tests.faulty_server import Settings

pytestmark = pytest.mark.torch

Play = Callable[..., tuple[Any, list[dict[str, Any]]]]


class Inserting(FakeSampler):
    """Reads a token more at the beginning of each prompt, as a server that writes the history anew may."""

    async def sample(self, request: SampleRequest) -> list[Generation]:
        sampled = await super().sample(request)
        return [dataclasses.replace(g, prompt_token_ids=[399, *g.prompt_token_ids]) for g in sampled]


def test_a_break_is_kept_as_the_engine_reports_it(play: Play, tmp_path: Path, adder: str) -> None:
    """The row has the prompts that were read, and says where they leave what came before."""
    summary, (row,) = play(1, Inserting(add_or_answer), env=adder, seed=1)
    prompts = [prompt.tolist() for prompt in expand_prompts(row["turns"])]
    assert (summary.rollouts, summary.breaks, row["n_breaks"]) == (1, 2, 2)
    assert [prompt[:2] for prompt in prompts] == [[399, ROLE["user"]], [399, 399], [399, 399]]
    assert prompts[0][-2:] == [END, ROLE["assistant"]]
    assert [turn["prefix_length"] for turn in row["turns"]] == [0, 1, 2]
    assert {v.code for v in validate(tmp_path / "run").violations if v.code.startswith("T2")} == {"T200"}


def test_a_break_can_be_refused(play: Play, tmp_path: Path, adder: str) -> None:
    """With --on-break fail the attempt fails with everything sampled in it, and the rollout stays pending."""
    summary, _ = play(1, Inserting(add_or_answer), env=adder, seed=1, on_break="fail")
    assert (summary.rollouts, summary.pending, summary.exit_code) == (0, 1, 1)
    (failure,) = failures_of(tmp_path / "run")
    assert (failure["kind"], failure["place"], len(failure["turns"])) == ("engine", "turn 1", 2)
    assert "leaves what came before at token 1" in failure["message"]


@pytest.fixture
def settings(tasks: Callable[..., Path], tmp_path: Path, served: dict[str, Any]) -> dict[str, Any]:
    return {"tasks": str(tasks(2)), "output": tmp_path / "run", **served, "num_rollouts": 2, "retries": 1}


@pytest.mark.parametrize("way", ["ids", "prefix", "messages"])
def test_run_json_says_how_prompts_are_made(server: Any, settings: dict[str, Any], way: str) -> None:
    """The way that the server proved is on record; rows have the ids that it reports."""
    at = Settings(way=way)
    summary = collect(chat_endpoint=server(at), **settings)
    assert (summary.rollouts, summary.exit_code) == (4, 0)
    assert read_run_json(settings["output"])["engine"]["continuity"] == way
    assert all(r["turns"][0]["prompt_delta_ids"] for r in rows_of(settings["output"]))
    assert [r["n"] for r in at.requests][-2:] == [2, 2]


def test_ids_and_messages_are_never_one_run(server: Any, settings: dict[str, Any]) -> None:
    """A run collected in ids does not go on in messages, and both addresses at once are refused."""
    url = server(Settings())
    collect(endpoint=url, **{**settings, "num_rollouts": 1})
    with pytest.raises(StoreError, match="protocol"):
        collect(chat_endpoint=url, **settings)
    with pytest.raises(UsageError, match="both given"):
        collect(endpoint=url, chat_endpoint=url, **{**settings, "overwrite": True})
