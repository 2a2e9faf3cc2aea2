"""collect against a real HTTP server that misbehaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest

import gymdata
from gymdata.commands.collect.run import collect
from gymdata.commands.collect.settings import SAMPLED, CollectConfig
from gymdata.errors import StoreError, UsageError
from tests.collect.saved_rows import rows_of
from tests.faulty_server import Settings

pytestmark = pytest.mark.torch


@pytest.fixture
def settings(tasks: Callable[..., Path], tmp_path: Path, served: dict[str, Any]) -> dict[str, Any]:
    """A collect of 4 tasks × 3 over HTTP, with quick retries."""
    own = {"num_rollouts": 3, "retries": 1, "reward": ["numeric"]}
    return {"tasks": str(tasks(4)), "output": tmp_path / "run", **served, **own}


def test_a_group_is_one_request(server: Any, settings: dict[str, Any]) -> None:
    """Over HTTP the three rollouts of a task are one request with n=3, and each is a row with its own seed's ids. The end
    of an assistant message in the chat template ends a turn, whatever the served checkpoint stops at."""
    at = Settings()
    summary = collect(endpoint=server(at), **settings)
    assert (summary.rollouts, summary.exit_code) == (12, 0)
    end_of_turn = 2  # <|im_end|>
    assert [(r["n"], end_of_turn in r["stop_token_ids"]) for r in at.requests if r["n"] > 1] == [(3, True)] * 4
    assert rows_of(settings["output"])[0]["policy_hash"] == "served:fake"


def test_a_dry_run_asks_every_server_for_its_models(server: Any, settings: dict[str, Any]) -> None:
    """Nothing is sampled and nothing is written; a server that has another model is refused by the name of its own."""
    both = [Settings(), Settings()]
    urls = [server(at) for at in both]
    planned = collect(endpoint=urls, dry_run=True, **settings)
    assert (planned.rollouts_wanted, [at.requests for at in both]) == (12, [[], []])
    with pytest.raises(UsageError, match="serves fake, not other"):
        collect(endpoint=urls, dry_run=True, **{**settings, "model": "other"})
    assert not settings["output"].exists()


def test_a_setting_that_is_newer_than_the_run_had_its_default(server: Any, settings: dict[str, Any]) -> None:
    """A run.json that lacks sampling settings is resumed with their defaults, and refused with another value."""
    url = server(Settings())
    collect(endpoint=url, **{**settings, "num_rollouts": 2})
    run_json = settings["output"] / "run.json"
    facts = json.loads(run_json.read_text())
    for name in ("repetition_penalty", "min_p", "max_turns"):
        del facts["identity"][name]
    run_json.write_text(json.dumps(facts))
    with pytest.raises(StoreError, match=r"min_p: run has 0\.0, now 0\.5"):
        collect(endpoint=url, min_p=0.5, **settings)
    assert collect(endpoint=url, **settings).rollouts == 12


def test_any_sampling_parameter_of_vllm_reaches_it_and_is_part_of_the_run(
    server: Any, settings: dict[str, Any]
) -> None:
    """``sampling.KEY`` is in each request and in the identity; what may change the distribution of tokens is L304."""
    at = Settings()
    url = server(at)
    collect(endpoint=url, **settings, sampling={"stop": ["."], "stop_token_ids": [7]})
    assert [r["stop"] for r in at.requests if r.get("n") == 3] == [["."]] * 4
    assert all(7 in r["stop_token_ids"] for r in at.requests if r.get("n") == 3)
    identity = json.loads((settings["output"] / "run.json").read_text())["identity"]
    assert identity["sampling"] == {"stop": ["."], "stop_token_ids": [7]}
    assert "L304" not in gymdata.validate(settings["output"]).by_code
    with pytest.raises(StoreError, match=r"sampling\.bad_words: run has None, now \['no'\]"):
        collect(endpoint=url, **settings, sampling={"stop": ["."], "stop_token_ids": [7], "bad_words": ["no"]})
    settings["output"] = settings["output"].with_name("biased")
    collect(endpoint=url, **settings, sampling={"bad_words": ["no"]})
    assert gymdata.validate(settings["output"]).by_code["L304"]


def test_a_new_sampling_parameter_is_one_field(server: Any, settings: dict[str, Any]) -> None:
    """Marked as one, it is in the requests and the identity; a run that is older than the field had its default."""

    class Newer(CollectConfig):
        xtc_probability: Annotated[float, SAMPLED] = 0.0

    at = Settings()
    url = server(at)
    collect(endpoint=url, **{**settings, "num_rollouts": 2})
    with pytest.raises(StoreError, match=r"sampling\.xtc_probability: run has None, now 0\.5"):
        collect(config=Newer(endpoint=[url], xtc_probability=0.5, **settings))
    assert collect(config=Newer(endpoint=[url], **settings)).rollouts == 12
    other = Newer(endpoint=[url], xtc_probability=0.5, **{**settings, "output": settings["output"].with_name("other")})
    collect(config=other)
    assert at.requests[-1]["xtc_probability"] == 0.5
    assert gymdata.validate(str(other.output)).by_code["L304"]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("top_p", "--top-p gives it"),
        ("max_tokens", "--max-tokens gives it"),
        ("prompt", "gymdata decides it"),
        ("logit_bais", "unknown key 'logit_bais'"),
    ],
)
def test_a_sampling_parameter_of_another_name_is_refused(
    settings: dict[str, Any], policy: str, key: str, message: str
) -> None:
    """One name for one thing: the flag is named. What vLLM has not is known in process; a server may have others."""
    with pytest.raises(UsageError, match=message):
        collect(**{**settings, "model": policy}, sampling={key: 1})


def test_empty_generations_are_kept_and_counted(server: Any, settings: dict[str, Any]) -> None:
    """A model that says nothing is no fault; the summary counts it and validate names it (T212)."""
    summary = collect(endpoint=server(Settings(mode="empty", skip=2)), **settings)
    assert (summary.rollouts, summary.empty_generations, summary.exit_code) == (12, 12, 0)
    assert ("empty generations", 12) in summary.rows()
    assert gymdata.validate(settings["output"]).by_code["T212"] == 12
