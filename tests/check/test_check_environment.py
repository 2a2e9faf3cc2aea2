"""``check --env`` finds what is wrong with an environment, by file and line, and nothing wrong with a sound one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from gymdata.cli.main import main
from gymdata.commands.check.environment import EnvironmentCheck, check_environment
from gymdata.errors import UsageError

pytestmark = pytest.mark.tokenizer
SAMPLE = Path(__file__).parents[2] / "sample_data"
ADD = """
    def add(self, a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: The first.
            b: The second.
        '''
        return a + b
"""
#: What is planted → lines of a class after ``add``, the line that is named, and what the finding says.
PLANTED = {
    "no docstring": ("def double(self, a: int) -> int: return 2 * a", 11, "no docstring"),
    "no type": ("def double(self, a):\n        'Double.'\n        return 2 * a", 11, "missing a type hint"),
    "raises in __init__": ("def __init__(self): self.n = 1 / 0", 11, "ZeroDivisionError"),
    "raises in reset": ("def reset(self, **task): self.n = task['right']", 11, "KeyError: 'right'"),
    "endless": (
        "def spin(self) -> str:\n        'Spin.'\n        while True: Event().wait(0.01)",
        13,
        "no answer within",
    ),
    "blocks": ("async def spin(self) -> str:\n        'Spin.'\n        Event().wait()", 13, "blocks the event loop"),
    "no JSON": ("def thing(self) -> dict:\n        'A thing.'\n        return {'a': object()}", 11, "not JSON"),
    "NaN reward": ("def get_reward(self): return float('nan')", 11, "expected a finite number"),
    "misspelt name": ("def size(self) -> int:\n        'Size.'\n        return self.sise", 13, "AttributeError"),
    "other type": ("def name(self) -> str:\n        'Name.'\n        return 3", 11, "says that it returns str"),
    "returns nothing": ("def go(self) -> None:\n        'Go.'", 11, "null"),
    "respond gives a number": ("def respond(self, message): return 7", 11, "respond gave 7"),
    "ends the loop": (
        "async def spin(self) -> str:\n        'Spin.'\n        raise KeyboardInterrupt",
        2,
        "KeyboardInterrupt",
    ),
    "shared state": (
        "seen = []\n    def count(self) -> int:\n        'Count.'\n"
        "        self.seen.append(1)\n        return len(self.seen)",
        3,
        "different ways",
    ),
    "close raises": ("def close(self): raise OSError('busy')", 11, "OSError: busy"),
}


def checked(folder: Path, lines: str) -> EnvironmentCheck:
    file = folder / "env.py"
    file.write_text(f"from threading import Event\nclass Env:{ADD}    {lines}\n")
    (folder / "tasks.jsonl").write_text('{"task_id": "t", "prompt": "Add.", "left": 1}\n')
    return check_environment(f"{file}:Env", folder / "tasks.jsonl", timeout=0.2)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found_with_file_and_line(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One finding says what it is, and where."""
    if planted == "blocks":
        monkeypatch.setattr("gymdata.commands.check.environment.LIMIT_S", 0.5)
    lines, line, said = PLANTED[planted]
    report = checked(tmp_path, lines)
    matching = [one for one in report.findings if said in one.detail]
    assert matching, report.findings
    assert matching[0].where.partition(",")[0] == f"{tmp_path / 'env.py'}:{line}"


def test_a_module_that_an_async_tool_imports_may_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It blocks the loop at the first call alone."""
    monkeypatch.setattr("gymdata.commands.check.environment.LIMIT_S", 0.5)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_to_import.py").write_text("from threading import Event\nEvent().wait(1.0)\n")
    report = checked(
        tmp_path, "async def go(self) -> str:\n        'Go.'\n        import slow_to_import\n        return ''"
    )
    assert report.findings == []


def test_a_sound_environment_has_no_finding(tmp_path: Path) -> None:
    """The shipped calculator refuses sampled texts, which is no fault."""
    report = check_environment(f"{SAMPLE / 'calculator.py'}:Calculator", SAMPLE / "tasks" / "train.jsonl", limit=2)
    assert (report.ok, report.findings, report.tasks) == (True, [], 2)
    assert report.refused > 0
    assert (
        "random calls",
        f"{report.calls}: {report.calls - report.refused} answered, {report.refused} refused by the tool",
    ) in report.rows()
    assert {play.policy for play in report.plays} == {"scripted", "random", "empty"}
    assert checked(tmp_path, "def get_reward(self): return 0.5").findings == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("def get_reward(self): return 1.0", {"empty", "random"}),
        ("def get_reward(self): return 10.0", {"empty", "random"}),
        ("def step_reward(self, message): return float(not message.get('content') and not message.get('tool_calls'))",
         {"empty"}),
        ("def step_reward(self, message): return float(str(message.get('content')).isdigit())", {"random"}),
        ("def step_reward(self, message): return float(message.get('content') == 'Done.')", set()),
        ("def get_reward(self): return 0.0", set()),
        ("def get_reward(self): return 0.5", set()),
    ],
)  # fmt: skip
def test_a_full_reward_for_an_empty_or_a_random_answer_is_found(tmp_path: Path, lines: str, found: set[str]) -> None:
    """A policy that answers nothing, or anything, and earns 1 or more and as much as any other play."""
    findings = [one for one in checked(tmp_path, lines).findings if "full reward" in one.what]
    assert {name for name in ("empty", "random") for one in findings if name in one.what} == found
    assert all((one.severity, one.where) == ("warning", f"{tmp_path / 'env.py'}:2") for one in findings)


def test_plays_show_rewards_and_state(tmp_path: Path) -> None:
    """Scripted: each tool three times, then a text."""
    lines = "def reset(self, **task): self.n = 0\n    def get_reward(self): self.n += 1; return 0.5"
    play = checked(tmp_path, lines).plays[0]
    assert (play.policy, play.steps, play.reward, play.state) == ("scripted", 4, 0.5, {"n": "1"})


def test_a_person_plays(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that begins with a tool's name calls it; wrong JSON and unknown tools are named; another line is a message."""
    checked(tmp_path, "")
    monkeypatch.setattr("sys.stdin", io.StringIO('add {\nsub {"a": 2}\nadd {"a": 2, "b": 3}\nfive\n'))
    assert main(["check", "--env", f"{tmp_path / 'env.py'}:Env", "--play"]) == 0
    said = capsys.readouterr()
    assert "the arguments of add are no JSON" in said.err
    assert "tool: got 'sub', expected one of add" in said.err
    assert "tool: 5" in said.err
    assert "the rollout has ended: no tool was called" in said.err
    assert "human" in said.out


def test_a_reset_that_needs_a_tasks_fields_names_the_flag_for_tasks(tmp_path: Path) -> None:
    """The made-up task has a prompt only."""
    checked(tmp_path, "def reset(self, answer, **task): pass")
    report = check_environment(f"{tmp_path / 'env.py'}:Env")
    assert "takes a file of real ones" in report.findings[0].detail


def test_a_text_is_refused_where_the_class_takes_a_number(tmp_path: Path) -> None:
    """Before anything is started."""
    checked(tmp_path, "def __init__(self, uses: int = 2, name: str = '') -> None: pass")
    env = f"{tmp_path / 'env.py'}:Env"
    with pytest.raises(UsageError, match="uses: got 'many', expected a value of type int"):
        check_environment(env, arguments={"uses": "many"})
    assert check_environment(env, arguments={"uses": 3, "name": "many"}).ok


def test_faults_end_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And are a table, with file and line."""
    checked(tmp_path, PLANTED["NaN reward"][0])
    assert main(["check", "--env", f"{tmp_path / 'env.py'}:Env"]) == 1
    assert f"error: {tmp_path / 'env.py'}:11 fails get_reward gave nan" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("env", "said"),
    [("http://127.0.0.1:1", "is a server"), ("nowhere.py:Env", "no such file"), ("env.py", "path.py:name")],
)
def test_what_is_no_environment_in_python_is_refused(env: str, said: str) -> None:
    """By name."""
    with pytest.raises(UsageError, match=said):
        check_environment(env)
