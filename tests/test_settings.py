"""Settings: file, flags and --set in their order, and errors in a user's words."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pydantic
import pytest
import yaml

from gymdata.errors import COMMAND_LINE, UsageError
from gymdata.settings import Config, OnlyWith, read_yaml


class Settings(Config):
    """What these tests set."""

    strategy: Literal["all", "best-worst"]
    learning_rate: float = pydantic.Field(1e-3, gt=0)
    engine: dict[str, object] = pydantic.Field(default_factory=dict)
    seeds: int | list[int] | None = None
    switch: bool | int = 0
    only_fast: bool = False
    slow: bool = False
    not_with: ClassVar[OnlyWith] = {"only_fast": ("{slow:True}", lambda c: not c.slow)}


@pytest.fixture(autouse=True)
def _command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors name flags."""
    monkeypatch.setenv(COMMAND_LINE, "1")


def test_flags_beat_the_file_and_set_beats_flags(tmp_path: Path):
    """Defaults, then the file, then flags that were given, then --set; 1e-6 is a number."""
    file = tmp_path / "c.yaml"
    file.write_text("strategy: all\nlearning_rate: 1e-6\n")
    assert Settings.load(file).learning_rate == 1e-6
    assert Settings.load(file, {"learning_rate": 0.5, "strategy": None}).learning_rate == 0.5
    done = Settings.load(file, {"learning_rate": 0.5}, ["learning_rate=2e-5", "engine.max_model_len=64"])
    assert done.learning_rate == 2e-5
    assert done.engine == {"max_model_len": 64}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, r"strategy is missing.*--strategy"),
        ({"strategy": "al"}, r"got 'al', expected one of all, best-worst.*did you mean 'all'"),
        ({"strategy": "all", "learning_rate": -1}, r"learning_rate: got -1, expected a number greater than 0"),
        (
            {"strategy": "all", "seeds": 2**63},
            r"seeds: got 9223372036854775808, expected an integer of at most 64 bits",
        ),
        ({"strategy": "all", "seeds": [1, -(2**64)]}, r"expected an integer of at most 64 bits"),
        ({"strategy": "all", "engine": {"seed": 10**20}}, r"expected an integer of at most 64 bits"),
        ({"strategy": "all", "learning_rat": 1}, r"unknown key 'learning_rat'.*did you mean 'learning_rate'"),
        (
            {"train": {"strategy": "all", "slow": True}},
            r"unknown key 'train'.*→ settings have no sections: move slow, strategy to the top level",
        ),
    ],
)
def test_errors_name_the_key_and_what_was_expected(values: dict, said: str):
    """A missing, unknown, misspelt or impossible setting is said in the words of the command line."""
    with pytest.raises(UsageError, match=f"(?s){said}"):
        Settings.load(None, values)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["learning_rate=-1"], "--set learning_rate: got -1, expected a number greater than 0"),
        (["strategy=none"], "--set strategy: got 'none', expected one of all, best-worst"),
        (["seeds=[1, x]"], "--set seeds: got [1, 'x'], expected"),
        (["learning_rat=1"], "--set: unknown key 'learning_rat'\n  → did you mean 'learning_rate'?"),
        (["only_fast=true", "slow=true"], "--set only_fast has no effect with --slow\n  → leave one of them out"),
    ],
)
def test_errors_of_set_name_it(tmp_path: Path, sets: list[str], said: str) -> None:
    """What --set gave is not looked for in the file of --config, whose own faults name it."""
    file = tmp_path / "c.yaml"
    file.write_text("strategy: all\n")
    with pytest.raises(UsageError) as caught:
        Settings.load(file, None, sets)
    assert str(caught.value).startswith(said)
    file.write_text("strategy: al\n")
    with pytest.raises(UsageError) as of_file:
        Settings.load(file)
    assert str(of_file.value).startswith(f"{file}: strategy: got 'al'")


@pytest.mark.parametrize("given", [".inf", "-.inf", ".nan", "nan"])
def test_a_number_that_no_run_json_holds_is_refused(given: str) -> None:
    """Infinite, or not a number: JSON has neither, so what was trained or sampled with would not be known."""
    with pytest.raises(UsageError, match=r"--set learning_rate: got .*, expected a "):
        Settings.load(None, {"strategy": "all"}, [f"learning_rate={given}"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        # The second one would win in silence.
        ("a: 1\nb: 2\na: 3\n", r" is not valid YAML: key 'a' is given twice at line 3, column 1$"),
        # Not the position in PyYAML's buffer.
        ("strategy: all\n  learning_rate: 1\n", r"mapping values are not allowed .* at line 2, column 16$"),
        ("a: " + "[" * 100_000, "YAML"),
        # Bytes that are not UTF-8, a control character, a date that is none.
        (b"\xff\xfe\x00", "YAML"),
        ("a: \0", "YAML"),
        ("a: 2026-13-45", "YAML"),
    ],
    ids=range(6),
)
def test_a_file_that_is_no_yaml_of_settings_is_a_mistake_of_usage(
    tmp_path: Path, content: str | bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file and, in one line, what is wrong where, whatever other libraries did to PyYAML's loader."""
    monkeypatch.setitem(yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:timestamp", lambda *_: "a date")
    file = tmp_path / "c.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=rf"c\.yaml:?.*{says}"):
        read_yaml(file)


def test_keys_are_compared_a_bounded_number_of_times_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The check for a key given twice costs as much per key in a long mapping as in a short one."""
    compared = 0

    class Key(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    monkeypatch.setitem(yaml.SafeLoader.yaml_constructors, "!key", lambda self, node: Key(node.value))
    file = tmp_path / "c.yaml"
    file.write_text("".join(f"!key key_{n}: {n}\n" for n in range(2_000)))
    assert len(read_yaml(file)) == 2_000
    assert compared <= 2_000 * 2


@pytest.mark.parametrize("given", ["learning_rate=true", "seeds=false", "seeds=[1, true]"])
def test_numbers_are_no_truths(given: str) -> None:
    """A boolean where a number is expected is refused, and taken where it is one of the types."""
    with pytest.raises(UsageError, match="expected a number"):
        Settings.load(overrides={"strategy": "all"}, sets=[given])
    taken = Settings.load(overrides={"strategy": "all", "switch": True, "engine": {"eager": True}})
    assert taken.switch is True
    assert taken.engine == {"eager": True}


def test_many_keys_are_not_listed() -> None:
    """A key like none of a few names them; where there are hundreds, the documentation has them."""
    few, many = ({f"key_{i}": None for i in range(n)} for n in (3, 300))
    assert UsageError.unknown_key("zzz", few, "--set").hint == "known keys: key_0, key_1, key_2"
    assert UsageError.unknown_key("zzz", many, "--set").hint == "`gymdata docs settings` lists the keys"
