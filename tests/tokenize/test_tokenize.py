"""Rollouts that have only text get the ids of a chat template: exactly the template's text, and marked for good."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

import gymdata
from gymdata.chat.template import TransformersChat
from gymdata.cli.main import main
from gymdata.errors import RefusedError, UsageError
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.rollouts.turns import sequences
from gymdata.store import read_run_json, read_table
from gymdata.store.columns import to_rows
from gymdata.tokenize.rendering import rendered_row
from gymdata.train.settings import TrainDpoConfig, TrainKtoConfig, TrainRewardConfig, TrainSftConfig

pytestmark = pytest.mark.torch

POLICY = str(Path("sample_data/policy"))
CLEAN = Path("sample_data/rollouts/clean.jsonl")
USER = {"role": "user", "content": "What is 4+5?"}
ANSWER = {"role": "assistant", "content": "9"}


def without_ids(row: dict[str, Any]) -> dict[str, Any]:
    """The rollout as another project, or an API, would have it: its text."""
    messages = [{**message, "turn": None} for message in row["messages"]]
    nothing = dict.fromkeys(("n_turns", "n_breaks", "n_context_tokens", "n_generated_tokens"), 0)
    return {**row, **nothing, "turns": [], "messages": messages}


def text_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def sampled() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CLEAN.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(sampled: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clean rollouts without their ids, and with rendered ones."""
    folder = tmp_path_factory.mktemp("tokenize")
    file = text_file(folder / "text.jsonl", [without_ids(row) for row in sampled])
    assert gymdata.tokenize(file, folder / "rendered", tokenizer=POLICY).ok
    return folder / "rendered"


@pytest.fixture(scope="module")
def chat() -> TransformersChat:
    return TransformersChat.load(POLICY)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return to_rows(read_table(path, ROLLOUTS))


def test_a_rendered_conversation_is_what_transformers_renders(run: Path) -> None:
    """Prompt and generations of a rollout are the template's own text, ids as the tokenizer gives them, to the end token of
    the last message; the mask is on what the assistant wrote alone."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    rows = rows_of(run)
    assert len(rows) > 20
    for row in rows:
        (sequence,) = sequences(row["turns"])
        messages = [
            {k: json.loads(v) if k == "tool_calls" else v for k, v in m.items() if v is not None and k != "turn"}
            for m in row["messages"]
        ]
        last = max(n for n, m in enumerate(messages) if m["role"] == "assistant")
        text = tokenizer.apply_chat_template(
            messages[: last + 1], tools=json.loads(row["tools"]) or None, tokenize=False
        )
        assert tokenizer.decode(sequence.input_ids) == text.removesuffix("\n")
        trained = tokenizer.decode(sequence.input_ids[sequence.loss_mask == 1])
        assert trained.count("<|im_end|>") == row["n_turns"]
        assert "<|im_start|>" not in trained
        assert [m["turn"] for m in row["messages"] if m["role"] == "assistant"] == list(range(row["n_turns"]))


def test_first_prompts_are_those_that_were_sampled_from(run: Path, sampled: list[dict[str, Any]]) -> None:
    """Prompts are text already, so the template gives the very ids that the policy read."""
    for row, was in zip(rows_of(run), sampled, strict=True):
        assert row["turns"][0]["prompt_delta_ids"].tolist() == was["turns"][0]["prompt_delta_ids"]


def test_rendered_turns_are_marked_and_have_no_logprobs(run: Path) -> None:
    """T213 at every turn, no error, NaN for each log-probability, and lineage in run.json."""
    turns = [turn for row in rows_of(run) for turn in row["turns"]]
    assert all(turn["rendered"] is True for turn in turns)
    assert all(np.isnan(turn["generation_log_probs"]).all() for turn in turns)
    report = gymdata.validate(run)
    assert report.by_code == {"T213": len(turns)}
    assert report.errors == report.warnings == 0
    facts = read_run_json(run)
    assert facts["stage"] == "tokenize"
    assert facts["rendered"]["tokenizer_hash"] == facts["identity"]["tokenizer_hash"] == facts["chat"]["tokenizer_hash"]
    assert facts["rendered"]["chat_template_hash"] is not None
    assert facts["parents"][0]["path"].endswith("text.jsonl")


def test_validate_tells_rendered_from_sampled(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict counts the rollouts that can be trained only where rendered ids are allowed."""
    assert main(["validate", str(run), "--quiet"]) == 0
    n = gymdata.validate(run).rollouts
    told = " ".join(capsys.readouterr().out.split())
    assert f"trainable: {n} of {n} rollouts, {n} with ids rendered from text: only with --allow-rendered" in told


def test_what_was_sampled_stays_as_it_was(sampled: list[dict[str, Any]], tmp_path: Path) -> None:
    """Rollouts with ids pass as they are, unmarked, between those that are rendered; without others there is nothing to
    do."""
    mixed = text_file(tmp_path / "mixed.jsonl", [sampled[0], without_ids(sampled[1]), sampled[2]])
    report = gymdata.tokenize(mixed, tmp_path / "out.jsonl", tokenizer=POLICY)
    assert (report.rollouts, report.rendered, report.sampled) == (3, 1, 2)
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert kept[0]["turns"] == [
        {**turn, "server": None, "rendered": None, "weight_versions": None} for turn in sampled[0]["turns"]
    ]
    assert gymdata.validate(tmp_path / "out.jsonl").by_code == {"T213": len(kept[1]["turns"])}
    with pytest.raises(RefusedError, match="nothing to render"):
        gymdata.tokenize(CLEAN, tmp_path / "none", tokenizer=POLICY)


@pytest.mark.parametrize("format", ["nemo-gym", "nat-trajectories", "atif"])
def test_the_mark_survives_export_and_import(run: Path, tmp_path: Path, format: str) -> None:
    """Another project's file of rendered rollouts does not come back as one of sampled rollouts."""
    gymdata.export(run, tmp_path / "out.jsonl", format=format)
    gymdata.import_rollouts(tmp_path / "out.jsonl", tmp_path / "back")
    was, back = rows_of(run), rows_of(tmp_path / "back")
    assert [[t["generation_token_ids"].tolist() for t in r["turns"]] for r in back] == [
        [t["generation_token_ids"].tolist() for t in r["turns"]] for r in was
    ]
    turns = [turn for row in back for turn in row["turns"]]
    assert all(turn["rendered"] for turn in turns)
    assert all(np.isnan(turn["generation_log_probs"]).all() for turn in turns)


def test_the_mark_survives_filtering_and_json_lines(run: Path, tmp_path: Path) -> None:
    """A copy of any kind is as rendered as what it was copied from."""
    gymdata.filter(run, tmp_path / "some.jsonl", where=["reward >= 0"])
    assert all(t["rendered"] for row in rows_of(tmp_path / "some.jsonl") for t in row["turns"])
    gymdata.filter(tmp_path / "some.jsonl", tmp_path / "again", where=["reward >= 0"])
    assert all(t["rendered"] for row in rows_of(tmp_path / "again") for t in row["turns"])


def test_pairs_take_rendered_rollouts_only_when_allowed(run: Path, tmp_path: Path, capsys: Any) -> None:
    """Without the flag T213 and exit 1, the flag named; with it pairs that are marked themselves and validate."""
    assert main(["pairs", str(run), "-o", str(tmp_path / "no")]) == 1
    told = capsys.readouterr().err
    assert "T213" in told
    assert "--allow-rendered" in told
    made = gymdata.pairs(run, output=tmp_path / "pairs", allow_rendered=True)
    assert made.table.num_rows > 0
    assert any("not sampled (T213)" in note for note in made.notes)
    assert read_table(tmp_path / "pairs", PAIRS)["rendered"].to_pylist() == [True] * made.table.num_rows
    report = gymdata.validate(tmp_path / "pairs" / "pairs.parquet")
    assert report.by_code["T213"] == made.table.num_rows
    assert report.errors == 0


def test_trainers_take_rendered_ids_only_when_allowed(run: Path, tmp_path: Path) -> None:
    """SFT, KTO, DPO and reward training refuse with T213, or train what the assistant wrote."""
    file = gymdata.pairs(run, output=tmp_path / "pairs", allow_rendered=True).files["train"]
    kinds = {TrainSftConfig: run, TrainKtoConfig: run, TrainDpoConfig: file, TrainRewardConfig: file}
    for kind, source in kinds.items():
        given: dict[str, Any] = {"model": POLICY, "output": tmp_path / "model"}
        with pytest.raises(RefusedError, match="not sampled") as refused:
            list(kind(**given).parts(str(source)))
        assert refused.value.code == "T213"
        assert "allow_rendered=True" in str(refused.value.hint)
        (data,) = kind(**given, allow_rendered=True).parts(str(source))
        assert data.sequences.trained().count > 0


def test_batch_rl_and_audits_never_take_rendered_ids(run: Path, tmp_path: Path) -> None:
    """There is no log-probability of a sampler, so there is no ratio and nothing to audit."""
    with pytest.raises(RefusedError) as refused:
        gymdata.experience(run, output=tmp_path / "experiences")
    assert refused.value.code == "T213"
    with pytest.raises(RefusedError, match="to compare") as refused:
        gymdata.audit(run, POLICY, output=tmp_path / "audit")
    assert refused.value.code == "T213"
    assert "nothing to audit" in str(refused.value.hint)


def test_saved_references_are_refused_for_rendered_pairs(run: Path, tmp_path: Path) -> None:
    """--ref saved reads the sampler's log-probabilities, and there are none."""
    file = gymdata.pairs(run, output=tmp_path / "pairs", allow_rendered=True).files["train"]
    with pytest.raises(RefusedError, match="T213"):
        gymdata.train_dpo(file, POLICY, tmp_path / "dpo", ref="saved", allow_rendered=True, dry_run=True)


def test_a_template_that_strips_history_gives_a_named_break(tmp_path: Path) -> None:
    """Reasoning that is gone once the conversation goes on: the turn is a break, counted by its code, and no token of it is
    called the continuation of what it is not."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thought = {"role": "assistant", "content": "9", "reasoning": "4 and 5"}
    row = conversation([USER, thought, {"role": "user", "content": "What is 9+1?"}, {**ANSWER, "content": "10"}])
    (tmp_path / "template.jinja").write_text(template)
    file = text_file(tmp_path / "text.jsonl", [row])
    report = gymdata.tokenize(
        file, tmp_path / "out", tokenizer=POLICY, chat_template=tmp_path / "template.jinja", keep_reasoning=False
    )
    assert report.breaks == {"T203": 1}
    assert report.first_break is not None
    assert report.first_break.endswith("turn 1: earlier messages were changed or removed")
    assert gymdata.validate(tmp_path / "out", tokenizer=POLICY).by_code == {"T203": 1, "T213": 2}
    gymdata.fix(tmp_path / "out", "split", tmp_path / "split.jsonl")
    parts = rows_of(tmp_path / "split.jsonl")
    assert [[turn["rendered"] for turn in part["turns"]] for part in parts] == [[True], [True]]


def conversation(messages: list[dict[str, Any]], **columns: Any) -> dict[str, Any]:
    """A text rollout of these messages."""
    first = json.loads(CLEAN.read_text().splitlines()[0])
    row = {**without_ids(first), "tools": "[]", "task": "{}", "messages": messages}
    return row | columns


def decoded(row: dict[str, Any], chat: TransformersChat) -> list[str]:
    return [chat.decode(turn["generation_token_ids"]) for turn in row["turns"]]


def test_a_generation_prompt_that_messages_do_not_have_is_no_part_of_them(chat: TransformersChat) -> None:
    """A template that opens <think> for the model and leaves it out of messages: the message's own text is rendered."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    made = rendered_row(conversation([USER, ANSWER]), chat.with_template(template))
    assert decoded(made, chat) == ["9<|im_end|>"]
    assert chat.decode(made["turns"][0]["prompt_delta_ids"]).endswith("<|im_start|>assistant\n")


def test_an_answer_that_was_cut_has_no_end_token(chat: TransformersChat) -> None:
    """A limit ended it, so whoever wrote it did not."""
    made = rendered_row(conversation([USER, ANSWER], status="truncated"), chat)
    assert decoded(made, chat) == ["9"]
    assert made["turns"][0]["finish_reason"] == "length"


def test_answers_that_the_task_brought_are_no_generations(chat: TransformersChat) -> None:
    """Examples in the prompt stay prompt."""
    example = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}, USER]
    made = rendered_row(conversation([*example, ANSWER], task=json.dumps({"messages": example})), chat)
    assert decoded(made, chat) == ["9<|im_end|>"]


def test_a_rollout_that_cannot_be_rendered_is_named(tmp_path: Path) -> None:
    """It stays without ids, with the reason, and the command ends with 1."""
    rows = [conversation([USER, ANSWER]), conversation([USER], rollout_id="silent")]
    file = text_file(tmp_path / "text.jsonl", rows)
    assert main(["tokenize", str(file), "--tokenizer", POLICY, "-o", str(tmp_path / "out")]) == 1
    assert read_run_json(tmp_path / "out")["not_rendered"] == {"silent": "no assistant message that the model wrote"}


def test_sampled_ids_of_another_tokenizer_are_not_mixed_in(sampled: list[dict[str, Any]], tmp_path: Path) -> None:
    """One file holds the ids of one tokenizer."""
    text_file(tmp_path / "rollouts.jsonl", [sampled[0], without_ids(sampled[1])])
    facts = {"run_id": "r", "identity": {"tokenizer_hash": "other"}, "files": [{"path": "rollouts.jsonl", "rows": 2}]}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UsageError, match="another tokenizer"):
        gymdata.tokenize(tmp_path / "rollouts.jsonl", tmp_path / "out", tokenizer=POLICY)


def test_people_see_that_ids_were_rendered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``show`` says it in the rollout's size and at each turn, and gives no log-probability."""
    assert main(["show", str(run), "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "rendered from text, not sampled" in shown
    assert ", rendered from text, stop" in shown
    assert re.search(r"\d +nan", shown) is None
