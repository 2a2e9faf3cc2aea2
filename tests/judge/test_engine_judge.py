"""A judge in this process: its template renders the roles, and its words are kept as they are."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest

from gymdata.commands.judge._vllm import EngineJudge
from gymdata.commands.judge.run import judge as run_judge
from gymdata.engines.port import Generation
from gymdata.errors import UsageError
from gymdata.genrm.verdict import parse_last
from gymdata.rollouts.schema import COMPARISONS
from gymdata.store import read_run_json, read_table
from tests.rollout_files import rollout, two_turns, write_run

DATA = Path(__file__).parents[2] / "sample_data"
DRAFT = '{"score_1": 5, "score_2": 1, "ranking": 1}'
FINAL = '{"score_1": 1, "score_2": 5, "ranking": 6}'


def test_a_template_without_the_roles_is_refused(tmp_path, monkeypatch):
    """A template that leaves the responses out would have the judge decide about nothing."""
    pytest.importorskip("transformers")
    from gymdata.chat.template import TransformersChat

    load = TransformersChat.load
    turn = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    plain = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}" + turn + "{% endif %}{% endfor %}"
    monkeypatch.setattr(TransformersChat, "load", lambda path, **kw: load(path, chat_template=plain, **kw))
    with pytest.raises(UsageError, match="both responses"):
        EngineJudge(str(DATA / "policy"))


class Says:
    """A sampler whose only answer is a text, with its end of turn where it was not cut."""

    def __init__(self, judge: EngineJudge, text: str, finish_reason: str) -> None:
        ids = judge.chat.encode(text) + list(judge.chat.end_of_turn_ids[:1]) * (finish_reason == "stop")
        self.generation = Generation([1], ids, [], finish_reason)

    async def sample(self, request):
        return [self.generation]


@pytest.mark.tokenizer
@pytest.mark.parametrize(
    ("opened", "said", "finish_reason", "expected"),
    [
        ("", f"<think>{DRAFT}</think>{FINAL}", "stop", (1, 5, 6)),
        ("", f"<think>{DRAFT} but", "stop", None),
        ("", FINAL, "length", None),
        ("<think>\n", f"{DRAFT}</think>{FINAL}", "stop", (1, 5, 6)),
        ("<think>\n", f"{DRAFT}, so be it", "stop", None),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_a_judge_in_process_shows_what_is_reasoning(
    tmp_path, monkeypatch, opened, said, finish_reason, expected, special
):
    """Its answer keeps the marks of reasoning, special tokens or not, with the one that its prompt opened, and the reason it
    ended for: a draft of a judge in process counts as little as one of a server."""
    pytest.importorskip("vllm")
    from transformers import AutoTokenizer

    from gymdata.chat.template import TransformersChat

    folder = shutil.copytree(DATA / "genrm", tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template + f"{{% if add_generation_prompt %}}{opened}{{% endif %}}"
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    judge = EngineJudge(str(folder))
    assert isinstance(judge.chat, TransformersChat)
    monkeypatch.setattr(judge, "sampler", Says(judge, said, finish_reason))
    answer = asyncio.run(judge.compare([{"role": "user", "content": "2+3?"}], "5", "6", None, 0))
    verdict = parse_last(answer.text, answer.finish_reason)
    assert (verdict and (verdict.score_1, verdict.score_2, verdict.ranking)) == expected
    assert "<|im_end|>" not in answer.text


def two_groups(folder: Path) -> Path:
    """A run of two answers to each of two tasks."""
    rows = [
        rollout(task, n, 0.0, two_turns(1, 40 + n), text=text)
        for task in ("a", "b")
        for n, text in enumerate(("1220", "436"))
    ]
    return write_run(folder / "run", rows)


@pytest.mark.engine
def test_a_judge_in_process_judges_a_run(tmp_path, monkeypatch):
    """Held to the schema, even a policy writes verdicts; raw words and token counts are kept; the next run starts no
    engine. The engine's log, which is there for the case that it dies, is gone with an engine that ended in order."""
    pytest.importorskip("vllm")
    logs, make = [], tempfile.mkstemp

    def making(**given):
        handle, name = make(**given)
        logs.append(Path(name))
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", making)
    run = two_groups(tmp_path)
    settings = {"path": str(run), "genrm": str(DATA / "policy"), "constrain": "on", "max_tokens": 200}
    summary = run_judge(**settings)
    table = read_table(run / "judge-policy", COMPARISONS)
    assert table.num_rows == 4 == summary.comparisons["judged"]
    assert all(raw.lstrip().startswith("{") for raw in table["raw"].to_pylist())
    assert all('"completion_tokens"' in usage for usage in table["usage"].to_pylist())
    assert read_run_json(run / "judge-policy")["engine"]["engine"] == "vllm"
    again = run_judge(**settings)
    assert (again.asked, again.cached) == (0, 4)
    (log,) = [path for path in logs if path.name.startswith("gymdata-engine-")]
    assert not log.exists()


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.full
@pytest.mark.timeout(1200)  # three engines start
def test_replicas_on_ray_judge_as_the_engine_in_this_process(tmp_path):
    """Two engines on a Ray that the command starts and stops: the same words and rewards."""
    pytest.importorskip("vllm")
    ray = pytest.importorskip("ray")
    run = two_groups(tmp_path)
    settings = {"path": str(run), "genrm": str(DATA / "policy"), "constrain": "on", "max_tokens": 200}
    many = run_judge(**settings, replicas=2, replica={"num_cpus": 0.5}, output=tmp_path / "many")
    assert not ray.is_initialized()
    one = run_judge(**settings, output=tmp_path / "one")
    tables = [read_table(tmp_path / name, COMPARISONS).to_pylist() for name in ("many", "one")]
    assert tables[0] == tables[1]
    assert (many.asked, one.asked) == (4, 4)
