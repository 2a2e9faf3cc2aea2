"""Models and tokenizers are found on this machine or not at all: no name ever becomes a request."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from gymdata.chat.template import TransformersChat
from gymdata.errors import DataError
from gymdata.models._transformers import load_reader, load_tokenizer, local_folder
from gymdata.models.model_identity import model_facts, stored_dtype

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nobody_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any connection fails the test; the cache is empty, and the libraries believe to be online."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("load", [
    local_folder, load_tokenizer, TransformersChat.load, load_reader, model_facts,
    stored_dtype,
])  # fmt: skip
@pytest.mark.parametrize("name", ["policy", "runs/polcy", "./policy", "/no/such/policy", "a/b/c", "~/policy"])
def test_a_mistyped_path_is_no_request(load: Any, name: str) -> None:
    """The error says that there is no such folder, and for what may be a hub name that it is not in the cache."""
    with pytest.raises(DataError, match="no such f") as caught:
        load(name)
    assert ("not in the local Hugging Face cache" in str(caught.value)) == (name in ("policy", "runs/polcy"))


def test_a_mistyped_folder_is_answered_with_its_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`models/polcy` beside `models/policy` is no name to fetch; `gpt3` may be one, whatever lies in the current folder."""
    (tmp_path / "models" / "policy").mkdir(parents=True)
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"did you mean 'policy'\?") as mistyped:
        local_folder("models/polcy")
    assert "hf download" not in str(mistyped.value)
    with pytest.raises(DataError, match=r"did you mean 'gpt2'\? .*hf download gpt3"):
        local_folder("gpt3")


def test_a_file_is_no_model_and_none_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is named as one, however its path is written, and what a mistyped name is answered with is a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("tasks.jsonl", "task.jsonl"):
        Path(name).write_text("{}")
    for given in ("tasks.jsonl", "./tasks.jsonl", tmp_path / "tasks.jsonl"):
        with pytest.raises(DataError, match=r"tasks.jsonl: is a file, expected the folder of a model") as caught:
            local_folder(given)
        assert caught.value.hint is None
    for given in ("tasksl", "./tasksl"):
        with pytest.raises(DataError, match="no such f") as caught:
            local_folder(given)
        assert "did you mean" not in str(caught.value)


def test_a_folder_is_itself(policy: str) -> None:
    """A model's folder is taken as it is."""
    assert local_folder(policy) == Path(policy)
    assert len(load_tokenizer(policy)) > 0


def test_the_reason_for_no_tokenizer_is_whole(tmp_path: Path) -> None:
    """An empty folder is said to be empty; what transformers says of another is one line, and no half sentence."""
    with pytest.raises(DataError, match="holds no tokenizer: the folder is empty"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="holds no tokenizer that transformers can read: ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith(".")


def test_every_from_pretrained_is_local() -> None:
    """Wherever a model or tokenizer is loaded, the call says local_files_only, or adds an adapter's folder to a model."""
    calls = []
    for file in (ROOT / "gymdata").rglob("*.py"):
        for found in re.finditer(r"(\w+)\)?\.from_pretrained\(", text := file.read_text()):
            depth, end = 1, found.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            if "local_files_only=True" not in text[found.end() : end]:
                calls.append(found[1])
    assert sorted(calls) == ["PeftModel", "PeftModelForSequenceClassification"]
