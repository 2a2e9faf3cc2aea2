"""Options of other programs, as their users type them: the answer is what does the same here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from gymdata.cli.main import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-steps", "10"], "--set max_steps=10"),
        (["--learning-rate=1e-5"], "--set learning_rate=1e-5"),
        (["--epochs", "3"], "--set num_train_epochs=3"),
        (["--batch-size", "8"], "--set per_device_train_batch_size=8"),
        (["--bf16"], "--set bf16=true"),
        (["--per_device_train_batch_size", "4"], "--set per_device_train_batch_size=4"),
        (["--lora_r", "8"], "--set lora_r=8"),
        (["--weight-decay", "-1"], "--set weight_decay=-1"),
        (["--lr-scheduler-kwargs", "{a: 1}"], "--set 'lr_scheduler_kwargs={a: 1}'"),
        (["--output_dir", "here"], "use -o"),
        (["--loss", "gspo"], "--loss is an option of train-rl"),
        (["--margin-scale", "2"], "--set margin_scale=2"),
    ],
)
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_an_argument_of_the_trainer_is_answered_with_its_setting(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read: the word, and what does it."""
    assert main(["train-dpo", "pairs", "-m", "model", "-o", "out", *words]) == 2
    shown = capsys.readouterr().err
    assert f"No such option: {words[0].partition('=')[0]}\n" in shown
    assert says in shown


def test_a_word_that_nobody_knows_is_answered_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-rl", "x", "-m", "model", "-o", "out", "--nonsense", "1"]) == 2
    assert "gymdata train-rl --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("query SQL x --format csv", "--csv"),
        ("query SQL x --format=json", "--json"),
        ("query SQL x --format table", "leave it out"),
        ("query SQL x --format parquet", "-o FILE.parquet"),
        ("query SQL x --format xml", "gymdata query --help"),
        ("query SQL x --nonsense", "gymdata query --help"),
        ("view x --no-browser", "opens no browser: leave it out"),
        ("view x --sql-rows 5", "→ --set sql_rows=5"),
        ("collect x --retries 1", "→ --set retries=1"),
        ("collect x --engine.max_model_len=9", "→ --set engine.max_model_len=9"),
        ("collect x --num-generations 8", "did you mean --num-rollouts?"),
        ("collect x --max_new_tokens=64", "did you mean --max-tokens?"),
        ("eval m x --max-completion-length 64", "did you mean --max-tokens?"),
        ("judge x --retries=2", "→ --set retries=2"),
        ("score x --request-timeout 3", "→ --set request_timeout=3"),
        ("collect x --sql-rows 5", "gymdata collect --help"),
        ("ls x --retries 1", "gymdata ls --help"),
    ],
)
def test_an_option_that_a_command_does_not_have_is_answered_with_what_does_it(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of SQL programs, of trainers, of servers that open a browser, and settings without a flag; others get the help."""
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert "No such option" in shown
    assert says in shown
