"""An epoch of ``finetune`` whose rollouts a served workflow plays: they are recorded, scored by its result, and trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession, web

from gymdata.cli.main import main
from gymdata.commands.validate.run import validate
from gymdata.rollouts.schema import ROLLOUTS
from gymdata.store import read_table
from tests.servers import ending_as_the_policy, serving

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[2] / "sample_data"
EVALUATOR = """
class Output:
    def __init__(self, id, score, reasoning):
        self.id, self.score, self.reasoning = id, score, reasoning

class Told:
    async def evaluate_item(self, item):
        return Output(item.id, float(item.output_obj.startswith("right")), {})
"""


@pytest.fixture
def workflow() -> Iterator[str]:
    """URL of a workflow that asks its model once, and says of every second rollout that it is right."""

    async def generate(request: web.Request) -> web.Response:
        task = await request.json()
        body = {"model": task["model"], "messages": [{"role": "user", "content": task["prompt"]}]}
        headers = {"Authorization": f"Bearer {task['api_key']}"}
        url = f"{task['base_url']}/chat/completions"
        async with (
            ClientSession(raise_for_status=True) as client,
            client.post(url, json=body, headers=headers) as response,
        ):
            said = (await response.json())["choices"][0]["message"]["content"]
        return web.json_response({"value": f"{'right' if task['rollout_index'] % 2 else 'wrong'}: {said}"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    with serving(app) as url:
        yield f"{url}/generate"


@pytest.mark.timeout(300)
def test_an_epoch_of_a_served_workflow(
    workflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published flags name the policy's server and the result in the workflow's answer; the file's own workflow is noted
    and not read; all tokens that the trainer is given were sampled for the workflow; the same command has nothing to do."""
    monkeypatch.setenv("WORKFLOW_URL", workflow)
    monkeypatch.chdir(tmp_path)
    Path("told.py").write_text(EVALUATOR)
    words = "cp -r {model}/. {output} && wc -l < {data} > {output}/lines"
    config: dict[str, Any] = {
        "llms": {"policy": {"_type": "vllm", "model_name": str(DATA / "policy"), "max_tokens": 8}},
        "workflow": {"_type": "my_workflow", "llm": "policy"},
        "eval": {"general": {"dataset": str(DATA / "tasks" / "train.jsonl")},
                 "evaluators": {"told": {"_type": "told.py:Told"}}},
        "trajectory_builders": {"b": {"_type": "collect", "num_generations": 4,
                                      "agent": str(DATA / "served_workflow.py:run")}},
        "trainer_adapters": {"t": {"_type": "command", "format": "trl-preference", "command": ["sh", "-c", words]}},
        "finetuning": {"reward_function": {"name": "told"}, "algorithm": "dpo", "num_epochs": 1, "limit": 3,
                       "output_dir": "out"},
    }  # fmt: skip
    Path("config.yml").write_text(yaml.safe_dump(config))
    with ending_as_the_policy() as engine:
        command = ["finetune", "--config_file", "config.yml", "--endpoint", engine.url, "--endpoint_timeout", "60"]
        command += ["--result_json_path", "$.value", "--json"]
        assert main(command) == 0, capsys.readouterr().err
        shown = capsys.readouterr()
        assert main(command) == 0
    assert "workflow is not read: trajectory_builders' agent stands in for the workflow" in shown.err
    rollouts = Path("out") / "epoch-001" / "rollouts"
    rows = read_table(rollouts, ROLLOUTS).to_pylist()
    assert len(rows) == 12
    for row in rows:
        assert row["reward"] == row["rollout_index"] % 2
        assert row["n_turns"] == 1
        assert json.loads(row["extra"])["environment"]["output_obj"].endswith(f": {row['messages'][-1]['content']}")
    assert validate(rollouts).ok
    assert int((Path(json.loads(shown.out)["policy"]) / "lines").read_text()) > 0
