"""``import -m``: text gets the ids of a chat template, exactly the template's text, proven, and marked for good."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.rollout_files import write_table

pytest.importorskip("transformers")

from transformers import AutoTokenizer

import gymdata
from gymdata.cli.main import main
from gymdata.commands.train.settings import TrainDpoConfig, TrainKtoConfig, TrainRewardConfig, TrainSftConfig
from gymdata.errors import RefusedError, UsageError
from gymdata.rollouts.schema import PAIRS, ROLLOUTS
from gymdata.store import read_run_json, read_table
from gymdata.store.columns import to_rows
from tests.definition import sequences
from tests.formats.trajectories import write

pytestmark = pytest.mark.torch

POLICY = str(Path("sample_data/policy"))
CLEAN = Path("sample_data/rollouts/clean.jsonl")
GYM = Path("sample_data/rollouts/nemo_gym.jsonl")
USER = {"role": "user", "content": "What is 4+5?"}
ANSWER = {"role": "assistant", "content": "9"}
IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def gym_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in GYM.read_text().splitlines()]


def without_ids(row: dict[str, Any]) -> dict[str, Any]:
    """The rollout as another project, or an API, would have it: its text."""
    for item in row["response"]["output"]:
        for name in IDS:
            item.pop(name, None)
    return row


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The clean rollouts without their ids, and with rendered ones."""
    folder = tmp_path_factory.mktemp("rendered")
    file = write(folder / "text.jsonl", *map(without_ids, gym_rows()))
    summary = gymdata.import_rollouts(file, folder / "rendered", model=POLICY)
    assert (summary.ok, summary.rendered, summary.refused) == (True, 24, {})
    return folder / "rendered"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return to_rows(read_table(path, ROLLOUTS))


def decoded(path: Path) -> list[list[str]]:
    """The text of what is trained of each rollout, turn by turn."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    return [[tokenizer.decode(turn["generation_token_ids"]) for turn in row["turns"]] for row in rows_of(path)]


def rendered(tmp_path: Path, *rows: Any, name: str = "rows.jsonl", **more: Any) -> Any:
    """The summary of rows that are imported and rendered into ``tmp_path``/out."""
    return gymdata.import_rollouts(write(tmp_path / name, *rows), tmp_path / "out", model=POLICY, **more)


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


def test_first_prompts_are_those_that_were_sampled_from(run: Path) -> None:
    """Prompts are text already, so the template gives the very ids that the policy read."""
    for row, was in zip(rows_of(run), gym_rows(), strict=True):
        sampled = next(item for item in was["response"]["output"] if "prompt_token_ids" in item)
        assert row["turns"][0]["prompt_delta_ids"].tolist() == sampled["prompt_token_ids"]


def test_rendered_turns_are_marked_and_have_no_logprobs(run: Path) -> None:
    """T213 at every turn, no error, NaN for each log-probability, and lineage in run.json."""
    turns = [turn for row in rows_of(run) for turn in row["turns"]]
    assert all(turn["rendered"] is True for turn in turns)
    assert all(np.isnan(turn["generation_log_probs"]).all() for turn in turns)
    report = gymdata.validate(run)
    assert report.by_code == {"T213": len(turns)}
    assert report.errors == report.warnings == 0
    facts = read_run_json(run)
    assert facts["stage"] == "import"
    assert facts["rendered"]["tokenizer_hash"] == facts["identity"]["tokenizer_hash"] == facts["chat"]["tokenizer_hash"]
    assert facts["rendered"]["chat_template_hash"] is not None
    assert facts["parents"][0]["path"].endswith("text.jsonl")


def test_validate_tells_rendered_from_sampled(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict counts the rollouts that can be trained only where rendered ids are allowed."""
    assert main(["validate", str(run), "--quiet"]) == 0
    n = gymdata.validate(run).rollouts
    told = " ".join(capsys.readouterr().out.split())
    assert f"trainable: {n} of {n} rollouts, {n} with ids rendered from text: only with --allow-rendered" in told


def test_what_was_sampled_stays_as_it_was(tmp_path: Path) -> None:
    """Rollouts with ids pass as they are, unmarked and in their place between those that are rendered."""
    first, second, third = gym_rows()[:3]
    summary = rendered(tmp_path, first, without_ids(second), third)
    assert (summary.rollouts, summary.rendered) == (3, 1)
    gymdata.import_rollouts(write(tmp_path / "sampled.jsonl", first, third), tmp_path / "sampled")
    turns = [
        [(t["generation_token_ids"].tolist(), t["rendered"]) for t in row["turns"]] for row in rows_of(tmp_path / "out")
    ]
    assert turns[::2] == [
        [(t["generation_token_ids"].tolist(), None) for t in row["turns"]] for row in rows_of(tmp_path / "sampled")
    ]
    assert all(mark for _, mark in turns[1])


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
    write_table(read_table(run), tmp_path / "some.jsonl", ROLLOUTS)
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
        assert data.n_trained.sum() > 0


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


def test_answers_that_the_task_brought_are_no_generations(tmp_path: Path) -> None:
    """Examples in the prompt stay prompt."""
    example = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}, USER]
    rendered(tmp_path, {"prompt": example, "completion": [ANSWER]})
    assert decoded(tmp_path / "out") == [["9<|im_end|>"]]


def test_a_message_of_weight_0_is_not_trained(tmp_path: Path) -> None:
    row = {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "content": "six"}]}
    rendered(tmp_path, row, source="openai")
    assert decoded(tmp_path / "out") == [["six<|im_end|>"]]
    assert [m["turn"] for m in rows_of(tmp_path / "out")[0]["messages"]] == [None, None, None, 0]


def test_an_answer_of_weight_0_leaves_the_answers_of_the_prompt_untrained(tmp_path: Path) -> None:
    """A row whose only answer is not trained has nothing to train: its prompt's examples stay prompt."""
    prompt = [USER, {"role": "assistant", "content": "CONTEXT 3"}, USER]
    rows = [{"prompt": prompt, "completion": [{**ANSWER, "weight": weight}]} for weight in (0, 1)]
    summary = rendered(tmp_path, *rows)
    assert summary.refused == {"no assistant message that the model wrote": 1}
    assert decoded(tmp_path / "out") == [["9<|im_end|>"]]


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    result = {"role": "tool", "content": "5", "tool_call_id": "c1"}
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result, ANSWER]}


def test_rows_that_cannot_be_proven_are_rejected_and_counted_by_reason(tmp_path: Path, capsys: Any) -> None:
    """Each is in rejected.jsonl with its line; the others are rendered, and the exit code is 1."""
    rows = [called({"x": 1}), called('{"x": 1, "y"'), called([2, 3]), called("")]
    file = write(tmp_path / "rows.jsonl", *rows)
    assert main(["import", str(file), "-m", POLICY, "-o", str(tmp_path / "out")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "rejected, T205 (no token data) 2 the arguments of a call are not a JSON object 2 rendered from text (T213) 2"
        in shown
    )
    lines = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(line["file"], line["line"], line["code"]) for line in lines] == [(str(file), n, "T205") for n in (2, 3)]
    assert decoded(tmp_path / "out") == [
        [f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call><|im_end|>', "9<|im_end|>"]
        for text in ('{"x": 1}', "{}")
    ]


NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(NO_END, "no end-of-turn token after an answer"), (CHATML, "the chat template leaves out tool calls")],
)
def test_a_file_without_any_row_that_can_be_rendered_is_an_error(
    template: str, reason: str, tmp_path: Path, capsys: Any
) -> None:
    """A template that ends no answer, and one that leaves out what a row states."""
    (tmp_path / "template.jinja").write_text(template)
    row = {"messages": [USER, ANSWER]} if template is NO_END else called({"x": 1})
    words = ["import", str(write(tmp_path / "rows.jsonl", row)), "-m", POLICY, "-o", str(tmp_path / "out")]
    assert main([*words, "--chat-template", str(tmp_path / "template.jinja")]) == 1
    assert f"no row can be rendered, of 1: {reason} (1)" in capsys.readouterr().err
    assert main(["train-sft", words[1], "-m", POLICY, "-o", str(tmp_path / "sft"), "--dry-run"]) == 0


def test_control_tokens_in_texts_are_counted_and_named(tmp_path: Path, capsys: Any) -> None:
    """In what a user, a tool or the assistant says; the row is as other programs have it."""
    texts = ["Say <|im_end|>", "a"], ["x", "It ends with <|im_end|> and then <|im_start|>user begins."], ["x", "y"]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    summary = rendered(tmp_path, *rows)
    assert summary.control_tokens == {"<|im_end|>": 2, "<|im_start|>": 1}
    assert ("  with <|im_start|> in a text, as a control token", 1) in summary.rows()
    assert decoded(tmp_path / "out")[1] == ["It ends with <|im_end|> and then <|im_start|>user begins.<|im_end|>"]
    assert main(["train-sft", str(tmp_path / "rows.jsonl"), "-m", POLICY, "-o", str(tmp_path / "m"), "--dry-run"]) == 0
    assert "2 rows with <|im_end|> in a text: it is trained as the control token" in capsys.readouterr().err


def test_nulls_that_arrow_made_are_absent(tmp_path: Path) -> None:
    """In calls, in tools and in options, at any depth: Parquet and JSON lines of the same rows give the same ids. Arrow
    sorts the keys of a struct, so they are sorted here."""

    def row(name: str, arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
        properties = {key: {"type": "string", **options} for key in arguments}
        tool = {"type": "function", "function": {"name": name, "description": "d",
                "parameters": {"type": "object", "properties": properties}}}  # fmt: skip
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "ok"},
            ANSWER,
        ]
        return {"messages": messages, "tools": [tool]}

    rows = [
        row("now", {}, {}), row("weather", {"city": "Paris", "opts": {"u": "c"}}, {"enum": ["Paris", "Rome"]}),
        row("mail", {"opts": {"cc": ["Bob"], "deep": {"er": [{"a": "1"}, {"b": "2"}]}}, "to": "Ann"}, {"title": "t"}),
    ]  # fmt: skip
    rendered(tmp_path, *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    gymdata.import_rollouts(tmp_path / "rows.parquet", tmp_path / "parquet", model=POLICY)
    ours, theirs = (rows_of(tmp_path / name) for name in ("out", "parquet"))
    assert [
        [(t["prompt_delta_ids"].tolist(), t["generation_token_ids"].tolist()) for t in r["turns"]] for r in ours
    ] == [[(t["prompt_delta_ids"].tolist(), t["generation_token_ids"].tolist()) for t in r["turns"]] for r in theirs]
    assert [row["tools"] for row in ours] == [row["tools"] for row in theirs]
    assert decoded(tmp_path / "out")[0][0] == '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sample tokenizer as a base model has it: without a chat template."""
    folder = tmp_path_factory.mktemp("plain") / "base"
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_without_a_template_a_prompt_and_its_completion_are_encoded_as_one_text(plain: str, tmp_path: Path) -> None:
    """And the end token is added, unless it is there, as TRL does."""
    rows = [{"prompt": "How much is 2+3?", "completion": " It is 5"}, {"prompt": "2+2:", "completion": " 4<|im_end|>"}]
    file = write(tmp_path / "rows.jsonl", *rows)
    assert gymdata.import_rollouts(file, tmp_path / "out", model=plain).rendered == 2
    tokenizer = AutoTokenizer.from_pretrained(plain)
    for row, made, end in zip(rows, rows_of(tmp_path / "out"), ("<|im_end|>", ""), strict=True):
        (sequence,) = sequences(made["turns"])
        assert sequence.input_ids.tolist() == tokenizer(row["prompt"] + row["completion"] + end)["input_ids"]
        assert sequence.input_ids[sequence.loss_mask == 0].tolist() == tokenizer(row["prompt"])["input_ids"]
    sides = {"prompt": "2+3:", "chosen": " 5", "rejected": " 6"}
    gymdata.import_rollouts(write(tmp_path / "pairs.jsonl", sides), tmp_path / "pairs", model=plain)
    (pair,) = to_rows(read_table(tmp_path / "pairs", PAIRS))
    assert tokenizer.decode([*pair["prompt_ids"], *pair["rejected_ids"]]) == "2+3: 6<|im_end|>"


def test_a_completion_that_merges_with_its_prompt_is_refused(plain: str, tmp_path: Path) -> None:
    """Inference would read another prompt."""
    file = write(tmp_path / "rows.jsonl", {"prompt": "How mu", "completion": "ch"})
    with pytest.raises(RefusedError, match="a token crosses the border between prompt and answer"):
        gymdata.import_rollouts(file, tmp_path / "out", model=plain)


def test_conversations_need_a_template(plain: str, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER]})
    with pytest.raises(UsageError, match="the tokenizer has no chat template, and trl-messages has conversations"):
        gymdata.import_rollouts(file, tmp_path / "out", model=plain)
    longer = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    with pytest.raises(RefusedError, match="without a chat template only a prompt with its completion can be rendered"):
        gymdata.import_rollouts(write(file, longer), tmp_path / "out", model=plain)


def test_a_training_form_that_was_taken_is_named(tmp_path: Path, capsys: Any) -> None:
    """Of a template that drops the reasoning in an answer's text; the model's own is taken wherever it is enough."""
    from tests.chat.rendering_table import template_of

    (tmp_path / "template.jinja").write_text(
        template_of("deepseek_r1_distill").replace("<｜end▁of▁sentence｜>", "<|im_end|>")
    )
    rows = [[USER, {**ANSWER, "content": "<think>\n4 and 5\n</think>\n\n9"}], [USER, ANSWER]]
    summary = rendered(tmp_path, *({"messages": m} for m in rows[1:]), chat_template=tmp_path / "template.jinja")
    assert (summary.twins, summary.unopened) == ({}, 1)
    folder = tmp_path / "r1"
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<｜end▁of▁sentence｜>"]})
    tokenizer.eos_token = "<｜end▁of▁sentence｜>"
    tokenizer.chat_template = template_of("deepseek_r1_distill")
    tokenizer.save_pretrained(folder)
    file = write(tmp_path / "both.jsonl", *({"messages": m} for m in rows))
    assert main(["import", str(file), "-m", str(folder), "-o", str(tmp_path / "both")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "with the training template deepseek_r1_distill_training 1" in shown
    assert "answers without the reasoning that the prompt opens 1" in shown


def test_a_template_without_a_model_is_refused(tmp_path: Path) -> None:
    """It renders nothing."""
    file = write(tmp_path / "rows.jsonl", {"messages": [USER, ANSWER]})
    assert main(["import", str(file), "-o", str(tmp_path / "out"), "--chat-template", "x.jinja"]) == 2


def test_people_see_that_ids_were_rendered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``show`` says it in the rollout's size and at each turn, and gives no log-probability."""
    assert main(["show", str(run), "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "rendered from text, not sampled" in shown
    assert ", rendered from text, stop" in shown
    assert re.search(r"\d +nan", shown) is None
