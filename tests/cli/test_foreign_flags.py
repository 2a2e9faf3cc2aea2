"""Options of other programs, as their users type them: the answer is what does the same here."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest

from gymdata.cli.main import main

TRAIN = "train-dpo pairs -m model -o out"


@pytest.mark.parametrize(
    ("words", "refused", "says"),
    [
        (TRAIN, "--max-steps 10", "--set max_steps=10"),
        (TRAIN, "--learning-rate=1e-5", "--set learning_rate=1e-5"),
        (TRAIN, "--epochs 3", "--set num_train_epochs=3"),
        (TRAIN, "--num-epochs 3", "--set num_train_epochs=3"),
        (TRAIN, "--batch-size 8", "--set per_device_train_batch_size=8"),
        (TRAIN, "--bf16", "--set bf16=true"),
        (TRAIN, "--per_device_train_batch_size 4", "--set per_device_train_batch_size=4"),
        (TRAIN, "--lora_r 8", "--set lora_r=8"),
        (TRAIN, "--weight-decay -1", "--set weight_decay=-1"),
        (TRAIN, "--lr-scheduler-kwargs '{a: 1}'", "--set 'lr_scheduler_kwargs={a: 1}'"),
        (TRAIN, "--output_dir here", "use -o"),
        (TRAIN, "--loss gspo", "--loss is an option of train-rl"),
        (TRAIN, "--margin-scale 2", "--set margin_scale=2"),
        ("train-rl x -m model -o out", "--nonsense 1", "gymdata train-rl --help"),
        ("query SQL x", "--format csv", "--csv"),
        ("query SQL x", "--format=json", "--json"),
        ("query SQL x", "--format table", "leave it out"),
        ("query SQL x", "--format parquet", "-o FILE.parquet"),
        ("query SQL x", "--format xml", "gymdata query --help"),
        ("query SQL x", "--nonsense", "gymdata query --help"),
        ("view x", "--no-browser", "opens no browser: leave it out"),
        ("collect x", "--retries 1", "→ --set retries=1"),
        ("collect x", "--engine.max_model_len=9", "→ --set engine.max_model_len=9"),
        ("collect x", "--num-generations 8", "did you mean --num-rollouts?"),
        ("collect x", "--max_new_tokens=64", "did you mean --max-tokens?"),
        ("eval m x", "--max-completion-length 64", "did you mean --max-tokens?"),
        ("judge x", "--retries=2", "→ --set retries=2"),
        ("score x", "--request-timeout 3", "→ --set request_timeout=3"),
        ("collect x", "--default-score 5", "gymdata collect --help"),
        ("ls x", "--retries 1", "gymdata ls --help"),
    ],
)
def test_an_option_that_a_command_does_not_have_is_answered_with_what_does_it(
    words: str, refused: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read. Of trainers, of SQL programs, of servers that open a browser, and settings without a flag;
    others get the help."""
    if words == TRAIN and find_spec("trl") is None:
        pytest.skip("trl is not installed")
    assert main(shlex.split(f"{words} {refused}")) == 2
    shown = capsys.readouterr().err
    assert re.search(rf"No such option: {refused.split()[0].partition('=')[0]}\b", shown)
    assert says in shown
