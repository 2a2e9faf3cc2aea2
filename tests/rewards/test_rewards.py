"""Rewards: the named ones, users' functions, and how they are spelled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.errors import RewardError, UsageError
from gymdata.rewards import load_reward, load_rewards, parse_weight
from gymdata.rewards.named import REWARDS, named_reward
from gymdata.rewards.named.numeric import last_number
from gymdata.rewards.scheduler import Weighted, score_batch
from tests.rewards.conftest import Load
from tests.rewards.rollouts import rollout
from tests.rollout_files import rollout as row
from tests.rollout_files import two_turns, write_run


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("numeric", ("numeric", 1.0)),
        ("numeric=0.5", ("numeric", 0.5)),
        ("regex:a=1", ("regex:a", 1.0)),
        ("regex:a=1=1", ("regex:a=1", 1.0)),
        ("regex:a=b", ("regex:a=b", 1.0)),
        ("json_schema:s.json=2e-1", ("json_schema:s.json", 0.2)),
        ("dir/f.py:score=-1", ("dir/f.py:score", -1.0)),
        ("f.py:score", ("f.py:score", 1.0)),
    ],
)
def test_how_a_reward_is_spelled(spec: str, parsed: tuple[str, float]) -> None:
    """NAME[:ARG][=WEIGHT] or path.py:function[=WEIGHT]."""
    assert parse_weight(spec) == parsed


def test_an_unknown_reward_names_the_nearest() -> None:
    """A typo is a usage error with a suggestion, and so are an argument too many and a reward twice."""
    with pytest.raises(UsageError, match="did you mean 'numeric'"):
        load_rewards(["numric"])
    with pytest.raises(UsageError, match="takes no argument"):
        load_rewards(["numeric:3"])
    for spec in ("numeric=abc", "numeric=nan", "regex=a", "f.py:score=abc"):
        with pytest.raises(UsageError, match="the weight is not a number"):
            load_rewards([spec])
    with pytest.raises(UsageError, match="two rewards are named"):
        load_rewards(["numeric", "numeric=2"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.50 euros", 1234.5),
        ("x = -5", -5.0),
        ("12-5", 5.0),
        ("minus −7", -7.0),
        ("3e4", 30000.0),
        ("about .5", 0.5),
        ("7.", 7.0),
        ("none", None),
        ("1, 2, 3", 3.0),
        (r"so \boxed{9{,}500}", 9500.0),
        ("12{,}345{,}678.5", 12345678.5),
        (r"1\,234", 1234.0),
        (r"10,\!000", 10000.0),
        ("1\u202f234", 1234.0),
        ("1\u2009234\u2009567", 1234567.0),
        ("1'234", 1234.0),
        ("-$5", -5.0),
        ("$-5$", -5.0),
        (r"-\$1,234.50", -1234.5),
        ("−€5", -5.0),
        (r"\$9,500", 9500.0),
        ("$5-$10", 10.0),
        ("12$-$5", 5.0),
        ("\u20115", -5.0),
        ("the roots are 1,2,3", 3.0),
        ("-1,2,3", 3.0),
        ("1999,2000", 2000.0),
        ("1,2,345", 345.0),
        ("1.5e3", 1500.0),
        ("50%", 50.0),
        ("3/4", 4.0),
        ("#### 1,234", 1234.0),
        ("50 000 people", 50000.0),
        ("−1 234 567,5", -1234567.5),
        ("1\u202f234,56 €", 1234.56),
        ("in 2021 100 people", 100.0),
        ("1.234,56 €", 1234.56),
        ("1.234.567", 1234567.0),
        ("1.234", 1.234),
        ("1.5,2.5", 2.5),
        (r"3{,}14", 3.14),
        ("42, as of 12.05.2024.", 42.0),
        ("version 1.2.3", None),
    ],
)
def test_the_last_number(text: str, number: float | None) -> None:
    """Proper thousands as people and LaTeX write them, signs before a currency and exponents belong to a number; a hyphen
    between numbers does not, and numbers with commas between them are several. A part of a number, a date or a version is
    none."""
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("name", "text", "task", "value"),
    [
        ("exact_match", " 12\n", {"answer": "12"}, 1.0),
        ("exact_match", "12.0", {"answer": "12"}, 0.0),
        ("exact_match", "b", {"answer": ["a", "b"]}, 1.0),
        ("exact_match", "x", {}, None),
        ("numeric", "it is 1,000", {"answer": 1000}, 1.0),
        ("numeric", "it is 1,001", {"answer": 1000}, 0.0),
        ("numeric", "no number", {"answer": "7"}, 0.0),
        ("numeric", "7", {"answer": "seven"}, None),
        ("math_verify", r"so \boxed{\frac{1}{2}}", {"answer": "0.5"}, 1.0),
        ("math_verify", r"\boxed{3}", {"answer": "0.5"}, 0.0),
        ("regex:^yes", "yes!", {}, 1.0),
        ("regex", "no", {"pattern": "^yes"}, 0.0),
        ("regex", "no", {}, None),
        ("json_schema", '```json\n{"a": 1}\n```', {"schema": {"required": ["a"]}}, 1.0),
        ("json_schema", '{"b": 1}', {"schema": {"required": ["a"]}}, 0.0),
        ("json_schema", "not json", {"schema": {}}, 0.0),
        ("json_schema", "{}", {}, None),
        ("contains:No", "i do not know", {}, 1.0),
        ("contains:no", "yes", {"answer": "yes"}, 0.0),
        ("contains", "It is Paris.", {"answer": ["paris", "Lutetia"]}, 1.0),
        ("contains", "It is Rome.", {}, None),
    ],
)
def test_named_rewards(name: str, text: str, task: dict[str, Any], value: float | None) -> None:
    """1 when it holds, 0 when not, None when the task lacks what the reward needs."""
    assert load_reward(name)([rollout(text, **task)]) == [value]


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"$ref": "#/definitions/none"}])
def test_whatever_a_named_reward_raises_is_a_fault_of_its_rollout(schema: dict[str, Any]) -> None:
    """A schema that cannot be followed leaves its own rollout without a reward, and no other."""
    views: Any = [rollout("{}", schema=schema), rollout("{}", schema={})]
    bad, good = score_batch([Weighted(named_reward("json_schema", None))], views)
    assert bad.faults["json_schema"].startswith("reward: json_schema raised ")
    assert (bad.parts[0].value, good.parts[0].value, good.faults) == (None, 1.0, {})


def test_a_schema_file(tmp_path: Path) -> None:
    """json_schema:FILE takes the schema from the file, and refuses a file that is none."""
    (tmp_path / "s.json").write_text('{"type": "array"}')
    assert named_reward("json_schema", str(tmp_path / "s.json"))([rollout("[]"), rollout("{}")]) == [1.0, 0.0]
    (tmp_path / "bad.json").write_text('{"type": 7}')
    with pytest.raises(UsageError, match="not a JSON Schema"):
        named_reward("json_schema", str(tmp_path / "bad.json"))


def test_a_function_of_the_users_is_called_as_trl_calls_it(load: Load) -> None:
    """prompts, completions, completion_ids and a column for each field of the tasks; strings for string prompts."""
    function = load(
        "seen = []\n"
        "def score(prompts, completions, completion_ids, answer, **kwargs):\n"
        "    seen.append((prompts, completions, completion_ids, answer, kwargs))\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n",
        "r.py:score=3",
    )
    assert function([rollout("1", answer="1", level=4), rollout("2", answer="1")]) == [1.0, 0.0]
    assert (function.name, load_rewards(["r.py:score=3"])[0][1]) == ("score", 3.0)
    # A Python function has globals.
    prompts, completions, ids, answer, rest = function.function.__globals__["seen"][0]  # type: ignore[attr-defined]
    assert (prompts, completions, ids, answer) == (["q", "q"], ["1", "2"], [[1, 2], [1, 2]], ["1", "1"])
    assert rest == {"level": [4, None]}


def test_conversations_are_given_as_messages(load: Load) -> None:
    """A prompt that came as messages makes prompts and completions lists of messages."""
    function = load("def f(completions, **_):\n    return [len(c[0]['content']) for c in completions]\n")
    assert function([rollout("four", prompt=[{"role": "user", "content": "q"}])]) == [4.0]


def test_the_type_of_a_completion_does_not_depend_on_the_batch(load: Load) -> None:
    """Each rollout's task decides: a text prompt without tools gives text, also beside others and without an answer."""
    function = load(
        "def f(prompts, completions, **_):\n"
        "    return [2.0 * isinstance(p, str) + isinstance(c, str) for p, c in zip(prompts, completions)]\n"
    )
    chat = rollout("a", prompt=[{"role": "user", "content": "q"}])
    tools = {**rollout("b"), "tools": [{"type": "function"}]}
    silent = {**rollout(""), "completion": []}
    every = [rollout("c"), chat, tools, silent]
    assert function(every) == [value for one in every for value in function([one])] == [3.0, 0.0, 0.0, 3.0]


def test_async_none_and_nan(load: Load) -> None:
    """A function may be async, and may say None or NaN for "does not apply"."""
    function = load("async def f(completions, **_):\n    return [None, float('nan'), 1]\n")
    assert function([rollout("a"), rollout("b"), rollout("c")]) == [None, None, 1.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1, 2]", "f returned 2 values for 1 rollout, expected one for each (r.py:1)"),
        ("return []", "f returned 0 values for 1 rollout, expected one for each (r.py:1)"),
        ("return 'x'", "f returned a value of type str, expected a list of numbers (r.py:1)"),
        ("return 1.0", "f returned a value of type float, expected a list of numbers (r.py:1)"),
        ("return {'a': 1}", "f returned a value of type dict, expected a list of numbers (r.py:1)"),
        ("yield 1; yield 2", "f returned 2 values for 1 rollout, expected one for each (r.py:1)"),
        ("raise KeyError('k')", "f raised KeyError: 'k' (r.py:2, in f)"),
        ("exit(3)", "f raised SystemExit: 3 (r.py:2, in f)"),
        ("raise __import__('asyncio').CancelledError", "CancelledError"),
        ("raise BaseException('x')", "BaseException"),
        (
            "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
            "f raised E, whose message raised ZeroDivisionError (r.py:2, in f)",
        ),
        ("import numpy; return numpy.ones(1) * 1j", "expected a finite number or None (r.py:1)"),
        ("import numpy; return [numpy.timedelta64(5)]", "expected a finite number or None (r.py:1)"),
        ("return [bytearray(b'1')]", "expected a finite number or None (r.py:1)"),
        ("import json; return json.loads('{')", "(r.py:2, in f)"),
    ],
)
def test_a_function_that_fails_is_the_rewards_fault(load: Load, body: str, said: str) -> None:
    """Raising, a wrong count and a value that is no number say what was got and expected, and the user's file and line."""
    (fault,) = load(f"def f(completions, **_):\n    {body}\n")([rollout("a")])
    assert isinstance(fault, RewardError)
    assert said in fault.message
    assert fault.message.startswith("reward: f r")
    assert fault.exit_code == 3


def test_a_function_with_the_wrong_number_of_values_is_not_asked_again(load: Load) -> None:
    """Asked one by one, a function that returns one value would be right by accident; it is useless from then on."""
    function = load("asked = []\ndef f(completions, **_):\n    asked.append(1)\n    return [1.0]\n")
    scored = score_batch([Weighted(function)], [rollout("a"), rollout("b"), rollout("c")])
    assert [one.parts[0].value for one in scored] == [None] * 3
    assert all("returned 1 value for 3 rollouts" in one.faults["f"] for one in scored)
    assert score_batch([Weighted(function)], [rollout("a")])[0].parts[0].value is None
    assert function.function.__globals__["asked"] == [1]  # type: ignore[attr-defined]  # a Python function has them


def test_a_function_is_called_once_for_a_batch(load: Load) -> None:
    """Never to see what it would return: a call may cost money, or change something."""
    counts = "calls.append(len(completions))\n    return [1.0] * len(completions)\n"
    each = load(f"calls = []\ndef f(completions, **_):\n    {counts}")
    assert [each([rollout("a")] * n) for n in (1, 3, 1)] == [[1.0], [1.0] * 3, [1.0]]
    assert each.function.__globals__["calls"] == [1, 3, 1]  # type: ignore[attr-defined]  # a Python function has them


def test_what_is_no_function_is_refused_before_it_is_called(load: Load) -> None:
    """A class, a value and a builtin are usage errors; an instance that can be called is taken, async or not."""
    text = (
        "class Kind:\n"
        "    async def __call__(self, completions, **_):\n"
        "        return [2.0 for _ in completions]\n"
        "instance, value, builtin = Kind(), 3, min\n"
        "async def stream(completions, **_):\n"
        "    yield 1.0\n"
    )
    for name, said in (
        ("Kind", "got the class Kind, expected a function"),
        ("value", "got 3, expected a name, path.py:function, or a function"),
        ("builtin", "its parameters cannot be read"),
    ):
        with pytest.raises(UsageError, match=said):
            load(text, f"r.py:{name}")
    assert load(text, "r.py:instance")([rollout("a")]) == [2.0]
    (fault,) = load(text, "r.py:stream")([rollout("a")])
    assert "stream returned a value of type async_generator, expected a list of numbers" in str(fault)


@pytest.mark.parametrize(
    ("text", "spec", "said"),
    [
        ("", "no.py:f", "no such file"),
        ("def good(**_): ...\n", "r.py:goo", "did you mean 'good'"),
        ("import nothing_like_it\n", "r.py:f", "cannot be imported"),
        ("y = 1\nx = 1 / 0\n", "r.py:f", r"ZeroDivisionError.*\(r.py:2\)"),
        ("y = 1\nimport sys; sys.exit(0)\n", "r.py:f", r"SystemExit: 0.*\(r.py:2\)"),
    ],
)
def test_a_file_that_cannot_be_loaded(load: Load, text: str, spec: str, said: str) -> None:
    """A missing file or name, and whatever the module's own code raises, sys.exit included, with file and line."""
    with pytest.raises(UsageError, match=said):
        load(text, spec)


def test_several_reward_servers_have_a_name_each() -> None:
    """Two URLs are two rewards; the same one twice is refused."""
    urls = ["http://localhost:5000/get_reward", "http://localhost:5001/get_reward=0.5"]
    assert [(f.name, weight) for f, weight in load_rewards(urls)] == [("remote", 1.0), ("remote_2", 0.5)]
    with pytest.raises(UsageError, match="two rewards are named"):
        load_rewards([urls[0], urls[0]])


def test_every_shipped_reward_says_when_it_is_one_and_what_it_needs() -> None:
    """Names, help, columns and arguments come from the files of the folder."""
    assert set(REWARDS.names()) >= {"contains", "exact_match", "json_schema", "math_verify", "numeric", "regex"}
    assert all(entry.help and entry.object.needs for entry in REWARDS)


def test_a_reward_of_another_package_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point adds a reward that names no needs: it is scored, completed, helped and never a defect."""
    (tmp_path / "shouting.py").write_text(
        "from gymdata.rewards.named import REWARDS, NamedReward\n\n@REWARDS.register('shouting')\n"
        'class Shouting(NamedReward):\n    """The last message is in capitals."""\n\n'
        "    def check(self, text, task):\n        return float(text.isupper())\n"
    )
    installed = tmp_path / "shouting-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[gymdata.rewards]\nshouting = shouting:Shouting\n")
    run = write_run(
        tmp_path / "run", [row("t", 0, 0.0, two_turns(1, 5), text="HO"), row("t", 1, 0.0, two_turns(1, 6), text="o")]
    )
    code = (
        "import sys, gymdata; from gymdata.cli.main import main\n"
        "assert gymdata.score(sys.argv[1], reward='shouting').mean == 0.5\n"
        "sys.exit(main(['collect', '--help']))"
    )
    path = os.pathsep.join(map(str, [tmp_path, Path(gymdata.__file__).parents[1]]))
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "300"}
    command = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, "shouting" in done.stdout) == (0, True), done.stderr
