"""Files that the settings of a trajectory builder name are found beside the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.finetune.parts import in_place


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ("e.py:E", "{}/e.py:E"),
        ("a=e.py:E", "a={}/e.py:E"),
        (["a=e.py:E", "b=http://h:1"], ["a={}/e.py:E", "b=http://h:1"]),
        ({"a": "e.py:E"}, {"a": "{}/e.py:E"}),
    ],
)
def test_environments_and_users_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: Any, found: Any
) -> None:
    """One environment, named ones in a list or a mapping, and the user's file; a URL stays as it is."""
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "e.py").write_text("")
    monkeypatch.chdir(tmp_path)
    placed = in_place({"env": env, "user": "e.py:u"}, folder)

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(one) for name, one in value.items()}
        return [filled(one) for one in value] if isinstance(value, list) else value.format(folder)

    assert placed == {"env": filled(found), "user": f"{folder}/e.py:u"}
