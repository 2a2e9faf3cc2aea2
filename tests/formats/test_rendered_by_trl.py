"""Text as stock TRL renders it: exports, against what was sampled, and imports, against what `tokenize` renders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.chat.template import TransformersChat
from gymdata.formats import exported as exported_formats
from gymdata.formats.text.export import CALL_TEXT, ENDS, IDS, TOOLS
from gymdata.rollouts.schema import PAIRS
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from tests.check import matrix
from tests.definition import sequences
from tests.rollout_files import rollout, write_run, write_table

pytestmark = pytest.mark.torch

SAMPLE = Path("sample_data")
ROLLOUTS = SAMPLE / "rollouts" / "clean.jsonl"
#: One template of each family, without a rule of its own about reasoning.
TEMPLATES = ["llama3_1", "qwen2_5", "gemma", "phi3", "deepseekv3"]
CONVERSATION = [{"role": "user", "content": "How much is 2+3?"}, {"role": "assistant", "content": "5"}]
Ids = list[int]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SAMPLE / "policy", local_files_only=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "pairs"
    gymdata.pairs(ROLLOUTS, output=folder, strategy="all")
    return folder


class Settings:
    """What TRL's preparation of a dataset reads of its arguments."""

    dataset_num_proc = None
    max_length = None
    truncation_mode = "keep_start"
    dataset_text_field = "text"
    assistant_only_loss = False
    completion_only_loss = None
    eos_token = None
    dataset_kwargs: Mapping[str, Any] = {}
    packing = False
    shuffle_dataset = False


def loaded(file: Path, tmp_path: Path) -> Any:
    from datasets import load_dataset

    return load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))


def rendered_sft(file: Path, tokenizer: Any, tmp_path: Path) -> list[tuple[Ids, Ids]]:
    """(prompt, prompt and completion) of each row, as SFTTrainer makes them; without a prompt column no prompt."""
    from trl.trainer.sft_trainer import SFTTrainer

    trainer = SFTTrainer.__new__(SFTTrainer)
    trainer._tokenizer, trainer.chat_template = tokenizer, None  # type: ignore[attr-defined]  # made without its __init__
    trainer.completion_only_loss = False  # type: ignore[attr-defined]  # made without its __init__
    made = trainer._prepare_dataset(loaded(file, tmp_path), tokenizer, Settings(), False, None, "train")
    return [(row["input_ids"][: row.get("completion_mask", [1]).index(1)], row["input_ids"]) for row in made]


def rendered_dpo(file: Path, tokenizer: Any, tmp_path: Path) -> list[tuple[Ids, Ids, Ids]]:
    """(prompt, prompt and chosen, prompt and rejected) of each row, as DPOTrainer makes them."""
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = DPOTrainer.__new__(DPOTrainer)
    # Made without its __init__.
    trainer._tokenizer, trainer._is_vision_dataset = tokenizer, False  # type: ignore[attr-defined]
    rows = trainer._prepare_dataset(loaded(file, tmp_path), tokenizer, Settings(), "train")
    return [
        (r["prompt_ids"], r["prompt_ids"] + r["chosen_ids"], r["prompt_ids"] + r["rejected_ids"]) for r in rows
    ]  # fmt: skip


def rendered_kto(file: Path, tokenizer: Any, tmp_path: Path) -> list[tuple[Ids, Ids]]:
    """(prompt, prompt and completion) of each row, as KTOTrainer makes them; its labels are booleans."""
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = KTOTrainer.__new__(KTOTrainer)
    # Made without its __init__.
    vars(trainer).update(_tokenizer=tokenizer, calculate_KL=False, desirable_weight=1, undesirable_weight=1)
    rows = trainer._prepare_dataset(loaded(file, tmp_path), tokenizer, Settings(), "train")
    assert {type(row["label"]) for row in rows} == {bool}
    return [(row["prompt_ids"], row["prompt_ids"] + row["completion_ids"]) for row in rows]


def says(rendered: Ids, sampled: Ids, tokenizer: Any) -> bool:
    """The sampled text, and behind it only what the template writes after an end of turn. Where its ids are others, the
    tokenizer made them of the same text: that is what losing the token ids means."""
    text, end = tokenizer.decode(sampled), tokenizer.decode(rendered).removeprefix(tokenizer.decode(sampled))
    return tokenizer.decode(rendered).startswith(text) and not end.strip()


def same_ids(rendered: Ids, sampled: Ids) -> bool:
    return rendered[: len(sampled)] == sampled


def sampled_rollouts() -> list[tuple[Ids, Ids]]:
    """(first prompt, all ids) of each rollout; none of them breaks."""
    found = []
    for row in read_table(ROLLOUTS).to_pylist():
        (whole,) = sequences(row["turns"])
        found.append((list(row["turns"][0]["prompt_delta_ids"]), whole.input_ids.tolist()))
    return found


def sampled_pairs(file: Path) -> list[tuple[Ids, Ids, Ids]]:
    rows = read_table(file, PAIRS).to_pylist()
    return [
        (r["prompt_ids"], r["prompt_ids"] + r["chosen_ids"], r["prompt_ids"] + r["rejected_ids"]) for r in rows
    ]  # fmt: skip


def test_every_text_format_is_rendered_here() -> None:
    """A format that is added is added to these tests."""
    text = {"trl-messages", "trl-prompt-completion", "trl-kto", "openai", "trl-preference", "nat-dpo", "verl"}
    # With the messages of trl-preference and of trl-messages.
    text |= {"nemo-rl-preference", "verl-sft"}
    assert text == {name for name, form in exported_formats().items() if not form.holds_ids}


@pytest.mark.parametrize("name", ["trl-messages", "trl-prompt-completion", "trl-kto", "openai"])
def test_conversations(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """Prompts are the sampled ids, tools included, and all that follows is the sampled text; what may differ is under
    lost."""
    summary = gymdata.export(ROLLOUTS, tmp_path / "a.jsonl", name)
    render = rendered_kto if name == "trl-kto" else rendered_sft
    rendered, sampled = render(tmp_path / "a.jsonl", tokenizer, tmp_path), sampled_rollouts()
    assert len(rendered) == len(sampled) == summary.rows_out > 0
    for (prompt, whole), (first, ids) in zip(rendered, sampled, strict=True):
        assert whole[: len(first)] == first
        assert prompt in ([], first)
        assert says(whole, ids, tokenizer)
    assert 0 < sum(same_ids(whole, ids) for (_, whole), (_, ids) in zip(rendered, sampled, strict=True)) < len(sampled)
    assert summary.lost[ENDS] == summary.lost[IDS] == summary.rows_out
    assert summary.lost[CALL_TEXT] > 0


def test_preferences(pairs: Path, tokenizer: Any, tmp_path: Path) -> None:
    """All prompts have the sampled ids, which were rendered with tools, and both sides the sampled text."""
    summary = gymdata.export(pairs, tmp_path / "a.jsonl", "trl-preference")
    rendered, sampled = rendered_dpo(tmp_path / "a.jsonl", tokenizer, tmp_path), sampled_pairs(pairs)
    assert len(rendered) == len(sampled) == summary.rows_out > 0
    for (prompt, *sides), (first, *ids) in zip(rendered, sampled, strict=True):
        assert prompt == first
        assert all(says(side, whole, tokenizer) for side, whole in zip(sides, ids, strict=True))
    assert summary.lost[ENDS] == summary.lost[IDS] == summary.rows_out
    assert summary.lost[CALL_TEXT] > 0
    assert TOOLS not in summary.lost


@pytest.mark.parametrize("tools", [True, False])
def test_pairs_of_texts(tools: bool, pairs: Path, tokenizer: Any, tmp_path: Path) -> None:
    """nat-dpo holds prompt and answers; it has no tools, so prompts that had some are lost and listed, others match."""
    (row, *_) = read_table(pairs, PAIRS).to_pylist()
    given = json.loads(row["tools"]) if tools else None
    prompt = tokenizer.apply_chat_template(row["prompt"], tools=given, add_generation_prompt=True)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for side, text in (("chosen", "12"), ("rejected", "13")):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        message = dict.fromkeys(PAIRS.schema.field(side).type.value_type.names) | {"role": "assistant"}
        row |= {side: [message | {"content": text, "turn": 0}], f"{side}_ids": ids, f"{side}_mask": [1] * len(ids),
                f"{side}_logprobs": [-1.0] * len(ids)}  # fmt: skip
    row |= {"prompt_ids": prompt, "tools": row["tools"] if tools else None}
    import pyarrow as pa

    schema = pa.schema([PAIRS.schema.field(name) for name in row])
    file = write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "one.parquet", PAIRS)
    summary = gymdata.export(file, tmp_path / "a.jsonl", "nat-dpo")
    (line,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    messages = {name: [{"role": "assistant", "content": line[f"{name}_response"]}] for name in ("chosen", "rejected")}
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": line["prompt"]} | messages))
    ((rendered, chosen, rejected),) = rendered_dpo(tmp_path / "b.jsonl", tokenizer, tmp_path)
    assert (rendered == prompt) is not tools
    assert (summary.lost.get(TOOLS, 0) == 1) is tools
    ((_, *sampled),) = sampled_pairs(file)
    assert all(same_ids(a, b) for a, b in zip((chosen, rejected), sampled, strict=True)) is not tools


def test_verl_prompts(tokenizer: Any, tmp_path: Path) -> None:
    """With the tools that stand beside it, a prompt is the first prompt; that verl brings its own tools is listed."""
    summary = gymdata.export(ROLLOUTS, tmp_path / "a.parquet", "verl")
    rows, sampled = pq.read_table(tmp_path / "a.parquet").to_pylist(), sampled_rollouts()
    for row, (first, _) in zip(rows, sampled, strict=True):
        tools = json.loads(row["extra_info"]["tools"])
        assert (
            tokenizer.apply_chat_template(row["prompt"], tools=tools, add_generation_prompt=True)["input_ids"] == first
        )
    assert summary.lost[TOOLS] == len(rows)


@pytest.fixture(params=TEMPLATES)
def chat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransformersChat:
    """The chat of a template, which ``import`` gets instead of one that it loads."""
    made = matrix.family_chat(request.param, "bytes", keep_reasoning=False)
    monkeypatch.setattr(TransformersChat, "load", lambda *_, **__: made)
    return made


def test_ids_and_mask_of_an_answer_are_those_of_trl(chat: TransformersChat, tmp_path: Path) -> None:
    """Up to the end of the answer's turn: TRL also trains what the template writes behind it, a line break or a further end
    of text, which no policy samples."""
    longer = [*CONVERSATION, {"role": "user", "content": "Sure?"}]
    rows = [
        {"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:]},
        {"prompt": longer, "completion": [{"role": "assistant", "content": "Yes."}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    gymdata.import_rollouts(file, tmp_path / "tokens", model="the chat above")
    theirs = rendered_sft(file, chat.tokenizer, tmp_path)
    for row, (prompt, whole) in zip(to_rows(read_table(tmp_path / "tokens")), theirs, strict=True):
        (ours,) = sequences(row["turns"])
        ids = ours.input_ids.tolist()
        assert ids == whole[: len(ids)]
        assert not chat.tokenizer.decode(whole[len(ids) :], skip_special_tokens=True).strip()
        assert ours.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def test_ids_and_masks_of_a_preference_are_those_of_trl(chat: TransformersChat, tmp_path: Path) -> None:
    wrong = [{"role": "assistant", "content": "I think 6."}]
    row = {"prompt": CONVERSATION[:1], "chosen": CONVERSATION[1:], "rejected": wrong}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    report = gymdata.import_rollouts(file, tmp_path / "tokens", model="the chat above")
    assert (report.pairs, report.rendered) == (1, 1)
    ((prompt, *sides),) = rendered_dpo(file, chat.tokenizer, tmp_path)
    (pair,) = to_rows(read_table(tmp_path / "tokens", PAIRS))
    assert list(pair["prompt_ids"]) == prompt
    assert pair["rendered"]
    for side, theirs in zip(("chosen", "rejected"), sides, strict=True):
        ids = [*prompt, *pair[f"{side}_ids"]]
        assert ids == theirs[: len(ids)]
        assert not chat.tokenizer.decode(theirs[len(ids) :], skip_special_tokens=True).strip()
        assert set(pair[f"{side}_mask"]) == {1}


#: Trainers of TRL that take each export, and the arguments that one needs.
STEPS = [
    ("trl-messages", "SFT"), ("trl-prompt-completion", "SFT"), ("openai", "SFT"), ("input-ids-labels", "SFT"),
    ("verl-sft", "SFT"), ("trl-preference", "DPO"), ("trl-preference", "Reward"), ("trl-kto", "KTO"),
]  # fmt: skip


@pytest.mark.matrix("trl-kto-KTO")
@pytest.mark.parametrize(("name", "trainer"), STEPS)
def test_trl_takes_a_step_on_an_export(name: str, trainer: str, pairs: Path, tokenizer: Any, tmp_path: Path) -> None:
    """TRL's own trainer, from the file as `datasets` loads it to changed weights."""
    import trl
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    form = exported_formats()[name]
    file, source = tmp_path / f"a{form.suffixes[0]}", pairs if form.table == "pairs" else ROLLOUTS
    if name == "verl-sft":
        # It has no place for tools and calls, so such rollouts are left out.
        source = write_run(tmp_path / "run", [rollout("a", 0, 1.0, [([1, 2], [3, 4])])])
    assert gymdata.export(source, file, name).rows_out > 0
    kind = "parquet" if file.suffix == ".parquet" else "json"
    rows = load_dataset(kind, data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    if name == "trl-kto":
        assert set(rows["label"]) == {True, False}
    kwargs = {"num_labels": 1} if trainer == "Reward" else {}
    loads: Any = AutoModelForSequenceClassification if trainer == "Reward" else AutoModelForCausalLM
    model = loads.from_pretrained(SAMPLE / "policy", local_files_only=True, **kwargs)
    model.config.pad_token_id = tokenizer.pad_token_id
    before = {weight: value.clone() for weight, value in model.state_dict().items()}
    args = getattr(trl, f"{trainer}Config")(
        output_dir=str(tmp_path / "out"), max_steps=1, per_device_train_batch_size=8, learning_rate=0.1, warmup_steps=0,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False,
    )  # fmt: skip
    made = getattr(trl, f"{trainer}Trainer")(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trained = made.train()
    assert trained.global_step == 1
    assert math.isfinite(trained.training_loss)
    assert any((value != before[weight]).any() for weight, value in model.state_dict().items())
