"""``gymdata scan --redact``: the copy has no secret in its texts or its ids, trains nothing of one, and validates."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import UsageError
from gymdata.interop.formats import exported
from gymdata.rollouts.schema import PAIRS
from gymdata.rollouts.turns import Call, TurnEncoder, expand_prompts, sequences
from gymdata.store import read_run_json, read_table
from tests.rollout_files import rollout, two_turns, write_run
from tests.scan.planted import planted

pytest.importorskip("detect_secrets", reason="the extra scan (detect-secrets) is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the extra collect (tokenizers) is not installed")

POLICY = Path(__file__).parents[2] / "sample_data/policy"
KINDS = planted(1)
PLACES = ["prompt", "tool result", "arguments", "reasoning", "answer", "last words", "task", "environment", "tools"]


@cache
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(POLICY / "tokenizer.json"))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def text_of(some: Any) -> str:
    return tokenizer().decode(list(map(int, some)), skip_special_tokens=False)


def conversation(task: str, place: str, text: str, **columns: Any) -> dict[str, Any]:
    """Two turns with their ids, of a template that writes calls as JSON; ``text`` is in one place."""
    at = {name: f"see {text} there" if name == place else f"nothing of {name}" for name in PLACES}
    call = {"name": "put", "arguments": json.dumps({"value": at["arguments"]})}
    said = f"<think>{at['reasoning']}</think>I put it.<tool_call>{json.dumps(call)}</tool_call>"
    answer = f"{at['answer']}, so it is 4. {at['last words']}"
    prompt = f"<|im_start|>user\n{at['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    result = f"\n<|im_start|>tool\n{at['tool result']}<|im_end|>\n<|im_start|>assistant\n"
    first, generation, between = ids(prompt), ids(f"{said}<|im_end|>"), ids(result)
    encoder = TurnEncoder()
    for given, sampled in ((first, generation), (first + generation + between, ids(f"{answer}<|im_end|>"))):
        logprobs = -np.arange(1, len(sampled) + 1, dtype=np.float32) / 64
        encoder.add(Call(np.array(given, np.int32), np.array(sampled, np.int32), logprobs, "stop"))
    messages = [
        {"role": "user", "content": at["prompt"]},
        {
            "role": "assistant",
            "content": "I put it.",
            "reasoning": at["reasoning"],
            "turn": 0,
            "tool_calls": json.dumps([{"id": "c", "type": "function", "function": call}]),
        },
        {"role": "tool", "content": at["tool result"], "tool_call_id": "c"},
        {"role": "assistant", "content": answer, "turn": 1},
    ]
    facts = {
        "task": json.dumps({"task_id": task, "note": [at["task"]]}),
        "extra": json.dumps({"env": at["environment"]}),
        "tools": json.dumps([{"type": "function", "function": {"name": "put", "description": at["tools"]}}]),
    }
    return rollout(task, 0, 1.0, []) | encoder.columns() | {"messages": messages} | facts | columns


def written(folder: Path, rows: list[dict[str, Any]], suffix: str = "parquet") -> Path:
    run = write_run(folder, rows, suffix)
    facts = json.loads((run / "run.json").read_text())
    more = {"identity": {"model": str(POLICY)}, "engine": {"vocab_size": tokenizer().get_vocab_size()}}
    (run / "run.json").write_text(json.dumps(facts | more))
    return run


def secrets_in(text: str) -> list[str]:
    """Kinds whose secret is in a text, as it is or as JSON has it."""
    return [kind for kind, (_, secret) in KINDS.items() if secret in text or json.dumps(secret)[1:-1] in text]


@pytest.mark.parametrize("place", PLACES)
def test_a_redacted_copy_has_no_secret_and_validates(place: str, tmp_path: Path) -> None:
    """Each kind is found in each place, and is not in a file of the copy, nor in what its ids decode to; every row stays,
    with 0 errors."""
    rows = [conversation(f"t{n}", place, text) for n, (text, _) in enumerate(KINDS.values())]
    run, out = written(tmp_path / "run", rows), tmp_path / "out"
    report = gymdata.scan(run, out / "rollouts.jsonl", redact=True)
    assert {one.rollout_id for one in report.findings} == {row["rollout_id"] for row in rows}
    assert (report.left_out, report.redacted, report.ok) == ({}, len(rows), True)
    assert len(rows) >= 40
    copy = read_table(out / "rollouts.jsonl").to_pylist()
    assert secrets_in(json.dumps(copy, default=str)) == []
    assert [kind for file in out.rglob("*") if file.is_file() for kind in secrets_in(file.read_text())] == []
    for row in copy:
        # The first is a turn's prompt, the other what was sampled.
        wholes = zip(expand_prompts(row["turns"]), row["turns"], strict=True)
        assert secrets_in("\n".join(text_of([*prompt, *turn["generation_token_ids"]]) for prompt, turn in wholes)) == []
    checked = gymdata.validate(out / "rollouts.jsonl", decode=True, tokenizer=str(POLICY))
    assert [v for v in checked.violations if v.severity == "error"] == []
    assert gymdata.scan(out / "rollouts.jsonl").findings == []


@pytest.mark.parametrize("place", PLACES)
def test_what_is_trained_of_a_redacted_rollout_was_sampled(place: str, tmp_path: Path) -> None:
    """Tokens keep their places; each trained one is the sampled token there with its log-probability."""
    rows = [conversation("t", place, KINDS["stripe"][0]), conversation("clean", place, "nothing at all")]
    gymdata.scan(written(tmp_path / "run", rows), tmp_path / "out", redact=True)
    copy = {row["task_id"]: row for row in read_table(tmp_path / "out").to_pylist()}
    before = read_table(tmp_path / "run").to_pylist()
    assert copy["clean"] == before[1]
    (was,), (now,) = sequences(before[0]["turns"]), sequences(copy["t"]["turns"])
    trained = np.flatnonzero(now.loss_mask)
    assert (was.input_ids[trained] == now.input_ids[trained]).all()
    assert (was.logprobs[trained] == now.logprobs[trained]).all()
    changed = np.flatnonzero(was.input_ids[: len(now.input_ids)] != now.input_ids)
    assert not now.loss_mask[changed].any()
    noted = json.loads(copy["t"]["extra"])["redacted"]
    assert noted["tokens_untrained"] == int(was.loss_mask.sum() - now.loss_mask.sum())
    assert "stripe" in str(noted["kinds"])
    # Only what the model wrote can cost trained tokens.
    assert (noted["tokens_untrained"] > 0) == (place in ("arguments", "reasoning", "answer", "last words"))


@pytest.mark.full
@pytest.mark.torch
def test_a_redacted_run_is_exported_shown_and_trained_without_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kind in the prompt and in both answers of a pair: in no export, page, table or checkpoint, and what is left
    trains with the proof equal."""
    pytest.importorskip("trl")
    rows = []
    for n, (text, _) in enumerate(KINDS.values()):
        for k, place in enumerate(("answer", "last words")):
            which = {"rollout_id": f"t{n}-{k}", "rollout_index": k, "reward": float(k)}
            rows.append(conversation(f"t{n}", place, text, **which))
        rows.append(conversation(f"p{n}", "prompt", text))
    run, out = written(tmp_path / "run", rows), tmp_path / "out"
    assert main(["scan", str(run)]) == 1
    assert main(["scan", str(run), "--redact", "-o", str(out)]) == 0
    made = tmp_path / "made"
    made.mkdir()
    gymdata.experience(out, output=made / "experiences.jsonl", estimator="rloo")
    gymdata.pairs(out, output=made / "pairs.jsonl", strategy="all")
    sources = {"rollouts": out, "pairs": made / "pairs.jsonl", "experiences": made / "experiences.jsonl"}
    for name, form in exported().items():
        gymdata.export(sources[form.table], made / f"{name}{form.suffixes[0]}", name)
    assert main(["view", str(out), "--export", str(made / "page.html")]) == 0
    assert main(["report", str(out), "-o", str(made / "report.html")]) == 0
    assert main(["show", str(out)]) == 0
    assert main(["query", "SELECT * FROM rollouts", str(out), "--json"]) == 0
    (made / "printed").write_text("".join(capsys.readouterr()))
    command = ["train-sft", str(out), "-m", str(POLICY), "-o", str(made / "policy"), "--select", "all"]
    assert main([*command, "--set", "num_train_epochs=1"]) == 0
    proof = read_run_json(made / "policy")["trained_tokens"]
    assert proof["equal"]
    assert proof["file"]["count"] > 0
    files = [file for folder in (out, made) for file in folder.rglob("*") if file.is_file()]
    texts = {file: str(pq.read_table(file).to_pylist()) if file.suffix == ".parquet" else file.read_bytes().decode("latin1")
             for file in files}  # fmt: skip
    assert {file.name: found for file, text in texts.items() if (found := secrets_in(text))} == {}
    assert len(texts) > len(exported())


def test_a_rollout_whose_tokens_cannot_be_searched_is_left_out(tmp_path: Path) -> None:
    """Without a tokenizer, or with another one than the policy's, by name and reason; exit code 1."""
    text = KINDS["github"][0]
    rows = [conversation("t", "prompt", text), rollout("clean", 0, 1.0, two_turns(20, 21))]
    run = write_run(tmp_path / "run", rows)
    report = gymdata.scan(run, tmp_path / "out", redact=True)
    assert report.left_out == {"no tokenizer says which of its tokens hold the finding": ["t-0"]}
    assert [row["task_id"] for row in read_table(tmp_path / "out").to_pylist()] == ["clean"]
    assert not report.ok
    other = rollout("t", 0, 1.0, two_turns(20, 21), text=text)
    report = gymdata.scan(written(tmp_path / "run2", [other]), tmp_path / "out2", redact=True)
    assert report.left_out == {"a finding of its messages is not among its decoded tokens": ["t-0"]}


def test_text_without_ids_is_redacted_without_a_tokenizer(tmp_path: Path) -> None:
    row = rollout("t", 0, 1.0, [], text=f"mine is {KINDS['e-mail'][0]}.")
    report = gymdata.scan(write_run(tmp_path / "run", [row]), tmp_path / "out", redact=True)
    (made,) = read_table(tmp_path / "out").to_pylist()
    assert (made["messages"][-1]["content"], report.left_out) == ("mine is [redacted:e-mail].", {})


def test_a_rollout_whose_id_is_a_secret_is_left_out(tmp_path: Path) -> None:
    """A replaced ID would no longer lead to its task; the report does not show it."""
    mail = KINDS["e-mail"][0]
    report = gymdata.scan(written(tmp_path / "run", [conversation(mail, "task", "x")]), tmp_path / "out", redact=True)
    assert report.left_out == {"an ID holds a finding": ["[redacted:e-mail]-0"]}


def test_a_retry_of_the_same_prompt_stays_a_retry(tmp_path: Path) -> None:
    """Turns that share a prompt with a finding share its replacement, whichever of them showed it."""
    text = KINDS["slack bot"][0]
    row = conversation("t", "tool result", text)
    prompts = expand_prompts(row["turns"])
    encoder = TurnEncoder()
    call, answer = (turn["generation_token_ids"] for turn in row["turns"])
    for n, sampled in ((0, call), (1, np.array(ids("no"), np.int32)), (1, answer)):
        encoder.add(Call(prompts[n], sampled, -np.ones(len(sampled), np.float32), "stop"))
    row["messages"][-1]["turn"] = 2
    run = written(tmp_path / "run", [row | encoder.columns()])
    report = gymdata.scan(run, tmp_path / "out", redact=True)
    assert report.left_out == {}
    (made,) = read_table(tmp_path / "out").to_pylist()
    assert made["n_breaks"] == 0
    assert [turn["parent"] for turn in made["turns"]] == [turn["parent"] for turn in encoder.turns]
    assert gymdata.validate(tmp_path / "out").errors == 0


def test_redact_and_an_output_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", [conversation("t", "prompt", KINDS["jwt"][0])])
    assert [main(["scan", str(run), "--redact"]), main(["scan", str(run), "-o", str(tmp_path / "out")])] == [2, 2]
    assert "--redact" in capsys.readouterr().err
    with pytest.raises(UsageError, match="is one of the files that are scanned"):
        gymdata.scan(run / "rollouts/part-00000.parquet", run / "rollouts/part-00000.parquet", redact=True)
    assert main(["scan", str(run), "--redact", "-o", str(tmp_path / "out")]) == 0
    assert main(["scan", str(tmp_path / "out")]) == 0


def test_pairs_of_text_are_redacted_and_those_with_ids_left_out(tmp_path: Path) -> None:
    """A finding in a preference is replaced in its texts; a pair with token ids is named instead."""
    secret, _ = next(iter(KINDS.values()))
    rows = [
        {"prompt": f"My key is {secret}?", "chosen": "No.", "rejected": f"It is {secret}"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gymdata.import_rollouts(tmp_path / "a.jsonl", tmp_path / "run")
    report = gymdata.scan(tmp_path / "run", tmp_path / "out", redact=True)
    assert (report.redacted, report.left_out) == (1, {})
    assert gymdata.scan(tmp_path / "out").findings == []
    made = read_table(tmp_path / "out", PAIRS).to_pylist()
    assert [row["chosen"][0]["content"] for row in made] == ["No.", "a"]
    assert "[redacted:" in made[0]["prompt"][0]["content"]
    gymdata.import_rollouts(tmp_path / "a.jsonl", tmp_path / "tokens", model=str(POLICY))
    report = gymdata.scan(tmp_path / "tokens", tmp_path / "again", redact=True, tokenizer=POLICY)
    assert [len(ids) for ids in report.left_out.values()] == [1]
    assert read_table(tmp_path / "again", PAIRS).num_rows == 1
