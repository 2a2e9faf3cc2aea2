"""The trainers' keys, known without loading a trainer."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymdata.cli.main import main
from gymdata.commands.train.settings import TRAINERS
from gymdata.commands.train.trainer_settings import LIMITS, RESERVED, check_settings
from gymdata.errors import UsageError
from gymdata.rollouts.schema import ROLLOUTS
from tests.model_files import POLICY, write_adapter
from tests.rollout_files import rollout, rollouts_table, two_turns, write_table

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_every_key_of_a_trainer_passes_the_check(algorithm: str) -> None:
    """The names that the command knows without a library are those of the classes that the training process has."""
    pytest.importorskip("trl")
    from trl.trainer.model_config import ModelConfig

    config = importlib.import_module(f"gymdata.commands.train.trainers.{algorithm}").CONFIG
    names = {field.name for kind in (config, ModelConfig) for field in dataclasses.fields(kind) if field.init}
    check_settings(algorithm, dict.fromkeys(names - RESERVED.keys()) | {"use_peft": False})


def test_a_typo_is_found_before_torch_and_leaves_no_folder(tmp_path: Path) -> None:
    """A misspelt and a mistyped setting are named together; torch is not loaded and no folder is made."""
    pytest.importorskip("trl")
    write_table(rollouts_table([rollout("t", 0, 1.0, two_turns(1, 5))]), tmp_path / "rollouts.jsonl", ROLLOUTS)
    code = (
        "import sys; from gymdata.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit('torch' if {'torch', 'transformers'} & set(sys.modules) else code)"
    )
    words = ["train-sft", tmp_path / "rollouts.jsonl", "-m", ROOT / "sample_data" / "policy", "-o", tmp_path / "out",
             "--set", "learnin_rate=1", "--set", "num_train_epochs=many"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "did you mean 'learning_rate'?" in done.stderr
    assert "num_train_epochs: got 'many', expected float" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", ["--lora", "--set=use_peft=true", "--dry-run --lora --set=lora_r=2"])
def test_a_new_adapter_over_a_lora_folder_is_refused(
    tmp_path: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained, with both ways out; training the folder further needs no LoRA settings."""
    pytest.importorskip("trl")
    adapter, out = write_adapter(tmp_path / "adapter"), tmp_path / "out"
    write_table(rollouts_table([rollout("t", 0, 1.0, two_turns(1, 5))]), tmp_path / "rollouts.jsonl", ROLLOUTS)
    words = ["train-sft", str(tmp_path / "rollouts.jsonl"), "-m", str(adapter), "-o", str(out), *setting.split()]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert f"{adapter} is a LoRA folder, and a new adapter needs a complete model as its base" in message
    assert (
        f"to train this adapter further, or merge it first: gymdata.merge_adapter({str(adapter)!r}, 'MODEL') in Python"
        in message
    )
    assert not out.exists()
    check_settings("sft", {"learning_rate": 1e-5}, model=str(adapter))
    for model in (None, str(POLICY)):
        with pytest.raises(UsageError, match=r"lora_r.*: no adapter is trained"):
            check_settings("sft", {"lora_r": 8}, model=model)
    check_settings("sft", {"lora_r": 8, "use_peft": False}, model=str(POLICY))
    check_settings("sft", {"use_peft": True}, model=str(POLICY))


def test_what_a_trainer_needs_and_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TRL, or TensorBoard where its events are wanted, the error names the extra."""
    from gymdata.commands.train import trainer_settings

    missing = "trl"
    found = trainer_settings.find_spec
    monkeypatch.setattr(trainer_settings, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(UsageError, match="'trl'"):
        check_settings("dpo", {})
    missing = "tensorboard"
    with pytest.raises(UsageError, match="'tensorboard'"):
        check_settings("dpo", {"report_to": ["tensorboard"]})


def test_no_strategy_is_the_text_that_yaml_reads_as_false() -> None:
    """--set save_strategy=no is what TRL documents, and YAML makes false of it: the trainer gets "no"."""
    from gymdata.commands.train.trainer_settings import sort_settings

    classes = {"trainer": {"save_strategy": set[type](), "bf16": {bool}}}
    given = {"save_strategy": False, "bf16": False}
    assert sort_settings(given, classes) == {"trainer": {"save_strategy": "no", "bf16": False}}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learning_rate", -1e-5, "a number of at least 0"),
        ("learning_rate", "nan", "a finite number"),
        ("learning_rate", float("inf"), "a finite number"),
        ("max_grad_norm", float("nan"), "a finite number"),
        ("max_grad_norm", -1, "a number of at least 0"),
        ("num_train_epochs", -1, "a number of at least 0"),
        ("max_steps", -2, "a number of at least -1"),
        ("max_steps", 0, "a number of at least 1, or -1 for all epochs"),
        ("seed", -1, "a number of at least 0 and below 4,294,967,296"),
        ("seed", 2**32, "a number of at least 0 and below 4,294,967,296"),
        ("per_device_train_batch_size", 0, "a number of at least 1"),
        ("gradient_accumulation_steps", 0, "a number of at least 1"),
        ("adam_beta2", 1, "a number of at least 0 and below 1"),
        ("lora_r", 0, "a number of at least 1"),
        ("lora_dropout", 1.5, "a number of at least 0 and at most 1"),
    ],
)
@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_a_number_without_sense_is_refused(algorithm: str, key: str, value: object, expected: str) -> None:
    """A sign, a NaN or a share that no trainer can mean is a mistake of usage, known before a trainer is loaded."""
    with pytest.raises(UsageError, match=f"settings: {key}: got .*, expected {expected}$") as caught:
        check_settings(algorithm, {key: value})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("dtype", "hint"), [("bf16", "bfloat16"), ("float64", "float16"), ("int8", None)])
@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_a_number_format_in_which_no_model_is_saved_is_refused(algorithm: str, dtype: str, hint: str | None) -> None:
    """With the formats that there are, and the nearest of them."""
    formats = "auto, float32, bfloat16, float16"
    with pytest.raises(UsageError, match=f"settings: dtype: got '{dtype}', expected one of {formats}") as caught:
        check_settings(algorithm, {"dtype": dtype})
    assert caught.value.hint == (hint and f"did you mean {hint!r}?")
    for format in formats.split(", "):
        check_settings(algorithm, {"dtype": format})


@pytest.mark.parametrize(
    ("algorithm", "value", "expected", "hint"),
    [
        ("dpo", ["ipoo", "sft"], "'ipoo', expected one of 19, such as ipo", "did you mean 'ipo'?"),
        ("dpo", "ipoo", "'ipoo', expected one of 19, such as ipo", "did you mean 'ipo'?"),
        ("kto", "kt0", "'kt0', expected one of kto, apo_zero_unpaired", None),
    ],
)
def test_a_loss_that_does_not_exist_is_refused_before_a_trainer_is_loaded(
    algorithm: str, value: object, expected: str, hint: str | None
) -> None:
    """The losses are those of TRL's source and gymdata's own."""
    with pytest.raises(UsageError, match=f"settings: loss_type: got {expected}") as caught:
        check_settings(algorithm, {"loss_type": value})
    assert (caught.value.exit_code, caught.value.hint) == (2, hint)


def test_every_pair_loss_passes_the_check() -> None:
    """A single name and a list, of TRL and of gymdata, and those of KTO."""
    check_settings("dpo", {"loss_type": "rebel"})
    check_settings("dpo", {"loss_type": ["sigmoid_norm", "sft", "rpo_sq", "aot_unpaired"]})
    check_settings("kto", {"loss_type": "apo_zero_unpaired"})


@pytest.mark.parametrize("algorithm", sorted(TRAINERS))
def test_every_default_is_within_the_limits(algorithm: str) -> None:
    """No trainer begins with a number that would be refused if it were given."""
    from trl.trainer.model_config import ModelConfig

    config = importlib.import_module(f"gymdata.commands.train.trainers.{algorithm}").CONFIG
    known = {field.name: field.default for cls in (config, ModelConfig) for field in dataclasses.fields(cls)}
    given = {key: known[key] for key in LIMITS if isinstance(known.get(key), (int, float))}
    assert {"learning_rate", "seed", "lora_r"} <= given.keys()
    check_settings(algorithm, given | {"use_peft": False})


def test_faults_of_the_trainers_keys_name_where_they_were_given(tmp_path: Path) -> None:
    """A flag, --set and the file each by its name, as for gymdata's own settings."""
    file = tmp_path / "rl.yaml"
    file.write_text("weight_decay: -1\nmax_stepz: 3\n")
    given = {"model": "m", "output": "o", "seed": -1}
    settings = TRAINERS["rl"].load(file, given, ["learning_rate=-1", "trainer.adam_beta1=2"], {"seed": "--seed"})
    with pytest.raises(UsageError) as caught:
        check_settings("rl", settings.trainer, called=settings.called)
    faults = sorted(str(fault).partition(": got")[0] for fault in caught.value.faults)
    assert faults == [
        "--seed",
        "--set learning_rate",
        "--set trainer.adam_beta1",
        f"{file}: unknown key 'max_stepz'\n  → did you mean 'max_steps'?",
        f"{file}: weight_decay",
    ]


def test_a_section_is_not_a_misspelt_key() -> None:
    """Keys of a trainer below a name that is none of its keys: the hint moves them up, and guesses no name."""
    with pytest.raises(UsageError) as caught:
        check_settings("rl", {"training": {"learning_rate": 2e-4}})
    assert caught.value.hint == "settings have no sections: move learning_rate to the top level"


@pytest.mark.parametrize("value", [5, "abc", ["a"]])
def test_a_section_of_the_trainer_that_is_none_is_named(value: Any) -> None:
    """``trainer`` holds keys and values."""
    with pytest.raises(UsageError, match=r"trainer: got .*, expected "):
        TRAINERS["rl"].of({"trainer": value, "learning_rate": 1e-5}, "settings")


@pytest.mark.parametrize(("text", "value"), [("off", "off"), ("on", "on"), ("auto", "auto"), ('"off"', "off")])
def test_on_and_off_are_what_they_say(text: str, value: str, tmp_path: Path) -> None:
    """YAML reads ``on`` and ``off`` as booleans."""
    (tmp_path / "rl.yaml").write_text(f"prefix_sharing: {text}\n")
    needed = {"model": "m", "output": tmp_path / "out"}
    assert TRAINERS["rl"].load(tmp_path / "rl.yaml", needed).prefix_sharing == value
