"""The pages over HTTP: what they answer, what they refuse, and that data is text in them and never more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import Serve

PAGES = ["/", "/?where=reward+%3E+0", "/rollout?id=plain-0", "/data/tokens?id=plain-0", "/break?id=none", "/pairs",
         "/data/why?id=plain-0&turn=0&k=0", "/group?id=group-plain", "/comparisons", "/sql?q=SELECT+1", "/training",
         "/lineage", "/status"]  # fmt: skip
HOSTILE = (
    '<script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31mred\x1b]0;title\x07\u202e"\'`</textarea>{{7*7}}'
)
BROKEN = [([1, 20], [10, 11, 2]), ([1, 20, 10, 99, 2, 30], [40, 2])]


def get(url: str, headers: dict[str, str] | None = None) -> tuple[int, str, Any]:
    """(status, body, headers)."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=30) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    messages = [
        {"role": "system", "content": HOSTILE},
        {"role": HOSTILE, "content": HOSTILE, "name": HOSTILE},
        {
            "role": "assistant",
            "content": HOSTILE,
            "reasoning": HOSTILE,
            "turn": 0,
            "tool_calls": json.dumps([{"function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}]),
        },
        {"role": "assistant", "content": HOSTILE, "turn": 1, "tool_calls": HOSTILE},
    ]
    row = rollout(HOSTILE, 0, 1.0, BROKEN, messages=messages, policy=HOSTILE, stop_reason=HOSTILE, status=HOSTILE,
                  rewards=[{"name": HOSTILE, "value": 1.0}, {"name": "b", "value": None}])  # fmt: skip
    plain = rollout("plain", 0, 0.0, two_turns(20, 40))
    return write_run(tmp_path / "run", [row, plain])


def test_the_page_of_the_status_says_how_far_runs_are(serve: Serve, tmp_path: Path):
    """Each run with what `gymdata status` says of it; a file of rollouts alone says nothing."""
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, two_turns(20, 40))])
    page = get(serve(run) + "/status")[1]
    for text in (str(run), "<dt>state</dt>", "GB free"):
        assert text in page
    assert "No run folder was given" in get(serve(run / "rollouts" / "part-00000.parquet") + "/status")[1]


def addresses(rollout_id: str, group_id: str) -> list[str]:
    about = urllib.parse.urlencode({"id": rollout_id})
    group = urllib.parse.urlencode({"id": group_id})
    where = urllib.parse.urlencode({"where": HOSTILE, "task": HOSTILE, "status": HOSTILE})
    return ["/", "/?by=group", f"/?{where}", f"/rollout?{about}", f"/break?{about}&turn=1", f"/group?{group}",
            "/rollout?" + urllib.parse.urlencode({"id": HOSTILE}), "/" + urllib.parse.quote(HOSTILE)]  # fmt: skip


def test_what_comes_from_data_is_text_on_every_page(serve: Serve, hostile: Path):
    """Markup, attributes, terminal escapes and bidirectional marks of data are shown, not acted on."""
    base = serve(hostile)
    for address in addresses(f"{HOSTILE}-0", f"group-{HOSTILE}"):
        status, body, headers = get(base + address)
        assert status in (200, 404, 422), address
        assert "<script>alert" not in body, address
        assert not re.search(r"<img[^>]*onerror", body), address
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", body), address
        assert "49" not in re.sub(r"[^{}]*", "", body)
        assert not re.search(r"\son\w+=", re.sub(r'"[^"]*"', '""', re.sub(r">[^<]*<", "><", body))), address
        assert not re.search(r"<[^>]+\sstyle=", body), address
        assert "unsafe" not in headers["content-security-policy"]


def test_every_answer_forbids_what_the_pages_do_not_need(serve: Serve, hostile: Path):
    """Scripts and styles from the server itself only, nothing inline, no framing, no sniffing, no caching."""
    base = serve(hostile)
    for address in ("/", "/data/state", "/static/app.js", "/static/nothing.js", "/nothing"):
        _, _, headers = get(base + address)
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", ""])
def test_a_request_that_names_another_machine_is_refused(serve: Serve, hostile: Path, host: str):
    """A page whose name was made to point here reads nothing."""
    status, body, _ = get(serve(hostile) + "/data/state", {"Host": host})
    assert status == 403
    assert "rollouts" not in body


def test_a_script_of_another_site_is_refused(serve: Serve, hostile: Path):
    """A link from elsewhere opens a page; a fetch from elsewhere gets nothing."""
    base = serve(hostile)
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert get(base + "/", {**foreign, "Sec-Fetch-Mode": "navigate"})[0] == 200
    assert get(base + "/", {**foreign, "Sec-Fetch-Mode": "no-cors"})[0] == 403
    assert get(base + "/data/state", {**foreign, "Sec-Fetch-Mode": "cors"})[0] == 403


@pytest.mark.parametrize(
    "name", ["../app.py", "..%2fapp.py", "/etc/passwd", "vendor/../../run.py", "%2e%2e/pages.py", "%00", "a" * 300]
)
def test_static_files_are_those_of_the_folder(serve: Serve, hostile: Path, name: str):
    """No address leads out of the folder of static files."""
    status, body, _ = get(f"{serve(hostile)}/static/{name}")
    assert status == 404
    assert "import" not in body


def test_scripts_and_styles_are_small(hostile: Path):
    """Less than 150 kB of JavaScript is installed, and it names no address but in comments of its authors."""
    static = Path(__file__).parents[2] / "gymdata" / "view" / "static"
    scripts = list(static.rglob("*.js"))
    assert sum(file.stat().st_size for file in scripts) < 150_000
    for file in [f for f in scripts if f.parent == static]:
        assert "http://" not in file.read_text()
        assert "https://" not in file.read_text()


def test_tokens_are_the_recorded_ids(serve: Serve, tmp_path: Path):
    """The token view gets ids, log-probabilities and kinds of turns as they are on disk."""
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, BROKEN)])
    tokens = json.loads(get(serve(run) + "/data/tokens?id=t-0")[1])
    first, second = tokens["turns"]
    assert (first["context"], first["ids"], first["logprob"]) == ([1, 20], [10, 11, 2], [-1.0, -2.0, -3.0])
    assert (second["kind"], second["prefix"], second["parent"]) == ("break", 3, 0)
    assert second["context"] == [99, 2, 30]


def test_changed_tokens_are_not_shown(serve: Serve, tmp_path: Path):
    """A rollout whose tokens do not match their digests shows its messages and the fault, and no tokens."""
    row = rollout("t", 0, 1.0, two_turns(20, 40))
    row["turns"][1]["generation_token_ids"] = [41, 2]
    base = serve(write_run(tmp_path / "run", [row]))
    status, body, _ = get(base + "/rollout?id=t-0")
    assert status == 200
    assert "T209" in body
    assert "question t" in body
    status, body, _ = get(base + "/data/tokens?id=t-0")
    assert status == 422
    assert "T209" in json.loads(body)["error"]


def test_a_break_shows_both_sides(serve: Serve, tmp_path: Path):
    """The page of a break has its code, the tokens of both sides, and the explanation of ``validate --explain``."""
    from gymdata.checks.violations import CODES

    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, BROKEN)])
    status, body, _ = get(serve(run) + "/break?id=t-0&turn=1")
    assert status == 200
    assert "T200" in body
    assert CODES["T200"].explanation.split(";")[0] in body.replace("&#39;", "'")
    marked = re.findall(r'class="t[^"]* dif" title="id (\d+) at (\d+)"', body)
    assert ("11", "3") in marked
    assert ("99", "3") in marked
    assert get(serve(run) + "/break?id=t-0&turn=0")[0] == 404


def test_the_pages_need_the_base_install_only(hostile: Path):
    """Every page is made without torch, transformers or any library that only an extra brings."""
    from gymdata.errors import BROUGHT_BY

    code = f"""
import sys, threading, urllib.request
for name in {sorted(BROUGHT_BY)!r}: sys.modules[name] = None
import uvicorn
from pathlib import Path
from gymdata.urls import address_of, listening_socket
from gymdata.view.app import create_app
from gymdata.view.settings import ViewConfig
with create_app([Path({str(hostile)!r})], ViewConfig()) as app:
    socket = listening_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={{"sockets": [socket]}})
    thread.start()
    for page in {PAGES!r}:
        try:
            print(page, urllib.request.urlopen(address_of(socket) + page).status)
        except urllib.error.HTTPError as error:
            print(page, error.code)
    server.should_exit = True
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert {page: status for page, status in answers.items() if status != "200"} == {"/break?id=none": "404"}


def test_a_rank_is_among_the_recorded_alternatives(serve: Serve, tmp_path: Path):
    """The likeliest token has rank 1; one that is not among the recorded ones comes after all of them."""
    row = rollout("t", 0, 1.0, [([1, 20], [10, 11, 2])])
    likely = [{"id": 5, "log_prob": -0.1}, {"id": 10, "log_prob": -1.0}]
    row["turns"][0]["top_log_probs"] = [likely, likely, [{"id": 2, "log_prob": -3.0}]]
    base = serve(write_run(tmp_path / "run", [row]))
    turn = json.loads(get(base + "/data/tokens?id=t-0")[1])["turns"][0]
    assert turn["rank"] == [2, 3, 1]
    assert turn["top"] == 2
    listed = json.loads(get(base + "/data/token?id=t-0&turn=0&k=0")[1])["alternatives"]
    assert [one["id"] for one in listed] == [5, 10]


def test_the_reward_of_a_turn_stands_with_its_message_and_its_tokens(serve: Serve, tmp_path: Path):
    """A turn that a step gave nothing has no reward there, and 0 is a reward."""
    row = rollout("a", 0, 0.2, two_turns(20, 40))
    row["turns"][0]["reward"] = 0.2
    other = rollout("b", 0, 0.0, two_turns(20, 40))
    other["turns"][1]["reward"] = 0.0
    base = serve(write_run(tmp_path / "run", [row, other]))
    found = {}
    for name in ("a-0", "b-0"):
        data = json.loads(get(f"{base}/data/tokens?id={name}")[1])
        shown = re.findall(r'class="earned">reward ([^<]*)<', get(f"{base}/rollout?id={name}")[1])
        found[name] = ([turn["reward"] for turn in data["turns"]], shown)
    assert found == {"a-0": ([pytest.approx(0.2), None], ["0.2"]), "b-0": ([None, 0.0], ["0"])}


def test_styles_and_scripts_are_served_through_a_symbolic_link(tmp_path: Path) -> None:
    """A package that is reached through a link, as in a linked home, has its styles."""
    package = Path(__file__).parents[2] / "gymdata"
    (tmp_path / "gymdata").symlink_to(package)
    write_run(tmp_path / "run", [rollout("plain", 0, 0.0, two_turns(20, 40))])
    line = """
import sys
from pathlib import Path
from starlette.testclient import TestClient
from gymdata.view.app import create_app
from gymdata.view.settings import ViewConfig
with create_app([Path("run")], ViewConfig()) as app, TestClient(app, base_url="http://localhost") as client:
    print([client.get(f"/static/{name}").status_code for name in ("view.css", "app.js", "../app.py")])
"""
    words = [sys.executable, "-c", line]
    done = subprocess.run(
        words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[200, 200, 404]\n"
