"""What validate shows of a break and of text that does not fit, with a tokenizer: the sample policy's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import sample_data
from gymdata.cli.main import main
from gymdata.commands.validate.run import validate
from gymdata.store import read_run_json, write_run_json
from tests.rollout_files import rollout, write_run
from tests.validate.generate import chat, nemo_row, write_lines, write_native

POLICY = Path(sample_data.__file__).parent / "policy"


def encode(text: str) -> list[int]:
    return list(Tokenizer.from_file(str(POLICY / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def merged_calls() -> list[tuple[list[int], list[int]]]:
    """A number that was sampled digit by digit comes back as the tokenizer would spell it."""
    prompt = encode("<|im_start|>user\nWhat is 417-58?<|im_end|>\n<|im_start|>assistant\n")
    sampled = [i for digit in "417" for i in encode(digit)]
    came = encode("417")
    assert came != sampled
    end = encode("<|im_end|>")
    after = encode("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
    return [(prompt, sampled + end), (prompt + came + end + after, encode("359") + end)]


def run_with_model(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A run whose run.json names the sample policy."""
    run = write_run(folder / "run", rows)
    write_run_json(run, read_run_json(run) | {"identity": {"model": str(POLICY)}})
    return run


def test_the_model_in_run_json_tells_the_cause(tmp_path: Path) -> None:
    """Without --tokenizer the model folder that run.json names is used; without either the cause is not known."""
    row = rollout("t", 0, 1.0, merged_calls(), messages=chat(2))
    assert validate(run_with_model(tmp_path, [row])).by_code == {"T201": 1}
    assert validate(write_native(tmp_path, [row], "parquet")).by_code == {"T200": 1}


def test_both_sides_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People read a line that explains and both texts with the difference marked; --json has the ids of both spans."""
    path = write_lines(tmp_path / "a.jsonl", [nemo_row(merged_calls(), "q", 1.0, 0)])
    assert main(["validate", str(path), "--tokenizer", str(POLICY)]) == 1
    out = capsys.readouterr().out
    assert "T201 re-tokenised" in out
    assert "the same text came back as other tokens" in out
    assert out.count("4⟦17⟧<|im_end|>") == 2
    assert main(["validate", str(path), "--tokenizer", str(POLICY), "--json"]) == 1
    (found,) = [v for v in json.loads(capsys.readouterr().out)["violations"] if v["code"] == "T201"]
    (span,) = found["evidence"]["spans"]
    assert (found["turn"], found["position"]) == (1, span["before"]["start"])
    assert span["before"]["ids"] == merged_calls()[0][1][1:-1]
    assert span["prompt"]["ids"] == encode("417")[1:]
    assert "evidence" not in validate(path, tokenizer=POLICY).table().column_names


def test_a_generation_that_is_not_its_message(tmp_path: Path) -> None:
    """T207 of --decode, with the tokenizer of the run: text, reasoning or tool name that the ids do not spell; white
    space and special tokens do not count."""
    prompt, answer = encode("<|im_start|>assistant\n"), encode("<think>so</think>359 is it<|im_end|>")
    said = {"role": "assistant", "reasoning": "so", "content": "359  is\nit", "turn": 0}
    call = json.dumps([{"id": "c", "type": "function", "function": {"name": "send", "arguments": {}}}])
    rows = [
        rollout("t", 0, 1.0, [(prompt, answer)], messages=[said]),
        rollout("t", 1, 0.0, [(prompt, answer)], messages=[said | {"content": "358 is it"}]),
        rollout("u", 0, 0.0, [(prompt, answer)], messages=[said | {"tool_calls": call}]),
    ]
    run = run_with_model(tmp_path, rows)
    found = [v for v in validate(run, decode=True).violations if v.code == "T207"]
    assert [(v.row, v.turn, v.detail) for v in found] == [(1, 0, "content"), (2, 0, "tool call")]
    assert "T207" not in validate(run, decode=True, ignore=["T207"]).by_code
