"""collect on a real vLLM engine: in this process, and behind HTTP in ids and in messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.collect.run import collect, load_parts
from gymdata.collect.settings import CollectConfig
from gymdata.engines.servers.chat_server import ChatServerSampler
from gymdata.store import read_run_json, read_table
from gymdata.validate.run import validate
from tests.collect.saved_rows import failures_of, log_probs_of, rows_of, samples_of
from tests.engine_fixtures import InProcess

pytestmark = pytest.mark.engine
SAMPLE = Path(__file__).parents[2] / "sample_data"
TOOLS: dict[str, Any] = {
    "tasks": str(SAMPLE / "tasks" / "train.jsonl"), "env": f"{SAMPLE / 'calculator.py'}:Calculator",
    "reward": ["numeric"], "max_tokens": 48, "seed": 1,
}  # fmt: skip
SMALL = {"limit": 12, "num_rollouts": 4}


def served(policy: str) -> dict[str, Any]:
    return {"model": "sample-policy", "tokenizer": policy}


@pytest.fixture(scope="module")
def there(vllm_server: str, policy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the server, in ids."""
    run = tmp_path_factory.mktemp("there")
    collect(endpoint=vllm_server, output=run, **TOOLS, **SMALL, **served(policy))
    return run


def assert_same_samples(one: Path, other: Path) -> None:
    """Log-probabilities within 1e-4."""
    rows, others = rows_of(one), rows_of(other)
    assert samples_of(rows) == samples_of(others)
    np.testing.assert_allclose(log_probs_of(rows), log_probs_of(others), atol=1e-4)


def test_an_engine_and_a_server_give_the_same_tool_rollouts(
    vllm_sampler: InProcess, there: Path, policy: str, tmp_path: Path
) -> None:
    """Multi-turn tool rollouts of the sample policy have no break and no violation, and some are right; the same tasks and
    seed give the same ids over HTTP, where a group is one request."""
    summary = vllm_sampler.collect(model=policy, output=str(tmp_path / "run"), **TOOLS, **SMALL)
    assert (summary.rollouts, summary.breaks, summary.exit_code) == (48, 0, 0)
    assert validate(tmp_path / "run").errors == 0
    rows = rows_of(tmp_path / "run")
    assert any(r["n_turns"] > 1 and r["reward"] == 1.0 for r in rows)
    used = next(r for r in rows if r["n_turns"] > 1)
    call = json.loads(used["messages"][1]["tool_calls"])[0]
    assert call["function"]["name"] == "calculate"
    assert used["messages"][2]["role"] == "tool"
    assert_same_samples(tmp_path / "run", there)


def test_a_vllm_server_reads_the_ids_that_go_with_the_messages(
    vllm_server: str, there: Path, policy: str, tmp_path: Path
) -> None:
    """Multi-turn tool rollouts over the chat route have no break, and are those of the ids route, token for token."""
    run = tmp_path / "chat"
    summary = collect(chat_endpoint=vllm_server, output=run, **TOOLS, **SMALL, **served(policy))
    assert (summary.rollouts, summary.breaks, summary.exit_code) == (48, 0, 0)
    assert read_run_json(run)["engine"]["continuity"] == "ids"
    assert validate(run).errors == 0
    assert_same_samples(run, there)


@pytest.mark.full
def test_a_vllm_server_with_messages_only_breaks_honestly(vllm_server: str, policy: str, tmp_path: Path) -> None:
    """Told messages only, the server tokenises again: rollouts that it rewrote are breaks whose cause is re-tokenising or
    re-templating, every other one is as sampled, and those with a break can be refused."""

    def collected(output: Path, **settings: Any) -> Any:
        config = CollectConfig.load(
            None, {**TOOLS, "limit": 40, "num_rollouts": 8, **served(policy), "chat_endpoint": vllm_server, **settings}
        )
        parts = load_parts(config)
        parts.sampler = ChatServerSampler(
            vllm_server, "sample-policy", ways=("messages",), sampling=parts.sampler.sampling.request_fields()
        )
        return collect(config=config, parts=parts, output=output)

    summary = collected(tmp_path / "kept")
    rows = read_table(tmp_path / "kept").to_pylist()
    broken = {r["rollout_id"] for r in rows if r["n_breaks"]}
    assert (len(rows), summary.breaks, summary.exit_code) == (320, len(broken), 0)
    assert 0 < len(broken) < 100
    report = validate(tmp_path / "kept", tokenizer=policy)
    errors = [v for v in report.violations if v.severity == "error"]
    assert {v.rollout_id for v in errors} == broken
    assert {v.code for v in errors} <= {"T201", "T202"}
    collected(tmp_path / "refused", on_break="fail", max_attempts=1)
    refused = read_table(tmp_path / "refused").to_pylist()
    kept, whole = ({(r["task_id"], r["rollout_index"]) for r in some} for some in (refused, rows))
    assert kept == whole - {(r["task_id"], r["rollout_index"]) for r in rows if r["n_breaks"]}
    assert {"break: the prompt" in json.dumps(f) for f in failures_of(tmp_path / "refused")} == {True}
