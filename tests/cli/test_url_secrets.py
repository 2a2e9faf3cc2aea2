"""A secret in a URL is in the request, and in no file, message or log; a user name or password is refused."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from gymdata.cli.main import main
from gymdata.errors import UsageError, redacted
from gymdata.urls import address, expanded, for_child, placeholder_values
from tests import faulty_server, judge_server
from tests.environments.env_server import Server
from tests.environments.env_server import serving as env_serving
from tests.forks import forks
from tests.judge.serve.conftest import start
from tests.rollout_files import rollout, two_turns, write_run
from tests.score.reward_server import PATH, Behaviour, app_of
from tests.servers import serving

pytestmark = pytest.mark.torch

SECRET = "s3cr3t-key"
DATA = Path(__file__).parents[2] / "sample_data"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def app_that_wants_the_secret(app: web.Application, seen: list[str]) -> web.Application:
    """Every request must bring the query; it is seen by nobody else."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> Any:
        seen.append(request.path_qs)
        if request.query.get("token") != SECRET:
            return web.json_response({"error": {"message": f"no token at {request.url}"}}, status=401)
        return await handler(request)

    app.middlewares.append(check)
    return app


@pytest.fixture
def engine() -> Iterator[tuple[str, list[str]]]:
    """A server of completions that wants its token in the query."""
    seen: list[str] = []
    with serving(app_that_wants_the_secret(faulty_server.build(faulty_server.Settings()), seen)) as url:
        yield f"{url}/v1?token={SECRET}", seen


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    rows = [
        {"task_id": f"t{i}", "responses_create_params": {"input": f"q{i}", "tools": [ADD]}, "answer": str(i)}
        for i in range(2)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def nowhere(folder: Path, *said: str) -> None:
    """The secret is in no file under ``folder``, and in nothing that was said."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [str(path) for path in files if SECRET.encode() in path.read_bytes()] == []
    assert not [text for text in said if SECRET in text]


def run(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """The command by its own words, as typed; what it printed."""
    known, sys.argv = sys.argv, ["gymdata", *words]
    try:
        assert main(words) == code
    finally:
        sys.argv = known
    said = capsys.readouterr()
    nowhere(folder, said.out, said.err)
    return said.out + said.err


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--json", "-v"]])
def test_collect_from_a_server(
    engine: tuple[str, list[str]], tasks: str, tmp_path: Path, policy: str, capsys: Any, more: list[str]
) -> None:
    """The token goes along with every request, on every path."""
    out = tmp_path / "out"
    words = ["collect", tasks, "--endpoint", engine[0], "-m", "fake", "--tokenizer", policy, "-o", str(out)]
    words += ["--max-tokens", "8"]
    run([*words, *more], out, capsys)
    assert all(path.startswith(("/v1/", "/version")) and path.endswith(f"?token={SECRET}") for path in engine[1])
    if not more:
        assert "token=***" in (out / "run.json").read_text()
        run(words, out, capsys)  # again: the same run, nothing to do


def test_collect_that_fails(
    engine: tuple[str, list[str]], tasks: str, tmp_path: Path, policy: str, capsys: Any
) -> None:
    """What a server says of the address that it was asked at is not repeated; nor is it in failures.jsonl."""
    wrong = engine[0].replace(SECRET, f"{SECRET}-wrong")
    words = ["collect", tasks, "--endpoint", wrong, "-m", "fake", "--tokenizer", policy, "-o", str(tmp_path / "out")]
    assert "no token at" in run([*words, "-v"], tmp_path / "out", capsys, 3)
    gone = f"http://127.0.0.1:9/v1?token={SECRET}"
    words = ["collect", tasks, "--endpoint", gone, "-m", "fake", "--tokenizer", policy, "-o", str(tmp_path / "gone")]
    assert "cannot be reached" in run([*words, "--set", "retries=0"], tmp_path / "gone", capsys, 3)


def test_collect_in_an_environment(
    engine: tuple[str, list[str]], tasks: str, tmp_path: Path, policy: str, capsys: Any
) -> None:
    """A resource server, that answers and that fails."""
    with env_serving(Server()) as server:
        query = f"?token={SECRET}"
        env = ["--env", f"{server.url}{query}", "--endpoint", engine[0], "-m", "fake", "--tokenizer", policy]
        run(["collect", tasks, *env, "-o", str(tmp_path / "env"), "--max-tokens", "8"], tmp_path / "env", capsys)
        server.modes["/verify"] = ["500"]
        words = ["collect", tasks, *env, "-o", str(tmp_path / "failed"), "--max-tokens", "8", "--set", "retries=0"]
        run(words, tmp_path / "failed", capsys, 1)
        assert "***" in (tmp_path / "failed" / "failures.jsonl").read_text()


def test_check(engine: tuple[str, list[str]], tmp_path: Path, capsys: Any) -> None:
    """The title, the JSON and the facts are without it."""
    for more in ([], ["--json"]):
        assert "token=***" in run(["check", "--endpoint", engine[0], *more], tmp_path, capsys)


def test_score(tmp_path: Path, capsys: Any) -> None:
    """By --reward-url, as a reward among others, and from a recipe: not in scores, their source, or what failed."""
    seen: list[str] = []
    rows = [rollout("a", i, 0.0, two_turns(1, 20 + i)) for i in range(2)]
    behaviour = Behaviour()
    with serving(app_that_wants_the_secret(app_of(behaviour), seen)) as base:
        url = f"{base}{PATH}?token={SECRET}"
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({"default": {url: 1}}))
        ways = [["--reward-url", url], ["--reward", f"{url}=0.5"], ["--recipe", str(recipe)]]
        for number, way in enumerate(ways):
            folder = write_run(tmp_path / f"run{number}", rows)
            run(["score", str(folder), *way, "--name", "x"], folder, capsys)
        behaviour.broken = True
        folder = write_run(tmp_path / "failing", rows)
        run(["score", str(folder), *ways[0], "--name", "x", "--set", "retries=0"], folder, capsys, 1)
    assert seen


def test_judge_and_serve_genrm(tmp_path: Path, capsys: Any) -> None:
    """A judge behind a URL, asked by the command and by the server, that answers and that is gone."""
    rows = [rollout("a", i, 0.0, two_turns(1, 20 + i), text=f"q={i + 1}") for i in range(2)]
    with judge_server.judge_server(judge_server.Behaviour()) as base:
        url = f"{base}?token={SECRET}"
        for number, address_ in enumerate((url, f"http://127.0.0.1:9/?token={SECRET}")):
            folder = write_run(tmp_path / f"run{number}", rows)
            words = ["judge", str(folder), "--endpoint", address_, "--model", "judge", "--set", "retries=0"]
            run(words, folder, capsys, 3 * number)
        with forks() as processes:
            server = start(processes, url, tmp_path / "served", said=tmp_path / "said", cwd=tmp_path)
            with contextlib.closing(server.log):
                assert server.post("/verify", {})[0] >= 400
                server.kill()
    nowhere(tmp_path / "served")


@pytest.mark.full
def test_finetune(engine: tuple[str, list[str]], tmp_path: Path, policy: str) -> None:
    """The collection of an epoch is a process of its own: its settings file has a placeholder, its environment the value."""
    copy = [sys.executable, "-c", "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2], dirs_exist_ok=True)"]
    config = {
        "llms": {"policy": {"_type": "openai", "model_name": "fake", "model": policy, "base_url": engine[0],
                            "max_tokens": 8}},
        "eval": {"general": {"dataset": str(DATA / "tasks" / "train.jsonl")}},
        "trajectory_builders": {"b": {"_type": "collect", "num_generations": 4}},
        "trainer_adapters": {"t": {"_type": "command", "format": "rollouts", "command": [*copy, "{model}", "{output}"]}},
        "trainers": {"loop": {"_type": "epochs"}},
        "finetuning": {"reward_function": {"name": "regex:.*"}, "algorithm": "sft", "num_epochs": 1, "limit": 2},
    }  # fmt: skip
    file = tmp_path / "finetune.yaml"
    file.write_text(yaml.safe_dump(config))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "gymdata.cli", "finetune", str(file), "--output", str(out)],
        capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    nowhere(out, done.stdout, done.stderr)
    assert "GYMDATA_SECRET_" in (out / "epoch-001" / "rollouts.collect.yaml").read_text()
    assert engine[1]


USERINFO: dict[str, Callable[[str, Path], list[str]]] = {
    "collect --endpoint": lambda url, run: ["collect", "x.jsonl", "-m", "m", "--endpoint", url],
    "collect --env": lambda url, run: ["collect", "x.jsonl", "-m", "m", "--env", url],
    "collect --env resources": lambda url, run: ["collect", "x.jsonl", "-m", "m", "--env", f"resources:{url}"],
    "collect --reward": lambda url, run: ["collect", "x.jsonl", "-m", "m", "--reward", url],
    "check --endpoint": lambda url, run: ["check", "--endpoint", url],
    "score --reward-url": lambda url, run: ["score", str(run), "--reward-url", url],
    "score --reward": lambda url, run: ["score", str(run), "--reward", f"{url}=2"],
    "judge --endpoint": lambda url, run: ["judge", str(run), "--endpoint", url],
    "serve-genrm --endpoint": lambda url, run: ["serve-genrm", "--endpoint", url],
    "finetune": lambda url, run: ["finetune", str(run.parent / "finetune.yaml")],
}


@pytest.mark.parametrize("words", USERINFO)
def test_userinfo_is_refused(tmp_path: Path, capsys: Any, words: str) -> None:
    """Exit code 2 before anything is asked or written; the password is not repeated, and the way to give a key is named."""
    url = f"http://user:{SECRET}@127.0.0.1:9/v1"
    folder = write_run(tmp_path / "run", [rollout("a", i, 0.0, two_turns(1, 20 + i)) for i in range(2)])
    section = {"llms": {"p": {"_type": "openai", "model_name": "m", "base_url": url}}, "finetuning": {}}
    (tmp_path / "finetune.yaml").write_text(yaml.safe_dump(section))
    said = run(USERINFO[words](url, folder), folder, capsys, 2)
    assert "http://***@127.0.0.1:9" in said
    assert "expected a URL without a user name or password" in said
    assert "_API_KEY" in said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://h/p", "http://h/p"),
        ("at http://u:p@h:1/p?a=1&b=&c#f, and", "at http://***@h:1/p?a=***&b=&***#***, and"),
        ("'https://h?k=v' (http://h/?k=v).", "'https://h?k=***' (http://h/?k=***)."),
        ("http://h?k=${GYMDATA_SECRET_3}", "http://h?k=${GYMDATA_SECRET_3}"),
        ("s3://bucket/key?versionId=1", "s3://bucket/key?versionId=***"),
        ("a=b? no://", "a=b? no://"),
    ],
)
def test_what_is_shown_of_a_url(text: str, shown: str) -> None:
    """Names of the query stay, values do not; redacting again changes nothing."""
    assert redacted(text) == shown
    assert redacted(shown) == shown


def test_settings_for_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders on disk, values in the environment; without them, the missing name is an error."""
    settings = {"endpoint": f"http://h/v1?token={SECRET}&v=1", "reward": [f"http://r/?k={SECRET}=0.5"], "n": 3}
    settings |= {"env": [f"a=http://e/?k={SECRET}", f"b=resources:http://e/?k={SECRET}", "c=dir/e.py:E"]}
    written = for_child(settings)
    assert SECRET not in json.dumps(written)
    with pytest.raises(UsageError, match="GYMDATA_SECRET_"):
        expanded(written, "file")
    for name, value in placeholder_values().items():
        monkeypatch.setenv(name, value)
    assert expanded(written, "file") == settings


def test_an_address_keeps_its_query_last() -> None:
    """A path goes before the query; HOST:PORT is http; a redacted URL and what names no host are refused."""
    server = address("https://h:1/base/v1/?k=v", "--endpoint", "http://x")
    assert server.without("/v1").url("/v1/models") == "https://h:1/base/v1/models?k=v"
    assert str(server) == "https://h:1/base/v1?k=***"
    assert address("h:1", "--endpoint", "http://x").url("/v1") == "http://h:1/v1"
    assert address("127.0.0.1:8000/v1", "--endpoint", "http://x").root == "http://127.0.0.1:8000/v1"
    for wrong in ("https://h/v1?k=***", "http://", "http:///x", "h", "ftp://h:1", ":8000"):
        with pytest.raises(UsageError):
            address(wrong, "--endpoint", "http://x")
