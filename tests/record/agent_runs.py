"""``collect --agent`` over a scripted engine, and small agents that call it.

``python -m tests.record.agent_runs TASKS RUN SCRIPT SETTINGS`` collects in a process of its own; what the engine read and
sampled is then RUN.sampled.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gymdata.collect.report import CollectSummary
from gymdata.collect.run import collect
from gymdata.collect.settings import CollectConfig
from gymdata.collect.setup import Parts
from gymdata.record.agent import load_agent
from gymdata.rewards import load_rewards
from gymdata.rewards.scheduler import Weighted
from tests.collect.fake_parts import FakeSampler
from tests.record.recorded_agent import KeptSampler
from tests.record.scripted_engine import Letters

#: An agent that sends its prompt, writes the answer to a file, and ends with the code that the answer's length says.
ASK = """
import json, os, sys, urllib.request
prompt, code = sys.argv[1], int(sys.argv[2])
body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
text = answer["choices"][0]["message"]["content"]
open("answer.txt", "w").write(text)
print("wrote", text)
print("of", os.environ["GYMDATA_TASK"], file=sys.stderr)
sys.exit(code)
"""


def asking(code: int = 0) -> str:
    """The command of an agent that asks once."""
    return f"{sys.executable} -c '{ASK}' {{prompt}} {code}"


def collected(tasks: Any, run: Path, sampler: FakeSampler, **settings: Any) -> CollectSummary:
    """Collect with an agent and a scripted engine."""
    config = CollectConfig.of({"tasks": "-", "output": run, "seed": 3, **settings}, "test")
    rewards = [Weighted(function, weight) for function, weight in load_rewards(config.reward)]
    agent = load_agent(config.agent, config.agent_files, isolate=config.isolate)
    parts = Parts(sampler, Letters(), None, rewards, {"policy": "fake", "policy_hash": "fake-0"}, agent=agent)
    summary = collect(tasks, config=config, parts=parts)
    assert isinstance(summary, CollectSummary)
    return summary


if __name__ == "__main__":
    tasks, run, script, settings = sys.argv[1:]
    sampler = KeptSampler(json.loads(script))
    collected(tasks, Path(run), sampler, **json.loads(settings))
    Path(f"{run}.sampled.json").write_text(json.dumps(sampler.sampled))
