"""Rollouts and pairs on a terminal: which are chosen, what is there to read, and that data stays data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import gymdata
from gymdata.checks.violations import CODES
from gymdata.cli.main import main
from gymdata.commands.show.report import render
from gymdata.commands.show.run import show
from gymdata.store import Run
from tests.rollout_files import rollout, two_turns, write_run

BROKEN = [([1, 5], [10, 11, 2]), ([1, 5, 10, 99, 30], [40, 2])]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [rollout(task, i, float(i == 1), two_turns(4, 50 + i)) for task in ("a", "b") for i in range(3)]
    rows += [rollout("c", 0, None, two_turns(4, 60)), rollout("d", 0, -2.0, BROKEN)]
    return write_run(tmp_path / "run", rows)


def shown_ids(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    assert main(["show", str(path), "--json", *flags]) == 0
    return [row["rollout_id"] for row in json.loads(capsys.readouterr().out)["rollouts"]]


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ([], ["a-0"]),
        (["b-2"], ["b-2"]),
        (["--task", "b"], ["b-0", "b-1", "b-2"]),
        (["--best"], ["a-1"]),
        (["--worst"], ["d-0"]),
        (["-n", "3"], ["a-0", "a-1", "a-2"]),
        (["-n", "2", "--task", "b"], ["b-0", "b-1"]),
        (["-n", "3", "--best"], ["a-1", "b-1", "a-0"]),
        (["-n", "3", "--worst"], ["d-0", "a-0", "a-2"]),
    ],
    ids=" ".join,
)
def test_rollouts_are_chosen_by_id_task_and_reward(
    run: Path, capsys: pytest.CaptureFixture[str], flags: list[str], ids: list[str]
) -> None:
    """An id, a task, the best and the worst; the first where nothing was asked; -n counts from the first, the best or the
    worst, within a task too."""
    assert shown_ids(run, capsys, *flags) == ids


def test_rollouts_are_chosen_by_chance_and_all_of_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same ones each time; more than there are is all of them; and without a choice it says that there is one."""
    drawn = shown_ids(run, capsys, "--random", "3")
    assert len(set(drawn)) == 3
    assert shown_ids(run, capsys, "--random", "3") == drawn
    for flags, n in ((["--random"], 8), (["-n"], 8), (["--task", "b", "-n"], 3), (["--best", "-n"], 7)):
        assert len(shown_ids(run, capsys, *flags, "99")) == n
    for flags in ([], ["--best"]):
        assert main(["show", str(run), "-n", "2", *flags]) == 0
        assert ("2 of 8 rollouts: ROLLOUT_ID" in capsys.readouterr().err) == (not flags)


def test_the_best_rollout_is_chosen_by_scores_that_were_made_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--reward names them; without it the only one counts; by the total reward, unscored rollouts are refused with the name
    of the scores that exist."""
    run = write_run(tmp_path / "run", [rollout("a", i, None, two_turns(4, 20 + i)) for i in range(3)])
    (tmp_path / "last.py").write_text(
        "def last(completion_ids):\n    return [float(21 in ids) for ids in completion_ids]\n"
    )
    gymdata.score(run, reward=[f"{tmp_path / 'last.py'}:last"], name="last")
    assert shown_ids(run, capsys, "--best", "--reward", "last") == ["a-1"]
    assert shown_ids(run, capsys, "--best") == ["a-1"]
    assert main(["show", str(run), "--best", "--reward", "reward"]) == 2
    assert "--reward last" in capsys.readouterr().err
    assert main(["show", str(run), "--reward", "last"]) == 2
    assert "--best or --worst" in capsys.readouterr().err


def test_the_beginning_of_an_id_is_enough_when_it_is_the_only_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four characters and more stand for an id; several that fit, and none, are errors that name ids."""
    rows = [rollout(t, 0, 1.0, two_turns(4, 5), rollout_id=t) for t in ("abcd1x", "abcd2y", "ffff3z")]
    run = write_run(tmp_path / "run", rows)
    assert shown_ids(run, capsys, "ffff") == ["ffff3z"]
    assert main(["show", str(run), "abcd"]) == 2
    assert "abcd1x and abcd2y" in capsys.readouterr().err
    assert main(["show", str(run), "abcd3y"]) == 2
    assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--best", "--worst"], "--best and --worst exclude each other"),
        (["a-0", "--task", "a"], "ROLLOUT_ID and --task exclude each other"),
        (["--random", "0"], "--random"),
        (["-n", "0"], "-n"),
        (["a-0", "-n", "2"], "ROLLOUT_ID and -n / --limit exclude each other"),
        (["--random", "2", "-n", "2"], "has no effect with --random or --pair"),
        (["--task", "zz"], "got task_id 'zz'"),
        (["--pair", "x"], "has no pairs"),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    run: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    """Two choices, a count of none, and an id that is not there end with exit code 2 and one sentence."""
    assert main(["show", str(run), *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_rollout_is_read_from_top_to_bottom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards by part, messages by role in their order, reasoning, tool calls and their results; no line over 80."""
    call = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}]
    messages = [
        {"role": "system", "content": "Be brief. " * 30},
        {"role": "user", "content": "1+x?"},
        {"role": "assistant", "reasoning": "Let me add.", "tool_calls": json.dumps(call), "turn": 0},
        {"role": "tool", "name": "add", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is\n\n42", "turn": 1},
    ]
    parts = [{"name": "exact", "value": 0.25}, {"name": "style", "value": None}]
    row = rollout("a", 0, 0.5, two_turns(4, 50), messages=messages, rewards=parts)
    row["task"] = '{"task_id": "a", "answer": "42"}'
    assert main(["show", str(write_run(tmp_path / "run", [row]))]) == 0
    text = capsys.readouterr().out
    wanted = ["rollout a-0", "answer 42", "0.5   exact 0.25  style –", "system", "│ Be brief.", "user", "1+x?",
              "assistant", "turn 0: 3 tokens, stop, mean logprob -2.000", "Let me add.", '→ add(a=1, b="x")',
              "tool add", "│ 42", "turn 1: 2 tokens", "│ It is\n│\n│ 42"]  # fmt: skip
    at = -1
    for part in wanted:
        at = text.index(part, at + 1)
    assert max(map(len, text.splitlines())) <= 80


def test_a_missing_reward_has_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward function that failed is named with its error; a rollout that nothing scored says so."""
    failed, unscored = (rollout("a", i, None, two_turns(4, 50 + i)) for i in range(2))
    failed["extra"] = json.dumps({"reward_faults": {"mine": "KeyError: 'answer'"}})
    assert main(["show", str(write_run(tmp_path / "run", [failed, unscored])), "--task", "a"]) == 0
    rewards = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward")]
    assert [" ".join(line.split()) for line in rewards] == [
        "reward – exact – mine failed: KeyError: 'answer'",
        "reward – exact – not scored",
    ]


def test_a_break_is_explained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout with a break says so at the top, and at its end where, with the text of --explain."""
    assert main(["show", str(run), "d-0"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "faults M403 tool result without a call, T200 break" in text
    assert "T200 break turn 1, position 3 error" in text
    assert "expected 11 2" in text
    assert CODES["T200"].explanation in text
    (row,) = show(run, "d-0").to_dict()["rollouts"]
    assert [(v["code"], v["turn"], v["position"]) for v in row["violations"]] == [("M403", None, None), ("T200", 1, 3)]


def test_a_changed_rollout_is_shown_with_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Every planted fault of the sample data that concerns one rollout is named when that rollout is shown."""
    path = Path(gymdata.__file__).parent / "sample_data/rollouts/broken.jsonl"
    assert main(["show", str(path), "--random", "14", "--tokens"]) == 0
    text = capsys.readouterr().out
    for code in ("T209", "T210", "T200", "T206", "L301", "L302", "L303", "M401", "M403", "M404", "R502", "S102"):
        assert f"\n{code} {CODES[code].name}" in text


HOSTILE = "\x1b[5mred\x1b[0m \x1b]8;;http://x\x07link \r\x08\x9b2J\u202e [bold]not markup[/bold] :smile:"


def test_what_a_rollout_holds_does_nothing_to_the_terminal(tmp_path: Path) -> None:
    """Escapes, control characters and markup in every text of a rollout and a pair are printed as text."""
    call = json.dumps([{"id": HOSTILE, "function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}])

    def messages(index: int) -> list[dict[str, Any]]:
        said = f"{index} {HOSTILE}"
        return [
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": said, "reasoning": HOSTILE, "tool_calls": call, "turn": 0},
            {"role": "tool", "name": HOSTILE, "content": HOSTILE},
        ]

    odd: dict[str, Any] = {"stop_reason": HOSTILE, "finish_reason": HOSTILE, "policy": HOSTILE}
    rows = [rollout(HOSTILE, i, float(i), BROKEN if i == 2 else two_turns(4, 50 + i), messages=messages(i),
                    rewards=[{"name": HOSTILE, "value": 1.0}], **odd) for i in range(3)]  # fmt: skip
    for row in rows:
        row["task"] = json.dumps({"field": HOSTILE, HOSTILE: 1})
    run = write_run(tmp_path / "run", rows)
    gymdata.pairs(run, breaks="drop")
    for shown in (show(run, task=HOSTILE), show(run / "pairs-reward")):
        for width, colors in ((80, None), (120, "truecolor")):
            console = Console(
                width=width, markup=False, emoji=False, highlight=False, color_system=colors, force_terminal=True  # type: ignore[arg-type]  # one of its names
            )  # fmt: skip
            with console.capture() as captured:
                render(shown, tokens=True, console=console)
            text = captured.get()
            assert "\\x1b[5mred" in text
            assert "[bold]not markup[/bold] :smile:" in text
            for act in ("\x1b[5m", "\x1b]8", "\r", "\x08", "\x9b", "\u202e", "\x07"):
                assert act not in text


def test_tokens_stand_with_their_logprobs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--tokens lists position, id and logprob of each sampled token where there are no colors."""
    assert main(["show", str(run), "a-0", "--tokens"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("│  ")]
    assert lines == [
        ["│", "2", "10", "-1.0000"],
        ["│", "3", "11", "-2.0000"],
        ["│", "4", "2", "-3.0000"],
        ["│", "7", "50", "-1.0000"],
        ["│", "8", "2", "-2.0000"],
    ]


def test_tokens_without_their_text_have_the_flag_that_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A file of rows has no run.json, so the note speaks of none."""
    rows = Path(gymdata.__file__).parent / "sample_data/rollouts/clean.jsonl"
    assert main(["show", str(rows), "--tokens"]) == 0
    assert (
        "the tokenizer of these tokens is not known here: --tokenizer FOLDER shows their text"
        in capsys.readouterr().err
    )


def test_tokens_are_pieces_in_the_color_of_their_probability() -> None:
    """With a tokenizer, pieces are shown, special tokens written out, and likely ones look other than unlikely ones."""
    sample = Path(gymdata.__file__).parent / "sample_data"
    shown = show(sample / "rollouts/clean.jsonl", worst=True, tokenizer=sample / "policy")
    console = Console(width=80, force_terminal=True, color_system="truecolor", markup=False, highlight=False)
    with console.capture() as captured:
        render(shown, tokens=True, console=console)
    text = captured.get()
    assert "<|im_end|>" in text
    assert "<tool_call>" in text
    assert text.count("48;2;183;228;199") > 10
    assert "48;2;255;" in text


def test_a_pair_is_shown_from_its_fork(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What both sides have is shown once; each side follows from the first message that differs."""
    gymdata.pairs(run, breaks="drop")
    pair = gymdata.query("SELECT pair_id FROM pairs ORDER BY pair_id LIMIT 1", run)["pair_id"][0].as_py()
    gymdata.pairs(run, breaks="drop", output=run.parent / "pairs")
    for path in (run, run / "pairs-reward", run.parent / "pairs" / "pairs.parquet"):
        assert main(["show", str(path), "--pair", pair[:12]]) == 0
        text = capsys.readouterr().out
        assert text.count("calling") == 1
        assert text.index("calling") < text.index("they differ: token 5 after") < text.index("chosen ──")
        assert text.index("51 2") < text.index("rejected ──") < text.rindex(" 2")
    for path in (run / "pairs-reward", run.parent / "pairs" / "pairs.parquet"):
        assert main(["show", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["pair"]["fork_message"], found["pair"]["fork_token"], found["total"]) == (2, 5, 1)


def test_the_first_pair_has_a_name(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the flag stands, also before the path and where the run has rollouts; -n of pairs is refused."""
    gymdata.pairs(run, breaks="drop", strategy="all", output=run.parent / "pairs")
    monkeypatch.chdir(run.parent)
    first = gymdata.query("SELECT pair_id FROM pairs", "pairs")["pair_id"][0].as_py()
    for words in (["pairs", "--pair", "first"], ["--pair", "first", "pairs"], ["pairs"]):
        assert main(["show", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["pair"]["pair_id"] == first
    assert main(["show", "pairs", "-n", "2"]) == 2
    assert "pairs are shown one at a time" in capsys.readouterr().err


def test_rows_of_a_live_run_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a run is being collected, its sealed and its journaled rollouts can be shown."""
    with Run.open(
        tmp_path / "run", identity={}, extent={}, operation={}, run_id="run-1", rows_per_file=2, fsync_interval_s=0
    ) as run:
        for i in range(3):
            run.append(rollout("a", i, float(i), two_turns(1, 50 + i), run_id="run-1"))
        assert shown_ids(tmp_path / "run", capsys, "--task", "a") == ["a-0", "a-1", "a-2"]
        assert shown_ids(tmp_path / "run", capsys, "--best") == ["a-2"]
