"""A reward server: what it is sent and what becomes of its rewards; how it fails is in ``tests/test_faults.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.commands.score.run import score
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.schema import SCORES
from gymdata.store import read_run_json, read_table, write_run_json
from tests.rollout_files import rollout, two_turns, write_run
from tests.score.reward_server import PATH, Behaviour, app_of, reward_of
from tests.servers import serving


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def url(behaviour: Behaviour) -> Iterator[str]:
    with serving(app_of(behaviour)) as base:
        yield base + PATH


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four tasks of two rollouts; the text of rollout k of task t is "answer t k"."""
    rows = [rollout(f"t{t}", k, 0.0, two_turns(t, 20 + k), text=f"answer {t} {k}") for t in range(4) for k in range(2)]
    return write_run(tmp_path / "run", rows)


def rows_of(run: Path) -> dict[str, dict[str, Any]]:
    return {row["rollout_id"]: row for row in read_table(run / "scores-remote", SCORES).to_pylist()}


def quickly(run: Path, url: str, **settings: Any) -> Any:
    return score(path=str(run), reward_url=url, request_timeout=0.3, request_batch=4, **settings)


def test_every_rollout_gets_the_reward_of_its_text(run: Path, url: str, behaviour: Behaviour) -> None:
    """Queries are whole conversations, prompts their beginnings; each reward lands on its rollout, and lineage holds."""
    summary = quickly(run, url)
    assert (summary.scored, summary.failed, summary.exit_code) == (8, 0, 0)
    seen = {q: p for body in behaviour.requests for q, p in zip(body["queries"], body["prompts"], strict=True)}
    assert all(set(body) == {"queries", "prompts"} and len(body["queries"]) <= 4 for body in behaviour.requests)
    query = "user: question t3\n\nassistant: calling\n\ntool: 42\n\nassistant: answer 3 1"
    assert seen[query] == "user: question t3"
    row = rows_of(run)["t3-1"]
    assert (row["value"], row["status"], row["source"]) == (reward_of(query), "scored", f"url:{url}")
    assert read_run_json(run / "scores-remote")["parents"][0]["run_id"] == "run-1"


def test_a_server_that_is_not_there_leaves_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No folder of scores, and a message with what to do."""
    assert main(["score", str(run), "--reward-url", "http://127.0.0.1:9/x", "--set", "retries=0"]) == 3
    assert "is the reward server up" in capsys.readouterr().err
    assert not (run / "scores-remote").exists()


def test_a_path_that_the_server_does_not_have_ends_with_3(run: Path, url: str) -> None:
    """404 is a wrong URL, not a rollout's fault."""
    with pytest.raises(OutsideError, match="404"):
        quickly(run, url + "/nothing")


@pytest.mark.parametrize("given", ["localhost", "ftp://x", "http://me:secret@localhost/x"])
def test_a_url_that_is_none_is_a_usage_error(run: Path, given: str) -> None:
    """What cannot be asked, or would put a password into files, is refused."""
    with pytest.raises(UsageError, match="URL"):
        quickly(run, given)


def test_the_text_of_the_saved_ids_is_sent(tmp_path: Path, url: str, behaviour: Behaviour) -> None:
    """With a tokenizer, the query is the decoded prompt and generation of the last turn, special tokens and all."""
    from tokenizers import Tokenizer, decoders, models

    pieces = {**{f"w{k}": k for k in range(40)}, "<e>": 40}
    made = Tokenizer(models.WordLevel(pieces, unk_token="w0"))
    made.decoder = decoders.Fuse()
    (tmp_path / "tok").mkdir()
    made.save(str(tmp_path / "tok/tokenizer.json"))
    run = write_run(tmp_path / "run", [rollout("t", 0, None, two_turns(5, 33)), rollout("t", 1, None, [])])
    quickly(run, url, tokenizer=str(tmp_path / "tok"))
    (body,) = behaviour.requests
    assert body["queries"][0] == "w1w5w10w11w2w30w31w33w2"
    assert body["prompts"][0] == "w1w5"
    assert body["queries"][1].startswith("user: question t")


def test_the_tokenizer_of_a_served_policy_is_found_where_the_server_reads_it(
    run: Path, url: str, behaviour: Behaviour, policy: str
) -> None:
    """run.json's ``served_from``, where that folder is on this machine: its texts are sent, not the messages."""
    write_run_json(run, read_run_json(run) | {"engine": {"served_from": policy}})
    quickly(run, url)
    assert not any(query.startswith("user: ") for body in behaviour.requests for query in body["queries"])


@pytest.mark.parametrize("by", ["a list", "commas", "the command line"])
def test_several_servers_count_their_mean(run: Path, url: str, by: str) -> None:
    """Each server's rewards are a part with its number, and the total is their mean, beside other rewards."""
    with serving(app_of(Behaviour(instead={"answer": 7.0}))) as base:
        urls = [url, base + PATH]
        if by == "the command line":
            flags = [word for one in urls for word in ("--reward-url", one)]
            assert main(["score", str(run), *flags, "--reward", "regex:answer", "--name", "both"]) == 0
        else:
            given: Any = urls if by == "a list" else ",".join(urls)
            score(path=str(run), reward_url=given, reward=["regex:answer"], name="both")
    rows = read_table(run / "scores-both", SCORES).to_pylist()
    value = {(r["rollout_id"], r["name"]): r["value"] for r in rows}
    assert value["t1-0", "remote_2"] == 7.0
    assert value["t1-0", "both"] == 1.0 + (value["t1-0", "remote"] + 7.0) / 2
    assert read_run_json(run / "scores-both")["rewards"][1]["weight"] == 0.5


def test_one_server_twice_is_refused(run: Path, url: str) -> None:
    """It would only ask the same server the same twice."""
    with pytest.raises(UsageError, match="two rewards are named 'remote'"):
        score(path=str(run), reward_url=[url, url])


def test_a_url_is_a_reward_among_others(run: Path, url: str) -> None:
    """--reward takes a server's URL with a weight, beside named rewards."""
    score(path=str(run), reward=["regex:answer", f"{url}=0.5"], name="both")
    rows = read_table(run / "scores-both", SCORES).to_pylist()
    value = {(r["rollout_id"], r["name"]): r["value"] for r in rows}
    assert value["t1-0", "both"] == 1.0 + 0.5 * value["t1-0", "remote"]
