"""The sample judge as a folder, what it learns from, and how it judges what it never saw."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gymdata.commands.judge.groups import MATCH_COLUMNS, final_answer, matches_in
from gymdata.commands.judge.run import judge
from gymdata.genrm.bias import against_rewards
from gymdata.genrm.verdict import parse_last
from gymdata.rollouts.schema import COMPARISONS
from gymdata.sample_data.genrm_comparisons import Comparison, draw_comparison, draw_response, seen
from gymdata.sample_data.make_tasks import WORDINGS, read_pairs, value_of
from gymdata.store import read_table
from tests.rollout_files import rollout, two_turns, write_run

pytestmark = pytest.mark.torch

DATA = Path(__file__).parents[2] / "sample_data"
GENRM = DATA / "genrm"
HELD_OUT = DATA / "tasks" / "heldout.jsonl"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(GENRM)


def comparisons(n: int) -> Iterator[Comparison]:
    draw, held_out = random.Random(5), read_pairs(HELD_OUT)
    for _ in range(n):
        yield draw_comparison(draw, avoid=held_out)


def test_the_folder_is_small_and_names_its_architecture() -> None:
    """At most 3 MB, and a configuration that transformers and vLLM know."""
    assert sum(file.stat().st_size for file in GENRM.iterdir()) <= 3_000_000
    assert json.loads((GENRM / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_it_learns_what_its_template_shows(tokenizer: Any) -> None:
    """A row of training is the template's rendering of its comparison, with the verdict that the parser reads."""
    for comparison in comparisons(50):
        text = "".join(part for _, part in comparison.parts())
        prompt = tokenizer.apply_chat_template(comparison.messages(), add_generation_prompt=True, tokenize=False)
        assert text.startswith(prompt)
        said = parse_last(text.removeprefix(prompt).removesuffix(tokenizer.eos_token))
        assert said is not None
        one, two = comparison.first.right, comparison.second.right
        assert np.sign(said.score_1 - said.score_2) == one - two == np.sign(3.5 - said.ranking)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_held_out_operands_are_never_learned() -> None:
    """No pair of a held-out task, in either order, is asked about."""
    held_out = read_pairs(HELD_OUT)
    for comparison in comparisons(300):
        left, right = map(int, re.findall(r"\d+", comparison.question))
        assert (min(left, right), max(left, right)) not in held_out


def test_a_response_is_right_when_its_last_words_are() -> None:
    """Whatever slipped, the label is the arithmetic truth, the text is what judge shows, and a flawless one is right all
    the way."""
    draw = random.Random(6)
    for _ in range(300):
        response = draw_response(417, "-", 58, WORDINGS[0], draw)
        assert response.right == (final_answer(response.messages) == str(value_of(417, "-", 58)))
        assert response.text == seen(response.messages)
        if response.right:
            assert response.right_so_far(len(response.text))


def test_unknown_roles_are_refused(tokenizer: Any) -> None:
    """A role that the judge was not trained for would be read as something else."""
    with pytest.raises(Exception, match="does not know the role narrator"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


@pytest.mark.full
@pytest.mark.engine
def test_it_judges_unseen_questions_better_than_chance_in_both_positions(tmp_path: Path) -> None:
    """On held-out operands the right one of two wins nine times in ten, in either position; nothing fails."""
    pytest.importorskip("vllm")
    draw = random.Random(7)
    tasks = [json.loads(line) for line in HELD_OUT.read_text().splitlines()[:60]]
    rows = []
    for task in tasks:
        question = {"role": "user", "content": task["prompt"]}
        for index in range(4):
            response = draw_response(task["left"], task["operator"], task["right"], WORDINGS[0], draw)
            said = [question, *response.messages]
            rows.append(rollout(task["task_id"], index, float(response.right), two_turns(1, 40), messages=said))
    run = write_run(tmp_path / "run", rows)
    summary = judge(path=str(run), genrm=str(GENRM), show="transcript", max_tokens=64)
    assert summary.comparisons["judged"] == 60 * 12
    rewards = np.array([row["reward"] for row in rows])
    number = {row["rollout_id"]: n for n, row in enumerate(rows)}
    report = against_rewards(matches_in(read_table(run / "judge-genrm", COMPARISONS, MATCH_COLUMNS), number), rewards)
    for position in ("first_position", "second_position"):
        assert report[position]["n"] > 100
        assert report[position]["ci95"][0] > 0.8, report
