"""Every command with an output: with another setting or input it is refused, and nothing of what is there has changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gymdata.cli.main import WRITERS, main
from tests.faulty_server import Settings, build
from tests.finetune.parts import by_rule, counting
from tests.judge_server import Behaviour, judge_server
from tests.model_files import write_adapter
from tests.rollout_files import rollout, write_run
from tests.servers import serving
from tests.train.trainers.running import gymdata

pytestmark = [pytest.mark.torch, pytest.mark.tokenizer]

SAMPLE = Path(__file__).parents[2] / "sample_data"
_SERVED = "--endpoint {engine} -m fake --tokenizer {policy}"
_TRAIN = "-m {policy} -o {out} --set max_steps=1"
#: Command → its words, and what the second call has in addition (in place of a text before ``→``).
COMMANDS = {
    "collect": (f"collect {{tasks}} -o {{out}} {_SERVED} -r 1 --reward numeric --seed 1", "--temperature 0.5"),
    "collect, an edited task": (f"collect {{tasks}} -o {{out}} {_SERVED} -r 1 --seed 1", "{tasks} → {edited}"),
    "record": (f"record -o {{out}} --port 0 {_SERVED} -- {{agent}}", "-o {out} → -o {out} --temperature 0.5"),
    "eval": ("eval fake {tasks} -o {out} --endpoint {engine} --tokenizer {policy} --reward numeric", "--seed 9"),
    "audit": ("audit {clean} -m {policy} -o {out} -n 2", "--seed 5"),
    "score": ("score {run} -o {out} --reward regex:4", "{run} → {clean}"),
    "judge": ("judge {run} -o {out} --endpoint {judge} -m judge", "-m judge → -m other"),
    "filter": ("filter {run} -o {out} --where reward>0.4", "reward>0.4 → reward>0.5"),
    "filter, other rollouts": ("filter {run} -o {out} --where reward>0.4", "{run} → {clean}"),
    "filter, several inputs": ("filter {run} {clean} -o {out}", "--dedupe"),
    "pairs": ("pairs {run} -o {out}", "--min-margin 0.9"),
    "experience": ("experience {run} -o {out} --estimator rloo", "rloo → grpo"),
    "import": ("import {answers} -o {out}", "{answers} → {others}"),
    "import, rendered": ("import {answers} -o {out} -m {policy}", "{policy} → {student}"),
    "import of pairs": ("import {choices} -o {out}", "{choices} → {preferred}"),
    "export": ("export {run} -o {out}/x.jsonl --format nemo-gym", "{run} → {clean}"),
    "train-sft, rollouts": (f"train-sft {{clean}} {_TRAIN}", "--set learning_rate=0.1"),
    "train-sft": (f"train-sft {{answers}} {_TRAIN}", "-m {policy} → -m {student}"),
    "train-sft, other rows": (f"train-sft {{answers}} {_TRAIN}", "{answers} → {others}"),
    "train-sft, a setting": (f"train-sft {{answers}} {_TRAIN}", "--set learning_rate=0.1"),
    "train-dpo": (f"train-dpo {{choices}} {_TRAIN}", "-m {policy} → -m {student}"),
    "train-kto": (f"train-kto {{labels}} {_TRAIN}", "-m {policy} → -m {student}"),
    "train-reward": (f"train-reward {{choices}} {_TRAIN} --split 0", "{choices} → {preferred}"),
    "train-value": (f"train-value {{experiences}} {_TRAIN} --split 0", "--set learning_rate=0.1"),
    "train-rl": (f"train-rl {{experiences}} {_TRAIN}", "--set learning_rate=0.1"),
    "finetune": ("finetune {finetune}", "-o limit 2"),
    "sweep": ("sweep {sweep} -o {out}", "{sweep} → {swept}"),
    "query": ("query select(1) {run} -o {out}.csv", "select(1) → select(2)"),
    "validate --fix": ("validate {run} --fix drop -o {out}.jsonl", "{run} → {clean}"),
    "view --export": ("view {run} --export {out}.html", "{run} → {clean}"),
}


#: Of each way to write, one.
REPRESENTATIVES = {"collect, an edited task", "score", "filter", "import", "export", "train-sft", "train-dpo"}
AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


def lines(file: Path, *rows: dict[str, object]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("made")
    rows = [
        rollout(f"t{task}", n, float(n), [([1, 5 + task], [40 + n, 2])], text=f"q={n + 1} t{task}r{n}")
        for task in range(4)
        for n in range(2)
    ]
    asked = [f"How much is 2+{n}?" for n in range(4)]
    tasks = [{"task_id": f"t{n}", "prompt": text, "answer": str(2 + n)} for n, text in enumerate(asked)]
    step = f"filter {folder / 'run'} -o {{output}}/eval --where 'reward >= {{least}}'"
    for name, more in (("sweep", ""), ("swept", " --seed 1")):
        steps = {"steps": [step + more], "grid": {"least": [0, 1]}, "result": "{output}/eval"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(steps))
    (folder / "agent.py").write_text(AGENT)
    files = {
        "run": str(write_run(folder / "run", rows)),
        "clean": str(SAMPLE / "rollouts" / "clean.jsonl"),
        "policy": str(SAMPLE / "policy"),
        "student": str(SAMPLE / "student"),
        "tasks": lines(folder / "tasks.jsonl", *tasks),
        "edited": lines(folder / "edited.jsonl", {**tasks[0], "prompt": "Another"}, *tasks[1:]),
        "agent": f"{sys.executable} {folder / 'agent.py'}",
        "answers": lines(folder / "answers.jsonl", *({"prompt": text, "completion": "4"} for text in asked)),
        "others": lines(folder / "others.jsonl", *({"prompt": text, "completion": "5"} for text in asked)),
        "labels": lines(
            folder / "labels.jsonl", *({"prompt": t, "completion": "4", "label": n == 2} for n, t in enumerate(asked))
        ),
        "choices": lines(folder / "a.jsonl", *({"prompt": text, "chosen": "4", "rejected": "5"} for text in asked)),
        "preferred": lines(folder / "b.jsonl", *({"prompt": text, "chosen": "4", "rejected": "6"} for text in asked)),
        "adapter": str(write_adapter(folder / "adapter")),
        "experiences": str(folder / "experiences"),
        "sweep": str(folder / "sweep.yaml"),
        "swept": str(folder / "swept.yaml"),
    }
    assert main(["experience", files["run"], "-o", files["experiences"], "--estimator", "rloo"]) == 0
    with judge_server(Behaviour()) as judge, serving(build(Settings(vocab=51))) as engine:
        yield {**files, "judge": judge, "engine": engine}


def held(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_every_command_with_an_output_is_here() -> None:
    assert {words.split()[0] for words, _ in COMMANDS.values()} >= WRITERS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in REPRESENTATIVES else pytest.mark.full) for name in COMMANDS]
)
def test_a_refused_rerun_changes_nothing(
    name: str, made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the output, change a setting or an input, run it again: exit code 2, and every file's name and bytes as before,
    also beside the output."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "work" / "out"
    out.parent.mkdir()
    made = {**made, "finetune": str(by_rule(tmp_path, out, counting(), algorithm="x", limit=3))}
    words, change = (text.format(**made, out=out) for text in COMMANDS[name])
    old, arrow, new = change.partition(" → ")
    assert gymdata(*words.split()).returncode in (0, 1)
    before = held(out.parent)
    again = gymdata(*(words.replace(old, new) if arrow else f"{words} {change}").split())
    assert again.returncode == 2, again.stderr
    assert held(out.parent) == before, again.stderr
